"""Drills: who may be cut when, and what follows from what is heard. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from intertie.contracts.drill import DrillConsent, DrillKind, DrillRecord, DrillState, PlanDrill
from intertie.contracts.site import Freshness, PoolRecord, SiteRecord
from intertie.errors import Conflict, NotFound, Refused
from intertie.trust.evidence import PASSED

OPEN = (DrillState.PLANNED, DrillState.CUT, DrillState.BACK)
# A rehearsal proves that the way back works; it is short on purpose.
REHEARSAL_S = 120
# From the plan to the site: an event, a sync, a settings revision. A site that has not fallen silent so long after its time was not cut.
PATIENCE = timedelta(seconds=60)
# Books of the last second need this long to be complete; then they are judged as they are.
BOOKS = timedelta(seconds=120)


def plan(
    request: PlanDrill,
    *,
    id: str,
    site: SiteRecord,
    pools: Sequence[PoolRecord],
    consent: DrillConsent | None,
    open_drills: Sequence[DrillRecord],
    past: Sequence[DrillRecord],
    max_age_days: int,
    actor: str,
    now: datetime,
    version: int = 1,
) -> DrillRecord:
    """The record of a drill that may be made; else the first reason against it, in this order."""
    start = now + timedelta(seconds=request.after_s)
    if site.left_at is not None:
        raise Refused("drill.site_left", f"site {site.site} has left")
    if request.kind is DrillKind.REHEARSAL and request.pool is None:
        raise Refused("drill.pool_needed", "a rehearsal names one pool", next_step="intertie drill rehearse SITE/POOL")
    if request.pool is not None and all(pool.pool != request.pool for pool in pools):
        raise NotFound("registry.pool_unknown", f"site {site.site} has no pool {request.pool}")
    if request.kind is DrillKind.REHEARSAL and request.seconds > REHEARSAL_S:
        raise Refused("drill.too_long", f"a rehearsal lasts {REHEARSAL_S} s at most")
    if open_drills:
        other = open_drills[0]
        raise Conflict("drill.another", f"drill {other.drill} of site {other.site} is {other.state.value}: one at a time")
    if site.freshness is not Freshness.FRESH:
        raise Refused("drill.not_fresh", f"site {site.site} is {site.freshness.value}: a cut would show nothing")
    _require_consent(request, site, consent, start)
    if request.kind is DrillKind.CUT and not rehearsed(past, site, now=now, max_age_days=max_age_days):
        raise Refused(
            "drill.not_rehearsed",
            f"no rehearsal of site {site.site} has passed in the last {max_age_days} days",
            next_step=f"intertie drill rehearse {site.site}/POOL",
        )
    return DrillRecord(
        drill=id,
        site=site.site,
        pool=request.pool,
        kind=request.kind,
        state=DrillState.PLANNED,
        seconds=request.seconds,
        start=start.replace(microsecond=0) + timedelta(seconds=1),
        asked_by=actor,
        asked_at=now,
        reason=request.reason,
        consent=consent,
        version=version,
    )


def _require_consent(request: PlanDrill, site: SiteRecord, consent: DrillConsent | None, start: datetime) -> None:
    how = "intertie local drill allow, at the site; or its owner's token: intertie drill consent SITE"
    if consent is None or not consent.allowed:
        raise Refused("drill.no_consent", f"the owner of site {site.site} has not consented to a drill", next_step=how)
    if consent.until is not None and start + timedelta(seconds=request.seconds) > consent.until:
        raise Refused("drill.consent_over", f"the owner's consent ends at {consent.until.isoformat()}", next_step=how)
    if request.seconds > consent.longest_s:
        raise Refused("drill.consent_shorter", f"the owner consents to {consent.longest_s} s at most", next_step=how)


def rehearsed(past: Sequence[DrillRecord], site: SiteRecord, *, now: datetime, max_age_days: int) -> bool:
    since = now - timedelta(days=max_age_days)
    return any(d.site == site.site and d.verdict == PASSED and d.judged_at is not None and d.judged_at >= since for d in past)


def look(record: DrillRecord, freshness: Freshness, *, now: datetime) -> DrillRecord:
    """What the site's freshness says of an open drill; the same object if nothing."""
    if record.silent_at is None and freshness is not Freshness.FRESH and now >= record.start:
        state = DrillState.CUT if record.state is DrillState.PLANNED else record.state
        return moved(record, state=state, silent_at=now)
    if record.silent_at is not None and record.heard_at is None and freshness is Freshness.FRESH:
        return moved(record, heard_at=now)
    over = record.start + timedelta(seconds=record.seconds) + PATIENCE
    if record.state is DrillState.PLANNED and now > over and freshness is Freshness.FRESH:
        return called_off(record, "the site made no cut and is heard")
    return record


def called_off(record: DrillRecord, why: str) -> DrillRecord:
    return moved(record, state=DrillState.CALLED_OFF, text=why)


def may_call_off(record: DrillRecord, *, now: datetime) -> None:
    """Before its time, or when the site did not come back from it."""
    if record.state not in OPEN:
        raise Conflict("drill.over", f"drill {record.drill} is {record.state.value}")
    ends = record.start + timedelta(seconds=record.seconds)
    if record.start <= now <= ends + PATIENCE or record.state is DrillState.BACK:
        raise Conflict(
            "drill.under_way",
            f"drill {record.drill} is under way: the site ends it by itself at {ends.isoformat()}",
            next_step="at the site: intertie local drill stop",
        )


def moved(record: DrillRecord, **changes: object) -> DrillRecord:
    return msgspec.structs.replace(record, version=record.version + 1, **changes)


def books_are_due(record: DrillRecord, now: datetime) -> bool:
    """The books have had their time: the drill is judged by what is there."""
    return now > record.start + timedelta(seconds=record.seconds) + PATIENCE + BOOKS


def with_drill(site: SiteRecord, passed_at: datetime) -> SiteRecord:
    """The site's record after a cut that it passed."""
    return msgspec.structs.replace(site, drill_passed_at=passed_at, version=site.version + 1)
