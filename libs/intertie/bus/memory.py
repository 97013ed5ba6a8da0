"""A bus in memory: the same port without a server, for twins, tests and the simulator. Deterministic: no threads, no chance, order of
arrival is order of publishing, and every wait is the event loop's own (virtual under looptime).

One `MemoryBroker` is the server; each `client()` is a process. A client with an `AccountMap` sees the bus as a site's account does:
what it calls `up.scheduler.sync` is `intertie.v1.up.<site>.scheduler.sync` at the hub, and it can name nothing else there. Faults are
set per client: `cut()` (noticed), `faults.drop` (not noticed), `faults.delay_s`. `broker.wipe()` loses every stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from intertie.bus import serving
from intertie.bus.memory_streams import MemoryStreams
from intertie.bus.port import Appended, ConsumerSpec, Dead, Handler, Message, StreamSpec, StreamState, Subscription
from intertie.bus.subjects import INBOX, SERVICE_IMPORT, capture, check, fill, lowered, matches, refuse_large
from intertie.clock import Clock, SystemClock
from intertie.errors import Unavailable
from intertie.observe import log

LOG = log.get("bus.memory")

# As nats-server's default max_payload, less the same margin as `nats`.
MAX_MESSAGE = 1024 * 1024 - 1024

OUT, IN = "out", "in"


@dataclass(frozen=True, slots=True)
class AccountMap:
    """How an account's own subjects are named at the hub. Keys local, values hub; wildcards are carried over in order."""

    name: str
    out: Mapping[str, str] = field(default_factory=dict)
    into: Mapping[str, str] = field(default_factory=dict)


def site_account(site: str) -> AccountMap:
    """The imports that a site's account has (DESIGN 10)."""
    return AccountMap(
        name=site,
        out={
            "up.*.sync": f"intertie.v1.up.{site}.*.sync",
            "up.answer": f"intertie.v1.up.{site}.answer",
            "up.call.*": f"intertie.v1.up.{site}.call.*",
            "tel.gpu.*": f"intertie.v1.tel.gpu.{site}.*",
        },
        into={"down.*": f"intertie.v1.down.{site}.*"},
    )


HUB = AccountMap(name="")


@dataclass
class Faults:
    """What goes wrong on one client's link, unnoticed. `drop(direction, subject)`: True loses that message, acknowledgements included."""

    delay_s: float = 0.0
    drop: Callable[[str, str], bool] | None = None

    def loses(self, direction: str, subject: str) -> bool:
        return self.drop is not None and self.drop(direction, subject)


@dataclass(eq=False)
class _Listener:
    bus: MemoryBus
    pattern: str
    take: Callable[[Message], None]
    queue: str

    async def close(self) -> None:
        self.bus.broker.forget(self)


