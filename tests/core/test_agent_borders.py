"""Periods end while work runs: the attempt is cut by its own axis, and what was said of it before and after adds up to what it used."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.agents import attempt

from intertie.agent.core import periods, usage
from intertie.agent.core.model import StartedRecord, State
from intertie.agent.core.periods import PeriodBook
from intertie.contracts.usage import UsagePhase
from intertie.ids import SiteName

SHANGHAI = "Asia/Shanghai"
NS = 1_000_000_000


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def test_a_month_ends_at_midnight_of_the_settlement_time_zone() -> None:
    period = periods.period_of(at("2026-11-30T16:00:00"), SHANGHAI)
    assert (period.name, period.start, period.end) == ("2026-12", at("2026-11-30T16:00:00"), at("2026-12-31T16:00:00"))
    assert periods.period_of(at("2026-11-30T15:59:59"), SHANGHAI).name == "2026-11"


def test_after_a_long_sleep_every_border_is_found_in_order() -> None:
    found = periods.borders(at("2026-10-05T00:00:00"), at("2027-01-02T00:00:00"), SHANGHAI)
    assert found == [at(f"{day}T16:00:00") for day in ("2026-10-31", "2026-11-30", "2026-12-31")]


def test_the_border_itself_has_passed_and_the_moment_before_has_not() -> None:
    border = at("2026-11-30T16:00:00")
    assert periods.borders(border - timedelta(days=1), border, SHANGHAI) == [border]
    assert periods.borders(border - timedelta(days=1), border - timedelta(microseconds=1), SHANGHAI) == []
    assert periods.borders(border, border + timedelta(days=1), SHANGHAI) == []


def test_a_clock_that_jumps_over_decades_ends_no_period() -> None:
    assert periods.borders(at("2026-12-01T00:00:00"), at("2099-01-01T00:00:00"), SHANGHAI) == []


def test_a_segment_that_ends_on_the_border_belongs_to_the_period_that_it_closes() -> None:
    started = StartedRecord(utc_ns=int(at("2026-11-30T15:00:00").timestamp()) * NS, boot_ns=NS, native_id="1")
    run = attempt(state=State.RUNNING, started=started)
    hour = 3_600_000_000
    parts = [usage.Span(UsagePhase.RUN, 0, hour, "period"), usage.Span(UsagePhase.RUN, hour, 2 * hour)]
    told = usage.segments(run, SiteName("lab"), parts, after=0, islanded=False)
    grouped = periods.grouped(told, SHANGHAI)
    assert grouped == {"2026-11": told[:1], "2026-12": told[1:]}


def test_an_end_that_is_measured_again_says_the_same_segments() -> None:
    """A site that lost its journal tells an end once more: a segment's id follows from its attempt and its place, not from the telling."""
    started = StartedRecord(utc_ns=int(at("2026-11-30T15:00:00").timestamp()) * NS, boot_ns=NS, native_id="1")
    run = attempt(state=State.RUNNING, started=started)
    parts = [usage.Span(UsagePhase.RUN, 0, 5), usage.Span(UsagePhase.STAGE_OUT, 5, 7)]
    told, again = (usage.segments(run, SiteName("lab"), parts, after=0, islanded=alone) for alone in (False, True))
    assert [one.id for one in told] == [one.id for one in again] and len({one.id for one in told}) == 2
    later = usage.segments(run, SiteName("lab"), parts, after=2, islanded=False)
    assert not {one.id for one in told} & {one.id for one in later}


def test_what_is_counted_of_a_period_is_what_lies_in_it() -> None:
    started = StartedRecord(utc_ns=int(at("2026-11-30T15:00:00").timestamp()) * NS, boot_ns=NS, native_id="1")
    hour = 3_600_000_000
    parts = [usage.Span(UsagePhase.RUN, 0, hour, "period"), usage.Span(UsagePhase.RUN, hour, 2 * hour)]
    told = usage.segments(attempt(state=State.RUNNING, started=started), SiteName("lab"), parts, after=0, islanded=False)
    book = periods.added(PeriodBook(), periods.grouped(told, SHANGHAI)["2026-11"])
    assert book.counts == (1, 1, 1_000 * hour)


MICROSECONDS = st.integers(0, 10**13)


@given(
    staged_us=st.integers(0, 10**9),
    ran_us=MICROSECONDS,
    packing_us=st.integers(0, 10**9),
    borders=st.lists(st.integers(-(10**9), 2 * 10**13), max_size=6, unique=True),
    looks=st.lists(MICROSECONDS, max_size=6),
)
def test_however_often_and_late_it_is_cut_the_pieces_are_the_whole_without_gap_or_overlap(
    staged_us: int, ran_us: int, packing_us: int, borders: list[int], looks: list[int]
) -> None:
    """`looks`: when the agent was awake and saw it run, in microseconds from the anchor. A last sign of life may lie before the last cut."""
    cut: usage.Cut | None = None
    told: list[usage.Span] = []
    one = attempt(devices=("slot-1", "slot-2"))
    for look in sorted(looks):
        passed = [b for b in sorted(borders) if -staged_us < b <= look and (cut is None or b > cut.told_us)]
        if not passed:
            continue
        through = max(0, passed[-1])
        inside = [b for b in borders if -staged_us < b <= through]
        parts = usage.spans_through(through, staged_us=staged_us, borders_us=inside, cut=cut)
        cut = usage.extended(cut, through, usage.counts(one, parts))
        told += parts
    if cut is not None:
        ran_us = max(ran_us, cut.told_us)
    inside = [b for b in borders if -staged_us < b <= ran_us + packing_us]
    last = usage.spans_to_end(staged_us=staged_us, ran_us=ran_us, packing_us=packing_us, borders_us=inside, cut=cut)
    counts = usage.counts(one, last, cut)
    told += last
    assert all(left.end_us == right.start_us for left, right in pairwise(told))
    assert all(span.end_us > span.start_us for span in told)
    if told:
        assert (told[0].start_us, told[-1].end_us) == (-staged_us, ran_us + packing_us)
    assert not any(span.start_us < b < span.end_us for span in told for b in borders)
    assert counts == usage.Counts(len(told), 2_000 * (staged_us + ran_us + packing_us))
    by_phase = {phase: sum(s.end_us - s.start_us for s in told if s.phase is phase) for phase in UsagePhase}
    assert by_phase[UsagePhase.RUN] == ran_us and by_phase[UsagePhase.STAGE_IN] == staged_us
