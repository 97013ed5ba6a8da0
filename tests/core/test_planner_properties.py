"""What holds for every plan, whatever the snapshot; and that `objections` finds what is planted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intertie.contracts.identity import MappingRecord
from intertie.contracts.job import QuotaRecord, Resources
from intertie.contracts.site import DeviceKind, DeviceState, Freshness, Lendable, Phase, PoolProfile, TaskType
from intertie.contracts.usage import MeterSpec, Price
from intertie.ids import AttemptId, DeviceId, JobId, PoolName, SiteName, SpecId, TenantName
from intertie.planner import Budget, Decision, DeviceView, Holding, Plan, PoolView, QueuedJob, Snapshot, objections, plan
from intertie.planner.fit import best_fit

NOW = datetime(2026, 12, 1, 8, 0, tzinfo=UTC)
TENANTS = [TenantName("acme"), TenantName("beta")]
SITES = [SiteName("site-a"), SiteName("site-b")]


@st.composite
def pools(draw: st.DrawFn, site: SiteName, name: PoolName) -> PoolView:
    count = draw(st.integers(1, 6))
    gpu = draw(st.booleans())
    kind = DeviceKind.GPU if gpu else DeviceKind.SLOT
    devices = tuple(
        DeviceView(
            DeviceId(f"{name}-{i}"),
            kind,
            draw(st.sampled_from([DeviceState.FREE] * 6 + [DeviceState.LOST, DeviceState.FOREIGN, DeviceState.OURS])),
            draw(st.integers(0, 9)) > 0,
            f"n{draw(st.integers(0, 2))}",
        )
        for i in range(count)
    )
    profile = PoolProfile(
        pool=name,
        accelerator="A100" if gpu else "none",
        count=count,
        memory_mib=80_000,
        interconnect="none",
        task_types=[TaskType.BATCH],
        lendable=Lendable(devices=draw(st.integers(0, count))),
    )
    return PoolView(
        site,
        name,
        profile,
        Phase.PRODUCTION,
        draw(st.sampled_from([Freshness.FRESH] * 5 + [Freshness.STALE])),
        heard=True,
        caught_up=draw(st.integers(0, 9)) > 0,
        last_heard=NOW,
        cordoned=draw(st.integers(0, 9)) == 0,
        devices=devices,
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    found = tuple(draw(pools(site, PoolName(f"p{i}"))) for site in SITES for i in range(2))
    queue = tuple(
        QueuedJob(
            JobId(f"job-{i:02d}"),
            draw(st.sampled_from(TENANTS)),
            Resources(gpus=draw(st.integers(0, 4)), slots=draw(st.integers(1, 4))),
            TaskType.BATCH,
            draw(st.sampled_from([60, 3_600])),
            NOW - timedelta(seconds=draw(st.integers(0, 3))),
        )
        for i in range(draw(st.integers(0, 12)))
    )
    holdings = tuple(
        Holding(AttemptId(f"att-{i}"), draw(st.sampled_from(TENANTS)), p.site, p.pool, p.devices[0].kind, (p.devices[0].id,))
        for i, p in enumerate(found)
        if draw(st.booleans())
    )
    quotas = tuple(
        QuotaRecord(tenant=draw(st.sampled_from(TENANTS)), site=site, kind=kind, limit=draw(st.integers(0, 6)))
        for site in (None, SITES[0])
        for kind in DeviceKind
        if draw(st.booleans())
    )
    spec = MeterSpec(
        spec=SpecId("spec-1"),
        revision=1,
        title="t",
        provider="platform",
        consumer="*",
        currency="CNY",
        prices=[Price(kind=kind, per_hour=Decimal("3.7")) for kind in DeviceKind],
        effective_from=NOW - timedelta(days=1),
    )
    budgets = tuple(
        Budget(t, "CNY", Decimal(draw(st.integers(0, 40))), None, Decimal(draw(st.integers(0, 20)))) for t in TENANTS if draw(st.booleans())
    )
    mappings = tuple(MappingRecord(tenant=t, site=s, account=f"u-{t}") for t in TENANTS for s in SITES if draw(st.integers(0, 5)) > 0)
    return Snapshot(queue, found, holdings, mappings, quotas, budgets, (spec,))


@settings(deadline=None, max_examples=150)
@given(snapshots())
def test_no_plan_has_an_objection(snapshot: Snapshot) -> None:
    assert objections(plan(snapshot, NOW), snapshot, NOW) == []


@settings(deadline=None, max_examples=100)
@given(snapshots())
def test_no_device_is_given_twice_and_no_share_or_quota_is_passed(snapshot: Snapshot) -> None:
    result = plan(snapshot, NOW)
    holders = Counter((h.site, h.pool, device) for h in snapshot.holdings for device in h.devices)
    holders += Counter((d.site, d.pool, device) for d in result.decisions for device in d.devices)
    placed = {(d.site, d.pool, device) for d in result.decisions for device in d.devices}
    assert all(holders[key] == 1 for key in placed)
    for pool in {(d.site, d.pool) for d in result.decisions}:
        lent = next(p.profile.lendable.devices for p in snapshot.pools if (p.site, p.pool) == pool)
        assert sum(n for (site, name, _), n in holders.items() if (site, name) == pool) <= lent
    for quota in snapshot.quotas:
        mine = [d for d in result.decisions if d.tenant == quota.tenant and d.kind is quota.kind and quota.site in (None, d.site)]
        before = sum(
            len(h.devices) for h in snapshot.holdings if h.tenant == quota.tenant and h.kind is quota.kind and quota.site in (None, h.site)
        )
        assert not mine or before + sum(len(d.devices) for d in mine) <= quota.limit


@settings(deadline=None, max_examples=60)
@given(snapshots())
def test_the_same_input_gives_the_same_plan_in_whatever_order_it_is_listed(snapshot: Snapshot) -> None:
    turned = replace(
        snapshot, queue=snapshot.queue[::-1], pools=snapshot.pools[::-1], holdings=snapshot.holdings[::-1], quotas=snapshot.quotas[::-1]
    )
    assert plan(turned, NOW) == plan(snapshot, NOW)


@settings(deadline=None, max_examples=60)
@given(snapshots())
def test_every_queued_job_is_either_placed_or_told_why_not(snapshot: Snapshot) -> None:
    result = plan(snapshot, NOW)
    told = [d.job for d in result.decisions] + [v.job for v in result.report.waiting]
    assert sorted(told) == sorted(j.job for j in snapshot.queue)
    assert all(len(v.rejections) == len(snapshot.pools) for v in result.report.waiting)


def _sound() -> tuple[Plan, Snapshot]:
    """A plan without fault, of two jobs that fill what is lent, with every guard set to its limit."""
    profile = PoolProfile(
        pool=PoolName("p0"),
        accelerator="A100",
        count=4,
        memory_mib=80_000,
        interconnect="none",
        task_types=[TaskType.BATCH],
        lendable=Lendable(devices=3),
    )
    devices = tuple(DeviceView(DeviceId(f"g{i}"), DeviceKind.GPU, DeviceState.FREE, True, "n0") for i in range(4))
    pool = PoolView(SITES[0], PoolName("p0"), profile, Phase.PRODUCTION, Freshness.FRESH, True, True, NOW, devices=devices)
    queue = tuple(QueuedJob(JobId(f"job-{i}"), TENANTS[0], Resources(gpus=1), TaskType.BATCH, 3_600, NOW) for i in range(2))
    spec = MeterSpec(
        spec=SpecId("spec-1"),
        revision=1,
        title="t",
        provider="platform",
        consumer="*",
        currency="CNY",
        prices=[Price(kind=DeviceKind.GPU, per_hour=Decimal(10))],
        effective_from=NOW,
    )
    snapshot = Snapshot(
        queue,
        (pool,),
        (Holding(AttemptId("att-0"), TENANTS[0], SITES[0], PoolName("p0"), DeviceKind.GPU, (DeviceId("g3"),)),),
        (MappingRecord(tenant=TENANTS[0], site=SITES[0], account="u"),),
        (QuotaRecord(tenant=TENANTS[0], site=None, kind=DeviceKind.GPU, limit=3),),
        (Budget(TENANTS[0], "CNY", Decimal(30), None, Decimal(10)),),
        (spec,),
    )
    return plan(snapshot, NOW), snapshot


def _first(change: Callable[[Decision], Decision]) -> Callable[[Plan, Snapshot], tuple[Plan, Snapshot]]:
    return lambda p, s: (replace(p, decisions=(change(p.decisions[0]), *p.decisions[1:])), s)


def _pool(**changes: object) -> Callable[[Plan, Snapshot], tuple[Plan, Snapshot]]:
    return lambda p, s: (p, replace(s, pools=(replace(s.pools[0], **changes),)))  # type: ignore[arg-type]  # a table of changes


def _lends(devices: int) -> Callable[[Plan, Snapshot], tuple[Plan, Snapshot]]:
    def cut(p: Plan, s: Snapshot) -> tuple[Plan, Snapshot]:
        pool = s.pools[0]
        fields = {name: getattr(pool.profile, name) for name in pool.profile.__struct_fields__} | {"lendable": Lendable(devices=devices)}
        return p, replace(s, pools=(replace(pool, profile=PoolProfile(**fields)),))

    return cut


MUTANTS: list[tuple[str, Callable[[Plan, Snapshot], tuple[Plan, Snapshot]]]] = [
    ("holders", _first(lambda d: replace(d, devices=(DeviceId("g3"),)))),
    ("holders", lambda p, s: (replace(p, decisions=(p.decisions[0], replace(p.decisions[1], devices=p.decisions[0].devices))), s)),
    ("is placed 2 times", lambda p, s: (replace(p, decisions=(*p.decisions, p.decisions[0])), s)),
    ("not queued", _first(lambda d: replace(d, job=JobId("job-x")))),
    ("not known", _first(lambda d: replace(d, pool=PoolName("p9")))),
    ("asks 1", _first(lambda d: replace(d, devices=(*d.devices, DeviceId("g2"))))),
    ("is of tenant", _first(lambda d: replace(d, tenant=TENANTS[1]))),
    ("account", _first(lambda d: replace(d, account="root"))),
    ("live, free", _pool(devices=())),
    ("not fresh", _pool(freshness=Freshness.STALE)),
    ("not fresh", _pool(caught_up=False)),
    ("not fresh", _pool(heard=False)),
    ("takes no work", _pool(cordoned=True)),
    ("phase suspended", _pool(phase=Phase.SUSPENDED)),
    ("single-user", _pool(single_user=True, owner_tenant="other")),
    ("lends 2", _lends(2)),
    ("quota of", lambda p, s: (p, replace(s, quotas=(QuotaRecord(tenant=TENANTS[0], site=SITES[0], kind=DeviceKind.GPU, limit=2),)))),
    ("may spend", lambda p, s: (p, replace(s, budgets=(replace(s.budgets[0], amount=Decimal(29)),)))),
    ("ended at", lambda p, s: (p, replace(s, budgets=(replace(s.budgets[0], valid_until=NOW),)))),
    ("no price", lambda p, s: (p, replace(s, specs=()))),
    ("pinned", lambda p, s: (p, replace(s, queue=(replace(s.queue[0], site=SITES[1]), s.queue[1])))),
]


def test_the_sound_plan_is_sound() -> None:
    found, snapshot = _sound()
    assert len(found.decisions) == 2
    assert objections(found, snapshot, NOW) == []


@pytest.mark.parametrize(("text", "mutate"), MUTANTS, ids=[f"{i:02d}-{m[0]}" for i, m in enumerate(MUTANTS)])
def test_objections_find_a_planted_fault(text: str, mutate: Callable[[Plan, Snapshot], tuple[Plan, Snapshot]]) -> None:
    assert any(text in objection for objection in objections(*mutate(*_sound()), NOW))


def _devices(**nodes: int) -> list[DeviceView]:
    return [DeviceView(DeviceId(f"{n}-{i}"), DeviceKind.GPU, DeviceState.FREE, True, n) for n, count in nodes.items() for i in range(count)]


@pytest.mark.parametrize(
    ("nodes", "count", "chosen"),
    [
        ({"a": 8, "b": 2}, 2, "b b"),
        ({"a": 8, "b": 2}, 3, "a a a"),
        ({"a": 3, "b": 3, "c": 2}, 5, "a a a c c"),
        ({"a": 4, "b": 4}, 4, "a a a a"),
        ({"a": 1}, 1, "a"),
    ],
)
def test_big_holes_stay_whole(nodes: dict[str, int], count: int, chosen: str) -> None:
    fit = best_fit(_devices(**nodes), count)
    assert " ".join(d.split("-")[0] for d in fit.devices) == chosen
