"""Sites and pools: what the registry keeps and tells."""

from __future__ import annotations

from decimal import Decimal
from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from intertie.contracts.base import Contract, Event, Instant, NonNegative, Positive, Text
from intertie.contracts.facts import SiteFacts
from intertie.contracts.image import PoolImages
from intertie.contracts.observed import PoolSeen
from intertie.ids import DeviceId, PoolName, SiteName, TenantName


class SiteKind(StrEnum):
    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    MACHINES = "machines"
    ENDPOINT = "endpoint"


class AccessMode(StrEnum):
    """managed: the hub decides where work lands. service: the owner decides and promises a capability."""

    MANAGED = "managed"
    SERVICE = "service"


class TaskType(StrEnum):
    TRAIN = "train"
    FINE_TUNE = "fine-tune"
    INFERENCE = "inference"
    BATCH = "batch"


class Phase(StrEnum):
    """Onboarding phase of a pool."""

    CANDIDATE = "candidate"
    PILOT = "pilot"
    PARALLEL = "parallel"
    PRODUCTION = "production"
    SUSPENDED = "suspended"
    CLOSED = "closed"


class Freshness(StrEnum):
    """How old the hub's view of a site is. Only `fresh` gets work; `unknown` says nothing about what runs there."""

    FRESH = "fresh"
    STALE = "stale"
    UNKNOWN = "unknown"


class DeviceKind(StrEnum):
    GPU = "gpu"
    SLOT = "slot"


RIGHT = "lent-"
"""How the id of a device begins that is a right to queue for one, at a site with a queue of its own."""


def plain_model(name: str) -> str:
    """NVML's product name as profiles write it: `NVIDIA A100-SXM4-80GB` → `A100-SXM4-80GB`."""
    return name.removeprefix("NVIDIA ").strip()


class Device(Contract, frozen=True, kw_only=True):
    """One thing that is lent whole: a GPU by UUID, or a CPU slot (`slot-N`)."""

    id: DeviceId
    kind: DeviceKind
    model: str = ""
    memory_mib: NonNegative = 0
    node: str = ""


class Lendable(Contract, frozen=True, kw_only=True):
    """What a pool lends: how many devices at most, and in which hours (empty windows: always)."""

    devices: NonNegative
    windows: list[str] = []
    """`HH:MM-HH:MM` in the site's time zone."""


class PoolProfile(Contract, frozen=True, kw_only=True):
    """What the owner declares a pool to be. Accelerator model, count, memory and interconnect are mandatory for a pool of GPUs."""

    pool: PoolName
    mode: AccessMode = AccessMode.MANAGED
    accelerator: str
    """GPU model, such as `A100-SXM4-80GB`; `none` for a pool of CPU slots, said on purpose."""
    count: Positive
    """Devices in the pool: GPUs, or CPU slots where accelerator is `none`."""
    memory_mib: NonNegative
    """Memory of one accelerator; of the node where accelerator is `none`."""
    interconnect: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """`nvlink`, `pcie`, `infiniband` …; `none` said on purpose."""
    task_types: Annotated[list[TaskType], msgspec.Meta(min_length=1)]
    lendable: Lendable
    storage: str = ""
    devices: list[DeviceId] = []
    """The cards of this pool by UUID, where the site has several pools of one model; empty: those of its model."""
    share_milli: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1000
    """Thousandths of a card that one device of this pool is, where they are slices of cards: by compute or by memory, as the owner's agreements say.
    What is used is measured in these; the model names the slice, so that either share can be told again."""
    revision: NonNegative = 0
    declared_by: str = ""


class DeviceState(StrEnum):
    """free · ours: held by a federation job · local: held by the owner's own work through us ·
    foreign: busy with processes that are not ours · lost: fell off the bus · unknown: could not be read."""

    FREE = "free"
    OURS = "ours"
    LOCAL = "local"
    FOREIGN = "foreign"
    LOST = "lost"
    UNKNOWN = "unknown"


class DeviceObserved(Contract, frozen=True, kw_only=True):
    """A device and what holds it, as the site saw it."""

    device: Device
    state: DeviceState
    reason: Text = ""
    """Why it is not to be had, where that is more than its state: its node is not heard or cordoned, it is reserved. Never a person's name."""
    reserved_until: Instant | None = None
    """Its owner keeps it for somebody until then; it is `foreign` meanwhile."""


