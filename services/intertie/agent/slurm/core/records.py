"""The text listings of squeue, sacct and scontrol, and what each line of them says.

Asked for with delimiters that no person types and, where Slurm allows it, an end mark, so that a name with a bar or a newline splits nothing
(BR-036). A line that cannot be read is told with its job id, never skipped: it may be money; and it hides no other line (BR-037).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from functools import partial
from typing import Generic, TypeVar

from intertie.agent.slurm.core.amounts import Gres, Tres, parse_gres, parse_tres
from intertie.agent.slurm.core.names import ExitCode, JobRef, from_wait_status, parse_exit, parse_hosts, parse_ref
from intertie.agent.slurm.core.states import JobState, NodeState, Reason, parse_node_state, parse_reason, parse_state
from intertie.agent.slurm.core.times import Limit, parse_elapsed, parse_instant, parse_limit
from intertie.agent.slurm.core.words import Unreadable, is_nothing

FIELD, END = "\x1f", "\x1e"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that could not be read."""

    about: str
    """Its first field: the job id, as far as it can be trusted."""
    why: str


@dataclass(frozen=True, slots=True)
class Read(Generic[T]):
    rows: Sequence[T]
    bad: Sequence[Bad] = ()


@dataclass(frozen=True, slots=True)
class Queued:
    """One line of the queue."""

    ref: JobRef
    number: int
    """The job's own id; of an array task too."""
    cluster: str
    user: str
    account: str
    partition: str
    qos: str
    state: JobState
    reason: Reason
    submitted: datetime | None
    started: datetime | None
    """Of a job that waits: expected."""
    ended: datetime | None
    limit_us: int | Limit | None
    node_count: int
    nodes: tuple[str, ...]
    gres: Sequence[Gres]
    """Per node, or of the job: see `gpus_of`."""
    folder: str
    comment: str
    name: str
    restarts: int = 0
    tres: Tres = Tres(None)
    """Of the whole job, where the listing has it."""
    exit: ExitCode | None = None


@dataclass(frozen=True, slots=True)
class Booked:
    """One run in the accounting. A job that was put back has one for each run."""

    ref: JobRef
    number: int
    cluster: str
    user: str
    account: str
    partition: str
    state: JobState
    exit: ExitCode | None
    submitted: datetime | None
    started: datetime | None
    ended: datetime | None
    elapsed_us: int | None
    suspended_us: int | None
    tres: Tres
    nodes: tuple[str, ...]
    name: str
    folder: str
    comment: str
    warning: str = ""


# --- squeue ------------------------------------------------------------------------------------------------------------------------------

# What a user may write comes last, so that whatever it holds shifts nothing before it.
SQUEUE = ("%i", "%A", "%u", "%a", "%P", "%q", "%T", "%r", "%V", "%S", "%e", "%l", "%D", "%b", "%N", "%Z", "%k", "%j")
SQUEUE_FORMAT = FIELD.join(SQUEUE) + END


def parse_squeue(output: bytes, zone: tzinfo | None = None) -> Read[Queued]:
    """All lines of `squeue -h -o SQUEUE_FORMAT`, of several clusters too (`CLUSTER: nimbus` stands before each)."""
    cluster = ""
    rows: list[Queued] = []
    bad: list[Bad] = []
    for record in output.decode("utf-8", errors="replace").split(END):
        text = record.lstrip("\r\n")
        while text.startswith("CLUSTER:"):
            head, _, text = text.partition("\n")
            cluster = head.removeprefix("CLUSTER:").strip()
        if not text.strip():
            continue
        fields = text.split(FIELD)
        _take(rows, bad, fields, len(SQUEUE), partial(_queued, fields, cluster, zone))
    return Read(rows, bad)


def _take(rows: list[T], bad: list[Bad], fields: Sequence[str], wanted: int, read: Callable[[], T]) -> None:
    about = fields[0].strip()[:40]
    if len(fields) != wanted:
        bad.append(Bad(about, f"{len(fields)} fields instead of {wanted}"))
        return
    try:
        rows.append(read())
    except Unreadable as err:
        bad.append(Bad(about, str(err)))


def _int(text: str, what: str) -> int:
    told = text.strip()
    if not re.fullmatch(r"\d{1,12}", told, re.ASCII):
        raise Unreadable(what, text)
    return int(told)


def _queued(fields: Sequence[str], cluster: str, zone: tzinfo | None) -> Queued:
    ref, number, user, account, partition, qos, state, reason, submit, start, end, limit, count, gres, nodes, folder, comment, name = fields
    return Queued(
        ref=parse_ref(ref),
        number=_int(number, "job id"),
        cluster=cluster,
        user=user.strip(),
        account=_word(account),
        partition=_word(partition),
        qos=_word(qos),
        state=parse_state(state),
        reason=parse_reason(reason),
        submitted=parse_instant(submit, zone),
        started=parse_instant(start, zone),
        ended=parse_instant(end, zone),
        limit_us=parse_limit(limit),
        node_count=_int(count, "count of nodes"),
        gres=parse_gres(gres),
        nodes=parse_hosts(nodes),
        folder=folder,
        comment=_word(comment),
        name=name,
    )


