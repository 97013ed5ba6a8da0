"""What a lane's keeper needs of its disk, without the words of a service's own transactions: those are in `tables`.

A hub's service keeps its lanes on PostgreSQL; the head of a pool of machines keeps its nodes' on SQLite, and has no other database.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

from intertie.contracts.base import decode
from intertie.contracts.incident import ReportIncident
from intertie.contracts.link import Lane
from intertie.errors import Stale
from intertie.ids import Digest, JournalId, SiteName
from intertie.link.keeper import NewEntry, SiteRow

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LaneEntry:
    """One entry on disk here: the exact bytes that the site journalled."""

    site: SiteName
    lane: Lane
    journal: JournalId
    seq: int
    digest: Digest
    raw: bytes
    received_at: datetime

    def read(self, kind: type[T]) -> T:
        """The entry as a contract (`entry.read(Claimed | Started | …)`); `Refused('contract.invalid')` sends it to quarantine."""
        return decode(self.raw, kind, what=f"entry {self.seq} of {self.site}/{self.lane}")


def out_of_turn(entry: LaneEntry) -> Stale:
    return Stale(
        "lane.out_of_turn", f"entry {entry.seq} of {entry.site}/{entry.lane} was interpreted before, or an earlier one is still open"
    )


class Turn(Protocol):
    """One transaction over the rows of some sites, committed when its block ends. A site in neither `rows` nor `busy` is new."""

    @property
    def rows(self) -> Mapping[SiteName, SiteRow]:
        """Locked until commit."""
        ...

    @property
    def busy(self) -> frozenset[SiteName]:
        """Locked by somebody else at this moment."""
        ...

    async def digest(self, site: SiteName, journal: JournalId, seq: int) -> Digest | None:
        """The stored digest of an entry; None if it is not kept here."""
        ...

    async def ends(self, site: SiteName, journals: Sequence[JournalId]) -> Mapping[JournalId, int]:
        """The last entry of each of these journals; those of which nothing is here are left out."""
        ...

    async def save(self, rows: Sequence[SiteRow], entries: Mapping[SiteName, Sequence[NewEntry]], faults: Sequence[ReportIncident]) -> None:
        """Write all of it, one statement per table. `Stale` if a new site was written by another copy meanwhile."""
        ...


class KeeperTables(Protocol):
    """All verbs raise `Unavailable` if the store is away: then nothing is answered."""

    def turn(self, lane: Lane, sites: Sequence[SiteName]) -> AbstractAsyncContextManager[Turn]:
        """Lock the rows of `sites` that nobody holds, without waiting."""
        ...

    async def beat(self, lane: Lane, rows: Sequence[tuple[SiteRow, SiteRow]]) -> frozenset[SiteName]:
        """Idle syncs: rows as they were last written by this copy of the keeper, and as they are to be. Writes those that nobody has written since
        and nobody holds, in one transaction, and says which; only what an idle sync changes."""
        ...

    async def sites_with_open_entries(self, lane: Lane) -> Sequence[SiteName]: ...

    async def open_entries(self, lane: Lane, site: SiteName, limit: int) -> Sequence[LaneEntry]:
        """Entries neither interpreted nor in quarantine, in order; those of journals before the current one come first."""
        ...

    async def quarantine(self, entry: LaneEntry, error: str, report: ReportIncident) -> None:
        """Set an entry aside, in order, and report it, in one transaction. `Stale` as for `mark_interpreted`."""
        ...

    async def report(self, report: ReportIncident) -> None:
        """Report a fault that changes no row."""
        ...
