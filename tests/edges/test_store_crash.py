"""Servers that die: PostgreSQL killed and cut off silently, nats-server killed and its folder wiped. Real processes of each test's own."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from tests.conftest import PgDatabase
from tests.edges.store_world import Probe, emit, opened, running, until

from intertie.bus.nats import NatsBus
from intertie.contracts.base import EventMeta
from intertie.embedded.nats import Nats, running_nats
from intertie.embedded.postgres import Postgres, RolePassword, running_postgres
from intertie.errors import IntertieError, Stale, Unavailable
from intertie.store import EVENTS, Database, EventConsumer, MemoryStore, Relay

PASSWORD = "sixteen-characters"
BEAT_S = 0.2


@pytest.fixture
def own_postgres(short_folder: Path) -> Iterator[Postgres]:
    """A server that this test may kill."""
    with running_postgres(short_folder / "pg", fast=True) as server:
        server.provision([RolePassword("scheduler", PASSWORD)])
        yield server


@pytest.fixture
def own_nats(short_folder: Path) -> Iterator[Nats]:
    with running_nats(short_folder / "bus") as server:
        yield server


@asynccontextmanager
async def killable(server: Postgres) -> AsyncIterator[Database]:
    db = await Database.open(server.url("scheduler"), password=PASSWORD, schema="scheduler")
    try:
        await db.migrate("intertie.store")
        yield db
    finally:
        await db.close()


@asynccontextmanager
async def connected(server: Nats, name: str) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(server.url, name=name)
    try:
        yield bus
    finally:
        await bus.close()


async def answers(db: Database) -> bool:
    try:
        await db.ping(timeout_s=1)
    except Unavailable:
        return False
    return True


async def test_a_killed_database_costs_only_the_calls_of_its_absence(own_postgres: Postgres) -> None:
    """LAB 2: whatever a crash makes of the pool's connections, callers hear Unavailable, and everything that was promised is there."""
    async with killable(own_postgres) as db:
        promised: list[str] = []
        perhaps: list[str] = []
        refused: set[str] = set()
        stop = asyncio.Event()

        async def write(writer: int) -> None:
            number = 0
            while not stop.is_set():
                name = f"w{writer}-{(number := number + 1)}"
                try:
                    await emit(db, name)
                    promised.append(name)
                except IntertieError as err:
                    refused.add(err.code)
                    if err.code == "store.maybe":
                        perhaps.append(name)
                    await asyncio.sleep(0.02)

        writers = [asyncio.create_task(write(n)) for n in range(4)]
        for _ in range(3):
            before = len(promised)
            await until(lambda before=before: len(promised) > before + 20, "writes flow")  # type: ignore[misc]  # bound in the loop
            await asyncio.to_thread(own_postgres.kill)
            with pytest.raises(Unavailable):
                await db.ping(timeout_s=1)
            await asyncio.to_thread(own_postgres.start)
            await until(lambda: answers(db), "answers again")
        stop.set()
        await asyncio.gather(*writers)
        assert refused <= {"store.unavailable", "store.maybe", "store.timeout"}
        async with db.transaction() as tx:
            there = {row["entity"] for row in await tx.all("SELECT entity FROM outbox")}
    assert set(promised) <= there
    assert there <= set(promised) | set(perhaps)


async def test_relay_and_consumer_go_on_over_a_killed_database_and_a_killed_bus(own_postgres: Postgres, own_nats: Nats) -> None:
    async with killable(own_postgres) as db, connected(own_nats, "scheduler") as bus, connected(own_nats, "registry") as other:
        seen: set[str] = set()

        async def note(event: Probe, _meta: EventMeta) -> None:
            seen.add(event.probe)

        relay = Relay(db, bus, "scheduler", beat_s=BEAT_S)
        consumer = EventConsumer(other, MemoryStore("registry"), "registry", {Probe: note}, beat_s=BEAT_S)
        async with running(relay.run()), running(consumer.run()):
            await emit(db, "a")
            await until(lambda: "a" in seen, "a is handled")
            await asyncio.to_thread(own_postgres.kill)
            await asyncio.to_thread(own_postgres.start)
            await until(lambda: answers(db), "answers again")
            await emit(db, "b")
            await until(lambda: "b" in seen, "b is handled", within_s=40)
            await asyncio.to_thread(own_nats.kill)
            await emit(db, "c")
            await asyncio.to_thread(own_nats.start)
            await until(lambda: "c" in seen, "c is handled", within_s=40)


async def stored(bus: NatsBus) -> set[int]:
    """The numbers that can really be read from the stream."""
    with suppress(Unavailable):
        messages = await bus.last_messages(EVENTS.name, "intertie.v1.evt.>")
        return {int(message.headers["intertie-number"]) for message in messages}
    return set()


async def holds(bus: NatsBus, count: int) -> bool:
    with suppress(Unavailable):
        state = await bus.stream_state(EVENTS.name)
        return state is not None and state.messages == count
    return False


