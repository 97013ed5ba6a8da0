"""The site's journal on SQLite: the port of `intertie.link.journal`, and the agent's own rows in the same transactions.

One writer thread; all who ask while a commit runs share the next one (group commit), and nothing returns before its fsync. Each request
runs inside a savepoint, so that one that fails takes nobody with it. A lane's numbers come from its counter row, never from `max()` or a
rowid; the digest of what was forgotten is kept, so the chain always continues.

A journal that lies elsewhere than it was made, that is gone, or that was damaged (`intertie.agent.salvage`) is `pending`: it must be opened anew
(`renew`, by `intertie.agent.reopen`) before a word of it is sent. Nothing here is ever dropped for want of room: `accepting` says when no new work fits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from intertie.agent.salvage import Damaged, salvage, set_aside
from intertie.clock import Clock, SystemClock
from intertie.contracts.base import encode
from intertie.contracts.link import EntryBase, HeldAttempt, Instruction, JournalOpened, Lane, LostRange, PastJournal, Sealed
from intertie.errors import Refused, Unavailable
from intertie.ids import Digest, InstructionId, JournalId, mint
from intertie.link.journal import Batch, Build, InstructionMark, first_digest, next_digest
from intertie.link.site import Lost
from intertie.observe import log

T = TypeVar("T")
Cursor = sqlite3.Cursor
Also = Callable[[Cursor], None]
"""More to write in the same transaction as an entry."""

LOG = log.get("agent.journal")

SCHEMA_VERSION = 2
"""1: the spine. 2: epochs, places, journals before this one, and entries that are kept for a while after they are safe."""
# Requests that share one commit; more would hold the first of them back for no gain (SQLite writes some 90 k rows a second here).
GROUP = 512
# Requests that wait. Far above what one site can do at once; beyond it the disk is not keeping up, and saying so beats growing.
WAITING = 20_000
# The chain is checked at open over this many of the newest entries: a long absence must not make a long start.
CHECKED_ENTRIES = 200_000
# Journals before this one that are named to keepers, of those that were told to forget something.
KEPT_PAST = 32
# Safe entries forgotten in one transaction to get below the bound of bytes: more would hold back those who wait.
FORGOTTEN_AT_ONCE = 2_000
# How often the time since an entry became safe is noted.
NOTED_S = 3_600.0

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


_KEPT = """
-- when entries became safe, to the hour: they are kept for a while after that
CREATE TABLE safe_mark (lane TEXT NOT NULL, through INTEGER NOT NULL, at_s REAL NOT NULL, PRIMARY KEY (lane, through)) WITHOUT ROWID;
-- journals that this one replaced, and what each was told to forget
CREATE TABLE past (
  lane TEXT NOT NULL, number INTEGER NOT NULL, journal TEXT NOT NULL, forgotten INTEGER NOT NULL, digest TEXT NOT NULL,
  lost_from INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (lane, number)
) WITHOUT ROWID;
-- the highest known of the lane's keeper, and the highest of which an answer came at head
ALTER TABLE lane ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;
ALTER TABLE lane ADD COLUMN ready_epoch INTEGER NOT NULL DEFAULT 0;
-- of the entries that are here
ALTER TABLE lane ADD COLUMN kept_bytes INTEGER NOT NULL DEFAULT 0;
UPDATE lane SET kept_bytes = (SELECT coalesce(sum(length(body)), 0) FROM entry WHERE entry.lane = lane.name);
"""
"""From format 1 to 2."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long and how much is kept (ADR 0006), and from where on no new work is taken. Seconds and bytes."""

    kept_s: float = 35 * 86_400.0
    """Entries stay this long after they are safe, so that a hub restored within that time gets them again."""
    kept_bytes: int = 256 * 1024 * 1024
    """Scheduler and registry: beyond it the oldest safe entries go earlier. Metering's never do: money hangs on them."""
    most_bytes: int = 2 * 1024 * 1024 * 1024
    free_bytes: int = 64 * 1024 * 1024
    """Of its file system. Below it what runs must still be able to say how it ended."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Whether new work may be taken here, and if not, why."""

    accepting: bool = True
    code: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Pending:
    """This journal must be opened anew before it is spoken of: `why` as in `JournalOpened`."""

    why: str
    previous: JournalId | None
    same_place: bool = False
    """The one before lay in this folder, on this host: whatever it had started and is not found here, is surely gone."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a new journal begins with; the rest of its first entries is in the old one."""

    why: str
    at: datetime
    kernel_boot: str
    held: Sequence[HeldAttempt]
    lost: Mapping[Lane, Lost]
    """Where a keeper lacks what this site was told to forget."""
    sign: Callable[[bytes], Sealed]
    last: Build
    """Said after everything of the old journal was said again: what is given up because of this."""
    islanded: bool = False


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
        kind = filesystem_of(path.parent)
        if kind in NETWORK_FILESYSTEMS:
            raise Refused(
                "agent.journal_filesystem",
                f"{path} lies on {kind}, a network file system, where fsync and locks cannot be relied on",
                next_step="choose a --data folder on a local disk",
            )
        thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        try:
            connection, journal, place, pending = await asyncio.get_running_loop().run_in_executor(thread, _open, path)
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
                fresh = _connect(self._path)
            except sqlite3.Error as err:
                self._refused = _refusal(err) or self._refused
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
                _append(cursor, lane, *heads[lane], entries)
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
                journal=_name(cursor),
            )

        return await self.read(work)

    async def acknowledged(self, lane: Lane, ack_through: int, safe_through: int, journal: JournalId | None = None) -> None:
        """Marks only grow. Entries up to `safe_through` are kept as long as `Bounds` says, and then forgotten; the digest of the last of them is
        kept for ever."""

        def work(cursor: Cursor) -> None:
            if journal is not None and journal != _name(cursor):
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
                _note_safe(cursor, lane, safed, self._clock.now().timestamp())
                _forget(cursor, lane, self._bounds, self._clock.now().timestamp())

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
            _renew(cursor, fresh, renewal, self.pending, self._place)
            if also is not None:
                also(cursor)

        await self.write(work)
        self._id, self.pending = fresh, None
        if self._path is not None:
            await self._on_disk(partial(_write_name, self._path, fresh))
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


