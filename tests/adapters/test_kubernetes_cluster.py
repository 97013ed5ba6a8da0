"""The adapter against a Kubernetes of our own: submit, ends, cancel, looks (no real one was used; `test_kubernetes_real.py` can be asked of one)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from tests.adapters.kubernetes_rig import CLOCK, IMAGE, PATIENCE_S, Rig, complete, empty, ended, over, running, runs, until
from tests.adapters.kubernetes_world.kinds import JOBS, PODS
from tests.fakes.agents import attempt, root_is_a_mount

from intertie.agent.adapters.port import NativeOutcome, NativePhase
from intertie.agent.kubernetes.api import jobs
from intertie.agent.kubernetes.cluster import KubernetesCluster
from intertie.errors import Refused, Unavailable


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


# --- submit ------------------------------------------------------------------------------------------------------------------------------


async def test_a_submit_whose_answer_was_lost_is_found_by_its_name_and_not_made_twice(rig: Rig) -> None:
    """BR-046, on Kubernetes: a create that timed out was taken."""
    work = rig.work("sleep 30\n")
    rig.world.api.swallow = 1
    with pytest.raises(Unavailable) as lost:
        await rig.cluster.submit(work)
    assert lost.value.code == "kubernetes.away"
    first = await rig.cluster.submit(work)
    again = rig.again()
    try:
        assert (await again.submit(work)).native_id == (await rig.cluster.submit(work)).native_id == first.native_id
    finally:
        await again.close()
    assert len(rig.world.store.list(JOBS)) == 1


async def test_another_s_job_of_that_name_is_no_submit_of_ours(rig: Rig) -> None:
    work = rig.work("true\n")
    await rig.cluster.submit(work)
    twin = msgspec.structs.replace(work.attempt, id=attempt().id)
    with pytest.raises(Refused) as refused:
        await rig.cluster.submit(replace(work, attempt=twin))
    assert refused.value.code == "kubernetes.name_taken" and refused.value.next_step


async def test_what_was_recorded_is_never_submitted_again_even_if_its_job_is_gone(rig: Rig) -> None:
    work = rig.work("true\n")
    await rig.cluster.submit(work)
    await rig.until(work.attempt, over)
    rig.world.store.remove(JOBS, rig.world.job(work.attempt.id))
    assert (await rig.cluster.submit(work)).phase is NativePhase.ENDED
    assert not rig.world.store.list(JOBS)


WRONG_NAMESPACES = ["default", "kube-system", "intertie", "fed-nobody", "", "fed-acme/../fed-other", "fed-acme\n"]


@pytest.mark.parametrize("account", WRONG_NAMESPACES)
async def test_no_job_lands_in_a_namespace_that_the_owner_did_not_give(rig: Rig, account: str) -> None:
    """Row 8: whatever the hub's mapping says."""
    assert rig.cluster.may_run_as(account)
    with pytest.raises(Refused) as refused:
        await rig.cluster.submit(rig.work("true\n", account=account))
    assert refused.value.code == "kubernetes.namespace" and refused.value.next_step
    assert not rig.world.store.list(JOBS)


async def test_no_job_of_one_tenant_lands_in_another_tenant_s_namespace(rig: Rig) -> None:
    """Row 8: `fed-other` is given, but not to acme."""
    assert not rig.cluster.may_run_as("fed-other")
    with pytest.raises(Refused) as refused:
        await rig.cluster.submit(rig.work("true\n", account="fed-other"))
    assert refused.value.code == "kubernetes.namespace" and "fed-other" in refused.value.text


async def test_the_cluster_itself_refuses_the_agent_any_other_namespace_and_verb(rig: Rig) -> None:
    """By the very manifests that the owner applies: the agent's rights end at the tenants' namespaces."""
    api = rig.cluster.api
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {}}
    for path in ("/apis/batch/v1/namespaces/default/jobs", "/api/v1/namespaces/fed-acme/secrets", "/api/v1/namespaces"):
        with pytest.raises(Refused) as refused:
            await api.create(path, body)
        assert refused.value.code == "kubernetes.forbidden", path
    for path in ("/api/v1/pods", "/api/v1/namespaces/default/pods", "/api/v1/namespaces/fed-acme/secrets"):
        with pytest.raises(Refused) as refused:
            await api.get(path)
        assert refused.value.code == "kubernetes.forbidden", path


async def test_an_image_without_a_digest_is_refused_with_what_to_do(rig: Rig) -> None:
    with pytest.raises(Refused) as refused:
        KubernetesCluster(msgspec.structs.replace(rig.rules, image="registry.example/base:latest"), rig.world.folder / "r2", CLOCK)
    assert "digest" in refused.value.text and refused.value.next_step


