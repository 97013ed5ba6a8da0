"""The site link: what an agent and a keeper say to each other on a lane, and the entries and instructions that travel in it.

A lane is one request/reply, `Sync` → `Synced`, on `intertie.v1.up.<site>.<lane>.sync` (the agent says `up.<lane>.sync`; the server puts the
site's name in). Entries and sealed payloads travel as the exact bytes that were journalled and signed: `msgspec.Raw` and text keep them so.
"""

from __future__ import annotations

from decimal import Decimal
from enum import StrEnum
from typing import Annotated

import msgspec

from intertie.contracts.base import PREFIX, Contract, Instant, NonNegative, Positive, Text
from intertie.contracts.call_offerings import OfferingTold
from intertie.contracts.drill import DrillConsent, DrillSignature, SiteDrill
from intertie.contracts.job import Attribution, Cause, JobSpec, ResultRef
from intertie.contracts.site import DeviceKind, JobOffering, PoolInventory, PoolProfile
from intertie.contracts.telemetry import DeviceUse
from intertie.ids import (
    AttemptId,
    DeviceId,
    Digest,
    InstructionId,
    JobId,
    JournalId,
    PoolName,
    SessionId,
    SiteName,
    SpecId,
    TenantName,
)

LINK_VERSION = 3
"""1: the spine. 2: places, new journals, leases, islanded grants, borders of periods. 3: what a site's own queue and scheduler say."""
OLDEST_VERSION = max(1, LINK_VERSION - 2)
"""A keeper answers agents down to here, and says nothing to them that their version does not know."""


class Lane(StrEnum):
    """The three keepers an agent speaks to."""

    REGISTRY = "registry"
    SCHEDULER = "scheduler"
    METERING = "metering"


def sync_subject(site: SiteName | str, lane: Lane) -> str:
    """Where the keeper listens; `*` for every site."""
    return f"{PREFIX}.up.{site}.{lane}.sync"


def local_sync_subject(lane: Lane) -> str:
    """Where the agent, in its own account, speaks."""
    return f"up.{lane}.sync"


class Sealed(Contract, frozen=True, kw_only=True):
    """Exact bytes and a signature over them. `payload` is JSON text; verify before parsing."""

    payload: str
    signer: str
    """Public key (nkey form) of the site (`A…`/`U…`) or name of the service that signed."""
    signature: str
    """Ed25519 over the UTF-8 bytes of `payload`, base64url without padding."""


class Clocks(Contract, frozen=True, kw_only=True):
    """A host's clocks, read together at the sending of a sync."""

    utc: Instant
    boot_s: float
    kernel_boot: str
    offset_s: float | None = None
    """The site's own estimate of hub minus site wall clock, from whole round trips; believed only within what the keeper saw itself."""
    error_s: float | None = None


# --- entries: what the site says -------------------------------------------------------------------------------------------------------


class EntryBase(Contract, frozen=True, kw_only=True, tag_field="kind"):
    """One journalled fact. `seq` is gapless per lane; `at` is the site's wall clock when it was journalled."""

    seq: Positive
    at: Instant
    islanded: bool = False
    """True if the lane was silent when this happened."""


class AttemptEntry(EntryBase, frozen=True, kw_only=True):
    """A fact about one attempt. The triple (attempt, epoch, generation) names it beyond doubt."""

    attempt: AttemptId
    job: JobId
    epoch: NonNegative
    generation: NonNegative


class Claimed(AttemptEntry, frozen=True, kw_only=True, tag="claimed"):
    """The site takes the offer and has reserved its devices. It acts only on the go."""

    devices: list[DeviceId]


class OfferRefused(AttemptEntry, frozen=True, kw_only=True, tag="refused"):
    """The site does not take the offer. `fault` false (`device_busy`, `displaced`) costs the site nothing."""

    code: str
    text: Text
    fault: bool


class NotStarted(AttemptEntry, frozen=True, kw_only=True, tag="not_started"):
    """A claimed attempt was given up before it started (too late, withdrawn, stopped, rebooted): it has no process and never will."""

    code: str
    text: Text