def _damaged(where: object, what: str) -> Damaged:
    return Damaged(
        "agent.journal_damaged",
        f"{where}: {what}",
        next_step="restart the agent: it sets the file aside, saves what is whole, and opens a new journal; running jobs go on meanwhile",
    )


def _name(cursor: Cursor) -> JournalId:
    return JournalId(cursor.execute("SELECT value FROM meta WHERE key = 'journal'").fetchone()[0])


def _append(cursor: Cursor, lane: Lane, seq: int, digest: Digest, entries: Sequence[EntryBase]) -> None:
    """Entries behind the last one; `seq` is the next number, `digest` that of the entry before."""
    size = 0
    for entry in entries:
        if entry.seq != seq:
            raise AssertionError(f"entry for lane {lane} carries number {entry.seq}, {seq} is next")
        body = encode(entry)
        digest = next_digest(digest, body)
        cursor.execute("INSERT INTO entry VALUES (?, ?, ?, ?)", (lane.value, seq, body, digest))
        seq, size = seq + 1, size + len(body)
    cursor.execute(
        "UPDATE lane SET next_seq = ?, head_digest = ?, kept_bytes = kept_bytes + ? WHERE name = ?", (seq, digest, size, lane.value)
    )


# --- what is kept after it is safe ---


def _note_safe(cursor: Cursor, lane: Lane, through: int, now_s: float) -> None:
    """Once an hour, so that the table stays small: everything since the last mark counts from the moment of that mark's last entry at latest."""
    row = cursor.execute("SELECT through, at_s FROM safe_mark WHERE lane = ? ORDER BY through DESC LIMIT 1", (lane.value,)).fetchone()
    if row is not None and 0 <= now_s - row[1] < NOTED_S:
        cursor.execute("UPDATE safe_mark SET through = ? WHERE lane = ? AND through = ?", (through, lane.value, row[0]))
    else:
        # The mark's time is the end of its hour: kept a little longer, never shorter.
        cursor.execute("INSERT OR REPLACE INTO safe_mark VALUES (?, ?, ?)", (lane.value, through, now_s))


