"""The site's journal on SQLite: the port of `intertie.link.journal`, and the agent's own rows in the same transactions.

One writer thread; all who ask while a commit runs share the next one (group commit), and nothing returns before its fsync. Each request
runs inside a savepoint, so that one that fails takes nobody with it. A lane's numbers come from its counter row, never from `max()` or a
rowid; the digest of what was forgotten is kept, so the chain always continues (`intertie.agent.journal_rows`).

A journal that lies elsewhere than it was made, that is gone, or that was damaged (`intertie.agent.journal_file`) is `pending`: it must be opened anew
(`renew`, by `intertie.agent.reopen`) before a word of it is sent. Nothing here is ever dropped for want of room: `accepting` says when no new work fits.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from intertie.agent.journal_file import (
    DISK,
    Pending,
    as_told,
    connect,
    last_instruction,
    name_of,
    open_file,
    refusal,
    refuse_network,
    write_name,
)
from intertie.agent.journal_rows import Bounds, Renewal, append_entries, digest_at, forget, note_safe, open_anew
from intertie.clock import Clock, SystemClock
from intertie.contracts.link import Instruction, Lane
from intertie.errors import Refused, Unavailable
from intertie.ids import Digest, InstructionId, JournalId
from intertie.link.journal import Batch, Build, InstructionMark
from intertie.observe import log

T = TypeVar("T")
Cursor = sqlite3.Cursor
Also = Callable[[Cursor], None]
"""More to write in the same transaction as an entry."""

LOG = log.get("agent.journal")

# Requests that share one commit; more would hold the first of them back for no gain (SQLite writes some 90 k rows a second here).
GROUP = 512
# Requests that wait. Far above what one site can do at once; beyond it the disk is not keeping up, and saying so beats growing.
WAITING = 20_000


@dataclass(frozen=True, slots=True)
class Condition:
    """Whether new work may be taken here, and if not, why."""

    accepting: bool = True
    code: str = ""
    text: str = ""


@dataclass(slots=True)
class _Request:
    work: Callable[[Cursor], Any]
    done: asyncio.Future[Any]


class SqliteJournal:
    """One file. `await SqliteJournal.open(path)`; every method returns after fsync; `close()` when done."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        thread: ThreadPoolExecutor,
        journal: JournalId,
        *,
        path: Path | None = None,
        place: str = "",
        pending: Pending | None = None,
        bounds: Bounds | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`clock`: for the age of safe entries only. `path` None: a database that is in no file."""
        self._connection = connection
        self._thread = thread
        self._id = journal
        self._path, self._place = path, place
        self.pending = pending
        """Set while this journal must be opened anew before it is spoken of."""
        self._bounds, self._clock = bounds or Bounds(), clock or SystemClock()
        self._refused: Unavailable | None = None
        self._used_bytes = 0
        self._waiting: list[_Request] = []
        self._flushing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, path: Path, bounds: Bounds | None = None, clock: Clock | None = None) -> SqliteJournal:
        """Open or create; a damaged one is set aside, and what could be saved of it is `pending` in a new one.

        `Refused('agent.journal_filesystem' | 'agent.journal_version')`, `Unavailable('agent.disk_full' | 'agent.disk_error')`.
        """
        refuse_network(path)
        thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        try:
            connection, journal, place, pending = await asyncio.get_running_loop().run_in_executor(thread, open_file, path)
        except BaseException:
            thread.shutdown()
            raise
        if pending is not None and pending.why != "first":
            LOG.warning("the journal is to be opened anew", why=pending.why, previous=pending.previous)
        return cls(connection, thread, journal, path=path, place=place, pending=pending, bounds=bounds, clock=clock)

    @property
    def id(self) -> JournalId:
        return self._id

    @property
    def place(self) -> str:
        return self._place

    @property
    def kept_s(self) -> float:
        """How long entries are kept after they are safe."""
        return self._bounds.kept_s

    def accepting(self) -> Condition:
        """Whether new work may be taken. Cheap; what runs is recorded whatever this says."""
        if self._refused is not None:
            return Condition(False, self._refused.code, self._refused.text)
        if self._used_bytes > self._bounds.most_bytes:
            used, most = self._used_bytes >> 20, self._bounds.most_bytes >> 20
            return Condition(
                False, "agent.journal_full", f"the journal holds {used} MiB, {most} are allowed: the hub has not taken them yet"
            )
        if self._path is not None:
            try:
                disk = os.statvfs(self._path.parent)
            except OSError as err:
                return Condition(False, "agent.disk_error", f"the file system of the journal does not answer: {err.strerror}")
            free, wanted = disk.f_bavail * disk.f_frsize, self._bounds.free_bytes
            if free < wanted:
                text = f"{free >> 20} MiB are free on the journal's file system, {wanted >> 20} are wanted"
                return Condition(False, "agent.disk_low", text)
        return Condition()

    async def close(self) -> None:
        while self._flushing is not None:
            await asyncio.wait([self._flushing])
        await self._on_disk(self._connection.close)
        self._thread.shutdown()

    async def _on_disk(self, work: Callable[[], T]) -> T:
        """All that waits for the disk goes through here: on the one thread, beside the loop. The simulator waits in virtual time instead."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # --- the two verbs that all others are made of ---

    async def write(self, work: Callable[[Cursor], T]) -> T:
        """Run `work` in a transaction shared with those who wait beside it; its value after the commit.

        `Unavailable('agent.disk_full')` if the disk refused; whatever `work` itself raised otherwise. Nothing was written then.
        """
        if len(self._waiting) >= WAITING:
            raise Unavailable("agent.disk_slow", f"{WAITING} writes wait for the journal's disk", retry_after_s=5)
        request = _Request(work, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush(), name="journal-flush")
        value: T = await asyncio.shield(request.done)
        return value

    async def read(self, work: Callable[[Cursor], T]) -> T:
        """Run `work` outside any transaction of others."""
        return await self._on_disk(lambda: work(self._connection.cursor()))

    async def _flush(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:GROUP], self._waiting[GROUP:]
                outcomes = await self._on_disk(partial(self._commit, group))
                for request, (value, error) in zip(group, outcomes, strict=True):
                    if request.done.done():
                        continue
                    if error is None:
                        request.done.set_result(value)
                    else:
                        request.done.set_exception(error)
                        request.done.exception()  # Read here: whoever asked may have been cancelled meanwhile.
        finally:
            self._flushing = None

    def _commit(self, group: Sequence[_Request]) -> list[tuple[Any, Exception | None]]:
        """On the thread. After a fault of the disk a new connection is made first: what SQLite holds of the file may be older than it."""
        if self._refused is not None and self._path is not None:
            try:
                fresh = connect(self._path)
            except sqlite3.Error as err:
                self._refused = refusal(err) or self._refused
                return [(None, self._refused)] * len(group)
            self._connection.close()
            self._connection = fresh
        outcomes = _commit(self._connection, group)
        self._refused = next((error for _, error in outcomes if isinstance(error, Unavailable) and error.code in DISK), None)
        if self._refused is None:
            pages, free, size = (
                int(self._connection.execute(f"PRAGMA {what}").fetchone()[0]) for what in ("page_count", "freelist_count", "page_size")
            )
            self._used_bytes = (pages - free) * size
        return outcomes

    # --- the port ---

    async def append(self, build: Build, also: Also | None = None) -> None:
        """Write one fact's entries of all lanes, and the agent's own rows, in one transaction."""

        def work(cursor: Cursor) -> None:
            heads = {Lane(n): (int(s), Digest(d)) for n, s, d in cursor.execute("SELECT name, next_seq, head_digest FROM lane")}
            for lane, entries in build({lane: seq for lane, (seq, _) in heads.items()}).items():
                append_entries(cursor, lane, *heads[lane], entries)
            if also is not None:
                also(cursor)

        await self.write(work)

    async def batch(self, lane: Lane, after: int, limit_bytes: int) -> Batch:
        """Entries after number `after`. `Refused('agent.journal_forgotten')` if the keeper asks for what it once said was safe."""

        def work(cursor: Cursor) -> Batch:
            next_seq, head, base, base_digest = cursor.execute(
                "SELECT next_seq, head_digest, base_seq, base_digest FROM lane WHERE name = ?", (lane.value,)
            ).fetchone()
            if after < base:
                raise Refused(
                    "agent.journal_forgotten",
                    f"lane {lane} is asked for entries after {after}, but those up to {base} were called safe by the hub and forgotten",
                    next_step="the hub was restored from a backup: compare both sides",
                )
            if after >= next_seq:
                raise Refused(
                    "agent.journal_behind",
                    f"the hub holds {after} entries of lane {lane}, this journal only {next_seq - 1}",
                    next_step="this journal was restored from a copy: compare both sides",
                )
            before = base_digest if after == base else digest_at(cursor, lane, after, next_seq, head)
            entries: list[bytes] = []
            size, last = 0, after
            query = "SELECT seq, body FROM entry WHERE lane = ? AND seq > ? ORDER BY seq"
            for seq, body in cursor.execute(query, (lane.value, after)):
                if entries and size + len(body) > limit_bytes:
                    break
                entries.append(bytes(body))
                size, last = size + len(body), int(seq)
            return Batch(
                first_seq=after + 1,
                digest_before=Digest(before),
                entries=entries,
                at_head=last == next_seq - 1,
                forgotten=base,
                journal=name_of(cursor),
            )

        return await self.read(work)

    async def acknowledged(self, lane: Lane, ack_through: int, safe_through: int, journal: JournalId | None = None) -> None:
        """Marks only grow. Entries up to `safe_through` are kept as long as `Bounds` says, and then forgotten; the digest of the last of them is
        kept for ever."""

        def work(cursor: Cursor) -> None:
            if journal is not None and journal != name_of(cursor):
                return
            next_seq, ack, safe = cursor.execute(
                "SELECT next_seq, ack_through, safe_through FROM lane WHERE name = ?", (lane.value,)
            ).fetchone()
            acked = min(max(ack, ack_through), next_seq - 1)
            safed = min(max(safe, safe_through), acked)
            if (acked, safed) == (ack, safe):
                return
            cursor.execute("UPDATE lane SET ack_through = ?, safe_through = ? WHERE name = ?", (acked, safed, lane.value))
            if safed > safe:
                note_safe(cursor, lane, safed, self._clock.now().timestamp())
                forget(cursor, lane, self._bounds, self._clock.now().timestamp())

        await self.write(work)

    async def epochs(self, lane: Lane) -> tuple[int, int]:
        def work(cursor: Cursor) -> tuple[int, int]:
            known, ready = cursor.execute("SELECT epoch, ready_epoch FROM lane WHERE name = ?", (lane.value,)).fetchone()
            return int(known), int(ready)

        return await self.read(work)

    async def remember_epochs(self, lane: Lane, known: int, ready: int) -> None:
        def work(cursor: Cursor) -> None:
            cursor.execute(
                "UPDATE lane SET epoch = max(epoch, ?), ready_epoch = max(ready_epoch, ?) WHERE name = ?", (known, ready, lane.value)
            )

        await self.write(work)

    async def renew(self, renewal: Renewal, also: Also | None = None) -> JournalId:
        """Open a new journal in this file, in one transaction: `JournalOpened` on each lane, a `LostRange` for what nobody has, everything that
        was not forgotten said again with new numbers, `renewal.last`, and the agent's own rows. Its id."""
        fresh = JournalId(f"jnl-{secrets.token_hex(16)}")

        def work(cursor: Cursor) -> None:
            open_anew(cursor, fresh, renewal, self.pending, self._place)
            if also is not None:
                also(cursor)

        await self.write(work)
        self._id, self.pending = fresh, None
        if self._path is not None:
            await self._on_disk(partial(write_name, self._path, fresh))
        LOG.info("the journal was opened anew", why=renewal.why, journal=fresh)
        return fresh

    async def marks(self, lane: Lane) -> tuple[int, int]:
        def work(cursor: Cursor) -> tuple[int, int]:
            ack, safe = cursor.execute("SELECT ack_through, safe_through FROM lane WHERE name = ?", (lane.value,)).fetchone()
            return int(ack), int(safe)

        return await self.read(work)

    async def take(self, instructions: Sequence[Instruction]) -> Sequence[Instruction]:
        """Store and move the mark in one transaction; those not seen before, in order."""
        if not instructions:
            return []

        def work(cursor: Cursor) -> list[Instruction]:
            fresh: list[Instruction] = []
            mark = last_instruction(cursor)
            for one in instructions:
                cursor.execute(
                    "INSERT INTO instruction (id, epoch, number, attempt) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                    (one.id, one.epoch, one.number, one.attempt),
                )
                if cursor.rowcount == 1:
                    fresh.append(one)
                mark = max(mark, (one.epoch, one.number))
            cursor.execute("INSERT OR REPLACE INTO meta VALUES ('instruction_mark', ?)", (f"{mark[0]} {mark[1]}",))
            return fresh

        return await self.write(work)

    async def instruction_mark(self) -> InstructionMark:
        epoch, number = await self.read(last_instruction)
        return InstructionMark(epoch=epoch, number=number)

    async def drop_unhandled(self, only: InstructionId | None = None) -> int:
        """Forget instructions that were stored but never acted on (all of them at a start: when they came is not known any more).

        The hub repeats each until its answer entry is on its disk; a repeat is then new again.
        """

        def work(cursor: Cursor) -> int:
            if only is None:
                return cursor.execute("DELETE FROM instruction WHERE handled = 0").rowcount
            return cursor.execute("DELETE FROM instruction WHERE handled = 0 AND id = ?", (only,)).rowcount

        return await self.write(work)

    async def entries_waiting(self) -> int:
        """Entries not yet acknowledged, all lanes together."""

        def work(cursor: Cursor) -> int:
            return int(cursor.execute("SELECT coalesce(sum(next_seq - 1 - ack_through), 0) FROM lane").fetchone()[0])

        return await self.read(work)


