"""How long a site that failed is left alone: 1 s, 2 s, 4 s … at most 5 min; one start forgets it all."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from intertie.ids import SiteName

FIRST_S = 1.0
# Long enough that a broken site does not eat a queue of jobs, short enough that a repaired one is tried again soon.
CAP_S = 300.0


@dataclass(frozen=True, slots=True)
class BackOff:
    site: SiteName
    faults: int
    until: datetime
    why: str


def after_fault(site: SiteName, before: BackOff | None, why: str, now: datetime) -> BackOff:
    """One fault more: 1 s · 2^n, capped."""
    faults = (before.faults if before else 0) + 1
    wait_s = min(FIRST_S * 2.0 ** min(faults - 1, 30), CAP_S)
    return BackOff(site, faults, now + timedelta(seconds=wait_s), why)
