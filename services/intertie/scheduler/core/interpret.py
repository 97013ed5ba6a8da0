"""What a site's entry does to a job. Entries come in order and at least once; a repeat, or one that comes too late, changes nothing.

Guards stand on admission, never on recording: what a site says has happened is written down even where it should not have happened, and
then its consequence (a stop) follows. What names an attempt nobody knows, or another site's, is raised as `Refused`: the lane keeps it in
quarantine with an incident.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from intertie.contracts.image import LONGEST as IMAGE_LENGTH
from intertie.contracts.job import Cause, JobState
from intertie.contracts.link import (
    AttemptEntry,
    Claimed,
    Ended,
    HeldTold,
    IslandedSubmit,
    JournalOpened,
    LostRange,
    NativeSeen,
    NotStarted,
    OfferRefused,
    ResultStored,
    SchedulerEntry,
    SettingsApplied,
    SiteQueued,
    Staging,
    Started,
    StopAnswered,
)
from intertie.errors import Refused
from intertie.ids import AttemptId, JournalId, SiteName
from intertie.lifecycle import JobEvent
from intertie.scheduler.core.rows import (
    OPEN_ATTEMPT,
    Attempt,
    AttemptState,
    Change,
    File,
    Ignored,
    Job,
    line,
    moved,
    noted,
)
from intertie.scheduler.core.survivor import Chosen, choose, deliver, is_awaited, loser
from intertie.text.native import native_words

# More tries through faults of sites would hide that something is wrong with the job itself.
MAX_FAILURES = 5

RESTART_CAUSES = frozenset({Cause.SITE, Cause.PLATFORM, Cause.PREEMPTED})
"""Ends that are no fault of the job, and known to be so: an unknown end is never run again by itself."""

DECLINED = "declined"
"""The owner's no to a request, with his words."""

NO_FAULT = frozenset(
    {
        # The owner's right, or the hub's own wish.
        "device_busy",
        "declined",
        "displaced",
        "paused",
        "withdrawn",
        "stopped",
        "cancelled",
        # Times and places by which a start is refused so that nothing runs twice.
        "start_too_late",
        "lease_over",
        "other_journal",
        "rebooted",
        # In a queue of the site's own, by a person of the site or its scheduler's rules.
        "cancelled_at_site",
        # The image that the job names: who wrote a digest that is nowhere would else keep every job from a site.
        "image_unfetched",
    }
)
"""Codes of a claim given up that say nothing against the site. Whatever else is given (`disk_full`, `disk_broken`, `not_startable`) is its fault."""

AVOID_CODES = frozenset({"cancelled_at_site", "image_unfetched"})
"""No fault of the site, and yet the same job must not come back there at once."""

UNKNOWN_ATTEMPT = "scheduler.unknown_attempt"
"""What a site says of an attempt that is not here. Entries set aside with this are read again when their attempt was adopted."""

BEFORE_A_START = (Claimed, Staging)
"""What says nothing any more of an attempt that its site says never started."""


# No clock of a host says anything outside these, not even one that was never set; beyond them tables and calendars end.
FIRST_INSTANT, LAST_INSTANT = datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)

# Ten years, of the largest job there may be (100,000 devices), cut once a second: what is more was never measured.
MOST_US = 10 * 366 * 86_400 * 1_000_000
MOST_MILLI_US = MOST_US * 1_000 * 100_000
MOST_SEGMENTS = MOST_US // 1_000_000

# Names that a site gives (a native id, an account, a code) stand in records that travel whole.
NAME_LENGTH = 256
# Devices whose use stands in an attempt's record, which travels whole.
MOST_DEVICE_USE = 256
# Devices named in a story's line.
DEVICES_TOLD = 16


@dataclass(frozen=True, slots=True)
class Source:
    """Whose entry it is: the site by its subject, never by the payload."""

    site: SiteName
    journal: JournalId

    @property
    def actor(self) -> str:
        return f"site/{self.site}"


