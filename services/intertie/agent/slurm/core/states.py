"""Every state and every reason of Slurm that we know, in one place, and what it is in our words.

Sources: squeue(1) "JOB STATE CODES" and "JOB REASON CODES", sinfo(1) "NODE STATE CODES", 21.08 to 25.11. A word that stands in no table is `unknown`,
kept as it was printed and told to the owner; it is never taken for an end, for "queued", or for a free node (BR-002).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from intertie.agent.adapters.port import NativeOutcome, NativePhase
from intertie.agent.slurm.core.words import Truncated, Unreadable, is_nothing

P, O = NativePhase, NativeOutcome  # noqa: E741  # the table is read by columns

# word, compact code, phase, outcome of an end, what it means
JOB_STATES: Sequence[tuple[str, str, NativePhase, NativeOutcome | None, str]] = (
    ("PENDING", "PD", P.QUEUED, None, "waits in the queue"),
    ("CONFIGURING", "CF", P.STARTING, None, "has its nodes, which are being made ready"),
    ("POWER_UP_NODE", "", P.STARTING, None, "has its nodes, which are being switched on"),
    ("REQUEUED", "RQ", P.QUEUED, None, "goes back to the queue"),
    ("REQUEUE_FED", "RF", P.QUEUED, None, "goes back to the queue of its federation"),
    ("REQUEUE_HOLD", "RH", P.QUEUED, None, "was put back and is held"),
    ("SPECIAL_EXIT", "SE", P.QUEUED, None, "was put back with a special exit and is held"),
    ("RESV_DEL_HOLD", "RD", P.QUEUED, None, "is held: its reservation was removed"),
    ("EXPEDITING", "EX", P.QUEUED, None, "goes back to the front of the queue"),
    ("RUNNING", "R", P.RUNNING, None, "runs"),
    ("RESIZING", "RS", P.RUNNING, None, "runs, and changes its size"),
    ("SIGNALING", "SI", P.RUNNING, None, "runs, and is being signalled"),
    ("SUSPENDED", "S", P.SUSPENDED, None, "is suspended: its processors are lent to another"),
    ("STOPPED", "ST", P.SUSPENDED, None, "is stopped, and keeps its processors"),
    ("COMPLETING", "CG", P.FINISHING, None, "has ended, its nodes are not free yet"),
    ("STAGE_OUT", "SO", P.FINISHING, None, "has ended, its files are on their way"),
    ("COMPLETED", "CD", P.ENDED, O.EXITED, "ended with exit code 0"),
    ("FAILED", "F", P.ENDED, O.EXITED, "ended with another exit code, or by a signal"),
    ("OUT_OF_MEMORY", "OOM", P.ENDED, O.OUT_OF_MEMORY, "was ended by the out-of-memory killer"),
    ("TIMEOUT", "TO", P.ENDED, O.WALL_LIMIT, "reached its time limit"),
    ("DEADLINE", "DL", P.ENDED, O.NEVER_STARTED, "its deadline passed"),
    ("CANCELLED", "CA", P.ENDED, O.CANCELLED, "was cancelled"),
    ("PREEMPTED", "PR", P.ENDED, O.PREEMPTED, "was preempted"),
    ("NODE_FAIL", "NF", P.ENDED, O.NODE_FAILED, "its node failed"),
    ("BOOT_FAIL", "BF", P.ENDED, O.LAUNCH_FAILED, "its node could not be booted"),
    ("LAUNCH_FAILED", "LF", P.ENDED, O.LAUNCH_FAILED, "could not be launched"),
    ("RECONFIG_FAIL", "", P.ENDED, O.LAUNCH_FAILED, "its node could not be configured"),
    ("REVOKED", "RV", P.UNKNOWN, None, "moved to another cluster of the federation"),
)
HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
# Flags of newer versions beside a base state: they say nothing of where the job is.
SILENT_FLAGS = frozenset({"UPDATE_DB", "RECORD_DB"})

_BY_WORD = {row[0]: row for row in JOB_STATES}
_BY_CODE = {row[1]: row for row in JOB_STATES if row[1]}
# Which of several words of one job says where it is: the one that comes first here.
_STRONGEST = tuple(
    "COMPLETING STAGE_OUT CONFIGURING POWER_UP_NODE RESIZING SIGNALING STOPPED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD REQUEUED REQUEUE_FED".split()
)
_CANCELLED_BY = re.compile(r"CANCELLED BY (\d{1,10})\Z", re.ASCII)
_WORD = re.compile(r"[A-Z][A-Z_]*\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class JobState:
    """A job's state: Slurm's word beside ours. `outcome` only where it is an end."""

    word: str
    phase: NativePhase
    outcome: NativeOutcome | None
    by_uid: int | None = None
    """Who cancelled it."""
    warning: str = ""


def parse_state(text: str | Sequence[str]) -> JobState:
    """A state as squeue, sacct, scontrol or slurmrestd says it: long or compact, any case, padded, with `by UID`, with flags (`A+B`, or a list).

    `Truncated` for a word that a narrow column cut off (BR-007). A word in no table gives `unknown` with a warning."""
    said = text if isinstance(text, str) else "+".join(text)
    told = " ".join(said.split()).upper()
    if not told:
        raise Unreadable("job state", said)
    if told.endswith("+"):
        raise Truncated("job state", said)
    if match := _CANCELLED_BY.match(told):
        return JobState("CANCELLED", P.ENDED, O.CANCELLED, by_uid=int(match[1]))
    words = [_BY_CODE[word][0] if word in _BY_CODE else word for word in told.split("+") if word not in SILENT_FLAGS]
    if not words:
        raise Unreadable("job state", said)
    for strong in _STRONGEST:
        if strong in words and len(words) > 1:
            words = [strong, *[word for word in words if word != strong]]
            break
    row = _BY_WORD.get(words[0])
    if row is None:
        return _unlisted(words[0], said)
    shown = words[0] if len(words) == 1 else "+".join(words)
    warning = f"{row[0]}: {row[4]}" if row[2] is P.UNKNOWN else ""
    return JobState(shown, row[2], row[3], warning=warning)


def _unlisted(word: str, said: str) -> JobState:
    """A narrow column glues what follows to a cut word; a new version has new words. Only the first can be told from an old word."""
    if any(len(known) > len("COMPLETIN") and word.startswith(known[:9]) for known in _BY_WORD):
        raise Truncated("job state", said)
    shown = word if _WORD.match(word) else repr(said)[:60]
    return JobState(shown[:64], P.UNKNOWN, None, warning=f"job state {shown[:64]} is not known to this version of Intertie")


# --- why it waits ------------------------------------------------------------------------------------------------------------------------


class Wait(StrEnum):
    """Kinds of reasons."""

    TURN = "turn"
    """Others come first, or nothing is free."""
    LIMIT = "limit"
    """A limit of its account, QOS or partition: it starts when others of the same have ended."""
    LATER = "later"
    """It waits for something that comes by itself: a time, a job before it, a maintenance window's end."""
    HELD = "held"
    """A person holds it."""
    SITE = "site"
    """Something at the site is down."""
    NEVER = "never"
    """It will not start as it was asked."""
    ENDED = "ended"
    """Why it ended, not why it waits."""
    UNKNOWN = "unknown"


