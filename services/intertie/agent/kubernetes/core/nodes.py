"""Nodes, what they have for us, and how much of it others hold: allocatable is what counts, capacity alone promises nothing (BR-067)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal

from intertie.agent.adapters.port import Described, NativeJob, NativeNode, NativeOutcome
from intertie.agent.core.model import Attempt
from intertie.agent.kubernetes.core.manifest import LABEL_ATTEMPT, device_resource, resources
from intertie.agent.kubernetes.core.quantity import quantity, whole
from intertie.agent.kubernetes.core.seen import Job, Node, Pod
from intertie.agent.kubernetes.core.settings import KubernetesRules
from intertie.contracts.site import NativeLoad
from intertie.errors import Refused

# So many launches that a node had promised and then refused, within this time: it takes no more of ours until it is over.
FAULTS, FAULT_TIME = 2, timedelta(hours=1)
BLOCKING = frozenset({"NoSchedule", "NoExecute"})
TOLERATED: frozenset[str] = frozenset()
MEMORY_LABEL = "nvidia.com/gpu.memory"


def described(
    rules: KubernetesRules,
    at: datetime,
    version: str,
    nodes: Sequence[Node],
    pods: Sequence[Pod],
    ended: Iterable[NativeJob],
    warnings: tuple[str, ...] = (),
) -> Described:
    """`pods` are those of our namespaces: the agent has no right to see others', and says so."""
    said = list(warnings)
    held = _held(pods, rules)
    faulty = _faulty(ended, at)
    told: list[NativeNode] = []
    for node in sorted(nodes, key=lambda one: one.metadata.name):
        told += _node(node, rules, held, faulty, said)
    others = [pod for pod in pods if LABEL_ATTEMPT not in pod.metadata.tags]
    load = NativeLoad(
        running=sum(pod.status.phase == "Running" for pod in others),
        waiting=sum(pod.status.phase == "Pending" for pod in others),
        devices_busy=sum(_devices_of(pod, rules) for pod in others if pod.status.phase == "Running"),
        observed_at=at,
    )
    said.append("pods of namespaces that are not the federation's are not counted: the agent has no right to see them")
    queues = tuple(sorted({one.queue for one in rules.namespaces.values() if one.queue}))
    return Described(rules.cluster, version, at, tuple(told), load, queues, tuple(said))


def _node(
    node: Node, rules: KubernetesRules, held: Mapping[tuple[str, str], int], faulty: Counter[str], said: list[str]
) -> list[NativeNode]:
    name = node.metadata.name
    usable, state, reason = usability(node)
    if usable and faulty[name] >= FAULTS:
        usable, reason = False, f"it refused {faulty[name]} pods that it had room for within an hour"
    allocatable = node.status.allocatable or {}
    told: list[NativeNode] = []
    for model, resource in _resources(rules):
        if resource not in allocatable and resource not in (node.status.capacity or {}):
            continue
        count = _count(allocatable.get(resource, 0), f"{name} {resource}", said)
        label = node.metadata.tags.get(rules.model_label, "")
        known = {value: key for key, value in rules.models.items()}
        memory = node.metadata.tags.get(MEMORY_LABEL, "")
        told.append(
            NativeNode(
                name,
                usable,
                state,
                reason,
                devices=count,
                busy=held.get((name, resource), 0),
                model=model or known.get(label, label.removeprefix("NVIDIA-")),
                memory_mib=int(memory) if memory.isascii() and memory.isdigit() and len(memory) < 10 and not model else 0,
            )
        )
    if not told:
        per_slot = quantity(rules.cpu)
        cpus = _amount(allocatable.get("cpu", 0), f"{name} cpu", said)
        slots = int(cpus / per_slot) if per_slot > 0 else 0
        told.append(NativeNode(name, usable, state, reason, devices=slots, busy=held.get((name, "slots"), 0)))
    return told


def usability(node: Node) -> tuple[bool, str, str]:
    """Whether new work may land there, the node's own word, and why not. A node whose readiness nobody says is not usable."""
    ready = next((c for c in node.status.conditions or () if c.type == "Ready"), None)
    if ready is None or ready.status != "True":
        word = "NotReady" if ready is not None and ready.status == "False" else "Unknown"
        return False, word, (ready.message or ready.reason or "") if ready is not None else "it says nothing of its readiness"
    if node.spec.unschedulable:
        return False, "Ready,SchedulingDisabled", "cordoned by the owner"
    blocking = sorted({t.key for t in node.spec.taints or () if t.effect in BLOCKING and t.key not in TOLERATED})
    if blocking:
        return False, "Ready", f"tainted: {', '.join(blocking)[:200]}"
    return True, "Ready", ""


