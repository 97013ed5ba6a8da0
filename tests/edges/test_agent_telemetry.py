"""The real nvidia-ml-py over a library that we break: cards lost, foreign, mute, stuck; and never an invented number."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.conftest import new_short_folder
from tests.fakes.agents import attempt, offer, pool
from tests.fakes.gpus import build, has_compiler
from tests.fakes.sites import a_site

from intertie.agent.adapters.process import ProcessAdapter
from intertie.agent.config import make_pools
from intertie.agent.core.devices import Holds
from intertie.agent.core.model import StartedRecord
from intertie.agent.nvml import Driver
from intertie.agent.telemetry import Collector, Telemetry
from intertie.clock import SystemClock
from intertie.contracts.link import OfferRefused
from intertie.contracts.site import DeviceKind, DeviceState
from intertie.contracts.telemetry import DeviceSample, decode_sample, encode_sample
from intertie.ids import DeviceId

GIB = 1 << 30
LOST = "15"
NO_PERMISSION = "4"
METRICS_OF_A_CARD = ("uuid", "name", "mem_total", "util", "temp", "power_mw", "procs")


@pytest.fixture(scope="session")
def library() -> Iterator[Path]:
    if not has_compiler():
        pytest.skip("no gcc here to build the library that plays the driver")
    folder = new_short_folder()
    yield build(folder)
    shutil.rmtree(folder)


class Rig:
    """A played driver: `set` changes what it says from the next sample on."""

    def __init__(self, library: Path, folder: Path, cards: int) -> None:
        shutil.copy(library, folder / library.name)
        self.file = folder / "cards"
        self.says: dict[str, str] = {"count": str(cards)}
        for n in range(cards):
            self.says |= {
                f"{n}.uuid": f"GPU-{n}",
                f"{n}.name": "NVIDIA A100-SXM4-80GB",
                f"{n}.mem_total": str(80 * GIB),
                f"{n}.mem_used": str(n * GIB),
                f"{n}.util": "40",
                f"{n}.temp": "50",
                f"{n}.power_mw": "300500",
                f"{n}.procs": "",
            }
        self.set({})
        env = {"LD_LIBRARY_PATH": str(folder), "PATH": os.environ["PATH"]}
        self.collector = Collector(env=env, deadline_s=1.5)
        self.telemetry = Telemetry(self.collector, SystemClock(), "node-1")
        self.roots: dict[int, object] = {}

    def set(self, changes: Mapping[str, str | None]) -> None:
        for key, value in changes.items():
            if value is None:
                self.says.pop(key, None)
            else:
                self.says[key] = value
        part = self.file.with_suffix(".part")
        part.write_text("".join(f"{key}={value}\n" for key, value in self.says.items()), encoding="latin-1")
        part.rename(self.file)

    async def look(self) -> Mapping[DeviceId, DeviceState]:
        return await self.telemetry.look(set(self.roots))

    async def samples(self) -> Mapping[str, DeviceSample]:
        seen = await self.look()
        pools = make_pools([pool(gpus=("a", "b")).profile, pool(2, name="cpu").profile], list(self.telemetry.known.values()), "node-1")
        sample = self.telemetry.sample(pools, Holds(), {}, seen, set(self.roots))
        return {device.id: device for device in decode_sample(encode_sample(sample)).devices}


@pytest.fixture
async def rig(library: Path, short_folder: Path) -> AsyncIterator[Rig]:
    made = Rig(library, short_folder, 2)
    yield made
    await made.telemetry.close()


async def test_a_healthy_node_tells_every_card_and_slot(rig: Rig) -> None:
    found = await rig.samples()
    card = found["GPU-1"]
    assert (card.state, card.model, card.memory_total_mib, card.memory_used_mib) == (DeviceState.FREE, "A100-SXM4-80GB", 81_920, 1_024)
    assert (card.utilisation_percent, card.temperature_c, card.power_w, card.errors) == (40, 50, 300.5, {})
    assert [found[name].state for name in ("slot-1", "slot-2")] == [DeviceState.FREE, DeviceState.FREE]


BROKEN = [("no handle", {"0.error": LOST}), ("every call fails", {f"0.error.{metric}": LOST for metric in METRICS_OF_A_CARD})]


@pytest.mark.parametrize(("what", "broken"), BROKEN, ids=[row[0] for row in BROKEN])
async def test_one_lost_card_keeps_its_name_and_hides_no_other(rig: Rig, what: str, broken: Mapping[str, str]) -> None:
    """BR-096."""
    await rig.look()
    rig.set(broken)
    found = await rig.samples()
    assert (found["GPU-0"].state, found["GPU-1"].state) == (DeviceState.LOST, DeviceState.FREE)


async def test_a_card_that_the_driver_counts_no_more_is_lost_and_the_other_is_itself(rig: Rig) -> None:
    await rig.look()
    rig.set({"count": "1", "0.uuid": "GPU-1"})
    found = await rig.look()
    assert found == {DeviceId("GPU-1"): DeviceState.FREE, DeviceId("GPU-0"): DeviceState.LOST}


async def test_a_lost_card_that_comes_back_is_free_again(rig: Rig) -> None:
    await rig.look()
    rig.set({"0.error": LOST})
    await rig.look()
    rig.set({"0.error": None})
    assert await rig.look() == {DeviceId("GPU-0"): DeviceState.FREE, DeviceId("GPU-1"): DeviceState.FREE}


METRICS = [
    ("unified memory has no framebuffer numbers (BR-094)", {"0.mem_total": None}, "memory_total_mib", "memory", "NotSupported"),
    ("a total of zero is no size (BR-094)", {"0.mem_total": "0"}, "memory_total_mib", "", ""),
    ("utilisation in MIG mode is not zero (BR-095)", {"0.util": None}, "utilisation_percent", "utilisation", "NotSupported"),
    (
        "an impossible utilisation (BR-105)",
        {"0.util": "4294967295"},
        "utilisation_percent",
        "utilisation",
        "impossible reading 4294967295",
    ),
    ("a hundred is the most (BR-105)", {"0.util": "1532"}, "utilisation_percent", "utilisation", "impossible reading 1532"),
    ("a power of minus one (BR-105)", {"0.power_mw": "4294967295"}, "power_w", "power", "impossible reading 4294967295"),
    ("an impossible temperature (BR-105)", {"0.temp": "300"}, "temperature_c", "temperature", "impossible reading 300"),
    ("power needs permission", {"0.error.power_mw": NO_PERMISSION}, "power_w", "power", "NoPermission"),
]


@pytest.mark.parametrize(("what", "change", "field", "metric", "why"), METRICS, ids=[row[0] for row in METRICS])
async def test_a_metric_that_cannot_be_read_is_none_and_the_others_stay(
    rig: Rig, what: str, change: Mapping[str, str | None], field: str, metric: str, why: str
) -> None:
    rig.set(change)
    card = (await rig.samples())["GPU-0"]
    assert getattr(card, field) is None and card.errors.get(metric, "") == why
    assert card.state is DeviceState.FREE


async def test_a_name_that_is_no_text_leaves_the_card_in_the_list(rig: Rig) -> None:
    """BR-101: the name is null, the UUID counts. It is in no pool until its model is known."""
    rig.set({"0.name": "NVIDIA \xf8"})
    await rig.look()
    assert {device.id: device.model for device in rig.telemetry.known.values()} == {"GPU-0": "", "GPU-1": "A100-SXM4-80GB"}


@pytest.mark.parametrize(("said", "name"), [("NVIDIA L4", "NVIDIA L4"), (b"NVIDIA L4", "NVIDIA L4"), (b"NVIDIA \xf8", None)])
def test_a_binding_of_another_version_answers_in_bytes_or_in_text(said: bytes | str, name: str | None) -> None:
    """BR-101: what it cannot say is null, and the card is listed by its UUID."""

    class Mute(Exception):
        value = 0

    def mute(*_: object) -> None:
        raise Mute("Not Supported")

    class Binding(SimpleNamespace):
        def __getattr__(self, _: str) -> object:
            return mute

    binding = Binding(
        NVMLError=Mute,
        NVMLError_LibraryNotFound=KeyError,
        NVMLError_DriverNotLoaded=KeyError,
        NVML_ERROR_GPU_IS_LOST=15,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda _: "GPU-0",
        nvmlDeviceGetName=lambda _: said,
    )
    (card,) = Driver(binding).read().cards
    assert (card.uuid, card.name, "name" in card.errors) == ("GPU-0", name, name is None)


async def test_a_process_that_is_not_ours_makes_a_card_foreign(rig: Rig) -> None:
    rig.set({"0.procs": str(os.getppid())})
    found = await rig.samples()
    assert (found["GPU-0"].state, found["GPU-0"].foreign_processes) == (DeviceState.FOREIGN, 1)
    assert (found["GPU-1"].state, found["GPU-1"].foreign_processes) == (DeviceState.FREE, 0)


def children_of(pid: str) -> list[str]:
    """Waits until there is one."""
    for _ in range(1_000):
        if pids := Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
            return pids
        time.sleep(0.01)
    raise AssertionError("no child within ten seconds")


async def test_a_child_of_our_job_is_ours_and_a_process_that_is_gone_is_nobody_s(rig: Rig, short_folder: Path) -> None:
    adapter = ProcessAdapter(short_folder / "jobs")
    job = attempt("sleep 30 & wait\n", kind=DeviceKind.GPU, devices=("GPU-0",))
    await adapter.prepare(job, None)
    started = await adapter.start(job)
    assert isinstance(started, StartedRecord)
    pids = await asyncio.to_thread(children_of, started.native_id)
    rig.roots = dict(adapter.roots())
    rig.set({"0.procs": f"{pids[0]},4000000"})
    found = await rig.samples()
    await adapter.stop(job.id, 0)
    await adapter.ended(job)
    assert (found["GPU-0"].our_processes, found["GPU-0"].foreign_processes) == (1, 0)


@pytest.mark.parametrize("trouble", ["hang", "crash"])
async def test_a_driver_that_hangs_or_kills_its_reader_says_unknown_and_is_tried_again(rig: Rig, trouble: str) -> None:
    """BR-097, BR-096: no old number gets a new time."""
    await rig.look()
    rig.set({trouble: "1"})
    found = await rig.samples()
    assert found["GPU-0"].state is DeviceState.UNKNOWN and found["GPU-0"].utilisation_percent is None
    assert "nvml" in found["GPU-0"].errors and found["slot-1"].state is DeviceState.FREE
    rig.set({trouble: None})
    async with asyncio.timeout(15):
        while (await rig.look())[DeviceId("GPU-0")] is not DeviceState.FREE:  # noqa: ASYNC110  # nothing but looking tells
            await asyncio.sleep(0.1)
    assert rig.collector.restarts == 1


NONE = [
    ("no library", {"PATH": os.environ["PATH"]}, "Not Found"),
    ("no driver", {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "?"}, "Driver Not Loaded"),
]


@pytest.mark.parametrize(("what", "env", "said"), NONE, ids=[row[0] for row in NONE])
async def test_a_machine_without_gpus_says_so_and_why(library: Path, what: str, env: Mapping[str, str], said: str) -> None:
    telemetry = Telemetry(Collector(env={k: v.replace("?", str(library.parent)) for k, v in env.items()}), SystemClock(), "node-1")
    try:
        assert await telemetry.look(()) == {}
        assert said in telemetry.none
    finally:
        await telemetry.close()


async def test_an_offer_of_a_lost_card_is_refused_with_fault_and_of_a_foreign_one_without(rig: Rig, short_folder: Path) -> None:
    await rig.look()
    cards = pool(gpus=("GPU-0", "GPU-1"))
    rig.set({"0.error": LOST, "1.procs": str(os.getppid())})
    async with a_site(short_folder, pools=[cards]) as world:
        await world.site.observe(await rig.look())
        await world.tell(world.offered(offer(devices=("GPU-0",), gpus=1)), world.offered(offer(devices=("GPU-1",), gpus=1)))
        refused = {(e.code, e.fault) for e in await world.entries() if isinstance(e, OfferRefused)}
        assert refused == {("device_lost", True), ("device_busy", False)}
