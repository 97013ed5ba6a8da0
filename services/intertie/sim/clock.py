"""A host's three clocks, made of virtual time. Two hosts agree on nothing: each has its offset, its rate and its boot."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

START = datetime(2026, 12, 1, 9, 0, tzinfo=UTC)


class HostClock:
    """`intertie.clock.Clock`. `rate`: seconds of this host per second of virtual time, within NTP's 500 ppm of 1."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, offset_s: float = 0.0, rate: float = 1.0) -> None:
        self._loop = loop
        self.offset_s = offset_s
        self.rate = rate
        self._booted = loop.time() - 1_000.0
        self.boots = 1

    def now(self) -> datetime:
        return START + timedelta(seconds=self._loop.time() * self.rate + self.offset_s)

    def monotonic_s(self) -> float:
        return (self._loop.time() - self._booted) * self.rate

    def boot_s(self) -> float:
        return self.monotonic_s()

    def step(self, seconds: float) -> None:
        """The wall clock alone, as NTP or a person would."""
        self.offset_s += seconds

    def reboot(self) -> None:
        self._booted = self._loop.time() - 5.0
        self.boots += 1
