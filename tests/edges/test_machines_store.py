"""The head's own disk: what its nodes said is there before they are answered, is interpreted once and in order, and survives a kill."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from intertie.agent.machines.store import FORMAT, HeadStore, Tables, mark_interpreted
from intertie.contracts.incident import ReportIncident, Severity
from intertie.contracts.link import Lane
from intertie.errors import Refused, Stale
from intertie.ids import Digest, JournalId, SessionId, SiteName
from intertie.lane.ports import LaneEntry
from intertie.link.keeper import NewEntry, SiteRow

NOW = datetime(2026, 12, 1, 8, 0, tzinfo=UTC)
NODE, JOURNAL = SiteName("n1"), JournalId("jnl-1")
FAULT = ReportIncident(key="k", kind="lane.quarantine", severity=Severity.CRITICAL, title="t", text="x", site=NODE)


def row(ack: int, heard: int = 1) -> SiteRow:
    return SiteRow(
        site=NODE,
        lane=Lane.SCHEDULER,
        session=SessionId("ses-1"),
        journal=JOURNAL,
        ack_through=ack,
        digest=Digest("sha256:x"),
        safe_through=ack,
        interpreted_through=0,
        heard=heard,
        last_heard=NOW,
        last_nonce=heard,
        taken_nonce=0,
        at_head=True,
        running=(),
        instruction_epoch=0,
        instruction_mark=0,
        settings_revision=0,
        clocks=None,
        clock_offset_s=0.0,
        clock_error_s=0.0,
    )


def new(seq: int) -> NewEntry:
    return NewEntry(seq, Digest(f"sha256:{seq}"), b'{"seq":%d}' % seq)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[HeadStore]:
    made = await HeadStore.open(tmp_path / "machines.db")
    yield made
    await made.close()


async def receive(tables: Tables, ack: int, *entries: NewEntry) -> None:
    async with tables.turn(Lane.SCHEDULER, [NODE]) as turn:
        await turn.save([row(ack)], {NODE: entries}, [])


async def interpreted(store: HeadStore, entry: LaneEntry) -> None:
    async with store.turn:
        await store.write(lambda cursor: mark_interpreted(cursor, entry))


async def test_what_was_received_is_there_for_whoever_opens_the_file_next(store: HeadStore, tmp_path: Path) -> None:
    await receive(Tables(store), 2, new(1), new(2))
    other = await HeadStore.open(tmp_path / "machines.db")
    try:
        tables = Tables(other)
        assert [entry.raw for entry in await tables.open_entries(Lane.SCHEDULER, NODE, 9)] == [b'{"seq":1}', b'{"seq":2}']
        async with tables.turn(Lane.SCHEDULER, [NODE]) as turn:
            assert turn.rows[NODE].ack_through == 2 and turn.rows[NODE].interpreted_through == 0
            assert await turn.digest(NODE, JOURNAL, 2) == "sha256:2" and await turn.digest(NODE, JOURNAL, 3) is None
            assert await turn.ends(NODE, [JOURNAL, JournalId("jnl-0")]) == {JOURNAL: 2}
    finally:
        await other.close()


async def test_an_entry_is_interpreted_once_and_none_before_an_earlier_one(store: HeadStore) -> None:
    tables = Tables(store)
    await receive(tables, 2, new(1), new(2))
    first, second = await tables.open_entries(Lane.SCHEDULER, NODE, 9)
    with pytest.raises(Stale):
        await interpreted(store, second)
    await interpreted(store, first)
    with pytest.raises(Stale):
        await interpreted(store, first)
    await interpreted(store, second)
    assert await tables.sites_with_open_entries(Lane.SCHEDULER) == []


async def test_what_cannot_be_read_is_set_aside_and_stops_nothing(store: HeadStore) -> None:
    tables = Tables(store)
    await receive(tables, 2, new(1), new(2))
    first, _ = await tables.open_entries(Lane.SCHEDULER, NODE, 9)
    await tables.quarantine(first, "contract.invalid: no sense", FAULT)
    assert [entry.seq for entry in await tables.open_entries(Lane.SCHEDULER, NODE, 9)] == [2]
    async with tables.turn(Lane.SCHEDULER, [NODE]) as turn:
        assert (turn.rows[NODE].quarantined, turn.rows[NODE].interpreted_through) == (1, 1)


async def test_an_idle_sync_writes_a_row_that_nobody_wrote_since(store: HeadStore) -> None:
    tables = Tables(store)
    await receive(tables, 0)
    assert await tables.beat(Lane.SCHEDULER, [(row(0), row(0, heard=2))]) == {NODE}
    assert await tables.beat(Lane.SCHEDULER, [(row(0), row(0, heard=3))]) == frozenset(), "it was heard meanwhile"


async def test_a_file_of_a_later_format_and_what_is_no_file_of_ours_are_refused(tmp_path: Path) -> None:
    later, strange = tmp_path / "later.db", tmp_path / "strange.db"
    with sqlite3.connect(later) as connection:
        connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
    connection.close()
    strange.write_bytes(b"this is no database, and long enough to be read as a header of one" * 20)  # noqa: ASYNC240
    for path, code in ((later, "machines.store_format"), (strange, "machines.store")):
        with pytest.raises(Refused) as refused:
            await HeadStore.open(path)
        assert refused.value.code == code
