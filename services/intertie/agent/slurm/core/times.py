"""Durations, limits and moments as Slurm writes them (sbatch(1) --time, sacct(1), `SLURM_TIME_FORMAT=%s`)."""

from __future__ import annotations

import re
from datetime import UTC, datetime, tzinfo
from decimal import Decimal
from enum import StrEnum

from intertie.agent.slurm.core.words import Unreadable, is_nothing

_CLOCK = re.compile(r"(?:(?P<days>\d{1,6})-)?(?P<parts>\d{1,9}(?::\d{1,2}){0,2})(?P<part>\.\d{1,9})?\Z", re.ASCII)
_EPOCH = re.compile(r"-?\d{1,12}\Z", re.ASCII)
# Nothing that Slurm dates lies before Slurm or after any of us.
_FIRST, _LAST = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


class Limit(StrEnum):
    """A time limit that is no number."""

    UNLIMITED = "unlimited"
    PARTITION = "partition"
    """As the partition says: to be looked up there."""


def _seconds(text: str, what: str, *, bare_minutes: bool) -> Decimal:
    """`D-H[:M[:S]]`, `H:M:S`, `M:S`, and a bare number, which is minutes in a limit."""
    match = _CLOCK.match(text.strip())
    if match is None:
        raise Unreadable(what, text)
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        total = int(match["days"]) * 86_400 + hours * 3_600 + minutes * 60 + seconds
    elif len(parts) == 3:
        total = parts[0] * 3_600 + parts[1] * 60 + parts[2]
    elif len(parts) == 2:
        total = parts[0] * 60 + parts[1]
    else:
        total = parts[0] * (60 if bare_minutes else 1)
    return Decimal(total) + Decimal(match["part"] or 0)


def parse_limit(text: str) -> int | Limit | None:
    """A time limit in microseconds; None: not said. `Unreadable` is never the same as unlimited (BR-033, BR-034)."""
    word = text.strip().lower()
    if word in ("unlimited", "infinite"):
        return Limit.UNLIMITED
    if word == "partition_limit":
        return Limit.PARTITION
    if is_nothing(word):
        return None
    return int(_seconds(text, "time limit", bare_minutes=True) * 1_000_000)


def parse_elapsed(text: str) -> int | None:
    """An elapsed or suspended time in microseconds, `[D-]HH:MM:SS[.frac]`, `MM:SS`, or bare seconds; None: not known."""
    if is_nothing(text):
        return None
    return int(_seconds(text, "elapsed time", bare_minutes=False) * 1_000_000)


def parse_instant(text: str, zone: tzinfo | None = None) -> datetime | None:
    """A moment: seconds since the epoch, or ISO 8601 (without offset: in `zone`). None where Slurm says that there is none: also 0, -1 and year 1
    (BR-039)."""
    told = text.strip()
    if is_nothing(told):
        return None
    try:
        if _EPOCH.match(told):
            seconds = int(told)
            if seconds <= 0:
                return None
            moment = datetime.fromtimestamp(seconds, UTC)
        else:
            moment = datetime.fromisoformat(told)
            if moment.year == 1:
                return None
            if moment.tzinfo is None:
                if zone is None:
                    raise Unreadable("moment", text, "it names no time zone")
                moment = moment.replace(tzinfo=zone)
            moment = moment.astimezone(UTC)
    except Unreadable:
        raise
    except (ValueError, OverflowError, OSError) as err:
        raise Unreadable("moment", text) from err
    if not _FIRST <= moment <= _LAST:
        raise Unreadable("moment", text, "it lies outside of any cluster's life")
    return moment


def wall_minutes(wall_s: int) -> int:
    """`--time` in whole minutes, rounded up: sbatch knows nothing finer that every version takes."""
    return max(1, -(-wall_s // 60))
