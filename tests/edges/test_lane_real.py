"""Lanes over a real nats-server (operator mode, one account per site) and a real PostgreSQL, and what kills of either cost: a wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
from tests.conftest import PgDatabase
from tests.edges.conftest import RunningHub, new_hub
from tests.edges.lane_world import CLOCK, LANE, POISON, Service, Site, joined, kept, stop, until
from tests.edges.store_world import opened

from intertie.agent.journal import SqliteJournal
from intertie.bus.nats import NatsBus
from intertie.contracts.base import decode
from intertie.contracts.incident import FaultReported
from intertie.contracts.link import Clocks, LaneState, Sync, Synced, sync_subject
from intertie.embedded.hub import running_hub_bus
from intertie.embedded.postgres import RolePassword, running_postgres
from intertie.ids import JournalId, SessionId, SiteName
from intertie.lane.pg import PgLaneTables
from intertie.link.journal import first_digest
from intertie.link.keeper import SiteRow
from intertie.store import Database, StoreTx, Tx
from intertie.trust import nats_jwt
from intertie.trust.keys import Key
from intertie.trust.login import FileLogin, SiteLogin


async def new_site(hub: RunningHub, name: SiteName) -> SiteLogin:
    """A site's account, pushed to the running server as identity does."""
    account, signing = Key.new("A"), Key.new("A")
    jwt = nats_jwt.site_account(hub.key("operator"), name, account.public, hub.key("hub").public, [signing.public], CLOCK.now())
    system = await hub.connect("system")
    try:
        pushed = json.loads((await system.request("$SYS.REQ.CLAIMS.UPDATE", jwt.encode(), timeout=5)).data)
        assert pushed["data"]["code"] == 200, pushed
    finally:
        await system.close()
    return SiteLogin(signing, account.public, CLOCK)


@asynccontextmanager
async def hub_bus(hub: RunningHub) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(hub.layout.bus_url, name="scheduler", credentials=FileLogin(hub.layout.creds_file("scheduler")))
    try:
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def site_buses(hub: RunningHub, *names: SiteName) -> AsyncIterator[list[NatsBus]]:
    async with AsyncExitStack() as stack:
        found = list[NatsBus]()
        for name in names:
            found.append(await NatsBus.connect(hub.layout.bus_url, name=f"agent-{name}", credentials=await new_site(hub, name)))
            stack.push_async_callback(found[-1].close)
        yield found


async def stored(db: Database, site: SiteName) -> list[int]:
    async with db.transaction() as tx:
        return [row["seq"] for row in await tx.all("SELECT seq FROM lane_entry WHERE site = $1 ORDER BY seq", site)]


async def test_a_backlog_of_a_thousand_entries_and_an_instruction_cross_account_borders(
    operator_hub: RunningHub, pg: PgDatabase, unique: str
) -> None:
    name = SiteName(f"site-{unique}")
    async with opened(pg) as db, hub_bus(operator_hub) as hub, site_buses(operator_hub, name) as [link]:
        service = Service(PgLaneTables(db), db)
        service.open[name] = [stop(1)]
        site = Site(link, name)
        await site.write(*range(1000, 2000), padding=1_000)
        async with kept(hub, service) as keeper, joined(site):
            await site.lane.flush(30)
            await until(lambda: len(service.said.get(name, [])) == 1_000, "all interpreted")
            assert service.said[name] == list(range(1000, 2000))
            assert site.taken == [stop(1)]
            assert await stored(db, name) == list(range(1, 1001))
            before = len(site.exchanges)
            await keeper.nudge(name)
            await until(lambda: len(site.exchanges) > before, "the nudge arrives")


async def test_one_sites_poison_and_slowness_stay_its_own(operator_hub: RunningHub, pg: PgDatabase, unique: str) -> None:
    one, other = SiteName(f"site-{unique}a"), SiteName(f"site-{unique}b")
    async with opened(pg) as db, hub_bus(operator_hub) as hub, site_buses(operator_hub, one, other) as links:
        service = Service(PgLaneTables(db), db)
        first, second = Site(links[0], one), Site(links[1], other)
        async with kept(hub, service), joined(first, second):
            await first.write(1, POISON, 3)
            await second.write(4, 5)
            await first.lane.flush(10)
            await second.lane.flush(10)
            await until(lambda: service.said == {one: [1, 3], other: [4, 5]}, "all but the poison")
        async with db.transaction() as tx:
            aside = await tx.all("SELECT site, seq, error FROM quarantine")
            told = [decode(row["body"], FaultReported) for row in await tx.all("SELECT body FROM outbox")]
        assert [(row["site"], row["seq"]) for row in aside] == [(one, 2)]
        assert [event.report.key for event in told] == [f"lane.quarantine/{one}/scheduler"]


async def test_syncs_that_wait_are_one_transaction_also_empty_ones(nats_url: str, pg: PgDatabase, unique: str) -> None:
    """LINK D29; rows that one transaction wrote carry one number."""
    names = [SiteName(f"site-{unique}-{n}") for n in range(60)]
    async with opened(pg) as db:
        hub, site = await NatsBus.connect(nats_url, name="hub"), await NatsBus.connect(nats_url, name="sites")
        try:
            async with kept(hub, Service(PgLaneTables(db), db)):
                answers = await asyncio.gather(*(_ask(site, _idle(name)) for name in names))
        finally:
            await hub.close()
            await site.close()
        assert {answer.state for answer in answers} == {LaneState.OK}
        async with db.transaction() as tx:
            row = await tx.one("SELECT count(*) AS heard, count(DISTINCT xmin::text) AS commits FROM lane_site WHERE heard = 1")
        assert row is not None and row["heard"] == 60
        assert row["commits"] <= 20, "far fewer transactions than syncs"


