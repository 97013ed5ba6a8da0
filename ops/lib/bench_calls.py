"""Calls of an offering: what gateway, bus and agent add to asking the owner's server directly, in the same run, turn by turn.

The server is the tests' own; client, hub, agent and server share this machine, so that what is added is processing and no network.
"""

from __future__ import annotations

import asyncio
import os
import platform
from dataclasses import dataclass, field

import aiohttp
import psutil
from ops.lib.bench_report import Benchmark, Beside, Machine, Measure, Report, measure, median, percentile

from intertie.clock import SystemClock
from intertie.errors import Unavailable

CLOCK = SystemClock()
# One after the other, each beside a direct one; with five rounds five hundred, so that a 99th percentile is one that was seen.
ALONE = 100
# At once: what a thousand calls need when fifty are under way.
FLOW, IN_FLIGHT = 300, 50
WARM = 30

TARGET_ADDED_P50_MS = 10.0


@dataclass
class Seen:
    """Seconds."""

    direct: list[float] = field(default_factory=list)
    through: list[float] = field(default_factory=list)
    direct_first: list[float] = field(default_factory=list)
    through_first: list[float] = field(default_factory=list)
    flow: list[float] = field(default_factory=list)
    """Calls a second."""


async def run(rounds: int) -> Report:
    """Measured over so many rounds."""
    # The world of the tests starts a hub, an agent and the server: nothing of it is wanted where benchmarks are only listed.
    from tests.journeys.endpoint_world import endpoint_world

    began, load = CLOCK.now(), os.getloadavg()[0]
    seen = Seen()
    async with endpoint_world() as world, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as http:
        headers = {"Authorization": f"Bearer {world.token}"}
        direct, through = f"{world.upstream}/v1/chat/completions", f"{world.base_url()}/chat/completions"
        for _ in range(WARM):
            await ask(http, direct, headers, stream=False)
            await ask(http, through, headers, stream=False)
        for _ in range(rounds):
            await one_round(http, direct, through, headers, seen)
    return Report(
        benchmark="calls",
        at=began.isoformat(),
        rounds=rounds,
        machine=machine(load),
        measures=measures(seen),
        notes=["client, hub, agent and server share these cores; `added` is the median (percentile) through minus the direct one"],
    )


async def one_round(http: aiohttp.ClientSession, direct: str, through: str, headers: dict[str, str], seen: Seen) -> None:
    for _ in range(ALONE):
        seen.direct.append((await ask(http, direct, headers, stream=False))[1])
        seen.through.append((await ask(http, through, headers, stream=False))[1])
        seen.direct_first.append((await ask(http, direct, headers, stream=True))[0])
        seen.through_first.append((await ask(http, through, headers, stream=True))[0])
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def held() -> None:
        async with gate:
            await ask(http, through, headers, stream=False)

    began = CLOCK.monotonic_s()
    await asyncio.gather(*(held() for _ in range(FLOW)))
    seen.flow.append(FLOW / (CLOCK.monotonic_s() - began))


async def ask(http: aiohttp.ClientSession, url: str, headers: dict[str, str], *, stream: bool) -> tuple[float, float]:
    """Seconds to the first byte of the answer, and to its end."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello words=8"}], "stream": stream}
    began = CLOCK.monotonic_s()
    async with http.post(url, json=body, headers=headers) as answer:
        await answer.content.readany()
        first = CLOCK.monotonic_s() - began
        await answer.read()
        if answer.status != 200:
            raise Unavailable("bench.call", f"{url} answered {answer.status}")
    return first, CLOCK.monotonic_s() - began


def measures(seen: Seen) -> list[Measure]:
    """In milliseconds, beside the direct call of the same run."""

    def added(name: str, through: list[float], direct: list[float], percent: float, target: float | None = None) -> Measure:
        ours, theirs = (percentile(values, percent) * 1e3 if percent != 50 else median(values) * 1e3 for values in (through, direct))
        return measure(name, ours - theirs, "ms", beside=Beside(name="direct", value=theirs), target=target)

    return [
        added("added, p50", seen.through, seen.direct, 50, TARGET_ADDED_P50_MS),
        added("added, p99", seen.through, seen.direct, 99),
        added("added to a stream's first byte, p50", seen.through_first, seen.direct_first, 50, TARGET_ADDED_P50_MS),
        added("added to a stream's first byte, p99", seen.through_first, seen.direct_first, 99),
        measure(f"calls, {IN_FLIGHT} at once", median(seen.flow), "calls/s", over=seen.flow),
    ]


def machine(load_before: float) -> Machine:
    return Machine(
        cores=os.cpu_count() or 1,
        memory_mib=psutil.virtual_memory().total >> 20,
        kernel=platform.release(),
        python=platform.python_version(),
        load_before=load_before,
        load_after=os.getloadavg()[0],
    )


CALLS = Benchmark("calls", "a call of an offering through gateway, bus and agent, against asking the server directly", 3, run)
