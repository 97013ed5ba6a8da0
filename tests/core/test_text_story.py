"""Every thing that a job's story can say has a Chinese word; what is newer than the table stays as it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import intertie.scheduler
from intertie.text.story import ENDS, HAPPENED, happened

# Which argument of these calls is the word of a story's line.
PLACE_OF_THE_WORD = {"line": 1, "change": 2, "_about": 2, "_taken_up": 2}


def words_in(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
        yield str(node.values[0].value)
    elif isinstance(node, ast.IfExp):
        yield from words_in(node.body)
        yield from words_in(node.orelse)


def words_of_the_scheduler() -> set[str]:
    found = set()
    for file in Path(next(iter(intertie.scheduler.__path__))).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["what"]:
                found |= set(words_in(node.value))
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
            place = PLACE_OF_THE_WORD.get(name)
            # `ways._about` names its source first.
            for at in (place, place + 1) if name == "_about" and place is not None else (place,):
                if at is not None and len(node.args) > at:
                    found |= set(words_in(node.args[at]))
    return found


def test_every_thing_that_happens_has_a_chinese_word() -> None:
    words = words_of_the_scheduler()
    assert len(words) > 20, "the scan found no words"
    missing = [word for word in words if word not in HAPPENED and word.partition(": ")[0] not in ENDS]
    # Arguments beside the word, of calls that are named alike.
    assert [word for word in missing if not word.startswith(("why: ", "{"))] == []


@pytest.mark.parametrize(
    ("what", "chinese"),
    [
        ("placed", "已派往站点"),
        ("ended: succeeded", "结束:成功"),
        ("refined: failed", "更正:失败"),
        ("refined: it never started", "更正:从未启动"),
        ("something newer", "something newer"),
    ],
)
def test_it_is_read_in_chinese_and_kept_in_english(what: str, chinese: str) -> None:
    assert (happened(what, "zh"), happened(what, "en")) == (chinese, what)
