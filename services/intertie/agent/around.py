"""What is around our work at a site with a queue of its own: its nodes, its load, what lending can use of it, seen at the owner's interval.

A look that fails changes nothing: what was last seen keeps its time, and goes out with it until the hub calls it too old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime

from intertie.agent.adapters.looks import Looks
from intertie.agent.adapters.port import Cluster, Described
from intertie.agent.adapters.queue import QueueAdapter
from intertie.agent.core import rights
from intertie.agent.core.devices import Holds, Pool, state_of
from intertie.agent.core.model import State
from intertie.agent.core.offers import Books
from intertie.clock import Clock
from intertie.contracts.site import DeviceState, NativeLoad, PoolProfile
from intertie.contracts.telemetry import DeviceSample, NodeSample
from intertie.errors import IntertieError
from intertie.ids import AttemptId, DeviceId, PoolName
from intertie.observe import log

LOG = log.get("agent.around")

# The scheduler's description of a large cluster may take its time; it must not hold up everything else for ever.
ANSWER_S = 60.0
# Loads of the site's own users change at every look: a change of them alone is told no oftener.
LOADS_S = 60.0


class Around:
    """`beat`: factor on every interval, for tests."""

    def __init__(
        self, cluster: Cluster, adapter: object, clock: Clock, profiles: Sequence[PoolProfile], every_s: float, beat: float = 1.0
    ) -> None:
        self.cluster, self.clock, self.beat = cluster, clock, beat
        self.looks: Looks = adapter.looks if isinstance(adapter, QueueAdapter) else Looks(cluster, clock, every_s)
        self._tidy = adapter.tidy if isinstance(adapter, QueueAdapter) else None
        self._owner_s = every_s
        self.pools = [rights.rights(profile) for profile in profiles]
        self.told: Described | None = None
        self.seen_at: datetime | None = None
        """This host's wall clock at the last look."""
        self.loads: dict[PoolName, NativeLoad] = {}
        self.why = "the site's scheduler has not been looked at yet"
        """Why nothing newer is known; empty after a look that was answered."""
        self._due_s = 0.0
        self._loads_s = 0.0
        self._sequence = 0
        self._states: dict[DeviceId, DeviceState] = {}

    @property
    def every_s(self) -> float:
        return max(self._owner_s, self.looks.every_s) * self.beat

    async def look(self, books: Books) -> Mapping[DeviceId, DeviceState]:
        """States of all rights, after a look if one is due."""
        if self.clock.monotonic_s() >= self._due_s:
            await self._describe()
            self._due_s = self.clock.monotonic_s() + self.every_s
        self._states = self._judge(books)
        return self._states

    async def _describe(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                self.told = await self.cluster.describe()
        except (IntertieError, TimeoutError, OSError) as err:
            self.why = str(err) or "no answer"
            LOG.warning(
                "the site's scheduler does not describe itself: what was last seen keeps its age", cluster=self.cluster.name, why=self.why
            )
        except Exception as err:
            # A fault of ours in reading an answer ends no agent: its jobs go on, and what was last seen keeps its age.
            LOG.exception("the description of the site's scheduler broke", cluster=self.cluster.name)
            self.why = type(err).__name__
        else:
            self.seen_at, self.why = self.clock.now(), ""
        self.looks.count()
        if self._tidy is not None:
            await self._tidy()

    def _judge(self, books: Books) -> dict[DeviceId, DeviceState]:
        if self.told is None:
            return rights.unseen(self.pools)
        rooms: dict[PoolName, rights.Room] = {}
        found: dict[DeviceId, DeviceState] = {}
        for pool in self.pools:
            running = [a for a in books.attempts.values() if a.pool == pool.name and a.state is State.RUNNING]
            rooms[pool.name] = rights.room(pool, self.told, sum(len(a.devices) for a in running), alone=len(self.pools) == 1)
            held = {device for (name, device) in books.holds.holder if name == pool.name}
            found |= rights.states(pool, rooms[pool.name], held)
        loads = rights.loads(self.pools, self.told, rooms, every_s=self.every_s, rpc_per_minute=self.looks.rpc_per_minute())
        now_s = self.clock.monotonic_s()
        # What rights are worth is told at once, and with it the load that makes them so: the two never contradict each other.
        news = found != self._states or (now_s >= self._loads_s and not rights.same_but_age(loads, self.loads))
        if not self.loads or news:
            self.loads, self._loads_s = loads, now_s + LOADS_S * self.beat
        return found

    def sample(self, pools: Sequence[Pool], holds: Holds, local: Mapping[AttemptId, bool]) -> NodeSample | None:
        """As of the last look, by its time; None before the first."""
        if self.seen_at is None:
            return None
        self._sequence += 1
        errors = {"scheduler": self.why[:200]} if self.why else {}
        devices = [
            DeviceSample(
                id=device.id,
                pool=pool.name,
                kind=device.kind,
                state=state_of(pool.name, device, holds, local, self._states),
                model=device.model,
                errors=errors,
            )
            for pool in pools
            for device in pool.devices
        ]
        node = "".join(c if c.isalnum() or c == "-" else "-" for c in f"queue-{self.cluster.name}".lower())[:63]
        return NodeSample(node=node, sampled=self.seen_at, sequence=self._sequence, devices=devices, every_s=self.every_s)
