"""Where sites' own accounting lies: sealed parts of days; PostgreSQL, and the twin."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime
from typing import Protocol

from intertie.contracts.accounting import NativeDay
from intertie.contracts.incident import ReportIncident
from intertie.contracts.link import Sealed
from intertie.ids import AttemptId, SiteName
from intertie.metering.memory import MemoryMetering
from intertie.metering.pg import Q
from intertie.metering.store import Mark
from intertie.store import Database


class NativeStore(Protocol):
    async def keep(self, site: SiteName, day: NativeDay, sealed: Sealed, received_at: datetime, mark: Mark) -> None:
        """One part of a reading. Readings of the day before the two newest go: one of these may not be whole yet."""
        ...

    async def days(self, site: SiteName, first: date, last: date) -> list[Sealed]: ...

    async def sites(self, first: date, last: date) -> list[SiteName]:
        """Sites that told anything of these days."""
        ...

    async def attempts(self, site: SiteName, start: datetime, end: datetime, after: str, limit: int) -> Sequence[AttemptId]:
        """Attempts at a site that may have run in [start, end), by id."""
        ...

    async def report(self, found: ReportIncident) -> None:
        """Tell people."""
        ...


class PgNative:
    """`NativeStore` in metering's schema."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def keep(self, site: SiteName, day: NativeDay, sealed: Sealed, received_at: datetime, mark: Mark) -> None:
        where = (site, day.cluster, date.fromisoformat(day.day))
        async with self._db.transaction() as tx:
            if not await mark(tx):
                return
            await tx.run(Q.native_insert, *where, day.read_at, day.part, sealed.payload, sealed.signer, sealed.signature, received_at)
            await tx.run(Q.native_superseded, *where)

    async def days(self, site: SiteName, first: date, last: date) -> list[Sealed]:
        async with self._db.transaction(read_only=True) as tx:
            rows = await tx.all(Q.native_days, site, first, last)
        return [Sealed(payload=row["payload"], signer=row["signer"], signature=row["signature"]) for row in rows]

    async def sites(self, first: date, last: date) -> list[SiteName]:
        async with self._db.transaction(read_only=True) as tx:
            return [SiteName(row["site"]) for row in await tx.all(Q.native_sites, first, last)]

    async def attempts(self, site: SiteName, start: datetime, end: datetime, after: str, limit: int) -> Sequence[AttemptId]:
        async with self._db.transaction(read_only=True) as tx:
            return [AttemptId(row["attempt"]) for row in await tx.all(Q.attempts_of_site, site, start, end, after, limit)]

    async def report(self, found: ReportIncident) -> None:
        async with self._db.transaction() as tx:
            await tx.fault(found)


class MemoryNative:
    """`NativeStore` beside a twin of metering."""

    def __init__(self, metering: MemoryMetering) -> None:
        self._metering = metering
        self.kept: dict[tuple[SiteName, str, str, datetime, int], Sealed] = {}

    async def keep(self, site: SiteName, day: NativeDay, sealed: Sealed, received_at: datetime, mark: Mark) -> None:
        async with self._metering.transaction() as tx:
            if not await mark(tx):
                return
            self.kept.setdefault((site, day.cluster, day.day, day.read_at, day.part), sealed)
            readings = sorted({key[3] for key in self.kept if key[:3] == (site, day.cluster, day.day)})
            for key in [key for key in self.kept if key[:3] == (site, day.cluster, day.day) and key[3] in readings[:-2]]:
                del self.kept[key]

    async def days(self, site: SiteName, first: date, last: date) -> list[Sealed]:
        return [one for key, one in sorted(self.kept.items()) if key[0] == site and first.isoformat() <= key[2] <= last.isoformat()]

    async def sites(self, first: date, last: date) -> list[SiteName]:
        return sorted({key[0] for key in self.kept if first.isoformat() <= key[2] <= last.isoformat()})

    async def attempts(self, site: SiteName, start: datetime, end: datetime, after: str, limit: int) -> Sequence[AttemptId]:
        found = [
            attempt
            for attempt, row in self._metering.attempts.items()
            if row.snapshot is not None
            and row.snapshot.record.site == site
            and row.since
            and row.since < end
            and (row.until is None or row.until >= start)
            and attempt > after
        ]
        return sorted(found)[:limit]

    async def report(self, found: ReportIncident) -> None:
        async with self._metering.transaction() as tx:
            await tx.fault(found)
