"""Cards that are offered in two ways never count twice, whatever is declared and reported (FEATURES 119)."""

from __future__ import annotations

from decimal import Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intertie.agent.config import make_pools
from intertie.contracts.site import (
    AccessMode,
    Device,
    DeviceKind,
    DeviceObserved,
    DeviceState,
    Freshness,
    JobOffering,
    Lendable,
    PoolInventory,
    PoolProfile,
    PoolRecord,
    SiteKind,
    TaskType,
)
from intertie.errors import Refused
from intertie.ids import DeviceId, PoolName, SiteName
from intertie.registry.core import inventory, job_offerings, profile, shares

SITE = SiteName("site-a")
A, B = PoolName("pool-a"), PoolName("pool-b")
CARDS = [DeviceId(f"GPU-{n}") for n in range(6)]


def declared(
    pool: PoolName = A, count: int = 4, lends: int = 4, *, mode: AccessMode = AccessMode.MANAGED, names: tuple[str, ...] = ()
) -> PoolProfile:
    return PoolProfile(
        pool=pool,
        mode=mode,
        accelerator="A100-SXM4-80GB",
        count=count,
        memory_mib=81_920,
        interconnect="nvlink",
        task_types=[TaskType.BATCH],
        lendable=Lendable(devices=lends),
        devices=[DeviceId(name) for name in names],
    )


def offering(devices: int, name: str = "train", **changes: object) -> JobOffering:
    base: dict[str, object] = {
        "name": name,
        "pool": A,
        "max_devices": 1,
        "devices": devices,
        "max_wall_s": 3_600,
        "task_types": [TaskType.BATCH],
        "price_per_hour": Decimal(6),
        "answer_within_s": 600,
    }
    return JobOffering(**(base | changes))  # type: ignore[arg-type]  # a table of changes is checked by the test itself


def record(what: PoolProfile, *cards: str, freshness: Freshness = Freshness.FRESH) -> PoolRecord:
    found = profile.declare(None, what, site=SITE, kind=SiteKind.MACHINES, freshness=freshness, by="lab")
    return msgspec.structs.replace(found, inventory=holds(what.pool, *cards))


def holds(pool: PoolName, *cards: str) -> PoolInventory:
    devices = [
        DeviceObserved(device=Device(id=DeviceId(c), kind=DeviceKind.GPU, model="A100-SXM4-80GB"), state=DeviceState.FREE) for c in cards
    ]
    return PoolInventory(pool=pool, devices=devices, running=0, waiting=0)


SERVICE = AccessMode.SERVICE
REFUSED = [
    (declared(names=("GPU-0", "GPU-0")), [], 0, "registry.profile.devices"),
    (declared(count=1, lends=1, names=("GPU-0", "GPU-1")), [], 0, "registry.profile.devices"),
    (declared(names=("GPU-0",)), [record(declared(B, names=("GPU-0", "GPU-5")))], 0, "registry.profile.devices_twice"),
    (declared(lends=3), [], 2, "registry.profile.offered"),
    (declared(mode=SERVICE), [], 5, "registry.profile.offered"),
    (declared(), [record(declared(B), "GPU-0", "GPU-1", "GPU-2", "GPU-3")], 0, "registry.profile.overlap"),
]


@pytest.mark.parametrize(("what", "others", "offered", "code"), REFUSED)
def test_a_declaration_that_would_count_a_card_twice_is_refused_with_what_to_do(
    what: PoolProfile, others: list[PoolRecord], offered: int, code: str
) -> None:
    found = shares.objection(what, others, offered=offered)
    assert found is not None and found.code == code and found.next_step


@pytest.mark.parametrize(
    ("what", "others", "offered"),
    [
        (declared(lends=2), [], 2),
        (declared(mode=SERVICE), [], 4),
        # New cards in a new pool come with their names, before the site has shown them.
        (declared(names=("GPU-8", "GPU-9")), [record(declared(B), "GPU-0", "GPU-1", "GPU-2", "GPU-3")], 0),
        # What is not heard proves nothing.
        (declared(), [record(declared(B), "GPU-0", freshness=Freshness.STALE)], 0),
        (declared(), [record(declared(A), "GPU-0")], 0),
    ],
)
def test_a_declaration_that_counts_each_card_once_stands(what: PoolProfile, others: list[PoolRecord], offered: int) -> None:
    assert shares.objection(what, others, offered=offered) is None


def test_a_card_counts_in_the_pool_that_names_it_whoever_reports_it_first() -> None:
    report = [holds(A, "GPU-0", "GPU-1"), holds(B, "GPU-0")]
    taken = inventory.take(report, {A: None, B: None}, {DeviceId("GPU-0"): B})
    assert [[seen.device.id for seen in taken.pools[pool].devices] for pool in (A, B)] == [["GPU-1"], ["GPU-0"]]
    assert taken.doubled == {"GPU-0": (B, A)}


def test_a_name_that_no_declared_pool_has_takes_nothing_away() -> None:
    taken = inventory.take([holds(A, "GPU-0")], {A: None}, {DeviceId("GPU-0"): PoolName("gone")})
    assert [seen.device.id for seen in taken.pools[A].devices] == ["GPU-0"]


some_cards = st.lists(st.sampled_from(CARDS), max_size=6, unique=True)
pool_names = st.sampled_from([PoolName(f"pool-{letter}") for letter in "abc"])


