"""Jobs and attempts: what is asked, what became of it, and what the scheduler tells."""

from __future__ import annotations

from decimal import Decimal
from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from intertie.contracts.base import Contract, Event, Instant, NonNegative, Positive, Text
from intertie.contracts.site import DeviceKind, TaskType
from intertie.contracts.telemetry import DeviceUse
from intertie.ids import AttemptId, DeviceId, Digest, JobId, PoolName, RoundId, SiteName, SpecId, TenantName

Devices = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
"""Of one kind, at once; far above what any federation has, and what every table holds."""


class JobState(StrEnum):
    """The hub's states; `intertie.lifecycle` holds the moves and the five words people see."""

    PENDING = "pending"
    QUEUED = "queued"
    PLACED = "placed"
    SITE_QUEUED = "site_queued"
    STAGING = "staging"
    RUNNING = "running"
    SUSPENDED = "suspended"
    FINISHING = "finishing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    LOST = "lost"


class Cause(StrEnum):
    """Whose doing an unhappy end was. `unknown` is charged to nobody until resolved."""

    JOB = "job"
    SITE = "site"
    PLATFORM = "platform"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


class OnSilence(StrEnum):
    """`if_site_silent`: wait for the site, or run again elsewhere (one result, one payer; not one run)."""

    WAIT = "wait"
    RERUN = "rerun"


class Resources(Contract, frozen=True, kw_only=True):
    """What a job needs, all on one site. GPUs if `gpus` > 0, else CPU slots."""

    gpus: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    gpu_model: str | None = None
    gpu_memory_mib: NonNegative = 0
    interconnect: str | None = None
    slots: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1
    """CPU slots; only counted when no GPU is asked for."""

    @property
    def kind(self) -> DeviceKind:
        return DeviceKind.GPU if self.gpus else DeviceKind.SLOT

    @property
    def count(self) -> int:
        return self.gpus or self.slots


class WorkRef(Contract, frozen=True, kw_only=True):
    """A packed work folder (tar, zstd-free gzip) at the gateway, named by its digest."""

    digest: Digest
    size: NonNegative


class ResultRef(Contract, frozen=True, kw_only=True):
    """The packed declared outputs of one attempt (tar.gz)."""

    digest: Digest
    size: NonNegative
    files: NonNegative


class JobSpec(Contract, frozen=True, kw_only=True):
    """What a user asks for. Environment values are not here: only their names (values travel in `OfferBody.env`)."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    script: Annotated[str, msgspec.Meta(min_length=1, max_length=131_072)]
    """Run by its `#!` line, `/bin/sh` without one, in the unpacked work folder."""
    args: list[str] = []
    env_names: list[str] = []
    resources: Resources = Resources()
    task_type: TaskType = TaskType.BATCH
    wall_s: Annotated[int, msgspec.Meta(ge=1, le=31_536_000)] = 3_600
    outputs: Annotated[list[str], msgspec.Meta(max_length=256)] = []
    """Glob patterns below the work folder; packed when the job ends."""
    work: WorkRef | None = None
    site: SiteName | None = None
    pool: PoolName | None = None
    on_silence: OnSilence = OnSilence.WAIT
    restartable: bool = False
    start_by_s: Annotated[int, msgspec.Meta(ge=1, le=604_800)] = 600
    offering: Annotated[str, msgspec.Meta(max_length=63)] = ""
    """A job offering of `site`: this is a request, which the site's owner accepts or declines."""
    budget: Decimal | None = None
    """Of a request: at most this, at the offering's price."""
    image: Annotated[str, msgspec.Meta(max_length=512)] = ""
    """The container image that it runs in, as `contracts.image` reads it: by registry and digest. Empty: as its site runs jobs."""


class Attribution(Contract, frozen=True, kw_only=True):
    """Who an attempt's usage belongs to and by which agreement; sealed by the scheduler inside the offer, repeated in each segment."""

    tenant: TenantName
    job: JobId
    attempt: AttemptId
    site: SiteName
    pool: PoolName
    spec: SpecId | None = None
    spec_revision: NonNegative = 0


class Rejection(Contract, frozen=True, kw_only=True):
    """One pool that was looked at for a job, and the rule that rejected it, with its numbers."""

    site: SiteName
    pool: PoolName
    rule: str
    """Code such as `accelerator_model`, `no_free_device`, `stale`, `cordoned`, `quota`."""
    text: Text
    needed: str = ""
    found: str = ""


class WaitReason(StrEnum):
    """The one canonical reason why a job does not run. Ordered: the first that applies is told."""

    NOT_ELIGIBLE = "not_eligible"
    NO_SITE = "no_site"
    NO_SITE_FITS = "no_site_fits"
    NO_MAPPING = "no_mapping"
    QUOTA = "quota"
    BUDGET = "budget"
    SITES_SILENT = "sites_silent"
    CORDONED = "cordoned"
    DEVICES_UNHEALTHY = "devices_unhealthy"
    DEVICES_BUSY = "devices_busy"
    BACK_OFF = "back_off"
    OFFERED = "offered"
    SITE_SILENT = "site_silent"
    SITE_QUEUE = "site_queue"
    """Its site has it, in a queue of its own."""


