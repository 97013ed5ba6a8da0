"""The registry at work: answers calls, interprets its lane, and as leader judges how fresh each site is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from intertie.bus.port import Bus
from intertie.bus.rpc import Caller, Serve
from intertie.clock import Clock
from intertie.contracts import endpoints
from intertie.contracts.base import without_nul
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.identity import AuditQuery, AuditReply
from intertie.contracts.link import (
    DrillConsented,
    DrillRefused,
    DrillReported,
    Inventory,
    JobOfferingsTold,
    JournalOpened,
    Lane,
    LendingPaused,
    LostRange,
    OfferingsTold,
    ProbeTold,
    ProfileDeclared,
    RegistryEntry,
    SiteCondition,
)
from intertie.contracts.site import CordonPool, PoolRecord, RegisterSite, SiteLeft, SiteRecord, SitesQuery, SitesReply
from intertie.ids import SiteName
from intertie.lane.keeper import LaneKeeper
from intertie.lane.tables import LaneEntry, LaneTables
from intertie.link.keeper import SiteRow
from intertie.observe import log
from intertie.registry.call_offerings import CallOfferings
from intertie.registry.core import site
from intertie.registry.core.freshness import Heard, Hearing, Judgement, Limits, first_look, judge, look
from intertie.registry.core.page import page
from intertie.registry.drills import Drills
from intertie.registry.observed import Proofs
from intertie.registry.store import Mark, RegistryStore
from intertie.runtime import Beat
from intertie.store import Leader, StoreTx, audit_reply
from intertie.trust.rights import not_found, require, scope

LOG = log.get("registry")

# How often the leader looks: a fraction of the freshness limit, so that its own beat adds little to it.
JUDGE_S = 1.0
LEADER_ROLE = "judge"
# A bus that does not answer within this is not one through which a site could have been heard.
ALIVE_S = 1.0


class Registry:
    """One copy of the service. Several may run: each answers and interprets, one judges."""

    def __init__(
        self,
        store: RegistryStore,
        lanes: LaneTables,
        bus: Bus,
        clock: Clock,
        *,
        limits: Limits | None = None,
        beat_scale: float = 1.0,
        epoch: int = 1,
    ) -> None:
        self.store, self.lanes, self.clock = store, lanes, clock
        self.limits = limits or Limits().scaled(beat_scale)
        self.beat = Beat("registry-judge", JUDGE_S, scale=beat_scale)
        self.keeper = LaneKeeper(bus, Lane.REGISTRY, lanes, clock, interpret=self.interpret, on_heard=self.on_heard, epoch=lambda: epoch)
        self.bus = bus
        self.drills: Drills | None = None
        """Set where drills are kept; without it what sites say of them is noted and nothing follows."""
        self.call_offerings: CallOfferings | None = None
        """Set where call offerings are kept; without it what sites say of them is noted and nothing follows."""
        self.proofs: Proofs | None = None
        """Set where probes are kept; without it what sites say of them is noted and nothing follows."""
        self._hearings: dict[SiteName, Hearing] = {}
        self._hears_since_s: float | None = None
        self._looked_at_s = 0.0

    # --- calls ---

    def handlers(self) -> Mapping[Endpoint[Any, Any], Serve]:
        return {
            endpoints.SITES: self.sites,
            endpoints.REGISTER_SITE: self.register,
            endpoints.SITE_LEFT: self.left,
            endpoints.CORDON: self.cordon,
            endpoints.REGISTRY_AUDIT: self.audit,
            **(self.call_offerings.handlers() if self.call_offerings is not None else {}),
            **(self.proofs.handlers() if self.proofs is not None else {}),
        }

    async def sites(self, query: SitesQuery, caller: Caller) -> SitesReply:
        """Everyone who may submit sees every site; an owner sees the own one."""
        seen = scope(caller.claims, "site.read")
        if query.site is not None and not seen.covers(site=query.site):
            raise not_found()
        sites, pools = await self.store.sites(query)
        heard = {row.site: row for row in await self.lanes.sites(Lane.REGISTRY)}
        told = page(
            [_as_heard(record, heard.get(record.site)) for record in sites if seen.covers(site=record.site)],
            [_as_heard(record, heard.get(record.site)) for record in pools if seen.covers(site=record.site)],
            query.after,
        )
        return msgspec.structs.replace(told, drill_max_age_days=self.drills.max_age_days if self.drills is not None else 0)

    async def register(self, request: RegisterSite, caller: Caller) -> SiteRecord:
        require(caller.claims, "site.register", site=request.site)
        return await self.store.register(request, actor=caller.claims.sub, now=self.clock.now())

    async def left(self, request: SiteLeft, caller: Caller) -> SiteRecord:
        require(caller.claims, "site.register", site=request.site)
        return await self.store.left(request.site, at=request.at, actor=caller.claims.sub)

    async def cordon(self, request: CordonPool, caller: Caller) -> SitesReply:
        require(caller.claims, "site.cordon", site=request.site)
        await self.store.cordon(request, actor=caller.claims.sub, now=self.clock.now())
        sites, pools = await self.store.sites(SitesQuery(site=request.site))
        return page(sites, pools, "")

    async def audit(self, query: AuditQuery, caller: Caller) -> AuditReply:
        require(caller.claims, "audit.read")
        return await audit_reply(self.store, query)

    # --- the lane ---

    async def interpret(self, entry: LaneEntry) -> None:
        """One entry of the lane, in one transaction with its mark. What a rule refuses is recorded and reported, not set aside."""
        said: RegistryEntry = without_nul(entry.read(RegistryEntry))  # type: ignore[arg-type]  # mypy knows no type[] of a union
        now = self.clock.now()

        async def mark(tx: StoreTx) -> None:
            await self.lanes.mark_interpreted(tx, entry)

        if isinstance(said, ProfileDeclared):
            refusal = await self.store.declared(entry.site, said, now=now, mark=mark)
            if refusal is not None:
                LOG.warning("a declaration was refused", site=entry.site, pool=said.profile.pool[:63], code=refusal.code)
        elif isinstance(said, Inventory):
            taken = await self.store.observed(entry.site, said, now=now, mark=mark)
            if taken.undeclared:
                LOG.warning("pools without a declaration count for nothing", site=entry.site, pools=list(taken.undeclared)[:10])
        elif isinstance(said, LendingPaused | SiteCondition):
            await self.store.said_of_itself(entry.site, said, now=now, mark=mark)
        elif isinstance(said, JournalOpened | LostRange):
            LOG.warning("a site's journal begins anew, or lacks a range", site=entry.site, entry=type(said).__name__)
            await self.store.noted(entry.site, said, mark=mark)
        elif isinstance(said, JobOfferingsTold):
            found = await self.store.offered(entry.site, said, now=now, mark=mark)
            if found.refused:
                LOG.warning("job offerings were refused", site=entry.site, offerings=sorted(found.refused)[:10])
        elif isinstance(said, OfferingsTold):
            await self._of_offerings(entry, said, mark)
        elif isinstance(said, ProbeTold):
            await self._of_probes(entry, said, mark)
        else:
            await self._of_drills(entry, said, mark)

    async def _of_offerings(self, entry: LaneEntry, said: OfferingsTold, mark: Mark) -> None:
        if self.call_offerings is not None:
            await self.call_offerings.told(entry.site, said, mark)
            return
        async with self.store.rows() as rows:
            await mark(rows.tx)

    async def _of_probes(self, entry: LaneEntry, said: ProbeTold, mark: Mark) -> None:
        if self.proofs is not None:
            await self.proofs.told(entry, said, mark)
            return
        async with self.store.rows() as rows:
            await mark(rows.tx)

    async def _of_drills(self, entry: LaneEntry, said: DrillConsented | DrillRefused | DrillReported, mark: Mark) -> None:
        if self.drills is not None:
            await self.drills.said(entry, said, mark)
            return
        async with self.store.rows() as rows:
            await mark(rows.tx)

    async def on_heard(self, rows: Sequence[SiteRow]) -> None:
        """Syncs were recorded. A site that was not known to be heard is judged at once, not with the next beat."""
        now_s = self.clock.monotonic_s()
        for row in rows:
            hearing = self._hearings.get(row.site)
            if hearing is None or not hearing.grown or now_s - hearing.grew_at_s > self.limits.stale_s:
                self.beat.hint()

    # --- the leader ---

    async def judge_for_ever(self) -> None:
        """Lead, and judge while leading. Losing the lead, or the store, begins anew: what was heard before counts for nothing then."""
        await Beat("registry-lead", JUDGE_S).run(self._lead)

    async def _lead(self) -> None:
        async with self.store.leading(LEADER_ROLE) as leader:
            LOG.info("leads the judging of silence", number=leader.number)
            self.takes_office()
            await self.beat.run(lambda: self.judge(leader))

    def takes_office(self) -> None:
        """Nothing seen before counts: every site's patience starts now."""
        self._hearings.clear()
        self._hears_since_s = self._looked_at_s = self.clock.monotonic_s()

    async def judge(self, leader: Leader) -> None:
        """One look at every site that is registered, and a word for every pool that changed unsaid."""
        rows = {row.site: row for row in await self.lanes.sites(Lane.REGISTRY)}
        sites, _ = await self.store.sites(SitesQuery())
        hears_since_s = await self._listens()
        now_s = self.clock.monotonic_s()
        for record in sites:
            row = rows.get(record.site)
            heard = Heard(row.heard, row.taken_nonce) if row is not None else Heard(0, 0)
            known = self._hearings.get(record.site)
            if known is None:
                known = first_look(heard, now_s=now_s, hears_us=record.hears_us)
            self._hearings[record.site] = hearing = look(known, heard, now_s=now_s, limits=self.limits)
            judged = judge(record.freshness, hearing, now_s=now_s, limits=self.limits, hears_since_s=hears_since_s)
            await self._record(record, judged, row, leader)
            state = row.state if row is not None else None
            if site.ruled(record, state, now=self.clock.now()) is not record:
                await self.store.by_rule(record.site, state, leader=leader, now=self.clock.now())
        await self.store.tell(leader=leader, now=self.clock.now())

    async def _record(self, record: SiteRecord, judged: Judgement, row: SiteRow | None, leader: Leader) -> None:
        """Write a judgement if there is news in it."""
        last_heard, offset_s = (
            (row.last_heard, site.sure_offset(row.clock_offset_s, row.clock_error_s)) if row is not None else (None, None)
        )
        if site.heard(record, judged, last_heard=last_heard, clock_offset_s=offset_s) is record:
            return
        now = self.clock.now()
        after = await self.store.heard(record.site, judged, last_heard=last_heard, clock_offset_s=offset_s, leader=leader, now=now)
        if after is not None and after.freshness != record.freshness:
            LOG.info("freshness changed", site=record.site, was=record.freshness.value, now=after.freshness.value)

    async def _listens(self) -> float | None:
        """Since when (monotonic) this leader could have heard a site; None while it cannot."""
        listens = self.keeper.listening.is_set() and await self.bus.alive(ALIVE_S)
        now_s = self.clock.monotonic_s()
        if not listens:
            self._hears_since_s = None
        elif self._hears_since_s is None or now_s - self._looked_at_s > self.limits.stale_s:
            self._hears_since_s = now_s
        self._looked_at_s = now_s
        return self._hears_since_s


R = TypeVar("R", SiteRecord, PoolRecord)


def _as_heard(record: R, row: SiteRow | None) -> R:
    """The record with the time it was last heard: live, while events only tell it when something changed."""
    return record if row is None else msgspec.structs.replace(record, last_heard=row.last_heard)
