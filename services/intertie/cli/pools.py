"""`intertie pool …`: what is decided about a pool: its mode by two questions, its phase, its downtimes; and how all of that came about."""

from __future__ import annotations

import sys
from datetime import datetime

import click

from intertie.cli.client import Client
from intertie.cli.local_owner import until_of
from intertie.cli.out import json_option, line, local, note, now, print_json, reason_option, table
from intertie.cli.session import connect
from intertie.contracts.base import Empty
from intertie.contracts.modes import DowntimeBody, ModeBody, PhaseBody, PoolHistory, PoolHistoryRow
from intertie.contracts.site import AccessMode, Downtime, DowntimeEffect, JobOffering, Phase, PoolRecord
from intertie.errors import Refused
from intertie.ids import TenantName
from intertie.text import language, say
from intertie.text.groups import Group

TEXTS = {
    "outsider": (
        "May an outsider (the hub) decide what runs in {pool}?",
        "可否由外部(平台)决定 {pool} 上运行什么?",
    ),
    "response": (
        "Can the response time be held in {pool}?",
        "{pool} 的响应时间能否保证?",
    ),
    "which": ("Both answers are yes: managed or service?", "两问均为是:资源纳管(managed)还是服务接入(service)?"),
    "neither": (
        "with these answers the pool can be neither managed nor a service: leave it a candidate",
        "按此回答,该资源池既不能纳管也不能提供服务,请保持候选状态",
    ),
    "decided": ("{pool} is {mode}: decided by {by} at {at}", "{pool} 接入模式:{mode},{at} 由 {by} 决定"),
    "answers": (
        "an outsider decides: {outsider} · response time held: {response}",
        "外部可决定:{outsider} · 响应时间可保证:{response}",
    ),
    "undecided": ("no decision on record: intertie pool mode {pool}", "尚无接入模式决定:intertie pool mode {pool}"),
    "differs": (
        "decided {decided}, declared {declared}: nothing new begins until they agree",
        "决定为 {decided},申报为 {declared}:一致之前不接收新任务",
    ),
    "joining": ("declared at joining", "接入时申报"),
    "moved": ("{pool} is {phase}", "{pool} 接入阶段:{phase}"),
    "only": ("for {tenants} only", "仅限 {tenants}"),
    "offers": (
        "job offering {name}: up to {devices} devices for {wall} s, {price} {currency} per device-hour, answered within {answer} s{hand}",
        "作业请求能力 {name}:每次至多 {devices} 卡、{wall} 秒,{price} {currency}/卡时,{answer} 秒内答复{hand}",
    ),
    "by_hand": (" by a person", "(人工)"),
    "planned": ("planned", "计划内"),
    "unplanned": ("at short notice", "临时"),
    "down": ("down {start} – {end} ({kind}, {effect}): {reason}", "停机 {start} – {end}({kind},{effect}):{reason}"),
    "no_downtimes": ("No downtime is declared.", "无停机窗口。"),
    "downtime_added": ("{id} {start} – {end}, {kind}", "{id} {start} – {end},{kind}"),
    "downtime_removed": ("taken back", "已撤销"),
    "no_history": ("Nothing was decided yet.", "尚无决定记录。"),
    "yes": ("yes", "是"),
    "no": ("no", "否"),
    "not_asked": ("not asked", "未询问"),
}


def _say(key: str, **values: object) -> str:
    english, chinese = TEXTS[key]
    return (chinese if language() == "zh" else english).format(**values)


def mode_word(mode: AccessMode) -> str:
    return say(f"site.mode_{mode}", language())


def phase_word(phase: Phase) -> str:
    return say(f"site.phase_{phase}", language())


def _answer(value: bool | None) -> str:
    return _say("not_asked") if value is None else _say("yes" if value else "no")


def path_of(name: str) -> str:
    """`/v1/sites/SITE/pools/POOL` of `SITE/POOL`."""
    site, _, pool = name.partition("/")
    if not site or not pool or "/" in pool:
        raise click.BadParameter("name it as SITE/POOL")
    return f"/v1/sites/{site}/pools/{pool}"