class NativeLoad(Contract, frozen=True, kw_only=True):
    """What a site's own scheduler runs and queues that did not come through us: numbers, never names."""

    running: NonNegative = 0
    waiting: NonNegative = 0
    devices_busy: NonNegative = 0
    """Of the pool's kind."""
    observed_at: Instant | None = None
    """The site's wall clock."""
    every_s: float = 0.0
    """Seconds between looks, as the owner set them or the scheduler's slowness made them; 0: not a native queue."""
    rpc_per_minute: float = 0.0
    """What looking costs the site's scheduler."""


class PoolInventory(Contract, frozen=True, kw_only=True):
    """A pool as the site sees it."""

    pool: PoolName
    devices: list[DeviceObserved]
    running: NonNegative
    waiting: NonNegative
    accepting: bool = True
    """False while the owner has paused lending."""
    paused_until: Instant | None = None
    native: NativeLoad | None = None
    """Of a pool behind a queue of the site's own. Its devices are then rights to queue for one card each (`lent-N`), not cards: which card a job
    holds is said when it starts. Cards in other hands, or on nodes that are down, make so many of them `foreign` or `lost`."""
    facts: SiteFacts | None = None
    """What a script would find here, as far as the owner or the site's own tools tell it; None: nothing is told."""
    seen: PoolSeen | None = None
    """What the site's tools say that the pool has; None: nothing was read."""
    images: PoolImages | None = None
    """Which images that a job names run here; None: not told, so none is sent."""


class ModeDecision(Contract, frozen=True, kw_only=True):
    """Managed or service, as decided for one pool: two questions, their answers, who gave them and when. The newest is in force, older ones are kept."""

    mode: AccessMode
    outsider_decides: bool | None
    """May an outsider decide what runs here? None: it was not asked."""
    response_time_held: bool | None
    """Can the response time be held? None: it was not asked."""
    decided_by: str
    decided_at: Instant
    reason: Text = ""
    at_joining: bool = False
    """Taken from the owner's own declaration when the pool joined; nobody was asked beside that."""


class DowntimeEffect(StrEnum):
    """full: nothing runs meanwhile, and nothing is begun that would run into it. reduced: work goes on, slower or at some risk."""

    FULL = "full"
    REDUCED = "reduced"


class Downtime(Contract, frozen=True, kw_only=True):
    """A window in which a pool is down, declared beforehand. It lifts by itself."""

    id: str
    start: Instant
    end: Instant
    effect: DowntimeEffect = DowntimeEffect.FULL
    planned: bool
    """Declared at least 24 h ahead: no promise is broken by it."""
    reason: Text
    declared_by: str
    declared_at: Instant


LONGEST_ANSWER_S = 31 * 86_400
"""A request that is not answered within a month is no promise."""


class JobOffering(Contract, frozen=True, kw_only=True):
    """What an owner takes job requests for, in a pool of service access. The hub sees this and no more: neither the owner's rule, nor what is free,
    nor who waits."""

    name: Annotated[str, msgspec.Meta(pattern="^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$")]
    pool: PoolName
    title: Annotated[str, msgspec.Meta(max_length=200)] = ""
    max_devices: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    """Of one request."""
    devices: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    """Of the pool at once, all requests of this offering together: nothing else lends them."""
    max_wall_s: Annotated[int, msgspec.Meta(ge=1, le=31_536_000)]
    task_types: Annotated[list[TaskType], msgspec.Meta(min_length=1)]
    price_per_hour: Decimal
    """What the owner asks for one device-hour; what a tenant pays is in their agreement with the platform."""
    currency: Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")] = "CNY"
    answer_within_s: Annotated[int, msgspec.Meta(ge=1, le=LONGEST_ANSWER_S)]
    """Promised: accepted or declined within this."""
    by_hand: bool = False
    """A person of the site answers each request."""


