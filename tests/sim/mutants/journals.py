"""The journal, its numbers, and what is forgotten when (LINK D2, D3, D10)."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from tests.sim.mutants.base import Mutant, swapped, together
from tests.sim.mutants.restores import a_restored_journal_is_trusted, what_is_acknowledged_is_forgotten

from intertie.agent.journal import SqliteJournal
from intertie.contracts.link import Lane
from intertie.lane.keeper import LaneKeeper
from intertie.lane.tables import LaneTables
from intertie.link.keeper import judge
from intertie.sim.disk import SimJournal

DEATHS = ("crash", "doom_before", "doom_after")


def seq_from_the_highest_row() -> Any:
    """After everything acknowledged was pruned, numbers begin again."""
    append, acknowledged = SqliteJournal.append, SqliteJournal.acknowledged

    async def pruned(self: SqliteJournal, lane: Lane, ack_through: int, safe_through: int, journal: Any = None) -> None:
        await acknowledged(self, lane, ack_through, safe_through, journal)
        await self.write(lambda cursor: cursor.execute("DELETE FROM entry WHERE lane = ? AND seq <= ?", (lane.value, safe_through)))

    async def counted(self: SqliteJournal, build: Any, also: Any = None) -> None:
        def reset(cursor: Any) -> None:
            cursor.execute("UPDATE lane SET next_seq = (SELECT coalesce(max(seq), 0) + 1 FROM entry WHERE entry.lane = lane.name)")

        await self.write(reset)
        await append(self, build, also)

    return together(swapped(SqliteJournal, "append", counted), swapped(SqliteJournal, "acknowledged", pruned))


def acknowledges_before_the_commit() -> Any:
    """The keeper answers first and writes afterwards: what a crash takes is gone on both sides. That a site keeps what is not called safe hides it: here
    what is acknowledged is."""
    record = LaneKeeper._record

    async def first_the_word(self: LaneKeeper, group: Any) -> Any:
        verdicts = []
        for waiting in group:
            row = await cast(LaneTables, self._tables).site(self._lane, waiting.site)
            verdicts.append(judge(row, None, waiting.sync, waiting.received, epoch=1, single=True))
        for waiting, verdict in zip(group, verdicts, strict=True):
            self._answers.put((waiting, verdict))
        await asyncio.sleep(0.2)
        return await record(self, group)

    return together(swapped(LaneKeeper, "_record", first_the_word), what_is_acknowledged_is_forgotten())


def forgets_before_it_is_acknowledged() -> Any:
    """The agent forgets what it has sent."""
    batch = SqliteJournal.batch

    async def sent_is_gone(self: SqliteJournal, lane: Lane, after: int, limit_bytes: int) -> Any:
        found = await batch(self, lane, after, limit_bytes)
        if found.entries:
            last = found.first_seq - 1 + len(found.entries)

            def forget(cursor: Any) -> None:
                digest = cursor.execute("SELECT digest FROM entry WHERE lane = ? AND seq = ?", (lane.value, last)).fetchone()[0]
                cursor.execute("UPDATE lane SET base_seq = ?, base_digest = ? WHERE name = ?", (last, digest, lane.value))
                cursor.execute("DELETE FROM entry WHERE lane = ? AND seq <= ?", (lane.value, last))

            await self.write(forget)
        return found

    return swapped(SqliteJournal, "batch", sent_is_gone)


def sent_before_it_is_fsynced() -> Any:
    """Commits return before they are on the platter, and entries travel: a power loss takes the last seconds of them. The digests of the lane hide it:
    here a journal that lies behind is trusted."""
    write = SimJournal.write

    async def lazy(self: SimJournal, work: Any) -> Any:
        self.durable.write_lazily()
        return await write(self, work)

    return together(swapped(SimJournal, "write", lazy), a_restored_journal_is_trusted())


MUTANTS = (
    Mutant(seq_from_the_highest_row, "seq from max()+1", "3", ("cut",)),
    Mutant(acknowledges_before_the_commit, "plain: acknowledge before commit", "3", DEATHS),
    Mutant(forgets_before_it_is_acknowledged, "plain: entry deleted before acknowledged", "3", ("cut", "lossy")),
    Mutant(sent_before_it_is_fsynced, "sent before fsync", "3", ("power",)),
)
