"""Other machines' devices as their own agents tell them: samples as readings, for the use of work that runs there."""

from __future__ import annotations

from collections.abc import Iterable

from intertie.agent.sources.reading import CardReading
from intertie.contracts.site import DeviceKind, DeviceState
from intertie.contracts.telemetry import NodeSample
from intertie.ids import DeviceId


def cards_of(samples: Iterable[NodeSample]) -> tuple[dict[DeviceId, CardReading], frozenset[DeviceId]]:
    """(readings, devices with a process of somebody else's). One sample counts once, at its own time and pace; what a node could not read is not here."""
    cards: dict[DeviceId, CardReading] = {}
    shared: set[DeviceId] = set()
    for sample in samples:
        for seen in sample.devices:
            if seen.kind is not DeviceKind.GPU or seen.state in (DeviceState.LOST, DeviceState.UNKNOWN):
                continue
            cards[seen.id] = CardReading(
                index=seen.index or 0,
                uuid=seen.id,
                name=seen.model or None,
                memory_total_mib=seen.memory_total_mib,
                memory_used_mib=seen.memory_used_mib,
                utilisation_percent=seen.utilisation_percent
                if seen.utilisation_percent is None or seen.utilisation_percent <= 100
                else None,
                read_at=seen.sampled or sample.sampled,
                every_s=max(seen.every_s, sample.every_s),
            )
            if seen.foreign_processes:
                shared.add(seen.id)
    return cards, frozenset(shared)
