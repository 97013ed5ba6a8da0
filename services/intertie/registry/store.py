"""The registry's store: about ten verbs, each one transaction, written once over `Rows`. `pg` and `memory` only say how a row is read and saved.

A verb loads under a lock, asks the core, and saves record, events, audit row and the mark of the lane entry together. Pool events are
coalesced: what the site observes is told at once if nothing was told within the last second, else with the leader's next beat.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Protocol

import msgspec

from intertie.contracts.base import Instant, encode
from intertie.contracts.identity import AuditQuery, AuditRow
from intertie.contracts.link import (
    Inventory,
    JobOfferingsTold,
    JournalOpened,
    Lane,
    LaneState,
    LendingPaused,
    LostRange,
    ProfileDeclared,
    SiteCondition,
)
from intertie.contracts.modes import PoolHistoryRow
from intertie.contracts.site import (
    CordonPool,
    PoolChanged,
    PoolProfile,
    PoolRecord,
    RegisterSite,
    SiteChanged,
    SiteRecord,
    SitesQuery,
)
from intertie.errors import NotFound, Refused
from intertie.ids import DeviceId, PoolName, SiteName
from intertie.link.lost import range_lost
from intertie.registry.core import faults, inventory, job_offerings, modes, profile, shares, site
from intertie.registry.core.freshness import Judgement
from intertie.store import Leader, StoreTx

# A burst of short jobs changes a pool's inventory twice per job; those who plan on it need one picture a second.
TELL_EVERY = timedelta(seconds=1)
# Pools told in one transaction of the leader's beat.
TELL_BATCH = 200
# An event carries a pool whole, devices and all, and has a limit (900 KiB); what was saved must be tellable later, with another freshness too.
POOL_BYTES = 768 * 1024

Mark = Callable[[StoreTx], Awaitable[None]]
"""Marks the lane entry that caused a write, in the write's own transaction."""

RULE = "rule"
"""The actor of what no person asked for."""


