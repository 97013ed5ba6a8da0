"""`intertie`: the command line's entry. Commands are imported when named, so that `--help` and completion stay quick."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import version as package_version

import click

from intertie.errors import IntertieError
from intertie.text.groups import write_sections

# heading → name → (module of intertie.cli, attribute, one line of help). The order is the order of a first day.
SECTIONS: Mapping[str, Mapping[str, tuple[str, str, str]]] = {
    "Begin": {
        "quickstart": ("quickstart", "quickstart", "Everything on this machine: a hub, a site, real jobs, a priced statement."),
        "login": ("people", "login", "Remember a hub and a token."),
        "doctor": ("doctor", "doctor", "Check this machine, the hub and the way between."),
    },
    "Jobs": {
        "submit": ("submit", "submit", "Submit a job script; the work folder goes with it."),
        "request": ("requests", "request", "Ask a site's owner to run a job under one of their job offerings."),
        "jobs": ("jobs", "jobs", "List jobs."),
        "job": ("jobs", "job", "Show one job."),
        "explain": ("jobs", "explain", "Why a job waits, or why it runs where it runs."),
        "story": ("jobs", "story", "All that happened to a job, with its evidence."),
        "logs": ("jobs", "logs", "Read a job's log; -f follows."),
        "fetch": ("jobs", "fetch", "Bring a job's outputs."),
        "cancel": ("jobs", "cancel", "Cancel a job."),
        "preempt": ("rulings", "preempt", "Stop a job's run for somebody else's sake."),
        "close-attempt": ("rulings", "close_attempt", "Wait no longer for an attempt at a silent site."),
    },
    "Calls": {
        "offerings": ("offerings", "offerings", "Call offerings: servers of sites' owners that you may call."),
        "offering": ("offerings", "offering", "One call offering: how to call it, its promise, what was measured."),
        "calls": ("calls", "calls", "Calls of offerings, each with its price and formula."),
        "decide-call": ("calls", "decide_call", "Decide how many tokens a call used, of which nobody counted them."),
    },
    "Money": {
        "statement": ("money", "statement", "What it cost and why, to the job and attempt."),
        "meterspec": ("money", "meterspec", "Agreements about what is metered and who pays."),
        "reconcile": ("reconcile", "reconcile", "Our books against each site's own accounting: what differs, and by how much."),
        "ledger": ("waiting", "ledger", "The ledger's own proof, and what nobody has any more."),
        "suspense": ("waiting", "suspense", "Usage that waits, and for what; release what only a person can decide."),
    },
    "Sites and pools": {
        "site": ("sites", "site", "Sites: invite, join, list, show, cordon, drain, leave."),
        "pool": ("pools", "pool", "A pool's mode, phase and downtimes, each a decision on record."),
        "drill": ("drill", "drill", "Rehearse a cut of a site's link with its owner, and sign what happened."),
    },
    "On a site's machine": {
        "agent": ("agent", "agent", "The agent beside the site's cluster: check, join, run, install."),
        "node": ("node", "node", "Machines of a bare-metal pool: join, list, cordon, revoke, reservations."),
        "local": ("local", "local", "The owner's own use and switches; works with hub and bus gone."),
    },
    "People": {
        "tenant": ("people", "tenant", "Tenants, their local accounts, quotas and allowances."),
        "grant": ("rulings", "grant", "What a tenant may use at a site while that site is alone."),
        "token": ("people", "token", "API tokens."),
    },
    "The hub": {
        "hub": ("hub", "hub", "Run a hub on this machine: init, up, status."),
        "incident": ("incidents", "incident", "Open faults: list, show, take, close."),
        "quarantine": ("waiting", "quarantine", "What a site said and a service could not read: list it, read it again."),
        "audit": ("audit", "audit", "Who did what, on what, why; and the proof that nothing of it was changed."),
        "sim": ("sim", "sim", "The simulator: the whole federation in virtual time, under faults drawn from a seed."),
    },
}
COMMANDS: Mapping[str, tuple[str, str, str]] = {name: entry for section in SECTIONS.values() for name, entry in section.items()}


class Lazy(click.Group):
    """A group whose commands are imported when called; help comes from the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"intertie.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_sections(formatter, {heading: {name: text for name, (_, _, text) in rows.items()} for heading, rows in SECTIONS.items()})

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as err:
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            raise click.UsageError(f"{err.message}{f' Did you mean {close[0]!r}?' if close else ''}", ctx) from None


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_version("intertie"), prog_name="intertie")
def cli() -> None:
    """Intertie joins GPU clusters that already exist: one way to submit, one way to be billed, each cluster its own master.

    Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 denied, 5 timeout or unreachable. Language: INTERTIE_LANG=en|zh.
    """


def main() -> None:
    """Run the command line; known errors become one line with the next step, never a traceback."""
    try:
        cli(prog_name="intertie")
    except IntertieError as err:
        from intertie.cli.out import fail

        fail(err)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as err:
        if err.filename is None:
            raise
        from intertie.cli.out import fail
        from intertie.errors import Refused

        fail(
            Refused(
                "cli.file", f"{err.filename}: {err.strerror}", next_step="see that the path is right, and that you may read or write there"
            )
        )


if __name__ == "__main__":
    main()
