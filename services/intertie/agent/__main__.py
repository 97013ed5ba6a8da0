"""`intertie-agent check`, `join`, `run`, `install`, `uninstall`, `upgrade`: the process beside a site's cluster."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import NoReturn, TextIO

import click

from intertie.agent.config import VERSION, Folder
from intertie.contracts.site import PoolProfile
from intertie.errors import IntertieError, Unavailable
from intertie.text.groups import Group


def default_data() -> Path:
    """Root's lies where jobs of other accounts can pass."""
    return Path("/var/lib/intertie/agent") if os.geteuid() == 0 else Path.home() / ".local/share/intertie/agent"


DATA = click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=default_data,
    show_default="/var/lib/intertie/agent",
    help="Data folder.",
)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(VERSION, prog_name="intertie-agent")
def cli() -> None:
    """The agent beside a site's machines: runs federation jobs and the owner's own, meters them, and works alone when the hub is away.

    `intertie agent …` is the same program. To leave the federation: intertie site leave.
    """


@cli.command()
@DATA
def run(data: Path) -> None:
    """Run until SIGTERM. Jobs outlive it: the next agent adopts them."""
    from intertie.agent import service
    from intertie.agent.upgrade import Successor
    from intertie.runtime import main as run_main

    folder = Folder(data.resolve())
    successor = Successor(folder)

    def started(environ: Mapping[str, str]) -> Coroutine[object, object, int]:
        return service.run(folder, environ, successor)

    code = run_main("agent", started, version=VERSION)
    if code == 0:
        successor.take_over()
    sys.exit(code)


@cli.command()
@DATA
def upgrade(data: Path) -> None:
    """Have the running agent become the version that is installed here. Its jobs run on; if this version cannot go on with them, nothing changes."""
    from intertie.agent import upgrade as room

    try:
        before, now = room.upgrade(Folder(data.resolve()))
    except IntertieError as err:
        _fail(err)
    click.echo(f"the agent runs version {now.version} now ({before.version} before); its jobs were found again")


@cli.command()
@DATA
@click.option("--hub", default="", metavar="URL", help="A hub's gateway, before this machine has joined one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--detect", "profile", type=click.Path(path_type=Path, dir_okay=False), help="Write what is seen here as a profile; `-` prints it."
)
@click.option("--interconnect", default="", help="With --detect, where the driver cannot say: nvlink, pcie, infiniband or none.")
def check(data: Path, hub: str, as_json: bool, profile: Path | None, interconnect: str) -> None:
    """The owner's pre-flight: each line ok, warn or fail, with the command that mends it. Safe to show to others. Leaves with 1 if a line fails."""
    from intertie.agent import upgrade as room
    from intertie.agent.check import command

    folder = Folder(data.resolve())
    try:
        if room.asked_by_agent(folder):
            room.check(folder)
            click.echo(VERSION)
            return
        if profile is not None:
            command.write_profile(profile, interconnect, folder)
            return
        sys.exit(command.show(folder, hub, as_json))
    except IntertieError as err:
        _fail(err)


@cli.command()
@DATA
@click.option("--hub", required=True, metavar="URL", help="Address of the hub's gateway.")
@click.option(
    "--token-file",
    type=click.File("r"),
    help="The one-time token of the invitation; `-` reads it from standard input. Without it INTERTIE_JOIN_TOKEN is read.",
)
@click.option("--profile", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Declared pools, TOML or JSON.")
@click.option("--detect", "look", is_flag=True, help="Declare what can be seen here: GPUs and CPU slots.")
@click.option("--interconnect", default="", help="With --detect and GPUs: nvlink, pcie, infiniband or none.")
@click.option("--slots", type=click.IntRange(min=1), help="With --detect: CPU slots to declare (default: CPUs).")
def join(data: Path, hub: str, token_file: TextIO | None, profile: Path | None, look: bool, interconnect: str, slots: int | None) -> None:
    """Join a hub with a one-time token. Keys are made here and never leave."""
    # Never an argument: every account of this machine may read those.
    token = (token_file.read() if token_file is not None else os.environ.get("INTERTIE_JOIN_TOKEN", "")).strip()
    if not token:
        raise click.UsageError("no token: name its file with --token-file, or set INTERTIE_JOIN_TOKEN")
    if (profile is None) == (not look):
        raise click.UsageError("say what the site has: --profile FILE, or --detect")
    try:
        joined = asyncio.run(_join(data.resolve(), hub, token, profile, interconnect, slots))
    except IntertieError as err:
        _fail(err)
    click.echo(f"joined as {joined}; start it with: intertie-agent run --data {data}")


@cli.group(name="node")
def node_group() -> None:
    """This machine as a node of a pool. To see or manage a head's nodes: intertie node …"""


NODE_DATA = click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=lambda: default_data().with_name("node"),
    show_default="/var/lib/intertie/node",
    help="The node's own data folder.",
)


