"""Metering's store in memory: the twin for tests and simulation. It refuses what PostgreSQL's constraints refuse."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal

import msgspec

from intertie.clock import Clock
from intertie.contracts.identity import SiteKeyChanged
from intertie.contracts.incident import ReportIncident
from intertie.contracts.job import AttemptSnapshot
from intertie.contracts.link import JournalOpened
from intertie.contracts.usage import Allowance, AllowanceChanged, LostEntries, MeterSpec, SpecAgreed
from intertie.errors import Stale
from intertie.ids import AttemptId, JobId, SiteName, SpecId, TenantName
from intertie.metering.core.attribution import RESOLVABLE, SETTLED
from intertie.metering.core.closing import Held, Lost, PeriodTold
from intertie.metering.core.evidence import Evidence, Money, Received, Settled, SiteKeys
from intertie.metering.core.ledger import Entry, add
from intertie.metering.core.reckon import Change
from intertie.metering.store import Mark, Suspended, Totals
from intertie.rating import measured
from intertie.store import MemoryStore, numbered_version


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """Metering's own row of an attempt."""

    revision: int
    tenant: TenantName | None
    snapshot: AttemptSnapshot | None
    since: datetime | None
    until: datetime | None
    priced_by: tuple[SpecId, int] | None
    settled: Settled | None


