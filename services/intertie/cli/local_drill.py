"""`intertie local drill …`: the owner's word about cuts of the link, through the agent's socket; it needs neither hub nor network."""

from __future__ import annotations

from datetime import timedelta

import click

from intertie.cli.local_door import call, find_socket
from intertie.cli.out import json_option, line, now, print_json
from intertie.cli.out import local as clock_time
from intertie.contracts.local import AllowDrill, LocalDrill
from intertie.text import language
from intertie.text.groups import Group

TEXTS = {
    "allowed": ("a drill may cut the link for up to {longest} until {until}", "允许演练断开链路,每次最长 {longest},截至 {until}"),
    "no_end": ("you take it back", "撤回为止"),
    "not_allowed": ("no drill is allowed here", "本站点不允许演练"),
    "on": ("drill {drill} is on: the link is cut, {left} s are left", "演练 {drill} 进行中:链路已断开,剩余 {left} 秒"),
    "planned": ("drill {drill} begins at {start}", "演练 {drill} 将于 {start} 开始"),
}


def _say(key: str, **values: object) -> str:
    english, chinese = TEXTS[key]
    return (chinese if language() == "zh" else english).format(**values)


def seconds_of(text: str) -> int:
    """`90`, `90s`, `10m`, `1h` in seconds; a usage error otherwise."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("s", "m", "h", "d") else (text, "s")
    if not (number.isascii() and number.isdigit()):
        raise click.BadParameter(f"{text!r} is no length of time: 90s, 10m, 1h")
    return int(number) * {"s": 1, "m": 60, "h": 3_600, "d": 86_400}[unit]


def cut_of(text: str) -> int:
    """How long one cut may be, in seconds; a usage error beyond what both sides take."""
    if not 5 <= (seconds := seconds_of(text)) <= 3_600:
        raise click.BadParameter(f"a cut of {text} is not to be had: 5s at least, 1h at most")
    return seconds


def span(seconds: int) -> str:
    """`8 s`, `15 min`, as agreed and not rounded."""
    if seconds % 60:
        return f"{seconds} s" if language() == "en" else f"{seconds} 秒"
    return f"{seconds // 60} min" if language() == "en" else f"{seconds // 60} 分钟"


@click.group(cls=Group)
def drill() -> None:
    """Drills: whether the link may be cut for a rehearsal here. `stop` ends one at once, whoever else is away."""


def _tell(told: LocalDrill, as_json: bool) -> None:
    if as_json:
        print_json(told)
        return
    if told.consent is not None and told.consent.allowed:
        until = clock_time(told.consent.until) if told.consent.until else _say("no_end")
        line(_say("allowed", longest=span(told.consent.longest_s), until=until))
    else:
        line(_say("not_allowed"))
    if told.on:
        line(_say("on", drill=told.drill, left=told.left_s))
    elif told.drill:
        line(_say("planned", drill=told.drill, start=clock_time(told.start)))


@drill.command()
@click.option(
    "--for", "for_", default="", metavar="TIME", help="How long the consent holds, such as 8h or 30d (default: until taken back)."
)
@click.option("--until", type=click.DateTime(), default=None, help="Until when the consent holds, in this machine's own time.")
@click.option("--longest", default="15m", show_default=True, help="The longest cut that you allow, at most 1h.")
@json_option
@click.pass_obj
def allow(data: str | None, for_: str, until: object, longest: str, as_json: bool) -> None:
    """Consent to drills here: the agent may close its own connection for as long as you say."""
    from datetime import datetime

    ends = until.astimezone() if isinstance(until, datetime) else now() + timedelta(seconds=seconds_of(for_)) if for_ else None
    body = AllowDrill(until=ends, longest_s=cut_of(longest))
    _tell(call(find_socket(data), "POST", "/v1/drill/allow", LocalDrill, body), as_json)


@drill.command()
@json_option
@click.pass_obj
def revoke(data: str | None, as_json: bool) -> None:
    """Allow no drill from now on; one that is on ends at once. It stands above any token at the hub."""
    _tell(call(find_socket(data), "POST", "/v1/drill/revoke", LocalDrill), as_json)


@drill.command()
@json_option
@click.pass_obj
def stop(data: str | None, as_json: bool) -> None:
    """End the drill that is on now: the agent connects again at once."""
    _tell(call(find_socket(data), "POST", "/v1/drill/stop", LocalDrill), as_json)


@drill.command()
@json_option
@click.pass_obj
def status(data: str | None, as_json: bool) -> None:
    """What you allow, what is planned, and whether the link is cut now."""
    _tell(call(find_socket(data), "GET", "/v1/drill", LocalDrill), as_json)