def interpret(entry: SchedulerEntry, file: File | None, source: Source, now: datetime) -> Change | Ignored:
    """The ladder, in order; the first that applies decides."""
    if broken := unfit(entry):
        raise Refused("scheduler.unfit", f"{source.site} says what cannot be: {broken}")
    if isinstance(entry, SettingsApplied):
        return Ignored(f"settings revision {entry.revision} is in force at {source.site}")
    if isinstance(entry, JournalOpened | LostRange | HeldTold):
        return Ignored("it is about no single attempt: `ways.opened` compares")
    if file is None or file.attempt is None:
        if isinstance(entry, StopAnswered | OfferRefused | NotStarted):
            return Ignored(f"attempt {entry.attempt} is not known, and holds nothing")
        raise unknown(source.site, type(entry), entry.attempt)
    attempt = file.attempt
    if attempt.record.site != source.site:
        raise Refused("scheduler.foreign_attempt", f"{source.site} speaks of attempt {entry.attempt}, which is at {attempt.record.site}")
    named = (entry.epoch, entry.generation) == (attempt.record.epoch, attempt.record.generation)
    if not named and not isinstance(entry, StopAnswered) and not attempt.record.islanded_submit:
        raise Refused(
            "scheduler.generation",
            f"attempt {entry.attempt} is ({attempt.record.epoch}, {attempt.record.generation}), "
            f"{source.site} says ({entry.epoch}, {entry.generation})",
        )
    telling = _Telling(entry, file, attempt, source, now)
    if isinstance(entry, ResultStored):
        return _result_stored(telling, entry)
    if attempt.state is AttemptState.ENDED:
        return Ignored("the attempt has ended already")
    match entry:
        case Claimed():
            return _claimed(telling, entry)
        case OfferRefused():
            return _given_up(telling, AttemptState.REFUSED, entry.code, entry.text, fault=entry.fault and entry.code not in NO_FAULT)
        case NotStarted():
            return _given_up(telling, AttemptState.NOT_STARTED, entry.code, entry.text, fault=entry.code not in NO_FAULT)
        case Staging():
            return _staging(telling)
        case Started():
            return _started(telling, entry)
        case Ended():
            return _ended(telling, entry)
        case StopAnswered():
            return _stop_answered(telling, entry)
        case IslandedSubmit():
            return Ignored("the work was taken up already")
        case SiteQueued():
            return _site_queued(telling, entry)
        case NativeSeen():
            return _native_seen(telling, entry)


def unknown(site: SiteName, kind: type[AttemptEntry], attempt: AttemptId) -> Refused:
    return Refused(UNKNOWN_ATTEMPT, f"{site} says {kind.__name__} of attempt {attempt}, which is not known here")


def unfit(entry: SchedulerEntry) -> str:
    """What of an entry no honest host can say and no table can hold; empty if nothing. A wrong clock is honest."""
    for name in ("at", "started", "ended"):
        moment = getattr(entry, name, None)
        if isinstance(moment, datetime) and not FIRST_INSTANT <= moment < LAST_INSTANT:
            return f"{name} {moment.isoformat()} is in no century of ours"
    for name, most in (
        ("ran_us", MOST_US),
        ("suspended_us", MOST_US),
        ("quantity_milli_us", MOST_MILLI_US),
        ("segments", MOST_SEGMENTS),
        ("last_metering_seq", 2**63 - 1),
    ):
        if (number := getattr(entry, name, 0)) > most:
            return f"{name} is {number:.1e}, at most {most} can be"
    for name in ("driver", "agent_version", "native_id", "account", "code", "native_state", "cluster"):
        if len(getattr(entry, name, "")) > NAME_LENGTH:
            return f"{name} is longer than {NAME_LENGTH} characters"
    if len(getattr(entry, "image", "")) > IMAGE_LENGTH:
        return f"image is longer than {IMAGE_LENGTH} characters"
    return ""


