"""What a site lent in a period by its own record, priced with its own agreement: a preview that needs nobody. The hub's statement counts.

Only run time is shown: the record of an attempt's run is here for as long as the attempt is, its staging clocks are in its segments alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from intertie.agent.core import usage
from intertie.agent.core.model import Attempt, State
from intertie.agent.core.periods import MICROSECOND, Period
from intertie.contracts.job import Attribution
from intertie.contracts.local import LocalStatement, PoolUse, PreviewLine
from intertie.contracts.usage import MeterSpec, Segment, UsagePhase, WhoPays
from intertie.errors import Refused
from intertie.ids import AttemptId, SiteName, TenantName
from intertie.rating import rate_period

# A screen's worth of pages; the sums are of all lines.
LINES = 500


@dataclass(frozen=True, slots=True)
class Record:
    """An attempt, and what is known of it beside its row."""

    attempt: Attempt
    run_us: int
    """Until its end, or until now."""
    islanded: bool
    told: bool


def statement(
    records: Iterable[Record], period: Period, time_zone: str, site: SiteName, spec: MeterSpec | None, now: datetime, untold: int
) -> LocalStatement:
    """The period's lines, newest last, and their sums."""
    lines: list[PreviewLine] = []
    total = Decimal(0)
    trouble = "" if spec is not None else "no agreement between this site and the platform is in its settings"
    for record in records:
        segment = _run(record, site)
        if segment is None or segment.end <= period.start or segment.start >= period.end:
            continue
        line, amount, why = _line(record, segment, period, spec)
        trouble = trouble or why
        total += amount or 0
        lines.append(line)
    if spec is not None and not trouble and set(spec.charged_phases) - {UsagePhase.RUN}:
        trouble = "the agreement charges other clocks than the run, too: they are in the hub's statement, not in this preview"
    lines.sort(key=lambda line: (line.start, line.attempt))
    priced = spec is not None and all(line.amount is not None for line in lines)
    return LocalStatement(
        site=site,
        period=period.name,
        start=period.start,
        end=period.end,
        time_zone=time_zone,
        at=now,
        lines=lines[-LINES:],
        pools=_by_pool(lines),
        quantity_milli_us=sum(line.quantity_milli_us for line in lines),
        total=total if priced else None,
        currency=spec.currency if spec else "",
        agreement=f"{spec.spec} rev {spec.revision}" if spec else "",
        unpriced=trouble,
        untold_segments=untold,
        more=max(0, len(lines) - LINES),
    )


def _run(record: Record, site: SiteName) -> Segment | None:
    """The attempt's run as one segment, by its own anchor."""
    attempt = record.attempt
    if attempt.started is None or record.run_us <= 0:
        return None
    whole = [usage.Span(UsagePhase.RUN, 0, record.run_us)]
    return usage.segments(attempt, site, whole, after=0, islanded=record.islanded)[0]


def _line(record: Record, segment: Segment, period: Period, spec: MeterSpec | None) -> tuple[PreviewLine, Decimal | None, str]:
    """The line, what the site earns by it, and why that is not known."""
    attempt = record.attempt
    start, end = max(segment.start, period.start), min(segment.end, period.end)
    us = (end - start) // MICROSECOND
    amount, formula, trouble = _priced(attempt, segment, period, spec) if spec is not None else (None, "", "")
    line = PreviewLine(
        job=attempt.job,
        attempt=attempt.id,
        pool=attempt.pool,
        kind=attempt.kind,
        start=start,
        end=end,
        run_us=us,
        quantity_milli_us=us * segment.quantity_milli,
        running=attempt.state is State.RUNNING,
        outcome=attempt.ended.outcome if attempt.ended else None,
        islanded=record.islanded,
        told=record.told,
        amount=amount,
        formula=formula,
    )
    return line, amount, trouble


def _priced(attempt: Attempt, segment: Segment, period: Period, spec: MeterSpec) -> tuple[Decimal | None, str, str]:
    whose = Attribution(
        tenant=attempt.tenant or TenantName("unknown"), job=attempt.job, attempt=attempt.id, site=segment.site, pool=attempt.pool
    )
    ended = attempt.ended
    try:
        rated = rate_period(
            [segment], spec, ended.outcome if ended else None, ended.cause if ended else None, whose, period.start, period.end
        )
    except Refused as err:
        return None, "", err.text
    # What the site itself, or nobody, bears earns it nothing.
    earned = Decimal(0) if rated.payer in (WhoPays.SITE, WhoPays.NOBODY) else rated.amount
    return earned, " + ".join(charge.formula.text for charge in rated.charges), ""


def _by_pool(lines: Sequence[PreviewLine]) -> list[PoolUse]:
    found: dict[str, list[PreviewLine]] = {}
    for line in lines:
        found.setdefault(line.pool, []).append(line)
    return [
        PoolUse(pool=some[0].pool, attempts=len(some), quantity_milli_us=sum(line.quantity_milli_us for line in some))
        for _, some in sorted(found.items())
    ]


def in_force(specs: Iterable[MeterSpec], now: datetime) -> MeterSpec | None:
    """The newest revision that is in force."""
    found = [spec for spec in specs if spec.effective_from <= now]
    return max(found, key=lambda spec: (spec.effective_from, spec.revision), default=None)


def run_us(attempt: Attempt, boot_us: int, boot: str) -> int:
    """How long it ran; until now if it runs in this boot, nothing if nobody can say."""
    if attempt.ended is not None:
        return attempt.ended.ran_us
    if attempt.started is None or attempt.kernel_boot != boot:
        return 0
    return max(0, boot_us - attempt.started.boot_ns // 1000)


def of_period(attempts: Iterable[Attempt], period: Period) -> list[Attempt]:
    """Lent attempts that may have run in it: what started after it is not looked at."""
    return [a for a in attempts if a.local is None and a.started is not None and usage.utc_of(a.started.utc_ns) < period.end]


def untold(segments: Iterable[Segment]) -> frozenset[AttemptId]:
    return frozenset(segment.attempt for segment in segments)
