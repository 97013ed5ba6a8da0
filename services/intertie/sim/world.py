"""One run: a scenario happens to a federation, faults stop, everything settles, and the invariants are asked. The same seed, the same run."""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import structlog

from intertie.agent.core.model import OPEN
from intertie.bus import rpc
from intertie.bus.memory import site_account
from intertie.contracts import endpoints
from intertie.contracts.audit import AuditAnchor, AuditHead
from intertie.contracts.job import AttemptRecord, CancelJob, CloseAttempt, JobSpec, OnSilence, Resources, SetGrant, SetQuota, SubmitJob
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import AgreeSpec, Price
from intertie.errors import IntertieError, NotFound, Refused, Stale, Unavailable
from intertie.ids import CANARY, AttemptId, Digest, JobId, SiteName, TenantName, minting
from intertie.link.journal import Build
from intertie.sim import checks, hub, restores, ways
from intertie.sim.bus import TELEMETRY, Link, SimBroker, SimBus
from intertie.sim.clock import START, HostClock
from intertie.sim.disk import MeteringDisk, Moments, Networked, SchedulerDisk, SimTransfer
from intertie.sim.faults import FAULTS, strikes
from intertie.sim.host import TENANT_UID, Agent, Host, joined_as
from intertie.sim.loop import PARTY, Party, Stuck, VirtualLoop
from intertie.sim.machine import Machine, Process
from intertie.sim.restores import History
from intertie.sim.scenario import Fault, LocalWork, Scenario, Work
from intertie.trust.chain import sign_anchor
from intertie.trust.keys import Key

# When faults have stopped everything is settled after this much virtual time: the longest back-off of a faulty site (20 minutes, as beats are
# scaled), then the longest jobs one after the other on what there is, and beats to find out about each.
SETTLE_S = 3_600.0
LOOK_S = 5.0
# Factor on every beat of the product: fewer beats a virtual hour, the same rules.
SCALE = 4.0
ACME, BETA = TenantName("acme"), TenantName("beta")
# How often in a storm the ledger is asked.
HOLD_LOOKS = 4
# For so long two runs of a job may go on beside each other, at sites that are heard: an idle lane's beat, a restart of the agent, and the stop.
BESIDE_S, BESIDE_LOOK_S = 200.0, 20.0
# Lines of a story that a person reads.
STORY = 60
# Between a client's tries.
AGAIN_S = 2.0
# Between tries to cancel a job that the hub does not know, and how many: by then every site has told what it holds.
CANCEL_AGAIN_S, CANCELS = 60.0, 25


@dataclass(frozen=True, slots=True)
class Outcome:
    """`trace`: a digest of everything that happened, in order; the same for the same scenario."""

    scenario: Scenario
    violations: tuple[str, ...]
    story: tuple[str, ...]
    trace: str
    virtual_s: float
    steps: int

    def told(self) -> dict[str, object]:
        """For a machine: one line of it says whether a seed held, and by what it failed."""
        found: dict[str, object] = {
            "seed": self.scenario.seed,
            "violations": self.violations,
            "virtual_s": round(self.virtual_s, 1),
            "steps": self.steps,
            "trace": self.trace,
        }
        return {**found, "scenario": self.scenario, "story": self.story} if self.violations else found

    def __str__(self) -> str:
        faults = strikes(self.scenario.faults) or "none"
        return (
            f"seed {self.scenario.seed}: {len(self.violations)} violations after {self.virtual_s:.0f} virtual s, {self.steps} steps, trace {self.trace}\n"
            + "\n".join(f"  ✗ {text}" for text in self.violations)
            + f"\nsites {self.scenario.sites}, schedulers {self.scenario.schedulers}, faults\n{faults}\nstory\n"
            + "\n".join(self.story)
        )


@dataclass
class Service:
    """A hub process that is started again when it is gone."""

    work: Callable[[SimBus], Coroutine[Any, Any, None]]
    party: Party
    back_in: float = 1.0


