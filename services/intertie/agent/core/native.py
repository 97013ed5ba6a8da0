"""What the start stub of a native job recorded, and what that and the scheduler's word together make of its end.

Records are lines `name=value`, written by a shell under the job's own account: they are parsed as strangers' words, and a record that says what
cannot be is no record. The scheduler's word says who ended it; the stub's says how, where the scheduler does not know.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from intertie.agent.adapters.port import NativeEnd, NativeJob, NativeOutcome, NativePhase
from intertie.agent.core.attempts import Exit
from intertie.agent.core.model import StartedRecord
from intertie.agent.core.usage import EPOCH

TOO_LATE, TWICE, BROKEN = 221, 222, 224
STUB_CODES = frozenset({TOO_LATE, TWICE, BROKEN})
"""Exit codes by which the stub began nothing. Only with no `exit` record beside them: a job may end with any code."""

MICROSECOND = timedelta(microseconds=1)
# No clock of a host says anything beyond these, in nanoseconds.
MOST_NS = 2**63 - 1
# Two clocks that differ by less than this are one: a look takes so long.
SAME_CLOCK_US = 5_000_000
# A stub that begins nothing is over within a second or two; what held its nodes for longer by the site's own word has run, whatever lies in a folder
# that the job may write.
STUB_US = 60_000_000


@dataclass(frozen=True, slots=True)
class StubTime:
    """A node's clocks: wall, and since its boot; nanoseconds."""

    utc_ns: int
    boot_ns: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class StubStarted:
    """It began the user's code."""

    at: StubTime
    node: str = ""
    native_id: str = ""
    restarts: int = 0
    cards: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StubEnded:
    """How the user's code ended. `stopped`: why the stub ended it (`asked`, `lease_ended`, `wall_limit`, `signalled`), or empty."""

    at: StubTime
    code: int | None = None
    signal: int | None = None
    stopped: str = ""
    refused_errno: int | None = None
    refused_file: str = ""


@dataclass(frozen=True, slots=True)
class StubRefused:
    """It began nothing."""

    why: str
    what: str


def fields(data: bytes) -> Mapping[str, str]:
    """Names and values of a record; the first of a name stands."""
    found: dict[str, str] = {}
    for line in data.decode("utf-8", "replace").splitlines():
        name, is_one, value = line.partition("=")
        if is_one:
            found.setdefault(name.strip(), value.strip()[:4_096])
    return found


def _number(text: str | None, most: int = MOST_NS) -> int | None:
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 19:
        return None
    value = int(text)
    return value if value <= most else None


def _time(record: Mapping[str, str]) -> StubTime | None:
    utc_ns, boot_ns = _number(record.get("utc_ns")), _number(record.get("boot_ns"))
    return StubTime(utc_ns, boot_ns or 0, record.get("boot_id", "")) if utc_ns is not None else None


def started_of(data: bytes) -> StubStarted | None:
    """None: it is no whole record of a format that we read."""
    record = fields(data)
    at = _time(record)
    if record.get("format") != "1" or at is None:
        return None
    cards = tuple(card for card in record.get("cards", "").split(",") if card)[:1_024]
    return StubStarted(at, record.get("node", "")[:256], record.get("native", "")[:256], _number(record.get("restarts")) or 0, cards)


STOPS = frozenset({"asked", "lease_ended", "wall_limit", "signalled"})


def ended_of(data: bytes) -> StubEnded | None:
    """None: it is no whole record of a format that we read, or tells no end."""
    record = fields(data)
    at = _time(record)
    code, signal = _number(record.get("code"), 255), _number(record.get("signal"), 127)
    refused, stopped = _number(record.get("refused"), 4_095), record.get("stopped", "")
    if record.get("format") != "1" or at is None or (stopped and stopped not in STOPS):
        return None
    if sum(value is not None for value in (code, signal, refused)) != 1:
        return None
    return StubEnded(at, code, signal, stopped, refused, record.get("what", "") if refused is not None else "")


def refused_of(data: bytes) -> StubRefused | None:
    record = fields(data)
    return StubRefused(record.get("why", ""), record.get("what", "")) if record.get("format") == "1" else None


# --- the start ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Now:
    """The agent's own clocks, read together."""

    utc_us: int
    boot_us: int


def _us(moment: datetime) -> int:
    """Of the Unix epoch, exactly."""
    return (moment - EPOCH) // MICROSECOND


