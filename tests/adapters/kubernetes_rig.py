"""The adapter with the look-alike under it, and words that its tests share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
from tests.adapters.kubernetes_world.kinds import Kind
from tests.adapters.kubernetes_world.world import World, cluster
from tests.fakes.agents import attempt

from intertie.agent.adapters.port import NativeJob, NativePhase, NativeWork
from intertie.agent.core.model import Attempt
from intertie.agent.kubernetes.api import Api
from intertie.agent.kubernetes.cluster import KubernetesCluster
from intertie.agent.kubernetes.core.settings import KubernetesRules, Namespace
from intertie.clock import SystemClock
from intertie.contracts.job import JobSpec, Resources

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
        api = Api(self.cluster.rules, CLOCK)
        return KubernetesCluster(self.cluster.rules, self.world.folder / "records", CLOCK, api=api)

    def work(self, script: str, *, account: str = "fed-acme", gpus: int = 0, **fields: object) -> NativeWork:
        made = msgspec.structs.replace(attempt("true\n", account=account), **fields)
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


@asynccontextmanager
async def running_rig(short_folder: Path) -> AsyncIterator[Rig]:
    told = rules(short_folder)
    nodes = {"n1": {"gpus": 4, "labels": {"nvidia.com/gpu.product": "NVIDIA-A100"}}, "n2": {}}
    async with cluster(short_folder, told, nodes) as world:
        told = msgspec.structs.replace(told, kubeconfig=str(world.kubeconfig("agent", world.agent_token(told), token_file=True)))
        made = KubernetesCluster(told, short_folder / "records", CLOCK)
        try:
            yield Rig(world, told, made)
        finally:
            await made.close()


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await true():
                return
            await asyncio.sleep(0.05)


async def complete(cluster: KubernetesCluster) -> bool:
    return (await cluster.status([])).complete


async def empty(rig: Rig, kind: Kind) -> bool:
    await rig.cluster.status([])
    return not rig.world.store.list(kind)


def over(job: NativeJob) -> bool:
    return job.phase is NativePhase.ENDED


def runs(job: NativeJob) -> bool:
    return job.phase is NativePhase.RUNNING


async def ended(rig: Rig, script: str, *, gpus: int = 0) -> NativeJob:
    work = rig.work(script, gpus=gpus)
    await rig.cluster.submit(work)
    return await rig.until(work.attempt, over)


async def running(rig: Rig, script: str = "sleep 60\n") -> Attempt:
    work = rig.work(script)
    await rig.cluster.submit(work)
    await rig.until(work.attempt, runs)
    return work.attempt
