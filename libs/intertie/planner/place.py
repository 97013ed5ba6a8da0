"""One round: first come, first served; who is blocked is passed over, with the reason written down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal

from intertie.contracts.job import Rejection, Resources, WaitReason
from intertie.contracts.site import DeviceKind, TaskType
from intertie.ids import JobId, PoolName, SiteName, TenantName
from intertie.planner import requests
from intertie.planner.fit import Fit, best_fit, choose
from intertie.planner.model import Avoided, Decision, Plan, PoolView, QueuedJob, Report, Snapshot, Verdict
from intertie.planner.room import Room
from intertie.planner.rules import LASTING, PASSING, PIN, REASONS, reject

# One round's decisions are one transaction and one lane answer per site: small enough for both, large enough that a burst drains in a second.
BATCH = 256

# Rejections that a decision's own sentence names: it travels in every event of the attempt.
NAMED, NAMED_TEXT = 3, 200

LADDER: dict[WaitReason, int] = {reason: rung for rung, reason in enumerate(WaitReason)}

_Shape = tuple[
    TenantName,
    Resources,
    TaskType,
    int,
    SiteName | None,
    PoolName | None,
    bool,
    tuple[Avoided, ...],
    tuple[SiteName, ...],
    str,
    Decimal | None,
]


def plan(snapshot: Snapshot, now: datetime) -> Plan:
    """Place what can be placed now, and say why the rest waits.

    Queue order: `queued_at`, then the tenant that holds fewer devices, then the id. A blocked job is skipped and stays first in line. Room
    only shrinks during a round, so a job of the same shape as one that was rejected is rejected for the same reasons, unasked.
    """
    room = Room(snapshot, now)
    pools = sorted(snapshot.pools, key=lambda p: (p.site, p.pool))
    decisions: list[Decision] = []
    waiting: list[Verdict] = []
    blocked: dict[_Shape, tuple[Rejection, ...]] = {}
    lasting: dict[_Shape, Sequence[Rejection | None]] = {}
    queue = in_order(snapshot)
    examined = 0
    for job in queue:
        if len(decisions) >= BATCH:
            break
        examined += 1
        shape = _shape(job)
        if shape not in blocked:
            if shape not in lasting:
                lasting[shape] = [reject(job, pool, room, LASTING) for pool in pools]
            decision, rejections = _place(job, pools, lasting[shape], room)
            if decision is not None:
                decisions.append(decision)
                continue
            blocked[shape] = rejections
        waiting.append(_verdict(job.job, blocked[shape], len(waiting) + 1))
    return Plan(decisions=tuple(decisions), report=Report(waiting=tuple(waiting), not_examined=len(queue) - examined))


def _shape(job: QueuedJob) -> _Shape:
    return (
        job.tenant,
        job.resources,
        job.task_type,
        job.wall_s,
        job.site,
        job.pool,
        job.rerun,
        job.avoided,
        job.unsure,
        job.offering,
        job.budget,
    )


def in_order(snapshot: Snapshot) -> list[QueuedJob]:
    """The queue, first come first served; of those that came at the same instant, the tenant that holds fewer devices goes first."""
    held: Counter[TenantName] = Counter()
    for holding in snapshot.holdings:
        held[holding.tenant] += len(holding.devices)
    return sorted(snapshot.queue, key=lambda j: (j.queued_at, held[j.tenant], j.job))


def _place(
    job: QueuedJob, pools: Sequence[PoolView], lasting: Sequence[Rejection | None], room: Room
) -> tuple[Decision | None, tuple[Rejection, ...]]:
    rejections: list[Rejection] = []
    candidates: list[tuple[PoolView, Fit]] = []
    for pool, never in zip(pools, lasting, strict=True):
        rejection = never or reject(job, pool, room, PASSING)
        if rejection is not None:
            rejections.append(rejection)
        else:
            candidates.append((pool, _fit(job, pool, room)))
    if not candidates:
        return None, tuple(rejections)
    pool, fit = choose(candidates)
    spec = room.spec(job.tenant)
    decision = Decision(
        job=job.job,
        tenant=job.tenant,
        site=pool.site,
        pool=pool.pool,
        kind=job.resources.kind,
        devices=fit.devices,
        account="" if pool.single_user else room.accounts[(pool.site, job.tenant)],
        spec=spec.spec if spec else None,
        spec_revision=spec.revision if spec else 0,
        profile_revision=pool.profile.revision,
        why=_asked(job, pool) if job.offering else _why(pool, fit, len(candidates), rejections),
        rejections=tuple(rejections),
        offering=job.offering,
        answer_within_s=_promised(job, pool),
    )
    room.take(decision, job, pool)
    return decision, ()


def _fit(job: QueuedJob, pool: PoolView, room: Room) -> Fit:
    """Which devices; of a request names only: its owner chooses."""
    if job.offering:
        return Fit(devices=requests.names(job), nodes=1, left_on_node=0, left_in_pool=0)
    return best_fit(room.free(pool, job.resources.kind), job.resources.count)


def _promised(job: QueuedJob, pool: PoolView) -> int:
    offering = pool.offering(job.offering) if job.offering else None
    return offering.answer_within_s if offering is not None else 0


def _asked(job: QueuedJob, pool: PoolView) -> str:
    return f"asked of the owner of {pool.site}, offering {job.offering}; an answer is promised within {_promised(job, pool)} s"


def _why(pool: PoolView, fit: Fit, candidates: int, rejections: Sequence[Rejection]) -> str:
    unit = "device" if any(d.kind is DeviceKind.GPU for d in pool.devices) else "slot"
    where = "one node" if fit.nodes == 1 else f"{fit.nodes} nodes"
    tried = [one for one in rejections if one.rule != PIN]
    named = " of what the job names" if len(tried) < len(rejections) else ""
    others = f"best of {candidates} pools that fit" if candidates > 1 else f"the only pool that fits now{named}"
    passed_over = f"; {counted(len(tried), 'pool')} rejected{_nearest(tried)}" if tried else ""
    return f"{others}; {where}, {counted(fit.left_in_pool, unit)} left free{passed_over}"


def counted(number: int, noun: str) -> str:
    """`1 slot`, `3 slots`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _nearest(rejections: Sequence[Rejection]) -> str:
    """Of the pools that were rejected those that came nearest to taking the job, with what kept them; the round's record has all."""
    near = sorted(rejections, key=lambda r: -LADDER[REASONS[r.rule]])[:NAMED]
    return ": " + "; ".join(f"{r.site}/{r.pool}: {r.text[:NAMED_TEXT]} [{r.rule}]" for r in near) if near else ""


def canonical(rejections: Sequence[Rejection]) -> tuple[WaitReason, str]:
    """The one reason: that of the pool which got furthest down the ladder, since it is the nearest to taking the job."""
    if not rejections:
        return WaitReason.NO_SITE, "no site has joined yet"
    nearest = max(rejections, key=lambda r: LADDER[REASONS[r.rule]])
    reason = REASONS[nearest.rule]
    more = sum(1 for r in rejections if REASONS[r.rule] is reason) - 1
    others = f" (and {counted(more, 'more pool')})" if more else ""
    return reason, f"{nearest.site}/{nearest.pool}: {nearest.text}{others}"


def _verdict(job: JobId, rejections: tuple[Rejection, ...], position: int) -> Verdict:
    reason, text = canonical(rejections)
    return Verdict(job=job, reason=reason, text=text, position=position, rejections=rejections)
