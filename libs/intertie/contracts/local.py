"""The owner's own door: what `intertie local` and the agent say to each other over the unix socket `agent.sock` (HTTP, JSON).

    POST /v1/jobs               LocalSubmit → LocalJob
    GET  /v1/jobs               → LocalJobs
    GET  /v1/jobs/{job}         → LocalJob
    GET  /v1/jobs/{job}/log     ?offset= → LocalLog
    POST /v1/jobs/{job}/cancel  → LocalJob
    GET  /v1/status             → LocalStatus
    POST /v1/pause              LocalPause → LocalPaused
    POST /v1/resume             → LocalPaused
    POST /v1/lent/{attempt}/reclaim  LocalReclaim → LentWork
    GET  /v1/statement          ?period=2026-12 → LocalStatement
    POST /v1/leave              LocalLeave → LocalLeaving
    GET  /v1/leave              → LocalLeaving
    POST /v1/leave/end          → LocalLeaving; the agent ends

Who calls is what the kernel says of the other end of the socket. An error is a `contracts.base.Problem`.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

import msgspec

from intertie.contracts.base import Contract, Instant, NonNegative, Positive, Text
from intertie.contracts.drill import DrillConsent, Seconds
from intertie.contracts.link import Sealed
from intertie.contracts.site import DeviceKind, PoolInventory
from intertie.ids import AttemptId, DeviceId, JobId, PoolName, SiteName, TenantName


class LocalSubmit(Contract, frozen=True, kw_only=True):
    """Run this here, now or when devices are free."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    script: Annotated[str, msgspec.Meta(min_length=1, max_length=131_072)]
    """Run by its `#!` line, `/bin/sh` without one, in `cwd`."""
    cwd: Annotated[str, msgspec.Meta(pattern="^/", max_length=4_096)]
    env: dict[str, str] = {}
    slots: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1
    gpus: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    wall_s: Positive | None = None
    """None: no limit but a year."""
    as_user: str = ""
    """Only root may name another user than itself."""
    tenant: TenantName | None = None
    """Work of this tenant, taken while islanded within its allowance. It runs in its own folder, as the tenant's account: `cwd` is not used."""


class LocalJob(Contract, frozen=True, kw_only=True):
    """A local job as its user sees it: `waiting` · `preparing` · `running` · `ended`."""

    job: JobId
    name: str
    user: str
    word: str
    pool: PoolName
    devices: list[DeviceId]
    submitted: Instant
    started: Instant | None = None
    ended: Instant | None = None
    outcome: str | None = None
    exit_code: int | None = None
    reason: Text = ""
    ran_us: NonNegative = 0
    tenant: TenantName | None = None
    """Whose work this is, if it was taken by an islanded allowance."""


class LocalJobs(Contract, frozen=True, kw_only=True):
    """Newest first; all users' for root and the agent's own user, else the caller's."""

    jobs: list[LocalJob]


class LocalLog(Contract, frozen=True, kw_only=True):
    """Whole characters of a log; go on at `next_offset` until `ended`."""

    offset: NonNegative
    next_offset: NonNegative
    text: str
    total: NonNegative
    ended: bool


class LocalPause(Contract, frozen=True, kw_only=True):
    """The owner's red button: nothing new is lent. What runs goes on."""

    until: Instant | None = None
    """It ends by itself then; None: when the owner says so."""
    reason: Text = ""


class LocalPaused(Contract, frozen=True, kw_only=True):
    """Whether lending is paused now."""

    paused: bool
    until: Instant | None = None
    by: str = ""
    reason: Text = ""
    since: Instant | None = None
    lent: list[AttemptId] = []
    """Lent work that goes on: each can be reclaimed."""


class LocalReclaim(Contract, frozen=True, kw_only=True):
    """The owner takes devices back: this lent work is stopped, cause `preempted`."""

    reason: Annotated[str, msgspec.Meta(min_length=3, max_length=1_000)]
    grace_s: NonNegative = 10


class LentWork(Contract, frozen=True, kw_only=True):
    """One attempt of the federation's that holds devices here."""

    attempt: AttemptId
    job: JobId
    pool: PoolName
    devices: list[DeviceId]
    word: str
    """`preparing` · `running` · `ending` · `ended`."""
    started: Instant | None = None
    by_allowance: bool = False
    """Taken here, islanded, by a tenant's allowance."""


class LaneWaits(Contract, frozen=True, kw_only=True):
    """What one lane will tell when it is heard."""

    lane: str
    state: str
    """`heard` · `silent` · `not_started`, or the lane's trouble (`forked`, `superseded` …)."""
    since: Instant | None = None
    entries: NonNegative
    size: NonNegative
    """Bytes."""
    oldest: Instant | None = None


class Known(Contract, frozen=True, kw_only=True):
    """Something the site works by while it is alone: as of when, and until when."""

    what: Annotated[str, msgspec.Meta(pattern="^(settings|mapping|allowance|agreement)$")]
    name: str
    as_of: Instant | None = None
    valid_until: Instant | None = None
    lapsed: bool = False
    value: str = ""
    """`nobody`, `4 gpu at once`, `¥12.00 per gpu-hour` …"""


