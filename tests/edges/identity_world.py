"""A hub of three services on a real bus in operator mode and a real PostgreSQL, and sites that join it. Services run as tasks of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.conftest import PgDatabase

from intertie.bus import rpc
from intertie.bus.nats import NatsBus
from intertie.clock import SystemClock
from intertie.contracts import endpoints
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.identity import (
    AuthenticateSite,
    Claims,
    CreateTenant,
    InviteSite,
    Joined,
    JoinSite,
    Role,
)
from intertie.contracts.incident import FaultReported, IncidentRecord, IncidentsQuery
from intertie.contracts.link import Inventory, Lane, ProfileDeclared
from intertie.contracts.site import Freshness, Lendable, PoolChanged, PoolProfile, SiteChanged, SiteKind, SiteRecord, SitesQuery, TaskType
from intertie.embedded.hub import HubLayout
from intertie.errors import Unavailable
from intertie.identity.accounts import AccountPusher, Signer
from intertie.identity.pg import PgIdentityStore
from intertie.identity.service import Addresses, Identity
from intertie.ids import PoolName, PrincipalId, SessionId, SiteName, TenantName
from intertie.incident.pg import PgIncidentStore
from intertie.incident.service import Incidents
from intertie.lane.pg import PgLaneTables
from intertie.lane.site import SiteLane
from intertie.link.memory import MemoryJournal
from intertie.link.site import Pace
from intertie.registry.call_offerings import CallOfferings, PgOfferings
from intertie.registry.core.freshness import Limits
from intertie.registry.drills import site_key_of
from intertie.registry.observed import PgProofs, Proofs
from intertie.registry.pg import PgRegistryStore
from intertie.registry.service import Registry
from intertie.store import Database, EventConsumer, Relay
from intertie.trust.claims import ServiceClaims, read_keyset, sign_claims, verify_claims
from intertie.trust.keys import Key
from intertie.trust.login import SiteLogin

CLOCK = SystemClock()
TEAM = TenantName("team-a")
# A twentieth of the real beats: a site is stale after 0.75 s and unknown after 3 s. A busy machine may be slow: nothing here is judged by time.
BEAT_SCALE = 0.05
LIMITS = Limits().scaled(BEAT_SCALE)
PACE = Pace(beat_s=0.15, idle_s=0.15, retry_s=0.05, busy_s=0.02, silent_after_s=1.0)
DEADLINE_S = 30.0

POOL = PoolProfile(
    pool=PoolName("slots"),
    accelerator="none",
    count=2,
    memory_mib=4_096,
    interconnect="none",
    task_types=[TaskType.BATCH],
    lendable=Lendable(devices=2),
)


async def until(question: Callable[[], Awaitable[object]], what: str) -> None:
    """Ask until the answer is true; while nobody answers it is not. AssertionError with `what` after a generous while."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                with suppress(Unavailable):
                    if await question():
                        return
                await asyncio.sleep(0.03)
    except TimeoutError:
        raise AssertionError(f"not within {DEADLINE_S:g} s: {what}") from None


@dataclass
class Site:
    """A site's own half: its keys, what join answered, its journal."""

    name: SiteName
    key: Key = field(default_factory=lambda: Key.new("U"))
    signing: Key = field(default_factory=lambda: Key.new("A"))
    joined: Joined | None = None
    journal: MemoryJournal = field(default_factory=MemoryJournal.new)
    bus: NatsBus | None = None
    lane: SiteLane | None = None

    def request(self, token: str) -> JoinSite:
        return JoinSite(
            token=token,
            site_key=self.key.public,
            signing_key=self.signing.public,
            single_user=True,
            agent_version="1.0",
            pools=[POOL],
        )

    async def declares(self, profile: PoolProfile) -> None:
        await self.journal.append(lambda seqs: {Lane.REGISTRY: [ProfileDeclared(seq=seqs[Lane.REGISTRY], at=CLOCK.now(), profile=profile)]})
        if self.lane is not None:
            self.lane.wake()

    async def reports(self, inventory: Callable[[int], Inventory]) -> None:
        await self.journal.append(lambda seqs: {Lane.REGISTRY: [inventory(seqs[Lane.REGISTRY])]})
        if self.lane is not None:
            self.lane.wake()


