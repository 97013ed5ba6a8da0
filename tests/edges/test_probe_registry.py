"""Probes and drift at the registry, on PostgreSQL and its twin: signed, once, kept in order, one incident per pool that opens and ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from tests.edges.test_registry_drills import OPERATOR, OTHER
from tests.edges.test_registry_store import REQUEST, SITE, A, on_postgres

from intertie.clock import ManualClock
from intertie.contracts.base import decode, encode
from intertie.contracts.incident import FaultReported
from intertie.contracts.link import Inventory, Lane, ProbeTold
from intertie.contracts.observed import PoolSeen
from intertie.contracts.probe import ProbeOutcome, ProbeReport, ProofsQuery
from intertie.contracts.site import Device, DeviceKind, DeviceObserved, DeviceState, PoolInventory, SitesQuery
from intertie.errors import NotFound
from intertie.ids import DeviceId, Digest, JournalId, PoolName, SiteName
from intertie.lane.tables import LaneEntry
from intertie.registry.memory import MemoryRegistryStore
from intertie.registry.observed import MemoryProofs, PgProofs, Proofs
from intertie.registry.pg import PgRegistryStore
from intertie.registry.store import RegistryStore
from intertie.store import StoreTx
from intertie.trust.keys import Key
from intertie.trust.seal import seal

T0 = datetime(2026, 5, 1, 12, tzinfo=UTC)
KEY, STRANGER = Key.new("U"), Key.new("U")


class World:
    def __init__(self, store: RegistryStore) -> None:
        self.store = store
        self.kept = MemoryProofs(store) if isinstance(store, MemoryRegistryStore) else PgProofs(store)  # type: ignore[arg-type]
        self.clock = ManualClock(T0)
        self.proofs = Proofs(self.kept, store, self.clock, site_key=self._key)
        self.seq = 0

    async def _key(self, site: SiteName) -> str:
        return KEY.public

    async def faults(self) -> list[tuple[str, bool]]:
        """(key, recovered) of every fault reported, in order."""
        if isinstance(self.store, MemoryRegistryStore):
            told = [event for event in self.store.memory.events if isinstance(event, FaultReported)]
        else:
            assert isinstance(self.store, PgRegistryStore)
            async with self.store.db.transaction() as tx:
                rows = await tx.all("SELECT body FROM outbox WHERE type LIKE '%fault%' ORDER BY id")
            told = [decode(row["body"], FaultReported) for row in rows]
        return [(event.report.key, event.report.recovered) for event in told]

    async def tell(self, report: ProbeReport, *, key: Key = KEY, pool: PoolName = A) -> None:
        self.seq += 1
        said = ProbeTold(seq=self.seq, at=T0, pool=pool, sealed=seal(key, encode(report), key.public))
        entry = LaneEntry(SITE, Lane.REGISTRY, JournalId("jrn-1"), self.seq, Digest("d"), b"", T0)

        async def mark(tx: StoreTx) -> None:
            pass

        await self.proofs.told(entry, said, mark)

    async def observe(self, *states: DeviceState, seen: PoolSeen | None = None) -> None:
        devices = [DeviceObserved(device=Device(id=DeviceId(f"GPU-{n}"), kind=DeviceKind.GPU), state=s) for n, s in enumerate(states)]
        self.seq += 1

        async def mark(tx: StoreTx) -> None:
            pass

        inventory = PoolInventory(pool=A, devices=devices, running=0, waiting=0, seen=seen)
        await self.store.observed(SITE, Inventory(seq=self.seq, at=T0 + timedelta(seconds=self.seq), pools=[inventory]), now=T0, mark=mark)


@pytest.fixture(params=["pg", "memory"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        store: RegistryStore = MemoryRegistryStore()
        await store.register(REQUEST, actor="identity", now=T0)
        yield World(store)
        return
    async with on_postgres(request.getfixturevalue("pg")) as found:
        await found.register(REQUEST, actor="identity", now=T0)
        yield World(found)


def report(name: str, outcome: ProbeOutcome = ProbeOutcome.PASSED, **measures: int) -> ProbeReport:
    return ProbeReport(
        probe=name,
        site=SITE,
        pool=A,
        kind=DeviceKind.GPU,
        device=DeviceId("GPU-0"),
        account="acct",
        at=T0,
        outcome=outcome,
        reason="" if outcome is ProbeOutcome.PASSED else "it sees 0",
        measures=measures,
    )


async def test_probes_are_kept_once_and_in_order_and_a_failure_is_one_incident_until_one_passes(world: World) -> None:
    await world.tell(report("p-1", cpu_hash_mib_s=900))
    await world.tell(report("p-2", ProbeOutcome.FAILED))
    await world.tell(report("p-2", ProbeOutcome.FAILED))
    await world.tell(report("p-3", ProbeOutcome.UNPROVEN))
    (told,) = (await world.proofs.proofs(ProofsQuery(site=SITE, pool=A), OPERATOR)).pools
    assert [one.probe for one in told.trend] == ["p-3", "p-2", "p-1"]
    assert told.last is not None and told.last.outcome is ProbeOutcome.UNPROVEN and told.passed_at == T0
    assert set(await world.faults()) == {(f"registry.probe/{SITE}/{A}", True), (f"registry.probe/{SITE}/{A}", False)}
    assert (await world.faults())[-1] == (f"registry.probe/{SITE}/{A}", False), "what proves nothing ends nothing"


async def test_what_the_site_s_key_did_not_sign_counts_for_nothing(world: World) -> None:
    await world.tell(report("p-1"), key=STRANGER)
    await world.tell(report("p-2"), pool=PoolName("pool-b"))
    told = (await world.proofs.proofs(ProofsQuery(site=SITE), OPERATOR)).pools
    assert [one.last for one in told] == [None, None]
    assert {key for key, _ in await world.faults()} == {f"registry.probe_seal/{SITE}"}


async def test_drift_opens_one_incident_with_its_numbers_and_ends_it(world: World) -> None:
    await world.observe(DeviceState.FREE, DeviceState.FREE, seen=PoolSeen(models={"A100-SXM4-80GB": 2}, memory_mib=81_559, links=12))
    await world.proofs.look()
    assert await world.faults() == []
    await world.observe(DeviceState.FREE, seen=PoolSeen(models={"A100-SXM4-80GB": 1}, memory_mib=40_960, links=12))
    for _ in range(3):
        await world.proofs.look()
    (told,) = (await world.proofs.proofs(ProofsQuery(site=SITE, pool=A), OPERATOR)).pools
    assert [(one.what, one.declared, one.observed) for one in told.drift] == [("count", "2", "1"), ("memory", "81920 MiB", "40960 MiB")]
    assert await world.faults() == [(f"registry.drift/{SITE}/{A}", False)]
    await world.observe(DeviceState.FREE, DeviceState.FREE, seen=PoolSeen(models={"A100-SXM4-80GB": 2}, memory_mib=81_920, links=12))
    await world.proofs.look()
    assert (await world.faults())[-1] == (f"registry.drift/{SITE}/{A}", True)


async def test_another_owner_s_site_is_not_there(world: World) -> None:
    with pytest.raises(NotFound):
        await world.proofs.proofs(ProofsQuery(site=SITE), OTHER)


async def test_a_hub_that_asks_for_proof_says_of_each_pool_why_it_has_none_and_by_default_asks_for_none(world: World) -> None:
    async def unproven() -> str:
        _, pools = await world.store.sites(SitesQuery(site=SITE))
        return next(record.unproven for record in pools if record.pool == A)

    await world.proofs.look()
    assert await unproven() == ""
    asking = Proofs(world.kept, world.store, world.clock, site_key=world._key, max_age_days=2)
    world.proofs = asking
    for told, said in [
        (None, "no probe has passed yet"),
        (report("p-1"), ""),
        (report("p-2", ProbeOutcome.UNPROVEN), ""),
        (report("p-3", ProbeOutcome.FAILED), "the last probe failed: it sees 0"),
        (report("p-4"), ""),
    ]:
        if told is not None:
            await world.tell(told)
        await asking.look()
        assert await unproven() == said
    world.clock.advance(3 * 86_400)
    await asking.look()
    assert await unproven() == "the last probe that passed is 3 days old, 2 are allowed"
