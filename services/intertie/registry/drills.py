"""Drills at the hub: planned with the owner's consent, watched while the site is silent, judged from both sides' accounts, signed.

The site makes the cut and ends it; the hub says when (through the scheduler's sealed settings), notes when it noticed, and afterwards compares
the books of scheduler and metering with the site's own records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, Protocol

from intertie.bus import rpc
from intertie.bus.port import Bus
from intertie.bus.rpc import Caller, Serve
from intertie.clock import Clock
from intertie.contracts import endpoints
from intertie.contracts.drill import (
    CallOffDrill,
    ConsentDrill,
    DrillAttempt,
    DrillBook,
    DrillChanged,
    DrillConsent,
    DrillDocument,
    DrillEvidence,
    DrillKind,
    DrillQuery,
    DrillRecord,
    DrillsQuery,
    DrillsReply,
    DrillState,
    HubDrill,
    PlanDrill,
    SignDrill,
)
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.job import AttemptRecord, JobQuery
from intertie.contracts.link import DrillConsented, DrillRefused, DrillReported
from intertie.contracts.site import SiteChanged, SitesQuery
from intertie.contracts.usage import AttemptBook, BookQuery
from intertie.errors import Conflict, IntertieError, NotFound, Refused, Stale, Unavailable
from intertie.ids import AttemptId, SiteName, mint
from intertie.lane.tables import LaneEntry
from intertie.observe import log
from intertie.registry.core import drill as rules
from intertie.registry.drill_store import DrillRows, DrillStore, Kept, Report
from intertie.registry.store import Mark, RegistryStore
from intertie.trust.evidence import HUB, PASSED, PERSON, SITE, checks_of, faults_of, sign_part, signature_holds, verdict_of
from intertie.trust.keys import Key
from intertie.trust.rights import not_found, require, scope

LOG = log.get("registry.drill")

ROLE = "drills"
WATCH_S = 0.5
ASK_S = 5.0
Said = DrillConsented | DrillRefused | DrillReported


class Books(Protocol):
    """What the other keepers hold of the site's attempts."""

    async def of(self, attempts: Sequence[DrillAttempt]) -> tuple[list[DrillBook], bool]:
        """A line per attempt; and whether all of them are complete (else it is asked again)."""
        ...


