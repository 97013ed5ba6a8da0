"""Borders of settlement periods as a site sees them: where a calendar month ends in the settlement time zone, and what was used in each.

A segment belongs to the period that holds its end; one that ends exactly on a border belongs to the period that the border closes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import msgspec

from intertie.contracts.usage import PeriodCount, Segment
from intertie.ids import SiteName

# A wall clock that jumps further than this is wrong (a dead battery, a mistyped year): no period ends by it.
MOST_PERIODS = 36
MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Period:
    """[start, end) in UTC; `name` is `2026-12`."""

    name: str
    start: datetime
    end: datetime


def period_of(moment: datetime, time_zone: str) -> Period:
    """The period that holds this moment. `ZoneInfoNotFoundError` (a KeyError) if this machine does not know the zone."""
    zone = ZoneInfo(time_zone)
    local = moment.astimezone(zone)
    following = (local.year + 1, 1) if local.month == 12 else (local.year, local.month + 1)
    return Period(
        f"{local.year:04d}-{local.month:02d}",
        datetime(local.year, local.month, 1, tzinfo=zone).astimezone(UTC),
        datetime(*following, 1, tzinfo=zone).astimezone(UTC),
    )


def borders(after: datetime, through: datetime, time_zone: str) -> list[datetime]:
    """Ends of periods in (after, through], in order; none if that spans more than `MOST_PERIODS`."""
    found: list[datetime] = []
    at = period_of(after, time_zone).end
    while at <= through:
        found.append(at)
        if len(found) > MOST_PERIODS:
            return []
        at = period_of(at, time_zone).end
    return found


class PeriodBook(msgspec.Struct, frozen=True, kw_only=True):
    """What was journalled of a period, and what was last said of it."""

    attempts: int = 0
    segments: int = 0
    quantity_milli_us: int = 0
    told: tuple[int, int, int] | None = None
    """(attempts, segments, quantity) of the last `PeriodClosed`."""

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.attempts, self.segments, self.quantity_milli_us


def quantity(segment: Segment) -> int:
    """Thousandths of a device × microseconds."""
    return segment.quantity_milli * ((segment.end - segment.start) // MICROSECOND)


def grouped(segments: Iterable[Segment], time_zone: str) -> dict[str, list[Segment]]:
    """Segments by the name of the period that they belong to."""
    found: dict[str, list[Segment]] = {}
    for segment in segments:
        found.setdefault(period_of(segment.end - MICROSECOND, time_zone).name, []).append(segment)
    return found


def added(book: PeriodBook, segments: Sequence[Segment]) -> PeriodBook:
    """The book with these segments of one attempt, which has none in it yet: an attempt's part of a period is journalled at once."""
    return PeriodBook(
        attempts=book.attempts + 1,
        segments=book.segments + len(segments),
        quantity_milli_us=book.quantity_milli_us + sum(quantity(one) for one in segments),
        told=book.told,
    )


def count(site: SiteName, period: Period, book: PeriodBook) -> PeriodCount:
    return PeriodCount(
        site=site,
        period=period.name,
        start=period.start,
        end=period.end,
        attempts=book.attempts,
        segments=book.segments,
        quantity_milli_us=book.quantity_milli_us,
    )
