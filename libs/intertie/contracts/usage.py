"""Usage and money: what a site measured, by which agreement it is rated, and what the ledger holds.

Durations are integers of microseconds, quantities integers of thousandths, money is `Decimal` with a currency beside it. No float, ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from intertie.contracts.base import Contract, Event, Instant, NonNegative, Positive, Text
from intertie.contracts.call_offerings import DEFAULT_CALL_PAYS, CallLine, CallPays, CallPrice
from intertie.contracts.job import Cause
from intertie.contracts.link import Sealed
from intertie.contracts.site import DeviceKind
from intertie.ids import AttemptId, DeviceId, JobId, PoolName, SegmentId, SiteName, SpecId, StatementId, TenantName

Currency = Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")]


class UsagePhase(StrEnum):
    """Which clock a segment belongs to; they are kept apart and each has its own rule in the meter spec."""

    SITE_QUEUE = "site_queue"
    STAGE_IN = "stage_in"
    RUN = "run"
    SUSPENDED = "suspended"
    STAGE_OUT = "stage_out"


class Anchor(Contract, frozen=True, kw_only=True):
    """The one fixing of UTC per attempt: all its segments are this plus CLOCK_BOOTTIME since."""

    utc: Instant
    boot_s: float
    kernel_boot: str
    offset_s: float = 0.0
    """Estimated hub minus site wall clock when anchored."""
    error_s: float = 0.0


class Segment(Contract, frozen=True, kw_only=True):
    """A measured fact: these devices were held for this attempt during [start, end)."""

    id: SegmentId
    site: SiteName
    pool: PoolName
    attempt: AttemptId
    phase: UsagePhase
    kind: DeviceKind
    model: str = ""
    devices: list[DeviceId]
    quantity_milli: NonNegative
    """Thousandths of a device, all devices together."""
    start: Instant
    end: Instant
    last: bool
    """No later segment of this attempt will come."""
    cause: str = ""
    """Why it was closed: `ended`, `period`, `suspended`, `resumed`."""
    islanded: bool = False
    anchor: Anchor
    attribution: Sealed | None
    """The scheduler's sealed `Attribution`; None only for work that had none, which waits in suspense."""


class PeriodCount(Contract, frozen=True, kw_only=True):
    """What a site says of a period that is over: so much it has journalled, whether or not all of it has arrived.

    A segment that ends exactly at the border, as one that is cut there does, is of the period that ends: start < segment end <= end.
    """

    site: SiteName
    period: str
    """`2026-12`."""
    start: Instant
    end: Instant
    attempts: NonNegative
    segments: NonNegative
    quantity_milli_us: NonNegative


class WhoPays(StrEnum):
    TENANT = "tenant"
    SITE = "site"
    PLATFORM = "platform"
    NOBODY = "nobody"
    """Listed, disputed, until the cause is resolved."""


DEFAULT_PAYS: Mapping[str, WhoPays] = {
    "succeeded": WhoPays.TENANT,
    "job": WhoPays.TENANT,
    "cancelled": WhoPays.TENANT,
    "preempted": WhoPays.PLATFORM,
    "site": WhoPays.SITE,
    "platform": WhoPays.PLATFORM,
    "unknown": WhoPays.NOBODY,
}
"""Who pays which end, unless an agreement says otherwise: a tenant pays its own work and its own faults, nobody an unknown."""


class Price(Contract, frozen=True, kw_only=True):
    """Price of one device-hour."""

    kind: DeviceKind
    model: str = ""
    """Empty: any model of that kind without a price of its own."""
    per_hour: Decimal


