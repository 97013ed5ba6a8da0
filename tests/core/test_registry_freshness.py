"""Only the leader judges silence, by its own monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intertie.contracts.site import Freshness
from intertie.registry.core.freshness import Heard, Hearing, Limits, first_look, judge, look

FRESH, STALE, UNKNOWN = Freshness.FRESH, Freshness.STALE, Freshness.UNKNOWN
LIMITS = Limits(stale_s=15, unknown_s=60)
OFFICE = 1_000.0


@dataclass
class Leader:
    """A leader that took office at OFFICE and looks at one site."""

    freshness: Freshness
    hearing: Hearing

    @classmethod
    def takes_office(cls, freshness: Freshness, *, heard: int = 10, taken: int = 9) -> Leader:
        return cls(freshness, first_look(Heard(heard, taken), now_s=OFFICE, hears_us=True))

    def looks(self, at_s: float, heard: int, taken: int, *, hears_since_s: float | None = 0.0) -> Freshness:
        now_s = OFFICE + at_s
        self.hearing = look(self.hearing, Heard(heard, taken), now_s=now_s, limits=LIMITS)
        since_s = None if hears_since_s is None else OFFICE + hears_since_s
        self.freshness = judge(self.freshness, self.hearing, now_s=now_s, limits=LIMITS, hears_since_s=since_s).freshness
        return self.freshness


@pytest.mark.parametrize(
    ("was", "at_s", "is_now"),
    [
        (FRESH, 0, FRESH),
        (FRESH, 15, FRESH),
        (FRESH, 15.1, STALE),
        (FRESH, 60.1, UNKNOWN),
        (STALE, 15.1, STALE),
        (STALE, 60.1, UNKNOWN),
        (UNKNOWN, 1, UNKNOWN),
        (UNKNOWN, 500, UNKNOWN),
    ],
)
def test_a_site_that_says_nothing_grows_older_from_the_day_of_office(was: Freshness, at_s: float, is_now: Freshness) -> None:
    assert Leader.takes_office(was).looks(at_s, heard=10, taken=9) is is_now


@pytest.mark.parametrize("was", list(Freshness))
def test_growth_of_heard_makes_a_site_fresh(was: Freshness) -> None:
    assert Leader.takes_office(was).looks(5, heard=11, taken=10) is FRESH


def test_the_hubs_own_absence_makes_no_site_unknown() -> None:
    """LINK D5: whatever time passed before this leader took office, the site keeps the freshness it had."""
    assert Leader.takes_office(FRESH).looks(1, heard=10, taken=9) is FRESH


def test_what_the_hub_could_not_hear_makes_a_site_stale_and_never_unknown() -> None:
    """LINK D5: hub up, bus down: every site is silent and none of them is to blame."""
    leader = Leader.takes_office(FRESH)
    leader.looks(5, heard=11, taken=10)
    assert leader.looks(100, heard=11, taken=10, hears_since_s=None) is STALE
    assert leader.looks(110, heard=11, taken=10, hears_since_s=105) is STALE
    assert leader.looks(165.1, heard=11, taken=10, hears_since_s=105) is UNKNOWN


def test_a_site_that_was_unknown_stays_so_while_the_hub_is_deaf() -> None:
    leader = Leader.takes_office(FRESH)
    leader.looks(5, heard=11, taken=10)
    assert leader.looks(100, heard=11, taken=10) is UNKNOWN
    assert leader.looks(105, heard=11, taken=10, hears_since_s=None) is UNKNOWN


def test_a_site_that_speaks_and_never_takes_our_answers_is_stale_and_not_unknown() -> None:
    """LINK D9: a one-way link looks healthy unless the taken nonce is asked."""
    leader = Leader.takes_office(FRESH)
    seen = [leader.looks(beat * 5, heard=10 + beat, taken=9) for beat in range(1, 40)]
    assert seen[0] is FRESH and seen[-1] is STALE and UNKNOWN not in seen
    assert leader.hearing.hears_us is False


def test_a_site_that_takes_answers_again_is_fresh_again() -> None:
    leader = Leader.takes_office(FRESH)
    for beat in range(1, 10):
        leader.looks(beat * 5, heard=10 + beat, taken=9)
    assert leader.looks(50, heard=20, taken=19) is FRESH
    assert leader.hearing.hears_us is True


def test_a_site_that_returns_is_fresh_before_its_first_answer_can_have_been_taken() -> None:
    leader = Leader.takes_office(UNKNOWN, heard=10, taken=9)
    assert leader.looks(300, heard=11, taken=9) is FRESH
    assert leader.looks(305, heard=12, taken=11) is FRESH


def test_a_new_session_that_counts_its_nonces_anew_is_heard() -> None:
    leader = Leader.takes_office(FRESH, taken=900)
    assert leader.looks(5, heard=11, taken=0) is FRESH
    assert leader.hearing.hears_us is False
    assert leader.looks(6, heard=12, taken=1) is FRESH
    assert leader.hearing.hears_us is True


@given(st.lists(st.tuples(st.floats(0.1, 200), st.booleans()), min_size=1, max_size=40), st.sampled_from(list(Freshness)))
def test_fresh_is_only_said_within_the_limit_of_a_growth_or_of_taking_office(steps: list[tuple[float, bool]], was: Freshness) -> None:
    leader, at_s, heard, last_s, grown = Leader.takes_office(was), 0.0, 10, 0.0, False
    for wait_s, grows in steps:
        at_s += wait_s
        if grows:
            heard, last_s, grown = heard + 1, at_s, True
        said = leader.looks(at_s, heard=heard, taken=heard)
        if said is FRESH:
            assert at_s - last_s <= LIMITS.stale_s and (grown or was is FRESH)
        if said is UNKNOWN:
            assert at_s - last_s > LIMITS.unknown_s or (was is UNKNOWN and not grown)
