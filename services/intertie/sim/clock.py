"""A host's three clocks, made of virtual time: MONOTONIC stands still in a suspend, BOOTTIME goes on in it, REALTIME can be stepped; a paused
virtual machine stops all three. Two hosts agree on nothing: each has its offset, its rate and its boot."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from intertie.agent.core.model import Moment

# Two minutes before a month ends in the settlement time zone: every run passes a border of periods.
START = datetime(2026, 11, 30, 15, 58, tzinfo=UTC)
# How long ago it was switched on when a run begins, and what a boot takes.
UP_S, BOOT_S = 1_000.0, 5.0


class HostClock:
    """`intertie.clock.Clock`. `rate`: seconds of this host per second of virtual time, within NTP's 500 ppm of 1."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, offset_s: float = 0.0, rate: float = 1.0, boots: int = 1) -> None:
        self._loop = loop
        self.rate = rate
        self._read_at = loop.time()
        self._wall_s = self._read_at * rate + offset_s
        self._boot_s = self._monotonic_s = UP_S
        self._stopped = self._suspended = 0
        self.boots = boots

    def _passed_s(self) -> float:
        """Seconds of this host since the clocks were last set: none while all of it stands still."""
        return 0.0 if self._stopped else (self._loop.time() - self._read_at) * self.rate

    def _settle(self) -> None:
        """Carry what has passed into the clocks, before what they run by changes."""
        passed_s = self._passed_s()
        self._wall_s += passed_s
        self._boot_s += passed_s
        self._monotonic_s += 0.0 if self._suspended else passed_s
        self._read_at = self._loop.time()

    # --- read ---

    @property
    def kernel_boot(self) -> str:
        return f"boot-{self.boots}"

    def moment(self) -> Moment:
        return Moment(self.now(), self.boot_s(), self.kernel_boot)

    def now(self) -> datetime:
        return START + timedelta(seconds=self._wall_s + self._passed_s())

    def monotonic_s(self) -> float:
        return self._monotonic_s + (0.0 if self._suspended else self._passed_s())

    def boot_s(self) -> float:
        return self._boot_s + self._passed_s()

    # --- what happens to them ---

    def step(self, seconds: float) -> None:
        """The wall clock alone, as NTP or a person would."""
        self._wall_s += seconds

    def suspend(self, by: int) -> None:
        """The machine sleeps (1) or wakes (-1); its real-time clock and BOOTTIME go on. One that was started anew meanwhile is awake already."""
        self._settle()
        self._suspended = max(0, self._suspended + by)

    def stop(self, by: int) -> None:
        """A virtual machine is paused (1) or goes on (-1), and never knows. One that was started anew meanwhile goes on already."""
        self._settle()
        self._stopped = max(0, self._stopped + by)

    def reboot(self, *, rtc_s: float = 0.0) -> None:
        """`rtc_s`: how wrong the real-time clock is that the new boot begins with."""
        self._settle()
        self._wall_s += rtc_s
        self._boot_s = self._monotonic_s = BOOT_S
        self._suspended = self._stopped = 0
        self.boots += 1
