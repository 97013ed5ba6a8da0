"""slurmrestd's JSON (v0.0.38 to v0.0.44) as the same rows that the text listings give.

A number may be a number, or `{"set": …, "infinite": …, "number": …}`; a state a word or a list of words; an exit code wait(2)'s status or an object.
An answer with `errors` is no answer, whatever else stands in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from intertie.agent.slurm.core.amounts import parse_gres, parse_tres
from intertie.agent.slurm.core.names import ExitCode, JobRef, from_wait_status, parse_hosts
from intertie.agent.slurm.core.records import Bad, Booked, Node, Queued, Read, busy_cards
from intertie.agent.slurm.core.states import parse_node_state, parse_reason, parse_state
from intertie.agent.slurm.core.times import Limit, parse_instant
from intertie.agent.slurm.core.words import Unreadable, is_nothing

T = TypeVar("T")


class Errors(Unreadable):
    """The answer says that something went wrong."""


def answer(body: bytes) -> Mapping[str, Any]:
    """An answer without errors. `Errors` with the first one's words, `Unreadable` if it is no object."""
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise Unreadable("answer of slurmrestd", body[:80].decode("utf-8", errors="replace")) from err
    if not isinstance(told, dict):
        raise Unreadable("answer of slurmrestd", str(told)[:80])
    errors = told.get("errors")
    if errors:
        first = errors[0] if isinstance(errors, list) else errors
        words = first.get("description") or first.get("error") or str(first) if isinstance(first, dict) else str(first)
        number = first.get("error_number", first.get("errno")) if isinstance(first, dict) else None
        raise Errors("good answer of slurmrestd", f"{words}{f' ({number})' if number else ''}")
    return told


def number(value: object, what: str) -> int | None:
    """None where it is not set or infinite; `Unreadable` if it is no whole number."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        if value.get("infinite") or not value.get("set", "number" in value):
            return None
        return number(value.get("number"), what)
    if isinstance(value, bool):
        raise Unreadable(what, str(value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 20:
        return int(value)
    if not isinstance(value, int):
        raise Unreadable(what, str(value))
    return value


def _count(value: object, what: str) -> int:
    found = number(value, what)
    return max(0, found) if found is not None else 0


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return _text(value.get("string", value.get("text")))
    if not isinstance(value, str):
        raise Unreadable("text", str(value))
    return "" if is_nothing(value) else value


def _state(value: object) -> Sequence[str] | str:
    if isinstance(value, Mapping):
        value = value.get("current")
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return value
    if isinstance(value, str):
        return value
    raise Unreadable("state", str(value))


def instant(value: object) -> datetime | None:
    found = number(value, "moment")
    return parse_instant(str(found)) if found is not None else None


def exit_code(value: object) -> ExitCode | None:
    """A wait status, or `{"status": …, "return_code": 7, "signal": {"signal_id": 9}}`. The object of 22.05's `sacct --json` says 0 for a 7: never asked."""
    if value is None:
        return None
    if isinstance(value, Mapping) and "return_code" in value:
        sent = value.get("signal")
        told = sent.get("id", sent.get("signal_id")) if isinstance(sent, Mapping) else sent
        code, signal = _count(value.get("return_code"), "exit code"), _count(told, "signal")
        if code > 255 or signal > 127:
            raise Unreadable("exit code", str(value))
        return ExitCode(code, signal)
    status = number(value, "exit code")
    return from_wait_status(status) if status is not None else None


def _limit(value: object) -> int | Limit | None:
    if isinstance(value, Mapping) and value.get("infinite"):
        return Limit.UNLIMITED
    minutes = number(value, "time limit")
    if minutes is None or minutes in (0xFFFFFFFF, 0xFFFFFFFE):
        return Limit.UNLIMITED if minutes == 0xFFFFFFFF else None
    return minutes * 60_000_000


def _each(told: Mapping[str, Any], key: str, about: str, read: Callable[[Mapping[str, Any]], T]) -> Read[T]:
    listed = told.get(key)
    if not isinstance(listed, list):
        raise Unreadable("answer of slurmrestd", f"without {key}")
    rows: list[T] = []
    bad: list[Bad] = []
    for one in listed:
        name = str(one.get(about))[:40] if isinstance(one, Mapping) else str(one)[:40]
        try:
            if not isinstance(one, Mapping):
                raise Unreadable("entry", str(one))
            rows.append(read(one))
        except Unreadable as err:
            bad.append(Bad(name, str(err)))
    return Read(rows, bad)


