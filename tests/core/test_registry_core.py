"""What a pool may be declared to be, and what its devices count for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from intertie.contracts.site import (
    Device,
    DeviceKind,
    DeviceObserved,
    DeviceState,
    Freshness,
    Lendable,
    Phase,
    PoolInventory,
    PoolProfile,
    PoolRecord,
    SiteKind,
    TaskType,
)
from intertie.errors import Refused
from intertie.ids import DeviceId, PoolName, SiteName
from intertie.registry.core import inventory, profile

T0 = datetime(2026, 5, 1, 12, tzinfo=UTC)
SITE = SiteName("site-a")
A, B = PoolName("pool-a"), PoolName("pool-b")

GPUS = PoolProfile(
    pool=A,
    accelerator="A100-SXM4-80GB",
    count=8,
    memory_mib=81_920,
    interconnect="nvlink",
    task_types=[TaskType.TRAIN],
    lendable=Lendable(devices=4, windows=["20:00-08:00", "12:00-24:00"]),
)
SLOTS = PoolProfile(
    pool=B, accelerator="none", count=2, memory_mib=0, interconnect="none", task_types=[TaskType.BATCH], lendable=Lendable(devices=2)
)


def but(**changes: Any) -> PoolProfile:
    return msgspec.structs.replace(GPUS, **changes)


def declared(what: PoolProfile = GPUS, current: PoolRecord | None = None) -> PoolRecord:
    return profile.declare(current, what, site=SITE, kind=SiteKind.MACHINES, freshness=Freshness.UNKNOWN, by="owner")


# In the order of the ladder: each row breaks its own rule and, where it can, every later one too.
LADDER = [
    (but(pool="Pool A", accelerator="gpu"), "name.invalid"),
    (but(pool="all"), "name.reserved"),
    (but(accelerator="GPU", count=70_000, memory_mib=0), "registry.profile.accelerator"),
    (but(accelerator=" nvidia "), "registry.profile.accelerator"),
    (but(accelerator=""), "registry.profile.accelerator"),
    (but(count=70_000, memory_mib=0), "registry.profile.count"),
    (but(memory_mib=0, interconnect="unknown"), "registry.profile.memory"),
    (but(memory_mib=80), "registry.profile.memory"),  # GiB written for MiB
    (but(interconnect="unknown", task_types=[TaskType.TRAIN, TaskType.TRAIN]), "registry.profile.interconnect"),
    (but(interconnect="?"), "registry.profile.interconnect"),
    (but(task_types=[TaskType.TRAIN, TaskType.TRAIN], lendable=Lendable(devices=9)), "registry.profile.task_types"),
    (but(lendable=Lendable(devices=9, windows=["x"])), "registry.profile.lendable"),
    (but(lendable=Lendable(devices=1, windows=["8:00-9:00"])), "registry.profile.window"),
    (but(lendable=Lendable(devices=1, windows=["08:00-08:00"])), "registry.profile.window"),
    (but(lendable=Lendable(devices=1, windows=["08:00-25:00"])), "registry.profile.window"),
    (but(lendable=Lendable(devices=1, windows=["08:00-09:00"] * 33)), "registry.profile.window"),
]


@pytest.mark.parametrize(("vague", "code"), LADDER)
def test_a_vague_profile_is_refused_by_the_first_rule_it_breaks(vague: PoolProfile, code: str) -> None:
    found = profile.objection(vague)
    assert found is not None and found.code == code
    assert found.next_step or code.startswith("name.")


def test_codes_come_in_the_order_of_the_ladder() -> None:
    codes = list(dict.fromkeys(code.split(".")[-1] for _, code in LADDER if code.startswith("registry")))
    assert codes == ["accelerator", "count", "memory", "interconnect", "task_types", "lendable", "window"]


@pytest.mark.parametrize("fine", [GPUS, SLOTS, but(interconnect="none"), but(lendable=Lendable(devices=0))])
def test_a_whole_profile_stands(fine: PoolProfile) -> None:
    assert profile.objection(fine) is None


def test_a_new_pool_starts_as_a_pilot_with_revision_one() -> None:
    record = declared()
    assert (record.phase, record.profile.revision, record.profile.declared_by, record.version) == (Phase.PILOT, 1, "owner", 1)


def test_the_same_declaration_again_is_no_new_revision_whatever_number_the_site_wrote() -> None:
    record = declared()
    assert declared(but(revision=7, declared_by="somebody"), record) is record


def test_a_new_declaration_is_the_next_revision_and_keeps_the_phase() -> None:
    record = msgspec.structs.replace(declared(), phase=Phase.PRODUCTION, cordoned=True)
    after = declared(but(count=16), record)
    assert (after.profile.revision, after.profile.count, after.phase, after.cordoned) == (2, 16, Phase.PRODUCTION, True)


def test_a_refused_declaration_leaves_the_previous_revision() -> None:
    with pytest.raises(Refused):
        declared(but(accelerator="gpu"), declared())


@pytest.mark.parametrize(
    ("accelerator", "task_type", "fits"),
    [
        (None, None, True),
        ("a100-sxm4-80gb", None, True),
        ("H100", None, False),
        (None, TaskType.TRAIN, True),
        (None, TaskType.INFERENCE, False),
        ("A100-SXM4-80GB", TaskType.INFERENCE, False),
    ],
)
def test_sites_are_found_by_capability(accelerator: str | None, task_type: TaskType | None, fits: bool) -> None:
    assert profile.fits(declared(), accelerator=accelerator, task_type=task_type) is fits


def holds(pool: PoolName, *ids: str, kind: DeviceKind = DeviceKind.GPU) -> PoolInventory:
    devices = [DeviceObserved(device=Device(id=DeviceId(i), kind=kind), state=DeviceState.FREE) for i in ids]
    return PoolInventory(pool=pool, devices=devices, running=0, waiting=0)


def counted(taken: inventory.Taken) -> dict[str, list[str]]:
    return {pool: [d.device.id for d in i.devices] for pool, i in taken.pools.items()}


@pytest.mark.parametrize(
    ("before", "report", "after", "refused"),
    [
        ({A: None, B: None}, [holds(A, "g0"), holds(B, "g1")], {A: ["g0"], B: ["g1"]}, []),
        # new in both: the pool named first keeps it
        ({A: None, B: None}, [holds(A, "g0"), holds(B, "g0", "g1")], {A: ["g0"], B: ["g1"]}, ["g0"]),
        # B held it before: it stays there, whatever the order of the report
        ({A: None, B: holds(B, "g0")}, [holds(A, "g0"), holds(B, "g0")], {A: [], B: ["g0"]}, ["g0"]),
        # each holds one of two contested cards
        (
            {A: holds(A, "g0"), B: holds(B, "g1")},
            [holds(A, "g0", "g1"), holds(B, "g0", "g1")],
            {A: ["g0"], B: ["g1"]},
            ["g0", "g1"],
        ),
        # the holder gave it up: the other may have it now
        ({A: holds(A, "g0"), B: None}, [holds(A), holds(B, "g0")], {A: [], B: ["g0"]}, []),
    ],
)
def test_a_card_in_two_pools_counts_once(
    before: dict[PoolName, PoolInventory | None], report: list[PoolInventory], after: dict[str, list[str]], refused: list[str]
) -> None:
    taken = inventory.take(report, before)
    assert counted(taken) == after
    assert sorted(taken.doubled) == refused


def test_slots_of_two_pools_may_bear_the_same_number() -> None:
    taken = inventory.take([holds(A, "slot-0", kind=DeviceKind.SLOT), holds(B, "slot-0", kind=DeviceKind.SLOT)], {A: None, B: None})
    assert counted(taken) == {A: ["slot-0"], B: ["slot-0"]} and not taken.doubled


def test_a_pool_that_nobody_declared_counts_for_nothing() -> None:
    taken = inventory.take([holds(A, "g0"), holds(B, "g0")], {A: None})
    assert counted(taken) == {A: ["g0"]} and taken.undeclared == [B]


def test_an_unchanged_inventory_only_gets_younger() -> None:
    first = inventory.apply(declared(), holds(A, "g0"), at=T0)
    again = inventory.apply(first, holds(A, "g0"), at=T0 + timedelta(minutes=1))
    assert (again.version, again.inventory_at) == (first.version, T0 + timedelta(minutes=1))


def test_an_older_inventory_changes_nothing() -> None:
    """BR-066: a replayed backlog goes to history and never refreshes what is current."""
    first = inventory.apply(declared(), holds(A, "g0"), at=T0)
    assert inventory.apply(first, holds(A, "g1"), at=T0 - timedelta(seconds=1)) is first
