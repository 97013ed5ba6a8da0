"""From segments to pieces of use: the union of intervals per phase and device of one attempt.

A site may say a thing twice, in other cuts, in any order, after a crash or a restore: the union does not care. Where two segments claim one
device at one instant with different quantities, that is a difference to be looked at, never a sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import Segment, UsagePhase
from intertie.ids import SegmentId

Class = tuple[DeviceKind, str]
"""What a price hangs on: kind and model."""

MICROSECOND = timedelta(microseconds=1)

# The longest wall limit is 365 days; a segment longer than that and a day of staging is a broken clock, not work.
LONGEST = timedelta(days=366)

# No site measured anything for us before this; an earlier start is a clock that was never set (BR-080: "-1" is 1969).
EARLIEST = datetime(2020, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Difference:
    """Something in the evidence that does not fit. `kind` is `doubled` or `clock_anomaly`; nothing is charged for the part in doubt."""

    kind: str
    segments: tuple[SegmentId, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Piece:
    """One stretch [start, end) of one phase with one composition: thousandths held of each class."""

    phase: UsagePhase
    start: datetime
    end: datetime
    parts: tuple[tuple[Class, int], ...]
    islanded: bool

    @property
    def us(self) -> int:
        return (self.end - self.start) // MICROSECOND

    @property
    def quantity_milli(self) -> int:
        return sum(quantity for _, quantity in self.parts)


@dataclass(frozen=True, slots=True)
class Used:
    """What an attempt used: pieces disjoint within each phase, in time's order, and what did not fit."""

    pieces: tuple[Piece, ...]
    differences: tuple[Difference, ...]

    def us(self, phases: Iterable[UsagePhase] = (UsagePhase.RUN,)) -> int:
        """Microseconds during which the phases' clocks ran."""
        chosen = frozenset(phases)
        return sum(piece.us for piece in self.pieces if piece.phase in chosen)

    def milli_us(self, phases: Iterable[UsagePhase] = (UsagePhase.RUN,)) -> int:
        """Thousandths of a device × microseconds in the phases."""
        chosen = frozenset(phases)
        return sum(piece.us * piece.quantity_milli for piece in self.pieces if piece.phase in chosen)

    def clip(self, start: datetime | None, end: datetime | None) -> Used:
        """The part inside [start, end); None leaves that side open."""
        kept: list[Piece] = []
        for piece in self.pieces:
            first = piece.start if start is None else max(piece.start, start)
            last = piece.end if end is None else min(piece.end, end)
            if first < last:
                kept.append(Piece(phase=piece.phase, start=first, end=last, parts=piece.parts, islanded=piece.islanded))
        return Used(pieces=tuple(kept), differences=self.differences)


