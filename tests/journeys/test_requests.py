"""A pool whose owner gives no control away: offered, asked, accepted and declined by commands; and what is decided about a pool, end to end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from tests.journeys.stack import Stack, running_stack

from intertie.contracts.job import JobRecord, JobState
from intertie.contracts.modes import PoolHistory
from intertie.contracts.offerings import LocalRequests
from intertie.contracts.site import JobOffering, PoolRecord, SitesReply

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROFILE = """
[[pool]]
pool = "desk"
mode = "service"
accelerator = "none"
count = 2
memory_mib = 4096
interconnect = "none"
task_types = ["batch"]
lendable = { devices = 0 }
"""
RULES = """
[[job_offering]]
name = "by-hand"
pool = "desk"
max_devices = 1
devices = 1
max_wall_s = 600
task_types = ["batch"]
price_per_hour = "6.00"
answer_within_s = 900
accept = "by-hand"

[[job_offering]]
name = "by-rule"
pool = "desk"
max_devices = 1
devices = 1
max_wall_s = 600
task_types = ["batch"]
price_per_hour = "6.00"
answer_within_s = 60
accept = "rule"
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as made:
        profile = made.folder / "desk.toml"
        await made.do(lambda: profile.write_text(PROFILE, encoding="utf-8"))
        await made.add_site("site-a", profile=profile)
        await made.do(lambda: (made.sites["site-a"].folder / "site.toml").write_text(RULES, encoding="utf-8"))
        await made.kill_agent("site-a")
        await made.until(lambda: len(pool(made).offerings) == 2, what="the offerings are told")
        await made.until(lambda: made.fresh("site-a"), what="the site is heard")
        yield made


def pool(stack: Stack) -> PoolRecord:
    (found,) = stack.admin.get("/v1/sites", SitesReply, {"site": "site-a"}).pools
    return found


