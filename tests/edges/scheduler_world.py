"""A site that speaks the real lane over any bus, with an agent that does only what it is told: for the scheduler's tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
from tests.edges.store_world import until

from intertie.bus.port import Bus, Message
from intertie.bus.rpc import Caller
from intertie.clock import SystemClock
from intertie.contracts.base import Event, EventMeta, decode, encode
from intertie.contracts.identity import Claims, MappingRecord, MappingsChanged, Role
from intertie.contracts.image import PoolImages
from intertie.contracts.job import Attribution, Cause, ResultRef
from intertie.contracts.link import (
    Answer,
    Ask,
    AskLog,
    AskRefused,
    Claimed,
    Ended,
    EntryBase,
    Go,
    HeldAttempt,
    HeldTold,
    Instruction,
    Lane,
    LogChunk,
    NotStarted,
    Offer,
    OfferBody,
    OfferRefused,
    ResultStored,
    Sealed,
    SiteSettings,
    Staging,
    Started,
    Stop,
    StopAnswered,
    Withdraw,
)
from intertie.contracts.site import (
    DeviceKind,
    DeviceState,
    Freshness,
    Lendable,
    Phase,
    PoolChanged,
    PoolInventory,
    PoolProfile,
    PoolRecord,
    SiteChanged,
    SiteKind,
    SiteRecord,
    TaskType,
)
from intertie.contracts.telemetry import DeviceSample, NodeSample, encode_sample, local_telemetry_subject
from intertie.ids import AttemptId, DeviceId, JournalId, PoolName, PrincipalId, SessionId, SiteName, TenantName, new_event
from intertie.lane.site import SiteLane, listen_for_nudges
from intertie.link.journal import NextSeq
from intertie.link.memory import Disk, MemoryJournal
from intertie.link.site import Exchange, Pace
from intertie.trust.seal import open_seal

CLOCK = SystemClock()
POOL = PoolName("cpu")
ACME, BETA = TenantName("acme"), TenantName("beta")
QUICK = Pace(beat_s=0.2, idle_s=0.4, retry_s=0.02, busy_s=0.005, silent_after_s=0.5)
TELEMETRY_S = 0.2


def caller(*roles: Role, tenant: TenantName | None = ACME, site: SiteName | None = None, name: str = "ann") -> Caller:
    """Verified claims, as a handler gets them."""
    claims = Claims(iss="identity", sub=PrincipalId("p-1"), name=name, roles=list(roles), tenant=tenant, site=site, iat=0, exp=2**31)
    return Caller(claims, "t" * 32)


USER = caller(Role.TENANT_USER)
OPERATOR = caller(Role.OPERATOR, tenant=None, name="op")


def meta(event: Event) -> EventMeta:
    return EventMeta(id=new_event(), type=event.TYPE, source=event.SERVICE, entity=event.entity, time=CLOCK.now(), number=1, epoch=1)


def site_record(site: SiteName, *, version: int = 1, freshness: Freshness = Freshness.FRESH, self_stop: bool = True) -> SiteRecord:
    return SiteRecord(
        site=site,
        kind=SiteKind.MACHINES,
        title="",
        owner="bob",
        single_user=False,
        owner_tenant="lab",
        freshness=freshness,
        joined_at=CLOCK.now(),
        last_heard=CLOCK.now(),
        hears_us=True,
        clock_offset_s=0.0,
        agent_version="1",
        self_stop=self_stop,
        version=version,
    )


def pool_record(site: SiteName, slots: int, *, version: int = 1, cordoned: bool = False) -> PoolRecord:
    profile = PoolProfile(
        pool=POOL,
        accelerator="none",
        count=slots,
        memory_mib=1_000,
        interconnect="none",
        task_types=[TaskType.BATCH],
        lendable=Lendable(devices=slots),
    )
    return PoolRecord(
        site=site,
        pool=POOL,
        kind=SiteKind.MACHINES,
        profile=profile,
        phase=Phase.PRODUCTION,
        cordoned=cordoned,
        draining=False,
        cordon_reason="disk swap" if cordoned else "",
        freshness=Freshness.FRESH,
        last_heard=CLOCK.now(),
        inventory=None,
        inventory_at=None,
        version=version,
    )


def with_images(site: SiteName, slots: int, images: PoolImages | None, *, version: int = 2) -> PoolChanged:
    """What the registry says once the site told its inventory; an agent of before images tells none of them."""
    inventory = PoolInventory(pool=POOL, devices=[], running=0, waiting=0, images=images)
    record = msgspec.structs.replace(pool_record(site, slots, version=version), inventory=inventory, inventory_at=CLOCK.now())
    return PoolChanged(version=version, record=record)


def joined_events(site: SiteName, slots: int, *tenants: TenantName) -> list[Event]:
    """What registry and identity say when a site has joined."""
    mappings = [MappingRecord(tenant=tenant, site=site, account=f"u-{tenant}") for tenant in tenants]
    return [
        SiteChanged(version=1, record=site_record(site)),
        PoolChanged(version=1, record=pool_record(site, slots)),
        MappingsChanged(version=1, site=site, mappings=mappings),
    ]


class KeepingJournal(MemoryJournal):
    """As the agent's own, which keeps what is safe for weeks."""

    async def acknowledged(self, lane: Lane, ack_through: int, safe_through: int, journal: JournalId | None = None) -> None:
        await super().acknowledged(lane, ack_through, 0, journal)


