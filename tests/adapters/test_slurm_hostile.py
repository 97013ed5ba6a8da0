"""A tenant's job on a real Slurm that uses what Slurm lets every user do with a job of their own: nothing of it makes its run nobody's, or another's."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.adapters.test_slurm_cluster import CLOCK, Bench, bench

from intertie.agent.adapters.port import NativeOutcome, NativePhase
from intertie.agent.core.attempts import verdict
from intertie.agent.core.native import TWICE, Known, exit_of
from intertie.contracts.job import Cause

__all__ = ["bench"]
MINE = "scontrol update JobId=$SLURM_JOB_ID "


@pytest.mark.parametrize("comment", ["", "intertie/1/att-06h343v1s9pl16d07e4ubd4sm0/1/1", "x"])
async def test_a_job_that_changes_its_tag_is_still_itself(bench: Bench, comment: str) -> None:
    """BR-148: a user may write any comment on a job of theirs; where it works nobody changes."""
    since = CLOCK.now() - timedelta(seconds=60)
    made, _ = await bench.submit(f"{MINE}Comment='{comment}' && sleep 2; exit 7\n")
    ended = await bench.until(made.id, NativePhase.ENDED)
    assert ended.end is not None and (ended.end.outcome, ended.end.code) == (NativeOutcome.EXITED, 7)
    run = await bench.booked(made.id, since)
    assert run.native_id == ended.native_id and run.elapsed_us is not None and run.elapsed_us >= 2_000_000
    other = "att-06h343v1s9pl16d07e4ubd4sm0"
    assert not [one for one in await bench.cluster.accounting(since, CLOCK.now()) if one.tag == other]


async def test_a_job_that_cancels_itself_is_told_from_one_that_the_site_cancelled(bench: Bench) -> None:
    ended = await bench.end("sleep 1; scancel $SLURM_JOB_ID; sleep 600\n")
    assert ended.end is not None and ended.end.outcome is NativeOutcome.CANCELLED and ended.end.own
    made, job = await bench.submit("sleep 600\n")
    await bench.until(made.id, NativePhase.RUNNING)
    bench.slurm.run("scancel", job.native_id)
    ended = await bench.until(made.id, NativePhase.ENDED)
    assert ended.end is not None and ended.end.outcome is NativeOutcome.CANCELLED and not ended.end.own


async def test_a_job_cannot_make_slurm_s_word_for_a_failed_launch_its_end(bench: Bench) -> None:
    ended = await bench.end("sleep 1; kill -53 $PPID; sleep 600\n")
    assert ended.end is not None and ended.end.signal == 53


async def test_a_job_that_puts_itself_back_has_had_its_nodes_as_long_as_the_books_say(bench: Bench) -> None:
    """Any user may allow a requeue of a job of theirs, and ask for it: the second start is refused, and the first run stays what it was."""
    since = CLOCK.now() - timedelta(seconds=60)
    made, job = await bench.submit(f"{MINE}Requeue=1 && sleep 3; scontrol requeue $SLURM_JOB_ID; sleep 600\n")
    await bench.until(made.id, NativePhase.RUNNING)
    await bench.until(made.id, NativePhase.QUEUED)
    # Slurm lets what was put back wait for two minutes; an owner need not.
    bench.slurm.run("scontrol", "update", f"JobId={job.native_id}", "StartTime=now")
    ended = await bench.until(made.id, NativePhase.ENDED, limit_s=180)
    # By the stub's refusal, or (seen under load) by Slurm's own 1 before the stub could say it.
    assert ended.end is not None and ended.end.code in (TWICE, 1) and ended.restarts == 1
    assert ended.started is not None and ended.ended is not None
    # Beyond now: what began within the last second is asked for by name of no second that is over.
    runs = [one for one in await bench.cluster.accounting(since, CLOCK.now() + timedelta(seconds=60)) if one.tag == made.id]
    booked_us = sum(one.elapsed_us or 0 for one in runs)
    assert (ended.ended - ended.started) // timedelta(microseconds=1) == booked_us >= 3_000_000
    end = exit_of(ended, None, None, Known())
    assert (verdict(end, made).cause, end.ran_us) == (Cause.UNKNOWN, booked_us)