async def test_what_no_node_could_ever_hold_is_refused_at_once(rig: Rig) -> None:
    with pytest.raises(Refused) as refused:
        await rig.cluster.submit(rig.work("true\n", gpus=5))
    assert refused.value.code == "kubernetes.too_large" and "nvidia.com/gpu: 5 asked" in refused.value.text


async def test_two_jobs_of_one_tenant_see_neither_each_other_s_folder_nor_a_token(rig: Rig) -> None:
    if not rig.world.kubelets.isolated:
        # A real cluster's pods always have theirs.
        assert not root_is_a_mount()
        return
    secret = rig.work("true\n")
    (Path(secret.folder) / "private").write_text("mine", encoding="utf-8")
    work = rig.work(f"cat {secret.folder}/private; ls /var/run/secrets; df -k /dev/shm | tail -1\n")
    await rig.cluster.submit(work)
    await rig.until(work.attempt, over)
    said = (await rig.cluster.logs(work.attempt.id, 0, 10_000)).data.decode()
    assert "mine" not in said and "kubernetes.io" not in said and " 16384 " in said, said


# --- what it says while it waits ---------------------------------------------------------------------------------------------------------


async def test_a_pod_that_no_node_has_room_for_is_queued_with_the_scheduler_s_words(rig: Rig) -> None:
    """BR-020: neither `active` nor Pending is running."""
    first, second = rig.work("sleep 60\n", gpus=4), rig.work("true\n", gpus=4)
    await rig.cluster.submit(first)
    await rig.until(first.attempt, runs)
    await rig.cluster.submit(second)
    job = await rig.until(second.attempt, lambda job: "Unschedulable" in job.reason)
    assert job.phase is NativePhase.QUEUED and "Insufficient nvidia.com/gpu" in job.reason and job.started is None
    await rig.cluster.cancel(first.attempt.id, 1)
    job = await rig.until(second.attempt, over)
    assert job.end and job.end.code == 0


async def test_an_image_that_cannot_be_pulled_is_starting_and_then_given_up_by_its_own_word(rig: Rig) -> None:
    """BR-020: not running meanwhile, and the pod does not hold its card for ever."""
    rig.world.kubelets.missing_images.add(IMAGE)
    rules_now = msgspec.structs.replace(rig.rules, launch_s=1)
    impatient = KubernetesCluster(rules_now, rig.world.folder / "records", CLOCK)
    try:
        work = rig.work("true\n", gpus=1)
        await impatient.submit(work)
        job = await rig.until(work.attempt, lambda job: "ImagePull" in job.reason, impatient)
        assert job.phase in (NativePhase.STARTING, NativePhase.ENDED) and job.started is None
        job = await rig.until(work.attempt, over, impatient)
        assert job.end and job.end.outcome is NativeOutcome.IMAGE_UNFETCHED and "ImagePull" in job.end.text
        await until(lambda: empty(rig, PODS))
    finally:
        await impatient.close()


async def test_what_the_quota_forbids_waits_and_says_which_quota(rig: Rig) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "intertie-lent", "namespace": "fed-acme"}}
    rig.world.apply([{**quota, "spec": {"hard": {"requests.nvidia.com/gpu": "1"}}}])
    work = rig.work("true\n", gpus=2)
    await rig.cluster.submit(work)
    job = await rig.until(work.attempt, lambda job: job.reason)
    assert job.phase is NativePhase.QUEUED and job.reason.startswith("QuotaExceeded") and "requests.nvidia.com/gpu" in job.reason


# --- how it ends -------------------------------------------------------------------------------------------------------------------------


async def test_an_end_by_memory_is_told_from_a_kill_and_from_an_exit_code(rig: Rig) -> None:
    one = await running(rig)
    rig.world.oom(one.id)
    job = await rig.until(one, over)
    assert job.end and job.end.outcome is NativeOutcome.OUT_OF_MEMORY and job.state == "Failed/OOMKilled"
    job = await ended(rig, "exit 137\n")
    assert job.end and (job.end.outcome, job.end.code) == (NativeOutcome.EXITED, 137) and "does not tell which" in job.end.text


async def test_an_evicted_pod_is_no_success_and_no_fault_of_the_job(rig: Rig) -> None:
    """BR-022, first part."""
    one = await running(rig, "trap 'exit 0' TERM; while :; do sleep 0.1; done\n")
    rig.world.evict(one.id)
    job = await rig.until(one, over)
    assert job.end and job.end.outcome is NativeOutcome.NODE_FAILED and "Evicted" in job.end.text


