"""Identity at work: says who is calling, lets sites in, and hands out what people and sites need for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from intertie.bus import rpc
from intertie.bus.port import Bus
from intertie.bus.rpc import Caller, Serve
from intertie.clock import Clock
from intertie.contracts import endpoints
from intertie.contracts.base import Empty, encode
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.identity import (
    AuditQuery,
    AuditReply,
    Authenticate,
    Authenticated,
    AuthenticateSite,
    Claims,
    CreateTenant,
    CreateToken,
    IdentitySnapshotReply,
    Invited,
    InviteSite,
    Joined,
    JoinSite,
    LeaveReceipt,
    LeaveSite,
    LeaveTotals,
    MapAccount,
    MappingsReply,
    RevokeSite,
    RevokeToken,
    SiteKeyRecord,
    TenantRecord,
    TenantsReply,
    TokenCreated,
    TokenRecord,
    TokensReply,
)
from intertie.contracts.site import RegisterSite, SiteLeft
from intertie.errors import Refused, Unauthenticated
from intertie.identity import leaving
from intertie.identity.accounts import AccountPusher, Signer
from intertie.identity.core import people, sites
from intertie.identity.core.sites import Invitation, SiteAccount
from intertie.identity.store import IdentityStore
from intertie.ids import PrincipalId, SiteName, TokenId, mint
from intertie.observe import log
from intertie.store import audit_reply
from intertie.trust import tokens
from intertie.trust.claims import ServiceClaims, sign_claims, verify_site_claims
from intertie.trust.keys import Key, require_public
from intertie.trust.rights import not_found, require, require_grantable, scope
from intertie.trust.seal import open_seal, seal

LOG = log.get("identity")

# A client that goes on with a dead token leaves one audit row in this time, not one per request.
REFUSAL_AGAIN_S = 600.0
# Tokens remembered for that; the oldest are forgotten.
REFUSALS_KEPT = 1_000
# The registry's answer to a join: one transaction there.
REGISTER_S = 5.0
# Whose seals and claims a site must be able to check.
SITE_TRUSTS = ("scheduler", "identity", "metering", "gateway")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where sites reach the hub."""

    bus_urls: Sequence[str]
    gateway_url: str
    hub_ca: str = ""


