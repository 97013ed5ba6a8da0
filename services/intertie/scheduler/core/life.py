"""The three things the hub itself does to a job: take it in, place it, cancel it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal

from intertie.contracts.base import encode
from intertie.contracts.image import read_image
from intertie.contracts.job import AttemptRecord, Cause, JobSpec, JobState, OnSilence, StoryLine, SubmitJob
from intertie.errors import Conflict, Refused
from intertie.ids import AttemptId, Digest, JobId, RoundId, SiteName, digest
from intertie.lifecycle import JobEvent
from intertie.planner import Avoided, Decision, QueuedJob
from intertie.scheduler.core.rows import Attempt, AttemptState, Cancel, Change, File, Ignored, Job, line, moved, noted

PLANNER = "planner"

# A whole environment travels sealed in the offer, beside the script; larger values belong into the work folder.
ENV_BYTES = 64 * 1024
# Script, arguments and the rest: with the environment it must fit one seal (256 KiB) in one offer.
SPEC_BYTES = 176 * 1024


# Of a request, in any currency.
SMALLEST_BUDGET, LARGEST_BUDGET = Decimal("0.000001"), Decimal(10**15)
# What the site itself sets for each job; a value given for one of these would be lost without a word.
SITE_ENV = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "ASCEND_RT_VISIBLE_DEVICES", "TRACEPARENT")
SITE_ENV_PREFIX = "INTERTIE_"

# Longer is no name of files but an attack on whoever matches it.
PATTERN_LENGTH = 1_024


def content_of(job: JobId, spec: JobSpec, env: Mapping[str, str]) -> Digest:
    """What was asked, in one digest. Salted with the job's id, so that equal secrets of two jobs do not look equal."""
    return digest(b"\n".join((job.encode(), encode(spec), encode(sorted(env.items())))))


def check_request(request: SubmitJob) -> None:
    """Refuse what contradicts itself, with the place."""
    if sorted(request.spec.env_names) != sorted(request.env):
        raise Refused(
            "scheduler.env_names",
            f"spec.env_names {sorted(request.spec.env_names)} are not the names of env {sorted(request.env)}",
            next_step="name in spec.env_names exactly the variables given in env",
        )
    asked = len(encode(request.spec))
    if asked > SPEC_BYTES:
        raise Refused(
            "scheduler.spec_too_large", f"the job has {asked} bytes, at most {SPEC_BYTES}", next_step="put the script into the work folder"
        )
    size = sum(len(name.encode()) + len(value.encode()) for name, value in request.env.items())
    if size > ENV_BYTES:
        raise Refused(
            "scheduler.env_too_large", f"env has {size} bytes, at most {ENV_BYTES}", next_step="put it into a file of the work folder"
        )
    if request.spec.on_silence is OnSilence.RERUN and not request.spec.restartable:
        raise Refused(
            "scheduler.rerun_not_restartable",
            "if_site_silent=rerun runs the job again elsewhere, also where its first run may go on for a while; that is for work that says restartable",
            next_step="declare it restartable if two runs of it do no harm, or use if_site_silent=wait",
        )
    _check_env(request.env)
    _check_texts(request.spec)
    _check_offering(request.spec)
    if request.spec.image:
        read_image(request.spec.image)
    if request.spec.pool is not None and request.spec.site is None:
        raise Refused("scheduler.pool_without_site", f"pool {request.spec.pool} is named without its site", next_step="name spec.site too")


def _check_offering(spec: JobSpec) -> None:
    """A request names whom it asks, and cannot be asked of another when that one is silent."""
    if spec.budget is not None and not spec.offering:
        raise Refused("scheduler.budget_without_offering", "spec.budget bounds a request, and spec.offering names none")
    if spec.budget is not None and not SMALLEST_BUDGET <= spec.budget <= LARGEST_BUDGET:
        raise Refused(
            "scheduler.budget",
            f"spec.budget is no amount from {SMALLEST_BUDGET} to {LARGEST_BUDGET}",
            next_step="give an amount of money above 0, or none",
        )
    if spec.offering and spec.site is None:
        raise Refused(
            "scheduler.offering_without_site", f"offering {spec.offering[:63]} is named without its site", next_step="name spec.site too"
        )
    if spec.offering and spec.on_silence is OnSilence.RERUN:
        raise Refused(
            "scheduler.offering_rerun",
            "a request is its owner's to answer, and is not placed again while he is silent",
            next_step="use if_site_silent=wait",
        )


