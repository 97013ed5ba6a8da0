"""Kubernetes' words in ours, as one visible table, and what a Job with its pods and events comes to.

The order is that of evidence: what a container's end says, what the pod's end says, what the Job says, then what still goes on. A word that is
in no row stays `unknown` with a warning: it is never an end, and never a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from intertie.agent.adapters.port import NativeEnd, NativeJob, NativeOutcome, NativePhase
from intertie.agent.kubernetes.core.manifest import ANNOTATION_ENDED_BY, LABEL_ATTEMPT, LABEL_GENERATION, MAIN
from intertie.agent.kubernetes.core.seen import Condition, ContainerState, Event, Job, Pod, Terminated, instant
from intertie.ids import AttemptId, is_id

P, Out = NativePhase, NativeOutcome
LONG_AGO = datetime.min.replace(tzinfo=UTC)

WAITING: Mapping[str, NativePhase] = {
    # A container that waits: its pod has a node.
    "ContainerCreating": P.STARTING,
    "PodInitializing": P.STARTING,
    "ErrImagePull": P.STARTING,
    "ImagePullBackOff": P.STARTING,
    "ErrImageNeverPull": P.STARTING,
    "ImageInspectError": P.STARTING,
    "InvalidImageName": P.STARTING,
    "RegistryUnavailable": P.STARTING,
    "SignatureValidationFailed": P.STARTING,
    "CreateContainerConfigError": P.STARTING,
    "CreateContainerError": P.STARTING,
    "CreatePodSandboxError": P.STARTING,
    "RunContainerError": P.STARTING,
    "PreCreateHookError": P.STARTING,
    "PreStartHookError": P.STARTING,
    "PostStartHookError": P.STARTING,
    "CrashLoopBackOff": P.STARTING,
}
TROUBLE = frozenset(WAITING) - {"ContainerCreating", "PodInitializing"}
"""These do not pass by themselves in most cases; after `launch_s` the pod is given up."""
OF_ITS_IMAGE = frozenset(word for word in TROUBLE if "Image" in word) | {"RegistryUnavailable", "SignatureValidationFailed"}

POD_FAILED: Mapping[str, NativeOutcome] = {
    # `status.reason` of a pod whose phase is Failed.
    "Evicted": Out.NODE_FAILED,
    "Preempting": Out.PREEMPTED,
    "Preempted": Out.PREEMPTED,
    "NodeLost": Out.NODE_FAILED,
    "NodeShutdown": Out.NODE_FAILED,
    "Shutdown": Out.NODE_FAILED,
    "Terminated": Out.NODE_FAILED,
    "NodeAffinity": Out.LAUNCH_FAILED,
    "NodePorts": Out.LAUNCH_FAILED,
    "UnexpectedAdmissionError": Out.LAUNCH_FAILED,
    "AdmissionFailed": Out.LAUNCH_FAILED,
    "TopologyAffinityError": Out.LAUNCH_FAILED,
    "AppArmor": Out.LAUNCH_FAILED,
    "SysctlForbidden": Out.LAUNCH_FAILED,
    "PodOSNotSupported": Out.LAUNCH_FAILED,
    "VolumeConflict": Out.LAUNCH_FAILED,
    "DeadlineExceeded": Out.WALL_LIMIT,
}
OUT_OF = re.compile(r"OutOf[A-Za-z0-9./-]+\Z")
"""`OutOfcpu`, `OutOfnvidia.com/gpu`: the node had promised what it did not have."""
ITS_OWN_DISK = re.compile(
    r"[Uu]sage of EmptyDir volume|[Pp]od ephemeral local storage usage|[Cc]ontainer .* exceeded its local ephemeral storage"
)
"""Evicted for what it wrote itself, not for the node's need."""

DISRUPTION: Mapping[str, NativeOutcome] = {
    # Reason of the pod's condition DisruptionTarget.
    "PreemptionByScheduler": Out.PREEMPTED,
    "PreemptionByKubeScheduler": Out.PREEMPTED,
    "EvictionByEvictionAPI": Out.PREEMPTED,
    "DeletionByTaintManager": Out.NODE_FAILED,
    "DeletionByPodGC": Out.NODE_FAILED,
    "TerminationByKubelet": Out.NODE_FAILED,
}

CONTAINER_ENDED: Mapping[str, NativeOutcome] = {
    # `reason` of a terminated container.
    "Completed": Out.EXITED,
    "Error": Out.EXITED,
    "OOMKilled": Out.OUT_OF_MEMORY,
    "DeadlineExceeded": Out.WALL_LIMIT,
    "ContainerCannotRun": Out.LAUNCH_FAILED,
    "StartError": Out.LAUNCH_FAILED,
    "ContainerStatusUnknown": Out.UNKNOWN,  # Its code 137 was made up by the kubelet.
}

