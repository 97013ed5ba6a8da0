"""Where drills lie: rows beside the registry's own, in the same transaction; PostgreSQL and the twin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import msgspec

from intertie.contracts.base import decode, encode
from intertie.contracts.drill import DrillConsent, DrillEvidence, DrillRecord, DrillSignature, SiteConsent, SiteDrill
from intertie.ids import SiteName
from intertie.registry.core.drill import OPEN
from intertie.registry.memory import MemoryRegistryStore
from intertie.registry.pg import PgRegistryStore, PgRows, Q
from intertie.registry.store import Rows
from intertie.store import Tx


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The site's account with its signature."""

    report: SiteDrill
    signature: DrillSignature


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """All that is kept of one drill."""

    record: DrillRecord
    report: Report | None = None
    evidence: DrillEvidence | None = None


class DrillRows(Protocol):
    """One transaction's view. What is read by name stays locked until its end, save in a read-only one."""

    @property
    def rows(self) -> Rows:
        """The registry's own, in the same transaction."""
        ...

    async def drill(self, id: str) -> Kept | None: ...

    async def save(self, kept: Kept) -> None: ...

    async def open_drills(self) -> list[Kept]: ...

    async def find(self, site: SiteName | None, limit: int) -> list[DrillRecord]:
        """Newest first."""
        ...

    async def consent(self, site: SiteName) -> DrillConsent | None: ...

    async def save_consent(self, site: SiteName, consent: DrillConsent) -> None: ...

    async def consents(self, site: SiteName | None) -> list[SiteConsent]: ...


class DrillStore(Protocol):
    first_version: int
    """Of a drill that is new."""

    async def lift_versions(self, first: int) -> None:
        """No entity has a version below `first` from here on (`store.first_version`), and what is new begins with it; nothing else changes."""
        ...

    def drills(self, *, read_only: bool = False) -> AbstractAsyncContextManager[DrillRows]: ...


class PgDrills:
    """`DrillStore` in the registry's schema."""

    def __init__(self, store: PgRegistryStore) -> None:
        self._store = store
        self.first_version = 1

    async def lift_versions(self, first: int) -> None:
        self.first_version = first
        if first > 1:
            async with self._store.db.transaction() as tx:
                await tx.run(Q.drill_versions_lift, first)

    @asynccontextmanager
    async def drills(self, *, read_only: bool = False) -> AsyncIterator[DrillRows]:
        async with self._store.db.transaction(read_only=read_only) as tx:
            yield PgDrillRows(tx, locking=not read_only)


class PgDrillRows:
    """`DrillRows` of one transaction."""

    def __init__(self, tx: Tx, *, locking: bool) -> None:
        self._tx, self._locking = tx, locking
        self._rows = PgRows(tx)

    @property
    def rows(self) -> Rows:
        return self._rows

    async def drill(self, id: str) -> Kept | None:
        row = await self._tx.one(Q.drill_lock if self._locking else Q.drill_load, id)
        return None if row is None else _kept(row["record"], row["report"], row["evidence"])

    async def save(self, kept: Kept) -> None:
        record = kept.record
        report = encode(kept.report) if kept.report is not None else None
        evidence = encode(kept.evidence) if kept.evidence is not None else None
        await self._tx.run(Q.drill_save, record.drill, record.site, encode(record), record.asked_at, report, evidence)

    async def open_drills(self) -> list[Kept]:
        return [_kept(row["record"], row["report"], row["evidence"]) for row in await self._tx.all(Q.drills_open)]

    async def find(self, site: SiteName | None, limit: int) -> list[DrillRecord]:
        return [decode(row["record"], DrillRecord) for row in await self._tx.all(Q.drills_find, site, limit)]

    async def consent(self, site: SiteName) -> DrillConsent | None:
        row = await self._tx.one(Q.consent_load, site)
        return None if row is None else decode(row["consent"], DrillConsent)

    async def save_consent(self, site: SiteName, consent: DrillConsent) -> None:
        await self._tx.run(Q.consent_save, site, encode(consent))

    async def consents(self, site: SiteName | None) -> list[SiteConsent]:
        rows = await self._tx.all(Q.consents, site)
        return [SiteConsent(site=SiteName(row["site"]), consent=decode(row["consent"], DrillConsent)) for row in rows]


def _kept(record: str, report: str | None, evidence: str | None) -> Kept:
    return Kept(
        record=decode(record, DrillRecord),
        report=decode(report, Report) if report is not None else None,
        evidence=decode(evidence, DrillEvidence) if evidence is not None else None,
    )


class MemoryDrills:
    """`DrillStore` in memory, beside a twin of the registry."""

    def __init__(self, store: MemoryRegistryStore) -> None:
        self._store = store
        self.kept: dict[str, Kept] = {}
        self.words: dict[SiteName, DrillConsent] = {}
        self.first_version = 1

    async def lift_versions(self, first: int) -> None:
        self.first_version = first
        for id, kept in self.kept.items():
            lifted = msgspec.structs.replace(kept.record, version=max(kept.record.version, first))
            self.kept[id] = msgspec.structs.replace(kept, record=lifted)

    @asynccontextmanager
    async def drills(self, *, read_only: bool = False) -> AsyncIterator[DrillRows]:
        before = dict(self.kept), dict(self.words)
        try:
            async with self._store.rows() as rows:
                yield MemoryDrillRows(self, rows)
        except BaseException:
            self.kept, self.words = before
            raise


class MemoryDrillRows:
    """`DrillRows` over dictionaries."""

    def __init__(self, store: MemoryDrills, rows: Rows) -> None:
        self._store, self._rows = store, rows

    @property
    def rows(self) -> Rows:
        return self._rows

    async def drill(self, id: str) -> Kept | None:
        return self._store.kept.get(id)

    async def save(self, kept: Kept) -> None:
        others = [k for k in self._store.kept.values() if k.record.state in OPEN and k.record.drill != kept.record.drill]
        assert not others or kept.record.state not in OPEN, "the database refuses a second open drill"
        self._store.kept[kept.record.drill] = kept

    async def open_drills(self) -> list[Kept]:
        return [kept for kept in self._store.kept.values() if kept.record.state in OPEN]

    async def find(self, site: SiteName | None, limit: int) -> list[DrillRecord]:
        found = [kept.record for kept in self._store.kept.values() if site in (None, kept.record.site)]
        return sorted(found, key=lambda record: record.asked_at, reverse=True)[:limit]

    async def consent(self, site: SiteName) -> DrillConsent | None:
        return self._store.words.get(site)

    async def save_consent(self, site: SiteName, consent: DrillConsent) -> None:
        self._store.words[site] = consent

    async def consents(self, site: SiteName | None) -> list[SiteConsent]:
        words: Sequence[tuple[SiteName, DrillConsent]] = sorted(self._store.words.items())
        return [SiteConsent(site=name, consent=consent) for name, consent in words if site in (None, name)]
