"""The lane tables, on PostgreSQL and in memory: one suite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Protocol

import pytest
from tests.conftest import PgDatabase
from tests.edges.store_world import opened

from intertie.contracts.base import Event, decode
from intertie.contracts.incident import FaultReported, ReportIncident, Severity
from intertie.contracts.link import Clocks, Lane, LaneState
from intertie.errors import Stale
from intertie.ids import AttemptId, Digest, JournalId, SessionId, SiteName
from intertie.lane.memory import MemoryLaneTables
from intertie.lane.pg import PgLaneTables
from intertie.lane.tables import LaneEntry, LaneTables
from intertie.link.keeper import NewEntry, SiteRow
from intertie.store import Database, MemoryStore, StoreTx, load_queries

A, B = SiteName("site-a"), SiteName("site-b")
JOURNAL = JournalId("jnl-a")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
LANE = Lane.SCHEDULER
FAULT = ReportIncident(key="lane.x/site-a", kind="lane.x", severity=Severity.CRITICAL, title="x", text="y", site=A)


class Transactions(Protocol):
    def transaction(self) -> AbstractAsyncContextManager[StoreTx]: ...


@dataclass
class World:
    tables: LaneTables
    store: Transactions
    db: Database | None
    memory: MemoryStore | None

    async def faults(self) -> list[Event]:
        if self.memory is not None:
            return list(self.memory.events)
        assert self.db is not None
        async with self.db.transaction() as tx:
            return [decode(row["body"], FaultReported) for row in await tx.all("SELECT body FROM outbox ORDER BY id")]

    async def open(self, site: SiteName = A) -> list[int]:
        return [entry.seq for entry in await self.tables.open_entries(LANE, site, 100)]


@pytest.fixture(params=["postgres", "memory"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        store = MemoryStore("scheduler")
        yield World(MemoryLaneTables(store), store, None, store)
        return
    pg: PgDatabase = request.getfixturevalue("pg")
    async with opened(pg) as db:
        yield World(PgLaneTables(db), db, db, None)


def row(site: SiteName = A, ack: int = 0, heard: int = 1) -> SiteRow:
    return SiteRow(
        site=site,
        lane=LANE,
        session=SessionId("ses-1"),
        journal=JOURNAL,
        ack_through=ack,
        digest=Digest(f"sha256:{ack:064}"),
        safe_through=ack,
        interpreted_through=0,
        heard=heard,
        last_heard=NOON,
        last_nonce=3,
        taken_nonce=2,
        at_head=True,
        running=(AttemptId("att-1"), AttemptId("att-2")),
        instruction_epoch=1,
        instruction_mark=9,
        settings_revision=4,
        clocks=Clocks(utc=NOON, boot_s=12.25, kernel_boot="boot-1"),
        clock_offset_s=-0.125,
        clock_error_s=0.5,
    )


def entries(first: int, last: int) -> list[NewEntry]:
    return [NewEntry(seq, Digest(f"sha256:{seq:064}"), f'{{"seq":{seq},"text":"é"}}'.encode()) for seq in range(first, last + 1)]


async def receive(world: World, saved: SiteRow, new: Sequence[NewEntry] = (), faults: Sequence[ReportIncident] = ()) -> None:
    async with world.tables.turn(LANE, [saved.site]) as turn:
        await turn.save([saved], {saved.site: new}, faults)


async def interpret(world: World, entry: LaneEntry) -> None:
    async with world.store.transaction() as tx:
        await world.tables.mark_interpreted(tx, entry)


async def test_a_new_site_has_no_row_and_is_not_busy(world: World) -> None:
    async with world.tables.turn(LANE, [A]) as turn:
        assert (dict(turn.rows), turn.busy) == ({}, frozenset())
    assert await world.tables.site(LANE, A) is None


async def test_every_field_of_a_row_comes_back(world: World) -> None:
    await receive(world, row())
    assert await world.tables.site(LANE, A) == row()
    for changed in (
        row(ack=5, heard=2),
        replace(row(), running=None, at_head=False),
        replace(row(), running=()),
        replace(row(), clocks=None),
    ):
        await receive(world, changed)
        expected = replace(changed, interpreted_through=changed.ack_through)
        assert await world.tables.site(LANE, A) == expected


async def test_rows_of_many_sites_are_saved_together(world: World) -> None:
    await receive(world, row(A))
    async with world.tables.turn(LANE, [A, B]) as turn:
        await turn.save([row(A, heard=2), row(B, ack=2)], {B: entries(1, 2)}, [])
    assert [(one.site, one.heard, one.ack_through) for one in await world.tables.sites(LANE)] == [(A, 2, 0), (B, 1, 2)]
    assert await world.tables.sites(Lane.METERING) == []


async def test_entries_come_back_in_order_with_their_exact_bytes(world: World) -> None:
    await receive(world, row(ack=2), entries(1, 2))
    await receive(world, row(ack=12), entries(3, 12))
    found = await world.tables.open_entries(LANE, A, 11)
    assert [(entry.seq, entry.raw, entry.digest) for entry in found] == [(new.seq, new.raw, new.digest) for new in entries(1, 11)]
    assert (found[0].site, found[0].lane, found[0].journal, found[0].received_at) == (A, LANE, JOURNAL, NOON)


async def test_a_turn_that_fails_leaves_nothing(world: World) -> None:
    with pytest.raises(LookupError):
        async with world.tables.turn(LANE, [A]) as turn:
            await turn.save([row(ack=2)], {A: entries(1, 2)}, [FAULT])
            raise LookupError
    assert (await world.tables.site(LANE, A), await world.open(), await world.faults()) == (None, [], [])


async def test_a_turn_tells_the_stored_digest_of_an_entry(world: World) -> None:
    await receive(world, row(ack=2), entries(1, 2))
    async with world.tables.turn(LANE, [A]) as turn:
        assert await turn.digest(A, JOURNAL, 2) == entries(2, 2)[0].digest
        assert await turn.digest(A, JOURNAL, 3) is None
        assert await turn.digest(A, JournalId("jnl-b"), 2) is None


async def test_a_fault_is_told_in_the_same_transaction(world: World) -> None:
    await receive(world, row(), faults=[FAULT])
    [event] = await world.faults()
    assert isinstance(event, FaultReported)
    assert event.report == FAULT


async def test_entries_are_marked_once_and_in_order(world: World) -> None:
    await receive(world, row(ack=3), entries(1, 3))
    first, second, third = await world.tables.open_entries(LANE, A, 10)
    with pytest.raises(Stale):
        await interpret(world, second)
    await interpret(world, first)
    with pytest.raises(Stale):
        await interpret(world, first)
    assert await world.open() == [2, 3]
    await interpret(world, second)
    with pytest.raises(Stale):
        await interpret(world, replace(third, seq=9))
    assert await world.open() == [3]


async def test_a_mark_goes_with_the_change_it_belongs_to(world: World) -> None:
    await receive(world, row(ack=1), entries(1, 1))
    [entry] = await world.tables.open_entries(LANE, A, 10)
    with pytest.raises(LookupError):
        async with world.store.transaction() as tx:
            await world.tables.mark_interpreted(tx, entry)
            raise LookupError
    assert await world.open() == [1]


async def test_how_far_a_site_is_interpreted_is_known_at_once(world: World) -> None:
    await receive(world, row(ack=3), entries(1, 3))
    marks = []
    for entry in await world.tables.open_entries(LANE, A, 10):
        await interpret(world, entry)
        found = await world.tables.site(LANE, A)
        assert found is not None
        marks.append(found.interpreted_through)
    assert marks == [1, 2, 3]


async def test_the_entry_of_one_site_waits_for_no_other_site(world: World) -> None:
    await receive(world, row(A, ack=1), entries(1, 1))
    await receive(world, row(B, ack=1), entries(1, 1))
    [entry] = await world.tables.open_entries(LANE, B, 10)
    await interpret(world, entry)
    assert await world.tables.sites_with_open_entries(LANE) == [A]


async def test_quarantine_sets_aside_reports_counts_and_lets_the_next_pass(world: World) -> None:
    await receive(world, row(ack=2), entries(1, 2))
    first, second = await world.tables.open_entries(LANE, A, 10)
    with pytest.raises(Stale):
        await world.tables.quarantine(second, "contract.invalid: no", FAULT)
    await world.tables.quarantine(first, "contract.invalid: no", FAULT)
    assert await world.open() == [2]
    assert len(await world.faults()) == 1
    found = await world.tables.site(LANE, A)
    assert found is not None
    assert (found.quarantined, found.interpreted_through) == (1, 1)
    await interpret(world, second)


async def test_a_fault_may_be_reported_alone(world: World) -> None:
    await world.tables.report(FAULT)
    assert len(await world.faults()) == 1


# --- what only PostgreSQL can show --------------------------------------------------------------------------------------------------------


async def test_a_row_that_another_copy_holds_is_busy_and_nobody_waits(pg: PgDatabase) -> None:
    async with opened(pg) as db:
        tables = PgLaneTables(db)
        async with tables.turn(LANE, [A, B]) as turn:
            await turn.save([row(A), row(B)], {}, [])
        async with tables.turn(LANE, [A]), tables.turn(LANE, [A, B]) as second:
            assert (set(second.rows), second.busy) == ({B}, frozenset({A}))
            await second.save([row(B, heard=2)], {}, [])


async def test_a_new_site_that_two_copies_meet_is_written_by_one(pg: PgDatabase) -> None:
    async with opened(pg) as db:
        tables = PgLaneTables(db)
        both = asyncio.Barrier(2)

        async def meet() -> bool:
            try:
                async with tables.turn(LANE, [A]) as turn:
                    await both.wait()
                    await turn.save([row(A, ack=1)], {A: entries(1, 1)}, [])
            except Stale:
                return False
            return True

        assert sorted(await asyncio.gather(meet(), meet())) == [False, True]
        assert len(await tables.open_entries(LANE, A, 10)) == 1


async def test_the_next_entry_cannot_be_marked_while_the_one_before_it_is_not_committed(pg: PgDatabase) -> None:
    """Two copies of a keeper interpret one site: order is kept by the row, not by luck."""
    async with opened(pg) as db:
        tables = PgLaneTables(db)
        async with tables.turn(LANE, [A]) as turn:
            await turn.save([row(A, ack=2)], {A: entries(1, 2)}, [])
        first, second = await tables.open_entries(LANE, A, 10)
        async with db.transaction() as slow:
            await tables.mark_interpreted(slow, first)
            with pytest.raises(Stale):
                async with db.transaction() as quick:
                    await tables.mark_interpreted(quick, second)
        async with db.transaction() as then:
            await tables.mark_interpreted(then, second)


async def test_an_interpretation_under_way_does_not_make_the_sites_next_sync_busy(pg: PgDatabase) -> None:
    async with opened(pg) as db:
        tables = PgLaneTables(db)
        async with tables.turn(LANE, [A]) as turn:
            await turn.save([row(A, ack=1)], {A: entries(1, 1)}, [])
        [entry] = await tables.open_entries(LANE, A, 10)
        async with db.transaction() as tx:
            await tables.mark_interpreted(tx, entry)
            async with tables.turn(LANE, [A]) as turn:
                assert (set(turn.rows), turn.busy) == ({A}, frozenset())


async def test_postgresql_understands_every_query_of_the_lane(pg: PgDatabase) -> None:
    async with opened(pg) as db, db.transaction() as tx:
        for query in load_queries("intertie.lane"):
            await tx.run(f"PREPARE {query.name} AS {query}")
    assert load_queries("intertie.lane").misnamed() == []


# --- places, states, idle beats ------------------------------------------------------------------------------------------------------------------


async def test_a_row_keeps_its_place_its_moves_and_its_state(world: World) -> None:
    moves = (NOON, NOON + timedelta(minutes=3))
    first = replace(row(ack=0), place="place-a", moves=moves, state=LaneState.CONTESTED, state_since=NOON, epoch_told=9, version=2)
    for saved in (first, replace(first, heard=2, moves=(), state_since=None)):
        await receive(world, saved)
        assert await world.tables.site(LANE, A) == saved
    assert await world.tables.highest_epoch_told() == 9


async def test_an_idle_beat_is_written_only_over_what_its_writer_last_saw(world: World) -> None:
    first = row(ack=0, heard=1)
    await receive(world, first)
    second = replace(first, heard=2, last_nonce=4, taken_nonce=3, last_heard=NOON + timedelta(seconds=5), running=None, settings_revision=5)
    assert await world.tables.beat(LANE, [(first, second)]) == {A}
    assert await world.tables.site(LANE, A) == second
    assert await world.tables.beat(LANE, [(first, replace(second, heard=9))]) == set(), "another copy wrote it since"
    stands = replace(second, state=LaneState.FORKED, state_since=NOON)
    await receive(world, stands)
    assert await world.tables.beat(LANE, [(second, replace(second, heard=3))]) == set(), "it was called forked since"
    assert await world.tables.site(LANE, A) == stands


async def test_what_an_earlier_journal_left_open_comes_first_and_its_end_is_known(world: World) -> None:
    other = JournalId("jnl-0-replaced-by-a-name-that-sorts-before")
    await receive(world, row(ack=2), entries(1, 2))
    await receive(world, replace(row(ack=1, heard=2), journal=other), entries(1, 1))
    found = [(entry.journal, entry.seq) for entry in await world.tables.open_entries(LANE, A, 9)]
    assert found == [(JOURNAL, 1), (JOURNAL, 2), (other, 1)]
    async with world.tables.turn(LANE, [A]) as turn:
        assert await turn.ends(A, [JOURNAL, other, JournalId("jnl-nowhere")]) == {JOURNAL: 2, other: 1}