def run(stack: Stack, who: str, *words: str, code: int = 0) -> str:
    """What a command prints, to whom (`user`, `admin`, or `owner` at the site's own door)."""
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(stack.folder), "INTERTIE_URL": stack.user.url}
    if who != "owner":
        token = stack.folder / f"{who}.token"
        token.touch(mode=0o600)
        token.write_text((stack.user if who == "user" else stack.admin)._token, encoding="ascii")
        env["INTERTIE_TOKEN_FILE"] = str(token)
    command = [sys.executable, "-m", "intertie.cli", *words]
    done = subprocess.run(command, env=env, cwd=stack.folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def local(stack: Stack, *words: str) -> str:
    return run(stack, "owner", "local", "--data", str(stack.sites["site-a"].folder), *words)


def ask(stack: Stack, offering: str, *words: str) -> str:
    script = Path(stack.folder) / "work.sh"
    script.write_text("#!/bin/sh\necho done by request\n", encoding="ascii")
    said = run(stack, "user", "request", f"site-a/{offering}", str(script), "--no-work", "--time", "5", *words)
    return said.splitlines()[0]


def waiting(stack: Stack, job: str) -> str | None:
    """The request of this job at the owner's door."""
    found = local(stack, "requests", "list", "--json")
    listed = msgspec.json.decode(found.splitlines()[0], type=LocalRequests)
    return next((one.attempt for one in listed.requests if one.job == job), None)


async def test_a_request_by_hand_is_accepted_at_the_owners_door_runs_and_is_on_the_statement(stack: Stack) -> None:
    job = await stack.do(lambda: ask(stack, "by-hand", "--budget", "1.00"))
    attempt = await stack.until(lambda: waiting(stack, job), what="the owner sees the request")
    record: JobRecord = await stack.do(lambda: stack.job(job))  # type: ignore[arg-type]  # an id
    assert record.waiting is not None and "an answer was promised by" in record.waiting.text
    await stack.do(lambda: local(stack, "requests", "accept", attempt))
    done = await stack.until(lambda: stack.ended(job), what="the request ends")  # type: ignore[arg-type]  # an id
    assert done.state is JobState.SUCCEEDED
    (tried,) = done.attempts
    assert (tried.offering, tried.native_id, tried.nodes, tried.devices) == ("by-hand", "", [], [f"req-{job}-1"])
    told = await stack.until(lambda: stack.complete_statement({done.job}), what="the statement is complete")
    assert next(line for line in told.lines if line.job == done.job).usage_milli_us > 0
    check = await stack.do(stack.check)
    assert not check.sum and not check.differing


async def test_the_owners_no_comes_back_with_his_words_and_costs_nothing(stack: Stack) -> None:
    job = await stack.do(lambda: ask(stack, "by-hand"))
    attempt = await stack.until(lambda: waiting(stack, job), what="the owner sees the request")
    await stack.do(lambda: local(stack, "requests", "decline", attempt, "--reason", "the desk is for exams this week"))
    done = await stack.until(lambda: stack.ended(job), what="the request ends")  # type: ignore[arg-type]  # an id
    assert (done.state, done.attempts[0].reason) == (JobState.CANCELLED, "declined: the desk is for exams this week")
    assert "exams this week" in await stack.do(lambda: run(stack, "user", "story", job))


async def test_a_request_by_rule_needs_nobody_and_no_ordinary_job_gets_there(stack: Stack) -> None:
    job = await stack.do(lambda: ask(stack, "by-rule"))
    done = await stack.until(lambda: stack.ended(job), what="the request ends")  # type: ignore[arg-type]  # an id
    assert done.state is JobState.SUCCEEDED
    script = stack.folder / "work.sh"
    said = await stack.do(lambda: run(stack, "user", "submit", str(script), "--no-work", "--site", "site-a", code=1))
    assert "the owner offers a service here" in said
    record = await stack.do(lambda: pool(stack))
    assert record.inventory is not None and record.inventory.devices == []
    assert [type(one) for one in record.offerings] == [JobOffering, JobOffering]


async def test_a_pools_mode_phase_and_downtimes_are_decided_by_commands_and_listed(stack: Stack) -> None:
    shown = await stack.do(lambda: run(stack, "admin", "site", "show", "site-a"))
    assert "site-a/desk is service: decided by tester (declared at joining)" in shown and "job offering by-hand" in shown
    await stack.do(
        lambda: run(
            stack,
            "admin",
            *("pool", "mode", "site-a/desk", "--outsider-decides", "no", "--response-time-held", "yes", "--reason", "asked the owner"),
        )
    )
    refused = await stack.do(
        lambda: run(stack, "admin", "pool", "phase", "site-a/desk", "parallel", "--reason", "two weeks were good", code=1)
    )
    assert "no meter spec is agreed" in refused and "intertie meterspec agree" in refused
    await stack.do(
        lambda: run(stack, "admin", "pool", "downtime", "add", "site-a/desk", "--start", "2d", "--end", "4h", "--reason", "new racks")
    )
    listed = await stack.do(lambda: run(stack, "admin", "pool", "downtime", "list", "site-a/desk"))
    assert "planned" in listed and "new racks" in listed
    await stack.do(lambda: run(stack, "admin", "pool", "phase", "site-a/desk", "suspended", "--reason", "the cooling failed"))
    forbidden = await stack.do(lambda: run(stack, "admin", "pool", "phase", "site-a/desk", "production", "--reason", "it works", code=1))
    assert "cannot become production" in forbidden
    found = await stack.do(lambda: stack.admin.get("/v1/sites/site-a/pools/desk/history", PoolHistory))
    kinds = ["move" if row.move else "downtime" if row.downtime else "decision" for row in found.rows]
    assert kinds == ["move", "downtime", "decision", "decision"]
    asked = ("request", "site-a/by-rule", str(stack.folder / "work.sh"), "--no-work", "--dry-run")
    said = await stack.do(lambda: run(stack, "user", *asked, code=1))
    assert "by-rule runs work for 600 s at most" in said


async def test_books_of_a_site_without_a_scheduler_of_its_own_are_said_to_be_none(stack: Stack) -> None:
    said = await stack.do(lambda: run(stack, "admin", "reconcile"))
    assert "only sites with a scheduler of their own keep one" in said
