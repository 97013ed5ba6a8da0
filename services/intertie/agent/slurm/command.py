"""`intertie-agent slurm …`: what an owner of a Slurm asks of the agent before it runs."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path

import click
import msgspec

from intertie.agent.core.rules import Rules
from intertie.agent.slurm.core.lines import lines
from intertie.agent.slurm.core.rules import SlurmRules, check
from intertie.errors import IntertieError, Refused
from intertie.text.groups import Group


@click.group(cls=Group)
def slurm() -> None:
    """For a site whose queue is Slurm: the lines that its owner applies."""


@slurm.command("lines")
@click.option("--rules", "file", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The site.toml with [slurm] in it.")
@click.option("--user", default=getpass.getuser, show_default="you", help="The user that the agent runs as.")
@click.option("--cards", type=click.IntRange(min=0), default=0, help="Cards lent at once, as a limit that Slurm itself holds; 0: none.")
def show(file: Path, user: str, cards: int) -> None:
    """Print the sacctmgr, slurm.conf, folder and sudo lines for this site.toml. Nothing is applied."""
    try:
        click.echo(lines(read(file), user, cards, str(wrapper())), nl=False)
    except IntertieError as err:
        click.echo(f"error: {err.text} [{err.code}]", err=True)
        if err.next_step:
            click.echo(f"next: {err.next_step}", err=True)
        sys.exit(1)


def read(file: Path) -> SlurmRules:
    """`Refused` if there is no `[slurm]` that could be used."""
    try:
        rules = msgspec.toml.decode(file.read_bytes(), type=Rules)
    except OSError as err:
        raise Refused("slurm.rules", f"{file} cannot be read: {err.strerror}", next_step="name your site.toml with --rules") from err
    except (ValueError, msgspec.DecodeError) as err:
        raise Refused("slurm.rules", f"{file}: {err}", next_step="ops/docs/slurm.md has the table of settings") from err
    if rules.slurm is None:
        raise Refused("slurm.rules", f"{file} has no [slurm]", next_step="ops/docs/slurm.md begins with one")
    check(rules.slurm)
    return rules.slurm


def wrapper() -> Path:
    """The wrapper that came with this agent: beside this file where it was installed, in `ops/slurm` of a source tree."""
    here = Path(__file__).resolve()
    installed = here.with_name("intertie-as")
    return installed if installed.is_file() else here.parents[4] / "ops/slurm/intertie-as"
