"""What a site says of a period that is over, against what is here; and what a site says that nobody has any more.

A site counts what it has journalled, so a difference is a segment that has not come, and not an opinion. A site that has not said that its period
is over is named: its silence is not completeness.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import msgspec

from intertie.contracts.base import decode
from intertie.contracts.link import Lane, LostRange, Sealed
from intertie.contracts.usage import LostEntries, PeriodCount, SitePeriod
from intertie.errors import Refused
from intertie.ids import Digest, SiteName, digest
from intertie.metering.core.attribution import CLOCK_TOLERANCE, Verify
from intertie.metering.core.evidence import SiteKeys

# A million sites' segments of a month; all devices of the world for a year; a journal that says a million things a second for thirty years.
# Beyond them nothing was counted, and no table holds it.
MOST_COUNTED = 10**12
MOST_QUANTITY = 10**27
MOST_NUMBERED = 10**15

_PERIOD = re.compile(r"(20\d\d)-(0[1-9]|1[0-2])\Z")

# A month begins somewhere on earth at most this far from UTC, on a quarter of an hour.
FARTHEST_ZONE, ZONE_STEP_S = timedelta(hours=15), 900


@dataclass(frozen=True, slots=True)
class PeriodTold:
    """A site's word on one of its periods, as it came."""

    count: PeriodCount
    sealed: Sealed
    digest: Digest
    received_at: datetime
    proven: bool = False
    number: int = 0
    """Of metering's own row; 0 if it is not stored yet. The highest of a site and period is in force."""

    @property
    def site(self) -> SiteName:
        return self.count.site


@dataclass(frozen=True, slots=True)
class Held:
    """What is here of a site's segments that end in (start, end], whatever was made of them; a repeat counts once."""

    attempts: int = 0
    segments: int = 0
    quantity_milli_us: int = 0


@dataclass(frozen=True, slots=True)
class Lost:
    """A site's word that entries are gone for good, with the seal that somebody may have to answer for."""

    told: LostEntries
    sealed: Sealed


class _LostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a site seals of a lost range."""

    journal: str
    lane: Lane
    first: int
    last: int
    digest_last: str


def proven(sealed: Sealed, keys: SiteKeys, verify: Verify) -> bool:
    """Whether a valid key of the site signed it."""
    return any(verify(sealed, key) for key in sorted(keys.valid))


def period_told(site: SiteName, sealed: Sealed, at: datetime) -> PeriodTold:
    """Parse a site's count; `contract.invalid` if it is none, `metering.period` if it is another site's, no month, or has not begun at `at`.
    Nothing is believed yet."""
    count = decode(sealed.payload, PeriodCount, what="period count")
    more = max(count.attempts, count.segments) > MOST_COUNTED or count.quantity_milli_us > MOST_QUANTITY
    # Compared as a difference: a moment at the end of time cannot be moved by a day.
    if count.site != site or not _is_month(count) or count.start - at > CLOCK_TOLERANCE or more:
        raise Refused("metering.period", f"{site} cannot say that {count.period[:40]!r} of {count.site} is over")
    return PeriodTold(count, sealed, digest(sealed.payload.encode()), at)


def _is_month(count: PeriodCount) -> bool:
    """The month of its name, by the calendar of some place on earth: so a site has few periods to speak of, none of them to come."""
    named = _PERIOD.match(count.period)
    if named is None:
        return False
    year, month = int(named[1]), int(named[2])
    borders = (
        (count.start, datetime(year, month, 1, tzinfo=UTC)),
        (count.end, datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)),
    )
    aparts = [told - border for told, border in borders]
    return all(abs(apart) <= FARTHEST_ZONE and apart % timedelta(seconds=ZONE_STEP_S) == timedelta() for apart in aparts)


def lost_entries(site: SiteName, said: LostRange, keys: SiteKeys, verify: Verify, at: datetime) -> Lost:
    """What is gone. It is recorded whatever its seal is worth: nobody gains by saying that his own evidence is lost; `metering.lost_range` if it is
    no range."""
    if not said.first <= said.last <= MOST_NUMBERED:
        raise Refused("metering.lost_range", f"{site} says that entries {said.first} to {said.last} are lost: that is no range")
    try:
        facts = decode(said.sealed.payload, _LostFacts, what="lost range")
        same = facts == _LostFacts(journal=said.journal, lane=Lane.METERING, first=said.first, last=said.last, digest_last=said.digest_last)
    except Refused:
        same = False
    signed = same and proven(said.sealed, keys, verify)
    return Lost(LostEntries(site=site, journal=said.journal, first=said.first, last=said.last, said_at=at, proven=signed), said.sealed)


def in_force(told: Iterable[PeriodTold], site: SiteName, start: datetime, end: datetime) -> PeriodTold | None:
    """The site's last proven word on exactly this period: another zone's month is another period."""
    same = [one for one in told if one.proven and one.site == site and (one.count.start, one.count.end) == (start, end)]
    return max(same, key=lambda one: one.number, default=None)


def standing(site: SiteName, period: str, word: PeriodTold | None, held: Held, last_heard: datetime | None) -> SitePeriod:
    """How a site stands in a period that is over."""
    if word is None:
        return SitePeriod(site=site, period=period, state="not_said", last_heard=last_heard)
    count = word.count
    missing = max(0, count.segments - held.segments)
    same = (count.attempts, count.segments, count.quantity_milli_us) == (held.attempts, held.segments, held.quantity_milli_us)
    state = "complete" if same else "missing" if missing else "differs"
    return SitePeriod(site=site, period=period, state=state, missing_segments=missing, said_at=word.received_at, last_heard=last_heard)


def prove_again(told: Sequence[PeriodTold], keys: SiteKeys, verify: Verify) -> list[PeriodTold]:
    """Those that a key which came later proves."""
    return [replace(one, proven=True) for one in told if not one.proven and proven(one.sealed, keys, verify)]