def anchored(job: NativeJob | None, behind_us: int, stub: StubStarted | None, now: Now) -> StartedRecord:
    """When it began, on the agent's own clocks: by the scheduler's start where that is told, else by the stub's, else now.

    `behind_us`: the agent's wall clock minus the scheduler's at the look that `job` is of; below `SAME_CLOCK_US` it is one clock. What would lie in
    the future began now.
    """
    if job is not None and job.started is not None:
        utc_us = _us(job.started) + (behind_us if abs(behind_us) >= SAME_CLOCK_US else 0)
    else:
        utc_us = stub.at.utc_ns // 1_000 if stub is not None else now.utc_us
    utc_us = min(utc_us, now.utc_us)
    nodes = list(job.nodes) if job is not None and job.nodes else [stub.node] if stub is not None and stub.node else []
    held = [str(device) for device in job.devices] if job is not None and job.devices else list(stub.cards) if stub is not None else []
    return StartedRecord(
        utc_ns=utc_us * 1_000,
        boot_ns=max(0, now.boot_us - (now.utc_us - utc_us)) * 1_000,
        native_id=job.native_id if job is not None else stub.native_id if stub is not None else "",
        nodes=nodes,
        held_devices=held,
    )


# --- the end -----------------------------------------------------------------------------------------------------------------------------


