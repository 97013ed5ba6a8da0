"""One result of several attempts (LINK D21).

Candidates are attempts that still run or have succeeded, by evidence; a stopped one is none. A success on disk beats a run. Who comes first is
written once (`survivor`), and so is whose result the job's is (`delivered`); the store refuses a second of either. When both run the replacement
is kept: the original was told to stop when its site was given up. When the original had finished first, it is kept and the replacement stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

import msgspec

from intertie.contracts.job import Cause, JobState
from intertie.ids import AttemptId
from intertie.lifecycle import JobEvent
from intertie.scheduler.core.rows import Attempt, AttemptState, File, Job, noted

REPLACED = "replaced"
"""Outcome of an attempt that succeeded and is not the job's: the platform pays it."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Who survives (None: nobody had to be chosen), and what becomes of the others."""

    survivor: AttemptId | None
    others: tuple[Attempt, ...] = ()


def choose(file: File, ended: Attempt, event: JobEvent, now: datetime) -> Chosen:
    """`ended` has come to `event`. A success survives if nobody does yet and the job is not over; then the others have lost."""
    job = file.job
    if event is not JobEvent.SUCCEED or job.survivor is not None or not _open(job):
        return Chosen(job.survivor)
    if not file.others and not ended.replaced:
        return Chosen(None)
    return Chosen(ended.record.attempt, tuple(_lost(other, ended, now) for other in file.others if other.live))


def _open(job: Job) -> bool:
    return not job.terminal and not (job.state is JobState.FINISHING and job.ending is JobEvent.SUCCEED)


def _lost(other: Attempt, survivor: Attempt, now: datetime) -> Attempt:
    """The live one, when another has succeeded: an offer is withdrawn, what may run is stopped."""
    why = f"attempt {survivor.record.number} has succeeded, and its result is the job's"
    if other.state is AttemptState.OFFERED:
        fields = {"state": AttemptState.WITHDRAWN.value, "ended_at": now, "reason": why}
        return noted(other, record=fields, live=False, holding=False)
    return noted(other, record={"replaced_by": survivor.record.attempt}, live=False, stop_cause=Cause.PLATFORM, stop_why=why)


def loser(ended: Attempt) -> Attempt:
    """What ran beside the survivor: no tenant pays twice for one result (field case BR-053)."""
    record = ended.record
    cause = record.cause if record.cause is Cause.SITE else Cause.PLATFORM
    outcome = REPLACED if record.outcome == "succeeded" else record.outcome
    return replace(ended, record=msgspec.structs.replace(record, cause=cause, outcome=outcome))


def is_awaited(job: Job, attempt: Attempt) -> bool:
    """The job waits for this attempt's result."""
    if job.survivor is not None:
        return job.survivor == attempt.record.attempt
    return attempt.record.generation == job.generation


def deliver(file: File, stored: Attempt) -> AttemptId | None:
    """Whose result the job's is, now that `stored`'s is at the gateway or could not be packed. Where the survivor's is gone, a loser's will do."""
    job = file.job
    if job.delivered is not None:
        return job.delivered
    if is_awaited(job, stored):
        if stored.record.result is not None:
            return stored.record.attempt
        kept = [other for other in file.others if other.record.result is not None and other.record.outcome in ("succeeded", REPLACED)]
        return kept[0].record.attempt if kept else None
    return None
