"""Metering's store on PostgreSQL. The database itself refuses an entry that does not balance, a changed fact and a decision out of date."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING

from intertie.contracts.base import decode, encode
from intertie.contracts.identity import AuditQuery, AuditRow, SiteKeyChanged
from intertie.contracts.incident import ReportIncident
from intertie.contracts.job import AttemptSnapshot
from intertie.contracts.link import JournalOpened, Sealed
from intertie.contracts.usage import Allowance, AllowanceChanged, LostEntries, MeterSpec, PeriodCount, Segment, SpecAgreed, WhoPays
from intertie.errors import Stale
from intertie.ids import AttemptId, Digest, JobId, SegmentId, SiteName, SpecId, TenantName
from intertie.metering.core.attribution import RESOLVABLE
from intertie.metering.core.closing import Held, Lost, PeriodTold
from intertie.metering.core.evidence import Decision, Evidence, Money, Received, Settled, SiteKeys
from intertie.metering.core.ledger import Entry
from intertie.metering.core.reckon import Change, Reckoning
from intertie.metering.store import Mark, Suspended, Totals
from intertie.store import Database, Tx, load_queries, numbered_version

if TYPE_CHECKING:
    from asyncpg import Record

Q = load_queries("intertie.metering")

PACKAGE = "intertie.metering"


class PgMetering:
    """`MeteringStore` in the schema of a `Database`."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.first_version = 1

    async def lift_versions(self, first: int) -> None:
        self.first_version = first
        if first > 1:
            async with self.db.transaction() as tx:
                await tx.run(Q.allowance_versions_lift, first)

    async def load(
        self, attempts: Sequence[AttemptId], *, sites: Collection[SiteName] = (), tenants: Collection[TenantName] = ()
    ) -> list[Evidence]:
        wanted = list(attempts)
        # The revision is read first: what is newer than it makes the save stale, never wrong.
        async with self.db.transaction(read_only=True, isolation="repeatable read") as tx:
            rows = {row["attempt"]: row for row in await tx.all(Q.attempts_load, wanted)}
            received = _grouped(await tx.all(Q.segments_load, wanted), await tx.all(Q.decisions_load, wanted))
            balances: dict[AttemptId, dict[Money, Decimal]] = {}
            for row in await tx.all(Q.balances_load, wanted):
                balances.setdefault(row["attempt"], {})[(row["account"], row["currency"])] = row["amount"]
            consumers = sorted({row["tenant"] for row in rows.values() if row["tenant"]} | set(tenants))
            places = {item.site for items in received.values() for item in items} | {row["site"] for row in rows.values() if row["site"]}
            named = sorted(places | set(sites))
            specs = [decode(row["record"], MeterSpec) for row in await tx.all(Q.specs_for, consumers)]
            keys = _keys(await tx.all(Q.keys_for, named))
            anew = await tx.all(Q.journals_replaced, named)
            last = {row["attempt"]: row["id"] for row in await tx.all(Q.entries_last, wanted)}
            lanes = {row["site"]: row["ack_through"] for row in await tx.all(Q.lanes_through, named)}
        found: list[Evidence] = []
        for attempt in wanted:
            evidence = Evidence(
                attempt=attempt,
                received=received.get(attempt, ()),
                balances=balances.get(attempt, {}),
                specs=specs,
                keys=keys,
                renumbered=frozenset(row["journal"] for row in anew if row["site"] in {item.site for item in received.get(attempt, ())}),
                last_entry=last.get(attempt, 0),
                first_version=self.first_version,
            )
            found.append(_with_row(evidence, rows[attempt], lanes) if attempt in rows else evidence)
        return found

    async def save(self, change: Change, mark: Mark | None = None) -> bool:
        async with self.db.transaction() as tx:
            if mark is not None and not await mark(tx):
                return False
            if change.empty:
                return True
            arguments = _attempt_row(change)
            if not await tx.run(Q.attempt_update if change.revision else Q.attempt_insert, *arguments):
                raise Stale("metering.changed", f"{change.attempt} has moved on since revision {change.revision}")
            for item in change.judged:
                await tx.run(Q.segment_judged, item.number, item.proven, item.tenant)
                await _suspend(tx, item.number, item)
            for item in change.arrived:
                await _suspend(tx, await _insert(tx, item), item)
            for number, decision in change.decided:
                await tx.run(Q.decision_insert, number, decision.lifts, decision.who, decision.why, decision.at)
            for entry in change.reckoning.entries:
                await _post(tx, entry)
            if change.reckoning.settled:
                await tx.emit(change.reckoning.settled)
        return True

    async def versions(self, attempts: Sequence[AttemptId]) -> Mapping[AttemptId, int]:
        async with self.db.transaction(read_only=True) as tx:
            return {row["attempt"]: row["version"] for row in await tx.all(Q.versions_load, list(attempts))}

    async def of_tenant(self, tenant: TenantName, start: datetime, end: datetime, after: str, limit: int) -> list[AttemptId]:
        async with self.db.transaction(read_only=True) as tx:
            return [row["attempt"] for row in await tx.all(Q.attempts_of_tenant, tenant, start, end, after, limit)]

    async def every(self, after: str, limit: int) -> list[AttemptId]:
        async with self.db.transaction(read_only=True) as tx:
            return [row["attempt"] for row in await tx.all(Q.attempts_every, after, limit)]

    async def waiting(self, after: str, limit: int) -> list[AttemptId]:
        async with self.db.transaction(read_only=True) as tx:
            reasons = sorted(str(reason) for reason in RESOLVABLE)
            return [row["attempt"] for row in await tx.all(Q.attempts_waiting, reasons, after, limit)]

    async def specs(self, party: str = "") -> list[MeterSpec]:
        async with self.db.transaction(read_only=True) as tx:
            return [decode(row["record"], MeterSpec) for row in await tx.all(Q.specs_of, party)]

    async def agree(self, spec: MeterSpec, actor: str) -> None:
        parties = (spec.spec, spec.revision, spec.provider, spec.consumer, spec.currency, spec.effective_from)
        async with self.db.transaction() as tx:
            if not await tx.run(Q.spec_insert, *parties, encode(spec)):
                raise Stale("metering.changed", f"{spec.spec} rev {spec.revision} is there already")
            await tx.emit(SpecAgreed(version=numbered_version(spec.revision, self.first_version), record=spec))
            await tx.audit(actor=actor, action="spec.agree", target=f"{spec.spec} rev {spec.revision}", reason=spec.title)

    async def set_allowance(self, allowance: Allowance, actor: str) -> None:
        async with self.db.transaction() as tx:
            row = await tx.one(Q.allowance_put, allowance.tenant, encode(allowance), self.first_version)
            assert row is not None, "an upsert returns its row"
            await tx.emit(AllowanceChanged(version=row["version"], tenant=allowance.tenant, record=allowance))
            await tx.audit(actor=actor, action="allowance.set", target=allowance.tenant, reason=str(allowance.amount))

    async def allowances(self) -> list[AllowanceChanged]:
        async with self.db.transaction(read_only=True) as tx:
            return [
                AllowanceChanged(version=row["version"], tenant=TenantName(row["tenant"]), record=decode(row["record"], Allowance))
                for row in await tx.all(Q.allowances_load)
            ]

    async def learn_key(self, event: SiteKeyChanged, mark: Mark | None = None) -> bool:
        async with self.db.transaction() as tx:
            if mark is not None and not await mark(tx):
                return False
            key = event.record
            return await tx.run(Q.key_put, key.site, key.site_key, key.revoked, event.version) == 1

    async def learn_name(self, job: JobId, name: str, version: int, mark: Mark | None = None) -> None:
        async with self.db.transaction() as tx:
            if mark is None or await mark(tx):
                await tx.run(Q.name_put, job, name, version)

    async def names(self, jobs: Sequence[JobId]) -> Mapping[JobId, str]:
        async with self.db.transaction(read_only=True) as tx:
            return {row["job"]: row["name"] for row in await tx.all(Q.names_load, list(jobs))}

    async def keys(self, site: SiteName) -> SiteKeys:
        async with self.db.transaction(read_only=True) as tx:
            return _keys(await tx.all(Q.keys_for, [site])).get(site, SiteKeys())

    async def note_journal(self, site: SiteName, journal: str, said: JournalOpened, at: datetime, mark: Mark) -> None:
        async with self.db.transaction() as tx:
            if await mark(tx):
                await tx.run(Q.journal_insert, site, journal, said.previous, said.why, at)

    async def note_lost(self, lost: Lost, report: ReportIncident, mark: Mark) -> None:
        told, sealed = lost.told, lost.sealed
        async with self.db.transaction() as tx:
            if not await mark(tx):
                return
            row = (
                told.site,
                told.journal,
                told.first,
                told.last,
                sealed.payload,
                sealed.signer,
                sealed.signature,
                told.said_at,
                told.proven,
            )
            if await tx.run(Q.lost_insert, *row):
                await tx.fault(report)

    async def lost(self, sites: Collection[SiteName] | None, limit: int) -> list[LostEntries]:
        async with self.db.transaction(read_only=True) as tx:
            return [
                LostEntries(
                    site=SiteName(row["site"]),
                    journal=row["journal"],
                    first=row["first"],
                    last=row["last"],
                    said_at=row["said_at"],
                    proven=row["proven"],
                )
                for row in await tx.all(Q.lost_load, None if sites is None else sorted(sites), limit)
            ]

    async def note_period(self, told: PeriodTold, mark: Mark) -> None:
        count, sealed = told.count, told.sealed
        async with self.db.transaction() as tx:
            if not await mark(tx):
                return
            await tx.run(
                Q.period_insert,
                *(count.site, count.period, count.start, count.end, count.attempts, count.segments, Decimal(count.quantity_milli_us)),
                *(told.digest, sealed.payload, sealed.signer, sealed.signature, told.received_at, told.proven),
            )

    async def prove_period(self, number: int) -> None:
        async with self.db.transaction() as tx:
            await tx.run(Q.period_proven, number)

    async def unproven_periods(self, limit: int) -> list[PeriodTold]:
        async with self.db.transaction(read_only=True) as tx:
            return [_told(row) for row in await tx.all(Q.periods_unproven, limit)]

    async def periods(self, site: SiteName | None, period: str | None, limit: int) -> list[PeriodTold]:
        async with self.db.transaction(read_only=True) as tx:
            rows = await tx.all(Q.periods_last, limit) if site is None else await tx.all(Q.periods_load, site, period, limit)
            return [_told(row) for row in rows]

    async def held(self, site: SiteName, start: datetime, end: datetime) -> Held:
        async with self.db.transaction(read_only=True) as tx:
            row = await tx.one(Q.held_of_site, site, start, end)
        assert row is not None, "aggregates answer with one row"
        return Held(row["attempts"], row["segments"], int(row["quantity"]))

    async def suspended(self, site: SiteName | None, segment: str | None, limit: int) -> list[Suspended]:
        async with self.db.transaction(read_only=True) as tx:
            return [
                Suspended(
                    number=row["number"],
                    segment=SegmentId(row["id"]),
                    digest=Digest(row["digest"]),
                    site=SiteName(row["site"]),
                    attempt=AttemptId(row["attempt"]),
                    tenant=row["tenant"],
                    start=row["starts_at"],
                    end=row["ends_at"],
                    quantity_milli=row["quantity_milli"],
                    reason=row["reason"],
                    since=row["since"],
                )
                for row in await tx.all(Q.suspended, site, segment, limit)
            ]

    async def totals(self) -> Totals:
        async with self.db.transaction(read_only=True) as tx:
            row = await tx.one(Q.totals)
        assert row is not None, "aggregates answer with one row"
        return Totals(row["postings"], row["sum"], row["quarantined"], row["suspense"])

    async def read_audit(self, query: AuditQuery) -> list[AuditRow]:
        return await self.db.read_audit(query)


