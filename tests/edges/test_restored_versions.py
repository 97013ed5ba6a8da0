"""A keeper whose database is an older copy of itself tells what happens from then on above every version that it told before: whoever listens takes only
higher ones. Every keeper but the scheduler (`test_scheduler_store.py`), on PostgreSQL and on the twins."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar

import msgspec
import pytest
from tests.conftest import TESTER, PgDatabase, PgServer
from tests.core.metering_world import TENANT, ended, record, segment, spec
from tests.edges import test_identity_store as at_identity
from tests.edges import test_incident_store as at_incident
from tests.edges import test_registry_drills as at_drills
from tests.edges import test_registry_store as at_registry
from tests.edges.metering_edge import OPERATOR, Edge, claims
from tests.edges.test_identity_anchors import HEAD, KEY

from intertie.clock import ManualClock
from intertie.contracts.audit import AnchorAudit
from intertie.contracts.base import Empty, Event
from intertie.contracts.drill import CallOffDrill, DrillChanged, DrillsQuery, DrillState
from intertie.contracts.identity import CreateTenant, MapAccount, Role, TenantChanged
from intertie.contracts.incident import IncidentChanged, IncidentsQuery
from intertie.contracts.link import SiteCondition
from intertie.contracts.site import CordonPool, PoolChanged, SiteChanged, SitesQuery
from intertie.contracts.usage import SetAllowance
from intertie.identity.anchors import Anchors, MemoryAnchors, PgAnchors
from intertie.identity.memory import MemoryIdentityStore
from intertie.identity.pg import PgIdentityStore
from intertie.identity.store import IdentityStore
from intertie.ids import SiteName, TenantName
from intertie.incident.memory import MemoryIncidentStore
from intertie.incident.pg import PgIncidentStore
from intertie.incident.store import IncidentStore
from intertie.lane.memory import MemoryLaneTables
from intertie.lane.pg import PgLaneTables
from intertie.metering.memory import MemoryMetering
from intertie.metering.pg import PgMetering
from intertie.registry.drill_store import DrillStore, MemoryDrills, PgDrills
from intertie.registry.memory import MemoryRegistryStore
from intertie.registry.pg import PgRegistryStore
from intertie.registry.store import RegistryStore
from intertie.store import Database, MemoryStore, first_version, newer
from intertie.store import epoch as epochs
from intertie.trust.keys import Key

T0 = datetime(2026, 5, 1, 12, tzinfo=UTC)
EPOCH = 42_000_000
SITE_KEY = Key.new("U")

Versions = dict[tuple[str, str], int]
"""(type, entity) → version."""


class Keeper(ABC):
    """A keeper's verbs on one store, as its process is wired in `epoch`."""

    service: ClassVar[str]

    @abstractmethod
    async def start(self, epoch: int) -> None:
        """What its process does first: lift what is there."""

    @abstractmethod
    async def begin(self) -> None:
        """What the copy has."""

    @abstractmethod
    async def change(self, nth: int) -> None:
        """Something of every entity, and what is made after the copy if it is not there; `nth` tells the changes apart."""

    async def snapshot(self) -> list[Event]:
        """What it answers to those who are behind, as events."""
        return []