class Absence(Contract, frozen=True, kw_only=True):
    """A time in which this site worked alone. `ended` None: it lasts."""

    since: Instant
    why: Annotated[str, msgspec.Meta(pattern="^(start|bus|silent)$")]
    """`start`: the agent has not heard the hub since its start; `bus`: the bus cannot be reached; `silent`: the bus is there, the hub is not."""
    last: Instant
    """When this was last written down."""
    ended: Instant | None = None
    lent_started: NonNegative = 0
    lent_ended: NonNegative = 0
    local_ran: NonNegative = 0
    by_allowance: NonNegative = 0
    refused: NonNegative = 0
    """Tenants' submissions that no allowance held."""
    entries: NonNegative = 0
    """Entries that waited for the hub when it was heard again."""
    told: Instant | None = None
    """When the last of them was on disk at the hub."""
    to_settle: NonNegative = 0
    """Attempts that ended meanwhile …"""
    settled: NonNegative = 0
    """… and those of them of which the hub said that it holds everything."""


class DiskState(Contract, frozen=True, kw_only=True):
    """Whether new work can be taken, by the disk."""

    accepting: bool = True
    code: str = ""
    text: Text = ""
    free_bytes: NonNegative = 0
    journal_bytes: NonNegative = 0


class PreviewLine(Contract, frozen=True, kw_only=True):
    """One lent attempt in a site's preview of a period."""

    job: JobId
    attempt: AttemptId
    pool: PoolName
    kind: DeviceKind
    start: Instant
    end: Instant
    """Until now, where it runs still."""
    run_us: NonNegative
    quantity_milli_us: NonNegative
    running: bool = False
    outcome: str | None = None
    islanded: bool = False
    """Ended, or was taken, while the hub was silent."""
    told: bool = True
    """Its usage of this period is on disk at the hub."""
    amount: Decimal | None = None
    formula: str = ""


class PoolUse(Contract, frozen=True, kw_only=True):
    pool: PoolName
    attempts: NonNegative
    quantity_milli_us: NonNegative


class LocalStatement(Contract, frozen=True, kw_only=True):
    """What this site lent in a period by its own record, priced with its own agreement if it has one. A preview: the hub's statement counts."""

    site: SiteName
    period: str
    start: Instant
    end: Instant
    time_zone: str
    at: Instant
    lines: list[PreviewLine]
    pools: list[PoolUse]
    quantity_milli_us: NonNegative
    total: Decimal | None = None
    currency: str = ""
    agreement: str = ""
    """Spec and revision that priced it."""
    unpriced: Text = ""
    """Why there is no amount."""
    untold_segments: NonNegative = 0
    """Usage segments that are not on disk at the hub yet."""
    more: NonNegative = 0
    """Lines left out: the sums are of all."""


class LocalLeave(Contract, frozen=True, kw_only=True):
    """Leave the federation."""

    now: bool = False
    """Stop lent work (as preempted) instead of waiting for it."""
    reason: Text = ""


class LocalLeaving(Contract, frozen=True, kw_only=True):
    """How far the leaving is."""

    step: Annotated[str, msgspec.Meta(pattern="^(none|draining|telling|settling|asking|left)$")]
    waits_for: list[str] = []
    """Attempts that run, lanes that are not at head, attempts that are not settled, or what the hub answered."""
    hub_away: bool = False
    receipt: Sealed | None = None
    """`contracts.identity.LeaveTotals` under identity's key, once left."""


class LocalStatus(Contract, frozen=True, kw_only=True):
    """The site as its agent sees it, whoever else is away."""

    site: SiteName
    node: str
    version: str
    single_user: bool
    agent_started: Instant
    islanded_since: Instant | None
    """None while the hub is heard."""
    lanes: dict[str, str]
    """Each lane: `heard`, or `silent since …`, or its trouble."""
    pools: list[PoolInventory]
    lent_jobs: NonNegative
    """Federation attempts that hold devices now."""
    local_running: NonNegative
    local_waiting: NonNegative
    journal_entries: NonNegative
    """Entries not yet acknowledged by the hub."""
    no_gpu: str = ""
    """Why there is no GPU here, as the driver says it; empty if there are some or none were looked for."""
    islanded_why: str = ""
    """`start`, `bus` or `silent`, as in `Absence`; empty while the hub is heard."""
    lent: list[LentWork] = []
    local: list[LocalJob] = []
    """Local work that runs or waits."""
    waits: list[LaneWaits] = []
    known: list[Known] = []
    paused: LocalPaused | None = None
    disk: DiskState | None = None
    absence: Absence | None = None
    """The one that lasts, else the last one."""
    requests: NonNegative = 0
    """Job requests that wait for a person of this site."""


class AllowDrill(Contract, frozen=True, kw_only=True):
    """`POST /v1/drill/allow`: the owner's consent to cuts of the link, no longer than this each."""

    until: Instant | None = None
    longest_s: Seconds = 900


class LocalDrill(Contract, frozen=True, kw_only=True):
    """`GET /v1/drill`, and the answer to `allow`, `revoke`, `stop`: the owner's word, and what is planned or on."""

    consent: DrillConsent | None
    drill: str = ""
    """Planned or on; empty if none."""
    on: bool = False
    start: Instant | None = None
    left_s: NonNegative = 0
