"""What a site's pools hold, taken from its own report. A card offered in two modes never counts twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from intertie.contracts.site import DeviceKind, PoolInventory, PoolRecord
from intertie.ids import DeviceId, PoolName

# A site's pools in one report; an agent that lists more is not describing pools.
MOST_POOLS = 256


@dataclass(frozen=True, slots=True)
class Taken:
    """A report after the rules: what counts for each pool, and what does not."""

    pools: Mapping[PoolName, PoolInventory]
    doubled: Mapping[DeviceId, tuple[PoolName, PoolName]] = field(default_factory=dict)
    """Card → (pool that keeps it, pool in which it does not count)."""
    undeclared: Sequence[PoolName] = ()
    """Pools of the report that no profile declares: they count for nothing."""


def take(
    report: Sequence[PoolInventory], held: Mapping[PoolName, PoolInventory | None], named: Mapping[DeviceId, PoolName] | None = None
) -> Taken:
    """Judge a report against what each declared pool held before (`held` names every declared pool of the site).

    A GPU that stands in two pools counts in the one whose declaration names it (`named`), else in the one that already held it, else in the one
    reported first. Slots are numbered inside their pool, so equal names are not the same slot.
    """
    reported = {inventory.pool: inventory for inventory in report[:MOST_POOLS]}
    own = {device: pool for device, pool in (named or {}).items() if pool in held}
    owner = {**_owners(reported, held), **own}
    doubled: dict[DeviceId, tuple[PoolName, PoolName]] = {}
    counted: dict[PoolName, PoolInventory] = {}
    for pool, inventory in reported.items():
        if pool not in held:
            continue
        kept = []
        for observed in inventory.devices:
            keeper = owner.get(observed.device.id, pool)
            if observed.device.kind is DeviceKind.GPU and keeper != pool:
                doubled[observed.device.id] = (keeper, pool)
            else:
                kept.append(observed)
        counted[pool] = msgspec.structs.replace(inventory, devices=kept)
    return Taken(pools=counted, doubled=doubled, undeclared=[pool for pool in reported if pool not in held])


def _owners(reported: Mapping[PoolName, PoolInventory], held: Mapping[PoolName, PoolInventory | None]) -> Mapping[DeviceId, PoolName]:
    """Which pool each reported card counts in."""
    owner: dict[DeviceId, PoolName] = {}
    for pool, inventory in reported.items():
        if pool not in held:
            continue
        for device in _cards(inventory):
            if device not in owner or (device in _cards(held[pool]) and device not in _cards(held[owner[device]])):
                owner[device] = pool
    return owner


def _cards(inventory: PoolInventory | None) -> list[DeviceId]:
    if inventory is None:
        return []
    return [observed.device.id for observed in inventory.devices if observed.device.kind is DeviceKind.GPU]


def apply(record: PoolRecord, inventory: PoolInventory, *, at: datetime) -> PoolRecord:
    """The pool's record with this inventory; the same record if it is older than the one held. The version grows only if the facts differ."""
    if record.inventory_at is not None and at < record.inventory_at:
        return record
    if inventory == record.inventory:
        return msgspec.structs.replace(record, inventory_at=at)
    return msgspec.structs.replace(record, inventory=inventory, inventory_at=at, version=record.version + 1)
