"""No site crowds out another where entries are interpreted: measured by what was done before whom, not by time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.core.link_world import JOURNAL, NOON
from tests.core.link_world import row as a_row

from intertie.contracts.link import Lane
from intertie.ids import SiteName, digest
from intertie.lane.interpreter import READ_BYTES, READ_ENTRIES, SITES_AT_ONCE, Interpreter
from intertie.lane.memory import MemoryLaneTables
from intertie.lane.tables import LaneEntry
from intertie.store import MemoryStore

LANE = Lane.SCHEDULER
GOOD = SiteName("good")
LARGE = 3 * READ_BYTES


async def nobody(site: SiteName) -> None:
    """Nobody waits."""


def fill(tables: MemoryLaneTables, site: SiteName, count: int, size: int) -> None:
    tables.sites_kept[(LANE, site)] = replace(a_row(), site=site, lane=LANE, ack_through=count)
    for seq in range(1, count + 1):
        raw = b'{"seq": %d, "pad": "%s"}' % (seq, b"x" * size)
        key = (LANE, site, JOURNAL, seq)
        tables.entries[key] = LaneEntry(site, LANE, JOURNAL, seq, digest(raw), raw, NOON)
        tables.open.add(key)


@pytest.mark.parametrize(("size", "turn"), [(1, READ_ENTRIES), (LARGE, 1)], ids=["many small", "large"])
async def test_sites_with_many_entries_each_have_one_turn_before_another_s_first(size: int, turn: int) -> None:
    """More of them than are interpreted at once, all there before it."""
    store = MemoryStore("scheduler")
    tables = MemoryLaneTables(store)
    crowd = [SiteName(f"evil-{n}") for n in range(SITES_AT_ONCE)]
    count = 200 if size == 1 else 20
    for site in crowd:
        fill(tables, site, count, size)
    fill(tables, GOOD, 1, 1)
    done: list[SiteName] = []

    async def interpret(entry: LaneEntry) -> None:
        async with store.transaction() as tx:
            await tables.mark_interpreted(tx, entry)
        done.append(entry.site)
        await asyncio.sleep(0)

    interpreter = Interpreter(LANE, tables, interpret, late=nobody)
    task = asyncio.create_task(interpreter.run())
    try:
        await asyncio.sleep(0)
        for site in (*crowd, GOOD):
            interpreter.kick(site)
        assert await interpreter.settled(GOOD, 30)
        assert done.index(GOOD) <= 2 * SITES_AT_ONCE * turn
        for site in crowd:
            assert await interpreter.settled(site, 60)
        assert len(done) == SITES_AT_ONCE * count + 1
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