JOB_FAILED: Mapping[str, NativeOutcome] = {
    # Reason of the Job's condition Failed, where no pod says more.
    "DeadlineExceeded": Out.WALL_LIMIT,
    "BackoffLimitExceeded": Out.UNKNOWN,
    "PodFailurePolicy": Out.UNKNOWN,
    "MaxFailedIndexesExceeded": Out.UNKNOWN,
    "FailedIndexes": Out.UNKNOWN,
}

ENDED_BY: Mapping[str, NativeOutcome] = {
    # What we wrote on the Job before we deleted it.
    "cancelled": Out.CANCELLED,
    "launch": Out.LAUNCH_FAILED,
    "preempted": Out.PREEMPTED,
}


@dataclass(frozen=True, slots=True)
class Reading:
    phase: NativePhase
    state: str
    reason: str = ""
    end: NativeEnd | None = None
    warning: str = ""
    started: datetime | None = None
    ended: datetime | None = None


def read(cluster: str, job: Job, pods: Sequence[Pod], events: Iterable[Event] = (), *, deleted: bool = False) -> NativeJob:
    """One Job of ours. `deleted`: it is gone from the API, and this is the last that was seen of it."""
    tags = job.metadata.tags
    ordered = sorted(pods, key=lambda pod: instant(pod.metadata.creation_timestamp) or LONG_AGO)
    pod = _telling(ordered)
    told = _asked_for(job, pod, _taken_away(job, pod, _of_job(job, pod, list(events), deleted)))
    if not told.end and job.spec.suspend and pod is not None and told.started is None:
        told = replace(told, phase=P.QUEUED)
    generation = tags.get(LABEL_GENERATION, "")
    return NativeJob(
        tag=AttemptId(tags.get(LABEL_ATTEMPT, "")),
        cluster=cluster,
        native_id=f"{job.metadata.namespace}/{job.metadata.name}/{job.metadata.uid}",
        phase=told.phase,
        state=told.state,
        reason=told.reason[:1000],
        generation=int(generation) if generation.isascii() and generation.isdigit() and len(generation) < 18 else 0,
        submitted=instant(job.metadata.creation_timestamp),
        started=told.started,
        ended=told.ended,
        restarts=max(0, len(pods) - 1),
        nodes=(pod.spec.node_name,) if pod is not None and pod.spec.node_name else (),
        end=told.end,
        warning=told.warning,
    )


def is_ours(job: Job) -> bool:
    """It carries a tag that can be one of ours."""
    return is_id(job.metadata.tags.get(LABEL_ATTEMPT, ""))


def _telling(pods: Sequence[Pod]) -> Pod | None:
    """The pod that says what became of the Job: one that succeeded, else the youngest."""
    done = [pod for pod in pods if pod.status.phase == "Succeeded"]
    last = done or list(pods)
    return last[-1] if last else None


def _ours_why(job: Job) -> str:
    """The word that we wrote on a Job before we deleted it."""
    return (job.metadata.annotations or {}).get(ANNOTATION_ENDED_BY, "").partition(": ")[0]


def _asked_to_go(job: Job | None, pod: Pod) -> datetime | None:
    """When somebody first asked this pod to end, as far as it is told."""
    told: list[datetime] = []
    if job is not None and (at := instant(job.metadata.deletion_timestamp)) is not None:
        told.append(at)
    if (over := instant(pod.metadata.deletion_timestamp)) is not None:
        grace_s = min(max(pod.metadata.deletion_grace_period_seconds or 0, 0), 31_536_000)
        told.append(over - timedelta(seconds=grace_s) if over.year > 2 else over)
    disrupted = _condition(pod.status.conditions, "DisruptionTarget")
    if disrupted is not None and (at := instant(disrupted.last_transition_time)) is not None:
        told.append(at)
    return min(told, default=None)


def _by_itself(job: Job | None, pod: Pod | None, told: Reading) -> bool:
    """Code 0, and before anybody asked for its end: many programs answer SIGTERM with 0. Within the same second it is taken for an answer: what was
    not finished must not pass for a success."""
    if told.end is None or told.end.code != 0:
        return False
    asked = _asked_to_go(job, pod) if pod is not None else None
    return asked is None or (told.ended is not None and told.ended < asked)


