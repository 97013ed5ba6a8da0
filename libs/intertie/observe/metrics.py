"""Metrics with bounded labels, on prometheus-client where it is installed (the hub) and nowhere where it is not (the agent's base install).

A label that can take any value (job, attempt, tenant, path) grows memory without end (field case BR-135), so only the names below are
taken, and each metric keeps at most `MOST_SERIES` series: what is beyond goes to one series named `overflow`, and a log line says so.
Nothing that is billed is ever read from a metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from intertie.observe import log

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

LABELS = frozenset(
    "service site pool lane state kind code reason outcome verb noun stream consumer direction dependency mode phase class room".split()
)
# Sites × lanes of a large federation; far below what hurts a Prometheus.
MOST_SERIES = 1_000
OVERFLOW = "overflow"

# Seconds: from one NATS round trip on a machine to one lane beat.
BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class _Series:
    """Which label values a metric has seen."""

    def __init__(self, name: str, labels: Sequence[str]) -> None:
        if wrong := [label for label in labels if label not in LABELS]:
            raise ValueError(f"metric {name}: label {wrong[0]!r} is not bounded; use one of {', '.join(sorted(LABELS))}")
        self.name = name
        self.labels = tuple(labels)
        self._seen: set[tuple[str, ...]] = set()

    def values(self, given: dict[str, str]) -> tuple[str, ...]:
        key = tuple(given[label] for label in self.labels)
        if key in self._seen:
            return key
        if len(self._seen) >= MOST_SERIES:
            if (overflow := (OVERFLOW,) * len(self.labels)) not in self._seen:
                self._seen.add(overflow)
                log.get("observe").warning("a metric has too many series", metric=self.name, limit=MOST_SERIES)
            return overflow
        self._seen.add(key)
        return key


class Counter:
    """Something that only grows; the name ends in `_total`."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self._series = _Series(name, labels)
        self._counts: dict[tuple[str, ...], float] = {}
        self._metric = None
        if _installed():
            from prometheus_client import Counter as Made

            self._metric = Made(name, text, list(labels), registry=registry())

    def inc(self, amount: float = 1.0, **labels: str) -> None:
        key = self._series.values(labels)
        self._counts[key] = self._counts.get(key, 0.0) + amount
        if self._metric is not None:
            (self._metric.labels(*key) if key else self._metric).inc(amount)

    def value(self, **labels: str) -> float:
        """What was counted, for a status page or a test."""
        return self._counts.get(tuple(labels[label] for label in self._series.labels), 0.0)

    @property
    def total(self) -> float:
        return sum(self._counts.values())


class Gauge:
    """Something that goes up and down."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self._series = _Series(name, labels)
        self._metric = None
        if _installed():
            from prometheus_client import Gauge as Made

            self._metric = Made(name, text, list(labels), registry=registry())

    def set(self, value: float, **labels: str) -> None:
        key = self._series.values(labels)
        if self._metric is not None:
            (self._metric.labels(*key) if key else self._metric).set(value)


class Histogram:
    """How long things took, in seconds."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, buckets_s: Sequence[float] = BUCKETS_S) -> None:
        self._series = _Series(name, labels)
        self._metric = None
        if _installed():
            from prometheus_client import Histogram as Made

            self._metric = Made(name, text, list(labels), buckets=list(buckets_s), registry=registry())

    def observe(self, seconds: float, **labels: str) -> None:
        key = self._series.values(labels)
        if self._metric is not None:
            (self._metric.labels(*key) if key else self._metric).observe(seconds)


@lru_cache(maxsize=1)
def _installed() -> bool:
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        return False
    return True


@lru_cache(maxsize=1)
def registry() -> CollectorRegistry:
    """This process's own registry: nothing of a library's comes in by itself."""
    from prometheus_client import CollectorRegistry

    return CollectorRegistry(auto_describe=True)


def exposition() -> bytes:
    """Everything in Prometheus' text format; empty where prometheus-client is not installed."""
    if not _installed():
        return b""
    from prometheus_client import generate_latest

    return generate_latest(registry())
