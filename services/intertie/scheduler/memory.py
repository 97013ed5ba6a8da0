"""The scheduler's store in memory: the twin that passes the same suite, for tests and the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import msgspec

from intertie.clock import Clock
from intertie.contracts.base import EventMeta
from intertie.contracts.job import AttemptSnapshot, JobsQuery, JobState, QuotaRecord, SetQuota, StoryLine
from intertie.contracts.site import DeviceKind
from intertie.errors import Stale
from intertie.ids import AttemptId, DeviceId, Digest, JobId, PoolName, SiteName, TenantName
from intertie.observe import tracing
from intertie.scheduler.core.backoff import BackOff, after_fault, avoid
from intertie.scheduler.core.given import Fact, RoundInput, Used, Waited
from intertie.scheduler.core.grants import Grant, check_room
from intertie.scheduler.core.life import is_counted
from intertie.scheduler.core.orders import Order, orders_of
from intertie.scheduler.core.rows import OPEN_ATTEMPT, Attempt, AttemptState, Change, File, Ignored, Job, JobView, WaitVerdict, job_changed
from intertie.scheduler.core.ways import fallback_key
from intertie.scheduler.store import (
    IDLE_ATTEMPTS_SHOWN,
    QUEUE_LIMIT,
    SETTLED_CONTENT,
    VERDICTS_KEPT,
    Decide,
    DecideAttempt,
    OpenOrder,
    Placement,
    Revision,
    RoundRow,
    Ruling,
    Submitted,
    Told,
    new_first,
    result_of,
)
from intertie.store import Leader, MemoryStore, StoreTx
from intertie.trust.rights import Scope

_BESIDE = (*OPEN_ATTEMPT, AttemptState.ENDED, AttemptState.LOST)
_IDLE = (AttemptState.WITHDRAWN, AttemptState.REFUSED, AttemptState.NOT_STARTED)


class MemorySchedulerStore(MemoryStore):
    """`SchedulerStore` in dicts; the constraints of the schema are checked by hand, under the same names."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        super().__init__("scheduler", clock=clock)
        self.jobs: dict[JobId, Job] = {}
        self.keys: dict[tuple[TenantName, str], JobId] = {}
        self.envs: dict[JobId, tuple[tuple[str, str], ...]] = {}
        self.attempt_rows: dict[AttemptId, Attempt] = {}
        self.holders: dict[tuple[SiteName, PoolName, DeviceId], AttemptId] = {}
        self.numbers: dict[tuple[AttemptId, Order], tuple[int, int]] = {}
        self.settled: set[AttemptId] = set()
        self.number_heads: dict[tuple[SiteName, int], int] = {}
        self.lines: dict[JobId, tuple[StoryLine, ...]] = {}
        self.rounds: list[tuple[RoundRow, Leader, int]] = []
        self.verdicts: dict[JobId, tuple[WaitVerdict, ...]] = {}
        self.waited: dict[JobId, Waited] = {}
        self.backs: dict[SiteName, BackOff] = {}
        self.quota_rows: dict[tuple[TenantName, SiteName | None, DeviceKind], int] = {}
        self.facts: dict[tuple[str, str], Fact] = {}
        self.revisions: dict[SiteName, tuple[Revision, Digest, int]] = {}
        self.avoids: dict[tuple[JobId, SiteName], BackOff] = {}
        self.grant_rows: dict[tuple[SiteName, TenantName, DeviceKind], Grant] = {}

    # --- jobs ------------------------------------------------------------------------------------------------------------------------------

    async def submit(self, job: Job, env: Mapping[str, str], told: StoryLine) -> Submitted:
        async with self.transaction() as tx:
            key = (job.tenant, job.client_key)
            if key in self.keys:
                held = self.jobs[self.keys[key]]
                await tx.audit(actor=job.submitted_by, action="job.submit", target=held.job, result="repeated")
                return Submitted(held, repeated=True)
            self.keys[key] = job.job
            self.jobs[job.job] = replace(job, epoch=self.service_epoch)
            if env:
                self.envs[job.job] = tuple(env.items())
            self.lines[job.job] = (told,)
            await tx.emit(job_changed(job, None, job.submitted_by, "submitted", job.submitted_at))
            await tx.audit(actor=job.submitted_by, action="job.submit", target=job.job)
        return Submitted(job, repeated=False)

    async def by_key(self, tenant: TenantName, client_key: str) -> Job | None:
        found = self.keys.get((tenant, client_key))
        return self.jobs[found] if found else None

    def _inside(self, job: Job, scope: Scope) -> bool:
        return scope.covers(job.tenant, job.site)

    def _queue(self) -> list[Job]:
        return sorted((j for j in self.jobs.values() if j.state is JobState.QUEUED), key=lambda j: (j.queued_at, j.job))

    def _view(self, job: Job) -> JobView:
        mine = sorted((a.record for a in self.attempt_rows.values() if a.record.job == job.job), key=lambda a: (a.epoch, a.generation))
        idle = [a for a in mine if a.state in _IDLE][-IDLE_ATTEMPTS_SHOWN:]
        attempts = tuple(a for a in mine if a.state not in _IDLE or a in idle)
        position = self._queue().index(job) + 1 if job.state is JobState.QUEUED else 0
        verdicts = self.verdicts.get(job.job, ())
        return JobView(job, attempts, verdicts[-1] if verdicts else None, position)

    async def view(self, job: JobId, scope: Scope) -> JobView | None:
        found = self.jobs.get(job)
        return self._view(found) if found and self._inside(found, scope) else None

    async def views(self, query: JobsQuery, scope: Scope) -> tuple[list[JobView], bool]:
        rows = [
            job
            for name, job in sorted(self.jobs.items(), reverse=True)
            if self._inside(job, scope)
            and query.tenant in (None, job.tenant)
            and query.site in (None, job.site)
            and (not query.states or job.state in query.states)
            and (query.after is None or name < query.after)
        ]
        return [self._view(job) for job in rows[: query.limit]], len(rows) > query.limit

    async def story(self, job: JobId, scope: Scope) -> list[StoryLine]:
        found = self.jobs.get(job)
        return list(self.lines[job]) if found and self._inside(found, scope) else []

    async def change(self, job: JobId, scope: Scope, decide: Decide, *, actor: str, action: str, reason: str) -> Change | Ignored | None:
        async with self.transaction() as tx:
            found = self.jobs.get(job)
            if found is None or not self._inside(found, scope):
                return None
            outcome = await self._kept(decide(self._file(found)))
            await tx.audit(actor=actor, action=action, target=job, reason=reason, result=result_of(outcome))
            return outcome

    def _live_of(self, job: JobId) -> Attempt | None:
        return next((a for a in self.attempt_rows.values() if a.record.job == job and a.live), None)

    def _file(self, job: Job, attempt: AttemptId | None = None) -> File:
        """The job's file, about the named attempt or its live one."""
        held = self.attempt_rows[attempt] if attempt is not None else self._live_of(job.job)
        mine = [a for a in self.attempt_rows.values() if a.record.job == job.job and a is not held and a.state in _BESIDE]
        return File(job, held, tuple(sorted(mine, key=lambda a: (a.record.epoch, a.record.generation))))

    async def lift_versions(self, epoch: int, first: int) -> None:
        async with self.transaction():
            for name, job in self.jobs.items():
                if job.epoch < epoch:
                    self.jobs[name] = replace(job, version=max(job.version, first))
            for key, attempt in self.attempt_rows.items():
                if attempt.record.epoch < epoch and attempt.record.version < first:
                    self.attempt_rows[key] = replace(attempt, record=msgspec.structs.replace(attempt.record, version=first))

    async def open_at(self, tx: StoreTx, site: SiteName) -> list[AttemptId]:
        return sorted(
            name
            for name, a in self.attempt_rows.items()
            if a.record.site == site and (a.state in OPEN_ATTEMPT[1:] or a.state is AttemptState.LOST)
        )

    async def take_up(self, tx: StoreTx, job: Job, told: StoryLine, decide: Decide) -> Change | Ignored:
        assert tx is self, "a transaction of another store cannot change a job here"
        if job.job not in self.jobs:
            key = job.client_key if (job.tenant, job.client_key) not in self.keys else fallback_key(job.job)
            self.keys[(job.tenant, key)] = job.job
            self.jobs[job.job] = replace(job, client_key=key, epoch=job.epoch or self.service_epoch)
            self.lines[job.job] = (told,)
            await self.emit(job_changed(job, None, told.actor, told.what, job.submitted_at))
        return await self._kept(decide(self._file(self.jobs[job.job])))

    async def change_attempt(
        self, attempt: AttemptId, scope: Scope, decide: Decide, *, actor: str, action: str, reason: str
    ) -> Change | Ignored | None:
        async with self.transaction() as tx:
            found = self.attempt_rows.get(attempt)
            job = self.jobs[found.record.job] if found else None
            if job is None or not self._inside(job, scope):
                return None
            outcome = await self._kept(decide(self._file(job, attempt)))
            await tx.audit(actor=actor, action=action, target=attempt, reason=reason, result=result_of(outcome))
            return outcome

    async def apply(self, tx: StoreTx, attempt: AttemptId | None, decide: DecideAttempt) -> Change | Ignored:
        assert tx is self, "a transaction of another store cannot change a job here"
        found = self.attempt_rows.get(attempt) if attempt is not None else None
        return await self._kept(decide(self._file(self.jobs[found.record.job], attempt) if found else None))

    # --- rounds ----------------------------------------------------------------------------------------------------------------------------

    async def load_round(self, allowances: Mapping[TenantName, datetime]) -> RoundInput:
        queue = [job for job in self._queue() if job.cancel is None][:QUEUE_LIMIT]
        used: Counter[tuple[TenantName, SiteName, PoolName, DeviceKind]] = Counter()
        for attempt in self.attempt_rows.values():
            record = attempt.record
            if is_counted(record) and record.tenant in allowances and record.offered_at >= allowances[record.tenant]:
                used[(record.tenant, record.site, record.pool, record.kind)] += record.quantity_milli_us
        return RoundInput(
            queue=queue,
            live=[a for _, a in sorted(self.attempt_rows.items()) if a.live or a.holding],
            quotas=await self.quotas(),
            back_offs=dict(self.backs),
            used=[Used(*key, quantity) for key, quantity in sorted(used.items())],
            waited={job.job: self.waited[job.job] for job in queue if job.job in self.waited},
            avoided={job.job: found for job in queue if (found := [b for (j, _), b in sorted(self.avoids.items()) if j == job.job])},
            grants=await self.grants(),
        )

    async def save_round(self, leader: Leader, row: RoundRow, placements: Sequence[Placement], told: Sequence[Told]) -> list[Change]:
        async with self.transaction() as tx:
            await tx.fence(leader)
            placed: list[Change] = []
            for placement in sorted(placements, key=lambda p: p.job):
                job = self.jobs.get(placement.job)
                change = placement.decide(self._file(job)) if job else None
                if isinstance(change, Change) and not self._violates(change):
                    await self._save(change)
                    placed.append(change)
            self.rounds.append((row, leader, len(placed)))
            for verdict in told:
                said = WaitVerdict(row.round, verdict.reason, verdict.text, verdict.rejections, verdict.since)
                self.verdicts[verdict.job] = (*self.verdicts.get(verdict.job, ()), said)[-VERDICTS_KEPT:]
                self.waited[verdict.job] = Waited(verdict.digest, verdict.reason, verdict.since)
            return placed

    def _violates(self, change: Change) -> bool:
        """The partial unique indexes `one_live_attempt` and `one_holder`."""
        assert change.attempt is not None
        record = change.attempt.record
        return self._live_of(record.job) is not None or any((record.site, record.pool, d) in self.holders for d in record.devices)

    async def _kept(self, outcome: Change | Ignored) -> Change | Ignored:
        if isinstance(outcome, Change):
            await self._save(outcome)
        return outcome

    async def _save(self, change: Change) -> None:
        job, attempt = change.job, change.attempt
        held = self.jobs[job.job]
        if held.survivor not in (None, job.survivor) or held.delivered not in (None, job.delivered):
            raise Stale("store.conflict", f"who survives of job {job.job} and whose result it is are written once")
        self.jobs[job.job] = job
        if attempt is not None:
            self._save_attempt(attempt, change.before.attempt, job)
        changed = {other.record.attempt: other for other in change.others}
        for before in change.before.others:
            self._save_attempt(changed.get(before.record.attempt, before), before, job)
        with tracing.span("scheduler change", parent=job.traceparent or None):
            for event in (change.job_event, change.attempt_event, *change.other_events):
                if event is not None:
                    await self.emit(event)
        if change.incident is not None:
            await self.fault(change.incident)
        self.lines[job.job] = (*self.lines[job.job], *change.story)
        if change.forget_env:
            self.envs.pop(job.job, None)
        if attempt is not None and change.recovered:
            self.backs.pop(attempt.record.site, None)
        if attempt is not None and change.fault:
            site = attempt.record.site
            self.backs[site] = after_fault(site, self.backs.get(site), change.fault, change.at)
        if attempt is not None and change.avoid and not job.terminal:
            site = attempt.record.site
            self.avoids[(job.job, site)] = avoid(site, self.avoids.get((job.job, site)), change.avoid, change.at)
        elif change.recovered or (job.terminal and not change.before.job.terminal):
            for name in [name for name in self.avoids if name[0] == job.job]:
                del self.avoids[name]

    def _save_attempt(self, attempt: Attempt, before: Attempt | None, job: Job) -> None:
        record = attempt.record
        self.attempt_rows[record.attempt] = attempt
        if before is None and attempt.holding:
            for device in record.devices:
                self.holders.setdefault((record.site, record.pool, device), record.attempt)
        elif before is not None and before.holding and not attempt.holding:
            for key in [key for key, holder in self.holders.items() if holder == record.attempt]:
                del self.holders[key]
        for order in orders_of(attempt, job):
            head = (record.site, self.service_epoch)
            self.number_heads[head] = self.number_heads.get(head, 0) + 1
            self.numbers.setdefault((record.attempt, order), (self.service_epoch, self.number_heads[head]))

    async def withdraw(self, leader: Leader, withdrawals: Sequence[Ruling]) -> list[Change]:
        done: list[Change] = []
        async with self.transaction() as tx:
            await tx.fence(leader)
            for withdrawal in sorted(withdrawals, key=lambda w: w.job):
                job = self.jobs.get(withdrawal.job)
                outcome = withdrawal.decide(self._file(job, withdrawal.attempt)) if job else None
                if isinstance(outcome, Change):
                    await self._save(outcome)
                    done.append(outcome)
        return done

    # --- instructions ------------------------------------------------------------------------------------------------------------------------

    async def owed(self, sites: Collection[SiteName]) -> frozenset[SiteName]:
        async with self.transaction():
            return frozenset(attempt.record.site for attempt in self.attempt_rows.values()) & frozenset(sites)

    async def orders(self, site: SiteName, mark: tuple[int, int]) -> list[OpenOrder]:
        found: list[OpenOrder] = []
        async with self.transaction():
            mine = [name for name, attempt in self.attempt_rows.items() if attempt.record.site == site]
            self.settled |= {name for name in mine if self.numbers.get((name, Order.SETTLE), (mark[0] + 1, 0)) <= mark}
        for (name, order), number in sorted(self.numbers.items(), key=lambda item: item[1]):
            attempt = self.attempt_rows[name]
            job = self.jobs[attempt.record.job]
            if attempt.record.site != site or order not in orders_of(attempt, job):
                continue
            if order is Order.SETTLE and name in self.settled:
                continue
            env = dict(self.envs.get(job.job, ())) if order is Order.OFFER else {}
            found.append(OpenOrder(order, *number, attempt, job, env))
        return new_first(found, mark)

    async def attempts(self, after: AttemptId | None, limit: int) -> list[AttemptSnapshot]:
        rows = [a for name, a in sorted(self.attempt_rows.items()) if after is None or name > after]
        return [AttemptSnapshot(record=a.record, wall_s=a.wall_s) for a in rows[:limit]]

    # --- quotas and what others told ------------------------------------------------------------------------------------------------------------

    async def quotas(self) -> list[QuotaRecord]:
        rows = sorted(self.quota_rows.items(), key=lambda item: (item[0][0], item[0][1] or "", item[0][2]))
        return [QuotaRecord(tenant=tenant, site=site, kind=kind, limit=limit) for (tenant, site, kind), limit in rows]

    async def set_quota(self, quota: SetQuota, *, actor: str) -> None:
        async with self.transaction() as tx:
            key = (quota.tenant, quota.site, quota.kind)
            if quota.limit is None:
                self.quota_rows.pop(key, None)
            else:
                self.quota_rows[key] = quota.limit
            where = f"{quota.tenant}@{quota.site or 'all'}/{quota.kind}"
            await tx.audit(actor=actor, action="quota.set", target=where, reason=f"limit {quota.limit}")

    async def learn(self, facts: Sequence[Fact], meta: EventMeta | None = None) -> list[Fact]:
        async with self.transaction() as tx:
            if meta is not None and not await tx.first_time(meta):
                return []
            newer = [f for f in facts if (f.noun, f.entity) not in self.facts or self.facts[(f.noun, f.entity)].version < f.version]
            self.facts.update({(f.noun, f.entity): f for f in newer})
            return newer

    async def known(self) -> list[Fact]:
        return [fact for _, fact in sorted(self.facts.items())]

    async def grants(self) -> list[Grant]:
        return [grant for _, grant in sorted(self.grant_rows.items())]

    async def set_grant(self, grant: Grant, *, now: datetime) -> None:
        async with self.transaction() as tx:
            for key, held in list(self.grant_rows.items()):
                if key[0] == grant.site and held.devices and held.valid_until <= now:
                    self.grant_rows[key] = replace(held, devices=0, revision=held.revision + 1)
            check_room([g for g in await self.grants() if g.site == grant.site], grant)
            key = (grant.site, grant.tenant, grant.kind)
            before = self.grant_rows.get(key)
            self.grant_rows[key] = replace(grant, revision=before.revision + 1 if before else 1)
            where = f"{grant.tenant}@{grant.site}/{grant.kind}"
            await tx.audit(
                actor=grant.set_by, action="grant.set", target=where, reason=f"devices {grant.devices}, until {grant.valid_until:%F}"
            )

    async def settings_revision(self, site: SiteName, content: Digest, known: int, now: datetime, *, above: int = 0) -> Revision | None:
        async with self.transaction():
            held = self.revisions.get(site)
            if held is None:
                held = self.revisions[site] = (Revision(1, now), content, known)
            same = held[1] == content
            if not same and (known < held[2] or (known == held[2] and now - held[0].at < SETTLED_CONTENT)):
                return None
            if not same or held[0].number < above:
                self.revisions[site] = (Revision(max(held[0].number, above) + 1, now), content, known)
            return self.revisions[site][0]
