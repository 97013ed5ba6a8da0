"""A drill's verdict follows from what both sides saw, and its evidence cannot be changed afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from intertie.cli.drill import drill
from intertie.contracts.drill import (
    DrillAttempt,
    DrillBook,
    DrillConsent,
    DrillDocument,
    DrillEvidence,
    DrillKind,
    DrillLane,
    DrillLocal,
    HubDrill,
    SiteDrill,
)
from intertie.errors import Refused
from intertie.ids import AttemptId, JobId, PoolName, SiteName
from intertie.trust.evidence import HUB, PERSON, SITE, canonical, checks_of, faults_of, sign_part, verdict_of, verify_file
from intertie.trust.keys import Key

AT = datetime(2026, 3, 1, 8, tzinfo=UTC)
KEYS = {role: Key.new("U") for role in (SITE, HUB, PERSON)}
RAN = DrillAttempt(
    attempt=AttemptId("att-1"),
    job=JobId("job-1"),
    pool=PoolName("slots"),
    before="running",
    after="running",
    began_in_cut=False,
    go_before=True,
    same_process=True,
)
ENDED = msgspec.structs.replace(RAN, attempt=AttemptId("att-2"), job=JobId("job-2"), after="ended", ran_us=5_000_000, outcome="succeeded")


def seconds(value: float) -> datetime:
    return AT + timedelta(seconds=value)


def account(**changed: Any) -> SiteDrill:
    made = SiteDrill(
        drill="drl-1",
        site=SiteName("site-a"),
        seconds=60,
        cut_at=AT,
        back_at=seconds(60),
        ended_by="time",
        restarts=0,
        islanded_at=seconds(0.2),
        heard_at=seconds(61),
        attempts=[RAN, ENDED],
        local=DrillLocal(running_before=1, submitted=2, started=2, ended=1),
        lanes=[DrillLane(lane="scheduler", waiting=4, to_head_ms=300)],
        agent_version="0.1.0",
    )
    return msgspec.structs.replace(made, **changed)


def book(**changed: Any) -> DrillBook:
    made = DrillBook(
        attempt=AttemptId("att-2"), site_us=5_000_000, scheduler_us=5_000_000, metering_us=5_000_000, outcome="succeeded", cause=""
    )
    return msgspec.structs.replace(made, **changed)


STILL = DrillBook(attempt=AttemptId("att-1"), site_us=None, scheduler_us=None, metering_us=None, outcome="", cause="")


def hub(**changed: Any) -> HubDrill:
    made = HubDrill(silent_at=seconds(15), heard_at=seconds(61), silent_limit_ms=15_000, books=[STILL, book()])
    return msgspec.structs.replace(made, **changed)


CONSENT = DrillConsent(allowed=True, given="site", by="root", at=AT, until=seconds(3_600), longest_s=900)


def failed(at_site: SiteDrill, at_hub: HubDrill, consent: DrillConsent = CONSENT, length: int = 60) -> list[str]:
    return [check.name for check in checks_of(length, AT, consent, at_site, at_hub) if not check.ok]


def test_a_drill_in_which_everything_ran_on_is_passed() -> None:
    assert failed(account(), hub()) == []


@pytest.mark.parametrize(
    ("at_site", "at_hub", "name"),
    [
        (account(ended_by="owner", back_at=seconds(20)), hub(), "cut"),
        (account(back_at=seconds(200)), hub(), "cut"),
        (account(islanded_at=None), hub(), "noticed_at_site"),
        (account(heard_at=None), hub(), "noticed_at_site"),
        (account(), hub(silent_at=None), "noticed_at_hub"),
        (account(), hub(heard_at=None), "noticed_at_hub"),
        (account(attempts=[]), hub(books=[]), "work_ran_on"),
        (account(attempts=[msgspec.structs.replace(RAN, same_process=False)]), hub(books=[STILL]), "work_ran_on"),
        (account(attempts=[msgspec.structs.replace(ENDED, cause="platform")]), hub(books=[book()]), "work_ran_on"),
        (account(attempts=[msgspec.structs.replace(ENDED, outcome="unknown")]), hub(books=[book()]), "work_ran_on"),
        (account(attempts=[RAN, msgspec.structs.replace(ENDED, before="", go_before=False, began_in_cut=True)]), hub(), "began_with_a_go"),
        (account(lanes=[DrillLane(lane="scheduler", waiting=4, to_head_ms=None)]), hub(), "replayed"),
        (account(lanes=[]), hub(), "replayed"),
        (account(), hub(books=[STILL, book(metering_us=4_000_000)]), "books_agree"),
        (account(), hub(books=[STILL, book(scheduler_us=None)]), "books_agree"),
        (account(), hub(books=[msgspec.structs.replace(STILL, cause="platform"), book()]), "books_agree"),
    ],
)
def test_one_thing_that_went_wrong_fails_its_check_and_no_other(at_site: SiteDrill, at_hub: HubDrill, name: str) -> None:
    assert failed(at_site, at_hub) == [name]


@pytest.mark.parametrize("changed", [{"allowed": False}, {"longest_s": 30}, {"until": seconds(30)}])
def test_a_cut_beyond_the_owners_consent_fails(changed: dict[str, Any]) -> None:
    assert failed(account(), hub(), msgspec.structs.replace(CONSENT, **changed)) == ["consent"]


def test_a_cut_too_short_to_be_noticed_by_the_hub_may_go_unnoticed() -> None:
    short = account(seconds=10, back_at=seconds(10))
    assert failed(short, hub(silent_at=None, heard_at=None), length=10) == []


def signed(at_site: SiteDrill | None = None, at_hub: HubDrill | None = None) -> DrillEvidence:
    at_site, at_hub = at_site or account(), at_hub or hub()
    checks = checks_of(60, AT, CONSENT, at_site, at_hub)
    document = DrillDocument(
        drill="drl-1",
        site=SiteName("site-a"),
        pool=None,
        kind=DrillKind.CUT,
        seconds=60,
        start=AT,
        asked_by="li",
        asked_at=AT,
        reason="quarterly",
        consent=CONSENT,
        at_site=at_site,
        at_hub=at_hub,
        checks=checks,
        verdict=verdict_of(checks),
    )
    parts = {SITE: at_site, HUB: document, PERSON: document}
    return DrillEvidence(
        document=document, signatures=[sign_part(KEYS[role], part, role=role, name=role, at=AT) for role, part in parts.items()]
    )


def test_signed_evidence_verifies_from_its_bytes_alone_whatever_the_verdict() -> None:
    assert verify_file(canonical(signed()) + b"\n")[1] == []
    assert faults_of(signed(account(ended_by="owner", back_at=seconds(20)))) == []


Change = Callable[[DrillEvidence], DrillEvidence]


def with_document(**changed: Any) -> Change:
    return lambda e: msgspec.structs.replace(e, document=msgspec.structs.replace(e.document, **changed))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_document(verdict="failed"), "does not follow"),
        (with_document(at_hub=hub(silent_at=None)), "does not follow"),
        (with_document(at_site=account(restarts=1)), "the signature of site"),
        (with_document(asked_by="wang"), "the signature of hub"),
        (with_document(drill="drl-2"), "another drill"),
        (with_document(at_hub=hub(books=[book()])), "not those of the site's attempts"),
        (with_document(at_hub=hub(books=[STILL, book(site_us=4, scheduler_us=4, metering_us=4)])), "not what the site signed"),
        (lambda e: msgspec.structs.replace(e, signatures=e.signatures[:2]), "nobody signed as person"),
        (lambda e: msgspec.structs.replace(e, signatures=e.signatures[1:]), "nobody signed as site"),
    ],
)
def test_evidence_that_was_changed_is_refused_with_the_reason(change: Change, said: str) -> None:
    assert said in "; ".join(faults_of(change(signed())))


def accepted(data: bytes) -> bool:
    try:
        return verify_file(data)[1] == []
    except Refused:
        return False


def test_a_version_that_knows_more_fields_verifies_what_an_older_one_wrote() -> None:
    """Played by what this version does not know: the signatures are over the file's own words."""
    raw = json.loads(canonical(signed()))
    raw["document"]["weather"] = "fine"
    document = raw["document"]
    site, hub_, person = (
        sign_part(KEYS[role], raw["document"]["at_site"] if role == SITE else document, role=role, name=role, at=AT) for role in KEYS
    )
    raw["signatures"] = json.loads(canonical([site, hub_, person]))
    assert accepted(canonical(raw))
    raw["document"]["weather"] = "foul"
    assert not accepted(canonical(raw))
    raw["note"] = "added"
    assert not accepted(canonical(raw))


