"""What a person at a terminal reads of a site's own scheduler: its words, beside ours and with their age."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from intertie.cli.jobs import attempt_text, native_lines
from intertie.contracts.job import AttemptRecord
from intertie.contracts.site import DeviceKind
from intertie.ids import AttemptId, DeviceId, JobId, PoolName, SiteName, TenantName
from intertie.text import Lang, say

NOW = datetime(2026, 12, 1, 8, 0, tzinfo=UTC)
ATTEMPT = AttemptRecord(
    attempt=AttemptId("att-1"),
    job=JobId("job-1"),
    tenant=TenantName("acme"),
    number=1,
    epoch=0,
    generation=1,
    site=SiteName("lab"),
    pool=PoolName("gpu"),
    devices=[DeviceId("lent-gpu-1")],
    kind=DeviceKind.GPU,
    account="guest",
    state="staging",
    why_here="-",
    spec=None,
    spec_revision=0,
    offered_at=NOW,
    native_id="4711",
    native_state="PENDING",
    native_reason="Resources",
    native_at=NOW,
    version=1,
)


@pytest.mark.parametrize(
    ("lang", "begins"),
    [("en", "the site's scheduler: 4711 PENDING (Resources), as of "), ("zh", "站点调度器: 本地作业 4711 PENDING (Resources)")],
)
def test_its_words_stand_beside_ours_with_their_age(lang: Lang, begins: str) -> None:
    (told,) = native_lines(ATTEMPT, lang)
    assert told.startswith(begins)


def test_where_it_runs_and_what_was_suspended_stand_with_it() -> None:
    (told,) = native_lines(
        msgspec.structs.replace(ATTEMPT, native_state="RUNNING", native_reason="None", nodes=["n1", "n2"], suspended_us=3_000_000), "en"
    )
    assert "4711 RUNNING, as of" in told and told.endswith("; on n1, n2; suspended for 3 s of it")


def test_a_site_without_a_queue_of_its_own_says_nothing_here() -> None:
    assert native_lines(msgspec.structs.replace(ATTEMPT, native_state="", native_at=None), "en") == []


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_waiting_there_has_a_name_in_both_languages(lang: Lang) -> None:
    assert say("wait.site_queue", lang) != say("wait.site_silent", lang) and say("state.site_queued", lang)


@pytest.mark.parametrize(
    ("state", "offering", "told"),
    [
        ("refused", "night", "declined by the site's owner: declined: the cards are for exams"),
        ("refused", "", "refused by the site: declined: the cards are for exams"),
        ("not_started", "", "did not start: declined: the cards are for exams"),
        ("running", "", "running"),
    ],
)
def test_of_what_never_ran_its_reason_is_told(monkeypatch: pytest.MonkeyPatch, state: str, offering: str, told: str) -> None:
    monkeypatch.setenv("INTERTIE_LANG", "en")
    record = msgspec.structs.replace(ATTEMPT, state=state, offering=offering, reason="declined: the cards are for exams")
    assert attempt_text(record) == told
