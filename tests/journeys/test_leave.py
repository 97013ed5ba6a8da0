"""A site leaves by its owner's word: drained, told, settled, released, with a receipt that anybody can check, and nothing of it stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.journeys.stack import Stack, running_stack

from intertie.cli.leave import ReceiptFile
from intertie.contracts.base import decode
from intertie.contracts.job import JobSpec, JobState


def site_command(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`intertie site …` on the site's own machine."""
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/nonexistent"}
    command = [sys.executable, "-m", "intertie.cli", "site", *arguments]
    return subprocess.run(command, env=env, cwd=stack.folder, capture_output=True, text=True, timeout=150, check=False)


def leave(stack: Stack, receipt: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return site_command(stack, "leave", "--data", str(stack.sites["site-a"].folder), "--receipt", str(receipt), *more)


def begin(stack: Stack, receipt: Path, *more: str) -> subprocess.Popen[str]:
    """As `leave`, watched while it goes on."""
    command = [sys.executable, "-m", "intertie.cli", "site", "leave", "--data", str(stack.sites["site-a"].folder)]
    command += ["--receipt", str(receipt), *more]
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/nonexistent"}
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, env=env, cwd=stack.folder, stdin=nothing, stdout=pipe, stderr=pipe, text=True)


async def test_a_site_that_leaves_waits_for_what_runs_and_goes_with_a_receipt() -> None:
    async with running_stack() as stack:
        site = await stack.add_site("site-a", slots=2)
        flag, receipt = stack.folder / "now", stack.folder / "receipt.json"
        long = JobSpec(name="long", script=f"#!/bin/sh\nuntil [ -e {flag} ]; do sleep 0.1; done\n", wall_s=120)
        job = await stack.do(lambda: stack.submit(long))
        await stack.until(lambda: stack.job(job).state is JobState.RUNNING, what="the job runs")

        inside = await stack.do(lambda: site_command(stack, "leave", "--data", str(site.folder), "--receipt", str(site.folder / "r.json")))
        assert inside.returncode == 1 and "leave.receipt_place" in inside.stderr

        leaving = begin(stack, receipt, "--yes")
        waiting = JobSpec(name="late", script="#!/bin/sh\ntrue\n", wall_s=60)
        await stack.until(lambda: paused(stack), what="lending is paused")
        late = await stack.do(lambda: stack.submit(waiting))
        assert stack.job(job).state is JobState.RUNNING and leaving.poll() is None, "it waits for what runs"
        await stack.do(flag.touch)
        said, errors = await stack.do(lambda: leaving.communicate(timeout=120))
        assert leaving.returncode == 0, said + errors + stack.logs()
        assert stack.job(job).state is JobState.SUCCEEDED and stack.job(late).state is not JobState.RUNNING

        kept = decode(receipt.read_bytes(), ReceiptFile)
        assert (kept.totals.site, kept.totals.revoked) == ("site-a", True)
        assert kept.totals.attempts is None or kept.totals.attempts >= 1
        assert site.child is not None and site.child.poll() is not None, "the agent has ended"
        assert not (site.folder / "keys").exists() and not (site.folder / "journal.db").exists() and not (site.folder / "jobs").exists()
        checked = await stack.do(lambda: site_command(stack, "receipt", str(receipt)))
        assert checked.returncode == 0 and "genuine" in checked.stdout, checked.stderr
        forged = receipt.read_text().replace("site-a", "site-b")
        receipt.write_text(forged)
        assert (await stack.do(lambda: site_command(stack, "receipt", str(receipt)))).returncode == 1
        assert stack.complete_statement({job}) is not None


def paused(stack: Stack) -> bool:
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    command = [sys.executable, "-m", "intertie.cli", "local", "--data", str(stack.sites["site-a"].folder), "status"]
    return "PAUSED" in subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False).stdout


async def test_with_the_hub_away_it_is_said_what_the_leaving_waits_for_and_it_ends_by_itself_later() -> None:
    async with running_stack() as stack:
        site = await stack.add_site("site-a", slots=2)
        receipt = stack.folder / "receipt.json"
        await stack.hub_down()
        with begin(stack, receipt) as watched:
            assert watched.stderr is not None
            said = ""
            while "the hub is not heard" not in said:
                said += await stack.do(watched.stderr.readline)
                assert watched.poll() is None, said
            watched.terminate()
        await stack.kill_agent("site-a")  # The wish to leave lies on disk.
        await stack.hub_up()
        done = await stack.until(
            lambda: done if (done := leave(stack, receipt)).returncode == 0 or "Aborted" in done.stderr else None,
            what="it has left",
            limit_s=90,
        )
        assert receipt.exists(), done.stdout + done.stderr
        assert (site.folder / "keys").exists(), "nothing is removed without a word"
        again = await stack.do(lambda: leave(stack, receipt, "--yes", "--json"))
        assert again.returncode == 0 and decode(again.stdout, ReceiptFile).totals.site == "site-a", again.stderr
        assert not (site.folder / "keys").exists()
