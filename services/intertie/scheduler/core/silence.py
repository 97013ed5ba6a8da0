"""What silence may do to an attempt, and nothing else may: a promise, its date, a lease that was declared beforehand, a named person's word.

Every rule here is asked by the leader alone, with times of its own monotonic clock where silence is measured (`hearing`), and with the hub's wall
clock where a date was promised to people. The wall clock moves no attempt by itself: `lost` needs a site that is silent at its date.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from intertie.contracts.incident import ReportIncident, Severity
from intertie.contracts.job import Cause, JobState
from intertie.errors import Conflict
from intertie.lifecycle import JobEvent
from intertie.scheduler.core.interpret import MAX_FAILURES
from intertie.scheduler.core.life import PLANNER, reruns
from intertie.scheduler.core.orders import STOP_GRACE_S
from intertie.scheduler.core.rows import Attempt, AttemptState, Change, File, Ignored, Job, line, moved, noted
from intertie.scheduler.core.survivor import deliver, is_awaited

# A supervisor kills what ignores its stop this long after the grace.
KILL_S = 10.0
# How far two honest clocks part over a lease.
DRIFT = 0.001
# One try of a sync: the site counts from its sending, we from its commit.
TRY_S = 2.0
# ADR 0006: a week for people to look after a site, beyond what the work itself could take.
LOST_AFTER = timedelta(days=7)


def margin_s(lease_s: float) -> float:
    """Seconds beyond its lease after which `rerun` work has surely been stopped by its supervisor."""
    return STOP_GRACE_S + KILL_S + DRIFT * lease_s + TRY_S


def replace_silent(file: File, *, silent_s: float, lease_s: float, now: datetime) -> Change | Ignored:
    """Its site was silent beyond the lease of work that asked for it: the job is queued again, and the attempt is to stop whenever its site is back."""
    job, attempt = file.job, file.attempt
    if attempt is None or not attempt.live or not attempt.open or attempt.state is AttemptState.OFFERED:
        return Ignored("nothing of it may run there by now")
    if not reruns(job) or job.cancel is not None or attempt.lease_s == 0 or not job.held:
        return Ignored("it waits for its site")
    site = attempt.record.site
    why = (
        f"{site} was silent for {silent_s:.0f} s, longer than the lease of {lease_s:.0f} s and {margin_s(lease_s):.0f} s to stop; "
        "by if_site_silent=rerun the job runs again elsewhere"
    )
    replaced = noted(attempt, live=False, stop_cause=Cause.PLATFORM, stop_why=f"another attempt replaced it: {why}"[:4_000])
    after = moved(job, JobEvent.REQUEUE, now)
    told = line(after, "replaced", PLANNER, now, now, why=why, attempt=attempt.record.attempt, evidence="rule if_site_silent=rerun")
    return Change(file, after, replaced, PLANNER, why, now, (told,))


def promise(file: File, *, since: datetime | None, lost_after: timedelta, now: datetime) -> Change | Ignored:
    """The first silence of its site: say when the attempt will be closed if nothing is heard until then. A promise that was given is not moved."""
    attempt = file.attempt
    if attempt is None or not attempt.open or attempt.state is AttemptState.OFFERED or attempt.record.lost_by is not None:
        return Ignored("no promise is due")
    over = (attempt.record.started_at or now) + timedelta(seconds=attempt.wall_s)
    by = max(over, now) + lost_after
    heard = f"since {since:%Y-%m-%d %H:%M:%S}Z" if since else "and was not heard by this hub"
    why = f"{attempt.record.site} is silent {heard}; silent until {by:%Y-%m-%d %H:%M}Z, the attempt is closed as lost, charged to nobody"
    return _about(file, noted(attempt, record={"lost_by": by}), "site silent", why, now)


def heard_again(file: File, *, now: datetime) -> Change | Ignored:
    """Its site speaks and lists it: the promise is void."""
    attempt = file.attempt
    if attempt is None or attempt.record.lost_by is None or not attempt.open:
        return Ignored("there was no promise")
    return _about(file, noted(attempt, record={"lost_by": None}), "site heard again", f"{attempt.record.site} holds it", now)


def _about(file: File, attempt: Attempt, what: str, why: str, now: datetime) -> Change:
    """A change of the attempt that moves no job."""
    told = line(file.job, what, PLANNER, now, now, why=why, attempt=attempt.record.attempt)
    return Change(file, file.job, attempt, PLANNER, why, now, (told,))


def lose(file: File, *, now: datetime) -> Change | Ignored:
    """The promised date has passed in silence."""
    attempt = file.attempt
    if attempt is None or not attempt.open or attempt.record.lost_by is None or now < attempt.record.lost_by:
        return Ignored("its date has not come")
    why = f"silent until {attempt.record.lost_by:%Y-%m-%d %H:%M}Z, as was promised; how it ended is not known"
    return _lost(file, attempt, PLANNER, why, now, evidence="rule lost_by")


def close(file: File, *, actor: str, reason: str, site_gone: bool, now: datetime) -> Change | Ignored:
    """A named person's word that an attempt is to wait no longer. `site_gone`: its devices are counted no longer either."""
    attempt = file.attempt
    assert attempt is not None, "an attempt was named"
    if attempt.state is AttemptState.LOST and site_gone and attempt.holding:
        return _about(file, noted(attempt, holding=False), "devices let go", f"{actor}: {reason}", now)
    if attempt.result_pending:
        return _without_results(file, attempt, actor, f"closed by {actor}: {reason}"[:4_000], now)
    if not attempt.open or attempt.state is AttemptState.OFFERED:
        raise Conflict("scheduler.attempt_closed", f"attempt {attempt.record.attempt} is {attempt.state}: there is nothing to wait for")
    change = _lost(file, attempt, actor, f"closed by {actor}: {reason}"[:4_000], now, evidence="a person's decision")
    return replace(change, attempt=replace(change.attempt, holding=False)) if site_gone and change.attempt else change


