"""Kubernetes' words, quantities and times: each row is what an API server says, and what we make of it. Rows that are field cases name them.

BR-020 (running is a container, not a phase) · BR-022 (evicted, the year 1) · BR-039 (no time is no number) · BR-040 (quantities)
"""

from __future__ import annotations

import contextlib
import json
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intertie.agent.adapters.port import NativeOutcome, NativePhase
from intertie.agent.kubernetes.core import words
from intertie.agent.kubernetes.core.cache import Kept
from intertie.agent.kubernetes.core.quantity import mib, quantity, whole
from intertie.agent.kubernetes.core.seen import Event, Job, Listed, Node, Pod, converted, instant, parsed
from intertie.errors import Refused

P, Out = NativePhase, NativeOutcome
T0, T1, T2 = "2026-12-01T08:00:00Z", "2026-12-01T08:05:00Z", "2026-12-01T09:00:00Z"
ATTEMPT = "att-06f3"

QUANTITIES = [
    ("129e6", 129_000_000),
    ("128974848000m", 128_974_848),
    ("1288490188800m", 1_288_490_189),
    ("1.5Gi", 1_610_612_736),
    ("2Pi", 2_251_799_813_685_248),
    ("1G", 1_000_000_000),
    ("1Gi", 1_073_741_824),
    ("500m", 1),
    ("1e3", 1_000),
    ("1E", 10**18),
    ("1E3", 1_000),
    ("0", 0),
    (4, 4),
]
NO_QUANTITIES = [
    "abc",
    "",
    " 1",
    "1 Gi",
    "1KI",
    "1ki",
    "Gi",
    "1e",
    "0x10",
    "nan",
    "inf",
    "Infinity",
    "1,5",
    "１",
    "--1",
    "1GiB",
    True,
    "1e999",
]


@pytest.mark.parametrize(("text", "expected"), QUANTITIES)
def test_a_quantity_is_what_kubernetes_means_by_it(text: str | int, expected: int) -> None:
    """BR-040."""
    assert whole(text) == expected


def test_a_fraction_of_a_core_stays_one() -> None:
    """BR-040."""
    assert quantity("500m") == Decimal("0.5") and quantity("1288490188800m") == Decimal("1288490188.8") and mib("1.5Gi") == 1_536


@pytest.mark.parametrize("text", NO_QUANTITIES)
def test_what_is_no_quantity_is_refused_by_name_and_never_zero(text: str) -> None:
    """BR-040."""
    with pytest.raises(Refused) as refused:
        quantity(text)
    assert refused.value.code == "kubernetes.quantity"


TIMES = [
    (T0, True),
    ("2026-12-01T08:00:00.123456789Z", True),
    ("2026-12-01T16:00:00+08:00", True),
    ("0001-01-01T00:00:00Z", False),
    ("0001-01-01T00:00:00+14:00", False),
    ("2026-12-01T08:00:00", False),
    ("2026-13-01T08:00:00Z", False),
    ("1764576000", False),
    ("0", False),
    ("-1", False),
    ("Unknown", False),
    ("", False),
]


@pytest.mark.parametrize(("text", "known"), TIMES)
def test_a_time_that_nobody_knows_is_none_and_no_number(text: str, known: bool) -> None:
    """BR-022 and BR-039: Go's zero time is no time."""
    assert (instant(text) is not None) is known and instant(None) is None


# --- pods --------------------------------------------------------------------------------------------------------------------------------


def pod(
    phase: str, state: dict[str, Any] | None = None, *, node: str = "n1", conditions: list[dict[str, str]] | None = None, **status: Any
) -> Pod:
    statuses = [{"name": "job", "state": state}] if state is not None else []
    told = {"phase": phase, "conditions": conditions or [], "containerStatuses": statuses, **status}
    meta = {
        "name": "p",
        "namespace": "fed",
        "uid": "u-p",
        "creationTimestamp": T0,
        "ownerReferences": [{"kind": "Job", "name": "j", "uid": "u-j"}],
    }
    return converted({"metadata": meta, "spec": {"nodeName": node}, "status": told}, Pod)


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def ended(code: int | None, reason: str = "Error", *, signal: int | None = None, started: str = T0, finished: str = T1) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "signal": signal, "reason": reason, "startedAt": started, "finishedAt": finished}}


