"""The lane tables on PostgreSQL (`lane_site`, `lane_entry`, `quarantine` of the common migration), through the service's own `Database`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from intertie.contracts.incident import ReportIncident
from intertie.contracts.link import Clocks, Lane, LaneState
from intertie.errors import Stale
from intertie.ids import AttemptId, Digest, JournalId, SessionId, SiteName
from intertie.lane.tables import LaneEntry, out_of_turn
from intertie.link.keeper import NewEntry, SiteRow
from intertie.store import Database, StoreTx, Tx, load_queries

if TYPE_CHECKING:
    import asyncpg

Q = load_queries("intertie.lane")

# A site waits two seconds for its answer; a turn that takes longer answers nobody.
TURN_S = 2.0


class PgTurn:
    """`Turn` in an open transaction."""

    def __init__(self, tx: Tx, lane: Lane, rows: Mapping[SiteName, SiteRow], busy: frozenset[SiteName]) -> None:
        self.rows = rows
        self.busy = busy
        self._tx = tx
        self._lane = lane

    async def digest(self, site: SiteName, journal: JournalId, seq: int) -> Digest | None:
        row = await self._tx.one(Q.lane_digest, site, self._lane, journal, seq)
        return Digest(row["digest"]) if row else None

    async def ends(self, site: SiteName, journals: Sequence[JournalId]) -> Mapping[JournalId, int]:
        rows = await self._tx.all(Q.lane_ends, site, self._lane, list(journals))
        return {JournalId(row["journal"]): row["seq"] for row in rows}

    async def save(self, rows: Sequence[SiteRow], entries: Mapping[SiteName, Sequence[NewEntry]], faults: Sequence[ReportIncident]) -> None:
        by_site = {row.site: row for row in rows}
        new = [row for row in rows if row.site not in self.rows]
        known = [row for row in rows if row.site in self.rows]
        if new and await self._tx.run(Q.lane_rows_insert, self._lane, *_columns(new)) != len(new):
            raise Stale("lane.new_site", "another copy of this keeper met a new site at the same moment")
        if known:
            await self._tx.run(Q.lane_rows_update, self._lane, *_columns(known))
        flat = [(by_site[site], entry) for site, some in entries.items() for entry in some]
        if flat:
            await self._tx.run(
                Q.lane_entries_insert,
                self._lane,
                [row.last_heard for row, _ in flat],
                [row.site for row, _ in flat],
                [row.journal for row, _ in flat],
                [entry.seq for _, entry in flat],
                [entry.digest for _, entry in flat],
                [entry.raw for _, entry in flat],
            )
        for fault in faults:
            await self._tx.fault(fault)


class PgLaneTables:
    """`LaneTables` of one service. Turns use the reserved connections, so that a page of slow queries makes no site look silent."""

    def __init__(self, db: Database) -> None:
        self._db = db

    @asynccontextmanager
    async def turn(self, lane: Lane, sites: Sequence[SiteName]) -> AsyncIterator[PgTurn]:
        async with self._db.transaction(timeout_s=TURN_S, reserved=True) as tx:
            rows = {SiteName(row["site"]): _row(row) for row in await tx.all(Q.lane_rows, lane, list(sites))}
            absent = [site for site in sites if site not in rows]
            busy = frozenset(SiteName(row["site"]) for row in await tx.all(Q.lane_known, lane, absent)) if absent else frozenset[SiteName]()
            yield PgTurn(tx, lane, rows, busy)

    async def beat(self, lane: Lane, rows: Sequence[tuple[SiteRow, SiteRow]]) -> frozenset[SiteName]:
        columns = zip(*(_beat(before, after) for before, after in rows), strict=True)
        async with self._db.statement(timeout_s=TURN_S, reserved=True) as tx:
            kept = await tx.all(Q.lane_beat, lane, *(list(column) for column in columns))
        return frozenset(SiteName(row["site"]) for row in kept)

    async def site(self, lane: Lane, site: SiteName) -> SiteRow | None:
        async with self._db.statement() as tx:
            row = await tx.one(Q.lane_rows_read, lane, site)
            return _row(row) if row else None

    async def sites(self, lane: Lane) -> Sequence[SiteRow]:
        async with self._db.statement() as tx:
            return [_row(row) for row in await tx.all(Q.lane_rows_read, lane, None)]

    async def highest_epoch_told(self) -> int:
        async with self._db.statement() as tx:
            row = await tx.one(Q.lane_epoch_told)
            return int(row["told"]) if row else 0

    async def sites_with_open_entries(self, lane: Lane) -> Sequence[SiteName]:
        async with self._db.statement() as tx:
            return [SiteName(row["site"]) for row in await tx.all(Q.lane_open_sites, lane)]

    async def open_entries(self, lane: Lane, site: SiteName, limit: int) -> Sequence[LaneEntry]:
        async with self._db.statement() as tx:
            return [
                LaneEntry(
                    site=SiteName(row["site"]),
                    lane=Lane(row["lane"]),
                    journal=JournalId(row["journal"]),
                    seq=row["seq"],
                    digest=Digest(row["digest"]),
                    raw=row["raw"],
                    received_at=row["received_at"],
                )
                for row in await tx.all(Q.lane_open_entries, site, lane, limit)
            ]

    async def mark_interpreted(self, tx: StoreTx, entry: LaneEntry) -> None:
        assert isinstance(tx, Tx), "a transaction of another store cannot mark an entry here"
        if await tx.run(Q.lane_mark, entry.site, entry.lane, entry.journal, entry.seq) != 1:
            raise out_of_turn(entry)

    async def quarantine(self, entry: LaneEntry, error: str, report: ReportIncident) -> None:
        async with self._db.transaction() as tx:
            await self.mark_interpreted(tx, entry)
            await tx.run(Q.lane_quarantine, entry.site, entry.lane, entry.journal, entry.seq, entry.raw, error)
            await tx.fault(report)

    async def read_again(self, tx: StoreTx, lane: Lane, site: SiteName, code: str) -> int:
        assert isinstance(tx, Tx), "a transaction of another store cannot open an entry here"
        return await tx.run(Q.lane_read_again, lane, site, code)

    async def let_go(self, tx: StoreTx, lane: Lane, site: SiteName, errors: Sequence[str]) -> int:
        assert isinstance(tx, Tx), "a transaction of another store cannot let an entry go here"
        return await tx.run(Q.lane_let_go, lane, site, list(errors))

    async def report(self, report: ReportIncident) -> None:
        async with self._db.transaction() as tx:
            await tx.fault(report)


def _beat(before: SiteRow, after: SiteRow) -> tuple[object, ...]:
    """In the order of `lane_beat`."""
    assert after.clocks is not None, "a sync names its clocks"
    return (
        after.site,
        before.session,
        before.journal,
        before.heard,
        before.last_nonce,
        after.heard,
        after.last_heard,
        after.last_nonce,
        after.taken_nonce,
        None if after.running is None else " ".join(after.running),
        after.instruction_epoch,
        after.instruction_mark,
        after.settings_revision,
        after.clocks.utc,
        after.clocks.boot_s,
        after.clock_offset_s,
        after.clock_error_s,
        after.epoch_told,
    )


def _columns(rows: Sequence[SiteRow]) -> list[list[object]]:
    """The rows as columns, in the order of `lane_rows_insert` and `lane_rows_update`."""
    return [
        list(column)
        for column in zip(
            *(
                (
                    row.site,
                    row.session,
                    row.journal,
                    row.ack_through,
                    row.digest,
                    row.safe_through,
                    row.interpreted_through,
                    row.heard,
                    row.last_heard,
                    row.last_nonce,
                    row.taken_nonce,
                    row.at_head,
                    None if row.running is None else " ".join(row.running),
                    row.instruction_epoch,
                    row.instruction_mark,
                    row.settings_revision,
                    row.clocks.utc if row.clocks else None,
                    row.clocks.boot_s if row.clocks else None,
                    row.clocks.kernel_boot if row.clocks else "",
                    row.clock_offset_s,
                    row.clock_error_s,
                    row.place,
                    " ".join(one.isoformat() for one in row.moves),
                    row.state,
                    row.state_since,
                    row.epoch_told,
                    row.version,
                )
                for row in rows
            ),
            strict=True,
        )
    ]


def _row(row: asyncpg.Record) -> SiteRow:
    clocks = None
    if row["clocks_utc"] is not None:
        clocks = Clocks(utc=row["clocks_utc"], boot_s=row["clocks_boot_s"], kernel_boot=row["clocks_kernel_boot"])
    return SiteRow(
        site=SiteName(row["site"]),
        lane=Lane(row["lane"]),
        session=SessionId(row["session"]),
        journal=JournalId(row["journal"]),
        ack_through=row["ack_through"],
        digest=Digest(row["digest"]),
        safe_through=row["safe_through"],
        interpreted_through=row["interpreted_through"],
        heard=row["heard"],
        last_heard=row["last_heard"],
        last_nonce=row["last_nonce"],
        taken_nonce=row["taken_nonce"],
        at_head=row["at_head"],
        running=None if row["running"] is None else tuple(AttemptId(one) for one in row["running"]),
        instruction_epoch=row["instruction_epoch"],
        instruction_mark=row["instruction_mark"],
        settings_revision=row["settings_revision"],
        clocks=clocks,
        clock_offset_s=row["clock_offset_s"],
        clock_error_s=row["clock_error_s"],
        quarantined=row["quarantined"],
        place=row["place"],
        moves=tuple(row["moves"]),
        state=LaneState(row["state"]),
        state_since=row["state_since"],
        epoch_told=row["epoch_told"],
        version=row["version"],
    )
