"""A site's machine and what lives on it: jobs, their supervisors, and the agent's hand on them. They die apart.

A job dies with its power, by a kill, or by its supervisor; a supervisor dies alone and leaves an orphan, whose exit code nobody will ever know;
the agent's death ends neither. What a supervisor is owed to do (wall limit, lease, grace, the record of the end) it does here by its host's
clocks, as `intertie.agent.supervisor` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from intertie.agent.adapters.fake import Disk, FakeAdapter, Run
from intertie.agent.adapters.port import Chunk, Presence
from intertie.agent.core.attempts import Exit
from intertie.agent.core.leases import Deadline, follows, is_over
from intertie.agent.core.model import Attempt, StartedRecord
from intertie.ids import AttemptId
from intertie.sim.clock import HostClock
from intertie.sim.disk import Moments
from intertie.sim.loop import Party

# A host under load takes this long from the order to the process, and to say that it is there.
SLOW_START_S = 4.0
# Between two looks of a supervisor: at its lease each second, at the wall limit and for its sign of life every ten.
LOOK_S, ALIVE_S = 1.0, 10.0
# From SIGKILL to the last process gone.
KILL_S = 0.05
LEAST_S = 0.01
SIGTERM, SIGKILL = 15, 9
# A stop that nobody named a grace for: the supervisor's own.
GRACE_S = 10.0


@dataclass(eq=False)
class Process:
    """One process group: an attempt has one, and a second only if something is wrong."""

    run: Run
    job: asyncio.Task[Exit]
    supervisor: Party
    began_s: float
    """CLOCK_BOOTTIME of its host."""
    ended_s: float | None = None
    signal: int | None = None
    alive_s: float = 0.0
    """The supervisor's last sign of life, CLOCK_BOOTTIME."""
    lease: Deadline | None = None
    """As its supervisor read it last."""
    stopped: bool = False
    """Its host was paused whole while it lived, clocks and all: nothing on it can know that its lease is over."""

    @property
    def live(self) -> bool:
        return self.ended_s is None

    @property
    def excused(self) -> bool:
        """Nobody is there, or was there in time, to stop it when its lease ends: `rerun` promises one result, not one run (LINK D4)."""
        return self.stopped or self.supervisor.dead or self.supervisor.paused


class Machine:
    """A site's hardware, and the party to which its processes belong. `began` is told of every start."""

    def __init__(self, name: str, folder: Path, clock: HostClock, rng: Random, began: Callable[[Machine, Process], None]) -> None:
        self.name, self.clock, self.rng, self.began = name, clock, rng, began
        self.disk = Disk(folder=folder)
        self.party = Party(f"machine-{name}")
        self.processes: list[Process] = []

    def live(self) -> list[Process]:
        """Process groups that exist at this instant."""
        return [one for one in self.processes if one.live]

    def of(self, attempt: AttemptId) -> Process | None:
        """The latest process of an attempt."""
        return next((one for one in reversed(self.processes) if one.run.attempt.id == attempt), None)

    # --- what can happen to it ---

    def pause(self, *, clocks_too: bool) -> None:
        """Everything on it stands still, and does not know."""
        for process in self.live():
            process.stopped = process.stopped or clocks_too
        for party in self._parties():
            party.pause(asleep=True)

    def resume(self) -> None:
        for party in self._parties():
            party.resume()

    def _parties(self) -> Iterator[Party]:
        yield self.party
        yield from (one.supervisor for one in self.processes if not one.supervisor.dead)

    def lose_supervisor(self, process: Process) -> None:
        """It alone is killed; its job lives on and nobody waits for it."""
        if not process.supervisor.dead:
            process.supervisor.kill()

    def kill_job(self, process: Process) -> None:
        """The job alone, by the kernel or a person."""
        process.signal = SIGKILL
        process.job.cancel()

    def lose_power(self) -> None:
        """Everything that ran is gone; the disk stays, and with it the last signs of life."""
        for one in self.live():
            one.ended_s = self.clock.boot_s()
            assert one.run.started is not None and one.run.living is not None
            ran_s = max(0.0, one.alive_s - one.began_s)
            one.run.exit = Exit(certain=False, rebooted=True, ran_us=int(ran_s * 1e6))
            one.run.living.cancel()
            one.job.cancel()
            if not one.supervisor.dead:
                one.supervisor.kill()
            one.run.over.set()
        self.party.resume()