RUNS = {"running": {"startedAt": T1}}
UNSCHEDULABLE = [
    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: 3 Insufficient nvidia.com/gpu."}
]


def disrupted(reason: str) -> list[dict[str, str]]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason}]


LIVING: list[tuple[str, Pod, NativePhase, str]] = [
    ("no node yet", pod("Pending", node=""), P.QUEUED, "Pending"),
    ("unschedulable", pod("Pending", node="", conditions=UNSCHEDULABLE), P.QUEUED, "Pending"),
    ("an image is pulled", pod("Pending", waiting("ContainerCreating")), P.STARTING, "Pending/ContainerCreating"),
    ("no image", pod("Pending", waiting("ErrImagePull")), P.STARTING, "Pending/ErrImagePull"),
    ("no image, for a while", pod("Pending", waiting("ImagePullBackOff")), P.STARTING, "Pending/ImagePullBackOff"),
    ("no such secret", pod("Pending", waiting("CreateContainerConfigError")), P.STARTING, "Pending/CreateContainerConfigError"),
    ("a word of tomorrow", pod("Pending", waiting("QuantumFluctuation")), P.UNKNOWN, "Pending/QuantumFluctuation"),
    ("runs", pod("Running", RUNS), P.RUNNING, "Running"),
    ("its phase runs, its container does not", pod("Running", waiting("ContainerCreating")), P.STARTING, "Running/ContainerCreating"),
    ("its container is over, the pod not yet", pod("Running", ended(0, "Completed")), P.FINISHING, "Running/Completed"),
    ("its node is not heard", pod("Running", RUNS, reason="NodeLost"), P.UNKNOWN, "Running/NodeLost"),
    ("nobody knows", pod("Unknown", RUNS), P.UNKNOWN, "Unknown"),
    ("a phase of tomorrow", pod("Hibernating", RUNS), P.UNKNOWN, "Hibernating"),
    ("no phase at all", pod(""), P.UNKNOWN, "(none)"),
]


@pytest.mark.parametrize(("what", "seen", "phase", "state"), LIVING, ids=[row[0] for row in LIVING])
def test_a_pod_that_lives_is_where_its_container_is(what: str, seen: Pod, phase: NativePhase, state: str) -> None:
    """BR-020."""
    told = words.of_pod(seen)
    assert (told.phase, told.state, told.end) == (phase, state, None)
    assert bool(told.warning) is (phase is P.UNKNOWN and "tomorrow" in what or what == "no phase at all")


def test_a_run_begins_when_its_container_does() -> None:
    """BR-020: ten minutes of an image being pulled are not running."""
    assert words.of_pod(pod("Running", RUNS, startTime=T0)).started == instant(T1)
    assert words.of_pod(pod("Pending", waiting("ContainerCreating"), startTime=T0)).started is None


