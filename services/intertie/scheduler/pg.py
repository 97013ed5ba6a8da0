"""The scheduler's store on PostgreSQL. Every change of a job goes through `_save`: rows, events, story, instruction numbers and the forgetting of
environment values, in the caller's transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from intertie.contracts.base import EventMeta, decode, encode
from intertie.contracts.identity import AuditQuery, AuditRow
from intertie.contracts.job import (
    AttemptRecord,
    AttemptSnapshot,
    JobSpec,
    JobsQuery,
    JobState,
    QuotaRecord,
    Rejection,
    SetQuota,
    StoryLine,
    WaitReason,
)
from intertie.contracts.site import DeviceKind
from intertie.errors import Stale
from intertie.ids import AttemptId, Digest, JobId, PoolName, RoundId, SiteName, TenantName
from intertie.lifecycle import JobEvent
from intertie.observe import tracing
from intertie.scheduler.core.backoff import BackOff, after_fault
from intertie.scheduler.core.given import Fact, RoundInput, Used, Waited
from intertie.scheduler.core.life import is_counted
from intertie.scheduler.core.orders import Order, due
from intertie.scheduler.core.rows import Attempt, Cancel, Change, File, Ignored, Job, JobView, WaitVerdict, job_changed
from intertie.scheduler.store import (
    EVERYTHING,
    IDLE_ATTEMPTS_SHOWN,
    QUEUE_LIMIT,
    VERDICTS_KEPT,
    Decide,
    DecideAttempt,
    OpenOrder,
    Placement,
    RoundRow,
    Submitted,
    Told,
    Withdrawal,
    new_first,
)
from intertie.store import Database, Leader, StoreTx, Tx, Violated, load_queries
from intertie.trust.rights import Scope

if TYPE_CHECKING:
    import asyncpg

PACKAGE = "intertie.scheduler"
Q = load_queries(PACKAGE)

# The longest story that one page can be asked for; a job with more has been refused thousands of times.
STORY_LIMIT = 2_000
ROUNDS_KEPT = timedelta(days=30)


class PgSchedulerStore:
    """`SchedulerStore` of one service."""

    def __init__(self, db: Database) -> None:
        self.db = db

    def leading(self, role: str) -> AbstractAsyncContextManager[Leader]:
        return self.db.leading(role)

    def transaction(self) -> AbstractAsyncContextManager[Tx]:
        return self.db.transaction()

    async def epoch(self) -> int:
        return await self.db.epoch()

    async def read_audit(self, query: AuditQuery) -> list[AuditRow]:
        return await self.db.read_audit(query)

    # --- jobs ------------------------------------------------------------------------------------------------------------------------------

    async def submit(self, job: Job, env: Mapping[str, str], told: StoryLine) -> Submitted:
        async with self.db.transaction() as tx:
            inserted = await tx.run(
                Q.job_insert,
                job.job,
                job.tenant,
                job.submitted_by,
                encode(job.spec),
                job.client_key,
                job.content,
                job.state,
                job.submitted_at,
                job.queued_at,
                job.traceparent,
                job.version,
            )
            if not inserted:
                row = await tx.one(Q.job_by_key, job.tenant, job.client_key)
                if row is None:
                    raise Stale("store.conflict", "the job of this client key is being written at this moment")
                await tx.audit(actor=job.submitted_by, action="job.submit", target=row["job"], result="repeated")
                return Submitted(_job(row), repeated=True)
            if env:
                await tx.run(Q.env_insert, job.job, encode(dict(env)))
            await tx.run(Q.story_insert, job.job, encode(told))
            await tx.emit(job_changed(job, None, job.submitted_by, "submitted", job.submitted_at))
            await tx.audit(actor=job.submitted_by, action="job.submit", target=job.job)
        return Submitted(job, repeated=False)

    async def by_key(self, tenant: TenantName, client_key: str) -> Job | None:
        async with self.db.transaction(read_only=True) as tx:
            row = await tx.one(Q.job_by_key, tenant, client_key)
        return _job(row) if row else None

    async def view(self, job: JobId, scope: Scope) -> JobView | None:
        async with self.db.transaction(read_only=True, isolation="repeatable read") as tx:
            row = await tx.one(Q.job_load, job, *_cut(scope))
            return (await _views(tx, [row]))[0] if row else None

    async def views(self, query: JobsQuery, scope: Scope) -> tuple[list[JobView], bool]:
        async with self.db.transaction(read_only=True, isolation="repeatable read") as tx:
            rows = await tx.all(
                Q.jobs_list,
                *_cut(scope),
                query.tenant,
                query.site,
                list(query.states),
                query.after,
                query.limit + 1,
            )
            return await _views(tx, rows[: query.limit]), len(rows) > query.limit

    async def story(self, job: JobId, scope: Scope) -> list[StoryLine]:
        async with self.db.transaction(read_only=True) as tx:
            return [decode(row["line"], StoryLine) for row in await tx.all(Q.story_load, job, *_cut(scope), STORY_LIMIT)]

    async def change(self, job: JobId, scope: Scope, decide: Decide, *, actor: str, action: str, reason: str) -> Change | Ignored | None:
        async with self.db.transaction() as tx:
            file = await _locked(tx, job, scope)
            if file is None:
                return None
            outcome = decide(file)
            if isinstance(outcome, Change):
                await _save(tx, outcome)
            result = f"nothing to do: {outcome.why}" if isinstance(outcome, Ignored) else "ok"
            await tx.audit(actor=actor, action=action, target=job, reason=reason, result=result)
            return outcome

    async def apply(self, tx: StoreTx, attempt: AttemptId | None, decide: DecideAttempt) -> Change | Ignored:
        assert isinstance(tx, Tx), "a transaction of another store cannot change a job here"
        file: File | None = None
        row = await tx.one(Q.attempt_job, attempt) if attempt is not None else None
        if row is not None:
            held = await tx.one(Q.job_lock, row["job"], *_cut(EVERYTHING))
            found = await tx.one(Q.attempt_load, attempt)
            assert held is not None and found is not None, "jobs and attempts are never deleted"
            file = File(_job(held), _attempt(found))
        outcome = decide(file)
        if isinstance(outcome, Change):
            await _save(tx, outcome)
        return outcome

    # --- rounds ----------------------------------------------------------------------------------------------------------------------------

    async def load_round(self, allowances: Mapping[TenantName, datetime]) -> RoundInput:
        async with self.db.transaction(read_only=True, isolation="repeatable read") as tx:
            queue = await tx.all(Q.queue_load, QUEUE_LIMIT)
            live = await tx.all(Q.live_load)
            quotas = await tx.all(Q.quotas_load)
            backs = await tx.all(Q.back_offs_load)
            used = await tx.all(Q.used_load, list(allowances), list(allowances.values())) if allowances else []
        return RoundInput(
            queue=[_job(row) for row in queue],
            live=[_attempt(row) for row in live],
            quotas=[_quota(row) for row in quotas],
            back_offs={SiteName(row["site"]): _back_off(row) for row in backs},
            used=[
                Used(TenantName(row["tenant"]), SiteName(row["site"]), PoolName(row["pool"]), DeviceKind(row["kind"]), row["quantity"])
                for row in used
            ],
            waited={
                JobId(row["job"]): Waited(Digest(row["wait_digest"]), WaitReason(row["wait_reason"]), row["wait_since"])
                for row in queue
                if row["wait_digest"]
            },
        )

    async def save_round(self, leader: Leader, row: RoundRow, placements: Sequence[Placement], told: Sequence[Told]) -> list[Change]:
        async with self.db.transaction() as tx:
            await tx.fence(leader)
            placed: list[Change] = []
            for placement in sorted(placements, key=lambda p: p.job):
                change = await _place(tx, placement)
                if change is not None:
                    placed.append(change)
            await tx.run(
                Q.round_insert, row.round, row.at, row.input, leader.epoch, leader.number, row.queued, len(placed), row.not_examined
            )
            await tx.run(Q.rounds_prune, row.at - ROUNDS_KEPT)
            verdicts = sorted(told, key=lambda t: t.job)
            if verdicts:
                await tx.many(
                    Q.verdict_insert,
                    [(t.job, row.round, t.reason, t.text, t.since, encode(list(t.rejections))) for t in verdicts],
                )
                await tx.many(Q.verdict_mark, [(t.job, t.digest, t.reason, t.since) for t in verdicts])
                await tx.run(Q.verdicts_prune, [t.job for t in verdicts], VERDICTS_KEPT)
            return placed

    async def withdraw(self, leader: Leader, withdrawals: Sequence[Withdrawal]) -> list[Change]:
        done: list[Change] = []
        async with self.db.transaction() as tx:
            await tx.fence(leader)
            for withdrawal in sorted(withdrawals, key=lambda w: w.job):
                file = await _locked(tx, withdrawal.job, EVERYTHING)
                outcome = withdrawal.decide(file) if file else None
                if isinstance(outcome, Change):
                    await _save(tx, outcome)
                    done.append(outcome)
        return done

    # --- instructions ------------------------------------------------------------------------------------------------------------------------

    async def orders(self, site: SiteName, mark: tuple[int, int]) -> list[OpenOrder]:
        async with self.db.transaction() as tx:
            numbers = await tx.all(Q.orders_open, site)
            if not numbers:
                return []
            if any(row["order_kind"] == Order.SETTLE for row in numbers):
                await tx.run(Q.orders_settled, site, *mark)
            attempts = {row["attempt"]: _attempt(row) for row in await tx.all(Q.attempts_load, [row["attempt"] for row in numbers])}
            jobs = {row["job"]: _job(row) for row in await tx.all(Q.jobs_load, [a.record.job for a in attempts.values()])}
            found: list[OpenOrder] = []
            for row in numbers:
                attempt, order = attempts[row["attempt"]], Order(row["order_kind"])
                job = jobs[attempt.record.job]
                number = (row["order_epoch"], row["order_number"])
                if order in due(attempt, cancelled=job.cancel is not None) and not (order is Order.SETTLE and number <= mark):
                    found.append(OpenOrder(order, *number, attempt, job, {}))
            found = new_first(found, mark)
            offered = [order.job.job for order in found if order.order is Order.OFFER]
            envs = {row["job"]: decode(row["env"], dict[str, str]) for row in await tx.all(Q.envs_load, offered)} if offered else {}
        return [
            OpenOrder(o.order, o.epoch, o.number, o.attempt, o.job, envs.get(o.job.job, {}) if o.order is Order.OFFER else {})
            for o in found
        ]

    async def attempts(self, after: AttemptId | None, limit: int) -> list[AttemptSnapshot]:
        async with self.db.transaction(read_only=True) as tx:
            rows = await tx.all(Q.attempts_page, after, limit)
        return [AttemptSnapshot(record=decode(row["record"], AttemptRecord), wall_s=row["wall_s"]) for row in rows]

    # --- quotas and what others told ------------------------------------------------------------------------------------------------------------

    async def quotas(self) -> list[QuotaRecord]:
        async with self.db.transaction(read_only=True) as tx:
            return [_quota(row) for row in await tx.all(Q.quotas_load)]

    async def set_quota(self, quota: SetQuota, *, actor: str) -> None:
        site = quota.site or ""
        async with self.db.transaction() as tx:
            if quota.limit is None:
                await tx.run(Q.quota_remove, quota.tenant, site, quota.kind)
            else:
                await tx.run(Q.quota_set, quota.tenant, site, quota.kind, quota.limit)
            where = f"{quota.tenant}@{site or 'all'}/{quota.kind}"
            await tx.audit(actor=actor, action="quota.set", target=where, reason=f"limit {quota.limit}")

    async def learn(self, facts: Sequence[Fact], meta: EventMeta | None = None) -> list[Fact]:
        async with self.db.transaction() as tx:
            if meta is not None and not await tx.first_time(meta):
                return []
            newer: list[Fact] = []
            for fact in sorted(facts, key=lambda f: (f.noun, f.entity)):
                if await tx.run(Q.known_upsert, fact.noun, fact.entity, fact.version, fact.body, fact.at):
                    newer.append(fact)
            return newer

    async def known(self) -> list[Fact]:
        async with self.db.transaction(read_only=True) as tx:
            return [Fact(row["noun"], row["entity"], row["version"], row["body"], row["at"]) for row in await tx.all(Q.known_load)]

    async def settings_revision(self, site: SiteName, content: Digest) -> int:
        async with self.db.transaction() as tx:
            row = await tx.one(Q.settings_upsert, site, content)
        assert row is not None, "an upsert returns its row"
        return int(row["revision"])


# --- writing one change ----------------------------------------------------------------------------------------------------------------------


def _cut(scope: Scope) -> tuple[bool, TenantName | None, SiteName | None]:
    return scope.everything, scope.tenant, scope.site


async def _locked(tx: Tx, job: JobId, scope: Scope) -> File | None:
    row = await tx.one(Q.job_lock, job, *_cut(scope))
    if row is None:
        return None
    live = await tx.one(Q.attempt_live_of_job, job)
    return File(_job(row), _attempt(live) if live else None)


async def _place(tx: Tx, placement: Placement) -> Change | None:
    """One placement; None if its job has left the queue or its devices have a holder: the next round sees why."""
    file = await _locked(tx, placement.job, EVERYTHING)
    change = placement.decide(file.job) if file else None
    if not isinstance(change, Change):
        return None
    try:
        async with tx.savepoint():
            await _save(tx, change)
    except Violated as violated:
        if violated.constraint not in ("one_live_attempt", "one_holder"):
            raise
        return None
    return change


async def _save(tx: Tx, change: Change) -> None:
    job, attempt = change.job, change.attempt
    if change.job_event is not None:
        await _save_job(tx, job)
    if attempt is not None:
        await _save_attempt(tx, attempt, change)
        await _number_orders(tx, attempt, cancelled=job.cancel is not None)
    # The events join the trace of the submit, whoever caused them.
    with tracing.span("scheduler change", parent=job.traceparent or None):
        for event in (change.job_event, change.attempt_event):
            if event is not None:
                await tx.emit(event)
    for told in change.story:
        await tx.run(Q.story_insert, job.job, encode(told))
    if change.forget_env:
        await tx.run(Q.env_forget, job.job)
    if attempt is not None and change.recovered:
        await tx.run(Q.back_off_clear, attempt.record.site)
    if attempt is not None and change.fault:
        row = await tx.one(Q.back_off_lock, attempt.record.site)
        after = after_fault(attempt.record.site, _back_off(row) if row else None, change.fault, change.at)
        await tx.run(Q.back_off_set, after.site, after.faults, after.until, after.why)


async def _save_job(tx: Tx, job: Job) -> None:
    written = await tx.run(
        Q.job_update,
        job.job,
        job.state,
        job.queued_at,
        job.ended_at,
        job.cancel.at if job.cancel else None,
        job.cancel.actor if job.cancel else "",
        job.cancel.reason if job.cancel else "",
        job.ending,
        job.failures,
        job.attempts,
        job.generation,
        job.site,
        job.version,
    )
    if written != 1:
        raise Stale("store.conflict", f"job {job.job} is no longer at version {job.version - 1}")


async def _save_attempt(tx: Tx, attempt: Attempt, change: Change) -> None:
    record = attempt.record
    owed = bool(due(attempt, cancelled=change.job.cancel is not None))
    quantity = record.quantity_milli_us
    if change.before.attempt is None:
        await tx.run(
            Q.attempt_insert,
            record.attempt,
            record.job,
            record.tenant,
            record.site,
            record.pool,
            record.kind,
            record.state,
            record.generation,
            record.epoch,
            attempt.wall_s,
            attempt.live,
            attempt.result_pending,
            attempt.stop_answer,
            attempt.withdrawal_seen,
            owed,
            is_counted(record),
            quantity,
            record.offered_at,
            encode(record),
            record.version,
        )
        await tx.run(Q.devices_hold, record.attempt, record.site, record.pool, list(record.devices))
        return
    if change.attempt_event is None:
        await tx.run(Q.attempt_owed_set, record.attempt, owed)
        return
    written = await tx.run(
        Q.attempt_update,
        record.attempt,
        record.state,
        attempt.live,
        attempt.result_pending,
        attempt.stop_answer,
        attempt.withdrawal_seen,
        owed,
        is_counted(record),
        quantity,
        encode(record),
        record.version,
    )
    if written != 1:
        raise Stale("store.conflict", f"attempt {record.attempt} is no longer at version {record.version - 1}")
    if change.before.attempt.live and not attempt.live:
        await tx.run(Q.devices_free, record.attempt)


async def _number_orders(tx: Tx, attempt: Attempt, *, cancelled: bool) -> None:
    """Give each instruction that is due its number, once. The head's row is held to the commit, so numbers become visible in their order."""
    for order in due(attempt, cancelled=cancelled):
        row = await tx.one(Q.instruction_next, attempt.record.site)
        assert row is not None, "an upsert returns its row"
        await tx.run(Q.instruction_insert, attempt.record.attempt, order, attempt.record.site, row["epoch"], row["number"])


