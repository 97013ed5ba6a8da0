"""`intertie local …`: the owner's own use of a site's machine, through the agent's unix socket. No hub, no bus, no network, no token.

Only the standard library speaks here (HTTP over the socket), so that it starts quickly and works when little else does.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import click

from intertie.cli.local_door import call, find_socket
from intertie.cli.local_drill import drill
from intertie.cli.local_endpoint import endpoint
from intertie.cli.local_owner import pause, reclaim, resume, show_status, statement
from intertie.cli.local_texts import say_local
from intertie.cli.out import EXIT_FAILED, ago, json_option, line, note, print_json, table
from intertie.cli.out import local as clock_time
from intertie.cli.proofs import probe
from intertie.cli.requests import local_requests
from intertie.contracts.local import LocalJob, LocalJobs, LocalLog, LocalStatus, LocalSubmit
from intertie.errors import Refused
from intertie.ids import TenantName
from intertie.text.groups import Group

FOLLOW_S = 0.3
"""Pause between looks at a log that is followed: felt as at once, nothing for the agent."""
CALLERS_OWN = frozenset({"HOME", "USER", "LOGNAME", "MAIL", "SHELL", "XDG_RUNTIME_DIR", "SUDO_USER", "SUDO_UID", "SUDO_GID"})
"""Of the caller's environment, what another user must not be given."""


@click.group(cls=Group)
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
@click.option("--tenant", help="While the hub is not heard: as this tenant's work, within its islanded allowance, in a folder of its own.")
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
    tenant: str | None,
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
        env={key: value for key, value in os.environ.items() if not ((as_user or tenant) and key in CALLERS_OWN)},
        slots=slots,
        gpus=gpus,
        wall_s=wall_s,
        as_user=as_user,
        tenant=TenantName(tenant) if tenant else None,
    )
    path = find_socket(data)
    job = call(path, "POST", "/v1/jobs", LocalJob, asked)
    if as_json:
        print_json(job)
    elif wait:
        note(job.job)
    else:
        line(job.job)
        note(say_local("submitted", job=job.job, word=say_local(f"word.{job.word}")))
    if wait:
        sys.exit(_show_log(path, job.job, follow=True))


def _script(command: tuple[str, ...]) -> tuple[str, str]:
    """(script text, name). One word that names a readable text file is a script; anything else is a command."""
    path = Path(command[0])
    if "--" not in sys.argv and not path.exists() and shutil.which(command[0]) is None:
        raise click.UsageError(f"there is no file {command[0]}, and no such command; a command goes after `--`")
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
            say_local(f"word.{job.word}"),
            f"{job.pool}: {', '.join(job.devices)}" if job.devices else "-",
            clock_time(job.submitted),
            f"{job.ran_us / 1e6:.1f}s" if job.ended else ago(job.started) if job.started else "-",
            f"{say_local(f'outcome.{job.outcome}')}: {job.reason}" if job.outcome else "-",
        )
        for job in found.jobs
    ]
    table(say_local("columns").split(","), rows, empty=say_local("no_jobs"))


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
    note(f"{say_local(f'outcome.{ended.outcome}') if ended.outcome else ended.word}: {ended.reason}")
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
        line(say_local("cancelled", job=told.job, word=say_local(f"word.{told.word}")))


@local.command()
@json_option
@click.pass_obj
def status(data: str | None, as_json: bool) -> None:
    """Show this site as its agent sees it: whether the hub is heard and since when not, what runs and waits, what will be told, what it works by."""
    told = call(find_socket(data), "GET", "/v1/status", LocalStatus)
    if as_json:
        print_json(told)
    else:
        show_status(told)


local.add_command(pause)
local.add_command(resume)
local.add_command(reclaim)
local.add_command(statement)


local.add_command(drill)
local.add_command(endpoint)
local.add_command(probe)
local.add_command(local_requests)
