"""Estimates of another host's wall clock: the true offset lies within the stated error, whatever the network did."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st
from tests.core.link_world import NOON

from intertie.contracts.link import Clocks
from intertie.link.clocks import ClockEstimate, by_arrival, by_round_trip

seconds = st.floats(0, 1.5, allow_nan=False)
offsets = st.floats(-500, 500, allow_nan=False)
ROUNDING_S = 1e-5
"""A datetime holds microseconds."""


@given(offsets, st.lists(st.tuples(seconds, seconds, st.floats(0, 60)), min_size=1, max_size=6))
def test_a_round_trip_bounds_the_offset(true_offset: float, trips: list[tuple[float, float, float]]) -> None:
    estimate: ClockEstimate | None = None
    at = 0.0
    for out, back, wait in trips:
        sent = Clocks(utc=NOON + timedelta(seconds=at - true_offset), boot_s=at, kernel_boot="b")
        estimate = by_round_trip(estimate, sent, at + out + back, NOON + timedelta(seconds=at + out))
        assert abs(estimate.offset_s - true_offset) <= estimate.error_s + ROUNDING_S
        at += out + back + wait


@given(offsets, st.lists(st.tuples(seconds, st.floats(0.001, 60), st.booleans()), min_size=1, max_size=6))
def test_arrivals_bound_the_offset(true_offset: float, syncs: list[tuple[float, float, bool]]) -> None:
    known: tuple[float, float] | None = None
    at, answered, age = 0.0, None, 0.0
    for travel, wait, taken in syncs:
        site = NOON + timedelta(seconds=at - true_offset)
        received = NOON + timedelta(seconds=at + travel)
        known = by_arrival(known, age, site, received, answered if taken else None)
        assert abs(known[0] - true_offset) <= known[1] + ROUNDING_S
        answered, age = received, travel + wait
        at += travel + wait


def test_a_quick_round_trip_is_kept_over_a_slow_one_until_drift_has_loosened_it() -> None:
    quick = by_round_trip(None, Clocks(utc=NOON, boot_s=0, kernel_boot="b"), 0.002, NOON + timedelta(seconds=0.001))
    slow = Clocks(utc=NOON + timedelta(seconds=10), boot_s=10, kernel_boot="b")
    kept = by_round_trip(quick, slow, 11, NOON + timedelta(seconds=10.9))
    assert abs(kept.offset_s) < 0.001 < kept.error_s < 0.01


def test_a_step_of_the_wall_clock_voids_what_was_known() -> None:
    """BR-139: the site's clock steps back an hour while jobs run."""
    before = by_round_trip(None, Clocks(utc=NOON, boot_s=0, kernel_boot="b"), 0.002, NOON)
    stepped = Clocks(utc=NOON + timedelta(seconds=10) - timedelta(hours=1), boot_s=10, kernel_boot="b")
    after = by_round_trip(before, stepped, 10.5, NOON + timedelta(seconds=10.2))
    assert abs(after.offset_s - 3600) <= after.error_s == 0.25


@given(offsets, st.floats(0, 1.9), st.floats(0.0005, 1))
def test_the_sites_own_estimate_narrows_what_one_arrival_says(true_offset: float, travel: float, error: float) -> None:
    site, received = NOON - timedelta(seconds=true_offset), NOON + timedelta(seconds=travel)
    offset, left = by_arrival(None, 0.0, site, received, None, (true_offset, error))
    assert left <= error + ROUNDING_S
    assert abs(offset - true_offset) <= left + ROUNDING_S


def test_a_site_cannot_tell_a_clock_that_its_own_message_contradicts() -> None:
    honest = by_arrival(None, 0.0, NOON, NOON + timedelta(seconds=0.1), None)
    assert by_arrival(None, 0.0, NOON, NOON + timedelta(seconds=0.1), None, (3_600.0, 0.001)) == honest
    assert by_arrival(None, 0.0, NOON, NOON + timedelta(seconds=0.1), None, (0.0, -5.0)) == honest
