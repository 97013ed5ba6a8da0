"""What silence does to a job, and what comes of it when its site speaks again: promises, leases, survivors, in every order of arrival."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise

import msgspec
import pytest
from tests.core.test_scheduler_core import JOB, NOW, RESULT, SITE, SOURCE, Site, cancelled, placed, run

from intertie.contracts.job import Cause, JobState, OnSilence
from intertie.contracts.link import AttemptEntry, Lane, LaneState, ResultStored, Started
from intertie.contracts.site import DeviceKind
from intertie.errors import Conflict, Refused
from intertie.ids import CANARY, AttemptId, DeviceId, Digest, JournalId, PoolName, RoundId, SessionId, SiteName
from intertie.link.keeper import SiteRow
from intertie.planner import Decision
from intertie.scheduler.core import judge, silence
from intertie.scheduler.core.hearing import Hearing, at_head
from intertie.scheduler.core.interpret import Source, interpret
from intertie.scheduler.core.life import check_request, place, preempt
from intertie.scheduler.core.orders import Order, orders_of, stop_words
from intertie.scheduler.core.rows import Attempt, AttemptState, Change, File, Ignored, JobView, record_of
from intertie.scheduler.core.survivor import REPLACED

ELSEWHERE = SiteName("site-b")
SECOND = AttemptId("att-2")
LEASE_S = 1_800
WEEK = timedelta(days=7)


def rerun() -> File:
    """A job that asked to be run again, placed under a lease."""
    file = placed(restartable=True)
    assert file.attempt is not None
    job = replace(file.job, spec=msgspec.structs.replace(file.job.spec, on_silence=OnSilence.RERUN))
    return File(job, replace(file.attempt, lease_s=LEASE_S))


def running(file: File | None = None) -> File:
    site = Site()
    return run(file or rerun(), [site.claimed(), site.started()])


def changed(outcome: Change | Ignored) -> Change:
    assert isinstance(outcome, Change), outcome
    return outcome


def replaced(file: File | None = None) -> File:
    change = changed(silence.replace_silent(running(file), silent_s=1_900.0, lease_s=LEASE_S, now=NOW))
    return File(change.job, change.attempt)


# --- rerun -------------------------------------------------------------------------------------------------------------------------------------


def test_rerun_work_of_a_silent_site_is_queued_again_and_its_first_run_is_to_stop() -> None:
    """BR-053."""
    file = replaced()
    assert file.attempt is not None
    assert (file.job.state, file.attempt.state, file.attempt.live, file.attempt.holding) == (
        JobState.QUEUED,
        AttemptState.RUNNING,
        False,
        True,
    )
    assert orders_of(file.attempt, file.job) == (Order.STOP,)
    assert stop_words(file.attempt, file.job)[1] is Cause.PLATFORM


@pytest.mark.parametrize("which", ["wait", "not restartable", "no lease", "cancelled", "offered"])
def test_nothing_else_is_placed_again_on_silence(which: str) -> None:
    """LINK D1: a job that did not ask for it is never moved by silence."""
    file = running()
    attempt = file.attempt
    assert attempt is not None
    match which:
        case "wait":
            file = replace(file, job=replace(file.job, spec=msgspec.structs.replace(file.job.spec, on_silence=OnSilence.WAIT)))
        case "not restartable":
            file = replace(file, job=replace(file.job, spec=msgspec.structs.replace(file.job.spec, restartable=False)))
        case "no lease":
            file = replace(file, attempt=replace(attempt, lease_s=0))
        case "cancelled":
            file = cancelled(file)
        case _:
            file = rerun()
    assert isinstance(silence.replace_silent(file, silent_s=1e9, lease_s=LEASE_S, now=NOW), Ignored)


def test_the_margin_holds_the_stop_the_kill_the_drift_and_one_try() -> None:
    assert silence.margin_s(LEASE_S) == 10 + 10 + 1.8 + 2


def test_rerun_of_what_does_no_harm_twice_only() -> None:
    from tests.core.test_scheduler_core import request

    asked = request()
    asked = msgspec.structs.replace(asked, spec=msgspec.structs.replace(asked.spec, on_silence=OnSilence.RERUN))
    with pytest.raises(Refused) as refused:
        check_request(asked)
    assert refused.value.code == "scheduler.rerun_not_restartable"


# --- survivors ---------------------------------------------------------------------------------------------------------------------------------


@dataclass
class Desk:
    """The job with both its attempts, as the store would hand them out."""

    file: File

    def __post_init__(self) -> None:
        assert self.file.attempt is not None
        self.job, self.attempts = self.file.job, {self.file.attempt.record.attempt: self.file.attempt}
        self.sites = {AttemptId("att-1"): Site(), SECOND: Site(generation=2)}

    def take(self, change: Change) -> None:
        self.job = change.job
        for attempt in (change.attempt, *change.others):
            if attempt is not None:
                self.attempts[attempt.record.attempt] = attempt

    def about(self, name: AttemptId | None) -> File:
        others = tuple(a for key, a in self.attempts.items() if key != name and a.state is not AttemptState.WITHDRAWN)
        return File(self.job, self.attempts[name] if name else None, others)

    def place(self) -> None:
        decision = Decision(
            JOB, self.job.tenant, ELSEWHERE, PoolName("cpu"), DeviceKind.SLOT, (DeviceId("slot-0"),), "u", None, 0, "it speaks", ()
        )
        self.take(changed(place(self.about(None), decision, SECOND, round_id=RoundId("r"), epoch=1, now=NOW, lease_s=LEASE_S)))

    def says(self, name: AttemptId, entry: AttemptEntry) -> Change | Ignored:
        entry = msgspec.structs.replace(entry, attempt=name)
        source = SOURCE if name == "att-1" else Source(ELSEWHERE, JournalId("jnl-2"))
        outcome = interpret(entry, self.about(name), source, NOW)  # type: ignore[arg-type]  # a scheduler entry
        if isinstance(outcome, Change):
            self.take(outcome)
        return outcome

    def step(self, what: str) -> None:
        name, what = (AttemptId("att-1") if what[0] == "1" else SECOND), what[2:]
        site = self.sites[name]
        match what:
            case "placed":
                self.place()
            case "claims":
                self.says(name, site.claimed())
            case "runs":
                self.says(name, site.claimed())
                self.says(name, site.started())
            case "succeeds":
                self.says(name, site.ended(result=RESULT))
            case "succeeds bare":
                self.says(name, site.ended())
            case "stored":
                self.says(name, site.say(ResultStored, result=RESULT))
            case "unstorable":
                self.says(name, site.say(ResultStored, result=None, text="disk full"))
            case "fails":
                self.says(name, site.ended("failed", Cause.JOB, code=1))
            case "fails with outputs":
                self.says(name, site.ended("failed", Cause.JOB, code=1, result=RESULT))
            case "stops":
                self.says(name, site.ended("cancelled", Cause.PLATFORM, code=None))
            case _:
                raise AssertionError(what)


FIRST = AttemptId("att-1")

# What happens after attempt 1 was replaced, in order; the job's state, who survives, whose result it is, how each attempt ended
ORDERS: list[tuple[list[str], JobState, AttemptId | None, AttemptId | None, dict[AttemptId, str | None]]] = [
    # The original had finished before anybody took its place.
    (["1 succeeds", "1 stored"], JobState.SUCCEEDED, FIRST, FIRST, {FIRST: "succeeded"}),
    (["1 succeeds bare"], JobState.SUCCEEDED, FIRST, None, {FIRST: "succeeded"}),
    # … when the replacement was offered, claimed, or running: a success on disk beats a run.
    (["2 placed", "1 succeeds", "1 stored"], JobState.SUCCEEDED, FIRST, FIRST, {FIRST: "succeeded", SECOND: None}),
    (["2 placed", "2 claims", "1 succeeds", "1 stored"], JobState.SUCCEEDED, FIRST, FIRST, {FIRST: "succeeded"}),
    (["2 placed", "2 runs", "1 succeeds", "2 stops", "1 stored"], JobState.SUCCEEDED, FIRST, FIRST, {SECOND: "cancelled"}),
    # … and the replacement succeeds all the same, before it is stopped: one result, and the platform pays the other.
    (["2 placed", "2 runs", "1 succeeds", "2 succeeds", "2 stored", "1 stored"], JobState.SUCCEEDED, FIRST, FIRST, {SECOND: REPLACED}),
    # The replacement finished first.
    (["2 placed", "2 runs", "2 succeeds", "2 stored", "1 succeeds", "1 stored"], JobState.SUCCEEDED, SECOND, SECOND, {FIRST: REPLACED}),
    (["2 placed", "2 runs", "2 succeeds", "1 succeeds", "1 stored", "2 stored"], JobState.SUCCEEDED, SECOND, SECOND, {FIRST: REPLACED}),
    (["2 placed", "2 runs", "2 succeeds bare", "1 stops"], JobState.SUCCEEDED, SECOND, None, {FIRST: "cancelled"}),
    # Its result cannot be had: the loser's was kept until then.
    (
        ["2 placed", "2 runs", "2 succeeds", "1 succeeds", "1 stored", "2 unstorable"],
        JobState.SUCCEEDED,
        SECOND,
        FIRST,
        {FIRST: REPLACED},
    ),
    # Both run: the replacement is kept, the original was told to stop, and stopped it is no candidate.
    (["2 placed", "2 runs", "1 stops", "2 succeeds", "2 stored"], JobState.SUCCEEDED, SECOND, SECOND, {FIRST: "cancelled"}),
    (["1 stops", "2 placed", "2 runs", "2 fails"], JobState.FAILED, None, None, {FIRST: "cancelled", SECOND: "failed"}),
    # A failure of the original that nobody could hear is no end of the job that runs again.
    (["1 fails", "2 placed", "2 runs", "2 succeeds", "2 stored"], JobState.SUCCEEDED, SECOND, SECOND, {FIRST: "failed"}),
    # The replacement has failed and its outputs are under way when the original's success is heard.
    (
        ["2 placed", "2 runs", "2 fails with outputs", "1 succeeds", "2 stored", "1 stored"],
        JobState.SUCCEEDED,
        FIRST,
        FIRST,
        {FIRST: "succeeded", SECOND: "failed"},
    ),
]


@pytest.mark.parametrize(("steps", "state", "survivor", "delivered", "outcomes"), ORDERS, ids=[", ".join(row[0]) for row in ORDERS])
def test_one_result_survives_in_every_order_of_arrival(
    steps: list[str], state: JobState, survivor: AttemptId | None, delivered: AttemptId | None, outcomes: dict[AttemptId, str | None]
) -> None:
    """LINK D21, BR-053: one survivor write, one delivery write, one payer."""
    desk = Desk(replaced())
    written = [(desk.job.survivor, desk.job.delivered)]
    for step in steps:
        desk.step(step)
        written.append((desk.job.survivor, desk.job.delivered))
    assert (desk.job.state, desk.job.survivor, desk.job.delivered) == (state, survivor, delivered)
    assert {name: desk.attempts[name].record.outcome for name in outcomes} == outcomes
    for before, after in pairwise(written):
        assert before[0] in (None, after[0]) and before[1] in (None, after[1]), "each is written once"
    for attempt in desk.attempts.values():
        record = attempt.record
        if record.outcome is not None and record.attempt != desk.job.survivor and record.outcome != "failed":
            assert record.cause is Cause.PLATFORM, f"the platform pays {record.attempt}, which was {record.outcome}"


def test_the_losers_result_is_kept_until_the_survivors_is_delivered() -> None:
    desk = Desk(replaced())
    for step in ("2 placed", "2 runs", "2 succeeds", "1 succeeds", "1 stored"):
        desk.step(step)
    assert orders_of(desk.attempts[FIRST], desk.job) == (), "its folder stays"
    desk.step("2 stored")
    assert orders_of(desk.attempts[FIRST], desk.job) == (Order.SETTLE,)


def test_the_first_placement_after_a_replacement_is_what_replaced_it() -> None:
    desk = Desk(replaced())
    desk.step("2 placed")
    assert desk.attempts[FIRST].record.replaced_by == SECOND


# --- lost --------------------------------------------------------------------------------------------------------------------------------------


def promised(file: File | None = None) -> File:
    change = changed(silence.promise(file or running(placed()), since=NOW, lost_after=WEEK, now=NOW))
    return File(change.job, change.attempt)


def test_the_first_silence_promises_a_date_that_nothing_moves() -> None:
    """LINK D22: the later of its limit's end and now, and a week; a restart or another leader finds it given."""
    file = promised()
    assert file.attempt is not None and file.attempt.record.lost_by == NOW + timedelta(hours=1) + WEEK
    assert isinstance(silence.promise(file, since=NOW, lost_after=timedelta(days=1), now=NOW + timedelta(days=3)), Ignored)
    assert isinstance(silence.lose(file, now=NOW + WEEK), Ignored)
    waiting = record_of(JobView(file.job, (file.attempt.record,)), silent_since=NOW).waiting
    assert waiting is not None and "2026-12-08 09:00Z" in waiting.text


