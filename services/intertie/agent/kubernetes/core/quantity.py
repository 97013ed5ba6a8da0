"""Kubernetes' quantities: `1.5Gi`, `500m`, `129e6`. Exact, and an error where there is no number.

Grammar: a decimal number, then a binary suffix (Ki … Ei), a decimal one (n u m k M G T P E), or an exponent. An `E` that digits follow is
an exponent, one that stands alone is exa.
"""

from __future__ import annotations

import re
from decimal import Decimal

from intertie.errors import Refused

_QUANTITY = re.compile(r"([+-]?(?:\d{1,18}(?:\.\d{0,18})?|\.\d{1,18}))(?:([eE][+-]?\d{1,2})|([KMGTPE]i|[numkMGTPE]))?\Z", re.ASCII)
_SUFFIX = {
    "": Decimal(1),
    **{
        name: Decimal(10) ** power for name, power in {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}.items()
    },
    **{f"{name}i": Decimal(1024) ** (n + 1) for n, name in enumerate("KMGTPE")},
}
MIB = Decimal(1024 * 1024)


def quantity(text: str | int) -> Decimal:
    """In base units (bytes, cores, pieces). `Refused('kubernetes.quantity')`: no quantity; nothing is taken for zero."""
    found = _QUANTITY.match(str(text)) if not isinstance(text, bool) else None
    if found is None:
        raise Refused("kubernetes.quantity", f"{str(text)[:40]!r} is no quantity: a number with a suffix such as 4, 500m, 1.5Gi or 129e6")
    number, exponent, suffix = found.groups()
    value = Decimal(f"{number.rstrip('.') if number.endswith('.') else number}{exponent or ''}")
    return value * _SUFFIX[suffix or ""]


def whole(text: str | int) -> int:
    """Rounded up, as the scheduler counts a fraction. `Refused`: no quantity, or a negative one."""
    value = quantity(text)
    if value < 0:
        raise Refused("kubernetes.quantity", f"{str(text)[:40]!r} is below zero")
    return -int((-value).to_integral_value(rounding="ROUND_FLOOR"))


def mib(text: str | int) -> int:
    """Whole MiB, rounded down: more memory is never promised than there is."""
    return int(quantity(text) / MIB)
