"""What stands on a terminal: whole ids, times with their year, sentences that go on below."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest
from rich.console import Console

from intertie.cli.out import laid_out, local, now

CALL = "call-06h3444ompqo99nuivaegfrmto"
PROMISE = "95 % within 5000 ms · first byte: 95 % within 800 ms · 99.5 % answered"
PROMISE_ZH = "95% 在 5000 毫秒内 · 首字节:95% 在 800 毫秒内 · 可用率 99.5%"


def shown(columns: tuple[str, ...], row: tuple[object, ...], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(laid_out(columns, [row], width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [70, 80, 100, 200])
@pytest.mark.parametrize("promise", [PROMISE, PROMISE_ZH])
def test_an_id_and_a_moment_are_whole_and_a_sentence_goes_on_below(width: int, promise: str) -> None:
    rows = shown(("CALL", "WHEN", "PROMISED"), (CALL, "12-01 14:45:45", promise), width)
    assert CALL in rows[1] and "12-01 14:45:45" in rows[1]
    assert max(len(row) for row in rows) <= width
    assert "…" not in "".join(rows)
    assert all(word in "".join(rows).replace(" ", "") for word in promise.split())


def test_where_words_have_no_room_for_all_a_moment_is_broken_at_its_blank_before_an_id_is() -> None:
    columns = ("CALL", "WHEN", "OFFERING", "END", "MS", "TOKENS", "STATE", "AMOUNT")
    rows = shown(columns, (CALL, "12-01 14:44:38", "lab/chat", "completed", "304", "unknown → unknown", "settled", "¥0.000032"), 100)
    assert CALL in rows[1] and "lab/chat" in rows[1] and "¥0.000032" in rows[1] and rows[0].split() == list(columns)


def test_what_no_terminal_is_wide_enough_for_is_folded_and_not_cut() -> None:
    rows = shown(("A", "B"), (CALL, CALL), 40)
    assert "".join(row[:20].strip() for row in rows[1:]) == CALL


def test_a_moment_of_another_year_says_so() -> None:
    this_year = now()
    assert local(this_year).count("-") == 1
    later = datetime(this_year.year + 1, 3, 31, 12, tzinfo=UTC)
    assert local(later).startswith(f"{this_year.year + 1}-03-31")
    assert local(None) == "-"
