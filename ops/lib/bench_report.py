"""What a benchmark says: medians with what stood beside them in the same run, their ratio, the target, and whether it is met.

Pure: the numbers come from the benchmarks, printing them is `bench_main`'s matter. A missed target is a fact to report, never an error.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

Verdict = Literal["ok", "missed", "none"]
"""`none`: reported without a target."""


def median(values: Sequence[float]) -> float:
    """The middle value; NaN of nothing."""
    return statistics.median(values) if values else math.nan


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank: the smallest value that at least `percent` of them do not exceed, so it is one that was really seen. NaN of nothing."""
    if not 0 < percent <= 100:
        raise ValueError(f"a percentile lies above 0 and up to 100, not at {percent}")
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """The limit or peer measured in the same run, in the measure's own unit."""

    name: str
    value: float


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One number. `low` and `high` are the extremes over rounds where there were several."""

    name: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    beside: Beside | None = None
    ratio: float | None = None
    """value / beside."""
    target: float | None = None
    at_least: bool = False
    """The target is a floor; else a ceiling."""
    verdict: Verdict = "none"


class ProcessRow(msgspec.Struct, frozen=True, kw_only=True):
    """One process at rest."""

    part: str
    pid: int
    name: str
    pss_mib: float
    private_mib: float
    """What would be free if it ended; PSS adds its share of what it maps with others."""
    cpu_percent: float


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured, and what else went on there."""

    cores: int
    memory_mib: int
    kernel: str
    python: str
    load_before: float
    load_after: float
    """One-minute load averages, own work included."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one benchmark; `--json` prints exactly this."""

    benchmark: str
    at: str
    rounds: int
    machine: Machine
    measures: list[Measure]
    processes: list[ProcessRow] = []
    notes: list[str] = []


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One that `ops/bench NAME` runs: `run(rounds)`."""

    name: str
    says: str
    rounds: int
    run: Callable[[int], Coroutine[None, None, Report]]


def measure(
    name: str,
    value: float,
    unit: str,
    *,
    over: Sequence[float] = (),
    beside: Beside | None = None,
    target: float | None = None,
    at_least: bool = False,
) -> Measure:
    """With its ratio and verdict. A value that could not be had (NaN) has missed its target. over: the rounds' own values."""
    verdict: Verdict = "none"
    if target is not None:
        met = value >= target if at_least else value <= target
        verdict = "ok" if met else "missed"
    return Measure(
        name=name,
        value=value,
        unit=unit,
        low=min(over) if over else None,
        high=max(over) if over else None,
        beside=beside,
        ratio=value / beside.value if beside and beside.value else None,
        target=target,
        at_least=at_least,
        verdict=verdict,
    )


def number(value: float) -> str:
    """Three significant digits, as a person reads them."""
    if math.isnan(value):
        return "-"
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def rows_of(report: Report) -> list[tuple[str, ...]]:
    """The table: measure, value, extremes, beside, ratio, target, verdict."""
    rows = list[tuple[str, ...]]()
    for one in report.measures:
        extremes = f"{number(one.low)}–{number(one.high)}" if one.low is not None and one.high is not None else ""
        beside = f"{one.beside.name} {number(one.beside.value)}" if one.beside else ""
        ratio = f"{number(one.ratio)}×" if one.ratio is not None else ""
        target = f"{'≥' if one.at_least else '≤'} {number(one.target)}" if one.target is not None else ""
        rows.append(
            (one.name, f"{number(one.value)} {one.unit}", extremes, beside, ratio, target, "" if one.verdict == "none" else one.verdict)
        )
    return rows


def text_of(report: Report) -> str:
    """All of a report as lines for a terminal or a file."""
    machine = report.machine
    lines = [
        f"{report.benchmark}: {report.rounds} rounds, medians; {machine.cores} cores, {machine.memory_mib} MiB, Linux {machine.kernel}, "
        f"Python {machine.python}, load {machine.load_before:.1f} → {machine.load_after:.1f}",
        "",
        *_aligned([("measure", "value", "rounds", "beside", "ratio", "target", ""), *rows_of(report)]),
    ]
    if report.processes:
        head = ("process at rest", "count", "PSS MiB", "private MiB", "CPU % of a core")
        lines += ["", *_aligned([head, *_folded(report.processes)])]
    return "\n".join([*lines, "", *report.notes]).rstrip()


def _folded(processes: Sequence[ProcessRow]) -> list[tuple[str, ...]]:
    """One line per name, in order of appearance: a server's connections count together."""
    kinds: dict[str, list[ProcessRow]] = {}
    for row in processes:
        kinds.setdefault(f"{row.part}/{row.name}", []).append(row)
    return [
        (
            name,
            str(len(some)),
            f"{sum(p.pss_mib for p in some):.1f}",
            f"{sum(p.private_mib for p in some):.1f}",
            f"{sum(p.cpu_percent for p in some):.2f}",
        )
        for name, some in kinds.items()
    ]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
