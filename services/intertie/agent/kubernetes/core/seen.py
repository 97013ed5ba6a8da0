"""Kubernetes' objects as far as we read them, parsed at the door. Unknown fields are skipped, wrong types are refused by name.

Times of the year 1 are Go's zero and mean that nobody knows; they never become a number.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from intertie.errors import Refused

T = TypeVar("T")
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)\Z", re.ASCII)


class _Seen(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class Owner(_Seen, frozen=True):
    kind: str = ""
    name: str = ""
    uid: str = ""


class Meta(_Seen, frozen=True):
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    """When its grace is over, not when it was asked to go."""
    deletion_grace_period_seconds: int | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[Owner] | None = None

    @property
    def tags(self) -> dict[str, str]:
        return self.labels or {}


class Condition(_Seen, frozen=True):
    type: str = ""
    status: str = ""
    reason: str | None = None
    message: str | None = None
    last_transition_time: str | None = None


class Waiting(_Seen, frozen=True):
    reason: str | None = None
    message: str | None = None


class Running(_Seen, frozen=True):
    started_at: str | None = None


class Terminated(_Seen, frozen=True):
    exit_code: int | None = None
    signal: int | None = None
    reason: str | None = None
    message: str | None = None
    started_at: str | None = None
    finished_at: str | None = None


class ContainerState(_Seen, frozen=True):
    waiting: Waiting | None = None
    running: Running | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Seen, frozen=True):
    name: str = ""
    state: ContainerState | None = None
    restart_count: int = 0


class PodStatus(_Seen, frozen=True):
    phase: str | None = None
    reason: str | None = None
    message: str | None = None
    start_time: str | None = None
    conditions: list[Condition] | None = None
    container_statuses: list[ContainerStatus] | None = None


class Requirements(_Seen, frozen=True):
    limits: dict[str, str | int] | None = None
    requests: dict[str, str | int] | None = None


class Container(_Seen, frozen=True):
    name: str = ""
    resources: Requirements | None = None


class PodSpec(_Seen, frozen=True):
    node_name: str | None = None
    containers: list[Container] = []


class Pod(_Seen, frozen=True):
    metadata: Meta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class PodTemplate(_Seen, frozen=True):
    spec: PodSpec = PodSpec()


class JobSpec(_Seen, frozen=True):
    suspend: bool | None = None
    active_deadline_seconds: int | None = None
    template: PodTemplate = PodTemplate()


class JobStatus(_Seen, frozen=True):
    start_time: str | None = None
    completion_time: str | None = None
    active: int | None = None
    succeeded: int | None = None
    failed: int | None = None
    conditions: list[Condition] | None = None


class Job(_Seen, frozen=True):
    metadata: Meta
    spec: JobSpec = JobSpec()
    status: JobStatus = JobStatus()


class Taint(_Seen, frozen=True):
    key: str = ""
    effect: str = ""


class NodeSpec(_Seen, frozen=True):
    unschedulable: bool | None = None
    taints: list[Taint] | None = None


class NodeInfo(_Seen, frozen=True):
    kubelet_version: str = ""


class NodeStatus(_Seen, frozen=True):
    allocatable: dict[str, str | int] | None = None
    capacity: dict[str, str | int] | None = None
    conditions: list[Condition] | None = None
    node_info: NodeInfo = NodeInfo()


class Node(_Seen, frozen=True):
    metadata: Meta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Involved(_Seen, frozen=True):
    kind: str | None = None
    name: str | None = None
    uid: str | None = None


class Event(_Seen, frozen=True):
    """`v1` events; `events.k8s.io` calls the same things otherwise and is not asked."""

    metadata: Meta
    involved_object: Involved = Involved()
    reason: str | None = None
    message: str | None = None
    type: str | None = None
    last_timestamp: str | None = None


class ListMeta(_Seen, frozen=True):
    resource_version: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")


class Listed(_Seen, frozen=True):
    """A page of objects, each still as it came: one that cannot be read costs itself alone."""

    metadata: ListMeta = ListMeta()
    items: list[msgspec.Raw] | None = None


class Changed(_Seen, frozen=True):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class Status(_Seen, frozen=True):
    """What the API server says instead of an object."""

    code: int | None = None
    reason: str | None = None
    message: str | None = None


def parsed(data: bytes | msgspec.Raw, kind: type[T], what: str = "") -> T:
    """`Refused('kubernetes.unreadable')` with the place; never a half-read object."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise Refused("kubernetes.unreadable", f"{what or kind.__name__}: {err}"[:500]) from err


def converted(value: Any, kind: type[T], what: str = "") -> T:
    """The same for what was decoded already."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as err:
        raise Refused("kubernetes.unreadable", f"{what or kind.__name__}: {err}"[:500]) from err


def instant(text: str | None) -> datetime | None:
    """None: not said, Go's zero time, or no time at all."""
    if text is None or not _RFC3339.match(text):
        return None
    try:
        at = datetime.fromisoformat(text.upper()).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return at if at.year > 1 else None