def lost(file: File | None = None) -> File:
    change = changed(silence.lose(promised(file), now=NOW + WEEK + timedelta(hours=1)))
    return File(change.job, change.attempt)


def test_a_site_that_never_returns_leaves_its_job_lost_and_its_devices_counted() -> None:
    """BR-056."""
    file = lost()
    assert file.attempt is not None
    record = file.attempt.record
    assert (file.job.state, record.state, record.outcome, record.cause, record.ended_at) == (
        JobState.LOST,
        "lost",
        "unknown",
        Cause.UNKNOWN,
        None,
    )
    assert file.attempt.holding and not file.attempt.live


def test_a_cancel_of_what_cannot_be_reached_ends_the_job_at_that_date_only() -> None:
    """BR-052: never `cancelled` while processes were not seen gone."""
    file = cancelled(running(placed()))
    assert file.job.state is JobState.RUNNING
    file = lost(file)
    assert file.attempt is not None
    assert (file.job.state, orders_of(file.attempt, file.job)) == (JobState.LOST, (Order.STOP,))


@pytest.mark.parametrize(
    ("outcome", "cause", "state"),
    [("succeeded", None, JobState.SUCCEEDED), ("failed", Cause.SITE, JobState.FAILED), ("unknown", None, JobState.FAILED)],
)
def test_later_evidence_refines_what_was_lost_once(outcome: str, cause: Cause | None, state: JobState) -> None:
    site, file = Site(), lost(running(placed(restartable=True)))
    site.seq = 5
    file = run(file, [site.ended(outcome, cause, result=RESULT if outcome == "succeeded" else None)])
    assert file.attempt is not None
    assert (file.job.state, file.attempt.record.refined, file.attempt.holding) == (state, True, False)
    assert isinstance(interpret(site.ended("failed", Cause.JOB), file, SOURCE, NOW), Ignored)  # type: ignore[arg-type]  # a scheduler entry
    if outcome == "succeeded":
        assert run(file, [site.say(ResultStored, result=RESULT)]).job.delivered == file.attempt.record.attempt