def decided_lines(pool: PoolRecord) -> list[str]:
    """What `site show` says of a pool's decision, phase list and downtimes."""
    name, decision = f"{pool.site}/{pool.pool}", pool.decision
    if decision is None:
        said = [_say("undecided", pool=name)]
    else:
        by = decision.decided_by + (f" ({_say('joining')})" if decision.at_joining else "")
        said = [
            _say("decided", pool=name, mode=mode_word(decision.mode), by=by, at=local(decision.decided_at)),
            _say("answers", outsider=_answer(decision.outsider_decides), response=_answer(decision.response_time_held)),
        ]
        if pool.mode is None:
            said.append(_say("differs", decided=mode_word(decision.mode), declared=mode_word(pool.profile.mode)))
    if pool.tenants and pool.phase in (Phase.PILOT, Phase.PARALLEL):
        said.append(_say("only", tenants=", ".join(pool.tenants)))
    said += [down_line(one) for one in pool.downtimes if one.end > now()]
    return said + [_offer_line(one) for one in pool.offerings]


def _offer_line(one: JobOffering) -> str:
    return _say(
        "offers",
        name=one.name,
        devices=one.max_devices,
        wall=one.max_wall_s,
        price=one.price_per_hour,
        currency=one.currency,
        answer=one.answer_within_s,
        hand=_say("by_hand") if one.by_hand else "",
    )


def down_line(one: Downtime) -> str:
    kind = _say("planned" if one.planned else "unplanned")
    return _say("down", start=local(one.start), end=local(one.end), kind=kind, effect=one.effect, reason=one.reason)


@click.group(cls=Group)
def pool() -> None:
    """Pools: their mode, phase and downtimes, each a decision on record."""


@pool.command()
@click.argument("name", metavar="SITE/POOL")
@click.option("--outsider-decides", type=click.Choice(["yes", "no"]), help="May an outsider decide what runs here?")
@click.option("--response-time-held", type=click.Choice(["yes", "no"]), help="Can the response time be held?")
@click.option("--mode", type=click.Choice([m.value for m in AccessMode]), help="managed or service; the answers must support it.")
@reason_option("Why; it stands beside the decision.")
@json_option
def mode(name: str, outsider_decides: str | None, response_time_held: str | None, mode: str | None, reason: str, as_json: bool) -> None:
    """Decide the mode of SITE/POOL by its two questions. What is not given is asked. A change wants a drained pool."""
    path = path_of(name)
    outsider = _ask("outsider", name, outsider_decides, "--outsider-decides")
    response = _ask("response", name, response_time_held, "--response-time-held")
    chosen = AccessMode(mode) if mode is not None else _follows(outsider, response)
    body = ModeBody(mode=chosen, outsider_decides=outsider, response_time_held=response, reason=reason)
    record = connect().put(f"{path}/mode", PoolRecord, body)
    if as_json:
        print_json(record)
        return
    for words in decided_lines(record):
        line(words)


def _ask(question: str, name: str, given: str | None, option: str) -> bool:
    if given is not None:
        return given == "yes"
    if not sys.stdin.isatty():
        raise click.UsageError(f"{option} yes|no is needed: {TEXTS[question][0].format(pool=name)}")
    return click.confirm(_say(question, pool=name), err=True)


def _follows(outsider: bool, response: bool) -> AccessMode:
    """The mode that the answers leave; asked where both are open."""
    if outsider and response:
        if not sys.stdin.isatty():
            raise click.UsageError("both answers are yes: say --mode managed or --mode service")
        return AccessMode(click.prompt(_say("which"), type=click.Choice([m.value for m in AccessMode]), err=True))
    if not outsider and not response:
        raise Refused("registry.mode.neither", _say("neither"))
    return AccessMode.MANAGED if outsider else AccessMode.SERVICE


@pool.command()
@click.argument("name", metavar="SITE/POOL")
@click.argument("next_phase", metavar="NEXT", type=click.Choice([p.value for p in Phase]))
@click.option("--tenant", "tenants", multiple=True, help="While pilot or parallel: only this tenant; repeat it for more.")
@click.option("--any-tenant", is_flag=True, help="Empty that list: every tenant that is mapped.")
@reason_option("Why; it stands in the history.")
@json_option
def phase(name: str, next_phase: str, tenants: tuple[str, ...], any_tenant: bool, reason: str, as_json: bool) -> None:
    """Move SITE/POOL to phase NEXT: candidate → pilot → parallel → production → suspended → closed, as the table allows."""
    named = [TenantName(one) for one in tenants] if tenants else [] if any_tenant else None
    body = PhaseBody(phase=Phase(next_phase), reason=reason, tenants=named)
    record = connect().post(f"{path_of(name)}/phase", PoolRecord, body)
    if as_json:
        print_json(record)
        return
    line(_say("moved", pool=name, phase=phase_word(record.phase)))


