"""What the agent asks of whatever runs the work: prepare, start once, see it end, stop it, find it again after a crash.

Everything is named by the attempt, every verb may be repeated, and an adapter keeps what it knows where it survives the agent. An adapter
that passes `tests/adapters/test_adapter_port.py` can run a site.

A site with a queue of its own (Slurm, Kubernetes) has a narrower port, `Cluster`: five verbs and its accounting; `tests/adapters/test_cluster_port.py`
is its suite, and one adapter over it is all that the agent sees.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Protocol, runtime_checkable

from intertie.agent.core.attempts import Exit
from intertie.agent.core.leases import Deadline
from intertie.agent.core.model import Attempt, StartedRecord
from intertie.contracts.job import ResultRef
from intertie.contracts.site import Device, DeviceState, NativeLoad
from intertie.ids import AttemptId, DeviceId


class Presence(StrEnum):
    """What is found of an attempt when the agent comes back."""

    ABSENT = "absent"
    PREPARED = "prepared"
    """Files, but nothing was ever started, and nothing will be without us."""
    BEGUN = "begun"
    """A supervisor took it; it may still run, or have ended."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a log from `offset`; `total` is its length now."""

    data: bytes
    offset: int
    total: int


class Adapter(Protocol):
    """Errors: `Refused` (this work can never run here), `Unavailable` (not now)."""

    @property
    def single_user(self) -> bool:
        """True if all work runs as the agent's own user."""
        ...

    @property
    def self_stop(self) -> bool:
        """True if leased work is stopped at its deadline by what runs it, with the agent dead or stopped. Without it no such work is taken."""
        ...

    def may_run_as(self, account: str) -> str:
        """Empty if work may run as this local account, else why not."""
        ...

    async def prepare(self, attempt: Attempt, pack: Path | None) -> None:
        """Make everything ready: folder, script, environment, the work unpacked. May be repeated until it is started."""
        ...

    async def start(self, attempt: Attempt) -> StartedRecord | Exit:
        """Start it, at most once whoever else tries; its record just before exec, or how it failed before there was one.

        `refused_errno` ETIME: what runs it found, before the user's code, that the time for it had passed.
        """
        ...

    async def renew(self, attempt: AttemptId, until: Deadline) -> None:
        """Say until when it may run, before its start and then again and again; whole or not at all. `Unavailable`: what was said before stands."""
        ...

    async def deadline(self, attempt: AttemptId) -> Deadline | None:
        """What was said last; None if nothing was."""
        ...

    async def presence(self, attempt: AttemptId) -> Presence: ...

    async def found(self) -> list[Attempt]:
        """All work that is kept here, as it was prepared, until `trim`: a site that lost its journal knows from this what it runs."""
        ...

    async def fence(self, attempt: AttemptId) -> bool:
        """Make sure that it never starts from here on; False if it already began."""
        ...

    async def ended(self, attempt: Attempt) -> Exit:
        """Wait until every process of it was seen gone; at once if that was so before."""
        ...

    async def alive(self, attempt: AttemptId) -> bool:
        """True if it surely runs now: it was started and its end is not recorded. False says nothing."""
        ...

    async def stop(self, attempt: AttemptId, grace_s: int) -> None:
        """Ask for its end; returns at once. Final."""
        ...

    async def pack(self, attempt: Attempt) -> ResultRef | None:
        """The declared outputs of ended work, packed and kept at `result`; None if nothing matched. `Refused` if it cannot be packed, `Unavailable` if
        not now."""
        ...

    def result(self, attempt: AttemptId) -> Path:
        """Where `pack` left its file; kept until `forget`."""
        ...

    async def log(self, attempt: AttemptId, offset: int, limit: int) -> Chunk:
        """What it wrote, from a byte offset (at most its end)."""
        ...

    async def trim(self, attempt: AttemptId) -> None:
        """Remove the work and results of ended work and what it was made from, and keep its log."""
        ...

    async def forget(self, attempt: AttemptId) -> None:
        """Remove all that is kept of it. Only for work that ended or never began."""
        ...

    def roots(self) -> dict[int, AttemptId]:
        """Pids below which every process is ours."""
        ...


@dataclass(frozen=True, slots=True)
class Queued:
    """The site's own queue has it."""

    native_id: str
    cluster: str
    state: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NativeWords:
    """What the site's own scheduler says of one attempt, in its own words. A change of any of them is worth an entry."""

    native_id: str
    state: str
    reason: str = ""
    suspended: bool = False
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    text: str = ""
    """What is out of the ordinary, said by us: since when nobody knows of it, or since when it is being stopped."""


@runtime_checkable
class NativeQueue(Protocol):
    """An `Adapter` whose work waits in a queue of the site's own: what a course asks of it beside the rest."""

    async def enqueue(self, attempt: Attempt) -> Queued | Exit:
        """Into the site's queue, once; the same answer when asked again. `Exit`: it never will be. Comes before `start`, which then waits."""
        ...

    async def words(self, attempt: AttemptId, before: NativeWords | None) -> NativeWords:
        """Wait until the scheduler says something else of it than `before`; not oftener than the owner's interval."""
        ...


# --- a site's own queue ------------------------------------------------------------------------------------------------------------------


class NativePhase(StrEnum):
    """Where a native job is, in our words; its own word stands beside. What is in no table is `unknown`, never an end."""

    QUEUED = "queued"
    STARTING = "starting"
    """It has its nodes and they are being made ready."""
    RUNNING = "running"
    SUSPENDED = "suspended"
    FINISHING = "finishing"
    """Its own end has come, its nodes are not free yet."""
    ENDED = "ended"
    UNKNOWN = "unknown"


