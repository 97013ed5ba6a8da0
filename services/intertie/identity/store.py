"""Identity's store: its verbs, each one transaction, written once over `Rows`. `pg` and `memory` only say how a row is read and saved.

Secrets are not here: of tokens there are digests, of keys the public halves. A verb loads under a lock, asks the core, and saves record,
events and audit row together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import msgspec

from intertie.contracts.identity import (
    AuditQuery,
    AuditRow,
    CreateTenant,
    IdentitySnapshotReply,
    InviteSite,
    JoinSite,
    MapAccount,
    MappingRecord,
    MappingsChanged,
    SiteKeyChanged,
    TenantChanged,
    TenantRecord,
    TokenRecord,
)
from intertie.contracts.incident import ReportIncident
from intertie.contracts.link import Sealed
from intertie.errors import Conflict, NotFound
from intertie.identity.core import people, sites
from intertie.identity.core.sites import Invitation, SiteAccount
from intertie.ids import SiteName, TenantName, TokenId
from intertie.store import StoreTx
from intertie.trust.rights import Scope

Sign = Callable[[SiteAccount], SiteAccount]
"""The site with its account signed anew. Pure but for the operator's key that it holds."""


@dataclass(frozen=True, slots=True)
class TenantRow:
    record: TenantRecord
    version: int


@dataclass(frozen=True, slots=True)
class TokenRow:
    record: TokenRecord
    digest: str


@dataclass(frozen=True, slots=True)
class InvitationRow:
    id: TokenId
    digest: str
    invitation: Invitation


class Rows(Protocol):
    """One transaction's view of identity's tables. What is read by name stays locked until its end, save in a read-only one."""

    @property
    def tx(self) -> StoreTx: ...

    async def tenant(self, name: TenantName) -> TenantRow | None: ...

    async def save_tenant(self, row: TenantRow) -> None: ...

    async def tenants(self) -> list[TenantRow]: ...

    async def token(self, id: TokenId) -> TokenRow | None: ...

    async def save_token(self, row: TokenRow) -> None: ...

    async def tokens(self) -> list[TokenRow]: ...

    async def invitation(self, id: TokenId) -> InvitationRow | None: ...

    async def save_invitation(self, row: InvitationRow) -> None: ...

    async def open_invitations(self, site: SiteName) -> list[InvitationRow]:
        """Neither used nor withdrawn."""
        ...

    async def site(self, name: SiteName) -> SiteAccount | None: ...

    async def save_site(self, site: SiteAccount) -> None:
        """`Conflict('identity.key_taken')` if another site has one of its keys."""
        ...

    async def sites(self) -> list[SiteAccount]: ...

    async def mappings(self) -> list[MappingRecord]: ...

    async def mappings_version(self, site: SiteName) -> int:
        """Of a site's mappings as a whole; 0 if it never had one."""
        ...

    async def save_mapping(self, record: MappingRecord, version: int) -> None: ...

    async def remove_mapping(self, site: SiteName, tenant: TenantName, version: int) -> None: ...

    async def mapping_versions(self) -> dict[SiteName, int]: ...

    async def lift_versions(self, first: int) -> None: ...