def _word(text: str) -> str:
    return "" if is_nothing(text) else text.strip()


EXIT_FORMAT = "JobID:.20,exit_code:.20"


def parse_codes(output: bytes) -> Mapping[int, ExitCode]:
    """`squeue -O EXIT_FORMAT`: job id → how it ended, whole, from the wait status that the queue keeps. Lines that are none say nothing."""
    found = dict[int, ExitCode]()
    for line in output.decode("utf-8", errors="replace").splitlines():
        words = line.split()
        if len(words) == 2 and all(re.fullmatch(r"\d{1,10}", word, re.ASCII) for word in words):
            try:
                found[int(words[0])] = from_wait_status(int(words[1]))
            except Unreadable:
                continue
    return found


# --- sacct -------------------------------------------------------------------------------------------------------------------------------

SACCT = (
    *("JobID", "JobIDRaw", "Cluster", "User", "Account", "Partition", "State", "ExitCode", "Submit", "Start", "End", "ElapsedRaw"),
    *("Suspended", "AllocTRES", "NodeList", "JobName", "WorkDir", "Comment"),
)


def parse_sacct(output: bytes, zone: tzinfo | None = None) -> Read[Booked]:
    """All runs of `sacct -X -n -P --delimiter=FIELD -o …`. Steps are no jobs (BR-077); a name with a newline is put together again (BR-036)."""
    rows: list[Booked] = []
    bad: list[Bad] = []
    for fields in _joined(output.decode("utf-8", errors="replace").split("\n"), len(SACCT)):
        if "." in fields[0] or "." in (fields[1] if len(fields) > 1 else ""):
            continue
        _take(rows, bad, fields, len(SACCT), partial(_booked, fields, zone))
    return Read(rows, bad)


def _joined(lines: Iterable[str], wanted: int) -> Iterator[list[str]]:
    """Lines as records of `wanted` fields; a line too short goes on in the next ones."""
    held: list[str] = []
    for line in lines:
        if not held and not line.strip():
            continue
        parts = line.split(FIELD)
        if held:
            # A new record begins with a job id: what is held was cut short, and is told as it is.
            if len(parts) == wanted and re.match(r"\d+([_+.\[]|\Z)", parts[0], re.ASCII):
                yield held
                held = parts
            else:
                held = [*held[:-1], f"{held[-1]}\n{parts[0]}", *parts[1:]]
        else:
            held = parts
        if len(held) >= wanted:
            yield held
            held = []
    if held:
        yield held


def _booked(fields: Sequence[str], zone: tzinfo | None) -> Booked:
    ref, raw, cluster, user, account, partition, state, code, submit, start, end, elapsed, suspended, tres, nodes, name, folder, comment = (
        fields
    )
    named = parse_ref(ref)
    number = parse_ref(raw).id
    started, ended = parse_instant(start, zone), parse_instant(end, zone)
    allocated = parse_tres(tres)
    return Booked(
        ref=named,
        number=number,
        cluster=cluster.strip(),
        user=user.strip(),
        account=_word(account),
        partition=_word(partition),
        state=parse_state(state),
        exit=parse_exit(code, booked=True),
        submitted=parse_instant(submit, zone),
        started=started,
        ended=ended,
        elapsed_us=parse_elapsed(elapsed),
        suspended_us=parse_elapsed(suspended),
        tres=allocated,
        nodes=parse_hosts(nodes),
        name=name,
        folder=folder,
        comment=_word(comment),
        warning=f"job {named.id}: typed and untyped cards differ" if allocated.contradicts else "",
    )


# --- scontrol ----------------------------------------------------------------------------------------------------------------------------

_KEY = re.compile(r"(?:^|\s)([A-Z][\w:/]*)=")


@dataclass(frozen=True, slots=True)
class Node:
    """One node with its cards, model by model; `busy` is None where Slurm does not say."""

    name: str
    state: NodeState
    reason: str
    version: str
    cards: Mapping[str, int]
    busy: int | None
    busy_from: str
    """`gres_used`, `tres` or `state`: which of Slurm's figures was taken (BR-027)."""
    cpus: int
    cores: int
    """Physical cores; `cpus` are what Slurm hands out, which may be threads of them (BR-043)."""
    cpus_busy: int
    memory_mib: int
    partitions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Partition:
    name: str
    up: bool
    state: str
    most_us: int | Limit | None
    default_us: int | Limit | None
    accounts: tuple[str, ...] = ()
    """That may use it; empty: all."""
    nodes: tuple[str, ...] = ()


def keyed(line: str) -> Mapping[str, str]:
    """`Key=value Key=value`; a value may hold blanks (`Reason=`, `OS=`). The first of two equal keys counts: free text comes last."""
    found = list(_KEY.finditer(line))
    values = dict[str, str]()
    for at, match in enumerate(found):
        end = found[at + 1].start() if at + 1 < len(found) else len(line)
        values.setdefault(match[1], line[match.end() : end].strip())
    return values