class Drills:
    """The service's part. `run` while this copy leads."""

    def __init__(
        self,
        store: DrillStore,
        registry: RegistryStore,
        books: Books,
        key: Key,
        clock: Clock,
        *,
        silent_limit_s: float,
        site_key: Callable[[SiteName], Awaitable[str]],
        max_age_days: int = 90,
        beat_s: float = 1.0,
    ) -> None:
        """silent_limit_s: after how much silence this hub calls a site stale. site_key: the public key that identity keeps for a site."""
        self._store, self._registry, self._books, self._key, self._clock = store, registry, books, key, clock
        self._silent_limit_s, self._site_key = silent_limit_s, site_key
        self.max_age_days = max_age_days
        self._watch_s = WATCH_S * beat_s

    def handlers(self) -> Mapping[Endpoint[Any, Any], Serve]:
        return {
            endpoints.PLAN_DRILL: self.plan,
            endpoints.CALL_OFF_DRILL: self.call_off,
            endpoints.CONSENT_DRILL: self.consent,
            endpoints.DRILLS: self.drills,
            endpoints.DRILL_EVIDENCE: self.evidence,
            endpoints.SIGN_DRILL: self.sign,
        }

    # --- calls ---

    async def plan(self, request: PlanDrill, caller: Caller) -> DrillRecord:
        require(caller.claims, "drill.start", site=request.site)
        sites, pools = await self._registry.sites(SitesQuery(site=request.site))
        if not sites:
            raise not_found()
        async with self._store.drills() as rows:
            record = rules.plan(
                request,
                id=mint("drl"),
                site=sites[0],
                pools=pools,
                consent=await rows.consent(request.site),
                open_drills=[kept.record for kept in await rows.open_drills()],
                past=await rows.find(request.site, 500),
                max_age_days=self.max_age_days,
                actor=caller.claims.name,
                now=self._clock.now(),
                version=self._store.first_version,
            )
            await self._save(rows, Kept(record=record))
            await rows.rows.tx.audit(
                actor=caller.claims.sub, action="drill.plan", target=f"{record.site}/{record.drill}", reason=request.reason
            )
        return record

    async def call_off(self, request: CallOffDrill, caller: Caller) -> DrillRecord:
        async with self._store.drills() as rows:
            kept = await self._mine(rows, request.drill, caller, "drill.start")
            rules.may_call_off(kept.record, now=self._clock.now())
            record = rules.called_off(kept.record, f"called off by {caller.claims.name}: {request.reason}".rstrip(": "))
            await self._save(rows, Kept(record=record, report=kept.report))
            await rows.rows.tx.audit(
                actor=caller.claims.sub, action="drill.call_off", target=f"{record.site}/{record.drill}", reason=request.reason
            )
        return record

    async def consent(self, request: ConsentDrill, caller: Caller) -> DrillConsent:
        require(caller.claims, "drill.consent", site=request.site)
        consent = DrillConsent(
            allowed=request.allowed,
            given="token",
            by=caller.claims.name,
            at=self._clock.now(),
            until=request.until,
            longest_s=request.longest_s,
        )
        async with self._store.drills() as rows:
            if await rows.rows.site(request.site) is None:
                raise not_found()
            await self._consented(rows, request.site, consent, actor=caller.claims.sub)
        return consent

    async def drills(self, query: DrillsQuery, caller: Caller) -> DrillsReply:
        seen = scope(caller.claims, "drill.read")
        async with self._store.drills(read_only=True) as rows:
            found = await rows.find(query.site, query.limit)
            consents = await rows.consents(query.site)
        return DrillsReply(
            drills=[record for record in found if seen.covers(site=record.site)],
            consents=[one for one in consents if seen.covers(site=one.site)],
            max_age_days=self.max_age_days,
        )

    async def evidence(self, query: DrillQuery, caller: Caller) -> DrillEvidence:
        async with self._store.drills(read_only=True) as rows:
            kept = await self._mine(rows, query.drill, caller, "drill.read")
        return _judged(kept)

    async def sign(self, request: SignDrill, caller: Caller) -> DrillEvidence:
        """A person's signature under the document. Who the key belongs to is said by the audit row: the token's principal."""
        given = request.signature
        async with self._store.drills() as rows:
            kept = await self._mine(rows, request.drill, caller, "drill.start")
            before = _judged(kept)
            if given.role != PERSON or not signature_holds(before.document, given):
                raise Refused(
                    "drill.signature", "this is not a person's signature under this drill", next_step=f"intertie drill sign {request.drill}"
                )
            if any(one.key == given.key for one in before.signatures):
                return before
            after = DrillEvidence(document=before.document, signatures=[*before.signatures, given])
            record = rules.moved(kept.record, signed_by=[*kept.record.signed_by, given.name])
            await self._save(rows, Kept(record=record, report=kept.report, evidence=after))
            await rows.rows.tx.audit(
                actor=caller.claims.sub,
                action="drill.sign",
                target=f"{record.site}/{record.drill}",
                reason=f"{given.name} signed with the key {given.key}",
            )
        return after

    async def _mine(self, rows: DrillRows, id: str, caller: Caller, action: str) -> Kept:
        seen = scope(caller.claims, action)
        kept = await rows.drill(id)
        if kept is None or not seen.covers(site=kept.record.site):
            raise not_found()
        return kept

    async def _save(self, rows: DrillRows, kept: Kept) -> None:
        await rows.save(kept)
        await rows.rows.tx.emit(DrillChanged(version=kept.record.version, record=kept.record))

    async def _consented(self, rows: DrillRows, site: SiteName, consent: DrillConsent, *, actor: str) -> None:
        await rows.save_consent(site, consent)
        until = f" until {consent.until.isoformat()}" if consent.until else ""
        said = f"cuts of up to {consent.longest_s} s{until}, by {consent.given}" if consent.allowed else "no drill"
        await rows.rows.tx.audit(actor=actor, action="drill.consent", target=site, reason=said)
        if consent.allowed:
            return
        for kept in await rows.open_drills():
            if kept.record.site == site and kept.record.state is DrillState.PLANNED:
                await self._save(rows, Kept(record=rules.called_off(kept.record, "the owner took the consent back")))

    # --- the lane ---

    async def said(self, entry: LaneEntry, said: Said, mark: Mark) -> None:
        """What a site says of drills, in one transaction with the mark of its entry."""
        signed_by = await self._site_key(entry.site) if isinstance(said, DrillReported) else ""
        async with self._store.drills() as rows:
            await mark(rows.rows.tx)
            match said:
                case DrillConsented():
                    await self._consented(rows, entry.site, said.consent, actor=f"site/{entry.site}")
                case DrillRefused():
                    kept = await rows.drill(said.drill)
                    if kept is not None and kept.record.site == entry.site and kept.record.state is DrillState.PLANNED:
                        await self._save(rows, Kept(record=rules.called_off(kept.record, f"the site refused: {said.text} ({said.code})")))
                case DrillReported():
                    await self._reported(rows, entry.site, said, signed_by)

    async def _reported(self, rows: DrillRows, site: SiteName, said: DrillReported, key: str) -> None:
        kept = await rows.drill(said.report.drill)
        if kept is None or kept.record.site != site or kept.record.state not in rules.OPEN or kept.report is not None:
            return
        if (
            said.report.site != site
            or said.signature.role != SITE
            or said.signature.key != key
            or not signature_holds(said.report, said.signature)
        ):
            LOG.error("a site's account of a drill is not signed by its key", site=site, drill=said.report.drill)
            await self._save(rows, Kept(record=rules.called_off(kept.record, "the site's account was not signed by the site's key")))
            return
        record = rules.moved(kept.record, state=DrillState.BACK)
        await self._save(rows, Kept(record=record, report=Report(report=said.report, signature=said.signature)))

    # --- the leader ---

    async def run(self) -> NoReturn:
        """Watch open drills whenever this copy leads."""
        while True:
            try:
                async with self._registry.leading(ROLE):
                    while True:
                        await self.look()
                        await asyncio.sleep(self._watch_s)
            except (Unavailable, Stale) as err:
                LOG.warning("drills are watched later", code=err.code, text=err.text)
                await asyncio.sleep(self._watch_s)

    async def look(self) -> None:
        """One look at every open drill (there is one at most)."""
        async with self._store.drills(read_only=True) as rows:
            found = await rows.open_drills()
        for kept in found:
            await self._look_at(kept)

    async def _look_at(self, kept: Kept) -> None:
        sites, _ = await self._registry.sites(SitesQuery(site=kept.record.site))
        if not sites:
            return
        now = self._clock.now()
        seen = rules.look(kept.record, sites[0].freshness, now=now)
        if seen is not kept.record:
            async with self._store.drills() as rows:
                fresh = await rows.drill(kept.record.drill)
                if fresh is None or fresh.record.version != kept.record.version:
                    return
                await self._save(rows, Kept(record=seen, report=fresh.report, evidence=fresh.evidence))
            return
        if kept.record.state is DrillState.BACK and kept.report is not None:
            await self._judge(kept, kept.report, now)

    async def _judge(self, kept: Kept, report: Report, now: datetime) -> None:
        """When the books are complete, or have had their time."""
        record = kept.record
        waited = rules.books_are_due(record, now)
        unheard = record.silent_at is not None and record.heard_at is None
        try:
            books, complete = await self._books.of(report.report.attempts)
        except IntertieError as err:
            LOG.info("the books of a drill are asked again", drill=record.drill, code=err.code)
            return
        if (not complete or unheard) and not waited:
            return
        evidence = self._document(record, report, books, now)
        verdict = evidence.document.verdict
        async with self._store.drills() as rows:
            fresh = await rows.drill(record.drill)
            if fresh is None or fresh.record.version != record.version:
                return
            judged = rules.moved(record, state=DrillState.JUDGED, verdict=verdict, checks=evidence.document.checks, judged_at=now)
            await self._save(rows, Kept(record=judged, report=report, evidence=evidence))
            await rows.rows.tx.audit(actor="rule", action="drill.judge", target=f"{record.site}/{record.drill}", result=verdict)
            if verdict == PASSED and record.kind is DrillKind.CUT:
                await self._passed(rows, record.site, now)
        LOG.info("a drill is judged", drill=record.drill, site=record.site, verdict=verdict)

    async def _passed(self, rows: DrillRows, site: SiteName, now: datetime) -> None:
        known = await rows.rows.site(site)
        if known is None:
            return
        after = rules.with_drill(known, now)
        await rows.rows.save_site(after)
        await rows.rows.tx.emit(SiteChanged(version=after.version, record=after, cause="a drill passed"))

    def _document(self, record: DrillRecord, report: Report, books: list[DrillBook], now: datetime) -> DrillEvidence:
        assert record.consent is not None, "no drill is planned without the owner's consent"
        at_hub = HubDrill(
            silent_at=record.silent_at, heard_at=record.heard_at, silent_limit_ms=round(self._silent_limit_s * 1000), books=books
        )
        checks = checks_of(record.seconds, record.start, record.consent, report.report, at_hub)
        document = DrillDocument(
            drill=record.drill,
            site=record.site,
            pool=record.pool,
            kind=record.kind,
            seconds=record.seconds,
            start=record.start,
            asked_by=record.asked_by,
            asked_at=record.asked_at,
            reason=record.reason,
            consent=record.consent,
            at_site=report.report,
            at_hub=at_hub,
            checks=checks,
            verdict=verdict_of(checks),
        )
        evidence = DrillEvidence(
            document=document, signatures=[report.signature, sign_part(self._key, document, role=HUB, name="registry", at=now)]
        )
        faults = faults_of(evidence, need_person=False)
        assert not faults, f"evidence that does not verify: {faults}"
        return evidence


