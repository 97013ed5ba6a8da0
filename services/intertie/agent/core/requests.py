"""Job requests at the site: the owner's offerings and rule, whether a request is taken, and what of it the hub may see. Pure.

The owner decides, by a rule or by hand; the site chooses the cards. The hub learns asked, accepted, declined, running and ended, and nothing of
queues, cards or native words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any

import msgspec

from intertie.agent.core.model import OPEN, Attempt, told_devices
from intertie.contracts.base import Instant
from intertie.contracts.link import AttemptEntry, EntryBase, NativeSeen, Offer, OfferBody, SiteQueued, Staging
from intertie.contracts.site import LONGEST_ANSWER_S, AccessMode, JobOffering, PoolInventory, PoolProfile, TaskType
from intertie.ids import PoolName

_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-(?:([01]\d|2[0-3]):([0-5]\d)|(24):(00))\Z")


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[job_offering.bounds]`: within them a request is accepted by rule, outside it is declined. What is left out bounds nothing."""

    tenants: list[str] = []
    """These alone; empty: every tenant that has an account here."""
    hours: list[str] = []
    """`HH:MM-HH:MM` by this host's clock; empty: always."""
    max_per_day: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Accepted since local midnight."""
    max_at_once: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Accepted and not over."""


class JobOfferingRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[job_offering]]` in `site.toml`: what the owner takes requests for, and how they are answered."""

    name: Annotated[str, msgspec.Meta(pattern="^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$")]
    pool: PoolName
    title: Annotated[str, msgspec.Meta(max_length=200)] = ""
    max_devices: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    devices: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    """Of the pool at once, all requests of this offering together."""
    max_wall_s: Annotated[int, msgspec.Meta(ge=1, le=31_536_000)]
    task_types: Annotated[list[TaskType], msgspec.Meta(min_length=1)]
    price_per_hour: Decimal
    """Of one device, in `currency`; write it as a text: "6.00"."""
    currency: Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")] = "CNY"
    answer_within_s: Annotated[int, msgspec.Meta(ge=1, le=LONGEST_ANSWER_S)]
    accept: Annotated[str, msgspec.Meta(pattern="^(rule|by-hand)$")]
    bounds: Bounds = Bounds()

    def __post_init__(self) -> None:
        """Refused where it is read: what cannot be compared would stop whoever compares it."""
        if not (self.price_per_hour.is_finite() and self.price_per_hour >= 0):
            raise ValueError(f'price_per_hour is an amount from 0, such as "6.00", not {self.price_per_hour}')

    def told(self) -> JobOffering:
        """What the hub may know of it."""
        return JobOffering(
            name=self.name,
            pool=self.pool,
            title=self.title,
            max_devices=self.max_devices,
            devices=self.devices,
            max_wall_s=self.max_wall_s,
            task_types=self.task_types,
            price_per_hour=self.price_per_hour,
            currency=self.currency,
            answer_within_s=self.answer_within_s,
            by_hand=self.accept == "by-hand",
        )


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has no answer at the hub yet, as it lies in the journal."""

    offer: Offer
    received: Instant
    answer_by: Instant
    accepted_by: str = ""
    """The owner's yes; it begins as soon as cards are free, until `answer_by` (by rule), or for as long as the owner lets it."""
    accepted_at: Instant | None = None
    waits: str = ""
    offering: str = ""
    """Empty: kept by an agent that did not note it."""


@dataclass(frozen=True, slots=True)
class Accept:
    """By the owner's rule."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A person of the site answers."""


@dataclass(frozen=True, slots=True)
class Decline:
    """With the words that go back to who asked."""

    text: str


Verdict = Accept | Ask | Decline


def usable(rules: Iterable[JobOfferingRule], profiles: Mapping[PoolName, PoolProfile]) -> list[JobOfferingRule]:
    """Offerings of pools in which the owner decides; nothing is offered of a pool whose cards the hub places work on."""
    return [rule for rule in rules if rule.pool in profiles and profiles[rule.pool].mode is AccessMode.SERVICE]


def judge(
    body: OfferBody, rule: JobOfferingRule | None, attempts: Iterable[Attempt], pending: Iterable[Pending], *, local: datetime
) -> Verdict:
    """What the owner's rule says to a request; `local` is now by this host's clock. Bounds of the offering itself come first: they are promised."""
    if rule is None or rule.pool != body.pool:
        return Decline(f"there is no job offering {body.offering} in pool {body.pool} here")
    if (beyond := _beyond(body, rule)) is not None:
        return Decline(beyond)
    bounds = rule.bounds
    if bounds.tenants and body.tenant not in bounds.tenants:
        return Decline(f"offering {rule.name} is not for tenant {body.tenant}")
    if rule.accept == "by-hand":
        return Ask()
    if bounds.hours and not any(_inside(window, local) for window in bounds.hours):
        return Decline(f"offering {rule.name} is answered during {', '.join(bounds.hours)}, it is {local:%H:%M} here")
    mine = [a for a in attempts if a.offering == rule.name and a.id != body.attempt]
    waiting = [
        one for one in pending if one.accepted_at is not None and one.offer.attempt != body.attempt and one.offering in (rule.name, "")
    ]
    at_once = sum(a.state in OPEN for a in mine) + len(waiting)
    if bounds.max_at_once is not None and at_once >= bounds.max_at_once:
        return Decline(f"{at_once} requests of {rule.name} are under way, {bounds.max_at_once} at once is the owner's limit")
    midnight = local.replace(hour=0, minute=0, second=0, microsecond=0)
    today = sum(1 for a in mine if a.accepted_at is not None and a.accepted_at >= midnight)
    today += sum(1 for one in waiting if one.accepted_at is not None and one.accepted_at >= midnight)
    if bounds.max_per_day is not None and today >= bounds.max_per_day:
        return Decline(f"{today} requests of {rule.name} were accepted today, {bounds.max_per_day} a day is the owner's limit")
    return Accept()


def _beyond(body: OfferBody, rule: JobOfferingRule) -> str | None:
    """What the hub should not have sent: judged here again, since the owner's word may be newer than what the hub knows."""
    spec = body.spec
    if spec.resources.count > rule.max_devices or len(body.devices) != spec.resources.count:
        return f"{spec.resources.count} devices are asked for, {rule.max_devices} is the most of one request"
    if spec.wall_s > rule.max_wall_s:
        return f"{spec.wall_s} s are asked for, {rule.max_wall_s} s is the most"
    if spec.task_type not in rule.task_types:
        return f"{spec.task_type} work is not taken, but {', '.join(rule.task_types)}"
    cost = rule.price_per_hour * spec.resources.count * spec.wall_s / 3_600
    if body.budget is not None and cost > body.budget:
        return f"it could cost {cost:.2f} {rule.currency}, its budget is {body.budget:.2f}"
    return None


def _inside(window: str, local: datetime) -> bool:
    """Half open, over midnight too; a window that cannot be read is closed."""
    found = _WINDOW.match(window.strip())
    if found is None:
        return False
    start = int(found[1]) * 60 + int(found[2])
    end = int(found[3] or found[5]) * 60 + int(found[4] or found[6])
    at = local.hour * 60 + local.minute
    return start <= at < end if start < end else at >= start or at < end


# --- what the hub sees -------------------------------------------------------------------------------------------------------------------

_HIDDEN: Mapping[str, Any] = {
    "native_id": "",
    "native_state": "",
    "native_reason": "",
    "cluster": "",
    "nodes": [],
    "held_devices": [],
    "device_use": [],
}


def veiled(entry: EntryBase, attempt: Attempt | None) -> EntryBase:
    """An entry about a request without cards, nodes and native words; every other entry as it is."""
    if attempt is None or not attempt.offering or not isinstance(entry, AttemptEntry):
        return entry
    if isinstance(entry, SiteQueued | NativeSeen):
        # Its place in the journal is taken, and nothing of a queue is said: the hub has heard this before.
        return Staging(
            seq=entry.seq,
            at=entry.at,
            islanded=entry.islanded,
            attempt=entry.attempt,
            job=entry.job,
            epoch=entry.epoch,
            generation=entry.generation,
        )
    changes = {name: value for name, value in _HIDDEN.items() if hasattr(entry, name)}
    if hasattr(entry, "devices"):
        changes["devices"] = told_devices(attempt)
    return msgspec.structs.replace(entry, **changes)


def veiled_pools(
    pools: Sequence[PoolInventory], profiles: Mapping[PoolName, PoolProfile], attempts: Iterable[Attempt]
) -> list[PoolInventory]:
    """Pools of service access show how much of the hub's own work they run, and nothing else."""
    work = list(attempts)

    def ours(pool: PoolName) -> int:
        return sum(1 for a in work if a.pool == pool and a.local is None and a.state in OPEN)

    return [
        msgspec.structs.replace(one, devices=[], running=ours(one.pool), waiting=0, native=None)
        if one.pool in profiles and profiles[one.pool].mode is AccessMode.SERVICE
        else one
        for one in pools
    ]
