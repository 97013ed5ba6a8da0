"""What a tree of processes takes: proportional memory from `smaps_rollup`, processor time from `stat` (proc(5)). Read only, Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Stat:
    """One process: who it is, whose child, and the processor time that it and its reaped children have taken; seconds."""

    pid: int
    parent: int
    start_ticks: int
    name: str
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB: proportional share, and what is this process's alone."""

    pss_mib: float
    private_mib: float


def parse_stat(text: str) -> Stat:
    """/proc/PID/stat. The name may hold blanks and brackets, so the fields count from its last bracket."""
    head, _, rest = text.rpartition(")")
    pid, _, name = head.partition(" (")
    fields = rest.split()
    ticks = sum(int(fields[index]) for index in (11, 12, 13, 14))
    return Stat(int(pid), int(fields[1]), int(fields[19]), name, ticks / TICKS)


def parse_rollup(text: str) -> Memory:
    """/proc/PID/smaps_rollup; its numbers are KiB."""
    kib = {
        line.partition(":")[0]: int(line.split()[1])
        for line in text.splitlines()
        if line.endswith(" kB") and line.partition(":")[2].strip()
    }
    return Memory(kib["Pss"] / 1024, (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024)


def processes() -> dict[int, Stat]:
    """All that live now."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = parse_stat(Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace"))
            except OSError:
                continue
            found[stat.pid] = stat
    return found


def below(root: int, all_of: Mapping[int, Stat]) -> list[Stat]:
    """`root` and everything below it, parents first."""
    children: dict[int, list[Stat]] = {}
    for stat in all_of.values():
        children.setdefault(stat.parent, []).append(stat)
    found, todo = list[Stat](), [root]
    while todo:
        pid = todo.pop(0)
        if pid in all_of:
            found.append(all_of[pid])
            todo += sorted(child.pid for child in children.get(pid, []))
    return found


def memory(pid: int) -> Memory | None:
    """None once it is gone."""
    try:
        return parse_rollup(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii"))
    except (OSError, KeyError):
        return None


def cpu_between(before: Iterable[Stat], after: Iterable[Stat]) -> dict[int, float]:
    """Seconds of processor time by pid. Who came in between counts whole; who went counts through the parent that reaped it."""
    known = {(stat.pid, stat.start_ticks): stat.cpu_s for stat in before}
    return {stat.pid: stat.cpu_s - known.get((stat.pid, stat.start_ticks), 0.0) for stat in after}


def part_name(pid: int, stat: Stat) -> str:
    """How a person knows it: `scheduler` for `python -m intertie.scheduler`, else the program, or the title that a server gave itself."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return stat.name
    for word, following in zip(words, words[1:], strict=False):
        if word == "-m":
            return following.removeprefix("intertie.")
    # A server's own title: `postgres: scheduler intertie 127.0.0.1(50316) idle`. Role and database are enough.
    title = " ".join(words[0].split()[:2]) if words[0].startswith("postgres: ") else Path(words[0]).name
    return title or stat.name
