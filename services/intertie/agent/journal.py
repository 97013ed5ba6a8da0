"""The site's journal on SQLite: the port of `intertie.link.journal`, and the agent's own rows in the same transactions.

One writer thread; all who ask while a commit runs share the next one (group commit), and nothing returns before its fsync. Each request
runs inside a savepoint, so that one that fails takes nobody with it. A lane's numbers come from its counter row, never from `max()` or a
rowid; the digest of what was forgotten is kept, so the chain always continues.
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

from intertie.contracts.base import encode
from intertie.contracts.link import Instruction, Lane
from intertie.errors import Refused, Unavailable
from intertie.ids import Digest, InstructionId, JournalId, mint
from intertie.link.journal import Batch, Build, InstructionMark, first_digest, next_digest

T = TypeVar("T")
Cursor = sqlite3.Cursor
Also = Callable[[Cursor], None]
"""More to write in the same transaction as an entry."""

SCHEMA_VERSION = 1
# Requests that share one commit; more would hold the first of them back for no gain (SQLite writes some 90 k rows a second here).
GROUP = 512
# Requests that wait. Far above what one site can do at once; beyond it the disk is not keeping up, and saying so beats growing.
WAITING = 20_000
# The chain is checked at open over this many of the newest entries: a long absence must not make a long start.
CHECKED_ENTRIES = 200_000

# fsync and locks of these mean something else than SQLite believes (sqlite.org/howtocorrupt, 2.1).
NETWORK_FILESYSTEMS = frozenset(
    "nfs nfs4 cifs smb3 smbfs ceph lustre gpfs glusterfs beegfs 9p afs ncpfs fuse.sshfs fuse.glusterfs fuse.ceph fuse.s3fs".split()
)

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE lane (
  name TEXT PRIMARY KEY,
  next_seq INTEGER NOT NULL,          -- gapless, never from max() or rowid
  head_digest TEXT NOT NULL,          -- d(next_seq - 1)
  base_seq INTEGER NOT NULL,          -- everything up to here was forgotten
  base_digest TEXT NOT NULL,          -- d(base_seq)
  ack_through INTEGER NOT NULL,
  safe_through INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE entry (
  lane TEXT NOT NULL, seq INTEGER NOT NULL, body BLOB NOT NULL, digest TEXT NOT NULL,
  PRIMARY KEY (lane, seq)
) WITHOUT ROWID;
CREATE TABLE instruction (
  id TEXT PRIMARY KEY, epoch INTEGER NOT NULL, number INTEGER NOT NULL, attempt TEXT NOT NULL, handled INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX instruction_attempt ON instruction (attempt);
-- one row per attempt and per local job, the whole truth of it in body
CREATE TABLE attempt (
  id TEXT PRIMARY KEY, job TEXT NOT NULL, state TEXT NOT NULL, local INTEGER NOT NULL, settled INTEGER NOT NULL DEFAULT 0, body BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX attempt_state ON attempt (state);
-- never two holders of a device: the database refuses a second, whatever the code thinks
CREATE TABLE hold (pool TEXT NOT NULL, device TEXT NOT NULL, attempt TEXT NOT NULL, PRIMARY KEY (pool, device)) WITHOUT ROWID;
CREATE TABLE seen (job TEXT PRIMARY KEY, epoch INTEGER NOT NULL, generation INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE tombstone (attempt TEXT PRIMARY KEY, at TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE setting (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


@dataclass(slots=True)
class _Request:
    work: Callable[[Cursor], Any]
    done: asyncio.Future[Any]


def filesystem_of(path: Path) -> str:
    """Type of the filesystem that holds `path`, from /proc/self/mountinfo (the longest mount point above it wins)."""
    real = str(path.resolve())
    best, kind = "", "unknown"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


class SqliteJournal:
    """One file. `await SqliteJournal.open(path)`; every method returns after fsync; `close()` when done."""

    def __init__(self, connection: sqlite3.Connection, thread: ThreadPoolExecutor, journal: JournalId) -> None:
        self._connection = connection
        self._thread = thread
        self._id = journal
        self._waiting: list[_Request] = []
        self._flushing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, path: Path) -> SqliteJournal:
        """Open or create. `Refused('agent.journal_filesystem' | 'agent.journal_damaged' | 'agent.journal_version')`."""
        kind = filesystem_of(path.parent)
        if kind in NETWORK_FILESYSTEMS:
            raise Refused(
                "agent.journal_filesystem",
                f"{path} lies on {kind}, a network file system, where fsync and locks cannot be relied on",
                next_step="choose a --data folder on a local disk",
            )
        thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        try:
            connection, journal = await asyncio.get_running_loop().run_in_executor(thread, _open, path)
        except BaseException:
            thread.shutdown()
            raise
        return cls(connection, thread, journal)

    @property
    def id(self) -> JournalId:
        return self._id

    @property
    def place(self) -> str:
        return ""

    async def epochs(self, lane: Lane) -> tuple[int, int]:
        def work(cursor: Cursor) -> tuple[int, int]:
            row = cursor.execute("SELECT value FROM setting WHERE key = ?", (f"epochs {lane}",)).fetchone()
            known, ready = row[0].split() if row else (0, 0)
            return int(known), int(ready)

        return await self.read(work)

    async def remember_epochs(self, lane: Lane, known: int, ready: int) -> None:
        def work(cursor: Cursor) -> None:
            cursor.execute("INSERT OR REPLACE INTO setting VALUES (?, ?)", (f"epochs {lane}", f"{known} {ready}"))

        await self.write(work)

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
                outcomes = await self._on_disk(partial(_commit, self._connection, group))
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

    # --- the port ---

    async def append(self, build: Build, also: Also | None = None) -> None:
        """Write one fact's entries of all lanes, and the agent's own rows, in one transaction."""

        def work(cursor: Cursor) -> None:
            heads = {Lane(n): (int(s), Digest(d)) for n, s, d in cursor.execute("SELECT name, next_seq, head_digest FROM lane")}
            for lane, entries in build({lane: seq for lane, (seq, _) in heads.items()}).items():
                seq, digest = heads[lane]
                for entry in entries:
                    if entry.seq != seq:
                        raise AssertionError(f"entry for lane {lane} carries number {entry.seq}, {seq} is next")
                    body = encode(entry)
                    digest = next_digest(digest, body)
                    cursor.execute("INSERT INTO entry VALUES (?, ?, ?, ?)", (lane.value, seq, body, digest))
                    seq += 1
                cursor.execute("UPDATE lane SET next_seq = ?, head_digest = ? WHERE name = ?", (seq, digest, lane.value))
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
            before = base_digest if after == base else _digest_at(cursor, lane, after, next_seq, head)
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
                journal=self._id,
            )

        return await self.read(work)

    async def acknowledged(self, lane: Lane, ack_through: int, safe_through: int, journal: JournalId | None = None) -> None:
        """Marks only grow; entries up to `safe_through` are forgotten, the digest of the last of them is kept."""

        def work(cursor: Cursor) -> None:
            next_seq, head, base, ack, safe = cursor.execute(
                "SELECT next_seq, head_digest, base_seq, ack_through, safe_through FROM lane WHERE name = ?", (lane.value,)
            ).fetchone()
            acked = min(max(ack, ack_through), next_seq - 1)
            safed = min(max(safe, safe_through), acked)
            if (acked, safed) != (ack, safe):
                cursor.execute("UPDATE lane SET ack_through = ?, safe_through = ? WHERE name = ?", (acked, safed, lane.value))
            if safed > base:
                digest = _digest_at(cursor, lane, safed, next_seq, head)
                cursor.execute("UPDATE lane SET base_seq = ?, base_digest = ? WHERE name = ?", (safed, digest, lane.value))
                cursor.execute("DELETE FROM entry WHERE lane = ? AND seq <= ?", (lane.value, safed))

        await self.write(work)

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
            mark = _mark(cursor)
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
        epoch, number = await self.read(_mark)
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


def _mark(cursor: Cursor) -> tuple[int, int]:
    row = cursor.execute("SELECT value FROM meta WHERE key = 'instruction_mark'").fetchone()
    if row is None:
        return 0, 0
    epoch, number = row[0].split()
    return int(epoch), int(number)


def _digest_at(cursor: Cursor, lane: Lane, seq: int, next_seq: int, head: str) -> str:
    if seq == next_seq - 1:
        return head
    row = cursor.execute("SELECT digest FROM entry WHERE lane = ? AND seq = ?", (lane.value, seq)).fetchone()
    if row is None:
        raise _damaged("the journal", f"entry {seq} of lane {lane} is missing")
    return str(row[0])


def _damaged(where: object, what: str) -> Refused:
    return Refused(
        "agent.journal_damaged",
        f"{where}: {what}",
        next_step="stop the agent, keep a copy of the file, restore it from a backup or move it away; running jobs go on meanwhile",
    )


def _open(path: Path) -> tuple[sqlite3.Connection, JournalId]:
    fresh = not path.exists()
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
        try:
            if fresh:
                os.chmod(path, 0o600)
            # The order matters: WAL before the first write, FULL so that a commit means fsync in WAL mode too.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            # Environment values lie here until their job has ended; what is deleted is overwritten, whatever SQLite was built with.
            connection.execute("PRAGMA secure_delete = ON")
            # Random, not sortable: a clone or a re-created file must never be taken for its original.
            return connection, prepare(connection, path, JournalId(f"jnl-{secrets.token_hex(16)}"))
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as err:
        if _is_full(err):
            raise _full(err) from err
        raise _damaged(path, str(err)) from err


def prepare(connection: sqlite3.Connection, path: Path, journal: JournalId) -> JournalId:
    """Make the tables of a new database, or check those of an old one; whose journal it is. `journal`: its id if it is new."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        _create(connection, journal)
    elif version != SCHEMA_VERSION:
        raise Refused(
            "agent.journal_version",
            f"{path} has format {version}, this agent knows {SCHEMA_VERSION}",
            next_step="run the agent version that wrote it, or a newer one",
        )
    _check(connection, path)
    return JournalId(connection.execute("SELECT value FROM meta WHERE key = 'journal'").fetchone()[0])


