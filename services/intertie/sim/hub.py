"""The hub's processes: scheduler and metering wired as their `__main__` wires them, over disks in memory, and an office that answers for the
services that a scenario does not model (registry and identity: fixed facts, asked as snapshots)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

from intertie.bus import rpc
from intertie.bus.port import Bus
from intertie.bus.rpc import Caller
from intertie.clock import Clock
from intertie.contracts import endpoints
from intertie.contracts.audit import AnchorAudit, AuditAnchor, AuditHead
from intertie.contracts.base import Empty
from intertie.contracts.identity import (
    Claims,
    IdentitySnapshotReply,
    MappingRecord,
    MappingsChanged,
    Role,
    SiteKeyChanged,
    SiteKeyRecord,
)
from intertie.contracts.job import AttemptChanged, JobChanged
from intertie.contracts.link import Lane
from intertie.contracts.site import Freshness, Phase, PoolProfile, PoolRecord, SiteKind, SiteRecord, SitesQuery, SitesReply
from intertie.ids import PrincipalId, SiteName, TenantName
from intertie.lane.keeper import LaneKeeper
from intertie.lane.memory import MemoryLaneTables
from intertie.metering.service import Metering, trust
from intertie.runtime import Beat
from intertie.scheduler.wiring import wire
from intertie.sim.disk import MeteringDisk, SchedulerDisk
from intertie.store import EventConsumer, MemoryChain, MemoryStore, Relay
from intertie.store.chainer import BATCH, Chainer, anchor_by
from intertie.store.outbox import Leader
from intertie.trust.keys import Key

VERSION = "0.0.0"
# As metering's own `__main__`.
SWEEP_S = 30.0
# As the scheduler's own `__main__`: a month ends in it two minutes after a run begins.
ZONE = ZoneInfo("Asia/Shanghai")
FOR_EVER = 2**31


def claims_of(text: str) -> Claims:
    """`role:name` or `role:name:tenant`: who signs is not what a simulation is about."""
    role, name, *tenant = text.split(":")
    return Claims(
        iss=name if role == "service" else "identity",
        sub=PrincipalId(name),
        name=name,
        roles=[Role(role)],
        tenant=TenantName(tenant[0]) if tenant else None,
        iat=0,
        exp=FOR_EVER,
    )


OPERATOR = Caller(claims_of("operator:op"), "t" * 32)


@dataclass(frozen=True, slots=True)
class Limits:
    """What silence may do, and when: the lease of `rerun` work, and after how long an attempt is closed as lost; seconds."""

    lease_s: int
    lost_after_s: float


@dataclass(frozen=True, slots=True)
class Joined:
    """A site as registry and identity know it."""

    site: SiteName
    profile: PoolProfile
    key: str
    tenants: Sequence[TenantName]


class SimChain(MemoryChain):
    """A chainer at rest asks each beat, and most often there is nothing: then it is told so without a transaction."""

    async def extend(self, leader: Leader, limit: int = BATCH) -> int:
        if len(self._store.audits) == len(self._store.audit_links):
            await self._store.fence(leader)
            return 0
        return await super().extend(leader, limit)


def _chainer(store: MemoryStore, bus: Bus, service: str, scale: float) -> Chainer:
    return Chainer(SimChain(store), service, anchor_by(bus, lambda: f"service:{service}"), beat_s=scale)


async def scheduler(store: SchedulerDisk, bus: Bus, canary: Bus, clock: Clock, key: Key, scale: float, limits: Limits) -> None:
    """One copy of the scheduler, for ever. `canary`: its second connection, in the canary's account."""
    tables = MemoryLaneTables(store)
    parts = await wire(
        store,
        tables,
        bus,
        clock,
        key,
        lambda: "service:scheduler",
        zone=ZONE,
        scale=scale,
        canary=canary,
        lease_s=limits.lease_s,
        lost_after=timedelta(seconds=limits.lost_after_s),
    )
    consumer = EventConsumer(
        bus, store, "scheduler", parts.knowledge.handlers(), snapshot=parts.knowledge.snapshots(), beat_s=scale, clock=clock
    )

    async def calls() -> None:
        await rpc.serve(bus, "scheduler", VERSION, parts.scheduler.handlers(), verifier=claims_of)

    async with asyncio.TaskGroup() as group:
        group.create_task(parts.keeper.run(), name="scheduler-lane")
        group.create_task(parts.planner.run(), name="planner")
        group.create_task(parts.watch(), name="scheduler-watch")
        group.create_task(consumer.run(), name="scheduler-events")
        group.create_task(Relay(store, bus, "scheduler", beat_s=scale, clock=clock).run(), name="scheduler-relay")
        group.create_task(_chainer(store, bus, "scheduler", scale).run(), name="scheduler-audit")
        group.create_task(calls(), name="scheduler-calls")


