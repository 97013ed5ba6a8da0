"""The journal on a real disk: gapless numbers, an unbroken chain, nothing lost to a kill, a full disk that is a refusal."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from intertie.agent import journal_file as room
from intertie.agent.books import load
from intertie.agent.journal import Cursor, SqliteJournal, handled
from intertie.agent.journal_file import Pending, filesystem_of
from intertie.agent.journal_rows import Bounds, Renewal
from intertie.clock import SystemClock
from intertie.contracts.base import decode
from intertie.contracts.link import EntryBase, Inventory, JournalOpened, Lane, LostRange, SettingsApplied, Settle, Stop
from intertie.errors import Refused, Unavailable
from intertie.ids import AttemptId, InstructionId, JobId, JournalId
from intertie.link.journal import Batch, Build, InstructionMark, NextSeq, first_digest, next_digest
from intertie.link.site import Lost
from intertie.trust.keys import Key
from intertie.trust.seal import open_seal, seal

AT = datetime(2026, 12, 1, tzinfo=UTC)
FORGETFUL = Bounds(kept_s=0)
"""What is safe is forgotten at once."""


@pytest.fixture
async def journal(short_folder: Path) -> AsyncIterator[SqliteJournal]:
    opened = await SqliteJournal.open(short_folder / "journal.db", FORGETFUL)
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


KEY = Key.new("U")


def renewal(why: str, lost: Mapping[Lane, Lost] | None = None, last: Build = lambda following: {}) -> Renewal:
    return Renewal(
        why=why, at=AT, kernel_boot="boot-1", held=[], lost=lost or {}, sign=lambda payload: seal(KEY, payload, KEY.public), last=last
    )


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
    ("an entry was changed", "UPDATE entry SET body = '{}' WHERE seq = 2", [1, 3], 1),
    ("an entry is missing", "DELETE FROM entry WHERE seq = 2", [1, 3], 1),
    ("the tail is missing", "DELETE FROM entry WHERE seq = 3", [1, 2], 1),
    ("the counter went back", "UPDATE lane SET next_seq = 2 WHERE name = 'scheduler'", [1, 2, 3], 0),
]


@pytest.mark.parametrize(("what", "sql", "kept", "lost"), DAMAGES, ids=[row[0] for row in DAMAGES])
async def test_a_damaged_journal_is_set_aside_and_what_is_whole_is_said_again(
    short_folder: Path, what: str, sql: str, kept: list[int], lost: int
) -> None:
    path = short_folder / "journal.db"
    journal = await SqliteJournal.open(path)
    await journal.append(fact(3))
    name = journal.id
    await journal.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(sql)
        connection.commit()
    again = await SqliteJournal.open(path)
    assert again.pending == Pending("damaged", name, same_place=True)
    assert path.with_name("journal.db.damaged-1").exists()
    await again.renew(renewal("damaged"))
    said = (await again.batch(Lane.SCHEDULER, 0, 1 << 20)).entries
    await again.close()
    opened = decode(said[0], JournalOpened)
    assert (opened.previous, opened.why, opened.same_place) == (name, "damaged", True)
    assert [decode(entry, SettingsApplied).revision for entry in said[1:]] == kept
    assert again.id not in (name, None)


async def test_a_file_that_is_no_journal_is_set_aside(short_folder: Path) -> None:
    path = short_folder / "journal.db"
    path.write_bytes(os.urandom(8192))
    journal = await SqliteJournal.open(path)
    assert journal.pending is not None and (journal.pending.why, journal.pending.previous) == ("damaged", None)
    await journal.append(fact())
    await journal.close()


async def test_a_network_file_system_is_refused(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync and locks mean something else there (D10)."""
    here = filesystem_of(short_folder)
    monkeypatch.setattr(room, "NETWORK_FILESYSTEMS", frozenset({here}))
    with pytest.raises(Refused, match=rf"agent\.journal_filesystem: .*{here}"):
        await SqliteJournal.open(short_folder / "journal.db")