class Waiting(Contract, frozen=True, kw_only=True):
    """Why a job waits, as of one round."""

    reason: WaitReason
    text: Text
    round: RoundId | None = None
    since: Instant
    position: NonNegative = 0
    """1 is next in its queue; 0 if not queued."""
    rejections: list[Rejection] = []


class AttemptRecord(Contract, frozen=True, kw_only=True):
    """One try of a job at one site. All money hangs on attempts."""

    attempt: AttemptId
    job: JobId
    tenant: TenantName
    number: Positive
    epoch: NonNegative
    generation: Positive
    site: SiteName
    pool: PoolName
    devices: list[DeviceId]
    kind: DeviceKind
    account: str
    state: str
    """`offered` · `claimed` · `staging` · `running` · `ended` · `withdrawn` · `refused` · `not_started` · `lost`."""
    why_here: Text
    spec: SpecId | None
    spec_revision: NonNegative
    offered_at: Instant
    claimed_at: Instant | None = None
    started_at: Instant | None = None
    ended_at: Instant | None = None
    outcome: str | None = None
    cause: Cause | None = None
    exit_code: int | None = None
    reason: Text = ""
    native_id: str = ""
    ran_us: NonNegative = 0
    segments: NonNegative = 0
    quantity_milli_us: NonNegative = 0
    last_metering_seq: NonNegative = 0
    islanded: bool = False
    result: ResultRef | None = None
    log_tail: Text = ""
    replaced_by: AttemptId | None = None
    """Its site was silent beyond the lease of `rerun` work, so another attempt was made; if this one still ran, its supervisor has stopped it."""
    lost_by: Instant | None = None
    """The promised date: silent until then, it is closed as `lost`."""
    refined: bool = False
    """It was closed as `lost`, and later evidence has said once how it ended."""
    islanded_submit: bool = False
    """Taken in by the site itself under an islanded allowance."""
    native_state: str = ""
    native_reason: str = ""
    """The site's own scheduler's words, beside ours, and since when."""
    native_at: Instant | None = None
    site_queued_at: Instant | None = None
    suspended_us: NonNegative = 0
    nodes: list[str] = []
    held_devices: list[str] = []
    offering: str = ""
    """A request to this job offering: `offered` means asked, `claimed` accepted, `refused` declined. Its `devices` are names of its own; which
    cards they are is the site's."""
    answer_by: Instant | None = None
    """By when the owner promised an answer."""
    profile_revision: NonNegative = 0
    """Of the pool's declaration by which it was placed; 0: not told."""
    driver: str = ""
    agent_version: str = ""
    """Of the site when it started; empty: not told."""
    image: str = ""
    """The container image, by digest: the one that was asked for, then the one that the site says it runs in (the owner's, where none was asked
    for). Empty: none, or not told."""
    device_use: list[DeviceUse] = []
    """How the devices were used, as the site saw it; empty: nobody looked."""
    version: Positive


class JobRecord(Contract, frozen=True, kw_only=True):
    """A job as people see it. Environment values never appear."""

    job: JobId
    tenant: TenantName
    submitted_by: str
    spec: JobSpec
    state: JobState
    submitted_at: Instant
    queued_at: Instant
    ended_at: Instant | None
    waiting: Waiting | None
    cancel_requested: bool
    attempts: list[AttemptRecord]
    site_silent_since: Instant | None = None
    """Set beside the state while the site that holds the job is not heard."""
    survivor: AttemptId | None = None
    """Chosen once, where more than one attempt could be the job's: a success on disk beats a run."""
    delivered: AttemptId | None = None
    """Whose result the job's is, once it is at the gateway."""
    trace_id: str = ""
    version: Positive


class JobChanged(Event, frozen=True, kw_only=True):
    """A job moved; `state` is where it is now, `cause` why. The script and environment stay at the keeper."""

    TYPE: ClassVar[str] = "io.intertie.job.changed.v1"
    SERVICE: ClassVar[str] = "scheduler"

    job: JobId
    tenant: TenantName
    site: SiteName | None
    name: str
    state: JobState
    previous: JobState | None
    actor: str
    reason: Text
    at: Instant

    @property
    def entity(self) -> str:
        return self.job


class AttemptChanged(Event, frozen=True, kw_only=True):
    """An attempt's record is now this; metering writes holds from it and completes on its counts."""

    TYPE: ClassVar[str] = "io.intertie.attempt.changed.v1"
    SERVICE: ClassVar[str] = "scheduler"

    record: AttemptRecord
    wall_s: Positive

    @property
    def entity(self) -> str:
        return self.record.attempt

    @property
    def tenant_token(self) -> str:
        return self.record.tenant

    @property
    def site_token(self) -> str:
        return self.record.site


