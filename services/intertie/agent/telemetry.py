"""What this machine's devices do now: NVML through a child that is replaced when it hangs or dies, or whatever source the owner named.

A process is ours if it descends from one of our supervisors; anything else on a card is foreign, and a foreign or lost card takes no work. Where a
source knows no processes, a card that nobody of ours holds is foreign if it is in use, and unknown if that cannot be said. A lost card keeps the
name it was known by. Nothing old is ever sent with a new time: what cannot be read now is None (BR-097). A card that is cut into slices is no
device beside them.
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
from intertie.agent.core.devices import Holds, Pool, state_of
from intertie.agent.sources.port import Source
from intertie.agent.sources.reading import CardReading, Reading
from intertie.clock import Clock
from intertie.contracts.site import Device, DeviceKind, DeviceState, plain_model
from intertie.contracts.telemetry import DeviceSample, NodeSample
from intertie.ids import AttemptId, DeviceId
from intertie.observe import log

LOG = log.get("agent.telemetry")

# NVML answers in microseconds; a driver that needs longer than this is stuck (a card in reset holds calls for a second or two).
DEADLINE_S = 5.0
# A child that dies at once is not started in a loop.
RESTART_S = 2.0
# Longer than a driver's reset or an exporter's restart: what stays unread so long, somebody has to look at (BR-104).
UNREAD_S = 600.0
# What a device or driver does not know is no fault that stays; nor are words about a card's own health.
LASTING_WHYS = frozenset({"NotSupported", "FunctionNotFound", "NoPermission", "not supported", "no permission", "of the whole board"})
NO_METRICS = frozenset({"xid", "healthy"})
# One line per card of some 400 bytes, 64 cards, and room.
LINE_BYTES = 256 * 1024


class Collector:
    """The child, and the questions to it: the `Source` of NVML. `read` never hangs and never raises: it says what it could not find out."""

    name = "nvml"
    every_s = 0.0

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

    def __init__(
        self, collector: Source, clock: Clock, node: str, known: Mapping[int, Device] | None = None, *, every_s: float = 0.0
    ) -> None:
        """`every_s`: seconds between samples, as told with each; 0: not told."""
        self._collector = collector
        self._clock = clock
        self.node = node
        self.every_s = every_s
        self.known: dict[int, Device] = dict(known or {})
        self.none = ""
        """Why this machine has no GPU, once NVML said so."""
        self.driver = ""
        """Its version, as last read; empty: not known."""
        self._sequence = 0
        self._readings: dict[DeviceId, CardReading] = {}
        self._sided: dict[DeviceId, tuple[int | None, int | None]] = {}
        """(ours, foreign) processes of each."""
        self._trouble: Mapping[str, str] = {}
        """Source → why it could not be read."""
        self._source: dict[DeviceId, str] = {}
        """Who told of a device last."""
        self._parents: dict[DeviceId, DeviceId] = {}
        self._unread: dict[tuple[DeviceId, str], float] = {}
        """Since when (boot clock) a metric of a device, or its source, could not be read."""
        self._notes: frozenset[str] = frozenset()

    async def close(self) -> None:
        await self._collector.close()

    @property
    def cards(self) -> Mapping[DeviceId, CardReading]:
        """What was read of each device with the last look."""
        return self._readings

    def shared(self) -> frozenset[DeviceId]:
        """Devices on which the last look found a process that is none of ours."""
        return frozenset(device for device, (_, foreign) in self._sided.items() if foreign)

    async def look(self, roots: Collection[int]) -> dict[DeviceId, DeviceState]:
        """Read the cards; the state of each as the driver shows it (a holder of ours is the agent's knowledge, not the driver's)."""
        reading = await self._collector.read()
        self.none, self.driver = reading.none, reading.driver or self.driver
        self._trouble = reading.troubles or ({self._collector.name: reading.error} if reading.error else {})
        self._tell(reading)
        self._readings, self._sided = {}, {}
        self._forget_the_recut(reading.cards)
        for card in reading.cards:
            if card.sliced:
                continue
            self._learn(card)
            if card.index in self.known:
                device = self.known[card.index].id
                self._readings[device] = card
                # A walk through /proc for each process: once a look.
                self._sided[device] = _sides(card, roots)
                self._source[device] = card.source or self._collector.name
        states: dict[DeviceId, DeviceState] = {}
        for device in (known.id for known in self.known.values()):
            found = self._readings.get(device)
            if found is None:
                # Known, and not among those that its source counts: it fell off the bus. A source that is stuck says nothing of it.
                states[device] = DeviceState.UNKNOWN if self._trouble_of(device) else DeviceState.LOST
            else:
                states[device] = _state(found, *self._sided[device])
        self._note_unread()
        return states

    def _note_unread(self) -> None:
        now_s, before = self._clock.boot_s(), self._unread
        self._unread = {}
        for device in (known.id for known in self.known.values()):
            card = self._readings.get(device)
            whys = card.errors if card is not None else self._trouble_of(device)
            for metric, why in whys.items():
                if why not in LASTING_WHYS and metric not in NO_METRICS:
                    self._unread[(device, metric)] = before.get((device, metric), now_s)

    def unread(self) -> Mapping[DeviceId, Collection[str]]:
        """Of each device what could not be read for long."""
        now_s, found = self._clock.boot_s(), dict[DeviceId, set[str]]()
        for (device, metric), since_s in self._unread.items():
            if now_s - since_s >= UNREAD_S:
                found.setdefault(device, set()).add(metric)
        return found

    def _trouble_of(self, device: DeviceId) -> Mapping[str, str]:
        """Sources that could not be read and may know it."""
        source = self._source.get(device)
        return self._trouble if source is None else {name: why for name, why in self._trouble.items() if name == source}

    def _tell(self, reading: Reading) -> None:
        """What was set aside, once in the log."""
        for note in sorted(frozenset(reading.notes) - self._notes):
            LOG.warning("a series is set aside", why=note)
        self._notes = frozenset(reading.notes)

    def _forget_the_recut(self, cards: Collection[CardReading]) -> None:
        """A card that is cut now, and slices that their card no longer has: made otherwise by the owner, and not lost."""
        here = {card.uuid for card in cards}
        cut = {card.uuid for card in cards if card.sliced}
        self._parents |= {DeviceId(card.uuid): DeviceId(card.parent) for card in cards if card.uuid and card.parent}
        for index, device in list(self.known.items()):
            parent = self._parents.get(device.id)
            if device.id in cut or (parent is not None and parent in here and device.id not in here):
                del self.known[index]
                self._parents.pop(device.id, None)

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
        return NodeSample(
            node=self.node,
            sampled=self._clock.now(),
            sequence=self._sequence,
            devices=devices,
            every_s=self.every_s,
            host_memory_mib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1_048_576,
        )

    def _device(self, pool: Pool, device: Device, state: DeviceState, roots: Collection[int]) -> DeviceSample:
        card = self._readings.get(device.id)
        if device.kind is DeviceKind.SLOT or card is None:
            errors = dict(self._trouble_of(device.id)) if device.kind is DeviceKind.GPU else {}
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
            memory_kind="unified" if card.unified else "",
            utilisation_percent=card.utilisation_percent,
            temperature_c=card.temperature_c,
            power_w=card.power_w,
            our_processes=ours,
            foreign_processes=foreign,
            sampled=card.read_at,
            every_s=card.every_s,
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


def _state(card: CardReading, ours: int | None, foreign: int | None) -> DeviceState:
    if card.lost:
        return DeviceState.LOST
    if foreign is not None and ours is not None:
        return DeviceState.FOREIGN if foreign else DeviceState.FREE
    if card.in_use is None:
        return DeviceState.UNKNOWN
    # Whether it is ours is the table of holders' to say, which is asked before a stranger.
    return DeviceState.FOREIGN if card.in_use else DeviceState.FREE