def test_a_person_may_close_what_a_silent_site_holds_and_let_its_devices_go() -> None:
    file = running(placed())
    change = changed(silence.close(file, actor="op", reason="the lab is closed", site_gone=False, now=NOW))
    assert change.attempt is not None and (change.job.state, change.attempt.holding) == (JobState.LOST, True)
    gone = changed(silence.close(File(change.job, change.attempt), actor="op", reason="sold", site_gone=True, now=NOW))
    assert gone.attempt is not None and not gone.attempt.holding
    with pytest.raises(Conflict):
        silence.close(File(gone.job, gone.attempt), actor="op", reason="again", site_gone=True, now=NOW)


def test_a_person_may_give_up_outputs_that_come_no_more_and_the_job_ends_as_it_did() -> None:
    site = Site()
    file = run(placed(), [site.claimed(), site.started(), site.ended("succeeded", None, result=RESULT)])
    assert file.job.state is JobState.FINISHING
    change = changed(silence.close(file, actor="op", reason="the disk is gone", site_gone=True, now=NOW))
    assert change.attempt is not None and change.attempt.record.result is None
    assert (change.job.state, change.job.delivered, change.attempt.record.outcome) == (JobState.SUCCEEDED, None, "succeeded")
    with pytest.raises(Conflict):
        silence.close(File(change.job, change.attempt), actor="op", reason="again", site_gone=True, now=NOW)


