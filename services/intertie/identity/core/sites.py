"""How a site comes to be known: invitation, joining, its keys, and the local accounts that tenants become there."""

from __future__ import annotations

import base64
import json
import re
from datetime import datetime, timedelta

import msgspec

from intertie.contracts.base import Instant
from intertie.contracts.identity import InviteSite, JoinSite, LeaveBody, LeaveSite, MapAccount, MappingRecord, SiteKeyRecord, TenantRecord
from intertie.contracts.link import Sealed
from intertie.contracts.site import SiteKind
from intertie.errors import Conflict, NotFound, Refused, Unauthenticated
from intertie.ids import NAME, SiteName, TenantName, name
from intertie.trust.seal import open_seal

# Site keys that were taken away stay named in the account for good; nobody changes keys this often without being an attacker or a loop.
MOST_REVOKED = 200

# useradd's own rule, and Kubernetes namespaces fit it too.
_ACCOUNT = re.compile(r"[a-z_][a-z0-9_-]{0,31}\Z")
# Never root, nor an account that belongs to the machine: DESIGN 10.
_MACHINE_ACCOUNTS = frozenset(
    {"root", "toor", "daemon", "bin", "sys", "sync", "adm", "slurm", "munge", "postgres", "default", "kube-system", "kube-public"}
)


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """A one-time join token's record. The token itself is kept hashed, beside."""

    site: SiteName
    kind: SiteKind
    title: str
    owner: str
    owner_tenant: TenantName
    created_at: Instant
    expires_at: Instant
    withdrawn_at: Instant | None = None
    """A newer invitation of the same site took its place."""
    used_at: Instant | None = None
    site_key: str = ""
    """The keys that used it: with them the same answer is given again."""
    signing_key: str = ""


class SiteAccount(msgspec.Struct, frozen=True, kw_only=True):
    """A joined site: its keys, and its NATS account as it was last signed."""

    site: SiteName
    kind: SiteKind
    title: str
    owner: str
    owner_tenant: TenantName
    single_user: bool
    agent_version: str
    joined_at: Instant
    account: str
    """The account's public key. Its seed is forgotten at birth: the operator signs accounts, nobody needs it again."""
    site_key: str
    signing_key: str
    revoked: bool = False
    revoked_keys: list[str] = []
    """Signing keys that were taken out of the account and never come back."""
    jwt: str = ""
    iat: int = 0
    receipt: Sealed | None = None
    """What the site was given when it left: a repeat gets the same."""
    version: int = 1

    def record(self) -> SiteKeyRecord:
        return SiteKeyRecord(
            site=self.site, site_key=self.site_key, signing_key=self.signing_key, account=self.account, revoked=self.revoked
        )


def invite(request: InviteSite, tenant: TenantRecord | None, known: SiteAccount | None, *, now: datetime) -> Invitation:
    """An invitation. A known site may be invited again (lost keys, a new machine): its joining replaces the keys."""
    name(request.site, "site")
    if tenant is None or not tenant.active:
        raise NotFound(
            "identity.tenant_unknown",
            f"there is no tenant {request.owner_tenant}",
            next_step=f"make the owner's tenant first: intertie tenant create {request.owner_tenant}",
        )
    if known is not None and known.kind != request.kind:
        raise Conflict("identity.site_kind", f"site {known.site} is of kind {known.kind}, not {request.kind}")
    return Invitation(
        site=request.site,
        kind=request.kind,
        title=request.title,
        owner=request.owner,
        owner_tenant=request.owner_tenant,
        created_at=now,
        expires_at=now + timedelta(hours=request.valid_hours),
    )


def check_invitation(invitation: Invitation | None, request: JoinSite, *, now: datetime) -> Invitation:
    """The invitation if `request` may use it, for the first time or once more with the same keys."""
    if invitation is None:
        raise bad_join_token()
    if invitation.used_at is not None:
        if (invitation.site_key, invitation.signing_key) != (request.site_key, request.signing_key):
            raise Conflict(
                "identity.join_token_used",
                f"this join token was used by site {invitation.site} with other keys",
                next_step="ask the hub's operator for a new invitation",
            )
        return invitation
    if invitation.withdrawn_at is not None or now >= invitation.expires_at:
        raise bad_join_token()
    return invitation


def bad_join_token() -> Unauthenticated:
    return Unauthenticated(
        "identity.join_token", "this join token is not valid (any more)", next_step="ask the hub's operator for a new invitation"
    )


