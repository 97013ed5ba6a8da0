"""The registry's rows on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime

import msgspec

from intertie.contracts.base import decode, encode
from intertie.contracts.identity import AuditQuery, AuditRow
from intertie.contracts.modes import PoolHistoryRow
from intertie.contracts.site import PoolRecord, SiteRecord, SitesQuery
from intertie.ids import DeviceId, PoolName, SiteName
from intertie.registry.store import PoolRow, RegistryStore, Rows
from intertie.store import Database, Leader, Tx, load_queries

PACKAGE = "intertie.registry"
Q = load_queries(PACKAGE)


class PgRegistryStore(RegistryStore):
    """`RegistryStore` in the schema `registry`; `Database.migrate(PACKAGE)` makes it."""

    def __init__(self, db: Database) -> None:
        self.db = db

    @asynccontextmanager
    async def _transaction(self, reserved: bool, read_only: bool) -> AsyncIterator[Rows]:
        async with self.db.transaction(reserved=reserved, read_only=read_only) as tx:
            yield PgRows(tx)

    def rows(self, *, reserved: bool = False, read_only: bool = False) -> AbstractAsyncContextManager[Rows]:
        return self._transaction(reserved, read_only)

    def leading(self, role: str) -> AbstractAsyncContextManager[Leader]:
        return self.db.leading(role)

    async def read_audit(self, query: AuditQuery) -> list[AuditRow]:
        return await self.db.read_audit(query)


class PgRows:
    """`Rows` of one transaction."""

    def __init__(self, tx: Tx) -> None:
        self.tx = tx

    async def site(self, name: SiteName) -> SiteRecord | None:
        row = await self.tx.one(Q.site_lock, name)
        return None if row is None else _site(row["record"])

    async def save_site(self, record: SiteRecord) -> None:
        await self.tx.run(Q.site_save, record.site, encode(record))

    async def doubled(self, name: SiteName) -> list[DeviceId]:
        row = await self.tx.one(Q.doubled_load, name)
        return [] if row is None else [DeviceId(card) for card in row["doubled"]]

    async def save_doubled(self, name: SiteName, cards: Sequence[DeviceId]) -> None:
        await self.tx.run(Q.doubled_save, name, list(cards))

    async def pools(self, name: SiteName) -> list[PoolRow]:
        return [_pool_row(row["record"], row["told_version"], row["told_at"]) for row in await self.tx.all(Q.pools_lock, name)]

    async def save_pool(self, row: PoolRow) -> None:
        record = row.record
        await self.tx.run(Q.pool_save, record.site, record.pool, encode(record), row.told_version, row.told_at)

    async def add_revision(self, record: PoolRecord, *, declared_at: datetime, effective_at: datetime) -> None:
        profile = record.profile
        await self.tx.run(
            Q.revision_add, record.site, record.pool, profile.revision, encode(profile), profile.declared_by, declared_at, effective_at
        )

    async def untold(self, limit: int) -> list[PoolRow]:
        return [_pool_row(row["record"], row["told_version"], row["told_at"]) for row in await self.tx.all(Q.pools_untold, limit)]

    async def find(self, query: SitesQuery) -> tuple[list[SiteRecord], list[PoolRecord]]:
        sites = [_site(row["record"]) for row in await self.tx.all(Q.sites_find, query.site)]
        return sites, [_pool(row["record"]) for row in await self.tx.all(Q.pools_find, query.site)]

    async def lift_versions(self, first: int) -> None:
        await self.tx.run(Q.versions_lift, first)

    async def add_decision(self, site: SiteName, pool: PoolName, line: PoolHistoryRow) -> None:
        await self.tx.run(Q.decision_add, site, pool, encode(line), line.at)

    async def decisions(self, site: SiteName, pool: PoolName, limit: int) -> list[PoolHistoryRow]:
        found = await self.tx.all(Q.decisions_find, site, pool, limit)
        return [msgspec.structs.replace(decode(row["row"], PoolHistoryRow, what="stored decision"), number=row["number"]) for row in found]


def _site(text: str) -> SiteRecord:
    return decode(text, SiteRecord, what="stored site")


def _pool(text: str) -> PoolRecord:
    return decode(text, PoolRecord, what="stored pool")


def _pool_row(text: str, told_version: int, told_at: datetime | None) -> PoolRow:
    return PoolRow(record=_pool(text), told_version=told_version, told_at=told_at)
