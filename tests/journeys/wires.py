"""Machines of their own for hub and sites, and a wire between them that can be cut, blocked, made lossy, thin or long.

`Netns` makes network namespaces on a bridge that lies in one of its own: hub and sites have their own addresses, sockets and routes, and the test's
own network is untouched. Where a machine does not allow that, `Proxies` gives each site its own way to the hub through a relay: it can cut and
delay, not lose or thin. A thread that has entered a namespace starts its children there.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from intertie.observe import log

T = TypeVar("T")
LOG = log.get("test.wires")

CLONE_NEWNET = 0x40000000
HUB = "10.77.0.1"
LIBC = ctypes.CDLL(None, use_errno=True)
# What TCP and one request may carry at once through a relay that is slow.
CHUNK = 64 * 1024


def run(*argv: str) -> str:
    """A command of the machine; `RuntimeError` with its own words if it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def namespaces_work() -> bool:
    """Whether this machine lets us make them, with the filters that loss needs."""
    name = f"itp{os.getpid()}"
    if os.geteuid() != 0:
        return False
    try:
        run("ip", "netns", "add", name)
    except (RuntimeError, OSError):
        return False
    try:
        run(
            "ip",
            "netns",
            "exec",
            name,
            "iptables",
            "-A",
            "INPUT",
            "-m",
            "statistic",
            "--mode",
            "random",
            "--probability",
            "0.1",
            "-j",
            "DROP",
        )
    except (RuntimeError, OSError):
        return False
    else:
        return True
    finally:
        run("ip", "netns", "del", name)


class Wires(Protocol):
    """`host` is `hub` or a site's name."""

    def hub_address(self) -> str:
        """Where the hub listens."""
        ...

    def seen_from(self, host: str, port: int) -> str:
        """`address:port` at which that site reaches the hub's port."""
        ...

    async def on(self, host: str, work: Callable[[], T]) -> T:
        """A blocking call made on that machine; processes that it starts live there."""
        ...

    async def cut(self, host: str) -> None: ...

    async def heal(self, host: str) -> None:
        """As good as new, whatever was done to it."""
        ...

    async def close(self) -> None: ...


class Netns:
    """Hub and sites on a star. `cut` takes the carrier away; `block` drops without a word; `loss` and `rate` are what they say."""

    def __init__(self, sites: Sequence[str]) -> None:
        self._prefix = f"it{os.getpid() % 100_000}"
        self._hosts = ["hub", *sites]
        self._threads: dict[str, ThreadPoolExecutor] = {}
        switch = self._name("sw")
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "set", "lo", "up")
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for number, host in enumerate(self._hosts, start=1):
            name = self._name(host)
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", switch, "link", "add", f"v-{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "-n", switch, "link", "set", f"v-{number}", "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            self._threads[host] = ThreadPoolExecutor(4, thread_name_prefix=name, initializer=self._enter, initargs=(name,))

    def _name(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    @staticmethod
    def _enter(name: str) -> None:
        fd = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if LIBC.setns(fd, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {name}")
        finally:
            os.close(fd)

    def hub_address(self) -> str:
        return HUB

    def seen_from(self, host: str, port: int) -> str:
        return f"{HUB}:{port}"

    async def on(self, host: str, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads[host], work)

    def _carrier(self, host: str, state: str) -> None:
        run("ip", "-n", self._name("sw"), "link", "set", f"v-{self._hosts.index(host) + 1}", state)

    async def cut(self, host: str) -> None:
        """The cable is pulled."""
        await asyncio.to_thread(self._carrier, host, "down")

    async def heal(self, host: str) -> None:
        def heal() -> None:
            inside = ("ip", "netns", "exec", self._name(host))
            run(*inside, "iptables", "-F")
            subprocess.run([*inside, "tc", "qdisc", "del", "dev", "eth0", "root"], capture_output=True, check=False)
            self._carrier(host, "up")

        await asyncio.to_thread(heal)

    async def block(self, host: str) -> None:
        """A black hole both ways: nothing is refused, nothing arrives."""
        await self._filter(host, "INPUT", "-i", "eth0", "-j", "DROP")
        await self._filter(host, "OUTPUT", "-o", "eth0", "-j", "DROP")

    async def loss(self, host: str, share: float) -> None:
        """So many of a hundred packets vanish, each way."""
        some = ("-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP")
        await self._filter(host, "INPUT", "-i", "eth0", *some)
        await self._filter(host, "OUTPUT", "-o", "eth0", *some)

    async def rate(self, host: str, rate: str) -> None:
        """No more than this goes out."""
        inside = ("ip", "netns", "exec", self._name(host))
        shape = ("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "16kbit", "latency", "400ms")
        await asyncio.to_thread(run, *inside, *shape)

    async def _filter(self, host: str, *rule: str) -> None:
        await asyncio.to_thread(run, "ip", "netns", "exec", self._name(host), "iptables", "-I", *rule)

    async def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        for host in ("sw", *self._hosts):
            await asyncio.to_thread(subprocess.run, ["ip", "netns", "del", self._name(host)], capture_output=True, check=False)


class Relay:
    """A TCP port that leads to another: later by `latency_s` each way, or not at all."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self.latency_s = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._tasks = set[asyncio.Task[None]]()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def cut(self) -> None:
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        opened = [writer]
        try:
            await self._open.wait()
            there, back = await asyncio.open_connection(*self._target)
            opened.append(back)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(reader, back))
                group.create_task(self._carry(there, writer))
        except* (OSError, asyncio.CancelledError):
            LOG.debug("a relayed connection is over")
        finally:
            for end in opened:
                end.transport.abort()
            self._tasks.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await on_the_way.get()
                await asyncio.sleep(due - loop.time())
                await self._open.wait()
                if not data:
                    writer.close()
                    return
                writer.write(data)
                await writer.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(deliver())
            while True:
                data = await reader.read(CHUNK)
                on_the_way.put_nowait((loop.time() + self.latency_s, data))
                if not data:
                    break

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Proxies:
    """One machine; each site's way to bus and gateway leads through relays of its own."""

    def __init__(self) -> None:
        self._relays: dict[tuple[str, int], Relay] = {}

    async def add(self, host: str, *ports: int) -> None:
        for port in ports:
            self._relays[host, port] = await Relay("127.0.0.1", port).start()

    def of(self, host: str) -> list[Relay]:
        """A site's relays; all of them for the hub."""
        return [relay for (name, _), relay in self._relays.items() if host in (name, "hub")]

    def hub_address(self) -> str:
        return "127.0.0.1"

    def seen_from(self, host: str, port: int) -> str:
        return f"127.0.0.1:{self._relays[host, port].port}"

    async def on(self, host: str, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)

    async def cut(self, host: str) -> None:
        for relay in self.of(host):
            relay.cut()

    async def heal(self, host: str) -> None:
        for relay in self.of(host):
            relay.latency_s = 0.0
            relay.heal()

    async def delay(self, host: str, latency_s: float) -> None:
        """Each way."""
        for relay in self.of(host):
            relay.latency_s = latency_s

    async def close(self) -> None:
        for relay in self._relays.values():
            await relay.close()