@dataclass(frozen=True, slots=True)
class _Telling:
    """An entry with its file: what every case needs."""

    entry: AttemptEntry
    file: File
    attempt: Attempt
    source: Source
    now: datetime

    @property
    def job(self) -> Job:
        return self.file.job

    @property
    def passed(self) -> int:
        """How far the attempt is; an end is past everything that is open."""
        return OPEN_ATTEMPT.index(self.attempt.state) if self.attempt.state in OPEN_ATTEMPT else len(OPEN_ATTEMPT)

    def change(
        self,
        job: Job,
        attempt: Attempt,
        what: str,
        why: str = "",
        *,
        fault: str = "",
        recovered: bool = False,
        avoid: str = "",
        others: tuple[Attempt, ...] = (),
    ) -> Change:
        """The change, with its line in the job's story."""
        told = line(
            job,
            what,
            self.source.actor,
            self.entry.at,
            self.now,
            why=why,
            attempt=attempt.record.attempt,
            evidence=f"entry {self.source.site}/{self.source.journal}/{self.entry.seq}",
            islanded=self.entry.islanded,
        )
        return Change(
            self.file,
            job,
            attempt,
            self.source.actor,
            why or what,
            self.now,
            (told,),
            fault=fault,
            recovered=recovered,
            avoid=avoid,
            others=others,
        )

    def to(self, event: JobEvent, **changes: object) -> Job:
        """The job after a move, if this attempt is its live one; else the job as it is: a stray attempt moves nobody's job."""
        return moved(self.job, event, self.now, **changes) if self.attempt.live else self.job

    def refined(self, event: JobEvent, **changes: object) -> Job:
        """The job that was closed as lost for this attempt's sake, after its one refinement."""
        return moved(self.job, event, self.now, **changes) if self.job.state is JobState.LOST and not self.attempt.replaced else self.job


def _claimed(telling: _Telling, entry: Claimed) -> Change | Ignored:
    """The site holds the devices. Claim and withdrawal meet on this row: whoever was on disk first has won."""
    if telling.attempt.state is not AttemptState.OFFERED:
        return Ignored(f"the attempt is {telling.attempt.state} already")
    fields: dict[str, object] = {"state": AttemptState.CLAIMED.value, "claimed_at": entry.at, "islanded": _islanded(telling)}
    differing = sorted(set(entry.devices) ^ set(telling.attempt.record.devices))
    why = f"devices differ from the offer: {', '.join(differing[:DEVICES_TOLD])}"[:4_000] if differing else ""
    return telling.change(telling.job, noted(telling.attempt, record=fields, journal=telling.source.journal), "claimed", why)


def _given_up(telling: _Telling, end: AttemptState, code: str, text: str, *, fault: bool) -> Change | Ignored:
    """Refused, or claimed and given up: it has no process and never will."""
    attempt = telling.attempt
    if attempt.state is AttemptState.WITHDRAWN:
        if attempt.withdrawal_seen:
            return Ignored("the withdrawal was answered already")
        return telling.change(telling.job, noted(attempt, withdrawal_seen=True), "withdrawal seen by the site", f"{code}: {text}")
    if attempt.state is AttemptState.LOST:
        return _never_ran_after_all(telling, code, text)
    if attempt.state not in OPEN_ATTEMPT:
        return Ignored(f"the attempt is {attempt.state} already")
    if attempt.state is AttemptState.RUNNING:
        return Ignored("it has started, and only its end ends it")
    fields: dict[str, object] = {"state": end.value, "ended_at": telling.entry.at, "reason": f"{code}: {text}"[:4_000]}
    # An owner who declines has answered: the request is over, and nobody is asked again by itself.
    declined = bool(attempt.record.offering) and code == DECLINED
    job = telling.to(JobEvent.CANCEL if telling.job.cancel or declined else JobEvent.REFUSE)
    what = "declined by the owner" if declined else "refused by the site" if end is AttemptState.REFUSED else "given up before it started"
    why = f"{code}: {text}"
    # A preemption that came before the start must not bring the job back to the same devices at once.
    preempted = attempt.stop_why if attempt.stop_cause is Cause.PREEMPTED else ""
    avoid = why if fault or code in AVOID_CODES else preempted
    ended = noted(attempt, record=fields, live=False, holding=False)
    return telling.change(job, ended, what, why, fault=why if fault else "", avoid=avoid)


