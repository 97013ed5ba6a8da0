"""Cutting a log at byte offsets without cutting a character (BR-140)."""

from __future__ import annotations

from dataclasses import dataclass

# A UTF-8 character is at most four bytes, so three before an offset decide whether it lies inside one.
LOOK_BACK = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """`text` is the bytes [offset, next_offset) of the log."""

    offset: int
    next_offset: int
    text: str


def _length(lead: int) -> int:
    """Bytes of the character that begins with `lead`; 1 for what begins none."""
    if lead >= 0xF0:
        return 4 if lead < 0xF8 else 1
    if lead >= 0xE0:
        return 3
    return 2 if lead >= 0xC0 else 1


def _whole_from(data: bytes, at: int) -> int:
    """The first index ≥ `at` that is not inside a character begun before `at`."""
    for back in range(1, LOOK_BACK + 1):
        start = at - back
        if start < 0:
            break
        if 0x80 <= data[start] < 0xC0:
            continue
        end = min(start + _length(data[start]), len(data))
        inside = data[start + 1 : end]
        return end if end > at and all(0x80 <= byte < 0xC0 for byte in inside) else at
    return at


def _held_back(data: bytes) -> int:
    """How many bytes at the end are the beginning of a character whose rest has not come yet."""
    for back in range(1, min(LOOK_BACK, len(data)) + 1):
        byte = data[-back]
        if 0x80 <= byte < 0xC0:
            continue
        return back if _length(byte) > back else 0
    return 0


def cut(data: bytes, before: int, offset: int, *, complete: bool) -> Piece:
    """`data` holds `before` bytes (0–3) that lie before `offset`, then the bytes from `offset` on.

    The piece begins at the next whole character, and keeps back a fragment at its end unless `complete` says that no more will come.
    Bytes that are no UTF-8 become U+FFFD, one by one.
    """
    start = _whole_from(data, before)
    rest = data[start:]
    held = 0 if complete else _held_back(rest)
    body = rest[: len(rest) - held]
    begin = offset + start - before
    return Piece(offset=begin, next_offset=begin + len(body), text=body.decode("utf-8", "replace"))
