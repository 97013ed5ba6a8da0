"""What may be created: Pod Security's `baseline` and `restricted` in full for Linux pods, quotas, service accounts, and the defaults that come with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from tests.adapters.kubernetes_world.kinds import BY_PATH, JOBS, NAMESPACES, PODS, Failure, Kind, Obj
from tests.adapters.kubernetes_world.store import Store

from intertie.agent.kubernetes.core.quantity import quantity

RESTRICTED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
BASELINE_CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
    *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}
JOB_IMMUTABLE = ("completions", "selector", "template", "completionMode", "podFailurePolicy", "backoffLimitPerIndex", "managedBy")


def admit(store: Store, kind: Kind, obj: Obj) -> None:
    """Defaults, then refusals. For pods and Jobs; the rest is stored as it comes."""
    if kind is PODS:
        _default_pod(obj)
        _service_account(store, obj)
        _pod_security(store, obj)
        _quota(store, obj)
    elif kind is JOBS:
        _default_job(obj)


def changed(kind: Kind, before: Obj, after: Obj) -> None:
    """422 where a field cannot be changed any more."""
    if kind is JOBS:
        for field in JOB_IMMUTABLE:
            old, new = copy.deepcopy(before["spec"].get(field)), copy.deepcopy(after["spec"].get(field))
            if old != new and not (
                field == "template" and before["spec"].get("suspend") and before.get("status", {}).get("startTime") is None
            ):
                raise Failure(422, "Invalid", f'Job.batch "{after["metadata"]["name"]}" is invalid: spec.{field}: field is immutable')
    if kind is PODS and before["spec"] != after["spec"]:
        mutable = {"activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds"}
        if {k: v for k, v in before["spec"].items() if k not in mutable} != {k: v for k, v in after["spec"].items() if k not in mutable}:
            raise Failure(422, "Invalid", f'Pod "{after["metadata"]["name"]}" is invalid: spec: pod updates may not change these fields')


def _default_pod(pod: Obj) -> None:
    spec = pod["spec"]
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("serviceAccountName", "default")
    spec.setdefault("schedulerName", "default-scheduler")
    for container in spec["containers"]:
        resources = container.setdefault("resources", {})
        if resources.get("limits"):
            resources["requests"] = {**resources["limits"], **(resources.get("requests") or {})}
    pod["status"] = {"phase": "Pending", "qosClass": "Guaranteed", "conditions": []}


def _default_job(job: Obj) -> None:
    spec = job["spec"]
    spec.setdefault("backoffLimit", 6)
    spec.setdefault("completions", 1)
    spec.setdefault("parallelism", 1)
    spec.setdefault("suspend", False)
    if spec["template"]["spec"].get("restartPolicy") not in ("Never", "OnFailure"):
        raise Failure(422, "Invalid", f'Job.batch "{job["metadata"]["name"]}" is invalid: spec.template.spec.restartPolicy: Required value')
    job["status"] = {}


def _service_account(store: Store, pod: Obj) -> None:
    namespace, name = pod["metadata"]["namespace"], pod["spec"]["serviceAccountName"]
    try:
        store.get(BY_PATH["v1", "serviceaccounts"], namespace, name)
    except Failure:
        if name != "default":
            raise Failure(
                403,
                "Forbidden",
                f'pods "{pod["metadata"]["name"]}" is forbidden: error looking up service account {namespace}/{name}: not found',
            ) from None


# --- Pod Security ------------------------------------------------------------------------------------------------------------------------


def _pod_security(store: Store, pod: Obj) -> None:
    namespace = store.get(NAMESPACES, "", pod["metadata"]["namespace"])
    level = (namespace["metadata"].get("labels") or {}).get("pod-security.kubernetes.io/enforce", "privileged")
    broken = [] if level == "privileged" else [*_baseline(pod["spec"]), *(_restricted(pod["spec"]) if level == "restricted" else ())]
    if broken:
        raise Failure(
            403, "Forbidden", f'pods "{pod["metadata"]["name"]}" is forbidden: violates PodSecurity "{level}:latest": {", ".join(broken)}'
        )


def _containers(spec: Obj) -> list[Obj]:
    return [*spec["containers"], *spec.get("initContainers", []), *spec.get("ephemeralContainers", [])]


def _baseline(spec: Obj) -> Iterator[str]:
    if any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        yield "host namespaces"
    if any("hostPath" in volume for volume in spec.get("volumes", [])):
        yield "hostPath volumes"
    if (spec.get("securityContext") or {}).get("sysctls"):
        yield "forbidden sysctls"
    for one in _containers(spec):
        context = one.get("securityContext") or {}
        if context.get("privileged"):
            yield "privileged"
        if set((context.get("capabilities") or {}).get("add", [])) - BASELINE_CAPABILITIES:
            yield "non-default capabilities"
        if any(port.get("hostPort") for port in one.get("ports", [])):
            yield "hostPort"
        if context.get("procMount", "Default") != "Default":
            yield "procMount"
    contexts = [spec.get("securityContext") or {}, *((one.get("securityContext") or {}) for one in _containers(spec))]
    if any((context.get("seccompProfile") or {}).get("type") == "Unconfined" for context in contexts):
        yield "seccompProfile"


def _restricted(spec: Obj) -> Iterator[str]:
    pod = spec.get("securityContext") or {}
    for volume in spec.get("volumes", []):
        if not set(volume) - {"name"} <= RESTRICTED_VOLUMES:
            yield "restricted volume types"
    if pod.get("runAsUser") == 0:
        yield "runAsUser=0"
    for one in _containers(spec):
        context = one.get("securityContext") or {}
        if context.get("allowPrivilegeEscalation") is not False:
            yield "allowPrivilegeEscalation != false"
        capabilities = context.get("capabilities") or {}
        if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            yield "unrestricted capabilities"
        if context.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
            yield "runAsNonRoot != true"
        if context.get("runAsUser") == 0:
            yield "runAsUser=0"
        seccomp = (context.get("seccompProfile") or pod.get("seccompProfile") or {}).get("type")
        if seccomp not in ("RuntimeDefault", "Localhost"):
            yield "seccompProfile"


# --- quota -------------------------------------------------------------------------------------------------------------------------------


def _quota(store: Store, pod: Obj) -> None:
    namespace = pod["metadata"]["namespace"]
    wanted = usage(pod)
    others = [usage(one) for one in store.list(PODS, namespace) if one["status"].get("phase") not in ("Succeeded", "Failed")]
    for quota in store.list(BY_PATH["v1", "resourcequotas"], namespace):
        hard = quota["spec"].get("hard", {})
        for name, limit in hard.items():
            if name.split(".")[-1] in ("cpu", "memory") and name not in wanted:
                raise Failure(403, "Forbidden", f"failed quota: {quota['metadata']['name']}: must specify {name}")
            used = sum(quantity(one.get(name, "0")) for one in others)
            if used + quantity(wanted.get(name, "0")) > quantity(limit):
                raise Failure(
                    403,
                    "Forbidden",
                    f'pods "{pod["metadata"]["name"]}" is forbidden: exceeded quota: {quota["metadata"]["name"]}, '
                    f"requested: {name}={wanted.get(name, '0')}, used: {name}={used}, limited: {name}={limit}",
                )


def usage(pod: Obj) -> dict[str, str]:
    """As quotas name it: `pods`, `requests.cpu`, `limits.memory`, `requests.nvidia.com/gpu`, `cpu`."""
    told: dict[str, str] = {"pods": "1", "count/pods": "1"}
    for container in pod["spec"]["containers"]:
        for side in ("requests", "limits"):
            for name, amount in (container.get("resources", {}).get(side) or {}).items():
                keys = [f"{side}.{name}", name] if side == "requests" else [f"{side}.{name}"]
                for key in keys:
                    told[key] = str(quantity(told.get(key, "0")) + quantity(amount))
    return told
