"""What is whole in a damaged journal. The damaged file is set aside as it is, for people; what can be read and proven goes into a new one.

Loss of power tears what was written last: a page, the end of the file, a bit in the newest entries. What the hub acknowledged is at the hub, so
an entry that cannot be proven any more costs something only if nobody had it yet; those are counted and told.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intertie.contracts.link import Lane
from intertie.errors import Refused
from intertie.ids import Digest
from intertie.link.journal import first_digest, next_digest

# Numbers tried one by one behind a page that cannot be read.
TRIED = 200_000
HOLDING = ("claimed", "staging", "running")
"""States whose devices are held (`intertie.agent.core.model.OPEN`)."""


class Damaged(Refused):
    """A journal whose pages or chain are broken."""


@dataclass(slots=True)
class Saved:
    """What came over, and what did not."""

    entries: int = 0
    lost: int = 0
    """Entries that the hub had not acknowledged and that are not whole."""
    attempts: int = 0


def set_aside(path: Path) -> Path:
    """Rename the journal and its WAL to the first free `<name>.damaged-<n>`."""
    n = 1
    while (aside := path.with_name(f"{path.name}.damaged-{n}")).exists():
        n += 1
    for suffix in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    return aside


def salvage(damaged: Path, into: sqlite3.Connection) -> Saved:
    """Copy what is whole into `into`, a new journal that says of itself that it was opened because of damage. One transaction."""
    saved = Saved()
    try:
        source = sqlite3.connect(f"file:{damaged}?mode=ro", uri=True, isolation_level=None)
    except sqlite3.Error:
        return saved
    try:
        into.execute("BEGIN IMMEDIATE")
        _names(source, into)
        for lane in Lane:
            _lane(source, into, lane, saved)
        saved.attempts = _attempts(source, into)
        for table in ("instruction", "seen", "tombstone", "setting"):
            for row in _rows(source, f"SELECT * FROM {table}"):  # noqa: S608  # constants
                into.execute(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(row))})", row)  # noqa: S608  # constants
        into.execute("COMMIT")
    except BaseException:
        into.execute("ROLLBACK")
        raise
    finally:
        source.close()
    return saved


def _rows(source: sqlite3.Connection, query: str, values: tuple[object, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Rows until the first that cannot be read."""
    with suppress(sqlite3.Error):
        yield from source.execute(query, values)


def _names(source: sqlite3.Connection, into: sqlite3.Connection) -> None:
    kept = {key: value for key, value in _rows(source, "SELECT key, value FROM meta WHERE key IN ('journal', 'instruction_mark')")}
    if isinstance(kept.get("journal"), str) and kept["journal"].startswith("jnl-"):
        into.execute("UPDATE meta SET value = ? WHERE key IN ('journal', 'previous')", (kept["journal"],))
    if "instruction_mark" in kept:
        into.execute("INSERT OR REPLACE INTO meta VALUES ('instruction_mark', ?)", (kept["instruction_mark"],))
    for row in _rows(source, "SELECT lane, number, journal, forgotten, digest, lost_from FROM past"):
        into.execute("INSERT INTO past VALUES (?, ?, ?, ?, ?, ?)", row)


def _lane(source: sqlite3.Connection, into: sqlite3.Connection, lane: Lane, saved: Saved) -> None:
    """Entries behind each other, under numbers of their own: the journal is numbered anew before anybody reads it."""
    query = "SELECT next_seq, base_seq, base_digest, ack_through, epoch, ready_epoch FROM lane WHERE name = ?"
    name = into.execute("SELECT value FROM meta WHERE key = 'journal'").fetchone()[0]
    row = next(_rows(source, query, (lane.value,)), (0, 0, first_digest(name), 0, 0, 0))
    next_seq, base, before, ack, epoch, ready = row
    seq, head, size, there = base, Digest(before), 0, set[int]()
    for number, body in _whole(source, lane, base, before, next_seq):
        seq, head, size = seq + 1, next_digest(head, body), size + len(body)
        into.execute("INSERT INTO entry VALUES (?, ?, ?, ?)", (lane.value, seq, body, head))
        there.add(number)
    saved.entries += len(there)
    saved.lost += len(set(range(max(ack, base) + 1, next_seq)) - there)
    into.execute(
        "UPDATE lane SET next_seq = ?, head_digest = ?, base_seq = ?, base_digest = ?, ack_through = ?, safe_through = ?, epoch = ?, "
        "ready_epoch = ?, kept_bytes = ? WHERE name = ?",
        (seq + 1, head, base, before, base, base, epoch, ready, size, lane.value),
    )


def _whole(source: sqlite3.Connection, lane: Lane, base: int, base_digest: str, next_seq: int) -> Iterator[tuple[int, bytes]]:
    """Entries whose bytes are what was chained; where the one before cannot be read, those that at least say their own number."""
    last, last_digest = base, base_digest
    for seq, body, digest in _read(source, lane, base, next_seq):
        before = last_digest if last == seq - 1 else None
        last, last_digest = seq, digest
        if not isinstance(body, bytes):
            continue
        proven = isinstance(before, str) and next_digest(Digest(before), body) == digest
        if proven or (before is None and _says(body) == seq):
            yield seq, body


def _read(source: sqlite3.Connection, lane: Lane, base: int, next_seq: int) -> Iterator[tuple[int, Any, Any]]:
    """All in order; behind a page that cannot be read, number by number."""
    last = base
    for seq, body, digest in _rows(
        source, "SELECT seq, body, digest FROM entry WHERE lane = ? AND seq > ? ORDER BY seq", (lane.value, base)
    ):
        last = seq
        yield seq, body, digest
    for number in range(last + 1, min(next_seq, last + 1 + TRIED)):
        for seq, body, digest in _rows(source, "SELECT seq, body, digest FROM entry WHERE lane = ? AND seq = ?", (lane.value, number)):
            yield seq, body, digest


def _says(body: bytes) -> int:
    try:
        return int(json.loads(body)["seq"])
    except (ValueError, KeyError, TypeError):
        return 0


def _attempts(source: sqlite3.Connection, into: sqlite3.Connection) -> int:
    """Each whose body can be read, and the devices it holds."""
    count = 0
    for name, job, state, local, settled, body in _rows(source, "SELECT id, job, state, local, settled, body FROM attempt"):
        try:
            said = json.loads(body)
            held = [(said["pool"], device, name) for device in said["devices"]] if said["state"] in HOLDING else []
        except (ValueError, KeyError, TypeError):
            continue
        into.execute("INSERT INTO attempt VALUES (?, ?, ?, ?, ?, ?)", (name, job, state, local, settled, body))
        into.executemany("INSERT OR IGNORE INTO hold VALUES (?, ?, ?)", held)
        count += 1
    return count
