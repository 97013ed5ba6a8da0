"""What the scheduler keeps of a job, and the one shape in which every rule answers: a `Change`, or `Ignored` with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

import msgspec

from intertie.contracts.incident import ReportIncident
from intertie.contracts.job import (
    AttemptChanged,
    AttemptRecord,
    Cause,
    JobChanged,
    JobRecord,
    JobSpec,
    JobState,
    Rejection,
    StoryLine,
    Waiting,
    WaitReason,
)
from intertie.ids import AttemptId, Digest, JobId, JournalId, RoundId, SiteName, TenantName
from intertie.lifecycle import JOB_HELD, JOB_TERMINAL, JobEvent, move
from intertie.text.native import native_words


class AttemptState(StrEnum):
    """Where an attempt is. The last five are ends; `lost` alone may be refined, once."""

    OFFERED = "offered"
    CLAIMED = "claimed"
    STAGING = "staging"
    RUNNING = "running"
    ENDED = "ended"
    WITHDRAWN = "withdrawn"
    REFUSED = "refused"
    NOT_STARTED = "not_started"
    LOST = "lost"


OPEN_ATTEMPT = (AttemptState.OFFERED, AttemptState.CLAIMED, AttemptState.STAGING, AttemptState.RUNNING)
"""In the order in which an attempt passes them."""


VALUES_LOST = "values lost: "
"""Before the `content` of a job that was adopted without the values of its environment."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """A durable intent: it outlives restarts and wins over a start that has not happened."""

    at: datetime
    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class Job:
    """A job's row. `generation` is the last one given to an attempt; it only rises."""

    job: JobId
    tenant: TenantName
    submitted_by: str
    spec: JobSpec
    client_key: str
    content: Digest
    """Digest of what was asked, environment values included, salted with the job's id."""
    state: JobState
    submitted_at: datetime
    queued_at: datetime
    """When it first came into the queue; a return to the queue keeps its place."""
    ended_at: datetime | None = None
    cancel: Cancel | None = None
    ending: JobEvent | None = None
    """While `finishing`: the end that follows when its results are stored."""
    failures: int = 0
    """Attempts that ended through a fault of site or platform."""
    attempts: int = 0
    generation: int = 0
    site: SiteName | None = None
    """Where its live attempt is, or its last one ended."""
    survivor: AttemptId | None = None
    """Written once, where more than one attempt could be the job's (LINK D21)."""
    delivered: AttemptId | None = None
    """Written once: whose result the job's is."""
    epoch: int = 0
    """Of this service when the job came in. After a raise an older job may run somewhere without our knowing."""
    traceparent: str = ""
    version: int = 1

    @property
    def terminal(self) -> bool:
        return self.state in JOB_TERMINAL

    @property
    def held(self) -> bool:
        return self.state in JOB_HELD

    @property
    def values_lost(self) -> bool:
        """It was asked for with values of the environment that this hub does not have: what runs has them, and it can never be run again."""
        return self.content.startswith(VALUES_LOST)

    @property
    def trace_id(self) -> str:
        parts = self.traceparent.split("-")
        return parts[1] if len(parts) == 4 else ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt's row: its public record, and what only the scheduler needs."""

    record: AttemptRecord
    wall_s: int
    live: bool = True
    """It is the job's one holder."""
    holding: bool = True
    """Its devices are counted at its site: also of one that was replaced or lost, until the site's word frees them."""
    result_pending: bool = False
    """Its outputs wait at the site for the gateway."""
    stop_answer: str = ""
    withdrawal_seen: bool = False
    """The site has answered the withdrawal: it will never start."""
    stop_cause: Cause | None = None
    """Why the hub wants it to end, other than by its job's cancellation: `platform` when another attempt replaced it, `preempted`."""
    stop_why: str = ""
    lease_s: int = 0
    """Above 0 for `rerun` work: its supervisor stops it so long after its site's last sync."""
    journal: JournalId | None = None
    """The site's journal that holds it. None before its claim."""

    @property
    def replaced(self) -> bool:
        """Its site was silent beyond its lease, or another attempt's result counts; what it still says moves the job only as a survivor."""
        return self.stop_cause is Cause.PLATFORM

    @property
    def open(self) -> bool:
        return self.state in OPEN_ATTEMPT

    @property
    def state(self) -> AttemptState:
        return AttemptState(self.record.state)