def test_a_promise_is_void_when_its_site_lists_the_attempt() -> None:
    change = changed(silence.heard_again(promised(), now=NOW))
    assert change.attempt is not None and change.attempt.record.lost_by is None and change.job.state is JobState.RUNNING


# --- preempt -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("restartable", "state"), [(True, JobState.QUEUED), (False, JobState.FAILED)])
def test_a_preempted_run_is_queued_again_or_failed_and_the_platform_pays(restartable: bool, state: JobState) -> None:
    site = Site()
    file = run(placed(restartable=restartable), [site.claimed(), site.started()])
    change = changed(preempt(file, actor="op", reason="exams", now=NOW))
    file = File(change.job, change.attempt)
    assert file.attempt is not None and orders_of(file.attempt, file.job) == (Order.STOP,)
    assert stop_words(file.attempt, file.job) == ("preempted by op: exams", Cause.PREEMPTED)
    ended = changed(interpret(site.ended("cancelled", Cause.CANCELLED, code=None), file, SOURCE, NOW))  # type: ignore[arg-type]  # an entry
    assert ended.attempt is not None
    assert (ended.job.state, ended.attempt.record.cause, bool(ended.avoid)) == (state, Cause.PREEMPTED, restartable)
    assert ended.job.failures == 0, "no preemption eats the retry budget"


