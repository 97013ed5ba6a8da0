"""One suite for the store of the registry: PostgreSQL and the twin in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from tests.conftest import PgDatabase

from intertie.contracts.identity import AuditQuery
from intertie.contracts.link import Inventory, ProfileDeclared
from intertie.contracts.site import (
    CordonPool,
    Device,
    DeviceKind,
    DeviceObserved,
    DeviceState,
    Freshness,
    Lendable,
    Phase,
    PoolInventory,
    PoolProfile,
    RegisterSite,
    SiteKind,
    SitesQuery,
    TaskType,
)
from intertie.errors import Conflict, NotFound, Refused, Stale
from intertie.ids import DeviceId, PoolName, SiteName
from intertie.registry.core.freshness import Judgement
from intertie.registry.memory import MemoryRegistryStore
from intertie.registry.pg import PACKAGE, PgRegistryStore, Q
from intertie.registry.store import RegistryStore
from intertie.store import Database, StoreTx
from intertie.store.checks import check_queries

T0 = datetime(2026, 5, 1, 12, tzinfo=UTC)
SITE = SiteName("site-a")
A, B = PoolName("pool-a"), PoolName("pool-b")

GPUS = PoolProfile(
    pool=A,
    accelerator="A100-SXM4-80GB",
    count=2,
    memory_mib=81_920,
    interconnect="nvlink",
    task_types=[TaskType.TRAIN],
    lendable=Lendable(devices=2),
)
REQUEST = RegisterSite(
    site=SITE,
    kind=SiteKind.MACHINES,
    title="Site A",
    owner="ann",
    single_user=False,
    owner_tenant="team-a",
    agent_version="1.0",
    pools=[GPUS, msgspec.structs.replace(GPUS, pool=B, accelerator="H100", task_types=[TaskType.INFERENCE])],
)


@asynccontextmanager
async def on_postgres(pg: PgDatabase) -> AsyncIterator[PgRegistryStore]:
    db = await Database.open(pg.url, password=pg.password, schema="registry")
    try:
        await db.migrate(PACKAGE)
        yield PgRegistryStore(db)
    finally:
        await db.close()


@pytest.fixture(params=["pg", "memory"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[RegistryStore]:
    if request.param == "memory":
        yield MemoryRegistryStore()
        return
    async with on_postgres(request.getfixturevalue("pg")) as found:
        yield found


async def told(store: RegistryStore) -> list[tuple[str, int]]:
    """(entity, version) of every event emitted, in order."""
    if isinstance(store, MemoryRegistryStore):
        return [(event.entity, event.version) for event in store.memory.events]
    assert isinstance(store, PgRegistryStore)
    async with store.db.transaction() as tx:
        return [(row["entity"], row["version"]) for row in await tx.all("SELECT entity, version FROM outbox ORDER BY id")]


async def unmarked(tx: StoreTx) -> None:
    """The mark of an entry that is not on a lane."""


async def actions(store: RegistryStore) -> list[str]:
    return [row.action for row in reversed(await store.read_audit(AuditQuery()))]


def holds(pool: PoolName, *cards: str, running: int = 0) -> PoolInventory:
    devices = [DeviceObserved(device=Device(id=DeviceId(c), kind=DeviceKind.GPU), state=DeviceState.FREE) for c in cards]
    return PoolInventory(pool=pool, devices=devices, running=running, waiting=0)


def inventory(seq: int, *pools: PoolInventory, at: datetime = T0) -> Inventory:
    return Inventory(seq=seq, at=at, pools=list(pools))


def declaration(**changes: Any) -> ProfileDeclared:
    return ProfileDeclared(seq=1, at=T0, profile=msgspec.structs.replace(GPUS, **changes))


async def test_registering_tells_the_site_and_its_pools(store: RegistryStore) -> None:
    record = await store.register(REQUEST, actor="identity", now=T0)
    assert (record.freshness, record.version) == (Freshness.UNKNOWN, 1)
    sites, pools = await store.sites(SitesQuery())
    assert sites == [record] and [(p.pool, p.phase, p.profile.revision) for p in pools] == [(A, Phase.PILOT, 1), (B, Phase.PILOT, 1)]
    assert await told(store) == [("site-a", 1), ("site-a/pool-a", 1), ("site-a/pool-b", 1)]


async def test_registering_again_changes_and_tells_nothing(store: RegistryStore) -> None:
    first = await store.register(REQUEST, actor="identity", now=T0)
    again = await store.register(REQUEST, actor="identity", now=T0 + timedelta(days=1))
    assert again == first
    assert len(await told(store)) == 3 and await actions(store) == ["site.register"]


async def test_a_site_with_a_vague_pool_is_not_registered_at_all(store: RegistryStore) -> None:
    vague = msgspec.structs.replace(REQUEST, pools=[GPUS, msgspec.structs.replace(GPUS, pool=B, accelerator="gpu")])
    with pytest.raises(Refused) as refused:
        await store.register(vague, actor="identity", now=T0)
    assert refused.value.code == "registry.profile.accelerator"
    assert await store.sites(SitesQuery()) == ([], []) and await told(store) == []


async def test_a_site_stays_of_its_kind(store: RegistryStore) -> None:
    await store.register(REQUEST, actor="identity", now=T0)
    with pytest.raises(Conflict):
        await store.register(msgspec.structs.replace(REQUEST, kind=SiteKind.SLURM), actor="identity", now=T0)


async def test_a_refused_declaration_is_reported_and_the_revision_before_stands(store: RegistryStore) -> None:
    await store.register(REQUEST, actor="identity", now=T0)
    refusal = await store.declared(SITE, declaration(interconnect="unknown"), now=T0, mark=unmarked)
    assert refusal is not None and refusal.code == "registry.profile.interconnect"
    _, pools = await store.sites(SitesQuery())
    assert pools[0].profile.interconnect == "nvlink" and pools[0].profile.revision == 1
    assert (await told(store))[-1][0] == "fault/registry/registry.profile/site-a/pool-a"
    assert (await store.read_audit(AuditQuery()))[0].result == "registry.profile.interconnect"


async def test_an_accepted_declaration_is_the_next_revision(store: RegistryStore) -> None:
    await store.register(REQUEST, actor="identity", now=T0)
    assert await store.declared(SITE, declaration(count=4), now=T0, mark=unmarked) is None
    assert await store.declared(SITE, declaration(count=4), now=T0, mark=unmarked) is None
    _, pools = await store.sites(SitesQuery())
    assert (pools[0].profile.revision, pools[0].profile.count) == (2, 4)


async def test_every_revision_is_kept_with_its_dates(pg: PgDatabase) -> None:
    async with on_postgres(pg) as store:
        await store.register(REQUEST, actor="identity", now=T0)
        await store.declared(SITE, declaration(count=4), now=T0 + timedelta(hours=1), mark=unmarked)
        async with store.db.transaction() as tx:
            rows = await tx.all("SELECT revision, declared_at, effective_at FROM profile_revision WHERE pool = 'pool-a' ORDER BY revision")
    assert [tuple(row) for row in rows] == [(1, T0, T0), (2, T0, T0 + timedelta(hours=1))]


async def test_a_mark_that_fails_undoes_the_whole_interpretation(store: RegistryStore) -> None:
    await store.register(REQUEST, actor="identity", now=T0)

    async def taken(tx: StoreTx) -> None:
        raise Stale("lane.out_of_turn", "somebody did it")

    with pytest.raises(Stale):
        await store.declared(SITE, declaration(count=4), now=T0, mark=taken)
    _, pools = await store.sites(SitesQuery())
    assert pools[0].profile.count == 2


async def test_inventories_of_one_second_are_told_once(store: RegistryStore) -> None:
    await store.register(REQUEST, actor="identity", now=T0)
    later = T0 + timedelta(seconds=5)
    for seq in range(1, 11):
        await store.observed(SITE, inventory(seq, holds(A, "g0", running=seq), at=later), now=later, mark=unmarked)
    assert [version for entity, version in await told(store) if entity == "site-a/pool-a"] == [1, 2]
    async with store.leading("judge") as leader:
        assert await store.tell(leader=leader, now=later + timedelta(seconds=1)) == 1
        assert await store.tell(leader=leader, now=later + timedelta(seconds=1)) == 0
    assert [version for entity, version in await told(store) if entity == "site-a/pool-a"] == [1, 2, 11]


async def test_an_inventory_that_no_event_could_carry_is_refused_and_stops_no_leader(store: RegistryStore) -> None:
    """Saved untold it would be told with the leader's next beat, which the bus's limit would end, at each start anew: for every site."""
    await store.register(REQUEST, actor="identity", now=T0)
    await store.observed(SITE, inventory(1, holds(A, "GPU-1"), at=T0), now=T0 + timedelta(seconds=2), mark=unmarked)
    soon = T0 + timedelta(seconds=2.5)
    many = holds(A, *(f"GPU-{n}" for n in range(12_000)))
    with pytest.raises(Refused) as refused:
        await store.observed(SITE, inventory(2, many, at=T0 + timedelta(seconds=1)), now=soon, mark=unmarked)
    assert refused.value.code == "registry.pool_too_large"
    async with store.leading("judge") as leader:
        await store.tell(leader=leader, now=soon + timedelta(seconds=2))
    _, pools = await store.sites(SitesQuery(site=SITE))
    assert [len(p.inventory.devices) for p in pools if p.inventory is not None] == [1]


async def test_an_inventory_that_says_nothing_new_is_not_told(store: RegistryStore) -> None:
    await store.register(REQUEST, actor="identity", now=T0)
    for minute in (1, 2, 3):
        at = T0 + timedelta(minutes=minute)
        await store.observed(SITE, inventory(minute, holds(A, "g0"), at=at), now=at, mark=unmarked)
    assert [version for entity, version in await told(store) if entity == "site-a/pool-a"] == [1, 2]
    _, pools = await store.sites(SitesQuery())
    assert pools[0].inventory_at == T0 + timedelta(minutes=3)


async def test_a_card_in_two_pools_counts_once_and_is_reported_when_it_begins_and_when_it_ends(store: RegistryStore) -> None:
    await store.register(REQUEST, actor="identity", now=T0)
    both = (holds(A, "g0"), holds(B, "g0", "g1"))
    for seq in (1, 2):
        await store.observed(SITE, inventory(seq, *both), now=T0, mark=unmarked)
    _, pools = await store.sites(SitesQuery())
    assert [[d.device.id for d in p.inventory.devices] for p in pools if p.inventory] == [["g0"], ["g1"]]
    await store.observed(SITE, inventory(3, holds(A, "g0"), holds(B, "g1")), now=T0, mark=unmarked)
    assert [entity for entity, _ in await told(store)].count("fault/registry/registry.device_twice/site-a") == 2


async def test_news_of_freshness_go_to_the_site_and_its_pools_and_nothing_else_is_told(store: RegistryStore) -> None:
    await store.register(REQUEST, actor="identity", now=T0)
    async with store.leading("judge") as leader:
        for beat in range(4):
            await store.heard(
                SITE,
                Judgement(Freshness.FRESH, True),
                last_heard=T0 + timedelta(seconds=beat),
                clock_offset_s=0.01 * beat,
                leader=leader,
                now=T0 + timedelta(seconds=beat),
            )
    sites, pools = await store.sites(SitesQuery())
    assert (sites[0].freshness, sites[0].hears_us, sites[0].version) == (Freshness.FRESH, True, 2)
    assert {pool.freshness for pool in pools} == {Freshness.FRESH}
    assert await told(store) == [
        ("site-a", 1),
        ("site-a/pool-a", 1),
        ("site-a/pool-b", 1),
        ("site-a", 2),
        ("site-a/pool-a", 2),
        ("site-a/pool-b", 2),
    ]


async def test_a_former_leader_judges_nothing(store: RegistryStore) -> None:
    await store.register(REQUEST, actor="identity", now=T0)
    for seq in (1, 2):
        await store.observed(SITE, inventory(seq, holds(A, "g0", running=seq), at=T0), now=T0, mark=unmarked)
    async with store.leading("judge") as former:
        pass
    async with store.leading("judge"):
        with pytest.raises(Stale):
            await store.heard(SITE, Judgement(Freshness.FRESH, True), last_heard=T0, clock_offset_s=None, leader=former, now=T0)
        with pytest.raises(Stale):
            await store.tell(leader=former, now=T0)


async def test_a_cordon_names_its_reason_and_is_lifted_with_its_drain(store: RegistryStore) -> None:
    await store.register(REQUEST, actor="identity", now=T0)
    [pool] = await store.cordon(CordonPool(site=SITE, pool=A, drain=True, reason="new switch"), actor="ops", now=T0)
    assert (pool.cordoned, pool.draining, pool.cordon_reason) == (True, True, "new switch")
    [pool] = await store.cordon(CordonPool(site=SITE, pool=A, on=False, reason="switch is in"), actor="ops", now=T0)
    assert (pool.cordoned, pool.draining, pool.cordon_reason) == (False, False, "")
    assert await actions(store) == ["site.register", "site.drain", "site.uncordon"]


async def test_a_whole_site_is_cordoned_pool_by_pool(store: RegistryStore) -> None:
    await store.register(REQUEST, actor="identity", now=T0)
    pools = await store.cordon(CordonPool(site=SITE, reason="power work"), actor="ops", now=T0)
    assert [(p.pool, p.cordoned) for p in pools] == [(A, True), (B, True)]


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (CordonPool(site=SITE, pool=A, reason=" "), Refused),
        (CordonPool(site=SITE, pool=PoolName("pool-z"), reason="why not"), NotFound),
        (CordonPool(site=SiteName("site-z"), reason="why not"), NotFound),
    ],
)
async def test_a_cordon_without_a_reason_or_a_pool_is_refused(store: RegistryStore, request_: CordonPool, kind: type[Exception]) -> None:
    await store.register(REQUEST, actor="identity", now=T0)
    with pytest.raises(kind):
        await store.cordon(request_, actor="ops", now=T0)
    assert await actions(store) == ["site.register"]


async def test_sites_are_found_by_what_their_pools_can_do(store: RegistryStore) -> None:
    await store.register(REQUEST, actor="identity", now=T0)
    sites, pools = await store.sites(SitesQuery(accelerator="h100", task_type=TaskType.INFERENCE))
    assert [s.site for s in sites] == [SITE] and [p.pool for p in pools] == [B]
    assert await store.sites(SitesQuery(accelerator="B200")) == ([], [])
    assert await store.sites(SitesQuery(site=SiteName("site-z"))) == ([], [])


async def test_postgresql_can_run_every_query_and_none_is_idle(pg: PgDatabase) -> None:
    async with on_postgres(pg) as store:
        assert await check_queries(store.db, Q) == []
