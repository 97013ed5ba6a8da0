"""Three books of one attempt as a table of differences; counts first; and what is concluded from nothing that was not read (FEATURES 9, 64, 71)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.metering_world import SITE, T0, TRUST, at, come, ended, record, segment, site_key, snapshot, spec

from intertie.contracts.accounting import MOST_US, BypassUse, Differs, NativeDay, NativeRecord
from intertie.contracts.base import encode
from intertie.contracts.job import AttemptRecord
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import Segment
from intertie.ids import AttemptId, DeviceId
from intertie.metering.core.evidence import Evidence, SiteKeys
from intertie.metering.core.native import AROUND_US, Days, Ours, Told, compare, read, reconcile
from intertie.metering.core.reckon import book_of, reckon

NOW = datetime(2026, 12, 3, 12, tzinfo=UTC)
PERIOD = ("2026-12", datetime(2026, 11, 30, 16, tzinfo=UTC), datetime(2026, 12, 31, 16, tzinfo=UTC))


def ran(start: float = 0, end: float = 100, *, number: int = 1, devices: int = 1, error_s: float = 0.0, **changes: Any) -> Ours:
    """An attempt that ran [start, end) seconds after T0, complete in both of our books."""
    offered = record(number, devices=[DeviceId(f"slot-{n}") for n in range(devices)])
    return books(offered, [segment(offered, start, end, last=True)], error_s=error_s, ran_us=int((end - start) * 1e6), **changes)


def books(offered: AttemptRecord, came: list[Segment], *, error_s: float = 0.0, **changes: Any) -> Ours:
    of = msgspec.structs.replace(ended(offered, came) if came else offered, **changes)
    evidence = Evidence(
        attempt=of.attempt,
        revision=1,
        snapshot=snapshot(of),
        received=[come(one, seq) for seq, one in enumerate(came, 1)],
        specs=[spec()],
        keys={SITE: SiteKeys(valid=frozenset({site_key(SITE)}))},
        lane_through=10,
    )
    return Ours(of, book_of(reckon(evidence, TRUST, NOW), []), error_s)


def native(start: float = 0, end: float | None = 100, *, number: int = 1, **changes: Any) -> NativeRecord:
    """As sacct has it: whole seconds."""
    base = NativeRecord(
        cluster="c1",
        native_id=f"47{number:02}",
        submitted=at(start - 5),
        tag=AttemptId(f"att-{number}"),
        state="COMPLETED" if end is not None else "RUNNING",
        started=at(start),
        ended=at(end) if end is not None else None,
        elapsed_us=int((end - start) * 1e6) if end is not None else None,
        devices=1,
        account="lab",
    )
    return msgspec.structs.replace(base, **changes)


def days(
    *records: NativeRecord, names: tuple[str, ...] = ("2026-12-01",), read_at: datetime = NOW, bypass: list[BypassUse] | None = None
) -> Days:
    told = [
        Told(
            NativeDay(site=SITE, cluster="c1", day=name, read_at=read_at, part=1, parts=1, records=list(records), bypass=bypass or []),
            proven=True,
        )
        for name in names
    ]
    return read(told)


NOTHING: list[str] = []
SECOND = 1_000_000
NEVER = record(1, state="refused")

ROWS: list[tuple[str, Ours, list[NativeRecord], list[str]]] = [
    ("equal", ran(), [native()], NOTHING),
    ("sacct cuts both ends to whole seconds", ran(0.4, 100.6), [native(0, 100)], NOTHING),
    ("and the other way", ran(0.999, 100.001), [native(0, 100)], NOTHING),
    ("prolog and epilog make theirs longer", ran(3, 100), [native(0, 101)], NOTHING),
    ("never shorter beyond the resolution", ran(0, 100), [native(0, 98)], ["duration"]),
    ("longer than what is done around a run", ran(0, 100), [native(0, 108)], ["duration"]),
    ("an unsure clock of ours says less", ran(0, 100, error_s=2.0), [native(0, 96)], NOTHING),
    ("a cluster that tells microseconds is held to them", ran(0, 100), [native(0, 99.5, resolution_us=1)], ["duration"]),
    ("as long at another time", ran(0, 100), [native(60, 160)], ["clock"]),
    (
        "suspended time is counted apart there and held here",
        ran(0, 100),
        [native(0, 100, elapsed_us=70 * SECOND, suspended_us=30 * SECOND)],
        NOTHING,
    ),
    ("more devices there", ran(devices=2), [native(devices=4)], ["quantity"]),
    ("devices that are not recorded say nothing", ran(devices=2), [native(devices=None)], NOTHING),
    ("cards that a job of slots does not hold", ran(devices=2), [native(devices=0)], NOTHING),
    ("another account", ran(), [native(account="root")], ["attribution"]),
    ("an account that is not recorded says nothing", ran(), [native(account="")], NOTHING),
    ("nothing there, and that time was read", ran(), [], ["missing"]),
    ("a job in their queue that never began is no run", ran(), [native(started=None, ended=None, elapsed_us=None)], ["missing"]),
    ("a ghost under a tag that never ran", books(NEVER, []), [native()], ["extra"]),
    ("what never ran and is nowhere is no difference", books(NEVER, []), [], NOTHING),
    ("two at once", ran(), [native(), native(50, 100, native_id="4799")], ["doubled", "duration"]),
    ("one after the other, as a requeue leaves them", ran(0, 100), [native(0, 40), native(40, 100, native_id="4799")], NOTHING),
    ("it has ended here and runs on there", ran(), [native(end=None)], ["runaway"]),
    ("a length that is not recorded says nothing", ran(), [native(elapsed_us=None)], NOTHING),
    ("two native runs shorter than ours", ran(0, 100), [native(0, 40), native(60, 90, native_id="4799")], ["duration"]),
]


@pytest.mark.parametrize(("what", "ours", "theirs", "kinds"), ROWS, ids=[row[0] for row in ROWS])
def test_books_differ_by_what_they_can_tell_apart_and_no_less(what: str, ours: Ours, theirs: list[NativeRecord], kinds: list[str]) -> None:
    found = compare(ours, theirs, days(*theirs), now=NOW)
    assert [one.kind.value for one in found] == kinds
    assert all(one.ours and one.theirs for one in found)


def test_a_difference_says_both_numbers_and_what_it_passes() -> None:
    (found,) = compare(ran(0, 100), [native(0, 90)], days(native()), now=NOW)
    assert (found.kind, found.ours, found.theirs, found.beyond) == (Differs.DURATION, "100.000 s", "90.000 s", "1.000 s and 5.000 s around")


def test_our_own_books_are_compared_too() -> None:
    offered = record(1)
    whole = [segment(offered, 0, 60), segment(offered, 60, 100, last=True)]
    of = msgspec.structs.replace(ended(offered, whole), ran_us=100 * SECOND)
    short = books(offered, whole[:1], segments=of.segments, quantity_milli_us=of.quantity_milli_us, ran_us=of.ran_us, ended_at=of.ended_at)
    found = compare(short, [native()], days(native()), now=NOW)
    assert [one.kind for one in found] == [Differs.METER]


@pytest.mark.parametrize(
    "read_days",
    [
        days(names=()),
        days(names=("2026-11-30",)),
        # Read while it ran: its end cannot be in there.
        days(read_at=at(50)),
    ],
)
def test_what_was_not_read_is_missed_by_nobody(read_days: Days) -> None:
    assert compare(ran(), [], read_days, now=NOW) == []


def test_what_ran_on_when_it_was_read_and_has_ended_since_is_no_runaway() -> None:
    assert compare(ran(), [native(end=None)], days(native(end=None), read_at=at(50)), now=NOW) == []


def test_one_that_has_just_ended_is_no_runaway() -> None:
    assert compare(ran(), [native(end=None)], days(), now=at(130)) == []


# --- readings ----------------------------------------------------------------------------------------------------------------------------


def part(number: int, of: int, read_at: datetime, *records: NativeRecord, proven: bool = True) -> Told:
    day = NativeDay(site=SITE, cluster="c1", day="2026-12-01", read_at=read_at, part=number, parts=of, records=list(records))
    return Told(day, proven)


def test_the_newest_whole_and_proven_reading_of_a_day_counts() -> None:
    early, late, last = at(10), at(20), at(30)
    told = [
        part(1, 1, early, native(number=1)),
        part(1, 2, late, native(number=2)),
        part(2, 2, late, native(number=3)),
        part(1, 2, last, native(number=4)),
        part(1, 1, at(40), native(number=5), proven=False),
    ]
    assert sorted(one.tag for one in read(told).records()) == ["att-2", "att-3"]
    assert read([part(1, 2, early)]).incomplete == ["2026-12-01"]


def test_a_run_over_midnight_stands_in_two_days_and_is_one_run() -> None:
    long = native(0, 86_400)
    first = Told(
        NativeDay(site=SITE, cluster="c1", day="2026-12-01", read_at=at(90_000), part=1, parts=1, records=[native(end=None)]), True
    )
    second = Told(
        NativeDay(site=SITE, cluster="c1", day="2026-12-02", read_at=at(180_000), part=1, parts=1, records=[native(0, 86_400)]), True
    )
    (found,) = read([second, first]).records()
    assert (found.ended, found.elapsed_us) == (long.ended, long.elapsed_us)


def test_native_ids_that_are_used_again_are_told_apart_by_when_they_were_submitted() -> None:
    """An id alone names nothing: real schedulers count from the beginning again."""
    again = native(500, 600, number=2, native_id="4701")
    assert len(days(native(), again).records()) == 2


# --- a site's period ---------------------------------------------------------------------------------------------------------------------


def test_counts_come_first_and_ghosts_are_found_although_no_book_of_ours_has_them() -> None:
    attempts = [ran(number=1), ran(number=2), ran(number=3)]
    ghost = native(number=9)
    told = days(native(number=1), native(number=2), ghost, bypass=[BypassUse(account="lab", runs=3, device_us=7, unknown=1)])
    found = reconcile(SITE, PERIOD[0], attempts, told, start=PERIOD[1], end=PERIOD[2], now=NOW)
    assert (found.our_runs, found.native_runs, found.counts_agree) == (3, 3, True)
    assert (found.our_milli_us, found.native_milli_us) == (300_000 * SECOND, 300_000 * SECOND)
    assert [(one.kind, one.attempt) for one in found.differences] == [(Differs.MISSING, "att-3"), (Differs.EXTRA, "att-9")]
    assert [(use.account, use.runs) for use in found.bypass] == [("lab", 3)]
    assert (found.days_read, found.days_due, found.clusters) == (1, 3, ["c1"])


def test_a_run_of_an_attempt_that_is_known_beyond_the_period_is_no_ghost() -> None:
    found = reconcile(SITE, PERIOD[0], [], days(native(number=9)), start=PERIOD[1], end=PERIOD[2], now=NOW, known={AttemptId("att-9")})
    assert (found.differences, found.counts_agree) == ([], True)


def test_a_total_that_cannot_be_known_is_not_told_as_one() -> None:
    found = reconcile(SITE, PERIOD[0], [ran()], days(native(devices=None)), start=PERIOD[1], end=PERIOD[2], now=NOW)
    assert found.native_milli_us is None


@given(
    st.integers(0, 10_000_000),
    st.integers(1_000_000, 3_500_000_000),
    st.integers(0, AROUND_US // 2),
    st.integers(0, AROUND_US // 2),
)
def test_an_honest_scheduler_that_counts_in_whole_seconds_never_differs(
    start_us: int, length_us: int, before_us: int, after_us: int
) -> None:
    """sacct's resolution, prolog and epilog included: whatever the fractions, two true books of one run agree."""
    start, end = start_us / 1e6, (start_us + length_us) / 1e6
    began, over = max(0, start_us - before_us) // SECOND, (start_us + length_us + after_us) // SECOND
    theirs = native(float(began), float(over), elapsed_us=(over - began) * SECOND, submitted=T0 - timedelta(seconds=5))
    assert compare(ran(start, end), [theirs], days(theirs), now=NOW + timedelta(days=1)) == []


