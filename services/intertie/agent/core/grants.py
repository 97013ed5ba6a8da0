"""A tenant's islanded allowance: who may submit by it, and what it still holds. It is never borrowed against; what it does not hold is refused.

The ladder is walked in this order; the first rung that breaks is the answer. `valid_until` is judged by this site's wall clock, which is the
only one there is while islanded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from intertie.agent.core.model import OPEN, Attempt, Failing
from intertie.contracts.job import Resources
from intertie.contracts.link import IslandedGrant, Sealed
from intertie.ids import AttemptId, SiteName, TenantName


@dataclass(frozen=True, slots=True)
class Held:
    """A grant whose seal held, and the seal."""

    grant: IslandedGrant
    sealed: Sealed


@dataclass(frozen=True, slots=True)
class Wish:
    """Work of a tenant's, asked for here."""

    tenant: TenantName
    resources: Resources
    wall_s: int


@dataclass(frozen=True, slots=True)
class Stand:
    """What is so when somebody asks."""

    site: SiteName
    now: datetime
    islanded_since: datetime | None
    attempts: Sequence[Attempt]
    by_grant: frozenset[AttemptId]
    """Those of `attempts` that were taken by an allowance in this absence."""


def of_tenant(grants: Iterable[Held], wish: Wish, site: SiteName) -> Held | None:
    """The tenant's own for that kind of device at this site, the longest valid if there are several."""
    found = [h for h in grants if (h.grant.tenant, h.grant.site, h.grant.kind) == (wish.tenant, site, wish.resources.kind)]
    return max(found, key=lambda held: held.grant.valid_until, default=None)


def judge(held: Held | None, wish: Wish, stand: Stand) -> Failing | None:
    """None if the allowance holds this wish."""
    if stand.islanded_since is None:
        return Failing(code="grant.not_islanded", text="the hub is heard: an allowance is only for the time when it is not")
    if held is None:
        return Failing(code="grant.none", text=f"{wish.tenant} has no islanded allowance of {wish.resources.kind}s at {stand.site}")
    grant = held.grant
    if stand.now >= grant.valid_until:
        return Failing(code="grant.expired", text=f"the allowance {grant.grant} was valid until {grant.valid_until.isoformat()}")
    holding = devices_held(grant, stand.attempts)
    if holding + wish.resources.count > grant.devices:
        text = f"{wish.tenant} holds {holding} of {grant.devices} {grant.kind}s here, {wish.resources.count} more are asked for"
        return Failing(code="grant.devices", text=text)
    if grant.quantity_milli_us is not None:
        used = quantity_used(grant, stand)
        asked = wish.resources.count * 1_000 * wish.wall_s * 1_000_000
        if used + asked > grant.quantity_milli_us:
            text = (
                f"this absence's allowance of {_hours(grant.quantity_milli_us)} card-hours has {_hours(grant.quantity_milli_us - used)} "
                f"left, the work may take {_hours(asked)}"
            )
            return Failing(code="grant.used_up", text=text)
    return None


def devices_held(grant: IslandedGrant, attempts: Iterable[Attempt]) -> int:
    """By all of the tenant's work here that the hub knows of or will be told of, its own offers included."""
    return sum(
        len(a.devices) for a in attempts if a.local is None and a.tenant == grant.tenant and a.kind is grant.kind and a.state in OPEN
    )


def quantity_used(grant: IslandedGrant, stand: Stand) -> int:
    """What was taken by the allowance in this absence: ended work as it ran, open work as long as it may."""
    mine = (a for a in stand.attempts if a.id in stand.by_grant and a.tenant == grant.tenant and a.kind is grant.kind)
    return sum(a.share_milli * len(a.devices) * _us(a) for a in mine)


def _us(attempt: Attempt) -> int:
    if attempt.ended is not None:
        return attempt.ended.ran_us
    return (attempt.spec.wall_s or 0) * 1_000_000 if attempt.state in OPEN else 0


def _hours(milli_us: int) -> str:
    return f"{max(0, milli_us) / 3_600_000_000_000:.3f}"