def jobs(told: Mapping[str, Any]) -> Read[Queued]:
    """`GET /slurm/v…/jobs`."""

    def read(job: Mapping[str, Any]) -> Queued:
        native = number(job.get("job_id"), "job id")
        if native is None or native < 1:
            raise Unreadable("job id", str(job.get("job_id")))
        array, task = number(job.get("array_job_id"), "array"), number(job.get("array_task_id"), "array task")
        in_array = bool(array)
        return Queued(
            ref=JobRef(array if in_array and array else native, task if in_array else None),
            number=native,
            cluster=_text(job.get("cluster")),
            user=_text(job.get("user_name")),
            account=_text(job.get("account")),
            partition=_text(job.get("partition")),
            qos=_text(job.get("qos")),
            state=parse_state(_state(job.get("job_state"))),
            reason=parse_reason(_text(job.get("state_reason"))),
            submitted=instant(job.get("submit_time")),
            started=instant(job.get("start_time")),
            ended=instant(job.get("end_time")),
            limit_us=_limit(job.get("time_limit")),
            node_count=_count(job.get("node_count"), "count of nodes"),
            nodes=parse_hosts(_text(job.get("nodes"))),
            gres=parse_gres(_text(job.get("tres_per_node")).replace("gres/", "").replace("gres:", "")),
            folder=_text(job.get("current_working_directory")),
            comment=_text(job.get("comment")),
            name=_text(job.get("name")),
            restarts=_count(job.get("restart_cnt"), "count of restarts"),
            tres=parse_tres(_text(job.get("tres_alloc_str"))),
            exit=exit_code(job.get("exit_code")),
        )

    return _each(told, "jobs", "job_id", read)


def _tres_list(value: object) -> str:
    """`[{"type": "gres", "name": "gpu:a100", "count": 4}, …]` as the text that the same parser reads."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return ""
    parts = []
    for one in value:
        if not isinstance(one, Mapping):
            raise Unreadable("TRES", str(one))
        kind, name, count = _text(one.get("type")), _text(one.get("name")), number(one.get("count"), "count")
        if kind == "mem":
            parts.append(f"mem={count}M" if count is not None else "mem=")
        elif count is not None:
            parts.append(f"{kind}/{name}={count}" if name else f"{kind}={count}")
    return ",".join(parts)


def runs(told: Mapping[str, Any]) -> Read[Booked]:
    """`GET /slurmdb/v…/jobs`. Exit codes of v0.0.38 cannot be believed (LAB: SUCCESS for a 7); a FAILED with code 0 stays an unknown end."""

    def read(job: Mapping[str, Any]) -> Booked:
        native = number(job.get("job_id"), "job id")
        if native is None or native < 1:
            raise Unreadable("job id", str(job.get("job_id")))
        times = job.get("time")
        if not isinstance(times, Mapping):
            raise Unreadable("times of a job", str(times))
        tres, comment = job.get("tres"), job.get("comment")
        allocated = parse_tres(_tres_list(tres.get("allocated") if isinstance(tres, Mapping) else None))
        suspended, elapsed = number(times.get("suspended"), "suspended time"), number(times.get("elapsed"), "elapsed time")
        return Booked(
            ref=JobRef(native),
            number=native,
            cluster=_text(job.get("cluster")),
            user=_text(job.get("user")),
            account=_text(job.get("account")),
            partition=_text(job.get("partition")),
            state=parse_state(_state(job.get("state"))),
            exit=exit_code(job.get("exit_code")),
            submitted=instant(times.get("submission")),
            started=instant(times.get("start")),
            ended=instant(times.get("end")),
            elapsed_us=elapsed * 1_000_000 if elapsed is not None else None,
            suspended_us=suspended * 1_000_000 if suspended is not None else None,
            tres=allocated,
            nodes=parse_hosts(_text(job.get("nodes"))),
            name=_text(job.get("name")),
            folder=_text(job.get("working_directory")),
            comment=_text(comment.get("job") if isinstance(comment, Mapping) else comment),
        )

    return _each(told, "jobs", "job_id", read)


def nodes(told: Mapping[str, Any]) -> Read[Node]:
    """`GET /slurm/v…/nodes`."""

    def read(node: Mapping[str, Any]) -> Node:
        name = _text(node.get("name"))
        if not name:
            raise Unreadable("node", str(node.get("name")))
        flags = node.get("state_flags")
        state = parse_node_state(_state(node.get("state")), [str(flag) for flag in flags] if isinstance(flags, list) else [])
        total = dict[str, int]()
        for one in parse_gres(_text(node.get("gres"))):
            if one.name == "gpu":
                total[one.model] = total.get(one.model, 0) + one.count
        used, used_from = busy_cards(
            sum(total.values()),
            node["gres_used"] if isinstance(node.get("gres_used"), str) else None,
            parse_tres(_text(node.get("tres_used"))),
            parse_tres(_text(node.get("tres"))).gpus is not None,
            state,
        )
        cpus, threads = _count(node.get("cpus"), "count of processors"), _count(node.get("threads"), "threads of a core")
        listed = node.get("partitions")
        return Node(
            name=name,
            state=state,
            reason=_text(node.get("reason"))[:200],
            version=_text(node.get("version")) or _text(node.get("slurmd_version")),
            cards=total,
            busy=used,
            busy_from=used_from,
            cpus=cpus,
            cores=max(1, cpus // max(1, threads)),
            cpus_busy=_count(node.get("alloc_cpus"), "count of processors"),
            memory_mib=_count(node.get("real_memory"), "memory of a node"),
            partitions=tuple(str(one) for one in listed) if isinstance(listed, list) else (),
        )

    return _each(told, "nodes", "name", read)
