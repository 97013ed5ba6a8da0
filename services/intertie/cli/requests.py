"""`intertie request SITE/OFFERING job.sh`: a bounded job request that the site's owner accepts or declines; and the owner's side, `local requests`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path

import click
import msgspec

from intertie.cli import lint
from intertie.cli.local_door import call, find_socket
from intertie.cli.out import json_option, line, local, note, print_json, reason_option, table
from intertie.cli.session import connect
from intertie.cli.submit import environment, pack_work, read_spec, tell_dry_run, upload
from intertie.contracts.job import SubmitReply, WorkRef
from intertie.contracts.offerings import LocalDecline, LocalRequest, LocalRequests, RequestBody
from intertie.ids import SiteName, TenantName, mint
from intertie.text import language
from intertie.text.groups import Group

TEXTS = {
    "asked": (
        "{job}: asked of the owner of {where}. intertie job {job}",
        "{job}:已向 {where} 的所有者提出。intertie job {job}",
    ),
    "none": ("No request waits for an answer.", "没有待答复的请求。"),
    "columns": (
        "REQUEST,OFFERING,TENANT,NAME,DEVICES,WALL,BUDGET,RECEIVED,ANSWER BY,STATE",
        "请求,能力,租户,名称,卡数,最长运行,预算,收到,答复期限,状态",
    ),
    "waiting": ("waiting", "待答复"),
    "accepted": ("accepted", "已接受"),
    "accepted_now": ("{attempt} is accepted: it begins as soon as cards are free", "{attempt} 已接受:有空闲卡后立即开始"),
    "declined": ("{attempt} is declined: {reason}", "{attempt} 已拒绝:{reason}"),
}


def _say(key: str, **values: object) -> str:
    english, chinese = TEXTS[key]
    return (chinese if language() == "zh" else english).format(**values)


def _amount(_ctx: click.Context, _option: click.Parameter, value: str | None) -> Decimal | None:
    if value is None:
        return None
    try:
        found = Decimal(value)
    except InvalidOperation:
        found = Decimal(0)
    if not found.is_finite() or found <= 0:
        raise click.BadParameter(f"{value!r} is no amount above 0, such as 120 or 120.50")
    return found


@click.command()
@click.argument("where", metavar="SITE/OFFERING")
@click.argument("script", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@click.argument("args", nargs=-1)
@click.option("--budget", callback=_amount, help="At most this, at the offering's price: devices × wall time must fit it.")
@click.option("--name", help="Name of the job (default: the script's).")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), default=None, help="Folder that goes with it (default: here).")
@click.option("--no-work", is_flag=True, help="Send the script alone.")
@click.option("--output", "outputs", multiple=True, help="Pattern of files to bring back; may be repeated.")
@click.option("--gpus", type=click.IntRange(0), default=None, help="GPUs.")
@click.option("--slots", type=click.IntRange(1), default=None, help="CPU slots, when no GPU is asked for.")
@click.option("--time", "wall", help="Wall time limit as Slurm writes it: 30, 1:30:00, 2-00:00.")
@click.option("--env", "env", multiple=True, metavar="NAME[=VALUE]", help="Environment; without a value, yours.")
@click.option("--tenant", help="Tenant that pays (default: your token's).")
@click.option("--key", help="Idempotency key: the same key never makes a second request.")
@click.option("--dry-run", is_flag=True, help="Say whether it keeps the offering's bounds; ask nobody.")
@click.option("--wait", is_flag=True, help="Follow the log and leave with its outcome.")
@json_option
def request(
    where: str,
    script: Path,
    args: Sequence[str],
    budget: Decimal | None,
    work: Path | None,
    no_work: bool,
    env: Sequence[str],
    tenant: str | None,
    key: str | None,
    dry_run: bool,
    wait: bool,
    as_json: bool,
    **asked: object,
) -> None:
    """Ask the owner of SITE to run SCRIPT under one of their job offerings (`intertie site show SITE` lists them).

    They accept or decline, by a rule of theirs or by hand, within the time that was promised; a no comes back with their words.
    `intertie cancel` takes a request back.
    """
    site, _, offering = where.partition("/")
    if not site or not offering or "/" in offering:
        raise click.BadParameter("name it as SITE/OFFERING", param_hint="SITE/OFFERING")
    spec = read_spec(script, args, _text(asked["name"]), _texts(asked["outputs"]), {**NOT_ASKED, **asked})
    values = environment(env)
    spec = msgspec.structs.replace(spec, env_names=sorted(values), site=SiteName(site), pool=None, offering=offering)
    client = connect()
    with tempfile.TemporaryFile("w+b") as pack:
        packed = None if no_work or (str(script) == "-" and work is None) else pack_work(work or Path.cwd(), pack)
        if packed is not None:
            spec = msgspec.structs.replace(spec, work=WorkRef(digest=packed.digest, size=packed.size))
            if not dry_run:
                upload(client, packed, pack)
        body = RequestBody(spec=spec, budget=budget, env=values, tenant=TenantName(tenant) if tenant else None, dry_run=dry_run)
        path = f"/v1/job-offerings/{site}/{offering}/requests"
        reply = client.post(path, SubmitReply, body, {"Idempotency-Key": key or mint("key")})
    if dry_run:
        tell_dry_run(str(script), reply, lint.check(client, spec.script, [site]), spec.script, as_json)
        return
    if as_json:
        print_json(reply)
    elif reply.job is not None:
        line(reply.job.job)
        note(_say("asked", job=reply.job.job, where=where))
    if wait and reply.job is not None:
        from intertie.cli.jobs import follow

        sys.exit(follow(client, reply.job.job))


NOT_ASKED: dict[str, object] = {
    "gpu_model": None,
    "gpu_memory": None,
    "task_type": None,
    "if_site_silent": None,
    "site": None,
    "pool": None,
    "image": None,
}
"""What `submit` asks and a request does not: the offering says it."""


def _text(value: object) -> str | None:
    return str(value) if value else None


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(one) for one in value) if isinstance(value, tuple) else ()


# --- the owner's side --------------------------------------------------------------------------------------------------------------------


@click.group("requests", cls=Group)
def local_requests() -> None:
    """Job requests that wait for this site's owner; works with the hub gone. Your word goes to the hub when it is heard."""