@dataclass
class World:
    """The running hub."""

    layout: HubLayout
    identity: Identity
    registry: Registry
    incidents: Incidents
    pusher: AccountPusher
    gateway: NatsBus
    keyset: dict[str, str]
    stack: AsyncExitStack

    def as_operator(self) -> str:
        """Claims as identity signs them for a person who is operator."""
        now = int(CLOCK.now().timestamp())
        claims = Claims(iss="identity", sub=PrincipalId("ops"), name="ops", roles=[Role.OPERATOR], iat=now, exp=now + 300)
        return sign_claims(Key.read(self.layout.key_file("identity")), claims)

    async def call(self, endpoint: Endpoint[Any, Any], request: Any, *, signed: str | None = None) -> Any:
        """A call as the gateway makes it, with an operator's claims unless others are given."""
        return await rpc.call(self.gateway, endpoint, request, claims=self.as_operator() if signed is None else signed, timeout_s=5)

    async def invite(self, site: SiteName) -> str:
        await self.call(endpoints.CREATE_TENANT, CreateTenant(tenant=TEAM))
        request = InviteSite(site=site, kind=SiteKind.MACHINES, owner="ann", owner_tenant=TEAM)
        token: str = (await self.call(endpoints.INVITE_SITE, request)).token
        return token

    async def join(self, site: Site) -> Joined:
        site.joined = await self.call(endpoints.JOIN, site.request(await self.invite(site.name)), signed="")
        assert site.joined is not None
        return site.joined

    async def connect(self, site: Site, *, wait: bool = True) -> NatsBus:
        """The site's connection, with credentials that it mints for itself."""
        assert site.joined is not None, "join first"
        login = SiteLogin(site.signing, site.joined.account, CLOCK)
        site.bus = await NatsBus.connect(site.joined.bus_urls, name=site.name, credentials=login, wait=wait)
        self.stack.push_async_callback(site.bus.close)
        return site.bus

    async def speak(self, site: Site) -> asyncio.Task[None]:
        """Run the site's registry lane; cancel the task to make the site silent."""
        bus = site.bus or await self.connect(site)
        site.lane = SiteLane(bus, Lane.REGISTRY, site.journal, CLOCK, site=site.name, session=SessionId(f"ses-{id(site)}"), pace=PACE)
        task = asyncio.create_task(site.lane.run(), name=f"lane-{site.name}")
        self.stack.push_async_callback(stopped, task)
        return task

    async def record(self, site: SiteName) -> SiteRecord | None:
        reply = await self.call(endpoints.SITES, SitesQuery(site=site))
        return reply.sites[0] if reply.sites else None

    async def is_(self, site: SiteName, freshness: Freshness) -> bool:
        record = await self.record(site)
        return record is not None and record.freshness is freshness

    async def open_incidents(self, site: SiteName) -> list[IncidentRecord]:
        found: list[IncidentRecord] = (await self.call(endpoints.INCIDENTS, IncidentsQuery(site=site))).incidents
        return found

    async def prove(self, site: Site, signed: str) -> Claims:
        reply = await self.call(endpoints.AUTHENTICATE_SITE, AuthenticateSite(signed=signed), signed="")
        return verify_claims(reply.signed, self.keyset, CLOCK.now())


async def stopped(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def running_world(layout: HubLayout, pg: PgDatabase) -> AsyncIterator[World]:
    """Identity, registry and incident, each with its own database role and bus credentials, on a bus that runs already."""
    keyset = read_keyset(layout.public_keys)
    async with AsyncExitStack() as stack:

        async def database(service: str) -> Database:
            url, password = pg.role(service)
            db = await Database.open(url, password=password, schema=service, connections=4)
            stack.push_async_callback(db.close)
            await db.migrate(f"intertie.{service}")
            return db

        async def bus(name: str) -> NatsBus:
            found = await NatsBus.connect(layout.bus_url, name=name, credentials=layout.creds_file(name))
            stack.push_async_callback(found.close)
            return found

        def task(name: str, work: Coroutine[Any, Any, Any]) -> None:
            stack.push_async_callback(stopped, asyncio.create_task(work, name=name))

        def verified(text: str) -> Claims:
            return verify_claims(text, keyset, CLOCK.now())

        # identity
        db, hub_bus = await database("identity"), await bus("identity")
        signer = Signer(Key.read(layout.key_file("operator")), Key.read(layout.key_file("hub")).public, CLOCK)
        store = PgIdentityStore(db)
        pusher = AccountPusher(await bus("system"), store, signer, CLOCK, accounts_file=layout.nats / "preload.conf", beat_scale=BEAT_SCALE)
        identity = Identity(
            store,
            hub_bus,
            Key.read(layout.key_file("identity")),
            signer,
            pusher,
            CLOCK,
            keyset=keyset,
            addresses=Addresses([layout.bus_url], layout.public_url),
        )
        task("accounts", pusher.run())
        task("identity-relay", Relay(db, hub_bus, "identity", beat_s=0.2).run())
        serving = await rpc.serve(hub_bus, "identity", "1.0.0", identity.handlers(), verifier=verified)
        stack.push_async_callback(serving.close)

        # registry
        db, hub_bus = await database("registry"), await bus("registry")
        sites = PgRegistryStore(db)
        registry = Registry(sites, PgLaneTables(db), hub_bus, CLOCK, limits=LIMITS, beat_scale=BEAT_SCALE)
        registry.call_offerings = CallOfferings(PgOfferings(sites))
        asks = ServiceClaims(Key.read(layout.key_file("registry")), "registry", CLOCK)
        registry.proofs = Proofs(
            PgProofs(sites), sites, CLOCK, site_key=partial(site_key_of, hub_bus, asks.signed), max_age_days=0, beat_s=BEAT_SCALE
        )
        task("registry-proofs", registry.proofs.run())
        task("registry-lane", registry.keeper.run())
        task("registry-silence", registry.judge_for_ever())
        task("registry-relay", Relay(db, hub_bus, "registry", beat_s=0.2).run())
        serving = await rpc.serve(hub_bus, "registry", "1.0.0", registry.handlers(), verifier=verified)
        stack.push_async_callback(serving.close)
        await registry.keeper.listening.wait()

        # incident
        db, hub_bus = await database("incident"), await bus("incident")
        incidents = Incidents(PgIncidentStore(db), CLOCK)
        own = ServiceClaims(Key.read(layout.key_file("incident")), "incident", CLOCK)

        async def learn() -> None:
            await incidents.learn_sites(hub_bus, own.signed())

        consumer = EventConsumer(
            hub_bus,
            db,
            "incident",
            {SiteChanged: incidents.on_site, PoolChanged: incidents.on_pool, FaultReported: incidents.on_fault},
            snapshot={"registry": learn},
            beat_s=0.2,
        )
        task("incident-events", consumer.run())
        serving = await rpc.serve(hub_bus, "incident", "1.0.0", incidents.handlers(), verifier=verified)
        stack.push_async_callback(serving.close)

        gateway = await bus("gateway")
        yield World(layout, identity, registry, incidents, pusher, gateway, keyset, stack)