def _without_results(file: File, attempt: Attempt, actor: str, why: str, now: datetime) -> Change:
    """It has ended, and its outputs come no more: the job ends as it would have, without them (or with another attempt's)."""
    stored = noted(attempt, record={"result": None}, result_pending=False)
    delivered, job = deliver(file, stored), file.job
    if job.state is JobState.FINISHING and job.ending is not None and is_awaited(job, attempt):
        job = moved(job, job.ending, now, delivered=delivered)
    told = line(job, "no results", actor, now, now, why=why, attempt=attempt.record.attempt, evidence="a person's decision")
    return Change(file, job, stored, actor, why, now, (told,))


def _lost(file: File, attempt: Attempt, actor: str, why: str, now: datetime, *, evidence: str) -> Change:
    """Closed, outcome unknown, charged to nobody. Its devices stay counted at its site until that speaks."""
    fields: dict[str, object] = {"state": AttemptState.LOST.value, "outcome": "unknown", "cause": Cause.UNKNOWN, "reason": why[:4_000]}
    job = moved(file.job, JobEvent.LOSE, now) if attempt.live and file.job.held else file.job
    told = line(job, "lost", actor, now, now, why=why, attempt=attempt.record.attempt, evidence=evidence)
    return Change(file, job, noted(attempt, record=fields, live=False), actor, why, now, (told,))


def gone(file: File, *, actor: str, why: str, evidence: str, now: datetime) -> Change | Ignored:
    """The site's own word that it holds nothing of the attempt, though it had started it, and no end was told: unknown, and the site's to answer."""
    attempt = file.attempt
    if attempt is None or not (attempt.open or attempt.state is AttemptState.LOST) or attempt.state is AttemptState.OFFERED:
        return Ignored("it has ended by now")
    started = attempt.record.started_at is not None
    fields: dict[str, object] = {
        "state": (AttemptState.ENDED if started else AttemptState.NOT_STARTED).value,
        "ended_at": now,
        "outcome": "unknown" if started else None,
        "cause": (Cause.PLATFORM if attempt.replaced else Cause.SITE) if started else None,
        "reason": why[:4_000],
        "refined": attempt.record.refined or attempt.state is AttemptState.LOST,
    }
    ended = noted(attempt, record=fields, live=False, holding=False)
    job = _after_gone(file.job, attempt, started, now)
    told = line(job, "gone", actor, now, now, why=why, attempt=attempt.record.attempt, evidence=evidence)
    return Change(file, job, ended, actor, why, now, (told,), incident=_gone_incident(attempt, why) if started else None)


def _after_gone(job: Job, attempt: Attempt, started: bool, now: datetime) -> Job:
    if not attempt.live or not job.held:
        return job
    if job.cancel is not None:
        return moved(job, JobEvent.CANCEL, now)
    if not started:
        return moved(job, JobEvent.REFUSE, now)
    # Nothing of it runs, by its site's word: restartable work may go on elsewhere (its own tries are bounded by `failures`).
    failures = job.failures + 1
    again = job.spec.restartable and failures < MAX_FAILURES
    return moved(job, JobEvent.REQUEUE if again else JobEvent.FAIL, now, failures=failures)


def _gone_incident(attempt: Attempt, why: str) -> ReportIncident:
    record = attempt.record
    return ReportIncident(
        key=f"scheduler.attempt_gone/{record.attempt}",
        kind="scheduler.attempt_gone",
        severity=Severity.CRITICAL,
        title=f"A run at {record.site} is gone without evidence",
        text=f"Attempt {record.attempt} of job {record.job}: {why}. Its end, exit code and usage were never told."[:4_000],
        site=record.site,
        tenant=record.tenant,
    )
