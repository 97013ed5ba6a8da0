"""The `Cluster` port on Kubernetes: a submit is a Job of the mapped namespace, a look is the watched cache, and records outlive both.

What may be submitted is decided in `core.manifest`, what is seen is read by `core.words`; this is the shell around them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

import msgspec

from intertie.agent.adapters.port import (
    Accounted,
    Chunk,
    Described,
    Listing,
    NativeEnd,
    NativeJob,
    NativeOutcome,
    NativePhase,
    NativeWork,
)
from intertie.agent.kubernetes import api as paths
from intertie.agent.kubernetes.api import Api
from intertie.agent.kubernetes.core.manifest import LABEL_ATTEMPT, LABEL_QUEUE, ended_by, job_manifest, name_of
from intertie.agent.kubernetes.core.nodes import described, fits, job_devices, our_devices
from intertie.agent.kubernetes.core.seen import Job, Pod, instant, parsed
from intertie.agent.kubernetes.core.settings import NOT_FOR_JOBS, KubernetesRules, checked
from intertie.agent.kubernetes.core.words import is_ours, launch_trouble, of_pod, read
from intertie.agent.kubernetes.records import Records, Run
from intertie.agent.kubernetes.sight import Found, Sight
from intertie.clock import Clock
from intertie.contracts.image import PoolImages
from intertie.errors import Conflict, NotFound, Refused, Unavailable
from intertie.ids import AttemptId
from intertie.observe import log

LOG = log.get("agent.kubernetes")

T = TypeVar("T")

# What a container wrote, where the job folder has no log: read from its beginning each time, so no more than this.
API_LOG_BYTES = 16 * 1024 * 1024
STUB_SAYS = b"intertie: "
"""The start stub's own lines, which are no words of the job's."""
RESOLUTION_US = 1_000_000
TRIM = timedelta(days=1)


class Version(msgspec.Struct, frozen=True, rename="camel"):
    git_version: str = ""


class KubernetesCluster:
    """`rules` are the owner's, `folder` is on the agent's own disk. Streams begin with the first verb; `await close()` at the end."""

    def __init__(
        self, rules: KubernetesRules, folder: Path, clock: Clock, *, images: PoolImages | None = None, api: Api | None = None
    ) -> None:
        """`images`: which of them that a job names are run; None: none."""
        self.images = images or PoolImages()
        self.rules = checked(rules)
        self.clock = clock
        self.api = api or Api(rules, clock)
        self.sight = Sight(self.api, rules)
        self.records = Records(folder)
        self._version = ""
        self._read: dict[AttemptId, frozenset[str]] = {}
        """Versions of all that an ended run was last read from: it is read again only when one of them changes."""
        self._trimmed: datetime | None = None
        self._telling = asyncio.Lock()

    @property
    def name(self) -> str:
        return self.rules.cluster

    @property
    def questions(self) -> int:
        """Requests to the API server so far: what looking costs it."""
        return self.api.questions

    def may_run_as(self, account: str) -> str:
        if account in self.rules.namespaces:
            return ""
        if NOT_FOR_JOBS.match(account) or account == self.rules.agent_namespace:
            return f"namespace {account} is the cluster's or the agent's own"
        return f"{account or '(none)'} is no namespace that the owner's site.toml names"

    async def close(self) -> None:
        await self.sight.close()
        await self.api.close()

    # --- submit ---

    async def submit(self, work: NativeWork) -> NativeJob:
        tag, account = work.attempt.id, work.attempt.account
        if (run := self.records.runs.get(tag)) is not None:
            return run.job
        body = job_manifest(work, self.rules, self.clock.now(), self.images)  # `start_by` is by this host's clock.
        await self._fits(work)
        name = name_of(work.attempt)
        try:
            job = _answered(await self.api.create(paths.jobs(account), body), Job, name)
        except Conflict:
            job = _answered(await self.api.get(paths.jobs(account, name)), Job, name)
            if job.metadata.tags.get(LABEL_ATTEMPT) != tag:
                raise Refused(
                    "kubernetes.name_taken",
                    f"a Job {account}/{name} of another attempt is there already",
                    next_step="somebody of the site made it, or this site was restored: delete it, or let the hub place again",
                ) from None
        except NotFound as err:
            raise Refused(
                "kubernetes.no_namespace",
                f"namespace {account} is not there: {err.text}",
                next_step="apply `intertie-agent kubernetes manifests`",
            ) from err
        self.sight.places[account].jobs.kept.adopt(job)
        made = read(self.name, job, ())
        devices, model = our_devices(work.attempt, self.rules)
        run = Run(job=made, account=account, uid=job.metadata.uid, name=name, devices=devices, model=model, seen=self._now())
        await self.records.keep(run)
        return made

    async def _fits(self, work: NativeWork) -> None:
        """A job that no node could ever hold waits for ever: better said now. Nodes that are not seen refuse nothing."""
        await self.sight.open()
        if self.sight.nodes.current and (why := fits(work.attempt, self.rules, self.sight.nodes.kept.objects.values())):
            raise Refused("kubernetes.too_large", why, next_step="ask for what one node has: a job is one pod")

    # --- status ---

    async def status(self, tags: Collection[AttemptId]) -> Listing:
        await self.sight.open()
        why = await self._probe() or self.sight.why_not_current()
        if not why:
            try:
                await self.sight.confirm()
            except (Unavailable, Refused) as err:
                why = err.text
        told: dict[AttemptId, NativeJob] = {}
        async with self._telling:
            for account, found in list(self.sight.all()):
                try:
                    run = await self._told(account, found)
                except (Unavailable, Refused) as err:
                    why = why or err.text
                    continue
                told[run.job.tag] = run.job
            if not why:
                await self._gone(set(tags) - told.keys())
        if self._trimmed is None or self._now() - self._trimmed > TRIM:
            self._trimmed = self._now()
            await self.records.trim(self._trimmed)
            self._read = {tag: versions for tag, versions in self._read.items() if tag in told}
        for tag in tags:
            if tag not in told and (kept := self.records.runs.get(tag)) is not None:
                told[tag] = kept.job
        wanted = {tag: told[tag] for tag in tags if tag in told}
        return Listing(jobs=wanted, at=self._now(), complete=not why, why=why)

    async def _probe(self) -> str:
        """One small question per namespace: a watch that hangs on a dead connection looks as quiet as a quiet cluster."""
        try:
            for name in self.sight.places:
                await self.api.get(paths.jobs(name), {"limit": "1"})
        except (Unavailable, Refused) as err:
            return err.text
        return ""

    async def _told(self, account: str, found: Found) -> Run:
        """What is seen now, with what was seen before, on disk."""
        now = self._now()
        tag = AttemptId(found.job.metadata.tags[LABEL_ATTEMPT])
        before = self.records.runs.get(tag)
        versions = frozenset({found.job.metadata.resource_version, *(pod.metadata.resource_version for pod in found.pods)})
        if before is not None and before.over and self._read.get(tag) == versions:
            return before
        job = read(self.name, found.job, found.pods, found.events, deleted=found.deleted)
        if job.end is not None and job.end.outcome is NativeOutcome.UNKNOWN:
            # Jobs and pods are watched apart, and a list may have lacked what is there: an end that nobody saw is asked for itself.
            pods = await self.sight.pods_of(account, tag)
            job = read(self.name, found.job, pods or found.pods, found.events, deleted=found.deleted and not pods)
        self._read[tag] = versions
        if before is not None and before.uid != found.job.metadata.uid:
            return before  # The name was used again by somebody; the tag's first Job is the one that counts.
        if before is not None and before.over and not _refines(job, before.job):
            if _known(job) and job.end != before.job.end:
                LOG.warning("an ended run is told otherwise now, which changes nothing", job=job.native_id, state=job.state)
            return before
        devices, model = (before.devices, before.model) if before is not None else job_devices(found.job, self.rules)
        job = _with_what_was_seen(job, before)
        run = Run(
            job=job,
            account=account,
            uid=found.job.metadata.uid,
            name=found.job.metadata.name,
            devices=devices,
            model=model,
            seen=now,
            asked=before.asked if before is not None else "",
        )
        await self.records.keep(run)
        try:
            await self._give_up(run, found, now)
        except (Unavailable, Refused) as err:
            LOG.warning("what should be deleted is not yet", job=job.native_id, code=err.code, text=err.text)
        if run.over and found.deleted:
            self.sight.places[account].jobs.kept.forget(found.job.metadata.uid)
        return run

    async def _give_up(self, run: Run, found: Found, now: datetime) -> None:
        """Delete what cannot start, and what Kueue took back after it had run: a second run of it would be refused by its stub anyway."""
        if run.over or found.deleted or found.job.metadata.deletion_timestamp:
            return
        if run.asked:
            await self._delete(run, run.asked, "")  # An earlier try of it was not answered.
            return
        for pod in found.pods:
            trouble = launch_trouble(pod)
            if trouble is not None and trouble[1] is not None and (now - trouble[1]).total_seconds() > self.rules.launch_s:
                await self._delete(run, "launch", trouble[0])
                return
        if found.job.spec.suspend and run.job.started is not None and LABEL_QUEUE in found.job.metadata.tags:
            await self._delete(run, "preempted", "its queue took its place back")

    async def _gone(self, tags: Collection[AttemptId]) -> None:
        """Runs that were recorded and that no look shows: asked for by name, once, before they count as gone."""
        for tag in tags:
            run = self.records.runs.get(tag)
            if run is None or run.over:
                continue
            try:
                job = parsed(await self.api.get(paths.jobs(run.account, run.name)), Job)
            except NotFound:
                job = None
            except (Unavailable, Refused):
                continue
            if job is not None and job.metadata.uid == run.uid:
                self.sight.places[run.account].jobs.kept.adopt(job)
                continue
            await self.records.keep(msgspec.structs.replace(run, job=_vanished(run), seen=self._now()))

    # --- cancel ---

    async def cancel(self, tag: AttemptId, grace_s: int) -> None:
        """Foreground: the Job stays until its pods are gone. The grace is the pods' own, as they were submitted."""
        run = self.records.runs.get(tag)
        if run is not None and (run.over or run.asked not in ("", "cancelled")):
            return
        found = await self.sight.by_tag(tag)
        if found is None:
            return
        account, job = found
        if any(c.type in ("Complete", "Failed") and c.status == "True" for c in job.status.conditions or ()):
            return
        if run is None:
            run = Run(job=read(self.name, job, ()), account=account, uid=job.metadata.uid, name=job.metadata.name, seen=self._now())
        await self._delete(run, "cancelled", "")

    async def _delete(self, run: Run, why: str, text: str) -> None:
        path = paths.jobs(run.account, run.name)
        try:
            await self.api.patch(path, ended_by(why, text))
            await self.records.keep(msgspec.structs.replace(run, asked=why, seen=self._now()))
            await self.api.delete(
                path,
                {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground", "preconditions": {"uid": run.uid}},
            )
        except (NotFound, Conflict):
            return  # Gone already, or another of the same name.

    # --- the rest ---

    async def describe(self) -> Described:
        await self.sight.open()
        if not self._version:
            self._version = _answered(await self.api.get("/version"), Version, "/version").git_version
        if not self.sight.nodes.current:
            raise Unavailable("kubernetes.nodes", f"nodes are not seen now: {self.sight.nodes.why}", retry_after_s=5)
        pods: list[Pod] = []
        for place in self.sight.places.values():
            pods += place.pods.kept.objects.values()
        return described(
            self.rules,
            self._now(),
            self._version,
            list(self.sight.nodes.kept.objects.values()),
            pods,
            [run.job for run in self.records.runs.values()],
            tuple(self.sight.warnings()),
        )

    async def logs(self, tag: AttemptId, offset: int, limit: int) -> Chunk:
        """The container's own output, where there is no job folder to read: a pod's log has no offsets, and ends with the pod."""
        await self.sight.open()
        for account, found in self.sight.all():
            if found.job.metadata.tags.get(LABEL_ATTEMPT) != tag or not found.pods:
                continue
            wanted = str(min(API_LOG_BYTES, offset + limit))
            path = paths.core(account, "pods", found.pods[-1].metadata.name, "log")
            try:
                data = await self.api.get(path, {"limitBytes": wanted})
            except (NotFound, Refused) as err:
                if err.code == "kubernetes.forbidden":
                    raise
                return Chunk(b"", 0, 0)  # No container yet, or its pod is gone.
            data = b"".join(line for line in data.splitlines(keepends=True) if not line.startswith(STUB_SAYS))
            at = min(offset, len(data))
            return Chunk(data[at : at + limit], at, len(data))
        return Chunk(b"", 0, 0)

    async def accounting(self, start: datetime, end: datetime) -> Sequence[Accounted]:
        """Whole seconds, as Kubernetes tells times. Ours from our records; others' from the pods that the namespaces still have."""
        await self.sight.open()
        if why := self.sight.why_not_current():
            raise Unavailable("kubernetes.not_current", why, retry_after_s=5)
        told = [_accounted(run) for run in self.records.overlapping(start, end)]
        for name, place in self.sight.places.items():
            ours = {uid for uid, job in {**place.jobs.kept.objects, **place.jobs.kept.gone}.items() if is_ours(job)}
            for pod in place.pods.kept.objects.values():
                by_tag = pod.metadata.tags.get(LABEL_ATTEMPT) in self.records.runs
                if not by_tag and not {owner.uid for owner in pod.metadata.owner_references or ()} & ours:
                    told += _foreign(self.name, name, pod, start, end)
        return told

    def _now(self) -> datetime:
        return self.api.now()


def _answered(data: bytes, kind: type[T], what: str) -> T:
    """An answer that is no object (a proxy's page) says nothing of what was done: `Unavailable`."""
    try:
        return parsed(data, kind, what)
    except Refused as err:
        raise Unavailable(err.code, err.text, retry_after_s=5) from err


def _known(job: NativeJob) -> bool:
    return job.end is not None and job.end.outcome is not NativeOutcome.UNKNOWN


def _refines(job: NativeJob, before: NativeJob) -> bool:
    """An end that nobody had seen may be told once by later evidence; one that was seen stays."""
    return _known(job) and not _known(before)


def _with_what_was_seen(job: NativeJob, before: Run | None) -> NativeJob:
    """A start that was seen is not unseen; what ends after it was seen running was running."""
    if before is None:
        return job
    job = replace(job, started=job.started or before.job.started, nodes=job.nodes or before.job.nodes)
    end = job.end
    if end is not None and end.outcome is NativeOutcome.NEVER_STARTED and job.started is not None:
        asked = NativeOutcome.CANCELLED if before.asked == "cancelled" else NativeOutcome.UNKNOWN
        if "DeadlineExceeded" in job.state:
            asked = NativeOutcome.WALL_LIMIT
        job = replace(job, end=replace(end, outcome=asked))
    if end is not None and end.outcome is NativeOutcome.UNKNOWN and job.started is not None and "DeadlineExceeded" in job.state:
        job = replace(job, end=replace(end, outcome=NativeOutcome.WALL_LIMIT))
    if end is not None and before.asked == "cancelled" and end.outcome is NativeOutcome.UNKNOWN:
        job = replace(job, end=replace(end, outcome=NativeOutcome.CANCELLED))
    return job


def _vanished(run: Run) -> NativeJob:
    """Its Job is not there, and nobody saw its end."""
    if run.asked == "cancelled":
        outcome = NativeOutcome.CANCELLED if run.job.started is not None else NativeOutcome.NEVER_STARTED
    else:
        outcome = NativeOutcome.UNKNOWN
    end = NativeEnd(outcome, text="its Job is gone from the cluster, and nobody saw how it ended")
    return replace(run.job, phase=NativePhase.ENDED, state=f"{run.job.state}/Gone", end=end)


def _accounted(run: Run) -> Accounted:
    job = run.job
    elapsed = None
    if job.started is not None and job.ended is not None and job.ended >= job.started:
        elapsed = int((job.ended - job.started).total_seconds() * 1_000_000)
    return Accounted(
        native_id=job.native_id,
        cluster=job.cluster,
        state=job.state,
        tag=job.tag,
        submitted=job.submitted,
        started=job.started,
        ended=job.ended,
        elapsed_us=elapsed,
        resolution_us=RESOLUTION_US,
        devices=run.devices,
        model=run.model,
        user=run.account,
        nodes=job.nodes,
        restarts=job.restarts,
        end=job.end,
    )


def _foreign(cluster: str, namespace: str, pod: Pod, start: datetime, end: datetime) -> list[Accounted]:
    told = of_pod(pod)
    if told.started is None or told.started >= end or (told.ended is not None and told.ended <= start):
        return []
    elapsed = (
        int((told.ended - told.started).total_seconds() * 1_000_000) if told.ended is not None and told.ended >= told.started else None
    )
    return [
        Accounted(
            native_id=f"{namespace}/{pod.metadata.name}/{pod.metadata.uid}",
            cluster=cluster,
            state=told.state,
            tag=None,
            submitted=instant(pod.metadata.creation_timestamp),
            started=told.started,
            ended=told.ended,
            elapsed_us=elapsed,
            resolution_us=RESOLUTION_US,
            user=namespace,
            nodes=(pod.spec.node_name,) if pod.spec.node_name else (),
            end=told.end,
        )
    ]
