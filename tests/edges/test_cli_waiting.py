"""What a statement, the ledger's check, suspense and quarantine read like, in both languages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from tests.core.metering_world import SITE, T0, TENANT

from intertie.cli import waiting
from intertie.cli.money import tell_statement, told_beside
from intertie.contracts.base import encode
from intertie.contracts.job import Cause
from intertie.contracts.quarantine import QuarantinedEntry, QuarantineReply, Reinterpret, Reinterpreted
from intertie.contracts.usage import (
    AttemptBook,
    BeyondGrant,
    LedgerCheck,
    LostEntries,
    ReleaseSegment,
    SitePeriod,
    Statement,
    StatementLine,
    SuspendedSegment,
    SuspenseReply,
)
from intertie.ids import AttemptId, JobId, JournalId, SegmentId, StatementId
from intertie.metering.core.attribution import TEXTS
from intertie.text import known

ZERO = Decimal(0)
NOW = datetime(2027, 1, 2, tzinfo=UTC)


def book(number: int, **changes: Any) -> AttemptBook:
    standard = AttemptBook(
        attempt=AttemptId(f"att-{number}"),
        job=JobId("job-1"),
        tenant=TENANT,
        site=SITE,
        segments=1,
        quantity_milli_us=6,
        run_us=6,
        first_start=T0,
        last_end=T0,
        ended=True,
        complete=True,
        outcome="cancelled",
        cause=Cause.PLATFORM,
        hold=ZERO,
        posted=ZERO,
        in_suspense=0,
        charges=[],
    )
    return msgspec.structs.replace(standard, **changes)


LOST = LostEntries(site=SITE, journal="jnl-1", first=4, last=10, said_at=NOW, proven=True)
STATEMENT = Statement(
    statement=StatementId("st-lab-2026-12"),
    tenant=TENANT,
    period="2026-12",
    start=T0,
    end=NOW,
    time_zone="Asia/Shanghai",
    currency="CNY",
    provisional=False,
    total=ZERO,
    usage_milli_us=0,
    lines=[
        StatementLine(
            job=JobId("job-1"),
            name="train",
            amount=ZERO,
            usage_milli_us=0,
            attempts=[
                book(1, because="replaced", other_attempt=AttemptId("att-2")),
                book(2, because="lost", complete=False, missing="closed"),
            ],
        )
    ],
    sites=[
        SitePeriod(site=SITE, period="2026-12", state=state, missing_segments=3, last_heard=None)
        for state in ("complete", "missing", "differs", "not_said")
    ],
    lost=[LOST],
    beyond=[BeyondGrant(grant="g/1", site=SITE, why=why, beyond_milli_us=3_600_000_000_000) for why in ("devices", "quantity", "expired")],
    at=NOW,
)


@pytest.mark.parametrize(
    ("lang", "sentences"),
    [
        (
            "en",
            [
                "the hub could not hear the site; attempt 2 replaced it",
                "closed as lost, outcome unknown: charged to nobody until the site says how it ended",
                "site-a: all usage of this period is here",
                "site-a: 3 segments of this period have not come; last heard -",
                "site-a has not said that this period is over; last heard -",
                "site-a: 7 entries of usage exist nowhere any more (journal jnl-1, 4 to 10): nobody can say what they were",
                "beyond the islanded allowance g/1: 1.0000 device-hours more at once than it allows",
                "beyond the islanded allowance g/1: 1.0000 device-hours after it had ended",
            ],
        ),
        ("zh", ["平台联系不上该站点,已由第 2 次运行接替", "site-a:本期用量已齐", "site-a 尚未报告本期已结;最近联系 -"]),
    ],
)
def test_a_statement_says_what_is_missing_who_is_silent_and_why_another_pays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lang: str, sentences: list[str]
) -> None:
    monkeypatch.setenv("INTERTIE_LANG", lang)
    tell_statement(STATEMENT)
    said = capsys.readouterr().out
    assert [sentence for sentence in sentences if sentence not in said] == []


def test_an_attempt_whose_forerunner_was_the_result_after_all_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERTIE_LANG", "en")
    attempts = [book(1), book(2, because="replaced", other_attempt=AttemptId("att-1"), refined=True, grant="g/1", grant_expired=True)]
    assert told_beside(2, attempts[1], attempts) == [
        "attempt 1 had finished after all and is the job's result",
        "it had been closed as lost; what came later adjusts it",
        "taken in by the site itself under its islanded allowance g/1",
        "part of it was used after that allowance had ended",
    ]
    assert told_beside(1, attempts[0], attempts) == []


def test_every_reason_to_wait_has_its_words_in_both_languages() -> None:
    assert [reason for reason in TEXTS if not known(f"suspense.{reason}")] == []


class Hub(ThreadingHTTPServer):
    """A hub on a socket that answers what it is told to, in order, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.answers, self.asked = list[object](), list[tuple[str, bytes]]()


class Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        hub = self.server
        assert isinstance(hub, Hub)
        hub.asked.append((self.path, self.rfile.read(int(self.headers.get("Content-Length") or 0))))
        body = encode(hub.answers.pop(0))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as made:
        monkeypatch.setenv("INTERTIE_LANG", "en")
        monkeypatch.setenv("INTERTIE_URL", f"http://127.0.0.1:{made.server_port}")
        monkeypatch.setenv("INTERTIE_TOKEN", "t")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        serving = threading.Thread(target=made.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield made
        finally:
            made.shutdown()
            serving.join()
    assert made.answers == []


def test_quarantine_is_listed_and_read_again_by_its_service(hub: Hub) -> None:
    entry = QuarantinedEntry(site=SITE, journal=JournalId("jnl-1"), seq=4, kind="of_tomorrow", error="contract.invalid: no", size=9, at=NOW)
    hub.answers = [QuarantineReply(entries=[entry], total=3), Reinterpreted(reopened=1)]
    listed = CliRunner().invoke(waiting.quarantine, ["list", "--service", "metering"])
    assert "jnl-1/4" in listed.output and "contract.invalid: no" in listed.output and "and 2 more" in listed.output
    again = CliRunner().invoke(waiting.quarantine, ["retry", SITE, "--service", "metering", "--entry", "jnl-1/4", "--reason", "upgraded"])
    assert again.output == "1 entries are read again; what still fails comes back\n"
    assert hub.asked == [
        ("/v1/quarantine/metering", b""),
        ("/v1/quarantine/metering/retry", encode(Reinterpret(site=SITE, journal=JournalId("jnl-1"), seq=4, reason="upgraded"))),
    ]


def test_without_a_service_all_three_are_asked_and_each_row_says_whose_it_is(hub: Hub) -> None:
    entry = QuarantinedEntry(site=SITE, journal=JournalId("jnl-1"), seq=4, kind="of_tomorrow", error="no", size=9, at=NOW)
    full, none = QuarantineReply(entries=[entry], total=1), QuarantineReply(entries=[], total=0)
    hub.answers = [none, full, none, none, full, none]
    listed = CliRunner().invoke(waiting.quarantine, ["list"])
    assert listed.output.startswith(f"scheduler\t{SITE}\tjnl-1/4"), listed.output
    told = msgspec.json.decode(CliRunner().invoke(waiting.quarantine, ["list", "--json"]).output, type=dict[str, QuarantineReply])
    assert [(name, len(reply.entries)) for name, reply in told.items()] == [("registry", 0), ("scheduler", 1), ("metering", 0)]


@pytest.mark.parametrize("entry", ["jnl-1", "/4", "jnl-1/x", "jnl-1/"])
def test_an_entry_is_named_by_journal_and_number(hub: Hub, entry: str) -> None:
    told = CliRunner().invoke(waiting.quarantine, ["retry", SITE, "--service", "registry", "--entry", entry, "--reason", "upgraded"])
    assert told.exit_code == 2 and "write JOURNAL/SEQ" in told.output


def test_suspense_is_listed_with_what_it_waits_for_and_released_with_a_reason(hub: Hub) -> None:
    waits = SuspendedSegment(
        segment=SegmentId("seg-1"),
        digest="d",
        site=SITE,
        attempt=AttemptId("att-1"),
        tenant=TENANT,
        start=T0,
        end=T0,
        quantity_milli=1,
        reason="over_wall",
        text="too long",
        since=NOW,
        needs_person=True,
    )
    hub.answers = [SuspenseReply(segments=[waits]), book(1)]
    assert "! the attempt ran longer than its wall limit allows" in CliRunner().invoke(waiting.suspense, ["list"]).output
    assert CliRunner().invoke(waiting.suspense, ["release", "seg-1"]).exit_code == 2
    told = CliRunner().invoke(waiting.suspense, ["release", "seg-1", "--reason", "seen"])
    assert told.output == "released; att-1: 1 segments count\n"
    assert hub.asked[1] == ("/v1/suspense/release", encode(ReleaseSegment(segment=SegmentId("seg-1"), reason="seen")))


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({}, 0, "the ledger agrees with the segments: 8 postings sum to 0"),
        ({"sum": Decimal(1)}, 1, "does not agree"),
        ({"open_without_hold": 1}, 1, "open attempts without a hold: 1"),
        ({"lost": [LOST]}, 0, "7 entries of usage exist nowhere any more"),
        ({"periods": STATEMENT.sites[1:2]}, 0, "2026-12  site-a: 3 segments of this period have not come"),
    ],
)
def test_the_ledger_s_check_names_what_is_wrong_and_what_nobody_has(hub: Hub, changes: dict[str, Any], code: int, says: str) -> None:
    good = LedgerCheck(postings=8, sum=ZERO, closed_with_hold=0, open_without_hold=0, quarantined=0, suspense_segments=0)
    hub.answers = [msgspec.structs.replace(good, **changes)]
    told = CliRunner().invoke(waiting.ledger, ["check"])
    assert (told.exit_code, says in told.output) == (code, True), told.output
