"""What a head has on its own disk: its nodes, the work it gave them, and every word of theirs that it acknowledged. SQLite, one writer.

`Tables` is the lane keeper's port on it. An entry is on disk before its node is answered, and what the head makes of it is written in the same
transaction that marks it (`HeadStore.interpret`).
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from sqlite3 import Cursor
from typing import TypeVar

import msgspec

from intertie.agent.journal_file import refuse_network
from intertie.contracts.incident import ReportIncident
from intertie.contracts.link import Lane
from intertie.errors import Refused, Unavailable
from intertie.ids import Digest, JournalId, SiteName
from intertie.lane.ports import LaneEntry, out_of_turn
from intertie.link.keeper import NewEntry, SiteRow
from intertie.observe import log

LOG = log.get("machines.store")
T = TypeVar("T")

FORMAT = 1
# Interpreted entries that stay, for a node whose journal was put back to compare with.
KEPT_ENTRIES = 5_000

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE node (name TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE token (digest TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE work (attempt TEXT PRIMARY KEY, node TEXT NOT NULL, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE lane_site (node TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE lane_entry (
  node TEXT NOT NULL, journal TEXT NOT NULL, seq INTEGER NOT NULL, digest TEXT NOT NULL, raw BLOB NOT NULL, received TEXT NOT NULL,
  open INTEGER NOT NULL DEFAULT 1,   -- neither interpreted nor set aside
  error TEXT,                        -- why it was set aside
  PRIMARY KEY (node, journal, seq)
) WITHOUT ROWID;
CREATE INDEX lane_open ON lane_entry (node, open) WHERE open = 1;
"""

_row = msgspec.json.Decoder(SiteRow).decode
_encode = msgspec.json.Encoder().encode


class HeadStore:
    """One file. Every verb is one transaction, fsynced before it returns; `Unavailable('machines.disk')` if the disk refuses."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="machines-store")
        self.turn = asyncio.Lock()
        """Held from a decision's reading to its writing."""

    @classmethod
    async def open(cls, path: Path) -> HeadStore:
        refuse_network(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.close(fd)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
        except sqlite3.Error as err:
            connection.close()
            raise Refused(
                "machines.store", f"{path} cannot be used: {err}", next_step="put it aside; nodes say again what they have"
            ) from err
        if version > FORMAT:
            connection.close()
            raise Refused("machines.store_format", f"{path} is of format {version}, this version reads {FORMAT}", next_step="upgrade")
        return cls(connection)

    async def close(self) -> None:
        async with self.turn:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown(wait=True)

    async def read(self, work: Callable[[Cursor], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._connection.cursor()))

    async def write(self, work: Callable[[Cursor], T]) -> T:
        """`work` in one transaction. Hold `turn` if what it writes was decided on what was read before."""

        def run() -> T:
            cursor = self._connection.cursor()
            try:
                cursor.execute("BEGIN IMMEDIATE")
                found = work(cursor)
                cursor.execute("COMMIT")
            except sqlite3.Error as err:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise Unavailable("machines.disk", f"the head's disk refuses: {err}", retry_after_s=5) from err
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            return found

        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, run))


def get_meta(cursor: Cursor, key: str) -> str | None:
    found = cursor.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if found is None else str(found[0])


def put_meta(cursor: Cursor, key: str, value: str) -> None:
    cursor.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value))


def mark_interpreted(cursor: Cursor, entry: LaneEntry) -> None:
    """`Stale('lane.out_of_turn')` if somebody did it, or if an earlier one of its journal is still open."""
    earlier = cursor.execute(
        "SELECT 1 FROM lane_entry WHERE node = ? AND journal = ? AND open = 1 AND seq < ? LIMIT 1", (entry.site, entry.journal, entry.seq)
    ).fetchone()
    done = cursor.execute(
        "UPDATE lane_entry SET open = 0 WHERE node = ? AND journal = ? AND seq = ? AND open = 1", (entry.site, entry.journal, entry.seq)
    )
    if earlier or done.rowcount != 1:
        raise out_of_turn(entry)
    cursor.execute(
        "DELETE FROM lane_entry WHERE node = ? AND journal = ? AND seq < ? AND open = 0",
        (entry.site, entry.journal, entry.seq - KEPT_ENTRIES),
    )


def _computed(cursor: Cursor, body: bytes) -> SiteRow:
    """A row with the columns that other tables hold."""
    row = _row(body)
    first = cursor.execute(
        "SELECT min(seq) FROM lane_entry WHERE node = ? AND journal = ? AND open = 1", (row.site, row.journal)
    ).fetchone()[0]
    row.interpreted_through = row.ack_through if first is None else first - 1
    row.quarantined = cursor.execute("SELECT count(*) FROM lane_entry WHERE node = ? AND error IS NOT NULL", (row.site,)).fetchone()[0]
    return row


def _load(cursor: Cursor, site: SiteName) -> SiteRow | None:
    found = cursor.execute("SELECT body FROM lane_site WHERE node = ?", (site,)).fetchone()
    return None if found is None else _computed(cursor, found[0])


