"""A site's own batch scheduler, and the hand on it: work waits in a queue that lives without the agent, starts hours later, is forgotten, comes
back, and is started twice. What keeps that from being two runs is LINK D6: each submit carries its own fence (a name that runs alone, a deadline),
and a start stub asks the job record and the lease file before the user's code.

This adapter exists in the simulator alone: it stands for Slurm and Kubernetes until theirs are here.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass

from intertie.agent.adapters.fake import Run
from intertie.agent.core import attempts as life
from intertie.agent.core.attempts import Exit
from intertie.agent.core.leases import is_over
from intertie.agent.core.model import Attempt, StartedRecord
from intertie.errors import Unavailable
from intertie.ids import AttemptId, JobId
from intertie.sim.loop import Party
from intertie.sim.machine import SIGKILL, Machine, SimAdapter

# The longest that a queue makes anybody wait by itself, and between two looks at it.
QUEUE_S, LOOK_S = 20.0, 1.0


@dataclass(eq=False)
class NativeJob:
    """A job of the queue. `tag`: the attempt, in its comment; `name`: one of a name runs at a time."""

    number: int
    tag: AttemptId
    name: JobId
    attempt: Attempt
    over: str = ""
    """Why it is not in the queue any more; empty while it waits or runs."""
    begun: bool = False


class NativeScheduler:
    """One site's queue. It dies with nobody: its controller is another machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.party = Party(f"native-{machine.name}")
        self.jobs: list[NativeJob] = []
        self.lost: list[NativeJob] = []
        self.held = 0
        self.deaf = 0
        """While above 0 a submit is taken, and its answer never comes."""
        self.adapter: NativeAdapter | None = None
        """By whose rules the stub works: it is a file beside the job."""

    def find(self, tag: AttemptId) -> NativeJob | None:
        """As `squeue` by comment, those that are over included; the latest."""
        return next((job for job in reversed(self.jobs) if job.tag == tag), None)

    async def submit(self, attempt: Attempt) -> NativeJob:
        """`Unavailable` when the answer is lost: the job may be there all the same."""
        job = NativeJob(len(self.jobs) + len(self.lost) + 1, attempt.id, attempt.job, attempt)
        self.jobs.append(job)
        self.party.spawn(self._wait(job), f"native job {job.number}")
        if self.deaf:
            await asyncio.sleep(LOOK_S)
            raise Unavailable("agent.native_timeout", "the native scheduler did not answer a submit: it may have taken it")
        return job

    def cancel(self, tag: AttemptId) -> None:
        for job in self.jobs:
            if job.tag == tag and not job.begun:
                job.over = job.over or "cancelled"

    async def _wait(self, job: NativeJob) -> None:
        await asyncio.sleep(self.machine.rng.random() * QUEUE_S)
        while not job.over and (self.held or job in self.lost or self._singleton(job)):  # noqa: ASYNC110  # a queue looks
            await asyncio.sleep(LOOK_S)
        if not job.over:
            self.run(job)

    def _singleton(self, job: NativeJob) -> bool:
        """Another of its name runs."""
        running = [one for one in self.machine.live() if one.run.attempt.job == job.name]
        return bool(running)

    def run(self, job: NativeJob) -> None:
        """The stub starts on the node, whoever asked for it and however often."""
        assert self.adapter is not None
        job.begun = True
        self.machine.party.spawn(self.adapter.stub(job), f"stub of native job {job.number}")

    # --- what goes wrong with it ---

    def forget(self) -> None:
        """The controller loses its state: what waited is not in the queue any more."""
        waiting = [job for job in self.jobs if not job.begun and not job.over]
        self.jobs = [job for job in self.jobs if job not in waiting]
        self.lost += waiting

    def remember(self) -> None:
        """… and finds it again, with jobs that others have taken the place of."""
        self.jobs += self.lost
        self.lost = []

    def fail_node(self, which: float) -> None:
        """The node of a running job fails, and the queue starts the job again elsewhere, as some do whatever one asks."""
        live = [one for one in self.machine.live() if self.find(one.run.attempt.id) is not None]
        if not live:
            return
        process = live[min(int(which * len(live)), len(live) - 1)]
        self.machine.lose_supervisor(process)
        process.signal = SIGKILL
        process.job.cancel()
        self.start_twice(process.run.attempt.id)

    def start_twice(self, tag: AttemptId) -> None:
        """Kubernetes: "the same program may sometimes be started twice"."""
        if job := self.find(tag):
            self.run(job)


class NativeAdapter(SimAdapter):
    """A hand on a queue. `start` returns when the work runs, or when the queue says that it never will."""

    def __init__(self, native: NativeScheduler, machine: Machine, *more: object) -> None:
        super().__init__(machine, *more)  # type: ignore[arg-type]  # as SimAdapter's
        self.native = native
        native.adapter = self

    async def start(self, attempt: Attempt) -> StartedRecord | Exit:
        run = self.disk.runs[attempt.id]
        while run.started is None:
            await self.moments.pass_by()
            if run.fenced:
                return _never("fenced")
            job = self.native.find(attempt.id)
            if job is not None and job.over:
                return _never(job.over)
            if job is None:
                # Looked up by its tag before any try: a submit that timed out has often been taken.
                await self._submit(run)
            await asyncio.sleep(LOOK_S)
        await self.moments.pass_by()
        return run.started

    async def _submit(self, run: Run) -> None:
        try:
            await self.native.submit(run.attempt)
        except Unavailable:
            return

    async def fence(self, attempt: AttemptId) -> bool:
        fenced = await super().fence(attempt)
        if fenced:
            self.native.cancel(attempt)
        return fenced

    async def stub(self, job: NativeJob) -> None:
        """The first process of a native job, in the machine's name: it asks before the user's code, and only one of all comes through."""
        run = self.disk.runs.get(job.tag)
        if run is None:
            return
        if why := self.refuses(run):
            job.over = job.over or why
            return
        await self._begin(run.attempt)

    def refuses(self, run: Run) -> str:
        """Why the user's code must not be begun; empty if it may."""
        now = self.machine.clock.moment()
        if run.fenced:
            return "fenced"
        if run.started is not None:
            return "already started"
        if late := life.still_in_time(run.attempt, now):
            return late.code
        if run.deadline is not None and is_over(run.deadline, now):
            return "too late: its lease is over"
        return ""


def _never(why: str) -> Exit:
    return Exit(certain=True, refused_errno=errno.EEXIST, refused_file="native queue", refused_text=why)
