"""Which numbered files are applied, and which are refused."""

from __future__ import annotations

import pytest

from intertie.errors import Refused
from intertie.store.migrate import Migration, load_migrations, parse_migrations, pending

KNOWN = parse_migrations("p", {"0001_first.sql": "a", "0002_add.pre.sql": "b", "0003_drop.post.sql": "c", "0004_more.sql": "d"})


def applied(*migrations: Migration) -> dict[int, tuple[str, str]]:
    return {m.number: (m.name, m.checksum) for m in migrations}


def test_files_are_applied_in_the_order_of_their_numbers() -> None:
    assert [m.number for m in pending(KNOWN, {}, "p", through="post")] == [1, 2, 3, 4]


def test_what_the_code_before_cannot_bear_waits_for_its_end() -> None:
    before = pending(KNOWN, {}, "p", through="pre")
    assert [m.number for m in before] == [1, 2, 4]
    assert [m.number for m in pending(KNOWN, applied(*before), "p", through="post")] == [3]


def test_nothing_is_applied_twice() -> None:
    assert pending(KNOWN, applied(*KNOWN), "p", through="post") == []


@pytest.mark.parametrize(
    ("was", "code"),
    [
        ({1: ("first", "another checksum")}, "store.migration_changed"),
        ({9: ("from_the_future", "x")}, "store.migration_unknown"),
    ],
)
def test_a_database_that_does_not_fit_these_files_is_refused(was: dict[int, tuple[str, str]], code: str) -> None:
    with pytest.raises(Refused) as caught:
        pending(KNOWN, was, "p", through="post")
    assert caught.value.code == code
    assert caught.value.next_step


@pytest.mark.parametrize(
    "files", [{"1_short.sql": ""}, {"0001_Upper.sql": ""}, {"0001_a.late.sql": ""}, {"0001_a.sql": "", "0001_b.sql": ""}]
)
def test_names_that_do_not_say_their_order_are_refused(files: dict[str, str]) -> None:
    with pytest.raises(Refused, match=r"store\.migration_name"):
        parse_migrations("p", files)


def test_the_common_tables_come_with_the_package() -> None:
    assert [m.name for m in load_migrations("intertie.store")][:1] == ["common"]
    assert load_migrations("intertie.errors") == []