def fits(attempt: Attempt, rules: KubernetesRules, nodes: Iterable[Node]) -> str:
    """Empty if some node, whatever its state now, could ever hold this; else why none could."""
    asked = resources(attempt, rules)
    short: Counter[str] = Counter()
    count = 0
    for node in nodes:
        count += 1
        lacking = [name for name, amount in asked.items() if not _has(node, name, amount)]
        if not lacking:
            return ""
        short.update(lacking)
    if count == 0:
        return ""
    told = ", ".join(f"{name}: {asked[name]} asked, {n} of {count} nodes have less" for name, n in sorted(short.items()))
    return f"no node could ever hold it: {told}"


def our_devices(attempt: Attempt, rules: KubernetesRules) -> tuple[int, str]:
    """How many devices or slots a run holds, and which resource they are."""
    asked = attempt.spec.resources
    return asked.count, device_resource(attempt.model or asked.gpu_model or "", rules) if asked.gpus else ""


def job_devices(job: Job, rules: KubernetesRules) -> tuple[int | None, str]:
    """The same of a Job whose submit nobody here remembers; None: it does not say."""
    found: tuple[int | None, str] = (None, "")
    for container in job.spec.template.spec.containers:
        limits = (container.resources.limits if container.resources else None) or {}
        for name, amount in limits.items():
            if "/" in name:
                return _count(amount, "", []) or None, name
        if "cpu" in limits and (per_slot := quantity(rules.cpu)) > 0:
            found = int(_amount(limits["cpu"], "", []) / per_slot) or None, ""
    return found


def _has(node: Node, name: str, amount: str) -> bool:
    there = (node.status.capacity or {}).get(name)
    try:
        return there is not None and quantity(there) >= quantity(amount)
    except Refused:
        return False


def _resources(rules: KubernetesRules) -> list[tuple[str, str]]:
    """(model, resource): named ones first; the default has its model from the node's label."""
    named = [(model, resource) for model, resource in rules.devices.items() if resource != rules.device]
    return [*named, ("", rules.device)]


def _held(pods: Iterable[Pod], rules: KubernetesRules) -> dict[tuple[str, str], int]:
    held: Counter[tuple[str, str]] = Counter()
    wanted = {resource for _, resource in _resources(rules)}
    per_slot = quantity(rules.cpu)
    for pod in pods:
        if pod.status.phase in ("Succeeded", "Failed") or not pod.spec.node_name:
            continue
        for container in pod.spec.containers:
            limits = (container.resources.limits if container.resources else None) or {}
            devices = {name: amount for name, amount in limits.items() if name in wanted}
            for name, amount in devices.items():
                held[pod.spec.node_name, name] += _count(amount, "", [])
            if not devices and per_slot > 0:
                held[pod.spec.node_name, "slots"] += int(_amount(limits.get("cpu", 0), "", []) / per_slot)
    return dict(held)


def _devices_of(pod: Pod, rules: KubernetesRules) -> int:
    wanted = {resource for _, resource in _resources(rules)}
    amounts = [
        _count(amount, "", [])
        for container in pod.spec.containers
        for name, amount in ((container.resources.limits if container.resources else None) or {}).items()
        if name in wanted
    ]
    return sum(amounts)


def _faulty(ended: Iterable[NativeJob], at: datetime) -> Counter[str]:
    """Nodes by how often they refused, of late, what they had room for."""
    faults: Counter[str] = Counter()
    for job in ended:
        if job.end is None or job.end.outcome is not NativeOutcome.LAUNCH_FAILED or "/" not in job.state:
            continue
        word = job.state.partition("/")[2]
        when = job.ended or job.submitted
        if (word == "UnexpectedAdmissionError" or word.startswith("OutOf")) and when is not None and at - when < FAULT_TIME:
            faults.update(job.nodes)
    return faults


def _count(amount: str | int, what: str, said: list[str]) -> int:
    try:
        return whole(amount)
    except Refused as err:
        said.append(f"{what}: {err.text}; counted as none")
        return 0


def _amount(amount: str | int, what: str, said: list[str]) -> Decimal:
    try:
        return quantity(amount)
    except Refused as err:
        said.append(f"{what}: {err.text}; counted as none")
        return Decimal(0)
