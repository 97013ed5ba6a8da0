"""The control plane in small: the scheduler, the Job controller with its deadlines, limits and garbage, and Kueue's admission."""

from __future__ import annotations

import copy
from collections import Counter
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from tests.adapters.kubernetes_world import admission
from tests.adapters.kubernetes_world.kinds import EVENTS, JOBS, NODES, PODS, Failure, Obj, now, validate, when
from tests.adapters.kubernetes_world.server import Api
from tests.adapters.kubernetes_world.store import Store

from intertie.agent.kubernetes.core.quantity import quantity

QUEUE = "kueue.x-k8s.io/queue-name"
UID_LABEL = "batch.kubernetes.io/controller-uid"


def condition(obj: Obj, kind: str, status: str, reason: str = "", message: str = "") -> None:
    """Set one condition; its transition time moves only if its status does."""
    rows = obj["status"].setdefault("conditions", [])
    old = next((row for row in rows if row["type"] == kind), None)
    row = {
        "type": kind,
        "status": status,
        "lastTransitionTime": now(),
        **({"reason": reason} if reason else {}),
        **({"message": message} if message else {}),
    }
    if old is not None:
        if old["status"] == status:
            row["lastTransitionTime"] = old["lastTransitionTime"]
        rows.remove(old)
    rows.append(row)


def has(obj: Obj, kind: str) -> bool:
    return any(row["type"] == kind and row["status"] == "True" for row in obj.get("status", {}).get("conditions") or [])


