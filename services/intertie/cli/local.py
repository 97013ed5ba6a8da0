"""`intertie local …`: the owner's own use of a site's machine, through the agent's unix socket. No hub, no bus, no network, no token.

Only the standard library speaks here (HTTP over the socket), so that it starts quickly and works when little else does.
"""

from __future__ import annotations

import http.client
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import click

from intertie.cli.out import EXIT_FAILED, ago, json_option, line, note, print_json, table
from intertie.cli.out import local as clock_time
from intertie.contracts.base import Problem, decode, encode
from intertie.contracts.local import LocalJob, LocalJobs, LocalLog, LocalStatus, LocalSubmit
from intertie.errors import KINDS, Refused, Unavailable
from intertie.text import language

T = TypeVar("T")

# The agent answers from memory; one that does not within this is stopped.
TIMEOUT_S = 10.0
FOLLOW_S = 0.3
"""Pause between looks at a log that is followed: felt as at once, nothing for the agent."""
CALLERS_OWN = frozenset({"HOME", "USER", "LOGNAME", "MAIL", "SHELL", "XDG_RUNTIME_DIR", "SUDO_USER", "SUDO_UID", "SUDO_GID"})
"""Of the caller's environment, what another user must not be given."""
PLACES = ("/var/lib/intertie/agent", "~/.local/share/intertie/agent")

TEXTS: Mapping[str, tuple[str, str]] = {
    "submitted": ("{job} is {word}.  intertie local logs -f {job}", "{job} {word}。  intertie local logs -f {job}"),
    "no_jobs": ("No local jobs yet: intertie local submit -- COMMAND", "还没有本地任务:intertie local submit -- 命令"),
    "cancelled": ("{job}: {word}", "{job}:{word}"),
    "columns": ("JOB,NAME,USER,STATE,WHERE,SUBMITTED,RAN,END", "任务,名称,用户,状态,位置,提交,运行,结果"),
    "hub_heard": ("the hub is heard", "平台连接正常"),
    "islanded": (
        "works alone since {since} (the hub is not heard; nothing is wrong with this site)",
        "自 {since} 起自治运行(与平台失联,本站点工作正常)",
    ),
    "single_user": (
        "single-user: the agent is not root; only the owner's tenant is taken",
        "单用户模式:接入端非 root 运行,只接受所有者自己的租户",
    ),
    "counts": (
        "lent: {lent} · local: {running} running, {waiting} waiting · journal: {entries} entries wait for the hub",
        "已让出 {lent} 个任务 · 本地 {running} 运行 {waiting} 等待 · 待上报记录 {entries} 条",
    ),
    "no_gpu": ("no GPU: {why}", "没有 GPU:{why}"),
    "word.waiting": ("waiting", "等待中"),
    "word.preparing": ("preparing", "准备中"),
    "word.running": ("running", "运行中"),
    "word.ended": ("ended", "已结束"),
    "outcome.succeeded": ("succeeded", "成功"),
    "outcome.failed": ("failed", "失败"),
    "outcome.cancelled": ("cancelled", "已取消"),
    "outcome.unknown": ("unknown", "结果不明"),
}


def _say(key: str, **values: object) -> str:
    english, chinese = TEXTS[key]
    return (chinese if language() == "zh" else english).format(**values)


class _Door(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def find_socket(data: str | None) -> str:
    """The agent's socket: of --data, of INTERTIE_AGENT_SOCKET, else the first that exists in the usual places."""
    if data:
        return str(Path(data) / "agent.sock")
    if named := os.environ.get("INTERTIE_AGENT_SOCKET"):
        return named
    usual = [Path(place).expanduser() for place in PLACES]
    hubs = [
        path for parent in ("/var/lib/intertie", "~/.local/share/intertie") for path in sorted(Path(parent).expanduser().glob("site-*"))
    ]
    for folder in (*usual, *hubs):
        if (folder / "agent.sock").exists():
            return str(folder / "agent.sock")
    raise Unavailable(
        "local.no_agent",
        "there is no agent's socket on this machine" if language() == "en" else "本机没有接入端的套接字",
        next_step="intertie-agent run --data DIR, or name its folder: intertie local --data DIR …",
    )


def call(path: str, method: str, target: str, kind: type[T], body: object | None = None) -> T:
    """One exchange with the agent; its Problem becomes the same error here."""
    door = _Door(path)
    try:
        door.request(method, target, body=encode(body) if body is not None else None, headers={"Content-Type": "application/json"})
        answer = door.getresponse()
        data = answer.read()
    except PermissionError as err:
        raise Refused("local.permission", f"you may not use {path}", next_step="ask its owner for the group intertie, or use sudo") from err
    except (OSError, http.client.HTTPException) as err:
        raise Unavailable("local.no_agent", f"no agent answers at {path}: {err}", next_step="intertie-agent run --data DIR") from err
    finally:
        door.close()
    if answer.status < 300:
        return decode(data, kind, what="the agent's answer")
    problem = decode(data, Problem, what="the agent's answer")
    error = KINDS.get(problem.kind, Refused)(problem.code, problem.text, next_step=problem.next_step)
    error.details.update(problem.details)
    raise error


@click.group()
@click.option("--data", metavar="DIR", help="The agent's data folder.")
@click.pass_context
def local(ctx: click.Context, data: str | None) -> None:
    """The owner's own use of this machine, beside federation work. Works with hub and bus gone; never charged, never named at the hub."""
    ctx.obj = data


# Options end where the command begins: what follows is the command's own, and a misspelt option of ours is an error, not a command.
@local.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, metavar="SCRIPT | -- COMMAND…")
@click.option("--slots", type=click.IntRange(1), default=1, show_default=True, help="CPU slots (when no GPU is asked for).")
@click.option("--gpus", type=click.IntRange(0), default=0, show_default=True, help="GPUs.")
@click.option("--wall", "wall_s", type=click.IntRange(1), help="Stop it after so many seconds.")
@click.option("--name", help="What to call it; the script's name otherwise.")
@click.option("--as", "as_user", default="", metavar="USER", help="Root only: run as this user.")
@click.option("--wait", is_flag=True, help="Follow its log and leave with its outcome.")
@json_option
@click.pass_obj
def submit(
    data: str | None,
    command: tuple[str, ...],
    slots: int,
    gpus: int,
    wall_s: int | None,
    name: str | None,
    as_user: str,
    wait: bool,
    as_json: bool,
) -> None:
    """Run a script (a file), or a command after `--`, in this folder and with this environment."""
    script, called = _script(command)
    asked = LocalSubmit(
        name=(name or called)[:128],
        script=script,
        cwd=os.getcwd(),
        env={key: value for key, value in os.environ.items() if not (as_user and key in CALLERS_OWN)},
        slots=slots,
        gpus=gpus,
        wall_s=wall_s,
        as_user=as_user,
    )
    path = find_socket(data)
    job = call(path, "POST", "/v1/jobs", LocalJob, asked)
    if as_json:
        print_json(job)
    elif wait:
        note(job.job)
    else:
        line(job.job)
        note(_say("submitted", job=job.job, word=_say(f"word.{job.word}")))
    if wait:
        sys.exit(_show_log(path, job.job, follow=True))


