"""Call offerings at the registry, on PostgreSQL and on its twin: one transaction holds record, revision, event, audit row and mark."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from tests.conftest import PgDatabase

from intertie.bus.rpc import Caller
from intertie.contracts.call_offerings import (
    CallOffering,
    CallOfferingChanged,
    CallPrice,
    CallProtocol,
    OfferingsQuery,
    OfferingTold,
)
from intertie.contracts.identity import Claims, Role
from intertie.contracts.incident import FaultReported
from intertie.contracts.link import OfferingsTold
from intertie.contracts.site import RegisterSite, SiteKind
from intertie.ids import OfferingName, PrincipalId, SiteName, TenantName
from intertie.registry.call_offerings import CallOfferings, MemoryOfferings, OfferingStore, PgOfferings
from intertie.registry.memory import MemoryRegistryStore
from intertie.registry.pg import PACKAGE, PgRegistryStore
from intertie.store import Database, StoreTx

T0 = datetime(2026, 12, 1, tzinfo=UTC)
LAB = SiteName("lab")
SITE = RegisterSite(
    site=LAB, kind=SiteKind.ENDPOINT, title="Lab", owner="ann", single_user=False, owner_tenant="team", agent_version="0.1.0", pools=[]
)


def told(name: str = "chat", *, available: bool = True, **changes: Any) -> OfferingTold:
    offering = CallOffering(name=OfferingName(name), protocol=CallProtocol.OPENAI, tenants=["acme"])
    return OfferingTold(offering=msgspec.structs.replace(offering, **changes), available=available, reason="" if available else "down")


def said(*offerings: OfferingTold) -> OfferingsTold:
    return OfferingsTold(seq=1, at=T0, offerings=list(offerings))


def caller(role: Role, *, tenant: str | None = None, site: str | None = None) -> Caller:
    tenant_name, site_name = TenantName(tenant) if tenant else None, SiteName(site) if site else None
    who = Claims(iss="identity", sub=PrincipalId("p"), name="p", roles=[role], tenant=tenant_name, site=site_name, iat=0, exp=2**40)
    return Caller(who, "trace")


async def mark(tx: StoreTx) -> None:
    """The entry's mark; the lane's own tests hold it."""


@dataclass
class World:
    calls: CallOfferings
    store: OfferingStore
    memory: MemoryRegistryStore | None
    db: Database | None

    async def events(self) -> list[str]:
        """Types of what was told, in order."""
        if self.memory is not None:
            return [event.TYPE for event in self.memory.memory.events]
        assert self.db is not None
        async with self.db.transaction(read_only=True) as tx:
            return [row["type"] for row in await tx.all("SELECT type FROM outbox ORDER BY created_at, event_id")]

    async def ids(self, who: Caller, **query: Any) -> list[str]:
        return [one.id for one in (await self.calls.listed(OfferingsQuery(**query), who)).offerings]


@pytest.fixture(params=["memory", "pg"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        memory = MemoryRegistryStore()
        await memory.register(SITE, actor="identity", now=T0)
        offered = MemoryOfferings(memory)
        yield World(CallOfferings(offered), offered, memory, None)
        return
    pg: PgDatabase = request.getfixturevalue("pg")
    database = await Database.open(pg.url, password=pg.password, schema="registry")
    try:
        await database.migrate(PACKAGE)
        store = PgRegistryStore(database)
        await store.register(SITE, actor="identity", now=T0)
        kept = PgOfferings(store)
        yield World(CallOfferings(kept), kept, None, database)
    finally:
        await database.close()


async def test_offerings_are_told_once_and_listed_to_those_who_may_call(world: World) -> None:
    await world.calls.told(LAB, said(told(), told("open", tenants=["*"])), mark)
    await world.calls.told(LAB, said(told(), told("open", tenants=["*"])), mark)
    assert (await world.events()).count(CallOfferingChanged.TYPE) == 2
    operator, acme, rival = caller(Role.OPERATOR), caller(Role.TENANT_USER, tenant="acme"), caller(Role.TENANT_USER, tenant="rival")
    assert await world.ids(operator) == await world.ids(acme) == ["lab/chat", "lab/open"]
    assert await world.ids(rival) == ["lab/open"]
    assert await world.ids(caller(Role.SITE_OWNER, site="lab")) == ["lab/chat", "lab/open"]
    assert await world.ids(operator, site=SiteName("other")) == []


async def test_a_withdrawn_offering_is_kept_and_shown_only_when_asked_for(world: World) -> None:
    await world.calls.told(LAB, said(told()), mark)
    await world.calls.told(LAB, said(told(price=CallPrice(per_call=Decimal("0.25")))), mark)
    await world.calls.told(LAB, said(), mark)
    operator = caller(Role.OPERATOR)
    assert await world.ids(operator) == [] and await world.ids(operator, withdrawn=True) == ["lab/chat"]
    [record] = (await world.calls.listed(OfferingsQuery(withdrawn=True), operator)).offerings
    assert (record.revision, record.version, record.offering.price.per_call) == (2, 3, Decimal("0.25"))


async def test_what_cannot_be_offerings_is_a_fault_and_what_stood_stands(world: World) -> None:
    await world.calls.told(LAB, said(told()), mark)
    before = (await world.events()).count(FaultReported.TYPE)
    await world.calls.told(LAB, said(told(), told()), mark)
    assert await world.ids(caller(Role.OPERATOR)) == ["lab/chat"]
    assert (await world.events()).count(FaultReported.TYPE) == before + 1
    await world.calls.told(LAB, said(told(title="better")), mark)
    assert (await world.events()).count(FaultReported.TYPE) == before + 2, "and it is said to be over"


async def test_after_a_restore_no_version_is_below_the_new_epochs_first(world: World) -> None:
    await world.calls.told(LAB, said(told()), mark)
    await world.store.lift_versions(1_000)
    await world.calls.told(LAB, said(told(available=False), told("new")), mark)
    records = (await world.calls.listed(OfferingsQuery(), caller(Role.OPERATOR))).offerings
    assert {one.offering.name: one.version for one in records} == {"chat": 1_001, "new": 1_000}
