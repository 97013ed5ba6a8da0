"""Metering: measured segments, agreements and the scheduler's word in; a ledger, books and statements out.

This is the shell: it loads, asks the core, saves. Segments come on the metering lane, attempts and keys as events (and as snapshots when
behind), agreements as commands. Whatever comes leads to the same question (`core.reckon`), so order, repeats and crashes change nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from intertie.bus.port import Bus
from intertie.bus.rpc import Caller, Serve, call_again
from intertie.clock import Clock
from intertie.contracts import endpoints
from intertie.contracts.base import Empty, EventMeta
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.identity import AuditQuery, AuditReply, Claims, SiteKeyChanged
from intertie.contracts.job import AttemptChanged, AttemptSnapshot, AttemptsQuery, JobChanged
from intertie.contracts.link import Sealed, SegmentClosed
from intertie.contracts.usage import (
    AgreeSpec,
    Allowance,
    AttemptBook,
    BookQuery,
    BooksReply,
    LedgerCheck,
    MeteringSnapshotReply,
    MeterSpec,
    SetAllowance,
    SpecAgreed,
    SpecsQuery,
    SpecsReply,
    Statement,
    StatementQuery,
)
from intertie.errors import Refused, Stale
from intertie.ids import AttemptId, SiteName, SpecId, TenantName, mint
from intertie.lane.tables import LaneEntry
from intertie.metering.core import ledger
from intertie.metering.core.agreements import DEFAULT_ZONE, PLATFORM, in_force, next_revision
from intertie.metering.core.books import ended
from intertie.metering.core.evidence import Evidence, received
from intertie.metering.core.periods import period_of
from intertie.metering.core.reckon import Reckoning, Trust, book_of, change, reckon
from intertie.metering.core.statements import Sum
from intertie.metering.store import Mark, MeteringStore, event_mark
from intertie.observe import log
from intertie.store import StoreTx, audit_reply
from intertie.trust import keys, rights, seal

LOG = log.get("metering")

# Two deciders about one attempt at once: each round one of them wins, so eight tries are enough for as many workers.
TRIES = 8

# Attempts looked at together: their segments fit in memory, and the loop is free again between two pages.
PAGE = 100

# A site that floods suspense costs each round a second or two, not all of it.
SWEEP_PAGES = 10

# Segments of one attempt: a year of period borders and pauses is some hundreds. Each is judged beside all others of its attempt.
SEGMENTS = 2_000

# Attempts named in an answer; whoever has more of them has one fault, not a hundred.
NAMED = 100

# What a hub settles in before it has any agreement.
DEFAULT_CURRENCY = "CNY"


class Marks(Protocol):
    """All that interpreting needs of the lane tables."""

    async def mark_interpreted(self, tx: StoreTx, entry: LaneEntry) -> None:
        """In the transaction of the change; `Stale('lane.out_of_turn')` if it was done before or comes too early."""
        ...


def sealed_by(sealed: Sealed, public_key: str) -> bool:
    """Whether this key signed exactly these bytes (`core.attribution.Verify`)."""
    try:
        seal.open_seal(sealed, public_key, msgspec.Raw)
    except Refused:
        return False
    return True


def trust(scheduler_key: str) -> Trust:
    """Believe attributions of this scheduler; `key` errors if the text is no public key."""
    keys.raw_public(scheduler_key)
    return Trust(frozenset({scheduler_key}), sealed_by)


class Metering:
    """One copy of the service. `news` is called when an agreement or a key came that segments may have waited for."""

    def __init__(
        self, store: MeteringStore, lanes: Marks, trusted: Trust, clock: Clock, *, news: Callable[[], None] = lambda: None
    ) -> None:
        self._store, self._lanes, self._trust, self._clock, self._news = store, lanes, trusted, clock, news
        self._swept = ""

    # --- what comes ------------------------------------------------------------------------------------------------------------------------

    async def interpret(self, entry: LaneEntry) -> None:
        """One entry of the metering lane. What is no segment raises, and goes to quarantine; what cannot be believed waits in suspense."""
        item = received(entry.site, entry.journal, entry.seq, entry.read(SegmentClosed).sealed, entry.received_at)

        async def mark(tx: StoreTx) -> bool:
            await self._lanes.mark_interpreted(tx, entry)
            return True

        def news(evidence: Evidence) -> Evidence:
            known = any(item.key == other.key for other in evidence.received)
            if not known and len(evidence.received) >= SEGMENTS:
                raise Refused("metering.too_many_segments", f"attempt {evidence.attempt} has {SEGMENTS} segments already")
            return evidence if known else replace(evidence, received=[*evidence.received, item])

        await self._apply(item.segment.attempt, news, f"segment {item.segment.id}", mark, sites=[item.site])

    async def on_attempt(self, event: AttemptChanged, meta: EventMeta) -> None:
        """The scheduler's record of an attempt: a hold while it is open, completeness at its end."""
        await self._learn_attempt(AttemptSnapshot(record=event.record, wall_s=event.wall_s), event_mark(meta))

    async def on_job(self, event: JobChanged, meta: EventMeta) -> None:
        """A job's name, for statement lines."""
        # PostgreSQL's text holds every character but this one.
        await self._store.learn_name(event.job, event.name.replace("\x00", "\ufffd"), event.version, event_mark(meta))

    async def on_site_key(self, event: SiteKeyChanged, meta: EventMeta) -> None:
        """The keys that speak for a site."""
        if await self._store.learn_key(event, event_mark(meta)):
            self._news()

    async def _learn_attempt(self, snapshot: AttemptSnapshot, mark: Mark | None) -> None:
        # What a job printed is its tenant's and no business of money's.
        snapshot = msgspec.structs.replace(snapshot, record=msgspec.structs.replace(snapshot.record, log_tail=""))

        def news(evidence: Evidence) -> Evidence:
            held = evidence.record
            newer = held is None or snapshot.record.version > held.version
            return replace(evidence, snapshot=snapshot) if newer else evidence

        record = snapshot.record
        await self._apply(record.attempt, news, f"attempt {record.state}", mark, sites=[record.site], tenants=[record.tenant])

    async def _apply(
        self,
        attempt: AttemptId,
        news: Callable[[Evidence], Evidence],
        why: str,
        mark: Mark | None = None,
        *,
        sites: Collection[SiteName] = (),
        tenants: Collection[TenantName] = (),
    ) -> None:
        """Load, add the news, reckon, save; again if somebody else decided about this attempt meanwhile."""
        for left in reversed(range(TRIES)):
            (before,) = await self._store.load([attempt], sites=sites, tenants=tenants)
            reckoning = reckon(news(before), self._trust, self._clock.now(), why)
            try:
                await self._store.save(change(before, reckoning), mark)
                return
            except Stale as stale:
                if stale.code != "metering.changed" or not left:
                    raise

    async def reconsider(self) -> None:
        """The slow loop: look again at what is in suspense for a reason that news may have lifted; the next part of it each time."""
        for _ in range(SWEEP_PAGES):
            page = await self._store.waiting(self._swept, PAGE)
            for attempt in page:
                await self._apply(attempt, lambda evidence: evidence, "looked at again")
            self._swept = page[-1] if len(page) == PAGE else ""
            if not self._swept:
                return

    # --- snapshots of other keepers ----------------------------------------------------------------------------------------------------------

    async def learn_all_attempts(self, bus: Bus, signed: str) -> None:
        """Page through the scheduler's attempts and apply those that are newer than what is held."""
        after: AttemptId | None = None
        while True:
            reply = await call_again(bus, endpoints.ATTEMPTS, AttemptsQuery(after=after), claims=signed)
            held = await self._store.versions([item.record.attempt for item in reply.attempts])
            for item in reply.attempts:
                if item.record.version > held.get(item.record.attempt, 0):
                    await self._learn_attempt(item, None)
            if not reply.more or not reply.attempts:
                return
            after = reply.attempts[-1].record.attempt

    async def learn_all_keys(self, bus: Bus, signed: str) -> None:
        """Take every site's key from identity."""
        reply = await call_again(bus, endpoints.IDENTITY_SNAPSHOT, Empty(), claims=signed)
        learned = [await self._store.learn_key(event) for event in reply.site_keys]
        if any(learned):
            self._news()

    # --- commands ----------------------------------------------------------------------------------------------------------------------------

    async def agree_spec(self, ask: AgreeSpec, caller: Caller) -> MeterSpec:
        """A new agreement, or the next revision of the one between the same two parties."""
        rights.require(caller.claims, "spec.agree")
        who = _who(caller.claims)
        spec = next_revision(ask, await self._store.specs(), SpecId(mint("spec")), who, self._clock.now())
        await self._store.agree(spec, who)
        LOG.info("agreed", spec=spec.spec, revision=spec.revision, provider=spec.provider, consumer=spec.consumer)
        self._news()
        return spec

    async def set_allowance(self, ask: SetAllowance, caller: Caller) -> Allowance:
        """What the scheduler may spend for a tenant without asking; `amount` None is without limit."""
        rights.require(caller.claims, "allowance.set", tenant=ask.tenant)
        if ask.amount is not None and ask.amount < 0:
            raise Refused(
                "metering.allowance", f"{ask.amount} is less than nothing", next_step="give 0 to stop spending, none for no limit"
            )
        spec = in_force(await self._store.specs(ask.tenant), ask.tenant, self._clock.now())
        allowance = Allowance(tenant=ask.tenant, currency=spec.currency if spec else DEFAULT_CURRENCY, amount=ask.amount)
        await self._store.set_allowance(allowance, _who(caller.claims))
        return allowance

    # --- queries ------------------------------------------------------------------------------------------------------------------------------

    async def specs(self, ask: SpecsQuery, caller: Caller) -> SpecsReply:
        """Agreements of a party, or all, as far as the caller may see."""
        scope = rights.scope(caller.claims, "spec.read")
        found = await self._store.specs(ask.party)

        def visible(spec: MeterSpec) -> bool:
            if scope.everything:
                return True
            mine = spec.provider == PLATFORM and scope.tenant is not None and spec.consumer in (scope.tenant, "*")
            return mine or (scope.site is not None and spec.provider == scope.site)

        return SpecsReply(specs=[spec for spec in found if visible(spec)])

    async def statement(self, ask: StatementQuery, caller: Caller) -> Statement:
        """A tenant's statement of a period, summed from the segments as they stand now."""
        rights.require(caller.claims, "statement.read", tenant=ask.tenant)
        now = self._clock.now()
        spec = in_force(await self._store.specs(ask.tenant), ask.tenant, now)
        zone, currency = (spec.time_zone, spec.currency) if spec else (DEFAULT_ZONE, DEFAULT_CURRENCY)
        total = Sum(ask.tenant, ask.period or period_of(now, zone), zone, currency, ask.after)

        async def page(after: str) -> list[AttemptId]:
            return await self._store.of_tenant(ask.tenant, total.start, total.end, after, PAGE)

        async for reckoning in self._reckoned(page):
            total.add(reckoning)
        return total.statement(await self._store.names(total.jobs), now)

    async def books(self, ask: BookQuery, caller: Caller) -> BooksReply:
        """What is held of some attempts. Unknown ones, and those that are not the caller's, are left out; a site sees usage, not prices."""
        scope = rights.scope(caller.claims, "statement.read")
        books: list[AttemptBook] = []
        for evidence in await self._store.load(ask.attempts):
            if evidence.revision == 0:
                continue
            book = book_of(reckon(evidence, self._trust, self._clock.now()))
            if scope.covers(tenant=book.tenant):
                books.append(book)
            elif scope.covers(site=book.site):
                # Two agreements, two prices: both sides see the same usage, each only its own price.
                books.append(msgspec.structs.replace(book, charges=[], hold=ledger.ZERO, posted=ledger.ZERO))
        return BooksReply(books=books)

    async def snapshot(self, _ask: Empty, caller: Caller) -> MeteringSnapshotReply:
        """Every agreement and allowance, for the scheduler's read model."""
        rights.require(caller.claims, "service.snapshot")
        specs = [SpecAgreed(version=spec.revision, record=spec) for spec in await self._store.specs()]
        return MeteringSnapshotReply(specs=specs, allowances=await self._store.allowances())

    async def check(self, _ask: Empty, caller: Caller) -> LedgerCheck:
        """The ledger's own proof: every attempt is rated anew and compared with what is posted and held."""
        rights.require(caller.claims, "ledger.check")
        totals = await self._store.totals()
        closed_with_hold = open_without_hold = 0
        incomplete: list[AttemptId] = []
        differing: list[AttemptId] = []

        async def page(after: str) -> list[AttemptId]:
            return await self._store.every(after, PAGE)

        async for reckoning in self._reckoned(page):
            kinds = {entry.kind for entry in reckoning.entries}
            closed_with_hold += reckoning.closed and ledger.held(reckoning.evidence.balances) != 0
            open_without_hold += not reckoning.closed and ledger.EntryKind.HOLD in kinds
            if ledger.EntryKind.POST in kinds:
                differing.append(reckoning.evidence.attempt)
            if ended(reckoning.evidence.record) and not reckoning.state.complete:
                incomplete.append(reckoning.evidence.attempt)
        wrong = totals.sum != 0 or closed_with_hold or open_without_hold or differing
        return LedgerCheck(
            postings=totals.postings,
            sum=totals.sum,
            closed_with_hold=closed_with_hold,
            open_without_hold=open_without_hold,
            quarantined=totals.quarantined,
            suspense_segments=totals.suspense,
            incomplete=incomplete[:NAMED],
            differing=differing[:NAMED],
            text="the ledger does not agree with the segments" if wrong else "the ledger agrees with the segments",
        )

    async def audit(self, ask: AuditQuery, caller: Caller) -> AuditReply:
        """This service's audit rows."""
        rights.require(caller.claims, "audit.read")
        return await audit_reply(self._store, ask)

    async def _reckoned(self, page: Callable[[str], Awaitable[list[AttemptId]]]) -> AsyncIterator[Reckoning]:
        """Every attempt that `page(after)` names, reckoned anew, without holding up the loop."""
        after = ""
        while attempts := await page(after):
            for evidence in await self._store.load(attempts):
                yield reckon(evidence, self._trust, self._clock.now())
            await asyncio.sleep(0)
            after = attempts[-1]

    def endpoints(self) -> Mapping[Endpoint[Any, Any], Serve]:
        """What this service answers."""
        return {
            endpoints.AGREE_SPEC: self.agree_spec,
            endpoints.SPECS: self.specs,
            endpoints.STATEMENT: self.statement,
            endpoints.BOOKS: self.books,
            endpoints.SET_ALLOWANCE: self.set_allowance,
            endpoints.METERING_SNAPSHOT: self.snapshot,
            endpoints.LEDGER_CHECK: self.check,
            endpoints.METERING_AUDIT: self.audit,
        }


def _who(claims: Claims) -> str:
    return f"{claims.name} ({claims.sub})"
