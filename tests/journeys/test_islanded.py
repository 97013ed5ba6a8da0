"""Hub and bus gone: the owner's people go on, what had its go starts and ends, and afterwards the tenant's statement holds it, marked."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.journeys.stack import Stack, running_stack

from intertie.contracts.job import JobSpec, JobState


def local(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`intertie local …` as the owner's user would call it."""
    socket = stack.sites["site-a"].folder / "agent.sock"
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/nonexistent"}
    command = [sys.executable, "-m", "intertie.cli", "local", "--socket", str(socket), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


async def test_the_site_runs_on_alone_and_the_books_hold_it_afterwards() -> None:
    async with running_stack() as stack:
        await stack.add_site("site-a", slots=4)
        long = JobSpec(name="long", script="#!/bin/sh\nsleep 6\necho done\n", wall_s=60)
        job = await stack.do(lambda: stack.submit(long))
        await stack.until(lambda: stack.job(job).state is JobState.RUNNING, what="the job runs")
        await stack.hub_down()
        await stack.kill_agent("site-a")

        ran = await stack.do(lambda: local(stack, "submit", "--wait", "--", "/bin/echo", "still here"))
        assert ran.returncode == 0, ran.stderr
        assert "still here" in ran.stdout + ran.stderr
        status = json.loads((await stack.do(lambda: local(stack, "status", "--json"))).stdout)
        assert status["islanded_since"] is not None
        await stack.until(lambda: job not in running(stack), what="the hub's job ended while nobody listened", limit_s=30)

        await stack.hub_up()
        record = await stack.until(lambda: stack.ended(job), what="the site told how it ended")
        assert record.state is JobState.SUCCEEDED
        statement = await stack.until(lambda: stack.complete_statement({job}), what="the statement is complete")
        book = next(book for line in statement.lines if line.job == job for book in line.attempts)
        assert book.run_us == record.attempts[-1].ran_us
        assert any(charge.islanded for charge in book.charges)
        assert [line.job for line in statement.lines] == [job], "the owner's own use is never charged"


def running(stack: Stack) -> str:
    """What the site says it runs."""
    return local(stack, "status", "--json").stdout
