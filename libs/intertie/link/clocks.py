"""What two hosts can know of each other's wall clocks from the exchange alone: an offset and a bound on its error, both in seconds, hub minus site.

The site sees a whole round trip and bounds the offset by half of it (as NTP does). The keeper sees one-way messages: a sync was sent before it was
received, and after the answer that it says was taken. No clock here decides anything; money and people are shown the estimate with its error.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from intertie.contracts.link import Clocks

DRIFT = 500e-6
"""The most that two healthy clocks drift apart per second (NTP's own limit of slewing, 500 ppm)."""

STEP_S = 0.01
"""A wall clock that moved against CLOCK_BOOTTIME by more than drift and this was stepped: what was known before is void."""

TRY_S = 2.0
"""A site gives up a try after this long, so a sync in hand is taken to be no older."""


@dataclass(frozen=True, slots=True)
class ClockEstimate:
    """Hub minus site wall clock as of `at_boot_s` (site's CLOCK_BOOTTIME): the true offset lies within `offset_s` ± `error_s`."""

    offset_s: float
    error_s: float
    at_boot_s: float
    wall_minus_boot_s: float
    """Site wall clock (UNIX seconds) minus its CLOCK_BOOTTIME: changes only when the wall clock is stepped or slewed."""


def by_round_trip(before: ClockEstimate | None, sent: Clocks, answered_boot_s: float, hub: datetime) -> ClockEstimate:
    """The site's estimate after one answered try: `hub` was read somewhere between sending and answer.

    A tighter older estimate is kept while drift has not loosened it past the new one, unless the site's wall clock was stepped since.
    """
    half = max(0.0, answered_boot_s - sent.boot_s) / 2
    wall = sent.utc.timestamp()
    fresh = ClockEstimate(hub.timestamp() - (wall + half), half, answered_boot_s, wall - sent.boot_s)
    if before is None:
        return fresh
    age = max(0.0, answered_boot_s - before.at_boot_s)
    if abs(fresh.wall_minus_boot_s - before.wall_minus_boot_s) > DRIFT * age + STEP_S:
        return fresh
    loosened = before.error_s + DRIFT * age
    if loosened >= fresh.error_s:
        return fresh
    return ClockEstimate(before.offset_s, loosened, answered_boot_s, fresh.wall_minus_boot_s)


def by_arrival(
    known: tuple[float, float] | None,
    age_s: float,
    site: datetime,
    received: datetime,
    answered: datetime | None,
    told: tuple[float, float] | None = None,
) -> tuple[float, float]:
    """The keeper's estimate `(offset_s, error_s)` after one sync.

    `site` is the wall clock in the sync, `received` the hub's at its arrival, `answered` the hub's at the last answer if the sync says that it was
    taken. `known` is the estimate before, `age_s` old; if the two contradict each other, a clock was stepped and the new one stands alone.
    `told` is the site's own estimate from round trips, which one-way messages cannot match: it narrows the keeper's bounds, never widens them.
    """
    high = (received - site).total_seconds()
    low = high - TRY_S
    if answered is not None:
        low = min(high, max(low, (answered - site).total_seconds()))
    if known is not None:
        slack = known[1] + DRIFT * max(0.0, age_s)
        if max(low, known[0] - slack) <= min(high, known[0] + slack):
            low, high = max(low, known[0] - slack), min(high, known[0] + slack)
    if told is not None and told[1] >= 0 and max(low, told[0] - told[1]) <= min(high, told[0] + told[1]):
        low, high = max(low, told[0] - told[1]), min(high, told[0] + told[1])
    return (low + high) / 2, (high - low) / 2
