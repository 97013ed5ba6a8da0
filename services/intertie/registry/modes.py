"""What people decide about a pool, as calls: its mode, its phase, its downtimes. Each is one transaction with its row of history and its audit row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from intertie.bus import rpc
from intertie.bus.port import Bus
from intertie.bus.rpc import Caller, Serve
from intertie.clock import Clock
from intertie.contracts import endpoints
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.modes import DecideMode, DeclareDowntime, MovePhase, PoolHistory, PoolHistoryRow, PoolQuery, RemoveDowntime
from intertie.contracts.site import Downtime, PoolRecord
from intertie.contracts.usage import MeterSpec, SpecsQuery
from intertie.errors import NotFound
from intertie.ids import PoolName, SiteName, mint
from intertie.lifecycle import PHASE_FORWARD
from intertie.registry.core import modes
from intertie.registry.store import PoolRow, RegistryStore, Rows, known_site
from intertie.trust.rights import require

# Metering answers from one table; longer than its restart nobody waits at a prompt.
ASK_S = 5.0

Specs = Callable[[SiteName], Awaitable[Sequence[MeterSpec]]]
"""The agreements of a site, of metering."""


def specs_of(bus: Bus, claims: Callable[[], str]) -> Specs:
    """`Specs` asked of metering."""

    async def ask(site: SiteName) -> Sequence[MeterSpec]:
        reply = await rpc.call(bus, endpoints.SPECS, SpecsQuery(party=site), claims=claims(), timeout_s=ASK_S)
        return reply.specs

    return ask


class Modes:
    """The calls. Any copy of the service may answer them."""

    def __init__(self, store: RegistryStore, clock: Clock, specs: Specs) -> None:
        self._store, self._clock, self._specs = store, clock, specs

    def handlers(self) -> Mapping[Endpoint[Any, Any], Serve]:
        return {
            endpoints.DECIDE_MODE: self.decide,
            endpoints.MOVE_PHASE: self.move,
            endpoints.DECLARE_DOWNTIME: self.declare_downtime,
            endpoints.REMOVE_DOWNTIME: self.remove_downtime,
            endpoints.POOL_HISTORY: self.history,
        }

    async def decide(self, request: DecideMode, caller: Caller) -> PoolRecord:
        require(caller.claims, "pool.mode", site=request.site)
        now, by = self._clock.now(), caller.claims.name
        async with self._store.rows() as rows:
            row = await _pool(rows, request.site, request.pool)
            record = modes.decide(row.record, request, by=by, now=now)
            await self._keep(rows, row, record, PoolHistoryRow(number=0, at=now, by=by, decision=record.decision))
            await rows.tx.audit(
                actor=caller.claims.sub,
                action="pool.mode",
                target=f"{request.site}/{request.pool}",
                reason=f"{request.mode}: {request.reason}",
            )
            return record

    async def move(self, request: MovePhase, caller: Caller) -> PoolRecord:
        require(caller.claims, "pool.phase", site=request.site)
        now, claims = self._clock.now(), caller.claims
        # Asked before the rows are locked: another service may take seconds.
        forward = any(after is request.phase for _, after in PHASE_FORWARD)
        specs = await self._specs(request.site) if forward else []
        async with self._store.rows() as rows:
            site = await known_site(rows, request.site)
            row = await _pool(rows, request.site, request.pool)
            own = claims.site == request.site or claims.name == site.owner
            record, move = modes.moved(row.record, request, own=own, spec=modes.agreed_spec(specs, row.record, now=now))
            await self._keep(rows, row, record, PoolHistoryRow(number=0, at=now, by=claims.name, move=move))
            await rows.tx.audit(
                actor=claims.sub,
                action="pool.phase",
                target=f"{request.site}/{request.pool}",
                reason=f"{move.before} → {move.after}: {request.reason}",
            )
            return record

    async def declare_downtime(self, request: DeclareDowntime, caller: Caller) -> PoolRecord:
        require(caller.claims, "pool.downtime", site=request.site)
        now, by, id = self._clock.now(), caller.claims.name, mint("dwn")
        async with self._store.rows() as rows:
            row = await _pool(rows, request.site, request.pool)
            record = modes.declare_downtime(row.record, request, id=id, by=by, now=now)
            if record is row.record:
                return record
            added = next(one for one in record.downtimes if one.id == id)
            await self._keep(rows, row, record, PoolHistoryRow(number=0, at=now, by=by, downtime=added))
            await self._audit_downtime(rows, caller, record, "pool.downtime", added, request.reason)
            return record

    async def remove_downtime(self, request: RemoveDowntime, caller: Caller) -> PoolRecord:
        require(caller.claims, "pool.downtime", site=request.site)
        now, by = self._clock.now(), caller.claims.name
        async with self._store.rows() as rows:
            row = await _pool(rows, request.site, request.pool)
            record, found = modes.remove_downtime(row.record, request.id, now=now)
            await self._keep(rows, row, record, PoolHistoryRow(number=0, at=now, by=by, downtime=found, removed=True))
            await self._audit_downtime(rows, caller, record, "pool.downtime_removed", found, found.reason)
            return record

    async def _audit_downtime(self, rows: Rows, caller: Caller, record: PoolRecord, action: str, one: Downtime, reason: str) -> None:
        window = f"{one.id} {one.start.isoformat()} – {one.end.isoformat()}"
        await rows.tx.audit(actor=caller.claims.sub, action=action, target=f"{record.site}/{record.pool}", reason=f"{window}: {reason}")

    async def history(self, query: PoolQuery, caller: Caller) -> PoolHistory:
        require(caller.claims, "pool.history", site=query.site)
        async with self._store.rows() as rows:
            row = await _pool(rows, query.site, query.pool)
            return PoolHistory(record=row.record, rows=await rows.decisions(query.site, query.pool, query.limit))

    async def _keep(self, rows: Rows, row: PoolRow, record: PoolRecord, line: PoolHistoryRow) -> None:
        await rows.add_decision(record.site, record.pool, line)
        await self._store.save_pool(rows, row, record, now=self._clock.now())


async def _pool(rows: Rows, site: SiteName, pool: PoolName) -> PoolRow:
    await known_site(rows, site)
    found = next((row for row in await rows.pools(site) if row.record.pool == pool), None)
    if found is None:
        raise NotFound("registry.pool_unknown", f"site {site} has no pool {pool}", next_step=f"intertie site show {site}")
    return found
