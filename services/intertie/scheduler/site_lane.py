"""The scheduler's part of its lane: what an entry does, which instructions a site is owed, and the settings it works by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from intertie.clock import Clock
from intertie.contracts.base import encode
from intertie.contracts.job import Attribution
from intertie.contracts.link import (
    AccountMapping,
    Go,
    Instruction,
    Offer,
    OfferBody,
    OfferRefused,
    SchedulerEntry,
    Settle,
    SiteSettings,
    Stop,
    Withdraw,
)
from intertie.ids import Digest, SiteName, digest
from intertie.lane.keeper import Settings
from intertie.lane.tables import LaneEntry, LaneTables
from intertie.link.journal import InstructionMark
from intertie.link.keeper import SiteRow
from intertie.scheduler.core.interpret import Source, interpret, without_nul
from intertie.scheduler.core.orders import START_WITHIN_S, STOP_GRACE_S, Order, instruction_id
from intertie.scheduler.core.rows import Change
from intertie.scheduler.knowledge import Knowledge
from intertie.scheduler.rounds import Planner
from intertie.scheduler.store import OpenOrder, SchedulerStore
from intertie.trust.keys import Key
from intertie.trust.seal import seal

SIGNER = "scheduler"
TELEMETRY_BEAT_S = 1.0
LANE_BEAT_S = 5.0

_ENTRY: Any = SchedulerEntry
"""A union is no `type[T]` to a checker, and one to the decoder."""


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
    ) -> None:
        self._store, self._lanes, self._knowledge, self._planner = store, lanes, knowledge, planner
        self._clock, self._key, self._scale = clock, key, scale
        self._revisions: dict[SiteName, tuple[Digest, int]] = {}

    async def interpret(self, entry: LaneEntry) -> None:
        """One entry, one transaction: its mark, its change, its events. What cannot be believed is raised, and set aside by the keeper."""
        said: SchedulerEntry = without_nul(entry.read(_ENTRY))
        source, now = Source(entry.site, entry.journal), self._clock.now()
        async with self._store.transaction() as tx:
            await self._lanes.mark_interpreted(tx, entry)
            outcome = await self._store.apply(tx, getattr(said, "attempt", None), lambda file: interpret(said, file, source, now))
        if isinstance(outcome, Change):
            self._see(said, outcome)
            self._planner.hint()

    def _see(self, said: SchedulerEntry, change: Change) -> None:
        """The site's word is newer than its last sample."""
        before, after = change.before.attempt, change.attempt
        if before is None or after is None or not before.live or after.live:
            return
        record = after.record
        keys = [(record.site, record.pool, device) for device in record.devices]
        busy = isinstance(said, OfferRefused) and not said.fault
        (self._knowledge.sight.taken if busy else self._knowledge.sight.freed)(keys, self._clock.monotonic_s())

    async def heard(self, row: SiteRow) -> None:
        """A sync was committed: the site is there, perhaps caught up now."""
        hearing, now_s = self._knowledge.hearing, self._clock.monotonic_s()
        was_ready = hearing.heard(row.site, now_s) and hearing.caught_up(row.site)
        hearing.hear(row, now_s)
        if not was_ready:
            self._planner.hint()

    async def instructions(self, site: SiteName, mark: InstructionMark) -> Sequence[Instruction]:
        """Everything that the site is owed and has not answered."""
        return [self._say(order) for order in await self._store.orders(site, (mark.epoch, mark.number))]

    def _say(self, order: OpenOrder) -> Instruction:
        record = order.attempt.record
        name = instruction_id(record.attempt, order.order)
        match order.order:
            case Order.OFFER:
                sealed = seal(self._key, encode(self._offer(order)), SIGNER)
                return Offer(id=name, number=order.number, epoch=order.epoch, attempt=record.attempt, sealed=sealed)
            case Order.GO:
                return Go(
                    id=name,
                    number=order.number,
                    epoch=order.epoch,
                    attempt=record.attempt,
                    job=record.job,
                    generation=record.generation,
                )
            case Order.WITHDRAW:
                return Withdraw(
                    id=name,
                    number=order.number,
                    epoch=order.epoch,
                    attempt=record.attempt,
                    job=record.job,
                    generation=record.generation,
                )
            case Order.STOP:
                cancel = order.job.cancel
                return Stop(
                    id=name,
                    number=order.number,
                    epoch=order.epoch,
                    attempt=record.attempt,
                    job=record.job,
                    generation=record.generation,
                    reason=f"cancelled by {cancel.actor}: {cancel.reason}"[:4_000] if cancel else "the hub does not count on this run",
                    grace_s=STOP_GRACE_S,
                )
            case Order.SETTLE:
                return Settle(id=name, number=order.number, epoch=order.epoch, attempt=record.attempt)

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
            start_by_s=job.spec.start_by_s,
            attribution=seal(self._key, encode(attribution), SIGNER),
            traceparent=job.traceparent,
            client_key=job.client_key,
        )

    async def settings(self, site: SiteName, has: int) -> Settings | None:
        """The site's settings, if it has an older revision."""
        world = self._knowledge.world
        mappings = sorted(world.mappings.get(site, ()), key=lambda m: m.tenant)
        cordoned = sorted(pool for (name, pool), record in world.pools.items() if name == site and record.cordoned)
        settings = SiteSettings(
            revision=0,
            site=site,
            mappings=[AccountMapping(tenant=m.tenant, account=m.account) for m in mappings],
            cordoned_pools=cordoned,
            telemetry_beat_s=TELEMETRY_BEAT_S * self._scale,
            lane_beat_s=LANE_BEAT_S * self._scale,
            drill=world.drill(site),
        )
        content = digest(encode(settings))
        held = self._revisions.get(site)
        if held is None or held[0] != content:
            held = (content, await self._store.settings_revision(site, content))
            self._revisions[site] = held
        if has >= held[1]:
            return None
        numbered = SiteSettings(
            revision=held[1],
            site=site,
            mappings=settings.mappings,
            cordoned_pools=settings.cordoned_pools,
            telemetry_beat_s=settings.telemetry_beat_s,
            lane_beat_s=settings.lane_beat_s,
            drill=settings.drill,
        )
        return Settings(held[1], seal(self._key, encode(numbered), SIGNER))
