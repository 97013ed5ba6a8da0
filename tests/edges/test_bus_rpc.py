"""Typed calls: errors come back as what they were, claims are verified by the called side, the trace goes along."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from intertie.bus import rpc
from intertie.bus.memory import MemoryBroker, MemoryBus
from intertie.bus.port import Message
from intertie.contracts import endpoints
from intertie.contracts.base import Empty, encode
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.identity import Authenticate, Authenticated, Claims, CreateTenant, Role, TenantRecord, TenantsReply
from intertie.errors import (
    Conflict,
    Denied,
    IntertieError,
    NotFound,
    Refused,
    Stale,
    Unauthenticated,
    Unavailable,
)
from intertie.ids import PrincipalId, TenantName
from intertie.observe import tracing

ALICE = Claims(iss="identity", sub=PrincipalId("usr-1"), name="alice", roles=[Role.OPERATOR], iat=1, exp=2)


def verifier(signed: str) -> Claims:
    if signed != "alice's word":
        raise Unauthenticated("auth.bad_signature", "the claims are not signed by anybody we know")
    return ALICE


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    made = MemoryBroker().client("both")
    yield made
    await made.close()


async def serving(bus: MemoryBus, endpoint: Endpoint[Any, Any], handler: rpc.Serve, **more: float) -> None:
    await rpc.serve(bus, endpoint.service, "1.0.0", {endpoint: handler}, verifier=verifier, **more)  # type: ignore[arg-type]


async def tenants(bus: MemoryBus, claims: str = "alice's word") -> TenantsReply:
    return await rpc.call(bus, endpoints.TENANTS, Empty(), claims=claims, timeout_s=2)


ERRORS: list[IntertieError] = [
    Refused("tenant.closed", "the tenant is closed", next_step="ask its admin", details={"since": "2026-01-01", "n": 1}),
    NotFound("tenant.unknown", "there is no such tenant"),
    Denied("rights.denied", "you may not"),
    Unauthenticated("auth.expired", "log in again"),
    Conflict("submit.key_reused", "the key was used with other content"),
    Unavailable("store.unavailable", "the database is away", retry_after_s=2.5, next_step="wait"),
    Stale("scheduler.stale", "decide again"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_a_known_error_is_raised_on_the_other_side_as_what_it_was(bus: MemoryBus, error: IntertieError) -> None:
    async def handler(request: Empty, caller: rpc.Caller) -> TenantsReply:
        raise error

    await serving(bus, endpoints.TENANTS, handler)
    with pytest.raises(IntertieError) as told:
        await tenants(bus)
    got = told.value
    assert type(got) is type(error)
    assert (got.code, got.text, got.next_step) == (error.code, error.text, error.next_step)
    assert {key: got.details[key] for key in error.details} == error.details
    if isinstance(error, Unavailable):
        assert isinstance(got, Unavailable) and got.retry_after_s == 2.5


async def test_an_unknown_error_tells_a_trace_id_and_nothing_of_the_inside(bus: MemoryBus, capsys: pytest.CaptureFixture[str]) -> None:
    async def handler(request: Empty, caller: rpc.Caller) -> TenantsReply:
        raise KeyError("the inside: password hunter22")

    await serving(bus, endpoints.TENANTS, handler)
    with tracing.span("test call") as span, pytest.raises(IntertieError) as told:
        await tenants(bus)
    assert told.value.code == "internal" and "hunter22" not in str(told.value)
    assert told.value.details["trace_id"] == f"{span.get_span_context().trace_id:032x}"


async def test_details_that_json_cannot_hold_become_text(bus: MemoryBus) -> None:
    async def handler(request: Empty, caller: rpc.Caller) -> TenantsReply:
        raise Refused("x.y", "text", details={"amount": Decimal("1.10"), "thing": object, "set": {1}})

    await serving(bus, endpoints.TENANTS, handler)
    with pytest.raises(Refused) as told:
        await tenants(bus)
    assert told.value.details["amount"] == "1.10" and told.value.details["set"] == [1]


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b"", "truncated"),
        (b"not json", "malformed"),
        (b'{"tenant": 7}', "$.tenant"),
        (b"[]", "array"),
        (b"{}", "tenant"),
        (b'{"tenant": "\xff"}', "not valid"),
    ],
)
async def test_what_is_no_request_is_refused_with_its_place(bus: MemoryBus, body: bytes, place: str) -> None:
    async def handler(request: CreateTenant, caller: rpc.Caller) -> TenantRecord:
        raise AssertionError("a handler never sees what was not decoded")

    await serving(bus, endpoints.CREATE_TENANT, handler)
    answer = await bus.request(endpoints.CREATE_TENANT.subject, body, timeout_s=2, headers={"Intertie-Claims": "alice's word"})
    problem = json.loads(answer.body)
    assert problem["code"] == "contract.invalid" and place in problem["text"]


@pytest.mark.parametrize(("claims", "code"), [("", "auth.no_claims"), ("mallory's word", "auth.bad_signature")], ids=["none", "forged"])
async def test_a_call_without_valid_claims_is_refused_by_the_called_service(bus: MemoryBus, claims: str, code: str) -> None:
    async def handler(request: Empty, caller: rpc.Caller) -> TenantsReply:
        raise AssertionError("a handler never sees who was not verified")

    await serving(bus, endpoints.TENANTS, handler)
    with pytest.raises(Unauthenticated) as told:
        await tenants(bus, claims)
    assert told.value.code == code


async def test_an_endpoint_that_brings_its_own_proof_needs_no_claims(bus: MemoryBus) -> None:
    async def handler(request: Authenticate, caller: rpc.Caller) -> Authenticated:
        assert caller.verified is None
        with pytest.raises(Unauthenticated):
            _ = caller.claims
        return Authenticated(claims=ALICE, signed=request.token)

    await serving(bus, endpoints.AUTHENTICATE, handler)
    reply = await rpc.call(bus, endpoints.AUTHENTICATE, Authenticate(token="t"), timeout_s=2)
    assert reply.claims == ALICE


async def test_the_caller_is_who_signed_and_the_trace_is_the_callers(bus: MemoryBus) -> None:
    seen: list[rpc.Caller] = []

    async def handler(request: CreateTenant, caller: rpc.Caller) -> TenantRecord:
        seen.append(caller)
        return _record(request.tenant)

    await serving(bus, endpoints.CREATE_TENANT, handler)
    with tracing.span("test call") as span:
        await rpc.call(bus, endpoints.CREATE_TENANT, CreateTenant(tenant=TenantName("t")), claims="alice's word", timeout_s=2)
    assert seen[0].claims == ALICE and seen[0].signed == "alice's word"
    assert seen[0].trace_id == f"{span.get_span_context().trace_id:032x}"


def _record(tenant: TenantName) -> TenantRecord:
    return TenantRecord(tenant=tenant, title="", created_at=datetime(2026, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize("header", ["", "garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 8_192])
async def test_a_bad_trace_header_is_a_new_trace_and_no_error(bus: MemoryBus, header: str) -> None:
    """BR-134."""
    seen: list[str] = []

    async def handler(request: Empty, caller: rpc.Caller) -> TenantsReply:
        seen.append(caller.trace_id)
        return TenantsReply(tenants=[])

    await serving(bus, endpoints.TENANTS, handler)
    headers = {"intertie-claims": "alice's word", "traceparent": header, "baggage": "k=" + "v" * 8_000}
    answer = await bus.request(endpoints.TENANTS.subject, encode(Empty()), timeout_s=2, headers=headers)
    assert answer.body == encode(TenantsReply(tenants=[]))
    assert len(seen[0]) == 32 and int(seen[0], 16)


@pytest.mark.parametrize("name", ["traceparent", "Traceparent", "TRACEPARENT"])
async def test_a_trace_goes_on_however_its_header_is_spelt_and_foreign_baggage_goes_no_further(bus: MemoryBus, name: str) -> None:
    """BR-134: the service behind the called one sees the same trace, and nothing else that came from outside."""
    seen: list[Mapping[str, str]] = []

    async def further(message: Message) -> bytes:
        seen.append(message.headers)
        return encode(TenantsReply(tenants=[]))

    async def handler(request: CreateTenant, caller: rpc.Caller) -> TenantRecord:
        await tenants(bus)
        return _record(request.tenant)

    await bus.subscribe(endpoints.TENANTS.subject, further)
    await serving(bus, endpoints.CREATE_TENANT, handler)
    outside = {"intertie-claims": "alice's word", name: "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "baggage": "k=" + "v" * 8_190}
    await bus.request(
        endpoints.CREATE_TENANT.subject, encode(CreateTenant(tenant=TenantName("t"))), timeout_s=2, headers={**outside, "tracestate": "x=y"}
    )
    assert seen[0].keys() == {"traceparent", "intertie-claims"}
    (trace, parent) = seen[0]["traceparent"].split("-")[1:3]
    assert trace == "a" * 32 and parent != "b" * 16


async def test_a_handler_that_hangs_gives_its_worker_back(bus: MemoryBus) -> None:
    async def handler(request: Empty, caller: rpc.Caller) -> TenantsReply:
        await asyncio.Event().wait()
        raise AssertionError

    await serving(bus, endpoints.TENANTS, handler, limit_s=0.05)
    with pytest.raises(Unavailable) as told:
        await tenants(bus)
    assert told.value.code == "rpc.slow"


async def test_a_service_that_nobody_runs_is_unavailable(bus: MemoryBus) -> None:
    with pytest.raises(Unavailable) as told:
        await tenants(bus)
    assert told.value.code == "bus.no_responder"


async def test_a_call_is_repeated_while_the_service_is_away(bus: MemoryBus) -> None:
    tries: list[int] = []

    async def handler(request: Empty, caller: rpc.Caller) -> TenantsReply:
        tries.append(1)
        if len(tries) < 3:
            raise Unavailable("store.unavailable", "not now", retry_after_s=0.01)
        return TenantsReply(tenants=[])

    await serving(bus, endpoints.TENANTS, handler)
    assert await rpc.call_again(bus, endpoints.TENANTS, Empty(), claims="alice's word", tries=3) == TenantsReply(tenants=[])


async def test_an_answer_of_another_version_is_not_blamed_on_the_caller(bus: MemoryBus) -> None:
    async def strange(message: Message) -> bytes:
        return b'{"tenants": 1}'

    await bus.serve("identity", "9.0.0", {endpoints.TENANTS.subject: strange})
    with pytest.raises(IntertieError) as told:
        await tenants(bus)
    assert told.value.code == "rpc.bad_answer" and not isinstance(told.value, Refused)


async def test_a_handler_that_answers_with_the_wrong_thing_is_our_bug(bus: MemoryBus) -> None:
    async def handler(request: Empty, caller: rpc.Caller) -> Empty:
        return Empty()

    await serving(bus, endpoints.TENANTS, handler)
    with pytest.raises(IntertieError) as told:
        await tenants(bus)
    assert told.value.code == "internal"
