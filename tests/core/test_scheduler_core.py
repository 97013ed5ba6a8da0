"""What entries, cancels and placements do to a job: the spine's sequences, and what must change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from intertie.contracts.job import Cause, JobSpec, JobState, OnSilence, Resources, ResultRef, SubmitJob
from intertie.contracts.link import (
    AttemptEntry,
    Claimed,
    Ended,
    NotStarted,
    OfferRefused,
    ResultStored,
    SettingsApplied,
    Staging,
    Started,
    StopAnswered,
)
from intertie.contracts.site import DeviceKind
from intertie.errors import Refused
from intertie.ids import AttemptId, DeviceId, Digest, InstructionId, JobId, JournalId, PoolName, RoundId, SiteName, TenantName
from intertie.planner import Decision
from intertie.scheduler.core.backoff import after_fault
from intertie.scheduler.core.interpret import MAX_FAILURES, Source, interpret
from intertie.scheduler.core.life import cancel, check_request, content_of, is_counted, new_job, place, queued
from intertie.scheduler.core.orders import Order, due
from intertie.scheduler.core.rows import AttemptState, Change, File, Ignored, JobView, record_of

NOW = datetime(2026, 12, 1, 8, 0, tzinfo=UTC)
SITE = SiteName("site-a")
SOURCE = Source(SITE, JournalId("jnl-1"))
ATTEMPT, JOB = AttemptId("att-1"), JobId("job-1")
RESULT = ResultRef(digest=Digest("sha256:" + "0" * 64), size=10, files=2)


def request(*, restartable: bool = False) -> SubmitJob:
    spec = JobSpec(
        name="one", script="true", env_names=["TOKEN"], resources=Resources(slots=1), restartable=restartable, on_silence=OnSilence.WAIT
    )
    return SubmitJob(tenant=TenantName("acme"), spec=spec, env={"TOKEN": "s"}, client_key="k1")


def placed(*, restartable: bool = False, number: int = 1) -> File:
    job = new_job(request(restartable=restartable), JOB, actor="ann", traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01", now=NOW)
    job = replace(job, attempts=number - 1, generation=number - 1)
    decision = Decision(
        job=JOB,
        tenant=job.tenant,
        site=SITE,
        pool=PoolName("cpu"),
        kind=DeviceKind.SLOT,
        devices=(DeviceId("slot-0"),),
        account="u",
        spec=None,
        spec_revision=0,
        why="the only pool that fits",
        rejections=(),
    )
    change = place(File(job), decision, ATTEMPT, round_id=RoundId("round-1"), epoch=1, now=NOW)
    assert isinstance(change, Change)
    return File(change.job, change.attempt)


class Site:
    """Writes entries as the site's journal would."""

    def __init__(self, generation: int = 1) -> None:
        self.seq, self.generation = 0, generation

    def _base(self, islanded: bool) -> dict[str, object]:
        self.seq += 1
        return {
            "seq": self.seq,
            "at": NOW + timedelta(seconds=self.seq),
            "attempt": ATTEMPT,
            "job": JOB,
            "epoch": 1,
            "generation": self.generation,
            "islanded": islanded,
        }

    def say(self, kind: type[AttemptEntry], *, islanded: bool = False, **fields: object) -> AttemptEntry:
        return kind(**self._base(islanded), **fields)  # type: ignore[arg-type]  # the test says what the entry holds

    def claimed(self) -> AttemptEntry:
        return self.say(Claimed, devices=[DeviceId("slot-0")])

    def started(self, *, islanded: bool = False) -> AttemptEntry:
        return self.say(Started, islanded=islanded, started=NOW, devices=[DeviceId("slot-0")], native_id="pid-7", account="u")

    def ended(
        self, outcome: str = "succeeded", cause: Cause | None = None, *, code: int | None = 0, result: ResultRef | None = None
    ) -> AttemptEntry:
        return self.say(
            Ended,
            outcome=outcome,
            cause=cause,
            exit_code=code,
            signal=None,
            reason="",
            started=NOW,
            ended=NOW + timedelta(seconds=6),
            ran_us=6_418_000,
            segments=1,
            quantity_milli_us=6_418_000_000,
            last_metering_seq=1,
            result=result,
        )