def _judged(kept: Kept) -> DrillEvidence:
    if kept.evidence is None:
        raise Conflict("drill.not_judged", f"drill {kept.record.drill} is {kept.record.state.value}", next_step="intertie drill status")
    return kept.evidence


class BusBooks:
    """`Books` asked of scheduler and metering."""

    def __init__(self, bus: Bus, claims: Callable[[], str]) -> None:
        self._bus, self._claims = bus, claims

    async def of(self, attempts: Sequence[DrillAttempt]) -> tuple[list[DrillBook], bool]:
        if not attempts:
            return [], True
        ask = BookQuery(attempts=[a.attempt for a in attempts])
        reply = await rpc.call(self._bus, endpoints.BOOKS, ask, claims=self._claims(), timeout_s=ASK_S)
        metered = {book.attempt: book for book in reply.books}
        scheduled: dict[AttemptId, AttemptRecord] = {}
        for job in sorted({a.job for a in attempts}):
            try:
                record = await rpc.call(self._bus, endpoints.JOB, JobQuery(job=job), claims=self._claims(), timeout_s=ASK_S)
            except NotFound:
                continue
            scheduled |= {a.attempt: a for a in record.attempts}
        lines = [_line(a, scheduled.get(a.attempt), metered.get(a.attempt)) for a in attempts]
        return lines, all(line.site_us is None or None not in (line.scheduler_us, line.metering_us) for line in lines)


def _line(told: DrillAttempt, hub: AttemptRecord | None, book: AttemptBook | None) -> DrillBook:
    """An attempt that never ran has no microseconds at the site, and none are asked of the others."""
    ended = told.after == "ended"
    over = hub is not None and hub.ended_at is not None
    return DrillBook(
        attempt=told.attempt,
        site_us=told.ran_us if ended else None,
        scheduler_us=hub.ran_us if hub is not None and over else None,
        metering_us=book.run_us if book is not None and book.complete else None,
        outcome=str(hub.outcome or "") if hub is not None and over else "",
        cause=str(hub.cause or "") if hub is not None and over else "",
    )


async def site_key_of(bus: Bus, claims: Callable[[], str], site: SiteName) -> str:
    """The site's public key, of identity; empty if it knows none or the site is revoked."""
    reply = await rpc.call(bus, endpoints.IDENTITY_SNAPSHOT, endpoints.IDENTITY_SNAPSHOT.request(), claims=claims(), timeout_s=ASK_S)
    for event in reply.site_keys:
        if event.record.site == site and not event.record.revoked:
            return event.record.site_key
    return ""
