"""Ids: distinct types, minted here and nowhere else.

A minted id is a prefix and a version-7 UUID in lower-case base 32 (`job-06f3…`): it sorts by creation, names its kind to a reader, and is
always a legal NATS subject token and file name. Names that people choose (site, tenant, pool) are checked by `name()` to the same alphabet.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NewType

from uuid_utils import uuid7

from intertie.errors import Refused

JobId = NewType("JobId", str)
AttemptId = NewType("AttemptId", str)
RoundId = NewType("RoundId", str)
SiteName = NewType("SiteName", str)
PoolName = NewType("PoolName", str)
"""Unique inside its site; `site/pool` names a pool to people."""
TenantName = NewType("TenantName", str)
PrincipalId = NewType("PrincipalId", str)
DeviceId = NewType("DeviceId", str)
"""GPU UUID, or `slot-N` for a CPU slot. Unique inside its pool."""
EventId = NewType("EventId", str)
SegmentId = NewType("SegmentId", str)
SpecId = NewType("SpecId", str)
StatementId = NewType("StatementId", str)
IncidentId = NewType("IncidentId", str)
TokenId = NewType("TokenId", str)
JournalId = NewType("JournalId", str)
SessionId = NewType("SessionId", str)
InstructionId = NewType("InstructionId", str)
CallId = NewType("CallId", str)
OfferingName = NewType("OfferingName", str)
"""Unique inside its site; `site/offering` names one to people."""
Digest = NewType("Digest", str)
"""`sha256:` and 64 hex digits, of the exact bytes."""

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\Z")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,127}\Z")
CANARY = SiteName("canary")
"""The hub's own ear: it syncs as a site does, and is nobody's site."""
RESERVED = frozenset({CANARY, "hub", "local", "all", "none", "unknown", "intertie"})


def _uuid() -> bytes:
    return uuid7().bytes


_source: Callable[[], bytes] = _uuid


def mint(prefix: str) -> str:
    """A new id such as `job-06f3c1…`: prefix, dash, 26 characters of base 32."""
    return f"{prefix}-{base64.b32hexencode(_source()).decode('ascii').rstrip('=').lower()}"


@contextmanager
def minting(source: Callable[[], bytes]) -> Iterator[None]:
    """Ids from these 16 bytes each, in this process, inside the block: a simulation replays only if its ids do."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before


def new_job() -> JobId:
    return JobId(mint("job"))


def new_attempt() -> AttemptId:
    return AttemptId(mint("att"))


def new_event() -> EventId:
    return EventId(mint("evt"))


def name(text: str, what: str) -> str:
    """`text` if it may name a `what` (site, tenant, pool …); refused with the rule otherwise.

    Names become subject tokens, file names and local accounts, so the alphabet is closed: 1–63 of a–z, 0–9 and inner dashes.
    """
    if not NAME.match(text):
        raise Refused(
            "name.invalid",
            f"{what} {text[:80]!r} is not a name: use 1 to 63 of a-z, 0-9 and '-', not at either end",
        )
    if text in RESERVED:
        raise Refused("name.reserved", f"{what} {text!r} is a reserved word; choose another name")
    return text


def is_id(text: str) -> bool:
    """Whether it can be a minted id: what another party minted becomes a key, a header and a file name here."""
    return _ID.match(text) is not None


def speaker(token: str) -> SiteName:
    """Who speaks on a lane's subject: a site, or the canary, whose name no site can have."""
    return CANARY if token == CANARY else SiteName(name(token, "site"))


def is_digest(text: str) -> bool:
    """Whether it can be a digest: what another party calls one becomes a file name here."""
    return _DIGEST.match(text) is not None


def digest(data: bytes) -> Digest:
    """The digest of exactly these bytes."""
    return Digest(f"sha256:{hashlib.sha256(data).hexdigest()}")
