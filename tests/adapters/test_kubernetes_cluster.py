"""The adapter against a Kubernetes of our own (no real one was used; `INTERTIE_TEST_KUBECONFIG` runs what can be run against one)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from tests.adapters.kubernetes_world.kinds import JOBS, PODS, Failure
from tests.adapters.kubernetes_world.world import World, cluster
from tests.fakes.agents import attempt

from intertie.agent.adapters.port import NativeJob, NativeOutcome, NativePhase, NativeWork
from intertie.agent.core.model import Attempt
from intertie.agent.kubernetes.api import Api
from intertie.agent.kubernetes.cluster import KubernetesCluster
from intertie.agent.kubernetes.core.settings import KubernetesRules, Namespace
from intertie.clock import SystemClock
from intertie.contracts.job import JobSpec, Resources
from intertie.errors import Refused, Unavailable

IMAGE = "registry.example/base@sha256:" + "a" * 64
CLOCK = SystemClock()
PATIENCE_S = 60.0


def rules(folder: Path, **changes: object) -> KubernetesRules:
    """Two tenants' namespaces, each with a folder of its own."""
    uid, gid = (20_001, 20_001) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    spaces = {
        f"fed-{tenant}": Namespace(tenant=tenant, claim="work", local=str(folder / tenant), uid=uid, gid=gid, quota={"pods": "20"})
        for tenant in ("acme", "other")
    }
    made = KubernetesRules(cluster="lab-k8s", image=IMAGE, namespaces=spaces, cpu="500m", memory="128Mi", shm="16Mi")
    return msgspec.structs.replace(made, **changes)


@dataclass
class Rig:
    world: World
    rules: KubernetesRules
    cluster: KubernetesCluster

    def again(self) -> KubernetesCluster:
        """Another agent on the same disk, as after a kill."""
        api = Api(self.cluster.rules)
        return KubernetesCluster(self.cluster.rules, self.world.folder / "records", CLOCK, api=api)

    def work(self, script: str, *, account: str = "fed-acme", gpus: int = 0, **fields: object) -> NativeWork:
        made = attempt("true\n", account=account, **fields)
        if gpus:
            spec = JobSpec(name="t", script="true", resources=Resources(gpus=gpus), wall_s=60)
            made = msgspec.structs.replace(made, spec=spec)
        space = self.rules.namespaces.get(account)
        folder = Path(space.local if space else self.world.folder / "nowhere") / made.id
        put(folder, script)
        return NativeWork(attempt=made, folder=folder, start_by=CLOCK.now() + timedelta(hours=1), grace_s=1)

    async def until(self, one: Attempt, true: Callable[[NativeJob], object], cluster: KubernetesCluster | None = None) -> NativeJob:
        told: object = None
        async with asyncio.timeout(PATIENCE_S):
            while True:
                listing = await (cluster or self.cluster).status([one.id])
                job = listing.jobs.get(one.id)
                if job is not None and true(job):
                    return job
                told = job or listing
                await asyncio.sleep(0.05)
        raise AssertionError(told)


def put(folder: Path, script: str) -> None:
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    (folder / "start.sh").write_text(f"#!/bin/sh\n{script}", encoding="utf-8")
    (folder / "start.sh").chmod(0o755)
    if os.geteuid() == 0:
        os.chown(folder, 20_001, 20_001)


@pytest.fixture
async def rig(short_folder: Path) -> AsyncIterator[Rig]:
    told = rules(short_folder)
    nodes = {"n1": {"gpus": 4, "labels": {"nvidia.com/gpu.product": "NVIDIA-A100"}}, "n2": {}}
    async with cluster(short_folder, told, nodes) as world:
        told = msgspec.structs.replace(told, kubeconfig=str(world.kubeconfig("agent", world.agent_token(told), token_file=True)))
        made = KubernetesCluster(told, short_folder / "records", CLOCK)
        try:
            yield Rig(world, told, made)
        finally:
            await made.close()


def over(job: NativeJob) -> bool:
    return job.phase is NativePhase.ENDED


def runs(job: NativeJob) -> bool:
    return job.phase is NativePhase.RUNNING


async def test_a_job_runs_as_its_namespace_s_user_in_its_own_folder_and_ends(rig: Rig) -> None:
    work = rig.work("id -u; pwd; ls; df -k /dev/shm | tail -1; echo done > out; exit 7\n")
    made = await rig.cluster.submit(work)
    assert made.tag == work.attempt.id and made.native_id.startswith("fed-acme/job-")
    job = await rig.until(work.attempt, over)
    assert (job.end and job.end.outcome, job.end and job.end.code) == (NativeOutcome.EXITED, 7), job
    assert job.started and job.ended and job.submitted and job.submitted <= job.started <= job.ended
    assert job.nodes and job.state == "Failed/Error"
    said = (await rig.cluster.logs(work.attempt.id, 0, 10_000)).data.decode()
    assert str(rig.rules.namespaces["fed-acme"].uid) in said.splitlines()[0] and str(work.folder) in said
    assert (Path(work.folder) / "out").read_text() == "done\n"
