"""Streams and durable consumers of the in-memory bus: what JetStream promises of them, no more (an acknowledged message can vanish)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from intertie.bus.delivery import Deliveries
from intertie.bus.port import Appended, ConsumerSpec, Dead, Handler, Message, StreamSpec, StreamState
from intertie.bus.subjects import matches
from intertie.clock import Clock
from intertie.errors import Unavailable

MESSAGE_ID = "nats-msg-id"

Reach = Callable[[Callable[[], None] | None], bool]


@dataclass
class _Stored:
    seq: int
    message: Message
    at: datetime


@dataclass(eq=False)
class _Stream:
    spec: StreamSpec
    created: datetime
    messages: dict[int, _Stored] = field(default_factory=dict)
    """By sequence, oldest first."""
    ids: dict[str, tuple[int, datetime]] = field(default_factory=dict)
    """By message id, oldest first: first sequence and time."""
    of_subject: dict[str, deque[int]] = field(default_factory=dict)
    last_seq: int = 0
    size: int = 0

    def _remove(self, seq: int) -> None:
        gone = self.messages.pop(seq, None)
        if gone is None:
            return
        self.size -= len(gone.message.body)
        same = self.of_subject[gone.message.subject]
        same.remove(seq)
        if not same:
            del self.of_subject[gone.message.subject]

    def _oldest(self) -> _Stored | None:
        return next(iter(self.messages.values()), None)

    def expire(self, now: datetime) -> None:
        if self.spec.max_age_s > 0:
            while (oldest := self._oldest()) and oldest.at < now - timedelta(seconds=self.spec.max_age_s):
                self._remove(oldest.seq)

    def append(self, message: Message, now: datetime) -> Appended:
        """The window of a message id counts from its first copy (BR-112)."""
        window = timedelta(seconds=self.spec.duplicate_window_s)
        while self.ids and now - self.ids[first := next(iter(self.ids))][1] >= window:
            del self.ids[first]
        message_id = message.headers.get(MESSAGE_ID, "")
        if message_id in self.ids:
            return Appended(self.spec.name, self.ids[message_id][0], True)
        self.last_seq += 1
        if message_id:
            self.ids[message_id] = (self.last_seq, now)
        self.messages[self.last_seq] = _Stored(self.last_seq, Message(message.subject, message.body, message.headers), now)
        self.size += len(message.body)
        same = self.of_subject.setdefault(message.subject, deque())
        same.append(self.last_seq)
        while 0 < self.spec.max_per_subject < len(same):
            self._remove(same[0])
        while 0 < self.spec.max_bytes < self.size and len(self.messages) > 1:
            self._remove(next(iter(self.messages)))
        return Appended(self.spec.name, self.last_seq, False)

    def state(self) -> StreamState:
        oldest = self._oldest()
        first = oldest.seq if oldest else self.last_seq + 1 if self.last_seq else 0
        return StreamState(self.spec.name, self.created, first, self.last_seq, len(self.messages), self.spec.epoch)


@dataclass(eq=False)
class _Durable:
    """Where a consumer stands: the cursor, what was given out, what is to be given again."""

    stream: _Stream
    cursor: int = 0
    tries: dict[int, int] = field(default_factory=dict)
    again: deque[int] = field(default_factory=deque)
    turn: int = 0


@dataclass(eq=False)
class _Member:
    """One process that takes part in a consumer."""

    streams: MemoryStreams
    spec: ConsumerSpec
    reach: Reach
    work: Deliveries
    flying: int = 0

    @property
    def has_room(self) -> bool:
        return self.reach(None) and self.work.held + self.flying < self.spec.backlog

    async def close(self) -> None:
        self.streams.leave(self)
        await self.work.close()


@dataclass(eq=False)
class _Delivery:
    """Forgotten by the broker after `ack_wait_s`, like the real one's."""

    streams: MemoryStreams
    durable: _Durable
    member: _Member
    seq: int
    message: Message
    tries: int
    timer: asyncio.TimerHandle | None = None

    def wait(self) -> None:
        self._stop()
        self.timer = asyncio.get_running_loop().call_later(self.member.spec.ack_wait_s, self._again)

    def _stop(self) -> None:
        if self.timer:
            self.timer.cancel()
            self.timer = None

    def _again(self) -> None:
        self.timer = None
        self.streams.again(self.durable, self.seq)

    def _said(self) -> bool:
        """Did the word reach the broker, and is it still the same consumer?"""
        return self.member.reach(None) and self.streams.current(self.durable)

    async def ack(self) -> None:
        if self._said():
            self._stop()
            self.durable.tries.pop(self.seq, None)

    async def term(self) -> None:
        await self.ack()

    async def nak(self, delay_s: float) -> None:
        if self._said():
            self._stop()
            self.timer = asyncio.get_running_loop().call_later(delay_s, self._again)

    async def progress(self) -> None:
        if self._said():
            self.wait()