@given(
    st.lists(st.tuples(pool_names, some_cards), max_size=4, unique_by=lambda one: one[0]),
    st.dictionaries(pool_names, some_cards, max_size=3),
    st.dictionaries(st.sampled_from(CARDS), pool_names, max_size=6),
)
def test_whatever_is_reported_each_card_counts_in_one_pool_at_most(
    report: list[tuple[PoolName, list[DeviceId]]], before: dict[PoolName, list[DeviceId]], named: dict[DeviceId, PoolName]
) -> None:
    held = {pool: holds(pool, *cards) for pool, cards in before.items()}
    taken = inventory.take([holds(pool, *cards) for pool, cards in report], held, named)
    counted = [seen.device.id for one in taken.pools.values() for seen in one.devices]
    assert len(counted) == len(set(counted))
    assert set(counted) <= {card for _, cards in report for card in cards}


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.sampled_from(AccessMode), st.integers(0, 7)), max_size=12))
def test_after_any_declarations_what_is_lent_and_what_is_offered_are_different_cards(steps: list[tuple[int, int, AccessMode, int]]) -> None:
    standing: PoolRecord | None = None
    for count, lends, mode, offered in steps:
        what = declared(count=count, lends=min(lends, count), mode=mode)
        if shares.objection(what, [standing] if standing else [], offered=offered) is None:
            after = profile.declare(standing, what, site=SITE, kind=SiteKind.SLURM, freshness=Freshness.FRESH, by="lab")
            standing = msgspec.structs.replace(after, offerings=[offering(offered)] if offered else [])
        if standing is not None:
            assert shares.lent(standing.profile) + standing.offered_devices <= standing.profile.count


@given(st.lists(st.tuples(st.integers(1, 6), some_cards), min_size=1, max_size=3))
def test_the_agent_puts_a_card_into_one_pool_only(pools: list[tuple[int, list[DeviceId]]]) -> None:
    profiles = [declared(PoolName(f"pool-{n}"), count, 1, names=tuple(names[:count])) for n, (count, names) in enumerate(pools)]
    gpus = [Device(id=card, kind=DeviceKind.GPU, model="NVIDIA A100-SXM4-80GB") for card in CARDS]
    made = [device.id for pool in make_pools(profiles, gpus, "node-1") for device in pool.devices]
    assert len(made) == len(set(made))


def test_a_pool_that_names_its_cards_gets_those_and_the_other_the_rest() -> None:
    gpus = [Device(id=card, kind=DeviceKind.GPU, model="NVIDIA A100-SXM4-80GB") for card in CARDS]
    first, second = make_pools([declared(A, 6, 6), declared(B, 2, 2, names=("GPU-0", "GPU-3"))], gpus, "node-1")
    assert ([d.id for d in first.devices], [d.id for d in second.devices]) == (["GPU-1", "GPU-2", "GPU-4", "GPU-5"], ["GPU-0", "GPU-3"])


def test_a_refusal_says_its_numbers() -> None:
    found = shares.share_objection(declared(lends=3), 2)
    assert isinstance(found, Refused) and "lends 3" in found.text and "take 2" in found.text and "of 4" in found.text


@pytest.mark.parametrize(
    ("told", "pool", "code"),
    [
        ([offering(1), offering(1)], declared(mode=SERVICE), "registry.offering.twice"),
        ([offering(1, pool=B)], declared(mode=SERVICE), "registry.offering.pool"),
        ([offering(1)], declared(lends=2), "registry.offering.managed"),
        ([offering(1, max_devices=2)], declared(mode=SERVICE), "registry.offering.devices"),
        ([offering(1, price_per_hour=Decimal("1e999999"))], declared(mode=SERVICE), "registry.offering.price"),
        ([offering(1, price_per_hour=Decimal(-1))], declared(mode=SERVICE), "registry.offering.price"),
        ([offering(3), offering(2, "more")], declared(mode=SERVICE), "registry.offering.share"),
        ([offering(1, str(n)) for n in range(65)], declared(count=80, mode=SERVICE), "registry.offering.many"),
    ],
)
def test_an_offering_that_breaks_a_rule_is_left_out_and_the_others_stand(told: list[JobOffering], pool: PoolProfile, code: str) -> None:
    found = job_offerings.take(told, [record(pool)])
    (refused,) = found.refused.values()
    assert refused.code == code and refused.next_step
    assert sum(len(one.offerings) for one in found.pools) == len(told) - 1


def test_the_same_word_again_changes_nothing_and_what_is_no_more_told_is_gone() -> None:
    (first,) = job_offerings.take([offering(2)], [record(declared(mode=SERVICE))]).pools
    assert job_offerings.take([offering(2)], [first]).pools == []
    (second,) = job_offerings.take([], [first]).pools
    assert (second.offerings, second.version) == ([], first.version + 1)


def test_what_is_offered_cannot_be_lent_by_a_later_declaration() -> None:
    (standing,) = job_offerings.take([offering(3)], [record(declared(mode=SERVICE))]).pools
    found = shares.objection(declared(lends=2), [standing], offered=standing.offered_devices)
    assert found is not None and found.code == "registry.profile.offered"


@given(st.lists(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 5)), max_size=5), max_size=5))
def test_whatever_is_offered_the_offerings_of_a_pool_never_take_more_than_it_has(words: list[list[tuple[str, int]]]) -> None:
    standing = record(declared(mode=SERVICE))
    for word in words:
        found = job_offerings.take([offering(devices, name) for name, devices in word], [standing])
        standing = found.pools[0] if found.pools else standing
        assert standing.offered_devices <= standing.profile.count
