"""Subscriptions and services on top of one primitive, `listen`, that each bus brings: handlers run by a bounded pool, answers sent,
wrong replies refused, and the NATS micro-service words (`$SRV.PING|INFO|STATS`) answered so that `nats micro ls` shows us.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

import msgspec

from intertie.bus.port import Handler, Message, Reply, Subscription
from intertie.bus.subjects import INBOX, SERVICE_IMPORT, check
from intertie.bus.workers import Workers
from intertie.clock import SystemClock
from intertie.errors import IntertieError, Refused
from intertie.ids import mint
from intertie.observe import log, metrics

LOG = log.get("bus")
DROPPED = metrics.Counter("intertie_bus_dropped_total", "Messages that found a full backlog", ("reason",))
FAILED = metrics.Counter("intertie_bus_handler_errors_total", "Handlers that raised", ("kind",))
REFUSED_REPLIES = metrics.Counter("intertie_bus_refused_replies_total", "Requests whose reply subject is none we answer to")

# Requests waiting for a worker of a service; the next one is told at once that it is too much, instead of waiting out its time.
SERVICE_BACKLOG = 1_000
QUEUE_GROUP = "q"

ERROR = "nats-service-error"
ERROR_CODE = "nats-service-error-code"
"""The micro-service protocol's own error headers; stock tools count them."""

_SERVICE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_VERSION = re.compile(r"\d+\.\d+\.\d+")


class Says(Protocol):
    """What an answer needs of a bus."""

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str] | None = None) -> None: ...


class Listens(Says, Protocol):
    """What a bus brings."""

    async def listen(self, subject: str, take: Callable[[Message], None], queue: str = "") -> Subscription:
        """Call `take` (quick, never raising) for each message that arrives."""
        ...


async def answer(bus: Says, to: str, made: bytes | Reply | None) -> None:
    """Send an answer; one that is too large becomes an error that says so. A lost link loses it: the asker repeats."""
    if made is None or not to:
        return
    reply = made if isinstance(made, Reply) else Reply(made)
    try:
        await bus.publish(to, reply.body, reply.headers)
    except Refused as error:
        LOG.error("an answer was refused", code=error.code, text=error.text)
        if error.code == "bus.too_large":
            await bus.publish(to, b"", {ERROR: error.code, ERROR_CODE: "413"})
    except IntertieError as error:
        LOG.info("an answer was not sent", code=error.code)


def may_answer(message: Message, allowed: tuple[str, ...]) -> bool:
    """A client may name any subject as the reply of an allowed request: only inboxes are answered (DESIGN 10)."""
    if not message.reply or message.reply.startswith(allowed):
        return True
    REFUSED_REPLIES.inc()
    LOG.warning("a request names a reply that is no inbox: refused", subject=message.subject, reply=message.reply[:80])
    return False


def said(error: BaseException, message: Message) -> None:
    """Log and count what a handler raised."""
    kind = type(error).__name__ if isinstance(error, IntertieError) else "internal"
    FAILED.inc(kind=kind)
    if isinstance(error, IntertieError):
        LOG.warning("a handler refused a message", subject=message.subject, code=error.code, text=error.text)
    else:
        LOG.error("a handler failed", subject=message.subject, exc_info=error)


@dataclass
class Listening:
    """A subscription with its workers."""

    workers: Workers[Message]
    source: Subscription | None = None

    async def close(self) -> None:
        if self.source:
            await self.source.close()
        await self.workers.close()


async def subscribe(bus: Listens, subject: str, handler: Handler, *, queue: str, workers: int, backlog: int) -> Listening:
    """The port's `subscribe` for any bus. Lanes answer service imports (`_R_.`) and inboxes."""
    check(subject, pattern=True)

    async def handle(message: Message) -> None:
        if message.reply and not may_answer(message, (SERVICE_IMPORT, INBOX)):
            return
        try:
            made = await handler(message)
            if made is not None:
                await answer(bus, message.reply, made)
        except Exception as error:
            said(error, message)

    pool = Workers(handle, workers=workers, backlog=backlog, dropped=lambda _: DROPPED.inc(reason="backlog"))
    listening = Listening(pool)
    listening.source = await bus.listen(subject, pool.put, queue)
    return listening


