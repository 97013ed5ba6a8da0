"""Events on their way in: one durable consumer per service, each event to the handler of its type, what cannot be handled kept as a dead
letter, and a snapshot whenever heads say that something is missing.

A handler is a verb of the service's store: in its one transaction it marks the event (`tx.first_time(meta)`) and applies it only if its
version is above the one held. So repeats, replays and disorder change nothing:

```sql
INSERT INTO pool (pool, version, …) VALUES (…) ON CONFLICT (pool) DO UPDATE SET … WHERE excluded.version > pool.version
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

from intertie.bus.port import Bus, ConsumerSpec, Message, StreamSpec, Subscription
from intertie.clock import Clock, SystemClock
from intertie.contracts.base import PREFIX, Event, EventMeta, Head, Heads, decode
from intertie.contracts.incident import ReportIncident
from intertie.errors import IntertieError, Refused, Unavailable
from intertie.observe import log, metrics, tracing
from intertie.store.heads import HeadsWatch
from intertie.store.outbox import EVENTS, DeadLetter, dead_letter_report, read_meta
from intertie.store.relay import heads_subject

LOG = log.get("store.consumer")
SNAPSHOTS = metrics.Counter("intertie_consumer_snapshots_total", "Snapshots taken, by reason", ("service", "reason"))
DEAD = metrics.Counter("intertie_consumer_dead_letters_total", "Events given up", ("service",))

# A consumer that stays behind (a long backlog) asks for a snapshot at these beats after the one before, not at each.
PATIENCE_BEATS = (2, 4, 8, 16, 32)

Snapshot = Callable[[], Awaitable[Iterable[Head] | None]]
"""Asks keepers for all they have and applies it by version. May return the heads that it contains; None: those said before it was asked."""


class DeadLetters(Protocol):
    """A Database or a MemoryStore."""

    @property
    def stream_epoch(self) -> int: ...

    async def keep_dead_letter(self, letter: DeadLetter, report: ReportIncident | None) -> None: ...


def newer(held: int | None, event: Event) -> bool:
    """The version rule for read models in memory: apply only what is above the version held."""
    return held is None or event.version > held


@dataclass(slots=True)
class _Source:
    """A service whose events are consumed. `snapshot` is asked at the start and when behind."""

    snapshot: Snapshot | None
    nouns: frozenset[str]
    due: str = ""
    """Why a snapshot is due; empty if none is."""
    wait_beats: int = 0
    asked: int = 0
    """Snapshots since it was last seen to have everything."""


class EventConsumer:
    """`run()` never returns. `ready` is set when the snapshots of the start were taken.

    handlers: event type → `fn(event, meta)`. snapshot: one for all sources, or source service → its own; None where there is nothing to ask.
    Types without a handler are passed over. What a handler raises is tried again by the bus with growing pauses, then kept as a dead letter
    in the service's own schema with a `FaultReported`; what does not even decode is kept at once.
    """

    def __init__(
        self,
        bus: Bus,
        store: DeadLetters,
        service: str,
        handlers: Mapping[type[Any], Callable[[Any, EventMeta], Awaitable[None]]],
        *,
        snapshot: Snapshot | Mapping[str, Snapshot] | None = None,
        stream: StreamSpec = EVENTS,
        durable: str = "",
        workers: int = 4,
        max_deliver: int = 8,
        backoff_s: Sequence[float] = (0.2, 1.0, 5.0, 15.0, 30.0),
        beat_s: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        if not handlers:
            raise ValueError("a consumer without a handler")
        self._bus, self._store, self._service = bus, store, service
        self._handlers = {kind.TYPE: (kind, handler) for kind, handler in handlers.items()}
        self._stream, self._beat_s, self._clock = stream, beat_s, clock or SystemClock()
        self._sources = {
            name: _Source(_snapshot_of(snapshot, name), frozenset(kind.noun() for kind in handlers if _source(kind) == name), due="start")
            for name in sorted({_source(kind) for kind in handlers})
        }
        self._spec = ConsumerSpec(
            stream.name, durable or service, _filters(handlers), workers=workers, max_deliver=max_deliver, backoff_s=backoff_s
        )
        self._watch = HeadsWatch()
        self._bell = asyncio.Event()
        self.ready = asyncio.Event()
        self.handled = 0
        self.snapshots = 0

    async def run(self) -> NoReturn:
        """Consume for ever."""
        subscriptions: list[Subscription] = []
        try:
            for source in ["*"] if "*" in self._sources else list(self._sources):
                subscriptions.append(await self._bus.subscribe(heads_subject(source), self._heard))
            subscriptions.append(await self._consume())
            while True:
                await self._take_snapshots()
                await self._wait()
        finally:
            for subscription in reversed(subscriptions):
                await subscription.close()

    async def _consume(self) -> Subscription:
        while True:
            try:
                # A stream of an earlier epoch may tell of what its keepers have forgotten.
                await self._bus.ensure_stream(replace(self._stream, epoch=self._store.stream_epoch))
                return await self._bus.consume(self._spec, self._handle, self._give_up)
            except Unavailable as err:
                LOG.warning("the consumer waits for the bus", service=self._service, code=err.code)
                await asyncio.sleep(self._beat_s)

    # --- one event ---------------------------------------------------------------------------------------------------------------------

    async def _handle(self, message: Message) -> None:
        try:
            meta = read_meta(message.headers)
            kind, handler = self._handlers.get(meta.type, (None, None))
            event = decode(message.body, kind, what=meta.type) if kind is not None else None
        except Refused as err:
            # It will never decode: trying again only delays what stands behind it.
            await self._give_up(message, err, 1)
            return
        if event is not None and handler is not None:
            with tracing.span(f"{self._service} apply", {"event.type": meta.type}, parent=meta.traceparent):
                await handler(event, meta)
            self.handled += 1
        self._arrived(message, meta.epoch, meta.number)

    def _arrived(self, message: Message, epoch: int, number: int) -> None:
        service, noun = _place(message.subject)
        self._watch.arrived(service, noun, epoch, number)

    async def _give_up(self, message: Message, error: BaseException, tries: int) -> None:
        """Keep it, say so, and let the rest go on. If this raises the message stays in the stream."""
        headers = message.headers
        letter = DeadLetter(
            consumer=self._spec.durable,
            event_id=headers.get("ce-id", ""),
            type=headers.get("ce-type", ""),
            subject=message.subject,
            headers=dict(headers),
            body=message.body,
            error=f"{type(error).__name__}: {error}"[:2_000],
            tries=tries,
            at=self._clock.now(),
        )
        await self._store.keep_dead_letter(letter, dead_letter_report(self._service, letter))
        DEAD.inc(service=self._service)
        LOG.error(
            "an event was given up", service=self._service, type=letter.type, event_id=letter.event_id, tries=tries, error=letter.error
        )
        self._arrived(message, _number(headers, "intertie-epoch"), _number(headers, "intertie-number"))

    # --- heads and snapshots -----------------------------------------------------------------------------------------------------------

    async def _heard(self, message: Message) -> None:
        heads = decode(message.body, Heads, what="heads")
        everyone = self._sources.get("*")
        source = self._sources.get(heads.service) or everyone
        if source is None:
            return
        if not self._watch.beat(heads, source.nouns | (everyone.nouns if everyone is not None else frozenset())):
            source.asked = source.wait_beats = 0
            return
        source.wait_beats -= 1
        if source.snapshot is not None and not source.due and source.wait_beats <= 0:
            source.due = "behind"
            self._bell.set()

    async def _take_snapshots(self) -> None:
        """Those that are due; one that fails stays due, whatever its keeper answered: a fault there must not end this service too."""
        done: dict[Snapshot, Iterable[Head] | None] = {}
        for name, source in self._sources.items():
            if not source.due:
                continue
            said = self._watch.said(name)
            if source.snapshot is not None:
                try:
                    if source.snapshot not in done:
                        done[source.snapshot] = await source.snapshot()
                        self.snapshots += 1
                        SNAPSHOTS.inc(service=self._service, reason=source.due)
                except IntertieError as err:
                    LOG.warning("a snapshot was put off", service=self._service, source=name, code=err.code, text=err.text)
                    continue
                stated = done[source.snapshot]
                self._watch.contains(said if stated is None else stated)
            source.wait_beats = PATIENCE_BEATS[min(source.asked, len(PATIENCE_BEATS) - 1)]
            source.asked += 1
            source.due = ""
        if not any(source.due for source in self._sources.values()):
            self.ready.set()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._beat_s):
                await self._bell.wait()
        except TimeoutError:
            pass
        self._bell.clear()


def _source(kind: type[Event]) -> str:
    """The service that says it; `*` for events that any service may say."""
    return kind.SERVICE if kind.SERVICE not in ("", "_") else "*"


def _snapshot_of(snapshot: Snapshot | Mapping[str, Snapshot] | None, source: str) -> Snapshot | None:
    return snapshot.get(source) if isinstance(snapshot, Mapping) else snapshot


def _filters(kinds: Iterable[type[Event]]) -> tuple[str, ...]:
    """One filter per (service, noun), since numbers are gapless per noun; a server refuses filters that overlap."""
    wanted = {(_source(kind), kind.noun()) for kind in kinds}
    anyone = {noun for source, noun in wanted if source == "*"}
    return tuple(f"{PREFIX}.evt.{source}.{noun}.>" for source, noun in sorted(wanted) if source == "*" or noun not in anyone)


def _place(subject: str) -> tuple[str, str]:
    """(service, noun) of `intertie.v1.evt.<service>.<noun>.…`."""
    tokens = subject.split(".")
    return (tokens[3], tokens[4]) if len(tokens) > 4 else ("", "")


def _number(headers: Mapping[str, str], name: str) -> int:
    text = headers.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 20 else 0
