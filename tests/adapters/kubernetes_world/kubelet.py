"""Pods as processes of this machine: where the kernel lets us, each in its own mount and pid namespaces as its own user, with its volumes and /dev/shm.

Without those rights (an ordinary user) the command runs as it is; `isolated` says which.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.adapters.kubernetes_world.controllers import ControlPlane, condition
from tests.adapters.kubernetes_world.kinds import BY_PATH, NODES, PODS, Failure, Obj, now, when
from tests.adapters.kubernetes_world.store import Store

from intertie.agent.kubernetes.core.quantity import quantity

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def can_isolate() -> bool:
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        return False
    return subprocess.run(["unshare", "-m", "-p", "-f", "--mount-proc", "true"], capture_output=True, check=False).returncode == 0


@dataclass
class Running:
    """A container's process."""

    process: subprocess.Popen[bytes]
    log: Path
    started: str
    killing_at: datetime | None = None
    asked: bool = False
    finished: str = ""
    fate: str = ""
    """What the test or the kubelet did to it: `OOMKilled`, `Evicted` …"""


@dataclass
class Kubelets:
    """All nodes' kubelets."""

    store: Store
    plane: ControlPlane
    folder: Path
    claims: dict[tuple[str, str], Path] = field(default_factory=dict)
    """(namespace, claim): the folder that is its volume."""
    missing_images: set[str] = field(default_factory=set)
    broken: dict[str, str] = field(default_factory=dict)
    """Waiting reason by node: containers there do not get to run."""
    refusing: dict[str, str] = field(default_factory=dict)
    """Pod failure reason by node: pods are refused on arrival."""
    down: set[str] = field(default_factory=set)
    """Nodes that say nothing; their pods run on."""
    stuck: set[str] = field(default_factory=set)
    """Uids of pods that no signal ends."""
    lingering: dict[str, int] = field(default_factory=dict)
    """Ticks for which a pod goes on after its container has ended, by uid: volumes are unmounted, a network is taken down."""
    running: dict[str, Running] = field(default_factory=dict)
    isolated: bool = field(default_factory=can_isolate)

    def tick(self) -> None:
        for pod in self.store.list(PODS):
            if pod["spec"].get("nodeName") and pod["spec"]["nodeName"] not in self.down:
                self._sync(pod)
        there = {pod["metadata"]["uid"] for pod in self.store.list(PODS)}
        for uid in set(self.running) - there:
            box = self.running.pop(uid)
            self._kill(box, signal.SIGKILL)
            box.process.wait()

    def _sync(self, pod: Obj) -> None:
        uid, phase = pod["metadata"]["uid"], pod["status"].get("phase")
        if phase in ("Succeeded", "Failed"):
            if pod["metadata"].get("deletionTimestamp"):
                self._gone(pod)
            return
        box = self.running.get(uid)
        if box is None:
            if pod["metadata"].get("deletionTimestamp"):
                self._gone(pod)
            else:
                self._start(pod)
            return
        code = box.process.poll()
        if pod["status"].get("phase") == "Pending" and (code is not None or not self.isolated or self._begun(pod).exists()):
            self._runs(pod, box)
            return
        if code is not None:
            if self.lingering.get(uid, 0) > 0:
                self.lingering[uid] -= 1
            self._ended(pod, box, code, last=not self.lingering.get(uid, 0))
            return
        self._deadline(pod, box)
        if pod["metadata"].get("deletionTimestamp"):
            self._terminate(uid, box, int(pod["metadata"].get("deletionGracePeriodSeconds", 30)))

    # --- start ---

    def _start(self, pod: Obj) -> None:
        node = pod["spec"]["nodeName"]
        if (reason := self.refusing.get(node)) is not None:
            self.fail(pod, reason, f"Pod was rejected: {reason}")
            return
        limit = pod["spec"].get("activeDeadlineSeconds")
        begun = pod["status"].get("startTime")
        if begun and limit is not None and datetime.now(UTC) - when(begun) >= timedelta(seconds=limit):
            self.fail(pod, "DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
            return
        container = pod["spec"]["containers"][0]
        if (why := self.broken.get(node)) is not None:
            self._waits(pod, why, f"{why} by the test")
            return
        if container["image"] in self.missing_images:
            word = (pod["status"].get("containerStatuses") or [{}])[0].get("state", {}).get("waiting", {}).get("reason")
            self._waits(
                pod,
                "ImagePullBackOff" if word in ("ErrImagePull", "ImagePullBackOff") else "ErrImagePull",
                f"image {container['image']} not found",
            )
            return
        try:
            env, words = self._command(pod, container)
        except KeyError as err:
            self._waits(pod, "CreateContainerConfigError", f"{err.args[0]} not found")
            return
        self._waits(pod, "ContainerCreating", "")
        log = self._begun(pod).with_suffix(".log")
        with open(log, "ab") as out:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=env, cwd="/")
        self.running[pod["metadata"]["uid"]] = Running(process, log, now())

    def _begun(self, pod: Obj) -> Path:
        """A file that is there once a container's own command is about to begin."""
        folder = self.folder / "logs"
        folder.mkdir(exist_ok=True)
        return folder / f"{pod['metadata']['uid']}.begun"

    def _runs(self, pod: Obj, box: Running) -> None:
        container, started = pod["spec"]["containers"][0], now()
        box.started = started

        def runs(one: Obj) -> None:
            one["status"]["phase"] = "Running"
            one["status"].setdefault("startTime", started)
            one["status"]["containerStatuses"] = [self._status(container, {"running": {"startedAt": started}}, ready=True)]
            condition(one, "Ready", "True")

        self.store.change(PODS, pod, runs)

    def _waits(self, pod: Obj, reason: str, message: str) -> None:
        def waits(one: Obj) -> None:
            one["status"].setdefault("startTime", now())
            state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
            one["status"]["containerStatuses"] = [self._status(one["spec"]["containers"][0], state)]

        self.store.change(PODS, pod, waits)

    def _status(self, container: Obj, state: Obj, *, ready: bool = False) -> Obj:
        return {"name": container["name"], "image": container["image"], "imageID": "", "ready": ready, "restartCount": 0, "state": state}

    def _command(self, pod: Obj, container: Obj) -> tuple[dict[str, str], list[str]]:
        """Environment and words of the process; KeyError names a volume or a secret that is not there."""
        env = {"PATH": PATH, "HOSTNAME": pod["metadata"]["name"]}
        for row in container.get("env", []):
            ref = (row.get("valueFrom") or {}).get("secretKeyRef")
            env[row["name"]] = row.get("value", "") if ref is None else self._secret(pod, ref)
        sources = {volume["name"]: self._volume(pod, volume) for volume in pod["spec"].get("volumes", [])}
        mounts = [(sources[m["name"]], m["mountPath"], m.get("subPath", "")) for m in container.get("volumeMounts", [])]
        words = [*container["command"], *container.get("args", [])]
        cwd = container.get("workingDir", "/")
        inner = f"cd {shlex.quote(cwd)} && exec {shlex.join(words)}"
        context = {**(pod["spec"].get("securityContext") or {}), **(container.get("securityContext") or {})}
        uid, gid = context.get("runAsUser", 65534), context.get("runAsGroup", 65534)
        rights = f"setpriv --reuid {uid} --regid {gid} --clear-groups --no-new-privs"
        if not self.isolated:
            return env, [*(rights.split() if os.geteuid() == 0 else []), "/bin/sh", "-c", inner]
        steps = ["mount --make-rprivate /"]
        hold = "/mnt"
        steps.append(f"mount -t tmpfs tmpfs {hold}")
        for n, (source, _, sub) in enumerate(mounts):
            if isinstance(source, Path):
                steps += [f"mkdir {hold}/{n}", f"mount --bind {shlex.quote(str(source / sub))} {hold}/{n}"]
        for source, _, _ in mounts:
            if isinstance(source, Path):  # What a container does not mount it does not see.
                steps.append(f"mount -t tmpfs tmpfs {shlex.quote(str(source))}")
        for n, (source, where, _) in enumerate(mounts):
            place = shlex.quote(where)
            if isinstance(source, Path):
                steps += [f"mkdir -p {place}", f"mount --bind {hold}/{n} {place}"]
            else:
                steps.append(f"mount -t tmpfs -o size={source},mode=1777 tmpfs {place}")
        steps.append(f"touch {shlex.quote(str(self._begun(pod)))}")
        steps.append(f"exec {rights} /bin/sh -c {shlex.quote(inner)}")
        return env, ["unshare", "-m", "-p", "-f", "--kill-child", "--mount-proc", "/bin/sh", "-ec", "\n".join(steps)]

    def _volume(self, pod: Obj, volume: Obj) -> Path | int:
        """A folder, or the size of a memory-backed one in bytes."""
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            found = self.claims.get((pod["metadata"]["namespace"], claim))
            if found is None:
                raise KeyError(f'persistentvolumeclaim "{claim}"')
            return found
        return int(quantity(volume["emptyDir"].get("sizeLimit", "64Mi")))

    def _secret(self, pod: Obj, ref: Obj) -> str:
        try:
            secret = self.store.get(BY_PATH["v1", "secrets"], pod["metadata"]["namespace"], ref["name"])
            return str(secret["stringData"][ref["key"]])
        except Failure as err:
            raise KeyError(f'secret "{ref["name"]}"') from err

    # --- end ---

    def _deadline(self, pod: Obj, box: Running) -> None:
        limit = pod["spec"].get("activeDeadlineSeconds")
        if limit is not None and not box.fate and datetime.now(UTC) - when(pod["status"]["startTime"]) >= timedelta(seconds=limit):
            box.fate = "DeadlineExceeded"
        if box.fate == "DeadlineExceeded":
            self._terminate(pod["metadata"]["uid"], box, int(pod["spec"]["terminationGracePeriodSeconds"]))

    def _terminate(self, uid: str, box: Running, grace: int) -> None:
        if uid in self.stuck:
            return
        if not box.asked:
            box.asked, box.killing_at = True, datetime.now(UTC) + timedelta(seconds=grace)
            self._kill(box, signal.SIGTERM)
        elif box.killing_at is not None and datetime.now(UTC) >= box.killing_at:
            self._kill(box, signal.SIGKILL)

    def _kill(self, box: Running, sig: signal.Signals) -> None:
        """To the container's first process; KILL takes all of it."""
        with contextlib.suppress(ProcessLookupError, OSError, ValueError, IndexError):
            pid = box.process.pid
            if self.isolated and box.process.poll() is None:
                inner = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
                os.kill(int(inner[0]), sig)
            elif not self.isolated:
                (os.killpg if sig is signal.SIGKILL else os.kill)(pid, sig)

    def _ended(self, pod: Obj, box: Running, code: int, *, last: bool) -> None:
        """Its container's end, and with `last` the pod's."""
        box.finished = box.finished or now()
        number = code if code >= 0 else 128 - code
        if box.fate in ("Evicted", "DeadlineExceeded"):
            text = (
                "The node was low on resource: memory."
                if box.fate == "Evicted"
                else "Pod was active on the node longer than the specified deadline"
            )
        else:
            text = ""
        reason = "OOMKilled" if box.fate == "OOMKilled" else "Completed" if number == 0 else "Error"
        over = {
            "exitCode": 137 if box.fate == "OOMKilled" else number,
            "reason": reason,
            "startedAt": box.started,
            "finishedAt": box.finished,
        }

        def ends(one: Obj) -> None:
            one["status"]["containerStatuses"] = [self._status(one["spec"]["containers"][0], {"terminated": over})]
            if not last:
                return
            one["status"]["phase"] = "Succeeded" if number == 0 and not text else "Failed"
            if text:
                one["status"] |= {"reason": box.fate, "message": text}
            condition(one, "Ready", "False", "PodFailed" if number else "PodCompleted")

        self.store.change(PODS, pod, ends)
        if last:
            self.running.pop(pod["metadata"]["uid"], None)

    def fail(self, pod: Obj, reason: str, message: str) -> None:
        def ends(one: Obj) -> None:
            one["status"] |= {"phase": "Failed", "reason": reason, "message": message}
            one["status"].setdefault("startTime", now())

        self.store.change(PODS, pod, ends)

    def _gone(self, pod: Obj) -> None:
        phase = self.store.get(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])["status"].get("phase")
        self.store.remove(PODS, pod)
        if phase not in ("Succeeded", "Failed"):
            self.plane.lost_pod(pod)

    def stop(self) -> None:
        for box in self.running.values():
            self._kill(box, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                box.process.kill()
            box.process.wait()
        self.running.clear()


def node(name: str, *, cpu: int = 16, memory: str = "64Gi", gpus: int = 0, labels: dict[str, str] | None = None) -> Obj:
    amounts = {"cpu": str(cpu), "memory": memory, "pods": "110", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now(), "lastTransitionTime": now()}
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
        "spec": {},
        "status": {"allocatable": amounts, "capacity": dict(amounts), "conditions": [ready]},
    }


def say_ready(store: Store, name: str, status: str) -> None:
    """What the node controller concludes of a kubelet: True, False, or Unknown when it is not heard."""
    reason = {"True": "KubeletReady", "False": "KubeletNotReady", "Unknown": "NodeStatusUnknown"}[status]
    store.change(NODES, store.get(NODES, "", name), lambda one: condition(one, "Ready", status, reason))