class Staging(AttemptEntry, frozen=True, kw_only=True, tag="staging"):
    """The go is here; work is being fetched."""


class SiteQueued(AttemptEntry, frozen=True, kw_only=True, tag="site_queued"):
    """The site's own queue has it, and it waits there. Said only to a keeper of link version 3 or later."""

    native_id: str
    cluster: str = ""
    native_state: str = ""
    native_reason: str = ""
    text: Text = ""


class NativeSeen(AttemptEntry, frozen=True, kw_only=True, tag="native_seen"):
    """What the site's own scheduler says of it has changed: its words stand beside our state, with their age. `suspended` moves it."""

    native_id: str
    native_state: str
    native_reason: str = ""
    suspended: bool = False
    nodes: list[str] = []
    restarts: NonNegative = 0
    text: Text = ""


class Started(AttemptEntry, frozen=True, kw_only=True, tag="started"):
    """The job's process exists. `started` is the supervisor's record just before exec."""

    started: Instant
    devices: list[DeviceId]
    native_id: str
    account: str
    nodes: list[str] = []
    """Where it runs, if that is more than the agent's own machine."""
    held_devices: list[str] = []
    """The cards themselves, where `devices` are rights of a pool behind a native queue."""
    clock_offset_s: float = 0.0
    """Estimate of hub minus site wall clock that anchors this attempt, and its error."""
    driver: str = ""
    agent_version: str = ""
    clock_error_s: float = 0.0
    image: str = ""
    """The container image that it runs in, by digest: the job's own, or the owner's; empty: none."""


class ExitSeen(Contract, frozen=True, kw_only=True):
    """How work ended, as what ran it saw it: a node says it to its head, which judges the end. A site says its judgement to the hub."""

    certain: bool
    stopped_for: str = ""
    """`asked`, `wall_limit`, `lease_ended`; empty: nobody stopped it."""
    left_behind: NonNegative = 0
    refused_errno: int | None = None
    refused_file: str = ""
    refused_text: str = ""
    rebooted: bool = False
    out_of_memory: bool = False


class Ended(AttemptEntry, frozen=True, kw_only=True, tag="ended"):
    """Every process of the attempt was seen gone. Carries the counts that make its metering complete."""

    outcome: Annotated[str, msgspec.Meta(pattern="^(succeeded|failed|cancelled|unknown)$")]
    cause: Cause | None
    """Whose doing a failure was; None when it succeeded."""
    exit_code: int | None
    """None if no exit code exists (never executed, or its supervisor was lost)."""
    signal: int | None
    reason: Text
    started: Instant | None
    ended: Instant
    ran_us: NonNegative
    """CLOCK_BOOTTIME between start and end, in microseconds."""
    segments: NonNegative
    quantity_milli_us: NonNegative
    """Sum over segments of thousandths × microseconds."""
    last_metering_seq: NonNegative
    result: ResultRef | None = None
    """Outputs kept at the site until the gateway holds them; the job is `finishing` until `ResultStored`."""
    log_bytes: NonNegative = 0
    log_tail: Text = ""
    cpu_user_s: float = 0.0
    cpu_system_s: float = 0.0
    max_rss_kib: NonNegative = 0
    native_state: str = ""
    native_reason: str = ""
    suspended_us: NonNegative = 0
    """Within `ran_us`: held its place and did not run."""
    device_use: list[DeviceUse] = []
    """Of the devices that it held alone and that were looked at; empty: nobody looked."""
    seen: ExitSeen | None = None
    """Between the node and the head of a pool of machines alone."""


class ResultStored(AttemptEntry, frozen=True, kw_only=True, tag="result_stored"):
    """The attempt's outputs are at the gateway, or could not be packed (`result` None, with the reason)."""

    result: ResultRef | None
    text: Text = ""


class StopAnswered(AttemptEntry, frozen=True, kw_only=True, tag="stop_answered"):
    """A stop reached the site. `unknown_attempt` leaves a tombstone: that attempt will be refused if it is ever offered."""

    answer: Annotated[str, msgspec.Meta(pattern="^(stopping|already_ended|not_started|unknown_attempt)$")]
    instruction: InstructionId