def _grouped(rows: Sequence[Record], decided: Sequence[Record]) -> dict[AttemptId, list[Received]]:
    found: dict[AttemptId, list[Received]] = {}
    decisions: dict[int, tuple[Decision, ...]] = {}
    for row in decided:
        decision = Decision(row["lifts"], row["who"], row["why"], row["at"])
        decisions[row["segment"]] = (*decisions.get(row["segment"], ()), decision)
    for row in rows:
        item = Received(
            site=SiteName(row["site"]),
            journal=row["journal"],
            seq=row["seq"],
            sealed=Sealed(payload=row["payload"], signer=row["signer"], signature=row["signature"]),
            segment=decode(row["payload"], Segment, what="a stored segment"),
            received_at=row["received_at"],
            digest=Digest(row["digest"]),
            proven=row["proven"],
            tenant=row["tenant"],
            number=row["number"],
            suspense=row["suspense"],
            decisions=decisions.get(row["number"], ()),
        )
        found.setdefault(row["attempt"], []).append(item)
    return found


def _told(row: Record) -> PeriodTold:
    return PeriodTold(
        count=decode(row["payload"], PeriodCount, what="a stored count"),
        sealed=Sealed(payload=row["payload"], signer=row["signer"], signature=row["signature"]),
        digest=Digest(row["digest"]),
        received_at=row["received_at"],
        proven=row["proven"],
        number=row["number"],
    )


