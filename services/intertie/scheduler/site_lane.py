"""The scheduler's part of its lane: what an entry does, which instructions a site is owed, and the settings it works by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from typing import Any, TypeVar

import msgspec

from intertie.clock import Clock
from intertie.contracts.base import BATCH_BYTES, encode, without_nul
from intertie.contracts.job import AttemptRecord, Attribution
from intertie.contracts.link import (
    AccountMapping,
    Go,
    HeldAttempt,
    HeldTold,
    Instruction,
    IslandedGrant,
    IslandedSubmit,
    JournalOpened,
    Lane,
    LostRange,
    NotStarted,
    Offer,
    OfferBody,
    OfferRefused,
    SchedulerEntry,
    Sealed,
    Settle,
    SiteSettings,
    Stop,
    Withdraw,
)
from intertie.contracts.site import RIGHT, PoolRecord
from intertie.errors import Refused
from intertie.ids import CANARY, AttemptId, Digest, InstructionId, JournalId, SiteName, digest
from intertie.lane.interpreter import storable
from intertie.lane.keeper import Settings
from intertie.lane.tables import LaneEntry, LaneTables
from intertie.lifecycle import PHASE_WORKS
from intertie.link.journal import InstructionMark
from intertie.link.keeper import SiteRow
from intertie.link.lost import range_lost
from intertie.scheduler.core import ways
from intertie.scheduler.core.grants import GRANTS_PER_SITE
from intertie.scheduler.core.hearing import at_head
from intertie.scheduler.core.interpret import BEFORE_A_START, UNKNOWN_ATTEMPT, Source, interpret, unknown
from intertie.scheduler.core.orders import FIRST, START_WITHIN_S, STOP_GRACE_S, Order, instruction_id, stop_words
from intertie.scheduler.core.rows import Change, File, Ignored, line
from intertie.scheduler.core.silence import LOST_AFTER
from intertie.scheduler.knowledge import Knowledge
from intertie.scheduler.rounds import Planner
from intertie.scheduler.store import OpenOrder, Revision, SchedulerStore
from intertie.store import StoreTx, first_version
from intertie.trust.keys import Key
from intertie.trust.seal import open_seal, seal

T = TypeVar("T")

# A site's own agreements in its settings: those in force and a few before and after, together small beside the rest of an answer.
SPECS_SENT, SPEC_BYTES = 8, 64 * 1024
# One instruction fits an answer of its own up to three batches.
OFFER_BYTES = 3 * BATCH_BYTES
# Of settings: a site that says it has a later one than could ever be made gets none.
MOST_REVISION = 2**53
# In a queue of the site's own a job waits for its turn: no longer than people would wait for it.
QUEUED_START_BY_S = 86_400
SIGNER = "scheduler"
TELEMETRY_BEAT_S = 1.0
LANE_BEAT_S = 5.0

_ENTRY: Any = SchedulerEntry
"""A union is no `type[T]` to a checker, and one to the decoder."""


@dataclass(frozen=True, slots=True)
class _Made:
    """Settings of a site as they were last found to be."""

    content: Digest
    revision: Revision
    stamp: tuple[int, int]
    """What was known then: while nothing more is, they are still these."""


class SiteLane:
    """The callbacks of the scheduler's `LaneKeeper`."""

    def __init__(
        self,
        store: SchedulerStore,
        lanes: LaneTables,
        knowledge: Knowledge,
        planner: Planner,
        clock: Clock,
        key: Key,
        *,
        scale: float = 1.0,
        epoch: int = 1,
        zone: tzinfo = UTC,
        own_keys: Sequence[str] = (),
        lost_after: timedelta = LOST_AFTER,
    ) -> None:
        """`own_keys`: public keys that this service sealed with before; what a site holds from then is ours, too."""
        self._store, self._lanes, self._knowledge, self._planner = store, lanes, knowledge, planner
        self._clock, self._key, self._scale, self._epoch, self._zone = clock, key, scale, epoch, zone
        self._lost_after = lost_after
        self._keys = tuple(dict.fromkeys((key.public, *own_keys)))
        self._made: dict[SiteName, _Made] = {}
        self._told: dict[SiteName, JournalId] = {}
        """In which journal a site told this copy the whole of what it holds."""

    # --- what a site says -------------------------------------------------------------------------------------------------------------------

    async def interpret(self, entry: LaneEntry) -> None:
        """One entry, one transaction: its mark, its change, its events. What cannot be believed is raised, and set aside by the keeper."""
        # Any job may print a NUL, or hold one in its script; the bytes that the site chained are kept as they came.
        said: SchedulerEntry = without_nul(entry.read(_ENTRY))
        source, now = Source(entry.site, entry.journal), self._clock.now()
        async with self._store.transaction() as tx:
            await self._lanes.mark_interpreted(tx, entry)
            match said:
                case JournalOpened():
                    changes = await self._opened(tx, said, source, now)
                case HeldTold():
                    changes = await self._held(tx, said, source, now, why=f"told in epoch {said.epoch}")
                case LostRange():
                    await tx.fault(range_lost(entry.site, Lane.SCHEDULER, said, "What runs is compared by the journal that follows."))
                    changes = []
                case IslandedSubmit():
                    changes = [await self._islanded(tx, said, source, now)]
                case NotStarted():
                    changes = [await self._not_started(tx, said, source, now)]
                case _:
                    told = getattr(said, "attempt", None)
                    changes = [await self._store.apply(tx, told, lambda file: interpret(said, file, source, now))]
        if isinstance(said, HeldTold) and said.complete and said.epoch == self._epoch:
            self._told[entry.site] = entry.journal
        for outcome in changes:
            if isinstance(outcome, Change):
                self._see(said, outcome)
                self._planner.hint()

    async def _not_started(self, tx: StoreTx, said: NotStarted, source: Source, now: datetime) -> Change | Ignored:
        """Given up before it started. Where this hub had lost the attempt, nobody takes it up (`ways.latest_first`): its claim, which was set aside
        for that, says nothing any more and waits for no person."""
        outcome = await self._store.apply(tx, said.attempt, lambda file: interpret(said, file, source, now))
        if isinstance(outcome, Ignored) and not await self._knows(tx, said.attempt):
            before = [storable(str(unknown(source.site, kind, said.attempt))) for kind in BEFORE_A_START]
            if gone := await self._lanes.let_go(tx, Lane.SCHEDULER, source.site, before):
                why = f"{source.site} says that {said.attempt} never started, and it is not known here"
                await tx.audit(actor=SIGNER, action="quarantine.let_go", target=f"{source.site}/scheduler: {gone} entries", reason=why)
        return outcome

    async def _opened(self, tx: StoreTx, said: JournalOpened, source: Source, now: datetime) -> list[Change | Ignored]:
        """Compare what is believed here with what the new journal holds, then take up what is not known here."""
        known = await self._store.open_at(tx, source.site)
        changes = [
            await self._store.apply(tx, name, lambda file: _with_file(file, partial(self._compared, said, source, now))) for name in known
        ]
        return changes + await self._held(tx, said, source, now, why=said.why)

    async def _held(
        self, tx: StoreTx, said: JournalOpened | HeldTold, source: Source, now: datetime, *, why: str
    ) -> list[Change | Ignored]:
        """Take up what is not known here; then what could not be understood without it is read again."""
        changes, doubts = list[Change | Ignored](), list[str]()
        evidence = f"entry {source.site}/{source.journal}/{said.seq}"
        for held in ways.latest_first(said):
            if held.offer is None or await self._knows(tx, held.attempt):
                continue
            try:
                offer = self._ours(held.offer, OfferBody)
                ways.check_held(held, offer)
                job = ways.adopted_job(offer, source, now, version=first_version(self._epoch))
            except Refused as err:
                # One that is not ours must not cost the others their word.
                doubts.append(f"{held.attempt[:64]}: {err.text}")
                continue
            told = line(job, "adopted", source.actor, said.at, now, why=f"known from its signed offer only: {why}")
            changes.append(await self._store.take_up(tx, job, told, partial(self._adopt, held, offer, source, now, evidence)))
        if doubts:
            await tx.fault(ways.not_adopted(doubts, source))
        if changes or (isinstance(said, HeldTold) and self._is_news(said, source)):
            again = await self._lanes.read_again(tx, Lane.SCHEDULER, source.site, UNKNOWN_ATTEMPT)
            if again:
                told_why = f"{source.site} told what it holds; {len(changes)} were taken up"
                await tx.audit(actor=SIGNER, action="quarantine.retry", target=f"{source.site}/scheduler: {again} entries", reason=told_why)
        return changes

    def _is_news(self, said: HeldTold, source: Source) -> bool:
        """A whole list for this epoch, for the first time in this journal: a site that says it again and again has nothing read again by it."""
        return said.complete and said.epoch == self._epoch and self._told.get(source.site) != source.journal

    async def _knows(self, tx: StoreTx, attempt: AttemptId) -> bool:
        known = await self._store.apply(tx, attempt, lambda file: Ignored("known" if file else "new"))
        assert isinstance(known, Ignored), "nothing was decided"
        return known.why == "known"

    def _compared(self, said: JournalOpened, source: Source, now: datetime, file: File) -> Change | Ignored:
        return ways.opened(said, file, source, now, lost_after=self._lost_after)

    def _adopt(self, held: HeldAttempt, offer: OfferBody, source: Source, now: datetime, evidence: str, file: File) -> Change | Ignored:
        if any(a.record.attempt == held.attempt for a in (*file.others, *([file.attempt] if file.attempt else []))):
            return Ignored("it is known here, and has ended or is held")
        attribution, version = self._ours(offer.attribution, Attribution), first_version(self._epoch)
        return ways.adopt(held, offer, attribution, file, source, now, evidence=evidence, version=version)

    async def _islanded(self, tx: StoreTx, said: IslandedSubmit, source: Source, now: datetime) -> Change | Ignored:
        """A tenant's work that the site took in while nobody could be asked."""
        grant = self._ours(said.grant, IslandedGrant)
        beyond = ways.check_grant(said, grant, source, self._knowledge.world.account(source.site, said.tenant))
        job = ways.islanded_job(said, source, now)
        told = line(job, "submitted", job.submitted_by, said.at, now, why=f"at {source.site}, islanded, under {grant.grant}", islanded=True)
        if await self._knows(tx, said.attempt):
            return Ignored("the work was taken up already")
        return await self._store.take_up(tx, job, told, lambda file: ways.islanded(said, grant, beyond, file, source, now))

    def _ours(self, sealed: Sealed, kind: type[T]) -> T:
        """What this service has sealed, with the key that it has now or one before. `Refused('seal.invalid')` otherwise."""
        for key in self._keys[:-1]:
            try:
                return open_seal(sealed, key, kind)
            except Refused as err:
                if err.code != "seal.invalid":
                    raise
        return open_seal(sealed, self._keys[-1], kind)

    def _see(self, said: SchedulerEntry, change: Change) -> None:
        """The site's word is newer than its last sample."""
        before, after = change.before.attempt, change.attempt
        if before is None or after is None or not before.holding or after.holding:
            return
        record = after.record
        keys = [(record.site, record.pool, device) for device in record.devices]
        busy = isinstance(said, OfferRefused) and not said.fault
        (self._knowledge.sight.taken if busy else self._knowledge.sight.freed)(keys, self._clock.monotonic_s())

    async def heard(self, rows: Sequence[SiteRow]) -> None:
        """Syncs were committed: the sites are there, perhaps caught up now."""
        for row in rows:
            if row.site != CANARY:
                await self._heard(row)

    async def _heard(self, row: SiteRow) -> None:
        if row.at_head and row.interpreted_through < row.ack_through:
            # As it was committed; what it brought was most often interpreted since.
            row = await self._lanes.site(Lane.SCHEDULER, row.site) or row
        hearing, now_s = self._knowledge.hearing, self._clock.monotonic_s()
        was_ready = hearing.heard(row.site, now_s) and hearing.caught_up(row.site)
        hearing.hear(row, now_s)
        if not was_ready:
            self._planner.hint()

    async def quiet(self, sites: Mapping[SiteName, int]) -> frozenset[SiteName]:
        """Those to whom nothing need be said: their settings are the newest that this copy knows to make, and no order is open."""
        settled = {site for site, has in sites.items() if site == CANARY or self._settled(site, has)}
        return frozenset(settled - await self._store.owed(settled)) if settled else frozenset()

    def _settled(self, site: SiteName, has: int) -> bool:
        made = self._made.get(site)
        return made is not None and (has == made.revision.number or has > MOST_REVISION) and made.stamp == self._knowledge.stamp(site)

    async def instructions(self, site: SiteName, mark: InstructionMark) -> Sequence[Instruction]:
        """Everything that the site is owed and has not answered. Nothing of it starts anything before the site is at head and all that it said is
        interpreted: a claim may be older than a cancel that it has not heard of (LINK D12)."""
        if site == CANARY:
            return []
        owed = await self._store.orders(site, (mark.epoch, mark.number))
        # Before a restore the offer may have been taken back and placed elsewhere; the leader withdraws it.
        owed = [o for o in owed if o.order is not Order.OFFER or o.attempt.record.epoch >= self._epoch]
        if any(order.order not in FIRST for order in owed) and not await self._at_head(site):
            owed = [order for order in owed if order.order in FIRST]
        return [self._say(order) for order in owed]

    async def _at_head(self, site: SiteName) -> bool:
        row = await self._lanes.site(Lane.SCHEDULER, site)
        return row is not None and at_head(row, self._epoch)

    def _say(self, order: OpenOrder) -> Instruction:
        record = order.attempt.record
        name = instruction_id(record.attempt, order.order)
        match order.order:
            case Order.OFFER:
                return self._say_offer(order, name)
            case Order.GO:
                return Go(
                    id=name,
                    number=order.number,
                    epoch=order.epoch,
                    attempt=record.attempt,
                    job=record.job,
                    generation=record.generation,
                    journal=order.attempt.journal,
                    attempt_epoch=record.epoch,
                )
            case Order.WITHDRAW:
                return Withdraw(
                    id=name,
                    number=order.number,
                    epoch=order.epoch,
                    attempt=record.attempt,
                    job=record.job,
                    generation=record.generation,
                    attempt_epoch=record.epoch,
                )
            case Order.STOP:
                reason, cause = stop_words(order.attempt, order.job)
                return Stop(
                    id=name,
                    number=order.number,
                    epoch=order.epoch,
                    attempt=record.attempt,
                    job=record.job,
                    generation=record.generation,
                    reason=reason,
                    grace_s=STOP_GRACE_S,
                    cause=cause,
                )
            case Order.SETTLE:
                return Settle(id=name, number=order.number, epoch=order.epoch, attempt=record.attempt)

    def _say_offer(self, order: OpenOrder, name: InstructionId) -> Offer:
        """With values of the environment a second copy without them goes along, for the site to keep, if both fit."""
        body = self._offer(order)
        sealed = seal(self._key, encode(body), SIGNER)
        offer = Offer(id=name, number=order.number, epoch=order.epoch, attempt=body.attempt, sealed=sealed)
        if not body.env:
            return offer
        kept = seal(self._key, encode(msgspec.structs.replace(body, env={})), SIGNER)
        both = msgspec.structs.replace(offer, adoption=kept)
        return both if len(encode(both)) <= OFFER_BYTES else offer

    def _offer(self, order: OpenOrder) -> OfferBody:
        """All that the site needs, with the sealed word on whose usage it will be."""
        record, job = order.attempt.record, order.job
        attribution = Attribution(
            tenant=record.tenant,
            job=record.job,
            attempt=record.attempt,
            site=record.site,
            pool=record.pool,
            spec=record.spec,
            spec_revision=record.spec_revision,
        )
        queues = any(device.startswith(RIGHT) for device in record.devices)
        return OfferBody(
            job=record.job,
            attempt=record.attempt,
            number=record.number,
            epoch=record.epoch,
            generation=record.generation,
            tenant=record.tenant,
            site=record.site,
            pool=record.pool,
            account=record.account,
            spec=job.spec,
            env=dict(order.env),
            devices=list(record.devices),
            start_within_s=START_WITHIN_S,
            start_by_s=max(job.spec.start_by_s, QUEUED_START_BY_S) if queues else job.spec.start_by_s,
            submit_within_s=job.spec.start_by_s if queues else 0,
            attribution=seal(self._key, encode(attribution), SIGNER),
            traceparent=job.traceparent,
            client_key=job.client_key,
            submitted_by=job.submitted_by,
            lease_s=order.attempt.lease_s,
            offering=record.offering,
            budget=job.spec.budget,
            answer_within_s=_promised(record),
        )

    # --- what a site works by -----------------------------------------------------------------------------------------------------------------

    async def settings(self, site: SiteName, has: int) -> Settings | None:
        """The site's settings, if it has an older revision. A copy that knows less than who made the last one says nothing."""
        if site == CANARY:
            return None
        if self._settled(site, has):
            return None
        settings, known, stamp = self._settings(site), self._knowledge.knows(site), self._knowledge.stamp(site)
        content = digest(encode(settings))
        held = self._made.get(site)
        ahead = has if has <= MOST_REVISION else 0
        if held is None or held.content != content or ahead > held.revision.number:
            revision = await self._store.settings_revision(site, content, known, self._clock.now(), above=ahead)
            if revision is None:
                return None
        else:
            revision = held.revision
        self._made[site] = _Made(content, revision, stamp)
        if has >= revision.number:
            return None
        numbered = msgspec.structs.replace(settings, revision=revision.number, at=revision.at)
        return Settings(revision.number, seal(self._key, encode(numbered), SIGNER))

    def _settings(self, site: SiteName) -> SiteSettings:
        """Their content, without number and date: the same from every copy that knows the same."""
        world = self._knowledge.world
        grants = [seal(self._key, encode(g.body), SIGNER) for g in self._knowledge.grants if g.site == site and g.devices][:GRANTS_PER_SITE]
        specs, room = list[Sealed](), SPEC_BYTES
        for spec in world.own_specs(site)[:SPECS_SENT]:
            body = encode(spec)
            room -= len(body)
            if room >= 0:
                specs.append(seal(self._key, body, SIGNER))
        return SiteSettings(
            revision=0,
            site=site,
            mappings=[
                AccountMapping(tenant=m.tenant, account=m.account) for m in sorted(world.mappings.get(site, ()), key=lambda m: m.tenant)
            ],
            cordoned_pools=sorted(pool for (name, pool), record in world.pools.items() if name == site and _shut(record)),
            telemetry_beat_s=TELEMETRY_BEAT_S * self._scale,
            lane_beat_s=LANE_BEAT_S * self._scale,
            grants=grants,
            specs=specs,
            time_zone=str(self._zone),
            drill=world.drill(site),
        )


def _shut(record: PoolRecord) -> bool:
    """No new work from elsewhere, while the site is alone too."""
    return record.cordoned or record.phase not in PHASE_WORKS


def _promised(record: AttemptRecord) -> int:
    """Within how many seconds of its offer the owner promised an answer; 0: it is no request."""
    return max(0, int((record.answer_by - record.offered_at).total_seconds())) if record.answer_by is not None else 0


def _with_file(file: File | None, decide: Callable[[File], Change | Ignored]) -> Change | Ignored:
    assert file is not None, "an attempt that is open was just named"
    return decide(file)