class RegistryKeeper(Keeper):
    service = "registry"

    def __init__(self, store: RegistryStore, drills: DrillStore) -> None:
        self.store, self.kept, self.clock = store, drills, ManualClock(T0)

    async def start(self, epoch: int) -> None:
        await self.store.lift_versions(first_version(epoch))
        await self.kept.lift_versions(first_version(epoch))

    async def begin(self) -> None:
        hub = await at_drills.a_hub(self.store, self.kept, self.clock)
        await hub.allow()
        await hub.plan()

    async def change(self, nth: int) -> None:
        site, at = at_registry.SITE, T0 + timedelta(minutes=nth)
        hub = await at_drills.a_hub(self.store, self.kept, self.clock)
        await self.store.said_of_itself(
            site, SiteCondition(seq=nth, at=at, accepting=False, code=f"c{nth}"), now=at, mark=at_registry.unmarked
        )
        await self.store.cordon(CordonPool(site=site, pool=None, on=True, reason=f"reason {nth}"), actor="ops", now=at)
        await self.store.register(
            msgspec.structs.replace(at_registry.REQUEST, site=SiteName("site-late"), title=f"{nth}"), actor="ops", now=at
        )
        for drill in (await hub.drills.drills(DrillsQuery(), at_drills.OPERATOR)).drills:
            if drill.state is DrillState.PLANNED:
                await hub.drills.call_off(CallOffDrill(drill=drill.drill), at_drills.OPERATOR)

    async def snapshot(self) -> list[Event]:
        sites, pools = await self.store.sites(SitesQuery())
        async with self.kept.drills(read_only=True) as rows:
            drills = await rows.find(None, 10)
        return [
            *(SiteChanged(version=one.version, record=one, cause="") for one in sites),
            *(PoolChanged(version=one.version, record=one) for one in pools),
            *(DrillChanged(version=one.version, record=one) for one in drills),
        ]


class IdentityKeeper(Keeper):
    service = "identity"

    def __init__(self, store: IdentityStore, under: Database | MemoryStore) -> None:
        self.store, self.under = store, under
        self.anchored = MemoryAnchors(under) if isinstance(under, MemoryStore) else None

    async def start(self, epoch: int) -> None:
        await self.store.lift_versions(first_version(epoch))
        if isinstance(self.under, MemoryStore):
            kept = self.anchored.kept if self.anchored else {}
            self.anchored = MemoryAnchors(self.under, first_version=first_version(epoch))
            self.anchored.kept = kept
            self.anchors = Anchors(self.anchored, KEY, ManualClock(T0))
        else:
            self.anchors = Anchors(PgAnchors(self.under, first_version=first_version(epoch)), KEY, ManualClock(T0))

    async def begin(self) -> None:
        await at_identity.team(self.store)
        await at_identity.joined(self.store, single_user=False)
        await self._said(1, "begun")

    async def change(self, nth: int) -> None:
        await self._said(10 * nth, f"user{nth}")
        await at_identity.joined(self.store, single_user=False, site_key=f"U-{nth}", signing_key=f"A-{nth}")
        await self.store.create_tenant(CreateTenant(tenant=TenantName("late"), title="Late"), actor="ops", now=T0)

    async def _said(self, number: int, account: str) -> None:
        await self.store.map_account(MapAccount(tenant=at_identity.TEAM, site=at_identity.SITE, account=account), actor="ops")
        head = msgspec.structs.replace(HEAD, number=number, at=HEAD.at + timedelta(seconds=number))
        scheduler = claims(Role.SERVICE)
        caller = msgspec.structs.replace(scheduler.claims, iss="scheduler")
        await self.anchors.anchor(AnchorAudit(head=head), type(scheduler)(caller, ""))

    async def snapshot(self) -> list[Event]:
        reply = await self.store.snapshot()
        return [*reply.tenants, *reply.mappings, *reply.site_keys]


class IncidentKeeper(Keeper):
    service = "incident"

    def __init__(self, store: IncidentStore) -> None:
        self.store = store

    async def start(self, epoch: int) -> None:
        await self.store.lift_versions(first_version(epoch))

    async def begin(self) -> None:
        await self.store.fold(at_incident.report(), now=T0, actor="ops")

    async def change(self, nth: int) -> None:
        for key in ("lane.forked/site-a", "lane.forked/late"):
            await self.store.fold(at_incident.report(key), now=T0 + timedelta(minutes=nth), actor="ops")

    async def snapshot(self) -> list[Event]:
        return [IncidentChanged(version=one.version, record=one) for one in await self.store.find(IncidentsQuery(), at_incident.ALL)]


