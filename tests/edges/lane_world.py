"""A keeper with a service behind it, and sites with a journal each, for the tests of lanes on any bus and any tables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from tests.edges.store_world import running, until

from intertie.agent.journal import SqliteJournal
from intertie.agent.journal_rows import Renewal
from intertie.bus.port import Bus
from intertie.clock import Clock, SystemClock
from intertie.contracts.link import EntryBase, Instruction, Lane, SettingsApplied, Stop, Sync, Synced
from intertie.errors import Refused
from intertie.ids import AttemptId, InstructionId, JobId, JournalId, SessionId, SiteName
from intertie.lane.keeper import LaneKeeper, Quiet, SettingsFor
from intertie.lane.site import SiteLane, listen_for_nudges
from intertie.lane.tables import LaneEntry, LaneTables
from intertie.link.journal import InstructionMark, Journal, NextSeq
from intertie.link.keeper import SiteRow
from intertie.link.memory import Disk, MemoryJournal
from intertie.link.site import Exchange, Lost, Pace, Reopen
from intertie.store import StoreTx
from intertie.trust.keys import Key
from intertie.trust.seal import seal

A, B = SiteName("site-a"), SiteName("site-b")
LANE = Lane.SCHEDULER
CLOCK = SystemClock()
QUICK = Pace(beat_s=0.2, idle_s=0.4, retry_s=0.02, busy_s=0.005, silent_after_s=0.5)
KEY = Key.new("U")
POISON = 13
"""The service cannot interpret an entry with this revision."""


class Transactions(Protocol):
    def transaction(self) -> AbstractAsyncContextManager[StoreTx]: ...


@dataclass
class Service:
    """What stands behind a lane: remembers what it interpreted, in the transaction that marks it."""

    tables: LaneTables
    store: Transactions
    said: dict[SiteName, list[int]] = field(default_factory=dict)
    open: dict[SiteName, list[Instruction]] = field(default_factory=dict)
    openings: list[LaneEntry] = field(default_factory=list)
    """What was said of new journals, and of what is lost."""
    heard: list[SiteRow] = field(default_factory=list)
    marks: list[InstructionMark] = field(default_factory=list)
    hold: Callable[[LaneEntry], Awaitable[None]] | None = None
    """Awaited before an entry is interpreted: a test makes it slow, or raise."""
    change: Callable[[StoreTx, int], Awaitable[None]] | None = None
    """The service's own change, in the transaction of the mark."""

    async def interpret(self, entry: LaneEntry) -> None:
        if self.hold is not None:
            await self.hold(entry)
        if b'"journal_opened"' in entry.raw or b'"lost_range"' in entry.raw:
            async with self.store.transaction() as tx:
                await self.tables.mark_interpreted(tx, entry)
            self.openings.append(entry)
            return
        revision = entry.read(SettingsApplied).revision
        if revision == POISON:
            raise Refused("service.poison", "this entry says what cannot be")
        async with self.store.transaction() as tx:
            await self.tables.mark_interpreted(tx, entry)
            if self.change is not None:
                await self.change(tx, revision)
        self.said.setdefault(entry.site, []).append(revision)

    async def instructions(self, site: SiteName, mark: InstructionMark) -> Sequence[Instruction]:
        self.marks.append(mark)
        return self.open.get(site, [])

    async def on_heard(self, rows: Sequence[SiteRow]) -> None:
        self.heard += rows


@asynccontextmanager
async def kept(
    bus: Bus,
    service: Service,
    *,
    settings: SettingsFor | None = None,
    quiet: Quiet | None = None,
    single: bool = True,
    clock: Clock = CLOCK,
) -> AsyncIterator[LaneKeeper]:
    """A running keeper."""
    keeper = LaneKeeper(
        bus,
        LANE,
        service.tables,
        clock,
        interpret=service.interpret,
        instructions=service.instructions,
        settings=settings,
        quiet=quiet,
        on_heard=service.on_heard,
        lease_s=60,
        single=single,
    )
    async with running(keeper.run()):
        await asyncio.wait_for(keeper.listening.wait(), 10)
        yield keeper


class Site:
    """An agent's lane over a journal in memory."""

    def __init__(
        self, bus: Bus, name: SiteName = A, *, disk: Disk | None = None, journal: Journal | None = None, session: str = "ses-1"
    ) -> None:
        self.bus, self.name, self.session = bus, name, session
        self.disk = disk or Disk(JournalId(f"jnl-{name}"))
        self.journal: Journal = journal or MemoryJournal(self.disk)
        self.taken: list[Instruction] = []
        self.exchanges: list[Exchange] = []
        self.silences: list[bool] = []
        self.lane = SiteLane(
            bus,
            LANE,
            self.journal,
            CLOCK,
            site=name,
            session=SessionId(session),
            on_instructions=self._on_instructions,
            on_answer=self._on_answer,
            on_silence=self._on_silence,
            on_reopen=self._on_reopen,
            running=lambda: [AttemptId("att-1")],
            pace=QUICK,
        )

    async def _on_reopen(self, lane: Lane, asked: Reopen) -> None:
        await self.open_anew(asked.why, {} if asked.lost is None else {lane: asked.lost})

    async def open_anew(self, why: str, lost: Mapping[Lane, Lost] | None = None) -> None:
        if not isinstance(self.journal, SqliteJournal):
            return  # A twin has no way to open itself anew.
        renewal = Renewal(
            why=why,
            at=CLOCK.now(),
            kernel_boot="boot-1",
            held=[],
            lost=lost or {},
            sign=lambda payload: seal(KEY, payload, KEY.public),
            last=lambda _following: {},
        )
        await self.journal.renew(renewal)

    async def _on_instructions(self, fresh: Sequence[Instruction], exchange: Exchange) -> None:
        self.taken.extend(fresh)

    async def _on_answer(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)

    async def _on_silence(self, since: object) -> None:
        self.silences.append(since is not None)

    async def write(self, *revisions: int, padding: int = 0) -> None:
        """One entry each, and wake the lane."""

        def build(after: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            return {
                LANE: [
                    Padded(seq=after[LANE] + at, at=CLOCK.now(), revision=one, padding="x" * padding) for at, one in enumerate(revisions)
                ]
            }

        await self.journal.append(build)
        self.lane.wake()

    async def marks(self) -> tuple[int, int]:
        return await self.journal.marks(LANE)


class Padded(SettingsApplied, frozen=True, kw_only=True, tag="settings_applied"):
    """An entry of any size; who reads it sees a `SettingsApplied`."""

    padding: str = ""


@asynccontextmanager
async def joined(*sites: Site) -> AsyncIterator[None]:
    """Their lanes run, and hear nudges."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(site.lane.run()) for site in sites]
        nudges = [await listen_for_nudges(site.bus, [site.lane]) for site in sites]
        try:
            yield
        finally:
            for each in nudges:
                await each.close()
            for task in tasks:
                task.cancel()


def stop(number: int, *, reason: str = "test") -> Stop:
    return Stop(
        id=InstructionId(f"ins-{number}"),
        number=number,
        epoch=1,
        attempt=AttemptId(f"att-{number}"),
        job=JobId("job-1"),
        generation=1,
        reason=reason,
    )


async def ask(bus: Bus, sync: Sync, *, subject: str | None = None, timeout_s: float = 5.0) -> Synced:
    """One try by hand, from the site's account."""
    reply = await bus.request(subject or f"up.{sync.lane}.sync", msgspec.json.encode(sync), timeout_s=timeout_s)
    return msgspec.json.decode(reply.body, type=Synced)


__all__ = ["LANE", "Service", "Site", "ask", "joined", "kept", "stop", "until"]
