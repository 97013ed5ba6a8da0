"""One suite for the store of incident: PostgreSQL and the twin in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from tests.conftest import PgDatabase

from intertie.contracts.base import EventMeta
from intertie.contracts.identity import AuditQuery
from intertie.contracts.incident import IncidentsQuery, IncidentState, ReportIncident, Severity
from intertie.contracts.site import (
    Freshness,
    Lendable,
    Phase,
    PoolProfile,
    PoolRecord,
    SiteKind,
    SiteRecord,
    TaskType,
)
from intertie.errors import Conflict
from intertie.ids import IncidentId, PoolName, SiteName, new_event
from intertie.incident import core
from intertie.incident.memory import MemoryIncidentStore
from intertie.incident.pg import PACKAGE, PgIncidentStore, Q
from intertie.incident.store import IncidentStore
from intertie.store import Database, Violated
from intertie.store.checks import check_queries
from intertie.trust.rights import Scope

T0 = datetime(2026, 5, 1, 12, tzinfo=UTC)
SITE = SiteName("site-a")
ALL = Scope(everything=True, tenant=None, site=None)


@asynccontextmanager
async def on_postgres(pg: PgDatabase) -> AsyncIterator[PgIncidentStore]:
    db = await Database.open(pg.url, password=pg.password, schema="incident")
    try:
        await db.migrate(PACKAGE)
        yield PgIncidentStore(db)
    finally:
        await db.close()


@pytest.fixture(params=["pg", "memory"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[IncidentStore]:
    if request.param == "memory":
        yield MemoryIncidentStore()
        return
    async with on_postgres(request.getfixturevalue("pg")) as found:
        yield found


def report(key: str = "lane.forked/site-a", *, recovered: bool = False, site: SiteName | None = SITE) -> ReportIncident:
    return ReportIncident(key=key, kind="lane.forked", severity=Severity.WARNING, title="forked", text="t", site=site, recovered=recovered)


def meta(kind: str = "io.intertie.fault.reported.v1") -> EventMeta:
    return EventMeta(id=new_event(), type=kind, source="/intertie/registry", entity="e", time=T0, number=1, epoch=1)


def site(version: int, freshness: Freshness) -> SiteRecord:
    return SiteRecord(
        site=SITE,
        kind=SiteKind.MACHINES,
        title="",
        owner="o",
        single_user=True,
        owner_tenant="t",
        freshness=freshness,
        joined_at=T0,
        last_heard=T0,
        hears_us=True,
        clock_offset_s=0.0,
        agent_version="1",
        version=version,
    )


def pool(version: int, phase: Phase) -> PoolRecord:
    profile = PoolProfile(
        pool=PoolName("p"),
        accelerator="none",
        count=1,
        memory_mib=0,
        interconnect="none",
        task_types=[TaskType.BATCH],
        lendable=Lendable(devices=1),
    )
    return PoolRecord(
        site=SITE,
        pool=PoolName("p"),
        kind=SiteKind.MACHINES,
        profile=profile,
        phase=phase,
        cordoned=False,
        draining=False,
        cordon_reason="",
        freshness=Freshness.FRESH,
        last_heard=None,
        inventory=None,
        inventory_at=None,
        version=version,
    )


async def test_an_opened_incident_is_found_and_audited(store: IncidentStore) -> None:
    opened = await store.fold(report(), now=T0, actor="registry")
    assert opened is not None
    assert await store.get(opened.incident) == opened
    assert [(row.actor, row.action, row.target) for row in await store.read_audit(AuditQuery())] == [
        ("registry", "incident.open", opened.incident)
    ]


async def test_an_event_that_comes_twice_is_counted_once(store: IncidentStore) -> None:
    said = meta()
    first = await store.fold(report(), now=T0, actor="registry", meta=said)
    again = await store.fold(report(), now=T0, actor="registry", meta=said)
    assert first is not None and again == first


async def test_two_reports_at_once_open_one_incident(store: IncidentStore) -> None:
    found = await asyncio.gather(*(store.fold(report(), now=T0, actor="registry") for _ in range(6)))
    assert len({record.incident for record in found if record is not None}) == 1
    [record] = await store.find(IncidentsQuery(), ALL)
    assert record.times == 6


async def test_a_closed_key_opens_again_as_a_new_incident(store: IncidentStore) -> None:
    first = await store.fold(report(), now=T0, actor="registry")
    assert first is not None
    closed = await store.change(
        first.incident, lambda r: core.close(r, by="ann", reason="disk replaced", now=T0), actor="ann", action="incident.close"
    )
    assert closed is not None and closed.state is IncidentState.CLOSED
    second = await store.fold(report(), now=T0 + timedelta(hours=1), actor="registry")
    assert second is not None and second.incident != first.incident and second.times == 1


async def test_a_decision_that_raises_changes_nothing(store: IncidentStore) -> None:
    opened = await store.fold(report(), now=T0, actor="registry")
    assert opened is not None
    closed = await store.change(
        opened.incident, lambda r: core.close(r, by="ann", reason="why", now=T0), actor="ann", action="incident.close"
    )
    with pytest.raises(Conflict):
        await store.change(opened.incident, lambda r: core.acknowledge(r, by="bob", now=T0), actor="bob", action="incident.acknowledge")
    assert await store.get(opened.incident) == closed


async def test_a_decision_that_changes_nothing_leaves_no_audit_row(store: IncidentStore) -> None:
    opened = await store.fold(report(), now=T0, actor="registry")
    assert opened is not None
    await store.change(opened.incident, lambda r: r, actor="ann", action="incident.acknowledge")
    assert len(await store.read_audit(AuditQuery())) == 1


async def test_an_unknown_incident_is_none(store: IncidentStore) -> None:
    assert await store.get(IncidentId("inc-x")) is None
    assert await store.change(IncidentId("inc-x"), lambda r: r, actor="a", action="b") is None


async def test_incidents_are_listed_newest_first_by_state_and_site(store: IncidentStore) -> None:
    one = await store.fold(report("k/1"), now=T0, actor="x")
    two = await store.fold(report("k/2", site=None), now=T0, actor="x")
    assert one is not None and two is not None
    await store.change(one.incident, lambda r: core.acknowledge(r, by="ann", now=T0), actor="ann", action="incident.acknowledge")
    assert [r.key for r in await store.find(IncidentsQuery(), ALL)] == ["k/2", "k/1"]
    assert [r.key for r in await store.find(IncidentsQuery(limit=1), ALL)] == ["k/2"]
    assert [r.key for r in await store.find(IncidentsQuery(state=IncidentState.ACKNOWLEDGED), ALL)] == ["k/1"]
    assert [r.key for r in await store.find(IncidentsQuery(site=SITE), ALL)] == ["k/1"]


async def test_a_list_is_cut_to_what_the_caller_may_see(store: IncidentStore) -> None:
    """BR-147: the scope is part of the query, and a limit counts what may be seen."""
    await store.fold(report("k/1"), now=T0, actor="x")
    await store.fold(report("k/2", site=SiteName("site-b")), now=T0, actor="x")
    await store.fold(report("k/3", site=None), now=T0, actor="x")
    own = Scope(everything=False, tenant=None, site=SITE)
    assert [r.key for r in await store.find(IncidentsQuery(limit=1), own)] == ["k/1"]
    assert await store.find(IncidentsQuery(site=SiteName("site-b")), own) == []


async def test_a_silent_site_opens_one_incident_and_its_return_marks_it_recovered(store: IncidentStore) -> None:
    await store.apply_site(site(1, Freshness.FRESH), now=T0, meta=meta())
    assert await store.find(IncidentsQuery(), ALL) == []
    silent = await store.apply_site(site(3, Freshness.UNKNOWN), now=T0, meta=meta())
    assert silent is not None and silent.recovered_at is None
    back = await store.apply_site(site(4, Freshness.FRESH), now=T0 + timedelta(minutes=9), meta=meta())
    assert back is not None
    assert (back.incident, back.recovered_at, back.state) == (silent.incident, T0 + timedelta(minutes=9), IncidentState.OPEN)


async def test_an_older_version_of_a_site_says_nothing(store: IncidentStore) -> None:
    await store.apply_site(site(5, Freshness.FRESH), now=T0, meta=meta())
    assert await store.apply_site(site(4, Freshness.UNKNOWN), now=T0, meta=meta()) is None
    assert await store.find(IncidentsQuery(), ALL) == []


async def test_a_suspended_pool_makes_its_sites_silence_no_incident_until_it_is_watched_again(store: IncidentStore) -> None:
    await store.apply_pool(pool(1, Phase.SUSPENDED), now=T0, meta=meta())
    assert await store.apply_site(site(2, Freshness.UNKNOWN), now=T0, meta=meta()) is None
    opened = await store.apply_pool(pool(2, Phase.PILOT), now=T0, meta=meta())
    assert opened is not None and opened.key == "site.silent/site-a"
    assert await store.apply_pool(pool(3, Phase.PILOT), now=T0, meta=meta()) is None


async def test_the_database_itself_refuses_a_second_open_incident_of_a_key(pg: PgDatabase) -> None:
    async with on_postgres(pg) as store:
        await store.fold(report(), now=T0, actor="x")
        with pytest.raises(Violated) as refused:
            async with store.db.transaction() as tx:
                await tx.run(
                    "INSERT INTO incident (incident, record) SELECT 'inc-2', jsonb_set(record, '{incident}', '\"inc-2\"') FROM incident"
                )
    assert refused.value.constraint == "one_open_incident_per_key"


async def test_postgresql_can_run_every_query_and_none_is_idle(pg: PgDatabase) -> None:
    async with on_postgres(pg) as store:
        assert await check_queries(store.db, Q) == []
