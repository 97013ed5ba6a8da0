"""The registry's calls and its leader, on the bus in memory: who sees and does what, and what the hub's own deafness does to nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from tests.edges.test_registry_store import REQUEST

from intertie.bus.memory import MemoryBroker, MemoryBus
from intertie.bus.rpc import Caller
from intertie.clock import ManualClock
from intertie.contracts.base import encode
from intertie.contracts.identity import AuditQuery, Claims, Role
from intertie.contracts.link import Clocks, Lane, Sync, Synced, sync_subject
from intertie.contracts.site import CordonPool, Freshness, SitesQuery
from intertie.errors import Denied, NotFound
from intertie.ids import JournalId, PrincipalId, SessionId, SiteName, TenantName
from intertie.lane.memory import MemoryLaneTables
from intertie.link.journal import first_digest
from intertie.registry.memory import MemoryRegistryStore
from intertie.registry.service import Registry

SITE, OTHER = SiteName("site-a"), SiteName("site-b")
JOURNAL = JournalId("jnl-1")


def caller(*roles: Role, tenant: str | None = None, site: str | None = None) -> Caller:
    claims = Claims(
        iss="identity",
        sub=PrincipalId("prn-1"),
        name="ann",
        roles=list(roles),
        tenant=TenantName(tenant) if tenant else None,
        site=SiteName(site) if site else None,
        iat=0,
        exp=1,
    )
    return Caller(claims, "")


OPERATOR, OWNER = caller(Role.OPERATOR), caller(Role.SITE_OWNER, site=SITE)
USER, SERVICE, AUDITOR = caller(Role.TENANT_USER, tenant="team-a"), caller(Role.SERVICE), caller(Role.AUDITOR)


@dataclass
class Rig:
    clock: ManualClock
    broker: MemoryBroker
    hub: MemoryBus
    store: MemoryRegistryStore
    service: Registry
    nonce: int = 0

    async def syncs(self, site: SiteName = SITE) -> Synced:
        """One empty sync of the site, whose answer was taken."""
        self.nonce += 1
        sync = Sync(
            site=site,
            session=SessionId("ses-1"),
            lane=Lane.REGISTRY,
            nonce=self.nonce,
            taken_nonce=self.nonce - 1,
            journal=JOURNAL,
            first_seq=1,
            digest_before=first_digest(JOURNAL),
            entries=[],
            at_head=True,
            clocks=Clocks(utc=self.clock.now(), boot_s=self.clock.boot_s(), kernel_boot="boot"),
        )
        answer = await self.broker.client().request(sync_subject(site, Lane.REGISTRY), encode(sync), timeout_s=2)
        return msgspec.json.decode(answer.body, type=Synced)

    async def freshness(self) -> Freshness:
        return (await self.service.sites(SitesQuery(site=SITE), OPERATOR)).sites[0].freshness


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    clock, broker = ManualClock(), MemoryBroker()
    hub = broker.client()
    store = MemoryRegistryStore(clock=clock)
    service = Registry(store, MemoryLaneTables(store.memory), hub, clock)
    keeper = asyncio.create_task(service.keeper.run())
    await service.keeper.listening.wait()
    await store.register(REQUEST, actor="identity", now=clock.now())
    try:
        yield Rig(clock, broker, hub, store, service)
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


async def test_a_site_that_syncs_is_fresh_and_its_page_says_when_it_was_last_heard(rig: Rig) -> None:
    async with rig.store.leading("judge") as leader:
        rig.service.takes_office()
        await rig.service.judge(leader)
        rig.clock.advance(5)
        await rig.syncs()
        await rig.service.judge(leader)
        rig.clock.advance(5)
        await rig.syncs()
    found = (await rig.service.sites(SitesQuery(), OPERATOR)).sites[0]
    assert (found.freshness, found.last_heard) == (Freshness.FRESH, rig.clock.now())


async def test_a_silent_site_is_stale_and_then_unknown(rig: Rig) -> None:
    async with rig.store.leading("judge") as leader:
        rig.service.takes_office()
        await rig.service.judge(leader)
        await rig.syncs()
        seen = []
        for _ in range(70):
            await rig.service.judge(leader)
            seen.append(await rig.freshness())
            rig.clock.advance(1)
    assert [seen[0], seen[15], seen[16], seen[60], seen[61]] == [
        Freshness.FRESH,
        Freshness.FRESH,
        Freshness.STALE,
        Freshness.STALE,
        Freshness.UNKNOWN,
    ]


async def test_while_the_bus_is_away_no_site_becomes_unknown(rig: Rig) -> None:
    """LINK D5."""
    async with rig.store.leading("judge") as leader:
        rig.service.takes_office()
        await rig.service.judge(leader)
        await rig.syncs()
        await rig.service.judge(leader)
        rig.hub.cut()
        for _ in range(200):
            rig.clock.advance(1)
            await rig.service.judge(leader)
        assert await rig.freshness() is Freshness.STALE


async def test_a_leader_that_did_not_look_for_minutes_blames_no_site(rig: Rig) -> None:
    """LINK D5: the store was away, or the process was stopped."""
    async with rig.store.leading("judge") as leader:
        rig.service.takes_office()
        await rig.service.judge(leader)
        await rig.syncs()
        await rig.service.judge(leader)
        rig.clock.advance(600)
        await rig.service.judge(leader)
        assert await rig.freshness() is Freshness.STALE


async def test_a_beat_without_news_tells_nothing(rig: Rig) -> None:
    async with rig.store.leading("judge") as leader:
        rig.service.takes_office()
        for _ in range(3):
            await rig.syncs()
            await rig.service.judge(leader)
            rig.clock.advance(1)
        told = len(rig.store.memory.events)
        for _ in range(20):
            await rig.syncs()
            await rig.service.judge(leader)
            rig.clock.advance(1)
    assert len(rig.store.memory.events) == told


@pytest.mark.parametrize(("who", "sees"), [(OPERATOR, 1), (AUDITOR, 1), (SERVICE, 1), (USER, 1), (OWNER, 1)])
async def test_who_sees_a_site(rig: Rig, who: Caller, sees: int) -> None:
    assert len((await rig.service.sites(SitesQuery(), who)).sites) == sees


async def test_an_owner_sees_the_own_site_only_and_another_reads_as_not_there(rig: Rig) -> None:
    other = caller(Role.SITE_OWNER, site=OTHER)
    assert (await rig.service.sites(SitesQuery(), other)).sites == []
    with pytest.raises(NotFound):
        await rig.service.sites(SitesQuery(site=SITE), other)


CORDON = CordonPool(site=SITE, reason="power work")


@pytest.mark.parametrize("who", [OPERATOR, OWNER])
async def test_operator_and_owner_may_cordon(rig: Rig, who: Caller) -> None:
    assert all(pool.cordoned for pool in (await rig.service.cordon(CORDON, who)).pools)


@pytest.mark.parametrize(("who", "refusal"), [(USER, Denied), (SERVICE, Denied), (caller(Role.SITE_OWNER, site=OTHER), NotFound)])
async def test_nobody_else_may_cordon(rig: Rig, who: Caller, refusal: type[Exception]) -> None:
    with pytest.raises(refusal):
        await rig.service.cordon(CORDON, who)


@pytest.mark.parametrize("verb", ["register", "audit"])
async def test_registering_is_for_services_and_the_audit_for_operators_and_auditors(rig: Rig, verb: str) -> None:
    asked: dict[str, Any] = {"register": REQUEST, "audit": AuditQuery()}
    with pytest.raises(Denied):
        await getattr(rig.service, verb)(asked[verb], USER)
