"""What is around a Kubernetes site's jobs: Kueue, nodes, the agent's rights, its logs and its pre-flight."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import msgspec
import pytest
from tests.adapters.kubernetes_rig import CLOCK, IMAGE, PATIENCE_S, Rig, empty, ended, over, running, runs, until
from tests.adapters.kubernetes_world.admission import admit
from tests.adapters.kubernetes_world.kinds import JOBS, NODES, PODS, Failure
from tests.fakes.agents import attempt

from intertie.agent.adapters.port import NativeOutcome, NativePhase
from intertie.agent.check.report import Line, Place
from intertie.agent.check.report import run as report
from intertie.agent.config import Folder
from intertie.agent.core.rules import Rules
from intertie.agent.kubernetes.check import CHECKS
from intertie.agent.kubernetes.cluster import KubernetesCluster
from intertie.agent.kubernetes.core.owner import CLUSTER_VERBS, VERBS
from intertie.agent.kubernetes.core.settings import KubernetesRules
from intertie.agent.kubernetes.folders import ClaimFiles
from intertie.errors import Refused, Unavailable

# --- Kueue -------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def kueue(rig: Rig) -> Rig:
    space = msgspec.structs.replace(rig.rules.namespaces["fed-acme"], queue="lent")
    told = msgspec.structs.replace(rig.rules, namespaces={**rig.rules.namespaces, "fed-acme": space})
    await rig.cluster.close()
    rig.world.plane.kueue, rig.world.plane.kueue_admits = True, False
    return Rig(rig.world, told, KubernetesCluster(told, rig.world.folder / "records", CLOCK))


async def test_only_kueue_lets_go_what_names_its_queue(kueue: Rig) -> None:
    work = kueue.work("exit 3\n")
    try:
        await kueue.cluster.submit(work)
        job = await kueue.until(work.attempt, lambda job: job.state == "Suspended")
        assert job.phase is NativePhase.QUEUED
        spec = kueue.world.job(work.attempt.id)
        assert spec["spec"]["suspend"] and spec["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "lent"
        kueue.world.plane.kueue_admits = True
        job = await kueue.until(work.attempt, over)
        assert job.end and job.end.code == 3
    finally:
        await kueue.cluster.close()


async def test_what_kueue_takes_back_is_preempted_and_does_not_run_a_second_time(kueue: Rig) -> None:
    kueue.world.plane.kueue_admits = True
    work = kueue.work("sleep 60\n")
    try:
        await kueue.cluster.submit(work)
        await kueue.until(work.attempt, runs)
        kueue.world.plane.kueue_admits = False
        kueue.world.store.change(JOBS, kueue.world.job(work.attempt.id), lambda one: one["spec"].update(suspend=True))
        job = await kueue.until(work.attempt, over)
        assert job.end and job.end.outcome is NativeOutcome.PREEMPTED, job
        kueue.world.plane.kueue_admits = True
        await until(lambda: empty(kueue, JOBS))
    finally:
        await kueue.cluster.close()


# --- the rest ----------------------------------------------------------------------------------------------------------------------------


async def test_what_a_node_has_for_us_is_what_it_can_give_now(rig: Rig) -> None:
    """BR-067: capacity without allocatable is nothing, and a drained node leaves at once."""
    rig.world.add_node("n3", gpus=16)
    world = rig.world.store
    world.change(NODES, world.get(NODES, "", "n3"), lambda one: one["status"]["allocatable"].update({"nvidia.com/gpu": "0"}))
    world.change(NODES, world.get(NODES, "", "n2"), lambda one: one["spec"].update(unschedulable=True))
    one = rig.work("sleep 60\n", gpus=1)
    await rig.cluster.submit(one)
    await rig.until(one.attempt, runs)
    foreign = {"name": "c", "image": IMAGE, "command": ["sleep", "60"], "resources": {"limits": {"nvidia.com/gpu": "2", "cpu": "1"}}}
    spec = {"containers": [foreign], "nodeName": "n1", "restartPolicy": "Never"}
    world.create(PODS, "fed-acme", {"metadata": {"name": "theirs"}, "spec": spec, "status": {"phase": "Running"}})
    async with asyncio.timeout(PATIENCE_S):
        while True:
            told = await rig.cluster.describe()
            nodes = {node.name: node for node in told.nodes}
            if told.load.devices_busy == 2 and len(nodes) == 3 and not nodes["n2"].usable:
                break
            await asyncio.sleep(0.05)
    assert (nodes["n1"].devices, nodes["n1"].busy, nodes["n1"].usable) == (4, 3, True)
    assert nodes["n3"].devices == 0 and "cordoned" in nodes["n2"].reason and told.version == "v1.33.0-lookalike"
    assert told.load.running == 1 and any("not counted" in text for text in told.warnings)


async def test_a_node_that_refuses_what_it_had_room_for_is_set_aside(rig: Rig) -> None:
    """BR-067: after two such launches."""
    rig.world.kubelets.refusing["n1"] = "UnexpectedAdmissionError"
    for _ in range(2):
        job = await ended(rig, "true\n", gpus=1)
        assert job.end and job.end.outcome is NativeOutcome.LAUNCH_FAILED and job.nodes == ("n1",)
    told = {node.name: node for node in (await rig.cluster.describe()).nodes}
    assert not told["n1"].usable and "refused 2 pods" in told["n1"].reason and told["n2"].usable


async def test_all_that_the_agent_does_is_granted_and_all_that_is_granted_is_done(rig: Rig) -> None:
    """The manifests give no right that no verb of ours uses."""
    work = rig.work("true\n")
    rig.world.api.swallow = 1
    with pytest.raises(Unavailable):
        await rig.cluster.submit(work)
    await rig.cluster.submit(work)
    await rig.until(work.attempt, over)
    await rig.cluster.logs(work.attempt.id, 0, 10)
    one = await running(rig)
    await rig.cluster.cancel(one.id, 1)
    await rig.until(one, over)
    await rig.cluster.describe()
    used = {(row.group, row.resource, row.verb) for row in rig.world.access.asked if row.user.endswith(":intertie-agent")}
    granted = {(group, resource, verb) for (group, resource), verbs in {**VERBS, **CLUSTER_VERBS}.items() for verb in verbs}
    assert used == granted


async def test_a_pod_that_is_not_restricted_is_refused_where_ours_is_not(rig: Rig) -> None:
    """Pod Security is really checked: the same namespace takes our Job and not a privileged pod."""
    bad = {"metadata": {"name": "bad", "namespace": "fed-acme"}, "spec": {"containers": [{"name": "c", "image": IMAGE}]}}
    with pytest.raises(Failure) as refused:
        admit(rig.world.store, PODS, bad)
    assert refused.value.code == 403 and "PodSecurity" in refused.value.message
    job = await ended(rig, "true\n")
    assert job.end and job.end.code == 0


async def test_logs_are_read_by_offset(rig: Rig) -> None:
    job = await ended(rig, "printf 'one\\ntwo\\n\\377'\n")
    chunk = await rig.cluster.logs(job.tag, 4, 3)
    assert chunk.data == b"two" and chunk.offset == 4
    assert (await rig.cluster.logs(job.tag, 8, 10)).data == b"\xff"
    assert (await rig.cluster.logs(attempt().id, 0, 10)).total == 0


async def test_no_value_of_the_environment_is_in_any_object(rig: Rig) -> None:
    """They travel in the job's folder, where only its own user reads them."""
    work = rig.work("true\n", env={"TOKEN": "hunter2-secret"})
    await rig.cluster.submit(work)
    assert "hunter2-secret" not in msgspec.json.encode([obj for obj in rig.world.store.objects.values()]).decode()