class SimAdapter(FakeAdapter):
    """One agent's hand on its machine: the processes that it starts are the machine's, and what it asks takes its time."""

    def __init__(self, machine: Machine, moments: Moments) -> None:
        super().__init__(machine.clock, machine.disk, accounts=frozenset({"acme", "beta"}))
        self.machine, self.moments = machine, moments

    # --- a start ---

    async def prepare(self, attempt: Attempt, pack: Path | None) -> None:
        await self.moments.pass_by()
        await super().prepare(attempt, pack)

    async def start(self, attempt: Attempt) -> StartedRecord | Exit:
        await self.moments.pass_by(SLOW_START_S)
        made = await asyncio.shield(self.machine.party.spawn(self._begin(attempt), f"start-{attempt.id}"))
        await self.moments.pass_by(SLOW_START_S)
        return made

    async def _begin(self, attempt: Attempt) -> StartedRecord | Exit:
        """In the machine's name: an agent that dies now has started it all the same."""
        return await super().start(attempt)

    async def _execute(self, run: Run) -> Exit:
        """What it leaves names the attempt: no two results are alike."""
        end = await super()._execute(run)
        run.files = {name: data + run.attempt.id.encode() for name, data in run.files.items()}
        return end

    async def _live(self, run: Run) -> None:
        """The job's own life; its supervisor watches it, and what the supervisor does not record nobody knows."""
        process = self.begin(run)
        await asyncio.wait({process.job})
        process.ended_s = process.ended_s or self.clock.boot_s()
        if not process.supervisor.dead:
            await asyncio.wait(process.supervisor.tasks)
        if run.exit is None:
            run.exit = Exit(certain=False, ran_us=_us(process.ended_s) - _us(process.began_s))
        run.over.set()

    def begin(self, run: Run) -> Process:
        """A process group and its supervisor. Called in the machine's name."""
        now_s = self.clock.boot_s()
        process = Process(run, asyncio.create_task(self._execute(run)), Party(f"supervisor of {run.attempt.id}"), now_s, alive_s=now_s)
        if run.started is not None:
            process.began_s = run.started.boot_ns / 1e9
        self.machine.processes.append(process)
        process.supervisor.spawn(self._supervise(process))
        self.machine.began(self.machine, process)
        return process

    # --- its supervisor ---

    async def _supervise(self, process: Process) -> None:
        run, why = process.run, ""
        asked = asyncio.create_task(run.stop_asked.wait())
        while not process.job.done() and not why:
            now_s = self.clock.boot_s()
            if now_s - process.alive_s >= ALIVE_S:
                process.alive_s = now_s
            why = self._ends_for(process, now_s)
            if not why:
                limit_s = process.began_s + run.attempt.spec.wall_s - now_s
                patience_s = min(ALIVE_S if run.deadline is None else LOOK_S, max(limit_s, LEAST_S))
                await asyncio.wait({process.job, asked}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if why:
            await self._end(process, GRACE_S)
        await self.moments.pass_by(0.1)
        run.exit = self._record(process, why)

    def _ends_for(self, process: Process, now_s: float) -> str:
        """Why it is stopped now; empty if it may go on."""
        run = process.run
        if run.stop_asked.is_set():
            return "asked"
        if now_s - process.began_s >= run.attempt.spec.wall_s:
            return "wall_limit"
        process.lease = follows(process.lease, run.deadline)
        return "lease_ended" if process.lease is not None and is_over(process.lease, self.machine.clock.moment()) else ""

    async def _end(self, process: Process, grace_s: float) -> None:
        """TERM, which most jobs heed at once; then the grace, then KILL."""
        heeds = self.machine.rng.random()
        if heeds < 0.5:
            await asyncio.wait({process.job}, timeout=grace_s * min(1.0, heeds * 3))
        process.job.cancel()
        await asyncio.sleep(KILL_S)

    def _record(self, process: Process, why: str) -> Exit:
        ran_us = _us(process.ended_s or self.clock.boot_s()) - _us(process.began_s)
        if process.job.cancelled() or not process.job.done():
            return Exit(certain=True, signal=process.signal or SIGTERM, stopped_for=why or None, ran_us=ran_us)
        end = process.job.result()
        return Exit(
            certain=True,
            code=end.code,
            signal=end.signal,
            refused_errno=end.refused_errno,
            refused_file=end.refused_file,
            refused_text=end.refused_text,
            ran_us=ran_us,
        )

    # --- what the agent asks ---

    async def renew(self, attempt: AttemptId, until: Deadline) -> None:
        await self.moments.pass_by()
        await super().renew(attempt, until)

    async def presence(self, attempt: AttemptId) -> Presence:
        await self.moments.pass_by()
        return await super().presence(attempt)

    async def fence(self, attempt: AttemptId) -> bool:
        await self.moments.pass_by()
        fenced = await super().fence(attempt)
        await self.moments.pass_by()
        return fenced

    async def ended(self, attempt: Attempt) -> Exit:
        why = await self._see_out(attempt.id)
        end = await super().ended(attempt)
        await self.moments.pass_by(0.2)
        return replace(end, certain=True, stopped_for=why) if why and not end.certain and not end.rebooted else end

    async def _see_out(self, attempt: AttemptId) -> str:
        """As `orphans.Orphan.see_out`: work whose supervisor is lost is stopped by the agent, if it must be and the agent lives; why."""
        while (process := self.machine.of(attempt)) is not None and process.live and not process.job.done():
            watched = set[asyncio.Task[Any]]()
            if not process.supervisor.dead:
                watched = {process.supervisor.tasks[0]}
            elif why := self._ends_for(process, self.clock.boot_s()):
                await self._end(process, GRACE_S)
                return why
            await asyncio.wait({process.job, *watched}, timeout=None if watched else LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        return ""

    async def stop(self, attempt: AttemptId, grace_s: int) -> None:
        await self.moments.pass_by()
        await super().stop(attempt, grace_s)

    async def log(self, attempt: AttemptId, offset: int, limit: int) -> Chunk:
        await self.moments.pass_by()
        return await super().log(attempt, offset, limit)


def _us(seconds: float) -> int:
    return int(seconds * 1e6)


def processes(machines: Sequence[Machine]) -> list[Process]:
    """Every process group that ever began, on all machines."""
    return [process for machine in machines for process in machine.processes]
