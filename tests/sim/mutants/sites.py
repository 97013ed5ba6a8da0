"""What a site's words and samples are worth, and its owner (LINK D11, D12, D21, D23, D25)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from tests.sim.mutants.base import Mutant, all_rerun, struck_at_submit, swapped, together

from intertie.agent import owner
from intertie.agent.core.devices import choose
from intertie.contracts.job import JobState
from intertie.errors import Refused, Unavailable
from intertie.lane.interpreter import Interpreter
from intertie.scheduler.core import interpret, survivor
from intertie.scheduler.core.hearing import Hearing
from intertie.scheduler.core.sight import Sight
from intertie.scheduler.service import Scheduler
from intertie.scheduler.site_lane import SiteLane
from intertie.sim.machine import SimAdapter
from intertie.sim.scenario import Scenario


def local_work_takes_what_is_claimed() -> Any:
    """The owner's own job takes devices that a claim has reserved, and nobody gives the claim up."""

    def greedy(pools: Any, kind: Any, count: int, holds: Any, observed: Any) -> Any:
        for pool in pools:
            if pool.kind is kind and len(pool.devices) >= count:
                devices = [d.id for d in pool.devices][:count]
                for device in devices:
                    holds.holder.pop((pool.name, device), None)
                return pool, devices
        return choose(pools, kind, count, holds, observed)

    return swapped(owner, "choose", greedy)


def a_fence_that_does_not_hold() -> Any:
    """An adapter says that nothing can start any more, and does not see to it."""

    async def hopeful(self: SimAdapter, attempt: Any) -> bool:
        await self.moments.pass_by()
        run = self.disk.runs.get(attempt)
        return run is None or run.started is None

    return swapped(SimAdapter, "fence", hopeful)


def a_start_is_sent_before_the_lane_is_at_head() -> Any:
    """A site that is heard is as good as one that has told everything."""
    return swapped(Hearing, "caught_up", lambda self, site: site in self._sites)


def a_stored_sample_makes_eligible() -> Any:
    """A sample is believed for ever."""
    from intertie.scheduler import wiring

    return swapped(wiring, "LIVE_S", 1e6)


def a_backlog_refreshes_what_is_current() -> Any:
    """An old entry of a returning site counts as a look at its devices now."""
    see, is_live = SiteLane._see, Sight._is_live
    looked: dict[tuple[int, Any], float] = {}

    def fresh(self: SiteLane, said: Any, change: Any) -> None:
        see(self, said, change)
        if change.attempt is not None:
            looked[(id(self._knowledge.sight), change.attempt.record.site)] = self._clock.monotonic_s()

    def live(self: Sight, seen: Any, now: Any, now_s: float, offset_s: float) -> bool:
        sites = {key[0] for key, held in self._seen.items() if held is seen}
        heard = [looked[(id(self), site)] for site in sites if (id(self), site) in looked]
        return is_live(self, seen, now, now_s, offset_s) or any(now_s - at_s < 60.0 for at_s in heard)

    return together(swapped(SiteLane, "_see", fresh), swapped(Sight, "_is_live", live))


def a_poison_entry_blocks() -> Any:
    """What cannot be interpreted is tried again, for ever, and everything behind it waits."""

    async def stubborn(self: Interpreter, entry: Any, code: str, text: str) -> None:
        raise Unavailable("lane.poison", text)

    return swapped(Interpreter, "_set_aside", stubborn)


def a_poison_entry_is_dropped() -> Any:
    """What cannot be interpreted is marked as if it had been."""

    async def careless(self: Interpreter, entry: Any, code: str, text: str) -> None:
        async with self._tables._store.transaction() as tx:  # type: ignore[attr-defined]  # the twin's
            await self._tables.mark_interpreted(tx, entry)

    return swapped(Interpreter, "_set_aside", careless)


def a_quota_is_guarded_on_recording() -> Any:
    """A fact that takes a counter past its limit is refused, although it has happened."""
    started, limits = interpret._started, dict[Any, int]()
    set_quota = Scheduler.set_quota

    async def remembered(self: Scheduler, ask: Any, caller: Any) -> Any:
        limits[ask.tenant] = ask.limit
        return await set_quota(self, ask, caller)

    def guarded(telling: Any, entry: Any) -> Any:
        limit = limits.get(telling.job.tenant)
        if limit is not None and len(entry.devices) > limit:
            raise Refused("scheduler.quota", "the tenant would have more than it may")
        return started(telling, entry)

    return together(swapped(interpret, "_started", guarded), swapped(Scheduler, "set_quota", remembered))


def little_quota(scenario: Scenario) -> Scenario:
    return msgspec.structs.replace(scenario, quotas={"acme": 1, "beta": 1}, quotas_at=40.0)


def the_first_who_arrives_survives() -> Any:
    """Whoever says first that it ended is the survivor, success or not: the result that lies on a disk is thrown away."""

    def first(file: Any, ended: Any, event: Any, now: Any) -> Any:
        return survivor.Chosen(ended.record.attempt if file.others or ended.replaced else None)

    return swapped(interpret, "choose", first)


def a_survivor_is_chosen_twice() -> Any:
    """Each success takes the place of the one before."""
    choice = survivor.choose

    def again(file: Any, ended: Any, event: Any, now: Any) -> Any:
        return choice(replace(file, job=replace(file.job, survivor=None, state=JobState.RUNNING)), ended, event, now)

    replaced = interpret._replaced_ended

    def forgetful(telling: Any, entry: Any, ended: Any, why: str) -> Any:
        if telling.job.survivor is not None and entry.outcome == "succeeded":
            job = replace(telling.job, survivor=ended.record.attempt, version=telling.job.version + 1)
            return telling.change(job, ended, "ended: succeeded", why)
        return replaced(telling, entry, ended, why)

    return together(swapped(interpret, "choose", again), swapped(interpret, "_replaced_ended", forgetful))


MUTANTS = (
    Mutant(local_work_takes_what_is_claimed, "local submit takes claimed devices", "6, 12", ("cut", "bus_down")),
    Mutant(
        a_fence_that_does_not_hold, "an adapter's fence that does not hold", "2", ("cut", "crash", "deaf_in", "pause"), struck_at_submit
    ),
    Mutant(a_start_is_sent_before_the_lane_is_at_head, "start sent before the lane is at head", "5, 6", ("crash", "hub_gone", "bus_down")),
    Mutant(a_stored_sample_makes_eligible, "stored telemetry makes eligible", "5, 6", ("lossy", "cut", "slow")),
    Mutant(a_backlog_refreshes_what_is_current, 'backlog refreshes "current"', "5, 6", ("lossy", "slow", "cut")),
    Mutant(a_poison_entry_blocks, "poison entry blocks", "4, 8", ("poison",)),
    Mutant(a_poison_entry_is_dropped, "poison entry dropped", "4, 8", ("poison",)),
    Mutant(a_quota_is_guarded_on_recording, "quota guard on recording", "4, 8", ("cut", "bus_down"), little_quota),
    Mutant(the_first_who_arrives_survives, "survivor by first arrival", "10", ("cut", "deaf_out"), all_rerun),
    Mutant(a_survivor_is_chosen_twice, "plain: survivor chosen twice", "10", ("cut", "deaf_out"), all_rerun),
)