class MeterSpec(Contract, frozen=True, kw_only=True):
    """A versioned agreement between two named parties: what is counted, when the clock runs, who pays what end."""

    spec: SpecId
    revision: Positive
    title: str
    provider: str
    """`platform`, or a site's name."""
    consumer: str
    """A tenant's name, `platform`, or `*` for every tenant without an agreement of its own."""
    currency: Currency
    prices: Annotated[list[Price], msgspec.Meta(min_length=1)]
    charged_phases: list[UsagePhase] = msgspec.field(default_factory=lambda: [UsagePhase.RUN])
    """Phases whose clock costs money; the others are shown with the clause and amount 0."""
    pays: dict[str, WhoPays] = msgspec.field(default_factory=lambda: dict(DEFAULT_PAYS))
    """By outcome `succeeded`, else by cause."""
    rounding: Decimal = Decimal("0.0001")
    """Money is rounded half-even to this, once per attempt and payer, on the running total."""
    minimum_us: NonNegative = 0
    """An attempt that ran at all is charged at least this long, once."""
    time_zone: str = "Asia/Shanghai"
    effective_from: Instant
    agreed_by: list[str] = []
    call_prices: list[CallPrice] = []
    """Of call offerings; one without a price here is not priced: its calls wait."""
    call_pays: dict[str, CallPays] = msgspec.field(default_factory=lambda: dict(DEFAULT_CALL_PAYS))
    """By a call's outcome."""


class Formula(Contract, frozen=True, kw_only=True):
    """How an amount came about, to be read by a person: 6.418 s × 1 slot × ¥6.00 per card-hour = ¥0.0107."""

    duration_us: NonNegative
    quantity_milli: NonNegative
    per_hour: Decimal
    currency: Currency
    unrounded: Decimal
    amount: Decimal
    phase: UsagePhase
    kind: DeviceKind
    model: str
    clause: str
    """Which words of which spec: `spec-… rev 1: run is charged; succeeded → tenant`."""
    text: str


class Charge(Contract, frozen=True, kw_only=True):
    """A rated fact of one attempt: one line per phase and price."""

    attempt: AttemptId
    job: JobId
    tenant: TenantName
    site: SiteName
    spec: SpecId
    spec_revision: Positive
    payer: WhoPays
    amount: Decimal
    currency: Currency
    start: Instant
    end: Instant
    formula: Formula
    islanded: bool = False


class AttemptBook(Contract, frozen=True, kw_only=True):
    """What metering holds of one attempt: for the three books, and for `complete`."""

    attempt: AttemptId
    job: JobId | None
    tenant: TenantName | None
    site: SiteName
    segments: NonNegative
    quantity_milli_us: NonNegative
    run_us: NonNegative
    first_start: Instant | None
    last_end: Instant | None
    ended: bool
    complete: bool
    missing: Text = ""
    """What is missing and from whom, when not complete."""
    outcome: str | None
    cause: Cause | None
    hold: Decimal
    posted: Decimal
    in_suspense: NonNegative
    charges: list[Charge]
    state: str = ""
    """The scheduler's word: `running`, `ended`, `lost` …; empty while it has said nothing."""
    because: Annotated[str, msgspec.Meta(pattern="^(|replaced|lost)$")] = ""
    """Why its own end does not say who pays. `replaced`: `other_attempt` took its place, since the hub could not hear the site, or since the one it
    had replaced was the job's result after all; `lost`: closed at the promised date, so nobody pays until evidence comes."""
    other_attempt: AttemptId | None = None
    refined: bool = False
    """It was closed as `lost`, and evidence that came later says how it ended: what follows is an adjustment."""
    grant: str = ""
    """The islanded allowance under which the site took it in by itself."""
    grant_expired: bool = False
    """Part of it was used after that allowance had ended: recorded, shown, never refused."""


class SitePeriod(Contract, frozen=True, kw_only=True):
    """What is here of a site's usage in a period that is over, against what the site says that it journalled."""

    site: SiteName
    period: str
    state: Annotated[str, msgspec.Meta(pattern="^(complete|missing|differs|not_said)$")]
    """`complete`; `missing`: so many segments have not come; `differs`: all came, and they are not what was counted; `not_said`: the site has
    not said that the period is over there."""
    missing_segments: NonNegative = 0
    said_at: Instant | None = None
    """When the site's word came."""
    last_heard: Instant | None = None
    """When the site last spoke of usage at all: since then it is silent."""


