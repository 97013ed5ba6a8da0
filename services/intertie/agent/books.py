"""The agent's own rows in the journal's file: attempts, holders, what was seen of each job, tombstones, settings.

Writers here are `Also`s: they go into the transaction of the entry that tells the same fact.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from intertie.agent.core.devices import Holds
from intertie.agent.core.model import OPEN, Attempt, State
from intertie.agent.core.offers import Books
from intertie.agent.journal import Also, Cursor
from intertie.ids import AttemptId, JobId

# Ended work that stays listed, and whose log can be read. Beyond it the oldest go: the hub is the lasting record, and keeps each log's tail.
KEPT_LOCAL = 500
KEPT_SETTLED = 2_000
# Jobs and attempts whose generation or stop is remembered. The hub stops repeating an offer within its life of minutes; this is months.
KEPT_NAMES = 100_000

_encode = msgspec.json.Encoder(decimal_format="string").encode
_decode = msgspec.json.Decoder(Attempt).decode


def together(*parts: Also) -> Also:
    """Several writers as one."""

    def also(cursor: Cursor) -> None:
        for part in parts:
            part(cursor)

    return also


def save(attempt: Attempt) -> Also:
    """The row, and the devices it holds as long as it is open."""

    def also(cursor: Cursor) -> None:
        cursor.execute(
            "INSERT INTO attempt (id, job, state, local, body) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET state = excluded.state, body = excluded.body",
            (attempt.id, attempt.job, attempt.state.value, attempt.local is not None, _encode(attempt)),
        )
        cursor.execute("DELETE FROM hold WHERE attempt = ?", (attempt.id,))
        if attempt.state in OPEN:
            if not attempt.over:
                _hold(cursor, attempt)
            return
        for heir in _heirs(cursor, attempt.id):
            cursor.execute("DELETE FROM hold WHERE attempt = ?", (heir.id,))
            _hold(cursor, heir)

    return also


def _hold(cursor: Cursor, attempt: Attempt) -> None:
    """All its devices, but for those that one of its predecessors still holds."""
    inherited: set[str] = set()
    for other in attempt.after:
        inherited |= {
            str(row[0]) for row in cursor.execute("SELECT device FROM hold WHERE pool = ? AND attempt = ?", (attempt.pool, other))
        }
    rows = [(attempt.pool, device, attempt.id) for device in attempt.devices if device not in inherited]
    cursor.executemany("INSERT INTO hold VALUES (?, ?, ?)", rows)


def _heirs(cursor: Cursor, gone: AttemptId) -> list[Attempt]:
    """Claims that wait for this one to be gone."""
    query = "SELECT body FROM attempt WHERE state IN (?, ?) AND instr(body, ?) > 0"
    named = cursor.execute(query, (State.CLAIMED.value, State.STAGING.value, f'"{gone}"'.encode())).fetchall()
    return [attempt for (body,) in named if gone in (attempt := _decode(body)).after]


def see(job: JobId, epoch: int, generation: int) -> Also:
    """The highest (epoch, generation) of a job; a start must be above it."""

    def also(cursor: Cursor) -> None:
        cursor.execute(
            "INSERT INTO seen VALUES (?, ?, ?) ON CONFLICT (job) DO UPDATE SET epoch = excluded.epoch, generation = excluded.generation "
            "WHERE (excluded.epoch, excluded.generation) > (seen.epoch, seen.generation)",
            (job, epoch, generation),
        )

    return also


def bury(attempt: AttemptId, at: str) -> Also:
    def also(cursor: Cursor) -> None:
        cursor.execute("INSERT OR IGNORE INTO tombstone VALUES (?, ?)", (attempt, at))

    return also


def settle(attempt: AttemptId) -> Also:
    def also(cursor: Cursor) -> None:
        cursor.execute("UPDATE attempt SET settled = 1 WHERE id = ?", (attempt,))
        cursor.execute("DELETE FROM instruction WHERE attempt = ? AND handled = 1", (attempt,))

    return also


def put_setting(key: str, value: str) -> Also:
    def also(cursor: Cursor) -> None:
        cursor.execute("INSERT OR REPLACE INTO setting VALUES (?, ?)", (key, value))

    return also


def get_setting(cursor: Cursor, key: str) -> str | None:
    row = cursor.execute("SELECT value FROM setting WHERE key = ?", (key,)).fetchone()
    return str(row[0]) if row else None


def load(cursor: Cursor) -> Books:
    """Everything as the last transaction left it. Bounded by `KEPT_*` and by what is open."""
    attempts = {attempt.id: attempt for (body,) in cursor.execute("SELECT body FROM attempt") if (attempt := _decode(body))}
    books = Books(
        attempts=attempts,
        holds=Holds.of(attempts.values()),
        seen={JobId(job): (epoch, generation) for job, epoch, generation in cursor.execute("SELECT job, epoch, generation FROM seen")},
        tombstones={AttemptId(name) for (name,) in cursor.execute("SELECT attempt FROM tombstone")},
    )
    held = {(pool, device): attempt for pool, device, attempt in cursor.execute("SELECT pool, device, attempt FROM hold")}
    if held != dict(books.holds.holder):
        raise AssertionError("the table of holders does not say what the attempts say")
    return books


def prune(cursor: Cursor) -> Sequence[AttemptId]:
    """Forget the oldest ended local jobs and settled attempts beyond what is kept (ids sort by time); who was forgotten."""
    over: list[AttemptId] = []
    for condition, kept in (("local = 1 AND state IN (?, ?)", KEPT_LOCAL), ("settled = 1 AND state IN (?, ?)", KEPT_SETTLED)):
        query = f"SELECT id FROM attempt WHERE {condition} ORDER BY id DESC LIMIT -1 OFFSET ?"  # noqa: S608  # two constants
        over += [AttemptId(row[0]) for row in cursor.execute(query, (State.ENDED.value, State.NOT_STARTED.value, kept))]
    cursor.executemany("DELETE FROM attempt WHERE id = ?", [(name,) for name in over])
    cursor.execute(
        "DELETE FROM tombstone WHERE attempt IN (SELECT attempt FROM tombstone ORDER BY at DESC LIMIT -1 OFFSET ?)", (KEPT_NAMES,)
    )
    cursor.execute("DELETE FROM seen WHERE job IN (SELECT job FROM seen ORDER BY job DESC LIMIT -1 OFFSET ?)", (KEPT_NAMES,))
    return over
