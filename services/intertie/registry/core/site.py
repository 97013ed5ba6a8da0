"""A site's own record: registered once, told again only when something about it changed, never for each heartbeat."""

from __future__ import annotations

from datetime import datetime

import msgspec

from intertie.contracts.link import Lane, LaneState, LendingPaused, SiteCondition
from intertie.contracts.site import CordonPool, Freshness, PoolRecord, RegisterSite, SiteRecord
from intertie.errors import Conflict, Refused
from intertie.ids import name
from intertie.lifecycle import FRESHNESS_MOVES
from intertie.registry.core.freshness import Judgement

# A new estimate closer than this to the one told is noise, not news.
OFFSET_STEP_S = 1.0
# States of a lane that nobody has to do anything about.
MOVING = frozenset({LaneState.OK, LaneState.BEHIND, LaneState.BUSY})
# A reason is read months later by somebody else.
SHORTEST_REASON = 3


def register(known: SiteRecord | None, request: RegisterSite, *, now: datetime, version: int = 1) -> SiteRecord:
    """The site's record after identity said that it joined; the known one if nothing changed. What a site is, it stays. `version`: of a new one."""
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
            version=version,
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
        left_at=None,
    )
    return known if after == known else msgspec.structs.replace(after, version=known.version + 1)


def paused(known: SiteRecord, said: LendingPaused, *, now: datetime) -> SiteRecord:
    """The record after the owner pressed the red button, or let it go. A pause that is over when it is heard of never was one here."""
    on = said.paused and (said.until is None or said.until > now)
    return _changed(known, paused=on, paused_until=said.until if on else None, paused_reason=said.reason if on else "")


def pause_over(known: SiteRecord, *, now: datetime) -> SiteRecord:
    """A pause ends by itself when its time has come, at a site that is silent too: it was the owner's word."""
    if not known.paused or known.paused_until is None or known.paused_until > now:
        return known
    return _changed(known, paused=False, paused_until=None, paused_reason="")


def conditioned(known: SiteRecord, said: SiteCondition) -> SiteRecord:
    """The record with whether the site can take new work, and why not."""
    why = ": ".join(part for part in (said.code, said.text) if part)
    return _changed(known, accepting=said.accepting, condition="" if said.accepting else why[:4_000], self_stop=said.self_stop)


def lane_stands(known: SiteRecord, lane: Lane, state: LaneState) -> SiteRecord:
    """The record with this lane's state, if it is one that a person may have to end."""
    others = {name: word for name, word in known.lanes.items() if name != lane}
    return _changed(known, lanes=others if state in MOVING else {**others, lane.value: state.value})


def ruled(known: SiteRecord, state: LaneState | None, *, now: datetime) -> SiteRecord:
    """What rules alone change: the end of a pause, and the state of the registry's own lane (None: it has never been heard)."""
    after = pause_over(known, now=now)
    if state is not None:
        after = lane_stands(after, Lane.REGISTRY, state)
    return known if after is known else msgspec.structs.replace(after, version=known.version + 1)


def left(known: SiteRecord, *, at: datetime) -> SiteRecord:
    """The record of a site that has left; the first time stands."""
    return known if known.left_at is not None else _changed(known, left_at=at)


def _changed(known: SiteRecord, **fields: object) -> SiteRecord:
    after = msgspec.structs.replace(known, **fields)
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
    if (before.paused, before.paused_until) != (after.paused, after.paused_until):
        return "its owner paused lending" if after.paused else "lending goes on"
    if (before.accepting, before.condition) != (after.accepting, after.condition):
        return "it takes new work" if after.accepting else f"it takes no new work: {after.condition}"[:4_000]
    if before.lanes != after.lanes:
        return "a lane of it stands still" if after.lanes else "its lanes move"
    if before.left_at != after.left_at:
        return "it left"
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
