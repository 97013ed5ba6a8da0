"""Every command says what it is: a line of its own, a line for each option, and the same line in the list above it. And every rule has words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from intertie.cli.__main__ import COMMANDS, SECTIONS, cli
from intertie.cli.jobs import unseen
from intertie.planner.rules import RULES
from intertie.rating.text import clause_in
from intertie.text import known

# Its help is the agent's own program's.
PASSED_ON = "agent"


def walk(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command and group, by its words."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from walk(found, (*path, name))


EVERY = [pytest.param(path, command, id=" ".join(path) or "intertie") for path, command in walk(cli)]


@pytest.mark.parametrize(("path", "command"), EVERY)
def test_a_command_says_in_one_line_what_it_is(path: tuple[str, ...], command: click.Command) -> None:
    first = (command.help or "").partition("\n")[0]
    assert len(first) > 10, "no help"
    assert command.get_short_help_str(), "nothing for the list of its group"


@pytest.mark.parametrize(("path", "command"), [row for row in EVERY if row.id != PASSED_ON])
def test_help_is_shown_and_names_every_option(path: tuple[str, ...], command: click.Command) -> None:
    shown = command.get_help(click.Context(command, info_name=" ".join(("intertie", *path))))
    assert shown.startswith("Usage: intertie")
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{' '.join(path)} {parameter.opts[-1]} has no help"
            assert parameter.opts[-1] in shown


def test_the_list_of_commands_is_the_table() -> None:
    shown = cli.get_help(click.Context(cli, info_name="intertie"))
    missing = [name for name, (_, _, text) in COMMANDS.items() if name not in shown or text.split()[0] not in shown]
    assert not missing


@pytest.mark.parametrize(("path", "command"), [row for row in EVERY if isinstance(row.values[1], click.Group)])
def test_no_line_of_a_list_is_cut_short(path: tuple[str, ...], command: click.Command) -> None:
    shown = command.get_help(click.Context(command, info_name=" ".join(("intertie", *path)), terminal_width=80))
    assert not [row for row in shown.splitlines() if row.endswith("...") and not row.startswith("Usage:")]


def test_each_command_stands_under_one_heading() -> None:
    names = [name for rows in SECTIONS.values() for name in rows]
    assert sorted(names) == sorted(set(names)) == sorted(COMMANDS)
    assert max(len(rows) for rows in SECTIONS.values()) < 12, "a heading that holds everything orders nothing"


def test_the_agents_help_comes_from_the_agent() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "intertie.cli", "agent", "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "join" in done.stdout and "run" in done.stdout


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_every_rule_of_the_planner_has_words_in_both_languages(rule: str) -> None:
    assert known(f"rule.{rule}")


CLAUSES = (
    ("spec-1 rev 2: run is charged; succeeded → tenant", "spec-1 第 2 版:运行计费;成功 → 租户"),
    ("spec-1 rev 2: stage_in is not charged; job → tenant", "spec-1 第 2 版:准备不计费;任务自身原因 → 租户"),
    ("words that nobody foresaw", "words that nobody foresaw"),
)


@pytest.mark.parametrize(("clause", "chinese"), CLAUSES)
def test_a_clause_is_read_in_chinese_and_kept_in_english(clause: str, chinese: str) -> None:
    assert clause_in(clause, "zh") == chinese
    assert clause_in(clause, "en") == clause


TAILS = (
    ("", "a\nb\n", "a\nb\n"),  # nothing was printed: all of the tail
    ("a\nb\n", "a\nb\n", ""),  # all was printed
    ("x\na\n", "a\nb\n", "b\n"),  # the tail begins before the end of what was printed
    ("far back\n", "a\nb\n", "a\nb\n"),  # no overlap: a gap that nobody can fill
)


@pytest.mark.parametrize(("shown", "tail", "rest"), TAILS)
def test_of_a_kept_tail_only_what_was_not_printed_is_printed(shown: str, tail: str, rest: str) -> None:
    assert unseen(shown, tail) == rest
