"""A head and its nodes in one loop, over real TLS on the loopback: the product's own gate, bus, lanes, journals and supervisors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.agents import pool

from intertie.agent.adapters.process import ProcessAdapter
from intertie.agent.core.devices import Pool
from intertie.agent.machines.adapter import MachinesAdapter
from intertie.agent.machines.gate import Gate
from intertie.agent.machines.head import Head
from intertie.agent.machines.service import NodeAgent, NodeFolder, join
from intertie.agent.machines.store import HeadStore
from intertie.agent.machines.wire import make_certificate
from intertie.clock import SystemClock
from intertie.ids import SiteName, TenantName
from intertie.trust.keys import Key

CLOCK = SystemClock()
BEAT = 0.1


class PlainNode(NodeAgent):
    """Its slots are called as the suites of adapters call them."""

    def _pools(self) -> list[Pool]:
        return [pool(4)]


@dataclass
class Running:
    """Tasks of one part, ended together."""

    tasks: list[asyncio.Task[object]] = field(default_factory=list)

    def start(self, *work: Coroutine[object, object, object]) -> None:
        self.tasks += [asyncio.create_task(one) for one in work]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        for result in await asyncio.gather(*self.tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        self.tasks.clear()


@dataclass
class HeadWorld:
    """The head's half; `kill` and `open` play its death and return."""

    folder: Path
    key: Key
    node_kind: type[NodeAgent] = NodeAgent
    own: str = "head"
    port: int = 0
    running: Running = field(default_factory=Running)
    nodes: dict[str, tuple[NodeAgent, Running]] = field(default_factory=dict)

    async def open(self) -> None:
        keys = self.folder / "keys"
        keys.mkdir(mode=0o700, exist_ok=True)
        make_certificate(keys, "lab", CLOCK.now())
        self.store = await HeadStore.open(self.folder / "machines.db")
        self.head = Head(self.store, self.key, CLOCK, self.folder / "machines")
        await self.head.open()
        self.gate = Gate(
            self.head,
            keys,
            site=SiteName("lab"),
            listen=("127.0.0.1", self.port),
            owner_tenant=TenantName("acme"),
            pools=lambda: [pool(64).profile],
        )
        self.adapter = MachinesAdapter(
            ProcessAdapter(self.folder / "jobs"),
            self.head,
            CLOCK,
            node_of=lambda device: self.node_of(device),
            own=self.own,
            site=SiteName("lab"),
        )
        self.adapter.owner_tenant = TenantName("acme")
        await self.adapter.open()
        self.running.start(self.head.keeper.run(), self.gate.run())
        await asyncio.gather(self.gate.listening.wait(), self.head.keeper.listening.wait())
        self.port = self.gate.port

    def node_of(self, device: str) -> str:
        return device.split(".")[0] if "." in device else self.own

    async def close(self) -> None:
        await self.running.end()
        await self.head.bus.close()
        await self.store.close()

    async def add_node(self, name: str, *, slots: int = 4) -> NodeAgent:
        folder = NodeFolder(self.folder / name)
        token, _ = await self.gate.make_token(None, 1)
        await join(folder, head=f"127.0.0.1:{self.port}", token=token, node=name, slots=slots)
        return await self.start_node(name)

    async def start_node(self, name: str) -> NodeAgent:
        node = self.node_kind(NodeFolder(self.folder / name), beat=BEAT)
        await node.open()
        running = Running()
        running.start(node.bus.run(), node.speak(), node.watch(), node.tick())
        self.nodes[name] = (node, running)
        await until(lambda: self.head.reachable(SiteName(name)))
        return node

    async def stop_node(self, name: str) -> None:
        node, running = self.nodes.pop(name)
        await running.end()
        await node.close()


async def until(true: Callable[[], bool], *, seconds: float = 45.0) -> None:
    """Until it is so."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not true():
        assert loop.time() < end, "not in time"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def head_world(folder: Path, *, node_kind: type[NodeAgent] = NodeAgent, own: str = "head") -> AsyncIterator[HeadWorld]:
    world = HeadWorld(folder, Key.new("U"), node_kind, own)
    await world.open()
    try:
        yield world
    finally:
        for name in list(world.nodes):
            with contextlib.suppress(Exception):
                await world.stop_node(name)
        await world.close()
