"""Calls: one request of a tenant to a site's offering, from the gateway over the bus to the owner's upstream, and what is recorded of it.

Frames are MessagePack on `intertie.v1.down.<site>.call` and, back, on `up.call.<gateway>` (at the hub `intertie.v1.up.<site>.call.<gateway>`). Both
directions carry numbered parts and never more than the receiver gave credit for; a gap that stays is one clear error. Records are JSON.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

import msgspec

from intertie.contracts.base import PREFIX, Contract, Instant, NonNegative, Positive, Text
from intertie.contracts.call_offerings import CallOutcome, CallPays
from intertie.contracts.link import Sealed
from intertie.errors import Refused
from intertie.ids import CallId, OfferingName, PrincipalId, SiteName, SpecId, TenantName

PART_BYTES = 96 * 1024
"""Of one frame's data: far below what one message of the bus may hold, headers included."""
WINDOW_BYTES = 512 * 1024
"""Sent and not yet passed on, in one direction of one call: what a slow reader costs in memory at most."""
BEAT_S = 2.0
"""Each side says that it is there at least so often."""
SILENT_S = 10.0
"""Longer than this without a word from the other side, and the call is interrupted."""
TAKE_S = 5.0
"""A call that no site takes within this is refused; a site takes none that is older."""
TAKE_LEEWAY_S = 5.0
"""How far a site's estimate of the hub's clock may be off."""


class CallGrant(Contract, frozen=True, kw_only=True):
    """The gateway's word that this tenant made this call; sealed, and repeated in the site's record: no site can bill a call nobody made."""

    call: CallId
    tenant: TenantName
    principal: PrincipalId
    site: SiteName
    offering: OfferingName
    revision: Positive
    """Of the offering, as the gateway knew it."""
    at: Instant
    traceparent: str = ""


# --- frames, gateway to site -------------------------------------------------------------------------------------------------------------


class CallOpen(Contract, frozen=True, kw_only=True, tag_field="k", tag="o"):
    """A call, with the first part of its body."""

    call: CallId
    gateway: str
    """Token under which this gateway hears answers."""
    grant: Sealed
    path: str
    headers: dict[str, str] = {}
    """Those that a request to an upstream needs; never the caller's token."""
    data: bytes = b""
    last: bool = True
    credit: NonNegative = WINDOW_BYTES


class CallPart(Contract, frozen=True, kw_only=True, tag_field="k", tag="p"):
    """More of the request's body. Parts count from 1."""

    call: CallId
    seq: Positive
    data: bytes
    last: bool


class CallCredit(Contract, frozen=True, kw_only=True, tag_field="k", tag="c"):
    """So many bytes of the answer may have been sent in all; also the sign that somebody still waits."""

    call: CallId
    through: NonNegative


class CallAbort(Contract, frozen=True, kw_only=True, tag_field="k", tag="a"):
    """Nobody waits any more."""

    call: CallId
    outcome: CallOutcome
    code: str


DownFrame = CallOpen | CallPart | CallCredit | CallAbort


# --- frames, site to gateway ---------------------------------------------------------------------------------------------------------------


class CallTaken(Contract, frozen=True, kw_only=True, tag_field="k", tag="t"):
    """The site has it."""

    call: CallId


class CallRoom(Contract, frozen=True, kw_only=True, tag_field="k", tag="w"):
    """So many bytes of the body may have been sent in all."""

    call: CallId
    through: NonNegative


class CallHead(Contract, frozen=True, kw_only=True, tag_field="k", tag="h"):
    """The upstream's status and headers. Its number is 1."""

    call: CallId
    seq: Positive
    status: Annotated[int, msgspec.Meta(ge=200, le=599)]
    headers: dict[str, str] = {}


class CallData(Contract, frozen=True, kw_only=True, tag_field="k", tag="d"):
    """Bytes of the answer, as they came."""

    call: CallId
    seq: Positive
    data: bytes


class CallAlive(Contract, frozen=True, kw_only=True, tag_field="k", tag="l"):
    """Nothing new; what was said last had this number."""

    call: CallId
    sent: NonNegative


