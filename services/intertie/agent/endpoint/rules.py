"""What the owner writes of a call offering in `site.toml`: `[[endpoint]]`. Pure; `intertie.agent.core.rules` holds the field."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from intertie.contracts.call_offerings import (
    CallLimits,
    CallOffering,
    CallPrice,
    CallPromise,
    CallProtocol,
)
from intertie.errors import Refused
from intertie.ids import OfferingName, PoolName, name

# A quoted number: a TOML float would be a float.
Money = Annotated[str, msgspec.Meta(pattern=r"^\d{1,12}(\.\d{1,12})?$")]


class EndpointPrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the owner asks. Amounts are written in quotes: `per_1m_output = "6.00"`."""

    currency: Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")] = "CNY"
    per_call: Money = "0"
    per_1m_input: Money = "0"
    per_1m_output: Money = "0"
    per_second: Money = "0"


class EndpointPromise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the owner promises; each is measured per call."""

    response_p95_ms: Annotated[int, msgspec.Meta(ge=1)] | None = None
    first_byte_p95_ms: Annotated[int, msgspec.Meta(ge=1)] | None = None
    availability_percent: Annotated[str, msgspec.Meta(pattern=r"^(100|\d{1,2}(\.\d{1,3})?)$")] | None = None


class EndpointRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[endpoint]]`."""

    name: str
    upstream: str
    """`http://127.0.0.1:8000`: where the owner's own server listens; never chosen by a caller. `http-json`: the whole address."""
    protocol: CallProtocol = CallProtocol.OPENAI
    pool: str = ""
    title: str = ""
    models: list[str] = []
    tenants: list[str] = []
    price: EndpointPrice = EndpointPrice()
    limits: CallLimits = CallLimits()
    promise: EndpointPromise = EndpointPromise()
    usage_required: bool = False
    health: str = ""
    """A path that answers below 500 while the server is well; empty: `/v1/models` for openai, else that it can be connected to."""
    api_key_file: str = ""
    """The upstream's own key, sent as a bearer token to it alone."""


def offering_of(rule: EndpointRule) -> CallOffering:
    """What is told of it: all but the upstream. `Refused('endpoint.rule')` names what is wrong."""
    problem = ""
    try:
        name(rule.name, "endpoint")
    except Refused as err:
        problem = err.text
    try:
        address = urlsplit(rule.upstream)
        can_be_asked = bool(address.hostname) and (address.port is None or address.port > 0)
        # A name that no resolver takes is told now, not by the first look at it.
        (address.hostname or "").encode("idna")
    except ValueError:
        address, can_be_asked = urlsplit(""), False
    if address.scheme not in ("http", "https") or not can_be_asked:
        problem = problem or f"upstream {rule.upstream[:80]!r} is no http address"
    elif address.username or address.password or address.query or address.fragment:
        problem = problem or "an upstream is host, port and path; its key goes into api_key_file"
    elif rule.health and not rule.health.startswith("/"):
        problem = problem or "health is a path, such as /health"
    elif any(not model or len(model) > 300 for model in rule.models):
        problem = problem or "a model's name has 1 to 300 characters"
    elif any(tenant != "*" and not tenant.strip() for tenant in rule.tenants):
        problem = problem or "a tenant's name is empty"
    if problem:
        raise Refused(
            "endpoint.rule", f"[[endpoint]] {rule.name[:63]!r}: {problem}", next_step="correct it in site.toml, and restart the agent"
        )
    price, promise = rule.price, rule.promise
    percent = promise.availability_percent
    return CallOffering(
        name=OfferingName(rule.name),
        pool=PoolName(rule.pool) if rule.pool else None,
        protocol=rule.protocol,
        title=rule.title,
        models=rule.models,
        price=CallPrice(
            per_call=Decimal(price.per_call),
            per_1m_input=Decimal(price.per_1m_input),
            per_1m_output=Decimal(price.per_1m_output),
            per_second=Decimal(price.per_second),
        ),
        currency=price.currency,
        limits=rule.limits,
        promise=CallPromise(
            response_p95_ms=promise.response_p95_ms,
            first_byte_p95_ms=promise.first_byte_p95_ms,
            availability_percent=Decimal(percent) if percent is not None else None,
        ),
        tenants=rule.tenants,
        usage_required=rule.usage_required,
    )


def offerings_of(rules: list[EndpointRule]) -> list[tuple[EndpointRule, CallOffering]]:
    """All of them; two of one name are refused."""
    found = [(rule, offering_of(rule)) for rule in rules]
    names = [rule.name for rule in rules]
    if doubled := sorted({one for one in names if names.count(one) > 1}):
        raise Refused("endpoint.rule", f"two [[endpoint]] are called {', '.join(doubled)}", next_step="give each its own name")
    return found