def _script(command: tuple[str, ...]) -> tuple[str, str]:
    """(script text, name). One word that names a readable text file is a script; anything else is a command."""
    path = Path(command[0])
    if len(command) == 1 and path.is_file() and (os.sep in command[0] or "--" not in sys.argv):
        try:
            return path.read_text(encoding="utf-8"), path.name
        except (OSError, UnicodeDecodeError) as err:
            raise Refused(
                "local.script", f"{path} cannot be read as a script: {err}", next_step=f"run it as a command: -- ./{path}"
            ) from err
    return f"#!/bin/sh\nexec {shlex.join(command)}\n", path.name


@local.command()
@json_option
@click.pass_obj
def jobs(data: str | None, as_json: bool) -> None:
    """List local jobs, newest first."""
    found = call(find_socket(data), "GET", "/v1/jobs", LocalJobs)
    if as_json:
        print_json(found)
        return
    rows = [
        (
            job.job,
            job.name,
            job.user,
            _say(f"word.{job.word}"),
            f"{job.pool}: {', '.join(job.devices)}" if job.devices else "-",
            clock_time(job.submitted),
            f"{job.ran_us / 1e6:.1f}s" if job.ended else ago(job.started) if job.started else "-",
            f"{_say(f'outcome.{job.outcome}')}: {job.reason}" if job.outcome else "-",
        )
        for job in found.jobs
    ]
    table(_say("columns").split(","), rows, empty=_say("no_jobs"))


@local.command()
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Go on until it has ended.")
@click.pass_obj
def logs(data: str | None, job: str, follow: bool) -> None:
    """Print what a local job wrote. With -f the exit code says how it ended."""
    sys.exit(_show_log(find_socket(data), job, follow=follow))


def _show_log(path: str, job: str, *, follow: bool) -> int:
    """Print the log; the exit code, which with `follow` says how the job ended."""
    offset = 0
    while True:
        chunk = call(path, "GET", f"/v1/jobs/{job}/log?offset={offset}", LocalLog)
        click.echo(chunk.text, nl=False)
        moved, offset = chunk.next_offset != offset, chunk.next_offset
        if chunk.ended or (not follow and not moved):
            break
        if not moved:
            time.sleep(FOLLOW_S)
    if not follow:
        return 0
    ended = call(path, "GET", f"/v1/jobs/{job}", LocalJob)
    if ended.outcome == "succeeded":
        return 0
    note(f"{_say(f'outcome.{ended.outcome}') if ended.outcome else ended.word}: {ended.reason}")
    return EXIT_FAILED


@local.command()
@click.argument("job")
@json_option
@click.pass_obj
def cancel(data: str | None, job: str, as_json: bool) -> None:
    """Cancel a local job; it has ended when every process of it is gone."""
    told = call(find_socket(data), "POST", f"/v1/jobs/{job}/cancel", LocalJob)
    if as_json:
        print_json(told)
    else:
        line(_say("cancelled", job=told.job, word=_say(f"word.{told.word}")))


@local.command()
@json_option
@click.pass_obj
def status(data: str | None, as_json: bool) -> None:
    """Show this site as its agent sees it: pools, devices, what is lent, whether the hub is heard."""
    told = call(find_socket(data), "GET", "/v1/status", LocalStatus)
    if as_json:
        print_json(told)
        return
    heard = _say("hub_heard") if told.islanded_since is None else _say("islanded", since=clock_time(told.islanded_since))
    line(f"{told.site} ({told.node}): {heard}")
    if told.single_user:
        line(_say("single_user"))
    for pool in told.pools:
        states: dict[str, int] = {}
        for device in pool.devices:
            states[device.state.value] = states.get(device.state.value, 0) + 1
        line(f"  {pool.pool}: {len(pool.devices)} ({', '.join(f'{count} {state}' for state, count in sorted(states.items()))})")
    if told.no_gpu:
        line(f"  {_say('no_gpu', why=told.no_gpu)}")
    line(_say("counts", lent=told.lent_jobs, running=told.local_running, waiting=told.local_waiting, entries=told.journal_entries))