def _forget(cursor: Cursor, lane: Lane, bounds: Bounds, now_s: float) -> None:
    """Safe entries past their time, and beyond the bytes that may be kept of scheduler and registry."""
    ripe = now_s - bounds.kept_s - (NOTED_S if bounds.kept_s else 0.0)
    old = cursor.execute("SELECT max(through) FROM safe_mark WHERE lane = ? AND at_s <= ?", (lane.value, ripe)).fetchone()[0]
    base, safe = cursor.execute("SELECT base_seq, safe_through FROM lane WHERE name = ?", (lane.value,)).fetchone()
    through = min(max(base, old or 0), safe)
    if lane is not Lane.METERING:
        both = (Lane.SCHEDULER.value, Lane.REGISTRY.value)
        over = cursor.execute("SELECT sum(kept_bytes) FROM lane WHERE name IN (?, ?)", both).fetchone()[0] - bounds.kept_bytes
        query = "SELECT seq, length(body) FROM entry WHERE lane = ? AND seq <= ? ORDER BY seq LIMIT ?"
        for seq, size in cursor.execute(query, (lane.value, safe, FORGOTTEN_AT_ONCE)).fetchall():
            if over <= 0:
                break
            through, over = max(through, seq), over - size
    if through <= base:
        return
    digest = cursor.execute("SELECT digest FROM entry WHERE lane = ? AND seq = ?", (lane.value, through)).fetchone()[0]
    size = cursor.execute("SELECT sum(length(body)) FROM entry WHERE lane = ? AND seq <= ?", (lane.value, through)).fetchone()[0]
    cursor.execute("DELETE FROM entry WHERE lane = ? AND seq <= ?", (lane.value, through))
    cursor.execute("DELETE FROM safe_mark WHERE lane = ? AND through <= ?", (lane.value, through))
    cursor.execute(
        "UPDATE lane SET base_seq = ?, base_digest = ?, kept_bytes = kept_bytes - ? WHERE name = ?", (through, digest, size, lane.value)
    )


# --- a new journal in the same file ---


def _renew(cursor: Cursor, fresh: JournalId, renewal: Renewal, pending: Pending | None, place: str) -> None:
    old = _name(cursor)
    # A new file had no journal before it; its own name was never said to anybody.
    new_file = pending is not None and pending.why in ("first", "gone")
    moved: dict[int, int] = {}
    # Metering first: endings on the scheduler lane name the number of their last segment.
    for lane in (Lane.METERING, Lane.REGISTRY, Lane.SCHEDULER):
        past, lost = _past(cursor, lane, None if new_file else old, renewal)
        opened = JournalOpened(
            seq=1,
            at=renewal.at,
            islanded=renewal.islanded,
            previous=pending.previous if pending is not None else old,
            why=renewal.why,
            place=place,
            kernel_boot=renewal.kernel_boot,
            same_place=pending.same_place if pending is not None else True,
            held=list(renewal.held) if lane is Lane.SCHEDULER else [],
            past=past,
        )
        said = _say_again(cursor, lane, fresh, [opened, *lost], moved)
        if lane is Lane.METERING:
            moved = said
    heads = {Lane(n): (int(s), Digest(d)) for n, s, d in cursor.execute("SELECT name, next_seq, head_digest FROM lane").fetchall()}
    for lane, entries in renewal.last({lane: seq for lane, (seq, _) in heads.items()}).items():
        _append(cursor, lane, *heads[lane], entries)
    cursor.execute("DELETE FROM safe_mark")
    cursor.execute("DELETE FROM meta WHERE key IN ('opening', 'previous')")
    cursor.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", [("journal", fresh), ("place", place)])


