"""The room that is left while a round goes on: devices, quotas, budgets, counted down with each decision."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime
from decimal import Decimal

from intertie.contracts.job import QuotaRecord
from intertie.contracts.site import DeviceKind, DeviceState
from intertie.contracts.usage import MeterSpec
from intertie.ids import DeviceId, PoolName, SiteName, TenantName
from intertie.planner.model import Budget, Decision, DeviceView, PoolView, QueuedJob, Snapshot
from intertie.planner.prices import cost_ceiling, price_per_hour, spec_in_force

PoolKey = tuple[SiteName, PoolName]

HEALTHY = frozenset({DeviceState.FREE, DeviceState.OURS, DeviceState.LOCAL})
"""States of a device that works, whoever holds it. Foreign, lost and unknown ones get no work and promise none."""


class Room:
    """Mutable on purpose, and private to one call of `plan`."""

    def __init__(self, snapshot: Snapshot, now: datetime) -> None:
        self.now = now
        self.accounts = {(m.site, m.tenant): m.account for m in snapshot.mappings}
        self.budgets: dict[TenantName, Budget] = {b.tenant: b for b in snapshot.budgets}
        self.committed: dict[TenantName, Decimal] = {b.tenant: b.committed for b in snapshot.budgets}
        self._specs = snapshot.specs
        self._spec_of: dict[TenantName, MeterSpec | None] = {}
        self._quotas: dict[tuple[TenantName, DeviceKind], list[QuotaRecord]] = defaultdict(list)
        for quota in snapshot.quotas:
            self._quotas[(quota.tenant, quota.kind)].append(quota)
        self._used: dict[tuple[TenantName, SiteName, DeviceKind], int] = defaultdict(int)
        self._held: dict[PoolKey, set[DeviceId]] = defaultdict(set)
        for holding in snapshot.holdings:
            self._hold(holding.tenant, (holding.site, holding.pool), holding.kind, holding.devices, counted=holding.counted)
        for one in snapshot.reserved:
            self._used[(one.tenant, one.site, one.kind)] += one.devices

    def _hold(self, tenant: TenantName, pool: PoolKey, kind: DeviceKind, devices: tuple[DeviceId, ...], *, counted: bool = True) -> None:
        if counted:
            self._used[(tenant, pool[0], kind)] += len(devices)
        self._held[pool].update(devices)

    def take(self, decision: Decision, job: QueuedJob, pool: PoolView) -> None:
        """Count a decision."""
        self._hold(decision.tenant, (decision.site, decision.pool), decision.kind, decision.devices)
        if decision.tenant in self.committed:
            self.committed[decision.tenant] += self.ceiling(job, pool) or Decimal(0)

    def held(self, pool: PoolView) -> int:
        """Devices of the pool that federation jobs hold, those counted that no inventory shows any more (a withdrawn GPU stays used)."""
        return len(self._held[(pool.site, pool.pool)])

    def free(self, pool: PoolView, kind: DeviceKind) -> list[DeviceView]:
        """Devices that can be offered now: of that kind, live, seen free, and held by no attempt of ours."""
        held = self._held[(pool.site, pool.pool)]
        return [d for d in pool.devices if d.kind is kind and d.live and d.state is DeviceState.FREE and d.id not in held]

    def broken_quota(self, job: QueuedJob, site: SiteName) -> tuple[QuotaRecord, int] | None:
        """The first quota that the job would pass at `site`, and how much of it is used."""
        kind = job.resources.kind
        if not self._quotas.get((job.tenant, kind)):
            return None
        for quota in sorted(self._quotas[(job.tenant, kind)], key=lambda q: q.site or ""):
            if quota.site is not None and quota.site != site:
                continue
            used = sum(n for (t, s, k), n in self._used.items() if t == job.tenant and k is kind and quota.site in (None, s))
            if used + job.resources.count > quota.limit:
                return quota, used
        return None

    def spec(self, tenant: TenantName) -> MeterSpec | None:
        if tenant not in self._spec_of:
            self._spec_of[tenant] = spec_in_force(self._specs, tenant, self.now)
        return self._spec_of[tenant]

    def ceiling(self, job: QueuedJob, pool: PoolView) -> Decimal | None:
        """The most the job can cost there; None if no agreement prices it."""
        spec = self.spec(job.tenant)
        kind = job.resources.kind
        per_hour = price_per_hour(spec, kind, pool.profile.accelerator if kind is DeviceKind.GPU else "") if spec else None
        return None if per_hour is None else cost_ceiling(per_hour, job.resources.count, job.wall_s)
