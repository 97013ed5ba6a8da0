"""How every contract is shaped, encoded and refused. The nouns are in the files beside this one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, cast

import msgspec

from intertie.errors import Refused
from intertie.ids import EventId

Instant = Annotated[datetime, msgspec.Meta(tz=True)]
"""A moment with an offset; without one it is refused at the door."""

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Text = Annotated[str, msgspec.Meta(max_length=4_000)]
"""Text for people. Long enough for a reason with a log tail, short enough for any message."""

PREFIX = "intertie.v1"
EVENT_STREAM = "INTERTIE_EVENTS"
TELEMETRY_STREAM = "INTERTIE_TELEMETRY"

# NATS' default max_payload is 1 MiB, headers included; a batch stays far below so that many sites fit one server's memory.
BATCH_BYTES = 256 * 1024


class Contract(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Base of all messages: immutable, fields by name."""


class Event(Contract, frozen=True, kw_only=True):
    """Something that happened, told by its keeper: the entity's whole public record after the change.

    `version` is the entity's; a consumer applies an event only if its version is higher than the one it holds, so that order and repeats
    cannot matter. The CloudEvents attributes travel as headers: see `intertie.store.outbox`.
    """

    TYPE: ClassVar[str] = ""
    """CloudEvents type, `io.intertie.<noun>.<verb>.v1`."""
    SERVICE: ClassVar[str] = ""

    version: Positive

    @property
    def entity(self) -> str:
        """Id of the entity that `version` counts; the `ce-subject`. Every event has its own."""
        raise NotImplementedError(type(self).__name__)

    @property
    def tenant_token(self) -> str:
        """Tenant in the subject, or `_`."""
        return str(getattr(self, "tenant", None) or "_")

    @property
    def site_token(self) -> str:
        """Site in the subject, or `_`."""
        return str(getattr(self, "site", None) or "_")

    @classmethod
    def noun(cls) -> str:
        return cls.TYPE.split(".")[2]

    @property
    def subject(self) -> str:
        """`intertie.v1.evt.<service>.<noun>.<verb>.<tenant|_>.<site|_>`."""
        _, _, noun, verb, _ = self.TYPE.split(".")
        return f"{PREFIX}.evt.{self.SERVICE}.{noun}.{verb}.{self.tenant_token}.{self.site_token}"


class EventMeta(Contract, frozen=True, kw_only=True):
    """What the headers of a received event say."""

    id: EventId
    type: str
    source: str
    entity: str
    time: Instant
    number: NonNegative
    """Gapless per (service epoch, noun); given by the relay."""
    epoch: NonNegative
    traceparent: str = ""


class Empty(Contract, frozen=True, kw_only=True):
    """Nothing to say, on purpose."""


class Head(Contract, frozen=True, kw_only=True):
    """The last number that a service gave out for a noun; said each beat on core NATS so that a consumer behind can see it."""

    service: str
    noun: str
    epoch: NonNegative
    number: NonNegative


class Heads(Contract, frozen=True, kw_only=True):
    """All heads of one service, on `intertie.v1.heads.<service>`."""

    service: str
    heads: list[Head]


class Problem(Contract, frozen=True, kw_only=True):
    """A known error on the wire: kind decides what a caller does, code is API, text is for people."""

    kind: str
    code: str
    text: str
    next_step: str = ""
    details: dict[str, Any] = {}
    trace_id: str = ""


T = TypeVar("T")

_json = msgspec.json.Encoder(decimal_format="string")
_decoders: dict[Any, tuple[msgspec.json.Decoder[Any], bool]] = {}
"""Decoder by type, and whether its values may hold a decimal at all: looking for one in each message would cost as much as reading it."""


def encode(message: object) -> bytes:
    """The JSON bytes of a contract."""
    return _json.encode(message)


