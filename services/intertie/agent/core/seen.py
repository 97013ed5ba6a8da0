"""What the site's own tools say that its pools have, for the registry: told when the hardware changes, not when a look fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from intertie.agent.core.devices import Pool
from intertie.agent.sources.reading import CardReading
from intertie.contracts.observed import PoolSeen
from intertie.contracts.site import Device, DeviceKind
from intertie.ids import DeviceId, PoolName

MOST_MODELS = 32


def pools_seen(
    pools: Iterable[Pool],
    known: Iterable[Device],
    cards: Mapping[DeviceId, CardReading],
    before: Mapping[PoolName, PoolSeen],
    *,
    unread: Mapping[DeviceId, Collection[str]] = {},  # noqa: B006  # read only
    driver: str,
    agent_version: str,
) -> dict[PoolName, PoolSeen]:
    """Of each pool. What this look could not read stays as it was read before."""
    pools, known = list(pools), list(known)
    inside = {device.id for pool in pools for device in pool.devices}
    others = _counted(device.model for device in known if device.id not in inside)
    found: dict[PoolName, PoolSeen] = {}
    for pool in pools:
        if pool.kind is not DeviceKind.GPU:
            found[pool.name] = PoolSeen(agent_version=agent_version)
            continue
        was = before.get(pool.name, PoolSeen())
        memories = [device.memory_mib for device in pool.devices if device.memory_mib]
        links = [card.links for device in pool.devices if (card := cards.get(device.id)) is not None and card.links is not None]
        found[pool.name] = PoolSeen(
            models=_counted(device.model for device in pool.devices),
            others=others,
            memory_mib=min(memories) if memories else was.memory_mib,
            links=min(links) if links else was.links,
            unread=_counted(metric for device in pool.devices for metric in unread.get(device.id, ())),
            driver=driver[:128] or was.driver,
            agent_version=agent_version[:128],
        )
    return found


def _counted(models: Iterable[str]) -> dict[str, int]:
    """By name, so that the same hardware is the same words."""
    return dict(sorted(Counter(model[:128] for model in models if model).items())[:MOST_MODELS])
