"""The resources that this API server serves, and the shapes of its answers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

import jsonschema
import referencing
from kubernetes_validate import utils

Obj = dict[str, Any]
VERSION = "1.33"
VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


@dataclass(frozen=True)
class Kind:
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    short: str = ""
    status: bool = False

    @property
    def group(self) -> str:
        return self.version.rpartition("/")[0]


RBAC = "rbac.authorization.k8s.io/v1"
ALL = [
    Kind("v1", "namespaces", "Namespace", False, "ns", True),
    Kind("v1", "nodes", "Node", False, "no", True),
    Kind("v1", "pods", "Pod", True, "po", True),
    Kind("v1", "events", "Event", True, "ev"),
    Kind("v1", "secrets", "Secret"),
    Kind("v1", "configmaps", "ConfigMap", True, "cm"),
    Kind("v1", "serviceaccounts", "ServiceAccount", True, "sa"),
    Kind("v1", "resourcequotas", "ResourceQuota", True, "quota", True),
    Kind("v1", "limitranges", "LimitRange", True, "limits"),
    Kind("v1", "persistentvolumeclaims", "PersistentVolumeClaim", True, "pvc", True),
    Kind("batch/v1", "jobs", "Job", True, "", True),
    Kind("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy", True, "netpol"),
    Kind("coordination.k8s.io/v1", "leases", "Lease"),
    Kind(RBAC, "roles", "Role"),
    Kind(RBAC, "rolebindings", "RoleBinding"),
    Kind(RBAC, "clusterroles", "ClusterRole", False),
    Kind(RBAC, "clusterrolebindings", "ClusterRoleBinding", False),
]
BY_PATH = {(kind.version, kind.plural): kind for kind in ALL}
PODS, JOBS, NODES = BY_PATH["v1", "pods"], BY_PATH["batch/v1", "jobs"], BY_PATH["v1", "nodes"]
EVENTS, NAMESPACES = BY_PATH["v1", "events"], BY_PATH["v1", "namespaces"]


class Failure(Exception):
    """An answer that is no object: the API's `Status`."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message

    def status(self) -> Obj:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }


def stamp(at: datetime) -> str:
    """Whole seconds, as Kubernetes writes times."""
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def now() -> str:
    return stamp(datetime.now(UTC))


def when(text: str) -> datetime:
    return datetime.fromisoformat(text)


@cache
def _validator(kind: str, version: str) -> jsonschema.Draft202012Validator:
    folder = f"v{_schema_version()}-local-strict"
    name = version.split("/")[0].split(".")[0] + "-" + version.split("/")[1] if "/" in version else version
    schema = utils.schema_contents(f"kubernetes-json-schema/{folder}/{kind.lower()}-{name}.json", VERSION)
    definitions = utils.schema_contents(f"kubernetes-json-schema/{folder}/_definitions.json", VERSION)
    none: referencing.Registry[Any] = referencing.Registry()
    registry = referencing.Resource.from_contents(definitions) @ (referencing.Resource.from_contents(schema) @ none)
    return jsonschema.Draft202012Validator(schema, registry=registry)


@cache
def _schema_version() -> str:
    wanted = tuple(int(part) for part in VERSION.split("."))
    fit = [v for v in utils.all_versions() if tuple(int(part) for part in utils.major_minor(v).split(".")) <= wanted]
    return str(fit[-1])


def validate(obj: Obj, kind: Kind) -> None:
    """422 with the first place that the published schema does not take; unknown fields are refused as `--validate=strict` does."""
    error = next(iter(_validator(kind.kind, kind.version).iter_errors({"apiVersion": kind.version, "kind": kind.kind, **obj})), None)
    if error is not None:
        place = ".".join(str(part) for part in error.absolute_path)
        name = obj.get("metadata", {}).get("name", "")
        raise Failure(422, "Invalid", f'{kind.kind} "{name}" is invalid: {place}: {error.message[:200]}')