class MemoryBroker:
    """The server: accounts, subscriptions, streams."""

    def __init__(self, clock: Clock | None = None, *, max_message: int = MAX_MESSAGE) -> None:
        self.clock = clock or SystemClock()
        self.max_message = max_message
        self.streams = MemoryStreams(self.clock)
        self._listeners: list[_Listener] = []
        self._accounts: dict[str, AccountMap] = {"": HUB}
        self._turns: dict[tuple[str, str, str], int] = {}
        self._routes: dict[str, tuple[str, str]] = {}
        self._count = 0

    def client(self, name: str = "client", account: AccountMap | None = None) -> MemoryBus:
        """A connection; with an account map, a site's or a subscriber's."""
        known = account or HUB
        self._accounts[known.name] = known
        return MemoryBus(self, name, known)

    def wipe(self) -> None:
        """Lose JetStream whole. Consumers find their streams again when somebody makes them anew."""
        self.streams.wipe()

    def number(self) -> int:
        self._count += 1
        return self._count

    def listen(self, listener: _Listener) -> None:
        self._listeners.append(listener)

    def forget(self, listener: _Listener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def publish(self, account: str, message: Message) -> int:
        """Deliver in the account and across its border; how many listened. The hub's messages also go into the streams they match."""
        if message.subject in self._routes and not account:
            account, subject = self._routes.pop(message.subject)
            return self._deliver(account, Message(subject, message.body, message.headers))
        found = self._deliver(account, message)
        if account:
            return found + self._cross_out(account, message)
        self.streams.store(message)
        return found + sum(self._cross_in(other, message) for other in self._accounts.values() if other.name)

    def _cross_out(self, account: str, message: Message) -> int:
        """A site's word at the hub, the site's name put in here; the reply gets a name that only the server can give."""
        for local, hub in self._accounts[account].out.items():
            caught = capture(local, message.subject)
            if caught is None:
                continue
            reply = ""
            if message.reply:
                reply = f"{SERVICE_IMPORT}{self.number():06d}"
                self._routes[reply] = (account, message.reply)
            crossed = Message(fill(hub, caught), message.body, message.headers, reply)
            self.streams.store(crossed)
            return self._deliver("", crossed)
        return 0

    def _cross_in(self, other: AccountMap, message: Message) -> int:
        for local, hub in other.into.items():
            caught = capture(hub, message.subject)
            if caught is not None:
                return self._deliver(other.name, Message(fill(local, caught), message.body, message.headers))
        return 0

    def _deliver(self, account: str, message: Message) -> int:
        found = [
            one
            for one in self._listeners
            if one.bus.account.name == account and one.bus.connected and matches(one.pattern, message.subject)
        ]
        groups: dict[tuple[str, str], list[_Listener]] = {}
        for one in found:
            if one.queue:
                groups.setdefault((one.pattern, one.queue), []).append(one)
            else:
                one.bus.arrive(one.take, message)
        for (pattern, queue), members in groups.items():
            turn = self._turns.get((account, pattern, queue), 0)
            self._turns[(account, pattern, queue)] = turn + 1
            chosen = members[turn % len(members)]
            chosen.bus.arrive(chosen.take, message)
        return len(found)


class MemoryBus:
    """One process's connection to a `MemoryBroker`."""

    def __init__(self, broker: MemoryBroker, name: str, account: AccountMap) -> None:
        self.broker = broker
        self.name = name
        self.account = account
        self.faults = Faults()
        self._connected = True
        self._closed = False
        self._watchers: list[Callable[[bool], None]] = []
        self._last_due = {OUT: 0.0, IN: 0.0}
        self._open: list[Subscription] = []

    # the link and its faults

    @property
    def connected(self) -> bool:
        return self._connected and not self._closed

    def cut(self) -> None:
        """The link is gone and this client knows it."""
        self._set(False)

    def heal(self) -> None:
        self._set(True)
        self.broker.streams.pump()

    def _set(self, connected: bool) -> None:
        if connected != self._connected:
            self._connected = connected
            for watcher in list(self._watchers):
                watcher(connected)

    def on_state(self, listener: Callable[[bool], None]) -> None:
        self._watchers.append(listener)
        listener(self.connected)

    async def alive(self, timeout_s: float = 1.0) -> bool:
        if self.faults.loses(OUT, "ping") or self.faults.loses(IN, "pong"):
            await asyncio.sleep(timeout_s)
            return False
        return self.connected and self.faults.delay_s * 2 < timeout_s

    def arrive(self, take: Callable[[Message], None], message: Message) -> None:
        """The broker has something for us."""
        if not self.faults.loses(IN, message.subject):
            self._later(IN, lambda: take(message) if self.connected else None)

    def _later(self, direction: str, do: Callable[[], object]) -> None:
        """Now, or after the link's delay; never overtaking what went before."""
        loop = asyncio.get_running_loop()
        due = max(loop.time() + self.faults.delay_s, self._last_due[direction])
        if due <= loop.time():
            do()
            return
        # Timers of the same instant may swap: a microsecond keeps them apart.
        self._last_due[direction] = due + 1e-6
        loop.call_at(due, do)

    def _require_link(self) -> None:
        if not self.connected:
            raise Unavailable("bus.unavailable", "the bus is not connected")

    # core

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._send(Message(check(subject), body, lowered(headers or {})))

    async def publish_many(self, messages: Sequence[tuple[str, bytes]]) -> None:
        for subject, body in messages:
            await self.publish(subject, body)

    def _send(self, message: Message, heard: Callable[[int], None] | None = None) -> None:
        refuse_large(message.subject, message.headers, message.body, self.broker.max_message)
        self._require_link()
        if self.faults.loses(OUT, message.subject):
            return

        def go() -> None:
            listeners = self.broker.publish(self.account.name, message)
            if heard:
                heard(listeners)

        self._later(OUT, go)

    async def request(self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Message:
        inbox = f"{INBOX}{self.name}.{self.broker.number():06d}"
        got: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def take(message: Message) -> None:
            if not got.done():
                got.set_result(message)

        def heard(listeners: int) -> None:
            if not listeners and not got.done():
                got.set_exception(Unavailable("bus.no_responder", f"nobody answers {subject}"))

        listener = _Listener(self, inbox, take, "")
        self.broker.listen(listener)
        try:
            self._send(Message(check(subject), body, lowered(headers or {}), inbox), heard)
            async with asyncio.timeout(timeout_s):
                reply = await got
        except TimeoutError:
            raise Unavailable("bus.timeout", f"no answer from {subject} within {timeout_s:g} s: it may have been done") from None
        finally:
            self.broker.forget(listener)
        return Message(subject, reply.body, reply.headers)

    async def listen(self, subject: str, take: Callable[[Message], None], queue: str = "") -> Subscription:
        listener = _Listener(self, check(subject, pattern=True), take, queue)
        self.broker.listen(listener)
        return listener

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "", workers: int = 1, backlog: int = 1_000) -> Subscription:
        return self._kept(await serving.subscribe(self, subject, handler, queue=queue, workers=workers, backlog=backlog))

    async def serve(self, service: str, version: str, handlers: Mapping[str, Handler], *, workers: int = 32) -> Subscription:
        made = serving.Service(self, service, version, handlers, workers)
        await made.start()
        return self._kept(made)

    def _kept(self, subscription: Subscription) -> Subscription:
        self._open.append(subscription)
        return subscription

    # streams

    async def ensure_stream(self, spec: StreamSpec) -> StreamState:
        self._require_link()
        return self.broker.streams.ensure(spec)

    async def stream_state(self, name: str) -> StreamState | None:
        self._require_link()
        return self.broker.streams.state(name)

    async def append(
        self, subject: str, body: bytes, *, message_id: str, headers: Mapping[str, str] | None = None, timeout_s: float = 2.0
    ) -> Appended:
        message = Message(check(subject), body, {**lowered(headers or {}), "nats-msg-id": message_id})
        refuse_large(subject, message.headers, body, self.broker.max_message)
        self._require_link()
        lost = self.faults.loses(OUT, subject)
        if self.faults.delay_s:
            await asyncio.sleep(self.faults.delay_s)
        stored = None
        if not lost:
            stored = self.broker.streams.store(message)
            # Plain subscribers hear it too, as they do of any message.
            self.broker._deliver(self.account.name, message)
            if stored is None:
                raise Unavailable("bus.no_responder", f"no stream takes {subject}")
        if stored is None or self.faults.loses(IN, "ack") or not self.connected:
            await asyncio.sleep(timeout_s)
            raise Unavailable("bus.timeout", f"no word from the stream about {subject}: it may be stored")
        return stored

    async def last_messages(self, stream: str, subject_filter: str, *, limit: int = 10_000) -> list[Message]:
        self._require_link()
        return self.broker.streams.last(stream, subject_filter, limit)

    async def consume(self, spec: ConsumerSpec, handler: Handler, dead: Dead) -> Subscription:
        return self._kept(self.broker.streams.join(spec, handler, dead, reach=self._reach))

    def _reach(self, deliver: Callable[[], None] | None) -> bool:
        """Is the link up (None); else carry one delivery over it: False if it was lost."""
        if deliver is None or not self.connected:
            return self.connected
        if self.faults.loses(IN, "delivery"):
            return False
        self._later(IN, deliver)
        return True

    async def close(self) -> None:
        subscriptions: Sequence[Subscription] = list(self._open)
        self._open.clear()
        for subscription in subscriptions:
            await subscription.close()
        if not self._closed:
            self._set(False)
        self._closed = True
