"""The bus as three nodes: each killed in turn, one frozen, at last all three wiped. Whoever is connected stays or comes back by itself, the stream
keeps every number, and after the wipe the relay fills it again (laws 1 and DESIGN 6).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.edges.conftest import new_hub
from tests.edges.store_world import Probe, running, until

from intertie.bus.nats import NatsBus
from intertie.bus.port import ConsumerSpec, Message
from intertie.clock import SystemClock
from intertie.contracts.base import EVENT_STREAM, PREFIX
from intertie.embedded.hub import ROUTE_OFFSET, HubLayout, HubPorts, HubSettings, environment, init_hub
from intertie.embedded.nats import Nats
from intertie.embedded.process import free_port, require_free_port
from intertie.errors import IntertieError, Refused
from intertie.identity.memory import MemoryIdentityStore
from intertie.identity.stream import StreamMaker
from intertie.store import MemoryStore, Relay

NODES = (1, 2, 3)
# An election, on a machine that does other things too.
WITHIN_S = 60.0


def free_ports() -> int:
    """A port with two more above it, and the same for routes."""
    while True:
        base = free_port()
        with suppress(Refused):
            for port in (base, base + 1, base + 2):
                require_free_port("127.0.0.1", port, "a node")
                require_free_port("127.0.0.1", port + ROUTE_OFFSET, "a route")
            return base


@dataclass
class Bus3:
    layout: HubLayout
    nodes: list[Nats]
    got: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    """(epoch, number) → the event ids that carried it."""

    async def connect(self, name: str) -> NatsBus:
        return await NatsBus.connect(self.layout.bus_urls, name=name, credentials=self.layout.creds_file(name), timeout_s=20)

    async def take(self, message: Message) -> None:
        key = (int(message.headers["intertie-epoch"]), int(message.headers["intertie-number"]))
        self.got.setdefault(key, set()).add(message.headers["ce-id"])

    def whole(self, count: int) -> bool:
        """Every number once, each with one content."""
        return set(self.got) == {(1, number) for number in range(1, count + 1)} and all(len(ids) == 1 for ids in self.got.values())


@pytest.fixture
def cluster(short_folder: Path) -> Iterator[Bus3]:
    ports = HubPorts(bus=free_ports(), database=free_port(), gateway=free_port())
    layout = init_hub(short_folder, SystemClock().now(), settings=HubSettings(title="test", bus_nodes=3, ports=ports))
    made = Bus3(layout, [layout.bus(node) for node in NODES])
    try:
        for node in made.nodes:
            node.start()
        yield made
    finally:
        for node in made.nodes:
            if node.child is not None and node.child.poll() is None:
                os.kill(node.child.pid, signal.SIGCONT)
            node.kill()


def test_a_hub_of_three_nodes_says_so_to_its_services_and_keeps_it(short_folder: Path) -> None:
    ports = HubPorts(bus=20_001, database=20_005, gateway=20_006)
    init_hub(short_folder, SystemClock().now(), settings=HubSettings(bus_nodes=3, ports=ports))
    layout = init_hub(short_folder, SystemClock().now())
    told = environment(layout, "identity")
    assert told["INTERTIE_BUS_URL"] == "nats://127.0.0.1:20001,nats://127.0.0.1:20002,nats://127.0.0.1:20003"
    assert told["INTERTIE_BUS_REPLICAS"] == "3" and environment(new_hub(short_folder / "one"), "identity")["INTERTIE_BUS_REPLICAS"] == "0"
    apart = init_hub(
        short_folder / "apart", SystemClock().now(), settings=HubSettings(bus_nodes=3, bus_hosts=("a", "b", "c"), bus_host="0.0.0.0")
    )
    assert apart.bus_urls == ("nats://a:4222", "nats://b:4222", "nats://c:4222")
    assert '"nats-route://b:6222"' in (apart.nats_folder(3) / "nats.conf").read_text(encoding="utf-8")
    with pytest.raises(Refused):
        HubSettings(bus_nodes=2)


@pytest.fixture
async def parts(cluster: Bus3) -> AsyncIterator[tuple[NatsBus, NatsBus, NatsBus]]:
    """identity, a keeper, a reader."""
    made = [await cluster.connect(name) for name in ("identity", "scheduler", "gateway")]
    try:
        yield made[0], made[1], made[2]
    finally:
        for bus in made:
            await bus.close()


async def test_nodes_die_freeze_and_are_wiped_while_events_flow(cluster: Bus3, parts: tuple[NatsBus, NatsBus, NatsBus]) -> None:
    identity, scheduler, gateway = parts
    store, sent = MemoryStore("scheduler"), 0
    relay = Relay(store, scheduler, "scheduler", beat_s=0.2)
    maker = StreamMaker(identity, MemoryIdentityStore(), SystemClock(), epoch=1, replicas=3, beat_scale=0.3)

    async def flow(count: int) -> None:
        nonlocal sent
        for _ in range(count):
            sent += 1
            await store.emit(Probe(probe=f"p{sent}", version=1))
            await asyncio.sleep(0)

    async def all_told() -> bool:
        return cluster.whole(sent)

    async def never(message: Message, error: BaseException, tries: int) -> None:
        raise AssertionError(str(error))

    async with running(maker.run()), running(relay.run()):
        await flow(20)
        await until(lambda: relay.published >= 20, "the first events on a stream of three copies", within_s=WITHIN_S)
        answer = await identity.request(f"$JS.API.STREAM.INFO.{EVENT_STREAM}", b"", timeout_s=5)
        assert b'"num_replicas":3' in answer.body
        spec = ConsumerSpec(EVENT_STREAM, "gateway", (f"{PREFIX}.evt.scheduler.probe.>",), ack_wait_s=2.0)
        await gateway.consume(spec, cluster.take, never)
        for node in cluster.nodes:
            node.kill()
            await flow(20)
            await until(all_told, f"all events, with {node.name} dead", within_s=WITHIN_S)
            await asyncio.to_thread(node.start)
            await until(lambda: _three(identity), f"{node.name} to hold the stream again", within_s=WITHIN_S)
        frozen = cluster.nodes[1]
        assert frozen.child is not None
        os.kill(frozen.child.pid, signal.SIGSTOP)
        await flow(20)
        await until(all_told, "all events, with a node frozen", within_s=WITHIN_S)
        os.kill(frozen.child.pid, signal.SIGCONT)
        before = relay.published
        for node in cluster.nodes:
            node.kill()
        for node in cluster.nodes:
            shutil.rmtree(node.jetstream_folder / "jetstream")
        for node in cluster.nodes:
            await asyncio.to_thread(node.start)
        await until(lambda: relay.published >= before + sent, "the relay to fill the stream again", within_s=WITHIN_S)
        await flow(5)
        await until(all_told, "and to go on", within_s=WITHIN_S)
        await until(lambda: _holds(scheduler, sent), "the stream to equal the outbox", within_s=WITHIN_S)


async def _three(bus: NatsBus) -> bool:
    """Both other copies follow the leader."""
    try:
        answer = await bus.request(f"$JS.API.STREAM.INFO.{EVENT_STREAM}", b"", timeout_s=2)
    except IntertieError:
        return False
    return answer.body.count(b'"current":true') == 2


async def _holds(bus: NatsBus, count: int) -> bool:
    try:
        state = await bus.stream_state(EVENT_STREAM)
    except IntertieError:
        return False
    return state is not None and state.messages == count