class LostEntries(Contract, frozen=True, kw_only=True):
    """Money evidence that nobody has any more: lost here by a restore, forgotten at the site because it was called safe."""

    site: SiteName
    journal: str
    first: Positive
    last: Positive
    said_at: Instant
    proven: bool
    """Under a valid key of the site."""

    @property
    def entries(self) -> int:
        return self.last - self.first + 1


class BeyondGrant(Contract, frozen=True, kw_only=True):
    """Use beyond an islanded allowance: posted like any other, and listed."""

    grant: str
    site: SiteName
    why: Annotated[str, msgspec.Meta(pattern="^(devices|quantity|expired)$")]
    """More at once than allowed, the hub's own attempts of the tenant included; more in all during one absence; after its last day."""
    beyond_milli_us: Positive
    """Thousandths of a device × microseconds."""


class StatementLine(Contract, frozen=True, kw_only=True):
    """One job of a statement, its attempts below."""

    job: JobId
    name: str
    amount: Decimal
    usage_milli_us: NonNegative
    attempts: list[AttemptBook]


class Statement(Contract, frozen=True, kw_only=True):
    """A period's charges of one tenant. `provisional` while its period is open."""

    statement: StatementId
    tenant: TenantName
    period: str
    """`2026-12`."""
    start: Instant
    end: Instant
    time_zone: str
    currency: Currency
    provisional: bool
    total: Decimal
    usage_milli_us: NonNegative
    lines: list[StatementLine]
    paid_by_others: Decimal = Decimal(0)
    disputed: Decimal = Decimal(0)
    incomplete: list[str] = []
    """Attempts that ran in this period and are not complete: what is missing, from whom."""
    in_suspense: NonNegative = 0
    sites: list[SitePeriod] = []
    """Of a period that is over: each site where something of this tenant ran, and whether all of its usage is here."""
    lost: list[LostEntries] = []
    """What may be missing for good, of those sites."""
    beyond: list[BeyondGrant] = []
    """Use beyond the islanded allowances."""
    more_after: str = ""
    """Lines go on after this job: ask again with `after`. All sums are of the whole statement."""
    calls: list[CallLine] = []
    """Calls of offerings, per offering and day; their amounts are in the sums above."""
    at: Instant


class StatementQuery(Contract, frozen=True, kw_only=True):
    """`qry.metering.statement`; an empty period is the current one of the tenant's time zone."""

    tenant: TenantName
    period: str = ""
    after: str = ""
    """A job: lines after it only."""


class BookQuery(Contract, frozen=True, kw_only=True):
    """`qry.metering.books`: what metering holds of a job's attempts."""

    attempts: Annotated[list[AttemptId], msgspec.Meta(max_length=500)]


class BooksReply(Contract, frozen=True, kw_only=True):
    books: list[AttemptBook]


class AgreeSpec(Contract, frozen=True, kw_only=True):
    """`cmd.metering.agree_spec`: a new agreement, or a new revision of the one between the same two parties."""

    title: str
    provider: str
    consumer: str
    currency: Currency
    prices: Annotated[list[Price], msgspec.Meta(min_length=1)]
    charged_phases: list[UsagePhase] = msgspec.field(default_factory=lambda: [UsagePhase.RUN])
    pays: dict[str, WhoPays] | None = None
    rounding: Decimal = Decimal("0.0001")
    minimum_us: NonNegative = 0
    time_zone: str = "Asia/Shanghai"
    effective_from: datetime | None = None
    call_prices: list[CallPrice] = []
    call_pays: dict[str, CallPays] | None = None


class SpecsQuery(Contract, frozen=True, kw_only=True):
    """`qry.metering.specs`; all of a party, or all."""

    party: str = ""


class SpecsReply(Contract, frozen=True, kw_only=True):
    specs: list[MeterSpec]


