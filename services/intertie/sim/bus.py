"""The bus in memory with a network under it: every message takes its time, and may be lost, late, doubled or overtaken, each way by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from intertie.bus.memory import IN, AccountMap, MemoryBroker, MemoryBus, _Listener
from intertie.bus.memory_streams import MemoryStreams
from intertie.bus.port import Message
from intertie.bus.subjects import INBOX, matches
from intertie.clock import Clock
from intertie.contracts.base import PREFIX
from intertie.sim.loop import Party

# One way inside a data centre or between two cities.
NEAR_S, FAR_S = 0.001, 0.03
TELEMETRY = f"{PREFIX}.tel."


@dataclass
class Link:
    """One party's way to the bus. Shares are of messages, each way."""

    lost: float = 0.0
    doubled: float = 0.0
    late_s: float = 0.0
    reordered: bool = False
    held_until: float = 0.0
    """What comes in is kept on its way until then."""
    deaf: list[str] = field(default_factory=list)
    """Directions (`in`, `out`) that carry nothing, and nobody is told. Once for each fault that lasts."""
    cuts: int = 0
    """Faults that last in which the party knows that it has no bus."""
    buses: list[SimBus] = field(default_factory=list)
    """Of the process that uses this link now."""

    def cut(self, by: int) -> None:
        """One fault more (1) or less (-1)."""
        self.cuts += by
        for bus in self.buses:
            if not bus.party.dead:
                (bus.cut if self.cuts else bus.heal)()

    def use(self, bus: SimBus) -> None:
        self.buses = [*(one for one in self.buses if not one.party.dead), bus]
        if self.cuts:
            bus.cut()


class SimStreams(MemoryStreams):
    """JetStream whose folder can be removed under it: it goes on acknowledging and answering `duplicate`, and keeps nothing (LINK D20)."""

    hollow = 0
    purged = False

    def purge(self) -> None:
        """Every message goes; creation time and head stay."""
        self.purged = True
        for stream in self._streams.values():
            for seq in list(stream.messages):
                stream._remove(seq)

    def pump(self) -> None:
        if not self.hollow:
            super().pump()

    def last(self, name: str, subject_filter: str, limit: int) -> list[Message]:
        return [] if self.hollow else super().last(name, subject_filter, limit)


class SimBroker(MemoryBroker):
    def __init__(self, clock: Clock, rng: Random, seen: Callable[[str, str, int], None]) -> None:
        """`seen(party, subject, size)`: told of every message that arrives."""
        super().__init__(clock)
        self.streams: SimStreams = SimStreams(self.clock)
        self.rng, self.seen = rng, seen
        self.party = Party("bus")
        self._exact: dict[tuple[str, str], list[_Listener]] = {}
        self._wild: list[_Listener] = []
        self._matching: dict[tuple[str, str], list[_Listener]] = {}
        """(account, subject) → those of `_wild` that hear it; empty after each change."""

    def connect(self, party: Party, link: Link, account: AccountMap | None = None) -> SimBus:
        bus = self.client(party.name, account)
        simulated = SimBus(self, party, link, bus.account)
        party.closing.append(simulated.sever)
        link.use(simulated)
        return simulated

    # Most listeners are inboxes that live for one request: found by name, not by trying them all.

    def listen(self, listener: _Listener) -> None:
        if "*" in listener.pattern or ">" in listener.pattern:
            self._wild.append(listener)
            self._matching.clear()
        else:
            self._exact.setdefault((listener.bus.account.name, listener.pattern), []).append(listener)

    def forget(self, listener: _Listener) -> None:
        key = (listener.bus.account.name, listener.pattern)
        if listener in self._exact.get(key, ()):
            self._exact[key].remove(listener)
            if not self._exact[key]:
                del self._exact[key]
        elif listener in self._wild:
            self._wild.remove(listener)
            self._matching.clear()

    def forget_all(self, bus: MemoryBus) -> None:
        for listener in [one for held in [*self._exact.values(), self._wild] for one in held if one.bus is bus]:
            self.forget(listener)

    def _cross_in(self, other: AccountMap, message: Message) -> int:
        """Answers and telemetry cross no border inwards: most messages are these, and there are as many borders as sites."""
        return 0 if message.subject.startswith((INBOX, TELEMETRY)) else super()._cross_in(other, message)

    def _deliver(self, account: str, message: Message) -> int:
        key = (account, message.subject)
        if key not in self._matching:
            self._matching[key] = [one for one in self._wild if one.bus.account.name == account and matches(one.pattern, message.subject)]
        self._listeners = [*self._exact.get(key, ()), *self._matching[key]]
        return super()._deliver(account, message)


class SimBus(MemoryBus):
    """One process's connection. What arrives is handled in the process that it arrives at."""

    def __init__(self, broker: SimBroker, party: Party, link: Link, account: AccountMap) -> None:
        super().__init__(broker, party.name, account)
        self.party, self.link, self._sim = party, link, broker
        self.faults.drop = self._loses

    def sever(self) -> None:
        """The process is gone: its socket is closed, and no word of its reaches anybody."""
        self._closed = True
        self._sim.forget_all(self)
        streams = self.broker.streams
        streams._members[:] = [one for one in streams._members if one.reach.__self__ is not self]  # type: ignore[attr-defined]  # our `_reach`

    def _loses(self, direction: str, subject: str) -> bool:
        return direction in self.link.deaf or (self.link.lost > 0 and self._sim.rng.random() < self.link.lost)

    def arrive(self, take: Callable[[Message], None], message: Message) -> None:
        copies = 2 if self.link.doubled and self._sim.rng.random() < self.link.doubled else 1
        for _ in range(copies):
            if self.faults.loses(IN, message.subject):
                continue

            def land() -> None:
                if self.connected:
                    self._sim.seen(self.name, message.subject, len(message.body))
                    take(message)

            self._later(IN, land)

    def _later(self, direction: str, do: Callable[[], object]) -> None:
        loop, rng = asyncio.get_running_loop(), self._sim.rng
        due = loop.time() + NEAR_S + rng.random() * (FAR_S + self.link.late_s)
        if direction == IN:
            due = max(due, self.link.held_until)
        if not self.link.reordered:
            due = max(due, self._last_due[direction] + 1e-6)
            self._last_due[direction] = due
        party = self.party if direction == IN else self._sim.party
        loop.call_at(due, do, context=party.callbacks)
