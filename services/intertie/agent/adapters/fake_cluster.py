"""A site's own scheduler in memory, deterministic and in virtual time: for tests, the demo and the simulator. Product code, not a mock.

It queues, starts, suspends, preempts, forgets and lies as real ones do: everything that goes wrong with one is a switch here. It lives on when the
agent dies, so one object serves every agent that comes after another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from intertie.agent.adapters.fake_node import Node, Played, Running
from intertie.agent.adapters.files import read_plain
from intertie.agent.adapters.port import (
    Accounted,
    Chunk,
    Described,
    Listing,
    NativeEnd,
    NativeJob,
    NativeNode,
    NativeOutcome,
    NativePhase,
    NativeWork,
)
from intertie.clock import Clock
from intertie.contracts.site import NativeLoad
from intertie.errors import Refused, Unavailable
from intertie.ids import AttemptId, DeviceId

WORDS = {
    NativePhase.QUEUED: "PENDING",
    NativePhase.STARTING: "CONFIGURING",
    NativePhase.RUNNING: "RUNNING",
    NativePhase.SUSPENDED: "SUSPENDED",
    NativePhase.FINISHING: "COMPLETING",
}
ENDS = {
    NativeOutcome.EXITED: "COMPLETED",
    NativeOutcome.OUT_OF_MEMORY: "OUT_OF_MEMORY",
    NativeOutcome.WALL_LIMIT: "TIMEOUT",
    NativeOutcome.CANCELLED: "CANCELLED",
    NativeOutcome.PREEMPTED: "PREEMPTED",
    NativeOutcome.NODE_FAILED: "NODE_FAIL",
    NativeOutcome.LAUNCH_FAILED: "BOOT_FAIL",
    NativeOutcome.IMAGE_UNFETCHED: "LAUNCH_FAILED",
    NativeOutcome.NEVER_STARTED: "DEADLINE",
}
# As a scheduler's own grace between asking and killing, at most.
KILL_WAIT_S = 30.0
MICROSECOND = timedelta(microseconds=1)


@dataclass(eq=False, slots=True)
class Job:
    """One native job, as the scheduler keeps it."""

    native_id: str
    work: NativeWork
    submitted: datetime
    phase: NativePhase = NativePhase.QUEUED
    reason: str = "Priority"
    started: datetime | None = None
    ended: datetime | None = None
    end: NativeEnd | None = None
    restarts: int = 0
    node: str = ""
    devices: tuple[str, ...] = ()
    suspended_us: int = 0
    suspended_at: datetime | None = None
    word: str = ""
    """Said instead of its state: a word that is in no table."""
    unkillable: bool = False
    slow_end: bool = False
    forgotten: bool = False
    """The controller lost it."""
    running: Running | None = None
    why: NativeOutcome | None = None
    """What the scheduler itself is doing to it."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tag(self) -> AttemptId:
        return self.work.attempt.id

    @property
    def state(self) -> str:
        if self.word:
            return self.word
        if self.end is not None:
            failed = self.end.outcome is NativeOutcome.EXITED and (self.end.code or 0) != 0
            return "FAILED" if failed or self.end.outcome is NativeOutcome.SIGNALLED else ENDS.get(self.end.outcome, "UNKNOWN")
        return WORDS[self.phase]


