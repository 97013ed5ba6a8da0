"""Call offerings: what a site's owner promises to answer, call by call, without giving any control away; and what a call costs.

The owner declares an offering in `site.toml`; the site tells it on the registry lane; calls enter at the gateway (`contracts.calls`).
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from intertie.contracts.base import Contract, Event, Instant, NonNegative, Positive, Text
from intertie.ids import OfferingName, PoolName, SiteName, TenantName

MOST_BODY = 16 * 1024 * 1024
# The longest answer that anybody waits for over one HTTP request.
LONGEST_S = 86_400


class CallProtocol(StrEnum):
    """openai: chat completions, completions, embeddings, responses, with streaming. http-json: one POST of JSON."""

    OPENAI = "openai"
    HTTP_JSON = "http-json"


PATHS: Mapping[CallProtocol, frozenset[str]] = {
    CallProtocol.OPENAI: frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"}),
    CallProtocol.HTTP_JSON: frozenset({"/call"}),
}
"""What may be called of each protocol, below `/v1/offerings/{site}/{name}`; all are POST."""


class CallOutcome(StrEnum):
    """How a call ended. Exactly one per call."""

    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    """The upstream itself ended early, and said so."""
    CLIENT_GONE = "client_gone"
    REJECTED = "rejected"
    """The upstream answered 4xx: the request was wrong."""
    UPSTREAM_FAILED = "upstream_failed"
    """The upstream answered 5xx, could not be reached, or broke off."""
    UPSTREAM_STALLED = "upstream_stalled"
    """The upstream said nothing for the offering's `stall_s`."""
    TIMED_OUT = "timed_out"
    """The offering's `max_duration_s` passed."""
    INTERRUPTED = "interrupted"
    """The way between caller and site broke: bus, gateway or agent."""
    REFUSED = "refused"
    """It never reached the upstream: paused, busy, not allowed."""


class CallPays(StrEnum):
    """Who pays what a call used. `free`: nobody owes it."""

    TENANT = "tenant"
    SITE = "site"
    PLATFORM = "platform"
    FREE = "free"


DEFAULT_CALL_PAYS: Mapping[str, CallPays] = {
    CallOutcome.COMPLETED.value: CallPays.TENANT,
    CallOutcome.INCOMPLETE.value: CallPays.TENANT,
    CallOutcome.CLIENT_GONE.value: CallPays.TENANT,
    CallOutcome.TIMED_OUT.value: CallPays.TENANT,
    CallOutcome.REJECTED.value: CallPays.FREE,
    CallOutcome.UPSTREAM_FAILED.value: CallPays.FREE,
    CallOutcome.UPSTREAM_STALLED.value: CallPays.FREE,
    CallOutcome.INTERRUPTED.value: CallPays.PLATFORM,
    CallOutcome.REFUSED.value: CallPays.FREE,
}
"""Unless an agreement says otherwise: what was produced is the caller's; a broken way is the platform's; a broken upstream costs nobody."""


class CallPrice(Contract, frozen=True, kw_only=True):
    """What one call costs: the sum of its parts. A clause of a meter spec, or what an owner asks."""

    offering: str = ""
    """`site/name`; empty: every offering without a price of its own."""
    per_call: Decimal = Decimal(0)
    per_1m_input: Decimal = Decimal(0)
    """For a million tokens of the request."""
    per_1m_output: Decimal = Decimal(0)
    per_second: Decimal = Decimal(0)
    """From acceptance at the site to the end."""
    rounding: Decimal = Decimal("0.000001")
    """Money is rounded half-even to this, once per call."""
    unknown_tokens: Annotated[str, msgspec.Meta(pattern="^(suspense|events)$")] = "suspense"
    """A token price without a count: it waits for a person; or each event of a stream counts as one token of output, and is said to be estimated."""


