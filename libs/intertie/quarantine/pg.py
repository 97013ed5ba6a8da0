"""A keeper's quarantine on PostgreSQL, in the tables that every service has."""

from __future__ import annotations

from intertie.contracts.link import Lane
from intertie.contracts.quarantine import QuarantinedEntry, Reinterpret
from intertie.ids import JournalId, SiteName
from intertie.quarantine import kind_of
from intertie.store import Database, load_queries

Q = load_queries("intertie.quarantine")


class PgQuarantine:
    """`QuarantineStore` of one service."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def entries(self, lane: Lane, site: SiteName | None, limit: int) -> tuple[list[QuarantinedEntry], int]:
        async with self._db.transaction(read_only=True) as tx:
            rows = await tx.all(Q.quarantine_read, lane, site, limit)
            counted = await tx.one(Q.quarantine_count, lane, site)
        assert counted is not None, "aggregates answer with one row"
        entries = [
            QuarantinedEntry(
                site=SiteName(row["site"]),
                journal=JournalId(row["journal"]),
                seq=row["seq"],
                kind=kind_of(row["raw"]),
                error=row["error"],
                size=len(row["raw"]),
                at=row["at"],
            )
            for row in rows
        ]
        return entries, counted["total"]

    async def reopen(self, lane: Lane, ask: Reinterpret, who: str) -> int:
        async with self._db.transaction() as tx:
            reopened = await tx.run(Q.quarantine_reopen, lane, ask.site, ask.journal, ask.seq)
            if reopened:
                which = f"/{ask.journal}/{ask.seq}" if ask.journal else f": {reopened} entries"
                await tx.audit(actor=who, action="quarantine.retry", target=f"{ask.site}/{lane}{which}", reason=ask.reason)
        return reopened