def _never_ran_after_all(telling: _Telling, code: str, text: str) -> Change:
    """It was closed as lost at its promised date, and now its site says that it never started."""
    fields: dict[str, object] = {
        "state": AttemptState.NOT_STARTED.value,
        "ended_at": telling.entry.at,
        "reason": f"{code}: {text}"[:4_000],
        "refined": True,
    }
    job = telling.refined(JobEvent.CANCEL if telling.job.cancel else JobEvent.FAIL)
    return telling.change(job, noted(telling.attempt, record=fields, holding=False), "refined: it never started", f"{code}: {text}")


def _staging(telling: _Telling) -> Change | Ignored:
    if telling.passed >= OPEN_ATTEMPT.index(AttemptState.STAGING):
        return Ignored(f"the attempt is {telling.attempt.state} already")
    fields: dict[str, object] = {"state": AttemptState.STAGING.value, "islanded": _islanded(telling)}
    return telling.change(telling.to(JobEvent.STAGE), noted(telling.attempt, record=fields), "staging", "the go is at the site")


def _site_queued(telling: _Telling, entry: SiteQueued) -> Change | Ignored:
    """The site's own queue has it. The attempt stays what it is; where it waits is told by the job's state, and since when."""
    attempt = telling.attempt
    if telling.passed >= OPEN_ATTEMPT.index(AttemptState.RUNNING) or attempt.record.site_queued_at is not None:
        return Ignored(f"the attempt is {attempt.state} already, or its waiting is known")
    fields: dict[str, object] = {
        "state": AttemptState.STAGING.value,
        "site_queued_at": entry.at,
        "islanded": _islanded(telling),
        **_native(entry.native_id, entry.native_state, entry.native_reason, entry.at),
    }
    where = f"native id {entry.native_id}" + (f" on {entry.cluster}" if entry.cluster else "")
    said = native_words(entry.native_state, entry.native_reason)
    queued = noted(attempt, record=fields, journal=telling.source.journal)
    return telling.change(telling.to(JobEvent.ENTER_SITE_QUEUE), queued, "in the site's own queue", f"{where}{said and f': {said}'}")


def _native_seen(telling: _Telling, entry: NativeSeen) -> Change | Ignored:
    """What the site's own scheduler says has changed. It stands beside our state, which it moves between running and suspended alone."""
    attempt, job = telling.attempt, telling.job
    if not attempt.open:
        return Ignored(f"the attempt is {attempt.state} already")
    fields: dict[str, object] = _native(entry.native_id, entry.native_state, entry.native_reason, entry.at)
    if entry.nodes:
        fields["nodes"] = list(entry.nodes)
    runs = attempt.live and attempt.state is AttemptState.RUNNING
    if runs and entry.suspended and job.state is JobState.RUNNING:
        job = telling.to(JobEvent.SUSPEND)
    elif runs and not entry.suspended and job.state is JobState.SUSPENDED:
        job = telling.to(JobEvent.RESUME)
    said = native_words(entry.native_state, entry.native_reason)
    restarts = f"{entry.restarts} restarts of the scheduler's own" if entry.restarts else ""
    why = "; ".join(text for text in (said, restarts, entry.text) if text)
    return telling.change(job, noted(attempt, record=fields), "the site's scheduler says", why)


def _native(native_id: str, state: str, reason: str, at: datetime) -> dict[str, object]:
    return {"native_id": native_id, "native_state": state, "native_reason": reason[:1_000], "native_at": at}


