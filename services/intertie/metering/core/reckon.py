"""The one question of metering: given all that is known of an attempt, what follows? Asked again whenever anything new is known.

The answer holds the whole truth (which segments count, what they cost, whom, what is missing) and the difference to what is written
(ledger entries, a settlement to tell). Asked twice without news it answers the same and writes nothing, so no trigger can do harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import TypedDict

from intertie.contracts.job import AttemptRecord, AttemptSnapshot, Attribution
from intertie.contracts.usage import AttemptBook, AttemptSettled, Charge, MeterSpec, Segment, WhoPays
from intertie.ids import AttemptId, SpecId, TenantName
from intertie.metering.core import ledger
from intertie.metering.core.agreements import agreement
from intertie.metering.core.attribution import COUNTED, SETTLED, Verify, judge
from intertie.metering.core.books import Completeness, completeness, ended, lost, never_ran
from intertie.metering.core.evidence import Decision, Evidence, Received
from intertie.metering.core.payer import because, ending
from intertie.rating import Rated, Used, hold_estimate, measured, rate, rate_period, union

NO_CURRENCY = "XXX"
"""ISO 4217 for 'no currency': an attempt that used nothing under no agreement."""


@dataclass(frozen=True, slots=True)
class Trust:
    """Whose seals to believe."""

    scheduler_keys: frozenset[str]
    verify: Verify


@dataclass(frozen=True, slots=True)
class Reckoning:
    """What follows from the evidence. `entries` and `settled` are what is not written yet."""

    evidence: Evidence
    received: Sequence[Received]
    segments: Sequence[Segment]
    """Those that count and have a price."""
    spec: MeterSpec | None
    rated: Rated | None
    state: Completeness
    closed: bool
    hold: Decimal
    entries: Sequence[ledger.Entry]
    settled: AttemptSettled | None

    @property
    def priced_by(self) -> tuple[SpecId, int] | None:
        """The revision to stay with: fixed by the first segment that it prices."""
        return (self.spec.spec, self.spec.revision) if self.spec and self.segments else self.evidence.priced_by

    @property
    def amount(self) -> Decimal:
        return self.rated.amount if self.rated else Decimal(0)

    @property
    def tenant(self) -> TenantName | None:
        """By the scheduler's record, else by a proven attribution."""
        record = self.evidence.record
        return record.tenant if record else next((item.tenant for item in self.received if item.tenant), None)

    @property
    def since(self) -> datetime | None:
        """From when this attempt may have used anything: what finds it for a period's statement."""
        record = self.evidence.record
        known = [item.segment.start for item in self.received]
        return min([*known, record.started_at or record.offered_at] if record else known, default=None)

    @property
    def until(self) -> datetime | None:
        """When its use ended; None while more may come."""
        record = self.evidence.record
        if not self.closed or record is None:
            return None
        known = [item.segment.end for item in self.received]
        return max([*known, record.ended_at or record.offered_at])


def reckon(evidence: Evidence, trust: Trust, now: datetime, why: str = "") -> Reckoning:
    """What follows from all that is known now; `why` is the news that asked, for the ledger's reason."""
    record = evidence.record
    items = judge(evidence.received, evidence.snapshot, evidence.keys, trust.scheduler_keys, trust.verify)
    believed = list({item.segment.id: item.segment for item in items if not item.suspense}.values())
    spec, reason = agreement(record, believed, evidence.specs, evidence.priced_by, granted(items)) if record else (None, "")
    if reason:
        items = [replace(item, suspense=str(reason)) if not item.suspense else item for item in items]
    segments = believed if spec else []
    rated = rate(segments, spec, *ending(record), whose(record)) if record and spec else None
    state = completeness(evidence, items)
    # What was closed as lost stays closed when evidence refines it: its hold was released, and nothing can run under it any more.
    closed = state.complete or evidence.settled is not None or lost(record) or (record is not None and record.refined)
    hold = _hold(evidence, spec, closed)
    entries = _entries(evidence, record, spec, rated, hold, closed, why)
    settled = _settled(evidence, items, spec, rated, state, now)
    return Reckoning(evidence, items, segments, spec, rated, state, closed, hold, entries, settled)