@dataclass
class Agent:
    """Claims what it is offered and starts on the go; ends when the test says so. `bus` is in the site's account."""

    bus: Bus
    site: SiteName
    scheduler_key: str
    slots: int = 2
    refuse: str = ""
    """A code: refuse offers with it (`device_busy` is no fault)."""
    deaf: bool = False
    """Answer no offer."""
    hold: bool = False
    """Take the go and do nothing with it."""
    samples: bool = True
    journal_name: str = ""
    """Another journal than its first."""
    disk: Disk | None = None
    """The journal of another agent of this site, to go on with."""
    tells: bool = False
    """Tell what is held when the hub's epoch was raised."""
    log: str = "hello\n"
    answers: bool = True
    offers: dict[AttemptId, OfferBody] = field(default_factory=dict)
    running: dict[AttemptId, OfferBody] = field(default_factory=dict)
    claimed: set[AttemptId] = field(default_factory=set)
    heard: list[Instruction] = field(default_factory=list)
    settings: list[SiteSettings] = field(default_factory=list)
    states: dict[str, DeviceState] = field(default_factory=dict)
    kept: dict[AttemptId, HeldAttempt] = field(default_factory=dict)
    """What it would tell, as its books and folders have it."""
    told: list[int] = field(default_factory=list)
    """Epochs for which it told."""

    def __post_init__(self) -> None:
        self.journal = KeepingJournal(self.disk or Disk(JournalId(self.journal_name or f"jnl-{self.site}")))
        self.sequence = 0
        self.lane = SiteLane(
            self.bus,
            Lane.SCHEDULER,
            self.journal,
            CLOCK,
            site=self.site,
            session=SessionId("ses-1"),
            on_instructions=self._on_instructions,
            on_settings=self._on_settings,
            on_raised=self.tell_held if self.tells else None,
            running=lambda: [*self.claimed, *self.running],
            settings_revision=lambda: self.settings[-1].revision if self.settings else 0,
            pace=QUICK,
        )

    async def say(self, kind: type[EntryBase], body: OfferBody, **fields: object) -> None:
        """Journal one entry about an attempt and wake the lane."""

        def build(after: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            named = {"attempt": body.attempt, "job": body.job, "epoch": body.epoch, "generation": body.generation}
            return {Lane.SCHEDULER: [kind(seq=after[Lane.SCHEDULER], at=CLOCK.now(), **named, **fields)]}  # type: ignore[arg-type]  # by kind

        await self.journal.append(build)
        self.lane.wake()

    async def say_plain(self, kind: type[EntryBase], **fields: object) -> None:
        """Journal one entry that is about no single attempt."""

        def build(after: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            return {Lane.SCHEDULER: [kind(seq=after[Lane.SCHEDULER], at=CLOCK.now(), **fields)]}  # type: ignore[arg-type]  # by kind

        await self.journal.append(build)
        self.lane.wake()

    async def tell_held(self, epoch: int) -> None:
        """One list for each epoch, in an entry for each attempt."""
        if epoch in self.told:
            return
        held = sorted(self.kept.values(), key=lambda one: (-one.epoch, -one.generation))

        def build(after: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            first, parts = after[Lane.SCHEDULER], [[one] for one in held] or [[]]
            return {
                Lane.SCHEDULER: [
                    HeldTold(
                        seq=first + n, at=CLOCK.now(), epoch=epoch, place="p", kernel_boot="k", held=part, complete=n == len(parts) - 1
                    )
                    for n, part in enumerate(parts)
                ]
            }

        await self.journal.append(build)
        self.told.append(epoch)

    def heir(self, bus: Bus) -> Agent:
        """The same site before another hub: its journal, what runs, what it would tell."""
        found = Agent(bus, self.site, self.scheduler_key, slots=self.slots, disk=self.journal.disk, tells=True)
        found.offers, found.running, found.claimed, found.kept = self.offers, self.running, self.claimed, self.kept
        return found

    def _keep(self, body: OfferBody, state: str) -> None:
        if body.attempt in self.kept:
            self.kept[body.attempt] = msgspec.structs.replace(self.kept[body.attempt], state=state)

    async def _on_instructions(self, fresh: Sequence[Instruction], exchange: Exchange) -> None:
        for one in fresh:
            self.heard.append(one)
            match one:
                case Offer() if not self.deaf:
                    body = open_seal(one.sealed, self.scheduler_key, OfferBody)
                    self.kept[body.attempt] = HeldAttempt(
                        attempt=body.attempt,
                        job=body.job,
                        epoch=body.epoch,
                        generation=body.generation,
                        state="claimed",
                        devices=list(body.devices),
                        offer=one.adoption or one.sealed,
                    )
                    await self._offered(body)
                case Go() if not self.hold:
                    await self._start(self.offers[one.attempt])
                case Stop():
                    await self._stop(one)
                case Withdraw():
                    await self._withdrawn(self.offers.get(one.attempt))
                case _:
                    pass

    async def _offered(self, body: OfferBody) -> None:
        self.offers[body.attempt] = body
        if self.refuse:
            await self.say(OfferRefused, body, code=self.refuse, text="", fault=self.refuse != "device_busy")
            return
        self.claimed.add(body.attempt)
        await self.say(Claimed, body, devices=list(body.devices))

    async def _start(self, body: OfferBody) -> None:
        self.running[body.attempt] = body
        self._keep(body, "running")
        await self.say(Staging, body)
        devices, image = list(body.devices), body.spec.image
        await self.say(Started, body, started=CLOCK.now(), devices=devices, native_id="7", account=body.account, image=image)

    async def _stop(self, stop: Stop) -> None:
        body = self.running.get(stop.attempt)
        if body is None:
            self.claimed.discard(stop.attempt)
            await self.say(StopAnswered, self.offers[stop.attempt], answer="not_started", instruction=stop.id)
            return
        await self.say(StopAnswered, body, answer="stopping", instruction=stop.id)
        await self.end(body, "cancelled", Cause.CANCELLED)

    async def _withdrawn(self, body: OfferBody | None) -> None:
        if body is not None:
            self.claimed.discard(body.attempt)
            await self.say(NotStarted, body, code="withdrawn", text="")

    async def _on_settings(self, sealed: Sealed, revision: int) -> None:
        self.settings.append(open_seal(sealed, self.scheduler_key, SiteSettings))

    async def end(
        self,
        body: OfferBody,
        outcome: str = "succeeded",
        cause: Cause | None = None,
        result: ResultRef | None = None,
        log_tail: str = "",
    ) -> None:
        """Every process of the attempt is seen gone."""
        self.running.pop(body.attempt, None)
        self.claimed.discard(body.attempt)
        self._keep(body, "ended")
        now = CLOCK.now()
        await self.say(
            Ended,
            body,
            outcome=outcome,
            cause=cause,
            exit_code=0 if outcome == "succeeded" else None,
            signal=None,
            reason="",
            started=now - timedelta(seconds=1),
            ended=now,
            ran_us=1_000_000,
            segments=1,
            quantity_milli_us=1_000_000_000,
            last_metering_seq=1,
            result=result,
            log_tail=log_tail,
        )

    async def store_result(self, body: OfferBody, result: ResultRef) -> None:
        await self.say(ResultStored, body, result=result)

    async def next_running(self) -> OfferBody:
        """The body of the attempt that runs (one must come)."""
        await until(lambda: bool(self.running), "an attempt runs")
        return next(iter(self.running.values()))

    def attribution(self, body: OfferBody) -> Attribution:
        return open_seal(body.attribution, self.scheduler_key, Attribution)

    async def sample(self) -> None:
        """One beat of telemetry."""
        self.sequence += 1
        held = {device for body in self.running.values() for device in body.devices}
        devices = [
            DeviceSample(
                id=DeviceId(name),
                pool=POOL,
                kind=DeviceKind.SLOT,
                state=self.states.get(name, DeviceState.OURS if name in held else DeviceState.FREE),
            )
            for name in (f"slot-{n}" for n in range(self.slots))
        ]
        sample = NodeSample(node="n1", sampled=CLOCK.now(), sequence=self.sequence, devices=devices)
        await self.bus.publish(local_telemetry_subject("n1"), encode_sample(sample))

    async def beat(self) -> None:
        while True:
            if self.samples:
                await self.sample()
            await asyncio.sleep(TELEMETRY_S)

    async def answer(self, message: Message) -> None:
        """Read-only questions."""
        ask = decode(message.body, Ask)
        if not self.answers or not isinstance(ask.question, AskLog):
            return
        text = self.log[ask.question.offset :]
        chunk: LogChunk | AskRefused = LogChunk(
            attempt=ask.question.attempt,
            offset=ask.question.offset,
            next_offset=len(self.log),
            text=text,
            total=len(self.log),
            ended=True,
        )
        if ask.question.attempt not in self.offers:
            chunk = AskRefused(code="agent.no_log", text="there is no such log here")
        await self.bus.publish("up.answer", encode(Answer(id=ask.id, answer=chunk)))


@asynccontextmanager
async def alive(*agents: Agent) -> AsyncIterator[None]:
    """Their lanes speak, their telemetry beats, questions are answered."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for agent in agents for work in (agent.lane.run(), agent.beat())]
        open_ones = [await listen_for_nudges(agent.bus, [agent.lane]) for agent in agents]
        open_ones += [await agent.bus.subscribe("down.ask", agent.answer) for agent in agents]
        try:
            yield
        finally:
            for each in open_ones:
                await each.close()
            for task in tasks:
                task.cancel()