def run(file: File, entries: Sequence[AttemptEntry]) -> File:
    """Interpret in order; what is ignored changes nothing."""
    for entry in entries:
        outcome = interpret(entry, file, SOURCE, NOW)  # type: ignore[arg-type]  # every entry made here is a scheduler entry
        if isinstance(outcome, Change):
            file = File(outcome.job, outcome.attempt)
    return file


def states(file: File) -> tuple[str, str]:
    assert file.attempt is not None
    return file.job.state.value, file.attempt.state.value


def orders(file: File) -> tuple[Order, ...]:
    assert file.attempt is not None
    return due(file.attempt, cancelled=file.job.cancel is not None)


def cancelled(file: File) -> File:
    change = cancel(file, actor="ann", reason="enough", now=NOW)
    assert isinstance(change, Change)
    return File(change.job, change.attempt)


def test_a_job_runs_from_offer_to_success_and_each_step_calls_for_its_instruction() -> None:
    site, file = Site(), placed()
    assert (states(file), orders(file)) == (("placed", "offered"), (Order.OFFER,))
    file = run(file, [site.claimed()])
    assert (states(file), orders(file)) == (("placed", "claimed"), (Order.GO,))
    file = run(file, [site.say(Staging)])
    assert (states(file), orders(file)) == (("staging", "staging"), ())
    file = run(file, [site.started()])
    assert (states(file), orders(file)) == (("running", "running"), ())
    file = run(file, [site.ended(result=RESULT)])
    assert (states(file), orders(file)) == (("finishing", "ended"), ())
    file = run(file, [site.say(ResultStored, result=RESULT)])
    assert (states(file), orders(file)) == (("succeeded", "ended"), (Order.SETTLE,))
    assert file.attempt is not None and file.attempt.record.result == RESULT
    assert (file.attempt.record.ran_us, file.attempt.record.segments) == (6_418_000, 1)


def test_every_change_tells_its_story_with_evidence_and_trace() -> None:
    change = interpret(Site().claimed(), placed(), SOURCE, NOW)  # type: ignore[arg-type]  # a scheduler entry
    assert isinstance(change, Change)
    (told,) = change.story
    assert (told.actor, told.what, told.evidence, told.trace_id) == ("site/site-a", "claimed", "entry site-a/jnl-1/1", "a" * 32)


LIFE = ("claimed", "staging", "started", "ended")


@pytest.mark.parametrize("upto", range(1, 5))
def test_repeats_and_late_entries_change_nothing(upto: int) -> None:
    """BR-060, BR-023: an entry that comes again, or after what followed it, is harmless; an end stays."""
    site = Site()
    entries = [site.claimed(), site.say(Staging), site.started(), site.ended()][:upto]
    file = run(placed(), entries)
    for entry in entries:
        assert isinstance(interpret(entry, file, SOURCE, NOW), Ignored)  # type: ignore[arg-type]  # a scheduler entry


def test_claim_and_withdrawal_meet_on_one_row() -> None:
    """BR-049: whoever is on disk first has won; never both cancelled and running."""
    withdrawn = cancelled(placed())
    assert states(withdrawn) == ("cancelled", "withdrawn")
    assert orders(withdrawn) == (Order.WITHDRAW,)
    late = run(withdrawn, [Site().claimed()])
    assert states(late) == ("cancelled", "withdrawn")
    seen = run(late, [Site().say(NotStarted, code="withdrawn", text="")])
    assert orders(seen) == ()

    claimed = cancelled(run(placed(), [Site().claimed()]))
    assert states(claimed) == ("placed", "claimed")
    assert orders(claimed) == (Order.STOP,)


