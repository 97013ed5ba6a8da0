"""What the hub makes of a site's own queue: it waits there, its words stand beside, it is suspended and goes on, it never started."""

from __future__ import annotations

import pytest
from tests.core.test_scheduler_core import NOW, SOURCE, Site, cancelled, placed, run, states

from intertie.contracts.job import Cause, JobState, WaitReason
from intertie.contracts.link import AttemptEntry, Ended, NativeSeen, NotStarted, SiteQueued, Staging, Started, StopAnswered
from intertie.errors import Refused
from intertie.ids import DeviceId, InstructionId
from intertie.scheduler.core.interpret import interpret
from intertie.scheduler.core.rows import Change, File, Ignored, JobView, record_of


def queued(site: Site, **fields: object) -> AttemptEntry:
    told: dict[str, object] = {"native_id": "4711", "cluster": "c1", "native_state": "PENDING", "native_reason": "Priority", **fields}
    return site.say(SiteQueued, **told)  # type: ignore[arg-type]  # fields of the entry


def seen(site: Site, state: str, reason: str = "None", **fields: object) -> AttemptEntry:
    return site.say(NativeSeen, native_id="4711", native_state=state, native_reason=reason, **fields)  # type: ignore[arg-type]


def begun(site: Site) -> AttemptEntry:
    return site.say(
        Started, started=NOW, devices=[DeviceId("slot-0")], native_id="4711", account="u", nodes=["n1", "n2"], held_devices=["gpu-3"]
    )


def waiting(site: Site) -> File:
    return run(placed(), [site.claimed(), site.say(Staging), queued(site)])


def test_a_job_in_its_site_s_own_queue_is_said_to_be_there() -> None:
    site = Site()
    file = waiting(site)
    assert states(file) == ("site_queued", "staging")
    assert file.attempt is not None
    record = file.attempt.record
    assert (record.native_id, record.native_state, record.native_reason) == ("4711", "PENDING", "Priority")
    assert record.site_queued_at is not None and record.native_at == record.site_queued_at


def test_its_wait_reason_is_ours_with_the_scheduler_s_words_and_their_age_beside() -> None:
    site = Site()
    file = run(waiting(site), [seen(site, "PENDING", "Resources")])
    assert file.attempt is not None
    told = record_of(JobView(file.job, (file.attempt.record,))).waiting
    assert told is not None and told.reason is WaitReason.SITE_QUEUE
    assert "4711: PENDING (Resources), as of " in told.text


def test_it_starts_out_of_the_queue_on_nodes_and_cards_that_are_named() -> None:
    site = Site()
    file = run(waiting(site), [begun(site)])
    assert states(file) == ("running", "running") and file.attempt is not None
    assert (file.attempt.record.nodes, file.attempt.record.held_devices) == (["n1", "n2"], ["gpu-3"])
    assert record_of(JobView(file.job, (file.attempt.record,))).waiting is None


def test_a_suspension_moves_a_running_job_and_back_and_nothing_else() -> None:
    site = Site()
    file = run(waiting(site), [seen(site, "SUSPENDED", suspended=True)])
    assert file.job.state is JobState.SITE_QUEUED
    file = run(file, [begun(site), seen(site, "SUSPENDED", suspended=True)])
    assert states(file) == ("suspended", "running")
    again = run(file, [seen(site, "SUSPENDED", "Preemption", suspended=True)])
    assert states(again) == ("suspended", "running")
    assert states(run(again, [seen(site, "RUNNING")])) == ("running", "running")


def test_a_suspended_job_may_end_at_once() -> None:
    site = Site()
    file = run(waiting(site), [begun(site), seen(site, "SUSPENDED", suspended=True), site.ended("failed", Cause.PREEMPTED, code=None)])
    assert states(file)[1] == "ended" and file.job.terminal


def test_its_end_keeps_the_scheduler_s_last_words_and_its_suspended_time() -> None:
    site = Site()
    over = site.ended("failed", Cause.JOB, code=1)
    assert isinstance(over, Ended)
    told = site.say(
        Ended, **{name: getattr(over, name) for name in ("outcome", "cause", "exit_code", "signal", "reason", "started", "ended", "ran_us")},
        segments=1, quantity_milli_us=1, last_metering_seq=1, native_state="FAILED", native_reason="NonZeroExitCode", suspended_us=7,
    )  # fmt: skip
    file = run(waiting(site), [begun(site), told])
    assert file.attempt is not None
    record = file.attempt.record
    assert (record.native_state, record.native_reason, record.suspended_us, record.native_id) == ("FAILED", "NonZeroExitCode", 7, "4711")


@pytest.mark.parametrize("code", ["cancelled_at_site", "image_unfetched"])
def test_what_somebody_took_out_of_the_site_s_queue_goes_back_to_ours_without_fault_and_elsewhere(code: str) -> None:
    """So does what names an image that could not be fetched there: no job of others is kept from the site by it."""
    site = Site()
    entry = site.say(NotStarted, code=code, text="CANCELLED by 10042")
    change = interpret(entry, waiting(site), SOURCE, NOW)  # type: ignore[arg-type]  # a scheduler entry
    assert isinstance(change, Change)
    assert (change.job.state, change.fault) == (JobState.QUEUED, "") and change.avoid


def test_what_its_queue_dropped_in_time_is_no_fault_of_the_site() -> None:
    site = Site()
    entry = site.say(NotStarted, code="start_too_late", text="DEADLINE")
    change = interpret(entry, waiting(site), SOURCE, NOW)  # type: ignore[arg-type]  # a scheduler entry
    assert isinstance(change, Change) and (change.job.state, change.fault, change.avoid) == (JobState.QUEUED, "", "")


def test_a_cancel_of_what_waits_at_the_site_is_said_when_it_is_surely_not_to_start() -> None:
    site = Site()
    file = cancelled(waiting(site))
    assert file.job.state is JobState.SITE_QUEUED
    answer = site.say(StopAnswered, answer="not_started", instruction=InstructionId("ins-1"))
    assert states(run(file, [answer])) == ("cancelled", "not_started")


@pytest.mark.parametrize("late", ["queued", "seen"])
def test_words_that_come_late_or_again_move_nothing(late: str) -> None:
    site = Site()
    file = run(waiting(site), [begun(site), site.ended()])
    entry = queued(site) if late == "queued" else seen(site, "RUNNING", suspended=True)
    assert isinstance(interpret(entry, file, SOURCE, NOW), Ignored)  # type: ignore[arg-type]  # a scheduler entry
    again = waiting(Site())
    assert isinstance(interpret(queued(site), again, SOURCE, NOW), Ignored)  # type: ignore[arg-type]


def test_a_native_word_that_no_table_holds_is_refused() -> None:
    site = Site()
    with pytest.raises(Refused) as refused:
        interpret(seen(site, "X" * 300), waiting(site), SOURCE, NOW)  # type: ignore[arg-type]  # a scheduler entry
    assert refused.value.code == "scheduler.unfit"
