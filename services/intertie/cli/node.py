"""`intertie node …`: machines of a pool, at their head's own socket (no hub, no network); `join` and `run` are a node's own.

Only the standard library speaks here, as in `intertie local`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from intertie.cli.local_door import call, find_socket
from intertie.cli.local_drill import seconds_of
from intertie.cli.out import ago, json_option, line, note, print_json, table
from intertie.cli.out import local as clock_time
from intertie.contracts.machines import (
    CordonNode,
    MakeToken,
    NodeRecord,
    Nodes,
    ReservationFile,
    Reservations,
    RevokeNode,
    TokenMade,
)
from intertie.errors import Refused
from intertie.ids import SiteName
from intertie.text import language
from intertie.text.groups import Group

TEXTS = {
    "columns": ("NODE,STATE,DEVICES,RUNNING,SINCE,NOTE", "节点,状态,设备,运行,自,备注"),
    "head": ("head", "主节点"),
    "reachable": ("heard", "正常"),
    "lost": ("not heard", "失联"),
    "cordoned": ("cordoned", "已停止派发"),
    "revoked": ("revoked", "已吊销"),
    "single_user": ("single-user: not root", "单用户模式:非 root"),
    "lane": ("its lane stands still: {lane}", "其通道停滞:{lane}"),
    "no_nodes": ("no node has joined yet: intertie node token", "还没有节点加入:intertie node token"),
    "token_use": (
        "on the new machine, until {expires}: intertie node join --head {listen} --token-file FILE --data DIR",
        "在新机器上({expires} 前有效):intertie node join --head {listen} --token-file 文件 --data 目录",
    ),
    "holders": ("PERSON,NODE,DEVICES,UNTIL,REASON", "使用人,节点,设备,截至,原因"),
    "all": ("all", "全部"),
    "no_holders": (
        "nothing is reserved: intertie node reservations import FILE",
        "没有预留:intertie node reservations import 文件",
    ),
    "imported": ("{count} reservations hold now; each ends by itself", "{count} 条预留已生效,到期自动结束"),
}


def _say(key: str, **values: object) -> str:
    english, chinese = TEXTS[key]
    return (chinese if language() == "zh" else english).format(**values)


@click.group(cls=Group)
def node() -> None:
    """Machines of a bare-metal pool: make a machine a node, see which are there, cordon and revoke, import who holds what until when."""


DATA = click.option("--data", metavar="DIR", help="The head's data folder (of join and run: the node's own).")


@node.command()
@DATA
@click.option("--node", "name", help="The only name that this token is good for.")
@click.option("--for", "for_", default="24h", show_default=True, help="How long it is good for: 1h to 7d.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write it into this file, 0600, instead of the screen.")
@json_option
def token(data: str | None, name: str | None, for_: str, out: Path | None, as_json: bool) -> None:
    """Make a one-time token for a further machine. The head's certificate is named in it, so the machine knows whom it dials."""
    hours = -(-seconds_of(for_) // 3600)
    if not 1 <= hours <= 168:
        raise click.BadParameter(f"a token for {for_} is not to be had: 1h at least, 7d at most")
    asked = MakeToken(node=SiteName(name) if name else None, hours=hours)
    made = call(find_socket(data), "POST", "/v1/nodes/token", TokenMade, asked)
    if out is not None:
        with open(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w", encoding="ascii") as f:
            f.write(made.token + "\n")
    elif as_json:
        print_json(made)
        return
    else:
        line(made.token)
    note(_say("token_use", expires=clock_time(made.expires), listen=made.listen))


@node.command("list")
@DATA
@json_option
def list_(data: str | None, as_json: bool) -> None:
    """The machines of this pool, the head first."""
    _show(call(find_socket(data), "GET", "/v1/nodes", Nodes), as_json)


@node.command()
@click.argument("name", metavar="NODE")
@DATA
@click.option("--reason", default="", help="Why: the owner and, without names, the hub see it.")
@json_option
def cordon(name: str, data: str | None, reason: str, as_json: bool) -> None:
    """No new work for a node; what runs there goes on."""
    _show(call(find_socket(data), "POST", f"/v1/nodes/{name}/cordon", Nodes, CordonNode(on=True, reason=reason)), as_json)


@node.command()
@click.argument("name", metavar="NODE")
@DATA
@json_option
def uncordon(name: str, data: str | None, as_json: bool) -> None:
    """New work for a node again."""
    _show(call(find_socket(data), "POST", f"/v1/nodes/{name}/cordon", Nodes, CordonNode(on=False)), as_json)


@node.command()
@click.argument("name", metavar="NODE")
@DATA
@click.option("--lost", is_flag=True, help="The machine will not come back: what ran there is closed, its outcome unknown, by your word.")
@json_option
def revoke(name: str, data: str | None, lost: bool, as_json: bool) -> None:
    """Take a node out of the pool: its key opens nothing from now on."""
    _show(call(find_socket(data), "POST", f"/v1/nodes/{name}/revoke", Nodes, RevokeNode(lost=lost)), as_json)


def _show(found: Nodes, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    rows = [(one.node, _state(one), one.devices, one.running, ago(one.since) if one.since else "-", _note(one)) for one in found.nodes]
    table(_say("columns").split(","), rows, empty=_say("no_nodes"))


def _state(one: NodeRecord) -> str:
    if one.revoked_at is not None:
        return _say("revoked")
    if one.head:
        return _say("head")
    state = _say("reachable" if one.reachable else "lost")
    return f"{state}, {_say('cordoned')}" if one.cordoned else state


def _note(one: NodeRecord) -> str:
    said = [one.reason, _say("single_user") if one.single_user else "", _say("lane", lane=one.lane) if one.lane else ""]
    return "; ".join(word for word in said if word)


@node.group()
def reservations() -> None:
    """Devices that present holders keep until a date: offered to nobody else, theirs through `intertie local submit`, over by themselves."""


@reservations.command("list")
@DATA
@json_option
def list_reservations(data: str | None, as_json: bool) -> None:
    """What holds now."""
    _show_reservations(call(find_socket(data), "GET", "/v1/nodes/reservations", Reservations), as_json)


@reservations.command("import")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@DATA
@json_option
def import_(file: Path, data: str | None, as_json: bool) -> None:
    """Replace all reservations by those of FILE: CSV (person,node,devices,until,reason) or TOML ([[reservation]])."""
    told = call(find_socket(data), "PUT", "/v1/nodes/reservations", Reservations, read_file(file))
    if not as_json:
        note(_say("imported", count=len(told.reservations)))
    _show_reservations(told, as_json)


def read_file(file: Path) -> ReservationFile:
    """The agent reads it: what is wrong is said with its entry and field."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise Refused("machines.reservation", f"{file} cannot be read: {err}", next_step="save it as UTF-8 text") from err
    return ReservationFile(kind="toml" if file.suffix == ".toml" else "csv", text=text)


def _show_reservations(found: Reservations, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    rows = [(one.person, one.node, " ".join(one.devices) or _say("all"), clock_time(one.until), one.reason) for one in found.reservations]
    table(_say("holders").split(","), rows, empty=_say("no_holders"))


@node.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def join(arguments: tuple[str, ...]) -> None:
    """Make this machine a node: --head HOST:PORT --token-file FILE --data DIR [--node NAME] [--slots N]."""
    os.execv(sys.executable, [sys.executable, "-m", "intertie.agent", "node", "join", *arguments])


@node.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> None:
    """Run a node until SIGTERM: --data DIR. Its jobs outlive it."""
    os.execv(sys.executable, [sys.executable, "-m", "intertie.agent", "node", "run", *arguments])
