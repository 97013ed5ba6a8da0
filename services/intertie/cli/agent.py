"""`intertie agent …` and `site join`: the agent is a process of its own; this starts it and steps aside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import msgspec

from intertie.contracts.base import decode
from intertie.contracts.identity import Joined
from intertie.errors import Refused


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def agent(arguments: tuple[str, ...]) -> None:
    """Run a site's agent on this machine; `intertie agent --help` is the agent's own help."""
    os.execv(sys.executable, [sys.executable, "-m", "intertie.agent", *arguments])


def default_site_dir() -> Path:
    """Where a site's folder is made when none is named."""
    from intertie.embedded.hub import default_data_dir

    return default_data_dir() / "site"


def join_site(hub_url: str, token: str, data: Path | None, profile: Path | None, *, detect: bool, lend: int | None) -> tuple[Joined, Path]:
    """Join by the agent's own `join`; the token goes by standard input, never by an argument that every process list shows."""
    folder = data or default_site_dir()
    command = [sys.executable, "-m", "intertie.agent", "join", "--hub", hub_url, "--token-file", "-", "--data", str(folder)]
    command += ["--profile", str(profile)] if profile else []
    command += ["--detect"] if detect or not profile else []
    command += ["--lend", str(lend)] if lend is not None else []
    done = subprocess.run(command, input=token, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise Refused("cli.join", said[0] if said else f"the agent left with {done.returncode}", next_step=" ".join(said[1:2]))
    try:
        return decode((folder / "site.json").read_bytes(), Joined, what=str(folder / "site.json")), folder
    except (OSError, msgspec.MsgspecError) as err:
        raise Refused("cli.join", f"the join left no readable {folder / 'site.json'}: {err}") from err
