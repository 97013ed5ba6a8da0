"""The whole hub in one process, with the real keepers on a real bus in operator mode and a real PostgreSQL, its HTTP door open, and two sites:
one that plays by the rules and one that does not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import aiohttp
import msgspec
from aiohttp.test_utils import TestServer
from tests.conftest import SERVICES, TESTER, PgDatabase, PgServer
from tests.edges.identity_world import CLOCK, Site, World, running_world, stopped, until

from intertie.bus import rpc
from intertie.bus.nats import NatsBus
from intertie.contracts import endpoints
from intertie.contracts.base import Empty, decode, encode
from intertie.contracts.identity import Claims, CreateTenant, CreateToken, MapAccount, Role, SiteKeyChanged
from intertie.contracts.incident import IncidentRecord
from intertie.contracts.job import AttemptChanged, JobChanged, JobQuery, JobRecord, JobSpec, JobState, SubmitJob
from intertie.contracts.link import Clocks, EntryBase, Lane, Offer, OfferBody, Sealed, SegmentClosed, Sync, Synced, local_sync_subject
from intertie.contracts.site import DeviceKind, DeviceState
from intertie.contracts.telemetry import DeviceSample, NodeSample, encode_sample, local_telemetry_subject
from intertie.contracts.usage import (
    AgreeSpec,
    Anchor,
    AttemptBook,
    BookQuery,
    LedgerCheck,
    Price,
    Segment,
    Statement,
    StatementQuery,
    UsagePhase,
)
from intertie.embedded.hub import HubLayout
from intertie.errors import Refused, Unavailable
from intertie.gateway.__main__ import GatewaySettings, application
from intertie.gateway.objects import ObjectStore
from intertie.ids import (
    AttemptId,
    DeviceId,
    Digest,
    JobId,
    JournalId,
    PoolName,
    PrincipalId,
    SegmentId,
    SessionId,
    SiteName,
    TenantName,
    mint,
)
from intertie.lane.keeper import LaneKeeper
from intertie.lane.pg import PgLaneTables
from intertie.link.journal import first_digest, next_digest
from intertie.metering.call_store import PgCalls
from intertie.metering.calls import Calls
from intertie.metering.native import NativeBooks
from intertie.metering.native_store import PgNative
from intertie.metering.pg import PgMetering
from intertie.metering.service import Metering, sealed_by, trust
from intertie.scheduler.pg import PACKAGE, PgSchedulerStore
from intertie.scheduler.wiring import wire
from intertie.store import Database, EventConsumer, Relay
from intertie.trust.claims import ServiceClaims, sign_claims, site_claims, verify_claims
from intertie.trust.keys import Key
from intertie.trust.seal import open_seal, seal

SCALE = 0.2
POOL = PoolName("slots")
ACME, RIVAL = TenantName("team-a"), TenantName("rival")
# What the gateway of these tests takes in one object.
OBJECT_BYTES = 3 * 1024 * 1024
ANSWER_S = 5.0
_NUMBERS = itertools.count(1)


@dataclass
class Tongue:
    """One lane of a site, spoken by hand: every field of a sync may be a lie."""

    bus: NatsBus
    site: SiteName
    lane: Lane
    journal: JournalId = field(default_factory=lambda: JournalId(mint("jnl")))
    session: SessionId = field(default_factory=lambda: SessionId(mint("ses")))
    nonce: int = 0
    taken: int = 0
    raws: list[bytes] = field(default_factory=list)
    """The whole journal."""
    acked: int = 0
    mark: tuple[int, int] = (0, 0)
    heard: dict[str, Any] = field(default_factory=dict)
    """Instructions by id."""

    def add(self, *entries: EntryBase) -> None:
        for entry in entries:
            self.raws.append(encode(entry))

    @property
    def next_seq(self) -> int:
        return len(self.raws) + 1

    def digest_at(self, seq: int) -> Digest:
        mark = first_digest(self.journal)
        for raw in self.raws[:seq]:
            mark = next_digest(mark, raw)
        return mark

    def holding(self) -> list[AttemptId]:
        """What its own journal says holds devices: a digest without it would be the site's word that it is gone."""
        held: dict[AttemptId, None] = {}
        for raw in self.raws:
            try:
                said = msgspec.json.decode(raw)
                kind, attempt = said["kind"], AttemptId(said["attempt"])
            except (msgspec.DecodeError, KeyError, TypeError):
                continue
            if kind in ("claimed", "staging", "started"):
                held[attempt] = None
            elif kind in ("ended", "not_started"):
                held.pop(attempt, None)
        return list(held)

    def sync(self, **lies: Any) -> Sync:
        """The next honest sync, but for the lies."""
        self.nonce += 1
        honest: dict[str, Any] = {
            "site": self.site,
            "session": self.session,
            "lane": self.lane,
            "nonce": self.nonce,
            "taken_nonce": self.taken,
            "journal": self.journal,
            "first_seq": self.acked + 1,
            "digest_before": self.digest_at(self.acked),
            "entries": [msgspec.Raw(raw) for raw in self.raws[self.acked :]],
            "at_head": True,
            "running": [attempt for attempt in self.holding() if "\x00" not in attempt],
            "instruction_epoch": self.mark[0],
            "instruction_mark": self.mark[1],
            "clocks": Clocks(utc=CLOCK.now(), boot_s=CLOCK.monotonic_s(), kernel_boot="boot-1"),
        }
        return Sync(**{**honest, **lies})

    async def send(self, body: bytes, *, timeout_s: float = ANSWER_S) -> Synced | None:
        """Bytes to the keeper; None if nothing is answered."""
        try:
            answer = await self.bus.request(local_sync_subject(self.lane), body, timeout_s=timeout_s)
        except Unavailable:
            return None
        return decode(answer.body, Synced)

    async def speak(self, **lies: Any) -> Synced:
        """One honest exchange (but for the lies): it must be answered."""
        sync = self.sync(**lies)
        async with asyncio.timeout(30):
            while (answer := await self.send(encode(sync))) is None:
                sync = self.sync(**lies)
        self.taken = answer.nonce
        self.acked = max(self.acked, answer.ack_through)
        for one in answer.instructions:
            self.heard[one.id] = one
            self.mark = max(self.mark, (one.epoch, one.number))
        return answer


