"""What a planning round is given and what it gives back. All of it is immutable; tuples, so that a snapshot can be hashed and replayed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from intertie.contracts.identity import MappingRecord
from intertie.contracts.image import PoolImages
from intertie.contracts.job import QuotaRecord, Rejection, Resources, WaitReason
from intertie.contracts.site import AccessMode, DeviceKind, DeviceState, Freshness, JobOffering, Phase, PoolProfile, TaskType
from intertie.contracts.usage import MeterSpec
from intertie.ids import AttemptId, DeviceId, JobId, PoolName, SiteName, SpecId, TenantName

# --- in ----------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device as it may be judged now. `live` is true only for telemetry that was sampled and received within the freshness limit;
    a device that is not live gets no work, whatever was last known of it (law 2)."""

    id: DeviceId
    kind: DeviceKind
    state: DeviceState
    live: bool
    node: str = ""
    reserved_until: datetime | None = None
    """Its owner keeps it for somebody until then. It is well, and not to be had."""


@dataclass(frozen=True, slots=True)
class Down:
    """A declared window in which a pool is down."""

    start: datetime
    end: datetime
    why: str


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool with everything a rule may look at. Reachability stands beside the facts, never inside them."""

    site: SiteName
    pool: PoolName
    profile: PoolProfile
    phase: Phase
    freshness: Freshness
    heard: bool
    """The site was heard on the scheduler lane within the silence limit, and hears our answers."""
    caught_up: bool
    """The scheduler lane of the site was at head with this leader, and its journal continues ours."""
    last_heard: datetime | None
    cordoned: bool = False
    draining: bool = False
    cordon_reason: str = ""
    accepting: bool = True
    lending_now: bool = True
    """Inside one of the owner's lending windows (or there are none)."""
    single_user: bool = False
    owner_tenant: str = ""
    devices: tuple[DeviceView, ...] = ()
    back_off_until: datetime | None = None
    back_off_why: str = ""
    paused: bool = False
    """The owner has pressed the red button: their right."""
    pause_told: str = ""
    """Until when and why, in words."""
    condition: str = ""
    """Why the site takes no work at all (a full disk, a journal at its bound); empty: it does."""
    self_stop: bool = False
    """Supervisors there stop `rerun` work without the agent."""
    unproven: str = ""
    """Why its capability is not proven, where that is asked for."""
    one_node: bool = False
    """A pool of machines: one run lives on one node there."""
    mode: AccessMode | None = AccessMode.MANAGED
    """In force; None: what was decided and what the owner declares differ."""
    tenants: tuple[TenantName, ...] = ()
    """While pilot or parallel: these alone; empty: every tenant that is mapped."""
    downtimes: tuple[Down, ...] = ()
    """Windows in which nothing runs there, by start."""
    offerings: tuple[JobOffering, ...] = ()
    """What its owner takes requests for."""
    images: PoolImages | None = None
    """Which images that a job names run there, as the site told; None: it has not told."""

    @property
    def name(self) -> str:
        return f"{self.site}/{self.pool}"

    def offering(self, name: str) -> JobOffering | None:
        return next((one for one in self.offerings if one.name == name), None)


@dataclass(frozen=True, slots=True)
class Avoided:
    """A site that one job keeps away from for a while."""

    site: SiteName
    until: datetime
    why: str


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that may be placed."""

    job: JobId
    tenant: TenantName
    resources: Resources
    task_type: TaskType
    wall_s: int
    queued_at: datetime
    site: SiteName | None = None
    pool: PoolName | None = None
    rerun: bool = False
    """It may be placed again while its first run is out of sight."""
    avoided: tuple[Avoided, ...] = ()
    offering: str = ""
    """Not empty: a request to this job offering; its owner decides, and chooses the cards."""
    budget: Decimal | None = None
    """Of a request: at most this, at the offering's price."""
    unsure: tuple[SiteName, ...] = ()
    """Sites that may run it without our knowing, since the hub was restored and they have not told yet."""
    image: str = ""
    """The container image that it names; empty: none."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Devices that an attempt holds, whatever the site last said of them."""

    attempt: AttemptId
    tenant: TenantName
    site: SiteName
    pool: PoolName
    kind: DeviceKind
    devices: tuple[DeviceId, ...]
    counted: bool = True
    """Against its tenant's quota. What was replaced or lost holds its devices, and nobody's quota."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a silent site may give a tenant by its islanded allowance, beyond what the tenant is known to hold there. It counts as used."""

    tenant: TenantName
    site: SiteName
    kind: DeviceKind
    devices: int


@dataclass(frozen=True, slots=True)
class Budget:
    """What a tenant may still spend by its allowance. `amount` None is without limit."""

    tenant: TenantName
    currency: str
    amount: Decimal | None
    valid_until: datetime | None
    committed: Decimal
    """Spent since the allowance was set, plus the ceiling of what is live (devices × wall-time limit × price)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything one round knows. Nothing that is not in here can influence a decision."""

    queue: tuple[QueuedJob, ...]
    pools: tuple[PoolView, ...]
    holdings: tuple[Holding, ...] = ()
    mappings: tuple[MappingRecord, ...] = ()
    quotas: tuple[QuotaRecord, ...] = ()
    budgets: tuple[Budget, ...] = ()
    specs: tuple[MeterSpec, ...] = ()
    reserved: tuple[Reserved, ...] = ()


# --- out ---------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """Offer this job these devices. Nothing is left to choose at the far end."""

    job: JobId
    tenant: TenantName
    site: SiteName
    pool: PoolName
    kind: DeviceKind
    devices: tuple[DeviceId, ...]
    account: str
    spec: SpecId | None
    spec_revision: int
    why: str
    rejections: tuple[Rejection, ...]
    """Why not the other pools."""
    profile_revision: int = 0
    """Of the pool's declaration that was judged."""
    offering: str = ""
    """A request: `devices` are only names for so many cards."""
    answer_within_s: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why one queued job was not placed: the one canonical reason, with every pool's rejection behind it."""

    job: JobId
    reason: WaitReason
    text: str
    position: int
    """1 is next in the queue."""
    rejections: tuple[Rejection, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What the round found, for the people who ask why."""

    waiting: tuple[Verdict, ...]
    not_examined: int
    """Jobs left for the next round because this one's batch was full."""


@dataclass(frozen=True, slots=True)
class Plan:
    decisions: tuple[Decision, ...]
    report: Report
