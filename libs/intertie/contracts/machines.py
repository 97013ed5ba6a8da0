"""Inside a pool of machines: what a node and its head say beside the lane, and what the head's owner is told at its door. Nothing of it leaves
the site.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from intertie.contracts.base import Contract, Instant, NonNegative, Positive, Text
from intertie.contracts.job import ResultRef, WorkRef
from intertie.contracts.site import PoolProfile
from intertie.ids import AttemptId, SiteName, TenantName

WIRE_VERSION = 1


class Hail(Contract, frozen=True, kw_only=True):
    """head → whoever dialled: sign this, or show a token."""

    v: Positive = WIRE_VERSION
    site: SiteName
    challenge: str


Slots = Annotated[int, msgspec.Meta(ge=0, le=4_096)]
"""CPU slots of one machine; each is a device that its head lists."""


class JoinNode(Contract, frozen=True, kw_only=True):
    """A machine that wants to be a node; the token is used up by it. Its seed stays there."""

    token: str
    node: SiteName
    key: str
    """Public key (nkey form) that the machine made."""
    slots: Slots
    version: str = ""


class HailNode(Contract, frozen=True, kw_only=True):
    """A node that is known: `signature` is over the challenge, the head's certificate and the node's name."""

    node: SiteName
    signature: str
    slots: Slots
    single_user: bool = False
    version: str = ""


class Welcome(Contract, frozen=True, kw_only=True):
    """head → node: what a node needs beside its lane, at each connection."""

    site: SiteName
    node: SiteName
    head_key: str
    """Public key whose seals the node believes."""
    owner_tenant: TenantName
    pools: list[PoolProfile]
    beat_s: float = 1.0


class PackPart(Contract, frozen=True, kw_only=True):
    """node → head: bytes of a work pack."""

    work: WorkRef
    offset: NonNegative
    limit: Annotated[int, msgspec.Meta(ge=1, le=524_288)] = 262_144


class ResultPart(Contract, frozen=True, kw_only=True):
    """node → head: bytes of a result; the answer says where to go on."""

    result: ResultRef
    offset: NonNegative
    data: bytes


class Part(Contract, frozen=True, kw_only=True):
    """Bytes from `offset`, of `total`."""

    offset: NonNegative
    total: NonNegative
    data: bytes = b""


class Went(Contract, frozen=True, kw_only=True):
    """How far a result is on the head's disk; `whole`: its digest was checked."""

    offset: NonNegative
    whole: bool = False
    later: bool = False
    """The word of its end is not here yet: say it again."""


class AskBytes(Contract, frozen=True, kw_only=True):
    """head → node on `down.ask`: bytes of an attempt's log."""

    id: str
    attempt: AttemptId
    offset: NonNegative
    limit: Annotated[int, msgspec.Meta(ge=0, le=262_144)]


class BytesAnswer(Contract, frozen=True, kw_only=True):
    """node → head on `up.answer`."""

    id: str
    part: Part | None
    """None: the node has no such log."""


# --- what the owner sees and asks --------------------------------------------------------------------------------------------------------


class NodeRecord(Contract, frozen=True, kw_only=True):
    """One machine of the pool, the head itself included."""

    node: SiteName
    head: bool = False
    reachable: bool
    """Its word arrived within the freshness limit."""
    since: Instant | None
    """Of a node that is not heard: its last word. Of one that is: when it connected."""
    devices: NonNegative
    running: NonNegative
    waiting_results: NonNegative = 0
    cordoned: bool = False
    reason: Text = ""
    joined_at: Instant | None = None
    revoked_at: Instant | None = None
    version: str = ""
    single_user: bool = False
    lane: str = ""
    """Why its lane stands still; empty when all is well."""


class Nodes(Contract, frozen=True, kw_only=True):
    """`GET /v1/nodes`."""

    site: SiteName
    listen: str
    nodes: list[NodeRecord]


class MakeToken(Contract, frozen=True, kw_only=True):
    """`POST /v1/nodes/token`."""

    node: SiteName | None = None
    """The only name that it is good for; None: any."""
    hours: Annotated[int, msgspec.Meta(ge=1, le=168)] = 24


class TokenMade(Contract, frozen=True, kw_only=True):
    """Shown once. The certificate's fingerprint is inside it, so that the node knows whom it dials."""

    token: str
    expires: Instant
    listen: str


class CordonNode(Contract, frozen=True, kw_only=True):
    """`POST /v1/nodes/{node}/cordon`: no new work there; what runs goes on."""

    on: bool = True
    reason: Text = ""


class RevokeNode(Contract, frozen=True, kw_only=True):
    """`POST /v1/nodes/{node}/revoke`. `lost`: the machine will not come back; what runs there is closed with its outcome unknown, by your word."""

    lost: bool = False


class Reservation(Contract, frozen=True, kw_only=True):
    """A present holder: these devices are theirs until then. Known at the site alone."""

    person: Annotated[str, msgspec.Meta(min_length=1, max_length=120)]
    """Who holds it: a local account's name, if they are to use it through `intertie local submit`."""
    node: str
    devices: list[str] = []
    """Device ids; empty: every device of the node."""
    until: Instant
    reason: Text = ""


class ReservationFile(Contract, frozen=True, kw_only=True):
    """`PUT /v1/nodes/reservations`: replaces all by what this file says."""

    kind: Annotated[str, msgspec.Meta(pattern="^(csv|toml)$")]
    text: str


class Reservations(Contract, frozen=True, kw_only=True):
    """`GET /v1/nodes/reservations`: those that still hold."""

    reservations: list[Reservation]