class ControlPlane:
    def __init__(self, store: Store, api: Api) -> None:
        self.store, self.api = store, api
        self.held = False
        """No pod is bound to a node."""
        self.kueue = False
        """Kueue runs here: it alone lets go what names a queue."""
        self.kueue_admits = True
        self.numbers = Counter[str]()

    def tick(self) -> None:
        for job in self.store.list(JOBS):
            self._kueue(job)
            self._job(self.store.objects.get(("batch/v1", "jobs", job["metadata"]["namespace"], job["metadata"]["name"]), job))
        for pod in self.store.list(PODS):
            if not pod["spec"].get("nodeName") and not pod["metadata"].get("deletionTimestamp"):
                self._schedule(pod)
        self._garbage()

    # --- scheduler ---

    def _schedule(self, pod: Obj) -> None:
        if self.held:
            self._unschedulable(pod, "0/0 nodes are available: held by the test.")
            return
        short = Counter[str]()
        nodes = self.store.list(NODES)
        for node in nodes:
            why = self._misfit(pod, node)
            if not why:
                self.store.change(PODS, pod, lambda one: _bind(one, node["metadata"]["name"]))  # noqa: B023  # called now
                return
            short.update(why)
        told = ", ".join(f"{count} {why}" for why, count in sorted(short.items()))
        self._unschedulable(pod, f"0/{len(nodes)} nodes are available: {told}.")

    def _unschedulable(self, pod: Obj, message: str) -> None:
        self.store.change(PODS, pod, lambda one: condition(one, "PodScheduled", "False", "Unschedulable", message))

    def _misfit(self, pod: Obj, node: Obj) -> list[str]:
        spec = node.get("spec", {})
        if spec.get("unschedulable"):
            return ["node(s) were unschedulable"]
        if any(taint["effect"] in ("NoSchedule", "NoExecute") for taint in spec.get("taints") or []):
            return ["node(s) had untolerated taint"]
        labels = node["metadata"].get("labels") or {}
        if any(labels.get(name) != value for name, value in (pod["spec"].get("nodeSelector") or {}).items()):
            return ["node(s) didn't match Pod's node affinity/selector"]
        free = self._free(node)
        return [f"Insufficient {name}" for name, amount in _requests(pod).items() if amount > free.get(name, Decimal(0))]

    def _free(self, node: Obj) -> dict[str, Decimal]:
        free = {name: quantity(amount) for name, amount in node["status"]["allocatable"].items()}
        for pod in self.store.list(PODS):
            if pod["spec"].get("nodeName") == node["metadata"]["name"] and pod["status"].get("phase") not in ("Succeeded", "Failed"):
                for name, amount in _requests(pod).items():
                    free[name] = free.get(name, Decimal(0)) - amount
        return free

    # --- Jobs ---

    def _kueue(self, job: Obj) -> None:
        if (
            self.kueue
            and self.kueue_admits
            and QUEUE in (job["metadata"].get("labels") or {})
            and job["spec"].get("suspend")
            and not has(job, "Failed")
        ):
            self.store.change(JOBS, job, lambda one: one["spec"].update(suspend=False))

    def pods_of(self, job: Obj) -> list[Obj]:
        uid = job["metadata"]["uid"]
        return [
            pod
            for pod in self.store.list(PODS, job["metadata"]["namespace"])
            if any(o["uid"] == uid for o in pod["metadata"].get("ownerReferences", []))
        ]

    def _job(self, job: Obj) -> None:
        pods = self.pods_of(job)
        if job["metadata"].get("deletionTimestamp"):
            self._leave(job, pods)
            return
        over = has(job, "Complete") or has(job, "Failed")
        if over:
            self._expire(job)
            return
        if job["spec"].get("suspend"):
            for pod in pods:
                self._drop(pod)
            self.store.change(JOBS, job, _suspended)
            return
        self._go_on(job, pods)

    def _go_on(self, job: Obj, pods: list[Obj]) -> None:
        def begin(one: Obj) -> None:
            one["status"].setdefault("startTime", now())
            if has(one, "Suspended"):
                condition(one, "Suspended", "False", "JobResumed", "Job resumed")
                one["status"]["startTime"] = now()

        job = self.store.change(JOBS, job, begin)
        done = [pod for pod in pods if pod["status"].get("phase") == "Succeeded"]
        failed = [pod for pod in pods if pod["status"].get("phase") == "Failed"]
        live = [pod for pod in pods if pod not in done and pod not in failed]
        counted = len(failed) + job["status"].get("lost", 0)
        limit = job["spec"].get("activeDeadlineSeconds")
        late = limit is not None and datetime.now(UTC) - when(job["status"]["startTime"]) >= timedelta(seconds=limit)
        if done:
            self._finish(job, live, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")
        elif late:
            self._finish(job, live, "Failed", "DeadlineExceeded", "Job was active longer than specified deadline")
        elif counted > job["spec"]["backoffLimit"]:
            self._finish(job, live, "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
        elif not live:
            self._make_pod(job)
        self.store.change(JOBS, job, lambda one: one["status"].update(active=len(live), succeeded=len(done), failed=counted))

    def _finish(self, job: Obj, live: list[Obj], kind: str, reason: str, message: str) -> None:
        for pod in live:
            self._drop(pod)

        def end(one: Obj) -> None:
            condition(one, kind, "True", reason, message)
            if kind == "Complete":
                one["status"]["completionTime"] = now()

        self.store.change(JOBS, job, end)

    def _make_pod(self, job: Obj) -> None:
        template = copy.deepcopy(job["spec"]["template"])
        name = job["metadata"]["name"]
        self.numbers[name] += 1
        meta = template.get("metadata", {})
        labels = {**(meta.get("labels") or {}), UID_LABEL: job["metadata"]["uid"], "batch.kubernetes.io/job-name": name, "job-name": name}
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": name,
            "uid": job["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
        pod: Obj = {
            "metadata": {
                "name": f"{name[:57]}-{self.numbers[name]:05x}",
                "namespace": job["metadata"]["namespace"],
                "labels": labels,
                "annotations": meta.get("annotations") or {},
                "ownerReferences": [owner],
            },
            "spec": template["spec"],
        }
        try:
            validate(pod, PODS)
            admission.admit(self.store, PODS, pod)
            self.store.create(PODS, job["metadata"]["namespace"], pod)
        except Failure as failure:
            self.event(job, "FailedCreate", f"Error creating: {failure.message}")

    def event(self, about: Obj, reason: str, message: str) -> None:
        meta = about["metadata"]
        if any(
            event["involvedObject"].get("uid") == meta["uid"] and (event["reason"], event["message"]) == (reason, message)
            for event in self.store.list(EVENTS, meta["namespace"])
        ):
            return
        involved = {
            "kind": about["kind"],
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
            "apiVersion": about["apiVersion"],
        }
        event: Obj = {
            "metadata": {"name": f"{meta['name'][:200]}.{self.store.version:x}"},
            "involvedObject": involved,
            "reason": reason,
            "message": message,
            "type": "Warning",
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "count": 1,
        }
        self.store.create(EVENTS, meta["namespace"], event)

    def _drop(self, pod: Obj) -> None:
        if not pod["metadata"].get("deletionTimestamp"):
            self.api.delete_pod(pod, int(pod["spec"]["terminationGracePeriodSeconds"]))

    def _leave(self, job: Obj, pods: list[Obj]) -> None:
        """Foreground: the pods first."""
        for pod in pods:
            self._drop(pod)
        if not self.pods_of(job):
            self.store.remove(JOBS, job)

    def _expire(self, job: Obj) -> None:
        ttl = job["spec"].get("ttlSecondsAfterFinished")
        ended = [row["lastTransitionTime"] for row in job["status"]["conditions"] if row["type"] in ("Complete", "Failed")]
        if ttl is not None and ended and datetime.now(UTC) - when(ended[0]) >= timedelta(seconds=ttl):
            self.store.remove(JOBS, job)

    def _garbage(self) -> None:
        """What is owned by a Job that is no more goes too."""
        jobs = {job["metadata"]["uid"] for job in self.store.list(JOBS)}
        for pod in self.store.list(PODS):
            owners = [o["uid"] for o in pod["metadata"].get("ownerReferences", []) if o["kind"] == "Job"]
            if owners and not set(owners) & jobs:
                self._drop(pod)

    def lost_pod(self, pod: Obj) -> None:
        """A pod that was deleted without having ended counts as a failure of its Job, unless the Job was suspended."""
        for job in self.store.list(JOBS, pod["metadata"]["namespace"]):
            if any(o["uid"] == job["metadata"]["uid"] for o in pod["metadata"].get("ownerReferences", [])) and not job["spec"].get(
                "suspend"
            ):
                self.store.change(JOBS, job, lambda one: one["status"].update(lost=one["status"].get("lost", 0) + 1))


def _suspended(job: Obj) -> None:
    condition(job, "Suspended", "True", "JobSuspended", "Job suspended")
    job["status"].pop("startTime", None)
    job["status"]["active"] = 0


def _bind(pod: Obj, node: str) -> None:
    pod["spec"]["nodeName"] = node
    condition(pod, "PodScheduled", "True")


def _requests(pod: Obj) -> dict[str, Decimal]:
    told: dict[str, Decimal] = {}
    for container in pod["spec"]["containers"]:
        for name, amount in (container["resources"].get("requests") or {}).items():
            told[name] = told.get(name, Decimal(0)) + quantity(amount)
    return told
