"""What is decided about a pool: its mode by two questions, its phase by one table of moves, its downtimes by their notice. Pure.

A decision is a record with its answers, its person and its day; the next one is added, none is changed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

import msgspec

from intertie.contracts.modes import DecideMode, DeclareDowntime, MovePhase, PoolMove
from intertie.contracts.site import AccessMode, DeviceState, Downtime, Freshness, ModeDecision, Phase, PoolProfile, PoolRecord
from intertie.contracts.usage import MeterSpec
from intertie.errors import Conflict, NotFound, Refused
from intertie.ids import TenantName, name
from intertie.lifecycle import PHASE_FORWARD, PHASE_MOVES

NOTICE = timedelta(hours=24)
"""Declared at least so long ahead, a downtime is planned."""
# A pool that is down for longer has left; suspend or close it.
LONGEST = timedelta(days=92)
# More windows than anybody can have planned are a mistake of a script.
MOST_DOWNTIMES = 64


def at_joining(profile: PoolProfile, *, by: str, now: datetime) -> ModeDecision:
    """The first decision: what the owner's own declaration says. Who declares `managed` lets the hub decide; the response time was not asked."""
    return ModeDecision(
        mode=profile.mode,
        outsider_decides=profile.mode is AccessMode.MANAGED,
        response_time_held=None,
        decided_by=by,
        decided_at=now,
        reason="declared when the pool joined",
        at_joining=True,
    )


def ours(record: PoolRecord) -> int | None:
    """Devices that federation work holds, as the site last said; None if it is not heard, or never said: that proves nothing."""
    if record.inventory is None or record.freshness is not Freshness.FRESH:
        return None
    held = sum(1 for seen in record.inventory.devices if seen.state is DeviceState.OURS)
    # A pool of service access shows no devices, only how much of ours it runs.
    return max(held, record.inventory.running) if record.profile.mode is AccessMode.SERVICE else held


def decide(record: PoolRecord, request: DecideMode, *, by: str, now: datetime) -> PoolRecord:
    """The pool after the decision; the first reason against it, in this order."""
    where = f"{request.site}/{request.pool}"
    if record.phase is Phase.CLOSED:
        raise Refused("registry.mode.closed", f"pool {where} has left the federation", next_step=f"intertie pool phase {where} candidate")
    if request.mode is AccessMode.MANAGED and not request.outsider_decides:
        raise Refused(
            "registry.mode.outsider",
            "managed access means that an outsider decides what runs here, and the answer to that is no",
            next_step="choose service: the owner decides each request",
        )
    if request.mode is AccessMode.SERVICE and not request.response_time_held:
        raise Refused(
            "registry.mode.response_time",
            "service access is a promise, and the answer to whether the response time can be held is no",
            next_step="offer it as managed, or with an answer time that can be held",
        )
    before = record.decision.mode if record.decision is not None else record.profile.mode
    if request.mode is not before:
        _require_empty(record, f"to change pool {where} from {before} to {request.mode}", where)
    decision = ModeDecision(
        mode=request.mode,
        outsider_decides=request.outsider_decides,
        response_time_held=request.response_time_held,
        decided_by=by,
        decided_at=now,
        reason=request.reason,
    )
    return _changed(record, decision=decision)


def _require_empty(record: PoolRecord, what: str, where: str) -> None:
    """Nothing of ours runs, and nothing can begin meanwhile: the pool is drained, and its site says so now."""
    site, pool = where.split("/")
    step = f"intertie site drain {site} --pool {pool} --wait --reason WHY"
    if not record.cordoned:
        raise Conflict("registry.pool_not_drained", f"{what}, it must be drained first: new work could begin meanwhile", next_step=step)
    held = ours(record)
    if held is None:
        raise Conflict("registry.pool_unknown_work", f"{what}, its site must say what runs there, and it is not heard", next_step=step)
    if held:
        raise Conflict(
            "registry.pool_works", f"{what}, nothing may run under the old rule: {held} devices are held by our work", next_step=step
        )


def agreed_spec(specs: Sequence[MeterSpec], record: PoolRecord, *, now: datetime) -> MeterSpec | None:
    """The agreement of the pool's site with the platform that is in force; None: there is none, and no pilot begins or is left."""
    mine = [spec for spec in specs if spec.provider == record.site and spec.effective_from <= now]
    return max(mine, key=lambda spec: (spec.effective_from, spec.revision), default=None)


