"""A pool behind a queue of the site's own lends rights to queue for one device each, not devices: how many there are, and how many are of use now.

What the site's own users hold, and what is on nodes that are down, makes so many rights `foreign` or `lost`: always such as nobody holds. Which
card a right becomes is said when its job starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from intertie.agent.adapters.port import Described, NativeNode
from intertie.agent.core.devices import Pool
from intertie.contracts.site import RIGHT, Device, DeviceKind, DeviceState, NativeLoad, PoolProfile, plain_model
from intertie.ids import DeviceId, PoolName


def rights(profile: PoolProfile) -> Pool:
    """As many as are lent. Their names are the pool's own: two pools of a site never share one."""
    slot = profile.accelerator == "none"
    devices = [
        Device(
            id=DeviceId(f"{RIGHT}{profile.pool}-{n}"),
            kind=DeviceKind.SLOT if slot else DeviceKind.GPU,
            model="" if slot else profile.accelerator,
            memory_mib=0 if slot else profile.memory_mib,
        )
        for n in range(1, min(profile.lendable.devices, profile.count) + 1)
    ]
    return Pool(profile, devices)


SLOTS = "slot"
"""The model of a line that counts a node's processors, where its cards have a line of their own."""


@dataclass(frozen=True, slots=True)
class Room:
    """Of one pool, in devices. None of them is more than the pool was declared to have."""

    usable: int
    foreign: int


def room(pool: Pool, told: Described, ours: int, alone: bool) -> Room:
    """`ours`: devices that run work of ours there now. `alone`: no other pool is in this cluster, so all that is foreign is in this one."""
    listed = any(node.model == SLOTS for node in told.nodes)
    nodes = [node for node in told.nodes if (node.model == SLOTS) == (listed and pool.kind is DeviceKind.SLOT) and _of(pool, node)]
    usable = sum(node.devices for node in nodes if node.usable)
    busy = sum(min(node.busy, node.devices) for node in nodes if node.usable)
    foreign = max(0, busy - ours, told.load.devices_busy if alone else 0)
    return Room(min(usable, pool.profile.count), min(foreign, usable))


def _of(pool: Pool, node: NativeNode) -> bool:
    """A node that names no model counts for every pool: what is not said is not held against it."""
    return pool.kind is DeviceKind.SLOT or not node.model or _plain(node.model) == _plain(pool.profile.accelerator)


def _plain(model: str) -> str:
    """Schedulers write `a100` where a driver says `A100-SXM4-80GB`: the first word decides."""
    return plain_model(model).lower().replace("_", "-").partition("-")[0].partition(" ")[0]


def states(pool: Pool, room: Room, held: Collection[DeviceId]) -> dict[DeviceId, DeviceState]:
    """What each right is worth now; the holder's own word comes before this for those that are held."""
    count = len(pool.devices)
    up = min(count, room.usable)
    free = min(up, max(0, room.usable - room.foreign))
    spare = [device.id for device in pool.devices if device.id not in held]
    taken = [device.id for device in pool.devices if device.id in held]
    # Rights that are held stand first: the site has let them in, whatever else it runs.
    order = [*taken, *spare]
    found = dict.fromkeys(order[:free], DeviceState.FREE)
    found |= dict.fromkeys(order[free:up], DeviceState.FOREIGN)
    found |= dict.fromkeys(order[up:], DeviceState.LOST)
    return {name: DeviceState.FREE if name in held else state for name, state in found.items()}


def loads(
    pools: Iterable[Pool], told: Described, rooms: Mapping[PoolName, Room], *, every_s: float, rpc_per_minute: float
) -> dict[PoolName, NativeLoad]:
    """By pool. Where nothing of the site's own runs, nothing of it is busy: processors beside our cards are ours."""
    return {
        pool.name: msgspec.structs.replace(
            told.load,
            devices_busy=rooms[pool.name].foreign if told.load.running else 0,
            observed_at=told.at,
            every_s=every_s,
            rpc_per_minute=rpc_per_minute,
        )
        for pool in pools
    }


def unseen(pools: Sequence[Pool]) -> dict[DeviceId, DeviceState]:
    """Before the first look nothing is known of any."""
    return {device.id: DeviceState.UNKNOWN for pool in pools for device in pool.devices}


def same_but_age(now: Mapping[PoolName, NativeLoad], before: Mapping[PoolName, NativeLoad]) -> bool:
    """Nothing has changed but when it was looked; how often, and what that costs, is about what it was."""

    def bare(loads: Mapping[PoolName, NativeLoad]) -> dict[PoolName, NativeLoad]:
        return {name: msgspec.structs.replace(load, observed_at=None, every_s=0.0, rpc_per_minute=0.0) for name, load in loads.items()}

    return bare(now) == bare(before) and all(
        _about(load.every_s, before[name].every_s) and _about(load.rpc_per_minute, before[name].rpc_per_minute)
        for name, load in now.items()
    )


def _about(now: float, before: float) -> bool:
    """Neither half as much more nor half as much less."""
    return before / 1.5 <= now <= before * 1.5
