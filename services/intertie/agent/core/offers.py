"""Claim or refuse: the ladder that every offer climbs. The first rung that breaks is the answer; the tests walk it in this order.

Busy is no fault: between the hub's view and the claim a local user may have taken the device, and a site that says so loses nothing by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from intertie.agent.core.devices import Holds, Pool
from intertie.agent.core.images import refusal
from intertie.agent.core.model import OPEN, Attempt, Failing, State
from intertie.agent.core.requests import JobOfferingRule
from intertie.agent.core.reserved import Held, Note
from intertie.contracts.image import PoolImages
from intertie.contracts.link import OfferBody
from intertie.contracts.site import AccessMode, DeviceKind, DeviceState
from intertie.ids import AttemptId, DeviceId, JobId, PoolName, SiteName, TenantName


@dataclass(frozen=True, slots=True)
class Terms:
    """What the site works by when it judges an offer."""

    site: SiteName
    pools: Mapping[PoolName, Pool]
    owner_tenant: TenantName
    single_user: bool
    """Not root: jobs run as the agent's own user, so only the owner's own tenant is taken."""
    mappings: Set[tuple[TenantName, str]] = frozenset()
    cordoned: Set[PoolName] = frozenset()
    paused: bool = False
    owner_first: bool = True
    offerings: Mapping[str, JobOfferingRule] = field(default_factory=dict)
    """What the owner takes requests for, by name."""
    closed: Failing | None = None
    """Why no new work at all is taken now: a disk that is nearly full, a journal at its bound."""
    self_stop: bool = True
    """Supervisors here end leased work without the agent."""
    may_run_as: Callable[[str], str] = lambda account: ""
    """Empty if the local account may run jobs here, else why not (unknown, root, the agent's own uid)."""
    images: PoolImages = PoolImages()
    """Which images that a job names run here."""


@dataclass(slots=True)
class Books:
    """What the site remembers: attempts, holders, the highest generation of each job, and stops that came before their offer."""

    attempts: dict[AttemptId, Attempt] = field(default_factory=dict)
    holds: Holds = field(default_factory=Holds)
    seen: dict[JobId, tuple[int, int]] = field(default_factory=dict)
    tombstones: set[AttemptId] = field(default_factory=set)
    observed: dict[DeviceId, DeviceState] = field(default_factory=dict)
    reserved: dict[DeviceId, Held] = field(default_factory=dict)
    """Kept for somebody of the site; `observed` says that they are in other hands."""
    notes: dict[DeviceId, Note] = field(default_factory=dict)
    """Why devices are not to be had, as the hub may know it."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The offer is taken; this is its row. Nothing starts before the go."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Repeated:
    """Answered before; the answer stands and travels in its lane."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class NotTaken:
    why: Failing


Answer = Taken | Repeated | NotTaken


def judge(body: OfferBody, terms: Terms, books: Books, *, sent_boot_s: float, kernel_boot: str) -> Answer:
    """Whether this site takes the offer. `body` was verified: its seal is the scheduler's."""
    known = books.attempts.get(body.attempt)
    if known is not None:
        return Repeated(known)
    for rung in LADDER:
        why = rung(body, terms, books)
        if why is not None:
            return NotTaken(why)
    pool = terms.pools[body.pool]
    return Taken(
        Attempt(
            id=body.attempt,
            job=body.job,
            state=State.CLAIMED,
            pool=body.pool,
            kind=pool.kind,
            model="" if pool.kind is DeviceKind.SLOT else pool.profile.accelerator,
            share_milli=pool.profile.share_milli,
            devices=list(body.devices),
            spec=body.spec,
            account=body.account,
            env=dict(body.env),
            tenant=body.tenant,
            epoch=body.epoch,
            generation=body.generation,
            attribution=body.attribution,
            traceparent=body.traceparent,
            kernel_boot=kernel_boot,
            offer_sent_boot_s=sent_boot_s,
            start_within_s=body.start_within_s,
            start_by_s=body.start_by_s,
            submit_within_s=body.submit_within_s,
            lease_s=body.lease_s,
            after=list(body.after),
            offering=body.offering,
        )
    )


def _wrong_site(body: OfferBody, terms: Terms, books: Books) -> Failing | None:
    if body.site != terms.site:
        return Failing(code="wrong_site", text=f"the offer is for site {body.site}, this is {terms.site}", fault=True)
    return None


def _tombstone(body: OfferBody, terms: Terms, books: Books) -> Failing | None:
    if body.attempt in books.tombstones:
        return Failing(code="stopped_before", text=f"a stop of {body.attempt} came before its offer")
    return None


def _stale(body: OfferBody, terms: Terms, books: Books) -> Failing | None:
    seen = books.seen.get(body.job)
    if seen is not None and (body.epoch, body.generation) <= seen:
        text = f"epoch {body.epoch} generation {body.generation} is not above {seen[0]}/{seen[1]}, the highest seen of {body.job}"
        return Failing(code="stale_generation", text=text)
    return None


def _paused(body: OfferBody, terms: Terms, books: Books) -> Failing | None:
    return Failing(code="paused", text="the site's owner has paused lending") if terms.paused else None


def _closed(body: OfferBody, terms: Terms, books: Books) -> Failing | None:
    return terms.closed


def _pool(body: OfferBody, terms: Terms, books: Books) -> Failing | None:
    if body.pool not in terms.pools:
        return Failing(code="unknown_pool", text=f"there is no pool {body.pool} here", fault=True)
    if body.pool in terms.cordoned:
        return Failing(code="cordoned", text=f"pool {body.pool} is cordoned")
    return None


def _mode(body: OfferBody, terms: Terms, books: Books) -> Failing | None:
    """In a pool of service access the owner decides, and only what was asked of an offering is begun; what the hub decides has no place there."""
    service = terms.pools[body.pool].profile.mode is AccessMode.SERVICE
    if service and not body.offering:
        return Failing(code="owner_decides", text=f"in pool {body.pool} the owner decides what runs: ask one of its job offerings")
    if body.offering and (body.offering not in terms.offerings or not service):
        return Failing(code="unknown_offering", text=f"there is no job offering {body.offering} in pool {body.pool} here")
    return None


def _tenant(body: OfferBody, terms: Terms, books: Books) -> Failing | None:
    if terms.single_user:
        if body.tenant != terms.owner_tenant:
            text = f"single-user site: the agent is not root, so only the owner's tenant {terms.owner_tenant} is taken, not {body.tenant}"
            return Failing(code="single_user", text=text, fault=True)
        return None
    if (body.tenant, body.account) not in terms.mappings:
        text = f"tenant {body.tenant} is not mapped to local account {body.account or '(none)'} here"
        return Failing(code="no_mapping", text=text, fault=True)
    if why := terms.may_run_as(body.account):
        return Failing(code="account", text=why, fault=True)
    return None


def _shape(body: OfferBody, terms: Terms, books: Books) -> Failing | None:
    pool = terms.pools[body.pool]
    there = {device.id for device in pool.devices}
    unknown = [device for device in body.devices if device not in there]
    if unknown:
        return Failing(code="unknown_device", text=f"pool {body.pool} has no device {', '.join(unknown)}", fault=True)
    wanted = body.spec.resources
    if wanted.kind is not pool.kind or len(set(body.devices)) != wanted.count or len(body.devices) != wanted.count:
        text = f"the job asks for {wanted.count} × {wanted.kind}, the offer names {len(body.devices)} devices of a pool of {pool.kind}"
        return Failing(code="devices", text=text, fault=True)
    return None


def _image(body: OfferBody, terms: Terms, books: Books) -> Failing | None:
    return refusal(body.spec.image, body.pool, terms.images)


def _lease(body: OfferBody, terms: Terms, books: Books) -> Failing | None:
    if body.lease_s > 0 and not terms.self_stop:
        return Failing(code="no_self_stop", text="nothing here ends work at the end of its lease while the agent is away")
    return None


def _lent(body: OfferBody, terms: Terms, books: Books) -> Failing | None:
    offering = terms.offerings.get(body.offering)
    limit = offering.devices if offering is not None else terms.pools[body.pool].profile.lendable.devices
    others = (
        a
        for a in books.attempts.values()
        if a.local is None and a.pool == body.pool and a.offering == body.offering and a.state in OPEN and a.id not in body.after
    )
    lent = sum(len(a.devices) for a in others)
    if lent + len(body.devices) > limit:
        return Failing(
            code="device_busy", text=f"{lent} of {limit} lendable devices of {body.pool} are lent, {len(body.devices)} more asked"
        )
    return None


def owner_waits(pool: Pool, books: Books) -> int:
    """Devices of this pool that the owner's own waiting work could take: it goes before whatever comes from elsewhere."""
    waiting = (a for a in books.attempts.values() if a.state is State.WAITING and a.kind is pool.kind)
    return sum(count for a in waiting if (count := a.spec.resources.count) <= len(pool.devices))


def _owner_first(body: OfferBody, terms: Terms, books: Books) -> Failing | None:
    if terms.owner_first and (waits := owner_waits(terms.pools[body.pool], books)):
        return Failing(code="device_busy", text=f"the owner's own work waits for {waits} devices of {body.pool}")
    return None


def _busy(body: OfferBody, terms: Terms, books: Books) -> Failing | None:
    if busy := books.holds.busy(body.pool, body.devices, after=body.after):
        return Failing(code="device_busy", text=f"held by other work here: {', '.join(busy)}")
    return None


def _unwell(body: OfferBody, terms: Terms, books: Books) -> Failing | None:
    for device in body.devices:
        match books.observed.get(device):
            case DeviceState.LOST:
                return Failing(code="device_lost", text=f"{device} has fallen off the bus", fault=True)
            case DeviceState.FOREIGN:
                note = books.notes.get(device)
                return Failing(
                    code="device_busy", text=f"{device}: {note.text}" if note else f"processes that are not ours run on {device}"
                )
            case DeviceState.UNKNOWN if (note := books.notes.get(device)) is not None:
                return Failing(code="device_busy", text=f"{device}: {note.text}")
    return None


LADDER = (
    _wrong_site,
    _tombstone,
    _stale,
    _paused,
    _closed,
    _pool,
    _mode,
    _tenant,
    _shape,
    _image,
    _lease,
    _lent,
    _owner_first,
    _busy,
    _unwell,
)
