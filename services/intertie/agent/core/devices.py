"""Who holds which device, and what a pool is seen to hold. Never two holders: the table of the journal refuses a second one too."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from intertie.agent.core.model import OPEN, Attempt, State
from intertie.agent.core.reserved import Note
from intertie.contracts.facts import SiteFacts
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
    """Devices and their holders. A claim reserves until the work has ended or was given up; what is still held by those whom it comes after,
    it inherits the moment they are gone."""

    holder: dict[Key, AttemptId] = field(default_factory=dict)
    heir: dict[Key, AttemptId] = field(default_factory=dict)
    """Who holds a device next, at once and before anybody else. At most one, and only of a device that has a holder."""

    @classmethod
    def of(cls, attempts: Iterable[Attempt]) -> Holds:
        holds = cls()
        todo = {attempt.id: attempt for attempt in attempts if attempt.state in OPEN and not attempt.over}
        while todo:
            ready = [attempt for attempt in todo.values() if not any(other in todo for other in attempt.after)]
            for attempt in ready or list(todo.values()):
                holds.take(todo.pop(attempt.id))
        return holds

    def busy(
        self, pool: PoolName, devices: Iterable[DeviceId], but: AttemptId | None = None, after: Collection[AttemptId] = ()
    ) -> list[DeviceId]:
        """Those of `devices` that someone (else) holds, or inherits from one of `after`."""
        return [device for device in devices if self._bars((pool, device), but, after)]

    def holders(self, pool: PoolName, devices: Iterable[DeviceId]) -> list[AttemptId]:
        """Whoever holds any of them, in the order of the devices."""
        return list(dict.fromkeys(self.holder[(pool, device)] for device in devices if (pool, device) in self.holder))

    def _bars(self, key: Key, who: AttemptId | None, after: Collection[AttemptId]) -> bool:
        now = self.holder.get(key)
        if now is None or now == who:
            return False
        return now not in after or self.heir.get(key, who) != who

    def take(self, attempt: Attempt) -> None:
        """Reserve all devices of an attempt, or none; those of its predecessors as their heir."""
        if taken := self.busy(attempt.pool, attempt.devices, attempt.id, attempt.after):
            holders = {device: self.holder[(attempt.pool, device)] for device in taken}
            raise AssertionError(f"{attempt.id} would be a second holder of {holders}")
        for device in attempt.devices:
            key = (attempt.pool, device)
            table = self.heir if self.holder.get(key, attempt.id) != attempt.id else self.holder
            table[key] = attempt.id

    def release(self, attempt: Attempt) -> None:
        """Give back what this attempt holds, to its heir if there is one; harmless if it holds nothing."""
        for device in attempt.devices:
            key = (attempt.pool, device)
            if self.heir.get(key) == attempt.id:
                del self.heir[key]
            if self.holder.get(key) == attempt.id:
                del self.holder[key]
                if (heir := self.heir.pop(key, None)) is not None:
                    self.holder[key] = heir


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
    pools: Iterable[Pool],
    attempts: Mapping[AttemptId, Attempt],
    holds: Holds,
    observed: Mapping[DeviceId, DeviceState],
    *,
    paused: bool,
    until: datetime | None = None,
    facts: SiteFacts | None = None,
    notes: Mapping[DeviceId, Note] | None = None,
) -> list[PoolInventory]:
    """Each pool as it is now. Local work counts in `running` and `waiting`, and is never named. `notes` say why a device is not to be had."""
    local = {attempt.id: attempt.local is not None for attempt in attempts.values()}
    found: list[PoolInventory] = []
    for pool in pools:
        here = [attempt for attempt in attempts.values() if attempt.pool == pool.name]
        found.append(
            PoolInventory(
                pool=pool.name,
                devices=[_observed(d, state_of(pool.name, d, holds, local, observed), (notes or {}).get(d.id)) for d in pool.devices],
                running=sum(attempt.state in OPEN for attempt in here),
                waiting=sum(attempt.state == "waiting" for attempt in here),
                accepting=not paused,
                paused_until=until,
                # They are the site's: said once.
                facts=None if found else facts,
            )
        )
    return found


def _observed(device: Device, state: DeviceState, note: Note | None) -> DeviceObserved:
    if note is None:
        return DeviceObserved(device=device, state=state)
    return DeviceObserved(device=device, state=state, reason=note.text, reserved_until=note.until)


Chosen = tuple[Pool, list[DeviceId]]


def choose(pools: Iterable[Pool], kind: DeviceKind, count: int, holds: Holds, observed: Mapping[DeviceId, DeviceState]) -> Chosen | None:
    """Devices for local work, all of one node: the first pool and node of that kind with enough that are free and well; None if it must wait."""
    for pool in pools:
        if pool.kind is not kind:
            continue
        by_node: dict[str, list[DeviceId]] = {}
        for d in pool.devices:
            if state_of(pool.name, d, holds, {}, observed) is DeviceState.FREE:
                by_node.setdefault(d.node, []).append(d.id)
        for free in by_node.values():
            if len(free) >= count:
                return pool, free[:count]
    return None


def displaceable(
    pools: Iterable[Pool],
    kind: DeviceKind,
    count: int,
    holds: Holds,
    attempts: Mapping[AttemptId, Attempt],
    observed: Mapping[DeviceId, DeviceState],
) -> list[AttemptId]:
    """Whose claims would have to go for the owner's own work: hub attempts that have not started, the newest first; empty if that is not enough.

    What runs is never asked for, nor what is inherited by somebody else.
    """
    for pool in pools:
        if pool.kind is not kind:
            continue
        free = {d.id for d in pool.devices if state_of(pool.name, d, holds, {}, observed) is DeviceState.FREE}
        well = {d.id for d in pool.devices if observed.get(d.id) not in (DeviceState.LOST, DeviceState.FOREIGN)}
        claims = sorted((a for a in attempts.values() if _unstarted_of(a, pool.name)), key=lambda a: a.id, reverse=True)
        chosen: list[AttemptId] = []
        for claim in claims:
            if len(free) >= count:
                break
            gained = {d for d in claim.devices if d in well and _alone((pool.name, d), claim.id, holds)}
            if gained:
                chosen.append(claim.id)
                free |= gained
        if len(free) >= count:
            return chosen
    return []


def _alone(key: Key, who: AttemptId, holds: Holds) -> bool:
    return holds.holder.get(key) == who and key not in holds.heir


def _unstarted_of(attempt: Attempt, pool: PoolName) -> bool:
    return attempt.pool == pool and attempt.local is None and attempt.state in (State.CLAIMED, State.STAGING)