@pool.command()
@click.argument("name", metavar="SITE/POOL")
@json_option
def history(name: str, as_json: bool) -> None:
    """All that was decided about SITE/POOL, newest first."""
    found = _history(connect(), name)
    if as_json:
        print_json(found)
        return
    rows = [(str(row.number), local(row.at), row.by, *told(row)) for row in found.rows]
    table(("N", "AT", "BY", "WHAT", "WHY"), rows, empty=_say("no_history"))


def told(row: PoolHistoryRow) -> tuple[str, str]:
    """What was decided, and why, as two cells."""
    if row.decision is not None:
        answers = _say("answers", outsider=_answer(row.decision.outsider_decides), response=_answer(row.decision.response_time_held))
        return f"{mode_word(row.decision.mode)} ({answers})", row.decision.reason
    if row.move is not None:
        return f"{phase_word(row.move.before)} → {phase_word(row.move.after)}" + (
            f" [{row.move.spec}]" if row.move.spec else ""
        ), row.move.reason
    assert row.downtime is not None
    return f"{row.downtime.id} {local(row.downtime.start)} – {local(row.downtime.end)}" + (
        f" ({_say('downtime_removed')})" if row.removed else ""
    ), row.downtime.reason


def _history(client: Client, name: str) -> PoolHistory:
    return client.get(f"{path_of(name)}/history", PoolHistory)


@pool.group()
def downtime() -> None:
    """Windows in which a pool is down: nothing is begun that would run into one, and it lifts by itself."""


@downtime.command("add")
@click.argument("name", metavar="SITE/POOL")
@click.option("--start", required=True, metavar="18:00|2h|2026-12-31T18:00", help="When it goes down; `now` is now.")
@click.option("--end", required=True, metavar="20:00|4h|2026-12-31T20:00", help="When it is back; 4h counts from the start.")
@click.option(
    "--effect", type=click.Choice([e.value for e in DowntimeEffect]), default="full", show_default=True, help="reduced: work goes on."
)
@reason_option("Why; those who wait read it.")
@json_option
def add_downtime(name: str, start: str, end: str, effect: str, reason: str, as_json: bool) -> None:
    """Declare a downtime of SITE/POOL. At least 24 h ahead it is planned, and breaks no promise."""
    began, over = window_of(start, end, now().astimezone())
    record = connect().post(
        f"{path_of(name)}/downtimes", PoolRecord, DowntimeBody(start=began, end=over, effect=DowntimeEffect(effect), reason=reason)
    )
    if as_json:
        print_json(record)
        return
    for one in record.downtimes:
        if (one.start, one.end) == (began, over):
            kind = _say("planned" if one.planned else "unplanned")
            line(_say("downtime_added", id=one.id, start=local(one.start), end=local(one.end), kind=kind))


def window_of(start: str, end: str, moment: datetime) -> tuple[datetime, datetime]:
    """A length as the end counts from the start; a clock time is the next one after it."""
    began = moment if start == "now" else until_of(start, moment)
    return began, until_of(end, began)


@downtime.command("list")
@click.argument("name", metavar="SITE/POOL")
@json_option
def list_downtimes(name: str, as_json: bool) -> None:
    """Downtimes of SITE/POOL that are not over."""
    record = _history(connect(), name).record
    if as_json:
        print_json(record.downtimes)
        return
    rows = [
        (one.id, local(one.start), local(one.end), _say("planned" if one.planned else "unplanned"), one.effect, one.declared_by, one.reason)
        for one in record.downtimes
        if one.end > now()
    ]
    table(("DOWNTIME", "START", "END", "NOTICE", "EFFECT", "BY", "WHY"), rows, empty=_say("no_downtimes"))


@downtime.command("remove")
@click.argument("name", metavar="SITE/POOL")
@click.argument("downtime_id", metavar="DOWNTIME")
@json_option
def remove_downtime(name: str, downtime_id: str, as_json: bool) -> None:
    """Take a downtime back, or end it now."""
    record = connect().post(f"{path_of(name)}/downtimes/{downtime_id}/remove", PoolRecord, Empty())
    if as_json:
        print_json(record)
        return
    note(_say("downtime_removed"))
