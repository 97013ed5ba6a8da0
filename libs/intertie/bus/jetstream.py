"""JetStream's own words: requests to `$JS.API`, parsed. Only what the port needs; any session's `request` carries it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol, TypeVar

import msgspec

from intertie.bus.port import Appended, ConsumerSpec, Message, StreamSpec, StreamState
from intertie.errors import Unavailable

API_LIMIT_S = 3.0
_NS = 1_000_000_000

STREAM_NOT_FOUND = 10059
# Where a stream's own metadata says of which epoch it is; a copy of a server's folder keeps it, a new stream begins without.
EPOCH = "intertie-epoch"


class Asks(Protocol):
    async def request(self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] = ...) -> Message: ...


class ApiError(msgspec.Struct):
    code: int
    err_code: int = 0
    description: str = ""


class _State(msgspec.Struct):
    messages: int
    first_seq: int
    last_seq: int


class _Stream(msgspec.Struct):
    error: ApiError | None = None
    config: dict[str, Any] = {}
    created: datetime | None = None
    state: _State | None = None


class _Consumer(msgspec.Struct):
    error: ApiError | None = None
    created: str = ""
    name: str = ""
    num_pending: int = 0


class _PubAck(msgspec.Struct):
    error: ApiError | None = None
    stream: str = ""
    seq: int = 0
    duplicate: bool = False


T = TypeVar("T")


class StreamGone(Unavailable):
    """The stream, or JetStream altogether, is not there."""

    def __init__(self, text: str) -> None:
        super().__init__("bus.no_stream", text)


async def _ask(session: Asks, verb: str, body: object, kind: type[T]) -> T:
    data = b"" if body is None else msgspec.json.encode(body)
    try:
        answer = await session.request(f"$JS.API.{verb}", data, timeout_s=API_LIMIT_S)
    except Unavailable as error:
        if error.code == "bus.no_responder":
            raise StreamGone("the server has no JetStream for this account") from error
        raise
    return parse(answer.body, kind)


def parse(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Unavailable("bus.stream_error", f"JetStream answered something else than {kind.__name__.strip('_')}: {error}") from error


def _refused(error: ApiError, what: str) -> Unavailable:
    if error.err_code == STREAM_NOT_FOUND or error.code == 404:
        return StreamGone(f"{what}: {error.description}")
    return Unavailable("bus.stream_error", f"{what}: {error.description} ({error.err_code})", retry_after_s=1.0)


def _config(spec: StreamSpec) -> dict[str, Any]:
    window_s = min(spec.duplicate_window_s, spec.max_age_s) if spec.max_age_s else spec.duplicate_window_s
    return {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "storage": "memory" if spec.memory else "file",
        "retention": "limits",
        "discard": "old",
        "num_replicas": max(1, spec.replicas),
        "max_age": int(spec.max_age_s * _NS),
        "max_bytes": spec.max_bytes,
        "max_msgs_per_subject": spec.max_per_subject,
        "duplicate_window": int(window_s * _NS),
        **({"metadata": {EPOCH: str(spec.epoch)}} if spec.epoch else {}),
    }


def _epoch(config: Mapping[str, Any]) -> int:
    """The epoch that a stream was made in; 0 if it does not say."""
    said = (config.get("metadata") or {}).get(EPOCH, "")
    return int(said) if str(said).isdecimal() else 0


def _differs(found: Mapping[str, Any], wanted: Mapping[str, Any], *, replicas: bool) -> bool:
    """Metadata and, unless chosen, replicas are not compared: servers add to the one, operators set the other."""
    return any(found.get(key) != value for key, value in wanted.items() if key != "metadata" and (replicas or key != "num_replicas"))


def _state(name: str, answer: _Stream) -> StreamState:
    if answer.created is None or answer.state is None:
        raise Unavailable("bus.stream_error", f"JetStream said nothing of stream {name}")
    return StreamState(name, answer.created, answer.state.first_seq, answer.state.last_seq, answer.state.messages, _epoch(answer.config))


async def stream_state(session: Asks, name: str) -> StreamState | None:
    answer = await _ask(session, f"STREAM.INFO.{name}", None, _Stream)
    if answer.error:
        error = _refused(answer.error, f"stream {name}")
        if isinstance(error, StreamGone):
            return None
        raise error
    return _state(name, answer)


async def ensure_stream(session: Asks, spec: StreamSpec) -> StreamState:
    """Create it, or change what differs; one of a lower epoch is deleted first. Replicas that are not chosen are the operator's, and stay."""
    found = await _ask(session, f"STREAM.INFO.{spec.name}", None, _Stream)
    wanted = _config(spec)
    if not found.error and _epoch(found.config) < spec.epoch:
        await delete_stream(session, spec.name)
        answer = await _ask(session, f"STREAM.CREATE.{spec.name}", wanted, _Stream)
    elif not found.error:
        if not _differs(found.config, wanted, replicas=spec.replicas > 0):
            return _state(spec.name, found)
        kept = {} if spec.replicas else {"num_replicas": found.config.get("num_replicas", 1)}
        changed = {**found.config, **wanted, **kept, "metadata": found.config.get("metadata") or {}}
        answer = await _ask(session, f"STREAM.UPDATE.{spec.name}", changed, _Stream)
    elif isinstance(error := _refused(found.error, f"stream {spec.name}"), StreamGone):
        answer = await _ask(session, f"STREAM.CREATE.{spec.name}", wanted, _Stream)
    else:
        raise error
    if answer.error:
        raise _refused(answer.error, f"stream {spec.name}")
    return _state(spec.name, answer)