async def metering(store: MeteringDisk, bus: Bus, clock: Clock, scheduler_key: str, scale: float) -> None:
    """One copy of metering, for ever."""
    sweep = Beat("metering-suspense", SWEEP_S, scale=scale)
    lanes = MemoryLaneTables(store)
    service = Metering(store, lanes, trust(scheduler_key), clock, news=sweep.hint)
    epoch = await store.epoch()
    keeper = LaneKeeper(bus, Lane.METERING, lanes, clock, interpret=service.interpret, epoch=lambda: epoch)
    consumer = EventConsumer(
        bus,
        store,
        "metering",
        {AttemptChanged: service.on_attempt, JobChanged: service.on_job, SiteKeyChanged: service.on_site_key},
        snapshot={
            "scheduler": lambda: service.learn_all_attempts(bus, "service:metering"),
            "identity": lambda: service.learn_all_keys(bus, "service:metering"),
        },
        beat_s=scale,
        clock=clock,
    )

    async def calls() -> None:
        await rpc.serve(bus, "metering", VERSION, service.endpoints(), verifier=claims_of)

    async with asyncio.TaskGroup() as group:
        group.create_task(keeper.run(), name="metering-lane")
        group.create_task(consumer.run(), name="metering-events")
        group.create_task(Relay(store, bus, "metering", beat_s=scale, clock=clock).run(), name="metering-relay")
        group.create_task(_chainer(store, bus, "metering", scale).run(), name="metering-audit")
        group.create_task(sweep.run(service.reconsider), name="metering-suspense")
        group.create_task(calls(), name="metering-calls")


async def office(bus: Bus, clock: Clock, sites: Sequence[Joined], anchored: Callable[[AuditHead], AuditAnchor]) -> None:
    """Registry and identity, as far as others ask them for what they know. `anchored`: keeps the head of a service's audit chain."""
    at = clock.now()

    async def anchor(ask: AnchorAudit, _caller: Caller) -> AuditAnchor:
        return anchored(ask.head)

    records = [_site(one, at) for one in sites]
    pools = [_pool(one, at) for one in sites]

    async def told(_ask: SitesQuery, _caller: Caller) -> SitesReply:
        return SitesReply(sites=records, pools=pools)

    async def known(_ask: Empty, _caller: Caller) -> IdentitySnapshotReply:
        return IdentitySnapshotReply(
            tenants=[],
            mappings=[
                MappingsChanged(
                    version=1, site=one.site, mappings=[MappingRecord(tenant=t, site=one.site, account=str(t)) for t in one.tenants]
                )
                for one in sites
            ],
            site_keys=[
                SiteKeyChanged(version=1, record=SiteKeyRecord(site=one.site, site_key=one.key, signing_key="", account=""))
                for one in sites
            ],
        )

    await rpc.serve(bus, "registry", VERSION, {endpoints.SITES: told}, verifier=claims_of)
    await rpc.serve(bus, "identity", VERSION, {endpoints.IDENTITY_SNAPSHOT: known, endpoints.ANCHOR_AUDIT: anchor}, verifier=claims_of)


def _site(one: Joined, at: Any) -> SiteRecord:
    return SiteRecord(
        site=one.site,
        kind=SiteKind.MACHINES,
        title="",
        owner="owner",
        single_user=False,
        owner_tenant=str(one.tenants[0]),
        freshness=Freshness.FRESH,
        joined_at=at,
        last_heard=at,
        hears_us=True,
        clock_offset_s=0.0,
        agent_version=VERSION,
        self_stop=True,
        version=1,
    )


def _pool(one: Joined, at: Any) -> PoolRecord:
    return PoolRecord(
        site=one.site,
        pool=one.profile.pool,
        kind=SiteKind.MACHINES,
        profile=one.profile,
        phase=Phase.PRODUCTION,
        cordoned=False,
        draining=False,
        cordon_reason="",
        freshness=Freshness.FRESH,
        last_heard=at,
        inventory=None,
        inventory_at=None,
        version=1,
    )
