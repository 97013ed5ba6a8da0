"""The owner's words about a pool of machines in `site.toml`, and what the head makes of its nodes' devices. Pure.

[machines]
listen = "10.0.0.5:7443"
slots = 8

[[data]]
path = "/srv/models"
tenants = ["acme"]
mode = "ro"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import msgspec

from intertie.agent.core.devices import Pool
from intertie.contracts.site import Device, DeviceKind, DeviceState, PoolProfile, plain_model
from intertie.ids import DeviceId


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one run may take of its machine, for each device that it holds; 0: no limit. Enforced by the cgroup hierarchy that the host has."""

    memory_mib: Annotated[int, msgspec.Meta(ge=0)] = 0
    cpus: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    pids: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Of the whole run, whatever it holds."""


class Container(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs run in this image, by this program; without it they are processes."""

    runtime: Annotated[str, msgspec.Meta(pattern="^(apptainer|singularity)$")]
    """What a daemon would start (docker, podman's service) is below no supervisor of ours and would outlive its stop: it is not offered."""
    image: Annotated[str, msgspec.Meta(pattern="^/[^\\x00]+$")]
    """A file of the owner's, so that what runs is what was approved."""


class MachinesRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[machines]`: this site is a pool of machines, and its agent is their head."""

    listen: str = ""
    """HOST:PORT where nodes dial; empty: this machine alone. It is the one port that a site opens, and only to its own machines."""
    slots: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """CPU slots of the head itself; None: its CPUs. A node says its own when it joins."""
    limits: Limits = Limits()
    container: Container | None = None


class DataFolder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[data]]`: a folder that these tenants' jobs may read (`ro`) or write (`rw`). Where any is declared, it is out of sight of all others."""

    path: Annotated[str, msgspec.Meta(pattern="^/[^\\x00]+$")]
    tenants: list[str] = []
    """Empty: every tenant."""
    mode: Annotated[str, msgspec.Meta(pattern="^(ro|rw)$")] = "ro"

    def is_for(self, tenant: str | None) -> bool:
        """The owner's own local work (None) sees the machine as it is."""
        return tenant is not None and (not self.tenants or tenant in self.tenants)


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """What a node has."""

    node: str
    slots: Sequence[Device]
    gpus: Sequence[Device]


def pools_of(profiles: Iterable[PoolProfile], own: NodeDevices, nodes: Iterable[NodeDevices]) -> list[Pool]:
    """Each declared pool with the devices of all nodes, the head's own first, at most as many as were declared."""
    everybody = [own, *nodes]
    pools: list[Pool] = []
    for profile in profiles:
        if profile.accelerator == "none":
            devices = [device for one in everybody for device in one.slots]
        else:
            devices = [gpu for one in everybody for gpu in one.gpus if plain_model(gpu.model) == plain_model(profile.accelerator)]
        # A card that two nodes claim to have is the first one's: it must not be held twice.
        once = list({device.id: device for device in reversed(devices)}.values())[::-1]
        pools.append(Pool(profile, once[: profile.count]))
    return pools


def own_slots(count: int, node: str) -> list[Device]:
    return [Device(id=DeviceId(f"slot-{number}"), kind=DeviceKind.SLOT, node=node) for number in range(1, count + 1)]


@dataclass(frozen=True, slots=True)
class NodeWord:
    """What is known of a node when the head looks."""

    node: str
    reachable: bool
    cordoned: bool
    states: Mapping[DeviceId, DeviceState]
    """As it said itself, in its last sample."""
    reason: str = ""
    since: datetime | None = None


def states_of(devices: Iterable[Device], words: Mapping[str, NodeWord], own: str) -> dict[DeviceId, DeviceState]:
    """The devices of nodes as they may be used now. A node that is not heard has unknown devices, whatever it said last (law 2)."""
    found: dict[DeviceId, DeviceState] = {}
    for device in devices:
        word = words.get(device.node)
        if device.node == own and word is None:
            continue
        if word is None or not word.reachable:
            found[device.id] = DeviceState.UNKNOWN
        elif word.cordoned:
            found[device.id] = DeviceState.FOREIGN
        else:
            found[device.id] = word.states.get(device.id, DeviceState.UNKNOWN)
    return found


def notes_of(devices: Iterable[Device], words: Mapping[str, NodeWord]) -> dict[DeviceId, str]:
    """Why a device is not to be had, in words."""
    notes: dict[DeviceId, str] = {}
    for device in devices:
        word = words.get(device.node)
        if word is None:
            continue
        if not word.reachable:
            since = f" since {word.since.isoformat(timespec='seconds')}" if word.since else ""
            notes[device.id] = f"node {device.node} is not heard{since}"
        elif word.cordoned:
            notes[device.id] = f"node {device.node} is cordoned" + (f": {word.reason}" if word.reason else "")
    return notes
