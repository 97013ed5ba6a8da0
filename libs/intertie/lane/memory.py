"""The lane tables in memory, on a service's `MemoryStore`: its transactions undo their marks as PostgreSQL would. The same suite as `pg`.

The rows live in the store's own attributes (`lane_sites`, `lane_entries`, `lane_open`, `lane_quarantine`), where its rollback sees them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

from intertie.contracts.incident import ReportIncident
from intertie.contracts.link import Lane
from intertie.errors import Unavailable
from intertie.ids import Digest, JournalId, SiteName
from intertie.lane.tables import LaneEntry, out_of_turn
from intertie.link.keeper import NewEntry, SiteRow
from intertie.store import MemoryStore, StoreTx

SiteKey = tuple[Lane, SiteName]
EntryKey = tuple[Lane, SiteName, JournalId, int]


class MemoryTurn:
    """`Turn` in an open transaction of the twin."""

    def __init__(self, tables: MemoryLaneTables, tx: MemoryStore, lane: Lane, sites: Sequence[SiteName]) -> None:
        self.busy = frozenset(site for site in sites if (lane, site) in tables.held)
        self.rows = {site: row for site in sites if site not in self.busy and (row := tables.row(lane, site)) is not None}
        self._tables, self._tx, self._lane = tables, tx, lane

    async def digest(self, site: SiteName, journal: JournalId, seq: int) -> Digest | None:
        entry = self._tables.entries.get((self._lane, site, journal, seq))
        return entry.digest if entry else None

    async def ends(self, site: SiteName, journals: Sequence[JournalId]) -> Mapping[JournalId, int]:
        found = dict[JournalId, int]()
        for lane, name, journal, seq in self._tables.entries:
            if (lane, name) == (self._lane, site) and journal in journals:
                found[journal] = max(found.get(journal, 0), seq)
        return found

    async def save(self, rows: Sequence[SiteRow], entries: Mapping[SiteName, Sequence[NewEntry]], faults: Sequence[ReportIncident]) -> None:
        for row in rows:
            self._tables.sites_kept[(self._lane, row.site)] = row
            for new in entries.get(row.site, ()):
                key = (self._lane, row.site, row.journal, new.seq)
                assert key not in self._tables.entries, f"entry {key} is on disk already"
                self._tables.entries[key] = LaneEntry(row.site, self._lane, row.journal, new.seq, new.digest, new.raw, row.last_heard)
                self._tables.open.add(key)
        for fault in faults:
            await self._tx.fault(fault)


class MemoryLaneTables:
    """`LaneTables` of a twin. `away`: the store does not answer. `held`: rows that some other copy of the keeper holds."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.away = False
        self.held: set[SiteKey] = set()
        self.commits = 0
        for name, empty in (("lane_sites", {}), ("lane_entries", {}), ("lane_open", set()), ("lane_quarantine", {})):
            vars(store).setdefault(name, empty)

    @property
    def sites_kept(self) -> dict[SiteKey, SiteRow]:
        return cast(dict[SiteKey, SiteRow], vars(self._store)["lane_sites"])

    @property
    def entries(self) -> dict[EntryKey, LaneEntry]:
        return cast(dict[EntryKey, LaneEntry], vars(self._store)["lane_entries"])

    @property
    def open(self) -> set[EntryKey]:
        """Neither interpreted nor in quarantine."""
        return cast(set[EntryKey], vars(self._store)["lane_open"])

    @property
    def quarantined(self) -> dict[EntryKey, str]:
        """Why each was set aside."""
        return cast(dict[EntryKey, str], vars(self._store)["lane_quarantine"])

    def row(self, lane: Lane, site: SiteName) -> SiteRow | None:
        """The row with its computed columns."""
        kept = self.sites_kept.get((lane, site))
        if kept is None:
            return None
        still = [key[3] for key in self.open if key[:3] == (lane, site, kept.journal)]
        aside = sum(1 for key in self.quarantined if key[:2] == (lane, site))
        return replace(kept, interpreted_through=min(still) - 1 if still else kept.ack_through, quarantined=aside)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[MemoryStore]:
        self._answer()
        async with self._store.transaction() as tx:
            yield tx
            self._answer()

    def _answer(self) -> None:
        if self.away:
            raise Unavailable("store.unavailable", "the store is away")

    @asynccontextmanager
    async def turn(self, lane: Lane, sites: Sequence[SiteName]) -> AsyncIterator[MemoryTurn]:
        async with self._transaction() as tx:
            yield MemoryTurn(self, tx, lane, sites)
        self.commits += 1

    async def beat(self, lane: Lane, rows: Sequence[tuple[SiteRow, SiteRow]]) -> frozenset[SiteName]:
        async with self._transaction():
            free = [
                after
                for before, after in rows
                if (lane, before.site) not in self.held
                and (kept := self.sites_kept.get((lane, before.site))) is not None
                and (kept.heard, kept.last_nonce, kept.session, kept.journal, kept.state)
                == (before.heard, before.last_nonce, before.session, before.journal, before.state)
            ]
            for after in free:
                self.sites_kept[(lane, after.site)] = after
        self.commits += 1
        return frozenset(after.site for after in free)

    async def site(self, lane: Lane, site: SiteName) -> SiteRow | None:
        self._answer()
        return self.row(lane, site)

    async def sites(self, lane: Lane) -> Sequence[SiteRow]:
        self._answer()
        names = sorted(site for on, site in self.sites_kept if on is lane)
        return [row for name in names if (row := self.row(lane, name)) is not None]

    async def highest_epoch_told(self) -> int:
        self._answer()
        return max((row.epoch_told for row in self.sites_kept.values()), default=0)

    async def sites_with_open_entries(self, lane: Lane) -> Sequence[SiteName]:
        self._answer()
        return sorted({key[1] for key in self.open if key[0] is lane})

    async def open_entries(self, lane: Lane, site: SiteName, limit: int) -> Sequence[LaneEntry]:
        self._answer()
        kept = self.sites_kept.get((lane, site))
        current = kept.journal if kept else None
        keys = sorted((key for key in self.open if key[:2] == (lane, site)), key=lambda key: (key[2] == current, key))
        return [self.entries[key] for key in keys[:limit]]

    async def mark_interpreted(self, tx: StoreTx, entry: LaneEntry) -> None:
        assert tx is self._store, "a transaction of another store cannot mark an entry here"
        key = (entry.lane, entry.site, entry.journal, entry.seq)
        if key not in self.open or any(other[:3] == key[:3] and other[3] < entry.seq for other in self.open):
            raise out_of_turn(entry)
        self.open.remove(key)

    async def quarantine(self, entry: LaneEntry, error: str, report: ReportIncident) -> None:
        async with self._transaction() as tx:
            await self.mark_interpreted(tx, entry)
            self.quarantined[(entry.lane, entry.site, entry.journal, entry.seq)] = error
            await tx.fault(report)

    async def read_again(self, tx: StoreTx, lane: Lane, site: SiteName, code: str) -> int:
        assert tx is self._store, "a transaction of another store cannot open an entry here"
        again = [key for key, error in self.quarantined.items() if key[:2] == (lane, site) and error.startswith(f"{code}:")]
        for key in again:
            del self.quarantined[key]
            self.open.add(key)
        return len(again)

    async def let_go(self, tx: StoreTx, lane: Lane, site: SiteName, errors: Sequence[str]) -> int:
        assert tx is self._store, "a transaction of another store cannot let an entry go here"
        gone = [key for key, error in self.quarantined.items() if key[:2] == (lane, site) and error in errors]
        for key in gone:
            del self.quarantined[key]
        return len(gone)

    async def report(self, report: ReportIncident) -> None:
        async with self._transaction() as tx:
            await tx.fault(report)
