"""The twin in memory: the same verbs over dictionaries."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import msgspec

from intertie.clock import Clock
from intertie.contracts.identity import AuditQuery, AuditRow, MappingRecord
from intertie.identity.core.sites import SiteAccount
from intertie.identity.store import IdentityStore, InvitationRow, Rows, TenantRow, TokenRow, key_taken
from intertie.ids import SiteName, TenantName, TokenId
from intertie.store import MemoryStore, StoreTx


class MemoryRows(MemoryStore):
    """`Rows` in memory."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        super().__init__("identity", clock=clock)
        self.tenant_rows: dict[TenantName, TenantRow] = {}
        self.token_rows: dict[TokenId, TokenRow] = {}
        self.invitation_rows: dict[TokenId, InvitationRow] = {}
        self.site_rows: dict[SiteName, SiteAccount] = {}
        self.mapping_rows: dict[tuple[SiteName, TenantName], MappingRecord] = {}
        self.map_versions: dict[SiteName, int] = {}

    @property
    def tx(self) -> StoreTx:
        return self

    async def tenant(self, name: TenantName) -> TenantRow | None:
        return self.tenant_rows.get(name)

    async def save_tenant(self, row: TenantRow) -> None:
        self.tenant_rows[row.record.tenant] = row

    async def tenants(self) -> list[TenantRow]:
        return [row for _, row in sorted(self.tenant_rows.items())]

    async def token(self, id: TokenId) -> TokenRow | None:
        return self.token_rows.get(id)

    async def save_token(self, row: TokenRow) -> None:
        self.token_rows[row.record.id] = row

    async def tokens(self) -> list[TokenRow]:
        return [row for _, row in sorted(self.token_rows.items())]

    async def invitation(self, id: TokenId) -> InvitationRow | None:
        return self.invitation_rows.get(id)

    async def save_invitation(self, row: InvitationRow) -> None:
        self.invitation_rows[row.id] = row

    async def open_invitations(self, site: SiteName) -> list[InvitationRow]:
        rows = [row for _, row in sorted(self.invitation_rows.items()) if row.invitation.site == site]
        return [row for row in rows if row.invitation.used_at is None and row.invitation.withdrawn_at is None]

    async def site(self, name: SiteName) -> SiteAccount | None:
        return self.site_rows.get(name)

    async def save_site(self, site: SiteAccount) -> None:
        others = [one for one in self.site_rows.values() if one.site != site.site]
        if any(one.site_key == site.site_key or one.signing_key == site.signing_key for one in others):
            raise key_taken()
        self.site_rows[site.site] = site

    async def sites(self) -> list[SiteAccount]:
        return [row for _, row in sorted(self.site_rows.items())]

    async def mappings(self) -> list[MappingRecord]:
        return [row for _, row in sorted(self.mapping_rows.items())]

    async def mappings_version(self, site: SiteName) -> int:
        return self.map_versions.get(site, 0)

    async def save_mapping(self, record: MappingRecord, version: int) -> None:
        self.mapping_rows[record.site, record.tenant] = record
        self.map_versions[record.site] = version

    async def remove_mapping(self, site: SiteName, tenant: TenantName, version: int) -> None:
        self.mapping_rows.pop((site, tenant), None)
        self.map_versions[site] = version

    async def mapping_versions(self) -> dict[SiteName, int]:
        return dict(self.map_versions)

    async def lift_versions(self, first: int) -> None:
        for tenant, row in self.tenant_rows.items():
            self.tenant_rows[tenant] = replace(row, version=max(row.version, first))
        for name, site in self.site_rows.items():
            self.site_rows[name] = msgspec.structs.replace(site, version=max(site.version, first))
        for name, version in self.map_versions.items():
            self.map_versions[name] = max(version, first)


class MemoryIdentityStore(IdentityStore):
    """`IdentityStore` in memory; `memory` holds the rows, and `memory.events`, `memory.audits` what tests read."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self.memory = MemoryRows(clock=clock)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Rows]:
        async with self.memory.transaction():
            yield self.memory

    def rows(self, *, read_only: bool = False) -> AbstractAsyncContextManager[Rows]:
        return self._transaction()

    async def read_audit(self, query: AuditQuery) -> list[AuditRow]:
        return await self.memory.read_audit(query)