def whose(record: AttemptRecord) -> Attribution:
    """The scheduler's own word on who an attempt belongs to."""
    return Attribution(
        tenant=record.tenant,
        job=record.job,
        attempt=record.attempt,
        site=record.site,
        pool=record.pool,
        spec=record.spec,
        spec_revision=record.spec_revision,
    )


def granted(items: Sequence[Received]) -> tuple[SpecId, int] | None:
    """The agreement that the islanded allowance of its segments names: the one that sorts first, if the allowance was renewed meanwhile."""
    grants = {item.grant.grant: item.grant for item in items if item.grant is not None and not item.suspense}
    first = grants[min(grants)] if grants else None
    return (first.spec, first.spec_revision) if first is not None and first.spec else None


def _hold(evidence: Evidence, spec: MeterSpec | None, closed: bool) -> Decimal:
    """Price × wall limit × devices as long as the attempt is open; a silent site's hold does not expire, nor does a later agreement change
    what was held by an earlier one: nothing would tell of every attempt that it might concern."""
    if closed or spec is None or evidence.snapshot is None:
        return Decimal(0)
    if evidence.snapshot.record.spec is None and (held := ledger.held(evidence.balances)):
        return held
    return hold_estimate(spec, evidence.snapshot.record.kind, len(evidence.snapshot.record.devices), evidence.snapshot.wall_s)


def _entries(
    evidence: Evidence,
    record: AttemptRecord | None,
    spec: MeterSpec | None,
    rated: Rated | None,
    hold: Decimal,
    closed: bool,
    why: str,
) -> list[ledger.Entry]:
    """What to write so that postings equal the rating and the hold equals the estimate, or nothing once closed."""
    if record is None:
        return []
    entries: list[ledger.Entry] = []
    cites = (spec.spec, spec.revision) if spec else None
    posted = {money: amount for money, amount in evidence.balances.items() if not ledger.is_hold(money[0])}
    target = ledger.post_target(record, spec, rated.payer, rated.amount) if spec and rated else {}
    if legs := ledger.difference(posted, target):
        charges = rated.charges if rated else []
        late = evidence.closed and evidence.last_entry
        kind = ledger.EntryKind.ADJUST if late else ledger.EntryKind.POST
        entries.append(ledger.Entry(evidence.attempt, kind, why, legs, cites, charges, evidence.last_entry if late else 0))
    holding = {money: amount for money, amount in evidence.balances.items() if ledger.is_hold(money[0])}
    if legs := ledger.difference(holding, ledger.hold_target(record, spec, hold)):
        kind = ledger.EntryKind.RELEASE if closed else ledger.EntryKind.HOLD
        entries.append(ledger.Entry(evidence.attempt, kind, why, legs, cites))
    return entries


def _settled(
    evidence: Evidence,
    items: Sequence[Received],
    spec: MeterSpec | None,
    rated: Rated | None,
    state: Completeness,
    now: datetime,
) -> AttemptSettled | None:
    """The settlement to tell: on completion, and again only if what was told is no longer so."""
    record = evidence.record
    if record is None or not state.complete or never_ran(record):
        return None
    held = [item.segment for item in items if item.suspense in COUNTED]
    last = evidence.settled
    settled = AttemptSettled(
        version=max(last.version + 1 if last else 1, evidence.first_version),
        attempt=record.attempt,
        job=record.job,
        tenant=record.tenant,
        site=record.site,
        amount=rated.amount if rated else Decimal(0),
        currency=spec.currency if spec else NO_CURRENCY,
        payer=rated.payer if rated else WhoPays.NOBODY,
        segments=len({segment.id for segment in held}),
        quantity_milli_us=measured(held),
        at=now,
    )
    told = (last.amount, last.currency, last.payer, last.segments, last.quantity_milli_us) if last else None
    fresh = (settled.amount, settled.currency, settled.payer, settled.segments, settled.quantity_milli_us)
    return settled if fresh != told else None