class MeteringKeeper(Keeper):
    service = "metering"

    def __init__(self, store: PgMetering | MemoryMetering) -> None:
        lanes = MemoryLaneTables(store) if isinstance(store, MemoryMetering) else PgLaneTables(store.db)
        self.store, self.edge = store, Edge(store, lanes, key=SITE_KEY)

    async def start(self, epoch: int) -> None:
        await self.store.lift_versions(first_version(epoch))

    async def begin(self) -> None:
        await self.edge.know_site()
        await self.edge.agree()
        await self.edge.service.set_allowance(SetAllowance(tenant=TENANT, amount=Decimal(1)), OPERATOR)

    async def change(self, nth: int) -> None:
        await self.edge.agree(spec(title=f"standard {nth}"))
        for tenant in (TENANT, TenantName("late")):
            await self.edge.service.set_allowance(SetAllowance(tenant=tenant, amount=Decimal(nth)), OPERATOR)
        (*_, agreed) = await self.store.specs()
        offered = record(1, spec=agreed.spec, spec_revision=1)
        run = segment(offered, 0, 6, last=True)
        await self.edge.tell(offered)
        await self.edge.send(run, offered)
        await self.edge.tell(ended(msgspec.structs.replace(offered, state="running", started_at=T0, version=2), [run]))

    async def snapshot(self) -> list[Event]:
        reply = await self.edge.service.snapshot(Empty(), claims(Role.SERVICE))
        return [*reply.specs, *reply.allowances]


KEEPERS: Mapping[str, type[Keeper]] = {kind.service: kind for kind in (RegistryKeeper, IdentityKeeper, IncidentKeeper, MeteringKeeper)}


class Life(ABC):
    """One keeper and its store, of which a copy can be taken and put back."""

    keeper: Keeper

    @abstractmethod
    async def copy(self) -> None: ...

    @abstractmethod
    async def put_back(self) -> None:
        """The copy stands in the store's place, in a raised epoch; the keeper is not started yet."""

    @abstractmethod
    async def told(self) -> list[tuple[str, str, int]]:
        """(type, entity, version) of every event, in order."""

    @abstractmethod
    async def fault(self) -> None: ...


class PgLife(Life):
    def __init__(self, service: str, pg: PgDatabase, server: PgServer, held: AsyncExitStack) -> None:
        self.service, self.pg, self.server, self.held, self.name = service, pg, server.server, held, pg.name

    async def open(self) -> None:
        self.db = await Database.open(self.server.url(TESTER, self.name), password=self.pg.password, schema=self.service)
        self.held.push_async_callback(self.db.close)
        await self.db.migrate(f"intertie.{self.service}")
        match self.service:
            case "registry":
                store = PgRegistryStore(self.db)
                self.keeper = RegistryKeeper(store, PgDrills(store))
            case "identity":
                self.keeper = IdentityKeeper(PgIdentityStore(self.db), self.db)
            case "incident":
                self.keeper = IncidentKeeper(PgIncidentStore(self.db))
            case _:
                self.keeper = MeteringKeeper(PgMetering(self.db))

    async def copy(self) -> None:
        epoch = await self.db.epoch()
        await self.db.close()
        image = f"{self.pg.name}_copy"
        await asyncio.to_thread(self.server.query, f"CREATE DATABASE {image} TEMPLATE {self.pg.name} OWNER {TESTER}")
        self.held.callback(self.server.query, f"DROP DATABASE {image} WITH (FORCE)")
        await self.open()
        await self.keeper.start(epoch)

    async def put_back(self) -> None:
        await self.db.close()
        self.name = f"{self.pg.name}_copy"
        await self.open()
        async with self.db.transaction() as tx:
            await epochs.raise_to(tx, EPOCH, reason="restored", actor="ops", service=self.service, at=T0)

    async def told(self) -> list[tuple[str, str, int]]:
        async with self.db.transaction() as tx:
            return [(row["type"], row["entity"], row["version"]) for row in await tx.all("SELECT * FROM outbox ORDER BY id")]

    async def fault(self) -> None:
        async with self.db.transaction() as tx:
            await tx.fault(at_incident.report())


def kept(thing: Any) -> Any:
    """A copy of the containers alone: what a twin holds is immutable."""
    match thing:
        case dict():
            return {key: kept(value) for key, value in thing.items()}
        case list():
            return [kept(value) for value in thing]
        case set():
            return set(thing)
    return thing


