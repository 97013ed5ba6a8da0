"""What an attempt used: one anchor of UTC, whole microseconds of CLOCK_BOOTTIME around it, half-open segments that neither overlap nor gap.

The anchor is the supervisor's record just before exec. Whatever the wall clock does afterwards, the bounds are that record plus boot-time
differences, and their sum is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import msgspec

from intertie.agent.core.model import Attempt, StartedRecord, told_devices
from intertie.contracts.usage import Anchor, Segment, UsagePhase
from intertie.ids import SegmentId, SiteName

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Span:
    """[start, end) in microseconds from the anchor; negative before exec."""

    phase: UsagePhase
    start_us: int
    end_us: int
    cause: str = "ended"


@dataclass(frozen=True, slots=True)
class Counts:
    """What the ending entry carries, so that metering knows when it holds everything."""

    segments: int
    quantity_milli_us: int


def utc_of(ns: int) -> datetime:
    """A wall-clock reading in nanoseconds as a datetime, cut to the microsecond."""
    return EPOCH + timedelta(microseconds=ns // 1000)


def anchor(started: StartedRecord, kernel_boot: str) -> Anchor:
    return Anchor(
        utc=utc_of(started.utc_ns),
        boot_s=started.boot_ns / 1e9,
        kernel_boot=kernel_boot,
        offset_s=started.offset_s,
        error_s=started.error_s,
    )


def spans(
    *,
    staged_us: int,
    ran_us: int,
    packing_us: int,
    borders_us: Sequence[int] = (),
    queued_us: int = 0,
    suspended: Sequence[tuple[int, int]] = (),
) -> list[Span]:
    """The phases of one attempt in order: stage in (from the go), the site's own queue, run with what of it was suspended, stage out (packing what
    returns). Empty phases are left out.

    `borders_us` are period borders, in microseconds from the anchor; a phase is cut at each that lies inside it. `queued_us` is the last part of
    `staged_us`. `suspended` are pieces within the run, in order, that do not overlap.
    """
    queued_us = min(queued_us, staged_us)
    whole = (
        Span(UsagePhase.STAGE_IN, -staged_us, -queued_us),
        Span(UsagePhase.SITE_QUEUE, -queued_us, 0),
        *_run(ran_us, suspended),
        Span(UsagePhase.STAGE_OUT, ran_us, ran_us + packing_us),
    )
    cut: list[Span] = []
    for span in whole:
        start = span.start_us
        for border in sorted(borders_us):
            if start < border < span.end_us:
                cut.append(Span(span.phase, start, border, "period"))
                start = border
        if span.end_us > start:
            cut.append(Span(span.phase, start, span.end_us, span.cause))
    return cut


def _run(ran_us: int, suspended: Sequence[tuple[int, int]]) -> list[Span]:
    """[0, ran_us) without gap or overlap, whatever `suspended` says."""
    parts: list[Span] = []
    at = 0
    for start_us, end_us in suspended:
        start_us, end_us = max(at, start_us), min(end_us, ran_us)
        if end_us > start_us:
            parts += [Span(UsagePhase.RUN, at, start_us, "suspended"), Span(UsagePhase.SUSPENDED, start_us, end_us, "resumed")]
            at = end_us
    if parts and at >= ran_us:
        parts[-1] = replace(parts[-1], cause="ended")
    return [*parts, Span(UsagePhase.RUN, at, ran_us)]


def queued_us(attempt: Attempt, boot: str) -> int:
    """From the site's own queue to the start; 0 if it had none, or if that was in another boot, whose clock is gone."""
    if attempt.queued is None or attempt.started is None or attempt.kernel_boot != boot:
        return 0
    return max(0, attempt.started.boot_ns - attempt.queued.boot_ns) // 1_000


def suspended(attempt: Attempt, through_us: int, accounted_us: int = 0, told_us: int = 0) -> list[tuple[int, int]]:
    """Pieces of [0, through_us) in which it was seen suspended. `accounted_us`: what the scheduler's own books say of all of them together (0: nothing);
    looks see it only so often, so the last pieces that are not told yet (`told_us`) are made longer or shorter until the books are met, or as nearly
    as can be."""
    seen = [(one.start_us, through_us if one.end_us is None else min(one.end_us, through_us)) for one in attempt.suspensions]
    pieces = [(start, end) for start, end in seen if end > start]
    missing = accounted_us - sum(end - start for start, end in pieces) if accounted_us > 0 else 0
    if missing > 0 and (not pieces or pieces[-1][1] <= told_us):
        pieces.append((through_us, through_us))
    for index in range(len(pieces) - 1, -1, -1):
        start, end = pieces[index]
        if missing <= 0 or end <= told_us:
            break
        later = min(missing, through_us - end) if index == len(pieces) - 1 else 0
        earlier = min(missing - later, max(0, start - max(told_us, pieces[index - 1][1] if index else 0)))
        pieces[index] = (start - earlier, end + later)
        missing -= later + earlier
    while missing < 0 and pieces and pieces[-1][1] > told_us:
        start, end = pieces.pop()
        kept = max(start, told_us, end + missing)
        missing += end - kept
        if kept > start:
            pieces.append((start, kept))
            break
    return [(start, end) for start, end in pieces if end > start]


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """How far a running attempt's segments are journalled, through the last border that it passed."""

    told_us: int
    """Microseconds from the anchor."""
    segments: int
    quantity_milli_us: int


