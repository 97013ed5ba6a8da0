"""A site's pool of machines as its agent sees it: the head with its port, the adapter over all nodes, and their devices in pools and samples.

Made only where `site.toml` declares `[machines] listen`; without that a site of machines is one machine, and nothing of this runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec

from intertie.agent.adapters.port import Adapter
from intertie.agent.config import VERSION, Folder
from intertie.agent.core.devices import Holds, Pool, state_of
from intertie.agent.core.machines import MachinesRules, NodeDevices, NodeWord, notes_of, own_slots, pools_of, states_of
from intertie.agent.core.placed import removed
from intertie.agent.machines.adapter import MachinesAdapter
from intertie.agent.machines.gate import Gate
from intertie.agent.machines.head import Head
from intertie.agent.machines.node import slot_id
from intertie.agent.machines.store import HeadStore
from intertie.agent.machines.wire import make_certificate, split_address
from intertie.agent.transfer import Transfer
from intertie.clock import Clock
from intertie.contracts.identity import Joined
from intertie.contracts.job import ResultRef, WorkRef
from intertie.contracts.link import LaneState
from intertie.contracts.machines import NodeRecord, Nodes
from intertie.contracts.site import Device, DeviceKind, DeviceState, PoolProfile
from intertie.contracts.telemetry import NodeSample
from intertie.errors import Conflict, Unavailable
from intertie.ids import AttemptId, DeviceId, SiteName
from intertie.observe import log
from intertie.trust.keys import Key

LOG = log.get("machines.pool")


class WaitingTransfer:
    """`Transfer` that waits for results which are still at their node."""

    def __init__(self, inner: Transfer, adapter: MachinesAdapter) -> None:
        self._inner, self._adapter = inner, adapter

    async def fetch(self, work: WorkRef, target: Path) -> None:
        await self._inner.fetch(work, target)

    async def store(self, result: ResultRef, source: Path) -> None:
        if await asyncio.to_thread(self._adapter.at_node, source):
            raise Unavailable("agent.result_at_node", "the result is still at its node", retry_after_s=2)
        await self._inner.store(result, source)


class Machines:
    """One pool of machines. `await open(…)`, `await run()` beside the agent's other tasks, `await close()`."""

    def __init__(self, folder: Folder, rules: MachinesRules, joined: Joined, key: Key, clock: Clock, own: str, store: HeadStore) -> None:
        self._rules, self._joined, self._clock, self._own, self._store = rules, joined, clock, own, store
        self.head = Head(store, key, clock, folder.root / "machines")
        self.profiles: list[PoolProfile] = []
        self.gate = Gate(
            self.head,
            folder.keys,
            site=joined.site,
            listen=split_address(rules.listen),
            owner_tenant=joined.owner_tenant,
            pools=lambda: self.profiles,
        )
        self.adapter: MachinesAdapter
        self._node_of: dict[DeviceId, str] = {}
        self._told: dict[SiteName, int] = {}
        """Sequence of the last sample of a node that went to the hub."""

    @classmethod
    async def open(
        cls,
        folder: Folder,
        rules: MachinesRules,
        joined: Joined,
        key: Key,
        clock: Clock,
        own: str,
        local: Adapter,
        profiles: list[PoolProfile],
    ) -> Machines:
        """Everything that needs no network; nodes are heard from `run` on."""
        await asyncio.to_thread(make_certificate, folder.keys, joined.site, clock.now())
        store = await HeadStore.open(folder.root / "machines.db")
        made = cls(folder, rules, joined, key, clock, own, store)
        made.profiles = profiles
        await made.head.open()
        made.adapter = MachinesAdapter(
            local, made.head, clock, node_of=lambda device: made._node_of.get(device, ""), own=own, site=joined.site
        )
        made.adapter.owner_tenant = joined.owner_tenant
        await made.adapter.open()
        return made

    async def run(self) -> None:
        """The lane of the nodes, and the port that they dial; a port that cannot be had ends the agent with its reason."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.head.keeper.run(), name="machines-lane")
            group.create_task(self.gate.run(), name="machines-gate")

    async def close(self) -> None:
        await self.head.bus.close()
        await self._store.close()

    # --- devices ---

    def pools(self, profiles: Sequence[PoolProfile], gpus: Sequence[Device]) -> list[Pool]:
        """All nodes' devices in the declared pools; of a revoked node only those that its work still holds."""
        slots = self._rules.slots if self._rules.slots is not None else (os.cpu_count() or 1)
        own = NodeDevices(self._own, own_slots(slots, self._own), gpus)
        nodes = [
            NodeDevices(
                node.name,
                [Device(id=slot_id(node.name, n), kind=DeviceKind.SLOT, node=node.name) for n in range(1, node.slots + 1)],
                node.devices,
            )
            for node in self.head.nodes.values()
            if node.revoked_at is None or self._busy(node.name)
        ]
        found = pools_of(profiles, own, nodes)
        self._node_of = {device.id: device.node or self._own for pool in found for device in pool.devices}
        return found

    def _busy(self, node: SiteName) -> bool:
        return any(work.node == node and work.go_number and not work.over for work in self.head.works.values())

    def words(self) -> dict[str, NodeWord]:
        found: dict[str, NodeWord] = {}
        for node in self.head.nodes.values():
            live = self.head.live.get(node.name)
            states = {seen.id: seen.state for seen in live.sample.devices} if live is not None and live.sample is not None else {}
            reachable = self.head.reachable(node.name) and node.revoked_at is None
            why = node.reason
            if odd := node.single_user and not self.adapter.single_user:
                # It would refuse every mapped account: better that nothing is offered.
                why = "its agent is not root, the head's is"
            since = None if reachable else node.last_word
            found[node.name] = NodeWord(node.name, reachable, node.cordoned or odd, states, reason=why, since=since)
        return found

    def states(self, pools: Sequence[Pool]) -> dict[DeviceId, DeviceState]:
        """Of all devices that are not this machine's own."""
        return states_of((device for pool in pools for device in pool.devices), self.words(), self._own)

    def notes(self, pools: Sequence[Pool]) -> dict[DeviceId, str]:
        return notes_of((device for pool in pools for device in pool.devices), self.words())

    def of_own(self, pools: Sequence[Pool]) -> list[Pool]:
        """The pools with this machine's own devices alone."""
        return [Pool(pool.profile, [device for device in pool.devices if device.node == self._own]) for pool in pools]

    def samples(
        self, pools: Sequence[Pool], holds: Holds, local: Mapping[AttemptId, bool], observed: Mapping[DeviceId, DeviceState]
    ) -> list[NodeSample]:
        """What nodes said since the last call, with the head's own knowledge of who holds what. Nothing is said for a node that is not heard."""
        found: list[NodeSample] = []
        for name, live in self.head.live.items():
            sample = live.sample
            if sample is None or not self.head.reachable(name) or self._told.get(name) == sample.sequence:
                continue
            self._told[name] = sample.sequence
            ours = {device.id: (pool, device) for pool in pools for device in pool.devices if device.node == name}
            devices = [
                msgspec.structs.replace(seen, pool=pool.name, state=state_of(pool.name, device, holds, local, observed))
                for seen in sample.devices
                if (known := ours.get(seen.id)) is not None
                for pool, device in (known,)
                if seen.pool == pool.name
            ]
            sampled = sample.sampled + timedelta(seconds=self._offset_s(name))
            found.append(msgspec.structs.replace(sample, node=name, sampled=sampled, devices=devices))
        return found

    def _offset_s(self, node: SiteName) -> float:
        """The head's wall clock minus the node's, where that is more than the error of knowing it."""
        row = self.head.rows.get(node)
        return row.clock_offset_s if row is not None and abs(row.clock_offset_s) > row.clock_error_s else 0.0

    # --- what the owner asks ---

    def nodes(self, pools: Sequence[Pool], running: Mapping[str, int]) -> Nodes:
        """The head first; `running` counts open work by node."""
        count: dict[str, int] = {}
        for pool in pools:
            for device in pool.devices:
                count[device.node] = count.get(device.node, 0) + 1
        head = NodeRecord(
            node=SiteName(self._own),
            head=True,
            reachable=True,
            since=None,
            devices=count.get(self._own, 0),
            running=running.get(self._own, 0),
            version=VERSION,
        )
        others = []
        for node in self.head.nodes.values():
            live, row, reachable = self.head.live.get(node.name), self.head.rows.get(node.name), self.head.reachable(node.name)
            others.append(
                NodeRecord(
                    node=node.name,
                    reachable=reachable,
                    since=live.since if live is not None and reachable else node.last_word,
                    devices=count.get(node.name, 0),
                    running=running.get(node.name, 0),
                    cordoned=node.cordoned,
                    reason=node.reason,
                    joined_at=node.joined_at,
                    revoked_at=node.revoked_at,
                    version=node.version,
                    single_user=node.single_user,
                    lane="" if row is None or row.state is LaneState.OK else row.state.value,
                )
            )
        return Nodes(site=self._joined.site, listen=self.gate.address, nodes=[head, *others])

    async def cordon(self, name: str, *, on: bool, reason: str) -> None:
        """No new work there; what runs goes on."""
        self.head.forgive(SiteName(name))
        await self.head.note_node(self.head.node(name).name, cordoned=on, reason=reason if on else "")

    async def revoke(self, name: str, *, lost: bool = False) -> None:
        """Its key opens nothing from here on, and its line is closed. `Conflict` while work of ours runs there: its end could not be told any more.

        `lost`: a person says that the machine will not come back; its work is closed with the outcome unknown.
        """
        node = self.head.node(name)
        if self._busy(node.name) and not lost:
            raise Conflict(
                "machines.node_busy",
                f"work runs on node {name}, and its end could not be told",
                next_step="intertie node cordon, and revoke it when its work is over; if the machine is gone for good: --lost",
            )
        await self.head.note_node(node.name, revoked_at=self._clock.now())
        self.gate.drop(node.name)
        if lost:
            for work in [one for one in self.head.works.values() if one.node == node.name and not one.over]:
                await self.head.change(work.attempt.id, partial(removed, now=self.head.moment(node.name)))


async def machines_of(
    folder: Folder, joined: Joined, key: Key, clock: Clock, own: str, local: Adapter, profiles: list[PoolProfile]
) -> Machines | None:
    """The pool that the owner declared; None where they did not."""
    rules = folder.rules().machines
    if rules is None or not rules.listen:
        return None
    return await Machines.open(folder, rules, joined, key, clock, own, local, profiles)


def waiting(machines: Machines | None, inner: Transfer) -> Transfer:
    """`inner`, which waits for results that are still at their node."""
    return inner if machines is None else WaitingTransfer(inner, machines.adapter)
