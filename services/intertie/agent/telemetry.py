"""What this machine's devices do now: NVML through a child that is replaced when it hangs or dies, processes told apart at the source.

A process is ours if it descends from one of our supervisors; anything else on a card is foreign, and a foreign or lost card takes no work. A
lost card keeps the UUID it was known by. Nothing old is ever sent with a new time: what cannot be read now is None (BR-097).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Collection, Mapping, Sequence

import msgspec

from intertie.agent import procs
from intertie.agent.config import plain_model
from intertie.agent.core.devices import Holds, Pool, state_of
from intertie.agent.nvml import CardReading, Reading
from intertie.clock import Clock
from intertie.contracts.site import Device, DeviceKind, DeviceState
from intertie.contracts.telemetry import DeviceSample, NodeSample
from intertie.ids import AttemptId, DeviceId
from intertie.observe import log

LOG = log.get("agent.telemetry")

# NVML answers in microseconds; a driver that needs longer than this is stuck (a card in reset holds calls for a second or two).
DEADLINE_S = 5.0
# A child that dies at once is not started in a loop.
RESTART_S = 2.0
# One line per card of some 400 bytes, 64 cards, and room.
LINE_BYTES = 256 * 1024


class Collector:
    """The child, and the questions to it. `read` never hangs and never raises: it says what it could not find out."""

    def __init__(self, argv: Sequence[str] = (), env: Mapping[str, str] | None = None, *, deadline_s: float = DEADLINE_S) -> None:
        self._argv = list(argv) or [sys.executable, "-m", "intertie.agent.nvml"]
        self._env = dict(env) if env is not None else {k: v for k, v in os.environ.items() if k in ("PATH", "LD_LIBRARY_PATH", "LANG")}
        self._deadline_s = deadline_s
        self._pid: int | None = None
        self._dead: list[int] = []
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._not_before = 0.0
        self.restarts = 0

    async def read(self) -> Reading:
        """One sample, or why there is none."""
        loop = asyncio.get_running_loop()
        self._reap()
        if self._pid is None:
            if loop.time() < self._not_before:
                return Reading(error="the collector is being restarted")
            await self._start()
        assert self._reader is not None and self._writer is not None
        try:
            async with asyncio.timeout(self._deadline_s):
                self._writer.write(b"\n")
                await self._writer.drain()
                line = await self._reader.readline()
            if not line:
                raise ConnectionError("the collector died")
            return msgspec.json.decode(line, type=Reading)
        except (TimeoutError, OSError, ValueError, msgspec.MsgspecError) as err:
            why = f"no answer from NVML within {self._deadline_s:g} s" if isinstance(err, TimeoutError) else str(err)
            LOG.warning("the collector is replaced", why=why)
            self._not_before = loop.time() + RESTART_S
            self.restarts += 1
            await self.close()
            return Reading(error=f"stuck: {why}")

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._pid = procs.spawn(self._argv, stdin=theirs.fileno(), stdout=theirs.fileno(), env=self._env)
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES)

    def _reap(self) -> None:
        """A child in D state cannot be waited for; it is asked about again later."""
        for pid in self._dead[:]:
            procs.reap(pid)
            if procs.parent(pid) != os.getpid():
                self._dead.remove(pid)

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        self._reader = self._writer = None
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._dead.append(self._pid)
            self._pid = None
        for _ in range(20):
            self._reap()
            if not self._dead:
                break
            await asyncio.sleep(0.01)


class Telemetry:
    """Samples of one node. `known` remembers cards by index, so that a lost one keeps its name; it may be filled from disk."""

    def __init__(self, collector: Collector, clock: Clock, node: str, known: Mapping[int, Device] | None = None) -> None:
        self._collector = collector
        self._clock = clock
        self.node = node
        self.known: dict[int, Device] = dict(known or {})
        self.none = ""
        """Why this machine has no GPU, once NVML said so."""
        self._sequence = 0
        self._readings: dict[DeviceId, CardReading] = {}
        self._trouble = ""

    async def close(self) -> None:
        await self._collector.close()

    async def look(self, roots: Collection[int]) -> dict[DeviceId, DeviceState]:
        """Read the cards; the state of each as the driver shows it (a holder of ours is the agent's knowledge, not the driver's)."""
        reading = await self._collector.read()
        self.none, self._trouble = reading.none, reading.error
        self._readings = {}
        for card in reading.cards:
            self._learn(card)
            if card.index in self.known:
                self._readings[self.known[card.index].id] = card
        states: dict[DeviceId, DeviceState] = {}
        for device in self.known.values():
            found = self._readings.get(device.id)
            if found is None:
                # Known, and not among those that the driver counts: it fell off the bus. A collector that is stuck says nothing of it.
                states[device.id] = DeviceState.UNKNOWN if self._trouble else DeviceState.LOST
            else:
                states[device.id] = _state(found, roots)
        return states

    def _learn(self, card: CardReading) -> None:
        if card.uuid is None:
            return
        before = self.known.get(card.index)
        for index, device in list(self.known.items()):
            if device.id == card.uuid and index != card.index:
                del self.known[index]  # Indexes shift when a card is gone; the UUID is the card.
        if (
            before is not None
            and before.id != card.uuid
            and all(device.id != before.id for i, device in self.known.items() if i != card.index)
        ):
            self.known[_free_index(self.known)] = before
        self.known[card.index] = Device(
            id=DeviceId(card.uuid),
            kind=DeviceKind.GPU,
            model=plain_model(card.name or "") or (before.model if before is not None and before.id == card.uuid else ""),
            memory_mib=card.memory_total_mib or (before.memory_mib if before is not None and before.id == card.uuid else 0),
            node=self.node,
        )

    def sample(
        self,
        pools: Sequence[Pool],
        holds: Holds,
        local: Mapping[AttemptId, bool],
        seen: Mapping[DeviceId, DeviceState],
        roots: Collection[int],
    ) -> NodeSample:
        """What goes out on this beat: every device of every pool, with its holder's kind."""
        self._sequence += 1
        devices = [
            self._device(pool, device, state_of(pool.name, device, holds, local, seen), roots) for pool in pools for device in pool.devices
        ]
        return NodeSample(node=self.node, sampled=self._clock.now(), sequence=self._sequence, devices=devices)

    def _device(self, pool: Pool, device: Device, state: DeviceState, roots: Collection[int]) -> DeviceSample:
        card = self._readings.get(device.id)
        if device.kind is DeviceKind.SLOT or card is None:
            errors = {"nvml": self._trouble} if device.kind is DeviceKind.GPU and self._trouble else {}
            return DeviceSample(id=device.id, pool=pool.name, kind=device.kind, state=state, model=device.model, errors=errors)
        ours, foreign = _sides(card, roots)
        return DeviceSample(
            id=device.id,
            pool=pool.name,
            kind=device.kind,
            state=state,
            index=card.index,
            model=device.model,
            memory_total_mib=card.memory_total_mib,
            memory_used_mib=card.memory_used_mib,
            utilisation_percent=card.utilisation_percent,
            temperature_c=card.temperature_c,
            power_w=card.power_w,
            our_processes=ours,
            foreign_processes=foreign,
            errors=card.errors,
        )


def _free_index(known: Mapping[int, Device]) -> int:
    """A key for a card that lost its index: above all that a driver counts."""
    return max([1_000, *known]) + 1


def _sides(card: CardReading, roots: Collection[int]) -> tuple[int | None, int | None]:
    """(ours, foreign) processes; None if the card did not say. One that went away while we looked is neither."""
    if card.pids is None:
        return None, None
    sides = [procs.descends(pid, roots) for pid in card.pids]
    return sides.count(True), sides.count(False)


def _state(card: CardReading, roots: Collection[int]) -> DeviceState:
    if card.lost:
        return DeviceState.LOST
    ours, foreign = _sides(card, roots)
    if foreign is None or ours is None:
        return DeviceState.UNKNOWN
    return DeviceState.FOREIGN if foreign else DeviceState.FREE