class SpecAgreed(Event, frozen=True, kw_only=True):
    """A revision of an agreement is in force from its date; the scheduler cites it in attributions."""

    TYPE: ClassVar[str] = "io.intertie.spec.agreed.v1"
    SERVICE: ClassVar[str] = "metering"

    record: MeterSpec

    @property
    def entity(self) -> str:
        return self.record.spec


class Allowance(Contract, frozen=True, kw_only=True):
    """What the scheduler may spend for a tenant without asking; `amount` None is without limit."""

    tenant: TenantName
    currency: Currency
    amount: Decimal | None
    valid_until: Instant | None = None


class AllowanceChanged(Event, frozen=True, kw_only=True):
    """The scheduler's spending allowance for a tenant is now this."""

    TYPE: ClassVar[str] = "io.intertie.allowance.changed.v1"
    SERVICE: ClassVar[str] = "metering"

    tenant: TenantName
    record: Allowance

    @property
    def entity(self) -> str:
        return f"allowance/{self.tenant}"


class SetAllowance(Contract, frozen=True, kw_only=True):
    """`cmd.metering.set_allowance`."""

    tenant: TenantName
    amount: Decimal | None


class AttemptSettled(Event, frozen=True, kw_only=True):
    """An attempt is complete: everything it used is posted and its hold released."""

    TYPE: ClassVar[str] = "io.intertie.settlement.completed.v1"
    SERVICE: ClassVar[str] = "metering"

    attempt: AttemptId
    job: JobId
    tenant: TenantName
    site: SiteName
    amount: Decimal
    currency: Currency
    payer: WhoPays
    segments: NonNegative
    quantity_milli_us: NonNegative
    at: Instant

    @property
    def entity(self) -> str:
        return self.attempt


class MeteringSnapshotReply(Contract, frozen=True, kw_only=True):
    """`qry.metering.snapshot`: the scheduler's read model of agreements and allowances."""

    specs: list[SpecAgreed]
    allowances: list[AllowanceChanged]


class LedgerCheck(Contract, frozen=True, kw_only=True):
    """`qry.metering.check`: the ledger's own proof, to the operator. Every figure but the counts should be zero."""

    postings: NonNegative
    sum: Decimal
    closed_with_hold: NonNegative
    open_without_hold: NonNegative
    quarantined: NonNegative
    suspense_segments: NonNegative
    incomplete: list[AttemptId] = []
    differing: list[AttemptId] = []
    """Attempts whose postings are not what their segments rate to now; at most 100."""
    text: Text = ""
    lost: list[LostEntries] = []
    """Money evidence that nobody has, newest first; at most 100."""
    periods: list[SitePeriod] = []
    """Periods of which a site's own count does not agree with what is here, newest first; at most 100."""
    calls_waiting: NonNegative = 0
    """Calls of offerings that are not settled: `intertie calls --state waiting`."""
    calls_differing: NonNegative = 0
    """Calls whose postings are not what their records rate to now."""


class SuspendedSegment(Contract, frozen=True, kw_only=True):
    """A segment that waits, and for what."""

    segment: SegmentId
    digest: str
    """Tells two contents of one segment id apart."""
    site: SiteName
    attempt: AttemptId
    tenant: TenantName | None
    start: Instant
    end: Instant
    quantity_milli: NonNegative
    reason: str
    text: Text
    since: Instant
    needs_person: bool
    """No news can lift it; `release` can, where a person may decide it."""


class SuspenseQuery(Contract, frozen=True, kw_only=True):
    """`qry.metering.suspense`: oldest first."""

    site: SiteName | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=500)] = 100


class SuspenseReply(Contract, frozen=True, kw_only=True):
    segments: list[SuspendedSegment]


class ReleaseSegment(Contract, frozen=True, kw_only=True):
    """`cmd.metering.release_suspense`: a named person decides that a segment counts although a rule holds it back. The segment stays as it is."""

    segment: SegmentId
    digest: str = ""
    """Needed only where two contents of this id wait."""
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=4_000)]
