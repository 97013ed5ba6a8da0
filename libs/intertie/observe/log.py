"""Logs: one line of JSON each, or readable ones on a terminal. Every line passes the redaction, ours and those of libraries alike.

`get(name)` may be called at import time; `setup()` once per process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import TextIO, cast

import structlog
from opentelemetry import trace
from structlog.typing import FilteringBoundLogger, WrappedLogger

from intertie.observe.redact import clean, scrub

# Libraries that repeat themselves while a dependency is away; our own lines say it once, with the next step.
_QUIET = ("nats", "asyncio", "aiohttp.access", "opentelemetry.sdk", "opentelemetry.exporter", "urllib3")


def get(name: str) -> FilteringBoundLogger:
    """A logger; `name` is the room (`bus.nats`)."""
    return cast(FilteringBoundLogger, structlog.get_logger(room=name))


def redaction(_logger: WrappedLogger, _method: str, event: MutableMapping[str, object]) -> MutableMapping[str, object]:
    """structlog processor: every value cleaned."""
    return {key: scrub(str(value)) if key in ("event", "exception") else clean(value, key) for key, value in event.items()}


def with_trace(_logger: WrappedLogger, _method: str, event: MutableMapping[str, object]) -> MutableMapping[str, object]:
    """structlog processor: the trace that this line belongs to."""
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event.setdefault("trace_id", f"{context.trace_id:032x}")
    return event


def setup(service: str, level: str = "INFO", *, stream: TextIO | None = None, pretty: bool | None = None) -> None:
    """Send everything to `stream` (stderr), from `level` up, JSON unless it is a terminal. Calling it again replaces the first."""
    out = stream or sys.stderr
    number = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    readable = out.isatty() if pretty is None else pretty

    def of_service(_logger: WrappedLogger, _method: str, event: MutableMapping[str, object]) -> MutableMapping[str, object]:
        event.setdefault("service", service)
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        of_service,
        with_trace,
        structlog.processors.format_exc_info,
        redaction,
    ]
    last: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=out.isatty()) if readable else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    structlog.configure(
        processors=[*shared, last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), _logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(number, logging.WARNING))
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.CRITICAL if name in ("nats", "opentelemetry.exporter") else logging.WARNING)


def _logger_name(_logger: WrappedLogger, _method: str, event: MutableMapping[str, object]) -> MutableMapping[str, object]:
    record = event.get("_record")
    if isinstance(record, logging.LogRecord):
        event.setdefault("room", record.name)
    return event