async def delete_stream(session: Asks, name: str) -> None:
    """Gone, or never there."""
    await _ask(session, f"STREAM.DELETE.{name}", None, _Stream)


async def ensure_consumer(session: Asks, spec: ConsumerSpec) -> str:
    """Create the durable or bring it to this shape; when it was created, as the server spells it (its identity)."""
    config = {
        "durable_name": spec.durable,
        "name": spec.durable,
        "filter_subjects": list(spec.filters),
        "ack_policy": "explicit",
        "ack_wait": int(spec.ack_wait_s * _NS),
        "deliver_policy": "all",
        "replay_policy": "instant",
        # Tries are counted here (`delivery`), where the last one leads to a dead letter: the server would drop without a word.
        "max_deliver": -1,
        # Room for several processes, and for messages that wait out their pause.
        "max_ack_pending": max(1_000, spec.backlog * 8),
        "max_waiting": 512,
    }
    body = {"stream_name": spec.stream, "config": config, "action": ""}
    answer = await _ask(session, f"CONSUMER.CREATE.{spec.stream}.{spec.durable}", body, _Consumer)
    if answer.error:
        raise _refused(answer.error, f"consumer {spec.stream}/{spec.durable}")
    return answer.created


async def ephemeral(session: Asks, stream: str, name: str, subject_filter: str, deliver: str) -> int:
    """A consumer that sends the last message of each subject to `deliver` and forgets itself; how many it will send."""
    config = {
        "name": name,
        "deliver_subject": deliver,
        "deliver_policy": "last_per_subject",
        "filter_subjects": [subject_filter],
        "ack_policy": "none",
        "replay_policy": "instant",
        "mem_storage": True,
        "inactive_threshold": 5 * _NS,
    }
    answer = await _ask(session, f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config}, _Consumer)
    if answer.error:
        raise _refused(answer.error, f"stream {stream}")
    return answer.num_pending


async def delete_consumer(session: Asks, stream: str, name: str) -> None:
    await _ask(session, f"CONSUMER.DELETE.{stream}.{name}", None, _Consumer)


def appended(message: Message) -> Appended:
    """A publish acknowledgement; `duplicate` is success."""
    ack = parse(message.body, _PubAck)
    if ack.error:
        raise _refused(ack.error, f"append to {message.subject}")
    return Appended(ack.stream, ack.seq, ack.duplicate)


def tries(reply: str) -> int:
    """How often a message was delivered, this time included, from its acknowledgement subject (both shapes that servers use)."""
    parts = reply.split(".")
    try:
        return int(parts[4] if len(parts) == 9 else parts[6])
    except (IndexError, ValueError):
        return 1


def pull(batch: int, expires_s: float, heartbeat_s: float) -> bytes:
    """Body of a request for the next messages."""
    return msgspec.json.encode({"batch": batch, "expires": int(expires_s * _NS), "idle_heartbeat": int(heartbeat_s * _NS)})