@asynccontextmanager
async def tmpfs(folder: Path, size: str = "2m") -> AsyncIterator[Path]:
    """A small file system of its own."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
    mounted = await asyncio.to_thread(subprocess.run, mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", "-l", str(disk)], check=False)


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as room_taken:
        try:
            while True:
                room_taken.write(b"x" * 4096)
        except OSError:
            pass


async def test_a_full_disk_refuses_and_writes_nothing_and_goes_on_when_there_is_room(short_folder: Path) -> None:
    async with tmpfs(short_folder) as disk:
        journal = await SqliteJournal.open(disk / "journal.db", Bounds(free_bytes=0))
        await journal.append(fact())
        assert journal.accepting().accepting
        ballast = disk / "ballast"
        fill(ballast)
        written = 1
        with pytest.raises(Unavailable, match=r"agent\.disk_full"):
            for _ in range(2_000):
                await journal.append(fact(5))
                written += 5
        assert journal.accepting().code == "agent.disk_full"
        ballast.unlink()
        await journal.append(fact())
        assert journal.accepting().accepting
        there = seqs(await journal.batch(Lane.SCHEDULER, 0, 1 << 24))
        await journal.close()
        assert there == list(range(1, written + 2))
        reopened = await SqliteJournal.open(disk / "journal.db")
        assert reopened.pending is not None and reopened.pending.why == "first"
        await reopened.close()


async def test_little_room_is_told_before_the_disk_is_full(short_folder: Path) -> None:
    async with tmpfs(short_folder) as disk:
        journal = await SqliteJournal.open(disk / "journal.db", Bounds(free_bytes=1 << 20))
        assert journal.accepting().accepting
        fill(disk / "ballast")
        assert journal.accepting().code == "agent.disk_low"
        await journal.close()


async def test_a_journal_above_its_bound_takes_no_new_work_and_still_every_fact(short_folder: Path) -> None:
    journal = await SqliteJournal.open(short_folder / "journal.db", Bounds(most_bytes=300_000))
    await journal.append(fact())
    assert journal.accepting().accepting
    for _ in range(4):
        await journal.append(fact(1_000))
    assert journal.accepting().code == "agent.journal_full"
    await journal.append(fact())
    assert (await journal.batch(Lane.SCHEDULER, 4_000, 1 << 20)).at_head
    await journal.close()


LIMITED = """
import asyncio, pathlib, resource, signal, sys
from datetime import UTC, datetime
from intertie.agent.journal import SqliteJournal
from intertie.contracts.link import Lane, SettingsApplied
from intertie.errors import Unavailable
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
AT = datetime(2026, 12, 1, tzinfo=UTC)
def fact(n):
    return lambda after: {Lane.SCHEDULER: [SettingsApplied(seq=after[Lane.SCHEDULER] + i, at=AT, revision=1) for i in range(n)]}
async def main():
    journal = await SqliteJournal.open(pathlib.Path(sys.argv[1]))
    await journal.append(fact(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    written, refused = 1, ""
    try:
        for _ in range(5_000):
            await journal.append(fact(5))
            written += 5
    except Unavailable as err:
        refused = err.code
    closed = journal.accepting().code
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await journal.append(fact(1))
    batch = await journal.batch(Lane.SCHEDULER, 0, 1 << 26)
    print(refused, closed, journal.accepting().accepting, len(batch.entries) == written + 1)
asyncio.run(main())
"""


async def test_writes_that_the_disk_does_not_take_are_refused_and_the_journal_goes_on_when_it_does(short_folder: Path) -> None:
    """EIO: the kernel refuses the write itself (here by a limit of the file's size)."""
    argv = [sys.executable, "-c", LIMITED, str(short_folder / "journal.db")]
    ran = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=False, timeout=120)
    assert ran.stdout.split()[-4:] in (
        ["agent.disk_error", "agent.disk_error", "True", "True"],
        ["agent.disk_full"] * 2 + ["True", "True"],
    ), ran.stdout + ran.stderr


async def test_a_file_system_that_became_read_only_refuses_and_the_journal_goes_on_when_it_is_well(short_folder: Path) -> None:
    async with tmpfs(short_folder) as disk:
        path = disk / "journal.db"
        journal = await SqliteJournal.open(path)
        await journal.append(fact())
        # A kernel that found an error refuses writes on files that are open, which no remount of ours can: the connection is closed for that.
        await journal.read(lambda cursor: cursor.connection.close())
        await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,ro", str(disk)], check=True)
        journal._connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None, check_same_thread=False)
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"agent\.disk_error"):
                await journal.append(fact())
        assert journal.accepting().code == "agent.disk_error"
        await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,rw", str(disk)], check=True)
        await journal.append(fact())
        assert seqs(await journal.batch(Lane.SCHEDULER, 0, 1 << 20)) == [1, 2]
        assert journal.accepting().code != "agent.disk_error"
        await journal.close()