class FakeCluster:
    """`nodes`: name → devices of each. `accounts`: that may submit; empty: one account for all. `behind_s`: its wall clock minus this host's."""

    def __init__(
        self,
        clock: Clock,
        *,
        name: str = "fake",
        nodes: Mapping[str, int] | None = None,
        model: str = "",
        accounts: frozenset[str] = frozenset({"guest"}),
        node: Node | None = None,
        behind_s: float = 0.0,
    ) -> None:
        self.clock, self._name, self.model, self.accounts = clock, name, model, accounts
        self.nodes = dict(nodes or {"node-1": 4, "node-2": 4})
        self.node = node or Played(clock)
        self.behind_s = behind_s
        self.jobs: list[Job] = []
        self.down: dict[str, str] = {}
        """Nodes that are drained or down, and why."""
        self.questions = 0
        self.foreign_running = self.foreign_waiting = self.foreign_devices = 0
        self.held = False
        self.deaf = False
        self.lost_answers = 0
        self.blind_looks = 0
        self.partial_looks = 0
        self.lag_s = 0.0
        """What has ended leaves the queue at once, and its accounting shows it so much later."""
        self._next_id = 1
        self._turn = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- the port ---

    @property
    def name(self) -> str:
        return self._name

    def may_run_as(self, account: str) -> str:
        return "" if not self.accounts or account in self.accounts else f"there is no account {account!r} on cluster {self.name}"

    def now(self) -> datetime:
        return self.clock.now() + timedelta(seconds=self.behind_s)

    async def describe(self) -> Described:
        self._ask()
        busy = dict.fromkeys(self.nodes, 0)
        for job in self.jobs:
            if job.node and job.end is None:
                busy[job.node] += len(job.devices)
        nodes = tuple(
            NativeNode(
                name=name,
                usable=name not in self.down,
                state="drained" if name in self.down else "idle",
                reason=self.down.get(name, ""),
                devices=count,
                busy=busy[name],
                model=self.model,
            )
            for name, count in self.nodes.items()
        )
        load = NativeLoad(
            running=self.foreign_running, waiting=self.foreign_waiting, devices_busy=self.foreign_devices, observed_at=self.now()
        )
        return Described(cluster=self.name, version="fake", at=self.now(), nodes=nodes, load=load, queues=("batch",))

    async def submit(self, work: NativeWork) -> NativeJob:
        self._ask()
        if why := self.may_run_as(work.attempt.account):
            raise Refused("agent.account", why)
        job = self._find(work.attempt.id)
        if job is None:
            most = max(self.nodes.values(), default=0)
            if len(work.attempt.devices) > most:
                raise Refused("agent.native_refused", f"no node of {self.name} has {len(work.attempt.devices)} devices")
            job = Job(str(self._next_id), work, self.now())
            self._next_id += 1
            self.jobs.append(job)
            self._spawn(self._live(job))
        if self.lost_answers > 0:
            self.lost_answers -= 1
            raise Unavailable("agent.native_timeout", f"{self.name} did not answer a submit: it may have taken it")
        return self._told(job)

    async def status(self, tags: Collection[AttemptId]) -> Listing:
        self._ask()
        if self.blind_looks > 0:
            self.blind_looks -= 1
            return Listing({}, self.now(), complete=True)
        found = {job.tag: self._told(job) for job in self.jobs if job.tag in set(tags) and self._shows(job)}
        if self.partial_looks > 0:
            self.partial_looks -= 1
            return Listing(dict(list(found.items())[::2]), self.now(), complete=False, why="the listing broke off")
        return Listing(found, self.now(), complete=True)

    async def cancel(self, tag: AttemptId, grace_s: int) -> None:
        self._ask()
        job = self._find(tag)
        if job is not None and job.end is None:
            self._spawn(self._end_it(job, NativeOutcome.CANCELLED, min(float(grace_s), KILL_WAIT_S)))

    async def logs(self, tag: AttemptId, offset: int, limit: int) -> Chunk:
        self._ask()
        job = self._find(tag)
        found = await asyncio.to_thread(read_plain, Path(job.work.folder) / "log", offset, limit) if job is not None else None
        return found or Chunk(b"", 0, 0)

    async def accounting(self, start: datetime, end: datetime) -> Sequence[Accounted]:
        self._ask()
        return [
            self._accounted(job)
            for job in self.jobs
            if job.started is not None and job.started < end and (job.ended is None or job.ended > start) and self._shows(job)
        ]

    # --- what a person of the site, or bad luck, does ---

    def hold(self, on: bool) -> None:
        """While on nothing starts."""
        self.held = on
        self._turned()

    def job(self, tag: AttemptId) -> Job:
        found = self._find(tag)
        assert found is not None, f"{tag} was never submitted"
        return found

    def reuse_ids(self) -> None:
        self._next_id = 1

    def suspend(self, tag: AttemptId) -> None:
        """Only its bookkeeping: what is played goes on."""
        job = self.job(tag)
        job.phase, job.suspended_at = NativePhase.SUSPENDED, self.now()

    def resume(self, tag: AttemptId) -> None:
        job = self.job(tag)
        self._count_suspension(job)
        job.phase = NativePhase.RUNNING

    def preempt(self, tag: AttemptId) -> None:
        self._spawn(self._end_it(self.job(tag), NativeOutcome.PREEMPTED, 1.0))

    def cancel_at_site(self, tag: AttemptId) -> None:
        self._spawn(self._end_it(self.job(tag), NativeOutcome.CANCELLED, 1.0))

    def lose_image(self, tag: AttemptId) -> None:
        """Of one that has not begun: its image is nowhere."""
        self._spawn(self._end_it(self.job(tag), NativeOutcome.IMAGE_UNFETCHED, 1.0))

    def fail_node(self, tag: AttemptId) -> None:
        job = self.job(tag)
        self.down[job.node] = "not responding"
        self._spawn(self._end_it(job, NativeOutcome.NODE_FAILED, None))

    def run_out_of_memory(self, tag: AttemptId) -> None:
        job = self.job(tag)
        job.why = NativeOutcome.OUT_OF_MEMORY
        if job.running is not None:
            job.running.kill_job()

    def requeue(self, tag: AttemptId) -> None:
        """Its run is ended without a word, and the same job is started again."""
        job = self.job(tag)
        job.restarts += 1
        if job.running is not None:
            job.running.kill()

    def lose(self, tag: AttemptId) -> None:
        """The controller's state is lost: neither queue nor accounting knows of it, and what waited never starts."""
        job = self.job(tag)
        job.forgotten = True
        job.changed.set()

    def make_unkillable(self, tag: AttemptId) -> None:
        self.job(tag).unkillable = True

    def let_die(self, tag: AttemptId) -> None:
        """What was asked to end meanwhile does."""
        job = self.job(tag)
        job.unkillable = False
        job.changed.set()
        if job.why is not None and job.running is not None:
            job.running.kill()

    def drain(self, node: str, reason: str = "maintenance") -> None:
        self.down[node] = reason

    def undrain(self, node: str) -> None:
        self.down.pop(node, None)
        self._turned()

    async def close(self) -> None:
        """End everything; for tests."""
        for job in self.jobs:
            if job.running is not None and job.end is None:
                job.running.kill()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- inside ---

    def _ask(self) -> None:
        self.questions += 1
        if self.deaf:
            raise Unavailable("agent.native_silent", f"{self.name} does not answer")

    def _find(self, tag: AttemptId) -> Job | None:
        return next((job for job in reversed(self.jobs) if job.tag == tag and not job.forgotten), None)

    def _shows(self, job: Job) -> bool:
        if job.forgotten:
            return False
        return job.ended is None or self.now() >= job.ended + timedelta(seconds=self.lag_s)

    def _spawn(self, what: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(what)  # type: ignore[call-overload]  # a coroutine
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _turned(self) -> None:
        self._turn.set()
        self._turn = asyncio.Event()

    def _told(self, job: Job) -> NativeJob:
        known = job.word == ""
        return NativeJob(
            tag=job.tag,
            cluster=self.name,
            native_id=job.native_id,
            phase=job.phase if known else NativePhase.UNKNOWN,
            state=job.state,
            reason=job.reason,
            generation=job.work.attempt.generation,
            submitted=job.submitted,
            started=job.started,
            ended=job.ended if known else None,
            suspended_us=job.suspended_us,
            restarts=job.restarts,
            nodes=(job.node,) if job.node else (),
            devices=tuple(DeviceId(device) for device in job.devices),
            end=job.end if known else None,
            warning="" if known else f"{self.name} says {job.word!r}, which is no state that we know",
        )

    def _accounted(self, job: Job) -> Accounted:
        over = job.ended or self.now()
        assert job.started is not None
        return Accounted(
            native_id=job.native_id,
            cluster=self.name,
            state=job.state,
            tag=job.tag,
            submitted=job.submitted,
            started=job.started,
            ended=job.ended,
            elapsed_us=(over - job.started) // MICROSECOND - job.suspended_us,
            suspended_us=job.suspended_us,
            resolution_us=1,
            devices=len(job.devices),
            model=self.model,
            user=job.work.attempt.account,
            nodes=(job.node,),
            restarts=job.restarts,
            end=job.end,
        )

    def _room(self, job: Job) -> str | None:
        """A node with enough free devices; None: it waits."""
        if self.held:
            job.reason = "JobHeldAdmin"
            return None
        free = sum(self.nodes.values()) - self.foreign_devices
        for name, count in self.nodes.items():
            used = sum(len(one.devices) for one in self.jobs if one.node == name and one.end is None)
            free -= used
            if name not in self.down and count - used >= len(job.work.attempt.devices) and free >= 0:
                return name
        job.reason = "Resources"
        return None

    async def _live(self, job: Job) -> None:
        """From the queue to its end."""
        if not await self._wait(job):
            return
        job.started = self.now()
        job.reason, job.phase = "None", NativePhase.RUNNING
        while True:
            before = job.restarts
            job.running = await self.node.start(job.work, job.native_id, job.node)
            code, number = await job.running.over()
            if job.restarts == before:
                break
        while job.unkillable:  # Its first process is gone, and something of it is in no state to die.
            job.phase, job.reason = NativePhase.FINISHING, "Kill task failed"
            await job.changed.wait()
        if job.slow_end:
            job.phase = NativePhase.FINISHING
            await asyncio.sleep(1.0)
        outcome = job.why or (NativeOutcome.SIGNALLED if number is not None else NativeOutcome.EXITED)
        self._over(job, NativeEnd(outcome, code, number))

    async def _wait(self, job: Job) -> bool:
        """Until it has a node; False: it never will."""
        while True:
            if job.end is not None or job.forgotten:
                return False
            if (node := self._room(job)) is not None:
                used = {device for one in self.jobs if one.node == node and one.end is None for device in one.devices}
                free = [name for n in range(self.nodes[node]) if (name := f"{node}-{n}") not in used]
                job.node, job.devices = node, tuple(free[: len(job.work.attempt.devices)])
                return True
            left_s = (job.work.start_by - self.clock.now()).total_seconds()
            if left_s <= 0:
                self._over(job, NativeEnd(NativeOutcome.NEVER_STARTED, text="its deadline passed in the queue"))
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._turn.wait()

    def _count_suspension(self, job: Job) -> None:
        if job.suspended_at is not None:
            job.suspended_us += (self.now() - job.suspended_at) // MICROSECOND
            job.suspended_at = None

    def _over(self, job: Job, end: NativeEnd) -> None:
        self._count_suspension(job)
        job.ended, job.end, job.phase, job.running = self.now(), end, NativePhase.ENDED, None
        job.reason = "None"
        self._turned()

    async def _end_it(self, job: Job, why: NativeOutcome, grace_s: float | None) -> None:
        """Ask, wait, kill. `grace_s` None: at once and without a word, as a node that loses its power."""
        if job.end is not None:
            return
        if job.running is None and job.started is None:
            outcome = NativeOutcome.NEVER_STARTED if why is NativeOutcome.NODE_FAILED else why
            self._over(job, NativeEnd(outcome, text="it waited"))
            return
        job.why = job.why or why
        if job.unkillable:
            job.phase, job.reason = NativePhase.FINISHING, "Kill task failed"
            return
        if job.running is None:
            return
        if grace_s is not None:
            job.running.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s + 2.0):
                    await job.running.over()
                    return
        if job.running is not None:
            job.running.kill()
