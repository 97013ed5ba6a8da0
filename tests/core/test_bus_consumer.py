"""A consumer whose server refuses at once, as a cluster without a leader does: it asks again with a rest between, and does not drown the election."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import msgspec
from nats.aio.msg import Msg

from intertie.bus.nats_consumer import NatsConsumer
from intertie.bus.nats_session import Session
from intertie.bus.port import ConsumerSpec, Message
from intertie.bus.subjects import INBOX

SPEC = ConsumerSpec("EVENTS", "reader", ("evt.>",))
# Two rests of half a second, less what is drawn off them. A slow machine only takes longer.
LEAST_S = 0.75


class Refusing:
    """A session whose server makes the consumer, and answers each request for messages with 503 at once."""

    usable = True

    def __init__(self) -> None:
        self.made = 0
        self._tell: Callable[[Msg], Awaitable[None]] | None = None
        self.client = self
        self.third = asyncio.Event()

    def new_inbox(self) -> str:
        return f"{INBOX}x"

    async def request(self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Message:
        assert ".CONSUMER.CREATE." in subject
        self.made += 1
        if self.made == 3:
            self.third.set()
        return Message(subject, msgspec.json.encode({"created": "2026-12-01T00:00:00Z", "name": SPEC.durable}))

    async def subscribe(self, subject: str, cb: Callable[[Msg], Awaitable[None]]) -> Refusing:
        self._tell = cb
        return self

    async def unsubscribe(self) -> None:
        self._tell = None

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str], reply: str = "") -> None:
        assert self._tell is not None
        refused = Msg(_client=cast("object", None), subject=reply, reply="", data=b"", headers={"Status": "503"})  # type: ignore[arg-type]
        await self._tell(refused)


async def nothing(_message: Message) -> None:
    raise AssertionError("no message comes here")


async def never(_message: Message, _error: BaseException, _tries: int) -> None:
    raise AssertionError("no message dies here")


async def test_a_consumer_that_is_refused_at_once_rests_before_it_asks_again() -> None:
    session = Refusing()
    held = cast("Session", session)

    async def current() -> Session:
        return held

    consumer = NatsConsumer(SPEC, nothing, never, session=current, current=lambda: held)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    consumer.start()
    try:
        async with asyncio.timeout(30):
            await session.third.wait()
    finally:
        await consumer.close()
    assert loop.time() - began_s >= LEAST_S
