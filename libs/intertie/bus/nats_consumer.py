"""A durable pull consumer on NATS: asks for as many messages as it has places, has them sent to an inbox of its own with a callback
(three times as fast as `fetch`), and makes itself anew when its stream or itself was lost, the server restarted or the link changed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import nats.errors
from nats.aio.msg import Msg

from intertie.bus import jetstream
from intertie.bus.delivery import Deliveries
from intertie.bus.nats_session import STATUS, Session, message_of
from intertie.bus.port import ConsumerSpec, Dead, Handler, Message
from intertie.bus.subjects import INBOX
from intertie.bus.workers import put_down
from intertie.errors import IntertieError, Unavailable
from intertie.observe import log

LOG = log.get("bus.consumer")

# A request for messages is renewed this often; the server says that it lives in between.
_EXPIRES_S = 30.0
_HEARTBEAT_S = 0.75
# Two heartbeats and a little: then the consumer is looked for again.
_SILENCE_S = 2.0
# While a stream is away somebody is about to make it again.
_AGAIN_S = 0.5

_NOTHING_NOW = "404"
_EXPIRED = "408"
_CONFLICT = "409"
_IDLE = "100"


@dataclass(frozen=True, slots=True)
class NatsDelivery:
    """One try. Its words go out only while the consumer that gave it is the one that we last saw: after a wiped stream the same numbers
    name other messages."""

    consumer: NatsConsumer
    life: str
    message: Message
    tries: int

    async def _say(self, word: bytes) -> None:
        if self.consumer.life == self.life:
            await self.consumer.say(self.message.reply, word)

    async def ack(self) -> None:
        await self._say(b"+ACK")

    async def nak(self, delay_s: float) -> None:
        await self._say(b'-NAK {"delay": %d}' % int(delay_s * 1_000_000_000))

    async def term(self) -> None:
        await self._say(b"+TERM")

    async def progress(self) -> None:
        await self._say(b"+WPI")


class NatsConsumer:
    """One process's part of a durable consumer."""

    def __init__(
        self,
        spec: ConsumerSpec,
        handler: Handler,
        dead: Dead,
        *,
        session: Callable[[], Awaitable[Session]],
        current: Callable[[], Session | None],
    ) -> None:
        self.spec = spec
        self.life = ""
        """When the durable was created, in the server's words; empty while unsure."""
        self._work = Deliveries(spec, handler, dead, freed=self._freed)
        self._session = session
        self._current = current
        self._requested = 0
        self._heard_at = 0.0
        self._trouble = ""
        self._wake = asyncio.Event()
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"consumer {self.spec.durable}")

    async def close(self) -> None:
        if self._task:
            self._closed = True
            await put_down([self._task])
        await self._work.close()

    async def say(self, subject: str, word: bytes) -> None:
        """Send one acknowledgement word; lost with the link, and then the message comes again."""
        session = self._current()
        if session is not None:
            with suppress(IntertieError):
                await session.publish(subject, word, {})

    async def _run(self) -> None:
        said, loop = "", asyncio.get_running_loop()
        while not self._closed:
            session = await self._session()
            began_s = loop.time()
            try:
                await self._consume(session)
                said = ""
                if self._trouble and loop.time() - began_s < _AGAIN_S:
                    # A cluster that has no leader yet refuses at once: asked without a rest, by every consumer, it comes to none.
                    await asyncio.sleep(_AGAIN_S * random.uniform(0.8, 1.2))
            except Unavailable as error:
                if error.code != said:
                    LOG.info("a consumer waits", consumer=self.spec.durable, stream=self.spec.stream, code=error.code, reason=error.text)
                said = error.code
                await asyncio.sleep(_AGAIN_S * random.uniform(0.8, 1.2))
            except Exception:
                # A bug of ours must not stop the stream for good without a word; it is said each time.
                LOG.exception("a consumer failed", consumer=self.spec.durable)
                await asyncio.sleep(_AGAIN_S)

    async def _consume(self, session: Session) -> None:
        """Until the session ends or something is wrong with the consumer: then return, and be made anew."""
        life = await jetstream.ensure_consumer(session, self.spec)
        if self.life and life != self.life:
            LOG.warning("a consumer was lost and made anew", consumer=self.spec.durable, stream=self.spec.stream)
        self.life = life
        inbox = session.new_inbox()
        self._requested, self._trouble = 0, ""
        self._heard_at = asyncio.get_running_loop().time()

        async def arrived(msg: Msg) -> None:
            self._arrived(msg, life)

        try:
            subscription = await session.client.subscribe(inbox, cb=arrived)
        except (nats.errors.Error, OSError, RuntimeError) as error:
            raise Unavailable("bus.unavailable", "the link went") from error
        try:
            await self._pull_while_good(session, inbox)
        finally:
            # A session that was replaced before its credentials ended drains by itself, and what it still brings is handled.
            if session is self._current() or not session.usable:
                with suppress(nats.errors.Error, OSError, RuntimeError):
                    await subscription.unsubscribe()
        if self._trouble:
            LOG.info("a consumer is looked for again", consumer=self.spec.durable, reason=self._trouble)

    async def _pull_while_good(self, session: Session, inbox: str) -> None:
        loop = asyncio.get_running_loop()
        progress_at = loop.time() + self.spec.ack_wait_s / 3
        while not self._closed and session.usable and session is self._current() and not self._trouble:
            self._wake.clear()
            room = self.spec.backlog - self._work.held - self._requested
            if room > 0 and (self._requested == 0 or room * 2 >= self.spec.backlog):
                self._requested += room
                subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.spec.stream}.{self.spec.durable}"
                await session.publish(subject, jetstream.pull(room, _EXPIRES_S, _HEARTBEAT_S), {}, reply=inbox)
            try:
                async with asyncio.timeout(_HEARTBEAT_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            if self._requested and loop.time() - self._heard_at > _SILENCE_S:
                self._trouble = "no heartbeat"
            if loop.time() >= progress_at:
                progress_at = loop.time() + self.spec.ack_wait_s / 3
                for delivery in self._work.all_held():
                    await delivery.progress()

    def _freed(self) -> None:
        if self._requested == 0 or (self.spec.backlog - self._work.held - self._requested) * 2 >= self.spec.backlog:
            self._wake.set()

    def _arrived(self, msg: Msg, life: str) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        message = message_of(msg)
        status = message.headers.get(STATUS, "") if not message.body else ""
        if not status or not message.subject.startswith(INBOX):
            self._requested = max(0, self._requested - 1)
            self._work.take(NatsDelivery(self, life, message, jetstream.tries(message.reply)))
            return
        if status == _IDLE:
            return
        left = message.headers.get("nats-pending-messages", "")
        text = message.headers.get("description", "").strip().lower()
        if status in (_EXPIRED, _NOTHING_NOW) or (status == _CONFLICT and left):
            self._requested = max(0, self._requested - int(left)) if left.isdigit() else 0
        else:
            self._requested = 0
            self._trouble = text or f"status {status}"
            # Until it is found again its numbers mean nothing.
            self.life = ""
        self._wake.set()
