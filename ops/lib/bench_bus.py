"""The bus wrapper's cost: our typed publish, subscribe and request beside bare nats-py, same server, same bytes, same loop, taking turns.

Ours encodes and decodes a contract on every message and owns reconnection; bare nats-py hands bytes to a callback. Publisher, server and
subscriber share the machine, so throughput is a share of its processors.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import nats
import psutil
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg
from ops.lib.bench_hub import CLOCK
from ops.lib.bench_nats import Server
from ops.lib.bench_report import Benchmark, Beside, Machine, Measure, Report, measure, median, percentile

from intertie.bus import rpc
from intertie.bus.nats import NatsBus
from intertie.bus.port import Message
from intertie.bus.rpc import Caller
from intertie.contracts.base import Contract, decode, encode
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.identity import Claims
from intertie.errors import Unauthenticated

SIZES = (200, 2_000)
MESSAGES = 20_000
# So many are under way at once, at most: neither side may drop any.
WINDOW = 1_024
BURST = 128
REQUESTS = 2_000
WARM = 500
LIMIT_S = 60.0

AT_LEAST, AT_MOST = 0.8, 1.25


class Note(Contract, frozen=True, kw_only=True):
    """What travels: some fields, and text up to the size."""

    site: str
    number: int
    share: float
    text: str


BESIDE = {"bare": "bytes only", "peer": "same contract"}
PAIRS = (("taken", "bare", "subscribe and decode"), ("typed", "peer", "encode, publish, subscribe and decode"))
"""Ours, what stands beside it, and what it is."""

ECHO = Endpoint("qry", "bench", "echo", Note, Note, None)


def note_of(size: int) -> Note:
    """A note whose JSON has exactly this many bytes."""
    empty = Note(site="site-a", number=1, share=0.5, text="")
    return msgspec.structs.replace(empty, text="x" * (size - len(encode(empty))))


@dataclass
class Round:
    """What one round saw: messages a second, and seconds of each request."""

    rate: dict[str, float] = field(default_factory=dict)
    took: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class Pipe:
    """One way through the bus: `send` says one message; `arrived` counts."""

    send: Callable[[], Awaitable[None]]
    arrived: int = 0

    async def rate(self) -> float:
        """Messages a second, until the last has arrived."""
        began, sent, start = CLOCK.monotonic_s(), 0, self.arrived
        while self.arrived - start < MESSAGES:
            while sent < MESSAGES and sent - (self.arrived - start) < WINDOW:
                for _ in range(min(BURST, MESSAGES - sent)):
                    await self.send()
                    sent += 1
            await asyncio.sleep(0)
            if CLOCK.monotonic_s() - began > LIMIT_S:
                raise RuntimeError(f"{sent - (self.arrived - start)} of {sent} messages did not arrive")
        return MESSAGES / (CLOCK.monotonic_s() - began)


async def bare_pipe(out: Client, into: Client, size: int) -> Pipe:
    subject, body = f"bench.bare.{size}", encode(note_of(size))
    pipe = Pipe(lambda: out.publish(subject, body))

    async def arrived(_: Msg) -> None:
        pipe.arrived += 1

    await into.subscribe(subject, cb=arrived)
    await into.flush()
    return pipe


async def taken_pipe(out: Client, into: NatsBus, size: int) -> Pipe:
    """Said by bare nats-py, heard and decoded by ours."""
    subject, body = f"bench.taken.{size}", encode(note_of(size))
    pipe = Pipe(lambda: out.publish(subject, body))

    async def arrived(message: Message) -> None:
        decode(message.body, Note, what="note")
        pipe.arrived += 1

    await into.subscribe(subject, arrived, backlog=4 * WINDOW)
    return pipe


async def peer_pipe(out: Client, into: Client, size: int) -> Pipe:
    """What a program without our bus would do with the same contract."""
    subject, note = f"bench.peer.{size}", note_of(size)
    pipe = Pipe(lambda: out.publish(subject, encode(note)))

    async def arrived(msg: Msg) -> None:
        decode(msg.data, Note, what="note")
        pipe.arrived += 1

    await into.subscribe(subject, cb=arrived)
    await into.flush()
    return pipe


async def typed_pipe(out: NatsBus, into: NatsBus, size: int) -> Pipe:
    """Encoded, said, heard and decoded by ours."""
    subject, note = f"bench.typed.{size}", note_of(size)
    pipe = Pipe(lambda: out.publish(subject, encode(note)))

    async def arrived(message: Message) -> None:
        decode(message.body, Note, what="note")
        pipe.arrived += 1

    await into.subscribe(subject, arrived, backlog=4 * WINDOW)
    return pipe


async def timed(ask: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Seconds of each request, one after the other."""
    took = []
    for _ in range(count):
        began = CLOCK.monotonic_s()
        await ask()
        took.append(CLOCK.monotonic_s() - began)
    return took


