"""Pure, exact pricing: measured segments and an agreement in, charges out. Nothing here knows a clock, a disk or a network.

`union` turns what a site said into disjoint pieces of use, `rate` prices them, `text` makes an amount readable, `export` writes a statement as
CSV. Fractions of integers inside, `Decimal` at the door, no float anywhere.
"""

from intertie.rating.money import round_to, split
from intertie.rating.rate import Rated, hold_estimate, paid_by, price_of, rate, rate_period
from intertie.rating.text import clause_text, formula_text, money_text
from intertie.rating.union import Difference, Piece, Used, duration_us, measured, union

__all__ = [
    "Difference",
    "Piece",
    "Rated",
    "Used",
    "clause_text",
    "duration_us",
    "formula_text",
    "hold_estimate",
    "measured",
    "money_text",
    "paid_by",
    "price_of",
    "rate",
    "rate_period",
    "round_to",
    "split",
    "union",
]