OWN_DISK = 'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi".'
ENDS: list[tuple[str, Pod, NativeOutcome, int | None, int | None]] = [
    ("succeeds", pod("Succeeded", ended(0, "Completed")), Out.EXITED, 0, None),
    ("succeeds without a code", pod("Succeeded"), Out.UNKNOWN, None, None),
    ("fails", pod("Failed", ended(7)), Out.EXITED, 7, None),
    ("code 137 by itself or by a kill", pod("Failed", ended(137)), Out.EXITED, 137, None),
    ("a signal that is told", pod("Failed", ended(None, signal=15)), Out.SIGNALLED, None, 15),
    ("out of memory", pod("Failed", ended(137, "OOMKilled")), Out.OUT_OF_MEMORY, 137, 9),
    ("evicted although its containers ended with 0", pod("Failed", ended(0, "Completed"), reason="Evicted"), Out.NODE_FAILED, None, None),
    ("evicted for its own disk", pod("Failed", ended(137), reason="Evicted", message=OWN_DISK), Out.EXITED, 137, None),
    ("killed by the pod's deadline", pod("Failed", ended(137), reason="DeadlineExceeded"), Out.WALL_LIMIT, None, None),
    ("past its deadline before it ran", pod("Failed", reason="DeadlineExceeded"), Out.NEVER_STARTED, None, None),
    ("refused by its node", pod("Failed", reason="UnexpectedAdmissionError"), Out.LAUNCH_FAILED, None, None),
    ("its node had less than it said", pod("Failed", reason="OutOfnvidia.com/gpu"), Out.LAUNCH_FAILED, None, None),
    ("its node was shut down", pod("Failed", ended(143), reason="Terminated"), Out.NODE_FAILED, None, None),
    ("preempted", pod("Failed", ended(143), conditions=disrupted("PreemptionByScheduler")), Out.PREEMPTED, 143, None),
    ("drained", pod("Failed", ended(143), conditions=disrupted("EvictionByEvictionAPI")), Out.PREEMPTED, 143, None),
    ("its node is gone", pod("Failed", conditions=disrupted("DeletionByPodGC")), Out.NODE_FAILED, None, None),
    ("disrupted by a word of tomorrow", pod("Failed", ended(1), conditions=disrupted("Sunspots")), Out.UNKNOWN, 1, None),
    ("failed for a word of tomorrow", pod("Failed", ended(1), reason="Sunspots"), Out.UNKNOWN, 1, None),
    ("a container that could not be made", pod("Failed", ended(128, "StartError")), Out.LAUNCH_FAILED, 128, None),
    ("a code that the kubelet made up", pod("Failed", ended(137, "ContainerStatusUnknown")), Out.UNKNOWN, None, None),
    ("a container's word of tomorrow", pod("Failed", ended(1, "Sunspots")), Out.UNKNOWN, 1, None),
    ("failed with code 0", pod("Failed", ended(0, "Completed")), Out.UNKNOWN, 0, None),
    ("says nothing", pod("Failed"), Out.UNKNOWN, None, None),
    ("a code that no process has", pod("Failed", ended(70_000)), Out.UNKNOWN, None, None),
]


@pytest.mark.parametrize(("what", "seen", "outcome", "code", "signal"), ENDS, ids=[row[0] for row in ENDS])
def test_a_pod_that_ended_says_why(what: str, seen: Pod, outcome: NativeOutcome, code: int | None, signal: int | None) -> None:
    """BR-022."""
    told = words.of_pod(seen)
    assert told.phase is P.ENDED and told.end is not None
    assert (told.end.outcome, told.end.code, told.end.signal) == (outcome, code, signal)
    assert bool(told.warning) or "tomorrow" not in what


def test_times_of_the_year_1_are_unknown_and_their_end_is_still_an_end() -> None:
    """BR-022, third part, and BR-039."""
    told = words.of_pod(pod("Failed", ended(1, started="0001-01-01T00:00:00Z", finished="0001-01-01T00:00:00Z")))
    assert told.phase is P.ENDED and told.started is None and told.ended is None


# --- Jobs --------------------------------------------------------------------------------------------------------------------------------


def job(*conditions: dict[str, str], suspend: bool = False, ended_by: str = "", **status: Any) -> Job:
    labels = {"intertie.io/attempt": ATTEMPT, "intertie.io/generation": "3"}
    meta: dict[str, Any] = {"name": "j", "namespace": "fed", "uid": "u-j", "creationTimestamp": T0, "labels": labels}
    if ended_by:
        meta["annotations"] = {"intertie.io/ended-by": ended_by}
    return converted({"metadata": meta, "spec": {"suspend": suspend}, "status": {"conditions": list(conditions), **status}}, Job)


def leaving(one: Pod) -> Pod:
    return msgspec.structs.replace(one, metadata=msgspec.structs.replace(one.metadata, deletion_timestamp=T2))


T3 = "2026-12-01T09:00:05Z"
LATE_ZERO = pod("Succeeded", ended(0, finished=T3))
AT_T2 = [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "lastTransitionTime": T2}]
PREEMPTED = pod("Failed", ended(143), conditions=disrupted("PreemptionByScheduler"))


def failed(reason: str) -> dict[str, str]:
    return {"type": "Failed", "status": "True", "reason": reason, "message": "m", "lastTransitionTime": T2}


