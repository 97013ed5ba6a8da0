"""Who is behind: numbers against heads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intertie.contracts.base import Head, Heads
from intertie.store.heads import HeadsWatch

NOUNS = {"pool"}


def heads(number: int, *, epoch: int = 1, noun: str = "pool") -> Heads:
    return Heads(service="registry", heads=[Head(service="registry", noun=noun, epoch=epoch, number=number)])


def watch(*numbers: int, epoch: int = 1) -> HeadsWatch:
    made = HeadsWatch()
    for number in numbers:
        made.arrived("registry", "pool", epoch, number)
    return made


@pytest.mark.parametrize(
    ("has", "beats", "behind"),
    [
        ((1, 2, 3), (3, 3), False),
        ((1, 2), (3,), False),
        ((1, 2), (3, 3), True),
        ((1, 2), (2, 3), False),
        ((1, 3), (3, 3), True),
        ((3, 1, 2), (3, 3), False),
        ((), (0, 0), False),
        ((), (1, 1), True),
        ((1, 1, 2, 2), (2, 2), False),
    ],
)
def test_behind_means_that_a_head_said_a_beat_ago_is_not_here_whole(has: tuple[int, ...], beats: tuple[int, ...], behind: bool) -> None:
    made = watch(*has)
    assert [made.beat(heads(number), NOUNS) for number in beats][-1] is behind


def test_nouns_that_nobody_asked_for_are_not_missed() -> None:
    made = watch()
    assert not any(made.beat(heads(9, noun="site"), NOUNS) for _ in range(3))


def test_a_snapshot_fills_the_gap_and_what_came_after_counts() -> None:
    made = watch(1, 2, 6, 7)
    made.beat(heads(7), NOUNS)
    assert made.beat(heads(7), NOUNS)
    made.contains(heads(5).heads)
    assert not made.beat(heads(7), NOUNS)


def test_a_raised_epoch_asks_for_a_snapshot_until_one_was_taken() -> None:
    """Nothing is missing by the numbers; but what was heard of a tail that a restore took is no longer so, and no event ever says it."""
    made = watch(1, 2, 3)
    assert not made.beat(heads(3), NOUNS)
    assert made.beat(heads(0, epoch=2), NOUNS) and made.beat(heads(0, epoch=2), NOUNS)
    made.contains(made.said("registry"))
    assert not made.beat(heads(0, epoch=2), NOUNS)
    made.arrived("registry", "pool", 2, 1)
    assert not made.beat(heads(1, epoch=2), NOUNS)


def test_a_raised_epoch_without_an_event_is_asked_for_once_by_who_heard_no_heads_before_its_snapshot() -> None:
    made = HeadsWatch()
    made.contains(made.said("registry"))
    assert made.beat(heads(0, epoch=2), NOUNS)
    made.contains(made.said("registry"))
    assert not made.beat(heads(0, epoch=2), NOUNS) and not made.beat(heads(0, epoch=2), NOUNS)
    assert not HeadsWatch().beat(heads(0, epoch=1), NOUNS), "a hub that was never restored has forgotten nothing"


def test_a_raised_epoch_begins_its_numbers_anew() -> None:
    made = watch(1, 2, 3)
    made.beat(heads(1, epoch=2), NOUNS)
    assert made.beat(heads(1, epoch=2), NOUNS)
    made.arrived("registry", "pool", 2, 1)
    made.arrived("registry", "pool", 1, 4)
    assert not made.beat(heads(1, epoch=2), NOUNS)


def test_what_was_said_last_is_what_a_snapshot_asked_now_contains() -> None:
    made = watch()
    made.beat(heads(4), NOUNS)
    assert made.said("registry") == heads(4).heads
    assert made.said("*") == heads(4).heads
    assert made.said("scheduler") == []


@given(st.permutations(range(1, 9)), st.lists(st.integers(1, 8)), st.integers(0, 8))
def test_order_repeats_and_a_snapshot_anywhere_never_leave_anyone_behind(order: list[int], repeats: list[int], snapshot_at: int) -> None:
    made = watch()
    for place, number in enumerate([*order, *repeats]):
        if place == snapshot_at:
            made.contains(heads(number).heads)
        made.arrived("registry", "pool", 1, number)
    made.beat(heads(8), NOUNS)
    assert not made.beat(heads(8), NOUNS)
