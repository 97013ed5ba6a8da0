"""Tenants, principals and their tokens: what may be made, by whom, and when a token no longer counts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from intertie.contracts.identity import Claims, CreateTenant, CreateToken, Role, TenantRecord, TokenRecord
from intertie.errors import Conflict, Denied, Refused
from intertie.ids import PrincipalId, SiteName, TenantName, TokenId, name

# Long enough for a page of work, short enough that a revoked token is soon without effect everywhere.
CLAIMS_S = 300

# Written at most this often, so that a busy client costs one row write a minute and not one a request.
TOUCH_EVERY = timedelta(minutes=1)

TITLE_LENGTH = 200

TENANT_ROLES = frozenset({Role.TENANT_ADMIN, Role.TENANT_USER})
PERSON_ROLES = TENANT_ROLES | {Role.OPERATOR, Role.SITE_OWNER, Role.AUDITOR}
"""Services and sites speak by their keys: no token ever carries their roles."""


class TokenFault(StrEnum):
    """Why a token does not count. For the audit and the log; a caller hears one sentence for all of them."""

    MALFORMED = "malformed"
    UNKNOWN = "unknown"
    EXPIRED = "expired"
    REVOKED = "revoked"
    TENANT_CLOSED = "tenant_closed"


def new_tenant(known: TenantRecord | None, request: CreateTenant, *, now: datetime) -> TenantRecord:
    """The tenant's record; the known one if the request repeats it, `Conflict` if it contradicts it."""
    name(request.tenant, "tenant")
    if len(request.title) > TITLE_LENGTH:
        raise Refused("identity.title", f"a title has at most {TITLE_LENGTH} characters, not {len(request.title)}")
    if known is None:
        return TenantRecord(tenant=request.tenant, title=request.title, created_at=now)
    if known.title != request.title:
        raise Conflict("identity.tenant_exists", f"tenant {known.tenant} exists with another title")
    return known


def grant(request: CreateToken, by: Claims, *, id: TokenId, principal: PrincipalId, now: datetime) -> TokenRecord:
    """The record of a new token. Nobody grants more than they have: an operator any person's role, a tenant's admin their own tenant's."""
    roles = list(dict.fromkeys(request.roles))
    _check_roles(roles, request.tenant, request.site)
    if Role.OPERATOR not in by.roles:
        if not TENANT_ROLES.issuperset(roles) or request.tenant is None or request.tenant != by.tenant:
            raise Denied("identity.grant", "you may only make tokens for people of your own tenant, with roles tenant_admin or tenant_user")
    return TokenRecord(
        id=id,
        principal=principal,
        name=request.name,
        roles=roles,
        tenant=request.tenant,
        site=request.site,
        created_at=now,
        expires_at=now + timedelta(days=request.valid_days),
    )


def _check_roles(roles: Sequence[Role], tenant: TenantName | None, site: SiteName | None) -> None:
    """Refuse a set of roles that no person could hold."""
    if keyed := sorted(set(roles) - PERSON_ROLES):
        raise Refused(
            "identity.role_keyed", f"role {keyed[0]} belongs to a key, not to a token", next_step="services and sites sign with their keys"
        )
    if TENANT_ROLES.intersection(roles) and tenant is None:
        raise Refused("identity.role_needs_tenant", "roles of a tenant need a tenant", next_step="name the tenant")
    if Role.SITE_OWNER in roles and site is None:
        raise Refused("identity.role_needs_site", "the role site_owner needs a site", next_step="name the site")


def token_fault(record: TokenRecord | None, tenant: TenantRecord | None, *, now: datetime) -> TokenFault | None:
    """Why a well-formed token does not count; None if it does. `tenant` is the one the token names, if any."""
    if record is None:
        return TokenFault.UNKNOWN
    if record.revoked_at is not None:
        return TokenFault.REVOKED
    if now >= record.expires_at:
        return TokenFault.EXPIRED
    if record.tenant is not None and (tenant is None or not tenant.active):
        return TokenFault.TENANT_CLOSED
    return None


def claims_of(record: TokenRecord, *, now: datetime) -> Claims:
    """What identity vouches for; never longer than the token itself lives."""
    issued = int(now.timestamp())
    return Claims(
        iss="identity",
        sub=record.principal,
        name=record.name,
        roles=record.roles,
        tenant=record.tenant,
        site=record.site,
        iat=issued,
        exp=min(issued + CLAIMS_S, int(record.expires_at.timestamp())),
    )


def site_claims(site: SiteName, *, now: datetime) -> Claims:
    """What identity vouches for when a site has proven itself by its key."""
    issued = int(now.timestamp())
    return Claims(
        iss="identity", sub=PrincipalId(f"site/{site}"), name=site, roles=[Role.SITE], site=site, iat=issued, exp=issued + CLAIMS_S
    )


def needs_touch(record: TokenRecord, *, now: datetime) -> bool:
    return record.last_used_at is None or now - record.last_used_at >= TOUCH_EVERY


def revoke(record: TokenRecord, *, now: datetime) -> TokenRecord:
    """Revoked; the first revocation's time stays."""
    return record if record.revoked_at is not None else msgspec.structs.replace(record, revoked_at=now)
