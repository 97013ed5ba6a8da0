"""The one question that a source of readings answers."""

from __future__ import annotations

from typing import Protocol

from intertie.agent.sources.reading import Reading


class Source(Protocol):
    """`read` never hangs and never raises: what it could not find out, it says."""

    @property
    def name(self) -> str:
        """As it stands beside what could not be read: `nvml`, `dcgm` …"""
        ...

    @property
    def every_s(self) -> float:
        """Seconds between looks, at least; 0: with every beat of telemetry."""
        ...

    async def read(self) -> Reading: ...

    async def close(self) -> None: ...
