"""What can be asked of any cluster without breaking it: run on the look-alike always, and on a real one where the environment names it.

INTERTIE_TEST_KUBECONFIG   the agent's kubeconfig: the service account of the printed manifests, which the owner has applied
INTERTIE_TEST_SITE_TOML    a site.toml with [kubernetes] for that cluster; `kubeconfig` in it is overruled. Its first namespace is used: its claim must
                           be bound, and mounted on this machine at `local`, and the image must be there to be pulled
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from tests.adapters.kubernetes_rig import rules
from tests.adapters.kubernetes_world.world import cluster
from tests.fakes.agents import attempt

from intertie.agent.adapters.files import Owned
from intertie.agent.adapters.port import NativeJob, NativePhase, NativeWork
from intertie.agent.adapters.queue import QueueAdapter
from intertie.agent.core.attempts import Exit
from intertie.agent.core.leases import Deadline, deadline
from intertie.agent.core.model import Attempt, Moment, StartedRecord
from intertie.agent.core.rules import Rules
from intertie.agent.kubernetes.cluster import KubernetesCluster
from intertie.agent.kubernetes.core.settings import KubernetesRules
from intertie.agent.kubernetes.folders import ClaimFiles
from intertie.clock import SystemClock, kernel_boot
from intertie.errors import Refused

CLOCK = SystemClock()
# A real cluster may have to pull an image first.
PATIENCE_S = 600.0
REAL = bool(os.environ.get("INTERTIE_TEST_KUBECONFIG") and os.environ.get("INTERTIE_TEST_SITE_TOML"))


@dataclass
class Site:
    cluster: KubernetesCluster
    adapter: QueueAdapter
    account: str
    tenant: str

    def attempt(self, script: str, *, wall_s: int = 600) -> Attempt:
        return msgspec.structs.replace(attempt(script, account=self.account, wall_s=wall_s), tenant=self.tenant)

    async def ran(self, work: Attempt) -> Exit:
        async with asyncio.timeout(PATIENCE_S):
            await self.adapter.prepare(work, None)
            started = await self.adapter.start(work)
            assert isinstance(started, StartedRecord), started
            return await self.adapter.ended(work)

    async def until(self, work: Attempt, true: Callable[[NativeJob], bool]) -> NativeJob:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                job = (await self.cluster.status([work.id])).jobs.get(work.id)
                if job is not None and true(job):
                    return job
                await asyncio.sleep(0.2)


def made(told: KubernetesRules, folder: Path) -> Site:
    name, space = next(iter(told.namespaces.items()))
    it = KubernetesCluster(told, folder / "records", CLOCK)
    return Site(it, QueueAdapter(folder / "notes", it, ClaimFiles(told), CLOCK, every_s=0.5), name, space.tenant)


@pytest.fixture(params=["look-alike", *(["real"] if REAL else [])])
async def site(request: pytest.FixtureRequest, short_folder: Path) -> AsyncIterator[Site]:
    if request.param == "real":
        told = msgspec.toml.decode(Path(os.environ["INTERTIE_TEST_SITE_TOML"]).read_bytes(), type=Rules).kubernetes  # noqa: ASYNC240  # once
        assert told is not None
        one = made(msgspec.structs.replace(told, kubeconfig=os.environ["INTERTIE_TEST_KUBECONFIG"]), short_folder)
        try:
            yield one
        finally:
            await one.cluster.close()
        return
    told = rules(short_folder)
    async with cluster(short_folder, told) as world:
        one = made(msgspec.structs.replace(told, kubeconfig=str(world.kubeconfig("agent", world.agent_token(told)))), short_folder)
        try:
            yield one
        finally:
            await one.cluster.close()


async def test_a_job_runs_to_its_exit_code_and_its_log(site: Site) -> None:
    work = site.attempt("#!/bin/sh\necho from $(id -u)\nexit 7\n")
    end = await site.ran(work)
    assert end.code == 7
    uid = site.cluster.rules.namespaces[site.account].uid
    assert (await site.adapter.log(work.id, 0, 1000)).data == f"from {uid}\n".encode()
    job = (await site.cluster.status([work.id])).jobs[work.id]
    assert job.phase is NativePhase.ENDED and job.started is not None and job.ended is not None and job.nodes
    rows = await site.cluster.accounting(job.started - timedelta(minutes=1), job.ended + timedelta(minutes=1))
    assert [row.end and row.end.code for row in rows if row.tag == work.id] == [7]


async def test_a_stop_ends_it_and_is_told_from_its_own_end(site: Site) -> None:
    work = site.attempt("#!/bin/sh\nsleep 600\n")
    await site.adapter.prepare(work, None)
    async with asyncio.timeout(PATIENCE_S):
        assert isinstance(await site.adapter.start(work), StartedRecord)
        await site.adapter.stop(work.id, 2)
        assert (await site.adapter.ended(work)).stopped_for == "asked"


async def test_leased_work_ends_with_its_lease_and_a_renewal_moves_it(site: Site) -> None:
    """The stub reads the lease from the job folder, whoever else is dead."""
    work = msgspec.structs.replace(site.attempt("#!/bin/sh\nsleep 600\n"), lease_s=60)
    await site.adapter.prepare(work, None)
    await site.adapter.renew(work.id, lease(120))
    async with asyncio.timeout(PATIENCE_S):
        assert isinstance(await site.adapter.start(work), StartedRecord)
        await site.adapter.renew(work.id, lease(2))
        assert (await site.adapter.ended(work)).stopped_for == "lease_ended"


def lease(seconds: float) -> Deadline:
    """So long from now."""
    return deadline(seconds, CLOCK.boot_s(), Moment(CLOCK.now(), CLOCK.boot_s(), kernel_boot()))


async def test_a_second_submit_is_the_first_one(site: Site) -> None:
    work = site.attempt("#!/bin/sh\nsleep 600\n")
    await site.adapter.prepare(work, None)
    native = NativeWork(work, site.adapter.files.seen(Owned(work.id, work.account)), CLOCK.now() + timedelta(hours=1))
    first = await site.cluster.submit(native)
    site.cluster.records.runs.clear()
    assert (await site.cluster.submit(native)).native_id == first.native_id
    await site.cluster.cancel(work.id, 1)
    await site.until(work, lambda job: job.phase is NativePhase.ENDED)


async def test_nodes_are_described_and_another_namespace_is_refused(site: Site) -> None:
    told = await site.cluster.describe()
    assert told.nodes and told.version
    with pytest.raises(Refused) as refused:
        await site.cluster.api.get("/api/v1/namespaces/kube-system/secrets")
    assert refused.value.code == "kubernetes.forbidden"
