"""Work that asked to run again where its site is silent: its agent stopped beyond the lease, or killed for good; and work beside it that asked to wait.

The supervisor, not the agent, stops the first run when its lease is over; another site runs the job once more; one result is the job's, and the
statement says who pays for the other run.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import msgspec
from tests.journeys.far_stack import FarStack, far_stack

from intertie.contracts.job import JobRecord, JobSpec, JobState, OnSilence
from intertie.contracts.usage import Statement, WhoPays
from intertie.ids import AttemptId, JobId

LEASE_S = 30
# The lease, the time to stop, and beats to find out about each.
REPLACED_S = LEASE_S + 90
SETTINGS = {"INTERTIE_RERUN_LEASE_S": str(LEASE_S), "INTERTIE_BEAT_S": "0.4"}
# As long as nobody stops it, until the flag is there: then a run takes no time at all.
SCRIPT = '#!/bin/sh\necho "$INTERTIE_ATTEMPT" >> {folder}/{name}.runs\nuntil [ -e {folder}/quick ]; do sleep 0.2; done\necho "$INTERTIE_ATTEMPT" > result.txt\n'


def spec(folder: Path, name: str, on_silence: OnSilence) -> JobSpec:
    script = SCRIPT.format(folder=folder, name=name)
    rerun = on_silence is OnSilence.RERUN
    return JobSpec(name=name, script=script, wall_s=3_600, outputs=["result.txt"], on_silence=on_silence, restartable=rerun)


async def running(stack: FarStack, job: JobId) -> AttemptId:
    """The attempt that runs, once one does."""

    def looked() -> AttemptId | None:
        record = stack.job(job)
        return record.attempts[-1].attempt if record.state is JobState.RUNNING else None

    return await stack.until(looked, what=f"{job} runs")


def exit_record(stack: FarStack, site: str, attempt: AttemptId) -> dict[str, object] | None:
    """What the supervisor left when everything of the run was gone."""
    file = stack.sites[site].folder / "jobs" / attempt / "exit.json"
    return msgspec.json.decode(file.read_bytes().rstrip(), type=dict) if file.exists() else None


async def test_a_silent_sites_run_is_stopped_by_its_supervisor_and_the_job_has_one_result_and_one_payer() -> None:
    async with far_stack(("site-a", "site-b", "site-c"), settings=SETTINGS) as stack:
        folder = stack.folder / "shared"
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
        await stack.add_site("site-a", slots=2)
        again_a = await stack.do(partial(stack.submit, spec(folder, "again-a", OnSilence.RERUN)))
        waits = await stack.do(partial(stack.submit, spec(folder, "waits", OnSilence.WAIT)))
        first_a, first_waits = await running(stack, again_a), await running(stack, waits)
        await stack.add_site("site-b", slots=1)
        again_b = await stack.do(partial(stack.submit, spec(folder, "again-b", OnSilence.RERUN)))
        first_b = await running(stack, again_b)

        os.kill(stack.agent_pid("site-a"), signal.SIGSTOP)
        await stack.kill_for_good("site-b")
        await stack.add_site("site-c", slots=2)
        for site, attempt in (("site-a", first_a), ("site-b", first_b)):
            stopped = await stack.until(partial(exit_record, stack, site, attempt), what=f"{attempt} was stopped", limit_s=LEASE_S + 30)
            assert stopped["stopped_for"] == "lease_ended"
        seconds = {job: await moved(stack, job, first) for job, first in ((again_a, first_a), (again_b, first_b))}
        assert exit_record(stack, "site-a", first_waits) is None, "what waits for its site goes on"
        (folder / "quick").touch()
        records = {job: await stack.until(partial(stack.ended, job), what=f"{job} ends", limit_s=90) for job in (again_a, again_b)}

        os.kill(stack.agent_pid("site-a"), signal.SIGCONT)
        await stack.start_agent("site-b")
        records[waits] = await stack.until(partial(stack.ended, waits), what="what waited has ended and is told", limit_s=90)
        for job, second in seconds.items():
            assert records[job].survivor in (None, second)
            assert (folder / f"{records[job].spec.name}.runs").read_text(encoding="ascii").split()[1:] == [second]
            await one_result(stack, job, second)
        assert [attempt.attempt for attempt in records[waits].attempts] == [first_waits]
        assert all(record.state is JobState.SUCCEEDED for record in records.values())

        statement = await stack.until(lambda: stack.complete_statement(set(records)), what="the statement is complete", limit_s=90)
        for job, first in ((again_a, first_a), (again_b, first_b)):
            one_payer(statement, job, first, seconds[job])
        check = await stack.do(stack.check)
        assert not (check.sum or check.closed_with_hold or check.quarantined or check.differing or check.suspense_segments), check.text


async def moved(stack: FarStack, job: JobId, first: AttemptId) -> AttemptId:
    """The second attempt, at another site, once it runs."""

    def looked() -> AttemptId | None:
        record = stack.job(job)
        last = record.attempts[-1]
        return last.attempt if last.attempt != first and record.state is JobState.RUNNING else None

    second = await stack.until(looked, what=f"{job} runs again elsewhere", limit_s=REPLACED_S)
    record: JobRecord = await stack.do(partial(stack.job, job))
    before, after = record.attempts
    assert (before.replaced_by, after.site) == (second, "site-c")
    return second


async def one_result(stack: FarStack, job: JobId, attempt: AttemptId) -> None:
    """What the user fetches is the surviving attempt's, and stays it."""
    record: JobRecord = await stack.do(partial(stack.job, job))
    assert record.delivered in (None, attempt)
    with_result = [each.attempt for each in record.attempts if each.result is not None and each.outcome == "succeeded"]
    assert with_result == [attempt]


def one_payer(statement: Statement, job: JobId, first: AttemptId, second: AttemptId) -> None:
    """The tenant pays the run whose result it has; the other run's line names who pays."""
    books = {book.attempt: book for line in statement.lines if line.job == job for book in line.attempts}
    assert {charge.payer for charge in books[first].charges} == {WhoPays.PLATFORM}
    assert books[first].run_us >= (LEASE_S - 5) * 1_000_000
    assert {charge.payer for charge in books[second].charges} == {WhoPays.TENANT}
    assert books[first].complete and books[second].complete
