"""What people and services ask of the scheduler: load, decide, save. Rights first, then the request itself, then what is known."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import tzinfo
from typing import Any, TypeVar

import msgspec

from intertie.bus.rpc import Caller, Serve
from intertie.clock import Clock
from intertie.contracts import endpoints
from intertie.contracts.base import Empty, encode
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.identity import AuditQuery, AuditReply
from intertie.contracts.job import (
    AttemptsQuery,
    AttemptsReply,
    CancelJob,
    CloseAttempt,
    GrantsReply,
    JobQuery,
    JobRecord,
    JobsQuery,
    JobsReply,
    LogsQuery,
    PreemptJob,
    QuotasReply,
    Rejection,
    SetGrant,
    SetQuota,
    Story,
    SubmitJob,
    SubmitReply,
)
from intertie.contracts.link import AskLog, LogChunk
from intertie.errors import Conflict, NotFound, Refused
from intertie.ids import SiteName, new_job
from intertie.observe import tracing
from intertie.planner import PoolView, nearest, never_fits, spec_in_force, suitability
from intertie.scheduler.asks import Asker
from intertie.scheduler.core import life, silence, ways
from intertie.scheduler.core.grants import granted
from intertie.scheduler.core.rows import Change, File, Ignored, Job, JobView, record_of
from intertie.scheduler.core.snapshot import pool_views
from intertie.scheduler.knowledge import Knowledge
from intertie.scheduler.rounds import Planner
from intertie.scheduler.store import EVERYTHING, SchedulerStore
from intertie.store import audit_reply
from intertie.trust import rights

T = TypeVar("T")

# An answer must fit NATS' 1 MiB with its headers, beside a job's own record.
REPLY_BYTES = 600 * 1024


class Scheduler:
    """One handler per endpoint; `handlers()` is what `rpc.serve` takes."""

    def __init__(
        self,
        store: SchedulerStore,
        knowledge: Knowledge,
        planner: Planner,
        asker: Asker,
        clock: Clock,
        nudge: Callable[[SiteName], Awaitable[None]],
        *,
        zone: tzinfo,
    ) -> None:
        self._store, self._knowledge, self._planner, self._asker = store, knowledge, planner, asker
        self._clock, self._nudge, self._zone = clock, nudge, zone

    def handlers(self) -> Mapping[Endpoint[Any, Any], Serve]:
        return {
            endpoints.SUBMIT: self.submit,
            endpoints.CANCEL: self.cancel,
            endpoints.JOB: self.job,
            endpoints.JOBS: self.jobs,
            endpoints.STORY: self.story,
            endpoints.LOGS: self.logs,
            endpoints.ATTEMPTS: self.attempts,
            endpoints.SET_QUOTA: self.set_quota,
            endpoints.QUOTAS: self.quotas,
            endpoints.PREEMPT: self.preempt,
            endpoints.CLOSE_ATTEMPT: self.close_attempt,
            endpoints.SET_GRANT: self.set_grant,
            endpoints.GRANTS: self.grants,
            endpoints.SCHEDULER_AUDIT: self.audit,
        }

    # --- commands --------------------------------------------------------------------------------------------------------------------------------

    async def submit(self, request: SubmitJob, caller: Caller) -> SubmitReply:
        """Take a job in, once per client key; refuse at once what no declared pool can ever hold."""
        rights.require(caller.claims, "job.submit", tenant=request.tenant)
        life.check_request(request)
        job = life.new_job(request, new_job(), actor=caller.claims.name, traceparent=tracing.traceparent(), now=self._clock.now())
        if request.dry_run:
            return self._dry_run(job)
        known = await self._store.by_key(request.tenant, request.client_key)
        if known is None:
            self._refuse_what_never_fits(job)
            submitted = await self._store.submit(job, request.env, life.submitted_line(job))
            if not submitted.repeated:
                self._planner.hint()
                return SubmitReply(job=record_of(JobView(submitted.job)))
            known = submitted.job
        return await self._again(known, request, caller)

    async def _again(self, known: Job, request: SubmitJob, caller: Caller) -> SubmitReply:
        """The same key again: the same job, if it asks for the same."""
        if not ways.asks_the_same(known, request):
            raise Conflict(
                "scheduler.key_reused",
                f"client key {request.client_key!r} was used for {known.job}, which asked for something else",
                next_step="use a new key for a new job",
                details={"job": known.job},
            )
        view = await self._store.view(known.job, rights.Scope(everything=False, tenant=request.tenant, site=None))
        assert view is not None, "jobs are never deleted"
        return SubmitReply(job=self._record(view, caller), repeated=True)

    def _pools(self) -> tuple[PoolView, ...]:
        now, known = self._clock.now(), self._knowledge
        local = now.astimezone(self._zone).time()
        return pool_views(known.world, known.sight, known.hearing, {}, now=now, now_s=self._clock.monotonic_s(), local=local)

    def _dry_run(self, job: Job) -> SubmitReply:
        found = suitability(life.queued(job), self._pools())
        return SubmitReply(job=None, fits=list(found.fits), rejections=list(found.rejections))

    def _refuse_what_never_fits(self, job: Job) -> None:
        rejections = never_fits(life.queued(job), self._pools())
        if not rejections:
            return
        raise Refused(
            "scheduler.no_site_fits",
            f"no pool that has joined can ever run this: {nearest(rejections)}"[:3_900],
            next_step="ask for what a pool has (`intertie site list`), or join a site that has it",
            details={"rejections": [_plain(r) for r in rejections[:64]]},
        )

    async def cancel(self, request: CancelJob, caller: Caller) -> JobRecord:
        """A durable intent; `cancelled` is said when nothing runs any more."""
        scope = rights.scope(caller.claims, "job.cancel")
        if caller.claims.tenant is None and not request.reason.strip():
            raise Refused("scheduler.reason_needed", "who cancels another's job says why", next_step="give a reason")
        name, now = caller.claims.name, self._clock.now()
        outcome = await self._store.change(
            request.job,
            scope,
            lambda file: life.cancel(file, actor=name, reason=request.reason, now=now),
            actor=name,
            action="job.cancel",
            reason=request.reason,
        )
        if outcome is None:
            raise rights.not_found()
        if isinstance(outcome, Change):
            self._planner.hint()
            if outcome.attempt is not None:
                await self._nudge(outcome.attempt.record.site)
        return await self.job(JobQuery(job=request.job), caller)

    async def set_quota(self, request: SetQuota, caller: Caller) -> QuotasReply:
        rights.require(caller.claims, "quota.set", tenant=request.tenant)
        await self._store.set_quota(request, actor=caller.claims.name)
        self._planner.hint()
        return QuotasReply(quotas=await self._store.quotas())

    async def preempt(self, request: PreemptJob, caller: Caller) -> JobRecord:
        """Stop the job's attempt for somebody else's sake; restartable work is queued again when its end is seen, and keeps away for a while."""
        scope, name, now = rights.scope(caller.claims, "job.preempt"), caller.claims.name, self._clock.now()
        outcome = await self._store.change(
            request.job,
            scope,
            lambda file: life.preempt(file, actor=name, reason=request.reason, now=now),
            actor=name,
            action="job.preempt",
            reason=request.reason,
        )
        return await self._ruled(outcome)

    async def close_attempt(self, request: CloseAttempt, caller: Caller) -> JobRecord:
        """A named person's word that an attempt at a silent site is waited for no longer. Refused while the site speaks: then it is asked."""
        rights.require(caller.claims, "attempt.close")
        name, now, known = caller.claims.name, self._clock.now(), self._knowledge

        def decide(file: File) -> Change | Ignored:
            assert file.attempt is not None, "it was named"
            row = known.hearing.row(file.attempt.record.site)
            held_there = row is not None and file.attempt.journal in (None, row.journal)
            if held_there and known.silent_since(file.attempt.record.site) is None and not request.site_gone:
                raise Conflict(
                    "scheduler.site_speaks",
                    f"{file.attempt.record.site} is not silent: its word ends the attempt",
                    next_step="cancel or preempt the job; or say site_gone if the site has left for good",
                )
            return silence.close(file, actor=name, reason=request.reason, site_gone=request.site_gone, now=now)

        outcome = await self._store.change_attempt(
            request.attempt, EVERYTHING, decide, actor=name, action="attempt.close", reason=request.reason
        )
        return await self._ruled(outcome)

    async def _ruled(self, outcome: Change | Ignored | None) -> JobRecord:
        """The job after an operator's or owner's word; what it printed is its tenant's alone."""
        if outcome is None:
            raise rights.not_found()
        if isinstance(outcome, Ignored):
            raise Conflict("scheduler.nothing_to_do", outcome.why)
        self._planner.hint()
        if outcome.attempt is not None:
            await self._nudge(outcome.attempt.record.site)
        view = await self._store.view(outcome.job.job, EVERYTHING)
        assert view is not None, "jobs are never deleted"
        record = record_of(view, self._knowledge.silent_since(view.job.site))
        return msgspec.structs.replace(record, attempts=[msgspec.structs.replace(a, log_tail="") for a in record.attempts])

    async def set_grant(self, request: SetGrant, caller: Caller) -> GrantsReply:
        """What a tenant may use at a site while that is islanded; it travels sealed in the site's settings."""
        rights.require(caller.claims, "grant.set", tenant=request.tenant, site=request.site)
        now, world = self._clock.now(), self._knowledge.world
        if request.site not in world.sites:
            raise NotFound("scheduler.no_site", f"no site {request.site} has joined", next_step="`intertie site list`")
        spec = spec_in_force(world.specs.values(), request.tenant, now)
        asked = granted(
            request,
            actor=caller.claims.name,
            spec=spec.spec if spec else None,
            spec_revision=spec.revision if spec else 0,
            now=now,
        )
        await self._store.set_grant(asked, now=now)
        await self._knowledge.read_grants()
        return await self.grants(Empty(), caller)

    # --- queries ---------------------------------------------------------------------------------------------------------------------------------

    def _record(self, view: JobView, caller: Caller) -> JobRecord:
        """The job as this caller may see it: what it printed is its tenant's."""
        record = record_of(view, self._knowledge.silent_since(view.job.site))
        if rights.allowed(caller.claims, "job.logs", tenant=record.tenant):
            return record
        return msgspec.structs.replace(record, attempts=[msgspec.structs.replace(a, log_tail="") for a in record.attempts])

    async def _view(self, request: JobQuery, caller: Caller, action: str) -> JobView:
        view = await self._store.view(request.job, rights.scope(caller.claims, action))
        if view is None:
            raise rights.not_found()
        return view

    async def job(self, request: JobQuery, caller: Caller) -> JobRecord:
        return self._record(await self._view(request, caller, "job.read"), caller)

    async def jobs(self, request: JobsQuery, caller: Caller) -> JobsReply:
        views, more = await self._store.views(request, rights.scope(caller.claims, "job.read"))
        records = within([self._record(view, caller) for view in views])
        return JobsReply(jobs=records, more=more or len(records) < len(views))

    async def story(self, request: JobQuery, caller: Caller) -> Story:
        view = await self._view(request, caller, "job.read")
        lines = await self._store.story(request.job, rights.scope(caller.claims, "job.read"))
        # The newest lines matter most; the beginning of a story too long for one message is in the audit and on disk.
        return Story(job=self._record(view, caller), lines=within(lines[::-1])[::-1])

    async def logs(self, request: LogsQuery, caller: Caller) -> LogChunk:
        """Bytes of a log, from the site that has it; the hub keeps only the tail of what ended."""
        view = await self._view(JobQuery(job=request.job), caller, "job.logs")
        wanted = [a for a in view.attempts if request.attempt in (None, a.attempt)]
        if not wanted:
            raise NotFound("scheduler.no_attempt", "there is no such attempt of this job yet; it has written nothing")
        attempt = wanted[-1]
        question = AskLog(attempt=attempt.attempt, offset=request.offset, limit=request.limit)
        return await self._asker.log(attempt.site, question)

    async def attempts(self, request: AttemptsQuery, caller: Caller) -> AttemptsReply:
        rights.require(caller.claims, "service.snapshot")
        found = await self._store.attempts(request.after, request.limit + 1)
        page = within(found[: request.limit])
        return AttemptsReply(attempts=page, more=len(found) > len(page))

    async def quotas(self, _: Empty, caller: Caller) -> QuotasReply:
        scope = rights.scope(caller.claims, "quota.read")
        return QuotasReply(quotas=[q for q in await self._store.quotas() if scope.covers(tenant=q.tenant)])

    async def grants(self, _: Empty, caller: Caller) -> GrantsReply:
        """Those in force."""
        scope, now = rights.scope(caller.claims, "grant.read"), self._clock.now()
        held = [g for g in await self._store.grants() if g.devices and g.valid_until > now and scope.covers(tenant=g.tenant, site=g.site)]
        return GrantsReply(grants=[g.record for g in held])

    async def audit(self, request: AuditQuery, caller: Caller) -> AuditReply:
        rights.require(caller.claims, "audit.read")
        return await audit_reply(self._store, request)


def within(items: Sequence[T]) -> list[T]:
    """As many of the items as one answer can carry, and at least one."""
    kept, left = list[T](), REPLY_BYTES
    for item in items:
        left -= len(encode(item)) + 1
        if kept and left < 0:
            break
        kept.append(item)
    return kept


def _plain(rejection: Rejection) -> dict[str, str]:
    return {name: str(getattr(rejection, name)) for name in ("site", "pool", "rule", "text", "needed", "found")}
