"""What one look at a machine's devices found. Every source speaks these two structs; None is "could not be read", never zero."""

from __future__ import annotations

from datetime import datetime

import msgspec

# Readings outside these are the source's mistakes, not measurements (BR-105); they are dropped, never clipped.
PERCENT = (0, 100)
CELSIUS = (-40, 150)
MILLIWATT = (0, 5_000_000)
# Memory of one device; no card has a tenth of it.
MIB = (0, 16 * 1024 * 1024)


class CardReading(msgspec.Struct, frozen=True, kw_only=True):
    """One device: a card, or a slice of one (`parent` is then the card's id). None: could not be read; `errors` says why, by metric."""

    index: int
    """The source's own key of it; a card of an exporter and a slice have one that no driver counts."""
    uuid: str | None = None
    name: str | None = None
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    utilisation_percent: int | None = None
    utilisation_milli: int | None = None
    """Thousandths of the device, where a source knows it finer than in percent."""
    temperature_c: int | None = None
    power_w: float | None = None
    energy_mj: int | None = None
    """A counter that begins anew with the driver."""
    pids: list[int] | None = None
    processes: int | None = None
    """How many, where a source counts them and cannot name them."""
    in_use: bool | None = None
    """By what its mapping calls idle, where a source knows no processes; None: nobody can say."""
    lost: bool = False
    parent: str | None = None
    sliced: bool = False
    """It is cut into slices, which are devices of their own: never lent beside them."""
    unified: bool = False
    """It has no memory of its own but the host's."""
    links: int | None = None
    """Active links to other cards (NVLink)."""
    driver: str = ""
    source: str = ""
    read_at: datetime | None = None
    """When it was read, this host's wall clock; None: just now."""
    every_s: float = 0.0
    """Seconds between looks of its source; 0: with every beat."""
    errors: dict[str, str] = {}

    @property
    def milli(self) -> int | None:
        """Utilisation in thousandths."""
        if self.utilisation_milli is not None:
            return self.utilisation_milli
        return None if self.utilisation_percent is None else self.utilisation_percent * 10


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """All devices that a source sees; `none` says why there are none (no library, no driver), which is an answer, not a fault."""

    cards: list[CardReading] = []
    none: str = ""
    error: str = ""
    """Why nothing could be read. What was known before is then unknown: neither gone nor free."""
    troubles: dict[str, str] = {}
    """By source, where several were read."""
    driver: str = ""
    notes: list[str] = []
    """What was set aside and why; told once in the log."""


def ranged(value: int, bounds: tuple[int, int]) -> int:
    """The value, or `ValueError` for what no device can say."""
    low, high = bounds
    if not low <= value <= high:
        raise ValueError(f"impossible reading {value}")
    return value
