"""The twin in memory: the same verbs over dictionaries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime

import msgspec

from intertie.clock import Clock
from intertie.contracts.identity import AuditQuery, AuditRow
from intertie.contracts.modes import PoolHistoryRow
from intertie.contracts.site import PoolProfile, PoolRecord, SiteRecord, SitesQuery
from intertie.ids import DeviceId, PoolName, SiteName
from intertie.registry.store import PoolRow, RegistryStore, Rows
from intertie.store import Leader, MemoryStore, StoreTx


class MemoryRows(MemoryStore):
    """`Rows` in memory."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        super().__init__("registry", clock=clock)
        self.sites: dict[SiteName, SiteRecord] = {}
        self.doubles: dict[SiteName, tuple[DeviceId, ...]] = {}
        self.pool_rows: dict[tuple[SiteName, PoolName], PoolRow] = {}
        self.revisions: dict[tuple[SiteName, PoolName, int], tuple[PoolProfile, datetime, datetime]] = {}
        """(declared at, effective at) beside each revision."""
        self.pool_decisions: dict[tuple[SiteName, PoolName], list[PoolHistoryRow]] = {}

    @property
    def tx(self) -> StoreTx:
        return self

    async def site(self, name: SiteName) -> SiteRecord | None:
        return self.sites.get(name)

    async def save_site(self, record: SiteRecord) -> None:
        self.sites[record.site] = record

    async def doubled(self, name: SiteName) -> list[DeviceId]:
        return list(self.doubles.get(name, ()))

    async def save_doubled(self, name: SiteName, cards: Sequence[DeviceId]) -> None:
        self.doubles[name] = tuple(cards)

    async def pools(self, name: SiteName) -> list[PoolRow]:
        return [row for (site, _), row in sorted(self.pool_rows.items()) if site == name]

    async def save_pool(self, row: PoolRow) -> None:
        self.pool_rows[row.record.site, row.record.pool] = row

    async def add_revision(self, record: PoolRecord, *, declared_at: datetime, effective_at: datetime) -> None:
        key = (record.site, record.pool, record.profile.revision)
        assert key not in self.revisions, f"revision {key} exists"
        self.revisions[key] = (record.profile, declared_at, effective_at)

    async def untold(self, limit: int) -> list[PoolRow]:
        return [row for _, row in sorted(self.pool_rows.items()) if row.told_version < row.record.version][:limit]

    async def find(self, query: SitesQuery) -> tuple[list[SiteRecord], list[PoolRecord]]:
        sites = [record for name, record in sorted(self.sites.items()) if query.site in (None, name)]
        return sites, [row.record for (name, _), row in sorted(self.pool_rows.items()) if query.site in (None, name)]

    async def lift_versions(self, first: int) -> None:
        for name, record in self.sites.items():
            self.sites[name] = msgspec.structs.replace(record, version=max(record.version, first))
        for key, row in self.pool_rows.items():
            lifted = msgspec.structs.replace(row.record, version=max(row.record.version, first))
            self.pool_rows[key] = msgspec.structs.replace(row, record=lifted)

    async def add_decision(self, site: SiteName, pool: PoolName, line: PoolHistoryRow) -> None:
        kept = self.pool_decisions.setdefault((site, pool), [])
        kept.append(msgspec.structs.replace(line, number=len(kept) + 1))

    async def decisions(self, site: SiteName, pool: PoolName, limit: int) -> list[PoolHistoryRow]:
        return self.pool_decisions.get((site, pool), [])[::-1][:limit]


class MemoryRegistryStore(RegistryStore):
    """`RegistryStore` in memory; `memory` holds the rows, and `memory.events`, `memory.audits` what tests read."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self.memory = MemoryRows(clock=clock)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Rows]:
        async with self.memory.transaction():
            yield self.memory

    def rows(self, *, reserved: bool = False, read_only: bool = False) -> AbstractAsyncContextManager[Rows]:
        return self._transaction()

    def leading(self, role: str) -> AbstractAsyncContextManager[Leader]:
        return self.memory.leading(role)

    async def read_audit(self, query: AuditQuery) -> list[AuditRow]:
        return await self.memory.read_audit(query)
