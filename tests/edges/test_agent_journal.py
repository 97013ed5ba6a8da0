"""The journal on a real disk: gapless numbers, an unbroken chain, nothing lost to a kill, a full disk that is a refusal."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from intertie.agent import journal as room
from intertie.agent.journal import Cursor, SqliteJournal, filesystem_of, handled
from intertie.contracts.base import decode
from intertie.contracts.link import EntryBase, Inventory, Lane, SettingsApplied, Settle, Stop
from intertie.errors import Refused, Unavailable
from intertie.ids import AttemptId, InstructionId, JobId
from intertie.link.journal import Batch, Build, InstructionMark, NextSeq, first_digest, next_digest

AT = datetime(2026, 12, 1, tzinfo=UTC)


@pytest.fixture
async def journal(short_folder: Path) -> AsyncIterator[SqliteJournal]:
    opened = await SqliteJournal.open(short_folder / "journal.db")
    yield opened
    await opened.close()


def fact(scheduler: int = 1, registry: int = 0) -> Build:
    """Entries of one fact for two lanes."""

    def build(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
        s, r = following[Lane.SCHEDULER], following[Lane.REGISTRY]
        return {
            Lane.SCHEDULER: [SettingsApplied(seq=s + n, at=AT, revision=s + n) for n in range(scheduler)],
            Lane.REGISTRY: [Inventory(seq=r + n, at=AT, pools=[]) for n in range(registry)],
        }

    return build


def seqs(batch: Batch) -> list[int]:
    return [decode(entry, SettingsApplied).seq for entry in batch.entries]


def stop(number: int, attempt: str = "att-1") -> Stop:
    return Stop(
        id=InstructionId(f"ins-{number}"),
        number=number,
        epoch=1,
        attempt=AttemptId(attempt),
        job=JobId("job-1"),
        generation=1,
        reason="",
    )


async def test_each_lane_counts_for_itself_without_gaps(journal: SqliteJournal) -> None:
    await asyncio.gather(*(journal.append(fact(1, n % 2)) for n in range(20)))
    assert seqs(await journal.batch(Lane.SCHEDULER, 0, 1 << 20)) == list(range(1, 21))
    assert len((await journal.batch(Lane.REGISTRY, 0, 1 << 20)).entries) == 10
    assert (await journal.batch(Lane.METERING, 0, 1 << 20)).at_head


async def test_a_fact_that_cannot_be_written_takes_no_number_and_nobody_with_it(journal: SqliteJournal) -> None:
    def broken(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
        return {Lane.SCHEDULER: [SettingsApplied(seq=following[Lane.SCHEDULER] + 7, at=AT, revision=1)]}

    outcomes = await asyncio.gather(journal.append(fact()), journal.append(broken), journal.append(fact()), return_exceptions=True)
    assert [type(one) for one in outcomes] == [type(None), AssertionError, type(None)]
    assert seqs(await journal.batch(Lane.SCHEDULER, 0, 1 << 20)) == [1, 2]


async def test_entries_and_the_agent_s_own_rows_are_one_fact(journal: SqliteJournal) -> None:
    def also(cursor: Cursor) -> None:
        cursor.execute("INSERT INTO tombstone VALUES ('att-1', 'now')")
        raise ValueError("after the row")

    with pytest.raises(ValueError, match="after the row"):
        await journal.append(fact(), also)
    assert (await journal.batch(Lane.SCHEDULER, 0, 1 << 20)).entries == []
    assert await journal.read(lambda cursor: cursor.execute("SELECT count(*) FROM tombstone").fetchone()[0]) == 0


async def test_the_chain_continues_over_what_was_forgotten(journal: SqliteJournal) -> None:
    for _ in range(6):
        await journal.append(fact())
    whole = await journal.batch(Lane.SCHEDULER, 0, 1 << 20)
    digest = first_digest(journal.id)
    assert whole.digest_before == digest
    for entry in whole.entries[:4]:
        digest = next_digest(digest, entry)
    await journal.acknowledged(Lane.SCHEDULER, 5, 4)
    assert await journal.marks(Lane.SCHEDULER) == (5, 4)
    rest = await journal.batch(Lane.SCHEDULER, 4, 1 << 20)
    assert (rest.digest_before, list(rest.entries)) == (digest, list(whole.entries[4:]))
    with pytest.raises(Refused, match=r"agent\.journal_forgotten"):
        await journal.batch(Lane.SCHEDULER, 3, 1 << 20)


async def test_numbers_go_on_after_everything_was_forgotten_and_the_file_reopened(short_folder: Path) -> None:
    """D10: `max()` and rowids start again at 1 here; the keeper would take the new entries for repeats."""
    first = await SqliteJournal.open(short_folder / "journal.db")
    for _ in range(3):
        await first.append(fact())
    await first.acknowledged(Lane.SCHEDULER, 3, 3)
    name = first.id
    await first.close()
    again = await SqliteJournal.open(short_folder / "journal.db")
    await again.append(fact())
    batch = await again.batch(Lane.SCHEDULER, 3, 1 << 20)
    await again.close()
    assert (again.id, seqs(batch)) == (name, [4])


async def test_marks_never_go_back_or_past_what_exists(journal: SqliteJournal) -> None:
    await journal.append(fact(3))
    await journal.acknowledged(Lane.SCHEDULER, 2, 9)
    await journal.acknowledged(Lane.SCHEDULER, 1, 0)
    assert await journal.marks(Lane.SCHEDULER) == (2, 2)
    await journal.acknowledged(Lane.SCHEDULER, 99, 99)
    assert await journal.marks(Lane.SCHEDULER) == (3, 3)


async def test_a_batch_keeps_to_its_bytes_but_never_stands_still(journal: SqliteJournal) -> None:
    await journal.append(fact(3))
    size = len((await journal.batch(Lane.SCHEDULER, 0, 1 << 20)).entries[0])
    for limit, expected in ((1, [1]), (2 * size, [1, 2]), (1 << 20, [1, 2, 3])):
        batch = await journal.batch(Lane.SCHEDULER, 0, limit)
        assert (seqs(batch), batch.at_head) == (expected, expected == [1, 2, 3])


async def test_an_instruction_is_new_once_and_again_if_it_was_never_acted_on(journal: SqliteJournal) -> None:
    assert [one.id for one in await journal.take([stop(1), stop(2)])] == ["ins-1", "ins-2"]
    assert await journal.take([stop(1)]) == []
    await journal.append(fact(), handled(InstructionId("ins-1")))
    assert await journal.drop_unhandled() == 1
    assert [one.id for one in await journal.take([stop(1), stop(2)])] == ["ins-2"]


async def test_the_mark_is_the_highest_ever_seen(journal: SqliteJournal) -> None:
    await journal.take([stop(5)])
    await journal.take([stop(3), Settle(id=InstructionId("ins-x"), number=1, epoch=2, attempt=AttemptId("att-1"))])
    assert await journal.instruction_mark() == InstructionMark(2, 1)


def _run_until_fifty_then_kill(argv: list[str]) -> int:
    """The highest number that the writer had said was on disk."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = 0
        while said < 50:
            said = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        return max([said, *(int(line) for line in process.stdout.read().split(b"\n")[:-1] if line.strip())])


