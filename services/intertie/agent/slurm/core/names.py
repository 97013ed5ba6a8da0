"""Ids of jobs, arrays and steps, host lists, exit codes, and the answer of a submit."""

from __future__ import annotations

import re
from dataclasses import dataclass

from intertie.agent.slurm.core.hosts import expand_hosts
from intertie.agent.slurm.core.words import Truncated, Unreadable, is_nothing

_REF = re.compile(
    r"(?P<id>\d{1,10})(?:_(?:(?P<task>\d{1,9})|\[(?P<tasks>[\d,:%-]{1,4000})(?P<cut>\.\.\.)?\]))?(?:\+(?P<het>\d{1,4}))?(?:\.(?P<step>[\w+]{1,40}))?\Z",
    re.ASCII,
)
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?\Z", re.ASCII)
_PARSABLE = re.compile(r"(\d{1,10})(?:;([\w.-]{1,64}))?\Z", re.ASCII)
_SENTENCE = re.compile(r"Submitted batch job (\d{1,10})(?: on cluster ([\w.-]{1,64}))?\Z", re.ASCII)
_EXIT = re.compile(r"(\d{1,5}):(\d{1,3})\Z", re.ASCII)
# Slurm's own mark for "the out-of-memory killer took it": signal 125 (slurm_errno.h and signal tables have no such signal).
OOM_MARK = 125
# Slurm's error 4021, "the job could not be launched", read as a wait status.
LAUNCH_MARK = 53


@dataclass(frozen=True, slots=True)
class JobRef:
    """`4411`, `4411_1`, `4411_[20-49%5]`, `4411+1`, `4411.batch`."""

    id: int
    task: int | None = None
    tasks: int = 1
    """How many array tasks this line stands for; a throttle (`%5`) is no count (BR-016)."""
    component: int | None = None
    """Of a heterogeneous job."""
    step: str = ""


def parse_ref(text: str) -> JobRef:
    match = _REF.match(text.strip())
    if match is None:
        raise Unreadable("job id", text)
    if match["cut"]:
        raise Truncated("job id", text)
    task = int(match["task"]) if match["task"] is not None else None
    tasks = _count_tasks(match["tasks"]) if match["tasks"] is not None else 1
    component = int(match["het"]) if match["het"] is not None else None
    return JobRef(int(match["id"]), task, tasks, component, match["step"] or "")


def _count_tasks(text: str) -> int:
    expression, _, throttle = text.partition("%")
    if "%" in throttle:
        raise Unreadable("array expression", text)
    total = 0
    for part in expression.split(","):
        match = _RANGE.match(part)
        if match is None:
            raise Unreadable("array expression", text)
        first, last, stride = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or stride == 0:
            raise Unreadable("array expression", text)
        total += (last - first) // stride + 1
    return total


def parse_hosts(text: str) -> tuple[str, ...]:
    """A host list in brackets, spelt out; empty if none is assigned."""
    told = text.strip()
    if is_nothing(told):
        return ()
    if len(told) > 100_000 or any(char.isspace() or not char.isprintable() for char in told):
        raise Unreadable("host list", text)
    return expand_hosts(told)


@dataclass(frozen=True, slots=True)
class ExitCode:
    """The job's own exit code and signal, as Slurm keeps them: `7:0`, `0:9`."""

    code: int
    signal: int
    exact: bool = True
    """False of an exit code in the accounting's text: sacct takes 128 off what is above it, so that its `9` is 9 or 137."""

    @property
    def out_of_memory(self) -> bool:
        return self.signal == OOM_MARK

    @property
    def launch_failed(self) -> bool:
        """Slurm keeps its own error number where the status would be: 4021 reads as signal 53, which no job was sent."""
        return self.signal == LAUNCH_MARK


def parse_exit(text: str, *, booked: bool = False) -> ExitCode | None:
    """`7:0`. `booked`: as sacct prints it."""
    if is_nothing(text):
        return None
    match = _EXIT.match(text.strip())
    if match is None or int(match[1]) > 255 or int(match[2]) > 127:
        raise Unreadable("exit code", text)
    code, signal = int(match[1]), int(match[2])
    return ExitCode(code, signal, exact=not (booked and 0 < code < 128))


def from_wait_status(status: int) -> ExitCode:
    """What slurmctld keeps is wait(2)'s status: 1792 is exit code 7."""
    if not 0 <= status <= 0xFFFF:
        raise Unreadable("wait status", status)
    return ExitCode(status >> 8 & 0xFF, status & 0x7F)


def parse_submitted(text: str) -> tuple[int, str]:
    """The answer of `sbatch --parsable` or of a wrapper without it: (job id, cluster or empty). The last line that is one counts (BR-018, BR-047)."""
    for line in reversed(text.strip().splitlines()):
        match = _PARSABLE.match(line.strip()) or _SENTENCE.match(line.strip())
        if match is not None and int(match[1]) > 0:
            return int(match[1]), match[2] or ""
    raise Unreadable("answer of sbatch", text)
