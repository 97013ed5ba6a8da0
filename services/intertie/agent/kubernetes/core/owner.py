"""What the owner applies before a site's first job: namespaces, quotas, the closed network, accounts, and the agent's rights, each of them used.

The agent may do in the tenants' namespaces what `VERBS` says, may read nodes, and nothing else in the whole cluster.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from intertie.agent.kubernetes.core.manifest import LABEL_MANAGED, MANAGED
from intertie.agent.kubernetes.core.settings import KubernetesRules, Namespace, checked
from intertie.errors import Refused

VERBS: Mapping[tuple[str, str], tuple[str, ...]] = {
    # (API group, resource) in each tenant's namespace: why.
    ("batch", "jobs"): ("create", "delete", "get", "list", "patch", "watch"),  # submit, cancel, look for a tag, say why it was deleted
    ("", "pods"): ("list", "watch"),  # what runs
    ("", "pods/log"): ("get",),  # only where the job left no log file
    ("", "events"): ("list", "watch"),  # why a Job has no pod
}
CLUSTER_VERBS: Mapping[tuple[str, str], tuple[str, ...]] = {("", "nodes"): ("list", "watch")}


def manifests(rules: KubernetesRules) -> list[dict[str, Any]]:
    """In the order in which they can be applied."""
    told: list[dict[str, Any]] = [
        _object("v1", "Namespace", rules.agent_namespace, labels={"pod-security.kubernetes.io/enforce": "restricted"}),
        _object("v1", "ServiceAccount", rules.agent_service_account, rules.agent_namespace),
        _object("rbac.authorization.k8s.io/v1", "ClusterRole", "intertie-nodes") | {"rules": _rules(CLUSTER_VERBS)},
        _binding("ClusterRoleBinding", "intertie-nodes", "ClusterRole", rules, None),
    ]
    for name, namespace in sorted(rules.namespaces.items()):
        told += _namespace(name, namespace, rules)
    return told


def _namespace(name: str, namespace: Namespace, rules: KubernetesRules) -> list[dict[str, Any]]:
    level = namespace.pod_security
    labels = {f"pod-security.kubernetes.io/{mode}": level for mode in ("enforce", "audit", "warn")} | {
        "intertie.io/tenant": namespace.tenant
    }
    chosen = {"intertie.io/pod-security-by": namespace.pod_security_by, "intertie.io/pod-security-reason": namespace.pod_security_reason}
    space = _object("v1", "Namespace", name, labels=labels, annotations=chosen if level == "baseline" else None)
    told = [
        space,
        _object("v1", "ServiceAccount", namespace.service_account, name) | {"automountServiceAccountToken": False},
        _object("v1", "ServiceAccount", "default", name) | {"automountServiceAccountToken": False},
        _object("networking.k8s.io/v1", "NetworkPolicy", "intertie-closed", name)
        | {"spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}},
    ]
    if namespace.quota:
        told.append(_object("v1", "ResourceQuota", "intertie-lent", name) | {"spec": {"hard": dict(sorted(namespace.quota.items()))}})
    told.append(_object("rbac.authorization.k8s.io/v1", "Role", "intertie-agent", name) | {"rules": _rules(VERBS)})
    told.append(_binding("RoleBinding", "intertie-agent", "Role", rules, name))
    return told


def _object(
    version: str,
    kind: str,
    name: str,
    namespace: str | None = None,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    meta: dict[str, Any] = {"name": name}
    if namespace is not None:
        meta["namespace"] = namespace
    meta["labels"] = {LABEL_MANAGED: MANAGED, **(labels or {})}
    if annotations:
        meta["annotations"] = dict(annotations)
    return {"apiVersion": version, "kind": kind, "metadata": meta}


def _binding(kind: str, name: str, role: str, rules: KubernetesRules, namespace: str | None) -> dict[str, Any]:
    subject = {"kind": "ServiceAccount", "name": rules.agent_service_account, "namespace": rules.agent_namespace}
    return _object("rbac.authorization.k8s.io/v1", kind, name, namespace) | {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": role, "name": name},
        "subjects": [subject],
    }


def _rules(verbs: Mapping[tuple[str, str], Sequence[str]]) -> list[dict[str, Any]]:
    return [{"apiGroups": [group], "resources": [resource], "verbs": list(allowed)} for (group, resource), allowed in verbs.items()]


def printed(rules: KubernetesRules | None, *, as_json: bool = False) -> str:
    """For `kubectl apply -f -`. `Refused` if site.toml says nothing of a cluster, or what cannot be."""
    if rules is None or not rules.namespaces:
        raise Refused(
            "kubernetes.settings",
            "site.toml names no namespace that is given to the federation",
            next_step="add [kubernetes] and [kubernetes.namespaces.NAME]; ops/docs/kubernetes.md shows them",
        )
    objects = manifests(checked(rules))
    if as_json:
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2) + "\n"
    return as_yaml(objects)


def as_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
    """One document each. Strings are written as JSON writes them, which YAML reads the same."""
    return "---\n".join("\n".join(_lines(one, "")) + "\n" for one in objects)


def _lines(value: Mapping[str, Any], indent: str) -> list[str]:
    told: list[str] = []
    for key, inner in value.items():
        plain = key if key.replace("-", "").isalnum() and key[0].isalpha() else json.dumps(key)
        if isinstance(inner, Mapping) and inner:
            told += [f"{indent}{plain}:", *_lines(inner, indent + "  ")]
        elif isinstance(inner, Sequence) and not isinstance(inner, str) and inner and isinstance(inner[0], Mapping):
            told.append(f"{indent}{plain}:")
            for item in inner:
                first, *rest = _lines(item, indent + "    ")
                told += [f"{indent}  - {first.lstrip()}", *rest]
        else:
            told.append(f"{indent}{plain}: {json.dumps(inner)}")
    return told