async def looked(rig: Rig, told: KubernetesRules) -> dict[str, Line]:
    place = Place(folder=Folder(rig.world.folder), rules=Rules(kubernetes=told))
    return {f"{one.what} {one.level}": one for one in (await report(place, CHECKS)).lines}


async def test_the_pre_flight_says_what_is_well_and_what_mends_the_rest(rig: Rig) -> None:
    """And it creates nothing."""
    seen = await looked(rig, rig.rules)
    assert set(seen) == {"kubernetes ok", "namespace fed-acme ok", "namespace fed-other ok"}
    assert "2 of 2 nodes" in seen["kubernetes ok"].text and not rig.world.store.list(JOBS)
    extra = {
        **rig.rules.namespaces,
        "fed-new": msgspec.structs.replace(rig.rules.namespaces["fed-acme"], local=str(rig.world.folder / "new")),
    }
    seen = await looked(rig, msgspec.structs.replace(rig.rules, namespaces=extra))
    assert "forbidden" in seen["namespace fed-new fail"].text and "kubectl apply" in seen["namespace fed-new fail"].fix
    admin = msgspec.structs.replace(rig.rules, kubeconfig=str(rig.world.kubeconfig("admin", rig.world.admin)))
    assert "needs not" in (await looked(rig, admin))["kubernetes warn"].text
    nobody = msgspec.structs.replace(rig.rules, kubeconfig=str(rig.world.kubeconfig("nobody", "no-such-token")))
    assert set(await looked(rig, nobody)) == {"kubernetes fail"}


async def test_the_pre_flight_of_a_site_without_cluster_is_silent(rig: Rig) -> None:
    place = Place(folder=Folder(rig.world.folder))
    assert (await report(place, CHECKS)).lines == []


async def test_what_a_lost_record_held_is_read_from_its_job(rig: Rig) -> None:
    """Cards are in the Job itself: books without our note of the submit still have them."""
    work = rig.work("sleep 60\n", gpus=2)
    await rig.cluster.submit(work)
    await rig.until(work.attempt, runs)
    rig.cluster.records.runs.clear()
    await rig.until(work.attempt, runs)
    (row,) = await rig.cluster.accounting(CLOCK.now() - timedelta(hours=1), CLOCK.now() + timedelta(hours=1))
    assert (row.devices, row.model, row.user) == (2, "nvidia.com/gpu", "fed-acme")


async def test_looking_costs_a_small_question_per_namespace(rig: Rig) -> None:
    await rig.cluster.status([])
    before = rig.cluster.questions
    await rig.cluster.status([])
    assert rig.cluster.questions - before == len(rig.rules.namespaces)


async def test_a_claim_that_is_not_mounted_here_is_refused_with_its_place(rig: Rig) -> None:
    space = msgspec.structs.replace(rig.rules.namespaces["fed-acme"], local=str(rig.world.folder / "not-mounted"))
    with pytest.raises(Refused) as refused:
        ClaimFiles(msgspec.structs.replace(rig.rules, namespaces={"fed-acme": space}))
    assert refused.value.code == "kubernetes.folder" and "not-mounted" in refused.value.text and refused.value.next_step
