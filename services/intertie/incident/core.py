"""When a fault becomes an incident, when it folds into one, and what a person may do with it. Pure: state and `now` in, record out.

A record that comes back unchanged means that nothing is to be written. `store.py` loads the open incident of a key under a lock, calls one of
these, and saves the result with its event and its audit row.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec

from intertie.contracts.incident import IncidentRecord, IncidentState, ReportIncident, Severity
from intertie.contracts.site import Freshness, Phase, SiteRecord
from intertie.errors import Conflict, Refused
from intertie.ids import IncidentId, SiteName

SILENT = "site.silent"

# A candidate is not yet joined, a suspended or closed pool is meant to be quiet: their silence wakes nobody.
WATCHED_PHASES = frozenset({Phase.PILOT, Phase.PARALLEL, Phase.PRODUCTION})

_RANK = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}

# A key is printed in lists and typed by people; longer ones are a defect of the reporter.
KEY_LENGTH = 200


def fold(
    open_incident: IncidentRecord | None, report: ReportIncident, *, now: datetime, new_id: IncidentId, version: int = 1
) -> IncidentRecord | None:
    """The incident after `report`: opened (with `version`), folded into the open one, or marked recovered. None: nothing is open and nothing is wrong."""
    if not report.key or len(report.key) > KEY_LENGTH:
        raise Refused("incident.key", f"an incident's key has 1 to {KEY_LENGTH} characters, not {len(report.key)}")
    if open_incident is None:
        return None if report.recovered else _opened(report, now, new_id, version)
    if report.recovered:
        return _recovered(open_incident, now)
    return _again(open_incident, report, now)


def _opened(report: ReportIncident, now: datetime, new_id: IncidentId, version: int) -> IncidentRecord:
    return IncidentRecord(
        incident=new_id,
        key=report.key,
        kind=report.kind,
        severity=report.severity,
        title=report.title,
        text=report.text,
        site=report.site,
        tenant=report.tenant,
        state=IncidentState.OPEN,
        opened_at=now,
        last_seen_at=now,
        times=1,
        recovered_at=None,
        acknowledged_by=None,
        acknowledged_at=None,
        closed_by=None,
        closed_at=None,
        close_reason="",
        version=version,
    )


def _again(record: IncidentRecord, report: ReportIncident, now: datetime) -> IncidentRecord:
    """Seen once more: counted; it is never milder than it was, and no longer recovered. A silence is one for as long as it lasts."""
    if report.kind == SILENT and record.recovered_at is None:
        return record
    worse = max(record.severity, report.severity, key=_RANK.__getitem__)
    return _next(
        record,
        times=record.times + 1,
        last_seen_at=max(now, record.last_seen_at),
        severity=worse,
        title=report.title,
        text=report.text,
        recovered_at=None,
    )


def _recovered(record: IncidentRecord, now: datetime) -> IncidentRecord:
    """The condition is gone by itself; a person still closes the incident. The first recovery's time stays."""
    return record if record.recovered_at is not None else _next(record, recovered_at=now)


def folding(before: IncidentRecord | None, after: IncidentRecord) -> str:
    """What the audit calls the step from `before` to `after`."""
    if before is None:
        return "incident.open"
    return "incident.recover" if after.times == before.times else "incident.repeat"


def acknowledge(record: IncidentRecord, *, by: str, now: datetime) -> IncidentRecord:
    """Somebody has taken it. The first one stays named; a second acknowledgement changes nothing."""
    if record.state is IncidentState.CLOSED:
        raise Conflict("incident.closed", f"incident {record.incident} was closed by {record.closed_by}: it cannot be acknowledged")
    if record.state is IncidentState.ACKNOWLEDGED:
        return record
    return _next(record, state=IncidentState.ACKNOWLEDGED, acknowledged_by=by, acknowledged_at=now)


def close(record: IncidentRecord, *, by: str, reason: str, now: datetime) -> IncidentRecord:
    """Closed by a person, with a reason. A repeat of the same closing changes nothing; another reason contradicts the record."""
    if not reason.strip():
        raise Refused("incident.reason_missing", "closing an incident needs a reason", next_step="say what was wrong and what was done")
    if record.state is IncidentState.CLOSED:
        if (record.closed_by, record.close_reason) == (by, reason):
            return record
        raise Conflict("incident.closed", f"incident {record.incident} was already closed by {record.closed_by}")
    return _next(record, state=IncidentState.CLOSED, closed_by=by, closed_at=now, close_reason=reason)


def site_report(site: SiteRecord, phases: Iterable[Phase]) -> ReportIncident | None:
    """What a site's freshness says to a person; None where it says nothing.

    `phases` are those of the site's pools as far as they are known; a site without a known pool is watched, since a pool starts as pilot. A
    site that was never heard is being set up, not silent; one that has left said goodbye. `stale` is not yet silence.
    """
    key = silent_key(site.site)
    if site.freshness is Freshness.FRESH or site.left_at is not None:
        return _silence(site, key, recovered=True)
    if site.freshness is not Freshness.UNKNOWN or site.last_heard is None:
        return None
    known = list(phases)
    if known and not WATCHED_PHASES.intersection(known):
        return None
    return _silence(site, key, recovered=False)


def silent_key(site: SiteName) -> str:
    return f"{SILENT}/{site}"


def _silence(site: SiteRecord, key: str, *, recovered: bool) -> ReportIncident:
    since = site.last_heard.isoformat(timespec="seconds") if site.last_heard else "its joining"
    return ReportIncident(
        key=key,
        kind=SILENT,
        severity=Severity.CRITICAL,
        title=f"Site {site.site} is silent",
        text=f"Nothing has been heard from {site.site} since {since}. What runs there is unknown, not failed; nothing new is sent there.",
        site=site.site,
        recovered=recovered,
    )


def _next(record: IncidentRecord, **changes: object) -> IncidentRecord:
    changed: IncidentRecord = msgspec.structs.replace(record, version=record.version + 1, **changes)
    return changed
