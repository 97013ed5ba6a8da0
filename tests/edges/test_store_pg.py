"""Transactions on a real PostgreSQL: bounded, in our words, and honest about what is not known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from tests.conftest import PgDatabase
from tests.edges.store_world import Probe, opened, until

from intertie import store as store_package
from intertie.contracts.base import EventMeta, encode
from intertie.contracts.identity import AuditQuery
from intertie.errors import IntertieError, Refused, Stale, Unavailable
from intertie.ids import EventId
from intertie.store import Database, Tx, Violated, audit_reply, check_queries
from intertie.store.tx import Q

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


def meta(event_id: str = "evt-1") -> EventMeta:
    return EventMeta(id=EventId(event_id), type="t", source="s", entity="e", time=NOW, number=1, epoch=1)


@pytest.fixture
async def db(pg: PgDatabase) -> AsyncIterator[Database]:
    async with opened(pg) as found:
        async with found.transaction() as tx:
            await tx.run(
                "CREATE TABLE thing (id text PRIMARY KEY, n bigint NOT NULL CONSTRAINT thing_n_positive CHECK (n > 0),"
                " price numeric, at timestamptz, doc jsonb, raw bytea)"
            )
        yield found


async def count(db: Database) -> int:
    async with db.transaction(read_only=True) as tx:
        row = await tx.one("SELECT count(*) AS n FROM thing")
    assert row is not None
    return int(row["n"])


async def add(tx: Tx, name: str, n: int = 1) -> int:
    return await tx.run("INSERT INTO thing (id, n) VALUES ($1, $2)", name, n)


async def test_the_stores_own_queries_are_all_parsed_by_postgresql_and_used(db: Database) -> None:
    assert await check_queries(db, Q) == []


async def test_values_come_back_as_they_went_in(db: Database) -> None:
    at = datetime(2026, 5, 1, 20, tzinfo=timezone(timedelta(hours=8)))
    async with db.transaction() as tx:
        await tx.run("INSERT INTO thing VALUES ($1, $2, $3, $4, $5, $6)", "a", 7, Decimal("0.0107"), at, encode({"k": 1}), b"\x00\xff")
        row = await tx.one("SELECT * FROM thing")
    assert row is not None
    assert (row["price"], row["at"], row["doc"], row["raw"]) == (Decimal("0.0107"), NOW, '{"k": 1}', b"\x00\xff")
    assert row["at"].utcoffset() == timedelta(0)


async def test_run_says_how_many_rows_it_touched(db: Database) -> None:
    async with db.transaction() as tx:
        await tx.many("INSERT INTO thing (id, n) VALUES ($1, $2)", [("a", 1), ("b", 2)])
        assert await tx.run("UPDATE thing SET n = n + 1") == 2
        assert await tx.run("UPDATE thing SET n = 1 WHERE id = $1", "nobody") == 0
        assert [row["n"] for row in await tx.all("SELECT n FROM thing ORDER BY id")] == [2, 3]


@pytest.mark.parametrize(
    "value", [Decimal("NaN"), Decimal("Infinity"), [Decimal("1"), Decimal("-Infinity")], datetime.fromisoformat("2026-05-01T12:00")]
)
async def test_a_value_that_nobody_could_trust_is_refused(db: Database, value: object) -> None:
    with pytest.raises(Refused, match=r"store\.value"):
        async with db.transaction() as tx:
            await tx.one("SELECT $1::text", value)


async def test_a_nul_character_is_refused_as_text(db: Database) -> None:
    with pytest.raises(Refused, match=r"store\.text"):
        async with db.transaction() as tx:
            await add(tx, "a\x00b")


async def test_what_raises_leaves_nothing(db: Database) -> None:
    with pytest.raises(Refused):
        async with db.transaction() as tx:
            await add(tx, "a")
            raise Refused("test.no", "no")
    assert await count(db) == 0


@pytest.mark.parametrize(("name", "n", "constraint"), [("taken", 1, "thing_pkey"), ("b", 0, "thing_n_positive")])
async def test_a_constraint_names_itself(db: Database, name: str, n: int, constraint: str) -> None:
    async with db.transaction() as tx:
        await add(tx, "taken")
    with pytest.raises(Violated) as caught:
        async with db.transaction() as tx:
            await add(tx, name, n)
    assert (caught.value.constraint, caught.value.table) == (constraint, "thing")


async def test_a_savepoint_survives_a_violation(db: Database) -> None:
    async with db.transaction() as tx:
        await add(tx, "a")
        with pytest.raises(Violated):
            async with tx.savepoint():
                await add(tx, "b")
                await add(tx, "a")
        async with tx.savepoint():
            await add(tx, "c")
    assert await count(db) == 2


async def test_a_swallowed_error_is_not_reported_as_a_commit(db: Database) -> None:
    with pytest.raises(AssertionError, match="swallowed"):
        async with db.transaction() as tx:
            await add(tx, "a")
            with pytest.raises(Violated):
                await add(tx, "a")
    assert await count(db) == 0


async def test_two_that_decide_on_the_same_row_are_told_to_decide_again(db: Database) -> None:
    async with db.transaction() as tx:
        await add(tx, "a")
    read = asyncio.Barrier(2)

    async def raise_n() -> None:
        async with db.transaction(isolation="serializable") as tx:
            row = await tx.one("SELECT n FROM thing")
            assert row is not None
            await read.wait()
            await tx.run("UPDATE thing SET n = $1", row["n"] + 1)

    outcomes = await asyncio.gather(raise_n(), raise_n(), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes if outcome is not None] == [Stale]


async def test_a_full_pool_answers_busy_within_its_budget_and_recovers(pg: PgDatabase) -> None:
    """BR-130: the callers of a pool with every connection held are refused, not hung; the reserved ones still work; then all is well."""
    async with opened(pg, connections=2) as db:
        release, held = asyncio.Event(), asyncio.Barrier(3)

        async def hold() -> None:
            async with db.transaction(timeout_s=30):
                await held.wait()
                await release.wait()

        holders = [asyncio.create_task(hold()) for _ in range(2)]
        await held.wait()
        with pytest.raises(Unavailable) as caught:
            async with asyncio.timeout(10):
                async with db.transaction(timeout_s=0.3):
                    pass
        assert caught.value.code == "store.busy"
        await db.ping()
        release.set()
        await asyncio.gather(*holders)
        async with db.transaction(timeout_s=5) as tx:
            assert await tx.one("SELECT 1 AS one") is not None


async def test_a_slow_statement_is_given_up_and_undone(db: Database) -> None:
    with pytest.raises(Unavailable) as caught:
        async with db.transaction(timeout_s=0.3) as tx:
            await add(tx, "a")
            await tx.one("SELECT pg_sleep(30)")
    assert caught.value.code == "store.timeout"
    assert await count(db) == 0


async def test_slow_work_between_statements_counts_too(db: Database) -> None:
    with pytest.raises(Unavailable, match=r"store\.timeout"):
        async with db.transaction(timeout_s=0.2) as tx:
            await add(tx, "a")
            await asyncio.Event().wait()
    assert await count(db) == 0


async def test_a_callers_own_timeout_stays_its_own(db: Database) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2), db.transaction(timeout_s=20) as tx:
            await tx.one("SELECT pg_sleep(30)")


async def test_a_lock_that_is_not_waited_for_is_said(db: Database) -> None:
    async with db.transaction() as tx:
        await add(tx, "a")
    async with db.transaction() as holder:
        await holder.one("SELECT id FROM thing FOR UPDATE")
        with pytest.raises(Unavailable, match=r"store\.locked"):
            async with db.transaction() as tx:
                await tx.one("SELECT id FROM thing FOR UPDATE NOWAIT")


async def test_a_caller_cancelled_near_commit_leaves_all_or_nothing(db: Database) -> None:
    """BR-132: whatever the moment of the cancel, the row, its outbox event and its audit row are all there or all not.

    The cancel comes later each time, until it comes too late.
    """

    async def write(name: str) -> None:
        async with db.transaction() as tx:
            await add(tx, name)
            await tx.emit(Probe(probe=name, version=1))
            await tx.audit(actor="a", action="b", target=name)

    cancelled, steps = set[str](), 0
    while True:
        task = asyncio.create_task(write(f"t{steps}"))
        # Growing, so that a slow machine is not waited for long.
        await asyncio.sleep(0.0001 * 1.06**steps)
        if task.done():
            await task
            break
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        cancelled.add(f"t{steps}")
        steps += 1
    async with db.transaction() as tx:
        things = {row["id"] for row in await tx.all("SELECT id FROM thing")}
        events = {row["entity"] for row in await tx.all("SELECT entity FROM outbox")}
        audits = {row["target"] for row in await tx.all("SELECT target FROM audit")}
    assert things == events == audits
    assert f"t{steps}" in things and cancelled - things, "some were cancelled in time and one was not"


@pytest.mark.parametrize("broken", [False, True], ids=["no answer", "link broken"])
async def test_a_commit_whose_answer_never_comes_is_a_maybe(pg: PgDatabase, broken: bool) -> None:
    """BR-132: nothing is heard of a COMMIT; the caller is told to look, not that nothing was done."""
    async with opened(pg) as db:

        async def write(timeout_s: float) -> None:
            async with db.transaction(timeout_s=timeout_s) as tx:
                await tx.run("INSERT INTO slow VALUES (1)")

        async def end_the_committing_session() -> bool:
            async with db.transaction() as tx:
                return bool(
                    await tx.all("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = 'COMMIT' AND wait_event = 'PgSleep'")
                )

        async with db.transaction() as tx:
            await tx.run("CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(30); RETURN NULL; END $$")
            await tx.run("CREATE TABLE slow (id int)")
            await tx.run(
                "CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION dawdle()"
            )
        writing = asyncio.create_task(write(20 if broken else 0.5))
        if broken:
            await until(end_the_committing_session, "the session that commits is ended")
        with pytest.raises(Unavailable) as caught:
            await writing
        assert caught.value.code == "store.maybe"
        await db.ping()


async def test_a_constraint_at_commit_is_not_a_maybe(db: Database) -> None:
    async with db.transaction() as tx:
        await tx.run("ALTER TABLE thing ADD CONSTRAINT thing_n_once UNIQUE (n) DEFERRABLE INITIALLY DEFERRED")
    with pytest.raises(Violated, match="thing_n_once"):
        async with db.transaction() as tx:
            await add(tx, "a")
            await add(tx, "b")
    assert await count(db) == 0


async def test_a_session_ended_by_an_administrator_costs_one_call(db: Database) -> None:
    with pytest.raises(Unavailable, match=r"store\.unavailable"):
        async with db.transaction() as tx:
            await tx.one("SELECT pg_terminate_backend(pg_backend_pid())")
    await db.ping()
    assert await count(db) == 0


async def test_an_event_is_applied_once_however_often_it_comes(db: Database) -> None:
    async def apply(name: str) -> bool:
        async with db.transaction() as tx:
            if not await tx.first_time(meta()):
                return False
            await add(tx, name)
            return True

    outcomes = await asyncio.gather(*(apply(f"t{n}") for n in range(6)))
    assert sorted(outcomes) == [False] * 5 + [True]
    assert await count(db) == 1


async def test_a_mark_is_only_left_by_a_commit(db: Database) -> None:
    with pytest.raises(Refused):
        async with db.transaction() as tx:
            assert await tx.first_time(meta())
            raise Refused("test.no", "no")
    async with db.transaction() as tx:
        assert await tx.first_time(meta())
        assert await tx.first_time(meta(), consumer="another")


@pytest.mark.parametrize("sql", ["UPDATE audit SET reason = 'x'", "DELETE FROM audit", "TRUNCATE audit"])
async def test_an_audit_row_is_never_changed(db: Database, sql: str) -> None:
    async with db.transaction() as tx:
        await tx.audit(actor="ann", action="job.cancel", target="job-1", reason="typo")
    with pytest.raises(Violated) as caught:
        async with db.transaction() as tx:
            await tx.run(sql)
    assert caught.value.constraint == "audit_append_only"
    rows = (await audit_reply(db, AuditQuery())).rows
    assert [(row.actor, row.action, row.target, row.reason, row.result) for row in rows] == [("ann", "job.cancel", "job-1", "typo", "ok")]


async def test_audit_rows_are_paged_newest_first(db: Database) -> None:
    async with db.transaction() as tx:
        for number in range(5):
            await tx.audit(actor="ann", action="a", target=str(number))
    first = await db.read_audit(AuditQuery(limit=2))
    second = await db.read_audit(AuditQuery(limit=2, before=first[-1].id))
    assert [row.target for row in (*first, *second)] == ["4", "3", "2", "1"]


async def test_a_service_role_reaches_its_own_schema_and_no_other(pg: PgDatabase) -> None:
    url, password = pg.role("scheduler")
    own = await Database.open(url, password=password, schema="scheduler")
    foreign = await Database.open(url, password=password, schema="metering")
    try:
        await own.migrate("intertie.store")
        with pytest.raises(Exception, match="no schema has been selected"):
            await foreign.migrate("intertie.store")
    finally:
        await own.close()
        await foreign.close()


async def wrong_password(pg: PgDatabase) -> Database:
    return await Database.open(pg.url, password="not-the-password", schema="scheduler")


async def nobody_there(pg: PgDatabase) -> Database:
    return await Database.open("postgresql://tester@127.0.0.1:1/none", password="x", schema="scheduler")


async def bad_schema(pg: PgDatabase) -> Database:
    return await Database.open(pg.url, password=pg.password, schema='x"; drop schema y')


@pytest.mark.parametrize(
    ("attempt", "kind", "code"),
    [
        (wrong_password, Refused, "store.login"),
        (nobody_there, Unavailable, "store.unavailable"),
        (bad_schema, Refused, "store.schema"),
    ],
)
async def test_opening_what_cannot_be_opened_says_why(
    pg: PgDatabase, attempt: Callable[[PgDatabase], object], kind: type[IntertieError], code: str
) -> None:
    with pytest.raises(kind) as caught:
        await attempt(pg)  # type: ignore[misc]  # the three are coroutine functions of one shape
    assert caught.value.code == code


def test_the_package_names_what_it_gives() -> None:
    assert set(store_package.__all__) <= set(vars(store_package))
