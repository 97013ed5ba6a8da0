"""Settlement periods: a calendar month in the agreement's time zone, half-open in UTC. Nothing else knows where a month ends."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from intertie.errors import Refused

_PERIOD = re.compile(r"(20\d\d|2100)-(0[1-9]|1[0-2])\Z")


def zone(name: str) -> ZoneInfo:
    """The time zone of that IANA name; `metering.time_zone` if there is none."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as err:
        raise Refused("metering.time_zone", f"{name[:80]!r} is not a time zone", next_step="use a name like Asia/Shanghai") from err


def period_of(moment: datetime, time_zone: str) -> str:
    """The period (`2026-12`) that holds this moment in that time zone."""
    local = moment.astimezone(zone(time_zone))
    return f"{local.year:04d}-{local.month:02d}"


def bounds(period: str, time_zone: str) -> tuple[datetime, datetime]:
    """[start, end) of a period in UTC; `metering.period` if it is not written `YYYY-MM` (2000 to 2100)."""
    match = _PERIOD.match(period)
    if match is None:
        raise Refused("metering.period", f"{period[:40]!r} is not a period", next_step="write it as 2026-12")
    year, month = int(match[1]), int(match[2])
    local = zone(time_zone)
    following = (year + 1, 1) if month == 12 else (year, month + 1)
    return datetime(year, month, 1, tzinfo=local).astimezone(UTC), datetime(*following, 1, tzinfo=local).astimezone(UTC)
