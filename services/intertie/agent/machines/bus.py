"""The bus as a node sees it: requests and messages over its line to the head, redialled for ever. Only what a lane needs; nothing is kept."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from intertie.agent.machines.wire import Frame, Gone, Line
from intertie.bus import serving
from intertie.bus.port import Appended, ConsumerSpec, Dead, Handler, Message, StreamSpec, StreamState, Subscription
from intertie.bus.subjects import check, matches
from intertie.errors import IntertieError, Refused, Unavailable
from intertie.observe import log

LOG = log.get("machines.bus")

# Between tries to reach a head that is away: soon back when it returns, no burden while it is gone for a week.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 5.0
# A node that is refused asks again all the same: what was revoked may be allowed again.
REFUSED_PAUSE_S = 10.0

Connect = Callable[[], Awaitable[Line]]
"""Dial and greet; `Unavailable` or `Refused` with the head's reason."""


@dataclass(eq=False)
class _Listener:
    bus: WireBus
    pattern: str
    take: Callable[[Message], None]

    async def close(self) -> None:
        if self in self.bus.listeners:
            self.bus.listeners.remove(self)


class WireBus:
    """`Bus` over one line. `run` it as a task."""

    def __init__(self, connect: Connect, *, pause: float = 1.0) -> None:
        """`pause`: factor on what is waited between tries."""
        self._connect, self._pause = connect, pause
        self._line: Line | None = None
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._number = 0
        self._watchers: list[Callable[[bool], None]] = []
        self.listeners: list[_Listener] = []
        self._open: list[Subscription] = []
        self.refused: IntertieError | None = None
        """Why the head does not take us, while it does not."""

    async def run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                self._line = line = await self._connect()
                self.refused = None
                pause_s = FIRST_PAUSE_S
                self._tell(True)
                await self._pump(line)
            except Refused as err:
                if self.refused is None or self.refused.code != err.code:
                    LOG.error("the head refuses this node", code=err.code, text=err.text)
                self.refused = err
                pause_s = REFUSED_PAUSE_S
            except Unavailable as err:
                LOG.info("no line to the head", code=err.code, text=err.text)
            finally:
                await self._lost()
            await asyncio.sleep(pause_s * (0.5 + random.random() / 2) * self._pause)
            pause_s = min(LAST_PAUSE_S, pause_s * 2)

    async def _lost(self) -> None:
        line, self._line = self._line, None
        if line is None:
            return
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(Unavailable("bus.unavailable", "the line to the head was lost"))
        self._tell(False)
        await line.closed()

    def _tell(self, connected: bool) -> None:
        for watcher in list(self._watchers):
            watcher(connected)

    async def _pump(self, line: Line) -> None:
        async for frame in line.frames():
            match frame.kind:
                case "answer" | "failed":
                    asked = self._asked.get(frame.id)
                    if asked is None or asked.done():
                        continue
                    if frame.kind == "answer":
                        asked.set_result(Message(frame.subject, frame.body))
                    else:
                        asked.set_exception(Unavailable(frame.subject or "bus.unavailable", frame.body.decode("utf-8", "replace")[:500]))
                case "message":
                    message = Message(frame.subject, frame.body)
                    for one in list(self.listeners):
                        if matches(one.pattern, message.subject):
                            one.take(message)

    # --- the port ---

    @property
    def connected(self) -> bool:
        return self._line is not None

    def _require(self) -> Line:
        if self._line is None:
            raise Unavailable("bus.unavailable", "no line to the head")
        return self._line

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        await self._send(Frame("message", 0, check(subject), body))

    async def publish_many(self, messages: Sequence[tuple[str, bytes]]) -> None:
        for subject, body in messages:
            await self.publish(subject, body)

    async def _send(self, frame: Frame) -> None:
        try:
            await self._require().send(frame)
        except Gone as err:
            raise Unavailable("bus.unavailable", err.text) from err

    async def request(self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Message:
        self._number += 1
        number = self._number
        asked: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked
        try:
            await self._send(Frame("request", number, check(subject), body))
            async with asyncio.timeout(timeout_s):
                return await asked
        except TimeoutError:
            raise Unavailable("bus.timeout", f"no answer from {subject} within {timeout_s:g} s: it may have been done") from None
        finally:
            self._asked.pop(number, None)
            asked.cancel()

    async def listen(self, subject: str, take: Callable[[Message], None], queue: str = "") -> Subscription:
        listener = _Listener(self, check(subject, pattern=True), take)
        self.listeners.append(listener)
        return listener

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "", workers: int = 1, backlog: int = 1_000) -> Subscription:
        made = await serving.subscribe(self, subject, handler, queue=queue, workers=workers, backlog=backlog)
        self._open.append(made)
        return made

    async def alive(self, timeout_s: float = 1.0) -> bool:
        return self._line is not None

    def on_state(self, listener: Callable[[bool], None]) -> None:
        self._watchers.append(listener)
        listener(self.connected)

    async def close(self) -> None:
        for one in self._open:
            with contextlib.suppress(IntertieError):
                await one.close()
        self._open.clear()
        await self._lost()

    # --- what a node has no use for ---

    async def serve(self, service: str, version: str, handlers: Mapping[str, Handler], *, workers: int = 32) -> Subscription:
        raise _no_such_thing()

    async def ensure_stream(self, spec: StreamSpec) -> StreamState:
        raise _no_such_thing()

    async def stream_state(self, name: str) -> StreamState | None:
        raise _no_such_thing()

    async def append(
        self, subject: str, body: bytes, *, message_id: str, headers: Mapping[str, str] | None = None, timeout_s: float = 2.0
    ) -> Appended:
        raise _no_such_thing()

    async def last_messages(self, stream: str, subject_filter: str, *, limit: int = 10_000) -> list[Message]:
        raise _no_such_thing()

    async def consume(self, spec: ConsumerSpec, handler: Handler, dead: Dead) -> Subscription:
        raise _no_such_thing()


def _no_such_thing() -> Unavailable:
    return Unavailable("bus.no_stream", "between a head and its nodes there are no streams and no services")
