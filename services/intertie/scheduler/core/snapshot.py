"""Everything one round knows, put together from the store's rows, what other keepers told, what is seen and who is heard."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, time
from decimal import Decimal

from intertie.contracts.site import DeviceKind, DowntimeEffect, PoolRecord, SiteKind, SiteRecord
from intertie.contracts.usage import MeterSpec
from intertie.ids import PoolName, SiteName, TenantName
from intertie.planner import Avoided, Budget, Down, Holding, PoolView, QueuedJob, Snapshot, cost_ceiling, spec_in_force
from intertie.planner.prices import price_per_hour
from intertie.scheduler.core.backoff import BackOff
from intertie.scheduler.core.given import RoundInput
from intertie.scheduler.core.grants import reserved
from intertie.scheduler.core.hearing import Hearing
from intertie.scheduler.core.life import queued
from intertie.scheduler.core.rows import Attempt, Job
from intertie.scheduler.core.sight import Sight
from intertie.scheduler.core.windows import is_open
from intertie.scheduler.core.world import World

# Thousandths of a device × microseconds in one device-hour.
MILLI_US_PER_HOUR = 1_000 * 3_600 * 1_000_000


def assemble(
    given: RoundInput, world: World, sight: Sight, hearing: Hearing, *, now: datetime, now_s: float, local: time, epoch: int = 0
) -> Snapshot:
    """`local`: the wall clock by which lending windows are read. `epoch`: of this service; older jobs wait for every site's word."""
    joined = sorted(site for site, record in world.sites.items() if record.left_at is None)
    untold = tuple(site for site in joined if not hearing.told(site)) if any(job.epoch < epoch for job in given.queue) else ()
    return Snapshot(
        queue=tuple(_queued(job, given, untold if job.epoch < epoch else ()) for job in given.queue),
        pools=pool_views(world, sight, hearing, given.back_offs, now=now, now_s=now_s, local=local),
        holdings=tuple(holding(attempt) for attempt in given.live if attempt.holding),
        mappings=world.mapped(),
        quotas=tuple(given.quotas),
        budgets=_budgets(given, world, now),
        specs=tuple(spec for _, spec in sorted(world.specs.items())),
        reserved=reserved(given.grants, given.live, hearing, now=now, now_s=now_s),
    )


def _queued(job: Job, given: RoundInput, untold: tuple[SiteName, ...]) -> QueuedJob:
    avoided = tuple(Avoided(back.site, back.until, back.why) for back in given.avoided.get(job.job, ()))
    return queued(job, avoided=avoided, unsure=untold)


def holding(attempt: Attempt) -> Holding:
    record = attempt.record
    return Holding(record.attempt, record.tenant, record.site, record.pool, record.kind, tuple(record.devices), counted=attempt.live)


def _pause_told(site: SiteRecord | None) -> str:
    if site is None or not site.paused:
        return ""
    until = f" until {site.paused_until:%Y-%m-%d %H:%M}Z" if site.paused_until else ""
    return until + (f": {site.paused_reason}" if site.paused_reason else "")


def _condition(site: SiteRecord | None) -> str:
    return "" if site is None or site.accepting else site.condition or "it says so"


def pool_views(
    world: World,
    sight: Sight,
    hearing: Hearing,
    back_offs: Mapping[SiteName, BackOff],
    *,
    now: datetime,
    now_s: float,
    local: time,
) -> tuple[PoolView, ...]:
    """Every pool of every site that is known, whatever its state: what is not offered must still be explained."""
    views: list[PoolView] = []
    for (name, pool), record in sorted(world.pools.items()):
        site = world.sites.get(name)
        back = back_offs.get(name)
        revoked = world.revoked(name)
        views.append(
            PoolView(
                site=name,
                pool=pool,
                profile=record.profile,
                phase=record.phase,
                freshness=record.freshness,
                heard=hearing.heard(name, now_s),
                caught_up=hearing.caught_up(name),
                last_heard=hearing.last_heard(name) or record.last_heard,
                cordoned=record.cordoned or revoked,
                draining=record.draining,
                cordon_reason="the keys of the site are revoked" if revoked else record.cordon_reason,
                accepting=record.inventory.accepting if record.inventory else True,
                lending_now=is_open(record.profile.lendable.windows, local),
                single_user=site.single_user if site else False,
                owner_tenant=site.owner_tenant if site else "",
                devices=sight.devices(name, pool, record.inventory, now=now, now_s=now_s, offset_s=hearing.offset_s(name)),
                back_off_until=back.until if back else None,
                back_off_why=back.why if back else "",
                paused=site.paused if site else False,
                pause_told=_pause_told(site),
                condition=_condition(site),
                unproven=record.unproven,
                self_stop=site.self_stop if site else False,
                one_node=record.kind is SiteKind.MACHINES,
                mode=record.mode,
                tenants=tuple(record.tenants),
                downtimes=_downtimes(record, now),
                offerings=tuple(record.offerings),
                images=record.inventory.images if record.inventory else None,
            )
        )
    return tuple(views)


def _downtimes(record: PoolRecord, now: datetime) -> tuple[Down, ...]:
    return tuple(Down(one.start, one.end, one.reason) for one in record.downtimes if one.effect is DowntimeEffect.FULL and one.end > now)


def _budgets(given: RoundInput, world: World, now: datetime) -> tuple[Budget, ...]:
    """What tenants with a limited allowance have spent of it: ended attempts by what they used, live ones by the most they can."""
    committed: dict[TenantName, Decimal] = {tenant: Decimal(0) for tenant in world.limited()}
    specs = {tenant: spec_in_force(world.specs.values(), tenant, now) for tenant in committed}
    for used in given.used:
        per_hour = _price(specs.get(used.tenant), used.kind, world, used.site, used.pool)
        committed[used.tenant] += per_hour * used.quantity_milli_us / MILLI_US_PER_HOUR
    for attempt in given.live:
        if attempt.live and attempt.record.tenant in committed:
            committed[attempt.record.tenant] += _ceiling(attempt, specs[attempt.record.tenant], world)
    return tuple(
        Budget(tenant, allowance.currency, allowance.amount, allowance.valid_until, committed.get(tenant, Decimal(0)))
        for tenant, (allowance, _) in sorted(world.allowances.items())
    )


def _ceiling(attempt: Attempt, spec: MeterSpec | None, world: World) -> Decimal:
    record = attempt.record
    return cost_ceiling(_price(spec, record.kind, world, record.site, record.pool), len(record.devices), attempt.wall_s)


def _price(spec: MeterSpec | None, kind: DeviceKind, world: World, site: SiteName, pool: PoolName) -> Decimal:
    """Zero where nothing is agreed: the planner places nothing more there for a tenant with a limit."""
    record = world.pools.get((site, pool))
    model = record.profile.accelerator if record and kind is DeviceKind.GPU else ""
    return (price_per_hour(spec, kind, model) if spec else None) or Decimal(0)
