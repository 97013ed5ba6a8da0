"""The journal's file: its format, where it lies, how it is opened, checked and made again, and what its disk refuses.

What is in it is `intertie.agent.journal`'s (who asks and who waits) and `intertie.agent.journal_rows`' (a lane's entries).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Cursor

from intertie.agent.salvage import Damaged, salvage, set_aside
from intertie.contracts.link import Lane
from intertie.errors import Refused, Unavailable
from intertie.ids import Digest, JournalId, mint
from intertie.link.journal import first_digest, next_digest
from intertie.observe import log

LOG = log.get("agent.journal")

SCHEMA_VERSION = 2
"""1: the spine. 2: epochs, places, journals before this one, and entries that are kept for a while after they are safe."""
READABLE = (1, SCHEMA_VERSION)
"""Formats that `prepare` makes the newest of, in place."""
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
class Pending:
    """This journal must be opened anew before it is spoken of: `why` as in `JournalOpened`."""

    why: str
    previous: JournalId | None
    same_place: bool = False
    """The one before lay in this folder, on this host: whatever it had started and is not found here, is surely gone."""


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


def refuse_network(path: Path) -> None:
    """`Refused('agent.journal_filesystem')` where commits mean nothing."""
    kind = filesystem_of(path.parent)
    if kind in NETWORK_FILESYSTEMS:
        raise Refused(
            "agent.journal_filesystem",
            f"{path} lies on {kind}, a network file system, where fsync and locks cannot be relied on",
            next_step="choose a --data folder on a local disk",
        )


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


def write_name(path: Path, journal: JournalId) -> None:
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


def open_file(path: Path) -> tuple[sqlite3.Connection, JournalId, str, Pending | None]:
    """The connection, whose journal it is, where it lies, and why it must be opened anew, if so."""
    (before, here), jobs = _last_name(path), path.parent / "jobs"
    fresh = not path.exists() or path.stat().st_size == 0
    opening = "gone" if before is not None or (jobs.is_dir() and any(jobs.iterdir())) else "first"
    try:
        try:
            connection, journal = _made_or_opened(path, fresh, opening, before)
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
        raise refusal(err) or damaged(path, str(err)) from err
    except OSError as err:
        raise Unavailable("agent.disk_error", f"{path} cannot be opened: {err.strerror}", retry_after_s=10) from err
    if before != journal:
        write_name(path, journal)
    return connection, journal, place, pending


def _saved_from(aside: Path, path: Path, before: JournalId | None) -> tuple[sqlite3.Connection, JournalId]:
    """A new file with what is whole in the damaged one."""
    connection = connect(path)
    try:
        os.chmod(path, 0o600)
        prepare(connection, path, before or JournalId(f"jnl-{secrets.token_hex(16)}"), "damaged", before)
        saved = salvage(aside, connection)
        LOG.error("saved from the damaged journal", entries=saved.entries, lost=saved.lost, attempts=saved.attempts)
        return connection, name_of(connection.cursor())
    except BaseException:
        connection.close()
        raise


def connect(path: Path) -> sqlite3.Connection:
    """With what a commit must mean here."""
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


def _made_or_opened(path: Path, fresh: bool, opening: str, previous: JournalId | None) -> tuple[sqlite3.Connection, JournalId]:
    try:
        connection = connect(path)
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
        raise refusal(err) or damaged(path, str(err)) from err


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
    return name_of(connection.cursor())


def _run(connection: sqlite3.Connection, script: str) -> None:
    for statement in script.split(";\n"):
        if statement.strip():
            connection.execute(statement)


def _upgrade(connection: sqlite3.Connection) -> None:
    """In place and as one transaction: an upgrade of the agent keeps its journal."""
    connection.execute("BEGIN IMMEDIATE")
    _run(connection, _KEPT)
    epoch = last_instruction(connection.cursor())[0]
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
            raise damaged(path, said)
        _check_chain(connection, path)
    except sqlite3.OperationalError as err:
        raise refusal(err) or damaged(path, str(err)) from err


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
                raise damaged(path, f"lane {lane} breaks at entry {expected}: its digest does not continue the chain")
            expected += 1
        if expected != next_seq or digest != head:
            raise damaged(path, f"lane {lane} ends at entry {expected - 1}, its counter says {next_seq - 1}")


def damaged(where: object, what: str) -> Damaged:
    """The error, with what a person does next."""
    return Damaged(
        "agent.journal_damaged",
        f"{where}: {what}",
        next_step="restart the agent: it sets the file aside, saves what is whole, and opens a new journal; running jobs go on meanwhile",
    )


def last_instruction(cursor: Cursor) -> tuple[int, int]:
    """(epoch, number) of the last instruction that was taken."""
    row = cursor.execute("SELECT value FROM meta WHERE key = 'instruction_mark'").fetchone()
    if row is None:
        return 0, 0
    epoch, number = row[0].split()
    return int(epoch), int(number)


def name_of(cursor: Cursor) -> JournalId:
    """Whose journal this file is."""
    return JournalId(cursor.execute("SELECT value FROM meta WHERE key = 'journal'").fetchone()[0])


DISK = ("agent.disk_full", "agent.disk_error")


def refusal(err: Exception) -> Unavailable | None:
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


def as_told(err: Exception) -> Exception:
    """The fault of the disk that `err` is, or `err` itself."""
    return refusal(err) or err