def _taken_away(job: Job, pod: Pod | None, told: Reading) -> Reading:
    """A pod that was being deleted when it ended did not end by itself: somebody of the site did it, or its queue took its place back."""
    if _ours_why(job) in ENDED_BY or pod is None or told.end is None or _by_itself(job, pod, told):
        return told
    if not (pod.metadata.deletion_timestamp or job.metadata.deletion_timestamp):
        return told
    if told.end.outcome not in (Out.EXITED, Out.SIGNALLED, Out.UNKNOWN) or told.started is None:
        return told
    if job.spec.suspend:
        return replace(told, end=replace(told.end, outcome=Out.PREEMPTED, text="suspended while it ran: its queue took its place back"))
    return replace(told, end=replace(told.end, outcome=Out.CANCELLED, text="it was deleted while it ran, and not by us"))


def _asked_for(job: Job, pod: Pod | None, told: Reading) -> Reading:
    """What we did ourselves explains an end that would otherwise be a mere signal or a mere absence."""
    text = (job.metadata.annotations or {}).get(ANNOTATION_ENDED_BY, "").partition(": ")[2]
    outcome = ENDED_BY.get(_ours_why(job))
    if outcome is None or told.end is None or told.end.outcome in (Out.OUT_OF_MEMORY, Out.WALL_LIMIT, Out.NODE_FAILED):
        return told
    if told.end.outcome is Out.EXITED and _by_itself(job, pod, told):
        return told  # It had ended well before we came.
    if outcome is Out.CANCELLED and told.started is None:
        outcome = Out.NEVER_STARTED
    if outcome is Out.LAUNCH_FAILED and text.partition(":")[0] in OF_ITS_IMAGE:
        outcome = Out.IMAGE_UNFETCHED
    return replace(told, end=replace(told.end, outcome=outcome, text=text or told.end.text))


def _of_job(job: Job, pod: Pod | None, events: list[Event], deleted: bool) -> Reading:
    if pod is not None:
        told = of_pod(pod)
        if told.end is not None or (told.phase is not P.UNKNOWN and not deleted and _failed(job) is None):
            return _stopped_by_job(job, told)
        if deleted:
            return _vanished(told)
        if (failed := _failed(job)) is not None:
            return _without_pod(job, failed, told)
        return told
    if (failed := _failed(job)) is not None:
        return _without_pod(job, failed, None)
    if _condition(job.status.conditions, "Complete"):
        return Reading(P.ENDED, "Complete", end=NativeEnd(Out.UNKNOWN, text="complete, but its pod is gone and nobody saw the exit code"))
    if deleted:
        if job.status.start_time is None or job.spec.suspend:
            return Reading(P.ENDED, "Deleted", end=NativeEnd(Out.NEVER_STARTED, text="its Job was deleted before it had a pod"))
        return Reading(P.ENDED, "Deleted", end=NativeEnd(Out.UNKNOWN, text="its Job was deleted, and nobody saw how it ended"))
    if job.spec.suspend:
        return Reading(P.QUEUED, "Suspended", "Suspended")
    refused = next((event for event in reversed(events) if event.reason == "FailedCreate"), None)
    if refused is not None:
        text = refused.message or ""
        return Reading(P.QUEUED, "FailedCreate", f"{'QuotaExceeded' if 'exceeded quota' in text else 'FailedCreate'}: {text}")
    return Reading(P.QUEUED, "NoPod")


def _stopped_by_job(job: Job, told: Reading) -> Reading:
    """The Job's own deadline kills its pod: the pod then says 137 or 143 only."""
    failed = _failed(job)
    if failed is None or failed.reason != "DeadlineExceeded" or told.end is None or told.end.code == 0:
        return told
    outcome = Out.WALL_LIMIT if told.started is not None else Out.NEVER_STARTED
    return replace(told, reason="DeadlineExceeded", end=replace(told.end, outcome=outcome, text=failed.message or ""))


def _without_pod(job: Job, failed: Condition, pod: Reading | None) -> Reading:
    reason = failed.reason or ""
    outcome = JOB_FAILED.get(reason, Out.UNKNOWN)
    started = pod.started if pod is not None else None
    if outcome is Out.WALL_LIMIT and started is None:
        outcome = Out.NEVER_STARTED if pod is not None else Out.UNKNOWN  # A pod that nobody saw may have run.
    text = failed.message or ("the Job failed, and its pod is gone" if pod is None else "")
    warning = "" if reason in JOB_FAILED else f"a Job failed with the unknown reason {reason[:80]!r}"
    ended = instant(failed.last_transition_time)
    return Reading(P.ENDED, f"Failed/{reason}", reason, NativeEnd(outcome, text=text), warning, started, ended)


