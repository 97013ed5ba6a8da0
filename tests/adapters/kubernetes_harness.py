"""The Kubernetes look-alike under the suite of clusters: real pods as processes, the owner's own manifests, the agent's own rights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from tests.adapters.clusters import Harness, harness
from tests.adapters.kubernetes_rig import rules
from tests.adapters.kubernetes_world.kinds import JOBS
from tests.adapters.kubernetes_world.world import World, cluster

from intertie.agent.kubernetes.cluster import KubernetesCluster
from intertie.agent.kubernetes.folders import ClaimFiles
from intertie.clock import SystemClock
from intertie.ids import AttemptId

UIDS = "Kubernetes gives every object a uid that is never given again, and the native id carries it"
SUSPEND = "suspending a Job ends its pods: nothing of Kubernetes' own pauses what runs"


class KubernetesHarness:
    cannot = {
        "test_a_native_id_that_is_given_out_again_is_not_taken_for_the_first": UIDS,
        "test_suspension_is_said_and_taken_back": SUSPEND,
    }

    def __init__(self, world: World, made: KubernetesCluster) -> None:
        self.world = world
        self.cluster = made
        self.files = ClaimFiles(made.rules, look_s=0.05)
        self.account = "fed-acme"
        self.resolution_us = 1_000_000

    async def hold(self) -> None:
        self.world.plane.held = True

    async def release(self) -> None:
        self.world.plane.held = False

    async def lose_answer(self) -> None:
        self.world.api.swallow = 1

    async def blind(self, looks: int) -> None:
        """The watch breaks, too, so that lists are asked for at all."""
        self.world.api.empty = looks * len(self.cluster.rules.namespaces) * 3
        self.world.store.compact()

    async def deaf(self, on: bool) -> None:
        self.world.api.deaf = on
        self.world.api.cut()

    async def reuse_ids(self) -> None:
        raise AssertionError(UIDS)

    async def say_unknown(self, tag: AttemptId, word: str) -> None:
        self.world.say(tag, phase=word or "Running")

    async def complete_slowly(self, tag: AttemptId) -> None:
        self.world.kubelets.lingering[self.world.pod(tag)["metadata"]["uid"]] = 20

    async def suspend(self, tag: AttemptId) -> None:
        raise AssertionError(SUSPEND)

    async def resume(self, tag: AttemptId) -> None:
        raise AssertionError(SUSPEND)

    async def preempt(self, tag: AttemptId) -> None:
        self.world.preempt(tag)

    async def fail_node(self, tag: AttemptId) -> None:
        node = self.world.pod(tag)["spec"]["nodeName"]
        self.world.lose_node(node)
        self.world.collect_lost(node)

    async def run_out_of_memory(self, tag: AttemptId) -> None:
        self.world.oom(tag)

    async def cancel_at_site(self, tag: AttemptId) -> None:
        self.world.api.delete(JOBS, self.world.job(tag), {"propagationPolicy": "Foreground"})

    async def make_unkillable(self, tag: AttemptId) -> None:
        self.world.kubelets.stuck.add(self.world.pod(tag)["metadata"]["uid"])

    async def let_die(self, tag: AttemptId) -> None:
        self.world.kubelets.stuck.clear()


@harness("kubernetes")
async def kubernetes(folder: Path) -> AsyncIterator[Harness]:
    told = rules(folder)
    async with cluster(folder, told, {"n1": {}, "n2": {}}) as world:
        told = msgspec.structs.replace(told, kubeconfig=str(world.kubeconfig("agent", world.agent_token(told))))
        made = KubernetesCluster(told, folder / "records", SystemClock())
        try:
            yield KubernetesHarness(world, made)
        finally:
            await made.close()
