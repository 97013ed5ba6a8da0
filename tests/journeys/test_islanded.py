"""Hub and bus gone: the owner's people go on, what had its go starts and ends, and afterwards the tenant's statement holds it, marked."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.journeys.stack import TENANT, Stack, running_stack

from intertie.contracts.base import decode
from intertie.contracts.http import GrantBody
from intertie.contracts.job import GrantsReply, JobSpec, JobState
from intertie.contracts.local import Absence, LocalStatement, LocalStatus
from intertie.contracts.site import DeviceKind
from intertie.errors import Unavailable


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


async def test_a_tenant_works_on_by_its_allowance_and_the_owner_s_button_works_with_everything_gone() -> None:
    async with running_stack() as stack:
        await stack.add_site("site-a", slots=2)
        grant = GrantBody(kind=DeviceKind.SLOT, devices=1, card_hours=1)
        await stack.do(lambda: stack.admin.put(f"/v1/tenants/{TENANT}/grants/site-a", GrantsReply, grant))
        await stack.until(lambda: "allowance" in {one.what for one in status(stack).known}, what="the site knows the allowance")
        tenant = ["submit", "--json", "--tenant", TENANT, *(["--as", stack.account] if stack.account else []), "--wall", "60"]
        refused = await stack.do(lambda: local(stack, *tenant, "--", "true"))
        assert "grant.not_islanded" in refused.stderr and "intertie submit" in refused.stderr

        await stack.hub_down()
        await stack.until(lambda: status(stack).islanded_since, what="the site is alone")
        made = await stack.do(lambda: local(stack, *tenant, "--", "sh", "-c", "sleep 1; echo by allowance"))
        assert made.returncode == 0, made.stderr
        job = json.loads(made.stdout)["job"]
        over = await stack.do(lambda: local(stack, *tenant, "--", "true"))
        assert "grant.devices" in over.stderr, "no borrowing"
        told = await stack.do(lambda: local(stack, "logs", "-f", job))
        assert (told.returncode, told.stdout) == (0, "by allowance\n"), told.stderr
        preview = decode((await stack.do(lambda: local(stack, "statement", "--json"))).stdout, LocalStatement)
        assert [(row.job, row.islanded, row.told) for row in preview.lines] == [(job, True, False)]
        pressed = await stack.do(lambda: local(stack, "pause", "--until", "2h", "--reason", "visitors"))
        assert pressed.returncode == 0 and "PAUSED" in pressed.stdout, pressed.stderr
        await stack.kill_agent("site-a")
        await stack.until(lambda: is_paused(stack), what="the agent is back, and paused")

        await stack.hub_up()
        await stack.until(lambda: stack.site_record("site-a").paused, what="the hub shows the owner's right")
        gone = await stack.until(lambda: settled(stack), what="what was done alone is settled")
        assert (gone.by_allowance, gone.refused, gone.lent_ended) == (1, 1, 1) and gone.entries > 0
        statement = await stack.until(lambda: stack.complete_statement({job}), what="the statement is complete")
        (book,) = [book for line in statement.lines if line.job == job for book in line.attempts]
        assert any(charge.islanded for charge in book.charges)
        assert (await stack.do(lambda: local(stack, "resume"))).returncode == 0
        await stack.until(lambda: not stack.site_record("site-a").paused, what="lending goes on")


def status(stack: Stack) -> LocalStatus:
    """`Unavailable` while no agent answers."""
    told = local(stack, "status", "--json")
    if told.returncode != 0:
        raise Unavailable("test.no_agent", told.stderr)
    return decode(told.stdout, LocalStatus)


def is_paused(stack: Stack) -> bool:
    told = status(stack).paused
    return told is not None and told.paused


def settled(stack: Stack) -> Absence | None:
    """The last absence, once all that was done in it is settled."""
    gone = status(stack).absence
    return gone if gone is not None and gone.told is not None and gone.settled == gone.to_settle == 1 else None


def lent(stack: Stack) -> int:
    """Federation jobs that hold devices, as the site itself says."""
    told: int = json.loads(local(stack, "status", "--json").stdout)["lent_jobs"]
    return told
