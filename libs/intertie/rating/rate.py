"""Charges of one attempt by one agreement: `rate` for the whole attempt, `rate_period` for its part of a period.

Rounding and the minimum apply once per attempt to the running total, and a period's charge is round(total at its end) − round(total at its
start): so no way of splitting, ordering or repeating segments or periods changes a sum. One attempt has one payer, by how it ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from fractions import Fraction

import msgspec

from intertie.contracts.job import Attribution, Cause
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import DEFAULT_PAYS, Charge, Formula, MeterSpec, Segment, UsagePhase, WhoPays
from intertie.errors import Refused
from intertie.rating.money import as_decimal, round_to, split
from intertie.rating.text import clause_text, formula_text
from intertie.rating.union import Class, Difference, Piece, Used, union

# thousandths × microseconds in one device-hour
PER_HOUR = 1_000 * 3_600 * 1_000_000


@dataclass(frozen=True, slots=True)
class Rated:
    """What an attempt (or its part of a period) costs, whom, and how that came about. sum(charges) == sum(totals), exactly."""

    charges: list[Charge]
    totals: Mapping[WhoPays, Decimal]
    payer: WhoPays
    amount: Decimal
    used: Used
    """Of the whole period asked for: what was used, charged or not."""

    @property
    def differences(self) -> tuple[Difference, ...]:
        return self.used.differences


@dataclass(frozen=True, slots=True)
class _Line:
    """One charge in the making; `minimum` marks the top-up to the agreement's shortest time."""

    phase: UsagePhase
    kind: DeviceKind
    model: str
    quantity_milli: int
    per_hour: Decimal
    start: datetime
    end: datetime
    us: int
    islanded: bool
    minimum: bool = False

    @property
    def key(self) -> tuple[bool, int, DeviceKind, str, int]:
        return (self.minimum, list(UsagePhase).index(self.phase), self.kind, self.model, self.quantity_milli)

    @property
    def exact(self) -> Fraction:
        return Fraction(self.us * self.quantity_milli, PER_HOUR) * Fraction(self.per_hour)


def paid_by(spec: MeterSpec, outcome: str | None, cause: Cause | None) -> tuple[str, WhoPays]:
    """(end, payer): which word of the agreement applies, and who pays by it.

    An attempt without an outcome is `open` and counts as if it will succeed, so that its segments can be posted as they come. A failure
    without a cause is unknown, and what was closed as `lost` is as unknown: nobody pays until it is resolved.
    """
    if outcome is None:
        return "open", spec.pays.get("succeeded", DEFAULT_PAYS["succeeded"])
    if outcome == "succeeded":
        end = "succeeded"
    elif outcome == "lost":
        end = "lost"
    elif cause is not None:
        end = str(cause)
    else:
        end = "cancelled" if outcome == "cancelled" else "unknown"
    return end, spec.pays.get(end, DEFAULT_PAYS.get(end, WhoPays.NOBODY))


def price_of(spec: MeterSpec, kind: DeviceKind, model: str) -> Decimal:
    """Price of a device-hour: of that model, else of that kind; `rating.no_price` if the agreement names neither."""
    by_class = {(price.kind, price.model): price.per_hour for price in spec.prices}
    found = by_class.get((kind, model), by_class.get((kind, "")))
    if found is None:
        raise Refused(
            "rating.no_price",
            f"{spec.spec} rev {spec.revision} has no price for {kind} {model or '(no model)'}",
            next_step="agree a revision that names it, effective from before the usage",
            details={"spec": spec.spec, "revision": spec.revision, "kind": str(kind), "model": model},
        )
    return found


def hold_estimate(spec: MeterSpec, kind: DeviceKind, count: int, wall_s: int) -> Decimal:
    """What an attempt may cost at most: `count` devices for the wall limit.

    The model is not known before a site measures: the kind's own price, else the dearest model's. No price of that kind holds nothing.
    """
    generic = [price.per_hour for price in spec.prices if price.kind is kind and not price.model]
    prices = generic or [price.per_hour for price in spec.prices if price.kind is kind]
    if not prices:
        return Decimal(0)
    us = max(wall_s * 1_000_000, spec.minimum_us)
    return round_to(Fraction(us * count * 1_000, PER_HOUR) * Fraction(max(prices)), spec.rounding)


def rate(segments: Sequence[Segment], spec: MeterSpec, outcome: str | None, cause: Cause | None, whose: Attribution) -> Rated:
    """Charges of everything an attempt used. Segments are those of one attempt, in any order, repeated or not."""
    return rate_period(segments, spec, outcome, cause, whose)


