"""The planner's rounds: load, decide, look again, save, publish. Only the leader's are written; hints make them early, the beat makes them sure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, tzinfo
from functools import partial

from intertie import planner
from intertie.clock import Clock
from intertie.contracts.base import encode
from intertie.contracts.job import Rejection, WaitReason
from intertie.contracts.link import Lane
from intertie.errors import Stale, Unavailable
from intertie.ids import Digest, RoundId, SiteName, digest, mint, new_attempt
from intertie.lane.tables import LaneTables
from intertie.observe import log, metrics
from intertie.planner import Decision, Plan, Verdict
from intertie.runtime import Beat
from intertie.scheduler.core import life
from intertie.scheduler.core.given import RoundInput
from intertie.scheduler.core.rows import Change
from intertie.scheduler.core.snapshot import assemble
from intertie.scheduler.knowledge import Knowledge
from intertie.scheduler.store import Placement, RoundRow, SchedulerStore, Told
from intertie.store import Leader

LOG = log.get("scheduler.rounds")
ROUNDS = metrics.Counter("intertie_planner_rounds_total", "Rounds, by what came of them", ("outcome",))
PLACED = metrics.Counter("intertie_planner_placed_total", "Attempts offered")
SECONDS = metrics.Histogram("intertie_planner_round_seconds", "From load to saved")

ROLE = "planner"
# The slow loop that always runs: a missed hint costs one beat, never a stall.
BEAT_S = 1.0
# The lane's rows are read this often for what other copies of this service heard.
LISTEN_S = 1.0
# After losing office, or the database: soon enough that nobody notices, late enough not to spin.
AGAIN_S = 0.5


class PlanRefused(AssertionError):
    """A plan with objections: our bug. Nothing of it is published."""

    def __init__(self, broken: list[str]) -> None:
        super().__init__("; ".join(broken))


class Planner:
    """One process's planner. `hint()` after anything that could make a job placeable."""

    def __init__(
        self,
        store: SchedulerStore,
        lanes: LaneTables,
        knowledge: Knowledge,
        clock: Clock,
        nudge: Callable[[SiteName], Awaitable[None]],
        *,
        zone: tzinfo,
        scale: float = 1.0,
    ) -> None:
        self._store, self._lanes, self._knowledge, self._clock, self._nudge = store, lanes, knowledge, clock, nudge
        self._zone = zone
        self._beat = Beat("planner", BEAT_S, scale=scale)
        self._listened_s = 0.0
        self._epoch = 1

    def hint(self) -> None:
        self._beat.hint()

    async def run(self) -> None:
        """Lead when no other process does, for ever."""
        while True:
            try:
                async with self._store.leading(ROLE) as leader:
                    await self._take_office(leader)
                    await self._beat.run(partial(self.round, leader))
            except (Stale, Unavailable) as err:
                LOG.warning("not leading", code=err.code, text=err.text)
            await asyncio.sleep(AGAIN_S)

    async def _take_office(self, leader: Leader) -> None:
        """Nothing is placed at a site before it was at head with this leader: ask all of them to speak."""
        self._epoch = await self._store.epoch()
        self._knowledge.hearing.took_office(self._clock.monotonic_s())
        LOG.info("leading", epoch=leader.epoch, number=leader.number)
        for site in list(self._knowledge.world.sites):
            await self._nudge(site)

    async def listen(self) -> None:
        """Take up what any copy of this service heard on the lane."""
        now_s = self._clock.monotonic_s()
        if now_s - self._listened_s >= LISTEN_S:
            self._listened_s = now_s
            self._knowledge.hearing.listen(await self._lanes.sites(Lane.SCHEDULER), now_s)
            self._knowledge.sight.prune(now_s)

    async def round(self, leader: Leader) -> None:
        """Place what can be placed now, and say why the rest waits."""
        began_s = self._clock.monotonic_s()
        await self.listen()
        given = await self._store.load_round(self._knowledge.world.limited())
        if not given.queue:
            ROUNDS.inc(outcome="empty")
            return
        now = self._clock.now()
        known = self._knowledge
        local = now.astimezone(self._zone).time()
        snapshot = assemble(given, known.world, known.sight, known.hearing, now=now, now_s=self._clock.monotonic_s(), local=local)
        plan = planner.plan(snapshot, now)
        if broken := planner.objections(plan, snapshot, now):
            ROUNDS.inc(outcome="refused")
            raise PlanRefused(broken)
        row = RoundRow(RoundId(mint("round")), now, Digest(""), len(given.queue), plan.report.not_examined)
        told = self._told(plan, given, now)
        if not told:
            ROUNDS.inc(outcome="unchanged")
            return
        row = RoundRow(row.round, now, digest(encode(snapshot)), row.queued, row.not_examined)
        changes = await self._store.save_round(leader, row, [self._placement(d, row, now) for d in plan.decisions], told)
        SECONDS.observe(self._clock.monotonic_s() - began_s)
        ROUNDS.inc(outcome="saved")
        PLACED.inc(len(changes))
        await self._after(plan, changes)

    async def _after(self, plan: Plan, changes: list[Change]) -> None:
        for site in sorted({change.attempt.record.site for change in changes if change.attempt}):
            await self._nudge(site)
        if plan.report.not_examined or len(changes) < len(plan.decisions):
            self.hint()

    def _placement(self, decision: Decision, row: RoundRow, now: datetime) -> Placement:
        attempt, epoch = new_attempt(), self._epoch
        return Placement(decision.job, lambda job: life.place(job, decision, attempt, round_id=row.round, epoch=epoch, now=now))

    def _told(self, plan: Plan, given: RoundInput, now: datetime) -> list[Told]:
        """Verdicts that say something else than the job was told before; every placement says why here and not elsewhere."""
        fresh = [Told(d.job, Digest(""), WaitReason.OFFERED, d.why, d.rejections, now) for d in plan.decisions]
        for verdict in plan.report.waiting:
            before = given.waited.get(verdict.job)
            content = _content(verdict)
            if before is None or before.digest != content:
                same_reason = before is not None and before.reason is verdict.reason
                since = before.since if before is not None and same_reason else now
                fresh.append(Told(verdict.job, content, verdict.reason, verdict.text, verdict.rejections, since))
        return fresh


def _content(verdict: Verdict) -> Digest:
    """What a verdict says, less its wording: ages and seconds left would make every round a new one."""

    def gist(rejection: Rejection) -> tuple[str, ...]:
        return rejection.site, rejection.pool, rejection.rule, rejection.needed, rejection.found

    return digest(encode([verdict.reason, *(gist(r) for r in verdict.rejections)]))