def _past(cursor: Cursor, lane: Lane, old: JournalId | None, renewal: Renewal) -> tuple[list[PastJournal], list[LostRange]]:
    """The journals before the new one, `old` the last of them, and the entries that nobody has."""
    if old is not None:
        base, digest = cursor.execute("SELECT base_seq, base_digest FROM lane WHERE name = ?", (lane.value,)).fetchone()
        # A journal that forgot nothing need not be known: all of it is said again.
        number = cursor.execute("SELECT coalesce(max(number), 0) + 1 FROM past WHERE lane = ?", (lane.value,)).fetchone()[0]
        if base > 0:
            cursor.execute("INSERT INTO past VALUES (?, ?, ?, ?, ?, 0)", (lane.value, number, old, base, digest))
        cursor.execute("DELETE FROM past WHERE lane = ? AND number <= ?", (lane.value, number - KEPT_PAST))
    query = "SELECT number, journal, forgotten, digest, lost_from FROM past WHERE lane = ? ORDER BY number"
    rows = cursor.execute(query, (lane.value,)).fetchall()
    found, ranges, lost = list[PastJournal](), list[LostRange](), renewal.lost.get(lane)
    for number, journal, forgotten, digest, lost_from in rows:
        start = lost.ack_through + 1 if lost is not None and journal == lost.journal else 1
        named = lost is not None and lost.journal in (None, journal)
        if named and forgotten >= start and not 0 < lost_from <= start:
            lost_from = start
            cursor.execute("UPDATE past SET lost_from = ? WHERE lane = ? AND number = ?", (start, lane.value, number))
        if lost is not None and lost_from > 0:
            # Also what was named before: the entry that said so may be among what this keeper lacks.
            ranges.append(_lost_range(2 + len(ranges), lane, JournalId(journal), lost_from, forgotten, Digest(digest), renewal))
        found.append(PastJournal(journal=JournalId(journal), forgotten_through=forgotten, digest=Digest(digest), lost_from=lost_from))
    return found, ranges


def _lost_range(seq: int, lane: Lane, journal: JournalId, first: int, last: int, digest: Digest, renewal: Renewal) -> LostRange:
    told = {"journal": journal, "lane": lane.value, "first": first, "last": last, "digest_last": digest}
    sealed = renewal.sign(json.dumps(told, separators=(",", ":")).encode("utf-8"))
    return LostRange(
        seq=seq, at=renewal.at, islanded=renewal.islanded, journal=journal, first=first, last=last, digest_last=digest, sealed=sealed
    )


def _say_again(cursor: Cursor, lane: Lane, fresh: JournalId, first: Sequence[EntryBase], moved: Mapping[int, int]) -> dict[int, int]:
    """Everything kept of a lane behind `first`, numbered anew; old number → new. `moved`: the same of metering, for endings."""
    was = f"was {lane}"
    cursor.execute("UPDATE entry SET lane = ? WHERE lane = ?", (was, lane.value))
    zero = first_digest(fresh)
    cursor.execute(
        "UPDATE lane SET base_seq = 0, base_digest = ?, ack_through = 0, safe_through = 0, kept_bytes = 0 WHERE name = ?",
        (zero, lane.value),
    )
    _append(cursor, lane, 1, zero, first)
    seq, head = len(first) + 1, cursor.execute("SELECT head_digest FROM lane WHERE name = ?", (lane.value,)).fetchone()[0]
    numbers, at, size = dict[int, int](), 0, 0
    while rows := cursor.execute("SELECT seq, body FROM entry WHERE lane = ? AND seq > ? ORDER BY seq LIMIT 500", (was, at)).fetchall():
        at = rows[-1][0]
        for _, body in rows:
            said = json.loads(body)
            if said.get("kind") == "journal_opened":
                continue  # What it said of then is said of now by the one above.
            numbers[said["seq"]] = said["seq"] = seq
            if said.get("kind") == "ended":
                said["last_metering_seq"] = moved.get(said["last_metering_seq"], said["last_metering_seq"])
            again = json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
            head = next_digest(Digest(head), again)
            cursor.execute("INSERT INTO entry VALUES (?, ?, ?, ?)", (lane.value, seq, again, head))
            seq, size = seq + 1, size + len(again)
    cursor.execute("DELETE FROM entry WHERE lane = ?", (was,))
    cursor.execute(
        "UPDATE lane SET next_seq = ?, head_digest = ?, kept_bytes = kept_bytes + ? WHERE name = ?", (seq, head, size, lane.value)
    )
    return numbers