class SettingsApplied(EntryBase, frozen=True, kw_only=True, tag="settings_applied"):
    """The site works by this settings revision from now on."""

    revision: NonNegative


class HeldAttempt(Contract, frozen=True, kw_only=True):
    """An attempt of the hub's as a site holds it when it opens a new journal."""

    attempt: AttemptId
    job: JobId
    epoch: NonNegative
    generation: NonNegative
    state: Annotated[str, msgspec.Meta(pattern="^(claimed|staging|running|ended|not_started)$")]
    devices: list[DeviceId] = []
    started: Instant | None = None
    native_id: str = ""
    offer: Sealed | None = None
    """The signed `OfferBody` without values of the environment: a hub that lost the job adopts it from this. None for islanded work, whose
    `IslandedSubmit` is said again."""


class PastJournal(Contract, frozen=True, kw_only=True):
    """A journal that lay in this data folder before, as far as one lane is concerned."""

    journal: JournalId
    forgotten_through: NonNegative
    """Its entries up to here exist at the keeper alone."""
    digest: Digest
    """The chain's digest at `forgotten_through`."""
    lost_from: NonNegative = 0
    """Above 0: from this entry on even the keeper lacks what was forgotten; a `LostRange` follows that says so."""


class JournalOpened(EntryBase, frozen=True, kw_only=True, tag="journal_opened"):
    """The first entry, on each lane, of a journal that replaces another. What the old one still held is said again after it, numbered anew.

    It is the way out of `forked`, `agent_restored` and `hub_restored`, and the beginning of a journal that was copied, moved, damaged or made anew.
    """

    previous: JournalId | None
    """None: this data folder has never had one (the agent's first start, or its journal is gone without a trace)."""
    why: Annotated[str, msgspec.Meta(pattern="^(first|forked|agent_restored|hub_restored|moved|damaged|gone)$")]
    place: str
    kernel_boot: str
    same_place: bool = True
    """The old journal lay here, on this host, in this folder: whatever it had started and is not held now, is surely gone."""
    held: list[HeldAttempt] = []
    """On the scheduler lane: every attempt of the hub's that this site knows of, after its job folders and native queue were searched."""
    past: list[PastJournal] = []
    """The journals before this one, oldest first: a keeper that lacks what one of them was told to forget says so before it takes this one."""


class LostRange(EntryBase, frozen=True, kw_only=True, tag="lost_range"):
    """Entries `first` to `last` of a journal exist nowhere any more: the keeper lost them by a restore, this site had been told to forget them."""

    journal: JournalId
    first: Positive
    last: Positive
    digest_last: Digest
    """The chain's digest at `last`, which this site still knows."""
    sealed: Sealed
    """`journal`, lane, `first`, `last` and `digest_last` as JSON, under the site's key: a person may have to answer for it."""


class HeldTold(EntryBase, frozen=True, kw_only=True, tag="held"):
    """What this site holds of the hub's, told once for each epoch of the scheduler: a hub that was restored adopts what it lost from this, and reads
    again what it could not understand without it. One list may take several entries, all of one transaction."""

    epoch: NonNegative
    """The scheduler's, which this answers."""
    place: str
    kernel_boot: str
    held: list[HeldAttempt] = []
    """Also what has ended here within the time that entries are kept, settled or not; the latest attempt of a job comes first."""
    complete: bool = False
    """The last of them: nothing is left to tell for this epoch."""


class IslandedSubmit(AttemptEntry, frozen=True, kw_only=True, tag="islanded_submit"):
    """A tenant's work that this site took in by its islanded allowance, while the hub was silent. `job` and `attempt` were minted here."""

    tenant: TenantName
    pool: PoolName
    devices: list[DeviceId]
    account: str
    spec: JobSpec
    submitted_by: str
    """The local account that asked."""
    grant: Sealed
    """The scheduler's sealed `IslandedGrant`, which is also the attribution of its segments."""


