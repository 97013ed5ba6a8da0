"""Cards that are offered in two ways never count twice: what pools name, lend and offer is judged together, before it is believed. Pure.

What a site's report says afterwards is judged in `inventory`: a card counts in one pool whatever was declared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from intertie.contracts.site import AccessMode, DeviceKind, Freshness, PoolProfile, PoolRecord
from intertie.errors import Refused
from intertie.ids import DeviceId, PoolName

NO_ACCELERATOR = "none"


def lent(profile: PoolProfile) -> int:
    """Devices that the hub may place work on: none where the owner decides each request."""
    return profile.lendable.devices if profile.mode is AccessMode.MANAGED else 0


def objection(profile: PoolProfile, others: Sequence[PoolRecord], *, offered: int) -> Refused | None:
    """Why this declaration would count a card twice, beside the site's other pools and what offerings take of this one; None if it does not."""
    return _named(profile, others) or share_objection(profile, offered) or _beyond_what_is_seen(profile, others)


def _named(profile: PoolProfile, others: Sequence[PoolRecord]) -> Refused | None:
    if len(set(profile.devices)) != len(profile.devices) or len(profile.devices) > profile.count:
        text = f"names {len(profile.devices)} cards ({len(set(profile.devices))} different) of {profile.count}"
        return _refused("devices", profile, text, "name each card of the pool once, or none")
    for other in others:
        if other.pool != profile.pool and (both := sorted(set(profile.devices) & set(other.profile.devices))):
            text = f"names {', '.join(both[:4])}, which pool {other.pool} names too"
            return _refused("devices_twice", profile, text, f"take it out of one of the pools {profile.pool} and {other.pool}")
    return None


def share_objection(profile: PoolProfile, offered: int) -> Refused | None:
    """What is lent and what is offered are different cards."""
    if lent(profile) + offered > profile.count:
        text = f"lends {lent(profile)} and its offerings take {offered} at once, of {profile.count}"
        return _refused("offered", profile, text, f"lend at most {max(0, profile.count - offered)}, or offer less")
    return None


def _beyond_what_is_seen(profile: PoolProfile, others: Sequence[PoolRecord]) -> Refused | None:
    """Two pools of one model, neither with names, count the same cards if together they declare more than the site shows."""
    if profile.accelerator == NO_ACCELERATOR or profile.devices:
        return None
    same = [one for one in others if one.profile.accelerator.lower() == profile.accelerator.lower() and not one.profile.devices]
    same = [one for one in same if one.pool != profile.pool]
    if not same or any(one.freshness is not Freshness.FRESH or one.inventory is None for one in same):
        return None
    seen = len({device for one in [*same, *(each for each in others if each.pool == profile.pool)] for device in _cards(one)})
    declared = profile.count + sum(one.profile.count for one in same)
    if declared <= seen:
        return None
    text = f"and {', '.join(one.pool for one in same)} declare {declared} {profile.accelerator} together, the site shows {seen}"
    return _refused("overlap", profile, text, "name each pool's cards by UUID (devices = […]), or lower a count")


def _cards(record: PoolRecord) -> Iterable[DeviceId]:
    return (seen.device.id for seen in record.inventory.devices if seen.device.kind is DeviceKind.GPU) if record.inventory else ()


def named(pools: Iterable[PoolProfile]) -> Mapping[DeviceId, PoolName]:
    """Cards that a pool names: they are its own, whoever reports them."""
    return {device: profile.pool for profile in pools for device in profile.devices}


def _refused(what: str, profile: PoolProfile, text: str, next_step: str) -> Refused:
    return Refused(f"registry.profile.{what}", f"pool {profile.pool} {text}", next_step=next_step)