JOBS: list[tuple[str, Job, list[Pod], bool, NativePhase, NativeOutcome | None]] = [
    ("just made", job(), [], False, P.QUEUED, None),
    ("suspended", job(suspend=True), [], False, P.QUEUED, None),
    ("runs", job(), [pod("Running", RUNS)], False, P.RUNNING, None),
    ("the Job's deadline killed its pod", job(failed("DeadlineExceeded")), [pod("Failed", ended(143))], False, P.ENDED, Out.WALL_LIMIT),
    ("the Job's deadline, its pod is gone", job(failed("DeadlineExceeded")), [], False, P.ENDED, Out.UNKNOWN),
    (
        "the Job's deadline, its pod never ran",
        job(failed("DeadlineExceeded")),
        [pod("Pending", node="")],
        False,
        P.ENDED,
        Out.NEVER_STARTED,
    ),
    (
        "the Job's deadline came after its success",
        job(failed("DeadlineExceeded")),
        [pod("Succeeded", ended(0))],
        False,
        P.ENDED,
        Out.EXITED,
    ),
    ("its pod is gone, and it says only that it failed", job(failed("BackoffLimitExceeded")), [], False, P.ENDED, Out.UNKNOWN),
    ("failed for a word of tomorrow", job(failed("Sunspots")), [], False, P.ENDED, Out.UNKNOWN),
    ("complete, its pod is gone", job({"type": "Complete", "status": "True"}), [], False, P.ENDED, Out.UNKNOWN),
    ("complete is not said to be true", job({"type": "Complete", "status": "False"}), [], False, P.QUEUED, None),
    ("deleted before it had a pod", job(), [], True, P.ENDED, Out.NEVER_STARTED),
    ("deleted, and nobody saw its end", job(startTime=T0), [], True, P.ENDED, Out.UNKNOWN),
    ("deleted while it ran", job(startTime=T0), [pod("Running", RUNS)], True, P.ENDED, Out.UNKNOWN),
    ("deleted while its image came", job(startTime=T0), [pod("Pending", waiting("ContainerCreating"))], True, P.ENDED, Out.NEVER_STARTED),
    ("deleted by somebody of the site", job(), [leaving(pod("Failed", ended(143)))], True, P.ENDED, Out.CANCELLED),
    ("deleted by somebody, and nobody saw the pod's end", job(), [leaving(pod("Running", RUNS))], True, P.ENDED, Out.CANCELLED),
    ("deleted by somebody when it had succeeded", job(), [leaving(pod("Succeeded", ended(0, "Completed")))], True, P.ENDED, Out.EXITED),
    (
        "deleted by somebody, and it answered with 0",
        job(),
        [leaving(pod("Succeeded", ended(0, finished=T3)))],
        True,
        P.ENDED,
        Out.CANCELLED,
    ),
    ("taken back by its queue, and it answered with 0", job(suspend=True), [leaving(LATE_ZERO)], False, P.ENDED, Out.PREEMPTED),
    ("cancelled by us, and it answered with 0", job(ended_by="cancelled"), [leaving(LATE_ZERO)], True, P.ENDED, Out.CANCELLED),
    (
        "preempted, and it answered with 0",
        job(),
        [pod("Succeeded", ended(0, finished=T3), conditions=AT_T2)],
        False,
        P.ENDED,
        Out.PREEMPTED,
    ),
    ("it had succeeded before it was preempted", job(), [pod("Succeeded", ended(0), conditions=AT_T2)], False, P.ENDED, Out.EXITED),
    ("taken back by its queue", job(suspend=True), [leaving(pod("Failed", ended(143)))], False, P.ENDED, Out.PREEMPTED),
    ("preempted by a pod that matters more", job(), [leaving(PREEMPTED)], False, P.ENDED, Out.PREEMPTED),
    ("cancelled by us", job(ended_by="cancelled"), [pod("Failed", ended(143))], True, P.ENDED, Out.CANCELLED),
    ("it had succeeded before our cancel", job(ended_by="cancelled"), [pod("Succeeded", ended(0, "Completed"))], True, P.ENDED, Out.EXITED),
    (
        "it died of memory before our cancel",
        job(ended_by="cancelled"),
        [pod("Failed", ended(137, "OOMKilled"))],
        True,
        P.ENDED,
        Out.OUT_OF_MEMORY,
    ),
    ("cancelled before it ran", job(ended_by="cancelled"), [pod("Pending", node="")], True, P.ENDED, Out.NEVER_STARTED),
    ("given up by us", job(ended_by="launch: no image"), [pod("Pending", waiting("ErrImagePull"))], True, P.ENDED, Out.LAUNCH_FAILED),
]