# Slurm's word → kind, in words. Families follow below; the longest match counts.
REASONS: Mapping[str, tuple[Wait, str]] = {
    "None": (Wait.TURN, "Slurm has not said why yet"),
    "WaitingForScheduling": (Wait.TURN, "Slurm has not looked at it yet"),
    "Priority": (Wait.TURN, "jobs with a higher priority come first"),
    "Resources": (Wait.TURN, "what it asks for is not free"),
    "Licenses": (Wait.TURN, "a licence is not free"),
    "Prolog": (Wait.LATER, "the site's prolog is still at work"),
    "Cleaning": (Wait.LATER, "its last run is being cleaned up"),
    "BeginTime": (Wait.LATER, "its earliest start has not come"),
    "Dependency": (Wait.LATER, "another job of the same name has to end first"),
    "Reservation": (Wait.LATER, "its reservation has not begun"),
    "NodeDown": (Wait.SITE, "a node that it needs is down"),
    "PartitionDown": (Wait.SITE, "its partition is down"),
    "PartitionInactive": (Wait.SITE, "its partition starts nothing now"),
    "FrontEndDown": (Wait.SITE, "the front end is down"),
    "SystemFailure": (Wait.SITE, "the site's Slurm or file system failed"),
    "SchedDefer": (Wait.LATER, "Slurm has put it off"),
    "JobHeldUser": (Wait.HELD, "held by its user"),
    "JobHeldAdmin": (Wait.HELD, "held by an administrator"),
    "JobHoldMaxRequeue": (Wait.HELD, "held: it was put back too often"),
    "launch failed requeued held": (Wait.HELD, "could not be launched, was put back and is held"),
    "job requeued in held state": (Wait.HELD, "was put back and is held"),
    "JobArrayTaskLimit": (Wait.LIMIT, "its array runs as many tasks at once as it may"),
    "DependencyNeverSatisfied": (Wait.NEVER, "a job that it depends on will never end as it must"),
    "BadConstraints": (Wait.NEVER, "no node has what it asks for"),
    "InvalidAccount": (Wait.NEVER, "its account is not valid here"),
    "InvalidQOS": (Wait.NEVER, "its QOS is not valid here"),
    "AccountNotAllowed": (Wait.NEVER, "its account may not use this partition"),
    "QOSNotAllowed": (Wait.NEVER, "its QOS may not be used here"),
    "PartitionTimeLimit": (Wait.NEVER, "it asks for more time than its partition gives"),
    "PartitionNodeLimit": (Wait.NEVER, "it asks for more nodes than its partition gives, or they are down"),
    "PartitionConfig": (Wait.NEVER, "its partition does not take it"),
    "ReqNodeNotAvail": (Wait.SITE, "a node that it needs is not available"),
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": (
        Wait.SITE,
        "nodes are down, drained, or kept for a partition that comes first",
    ),
    "DeadLine": (Wait.ENDED, "its deadline passed"),
    "TimeLimit": (Wait.ENDED, "reached its time limit"),
    "NonZeroExitCode": (Wait.ENDED, "ended with another exit code than 0"),
    "JobLaunchFailure": (Wait.ENDED, "could not be launched, or was ended by a signal at its start"),
    "RaisedSignal": (Wait.ENDED, "was ended by a signal"),
    "OutOfMemory": (Wait.ENDED, "was ended by the out-of-memory killer"),
    "InactiveLimit": (Wait.ENDED, "was idle for too long"),
    "BootFailure": (Wait.ENDED, "a node could not be booted"),
    "NodeFailure": (Wait.ENDED, "its node failed"),
}
REASON_FAMILIES: Sequence[tuple[str, Wait, str]] = (
    ("AssocGrp", Wait.LIMIT, "its account is at its limit"),
    ("AssocMax", Wait.LIMIT, "its account is at its limit for a job or a user"),
    ("Association", Wait.LIMIT, "its account is at its limit"),
    ("QOSGrp", Wait.LIMIT, "its QOS is at its limit"),
    ("QOSMax", Wait.LIMIT, "its QOS is at its limit for a job or a user"),
    ("QOSMin", Wait.NEVER, "it asks for less than its QOS gives"),
    ("QOS", Wait.LIMIT, "its QOS is at its limit"),
    ("Max", Wait.LIMIT, "its account is at its limit"),
    ("ReqNodeNotAvail", Wait.SITE, "a node that it needs is not available"),
    ("BurstBuffer", Wait.LATER, "its burst buffer is being made ready"),
    ("FedJobLock", Wait.LATER, "its federation has not decided yet"),
    ("RaisedSignal", Wait.ENDED, "was ended by a signal"),
)