def duration_us(segment: Segment) -> int:
    """Microseconds between a segment's bounds; 0 where the end lies before the start."""
    return max(0, (segment.end - segment.start) // MICROSECOND)


def measured(segments: Iterable[Segment]) -> int:
    """The site's own sum, thousandths × microseconds over all segments: what an ending entry's `quantity_milli_us` must equal."""
    return sum(segment.quantity_milli * duration_us(segment) for segment in segments)


def union(segments: Sequence[Segment]) -> Used:
    """The union of all segments of one attempt. Order, repeats and other cuts of the same facts give the same result."""
    differences: list[Difference] = []
    sound: list[Segment] = []
    for segment in sorted({_facts(segment): segment for segment in segments}.values(), key=_facts):
        if anomaly := _anomaly(segment):
            differences.append(anomaly)
        elif segment.start < segment.end:
            sound.append(segment)
    pieces: list[Piece] = []
    for phase in UsagePhase:
        found, doubled = _sweep(phase, [s for s in sound if s.phase is phase])
        pieces.extend(found)
        differences.extend(doubled)
    pieces.sort(key=lambda piece: (piece.start, list(UsagePhase).index(piece.phase)))
    return Used(pieces=tuple(pieces), differences=tuple(differences))


def _facts(segment: Segment) -> tuple[SegmentId, datetime, datetime, int, str, str, str, tuple[str, ...], bool]:
    """All of a segment that a sum may hang on; the order in which differences are told."""
    devices = tuple(sorted(segment.devices))
    measured_as = (segment.quantity_milli, str(segment.phase), str(segment.kind), segment.model, devices, segment.islanded)
    return (segment.id, segment.start, segment.end, *measured_as)


def _anomaly(segment: Segment) -> Difference | None:
    if segment.end < segment.start:
        why = "ends before it starts"
    elif segment.start < EARLIEST:
        why = "starts before any site was joined"
    elif segment.end - segment.start > LONGEST:
        why = "is longer than any job may be"
    else:
        return None
    text = f"segment {segment.id} {why} ({segment.start.isoformat()} to {segment.end.isoformat()}): quantity 0"
    return Difference("clock_anomaly", (segment.id,), text)


def _sweep(phase: UsagePhase, segments: Sequence[Segment]) -> tuple[list[Piece], list[Difference]]:
    """Walk the bounds in order with the set of segments that cover each stretch between two bounds."""
    opens: dict[datetime, list[Segment]] = {}
    closes: dict[datetime, list[Segment]] = {}
    for segment in segments:
        opens.setdefault(segment.start, []).append(segment)
        closes.setdefault(segment.end, []).append(segment)
    bounds = sorted(opens.keys() | closes.keys())
    active: list[Segment] = []
    pieces: list[Piece] = []
    doubled: dict[tuple[SegmentId, ...], Difference] = {}
    for index, bound in enumerate(bounds):
        ending = closes.get(bound, [])
        active = [segment for segment in active if segment not in ending] + opens.get(bound, [])
        if not active:
            continue
        parts, conflict = _compose(active)
        if conflict:
            text = f"segments {', '.join(conflict)} claim a device at once with different quantities in {phase}: the smaller counts"
            doubled.setdefault(conflict, Difference("doubled", conflict, text))
        islanded = any(segment.islanded for segment in active)
        _append(pieces, Piece(phase=phase, start=bound, end=bounds[index + 1], parts=parts, islanded=islanded))
    return pieces, list(doubled.values())


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Add a piece, joined to the last one where only a cut lies between them."""
    last = pieces[-1] if pieces else None
    if last and last.end == piece.start and last.parts == piece.parts and last.islanded == piece.islanded:
        pieces[-1] = Piece(phase=last.phase, start=last.start, end=piece.end, parts=last.parts, islanded=last.islanded)
    else:
        pieces.append(piece)


def _compose(active: Sequence[Segment]) -> tuple[tuple[tuple[Class, int], ...], tuple[SegmentId, ...]]:
    """Thousandths of each class held at one instant, and the segments that disagree about a device."""
    if len(active) == 1:
        only = active[0]
        return (((only.kind, only.model), only.quantity_milli),), ()
    claims: dict[str, dict[tuple[int, DeviceKind, str], list[SegmentId]]] = {}
    for segment in active:
        for device, quantity in _shares(segment).items():
            claims.setdefault(device, {}).setdefault((quantity, segment.kind, segment.model), []).append(segment.id)
    totals: dict[Class, int] = {}
    conflict: set[SegmentId] = set()
    for told in claims.values():
        quantity, kind, model = min(told)
        totals[(kind, model)] = totals.get((kind, model), 0) + quantity
        if len(told) > 1:
            conflict.update(segment for segments in told.values() for segment in segments)
    return tuple(sorted(totals.items())), tuple(sorted(conflict))


def _shares(segment: Segment) -> Mapping[str, int]:
    """A segment's thousandths over its devices: whole numbers that add up, the first in name order one more where it does not divide."""
    devices: list[str] = sorted({str(device) for device in segment.devices}) or [""]
    each, more = divmod(segment.quantity_milli, len(devices))
    return {device: each + (1 if index < more else 0) for index, device in enumerate(devices)}
