"""Identity: who acts, for whom, what they may do, and which keys speak for which site."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from intertie.contracts.base import Contract, Event, Instant, NonNegative, Text
from intertie.contracts.link import Sealed
from intertie.contracts.site import PoolProfile, SiteKind
from intertie.ids import JournalId, PrincipalId, SiteName, TenantName, TokenId


class Role(StrEnum):
    """Roles a principal holds. `intertie.trust.rights` says what each may do."""

    OPERATOR = "operator"
    """Runs the hub."""
    TENANT_ADMIN = "tenant_admin"
    TENANT_USER = "tenant_user"
    SITE_OWNER = "site_owner"
    AUDITOR = "auditor"
    SERVICE = "service"
    """One of our own services, by its key."""
    SITE = "site"
    """A site's agent, by its key."""


class Claims(Contract, frozen=True, kw_only=True):
    """Who is calling, signed by identity (people) or by the calling service's own key; verified by the called service."""

    iss: str
    """`identity`, or the service's name."""
    sub: PrincipalId
    name: str
    roles: list[Role]
    tenant: TenantName | None = None
    site: SiteName | None = None
    iat: int
    exp: int
    aud: str = "intertie"


class Authenticate(Contract, frozen=True, kw_only=True):
    """`cmd.identity.authenticate`: an API token for signed claims (5 minutes)."""

    token: str


class Authenticated(Contract, frozen=True, kw_only=True):
    claims: Claims
    signed: str
    """Compact JWT (EdDSA) for the claims header."""


class AuthenticateSite(Contract, frozen=True, kw_only=True):
    """`cmd.identity.authenticate_site`: an agent's HTTP call, proven by a JWT of its site key, for signed claims with role `site`."""

    signed: str


class TenantRecord(Contract, frozen=True, kw_only=True):
    tenant: TenantName
    title: str
    created_at: Instant
    active: bool = True


class CreateTenant(Contract, frozen=True, kw_only=True):
    """`cmd.identity.create_tenant`."""

    tenant: TenantName
    title: str = ""


class TenantsReply(Contract, frozen=True, kw_only=True):
    """`qry.identity.tenants`."""

    tenants: list[TenantRecord]


class CreateToken(Contract, frozen=True, kw_only=True):
    """`cmd.identity.create_token`: a new principal with a token, shown once."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    roles: Annotated[list[Role], msgspec.Meta(min_length=1)]
    tenant: TenantName | None = None
    site: SiteName | None = None
    valid_days: Annotated[int, msgspec.Meta(ge=1, le=366)] = 90


class TokenCreated(Contract, frozen=True, kw_only=True):
    token: str
    """The secret: shown once, stored hashed."""
    record: TokenRecord


class TokenRecord(Contract, frozen=True, kw_only=True):
    id: TokenId
    principal: PrincipalId
    name: str
    roles: list[Role]
    tenant: TenantName | None
    site: SiteName | None
    created_at: Instant
    expires_at: Instant
    revoked_at: Instant | None = None
    last_used_at: Instant | None = None


class TokensReply(Contract, frozen=True, kw_only=True):
    """`qry.identity.tokens`."""

    tokens: list[TokenRecord]


class RevokeToken(Contract, frozen=True, kw_only=True):
    """`cmd.identity.revoke_token`."""

    id: TokenId
    reason: Text = ""


class InviteSite(Contract, frozen=True, kw_only=True):
    """`cmd.identity.invite_site`: a one-time join token for a site of that name."""

    site: SiteName
    kind: SiteKind
    title: str = ""
    owner: str
    owner_tenant: TenantName
    """The owner's own tenant: the only one a single-user agent accepts."""
    valid_hours: Annotated[int, msgspec.Meta(ge=1, le=720)] = 72


class Invited(Contract, frozen=True, kw_only=True):
    site: SiteName
    token: str
    """Shown once."""
    expires_at: Instant


class RevokeSite(Contract, frozen=True, kw_only=True):
    """`cmd.identity.revoke_site`: the site's keys count no more, its connections drop now. What runs there goes on; a new invitation lets it back."""

    site: SiteName
    reason: Annotated[str, msgspec.Meta(min_length=3, max_length=1_000)]


class JoinSite(Contract, frozen=True, kw_only=True):
    """`POST /v1/join` and `cmd.identity.join`. Only public halves travel. Repeating it with the same keys repeats the answer."""

    token: str
    site_key: str
    """Public nkey (`U…`) that signs segments and HTTP calls."""
    signing_key: str
    """Public account signing nkey (`A…`) with which the agent mints its own bus credentials."""
    single_user: bool
    agent_version: str
    pools: list[PoolProfile]
    """At least one, save at a site of kind `endpoint`, which may offer calls alone."""


