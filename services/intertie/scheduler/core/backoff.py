"""How long a site that failed is left alone: 1 s, 2 s, 4 s … at most 5 min; one start forgets it all."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from intertie.ids import SiteName

FIRST_S = 1.0
# Long enough that a broken site does not eat a queue of jobs, short enough that a repaired one is tried again soon.
CAP_S = 300.0
# One job at one site: a job that a site cannot take is asked there ever more rarely, an hour at most, and goes elsewhere meanwhile.
JOB_FIRST_S, JOB_CAP_S = 10.0, 3_600.0


@dataclass(frozen=True, slots=True)
class BackOff:
    site: SiteName
    faults: int
    until: datetime
    why: str


def after_fault(
    site: SiteName, before: BackOff | None, why: str, now: datetime, *, first_s: float = FIRST_S, cap_s: float = CAP_S
) -> BackOff:
    """One fault more: `first_s` · 2^n, capped."""
    faults = (before.faults if before else 0) + 1
    wait_s = min(first_s * 2.0 ** min(faults - 1, 30), cap_s)
    return BackOff(site, faults, now + timedelta(seconds=wait_s), why)


def avoid(site: SiteName, before: BackOff | None, why: str, now: datetime) -> BackOff:
    """One fault more of a site for one job."""
    return after_fault(site, before, why, now, first_s=JOB_FIRST_S, cap_s=JOB_CAP_S)
