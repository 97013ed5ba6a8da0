"""Decisions about pools as calls, on PostgreSQL and its twin: who may, what is kept of it, and what is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

import msgspec
import pytest
from tests.core.test_registry_modes import SPEC
from tests.edges.test_registry_service import caller
from tests.edges.test_registry_store import GPUS, REQUEST, SITE, T0, A, actions, holds, inventory, on_postgres, told, unmarked

from intertie.bus.rpc import Caller
from intertie.clock import ManualClock
from intertie.contracts.identity import Role
from intertie.contracts.link import ProfileDeclared
from intertie.contracts.modes import DecideMode, DeclareDowntime, MovePhase, PoolHistoryRow, PoolQuery, RemoveDowntime
from intertie.contracts.site import AccessMode, CordonPool, Freshness, Phase, PoolRecord, SitesQuery
from intertie.contracts.usage import MeterSpec
from intertie.errors import Conflict, Denied, NotFound, Refused
from intertie.ids import PoolName, SiteName
from intertie.registry.core.freshness import Judgement
from intertie.registry.memory import MemoryRegistryStore
from intertie.registry.modes import Modes
from intertie.registry.pg import PgRegistryStore
from intertie.registry.store import RegistryStore
from intertie.store import Violated

OTHER = "operator"


def named(name: str, *roles: Role, site: str | None = None) -> Caller:
    one = caller(*roles, site=site)
    return Caller(msgspec.structs.replace(one.claims, name=name), "")


OPERATOR, OWNER = named(OTHER, Role.OPERATOR), named("ann", Role.SITE_OWNER, site=SITE)


@pytest.fixture(params=["pg", "memory"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[RegistryStore]:
    if request.param == "memory":
        yield MemoryRegistryStore()
        return
    async with on_postgres(request.getfixturevalue("pg")) as found:
        yield found


@pytest.fixture
async def calls(store: RegistryStore) -> Modes:
    await store.register(REQUEST, actor="identity", now=T0)

    async def specs(site: SiteName) -> Sequence[MeterSpec]:
        return [msgspec.structs.replace(SPEC, effective_from=T0)] if site == SITE else []

    return Modes(store, ManualClock(T0), specs)


async def pool_of(store: RegistryStore) -> PoolRecord:
    _, pools = await store.sites(SitesQuery(site=SITE))
    return next(one for one in pools if one.pool == A)


async def rows_of(calls: Modes) -> list[PoolHistoryRow]:
    return (await calls.history(PoolQuery(site=SITE, pool=A), OPERATOR)).rows


async def drained(store: RegistryStore) -> None:
    """Drained, heard, and nothing of ours on its cards."""
    await store.cordon(CordonPool(site=SITE, pool=A, drain=True, reason="its mode changes"), actor="prn-1", now=T0)
    await store.observed(SITE, inventory(1, holds(A, "GPU-1", "GPU-2")), now=T0, mark=unmarked)
    async with store.leading("judge") as leader:
        fresh = Judgement(freshness=Freshness.FRESH, hears_us=True)
        await store.heard(SITE, fresh, last_heard=T0, clock_offset_s=0.0, leader=leader, now=T0)


def decision(mode: AccessMode) -> DecideMode:
    return DecideMode(site=SITE, pool=A, mode=mode, outsider_decides=True, response_time_held=True, reason="a talk with the owner")


async def test_joining_leaves_a_decision_with_its_person_and_its_day(store: RegistryStore, calls: Modes) -> None:
    (row,) = await rows_of(calls)
    assert row.decision is not None and row.decision.at_joining
    assert (row.number, row.by, row.decision.mode, row.decision.decided_at) == (1, "ann", AccessMode.MANAGED, T0)
    assert (await pool_of(store)).decision == row.decision


async def test_the_database_changes_nothing_that_was_decided(store: RegistryStore, calls: Modes) -> None:
    if not isinstance(store, PgRegistryStore):
        return  # The twin has no way to change one.
    before = await rows_of(calls)
    for statement in ("UPDATE pool_decision SET number = number + 1", "DELETE FROM pool_decision", "TRUNCATE pool_decision"):
        with pytest.raises(Violated) as violated:
            async with store.db.transaction() as tx:
                await tx.run(statement)
        assert violated.value.constraint == "pool_decision_append_only"
    assert before and await rows_of(calls) == before


async def test_a_change_of_mode_waits_for_a_drained_pool_and_is_a_new_row_beside_the_old_one(store: RegistryStore, calls: Modes) -> None:
    with pytest.raises(Conflict):
        await calls.decide(decision(AccessMode.SERVICE), OWNER)
    await drained(store)
    record = await calls.decide(decision(AccessMode.SERVICE), OWNER)
    assert record.mode is None
    newest, first = await rows_of(calls)
    assert newest.decision is not None and first.decision is not None
    assert (newest.number, newest.decision.mode, first.decision.mode) == (2, AccessMode.SERVICE, AccessMode.MANAGED)
    assert (f"{SITE}/{A}", record.version) in await told(store)
    assert (await actions(store))[-1] == "pool.mode"
    declared = ProfileDeclared(seq=2, at=T0, profile=msgspec.structs.replace(GPUS, mode=AccessMode.SERVICE))
    assert await store.declared(SITE, declared, now=T0, mark=unmarked) is None
    assert (await pool_of(store)).mode is AccessMode.SERVICE


async def test_a_phase_goes_forward_by_another_person_and_back_by_the_owner(store: RegistryStore, calls: Modes) -> None:
    forward = MovePhase(site=SITE, pool=A, phase=Phase.PARALLEL, reason="two weeks of pilot")
    for own in (OWNER, named("ann", Role.OPERATOR)):
        with pytest.raises(Refused, match="another person"):
            await calls.move(forward, own)
    await calls.move(forward, OPERATOR)
    record = await calls.move(MovePhase(site=SITE, pool=A, phase=Phase.SUSPENDED, reason="cooling failed"), OWNER)
    assert record.phase is Phase.SUSPENDED
    back, on = (await rows_of(calls))[:2]
    assert back.move is not None and on.move is not None
    assert (on.move.spec, on.by, back.move.spec, back.by) == ("spec-1 rev 2", OTHER, "", "ann")
    assert (await actions(store))[-2:] == ["pool.phase", "pool.phase"]


async def test_a_downtime_is_added_once_and_taken_back(store: RegistryStore, calls: Modes) -> None:
    request = DeclareDowntime(site=SITE, pool=A, start=T0 + timedelta(hours=30), end=T0 + timedelta(hours=34), reason="new switches")
    (one,) = (await calls.declare_downtime(request, OWNER)).downtimes
    assert one.planned
    assert (await calls.declare_downtime(request, OPERATOR)).downtimes == [one]
    assert (await calls.remove_downtime(RemoveDowntime(site=SITE, pool=A, id=one.id), OPERATOR)).downtimes == []
    removed, added = (await rows_of(calls))[:2]
    assert (removed.removed, added.removed, added.downtime) == (True, False, one)


async def test_what_is_not_there_or_not_yours_reads_the_same(calls: Modes) -> None:
    with pytest.raises(NotFound):
        await calls.history(PoolQuery(site=SITE, pool=PoolName("pool-z")), OPERATOR)
    with pytest.raises(NotFound):
        await calls.history(PoolQuery(site=SITE, pool=A), named("eve", Role.SITE_OWNER, site="site-b"))
    with pytest.raises(Denied):
        await calls.decide(decision(AccessMode.MANAGED), named("tom", Role.TENANT_USER))
