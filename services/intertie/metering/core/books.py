"""When an attempt is complete: only when metering holds exactly the counts that its ending entry says, and otherwise what is missing, from whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from intertie.contracts.job import AttemptRecord
from intertie.metering.core.attribution import COUNTED, NEVER_RAN, TEXTS, Reason
from intertie.metering.core.evidence import Evidence, Received
from intertie.rating import measured


@dataclass(frozen=True, slots=True)
class Completeness:
    """`missing` says what and from whom; empty exactly when complete."""

    complete: bool
    missing: str = ""


def ended(record: AttemptRecord | None) -> bool:
    return record is not None and record.state == "ended"


def lost(record: AttemptRecord | None) -> bool:
    """Closed at the promised date, or by a named person: nobody knows how it ended."""
    return record is not None and record.state == "lost"


def never_ran(record: AttemptRecord | None) -> bool:
    return record is not None and record.state in NEVER_RAN


def completeness(evidence: Evidence, items: Sequence[Received]) -> Completeness:
    """Compare what is held with the ending entry's counts: segments, quantity sum, last metering number.

    The quantity is the plain sum over segments, as the site sums it; the union is rating's business.
    """
    record = evidence.record
    if record is None:
        return Completeness(False, "the scheduler's record of this attempt")
    if never_ran(record):
        return Completeness(True)
    if lost(record):
        since = f" on {record.ended_at.isoformat()}" if record.ended_at else ""
        return Completeness(False, f"closed as lost{since}: charged to nobody, until {record.site} says how it ended")
    if not ended(record):
        return Completeness(
            False, f"still {record.state} by the scheduler's record: its last segment comes with its end, from {record.site}"
        )
    held = [item for item in items if item.suspense in COUNTED]
    problem = _counts(record, held, evidence) or _prices(held)
    return Completeness(not problem, problem)


def _counts(record: AttemptRecord, held: Sequence[Received], evidence: Evidence) -> str:
    lane_through = evidence.lane_through
    count, quantity = len({item.segment.id for item in held}), measured(item.segment for item in held)
    if count < record.segments:
        lane = f"its metering lane is here through {lane_through}, the ending says {record.last_metering_seq}"
        late = "late" if lane_through < record.last_metering_seq else "not among what came, or in suspense or quarantine"
        return f"{record.segments - count} of {record.segments} segments from {record.site}: {late} ({lane})"
    if count > record.segments:
        return f"{count} segments where {record.site}'s ending says {record.segments}: one of both is wrong at {record.site}"
    if quantity != record.quantity_milli_us:
        return f"the segments sum to {quantity} milli-µs where {record.site}'s ending says {record.quantity_milli_us}"
    # Numbers of one journal only: a journal that was made anew starts at 1 again, and says what its predecessor held under other numbers. An
    # ending names no journal, so where one was made anew it may count by another than the segments that are held.
    journals = {item.journal for item in held}
    same = len(journals) == 1 and not evidence.renumbered
    if same and max(item.seq for item in held) > record.last_metering_seq:
        return f"a segment of {record.site} came after the last that its ending names ({record.last_metering_seq})"
    return ""


def _prices(held: Sequence[Received]) -> str:
    waiting = next((item.suspense for item in held if item.suspense), "")
    return f"a price: {TEXTS[Reason(waiting)]} (from the hub's operator)" if waiting else ""