def join(
    invitation: Invitation, known: SiteAccount | None, request: JoinSite, *, account: str, now: datetime, version: int = 1
) -> SiteAccount:
    """The site as it is after joining, not yet signed; the known one if this is a repeat.

    `account` is the public half of a new account key, used only if the site is new, as `version` is. Keys of a site that joined before are replaced, and the
    old signing key is named as revoked. `Refused('identity.no_pools')` for a site without a pool that does not offer calls alone.
    """
    if not request.pools and invitation.kind is not SiteKind.ENDPOINT:
        raise Refused("identity.no_pools", f"{invitation.site} declares no pool", next_step="say what it has: --profile FILE, or --detect")
    if known is None:
        return SiteAccount(
            site=invitation.site,
            kind=invitation.kind,
            title=invitation.title,
            owner=invitation.owner,
            owner_tenant=invitation.owner_tenant,
            single_user=request.single_user,
            agent_version=request.agent_version,
            joined_at=now,
            account=account,
            site_key=request.site_key,
            signing_key=request.signing_key,
            version=version,
        )
    same_keys = (known.site_key, known.signing_key) == (request.site_key, request.signing_key)
    if invitation.used_at is not None:
        if same_keys and not known.revoked:
            return known
        raise Conflict(
            "identity.keys_replaced",
            f"the keys that used this join token no longer speak for site {known.site}",
            next_step="ask the hub's operator for a new invitation",
        )
    if request.signing_key in known.revoked_keys:
        raise Conflict("identity.key_revoked", "this signing key was revoked and never comes back", next_step="let the agent make new keys")
    if known.receipt is not None and request.site_key == known.site_key:
        # Whoever kept its word of leaving could say it again.
        raise Conflict("identity.key_revoked", "the site left by this key, which never comes back", next_step="let the agent make new keys")
    return msgspec.structs.replace(
        known,
        title=invitation.title,
        owner=invitation.owner,
        owner_tenant=invitation.owner_tenant,
        single_user=request.single_user,
        agent_version=request.agent_version,
        site_key=request.site_key,
        signing_key=request.signing_key,
        revoked=False,
        receipt=None,
        revoked_keys=known.revoked_keys if known.signing_key == request.signing_key else _with_revoked(known, known.signing_key),
        version=known.version + 1,
    )


def revoke_site(known: SiteAccount) -> SiteAccount:
    """The site's signing key is taken out of its account: its live connections drop, and no other's."""
    if known.revoked:
        return known
    return msgspec.structs.replace(known, revoked=True, revoked_keys=_with_revoked(known, known.signing_key), version=known.version + 1)


def leave(known: SiteAccount, receipt: Sealed) -> SiteAccount:
    """The site has left: its key is taken away, and its receipt kept."""
    return msgspec.structs.replace(revoke_site(known), receipt=receipt, version=known.version + 1)


def check_leave(known: SiteAccount | None, request: LeaveSite) -> tuple[SiteAccount, LeaveBody]:
    """The site and what it says, if it is said with its own key; that of a site that was revoked says nothing any more."""
    if known is None or (known.revoked and known.receipt is None):
        raise Unauthenticated("identity.site_invalid", "this is not proof of a site's key", next_step="ask the hub's operator")
    try:
        body = open_seal(request.sealed, known.site_key, LeaveBody)
    except Refused as err:
        raise Unauthenticated("identity.site_invalid", "this is not proof of a site's key", next_step="ask the hub's operator") from err
    if body.site != known.site:
        raise Refused("identity.leave_site", f"what is sealed speaks of site {body.site[:63]}, not of {known.site}")
    return known, body


def adopt(known: SiteAccount, revoked_there: list[str]) -> SiteAccount:
    """Take over revocations that the server knows and this record does not: it was restored from a backup (LINK D18)."""
    after = known
    for key in revoked_there:
        after = msgspec.structs.replace(after, revoked_keys=_with_revoked(after, key))
    if after.revoked_keys == known.revoked_keys:
        return known
    return msgspec.structs.replace(after, revoked=known.revoked or known.signing_key in after.revoked_keys, version=known.version + 1)


def _with_revoked(known: SiteAccount, key: str) -> list[str]:
    if key in known.revoked_keys:
        return known.revoked_keys
    if len(known.revoked_keys) >= MOST_REVOKED:
        raise Refused(
            "identity.too_many_keys", f"site {known.site} has had {MOST_REVOKED} signing keys", next_step="let it join under a new name"
        )
    return [*known.revoked_keys, key]


def claimed_site(signed: str) -> SiteName | None:
    """Whose key a site's JWT says it is signed with (its `kid`), believed by nobody until that key has verified it."""
    head = signed.partition(".")[0]
    try:
        said = json.loads(base64.b64decode(head + "=" * (-len(head) % 4), altchars=b"-_", validate=True))
    except ValueError:
        return None
    issuer = said.get("kid") if isinstance(said, dict) else None
    return SiteName(issuer) if isinstance(issuer, str) and NAME.match(issuer) else None


def map_account(request: MapAccount, site: SiteAccount | None, tenant: TenantRecord | None) -> MappingRecord | None:
    """The mapping that shall stand; None: it is removed. Never a privileged account, and on a single-user site only the owner's own tenant."""
    if site is None:
        raise NotFound("identity.site_unknown", f"there is no site {request.site}", next_step="intertie site list")
    if request.account is None:
        return None
    if tenant is None or not tenant.active:
        raise NotFound("identity.tenant_unknown", f"there is no tenant {request.tenant}", next_step="intertie tenant list")
    if site.single_user:
        if request.tenant != site.owner_tenant:
            raise Refused(
                "identity.single_user",
                f"the agent of site {site.site} is not root: it accepts only its owner's tenant {site.owner_tenant}",
                next_step="run the agent as root to let it become mapped accounts",
            )
        if request.account:
            raise Refused(
                "identity.single_user_account",
                f"jobs on site {site.site} run as the agent's own user, not as {request.account!r}",
                next_step="leave the account empty",
            )
    elif not _ACCOUNT.match(request.account):
        raise Refused(
            "identity.account", f"{request.account[:40]!r} is no name of a local account", next_step="use a-z, 0-9, '_' and '-', at most 32"
        )
    elif request.account in _MACHINE_ACCOUNTS:
        raise Refused(
            "identity.account_privileged",
            f"jobs never run as {request.account!r}",
            next_step="make an ordinary account for the tenant at the site",
        )
    return MappingRecord(tenant=request.tenant, site=request.site, account=request.account)
