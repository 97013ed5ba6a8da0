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
    """Run, join or upgrade a site's agent on this machine; `intertie agent --help` is the agent's own help, `leave` is `intertie site leave`."""
    if arguments[:1] == ("leave",):
        from intertie.cli.leave import leave

        leave.main(list(arguments[1:]), prog_name="intertie agent leave", standalone_mode=False)
        return
    os.execv(sys.executable, [sys.executable, "-m", "intertie.agent", *arguments])


def default_site_dir() -> Path:
    """The agent's own default folder."""
    return Path("/var/lib/intertie/agent") if os.geteuid() == 0 else Path.home() / ".local/share/intertie/agent"


def join_site(
    hub_url: str, token: str, data: Path | None, profile: Path | None, *, interconnect: str = "", slots: int | None = None
) -> tuple[Joined, Path]:
    """Join by the agent's own `join`, from what it can see unless a profile says more.

    The token goes by the environment, never by an argument that every process list shows.
    """
    folder = data or default_site_dir()
    command = [sys.executable, "-m", "intertie.agent", "join", "--hub", hub_url, "--data", str(folder)]
    command += ["--profile", str(profile)] if profile else ["--detect"]
    command += ["--interconnect", interconnect] if interconnect else []
    command += ["--slots", str(slots)] if slots is not None else []
    done = subprocess.run(command, env={**os.environ, "INTERTIE_JOIN_TOKEN": token}, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        text = said[0].removeprefix("error: ") if said else f"the agent left with {done.returncode}"
        raise Refused("cli.join", text, next_step=said[1].removeprefix("next: ") if len(said) > 1 else "")
    try:
        return decode((folder / "site.json").read_bytes(), Joined, what=str(folder / "site.json")), folder
    except (OSError, msgspec.MsgspecError) as err:
        raise Refused("cli.join", f"the join left no readable {folder / 'site.json'}: {err}") from err
