"""The bus over NATS. It owns reconnection above nats-py: a supervisor makes a new session, with fresh credentials, whenever the old one is
lost or its credentials are two thirds used up, and every subscription, service and consumer goes on with it.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from intertie.bus import jetstream, serving
from intertie.bus.nats_consumer import NatsConsumer
from intertie.bus.nats_session import NO_HEADERS, Credentials, NotConnected, Session, expiry_s, login_of, message_of, order
from intertie.bus.port import Appended, ConsumerSpec, Dead, Handler, Message, StreamSpec, StreamState, Subscription
from intertie.bus.proxy import STRAIGHT, Way
from intertie.bus.subjects import check, lowered, matches, plain
from intertie.bus.workers import put_down
from intertie.errors import IntertieError, Unavailable
from intertie.observe import log, metrics
from intertie.trust.nats_jwt import may_publish

__all__ = ["Credentials", "NatsBus"]

LOG = log.get("bus.nats")
SESSIONS = metrics.Counter("intertie_bus_sessions_total", "Connections to the bus, by why the one before ended", ("reason",))
STREAMS_REMADE = metrics.Counter("intertie_bus_streams_remade_total", "Streams deleted because they stored nothing any more", ("stream",))

# First pause short: a restarted server is back within a tenth of a second. A refused login waits longer, so that a thousand
# sites with one wrong clock do not occupy the server.
_FIRST_PAUSE_S = 0.05
# Back within half a second of the server's return: a refused connect costs next to nothing.
_LONGEST_PAUSE_S = 0.35
_LONGEST_LOGIN_PAUSE_S = 5.0
# A session shorter than this did not end the trouble that made it.
_PROVEN_S = 5.0
_BARRIER_S = 2.0
# A stream that acknowledged nothing for so many tries in a row, while the server lives, has lost its disk (see `_doubt`).
_DOUBTS = 3


class _Listening:
    """One subscription across sessions."""

    def __init__(self, bus: NatsBus, subject: str, take: Callable[[Message], None], queue: str) -> None:
        self._bus = bus
        self._subject = subject
        self._take = take
        self._queue = queue
        self._closed = False
        self._on: NatsSubscription | None = None

    async def attach(self, session: Session) -> None:
        take = self._take

        async def arrived(msg: Msg) -> None:
            take(message_of(msg))

        self._on = await session.client.subscribe(self._subject, queue=self._queue, cb=arrived)
        if self._closed:
            await self._off()

    async def close(self) -> None:
        self._closed = True
        self._bus.forget(self)
        await self._off()

    async def _off(self) -> None:
        on, self._on = self._on, None
        if on is not None:
            with suppress(nats.errors.Error, OSError, RuntimeError):
                await on.unsubscribe()


class NatsBus:
    """Make it with `connect`."""

    def __init__(
        self, servers: Sequence[str], name: str, credentials: Credentials, tls: ssl.SSLContext | None, way: Way = STRAIGHT
    ) -> None:
        assert servers, "a bus without an address"
        self._servers = servers
        self._name = name
        self._credentials = credentials
        self._tls = tls
        self._way = way
        self._session: Session | None = None
        self._came = asyncio.Event()
        self._why = "not tried yet"
        self._listenings: list[_Listening] = []
        self._open: list[Subscription] = []
        self._watchers: list[Callable[[bool], None]] = []
        self._said = False
        self._closed = False
        self._supervisor: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._streams: dict[str, StreamSpec] = {}
        self._doubts: dict[str, tuple[int, datetime, int]] = {}

    @classmethod
    async def connect(
        cls,
        servers: str | Sequence[str],
        *,
        name: str,
        credentials: Credentials = None,
        tls: ssl.SSLContext | None = None,
        way: Way = STRAIGHT,
        wait: bool = True,
        timeout_s: float = 5.0,
    ) -> NatsBus:
        """A bus that stays connected by itself. With `wait` (a hub service) `Unavailable` if nothing answers within `timeout_s`; without (an
        agent, which boots islanded) it returns at once and connects when it can: subscriptions made meanwhile begin then.

        servers: `nats://`, `tls://`, `ws://` or `wss://`, each tried in turn. way: the proxy that leads there, if one does.
        """
        bus = cls([servers] if isinstance(servers, str) else list(servers), name, credentials, tls, way)
        bus._supervisor = asyncio.get_running_loop().create_task(bus._supervise(), name="bus")
        if wait:
            try:
                async with asyncio.timeout(timeout_s):
                    await bus._came.wait()
            except TimeoutError:
                await bus.close()
                raise Unavailable(
                    "bus.unavailable",
                    f"no bus at {', '.join(bus._servers)} within {timeout_s:g} s: {bus._why}",
                    next_step="see that nats-server runs there and that the credentials are its own",
                ) from None
            except BaseException:
                await bus.close()
                raise
        return bus

    # sessions

    async def _supervise(self) -> None:
        """For ever: open a session, take over all that listens, watch it, and again."""
        loop = asyncio.get_running_loop()
        attempt, pause = 0, _FIRST_PAUSE_S
        while not self._closed:
            try:
                session = await self._begin(attempt)
            except NotConnected as error:
                longest = _LONGEST_LOGIN_PAUSE_S if error.authorization else _LONGEST_PAUSE_S
                if error.reason != self._why:
                    LOG.warning("the bus is not reached", server=order(self._servers, attempt), reason=error.reason)
                self._why = error.reason
            except Exception as error:
                # What credentials' callbacks raise, or a bug: to be seen, and no reason to stop trying.
                longest, self._why = _LONGEST_LOGIN_PAUSE_S, f"{type(error).__name__}: {error}"
                LOG.exception("the bus is not reached")
            else:
                began = loop.time()
                await self._watch(session)
                self._leave()
                if loop.time() - began > _PROVEN_S:
                    pause = _FIRST_PAUSE_S
                longest = _LONGEST_PAUSE_S
            attempt += 1
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))
            pause = min(pause * 2, longest)

    async def _begin(self, attempt: int) -> Session:
        """A session with every subscription on it; only then does the bus count as connected."""
        session = await Session.open(order(self._servers, attempt), self._name, self._credentials, self._tls, self._way)
        try:
            attached: set[_Listening] = set()
            # Again for those that came meanwhile; nothing is awaited between the last look and the session's taking office.
            while missing := [listening for listening in self._listenings if listening not in attached]:
                for listening in missing:
                    await listening.attach(session)
                attached.update(missing)
                if not await session.barrier(_BARRIER_S) or self._closed:
                    raise NotConnected(session.url, session.reason)
        except (nats.errors.Error, OSError, RuntimeError) as error:
            await session.end()
            raise NotConnected(session.url, str(error)) from error
        except BaseException:
            await session.end()
            raise
        self._session, self._why = session, ""
        self._came.set()
        LOG.info("connected to the bus", server=session.url, name=self._name)
        self._tell()
        return session

    def _leave(self) -> None:
        """The session is gone."""
        session, self._session = self._session, None
        self._came.clear()
        if session is not None:
            self._why = session.reason
            SESSIONS.inc(reason="login" if "authenti" in self._why.lower() else "lost")
            LOG.warning("the bus is lost", server=session.url, reason=self._why)
            self._in_background(session.end())
        self._tell()

    async def _watch(self, session: Session) -> None:
        """Return when the bus's session is of no more use; replace it before its credentials end."""
        loop = asyncio.get_running_loop()
        while not self._closed:
            wait_s = 1.0 if session.renew_at is None else min(1.0, max(0.02, session.renew_at - loop.time()))
            try:
                async with asyncio.timeout(wait_s):
                    await session.lost.wait()
            except TimeoutError:
                pass
            if not session.usable:
                return
            if session.renew_at is not None and loop.time() >= session.renew_at:
                session = await self._renewed(session)

    async def _renewed(self, old: Session) -> Session:
        """Make before break: nothing is lost, and a message may come twice."""
        try:
            left = expiry_s(self._credentials)
        except IntertieError as error:
            LOG.warning("credentials cannot be renewed", code=error.code, reason=error.text)
            left = None
        now = asyncio.get_running_loop().time()
        if left is None or left < 1.0:
            # A file that nobody has renewed yet: look again, and let the server decide.
            old.renew_at = now + 1.0
            return old
        try:
            new = await self._begin(0)
        except NotConnected as error:
            LOG.warning("credentials are not renewed yet", reason=error.reason)
            old.renew_at = now + 1.0
            return old
        SESSIONS.inc(reason="renewed")
        if new.renew_at is not None and new.renew_at < now + 1.0:
            new.renew_at = now + 1.0
        self._in_background(old.retire())
        return new

    def _in_background(self, work: Awaitable[None]) -> None:
        async def do() -> None:
            await work

        task = asyncio.get_running_loop().create_task(do())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _tell(self) -> None:
        now = self.connected
        if now == self._said:
            return
        self._said = now
        for watcher in list(self._watchers):
            try:
                watcher(now)
            except Exception:
                LOG.exception("a listener to the bus's state failed")

    @property
    def connected(self) -> bool:
        return self._session is not None and self._session.usable

    def on_state(self, listener: Callable[[bool], None]) -> None:
        self._watchers.append(listener)
        listener(self.connected)

    async def alive(self, timeout_s: float = 1.0) -> bool:
        session = self._session
        return session is not None and await session.barrier(timeout_s)

    def _now(self) -> Session:
        session = self._session
        if session is None or not session.usable:
            raise Unavailable("bus.unavailable", f"no connection to the bus ({self._why or 'just lost'})")
        return session

    async def _next(self) -> Session:
        """The session, waited for."""
        while True:
            await self._came.wait()
            if self._session is not None and self._session.usable:
                return self._session
            await asyncio.sleep(0.05)

    # core

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        session = self._session or self._now()
        await session.publish(check(subject), body, headers or NO_HEADERS)

    async def publish_many(self, messages: Sequence[tuple[str, bytes]]) -> None:
        session = self._session or self._now()
        await session.publish_many([(plain(subject), body) for subject, body in messages])

    async def request(self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Message:
        session = self._session or self._now()
        return await session.request(check(subject), body, timeout_s=timeout_s, headers=headers or NO_HEADERS)

    async def listen(self, subject: str, take: Callable[[Message], None], queue: str = "") -> Subscription:
        """In force after the next barrier, which `subscribe` and `serve` wait for."""
        listening = _Listening(self, check(subject, pattern=True), take, queue)
        self._listenings.append(listening)
        session = self._session
        if session is not None:
            with suppress(nats.errors.Error, OSError, RuntimeError):
                await listening.attach(session)
        return listening

    def forget(self, listening: _Listening) -> None:
        if listening in self._listenings:
            self._listenings.remove(listening)

    async def _kept(self, subscription: Subscription) -> Subscription:
        """Ours to close at the end, and known to the server from here on (if there is one)."""
        self._open.append(subscription)
        if self._session is not None:
            await self._session.barrier(_BARRIER_S)
        return subscription

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "", workers: int = 1, backlog: int = 1_000) -> Subscription:
        return await self._kept(await serving.subscribe(self, subject, handler, queue=queue, workers=workers, backlog=backlog))

    async def serve(self, service: str, version: str, handlers: Mapping[str, Handler], *, workers: int = 32) -> Subscription:
        made = serving.Service(self, service, version, handlers, workers)
        await made.start()
        return await self._kept(made)

    # streams

    async def ensure_stream(self, spec: StreamSpec) -> StreamState:
        self._streams[spec.name] = spec
        if self._makes(spec.name):
            return await jetstream.ensure_stream(self._now(), spec)
        state = await jetstream.stream_state(self._now(), spec.name)
        if state is None or state.epoch < spec.epoch:
            what = "is not there" if state is None else f"is of epoch {state.epoch}, before {spec.epoch}"
            raise Unavailable("bus.no_stream", f"stream {spec.name} {what} (yet); identity makes it", retry_after_s=1.0)
        return state

    def _makes(self, stream: str) -> bool:
        """True if these credentials may make this stream: by what they say of themselves, which the server judges anyway."""
        login = login_of(self._credentials)
        return login is None or may_publish(login.jwt(), f"$JS.API.STREAM.CREATE.{stream}")

    async def stream_state(self, name: str) -> StreamState | None:
        return await jetstream.stream_state(self._now(), name)

    async def append(
        self, subject: str, body: bytes, *, message_id: str, headers: Mapping[str, str] | None = None, timeout_s: float = 2.0
    ) -> Appended:
        session = self._now()
        sent = {**lowered(headers or NO_HEADERS), "nats-msg-id": message_id}
        try:
            answer = await session.request(check(subject), body, timeout_s=timeout_s, headers=sent)
        except Unavailable as error:
            if error.code == "bus.timeout" and session.usable and (mute := await self._doubt(session, subject)):
                raise Unavailable("bus.stream_mute", f"stream {mute} stores nothing any more", retry_after_s=1.0) from error
            raise
        made = jetstream.appended(answer)
        self._doubts.pop(made.stream, None)
        return made

    async def _doubt(self, session: Session, subject: str) -> str:
        """A stream whose folder was wiped while the server runs goes on acknowledging until its block file is full, and then answers nothing
        for ever. If it stays silent while the server lives, and has not grown, it is deleted: whoever fills it sees that it is
        absent and fills it anew. It never was the only copy of anything. Whoever may not delete it is told its name.
        """
        name = next((spec.name for spec in self._streams.values() if any(matches(one, subject) for one in spec.subjects)), "")
        if not name:
            return ""
        with suppress(Unavailable):
            state = await jetstream.stream_state(session, name)
            if state is None:
                return ""
            count, created, last_seq = self._doubts.get(name, (0, state.created, state.last_seq))
            if (created, last_seq) != (state.created, state.last_seq):
                self._doubts[name] = (1, state.created, state.last_seq)
                return ""
            self._doubts[name] = (count + 1, created, last_seq)
            if count + 1 >= _DOUBTS:
                del self._doubts[name]
                if not self._makes(name):
                    return name
                STREAMS_REMADE.inc(stream=name)
                LOG.error("a stream stores nothing any more and is deleted, to be filled anew", stream=name, last_seq=last_seq)
                try:
                    await jetstream.delete_stream(session, name)
                except Unavailable as error:
                    LOG.error("it could not be deleted", stream=name, reason=error.text, next_step="restart nats-server")
        return ""

    async def last_messages(self, stream: str, subject_filter: str, *, limit: int = 10_000) -> list[Message]:
        session = self._now()
        deliver = session.new_inbox()
        name = f"last-{secrets.token_hex(6)}"
        got: list[Message] = []
        complete = asyncio.Event()
        wanted = limit

        async def arrived(msg: Msg) -> None:
            message = message_of(msg)
            if len(got) < limit:
                got.append(Message(message.subject, message.body, message.headers))
            if len(got) >= wanted:
                complete.set()

        try:
            subscription = await session.client.subscribe(deliver, cb=arrived)
        except (nats.errors.Error, OSError, RuntimeError) as error:
            raise Unavailable("bus.unavailable", "the link went") from error
        try:
            pending = await jetstream.ephemeral(session, stream, name, check(subject_filter, pattern=True), deliver)
            wanted = min(limit, pending)
            if len(got) < wanted:
                async with asyncio.timeout(jetstream.API_LIMIT_S):
                    await complete.wait()
            if pending > limit:
                await jetstream.delete_consumer(session, stream, name)
        except TimeoutError:
            raise Unavailable("bus.timeout", f"stream {stream} told {len(got)} of {wanted} last messages") from None
        finally:
            with suppress(nats.errors.Error, OSError, RuntimeError):
                await subscription.unsubscribe()
        return got

    async def consume(self, spec: ConsumerSpec, handler: Handler, dead: Dead) -> Subscription:
        consumer = NatsConsumer(spec, handler, dead, session=self._next, current=lambda: self._session)
        consumer.start()
        self._open.append(consumer)
        return consumer

    async def close(self) -> None:
        """Stop listening, let what runs finish for a moment, send what waits."""
        if self._closed:
            return
        self._closed = True
        for subscription in [*self._open, *self._listenings]:
            await subscription.close()
        self._open.clear()
        if self._supervisor:
            await put_down([self._supervisor])
        session, self._session = self._session, None
        self._tell()
        if session is not None:
            await session.barrier(_BARRIER_S)
            await session.end()
        await put_down(list(self._retiring), grace_s=_BARRIER_S)
