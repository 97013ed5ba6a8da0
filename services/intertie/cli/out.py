"""Saying things: tables for people, JSON for programs, errors that end with the next step. Standard output carries the answer, nothing else."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from intertie.contracts.base import encode
from intertie.errors import Denied, IntertieError, NotFound, Refused, Unauthenticated, Unavailable
from intertie.text import known, language, say

if TYPE_CHECKING:
    from rich.table import Table

F = TypeVar("F", bound=Callable[..., Any])

EXIT_FAILED, EXIT_USAGE, EXIT_NOT_FOUND, EXIT_DENIED, EXIT_TIMEOUT = 1, 2, 3, 4, 5


def exit_code(error: IntertieError) -> int:
    """0 ok · 1 failed · 2 usage · 3 not found · 4 denied · 5 timeout or unreachable."""
    if isinstance(error, NotFound):
        return EXIT_NOT_FOUND
    if isinstance(error, Denied | Unauthenticated):
        return EXIT_DENIED
    if isinstance(error, Unavailable):
        return EXIT_TIMEOUT
    return EXIT_FAILED


def json_option(command: F) -> F:
    """`--json` on every read."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def reason_option(text: str) -> Callable[[F], F]:
    """`--reason`, where the records demand one: three characters at least, as the contracts do."""
    return click.option("--reason", required=True, callback=_reason, help=text)


def _reason(_ctx: click.Context, _option: click.Parameter, value: str) -> str:
    if not 3 <= len(value.strip()) <= 1_000:
        raise click.BadParameter("say why in 3 to 1000 characters: it is kept, and others read it")
    return value


# Everything that moves a terminal's cursor, ends its line or turns its writing round, but newline and tab: sites and tenants write texts that
# operators read. What a job itself printed (`logs`) is passed on as it is, colours and all, as `cat` would.
_MOVES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_MOVES_IN_A_CELL = re.compile(f"[\n\t]|{_MOVES.pattern}")


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def harmless(text: str, *, cell: bool = False) -> str:
    """`text` with what could act on a terminal written out, as JSON spells it; in a `cell` also what would end it."""
    return (_MOVES_IN_A_CELL if cell else _MOVES).sub(_escaped, text)


def print_json(value: object) -> None:
    """A contract as JSON, one line. (Such characters stand in strings only, where the escape means the same.)"""
    sys.stdout.write(harmless(encode(value).decode()) + "\n")


# Blank columns between two of a table's.
GAP = 2


def line(text: str = "") -> None:
    """One line of the answer."""
    click.echo(harmless(text))


def note(text: str) -> None:
    """Something beside the answer: to standard error."""
    click.echo(harmless(text), err=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """A table, or the sentence that says what to do when there is nothing. Tab-separated when not on a terminal."""
    if not rows:
        note(empty)
        return
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(harmless(str(cell), cell=True) for cell in row))
        return
    from rich.console import Console

    console = Console()
    console.print(laid_out(columns, rows, console.width))


def laid_out(columns: Sequence[str], rows: Sequence[Sequence[object]], width: int) -> Table:
    """A table for a terminal of `width` columns. Sentences go on below first, then moments at their blank, and ids last; nothing is cut off."""
    from rich.table import Table
    from rich.text import Text

    told = [[harmless(str(cell), cell=True) for cell in row] for row in rows]
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for title, size in zip(columns, widths_of([columns, *told], width - GAP * (len(columns) - 1)), strict=True):
        shown.add_column(title, overflow="fold", width=size)
    for row in told:
        # Plain text: a cell's `[red]` is its own, not rich's.
        shown.add_row(*(Text(cell) for cell in row))
    return shown


def widths_of(rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """How wide each column is, in `room` for all: the widest gives way first, down to its longest word; only then are words folded."""
    from rich.cells import cell_len

    cells = list(zip(*rows, strict=True))
    # Chinese has no blanks, and may be broken anywhere.
    least = [max(cell_len(word) if cell_len(word) == len(word) else 2 for text in column for word in text.split(" ")) for column in cells]
    sizes = [min(max(cell_len(text) for text in column), max(room, 1)) for column in cells]
    while sum(sizes) > room and max(sizes) > 1:
        wordy = [at for at, size in enumerate(sizes) if size > least[at]]
        sizes[max(wordy or range(len(sizes)), key=lambda at: sizes[at])] -= 1
    return sizes


def fail(error: IntertieError) -> NoReturn:
    """Say what was wrong and what to do, and leave with the code that means it."""
    zh = language() == "zh"
    note(f"{'错误' if zh else 'error'}: {error.text} [{error.code}]")
    rejections = error.details.get("rejections")
    if isinstance(rejections, list):
        rows = [row for row in rejections if isinstance(row, dict)]
        for words in rejection_lines(
            [(f"{row.get('site')}/{row.get('pool')}", str(row.get("rule")), str(row.get("text"))) for row in rows]
        ):
            note(f"  {words}")
    # The hub is away, and nobody who could say more was reached.
    away = "intertie doctor; on a site's machine `intertie local` works without the hub" if isinstance(error, Unavailable) else ""
    if step := error.next_step or away:
        note(f"{'下一步' if zh else 'next'}: {step}")
    sys.exit(exit_code(error))


def rejection_text(rule: str, text: str) -> str:
    """Why a pool was rejected: the planner's words; in Chinese the rule's name first, as the planner speaks English and has the numbers."""
    lang, key = language(), f"rule.{rule}"
    return f"{say(key, lang)}({text})" if lang == "zh" and known(key) else text


PINNED = "pin"
"""The rule of a pool that the job did not name: what is to be said of it is the same for all of them."""


def rejection_lines(rows: Sequence[tuple[str, str, str]], *, codes: bool = False) -> list[str]:
    """(`site/pool`, rule, text) as lines, with the rules' names if `codes`. The pools that the job did not name are one line, the last."""

    def told(place: str, rule: str, text: str) -> str:
        return f"{place}: {rejection_text(rule, text)}" + (f" [{rule}]" if codes else "")

    others = [(place, text) for place, rule, text in rows if rule == PINNED]
    said = [told(place, rule, text) for place, rule, text in rows if rule != PINNED]
    if others:
        place = others[0][0] if len(others) == 1 else say("cli.pools_elsewhere", language(), count=len(others))
        said.append(told(place, PINNED, others[0][1]))
    return said


@contextmanager
def read_as(file: Path, what: str, made_by: str) -> Iterator[None]:
    """A file that a person names: one that is not `what` at all is said to be so, with the command that makes such a file."""
    try:
        yield
    except Refused as err:
        if err.code != "contract.invalid":
            raise
        raise Refused("cli.not_this_file", f"{file} is no {what}: {err.text}", next_step=f"such a file is made by: {made_by}") from err


def outcome_text(outcome: str | None) -> str:
    """How an attempt ended, in the reader's language; `-` while it has not."""
    key = f"state.{outcome}"
    return say(key, language()) if known(key) else outcome or "-"


def ago(at: datetime | None) -> str:
    """How long ago, in the largest unit that fits."""
    if at is None:
        return "never"
    seconds = max(0, int((now() - at).total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def now() -> datetime:
    from intertie.clock import SystemClock

    return SystemClock().now()


def local(at: datetime | None) -> str:
    """A moment in the reader's own time zone; with its year, unless that is this one."""
    if at is None:
        return "-"
    here = at.astimezone()
    return here.strftime("%m-%d %H:%M:%S" if here.year == now().astimezone().year else "%Y-%m-%d %H:%M:%S")