def _keys(rows: Sequence[Record]) -> dict[SiteName, SiteKeys]:
    found: dict[SiteName, SiteKeys] = {}
    for row in rows:
        keys, key = found.get(row["site"], SiteKeys()), frozenset({row["key"]})
        found[row["site"]] = SiteKeys(keys.valid, keys.revoked | key) if row["revoked"] else SiteKeys(keys.valid | key, keys.revoked)
    return found


def _with_row(evidence: Evidence, row: Record, lanes: Mapping[str, int]) -> Evidence:
    settled = None
    if row["settled_version"]:
        settled = Settled(
            version=row["settled_version"],
            amount=row["settled_amount"],
            currency=row["settled_currency"],
            payer=WhoPays(row["settled_payer"]),
            segments=row["settled_segments"],
            quantity_milli_us=int(row["settled_quantity"]),
        )
    return replace(
        evidence,
        revision=row["revision"],
        snapshot=decode(row["snapshot"], AttemptSnapshot) if row["snapshot"] else None,
        closed=row["until"] is not None,
        priced_by=(SpecId(row["priced_spec"]), row["priced_revision"]) if row["priced_spec"] else None,
        settled=settled,
        lane_through=lanes.get(row["site"], 0),
    )


def _attempt_row(change: Change) -> tuple[object, ...]:
    reckoning = change.reckoning
    record, snapshot = reckoning.evidence.record, reckoning.evidence.snapshot
    return (
        change.attempt,
        change.revision,
        reckoning.tenant,
        record.job if record else None,
        record.site if record else None,
        record.state if record else "",
        record.version if record else 0,
        encode(snapshot).decode() if snapshot else None,
        reckoning.since,
        reckoning.until,
        reckoning.state.complete,
        *(reckoning.priced_by or (None, None)),
        *_settled_row(reckoning),
    )


