"""Exporters over real sockets: gone, slow, moved, too large, lying; several sources as one; slices by the driver itself."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from tests.conftest import new_short_folder
from tests.fakes.agents import pool
from tests.fakes.gpus import Rack, has_compiler

from intertie.agent.config import make_pools
from intertie.agent.core.devices import Holds
from intertie.agent.core.seen import pools_seen
from intertie.agent.sources.exporter import MOST_BYTES, Exporter, mapping_of
from intertie.agent.sources.reading import CardReading, Reading
from intertie.agent.sources.settings import TelemetrySource
from intertie.agent.sources.several import Several, build
from intertie.agent.telemetry import Collector, Telemetry
from intertie.clock import ManualClock, SystemClock
from intertie.contracts.site import DeviceState
from intertie.contracts.telemetry import DeviceSample
from intertie.errors import Refused
from intertie.ids import DeviceId

CLOCK = SystemClock()
CARD = 'gpu="0",UUID="GPU-a1",modelName="NVIDIA A100-SXM4-80GB"'


def said(util: int = 0, used: int = 10, labels: str = CARD) -> str:
    return f"DCGM_FI_DEV_GPU_UTIL{{{labels}}} {util}\nDCGM_FI_DEV_FB_USED{{{labels}}} {used}\nDCGM_FI_DEV_FB_FREE{{{labels}}} 81000\n"


@dataclass
class Played:
    """An exporter; `answer` is replaced at will."""

    url: str = ""
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]] = field(default=lambda request: _text(said()))
    asked: int = 0


async def _text(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status)


@asynccontextmanager
async def an_exporter() -> AsyncIterator[Played]:
    played = Played()

    async def handle(request: web.Request) -> web.StreamResponse:
        played.asked += 1
        return await played.answer(request)

    app = web.Application()
    app.router.add_get("/metrics", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    played.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/metrics"  # type: ignore[attr-defined]
    try:
        yield played
    finally:
        await runner.cleanup()


@pytest.fixture
async def played() -> AsyncIterator[Played]:
    async with an_exporter() as found:
        yield found


def exporter(played: Played, **fields: object) -> Exporter:
    settings = TelemetrySource(source="dcgm", url=played.url, **fields)  # type: ignore[arg-type]
    return Exporter(settings, mapping_of(settings, Path("/nowhere")), CLOCK)


async def elsewhere(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("http://127.0.0.1:1/metrics")


async def endless(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse()
    await stream.prepare(request)
    for _ in range(MOST_BYTES // 65_536 + 2):
        await stream.write(b"# " + b"x" * 65_533 + b"\n")
    return stream


async def cut(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Length": "100000"})
    await stream.prepare(request)
    await stream.write(said().encode())
    assert request.transport is not None
    request.transport.abort()
    return stream


async def never(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


TROUBLES: list[tuple[str, Callable[[web.Request], Awaitable[web.StreamResponse]], str]] = [
    ("a redirect is not followed", elsewhere, "answers 302"),
    ("an error is no reading", lambda _: _text("DCGM_FI_DEV_GPU_UTIL 1\n", 500), "answers 500"),
    ("an answer without an end", endless, "more than"),
    ("an answer that breaks off", cut, ""),
    ("an answer that never comes", never, ""),
    ("a page of HTML", lambda _: _text("<html>\n</html>\n"), "no series names a device"),
    ("no text", lambda _: _text("é\x00"), "cut short"),
    ("a line that is none", lambda _: _text("DCGM_FI_DEV_GPU_UTIL{ 1\n"), "cannot be read"),
]


@pytest.mark.parametrize(("what", "answer", "why"), TROUBLES, ids=[row[0] for row in TROUBLES])
async def test_what_is_no_answer_is_unknown_since_when_and_never_zero(
    played: Played, what: str, answer: Callable[[web.Request], Awaitable[web.StreamResponse]], why: str
) -> None:
    source = exporter(played, timeout_s=0.5)
    try:
        assert (await source.read()).cards
        played.answer = answer
        found = await source.read()
        assert found.cards == [] and found.error.startswith("unknown since 20") and why in found.error
        since = source.gone_since
        assert (await source.read()).error and source.gone_since == since
        played.answer = lambda _: _text(said())
        again = await source.read()
        assert (again.error, source.gone_since, len(again.cards)) == ("", None, 1)
    finally:
        await source.close()


async def sample_of(telemetry: Telemetry) -> dict[str, DeviceSample]:
    states = await telemetry.look(())
    pools = make_pools([pool(gpus=("a", "b")).profile], list(telemetry.known.values()), "node-1")
    return {device.id: device for device in telemetry.sample(pools, Holds(), {}, states, ()).devices}


async def test_a_card_of_an_exporter_is_free_foreign_or_unknown_and_lost_only_if_the_exporter_counts_it_no_more(played: Played) -> None:
    telemetry = Telemetry(exporter(played), CLOCK, "node-1", every_s=1.0)
    try:
        rows = [
            (said(), DeviceState.FREE),
            (said(util=40), DeviceState.FOREIGN),
            (said(used=30_000), DeviceState.FOREIGN),
            (said(util=2_147_483_632), DeviceState.UNKNOWN),
            (said(labels=CARD.replace("a1", "b2").replace('"0"', '"1"')), DeviceState.LOST),
            (said(), DeviceState.FREE),
        ]
        for text, state in rows:
            played.answer = lambda _, text=text: _text(text)  # type: ignore[misc]
            assert (await sample_of(telemetry))["GPU-a1"].state is state, text
        played.answer = lambda _: _text("", 503)
        gone = (await sample_of(telemetry))["GPU-a1"]
        assert (gone.state, gone.utilisation_percent) == (DeviceState.UNKNOWN, None)
        assert "unknown since" in gone.errors["dcgm"]
    finally:
        await telemetry.close()


async def test_what_stays_blank_or_gone_for_ten_minutes_is_told_and_what_a_card_does_not_know_is_not(played: Played) -> None:
    """BR-104."""
    clock = ManualClock()
    telemetry = Telemetry(exporter(played), clock, "node-1")
    played.answer = lambda _: _text(said() + f"DCGM_FI_DEV_GPU_TEMP{{{CARD}}} 2147483632\nDCGM_FI_DEV_POWER_USAGE{{{CARD}}} 2147483634\n")
    try:
        for passed_s, unread in ((0, {}), (599, {}), (1, {"GPU-a1": {"temperature"}})):
            clock.advance(passed_s)
            await telemetry.look(())
            assert telemetry.unread() == unread
        played.answer = lambda _: _text("", 503)
        await telemetry.look(())
        assert telemetry.unread() == {}
        clock.advance(601)
        await telemetry.look(())
        assert telemetry.unread() == {"GPU-a1": {"dcgm"}}
        pools = make_pools([pool(gpus=("a",)).profile], list(telemetry.known.values()), "n")
        seen = pools_seen(pools, [], {}, {}, unread=telemetry.unread(), driver="", agent_version="1")
        assert [one.unread for one in seen.values()] == [{"dcgm": 1}]
        played.answer = lambda _: _text(said())
        await telemetry.look(())
        assert telemetry.unread() == {}
    finally:
        await telemetry.close()


@dataclass
class Said:
    """A source that says what it is told to, when it is let."""

    name: str
    reading: Reading
    every_s: float = 0.0
    asked: int = 0
    let: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.let.set()

    async def read(self) -> Reading:
        self.asked += 1
        await self.let.wait()
        return self.reading

    async def close(self) -> None:
        pass


async def test_two_sources_of_one_card_are_one_card_and_the_second_fills_what_the_first_cannot_say() -> None:
    first = Said("nvml", Reading(cards=[CardReading(index=0, uuid="GPU-1", temperature_c=40, pids=[])], driver="550.90.07"))
    second = Said(
        "dcgm", Reading(cards=[CardReading(index=0, uuid="GPU-1", temperature_c=41, energy_mj=5), CardReading(index=1, uuid="GPU-2")])
    )
    several = Several([first, second], CLOCK)
    found = await several.read()
    await several.close()
    one, two = sorted(found.cards, key=lambda card: card.uuid or "")
    assert (one.temperature_c, one.energy_mj, one.source, two.source, two.index) == (40, 5, "nvml", "dcgm", 1_000_001)
    assert found.driver == one.driver == "550.90.07" and found.troubles == {}


async def test_a_slow_source_holds_up_no_other_and_its_word_keeps_its_own_time() -> None:
    quick = Said("quick", Reading(cards=[CardReading(index=0, uuid="GPU-1")]))
    slow = Said("slow", Reading(cards=[CardReading(index=0, uuid="GPU-2")]), every_s=3_600.0)
    several = Several([quick, slow], CLOCK, patience_s=0.05)
    try:
        before = {card.uuid: card for card in (await several.read()).cards}["GPU-2"]
        again = {card.uuid: card for card in (await several.read()).cards}["GPU-2"]
        assert (quick.asked, slow.asked, again.read_at, again.every_s) == (2, 1, before.read_at, 3_600.0)
        quick.let.clear()
        found = await several.read()
        assert {card.uuid for card in found.cards} == {"GPU-1", "GPU-2"}, "what was said just now still stands"
        async with asyncio.timeout(30):
            while "quick" not in (found := await several.read()).troubles:
                pass
        assert {card.uuid for card in found.cards} == {"GPU-2"}
    finally:
        await several.close()


def test_a_source_of_site_toml_that_cannot_be_is_refused_at_the_start(tmp_path: Path) -> None:
    nvml = Collector()
    assert build([], tmp_path, CLOCK, nvml) is nvml
    url = "http://127.0.0.1:9400/metrics"
    rows = [
        (TelemetrySource(source="dcgm"), "agent.telemetry"),
        (TelemetrySource(source="prometheus", url=url, mapping="mine.toml"), "agent.mapping"),
    ]
    for settings, code in rows:
        with pytest.raises(Refused) as refused:
            build([settings], tmp_path, CLOCK, nvml)
        assert refused.value.code == code
    (tmp_path / "mine.toml").write_text('[device]\nids = ["{id}"]\n[[metric]]\nis = "power"\nname = "p"\nunit = "W"\n', encoding="ascii")
    assert isinstance(build([rows[1][0]], tmp_path, CLOCK, nvml), Several)


@pytest.fixture
def rack() -> Iterator[Rack]:
    if not has_compiler():
        pytest.skip("no gcc here to build the library that plays the driver")
    folder = new_short_folder()
    yield Rack(folder, ["A100-SXM4-40GB"] * 2)
    shutil.rmtree(folder)


async def test_a_card_that_the_driver_says_is_cut_is_its_slices_and_whole_again_afterwards(rack: Rack) -> None:
    """BR-095, BR-088: a slice that is in use says no share of time, and that is no zero; the card is no device beside its slices."""
    telemetry = Telemetry(Collector(env=rack.env), CLOCK, "node-1")
    try:
        await telemetry.look(())
        assert {device.id for device in telemetry.known.values()} == set(rack.uuids)
        slices = rack.cut(0, ["1g.5gb", "1g.5gb"])
        states = await telemetry.look(())
        assert states == {DeviceId(name): DeviceState.FREE for name in [*slices, rack.uuids[1]]}
        assert {d.model for d in telemetry.known.values()} == {"A100-SXM4-40GB", "A100-SXM4-40GB MIG 1g.5gb"}
        part = telemetry.cards[DeviceId(slices[0])]
        assert (part.milli, part.memory_total_mib, part.errors["utilisation"]) == (None, 4864, "NotSupported")
        rack.join(0)
        assert await telemetry.look(()) == {DeviceId(name): DeviceState.FREE for name in rack.uuids}
    finally:
        await telemetry.close()


async def test_the_driver_s_version_its_links_and_its_energy_counter_are_read(rack: Rack) -> None:
    rack.say(0, energy_mj="1600000", links="1,1,0")
    collector = Collector(env=rack.env)
    try:
        found = await collector.read()
        assert (found.driver, [(card.energy_mj, card.links) for card in found.cards]) == ("550.90.07", [(1_600_000, 2), (None, None)])
    finally:
        await collector.close()


async def test_unified_memory_is_told_as_such_with_the_host_s_size(rack: Rack) -> None:
    """BR-094: the card stays in the list, without a size of its own."""
    rack.refuse(0, "mem_total")
    telemetry = Telemetry(Collector(env=rack.env), CLOCK, "node-1")
    try:
        states = await telemetry.look(())
        pools = make_pools([pool(gpus=("a", "b")).profile], list(telemetry.known.values()), "node-1")
        pools = [type(pools[0])(pools[0].profile, list(telemetry.known.values()))]
        sample = telemetry.sample(pools, Holds(), {}, states, ())
        one = next(device for device in sample.devices if device.id == rack.uuids[0])
        assert (one.memory_total_mib, one.memory_kind, one.state) == (None, "unified", DeviceState.FREE)
        assert sample.host_memory_mib and sample.host_memory_mib > 100
    finally:
        await telemetry.close()
