"""The planner's rounds: load, decide, look again, save, publish. Only the leader's are written; hints make them early, the beat makes them sure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta, tzinfo
from functools import partial

from intertie import planner
from intertie.clock import Clock
from intertie.contracts.base import encode
from intertie.contracts.incident import ReportIncident, Severity
from intertie.contracts.job import Rejection, WaitReason
from intertie.contracts.link import Lane
from intertie.errors import Stale, Unavailable
from intertie.ids import Digest, RoundId, SiteName, digest, mint, new_attempt
from intertie.lane.tables import LaneTables
from intertie.observe import log, metrics
from intertie.planner import Decision, Plan, Snapshot, Verdict
from intertie.runtime import Beat
from intertie.scheduler.canary import Canary
from intertie.scheduler.core import judge, life
from intertie.scheduler.core.given import RoundInput
from intertie.scheduler.core.rows import AttemptState, Change
from intertie.scheduler.core.snapshot import assemble
from intertie.scheduler.knowledge import Knowledge
from intertie.scheduler.store import Placement, RoundRow, Ruling, SchedulerStore, Told, Withdrawal
from intertie.store import Leader

LOG = log.get("scheduler.rounds")
ROUNDS = metrics.Counter("intertie_planner_rounds_total", "Rounds, by what came of them", ("outcome",))
PLACED = metrics.Counter("intertie_planner_placed_total", "Attempts offered")
SECONDS = metrics.Histogram("intertie_planner_round_seconds", "From load to saved")

Check = Callable[[Plan, Snapshot, datetime], list[str]]

ROLE = "planner"
# The slow loop that always runs: a missed hint costs one beat, never a stall.
BEAT_S = 1.0
# The lane's rows are read this often for what other copies of this service heard.
LISTEN_S = 1.0
# After losing office, or the database: soon enough that nobody notices, late enough not to spin.
AGAIN_S = 0.5
# An offer that has no answer after this long is taken back: longer than a lost answer, its repeat and a restart of the agent.
UNANSWERED_S = 60.0
# However fast a test lets beats go, an agent on a busy host may need this long.
LEAST_UNANSWERED_S = 5.0
# A round of an idle hub takes some 20 ms; below this no rest is needed.
LONG_ROUND_S = 0.1
# A queue longer than this is planned in a thread; a shorter one takes less than the hop is worth.
PLAN_BESIDE = 100
# The same objection is reported again after this long while it lasts.
FAULT_AGAIN_S = 600.0


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
        check: Check = planner.objections,
        limits: judge.Limits,
        canary: Canary | None = None,
    ) -> None:
        """`check`: the second look at every plan before it is written. Without a `canary` no silence is ever believed."""
        self._check, self._limits, self._canary, self._roll = check, limits, canary, judge.Roll()
        self._store, self._lanes, self._knowledge, self._clock, self._nudge = store, lanes, knowledge, clock, nudge
        self._zone = zone
        self._beat = Beat("planner", BEAT_S, scale=scale)
        self._unanswered = timedelta(seconds=max(UNANSWERED_S * scale, LEAST_UNANSWERED_S))
        self._listened_s = 0.0
        self._reported: dict[str, float] = {}
        self._epoch = 1

    def hint(self) -> None:
        self._beat.hint()

    async def run(self) -> None:
        """Lead when no other process does, for ever."""
        while True:
            try:
                async with self._store.leading(ROLE) as leader:
                    await self._take_office(leader)
                    await self._lead(leader)
            except (Stale, Unavailable) as err:
                LOG.warning("not leading", code=err.code, text=err.text)
            await asyncio.sleep(AGAIN_S)

    async def _take_office(self, leader: Leader) -> None:
        """Nothing is placed at a site before it was at head with this leader: ask all of them to speak."""
        self._epoch = await self._store.epoch()
        self._knowledge.hearing.took_office(self._clock.monotonic_s())
        self._roll = judge.Roll()
        LOG.info("leading", epoch=leader.epoch, number=leader.number)
        for site in list(self._knowledge.world.sites):
            await self._nudge(site)

    async def _lead(self, leader: Leader) -> None:
        """Rounds for as long as the office lasts, and beside them the canary: losing office, or a commit that fails, ends both."""
        singing = asyncio.create_task(self._canary.run(self._knowledge.hearing.canary_answered), name="canary") if self._canary else None
        try:
            await self._beat.run(partial(self._paced, leader))
        finally:
            if singing is not None:
                singing.cancel()
                await asyncio.gather(singing, return_exceptions=True)

    async def listen(self) -> None:
        """Take up what any copy of this service heard on the lane."""
        now_s = self._clock.monotonic_s()
        if now_s - self._listened_s >= LISTEN_S:
            self._listened_s = now_s
            self._knowledge.hearing.listen(await self._lanes.sites(Lane.SCHEDULER), now_s)
            self._knowledge.sight.prune(now_s)

    async def _paced(self, leader: Leader) -> None:
        """One round; after a long one a rest of the same length, so that hints never make planning more than half of this process's work."""
        began_s = self._clock.monotonic_s()
        await self.round(leader)
        took_s = self._clock.monotonic_s() - began_s
        if took_s > LONG_ROUND_S:
            await asyncio.sleep(min(took_s, BEAT_S))

    async def round(self, leader: Leader) -> None:
        """Place what can be placed now, and say why the rest waits."""
        began_s = self._clock.monotonic_s()
        await self.listen()
        given = await self._store.load_round(self._knowledge.world.limited())
        await self._take_back(leader, given)
        await self._judge(leader, given)
        if not given.queue:
            ROUNDS.inc(outcome="empty")
            return
        now = self._clock.now()
        known = self._knowledge
        local = now.astimezone(self._zone).time()
        now_s = self._clock.monotonic_s()
        snapshot = assemble(given, known.world, known.sight, known.hearing, now=now, now_s=now_s, local=local, epoch=self._epoch)
        # A long queue takes tenths of a second: lanes and calls of this process go on meanwhile.
        plan = await asyncio.to_thread(planner.plan, snapshot, now) if len(given.queue) > PLAN_BESIDE else planner.plan(snapshot, now)
        if broken := self._check(plan, snapshot, now):
            ROUNDS.inc(outcome="refused")
            await self._report(broken)
            return
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

    async def _take_back(self, leader: Leader, given: RoundInput) -> None:
        """Withdraw offers that nobody answers, so that their jobs may run elsewhere. A claim that comes first wins: both meet on one row."""
        now, now_s, late = self._clock.now(), self._clock.monotonic_s(), list[Withdrawal]()
        for attempt in given.live:
            record = attempt.record
            before_restore = record.epoch < self._epoch
            if record.offering and not before_restore:
                continue  # A request waits for its owner, and for as long as its tenant likes.
            if attempt.state is not AttemptState.OFFERED or (now - record.offered_at < self._unanswered and not before_restore):
                continue
            heard = self._knowledge.hearing.heard(record.site, now_s) and not before_restore
            why = f"{record.site} {'is heard and' if heard else 'is silent: it'} has not answered the offer since {record.offered_at:%H:%M:%S}Z"
            if before_restore:
                # Before the restore it may have been taken back already, and placed elsewhere.
                why = f"the offer is of epoch {record.epoch}, before this hub was restored"
            late.append(Withdrawal(record.job, partial(life.withdraw, why=why, fault=heard, now=now)))
        if late:
            for change in await self._store.withdraw(leader, late):
                LOG.warning("an offer was withdrawn", job=change.job.job, why=change.reason)
            self.hint()

    async def _judge(self, leader: Leader, given: RoundInput) -> None:
        """What silence, or a digest that does not list an attempt, has made due."""
        now, now_s = self._clock.now(), self._clock.monotonic_s()
        found = judge.find(given.live, self._knowledge.hearing, self._roll, self._limits, now=now, now_s=now_s)
        for report in found.incidents:
            await self._tell(report)
        if not found.rulings:
            return
        for change in await self._store.withdraw(leader, [Ruling(one.job, one.decide, one.attempt) for one in found.rulings]):
            LOG.warning("the leader ruled", job=change.job.job, state=change.job.state.value, why=change.reason)
            if change.before.attempt is not None and change.attempt is not None and change.before.attempt.holding > change.attempt.holding:
                record = change.attempt.record
                self._knowledge.sight.freed([(record.site, record.pool, device) for device in record.devices], now_s)
        self.hint()

    async def _tell(self, report: ReportIncident) -> None:
        """A fault, once per FAULT_AGAIN_S."""
        now_s = self._clock.monotonic_s()
        if now_s - self._reported.get(report.key, -FAULT_AGAIN_S) < FAULT_AGAIN_S:
            return
        async with self._store.transaction() as tx:
            await tx.fault(report)
        self._reported = {key: said for key, said in self._reported.items() if now_s - said < FAULT_AGAIN_S} | {report.key: now_s}

    async def _report(self, broken: list[str]) -> None:
        """A plan with objections is our bug: nothing of it is published, and a person is told. The lane and the calls go on."""
        LOG.error("a plan was refused", objections=broken)
        report = ReportIncident(
            key="scheduler.plan_refused",
            kind="scheduler.plan_refused",
            severity=Severity.CRITICAL,
            title="The planner made a plan that its own check refuses",
            text=f"Nothing was placed. {'; '.join(broken)}"[:4_000],
        )
        await self._tell(report)

    async def _after(self, plan: Plan, changes: list[Change]) -> None:
        for site in sorted({change.attempt.record.site for change in changes if change.attempt}):
            await self._nudge(site)
        if plan.report.not_examined or len(changes) < len(plan.decisions):
            self.hint()

    def _placement(self, decision: Decision, row: RoundRow, now: datetime) -> Placement:
        make = partial(life.place, decision=decision, attempt=new_attempt(), round_id=row.round, epoch=self._epoch, now=now)
        return Placement(decision.job, partial(make, lease_s=self._limits.lease_s))

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
