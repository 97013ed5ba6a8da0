"""Traces: spans that join over the bus by `traceparent`, and valid trace ids in every process, exporter or not.

Spans are sent (OTLP over HTTP) only if `OTEL_EXPORTER_OTLP_ENDPOINT` is set, from a thread with a bounded queue that drops rather than
waits. What arrives from outside as `traceparent` is judged here and never raises: garbage is a new root, baggage is not carried (BR-134).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, StatusCode, TraceFlags

from intertie.observe.redact import clean

TRACEPARENT = "traceparent"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"

_SHAPE = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?\Z")
# version, ids and flags are 55 characters; a later version may add a little, never kilobytes.
_LONGEST = 128
# The queue of spans waiting for a collector that is away; dropped beyond it.
_QUEUE = 2_048
_EXPORT_TIMEOUT_MS = 3_000

AttributeValue = str | bool | int | float


class _Process:
    """The one tracer of this process; made on first use, replaced by `setup`."""

    provider: TracerProvider | None = None
    tracer: trace.Tracer | None = None
    """Of the provider: asking it for one at each span costs more than the span."""


def setup(service: str, *, version: str = "0", environ: Mapping[str, str] | None = None, exporter: SpanExporter | None = None) -> None:
    """Start tracing as `service`. Without an endpoint nothing is recorded, and ids still join across processes.

    `OTEL_TRACES_SAMPLER_ARG` is the share of new traces that is recorded (1 by default); a trace begun elsewhere follows its parent.
    """
    shutdown()
    given = environ or {}
    sending = exporter or (_otlp() if given.get(ENDPOINT) else None)
    root: Sampler = TraceIdRatioBased(_ratio(given.get("OTEL_TRACES_SAMPLER_ARG", "1"))) if sending else ALWAYS_OFF
    provider = TracerProvider(
        sampler=ParentBased(root),
        resource=Resource({"service.name": service, "service.version": version}),
        shutdown_on_exit=False,
    )
    if sending:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider.add_span_processor(
            BatchSpanProcessor(sending, max_queue_size=_QUEUE, schedule_delay_millis=500, export_timeout_millis=_EXPORT_TIMEOUT_MS)
        )
    _Process.provider, _Process.tracer = provider, provider.get_tracer("intertie")


def shutdown() -> None:
    """Send what waits, for at most a few seconds, and stop."""
    provider, _Process.provider, _Process.tracer = _Process.provider, None, None
    if provider is not None:
        provider.force_flush(_EXPORT_TIMEOUT_MS)
        provider.shutdown()


def _otlp() -> SpanExporter | None:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        from intertie.observe import log

        log.get("observe").warning("traces are not sent: the exporter is not installed", next_step="pip install 'intertie[hub]'")
        return None
    return OTLPSpanExporter(timeout=_EXPORT_TIMEOUT_MS / 1_000)


def _ratio(text: str) -> float:
    try:
        return min(1.0, max(0.0, float(text)))
    except ValueError:
        return 1.0


def _tracer() -> trace.Tracer:
    if _Process.tracer is None:
        setup("intertie")
    assert _Process.tracer is not None
    return _Process.tracer


def parse(value: object) -> SpanContext | None:
    """The context that a `traceparent` names, or None: not a string, wrong shape, zeros, far too long."""
    if not isinstance(value, str) or len(value) > _LONGEST:
        return None
    return _parse(value.strip().lower())


@lru_cache(maxsize=1_024)
def _parse(text: str) -> SpanContext | None:
    found = _SHAPE.match(text)
    if not found:
        return None
    context = SpanContext(int(found[1], 16), int(found[2], 16), is_remote=True, trace_flags=TraceFlags(int(found[3], 16) & 1))
    return context if context.is_valid else None


def spell(context: SpanContext) -> str:
    """`traceparent` of a context."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"


def traceparent() -> str:
    """What to send along now; empty outside any span."""
    context = trace.get_current_span().get_span_context()
    return spell(context) if context.is_valid else ""


def trace_id() -> str:
    """The current trace, 32 hex digits; empty outside any span."""
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


@contextmanager
def span(
    name: str,
    attributes: Mapping[str, AttributeValue] | None = None,
    *,
    parent: object = None,
    links: Sequence[object] = (),
    new_root: bool = False,
) -> Iterator[Span]:
    """One piece of work, named `<room> <verb>`: never with an id in the name.

    `parent` and `links` are `traceparent` texts as they came, good or bad: a bad parent is a new root, a bad link is none. Without `parent`
    the current span is the parent, unless `new_root`. What is raised inside marks the span and goes on.
    """
    remote = parse(parent)
    context: Context | None = None
    if remote is not None:
        context = trace.set_span_in_context(NonRecordingSpan(remote), Context())
    elif parent is not None or new_root:
        context = Context()
    linked = [trace.Link(target) for target in map(parse, links) if target is not None]
    cleaned = {key: _attribute(key, value) for key, value in (attributes or {}).items()}
    started = _tracer().start_span(name, context=context, attributes=cleaned, links=linked)
    try:
        with trace.use_span(started, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            yield started
    except Exception as error:
        # The text of an error may hold anything; its kind and code never do.
        started.set_status(StatusCode.ERROR, str(getattr(error, "code", type(error).__name__)))
        raise
    finally:
        started.end()


def _attribute(name: str, value: AttributeValue) -> AttributeValue:
    cleaned = clean(value, name)
    return cleaned if isinstance(cleaned, str | bool | int | float) else str(cleaned)
