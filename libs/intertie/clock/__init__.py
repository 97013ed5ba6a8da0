"""The only door to the machine's clocks. Shells ask here; cores are given `now` as an argument.

Three clocks, and which one to use:

- `now()` is wall-clock UTC: what people read, what money's periods are cut by. It may step.
- `monotonic_s()` measures waits inside one process. It stands still while the machine is suspended.
- `boot_s()` is CLOCK_BOOTTIME: durations that money or a lease hangs on. It counts suspend, and restarts at each boot,
  so a stored value is only comparable together with `kernel_boot()`.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """What a shell may ask about time."""

    def now(self) -> datetime:
        """Wall clock, UTC, aware."""
        ...

    def monotonic_s(self) -> float:
        """Seconds of CLOCK_MONOTONIC."""
        ...

    def boot_s(self) -> float:
        """Seconds of CLOCK_BOOTTIME."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic_s(self) -> float:
        return time.monotonic()

    def boot_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class ManualClock:
    """A clock that moves only when told: for tests and simulation. All three clocks advance together."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = start or datetime(2026, 1, 1, tzinfo=UTC)
        self._elapsed_s = 1_000.0

    def advance(self, seconds: float) -> None:
        """Move every clock forward."""
        self._now += timedelta(seconds=seconds)
        self._elapsed_s += seconds

    def step_wall(self, seconds: float) -> None:
        """Step the wall clock alone, as NTP or a person would."""
        self._now += timedelta(seconds=seconds)

    def now(self) -> datetime:
        return self._now

    def monotonic_s(self) -> float:
        return self._elapsed_s

    def boot_s(self) -> float:
        return self._elapsed_s


def kernel_boot() -> str:
    """The kernel's boot id: a CLOCK_BOOTTIME value, a pid or a go from another boot means nothing in this one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
