"""Proof of pools at the registry: probes taken from the lane, drift judged by the leader, both shown with their numbers.

A probe counts if the site's key, as identity knows it, signed it for that site and pool. What differs opens one incident per pool, which is over when
nothing differs any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from typing import Any, NoReturn, Protocol

import msgspec

from intertie.bus.rpc import Caller, Serve
from intertie.clock import Clock
from intertie.contracts import endpoints
from intertie.contracts.base import decode, encode
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.incident import ReportIncident, Severity
from intertie.contracts.link import ProbeTold, Sealed
from intertie.contracts.observed import Drift
from intertie.contracts.probe import PoolProof, ProbeOutcome, ProbeReport, ProofsQuery, ProofsReply
from intertie.contracts.site import PoolRecord, SitesQuery
from intertie.errors import Refused, Stale, Unavailable
from intertie.ids import PoolName, SiteName
from intertie.lane.tables import LaneEntry
from intertie.observe import log
from intertie.registry.core import proof
from intertie.registry.memory import MemoryRegistryStore
from intertie.registry.pg import PgRegistryStore, Q
from intertie.registry.store import Mark, RegistryStore
from intertie.store import StoreTx, Tx
from intertie.trust.rights import not_found, scope
from intertie.trust.seal import open_seal

LOG = log.get("registry.proof")

ROLE = "proofs"
# Hardware changes in days; a look is a query of all pools.
LOOK_S = 10.0
# A year of days, and the asked-for ones between.
KEPT_PROBES = 400
# Probes that the drift of measures is judged by.
TREND = 31


class ProofRows(Protocol):
    """One transaction's view."""

    @property
    def tx(self) -> StoreTx: ...

    async def add(self, report: ProbeReport, sealed: Sealed, now: datetime) -> None:
        """Once, however often it is told; the oldest beyond the kept go."""
        ...

    async def probes(self, site: SiteName, pool: PoolName, limit: int) -> list[ProbeReport]:
        """Newest first."""
        ...

    async def passed(self, site: SiteName, pool: PoolName) -> tuple[ProbeReport, datetime] | None:
        """The last that passed, and when it was received (the hub's clock)."""
        ...

    async def drift(self, site: SiteName, pool: PoolName) -> list[Drift]: ...

    async def save_drift(self, site: SiteName, pool: PoolName, drift: Sequence[Drift], now: datetime) -> None: ...


class ProofStore(Protocol):
    def proofs(self, *, read_only: bool = False) -> AbstractAsyncContextManager[ProofRows]: ...


class Proofs:
    """One copy of the service's part. `run` judges drift while this copy leads."""

    def __init__(
        self,
        store: ProofStore,
        registry: RegistryStore,
        clock: Clock,
        *,
        site_key: Callable[[SiteName], Awaitable[str]],
        max_age_days: int = 0,
        beat_s: float = 1.0,
    ) -> None:
        """site_key: the public key that identity keeps for a site; empty if it knows none. max_age_days: how old a proof may be; 0: none is asked for."""
        self._store, self._registry, self._clock, self._site_key = store, registry, clock, site_key
        self._max_age_days, self._look_s = max_age_days, LOOK_S * beat_s

    def handlers(self) -> Mapping[Endpoint[Any, Any], Serve]:
        return {endpoints.PROOFS: self.proofs}

    async def proofs(self, query: ProofsQuery, caller: Caller) -> ProofsReply:
        if not scope(caller.claims, "site.read").covers(site=query.site):
            raise not_found()
        _, pools = await self._registry.sites(SitesQuery(site=query.site))
        told = []
        async with self._store.proofs(read_only=True) as rows:
            for record in pools:
                if query.pool in (None, record.pool):
                    trend = await rows.probes(record.site, record.pool, query.limit)
                    passed = await rows.passed(record.site, record.pool)
                    told.append(
                        PoolProof(
                            site=record.site,
                            pool=record.pool,
                            last=trend[0] if trend else None,
                            passed_at=passed[0].at if passed is not None else None,
                            trend=trend,
                            drift=await rows.drift(record.site, record.pool),
                        )
                    )
        return ProofsReply(pools=told)

    # --- the lane ---

    async def told(self, entry: LaneEntry, said: ProbeTold, mark: Mark) -> None:
        """A probe, in one transaction with its mark. One whose seal does not hold is reported and counts for nothing."""
        key = await self._site_key(entry.site)
        report: ProbeReport | None = None
        try:
            report = open_seal(said.sealed, key, ProbeReport)
            if (report.site, report.pool) != (entry.site, said.pool):
                raise Refused("seal.other", f"the seal is of {report.site}/{report.pool}, the entry of {entry.site}/{said.pool}")
        except Refused as err:
            LOG.warning("a probe is not the site's own word", site=entry.site, code=err.code)
            async with self._store.proofs() as rows:
                await mark(rows.tx)
                await rows.tx.fault(_not_signed(entry.site, err))
            return
        async with self._store.proofs() as rows:
            await mark(rows.tx)
            await rows.add(report, said.sealed, self._clock.now())
            if (incident := proof.probed(report)) is not None:
                await rows.tx.fault(incident)

    # --- the leader ---

    async def run(self) -> NoReturn:
        while True:
            try:
                async with self._registry.leading(ROLE):
                    while True:
                        await self.look()
                        await asyncio.sleep(self._look_s)
            except (Unavailable, Stale) as err:
                LOG.warning("drift is judged later", code=err.code, text=err.text)
                await asyncio.sleep(self._look_s)

    async def look(self) -> None:
        """Every pool once; told where something began to differ, differs otherwise, or differs no more."""
        _, pools = await self._registry.sites(SitesQuery())
        for record in pools:
            await self._look_at(record)

    async def _look_at(self, record: PoolRecord) -> None:
        async with self._store.proofs(read_only=True) as rows:
            before = await rows.drift(record.site, record.pool)
            probes = await rows.probes(record.site, record.pool, TREND)
            passed = await rows.passed(record.site, record.pool)
        found = proof.drift(record, probes)
        why = proof.unproven(probes, passed[1] if passed else None, now=self._clock.now(), max_age_days=self._max_age_days)
        if why != record.unproven:
            await self._judged(record, why)
        if found == before:
            return
        async with self._store.proofs() as rows:
            await rows.save_drift(record.site, record.pool, found, self._clock.now())
            await rows.tx.fault(proof.drifted(record.site, record.pool, found))
        LOG.info("a pool's drift changed", site=record.site, pool=record.pool, drift=[one.what for one in found])

    async def _judged(self, record: PoolRecord, why: str) -> None:
        """The pool's record says so; it is told with the leader's next beat."""
        async with self._registry.rows(reserved=True) as rows:
            for row in await rows.pools(record.site):
                if row.record.pool == record.pool and row.record.unproven != why:
                    after = msgspec.structs.replace(row.record, unproven=why, version=row.record.version + 1)
                    await rows.save_pool(msgspec.structs.replace(row, record=after))
        LOG.info("a pool's proof changed", site=record.site, pool=record.pool, unproven=why)


