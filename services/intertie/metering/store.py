"""What metering asks of its disk. PostgreSQL in `pg`, a twin in `memory`; one suite holds both to the same answers.

A write verb is one transaction: the change, its events, its audit row, and the mark of what caused it. A repeat finds the mark and changes
nothing; a decision taken on an older revision is `Stale` and is taken again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Protocol

from intertie.contracts.base import EventMeta
from intertie.contracts.identity import AuditQuery, AuditRow, SiteKeyChanged
from intertie.contracts.incident import ReportIncident
from intertie.contracts.link import JournalOpened
from intertie.contracts.usage import Allowance, AllowanceChanged, LostEntries, MeterSpec
from intertie.ids import AttemptId, Digest, JobId, SegmentId, SiteName, TenantName
from intertie.metering.core.closing import Held, Lost, PeriodTold
from intertie.metering.core.evidence import Evidence, SiteKeys
from intertie.metering.core.reckon import Change
from intertie.store import StoreTx

Mark = Callable[[StoreTx], Awaitable[bool]]
"""Marks what caused a write, inside its transaction: False if it was there before, and then nothing else is written."""


def event_mark(meta: EventMeta) -> Mark:
    """The mark of an event: its id."""

    async def mark(tx: StoreTx) -> bool:
        return await tx.first_time(meta)

    return mark


@dataclass(frozen=True, slots=True)
class Totals:
    """The ledger and what waits beside it, counted by the database."""

    postings: int
    sum: Decimal
    quarantined: int
    suspense: int


@dataclass(frozen=True, slots=True)
class Suspended:
    """One segment that waits, as the store knows it; the service says it in words."""

    number: int
    segment: SegmentId
    digest: Digest
    site: SiteName
    attempt: AttemptId
    tenant: TenantName | None
    start: datetime
    end: datetime
    quantity_milli: int
    reason: str
    since: datetime


class MeteringStore(Protocol):
    first_version: int
    """Of this epoch: an allowance that is new begins with it, the events of agreements and settlements count from it."""

    async def lift_versions(self, first: int) -> None:
        """No entity has a version below `first` from here on (`store.first_version`), and what is new begins with it; nothing else changes."""
        ...

    async def load(
        self, attempts: Sequence[AttemptId], *, sites: Collection[SiteName] = (), tenants: Collection[TenantName] = ()
    ) -> list[Evidence]:
        """All that is known of each attempt, in the order asked; of an unknown one, empty evidence.

        sites, tenants: whose keys and agreements the news may need, beyond those that the attempts are known to have.
        """
        ...

    async def save(self, change: Change, mark: Mark | None = None) -> bool:
        """Write what was reckoned. False if the mark was there before. `Stale('metering.changed')` if the attempt has moved on."""
        ...

    async def versions(self, attempts: Sequence[AttemptId]) -> Mapping[AttemptId, int]:
        """The version of each known scheduler record."""
        ...

    async def of_tenant(self, tenant: TenantName, start: datetime, end: datetime, after: str, limit: int) -> list[AttemptId]:
        """Attempts that may have used anything in [start, end), by id."""
        ...

    async def every(self, after: str, limit: int) -> list[AttemptId]:
        """All attempts, by id."""
        ...

    async def waiting(self, after: str, limit: int) -> list[AttemptId]:
        """Attempts with segments in suspense for a reason that news may lift, by id."""
        ...

    async def specs(self, party: str = "") -> list[MeterSpec]:
        """All revisions of all agreements, or of a party's (its own and `*`), oldest first."""
        ...

    async def agree(self, spec: MeterSpec, actor: str) -> None:
        """Add a revision, tell it, audit it. `Stale('metering.changed')` if that revision is there already."""
        ...

    async def set_allowance(self, allowance: Allowance, actor: str) -> None:
        """Replace a tenant's allowance, tell it, audit it."""
        ...

    async def allowances(self) -> list[AllowanceChanged]: ...

    async def learn_key(self, event: SiteKeyChanged, mark: Mark | None = None) -> bool:
        """Keep a site's key beside its former ones, if the event is newer than what is held; whether it was."""
        ...

    async def learn_name(self, job: JobId, name: str, version: int, mark: Mark | None = None) -> None:
        """Keep a job's name, if newer."""
        ...

    async def names(self, jobs: Sequence[JobId]) -> Mapping[JobId, str]: ...

    async def totals(self) -> Totals: ...

    async def keys(self, site: SiteName) -> SiteKeys: ...

    async def note_journal(self, site: SiteName, journal: str, said: JournalOpened, at: datetime, mark: Mark) -> None:
        """Keep that a journal took another's place; said again it changes nothing."""
        ...

    async def note_lost(self, lost: Lost, report: ReportIncident, mark: Mark) -> None:
        """Keep what nobody has, and report it; the same range again changes nothing and reports nothing."""
        ...

    async def lost(self, sites: Collection[SiteName] | None, limit: int) -> list[LostEntries]:
        """Of some sites or of all, newest first."""
        ...

    async def note_period(self, told: PeriodTold, mark: Mark) -> None:
        """Keep a site's word on a period beside its former ones; the same bytes again change nothing."""
        ...

    async def prove_period(self, number: int) -> None:
        """A key came that proves a word."""
        ...

    async def unproven_periods(self, limit: int) -> list[PeriodTold]:
        """Words that no key of their site has proven yet, oldest first."""
        ...

    async def periods(self, site: SiteName | None, period: str | None, limit: int) -> list[PeriodTold]:
        """Newest period first, and of each site and period the newest word first."""
        ...

    async def held(self, site: SiteName, start: datetime, end: datetime) -> Held:
        """What is here of a site's segments that end in (start, end]."""
        ...

    async def suspended(self, site: SiteName | None, segment: str | None, limit: int) -> list[Suspended]:
        """What waits, oldest first."""
        ...

    async def read_audit(self, query: AuditQuery) -> list[AuditRow]: ...
