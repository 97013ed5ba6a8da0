"""Memory, TRES and GRES in every spelling, and how they are asked for.

One card may stand in a TRES string twice, as `gres/gpu=4` and as `gres/gpu:a100=4`: the untyped entry is the total, the typed ones say which (BR-026).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation

from intertie.agent.slurm.core.words import Truncated, Unreadable, is_nothing

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_MEMORY = re.compile(r"(?P<number>\d{1,18}(?:\.\d{1,9})?)(?P<unit>[KMGTP]?)(?:i?B)?(?P<per>[nc]?)\Z", re.ASCII | re.IGNORECASE)
_COUNT = re.compile(r"\d{1,9}\Z", re.ASCII)
# The largest node has tens of cards; a partition has tens of thousands.
MOST_CARDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes; `per` is `n` (node) or `c` (CPU) where an old sacct says so, else empty."""

    size: int
    per: str = ""


def parse_memory(text: str) -> Memory | None:
    """`4000M`, `1.5G`, `512K`, `4Gn`; a bare number is MiB, as everywhere in Slurm. None: not said."""
    told = text.strip()
    if is_nothing(told):
        return None
    if told.endswith(("+", "=")):
        raise Truncated("memory", text)
    match = _MEMORY.match(told)
    if match is None:
        raise Unreadable("memory", text)
    size = Decimal(match["number"]) * _UNITS[(match["unit"] or "M").upper()]
    return Memory(int(size), match["per"].lower())


def memory_option(size: int) -> str:
    """Bytes for `--mem`: whole MiB with its unit, rounded up, never 0, which means "all of it" (BR-032)."""
    return f"{max(1, -(-size // (1 << 20)))}M"


def _count(text: str, what: str) -> int:
    if not _COUNT.match(text):
        raise Unreadable(what, text)
    number = int(text)
    if number > MOST_CARDS:
        raise Unreadable(what, text, "no cluster has so many")
    return number


# --- TRES: what is allocated -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tres:
    """`cpu=8,mem=64G,node=2,billing=12.5,gres/gpu=4,gres/gpu:a100=4`. All are totals of the job, never per node (BR-029)."""

    gpus: int | None
    """None: no entry speaks of cards, which is no proof that there are none (BR-027)."""
    models: Mapping[str, int] = field(default_factory=dict)
    cpus: int | None = None
    nodes: int | None = None
    memory: int | None = None
    """Bytes."""
    billing: Decimal | None = None
    contradicts: bool = False
    """Typed entries do not add up to the untyped one; the untyped one is taken."""


def parse_tres(text: str) -> Tres:
    """Nothing said gives an empty one. `Truncated` where the end is cut off, `Unreadable` where an entry we need does not parse."""
    told = text.strip()
    if is_nothing(told):
        return Tres(None)
    if told.endswith(("=", "+", ",")):
        raise Truncated("TRES", text)
    total: int | None = None
    models = dict[str, int]()
    numbers = dict[str, int]()
    memory: int | None = None
    billing: Decimal | None = None
    for entry in told.split(","):
        key, equals, value = entry.strip().partition("=")
        if not equals or not key:
            raise Unreadable("TRES", text, f"{entry!r} has no value")
        match key.lower():
            case "gres/gpu":
                total = _count(value, "count of cards")
            case typed if typed.startswith("gres/gpu:"):
                model = key[len("gres/gpu:") :]
                models[model] = models.get(model, 0) + _count(value, "count of cards")
            case "cpu" | "node" as name:
                numbers[name] = _count(value, f"count of {name}s")
            case "mem":
                found = parse_memory(value)
                memory = found.size if found is not None else None
            case "billing":
                billing = _decimal(value)
            case _:
                continue
    typed_sum = sum(models.values())
    gpus = total if total is not None else typed_sum if models else None
    return Tres(
        gpus,
        models,
        numbers.get("cpu"),
        numbers.get("node"),
        memory,
        billing,
        contradicts=total is not None and bool(models) and typed_sum != total,
    )


def _decimal(text: str) -> Decimal:
    try:
        value = Decimal(text)
    except InvalidOperation as err:
        raise Unreadable("billing", text) from err
    if not value.is_finite() or value < 0 or value > 10**15:
        raise Unreadable("billing", text)
    return value


# --- GRES: what a node has ---------------------------------------------------------------------------------------------------------------

_GRES = re.compile(
    r"(?:gres[:/])?(?P<name>[a-z_]\w*)"
    r"(?::(?P<model>[A-Za-z_][\w.+-]*|\d[\w.+-]*[A-Za-z_][\w.+-]*))?"
    r"(?::no_consume)?"
    r"(?::(?P<count>\d{1,9}))?"
    r"(?:\((?P<note>[^()]*)\))?\Z",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Gres:
    """One entry, such as `gpu:a100:4(S:0-1)` or `gpu:a100:3(IDX:0-2)`."""

    name: str
    model: str
    count: int
    indexes: tuple[int, ...] = ()


def _entries(text: str) -> list[str]:
    """Split at commas that stand in no brackets."""
    parts, depth, start = list[str](), 0, 0
    for at, char in enumerate(text):
        if char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return parts


def _indexes(note: str) -> tuple[int, ...]:
    """Of `IDX:0-2,5`; other notes (`S:0-1` names sockets) say nothing of single cards."""
    if not note.startswith("IDX:") or note == "IDX:N/A":
        return ()
    found: list[int] = []
    for part in note[len("IDX:") :].split(","):
        first, dash, last = part.partition("-")
        low, high = _count(first, "index of a card"), _count(last if dash else first, "index of a card")
        if high < low or high - low > 4_096:
            raise Unreadable("range of cards", part)
        found.extend(range(low, high + 1))
    return tuple(found)


def parse_gres(text: str) -> Sequence[Gres]:
    """All entries of a node's or a job's GRES; empty if there are none. `gpu` alone means one."""
    told = text.strip()
    if is_nothing(told):
        return ()
    if told.endswith(("+", ",", ":")):
        raise Truncated("GRES", text)
    found: list[Gres] = []
    for entry in _entries(told):
        match = _GRES.match(entry.strip())
        if match is None:
            raise Unreadable("GRES", text)
        count = _count(match["count"], "count of cards") if match["count"] is not None else 1
        found.append(Gres(match["name"], match["model"] or "", count, _indexes(match["note"] or "")))
    return tuple(found)


def cards(gres: Sequence[Gres]) -> Mapping[str, int]:
    """Model → cards; the empty model where none is named."""
    total = dict[str, int]()
    for one in gres:
        if one.name == "gpu":
            total[one.model] = total.get(one.model, 0) + one.count
    return total