def test_a_run_of_cards_without_cards_there_is_a_difference() -> None:
    ours = ran(devices=2)
    gpu = Ours(msgspec.structs.replace(ours.record, kind=DeviceKind.GPU), ours.book)
    assert [one.kind for one in compare(gpu, [native(devices=0)], days(), now=NOW)] == [Differs.QUANTITY]


EVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone(-timedelta(hours=12)))
ONCE = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))
MOMENTS = [None, ONCE, T0, at(50), NOW, EVER]


@given(
    st.lists(
        st.builds(
            NativeRecord,
            cluster=st.sampled_from(["", "c1", "c1|x\n"]),
            native_id=st.sampled_from(["", "1", "1\x1b[2J"]),
            submitted=st.sampled_from(MOMENTS),
            tag=st.sampled_from([AttemptId("att-1"), AttemptId("att-2"), AttemptId("")]),
            state=st.just("RUNNING"),
            started=st.sampled_from(MOMENTS),
            ended=st.sampled_from(MOMENTS),
            elapsed_us=st.sampled_from([None, 0, MOST_US]),
            suspended_us=st.sampled_from([0, MOST_US]),
            resolution_us=st.sampled_from([0, MOST_US]),
            devices=st.sampled_from([None, 0, 1_000_000]),
            account=st.just(""),
            restarts=st.sampled_from([0, 10**30]),
        ),
        max_size=4,
    ),
    st.sampled_from(MOMENTS),
    st.sampled_from(MOMENTS),
    st.sampled_from([ONCE, NOW, EVER]),
    st.sampled_from([("2026-12-01",), ("2026-12-01", "2099-19-39")]),
)
def test_no_moment_or_figure_that_a_site_tells_breaks_the_comparison(
    told: list[NativeRecord], started: datetime | None, ended_at: datetime | None, read_at: datetime, names: tuple[str, ...]
) -> None:
    mine = ran(started_at=started, ended_at=ended_at)
    found = days(*told, names=names, read_at=read_at, bypass=[BypassUse(account="a", runs=10**30, device_us=10**30)])
    encode(reconcile(SITE, PERIOD[0], [mine], found, start=PERIOD[1], end=PERIOD[2], now=NOW))