@dataclass
class Member:
    """A joined site and its three lanes."""

    site: Site
    bus: NatsBus
    tongues: Mapping[Lane, Tongue]
    scheduler_key: str
    sequence: int = 0

    @property
    def name(self) -> SiteName:
        return self.site.name

    def __getitem__(self, lane: Lane) -> Tongue:
        return self.tongues[lane]

    async def sample(self) -> None:
        self.sequence += 1
        devices = [DeviceSample(id=DeviceId(f"slot-{n}"), pool=POOL, kind=DeviceKind.SLOT, state=DeviceState.FREE) for n in range(2)]
        sample = NodeSample(node="n1", sampled=CLOCK.now(), sequence=self.sequence, devices=devices)
        await self.bus.publish(local_telemetry_subject("n1"), encode_sample(sample))

    async def offered(self, job: JobId) -> tuple[OfferBody, Offer]:
        """The offer of this job, waited for."""
        found: list[tuple[OfferBody, Offer]] = []

        async def looked() -> bool:
            await self.sample()
            await self[Lane.REGISTRY].speak()
            await self[Lane.SCHEDULER].speak()
            for one in self[Lane.SCHEDULER].heard.values():
                if isinstance(one, Offer):
                    body = open_seal(one.sealed, self.scheduler_key, OfferBody)
                    if body.job == job:
                        found.append((body, one))
            return bool(found)

        await until(looked, f"{self.name} is offered {job}")
        return found[0]

    def say(self, kind: type[EntryBase], body: OfferBody, **fields: Any) -> None:
        """Journal one entry about an attempt; fields may lie."""
        tongue = self[Lane.SCHEDULER]
        honest = {
            "seq": tongue.next_seq,
            "at": CLOCK.now(),
            "attempt": body.attempt,
            "job": body.job,
            "epoch": body.epoch,
            "generation": body.generation,
        }
        tongue.add(kind(**{**honest, **fields}))

    def segment(self, body: OfferBody, **lies: Any) -> Segment:
        """A minute of what was offered, ending now."""
        now = CLOCK.now()
        anchor = Anchor(utc=now - timedelta(seconds=60), boot_s=1.0, kernel_boot="boot-1")
        honest: dict[str, Any] = {
            "id": SegmentId(mint("seg")),
            "site": self.name,
            "pool": body.pool,
            "attempt": body.attempt,
            "phase": UsagePhase.RUN,
            "kind": DeviceKind.SLOT,
            "devices": list(body.devices),
            "quantity_milli": 1_000 * len(body.devices),
            "start": now - timedelta(seconds=60),
            "end": now,
            "last": True,
            "anchor": anchor,
            "attribution": body.attribution,
        }
        return Segment(**{**honest, **lies})

    def measure(self, segment: Segment, *, key: Key | None = None, sealed: Sealed | None = None) -> None:
        """Journal a segment, sealed by the site's key unless another is given."""
        tongue, signer = self[Lane.METERING], key or self.site.key
        told = sealed or seal(signer, encode(segment), signer.public)
        tongue.add(SegmentClosed(seq=tongue.next_seq, at=CLOCK.now(), sealed=told))

    def proof(self, **lies: Any) -> dict[str, str]:
        """The header of an HTTP call."""
        return {"Authorization": f"Intertie-Site {site_claims(self.site.key, lies.get('site', self.name), lies.get('now', CLOCK.now()))}"}


