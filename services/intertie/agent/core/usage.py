"""What an attempt used: one anchor of UTC, whole microseconds of CLOCK_BOOTTIME around it, half-open segments that neither overlap nor gap.

The anchor is the supervisor's record just before exec. Whatever the wall clock does afterwards, the bounds are that record plus boot-time
differences, and their sum is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from intertie.agent.core.model import Attempt, StartedRecord
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


def spans(*, staged_us: int, ran_us: int, packing_us: int, borders_us: Sequence[int] = ()) -> list[Span]:
    """The phases of one attempt in order: stage in (from the go), run, stage out (packing what returns). Empty phases are left out.

    `borders_us` are period borders, in microseconds from the anchor; a phase is cut at each that lies inside it.
    """
    whole = (
        Span(UsagePhase.STAGE_IN, -staged_us, 0),
        Span(UsagePhase.RUN, 0, ran_us),
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
            cut.append(Span(span.phase, start, span.end_us))
    return cut


def segments(attempt: Attempt, site: SiteName, spans: Sequence[Span], ids: Sequence[SegmentId], *, islanded: bool) -> list[Segment]:
    """One `Segment` per span, the last one marked so. The attempt must have started."""
    assert attempt.started is not None
    fixed = anchor(attempt.started, attempt.kernel_boot)
    return [
        Segment(
            id=name,
            site=site,
            pool=attempt.pool,
            attempt=attempt.id,
            phase=span.phase,
            kind=attempt.kind,
            model=attempt.model,
            devices=list(attempt.devices),
            quantity_milli=1000 * len(attempt.devices),
            start=fixed.utc + timedelta(microseconds=span.start_us),
            end=fixed.utc + timedelta(microseconds=span.end_us),
            last=index == len(spans) - 1,
            cause=span.cause,
            islanded=islanded,
            anchor=fixed,
            attribution=attempt.attribution,
        )
        for index, (span, name) in enumerate(zip(spans, ids, strict=True))
    ]


def counts(attempt: Attempt, spans: Sequence[Span]) -> Counts:
    quantity = 1000 * len(attempt.devices)
    return Counts(len(spans), sum(quantity * (span.end_us - span.start_us) for span in spans))