@dataclass(frozen=True, slots=True)
class Reason:
    word: str
    kind: Wait
    text: str

    @property
    def warning(self) -> str:
        return f"reason {self.word[:80]!r} is not known to this version of Intertie" if self.kind is Wait.UNKNOWN else ""


def parse_reason(text: str) -> Reason:
    """Why a job waits or ended. Reasons of nodes carry words after a comma (BR-073: `ReqNodeNotAvail, Reserved for maintenance`)."""
    word = " ".join(text.replace("_", " ").split()).strip("()")
    if is_nothing(word):
        return Reason("None", *REASONS["None"])
    if "maintenance" in word.lower() and word.startswith("ReqNodeNotAvail"):
        return Reason(word, Wait.LATER, "its time limit reaches into a maintenance window; a shorter one could start before it")
    if (row := REASONS.get(word)) is not None:
        return Reason(word, *row)
    for start, kind, meaning in REASON_FAMILIES:
        if word.startswith(start):
            return Reason(word, kind, meaning)
    return Reason(word, Wait.UNKNOWN, word[:200])


# --- nodes -------------------------------------------------------------------------------------------------------------------------------

# Base words with sinfo's short forms, and whether jobs may run there.
NODE_STATES: Mapping[str, bool] = {
    **dict.fromkeys(("IDLE", "MIXED", "MIX", "ALLOCATED", "ALLOC", "COMPLETING", "COMP", "PLANNED", "PLND"), True),
    **dict.fromkeys(
        "DOWN DRAINED DRAIN DRAINING DRNG ERROR FAIL FAILG FAILING FUTURE FUTR INVAL MAINT NO_RESPOND NPC PERFCTRS POWERED_DOWN "
        "POWERING_DOWN POWERING_UP POW_DN POW_UP REBOOT REBOOT_ISSUED REBOOT_REQUESTED RESERVED RESV UNKNOWN UNK UNKN BLOCK BLOCKED".split(),
        False,
    ),
}
# Flags of `scontrol show node` and slurmrestd. Those that are not here are unknown, and a node with one is not offered.
NODE_FLAGS: Mapping[str, bool] = {
    **dict.fromkeys("CLOUD DYNAMIC_NORM DYNAMIC_FUTURE COMPLETING PLANNED RESUME UNDRAIN EXTERNAL RES".split(), True),
    **dict.fromkeys(
        "DRAIN DRAINED DRAINING FAIL FAILING NOT_RESPONDING NO_RESPOND INVALID_REG INVALID MAINT MAINTENANCE RESERVED POWERED_DOWN POWERING_DOWN "
        "POWERING_UP POWER_DOWN POWER_UP POWER_DRAIN REBOOT_ISSUED REBOOT_REQUESTED REBOOT_CANCEL BLOCKED NET FUTURE DOWN".split(),
        False,
    ),
}
# sinfo's suffixes (sinfo(1), "NODE STATE CODES").
NODE_SUFFIXES: Mapping[str, str] = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINT",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}