class MemoryStreams:
    """All streams of a broker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._durables: dict[tuple[str, str], _Durable] = {}
        self._members: list[_Member] = []
        self._last_created: datetime | None = None

    def ensure(self, spec: StreamSpec) -> StreamState:
        stream = self._streams.get(spec.name)
        if stream is not None and stream.spec.epoch < spec.epoch:
            self.delete(spec.name)
            stream = None
        if stream is None:
            # Two lives of a stream never carry the same birthday, however slow the clock.
            created = self._clock.now()
            if self._last_created and created <= self._last_created:
                created = self._last_created + timedelta(microseconds=1)
            self._last_created = created
            stream = self._streams[spec.name] = _Stream(spec, created)
        stream.spec = replace(spec, epoch=max(spec.epoch, stream.spec.epoch))
        self.pump()
        return stream.state()

    def state(self, name: str) -> StreamState | None:
        stream = self._streams.get(name)
        if stream:
            stream.expire(self._clock.now())
        return stream.state() if stream else None

    def store(self, message: Message) -> Appended | None:
        """Put a message into the stream that takes its subject, if any."""
        for stream in self._streams.values():
            if any(matches(pattern, message.subject) for pattern in stream.spec.subjects):
                made = stream.append(message, self._clock.now())
                self.pump()
                return made
        return None

    def last(self, name: str, subject_filter: str, limit: int) -> list[Message]:
        stream = self._streams.get(name)
        if stream is None:
            raise Unavailable("bus.no_stream", f"there is no stream {name}")
        stream.expire(self._clock.now())
        newest = sorted(seqs[-1] for subject, seqs in stream.of_subject.items() if matches(subject_filter, subject))
        return [stream.messages[seq].message for seq in newest][:limit]

    def delete(self, name: str) -> None:
        """Gone with its durables, as on a server."""
        self._streams.pop(name, None)
        for key in [key for key in self._durables if key[0] == name]:
            del self._durables[key]

    def wipe(self) -> None:
        self._streams.clear()
        self._durables.clear()

    def join(self, spec: ConsumerSpec, handler: Handler, dead: Dead, *, reach: Reach) -> _Member:
        member = _Member(self, spec, reach, Deliveries(spec, handler, dead, freed=self.pump))
        self._members.append(member)
        self.pump()
        return member

    def leave(self, member: _Member) -> None:
        if member in self._members:
            self._members.remove(member)

    def current(self, durable: _Durable) -> bool:
        return durable in self._durables.values()

    def again(self, durable: _Durable, seq: int) -> None:
        if seq in durable.tries and self.current(durable):
            durable.again.append(seq)
            self.pump()

    def pump(self) -> None:
        """Give out whatever there is to whoever has room, in turn."""
        by_consumer: dict[tuple[str, str], list[_Member]] = {}
        for member in self._members:
            if member.spec.stream in self._streams:
                by_consumer.setdefault((member.spec.stream, member.spec.durable), []).append(member)
        for key, members in by_consumer.items():
            durable = self._durables.setdefault(key, _Durable(self._streams[key[0]]))
            while (ready := [member for member in members if member.has_room]) and self._give(durable, ready):
                pass

    def _give(self, durable: _Durable, ready: list[_Member]) -> bool:
        stored = self._next(durable, ready[0].spec)
        if stored is None:
            return False
        member = ready[durable.turn % len(ready)]
        durable.turn += 1
        tries = durable.tries[stored.seq] = durable.tries.get(stored.seq, 0) + 1
        delivery = _Delivery(self, durable, member, stored.seq, stored.message, tries)
        delivery.wait()
        member.flying += 1

        def land() -> None:
            member.flying -= 1
            member.work.take(delivery)

        if not member.reach(land):
            member.flying -= 1
        return True

    def _next(self, durable: _Durable, spec: ConsumerSpec) -> _Stored | None:
        while durable.again:
            seq = durable.again.popleft()
            found = durable.stream.messages.get(seq)
            if found:
                return found
            durable.tries.pop(seq, None)
        durable.stream.expire(self._clock.now())
        while durable.cursor < durable.stream.last_seq:
            durable.cursor += 1
            stored = durable.stream.messages.get(durable.cursor)
            if stored and any(matches(pattern, stored.message.subject) for pattern in spec.filters):
                return stored
        return None