class SubmitJob(Contract, frozen=True, kw_only=True):
    """`cmd.scheduler.submit`. The same `client_key` from the same tenant gives the same job; with other content it is a conflict."""

    tenant: TenantName
    spec: JobSpec
    env: dict[str, str] = {}
    client_key: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    dry_run: bool = False


class SubmitReply(Contract, frozen=True, kw_only=True):
    """The job, or with `dry_run` what would happen to it."""

    job: JobRecord | None
    repeated: bool = False
    fits: list[str] = []
    """`site/pool` that could run it now or later."""
    rejections: list[Rejection] = []


class JobQuery(Contract, frozen=True, kw_only=True):
    """`qry.scheduler.job`, `qry.scheduler.explain`, `qry.scheduler.story`: one job; not found if it is not yours."""

    job: JobId


class JobsQuery(Contract, frozen=True, kw_only=True):
    """`qry.scheduler.jobs`: newest first."""

    tenant: TenantName | None = None
    states: list[JobState] = []
    site: SiteName | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 100
    after: JobId | None = None


class JobsReply(Contract, frozen=True, kw_only=True):
    jobs: list[JobRecord]
    more: bool = False


class CancelJob(Contract, frozen=True, kw_only=True):
    """`cmd.scheduler.cancel`: durable intent; `cancelled` is said only when the processes are seen gone."""

    job: JobId
    reason: Text = ""


class PreemptJob(Contract, frozen=True, kw_only=True):
    """`cmd.scheduler.preempt`: stop its attempt for somebody else's sake; restartable work is queued again, and the platform pays what ran."""

    job: JobId
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=4_000)]


class CloseAttempt(Contract, frozen=True, kw_only=True):
    """`cmd.scheduler.close_attempt`: a named person says that an attempt at a silent site is to wait no longer. It becomes `lost` now; later
    evidence may refine it once. Its devices stay counted until the site speaks, unless `site_gone`."""

    attempt: AttemptId
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=4_000)]
    site_gone: bool = False


class SetGrant(Contract, frozen=True, kw_only=True):
    """`cmd.scheduler.set_grant`: what a tenant may use at a site while that site is islanded; `devices` 0 takes it away."""

    tenant: TenantName
    site: SiteName
    kind: DeviceKind
    devices: Devices
    card_hours: Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)] | None = None
    """In all, per absence; None: no bound of its own."""
    valid_days: Annotated[int, msgspec.Meta(ge=1, le=366)] = 30


class GrantRecord(Contract, frozen=True, kw_only=True):
    """An islanded allowance in force."""

    tenant: TenantName
    site: SiteName
    kind: DeviceKind
    devices: NonNegative
    card_hours: int | None
    valid_until: Instant
    set_by: str


class GrantsReply(Contract, frozen=True, kw_only=True):
    """`qry.scheduler.grants`."""

    grants: list[GrantRecord]


class StoryLine(Contract, frozen=True, kw_only=True):
    """One thing that happened to a job: when, who, what, why, by which evidence."""

    at: Instant
    actor: str
    what: str
    state: JobState | None
    why: Text = ""
    attempt: AttemptId | None = None
    evidence: str = ""
    """`entry site/journal/seq`, `round …`, `request …`."""
    trace_id: str = ""
    recorded_at: Instant
    islanded: bool = False


class Story(Contract, frozen=True, kw_only=True):
    job: JobRecord
    lines: list[StoryLine]


class LogsQuery(Contract, frozen=True, kw_only=True):
    """`qry.scheduler.logs`: asks the site; `scheduler.site_silent` if it does not answer."""

    job: JobId
    attempt: AttemptId | None = None
    offset: NonNegative = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=262_144)] = 65_536


class QuotaRecord(Contract, frozen=True, kw_only=True):
    """How many devices of a kind a tenant may hold at once, at a site (or everywhere with site None)."""

    tenant: TenantName
    site: SiteName | None
    kind: DeviceKind
    limit: NonNegative


class SetQuota(Contract, frozen=True, kw_only=True):
    """`cmd.scheduler.set_quota`; `limit` None removes it."""

    tenant: TenantName
    site: SiteName | None = None
    kind: DeviceKind
    limit: Devices | None


class QuotasReply(Contract, frozen=True, kw_only=True):
    """`qry.scheduler.quotas`."""

    quotas: list[QuotaRecord]


class AttemptsQuery(Contract, frozen=True, kw_only=True):
    """`qry.scheduler.attempts`: the snapshot for read models, by attempt id."""

    after: AttemptId | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=500)] = 200


class AttemptSnapshot(Contract, frozen=True, kw_only=True):
    record: AttemptRecord
    wall_s: Positive


class AttemptsReply(Contract, frozen=True, kw_only=True):
    attempts: list[AttemptSnapshot]
    more: bool
