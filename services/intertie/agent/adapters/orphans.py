"""Work whose supervisor is gone (killed, out of memory): the agent carries out what that owed it, as far as its records name it.

Nobody is its subreaper any more, so what is left is found otherwise: the job's first process by its identity (pid, start ticks, kernel boot), its
session and every session and child that came of it, what carries the attempt's mark in its environment, and its cgroup where there is one. What
is none of these is let be. Each signal goes to an identity, never to a number that may have been given out again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from intertie.agent import procs
from intertie.agent.procs import Identity
from intertie.agent.supervisor import FREEZE_ROUNDS, LEASE_S, SWEEP_S, boot_ns
from intertie.ids import AttemptId

MARK = b"INTERTIE_ATTEMPT="


@dataclass(frozen=True, slots=True)
class Owed:
    """Why it must end now, and how long after TERM it is killed, seconds."""

    why: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    parent: int
    session: int
    ticks: int


class Orphan:
    """What is left of one attempt. `first`: the job's first process, which began a session of its own; `uid`: the account that it runs as; `grace_s`:
    what it left behind when it ended is given."""

    def __init__(self, attempt: AttemptId, first: Identity, uid: int, cgroup: Path | None, grace_s: float) -> None:
        self.first, self.uid, self.cgroup, self.grace_s = first, uid, cgroup, grace_s
        self._mark = MARK + attempt.encode()
        self._known: dict[int, int] = {first.pid: first.start_ticks}
        """Pid → start ticks of what was ours at the last look."""
        self._look_now = asyncio.Event()

    def asked(self) -> None:
        """What is owed may have changed."""
        self._look_now.set()

    async def see_out(self, owed: Callable[[int], Owed | None]) -> str:
        """Return once nothing of it is left: why we ended it, empty if it ended by itself. `owed` is asked at each look, with CLOCK_BOOTTIME in ns."""
        watch = asyncio.create_task(procs.gone(self.first))
        watch.add_done_callback(lambda _: self._look_now.set())
        found: Owed | None = None
        since_ns = 0
        try:
            while left := await asyncio.to_thread(self.look):
                at_ns = boot_ns()
                if found is None:
                    found = owed(at_ns) if self.first in left else Owed("", self.grace_s)
                    if found is not None:
                        since_ns = at_ns
                        _tell(left, signal.SIGTERM)
                        _tell(left, signal.SIGCONT)  # A stopped process takes no TERM.
                elif at_ns - since_ns >= found.grace_s * 1e9:
                    await asyncio.to_thread(self._kill)
                await self._pause(LEASE_S if found is None else SWEEP_S)
        finally:
            watch.cancel()
        return found.why if found is not None else ""

    async def _pause(self, longest_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._look_now.wait()
        self._look_now.clear()

    def _kill(self) -> None:
        """SIGKILL to all of it, at once where the kernel can (cgroup v2), else after holding all of it still."""
        if self.cgroup is not None:
            with contextlib.suppress(OSError):
                (self.cgroup / "cgroup.kill").write_text("1", encoding="ascii")
        held: set[Identity] = set()
        for _ in range(FREEZE_ROUNDS):
            fresh = set(self.look()) - held
            if not fresh:
                break
            _tell(fresh, signal.SIGSTOP)
            held |= fresh
        _tell(self.look(), signal.SIGKILL)

    # --- who it is ---

    def look(self) -> list[Identity]:
        """Its living processes now."""
        there = _table()
        ours = {pid for pid, ticks in self._known.items() if pid in there and there[pid].ticks == ticks}
        ours |= {pid for pid, stat in there.items() if pid not in ours and self._names_itself(pid, stat, there)}
        ours |= self._in_cgroup() & there.keys()
        while True:
            # A session is joined by nobody from outside, and its number is given to no other while it has members.
            sessions = {there[pid].session for pid in ours}
            more = {pid for pid, stat in there.items() if pid not in ours and (stat.parent in ours or stat.session in sessions)}
            if not more:
                break
            ours |= more
        self._known = {pid: there[pid].ticks for pid in ours}
        return [Identity(pid, there[pid].ticks, self.first.boot_id) for pid in sorted(ours) if there[pid].state not in "ZX"]

    def _names_itself(self, pid: int, stat: _Stat, there: dict[int, _Stat]) -> bool:
        """By its environment, or by the session of a first process that is gone; only what runs as the job's account and began after it."""
        if stat.ticks < self.first.start_ticks or _uid(pid) != self.uid:
            return False
        try:
            marks = {one for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if one.startswith(MARK)}
        except OSError:
            marks = set()
        if marks:
            return self._mark in marks
        leader = there.get(self.first.pid)
        return stat.session == self.first.pid and (leader is None or leader.ticks == self.first.start_ticks)

    def _in_cgroup(self) -> set[int]:
        if self.cgroup is None:
            return set()
        try:
            return {int(pid) for file in self.cgroup.rglob("cgroup.procs") for pid in file.read_text(encoding="ascii").split()}
        except OSError:
            return set()


def _table() -> dict[int, _Stat]:
    """All processes of this machine; the name in field 2 may hold spaces and brackets, so count from its last bracket."""
    found: dict[int, _Stat] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                found[int(entry.name)] = _Stat(fields[0].decode("ascii"), int(fields[1]), int(fields[3]), int(fields[19]))
    return found


def _uid(pid: int) -> int | None:
    with contextlib.suppress(OSError, IndexError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[2])
    return None


def _tell(whom: Collection[Identity], number: signal.Signals) -> None:
    for who in whom:
        with contextlib.suppress(PermissionError):
            procs.send(who, number)