# --- reading rows ----------------------------------------------------------------------------------------------------------------------------


async def _views(tx: Tx, rows: Sequence[asyncpg.Record]) -> list[JobView]:
    jobs = [row["job"] for row in rows]
    attempts: dict[str, list[AttemptRecord]] = {job: [] for job in jobs}
    for row in await tx.all(Q.attempts_of_jobs, jobs, IDLE_ATTEMPTS_SHOWN):
        attempts[row["job"]].append(decode(row["record"], AttemptRecord))
    verdicts = {row["job"]: _verdict(row) for row in await tx.all(Q.verdicts_of_jobs, jobs)}
    return [JobView(_job(row), tuple(attempts[row["job"]]), verdicts.get(row["job"]), row["position"]) for row in rows]


def _verdict(row: asyncpg.Record) -> WaitVerdict:
    rejections = tuple(decode(row["rejections"], list[Rejection]))
    return WaitVerdict(RoundId(row["round"]), WaitReason(row["reason"]), row["text"], rejections, row["since"])


def _job(row: asyncpg.Record) -> Job:
    return Job(
        job=JobId(row["job"]),
        tenant=TenantName(row["tenant"]),
        submitted_by=row["submitted_by"],
        spec=decode(row["spec"], JobSpec),
        client_key=row["client_key"],
        content=Digest(row["content"]),
        state=JobState(row["state"]),
        submitted_at=row["submitted_at"],
        queued_at=row["queued_at"],
        ended_at=row["ended_at"],
        cancel=Cancel(row["cancel_at"], row["cancel_by"], row["cancel_reason"]) if row["cancel_at"] else None,
        ending=JobEvent(row["ending"]) if row["ending"] else None,
        failures=row["failures"],
        attempts=row["attempts"],
        generation=row["generation"],
        site=SiteName(row["site"]) if row["site"] else None,
        traceparent=row["traceparent"],
        version=row["version"],
    )


def _attempt(row: asyncpg.Record) -> Attempt:
    return Attempt(
        record=decode(row["record"], AttemptRecord),
        wall_s=row["wall_s"],
        live=row["live"],
        result_pending=row["result_pending"],
        stop_answer=row["stop_answer"],
        withdrawal_seen=row["withdrawal_seen"],
    )


def _quota(row: asyncpg.Record) -> QuotaRecord:
    return QuotaRecord(
        tenant=TenantName(row["tenant"]),
        site=SiteName(row["site"]) if row["site"] else None,
        kind=DeviceKind(row["kind"]),
        limit=row["maximum"],
    )


def _back_off(row: asyncpg.Record) -> BackOff:
    return BackOff(SiteName(row["site"]), row["faults"], row["until_at"], row["why"])
