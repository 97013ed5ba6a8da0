"""What is on disks, and the moments at which a process can die over it: stores of the hub, a site's journal, a site's machine with its jobs.

Disks outlive processes. Every door asks first whether the process that knocks still lives, waits a little (that is where a crash, a pause or
somebody else comes in between), and can be the place of a doom: death just before a commit, or just after it, before anybody was told.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from intertie.agent.adapters.fake import Disk, FakeAdapter, Run
from intertie.agent.adapters.port import Chunk, Presence
from intertie.agent.core.attempts import Exit
from intertie.agent.core.model import Attempt, StartedRecord
from intertie.agent.journal import SqliteJournal
from intertie.clock import Clock
from intertie.contracts.job import ResultRef, WorkRef
from intertie.errors import Unavailable
from intertie.ids import AttemptId, Digest, JournalId
from intertie.metering.memory import MemoryMetering
from intertie.scheduler.memory import MemorySchedulerStore
from intertie.sim.loop import PARTY, Party
from intertie.store import Leader, MemoryStore
from intertie.store.memory import MemoryOutbox
from intertie.store.outbox import OutboxRow, StreamMark

T = TypeVar("T")

# A host under load takes this long from the order to the process, and to say that it is there.
SLOW_START_S = 4.0


class Moments:
    """Where time passes between a check and its act, drawn from the seed."""

    def __init__(self, rng: Random, died: Callable[[Party, str], None]) -> None:
        """`died`: told of a doom that came true."""
        self._rng, self._died = rng, died

    async def pass_by(self, longest_s: float = 0.02) -> None:
        """A moment, most often none at all."""
        party = PARTY.get()
        party.must_live()
        drawn = self._rng.random()
        if drawn < 0.3:
            await asyncio.sleep(drawn * longest_s)
            party.must_live()

    def doom(self, when: str) -> None:
        """A commit, seen from one side: `before` or `after`."""
        party = PARTY.get()
        party.must_live()
        if party.doom == when:
            party.doom_in -= 1
            if party.doom_in > 0:
                return
            party.doom = ""
            self._died(party, when)
            party.kill()
            raise asyncio.CancelledError


def gist(store: MemoryStore) -> tuple[int, ...]:
    """Changes when a transaction wrote what matters: an event, a mark, an entry. Beats and relays are killed by plain crashes."""
    held = vars(store)
    return (store.last_row, len(store.seen), *(len(held.get(name, ())) for name in ("lane_entries", "lane_open")))


class Networked(MemoryStore):
    """A twin as a service sees its PostgreSQL over a network: away at times, and a process may die just before or after a commit."""

    _moments: Moments
    _away = False

    def refuse(self, away: bool) -> None:
        self._away = away

    def answer(self) -> None:
        if self._away:
            raise Unavailable("store.unavailable", "the database is away")

    def _copied(self, value: Any) -> Any:
        """One level is enough for this twin, and most of a run's time otherwise."""
        return value.copy() if type(value) in _CONTAINERS else value

    @property
    def outbox(self) -> MemoryOutbox:
        return SimOutbox(self)

    @asynccontextmanager
    async def transaction(self, *, timeout_s: float = 5.0, reserved: bool = False, read_only: bool = False) -> AsyncIterator[MemoryStore]:
        await self._moments.pass_by()
        self.answer()
        before = gist(self)
        async with super().transaction() as tx:
            yield tx
            changed = gist(self) != before
            if changed:
                self._moments.doom("before")
        if changed:
            self._moments.doom("after")
        await self._moments.pass_by()


_CONTAINERS = frozenset({dict, list, set})


class SimOutbox(MemoryOutbox):
    """A relay at rest asks each beat, and most often there is nothing: then it is told so without a transaction."""

    async def take(self, leader: Leader, mark: StreamMark, limit: int) -> Sequence[OutboxRow]:
        store = self._store
        assert isinstance(store, Networked)
        store.answer()
        if all(row.generation >= mark.generation for row in reversed(store.rows.values())):
            PARTY.get().must_live()
            await store.fence(leader)
            return ()
        return await super().take(leader, mark, limit)


class SchedulerDisk(Networked, MemorySchedulerStore):
    """PostgreSQL of the scheduler."""

    def __init__(self, moments: Moments, clock: Clock) -> None:
        self._moments = moments
        MemorySchedulerStore.__init__(self, clock=clock)


class MeteringDisk(Networked, MemoryMetering):
    """PostgreSQL of metering."""

    def __init__(self, moments: Moments, clock: Clock) -> None:
        self._moments = moments
        MemoryMetering.__init__(self, clock=clock)