def _vanished(told: Reading) -> Reading:
    """Deleted while it went on, and its last word was no end."""
    if told.phase in (P.QUEUED, P.STARTING) and told.started is None:
        end = NativeEnd(Out.NEVER_STARTED, text="its pod was deleted before it ran")
    else:
        end = NativeEnd(Out.UNKNOWN, text="its pod was deleted while it ran, and nobody saw how it ended")
    return replace(told, phase=P.ENDED, state=f"{told.state}/Deleted", end=end)


def _failed(job: Job) -> Condition | None:
    return _condition(job.status.conditions, "Failed")


def _condition(conditions: Sequence[Condition] | None, kind: str, status: str = "True") -> Condition | None:
    return next((c for c in conditions or () if c.type == kind and c.status == status), None)


# --- one pod -----------------------------------------------------------------------------------------------------------------------------


def of_pod(pod: Pod) -> Reading:
    """A pod by itself. BR-020: it runs when its container does, not when its phase is Pending or its Job `active`."""
    container = _main(pod)
    phase = pod.status.phase or ""
    match phase:
        case "Pending":
            return _pending(pod, container)
        case "Running":
            return _running(pod, container)
        case "Succeeded" | "Failed":
            return _ended(pod, container, phase)
        case "Unknown":
            return Reading(P.UNKNOWN, "Unknown", pod.status.reason or "NodeLost", started=_started(container))
    return Reading(P.UNKNOWN, phase or "(none)", warning=f"a pod has the unknown phase {phase[:80]!r}")


def _main(pod: Pod) -> ContainerState:
    statuses = pod.status.container_statuses or []
    named = [status for status in statuses if status.name == MAIN] or statuses
    return (named[0].state if named else None) or ContainerState()


def _started(container: ContainerState) -> datetime | None:
    if container.running is not None:
        return instant(container.running.started_at)
    return instant(container.terminated.started_at) if container.terminated is not None else None


def _pending(pod: Pod, container: ContainerState) -> Reading:
    if container.terminated is not None or container.running is not None:
        return _running(pod, container)
    if (gate := _condition(pod.status.conditions, "PodScheduled", "False")) is not None:
        return Reading(P.QUEUED, "Pending", f"{gate.reason or ''}: {gate.message or ''}".strip(": "))
    if not pod.spec.node_name:
        return Reading(P.QUEUED, "Pending")
    word = (container.waiting.reason if container.waiting else None) or "ContainerCreating"
    text = container.waiting.message if container.waiting else None
    known = WAITING.get(word)
    warning = "" if known else f"a container waits for the unknown reason {word[:80]!r}"
    return Reading(known or P.UNKNOWN, f"Pending/{word}", f"{word}: {text}" if text else word, warning=warning)


def _running(pod: Pod, container: ContainerState) -> Reading:
    leaving = "/Terminating" if pod.metadata.deletion_timestamp else ""
    if container.running is not None:
        if pod.status.reason == "NodeLost":
            return Reading(P.UNKNOWN, "Running/NodeLost", "NodeLost", started=_started(container))
        ready = _condition(pod.status.conditions, "Ready", "False")
        away = "NodeNotReady" if ready is not None and ready.reason == "NodeNotReady" else ""
        return Reading(P.RUNNING, f"Running{leaving}", away, started=_started(container))
    if container.terminated is not None:
        over = container.terminated
        return Reading(
            P.FINISHING, f"Running/{over.reason or 'Terminated'}{leaving}", started=_started(container), ended=instant(over.finished_at)
        )
    word = (container.waiting.reason if container.waiting else None) or "ContainerCreating"
    known = WAITING.get(word)
    return Reading(
        known or P.UNKNOWN, f"Running/{word}", word, warning="" if known else f"a container waits for the unknown reason {word[:80]!r}"
    )


def _ended(pod: Pod, container: ContainerState, phase: str) -> Reading:
    over = container.terminated
    started = instant(over.started_at) if over is not None else None
    finished = instant(over.finished_at) if over is not None else None
    reason = pod.status.reason or ""
    if phase == "Succeeded":
        code = over.exit_code if over is not None and over.exit_code is not None else None
        end = (
            NativeEnd(Out.EXITED, code=code)
            if code == 0
            else NativeEnd(Out.UNKNOWN, code=_code(code), text="succeeded without an exit code 0")
        )
        told = Reading(P.ENDED, "Succeeded", reason, end, "" if code == 0 else "a pod succeeded without exit code 0", started, finished)
        return told if _by_itself(None, pod, told) else _disrupted(pod, told)
    end, warning = _failure(pod, over, reason, started)
    word = reason or (over.reason if over is not None else "") or ""
    return Reading(P.ENDED, f"Failed/{word}" if word else "Failed", pod.status.message or word, end, warning, started, finished)