async def test_what_was_said_to_be_on_disk_is_there_after_a_kill(short_folder: Path) -> None:
    path = short_folder / "journal.db"
    writer = (
        "import asyncio, sys, pathlib, datetime\n"
        "from intertie.agent.journal import SqliteJournal\n"
        "from intertie.contracts.link import Lane, SettingsApplied\n"
        "at = datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC)\n"
        "async def main():\n"
        "    journal = await SqliteJournal.open(pathlib.Path(sys.argv[1]))\n"
        "    async def one():\n"
        "        seen = []\n"
        "        def build(following):\n"
        "            seen.append(following[Lane.SCHEDULER])\n"
        "            return {Lane.SCHEDULER: [SettingsApplied(seq=seen[-1], at=at, revision=1)]}\n"
        "        await journal.append(build)\n"
        "        print(seen[-1], flush=True)\n"
        "    while True:\n"
        "        await asyncio.gather(*(one() for _ in range(8)))\n"
        "asyncio.run(main())\n"
    )
    said = await asyncio.to_thread(_run_until_fifty_then_kill, [sys.executable, "-c", writer, str(path)])
    journal = await SqliteJournal.open(path)
    there = seqs(await journal.batch(Lane.SCHEDULER, 0, 1 << 24))
    await journal.close()
    assert there == list(range(1, len(there) + 1)) and len(there) >= said


DAMAGES = [
    ("an entry was changed", "UPDATE entry SET body = '{}' WHERE seq = 2"),
    ("an entry is missing", "DELETE FROM entry WHERE seq = 2"),
    ("the tail is missing", "DELETE FROM entry WHERE seq = 3"),
    ("the counter went back", "UPDATE lane SET next_seq = 2 WHERE name = 'scheduler'"),
]


@pytest.mark.parametrize(("what", "sql"), DAMAGES, ids=[row[0] for row in DAMAGES])
async def test_damage_is_told_at_the_start_with_its_place(short_folder: Path, what: str, sql: str) -> None:
    path = short_folder / "journal.db"
    journal = await SqliteJournal.open(path)
    await journal.append(fact(3))
    await journal.close()
    connection = sqlite3.connect(path)
    connection.execute(sql)
    connection.commit()
    connection.close()
    with pytest.raises(Refused, match=rf"agent\.journal_damaged: .*{path.name}.*scheduler"):
        await SqliteJournal.open(path)


async def test_a_file_that_is_no_journal_is_refused(short_folder: Path) -> None:
    path = short_folder / "journal.db"
    path.write_bytes(os.urandom(8192))
    with pytest.raises(Refused, match=r"agent\.journal_damaged"):
        await SqliteJournal.open(path)


async def test_a_network_file_system_is_refused(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync and locks mean something else there (D10)."""
    here = filesystem_of(short_folder)
    monkeypatch.setattr(room, "NETWORK_FILESYSTEMS", frozenset({here}))
    with pytest.raises(Refused, match=rf"agent\.journal_filesystem: .*{here}"):
        await SqliteJournal.open(short_folder / "journal.db")


async def test_a_full_disk_refuses_and_writes_nothing_and_goes_on_when_there_is_room(short_folder: Path) -> None:
    disk = short_folder / "disk"
    disk.mkdir()
    mounted = await asyncio.to_thread(
        subprocess.run, ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.decode().strip()}")
    try:
        journal = await SqliteJournal.open(disk / "journal.db")
        await journal.append(fact())
        ballast = disk / "ballast"
        with ballast.open("wb", buffering=0) as room_taken:
            try:
                while True:
                    room_taken.write(b"x" * 4096)
            except OSError:
                pass
        written = 1
        with pytest.raises(Unavailable, match=r"agent\.disk_full"):
            for _ in range(2_000):
                await journal.append(fact(5))
                written += 5
        ballast.unlink()
        await journal.append(fact())
        there = seqs(await journal.batch(Lane.SCHEDULER, 0, 1 << 24))
        await journal.close()
        assert there == list(range(1, written + 2))
        reopened = await SqliteJournal.open(disk / "journal.db")
        await reopened.close()
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", "-l", str(disk)], check=False)