class SimJournal(SqliteJournal):
    """The agent's own journal on a database in memory that outlives the agent; its disk may be full."""

    def __init__(self, connection: sqlite3.Connection, journal: JournalId, moments: Moments, full: Callable[[], bool]) -> None:
        super().__init__(connection, _NO_THREAD, journal)
        self._moments, self._full = moments, full

    async def _on_disk(self, work: Callable[[], T]) -> T:
        await self._moments.pass_by()
        done = work()
        await self._moments.pass_by()
        return done

    async def write(self, work: Callable[[sqlite3.Cursor], T]) -> T:
        PARTY.get().must_live()
        if self._full():
            raise Unavailable("agent.disk_full", "the journal's disk refused a write: nothing was written", retry_after_s=10)
        self._moments.doom("before")
        value = await super().write(work)
        self._moments.doom("after")
        return value


_NO_THREAD = ThreadPoolExecutor(1)
"""Never used: a thread would not wait in virtual time. An executor without work starts none."""


class Machine:
    """A site's hardware: runs of the fake adapter, and the party to which its processes belong. `began` is told of every start."""

    def __init__(self, name: str, folder: Path, began: Callable[[Machine, Run], None]) -> None:
        self.name = name
        self.disk = Disk(folder=folder)
        self.party = Party(f"machine-{name}")
        self.began = began

    def live(self) -> list[Run]:
        """Process groups that exist at this instant."""
        return [run for run in self.disk.runs.values() if run.started is not None and run.exit is None]

    def lose_supervisor(self, run: Run, now_s: float) -> None:
        """The supervisor is killed, and its job with it: nobody saw the exit code."""
        self._lost(run, now_s, rebooted=False)

    def lose_power(self, now_s: float) -> None:
        """Everything that ran is gone; the disk stays."""
        for run in self.live():
            self._lost(run, now_s, rebooted=True)

    def _lost(self, run: Run, now_s: float, *, rebooted: bool) -> None:
        assert run.started is not None and run.living is not None
        ran_us = max(0, int(now_s * 1e6) - run.started.boot_ns // 1000)
        run.exit = Exit(certain=False, rebooted=rebooted, ran_us=ran_us)
        run.living.cancel()
        run.over.set()


class SimAdapter(FakeAdapter):
    """One agent's hand on its machine: the processes that it starts are the machine's."""

    def __init__(self, machine: Machine, clock: Clock, moments: Moments) -> None:
        super().__init__(clock, machine.disk, accounts=frozenset({"acme", "beta"}))
        self.machine, self.moments = machine, moments

    async def prepare(self, attempt: Attempt, pack: Path | None) -> None:
        await self.moments.pass_by()
        await super().prepare(attempt, pack)

    async def start(self, attempt: Attempt) -> StartedRecord | Exit:
        await self.moments.pass_by(SLOW_START_S)
        run = self.disk.runs[attempt.id]
        before = run.started
        made = await asyncio.shield(self.machine.party.spawn(super().start(attempt), f"start-{attempt.id}"))
        if before is None and run.started is not None:
            self.machine.began(self.machine, run)
        await self.moments.pass_by(SLOW_START_S)
        return made

    async def presence(self, attempt: AttemptId) -> Presence:
        await self.moments.pass_by()
        return await super().presence(attempt)

    async def fence(self, attempt: AttemptId) -> bool:
        await self.moments.pass_by()
        fenced = await super().fence(attempt)
        await self.moments.pass_by()
        return fenced

    async def ended(self, attempt: Attempt) -> Exit:
        end = await super().ended(attempt)
        await self.moments.pass_by(0.2)
        return end

    async def stop(self, attempt: AttemptId, grace_s: int) -> None:
        await self.moments.pass_by()
        await super().stop(attempt, grace_s)

    async def log(self, attempt: AttemptId, offset: int, limit: int) -> Chunk:
        await self.moments.pass_by()
        return await super().log(attempt, offset, limit)


class SimTransfer:
    """`intertie.agent.transfer.Transfer` to a gateway that may be away."""

    def __init__(self, stored: dict[Digest, int], away: Callable[[], bool], moments: Moments) -> None:
        self._stored, self._away, self._moments = stored, away, moments

    async def fetch(self, work: WorkRef, target: Path) -> None:
        await self._answer()

    async def store(self, result: ResultRef, source: Path) -> None:
        await self._answer()
        self._stored[result.digest] = result.size

    async def _answer(self) -> None:
        await self._moments.pass_by(1.0)
        if self._away():
            raise Unavailable("agent.gateway_away", "the gateway is away")


def starts(machines: Sequence[Machine]) -> list[Run]:
    """Every run that ever began, on all machines."""
    return [run for machine in machines for run in machine.disk.runs.values() if run.started is not None]