class Identity:
    """The service. `keyset` names the services' public keys."""

    def __init__(
        self,
        store: IdentityStore,
        bus: Bus,
        key: Key,
        signer: Signer,
        pusher: AccountPusher,
        clock: Clock,
        *,
        keyset: Mapping[str, str],
        addresses: Addresses,
    ) -> None:
        self.store, self.bus, self.clock = store, bus, clock
        self._key, self._signer, self._pusher = key, signer, pusher
        self._keyset, self._addresses = keyset, addresses
        self._claims = ServiceClaims(key, "identity", clock)
        self._refusals: dict[str, float] = {}

    def handlers(self) -> Mapping[Endpoint[Any, Any], Serve]:
        return {
            endpoints.AUTHENTICATE: self.authenticate,
            endpoints.AUTHENTICATE_SITE: self.authenticate_site,
            endpoints.JOIN: self.join,
            endpoints.INVITE_SITE: self.invite_site,
            endpoints.REVOKE_SITE: self.revoke,
            endpoints.LEAVE_SITE: self.leave,
            endpoints.CREATE_TENANT: self.create_tenant,
            endpoints.TENANTS: self.tenants,
            endpoints.CREATE_TOKEN: self.create_token,
            endpoints.TOKENS: self.tokens,
            endpoints.REVOKE_TOKEN: self.revoke_token,
            endpoints.MAP_ACCOUNT: self.map_account,
            endpoints.MAPPINGS: self.mappings,
            endpoints.IDENTITY_SNAPSHOT: self.snapshot,
            endpoints.IDENTITY_AUDIT: self.audit,
        }

    # --- who is calling ---

    async def authenticate(self, request: Authenticate, caller: Caller) -> Authenticated:
        """Signed claims for an API token. Every refusal has one code; only a typo, which anybody could find out, is told apart in words."""
        try:
            id = tokens.token_id(request.token, tokens.API)
        except Unauthenticated as err:
            LOG.info("a token was refused", reason=err.code)
            raise Unauthenticated("identity.token_invalid", err.text, next_step=err.next_step) from err
        row, tenant = await self.store.token(id)
        genuine = tokens.token_matches(request.token, row.digest if row is not None else None)
        now = self.clock.now()
        fault = people.token_fault(row.record if row is not None and genuine else None, tenant, now=now)
        if fault is not None or row is None:
            LOG.info("a token was refused", token=id, reason=str(fault))
            if genuine:
                await self._note_refusal(id, str(fault))
            raise Unauthenticated("identity.token_invalid", "this token is not valid", next_step="ask for a new token")
        if people.needs_touch(row.record, now=now):
            await self.store.touch_token(id, now=now)
        return self._vouch(people.claims_of(row.record, now=now))

    async def _note_refusal(self, id: TokenId, reason: str) -> None:
        """An audit row for a genuine token that no longer counts, not more often than is useful."""
        now_s = self.clock.monotonic_s()
        if now_s - self._refusals.get(id, -REFUSAL_AGAIN_S) < REFUSAL_AGAIN_S:
            return
        if len(self._refusals) >= REFUSALS_KEPT:
            del self._refusals[next(iter(self._refusals))]
        self._refusals[id] = now_s
        await self.store.note_refusal(id, actor="unknown", action="authenticate", result=reason)

    async def authenticate_site(self, request: AuthenticateSite, caller: Caller) -> Authenticated:
        """Signed claims for a JWT that a site's key signed."""
        name = sites.claimed_site(request.signed)
        known = await self.store.site(name) if name is not None else None
        now = self.clock.now()
        keys = {known.site: known.site_key} if known is not None and not known.revoked else {}
        try:
            said = verify_site_claims(request.signed, keys, now)
        except Unauthenticated as err:
            reason = "revoked" if known is not None and known.revoked else err.code
            LOG.info("a site's proof was refused", site=name, reason=reason, text=err.text)
            raise Unauthenticated(
                "identity.site_invalid", "this is not proof of a site's key", next_step="compare the hosts' clocks; else join again"
            ) from err
        if said.exp - said.iat > people.CLAIMS_S:
            raise Unauthenticated("identity.site_invalid", f"a site's proof may live {people.CLAIMS_S} s, not {said.exp - said.iat} s")
        return self._vouch(people.site_claims(SiteName(said.iss), now=now))

    def _vouch(self, claims: Claims) -> Authenticated:
        return Authenticated(claims=claims, signed=sign_claims(self._key, claims))

    # --- sites ---

    async def invite_site(self, request: InviteSite, caller: Caller) -> Invited:
        require(caller.claims, "site.invite", site=request.site)
        token = tokens.new_token(tokens.JOIN)
        invitation = await self.store.invite(request, token.id, token.digest, actor=caller.claims.sub, now=self.clock.now())
        return Invited(site=invitation.site, token=token.text, expires_at=invitation.expires_at)

    async def join(self, request: JoinSite, caller: Caller) -> Joined:
        """Let a site in. The token is used up only when the registry took the pools; a repeat with the same keys gives the same answer."""
        require_public(request.site_key, "U", "the site's key")
        require_public(request.signing_key, "A", "the site's account signing key")
        id, invitation = await self._invitation(request)
        known = await self.store.site(invitation.site)
        account = known.account if known is not None else Key.new("A").public
        # Refuses what could not be joined anyway, before anybody is told of it.
        sites.join(invitation, known, request, account=account, now=self.clock.now())
        await rpc.call(
            self.bus, endpoints.REGISTER_SITE, _registration(invitation, request), claims=self._claims.signed(), timeout_s=REGISTER_S
        )
        joined = await self.store.join(id, request, account=account, sign=self._signer, now=self.clock.now())
        await self._pusher.push(joined)
        return self._answer(joined)

    async def _invitation(self, request: JoinSite) -> tuple[TokenId, Invitation]:
        try:
            id = tokens.token_id(request.token, tokens.JOIN)
        except Unauthenticated as err:
            raise Unauthenticated("identity.join_token", err.text, next_step=err.next_step) from err
        row = await self.store.invitation(id)
        genuine = tokens.token_matches(request.token, row.digest if row is not None else None)
        try:
            return id, sites.check_invitation(row.invitation if row is not None and genuine else None, request, now=self.clock.now())
        except Refused as err:
            LOG.warning("a join was refused", token=id, code=err.code, genuine=genuine)
            if row is not None and genuine:
                await self.store.note_refusal(row.invitation.site, actor="unknown", action="site.join", result=err.code)
            raise

    def _answer(self, site: SiteAccount) -> Joined:
        return Joined(
            site=site.site,
            account=site.account,
            bus_urls=list(self._addresses.bus_urls),
            gateway_url=self._addresses.gateway_url,
            service_keys={name: self._keyset[name] for name in SITE_TRUSTS if name in self._keyset},
            owner_tenant=site.owner_tenant,
            hub_ca=self._addresses.hub_ca,
        )

    async def revoke(self, request: RevokeSite, caller: Caller) -> SiteKeyRecord:
        require(caller.claims, "site.revoke", site=request.site)
        return (await self.revoke_site(request.site, actor=caller.claims.sub, reason=request.reason)).record()

    async def revoke_site(self, name: SiteName, *, actor: str, reason: str) -> SiteAccount:
        """Take the site's signing key out of its account: its live connections drop, and it cannot come back with that key."""
        revoked = await self.store.revoke_site(name, sign=self._signer, actor=actor, reason=reason)
        if revoked is None:
            raise not_found()
        await self._pusher.push(revoked)
        return revoked

    async def leave(self, request: LeaveSite, caller: Caller) -> LeaveReceipt:
        """Let a site go, by its own key: revoked, marked at the registry, and given a receipt. A repeat gives the same receipt again."""
        known, body = sites.check_leave(await self.store.site(request.site), request)
        receipt = known.receipt
        if receipt is None:
            held = await leaving.held_of(self.bus, self._claims.signed, known.site)
            totals = LeaveTotals(
                site=known.site,
                site_key=known.site_key,
                journal=body.journal,
                last=body.last,
                left_at=self.clock.now(),
                joined_at=known.joined_at,
                attempts=held.attempts,
                segments=held.segments,
                quantity_milli_us=held.quantity_milli_us,
            )
            receipt = seal(self._key, encode(totals), "identity")
        left = await self.store.leave_site(known.site, receipt, sign=self._signer, reason=body.reason)
        if left is None or left.receipt is None:
            raise not_found()
        await self._pusher.push(left)
        at = open_seal(left.receipt, self._key.public, LeaveTotals).left_at
        told = SiteLeft(site=left.site, at=at)
        await rpc.call(self.bus, endpoints.SITE_LEFT, told, claims=self._claims.signed(), timeout_s=REGISTER_S)
        return LeaveReceipt(sealed=left.receipt)

    # --- people ---

    async def create_tenant(self, request: CreateTenant, caller: Caller) -> TenantRecord:
        require(caller.claims, "tenant.create", tenant=request.tenant)
        return await self.store.create_tenant(request, actor=caller.claims.sub, now=self.clock.now())

    async def tenants(self, request: Empty, caller: Caller) -> TenantsReply:
        return TenantsReply(tenants=await self.store.tenants(scope(caller.claims, "tenant.read")))

    async def create_token(self, request: CreateToken, caller: Caller) -> TokenCreated:
        require_grantable(caller.claims, request.roles, request.tenant, request.site)
        token = tokens.new_token(tokens.API)
        record = people.grant(request, id=token.id, principal=PrincipalId(mint("prn")), now=self.clock.now())
        await self.store.add_token(record, token.digest, actor=caller.claims.sub)
        return TokenCreated(token=token.text, record=record)

    async def tokens(self, request: Empty, caller: Caller) -> TokensReply:
        return TokensReply(tokens=await self.store.tokens(scope(caller.claims, "token.read")))

    async def revoke_token(self, request: RevokeToken, caller: Caller) -> TokenRecord:
        seen = scope(caller.claims, "token.revoke")
        row, _ = await self.store.token(request.id)
        if row is None or not seen.covers(tenant=row.record.tenant, site=row.record.site):
            raise not_found()
        revoked = await self.store.revoke_token(request.id, actor=caller.claims.sub, reason=request.reason, now=self.clock.now())
        assert revoked is not None, "tokens are never deleted"
        return revoked

    # --- mappings and read models ---

    async def map_account(self, request: MapAccount, caller: Caller) -> MappingsReply:
        require(caller.claims, "mapping.set", site=request.site)
        return MappingsReply(mappings=await self.store.map_account(request, actor=caller.claims.sub))

    async def mappings(self, request: Empty, caller: Caller) -> MappingsReply:
        return MappingsReply(mappings=await self.store.mappings(scope(caller.claims, "mapping.read")))

    async def snapshot(self, request: Empty, caller: Caller) -> IdentitySnapshotReply:
        require(caller.claims, "service.snapshot")
        return await self.store.snapshot()

    async def audit(self, query: AuditQuery, caller: Caller) -> AuditReply:
        require(caller.claims, "audit.read")
        return await audit_reply(self.store, query)


def _registration(invitation: Invitation, request: JoinSite) -> RegisterSite:
    return RegisterSite(
        site=invitation.site,
        kind=invitation.kind,
        title=invitation.title,
        owner=invitation.owner,
        single_user=request.single_user,
        owner_tenant=invitation.owner_tenant,
        agent_version=request.agent_version,
        pools=request.pools,
    )
