"""What is written down holds no secret; traces join whatever the header looked like; labels stay bounded."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from intertie.errors import Refused
from intertie.observe import log, metrics, redact, tracing

CANARY = "canary-7f3a-x"
SEED = "SUAMK2FG4MI6UE3ACF3FK3OIQBCEIEZV7NSWFFEW63UXMRLFM2XLAXK4GY"
JWT = "eyJhbGciOiJlZDI1NTE5In0.eyJqdGkiOiJBQkNERUYifQ.c2lnbmF0dXJlLWJ5dGVz"


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """All log lines of a test."""
    out = io.StringIO()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    log.setup("tested", "DEBUG", stream=out)
    yield out
    structlog.reset_defaults()
    root.handlers, root.level = handlers, level


def lines(out: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(
    "given",
    [
        {"token": CANARY},
        {"db_password": CANARY},
        {"Authorization": f"Bearer {CANARY}"},
        {"signing_seed": CANARY},
        {"secret": [CANARY]},
        {"intertie-claims": CANARY},
        {"env": {"HF_TOKEN": CANARY}},
        {"env": {"PLAIN": CANARY}},
        {"environ": [f"PLAIN={CANARY}"]},
        {"request": {"headers": {"authorization": CANARY}}},
        {"spec": {"job": {"env": {"X": CANARY}}}},
        {"text": f"Authorization: Bearer {CANARY}"},
        {"url": f"postgresql://user:{CANARY}@host/db"},
    ],
    ids=lambda given: json.dumps(given)[:40],
)
def test_a_secret_is_in_no_log_line(written: io.StringIO, given: dict[str, object]) -> None:
    """BR-144."""
    log.get("room").info("something happened", **given)
    assert CANARY not in written.getvalue() and redact.REDACTED in written.getvalue()


def test_names_of_an_environment_stay_and_values_go(written: io.StringIO) -> None:
    log.get("room").info("started", env={"HF_TOKEN": "x", "LANG": "C"})
    assert lines(written)[0]["env"] == {"HF_TOKEN": redact.REDACTED, "LANG": redact.REDACTED}


@pytest.mark.parametrize("secret", [SEED, JWT])
def test_what_is_shaped_like_a_secret_goes_wherever_it_stands(written: io.StringIO, secret: str) -> None:
    log.get("room").info(f"odd {secret}", note=f"see {secret}", **{"list": [secret]})
    logging.getLogger("a.library").error("dump %s", secret)
    try:
        raise ValueError(secret)
    except ValueError:
        log.get("room").exception("failed")
    assert secret not in written.getvalue() and len(lines(written)) == 3


def test_a_hidden_value_goes_from_a_traceback_too(written: io.StringIO) -> None:
    redact.hide("correct horse battery")
    try:
        raise RuntimeError("correct horse battery")
    except RuntimeError:
        log.get("room").exception("failed")
    assert "correct horse" not in written.getvalue() and "RuntimeError" in written.getvalue()


@pytest.mark.parametrize(
    "given", [{"tokens": 5}, {"count": 1, "ok": True}, {"subject": "a.b"}, {"key": "job-1"}, {"reason": "任务 wartet"}]
)
def test_what_is_no_secret_stays_as_it_is(written: io.StringIO, given: dict[str, object]) -> None:
    log.get("room").info("fine", **given)
    assert {name: lines(written)[0][name] for name in given} == given


def test_a_log_line_says_service_room_time_and_trace(written: io.StringIO) -> None:
    with tracing.span("test work") as span:
        log.get("bus.nats").warning("look", number=1)
    line = lines(written)[0]
    assert (line["service"], line["room"], line["level"], line["event"]) == ("tested", "bus.nats", "warning", "look")
    assert line["trace_id"] == f"{span.get_span_context().trace_id:032x}" and str(line["at"]).endswith("Z")


# --- traces


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    tracing.setup("tested", exporter=exporter)
    yield exporter
    tracing.shutdown()


def ended(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    """Stopping sends what waits."""
    tracing.shutdown()
    return list(exporter.get_finished_spans())


GOOD = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@pytest.mark.parametrize(
    ("header", "joins"),
    [
        (GOOD, True),
        (GOOD.upper(), True),
        (f" {GOOD} ", True),
        ("01" + GOOD[2:] + "-more", True),
        (GOOD.encode(), False),
        ("00-" + "0" * 32 + "-" + "b" * 16 + "-01", False),
        ("00-" + "a" * 32 + "-" + "0" * 16 + "-01", False),
        ("ff" + GOOD[2:], False),
        ("00-xyz", False),
        ("", False),
        (None, False),
        ("k=" + "v" * 8_192, False),
        (GOOD + "-" + "x" * 8_192, False),
        (7, False),
    ],
)
def test_a_trace_goes_on_if_its_header_can_be_read_and_begins_anew_if_not(header: object, joins: bool) -> None:
    """BR-134."""
    assert (tracing.parse(header) is not None) is joins
    with tracing.span("test work", parent=header) as span:
        context = span.get_span_context()
        assert context.is_valid
        assert (f"{context.trace_id:032x}" == "a" * 32) is joins
        assert tracing.parse(tracing.traceparent()) is not None


def test_without_an_exporter_ids_are_valid_and_children_join() -> None:
    tracing.shutdown()
    with tracing.span("outer") as outer:
        with tracing.span("inner") as inner:
            assert inner.get_span_context().trace_id == outer.get_span_context().trace_id
        assert len(tracing.trace_id()) == 32 and not outer.is_recording()
    assert tracing.trace_id() == "" and tracing.traceparent() == ""


def test_a_repeat_is_linked_to_its_cause_and_is_no_second_child(spans: InMemorySpanExporter) -> None:
    """BR-134."""
    with tracing.span("again", new_root=True, links=[GOOD, "garbage"]):
        pass
    [span] = ended(spans)
    assert [f"{link.context.trace_id:032x}" for link in span.links] == ["a" * 32]
    assert span.parent is None


def test_a_span_holds_no_secret_and_names_an_error_by_its_code(spans: InMemorySpanExporter) -> None:
    with pytest.raises(Refused), tracing.span("work", {"token": CANARY, "site": "site-a", "url": f"nats://u:{CANARY}@h"}):
        raise Refused("a.b", f"with {CANARY}")
    [span] = ended(spans)
    assert CANARY not in span.to_json()
    assert span.status.description == "a.b"


def test_an_endpoint_that_is_away_delays_no_work_and_no_stop_for_long() -> None:
    tracing.setup("tested", environ={tracing.ENDPOINT: "http://127.0.0.1:9", "OTEL_TRACES_SAMPLER_ARG": "1"})
    try:
        for _ in range(100):
            with tracing.span("work") as span:
                assert span.is_recording()
    finally:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        tracing.shutdown()


# --- metrics


@pytest.mark.parametrize("label", ["job", "attempt", "tenant", "subject", "path"])
def test_a_label_that_may_take_any_value_is_refused(label: str) -> None:
    """BR-135."""
    with pytest.raises(ValueError, match="not bounded"):
        metrics.Counter(f"intertie_test_{label}_total", "text", (label,))


def test_too_many_series_end_in_one_that_says_so() -> None:
    """BR-135: twenty thousand values may not cost gigabytes."""
    counter = metrics.Counter("intertie_test_sites_total", "text", ("site",))
    for number in range(20_000):
        counter.inc(site=f"site-{number}")
    assert counter.total == 20_000
    assert counter.value(site=metrics.OVERFLOW) == 20_000 - metrics.MOST_SERIES
    assert metrics.exposition().count(b"intertie_test_sites_total{") == metrics.MOST_SERIES + 1


def test_what_was_counted_is_exposed() -> None:
    counter = metrics.Counter("intertie_test_things_total", "Things", ("kind",))
    counter.inc(kind="a")
    counter.inc(2, kind="a")
    metrics.Gauge("intertie_test_level", "Level").set(4)
    metrics.Histogram("intertie_test_seconds", "Seconds").observe(0.003)
    text = metrics.exposition().decode()
    assert 'intertie_test_things_total{kind="a"} 3.0' in text
    assert "intertie_test_level 4.0" in text and 'intertie_test_seconds_bucket{le="0.005"} 1.0' in text
