"""Chinese and English readers are equals: every text exists in both, with the same fields."""

from __future__ import annotations

import string

import pytest

from intertie.contracts.job import Cause, JobState, WaitReason
from intertie.contracts.usage import WhoPays
from intertie.lifecycle import Word
from intertie.text import accepted, language, say
from intertie.text.catalogue import TEXTS


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


@pytest.mark.parametrize("key", sorted(TEXTS))
def test_both_languages_say_it_with_the_same_fields(key: str) -> None:
    english, chinese = TEXTS[key]
    assert english.strip()
    assert chinese.strip()
    assert fields(english) == fields(chinese)
    if key != "page.other_language":
        assert not any("\u4e00" <= c <= "\u9fff" for c in english)


@pytest.mark.parametrize(
    ("family", "members"), [("word", Word), ("state", JobState), ("wait", WaitReason), ("cause", Cause), ("payer", WhoPays)]
)
def test_every_word_of_a_closed_set_has_a_text(family: str, members: type) -> None:
    assert {f"{family}.{m}" for m in members} <= TEXTS.keys()  # type: ignore[attr-defined]  # all are StrEnums


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"INTERTIE_LANG": "zh", "LC_ALL": "C"}, "zh"),
    ],
)
def test_the_language_comes_from_the_locale(environ: dict[str, str], expected: str) -> None:
    assert language(environ) == expected


@pytest.mark.parametrize(("header", "expected"), [("", "en"), ("zh-CN,zh;q=0.9,en;q=0.8", "zh"), ("fr,en;q=0.5", "en"), ("de", "en")])
def test_the_browser_says_which_language_it_accepts(header: str, expected: str) -> None:
    assert accepted(header) == expected


def test_a_text_is_filled() -> None:
    assert say("page.attempt", "zh", number=2) == "第 2 次运行"