def test_what_holds_nothing_cannot_be_preempted_and_an_offer_is_withdrawn() -> None:
    change = changed(preempt(placed(), actor="op", reason="exams", now=NOW))
    assert change.attempt is not None and (change.job.state, change.attempt.state) == (JobState.QUEUED, AttemptState.WITHDRAWN)
    assert change.avoid and not change.fault
    with pytest.raises(Conflict):
        preempt(File(change.job), actor="op", reason="exams", now=NOW)


# --- who judges, and when ------------------------------------------------------------------------------------------------------------------------


def row(
    heard: int, *, running: tuple[AttemptId, ...] | None = (), at_head: bool = True, journal: str = "jnl-1", site: SiteName = SITE
) -> SiteRow:
    return SiteRow(
        site=site,
        lane=Lane.SCHEDULER,
        session=SessionId("ses-1"),
        journal=JournalId(journal),
        ack_through=heard,
        digest=Digest("d"),
        safe_through=heard,
        interpreted_through=heard,
        heard=heard,
        last_heard=NOW,
        last_nonce=heard,
        taken_nonce=heard,
        at_head=at_head,
        running=running,
        instruction_epoch=1,
        instruction_mark=1,
        settings_revision=1,
        clocks=None,
        clock_offset_s=0.0,
        clock_error_s=0.0,
        state=LaneState.OK,
    )


