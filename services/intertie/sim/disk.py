"""What is on disks, and the moments at which a process can die over it: stores of the hub, a site's journal. Machines are in `machine`.

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

from intertie.agent.journal import Also, SqliteJournal
from intertie.agent.journal_file import Pending
from intertie.agent.journal_rows import Bounds, Renewal
from intertie.clock import Clock
from intertie.contracts.job import AttemptRecord, ResultRef, WorkRef
from intertie.contracts.link import Lane, LaneState
from intertie.errors import Unavailable
from intertie.ids import AttemptId, Digest, JobId, JournalId, SiteName
from intertie.link.keeper import SiteRow
from intertie.metering.memory import MemoryMetering
from intertie.scheduler.core.rows import AttemptState, Change
from intertie.scheduler.memory import MemorySchedulerStore
from intertie.scheduler.store import Placement, RoundRow, Ruling, Told
from intertie.sim.loop import PARTY, Party
from intertie.store import Leader, MemoryStore
from intertie.store.memory import MemoryOutbox
from intertie.store.outbox import OutboxRow, StreamMark

T = TypeVar("T")

# Between two tries of whoever waits for an office.
TRY_S = 0.5


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
    _held: dict[str, Party]
    """Role → whose connection holds the lock of its office."""
    _states: dict[tuple[Lane, SiteName], LaneState]
    _seen: Callable[[str], None]
    """Told of each way that a lane goes."""

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
    async def leading(self, role: str) -> AsyncIterator[Leader]:
        """As a session lock of PostgreSQL: it dies with its connection, and the leader need not know of it."""
        party = PARTY.get()
        while (holder := self._held.get(role)) is not None and not holder.dead:  # noqa: ASYNC110  # as whoever waits for a session lock
            await asyncio.sleep(TRY_S)
        party.must_live()
        self.answer()
        self._held[role] = party
        try:
            yield self.take_office(role)
        finally:
            if self._held.get(role) is party:
                del self._held[role]

    def _committed(self, changed: bool) -> None:
        """A transaction is over."""
        for row in self._lane_rows():
            key = (row.lane, row.site)
            if self._states.get(key, LaneState.OK) is not row.state:
                self._states[key] = row.state
                self._seen(f"{row.site}/{row.lane}: {row.state}")

    def _lane_rows(self) -> list[SiteRow]:
        kept: dict[object, SiteRow] = vars(self).get("lane_sites", {})
        return list(kept.values())

    def lose_offices(self) -> None:
        """The connections that hold the locks break; whoever waits takes office beside those who still think that they lead."""
        self._held.clear()

    # --- backups ---

    def image(self) -> dict[str, Any]:
        """What a backup of this moment holds."""
        return {name: self._copied(value) for name, value in vars(self).items() if not name.startswith("_")}

    def restore(self, image: dict[str, Any]) -> None:
        """Whatever came after the image is gone, and nobody here knows that it was."""
        for name in [name for name in vars(self) if not name.startswith("_") and name not in image]:
            delattr(self, name)
        vars(self).update({name: self._copied(value) for name, value in image.items()})
        self._held.clear()
        self._states.clear()
        self.wakeup.set()

    @property
    def busy(self) -> bool:
        """A transaction is open: what it undoes if it dies would undo a restore too."""
        return self._holder is not None

    def raise_epoch(self, number: int) -> None:
        """As `intertie.store.epoch.raise_to`: every leader of the epoch before is out of office."""
        self.service_epoch = number
        self.leaders = {}

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
        self._committed(changed)
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
    """PostgreSQL of the scheduler. What it has ever said is remembered beside it, for the invariants: a restore does not reach that."""

    def __init__(
        self,
        moments: Moments,
        clock: Clock,
        placed: Callable[[AttemptRecord], None],
        ruled: Callable[[AttemptId, str], None],
        seen: Callable[[str], None],
    ) -> None:
        """`placed` is told of each placement, in the name of whoever decided it; `ruled` of each attempt that a rule moved, and by which."""
        self._moments, self._held, self._placed, self._ruled = moments, {}, placed, ruled
        self._states, self._seen = {}, seen
        self._never: set[AttemptId] = set()
        self._chosen: dict[tuple[JobId, str], AttemptId] = {}
        self._twice: list[str] = []
        self._heard: dict[SiteName, int] = {}
        self._at_head: dict[SiteName, float] = {}
        MemorySchedulerStore.__init__(self, clock=clock)

    @property
    def called_never(self) -> set[AttemptId]:
        """Attempts of which it was ever said that they did not and would not start."""
        return self._never

    def at_head(self, site: SiteName) -> bool:
        """It spoke, and had nothing more to say, since the planner in office took it."""
        return site in self._at_head

    def take_office(self, role: str) -> Leader:
        if role == "planner":
            # What was committed just now is heard by the process a moment later.
            since_s = asyncio.get_running_loop().time() - HEARD_S
            self._at_head = {site: at for site, at in self._at_head.items() if at >= since_s}
        return super().take_office(role)

    def restore(self, image: dict[str, Any]) -> None:
        super().restore(image)
        self._heard, self._at_head = {row.site: row.heard for row in self._lane_rows()}, {}

    def _committed(self, changed: bool) -> None:
        super()._committed(changed)
        for row in self._lane_rows():
            if row.heard > self._heard.get(row.site, 0) and row.at_head:
                self._at_head[row.site] = asyncio.get_running_loop().time()
            self._heard[row.site] = row.heard
        if changed:
            for job in self.jobs.values():
                self._once(job.job, "survivor", job.survivor)
                self._once(job.job, "delivered", job.delivered)
            self._never |= {name for name, attempt in self.attempt_rows.items() if attempt.state in NEVER}

    async def withdraw(self, leader: Leader, withdrawals: Sequence[Ruling]) -> list[Change]:
        changes = await super().withdraw(leader, withdrawals)
        for change in changes:
            for told in change.story:
                if change.attempt is not None and told.evidence:
                    self._ruled(change.attempt.record.attempt, told.evidence)
        return changes

    def _once(self, job: JobId, what: str, attempt: AttemptId | None) -> None:
        if attempt is not None and (before := self._chosen.setdefault((job, what), attempt)) != attempt:
            self._twice.append(f"{what} of {job} was {before} and is {attempt}")

    @property
    def chosen_twice(self) -> list[str]:
        """Choices that are made once, and were made again."""
        return self._twice

    async def save_round(self, leader: Leader, row: RoundRow, placements: Sequence[Placement], told: Sequence[Told]) -> list[Change]:
        changes = await super().save_round(leader, row, placements, told)
        for change in changes:
            if change.attempt is not None:
                self._placed(change.attempt.record)
        return changes


# From a commit to the process that made it knowing of it.
HEARD_S = 1.0
NEVER = (AttemptState.REFUSED, AttemptState.WITHDRAWN, AttemptState.NOT_STARTED)


class MeteringDisk(Networked, MemoryMetering):
    """PostgreSQL of metering."""

    def __init__(self, moments: Moments, clock: Clock, seen: Callable[[str], None]) -> None:
        self._moments, self._held, self._states, self._seen = moments, {}, {}, seen
        MemoryMetering.__init__(self, clock=clock)


class Durable:
    """What of a database in memory is on the platter: all of it, unless somebody writes lazily."""

    def __init__(self, database: sqlite3.Connection, clock: Clock) -> None:
        self._database, self._clock = database, clock
        self._image: tuple[float, bytes] | None = None

    def write_lazily(self) -> None:
        """A commit that returns before its fsync; the disk catches up every few seconds."""
        now_s = self._clock.boot_s()
        if self._image is None or not 0 <= now_s - self._image[0] < LAZY_S:
            self._image = (now_s, self._database.serialize())

    def lose_power(self) -> None:
        if self._image is not None:
            self._database.deserialize(self._image[1])
            self._image = None


LAZY_S = 20.0


class SimJournal(SqliteJournal):
    """The agent's own journal on a database in memory that outlives the agent; its disk may be full."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        journal: JournalId,
        moments: Moments,
        full: Callable[[], bool],
        place: str,
        pending: Pending | None,
        bounds: Bounds,
        clock: Clock,
        durable: Durable,
        named: Callable[[JournalId], None],
    ) -> None:
        """`named`: told of the journal's new name, for the note beside the file."""
        super().__init__(connection, _NO_THREAD, journal, place=place, pending=pending, bounds=bounds, clock=clock)
        self._moments, self._full, self.durable, self._named = moments, full, durable, named

    async def renew(self, renewal: Renewal, also: Also | None = None) -> JournalId:
        fresh = await super().renew(renewal, also)
        self._named(fresh)
        return fresh

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


class SimTransfer:
    """`intertie.agent.transfer.Transfer` to a gateway that may be away."""

    def __init__(self, stored: dict[Digest, bytes], away: Callable[[], bool], moments: Moments) -> None:
        self._stored, self._away, self._moments = stored, away, moments

    async def fetch(self, work: WorkRef, target: Path) -> None:
        await self._answer()

    async def store(self, result: ResultRef, source: Path) -> None:
        await self._answer()
        self._keep(result, source)

    def _keep(self, result: ResultRef, source: Path) -> None:
        self._stored[result.digest] = source.read_bytes()

    async def _answer(self) -> None:
        await self._moments.pass_by(1.0)
        if self._away():
            raise Unavailable("agent.gateway_away", "the gateway is away")
