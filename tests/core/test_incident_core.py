"""When a fault becomes an incident, and what folds into it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from intertie.contracts.incident import IncidentRecord, IncidentState, ReportIncident, Severity
from intertie.contracts.site import Freshness, Phase, SiteKind, SiteRecord
from intertie.errors import Conflict, Refused
from intertie.ids import IncidentId, SiteName
from intertie.incident import core

T0 = datetime(2026, 5, 1, 12, tzinfo=UTC)
LATER = T0 + timedelta(minutes=5)
ID = IncidentId("inc-1")
SITE = SiteName("site-a")


def report(
    *, severity: Severity = Severity.WARNING, recovered: bool = False, text: str = "what was seen", key: str = "k/1"
) -> ReportIncident:
    return ReportIncident(key=key, kind="k", severity=severity, title="title", text=text, recovered=recovered)


def opened() -> IncidentRecord:
    record = core.fold(None, report(), now=T0, new_id=ID)
    assert record is not None
    return record


def site(freshness: Freshness, *, heard: bool = True) -> SiteRecord:
    return SiteRecord(
        site=SITE,
        kind=SiteKind.MACHINES,
        title="",
        owner="o",
        single_user=True,
        owner_tenant="t",
        freshness=freshness,
        joined_at=T0,
        last_heard=T0 if heard else None,
        hears_us=True,
        clock_offset_s=0.0,
        agent_version="1",
        version=3,
    )


def test_the_first_report_of_a_key_opens_an_incident() -> None:
    record = opened()
    assert (record.state, record.times, record.version, record.opened_at) == (IncidentState.OPEN, 1, 1, T0)


def test_a_repeat_folds_into_the_open_incident_and_is_counted() -> None:
    again = core.fold(opened(), report(text="seen again"), now=LATER, new_id=IncidentId("inc-2"))
    assert again is not None
    assert (again.incident, again.times, again.last_seen_at, again.text, again.version) == (ID, 2, LATER, "seen again", 2)


@pytest.mark.parametrize(
    ("before", "reported", "after"),
    [
        (Severity.WARNING, Severity.CRITICAL, Severity.CRITICAL),
        (Severity.CRITICAL, Severity.INFO, Severity.CRITICAL),
        (Severity.INFO, Severity.INFO, Severity.INFO),
    ],
)
def test_an_incident_never_becomes_milder_by_a_repeat(before: Severity, reported: Severity, after: Severity) -> None:
    first = core.fold(None, report(severity=before), now=T0, new_id=ID)
    again = core.fold(first, report(severity=reported), now=LATER, new_id=ID)
    assert again is not None and again.severity is after


def test_a_recovery_of_what_is_not_open_opens_nothing() -> None:
    assert core.fold(None, report(recovered=True), now=T0, new_id=ID) is None


def test_a_recovery_marks_the_incident_and_leaves_the_closing_to_a_person() -> None:
    record = core.fold(opened(), report(recovered=True), now=LATER, new_id=ID)
    assert record is not None
    assert (record.state, record.recovered_at, record.times) == (IncidentState.OPEN, LATER, 1)


def test_a_second_recovery_keeps_the_first_ones_time_and_writes_nothing() -> None:
    recovered = core.fold(opened(), report(recovered=True), now=T0, new_id=ID)
    assert core.fold(recovered, report(recovered=True), now=LATER, new_id=ID) is recovered


def test_a_fault_that_returns_is_no_longer_recovered() -> None:
    recovered = core.fold(opened(), report(recovered=True), now=T0, new_id=ID)
    back = core.fold(recovered, report(), now=LATER, new_id=ID)
    assert back is not None and back.recovered_at is None and back.times == 2


def test_a_silence_is_counted_once_for_as_long_as_it_lasts() -> None:
    silent, heard = core.site_report(site(Freshness.UNKNOWN), []), core.site_report(site(Freshness.FRESH), [])
    assert silent is not None and heard is not None
    first = core.fold(None, silent, now=T0, new_id=ID)
    assert core.fold(first, silent, now=LATER, new_id=ID) is first
    again = core.fold(core.fold(first, heard, now=LATER, new_id=ID), silent, now=LATER, new_id=ID)
    assert again is not None and (again.times, again.recovered_at) == (2, None)


def test_the_first_to_acknowledge_stays_named() -> None:
    first = core.acknowledge(opened(), by="ann", now=T0)
    assert core.acknowledge(first, by="bob", now=LATER) is first
    assert (first.state, first.acknowledged_by) == (IncidentState.ACKNOWLEDGED, "ann")


def test_a_repeat_after_an_acknowledgement_does_not_reopen() -> None:
    again = core.fold(core.acknowledge(opened(), by="ann", now=T0), report(), now=LATER, new_id=ID)
    assert again is not None and again.state is IncidentState.ACKNOWLEDGED


def test_closing_needs_a_reason() -> None:
    with pytest.raises(Refused) as refused:
        core.close(opened(), by="ann", reason="   ", now=LATER)
    assert refused.value.code == "incident.reason_missing"


def test_closing_twice_with_the_same_reason_changes_nothing_and_with_another_contradicts() -> None:
    closed = core.close(opened(), by="ann", reason="cable replaced", now=LATER)
    assert core.close(closed, by="ann", reason="cable replaced", now=LATER) is closed
    with pytest.raises(Conflict):
        core.close(closed, by="bob", reason="cable replaced", now=LATER)
    with pytest.raises(Conflict):
        core.acknowledge(closed, by="bob", now=LATER)


@pytest.mark.parametrize("key", ["", "k" * 201])
def test_a_key_has_a_sane_length(key: str) -> None:
    with pytest.raises(Refused) as refused:
        core.fold(None, report(key=key), now=T0, new_id=ID)
    assert refused.value.code == "incident.key"


@pytest.mark.parametrize(
    ("record", "phases", "says"),
    [
        (site(Freshness.UNKNOWN), [Phase.PRODUCTION], "silent"),
        (site(Freshness.UNKNOWN), [Phase.PILOT], "silent"),
        (site(Freshness.UNKNOWN), [Phase.PARALLEL], "silent"),
        (site(Freshness.UNKNOWN), [Phase.SUSPENDED, Phase.PILOT], "silent"),
        (site(Freshness.UNKNOWN), [], "silent"),  # no pool known yet: a pool starts as pilot
        (site(Freshness.UNKNOWN), [Phase.CANDIDATE], None),
        (site(Freshness.UNKNOWN), [Phase.SUSPENDED, Phase.CLOSED], None),
        (site(Freshness.UNKNOWN, heard=False), [Phase.PILOT], None),  # being set up, never heard
        (site(Freshness.STALE), [Phase.PRODUCTION], None),
        (site(Freshness.FRESH), [Phase.PRODUCTION], "recovered"),
        (replace(site(Freshness.UNKNOWN), left_at=T0), [Phase.PILOT], "recovered"),  # it has left: nobody waits for its word
    ],
)
def test_what_a_sites_freshness_says_to_a_person(record: SiteRecord, phases: list[Phase], says: str | None) -> None:
    found = core.site_report(record, phases)
    assert (None if found is None else "recovered" if found.recovered else "silent") == says
    assert found is None or found.key == "site.silent/site-a"