# --- damage on disk --------------------------------------------------------------------------------------------------------------------------


async def written(path: Path, facts: int = 300) -> tuple[JournalId, list[bytes]]:
    """A journal of many pages, killed, so that its newest commits are in the WAL alone; its name and entries."""
    journal = await SqliteJournal.open(path)
    await journal.append(fact(facts))
    await journal.read(lambda cursor: cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())
    await journal.append(fact(5))
    entries = list((await journal.batch(Lane.SCHEDULER, 0, 1 << 24)).entries)
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", f"{path}.kept{suffix}")
    await journal.close()
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{path}.kept{suffix}", f"{path}{suffix}")
    return journal.id, entries


async def test_a_torn_end_of_the_log_takes_only_what_was_written_last(short_folder: Path) -> None:
    path = short_folder / "journal.db"
    _, entries = await written(path)
    wal = path.with_name("journal.db-wal")
    os.truncate(wal, wal.stat().st_size - 1_000)
    journal = await SqliteJournal.open(path)
    there = (await journal.batch(Lane.SCHEDULER, 0, 1 << 24)).entries
    await journal.close()
    assert list(there) == entries[: len(there)] and len(there) >= 300


@pytest.mark.parametrize("at", [0.2, 0.5, 0.9])
async def test_a_page_of_rubbish_costs_no_more_than_its_entries(short_folder: Path, at: float) -> None:
    path = short_folder / "journal.db"
    name, entries = await written(path, 1_000)
    pages = path.stat().st_size // 4096
    with path.open("r+b") as f:
        f.seek(int(pages * at) * 4096)
        f.write(os.urandom(4096))
    journal = await SqliteJournal.open(path)
    if journal.pending is not None and journal.pending.why == "damaged":
        assert journal.pending.previous == name
        await journal.renew(renewal("damaged"))
    said = [
        decode(entry, SettingsApplied).revision
        for entry in (await journal.batch(Lane.SCHEDULER, 0, 1 << 24)).entries
        if b"revision" in entry
    ]
    await journal.close()
    assert said == sorted(said) and len(said) >= len(entries) - 60


