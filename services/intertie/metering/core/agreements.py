"""Which agreement prices an attempt, and which new agreements may be made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal

from intertie.contracts.call_offerings import DEFAULT_CALL_PAYS
from intertie.contracts.job import AttemptRecord
from intertie.contracts.usage import DEFAULT_PAYS, AgreeSpec, MeterSpec, Segment
from intertie.errors import Conflict, Refused
from intertie.ids import SpecId, TenantName, name
from intertie.metering.core.attribution import Reason
from intertie.metering.core.periods import zone
from intertie.rating import price_of
from intertie.rating.calls import call_terms_wrong

PLATFORM = "platform"
EVERY_TENANT = "*"
DEFAULT_ZONE = "Asia/Shanghai"

# An agreement with more prices than this is a price list gone wrong; each is looked at for each line.
PRICES = 200


def in_force(specs: Iterable[MeterSpec], tenant: TenantName | str, at: datetime) -> MeterSpec | None:
    """The platform's agreement with a tenant at a moment: its own before everyone's; of its revisions the one last in force."""
    mine = [s for s in specs if s.provider == PLATFORM and s.consumer in (tenant, EVERY_TENANT) and s.effective_from <= at]
    return max(mine, key=lambda s: (s.consumer != EVERY_TENANT, s.effective_from, s.revision), default=None)


def agreement(
    record: AttemptRecord,
    segments: Sequence[Segment],
    specs: Sequence[MeterSpec],
    priced_by: tuple[SpecId, int] | None,
    granted: tuple[SpecId, int] | None = None,
) -> tuple[MeterSpec | None, Reason | str]:
    """(spec, reason): the one revision that prices this attempt, or why none does.

    The cited revision rules; of work that a site took in by itself it is the one that its allowance names (`granted`). Where none was cited, or
    the cited one lacks a price, a later agreement that is in force from before the attempt's start takes its place, and then stays: a price once
    posted is changed by no later agreement.
    """
    by_key = {(spec.spec, spec.revision): spec for spec in specs}
    start = min((segment.start for segment in segments), default=record.started_at or record.offered_at)
    fixed = by_key.get(priced_by) if priced_by else None
    named = granted or ((record.spec, record.spec_revision) if record.spec else None)
    cited = fixed or (by_key.get(named) if named else in_force(specs, record.tenant, start))
    if cited is None:
        return None, Reason.NO_SPEC
    later = [s for s in specs if s.spec == cited.spec and s.revision > cited.revision and s.effective_from <= start]
    for spec in [cited, *sorted(later, key=lambda s: s.revision)]:
        if _prices_all(spec, segments):
            return spec, ""
    return None, Reason.NO_PRICE


def _prices_all(spec: MeterSpec, segments: Sequence[Segment]) -> bool:
    try:
        for kind, model in {(s.kind, s.model) for s in segments if s.phase in spec.charged_phases and s.quantity_milli}:
            price_of(spec, kind, model)
    except Refused:
        return False
    return True


def next_revision(ask: AgreeSpec, specs: Sequence[MeterSpec], new_id: SpecId, agreed_by: str, now: datetime) -> MeterSpec:
    """The agreement as it will stand; refused (`metering.spec`) with the rule it breaks.

    Between the same two parties it is the next revision of the same agreement.
    """
    _check_parties(ask)
    _check_terms(ask)
    same = [spec for spec in specs if (spec.provider, spec.consumer) == (ask.provider, ask.consumer)]
    # One currency for all that a tenant might come under: a statement has one, and an allowance too.
    if other := next((s for s in specs if s.provider == ask.provider and s.currency != ask.currency), None):
        raise Conflict(
            "metering.currency",
            f"{ask.provider} settles in {other.currency} ({other.spec}), not in {ask.currency}",
            next_step=f"agree it with --currency {other.currency}",
        )
    last = max(same, key=lambda spec: spec.revision, default=None)
    # Another zone would move the borders of periods that are already on statements: hours would be charged twice, or never.
    if other := next((s for s in specs if _may_replace(ask, s) and s.time_zone != ask.time_zone), None):
        raise Conflict(
            "metering.time_zone",
            f"{other.spec} settles by {other.time_zone}, not by {ask.time_zone}",
            next_step=f"agree it with --time-zone {other.time_zone}",
        )
    return MeterSpec(
        spec=last.spec if last else new_id,
        revision=last.revision + 1 if last else 1,
        title=ask.title,
        provider=ask.provider,
        consumer=ask.consumer,
        currency=ask.currency,
        prices=ask.prices,
        charged_phases=ask.charged_phases,
        pays={**DEFAULT_PAYS, **(ask.pays or {})},
        rounding=ask.rounding,
        minimum_us=ask.minimum_us,
        time_zone=ask.time_zone,
        effective_from=ask.effective_from or now,
        agreed_by=[agreed_by],
        call_prices=ask.call_prices,
        call_pays={**DEFAULT_CALL_PAYS, **(ask.call_pays or {})},
    )


def _may_replace(ask: AgreeSpec, other: MeterSpec) -> bool:
    """Whether some tenant may come from one under the other: they are of the same two parties, or one of them is everyone's."""
    return ask.provider == other.provider and (ask.consumer == other.consumer or EVERY_TENANT in (ask.consumer, other.consumer))


def _check_parties(ask: AgreeSpec) -> None:
    if ask.provider == PLATFORM:
        if ask.consumer != EVERY_TENANT:
            name(ask.consumer, "tenant")
    elif ask.consumer == PLATFORM:
        name(ask.provider, "site")
    else:
        raise Refused(
            "metering.spec",
            f"{ask.provider!r} and {ask.consumer!r} cannot agree",
            next_step="an agreement is platform → tenant (or *), or site → platform",
        )


def _check_terms(ask: AgreeSpec) -> None:
    problem = ""
    seen = {(price.kind, price.model) for price in ask.prices}
    if not ask.title.strip() or len(ask.title) > 200 or not ask.title.isprintable():
        problem = "its title has 1 to 200 printable characters"
    elif len(seen) != len(ask.prices) or len(seen) > PRICES:
        problem = f"it names each kind and model once, at most {PRICES}"
    elif any(price.per_hour < 0 or price.per_hour > Decimal(10) ** 9 for price in ask.prices):
        problem = "a price lies between 0 and a thousand million per hour"
    elif not Decimal("0.000001") <= ask.rounding <= 1:
        problem = "rounding lies between 0.000001 and 1"
    elif ask.minimum_us > 3_600_000_000:
        problem = "the minimum is at most an hour"
    elif len(set(ask.charged_phases)) != len(ask.charged_phases):
        problem = "a phase is charged or not, once"
    elif unknown := sorted(set(ask.pays or {}) - set(DEFAULT_PAYS)):
        problem = f"who pays is said by one of {', '.join(DEFAULT_PAYS)}, not {', '.join(unknown)}"
    elif wrong := call_terms_wrong(ask):
        problem = wrong
    elif ask.effective_from is not None and ask.effective_from.tzinfo is None:
        problem = "effective_from carries an offset"
    if problem:
        raise Refused("metering.spec", f"the agreement cannot stand: {problem}")
    zone(ask.time_zone)