class PoolRecord(Contract, frozen=True, kw_only=True):
    """All that the registry knows of a pool; freshness and its age stand beside, never inside, the facts."""

    site: SiteName
    pool: PoolName
    kind: SiteKind
    profile: PoolProfile
    phase: Phase
    cordoned: bool
    draining: bool
    cordon_reason: Text
    freshness: Freshness
    last_heard: Instant | None
    inventory: PoolInventory | None
    """Last known; its age is that of `inventory_at`."""
    inventory_at: Instant | None
    decision: ModeDecision | None = None
    """The mode that was decided; None: a pool from before modes were decisions, of which the declaration alone speaks."""
    tenants: list[TenantName] = []
    """While pilot or parallel: only these are placed here; empty: every tenant that is mapped."""
    downtimes: list[Downtime] = []
    """Those that are not over, by start."""
    offerings: Annotated[list[JobOffering], msgspec.Meta(max_length=64)] = []
    """Job offerings of this pool; what they may take at once is not lent a second time."""
    unproven: Text = ""
    """Why its capability is not proven, where the hub asks for proof; empty: it is, or no proof is asked for."""
    version: Positive

    @property
    def offered_devices(self) -> int:
        """What the owner's offerings may take of it at once."""
        return sum(one.devices for one in self.offerings)

    @property
    def mode(self) -> AccessMode | None:
        """The mode in force: what was decided and what the owner declares, where they agree. None: they differ, and nothing new is begun."""
        if self.decision is not None and self.decision.mode is not self.profile.mode:
            return None
        return self.profile.mode


class SiteRecord(Contract, frozen=True, kw_only=True):
    """A joined site."""

    site: SiteName
    kind: SiteKind
    title: str
    owner: str
    single_user: bool
    """The agent is not root: jobs run as its own user, and only the owner's own tenant is accepted."""
    owner_tenant: str
    freshness: Freshness
    joined_at: Instant
    last_heard: Instant | None
    hears_us: bool
    """Our answers arrive there: the taken nonce moves."""
    clock_offset_s: float | None
    agent_version: str
    paused: bool = False
    """The owner has pressed the red button: their right, and no fault."""
    paused_until: Instant | None = None
    paused_reason: Text = ""
    accepting: bool = True
    """False while the site cannot take new work (disk, journal); `condition` says why."""
    condition: Text = ""
    self_stop: bool = False
    """`rerun` work may be placed here: its supervisors stop it without the agent."""
    lanes: dict[str, str] = {}
    """Lanes that stand still: `forked`, `superseded`, `contested` …; empty when all is well."""
    left_at: Instant | None = None
    drill_passed_at: Instant | None = None
    """The last cut that was rehearsed here and whose books agreed."""
    version: Positive


class PoolChanged(Event, frozen=True, kw_only=True):
    """A pool's record is now this."""

    TYPE: ClassVar[str] = "io.intertie.pool.changed.v1"
    SERVICE: ClassVar[str] = "registry"

    record: PoolRecord

    @property
    def entity(self) -> str:
        return f"{self.record.site}/{self.record.pool}"

    @property
    def site_token(self) -> str:
        return self.record.site


class SiteChanged(Event, frozen=True, kw_only=True):
    """A site's record is now this (joined, freshness changed, drained …)."""

    TYPE: ClassVar[str] = "io.intertie.site.changed.v1"
    SERVICE: ClassVar[str] = "registry"

    record: SiteRecord
    cause: Text = ""

    @property
    def entity(self) -> str:
        return self.record.site

    @property
    def site_token(self) -> str:
        return self.record.site


class SitesQuery(Contract, frozen=True, kw_only=True):
    """`qry.registry.sites`: sites and pools, those that fit the given capability only."""

    site: SiteName | None = None
    accelerator: str | None = None
    task_type: TaskType | None = None
    after: str = ""
    """Where the answer before ended (its `next`); empty: from the beginning."""


class SitesReply(Contract, frozen=True, kw_only=True):
    """Sites by name, each with its pools; as many as one message carries. A pool of a page before may follow without its site."""

    sites: list[SiteRecord]
    pools: list[PoolRecord]
    next: str = ""
    """There is more: ask again with `after` = this. Empty: that was all."""
    drill_max_age_days: NonNegative = 0
    """Policy: a site without a passed drill younger than this says so; 0: none is told."""


class RegisterSite(Contract, frozen=True, kw_only=True):
    """`cmd.registry.register_site`: identity tells the registry that a site has joined (idempotent by site)."""

    site: SiteName
    kind: SiteKind
    title: str
    owner: str
    single_user: bool
    owner_tenant: str
    agent_version: str
    pools: list[PoolProfile]


class SiteLeft(Contract, frozen=True, kw_only=True):
    """`cmd.registry.site_left`: identity tells the registry that a site has left for good (idempotent)."""

    site: SiteName
    at: Instant


class CordonPool(Contract, frozen=True, kw_only=True):
    """`cmd.registry.cordon`: no new work for a pool (or the whole site); `drain` also waits for what runs to end. `on` false lifts it."""

    site: SiteName
    pool: PoolName | None = None
    on: bool = True
    drain: bool = False
    reason: Text
