"""Identity's rows on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from intertie.contracts.base import decode, encode
from intertie.contracts.identity import AuditQuery, AuditRow, MappingRecord, TenantRecord, TokenRecord
from intertie.identity.core.sites import Invitation, SiteAccount
from intertie.identity.store import IdentityStore, InvitationRow, Rows, TenantRow, TokenRow, key_taken
from intertie.ids import SiteName, TenantName, TokenId
from intertie.store import Database, Tx, Violated, load_queries

PACKAGE = "intertie.identity"
Q = load_queries(PACKAGE)

_KEYS = frozenset({"site_account_site_key_key", "site_account_signing_key_key"})


class PgIdentityStore(IdentityStore):
    """`IdentityStore` in the schema `identity`; `Database.migrate(PACKAGE)` makes it."""

    def __init__(self, db: Database) -> None:
        self.db = db

    @asynccontextmanager
    async def _transaction(self, read_only: bool) -> AsyncIterator[Rows]:
        # A snapshot must be of one moment, so that no entity is older than another.
        async with self.db.transaction(read_only=read_only, isolation="repeatable read" if read_only else "read committed") as tx:
            yield PgRows(tx, locking=not read_only)

    def rows(self, *, read_only: bool = False) -> AbstractAsyncContextManager[Rows]:
        return self._transaction(read_only)

    async def read_audit(self, query: AuditQuery) -> list[AuditRow]:
        return await self.db.read_audit(query)


class PgRows:
    """`Rows` of one transaction."""

    def __init__(self, tx: Tx, *, locking: bool) -> None:
        self.tx = tx
        self._locking = locking

    async def tenant(self, name: TenantName) -> TenantRow | None:
        row = await self.tx.one(Q.tenant_lock if self._locking else Q.tenant_load, name)
        return None if row is None else TenantRow(decode(row["record"], TenantRecord), row["version"])

    async def save_tenant(self, row: TenantRow) -> None:
        await self.tx.run(Q.tenant_save, row.record.tenant, encode(row.record), row.version)

    async def tenants(self) -> list[TenantRow]:
        return [TenantRow(decode(row["record"], TenantRecord), row["version"]) for row in await self.tx.all(Q.tenants)]

    async def token(self, id: TokenId) -> TokenRow | None:
        row = await self.tx.one(Q.token_lock if self._locking else Q.token_load, id)
        return None if row is None else TokenRow(decode(row["record"], TokenRecord), row["digest"])

    async def save_token(self, row: TokenRow) -> None:
        await self.tx.run(Q.token_save, row.record.id, encode(row.record), row.digest)

    async def tokens(self) -> list[TokenRow]:
        return [TokenRow(decode(row["record"], TokenRecord), row["digest"]) for row in await self.tx.all(Q.tokens)]

    async def invitation(self, id: TokenId) -> InvitationRow | None:
        row = await self.tx.one(Q.invitation_lock if self._locking else Q.invitation_load, id)
        return None if row is None else _invitation(row["id"], row["digest"], row["record"])

    async def save_invitation(self, row: InvitationRow) -> None:
        await self.tx.run(Q.invitation_save, row.id, row.digest, encode(row.invitation))

    async def open_invitations(self, site: SiteName) -> list[InvitationRow]:
        return [_invitation(row["id"], row["digest"], row["record"]) for row in await self.tx.all(Q.invitations_open, site)]

    async def site(self, name: SiteName) -> SiteAccount | None:
        row = await self.tx.one(Q.site_lock if self._locking else Q.site_load, name)
        return None if row is None else decode(row["record"], SiteAccount)

    async def save_site(self, site: SiteAccount) -> None:
        try:
            await self.tx.run(Q.site_save, site.site, encode(site))
        except Violated as err:
            if err.constraint in _KEYS:
                raise key_taken() from err
            raise

    async def sites(self) -> list[SiteAccount]:
        return [decode(row["record"], SiteAccount) for row in await self.tx.all(Q.sites)]

    async def mappings(self) -> list[MappingRecord]:
        return [
            MappingRecord(tenant=TenantName(row["tenant"]), site=SiteName(row["site"]), account=row["account"])
            for row in await self.tx.all(Q.mappings)
        ]

    async def mappings_version(self, site: SiteName) -> int:
        row = await self.tx.one(Q.mapping_version, site)
        return 0 if row is None else int(row["version"])

    async def save_mapping(self, record: MappingRecord, version: int) -> None:
        await self.tx.run(Q.mapping_save, record.site, record.tenant, record.account)
        await self.tx.run(Q.mapping_version_save, record.site, version)

    async def remove_mapping(self, site: SiteName, tenant: TenantName, version: int) -> None:
        await self.tx.run(Q.mapping_remove, site, tenant)
        await self.tx.run(Q.mapping_version_save, site, version)

    async def mapping_versions(self) -> dict[SiteName, int]:
        return {SiteName(row["site"]): row["version"] for row in await self.tx.all(Q.mapping_versions)}

    async def lift_versions(self, first: int) -> None:
        await self.tx.run(Q.versions_lift, first)


def _invitation(id: str, digest: str, text: str) -> InvitationRow:
    return InvitationRow(TokenId(id), digest, decode(text, Invitation))
