"""The way out of quarantine, on every lane and on both stores: listed, read again by the lane's own interpreter, set aside again if it still fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from tests.conftest import PgDatabase
from tests.core.metering_world import OTHER_SITE, SITE, T0
from tests.edges.metering_edge import OPERATOR, claims, row_of
from tests.edges.store_world import until

from intertie.clock import ManualClock
from intertie.contracts.base import encode
from intertie.contracts.identity import AuditQuery, AuditRow, Role
from intertie.contracts.link import Lane
from intertie.contracts.quarantine import QuarantinedEntry, QuarantineQuery, QuarantineReply, Reinterpret
from intertie.errors import Denied, NotFound, Refused
from intertie.ids import Digest, JournalId, SiteName, digest
from intertie.lane.interpreter import Interpreter
from intertie.lane.memory import MemoryLaneTables
from intertie.lane.pg import PgLaneTables
from intertie.lane.tables import LaneEntry
from intertie.link.keeper import NewEntry
from intertie.quarantine import SERVED, Quarantine
from intertie.quarantine.memory import MemoryQuarantine
from intertie.quarantine.pg import PgQuarantine, Q
from intertie.store import Database, MemoryStore, check_queries

JOURNAL = JournalId("jnl-1")


@dataclass
class Keeper:
    """One keeper with its interpreter. `understood` are the numbers of entries that this version can read."""

    lane: Lane
    store: MemoryStore | Database
    lanes: MemoryLaneTables | PgLaneTables
    quarantine: Quarantine
    understood: set[int] = field(default_factory=set)
    done: list[int] = field(default_factory=list)

    async def interpret(self, entry: LaneEntry) -> None:
        if entry.seq not in self.understood:
            raise Refused("contract.invalid", f"entry {entry.seq} is two versions newer")
        async with self.store.transaction() as tx:
            await self.lanes.mark_interpreted(tx, entry)
        self.done.append(entry.seq)

    async def receive(self, count: int, site: SiteName = SITE) -> None:
        """Commit entries 1 to `count`, as the keeper does before anything is interpreted."""
        entries = []
        for seq in range(1, count + 1):
            raw = encode({"kind": "news", "seq": seq})
            entries.append(NewEntry(seq, Digest(digest(raw)), raw))
        async with self.lanes.turn(self.lane, [site]) as turn:
            await turn.save([row_of(site, JOURNAL, count, entries[-1].digest, T0, self.lane)], {site: entries}, [])

    async def listed(self, site: SiteName | None = None) -> list[QuarantinedEntry]:
        reply = await self.quarantine.entries(QuarantineQuery(site=site), OPERATOR)
        assert isinstance(reply, QuarantineReply) and reply.total == len(reply.entries)
        return reply.entries

    async def retry(self, seq: int | None = None, site: SiteName = SITE) -> int:
        ask = Reinterpret(site=site, journal=JOURNAL if seq else None, seq=seq, reason="upgraded")
        return (await self.quarantine.reinterpret(ask, OPERATOR)).reopened

    async def audits(self) -> list[AuditRow]:
        return await self.store.read_audit(AuditQuery())

    async def settle(self, site: SiteName = SITE) -> None:
        """Let the lane's own interpreter do all that is open, as it does in a running service."""

        async def nobody(_site: SiteName) -> None:
            return None

        interpreter = Interpreter(self.lane, self.lanes, self.interpret, late=nobody)
        running = asyncio.create_task(interpreter.run())
        await until(lambda: self.nothing_open(site), "everything to be interpreted or set aside")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def nothing_open(self, site: SiteName) -> bool:
        return not await self.lanes.open_entries(self.lane, site, 1)


@pytest.fixture(params=[f"{kind}-{lane}" for kind in ("memory", "pg") for lane in Lane])
async def keeper(request: pytest.FixtureRequest) -> AsyncIterator[Keeper]:
    kind, _, lane = request.param.partition("-")
    if kind == "memory":
        store = MemoryStore(lane, clock=ManualClock(T0))
        lanes = MemoryLaneTables(store)
        yield Keeper(Lane(lane), store, lanes, Quarantine(Lane(lane), MemoryQuarantine(store, lanes)))
        return
    pg: PgDatabase = request.getfixturevalue("pg")
    database = await Database.open(pg.url, password=pg.password, schema=lane)
    try:
        await database.migrate(f"intertie.{lane}")
        yield Keeper(Lane(lane), database, PgLaneTables(database), Quarantine(Lane(lane), PgQuarantine(database)))
    finally:
        await database.close()


