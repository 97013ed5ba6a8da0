"""`intertie hub restored` on a hub that runs: refused without `--live`; with it every service begins its new epoch by itself, the stream is made
anew, the site goes on, and a job of each epoch is done and paid for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.journeys.stack import Stack, running_stack

from intertie.bus.nats import NatsBus
from intertie.contracts.base import EVENT_STREAM
from intertie.contracts.job import JobSpec, JobState

KEEPERS = ("identity", "registry", "scheduler", "metering", "incident")


def restored(data: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "intertie.cli", "hub", "restored", "--data", str(data), "--reason", "standby promoted", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


async def run_one(stack: Stack, name: str) -> JobState:
    job = await stack.retry(lambda: stack.submit(JobSpec(name=name, script="#!/bin/sh\ntrue\n", wall_s=60), key=name))
    record = await stack.until(lambda: stack.ended(job), what=f"{name} ends", limit_s=60)
    await stack.until(lambda: stack.complete_statement({job}), what=f"{name} is complete at metering", limit_s=60)
    return record.state


async def test_a_running_hub_begins_a_new_epoch_and_goes_on() -> None:
    async with running_stack() as stack:
        await stack.add_site("site-a", slots=2)
        assert await run_one(stack, "before") is JobState.SUCCEEDED
        data = stack.layout.data
        refused = await stack.do(partial(restored, data))
        assert refused.returncode != 0 and "scheduler" in refused.stderr and "--live" in refused.stderr, refused.stderr
        done = await stack.do(partial(restored, data, "--live", "--json"))
        assert done.returncode == 0, done.stderr
        raised = json.loads(done.stdout)["services"]
        assert [one["service"] for one in raised] == list(KEEPERS) and {one["before"] for one in raised} == {1}
        (epoch,) = {one["after"] for one in raised}
        assert epoch > 1_000_000
        await stack.until(
            lambda: all(any(f"{name} serves again" in said for said in stack.said) for name in KEEPERS) or None,
            what="every keeper began anew",
            limit_s=90,
        )
        assert await run_one(stack, "after") is JobState.SUCCEEDED
        bus = await NatsBus.connect(stack.layout.bus_url, name="gateway", credentials=stack.layout.creds_file("gateway"))
        try:
            state = await bus.stream_state(EVENT_STREAM)
        finally:
            await bus.close()
        assert state is not None and state.epoch == epoch, "a stream that holds only what the keepers know"
        again = await stack.do(partial(restored, data, "--live", "--json"))
        assert (
            {one["before"] for one in json.loads(again.stdout)["services"]}
            == {epoch}
            == {one["after"] for one in json.loads(again.stdout)["services"]}
        )
        check = await stack.retry(stack.check)
        assert not (check.sum or check.closed_with_hold or check.quarantined or check.differing), check.text
