"""The owner's `[kubernetes]` in `site.toml`: how the cluster is reached, which namespace is whose, and what a job may look like there.

A namespace that is not named here receives nothing, whatever the hub's mapping says.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated

import msgspec

from intertie.agent.kubernetes.core.quantity import quantity
from intertie.errors import Refused

LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?\Z")
"""RFC 1123: names of namespaces, claims, service accounts."""
IMAGE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._/:-]{0,254}@sha256:[0-9a-f]{64}\Z")
RESOURCE = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?/[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z")
NOT_FOR_JOBS = re.compile(r"(default|kube-.*|openshift-.*)\Z")
"""Namespaces of the cluster itself: no mapping leads into one."""

Seconds = Annotated[int, msgspec.Meta(ge=1, le=604_800)]


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One namespace and the one tenant that it belongs to; its name is the local account that the hub maps the tenant to."""

    tenant: str
    claim: str
    """PersistentVolumeClaim in that namespace that holds the job folders."""
    local: str
    """Where this agent sees the same volume; it is mounted at the same path in the jobs, each job its own folder of it only."""
    uid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    """Whom its containers run as: never root."""
    gid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    service_account: str = "intertie-job"
    queue: str = ""
    """Kueue's LocalQueue: jobs are created suspended, and only Kueue lets them go."""
    pod_security: str = "restricted"
    """`baseline` only with a name and a reason."""
    pod_security_by: str = ""
    pod_security_reason: str = ""
    image: str = ""
    node_selector: dict[str, str] = {}
    runtime_class: str = ""
    quota: dict[str, str] = {}
    """The ResourceQuota's `hard`, as the printed manifests say it: what is lent, enforced by the cluster also when the hub is away."""


class KubernetesRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[kubernetes]`. Without `kubeconfig` the agent runs in the cluster and uses its own service account there."""

    cluster: str
    """Its name in the books; native ids mean nothing without it."""
    kubeconfig: str = ""
    context: str = ""
    namespaces: dict[str, Namespace] = {}
    image: str = ""
    """For jobs of namespaces without one of their own; by digest."""
    devices: dict[str, str] = {}
    """Resource name by accelerator model, such as `A100-MIG-1g.10gb = "nvidia.com/mig-1g.10gb"`."""
    device: str = "nvidia.com/gpu"
    """Resource of any accelerator that `devices` does not name."""
    model_label: str = "nvidia.com/gpu.product"
    """Node label that says the model …"""
    models: dict[str, str] = {}
    """… and its value by accelerator model, such as `A100-SXM4-80GB = "NVIDIA-A100-SXM4-80GB"`; a model that is not here selects no node."""
    cpu: str = "1"
    """Of each slot, or beside each accelerator."""
    memory: str = "2Gi"
    """Of each slot, or beside each accelerator; request and limit are the same."""
    shm: str = "1Gi"
    """Size of /dev/shm, counted in the job's memory."""
    launch_s: Seconds = 600
    """A pod that has its node and does not get to run (image, volume, configuration) is given up after this long."""
    keep_s: Seconds = 604_800
    """`ttlSecondsAfterFinished`: how long the cluster keeps what has ended."""
    observe_s: Seconds = 10
    """Between looks at all jobs: each is answered from what is watched, and costs the API server one small question per namespace."""
    agent_service_account: str = "intertie-agent"
    agent_namespace: str = "intertie"


def checked(rules: KubernetesRules) -> KubernetesRules:
    """As they are, or `Refused('kubernetes.settings')` with the first line that cannot be meant."""
    if not LABEL.match(rules.cluster):
        _refuse("cluster", rules.cluster, "is no name of 1 to 63 of a-z, 0-9 and '-'")
    if rules.image and not IMAGE.match(rules.image):
        _refuse("image", rules.image, "has no digest", "write registry/name@sha256:…; `crane digest IMAGE` or the registry's page tells it")
    for model, resource in [("device", rules.device), *rules.devices.items()]:
        if not RESOURCE.match(resource):
            _refuse(f"devices.{model}", resource, "is no extended resource such as nvidia.com/gpu")
    for field in ("cpu", "memory", "shm"):
        _amount(field, getattr(rules, field))
    for name, namespace in rules.namespaces.items():
        _namespace(name, namespace, rules)
    _apart(rules)
    return rules


def _namespace(name: str, namespace: Namespace, rules: KubernetesRules) -> None:
    where = f"namespaces.{name}"
    if not LABEL.match(name):
        _refuse(where, name, "is no namespace's name")
    if NOT_FOR_JOBS.match(name) or name == rules.agent_namespace:
        _refuse(where, name, "is the cluster's or the agent's own", "give tenants namespaces of their own")
    for field in ("claim", "service_account"):
        if not LABEL.match(getattr(namespace, field)):
            _refuse(f"{where}.{field}", getattr(namespace, field), "is no object's name")
    if namespace.service_account == "default":
        _refuse(f"{where}.service_account", "default", "is shared with everything else there", "name one of its own, such as intertie-job")
    local = PurePosixPath(namespace.local)
    if not local.is_absolute() or ".." in local.parts or len(local.parts) < 2:
        _refuse(f"{where}.local", namespace.local, "is no absolute path below /")
    if namespace.image and not IMAGE.match(namespace.image):
        _refuse(f"{where}.image", namespace.image, "has no digest", "write registry/name@sha256:…")
    if namespace.pod_security not in ("restricted", "baseline"):
        _refuse(f"{where}.pod_security", namespace.pod_security, "is neither restricted nor baseline")
    if namespace.pod_security == "baseline" and not (namespace.pod_security_by.strip() and namespace.pod_security_reason.strip()):
        _refuse(f"{where}.pod_security", "baseline", "needs who decided it and why", "add pod_security_by and pod_security_reason")
    for resource, amount in namespace.quota.items():
        _amount(f"{where}.quota.{resource}", amount)


def _apart(rules: KubernetesRules) -> None:
    """Two namespaces share no folder: each sees its own tenant's work."""
    rows = sorted(rules.namespaces.items())
    for n, (name, one) in enumerate(rows):
        for other, two in rows[n + 1 :]:
            a, b = PurePosixPath(one.local), PurePosixPath(two.local)
            if a == b or a in b.parents or b in a.parents:
                _refuse(f"namespaces.{other}.local", two.local, f"overlaps that of {name}", "give each namespace a folder of its own")


def _amount(field: str, text: str) -> None:
    try:
        positive = quantity(text) >= 0
    except Refused as err:
        raise Refused("kubernetes.settings", f"site.toml [kubernetes] {field}: {err.text}") from err
    if not positive:
        _refuse(field, text, "is below zero")


def _refuse(field: str, value: str, what: str, next_step: str = "") -> None:
    raise Refused("kubernetes.settings", f"site.toml [kubernetes] {field}: {value[:100]!r} {what}", next_step=next_step)


def namespace_of(rules: KubernetesRules, account: str, tenant: str | None) -> Namespace:
    """The mapped account's namespace. `Refused('kubernetes.namespace')`: the mapping does not own it (row 8 of the features)."""
    known = rules.namespaces.get(account)
    if known is None:
        raise Refused(
            "kubernetes.namespace",
            f"{account[:80]!r} is no namespace that this site's owner gave to the federation",
            next_step="the owner adds [kubernetes.namespaces.NAME] to site.toml, or the hub maps the tenant to one that is there",
        )
    if tenant != known.tenant:
        raise Refused(
            "kubernetes.namespace",
            f"namespace {account} does not belong to {f'tenant {tenant}' if tenant else 'local work'}",
            next_step="the hub maps each tenant to its own namespace; the owner's site.toml says which is whose",
        )
    return known