def _each(output: bytes, first: str, read: Callable[[Mapping[str, str]], T]) -> Read[T]:
    rows: list[T] = []
    bad: list[Bad] = []
    for line in output.decode("utf-8", errors="replace").splitlines():
        values = keyed(line)
        if first not in values:
            if line.strip():
                bad.append(Bad(line.strip()[:40], f"a line without {first}"))
            continue
        try:
            rows.append(read(values))
        except Unreadable as err:
            bad.append(Bad(values[first][:80], str(err)))
    return Read(rows, bad)


def parse_nodes(output: bytes) -> Read[Node]:
    """`scontrol show node -d -o`."""
    return _each(output, "NodeName", _node)


def parse_partitions(output: bytes) -> Read[Partition]:
    """`scontrol show partition -o`."""
    return _each(output, "PartitionName", _partition)


def _node(values: Mapping[str, str]) -> Node:
    state = parse_node_state(values.get("State", ""))
    gres = parse_gres(values.get("Gres", ""))
    configured = parse_tres(values.get("CfgTRES", ""))
    total = {one.model: 0 for one in gres if one.name == "gpu"}
    for one in gres:
        if one.name == "gpu":
            total[one.model] += one.count
    cpus = _int(values.get("CPUTot", ""), "count of processors")
    threads = _int(values.get("ThreadsPerCore", "1") or "1", "threads of a core")
    used, used_from = busy_cards(
        sum(total.values()), values.get("GresUsed"), parse_tres(values.get("AllocTRES", "")), configured.gpus is not None, state
    )
    reason = values.get("Reason", "").partition(" [")[0]
    return Node(
        name=values["NodeName"],
        state=state,
        reason="" if is_nothing(reason) else reason[:200],
        version=values.get("Version", ""),
        cards=total,
        busy=used,
        busy_from=used_from,
        cpus=cpus,
        cores=max(1, cpus // max(1, threads)),
        cpus_busy=_int(values.get("CPUAlloc", ""), "count of processors"),
        memory_mib=_int(values.get("RealMemory", ""), "memory of a node"),
        partitions=tuple(part for part in values.get("Partitions", "").split(",") if part and not is_nothing(part)),
    )


def busy_cards(total: int, gres_used: str | None, allocated: Tres, tracked: bool, state: NodeState) -> tuple[int | None, str]:
    """How many cards of a node are taken. GresUsed says it; TRES only where the cluster counts cards in them; a node that is wholly taken has none
    free, whatever is not said (BR-027)."""
    if total == 0:
        return 0, "gres_used"
    if gres_used is not None and not is_nothing(gres_used):
        return min(total, sum(one.count for one in parse_gres(gres_used) if one.name == "gpu")), "gres_used"
    if tracked:
        return min(total, allocated.gpus or 0), "tres"
    if state.full or not state.usable:
        return total, "state"
    if state.word.startswith("IDLE"):
        return 0, "state"
    return None, "state"


def _partition(values: Mapping[str, str]) -> Partition:
    state = values.get("State", "")
    accounts = values.get("AllowAccounts", "ALL")
    return Partition(
        name=values["PartitionName"],
        up=state == "UP",
        state=state,
        most_us=parse_limit(values.get("MaxTime", "")),
        default_us=parse_limit(values.get("DefaultTime", "")),
        accounts=() if accounts in ("ALL", "") else tuple(accounts.split(",")),
        nodes=parse_hosts(values.get("Nodes", "")),
    )


def parse_job(output: bytes, zone: tzinfo | None = None) -> Read[Queued]:
    """`scontrol show job -o ID`: the queue's own memory of a job, with its exit code, where there is no accounting or it lags."""

    def read(values: Mapping[str, str]) -> Queued:
        limit = parse_limit(values.get("TimeLimit", ""))
        return Queued(
            ref=JobRef(_int(values["JobId"], "job id")),
            number=_int(values["JobId"], "job id"),
            cluster="",
            user=values.get("UserId", "").partition("(")[0],
            account=_word(values.get("Account", "")),
            partition=_word(values.get("Partition", "")),
            qos=_word(values.get("QOS", "")),
            state=parse_state(values.get("JobState", "")),
            reason=parse_reason(values.get("Reason", "")),
            submitted=parse_instant(values.get("SubmitTime", ""), zone),
            started=parse_instant(values.get("StartTime", ""), zone),
            ended=parse_instant(values.get("EndTime", ""), zone),
            limit_us=limit,
            node_count=_int(values.get("NumNodes", "0").partition("-")[0], "count of nodes"),
            nodes=parse_hosts(values.get("NodeList", "")),
            gres=(),
            folder=values.get("WorkDir", ""),
            comment=_word(values.get("Comment", "")),
            name=values.get("JobName", ""),
            restarts=_int(values.get("Restarts", "0"), "count of restarts"),
            tres=parse_tres(values.get("AllocTRES", values.get("TRES", ""))),
            exit=parse_exit(values.get("ExitCode", "")),
        )

    return _each(output, "JobId", read)
