"""Several sources as one: each at its own pace, none waited for by the others. A device that two of them know is one device: the first that was
named speaks for it, and what it cannot say is filled in from the next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from intertie.agent.sources.exporter import Exporter, mapping_of
from intertie.agent.sources.port import Source
from intertie.agent.sources.reading import CardReading, Reading
from intertie.agent.sources.settings import TelemetrySource, check
from intertie.clock import Clock
from intertie.errors import Refused

# A beat waits so long for a slow source; its answer counts with a later beat, under its own time.
PATIENCE_S = 1.0
# Beyond so many of its own intervals, what a source said last is nothing any more.
STALE_INTERVALS = 3.0
MOST_SOURCES = 16
# Keys of a second source's devices begin above those of the first.
INDEX_STEP = 1_000_000


def build(settings: Sequence[TelemetrySource], folder: Path, clock: Clock, nvml: Source) -> Source:
    """What `site.toml` names, or NVML alone. `Refused` with the place of what cannot be a source or a mapping."""
    if not settings:
        return nvml
    if len(settings) > MOST_SOURCES:
        raise Refused(
            "agent.telemetry", f"site.toml names {len(settings)} telemetry sources, at most {MOST_SOURCES}", next_step="name fewer"
        )
    found: list[Source] = []
    for place, one in enumerate(settings):
        check(one, place)
        found.append(nvml if one.source == "nvml" else Exporter(one, mapping_of(one, folder), clock))
    return Several(found, clock)


@dataclass(slots=True)
class _Kept:
    source: Source
    place: int
    reading: Reading | None = None
    at: datetime | None = None
    at_s: float = 0.0
    asked_s: float | None = None
    """The loop's clock, as `at_s`."""
    task: asyncio.Task[Reading] | None = None


class Several:
    """`Source` over others."""

    name = "telemetry"
    every_s = 0.0

    def __init__(self, sources: Sequence[Source], clock: Clock, *, patience_s: float = PATIENCE_S) -> None:
        self._kept = [_Kept(source, place) for place, source in enumerate(sources)]
        self._clock, self._patience_s = clock, patience_s

    async def read(self) -> Reading:
        now_s = asyncio.get_running_loop().time()
        for one in self._kept:
            if one.task is None and (one.asked_s is None or now_s - one.asked_s >= one.source.every_s):
                one.asked_s = now_s
                one.task = asyncio.create_task(one.source.read(), name=f"telemetry-{one.source.name}")
        if tasks := [one.task for one in self._kept if one.task is not None]:
            await asyncio.wait(tasks, timeout=self._patience_s)
        for one in self._kept:
            self._take(one)
        return merged([self._said(one) for one in self._kept])

    def _take(self, one: _Kept) -> None:
        if one.task is None or not one.task.done():
            return
        task, one.task = one.task, None
        one.reading = Reading(error=f"our own fault: {err!r}"[:300]) if (err := task.exception()) is not None else task.result()
        one.at, one.at_s = self._clock.now(), asyncio.get_running_loop().time()

    def _said(self, one: _Kept) -> tuple[Source, Reading, datetime | None]:
        age_s = asyncio.get_running_loop().time() - one.at_s
        if one.reading is None:
            return one.source, Reading(error="not read yet"), None
        if age_s > max(STALE_INTERVALS * one.source.every_s, 2 * self._patience_s):
            return one.source, Reading(error=f"has not answered for {age_s:.0f} s"), one.at
        return one.source, one.reading, one.at

    async def close(self) -> None:
        tasks = [one.task for one in self._kept if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self._kept:
            await one.source.close()


def merged(said: Sequence[tuple[Source, Reading, datetime | None]]) -> Reading:
    """One reading of all. What no source could read stays unknown, source by source."""
    cards: dict[str, CardReading] = {}
    nameless: list[CardReading] = []
    for place, (source, reading, at) in enumerate(said):
        for card in reading.cards:
            own = msgspec.structs.replace(
                card,
                index=card.index + place * INDEX_STEP,
                source=source.name,
                read_at=at,
                every_s=source.every_s,
                driver=card.driver or reading.driver,
            )
            if own.uuid is None:
                nameless.append(own)
            else:
                cards[own.uuid] = _filled(cards[own.uuid], own) if own.uuid in cards else own
    nones = [reading.none for _, reading, _ in said if reading.none]
    drivers = {reading.driver for _, reading, _ in said if reading.driver}
    return Reading(
        cards=[*cards.values(), *nameless],
        none="; ".join(nones) if len(nones) == len(said) else "",
        troubles={source.name: reading.error for source, reading, _ in said if reading.error},
        driver=drivers.pop() if len(drivers) == 1 else "",
        notes=[f"{source.name}: {note}" for source, reading, _ in said for note in reading.notes],
    )


FILLED = ("name", "memory_total_mib", "memory_used_mib", "temperature_c", "power_w", "energy_mj", "processes", "in_use", "links")


def _filled(first: CardReading, second: CardReading) -> CardReading:
    """The first one's word, and the second's where it has none."""
    changes = {field: getattr(second, field) for field in FILLED if getattr(first, field) is None}
    if first.milli is None:
        changes |= {"utilisation_percent": second.utilisation_percent, "utilisation_milli": second.utilisation_milli}
    changes |= {"lost": first.lost or second.lost, "sliced": first.sliced or second.sliced, "parent": first.parent or second.parent}
    changes["errors"] = {**{k: why for k, why in second.errors.items() if k in ("xid", "healthy")}, **first.errors}
    return msgspec.structs.replace(first, **changes)