def _started(telling: _Telling, entry: Started) -> Change | Ignored:
    attempt = telling.attempt
    if attempt.state in (AttemptState.RUNNING, AttemptState.LOST):
        return Ignored("the attempt is running already" if attempt.open else "it was closed as lost, and only its end refines that")
    fields: dict[str, object] = {
        "state": AttemptState.RUNNING.value,
        "started_at": entry.started,
        "ended_at": None,
        "native_id": entry.native_id,
        "account": entry.account or attempt.record.account,
        "nodes": list(entry.nodes) or attempt.record.nodes,
        "held_devices": list(entry.held_devices),
        "driver": entry.driver,
        "agent_version": entry.agent_version,
        "image": entry.image or attempt.record.image,
        "islanded": _islanded(telling),
    }
    stray = "" if attempt.live else f"although it was {attempt.state}; it will be stopped"
    job = telling.to(JobEvent.START)
    started = noted(attempt, record=fields, journal=telling.source.journal)
    # An owner who takes requests tells no native id.
    native = [f"native id {entry.native_id}"] if entry.native_id else []
    nodes = [f"on {', '.join(entry.nodes[:DEVICES_TOLD])}"] if entry.nodes else []
    where = " ".join([*native, *nodes, *([f"in {entry.image}"] if entry.image else [])])
    return telling.change(job, started, "started", stray or where, recovered=attempt.live)


def _ended(telling: _Telling, entry: Ended) -> Change | Ignored:
    """Every process was seen gone. The counts go on to metering; the job follows its outcome."""
    attempt, job = telling.attempt, telling.job
    cause = _cause(entry, attempt, cancelled=job.cancel is not None)
    fields: dict[str, object] = {
        "state": AttemptState.ENDED.value,
        "started_at": entry.started or attempt.record.started_at,
        "ended_at": entry.ended,
        "outcome": entry.outcome,
        "cause": cause,
        "exit_code": entry.exit_code,
        "reason": entry.reason,
        "ran_us": entry.ran_us,
        "segments": entry.segments,
        "quantity_milli_us": entry.quantity_milli_us,
        "last_metering_seq": entry.last_metering_seq,
        "islanded": _islanded(telling),
        "log_tail": entry.log_tail,
        "suspended_us": entry.suspended_us,
        "device_use": list(entry.device_use[:MOST_DEVICE_USE]),
        "refined": attempt.record.refined or attempt.state is AttemptState.LOST,
    }
    if entry.native_state:
        fields |= _native(attempt.record.native_id, entry.native_state, entry.native_reason, entry.at)
    ended = noted(attempt, record=fields, live=False, holding=False, result_pending=entry.result is not None)
    event, why = end_of(job, entry, cause)
    fault = why if cause is Cause.SITE and entry.outcome != "unknown" else ""
    if attempt.state is AttemptState.LOST and not attempt.replaced:
        after = telling.refined(JobEvent.FAIL if event is JobEvent.REQUEUE else event)
        return telling.change(after, ended, f"refined: {entry.outcome}", why, fault=fault)
    if attempt.replaced:
        return _replaced_ended(telling, entry, ended, why)
    chosen = choose(telling.file, ended, event, telling.now)
    failures = job.failures + (1 if cause in (Cause.SITE, Cause.PLATFORM) else 0)
    if event is not JobEvent.REQUEUE and entry.result is not None:
        back = job.state is not JobState.FINISHING
        after = telling.to(JobEvent.RETURN_RESULTS, failures=failures, ending=event, survivor=chosen.survivor) if back else job
        why = f"{why}; {entry.result.files} files are on their way back"
    else:
        after = telling.to(event, failures=failures, survivor=chosen.survivor)
    avoid = attempt.stop_why if event is JobEvent.REQUEUE and attempt.stop_cause is Cause.PREEMPTED else ""
    return telling.change(after, ended, f"ended: {entry.outcome}", why, fault=fault, avoid=avoid, others=chosen.others)


def _replaced_ended(telling: _Telling, entry: Ended, ended: Attempt, why: str) -> Change:
    """An attempt that another one replaced: only its success may still be the job's, and only if no other was chosen."""
    job = telling.job
    chosen = choose(telling.file, ended, JobEvent.SUCCEED, telling.now) if entry.outcome == "succeeded" else Chosen(job.survivor)
    if chosen.survivor != ended.record.attempt or job.survivor is not None:
        return telling.change(job, loser(ended), f"ended: {entry.outcome}", f"{why}; another attempt replaced it, and the platform pays it")
    files = entry.result.files if entry.result else 0
    if entry.result is not None and job.state is JobState.FINISHING:
        after = replace(job, ending=JobEvent.SUCCEED, survivor=chosen.survivor, site=telling.source.site, version=job.version + 1)
    elif entry.result is not None:
        after = moved(
            job, JobEvent.RETURN_RESULTS, telling.now, ending=JobEvent.SUCCEED, survivor=chosen.survivor, site=telling.source.site
        )
    else:
        after = moved(job, JobEvent.SUCCEED, telling.now, survivor=chosen.survivor, site=telling.source.site)
    told = f"{why}; it had finished although its site was silent, and its result is the job's" + (f"; {files} files" if files else "")
    return telling.change(after, ended, "ended: succeeded", told, others=chosen.others)


