"""The port of a keeper's lane tables: what it needs of the disk. PostgreSQL in `pg`, a twin in `memory`, one suite for both.

An entry is first received (`turn`, by the keeper) and later interpreted by the service, which marks it in the transaction of its own change:

```python
async def claimed(self, entry: LaneEntry, said: Claimed) -> None:
    async with self.db.transaction() as tx:
        await self.lanes.mark_interpreted(tx, entry)      # first: raises Stale if somebody did it, or if an earlier one is still open
        await tx.run(Q.claim, said.attempt, …)
```
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
from intertie.store import StoreTx

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


class LaneTables(Protocol):
    """All verbs raise `Unavailable` if the store is away: then nothing is answered."""

    def turn(self, lane: Lane, sites: Sequence[SiteName]) -> AbstractAsyncContextManager[Turn]:
        """Lock the rows of `sites` that nobody holds, without waiting."""
        ...

    async def beat(self, lane: Lane, rows: Sequence[tuple[SiteRow, SiteRow]]) -> frozenset[SiteName]:
        """Idle syncs: rows as they were last written by this copy of the keeper, and as they are to be. Writes those that nobody has written since
        and nobody holds, in one transaction, and says which; only what an idle sync changes."""
        ...

    async def site(self, lane: Lane, site: SiteName) -> SiteRow | None: ...

    async def sites(self, lane: Lane) -> Sequence[SiteRow]:
        """Every site that ever spoke on this lane: for the judge of silence, which watches `heard` grow."""
        ...

    async def highest_epoch_told(self) -> int:
        """The highest epoch of this service that any site said it knows, on any lane; 0 if none spoke. `hub restored` goes above it."""
        ...

    async def sites_with_open_entries(self, lane: Lane) -> Sequence[SiteName]: ...

    async def open_entries(self, lane: Lane, site: SiteName, limit: int) -> Sequence[LaneEntry]:
        """Entries neither interpreted nor in quarantine, in order; those of journals before the current one come first."""
        ...

    async def mark_interpreted(self, tx: StoreTx, entry: LaneEntry) -> None:
        """In the service's own transaction, before its change. `Stale('lane.out_of_turn')` if the entry was marked before, or an earlier one of
        its journal is still open: so none is interpreted twice and order is kept, however many copies of a keeper there are."""
        ...

    async def quarantine(self, entry: LaneEntry, error: str, report: ReportIncident) -> None:
        """Set an entry aside, in order, and report it, in one transaction. `Stale` as for `mark_interpreted`."""
        ...

    async def read_again(self, tx: StoreTx, lane: Lane, site: SiteName, code: str) -> int:
        """In the service's own transaction: what was set aside of a site with this code stands open again, as if it had just come; how many."""
        ...

    async def let_go(self, tx: StoreTx, lane: Lane, site: SiteName, errors: Sequence[str]) -> int:
        """In the service's own transaction: what was set aside of a site with exactly these words waits for nobody any more, and is not read again;
        how many."""
        ...

    async def report(self, report: ReportIncident) -> None:
        """Report a fault that changes no row."""
        ...
