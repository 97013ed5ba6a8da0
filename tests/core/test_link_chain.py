"""Both sides of a lane against each other, over a link that loses, repeats and reorders, with agents and keepers that crash: every entry arrives
once, in order, byte for byte, and nothing is forgotten that is not on disk at the keeper.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.link_world import NOON, SITE

from intertie.contracts.base import decode, encode
from intertie.contracts.link import Clocks, EntryBase, Instruction, Lane, LaneState, SettingsApplied, Settle, Sync, Synced
from intertie.ids import AttemptId, Digest, InstructionId, JournalId, SessionId
from intertie.link.journal import NextSeq, first_digest, next_digest
from intertie.link.keeper import SiteRow, judge, wanted_digest
from intertie.link.memory import Disk, MemoryJournal
from intertie.link.site import Effect, Load, Pace, Send, SiteMachine, Take, Wake

BATCH = 3
"""Entries to a batch, so that a handful is a backlog."""


class Keeper:
    """What is on disk, and the rule; an answer is made only after the commit."""

    def __init__(self) -> None:
        self.row: SiteRow | None = None
        self.entries: list[tuple[int, bytes, Digest]] = []
        self.open: list[Instruction] = []
        self.states: list[LaneState] = []

    def commit(self, sync: Sync, now_s: float) -> Synced:
        seq = wanted_digest(self.row, sync)
        stored = None if seq is None else self.entries[seq - 1][2]
        verdict = judge(self.row, stored, sync, NOON + timedelta(seconds=now_s), epoch=1, single=True)
        self.states.append(verdict.state)
        if verdict.row is not None:
            self.row = verdict.row
            self.entries.extend((entry.seq, entry.raw, entry.digest) for entry in verdict.new)
        return Synced(
            nonce=sync.nonce,
            state=verdict.state,
            ack_through=verdict.ack_through,
            safe_through=verdict.safe_through,
            instructions=list(self.open) if verdict.state is LaneState.OK else [],
            epoch=1,
            clock=NOON,
        )


class Site:
    """An agent: a machine over a disk. A crash loses the machine and what was not fsynced, never the disk."""

    def __init__(self) -> None:
        self.disk = Disk(JournalId("jnl-a"), place="place-a")
        self.starts = 0
        self.written: list[bytes] = []
        self.taken: list[str] = []
        self.boot_s = 0.0

    async def start(self) -> None:
        self.starts += 1
        self.journal = MemoryJournal(self.disk)
        self.machine = SiteMachine(
            site=SITE,
            session=SessionId(f"ses-{self.starts}"),
            lane=Lane.SCHEDULER,
            journal=self.journal.id,
            marks=await self.journal.marks(Lane.SCHEDULER),
            now_s=self.boot_s,
            pace=Pace(),
            spread=lambda: 0.0,
            place=self.journal.place,
        )

    async def write(self) -> None:
        def one(after: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            return {Lane.SCHEDULER: [SettingsApplied(seq=after[Lane.SCHEDULER], at=NOON, revision=len(self.written))]}

        await self.journal.append(one)
        self.written.append((await self.journal.batch(Lane.SCHEDULER, len(self.written), 10_000)).entries[-1])
        self.machine.wake(Wake.ENTRIES, self.boot_s)

    async def try_now(self) -> Sync | None:
        """The next try, if none is under way; time passes until it is due."""
        self.boot_s = max(self.boot_s + 0.001, self.machine.due_at)
        for effect in self.machine.tick(self.boot_s):
            assert isinstance(effect, Load)
            size = len(self.written[0]) if self.written else 1
            batch = await self.journal.batch(Lane.SCHEDULER, effect.after, BATCH * (size + 2))
            [send] = self.machine.loaded(
                self.boot_s,
                batch,
                running=[],
                mark=await self.journal.instruction_mark(),
                settings_revision=0,
                clocks=Clocks(utc=NOON + timedelta(seconds=self.boot_s), boot_s=self.boot_s, kernel_boot="boot-1"),
            )
            assert isinstance(send, Send)
            return send.sync
        return None

    async def hear(self, synced: Synced, *, dies: bool = False) -> None:
        self.boot_s += 0.001
        await self.perform(self.machine.answered(self.boot_s, synced), dies)

    async def perform(self, effects: Sequence[Effect], dies: bool) -> None:
        for effect in effects:
            if isinstance(effect, Take):
                await self.journal.acknowledged(Lane.SCHEDULER, effect.exchange.synced.ack_through, effect.exchange.synced.safe_through)
                if dies:
                    return  # Between the two writes: the marks are kept, the instructions come again.
                self.taken.extend(one.id for one in await self.journal.take(effect.exchange.synced.instructions))

    def give_up(self) -> None:
        self.machine.failed(self.boot_s, self.machine.nonce)


STEPS = [
    "write",
    "send",
    "lose",
    "deliver",
    "deliver_last",
    "repeat",
    "answer",
    "answer_last",
    "lose_answer",
    "die",
    "die_taking",
    "instruct",
    "time_out",
]


@settings(max_examples=250, deadline=None)
@given(st.lists(st.sampled_from(STEPS), max_size=60))
def test_every_entry_arrives_once_in_order_whatever_is_lost_repeated_reordered_or_crashes(steps: list[str]) -> None:
    asyncio.run(_run(steps))


async def _run(steps: list[str]) -> None:
    site, keeper = Site(), Keeper()
    await site.start()
    requests: list[bytes] = []
    answers: list[bytes] = []
    for step in steps:
        match step:
            case "write":
                await site.write()
            case "send" if (sync := await site.try_now()) is not None:
                requests.append(encode(sync))
            case "lose" if requests:
                requests.pop(0)
            case "deliver" | "deliver_last" if requests:
                wire = requests.pop(0 if step == "deliver" else -1)
                answers.append(encode(keeper.commit(decode(wire, Sync), site.boot_s)))
            case "repeat" if requests:
                requests.append(requests[0])
            case "answer" | "answer_last" if answers:
                await site.hear(decode(answers.pop(0 if step == "answer" else -1), Synced))
            case "lose_answer" if answers:
                answers.pop(0)
            case "time_out":
                site.give_up()
            case "die":
                site.disk.lose_power()
                await site.start()
            case "die_taking" if answers:
                await site.hear(decode(answers.pop(0), Synced), dies=True)
                site.disk.lose_power()
                await site.start()
            case "instruct":
                number = len(keeper.open) + 1
                attempt = AttemptId(f"att-{number}")
                keeper.open.append(Settle(id=InstructionId(f"ins-{number}"), number=number, epoch=1, attempt=attempt))
        _hold(site, keeper)
    await _heal(site, keeper)


def _hold(site: Site, keeper: Keeper) -> None:
    """What is true at every moment."""
    assert [seq for seq, _, _ in keeper.entries] == list(range(1, len(keeper.entries) + 1)), "a gap, or an entry twice"
    assert [raw for _, raw, _ in keeper.entries] == site.written[: len(keeper.entries)], "not the bytes that were journalled"
    assert site.disk.durable.lanes[Lane.SCHEDULER].base <= len(keeper.entries), "forgotten before it was on disk at the keeper"
    assert len(set(site.taken)) == len(site.taken), "an instruction was taken twice"
    assert set(keeper.states) <= {LaneState.OK, LaneState.BUSY}, "an honest site is never called anything worse"


async def _heal(site: Site, keeper: Keeper) -> None:
    """Once faults stop, the lane reaches its head in as many tries as there are batches, and a few."""
    site.give_up()
    for _ in range(len(site.written) // BATCH + 4):
        sync = await site.try_now()
        assert sync is not None
        await site.hear(keeper.commit(sync, site.boot_s))
        _hold(site, keeper)
    assert len(keeper.entries) == len(site.written)
    assert await site.journal.marks(Lane.SCHEDULER) == (len(site.written), len(site.written))
    assert sorted(site.taken) == sorted(one.id for one in keeper.open)
    digest = first_digest(site.disk.journal)
    for raw in site.written:
        digest = next_digest(digest, raw)
    assert keeper.row is None or keeper.row.digest == digest


@settings(max_examples=60, deadline=None)
@given(total=st.integers(1, 12), kept=st.integers(0, 11), more=st.integers(0, 12))
def test_a_journal_restored_from_an_older_copy_is_always_found_out_before_anything_is_forgotten(total: int, kept: int, more: int) -> None:
    """LINK D2: the copy knows less than the keeper; whatever it writes then, nothing of it is taken for what was there."""
    asyncio.run(_restored(total, min(kept, total - 1), more))


async def _restored(total: int, kept: int, more: int) -> None:
    site, keeper = Site(), Keeper()
    await site.start()
    copy = site.disk.copy()
    for count in range(total):
        await site.write()
        if count + 1 == kept:
            await _heal(site, keeper)
            copy = site.disk.copy()
    await _heal(site, keeper)
    before = list(keeper.entries)

    restored = Site()
    restored.disk, restored.starts, restored.boot_s = copy, site.starts, site.boot_s
    restored.written = [raw for raw in site.written[: copy.durable.lanes[Lane.SCHEDULER].head]]
    await restored.start()
    for _ in range(more):
        restored.written.append(b"")  # Another revision than the lost entries had.
        await restored.journal.append(lambda after: {Lane.SCHEDULER: [SettingsApplied(seq=after[Lane.SCHEDULER], at=NOON, revision=9_000)]})
    keeper.states.clear()
    for _ in range(6):
        sync = await restored.try_now()
        assert sync is not None
        await restored.hear(keeper.commit(sync, restored.boot_s))
    assert set(keeper.states) <= {LaneState.FORKED, LaneState.AGENT_RESTORED}
    assert keeper.entries == before
    assert restored.disk.durable.lanes[Lane.SCHEDULER].base <= kept, "nothing written after the restore was forgotten"
