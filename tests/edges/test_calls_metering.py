"""Calls at metering on PostgreSQL and on its twin, with real keys and seals: late, twice, out of order, at once; on the statement and in the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from tests.conftest import PgDatabase
from tests.core.metering_world import OTHER_SITE, SITE, T0, TENANT, spec
from tests.edges.metering_edge import OPERATOR, Edge, claims

from intertie.bus.rpc import Caller
from intertie.contracts.base import encode
from intertie.contracts.call_offerings import CallOutcome, CallPays, CallPrice
from intertie.contracts.calls import AttainmentQuery, CallBook, CallGrant, CallRecord, CallSeen, CallsQuery, CallsSeen, DecideCall
from intertie.contracts.identity import Claims, Role
from intertie.contracts.link import CallClosed
from intertie.contracts.usage import StatementQuery
from intertie.errors import Denied, NotFound, Refused
from intertie.ids import CallId, OfferingName, PrincipalId, SiteName, TenantName
from intertie.lane.memory import MemoryLaneTables
from intertie.lane.pg import PgLaneTables
from intertie.metering.call_store import CallStore, MemoryCalls, PgCalls
from intertie.metering.calls import Calls
from intertie.metering.memory import MemoryMetering
from intertie.metering.pg import PACKAGE, PgMetering
from intertie.metering.service import sealed_by
from intertie.store import Database, Violated
from intertie.trust.keys import Key
from intertie.trust.seal import seal

GATEWAY = Key.new("U")
CHAT, WHO = OfferingName("chat"), PrincipalId("prn-1")
AMOUNT = Decimal("0.001480")
SERVICE = Caller(Claims(iss="gateway", sub=PrincipalId("gateway"), name="gateway", roles=[Role.SERVICE], iat=0, exp=2**40), "trace")
PRICES = [CallPrice(per_call=Decimal("0.001"), per_1m_input=Decimal(2), per_1m_output=Decimal(6))]


@dataclass
class CallEdge:
    """Metering with calls, and what a site and a gateway say to it."""

    edge: Edge
    store: CallStore
    calls: Calls

    def record(self, number: int, **changes: Any) -> CallRecord:
        call = CallId(f"call-{number:04}")
        site = changes.get("site", SITE)
        grant = CallGrant(call=call, tenant=TENANT, principal=WHO, site=site, offering=CHAT, revision=1, at=T0 + timedelta(seconds=number))
        standard = CallRecord(
            call=call,
            site=SITE,
            offering=CHAT,
            tenant=TENANT,
            grant=seal(GATEWAY, encode(grant), "gateway"),
            revision=1,
            accepted=T0,
            first_byte_us=40_000,
            end_us=1_000_000,
            outcome=CallOutcome.COMPLETED,
            status=200,
            request_bytes=100,
            response_bytes=900,
            input_tokens=120,
            output_tokens=40,
            response_p95_ms=500,
        )
        return msgspec.structs.replace(standard, **changes)

    def entry(self, record: CallRecord, key: Key | None = None) -> CallClosed:
        signer = key or self.edge.key
        return CallClosed(seq=1, at=T0, sealed=seal(signer, encode(record), signer.public))

    async def site(self, number: int, *, lane: SiteName = SITE, key: Key | None = None, **changes: Any) -> None:
        await self.edge.say(self.entry(self.record(number, **changes), key), lane)

    def seen(self, number: int, **changes: Any) -> CallSeen:
        standard = CallSeen(
            call=CallId(f"call-{number:04}"),
            tenant=TENANT,
            principal=WHO,
            site=SITE,
            offering=CHAT,
            opened=T0 + timedelta(seconds=number),
            end_us=1_001_000,
            outcome=CallOutcome.COMPLETED,
            status=200,
            request_bytes=100,
            response_bytes=900,
        )
        return msgspec.structs.replace(standard, **changes)

    async def gateway(self, *seen: CallSeen) -> int:
        return (await self.calls.seen(CallsSeen(calls=list(seen)), SERVICE)).new

    async def book(self, number: int, who: Caller = OPERATOR) -> CallBook:
        (found,) = (await self.calls.listed(CallsQuery(call=CallId(f"call-{number:04}")), who)).calls
        return found

    async def balanced(self) -> tuple[int, int]:
        waiting, differing = await self.store.counted()
        check = await self.edge.check()
        assert check.sum == 0 and check.calls_differing == differing == 0
        return waiting, differing


@pytest.fixture(params=["memory", "pg"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[CallEdge]:
    if request.param == "memory":
        memory = MemoryMetering()
        yield await _made(Edge(memory, MemoryLaneTables(memory)), MemoryCalls(memory))
        return
    pg: PgDatabase = request.getfixturevalue("pg")
    database = await Database.open(pg.url, password=pg.password, schema="metering")
    try:
        await database.migrate(PACKAGE)
        yield await _made(Edge(PgMetering(database), PgLaneTables(database)), PgCalls(database))
    finally:
        await database.close()


async def _made(edge: Edge, store: CallStore) -> CallEdge:
    calls = Calls(store, edge.lanes, sealed_by, GATEWAY.public, edge.clock)
    edge.service.calls = calls
    await edge.know_site()
    await edge.agree(spec(call_prices=PRICES))
    return CallEdge(edge, store, calls)


@pytest.mark.parametrize("first", ["site", "gateway"])
async def test_whichever_word_comes_first_the_call_waits_for_the_other_and_costs_the_same(world: CallEdge, first: str) -> None:
    for said in (first, {"site": "gateway", "gateway": "site"}[first]):
        if said == "site":
            await world.site(1)
        else:
            assert await world.gateway(world.seen(1)) == (1 if first == "gateway" else 0)
        if said == first:
            book = await world.book(1)
            assert (book.state, book.amount) == ("waiting", None)
            assert book.reason == {"site": "gateway_word", "gateway": "site_word"}[first]
    book = await world.book(1)
    assert (book.state, book.payer, book.amount, book.differences) == ("settled", CallPays.TENANT, AMOUNT, [])
    assert book.missed == ["response_p95_ms 1000 > 500"] and book.kept is False
    assert await world.balanced() == (0, 0)


async def test_repeats_and_second_words_change_nothing(world: CallEdge) -> None:
    await world.site(1)
    await world.gateway(world.seen(1))
    await world.site(1)
    await world.site(1, output_tokens=999_999)
    assert await world.gateway(world.seen(1), world.seen(1, outcome=CallOutcome.INTERRUPTED)) == 0
    assert (await world.book(1)).amount == AMOUNT
    assert (await world.edge.statement()).total == AMOUNT
    assert await world.balanced() == (0, 0)


async def test_a_statement_shows_calls_per_offering_and_day_and_its_sums_hold_them(world: CallEdge) -> None:
    for number in range(1, 6):
        await world.site(number)
    await world.site(6, outcome=CallOutcome.INTERRUPTED)
    await world.site(7, input_tokens=None, output_tokens=None)
    await world.gateway(*(world.seen(number) for number in (1, 2, 3, 4, 5, 7)), world.seen(6, outcome=CallOutcome.INTERRUPTED))
    statement = await world.edge.statement()
    [line] = statement.calls
    assert (line.calls, line.amount, line.paid_by_others, line.waiting, line.unknown_tokens) == (7, 5 * AMOUNT, AMOUNT, 1, 1)
    assert line.outcomes == {"completed": 6, "interrupted": 1} and line.day == "2026-12-01"
    assert (statement.total, statement.paid_by_others) == (5 * AMOUNT, AMOUNT)
    other = await world.edge.service.statement(StatementQuery(tenant=TENANT, period="2026-11"), OPERATOR)
    assert other.calls == [] and other.total == 0
    attained = await world.calls.attainment(AttainmentQuery(site=SITE, offering=CHAT, month="2026-12"), OPERATOR)
    assert (attained.calls, attained.answered, attained.failed, attained.missed) == (7, 6, 0, 6)
    assert attained.response_p95_ms == 1_000 and attained.availability_percent == 100


async def test_a_site_bills_no_call_that_nobody_made_and_no_other_sites(world: CallEdge) -> None:
    await world.site(1, grant=seal(world.edge.key, encode({"call": "call-0001"}), "gateway"))
    await world.gateway(world.seen(1))
    assert (await world.book(1)).reason == "no_grant"
    await world.site(2, key=Key.new("U"))
    await world.gateway(world.seen(2))
    assert (await world.book(2)).reason == "unproven"
    with pytest.raises(Refused, match=r"metering\.call"):
        await world.site(3, lane=SiteName("site-c"))
    # What another site says of this call is a call of its own, and takes nothing from this one.
    thief = Key.new("U")
    await world.edge.know_site(OTHER_SITE, key=thief)
    await world.site(4, lane=OTHER_SITE, key=thief, site=OTHER_SITE, tenant=TenantName("rich"))
    await world.site(4)
    await world.gateway(world.seen(4))
    books = (await world.calls.listed(CallsQuery(call=CallId("call-0004")), OPERATOR)).calls
    assert sorted((book.site, book.state) for book in books) == [(SITE, "settled"), (OTHER_SITE, "suspense")]
    assert (await world.edge.statement()).total == AMOUNT
    await world.balanced()


async def test_a_key_or_a_price_that_comes_later_releases_what_waited(world: CallEdge) -> None:
    late = Key.new("U")
    await world.site(1, key=late)
    await world.gateway(world.seen(1))
    assert (await world.book(1)).reason == "unproven"
    await world.edge.know_site(version=2, key=late)
    await world.calls.reconsider()
    assert (await world.book(1)).state == "settled"
    await world.site(2, offering=OfferingName("other"))
    assert (await world.book(2)).reason == "no_grant"


async def test_a_gateway_whose_record_never_comes_does_not_hold_the_site_for_ever(world: CallEdge) -> None:
    await world.site(1)
    await world.calls.reconsider()
    assert (await world.book(1)).reason == "gateway_word"
    world.edge.wait(world.edge.clock.now() + timedelta(minutes=16))
    await world.calls.reconsider()
    book = await world.book(1)
    assert (book.state, book.differences) == ("settled", ["gateway_word_missing"])
    assert await world.gateway(world.seen(1)) == 0
    assert (await world.book(1)).differences == [] and (await world.edge.statement()).total == AMOUNT
    await world.balanced()


async def test_both_words_of_many_calls_at_once_are_one_truth(world: CallEdge) -> None:
    """No decider beside another: neither a lost word nor a doubled posting."""
    entries = [await world.edge.receive(world.entry(world.record(number))) for number in range(20)]

    async def lane() -> None:
        for entry in entries:
            await world.edge.service.interpret(entry)

    async def gateway(start: int) -> None:
        for number in range(start, 20, 2):
            await world.gateway(world.seen(number), world.seen((number + 7) % 20))

    await asyncio.gather(lane(), gateway(0), gateway(1))
    statement = await world.edge.statement()
    assert (statement.calls[0].calls, statement.total) == (20, 20 * AMOUNT)
    assert await world.balanced() == (0, 0)


async def test_br_092_a_person_decides_what_nobody_counted_once_and_with_a_reason(world: CallEdge) -> None:
    gone = CallOutcome.CLIENT_GONE
    await world.site(1, input_tokens=None, output_tokens=None, outcome=gone)
    await world.gateway(world.seen(1, outcome=gone))
    await world.site(2)
    await world.gateway(world.seen(2))
    ask = DecideCall(site=SITE, call=CallId("call-0001"), input_tokens=120, output_tokens=40, reason="half of the answer was read")
    with pytest.raises(Denied):
        await world.calls.decide(ask, claims(Role.TENANT_ADMIN, tenant=TENANT))
    book = await world.calls.decide(ask, OPERATOR)
    assert (book.state, book.amount, book.estimated, book.output_tokens) == ("settled", AMOUNT, True, None)
    assert "half of the answer" in book.decided
    with pytest.raises(Refused, match="not what it waits for"):
        await world.calls.decide(msgspec.structs.replace(ask, output_tokens=9), OPERATOR)
    with pytest.raises(Refused, match="not what it waits for"):
        await world.calls.decide(msgspec.structs.replace(ask, call=CallId("call-0002")), OPERATOR)
    with pytest.raises(NotFound):
        await world.calls.decide(msgspec.structs.replace(ask, call=CallId("call-0009")), OPERATOR)
    assert (await world.edge.statement()).total == 2 * AMOUNT
    assert await world.balanced() == (0, 0)


async def test_who_sees_which_calls(world: CallEdge) -> None:
    await world.site(1)
    await world.gateway(world.seen(1))
    mine = await world.calls.listed(CallsQuery(), claims(Role.TENANT_USER, tenant=TENANT))
    assert [book.amount for book in mine.calls] == [AMOUNT]
    owner = await world.calls.listed(CallsQuery(), claims(Role.SITE_OWNER, site=SITE))
    assert [(book.amount, book.formula, book.principal, book.output_tokens) for book in owner.calls] == [(None, "", None, 40)]
    assert not (await world.calls.listed(CallsQuery(), claims(Role.TENANT_USER, tenant="rival"))).calls
    with pytest.raises(NotFound):
        await world.calls.listed(CallsQuery(tenant=TENANT), claims(Role.TENANT_USER, tenant="rival"))
    with pytest.raises(NotFound):
        await world.calls.attainment(AttainmentQuery(site=SITE, offering=CHAT), claims(Role.TENANT_USER, tenant="rival"))
    with pytest.raises(Denied):
        await world.calls.seen(CallsSeen(calls=[world.seen(2)]), OPERATOR)


async def test_pages_go_on_where_the_last_one_ended(world: CallEdge) -> None:
    await world.gateway(*(world.seen(number) for number in range(7)))
    found: list[str] = []
    after = ""
    while True:
        reply = await world.calls.listed(CallsQuery(limit=3, after=after), OPERATOR)
        found += [book.call for book in reply.calls]
        if not reply.next:
            break
        after = reply.next
    assert found == [f"call-{number:04}" for number in reversed(range(7))]


async def test_the_database_refuses_a_changed_word(pg: PgDatabase) -> None:
    database = await Database.open(pg.url, password=pg.password, schema="metering")
    try:
        await database.migrate(PACKAGE)
        world = await _made(Edge(PgMetering(database), PgLaneTables(database)), PgCalls(database))
        await world.site(1)
        for change in ("UPDATE call SET payload = '{}'", "DELETE FROM call"):
            with pytest.raises(Violated):
                async with database.transaction() as tx:
                    await tx.run(change)
    finally:
        await database.close()