class NativeOutcome(StrEnum):
    """How a native job ended, as its own scheduler tells it."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    OUT_OF_MEMORY = "out_of_memory"
    WALL_LIMIT = "wall_limit"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    NODE_FAILED = "node_failed"
    LAUNCH_FAILED = "launch_failed"
    """The site could not start it (image, prolog, node): no fault of the job unless `text` says so."""
    IMAGE_UNFETCHED = "image_unfetched"
    """It never ran, since its image could not be fetched: by whose fault, the image's owner's or the site's, nobody can tell."""
    NEVER_STARTED = "never_started"
    """Dropped from the queue before it ran (deadline, dependency, cancelled while it waited)."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class NativeEnd:
    """`code` 0–255 and `signal` are the job's own; None where nobody knows them."""

    outcome: NativeOutcome
    code: int | None = None
    signal: int | None = None
    text: str = ""
    own: bool = False
    """Cancelled by the very account that it ran as, which is the job's own doing where we did not ask for it."""


@dataclass(frozen=True, slots=True)
class NativeWork:
    """One submit. Its tag is the attempt (with generation and epoch): looked for before any retry, since a submit that timed out was often taken."""

    attempt: Attempt
    folder: PurePath
    """The job's folder as the nodes see it; `start.sh` in it is the start stub, which refuses what is too late or begun already."""
    start_by: datetime
    """Site's wall clock: if it has not begun by then, the queue itself drops it."""
    grace_s: int = 10


@dataclass(frozen=True, slots=True)
class NativeJob:
    """A native job that carries our tag. Ids are reused by real schedulers: (cluster, id, submitted) names it, and the tag says whose it is."""

    tag: AttemptId
    cluster: str
    native_id: str
    phase: NativePhase
    state: str
    """The scheduler's own word, as it was printed."""
    reason: str = ""
    """Its own word for why it waits or ended."""
    generation: int = 0
    submitted: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None
    """The site's clocks, which are not ours."""
    suspended_us: int = 0
    restarts: int = 0
    nodes: tuple[str, ...] = ()
    devices: tuple[DeviceId, ...] = ()
    end: NativeEnd | None = None
    """Set with `ENDED` alone."""
    warning: str = ""
    """An unknown word, a figure that does not parse: told to the owner once."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One bulk look. A tag that is missing says nothing if the look was not `complete`, and even then only that this look does not show it:
    whether it has ended is asked of the accounting."""

    jobs: Mapping[AttemptId, NativeJob]
    at: datetime
    """The site's wall clock."""
    complete: bool
    why: str = ""
    """Why it is not complete."""


@dataclass(frozen=True, slots=True)
class NativeNode:
    """A node as its scheduler sees it. `usable` false: drained, down, reserved, not responding; its devices leave the inventory at once."""

    name: str
    usable: bool
    state: str
    reason: str = ""
    devices: int = 0
    """Of `model`, or slots."""
    busy: int = 0
    model: str = ""
    memory_mib: int = 0
    """Of one device; 0: not known here."""


@dataclass(frozen=True, slots=True)
class Described:
    """What the cluster is now. `load` counts what did not come through us: numbers, no names."""

    cluster: str
    version: str
    at: datetime
    nodes: tuple[NativeNode, ...]
    load: NativeLoad
    queues: tuple[str, ...] = ()
    """Partitions, or queue names."""
    warnings: tuple[str, ...] = ()
    device_states: Mapping[DeviceId, DeviceState] = field(default_factory=dict)
    """Only where single devices can be told apart."""
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True)
class Accounted:
    """One run as the site's own accounting recorded it: the third book. Whole seconds are what most keep; `resolution_us` says so."""

    native_id: str
    cluster: str
    state: str
    tag: AttemptId | None
    submitted: datetime | None
    started: datetime | None
    ended: datetime | None
    elapsed_us: int | None
    suspended_us: int = 0
    resolution_us: int = 1_000_000
    devices: int | None = None
    """None: not recorded there. Never 0 for want of a figure."""
    model: str = ""
    user: str = ""
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    end: NativeEnd | None = None


class Cluster(Protocol):
    """A site's own scheduler, reached by its own means and rights. Every verb may be repeated.

    Errors: `Refused` (it will never take this), `Unavailable` (not now, or nobody knows whether it took it).
    """

    @property
    def name(self) -> str:
        """The cluster's own name; native ids mean nothing without it."""
        ...

    def may_run_as(self, account: str) -> str:
        """Empty if work may be submitted as this mapped account or namespace, else why not."""
        ...

    async def describe(self) -> Described: ...

    async def submit(self, work: NativeWork) -> NativeJob:
        """Submit once: the tag is looked for first, whatever became of an earlier try."""
        ...

    async def status(self, tags: Collection[AttemptId]) -> Listing:
        """All of them in one question to the scheduler (a second one to its accounting, for those that have left the queue)."""
        ...

    async def cancel(self, tag: AttemptId, grace_s: int) -> None:
        """Ask for its end, started or not; harmless if it is over. What cannot be ended is seen by `status`, not here."""
        ...

    async def logs(self, tag: AttemptId, offset: int, limit: int) -> Chunk:
        """Bytes from an offset, however large the log is; what is no text stays what it is."""
        ...

    async def accounting(self, start: datetime, end: datetime) -> Sequence[Accounted]:
        """Runs that overlap [start, end), ours and, without tag, those of the mapped accounts that did not come through us."""
        ...

    async def close(self) -> None:
        """No more questions to it; what runs there goes on."""
        ...
