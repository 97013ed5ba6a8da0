"""The scheduler's store on PostgreSQL. Every change of a job goes through `_save`: rows, events, story, instruction numbers and the forgetting of
environment values, in the caller's transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from intertie.contracts.base import EventMeta, decode, encode
from intertie.contracts.identity import AuditQuery, AuditRow
from intertie.contracts.job import (
    AttemptRecord,
    AttemptSnapshot,
    Cause,
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
from intertie.ids import AttemptId, Digest, JobId, JournalId, PoolName, RoundId, SiteName, SpecId, TenantName
from intertie.lifecycle import JobEvent
from intertie.observe import tracing
from intertie.scheduler.core.backoff import BackOff, after_fault, avoid
from intertie.scheduler.core.given import Fact, RoundInput, Used, Waited
from intertie.scheduler.core.grants import Grant, check_room
from intertie.scheduler.core.life import is_counted
from intertie.scheduler.core.orders import Order, orders_of
from intertie.scheduler.core.rows import Attempt, Cancel, Change, File, Ignored, Job, JobView, WaitVerdict, job_changed
from intertie.scheduler.core.ways import fallback_key
from intertie.scheduler.store import (
    EVERYTHING,
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

    async def lift_versions(self, epoch: int, first: int) -> None:
        async with self.db.transaction() as tx:
            await tx.run(Q.job_versions_lift, epoch, first)
            await tx.run(Q.attempt_versions_lift, epoch, first)

    async def read_audit(self, query: AuditQuery) -> list[AuditRow]:
        return await self.db.read_audit(query)

    # --- jobs ------------------------------------------------------------------------------------------------------------------------------

    async def submit(self, job: Job, env: Mapping[str, str], told: StoryLine) -> Submitted:
        async with self.db.transaction() as tx:
            if not await _insert_job(tx, job):
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
            outcome = await _kept(tx, decide(file))
            await tx.audit(actor=actor, action=action, target=job, reason=reason, result=result_of(outcome))
            return outcome

    async def apply(self, tx: StoreTx, attempt: AttemptId | None, decide: DecideAttempt) -> Change | Ignored:
        assert isinstance(tx, Tx), "a transaction of another store cannot change a job here"
        file: File | None = None
        row = await tx.one(Q.attempt_job, attempt) if attempt is not None else None
        if row is not None:
            file = await _locked(tx, row["job"], EVERYTHING, attempt)
            assert file is not None and file.attempt is not None, "jobs and attempts are never deleted"
        return await _kept(tx, decide(file))

    async def open_at(self, tx: StoreTx, site: SiteName) -> list[AttemptId]:
        assert isinstance(tx, Tx), "a transaction of another store cannot be read here"
        return [AttemptId(row["attempt"]) for row in await tx.all(Q.attempts_open_at, site)]

    async def take_up(self, tx: StoreTx, job: Job, told: StoryLine, decide: Decide) -> Change | Ignored:
        assert isinstance(tx, Tx), "a transaction of another store cannot change a job here"
        if await tx.one(Q.job_is_here, job.job) is None:
            if not await _insert_job(tx, job):
                await _insert_job(tx, replace(job, client_key=fallback_key(job.job)))
            await tx.run(Q.story_insert, job.job, encode(told))
            await tx.emit(job_changed(job, None, told.actor, told.what, job.submitted_at))
        file = await _locked(tx, job.job, EVERYTHING)
        assert file is not None, "it is here now"
        return await _kept(tx, decide(file))

    async def change_attempt(
        self, attempt: AttemptId, scope: Scope, decide: Decide, *, actor: str, action: str, reason: str
    ) -> Change | Ignored | None:
        async with self.db.transaction() as tx:
            row = await tx.one(Q.attempt_job, attempt)
            file = await _locked(tx, row["job"], scope, attempt) if row else None
            if file is None:
                return None
            outcome = await _kept(tx, decide(file))
            await tx.audit(actor=actor, action=action, target=attempt, reason=reason, result=result_of(outcome))
            return outcome

    # --- rounds ----------------------------------------------------------------------------------------------------------------------------

    async def load_round(self, allowances: Mapping[TenantName, datetime]) -> RoundInput:
        async with self.db.transaction(read_only=True, isolation="repeatable read") as tx:
            queue = await tx.all(Q.queue_load, QUEUE_LIMIT)
            live = await tx.all(Q.live_load)
            quotas = await tx.all(Q.quotas_load)
            backs = await tx.all(Q.back_offs_load)
            used = await tx.all(Q.used_load, list(allowances), list(allowances.values())) if allowances else []
            avoids = await tx.all(Q.avoids_load, [row["job"] for row in queue]) if queue else []
            grants = await tx.all(Q.grants_load)
        avoided: dict[JobId, list[BackOff]] = {}
        for row in avoids:
            avoided.setdefault(JobId(row["job"]), []).append(_back_off(row))
        return RoundInput(
            avoided=avoided,
            grants=[_grant(row) for row in grants],
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

    async def withdraw(self, leader: Leader, withdrawals: Sequence[Ruling]) -> list[Change]:
        done: list[Change] = []
        async with self.db.transaction() as tx:
            await tx.fence(leader)
            for withdrawal in sorted(withdrawals, key=lambda w: w.job):
                file = await _locked(tx, withdrawal.job, EVERYTHING, withdrawal.attempt)
                outcome = withdrawal.decide(file) if file else None
                if isinstance(outcome, Change):
                    await _save(tx, outcome)
                    done.append(outcome)
        return done

    # --- instructions ------------------------------------------------------------------------------------------------------------------------

    async def orders(self, site: SiteName, mark: tuple[int, int]) -> list[OpenOrder]:
        if not await self.owed([site]):
            return []
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
                if order in orders_of(attempt, job) and not (order is Order.SETTLE and number <= mark):
                    found.append(OpenOrder(order, *number, attempt, job, {}))
            found = new_first(found, mark)
            offered = [order.job.job for order in found if order.order is Order.OFFER]
            envs = {row["job"]: decode(row["env"], dict[str, str]) for row in await tx.all(Q.envs_load, offered)} if offered else {}
        return [
            OpenOrder(o.order, o.epoch, o.number, o.attempt, o.job, envs.get(o.job.job, {}) if o.order is Order.OFFER else {})
            for o in found
        ]

    async def owed(self, sites: Collection[SiteName]) -> frozenset[SiteName]:
        async with self.db.statement() as tx:
            return frozenset(SiteName(row["site"]) for row in await tx.all(Q.sites_owed, list(sites)))

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

    async def grants(self) -> list[Grant]:
        async with self.db.transaction(read_only=True) as tx:
            return [_grant(row) for row in await tx.all(Q.grants_load)]

    async def set_grant(self, grant: Grant, *, now: datetime) -> None:
        async with self.db.transaction() as tx:
            await tx.run(Q.grants_lock, grant.site)
            await tx.run(Q.grants_let_go, grant.site, now)
            check_room([g for g in (_grant(row) for row in await tx.all(Q.grants_load)) if g.site == grant.site], grant)
            await tx.run(
                Q.grant_set,
                grant.site,
                grant.tenant,
                grant.kind,
                grant.devices,
                grant.card_hours,
                grant.valid_until,
                grant.set_by,
                grant.spec,
                grant.spec_revision,
            )
            where = f"{grant.tenant}@{grant.site}/{grant.kind}"
            await tx.audit(
                actor=grant.set_by, action="grant.set", target=where, reason=f"devices {grant.devices}, until {grant.valid_until:%F}"
            )

    async def settings_revision(self, site: SiteName, content: Digest, known: int, now: datetime, *, above: int = 0) -> Revision | None:
        async with self.db.transaction() as tx:
            await tx.run(Q.settings_lock, site, content, known, now)
            row = await tx.one(Q.settings_load, site)
            assert row is not None, "it was made just now, if it was not there"
            same = row["content"] == content
            if same and row["revision"] >= above:
                return Revision(row["revision"], row["made_at"])
            if not same and (known < row["known"] or (known == row["known"] and now - row["made_at"] < SETTLED_CONTENT)):
                return None
            number = max(row["revision"], above) + 1
            await tx.run(Q.settings_next, site, number, content, known, now)
            return Revision(number, now)


# --- writing one change ----------------------------------------------------------------------------------------------------------------------


def _cut(scope: Scope) -> tuple[bool, TenantName | None, SiteName | None]:
    return scope.everything, scope.tenant, scope.site


async def _locked(tx: Tx, job: JobId, scope: Scope, attempt: AttemptId | None = None) -> File | None:
    """The job's file, about the named attempt or its live one; None if it is not there."""
    row = await tx.one(Q.job_lock, job, *_cut(scope))
    if row is None:
        return None
    found = await (tx.one(Q.attempt_load, attempt) if attempt is not None else tx.one(Q.attempt_live_of_job, job))
    held = _attempt(found) if found else None
    others = await tx.all(Q.attempts_beside, job, held.record.attempt if held else None) if row["attempts"] > (1 if held else 0) else []
    return File(_job(row), held, tuple(_attempt(other) for other in others))