@dataclass(frozen=True, slots=True)
class File:
    """A job with the attempt in question (the live one, or the one that an entry names)."""

    job: Job
    attempt: Attempt | None = None
    others: tuple[Attempt, ...] = ()
    """Further attempts of the job that run, have succeeded, or are not known to have ended."""


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of a file. Rows carry their new versions; the store writes them with events and story in one transaction."""

    before: File
    job: Job
    attempt: Attempt | None
    actor: str
    reason: str
    at: datetime
    story: tuple[StoryLine, ...] = ()
    fault: str = ""
    """Why the site is to be left alone for a while; empty: no fault."""
    recovered: bool = False
    """The site started something: earlier faults are forgotten."""
    avoid: str = ""
    """Why this job keeps away from the attempt's site for a while; empty: it does not."""
    others: tuple[Attempt, ...] = ()
    """Others of `before.others` that change with it."""
    incident: ReportIncident | None = None
    """What a person must be told, in the same transaction."""

    @property
    def job_event(self) -> JobChanged | None:
        """The event of the job's change, if it changed."""
        if self.job.version == self.before.job.version:
            return None
        return job_changed(self.job, self.before.job.state, self.actor, self.reason, self.at)

    @property
    def attempt_event(self) -> AttemptChanged | None:
        """The event of the attempt's change, if it changed."""
        before = self.before.attempt.record.version if self.before.attempt else 0
        if self.attempt is None or self.attempt.record.version == before:
            return None
        return AttemptChanged(version=self.attempt.record.version, record=self.attempt.record, wall_s=self.attempt.wall_s)

    @property
    def other_events(self) -> tuple[AttemptChanged, ...]:
        """Events of the others that change with it."""
        return tuple(AttemptChanged(version=a.record.version, record=a.record, wall_s=a.wall_s) for a in self.others)

    @property
    def forget_env(self) -> bool:
        """Environment values have served: the process has them, or never will."""
        return self.job.terminal or (self.attempt is not None and self.attempt.live and self.attempt.state is AttemptState.RUNNING)


@dataclass(frozen=True, slots=True)
class Ignored:
    """Nothing changes, and why."""

    why: str


def job_changed(job: Job, previous: JobState | None, actor: str, reason: str, at: datetime) -> JobChanged:
    return JobChanged(
        version=job.version,
        job=job.job,
        tenant=job.tenant,
        site=job.site,
        name=job.spec.name,
        state=job.state,
        previous=previous,
        actor=actor,
        reason=reason,
        at=at,
    )


def moved(job: Job, event: JobEvent, at: datetime, **changes: object) -> Job:
    """The job after a move of its life, one version higher; `IllegalMove` with its story if there is none. What cannot be run again fails instead of
    going back to the queue."""
    if job.values_lost and event in (JobEvent.REFUSE, JobEvent.REQUEUE):
        event = JobEvent.FAIL
    story = (f"job {job.job} version {job.version}", f"cancel {job.cancel}", f"ending {job.ending}", f"site {job.site}")
    state = move(job.state, event, story=story)
    ended_at = at if state in JOB_TERMINAL else None
    fields: dict[str, object] = {"state": state, "version": job.version + 1, "ended_at": ended_at, "ending": None, **changes}
    return replace(job, **fields)  # type: ignore[arg-type]  # fields of Job by name


def noted(attempt: Attempt, *, record: Mapping[str, object] | None = None, **changes: object) -> Attempt:
    """The attempt with changed fields, one version higher."""
    fields: dict[str, object] = {**(record or {}), "version": attempt.record.version + 1}
    after = msgspec.structs.replace(attempt.record, **fields)
    return replace(attempt, record=after, **changes)  # type: ignore[arg-type]  # fields of Attempt by name


@dataclass(frozen=True, slots=True)
class WaitVerdict:
    """Why a queued job waited, as of the round that found it first."""

    round: RoundId
    reason: WaitReason
    text: str
    rejections: tuple[Rejection, ...]
    since: datetime


