"""What an upstream's answer says that it used: read while the bytes pass, changing none. Pure.

A count that is not there, or is no count, is unknown, never nought (field case BR-092).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

# Whole answers up to this are parsed; of longer ones (embeddings) only the tail, where `usage` stands.
WHOLE_BYTES = 4 * 1024 * 1024
TAIL_BYTES = 64 * 1024
# One event of a stream; a longer one is no event that counts anything.
LINE_BYTES = 4 * 1024 * 1024

Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]


class _Usage(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    total_tokens: Count | None = None


class _Response(msgspec.Struct):
    usage: _Usage | None = None
    model: str | None = None
    status: str | None = None


class _Answer(msgspec.Struct):
    """All of an answer, or of an event, that is of interest here."""

    usage: _Usage | None = None
    model: str | None = None
    status: str | None = None
    choices: list[msgspec.Raw] | None = None
    response: _Response | None = None


_decode = msgspec.json.Decoder(_Answer).decode


@dataclass(frozen=True, slots=True)
class Used:
    """Tokens None: unknown."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    events: int = 0
    model: str = ""
    incomplete: bool = False
    """The upstream says itself that it ended early."""


@dataclass(slots=True)
class Reader:
    """Fed with the answer's bytes as they pass. `stream`: the answer is `text/event-stream`."""

    stream: bool
    _kept: bytearray = field(default_factory=bytearray)
    _size: int = 0
    _deaf: bool = False
    _usage: _Usage | None = None
    _model: str = ""
    _events: int = 0
    _incomplete: bool = False

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        self._kept += data
        if self.stream:
            self._lines()
        elif len(self._kept) > WHOLE_BYTES + TAIL_BYTES:
            del self._kept[:-TAIL_BYTES]

    def _lines(self) -> None:
        while (end := self._kept.find(b"\n")) >= 0:
            line = bytes(self._kept[:end]).rstrip(b"\r")
            del self._kept[: end + 1]
            if self._deaf:
                self._deaf = False
            elif line.startswith(b"data:"):
                self._event(line[5:].strip())
        if len(self._kept) > LINE_BYTES:
            self._kept.clear()
            self._deaf = True

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]" or not data:
            return
        answer = _read(data)
        if answer is None:
            self._events += 1
            return
        self._take(answer)
        if answer.choices is None or answer.choices:
            self._events += 1

    def _take(self, answer: _Answer) -> None:
        inner = answer.response or _Response()
        usage = answer.usage or inner.usage
        if usage is not None:
            self._usage = usage
        self._model = (answer.model or inner.model or self._model)[:300]
        if "incomplete" in (answer.status, inner.status):
            self._incomplete = True

    def used(self) -> Used:
        """As far as it was said by now."""
        if not self.stream and self._kept:
            self._whole()
        usage = self._usage or _Usage()
        given = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
        made = usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens
        if made is None and usage.total_tokens is not None and given is not None and usage.total_tokens >= given:
            made = usage.total_tokens - given
        return Used(given, made, self._events, self._model, self._incomplete)

    def _whole(self) -> None:
        if len(self._kept) == self._size:
            answer = _read(bytes(self._kept))
        else:
            answer = _tail(bytes(self._kept[-TAIL_BYTES:]))
        self._kept.clear()
        self._size = 0
        if answer is not None:
            self._take(answer)


def _read(data: bytes) -> _Answer | None:
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _tail(data: bytes) -> _Answer | None:
    """The last `"usage": {…}` of an answer whose beginning is gone."""
    text = data.decode("utf-8", errors="replace")
    at = text.rfind('"usage"')
    if at < 0:
        return None
    rest = text[at + len('"usage"') :].lstrip().removeprefix(":").lstrip()
    try:
        found, _ = json.JSONDecoder().raw_decode(rest)
        return _Answer(usage=msgspec.convert(found, _Usage))
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return None


class Asked(msgspec.Struct):
    """All of a request's body that matters here."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, object] | None = None

    @property
    def tells_usage(self) -> bool:
        """A plain answer always tells it; a stream only if it was asked to."""
        return not self.stream or bool((self.stream_options or {}).get("include_usage"))


def asked(body: bytes) -> Asked | None:
    """What is asked for; None if the body is no JSON object."""
    try:
        return msgspec.json.decode(body, type=Asked)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def is_json(body: bytes) -> bool:
    """Of a server with words of its own only that much is asked; what they mean is between it and its callers."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True