class MemoryLife(Life):
    def __init__(self, service: str) -> None:
        self.image: list[dict[str, Any]] = []
        match service:
            case "registry":
                registry = MemoryRegistryStore()
                drills = MemoryDrills(registry)
                self.keeper, self.memory, self.parts = RegistryKeeper(registry, drills), registry.memory, [registry.memory, drills]
            case "identity":
                identity = MemoryIdentityStore()
                self.keeper, self.memory, self.parts = IdentityKeeper(identity, identity.memory), identity.memory, [identity.memory]
            case "incident":
                incidents = MemoryIncidentStore()
                self.keeper, self.memory, self.parts = IncidentKeeper(incidents), incidents, [incidents]
            case _:
                metering = MemoryMetering()
                self.keeper, self.memory, self.parts = MeteringKeeper(metering), metering, [metering]

    memory: MemoryStore
    parts: list[Any]

    def _held(self) -> list[Any]:
        anchored = [self.keeper.anchored] if isinstance(self.keeper, IdentityKeeper) else []
        return [*self.parts, *anchored]

    async def copy(self) -> None:
        self.image = [{name: kept(value) for name, value in vars(part).items() if not name.startswith("_")} for part in self._held()]

    async def put_back(self) -> None:
        for part, image in zip(self._held(), self.image, strict=True):
            vars(part).update(image)
        if isinstance(self.keeper, MeteringKeeper):
            self.keeper = MeteringKeeper(self.keeper.store)
        self.memory.raise_epoch(EPOCH)

    async def told(self) -> list[tuple[str, str, int]]:
        return [(event.TYPE, event.entity, event.version) for event in self.memory.events]

    async def fault(self) -> None:
        async with self.memory.transaction() as tx:
            await tx.fault(at_incident.report())


@pytest.fixture(params=["pg", "memory"])
async def life(request: pytest.FixtureRequest, service: str) -> AsyncIterator[Life]:
    if request.param == "memory":
        yield MemoryLife(service)
        return
    pg: PgDatabase = request.getfixturevalue("pg")
    async with AsyncExitStack() as held:
        made = PgLife(service, pg, request.getfixturevalue("postgres_server"), held)
        await made.open()
        yield made


def highest(told: list[tuple[str, str, int]]) -> Versions:
    found: Versions = {}
    for kind, entity, version in told:
        found[kind, entity] = max(found.get((kind, entity), 0), version)
    return found


def versions(events: list[Event]) -> Versions:
    return highest([(event.TYPE, event.entity, event.version) for event in events])


@pytest.mark.parametrize("service", KEEPERS)
async def test_what_a_restored_keeper_tells_is_taken_by_all_who_heard_what_it_forgot(life: Life) -> None:
    await life.keeper.start(1)
    await life.keeper.begin()
    assert 1 <= min(versions(await life.keeper.snapshot()).values()) <= max(versions(await life.keeper.snapshot()).values()) < 10
    await life.copy()
    for nth in (1, 2):
        await life.keeper.change(nth)
        await life.fault()
    heard = highest(await life.told())

    await life.put_back()
    begun = len(await life.told())
    await life.keeper.start(EPOCH)
    assert len(await life.told()) == begun, "a lift is no news"
    told = await life.keeper.snapshot()
    assert told and all(newer(heard.get((event.TYPE, event.entity)), event) for event in told)
    listener = heard | versions(told)

    await life.keeper.change(3)
    await life.fault()
    after = (await life.told())[begun:]
    silent = set(heard) - set(highest(after))
    assert len(silent) <= 1 and {kind for kind, _ in silent} <= {TenantChanged.TYPE, IncidentChanged.TYPE}, (
        "a tenant never changes, and an incident that was forgotten is opened under another id"
    )
    for kind, entity, version in after:
        assert version > listener.get((kind, entity), 0), f"{kind} of {entity}"
        listener[kind, entity] = version

    stands = versions(await life.keeper.snapshot())
    await life.keeper.start(EPOCH)
    assert versions(await life.keeper.snapshot()) == stands, "what was lifted, or begun in this epoch, is not lifted again"