async def test_a_file_that_was_cut_off_gives_what_is_left(short_folder: Path) -> None:
    path = short_folder / "journal.db"
    name, _ = await written(path, 1_000)
    path.with_name("journal.db-wal").unlink()
    os.truncate(path, path.stat().st_size // 2)
    journal = await SqliteJournal.open(path)
    assert journal.pending == Pending("damaged", name, same_place=True)
    await journal.renew(renewal("damaged"))
    await journal.append(fact())
    await journal.close()


async def test_damage_keeps_the_work_and_the_devices_that_it_holds(short_folder: Path) -> None:
    path = short_folder / "journal.db"
    shutil.copy(Path(__file__).parent / "data" / "journal_v1.db", path)
    await (await SqliteJournal.open(path)).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE entry SET body = x'00' WHERE lane = 'scheduler' AND seq = 6")
        connection.commit()
    journal = await SqliteJournal.open(path)
    assert journal.pending is not None and journal.pending.why == "damaged"
    books = await journal.read(load)
    await journal.close()
    assert [attempt.state.value for attempt in books.attempts.values()] == ["running"]
    assert books.holds.holder and AttemptId("att-old") in books.tombstones


# --- places ----------------------------------------------------------------------------------------------------------------------------------


async def test_a_journal_that_stayed_where_it_was_goes_on_as_it_is(short_folder: Path) -> None:
    first = await SqliteJournal.open(short_folder / "journal.db")
    await first.renew(renewal("first"))
    await first.close()
    again = await SqliteJournal.open(short_folder / "journal.db")
    await again.close()
    assert (again.id, again.pending, again.place) == (first.id, None, first.place) and first.place


async def test_a_copy_opens_a_journal_of_its_own(short_folder: Path) -> None:
    """D2, D8: a cloned machine, a restored file, a copied volume."""
    first = await SqliteJournal.open(short_folder / "journal.db")
    await first.renew(renewal("first"))
    await first.append(fact(2))
    await first.close()
    shutil.copytree(short_folder, short_folder / "copy")
    copy = await SqliteJournal.open(short_folder / "copy" / "journal.db")
    assert copy.pending == Pending("moved", first.id, same_place=False)
    await copy.renew(renewal("moved"))
    opened = decode((await copy.batch(Lane.REGISTRY, 0, 1 << 20)).entries[0], JournalOpened)
    assert (opened.previous, opened.same_place, opened.place) == (first.id, False, copy.place) and copy.place != first.place
    await copy.close()
    again = await SqliteJournal.open(short_folder / "copy" / "journal.db")
    await again.close()
    assert (again.pending, again.id) == (None, copy.id)


async def test_a_journal_that_is_gone_is_named_by_the_next_one(short_folder: Path) -> None:
    first = await SqliteJournal.open(short_folder / "journal.db")
    await first.renew(renewal("first"))
    await first.close()
    (short_folder / "journal.db").unlink()
    next_one = await SqliteJournal.open(short_folder / "journal.db")
    assert next_one.pending == Pending("gone", first.id, same_place=True)
    await next_one.close()


async def test_job_folders_without_a_journal_mean_that_it_is_gone(short_folder: Path) -> None:
    (short_folder / "jobs" / "att-1").mkdir(parents=True)
    journal = await SqliteJournal.open(short_folder / "journal.db")
    await journal.close()
    assert journal.pending == Pending("gone", None, same_place=False)


# --- a new journal -----------------------------------------------------------------------------------------------------------------------------


async def test_everything_that_was_not_forgotten_is_said_again_with_new_numbers(journal: SqliteJournal) -> None:
    await journal.renew(renewal("first"))
    old = journal.id
    await journal.append(fact(6, 2))
    await journal.acknowledged(Lane.SCHEDULER, 5, 3)
    await journal.renew(renewal("agent_restored", last=fact(1)))
    batch = await journal.batch(Lane.SCHEDULER, 0, 1 << 20)
    opened = decode(batch.entries[0], JournalOpened)
    assert (opened.previous, opened.same_place, [(one.journal, one.forgotten_through) for one in opened.past]) == (old, True, [(old, 3)])
    said = [decode(entry, SettingsApplied) for entry in batch.entries[1:]]
    assert [(one.seq, one.revision) for one in said] == [(2, 4), (3, 5), (4, 6), (5, 7), (6, 6)]
    assert (batch.digest_before, await journal.marks(Lane.SCHEDULER)) == (first_digest(journal.id), (0, 0))
    await journal.append(fact(1))
    assert len((await journal.batch(Lane.REGISTRY, 0, 1 << 20)).entries) == 3
    assert await journal.epochs(Lane.SCHEDULER) == (0, 0)


async def test_what_nobody_has_is_named_under_the_site_s_key_once(journal: SqliteJournal) -> None:
    await journal.renew(renewal("first"))
    old = journal.id
    await journal.append(fact(6))
    await journal.acknowledged(Lane.SCHEDULER, 6, 6)
    await journal.renew(renewal("hub_restored", {Lane.SCHEDULER: Lost(old, 2)}))
    batch = await journal.batch(Lane.SCHEDULER, 0, 1 << 20)
    opened, lost = decode(batch.entries[0], JournalOpened), decode(batch.entries[1], LostRange)
    assert [(one.journal, one.forgotten_through, one.lost_from) for one in opened.past] == [(old, 6, 3)]
    told = open_seal(lost.sealed, KEY.public, dict)
    assert (lost.journal, lost.first, lost.last) == (old, 3, 6) and (told["first"], told["last"], told["digest_last"]) == (
        3,
        6,
        lost.digest_last,
    )
    await journal.renew(renewal("hub_restored", {Lane.SCHEDULER: Lost(None, 0)}))
    batch = await journal.batch(Lane.SCHEDULER, 0, 1 << 20)
    ranges = [(one.journal, one.first, one.last) for entry in batch.entries if b"lost_range" in entry for one in [decode(entry, LostRange)]]
    assert ranges == [(old, 1, 6), (old, 3, 6)], "a hub that has nothing at all is told of the whole, beside what it was told before"


async def test_an_ending_names_its_last_segment_by_its_new_number(journal: SqliteJournal) -> None:
    await journal.append(
        lambda n: {
            Lane.METERING: [SettingsApplied(seq=n[Lane.METERING] + i, at=AT, revision=i) for i in range(3)],
            Lane.SCHEDULER: [Ending(seq=n[Lane.SCHEDULER], at=AT, last_metering_seq=3)],
        }
    )
    await journal.renew(renewal("forked"))
    ending = decode((await journal.batch(Lane.SCHEDULER, 0, 1 << 20)).entries[1], Ending)
    assert (ending.seq, ending.last_metering_seq) == (2, 4)


class Ending(EntryBase, frozen=True, kw_only=True, tag="ended"):
    last_metering_seq: int


async def test_marks_of_the_old_journal_change_nothing_in_the_new(journal: SqliteJournal) -> None:
    await journal.append(fact(6))
    old = journal.id
    await journal.renew(renewal("forked"))
    await journal.acknowledged(Lane.SCHEDULER, 6, 6, old)
    assert await journal.marks(Lane.SCHEDULER) == (0, 0)
    await journal.acknowledged(Lane.SCHEDULER, 6, 6, journal.id)
    assert await journal.marks(Lane.SCHEDULER) == (6, 6)


async def test_a_crash_within_the_opening_leaves_the_old_journal_whole(journal: SqliteJournal) -> None:
    await journal.append(fact(6))
    name, before = journal.id, await journal.batch(Lane.SCHEDULER, 0, 1 << 20)

    def crash(cursor: Cursor) -> None:
        raise ValueError("the power goes")

    with pytest.raises(ValueError, match="power"):
        await journal.renew(renewal("forked"), crash)
    assert (journal.id, await journal.batch(Lane.SCHEDULER, 0, 1 << 20)) == (name, before)


# --- what is kept, and the format before ----------------------------------------------------------------------------------------------------------


@dataclass
class Calendar(SystemClock):
    days: float = field(default=0.0)

    def now(self) -> datetime:
        return AT + timedelta(days=self.days)


async def test_safe_entries_are_kept_for_thirty_five_days_so_that_a_restored_hub_gets_them_again(short_folder: Path) -> None:
    calendar = Calendar()
    journal = await SqliteJournal.open(short_folder / "journal.db", clock=calendar)
    bases = []
    for day in (0.0, 10.0, 36.0, 46.5):
        calendar.days = day
        await journal.append(fact(1))
        await journal.acknowledged(Lane.SCHEDULER, 99, 99)
        bases.append((await journal.batch(Lane.SCHEDULER, 4, 1)).forgotten if day > 40 else await _base(journal))
    await journal.close()
    assert bases == [0, 0, 1, 2]


async def _base(journal: SqliteJournal) -> int:
    return await journal.read(lambda cursor: int(cursor.execute("SELECT base_seq FROM lane WHERE name = 'scheduler'").fetchone()[0]))


async def test_beyond_their_bytes_the_oldest_safe_entries_go_earlier_but_never_metering_s_nor_what_is_not_safe(short_folder: Path) -> None:
    journal = await SqliteJournal.open(short_folder / "journal.db", Bounds(kept_bytes=2_000))

    def both(n: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
        return {lane: [SettingsApplied(seq=n[lane] + i, at=AT, revision=i) for i in range(100)] for lane in (Lane.SCHEDULER, Lane.METERING)}

    await journal.append(both)
    for lane in (Lane.SCHEDULER, Lane.METERING):
        await journal.acknowledged(lane, 90, 60)
    assert (await journal.batch(Lane.SCHEDULER, 60, 1 << 20)).forgotten == 60
    assert (await journal.batch(Lane.METERING, 0, 1 << 20)).forgotten == 0
    await journal.acknowledged(Lane.SCHEDULER, 90, 90)
    assert 75 < (await journal.batch(Lane.SCHEDULER, 90, 1 << 20)).forgotten <= 90
    await journal.close()


async def test_a_journal_of_the_format_before_is_brought_up_to_date_in_place(short_folder: Path) -> None:
    """The committed file was written by the agent before places and new journals: an upgrade keeps everything."""
    path = short_folder / "journal.db"
    shutil.copy(Path(__file__).parent / "data" / "journal_v1.db", path)
    journal = await SqliteJournal.open(path)
    assert (journal.id, journal.pending) == ("jnl-8479c4ff76a0ec465251f706fa144b43", None)
    batch = await journal.batch(Lane.SCHEDULER, 2, 1 << 20)
    assert (seqs(batch), batch.forgotten, await journal.marks(Lane.SCHEDULER)) == ([3, 4, 5, 6], 2, (4, 2))
    assert await journal.epochs(Lane.SCHEDULER) == (3, 3) and await journal.instruction_mark() == InstructionMark(3, 7)
    assert len((await journal.read(load)).attempts) == 1
    await journal.append(fact())
    await journal.close()
    again = await SqliteJournal.open(path)
    await again.close()
    assert again.pending is None
