"""What a process may ask of the bus, whichever bus it is.

The bus carries and never keeps (law 1): a publish may be lost, repeated or late, and a timeout means *maybe*. Whoever needs more keeps the
fact on disk and says it again. Two buses implement this port and pass the same suite: `intertie.bus.nats` and `intertie.bus.memory`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

import msgspec


class Message(msgspec.Struct, frozen=True):
    """One message as it arrived. Header names are lower case; of several values one. (A struct: one is made for each message, eight times as fast.)"""

    subject: str
    body: bytes
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    reply: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that carries headers; plain bytes are an answer without."""

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Message], Awaitable[bytes | Reply | None]]
"""What it returns, if not None, is sent to `reply`. What it raises is logged and counted; the subscription lives on."""


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream of the public record; never the only copy of anything."""

    name: str
    subjects: Sequence[str]
    memory: bool = False
    max_age_s: float = 0.0
    max_bytes: int = -1
    max_per_subject: int = -1
    duplicate_window_s: float = 120.0
    epoch: int = 0
    """A stream of a lower epoch is of a life that the keepers have forgotten: it is deleted and made anew, to be filled from the outboxes."""
    replicas: int = 0
    """Copies in a cluster; 0: as it is, one for a new stream."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """What a stream says of itself. Another `created`, or a lower `last_seq`, means that it was lost and made anew."""

    name: str
    created: datetime
    first_seq: int
    last_seq: int
    messages: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Appended:
    """A stream's acknowledgement. Not proof of storage (Jepsen 2025-12), and `duplicate` is a success."""

    stream: str
    seq: int
    duplicate: bool


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """A durable pull consumer. After `max_deliver` tries the message goes to `dead`, never nowhere."""

    stream: str
    durable: str
    filters: Sequence[str]
    workers: int = 4
    """Messages handled at once; those of one entity (header `ce-subject`) stay in order."""
    backlog: int = 256
    """Messages fetched and not yet handled."""
    ack_wait_s: float = 30.0
    max_deliver: int = 8
    backoff_s: Sequence[float] = (0.2, 1.0, 5.0, 15.0, 30.0)


Dead = Callable[[Message, BaseException, int], Awaitable[None]]
"""Called with the message, the last error and the number of tries, before the message is given up; if it raises, the message stays."""


class Subscription(Protocol):
    """Something that listens until it is closed; it survives reconnection and the loss of its stream."""

    async def close(self) -> None: ...


class Bus(Protocol):
    """The port. Every wait has a limit; every queue has a size. Methods raise `Unavailable` (`bus.unavailable`, `bus.timeout`,
    `bus.no_responder`, `bus.denied`, `bus.no_stream`) or `Refused` (`bus.too_large`, `bus.subject`) and nothing else."""

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Core publish: at most once. Size is checked with headers (`bus.too_large`)."""
        ...

    async def publish_many(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Core publish of (subject, body) after each other, without headers: as many of `publish`, and cheaper."""
        ...

    async def request(self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Message:
        """One answer, or `Unavailable`: `bus.timeout` (maybe done) or `bus.no_responder` (nobody was there)."""
        ...

    async def listen(self, subject: str, take: Callable[[Message], None], queue: str = "") -> Subscription:
        """The primitive under `subscribe` and `serve`: call `take` (quick, never raising) for each message, as it arrives."""
        ...

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "", workers: int = 1, backlog: int = 1_000) -> Subscription:
        """Call `handler` for each message, `workers` at once; when `backlog` is full the oldest is dropped and counted."""
        ...

    async def serve(self, service: str, version: str, handlers: Mapping[str, Handler], *, workers: int = 32) -> Subscription:
        """Answer requests as a NATS micro service: subject → handler, bounded concurrency, `$SRV.PING/INFO/STATS` answered.

        Only replies that are `_INBOX.` are answered (a client may name any subject as a reply).
        """
        ...

    async def ensure_stream(self, spec: StreamSpec) -> StreamState:
        """Create the stream or bring it to this shape; its state now. Whoever may not make streams (on NATS: all but identity) gets what is
        there, or `Unavailable('bus.no_stream')` while it is absent or of a lower epoch."""
        ...

    async def stream_state(self, name: str) -> StreamState | None:
        """The stream's state; None if it is absent. Asked of the server each time."""
        ...

    async def append(
        self, subject: str, body: bytes, *, message_id: str, headers: Mapping[str, str] | None = None, timeout_s: float = 2.0
    ) -> Appended:
        """Publish to a stream and wait for its word; repeat with the same `message_id` after `Unavailable`.

        `bus.stream_mute`: it has stored nothing for several tries while the server lives, and is not ours to make anew.
        """
        ...

    async def last_messages(self, stream: str, subject_filter: str, *, limit: int = 10_000) -> list[Message]:
        """The last value per subject of a small stream, for a process that starts."""
        ...

    async def consume(self, spec: ConsumerSpec, handler: Handler, dead: Dead) -> Subscription:
        """Handle a stream's messages with acknowledgement after the handler returned; re-made if the stream or consumer is lost."""
        ...

    async def alive(self, timeout_s: float = 1.0) -> bool:
        """True if the server answered just now. `connected` is a memory, this is a fact."""
        ...

    @property
    def connected(self) -> bool: ...

    def on_state(self, listener: Callable[[bool], None]) -> None:
        """Tell `listener` when the link comes (True) and goes (False); called at once with the state now."""
        ...

    async def close(self) -> None: ...
