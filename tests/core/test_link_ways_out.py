"""The two sides of a lane against each other with everything at once: a link that loses, repeats and reorders, crashes, disks and databases that
are restored to older copies, and clones. Invariant 3: what an agent has forgotten is at its keeper, or in a `LostRange`; and the lane always
gets to its head again once the faults stop and a person has stopped the clone.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.core.link_world import NOON, SITE

from intertie.agent.journal import SqliteJournal
from intertie.agent.journal_file import Pending, prepare
from intertie.agent.journal_rows import Bounds, Renewal
from intertie.contracts.base import decode, encode
from intertie.contracts.link import Clocks, EntryBase, Lane, LaneState, LostRange, SettingsApplied, Sync, Synced
from intertie.ids import Digest, JournalId, SessionId
from intertie.link.journal import InstructionMark, NextSeq
from intertie.link.keeper import SiteRow, judge, wanted_digest, wanted_ends
from intertie.link.site import Effect, Load, Lost, Pace, Reopen, Send, SiteMachine, Take, Wake
from intertie.trust.keys import Key
from intertie.trust.seal import seal

LANE = Lane.SCHEDULER
KEY = Key.new("U")
NO_THREAD = ThreadPoolExecutor(1)
FORGETFUL = Bounds(kept_s=0, free_bytes=0)


class Inline(SqliteJournal):
    """The agent's own journal on a database in memory: no thread, no disk."""

    async def _on_disk(self, work: Callable[[], Any]) -> Any:
        return work()


class Keeper:
    """What is on disk at the hub. `restore` goes back to a copy, with or without `intertie hub restored`."""

    def __init__(self) -> None:
        self.row: SiteRow | None = None
        self.entries: dict[tuple[JournalId, int], tuple[bytes, Digest]] = {}
        self.epoch = 1

    def commit(self, sync: Sync, now_s: float) -> Synced:
        seq = wanted_digest(self.row, sync)
        found = self.entries.get((sync.journal, seq)) if seq is not None else None
        ends = {name: max((n for journal, n in self.entries if journal == name), default=0) for name in wanted_ends(sync)}
        at = NOON + timedelta(seconds=now_s)
        verdict = judge(self.row, found[1] if found else None, sync, at, epoch=self.epoch, single=True, ends=ends)
        if verdict.row is not None:
            self.row = verdict.row
        for entry in verdict.new:
            assert (sync.journal, entry.seq) not in self.entries, "an entry was taken twice"
            self.entries[(sync.journal, entry.seq)] = (entry.raw, entry.digest)
        return Synced(
            nonce=sync.nonce,
            state=verdict.state,
            ack_through=verdict.ack_through,
            safe_through=verdict.safe_through,
            epoch=self.epoch,
            clock=NOON,
            journal=verdict.journal,
        )

    def facts(self) -> set[int]:
        return {decode(raw, SettingsApplied).revision for raw, _ in self.entries.values() if b"settings_applied" in raw}

    def lost(self) -> set[tuple[JournalId, int]]:
        ranges = [decode(raw, LostRange) for raw, _ in self.entries.values() if b"lost_range" in raw]
        return {(one.journal, seq) for one in ranges for seq in range(one.first, one.last + 1)}


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.facts = self.sessions = 0
        self.keeper = Keeper()
        self.copy_of_keeper = deepcopy(self.keeper)
        self.where: dict[int, set[tuple[JournalId, int]]] = {}
        """Under which numbers each fact was ever journalled."""
        self.requests: list[tuple[Agent, bytes]] = []
        self.answers: list[tuple[Agent, bytes]] = []


