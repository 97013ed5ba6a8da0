"""Could it ever run? Asked at submit, so that a job that no declared pool can hold is refused at once, with what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from intertie.contracts.job import Rejection
from intertie.planner.model import PoolView, QueuedJob, Snapshot
from intertie.planner.room import Room
from intertie.planner.rules import LASTING, PIN, reject

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EMPTY = Snapshot(queue=(), pools=())


@dataclass(frozen=True, slots=True)
class Suitability:
    """`fits`: `site/pool` that could run it now or later. `rejections`: the others, each with its lasting rule."""

    fits: tuple[str, ...]
    rejections: tuple[Rejection, ...]


def suitability(job: QueuedJob, pools: Sequence[PoolView]) -> Suitability:
    """Judge the pools by what they are declared to be. What may change by itself (a quota, a mapping, silence) does not count."""
    room = Room(_EMPTY, _EPOCH)  # lasting rules look at no room and no clock
    fits: list[str] = []
    rejections: list[Rejection] = []
    for pool in sorted(pools, key=lambda p: (p.site, p.pool)):
        rejection = reject(job, pool, room, LASTING)
        if rejection is None:
            fits.append(pool.name)
        else:
            rejections.append(rejection)
    return Suitability(tuple(fits), tuple(rejections))


def never_fits(job: QueuedJob, pools: Sequence[PoolView]) -> list[Rejection]:
    """Why no pool can ever hold the job, one rejection per pool; empty if one can, or if no pool is known at all (then it waits)."""
    found = suitability(job, pools)
    return [] if found.fits else list(found.rejections)


def nearest(rejections: Sequence[Rejection]) -> str:
    """The one reason that is said first: of the pool which got furthest down the ladder; of a place that nobody has, that nobody has it."""
    rungs = {rule.name: rung for rung, rule in enumerate(LASTING)}
    near = max(rejections, key=lambda one: rungs[one.rule])
    if near.rule == PIN:
        return f"{near.text}, and no such place has joined"
    return f"nearest is {near.site}/{near.pool}: {near.text} (needs {near.needed}, has {near.found})"
