"""Calls, the pure half: parts in order and once, credit, what an answer says of itself, rates, prices, an owner's rules."""

from __future__ import annotations

import csv
import json
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intertie.agent.endpoint.rules import EndpointPrice, EndpointRule, offering_of, offerings_of
from intertie.agent.endpoint.usage import TAIL_BYTES, WHOLE_BYTES, Reader, Used, asked
from intertie.bus.chunks import MOST_HELD, Credit, Ordered, Window
from intertie.contracts.call_offerings import CallLine, CallPays, CallPrice
from intertie.contracts.usage import Statement
from intertie.errors import Refused
from intertie.gateway.call_limits import Rates
from intertie.ids import OfferingName, SiteName, StatementId, TenantName
from intertie.rating.calls import CallUse, price_for, rate_call
from intertie.rating.export import statement_csv

# --- parts ---


@given(st.permutations(range(1, 12)), st.lists(st.integers(1, 11), max_size=20))
def test_parts_in_any_order_and_any_number_of_times_come_out_once_in_order(order: list[int], repeats: list[int]) -> None:
    stream: Ordered[int] = Ordered()
    out: list[int] = []
    for seq in [*order, *repeats]:
        out += stream.take(seq, seq)
        for again in repeats[:3]:
            if again < stream.next:
                out += stream.take(again, again)
    assert out == list(range(1, 12)) and not stream.gap


def test_a_part_that_was_sent_and_has_not_come_is_a_gap() -> None:
    stream: Ordered[str] = Ordered()
    assert stream.take(1, "a") == ["a"] and not stream.gap
    assert stream.take(3, "c") == [] and stream.gap
    assert stream.take(2, "b") == ["b", "c"] and not stream.gap
    stream.heard(4)
    assert stream.gap, "the tail is missed because the sender says how many it sent"


def test_a_sender_that_gives_no_heed_fills_no_memory() -> None:
    stream: Ordered[int] = Ordered()
    with pytest.raises(Refused, match=r"chunks\.flood"):
        for seq in range(2, MOST_HELD + 10):
            stream.take(seq, seq)


@given(st.lists(st.integers(1, 300), max_size=60), st.randoms())
def test_no_more_is_under_way_than_the_window_and_nothing_stalls(sizes: list[int], chance: object) -> None:
    window, credit = Window(256), Credit(256)
    passed = 0
    for size in sizes:
        left = size
        while left:
            assert credit.room() > 0, "all was passed on, so there is room"
            part = min(left, credit.room(), 100)
            credit.spend(part)
            left -= part
            assert credit.sent - passed <= 256
            passed += part
            if (through := window.passed_on(part)) is not None:
                credit.grant(through)
                credit.grant(through - 7)  # a late one changes nothing
    assert credit.sent == sum(sizes)


# --- usage ---