def rate_period(
    segments: Sequence[Segment],
    spec: MeterSpec,
    outcome: str | None,
    cause: Cause | None,
    whose: Attribution,
    start: datetime | None = None,
    end: datetime | None = None,
) -> Rated:
    """Charges of an attempt's part of [start, end); None leaves that side open. Periods that meet add up to `rate`."""
    if foreign := sorted({s.attempt for s in segments if s.attempt != whose.attempt}):
        raise AssertionError(f"segments of {foreign} rated as {whose.attempt}")
    used = union(segments)
    before = _lines(used.clip(None, start), spec) if start is not None else []
    through = _lines(used.clip(None, end), spec)
    amount = round_to(_exact(through), spec.rounding) - round_to(_exact(before), spec.rounding)
    word, payer = paid_by(spec, outcome, cause)
    inside = used.clip(start, end)
    lines = _difference(through, before, _lines(inside, spec))
    shares = split([exact for _, exact in lines], amount, spec.rounding)
    charges = [_charge(line, exact, share, spec, word, payer, whose) for (line, exact), share in zip(lines, shares, strict=True)]
    return Rated(charges=charges, totals={payer: amount} if charges else {}, payer=payer, amount=amount, used=inside)


def _lines(used: Used, spec: MeterSpec) -> list[_Line]:
    """One line per phase, class and quantity, and the top-up to the minimum, of a running total."""
    found: dict[tuple[bool, int, DeviceKind, str, int], _Line] = {}
    for piece in used.pieces:
        for (kind, model), quantity in piece.parts:
            line = _line(piece, (kind, model), quantity, spec)
            if seen := found.get(line.key):
                islanded = seen.islanded or line.islanded
                line = replace(seen, us=seen.us + line.us, end=max(seen.end, line.end), islanded=islanded)
            found[line.key] = line
    lines = [found[key] for key in sorted(found)]
    return lines + _minimum(used, spec)


def _line(piece: Piece, device: Class, quantity: int, spec: MeterSpec) -> _Line:
    kind, model = device
    # A clock that costs nothing needs no price: a queue of an unpriced device must not stop a statement.
    per_hour = price_of(spec, kind, model) if piece.phase in spec.charged_phases and quantity else Decimal(0)
    return _Line(piece.phase, kind, model, quantity, per_hour, piece.start, piece.end, piece.us, piece.islanded)


def _minimum(used: Used, spec: MeterSpec) -> list[_Line]:
    """What is added, once, if an attempt ran for less than the agreement's minimum: at the rate of its first moment."""
    charged = [piece for piece in used.pieces if piece.phase in spec.charged_phases and piece.quantity_milli]
    short = spec.minimum_us - sum(piece.us for piece in charged)
    if not charged or short <= 0:
        return []
    first, last = charged[0], charged[-1]
    return [
        replace(_line(first, device, quantity, spec), us=short, end=last.end, minimum=True) for device, quantity in first.parts if quantity
    ]


def _exact(lines: Sequence[_Line]) -> Fraction:
    return sum((line.exact for line in lines), Fraction(0))


def _difference(through: Sequence[_Line], before: Sequence[_Line], inside: Sequence[_Line]) -> list[tuple[_Line, Fraction]]:
    """Lines of a period with their exact amounts: running total at its end less that at its start.

    A minimum charged in an earlier period comes back as a negative line when the attempt ran on.
    """
    earlier = {line.key: line for line in before}
    bounds = {line.key: line for line in inside if not line.minimum}
    lines: list[tuple[_Line, Fraction]] = []
    for line in through:
        old = earlier.pop(line.key, None)
        us = line.us - (old.us if old else 0)
        if us == 0:
            continue
        seen = bounds.get(line.key, line)
        lines.append((replace(seen, us=abs(us)), line.exact - (old.exact if old else Fraction(0))))
    # What is left of `earlier` is a top-up that the running total outgrew.
    lines.extend((line, -line.exact) for line in earlier.values())
    return lines


def _charge(line: _Line, exact: Fraction, amount: Decimal, spec: MeterSpec, end: str, payer: WhoPays, whose: Attribution) -> Charge:
    clause = clause_text(spec, line.phase, end, payer)
    if line.minimum:
        again = "already charged" if exact < 0 else "applies"
        clause += f"; the minimum of {Decimal(spec.minimum_us) / 1_000_000:f} s {again}"
    formula = Formula(
        duration_us=line.us,
        quantity_milli=line.quantity_milli,
        per_hour=line.per_hour,
        currency=spec.currency,
        unrounded=as_decimal(exact),
        amount=amount,
        phase=line.phase,
        kind=line.kind,
        model=line.model,
        clause=clause,
        text="",
    )
    return Charge(
        attempt=whose.attempt,
        job=whose.job,
        tenant=whose.tenant,
        site=whose.site,
        spec=spec.spec,
        spec_revision=spec.revision,
        payer=payer,
        amount=amount,
        currency=spec.currency,
        start=line.start,
        end=line.end,
        formula=msgspec.structs.replace(formula, text=formula_text(formula)),
        islanded=line.islanded,
    )