class IdentityStore(ABC):
    """All verbs raise `Unavailable` when the store is away."""

    first_version = 1
    """Of a tenant or site that is new, and of a site's first mappings."""

    @abstractmethod
    def rows(self, *, read_only: bool = False) -> AbstractAsyncContextManager[Rows]:
        """A transaction."""

    @abstractmethod
    async def read_audit(self, query: AuditQuery) -> list[AuditRow]: ...

    async def lift_versions(self, first: int) -> None:
        """No entity has a version below `first` from here on (`store.first_version`), and what is new begins with it; nothing else changes."""
        self.first_version = first
        if first > 1:
            async with self.rows() as rows:
                await rows.lift_versions(first)

    # --- people ---

    async def create_tenant(self, request: CreateTenant, *, actor: str, now: datetime) -> TenantRecord:
        """A tenant; the one that exists if the request repeats it."""
        async with self.rows() as rows:
            known = await rows.tenant(request.tenant)
            record = people.new_tenant(known.record if known else None, request, now=now)
            if known is None:
                await rows.save_tenant(TenantRow(record, self.first_version))
                await rows.tx.emit(TenantChanged(version=self.first_version, record=record))
                await rows.tx.audit(actor=actor, action="tenant.create", target=record.tenant)
            return record

    async def tenants(self, seen: Scope) -> list[TenantRecord]:
        async with self.rows(read_only=True) as rows:
            return [row.record for row in await rows.tenants() if seen.covers(tenant=row.record.tenant)]

    async def add_token(self, record: TokenRecord, digest: str, *, actor: str) -> None:
        """Keep a new token's record; its tenant must be known, its site at least invited."""
        async with self.rows() as rows:
            if record.tenant is not None:
                known = await rows.tenant(record.tenant)
                if known is None or not known.record.active:
                    raise NotFound(
                        "identity.tenant_unknown",
                        f"there is no tenant {record.tenant}",
                        next_step=f"intertie tenant create {record.tenant}",
                    )
            if record.site is not None and await rows.site(record.site) is None and not await rows.open_invitations(record.site):
                raise NotFound(
                    "identity.site_unknown", f"there is no site {record.site}, nor is one invited", next_step="intertie site invite"
                )
            await rows.save_token(TokenRow(record, digest))
            await rows.tx.audit(
                actor=actor,
                action="token.create",
                target=record.id,
                reason=f"{record.name} ({', '.join(record.roles)}) {record.tenant or ''}".strip(),
            )

    async def add_first_operator(self, record: TokenRecord, digest: str, *, now: datetime) -> bool:
        """Keep the bootstrap operator's token, unless somebody is operator already: then False."""
        async with self.rows() as rows:
            if any(_is_live_operator(row.record, now) for row in await rows.tokens()):
                return False
            await rows.save_token(TokenRow(record, digest))
            await rows.tx.audit(actor="bootstrap", action="token.create", target=record.id, reason="first operator")
            return True

    async def has_operator(self, *, now: datetime) -> bool:
        async with self.rows(read_only=True) as rows:
            return any(_is_live_operator(row.record, now) for row in await rows.tokens())

    async def token(self, id: TokenId) -> tuple[TokenRow | None, TenantRecord | None]:
        """A token with the tenant that it names."""
        async with self.rows(read_only=True) as rows:
            row = await rows.token(id)
            tenant = await rows.tenant(row.record.tenant) if row is not None and row.record.tenant is not None else None
            return row, tenant.record if tenant else None

    async def touch_token(self, id: TokenId, *, now: datetime) -> None:
        """It was used just now. No audit row: this is a hint for people, not a fact."""
        async with self.rows() as rows:
            row = await rows.token(id)
            if row is not None and people.needs_touch(row.record, now=now):
                await rows.save_token(TokenRow(msgspec.structs.replace(row.record, last_used_at=now), row.digest))

    async def note_refusal(self, target: str, *, actor: str, action: str, result: str) -> None:
        """Somebody was turned away: who, from what, why."""
        async with self.rows() as rows:
            await rows.tx.audit(actor=actor, action=action, target=target, result=result)

    async def report(self, report: ReportIncident) -> None:
        """A person must know of this."""
        async with self.rows() as rows:
            await rows.tx.fault(report)

    async def tokens(self, seen: Scope) -> list[TokenRecord]:
        async with self.rows(read_only=True) as rows:
            return [row.record for row in await rows.tokens() if seen.covers(tenant=row.record.tenant, site=row.record.site)]

    async def revoke_token(self, id: TokenId, *, actor: str, reason: str, now: datetime) -> TokenRecord | None:
        async with self.rows() as rows:
            row = await rows.token(id)
            if row is None:
                return None
            after = people.revoke(row.record, now=now)
            if after is not row.record:
                await rows.save_token(TokenRow(after, row.digest))
                await rows.tx.audit(actor=actor, action="token.revoke", target=id, reason=reason)
            return after

    # --- sites ---

    async def invite(self, request: InviteSite, id: TokenId, digest: str, *, actor: str, now: datetime) -> Invitation:
        """A new invitation; those of the same site that nobody used are withdrawn."""
        async with self.rows() as rows:
            tenant = await rows.tenant(request.owner_tenant)
            invitation = sites.invite(request, tenant.record if tenant else None, await rows.site(request.site), now=now)
            for row in await rows.open_invitations(request.site):
                await rows.save_invitation(InvitationRow(row.id, row.digest, msgspec.structs.replace(row.invitation, withdrawn_at=now)))
            await rows.save_invitation(InvitationRow(id, digest, invitation))
            await rows.tx.audit(actor=actor, action="site.invite", target=request.site, reason=f"owner {request.owner}")
            return invitation

    async def invitation(self, id: TokenId) -> InvitationRow | None:
        async with self.rows(read_only=True) as rows:
            return await rows.invitation(id)

    async def join(self, id: TokenId, request: JoinSite, *, account: str, sign: Sign, now: datetime) -> SiteAccount:
        """Use an invitation: the site's keys, its signed account, and on a single-user site the owner's own mapping. A repeat changes nothing."""
        async with self.rows() as rows:
            row = await rows.invitation(id)
            invitation = sites.check_invitation(row.invitation if row else None, request, now=now)
            assert row is not None, "an invitation that passed was found"
            known = await rows.site(invitation.site)
            joined = sites.join(invitation, known, request, account=account, now=now, version=self.first_version)
            if joined is known:
                return known
            signed = sign(joined)
            await self._save_site(rows, signed)
            used = msgspec.structs.replace(invitation, used_at=now, site_key=request.site_key, signing_key=request.signing_key)
            await rows.save_invitation(InvitationRow(row.id, row.digest, used))
            if signed.single_user:
                own = MappingRecord(tenant=signed.owner_tenant, site=signed.site, account="")
                await self._map(rows, MapAccount(tenant=own.tenant, site=own.site, account=""), own)
            await rows.tx.audit(
                actor=f"site/{signed.site}", action="site.join", target=signed.site, reason=f"agent {signed.agent_version}"[:200]
            )
            return signed

    async def site(self, name: SiteName) -> SiteAccount | None:
        async with self.rows(read_only=True) as rows:
            return await rows.site(name)

    async def sites(self) -> list[SiteAccount]:
        async with self.rows(read_only=True) as rows:
            return await rows.sites()

    async def revoke_site(self, name: SiteName, *, sign: Sign, actor: str, reason: str) -> SiteAccount | None:
        """Take the site's signing key out of its account; None if there is no such site. The push is the caller's."""
        async with self.rows() as rows:
            known = await rows.site(name)
            if known is None:
                return None
            after = sites.revoke_site(known)
            if after is known:
                return known
            signed = sign(after)
            await self._save_site(rows, signed)
            await rows.tx.audit(actor=actor, action="site.revoke", target=name, reason=reason)
            return signed

    async def leave_site(self, name: SiteName, receipt: Sealed, *, sign: Sign, reason: str) -> SiteAccount | None:
        """The site's key is taken away and its receipt kept; the one that left before if this is a repeat. The push is the caller's."""
        async with self.rows() as rows:
            known = await rows.site(name)
            if known is None or known.receipt is not None:
                return known
            signed = sign(sites.leave(known, receipt))
            await self._save_site(rows, signed)
            await rows.tx.audit(actor=f"site/{name}", action="site.leave", target=name, reason=reason)
            return signed

    async def adopt(self, name: SiteName, revoked_there: Sequence[str], *, sign: Sign) -> SiteAccount | None:
        """Take over revocations that only the NATS server remembered."""
        async with self.rows() as rows:
            known = await rows.site(name)
            if known is None:
                return None
            after = sites.adopt(known, list(revoked_there))
            if after is known:
                return known
            signed = sign(after)
            await self._save_site(rows, signed)
            await rows.tx.audit(
                actor="rule", action="site.adopt_revocations", target=name, reason="the NATS server knew of keys taken away"
            )
            return signed

    # --- mappings ---

    async def map_account(self, request: MapAccount, *, actor: str) -> list[MappingRecord]:
        """All mappings of the site, after this one was set or removed."""
        async with self.rows() as rows:
            tenant = await rows.tenant(request.tenant)
            record = sites.map_account(request, await rows.site(request.site), tenant.record if tenant else None)
            if await self._map(rows, request, record):
                await rows.tx.audit(
                    actor=actor,
                    action="mapping.set" if record else "mapping.remove",
                    target=f"{request.site}/{request.tenant}",
                    reason=request.account or "",
                )
            return [one for one in await rows.mappings() if one.site == request.site]

    async def mappings(self, seen: Scope) -> list[MappingRecord]:
        async with self.rows(read_only=True) as rows:
            return [one for one in await rows.mappings() if seen.covers(tenant=one.tenant, site=one.site)]

    async def snapshot(self) -> IdentitySnapshotReply:
        """The newest event of every entity, as of one moment."""
        async with self.rows(read_only=True) as rows:
            versions = await rows.mapping_versions()
            mappings = await rows.mappings()
            return IdentitySnapshotReply(
                tenants=[TenantChanged(version=row.version, record=row.record) for row in await rows.tenants()],
                mappings=[
                    MappingsChanged(version=version, site=site, mappings=[one for one in mappings if one.site == site])
                    for site, version in sorted(versions.items())
                ],
                site_keys=[SiteKeyChanged(version=one.version, record=one.record()) for one in await rows.sites()],
            )

    async def _save_site(self, rows: Rows, site: SiteAccount) -> None:
        await rows.save_site(site)
        await rows.tx.emit(SiteKeyChanged(version=site.version, record=site.record()))

    async def _map(self, rows: Rows, request: MapAccount, record: MappingRecord | None) -> bool:
        """Save and tell, if it is a change."""
        before = next((one for one in await rows.mappings() if (one.site, one.tenant) == (request.site, request.tenant)), None)
        if before == record:
            return False
        version = max(await rows.mappings_version(request.site) + 1, self.first_version)
        if record is not None:
            await rows.save_mapping(record, version)
        else:
            await rows.remove_mapping(request.site, request.tenant, version)
        after = [one for one in await rows.mappings() if one.site == request.site]
        await rows.tx.emit(MappingsChanged(version=version, site=request.site, mappings=after))
        return True


def key_taken() -> Conflict:
    return Conflict(
        "identity.key_taken", "another site has one of these keys", next_step="let the agent make its own keys; never copy them"
    )


def _is_live_operator(record: TokenRecord, now: datetime) -> bool:
    return "operator" in record.roles and people.token_fault(record, None, now=now) is None and record.tenant is None