def test_no_single_byte_can_be_changed() -> None:
    data = canonical(signed())
    assert accepted(data)
    for at in range(0, len(data), 29):
        changed = bytearray(data)
        changed[at] ^= 1
        assert not accepted(bytes(changed)), f"byte {at}: {data[at : at + 1]!r}"
    assert not accepted(b" " + data)
    assert not accepted(data[:-1])


EXAMPLE = Path(__file__).resolve().parents[2] / "ops/docs/examples/drill-site-a.json"


def test_the_example_of_the_docs_verifies_and_does_not_once_a_byte_is_changed(tmp_path: Path) -> None:
    """The command that the docs name, on the evidence of a real run."""
    whole = CliRunner().invoke(drill, ["verify", str(EXAMPLE)])
    assert whole.exit_code == 0, whole.output
    data = EXAMPLE.read_bytes()
    assert verify_file(data)[0].document.verdict == "passed"
    for at in range(0, len(data) - 1, 97):
        changed = bytearray(data)
        changed[at] ^= 1
        assert not accepted(bytes(changed)), f"byte {at}"
    one = tmp_path / "changed.json"
    one.write_bytes(data.replace(b'"restarts":0', b'"restarts":1'))
    assert CliRunner().invoke(drill, ["verify", str(one)]).exit_code == 1
