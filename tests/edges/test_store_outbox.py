"""The outbox port: PostgreSQL and the twin pass one suite; what only SQL can get wrong stands below."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from tests.conftest import PgDatabase
from tests.edges.store_world import OtherProbe, Probe, emit, opened

from intertie.clock import ManualClock
from intertie.contracts.base import EventMeta
from intertie.errors import Refused, Stale
from intertie.ids import EventId
from intertie.store import Database, Leader, MemoryStore, read_meta
from intertie.store.outbox import EVENT_BYTES, INBOX_S, RETENTION_S, OutboxRow, StreamMark

BORN = datetime(2026, 5, 1, tzinfo=UTC)

Store = Database | MemoryStore


@pytest.fixture
async def db(pg: PgDatabase) -> AsyncIterator[Database]:
    async with opened(pg) as found:
        yield found


@pytest.fixture(params=["pg", "memory"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore("scheduler")
        return
    async with opened(request.getfixturevalue("pg")) as found:
        yield found


async def office(store: Store) -> tuple[Leader, StreamMark]:
    """A leader that nobody deposes yet, and a stream that has nothing."""
    async with store.leading("relay") as leader:
        return leader, await store.outbox.renew(leader, "S", BORN, 0)


async def say(store: Store, *probes: Probe) -> None:
    async with store.transaction() as tx:
        for probe in probes:
            await tx.emit(probe)


def told(rows: Sequence[OutboxRow]) -> list[tuple[str, int, int]]:
    return [(row.event.entity, row.epoch, row.number) for row in rows]


async def test_numbers_are_gapless_per_noun(store: Store) -> None:
    leader, mark = await office(store)
    await say(store, Probe(probe="a", version=1), OtherProbe(probe="o", version=1), Probe(probe="b", version=1))
    assert told(await store.outbox.take(leader, mark, 10)) == [("a", 1, 1), ("o", 1, 1), ("b", 1, 2)]
    await say(store, Probe(probe="c", version=1))
    assert told(await store.outbox.take(leader, mark, 10))[-1] == ("c", 1, 3)
    assert [(head.noun, head.epoch, head.number) for head in await store.outbox.heads()] == [("other", 1, 1), ("probe", 1, 3)]


async def test_what_is_undone_leaves_no_gap(store: Store) -> None:
    leader, mark = await office(store)
    await say(store, Probe(probe="a", version=1))
    with pytest.raises(Refused):
        async with store.transaction() as tx:
            await tx.emit(Probe(probe="undone", version=1))
            raise Refused("test.no", "no")
    await say(store, Probe(probe="b", version=1))
    assert told(await store.outbox.take(leader, mark, 10)) == [("a", 1, 1), ("b", 1, 2)]


async def test_what_is_acknowledged_is_not_taken_again_and_the_rest_is(store: Store) -> None:
    leader, mark = await office(store)
    await say(store, *(Probe(probe=name, version=1) for name in "abc"))
    rows = await store.outbox.take(leader, mark, 10)
    await store.outbox.published(leader, mark, [rows[1].id], 7)
    assert told(await store.outbox.take(leader, mark, 10)) == [("a", 1, 1), ("c", 1, 3)]
    known = await store.outbox.mark("S")
    assert known is not None and known.head == 7
    await store.outbox.published(leader, mark, [rows[0].id], 5)
    known = await store.outbox.mark("S")
    assert known is not None and known.head == 7


async def test_a_stream_made_anew_is_given_everything_and_new_events_do_not_wait_for_that(store: Store) -> None:
    leader, mark = await office(store)
    await say(store, *(Probe(probe=f"old{n}", version=1) for n in range(6)))
    await store.outbox.published(leader, mark, [row.id for row in await store.outbox.take(leader, mark, 10)], 6)
    mark = await store.outbox.renew(leader, "S", BORN + timedelta(days=1), 0)
    await say(store, *(Probe(probe=f"new{n}", version=1) for n in range(3)))
    sent: list[tuple[str, int, int]] = []
    while rows := await store.outbox.take(leader, mark, 4):
        await store.outbox.published(leader, mark, [row.id for row in rows], len(sent))
        sent += told(rows)
    assert [entity for entity, _, _ in sent[:4]] == ["new0", "new1", "old0", "old1"]
    assert sorted(number for _, _, number in sent) == list(range(1, 10))
    assert len(sent) == 9


async def test_a_deposed_relay_neither_numbers_nor_marks(store: Store) -> None:
    leader, mark = await office(store)
    await say(store, Probe(probe="a", version=1))
    rows = await store.outbox.take(leader, mark, 10)
    await office(store)
    for write in (
        store.outbox.take(leader, mark, 10),
        store.outbox.published(leader, mark, [rows[0].id], 1),
        store.outbox.renew(leader, "S", BORN, 0),
        store.outbox.refused(leader, mark, rows[0], "no"),
        store.outbox.prune(leader),
    ):
        with pytest.raises(Stale, match=r"store\.not_leader"):
            await write


async def test_what_the_bus_never_takes_is_kept_told_and_passed(store: Store) -> None:
    leader, mark = await office(store)
    await say(store, Probe(probe="a", version=1))
    (row,) = await store.outbox.take(leader, mark, 10)
    await store.outbox.refused(leader, mark, row, "bus.too_large: no")
    (fault,) = await store.outbox.take(leader, mark, 10)
    assert fault.event.type == "io.intertie.fault.reported.v1"
    # a fault that is refused is kept too, and makes no further fault
    await store.outbox.refused(leader, mark, fault, "bus.too_large: no")
    assert list(await store.outbox.take(leader, mark, 10)) == []
    assert [letter.event_id for letter in await store.open_dead_letters()] == [row.event.event_id, fault.event.event_id]


async def test_a_hint_ends_the_wait(store: Store) -> None:
    await asyncio.gather(store.outbox.hint(20), say(store, Probe(probe="a", version=1)))
    assert await store.outbox.hint(0.01) is False
    store.outbox.ring()
    assert await store.outbox.hint(20) is True


async def test_headers_are_cloudevents_and_survive_any_text(store: Store) -> None:
    leader, mark = await office(store)
    await say(store, Probe(probe="任务/100% ü", version=3))
    (row,) = await store.outbox.take(leader, mark, 10)
    headers = row.headers
    assert all(name == name.lower() and value.isascii() and value.isprintable() for name, value in headers.items())
    assert (headers["ce-specversion"], headers["ce-type"], headers["ce-source"]) == ("1.0", Probe.TYPE, "/intertie/scheduler")
    meta = read_meta(headers)
    assert (meta.id, meta.entity, meta.epoch, meta.number) == (row.event.event_id, "任务/100% ü", 1, 1)
    assert row.event.subject == "intertie.v1.evt.scheduler.probe.moved._._"


@pytest.mark.parametrize("missing", ["ce-id", "ce-type", "ce-subject", "ce-time"])
def test_an_event_without_its_headers_is_refused_by_name(missing: str) -> None:
    headers = {"ce-id": "e", "ce-type": "t", "ce-source": "s", "ce-subject": "x", "ce-time": "2026-05-01T00:00:00+00:00"}
    assert read_meta(headers).number == 0
    del headers[missing]
    with pytest.raises(Refused, match=missing):
        read_meta(headers)


@pytest.mark.parametrize(
    ("probe", "why"),
    [(Probe(probe="a", version=1, price=Decimal("NaN")), "not a number"), (Probe(probe="x" * EVENT_BYTES, version=1), "bytes")],
)
async def test_an_event_that_could_never_be_told_undoes_its_change(store: Store, probe: Probe, why: str) -> None:
    leader, mark = await office(store)
    with pytest.raises(Refused, match=why):
        await say(store, Probe(probe="before", version=1), probe)
    assert list(await store.outbox.take(leader, mark, 10)) == []


# --- what only SQL can get wrong -----------------------------------------------------------------------------------------------------------


async def test_a_late_commit_is_not_skipped(db: Database) -> None:
    """LINK D19: the transaction that took its row id first commits last; it is numbered last and sent."""
    leader, mark = await office(db)
    inserted, go = asyncio.Event(), asyncio.Event()

    async def late() -> None:
        async with db.transaction(timeout_s=20) as tx:
            await tx.emit(Probe(probe="late", version=1))
            inserted.set()
            await go.wait()

    writing = asyncio.create_task(late())
    await inserted.wait()
    await emit(db, "early")
    rows = await db.outbox.take(leader, mark, 10)
    assert told(rows) == [("early", 1, 1)]
    await db.outbox.published(leader, mark, [rows[0].id], 1)
    go.set()
    await writing
    late_rows = await db.outbox.take(leader, mark, 10)
    assert told(late_rows) == [("late", 1, 2)]
    assert late_rows[0].id < rows[0].id


async def test_many_writers_at_once_make_one_gapless_line(db: Database) -> None:
    leader, mark = await office(db)
    writers = asyncio.gather(*(emit(db, f"w{n}") for n in range(40)))
    seen: list[int] = []
    while len(seen) < 40:
        rows = await db.outbox.take(leader, mark, 7)
        await db.outbox.published(leader, mark, [row.id for row in rows], 0)
        seen += [row.number for row in rows]
    await writers
    assert sorted(seen) == list(range(1, 41))


async def test_a_raised_epoch_numbers_from_one_and_no_number_is_used_twice(db: Database) -> None:
    leader, mark = await office(db)
    await emit(db, "a", "b")
    await db.outbox.take(leader, mark, 10)
    async with db.transaction() as tx:
        await tx.run("UPDATE service_epoch SET epoch = 2, reason = 'restored'")
    assert await db.epoch() == 2
    leader, mark = await office(db)
    assert (leader.epoch, leader.number) == (2, 1)
    await emit(db, "c")
    assert told(await db.outbox.take(leader, mark, 10)) == [("a", 1, 1), ("b", 1, 2), ("c", 2, 1)]
    assert [(head.epoch, head.number) for head in await db.outbox.heads()] == [(2, 1)]


async def test_only_what_is_old_and_told_is_dropped(pg: PgDatabase) -> None:
    async with opened(pg) as db:
        clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
        db.clock = clock
        leader, mark = await office(db)
        await emit(db, "told", "untold")
        rows = await db.outbox.take(leader, mark, 10)
        await db.outbox.published(leader, mark, [rows[0].id], 1)
        async with db.transaction() as tx:
            meta = EventMeta(id=EventId("evt-1"), type="t", source="s", entity="e", time=clock.now(), number=1, epoch=1)
            assert await tx.first_time(meta)
            await tx.run("UPDATE inbox SET applied_at = $1", clock.now())
        clock.advance(RETENTION_S + 60)
        assert await db.outbox.prune(leader) == 1
        assert [row.event.entity for row in await db.outbox.take(leader, mark, 10)] == ["untold"]
        clock.advance(INBOX_S - RETENTION_S)
        assert await db.outbox.prune(leader) == 1
        assert INBOX_S - RETENTION_S >= 5 * 86_400
