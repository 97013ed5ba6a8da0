"""A statement as CSV: nothing left out, nothing that a spreadsheet would run."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from intertie.contracts.job import Attribution
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import Anchor, AttemptBook, Charge, MeterSpec, Price, Segment, Statement, StatementLine, UsagePhase
from intertie.ids import AttemptId, DeviceId, JobId, PoolName, SegmentId, SiteName, SpecId, StatementId, TenantName
from intertie.rating import rate
from intertie.rating.export import COLUMNS, statement_csv

T0 = datetime(2026, 12, 1, 9, 0, tzinfo=UTC)
SITE, TENANT, JOB = SiteName("site-a"), TenantName("lab"), JobId("job-1")


def charges_of_one_run() -> list[Charge]:
    agreement = MeterSpec(
        spec=SpecId("spec-1"),
        revision=1,
        title="t",
        provider="platform",
        consumer="*",
        currency="CNY",
        prices=[Price(kind=DeviceKind.SLOT, per_hour=Decimal(6))],
        effective_from=T0,
    )
    whose = Attribution(tenant=TENANT, job=JOB, attempt=AttemptId("att-1"), site=SITE, pool=PoolName("main"))
    ran = Segment(
        id=SegmentId("seg-1"),
        site=SITE,
        pool=PoolName("main"),
        attempt=AttemptId("att-1"),
        phase=UsagePhase.RUN,
        kind=DeviceKind.SLOT,
        devices=[DeviceId("slot-0")],
        quantity_milli=1_000,
        start=T0,
        end=T0 + timedelta(milliseconds=6418),
        last=True,
        islanded=True,
        anchor=Anchor(utc=T0, boot_s=0.0, kernel_boot="b"),
        attribution=None,
    )
    return rate([ran], agreement, "succeeded", None, whose).charges


def book(attempt: str, charges: list[Charge], missing: str = "") -> AttemptBook:
    return AttemptBook(
        attempt=AttemptId(attempt),
        job=JOB,
        tenant=TENANT,
        site=SITE,
        segments=len(charges),
        quantity_milli_us=0,
        run_us=0,
        first_start=None,
        last_end=None,
        ended=True,
        complete=not missing,
        missing=missing,
        outcome="succeeded",
        cause=None,
        hold=Decimal(0),
        posted=Decimal(0),
        in_suspense=0,
        charges=charges,
    )


def statement(name: str = "train") -> Statement:
    books = [book("att-1", charges_of_one_run()), book("att-2", [], "0 of 1 segments from site-a")]
    return Statement(
        statement=StatementId("st-lab-2026-12"),
        tenant=TENANT,
        period="2026-12",
        start=T0,
        end=T0,
        time_zone="Asia/Shanghai",
        currency="CNY",
        provisional=True,
        total=Decimal("0.0107"),
        usage_milli_us=6_418_000_000,
        lines=[StatementLine(job=JOB, name=name, amount=Decimal("0.0107"), usage_milli_us=6_418_000_000, attempts=books)],
        at=T0,
    )


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_every_charge_and_every_attempt_without_one_has_a_row() -> None:
    charged, waiting = rows(statement_csv(statement()))
    assert (charged["seconds"], charged["devices"], charged["card_hours"]) == ("6.418", "1", "0.001783")
    assert (charged["per_card_hour"], charged["currency"], charged["amount"], charged["islanded"]) == ("6", "CNY", "0.0107", "yes")
    assert charged["formula"] == "6.418 s × 1 slot × ¥6.00/card-hour = ¥0.0107"
    assert charged["start_utc"] == "2026-12-01T09:00:00+00:00"
    assert (waiting["attempt"], waiting["amount"], waiting["complete"]) == ("att-2", "", "no")
    assert waiting["missing"] == "0 of 1 segments from site-a"


def test_the_chinese_export_has_the_same_columns_in_the_same_order() -> None:
    text = statement_csv(statement(), "zh")
    assert text.startswith("\ufeff账单,租户,账期")
    header, first, _ = csv.reader(io.StringIO(text.removeprefix("\ufeff")))
    assert header == list(COLUMNS.values())
    assert dict(zip(header, first, strict=True))["算式"] == "6.418 s × 1 slot × ¥6.00/卡时 = ¥0.0107"


def test_a_job_s_name_is_never_run_by_a_spreadsheet() -> None:
    charged, _ = rows(statement_csv(statement('=HYPERLINK("http://x","y")')))
    assert charged["job_name"] == '\'=HYPERLINK("http://x","y")'


def test_a_name_with_a_comma_and_a_line_end_stays_one_cell() -> None:
    charged, waiting = rows(statement_csv(statement('a,"b"\nc')))
    assert charged["job_name"] == waiting["job_name"] == 'a,"b"\nc'


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"because": "replaced", "other_attempt": "att-2"}, "replaced by att-2"),
        ({"because": "lost"}, "lost"),
        ({"refined": True, "grant": "g/1", "grant_expired": True}, "refined; granted by g/1 (expired)"),
    ],
)
def test_a_row_says_why_another_pays_and_by_which_allowance_it_ran(changes: dict[str, Any], said: str) -> None:
    line = msgspec.structs.replace(statement().lines[0], attempts=[msgspec.structs.replace(book("att-1", []), **changes)])
    (row,) = rows(statement_csv(msgspec.structs.replace(statement(), lines=[line])))
    assert row["because"] == said