@dataclass
class Hub:
    """All keepers, and what tests ask of them."""

    world: World
    http: aiohttp.ClientSession
    objects: Path
    tokens: dict[TenantName, str] = field(default_factory=dict)
    admin: str = ""

    def bearer(self, tenant: TenantName = ACME) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.tokens[tenant]}"}

    async def member(self, name: SiteName) -> Member:
        """A site that has joined, with a mapping for both tenants."""
        site = Site(name)
        joined = await self.world.join(site)
        bus = await self.world.connect(site)
        for tenant in (ACME, RIVAL):
            if joined.owner_tenant == tenant:
                await self.world.call(endpoints.MAP_ACCOUNT, MapAccount(tenant=tenant, site=name, account=""))
        return Member(site, bus, {lane: Tongue(bus, name, lane) for lane in Lane}, joined.service_keys["scheduler"])

    async def submit(self, site: SiteName, **spec: Any) -> JobId:
        """A job that may only run there."""
        request = SubmitJob(tenant=ACME, spec=JobSpec(**{"name": "one", "script": "true", "site": site, **spec}), client_key=mint("key"))

        async def known() -> bool:
            record = await self.world.record(site)
            return record is not None

        await until(known, f"{site} is known")
        job: JobRecord | None = None

        async def taken() -> bool:
            nonlocal job
            try:
                job = (await self.world.call(endpoints.SUBMIT, request, signed=self.as_user())).job
            except Refused as refused:
                # The registry knows the site; the scheduler hears of it by an event a moment later.
                if refused.code != "scheduler.no_site_fits":
                    raise
            return job is not None

        await until(taken, "the job is taken")
        assert job is not None
        return job.job

    def as_user(self, tenant: TenantName = ACME) -> str:
        now = int(CLOCK.now().timestamp())
        claims = Claims(iss="identity", sub=PrincipalId("u"), name="u", roles=[Role.TENANT_ADMIN], tenant=tenant, iat=now, exp=now + 300)
        return sign_claims(Key.read(self.world.layout.key_file("identity")), claims)

    async def job(self, job: JobId) -> JobRecord:
        found: JobRecord = await self.world.call(endpoints.JOB, JobQuery(job=job), signed=self.as_user())
        return found

    async def reaches(self, job: JobId, state: JobState) -> JobRecord:
        async def there() -> bool:
            return (await self.job(job)).state is state

        await until(there, f"{job} is {state}")
        return await self.job(job)

    async def book(self, attempt: str) -> AttemptBook | None:
        query = BookQuery(attempts=[AttemptId(attempt)])
        books: Sequence[AttemptBook] = (await self.world.call(endpoints.BOOKS, query)).books
        return books[0] if books else None

    async def statement(self, tenant: TenantName = ACME) -> Statement:
        found: Statement = await self.world.call(endpoints.STATEMENT, StatementQuery(tenant=tenant))
        return found

    async def check(self) -> LedgerCheck:
        found: LedgerCheck = await self.world.call(endpoints.LEDGER_CHECK, Empty())
        return found

    async def incidents(self, site: SiteName, kind: str) -> list[IncidentRecord]:
        """Open incidents of a kind, waited for."""
        found: list[IncidentRecord] = []

        async def opened() -> bool:
            found[:] = [one for one in await self.world.open_incidents(site) if one.kind == kind]
            return bool(found)

        await until(opened, f"an incident {kind} of {site}")
        return found


@contextmanager
def own_database(server: PgServer) -> Iterator[PgDatabase]:
    """A database for a whole module, as the fixture `pg` makes one for a test."""
    name = f"hostile{next(_NUMBERS)}"
    server.server.query(f"CREATE DATABASE {name} TEMPLATE intertie OWNER {TESTER}")
    server.server.query("".join(f"GRANT CONNECT ON DATABASE {name} TO {service};" for service in SERVICES))
    password = server.passwords[TESTER]
    try:
        yield PgDatabase(name, server.server.url(TESTER, name), password, server.server.admin_url(name), server)
    finally:
        server.server.query(f"DROP DATABASE {name} WITH (FORCE)")


