"""A second look at a finished plan, written apart from the rules that made it: it counts everything again from the snapshot.

An objection is our bug. The scheduler refuses to publish a plan that has one.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from decimal import Decimal

from intertie.contracts.job import QuotaRecord
from intertie.contracts.site import AccessMode, DeviceState, Freshness, Phase
from intertie.lifecycle import PHASE_WORKS
from intertie.planner.model import Decision, Plan, PoolView, QueuedJob, Snapshot
from intertie.planner.prices import cost_ceiling, price_per_hour, spec_in_force


def objections(plan: Plan, snapshot: Snapshot, now: datetime) -> list[str]:
    """Everything that is wrong with the plan, in sentences; empty when nothing is."""
    jobs = {job.job: job for job in snapshot.queue}
    pools = {(pool.site, pool.pool): pool for pool in snapshot.pools}
    found: list[str] = []
    for decision in plan.decisions:
        job, pool = jobs.get(decision.job), pools.get((decision.site, decision.pool))
        if job is None:
            found.append(f"{decision.job} is placed but not queued")
        elif pool is None:
            found.append(f"{decision.job} is placed in {decision.site}/{decision.pool}, which is not known")
        else:
            found += _of_one(decision, job, pool, snapshot, now)
    found += _jobs_twice(plan)
    found += _devices_twice(plan, snapshot)
    found += _shares(plan, snapshot)
    found += [text for quota in snapshot.quotas if (text := _quota(quota, plan, snapshot))]
    found += _budgets(plan, snapshot, now)
    return found


def _of_one(decision: Decision, job: QueuedJob, pool: PoolView, snapshot: Snapshot, now: datetime) -> list[str]:
    where = f"{decision.job} at {pool.name}"
    found: list[str] = []
    if decision.tenant != job.tenant:
        found.append(f"{where}: is of tenant {job.tenant}, not {decision.tenant}")
    if len(decision.devices) != job.resources.count or decision.kind is not job.resources.kind:
        found.append(f"{where}: asks {job.resources.count} {job.resources.kind}, gets {len(decision.devices)} {decision.kind}")
    if (job.site not in (None, pool.site)) or (job.pool not in (None, pool.pool)):
        found.append(f"{where}: is pinned to {job.site}/{job.pool}")
    if pool.freshness is not Freshness.FRESH or not pool.heard or not pool.caught_up:
        found.append(f"{where}: the site is not fresh, heard and caught up")
    wanted = AccessMode.SERVICE if decision.offering else AccessMode.MANAGED
    if pool.mode is None or pool.profile.mode is not wanted or pool.phase not in PHASE_WORKS:
        found.append(f"{where}: mode {pool.profile.mode}, phase {pool.phase}")
    if decision.offering != job.offering or (job.offering and pool.offering(job.offering) is None):
        found.append(f"{where}: asks {job.offering or 'nobody'}, is sent to {decision.offering or 'nobody'}")
    lending = pool.lending_now or bool(decision.offering)
    if pool.cordoned or pool.draining or not pool.accepting or not lending or pool.paused or pool.condition:
        found.append(f"{where}: the pool takes no work")
    if pool.tenants and pool.phase is not Phase.PRODUCTION and job.tenant not in pool.tenants:
        found.append(f"{where}: in phase {pool.phase} it is not for tenant {job.tenant}")
    found += [
        f"{where}: it may run until {now + timedelta(seconds=job.wall_s)}, and the pool is down from {down.start}"
        for down in pool.downtimes
        if now < down.end and now + timedelta(seconds=job.wall_s) > down.start
    ]
    if job.rerun and not pool.self_stop:
        found.append(f"{where}: nobody there stops it at the end of its lease")
    if job.image and (pool.images is None or not pool.images.takes(job.image)):
        found.append(f"{where}: names image {job.image}, there: {pool.images.told if pool.images else 'not told'}")
    if job.unsure:
        found.append(f"{where}: it may run at {', '.join(job.unsure)}")
    free = {d.id for d in pool.devices if d.live and d.state is DeviceState.FREE and d.kind is decision.kind}
    chosen = () if decision.offering else decision.devices
    found += [f"{where}: {device} is not a live, free {decision.kind}" for device in chosen if device not in free]
    if pool.one_node and not decision.offering and len({d.node for d in pool.devices if d.id in decision.devices}) > 1:
        found.append(f"{where}: its devices lie on several nodes")
    accounts = {m.account for m in snapshot.mappings if m.site == pool.site and m.tenant == job.tenant}
    if pool.single_user and (job.tenant != pool.owner_tenant or decision.account):
        found.append(f"{where}: a single-user site takes its owner's tenant only")
    if not pool.single_user and (not decision.account or decision.account not in accounts):
        found.append(f"{where}: account {decision.account!r} is not what the tenant is mapped to")
    return found


def _jobs_twice(plan: Plan) -> list[str]:
    counts = Counter(decision.job for decision in plan.decisions)
    placed = set(counts)
    twice = [f"{job} is placed {times} times" for job, times in counts.items() if times > 1]
    return twice + [f"{verdict.job} is placed and waits" for verdict in plan.report.waiting if verdict.job in placed]


def _devices_twice(plan: Plan, snapshot: Snapshot) -> list[str]:
    held = Counter((h.site, h.pool, device) for h in snapshot.holdings for device in h.devices)
    given = Counter((d.site, d.pool, device) for d in plan.decisions for device in d.devices)
    return [
        f"{site}/{pool} {device} has {n + held[(site, pool, device)]} holders"
        for (site, pool, device), n in given.items()
        if n + held[(site, pool, device)] > 1
    ]


def _shares(plan: Plan, snapshot: Snapshot) -> list[str]:
    """Only pools that the plan adds to: a share that the owner cut below what runs is no fault of the plan."""
    added: Counter[tuple[str, str]] = Counter()
    for decision in plan.decisions:
        if decision.offering:
            continue
        added[(decision.site, decision.pool)] += len(decision.devices)
    found: list[str] = []
    for pool in snapshot.pools:
        key = (pool.site, pool.pool)
        held = len({device for h in snapshot.holdings if (h.site, h.pool) == key for device in h.devices})
        if added[key] and held + added[key] > pool.profile.lendable.devices:
            found.append(f"{pool.name} lends {pool.profile.lendable.devices}, the plan makes it {held + added[key]}")
    return found


def _quota(quota: QuotaRecord, plan: Plan, snapshot: Snapshot) -> str:
    def counts(tenant: str, site: str, kind: str) -> bool:
        return tenant == quota.tenant and kind == quota.kind and quota.site in (None, site)

    held = sum(len(h.devices) for h in snapshot.holdings if h.counted and counts(h.tenant, h.site, h.kind))
    held += sum(one.devices for one in snapshot.reserved if counts(one.tenant, one.site, one.kind))
    added = sum(len(d.devices) for d in plan.decisions if counts(d.tenant, d.site, d.kind))
    if added and held + added > quota.limit:
        return f"quota of {quota.tenant} at {quota.site or 'all sites'} is {quota.limit} {quota.kind}, the plan makes it {held + added}"
    return ""


def _budgets(plan: Plan, snapshot: Snapshot, now: datetime) -> list[str]:
    jobs = {job.job: job for job in snapshot.queue}
    pools = {(pool.site, pool.pool): pool for pool in snapshot.pools}
    found: list[str] = []
    for budget in snapshot.budgets:
        mine = [d for d in plan.decisions if d.tenant == budget.tenant and d.job in jobs and (d.site, d.pool) in pools]
        if budget.amount is None or not mine:
            continue
        total, spec = budget.committed, spec_in_force(snapshot.specs, budget.tenant, now)
        for decision in mine:
            model = pools[(decision.site, decision.pool)].profile.accelerator if decision.kind.value == "gpu" else ""
            per_hour = price_per_hour(spec, decision.kind, model) if spec else None
            if per_hour is None:
                found.append(f"{decision.job} has no price and its tenant {budget.tenant} a limited allowance")
            total += cost_ceiling(per_hour or Decimal(0), len(decision.devices), jobs[decision.job].wall_s)
        if total > budget.amount:
            found.append(f"tenant {budget.tenant} may spend {budget.amount}, the plan could make it {total}")
        if budget.valid_until is not None and now >= budget.valid_until:
            found.append(f"the allowance of tenant {budget.tenant} ended at {budget.valid_until.isoformat()}")
    return found
