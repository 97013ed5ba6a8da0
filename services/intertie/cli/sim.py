"""`intertie sim run …`: the whole federation on virtual time, under faults drawn from a seed. It is a process of its own: nobody imports it."""

from __future__ import annotations

import signal
import subprocess
import sys

import click

from intertie.text.groups import Group


@click.group(cls=Group)
def sim() -> None:
    """Let the whole federation happen in virtual time, with everything going wrong, and ask what must hold.

    Nothing of this machine is touched: no server, no network, no clock.
    """


@sim.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> None:
    """Run seeds (--seeds 1..5000, --fresh 100) or scenarios from files; `intertie sim run --help` lists all. Leaves with 1 if one fails."""
    # Ctrl-C reaches the whole group of processes: the simulator ends its workers, and we say what it says.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with subprocess.Popen([sys.executable, "-m", "intertie.sim", "run", *arguments], preexec_fn=_hear) as process:  # noqa: S603
            code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    sys.exit(code)


def _hear() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
