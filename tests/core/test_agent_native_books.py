"""What leaves a site of its own accounting, and when it is read (FEATURES 9: a bypass is numbers and the mapped account's name)."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest

from intertie.agent.adapters.port import Accounted
from intertie.agent.core.native_books import MOST_DAYS, due, parts
from intertie.contracts.accounting import RECORDS_PER_PART, NativeDay
from intertie.contracts.base import encode
from intertie.ids import AttemptId, SiteName

DAY = date(2026, 12, 1)
AT = datetime(2026, 12, 2, 0, 30, tzinfo=UTC)
EVERY = timedelta(hours=6)


def run(user: str = "acme", tag: str | None = None, **changes: object) -> Accounted:
    base: dict[str, object] = {
        "native_id": "47",
        "cluster": "c1",
        "state": "COMPLETED",
        "tag": AttemptId(tag) if tag else None,
        "submitted": AT,
        "started": AT,
        "ended": AT + timedelta(seconds=10),
        "elapsed_us": 10_000_000,
        "devices": 2,
        "user": user,
    }
    return Accounted(**(base | changes))  # type: ignore[arg-type]  # a table of changes


def told(*records: Accounted, mapped: frozenset[str] = frozenset({"acme"})) -> list[NativeDay]:
    return parts(SiteName("lab"), "c1", DAY, records, mapped, read_at=AT)


def test_runs_of_ours_travel_whole_and_others_of_a_mapped_account_as_numbers() -> None:
    """BR-148: only what carries our tag is attributed."""
    (day,) = told(run(tag="att-1"), run(), run(devices=None), run(user="carol"), run(user="root"))
    assert [(one.tag, one.account, one.devices) for one in day.records] == [("att-1", "acme", 2)]
    assert [(use.account, use.runs, use.device_us, use.unknown) for use in day.bypass] == [("acme", 2, 20_000_000, 1)]


def test_the_owners_own_users_are_never_named() -> None:
    days = told(run(user="carol"), run(user="carol", tag="att-1"), run(tag="att-2"))
    assert b"carol" not in encode(days)
    assert days[0].records[0].account == "(not a mapped account)"


def test_what_never_began_is_no_use() -> None:
    assert told(run(started=None))[0].bypass == []


@pytest.mark.parametrize(
    ("count", "sizes"), [(0, [0]), (1, [1]), (RECORDS_PER_PART, [RECORDS_PER_PART]), (RECORDS_PER_PART + 1, [RECORDS_PER_PART, 1])]
)
def test_a_day_travels_in_parts_that_say_how_many_they_are(count: int, sizes: list[int]) -> None:
    days = told(*(run(tag=f"att-{n}") for n in range(count)), run())
    assert [len(day.records) for day in days] == sizes
    assert [(day.part, day.parts) for day in days] == [(n + 1, len(sizes)) for n in range(len(sizes))]
    assert [len(day.bypass) for day in days] == [1, *[0] * (len(sizes) - 1)]


def test_garbage_from_a_scheduler_becomes_unknown_never_a_figure() -> None:
    odd = run(tag="att-1", elapsed_us=-5, devices=-1, suspended_us=-3, started=datetime(2026, 12, 1), native_id="7" * 999)  # noqa: DTZ001
    (record,) = told(odd)[0].records
    assert (record.elapsed_us, record.devices, record.suspended_us, record.started) == (None, None, 0, None)
    assert len(record.native_id) == 256


def test_the_running_day_is_read_now_and_then_and_a_day_that_is_over_once() -> None:
    noon = datetime(2026, 12, 2, 12, tzinfo=UTC)
    assert due(None, None, noon, EVERY) == [date(2026, 12, 2)]
    assert due(date(2026, 12, 1), noon - timedelta(hours=1), noon, EVERY) == []
    assert due(date(2026, 12, 1), noon - EVERY, noon, EVERY) == [date(2026, 12, 2)]


def test_a_day_is_over_when_its_accounting_is_written_and_a_long_time_off_is_caught_up_within_bounds() -> None:
    early, late = datetime(2026, 12, 2, 0, 5, tzinfo=UTC), datetime(2026, 12, 2, 0, 11, tzinfo=UTC)
    assert due(date(2026, 11, 30), early, early, EVERY) == []
    assert due(date(2026, 11, 30), late, late, EVERY) == [DAY]
    after_months = due(date(2026, 1, 1), None, late, EVERY)
    assert len(after_months) == MOST_DAYS + 1 and after_months[-1] == date(2026, 12, 2)