class Agent:
    """One agent over one database. What it is to remember is `known`: a restore of its own disk takes facts from it, and nothing else may."""

    def __init__(self, world: World, place: str, database: sqlite3.Connection, known: set[int]) -> None:
        self.world, self.place, self.database, self.known = world, place, database, known
        self.snapshot: tuple[sqlite3.Connection, set[int]] | None = None

    async def start(self) -> None:
        world = self.world
        world.sessions += 1
        name = prepare(self.database, Path("journal.db"), JournalId(f"jnl-{world.sessions}"))
        kept = dict(self.database.execute("SELECT key, value FROM meta").fetchall())
        pending = None
        if "opening" in kept:
            pending = Pending(kept["opening"], None)
        elif kept["place"] != self.place:
            pending = Pending("moved", name)
        self.journal = Inline(self.database, NO_THREAD, name, place=self.place, pending=pending, bounds=FORGETFUL)
        if pending is not None:
            await self.renew(pending.why, None)
        self.machine = SiteMachine(
            site=SITE,
            session=SessionId(f"ses-{world.sessions}"),
            lane=LANE,
            journal=self.journal.id,
            marks=await self.journal.marks(LANE),
            now_s=world.now_s,
            pace=Pace(),
            spread=lambda: 0.0,
            epochs=await self.journal.epochs(LANE),
            place=self.place,
        )

    async def renew(self, why: str, lost: Lost | None) -> None:
        renewal = Renewal(
            why=why,
            at=NOON,
            kernel_boot=f"boot-{self.place}",
            held=[],
            lost={} if lost is None else {LANE: lost},
            sign=lambda payload: seal(KEY, payload, KEY.public),
            last=lambda _following: {},
        )
        await self.journal.renew(renewal)
        self.note()

    def note(self) -> None:
        for seq, body in self.database.execute("SELECT seq, body FROM entry WHERE lane = ?", (LANE.value,)):
            if b"settings_applied" in body:
                self.world.where.setdefault(decode(body, SettingsApplied).revision, set()).add((self.journal.id, seq))

    async def write(self) -> None:
        self.world.facts += 1
        fact = self.world.facts

        def one(after: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            return {LANE: [SettingsApplied(seq=after[LANE], at=NOON, revision=fact)]}

        await self.journal.append(one)
        self.known.add(fact)
        self.note()
        self.machine.wake(Wake.ENTRIES, self.world.now_s)

    async def try_now(self) -> Sync | None:
        self.world.now_s = max(self.world.now_s + 0.001, self.machine.due_at)
        for effect in self.machine.tick(self.world.now_s):
            assert isinstance(effect, Load)
            batch = await self.journal.batch(LANE, effect.after, 400)
            boot = Clocks(utc=NOON, boot_s=self.world.now_s, kernel_boot=f"boot-{self.place}")
            mark = InstructionMark(0, 0)
            for send in self.machine.loaded(self.world.now_s, batch, running=[], mark=mark, settings_revision=0, clocks=boot):
                assert isinstance(send, Send)
                return send.sync
        return None

    async def hear(self, synced: Synced) -> None:
        self.world.now_s += 0.001
        for effect in self.machine.answered(self.world.now_s, synced):
            await self.perform(effect)

    async def perform(self, effect: Effect) -> None:
        match effect:
            case Take(exchange):
                await self.journal.remember_epochs(LANE, *exchange.epochs)
                await self.journal.acknowledged(LANE, exchange.synced.ack_through, exchange.synced.safe_through, self.machine.journal)
            case Reopen(journal, why, lost):
                assert journal == self.journal.id
                await self.renew(why, lost)
                self.machine.reopened(self.world.now_s, self.journal.id)


def copied(database: sqlite3.Connection) -> sqlite3.Connection:
    twin = sqlite3.connect(":memory:", isolation_level=None)
    database.backup(twin)
    return twin


STEPS = [
    *("write", "exchange", "send", "deliver", "answer") * 3,
    *("lose", "deliver_last", "repeat", "answer_last", "lose_answer", "time_out", "die"),
    *("copy_keeper", "restore_keeper", "hub_restored", "copy_disk", "restore_disk", "clone", "move", "other", "minutes"),
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(STEPS), min_size=12, max_size=60))
@example(["write", "exchange", "restore_keeper"])
@example([*["write"] * 6, "exchange", "restore_keeper", *["exchange"] * 3, "restore_keeper"])
@example(["write", "exchange", "restore_keeper", "move", "exchange"])
@example(
    ["write", "exchange", "copy_keeper", "clone", "write", "exchange", "restore_keeper", "other", "exchange", "other", "die", "exchange"]
)
@example(["write", "exchange", "copy_disk", "write", "exchange", "restore_disk", "write", "exchange"])
@example(["write", "exchange", "copy_keeper", "hub_restored", "exchange", "write", "exchange", "restore_keeper", "exchange"])
def test_nothing_is_forgotten_that_is_not_at_the_keeper_or_in_a_lost_range(steps: list[str]) -> None:
    asyncio.run(_run(steps))