def _disrupted(pod: Pod, told: Reading) -> Reading:
    """It answered the site's wish that it go with code 0."""
    disrupted = _condition(pod.status.conditions, "DisruptionTarget")
    if disrupted is None or told.end is None:
        return told
    outcome = DISRUPTION.get(disrupted.reason or "", Out.UNKNOWN)
    text = f"{disrupted.reason}: {disrupted.message or ''}".rstrip(": ")
    return replace(told, end=replace(told.end, outcome=outcome, text=text))


def _failure(pod: Pod, over: Terminated | None, reason: str, started: datetime | None) -> tuple[NativeEnd, str]:
    """Why a pod failed. The pod's own reason is above its containers' codes: an evicted pod may have containers with code 0 (BR-022)."""
    text = pod.status.message or ""
    code = _code(over.exit_code) if over is not None else None
    if over is not None and over.reason == "OOMKilled":
        return NativeEnd(Out.OUT_OF_MEMORY, code=code, signal=9, text=text or "the kernel's out-of-memory killer ended it"), ""
    if reason == "Evicted" and ITS_OWN_DISK.search(text):
        return NativeEnd(Out.EXITED, code=code or None, text=f"evicted for what it wrote: {text}"), ""
    if reason in POD_FAILED or OUT_OF.match(reason):
        outcome = POD_FAILED.get(reason, Out.LAUNCH_FAILED)
        if outcome is Out.WALL_LIMIT and started is None:
            outcome = Out.NEVER_STARTED
        return NativeEnd(outcome, text=f"{reason}: {text}".rstrip(": ")), ""
    disrupted = _condition(pod.status.conditions, "DisruptionTarget")
    if disrupted is not None:
        outcome = DISRUPTION.get(disrupted.reason or "", Out.UNKNOWN)
        warning = "" if outcome is not Out.UNKNOWN else f"a pod was disrupted for the unknown reason {(disrupted.reason or '')[:80]!r}"
        return NativeEnd(outcome, code=code or None, text=f"{disrupted.reason}: {disrupted.message or ''}".rstrip(": ")), warning
    if reason:
        return NativeEnd(
            Out.UNKNOWN, code=code or None, text=f"{reason}: {text}".rstrip(": ")
        ), f"a pod failed for the unknown reason {reason[:80]!r}"
    return _container_end(over, code, text)


def _container_end(over: Terminated | None, code: int | None, text: str) -> tuple[NativeEnd, str]:
    if over is None:
        return NativeEnd(Out.UNKNOWN, text=text or "the pod failed, and its container says nothing"), ""
    word = over.reason or ""
    outcome = CONTAINER_ENDED.get(word) if word else Out.EXITED
    if outcome is None:
        return NativeEnd(
            Out.UNKNOWN, code=code, text=f"{word}: {over.message or text}"
        ), f"a container ended for the unknown reason {word[:80]!r}"
    if outcome is not Out.EXITED:
        told = None if outcome is Out.UNKNOWN else code
        return NativeEnd(outcome, code=told, text=f"{word}: {over.message or text}".rstrip(": ")), ""
    if over.signal:
        return NativeEnd(Out.SIGNALLED, signal=over.signal if 0 < over.signal < 65 else None, text=text), ""
    if code is None:
        return NativeEnd(Out.UNKNOWN, text="the container ended, and its exit code is not said"), "a container ended without an exit code"
    if code == 0:
        return NativeEnd(Out.UNKNOWN, code=0, text=text or "the pod failed although its container exited with 0"), ""
    if 128 < code < 128 + 65:
        text = text or f"{code}: killed by signal {code - 128}, or it exited so by itself; Kubernetes does not tell which"
    return NativeEnd(Out.EXITED, code=code, text=text), ""


def _code(code: int | None) -> int | None:
    return code if code is not None and 0 <= code <= 255 else None


def launch_trouble(pod: Pod) -> tuple[str, datetime | None] | None:
    """What keeps a pod with a node from running, and since when it has that node; None if nothing does."""
    told = of_pod(pod)
    word = told.state.partition("/")[2]
    if told.phase not in (P.STARTING, P.UNKNOWN) or word not in TROUBLE:
        return None
    scheduled = _condition(pod.status.conditions, "PodScheduled")
    since = instant(scheduled.last_transition_time) if scheduled is not None else None
    return told.reason, since or instant(pod.status.start_time) or instant(pod.metadata.creation_timestamp)