@local_requests.command("list")
@json_option
@click.pass_obj
def list_requests(data: str | None, as_json: bool) -> None:
    """Requests without an answer, oldest first."""
    found = call(find_socket(data), "GET", "/v1/requests", LocalRequests)
    if as_json:
        print_json(found)
        return
    table(_say("columns").split(","), [_row(one) for one in found.requests], empty=_say("none"))


def _row(one: LocalRequest) -> tuple[str, ...]:
    budget = f"{one.budget:.2f}" if one.budget is not None else "-"
    word = _say(one.word) + (f": {one.text}" if one.text else "")
    devices, wall = str(one.devices), f"{one.wall_s} s"
    return one.attempt, one.offering, one.tenant, one.name, devices, wall, budget, local(one.received), local(one.answer_by), word


@local_requests.command()
@click.argument("request_id", metavar="REQUEST")
@json_option
@click.pass_obj
def accept(data: str | None, request_id: str, as_json: bool) -> None:
    """Yes: REQUEST begins as soon as cards are free here."""
    told = call(find_socket(data), "POST", f"/v1/requests/{request_id}/accept", LocalRequest)
    if as_json:
        print_json(told)
        return
    line(_say("accepted_now", attempt=told.attempt))


@local_requests.command()
@click.argument("request_id", metavar="REQUEST")
@reason_option("Your words; they go back to who asked.")
@json_option
@click.pass_obj
def decline(data: str | None, request_id: str, reason: str, as_json: bool) -> None:
    """No, with your words. It costs this site nothing."""
    told = call(find_socket(data), "POST", f"/v1/requests/{request_id}/decline", LocalRequest, LocalDecline(reason=reason))
    if as_json:
        print_json(told)
        return
    line(_say("declined", attempt=told.attempt, reason=reason))
