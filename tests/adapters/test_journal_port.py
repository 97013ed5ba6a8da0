"""What every journal does, whichever disk it is on: the agent's SQLite file and the twin in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from intertie.agent.journal import SqliteJournal
from intertie.agent.journal_rows import Bounds
from intertie.contracts.base import decode
from intertie.contracts.link import EntryBase, Instruction, Lane, SettingsApplied, Settle
from intertie.errors import Refused
from intertie.ids import AttemptId, InstructionId, JournalId
from intertie.link.journal import Batch, Journal, NextSeq, first_digest, next_digest
from intertie.link.memory import Disk, MemoryJournal

AT = datetime(2026, 3, 1, tzinfo=UTC)
ALL = 1_000_000

Open = Callable[[], Awaitable[Journal]]
"""Opens the same journal again, as a restarted agent would."""


class Sqlite:
    def __init__(self, folder: Path) -> None:
        self._path, self._open = folder / "journal.db", list[SqliteJournal]()

    async def open(self) -> Journal:
        await self.close()
        self._open.append(await SqliteJournal.open(self._path, Bounds(kept_s=0)))
        return self._open[-1]

    async def close(self) -> None:
        while self._open:
            await self._open.pop().close()


class Memory:
    def __init__(self, folder: Path) -> None:
        self._disk = Disk(JournalId(f"jnl-{folder.name}"))

    async def open(self) -> Journal:
        return MemoryJournal(self._disk)

    async def close(self) -> None:
        return None


@pytest.fixture(params=[Sqlite, Memory], ids=["sqlite", "memory"])
async def reopen(request: pytest.FixtureRequest, short_folder: Path) -> AsyncIterator[Open]:
    kind = request.param(short_folder)
    yield kind.open
    await kind.close()


def facts(count: int = 1, *lanes: Lane) -> Callable[[NextSeq], Mapping[Lane, Sequence[EntryBase]]]:
    """A fact of `count` entries in each of `lanes` (scheduler if none is named)."""

    def build(after: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
        return {
            lane: [SettingsApplied(seq=after[lane] + i, at=AT, revision=i) for i in range(count)] for lane in (lanes or (Lane.SCHEDULER,))
        }

    return build


def settle(number: int) -> Instruction:
    return Settle(id=InstructionId(f"ins-{number}"), number=number, epoch=1, attempt=AttemptId(f"att-{number}"))


def numbers(batch: Batch) -> list[int]:
    return [decode(entry, SettingsApplied).seq for entry in batch.entries]


def digest_after(batch: Batch) -> str:
    digest = batch.digest_before
    for entry in batch.entries:
        digest = next_digest(digest, entry)
    return digest


async def test_a_new_journal_begins_its_chain_with_its_own_id(reopen: Open) -> None:
    journal = await reopen()
    batch = await journal.batch(Lane.METERING, 0, ALL)
    assert batch == Batch(1, first_digest(journal.id), [], True)


async def test_each_lane_counts_by_itself_without_gaps(reopen: Open) -> None:
    journal = await reopen()
    await journal.append(facts(1, Lane.SCHEDULER, Lane.METERING))
    await journal.append(facts(2, Lane.SCHEDULER))
    await journal.append(facts(1, Lane.METERING))
    assert numbers(await journal.batch(Lane.SCHEDULER, 0, ALL)) == [1, 2, 3]
    assert numbers(await journal.batch(Lane.METERING, 0, ALL)) == [1, 2]
    assert numbers(await journal.batch(Lane.REGISTRY, 0, ALL)) == []


async def test_a_fact_that_cannot_be_built_leaves_nothing_in_any_lane(reopen: Open) -> None:
    journal = await reopen()

    def wrong_number(after: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
        right = SettingsApplied(seq=after[Lane.SCHEDULER], at=AT, revision=1)
        return {Lane.SCHEDULER: [right], Lane.METERING: [SettingsApplied(seq=7, at=AT, revision=1)]}

    with pytest.raises(AssertionError):
        await journal.append(wrong_number)
    assert (await journal.batch(Lane.SCHEDULER, 0, ALL)).entries == []
    await journal.append(facts())
    assert numbers(await journal.batch(Lane.SCHEDULER, 0, ALL)) == [1]


async def test_batches_continue_the_chain_and_say_when_they_reach_the_head(reopen: Open) -> None:
    journal = await reopen()
    await journal.append(facts(10))
    whole = await journal.batch(Lane.SCHEDULER, 0, ALL)
    size = len(whole.entries[0])
    first = await journal.batch(Lane.SCHEDULER, 0, size * 4)
    assert (numbers(first), first.at_head) == ([1, 2, 3, 4], False)
    second = await journal.batch(Lane.SCHEDULER, 4, ALL)
    assert (second.first_seq, numbers(second), second.at_head) == (5, [5, 6, 7, 8, 9, 10], True)
    assert second.digest_before == digest_after(first)
    assert digest_after(second) == digest_after(whole)


async def test_an_entry_larger_than_the_limit_goes_alone_instead_of_never(reopen: Open) -> None:
    journal = await reopen()
    await journal.append(facts(2))
    batch = await journal.batch(Lane.SCHEDULER, 0, 1)
    assert (numbers(batch), batch.at_head) == ([1], False)


async def test_what_is_safe_is_forgotten_and_the_chain_goes_on_from_it(reopen: Open) -> None:
    journal = await reopen()
    await journal.append(facts(3))
    before = await journal.batch(Lane.SCHEDULER, 2, ALL)
    await journal.acknowledged(Lane.SCHEDULER, 3, 2)
    assert await journal.marks(Lane.SCHEDULER) == (3, 2)
    assert await journal.batch(Lane.SCHEDULER, 2, ALL) == before
    with pytest.raises(Refused):
        await journal.batch(Lane.SCHEDULER, 1, ALL)
    await journal.acknowledged(Lane.SCHEDULER, 3, 3)
    await journal.append(facts())
    batch = await journal.batch(Lane.SCHEDULER, 3, ALL)
    assert (numbers(batch), batch.digest_before) == ([4], digest_after(before))


async def test_numbers_are_never_used_again_after_all_was_forgotten_and_the_agent_restarted(reopen: Open) -> None:
    journal = await reopen()
    await journal.append(facts(3))
    await journal.acknowledged(Lane.SCHEDULER, 3, 3)
    journal = await reopen()
    await journal.append(facts())
    assert numbers(await journal.batch(Lane.SCHEDULER, 3, ALL)) == [4]


async def test_marks_only_grow_and_never_past_what_was_written(reopen: Open) -> None:
    journal = await reopen()
    await journal.append(facts(3))
    await journal.acknowledged(Lane.SCHEDULER, 2, 1)
    await journal.acknowledged(Lane.SCHEDULER, 1, 0)
    assert await journal.marks(Lane.SCHEDULER) == (2, 1)
    await journal.acknowledged(Lane.SCHEDULER, 99, 99)
    assert await journal.marks(Lane.SCHEDULER) == (3, 3)
    assert await journal.marks(Lane.METERING) == (0, 0)


async def test_a_keeper_that_holds_more_than_was_ever_written_here_is_refused(reopen: Open) -> None:
    journal = await reopen()
    await journal.append(facts(3))
    with pytest.raises(Refused):
        await journal.batch(Lane.SCHEDULER, 4, ALL)


async def test_all_of_it_is_there_after_a_restart(reopen: Open) -> None:
    journal = await reopen()
    await journal.append(facts(5, Lane.SCHEDULER, Lane.METERING))
    await journal.acknowledged(Lane.SCHEDULER, 2, 2)
    await journal.take([settle(1)])
    identity, batch = journal.id, await journal.batch(Lane.SCHEDULER, 2, ALL)
    journal = await reopen()
    assert journal.id == identity
    assert await journal.batch(Lane.SCHEDULER, 2, ALL) == batch
    assert await journal.marks(Lane.SCHEDULER) == (2, 2)
    assert await journal.take([settle(1)]) == []


async def test_repeated_instructions_are_taken_once_and_the_mark_is_the_highest(reopen: Open) -> None:
    journal = await reopen()
    assert await journal.take([settle(1), settle(2)]) == [settle(1), settle(2)]
    assert await journal.take([settle(1), settle(2), settle(3)]) == [settle(3)]
    assert await journal.take([settle(2)]) == []
    mark = await journal.instruction_mark()
    assert (mark.epoch, mark.number) == (1, 3)


async def test_a_power_cut_before_the_fsync_leaves_what_was_there_before() -> None:
    """The twin's own manners: what was not fsynced is gone, and none of it could be read before."""
    read: list[Sequence[bytes]] = []

    async def cut() -> None:
        read.append((await journal.batch(Lane.SCHEDULER, 0, ALL)).entries)
        if len(read) == 2:
            journal.crash()

    journal = MemoryJournal(Disk(JournalId("jnl-a")), fsync=cut)
    await journal.append(facts(2))
    with pytest.raises(Exception, match="lost its power"):
        await journal.append(facts(3))
    assert [len(entries) for entries in read] == [0, 2]
    again = MemoryJournal(journal.disk)
    assert numbers(await again.batch(Lane.SCHEDULER, 0, ALL)) == [1, 2]