def ran_us(job: NativeJob | None, started: StubStarted | None, ended: StubEnded | None) -> int:
    """Between start and end: by the site's own books where they have both, for they are what its owner counts by; else by the stub's clocks, the
    one that no step moves if it is of one boot."""
    if job is not None and job.started is not None and job.ended is not None:
        return max(0, _us(job.ended) - _us(job.started))
    if started is None:
        return 0
    if ended is not None:
        same = started.at.boot_id == ended.at.boot_id and bool(started.at.boot_id)
        return max(0, ended.at.boot_ns - started.at.boot_ns if same else ended.at.utc_ns - started.at.utc_ns) // 1_000
    if job is not None and job.ended is not None:
        return max(0, _us(job.ended) - started.at.utc_ns // 1_000)
    return 0


SITE_ENDS: Mapping[NativeOutcome, str] = {
    NativeOutcome.PREEMPTED: "preempted",
    NativeOutcome.NODE_FAILED: "node_failed",
    NativeOutcome.LAUNCH_FAILED: "launch_failed",
    NativeOutcome.IMAGE_UNFETCHED: "launch_failed",
    NativeOutcome.OUT_OF_MEMORY: "out_of_memory",
}
"""Outcomes that stand whatever the stub recorded: by its signal alone none of them can be told."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the agent itself knows of an end. `asked`: it asked for it. `lease_over`: its lease had run out. `most_us`: it has not run longer."""

    asked: bool = False
    lease_over: bool = False
    most_us: int = MOST_NS


def held_us(job: NativeJob, utc_us: int | None = None) -> int:
    """How long it has had its nodes, by the site's own clock: to its end, or to `utc_us`; 0 if nobody says."""
    if job.started is None:
        return 0
    until_us = _us(job.ended) if job.ended is not None else utc_us
    return max(0, until_us - _us(job.started)) if until_us is not None else 0


def exit_of(job: NativeJob | None, started: StubStarted | None, ended: StubEnded | None, known: Known, stub_us: int = STUB_US) -> Exit:
    """How begun work ended. The ladder, in order; the first that applies decides. `stub_us`: whatever was longer has run."""
    end = job.end if job is not None and job.phase is NativePhase.ENDED else None
    ran = job is not None and held_us(job) > stub_us
    ended = _believed(ended, known, ran=ran)
    base = Exit(
        certain=True,
        ran_us=_run_us(job, started, ended, known.most_us),
        native_state=job.state if job is not None else "",
        native_reason=(job.reason or (end.text if end is not None else "")) if job is not None else "",
        suspended_us=job.suspended_us if job is not None else 0,
    )
    if ended is not None and ended.refused_errno is not None:
        text = f"{ended.refused_file}: No such file or directory"
        return replace(base, refused_errno=errno.ENOENT, refused_file="first line", refused_text=text)
    # Begun anew by a scheduler that says so, or by one that forgot its first run: then the end by its word is that of the start that was refused.
    anew = end is not None and end.code in STUB_CODES and not ran and ended is not None and _told(ended) != end.code
    again = job is not None and job.restarts > 0
    code, signal = _code(ended, end if not (again or anew) else None) if ended is not None else _code(None, end)
    base = replace(base, code=code, signal=signal)
    if end is not None and (by_site := SITE_ENDS.get(end.outcome)) and not (by_site == "launch_failed" and (ran or started is not None)):
        return replace(base, ended_by=by_site)
    # No start but the first was ever let through: whatever a later one ended with is no word of the job's.
    refused = end is not None and (end.code in STUB_CODES or end.outcome is NativeOutcome.EXITED)
    if again and refused and (ended is None or ended.stopped == "signalled"):
        return replace(base, code=None, signal=None, ended_by="restarted")
    if ended is not None and ended.stopped in ("asked", "lease_ended", "wall_limit"):
        return replace(base, stopped_for=ended.stopped)
    if anew and ended is not None and not known.asked and _killed(ended):
        return replace(base, code=None, signal=None, ended_by="restarted")
    if job is None and ended is not None and not known.asked and _killed(ended):
        # A scheduler that lost it kills what its nodes still have of it: by whom what was killed was killed no record can say.
        told = f"signal {signal}" if signal is not None else f"exit code {code}"
        return replace(base, code=None, signal=None, ended_by="forgotten", native_reason=f"its own record says {told}")
    # Slurm signals all processes of a job at once: the script may be gone, as killed, before the stub has heard of it.
    ended_for_it = end is not None and end.outcome in (NativeOutcome.WALL_LIMIT, NativeOutcome.CANCELLED)
    if ended is not None and not ended.stopped and ended.signal is None and not (ended_for_it and _killed(ended)):
        return base  # It had ended by itself before anybody else could end it.
    if end is not None and end.outcome is NativeOutcome.WALL_LIMIT:
        return replace(base, stopped_for="wall_limit")
    if end is not None and end.outcome is NativeOutcome.CANCELLED:
        if known.asked:
            return replace(base, stopped_for="asked")
        return replace(base, ended_by="cancelled_by_itself" if end.own else "cancelled_at_site")
    if ended is not None:
        # The shell's word for the job itself, told of its end by nobody else.
        return replace(base, stopped_for="asked") if known.asked and ended.stopped == "signalled" else base
    return _by_scheduler_alone(base, end, asked=known.asked, ran=ran)


def _run_us(job: NativeJob | None, started: StubStarted | None, ended: StubEnded | None, most_us: int) -> int:
    """By the books as they are; by a stub's clocks no longer than can be."""
    if job is not None and job.started is not None and job.ended is not None:
        return ran_us(job, started, ended)
    return min(ran_us(job, started, ended), max(0, most_us))


def _believed(ended: StubEnded | None, known: Known, *, ran: bool) -> StubEnded | None:
    """What a record may say that the job itself could have written: never that others ended it who did not, nor that it was not begun if it ran."""
    if ended is None:
        return None
    if ended.refused_errno is not None and (ran or ended.refused_errno != errno.ENOENT):
        return replace(ended, refused_errno=None, refused_file="", code=127)
    if (ended.stopped == "asked" and not known.asked) or (ended.stopped == "lease_ended" and not known.lease_over):
        return replace(ended, stopped="signalled")
    return ended


def _told(ended: StubEnded) -> int:
    """As a shell tells it."""
    return ended.code if ended.code is not None else 128 + (ended.signal or 0)


def _killed(ended: StubEnded) -> bool:
    """It, its stub, or a part of it that its script ended with."""
    return bool(ended.stopped) or _told(ended) > 128


def _code(ended: StubEnded | None, end: NativeEnd | None) -> tuple[int | None, int | None]:
    """The stub's, which knows a signal from an exit code above 128; the scheduler's where they contradict each other."""
    if ended is None:
        return (end.code, end.signal) if end is not None else (None, None)
    if end is not None and end.outcome is NativeOutcome.EXITED and end.code is not None and end.code != _told(ended):
        return end.code, None
    return ended.code, ended.signal


def _by_scheduler_alone(base: Exit, end: NativeEnd | None, *, asked: bool, ran: bool) -> Exit:
    """It began and left no record of its end: its stub was killed with it, or begun anew by the scheduler, which the stub refuses."""
    if end is None or end.outcome in (NativeOutcome.UNKNOWN, NativeOutcome.NEVER_STARTED):
        return replace(base, certain=False, code=None, signal=None)
    if end.outcome is NativeOutcome.EXITED and end.code in STUB_CODES and not ran:
        return replace(base, code=None, signal=None, ended_by="restarted")
    if end.code is None and end.signal is None and end.outcome in (NativeOutcome.EXITED, NativeOutcome.LAUNCH_FAILED):
        return replace(base, certain=False)
    if asked and end.signal is not None:
        return replace(base, stopped_for="asked")
    return base


def never(outcome: NativeOutcome, text: str) -> Exit:
    """Native work that ended before it began, in the words of `Exit`: too late and dropped is nobody's fault, what could not be launched the site's."""
    match outcome:
        case NativeOutcome.CANCELLED | NativeOutcome.PREEMPTED:
            number = errno.ECANCELED
        case NativeOutcome.LAUNCH_FAILED | NativeOutcome.NODE_FAILED:
            number = errno.ENOEXEC
        case NativeOutcome.IMAGE_UNFETCHED:
            number = errno.ENOPKG
        case _:
            number = errno.ETIME
    return Exit(certain=True, refused_errno=number, refused_file="native queue", refused_text=text)
