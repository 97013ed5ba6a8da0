"""Leadership on a real PostgreSQL: the lock chooses, the number fences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.conftest import PgDatabase
from tests.edges.store_world import opened, until

from intertie.errors import Stale
from intertie.store import Database, Leader

LOCK = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"


@pytest.fixture
async def db(pg: PgDatabase) -> AsyncIterator[Database]:
    async with opened(pg) as found:
        async with found.transaction() as tx:
            await tx.run("CREATE TABLE decision (leader bigint)")
        yield found


async def decide(db: Database, leader: Leader) -> None:
    async with db.transaction() as tx:
        await tx.fence(leader)
        await tx.run("INSERT INTO decision VALUES ($1)", leader.number)


async def end_lock_holder(db: Database) -> None:
    """What a failing host does to a leader: its session is gone, its process is not told."""
    async with db.transaction() as tx:
        assert await tx.all(f"SELECT pg_terminate_backend(pid) FROM ({LOCK}) AS holder")


async def decisions(db: Database) -> list[int]:
    async with db.transaction() as tx:
        return [row["leader"] for row in await tx.all("SELECT leader FROM decision")]


async def test_the_second_leads_when_the_first_has_left_and_its_number_is_higher(db: Database) -> None:
    terms: list[Leader] = []

    async def lead() -> None:
        async with db.leading("planner") as leader:
            terms.append(leader)
            assert len(terms) == leader.number
            await decide(db, leader)

    await asyncio.gather(lead(), lead(), lead())
    assert [term.number for term in terms] == [1, 2, 3]
    assert await decisions(db) == [1, 2, 3]


async def test_roles_do_not_wait_for_one_another(db: Database) -> None:
    async with db.leading("planner") as planner, db.leading("relay") as relay:
        assert (planner.role, planner.number, relay.role, relay.number) == ("planner", 1, "relay", 1)


async def test_services_in_one_database_do_not_wait_for_one_another(db: Database, pg: PgDatabase) -> None:
    async with opened(pg, service="metering") as other, db.leading("relay"), other.leading("relay") as leader:
        assert leader.number == 1


async def test_a_leader_whose_connection_is_lost_is_stopped(db: Database) -> None:
    started = asyncio.Event()

    async def lead() -> None:
        async with db.leading("planner"):
            started.set()
            await asyncio.Event().wait()

    leading = asyncio.create_task(lead())
    await started.wait()
    await end_lock_holder(db)
    with pytest.raises(Stale, match=r"store\.not_leader"):
        async with asyncio.timeout(20):
            await leading


async def test_a_leader_who_sees_another_in_office_is_stopped(db: Database) -> None:
    with pytest.raises(Stale, match=r"store\.not_leader"):
        async with asyncio.timeout(20), db.leading("planner"):
            async with db.transaction() as tx:
                await tx.run("UPDATE leader SET number = number + 1")
            await asyncio.Event().wait()


async def test_a_deposed_leader_that_was_not_told_writes_nothing_more(db: Database) -> None:
    """LINK D26: the lock died with its connection and another took office; the old leader's pool is well, and its writes are refused."""
    async with db.leading("planner") as old:
        await decide(db, old)
    async with db.leading("planner") as new:
        with pytest.raises(Stale, match=r"store\.not_leader"):
            await decide(db, old)
        await decide(db, new)
    assert await decisions(db) == [1, 2]


async def test_a_write_under_way_is_seen_before_the_next_leader_takes_office(db: Database) -> None:
    """No write of leader n becomes visible after the first of n + 1 (LINK, invariant 11)."""
    async with db.leading("planner") as old:
        pass
    fenced, go = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        async with db.transaction(timeout_s=20) as tx:
            await tx.fence(old)
            fenced.set()
            await go.wait()
            await tx.run("INSERT INTO decision VALUES ($1)", old.number)

    seen: list[list[int]] = []

    async def follow() -> None:
        async with db.leading("planner"):
            seen.append(await decisions(db))

    writing = asyncio.create_task(slow())
    await fenced.wait()
    following = asyncio.create_task(follow())

    async def waits() -> bool:
        async with db.transaction() as tx:
            return bool(await tx.all("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%leader%'"))

    await until(waits, "the next leader waits for the write under way")
    go.set()
    await asyncio.gather(writing, following)
    assert seen == [[1]]


async def test_the_bodys_own_error_passes_and_frees_the_office(db: Database) -> None:
    with pytest.raises(ZeroDivisionError):
        async with db.leading("planner"):
            raise ZeroDivisionError
    with pytest.raises(TimeoutError):
        async with db.leading("planner"), asyncio.timeout(0.01):
            await asyncio.Event().wait()
    async with asyncio.timeout(20), db.leading("planner") as leader:
        assert leader.number == 3
