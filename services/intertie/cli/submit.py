"""`intertie submit`: read the script's directives, pack the folder, say what will travel, send it once."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from intertie.cli import lint, outbox
from intertie.cli.client import Client
from intertie.cli.config import load_login
from intertie.cli.out import line, note, print_json, rejection_lines
from intertie.cli.session import connect
from intertie.contracts.http import SubmitBody
from intertie.contracts.job import JobSpec, OnSilence, SubmitReply, WorkRef
from intertie.contracts.site import TaskType
from intertie.errors import NotFound, Refused, Unavailable
from intertie.ids import Digest, PoolName, SiteName, TenantName, mint
from intertie.jobfile import parse_memory_mib, parse_script, parse_wall
from intertie.lint import Finding
from intertie.pack import Packed, pack_folder
from intertie.text import language, say


@click.command()
@click.argument("script", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@click.argument("args", nargs=-1)
@click.option("--name", help="Name of the job (default: the script's).")
@click.option(
    "--work", type=click.Path(path_type=Path, file_okay=False), default=None, help="Folder that goes with the job (default: here)."
)
@click.option("--no-work", is_flag=True, help="Send the script alone.")
@click.option("--output", "outputs", multiple=True, help="Pattern of files to bring back, such as 'out/*.pt'; may be repeated.")
@click.option("--gpus", type=click.IntRange(0), default=None, help="GPUs.")
@click.option("--gpu-model", help="GPU model, such as A100.")
@click.option("--gpu-memory", help="Memory of each GPU at least, such as 40G.")
@click.option("--slots", type=click.IntRange(1), default=None, help="CPU slots, when no GPU is asked for.")
@click.option("--time", "wall", help="Wall time limit as Slurm writes it: 30, 1:30:00, 2-00:00.")
@click.option("--task-type", type=click.Choice([t.value for t in TaskType]), default=None, help="What kind of work it is (default: batch).")
@click.option(
    "--if-site-silent", type=click.Choice([s.value for s in OnSilence]), default=None, help="wait for a silent site, or rerun elsewhere."
)
@click.option("--image", help="Container image by digest: REGISTRY/NAME@sha256:…; only sites that run it get the job.")
@click.option("--site", help="Only this site.")
@click.option("--pool", help="Only this pool: site/pool.")
@click.option(
    "--env", "env", multiple=True, metavar="NAME[=VALUE]", help="Environment; without a value, yours. Values are not shown again."
)
@click.option("--tenant", help="Tenant that pays (default: your token's).")
@click.option("--key", help="Idempotency key: the same key never makes a second job.")
@click.option("--dry-run", is_flag=True, help="Say what would happen; send nothing but the question.")
@click.option("--wait", is_flag=True, help="Follow the log and leave with the job's outcome.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def submit(
    script: Path,
    args: Sequence[str],
    name: str | None,
    work: Path | None,
    no_work: bool,
    outputs: Sequence[str],
    env: Sequence[str],
    tenant: str | None,
    key: str | None,
    dry_run: bool,
    wait: bool,
    as_json: bool,
    **asked: object,
) -> None:
    """Submit SCRIPT, with ARGS for it; `-` reads the script from standard input.

    #SBATCH lines are read as sbatch would, #INTERTIE lines say the rest; options here win over both. What cannot be taken is told with its line.

    \b
    intertie submit train.sh --gpus 2 --output 'out/*.pt'
    intertie submit --dry-run train.sh        # where it fits, and why not elsewhere
    """
    spec = read_spec(script, args, name, outputs, asked)
    values = environment(env)
    spec = msgspec.structs.replace(spec, env_names=sorted(values))
    client = connect()
    with tempfile.TemporaryFile("w+b") as pack:
        packed = None if no_work or (str(script) == "-" and work is None) else pack_work(work or Path.cwd(), pack)
        if packed is not None:
            spec = msgspec.structs.replace(spec, work=WorkRef(digest=packed.digest, size=packed.size))
        body = SubmitBody(spec=spec, env=values, tenant=TenantName(tenant) if tenant else None, dry_run=dry_run)
        key = key or mint("key")
        try:
            if not dry_run:
                lint.warn(str(script), lint.check(client, spec.script, [spec.site] if spec.site else ()))
            if packed is not None and not dry_run:
                upload(client, packed, pack)
            reply = client.post("/v1/jobs", SubmitReply, body, {"Idempotency-Key": key})
        except Unavailable as err:
            if dry_run:
                raise
            keep_for_later(spec, body, key, packed, pack, err)
            return
    if dry_run:
        found = lint.check(client, spec.script, {pool.partition("/")[0] for pool in reply.fits})
        tell_dry_run(str(script), reply, found, spec.script, as_json)
        return
    if as_json:
        print_json(reply)
    elif reply.job is not None:
        line(reply.job.job)
        note(say("cli.submitted_again" if reply.repeated else "cli.submitted", language(), job=reply.job.job))
    if wait and reply.job is not None:
        from intertie.cli.jobs import follow

        sys.exit(follow(client, reply.job.job))


def read_spec(script: Path, args: Sequence[str], name: str | None, outputs: Sequence[str], asked: dict[str, object]) -> JobSpec:
    """The script's own wishes, overruled by the options given. Warnings go to standard error with file and line."""
    try:
        text = sys.stdin.read() if str(script) == "-" else script.read_text(encoding="utf-8")
    except FileNotFoundError as err:
        raise NotFound("cli.no_script", f"there is no script {script}") from err
    except (OSError, UnicodeDecodeError) as err:
        raise Refused("cli.script", f"{script} cannot be read as a text script: {err}") from err
    job = parse_script(text, name=script.stem if str(script) != "-" else "stdin")
    for warned in job.warnings:
        note(f"{script}:{warned.line}: {warned.text}")
    spec, resources = job.spec, job.spec.resources
    try:
        given = {
            "gpus": asked["gpus"],
            "gpu_model": asked["gpu_model"],
            "gpu_memory_mib": parse_memory_mib(str(asked["gpu_memory"])) if asked["gpu_memory"] else None,
            "slots": asked["slots"],
        }
        wall = parse_wall(str(asked["wall"])) if asked["wall"] else None
    except ValueError as err:
        raise click.UsageError(str(err)) from err
    resources = msgspec.structs.replace(resources, **{k: v for k, v in given.items() if v is not None})
    site, _, pool = str(asked["pool"] or "").rpartition("/")
    changes = {
        "name": name,
        "wall_s": wall,
        "task_type": TaskType(str(asked["task_type"])) if asked["task_type"] else None,
        "on_silence": OnSilence(str(asked["if_site_silent"])) if asked["if_site_silent"] else None,
        "restartable": True if asked["if_site_silent"] == "rerun" else None,
        "site": SiteName(site or str(asked["site"])) if site or asked["site"] else None,
        "pool": PoolName(pool) if pool else None,
        "outputs": [*spec.outputs, *outputs] if outputs else None,
        "args": list(args) if args else None,
        "image": str(asked["image"]) if asked["image"] else None,
    }
    return job.checked(msgspec.structs.replace(spec, resources=resources, **{k: v for k, v in changes.items() if v is not None}))