# --- opening ---


def place_of(path: Path) -> str:
    """A digest of this host (machine id, product uuid where it can be read) and of the file (its file system's id, its inode)."""
    host = []
    for source in ("/etc/machine-id", "/sys/class/dmi/id/product_uuid"):
        with contextlib.suppress(OSError):
            host.append(Path(source).read_text(encoding="ascii", errors="replace").strip())
    found, disk = path.stat(), os.statvfs(path)
    # A file system's own id stays the same when the kernel numbers its devices otherwise at the next boot.
    parts = [*host, str(disk.f_fsid or found.st_dev), str(found.st_ino)]
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()[:32]


def _name_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.id")


def _write_name(path: Path, journal: JournalId) -> None:
    """Beside the journal, with the folder's own place, so that the next one can say whom it replaces if the file is gone. Losing it costs only
    that."""
    with contextlib.suppress(OSError):
        part = path.with_name(f"{path.name}.id.part")
        part.write_text(f"{journal} {place_of(path.parent)}\n", encoding="ascii")
        part.chmod(0o600)
        part.replace(_name_file(path))


def _last_name(path: Path) -> tuple[JournalId | None, bool]:
    """The journal that was open here last, and whether this folder has not been copied or moved since."""
    with contextlib.suppress(OSError, ValueError):
        name, place = _name_file(path).read_text(encoding="ascii").split()
        return JournalId(name), place == place_of(path.parent)
    return None, False


def _open(path: Path) -> tuple[sqlite3.Connection, JournalId, str, Pending | None]:
    """The connection, whose journal it is, where it lies, and why it must be opened anew, if so."""
    (before, here), jobs = _last_name(path), path.parent / "jobs"
    fresh = not path.exists() or path.stat().st_size == 0
    opening = "gone" if before is not None or (jobs.is_dir() and any(jobs.iterdir())) else "first"
    try:
        try:
            connection, journal = _open_file(path, fresh, opening, before)
        except Damaged as err:
            aside = set_aside(path)
            LOG.error("the journal is damaged, and was set aside", file=str(aside), text=err.text)
            connection, journal = _saved_from(aside, path, before)
        place = place_of(path)
        known = dict(connection.execute("SELECT key, value FROM meta WHERE key IN ('place', 'opening', 'previous')").fetchall())
        pending = None
        if "opening" in known:
            pending = Pending(known["opening"], JournalId(known["previous"]) if known.get("previous") else None, here)
        elif known.get("place", place) != place:
            pending = Pending("moved", journal)
        if "place" not in known:
            connection.execute("INSERT INTO meta VALUES ('place', ?)", (place,))
    except sqlite3.Error as err:
        raise _refusal(err) or _damaged(path, str(err)) from err
    except OSError as err:
        raise Unavailable("agent.disk_error", f"{path} cannot be opened: {err.strerror}", retry_after_s=10) from err
    if before != journal:
        _write_name(path, journal)
    return connection, journal, place, pending


