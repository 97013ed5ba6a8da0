"""The twin in memory: the same suite passes on both."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from intertie.clock import Clock
from intertie.contracts.base import EventMeta
from intertie.contracts.incident import IncidentChanged, IncidentRecord, IncidentsQuery, IncidentState, ReportIncident
from intertie.contracts.site import Phase, PoolRecord, SiteRecord
from intertie.ids import IncidentId, PoolName, SiteName, mint
from intertie.incident import core
from intertie.incident.store import RULE, Decide
from intertie.store import MemoryStore
from intertie.trust.rights import Scope


class MemoryIncidentStore(MemoryStore):
    """`IncidentStore` in memory."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        super().__init__("incident", clock=clock)
        self.incidents: dict[IncidentId, IncidentRecord] = {}
        self.sites: dict[SiteName, SiteRecord] = {}
        self.pools: dict[tuple[SiteName, PoolName], tuple[int, Phase]] = {}
        self.first_version = 1

    async def lift_versions(self, first: int) -> None:
        async with self.transaction():
            self.first_version = first
            for name, record in self.incidents.items():
                self.incidents[name] = msgspec.structs.replace(record, version=max(record.version, first))

    async def fold(self, report: ReportIncident, *, now: datetime, actor: str, meta: EventMeta | None = None) -> IncidentRecord | None:
        async with self.transaction():
            if meta is not None and not await self.first_time(meta):
                return self._open(report.key)
            return await self._fold(report, now, actor)

    async def apply_site(self, site: SiteRecord, *, now: datetime, meta: EventMeta | None = None) -> IncidentRecord | None:
        async with self.transaction():
            if meta is not None and not await self.first_time(meta):
                return None
            known = self.sites.get(site.site)
            if known is not None and known.version >= site.version:
                return None
            self.sites[site.site] = site
            return await self._judge(site, now)

    async def apply_pool(self, pool: PoolRecord, *, now: datetime, meta: EventMeta | None = None) -> IncidentRecord | None:
        async with self.transaction():
            if meta is not None and not await self.first_time(meta):
                return None
            known = self._phases(pool.site)
            held = self.pools.get((pool.site, pool.pool))
            if held is not None and held[0] >= pool.version:
                return None
            self.pools[pool.site, pool.pool] = (pool.version, pool.phase)
            site = self.sites.get(pool.site)
            if site is None or self._phases(pool.site) == known:
                return None
            return await self._judge(site, now)

    async def get(self, incident: IncidentId) -> IncidentRecord | None:
        return self.incidents.get(incident)

    async def find(self, query: IncidentsQuery, seen: Scope) -> Sequence[IncidentRecord]:
        found = [
            record
            for _, record in sorted(self.incidents.items(), reverse=True)
            if query.state in (None, record.state) and query.site in (None, record.site) and seen.covers(record.tenant, record.site)
        ]
        return found[: query.limit]

    async def change(self, incident: IncidentId, decide: Decide, *, actor: str, action: str, reason: str = "") -> IncidentRecord | None:
        async with self.transaction():
            before = self.incidents.get(incident)
            if before is None:
                return None
            after = decide(before)
            if after is not before:
                await self._save(after, actor=actor, action=action, reason=reason)
            return after

    def _open(self, key: str) -> IncidentRecord | None:
        return next((r for r in self.incidents.values() if r.key == key and r.state is not IncidentState.CLOSED), None)

    def _phases(self, site: SiteName) -> list[Phase]:
        return [phase for (where, _), (_, phase) in sorted(self.pools.items()) if where == site]

    async def _judge(self, site: SiteRecord, now: datetime) -> IncidentRecord | None:
        report = core.site_report(site, self._phases(site.site))
        return None if report is None else await self._fold(report, now, RULE)

    async def _fold(self, report: ReportIncident, now: datetime, actor: str) -> IncidentRecord | None:
        before = self._open(report.key)
        after = core.fold(before, report, now=now, new_id=IncidentId(mint("inc")), version=self.first_version)
        if after is not None and after is not before:
            await self._save(after, actor=actor, action=core.folding(before, after), reason=report.title)
        return after

    async def _save(self, record: IncidentRecord, *, actor: str, action: str, reason: str) -> None:
        self.incidents[record.incident] = record
        await self.emit(IncidentChanged(version=record.version, record=record))
        await self.audit(actor=actor, action=action, target=record.incident, reason=reason)
