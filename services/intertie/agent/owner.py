"""The owner's own use of the machines: local jobs that wait for devices, take them, and give them back. Nobody else is needed for it.

Local work holds devices in the same table as federation work, so that none has two holders. It is recorded here, never charged, and never
named at the hub.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from intertie.agent import accounts
from intertie.agent.books import save
from intertie.agent.core import attempts as life
from intertie.agent.core.devices import Chosen, choose
from intertie.agent.core.model import Attempt, LocalWork, State, StopAsked, with_state
from intertie.agent.core.reserved import seen_by
from intertie.contracts.job import JobSpec, Resources
from intertie.contracts.site import DeviceKind
from intertie.errors import NotFound, Refused, Unavailable
from intertie.ids import AttemptId, JobId, PoolName, mint
from intertie.observe import log

if TYPE_CHECKING:
    from intertie.agent.site import Site

LOG = log.get("agent.owner")

# Local jobs that wait for devices. A person who queues more has a scheduler to install, not a list to fill.
WAITING = 1_000
# "Without a limit" is a year: nothing of ours runs for ever unseen.
LONGEST_S = 31_536_000


class Owner:
    """Local jobs of one site."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._admitting: asyncio.Task[None] | None = None

    def tasks(self) -> list[asyncio.Task[None]]:
        """What runs in the background, to be ended with the agent."""
        return [self._admitting] if self._admitting is not None else []

    async def submit(
        self,
        *,
        name: str,
        script: str,
        env: Mapping[str, str],
        cwd: str,
        uid: int,
        slots: int = 1,
        gpus: int = 0,
        wall_s: int | None = None,
    ) -> Attempt:
        """A local job: it starts when devices are free, whoever is away. Recorded here, never charged, never named at the hub."""
        if self._site.queue is not None:
            raise Refused(
                "agent.local_native",
                "this site has a queue of its own, and its own users submit to that as ever",
                next_step="use the site's own scheduler (`sbatch`, `kubectl`)",
            )
        self._site.room.must_have()
        resources = Resources(gpus=gpus, slots=slots)
        self._must_fit(resources)
        if sum(a.state is State.WAITING for a in self._site.books.attempts.values()) >= WAITING:
            raise Unavailable("agent.local_queue", f"{WAITING} local jobs wait already", retry_after_s=60)
        account = accounts.by_uid(uid)
        user = account.name if account else str(uid)
        mine = mint(f"local-{self._site.joined.site}")
        job = Attempt(
            id=AttemptId(mine),
            job=JobId(mine),
            state=State.WAITING,
            pool=PoolName(""),
            kind=resources.kind,
            devices=[],
            spec=JobSpec(name=name, script=script, resources=resources, wall_s=wall_s or LONGEST_S),
            account=user,
            env=dict(env),
            local=LocalWork(user=user, uid=uid, cwd=cwd, submitted=self._site.clock.now()),
            kernel_boot=self._site.boot,
        )
        await self._site.journal.write(save(job))
        self._site.put(job)
        await self._admit()
        await self._site.prune()
        return self._site.books.attempts[job.id]

    def _must_fit(self, resources: Resources) -> None:
        """Refuse what no pool of this site can ever hold, and say what there is."""
        sizes = (Counter(device.node for device in pool.devices) for pool in self._site.pools.values() if pool.kind is resources.kind)
        most = max((count for nodes in sizes for count in nodes.values()), default=0)
        if resources.count > most:
            what = "GPUs" if resources.kind is DeviceKind.GPU else "slots"
            raise Refused(
                "agent.no_pool_fits",
                f"{resources.count} {what} are asked for, the largest pool here has {most}",
                next_step="ask for fewer; `intertie local status` shows the pools",
                details={"asked": resources.count, "most": most},
            )

    def devices_freed(self) -> None:
        """Local work that waited may start now."""
        if self._admitting is None and any(attempt.state is State.WAITING for attempt in self._site.books.attempts.values()):
            self._admitting = asyncio.create_task(self._admit_later(), name="admit-local")

    async def _admit_later(self) -> None:
        try:
            await self._admit()
        except Unavailable as err:
            LOG.warning("local work waits for the disk", code=err.code, text=err.text)
        finally:
            self._admitting = None

    async def _admit(self) -> None:
        """First come, first served per kind of device: a large job is not overtaken for ever by small ones."""
        blocked: set[DeviceKind] = set()
        waiting = sorted((a for a in self._site.books.attempts.values() if a.state is State.WAITING), key=lambda a: a.id)
        for job in waiting:
            if job.kind in blocked or self._site.books.attempts[job.id].state is not State.WAITING:
                continue
            found = self._choose(job)
            if found is None and await self._site.displace_for(job.kind, job.spec.resources.count):
                # Owner first: a claim that had not started gave its devices back.
                found = self._choose(job) if self._site.books.attempts[job.id].state is State.WAITING else None
            if found is None:
                blocked.add(job.kind)
                continue
            pool, devices = found
            model = "" if pool.kind is DeviceKind.SLOT else pool.profile.accelerator
            admitted = with_state(
                job, life.move(job, life.Event.ADMIT), pool=pool.name, model=model, devices=devices, kernel_boot=self._site.boot
            )
            self._site.put(admitted)
            try:
                await self._site.journal.write(save(admitted))
            except BaseException:
                self._site.books.holds.release(admitted)
                self._site.books.attempts[job.id] = job
                raise
            self._site.set_out(job.id)

    def _choose(self, job: Attempt) -> Chosen | None:
        books, person = self._site.books, job.local.user if job.local is not None else ""
        observed = seen_by(person, books.observed, books.reserved) if person else books.observed
        return choose(self._site.pools.values(), job.kind, job.spec.resources.count, books.holds, observed)

    def owned_by(self, attempt: Attempt) -> int | None:
        """Whose work of this site's own it is: a local job's, or a tenant's that was taken here; None for the hub's."""
        if attempt.local is not None:
            return attempt.local.uid
        taken = self._site.grants.taken.get(attempt.id)
        return taken.uid if taken is not None else None

    def jobs(self, uid: int, *, everyone: bool) -> list[Attempt]:
        """Newest first."""
        owners = ((a, self.owned_by(a)) for a in self._site.books.attempts.values())
        found = [a for a, owner in owners if owner is not None and (everyone or owner == uid)]
        # An id ends with the time at which it was minted.
        return sorted(found, key=lambda a: a.id.rpartition("-")[2], reverse=True)

    def job(self, job: str, uid: int, *, everyone: bool) -> Attempt:
        """By its attempt or job id; `NotFound` also for what belongs to somebody else."""
        books = self._site.books.attempts
        found = books.get(AttemptId(job)) or next((books[name] for name in self._site.grants.taken if books[name].job == job), None)
        owner = self.owned_by(found) if found is not None else None
        if found is None or owner is None or not (everyone or owner == uid):
            raise NotFound("agent.local_not_found", f"there is no local job {job[:80]} of yours here", next_step="intertie local jobs")
        return found

    async def cancel(self, job: str, uid: int, *, everyone: bool) -> Attempt:
        """Ends it; what has ended stays as it is."""
        found = self.job(job, uid, everyone=everyone)
        asked = StopAsked(reason="cancelled by its user", grace_s=10, by=str(uid))
        match life.on_stop(found, asked):
            case life.GiveUp(why) if await self._site.adapter.fence(found.id):
                await self._site.give_up(found, why)
            case life.GiveUp() | life.Halt():
                stopping = with_state(self._site.books.attempts[found.id], self._site.books.attempts[found.id].state, stop=asked)
                self._site.put(stopping)
                await self._site.record(lambda _: {}, save(stopping))
                await self._site.adapter.stop(found.id, asked.grace_s)
        return self._site.books.attempts[found.id]