async def test_two_copies_of_a_keeper_interpret_each_entry_once_and_in_order(operator_hub: RunningHub, pg: PgDatabase, unique: str) -> None:
    name = SiteName(f"site-{unique}")
    async with (
        opened(pg) as db,
        hub_bus(operator_hub) as one,
        hub_bus(operator_hub) as two,
        site_buses(operator_hub, name) as [link],
    ):
        service = Service(PgLaneTables(db), db)
        site = Site(link, name)
        async with kept(one, service), kept(two, service), joined(site):
            for start in range(1000, 1300, 10):
                await site.write(*range(start, start + 10))
            await site.lane.flush(30)
            await until(lambda: len(service.said.get(name, [])) == 300, "all interpreted", within_s=30)
    assert service.said[name] == list(range(1000, 1300))


async def test_an_answer_lost_after_the_commit_costs_a_repeat(short_folder: Path, pg: PgDatabase) -> None:
    """nats-server is killed between the keeper's commit and its answer: the entries are there, and stay once."""
    layout, name = new_hub(short_folder), SiteName("site-a")
    with running_hub_bus(layout) as server:
        hub_and_bus = RunningHub(layout, server)
        async with opened(pg) as db, hub_bus(hub_and_bus) as hub, site_buses(hub_and_bus, name) as [link]:
            service = Service(PgLaneTables(db), db)
            site = Site(link, name)
            killed = asyncio.Event()

            async def kill(rows: Sequence[SiteRow]) -> None:
                if rows[0].ack_through == 2 and not killed.is_set():
                    server.kill()
                    killed.set()

            service.on_heard = kill  # type: ignore[method-assign]  # the moment after the commit
            async with kept(hub, service), joined(site):
                await site.write(1, 2)
                await asyncio.wait_for(killed.wait(), 20)
                assert await stored(db, name) == [1, 2]
                assert await site.marks() == (0, 0), "the site does not know"
                server.start()
                await site.write(3)
                await site.lane.flush(30)
                assert await site.marks() == (3, 3)
            assert await stored(db, name) == [1, 2, 3]
            assert service.said == {name: [1, 2, 3]}


async def test_kills_of_postgresql_lose_nothing_and_double_nothing(operator_hub: RunningHub, short_folder: Path, unique: str) -> None:
    """kill -9 twice under a flow of entries; the site's journal is the agent's own, on disk."""
    name = SiteName(f"site-{unique}")
    with running_postgres(short_folder) as server:
        server.provision([RolePassword("scheduler", "secret-of-a-test")])
        url = server.url("scheduler")
        db = await Database.open(url, password="secret-of-a-test", schema="scheduler", wait_s=10)
        journal = await SqliteJournal.open(short_folder / "journal.db")
        try:
            await db.migrate("intertie.store")
            async with db.transaction() as tx:
                await tx.run("CREATE TABLE said (id bigint GENERATED ALWAYS AS IDENTITY, revision bigint NOT NULL)")
            service = Service(PgLaneTables(db), db, change=_insert)
            async with hub_bus(operator_hub) as hub, site_buses(operator_hub, name) as [link], kept(hub, service):
                site = Site(link, name, journal=journal)
                async with joined(site):
                    for start in (1000, 1100):
                        for at in range(start, start + 100, 5):
                            await site.write(*range(at, at + 5))
                            if at == start + 50:
                                await until(partial(_reached, service, name, start), "some were interpreted")
                                server.kill()
                        server.start()
                    await site.lane.flush(30)
                    await until(lambda: _all_marked(service, name), "all interpreted", within_s=30)
            async with db.transaction() as tx:
                said = [row["revision"] for row in await tx.all("SELECT revision FROM said ORDER BY id")]
            assert said == list(range(1000, 1200)), "each once and in order, also where a COMMIT went unanswered"
            assert await stored(db, name) == list(range(1, 201))
            assert await journal.marks(LANE) == (200, 200)
        finally:
            await journal.close()
            await db.close()


async def _insert(tx: StoreTx, revision: int) -> None:
    assert isinstance(tx, Tx)
    await tx.run("INSERT INTO said (revision) VALUES ($1)", revision)


def _reached(service: Service, site: SiteName, revision: int) -> bool:
    return any(one >= revision for one in service.said.get(site, []))


async def _all_marked(service: Service, site: SiteName) -> bool:
    row = await service.tables.site(LANE, site)
    return row is not None and row.interpreted_through == row.ack_through == 200


def _idle(site: SiteName) -> Sync:
    journal = JournalId(f"jnl-{site}")
    return Sync(
        site=site,
        session=SessionId("ses-1"),
        lane=LANE,
        nonce=1,
        taken_nonce=0,
        journal=journal,
        first_seq=1,
        digest_before=first_digest(journal),
        entries=[],
        at_head=True,
        clocks=Clocks(utc=CLOCK.now(), boot_s=1.0, kernel_boot="boot-1"),
    )


async def _ask(bus: NatsBus, sync: Sync) -> Synced:
    reply = await bus.request(sync_subject(sync.site, sync.lane), msgspec.json.encode(sync), timeout_s=5)
    return msgspec.json.decode(reply.body, type=Synced)
