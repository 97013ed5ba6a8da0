"""One submit as a Kubernetes Job. Its name is job, epoch and generation, so that a second create of the same is a conflict and not a second run.

Everything is said: namespace, image by digest, account, limits, deadlines. Nothing of the tenant's chooses a namespace, a volume or a right.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from intertie.agent.adapters.port import NativeWork
from intertie.agent.core.images import must_take
from intertie.agent.core.model import Attempt
from intertie.agent.kubernetes.core.quantity import quantity
from intertie.agent.kubernetes.core.settings import IMAGE, KubernetesRules, Namespace, namespace_of
from intertie.contracts.image import PoolImages
from intertie.errors import Refused

LABEL_ATTEMPT = "intertie.io/attempt"
LABEL_JOB = "intertie.io/job"
LABEL_GENERATION = "intertie.io/generation"
LABEL_EPOCH = "intertie.io/epoch"
LABEL_MANAGED = "app.kubernetes.io/managed-by"
MANAGED = "intertie"
ANNOTATION_ENDED_BY = "intertie.io/ended-by"
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
MAIN = "job"
SHM_PATH = "/dev/shm"
# Above what the job's own start stub allows, so that each ends first that knows best: the stub, then the pod, then the Job.
SLACK_S = 60
# The stub asks the job first, then kills it, then writes its record: all of it inside the pod's grace.
STUB_S = 10
LONGEST_S = 2**31 - 1


def name_of(attempt: Attempt) -> str:
    """Of the Job, at most 63 characters: its pods' names and labels derive from it."""
    return f"{attempt.job}-e{attempt.epoch}g{attempt.generation}".lower()[:63]


def job_manifest(work: NativeWork, rules: KubernetesRules, now: datetime, images: PoolImages | None = None) -> dict[str, Any]:
    """What is created. `Refused`: the namespace is not the mapping's, its image is not one of `images` or has no digest, the folder is not in its volume."""
    attempt = work.attempt
    namespace = namespace_of(rules, attempt.account, attempt.tenant)
    named = must_take(attempt.spec.image, images or PoolImages()).pinned if attempt.spec.image else ""
    picture = named or _image(namespace.image or rules.image, attempt.account)
    folder = _folder(work, namespace)
    pending_s = max(0, int((work.start_by - now).total_seconds()))
    running_s = attempt.spec.wall_s + work.grace_s + SLACK_S
    labels = {
        LABEL_MANAGED: MANAGED,
        LABEL_ATTEMPT: attempt.id,
        LABEL_JOB: attempt.job,
        LABEL_GENERATION: str(attempt.generation),
        LABEL_EPOCH: str(attempt.epoch),
    }
    spec: dict[str, Any] = {
        "backoffLimit": 0,
        "completions": 1,
        "parallelism": 1,
        "podReplacementPolicy": "Failed",
        "activeDeadlineSeconds": min(LONGEST_S, pending_s + rules.launch_s + running_s),
        "ttlSecondsAfterFinished": rules.keep_s,
        "suspend": bool(namespace.queue),
        "template": {
            "metadata": {"labels": dict(labels), "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}},
            "spec": _pod(work, rules, namespace, picture, folder, rules.launch_s + running_s),
        },
    }
    queue = {LABEL_QUEUE: namespace.queue} if namespace.queue else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name_of(attempt), "namespace": attempt.account, "labels": labels | queue},
        "spec": spec,
    }


def _pod(
    work: NativeWork, rules: KubernetesRules, namespace: Namespace, image: str, folder: PurePosixPath, deadline_s: int
) -> dict[str, Any]:
    selector = dict(namespace.node_selector)
    model = work.attempt.model or work.attempt.spec.resources.gpu_model or ""
    if model in rules.models:
        selector[rules.model_label] = rules.models[model]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": namespace.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "activeDeadlineSeconds": min(LONGEST_S, deadline_s),
        "terminationGracePeriodSeconds": work.grace_s + STUB_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": namespace.uid,
            "runAsGroup": namespace.gid,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": MAIN,
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sh", str(folder / "start.sh")],
                "workingDir": str(folder),
                "resources": {"requests": resources(work.attempt, rules), "limits": resources(work.attempt, rules)},
                "securityContext": {"allowPrivilegeEscalation": False, "privileged": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [
                    {"name": "work", "mountPath": str(folder), "subPath": str(folder.relative_to(namespace.local))},
                    {"name": "shm", "mountPath": SHM_PATH},
                ],
            }
        ],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": namespace.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": rules.shm}},
        ],
    }
    if selector:
        pod["nodeSelector"] = selector
    if namespace.runtime_class:
        pod["runtimeClassName"] = namespace.runtime_class
    return pod


def resources(attempt: Attempt, rules: KubernetesRules) -> dict[str, str]:
    """Requests, and the same as limits: nothing of ours takes more than the quota counted."""
    asked = attempt.spec.resources
    told = {"cpu": plain(quantity(rules.cpu) * asked.count), "memory": plain(quantity(rules.memory) * asked.count)}
    if asked.gpus:
        told[device_resource(attempt.model or asked.gpu_model or "", rules)] = str(asked.gpus)
    return told


def device_resource(model: str, rules: KubernetesRules) -> str:
    return rules.devices.get(model, rules.device)


def plain(amount: object) -> str:
    """`2.5` → `2500m`, `4` → `4`: quantities that every reader takes alike."""
    thousandths = quantity(str(amount)) * 1000
    return str(int(thousandths) // 1000) if thousandths % 1000 == 0 else f"{-int(-thousandths // 1)}m"


def _image(image: str, account: str) -> str:
    if not image:
        raise Refused(
            "kubernetes.no_image",
            f"no image is named for jobs in {account}",
            next_step="the owner sets image in [kubernetes] or [kubernetes.namespaces.NAME] of site.toml, by digest",
        )
    if not IMAGE.match(image):
        raise Refused(
            "kubernetes.image_digest",
            f"image {image[:200]!r} has no digest: a tag may mean another image tomorrow",
            next_step="write registry/name@sha256:…; `crane digest IMAGE` or the registry's page tells it",
        )
    return image


def _folder(work: NativeWork, namespace: Namespace) -> PurePosixPath:
    folder, local = PurePosixPath(work.folder), PurePosixPath(namespace.local)
    if not folder.is_absolute() or ".." in folder.parts or local not in folder.parents:
        raise Refused(
            "kubernetes.folder",
            f"{folder} does not lie in {local}, which is the volume of namespace {work.attempt.account}",
            next_step="the owner's [kubernetes.namespaces.NAME] local must be where this agent sees the claim",
        )
    return folder


def ended_by(why: str, text: str = "") -> Mapping[str, Any]:
    """The patch that says, before we delete a Job, that it was us and why."""
    return {"metadata": {"annotations": {ANNOTATION_ENDED_BY: f"{why}: {text}"[:1000] if text else why}}}
