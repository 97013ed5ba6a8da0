"""What the site knows of one piece of work, a hub attempt or a local job, as it lies in the journal's `attempt` table."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import msgspec

from intertie.contracts.job import Cause, JobSpec, ResultRef
from intertie.contracts.link import Sealed
from intertie.contracts.site import DeviceKind
from intertie.ids import AttemptId, DeviceId, JobId, JournalId, PoolName, TenantName


class State(StrEnum):
    """Where a piece of work is at this site. `waiting` is for local jobs alone: the hub does the waiting for its own."""

    WAITING = "waiting"
    CLAIMED = "claimed"
    STAGING = "staging"
    RUNNING = "running"
    ENDED = "ended"
    NOT_STARTED = "not_started"
    REFUSED = "refused"


OPEN = frozenset({State.CLAIMED, State.STAGING, State.RUNNING})
"""States that hold devices."""


@dataclass(frozen=True, slots=True)
class Moment:
    """This host's clocks, read together."""

    utc: datetime
    boot_s: float
    kernel_boot: str


class Failing(msgspec.Struct, frozen=True, kw_only=True):
    """Why something was not done; `fault` false costs the site nothing."""

    code: str
    text: str
    fault: bool = False


class StopAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A stop that reached an attempt; durable, so that a restart of the agent does not forget it."""

    reason: str
    grace_s: int
    by: str
    cause: Cause = Cause.CANCELLED
    """Whose doing the end is then."""


class LocalWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a person of this site asked for through the socket."""

    user: str
    uid: int
    cwd: str
    submitted: datetime
    probe: bool = False
    """The site's own known job, not a person's."""


class StartedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor's record just before exec, and the clock estimate that anchors the attempt's UTC."""

    utc_ns: int
    boot_ns: int
    native_id: str
    offset_s: float = 0.0
    error_s: float = 0.0
    nodes: list[str] = []
    held_devices: list[str] = []
    """The cards themselves, where the attempt's devices are rights."""


class QueuedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """When the site's own queue took it, by this host's clocks."""

    native_id: str
    cluster: str
    utc_ns: int
    boot_ns: int


class Suspension(msgspec.Struct, frozen=True, kw_only=True):
    """It held its place and did not run, as far as looks at the scheduler tell: microseconds from the anchor. `end_us` None: it still does."""

    start_us: int
    end_us: int | None = None


class EndedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended, for those who ask here."""

    outcome: str
    cause: Cause | None
    exit_code: int | None
    signal: int | None
    reason: str
    ended: datetime
    ran_us: int
    result: ResultRef | None = None
    result_stored: bool = False
    islanded: bool = False
    """The hub was silent when it ended."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try at this site. A local job is an attempt without tenant, seal or generation."""

    id: AttemptId
    job: JobId
    state: State
    pool: PoolName
    kind: DeviceKind
    model: str = ""
    share_milli: int = 1000
    """Thousandths of a card that each of its devices is."""
    devices: list[DeviceId]
    spec: JobSpec
    account: str
    env: dict[str, str] = {}
    """Emptied at the end: values live no longer than the work they were for."""
    local: LocalWork | None = None
    tenant: TenantName | None = None
    epoch: int = 0
    generation: int = 0
    attribution: Sealed | None = None
    traceparent: str = ""
    kernel_boot: str
    offer_sent_boot_s: float = 0.0
    """When the sync was sent that brought the offer."""
    start_within_s: int = 30
    start_by_s: int = 600
    submit_within_s: int = 0
    """Above 0: into the site's own queue within this of the go, and begun by `start_by`."""
    claim_seq: int = 0
    """Number of the `claimed` entry: a go stands only if the answer that brought it acknowledges this."""
    claim_journal: JournalId | None = None
    """The journal that holds it: in another one nothing of it starts. None in a row of an agent before link version 2."""
    go_boot_s: float | None = None
    go_sent_boot_s: float | None = None
    """When the sync was sent whose answer brought the go: a lease counts from there."""
    lease_s: int = 0
    """Above 0: its supervisor stops it this long after the last sync whose answer renewed it."""
    after: list[AttemptId] = []
    """These must be seen gone before it starts; it inherits what they hold of its devices."""
    over: bool = False
    """Found in its folder only, after younger work had taken its devices: it is at its end by now, and holds nothing."""
    offer: Sealed | None = None
    """The signed offer without values of the environment, from which a hub that lost the job adopts it: kept as long as the row."""
    offering: str = ""
    """A request to this job offering: the owner accepted it, and the site chose the cards."""
    asked: list[DeviceId] = []
    """Of a request: the hub's names for its cards, which is all that the hub knows of them."""
    accepted_at: datetime | None = None
    """When the owner's yes was given."""
    stop: StopAsked | None = None
    refusal: Failing | None = None
    queued: QueuedRecord | None = None
    """Of work that waits, or waited, in a queue of the site's own."""
    suspensions: list[Suspension] = []
    started: StartedRecord | None = None
    ended: EndedRecord | None = None


def told_devices(attempt: Attempt) -> list[DeviceId]:
    """Its devices as the hub knows them."""
    return list(attempt.asked if attempt.offering else attempt.devices)


def with_state(attempt: Attempt, state: State, **changes: object) -> Attempt:
    """The same work, moved."""
    return msgspec.structs.replace(attempt, state=state, **changes)
