"""Metering: measured segments, agreements and the scheduler's word in; a ledger, books and statements out.

This is the shell: it loads, asks the core, saves. Segments come on the metering lane, attempts and keys as events (and as snapshots when
behind), agreements as commands. Whatever comes leads to the same question (`core.reckon`), so order, repeats and crashes change nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from intertie.bus.port import Bus
from intertie.bus.rpc import Caller, Serve, call_again
from intertie.clock import Clock
from intertie.contracts import endpoints
from intertie.contracts.base import Empty, EventMeta
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.identity import AuditQuery, AuditReply, Claims, SiteKeyChanged
from intertie.contracts.job import AttemptChanged, AttemptSnapshot, AttemptsQuery, JobChanged
from intertie.contracts.link import CallClosed, MeteringEntry, NativeAccounting, Sealed, SegmentClosed
from intertie.contracts.usage import (
    AgreeSpec,
    Allowance,
    AttemptBook,
    BookQuery,
    BooksReply,
    LedgerCheck,
    MeteringSnapshotReply,
    MeterSpec,
    ReleaseSegment,
    SetAllowance,
    SpecAgreed,
    SpecsQuery,
    SpecsReply,
    Statement,
    StatementQuery,
    SuspendedSegment,
    SuspenseQuery,
    SuspenseReply,
)
from intertie.errors import NotFound, Refused, Stale
from intertie.ids import AttemptId, SiteName, SpecId, TenantName, mint
from intertie.lane.tables import LaneEntry
from intertie.metering.calls import Calls
from intertie.metering.core import ledger
from intertie.metering.core.agreements import DEFAULT_ZONE, PLATFORM, in_force, next_revision
from intertie.metering.core.attribution import DECIDABLE, RESOLVABLE, TEXTS, Reason
from intertie.metering.core.books import ended
from intertie.metering.core.evidence import Decision, Evidence, received
from intertie.metering.core.periods import period_of
from intertie.metering.core.reckon import Reckoning, Trust, book_of, change, reckon
from intertie.metering.core.statements import Sum
from intertie.metering.native import NativeBooks
from intertie.metering.store import Mark, MeteringStore, Suspended, event_mark
from intertie.metering.words import Marks, Words
from intertie.observe import log
from intertie.store import StoreTx, audit_reply, numbered_version
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
        self._words = Words(store, lanes, trusted, clock)
        self.native: NativeBooks | None = None
        """Set where sites' own accounting is kept."""
        self.calls: Calls | None = None
        """Set where calls of offerings are metered."""

    # --- what comes ------------------------------------------------------------------------------------------------------------------------

    async def interpret(self, entry: LaneEntry) -> None:
        """One entry of the metering lane. What is none raises, and goes to quarantine; a segment that cannot be believed waits in suspense."""
        said: MeteringEntry = entry.read(MeteringEntry)  # type: ignore[arg-type]  # mypy knows no type[] of a union
        if isinstance(said, SegmentClosed):
            await self._segment(entry, said)
        elif isinstance(said, CallClosed):
            await self._call(entry, said)
        elif isinstance(said, NativeAccounting):
            if self.native is None:
                raise Refused("metering.no_native", "sites' own accounting is not kept here")
            await self.native.take(entry, said)
        else:
            await self._words.take(entry, said)

    async def _call(self, entry: LaneEntry, said: CallClosed) -> None:
        if self.calls is None:
            raise Refused("metering.no_calls", "calls are not metered here")
        await self.calls.closed(entry, said)

    async def _segment(self, entry: LaneEntry, said: SegmentClosed) -> None:
        item = received(entry.site, entry.journal, entry.seq, said.sealed, entry.received_at)

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
        await self._words.prove_again()
        if self.calls is not None:
            await self.calls.reconsider()
        if self.native is not None:
            await self.native.reconsider()
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

    async def suspense(self, ask: SuspenseQuery, caller: Caller) -> SuspenseReply:
        """What waits, oldest first, and for what."""
        rights.require(caller.claims, "suspense.read")
        return SuspenseReply(segments=[_waiting(one) for one in await self._store.suspended(ask.site, None, ask.limit)])

    async def release_suspense(self, ask: ReleaseSegment, caller: Caller) -> AttemptBook:
        """A named person decides that a segment counts; the attempt is reckoned anew at once. The decision is a fact of its own."""
        rights.require(caller.claims, "suspense.release")
        if not ask.reason.strip():
            raise Refused("metering.no_reason", "a decision about money says why", next_step="give --reason")
        one = _only(ask, await self._store.suspended(None, ask.segment, NAMED))
        if one.reason not in DECIDABLE:
            raise Refused(
                "metering.not_decidable",
                f"segment {one.segment} waits because {TEXTS[Reason(one.reason)]}: no person can decide that",
                next_step="what it waits for must come (a key, a record, an agreement), or the site must say it anew",
            )
        who = _who(caller.claims)
        decision = Decision(one.reason, who, ask.reason, self._clock.now())

        def news(evidence: Evidence) -> Evidence:
            items = [
                replace(item, decisions=(*item.decisions, decision)) if item.number == one.number and not item.lifted(one.reason) else item
                for item in evidence.received
            ]
            return replace(evidence, received=items)

        async def mark(tx: StoreTx) -> bool:
            await tx.audit(actor=who, action="suspense.release", target=f"{one.segment} ({one.reason})", reason=ask.reason)
            return True

        await self._apply(one.attempt, news, f"released by {who}: {ask.reason}", mark, sites=[one.site])
        (evidence,) = await self._store.load([one.attempt])
        return book_of(reckon(evidence, self._trust, self._clock.now()))

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
        sites = await self._words.standings(total.sites, total.period, total.start, total.end) if total.over(now) else []
        lost = await self._words.lost(total.sites)
        statement = total.statement(await self._store.names(total.jobs), now, sites, lost)
        return await self.calls.on_statement(statement) if self.calls is not None else statement

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
        first = self._store.first_version
        specs = [SpecAgreed(version=numbered_version(spec.revision, first), record=spec) for spec in await self._store.specs()]
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
            if kinds & {ledger.EntryKind.POST, ledger.EntryKind.ADJUST}:
                differing.append(reckoning.evidence.attempt)
            if ended(reckoning.evidence.record) and not reckoning.state.complete:
                incomplete.append(reckoning.evidence.attempt)
        wrong = totals.sum != 0 or closed_with_hold or open_without_hold or differing
        check = LedgerCheck(
            postings=totals.postings,
            sum=totals.sum,
            closed_with_hold=closed_with_hold,
            open_without_hold=open_without_hold,
            quarantined=totals.quarantined,
            suspense_segments=totals.suspense,
            incomplete=incomplete[:NAMED],
            differing=differing[:NAMED],
            text="the ledger does not agree with the segments" if wrong else "the ledger agrees with the segments",
            lost=await self._words.lost(),
            periods=await self._words.differing(),
        )
        return await self.calls.on_check(check) if self.calls is not None else check

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
            endpoints.SUSPENSE: self.suspense,
            endpoints.RELEASE_SUSPENSE: self.release_suspense,
            **(self.calls.handlers() if self.calls is not None else {}),
            **(self.native.handlers() if self.native is not None else {}),
        }


def _who(claims: Claims) -> str:
    return f"{claims.name} ({claims.sub})"


def _only(ask: ReleaseSegment, found: list[Suspended]) -> Suspended:
    """The one segment that was meant."""
    meant = [one for one in found if not ask.digest or one.digest == ask.digest]
    if not meant:
        raise NotFound("metering.no_suspense", f"no segment {ask.segment} waits", next_step="see `intertie suspense list`")
    if len(meant) > 1:
        which = ", ".join(sorted(one.digest for one in meant))
        raise Refused("metering.which", f"{len(meant)} contents of segment {ask.segment} wait", next_step=f"name one by --digest: {which}")
    return meant[0]


def _waiting(one: Suspended) -> SuspendedSegment:
    reason = Reason(one.reason)
    return SuspendedSegment(
        segment=one.segment,
        digest=one.digest,
        site=one.site,
        attempt=one.attempt,
        tenant=one.tenant,
        start=one.start,
        end=one.end,
        quantity_milli=one.quantity_milli,
        reason=reason,
        text=TEXTS[reason],
        since=one.since,
        needs_person=reason not in RESOLVABLE,
    )