@dataclass(frozen=True, slots=True)
class JobView:
    """A job with all that people ask of it."""

    job: Job
    attempts: tuple[AttemptRecord, ...] = ()
    verdict: WaitVerdict | None = None
    position: int = 0


def waiting_of(view: JobView, silent_since: datetime | None) -> Waiting | None:
    """The one canonical reason why the job does not run now; None if it runs or has ended."""
    job, verdict = view.job, view.verdict
    if job.state in (JobState.PENDING, JobState.QUEUED):
        if verdict is None:
            return Waiting(
                reason=WaitReason.NOT_ELIGIBLE, text="no round has looked at it yet", since=job.queued_at, position=view.position
            )
        return Waiting(
            reason=verdict.reason,
            text=verdict.text,
            round=verdict.round,
            since=verdict.since,
            position=view.position,
            rejections=list(verdict.rejections),
        )
    if job.held and silent_since is not None:
        promised = view.attempts[-1].lost_by if view.attempts else None
        text = f"site {job.site} is silent; what was last known stands, and nothing else is concluded"
        if promised is not None:
            text += f". If it is silent until {promised:%Y-%m-%d %H:%M}Z, the job is closed as lost and charged to nobody"
        return Waiting(reason=WaitReason.SITE_SILENT, text=text, since=silent_since)
    if job.state is JobState.SITE_QUEUED and view.attempts:
        last = view.attempts[-1]
        said = native_words(last.native_state, last.native_reason)
        text = f"{last.site} has it in its own queue as {last.native_id}{said and f': {said}'}"
        if last.native_at is not None:
            text += f", as of {last.native_at:%H:%M:%S}Z"
        return Waiting(reason=WaitReason.SITE_QUEUE, text=text, since=last.site_queued_at or last.offered_at)
    if job.state is JobState.PLACED and view.attempts:
        last = view.attempts[-1]
        if last.offering:
            return Waiting(reason=WaitReason.OFFERED, text=_asked(last), since=last.claimed_at or last.offered_at)
        text = f"offered to {last.site}/{last.pool}" if last.claimed_at is None else f"claimed by {last.site}/{last.pool}, not started yet"
        return Waiting(
            reason=WaitReason.OFFERED,
            text=text,
            since=last.claimed_at or last.offered_at,
            rejections=list(verdict.rejections if verdict else ()),
        )
    return None


def _asked(request: AttemptRecord) -> str:
    """A request is with its owner: what was promised, in words that stay true when it is not kept."""
    where = f"{request.site}/{request.offering}"
    if request.claimed_at is not None:
        return f"accepted by the owner of {where}, not started yet"
    by = f"{request.answer_by:%Y-%m-%d %H:%M}Z" if request.answer_by else "no time that was promised"
    return f"asked of the owner of {where}; an answer was promised by {by}. Without one you may cancel it: nothing has run"


def record_of(view: JobView, silent_since: datetime | None = None) -> JobRecord:
    """The job as people see it; a silent site is told beside the state and changes nothing else."""
    job = view.job
    since = silent_since if job.held else None
    return JobRecord(
        job=job.job,
        tenant=job.tenant,
        submitted_by=job.submitted_by,
        spec=job.spec,
        state=job.state,
        submitted_at=job.submitted_at,
        queued_at=job.queued_at,
        ended_at=job.ended_at,
        waiting=waiting_of(view, since),
        cancel_requested=job.cancel is not None,
        attempts=list(view.attempts),
        site_silent_since=since,
        survivor=job.survivor,
        delivered=job.delivered,
        trace_id=job.trace_id,
        version=job.version,
    )


def line(
    job: Job,
    what: str,
    actor: str,
    at: datetime,
    now: datetime,
    *,
    why: str = "",
    attempt: AttemptId | None = None,
    evidence: str = "",
    islanded: bool = False,
) -> StoryLine:
    """A line of the job's story, with the state that it led to."""
    return StoryLine(
        at=at,
        actor=actor,
        what=what,
        state=job.state,
        why=why[:4_000],
        attempt=attempt,
        evidence=evidence,
        trace_id=job.trace_id,
        recorded_at=now,
        islanded=islanded,
    )
