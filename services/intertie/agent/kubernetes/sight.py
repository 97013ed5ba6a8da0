"""All that is watched: jobs, pods and refused creations of each mapped namespace, and the nodes; joined per Job of ours.

Reading is from memory, and says whether memory is current; what a list no longer shows is asked for by name before it counts as gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from intertie.agent.kubernetes import api as paths
from intertie.agent.kubernetes.api import Api
from intertie.agent.kubernetes.core.manifest import LABEL_ATTEMPT
from intertie.agent.kubernetes.core.seen import Event, Job, Listed, Node, Pod, parsed
from intertie.agent.kubernetes.core.settings import KubernetesRules
from intertie.agent.kubernetes.core.words import is_ours
from intertie.agent.kubernetes.watch import Stream
from intertie.errors import NotFound
from intertie.ids import AttemptId

# The first lists of a slow API server; after that it is `not current`, and says so.
FIRST_LOOK_S = 15.0


@dataclass(frozen=True, slots=True)
class Found:
    """A Job of ours with what belongs to it. `deleted`: the API server no longer has it, nor any pod of it."""

    job: Job
    pods: list[Pod]
    events: list[Event]
    deleted: bool


class Place:
    """One namespace's streams."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.namespace = namespace
        self.jobs = Stream(api, paths.jobs(namespace), Job)
        self.pods = Stream(api, paths.core(namespace, "pods"), Pod)
        self.events = Stream(api, paths.core(namespace, "events"), Event, {"fieldSelector": "reason=FailedCreate"})

    @property
    def streams(self) -> tuple[Stream[Job], Stream[Pod], Stream[Event]]:
        return self.jobs, self.pods, self.events

    def found(self) -> Iterator[Found]:
        live, gone = _by_owner(self.pods.kept.objects.values()), _by_owner(self.pods.kept.gone.values())
        lost = _by_owner(self.pods.kept.missing.values())
        events: dict[str, list[Event]] = {}
        for event in self.events.kept.objects.values():
            events.setdefault(event.involved_object.uid or "", []).append(event)
        there = [*self.jobs.kept.objects.items(), *self.jobs.kept.missing.items()]
        for uid, job in there:
            if is_ours(job):
                pods = _join(live.get(uid), gone.get(uid), lost.get(uid))
                yield Found(job, pods, events.get(uid, []), deleted=False)
        for uid, job in self.jobs.kept.gone.items():
            if is_ours(job):
                pods = _join(live.get(uid), gone.get(uid), lost.get(uid))
                yield Found(job, pods, events.get(uid, []), deleted=uid not in live)


class Sight:
    """`await open()` once; `close()` ends every stream."""

    def __init__(self, api: Api, rules: KubernetesRules) -> None:
        self.api, self.rules = api, rules
        self.places = {name: Place(api, name) for name in rules.namespaces}
        self.nodes = Stream(api, paths.core("", "nodes"), Node)
        self._tasks: list[asyncio.Task[None]] = []
        self._waited = False

    async def open(self) -> None:
        """Begin to look, if that was not done before, and wait for the first lists as long as that is worth."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(stream.run(), name=f"watch {stream.path}") for stream in self._streams()]
        if not self._waited:
            waiting = [asyncio.ensure_future(stream.listed.wait()) for stream in self._streams()]
            _, late = await asyncio.wait(waiting, timeout=FIRST_LOOK_S)
            for one in late:
                one.cancel()
            self._waited = True

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _streams(self) -> Iterator[Stream[Job] | Stream[Pod] | Stream[Event] | Stream[Node]]:
        for place in self.places.values():
            yield from place.streams
        yield self.nodes

    def why_not_current(self) -> str:
        """Empty if jobs and pods of every namespace are as the API server has them."""
        for place in self.places.values():
            for stream in (place.jobs, place.pods):
                if not stream.current:
                    return f"{place.namespace}: {stream.why}"
        return ""

    def warnings(self) -> Iterator[str]:
        for stream in self._streams():
            yield from stream.kept.warnings
        if not self.nodes.current:
            yield f"nodes are not seen now: {self.nodes.why}"

    async def confirm(self) -> None:
        """Ask by name for what the last lists lacked: there after all, or surely gone."""
        for place in self.places.values():
            for uid, job in list(place.jobs.kept.missing.items()):
                try:
                    told = parsed(await self.api.get(paths.jobs(place.namespace, job.metadata.name)), Job)
                except NotFound:
                    place.jobs.kept.lost(uid)
                    continue
                if told.metadata.uid == uid:
                    place.jobs.kept.adopt(told)
                else:
                    place.jobs.kept.lost(uid)
            for uid in list(place.pods.kept.missing):
                if place.pods.current:
                    place.pods.kept.lost(uid)

    async def by_tag(self, tag: AttemptId) -> tuple[str, Job] | None:
        """Looked up at the API server itself, in every namespace of ours. `Unavailable`: nobody knows."""
        for name, place in self.places.items():
            data = await self.api.get(paths.jobs(name), {"labelSelector": f"{LABEL_ATTEMPT}={tag}"})
            for item in parsed(data, Listed).items or ():
                job = parsed(item, Job)
                place.jobs.kept.adopt(job)
                return name, job
        return None

    async def pods_of(self, account: str, tag: AttemptId) -> list[Pod]:
        """As the API server has them now. `Unavailable`: nobody knows."""
        data = await self.api.get(paths.core(account, "pods"), {"labelSelector": f"{LABEL_ATTEMPT}={tag}"})
        return [parsed(item, Pod) for item in parsed(data, Listed).items or ()]

    def all(self) -> Iterator[tuple[str, Found]]:
        for name, place in self.places.items():
            for found in place.found():
                yield name, found


def _by_owner(pods: Iterable[Pod]) -> dict[str, list[Pod]]:
    told: dict[str, list[Pod]] = {}
    for pod in pods:
        for owner in pod.metadata.owner_references or ():
            if owner.kind == "Job":
                told.setdefault(owner.uid, []).append(pod)
    return told


def _join(*lists: list[Pod] | None) -> list[Pod]:
    return [pod for some in lists for pod in some or ()]
