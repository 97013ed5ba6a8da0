"""Who holds which device, and what a pool is seen to hold. Never two holders: the table of the journal refuses a second one too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from intertie.agent.core.model import OPEN, Attempt
from intertie.contracts.site import Device, DeviceKind, DeviceObserved, DeviceState, PoolInventory, PoolProfile
from intertie.ids import AttemptId, DeviceId, PoolName

Key = tuple[PoolName, DeviceId]


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool as this site runs it: what was declared, and the devices that are in it."""

    profile: PoolProfile
    devices: Sequence[Device]

    @property
    def name(self) -> PoolName:
        return self.profile.pool

    @property
    def kind(self) -> DeviceKind:
        return DeviceKind.SLOT if self.profile.accelerator == "none" else DeviceKind.GPU


@dataclass(slots=True)
class Holds:
    """Devices and their holders. A claim reserves until the work has ended or was given up."""

    holder: dict[Key, AttemptId] = field(default_factory=dict)

    @classmethod
    def of(cls, attempts: Iterable[Attempt]) -> Holds:
        holds = cls()
        for attempt in attempts:
            if attempt.state in OPEN:
                holds.take(attempt)
        return holds

    def busy(self, pool: PoolName, devices: Iterable[DeviceId], but: AttemptId | None = None) -> list[DeviceId]:
        """Those of `devices` that someone (else) holds."""
        return [device for device in devices if self.holder.get((pool, device), but) != but]

    def take(self, attempt: Attempt) -> None:
        """Reserve all devices of an attempt, or none."""
        if taken := self.busy(attempt.pool, attempt.devices, attempt.id):
            holders = {device: self.holder[(attempt.pool, device)] for device in taken}
            raise AssertionError(f"{attempt.id} would be a second holder of {holders}")
        for device in attempt.devices:
            self.holder[(attempt.pool, device)] = attempt.id

    def release(self, attempt: Attempt) -> None:
        """Give back what this attempt holds; harmless if it holds nothing."""
        for device in attempt.devices:
            if self.holder.get((attempt.pool, device)) == attempt.id:
                del self.holder[(attempt.pool, device)]


def state_of(
    pool: PoolName,
    device: Device,
    holds: Holds,
    local: Mapping[AttemptId, bool],
    observed: Mapping[DeviceId, DeviceState],
) -> DeviceState:
    """What holds a device now. A holder of ours is told before a stranger on the same card, a lost card before any holder."""
    seen = observed.get(device.id, DeviceState.FREE if device.kind is DeviceKind.SLOT else DeviceState.UNKNOWN)
    if seen is DeviceState.LOST:
        return seen
    holder = holds.holder.get((pool, device.id))
    if holder is not None:
        return DeviceState.LOCAL if local.get(holder, False) else DeviceState.OURS
    return seen


def inventory(
    pools: Iterable[Pool], attempts: Mapping[AttemptId, Attempt], holds: Holds, observed: Mapping[DeviceId, DeviceState], *, paused: bool
) -> list[PoolInventory]:
    """Each pool as it is now. Local work counts in `running` and `waiting`, and is never named."""
    local = {attempt.id: attempt.local is not None for attempt in attempts.values()}
    found: list[PoolInventory] = []
    for pool in pools:
        here = [attempt for attempt in attempts.values() if attempt.pool == pool.name]
        found.append(
            PoolInventory(
                pool=pool.name,
                devices=[DeviceObserved(device=d, state=state_of(pool.name, d, holds, local, observed)) for d in pool.devices],
                running=sum(attempt.state in OPEN for attempt in here),
                waiting=sum(attempt.state == "waiting" for attempt in here),
                accepting=not paused,
            )
        )
    return found


Chosen = tuple[Pool, list[DeviceId]]


def choose(pools: Iterable[Pool], kind: DeviceKind, count: int, holds: Holds, observed: Mapping[DeviceId, DeviceState]) -> Chosen | None:
    """Devices for local work: the first pool of that kind with enough that are free and well; None if it must wait."""
    for pool in pools:
        if pool.kind is not kind:
            continue
        free = [d.id for d in pool.devices if state_of(pool.name, d, holds, {}, observed) is DeviceState.FREE]
        if len(free) >= count:
            return pool, free[:count]
    return None
