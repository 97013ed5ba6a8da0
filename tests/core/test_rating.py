"""Pricing: every sum is exact, whatever was split, repeated, reordered or said twice."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intertie.contracts.job import Attribution, Cause
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import Anchor, MeterSpec, Price, Segment, UsagePhase, WhoPays
from intertie.errors import Refused
from intertie.ids import AttemptId, DeviceId, JobId, PoolName, SegmentId, SiteName, SpecId, TenantName
from intertie.rating import formula_text, hold_estimate, measured, money_text, paid_by, price_of, rate, rate_period, split, union

T0 = datetime(2026, 12, 1, 9, 0, tzinfo=UTC)
US = timedelta(microseconds=1)
WHOSE = Attribution(
    tenant=TenantName("lab"), job=JobId("job-1"), attempt=AttemptId("att-1"), site=SiteName("site-a"), pool=PoolName("main")
)


def spec(**changes: object) -> MeterSpec:
    fields: dict[str, object] = {
        "spec": SpecId("spec-1"),
        "revision": 1,
        "title": "standard",
        "provider": "platform",
        "consumer": "*",
        "currency": "CNY",
        "prices": [Price(kind=DeviceKind.SLOT, per_hour=Decimal("6.00")), Price(kind=DeviceKind.GPU, per_hour=Decimal("12.00"))],
        "effective_from": T0,
        **changes,
    }
    return MeterSpec(**fields)  # type: ignore[arg-type]  # the table above is checked by every test that rates with it


def segment(
    start: float,
    end: float,
    *,
    name: str = "",
    quantity: int = 1_000,
    devices: tuple[str, ...] = ("slot-0",),
    phase: UsagePhase = UsagePhase.RUN,
    kind: DeviceKind = DeviceKind.SLOT,
    model: str = "",
    islanded: bool = False,
    origin: datetime = T0,
) -> Segment:
    """Seconds since `origin`."""
    return Segment(
        id=SegmentId(name or f"seg-{phase}-{start}-{end}"),
        site=WHOSE.site,
        pool=WHOSE.pool,
        attempt=WHOSE.attempt,
        phase=phase,
        kind=kind,
        model=model,
        devices=[DeviceId(d) for d in devices],
        quantity_milli=quantity,
        start=origin + timedelta(seconds=start),
        end=origin + timedelta(seconds=end),
        last=False,
        islanded=islanded,
        anchor=Anchor(utc=origin, boot_s=0.0, kernel_boot="b"),
        attribution=None,
    )


def total(segments: list[Segment], agreement: MeterSpec | None = None) -> Decimal:
    return rate(segments, agreement or spec(), "succeeded", None, WHOSE).amount


# --- what a person reads -----------------------------------------------------------------------------------------------------------------


def test_the_formula_reads_as_the_sum_that_it_is() -> None:
    rated = rate([segment(0, 6.418)], spec(), "succeeded", None, WHOSE)
    (charge,) = rated.charges
    assert charge.formula.text == "6.418 s × 1 slot × ¥6.00/card-hour = ¥0.0107"
    assert formula_text(charge.formula, "zh") == "6.418 s × 1 slot × ¥6.00/卡时 = ¥0.0107"
    assert charge.formula.clause == "spec-1 rev 1: run is charged; succeeded → tenant"
    assert charge.amount == rated.amount == Decimal("0.0107")
    assert charge.formula.unrounded == Decimal("0.010696666667")


def test_an_amount_that_rounds_to_nothing_shows_what_it_was() -> None:
    (charge,) = rate([segment(0, 0.012)], spec(rounding=Decimal("0.01")), "succeeded", None, WHOSE).charges
    assert charge.amount == 0
    assert charge.formula.text == "0.012 s × 1 slot × ¥6.00/card-hour = ¥0.00002 → ¥0.00"


def test_eight_cards_for_two_hours_are_read_in_hours_too() -> None:
    cards = tuple(f"GPU-{n}" for n in range(8))
    (charge,) = rate([segment(0, 7200, quantity=8_000, devices=cards, kind=DeviceKind.GPU)], spec(), "succeeded", None, WHOSE).charges
    assert charge.formula.text == "7200.000 s (2 h) × 8 cards × ¥12.00/card-hour = ¥192.00"
    assert formula_text(charge.formula, "zh") == "7200.000 s (2 h) × 8 卡 × ¥12.00/卡时 = ¥192.00"


def test_queue_time_is_shown_and_not_charged() -> None:
    rated = rate([segment(-60, 0, phase=UsagePhase.SITE_QUEUE, quantity=0, devices=()), segment(0, 6)], spec(), "succeeded", None, WHOSE)
    queue, run = rated.charges
    assert (queue.amount, run.amount) == (Decimal(0), Decimal("0.0100"))
    assert queue.formula.text == "60.000 s × 0 slot × not charged = ¥0.00"
    assert "site_queue is not charged" in queue.formula.clause


@pytest.mark.parametrize(
    ("amount", "currency", "text"),
    [
        ("0", "CNY", "¥0.00"),
        ("0.0107", "CNY", "¥0.0107"),
        ("12.5000", "USD", "$12.50"),
        ("-3.1", "EUR", "-€3.10"),
        ("1E+3", "JPY", "JPY 1000.00"),
    ],
)
def test_money_has_two_decimals_at_least_and_never_loses_one(amount: str, currency: str, text: str) -> None:
    assert money_text(Decimal(amount), currency) == text


# --- who pays ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "cause", "end", "payer"),
    [
        ("succeeded", None, "succeeded", WhoPays.TENANT),
        ("failed", Cause.JOB, "job", WhoPays.TENANT),
        ("failed", Cause.SITE, "site", WhoPays.SITE),
        ("failed", Cause.PLATFORM, "platform", WhoPays.PLATFORM),
        ("failed", Cause.PREEMPTED, "preempted", WhoPays.PLATFORM),
        ("failed", Cause.UNKNOWN, "unknown", WhoPays.NOBODY),
        ("failed", None, "unknown", WhoPays.NOBODY),
        ("cancelled", Cause.CANCELLED, "cancelled", WhoPays.TENANT),
        ("cancelled", None, "cancelled", WhoPays.TENANT),
        ("unknown", None, "unknown", WhoPays.NOBODY),
        (None, None, "open", WhoPays.TENANT),
    ],
)
def test_who_pays_follows_from_how_it_ended(outcome: str | None, cause: Cause | None, end: str, payer: WhoPays) -> None:
    assert paid_by(spec(), outcome, cause) == (end, payer)


def test_an_agreement_may_say_otherwise() -> None:
    assert paid_by(spec(pays={"preempted": WhoPays.SITE}), "failed", Cause.PREEMPTED) == ("preempted", WhoPays.SITE)


def test_br_076_three_attempts_each_once_with_its_payer() -> None:
    """4 GPUs: preempted 50 min, node failed 70 min, completed 30 min; the provider pays the first two."""
    agreement = spec(pays={"preempted": WhoPays.SITE, "site": WhoPays.SITE})
    runs = [(0, 50, "failed", Cause.PREEMPTED), (55, 125, "failed", Cause.SITE), (130, 160, "succeeded", None)]
    hours: dict[WhoPays, Fraction] = {}
    for start, end, outcome, cause in runs:
        cards = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")
        held = [segment(start * 60, end * 60, quantity=4_000, devices=cards, kind=DeviceKind.GPU)]
        rated = rate(held, agreement, outcome, cause, WHOSE)
        hours[rated.payer] = hours.get(rated.payer, Fraction(0)) + Fraction(rated.used.milli_us(), 3_600_000_000_000)
    assert hours == {WhoPays.TENANT: 2, WhoPays.SITE: 8}


# --- prices ------------------------------------------------------------------------------------------------------------------------------


def test_a_model_s_own_price_beats_its_kind_s() -> None:
    agreement = spec(
        prices=[Price(kind=DeviceKind.GPU, per_hour=Decimal(10)), Price(kind=DeviceKind.GPU, model="H100", per_hour=Decimal(30))]
    )
    assert price_of(agreement, DeviceKind.GPU, "H100") == 30
    assert price_of(agreement, DeviceKind.GPU, "T4") == 10


def test_what_has_no_price_is_refused_not_guessed() -> None:
    agreement = spec(prices=[Price(kind=DeviceKind.GPU, model="H100", per_hour=Decimal(30))])
    with pytest.raises(Refused) as refused:
        rate([segment(0, 1)], agreement, "succeeded", None, WHOSE)
    assert refused.value.code == "rating.no_price"


def test_an_unpriced_queue_stops_nothing() -> None:
    agreement = spec(prices=[Price(kind=DeviceKind.GPU, per_hour=Decimal(30))])
    assert total([segment(0, 9, phase=UsagePhase.SITE_QUEUE)], agreement) == 0


def test_a_hold_is_price_times_wall_limit_times_devices() -> None:
    assert hold_estimate(spec(), DeviceKind.SLOT, 2, 3_600) == Decimal("12.0000")
    models = spec(prices=[Price(kind=DeviceKind.GPU, model=m, per_hour=Decimal(p)) for m, p in (("T4", 3), ("H100", 30))])
    assert hold_estimate(models, DeviceKind.GPU, 1, 3_600) == 30
    assert hold_estimate(models, DeviceKind.SLOT, 1, 3_600) == 0


# --- clocks and fractions ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (datetime(2026, 12, 1, 13, 5, 30, tzinfo=UTC), datetime(2026, 12, 1, 12, 59, 10, tzinfo=UTC)),
        (datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)),
        (datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC), datetime(1970, 1, 1, 0, 10, tzinfo=UTC)),
        (datetime(2025, 1, 1, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)),
    ],
    ids=["ends before it starts", "start -1", "a clock that was never set", "two years long"],
)
def test_br_080_an_absurd_duration_is_quantity_zero_and_flagged(start: datetime, end: datetime) -> None:
    odd = segment((start - T0) / timedelta(seconds=1), (end - T0) / timedelta(seconds=1), name="odd")
    rated = rate([odd, segment(0, 6)], spec(), "succeeded", None, WHOSE)
    assert rated.amount == Decimal("0.0100")
    assert [(d.kind, d.segments) for d in rated.differences] == [("clock_anomaly", ("odd",))]
    assert start.isoformat() in rated.differences[0].text and end.isoformat() in rated.differences[0].text


def test_br_078_held_and_run_are_both_kept_and_the_agreement_says_which_costs() -> None:
    """Two cards, 08:00 to 12:00, suspended for an hour and a half."""
    cards = ("GPU-0", "GPU-1")
    held = [
        segment(0, 3600, quantity=2_000, devices=cards, kind=DeviceKind.GPU),
        segment(3600, 9000, quantity=2_000, devices=cards, kind=DeviceKind.GPU, phase=UsagePhase.SUSPENDED),
        segment(9000, 14400, quantity=2_000, devices=cards, kind=DeviceKind.GPU),
    ]
    used = union(held)
    assert Fraction(used.milli_us(), 3_600_000_000_000) == 5
    assert Fraction(used.milli_us([UsagePhase.RUN, UsagePhase.SUSPENDED]), 3_600_000_000_000) == 8
    assert total(held) == 60
    assert total(held, spec(charged_phases=[UsagePhase.RUN, UsagePhase.SUSPENDED])) == 96


def test_br_078_a_pause_that_was_open_when_the_host_died_ends_with_the_last_sign_of_life() -> None:
    """Start 08:00:00, paused from 08:40:00, last sign of life 08:40:05, noticed 11:40:00: what is told is what was seen."""
    held = [segment(0, 2400), segment(2400, 2405, phase=UsagePhase.SUSPENDED)]
    used = union(held)
    assert used.milli_us() == 2_400_000_000_000
    assert used.milli_us([UsagePhase.RUN, UsagePhase.SUSPENDED]) == 2_405_000_000_000
    assert total(held) == 4


def test_br_079_an_hour_is_an_hour_whatever_the_wall_said() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    for day, hours in ((datetime(2026, 10, 25, 1, 30, tzinfo=berlin), 3), (datetime(2026, 3, 29, 1, 30, tzinfo=berlin), 1)):
        end = day.replace(hour=3)
        piece = segment(0, (end.astimezone(UTC) - day.astimezone(UTC)) / timedelta(seconds=1), origin=day.astimezone(UTC))
        assert measured([piece]) == hours * 3_600_000_000 * 1_000


def test_br_087_a_slice_is_a_fraction_of_a_card() -> None:
    """A quarter of a card by share; four such for an hour are one card-hour."""
    quarters = [segment(0, 3600, name=f"q{n}", quantity=250, devices=(f"GPU-0/{n}",), kind=DeviceKind.GPU, model="H100") for n in range(4)]
    assert total(quarters[:1]) == 3
    assert total(quarters) == 12


def test_overlapping_segments_that_disagree_are_a_difference_not_a_sum() -> None:
    one = segment(0, 3600, name="a", quantity=1_000)
    two = segment(1800, 5400, name="b", quantity=2_000)
    rated = rate([one, two], spec(), "succeeded", None, WHOSE)
    assert [(d.kind, d.segments) for d in rated.differences] == [("doubled", ("a", "b"))]
    assert rated.amount == Decimal("6.00") + Decimal("6.00")  # 0–3600 at one slot, 3600–5400 at the two that only b claims


def test_a_device_named_by_two_segments_at_once_counts_once() -> None:
    both = segment(0, 3600, name="ab", quantity=2_000, devices=("slot-0", "slot-1"))
    part = segment(0, 1800, name="a", quantity=1_000, devices=("slot-0",))
    rated = rate([both, part], spec(), "succeeded", None, WHOSE)
    assert rated.amount == 12 and not rated.differences


def test_an_islanded_part_is_marked_on_its_charge() -> None:
    charges = rate([segment(0, 1), segment(1, 2, islanded=True)], spec(), "succeeded", None, WHOSE).charges
    assert [c.islanded for c in charges] == [True]


# --- rounding ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "whole", "shares"),
    [
        (["3.335", "3.335", "3.330"], "10.00", ["3.34", "3.33", "3.33"]),
        (["0", "0.004", "0.004"], "0.01", ["0", "0.01", "0"]),
        (["-0.005", "0.005"], "0", ["0", "0"]),
        ([], "0", []),
    ],
)
def test_br_091_rounded_lines_add_up_to_the_total(parts: list[str], whole: str, shares: list[str]) -> None:
    assert split([Decimal(p) for p in parts], Decimal(whole), Decimal("0.01")) == [Decimal(s) for s in shares]


def test_the_minimum_is_charged_once_and_given_back_when_the_attempt_runs_on() -> None:
    agreement = spec(minimum_us=60_000_000)
    assert total([segment(0, 6)], agreement) == Decimal("0.1000")
    assert total([segment(0, 30), segment(30, 60)], agreement) == Decimal("0.1000")
    border = T0 + timedelta(seconds=6)
    ran = [segment(0, 90)]
    first = rate_period(ran, agreement, "succeeded", None, WHOSE, None, border)
    second = rate_period(ran, agreement, "succeeded", None, WHOSE, border, None)
    assert (first.amount, second.amount) == (Decimal("0.1000"), Decimal("0.0500"))
    assert "the minimum of 60 s applies" in first.charges[-1].formula.clause
    assert second.charges[-1].amount == Decimal("-0.0900")
    assert "already charged" in second.charges[-1].formula.clause


def test_an_attempt_that_never_ran_owes_no_minimum() -> None:
    assert total([segment(0, 9, phase=UsagePhase.STAGE_IN)], spec(minimum_us=60_000_000)) == 0


def test_a_rounding_step_need_not_be_a_power_of_ten() -> None:
    assert total([segment(0, 100)], spec(rounding=Decimal("0.05"))) == Decimal("0.15")


# --- properties ----------------------------------------------------------------------------------------------------------------------------

moments = st.integers(min_value=0, max_value=10**11)
AGREEMENTS = st.builds(
    lambda step, price, minimum: spec(
        rounding=Decimal(step), prices=[Price(kind=DeviceKind.SLOT, per_hour=Decimal(price) / 1000)], minimum_us=minimum
    ),
    st.sampled_from(["0.01", "0.0001", "0.05"]),
    st.integers(min_value=0, max_value=10**7),
    st.sampled_from([0, 1, 60_000_000]),
)


def cut(start: int, end: int, borders: list[int]) -> list[Segment]:
    """[start, end) in microseconds, cut at the borders that lie inside."""
    bounds = [start, *sorted({b for b in borders if start < b < end}), end]
    like = segment(0, 0, quantity=2_000, devices=("slot-0", "slot-1"))
    return [
        msgspec.structs.replace(like, id=SegmentId(f"seg-{a}-{b}"), start=T0 + a * US, end=T0 + b * US)
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]


@given(start=moments, length=moments, borders=st.lists(moments, max_size=5), agreement=AGREEMENTS, seed=st.integers())
def test_splitting_reordering_and_repeating_never_change_the_sum(
    start: int, length: int, borders: list[int], agreement: MeterSpec, seed: int
) -> None:
    whole = cut(start, start + length, [])
    pieces = cut(start, start + length, borders)
    told = pieces + pieces[: len(pieces) // 2] + whole
    random.Random(seed).shuffle(told)
    expected = rate(whole, agreement, "succeeded", None, WHOSE)
    rated = rate(told, agreement, "succeeded", None, WHOSE)
    assert rated.amount == expected.amount
    assert rated.charges == expected.charges
    assert not rated.differences


@given(
    spans=st.lists(st.tuples(moments, moments, st.sampled_from(["slot-0", "slot-1"])), min_size=1, max_size=4),
    borders=st.lists(moments, max_size=5),
    agreement=AGREEMENTS,
)
def test_periods_that_meet_add_up_to_the_whole(spans: list[tuple[int, int, str]], borders: list[int], agreement: MeterSpec) -> None:
    told = [segment(a / 1e6, (a + b) / 1e6, name=f"seg-{n}", devices=(device,)) for n, (a, b, device) in enumerate(spans)]
    whole = rate(told, agreement, "succeeded", None, WHOSE)
    bounds: list[datetime | None] = [None, *(T0 + b * US for b in sorted(set(borders))), None]
    parts = [rate_period(told, agreement, "succeeded", None, WHOSE, a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
    assert sum((p.amount for p in parts), Decimal(0)) == whole.amount
    assert sum(p.used.milli_us() for p in parts) == whole.used.milli_us()
    for rated in [whole, *parts]:
        assert sum((c.amount for c in rated.charges), Decimal(0)) == rated.amount
        assert all(c.amount % agreement.rounding == 0 for c in rated.charges)


@given(
    parts=st.lists(st.fractions(min_value=-100, max_value=100, max_denominator=997), min_size=1, max_size=8),
    step=st.sampled_from([Decimal("0.01"), Decimal("0.05"), Decimal(1)]),
)
def test_shares_add_up_and_stay_within_a_step_of_what_is_due(parts: list[Fraction], step: Decimal) -> None:
    due = round(sum(parts) / Fraction(step)) * step
    shares = split(parts, due, step)
    assert sum(shares, Decimal(0)) == due
    assert all(abs(Fraction(share) - part) < 2 * Fraction(step) for share, part in zip(shares, parts, strict=True))
