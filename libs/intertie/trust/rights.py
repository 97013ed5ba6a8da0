"""Who may do what, on whose things: one written table of role × action × relation, and the only function that reads it.

A caller without any right to an action is `Denied`, in words that do not depend on the thing. A caller who has the right to his own only,
and names another's, gets `NotFound` in the very words that an unknown id gets: what exists elsewhere is not his to know.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from intertie.contracts.identity import Claims, Role
from intertie.errors import Denied, NotFound
from intertie.ids import SiteName, TenantName


class Relation(StrEnum):
    """Whose things a right covers."""

    TENANT = "own tenant"
    SITE = "own site"
    ANY = "any"


_OPERATOR, _ADMIN, _USER, _OWNER = Role.OPERATOR, Role.TENANT_ADMIN, Role.TENANT_USER, Role.SITE_OWNER
_AUDITOR, _SERVICE, _SITE = Role.AUDITOR, Role.SERVICE, Role.SITE
_TENANT, _AT_SITE, _ANY = Relation.TENANT, Relation.SITE, Relation.ANY

TABLE: Mapping[str, Mapping[Role, Relation]] = {
    # Everyone who may submit sees which pools there are; an owner sees the own site.
    "site.read": {_OPERATOR: _ANY, _AUDITOR: _ANY, _SERVICE: _ANY, _ADMIN: _ANY, _USER: _ANY, _OWNER: _AT_SITE},
    "site.register": {_SERVICE: _ANY},
    "site.invite": {_OPERATOR: _ANY},
    "site.revoke": {_OPERATOR: _ANY},
    "site.cordon": {_OPERATOR: _ANY, _OWNER: _AT_SITE},
    # A pool's mode is its owner's to decide as well as the hub's to record; control is only gained where the site's own declaration agrees.
    "pool.mode": {_OPERATOR: _ANY, _OWNER: _AT_SITE},
    # An owner may step back (suspend, leave); nobody takes the own pool forward.
    "pool.phase": {_OPERATOR: _ANY, _OWNER: _AT_SITE},
    "pool.downtime": {_OPERATOR: _ANY, _OWNER: _AT_SITE},
    # Whoever may call an offering may see it; what is left out is judged by the offering's own tenants.
    "offering.read": {_OPERATOR: _ANY, _AUDITOR: _ANY, _SERVICE: _ANY, _ADMIN: _TENANT, _USER: _TENANT, _OWNER: _AT_SITE},
    "pool.history": {_OPERATOR: _ANY, _AUDITOR: _ANY, _SERVICE: _ANY, _OWNER: _AT_SITE},
    "audit.read": {_OPERATOR: _ANY, _AUDITOR: _ANY},
    "audit.anchor": {_SERVICE: _ANY},
    # Asking for a cut; whether it happens is the owner's, who consents at the site or by his own token.
    "drill.start": {_OPERATOR: _ANY, _OWNER: _AT_SITE},
    "drill.consent": {_OWNER: _AT_SITE},
    "drill.read": {_OPERATOR: _ANY, _AUDITOR: _ANY, _SERVICE: _ANY, _OWNER: _AT_SITE},
    # Work. A site's people may end what runs on their machines; they never submit in a tenant's name, and neither does the operator.
    "job.submit": {_ADMIN: _TENANT, _USER: _TENANT},
    "job.cancel": {_ADMIN: _TENANT, _USER: _TENANT, _OWNER: _AT_SITE, _OPERATOR: _ANY},
    "job.read": {_ADMIN: _TENANT, _USER: _TENANT, _OWNER: _AT_SITE, _OPERATOR: _ANY, _AUDITOR: _ANY, _SERVICE: _ANY},
    # What a job prints is its tenant's, as its results are. The gateway shows it on a page that its tenant made a link to.
    "job.logs": {_ADMIN: _TENANT, _USER: _TENANT, _SERVICE: _ANY},
    "result.download": {_ADMIN: _TENANT, _USER: _TENANT},
    "work.upload": {_ADMIN: _TENANT, _USER: _TENANT},
    "work.download": {_SITE: _AT_SITE},
    "result.upload": {_SITE: _AT_SITE},
    # The owner's own reclaim is done at the site, and needs no hub; this is the same wish said here.
    "job.preempt": {_OPERATOR: _ANY, _OWNER: _AT_SITE},
    # A named person's word where a site is silent: never the tenant's, who would gain by it, nor the owner's, who would too.
    "attempt.close": {_OPERATOR: _ANY},
    "grant.set": {_OPERATOR: _ANY},
    "grant.read": {_OPERATOR: _ANY, _AUDITOR: _ANY, _ADMIN: _TENANT, _OWNER: _AT_SITE},
    "quota.set": {_OPERATOR: _ANY},
    "quota.read": {_OPERATOR: _ANY, _AUDITOR: _ANY, _SERVICE: _ANY, _ADMIN: _TENANT, _USER: _TENANT},
    # Money. The platform's side is the operator's; each other party sees its own agreements and statements.
    "spec.agree": {_OPERATOR: _ANY},
    "spec.read": {_OPERATOR: _ANY, _AUDITOR: _ANY, _SERVICE: _ANY, _ADMIN: _TENANT, _USER: _TENANT, _OWNER: _AT_SITE},
    "statement.read": {_OPERATOR: _ANY, _AUDITOR: _ANY, _SERVICE: _ANY, _ADMIN: _TENANT, _USER: _TENANT, _OWNER: _AT_SITE},
    # Calls of offerings: made by a tenant's people, seen by those whom they cost, and by the site that answered them.
    "call.make": {_ADMIN: _TENANT, _USER: _TENANT},
    "call.read": {_OPERATOR: _ANY, _AUDITOR: _ANY, _ADMIN: _TENANT, _USER: _TENANT, _OWNER: _AT_SITE},
    "call.decide": {_OPERATOR: _ANY},
    "call.seen": {_SERVICE: _ANY},
    "allowance.set": {_OPERATOR: _ANY},
    "ledger.check": {_OPERATOR: _ANY, _AUDITOR: _ANY},
    # What waits for a person: seen by who watches, decided by who answers for the platform.
    "reconciliation.read": {_OPERATOR: _ANY, _AUDITOR: _ANY, _OWNER: _AT_SITE},
    "suspense.read": {_OPERATOR: _ANY, _AUDITOR: _ANY},
    "suspense.release": {_OPERATOR: _ANY},
    "quarantine.read": {_OPERATOR: _ANY, _AUDITOR: _ANY},
    "quarantine.retry": {_OPERATOR: _ANY},
    # People and keys. A tenant's admin and a site's owner manage their own, within `require_grantable`.
    "tenant.create": {_OPERATOR: _ANY},
    "tenant.read": {_OPERATOR: _ANY, _AUDITOR: _ANY, _SERVICE: _ANY, _ADMIN: _TENANT, _USER: _TENANT},
    "token.create": {_OPERATOR: _ANY, _ADMIN: _TENANT, _OWNER: _AT_SITE},
    "token.read": {_OPERATOR: _ANY, _AUDITOR: _ANY, _ADMIN: _TENANT, _OWNER: _AT_SITE},
    "token.revoke": {_OPERATOR: _ANY, _ADMIN: _TENANT, _OWNER: _AT_SITE},
    # Which local account a tenant becomes is the owner's to say.
    "mapping.set": {_OPERATOR: _ANY, _OWNER: _AT_SITE},
    "mapping.read": {_OPERATOR: _ANY, _AUDITOR: _ANY, _SERVICE: _ANY, _ADMIN: _TENANT, _OWNER: _AT_SITE},
    "incident.report": {_SERVICE: _ANY, _OPERATOR: _ANY},
    "incident.read": {_OPERATOR: _ANY, _AUDITOR: _ANY, _SERVICE: _ANY, _ADMIN: _TENANT, _OWNER: _AT_SITE},
    "incident.handle": {_OPERATOR: _ANY, _OWNER: _AT_SITE},
    # Read models of our own services: whole, and therefore nobody else's.
    "service.snapshot": {_SERVICE: _ANY},
}

# A role that speaks for a service or a site is proven by its key, never handed out as a token.
_GRANTABLE: Mapping[Role, frozenset[Role]] = {
    _OPERATOR: frozenset({_OPERATOR, _ADMIN, _USER, _OWNER, _AUDITOR}),
    _ADMIN: frozenset({_ADMIN, _USER}),
    _OWNER: frozenset({_OWNER}),
}


@dataclass(frozen=True, slots=True)
class Scope:
    """What of an action's things a caller may see: everything, or those of this tenant, or of this site. For the query, not after it."""

    everything: bool
    tenant: TenantName | None
    site: SiteName | None

    def covers(self, tenant: TenantName | str | None = None, site: SiteName | str | None = None) -> bool:
        """True for a thing of this tenant at this site. A thing of nobody is covered by `everything` only."""
        return self.everything or (self.tenant is not None and self.tenant == tenant) or (self.site is not None and self.site == site)