@pytest.mark.parametrize(("what", "one", "pods", "deleted", "phase", "outcome"), JOBS, ids=[row[0] for row in JOBS])
def test_a_job_is_what_its_pods_and_its_own_words_make_of_it(
    what: str, one: Job, pods: list[Pod], deleted: bool, phase: NativePhase, outcome: NativeOutcome | None
) -> None:
    told = words.read("lab", one, pods, deleted=deleted)
    assert (told.phase, told.end and told.end.outcome) == (phase, outcome)
    assert (told.tag, told.generation, told.native_id, told.submitted) == (ATTEMPT, 3, "fed/j/u-j", instant(T0))
    assert bool(told.warning) or "tomorrow" not in what


def test_a_job_without_pod_tells_what_forbade_it() -> None:
    event = {"metadata": {"name": "e"}, "reason": "FailedCreate", "message": 'pods "j-1" is forbidden: exceeded quota: lent, requested: …'}
    told = words.read("lab", job(), [], [converted(event, Event)])
    assert told.phase is P.QUEUED and told.reason.startswith("QuotaExceeded: ")


def test_a_second_pod_of_one_job_is_a_restart_and_a_success_is_what_counts() -> None:
    """BR-022: an error of a second pod takes nothing from the first one's success."""
    done = pod("Succeeded", ended(0, "Completed"))
    told = words.read("lab", job(), [done, pod("Failed", ended(1))])
    assert told.restarts == 1 and told.end is not None and told.end.code == 0


# --- garbage -----------------------------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
WORDS = st.sampled_from(["", "Pending", "Running", "Succeeded", "Failed", "Unknown", "Evicted", "OOMKilled", "DeadlineExceeded"]) | st.text(
    max_size=12
)
CONDITIONS = st.fixed_dictionaries(
    {"type": st.sampled_from(["PodScheduled", "Ready", "DisruptionTarget"]), "status": WORDS, "reason": WORDS},
)
STATES = st.fixed_dictionaries(
    {},
    optional={
        "waiting": st.fixed_dictionaries({}, optional={"reason": WORDS}),
        "running": st.fixed_dictionaries({}, optional={"startedAt": st.sampled_from([T0, "0001-01-01T00:00:00Z", "x"])}),
        "terminated": st.fixed_dictionaries(
            {},
            optional={
                "exitCode": st.integers(-5, 70_000),
                "signal": st.integers(-1, 300),
                "reason": WORDS,
                "startedAt": st.sampled_from([T0, "x"]),
            },
        ),
    },
)
STATUSES = st.fixed_dictionaries(
    {},
    optional={
        "phase": WORDS,
        "reason": WORDS,
        "message": st.text(max_size=10),
        "conditions": st.lists(CONDITIONS, max_size=3),
        "containerStatuses": st.lists(st.fixed_dictionaries({"name": st.just("job"), "state": STATES}), max_size=2),
    },
)


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=300, deadline=None)
def test_garbage_instead_of_an_object_is_refused_by_name(data: bytes) -> None:
    for kind in (Pod, Job, Node, Event, Listed):
        with contextlib.suppress(Refused):
            parsed(data, kind)


