"""Requests to a pool of service access: asked within the offering's bounds, of nobody else, and without looking at the owner's cards (FEATURES 120)."""

from __future__ import annotations

from decimal import Decimal

import msgspec
import pytest
from tests.core.test_planner_rules import ACME, NOW, SITE, job, pool, profile, snapshot

from intertie.contracts.job import QuotaRecord, Resources
from intertie.contracts.site import AccessMode, DeviceKind, JobOffering, Lendable, Phase, TaskType
from intertie.ids import PoolName
from intertie.planner import PoolView, QueuedJob, objections, plan

OFFERING = JobOffering(
    name="train",
    pool=PoolName("gpu"),
    max_devices=4,
    devices=4,
    max_wall_s=7_200,
    task_types=[TaskType.BATCH],
    price_per_hour=Decimal(6),
    answer_within_s=600,
    by_hand=True,
)


def offered(**changes: object) -> PoolView:
    """A pool of service access whose site shows no card at all."""
    base: dict[str, object] = {
        "profile": profile(mode=AccessMode.SERVICE, lendable=Lendable(devices=0)),
        "mode": AccessMode.SERVICE,
        "devices": (),
        "offerings": (OFFERING,),
    }
    return pool(**(base | changes))


def asking(count: int = 2, **changes: object) -> QueuedJob:
    return job(**{"count": count, "site": SITE, "offering": "train", **changes})  # type: ignore[arg-type]  # a table of changes


def test_a_request_is_sent_with_names_for_its_cards_and_the_promised_time() -> None:
    given = snapshot(asking(3), pools=(offered(),))
    found = plan(given, NOW)
    (decision,) = found.decisions
    assert (decision.offering, decision.answer_within_s, len(decision.devices)) == ("train", 600, 3)
    assert all(device.startswith("req-job-1-") for device in decision.devices)
    assert objections(found, given, NOW) == []


def test_work_without_a_request_never_goes_to_a_pool_whose_owner_decides() -> None:
    (verdict,) = plan(snapshot(job(site=SITE), pools=(offered(),)), NOW).report.waiting
    assert verdict.rejections[0].rule == "access_mode"


@pytest.mark.parametrize(
    ("request_", "asked", "found"),
    [
        (asking(5), "5", "4"),
        (asking(wall_s=7_201), "7201 s", "7200 s"),
        (asking(task_type=TaskType.TRAIN), "train", "batch"),
        (asking(budget=Decimal("11.99")), "12.00 CNY", "11.99"),
        (asking(offering="serve"), "serve", "train"),
    ],
)
def test_a_request_beyond_its_bounds_is_told_so_before_any_owner_is_asked(request_: QueuedJob, asked: str, found: str) -> None:
    (verdict,) = plan(snapshot(request_, pools=(offered(),)), NOW).report.waiting
    (rejection,) = verdict.rejections
    assert (rejection.rule, rejection.needed, rejection.found) == ("access_mode", asked, found)


@pytest.mark.parametrize(
    ("there", "rule"),
    [
        (pool(offerings=(OFFERING,)), "access_mode"),
        (offered(mode=None), "access_mode"),
        (offered(phase=Phase.SUSPENDED), "suspended"),
        (offered(cordoned=True, cordon_reason="x"), "cordoned"),
        (offered(paused=True), "paused"),
        (offered(heard=False), "unheard"),
    ],
)
def test_a_pool_that_is_managed_undecided_shut_or_silent_is_asked_nothing(there: PoolView, rule: str) -> None:
    (verdict,) = plan(snapshot(asking(), pools=(there,)), NOW).report.waiting
    assert verdict.rejections[0].rule == rule


def test_a_request_counts_against_its_tenants_quota_like_any_job() -> None:
    given = snapshot(
        asking(2, name="job-1"),
        asking(2, name="job-2"),
        pools=(offered(),),
        quotas=(QuotaRecord(tenant=ACME, site=None, kind=DeviceKind.GPU, limit=3),),
    )
    found = plan(given, NOW)
    assert (len(found.decisions), found.report.waiting[0].rejections[0].rule) == (1, "quota")
    assert objections(found, given, NOW) == []


def test_no_owner_is_asked_for_more_than_a_person_can_answer() -> None:
    many = [asking(4, name=f"job-{n:03}") for n in range(60)]
    found = plan(snapshot(*many, pools=(offered(),)), NOW)
    assert len(found.decisions) == 50
    assert {verdict.rejections[0].rule for verdict in found.report.waiting} == {"requests_open"}


def test_a_request_never_goes_elsewhere_and_a_plan_that_sends_it_is_objected_to() -> None:
    managed = pool(site="site-b", offerings=(OFFERING,))
    given = snapshot(asking(), pools=(managed, offered()), mappings=())
    assert plan(given, NOW).decisions == ()
    sent = plan(snapshot(asking(), pools=(offered(),)), NOW)
    assert objections(sent, snapshot(asking(), pools=(pool(offerings=(OFFERING,)),)), NOW)
    assert objections(sent, snapshot(asking(offering="serve"), pools=(offered(),)), NOW)


def test_slots_are_asked_for_as_cards_are() -> None:
    there = offered(profile=profile(mode=AccessMode.SERVICE, accelerator="none"))
    (decision,) = plan(snapshot(asking(resources=Resources(slots=2)), pools=(there,)), NOW).decisions
    assert (decision.kind, len(decision.devices)) == (DeviceKind.SLOT, 2)


def test_the_price_of_a_request_is_exact() -> None:
    from intertie.planner.requests import cost

    assert cost(asking(3, wall_s=1_200), msgspec.structs.replace(OFFERING, price_per_hour=Decimal("7.5"))) == Decimal("7.5")