def _save(cursor: Cursor, row: SiteRow) -> None:
    sql = "INSERT INTO lane_site VALUES (?, ?) ON CONFLICT (node) DO UPDATE SET body = excluded.body"
    cursor.execute(sql, (row.site, _encode(row)))


class _Turn:
    """One keeper's turn; the store's lock is held meanwhile, so nobody is busy."""

    busy: frozenset[SiteName] = frozenset()

    def __init__(self, store: HeadStore, rows: Mapping[SiteName, SiteRow]) -> None:
        self._store, self.rows = store, rows

    async def digest(self, site: SiteName, journal: JournalId, seq: int) -> Digest | None:
        sql = "SELECT digest FROM lane_entry WHERE node = ? AND journal = ? AND seq = ?"
        found = await self._store.read(lambda c: c.execute(sql, (site, journal, seq)).fetchone())
        return None if found is None else Digest(found[0])

    async def ends(self, site: SiteName, journals: Sequence[JournalId]) -> Mapping[JournalId, int]:
        def ask(cursor: Cursor) -> dict[JournalId, int]:
            sql = "SELECT max(seq) FROM lane_entry WHERE node = ? AND journal = ?"
            found = {journal: cursor.execute(sql, (site, journal)).fetchone()[0] for journal in journals}
            return {journal: last for journal, last in found.items() if last is not None}

        return await self._store.read(ask)

    async def save(self, rows: Sequence[SiteRow], entries: Mapping[SiteName, Sequence[NewEntry]], faults: Sequence[ReportIncident]) -> None:
        def write(cursor: Cursor) -> None:
            for row in rows:
                _save(cursor, row)
                cursor.executemany(
                    "INSERT INTO lane_entry (node, journal, seq, digest, raw, received) VALUES (?, ?, ?, ?, ?, ?)",
                    [
                        (row.site, row.journal, new.seq, new.digest, new.raw, row.last_heard.isoformat())
                        for new in entries.get(row.site, ())
                    ],
                )

        await self._store.write(write)
        for fault in faults:
            _told(fault)


def _told(fault: ReportIncident) -> None:
    """A pool has no incident service of its own: its owner reads the log, and the node's line in `intertie node list`."""
    LOG.log(20 if fault.recovered else 40, fault.title, kind=fault.kind, text=fault.text, node=fault.site)


class Tables:
    """`KeeperTables` on the head's store; one lane, so its name is not kept."""

    def __init__(self, store: HeadStore) -> None:
        self._store = store

    @asynccontextmanager
    async def turn(self, lane: Lane, sites: Sequence[SiteName]) -> AsyncIterator[_Turn]:
        async with self._store.turn:

            def load(cursor: Cursor) -> dict[SiteName, SiteRow]:
                return {site: row for site in sites if (row := _load(cursor, site)) is not None}

            yield _Turn(self._store, await self._store.read(load))

    async def beat(self, lane: Lane, rows: Sequence[tuple[SiteRow, SiteRow]]) -> frozenset[SiteName]:
        def write(cursor: Cursor) -> frozenset[SiteName]:
            kept = set[SiteName]()
            for before, after in rows:
                now = _load(cursor, before.site)
                if now is not None and _same(now, before):
                    _save(cursor, after)
                    kept.add(after.site)
            return frozenset(kept)

        async with self._store.turn:
            return await self._store.write(write)

    async def sites_with_open_entries(self, lane: Lane) -> Sequence[SiteName]:
        sql = "SELECT DISTINCT node FROM lane_entry WHERE open = 1 ORDER BY node"
        return [SiteName(row[0]) for row in await self._store.read(lambda c: c.execute(sql).fetchall())]

    async def open_entries(self, lane: Lane, site: SiteName, limit: int) -> Sequence[LaneEntry]:
        def load(cursor: Cursor) -> list[LaneEntry]:
            row = _load(cursor, site)
            current = row.journal if row else ""
            found = cursor.execute(
                "SELECT journal, seq, digest, raw, received FROM lane_entry WHERE node = ? AND open = 1"
                " ORDER BY journal = ?, journal, seq LIMIT ?",
                (site, current, limit),
            ).fetchall()
            return [
                LaneEntry(site, lane, JournalId(journal), seq, Digest(digest), raw, datetime.fromisoformat(received))
                for journal, seq, digest, raw, received in found
            ]

        return await self._store.read(load)

    async def quarantine(self, entry: LaneEntry, error: str, report: ReportIncident) -> None:
        def write(cursor: Cursor) -> None:
            mark_interpreted(cursor, entry)
            cursor.execute(
                "UPDATE lane_entry SET error = ? WHERE node = ? AND journal = ? AND seq = ?", (error, entry.site, entry.journal, entry.seq)
            )

        async with self._store.turn:
            await self._store.write(write)
        _told(report)

    async def report(self, report: ReportIncident) -> None:
        _told(report)


def _same(now: SiteRow, before: SiteRow) -> bool:
    return (now.heard, now.last_nonce, now.session, now.journal, now.state) == (
        before.heard,
        before.last_nonce,
        before.session,
        before.journal,
        before.state,
    )