async def _insert_job(tx: Tx, job: Job) -> bool:
    """False if its tenant has used the client key before."""
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
        job.epoch,
    )
    return bool(inserted)


async def _place(tx: Tx, placement: Placement) -> Change | None:
    """One placement; None if its job has left the queue or its devices have a holder: the next round sees why."""
    file = await _locked(tx, placement.job, EVERYTHING)
    change = placement.decide(file) if file else None
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


async def _kept(tx: Tx, outcome: Change | Ignored) -> Change | Ignored:
    """What was decided, on disk if it changes something."""
    if isinstance(outcome, Change):
        await _save(tx, outcome)
    return outcome


async def _save(tx: Tx, change: Change) -> None:
    job, attempt = change.job, change.attempt
    if change.job_event is not None:
        await _save_job(tx, job)
    if attempt is not None:
        await _save_attempt(tx, attempt, change)
        await _number_orders(tx, attempt, job)
    await _save_others(tx, change)
    # The events join the trace of the submit, whoever caused them.
    with tracing.span("scheduler change", parent=job.traceparent or None):
        for event in (change.job_event, change.attempt_event, *change.other_events):
            if event is not None:
                await tx.emit(event)
    if change.incident is not None:
        await tx.fault(change.incident)
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
    if attempt is not None and change.avoid and not job.terminal:
        row = await tx.one(Q.avoid_load, job.job, attempt.record.site)
        after = avoid(attempt.record.site, _back_off(row) if row else None, change.avoid, change.at)
        await tx.run(Q.avoid_set, job.job, after.site, after.faults, after.until, after.why)
    elif change.recovered or (job.terminal and not change.before.job.terminal):
        await tx.run(Q.avoids_forget, job.job)


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
        job.survivor,
        job.delivered,
    )
    if written != 1:
        raise Stale("store.conflict", f"job {job.job} is no longer at version {job.version - 1}")


