"""Tenants, principals and their tokens: what may be made, by whom, and when a token no longer counts."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from intertie.contracts.identity import Claims, CreateTenant, CreateToken, Role, TenantRecord, TokenRecord
from intertie.errors import Conflict, Refused
from intertie.ids import PrincipalId, SiteName, TokenId, name

# Long enough for a page of work, short enough that a revoked token is soon without effect everywhere.
CLAIMS_S = 300

# Written at most this often, so that a busy client costs one row write a minute and not one a request.
TOUCH_EVERY = timedelta(minutes=1)

TITLE_LENGTH = 200


class TokenFault(StrEnum):
    """Why a token does not count. For the audit and the log; a caller hears one sentence for all of them."""

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


def grant(request: CreateToken, *, id: TokenId, principal: PrincipalId, now: datetime) -> TokenRecord:
    """The record of a new token; whether the caller may hand it out is `trust.rights.require_grantable`'s to say."""
    return TokenRecord(
        id=id,
        principal=principal,
        name=request.name,
        roles=list(dict.fromkeys(request.roles)),
        tenant=request.tenant,
        site=request.site,
        created_at=now,
        expires_at=now + timedelta(days=request.valid_days),
    )


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
