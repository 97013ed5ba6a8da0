"""Subjects and headers as text: what is a legal one, which pattern covers which, how names are spelt on the wire. Pure.

User text never becomes part of a subject: whoever builds one passes each foreign piece through `token()` (field case BR-125).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from intertie.errors import Refused

# Ids are 30 characters, names at most 63 (`intertie.ids`); a subject is seven such tokens at most. NATS itself takes 4 KiB a line.
MAX_TOKEN = 63
MAX_SUBJECT = 512

SERVICE_IMPORT = "_R_."
"""How the server names a reply that crosses accounts."""
INBOX = "_INBOX."

_TOKEN = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\Z")
_PART = re.compile(r"[!-)+-\-/-=?-~]+\Z")
"""Printable ASCII without blank, `*`, `.` and `>`."""
_PLAIN = re.compile(r"[!-)+-\-/-=?-~]+(?:\.[!-)+-\-/-=?-~]+)*\Z")


def token(text: str, what: str = "name") -> str:
    """`text` if it may stand between two dots of a subject; `Refused('bus.subject')` otherwise. Nothing is escaped, nothing is trimmed."""
    if len(text) > MAX_TOKEN or not _TOKEN.match(text):
        raise Refused(
            "bus.subject",
            f"{what} {text[:80]!r} cannot be part of a subject",
            next_step=f"use 1 to {MAX_TOKEN} of a-z, 0-9 and '-', not at either end",
        )
    return text


@lru_cache(maxsize=8_192)
def check(subject: str, *, pattern: bool = False) -> str:
    """`subject` if it is well formed: no empty part, printable ASCII, wildcards only in a `pattern` and only as whole parts."""
    parts = subject.split(".")
    for at, part in enumerate(parts):
        wild = pattern and (part == "*" or (part == ">" and at == len(parts) - 1))
        if not wild and not _PART.match(part):
            raise Refused("bus.subject", f"{subject[:120]!r} is not a {'subject pattern' if pattern else 'subject'}")
    if len(subject) > MAX_SUBJECT:
        raise Refused("bus.subject", f"a subject of {len(subject)} characters is longer than {MAX_SUBJECT}")
    return subject


def plain(subject: str) -> str:
    """As `check` of no pattern, for subjects that are seen once, as an inbox is."""
    return subject if len(subject) <= MAX_SUBJECT and _PLAIN.match(subject) else check(subject)


def matches(pattern: str, subject: str) -> bool:
    """Does `pattern` cover `subject`? `*` is one part, a final `>` one or more."""
    return capture(pattern, subject) is not None


def capture(pattern: str, subject: str) -> tuple[str, ...] | None:
    """What the wildcards of `pattern` stand for in `subject`; None if it does not match."""
    wanted, given = pattern.split("."), subject.split(".")
    caught: list[str] = []
    for at, part in enumerate(wanted):
        if part == ">":
            return (*caught, ".".join(given[at:])) if len(given) > at else None
        if at >= len(given) or part not in ("*", given[at]):
            return None
        if part == "*":
            caught.append(given[at])
    return tuple(caught) if len(wanted) == len(given) else None


def fill(pattern: str, caught: tuple[str, ...]) -> str:
    """`pattern` with its wildcards replaced in order."""
    values = iter(caught)
    return ".".join(next(values) if part in ("*", ">") else part for part in pattern.split("."))


def lowered(headers: Mapping[str, str]) -> dict[str, str]:
    """Header names in lower case; of names that differ only in case the first wins (BR-134)."""
    out: dict[str, str] = {}
    for name, value in headers.items():
        out.setdefault(name.lower(), value)
    return out


@lru_cache(maxsize=512)
def wire_name(name: str) -> str:
    """How a header is spelt when sent: lower case, but for NATS' own (`Nats-Msg-Id`), which the server compares with case."""
    low = name.lower()
    return "-".join(part.capitalize() for part in low.split("-")) if low.startswith("nats-") else low


def headers_size(headers: Mapping[str, str]) -> int:
    """Bytes that the headers add to a message: the server counts them against `max_payload` (BR-110)."""
    if not headers:
        return 0
    return len(b"NATS/1.0\r\n\r\n") + sum(len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items())


def refuse_large(subject: str, headers: Mapping[str, str], body: bytes, limit: int) -> None:
    """`Refused('bus.too_large')` if headers and body together are more than `limit` bytes."""
    size = headers_size(headers) + len(body)
    if size > limit:
        error = Refused(
            "bus.too_large",
            f"a message to {subject} of {size} bytes with headers is more than {limit}",
            next_step="send large content by reference, or in parts",
        )
        error.details.update({"size": size, "limit": limit})
        raise error