def hearing(*answers_s: float) -> Hearing:
    """In office since 0; the canary was answered then, and the site heard at 1 s."""
    found = Hearing(silent_s=75.0, office_s=0.0, canary_beat_s=5.0)
    found.listen([row(1)], 0.0)
    found.hear(row(2, running=(FIRST,)), 1.0)
    for sent_s in answers_s:
        found.canary_answered(sent_s)
    return found


def sung(until_s: float, *, quiet: tuple[float, float] = (0.0, 0.0)) -> Hearing:
    """The canary sang each 5 s, but not in between these."""
    return hearing(*(float(s) for s in range(0, int(until_s) + 1, 5) if not quiet[0] < s < quiet[1]))


LIMITS = judge.Limits(lease_s=LEASE_S)
ENOUGH_S = 1.0 + LEASE_S + silence.margin_s(LEASE_S) + 1.0


def found(attempt: Attempt, ears: Hearing, now_s: float, *, roll: judge.Roll | None = None, after: timedelta = timedelta(0)) -> list[str]:
    """Names of the rulings that are due."""
    findings = judge.find([attempt], ears, roll or judge.Roll(), LIMITS, now=NOW + after, now_s=now_s)
    return [one.decide.func.__name__ for one in findings.rulings]  # type: ignore[attr-defined]  # each is a partial of a rule


def test_a_site_that_speaks_out_of_another_journal_is_waited_for_until_a_date() -> None:
    """The promise that its new journal made may have been taken back by a look at the row of before."""
    ears = sung(5.0)
    ears.hear(row(3, journal="jnl-2"), 5.0)
    attempt = replace(leased(), journal=JournalId("jnl-1"))
    assert found(attempt, ears, 6.0) == ["promise"]
    ears.hear(row(4, running=(attempt.record.attempt,)), 6.0)
    assert found(attempt, ears, 7.0) == []


def leased() -> Attempt:
    file = running()
    assert file.attempt is not None
    return file.attempt


def test_silence_is_counted_from_the_latest_of_office_deafness_and_growth() -> None:
    """LINK D5, BR-054: the hub's own absence kills nothing."""
    assert found(leased(), sung(ENOUGH_S), ENOUGH_S) == ["replace_silent"]
    assert found(leased(), sung(ENOUGH_S), ENOUGH_S - 5) == ["promise"], "within lease and margin only a date is told"
    assert found(leased(), sung(ENOUGH_S, quiet=(600.0, 620.0)), ENOUGH_S) == ["promise"], "20 s of deafness begin the count anew"
    later = sung(ENOUGH_S)
    later.took_office(900.0)
    for sent_s in range(900, int(ENOUGH_S) + 1, 5):
        later.canary_answered(float(sent_s))
    assert found(leased(), later, ENOUGH_S) == ["promise"], "another leader counts afresh"


def test_without_a_canary_the_leader_is_deaf_for_ever_and_says_why() -> None:
    ears = hearing()
    assert found(leased(), ears, 1e6) == ["promise"]
    findings = judge.find([leased()], ears, judge.Roll(), LIMITS, now=NOW, now_s=1e6)
    assert [report.kind for report in findings.incidents] == ["scheduler.deaf"]
    assert "INTERTIE_CANARY_CREDS" in findings.incidents[0].text


def test_a_deaf_leader_says_that_a_promised_date_has_passed() -> None:
    """Also where nothing is leased: without ears no attempt is ever closed as lost."""
    attempt = promised(running(placed())).attempt
    assert attempt is not None
    for ears, after, kinds in (
        (hearing(), timedelta(days=7, hours=1), ["scheduler.deaf"]),
        (hearing(), timedelta(days=7), []),
        (sung(200.0), timedelta(days=7, hours=1), []),
    ):
        findings = judge.find([attempt], ears, judge.Roll(), LIMITS, now=NOW + after, now_s=200.0)
        assert [report.kind for report in findings.incidents] == kinds


