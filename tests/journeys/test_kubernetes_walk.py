"""One federation with a Kubernetes site (the look-alike: no real cluster was used): the README's job file unchanged, from submit to statement.

Pods run as processes, under the owner's own manifests and the agent's own rights; the agent is killed in between.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from tests.adapters.kubernetes_rig import rules
from tests.adapters.kubernetes_world.kinds import JOBS
from tests.adapters.kubernetes_world.world import World, cluster
from tests.journeys.stack import TENANT, Stack, running_stack
from tests.journeys.test_readme import blocks

from intertie.contracts.http import MappingBody
from intertie.contracts.identity import CreateToken, MappingsReply, Role, TokenCreated
from intertie.contracts.job import AttemptRecord, JobRecord, JobSpec, JobState
from intertie.contracts.site import SiteKind
from intertie.ids import JobId

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
SITE = "kube"


@dataclass
class Walk:
    stack: Stack
    world: World

    def cli(self, folder: Path, *words: str) -> str:
        made = self.stack.admin.post("/v1/tokens", TokenCreated, CreateToken(name="walker", roles=[Role.TENANT_ADMIN], tenant=TENANT))
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder.parent),
            "LANG": "C.UTF-8",
            "INTERTIE_URL": self.stack.layout.public_url,
            "INTERTIE_TOKEN": made.token,
        }
        done = subprocess.run(
            [sys.executable, "-m", "intertie.cli", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    async def ended(self, job: JobId) -> JobRecord:
        return await self.stack.until(lambda: self.stack.ended(job), what=f"{job} has ended", limit_s=120)

    def attempt(self, job: JobId) -> AttemptRecord:
        return self.stack.job(job).attempts[-1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def walk() -> AsyncIterator[Walk]:
    async with running_stack() as stack:
        place = stack.folder / "cluster"
        place.mkdir(mode=0o711)
        told = rules(place, observe_s=1)
        async with cluster(place, told, {"n1": {"cpu": 2}, "n2": {"cpu": 2}}) as world:
            config = world.kubeconfig("agent", world.agent_token(told))
            folder = stack.folder / SITE
            folder.mkdir(mode=0o711)
            (folder / "site.toml").write_text(site_toml(msgspec.structs.replace(told, kubeconfig=str(config))), encoding="utf-8")
            stack.account = "fed-acme"
            await stack.add_site(SITE, slots=4, kind=SiteKind.KUBERNETES, env={"INTERTIE_BEAT_S": "0.2"})
            yield Walk(stack, world)


def site_toml(told: object) -> str:
    """The owner's file, as a person would write it."""
    value = msgspec.to_builtins(told)
    spaces = value.pop("namespaces")
    lines = ["[kubernetes]", *(f"{key} = {json.dumps(one)}" for key, one in value.items() if not isinstance(one, dict))]
    for name, space in spaces.items():
        lines.append(f"[kubernetes.namespaces.{name}]")
        for key, one in space.items():
            if isinstance(one, dict):
                one = "{ " + ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in one.items()) + " }"
                lines.append(f"{key} = {one}")
            else:
                lines.append(f"{key} = {json.dumps(one)}")
    return "\n".join(lines) + "\n"


def readme_job() -> str:
    """The README's `train.sh`, unchanged."""
    for block in blocks("README.md"):
        if (found := re.search(r"cat > train\.sh <<'END'\n(.*?)^END$", block.text, re.DOTALL | re.MULTILINE)) is not None:
            return found[1]
    raise AssertionError("the README has no train.sh")


async def test_the_readme_s_job_file_runs_unchanged_to_its_result_and_its_line_on_the_statement(walk: Walk) -> None:
    folder = walk.stack.folder / "desk"
    folder.mkdir()
    (folder / "data.txt").write_text("some input\n", encoding="utf-8")
    (folder / "train.sh").write_text(readme_job(), encoding="utf-8")
    job = JobId((await walk.stack.do(lambda: walk.cli(folder, "submit", "train.sh"))).strip().splitlines()[-1].split()[0])
    record = await walk.ended(job)
    assert record.state is JobState.SUCCEEDED, record
    told = record.attempts[-1]
    assert told.account == "fed-acme" and told.native_id.startswith("fed-acme/") and told.native_state
    assert "epoch 1 done" in await walk.stack.do(lambda: walk.cli(folder, "logs", job))
    await walk.stack.do(lambda: walk.cli(folder, "fetch", job, "--wait", "20", "--to", "results"))
    assert (folder / "results/out/size.txt").read_text(encoding="utf-8").strip() == "11 data.txt"
    statement = await walk.stack.until(lambda: walk.stack.complete_statement({job}), what="its line is complete")
    (line,) = [line for line in statement.lines if line.job == job]
    proof = walk.stack.check()
    assert all(book.complete for book in line.attempts) and proof.sum == 0 and not proof.differing
    assert walk.world.store.list(JOBS, "fed-acme") and not walk.world.store.list(JOBS, "fed-other")


async def test_an_agent_that_is_killed_finds_its_pod_and_tells_its_end_once(walk: Walk) -> None:
    job = walk.stack.submit(JobSpec(name="long", script="#!/bin/sh\necho begun\nwhile [ ! -e go ]; do sleep 0.2; done\nexit 5\n"))
    attempt = await walk.stack.until(
        lambda: next((one for one in walk.stack.job(job).attempts if one.state == "running"), None), what="it runs", limit_s=90
    )
    await walk.stack.kill_agent(SITE)
    (walk.world.folder / "acme" / attempt.attempt / "work" / "go").touch()
    record = await walk.ended(job)
    assert (record.state, record.attempts[-1].exit_code, len(record.attempts)) == (JobState.FAILED, 5, 1)
    native = [one for one in walk.world.store.list(JOBS) if one["metadata"]["labels"]["intertie.io/job"] == job]
    assert len(native) == 1
    await walk.stack.until(lambda: walk.stack.complete_statement({job}), what="its line is complete")


async def test_a_tenant_that_is_mapped_to_another_s_namespace_is_refused_there_and_told_why(walk: Walk) -> None:
    """Row 8: the owner's site.toml gives `fed-other` to another tenant; the hub's mapping cannot change that."""
    mapping = f"/v1/tenants/{TENANT}/mappings/{SITE}"
    await walk.stack.do(lambda: walk.stack.admin.put(mapping, MappingsReply, MappingBody(account="fed-other")))
    try:
        job = walk.stack.submit(JobSpec(name="stranger", script="#!/bin/sh\ntrue\n"))

        def refused() -> AttemptRecord | None:
            made = [one for one in walk.stack.job(job).attempts if one.state in ("not_started", "refused") and "fed-other" in one.reason]
            return made[-1] if made else None

        told = await walk.stack.until(refused, what="the refusal is told", limit_s=90)
        assert "does not belong to tenant acme" in told.reason
        assert not walk.world.store.list(JOBS, "fed-other")
    finally:
        await walk.stack.do(lambda: walk.stack.admin.put(mapping, MappingsReply, MappingBody(account="fed-acme")))
