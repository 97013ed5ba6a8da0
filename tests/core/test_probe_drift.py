"""Declared against seen, by table: what differs is told with its numbers, what was not read differs from nothing."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.agents import pool

from intertie.agent.core.devices import Holds
from intertie.agent.core.model import EndedRecord
from intertie.agent.core.probing import MARK, pick, prove
from intertie.agent.core.seen import pools_seen
from intertie.agent.sources.reading import CardReading
from intertie.contracts.observed import PoolSeen
from intertie.contracts.probe import ProbeOutcome, ProbeReport
from intertie.contracts.site import (
    AccessMode,
    Device,
    DeviceKind,
    DeviceObserved,
    DeviceState,
    Freshness,
    NativeLoad,
    Phase,
    PoolInventory,
    PoolRecord,
    SiteKind,
)
from intertie.ids import DeviceId, PoolName, SiteName
from intertie.registry.core.proof import drift, drifted, probed

T0 = datetime(2026, 12, 1, tzinfo=UTC)
SITE, MAIN = SiteName("site-a"), PoolName("main")
TWO = pool(gpus=("GPU-1", "GPU-2"))


def record(
    seen: PoolSeen | None = None,
    states: tuple[DeviceState, ...] | None = (DeviceState.FREE, DeviceState.OURS),
    *,
    interconnect: str = "nvlink",
    native: NativeLoad | None = None,
    mode: AccessMode = AccessMode.MANAGED,
) -> PoolRecord:
    inventory = None
    if states is not None:
        devices = [
            DeviceObserved(device=Device(id=DeviceId(f"GPU-{n}"), kind=DeviceKind.GPU), state=state) for n, state in enumerate(states)
        ]
        inventory = PoolInventory(pool=MAIN, devices=devices, running=0, waiting=0, native=native, seen=seen)
    return PoolRecord(
        site=SITE,
        pool=MAIN,
        kind=SiteKind.MACHINES,
        profile=msgspec.structs.replace(TWO.profile, interconnect=interconnect, mode=mode),
        phase=Phase.PRODUCTION,
        cordoned=False,
        draining=False,
        cordon_reason="",
        freshness=Freshness.FRESH,
        last_heard=None,
        inventory=inventory,
        inventory_at=None,
        version=1,
    )


FINE = PoolSeen(models={"A100-SXM4-80GB": 2}, memory_mib=81_920, links=12, driver="550.90.07")
ROWS: list[tuple[str, PoolRecord, list[str]]] = [
    ("as declared", record(FINE), []),
    ("nothing was told yet", record(None, None), []),
    ("nothing of it could be read", record(PoolSeen()), []),
    ("a card is missing", record(FINE, (DeviceState.FREE,)), ["count"]),
    ("a card fell off the bus", record(FINE, (DeviceState.FREE, DeviceState.LOST)), ["lost"]),
    ("a card that cannot be read is not gone", record(FINE, (DeviceState.FREE, DeviceState.UNKNOWN)), []),
    ("another model", record(msgspec.structs.replace(FINE, models={"A100-SXM4-40GB": 2})), ["model"]),
    ("another model in its place", record(PoolSeen(others={"L4": 2}), ()), ["count", "model"]),
    ("the driver's prefix is no other model", record(msgspec.structs.replace(FINE, models={"NVIDIA A100-SXM4-80GB": 2})), []),
    ("the driver keeps some memory", record(msgspec.structs.replace(FINE, memory_mib=81_559)), []),
    ("half the memory", record(msgspec.structs.replace(FINE, memory_mib=40_960)), ["memory"]),
    ("no link is active", record(msgspec.structs.replace(FINE, links=0)), ["interconnect"]),
    ("links that were not declared", record(FINE, interconnect="pcie"), ["interconnect"]),
    ("BR-104: a value that stays blank", record(msgspec.structs.replace(FINE, unread={"memory_used": 2})), ["unread"]),
    ("links that could not be read", record(msgspec.structs.replace(FINE, links=None), interconnect="pcie"), []),
    ("a pool in which its owner alone decides shows no cards", record(None, (), mode=AccessMode.SERVICE), []),
    ("rights of a queue are no cards to count", record(FINE, (DeviceState.FREE,), native=NativeLoad()), []),
]


@pytest.mark.parametrize(("about", "seen", "differs"), ROWS, ids=[row[0] for row in ROWS])
def test_what_differs_from_the_declaration_is_told_with_its_numbers(about: str, seen: PoolRecord, differs: list[str]) -> None:
    found = drift(seen, [])
    assert [one.what for one in found] == differs
    assert all(one.declared and one.observed and one.observed in one.text for one in found)
    assert drifted(SITE, MAIN, found).recovered is not bool(found)


def report(outcome: ProbeOutcome = ProbeOutcome.PASSED, **measures: int) -> ProbeReport:
    return ProbeReport(
        probe="p",
        site=SITE,
        pool=MAIN,
        kind=DeviceKind.GPU,
        device=DeviceId("GPU-1"),
        account="a",
        at=T0,
        outcome=outcome,
        measures=measures,
    )


def test_a_measure_drifts_below_its_share_of_the_middle_of_those_before() -> None:
    past = [report(device_copy_mib_s=speed) for speed in (900_000, 1_000_000, 1_000_000, 1_100_000, 1_000_000)]
    assert drift(record(FINE), [report(device_copy_mib_s=810_000), *past]) == []
    (found,) = drift(record(FINE), [report(device_copy_mib_s=500_000), *past])
    assert (found.what, found.declared, found.observed) == ("device_copy_mib_s", "1000000", "500000")
    assert drift(record(FINE), [report(device_copy_mib_s=500_000), *past[1:]]) == [], "four say nothing yet"
    assert drift(record(FINE), [report(), *past]) == [], "what was not measured is not slow"
    assert drift(record(FINE), [report(ProbeOutcome.FAILED, device_copy_mib_s=1), *past]) == [], "that is told by its failure"


def test_a_probe_that_proves_nothing_neither_opens_nor_ends_an_incident() -> None:
    said = {outcome: probed(report(outcome)) for outcome in ProbeOutcome}
    assert said[ProbeOutcome.UNPROVEN] is None
    failed, passed = said[ProbeOutcome.FAILED], said[ProbeOutcome.PASSED]
    assert failed is not None and passed is not None and failed.key == passed.key and (failed.recovered, passed.recovered) == (False, True)


def ended(outcome: str = "succeeded", reason: str = "exit code 0") -> EndedRecord:
    return EndedRecord(outcome=outcome, cause=None, exit_code=0, signal=None, reason=reason, ended=T0, ran_us=1)


def said(**fields: Any) -> str:
    base: Mapping[str, Any] = {"visible": 1, "model": "NVIDIA A100-SXM4-80GB", "measures": {"memory_mib": 81_559, "cpu_hash_mib_s": 900}}
    return "noise\n" + MARK + msgspec.json.encode({**base, **fields}).decode() + "\n"


PROOFS = [
    ("all is right", ended(), said(), ProbeOutcome.PASSED, ""),
    ("nobody saw its end", ended("unknown"), said(), ProbeOutcome.UNPROVEN, "nobody saw"),
    ("it was never run", None, "", ProbeOutcome.UNPROVEN, "nobody saw"),
    ("it failed", ended("failed", "exit code 3"), said(), ProbeOutcome.FAILED, "exit code 3"),
    ("it printed nothing", ended(), "hello\n", ProbeOutcome.UNPROVEN, "printed nothing"),
    ("it printed no JSON", ended(), MARK + "{]", ProbeOutcome.FAILED, "cannot be read"),
    ("it saw two devices", ended(), said(visible=2), ProbeOutcome.FAILED, "sees 2"),
    ("it saw none", ended(), said(visible=0), ProbeOutcome.FAILED, "sees 0"),
    ("it had no means to see", ended(), said(visible=None, model="", measures={}), ProbeOutcome.UNPROVEN, "nothing in the job"),
    ("another model", ended(), said(model="NVIDIA L4"), ProbeOutcome.FAILED, "the device is L4"),
    ("less memory", ended(), said(measures={"memory_mib": 40_000}), ProbeOutcome.FAILED, "40000 MiB"),
    ("a wrong sum", ended(), said(wrong=["the processor computes a wrong sum"]), ProbeOutcome.FAILED, "wrong sum"),
]


@pytest.mark.parametrize(("about", "end", "log", "outcome", "why"), PROOFS, ids=[row[0] for row in PROOFS])
def test_what_a_run_proves(about: str, end: EndedRecord | None, log: str, outcome: ProbeOutcome, why: str) -> None:
    found = prove(TWO, end, log)
    assert found.outcome is outcome and why in found.reason


NAMES = st.sampled_from(["visible", "model", "measures", "not_measured", "wrong", "memory_mib"])
LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
JSON = st.recursive(LEAF, lambda part: st.lists(part, max_size=3) | st.dictionaries(NAMES, part, max_size=5), max_leaves=12)


@given(st.text(max_size=200) | JSON)
def test_a_job_that_prints_garbage_proves_nothing_and_breaks_nothing(garbage: object) -> None:
    text = garbage if isinstance(garbage, str) else msgspec.json.encode(garbage).decode()
    found = prove(TWO, ended(), f"{MARK}{text}\n")
    if found.outcome is ProbeOutcome.PASSED:
        assert found.visible == 1
    assert all(0 <= value <= 2**53 for value in found.measures.values())
    report(found.outcome, **{})


def test_whoever_waits_comes_before_a_probe_and_it_takes_another_device_than_last_time() -> None:
    free = {DeviceId("GPU-1"): DeviceState.FREE, DeviceId("GPU-2"): DeviceState.FREE}
    assert pick(TWO, Holds(), [], free, None, paused=False) == "GPU-2"
    assert pick(TWO, Holds(), [], free, DeviceId("GPU-2"), paused=False) == "GPU-1"
    assert pick(TWO, Holds(), [], free, None, paused=True) == "lending is paused"
    assert pick(TWO, Holds(), [], {}, None, paused=False) == "no device of the pool is free"


def test_what_a_look_could_not_read_stays_as_it_was_read_before() -> None:
    card = CardReading(index=0, uuid="GPU-1", links=12)
    devices = [*TWO.devices, Device(id=DeviceId("GPU-9"), kind=DeviceKind.GPU, model="L4")]
    first = pools_seen([TWO], devices, {DeviceId("GPU-1"): card}, {}, driver="550", agent_version="1")
    assert (first[MAIN].links, first[MAIN].others, first[MAIN].driver) == (12, {"L4": 1}, "550")
    assert pools_seen([TWO], devices, {}, first, driver="", agent_version="1") == first