def _not_signed(site: SiteName, err: Refused) -> ReportIncident:
    return ReportIncident(
        key=f"registry.probe_seal/{site}",
        kind="registry.probe_seal",
        severity=Severity.WARNING,
        title=f"A probe of site {site} does not carry the site's signature",
        text=f"{err.text} ({err.code}). It counts for nothing.",
        site=site,
    )


class PgProofs:
    """`ProofStore` in the registry's schema."""

    def __init__(self, store: PgRegistryStore) -> None:
        self._store = store

    @asynccontextmanager
    async def proofs(self, *, read_only: bool = False) -> AsyncIterator[ProofRows]:
        async with self._store.db.transaction(reserved=not read_only, read_only=read_only) as tx:
            yield PgProofRows(tx)


class PgProofRows:
    """`ProofRows` of one transaction."""

    def __init__(self, tx: Tx) -> None:
        self.tx = tx

    async def add(self, report: ProbeReport, sealed: Sealed, now: datetime) -> None:
        await self.tx.run(Q.probe_add, report.site, report.pool, report.probe, encode(report), encode(sealed), now)
        await self.tx.run(Q.probes_trim, report.site, report.pool, KEPT_PROBES)

    async def probes(self, site: SiteName, pool: PoolName, limit: int) -> list[ProbeReport]:
        rows = await self.tx.all(Q.probes_find, site, pool, limit)
        return [decode(row["report"], ProbeReport, what="stored probe") for row in rows]

    async def passed(self, site: SiteName, pool: PoolName) -> tuple[ProbeReport, datetime] | None:
        row = await self.tx.one(Q.probe_passed, site, pool)
        return None if row is None else (decode(row["report"], ProbeReport, what="stored probe"), row["received_at"])

    async def drift(self, site: SiteName, pool: PoolName) -> list[Drift]:
        row = await self.tx.one(Q.drift_load, site, pool)
        return [] if row is None else decode(row["drift"], list[Drift], what="stored drift")

    async def save_drift(self, site: SiteName, pool: PoolName, drift: Sequence[Drift], now: datetime) -> None:
        await self.tx.run(Q.drift_save, site, pool, encode(list(drift)), now)


class MemoryProofs:
    """`ProofStore` in memory, beside a twin of the registry; rows in the order in which they came."""

    def __init__(self, store: MemoryRegistryStore) -> None:
        self._store = store
        self.reports: dict[tuple[SiteName, PoolName], list[tuple[ProbeReport, datetime]]] = {}
        self.drifts: dict[tuple[SiteName, PoolName], list[Drift]] = {}

    @asynccontextmanager
    async def proofs(self, *, read_only: bool = False) -> AsyncIterator[ProofRows]:
        before = {key: list(some) for key, some in self.reports.items()}, dict(self.drifts)
        try:
            async with self._store.rows() as rows:
                yield MemoryProofRows(self, rows.tx)
        except BaseException:
            self.reports, self.drifts = before
            raise


class MemoryProofRows:
    """`ProofRows` over dictionaries."""

    def __init__(self, store: MemoryProofs, tx: StoreTx) -> None:
        self._store, self.tx = store, tx

    async def add(self, report: ProbeReport, sealed: Sealed, now: datetime) -> None:
        kept = self._store.reports.setdefault((report.site, report.pool), [])
        if all(other.probe != report.probe for other, _ in kept):
            kept.append((report, now))
            del kept[:-KEPT_PROBES]

    async def probes(self, site: SiteName, pool: PoolName, limit: int) -> list[ProbeReport]:
        return [report for report, _ in self._store.reports.get((site, pool), [])[::-1][:limit]]

    async def passed(self, site: SiteName, pool: PoolName) -> tuple[ProbeReport, datetime] | None:
        return next((one for one in self._store.reports.get((site, pool), [])[::-1] if one[0].outcome is ProbeOutcome.PASSED), None)

    async def drift(self, site: SiteName, pool: PoolName) -> list[Drift]:
        return self._store.drifts.get((site, pool), [])

    async def save_drift(self, site: SiteName, pool: PoolName, drift: Sequence[Drift], now: datetime) -> None:
        self._store.drifts[(site, pool)] = list(drift)
