"""Hub and bus gone: the owner's people go on, what had its go starts and ends, and afterwards the tenant's statement holds it, marked."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.journeys.stack import Stack, running_stack

from intertie.contracts.job import JobSpec, JobState


def local(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`intertie local …` as the owner's people call it."""
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/nonexistent"}
    command = [sys.executable, "-m", "intertie.cli", "local", "--data", str(stack.sites["site-a"].folder), *arguments]
    return subprocess.run(command, env=env, cwd="/var/tmp", capture_output=True, text=True, timeout=60, check=False)


def local_run(stack: Stack, *command: str) -> str:
    """Submit and follow a command of the owner's own; what it wrote."""
    whom = ["--as", stack.account] if stack.account else []
    made = local(stack, "submit", "--json", *whom, "--", *command)
    assert made.returncode == 0, made.stderr
    told = local(stack, "logs", "-f", json.loads(made.stdout)["job"])
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


async def test_the_site_runs_on_alone_and_the_books_hold_it_afterwards() -> None:
    async with running_stack() as stack:
        await stack.add_site("site-a", slots=4)
        # Ends only when the test says so: after the hub is gone, before it is back.
        flag = stack.folder / "now"
        long = JobSpec(name="long", script=f"#!/bin/sh\nuntil [ -e {flag} ]; do sleep 0.1; done\n", wall_s=120)
        job = await stack.do(lambda: stack.submit(long))
        await stack.until(lambda: stack.job(job).state is JobState.RUNNING, what="the job runs")
        await stack.hub_down()
        await stack.kill_agent("site-a")

        await stack.until(lambda: local(stack, "status").returncode == 0, what="the agent is back from its disk")
        assert await stack.do(lambda: local_run(stack, "/bin/echo", "still here")) == "still here\n"
        status = json.loads((await stack.do(lambda: local(stack, "status", "--json"))).stdout)
        assert status["islanded_since"] is not None
        await stack.do(flag.touch)
        await stack.until(lambda: lent(stack) == 0 or None, what="the hub's job ended while nobody listened", limit_s=30)

        await stack.hub_up()
        record = await stack.until(lambda: stack.ended(job), what="the site told how it ended")
        assert record.state is JobState.SUCCEEDED
        statement = await stack.until(lambda: stack.complete_statement({job}), what="the statement is complete")
        book = next(book for line in statement.lines if line.job == job for book in line.attempts)
        assert book.run_us == record.attempts[-1].ran_us
        assert any(charge.islanded for charge in book.charges)
        assert [line.job for line in statement.lines] == [job], "the owner's own use is never charged"


def lent(stack: Stack) -> int:
    """Federation jobs that hold devices, as the site itself says."""
    told: int = json.loads(local(stack, "status", "--json").stdout)["lent_jobs"]
    return told
