"""What a site's words and samples are worth, and its owner (LINK D11, D12, D21, D23, D25)."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, cast

import msgspec
from tests.sim.mutants.base import (
    Mutant,
    all_rerun,
    alone_with_one_slot_each,
    finished_in_silence,
    many_end_in_a_cut,
    struck_at_submit,
    swapped,
    together,
)

from intertie.agent import books, owner
from intertie.agent.core import grants
from intertie.agent.core.devices import Holds, choose
from intertie.errors import Refused, Unavailable
from intertie.ids import Digest
from intertie.lane import site as lane_site
from intertie.lane.interpreter import Interpreter
from intertie.lane.tables import LaneTables
from intertie.link.site import SiteMachine
from intertie.scheduler.core import interpret, survivor
from intertie.scheduler.core.hearing import Hearing
from intertie.scheduler.core.sight import Sight
from intertie.scheduler.memory import MemorySchedulerStore
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

    def forced(self: Holds, attempt: Any) -> None:
        for device in attempt.devices:
            self.holder[(attempt.pool, device)] = attempt.id

    def overwritten(cursor: Any, attempt: Any) -> None:
        rows = [(attempt.pool, device, attempt.id) for device in attempt.devices]
        cursor.executemany("INSERT OR REPLACE INTO hold VALUES (?, ?, ?)", rows)

    return together(swapped(owner, "choose", greedy), swapped(Holds, "take", forced), swapped(books, "_hold", overwritten))


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
            await cast(LaneTables, self._tables).mark_interpreted(tx, entry)

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
    replaced = interpret._replaced_ended

    def first(file: Any, ended: Any, event: Any, now: Any) -> Any:
        return survivor.Chosen(file.job.survivor or (ended.record.attempt if file.others or ended.replaced else None))

    def arrived(telling: Any, entry: Any, ended: Any, why: str) -> Any:
        if telling.job.survivor is None and entry.outcome != "succeeded" and not telling.job.terminal:
            job = replace(telling.job, survivor=ended.record.attempt, version=telling.job.version + 1)
            return telling.change(job, survivor.loser(ended), f"ended: {entry.outcome}", why)
        return replaced(telling, entry, ended, why)

    return together(swapped(interpret, "choose", first), swapped(interpret, "_replaced_ended", arrived))


def a_survivor_is_chosen_twice() -> Any:
    """Each success takes the place of the one before, and the store lets it."""
    replaced, save = interpret._replaced_ended, MemorySchedulerStore._save

    def again(telling: Any, entry: Any, ended: Any, why: str) -> Any:
        if telling.job.survivor is not None and entry.outcome == "succeeded":
            job = replace(telling.job, survivor=ended.record.attempt, version=telling.job.version + 1)
            return telling.change(job, ended, "ended: succeeded", why)
        return replaced(telling, entry, ended, why)

    async def lenient(self: MemorySchedulerStore, change: Any) -> None:
        self.jobs[change.job.job] = replace(self.jobs[change.job.job], survivor=None)
        await save(self, change)

    return together(swapped(interpret, "_replaced_ended", again), swapped(MemorySchedulerStore, "_save", lenient))


def results_lie_under_one_key() -> Any:
    """A result is named by its job: of two attempts the last one to arrive is what everybody fetches."""
    pack = SimAdapter.pack

    async def named_by_job(self: SimAdapter, attempt: Any) -> Any:
        found = await pack(self, attempt)
        key = Digest(f"sha256:{hashlib.sha256(attempt.job.encode()).hexdigest()}")
        return None if found is None else msgspec.structs.replace(found, digest=key)

    return swapped(SimAdapter, "pack", named_by_job)


def a_tenant_borrows_while_its_site_is_alone() -> Any:
    """What a tenant holds there already is not counted: each time it asks it has its whole allowance again."""
    return swapped(grants, "devices_held", lambda grant, attempts: 0)


def a_digest_is_compared_before_the_head() -> Any:
    """Each batch says that it is the last one and carries the list of what runs now, while older entries are still on their way."""
    loaded = SiteMachine.loaded

    def hasty(self: SiteMachine, now_s: float, batch: Any, **more: Any) -> Any:
        return loaded(self, now_s, replace(batch, at_head=True), **more)

    # A batch holds one entry: what is fifty thousand of them in the field is a dozen here.
    return together(swapped(SiteMachine, "loaded", hasty), swapped(lane_site, "BATCH_BYTES", lane_site.ENVELOPE_BYTES + 1))


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
    Mutant(a_survivor_is_chosen_twice, "plain: survivor chosen twice", "10", ("cut",), finished_in_silence),
    Mutant(results_lie_under_one_key, "results under one key", "10", ("cut",), finished_in_silence),
    Mutant(a_tenant_borrows_while_its_site_is_alone, "islanded borrowing", "6, 12", ("cut",), alone_with_one_slot_each),
    Mutant(a_digest_is_compared_before_the_head, "digest compared before the head", "5, 6", ("cut",), many_end_in_a_cut),
)