async def test_after_an_upgrade_what_was_set_aside_is_read_again_and_what_still_fails_stays(keeper: Keeper) -> None:
    """LINK D11: receiving is not interpreting, and nothing that was set aside stays so for ever."""
    await keeper.receive(4)
    keeper.understood = {1, 3}
    await keeper.settle()
    assert keeper.done == [1, 3]
    first, second = await keeper.listed()
    assert (first.site, first.journal, first.seq, first.kind, first.error) == (
        SITE,
        JOURNAL,
        2,
        "news",
        "contract.invalid: entry 2 is two versions newer",
    )
    assert second.seq == 4
    keeper.understood = {1, 2, 3}
    assert await keeper.retry() == 2
    assert await keeper.listed() == []
    await keeper.settle()
    assert keeper.done == [1, 3, 2]
    assert [entry.seq for entry in await keeper.listed(SITE)] == [4]
    keeper.understood = {4}
    assert await keeper.retry(4) == 1
    await keeper.settle()
    assert (keeper.done, await keeper.listed()) == ([1, 3, 2, 4], [])
    (last, before) = (await keeper.audits())[:2]
    assert (last.actor, last.action, last.target, last.reason) == (
        "ann (p-1)",
        "quarantine.retry",
        f"{SITE}/{keeper.lane}/{JOURNAL}/4",
        "upgraded",
    )
    assert before.target == f"{SITE}/{keeper.lane}: 2 entries"


async def test_a_keeper_reads_again_by_itself_what_it_set_aside_with_one_code(keeper: Keeper) -> None:
    """In its own transaction: what made it readable and the reading are one."""
    await keeper.receive(3)
    await keeper.receive(1, OTHER_SITE)
    keeper.understood = {2}
    await keeper.settle()
    await keeper.settle(OTHER_SITE)
    assert keeper.done == [2]
    async with keeper.store.transaction() as tx:
        assert await keeper.lanes.read_again(tx, keeper.lane, SITE, "contract") == 0, "a code is a whole word"
        assert await keeper.lanes.read_again(tx, keeper.lane, SITE, "contract.invalid") == 2
    keeper.understood = {1}
    await keeper.settle()
    assert keeper.done == [2, 1]
    assert {(entry.site, entry.seq) for entry in await keeper.listed()} == {(OTHER_SITE, 1), (SITE, 3)}


async def test_a_keeper_lets_go_of_what_it_set_aside_with_exactly_these_words(keeper: Keeper) -> None:
    """It waits for nobody, and is not read again."""
    await keeper.receive(3)
    await keeper.receive(1, OTHER_SITE)
    await keeper.settle()
    await keeper.settle(OTHER_SITE)
    first = "contract.invalid: entry 1 is two versions newer"
    async with keeper.store.transaction() as tx:
        assert await keeper.lanes.let_go(tx, keeper.lane, SITE, ["contract.invalid", first]) == 1
        assert await keeper.lanes.let_go(tx, keeper.lane, SITE, [first]) == 0, "once"
    assert {(entry.site, entry.seq) for entry in await keeper.listed()} == {(SITE, 2), (SITE, 3), (OTHER_SITE, 1)}
    assert await keeper.nothing_open(SITE)


async def test_only_what_is_there_is_tried_again(keeper: Keeper) -> None:
    await keeper.receive(1)
    await keeper.settle()
    await keeper.receive(1, OTHER_SITE)
    for attempt in (keeper.retry(9), keeper.retry(1, SiteName("site-c")), keeper.retry(None, OTHER_SITE)):
        with pytest.raises(NotFound):
            await attempt
    assert len(await keeper.listed()) == 1 and await keeper.listed(OTHER_SITE) == []
    assert await keeper.audits() == []
    with pytest.raises(Refused, match="journal and its number"):
        await keeper.quarantine.reinterpret(Reinterpret(site=SITE, seq=1, reason="x"), OPERATOR)
    with pytest.raises(Refused, match="says why"):
        await keeper.quarantine.reinterpret(Reinterpret(site=SITE, reason=" "), OPERATOR)


async def test_only_who_answers_for_the_platform_tries_again_and_who_watches_may_look() -> None:
    store = MemoryStore("metering")
    quarantine = Quarantine(Lane.METERING, MemoryQuarantine(store, MemoryLaneTables(store)))
    await quarantine.entries(QuarantineQuery(), claims(Role.AUDITOR))
    for who in (claims(Role.AUDITOR), claims(Role.SITE_OWNER, site=SITE), claims(Role.TENANT_ADMIN, tenant="lab")):
        with pytest.raises(Denied):
            await quarantine.reinterpret(Reinterpret(site=SITE, reason="mine"), who)
    with pytest.raises(Denied):
        await quarantine.entries(QuarantineQuery(), claims(Role.SITE_OWNER, site=SITE))


def test_every_lane_s_keeper_serves_both_calls_under_its_own_name() -> None:
    assert set(SERVED) == set(Lane)
    assert all(endpoint.service == lane for lane, both in SERVED.items() for endpoint in both)


async def test_every_query_is_one_that_postgresql_understands(pg: PgDatabase) -> None:
    database = await Database.open(pg.url, password=pg.password, schema="metering")
    try:
        await database.migrate("intertie.metering")
        assert await check_queries(database, Q) == []
    finally:
        await database.close()
