"""Calls at metering: the site's sealed records come on the lane, the gateway's by command; statements and lists go out. The question is `core.calls`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec

from intertie.bus.rpc import Caller, Serve
from intertie.clock import Clock
from intertie.contracts import endpoints
from intertie.contracts.base import encode
from intertie.contracts.call_offerings import CallLine
from intertie.contracts.calls import (
    Attainment,
    AttainmentQuery,
    CallBook,
    CallSeen,
    CallsQuery,
    CallsReply,
    CallsSeen,
    CallsTaken,
    DecideCall,
)
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.link import CallClosed
from intertie.contracts.usage import LedgerCheck, Statement
from intertie.errors import Denied, NotFound, Refused
from intertie.ids import CallId, SiteName, TenantName
from intertie.lane.tables import LaneEntry
from intertie.metering.call_store import CallStore, Key, News, SummedCalls
from intertie.metering.core import calls as core
from intertie.metering.core.agreements import DEFAULT_ZONE
from intertie.metering.core.attribution import Verify
from intertie.metering.core.ledger import add
from intertie.metering.core.periods import bounds, period_of
from intertie.metering.words import Marks
from intertie.rating.text import money_text
from intertie.store import StoreTx
from intertie.trust import rights

# Calls looked at together, and pages of one round: a site that floods costs each round a second or two.
PAGE = 100
SWEEP_PAGES = 20
# An answer fits one message of the bus with room to spare.
ANSWER_BYTES = 512 * 1024
FIRST: Key = (SiteName(""), CallId(""))


class Calls:
    """Metering's part in calls."""

    def __init__(self, store: CallStore, lanes: Marks, verify: Verify, gateway_key: str, clock: Clock) -> None:
        self._store, self._lanes, self._verify, self._gateway_key, self._clock = store, lanes, verify, gateway_key, clock
        self._swept = FIRST

    def handlers(self) -> Mapping[Endpoint[Any, Any], Serve]:
        return {
            endpoints.CALLS: self.listed,
            endpoints.CALL_ATTAINMENT: self.attainment,
            endpoints.CALLS_SEEN: self.seen,
            endpoints.DECIDE_CALL: self.decide,
        }

    def _ask(self, evidence: core.CallEvidence) -> core.CallReckoning:
        return core.settle(evidence, self._verify, self._gateway_key, self._clock.now())

    # --- what comes ---

    async def closed(self, entry: LaneEntry, said: CallClosed) -> None:
        """One record of a site. What is none raises, and goes to quarantine."""
        word = core.site_word(entry.site, said.sealed, entry.received_at)

        async def mark(tx: StoreTx) -> bool:
            await self._lanes.mark_interpreted(tx, entry)
            return True

        await self._store.reckon({(entry.site, word.record.call): lambda before: core.with_word(before, word)}, self._ask, mark)

    async def seen(self, ask: CallsSeen, caller: Caller) -> CallsTaken:
        """The gateway's records; each once, however often they come."""
        rights.require(caller.claims, "call.seen")
        if caller.claims.sub != "gateway":
            raise Denied("rights.denied", "only the gateway sees calls")
        now = self._clock.now()
        return CallsTaken(new=await self._store.reckon({(one.site, one.call): _saw(one, now) for one in ask.calls}, self._ask))

    async def decide(self, ask: DecideCall, caller: Caller) -> CallBook:
        """A named person says how many tokens a call is taken to have used; priced at once, and marked as estimated."""
        rights.require(caller.claims, "call.decide")
        who = f"{caller.claims.name} ({caller.claims.sub})"
        decided = core.Decided(ask.input_tokens, ask.output_tokens, who, ask.reason, self._clock.now())
        query = CallsQuery(site=ask.site, call=ask.call, limit=1)
        [*before] = await self._store.find(query)
        if not before:
            raise NotFound(
                "metering.no_call", f"there is no call {ask.call[:80]} of {ask.site[:63]}", next_step="intertie calls --state suspense"
            )
        if before[0].reason != "tokens_unknown":
            raise Refused(
                "metering.not_decidable", f"{ask.call} is {before[0].state} {before[0].reason}: its tokens are not what it waits for"
            )
        await self._store.decide((ask.site, ask.call), decided, self._ask)
        return (await self._store.find(query))[0]

    async def reconsider(self) -> None:
        """The slow loop: ask again about what is not settled; the next part of it each time."""
        for _ in range(SWEEP_PAGES):
            page = await self._store.open_calls(self._swept, PAGE)
            if page:
                await self._store.reckon({key: lambda before: before for key in page}, self._ask)
            self._swept = page[-1] if len(page) == PAGE else FIRST
            if self._swept == FIRST:
                return

    # --- what goes out ---

    async def listed(self, query: CallsQuery, caller: Caller) -> CallsReply:
        """Calls that the caller may see; a site's owner sees use, not the platform's price to a tenant."""
        seen = rights.scope(caller.claims, "call.read")
        if not seen.everything:
            if seen.tenant is not None and query.tenant in (None, seen.tenant):
                query = msgspec.structs.replace(query, tenant=seen.tenant)
            elif seen.site is not None and query.site in (None, seen.site):
                query = msgspec.structs.replace(query, site=seen.site)
            else:
                raise rights.not_found()
        found = await self._store.find(query)
        told: list[CallBook] = []
        size = 0
        for book in found:
            shown = book if seen.covers(tenant=book.tenant) else _without_price(book)
            size += len(encode(shown))
            if told and size > ANSWER_BYTES:
                break
            told.append(shown)
        more = len(told) < len(found) or len(found) == query.limit
        return CallsReply(calls=told, next=told[-1].call if told and more else "")

    async def attainment(self, query: AttainmentQuery, caller: Caller) -> Attainment:
        """Promise against measurement, of one month of the platform's time zone; a tenant's only where it has called."""
        seen = rights.scope(caller.claims, "offering.read")
        if not seen.covers(site=query.site):
            own = CallsQuery(tenant=seen.tenant, site=query.site, offering=query.offering, limit=1)
            if seen.tenant is None or not await self._store.find(own):
                raise rights.not_found()
        month = query.month or period_of(self._clock.now(), DEFAULT_ZONE)
        found = await self._store.attained(query.site, query.offering, *bounds(month, DEFAULT_ZONE))
        judged = found.answered + found.failed
        return Attainment(
            site=query.site,
            offering=query.offering,
            month=month,
            calls=found.calls,
            answered=found.answered,
            failed=found.failed,
            availability_percent=(Decimal(found.answered) * 100 / judged).quantize(Decimal("0.001")) if judged else None,
            kept=found.kept,
            missed=found.missed,
            response_p95_ms=None if found.response_us is None else found.response_us // 1_000,
            first_byte_p95_ms=None if found.first_byte_us is None else found.first_byte_us // 1_000,
            missing_records=found.missing,
        )

    async def on_statement(self, statement: Statement) -> Statement:
        """The statement with its calls, whose amounts are in its sums."""
        summed = await self._store.summed(TenantName(statement.tenant), statement.start, statement.end)
        if not summed:
            return statement
        lines = call_lines(summed, statement.currency)
        return msgspec.structs.replace(
            statement,
            calls=lines,
            total=add([statement.total, *(line.amount for line in lines)]),
            paid_by_others=add([statement.paid_by_others, *(line.paid_by_others for line in lines)]),
        )

    async def on_check(self, check: LedgerCheck) -> LedgerCheck:
        """The ledger's proof with its calls."""
        waiting, differing = await self._store.counted()
        text = "the ledger does not agree with the calls' records" if differing else check.text
        return msgspec.structs.replace(check, calls_waiting=waiting, calls_differing=differing, text=text)


