"""The trace that surrounds a write, in the two forms the store keeps: a `traceparent` header and a trace id."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()


def traceparent() -> str:
    """W3C `traceparent` of the current span; empty if there is none."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent", "")


def trace_id() -> str:
    """32 hex digits of the current trace; empty if there is none."""
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""
