"""What the scheduler knows of others: events and snapshots go to disk first, then into the world that rounds look at."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from intertie.bus import rpc
from intertie.bus.port import Bus, Message, Subscription
from intertie.clock import Clock
from intertie.contracts import endpoints
from intertie.contracts.base import PREFIX, Empty, EventMeta
from intertie.contracts.drill import DrillChanged
from intertie.contracts.identity import MappingsChanged, SiteKeyChanged
from intertie.contracts.site import PoolChanged, SiteChanged, SitesQuery
from intertie.contracts.telemetry import decode_sample
from intertie.contracts.usage import AllowanceChanged, SpecAgreed
from intertie.errors import Stale, Unavailable
from intertie.ids import SiteName
from intertie.observe import log
from intertie.scheduler.core.given import Fact
from intertie.scheduler.core.grants import Grant
from intertie.scheduler.core.hearing import Hearing
from intertie.scheduler.core.sight import Sight
from intertie.scheduler.core.world import (
    DRILL,
    MAPPINGS,
    POOL,
    SPEC,
    World,
    allowance_fact,
    drill_fact,
    mappings_fact,
    pool_fact,
    site_fact,
    site_key_fact,
    spec_fact,
)
from intertie.scheduler.store import SchedulerStore

# A snapshot is one answer with everything; it may have to wait for a service that is just starting.
SNAPSHOT_S = 5.0
TELEMETRY = f"{PREFIX}.tel.gpu.*.*"
# Samples of a second from a thousand nodes; older ones are dropped first, and newer ones say the same better.
TELEMETRY_BACKLOG = 2_000
# Below this age of the last word, a site whose registry lane alone is late is not called silent. BUILD 5: three lane beats.
QUIET_S = 15.0
# One read of a few rows a site; a copy that was not told plans and answers with what is so old at most.
FOLLOW_S = 10.0

LOG = log.get("scheduler.knowledge")


class Knowledge:
    """World, sight and hearing of this process. `changed` is told which sites' settings may differ now (empty: none)."""

    def __init__(
        self,
        store: SchedulerStore,
        bus: Bus,
        clock: Clock,
        claims: Callable[[], str],
        *,
        world: World,
        sight: Sight,
        hearing: Hearing,
        changed: Callable[[Sequence[SiteName]], Awaitable[None]],
        quiet_s: float = QUIET_S,
    ) -> None:
        self.world, self.sight, self.hearing = world, sight, hearing
        self._store, self._bus, self._clock, self._claims = store, bus, clock, claims
        self._changed, self._quiet_s = changed, quiet_s
        self._versions: dict[tuple[str, str], int] = {}
        self.grants: Sequence[Grant] = ()
        """Islanded allowances, as last read from disk."""
        self._known: Counter[SiteName] = Counter()
        """Versions of a site's own facts that its settings hold, summed; `_of_all`: of those that may be any site's."""
        self._of_all = 0
        self._stamps: Counter[SiteName] = Counter()
        self._stamp_of_all = 0

    async def load(self) -> None:
        """What was known when this process stopped."""
        self._take(await self._store.known())
        # Nobody is told of them: who would be is not there yet.
        self._take_grants(await self._store.grants())

    async def read_grants(self) -> None:
        """Those that this or another copy of the service has set."""
        before = self.grants
        self._take_grants(await self._store.grants())
        if differing := sorted({grant.site for grant in {*before} ^ {*self.grants}}):
            await self._changed(differing)

    def _take_grants(self, grants: Sequence[Grant]) -> None:
        for grant in {*self.grants} ^ {*grants}:
            self._stamps[grant.site] += 1
        self.grants = grants

    def knows(self, site: SiteName) -> int:
        """How much this copy knows of what a site's settings hold: it only rises, and a copy that is behind has less."""
        return self._of_all + self._known[site] + sum(grant.revision for grant in self.grants if grant.site == site)

    def stamp(self, site: SiteName) -> tuple[int, int]:
        """Another one whenever something became known here that this site's settings may hold: while it is the same, so are they."""
        return self._stamp_of_all, self._stamps[site]

    async def follow(self) -> None:
        """An event goes to one copy of this service and then to disk: the others find it there. Until cancelled."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                await self._tell(self._take(await self._store.known()))
                await self.read_grants()
            except (Unavailable, Stale) as err:
                LOG.warning("what other copies learnt is read later", code=err.code, text=err.text)

    def _take(self, facts: Iterable[Fact]) -> list[Fact]:
        """Those that are newer than what this process holds, applied."""
        newer = [fact for fact in facts if fact.version > self._versions.get((fact.noun, fact.entity), 0)]
        for fact in newer:
            key = (fact.noun, fact.entity)
            gained, self._versions[key] = fact.version - self._versions.get(key, 0), fact.version
            self.world.apply(fact)
            self._stamped(fact, gained)
        return newer

    def _stamped(self, fact: Fact, gained: int) -> None:
        site = SiteName(fact.entity.split("/")[0])
        if fact.noun == SPEC:
            self._of_all += gained
            self._stamp_of_all += 1
        elif fact.noun in (MAPPINGS, POOL):
            self._known[site] += gained
            self._stamps[site] += 1
        elif fact.noun == DRILL:
            self._stamps[site] += 1

    def silent_since(self, site: SiteName | None) -> datetime | None:
        """When a site that is silent now was last heard by anybody here; None while it speaks, or if no site is meant."""
        if site is None:
            return None
        now_s = self._clock.monotonic_s()
        by_lane = self.hearing.silent_since(site, now_s)
        if by_lane is not None:
            return by_lane
        by_registry = self.world.stale_since(site)
        if by_registry is None or self.hearing.quiet_for_s(site, now_s) <= self._quiet_s:
            return None
        return max(by_registry, self.hearing.last_heard(site) or by_registry)

    # --- events and snapshots ------------------------------------------------------------------------------------------------------------------

    def handlers(self) -> Mapping[type[Any], Callable[[Any, EventMeta], Awaitable[None]]]:
        """For the consumer: event type → what is done with it."""
        return {
            SiteChanged: lambda event, meta: self._learn([site_fact(event.record, meta.time)], meta),
            PoolChanged: lambda event, meta: self._learn([pool_fact(event.record, meta.time)], meta),
            DrillChanged: lambda event, meta: self._learn([drill_fact(event.record, meta.time)], meta),
            MappingsChanged: lambda event, meta: self._learn([mappings_fact(event, meta.time)], meta),
            SiteKeyChanged: lambda event, meta: self._learn([site_key_fact(event, meta.time)], meta),
            SpecAgreed: lambda event, meta: self._learn([spec_fact(event, meta.time)], meta),
            AllowanceChanged: lambda event, meta: self._learn([allowance_fact(event, meta.time)], meta),
        }

    def snapshots(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """For the consumer: keeper → how to ask for all it has."""
        return {"registry": self._ask_registry, "identity": self._ask_identity, "metering": self._ask_metering}

    async def _ask_registry(self) -> None:
        query: SitesQuery | None = SitesQuery()
        while query is not None:
            reply = await rpc.call(self._bus, endpoints.SITES, query, claims=self._claims(), timeout_s=SNAPSHOT_S)
            at = self._clock.now()
            await self._learn([*(site_fact(site, at) for site in reply.sites), *(pool_fact(pool, at) for pool in reply.pools)])
            query = SitesQuery(after=reply.next) if reply.next else None

    async def _ask_identity(self) -> None:
        reply = await rpc.call(self._bus, endpoints.IDENTITY_SNAPSHOT, Empty(), claims=self._claims(), timeout_s=SNAPSHOT_S)
        at = self._clock.now()
        await self._learn([*(mappings_fact(e, at) for e in reply.mappings), *(site_key_fact(e, at) for e in reply.site_keys)])

    async def _ask_metering(self) -> None:
        reply = await rpc.call(self._bus, endpoints.METERING_SNAPSHOT, Empty(), claims=self._claims(), timeout_s=SNAPSHOT_S)
        at = self._clock.now()
        await self._learn([*(spec_fact(e, at) for e in reply.specs), *(allowance_fact(e, at) for e in reply.allowances)])

    async def _learn(self, facts: Sequence[Fact], meta: EventMeta | None = None) -> None:
        await self._store.learn(facts, meta)
        # Also what another copy had put on disk before: it is as new to this process.
        await self._tell(self._take(facts))

    async def _tell(self, newer: Sequence[Fact]) -> None:
        if newer:
            await self._changed(sorted({SiteName(f.entity.split("/")[0]) for f in newer if f.noun in (MAPPINGS, POOL, DRILL)}))

    # --- telemetry -------------------------------------------------------------------------------------------------------------------------------

    async def watch(self) -> Subscription:
        """Listen to live samples. What a stream still holds is never read: it could make nothing eligible."""
        return await self._bus.subscribe(TELEMETRY, self._on_sample, workers=1, backlog=TELEMETRY_BACKLOG)

    async def _on_sample(self, message: Message) -> None:
        site = SiteName(message.subject.split(".")[4])
        if self.sight.observe(site, decode_sample(message.body), self._clock.monotonic_s()):
            await self._changed([])
