"""A bus that its owner can close and open again: what a drill cuts. Whoever subscribed stays subscribed; whoever calls meanwhile is told `bus.cut`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from intertie.bus.port import Appended, Bus, ConsumerSpec, Dead, Handler, Message, StreamSpec, StreamState, Subscription
from intertie.errors import IntertieError, Unavailable
from intertie.observe import log

LOG = log.get("agent.cut")

Make = Callable[[], Awaitable[Bus]]
Subscribed = Callable[[Bus], Awaitable[Subscription]]
"""Listens to the same again, on another connection."""
# A connection that does not close politely within this is dropped.
CLOSE_S = 3.0


class CuttableBus:
    """`Bus` over a connection that is made by `make`, as often as it must be. Begins cut; `mend()` opens it."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._inner: Bus | None = None
        self._subscriptions: list[_Subscription] = []
        self._listeners: list[Callable[[bool], None]] = []

    async def mend(self) -> None:
        """Connect, and listen again to everything that was listened to."""
        if self._inner is not None:
            return
        self._inner = inner = await self._make()
        try:
            for one in self._subscriptions:
                await one.open(inner)
        except BaseException:
            # Half a connection hears no nudge and never would: the next try makes a whole one.
            await self.cut()
            raise
        inner.on_state(lambda connected: self._told(inner, connected))

    async def cut(self) -> None:
        """Close the connection: nothing goes out or comes in until `mend`."""
        inner, self._inner = self._inner, None
        if inner is None:
            return
        for listener in self._listeners:
            listener(False)
        for one in self._subscriptions:
            one.inner = None
        with contextlib.suppress(TimeoutError, IntertieError):
            async with asyncio.timeout(CLOSE_S):
                await inner.close()

    def _told(self, inner: Bus, connected: bool) -> None:
        if inner is self._inner:
            for listener in self._listeners:
                listener(connected)

    def _open(self) -> Bus:
        if self._inner is None:
            raise Unavailable("bus.cut", "the link is cut for a drill")
        return self._inner

    def forget(self, one: _Subscription) -> None:
        if one in self._subscriptions:
            self._subscriptions.remove(one)

    # --- the port ---

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        await self._open().publish(subject, body, headers)

    async def publish_many(self, messages: Sequence[tuple[str, bytes]]) -> None:
        await self._open().publish_many(messages)

    async def request(self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Message:
        return await self._open().request(subject, body, timeout_s=timeout_s, headers=headers)

    async def listen(self, subject: str, take: Callable[[Message], None], queue: str = "") -> Subscription:
        return await self._kept(lambda inner: inner.listen(subject, take, queue))

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "", workers: int = 1, backlog: int = 1_000) -> Subscription:
        return await self._kept(lambda inner: inner.subscribe(subject, handler, queue=queue, workers=workers, backlog=backlog))

    async def _kept(self, subscribed: Subscribed) -> Subscription:
        one = _Subscription(self, subscribed)
        if self._inner is not None:
            await one.open(self._inner)
        self._subscriptions.append(one)
        return one

    async def serve(self, service: str, version: str, handlers: Mapping[str, Handler], *, workers: int = 32) -> Subscription:
        return await self._open().serve(service, version, handlers, workers=workers)

    async def ensure_stream(self, spec: StreamSpec) -> StreamState:
        return await self._open().ensure_stream(spec)

    async def stream_state(self, name: str) -> StreamState | None:
        return await self._open().stream_state(name)

    async def append(
        self, subject: str, body: bytes, *, message_id: str, headers: Mapping[str, str] | None = None, timeout_s: float = 2.0
    ) -> Appended:
        return await self._open().append(subject, body, message_id=message_id, headers=headers, timeout_s=timeout_s)

    async def last_messages(self, stream: str, subject_filter: str, *, limit: int = 10_000) -> list[Message]:
        return await self._open().last_messages(stream, subject_filter, limit=limit)

    async def consume(self, spec: ConsumerSpec, handler: Handler, dead: Dead) -> Subscription:
        return await self._open().consume(spec, handler, dead)

    async def alive(self, timeout_s: float = 1.0) -> bool:
        return self._inner is not None and await self._inner.alive(timeout_s)

    @property
    def connected(self) -> bool:
        return self._inner is not None and self._inner.connected

    def on_state(self, listener: Callable[[bool], None]) -> None:
        self._listeners.append(listener)
        listener(self.connected)

    async def close(self) -> None:
        await self.cut()
        self._subscriptions.clear()


@dataclass(eq=False, slots=True)
class _Subscription:
    """What to listen to, and the subscription of the connection that is open now."""

    bus: CuttableBus
    subscribed: Subscribed
    inner: Subscription | None = None

    async def open(self, bus: Bus) -> None:
        self.inner = await self.subscribed(bus)

    async def close(self) -> None:
        self.bus.forget(self)
        inner, self.inner = self.inner, None
        if inner is not None:
            await inner.close()
