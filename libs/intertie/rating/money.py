"""Rounding that adds up: exact fractions in, `Decimal` multiples of a step out."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction

# 60 digits hold any sum that 100,000 devices could cost in a century at the finest step, exactly.
EXACT = Context(prec=60)

# Digits after the point of an amount shown before rounding.
SHOWN = 12


def round_to(amount: Fraction | Decimal, step: Decimal) -> Decimal:
    """`amount` as the nearest multiple of `step` (> 0), half to even. The step need not be a power of ten (0.05 is one)."""
    return times(round(Fraction(amount) / Fraction(step)), step)


def times(count: int, step: Decimal) -> Decimal:
    """`count` × `step`, exact."""
    return EXACT.multiply(Decimal(count), step)


def as_decimal(amount: Fraction) -> Decimal:
    """`amount` to twelve decimals, for showing; never to be summed."""
    return round_to(amount, Decimal(1).scaleb(-SHOWN))


def split(parts: Sequence[Fraction | Decimal], total: Decimal, step: Decimal) -> list[Decimal]:
    """`total` shared out over lines in the proportion of exact `parts`, each a multiple of `step`, adding up to `total` exactly.

    Largest remainder; ties go to the earlier line (BR-091). `total` is a multiple of `step` within one step a line of sum(parts). Lines of
    exactly nothing stay nothing as long as any other line can take the rest.
    """
    if not parts:
        return []
    units = [Fraction(part) / Fraction(step) for part in parts]
    counts = [unit.__floor__() for unit in units]
    rest = int(Fraction(total) / Fraction(step)) - sum(counts)
    takers = [index for index, unit in enumerate(units) if unit != 0] or list(range(len(units)))
    order = sorted(takers, key=lambda index: (-(units[index] - counts[index]), index))
    if rest < 0:
        order = sorted(takers, key=lambda index: (units[index] - counts[index], index))
    for turn in range(abs(rest)):
        counts[order[turn % len(order)]] += 1 if rest > 0 else -1
    return [times(count, step) for count in counts]