@asynccontextmanager
async def running_hub(layout: HubLayout, pg: PgDatabase, folder: Path) -> AsyncIterator[Hub]:
    async with running_world(layout, pg) as world, AsyncExitStack() as stack:

        async def database(service: str, package: str) -> Database:
            url, password = pg.role(service)
            db = await Database.open(url, password=password, schema=service, connections=4)
            stack.push_async_callback(db.close)
            await db.migrate(package)
            return db

        async def bus(name: str) -> NatsBus:
            found = await NatsBus.connect(layout.bus_url, name=name, credentials=layout.creds_file(name))
            stack.push_async_callback(found.close)
            return found

        def task(name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
            made = asyncio.create_task(work, name=name)
            stack.push_async_callback(stopped, made)
            return made

        def verified(text: str) -> Claims:
            return verify_claims(text, world.keyset, CLOCK.now())

        await start_metering(world, await database("metering", "intertie.metering"), await bus("metering"), task, stack, verified)
        await start_scheduler(world, await database("scheduler", PACKAGE), await bus("scheduler"), task, stack, verified)
        settings = GatewaySettings(bus_url=[layout.bus_url], key_file=layout.key_file("gateway"), data_dir=folder)
        objects = ObjectStore(folder / "objects", limit_bytes=OBJECT_BYTES)
        app = application(await bus("gateway"), settings, objects, CLOCK, Key.read(layout.key_file("gateway")))
        server = await stack.enter_async_context(TestServer(app))
        http = await stack.enter_async_context(aiohttp.ClientSession(base_url=server.make_url("/")))
        hub = Hub(world, http, folder / "objects")
        price = AgreeSpec(
            title="all", provider="platform", consumer="*", currency="CNY", prices=prices(), effective_from=datetime(2026, 1, 1, tzinfo=UTC)
        )
        await world.call(endpoints.AGREE_SPEC, price)
        for tenant in (ACME, RIVAL):
            await world.call(endpoints.CREATE_TENANT, CreateTenant(tenant=tenant))
            made = await world.call(endpoints.CREATE_TOKEN, CreateToken(name="u", roles=[Role.TENANT_ADMIN], tenant=tenant))
            hub.tokens[tenant] = made.token
        yield hub


def prices() -> list[Price]:
    return [Price(kind=DeviceKind.SLOT, per_hour=Decimal(6)), Price(kind=DeviceKind.GPU, per_hour=Decimal(600))]


async def start_metering(world: World, db: Database, bus: NatsBus, task: Any, stack: AsyncExitStack, verified: rpc.Verifier) -> None:
    own = ServiceClaims(Key.read(world.layout.key_file("metering")), "metering", CLOCK)
    news = asyncio.Event()
    lanes = PgLaneTables(db)
    store, trusted = PgMetering(db), trust(world.keyset["scheduler"])
    service = Metering(store, lanes, trusted, CLOCK, news=news.set)
    service.calls = Calls(PgCalls(db), lanes, sealed_by, world.keyset.get("gateway", ""), CLOCK)
    service.native = NativeBooks(store, PgNative(db), lanes, trusted, CLOCK)
    keeper = LaneKeeper(bus, Lane.METERING, lanes, CLOCK, interpret=service.interpret)

    async def sweep() -> None:
        while True:
            await news.wait()
            news.clear()
            await service.reconsider()

    consumer = EventConsumer(
        bus,
        db,
        "metering",
        {AttemptChanged: service.on_attempt, JobChanged: service.on_job, SiteKeyChanged: service.on_site_key},
        snapshot={
            "scheduler": lambda: service.learn_all_attempts(bus, own.signed()),
            "identity": lambda: service.learn_all_keys(bus, own.signed()),
        },
        beat_s=SCALE,
    )
    task("metering-lane", keeper.run())
    task("metering-events", consumer.run())
    task("metering-relay", Relay(db, bus, "metering", beat_s=SCALE).run())
    task("metering-sweep", sweep())
    stack.push_async_callback((await rpc.serve(bus, "metering", "1.0.0", service.endpoints(), verifier=verified)).close)
    await keeper.listening.wait()


async def start_scheduler(world: World, db: Database, bus: NatsBus, task: Any, stack: AsyncExitStack, verified: rpc.Verifier) -> None:
    key = Key.read(world.layout.key_file("scheduler"))
    own = ServiceClaims(key, "scheduler", CLOCK)
    parts = await wire(PgSchedulerStore(db), PgLaneTables(db), bus, CLOCK, key, own.signed, zone=ZoneInfo("UTC"), scale=SCALE)
    consumer = EventConsumer(bus, db, "scheduler", parts.knowledge.handlers(), snapshot=parts.knowledge.snapshots(), beat_s=SCALE)
    for name, work in {
        "lane": parts.keeper.run(),
        "planner": parts.planner.run(),
        "watch": parts.watch(),
        "events": consumer.run(),
        "relay": Relay(db, bus, "scheduler", beat_s=SCALE).run(),
    }.items():
        task(f"scheduler-{name}", work)
    stack.push_async_callback((await rpc.serve(bus, "scheduler", "1.0.0", parts.scheduler.handlers(), verifier=verified)).close)
    await parts.keeper.listening.wait()