@dataclass
class EndpointStats:
    """Counts of one endpoint, in the words of the micro protocol. Times in nanoseconds."""

    name: str
    subject: str
    queue_group: str = QUEUE_GROUP
    num_requests: int = 0
    num_errors: int = 0
    last_error: str = ""
    processing_time: int = 0
    average_processing_time: int = 0

    def count(self, started_ns: int, error: str) -> None:
        self.num_requests += 1
        self.processing_time += time.perf_counter_ns() - started_ns
        self.average_processing_time = self.processing_time // self.num_requests
        if error:
            self.num_errors += 1
            self.last_error = error


@dataclass
class Service:
    """One running copy of a service: it shares its endpoints with its siblings by a queue group."""

    bus: Listens
    name: str
    version: str
    handlers: Mapping[str, Handler]
    workers: int
    id: str = field(default_factory=lambda: mint("srv"))
    started: datetime = field(default_factory=lambda: SystemClock().now())

    def __post_init__(self) -> None:
        if not _SERVICE_NAME.match(self.name) or not _VERSION.match(self.version):
            raise Refused("bus.service", f"service {self.name!r} {self.version!r}: a plain name and a version like 1.2.3 are needed")
        self.stats = {subject: EndpointStats(subject.rpartition(".")[2], check(subject)) for subject in self.handlers}
        self._pool: Workers[Message] = Workers(self._handle, workers=self.workers, backlog=SERVICE_BACKLOG, dropped=lambda _: None)
        self._words: Workers[tuple[str, bytes | Reply]] = Workers(
            self._say, workers=1, backlog=SERVICE_BACKLOG, dropped=lambda _: DROPPED.inc(reason="refusals")
        )
        self._sources: list[Subscription] = []

    async def start(self) -> None:
        for verb, make in (("PING", self.ping), ("INFO", self.info), ("STATS", self.statistics)):
            for subject in (f"$SRV.{verb}", f"$SRV.{verb}.{self.name}", f"$SRV.{verb}.{self.name}.{self.id}"):
                self._sources.append(await self.bus.listen(subject, self._control(make)))
        for subject in self.handlers:
            self._sources.append(await self.bus.listen(subject, self._take, QUEUE_GROUP))

    def _control(self, make: Callable[[], bytes]) -> Callable[[Message], None]:
        def take(message: Message) -> None:
            if message.reply and may_answer(message, (INBOX,)):
                self._words.put((message.reply, make()))

        return take

    def _take(self, message: Message) -> None:
        if not may_answer(message, (INBOX,)):
            return
        if self._pool.full:
            DROPPED.inc(reason="busy")
            self._words.put((message.reply, Reply(b"", {ERROR: "bus.busy", ERROR_CODE: "503"})))
            return
        self._pool.put(message)

    async def _say(self, item: tuple[str, bytes | Reply]) -> None:
        try:
            await answer(self.bus, *item)
        except IntertieError as error:
            LOG.info("a service word was not sent", code=error.code)

    async def _handle(self, message: Message) -> None:
        started = time.perf_counter_ns()
        stats = self.stats[message.subject]
        try:
            made = await self.handlers[message.subject](message)
            failed = made.headers.get(ERROR, "") if isinstance(made, Reply) else ""
            stats.count(started, failed)
        except Exception as error:
            said(error, message)
            stats.count(started, type(error).__name__)
            made = Reply(b"", {ERROR: "internal", ERROR_CODE: "500"})
        await self._say((message.reply, made if made is not None else b""))

    def _words_of(self, kind: str, **more: object) -> bytes:
        identity = {"name": self.name, "id": self.id, "version": self.version, "metadata": {}}
        return msgspec.json.encode({"type": f"io.nats.micro.v1.{kind}_response", **identity, **more})

    def ping(self) -> bytes:
        return self._words_of("ping")

    def info(self) -> bytes:
        endpoints = [{"name": s.name, "subject": s.subject, "queue_group": s.queue_group, "metadata": {}} for s in self.stats.values()]
        return self._words_of("info", description="", endpoints=endpoints)

    def statistics(self) -> bytes:
        return self._words_of("stats", started=self.started, endpoints=list(self.stats.values()))

    async def close(self) -> None:
        for source in self._sources:
            await source.close()
        # What was taken from the queue group is ours to answer; a caller waits no longer than this anyway.
        await self._pool.close(grace_s=2.0)
        await self._words.close(grace_s=0.5)
