"""An amount as a sentence that a person can check with a pocket calculator: `6.418 s × 1 slot × ¥6.00/card-hour = ¥0.0107`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import ROUND_HALF_EVEN, Decimal

from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import Formula, MeterSpec, UsagePhase, WhoPays

SIGNS: Mapping[str, str] = {"CNY": "¥", "USD": "$", "EUR": "€", "GBP": "£"}

PHASES_ZH: Mapping[UsagePhase, str] = {
    UsagePhase.SITE_QUEUE: "站点排队",
    UsagePhase.STAGE_IN: "准备",
    UsagePhase.RUN: "运行",
    UsagePhase.SUSPENDED: "暂停",
    UsagePhase.STAGE_OUT: "取回结果",
}
PAYERS_ZH: Mapping[WhoPays, str] = {
    WhoPays.TENANT: "租户",
    WhoPays.SITE: "站点",
    WhoPays.PLATFORM: "平台",
    WhoPays.NOBODY: "暂无人承担",
}
ENDS_ZH: Mapping[str, str] = {
    "succeeded": "成功",
    "job": "任务自身原因",
    "cancelled": "取消",
    "preempted": "被抢占",
    "site": "站点原因",
    "platform": "平台原因",
    "unknown": "原因不明",
    "open": "尚未结束",
    "lost": "失联结案",
}


def money_text(amount: Decimal, currency: str) -> str:
    """`¥0.0107`, `-¥12.50`: two decimals at least, as many more as the amount has."""
    digits = abs(amount).normalize()
    exponent = digits.as_tuple().exponent
    assert isinstance(exponent, int), amount
    places = max(2, -exponent)
    sign = SIGNS.get(currency, f"{currency} ")
    return f"{'-' if amount < 0 else ''}{sign}{digits:.{places}f}"


def formula_text(formula: Formula, language: str = "en") -> str:
    """The formula as one line; `language` is `en` or `zh`. An amount that rounds to nothing shows what it was before."""
    factors = f"{_seconds(formula.duration_us)} × {_quantity(formula, language)}"
    if formula.per_hour == 0:
        return f"{factors} × {'不计费' if language == 'zh' else 'not charged'} = {money_text(Decimal(0), formula.currency)}"
    hour = "卡时" if language == "zh" else "card-hour"
    amount = money_text(formula.amount, formula.currency)
    line = f"{factors} × {money_text(formula.per_hour, formula.currency)}/{hour} = "
    if formula.unrounded < 0:
        line = f"-({line.removesuffix(' = ')}) = "
    if formula.amount == 0 and formula.unrounded != 0:
        return f"{line}{money_text(_significant(formula.unrounded), formula.currency)} → {amount}"
    return f"{line}{amount}"


def clause_text(spec: MeterSpec, phase: UsagePhase, end: str, payer: WhoPays, language: str = "en") -> str:
    """Which words of which agreement: `spec-… rev 1: run is charged; succeeded → tenant`. `end` is `succeeded`, a cause, or `open`."""
    charged = phase in spec.charged_phases
    if language == "zh":
        rule = f"{PHASES_ZH[phase]}{'计费' if charged else '不计费'}"
        return f"{spec.spec} 第 {spec.revision} 版：{rule}；{ENDS_ZH.get(end, end)} → {PAYERS_ZH[payer]}"
    return f"{spec.spec} rev {spec.revision}: {phase} is {'charged' if charged else 'not charged'}; {end} → {payer}"


CLAUSE = re.compile(r"(?P<spec>spec-\w+) rev (?P<revision>\d+): (?P<phase>\w+) is (?P<free>not )?charged; (?P<end>\w+) → (?P<payer>\w+)")


def clause_in(clause: str, language: str) -> str:
    """A charge's clause in the reader's language. It is kept in English with the charge; what does not read as one stays as it is."""
    read = CLAUSE.fullmatch(clause)
    if language != "zh" or read is None or read["phase"] not in set(UsagePhase) or read["payer"] not in set(WhoPays):
        return clause
    rule = f"{PHASES_ZH[UsagePhase(read['phase'])]}{'不计费' if read['free'] else '计费'}"
    end, payer = ENDS_ZH.get(read["end"], read["end"]), PAYERS_ZH[WhoPays(read["payer"])]
    return f"{read['spec']} 第 {read['revision']} 版:{rule};{end} → {payer}"


def _seconds(us: int) -> str:
    """Seconds to the millisecond (the microsecond below one), with hours beside from one hour on."""
    step = Decimal("0.000001") if 0 < us < 1_000 else Decimal("0.001")
    seconds = f"{(Decimal(us) / 1_000_000).quantize(step, ROUND_HALF_EVEN):f} s"
    if us < 3_600_000_000:
        return seconds
    hours = (Decimal(us) / 3_600_000_000).quantize(Decimal("0.0001"), ROUND_HALF_EVEN).normalize()
    return f"{seconds} ({hours:f} h)"


def _quantity(formula: Formula, language: str) -> str:
    count = (Decimal(formula.quantity_milli) / 1_000).normalize()
    if formula.kind is DeviceKind.GPU:
        noun = "卡" if language == "zh" else ("card" if count <= 1 else "cards")
    else:
        noun = "slot" if language == "zh" or count <= 1 else "slots"
    return f"{count:f} {noun}"


def _significant(amount: Decimal) -> Decimal:
    """To three digits that are not zero, so that little never reads as nothing."""
    return amount.quantize(Decimal(1).scaleb(amount.adjusted() - 2), ROUND_HALF_EVEN)