def _saved_from(aside: Path, path: Path, before: JournalId | None) -> tuple[sqlite3.Connection, JournalId]:
    """A new file with what is whole in the damaged one."""
    connection = _connect(path)
    try:
        os.chmod(path, 0o600)
        prepare(connection, path, before or JournalId(f"jnl-{secrets.token_hex(16)}"), "damaged", before)
        saved = salvage(aside, connection)
        LOG.error("saved from the damaged journal", entries=saved.entries, lost=saved.lost, attempts=saved.attempts)
        return connection, _name(connection.cursor())
    except BaseException:
        connection.close()
        raise


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    try:
        # The order matters: WAL before the first write, FULL so that a commit means fsync in WAL mode too.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        # Environment values lie here until their job has ended; what is deleted is overwritten, whatever SQLite was built with.
        connection.execute("PRAGMA secure_delete = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _open_file(path: Path, fresh: bool, opening: str, previous: JournalId | None) -> tuple[sqlite3.Connection, JournalId]:
    try:
        connection = _connect(path)
        try:
            if fresh:
                os.chmod(path, 0o600)
            # Random, not sortable: a clone or a re-created file must never be taken for its original.
            return connection, prepare(connection, path, JournalId(f"jnl-{secrets.token_hex(16)}"), opening, previous)
        except BaseException:
            connection.close()
            raise
    except sqlite3.DatabaseError as err:
        if isinstance(err, sqlite3.ProgrammingError):
            raise  # Our bug: no damage, and nothing to set aside.
        raise _refusal(err) or _damaged(path, str(err)) from err


def prepare(
    connection: sqlite3.Connection, path: Path, journal: JournalId, opening: str = "first", previous: JournalId | None = None
) -> JournalId:
    """Make the tables of a new database, or bring those of an old one up to date, and check them; whose journal it is. `journal`: its id if it
    is new, `opening` and `previous`: what it will say of itself then."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        _create(connection, journal, opening, previous)
    elif version == 1:
        _upgrade(connection)
    elif version != SCHEMA_VERSION:
        raise Refused(
            "agent.journal_version",
            f"{path} has format {version}, this agent knows {SCHEMA_VERSION}",
            next_step="run the agent version that wrote it, or a newer one",
        )
    _check(connection, path)
    return _name(connection.cursor())


def _run(connection: sqlite3.Connection, script: str) -> None:
    for statement in script.split(";\n"):
        if statement.strip():
            connection.execute(statement)


def _upgrade(connection: sqlite3.Connection) -> None:
    """In place and as one transaction: an upgrade of the agent keeps its journal."""
    connection.execute("BEGIN IMMEDIATE")
    _run(connection, _KEPT)
    epoch = _mark(connection.cursor())[0]
    connection.execute("UPDATE lane SET epoch = ?, ready_epoch = ? WHERE name = ?", (epoch, epoch, Lane.SCHEDULER.value))
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _create(connection: sqlite3.Connection, journal: JournalId, opening: str, previous: JournalId | None) -> None:
    connection.execute("BEGIN IMMEDIATE")
    _run(connection, SCHEMA)
    meta = {"journal": journal, "name": mint("file"), "opening": opening, "previous": previous or ""}
    connection.executemany("INSERT INTO meta VALUES (?, ?)", list(meta.items()))
    zero = first_digest(journal)
    for lane in Lane:
        connection.execute("INSERT INTO lane VALUES (?, 1, ?, 0, ?, 0, 0)", (lane.value, zero, zero))
    _run(connection, _KEPT)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """The pages, then the chain of what is kept: damage is found at the start, not when money hangs on it."""
    try:
        said = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if said != "ok":
            raise _damaged(path, said)
        _check_chain(connection, path)
    except sqlite3.OperationalError as err:
        raise _refusal(err) or _damaged(path, str(err)) from err


def _check_chain(connection: sqlite3.Connection, path: Path) -> None:
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


DISK = ("agent.disk_full", "agent.disk_error")


def _refusal(err: Exception) -> Unavailable | None:
    """What the disk said no to; None if it is no fault of the disk."""
    code = getattr(err, "sqlite_errorcode", 0) or 0
    if code & 0xFF == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE:
        return Unavailable(
            "agent.disk_full",
            f"the journal's disk refused a write ({err}): nothing was written",
            retry_after_s=10,
            next_step="free space on the file system of the data folder; no new work is taken until then",
        )
    if code & 0xFF in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_BUSY):
        return Unavailable(
            "agent.disk_error",
            f"the journal's disk does not take writes ({err}): nothing was written",
            retry_after_s=10,
            next_step="look at the disk and its mount; the agent goes on by itself when it is well again, and takes no new work until then",
        )
    return None


def _told(err: Exception) -> Exception:
    return _refusal(err) or err
