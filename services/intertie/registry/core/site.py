"""A site's own record: registered once, told again only when something about it changed, never for each heartbeat."""

from __future__ import annotations

from datetime import datetime

import msgspec

from intertie.contracts.site import CordonPool, Freshness, PoolRecord, RegisterSite, SiteRecord
from intertie.errors import Conflict, Refused
from intertie.ids import name
from intertie.lifecycle import FRESHNESS_MOVES
from intertie.registry.core.freshness import Judgement

# A new estimate closer than this to the one told is noise, not news.
OFFSET_STEP_S = 1.0
# A reason is read months later by somebody else.
SHORTEST_REASON = 3


def register(known: SiteRecord | None, request: RegisterSite, *, now: datetime) -> SiteRecord:
    """The site's record after identity said that it joined; the known one if nothing changed. What a site is, it stays."""
    name(request.site, "site")
    if known is None:
        return SiteRecord(
            site=request.site,
            kind=request.kind,
            title=request.title,
            owner=request.owner,
            single_user=request.single_user,
            owner_tenant=request.owner_tenant,
            freshness=Freshness.UNKNOWN,
            joined_at=now,
            last_heard=None,
            hears_us=False,
            clock_offset_s=None,
            agent_version=request.agent_version,
            version=1,
        )
    if known.kind != request.kind:
        raise Conflict("registry.site_kind", f"site {known.site} is of kind {known.kind}, not {request.kind}")
    after = msgspec.structs.replace(
        known,
        title=request.title,
        owner=request.owner,
        single_user=request.single_user,
        owner_tenant=request.owner_tenant,
        agent_version=request.agent_version,
    )
    return known if after == known else msgspec.structs.replace(after, version=known.version + 1)


def sure_offset(offset_s: float, error_s: float) -> float | None:
    """The offset if it is known well enough to be told to people; a first message alone says little."""
    return offset_s if error_s < OFFSET_STEP_S / 2 else None


def heard(known: SiteRecord, judged: Judgement, *, last_heard: datetime | None, clock_offset_s: float | None) -> SiteRecord:
    """The record with what the leader judged; the known one if there is no news in it."""
    offset = known.clock_offset_s
    moved = clock_offset_s is not None and (offset is None or abs(clock_offset_s - offset) >= OFFSET_STEP_S)
    if (known.freshness, known.hears_us) == (judged.freshness, judged.hears_us) and not moved:
        return known
    return msgspec.structs.replace(
        known,
        freshness=judged.freshness,
        hears_us=judged.hears_us,
        last_heard=last_heard,
        clock_offset_s=clock_offset_s if moved else offset,
        version=known.version + 1,
    )


def why(before: SiteRecord, after: SiteRecord) -> str:
    """The cause told with a change."""
    if before.freshness != after.freshness:
        if after.freshness is Freshness.STALE and before.hears_us and not after.hears_us:
            return "it speaks, but our answers do not arrive there"
        return FRESHNESS_MOVES.get((before.freshness, after.freshness), "judged anew")
    if before.hears_us != after.hears_us:
        return "our answers arrive there" if after.hears_us else "our answers do not arrive there"
    if before.clock_offset_s != after.clock_offset_s:
        return "its clock's offset changed"
    return "its record changed"


def pool_heard(record: PoolRecord, freshness: Freshness, last_heard: datetime | None) -> PoolRecord:
    """A pool is as fresh as its site."""
    if record.freshness == freshness:
        return record
    return msgspec.structs.replace(record, freshness=freshness, last_heard=last_heard, version=record.version + 1)


def cordon(record: PoolRecord, request: CordonPool) -> PoolRecord:
    """The pool's record after the request; the same record if it is so already."""
    if request.on and len(request.reason.strip()) < SHORTEST_REASON:
        raise Refused("registry.reason_missing", "a cordon needs a reason", next_step="say why, for those who find it later")
    if request.on:
        changes = (True, request.drain, request.reason)
    else:
        changes = (False, False, "")
    if (record.cordoned, record.draining, record.cordon_reason) == changes:
        return record
    return msgspec.structs.replace(record, cordoned=changes[0], draining=changes[1], cordon_reason=changes[2], version=record.version + 1)