def environment(pairs: Sequence[str]) -> dict[str, str]:
    """`NAME=value`, or `NAME` for the caller's own value."""
    import os

    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name.isidentifier():
            raise click.UsageError(f"--env {name!r} is not the name of a variable")
        if not equals and name not in os.environ:
            raise click.UsageError(f"--env {name}: no such variable here, and no value was given")
        values[name] = value if equals else os.environ[name]
    return values


def pack_work(folder: Path, target: BinaryIO) -> Packed:
    """Pack the folder and say what travels. A home folder or the root is a mistake, and refused."""
    if folder.resolve() in (Path.home().resolve(), Path("/")):
        raise Refused(
            "cli.work_is_home",
            f"{folder.resolve()} would be packed whole",
            next_step="change into the job's folder, name it with --work DIR, or send the script alone with --no-work",
        )
    packed = pack_folder(folder, target)
    note(say("cli.packed", language(), files=packed.files, size=human(packed.size), folder=folder))
    for skipped in packed.skipped[:10]:
        note(f"  {skipped}")
    if len(packed.skipped) > 10:
        note(f"  … {len(packed.skipped) - 10}")
    return packed


def upload(client: Client, packed: Packed, pack: BinaryIO) -> None:
    """Send the pack, with a bar when it is large enough to wait for."""
    pack.seek(0)
    path = f"/v1/objects/{packed.digest}"
    # Below this an upload is over before a bar can be read.
    if packed.size < 4 * 1024 * 1024 or not sys.stderr.isatty():
        client.upload(path, pack, packed.size)
        return
    from rich.console import Console
    from rich.progress import wrap_file

    with wrap_file(pack, packed.size, console=Console(stderr=True), description="↑") as shown:
        client.upload(path, shown, packed.size)


def keep_for_later(spec: JobSpec, body: SubmitBody, key: str, packed: Packed | None, pack: BinaryIO, err: Unavailable) -> None:
    """The hub is away: keep the submit, say so, and leave with 5; the same key makes sending it later safe."""
    stored = ""
    if packed is not None:
        outbox.folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        path = outbox.folder() / f"{key}.tar.gz"
        pack.seek(0)
        with path.open("wb") as out:
            while chunk := pack.read(1 << 20):
                out.write(chunk)
        stored = str(path)
    kept = outbox.Kept(
        url=load_login().url,
        key=key,
        name=spec.name,
        body=outbox.body_of(body),
        pack=stored,
        digest=packed.digest if packed else Digest(""),
    )
    where = outbox.keep(kept)
    note(say("cli.kept", language(), text=err.text, where=where))
    sys.exit(5)


def tell_dry_run(script: str, reply: SubmitReply, found: Sequence[Finding], text: str, as_json: bool) -> None:
    """Where it fits, why not elsewhere, and what of the script is not there. Leaves with 1 if it fits nowhere."""
    if as_json:
        print_json(lint.DryRun(fits=reply.fits, rejections=reply.rejections, lint=[lint.told(one) for one in found]))
    else:
        for pool in reply.fits:
            line(say("cli.fits", language(), pool=pool))
        for words in rejection_lines([(f"{row.site}/{row.pool}", row.rule, row.text) for row in reply.rejections]):
            line(words)
        if not reply.fits and not reply.rejections:
            line(say("wait.no_site", language()))
        lint.tell(script, found, {warned.line for warned in parse_script(text).warnings})
    if not reply.fits:
        sys.exit(1)


def human(size: int) -> str:
    """A size for people."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