def _create(connection: sqlite3.Connection, journal: JournalId) -> None:
    statements = [s for s in SCHEMA.split(";\n") if s.strip()]
    connection.execute("BEGIN IMMEDIATE")
    for statement in statements:
        connection.execute(statement)
    connection.execute("INSERT INTO meta VALUES ('journal', ?)", (journal,))
    connection.execute("INSERT INTO meta VALUES ('name', ?)", (mint("file"),))
    zero = first_digest(journal)
    for lane in Lane:
        connection.execute("INSERT INTO lane VALUES (?, 1, ?, 0, ?, 0, 0)", (lane.value, zero, zero))
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """The pages, then the chain of what is kept: damage is told at the start, not when money hangs on it."""
    said = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if said != "ok":
        raise _damaged(path, said)
    for lane, next_seq, head, base, base_digest in connection.execute(
        "SELECT name, next_seq, head_digest, base_seq, base_digest FROM lane"
    ).fetchall():
        start = max(base, next_seq - 1 - CHECKED_ENTRIES)
        digest = base_digest
        if start > base:
            digest = connection.execute("SELECT digest FROM entry WHERE lane = ? AND seq = ?", (lane, start)).fetchone()[0]
        expected = start + 1
        query = "SELECT seq, body, digest FROM entry WHERE lane = ? AND seq > ? ORDER BY seq"
        for seq, body, stored in connection.execute(query, (lane, start)):
            digest = next_digest(Digest(digest), body if isinstance(body, bytes) else b"")
            if seq != expected or digest != stored:
                raise _damaged(path, f"lane {lane} breaks at entry {expected}: its digest does not continue the chain")
            expected += 1
        if expected != next_seq or digest != head:
            raise _damaged(path, f"lane {lane} ends at entry {expected - 1}, its counter says {next_seq - 1}")


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
                outcomes.append((None, _told(err)))
            except Exception as err:
                cursor.execute("ROLLBACK TO one")
                outcomes.append((None, err))
            cursor.execute("RELEASE one")
        cursor.execute("COMMIT")
    except Exception as err:
        if connection.in_transaction:
            cursor.execute("ROLLBACK")
        return [(None, _told(err))] * len(group)
    return outcomes


def _is_full(err: Exception) -> bool:
    code = getattr(err, "sqlite_errorcode", 0) or 0
    return code == sqlite3.SQLITE_FULL or code & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def _full(err: Exception) -> Unavailable:
    return Unavailable(
        "agent.disk_full",
        f"the journal's disk refused a write ({err}): nothing was written",
        retry_after_s=10,
        next_step="free space on the file system of the data folder; no new work is taken until then",
    )


def _told(err: Exception) -> Exception:
    return _full(err) if _is_full(err) else err