def scope(claims: Claims, action: str) -> Scope:
    """How far a caller's right to `action` reaches; `Denied('rights.denied')` if he has none. Lists are cut by it in the query itself."""
    granted = TABLE[action]
    relations = {granted[role] for role in claims.roles if role in granted}
    found = Scope(
        everything=_ANY in relations,
        tenant=claims.tenant if _TENANT in relations else None,
        site=claims.site if _AT_SITE in relations else None,
    )
    if not found.everything and found.tenant is None and found.site is None:
        people = sorted(set(granted) - {_SERVICE, _SITE})
        raise Denied(
            "rights.denied",
            f"{claims.name} ({', '.join(sorted(claims.roles)) or 'no role'}) may not {action}",
            next_step=f"ask someone with the role {' or '.join(people)}" if people else "only the federation's own processes may",
        )
    return found


def require(claims: Claims, action: str, tenant: TenantName | str | None = None, site: SiteName | str | None = None) -> None:
    """Pass if the caller may do `action` on a thing of this tenant, at this site (None: the thing has none).

    `Denied('rights.denied')` without any right to the action; `NotFound('not_found')` if the right does not reach this thing.
    """
    if not scope(claims, action).covers(tenant, site):
        raise not_found()


def allowed(claims: Claims, action: str, tenant: TenantName | str | None = None, site: SiteName | str | None = None) -> bool:
    """Whether `require` would pass: for what is left out of an answer rather than refused."""
    try:
        return scope(claims, action).covers(tenant, site)
    except Denied:
        return False


def not_found() -> NotFound:
    """What an unknown id and another's id both answer: one text, nothing of the thing in it."""
    return NotFound("not_found", "there is no such thing, or it is not yours to see")


def require_grantable(claims: Claims, roles: Collection[Role], tenant: TenantName | None, site: SiteName | None) -> None:
    """Pass if the caller may hand out these roles for this tenant or site: nobody gives what he does not have.

    `Denied('rights.grant')` for a role that is not his to give; a role of a tenant needs that tenant named, a site owner's its site.
    """
    require(claims, "token.create", tenant=tenant, site=site)
    mine = scope(claims, "token.create")
    for role in roles:
        givers = [own for own in claims.roles if role in _GRANTABLE.get(own, frozenset())]
        # The giver's own reach must cover what the new role will reach.
        reach = mine.everything or (mine.tenant == tenant if role in {_ADMIN, _USER} else mine.site == site)
        named = (tenant if role in {_ADMIN, _USER} else site if role is _OWNER else "") is not None
        if not givers or not reach or not named:
            raise Denied("rights.grant", f"{claims.name} may not hand out the role {role} there")
