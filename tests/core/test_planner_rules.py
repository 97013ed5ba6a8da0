"""The ladder of rejections, rung by rung, in its order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from intertie.contracts.identity import MappingRecord
from intertie.contracts.image import PoolImages
from intertie.contracts.job import QuotaRecord, Resources, WaitReason
from intertie.contracts.site import (
    RIGHT,
    AccessMode,
    DeviceKind,
    DeviceState,
    Freshness,
    JobOffering,
    Lendable,
    Phase,
    PoolProfile,
    TaskType,
)
from intertie.contracts.usage import MeterSpec, Price
from intertie.ids import AttemptId, DeviceId, JobId, PoolName, SiteName, SpecId, TenantName
from intertie.planner import (
    Avoided,
    Budget,
    DeviceView,
    Down,
    Holding,
    PoolView,
    QueuedJob,
    Reserved,
    Snapshot,
    canonical,
    nearest,
    never_fits,
    objections,
    plan,
    suitability,
)
from intertie.planner.rules import LASTING, PASSING, RULES

NOW = datetime(2026, 12, 1, 8, 0, tzinfo=UTC)
ACME = TenantName("acme")
SITE = SiteName("site-a")
POOL = PoolName("gpu")
IMAGE = f"registry.example.cn/team/train@sha256:{'a' * 64}"


def profile(**changes: object) -> PoolProfile:
    base: dict[str, object] = {
        "pool": POOL,
        "accelerator": "A100-SXM4-80GB",
        "count": 8,
        "memory_mib": 81_920,
        "interconnect": "nvlink",
        "task_types": [TaskType.BATCH, TaskType.TRAIN],
        "lendable": Lendable(devices=8),
    }
    return PoolProfile(**(base | changes))  # type: ignore[arg-type]  # a table of changes is checked by the test itself


def gpus(
    count: int, state: DeviceState = DeviceState.FREE, *, live: bool = True, node: str = "n1", first: int = 0
) -> tuple[DeviceView, ...]:
    return tuple(DeviceView(DeviceId(f"GPU-{first + i}"), DeviceKind.GPU, state, live, node) for i in range(count))


def lent(count: int, state: DeviceState = DeviceState.FREE, *, first: int = 0) -> tuple[DeviceView, ...]:
    return tuple(replace(device, id=DeviceId(f"{RIGHT}gpu-{first + n}")) for n, device in enumerate(gpus(count, state)))


def pool(**changes: object) -> PoolView:
    base: dict[str, object] = {
        "site": SITE,
        "pool": POOL,
        "profile": profile(),
        "phase": Phase.PRODUCTION,
        "freshness": Freshness.FRESH,
        "heard": True,
        "caught_up": True,
        "last_heard": NOW,
        "devices": gpus(8),
    }
    return PoolView(**(base | changes))  # type: ignore[arg-type]  # as above


def job(name: str = "job-1", count: int = 2, **changes: object) -> QueuedJob:
    base: dict[str, object] = {
        "job": JobId(name),
        "tenant": ACME,
        "resources": Resources(gpus=count),
        "task_type": TaskType.BATCH,
        "wall_s": 3_600,
        "queued_at": NOW - timedelta(minutes=1),
    }
    return QueuedJob(**(base | changes))  # type: ignore[arg-type]  # as above


def spec(per_hour: str = "10", consumer: str = "*", revision: int = 1, since: datetime = NOW - timedelta(days=1)) -> MeterSpec:
    return MeterSpec(
        spec=SpecId(f"spec-{consumer.strip('*') or 'all'}"),
        revision=revision,
        title="t",
        provider="platform",
        consumer=consumer,
        currency="CNY",
        prices=[Price(kind=DeviceKind.GPU, per_hour=Decimal(per_hour))],
        effective_from=since,
    )


MAPPED = (MappingRecord(tenant=ACME, site=SITE, account="acme-user"),)


def snapshot(*jobs: QueuedJob, **changes: object) -> Snapshot:
    base: dict[str, object] = {"queue": jobs or (job(),), "pools": (pool(),), "mappings": MAPPED}
    return Snapshot(**(base | changes))  # type: ignore[arg-type]  # as above


def held(count: int, tenant: TenantName = ACME) -> Holding:
    return Holding(AttemptId("att-1"), tenant, SITE, POOL, DeviceKind.GPU, tuple(DeviceId(f"GPU-{i}") for i in range(count)))


def budget(amount: str, committed: str = "0", valid_until: datetime | None = None) -> tuple[Budget, ...]:
    return (Budget(ACME, "CNY", Decimal(amount), valid_until, Decimal(committed)),)


OFFERING = JobOffering(
    name="train",
    pool=POOL,
    max_devices=1_000,
    devices=1_000,
    max_wall_s=7_200,
    task_types=[TaskType.BATCH],
    price_per_hour=Decimal(6),
    answer_within_s=600,
)


def of_service() -> PoolView:
    return pool(profile=profile(mode=AccessMode.SERVICE, count=1_000), mode=AccessMode.SERVICE, devices=(), offerings=(OFFERING,))


def asked_of_owner(count: int) -> QueuedJob:
    return job(count=count, site=SITE, offering="train")


def down(start_min: int, end_min: int) -> Down:
    return Down(NOW + timedelta(minutes=start_min), NOW + timedelta(minutes=end_min), "new switches")


LATER = NOW + timedelta(seconds=30)
FREE, FOREIGN, LOST, OURS = DeviceState.FREE, DeviceState.FOREIGN, DeviceState.LOST, DeviceState.OURS

# rule, reason, a snapshot in which it is the first to reject, needed, found — in the ladder's own order
ROWS: list[tuple[str, WaitReason, Callable[[], Snapshot], str, str]] = [
    ("pin", WaitReason.NO_SITE_FITS, lambda: snapshot(job(site="site-b")), "site-b", "site-a"),
    ("pin", WaitReason.NO_SITE_FITS, lambda: snapshot(job(pool="cpu")), "cpu", "gpu"),
    (
        "access_mode",
        WaitReason.NO_SITE_FITS,
        lambda: snapshot(pools=(pool(profile=profile(mode=AccessMode.SERVICE)),)),
        "managed",
        "service",
    ),
    # FEATURES 2: what was decided and what the owner declares must agree before anything new begins
    ("access_mode", WaitReason.NO_SITE_FITS, lambda: snapshot(pools=(pool(mode=None),)), "managed", "service and managed"),
    ("closed", WaitReason.NO_SITE_FITS, lambda: snapshot(pools=(pool(phase=Phase.CLOSED),)), "an open phase", "closed"),
    ("task_type", WaitReason.NO_SITE_FITS, lambda: snapshot(job(task_type=TaskType.INFERENCE)), "inference", "batch, train"),
    (
        "accelerator_model",
        WaitReason.NO_SITE_FITS,
        lambda: snapshot(job(resources=Resources(gpus=1, gpu_model="H100"))),
        "H100",
        "A100-SXM4-80GB",
    ),
    ("accelerator_model", WaitReason.NO_SITE_FITS, lambda: snapshot(job(resources=Resources(slots=1))), "CPU slots", "A100-SXM4-80GB"),
    ("accelerator_model", WaitReason.NO_SITE_FITS, lambda: snapshot(pools=(pool(profile=profile(accelerator="none")),)), "a GPU", "none"),
    (
        "accelerator_memory",
        WaitReason.NO_SITE_FITS,
        lambda: snapshot(job(resources=Resources(gpus=1, gpu_memory_mib=90_000))),
        "90000 MiB",
        "81920 MiB",
    ),
    (
        "interconnect",
        WaitReason.NO_SITE_FITS,
        lambda: snapshot(job(resources=Resources(gpus=1, interconnect="infiniband"))),
        "infiniband",
        "nvlink",
    ),
    ("count", WaitReason.NO_SITE_FITS, lambda: snapshot(job(count=9)), "9", "8"),
    (
        "lent_in_all",
        WaitReason.NO_SITE_FITS,
        lambda: snapshot(job(count=5), pools=(pool(profile=profile(lendable=Lendable(devices=4))),)),
        "5",
        "4",
    ),
    # LINK D4: who cannot stop it without the agent gets no work that is run again elsewhere
    # Issue 4: a job may name its image; a site without images never gets it, and neither does an agent that would not see the wish
    ("image", WaitReason.NO_SITE_FITS, lambda: snapshot(job(image=IMAGE), pools=(pool(images=PoolImages()),)), IMAGE, "no images"),
    (
        "image",
        WaitReason.NO_SITE_FITS,
        lambda: snapshot(job(image=IMAGE), pools=(pool(images=PoolImages(runtime="pyxis", sources=["registry.example.cn/team-b"])),)),
        IMAGE,
        "registry.example.cn/team-b by pyxis",
    ),
    ("image_untold", WaitReason.NO_SITE_FITS, lambda: snapshot(job(image=IMAGE)), IMAGE, "not told"),
    ("self_stop", WaitReason.NO_SITE_FITS, lambda: snapshot(job(rerun=True)), "supervisors that stop it", "none"),
    ("mapping", WaitReason.NO_MAPPING, lambda: snapshot(mappings=()), "a mapping", "none"),
    ("mapping", WaitReason.NO_MAPPING, lambda: snapshot(pools=(pool(single_user=True, owner_tenant="lab"),)), "acme", "lab"),
    (
        "phase_tenants",
        WaitReason.NO_MAPPING,
        lambda: snapshot(pools=(pool(phase=Phase.PILOT, tenants=("lab",)),)),
        "acme",
        "not named for it",
    ),
    ("quota", WaitReason.QUOTA, lambda: snapshot(quotas=(QuotaRecord(tenant=ACME, site=None, kind=DeviceKind.GPU, limit=1),)), "2", "1"),
    # BR-071: a quota cut below its use kills nothing and admits nothing
    (
        "quota",
        WaitReason.QUOTA,
        lambda: snapshot(job(count=1), holdings=(held(6),), quotas=(QuotaRecord(tenant=ACME, site=SITE, kind=DeviceKind.GPU, limit=4),)),
        "1",
        "0",
    ),
    ("price", WaitReason.BUDGET, lambda: snapshot(budgets=budget("1")), "a price", "none"),
    ("budget", WaitReason.BUDGET, lambda: snapshot(budgets=budget("500", "490"), specs=(spec(),)), "20.00 CNY", "10.00 CNY"),
    (
        "budget",
        WaitReason.BUDGET,
        lambda: snapshot(budgets=budget("500", valid_until=NOW), specs=(spec(),)),
        "a valid allowance",
        "an ended one",
    ),
    # LINK D24: what a silent site may give by its islanded allowance counts as used
    (
        "quota",
        WaitReason.QUOTA,
        lambda: snapshot(
            quotas=(QuotaRecord(tenant=ACME, site=None, kind=DeviceKind.GPU, limit=4),),
            reserved=(Reserved(ACME, SiteName("site-b"), DeviceKind.GPU, 3),),
        ),
        "2",
        "1",
    ),
    # LINK D3: after a restore nobody knows where an older job runs, until every site has told
    ("unsure", WaitReason.SITES_SILENT, lambda: snapshot(job(unsure=(SiteName("site-b"),))), "every site's word", "1 silent"),
    # BR-066: old information is marked old, and gets no work
    ("stale", WaitReason.SITES_SILENT, lambda: snapshot(pools=(pool(freshness=Freshness.STALE),)), "fresh", "stale"),
    ("stale", WaitReason.SITES_SILENT, lambda: snapshot(pools=(pool(freshness=Freshness.UNKNOWN, last_heard=None),)), "fresh", "unknown"),
    ("unheard", WaitReason.SITES_SILENT, lambda: snapshot(pools=(pool(heard=False),)), "an answered sync", "silence"),
    ("catching_up", WaitReason.SITES_SILENT, lambda: snapshot(pools=(pool(caught_up=False),)), "its lane at head", "catching up"),
    ("candidate", WaitReason.CORDONED, lambda: snapshot(pools=(pool(phase=Phase.CANDIDATE),)), "pilot", "candidate"),
    ("unproven", WaitReason.CORDONED, lambda: snapshot(pools=(pool(unproven="it sees 0"),)), "a probe that passed", "it sees 0"),
    ("suspended", WaitReason.CORDONED, lambda: snapshot(pools=(pool(phase=Phase.SUSPENDED),)), "a working phase", "suspended"),
    # FEATURES 24: an hour of wall time does not fit before a window that opens in half an hour, nor into one that is open
    ("downtime", WaitReason.CORDONED, lambda: snapshot(pools=(pool(downtimes=(down(30, 90),)),)), "3600 s", "1800 s"),
    ("downtime", WaitReason.CORDONED, lambda: snapshot(pools=(pool(downtimes=(down(-10, 90),)),)), "3600 s", "0 s"),
    ("cordoned", WaitReason.CORDONED, lambda: snapshot(pools=(pool(cordoned=True, cordon_reason="disk"),)), "open", "cordoned"),
    ("cordoned", WaitReason.CORDONED, lambda: snapshot(pools=(pool(draining=True),)), "open", "draining"),
    ("paused", WaitReason.CORDONED, lambda: snapshot(pools=(pool(paused=True, pause_told=": exams"),)), "lending", "paused"),
    ("site_condition", WaitReason.CORDONED, lambda: snapshot(pools=(pool(condition="the disk is full"),)), "room for work", "none"),
    ("not_accepting", WaitReason.CORDONED, lambda: snapshot(pools=(pool(accepting=False),)), "accepting", "paused"),
    ("lending_window", WaitReason.CORDONED, lambda: snapshot(pools=(pool(lending_now=False),)), "an open window", "closed"),
    (
        "devices_unhealthy",
        WaitReason.DEVICES_UNHEALTHY,
        lambda: snapshot(pools=(pool(devices=gpus(1) + gpus(1, LOST, first=1)),)),
        "2",
        "1",
    ),
    ("devices_unhealthy", WaitReason.DEVICES_UNHEALTHY, lambda: snapshot(pools=(pool(devices=gpus(8, FOREIGN)),)), "2", "0"),
    ("devices_unhealthy", WaitReason.DEVICES_UNHEALTHY, lambda: snapshot(pools=(pool(devices=gpus(8, live=False)),)), "2", "0"),
    # BR-067: advertised 16, none allocatable
    ("devices_unhealthy", WaitReason.DEVICES_UNHEALTHY, lambda: snapshot(pools=(pool(devices=()),)), "2", "0"),
    # FEATURES 135: what the owner keeps for present holders is well, and not to be had
    (
        "reserved",
        WaitReason.DEVICES_BUSY,
        lambda: snapshot(pools=(pool(devices=gpus(1) + tuple(replace(d, reserved_until=LATER) for d in gpus(4, FOREIGN, first=1))),)),
        "2",
        "1",
    ),
    # A site with a queue of its own lends rights to queue: what its own users have is load, and no fault
    ("own_users", WaitReason.DEVICES_BUSY, lambda: snapshot(pools=(pool(devices=lent(1) + lent(7, FOREIGN, first=1)),)), "2", "1"),
    ("no_free_device", WaitReason.DEVICES_BUSY, lambda: snapshot(pools=(pool(devices=gpus(8, OURS)),)), "2", "0"),
    ("no_free_device", WaitReason.DEVICES_BUSY, lambda: snapshot(holdings=(held(7),)), "2", "1"),
    # FEATURES 51: a pool of machines has eight free, four on each
    (
        "one_node",
        WaitReason.DEVICES_BUSY,
        lambda: snapshot(job(count=5), pools=(pool(one_node=True, devices=gpus(4) + gpus(4, node="n2", first=4)),)),
        "5 on one node",
        "4",
    ),
    (
        "lendable_share",
        WaitReason.DEVICES_BUSY,
        lambda: snapshot(holdings=(held(3),), pools=(pool(profile=profile(lendable=Lendable(devices=4))),)),
        "2",
        "1",
    ),
    (
        "requests_open",
        WaitReason.DEVICES_BUSY,
        lambda: snapshot(asked_of_owner(201), pools=(of_service(),)),
        "201",
        "200",
    ),
    (
        "avoided",
        WaitReason.BACK_OFF,
        lambda: snapshot(job(avoided=(Avoided(SITE, LATER, "fetch failed"),))),
        "no recent fault",
        "back-off",
    ),
    (
        "back_off",
        WaitReason.BACK_OFF,
        lambda: snapshot(pools=(pool(back_off_until=LATER, back_off_why="fetch failed"),)),
        "no recent fault",
        "back-off",
    ),
]


@pytest.mark.parametrize(("rule", "reason", "given", "needed", "found"), ROWS, ids=[f"{i:02d}-{row[0]}" for i, row in enumerate(ROWS)])
def test_each_rule_rejects_with_its_numbers(rule: str, reason: WaitReason, given: Callable[[], Snapshot], needed: str, found: str) -> None:
    (verdict,) = plan(given(), NOW).report.waiting
    (rejection,) = verdict.rejections
    assert (rejection.rule, rejection.needed, rejection.found) == (rule, needed, found)
    assert verdict.reason is reason
    assert rejection.text in verdict.text


def test_the_rows_cover_the_ladder_in_its_order() -> None:
    assert list(dict.fromkeys(row[0] for row in ROWS)) == [rule.name for rule in RULES]


def test_what_lasts_stands_before_what_passes() -> None:
    assert (*LASTING, *PASSING) == tuple(RULES)


def test_the_ladder_climbs_in_the_order_of_the_wait_reasons() -> None:
    rungs = [list(WaitReason).index(rule.reason) for rule in RULES]
    assert rungs == sorted(rungs)


@pytest.mark.parametrize(
    "open_pool",
    [
        pool(downtimes=(down(60, 90),)),
        pool(downtimes=(down(-90, -1),)),
        pool(phase=Phase.PILOT, tenants=(ACME,)),
        pool(phase=Phase.PRODUCTION, tenants=("lab",)),
    ],
)
def test_a_downtime_that_is_over_or_begins_after_its_end_and_a_list_it_stands_on_keep_no_job_away(open_pool: PoolView) -> None:
    given = snapshot(pools=(open_pool,))
    found = plan(given, NOW)
    assert len(found.decisions) == 1 and objections(found, given, NOW) == []


def test_work_too_long_for_a_maintenance_window_reads_its_times_and_what_would_fit_or_goes_elsewhere() -> None:
    """BR-073: at most a year is asked for, so that "no limit" is a limit that does not fit, and is told so."""
    shut = pool(downtimes=(down(30, 390),))
    forever = job(wall_s=31_536_000)
    (verdict,) = plan(snapshot(forever, pools=(shut,)), NOW).report.waiting
    assert "goes down at 2026-12-01T08:30:00Z, until 2026-12-01T14:30:00Z: new switches" in verdict.text
    assert "at most 1800 s would still be placed" in verdict.text
    other = pool(site=SiteName("site-b"))
    mapped = (*MAPPED, MappingRecord(tenant=ACME, site=SiteName("site-b"), account="acme-user"))
    (decision,) = plan(snapshot(forever, pools=(shut, other), mappings=mapped), NOW).decisions
    assert decision.site == "site-b"


@pytest.mark.parametrize(
    "shut", [pool(downtimes=(down(30, 90),)), pool(phase=Phase.CANDIDATE), pool(mode=None), pool(phase=Phase.PILOT, tenants=("lab",))]
)
def test_the_second_look_objects_to_a_placement_against_phase_mode_or_downtime(shut: PoolView) -> None:
    made = plan(snapshot(), NOW)
    assert objections(made, snapshot(pools=(shut,)), NOW)


def test_a_job_that_names_its_image_goes_only_where_that_image_runs() -> None:
    """Issue 4. An agent of link version 2 tells nothing of images: it would run the job without."""
    named = job(image=IMAGE)
    takes = pool(images=PoolImages(runtime="apptainer", sources=["registry.example.cn/team"]))
    silent, without = pool(site=SiteName("site-b")), pool(site=SiteName("site-c"), images=PoolImages())
    found = plan(snapshot(named, pools=(silent, takes, without)), NOW)
    assert [(d.site, [r.rule for r in d.rejections]) for d in found.decisions] == [(SITE, ["image_untold", "image"])]
    assert objections(found, snapshot(named, pools=(silent, takes, without)), NOW) == []
    assert objections(found, snapshot(named, pools=(pool(),)), NOW) and objections(
        found, snapshot(named, pools=(pool(images=PoolImages()),)), NOW
    )
    assert [r.rule for r in never_fits(named, [without])] == ["image"] and not never_fits(named, [without, silent])
    # What came from a site, and not through the door, harms no round.
    (verdict,) = plan(snapshot(job(image="--nv ../x"), pools=(takes,)), NOW).report.waiting
    assert verdict.rejections[0].rule == "image"


def test_a_job_is_placed_where_nothing_rejects_it() -> None:
    (decision,) = plan(snapshot(specs=(spec(),)), NOW).decisions
    assert (decision.site, decision.pool, decision.account, decision.spec) == (SITE, POOL, "acme-user", "spec-all")
    assert decision.devices == ("GPU-0", "GPU-1")


def test_the_reason_is_that_of_the_pool_nearest_to_taking_the_job() -> None:
    wrong = pool(site=SiteName("site-b"), profile=profile(accelerator="H20"))
    busy = pool(devices=gpus(8, OURS))
    wanted = job(resources=Resources(gpus=1, gpu_model="a100"))
    (verdict,) = plan(snapshot(wanted, pools=(wrong, busy)), NOW).report.waiting
    assert verdict.reason is WaitReason.DEVICES_BUSY
    assert [r.rule for r in verdict.rejections] == ["no_free_device", "accelerator_model"]


def test_without_any_site_a_job_waits_for_one() -> None:
    (verdict,) = plan(snapshot(pools=()), NOW).report.waiting
    assert (verdict.reason, verdict.text) == (WaitReason.NO_SITE, "no site has joined yet")
    assert canonical([])[0] is WaitReason.NO_SITE


@pytest.mark.parametrize(
    ("asked", "declared", "fits"),
    [
        ("A100", "A100-SXM4-80GB", True),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB", True),
        ("A100-40GB", "A100-SXM4-80GB", False),
        ("A10", "A100-SXM4-80GB", False),
        ("", "H20", True),
    ],
)
def test_every_word_of_the_model_that_was_asked_must_be_there(asked: str, declared: str, fits: bool) -> None:
    wanted = job(resources=Resources(gpus=1, gpu_model=asked or None))
    assert bool(suitability(wanted, [pool(profile=profile(accelerator=declared))]).fits) is fits


def test_what_can_never_run_is_refused_with_what_is_missing_at_each_pool() -> None:
    slots = pool(
        site=SiteName("site-b"), pool=PoolName("cpu"), profile=profile(pool=PoolName("cpu"), accelerator="none", interconnect="none")
    )
    small = pool(profile=profile(count=2, lendable=Lendable(devices=2)))
    found = never_fits(job(resources=Resources(gpus=8, gpu_model="A100")), [slots, small])
    assert [(r.site, r.rule, r.needed, r.found) for r in found] == [
        ("site-a", "count", "8", "2"),
        ("site-b", "accelerator_model", "A100", "none"),
    ]


def test_what_waiting_can_mend_is_not_refused() -> None:
    silent = pool(freshness=Freshness.UNKNOWN, heard=False, cordoned=True, devices=())
    assert never_fits(job(), [silent]) == []
    assert never_fits(job(), []) == []


def test_the_tenants_own_agreement_wins_over_everybodys_and_the_future_does_not_count() -> None:
    specs = (spec("10"), spec("8", "acme", 1), spec("7", "acme", 2), spec("1", "acme", 3, NOW + timedelta(days=1)))
    (decision,) = plan(snapshot(specs=specs), NOW).decisions
    assert (decision.spec, decision.spec_revision) == ("spec-acme", 2)


def test_a_blocked_job_is_passed_by_one_that_fits_and_keeps_its_place() -> None:
    big = job("job-big", 8, queued_at=NOW - timedelta(hours=1))
    small = job("job-small", 1)
    result = plan(snapshot(small, big, holdings=(held(1),)), NOW)
    assert [d.job for d in result.decisions] == ["job-small"]
    assert [(v.job, v.position) for v in result.report.waiting] == [("job-big", 1)]


def test_of_jobs_that_came_together_the_tenant_that_holds_less_goes_first() -> None:
    other = TenantName("zeta")
    mappings = (*MAPPED, MappingRecord(tenant=other, site=SITE, account="zeta-user"))
    given = snapshot(job("job-a", 1), job("job-z", 1, tenant=other), holdings=(held(7),), mappings=mappings)
    assert [d.job for d in plan(given, NOW).decisions] == ["job-z"]


def test_parallel_reservations_never_pass_the_budget() -> None:
    """BR-069: cap 500.00, used 472.00, four reservations of 9.00: three are admitted, one is refused by budget."""
    given = snapshot(*(job(f"job-{i}", 1) for i in range(4)), budgets=budget("500", "472"), specs=(spec("9"),))
    result = plan(given, NOW)
    assert len(result.decisions) == 3
    assert [v.reason for v in result.report.waiting] == [WaitReason.BUDGET]
    assert objections(result, given, NOW) == []


def test_a_withdrawn_device_stays_counted_while_it_is_held() -> None:
    """BR-071: usage of withdrawn GPUs still counts against the share."""
    gone = replace(held(2), devices=(DeviceId("GPU-gone-1"), DeviceId("GPU-gone-2")))
    given = snapshot(job(count=2), holdings=(gone,), pools=(pool(profile=profile(lendable=Lendable(devices=3))),))
    assert [v.rejections[0].rule for v in plan(given, NOW).report.waiting] == ["lendable_share"]


def test_a_decision_is_silent_about_pools_that_its_user_did_not_name() -> None:
    asked = snapshot(
        job(site=SITE), pools=(pool(), pool(site=SiteName("site-b")), pool(pool=PoolName("h20"), profile=profile(accelerator="none")))
    )
    (decision,) = plan(asked, NOW).decisions
    assert decision.why.startswith(
        "the only pool that fits now of what the job names; one node, 6 devices left free; 1 pool rejected: site-a/h20: "
    )


def asks(count: int = 2, **changes: object) -> QueuedJob:
    return job(resources=Resources(gpus=count, gpu_model="A100"), **changes)  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (asks(9), "nearest is site-a/gpu: the pool has 8 in all, and a job is never split over pools (needs 9, has 8)"),
        (asks(site="nowhere"), "the job names site nowhere, and no such place has joined"),
        (asks(pool="h20"), "the job names pool h20, and no such place has joined"),
    ],
)
def test_what_never_fits_is_refused_for_one_reason(asked: QueuedJob, said: str) -> None:
    pools = (
        pool(),
        pool(pool=PoolName("cpu"), profile=profile(accelerator="none")),
        pool(site=SiteName("site-b"), profile=profile(accelerator="H20")),
    )
    assert nearest(never_fits(asked, pools)) == said


def test_a_decision_says_which_pools_were_passed_over_and_by_which_rule() -> None:
    other = SiteName("site-b")
    ill = pool(site=other, devices=gpus(2, LOST, first=8), profile=profile(count=2))
    far = pool(site=SiteName("site-c"), profile=profile(accelerator="H20"))
    mapped = (*MAPPED, MappingRecord(tenant=ACME, site=other, account="acme-user"))
    asked = job(resources=Resources(gpus=2, gpu_model="A100"))
    decision = plan(snapshot(asked, pools=(pool(), far, ill), mappings=mapped), NOW).decisions[0]
    said = (
        "2 pools rejected: site-b/gpu: 0 healthy of 2: GPU-8 lost, GPU-9 lost [devices_unhealthy]; site-c/gpu: the accelerator here is H20"
    )
    assert said in decision.why, "the nearest to taking the job first"