@given(STATUSES, STATUSES, st.booleans(), st.booleans())
@settings(max_examples=500, deadline=None)
def test_no_pod_whatever_it_says_raises_or_is_a_success_that_nobody_saw(
    first: dict[str, Any], second: dict[str, Any], deleted: bool, suspend: bool
) -> None:
    """No legal default from garbage: code 0 comes from a container that said so in a pod that succeeded, and an end has its outcome."""
    meta = {"name": "p", "uid": "u", "creationTimestamp": T0}
    pods = [converted({"metadata": meta, "spec": {"nodeName": "n"}, "status": status}, Pod) for status in (first, second)]
    told = words.read("lab", job(suspend=suspend), pods, deleted=deleted)
    assert (told.end is None) is (told.phase is not P.ENDED)
    if told.end is not None and told.end.outcome is Out.EXITED and told.end.code == 0:
        assert any(one.get("phase") == "Succeeded" for one in (first, second))
    for one in pods:
        words.launch_trouble(one)


@given(st.text(max_size=12) | st.from_regex(r"[+-]?[0-9.]{0,5}([eE][+-]?[0-9]{0,3}|[a-zA-Z]{0,2})", fullmatch=True))
@settings(max_examples=500, deadline=None)
def test_a_text_is_a_quantity_or_is_refused(text: str) -> None:
    with contextlib.suppress(Refused):
        assert whole(text) >= 0


# --- the cache ---------------------------------------------------------------------------------------------------------------------------


def line(what: str, uid: str, version: int, phase: str = "Running") -> bytes:
    meta = {"name": uid, "uid": uid, "resourceVersion": str(version)}
    return json.dumps({"type": what, "object": {"metadata": meta, "status": {"phase": phase}}}).encode()


def listed(*uids: str, version: str = "10") -> Listed:
    items = [{"metadata": {"name": uid, "uid": uid, "resourceVersion": "1"}} for uid in uids]
    return parsed(json.dumps({"metadata": {"resourceVersion": version}, "items": items}).encode(), Listed)


def test_what_a_later_list_lacks_is_missing_and_not_gone() -> None:
    kept = Kept(Pod)
    kept.relisted([listed("a", "b")])
    kept.relisted([listed("b", version="20")])
    assert set(kept.objects) == {"b"} and set(kept.missing) == {"a"} and not kept.gone
    kept.lost("a")
    assert set(kept.gone) == {"a"} and not kept.missing


def test_what_comes_back_after_all_is_gone_no_more() -> None:
    kept = Kept(Pod)
    kept.relisted([listed("a")])
    kept.relisted([listed(version="20")])
    kept.lost("a")
    assert kept.changed(line("MODIFIED", "a", 21)) and set(kept.objects) == {"a"} and not kept.gone


def test_a_watch_moves_on_by_changes_and_bookmarks_and_ends_with_an_error() -> None:
    kept = Kept(Pod)
    kept.relisted([listed("a")])
    assert kept.changed(line("MODIFIED", "a", 11, "Failed")) and kept.objects["a"].status.phase == "Failed"
    assert kept.changed(b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"15"}}}') and kept.version == "15"
    assert kept.changed(line("DELETED", "a", 16)) and not kept.objects and set(kept.gone) == {"a"} and kept.version == "16"
    assert not kept.changed(b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired"}}')
    assert not kept.changed(b"<html>bad gateway</html>") and kept.warnings


def test_an_object_that_cannot_be_read_costs_itself_alone_and_is_told() -> None:
    kept = Kept(Pod)
    bad = {"metadata": {"name": "x", "uid": "x", "resourceVersion": "12"}, "status": {"phase": 7}}
    kept.relisted([listed("a")])
    assert kept.changed(json.dumps({"type": "ADDED", "object": bad}).encode()) and kept.version == "12"
    assert set(kept.objects) == {"a"} and len(kept.warnings) == 1


@given(st.lists(st.binary(max_size=40) | JSON.map(lambda value: json.dumps({"type": "ADDED", "object": value}).encode()), max_size=6))
@settings(max_examples=300, deadline=None)
def test_no_line_of_a_watch_makes_an_object_go(lines: list[bytes]) -> None:
    kept = Kept(Pod)
    kept.relisted([listed("a")])
    for one in lines:
        kept.changed(one)
    assert "a" in kept.objects and len(kept.warnings) <= 50


def test_every_trouble_is_a_word_of_the_table() -> None:
    assert words.TROUBLE < set(words.WAITING) and all(phase is P.STARTING for phase in words.WAITING.values())
    assert msgspec.json.encode(sorted(words.POD_FAILED))
