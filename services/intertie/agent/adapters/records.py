"""The records of a job's folder as the agent reads them; `intertie.agent.supervisor` leaves most of them, and is their contract."""

from __future__ import annotations

import msgspec

from intertie.agent.core.attempts import Exit
from intertie.agent.core.model import Attempt, StartedRecord


class StartedFile(msgspec.Struct, frozen=True):
    format: int
    pid: int
    start_ticks: int
    boot_id: str
    utc_ns: int
    boot_ns: int


class RefusedFile(msgspec.Struct, frozen=True):
    errno: int
    file: str
    text: str


class MomentFile(msgspec.Struct, frozen=True):
    utc_ns: int
    boot_ns: int


class GroupFile(msgspec.Struct, frozen=True):
    """Of a cgroup that limits the run, where it is."""

    folder: str


class SpecFile(msgspec.Struct, frozen=True):
    """Of `spec.json`, what we read again."""

    uid: int | None = None
    grace_s: float = 10.0
    limits: list[GroupFile] = []


class ExitFile(msgspec.Struct, frozen=True):
    format: int
    code: int | None
    signal: int | None
    refused: RefusedFile | None
    stopped_for: str | None
    left_behind: int
    started: MomentFile
    gone: MomentFile
    ran_us: int
    user_s: float
    system_s: float
    max_rss_kib: int
    out_of_memory: bool = False


class KeptFile(msgspec.Struct, frozen=True):
    """`attempt.json`."""

    format: int
    attempt: Attempt


def record_of(started: StartedFile) -> StartedRecord:
    return StartedRecord(utc_ns=started.utc_ns, boot_ns=started.boot_ns, native_id=str(started.pid))


def exit_of(record: ExitFile) -> Exit:
    refused = record.refused
    return Exit(
        certain=True,
        code=record.code,
        signal=record.signal,
        refused_errno=refused.errno if refused else None,
        refused_file=refused.file if refused else "",
        refused_text=refused.text if refused else "",
        stopped_for=record.stopped_for,
        left_behind=record.left_behind,
        ran_us=record.ran_us,
        user_s=record.user_s,
        system_s=record.system_s,
        max_rss_kib=record.max_rss_kib,
        out_of_memory=record.out_of_memory,
    )
