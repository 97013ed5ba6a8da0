"""What is seen of devices now: live telemetry, and the few things that the hub knows better than a sample that is a beat old.

A sample is live if it was both taken and received within the limit (its time corrected by the lane's clock offset). A stored last value, a
replayed one, or one from a clock that is wrong makes nothing eligible (LINK D25, field case BR-066). Where a site looks more seldom than that, the
limit follows its own interval, as far as the hub lets it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from intertie.contracts.site import DeviceState, PoolInventory
from intertie.contracts.telemetry import DeviceSample, NodeSample
from intertie.ids import DeviceId, PoolName, SiteName
from intertie.planner import DeviceView

# Five beats: a stalled host misses two or three; what is really lost is told by a sample, not by its absence.
LIVE_S = 5.0
# Two looks may fail; whoever looks every minute is believed for three.
INTERVALS = 3.0
# Beyond this nothing is live, however seldom its site looks: a scheduler's longest listing interval (BR-066) and two more.
LONGEST_LIVE_S = 360.0
# Nodes of one site; a site that says more is not believed further, so that no site can fill the hub's memory.
NODES_PER_SITE = 4_096
# Devices and slots of one node; no host has more, and all nodes of a site together stay within what a process can look through.
DEVICES_PER_NODE = 4_096
DEVICES_PER_SITE = 200_000

# A device that says free and is refused as busy: the site's own words contradict each other, and asking more often mends nothing.
LONGEST_REST_S = 60.0

Key = tuple[SiteName, PoolName, DeviceId]


@dataclass(frozen=True, slots=True)
class _Seen:
    sample: DeviceSample
    node: str
    sampled: datetime
    received_s: float
    """Monotonic clock of this process."""
    every_s: float = 0.0
    """Seconds between looks, as the site says."""


@dataclass(slots=True)
class Sight:
    """`*_s` arguments are this process's monotonic clock; `now` and samples are wall clocks, compared after correction."""

    live_s: float = LIVE_S
    _nodes: dict[tuple[SiteName, str], tuple[int, datetime]] = field(default_factory=dict)
    _seen: dict[Key, _Seen] = field(default_factory=dict)
    _of_node: dict[tuple[SiteName, str], tuple[Key, ...]] = field(default_factory=dict)
    """Keys of `_seen` by the node that last said them: a sample costs its own node's devices, not everybody's."""
    _count: dict[SiteName, int] = field(default_factory=dict)
    _freed: dict[Key, float] = field(default_factory=dict)
    _taken: dict[Key, tuple[float, int]] = field(default_factory=dict)
    """When the site last refused it as busy, and how often in a row."""

    def observe(self, site: SiteName, sample: NodeSample, received_s: float) -> bool:
        """Take a node's sample, unless a later one is held; True if the state of a device changed."""
        held = self._nodes.get((site, sample.node))
        if held is not None and (sample.sampled, sample.sequence) <= (held[1], held[0]):
            return False
        if held is None and sum(1 for known, _ in self._nodes if known == site) >= NODES_PER_SITE:
            return False
        known = self._of_node.get((site, sample.node), ())
        count = self._count.get(site, 0) - len(known) + len(sample.devices)
        if len(sample.devices) > DEVICES_PER_NODE or count > DEVICES_PER_SITE:
            return False
        self._nodes[(site, sample.node)] = (sample.sequence, sample.sampled)
        before = {key: seen for key in known if (seen := self._seen.get(key)) is not None and seen.node == sample.node}
        after = {
            (site, d.pool, d.id): _Seen(d, sample.node, d.sampled or sample.sampled, received_s, max(d.every_s, sample.every_s))
            for d in sample.devices
        }
        for key in before.keys() - after.keys():
            del self._seen[key]
        self._seen.update(after)
        self._of_node[(site, sample.node)] = tuple(after)
        self._count[site] = self._count.get(site, 0) - len(known) + len(after)
        return {k: s.sample.state for k, s in before.items()} != {k: s.sample.state for k, s in after.items()}

    def freed(self, keys: Iterable[Key], at_s: float) -> None:
        """An attempt gave these back, by the site's own word: an older sample that still says `ours` is out of date."""
        for key in keys:
            self._freed[key] = at_s
            self._taken.pop(key, None)

    def taken(self, keys: Iterable[Key], at_s: float) -> None:
        """The site refused these as busy: an older sample that still says `free` is out of date.

        A device that is refused again and again although its samples say `free` is asked ever more rarely: the site pays nothing, and the
        hub does not offer once a beat for ever.
        """
        for key in keys:
            self._taken[key] = (at_s, self._taken.get(key, (0.0, 0))[1] + 1)
            self._freed.pop(key, None)

    def devices(
        self, site: SiteName, pool: PoolName, inventory: PoolInventory | None, *, now: datetime, now_s: float, offset_s: float
    ) -> tuple[DeviceView, ...]:
        """The pool's devices as they may be judged now; those that only the inventory knows are not live."""
        found: dict[DeviceId, DeviceView] = {}
        kept: dict[DeviceId, datetime] = {}
        for observed in inventory.devices if inventory else ():
            device = observed.device
            found[device.id] = DeviceView(device.id, device.kind, observed.state, live=False, node=device.node)
            if observed.reserved_until is not None:
                kept[device.id] = observed.reserved_until
        for key, seen in self._seen.items():
            if key[:2] == (site, pool):
                live = self._is_live(seen, now, now_s, offset_s)
                state = self._state(key, seen, now_s)
                until = kept.get(key[2]) if state is DeviceState.FOREIGN else None
                found[key[2]] = DeviceView(key[2], seen.sample.kind, state, live, seen.node, until)
        return tuple(found[name] for name in sorted(found))

    def _is_live(self, seen: _Seen, now: datetime, now_s: float, offset_s: float) -> bool:
        age = now - (seen.sampled + timedelta(seconds=offset_s))
        limit_s = self._limit_s(seen)
        return now_s - seen.received_s <= limit_s and abs(age.total_seconds()) <= limit_s

    def _limit_s(self, seen: _Seen) -> float:
        """NaN and what is no interval leave the limit as it is; so does a device whose source is as quick as the samples."""
        own_s = INTERVALS * seen.every_s
        return min(own_s, max(LONGEST_LIVE_S, self.live_s)) if own_s > self.live_s else self.live_s

    def _state(self, key: Key, seen: _Seen, now_s: float) -> DeviceState:
        state = seen.sample.state
        if state is DeviceState.OURS and seen.received_s <= self._freed.get(key, -1.0):
            return DeviceState.FREE
        if state is DeviceState.FREE and key in self._taken:
            at_s, times = self._taken[key]
            rest_s = min(2.0 ** min(times - 1, 10), LONGEST_REST_S) if times > 1 else 0.0
            if seen.received_s <= at_s or now_s - at_s < rest_s:
                return DeviceState.LOCAL
        return state

    def prune(self, now_s: float) -> None:
        """Forget what has not been live for long: nodes that are gone."""
        gone = {key: seen for key, seen in self._seen.items() if now_s - seen.received_s > max(60 * self.live_s, self._limit_s(seen))}
        for key, seen in gone.items():
            del self._seen[key]
            self._nodes.pop((key[0], seen.node), None)
            forgotten = self._of_node.pop((key[0], seen.node), ())
            self._count[key[0]] = self._count.get(key[0], 0) - len(forgotten)
        old_s = now_s - 60 * self.live_s
        self._freed = {key: at_s for key, at_s in self._freed.items() if at_s > old_s}
        self._taken = {key: taken for key, taken in self._taken.items() if taken[0] > old_s}