class CallDone(Contract, frozen=True, kw_only=True, tag_field="k", tag="e"):
    """The end, once."""

    call: CallId
    seq: Positive
    outcome: CallOutcome
    code: str = ""
    """Why, where it did not complete: `call.busy`, `call.paused`, `call.upstream_stalled` …"""
    text: Text = ""
    retry_after_s: NonNegative = 0
    response_bytes: NonNegative = 0


UpFrame = CallTaken | CallRoom | CallHead | CallData | CallAlive | CallDone

_encoder = msgspec.msgpack.Encoder()
_down: msgspec.msgpack.Decoder[DownFrame] = msgspec.msgpack.Decoder(DownFrame)
_up: msgspec.msgpack.Decoder[UpFrame] = msgspec.msgpack.Decoder(UpFrame)


def pack(frame: DownFrame | UpFrame) -> bytes:
    return _encoder.encode(frame)


def unpack_down(data: bytes) -> DownFrame:
    """`Refused('contract.invalid')` for what is no frame of a gateway."""
    try:
        return _down.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise Refused("contract.invalid", f"a call's frame is not valid: {err}") from err


def unpack_up(data: bytes) -> UpFrame:
    """`Refused('contract.invalid')` for what is no frame of a site."""
    try:
        return _up.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise Refused("contract.invalid", f"a call's frame is not valid: {err}") from err


def call_subject(site: SiteName | str) -> str:
    """Where a gateway says its frames."""
    return f"{PREFIX}.down.{site}.call"


LOCAL_CALL_SUBJECT = "down.call"
"""The same, as the agent hears it in its site's account."""


def answers_subject(gateway: str) -> str:
    """Where one gateway hears every site's frames; the site's name is put in by the server."""
    return f"{PREFIX}.up.*.call.{gateway}"


def local_answer_subject(gateway: str) -> str:
    """Where the agent says them."""
    return f"up.call.{gateway}"


# --- records -----------------------------------------------------------------------------------------------------------------------------


class CallRecord(Contract, frozen=True, kw_only=True):
    """The site's word on one call; travels sealed under its key. Times are microseconds of CLOCK_BOOTTIME since `accepted`."""

    call: CallId
    site: SiteName
    offering: OfferingName
    tenant: TenantName
    grant: Sealed
    revision: Positive
    """Of the offering, as the gateway's grant says it."""
    accepted: Instant
    first_byte_us: NonNegative | None
    """None: no byte of an answer came."""
    end_us: NonNegative
    outcome: CallOutcome
    code: str = ""
    status: int | None
    """The upstream's; None: it said none."""
    request_bytes: NonNegative
    response_bytes: NonNegative
    """Passed on towards the caller."""
    input_tokens: NonNegative | None
    """As the reply's `usage` says; None: unknown, which is not zero."""
    output_tokens: NonNegative | None
    events: NonNegative = 0
    """Events of a stream that carried content, the end mark not counted."""
    streamed: bool = False
    model: Annotated[str, msgspec.Meta(max_length=300)] = ""
    response_p95_ms: int | None = None
    """What was promised then."""
    first_byte_p95_ms: int | None = None
    islanded: bool = False


class CallSeen(Contract, frozen=True, kw_only=True):
    """The gateway's own word on one call. Times are microseconds of its CLOCK_BOOTTIME since `opened`."""

    call: CallId
    tenant: TenantName
    principal: PrincipalId
    site: SiteName
    offering: OfferingName
    opened: Instant
    first_byte_us: NonNegative | None = None
    end_us: NonNegative
    outcome: CallOutcome
    code: str = ""
    status: int | None = None
    request_bytes: NonNegative = 0
    response_bytes: NonNegative = 0
    """Handed to the caller's connection."""
    taken: bool = True
    """The site said that it has the call: its own record must come."""


class CallsSeen(Contract, frozen=True, kw_only=True):
    """`cmd.metering.calls_seen`: the gateway's records, from its spool. The same call twice is once."""

    calls: Annotated[list[CallSeen], msgspec.Meta(max_length=500)]


class CallsTaken(Contract, frozen=True, kw_only=True):
    """How many of them were news."""

    new: NonNegative