class MemoryMetering(MemoryStore):
    def __init__(self, *, clock: Clock | None = None) -> None:
        super().__init__("metering", clock=clock)
        self.attempts: dict[AttemptId, AttemptRow] = {}
        self.segments: list[Received] = []
        self.entries: list[Entry] = []
        self.agreed: list[MeterSpec] = []
        self.given_allowances: dict[TenantName, AllowanceChanged] = {}
        self.site_keys: dict[SiteName, tuple[int, SiteKeys]] = {}
        self.job_names: dict[JobId, tuple[int, str]] = {}
        self.lane_through: dict[SiteName, int] = {}
        self.quarantined = 0
        self.journals: dict[tuple[SiteName, str], JournalOpened] = {}
        self.lost_ranges: dict[tuple[SiteName, str, int, int], LostEntries] = {}
        self.told_periods: list[PeriodTold] = []
        self.suspended_since: dict[int, datetime] = {}
        self.first_version = 1

    async def lift_versions(self, first: int) -> None:
        async with self.transaction():
            self.first_version = first
            for tenant, held in self.given_allowances.items():
                self.given_allowances[tenant] = msgspec.structs.replace(held, version=max(held.version, first))

    async def load(
        self, attempts: Sequence[AttemptId], *, sites: Collection[SiteName] = (), tenants: Collection[TenantName] = ()
    ) -> list[Evidence]:
        return [self._evidence(attempt, sites, tenants) for attempt in attempts]

    def _evidence(self, attempt: AttemptId, more_sites: Collection[SiteName], tenants: Collection[TenantName]) -> Evidence:
        received = [item for item in self.segments if item.segment.attempt == attempt]
        row = self.attempts.get(attempt)
        record = row.snapshot.record if row and row.snapshot else None
        sites = {item.site for item in received} | ({record.site} if record else set()) | set(more_sites)
        consumers = {"*", *tenants, *({row.tenant} if row and row.tenant else set())}
        return Evidence(
            attempt=attempt,
            revision=row.revision if row else 0,
            snapshot=row.snapshot if row else None,
            received=received,
            balances=self._balances(attempt),
            specs=[spec for spec in self.agreed if spec.provider == "platform" and spec.consumer in consumers],
            keys={site: self.site_keys[site][1] for site in sites if site in self.site_keys},
            priced_by=row.priced_by if row else None,
            settled=row.settled if row else None,
            lane_through=self.lane_through.get(record.site, 0) if record else 0,
            renumbered=frozenset(
                journal for (site, journal), said in self.journals.items() if said.previous and site in {item.site for item in received}
            ),
            closed=row is not None and row.until is not None,
            last_entry=max((number for number, entry in enumerate(self.entries, 1) if entry.attempt == attempt), default=0),
            first_version=self.first_version,
        )

    def _balances(self, attempt: AttemptId) -> dict[Money, Decimal]:
        sums: dict[Money, Decimal] = {}
        for entry in self.entries:
            if entry.attempt == attempt:
                for leg in entry.legs:
                    key = (leg.account, leg.currency)
                    sums[key] = add([sums.get(key, Decimal(0)), leg.amount])
        return {key: amount for key, amount in sums.items() if amount}

    async def save(self, change: Change, mark: Mark | None = None) -> bool:
        async with self.transaction() as tx:
            if mark is not None and not await mark(tx):
                return False
            if change.empty:
                return True
            row = self.attempts.get(change.attempt)
            if (row.revision if row else 0) != change.revision:
                raise Stale("metering.changed", f"{change.attempt} has moved on since revision {change.revision}")
            self._write(change)
            if change.reckoning.settled:
                await tx.emit(change.reckoning.settled)
        return True

    def _write(self, change: Change) -> None:
        reckoning = change.reckoning
        settled = reckoning.evidence.settled
        if told := reckoning.settled:
            settled = Settled(told.version, told.amount, told.currency, told.payer, told.segments, told.quantity_milli_us)
        self.attempts[change.attempt] = AttemptRow(
            revision=change.revision + 1,
            tenant=reckoning.tenant,
            snapshot=reckoning.evidence.snapshot,
            since=reckoning.since,
            until=reckoning.until,
            priced_by=reckoning.priced_by,
            settled=settled,
        )
        for item in change.judged:
            # As PostgreSQL keeps it: what a person decided has a row of its own, and the grant is read from the sealed bytes.
            self._keep(replace(item, grant=None, decisions=self.segments[item.number - 1].decisions))
        for number, decision in change.decided:
            item = self.segments[number - 1]
            self.segments[number - 1] = replace(item, decisions=(*item.decisions, decision))
        for item in change.arrived:
            if any(item.key == known.key for known in self.segments):
                raise AssertionError(f"{item.key} is stored twice")
            self.segments.append(replace(item, number=len(self.segments) + 1, suspense="", grant=None))
            self._keep(replace(item, number=len(self.segments), grant=None))
            self.lane_through[item.site] = max(self.lane_through.get(item.site, 0), item.seq)
        self.entries.extend(reckoning.entries)

    def _keep(self, item: Received) -> None:
        if item.suspense != self.segments[item.number - 1].suspense:
            self.suspended_since[item.number] = self.clock.now()
        self.segments[item.number - 1] = item

    async def versions(self, attempts: Sequence[AttemptId]) -> Mapping[AttemptId, int]:
        rows = {attempt: self.attempts[attempt].snapshot for attempt in attempts if attempt in self.attempts}
        return {attempt: snapshot.record.version for attempt, snapshot in rows.items() if snapshot}

    async def of_tenant(self, tenant: TenantName, start: datetime, end: datetime, after: str, limit: int) -> list[AttemptId]:
        found = [
            attempt
            for attempt, row in self.attempts.items()
            if row.tenant == tenant and row.since and row.since < end and (row.until is None or row.until >= start) and attempt > after
        ]
        return sorted(found)[:limit]

    async def every(self, after: str, limit: int) -> list[AttemptId]:
        return sorted(attempt for attempt in self.attempts if attempt > after)[:limit]

    async def waiting(self, after: str, limit: int) -> list[AttemptId]:
        found = {item.segment.attempt for item in self.segments if item.suspense in RESOLVABLE}
        return sorted(attempt for attempt in found if attempt > after)[:limit]

    async def specs(self, party: str = "") -> list[MeterSpec]:
        return [spec for spec in self.agreed if not party or party in (spec.provider, spec.consumer) or spec.consumer == "*"]

    async def agree(self, spec: MeterSpec, actor: str) -> None:
        async with self.transaction() as tx:
            parties = (spec.provider, spec.consumer, spec.revision)
            if any(
                (s.spec, s.revision) == (spec.spec, spec.revision) or (s.provider, s.consumer, s.revision) == parties for s in self.agreed
            ):
                raise Stale("metering.changed", f"{spec.spec} rev {spec.revision} is there already")
            self.agreed.append(spec)
            await tx.emit(SpecAgreed(version=numbered_version(spec.revision, self.first_version), record=spec))
            await tx.audit(actor=actor, action="spec.agree", target=f"{spec.spec} rev {spec.revision}", reason=spec.title)

    async def set_allowance(self, allowance: Allowance, actor: str) -> None:
        async with self.transaction() as tx:
            before = self.given_allowances.get(allowance.tenant)
            version = before.version + 1 if before else self.first_version
            event = AllowanceChanged(version=version, tenant=allowance.tenant, record=allowance)
            self.given_allowances[allowance.tenant] = event
            await tx.emit(event)
            await tx.audit(actor=actor, action="allowance.set", target=allowance.tenant, reason=str(allowance.amount))

    async def allowances(self) -> list[AllowanceChanged]:
        return [self.given_allowances[tenant] for tenant in sorted(self.given_allowances)]

    async def learn_key(self, event: SiteKeyChanged, mark: Mark | None = None) -> bool:
        async with self.transaction() as tx:
            if mark is not None and not await mark(tx):
                return False
            version, keys = self.site_keys.get(event.record.site, (0, SiteKeys()))
            if event.version <= version:
                return False
            key = frozenset({event.record.site_key})
            revoked = keys.revoked | key if event.record.revoked else keys.revoked - key
            valid = keys.valid - key if event.record.revoked else keys.valid | key
            self.site_keys[event.record.site] = (event.version, SiteKeys(valid, revoked))
            return True

    async def learn_name(self, job: JobId, name: str, version: int, mark: Mark | None = None) -> None:
        async with self.transaction() as tx:
            if mark is not None and not await mark(tx):
                return
            if version > self.job_names.get(job, (0, ""))[0]:
                self.job_names[job] = (version, name)

    async def names(self, jobs: Sequence[JobId]) -> Mapping[JobId, str]:
        return {job: self.job_names[job][1] for job in jobs if job in self.job_names}

    async def totals(self) -> Totals:
        legs = [leg for entry in self.entries for leg in entry.legs]
        suspense = sum(1 for item in self.segments if item.suspense not in SETTLED)
        return Totals(len(legs), add(leg.amount for leg in legs), self.quarantined, suspense)

    async def keys(self, site: SiteName) -> SiteKeys:
        return self.site_keys.get(site, (0, SiteKeys()))[1]

    async def note_journal(self, site: SiteName, journal: str, said: JournalOpened, at: datetime, mark: Mark) -> None:
        async with self.transaction() as tx:
            if await mark(tx):
                self.journals.setdefault((site, journal), said)

    async def note_lost(self, lost: Lost, report: ReportIncident, mark: Mark) -> None:
        told = lost.told
        key = (told.site, told.journal, told.first, told.last)
        async with self.transaction() as tx:
            if await mark(tx) and key not in self.lost_ranges:
                self.lost_ranges[key] = told
                await tx.fault(report)

    async def lost(self, sites: Collection[SiteName] | None, limit: int) -> list[LostEntries]:
        found = [told for told in self.lost_ranges.values() if sites is None or told.site in sites]
        found.sort(key=lambda told: (told.site, told.journal, told.first))
        return sorted(found, key=lambda told: told.said_at, reverse=True)[:limit]

    async def note_period(self, told: PeriodTold, mark: Mark) -> None:
        async with self.transaction() as tx:
            if await mark(tx) and all((told.site, told.digest) != (one.site, one.digest) for one in self.told_periods):
                self.told_periods.append(replace(told, number=len(self.told_periods) + 1))

    async def prove_period(self, number: int) -> None:
        async with self.transaction():
            self.told_periods[number - 1] = replace(self.told_periods[number - 1], proven=True)

    async def unproven_periods(self, limit: int) -> list[PeriodTold]:
        last = {(one.site, one.count.period): one for one in self.told_periods if not one.proven}
        return sorted(last.values(), key=lambda one: one.number)[:limit]

    async def periods(self, site: SiteName | None, period: str | None, limit: int) -> list[PeriodTold]:
        if site is None:
            last = {(one.site, one.count.period): one for one in sorted(self.told_periods, key=lambda one: (one.proven, one.number))}
            found = list(last.values())
        else:
            found = [one for one in self.told_periods if one.site == site and period in (None, one.count.period)]
        found.sort(key=lambda one: (one.site, -one.number))
        return sorted(found, key=lambda one: one.count.period, reverse=True)[:limit]

    async def held(self, site: SiteName, start: datetime, end: datetime) -> Held:
        first = {item.segment.id: item.segment for item in reversed(self.segments) if item.site == site and start < item.segment.end <= end}
        return Held(len({segment.attempt for segment in first.values()}), len(first), measured(first.values()))

    async def suspended(self, site: SiteName | None, segment: str | None, limit: int) -> list[Suspended]:
        waiting = [item for item in self.segments if item.suspense not in SETTLED]
        found = [item for item in waiting if site in (None, item.site) and segment in (None, item.segment.id)]
        found.sort(key=lambda item: (self.suspended_since[item.number], item.number))
        return [
            Suspended(
                number=item.number,
                segment=item.segment.id,
                digest=item.digest,
                site=item.site,
                attempt=item.segment.attempt,
                tenant=item.tenant,
                start=item.segment.start,
                end=item.segment.end,
                quantity_milli=item.segment.quantity_milli,
                reason=item.suspense,
                since=self.suspended_since[item.number],
            )
            for item in found[:limit]
        ]