SchedulerEntry = (
    Claimed
    | OfferRefused
    | NotStarted
    | Staging
    | SiteQueued
    | NativeSeen
    | Started
    | Ended
    | ResultStored
    | StopAnswered
    | SettingsApplied
    | JournalOpened
    | LostRange
    | IslandedSubmit
    | HeldTold
)


class SegmentClosed(EntryBase, frozen=True, kw_only=True, tag="segment"):
    """One usage segment: `sealed.payload` is a `contracts.usage.Segment`, signed with the site's key."""

    sealed: Sealed


class PeriodClosed(EntryBase, frozen=True, kw_only=True, tag="period_closed"):
    """A period of the settlement time zone is over here: all its segments are journalled before this, and so many they were.

    Counts are of segments whose `end` lies in the period, of hub attempts only. Proof of completeness, islanded or not.
    """

    sealed: Sealed
    """A `contracts.usage.PeriodCount`, under the site's key."""


class CallClosed(EntryBase, frozen=True, kw_only=True, tag="call"):
    """One call of an offering is over: `sealed.payload` is a `contracts.calls.CallRecord`, signed with the site's key. Said only to a keeper of
    link version 3 or later."""

    sealed: Sealed


class NativeAccounting(EntryBase, frozen=True, kw_only=True, tag="native_accounting"):
    """A part of what the site's own accounting holds of a day: `sealed.payload` is a `contracts.accounting.NativeDay`, under the site's key. Said only
    to a keeper of link version 3 or later."""

    sealed: Sealed


MeteringEntry = SegmentClosed | NativeAccounting | PeriodClosed | CallClosed | JournalOpened | LostRange


class Inventory(EntryBase, frozen=True, kw_only=True, tag="inventory"):
    """What the site's pools hold now. Journalled when it changed; the heartbeat itself is the sync."""

    pools: list[PoolInventory]


class ProfileDeclared(EntryBase, frozen=True, kw_only=True, tag="profile"):
    """The owner declared a pool (new, or a new revision)."""

    profile: PoolProfile


class JobOfferingsTold(EntryBase, frozen=True, kw_only=True, tag="job_offerings"):
    """All job offerings of the site as they are now: one that is not among them is offered no more. Said only to a keeper of link version 3 or
    later."""

    offerings: list[JobOffering]


class LendingPaused(EntryBase, frozen=True, kw_only=True, tag="lending_paused"):
    """The owner's red button was pressed, or let go. The hub shows it as the owner's right and offers nothing meanwhile."""

    paused: bool
    until: Instant | None = None
    """It ends by itself then; None: when the owner says so."""
    by: str = ""
    reason: Text = ""


class SiteCondition(EntryBase, frozen=True, kw_only=True, tag="condition"):
    """Whether this site can take new work at all, and why not: a full disk, a journal at its bound, a journal that was opened anew."""

    accepting: bool
    code: str = ""
    text: Text = ""
    self_stop: bool = True
    """Supervisors here stop `rerun` work at the end of its lease without the agent; without this none is placed here."""


class DrillConsented(EntryBase, frozen=True, kw_only=True, tag="drill_consented"):
    """The owner allowed drills at the site's own door, or took that back."""

    consent: DrillConsent


class DrillRefused(EntryBase, frozen=True, kw_only=True, tag="drill_refused"):
    """A cut that the settings asked for was not made."""

    drill: str
    code: str
    text: Text


class DrillReported(EntryBase, frozen=True, kw_only=True, tag="drill_reported"):
    """The site's own account of a drill, signed by the site's key."""

    report: SiteDrill
    signature: DrillSignature


class OfferingsTold(EntryBase, frozen=True, kw_only=True, tag="offerings"):
    """All call offerings of the site as they are now: one that is not among them is offered no more. Said only to a keeper of link version 3 or
    later."""

    offerings: list[OfferingTold]