async def _save_others(tx: Tx, change: Change) -> None:
    """Other attempts of the job: what changes with it, and what they are owed now that the job has changed."""
    changed = {other.record.attempt: other for other in change.others}
    for before in change.before.others:
        other = changed.get(before.record.attempt, before)
        if other is not before:
            await _update_attempt(tx, other, before, bool(orders_of(other, change.job)))
        elif change.job_event is not None:
            await tx.run(Q.attempt_owed_set, other.record.attempt, bool(orders_of(other, change.job)))
        await _number_orders(tx, other, change.job)


async def _save_attempt(tx: Tx, attempt: Attempt, change: Change) -> None:
    record = attempt.record
    owed = bool(orders_of(attempt, change.job))
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
            attempt.holding,
            attempt.stop_cause,
            attempt.stop_why,
            attempt.lease_s,
            attempt.journal,
        )
        if attempt.holding:
            held = Q.devices_hold if record.claimed_at is None else Q.devices_hold_free_ones
            await tx.run(held, record.attempt, record.site, record.pool, list(record.devices))
        return
    if change.attempt_event is None:
        await tx.run(Q.attempt_owed_set, record.attempt, owed)
        return
    await _update_attempt(tx, attempt, change.before.attempt, owed)


async def _update_attempt(tx: Tx, attempt: Attempt, before: Attempt, owed: bool) -> None:
    record = attempt.record
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
        record.quantity_milli_us,
        encode(record),
        record.version,
        attempt.holding,
        attempt.stop_cause,
        attempt.stop_why,
        attempt.journal,
    )
    if written != 1:
        raise Stale("store.conflict", f"attempt {record.attempt} is no longer at version {record.version - 1}")
    if before.holding and not attempt.holding:
        await tx.run(Q.devices_free, record.attempt)


async def _number_orders(tx: Tx, attempt: Attempt, job: Job) -> None:
    """Give each instruction that is due its number, once. The head's row is held to the commit, so numbers become visible in their order."""
    for order in orders_of(attempt, job):
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
        survivor=AttemptId(row["survivor"]) if row["survivor"] else None,
        delivered=AttemptId(row["delivered"]) if row["delivered"] else None,
        epoch=row["epoch"],
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
        holding=row["holding"],
        stop_cause=Cause(row["stop_cause"]) if row["stop_cause"] else None,
        stop_why=row["stop_why"],
        lease_s=row["lease_s"],
        journal=JournalId(row["journal"]) if row["journal"] else None,
    )


def _grant(row: asyncpg.Record) -> Grant:
    return Grant(
        tenant=TenantName(row["tenant"]),
        site=SiteName(row["site"]),
        kind=DeviceKind(row["kind"]),
        devices=row["devices"],
        card_hours=row["card_hours"],
        valid_until=row["valid_until"],
        set_by=row["set_by"],
        revision=row["revision"],
        spec=SpecId(row["spec"]) if row["spec"] else None,
        spec_revision=row["spec_revision"],
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