async def _run(steps: list[str]) -> None:
    world = World()
    first = Agent(world, "place-0", sqlite3.connect(":memory:", isolation_level=None), set())
    await first.start()
    agents, at, restored = [first], 0, False
    for step in steps:
        agent = agents[at % len(agents)]
        match step:
            case "other":
                at += 1
            case "clone" if len(agents) < 3:
                agents.append(Agent(world, f"place-{len(agents)}", copied(agent.database), set(agent.known)))
                await agents[-1].start()
            case "minutes":
                world.now_s += 200
            case "restore_keeper":
                restored = True
                world.keeper = deepcopy(world.copy_of_keeper)
            case "copy_keeper":
                world.copy_of_keeper = deepcopy(world.keeper)
            case "hub_restored":
                world.keeper.epoch += 1
            case _:
                await _of_agent(world, agent, step)
        if not restored:
            _hold(world, agents)
    await _heal(world, first)


async def _of_agent(world: World, agent: Agent, step: str) -> None:
    match step:
        case "write":
            await agent.write()
        case "exchange":
            agent.machine.failed(world.now_s, agent.machine.nonce)
            if (sync := await agent.try_now()) is not None:
                await agent.hear(world.keeper.commit(sync, world.now_s))
        case "send" if (sync := await agent.try_now()) is not None:
            world.requests.append((agent, encode(sync)))
        case "lose" if world.requests:
            world.requests.pop(0)
        case "deliver" | "deliver_last" if world.requests:
            sender, wire = world.requests.pop(0 if step == "deliver" else -1)
            world.answers.append((sender, encode(world.keeper.commit(decode(wire, Sync), world.now_s))))
        case "repeat" if world.requests:
            world.requests.append(world.requests[0])
        case "answer" | "answer_last" if world.answers:
            receiver, wire = world.answers.pop(0 if step == "answer" else -1)
            await receiver.hear(decode(wire, Synced))
        case "lose_answer" if world.answers:
            world.answers.pop(0)
        case "time_out":
            agent.machine.failed(world.now_s, agent.machine.nonce)
        case "die":
            await agent.start()
        case "move":
            agent.place += "-moved"
            await agent.start()
        case "copy_disk":
            agent.snapshot = (copied(agent.database), set(agent.known))
        case "restore_disk" if agent.snapshot is not None:
            agent.database, agent.known = copied(agent.snapshot[0]), set(agent.snapshot[1])
            await agent.start()


def _here(agent: Agent) -> set[int]:
    bodies = agent.database.execute("SELECT body FROM entry WHERE lane = ?", (LANE.value,))
    return {decode(body, SettingsApplied).revision for (body,) in bodies if b"settings_applied" in body}


def _hold(world: World, agents: Sequence[Agent]) -> None:
    """With a keeper that was never restored, at every moment."""
    facts = world.keeper.facts()
    for agent in agents:
        assert agent.known - _here(agent) <= facts, "forgotten before it was on disk at the keeper"


async def _heal(world: World, agent: Agent) -> None:
    """The clones are stopped, a person ran `hub restored` where it was asked for, the contest is over: one agent goes on."""
    world.requests.clear()
    world.answers.clear()
    world.now_s += 1_200
    known, _ = await agent.journal.epochs(LANE)
    world.keeper.epoch = max(world.keeper.epoch, known, world.keeper.row.epoch_told if world.keeper.row else 0)
    await agent.start()
    states: list[LaneState] = []
    for _ in range(len(agent.known) + 40):
        sync = await agent.try_now()
        if sync is not None:
            world.keeper.epoch = max(world.keeper.epoch, sync.instruction_epoch)
            synced = world.keeper.commit(sync, world.now_s)
            states.append(synced.state)
            await agent.hear(synced)
        if agent.machine.clean:
            break
    assert agent.machine.clean, f"the lane does not get to its head: {states[-6:]}"
    facts, lost = world.keeper.facts(), world.keeper.lost()
    nowhere = {fact for fact in agent.known - facts if not world.where[fact] & lost}
    assert not nowhere, f"facts {sorted(nowhere)} are nowhere and were not named as lost"