class PoolRow(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's record and what was told of it."""

    record: PoolRecord
    told_version: int = 0
    told_at: Instant | None = None


class Rows(Protocol):
    """One transaction's view of the registry's tables. Rows that are read here stay locked until its end."""

    @property
    def tx(self) -> StoreTx: ...

    async def site(self, name: SiteName) -> SiteRecord | None: ...

    async def save_site(self, record: SiteRecord) -> None: ...

    async def doubled(self, name: SiteName) -> list[DeviceId]:
        """Cards of the site that stood in two pools when it last reported."""
        ...

    async def save_doubled(self, name: SiteName, cards: Sequence[DeviceId]) -> None: ...

    async def pools(self, name: SiteName) -> list[PoolRow]: ...

    async def save_pool(self, row: PoolRow) -> None: ...

    async def add_revision(self, record: PoolRecord, *, declared_at: datetime, effective_at: datetime) -> None:
        """Keep a profile's revision with its dates; nothing of it is ever changed."""
        ...

    async def untold(self, limit: int) -> list[PoolRow]:
        """Pools whose record is newer than what was told."""
        ...

    async def find(self, query: SitesQuery) -> tuple[list[SiteRecord], list[PoolRecord]]:
        """Sites and pools by name; the capability is the core's to judge."""
        ...

    async def lift_versions(self, first: int) -> None: ...

    async def add_decision(self, site: SiteName, pool: PoolName, line: PoolHistoryRow) -> None:
        """One more thing that was decided about a pool; its number is given here, and nothing of it is ever changed."""
        ...

    async def decisions(self, site: SiteName, pool: PoolName, limit: int) -> list[PoolHistoryRow]:
        """Newest first."""
        ...


class RegistryStore(ABC):
    """All verbs raise `Unavailable` when the store is away."""

    first_version = 1
    """Of a site or pool that is new."""

    @abstractmethod
    def rows(self, *, reserved: bool = False, read_only: bool = False) -> AbstractAsyncContextManager[Rows]:
        """A transaction."""

    @abstractmethod
    def leading(self, role: str) -> AbstractAsyncContextManager[Leader]: ...

    @abstractmethod
    async def read_audit(self, query: AuditQuery) -> list[AuditRow]: ...

    async def lift_versions(self, first: int) -> None:
        """No entity has a version below `first` from here on (`store.first_version`), and what is new begins with it; nothing else changes."""
        self.first_version = first
        if first > 1:
            async with self.rows() as rows:
                await rows.lift_versions(first)

    async def register(self, request: RegisterSite, *, actor: str, now: datetime) -> SiteRecord:
        """Identity says that a site has joined: idempotent. A vague profile refuses the whole, and nothing is written."""
        async with self.rows() as rows:
            known = await rows.site(request.site)
            record = site.register(known, request, now=now, version=self.first_version)
            if record is not known:
                await rows.save_site(record)
                await rows.tx.emit(SiteChanged(version=record.version, record=record, cause="joined" if known is None else "joined again"))
            changed = [await self._declare(rows, record, declared, by=request.owner, at=now, now=now) for declared in request.pools]
            if record is not known or any(changed):
                await rows.tx.audit(actor=actor, action="site.register", target=request.site)
            return record

    async def declared(self, name: SiteName, entry: ProfileDeclared, *, now: datetime, mark: Mark) -> Refused | None:
        """The owner declared a pool. A refusal is recorded and reported; the revision before stands."""
        async with self.rows(reserved=True) as rows:
            await mark(rows.tx)
            known = await known_site(rows, name)
            try:
                changed = await self._declare(rows, known, entry.profile, by=known.owner, at=entry.at, now=now)
            except Refused as refusal:
                await rows.tx.fault(faults.profile_refused(name, entry.profile, refusal))
                await rows.tx.audit(
                    actor=f"site/{name}",
                    action="pool.declare",
                    target=f"{name}/{entry.profile.pool[:63]}",
                    reason=refusal.text,
                    result=refusal.code,
                )
                return refusal
            if changed:
                await rows.tx.fault(faults.profile_stands(name, entry.profile.pool))
                await rows.tx.audit(actor=f"site/{name}", action="pool.declare", target=f"{name}/{entry.profile.pool}")
            return None

    async def observed(self, name: SiteName, entry: Inventory, *, now: datetime, mark: Mark) -> inventory.Taken:
        """The site's pools hold this. A card in two pools counts once, and is reported when that begins, changes or ends."""
        async with self.rows(reserved=True) as rows:
            await mark(rows.tx)
            known = await known_site(rows, name)
            pools = {row.record.pool: row for row in await rows.pools(known.site)}
            named = shares.named(row.record.profile for row in pools.values())
            taken = inventory.take(entry.pools, {pool: row.record.inventory for pool, row in pools.items()}, named)
            for pool, held in taken.pools.items():
                record = inventory.apply(pools[pool].record, held, at=entry.at)
                if record is not pools[pool].record:
                    await self._save_pool(rows, pools[pool], record, now=now, hurry=False)
            if sorted(taken.doubled) != sorted(await rows.doubled(name)):
                await rows.save_doubled(name, sorted(taken.doubled))
                await rows.tx.fault(faults.device_twice(name, taken.doubled))
            return taken

    async def said_of_itself(self, name: SiteName, entry: LendingPaused | SiteCondition, *, now: datetime, mark: Mark) -> SiteRecord:
        """The owner's red button, or whether the site can take work: told at once, if it is news."""
        async with self.rows(reserved=True) as rows:
            await mark(rows.tx)
            known = await known_site(rows, name)
            if isinstance(entry, SiteCondition):
                return await self._save_site(rows, known, site.conditioned(known, entry))
            after = await self._save_site(rows, known, site.paused(known, entry, now=now))
            if after is not known:
                await rows.tx.audit(
                    actor=f"site/{name}", action="site.pause" if entry.paused else "site.resume", target=name, reason=entry.reason
                )
            return after

    async def offered(self, name: SiteName, entry: JobOfferingsTold, *, now: datetime, mark: Mark) -> job_offerings.Offered:
        """All job offerings of the site as they are now. What is refused is reported, and the others stand."""
        async with self.rows(reserved=True) as rows:
            await mark(rows.tx)
            known = await known_site(rows, name)
            pools = {row.record.pool: row for row in await rows.pools(known.site)}
            found = job_offerings.take(entry.offerings, [row.record for row in pools.values()])
            for record in found.pools:
                await self._save_pool(rows, pools[record.pool], record, now=now, hurry=True)
                said = "; ".join(f"{one.name}: {one.devices} devices, {one.price_per_hour} {one.currency}/h" for one in record.offerings)
                await rows.tx.audit(actor=f"site/{name}", action="offering.declare", target=f"{name}/{record.pool}", reason=said or "none")
            for code in sorted({why.code for why in found.refused.values()}):
                await rows.tx.audit(actor=f"site/{name}", action="offering.declare", target=name, result=code)
            if found.refused or found.pools:
                await rows.tx.fault(job_offerings.report(name, found.refused))
            return found

    async def noted(self, name: SiteName, entry: JournalOpened | LostRange, *, mark: Mark) -> None:
        """A new journal, which says again what the old one held: what was told stands until then. A range that nobody has is a fault."""
        async with self.rows(reserved=True) as rows:
            await mark(rows.tx)
            if isinstance(entry, LostRange):
                await rows.tx.fault(range_lost(name, Lane.REGISTRY, entry, "The site says anew what it holds."))
                await rows.tx.audit(
                    actor=f"site/{name}", action="site.lost_range", target=name, reason=f"{entry.journal} {entry.first}-{entry.last}"
                )
            else:
                await rows.tx.audit(actor=f"site/{name}", action="site.journal_opened", target=name, reason=entry.why)

    async def left(self, name: SiteName, *, at: datetime, actor: str) -> SiteRecord:
        """Identity says that a site has left: idempotent."""
        async with self.rows() as rows:
            known = await known_site(rows, name)
            after = await self._save_site(rows, known, site.left(known, at=at))
            if after is not known:
                await rows.tx.audit(actor=actor, action="site.left", target=name)
            return after

    async def by_rule(self, name: SiteName, state: LaneState | None, *, leader: Leader, now: datetime) -> SiteRecord | None:
        """The leader's look at what ends by itself: a pause whose time has come, a lane that stands or moves again."""
        async with self.rows(reserved=True) as rows:
            await rows.tx.fence(leader)
            known = await rows.site(name)
            if known is None:
                return None
            return await self._save_site(rows, known, site.ruled(known, state, now=now))

    async def _save_site(self, rows: Rows, known: SiteRecord, after: SiteRecord) -> SiteRecord:
        if after is not known:
            await rows.save_site(after)
            await rows.tx.emit(SiteChanged(version=after.version, record=after, cause=site.why(known, after)))
        return after

    async def heard(
        self, name: SiteName, judged: Judgement, *, last_heard: datetime | None, clock_offset_s: float | None, leader: Leader, now: datetime
    ) -> SiteRecord | None:
        """The leader's judgement of a site; None if the site is not known. Written and told only if it is news."""
        async with self.rows(reserved=True) as rows:
            await rows.tx.fence(leader)
            known = await rows.site(name)
            if known is None:
                return None
            record = site.heard(known, judged, last_heard=last_heard, clock_offset_s=clock_offset_s)
            if record is known:
                return known
            await rows.save_site(record)
            await rows.tx.emit(SiteChanged(version=record.version, record=record, cause=site.why(known, record)))
            for row in await rows.pools(name):
                fresh = site.pool_heard(row.record, record.freshness, last_heard)
                if fresh is not row.record:
                    await self._save_pool(rows, row, fresh, now=now, hurry=True)
            return record

    async def tell(self, *, leader: Leader, now: datetime) -> int:
        """Tell the pools that changed since they were last told; how many."""
        async with self.rows() as rows:
            if not await rows.untold(1):
                return 0  # Most beats: the fence is a row lock, and a lock alone is a commit that is written and synced.
            await rows.tx.fence(leader)
            waiting = await rows.untold(TELL_BATCH)
            for row in waiting:
                await self._save_pool(rows, row, row.record, now=now, hurry=True)
            return len(waiting)

    async def cordon(self, request: CordonPool, *, actor: str, now: datetime) -> list[PoolRecord]:
        """No new work for a pool, or for all of a site's; `NotFound` if there is none such."""
        async with self.rows() as rows:
            await known_site(rows, request.site)
            pools = [row for row in await rows.pools(request.site) if request.pool in (None, row.record.pool)]
            if not pools:
                raise NotFound("registry.pool_unknown", f"site {request.site} has no pool {request.pool or 'at all'}")
            after = []
            for row in pools:
                record = site.cordon(row.record, request)
                after.append(record)
                if record is not row.record:
                    await self._save_pool(rows, row, record, now=now, hurry=True)
            await rows.tx.audit(
                actor=actor,
                action="site.drain" if request.on and request.drain else "site.cordon" if request.on else "site.uncordon",
                target=f"{request.site}/{request.pool}" if request.pool else request.site,
                reason=request.reason,
            )
            return after

    async def sites(self, query: SitesQuery) -> tuple[list[SiteRecord], list[PoolRecord]]:
        """Sites and their pools. With a capability asked for: the pools that have it, and the sites of these."""
        async with self.rows(read_only=True) as rows:
            sites, pools = await rows.find(query)
        if query.accelerator is None and query.task_type is None:
            return sites, pools
        fitting = [record for record in pools if profile.fits(record, accelerator=query.accelerator, task_type=query.task_type)]
        named = {record.site for record in fitting}
        return [record for record in sites if record.site in named], fitting

    async def _declare(self, rows: Rows, known: SiteRecord, declared: PoolProfile, *, by: str, at: datetime, now: datetime) -> bool:
        pools = {row.record.pool: row for row in await rows.pools(known.site)}
        row = pools.get(declared.pool)
        if row is None and len(pools) >= inventory.MOST_POOLS:
            raise Refused("registry.profile.pools", f"site {known.site} has {len(pools)} pools already", next_step="join pools of one kind")
        record = profile.declare(
            row.record if row else None,
            declared,
            site=known.site,
            kind=known.kind,
            freshness=known.freshness,
            by=by,
            version=self.first_version,
        )
        if row is not None and record is row.record:
            return False
        others = [one.record for one in pools.values()]
        if (twice := shares.objection(declared, others, offered=record.offered_devices)) is not None:
            raise twice
        if row is None:
            decision = modes.at_joining(declared, by=by, now=now)
            record = msgspec.structs.replace(record, decision=decision)
            await rows.add_decision(known.site, declared.pool, PoolHistoryRow(number=0, at=now, by=by, decision=decision))
        await rows.add_revision(record, declared_at=at, effective_at=now)
        await self._save_pool(rows, row, record, now=now, hurry=True)
        return True

    async def save_pool(self, rows: Rows, row: PoolRow, record: PoolRecord, *, now: datetime) -> None:
        """What a person decided about a pool, told at once; nothing if it says nothing new."""
        if record is not row.record:
            await self._save_pool(rows, row, record, now=now, hurry=True)

    async def _save_pool(self, rows: Rows, row: PoolRow | None, record: PoolRecord, *, now: datetime, hurry: bool) -> None:
        """Save, and tell if it is news and either urgent or nothing was told just now. `Refused('registry.pool_too_large')` if no event can."""
        grown = row is None or (record.profile, record.inventory) != (row.record.profile, row.record.inventory)
        if grown and len(encode(record)) > POOL_BYTES:
            raise Refused(
                "registry.pool_too_large",
                f"pool {record.site}/{record.pool} with its devices has more than {POOL_BYTES} bytes",
                next_step="declare it as several pools",
            )
        told_version, told_at = (row.told_version, row.told_at) if row else (0, None)
        if record.version > told_version and (hurry or told_at is None or now - told_at >= TELL_EVERY):
            await rows.tx.emit(PoolChanged(version=record.version, record=record))
            told_version, told_at = record.version, now
        await rows.save_pool(PoolRow(record=record, told_version=told_version, told_at=told_at))


async def known_site(rows: Rows, name: SiteName) -> SiteRecord:
    record = await rows.site(name)
    if record is None:
        raise NotFound("registry.site_unknown", f"there is no site {name}")
    return record
