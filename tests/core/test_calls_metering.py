"""One question per call: both words and the agreement in, a price or the first reason why there is none out. As a ladder, in the order of the rungs."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.metering_world import OTHER_SITE, SITE, T0, TENANT, at, sealed, site_key, spec, verify

from intertie.contracts.base import encode
from intertie.contracts.call_offerings import CallOutcome, CallPays, CallPrice
from intertie.contracts.calls import CallGrant, CallRecord, CallSeen
from intertie.contracts.usage import MeterSpec
from intertie.errors import Refused
from intertie.ids import CallId, OfferingName, PrincipalId, SpecId, TenantName
from intertie.metering.core.calls import (
    GRACE,
    CallEvidence,
    CallReckoning,
    SiteWord,
    differences,
    promises,
    settle,
    site_word,
    with_seen,
    with_word,
)
from intertie.metering.core.evidence import SiteKeys

GATEWAY = "U-gateway"
CALL, CHAT, WHO = CallId("call-1"), OfferingName("chat"), PrincipalId("prn-1")
KEYS = SiteKeys(frozenset({site_key(SITE)}))
PRICED = spec(call_prices=[CallPrice(per_call=Decimal("0.001"), per_1m_input=Decimal(2), per_1m_output=Decimal(6))])


def grant(key: str = GATEWAY, **changes: Any) -> Any:
    given = CallGrant(call=CALL, tenant=TENANT, principal=WHO, site=SITE, offering=CHAT, revision=1, at=T0)
    return sealed(encode(msgspec.structs.replace(given, **changes)), key)


def record(**changes: Any) -> CallRecord:
    standard = CallRecord(
        call=CALL,
        site=SITE,
        offering=CHAT,
        tenant=TENANT,
        grant=grant(),
        revision=1,
        accepted=T0,
        first_byte_us=40_000,
        end_us=1_000_000,
        outcome=CallOutcome.COMPLETED,
        status=200,
        request_bytes=100,
        response_bytes=900,
        input_tokens=120,
        output_tokens=40,
    )
    return msgspec.structs.replace(standard, **changes)


def word(key: str = "", **changes: Any) -> SiteWord:
    said = record(**changes)
    return SiteWord(sealed(encode(said), key or site_key(SITE)), said, at(2))


def seen(**changes: Any) -> CallSeen:
    standard = CallSeen(
        call=CALL,
        tenant=TENANT,
        principal=WHO,
        site=SITE,
        offering=CHAT,
        opened=T0,
        first_byte_us=41_000,
        end_us=1_002_000,
        outcome=CallOutcome.COMPLETED,
        status=200,
        request_bytes=100,
        response_bytes=900,
    )
    return msgspec.structs.replace(standard, **changes)


def asked(
    site: SiteWord | None, gateway: CallSeen | None, specs: list[MeterSpec] | None = None, *, after: timedelta = timedelta(), **more: Any
) -> CallReckoning:
    evidence = CallEvidence(site=SITE, call=CALL, word=site, seen=gateway, specs=[PRICED] if specs is None else specs, keys=KEYS, **more)
    return settle(evidence, verify, GATEWAY, at(2) + after)


UNPRICED = spec(call_prices=[CallPrice(offering="other/chat", per_call=Decimal(1))])
LADDER = [
    ("the site's record has not come", None, seen(), [PRICED], ("waiting", "site_word")),
    ("another key sealed it", word("U-thief"), seen(), [PRICED], ("suspense", "unproven")),
    ("no gateway granted it", word(grant=grant("U-thief")), seen(), [PRICED], ("suspense", "no_grant")),
    ("granted to another tenant", word(tenant=TenantName("rich")), None, [PRICED], ("suspense", "no_grant")),
    ("granted for another site", word(grant=grant(site=OTHER_SITE)), seen(), [PRICED], ("suspense", "no_grant")),
    ("granted for another call", word(grant=grant(call=CallId("call-2"))), seen(), [PRICED], ("suspense", "no_grant")),
    ("the gateway saw another tenant", word(), seen(tenant=TenantName("rich")), [PRICED], ("suspense", "no_grant")),
    ("the gateway's record has not come", word(), None, [PRICED], ("waiting", "gateway_word")),
    ("no agreement", word(), seen(), [], ("suspense", "no_spec")),
    ("no price in it", word(), seen(), [UNPRICED], ("suspense", "no_price")),
    (
        "BR-092 (d): nobody counted the tokens",
        word(input_tokens=None, output_tokens=None),
        seen(),
        [PRICED],
        ("suspense", "tokens_unknown"),
    ),
    ("all is here", word(), seen(), [PRICED], ("settled", "")),
]


@pytest.mark.parametrize(("why", "site", "gateway", "specs", "stands"), LADDER, ids=[row[0] for row in LADDER])
def test_the_first_reason_that_holds_a_call_back(
    why: str, site: SiteWord | None, gateway: CallSeen | None, specs: list[MeterSpec], stands: tuple[str, str]
) -> None:
    reckoning = asked(site, gateway, specs)
    assert (reckoning.book.state, reckoning.book.reason) == stands
    assert (reckoning.book.amount is None) is (stands[0] != "settled"), "unknown is not nought"
    assert bool(reckoning.legs) is (stands[0] == "settled")


PAYERS = [
    (CallOutcome.COMPLETED, {}, CallPays.TENANT, "0.001480"),
    (CallOutcome.INCOMPLETE, {"input_tokens": 90, "output_tokens": 2_000}, CallPays.TENANT, "0.013180"),
    (CallOutcome.CLIENT_GONE, {}, CallPays.TENANT, "0.001480"),
    (CallOutcome.TIMED_OUT, {}, CallPays.TENANT, "0.001480"),
    (CallOutcome.INTERRUPTED, {}, CallPays.PLATFORM, "0.001480"),
    (CallOutcome.REJECTED, {"input_tokens": None, "output_tokens": None}, CallPays.FREE, "0"),
    (CallOutcome.UPSTREAM_FAILED, {"input_tokens": None, "output_tokens": None}, CallPays.FREE, "0"),
    (CallOutcome.UPSTREAM_STALLED, {"input_tokens": None, "output_tokens": None}, CallPays.FREE, "0"),
]


@pytest.mark.parametrize(("outcome", "changes", "payer", "amount"), PAYERS, ids=[row[0].value for row in PAYERS])
def test_br_092_who_pays_what_follows_from_how_it_ended(
    outcome: CallOutcome, changes: dict[str, Any], payer: CallPays, amount: str
) -> None:
    book = asked(word(outcome=outcome, **changes), seen(outcome=outcome)).book
    assert (book.state, book.payer, book.amount) == ("settled", payer, Decimal(amount))
    assert f"{PRICED.spec} rev {PRICED.revision}" in book.formula and outcome.value in book.formula


def test_an_agreement_may_say_otherwise() -> None:
    kind = msgspec.structs.replace(PRICED, call_pays={**PRICED.call_pays, "client_gone": CallPays.SITE})
    book = asked(word(outcome=CallOutcome.CLIENT_GONE), seen(outcome=CallOutcome.CLIENT_GONE), [kind]).book
    assert (book.payer, book.amount) == (CallPays.SITE, Decimal("0.001480"))


def test_br_092_a_stream_whose_tokens_nobody_counted_is_estimated_where_the_agreement_says_so() -> None:
    price = CallPrice(per_1m_output=Decimal(6), unknown_tokens="events")
    gone = word(outcome=CallOutcome.CLIENT_GONE, input_tokens=None, output_tokens=None, events=7, streamed=True)
    book = asked(gone, seen(outcome=CallOutcome.CLIENT_GONE), [spec(call_prices=[price])]).book
    assert (book.state, book.estimated, book.amount) == ("settled", True, Decimal("0.000042"))
    assert book.output_tokens is None, "what was measured stays what it is"


def test_the_gateway_alone_knows_whether_the_answer_arrived() -> None:
    book = asked(word(), seen(outcome=CallOutcome.INTERRUPTED, code="call.bus_lost", response_bytes=300)).book
    assert (book.outcome, book.code, book.payer) == (CallOutcome.INTERRUPTED, "call.bus_lost", CallPays.PLATFORM)
    assert book.differences == ["outcome"] and book.response_bytes == 300


@pytest.mark.parametrize("ended", [CallOutcome.REJECTED, CallOutcome.UPSTREAM_FAILED, CallOutcome.UPSTREAM_STALLED])
@pytest.mark.parametrize("way", [CallOutcome.CLIENT_GONE, CallOutcome.INTERRUPTED])
def test_br_092_an_answer_that_never_was_costs_nobody_whatever_became_of_the_error_on_its_way(ended: CallOutcome, way: CallOutcome) -> None:
    said = word(outcome=ended, code="call.upstream_error", status=500, input_tokens=None, output_tokens=None)
    book = asked(said, seen(outcome=way, code="call.client_gone"), [spec(call_prices=[CallPrice(per_call=Decimal(1))])]).book
    assert (book.outcome, book.code, book.payer, book.amount) == (ended, "call.upstream_error", CallPays.FREE, Decimal(0))
    assert book.differences == ["outcome"], "that the two do not agree stays in sight"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, []),
        ({"outcome": CallOutcome.CLIENT_GONE}, ["outcome"]),
        ({"response_bytes": 899}, ["bytes"]),
        ({"end_us": 2_900_000}, ["duration"]),
        ({"end_us": 2_000_000}, []),
    ],
)
def test_where_two_words_do_not_agree_is_named(changes: dict[str, Any], named: list[str]) -> None:
    assert differences(record(), seen(**changes)) == named


def test_a_gateway_whose_spool_is_gone_leaves_its_seal_and_the_difference_is_named() -> None:
    assert asked(word(), None, after=GRACE - timedelta(seconds=1)).book.reason == "gateway_word"
    book = asked(word(), None, after=GRACE).book
    assert (book.state, book.differences, book.amount) == ("settled", ["gateway_word_missing"], Decimal("0.001480"))
    late = asked(word(), seen(), after=GRACE, balances=_posted("0.001480"), priced_by=(PRICED.spec, 1))
    assert late.legs == [] and late.book.differences == []


@pytest.mark.parametrize("gateway", [seen(taken=False, outcome=CallOutcome.REFUSED), seen(outcome=CallOutcome.REFUSED, code="call.model")])
def test_what_reached_no_upstream_is_settled_by_the_gateway_alone(gateway: CallSeen) -> None:
    book = asked(None, gateway).book
    assert (book.state, book.payer, book.amount) == ("settled", CallPays.FREE, Decimal(0))


def _posted(amount: str) -> dict[tuple[str, str], Decimal]:
    return {(f"tenant/{TENANT}", "CNY"): Decimal(amount), ("usage/platform", "CNY"): -Decimal(amount)}


def test_a_price_once_posted_is_changed_by_no_later_agreement() -> None:
    later = spec(revision=2, effective_from=T0 - timedelta(hours=1), call_prices=[CallPrice(per_call=Decimal(9))])
    fresh = asked(word(), seen(), [PRICED, later])
    assert fresh.book.spec_revision == 2
    kept = asked(word(), seen(), [PRICED, later], priced_by=(PRICED.spec, 1), balances=_posted("0.001480"))
    assert kept.legs == [] and kept.book.amount == Decimal("0.001480")


def test_the_tenants_own_agreement_comes_before_everyones() -> None:
    own = spec(spec=SpecId("spec-own"), consumer=TENANT, call_prices=[CallPrice(per_call=Decimal("0.5"))])
    assert asked(word(), seen(), [PRICED, own]).book.amount == Decimal("0.500000")


@given(st.permutations(["word", "seen", "word", "seen", "other word", "other seen"]))
def test_order_and_repeats_change_nothing_and_the_first_word_stays(order: list[str]) -> None:
    evidence = CallEvidence(site=SITE, call=CALL, specs=[PRICED], keys=KEYS)
    first: dict[str, str] = {}
    for said in order:
        first.setdefault(said.split()[-1], said)
        match said:
            case "word":
                evidence = with_word(evidence, word())
            case "other word":
                evidence = with_word(evidence, word(output_tokens=9_999_999))
            case "seen":
                evidence = with_seen(evidence, seen(), T0)
            case _:
                evidence = with_seen(evidence, seen(outcome=CallOutcome.INTERRUPTED), T0)
        settled = settle(evidence, verify, GATEWAY, at(3))
        evidence = replace(settled.evidence, balances=_sum(evidence, settled))
    book = settle(evidence, verify, GATEWAY, at(3)).book
    assert book.output_tokens == (40 if first["word"] == "word" else 9_999_999)
    assert book.outcome is (CallOutcome.COMPLETED if first["seen"] == "seen" else CallOutcome.INTERRUPTED)
    assert settle(evidence, verify, GATEWAY, at(3)).legs == []


def _sum(evidence: CallEvidence, settled: CallReckoning) -> dict[tuple[str, str], Decimal]:
    sums = dict(evidence.balances)
    for leg in settled.legs:
        sums[(leg.account, leg.currency)] = sums.get((leg.account, leg.currency), Decimal(0)) + leg.amount
    assert sum(leg.amount for leg in settled.legs) == 0
    return {key: value for key, value in sums.items() if value}


@pytest.mark.parametrize(
    ("changes", "missed", "kept"),
    [
        ({}, [], None),
        ({"response_p95_ms": 1_000}, [], True),
        ({"response_p95_ms": 999}, ["response_p95_ms 1000 > 999"], False),
        ({"first_byte_p95_ms": 39}, ["first_byte_p95_ms 40 > 39"], False),
        ({"first_byte_p95_ms": 10, "first_byte_us": None}, [], None),
        ({"response_p95_ms": 1, "outcome": CallOutcome.CLIENT_GONE}, [], None),
    ],
)
def test_a_promise_is_held_against_what_the_call_measured(changes: dict[str, Any], missed: list[str], kept: bool | None) -> None:
    assert promises(record(**changes)) == (missed, kept)


def test_a_site_speaks_of_its_own_calls_only() -> None:
    with pytest.raises(Refused, match=r"metering\.call"):
        site_word(OTHER_SITE, word().sealed, T0)
    with pytest.raises(Refused, match=r"contract\.invalid"):
        site_word(SITE, sealed(b'{"call": 1}', "k"), T0)