@dataclass(frozen=True, slots=True)
class Change:
    """What to write so that the books say what was reckoned; `revision` is the one it was decided on."""

    attempt: AttemptId
    revision: int
    reckoning: Reckoning
    snapshot: AttemptSnapshot | None
    """None: unchanged."""
    arrived: Sequence[Received]
    judged: Sequence[Received]
    """Known segments of which another thing is known now."""
    decided: Sequence[tuple[int, Decision]] = ()
    """What a person has just decided about a segment, by its number."""

    @property
    def empty(self) -> bool:
        written = self.snapshot or self.arrived or self.judged or self.decided or self.reckoning.entries or self.reckoning.settled
        return not written


def change(before: Evidence, after: Reckoning) -> Change:
    """The difference between what was loaded and what was reckoned from it and the news."""
    known = {item.number: item for item in before.received}
    return Change(
        attempt=before.attempt,
        revision=before.revision,
        reckoning=after,
        snapshot=after.evidence.snapshot if after.evidence.snapshot != before.snapshot else None,
        arrived=[item for item in after.received if item.number == 0],
        judged=[item for item in after.received if item.number and _stored(item) != _stored(known[item.number])],
        decided=[
            (item.number, decision)
            for item in after.received
            if item.number
            for decision in item.decisions
            if decision not in known[item.number].decisions
        ],
    )


def _stored(item: Received) -> tuple[bool, TenantName | None, str]:
    """What is written of a judgement."""
    return (item.proven, item.tenant, item.suspense)


def part_of(reckoning: Reckoning, start: datetime | None, end: datetime | None) -> tuple[Rated | None, Used]:
    """An attempt's part of [start, end): rated if a price is agreed, and its use in any case."""
    record, spec = reckoning.evidence.record, reckoning.spec
    if record is not None and spec is not None:
        rated = rate_period(reckoning.segments, spec, *ending(record), whose(record), start, end)
        return rated, rated.used
    counted = [item.segment for item in reckoning.received if item.suspense in COUNTED]
    return None, union(counted).clip(start, end)


def book_of(reckoning: Reckoning, charges: Sequence[Charge] | None = None) -> AttemptBook:
    """What metering holds of an attempt: all its charges, or those given (of a period)."""
    evidence = reckoning.evidence
    record = evidence.record
    counted = [item.segment for item in reckoning.received if item.suspense in COUNTED]
    mine = [item for item in reckoning.received if record is None or item.site == record.site]
    if charges is None:
        charges = reckoning.rated.charges if reckoning.rated else []
    return AttemptBook(
        attempt=evidence.attempt,
        job=record.job if record else None,
        tenant=reckoning.tenant,
        site=record.site if record else mine[0].site,
        segments=len({segment.id for segment in counted}),
        quantity_milli_us=measured(counted),
        run_us=union(counted).us(),
        first_start=min((segment.start for segment in counted), default=None),
        last_end=max((segment.end for segment in counted), default=None),
        ended=ended(record) or never_ran(record),
        complete=reckoning.state.complete,
        missing=reckoning.state.missing,
        outcome=record.outcome if record else None,
        cause=record.cause if record else None,
        hold=ledger.held(evidence.balances),
        posted=ledger.posted(evidence.balances),
        in_suspense=sum(1 for item in mine if item.suspense not in SETTLED),
        charges=list(charges),
        **_told_beside(reckoning),
    )


class _Beside(TypedDict):
    state: str
    because: str
    other_attempt: AttemptId | None
    refined: bool
    grant: str
    grant_expired: bool


def _told_beside(reckoning: Reckoning) -> _Beside:
    """What a book says beyond counts and amounts: why this payer, and by which allowance."""
    record = reckoning.evidence.record
    grants = [(item.grant, item.segment) for item in reckoning.received if item.grant is not None and item.suspense in COUNTED]
    return _Beside(
        state=record.state if record else "",
        because=because(record) if record else "",
        other_attempt=record.replaced_by if record else None,
        refined=record.refined if record else False,
        grant=min((grant.grant for grant, _ in grants), default=""),
        grant_expired=any(segment.end > grant.valid_until for grant, segment in grants),
    )