def test_a_cancel_wins_over_a_start_that_has_not_happened() -> None:
    """BR-048: the intent is durable; cancelled is said when the site says that nothing runs."""
    file = cancelled(run(placed(), [Site().claimed()]))
    assert Order.GO not in orders(file)
    file = run(file, [Site().say(StopAnswered, answer="not_started", instruction=InstructionId("i"))])
    assert states(file) == ("cancelled", "not_started")


def test_a_running_job_is_cancelled_when_its_processes_are_seen_gone() -> None:
    """BR-050: a stop that was answered is not an end."""
    site = Site()
    file = cancelled(run(placed(), [site.claimed(), site.started()]))
    file = run(file, [site.say(StopAnswered, answer="stopping", instruction=InstructionId("i"))])
    assert (states(file), orders(file)) == (("running", "running"), (Order.STOP,))
    file = run(file, [site.ended("cancelled", Cause.CANCELLED, code=None)])
    assert states(file) == ("cancelled", "ended")


def test_a_job_that_succeeded_before_the_stop_has_succeeded() -> None:
    site = Site()
    file = cancelled(run(placed(), [site.claimed(), site.started()]))
    assert run(file, [site.ended()]).job.state is JobState.SUCCEEDED


@pytest.mark.parametrize(
    ("outcome", "cause", "restartable", "state", "recorded"),
    [
        ("succeeded", None, False, JobState.SUCCEEDED, None),
        ("failed", Cause.JOB, True, JobState.FAILED, Cause.JOB),
        ("failed", Cause.SITE, True, JobState.QUEUED, Cause.SITE),
        ("failed", Cause.SITE, False, JobState.FAILED, Cause.SITE),
        ("failed", Cause.PLATFORM, True, JobState.QUEUED, Cause.PLATFORM),
        ("failed", Cause.PREEMPTED, True, JobState.QUEUED, Cause.PREEMPTED),
        ("failed", None, True, JobState.FAILED, Cause.UNKNOWN),
        # BR-056: gone without evidence is never run again by itself
        ("unknown", Cause.UNKNOWN, True, JobState.FAILED, Cause.UNKNOWN),
        ("unknown", None, True, JobState.FAILED, Cause.UNKNOWN),
        # ended by the site's own people
        ("cancelled", None, False, JobState.FAILED, Cause.SITE),
        ("cancelled", None, True, JobState.QUEUED, Cause.SITE),
    ],
)
def test_an_end_leads_where_its_outcome_and_cause_say(
    outcome: str, cause: Cause | None, restartable: bool, state: JobState, recorded: Cause | None
) -> None:
    site = Site()
    file = run(placed(restartable=restartable), [site.claimed(), site.started(), site.ended(outcome, cause)])
    assert file.attempt is not None
    assert (file.job.state, file.attempt.record.cause) == (state, recorded)


def test_failures_of_sites_end_at_a_limit_and_preemption_is_none() -> None:
    """BR-062: a retry budget that no preemption eats."""
    site, file = Site(), placed(restartable=True)
    file = replace(file, job=replace(file.job, failures=MAX_FAILURES - 1))
    entries = [site.claimed(), site.started()]
    assert run(file, [*entries, site.ended("failed", Cause.SITE)]).job.state is JobState.FAILED
    assert run(file, [*entries, site.ended("failed", Cause.PREEMPTED)]).job.state is JobState.QUEUED


@pytest.mark.parametrize(
    ("code", "fault", "waits"),
    [("device_busy", False, False), ("displaced", False, False), ("fetch_failed", True, True)],
)
def test_only_a_fault_costs_the_site_a_back_off(code: str, fault: bool, waits: bool) -> None:
    change = interpret(Site().say(OfferRefused, code=code, text="", fault=fault), placed(), SOURCE, NOW)  # type: ignore[arg-type]  # a scheduler entry
    assert isinstance(change, Change)
    assert (change.job.state, bool(change.fault)) == (JobState.QUEUED, waits)
    assert change.job.queued_at == NOW, "a job that was refused keeps its place"


