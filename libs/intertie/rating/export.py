"""A statement as CSV (RFC 4180, CRLF): one row per charge, and one per attempt that has none, so that nothing is left out silently.

Columns, in both languages in this order: statement, tenant, period, time zone, job, job name, attempt, site, outcome, cause, payer, phase,
device kind, model, start, end (UTC, ISO 8601), seconds, devices, card-hours, price per card-hour, currency, amount, agreement, revision,
clause, formula, islanded, complete, missing, because. Numbers are plain decimals; the amounts of payer `tenant` add up to the statement's total.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal

from intertie.contracts.call_offerings import CallLine
from intertie.contracts.usage import AttemptBook, Charge, Statement, StatementLine
from intertie.rating.text import formula_text

COLUMNS: Mapping[str, str] = {
    "statement": "账单",
    "tenant": "租户",
    "period": "账期",
    "time_zone": "结算时区",
    "job": "任务",
    "job_name": "任务名",
    "attempt": "运行",
    "site": "站点",
    "outcome": "结果",
    "cause": "原因",
    "payer": "承担方",
    "phase": "阶段",
    "device": "设备",
    "model": "型号",
    "start_utc": "开始(UTC)",
    "end_utc": "结束(UTC)",
    "seconds": "秒",
    "devices": "数量",
    "card_hours": "卡时",
    "per_card_hour": "单价(每卡时)",
    "currency": "币种",
    "amount": "金额",
    "agreement": "计量口径",
    "revision": "版本",
    "clause": "条款",
    "formula": "算式",
    "islanded": "自治运行",
    "complete": "已齐全",
    "missing": "缺少",
    "because": "承担依据",
}

# A cell that begins so is run as a formula by spreadsheet programs; a job's name is written by its user.
_DANGEROUS = ("=", "+", "-", "@", "\t", "\r")


def statement_csv(statement: Statement, language: str = "en") -> str:
    """The statement's rows as CSV text. `zh` has Chinese headers and begins with a byte-order mark, which spreadsheet programs need."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(COLUMNS.values() if language == "zh" else COLUMNS.keys())
    for line in statement.lines:
        for book in line.attempts:
            charges: Sequence[Charge | None] = book.charges or [None]
            for charge in charges:
                writer.writerow(_row(statement, line, book, charge, language))
    for calls in statement.calls:
        writer.writerows(_call_rows(statement, calls))
    return ("\ufeff" if language == "zh" else "") + out.getvalue()


def _row(statement: Statement, line: StatementLine, book: AttemptBook, charge: Charge | None, language: str) -> Sequence[str]:
    whose = [statement.statement, statement.tenant, statement.period, statement.time_zone, line.job, line.name, book.attempt, book.site]
    whose += [book.outcome or "", str(book.cause or "")]
    state = ["yes" if book.complete else "no", book.missing, _because(book)]
    if charge is None:
        return [_safe(cell) for cell in [*whose, *[""] * 16, "", *state]]
    formula = charge.formula
    measured = [
        str(charge.payer),
        str(formula.phase),
        str(formula.kind),
        formula.model,
        _instant(charge.start),
        _instant(charge.end),
        _plain(Decimal(formula.duration_us) / 1_000_000),
        _plain(Decimal(formula.quantity_milli) / 1_000),
        _plain((Decimal(formula.duration_us * formula.quantity_milli) / 3_600_000_000_000).quantize(Decimal("0.000001"))),
    ]
    priced = [_plain(formula.per_hour), charge.currency, f"{charge.amount:f}", charge.spec, str(charge.spec_revision)]
    said = [formula.clause, formula_text(formula, language), "yes" if charge.islanded else "no"]
    return [*[_safe(cell) for cell in whose], *measured, *priced, *[_safe(cell) for cell in said], *[_safe(cell) for cell in state]]


def _call_rows(statement: Statement, calls: CallLine) -> Sequence[Sequence[str]]:
    """Calls of one offering and day: what the tenant pays, and on a row of its own what others do. Each call is at `GET /v1/calls`."""
    name = f"{calls.site}/{calls.offering} {calls.day}: {calls.calls} calls"
    whose = [statement.statement, statement.tenant, statement.period, statement.time_zone, "", name, "", calls.site]
    outcomes = ", ".join(f"{outcome} {count}" for outcome, count in sorted(calls.outcomes.items()))
    state = ["no" if calls.waiting else "yes", f"{calls.waiting} calls wait" if calls.waiting else "", ""]
    rows = [("tenant", calls.amount, calls.text)]
    if calls.paid_by_others:
        rows.append(("others", calls.paid_by_others, ""))
    return [
        [
            _safe(cell)
            for cell in [*whose, outcomes, "", payer, "call", *[""] * 8, statement.currency, f"{amount:f}", "", "", "", text, "", *state]
        ]
        for payer, amount, text in rows
    ]


def _because(book: AttemptBook) -> str:
    """What its end alone does not say: `replaced by …`, `lost`, `refined`, `granted by …`."""
    said = {"replaced": f"replaced by {book.other_attempt}", "lost": "lost"}.get(book.because, "")
    grant = f"granted by {book.grant}{' (expired)' if book.grant_expired else ''}" if book.grant else ""
    return "; ".join(part for part in (said, "refined" if book.refined else "", grant) if part)


def _safe(cell: str) -> str:
    return f"'{cell}" if cell.startswith(_DANGEROUS) else cell


def _instant(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat()


def _plain(number: Decimal) -> str:
    return f"{number.normalize():f}"