def _check_env(env: Mapping[str, str]) -> None:
    """Any variable may be set but those that the site sets. `LD_PRELOAD`, `PATH` and the like are the job's own affair: they are in force from its
    own exec on, after everything of the site's was done, under its own account."""
    for name, value in env.items():
        if not name.isidentifier() or not name.isascii():
            raise Refused("scheduler.env_name", f"env name {name[:80]!r} is not a variable name")
        if name in SITE_ENV or name.startswith(SITE_ENV_PREFIX):
            raise Refused("scheduler.env_reserved", f"{name[:80]} is set by the site for each job", next_step="use another name")
        if "\x00" in value:
            raise Refused("scheduler.nul", f"the value of {name[:80]} holds a NUL character, which no environment carries")


def _check_texts(spec: JobSpec) -> None:
    """A name is shown to people and a pattern names files below the work folder; no command line carries a NUL."""
    if not spec.name.isprintable():
        raise Refused(
            "scheduler.name",
            f"the name {spec.name[:80]!r} holds characters that cannot be printed",
            next_step="name it in letters, digits, blanks and signs of any language",
        )
    for what, texts in (("script", [spec.script]), ("args", spec.args), ("outputs", spec.outputs)):
        if any("\x00" in text for text in texts):
            raise Refused("scheduler.nul", f"{what} holds a NUL character", next_step="put binary content into the work folder")
    for place, glob in enumerate(spec.outputs):
        if glob.startswith("/") or ".." in glob.split("/") or len(glob) > PATTERN_LENGTH:
            raise Refused(
                "scheduler.outputs",
                f"outputs[{place}] {glob[:80]!r} is no pattern below the work folder, of at most {PATTERN_LENGTH} characters",
                next_step="let the job copy what is elsewhere into its work folder, and name it there",
            )


def new_job(request: SubmitJob, job: JobId, *, actor: str, traceparent: str, now: datetime) -> Job:
    """The row of a job that has just been submitted; it may be placed at once."""
    return Job(
        job=job,
        tenant=request.tenant,
        submitted_by=actor,
        spec=request.spec,
        client_key=request.client_key,
        content=content_of(job, request.spec, request.env),
        state=JobState.QUEUED,
        submitted_at=now,
        queued_at=now,
        traceparent=traceparent,
    )


def submitted_line(job: Job) -> StoryLine:
    return line(job, "submitted", job.submitted_by, job.submitted_at, job.submitted_at, evidence=f"request {job.client_key}")


def reruns(job: Job) -> bool:
    """`if_site_silent: rerun`: it may be placed again although its first run was not seen to end."""
    return job.spec.on_silence is OnSilence.RERUN and job.spec.restartable


def queued(job: Job, *, avoided: Sequence[Avoided] = (), unsure: Sequence[SiteName] = ()) -> QueuedJob:
    """What the planner needs of a job. `unsure`: sites that may run it without our knowing."""
    return QueuedJob(
        job=job.job,
        tenant=job.tenant,
        resources=job.spec.resources,
        task_type=job.spec.task_type,
        wall_s=job.spec.wall_s,
        queued_at=job.queued_at,
        site=job.spec.site,
        pool=job.spec.pool,
        rerun=reruns(job),
        avoided=tuple(avoided),
        unsure=tuple(unsure),
        offering=job.spec.offering,
        budget=job.spec.budget,
        image=job.spec.image,
    )


def place(
    file: File, decision: Decision, attempt: AttemptId, *, round_id: RoundId, epoch: int, now: datetime, lease_s: int = 0
) -> Change | Ignored:
    """Offer the job as decided; nothing runs yet. A job that left the queue since is left alone. `lease_s`: in force for `rerun` work now."""
    job = file.job
    if job.state is not JobState.QUEUED or job.cancel is not None:
        return Ignored(f"it is {job.state} by now")
    record = AttemptRecord(
        attempt=attempt,
        job=job.job,
        tenant=job.tenant,
        number=job.attempts + 1,
        epoch=epoch,
        generation=job.generation + 1,
        site=decision.site,
        pool=decision.pool,
        devices=list(decision.devices),
        kind=decision.kind,
        account=decision.account,
        state=AttemptState.OFFERED.value,
        why_here=decision.why,
        spec=decision.spec,
        spec_revision=decision.spec_revision,
        profile_revision=decision.profile_revision,
        offered_at=now,
        offering=decision.offering,
        answer_by=now + timedelta(seconds=decision.answer_within_s) if decision.offering else None,
        image=job.spec.image,
        version=1,
    )
    after = moved(job, JobEvent.PLACE, now, attempts=record.number, generation=record.generation, site=decision.site)
    told = line(after, "placed", PLANNER, now, now, why=decision.why, attempt=attempt, evidence=f"round {round_id}")
    # The first placement after a replacement is what replaced it.
    replaced = [other for other in file.others if other.replaced and other.record.replaced_by is None]
    return Change(
        before=replace(file, attempt=None),
        job=after,
        attempt=Attempt(record, wall_s=job.spec.wall_s, lease_s=lease_s if reruns(job) else 0),
        others=tuple(noted(other, record={"replaced_by": attempt}) for other in replaced),
        actor=PLANNER,
        reason=decision.why,
        at=now,
        story=(told,),
    )