def _saw(seen: CallSeen, at: datetime) -> News:
    return lambda before: core.with_seen(before, seen, at)


def _without_price(book: CallBook) -> CallBook:
    return msgspec.structs.replace(book, payer=None, amount=None, currency="", formula="", spec=None, spec_revision=0, principal=None)


def call_lines(summed: Sequence[SummedCalls], currency: str) -> list[CallLine]:
    """One line per offering and day, of its outcomes."""
    grouped: dict[tuple[str, SiteName, str], list[SummedCalls]] = {}
    for one in summed:
        grouped.setdefault((one.day, one.site, one.offering), []).append(one)
    lines: list[CallLine] = []
    for (day, site, _), parts in grouped.items():
        amount = add(part.amount for part in parts)
        calls, given, made = (sum(getattr(part, name) for part in parts) for name in ("calls", "input_tokens", "output_tokens"))
        lines.append(
            CallLine(
                site=site,
                offering=parts[0].offering,
                day=day,
                calls=calls,
                amount=amount,
                paid_by_others=add(part.others for part in parts),
                input_tokens=given,
                output_tokens=made,
                unknown_tokens=sum(part.unknown for part in parts),
                waiting=sum(part.waiting for part in parts),
                outcomes={part.outcome: part.calls for part in parts},
                text=f"{calls} calls, {given} tokens in, {made} out: the sum of their formulas = {money_text(amount, currency)}",
            )
        )
    return lines
