"""Events on their way out: the row that a change leaves behind, and the port through which the relay (beside this file) sends it.

CloudEvents 1.0 in binary mode: attributes in lower-case headers, the JSON of the contract as the body. `intertie-epoch` and
`intertie-number` are put on by the relay, who alone gives numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from urllib.parse import quote, unquote

from intertie.bus.port import StreamSpec
from intertie.contracts.base import EVENT_STREAM, PREFIX, Event, EventMeta, Head, decode, encode, refuse_not_finite
from intertie.contracts.incident import FaultReported, ReportIncident, Severity
from intertie.errors import Refused
from intertie.ids import EventId, new_event

# Events stay in the outbox, and in the stream, this long; a refill publishes them all again.
RETENTION_S = 30 * 86_400.0
# Longer than retention, with room for a consumer that was away for a few days: a replayed event must still find its mark.
INBOX_S = 35 * 86_400.0
# NATS' default max_payload is 1 MiB with headers; a larger event could never be published, so it is refused in the transaction of its change.
EVENT_BYTES = 900 * 1024

EVENTS = StreamSpec(EVENT_STREAM, (f"{PREFIX}.evt.>",), max_age_s=RETENTION_S)
"""The public record of all services; never the only copy of anything."""


@dataclass(frozen=True, slots=True)
class NewEvent:
    """What an event is in the outbox before it has a number."""

    event_id: EventId
    type: str
    noun: str
    entity: str
    version: int
    subject: str
    body: bytes
    headers: Mapping[str, str]
    created_at: datetime


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """A numbered event, ready to be published."""

    id: int
    event: NewEvent
    epoch: int
    number: int

    @property
    def headers(self) -> dict[str, str]:
        """All headers that go on the wire."""
        return {**self.event.headers, "intertie-epoch": str(self.epoch), "intertie-number": str(self.number)}


@dataclass(frozen=True, slots=True)
class StreamMark:
    """A stream as the relay last saw it. `generation` counts the times it was met anew; `head` is the highest sequence it acknowledged."""

    stream: str
    generation: int
    created: datetime
    head: int


@dataclass(frozen=True, slots=True)
class Leader:
    """One term of office; decision writes carry it and compare (epoch, number)."""

    role: str
    epoch: int
    number: int


class OutboxPort(Protocol):
    """What the relay needs of a store. Methods that write carry the leader and raise `Stale` if another took office."""

    def leading(self) -> AbstractAsyncContextManager[Leader]:
        """Wait until this process is the service's relay; the body is cancelled, and `Stale` raised, when it no longer is."""
        ...

    async def hint(self, timeout_s: float) -> bool:
        """Wait for a commit of this process, at most so long; True if there was one."""
        ...

    def ring(self) -> None:
        """End `hint`'s wait now."""
        ...

    async def take(self, leader: Leader, mark: StreamMark, limit: int) -> Sequence[OutboxRow]:
        """Number what is committed and has no number; then up to `limit` rows that the stream of this mark has not acknowledged, fresh
        ones before those of a former stream, each in order."""
        ...

    async def published(self, leader: Leader, mark: StreamMark, ids: Sequence[int], head: int) -> None:
        """The stream of this mark acknowledged these rows; `head` is the highest sequence it gave."""
        ...

    async def mark(self, stream: str) -> StreamMark | None: ...

    async def renew(self, leader: Leader, stream: str, created: datetime, head: int) -> StreamMark:
        """The stream is new, or made anew: a generation in which nothing has been published."""
        ...

    async def refused(self, leader: Leader, mark: StreamMark, row: OutboxRow, error: str) -> None:
        """The bus will never take this row: kept as a dead letter, told as a fault, counted as done for this stream."""
        ...

    async def heads(self) -> Sequence[Head]:
        """The last number given out for each noun, in its latest epoch."""
        ...

    async def prune(self, leader: Leader) -> int:
        """Drop what is older than its retention, in bounded steps; how much was dropped now."""
        ...