def handled(instruction: InstructionId) -> Also:
    """Mark an instruction as acted on; goes into the transaction of its answer."""

    def also(cursor: Cursor) -> None:
        cursor.execute("UPDATE instruction SET handled = 1 WHERE id = ?", (instruction,))

    return also


def _commit(connection: sqlite3.Connection, group: Sequence[_Request]) -> list[tuple[Any, Exception | None]]:
    """One transaction for the group; each request in a savepoint of its own."""
    outcomes: list[tuple[Any, Exception | None]] = []
    cursor = connection.cursor()
    try:
        cursor.execute("BEGIN IMMEDIATE")
        for request in group:
            cursor.execute("SAVEPOINT one")
            try:
                outcomes.append((request.work(cursor), None))
            except sqlite3.OperationalError as err:
                if not connection.in_transaction:
                    raise  # The disk refused: SQLite has rolled everything back already.
                cursor.execute("ROLLBACK TO one")
                outcomes.append((None, as_told(err)))
            except Exception as err:
                cursor.execute("ROLLBACK TO one")
                outcomes.append((None, err))
            cursor.execute("RELEASE one")
        cursor.execute("COMMIT")
    except Exception as err:
        if connection.in_transaction:
            cursor.execute("ROLLBACK")
        return [(None, as_told(err))] * len(group)
    return outcomes