class SitedProbe(Probe, frozen=True, kw_only=True):
    """One subject each, so that the last value per subject is every event."""

    @property
    def site_token(self) -> str:
        return self.probe


async def say(db: Database, first: int, last: int) -> None:
    async with db.transaction() as tx:
        for number in range(first, last + 1):
            await tx.emit(SitedProbe(probe=f"p{number}", version=1))


async def test_a_folder_wiped_under_the_live_server_is_made_good(pg: PgDatabase, own_nats: Nats) -> None:
    """BR-126, LINK D20: the server goes on acknowledging what it does not store and says so only after its restart; then everything is there again,
    what was acknowledged into the void included."""
    async with opened(pg) as db, connected(own_nats, "scheduler") as bus:
        relay = Relay(db, bus, "scheduler", beat_s=BEAT_S)
        async with running(relay.run()):
            await say(db, 1, 60)
            await until(lambda: holds(bus, 60), "the stream holds all")
            shutil.rmtree(own_nats.jetstream_folder)
            await say(db, 61, 90)
            await until(lambda: relay.published >= 61, "something was acknowledged after the wipe, or the wipe was noticed", within_s=60)
            await asyncio.to_thread(own_nats.kill)
            await asyncio.to_thread(own_nats.start)
            await until(lambda: holds(bus, 90), "the stream is whole again", within_s=60)
            assert await stored(bus) == set(range(1, 91))
            await say(db, 91, 95)
            await until(lambda: holds(bus, 95), "and goes on")
        assert relay.refills >= 1


async def test_a_server_that_comes_back_with_an_empty_folder_is_filled_and_consumers_go_on(pg: PgDatabase, own_nats: Nats) -> None:
    """BR-126, BR-129: the stream gone whole, all of it again from the outbox, nothing applied twice."""
    async with opened(pg) as db, connected(own_nats, "scheduler") as bus, connected(own_nats, "registry") as other:
        inbox, applied = MemoryStore("registry"), list[str]()

        async def apply(event: SitedProbe, meta: EventMeta) -> None:
            async with inbox.transaction() as tx:
                if await tx.first_time(meta):
                    applied.append(event.probe)

        relay = Relay(db, bus, "scheduler", beat_s=BEAT_S)
        consumer = EventConsumer(other, inbox, "registry", {SitedProbe: apply}, beat_s=BEAT_S)
        async with running(relay.run()), running(consumer.run()):
            await say(db, 1, 40)
            await until(lambda: len(applied) == 40, "all applied")
            await asyncio.to_thread(own_nats.kill)
            shutil.rmtree(own_nats.jetstream_folder)
            await say(db, 41, 50)
            await asyncio.to_thread(own_nats.start)
            await until(lambda: len(applied) == 50, "the new ones applied, the old ones once", within_s=60)
            await until(lambda: holds(bus, 50), "the stream is whole again", within_s=60)
        assert sorted(applied) == sorted(f"p{number}" for number in range(1, 51))


class SilentProxy:
    """Carries bytes to PostgreSQL until it is told to keep silent: sockets stay open, nothing comes, as behind a pulled cable."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._talks = asyncio.Event()
        self._talks.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    def silence(self) -> None:
        self._talks.clear()

    def talk(self) -> None:
        self._talks.set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(OSError, asyncio.CancelledError):
            onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                await asyncio.gather(self._carry(reader, onward_writer), self._carry(onward_reader, writer))
            finally:
                onward_writer.close()
                writer.close()

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            await self._talks.wait()
            target.write(data)
            await target.drain()
        target.close()


async def test_a_silently_cut_link_ends_every_call_and_the_office_in_time_and_heals(own_postgres: Postgres) -> None:
    """LAB 2 (b): asyncpg's own timeouts wait for ever here."""
    proxy = SilentProxy(own_postgres.port)
    async with proxy.serving():
        url = own_postgres.url("scheduler").replace(f":{own_postgres.port}/", f":{proxy.port}/")
        db = await Database.open(url, password=PASSWORD, schema="scheduler")
        try:
            await db.migrate("intertie.store")
            with pytest.raises(Stale, match=r"store\.not_leader"):
                async with asyncio.timeout(30), db.leading("planner"):
                    proxy.silence()
                    for _ in range(3):
                        async with asyncio.timeout(10):
                            with pytest.raises(Unavailable):
                                await db.ping(timeout_s=0.3)
                    await asyncio.Event().wait()
            async with asyncio.timeout(10):
                with pytest.raises(Unavailable, match=r"store\.(unavailable|timeout)"):
                    async with db.transaction(timeout_s=0.5) as tx:
                        await tx.one("SELECT 1 AS one")
            proxy.talk()
            await until(lambda: answers(db), "answers again")
            async with asyncio.timeout(30), db.leading("planner") as leader:
                assert leader.number == 2
        finally:
            proxy.talk()
            await db.close()