def decode(data: bytes | str, kind: type[T], *, what: str = "message") -> T:
    """Parse and check one contract; `Refused('contract.invalid')` names the place (`$.resources.count`) and the rule."""
    known = _decoders.get(kind)
    if known is None:
        known = _decoders.setdefault(kind, (msgspec.json.Decoder(kind), may_hold_decimal(kind)))
    decoder, decimals = known
    try:
        value: T = decoder.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        # Brackets within brackets, also in what would only be skipped, end in Python's own limit.
        raise Refused("contract.invalid", f"{what} is not valid: {err}", next_step="compare it with schemas/") from err
    if decimals and not _finite(value):
        refuse_not_finite(value, what)
    return value


def may_hold_decimal(kind: Any) -> bool:
    """Whether a value of this type can hold a decimal, at any depth; `Any` and what msgspec cannot look into can."""
    seen = set[Any]()
    todo: list[Any] = [msgspec.inspect.type_info(kind)]
    while todo:
        found = todo.pop()
        if isinstance(found, msgspec.inspect.DecimalType | msgspec.inspect.AnyType | msgspec.inspect.CustomType):
            return True
        if isinstance(found, msgspec.inspect.StructType):
            if found.cls in seen:
                continue
            seen.add(found.cls)
        for name in found.__struct_fields__:
            held = getattr(found, name)
            todo += [one for one in (held if isinstance(held, tuple) else (held,)) if isinstance(one, _LOOKED_INTO)]
    return False


_LOOKED_INTO = (msgspec.inspect.Type, msgspec.inspect.Field)


_LEAVES = frozenset({str, int, bool, float, bytes, NoneType, datetime, msgspec.Raw})
"""Types that hold no decimal: looked at for every field of every message."""


def _finite(value: object) -> bool:
    """Every decimal inside is a number; as `refuse_not_finite`, without a place to tell."""
    if isinstance(value, Decimal):
        return value.is_finite()
    if isinstance(value, msgspec.Struct):
        items: Iterable[object] = [getattr(value, field) for field in value.__struct_fields__]
    elif isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    else:
        return True
    return all(_finite(item) for item in items if type(item) not in _LEAVES)


def refuse_not_finite(value: object, what: str, place: str = "$") -> None:
    """Refuse `NaN` and `Infinity` decimals, which msgspec lets through: no sum could ever be trusted again."""
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise Refused("contract.invalid", f"{what} is not valid: {place} is {value}, not a number")
    elif isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            refuse_not_finite(getattr(value, field), what, f"{place}.{field}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            refuse_not_finite(item, what, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            refuse_not_finite(item, what, f"{place}[{index}]")


def place_of_nul(value: object, place: str = "$") -> str:
    """Where a text holds a NUL, at any depth (`$.spec.script`); empty if nowhere. No argument, path or PostgreSQL text holds one."""
    if isinstance(value, str):
        return place if "\x00" in value else ""
    return next((found for where, part in _parts(value, place) if (found := place_of_nul(part, where))), "")


def _parts(value: object, place: str) -> Iterator[tuple[str, object]]:
    """What a value holds, keys included, each with its place."""
    if isinstance(value, msgspec.Struct):
        yield from ((f"{place}.{name}", getattr(value, name)) for name in value.__struct_fields__)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            where = f"{place}[{str(key)[:40]!r}]"
            yield where, key
            yield where, part
    elif isinstance(value, list | tuple):
        yield from ((f"{place}[{number}]", part) for number, part in enumerate(value))


def without_nul(value: T) -> T:
    """The same with U+FFFD for NUL in its texts, at any depth; the very same if there is none."""
    cleaned: Any = value
    if not place_of_nul(value):
        return value
    if isinstance(value, str):
        cleaned = value.replace("\x00", "\ufffd")
    elif isinstance(value, msgspec.Struct):
        cleaned = msgspec.structs.replace(value, **{name: without_nul(getattr(value, name)) for name in value.__struct_fields__})
    elif isinstance(value, Mapping):
        cleaned = {without_nul(key): without_nul(part) for key, part in value.items()}
    elif isinstance(value, list | tuple):
        cleaned = type(value)(without_nul(part) for part in value)
    return cast("T", cleaned)