def _settled_row(reckoning: Reckoning) -> tuple[object, ...]:
    told = reckoning.settled or reckoning.evidence.settled
    if told is None:
        return (0, None, None, None, None, None)
    return (told.version, told.amount, told.currency, told.payer, told.segments, Decimal(told.quantity_milli_us))


async def _insert(tx: Tx, item: Received) -> int:
    segment = item.segment
    row = await tx.one(
        Q.segment_insert,
        segment.id,
        item.digest,
        item.site,
        segment.attempt,
        item.journal,
        item.seq,
        segment.phase,
        segment.kind,
        segment.model,
        segment.quantity_milli,
        segment.start,
        segment.end,
        item.sealed.payload,
        item.sealed.signer,
        item.sealed.signature,
        item.received_at,
        item.proven,
        item.tenant,
    )
    assert row is not None, "an insert returns its row"
    return int(row["number"])


async def _suspend(tx: Tx, number: int, item: Received) -> None:
    """Bring the open reason of a segment to what it is now."""
    await tx.run(Q.suspense_release, number, item.suspense)
    if item.suspense:
        await tx.run(Q.suspense_open, number, item.segment.attempt, item.suspense)


async def _post(tx: Tx, entry: Entry) -> None:
    spec = entry.spec or (None, None)
    row = await tx.one(Q.entry_insert, entry.attempt, entry.kind, entry.reason, *spec, encode(list(entry.charges)), entry.cites or None)
    assert row is not None, "an insert returns its row"
    accounts, currencies = [leg.account for leg in entry.legs], [leg.currency for leg in entry.legs]
    await tx.run(Q.postings_insert, row["id"], accounts, currencies, [leg.amount for leg in entry.legs])
