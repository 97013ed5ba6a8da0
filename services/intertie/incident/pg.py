"""The port on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from intertie.contracts.base import EventMeta, decode, encode
from intertie.contracts.identity import AuditQuery, AuditRow
from intertie.contracts.incident import IncidentChanged, IncidentRecord, IncidentsQuery, ReportIncident
from intertie.contracts.site import Phase, PoolRecord, SiteRecord
from intertie.ids import IncidentId, SiteName, mint
from intertie.incident import core
from intertie.incident.store import RULE, Decide
from intertie.store import Database, Tx, load_queries
from intertie.trust.rights import Scope

PACKAGE = "intertie.incident"
Q = load_queries(PACKAGE)


class PgIncidentStore:
    """`IncidentStore` in the schema `incident`; `Database.migrate(PACKAGE)` makes it."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.first_version = 1

    async def lift_versions(self, first: int) -> None:
        self.first_version = first
        if first > 1:
            async with self.db.transaction() as tx:
                await tx.run(Q.versions_lift, first)

    async def fold(self, report: ReportIncident, *, now: datetime, actor: str, meta: EventMeta | None = None) -> IncidentRecord | None:
        async with self.db.transaction() as tx:
            if meta is not None and not await tx.first_time(meta):
                row = await tx.one(Q.incident_open, report.key)
                return None if row is None else _record(row["record"])
            return await self._fold(tx, report, now=now, actor=actor)

    async def apply_site(self, site: SiteRecord, *, now: datetime, meta: EventMeta | None = None) -> IncidentRecord | None:
        async with self.db.transaction() as tx:
            if meta is not None and not await tx.first_time(meta):
                return None
            if not await tx.run(Q.site_apply, site.site, site.version, encode(site)):
                return None
            return await self._judge(tx, site, now)

    async def apply_pool(self, pool: PoolRecord, *, now: datetime, meta: EventMeta | None = None) -> IncidentRecord | None:
        async with self.db.transaction() as tx:
            if meta is not None and not await tx.first_time(meta):
                return None
            known = await _phases(tx, pool.site)
            if not await tx.run(Q.pool_apply, pool.site, pool.pool, pool.version, pool.phase):
                return None
            row = await tx.one(Q.site_load, pool.site)
            if row is None or await _phases(tx, pool.site) == known:
                return None
            return await self._judge(tx, decode(row["record"], SiteRecord), now)

    async def get(self, incident: IncidentId) -> IncidentRecord | None:
        async with self.db.transaction(read_only=True) as tx:
            row = await tx.one(Q.incident_load, incident)
        return None if row is None else _record(row["record"])

    async def find(self, query: IncidentsQuery, seen: Scope) -> Sequence[IncidentRecord]:
        async with self.db.transaction(read_only=True) as tx:
            rows = await tx.all(Q.incident_list, query.state, query.site, seen.everything, seen.tenant, seen.site, query.limit)
        return [_record(row["record"]) for row in rows]

    async def change(self, incident: IncidentId, decide: Decide, *, actor: str, action: str, reason: str = "") -> IncidentRecord | None:
        async with self.db.transaction() as tx:
            row = await tx.one(Q.incident_lock, incident)
            if row is None:
                return None
            before = _record(row["record"])
            after = decide(before)
            if after is not before:
                await _save(tx, after, actor=actor, action=action, reason=reason)
            return after

    async def read_audit(self, query: AuditQuery) -> list[AuditRow]:
        return await self.db.read_audit(query)

    async def _judge(self, tx: Tx, site: SiteRecord, now: datetime) -> IncidentRecord | None:
        report = core.site_report(site, await _phases(tx, site.site))
        return None if report is None else await self._fold(tx, report, now=now, actor=RULE)

    async def _fold(self, tx: Tx, report: ReportIncident, *, now: datetime, actor: str) -> IncidentRecord | None:
        await tx.one(Q.key_lock, report.key)
        row = await tx.one(Q.incident_open, report.key)
        before = None if row is None else _record(row["record"])
        after = core.fold(before, report, now=now, new_id=IncidentId(mint("inc")), version=self.first_version)
        if after is not None and after is not before:
            await _save(tx, after, actor=actor, action=core.folding(before, after), reason=report.title)
        return after


async def _phases(tx: Tx, site: SiteName) -> list[Phase]:
    return [Phase(row["phase"]) for row in await tx.all(Q.pool_phases, site)]


async def _save(tx: Tx, record: IncidentRecord, *, actor: str, action: str, reason: str) -> None:
    await tx.run(Q.incident_save, record.incident, encode(record))
    await tx.emit(IncidentChanged(version=record.version, record=record))
    await tx.audit(actor=actor, action=action, target=record.incident, reason=reason)


def _record(text: str) -> IncidentRecord:
    return decode(text, IncidentRecord, what="stored incident")