def _cause(entry: Ended, attempt: Attempt, *, cancelled: bool) -> Cause | None:
    """The hub's own wish where the site followed it; else the site's word; where it says none, only what follows from the outcome itself."""
    if entry.outcome == "cancelled" and attempt.stop_cause is not None:
        return attempt.stop_cause
    if entry.cause is not None or entry.outcome == "succeeded":
        return entry.cause
    if entry.outcome == "cancelled":
        return Cause.CANCELLED if cancelled else Cause.SITE
    return Cause.UNKNOWN


def end_of(job: Job, entry: Ended, cause: Cause | None) -> tuple[JobEvent, str]:
    """What an end means for the job, as an ordered ladder, and the words for it."""
    code = f"exit code {entry.exit_code}" if entry.exit_code is not None else "no exit code"
    told = f"{entry.reason or code}" + (f" (cause: {cause})" if cause else "")
    if entry.outcome == "succeeded":
        return JobEvent.SUCCEED, told
    if job.cancel is not None and cause is not Cause.JOB:
        return JobEvent.CANCEL, told
    if cause in RESTART_CAUSES and job.spec.restartable:
        failures = job.failures + (0 if cause is Cause.PREEMPTED else 1)
        if failures < MAX_FAILURES:
            return JobEvent.REQUEUE, f"{told}; it may be run again"
        return JobEvent.FAIL, f"{told}; {failures} attempts failed through no fault of the job, the limit is {MAX_FAILURES}"
    return JobEvent.FAIL, told


def _result_stored(telling: _Telling, entry: ResultStored) -> Change | Ignored:
    """Results are stored per attempt; whose is the job's is written once."""
    attempt, job = telling.attempt, telling.job
    if not attempt.result_pending:
        return Ignored("no result of this attempt is awaited")
    stored = noted(attempt, record={"result": entry.result}, result_pending=False)
    why = entry.text or (f"{entry.result.files} files, {entry.result.size} bytes" if entry.result else "nothing could be packed")
    delivered = deliver(telling.file, stored)
    after = job
    if job.state is JobState.FINISHING and job.ending is not None and is_awaited(job, attempt):
        after = moved(job, job.ending, telling.now, delivered=delivered)
    elif delivered != job.delivered:
        after = replace(job, delivered=delivered, version=job.version + 1)
    return telling.change(after, stored, "results stored" if entry.result else "no results", why)


def _stop_answered(telling: _Telling, entry: StopAnswered) -> Change | Ignored:
    """A stop reached the site. Where it found nothing that could have run, that ends the attempt; else its `Ended` will come."""
    attempt = telling.attempt
    nothing_ran = entry.answer in ("not_started", "unknown_attempt")
    if nothing_ran and attempt.state in (AttemptState.OFFERED, AttemptState.CLAIMED, AttemptState.STAGING):
        return _given_up(
            replace(telling, attempt=replace(attempt, stop_answer=entry.answer)),
            AttemptState.NOT_STARTED,
            "stopped",
            entry.answer,
            fault=False,
        )
    if attempt.stop_answer == entry.answer:
        return Ignored("the stop was answered already")
    answered = noted(attempt, stop_answer=entry.answer, withdrawal_seen=attempt.withdrawal_seen or nothing_ran)
    return telling.change(telling.job, answered, "stop reached the site", entry.answer)


def _islanded(telling: _Telling) -> bool:
    return telling.attempt.record.islanded or telling.entry.islanded