def test_a_site_that_claims_and_never_starts_is_left_alone_for_a_while() -> None:
    site = Site()
    file = run(placed(), [site.claimed()])
    change = interpret(site.say(NotStarted, code="too_late", text="30 s"), file, SOURCE, NOW)  # type: ignore[arg-type]  # a scheduler entry
    assert isinstance(change, Change) and change.fault


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        *((code, False) for code in ("displaced", "start_too_late", "lease_over", "other_journal", "rebooted", "paused", "withdrawn")),
        *((code, True) for code in ("disk_full", "disk_broken", "not_startable")),
    ],
)
def test_what_is_given_up_for_no_fault_of_its_site_costs_it_nothing(code: str, fault: bool) -> None:
    site = Site()
    change = interpret(site.say(NotStarted, code=code, text=""), run(placed(), [site.claimed()]), SOURCE, NOW)  # type: ignore[arg-type]  # an entry
    assert isinstance(change, Change) and bool(change.fault) is fault
    assert change.job.state is JobState.QUEUED


def test_back_off_doubles_to_five_minutes() -> None:
    held, waits = None, []
    for _ in range(11):
        held = after_fault(SITE, held, "x", NOW)
        waits.append((held.until - NOW).total_seconds())
    assert waits[:3] == [1, 2, 4] and waits[-1] == 300


def test_results_of_a_lost_upload_still_end_the_job() -> None:
    site = Site()
    file = run(placed(), [site.claimed(), site.started(), site.ended(result=RESULT), site.say(ResultStored, result=None, text="disk full")])
    assert file.job.state is JobState.SUCCEEDED
    assert file.attempt is not None and file.attempt.record.result is None


def test_a_stray_run_is_recorded_and_stopped_and_moves_no_job() -> None:
    """Guards stand on admission, never on recording (LINK D11)."""
    site = Site()
    file = run(cancelled(placed()), [site.started()])
    assert (states(file), orders(file)) == (("cancelled", "running"), (Order.STOP,))
    file = run(file, [site.ended("cancelled", Cause.CANCELLED, code=None)])
    assert states(file) == ("cancelled", "ended")
    assert file.attempt is not None and file.attempt.record.ran_us == 6_418_000


def test_what_happened_islanded_is_marked_so() -> None:
    site = Site()
    file = run(placed(), [site.claimed(), site.started(islanded=True)])
    assert file.attempt is not None and file.attempt.record.islanded


@pytest.mark.parametrize("kind", ["unknown", "foreign", "generation"])
def test_what_cannot_be_believed_is_raised_for_quarantine(kind: str) -> None:
    """BR-148: a site speaks of its own attempts only."""
    file = None if kind == "unknown" else placed()
    source = Source(SiteName("site-b"), JournalId("j")) if kind == "foreign" else SOURCE
    entry = Site(generation=2 if kind == "generation" else 1).started()
    with pytest.raises(Refused):
        interpret(entry, file, source, NOW)  # type: ignore[arg-type]  # a scheduler entry


def test_answers_about_attempts_that_hold_nothing_are_harmless() -> None:
    site = Site()
    for entry in (
        site.say(StopAnswered, answer="unknown_attempt", instruction=InstructionId("i")),
        site.say(NotStarted, code="x", text=""),
        SettingsApplied(seq=9, at=NOW, revision=3),
    ):
        assert isinstance(interpret(entry, None, SOURCE, NOW), Ignored)  # type: ignore[arg-type]  # a scheduler entry


def test_an_unknown_answer_does_not_end_what_was_seen_running() -> None:
    """Silence is not an answer: an agent that lost its memory has not proven that the processes are gone."""
    site = Site()
    file = cancelled(run(placed(), [site.claimed(), site.started()]))
    file = run(file, [site.say(StopAnswered, answer="unknown_attempt", instruction=InstructionId("i"))])
    assert states(file) == ("running", "running")


