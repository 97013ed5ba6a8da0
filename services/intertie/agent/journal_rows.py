"""A lane's entries as rows of the journal's file: in a chain, kept for a while after they are safe, said again by a new journal.

Each function runs inside a transaction of `intertie.agent.journal`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from sqlite3 import Cursor

from intertie.agent.journal_file import Pending, damaged, name_of
from intertie.contracts.base import encode
from intertie.contracts.link import EntryBase, HeldAttempt, JournalOpened, Lane, LostRange, PastJournal, Sealed
from intertie.ids import Digest, JournalId
from intertie.link.journal import Build, first_digest, next_digest
from intertie.link.site import Lost

# Journals before this one that are named to keepers, of those that were told to forget something.
KEPT_PAST = 32
# Safe entries forgotten in one transaction to get below the bound of bytes: more would hold back those who wait.
FORGOTTEN_AT_ONCE = 2_000
# How often the time since an entry became safe is noted.
NOTED_S = 3_600.0


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


def lane_heads(cursor: Cursor) -> dict[str, tuple[int, int]]:
    """By lane: (last entry, acknowledged through)."""
    return {
        str(name): (int(n) - 1, int(ack)) for name, n, ack in cursor.execute("SELECT name, next_seq, ack_through FROM lane ORDER BY name")
    }


def digest_at(cursor: Cursor, lane: Lane, seq: int, next_seq: int, head: str) -> str:
    """Of entry `seq`; `head` is that of the last one, `next_seq - 1`."""
    if seq == next_seq - 1:
        return head
    row = cursor.execute("SELECT digest FROM entry WHERE lane = ? AND seq = ?", (lane.value, seq)).fetchone()
    if row is None:
        raise damaged("the journal", f"entry {seq} of lane {lane} is missing")
    return str(row[0])


def append_entries(cursor: Cursor, lane: Lane, seq: int, digest: Digest, entries: Sequence[EntryBase]) -> None:
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


def note_safe(cursor: Cursor, lane: Lane, through: int, now_s: float) -> None:
    """Once an hour, so that the table stays small: everything since the last mark counts from the moment of that mark's last entry at latest."""
    row = cursor.execute("SELECT through, at_s FROM safe_mark WHERE lane = ? ORDER BY through DESC LIMIT 1", (lane.value,)).fetchone()
    if row is not None and 0 <= now_s - row[1] < NOTED_S:
        cursor.execute("UPDATE safe_mark SET through = ? WHERE lane = ? AND through = ?", (through, lane.value, row[0]))
    else:
        # The mark's time is the end of its hour: kept a little longer, never shorter.
        cursor.execute("INSERT OR REPLACE INTO safe_mark VALUES (?, ?, ?)", (lane.value, through, now_s))


def forget(cursor: Cursor, lane: Lane, bounds: Bounds, now_s: float) -> None:
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


def open_anew(cursor: Cursor, fresh: JournalId, renewal: Renewal, pending: Pending | None, place: str) -> None:
    """Everything that is kept, said again by the journal `fresh`; `pending`: why this file has to, if it does."""
    old = name_of(cursor)
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
        append_entries(cursor, lane, *heads[lane], entries)
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
    append_entries(cursor, lane, 1, zero, first)
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
