"""`intertie reconcile`: three books per attempt, scheduler, meter and the site's own accounting; counts first, then each difference."""

from __future__ import annotations

import sys

import click

from intertie.cli.out import EXIT_FAILED, json_option, line, note, print_json, table
from intertie.cli.session import connect
from intertie.contracts.accounting import BypassUse, Difference, Differs, ReconciliationReply, SiteReconciliation
from intertie.text import language

US_PER_CARD_HOUR = 1_000 * 3_600 * 1_000_000

TEXTS = {
    "none": (
        "No site has told its own accounting of {period}: only sites with a scheduler of their own keep one",
        "{period} 内没有站点上报本地记账:仅有自有调度系统的站点才有",
    ),
    "site": ("{site} {period}  clusters: {clusters}", "{site} {period}  集群:{clusters}"),
    "days": ("  {read} of {due} days read", "  已读取 {read}/{due} 天"),
    "incomplete": (", incomplete: {days}", ",不完整:{days}"),
    "counts": (
        "  counts: {ours} runs here, {theirs} there: {word}; {used} card-hours here, {theirs_used} there",
        "  计数:本方 {ours} 次,站点 {theirs} 次:{word};本方 {used} 卡时,站点 {theirs_used} 卡时",
    ),
    "agree": ("they agree", "一致"),
    "differ": ("they differ", "不一致"),
    "unknown": ("unknown", "未知"),
    "all": ("  {count} attempts compared: no difference", "  比对 {count} 次运行:无差异"),
    "found": ("  {count} attempts compared: {found} differences", "  比对 {count} 次运行:{found} 处差异"),
    "columns": ("ATTEMPT,KIND,NATIVE,OURS,THEIRS,BEYOND,WHY", "运行,差异,本地作业号,本方,站点,容差,说明"),
    "bypass": (
        "  outside the federation, mapped account {account}: {runs} runs, {hours} card-hours{unknown}",
        "  未经联邦,映射账号 {account}:{runs} 次运行,{hours} 卡时{unknown}",
    ),
    "bypass_unknown": (" ({count} not recorded)", "({count} 次未记录)"),
    "kind.missing": ("missing there", "站点缺失"),
    "kind.extra": ("ghost: extra there", "幽灵:站点多出"),
    "kind.doubled": ("doubled", "重复"),
    "kind.runaway": ("runaway: runs on there", "失控:站点仍在运行"),
    "kind.duration": ("duration", "时长"),
    "kind.quantity": ("quantity", "数量"),
    "kind.attribution": ("attribution", "归属"),
    "kind.clock": ("clock", "时钟"),
    "kind.meter": ("scheduler and meter differ", "调度与计量不一致"),
}


def _say(key: str, **values: object) -> str:
    english, chinese = TEXTS[key]
    return (chinese if language() == "zh" else english).format(**values)


def hours(milli_us: int | None) -> str:
    return _say("unknown") if milli_us is None else f"{milli_us / US_PER_CARD_HOUR:.4f}"


@click.command()
@click.option("--site", default="", help="Of this site only.")
@click.option("--period", default="", metavar="2026-12", help="Another month than this one.")
@json_option
def reconcile(site: str, period: str, as_json: bool) -> None:
    """Compare our books with each site's own accounting. Finds, and corrects nothing; leaves with 1 if anything differs."""
    found = connect().get("/v1/reconciliation", ReconciliationReply, {"site": site, "period": period})
    if as_json:
        print_json(found)
    elif not found.sites:
        note(_say("none", period=found.period))
    else:
        for one in found.sites:
            _show(one)
    if any(one.differences or not one.counts_agree for one in found.sites):
        sys.exit(EXIT_FAILED)


def _show(one: SiteReconciliation) -> None:
    line(_say("site", site=one.site, period=one.period, clusters=", ".join(one.clusters) or "-"))
    incomplete = _say("incomplete", days=", ".join(one.incomplete_days)) if one.incomplete_days else ""
    line(_say("days", read=one.days_read, due=one.days_due) + incomplete)
    word = _say("agree" if one.counts_agree else "differ")
    used, theirs_used = hours(one.our_milli_us), hours(one.native_milli_us)
    line(_say("counts", ours=one.our_runs, theirs=one.native_runs, word=word, used=used, theirs_used=theirs_used))
    if not one.differences:
        line(_say("all", count=one.compared))
    else:
        line(_say("found", count=one.compared, found=len(one.differences) + one.more))
        table(_say("columns").split(","), [_row(each) for each in one.differences], empty="")
    for use in one.bypass:
        line(_bypass(use))


def _row(one: Difference) -> tuple[str, ...]:
    return one.attempt, kind_text(one.kind), one.native_id or "-", one.ours, one.theirs, one.beyond or "-", one.text


def kind_text(kind: Differs) -> str:
    return _say(f"kind.{kind.value}")


def _bypass(use: BypassUse) -> str:
    unknown = _say("bypass_unknown", count=use.unknown) if use.unknown else ""
    return _say("bypass", account=use.account, runs=use.runs, hours=hours(use.device_us * 1_000), unknown=unknown)