async def test_a_finished_run_stays_what_it_was_whatever_its_pod_says_later(rig: Rig) -> None:
    """BR-022, second part: a kubelet that was restarted makes an error of a success."""
    work = rig.work("true\n")
    await rig.cluster.submit(work)
    first = await rig.until(work.attempt, over)
    assert first.end and first.end.code == 0
    rig.world.say(work.attempt.id, phase="Failed", reason="UnexpectedAdmissionError", message="kubelet restarted", containerStatuses=[])
    pods = rig.cluster.sight.places["fed-acme"].pods.kept

    async def seen() -> bool:
        return any(pod.status.reason for pod in pods.objects.values())

    await until(seen)
    assert (await rig.until(work.attempt, over)) == first


async def test_the_wall_limit_of_the_pod_ends_it_where_its_stub_did_not(rig: Rig) -> None:
    one = await running(rig, "trap '' TERM; while :; do sleep 0.1; done\n")
    rig.world.store.change(PODS, rig.world.pod(one.id), lambda pod: pod["spec"].update(activeDeadlineSeconds=1))
    job = await rig.until(one, over)
    assert job.end and job.end.outcome is NativeOutcome.WALL_LIMIT


async def test_a_job_s_own_deadline_ends_what_never_began_as_never_started(rig: Rig) -> None:
    rig.world.plane.held = True
    work = rig.work("true\n")
    await rig.cluster.submit(work)
    name = rig.world.job(work.attempt.id)["metadata"]["name"]
    await rig.cluster.api.patch(jobs("fed-acme", name), {"spec": {"activeDeadlineSeconds": 1}})
    job = await rig.until(work.attempt, over)
    assert job.end and job.end.outcome is NativeOutcome.NEVER_STARTED


async def test_preemption_and_a_lost_node_are_not_the_job_s_doing(rig: Rig) -> None:
    one = await running(rig)
    rig.world.preempt(one.id)
    job = await rig.until(one, over)
    assert job.end and job.end.outcome is NativeOutcome.PREEMPTED, job
    two = await running(rig)
    node = (await rig.until(two, runs)).nodes[0]
    rig.world.lose_node(node)
    assert (await rig.until(two, runs)).end is None, "a node that is not heard says nothing of its pods"
    rig.world.collect_lost(node)
    job = await rig.until(two, over)
    assert job.end and job.end.outcome is NativeOutcome.NODE_FAILED, job


# --- cancel ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [3, 0])
async def test_a_cancel_ends_what_runs_and_is_told_from_its_own_end(rig: Rig, code: int) -> None:
    """Many programs answer SIGTERM with 0: that is no success."""
    one = await running(rig, f"trap 'exit {code}' TERM; touch ready; while :; do sleep 0.1; done\n")
    ready = Path(rig.rules.namespaces["fed-acme"].local) / one.id / "ready"

    async def set_up() -> bool:
        return ready.exists()

    await until(set_up)
    await rig.cluster.cancel(one.id, 1)
    job = await rig.until(one, over)
    assert job.end and (job.end.outcome, job.end.code) == (NativeOutcome.CANCELLED, code), job


async def test_a_cancel_of_what_waits_means_that_it_never_starts(rig: Rig) -> None:
    rig.world.plane.held = True
    work = rig.work("true\n")
    await rig.cluster.submit(work)
    await rig.until(work.attempt, lambda job: job.phase is NativePhase.QUEUED)
    await rig.cluster.cancel(work.attempt.id, 1)
    job = await rig.until(work.attempt, over)
    assert job.end and job.end.outcome is NativeOutcome.NEVER_STARTED


async def test_a_cancel_of_what_is_over_or_unknown_changes_nothing(rig: Rig) -> None:
    job = await ended(rig, "exit 4\n")
    await rig.cluster.cancel(job.tag, 1)
    await rig.cluster.cancel(attempt().id, 1)
    assert len(rig.world.store.list(JOBS)) == 1 and job.end and job.end.code == 4
    again = rig.again()
    try:
        await again.cancel(job.tag, 1)
    finally:
        await again.close()


async def test_what_cannot_be_killed_runs_on_and_is_seen_to(rig: Rig) -> None:
    one = await running(rig, "trap '' TERM; while :; do sleep 0.1; done\n")
    uid = rig.world.pod(one.id)["metadata"]["uid"]
    rig.world.kubelets.stuck.add(uid)
    await rig.cluster.cancel(one.id, 1)
    job = await rig.until(one, lambda job: job.state.endswith("Terminating"))
    assert job.phase is NativePhase.RUNNING and job.end is None
    rig.world.kubelets.stuck.clear()
    job = await rig.until(one, over)
    assert job.end and job.end.outcome is NativeOutcome.CANCELLED


