"""What people see of a site's devices: how a job used its card, what a probe proved, and where the pool is not what was declared."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.fakes.gpus import Rack, has_compiler
from tests.journeys.stack import Stack, running_stack
from tests.journeys.test_gpus import World, sample_of

from intertie.contracts.incident import IncidentsReply
from intertie.contracts.job import JobRecord, JobSpec, JobState, Resources
from intertie.contracts.probe import PoolProof, ProbeOutcome, ProofsReply

pytestmark = [
    pytest.mark.skipif(not has_compiler(), reason="no gcc here to build the library that plays the driver"),
    pytest.mark.asyncio(loop_scope="module"),
]

MODEL = "A100-SXM4-80GB"
HOLD = "#!/bin/sh\nwhile [ ! -e $1 ]; do sleep 0.1; done\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation() -> AsyncIterator[tuple[Stack, Rack]]:
    async with running_stack() as stack:
        rack = await stack.do(lambda: Rack(stack.folder / "cards", [MODEL] * 2))
        await stack.add_site("site-a", profile=rack.profile(interconnect="nvlink"), env=rack.env)
        yield stack, rack


def intertie(stack: Stack, *words: str) -> str:
    """What a user's command prints."""
    token = stack.folder / "user.token"
    if not token.exists():
        token.touch(mode=0o600)
        token.write_text(stack.user._token, encoding="ascii")
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(stack.folder), "INTERTIE_URL": stack.user.url}
    command = [sys.executable, "-m", "intertie.cli", *words]
    done = subprocess.run(command, env={**env, "INTERTIE_TOKEN_FILE": str(token)}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def proof(stack: Stack) -> PoolProof:
    (found,) = stack.admin.get("/v1/sites/site-a/proofs", ProofsReply).pools
    return found


async def test_a_job_s_record_says_how_it_used_its_card_and_by_which_driver(federation: tuple[Stack, Rack]) -> None:
    stack, rack = federation
    go = stack.folder / "go"
    spec = JobSpec(name="trains", script=HOLD, args=[str(go)], wall_s=120, resources=Resources(gpus=1, gpu_model="A100"))
    job = await stack.do(lambda: stack.submit(spec))

    def running() -> JobRecord | None:
        record = stack.job(job)
        return record if record.state is JobState.RUNNING else None

    attempt = (await stack.until(running, what="the job runs")).attempts[-1]
    assert (attempt.driver, attempt.profile_revision) == ("550.90.07", 1) and attempt.agent_version
    card = rack.uuids.index(attempt.devices[0])
    rack.occupy(card, int(attempt.native_id))
    rack.say(card, util="83", mem_used=str(71 * 1024 * 1_048_576), energy_mj="1000000")
    await sample_of(World(stack, rack, rack), attempt, lambda device: device.utilisation_percent == 83 and device.our_processes == 1)
    go.touch()
    record = await stack.until(lambda: stack.ended(job), what="the job ends")
    (used,) = record.attempts[-1].device_use
    assert (used.device, used.max_milli, used.max_memory_mib, used.memory_total_mib) == (attempt.devices[0], 830, 71 * 1024, 81_920)
    said = await stack.do(lambda: intertie(stack, "job", job))
    assert "83 % at most, memory peak 71 of 80 GiB" in said and "of the run" in said
    rack.heal(card)


async def test_a_probe_that_is_asked_for_is_shown_with_what_it_could_not_see_and_drift_opens_an_incident_that_ends(
    federation: tuple[Stack, Rack],
) -> None:
    stack, rack = federation
    folder = str(stack.sites["site-a"].folder)
    await stack.do(lambda: intertie(stack, "local", "--data", folder, "probe", "gpu"))
    await stack.until(lambda: proof(stack).last, what="the probe is told")
    last = proof(stack).last
    assert last is not None and last.outcome is ProbeOutcome.UNPROVEN, "there is no card, and no library to ask"
    assert last.measures["cpu_hash_mib_s"] > 0 and last.driver == "550.90.07"
    said = await stack.do(lambda: intertie(stack, "site", "show", "site-a"))
    assert "probe proved nothing" in said and "cpu_hash_mib_s" in said
    assert last.device in await stack.do(lambda: intertie(stack, "site", "proof", "site-a"))

    rack.lose(1)
    await stack.until(lambda: [one.what for one in proof(stack).drift] == ["lost"], what="the registry sees what differs")
    said = await stack.do(lambda: intertie(stack, "site", "show", "site-a"))
    assert "differs: lost devices: declared 0, observed 1" in said

    def open_faults() -> set[str]:
        return {one.key for one in stack.admin.get("/v1/incidents", IncidentsReply).incidents if one.recovered_at is None}

    await stack.until(lambda: "registry.drift/site-a/gpu" in open_faults(), what="an incident is open")
    rack.heal(1)
    await stack.until(lambda: proof(stack).drift == [], what="nothing differs any more")
    await stack.until(lambda: "registry.drift/site-a/gpu" not in open_faults(), what="the incident says that it is over")
