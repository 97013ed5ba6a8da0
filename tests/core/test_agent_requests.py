"""The owner's rule for job requests as a table, and what of a request the hub may see (FEATURES 120)."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from tests.core.test_agent_core import body, terms
from tests.fakes.agents import attempt, pool

from intertie.agent.core.model import Attempt, State
from intertie.agent.core.offers import Books, NotTaken, Taken, Terms
from intertie.agent.core.offers import judge as judge_offer
from intertie.agent.core.requests import Accept, Ask, Bounds, Decline, JobOfferingRule, Pending, judge, usable, veiled, veiled_pools
from intertie.agent.core.rules import Rules
from intertie.contracts.job import Resources
from intertie.contracts.link import Claimed, Ended, NativeSeen, Offer, OfferBody, Sealed, SiteQueued, Staging, Started
from intertie.contracts.site import AccessMode, DeviceObserved, DeviceState, PoolInventory, TaskType
from intertie.ids import AttemptId, DeviceId, InstructionId, PoolName

LOCAL = datetime(2026, 12, 1, 21, 30, tzinfo=UTC)
MAIN = PoolName("main")


def rule(accept: str = "rule", **bounds: object) -> JobOfferingRule:
    return JobOfferingRule(
        name="train",
        pool=MAIN,
        max_devices=2,
        devices=2,
        max_wall_s=3_600,
        task_types=[TaskType.BATCH],
        price_per_hour=Decimal(6),
        answer_within_s=600,
        accept=accept,
        bounds=Bounds(**bounds),  # type: ignore[arg-type]  # a table of bounds
    )


def asked(count: int = 1, *, budget: str | None = None, offering: str = "train", **spec: object) -> OfferBody:
    one = body(devices=[DeviceId(f"req-{n}") for n in range(count)], offering=offering, budget=Decimal(budget) if budget else None)
    return msgspec.structs.replace(one, spec=msgspec.structs.replace(one.spec, resources=Resources(slots=count), **spec))


def running(accepted: datetime, state: State = State.RUNNING) -> Attempt:
    return attempt(state=state, offering="train", accepted_at=accepted)


def waiting(accepted: datetime | None) -> Pending:
    offer = Offer(
        id=InstructionId("ins-1"), number=1, epoch=1, attempt=AttemptId("att-w"), sealed=Sealed(payload="{}", signer="s", signature="x")
    )
    return Pending(offer=offer, received=LOCAL, answer_by=LOCAL, accepted_at=accepted)


TODAY, YESTERDAY = LOCAL - timedelta(hours=2), LOCAL - timedelta(hours=22)

DECLINED = [
    (asked(offering="none"), None, [], [], "no job offering"),
    (asked(3), rule(), [], [], "3 devices are asked for, 2 is the most"),
    (asked(wall_s=3_601), rule(), [], [], "3601 s are asked for, 3600 s"),
    (asked(task_type=TaskType.TRAIN), rule(), [], [], "train work is not taken"),
    (asked(wall_s=3_600, budget="5.99"), rule(), [], [], "could cost 6.00 CNY, its budget is 5.99"),
    (asked(), rule(tenants=["beta"]), [], [], "not for tenant acme"),
    (asked(), rule("by-hand", tenants=["beta"]), [], [], "not for tenant acme"),
    (asked(), rule(hours=["08:00-20:00"]), [], [], "answered during 08:00-20:00, it is 21:30"),
    (asked(), rule(hours=["whenever"]), [], [], "answered during whenever"),
    (asked(), rule(max_at_once=1), [running(TODAY)], [], "1 requests of train are under way, 1 at once"),
    (asked(), rule(max_at_once=1), [], [waiting(TODAY)], "1 requests of train are under way"),
    (asked(), rule(max_per_day=1), [running(TODAY, State.ENDED)], [], "accepted today, 1 a day"),
]


@pytest.mark.parametrize(("request_", "by", "attempts", "pending", "text"), DECLINED)
def test_what_is_outside_the_bounds_is_declined_with_its_numbers(
    request_: OfferBody, by: JobOfferingRule | None, attempts: list[Attempt], pending: list[Pending], text: str
) -> None:
    found = judge(request_, by, attempts, pending, local=LOCAL)
    assert isinstance(found, Decline) and text in found.text


@pytest.mark.parametrize(
    ("by", "attempts", "pending"),
    [
        (rule(), [], []),
        (rule(hours=["20:00-08:00"]), [], []),
        (rule(max_per_day=1), [running(YESTERDAY, State.ENDED)], []),
        (rule(max_at_once=1), [running(TODAY, State.ENDED), attempt(state=State.RUNNING)], [waiting(None)]),
        (rule(tenants=["acme"]), [], []),
        (rule(max_at_once=1, max_per_day=1), [], [msgspec.structs.replace(waiting(TODAY), offering="other")]),
    ],
)
def test_what_is_within_the_bounds_is_accepted(by: JobOfferingRule, attempts: list[Attempt], pending: list[Pending]) -> None:
    assert judge(asked(), by, attempts, pending, local=LOCAL) == Accept()


@pytest.mark.parametrize("price", ["NaN", "-1", "Infinity", float("nan")])
def test_a_price_that_cannot_be_compared_is_refused_where_it_is_read(price: object) -> None:
    written = {**msgspec.to_builtins(rule()), "price_per_hour": price}
    with pytest.raises(msgspec.ValidationError, match="price_per_hour is an amount from 0"):
        msgspec.convert(written, JobOfferingRule)


def test_by_hand_is_asked_of_a_person_whatever_the_hour() -> None:
    assert judge(asked(), rule("by-hand", hours=["08:00-09:00"], max_per_day=1), [running(TODAY)], [], local=LOCAL) == Ask()


def test_nothing_is_offered_of_a_pool_on_which_the_hub_places_work() -> None:
    managed = pool().profile
    assert usable([rule()], {MAIN: managed}) == []
    assert usable([rule()], {MAIN: msgspec.structs.replace(managed, mode=AccessMode.SERVICE)}) == [rule()]


def service_terms(devices: int = 2) -> Terms:
    there = replace(pool(), profile=msgspec.structs.replace(pool().profile, mode=AccessMode.SERVICE))
    return terms(pools={MAIN: there}, offerings={"train": msgspec.structs.replace(rule(), devices=devices)})


def test_the_hub_can_place_nothing_where_the_owner_decides_and_ask_nothing_where_he_does_not() -> None:
    """FEATURES 2: an offer that nobody asked for is refused in a pool of service access, and costs the site nothing."""
    placed = judge_offer(body(), service_terms(), Books(), sent_boot_s=1, kernel_boot="b")
    assert isinstance(placed, NotTaken) and (placed.why.code, placed.why.fault) == ("owner_decides", False)
    chosen = msgspec.structs.replace(asked(), devices=[DeviceId("slot-1")])
    in_managed = judge_offer(chosen, terms(), Books(), sent_boot_s=1, kernel_boot="b")
    assert isinstance(in_managed, NotTaken) and in_managed.why.code == "unknown_offering"


def test_an_offering_takes_no_more_of_its_pool_than_it_says() -> None:
    chosen = msgspec.structs.replace(asked(), devices=[DeviceId("slot-2")])
    held = running(TODAY)
    full = judge_offer(chosen, service_terms(1), Books(attempts={held.id: held}), sent_boot_s=1, kernel_boot="b")
    assert isinstance(full, NotTaken) and full.why.code == "device_busy"
    taken = judge_offer(chosen, service_terms(2), Books(attempts={held.id: held}), sent_boot_s=1, kernel_boot="b")
    assert isinstance(taken, Taken) and taken.attempt.offering == "train"


MINE = attempt(offering="train", asked=[DeviceId("req-1")], devices=("GPU-7",))
COMMON: dict[str, Any] = {"seq": 4, "at": LOCAL, "attempt": MINE.id, "job": MINE.job, "epoch": 1, "generation": 1}


def test_what_is_said_of_a_request_names_no_card_no_node_and_no_native_word() -> None:
    claimed = veiled(Claimed(**COMMON, devices=[DeviceId("GPU-7")]), MINE)
    started = veiled(
        Started(
            **COMMON, started=LOCAL, devices=[DeviceId("GPU-7")], native_id="4711", account="acme", nodes=["n3"], held_devices=["GPU-7"]
        ),
        MINE,
    )
    assert isinstance(claimed, Claimed) and claimed.devices == ["req-1"]
    assert isinstance(started, Started)
    assert (started.devices, started.native_id, started.nodes, started.held_devices) == (["req-1"], "", [], [])
    for entry in (
        SiteQueued(**COMMON, native_id="4711", native_reason="Priority"),
        NativeSeen(**COMMON, native_id="4711", native_state="PENDING"),
    ):
        hidden = veiled(entry, MINE)
        assert isinstance(hidden, Staging) and hidden.seq == 4
    ended = Ended(
        **COMMON,
        outcome="succeeded",
        cause=None,
        exit_code=0,
        signal=None,
        reason="",
        started=LOCAL,
        ended=LOCAL,
        ran_us=1,
        segments=1,
        quantity_milli_us=1,
        last_metering_seq=1,
        native_state="COMPLETED",
        native_reason="None",
    )
    shown = veiled(ended, MINE)
    assert isinstance(shown, Ended) and (shown.native_state, shown.native_reason, shown.exit_code) == ("", "", 0)


def test_what_is_said_of_other_work_is_said_as_it_is() -> None:
    entry = Claimed(**COMMON, devices=[DeviceId("GPU-7")])
    assert veiled(entry, attempt(devices=("GPU-7",))) is entry and veiled(entry, None) is entry


def test_a_pool_of_service_access_shows_its_own_requests_and_nothing_else() -> None:
    there = PoolInventory(
        pool=MAIN,
        devices=[DeviceObserved(device=device, state=DeviceState.LOCAL) for device in pool().devices],
        running=9,
        waiting=7,
    )
    profile = msgspec.structs.replace(pool().profile, mode=AccessMode.SERVICE)
    (shown,) = veiled_pools([there], {MAIN: profile}, [MINE, attempt(state=State.ENDED, offering="train")])
    assert (shown.devices, shown.running, shown.waiting, shown.native) == ([], 1, 0, None)
    assert veiled_pools([there], {MAIN: pool().profile}, [MINE]) == [there]


def test_the_owners_file_is_read_with_its_bounds_and_a_name_that_is_none_is_refused() -> None:
    text = """
[[job_offering]]
name = "night"
pool = "gpu"
max_devices = 2
devices = 4
max_wall_s = 28800
task_types = ["train", "batch"]
price_per_hour = "6.00"
answer_within_s = 900
accept = "rule"
[job_offering.bounds]
tenants = ["acme"]
hours = ["20:00-08:00"]
max_per_day = 10
max_at_once = 2
"""
    (found,) = msgspec.toml.decode(text.encode(), type=Rules).job_offering
    assert (found.price_per_hour, found.bounds.max_per_day, found.told().by_hand) == (Decimal("6.00"), 10, False)
    with pytest.raises(msgspec.ValidationError):
        msgspec.toml.decode(text.replace("max_at_once", "at_once").encode(), type=Rules)
    with pytest.raises(msgspec.ValidationError):
        msgspec.toml.decode(text.replace('"rule"', '"maybe"').encode(), type=Rules)


def test_the_hub_is_told_no_rule_of_the_owners() -> None:
    told = msgspec.to_builtins(rule(tenants=["beta"], hours=["20:00-08:00"]).told())
    assert not {"bounds", "accept"} & set(told) and "beta" not in str(told)