async def test_what_the_site_deleted_itself_is_not_said_to_be_our_cancel(rig: Rig) -> None:
    one = await running(rig)
    rig.world.api.delete(JOBS, rig.world.job(one.id), {"propagationPolicy": "Foreground"})
    job = await rig.until(one, over)
    assert job.end and job.end.outcome is NativeOutcome.CANCELLED and "not by us" in job.end.text


# --- looking -----------------------------------------------------------------------------------------------------------------------------


async def test_a_version_that_is_gone_leads_to_a_new_list_and_nothing_is_lost(rig: Rig) -> None:
    """410 Gone."""
    one = await running(rig, "while [ ! -e go ]; do sleep 0.1; done; exit 5\n")
    before = rig.world.api.requests
    rig.world.store.compact()
    (Path(rig.rules.namespaces["fed-acme"].local) / one.id / "go").touch()
    job = await rig.until(one, over)
    assert job.end and job.end.code == 5 and rig.world.api.requests > before


async def test_watches_that_are_cut_begin_again_where_they_were(rig: Rig) -> None:
    one = await running(rig, "while [ ! -e go ]; do sleep 0.1; done; exit 6\n")
    for _ in range(3):
        rig.world.api.cut()
    (Path(rig.rules.namespaces["fed-acme"].local) / one.id / "go").touch()
    job = await rig.until(one, over)
    assert job.end and job.end.code == 6


async def test_a_cluster_that_answers_nothing_makes_no_job_end(rig: Rig) -> None:
    """Silence is not an answer: the last known word stands, and the look says that it is not complete."""
    one = await running(rig)
    rig.world.api.deaf = True
    rig.world.api.cut()
    listing = await rig.cluster.status([one.id])
    assert not listing.complete and listing.why and listing.jobs[one.id].phase is NativePhase.RUNNING
    rig.world.api.deaf = False
    await until(lambda: complete(rig.cluster))
    assert (await rig.until(one, runs)).end is None


async def test_an_empty_list_ends_nothing(rig: Rig) -> None:
    one = await running(rig)
    rig.world.api.empty = 10
    rig.world.store.compact()
    async with asyncio.timeout(PATIENCE_S):
        while rig.world.api.empty > 2:
            assert (await rig.cluster.status([one.id])).jobs[one.id].phase is NativePhase.RUNNING
            rig.world.store.compact()
            await asyncio.sleep(0.05)
    rig.world.api.empty = 0
    rig.world.store.compact()
    assert (await rig.until(one, runs)).end is None


async def test_a_rotated_token_is_read_again_and_a_bad_one_changes_no_job(rig: Rig) -> None:
    """BR-137."""
    one = await running(rig)
    file = rig.world.folder / "agent.token"
    old = file.read_text(encoding="ascii")
    file.write_text(rig.world.agent_token(rig.rules), encoding="ascii")
    rig.world.access.revoke(old)
    rig.world.api.cut()
    await until(lambda: complete(rig.cluster))
    rig.world.access.revoke(file.read_text(encoding="ascii"))
    listing = await rig.cluster.status([one.id])
    assert not listing.complete and "Unauthorized" in listing.why and listing.jobs[one.id].phase is NativePhase.RUNNING


async def test_what_ended_and_was_cleaned_up_while_the_agent_was_away_is_unknown_and_not_run_again(rig: Rig) -> None:
    """BR-056: gone without evidence. What had been seen to end before stays so."""
    seen = await ended(rig, "exit 9\n")
    one = await running(rig)
    await rig.cluster.close()
    rig.world.store.remove(JOBS, rig.world.job(seen.tag))
    rig.world.store.remove(PODS, rig.world.pod(one.id))
    rig.world.store.remove(JOBS, rig.world.job(one.id))
    again = rig.again()
    try:
        job = await rig.until(one, over, again)
        assert job.end and job.end.outcome is NativeOutcome.UNKNOWN
        assert (await again.status([seen.tag])).jobs[seen.tag].end == seen.end
        told = {row.tag: row for row in await again.accounting(CLOCK.now() - timedelta(hours=1), CLOCK.now() + timedelta(hours=1))}
        assert told[seen.tag].elapsed_us is not None and told[one.id].elapsed_us is None
        assert {row.devices for row in told.values()} == {1}
    finally:
        await again.close()