@node_group.command(name="join")
@NODE_DATA
@click.option("--head", required=True, metavar="HOST:PORT", help="Where the head listens ([machines] listen in its site.toml).")
@click.option(
    "--token-file", type=click.File("r"), help="The one-time token; `-` reads standard input. Without it INTERTIE_JOIN_TOKEN is read."
)
@click.option("--node", "name", default="", help="What this node is called (default: this machine's name).")
@click.option("--slots", type=click.IntRange(min=0), help="CPU slots that it gives to the pool (default: its CPUs).")
def node_join(data: Path, head: str, token_file: TextIO | None, name: str, slots: int | None) -> None:
    """Become a node of the head that made the token. Keys are made here and never leave."""
    from intertie.agent.config import node_name
    from intertie.agent.machines import service as room

    token = (token_file.read() if token_file is not None else os.environ.get("INTERTIE_JOIN_TOKEN", "")).strip()
    if not token:
        raise click.UsageError("no token: name its file with --token-file, or set INTERTIE_JOIN_TOKEN")
    folder = room.NodeFolder(data.resolve())
    count = slots if slots is not None else os.cpu_count() or 1
    try:
        made = asyncio.run(room.join(folder, head=head, token=token, node=name or node_name(), slots=count))
    except IntertieError as err:
        _fail(err)
    click.echo(f"node {made.node} of site {made.site}; start it with: intertie-agent node run --data {data}")


@node_group.command(name="run")
@NODE_DATA
def node_run(data: Path) -> None:
    """Run until SIGTERM. Jobs outlive it: the next one adopts them."""
    from intertie.agent.machines import service as room
    from intertie.runtime import main as run_main

    folder = room.NodeFolder(data.resolve())
    sys.exit(run_main("node", lambda environ: room.run(folder, environ), version=VERSION))


@cli.group(name="kubernetes")
def kubernetes_group() -> None:
    """A Kubernetes cluster as this site: what its owner applies."""


@kubernetes_group.command(name="manifests")
@DATA
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of YAML.")
def kubernetes_manifests(data: Path, as_json: bool) -> None:
    """Print namespaces, quotas, network policies, accounts and the agent's rights for [kubernetes] of site.toml: pipe it to kubectl apply -f -"""
    from intertie.agent.kubernetes.core.owner import printed

    try:
        click.echo(printed(Folder(data.resolve()).rules().kubernetes, as_json=as_json), nl=False)
    except IntertieError as err:
        _fail(err)


async def _join(data: Path, hub: str, token: str, profile: Path | None, interconnect: str, slots: int | None) -> str:
    from intertie.agent import join as room
    from intertie.agent.check.command import place_of
    from intertie.agent.check.pools import seen_here

    profiles: list[PoolProfile]
    if profile is not None:
        profiles = room.read_profiles(profile)
    else:
        profiles = await room.detect(interconnect=interconnect, reading=await seen_here(place_of(Folder(data))))
        if slots is not None:
            profiles = [one if one.accelerator != "none" else room.slots_pool(slots) for one in profiles]
    return (await room.join(Folder(data), hub=hub, token=token, profiles=profiles)).site


@cli.command()
@DATA
@click.option("--systemd", is_flag=True, help="Write the unit and have systemd read it.")
@click.option("--user", is_flag=True, help="As a unit of your own, without root.")
@click.option("--print", "only_print", is_flag=True, help="Print the unit; write nothing.")
def install(data: Path, systemd: bool, user: bool, only_print: bool) -> None:
    """Make the agent a service of this machine: started at boot, restarted if it ends, and its jobs outlive both."""
    from intertie.agent import install as room

    if systemd == only_print:
        raise click.UsageError("say which: --systemd writes the unit, --print shows it")
    try:
        unit = room.unit_of(Folder(data.resolve()), user=user or os.geteuid() != 0)
        if only_print:
            click.echo(unit.text, nl=False)
            return
        rest = room.install(unit)
    except IntertieError as err:
        _fail(err)
    click.echo(f"{unit.path} is written; next:")
    for command in rest:
        click.echo(f"  {command}")


@cli.command()
@DATA
@click.option("--drain", is_flag=True, help="Let lent work end and leave the federation first, however long it takes.")
@click.option(
    "--receipt",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --drain: where the hub's receipt goes (default: receipt-SITE.json here).",
)
@click.option(
    "--prefix", type=click.Path(path_type=Path, file_okay=False), help="Where a bundle was installed (default: the one this runs from)."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def uninstall(data: Path, drain: bool, receipt: Path | None, prefix: Path | None, yes: bool, as_json: bool) -> None:
    """Take the agent away: service, data, program. Refused while work runs or while this is still a site; says what was removed."""
    from intertie.agent import uninstall as room
    from intertie.clock import SystemClock
    from intertie.contracts.base import encode

    folder = Folder(data.resolve())
    site = room.joined_as(folder)
    leaves = drain and site is not None
    try:
        if not leaves:
            room.require_idle(folder)
        # Asked before anything is done: a site that has left does not come back by saying no.
        first = f"leave the federation as {site}, then " if leaves else ""
        if not yes and not click.confirm(
            f"{first}remove the agent, its service and what it keeps in {folder.root}?", err=True, default=False
        ):
            sys.exit(1)
        held = room.held_by(folder)
        if leaves:
            room.leave(folder, (receipt or Path(f"receipt-{site}.json")).absolute())
        room.require_idle(folder)
        done = room.uninstall(folder, SystemClock().now(), site, prefix=prefix.resolve() if prefix else None, held=held)
    except IntertieError as err:
        _fail(err)
    click.echo(encode(done).decode() if as_json else room.told(done))


def _fail(err: IntertieError) -> NoReturn:
    click.echo(f"error: {err.text} [{err.code}]", err=True)
    if err.next_step:
        click.echo(f"next: {err.next_step}", err=True)
    sys.exit(5 if isinstance(err, Unavailable) else 1)


def main() -> None:
    from intertie.agent.slurm.command import slurm

    cli.add_command(slurm)
    cli(prog_name="intertie-agent")


if __name__ == "__main__":
    main()