def sse(*events: object) -> bytes:
    return b"".join(b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n" for event in events)


CHUNK = {"model": "m", "choices": [{"delta": {"content": "x"}}]}
USAGE = {"prompt_tokens": 90, "completion_tokens": 2_000, "total_tokens": 2_090}

ANSWERS = [
    ("plain", False, json.dumps({"model": "m", "choices": [], "usage": USAGE}).encode(), Used(90, 2_000, 0, "m")),
    ("embeddings: no completion", False, json.dumps({"usage": {"prompt_tokens": 7, "total_tokens": 7}}).encode(), Used(7, 0)),
    ("BR-092 (d): no usage field", False, b'{"model": "m", "choices": []}', Used(None, None, 0, "m")),
    ("usage is null", False, b'{"usage": null}', Used()),
    ("a count that is none", False, b'{"usage": {"prompt_tokens": -1, "completion_tokens": "many"}}', Used()),
    ("a fraction of a token", False, b'{"usage": {"prompt_tokens": 1.5}}', Used()),
    ("garbage", False, b"\xff\xfe<html>", Used()),
    ("nothing", False, b"", Used()),
    ("stream with usage", True, sse(CHUNK, CHUNK, {"choices": [], "usage": USAGE}, b"[DONE]"), Used(90, 2_000, 2, "m")),
    ("BR-092 (b): a stream that was cut", True, sse(CHUNK, CHUNK) + b'data: {"choi', Used(None, None, 2, "m")),
    (
        "a stream of the last usage",
        True,
        sse({**CHUNK, "usage": {"prompt_tokens": 1, "completion_tokens": 1}}, {"choices": [], "usage": USAGE}),
        Used(90, 2_000, 1, "m"),
    ),
    (
        "BR-092 (c): ends response.incomplete and says its usage",
        True,
        sse(
            {
                "type": "response.incomplete",
                "response": {"model": "m", "status": "incomplete", "usage": {"input_tokens": 90, "output_tokens": 2_000}},
            }
        ),
        Used(90, 2_000, 1, "m", True),
    ),
    (
        "the word usage inside an answer's text",
        False,
        json.dumps({"choices": [{"text": '"usage": {"prompt_tokens": 5}'}]}).encode(),
        Used(),
    ),
    ("lines end in CR LF", True, sse(CHUNK, {"choices": [], "usage": USAGE}).replace(b"\n", b"\r\n"), Used(90, 2_000, 1, "m")),
]


@pytest.mark.parametrize(("what", "stream", "data", "used"), ANSWERS, ids=[row[0] for row in ANSWERS])
@pytest.mark.parametrize("cut", [1, 7, 1_000_000])
def test_br_092_what_an_answer_says_it_used_and_nothing_else(what: str, stream: bool, data: bytes, used: Used, cut: int) -> None:
    reader = Reader(stream)
    for at in range(0, len(data), cut):
        reader.feed(data[at : at + cut])
    assert reader.used() == used


@given(st.binary(max_size=600), st.booleans(), st.integers(1, 50))
def test_no_garbage_makes_a_number_or_an_error(data: bytes, stream: bool, cut: int) -> None:
    reader = Reader(stream)
    for at in range(0, len(data), cut):
        reader.feed(data[at : at + cut])
    used = reader.used()
    if b"usage" not in data:
        assert used.input_tokens is None and used.output_tokens is None


def test_of_an_answer_too_long_to_keep_the_tail_is_read() -> None:
    reader = Reader(False)
    long = b'{"data": [' + b"0.12345," * (WHOLE_BYTES // 8 + TAIL_BYTES) + b'0], "usage": {"prompt_tokens": 12, "total_tokens": 12}}'
    for at in range(0, len(long), 65_536):
        reader.feed(long[at : at + 65_536])
    assert reader.used().input_tokens == 12
    assert len(reader._kept) <= WHOLE_BYTES + 2 * TAIL_BYTES


def test_what_is_asked_for() -> None:
    assert asked(b"[1]") is None and asked(b"{") is None and asked(b"\xff") is None
    plain, bare, told = (
        asked(b'{"model": "m"}'),
        asked(b'{"stream": true}'),
        asked(b'{"stream": true, "stream_options": {"include_usage": true}}'),
    )
    assert plain is not None and plain.tells_usage and plain.model == "m"
    assert bare is not None and not bare.tells_usage
    assert told is not None and told.tells_usage


# --- rates ---


def test_a_tenant_calls_as_often_as_the_owner_says_and_no_other_pays_for_it() -> None:
    rates = Rates()
    taken = [rates.take("a", "lab/chat", 60, 0.0) for _ in range(8)]
    assert taken[:6] == [0.0] * 6 and all(wait == pytest.approx(1.0) for wait in taken[6:])
    assert rates.take("b", "lab/chat", 60, 0.0) == 0.0
    assert rates.take("a", "lab/chat", 60, 1.0) == 0.0 and rates.take("a", "lab/chat", 60, 1.0) > 0
    assert rates.take("a", "lab/chat", 60, 0.5) > 0, "a clock that steps back gives nothing away"


@given(st.integers(1, 10_000), st.lists(st.floats(0, 5), max_size=200))
def test_no_minute_holds_more_than_its_rate_and_one_burst(per_minute: int, gaps: list[float]) -> None:
    rates, now, went = Rates(), 0.0, list[float]()
    for gap in gaps:
        now += gap
        if rates.take("a", "o", per_minute, now) == 0:
            went.append(now)
    burst = max(min(5, per_minute), per_minute // 10)
    for start in went:
        assert sum(start <= at < start + 60 for at in went) <= per_minute + burst + 1


# --- prices ---

PRICE = CallPrice(per_call=Decimal("0.001"), per_1m_input=Decimal(2), per_1m_output=Decimal(6), per_second=Decimal("0.01"))
RATED = [
    (CallUse(1_250_000, 120, 40), PRICE, Decimal("0.013980"), False),
    (CallUse(1_250_000, 120, 40), CallPrice(), Decimal("0.000000"), False),
    (CallUse(1_000_000, None, None), CallPrice(per_call=Decimal("0.01"), per_second=Decimal("0.5")), Decimal("0.510000"), False),
    (CallUse(0, 10, None, 25), CallPrice(per_1m_output=Decimal(4), unknown_tokens="events"), Decimal("0.000100"), True),
]


@pytest.mark.parametrize(("use", "price", "amount", "estimated"), RATED)
def test_a_call_is_the_sum_of_its_parts_and_says_so(use: CallUse, price: CallPrice, amount: Decimal, estimated: bool) -> None:
    rated = rate_call(use, price, "CNY")
    assert (rated.amount, rated.estimated) == (amount, estimated)
    assert rated.text.count("=") == 1 and ("estimated" in rated.text) is estimated


@pytest.mark.parametrize(
    ("use", "price"),
    [
        (CallUse(1, None, 5), CallPrice(per_1m_input=Decimal(1))),
        (CallUse(1, 5, None), CallPrice(per_1m_output=Decimal(1))),
        (CallUse(1, 5, None, 0), CallPrice(per_1m_output=Decimal(1), unknown_tokens="events")),
        (CallUse(1, None, None, 9), CallPrice(per_1m_input=Decimal(1), per_1m_output=Decimal(1), unknown_tokens="events")),
    ],
)
def test_a_price_for_tokens_that_nobody_counted_is_no_amount(use: CallUse, price: CallPrice) -> None:
    rated = rate_call(use, price, "CNY")
    assert rated.amount is None and rated.unknown == "tokens"


def test_an_offerings_own_price_comes_before_everyones_and_none_is_not_free() -> None:
    own, rest = CallPrice(offering="lab/chat", per_call=Decimal(1)), CallPrice(per_call=Decimal(2))
    assert price_for([rest, own], "lab/chat") is own and price_for([rest, own], "lab/other") is rest
    assert price_for([own], "lab/other") is None


# --- the owner's rules ---


def rule(**changes: object) -> EndpointRule:
    import msgspec

    given = {"name": "chat", "upstream": "http://127.0.0.1:8000", "tenants": ["acme"], **changes}
    return msgspec.convert(given, EndpointRule)


def test_an_offering_tells_all_but_its_upstream() -> None:
    offering = offering_of(rule(price={"per_1m_output": "6.00"}, promise={"availability_percent": "99.5"}))
    assert offering.price.per_1m_output == Decimal("6.00") and offering.promise.availability_percent == Decimal("99.5")
    assert "8000" not in str(offering) and offering.admits("acme") and not offering.admits("other") and not offering.admits(None)
    assert offering_of(rule(tenants=["*"])).admits("anyone") and not offering_of(rule(tenants=[])).admits("acme")


@pytest.mark.parametrize(
    "bad",
    [
        {"name": "Chat"},
        {"name": "a.b"},
        {"upstream": "ftp://127.0.0.1"},
        {"upstream": "127.0.0.1:8000"},
        {"upstream": "http://"},
        {"upstream": "http://user:secret@127.0.0.1"},
        {"upstream": "http://127.0.0.1:99999"},
        {"upstream": "http://[::1"},
        {"upstream": "http://a..b:8000"},
        {"upstream": f"http://{'a' * 70}:8000"},
        {"upstream": "http://127.0.0.1/?key=1"},
        {"health": "health"},
        {"models": [""]},
        {"tenants": [" "]},
    ],
)
def test_what_cannot_be_an_endpoint_is_refused_with_its_name(bad: dict[str, object]) -> None:
    with pytest.raises(Refused, match=r"endpoint\.rule"):
        offering_of(rule(**bad))


def test_two_endpoints_of_one_name_are_refused() -> None:
    with pytest.raises(Refused, match="two"):
        offerings_of([rule(), rule()])


def test_an_amount_is_written_in_quotes() -> None:
    import msgspec

    with pytest.raises(msgspec.ValidationError):
        msgspec.toml.decode(b"per_call = 0.1", type=EndpointPrice)
    assert msgspec.toml.decode(b'per_call = "0.1"', type=EndpointPrice).per_call == "0.1"


def test_free_is_said_by_the_agreement_and_by_nobody_else() -> None:
    assert set(CallPays) == {"tenant", "site", "platform", "free"}


# --- a statement for spreadsheets ---


def test_a_statement_s_csv_holds_its_calls_and_adds_up_to_its_total() -> None:
    line = CallLine(
        site=SiteName("lab"),
        offering=OfferingName("chat"),
        day="2026-12-01",
        calls=3,
        amount=Decimal("0.004440"),
        paid_by_others=Decimal("0.001"),
        waiting=1,
        outcomes={"completed": 2, "interrupted": 1},
        text="=3 calls",
    )
    statement = Statement(
        statement=StatementId("st-1"),
        tenant=TenantName("acme"),
        period="2026-12",
        start=datetime(2026, 12, 1, tzinfo=UTC),
        end=datetime(2027, 1, 1, tzinfo=UTC),
        time_zone="Asia/Shanghai",
        currency="CNY",
        provisional=True,
        total=Decimal("0.004440"),
        usage_milli_us=0,
        lines=[],
        calls=[line],
        at=datetime(2026, 12, 2, tzinfo=UTC),
    )
    head, *rows = list(csv.reader(statement_csv(statement).splitlines()))
    assert all(len(row) == len(head) for row in rows)
    told = [dict(zip(head, row, strict=True)) for row in rows]
    assert [(row["payer"], row["amount"], row["complete"]) for row in told] == [("tenant", "0.004440", "no"), ("others", "0.001", "no")]
    assert sum(Decimal(row["amount"]) for row in told if row["payer"] == "tenant") == statement.total
    assert told[0]["formula"] == "'=3 calls", "a spreadsheet runs no formula of ours"