def cancel(file: File, *, actor: str, reason: str, now: datetime) -> Change | Ignored:
    """Record the intent, and end the job at once if nothing can run any more.

    An offer without a claim on disk is withdrawn: a site starts on the go only, and the go needs that claim. From the claim on, only the
    site's word ends the job.
    """
    job, attempt = file.job, file.attempt
    if job.terminal:
        return Ignored(f"it is {job.state} already")
    if job.cancel is not None:
        return Ignored("its cancellation was asked for already")
    if job.state is JobState.FINISHING:
        return Ignored("it has ended; its results are on their way back")
    wanted = replace(job, cancel=Cancel(now, actor, reason))
    told = reason or "asked for"
    if not job.held:
        after = moved(wanted, JobEvent.CANCEL, now)
        return Change(file, after, None, actor, told, now, (line(after, "cancelled", actor, now, now, why=told),))
    if attempt is not None and attempt.state is AttemptState.OFFERED:
        after = moved(wanted, JobEvent.CANCEL, now)
        fields = {"state": AttemptState.WITHDRAWN.value, "ended_at": now, "reason": f"cancelled: {told}"}
        withdrawn = noted(attempt, record=fields, live=False, holding=False)
        note = line(after, "cancelled", actor, now, now, why=f"{told}; the offer is withdrawn, nothing ran", attempt=attempt.record.attempt)
        return Change(file, after, withdrawn, actor, told, now, (note,))
    after = replace(wanted, version=job.version + 1)
    note = line(after, "cancel requested", actor, now, now, why=told, attempt=attempt.record.attempt if attempt else None)
    return Change(file, after, attempt, actor, told, now, (note,))


def withdraw(file: File, *, why: str, fault: bool, now: datetime) -> Change | Ignored:
    """Take an unclaimed offer back and queue the job again. A claim that is on disk by now has won, and nothing happens."""
    job, attempt = file.job, file.attempt
    if attempt is None or attempt.state is not AttemptState.OFFERED or job.state is not JobState.PLACED:
        return Ignored("the offer was answered by now")
    fields = {"state": AttemptState.WITHDRAWN.value, "ended_at": now, "reason": why}
    after = moved(job, JobEvent.REFUSE, now)
    told = line(after, "offer withdrawn", PLANNER, now, now, why=why, attempt=attempt.record.attempt)
    withdrawn = noted(attempt, record=fields, live=False, holding=False)
    return Change(file, after, withdrawn, PLANNER, why, now, (told,), fault=why if fault else "")


def preempt(file: File, *, actor: str, reason: str, now: datetime) -> Change | Ignored:
    """Stop the job's attempt for somebody else's sake. What has not been claimed is withdrawn; what may run is stopped by its site, and
    restartable work is queued again then; the platform pays what ran. `Conflict` if nothing of it is anywhere."""
    job, attempt = file.job, file.attempt
    if attempt is None or not job.held or job.state is JobState.FINISHING:
        raise Conflict(
            "scheduler.nothing_to_preempt", f"job {job.job} is {job.state}: it holds no device", next_step=f"intertie job {job.job}"
        )
    why = f"preempted by {actor}: {reason}"[:4_000]
    if job.cancel is not None or attempt.stop_cause is not None:
        return Ignored("it is being stopped already")
    if attempt.state is AttemptState.OFFERED:
        outcome = withdraw(file, why=why, fault=False, now=now)
        return replace(outcome, actor=actor, avoid=why) if isinstance(outcome, Change) else outcome
    stopped = noted(attempt, stop_cause=Cause.PREEMPTED, stop_why=why)
    after = replace(job, version=job.version + 1)
    note = line(after, "preemption asked for", actor, now, now, why=why, attempt=attempt.record.attempt)
    return Change(file, after, stopped, actor, why, now, (note,))


def is_counted(record: AttemptRecord) -> bool:
    """Whether an ended attempt counts against its tenant's allowance: its success, its own fault, its own cancellation. The exact sum is
    metering's; this is what the scheduler has spent meanwhile."""
    if record.state != AttemptState.ENDED:
        return False
    return record.outcome == "succeeded" or record.cause in (Cause.JOB, Cause.CANCELLED)