class ProbeTold(EntryBase, frozen=True, kw_only=True, tag="probe"):
    """A probe of a pool ran to its end. Said only to a keeper of link version 3 or later."""

    pool: PoolName
    sealed: Sealed
    """A `contracts.probe.ProbeReport`, under the site's key."""


RegistryEntry = (
    ProbeTold
    | OfferingsTold
    | JobOfferingsTold
    | Inventory
    | ProfileDeclared
    | LendingPaused
    | SiteCondition
    | JournalOpened
    | LostRange
    | DrillConsented
    | DrillRefused
    | DrillReported
)


# --- instructions: what the hub says, on the scheduler lane ------------------------------------------------------------------------------


class OfferBody(Contract, frozen=True, kw_only=True):
    """All that a site needs to run one attempt; nothing is left to choose at the far end. Travels sealed by the scheduler."""

    job: JobId
    attempt: AttemptId
    number: Positive
    epoch: NonNegative
    generation: Positive
    tenant: TenantName
    site: SiteName
    pool: PoolName
    account: str
    """Mapped local account; empty on a single-user site, where only the owner's own tenant is accepted."""
    spec: JobSpec
    env: dict[str, str]
    """Values go to a 0600 file at the site and to nowhere else."""
    devices: list[DeviceId]
    start_within_s: Positive
    """The go must be taken within this time of sending the sync that brought the offer."""
    start_by_s: Positive
    """The run must begin within this time of the go."""
    submit_within_s: NonNegative = 0
    """At a site with a queue of its own: it must be in that queue within this time of the go. 0: as `start_by_s` says."""
    attribution: Sealed
    """A sealed `Attribution`; repeated in every segment."""
    traceparent: str = ""
    client_key: str = ""
    submitted_by: str = ""
    after: list[AttemptId] = []
    """Attempts at this site that must be seen gone before this one starts; waited for until `start_by`. Their devices may be named here already."""
    lease_s: NonNegative = 0
    """Above 0 for `rerun` work: its supervisor stops it this long after the last sync whose answer renewed it."""
    offering: str = ""
    """Not empty: a request to this job offering. The owner decides, the site chooses the cards, and `devices` are only so many names for them."""
    budget: Decimal | None = None
    """Of a request: at most this, at the offering's price."""
    answer_within_s: NonNegative = 0
    """Of a request: promised by the owner. No answer is due before that."""


class InstructionBase(Contract, frozen=True, kw_only=True, tag_field="kind"):
    """One thing the hub asks of a site. Repeated until its answer entry is on disk at the hub."""

    id: InstructionId
    number: Positive
    """Per site, compared as (epoch, number) with the site's `instruction_mark`."""
    epoch: NonNegative


class Offer(InstructionBase, frozen=True, kw_only=True, tag="offer"):
    """Would you run this? Answered by `Claimed` or `OfferRefused`."""

    attempt: AttemptId
    sealed: Sealed
    adoption: Sealed | None = None
    """The body once more, with `env` emptied: what a site keeps and may tell again (`HeldAttempt`). Only where there are values of the environment,
    and only if both fit one message; a site that has neither this nor an empty `env` keeps nothing."""


class Go(InstructionBase, frozen=True, kw_only=True, tag="go"):
    """Your claim is on disk here: start. Answered by `Started`, `NotStarted` or `Ended`."""

    attempt: AttemptId
    job: JobId
    generation: Positive
    journal: JournalId | None = None
    """The journal that holds the claim. Another journal's claim starts nothing. None from a hub of link version 1."""
    attempt_epoch: NonNegative | None = None
    """The attempt's own: an instruction that is said again after a restore is of a later one. None: the instruction's."""


class Withdraw(InstructionBase, frozen=True, kw_only=True, tag="withdraw"):
    """The offer no longer stands, claimed or not. Answered by `NotStarted`, or `Started` if it was too late to say so."""

    attempt: AttemptId
    job: JobId
    generation: Positive
    attempt_epoch: NonNegative | None = None
    """As of `Go`."""