class CallBook(Contract, frozen=True, kw_only=True):
    """What metering holds of one call: both words, what it costs and whom, what is missing."""

    call: CallId
    tenant: TenantName
    site: SiteName
    offering: OfferingName
    principal: PrincipalId | None = None
    accepted: Instant
    day: str
    outcome: CallOutcome
    code: str = ""
    status: int | None = None
    first_byte_ms: NonNegative | None = None
    duration_ms: NonNegative
    request_bytes: NonNegative
    response_bytes: NonNegative
    input_tokens: NonNegative | None = None
    output_tokens: NonNegative | None = None
    estimated: bool = False
    """The output tokens were counted by events, as the agreement allows, or a person decided."""
    decided: Text = ""
    """Who decided how many tokens nobody counted, and why."""
    model: str = ""
    streamed: bool = False
    state: Annotated[str, msgspec.Meta(pattern="^(settled|waiting|suspense)$")]
    reason: str = ""
    """Why it waits: `site_word`, `gateway_word`, `no_spec`, `no_price`, `tokens_unknown`, `unproven`, `no_grant`."""
    differences: list[str] = []
    """Where the two words do not agree: `outcome`, `bytes`, `duration`, `gateway_word_missing`."""
    kept: bool | None = None
    """Every promise that this call measures was kept; None: none was made, or none could be measured."""
    missed: list[str] = []
    """`response_p95_ms 812 > 500`."""
    payer: CallPays | None = None
    amount: Decimal | None = None
    """None: not priced."""
    currency: str = ""
    spec: SpecId | None = None
    spec_revision: NonNegative = 0
    formula: Text = ""
    islanded: bool = False


class CallsQuery(Contract, frozen=True, kw_only=True):
    """`qry.metering.calls`: newest first."""

    tenant: TenantName | None = None
    site: SiteName | None = None
    offering: OfferingName | None = None
    day: str = ""
    call: CallId | None = None
    state: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=500)] = 100
    after: str = ""
    """The last call of the answer before."""


class CallsReply(Contract, frozen=True, kw_only=True):
    calls: list[CallBook]
    next: str = ""


class DecideCallBody(Contract, frozen=True, kw_only=True):
    """`POST /v1/calls/{call}/decision`: how many tokens a call is taken to have used, of which nobody counted them."""

    site: SiteName
    input_tokens: Annotated[int, msgspec.Meta(ge=0, le=10**12)]
    output_tokens: Annotated[int, msgspec.Meta(ge=0, le=10**12)]
    reason: Annotated[str, msgspec.Meta(min_length=3, max_length=1_000)]


class DecideCall(DecideCallBody, frozen=True, kw_only=True):
    """`cmd.metering.decide_call`: a named person's word; what was counted stands above it, and what was said stays as it was."""

    call: CallId


class AttainmentQuery(Contract, frozen=True, kw_only=True):
    """`qry.metering.call_attainment`: promise against measurement, per month; an empty month is the current one."""

    site: SiteName
    offering: OfferingName
    month: str = ""


class Attainment(Contract, frozen=True, kw_only=True):
    """One offering's month: what was promised is beside what was measured, of the calls whose record is here."""

    site: SiteName
    offering: OfferingName
    month: str
    calls: NonNegative
    answered: NonNegative
    """By the upstream, whatever it said."""
    failed: NonNegative
    """Upstream failed, stalled or timed out: what counts against availability."""
    availability_percent: Decimal | None
    """None: no call was made."""
    kept: NonNegative
    missed: NonNegative
    response_p95_ms: NonNegative | None = None
    first_byte_p95_ms: NonNegative | None = None
    missing_records: NonNegative = 0
    """Calls that the gateway saw taken, and of which no record of the site's has come."""


# --- the owner's door --------------------------------------------------------------------------------------------------------------------


class LocalEndpoint(Contract, frozen=True, kw_only=True):
    """One call offering as its own agent sees it."""

    name: OfferingName
    upstream: str
    available: bool
    paused: bool
    reason: Text = ""
    under_way: NonNegative = 0
    concurrency: Positive = 1
    calls: NonNegative = 0
    """Since the agent's start."""
    refused: NonNegative = 0
    told: bool = False
    """The hub was told of it as it is now."""


class LocalEndpoints(Contract, frozen=True, kw_only=True):
    endpoints: list[LocalEndpoint]
    problem: Text = ""
    """Why none is offered, where the owner wrote some."""