# A border is cut this long after it has passed: an attempt that still runs then, surely ran then.
CUT_AFTER_US = 2_000_000


def staged_us(attempt: Attempt, boot: str) -> int:
    """From the go to exec; 0 if the go was in another boot, whose clock is gone."""
    if attempt.started is None or attempt.go_boot_s is None or attempt.kernel_boot != boot:
        return 0
    return max(0, attempt.started.boot_ns // 1000 - int(attempt.go_boot_s * 1e6))


def at_us(attempt: Attempt, moments: Sequence[datetime]) -> list[int]:
    """Moments of UTC as microseconds from the attempt's one anchor. Today's wall clock has no part in it."""
    assert attempt.started is not None
    fixed = utc_of(attempt.started.utc_ns)
    return [(moment - fixed) // timedelta(microseconds=1) for moment in moments]


def spans_through(
    border_us: int,
    *,
    staged_us: int,
    borders_us: Sequence[int],
    cut: Cut | None,
    queued_us: int = 0,
    suspended: Sequence[tuple[int, int]] = (),
) -> list[Span]:
    """What a running attempt's segments are from the last cut through this border."""
    whole = spans(
        staged_us=staged_us,
        ran_us=border_us + 1,
        packing_us=0,
        borders_us=[*borders_us, border_us],
        queued_us=queued_us,
        suspended=suspended,
    )
    return [span for span in remaining(whole, cut) if span.end_us <= border_us]


def spans_to_end(
    *,
    staged_us: int,
    ran_us: int,
    packing_us: int,
    borders_us: Sequence[int],
    cut: Cut | None,
    queued_us: int = 0,
    suspended: Sequence[tuple[int, int]] = (),
) -> list[Span]:
    """What is left to journal when it has ended. What was said stays said: a run that was cut at a border lasted through it."""
    through = [*borders_us, cut.told_us] if cut is not None else borders_us
    parts = spans(staged_us=staged_us, ran_us=ran_us, packing_us=packing_us, borders_us=through, queued_us=queued_us, suspended=suspended)
    return remaining(parts, cut)


def remaining(spans: Sequence[Span], cut: Cut | None) -> list[Span]:
    return [span for span in spans if cut is None or span.start_us >= cut.told_us]


def extended(cut: Cut | None, through_us: int, told: Counts) -> Cut:
    """The cut after these spans were journalled, too."""
    before = cut or Cut(told_us=0, segments=0, quantity_milli_us=0)
    return Cut(
        told_us=through_us,
        segments=before.segments + told.segments,
        quantity_milli_us=before.quantity_milli_us + told.quantity_milli_us,
    )


def segments(attempt: Attempt, site: SiteName, spans: Sequence[Span], *, after: int, islanded: bool, final: bool = True) -> list[Segment]:
    """One `Segment` per span, the last one marked so if these are the `final` ones. The attempt must have started.

    `after`: how many were told before. A segment's id follows from its attempt and place, so that a site that lost its journal and measures
    an end again says the same segment and not a second one.
    """
    assert attempt.started is not None
    fixed = anchor(attempt.started, attempt.kernel_boot)
    return [
        Segment(
            id=SegmentId(f"seg-{attempt.id.removeprefix('att-')}-{after + index}"),
            site=site,
            pool=attempt.pool,
            attempt=attempt.id,
            phase=span.phase,
            kind=attempt.kind,
            model=attempt.model,
            devices=told_devices(attempt),
            quantity_milli=attempt.share_milli * len(attempt.devices),
            start=fixed.utc + timedelta(microseconds=span.start_us),
            end=fixed.utc + timedelta(microseconds=span.end_us),
            last=final and index == len(spans) - 1,
            cause=span.cause,
            islanded=islanded,
            anchor=fixed,
            attribution=attempt.attribution,
        )
        for index, span in enumerate(spans)
    ]


def counts(attempt: Attempt, spans: Sequence[Span], cut: Cut | None = None) -> Counts:
    """Of these spans and of what was journalled before them."""
    quantity = attempt.share_milli * len(attempt.devices)
    earlier = (cut.segments, cut.quantity_milli_us) if cut is not None else (0, 0)
    return Counts(earlier[0] + len(spans), earlier[1] + sum(quantity * (span.end_us - span.start_us) for span in spans))