class Stop(InstructionBase, frozen=True, kw_only=True, tag="stop"):
    """End this attempt and no other. Answered by `StopAnswered`, then `Ended`."""

    attempt: AttemptId
    job: JobId
    generation: Positive
    reason: Text
    grace_s: NonNegative = 10
    cause: Cause = Cause.CANCELLED
    """Whose doing the end is: `cancelled` by the tenant, `preempted` by owner or operator, `platform` when another attempt replaced this one."""


class Settle(InstructionBase, frozen=True, kw_only=True, tag="settle"):
    """The hub holds all of this attempt: its folder may go. Answered by nothing; a repeat is harmless."""

    attempt: AttemptId


Instruction = Offer | Go | Withdraw | Stop | Settle


class AccountMapping(Contract, frozen=True, kw_only=True):
    """A tenant's local account at a site."""

    tenant: TenantName
    account: str


class IslandedGrant(Contract, frozen=True, kw_only=True):
    """What a tenant may use at a site while that site is islanded; sealed by the scheduler. The hub counts it as used at a silent site."""

    grant: str
    """`<site>/<tenant>/<kind>/<revision>`."""
    tenant: TenantName
    site: SiteName
    kind: DeviceKind
    devices: NonNegative
    """At once, the hub's own attempts of this tenant at this site included. There is no borrowing."""
    quantity_milli_us: NonNegative | None = None
    """Thousandths of a device × microseconds in all, per absence; None: bounded by `devices` and `valid_until` only."""
    valid_until: Instant
    spec: SpecId | None = None
    spec_revision: NonNegative = 0


class SiteSettings(Contract, frozen=True, kw_only=True):
    """What a site works by, connected or not. Each part sealed by its keeper."""

    revision: NonNegative
    site: SiteName
    mappings: list[AccountMapping] = []
    cordoned_pools: list[PoolName] = []
    telemetry_beat_s: float = 1.0
    lane_beat_s: float = 5.0
    at: Instant | None = None
    """When this revision was made: how old prices, allowances and mappings are."""
    grants: list[Sealed] = []
    """A sealed `IslandedGrant` each."""
    specs: list[Sealed] = []
    """The site's own agreements with the platform (a `contracts.usage.MeterSpec` each), for its statement preview; no tenant's price."""
    time_zone: str = "Asia/Shanghai"
    """Settlement time zone: where periods end."""
    drill: str = ""
    """`<id>/<seconds>/<start>/<consent>` of a drill that is planned or on, empty otherwise: the agent closes its own connection from `start` (UTC, the
    hub's clock) for so many seconds. consent: `site`, given at the site, or `token`, given by the owner at the hub."""


# --- the exchange ------------------------------------------------------------------------------------------------------------------------


class Sync(Contract, frozen=True, kw_only=True):
    """agent → keeper. `entries` start at `first_seq` and continue the chain whose digest is `digest_before`."""

    v: Positive = LINK_VERSION
    site: SiteName
    session: SessionId
    """New at each start of the agent."""
    place: str = ""
    """Where the journal lies: a digest of host and folder. A restart in the same place and kernel boot goes on with the session before."""
    lane: Lane
    nonce: Positive
    """New for each try; the answer repeats it."""
    taken_nonce: NonNegative
    """The last answer taken: shows the keeper that its answers arrive."""
    journal: JournalId
    first_seq: Positive
    digest_before: Digest
    forgotten_through: NonNegative = 0
    """Entries up to here may be gone from the journal, because the keeper called them safe. A keeper that asks for one of them was restored."""
    entries: list[msgspec.Raw]
    at_head: bool
    """True if nothing is left to send after these entries."""
    running: list[AttemptId] | None = None
    """At head only: every attempt that holds devices, as of the last entry."""
    instruction_mark: NonNegative = 0
    instruction_epoch: NonNegative = 0
    """The highest epoch of the keeper that this site knows; of `instruction_mark`, too, unless `mark_epoch` names another."""
    mark_epoch: NonNegative | None = None
    """The epoch in which `instruction_mark` was given, where that is an older one: no number of the new epoch is on disk here yet."""
    settings_revision: NonNegative = 0
    clocks: Clocks