class LeaveBody(Contract, frozen=True, kw_only=True):
    """What a leaving site says last; sealed with its key. Lending is paused, nothing of the hub's runs, and every lane is at head."""

    site: SiteName
    journal: JournalId
    last: dict[str, NonNegative]
    """By lane: number of the last entry that the site journalled, all of which are on disk at their keepers."""
    at: Instant
    reason: Text = ""


class LeaveSite(Contract, frozen=True, kw_only=True):
    """`POST /v1/site/leave` and `cmd.identity.leave_site`: the seal is the proof. A repeat with the same key gives the same receipt."""

    site: SiteName
    sealed: Sealed
    """A `LeaveBody` under the site's key."""


class LeaveTotals(Contract, frozen=True, kw_only=True):
    """What a receipt says. A total that identity was not told is None, never zero."""

    site: SiteName
    site_key: str
    journal: JournalId
    last: dict[str, NonNegative]
    left_at: Instant
    joined_at: Instant | None = None
    attempts: NonNegative | None = None
    segments: NonNegative | None = None
    quantity_milli_us: NonNegative | None = None
    revoked: bool = True
    """The site's keys count no more."""


class LeaveReceipt(Contract, frozen=True, kw_only=True):
    """Kept by the owner: verifiable offline with identity's public key, which site.json names."""

    sealed: Sealed
    """A `LeaveTotals` under identity's key."""


class Joined(Contract, frozen=True, kw_only=True):
    """What the agent writes down: nothing in it is secret."""

    site: SiteName
    account: str
    """The site's NATS account, public key."""
    bus_urls: list[str]
    gateway_url: str
    service_keys: dict[str, str]
    """Public keys (nkey form) of scheduler, identity, metering: whose seals to believe."""
    owner_tenant: TenantName
    hub_ca: str = ""
    epoch: NonNegative = 0


class MapAccount(Contract, frozen=True, kw_only=True):
    """`cmd.identity.map_account`: a tenant becomes this local account at that site; None removes the mapping."""

    tenant: TenantName
    site: SiteName
    account: str | None


class MappingRecord(Contract, frozen=True, kw_only=True):
    tenant: TenantName
    site: SiteName
    account: str
    """Empty on a single-user site: the agent's own user."""


class MappingsReply(Contract, frozen=True, kw_only=True):
    """`qry.identity.mappings`."""

    mappings: list[MappingRecord]


class SiteKeyRecord(Contract, frozen=True, kw_only=True):
    site: SiteName
    site_key: str
    signing_key: str
    account: str
    revoked: bool = False


class TenantChanged(Event, frozen=True, kw_only=True):
    TYPE: ClassVar[str] = "io.intertie.tenant.changed.v1"
    SERVICE: ClassVar[str] = "identity"

    record: TenantRecord

    @property
    def entity(self) -> str:
        return self.record.tenant

    @property
    def tenant_token(self) -> str:
        return self.record.tenant


class MappingsChanged(Event, frozen=True, kw_only=True):
    """All mappings of one site, as they are now."""

    TYPE: ClassVar[str] = "io.intertie.mapping.changed.v1"
    SERVICE: ClassVar[str] = "identity"

    site: SiteName
    mappings: list[MappingRecord]

    @property
    def entity(self) -> str:
        return f"mappings/{self.site}"


class SiteKeyChanged(Event, frozen=True, kw_only=True):
    """The keys that speak for a site."""

    TYPE: ClassVar[str] = "io.intertie.sitekey.changed.v1"
    SERVICE: ClassVar[str] = "identity"

    record: SiteKeyRecord

    @property
    def entity(self) -> str:
        return f"sitekey/{self.record.site}"

    @property
    def site_token(self) -> str:
        return self.record.site


class IdentitySnapshotReply(Contract, frozen=True, kw_only=True):
    """`qry.identity.snapshot`: the newest event of each entity, for read models."""

    tenants: list[TenantChanged]
    mappings: list[MappingsChanged]
    site_keys: list[SiteKeyChanged]


class AuditQuery(Contract, frozen=True, kw_only=True):
    """`qry.<service>.audit`: newest first."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 100
    before: int | None = None


class AuditRow(Contract, frozen=True, kw_only=True):
    """Who did what, on what, why, with which result; written in the effect's transaction."""

    id: NonNegative
    at: Instant
    actor: str
    action: str
    target: str
    reason: Text
    result: str
    trace_id: str


class AuditReply(Contract, frozen=True, kw_only=True):
    rows: list[AuditRow]