@dataclass(frozen=True, slots=True)
class NodeState:
    """`usable`: jobs may run there. `planned`: what is free is kept for a job that comes first. `sleeps`: it could be switched on (BR-042)."""

    word: str
    usable: bool
    planned: bool = False
    sleeps: bool = False
    full: bool = False
    warning: str = ""


def parse_node_state(text: str | Sequence[str], flags: Sequence[str] = ()) -> NodeState:
    """`idle*`, `IDLE+CLOUD+POWERED_DOWN`, or a word (a list of them) with its flags."""
    said = text if isinstance(text, str) else "+".join(text)
    told = "".join(said.split()).upper()
    marks: list[str] = []
    while told and told[-1] in NODE_SUFFIXES:
        marks.append(NODE_SUFFIXES[told[-1]])
        told = told[:-1]
    words = [word for word in told.split("+") if word]
    if not words:
        raise Unreadable("node state", said)
    base, extra = words[0], [*words[1:], *marks, *[flag.strip().upper() for flag in flags if flag.strip()]]
    unknown = [word for word in extra if word not in NODE_FLAGS]
    known = base in NODE_STATES
    if not known:
        unknown.insert(0, base)
    usable = known and NODE_STATES[base] and all(NODE_FLAGS.get(word, False) for word in extra)
    return NodeState(
        "+".join([base, *extra])[:120],
        usable,
        planned="PLANNED" in extra or base in ("PLANNED", "PLND"),
        sleeps="POWERED_DOWN" in extra or base in ("POWERED_DOWN", "POW_DN"),
        full=base in ("ALLOCATED", "ALLOC"),
        warning=f"node state {', '.join(unknown)[:80]} is not known to this version of Intertie" if unknown else "",
    )