class HasOutbox(Protocol):
    @property
    def outbox(self) -> OutboxPort: ...

    @property
    def stream_epoch(self) -> int:
        """The lowest epoch of a stream that holds only what this service still knows; 0: any."""
        ...


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event given up after its last try."""

    consumer: str
    event_id: str
    type: str
    subject: str
    headers: Mapping[str, str]
    body: bytes
    error: str
    tries: int
    at: datetime


def share(fresh: Sequence[OutboxRow], lost: Sequence[OutboxRow], limit: int) -> list[OutboxRow]:
    """At most `limit` of both: half for each if both have more, so that new events do not wait for the end of a refill, nor it for theirs."""
    kept = fresh[: max(limit // 2, limit - len(lost))]
    return [*kept, *lost[: limit - len(kept)]]


def refusal(service: str, row: OutboxRow, error: str, now: datetime) -> tuple[DeadLetter, ReportIncident | None]:
    """What is kept and said of a row that the bus will never take. A fault about a fault would never end."""
    event = row.event
    letter = DeadLetter("relay", event.event_id, event.type, event.subject, row.headers, event.body, error, 1, now)
    return letter, dead_letter_report(service, letter)


def dead_letter_report(service: str, letter: DeadLetter) -> ReportIncident | None:
    """The fault that a dead letter is told as; folded by service, consumer and type. None for a fault: a fault about a fault would never end."""
    if letter.type == FaultReported.TYPE:
        return None
    return ReportIncident(
        key=f"dead_letter/{service}/{letter.consumer}/{letter.type}",
        kind="dead_letter",
        severity=Severity.WARNING,
        title=f"{service} gave up an event of type {letter.type}",
        text=f"{letter.consumer} gave up event {letter.event_id} after {letter.tries} tries: {letter.error}"[:2_000],
    )


def new_row(event: Event, service: str, now: datetime, traceparent: str) -> NewEvent:
    """The outbox row of an event. `Refused('store.event')` if it is too large to be published or holds a decimal that is no number."""
    refuse_not_finite(event, event.TYPE)
    body = encode(event)
    if len(body) > EVENT_BYTES:
        raise Refused("store.event_too_large", f"{event.TYPE} of {event.entity} has {len(body)} bytes; the limit is {EVENT_BYTES}")
    event_id = new_event()
    headers = {
        "ce-specversion": "1.0",
        "ce-id": event_id,
        "ce-source": f"/intertie/{service}",
        "ce-type": event.TYPE,
        "ce-subject": quote(event.entity, safe=_SAFE),
        "ce-time": now.isoformat(),
        "content-type": "application/json",
    }
    if traceparent:
        headers["traceparent"] = traceparent
    return NewEvent(
        event_id=event_id,
        type=event.TYPE,
        noun=event.noun(),
        entity=event.entity,
        version=event.version,
        subject=event.subject,
        body=body,
        headers=headers,
        created_at=now,
    )


# Printable ASCII travels as it is; the rest, and '%' itself, percent-encoded (CloudEvents HTTP binding 3.1.3.2), since header values are ASCII.
_SAFE = "!#$&'()*+,-./:;<=>?@[]^_`{|}~"


def parse_headers(text: str) -> dict[str, str]:
    """Headers as they were kept, in jsonb."""
    return decode(text, dict[str, str], what="stored headers")


def read_meta(headers: Mapping[str, str]) -> EventMeta:
    """The headers of a received event; `Refused('event.headers')` names what is missing or malformed."""
    try:
        return EventMeta(
            id=EventId(headers["ce-id"]),
            type=headers["ce-type"],
            source=headers["ce-source"],
            entity=unquote(headers["ce-subject"]),
            time=_instant(headers["ce-time"]),
            number=int(headers.get("intertie-number", "0")),
            epoch=int(headers.get("intertie-epoch", "0")),
            traceparent=headers.get("traceparent", ""),
        )
    except KeyError as err:
        raise Refused("event.headers", f"the header {err.args[0]} is missing") from err
    except ValueError as err:
        raise Refused("event.headers", f"a header is malformed: {err}") from err


def _instant(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"ce-time {text!r} has no offset")
    return moment