@dataclass
class World:
    loop: VirtualLoop
    scenario: Scenario
    folder: Path
    violations: list[str] = field(default_factory=list)
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY))
    jobs: dict[int, JobId] = field(default_factory=dict)
    """Number of the work in the scenario → the job that it became."""
    asked: int = 0
    """Works whose job, and cancel if any, were taken in."""
    deaf: int = 0
    deaf_until: float = 0.0
    stored: dict[Digest, bytes] = field(default_factory=dict)
    anchors: list[AuditAnchor] = field(default_factory=list)
    """Of the services' audit chains, as identity keeps them."""
    gateway_away: bool = False
    ways: list[str] = field(default_factory=list)
    """Each that was gone, in the order of its first time."""
    sampled: dict[tuple[str, SiteName], float] = field(default_factory=dict)
    """(party, site) → when a sample of that site last came to it."""

    def __post_init__(self) -> None:
        seed = self.scenario.seed
        self._trace = blake2b(digest_size=12)
        chance = Random(f"moments {seed}")
        self.moments = Moments(chance, lambda party, when: self.tell(f"{party.name} dies {when} a commit"))
        self.hub_clock = HostClock(self.loop, rate=1 + chance.uniform(-5e-4, 5e-4))
        self.broker = SimBroker(self.hub_clock, Random(f"network {seed}"), self._message)
        self.key = Key("U", Random(f"key {seed}").randbytes(32))
        self.links: dict[str, Link] = {}
        names = ["metering", *(f"scheduler-{n}" for n in range(self.scenario.schedulers))]
        self.clocks = {name: HostClock(self.loop, offset_s=chance.uniform(-2, 2), rate=1 + chance.uniform(-5e-4, 5e-4)) for name in names}
        self.scheduler_disk = SchedulerDisk(self.moments, self.hub_clock, self._placed, self._ruled, self.went)
        self.metering_disk = MeteringDisk(self.moments, self.hub_clock, self.went)
        self.history = History()
        self.images: dict[Fault, Any] = {}
        self.hosts = {name: self._host(name, slots) for name, slots in zip(self._names(), self.scenario.sites, strict=True)}
        self.services: dict[str, Service] = {}
        self.restarts: dict[str, float] = {}
        self.fate = Party("fate")

    def _names(self) -> list[str]:
        return [f"site-{n}" for n in range(len(self.scenario.sites))]

    def _host(self, name: str, slots: int) -> Host:
        rng = Random(f"host {name} {self.scenario.seed}")
        clock = HostClock(self.loop, offset_s=rng.uniform(-5, 5), rate=1 + rng.uniform(-5e-4, 5e-4))
        machine = Machine(name, self.folder, clock, rng, self._began)
        queue = int(name.rpartition("-")[2]) in self.scenario.queues
        host = Host(name, slots, clock, Key("U", rng.randbytes(32)), machine, rng, SCALE, queue=queue, seen=self.went)
        self.links[name] = host.link
        return host

    def copy_host(self, name: str, copy: str, *, same_boot: bool) -> Host:
        """The same site on another machine, or in another container of the same one."""
        host, rng = self.hosts[name], Random(f"host {copy} {self.scenario.seed}")
        clock = host.clock if same_boot else HostClock(self.loop, offset_s=rng.uniform(-5, 5), boots=1_000)
        machine = Machine(copy, self.folder, clock, rng, self._began)
        slots = len(host.pool.devices)
        twin = Host(copy, slots, clock, host.key, machine, rng, SCALE, queue=False, site=host.site, seen=self.went)
        self.links[copy], self.hosts[copy] = twin.link, twin
        return twin

    # --- what is seen ---

    def tell(self, text: str) -> None:
        line = f"{self.loop.time():9.3f}  {text}"
        self.story.append(line)
        self._trace.update(line.encode())

    def wrong(self, text: str) -> None:
        if text not in self.violations:
            self.tell(f"VIOLATION {text}")
            self.violations.append(text)

    def went(self, way: str) -> None:
        """A named way out, or into trouble, that somebody went: what a written scenario asks for."""
        if way not in self.ways:
            self.tell(f"way: {way}")
            self.ways.append(way)

    def _message(self, party: str, subject: str, size: int) -> None:
        self._trace.update(f"{self.loop.time():.6f} {party} {subject} {size}".encode())
        if subject.startswith(TELEMETRY):
            self.sampled[(party, SiteName(subject.split(".")[4]))] = self.loop.time()

    def _placed(self, record: AttemptRecord) -> None:
        """In the name of the planner that decided it."""
        at = self.sampled.get((PARTY.get().name, record.site))
        for text in checks.at_placement(self, record, None if at is None else self.loop.time() - at):
            self.wrong(text)

    def _ruled(self, attempt: AttemptId, evidence: str) -> None:
        """A rule has moved a job of a silent site."""
        heard_again_s = self.loop.time() - self.deaf_until if not self.deaf else 0.0
        if evidence == "rule if_site_silent=rerun" and heard_again_s < self.scenario.lease_s:
            self.wrong(
                f"invariant 5: {attempt} is placed again for its site's silence by a hub that could not hear {heard_again_s:.0f} s ago"
            )

        if evidence.startswith("digests of"):
            for text in checks.at_gone(self, attempt):
                self.wrong(text)

    def _anchored(self, head: AuditHead) -> AuditAnchor:
        self.anchors.append(sign_anchor(self.key, head, self.hub_clock.now()))
        return self.anchors[-1]

    def cannot_hear(self, by: int) -> None:
        """One fault more (1) or less (-1) in which no copy of the scheduler hears anybody."""
        self.deaf += by
        self.deaf_until = self.loop.time()

    def _began(self, machine: Machine, process: Process) -> None:
        """Invariants that speak of this instant are asked at this instant: a start is what can break them."""
        attempt = process.run.attempt
        self.tell(f"{attempt.id} of {attempt.job} starts at {machine.name} on {','.join(attempt.devices)}")
        for text in checks.at_start(self, machine, process):
            self.wrong(text)

    # --- processes ---

    def standing(self) -> list[Host]:
        """Sites, without copies of them that are gone."""
        return [host for host in self.hosts.values() if not host.ended]

    def link(self, who: str) -> Link:
        return self.links[who]

    def disk_of(self, service: str) -> Networked:
        return self.scheduler_disk if service.startswith("scheduler") else self.metering_disk

    def clock_of(self, who: str) -> HostClock:
        """`hub` is the machine of database and bus; each copy of a service, and each site, has its own."""
        return self.hub_clock if who == "hub" else self.hosts[who].clock if who in self.hosts else self.clocks[who]

    def serve(self, name: str, work: Callable[[SimBus], Coroutine[Any, Any, None]]) -> None:
        self.links.setdefault(name, Link())
        self.services[name] = Service(work, Party(name))
        self._start_service(name)

    def _start_service(self, name: str) -> None:
        process = self.services[name]
        process.party = Party(name)
        bus = self.broker.connect(process.party, self.links[name])
        task = process.party.spawn(process.work(bus), name)
        task.add_done_callback(lambda done: self._over(name, done))

    def begin_agent(self, name: str) -> None:
        """Of a host that was not there before."""
        self.fate.context().run(self._start_agent, name)

    def _start_agent(self, name: str) -> None:
        host = self.hosts[name]
        transfer = SimTransfer(self.stored, lambda: self.gateway_away or host.link.cuts > 0, self.moments)
        joined = joined_as(host.site, self.key.public, ACME)
        agent = host.boot_agent(self.broker, joined, transfer, self.moments, self.folder)
        if host.machine.party.paused:
            agent.party.pause(asleep=True)  # Nothing begins on a machine that stands still.
        task = agent.party.tasks[0]
        task.add_done_callback(lambda done: self._over(name, done))

    def _over(self, name: str, task: asyncio.Task[None]) -> None:
        """A process is gone: by a fault, or by an error of its own, which is a violation unless it only says that something is away."""
        if self.over:
            return
        error = None if task.cancelled() else task.exception()
        if error is not None:
            for leaf in _leaves(error):
                if not isinstance(leaf, Unavailable | Stale):
                    self.wrong(f"process {name} ended by its own error: {leaf!r}")
        self._party(name).kill()
        back = self.restarts.pop(name, 1.0)
        self.tell(f"{name} is gone, back in {back:.1f} s")
        self.loop.call_later(back, self._again, name, context=self.fate.context())

    over: bool = False

    def _again(self, name: str) -> None:
        if self.over or (name in self.hosts and self.hosts[name].ended):
            return
        self.tell(f"{name} starts again")
        if name in self.hosts:
            self._start_agent(name)
        else:
            self._start_service(name)

    def _party(self, name: str) -> Party:
        if name in self.hosts:
            agent = self.hosts[name].agent
            assert agent is not None
            return agent.party
        return self.services[name].party

    def kill(self, name: str, *, back_in: float) -> None:
        party = self._party(name)
        if not party.dead:
            self.restarts[name] = back_in
            party.kill()

    def doom(self, name: str, when: str, *, at: int = 1, back_in: float = 0.0) -> None:
        """Let it die on that side of its `at`th commit from now."""
        party = self._party(name)
        party.doom, party.doom_in = when, at
        if when and not party.dead:
            self.restarts[name] = min(back_in, 20.0)

    def pause(self, name: str) -> None:
        self._party(name).pause()

    def resume(self, name: str) -> None:
        self._party(name).resume()

    def freeze(self, name: str, *, clocks_too: bool) -> None:
        """The whole machine stands still, agent, supervisors and jobs alike."""
        self.hosts[name].machine.pause(clocks_too=clocks_too)
        self._party(name).pause(asleep=True)

    def thaw(self, name: str) -> None:
        self.hosts[name].machine.resume()
        self.resume(name)

    def lose_power(self, name: str, *, back_in: float, rtc_s: float = 0.0) -> None:
        """A machine, and whatever lies in another container of the same one."""
        clock = self.hosts[name].clock
        for one, host in list(self.hosts.items()):
            if host.clock is not clock or host.ended:
                continue
            host.machine.lose_power()
            host.durable.lose_power()
            for text in checks.after_power(self, host):
                self.wrong(text)
            self.kill(one, back_in=max(back_in, 3.0))
        clock.reboot(rtc_s=rtc_s)

    def say(self, name: str, entries: Callable[[Agent], Build]) -> None:
        """Let a site journal what our agent would not, if it is there to do it."""
        agent = self.hosts[name].agent
        if agent is None or agent.party.dead or agent.party.paused or not agent.ready or self.hosts[name].disk_full:
            return
        agent.party.spawn(agent.site.append(entries(agent)), "foreign entry")

    def one_live(self, name: str, which: float) -> tuple[Machine, Process] | None:
        """One of the processes that live there now; `which` from 0 to 1 chooses."""
        machine = self.hosts[name].machine
        live = machine.live()
        return (machine, live[min(int(which * len(live)), len(live) - 1)]) if live else None

    # --- what is asked ---

    async def _client(self) -> None:
        party = Party("user")
        bus = self.broker.connect(party, Link())
        self.user = (party, bus)

        def begin() -> None:
            agree = AgreeSpec(
                title="standard",
                provider="platform",
                consumer="*",
                currency="CNY",
                effective_from=START - timedelta(days=1),
                prices=[Price(kind=DeviceKind.SLOT, per_hour=checks.SLOT_HOUR)],
            )
            party.spawn(self._until_answered(bus, endpoints.AGREE_SPEC, agree, "operator:op"))
            for number, work in enumerate(self.scenario.work):
                party.spawn(self._work(bus, number, work))
            for tenant, slots in self.scenario.quotas.items():
                party.spawn(self._quota(bus, TenantName(tenant), slots))
            for tenant, slots in self.scenario.grants.items():
                for name in self._names():
                    ask = SetGrant(tenant=TenantName(tenant), site=SiteName(name), kind=DeviceKind.SLOT, devices=slots)
                    party.spawn(self._grant(bus, ask))
            for local in self.scenario.local:
                self.loop.call_at(local.at, self._local, local, context=self.fate.context())

        party.context().run(begin)

    async def _quota(self, bus: SimBus, tenant: TenantName, slots: int) -> None:
        await asyncio.sleep(self.scenario.quotas_at)
        await self._until_answered(bus, endpoints.SET_QUOTA, SetQuota(tenant=tenant, kind=DeviceKind.SLOT, limit=slots), "operator:op")
        self.tell(f"{tenant} may have {slots} slots at once")

    async def _grant(self, bus: SimBus, ask: SetGrant) -> None:
        while True:
            try:
                await self._until_answered(bus, endpoints.SET_GRANT, ask, "operator:op")
                return
            except NotFound:
                await asyncio.sleep(AGAIN_S)  # A scheduler that has just started does not know its sites yet.

    async def _until_answered(self, bus: SimBus, endpoint: Any, request: Any, claims: str) -> Any:
        while True:
            try:
                return await rpc.call(bus, endpoint, request, claims=claims)
            except Unavailable:
                await asyncio.sleep(AGAIN_S)

    async def _work(self, bus: SimBus, number: int, work: Work) -> None:
        await asyncio.sleep(work.at)
        lines = [f"sleep {work.runs_s:.3f}", *(["echo 42 > answer.txt"] if work.outputs else []), f"exit {work.code}"]
        script = "\n".join(lines) + "\n" + "# pad\n" * (work.pad_kib * 1024 // 6)
        spec = JobSpec(
            name=f"work-{number}",
            script=script,
            resources=Resources(slots=work.slots),
            wall_s=work.wall_s,
            outputs=["*.txt"] if work.outputs else [],
            on_silence=OnSilence.RERUN if work.rerun else OnSilence.WAIT,
            restartable=work.rerun,
        )
        ask = SubmitJob(tenant=TenantName(work.tenant), spec=spec, client_key=f"key-{number}")
        claims = f"tenant_user:ann:{work.tenant}"
        while True:
            try:
                reply = await self._until_answered(bus, endpoints.SUBMIT, ask, claims)
                break
            except Refused as err:
                if err.code != "scheduler.no_site_fits":
                    raise
                await asyncio.sleep(AGAIN_S)  # A scheduler that has just started has not asked for the pools yet.
        self.jobs[number] = reply.job.job
        self.tell(f"{reply.job.job} is taken in: {work.slots} slots for {work.runs_s:.1f} s, exit {work.code}")
        if work.cancel_at is not None:
            await asyncio.sleep(max(0.0, work.cancel_at - self.loop.time()))
            await self._cancel(bus, reply.job.job, claims)
        self.asked += 1

    async def _cancel(self, bus: SimBus, job: JobId, claims: str) -> None:
        """A job that a restore took is perhaps heard of again, when its site has told what it holds: then it is asked again."""
        for _ in range(CANCELS):
            try:
                await self._until_answered(bus, endpoints.CANCEL, CancelJob(job=job), claims)
            except Refused:
                if not self.history.restored:
                    raise
                await asyncio.sleep(CANCEL_AGAIN_S)
            else:
                self.tell(f"{job} is to be cancelled")
                return

    def ask_again(self) -> None:
        """The scheduler was put back: whoever had cancelled looks at the job, and does it again."""
        party, bus = self.user
        for number, job in self.jobs.items():
            work = self.scenario.work[number]
            if job in self.history.cancelled:
                self.asked -= 1
                party.spawn(self._cancel_again(bus, job, f"tenant_user:ann:{work.tenant}"))

    async def _cancel_again(self, bus: SimBus, job: JobId, claims: str) -> None:
        await asyncio.sleep(CANCEL_AGAIN_S)
        await self._cancel(bus, job, claims)
        self.asked += 1

    def close_attempts_of(self, twin: Host) -> None:
        """A named person who knows that a copy of a site is gone says so of what it had begun, and of what ended there unheard."""
        party, bus = self.user
        assert twin.agent is not None
        rows = self.scheduler_disk.attempt_rows
        claimed = [a for a in twin.agent.site.books.attempts.values() if a.local is None and a.claim_journal == twin.journal]
        names = [a.id for a in claimed if a.state in OPEN or (a.id in rows and (rows[a.id].holding or rows[a.id].result_pending))]
        self.asked -= 1
        party.spawn(self._close(bus, twin, names))

    async def _close(self, bus: SimBus, twin: Host, names: Sequence[AttemptId]) -> None:
        for name in names:
            ask = CloseAttempt(attempt=name, reason="it ran in a copy of the site that is gone", site_gone=True)
            try:
                await self._until_answered(bus, endpoints.CLOSE_ATTEMPT, ask, "operator:op")
                self.tell(f"{name} is closed by a person: {twin.name} is gone")
            except Refused as err:
                self.tell(f"{name} needs no closing: {err.code}")
        self.asked += 1

    def _local(self, work: LocalWork) -> None:
        host = self.hosts[work.site]
        agent = host.agent
        if agent is None or agent.party.dead or agent.party.paused or not agent.ready or host.disk_full:
            return
        submit = self._alone_submit if work.tenant else self._local_submit
        agent.party.spawn(submit(agent, work), "local-user")

    async def _local_submit(self, agent: Agent, work: LocalWork) -> None:
        try:
            job = await agent.site.owner.submit(
                name="mine", script=f"sleep {work.runs_s:.3f}\nexit 0\n", env={}, cwd="", uid=0, slots=work.slots, wall_s=600
            )
        except Unavailable as err:
            if not agent.host.disk_full:
                self.wrong(f"invariant 12: local work at {work.site} was refused: {err.code}")
            return
        self.tell(f"{job.id} is the owner's own work at {work.site}")

    async def _alone_submit(self, agent: Agent, work: LocalWork) -> None:
        """Asked of a site that is alone, by a tenant's local account."""
        spec = JobSpec(name="alone", script=f"sleep {work.runs_s:.3f}\nexit 0\n", resources=Resources(slots=work.slots), wall_s=600)
        tenant = TenantName(work.tenant)
        try:
            taken = await agent.site.grants.submit(tenant=tenant, spec=spec, env={}, uid=TENANT_UID)
        except IntertieError as err:
            for text in checks.refused_alone(agent, tenant, work.slots, err.code):
                self.wrong(text)
            return
        self.tell(f"{taken.id} is {tenant}'s, taken by {work.site} alone")
        for text in checks.taken_alone(agent, tenant):
            self.wrong(text)

    # --- the run ---

    async def play(self) -> None:
        facts = [hub.Joined(host.site, host.pool.profile, host.key.public, (ACME, BETA)) for host in self.hosts.values()]
        self.links["office"] = Link()
        office = Party("office")
        office.spawn(hub.office(self.broker.connect(office, self.links["office"]), self.hub_clock, facts, self._anchored), "office")
        for name in (f"scheduler-{n}" for n in range(self.scenario.schedulers)):
            self.serve(name, partial(self._scheduler, self.clocks[name]))
        self.serve("metering", lambda bus: hub.metering(self.metering_disk, bus, self.clocks["metering"], self.key.public, SCALE))
        for name in self.hosts:
            self._start_agent(name)
        await self._client()
        for fault in self.scenario.faults:
            begin, end = FAULTS[fault.what]
            restores.plan(self, fault)
            self.loop.call_at(fault.at, self._strike, begin, fault, "begins", context=self.fate.context())
            self.loop.call_at(fault.at + fault.lasts, self._strike, end, fault, "ends", context=self.fate.context())
        self.fate.spawn(self._look_at_holds())
        self.fate.spawn(self._look_beside())
        await asyncio.sleep(self.scenario.calm_at + LOOK_S)
        limit = self.loop.time() + SETTLE_S
        # What is waited for is rest: nothing would ring.
        while (unsettled := checks.unsettled(self)) and self.loop.time() < limit and not self.violations:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        if unsettled and self.violations:
            return  # Broken at an instant, and not at rest: what disks hold says nothing yet.
        if unsettled:
            self.wrong(f"invariant 15: {SETTLE_S:.0f} s after the last fault: {unsettled}")
            for text in checks.stalled(self):
                self.wrong(text)
        for text in [*await checks.after_all(self), *ways.missed(self)]:
            self.wrong(text)

    async def _look_at_holds(self) -> None:
        for _ in range(HOLD_LOOKS):
            await asyncio.sleep(self.scenario.calm_at / HOLD_LOOKS)
            try:
                for text in await checks.holding(self):
                    self.wrong(text)
            except Unavailable:
                continue  # Its database is away.

    async def _look_beside(self) -> None:
        """What was excused at its start is not excused for ever: whoever can be told is stopped."""
        since: dict[tuple[AttemptId, AttemptId], float] = {}
        while True:
            await asyncio.sleep(BESIDE_LOOK_S)
            beside = checks.beside(self)
            since = {pair: since.get(pair, self.loop.time()) for pair in beside}
            for pair, at in since.items():
                if self.loop.time() - at > BESIDE_S:
                    self.wrong(f"invariant 1: {pair[0]} and {pair[1]} of one job run side by side, at sites that are heard")

    def _scheduler(self, clock: HostClock, bus: SimBus) -> Coroutine[Any, Any, None]:
        canary = self.broker.connect(bus.party, bus.link, site_account(CANARY))
        limits = hub.Limits(self.scenario.lease_s, self.scenario.lost_after_s)
        return hub.scheduler(self.scheduler_disk, bus, canary, clock, self.key, SCALE, limits)

    def _strike(self, do: Callable[[World, Fault], None], fault: Fault, word: str) -> None:
        self.tell(f"{fault.what} of {fault.who} {word}")
        do(self, fault)

    def outcome(self) -> Outcome:
        return Outcome(self.scenario, tuple(self.violations), tuple(self.story), self._trace.hexdigest(), self.loop.time(), self.loop.steps)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


@contextmanager
def _ears(world: World) -> Iterator[None]:
    """Logs are not written; an exception that somebody logged and went on after is a violation: nothing here may go wrong unexpectedly."""

    def hear(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        error = event.get("exc_info")
        if error is True:
            error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, IntertieError):
            world.wrong(f"logged and passed over: {event.get('event')}: {error!r}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[hear], wrapper_class=structlog.make_filtering_bound_logger(40), cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)


def run(scenario: Scenario) -> Outcome:
    """Let it happen. Deterministic: nothing of this machine takes part, neither its clocks nor its chance."""
    loop = VirtualLoop()
    ids, state = Random(f"ids {scenario.seed}"), random.getstate()
    count = 0

    def name() -> bytes:
        nonlocal count
        count += 1
        # Ids sort by their making, as the real ones do.
        return count.to_bytes(6, "big") + ids.randbytes(10)

    random.seed(scenario.seed)
    with tempfile.TemporaryDirectory(prefix="sim-") as folder, minting(name):
        world = World(loop, scenario, Path(folder))
        with _ears(world):
            try:
                loop.run_until_complete(world.fate.spawn_in(loop, world.play()))
            except Stuck as err:
                world.wrong(f"invariant 15: {err}")
            for text in loop.errors:
                world.wrong(f"an error that nobody saw: {text}")
            outcome = world.outcome()
            world.over = True
            _clean_up(loop)
    random.setstate(state)
    return outcome


def _clean_up(loop: VirtualLoop) -> None:
    """End every task, so that nothing is left to be collected half done."""
    loop.steps = 0
    for _ in range(20):
        left = [task for task in asyncio.all_tasks(loop) if not task.done()]
        if not left:
            break
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.wait(left, timeout=60))
    loop.close()
