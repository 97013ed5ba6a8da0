"""What leaves a site of its own accounting: our runs one by one, mapped accounts' other work as numbers, and nothing of anybody else. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, date, datetime, timedelta

from intertie.agent.adapters.port import Accounted
from intertie.contracts.accounting import MOST_US, RECORDS_PER_PART, BypassUse, NativeDay, NativeRecord
from intertie.ids import SiteName

SHORT = 256
MOST_DEVICES = 1_000_000
LAG = timedelta(minutes=10)
"""A day is read this long after its end: native accounting is written late."""
MOST_DAYS = 35
"""After a long time off: a month and the days around it, no further back."""


def day_of(moment: datetime) -> date:
    """UTC, by the site's clock."""
    return moment.astimezone(UTC).date()


def bounds(day: date) -> tuple[datetime, datetime]:
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    return start, start + timedelta(days=1)


def due(last_whole: date | None, last_read: datetime | None, now: datetime, every: timedelta) -> list[date]:
    """Days to read now, oldest first: those that are over and were not read since, and the running one each `every`."""
    today = day_of(now)
    whole = day_of(now - LAG) - timedelta(days=1)
    first = today if last_whole is None else last_whole + timedelta(days=1)
    first = max(first, today - timedelta(days=MOST_DAYS))
    days = [first + timedelta(days=n) for n in range((whole - first).days + 1)]
    if last_read is None or now - last_read >= every:
        days.append(today)
    return days


def parts(
    site: SiteName, cluster: str, day: date, records: Iterable[Accounted], mapped: Collection[str], *, read_at: datetime
) -> list[NativeDay]:
    """The day as it is told. A run under our tag travels whole; an untagged run of a mapped account is counted; the rest is not looked at."""
    ours: list[NativeRecord] = []
    others: dict[str, tuple[int, int, int]] = {}
    for one in records:
        if one.tag is not None:
            ours.append(_record(one, mapped))
        elif one.user and one.user in mapped and one.started is not None:
            runs, device_us, unknown = others.get(one.user, (0, 0, 0))
            used = _device_us(one)
            others[one.user] = (runs + 1, device_us + (used or 0), unknown + (used is None))
    bypass = [BypassUse(account=name[:SHORT], runs=r, device_us=d, unknown=u) for name, (r, d, u) in sorted(others.items())]
    pages: Sequence[Sequence[NativeRecord]] = [ours[n : n + RECORDS_PER_PART] for n in range(0, len(ours), RECORDS_PER_PART)] or [[]]
    return [
        NativeDay(
            site=site,
            cluster=cluster[:SHORT],
            day=day.isoformat(),
            read_at=read_at,
            part=number,
            parts=len(pages),
            records=list(page),
            bypass=bypass[:RECORDS_PER_PART] if number == 1 else [],
        )
        for number, page in enumerate(pages, 1)
    ]


def _record(one: Accounted, mapped: Collection[str]) -> NativeRecord:
    """Times without an offset would be nobody's; a negative figure is none. Under another account than a mapped one only that much is said."""
    assert one.tag is not None
    return NativeRecord(
        cluster=one.cluster[:SHORT],
        native_id=one.native_id[:SHORT],
        submitted=_aware(one.submitted),
        tag=one.tag,
        state=one.state[:SHORT],
        started=_aware(one.started),
        ended=_aware(one.ended),
        elapsed_us=one.elapsed_us if one.elapsed_us is not None and 0 <= one.elapsed_us <= MOST_US else None,
        suspended_us=min(max(0, one.suspended_us), MOST_US),
        resolution_us=min(max(0, one.resolution_us), MOST_US),
        devices=one.devices if one.devices is not None and 0 <= one.devices <= MOST_DEVICES else None,
        account=one.user[:SHORT] if one.user in mapped or not one.user else "(not a mapped account)",
        restarts=max(0, one.restarts),
    )


def _aware(moment: datetime | None) -> datetime | None:
    return moment if moment is None or moment.tzinfo is not None else None


def _device_us(one: Accounted) -> int | None:
    if one.devices is None or one.elapsed_us is None:
        return None
    if not 0 <= one.devices <= MOST_DEVICES or not 0 <= one.elapsed_us <= MOST_US:
        return None
    return one.devices * one.elapsed_us