def _way_to(phase: Phase, before: Phase, where: str) -> str:
    """The first move on the shortest way to `phase`; never one that nobody asked for, such as closing the pool."""
    towards, seen = [phase], {phase}
    for after in towards:
        if (before, after) in PHASE_MOVES:
            return f"intertie pool phase {where} {after.value} --reason WHY"
        # Nobody is sent through a closed or a suspended pool on the way to another phase.
        steps = [step for step, to in PHASE_MOVES if to is after and step not in seen and step not in (Phase.CLOSED, Phase.SUSPENDED)]
        towards += steps
        seen.update(steps)
    return f"intertie pool history {where}"


def moved(record: PoolRecord, request: MovePhase, *, own: bool, spec: MeterSpec | None) -> tuple[PoolRecord, PoolMove]:
    """The pool in its next phase, and the move. `own`: who asks belongs to the site, or is its owner by name."""
    where, move = f"{request.site}/{request.pool}", (record.phase, request.phase)
    if move not in PHASE_MOVES:
        allowed = sorted(after.value for before, after in PHASE_MOVES if before is record.phase)
        raise Refused(
            "registry.phase.forbidden",
            f"pool {where} is {record.phase.value}, and cannot become {request.phase.value}: it may become {', '.join(allowed)}",
            next_step=_way_to(request.phase, record.phase, where),
        )
    if move in PHASE_FORWARD and own:
        raise Refused(
            "registry.phase.own",
            f"nobody takes the own pool forward: {where} becomes {request.phase.value} by another person's word",
            next_step="ask an operator of the hub who is not the site's owner",
        )
    if move in PHASE_FORWARD and spec is None:
        raise Refused(
            "registry.phase.no_spec",
            f"no meter spec is agreed between site {request.site} and the platform: without one pool {where} does not become {request.phase.value}",
            next_step=f"intertie meterspec agree --title TITLE --provider {request.site} --consumer platform --price slot=AMOUNT",
        )
    if request.phase is Phase.CLOSED and (held := ours(record)):
        raise Conflict(
            "registry.pool_works",
            f"{held} devices of pool {where} are held by our work",
            next_step=f"intertie site drain {request.site} --pool {request.pool} --wait --reason WHY",
        )
    tenants = record.tenants if request.tenants is None else sorted({TenantName(name(one, "tenant")) for one in request.tenants})
    told = PoolMove(
        before=record.phase, after=request.phase, reason=request.reason, spec=f"{spec.spec} rev {spec.revision}" if spec is not None else ""
    )
    return _changed(record, phase=request.phase, tenants=tenants), told


def declare_downtime(record: PoolRecord, request: DeclareDowntime, *, id: str, by: str, now: datetime) -> PoolRecord:
    """The pool with this window; the same record if it has it already."""
    if request.end <= request.start:
        raise Refused("registry.downtime.window", f"the downtime ends at {_at(request.end)}, before it begins at {_at(request.start)}")
    if request.end <= now:
        raise Refused("registry.downtime.over", f"the downtime is over since {_at(request.end)}: it would change nothing")
    if request.end - request.start > LONGEST:
        raise Refused("registry.downtime.long", f"a downtime lasts {LONGEST.days} days at most", next_step="suspend the pool, or close it")
    kept = standing(record.downtimes, now)
    if any((one.start, one.end, one.effect) == (request.start, request.end, request.effect) for one in kept):
        return record
    if len(kept) >= MOST_DOWNTIMES:
        raise Refused("registry.downtime.many", f"pool {request.site}/{request.pool} has {len(kept)} downtimes already")
    one = Downtime(
        id=id,
        start=request.start,
        end=request.end,
        effect=request.effect,
        planned=request.start - now >= NOTICE,
        reason=request.reason,
        declared_by=by,
        declared_at=now,
    )
    return _changed(record, downtimes=sorted([*kept, one], key=lambda each: (each.start, each.id)))


def remove_downtime(record: PoolRecord, id: str, *, now: datetime) -> tuple[PoolRecord, Downtime]:
    """The pool without that window."""
    found = next((one for one in record.downtimes if one.id == id), None)
    if found is None:
        known = ", ".join(one.id for one in record.downtimes) or "none"
        raise NotFound("registry.downtime_unknown", f"pool {record.site}/{record.pool} has no downtime {id[:80]} (known: {known})")
    return _changed(record, downtimes=[one for one in standing(record.downtimes, now) if one.id != id]), found


def standing(downtimes: Collection[Downtime], now: datetime) -> list[Downtime]:
    """Those that are not over: a downtime lifts by itself."""
    return [one for one in downtimes if one.end > now]


def _changed(record: PoolRecord, **fields: object) -> PoolRecord:
    after = msgspec.structs.replace(record, **fields)
    return record if after == record else msgspec.structs.replace(after, version=record.version + 1)


def _at(moment: datetime) -> str:
    return moment.isoformat(timespec="minutes")
