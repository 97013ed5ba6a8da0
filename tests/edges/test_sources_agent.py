"""A whole agent over an exporter: its site.toml, its beats on a real bus, and the end of an attempt that held the card."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.edges.agent_world import Scheduler, Site, a_pair, place, running_keeper, until
from tests.edges.conftest import RunningHub
from tests.edges.test_sources_exporter import _text as text
from tests.edges.test_sources_exporter import an_exporter, said
from tests.fakes.agents import pool

from intertie.agent.config import write_whole
from intertie.bus.port import Message
from intertie.contracts.link import Ended, Started
from intertie.contracts.site import DeviceState
from intertie.contracts.telemetry import DeviceSample, decode_sample, telemetry_subject


@pytest.fixture
async def pair(operator_hub: RunningHub, short_folder: Path, unique: str) -> AsyncIterator[tuple[Site, Scheduler]]:
    async with a_pair(operator_hub, short_folder, unique) as both:
        yield both


def rules(site: Site, url: str, *, mapping: str = "") -> None:
    lines = ["[probe]", "on = false", "[[telemetry]]", 'source = "dcgm"', f'url = "{url}"', "interval_s = 0.05"]
    lines += [f'mapping = "{mapping}"'] if mapping else []
    site.folder.rules_file.write_text("\n".join(lines) + "\n", encoding="ascii")


async def test_a_card_that_an_exporter_tells_of_is_lent_and_its_use_stands_in_the_end(
    operator_hub: RunningHub, pair: tuple[Site, Scheduler]
) -> None:
    site, scheduler = pair
    seen: dict[str, DeviceSample] = {}

    async def sampled(message: Message) -> None:
        seen.update({device.id: device for device in decode_sample(message.body).devices})

    async with an_exporter() as played, running_keeper(operator_hub, scheduler) as hub:
        rules(site, played.url)
        write_whole(site.folder.pools, [pool(gpus=("GPU-a1",)).profile])
        await hub.subscribe(telemetry_subject(site.name, "*"), sampled)
        site.start()
        await until(lambda: "GPU-a1" in seen and seen["GPU-a1"].state is DeviceState.FREE, "the card is seen", 60)
        assert seen["GPU-a1"].sampled is not None and seen["GPU-a1"].every_s == 0.05
        place(site, scheduler, "sleep 2\n", devices=("GPU-a1",), gpus=1)
        await until(lambda: scheduler.of(Started), "it runs", 60)
        # Only now: a card that is in use and that nobody of ours holds is a stranger's.
        played.answer = lambda _: text(said(util=80, used=30_000))
        await until(lambda: scheduler.of(Ended), "the end is told", 60)
        ((used,),) = [end.device_use for end in scheduler.of(Ended)]
        assert (used.device, used.model, used.max_milli, used.max_memory_mib) == ("GPU-a1", "NVIDIA A100-SXM4-80GB", 800, 30_000)
        assert used.mean_milli is not None and 0 < used.mean_milli <= 800 and used.seen_us > 0
        played.answer = lambda _: text("", 503)
        await until(lambda: seen["GPU-a1"].state is DeviceState.UNKNOWN, "an exporter that is gone leaves the card unknown", 60)
        assert "unknown since" in seen["GPU-a1"].errors["dcgm"] and seen["GPU-a1"].utilisation_percent is None
        assert await asyncio.to_thread(site.end, signal.SIGTERM) == 0


async def test_an_agent_with_a_mapping_that_is_none_does_not_begin_and_says_where(pair: tuple[Site, Scheduler]) -> None:
    site, _ = pair
    rules(site, "http://127.0.0.1:9/metrics", mapping="mine.toml")
    (site.folder.root / "mine.toml").write_text(
        '[device]\nids = ["{UUID}"]\n[[metric]]\nis = "power"\nname = "p"\nunit = "horses"\n', encoding="ascii"
    )
    site.start()
    assert site.process is not None
    code = await asyncio.to_thread(site.process.wait, 60)
    site.process = None
    told = site.logs.read_text(encoding="utf-8")
    assert code != 0 and "agent.mapping" in told and "$.metric[0]" in told, told[-2_000:]
