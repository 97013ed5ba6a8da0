"""How a group of commands lists them: under headings, in the order of a first day, and never cut short.

click shortens a command's line to one row and ends it with dots; what is cut is often what tells two commands apart. Here it goes on below.
"""

from __future__ import annotations

from collections.abc import Mapping

import click

# Longer than any first sentence: nothing is cut.
WHOLE = 10_000


class Group(click.Group):
    """A group whose list gives each command's first sentence whole. Groups made from it (`@group.group()`) are of its kind."""

    group_class = type

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands of this group, each with its first sentence."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        if rows := [(name, command.get_short_help_str(WHOLE)) for name, command in found if command is not None and not command.hidden]:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def write_sections(formatter: click.HelpFormatter, sections: Mapping[str, Mapping[str, str]]) -> None:
    """Commands (name → its line) under headings, all in one column."""
    # Every name is set as wide as the widest, so that the lines stand below each other over all headings.
    width = max(len(name) for rows in sections.values() for name in rows)
    for heading, rows in sections.items():
        with formatter.section(heading):
            formatter.write_dl([(name.ljust(width), text) for name, text in rows.items()])
