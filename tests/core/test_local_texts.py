"""What `intertie local` says: in both languages with the same fields, and with words for every trouble that a lane can be in."""

from __future__ import annotations

import string
from datetime import datetime, timedelta

import pytest

from intertie.cli.local_owner import card_hours, size_text, took, until_of
from intertie.cli.local_texts import TEXTS
from intertie.errors import Refused
from intertie.link.site import Trouble


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


@pytest.mark.parametrize("key", sorted(TEXTS))
def test_both_languages_say_it_with_the_same_fields(key: str) -> None:
    english, chinese = TEXTS[key]
    assert english.strip() and chinese.strip()
    assert fields(english) == fields(chinese)
    assert not any("\u4e00" <= c <= "\u9fff" for c in english)


@pytest.mark.parametrize("trouble", list(Trouble))
def test_a_lane_that_stands_still_is_told_in_words_with_the_next_step(trouble: Trouble) -> None:
    english, chinese = TEXTS[f"trouble.{trouble}"]
    assert "→" in english and "→" in chinese


NOW = datetime.fromisoformat("2026-12-01T17:30:00+08:00")
UNTIL = [
    ("18:00", "2026-12-01T18:00:00+08:00"),
    ("9:15", "2026-12-02T09:15:00+08:00"),
    ("17:30", "2026-12-02T17:30:00+08:00"),
    ("2h", "2026-12-01T19:30:00+08:00"),
    ("45m", "2026-12-01T18:15:00+08:00"),
    ("3d", "2026-12-04T17:30:00+08:00"),
    ("2026-12-31T18:00", "2026-12-31T18:00:00+08:00"),
    ("2026-12-31T18:00:00+00:00", "2026-12-31T18:00:00+00:00"),
]


@pytest.mark.parametrize(("text", "moment"), UNTIL, ids=[row[0] for row in UNTIL])
def test_until_is_read_as_a_person_means_it(text: str, moment: str) -> None:
    assert until_of(text, NOW) == datetime.fromisoformat(moment)


@pytest.mark.parametrize("text", ["", "soon", "25:00", "2 weeks", "2026-13-01"])
def test_what_is_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(Refused) as refused:
        until_of(text, NOW)
    assert "18:00" in refused.value.next_step


def test_figures_are_written_for_people() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 5 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]
    spans = [timedelta(seconds=0.4), timedelta(seconds=12), timedelta(seconds=200), timedelta(hours=5, minutes=10)]
    assert [took(span) for span in spans] == ["0.4 s", "12 s", "3m 20s", "5h 10m"]
    assert card_hours(1_000 * 3_600_000_000) == "1.00000"