class CallLimits(Contract, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one offering bears. Bounds on everything: a caller cannot make them larger."""

    max_body_bytes: Annotated[int, msgspec.Meta(ge=1, le=MOST_BODY)] = 1024 * 1024
    max_answer_bytes: Annotated[int, msgspec.Meta(ge=1, le=1024 * 1024 * 1024)] = 64 * 1024 * 1024
    max_duration_s: Annotated[int, msgspec.Meta(ge=1, le=LONGEST_S)] = 600
    stall_s: Annotated[int, msgspec.Meta(ge=1, le=LONGEST_S)] = 60
    """Silence of the upstream, before its first byte or between two."""
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 8
    """Calls under way at the site, of all tenants."""
    per_minute: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 600
    """Calls of one tenant within a minute, at each gateway."""


class CallPromise(Contract, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is promised of the offering, each measured per call; None: not promised."""

    response_p95_ms: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """95 of 100 calls are over within this."""
    first_byte_p95_ms: Annotated[int, msgspec.Meta(ge=1)] | None = None
    availability_percent: Decimal | None = None
    """Of the calls that were made, so many were answered by the upstream."""


class CallOffering(Contract, frozen=True, kw_only=True):
    """What an owner declares. The upstream's address is the owner's own and never told."""

    name: OfferingName
    pool: PoolName | None = None
    """The pool that answers, where it is one of the site's pools."""
    protocol: CallProtocol
    title: Text = ""
    models: Annotated[list[str], msgspec.Meta(max_length=200)] = []
    """Served; a request that names another is refused. Empty: whatever the upstream takes."""
    price: CallPrice = CallPrice()
    """What the owner asks, in `currency`: the platform's own price to a tenant is in their agreement."""
    currency: Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")] = "CNY"
    limits: CallLimits = CallLimits()
    promise: CallPromise = CallPromise()
    tenants: Annotated[list[str], msgspec.Meta(max_length=1_000)] = []
    """Who may call; `*` for every tenant. Empty: nobody."""
    usage_required: bool = False
    """A streamed request must ask for its usage (`stream_options.include_usage`), else it is refused."""

    def admits(self, tenant: TenantName | str | None) -> bool:
        return tenant is not None and ("*" in self.tenants or tenant in self.tenants)


class OfferingTold(Contract, frozen=True, kw_only=True):
    """An offering as its site sees it now."""

    offering: CallOffering
    available: bool
    """The owner has not paused it, and the upstream answered the last look."""
    paused: bool = False
    reason: Text = ""
    """Why it is not available."""


class OfferingRecord(Contract, frozen=True, kw_only=True):
    """A site's call offering as the registry keeps it."""

    site: SiteName
    offering: CallOffering
    revision: Positive
    """Of what was declared; availability does not count it."""
    available: bool
    paused: bool = False
    reason: Text = ""
    withdrawn: bool = False
    """The owner offers it no more."""
    told_at: Instant
    """The site's clock."""
    version: Positive

    @property
    def id(self) -> str:
        return f"{self.site}/{self.offering.name}"


class CallOfferingChanged(Event, frozen=True, kw_only=True):
    """A call offering's record is now this."""

    TYPE: ClassVar[str] = "io.intertie.calloffering.changed.v1"
    SERVICE: ClassVar[str] = "registry"

    record: OfferingRecord

    @property
    def entity(self) -> str:
        return f"call/{self.record.id}"

    @property
    def site_token(self) -> str:
        return self.record.site


class OfferingsQuery(Contract, frozen=True, kw_only=True):
    """`qry.registry.call_offerings`: those that the caller may call, or see."""

    site: SiteName | None = None
    name: OfferingName | None = None
    withdrawn: bool = False
    """Also those that are offered no more."""
    after: str = ""
    """`site/name`: the `next` of the answer before."""


class OfferingsReply(Contract, frozen=True, kw_only=True):
    """By site and name, as many as an answer holds."""

    offerings: list[OfferingRecord]
    next: str = ""
    """Not empty: there are more; ask again with it as `after`."""


class CallLine(Contract, frozen=True, kw_only=True):
    """A statement's calls of one offering on one day of the settlement time zone; `GET /v1/calls` unfolds it to each call."""

    site: SiteName
    offering: OfferingName
    day: str
    """`2026-12-01`."""
    calls: NonNegative
    amount: Decimal
    """What the tenant pays."""
    paid_by_others: Decimal = Decimal(0)
    input_tokens: NonNegative = 0
    output_tokens: NonNegative = 0
    unknown_tokens: NonNegative = 0
    """Calls whose tokens nobody counted."""
    waiting: NonNegative = 0
    """Calls that are not priced yet, or wait for a person: see the call."""
    outcomes: dict[str, int] = {}
    text: Text = ""
    """The amount as a sum of its parts."""
