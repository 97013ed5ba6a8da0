"""Who may report, see and handle incidents, and what other services' events make of them."""

from __future__ import annotations

import pytest
from tests.edges.test_incident_store import T0, meta, pool, report, site
from tests.edges.test_registry_service import AUDITOR, OPERATOR, OTHER, OWNER, SERVICE, SITE, USER, caller

from intertie.bus import rpc
from intertie.bus.memory import MemoryBroker
from intertie.bus.rpc import Caller
from intertie.clock import ManualClock
from intertie.contracts import endpoints
from intertie.contracts.base import Contract
from intertie.contracts.identity import AuditQuery, Claims, Role
from intertie.contracts.incident import (
    AcknowledgeIncident,
    CloseIncident,
    FaultReported,
    IncidentRecord,
    IncidentsQuery,
    IncidentState,
)
from intertie.contracts.site import Freshness, Phase, PoolChanged, SiteChanged, SitesReply
from intertie.errors import Denied, NotFound
from intertie.ids import IncidentId
from intertie.incident.memory import MemoryIncidentStore
from intertie.incident.service import Incidents

OTHER_OWNER = caller(Role.SITE_OWNER, site=OTHER)


@pytest.fixture
def service() -> Incidents:
    clock = ManualClock(T0)
    return Incidents(MemoryIncidentStore(clock=clock), clock)


async def opened(service: Incidents) -> IncidentRecord:
    return await service.report(report(), SERVICE)


async def test_a_fault_that_a_service_reports_is_an_incident_named_after_it(service: Incidents) -> None:
    said, event = meta(), FaultReported(version=1, service="scheduler", report=report(), at=T0)
    await service.on_fault(event, said)
    await service.on_fault(event, said)
    [record] = (await service.list(IncidentsQuery(), OPERATOR)).incidents
    assert record.times == 1
    assert (await service.audit(AuditQuery(), AUDITOR)).rows[0].actor == "scheduler"


async def test_silence_and_return_come_by_events(service: Incidents) -> None:
    await service.on_pool(PoolChanged(version=1, record=pool(1, Phase.PRODUCTION)), meta())
    await service.on_site(SiteChanged(version=2, record=site(2, Freshness.UNKNOWN)), meta())
    await service.on_site(SiteChanged(version=3, record=site(3, Freshness.FRESH)), meta())
    [record] = (await service.list(IncidentsQuery(), OPERATOR)).incidents
    assert (record.key, record.recovered_at) == ("site.silent/site-a", T0)


async def test_a_snapshot_tells_what_an_event_that_was_missed_would_have_told(service: Incidents) -> None:
    broker = MemoryBroker()

    async def sites(request: Contract, who: Caller) -> SitesReply:
        return SitesReply(sites=[site(2, Freshness.UNKNOWN)], pools=[pool(1, Phase.PILOT)])

    def anybody(text: str) -> Claims:
        return SERVICE.claims

    await rpc.serve(broker.client(), "registry", "1.0.0", {endpoints.SITES: sites}, verifier=anybody)
    for _ in range(2):
        await service.learn_sites(broker.client(), "signed")
    [record] = (await service.list(IncidentsQuery(), OPERATOR)).incidents
    assert (record.kind, record.times) == ("site.silent", 1)


async def test_reporting_the_end_of_what_is_not_open_is_not_found(service: Incidents) -> None:
    with pytest.raises(NotFound):
        await service.report(report(recovered=True), SERVICE)


@pytest.mark.parametrize(("who", "sees"), [(OPERATOR, True), (AUDITOR, True), (OWNER, True), (OTHER_OWNER, False)])
async def test_who_sees_an_incident_of_a_site(service: Incidents, who: Caller, sees: bool) -> None:
    await opened(service)
    assert bool((await service.list(IncidentsQuery(), who)).incidents) is sees


@pytest.mark.parametrize("who", [OPERATOR, OWNER])
async def test_operator_and_owner_handle_it_and_the_audit_says_who_and_why(service: Incidents, who: Caller) -> None:
    record = await opened(service)
    taken = await service.acknowledge(AcknowledgeIncident(incident=record.incident), who)
    assert (taken.state, taken.acknowledged_by) == (IncidentState.ACKNOWLEDGED, who.claims.sub)
    closed = await service.close(CloseIncident(incident=record.incident, reason="cable replaced"), who)
    assert closed.state is IncidentState.CLOSED
    rows = (await service.audit(AuditQuery(), OPERATOR)).rows
    assert [(row.action, row.reason) for row in rows][:2] == [("incident.close", "cable replaced"), ("incident.acknowledge", "")]


@pytest.mark.parametrize(("who", "refusal"), [(AUDITOR, Denied), (USER, Denied), (SERVICE, Denied), (OTHER_OWNER, NotFound)])
async def test_nobody_else_closes_it(service: Incidents, who: Caller, refusal: type[Exception]) -> None:
    record = await opened(service)
    with pytest.raises(refusal):
        await service.close(CloseIncident(incident=record.incident, reason="because"), who)
    assert (await service.list(IncidentsQuery(), OPERATOR)).incidents == [record]


async def test_another_sites_incident_and_an_unknown_one_read_the_same(service: Incidents) -> None:
    """BR-146: the same words for what is not there and what is not yours."""
    record = await opened(service)
    told = []
    for incident in (record.incident, IncidentId("inc-x")):
        with pytest.raises(NotFound) as refused:
            await service.close(CloseIncident(incident=incident, reason="because"), OTHER_OWNER)
        told.append((refused.value.code, refused.value.text))
    assert told[0] == told[1] and str(SITE) not in told[0][1]