@pytest.mark.parametrize(("version", "told", "counts"), [(1, 0, True), (2, 1, False), (2, 2, True)])
def test_after_a_restore_a_site_s_word_counts_once_it_knows_the_epoch(version: int, told: int, counts: bool) -> None:
    """It journals what it holds before it says that it knows; an agent of link version 1 holds no such list."""
    said = replace(row(3), version=version, epoch_told=told)
    assert (at_head(said, 1), at_head(said, 2)) == (True, counts)
    ears = Hearing(epoch=2)
    ears.hear(said, 2.0)
    assert (ears.caught_up(SITE), ears.told(SITE)) == (counts, counts)


def test_the_canary_is_nobodys_site() -> None:
    ears = hearing(0.0)
    ears.hear(row(9, site=CANARY), 2.0)
    ears.listen([row(10, site=CANARY)], 3.0)
    assert ears.row(CANARY) is None


def test_a_promise_is_kept_only_for_a_site_that_is_silent_at_its_date() -> None:
    attempt = promised(running(placed())).attempt
    assert attempt is not None
    due = timedelta(days=7, hours=1)
    assert found(attempt, sung(200.0), 200.0, after=due) == ["lose"]
    assert found(attempt, hearing(), 200.0, after=due) == [], "who is deaf knows of no silence"
    assert found(attempt, hearing(0.0, 5.0), 6.0, after=due) == ["heard_again"]


def test_what_a_site_at_head_lists_no_longer_is_gone_after_two_digests() -> None:
    """LINK D12, BR-056: its word, not its silence."""
    attempt, ears, roll = leased(), sung(5.0), judge.Roll()
    ears.hear(row(3, running=()), 2.0)
    assert found(attempt, ears, 2.0, roll=roll) == []
    assert found(attempt, ears, 3.0, roll=roll) == [], "the same digest again says nothing more"
    ears.hear(row(4, running=None, at_head=False), 4.0)
    assert found(attempt, ears, 4.0, roll=roll) == [], "behind head nothing is compared"
    ears.hear(row(5, running=()), 5.0)
    assert found(attempt, ears, 5.0, roll=roll) == ["gone"]
    ears.hear(row(6, running=(), journal="jnl-2"), 5.5)
    assert found(attempt, ears, 6.0, roll=roll) == ["promise"], "another journal's digest says nothing of what ran elsewhere: it has a date"


def test_gone_is_an_unknown_end_of_the_sites_with_an_incident() -> None:
    change = changed(silence.gone(running(placed()), actor="site/site-a", why="not listed", evidence="digest", now=NOW))
    assert change.attempt is not None and change.incident is not None
    assert (change.job.state, change.attempt.record.outcome, change.attempt.record.cause) == (JobState.FAILED, "unknown", Cause.SITE)


def test_a_stop_without_effect_becomes_an_incident() -> None:
    """BR-050: cancel_not_effective, with the site; metering goes on until the real end."""
    file = cancelled(running(placed()))
    assert file.attempt is not None
    attempt, ears, roll = replace(file.attempt, stop_answer="stopping"), sung(5.0), judge.Roll()
    for now_s, kinds in ((5.0, []), (500.0, []), (606.0, ["scheduler.stop_not_effective"])):
        ears.hear(row(10 + int(now_s), running=(FIRST,)), now_s)
        assert [r.kind for r in judge.find([attempt], ears, roll, LIMITS, now=NOW, now_s=now_s).incidents] == kinds


def test_evidence_that_a_replaced_run_goes_on_moves_nobody() -> None:
    """BR-053: it is told to stop, its reports change only itself."""
    desk = Desk(replaced())
    desk.step("2 placed")
    before = desk.job
    assert isinstance(desk.says(FIRST, Site().say(Started, started=NOW, devices=[], native_id="7", account="u")), Ignored)
    assert desk.job == before and orders_of(desk.attempts[FIRST], desk.job) == (Order.STOP,)