class LaneState(StrEnum):
    """What a keeper makes of a site's journal."""

    OK = "ok"
    BEHIND = "behind"
    """Send again from `ack_through + 1`."""
    FORKED = "forked"
    AGENT_RESTORED = "agent_restored"
    HUB_RESTORED = "hub_restored"
    SUPERSEDED = "superseded"
    """Another session of this site took over: this agent starts nothing, keeps what runs, and says so until a person restarts it."""
    CONTESTED = "contested"
    """Sessions from different places took over from each other three times in ten minutes: no instruction to either."""
    VERSION = "version"
    """The site speaks a newer version than this keeper: upgrade the hub; what runs goes on."""
    BUSY = "busy"


class Synced(Contract, frozen=True, kw_only=True):
    """keeper → agent, after the commit."""

    v: Positive = 1
    """The keeper's version; 1 where it is not said."""
    nonce: Positive
    state: LaneState = LaneState.OK
    ack_through: NonNegative
    safe_through: NonNegative
    instructions: list[Instruction] = []
    more: bool = False
    lease_s: NonNegative = 0
    """Scheduler lane only: `rerun` work of this site may run on for this long, counted from the sending of the sync that this answers."""
    leases_ms: dict[AttemptId, NonNegative] = {}
    """Of single attempts, in milliseconds from the same sending: a head gives its nodes what is left of what the hub gave."""
    epoch: NonNegative
    settings: Sealed | None = None
    """Sent when the site's revision is older."""
    settings_revision: NonNegative = 0
    clock: Instant
    quarantined: NonNegative = 0
    """Entries of this site that the keeper holds but cannot interpret."""
    journal: JournalId | None = None
    """`hub_restored` only: the journal that `ack_through` is of; None if this keeper knows none of the site's."""


# --- ask: read-only questions ------------------------------------------------------------------------------------------------------------


class AskLog(Contract, frozen=True, kw_only=True, tag_field="kind", tag="log"):
    """Bytes of an attempt's log from `offset`."""

    attempt: AttemptId
    offset: NonNegative = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=262_144)] = 65_536


class AskStatus(Contract, frozen=True, kw_only=True, tag_field="kind", tag="status"):
    """How the site is now."""


class Ask(Contract, frozen=True, kw_only=True):
    """hub → site on `down.ask` (`intertie.v1.down.<site>.ask`); losing it costs an answer."""

    id: str
    question: AskLog | AskStatus


class LogChunk(Contract, frozen=True, kw_only=True, tag_field="kind", tag="log"):
    """Whole characters only: `offset` may be later than asked, `next_offset` is where to go on."""

    attempt: AttemptId
    offset: NonNegative
    next_offset: NonNegative
    text: str
    total: NonNegative
    ended: bool
    """True if no more will ever come."""


class SiteStatus(Contract, frozen=True, kw_only=True, tag_field="kind", tag="status"):
    """A site's own view of itself."""

    site: SiteName
    agent_started: Instant
    islanded_since: Instant | None
    running: list[AttemptId]
    waiting: NonNegative
    journal_entries: NonNegative
    version: str
    paused_until: Instant | None = None
    paused: bool = False


class AskRefused(Contract, frozen=True, kw_only=True, tag_field="kind", tag="refused"):
    """The question has no answer here."""

    code: str
    text: Text


class Answer(Contract, frozen=True, kw_only=True):
    """site → hub on `up.answer` (`intertie.v1.up.<site>.answer`)."""

    id: str
    answer: LogChunk | SiteStatus | AskRefused


def ask_subject(site: SiteName | str) -> str:
    return f"{PREFIX}.down.{site}.ask"


def nudge_subject(site: SiteName | str) -> str:
    """A message here asks the site for an early sync: of the lane whose name it holds, of every lane if it is empty."""
    return f"{PREFIX}.down.{site}.nudge"


def answer_subject(site: SiteName | str) -> str:
    return f"{PREFIX}.up.{site}.answer"


__all__ = ["Attribution"]  # re-exported for those who open a seal