def nobody(_: str) -> Claims:
    raise Unauthenticated("bench", "nobody signs here")


async def rounds_of(url: str, rounds: int) -> list[Round]:
    """All rounds on one set of connections; what is compared takes turns inside each."""
    bare_out, bare_in = await nats.connect(url), await nats.connect(url)
    out, into = await NatsBus.connect(url, name="bench-out"), await NatsBus.connect(url, name="bench-in")
    body, note = encode(note_of(SIZES[0])), note_of(SIZES[0])

    async def bare_echo(msg: Msg) -> None:
        await msg.respond(msg.data)

    async def raw_echo(message: Message) -> bytes:
        return message.body

    async def echo(request: Note, _caller: Caller) -> Note:
        return request

    try:
        pipes = {}
        for size in SIZES:
            pipes[f"bare {size}"] = await bare_pipe(bare_out, bare_in, size)
            pipes[f"taken {size}"] = await taken_pipe(bare_out, into, size)
            pipes[f"peer {size}"] = await peer_pipe(bare_out, bare_in, size)
            pipes[f"typed {size}"] = await typed_pipe(out, into, size)
        await bare_in.subscribe("bench.echo", cb=bare_echo)
        await bare_in.flush()
        await into.subscribe("bench.raw", raw_echo)
        await rpc.serve(into, "bench", "1.0.0", {ECHO: echo}, verifier=nobody)
        asks: dict[str, Callable[[], Awaitable[object]]] = {
            "bare": lambda: bare_out.request("bench.echo", body, timeout=5),
            "request": lambda: out.request("bench.raw", body, timeout_s=5),
            "call": lambda: rpc.call(out, ECHO, note),
        }
        for ask in asks.values():
            await timed(ask, WARM)
        seen = []
        for number in range(rounds):
            # Whoever is first in a round has a cooler machine: they take turns at that, too.
            turn = 1 if number % 2 else -1
            one = Round()
            for name in list(pipes)[::turn]:
                one.rate[name] = await pipes[name].rate()
            for name in list(asks)[::turn]:
                one.took[name] = await timed(asks[name], REQUESTS)
            seen.append(one)
        return seen
    finally:
        await out.close()
        await into.close()
        await bare_out.close()
        await bare_in.close()


def measures_of(seen: Sequence[Round]) -> list[Measure]:
    made = []
    for size in SIZES:
        for kind, beside, says in PAIRS:
            ratios = [one.rate[f"{kind} {size}"] / one.rate[f"{beside} {size}"] for one in seen]
            ours, theirs = (median([one.rate[f"{name} {size}"] for one in seen]) for name in (kind, beside))
            made.append(measure(f"{says}, {size} B", ours, "msg/s", beside=Beside(name=f"nats-py, {BESIDE[beside]}", value=theirs)))
            made.append(measure("  its share, by round", median(ratios), "×", over=ratios, target=AT_LEAST, at_least=True))
    for name, kind, target in (
        ("request and reply p50", "request", AT_MOST),
        ("typed call p50 (claims, trace, known errors)", "call", None),
    ):
        took, bare_took = ([percentile(one.took[k], 50) for one in seen] for k in (kind, "bare"))
        ratios = [a / b for a, b in zip(took, bare_took, strict=True)]
        made.append(measure(name, median(took) * 1e6, "µs", beside=Beside(name="nats-py, bytes only", value=median(bare_took) * 1e6)))
        made.append(measure("  times nats-py's, by round", median(ratios), "×", over=ratios, target=target))
    return made


async def run(rounds: int) -> Report:
    """On the loop that services run on."""
    at, load = CLOCK.now(), os.getloadavg()[0]
    server = Server()
    await asyncio.to_thread(server.start)
    try:
        seen = await asyncio.to_thread(lambda: uvloop.run(rounds_of(server.url, rounds)))
    finally:
        await asyncio.to_thread(server.remove)
    return Report(
        benchmark="bus",
        at=at.isoformat(),
        rounds=rounds,
        machine=machine(load),
        measures=measures_of(seen),
        notes=[
            f"{MESSAGES} messages a round, {WINDOW} under way at most; {REQUESTS} requests a round, one after the other; uvloop on both sides."
        ],
    )


def machine(load_before: float) -> Machine:
    return Machine(
        cores=os.cpu_count() or 1,
        memory_mib=psutil.virtual_memory().total // 1_048_576,
        kernel=platform.release(),
        python=platform.python_version(),
        load_before=load_before,
        load_after=os.getloadavg()[0],
    )


BUS = Benchmark("bus", "typed publish, subscribe and request beside bare nats-py", 5, run)