def test_a_second_cancel_changes_nothing() -> None:
    file = cancelled(run(placed(), [Site().claimed()]))
    assert isinstance(cancel(file, actor="bob", reason="", now=NOW), Ignored)
    assert isinstance(cancel(cancelled(placed()), actor="bob", reason="", now=NOW), Ignored)


def test_a_job_that_left_the_queue_is_not_placed() -> None:
    file = placed()
    decision = Decision(JOB, file.job.tenant, SITE, PoolName("cpu"), DeviceKind.SLOT, (DeviceId("slot-1"),), "u", None, 0, "", ())
    assert isinstance(place(file, decision, AttemptId("att-2"), round_id=RoundId("r"), epoch=1, now=NOW), Ignored)


def test_environment_values_are_forgotten_when_they_have_served() -> None:
    site, file = Site(), placed()
    change = interpret(site.claimed(), file, SOURCE, NOW)  # type: ignore[arg-type]  # a scheduler entry
    assert isinstance(change, Change) and not change.forget_env
    started = interpret(site.started(), File(change.job, change.attempt), SOURCE, NOW)  # type: ignore[arg-type]  # as above
    assert isinstance(started, Change) and started.forget_env
    ended = cancel(placed(), actor="ann", reason="", now=NOW)
    assert isinstance(ended, Change) and ended.forget_env


def test_the_same_content_is_known_by_its_job_and_other_content_is_not() -> None:
    one = request()
    assert content_of(JOB, one.spec, one.env) == content_of(JOB, one.spec, dict(one.env))
    assert content_of(JOB, one.spec, {"TOKEN": "other"}) != content_of(JOB, one.spec, one.env)
    assert content_of(JobId("job-2"), one.spec, one.env) != content_of(JOB, one.spec, one.env)


@pytest.mark.parametrize(
    ("env", "names", "code"),
    [
        ({"A": "1"}, [], "scheduler.env_names"),
        ({"A B": "1"}, ["A B"], "scheduler.env_name"),
        ({"A": "x" * 131_072}, ["A"], "scheduler.env_too_large"),
        ({f"A{n}": "x" * 6_000 for n in range(100)}, [f"A{n}" for n in range(100)], "scheduler.env_too_large"),
        ({"A": "x" * 2_000_000}, ["A"], "scheduler.env_too_large"),
        ({"bad-name": "x"}, ["bad-name"], "scheduler.env_name"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(env: dict[str, str], names: list[str], code: str) -> None:
    """BR-045, BR-110: before any site, and before any message, has to carry it."""
    spec = JobSpec(name="one", script="true", env_names=names)
    with pytest.raises(Refused) as refused:
        check_request(SubmitJob(tenant=TenantName("acme"), spec=spec, env=env, client_key="k"))
    assert refused.value.code == code


def test_a_silent_site_is_told_beside_the_state() -> None:
    site = Site()
    file = run(placed(), [site.claimed(), site.started()])
    assert file.attempt is not None
    record = record_of(JobView(file.job, (file.attempt.record,)), silent_since=NOW)
    assert (record.state, record.site_silent_since, record.waiting.reason if record.waiting else "") == (
        JobState.RUNNING,
        NOW,
        "site_silent",
    )


def test_only_what_the_tenant_pays_counts_against_its_allowance() -> None:
    site = Site()
    ran = [site.claimed(), site.started()]
    for outcome, cause, counted in (
        ("succeeded", None, True),
        ("failed", Cause.JOB, True),
        ("failed", Cause.SITE, False),
        ("unknown", None, False),
    ):
        file = run(placed(), [*ran, site.ended(outcome, cause)])
        assert file.attempt is not None and is_counted(file.attempt.record) is counted


def test_a_job_tells_the_planner_what_it_needs() -> None:
    job = placed().job
    assert (queued(job).wall_s, queued(job).resources) == (3_600, Resources(slots=1))
    assert AttemptState.OFFERED.value == "offered"
