"""The agent's shell: boots from its disk alone, islanded, and then speaks on three lanes whenever somebody hears.

Order matters: lock, journal, recovery of what runs, the owner's door; only then the bus. Nothing after the door may take down what is before
it: a bus that is away for a year is a state, not an error.
"""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from aiohttp import web

from intertie.agent.adapters.choose import adapter_of
from intertie.agent.around import Around
from intertie.agent.asks import Asks
from intertie.agent.books import get_setting, put_setting
from intertie.agent.config import VERSION, Folder, make_pools, node_name
from intertie.agent.core.devices import Pool, inventory
from intertie.agent.core.islanded import Sight
from intertie.agent.core.model import OPEN, State
from intertie.agent.core.reserved import notes
from intertie.agent.core.seen import pools_seen
from intertie.agent.door import Door, lent
from intertie.agent.drill import Drill
from intertie.agent.drill_door import mount as mount_drill
from intertie.agent.endpoint.desk import Desk
from intertie.agent.endpoint.door import mount as mount_endpoint
from intertie.agent.islanded import Alone, known, lanes_wait
from intertie.agent.journal import SqliteJournal
from intertie.agent.leave import GatewayRelease, Leaving
from intertie.agent.machines.door import mount as mount_machines
from intertie.agent.machines.pool import machines_of, waiting
from intertie.agent.machines.reserved import Reserved
from intertie.agent.native_books import NativeTeller
from intertie.agent.probe import Probe
from intertie.agent.probe_door import mount as mount_probe
from intertie.agent.reopen import begin, recall_place, reopen, tell_held
from intertie.agent.request_door import mount as mount_requests
from intertie.agent.room import spaces_of
from intertie.agent.site import Site
from intertie.agent.sources.nodes import cards_of
from intertie.agent.sources.several import build
from intertie.agent.telemetry import Collector, Telemetry
from intertie.agent.transfer import GatewayTransfer
from intertie.agent.upgrade import Successor
from intertie.agent.way import way_of
from intertie.bus.nats import NatsBus
from intertie.bus.port import Bus
from intertie.clock import Clock, SystemClock
from intertie.contracts.base import decode, encode
from intertie.contracts.link import Instruction, Lane, LaneState, Sealed, SiteStatus
from intertie.contracts.local import DiskState, LocalStatus
from intertie.contracts.observed import PoolSeen
from intertie.contracts.site import AccessMode, Device, DeviceState
from intertie.contracts.telemetry import encode_sample, local_telemetry_subject
from intertie.errors import IntertieError
from intertie.ids import DeviceId, PoolName, SessionId, mint
from intertie.lane.site import SiteLane, listen_for_nudges
from intertie.link.site import Exchange, Trouble, pace_of
from intertie.observe import log
from intertie.runtime import ready, serve
from intertie.trust.keys import Key
from intertie.trust.login import SiteLogin

LOG = log.get("agent")

TICK_S = 1.0
KEEPER_VERSION = "scheduler.version"


class Agent:
    """One site's agent over one data folder. `await open()`, `await run()`, `await close()`."""

    def __init__(self, folder: Folder, *, clock: Clock | None = None, beat: float = 1.0, collector: Collector | None = None) -> None:
        """`beat`: factor on every beat, for tests."""
        self.folder, self.beat = folder, beat
        self.clock = clock or SystemClock()
        self.started = self.clock.now()
        self.node = node_name()
        self.lanes: dict[Lane, SiteLane] = {}
        self._collector = collector or Collector()

    async def open(self) -> None:
        """Everything that needs no network: after this the site works."""
        self.folder.make()
        self._lock = self.folder.lock()
        self.joined = self.folder.joined()
        self.profiles = self.folder.profiles()
        self.way = way_of(self.folder)
        self.key = Key.read(self.folder.site_key)
        self.journal = await SqliteJournal.open(self.folder.journal)
        known = await self._known_gpus()
        source = build(self.folder.rules().telemetry, self.folder.root, self.clock, self._collector)
        self.telemetry = Telemetry(source, self.clock, self.node, known)
        chosen = adapter_of(self.folder, self.folder.rules(), self.clock)
        own = chosen.adapter
        self.around = (
            Around(chosen.cluster, own, self.clock, self.profiles, chosen.every_s, self.beat) if chosen.cluster is not None else None
        )
        self.machines = await machines_of(self.folder, self.joined, self.key, self.clock, self.node, own, self.profiles)
        self.site = Site(
            joined=self.joined,
            key=self.key,
            journal=self.journal,
            adapter=self.machines.adapter if self.machines is not None else own,
            clock=self.clock,
            transfer=waiting(
                self.machines,
                GatewayTransfer(self.joined.gateway_url, self.joined.site, self.key, self.clock, self.joined.hub_ca, self.way),
            ),
            pools=self._pools(list(known.values())),
            packs=self.folder.packs,
            rules=self.folder.rules(),
        )
        self.site.keeper_version = lambda: self._keeper_version
        self._keeper_version = int(await self.journal.read(lambda cursor: get_setting(cursor, KEEPER_VERSION)) or 1)
        self.site.room.spaces = lambda: spaces_of([self.folder.root, self.folder.jobs, self.folder.packs])
        self.site.may_start = self._rules_here
        self.alone = Alone(self.site, self._sight)
        self.site.islanded = lambda: self.alone.since is not None
        self.site.islanded_since = lambda: self.alone.since
        self.site.offset = self._offset
        self.site.wake = self._wake
        await self.alone.recover()
        await recall_place(self.site)
        await self.site.recover()
        self.reserved = Reserved(self.folder.root, self.clock)
        self.site.books.observed = self._with_others(None, {})[1]
        await begin(self.site)
        await self.site.declare()
        self.leaving = Leaving(self.site, GatewayRelease(self.joined.gateway_url, self.joined.hub_ca, self.way))
        await self.leaving.recover()
        self.drill = Drill(self.site)
        await self.drill.open()
        door = Door(self.site, self._local_status, self.leaving, _end_this_process)
        self.third = NativeTeller(self.site, chosen.cluster, beat=self.beat) if chosen.cluster is not None else None
        self.desk = Desk(self.site, beat=self.beat)
        await self.desk.recover()
        self.probe = Probe(self.site, beat=self.beat)
        await self.probe.recover()
        door.also = self._more_doors
        self._door = await door.open(self.folder.socket)
        if self.site.adapter.single_user:
            LOG.warning(
                "single-user mode", text="not root: jobs run as this user and could read the site's key; only the owner's tenant is taken"
            )

    def _more_doors(self, app: web.Application, caller: Callable[[web.Request], tuple[int, bool]]) -> None:
        mount_drill(self.drill, app, caller)
        mount_endpoint(self.desk, app, caller)
        mount_requests(self.site.requests, app, caller)
        mount_probe(self.probe, app, caller)
        mount_machines(self.machines, self.reserved, self.site, app, caller)

    async def close(self) -> None:
        """What runs goes on; the next agent adopts it."""
        await self._door.cleanup()
        await self.desk.close()
        await self.leaving.close()
        await self.site.close()
        await self.telemetry.close()
        if self.around is not None:
            await self.around.cluster.close()
        if self.machines is not None:
            await self.machines.close()
        await self.journal.close()
        os.close(self._lock)

    # --- what it does all day ---

    async def watch(self) -> None:
        """Each telemetry beat: look at the devices, tell the registry what changed, publish the sample if somebody may hear it."""
        while True:
            try:
                await self._beat()
            except IntertieError as err:
                LOG.warning("a beat was put off", code=err.code, text=err.text)
            await asyncio.sleep(max(0.05, self.site.settings.telemetry_beat_s * self.beat))

    async def _beat(self) -> None:
        if self.around is not None:
            await self._look_around(self.around)
            return
        roots = await asyncio.to_thread(self.site.adapter.roots)
        before = dict(self.telemetry.known)
        seen = await self.telemetry.look(roots)
        pools = None
        if self.telemetry.known != before:
            await self.journal.write(put_setting("gpus", encode(self.telemetry.known).decode("utf-8")))
            pools = self._pools(list(self.telemetry.known.values()))
        pools, seen = self._with_others(pools, seen)
        self.site.seen = self._pools_seen(pools)
        await self.site.observe(seen, pools)
        self.probe.driver = self.telemetry.driver
        await self._count_use()
        if self.lanes and self.bus.connected:
            local = {attempt.id: attempt.local is not None for attempt in self.site.books.attempts.values()}
            self.telemetry.every_s = self.site.settings.telemetry_beat_s * self.beat
            pools = self.site.shown_pools()
            ours = self.machines.of_own(pools) if self.machines is not None else pools
            sample = self.telemetry.sample(ours, self.site.books.holds, local, seen, roots)
            await self.bus.publish(local_telemetry_subject(self.node), encode_sample(sample))
            for other in self.machines.samples(pools, self.site.books.holds, local, seen) if self.machines is not None else ():
                await self.bus.publish(local_telemetry_subject(other.node), encode_sample(other))

    async def _count_use(self) -> None:
        """Of this machine's devices, and of those that other machines of the pool just told of."""
        cards, shared = dict(self.telemetry.cards), self.telemetry.shared()
        if self.machines is not None:
            head = self.machines.head
            theirs, strangers = cards_of(
                live.sample for name, live in head.live.items() if live.sample is not None and head.reachable(name)
            )
            cards, shared = {**theirs, **cards}, shared | strangers
        await self.site.use.look(cards, shared, self.site.settings.telemetry_beat_s * self.beat)

    async def _look_around(self, around: Around) -> None:
        """As a beat, where devices are behind a queue of the site's own: its scheduler is looked at, at its owner's interval."""
        seen = await around.look(self.site.books)
        self.site.native = around.loads
        if self.site.rules.slurm is not None and around.told is not None:
            self.site.partitions = around.told.queues
        await self.site.observe(seen, around.pools)
        if self.lanes and self.bus.connected:
            local = {attempt.id: attempt.local is not None for attempt in self.site.books.attempts.values()}
            if (sample := around.sample(self.site.shown_pools(), self.site.books.holds, local)) is not None:
                await self.bus.publish(local_telemetry_subject(sample.node), encode_sample(sample))

    def _pools(self, gpus: Sequence[Device]) -> list[Pool]:
        if self.around is not None:
            return list(self.around.pools)
        return make_pools(self.profiles, gpus, self.node) if self.machines is None else self.machines.pools(self.profiles, gpus)

    def _with_others(
        self, pools: list[Pool] | None, seen: Mapping[DeviceId, DeviceState]
    ) -> tuple[list[Pool] | None, dict[DeviceId, DeviceState]]:
        """What is seen here and on the nodes, less what is kept for somebody, and the pools if they are others than before."""
        now, told = pools or list(self.site.pools.values()), dict[DeviceId, str]()
        if self.machines is not None:
            now = self._pools(list(self.telemetry.known.values()))
            seen, told = {**self.machines.states(now), **seen}, self.machines.notes(now)
            pools = None if now == list(self.site.pools.values()) else now
        return pools, self.reserved.apply(self.site.books, now, seen, told)

    async def nodes(self) -> None:
        """The nodes' port and lane, where there is a pool of machines."""
        if self.machines is not None:
            self.machines.gate.beat_s = self.beat
            await self.machines.run()

    def _pools_seen(self, pools: Sequence[Pool] | None) -> Mapping[PoolName, PoolSeen]:
        shown = [pool for pool in pools or self.site.pools.values() if pool.profile.mode is not AccessMode.SERVICE]
        telemetry = self.telemetry
        return pools_seen(
            shown,
            telemetry.known.values(),
            telemetry.cards,
            self.site.seen,
            unread=telemetry.unread(),
            driver=telemetry.driver,
            agent_version=VERSION,
        )

    async def tick(self) -> None:
        while True:
            try:
                await self.site.tick()
                await self.alone.tick()
            except IntertieError as err:
                LOG.warning("a tick was put off", code=err.code, text=err.text)
            await asyncio.sleep(TICK_S * self.beat)

    async def accounts(self) -> None:
        """The site's own accounting, where its scheduler keeps one."""
        if self.third is None:
            await asyncio.Event().wait()
        else:
            await self.third.run()

    async def connect(self) -> Bus:
        """A bus that connects when it can, with credentials minted here, offline, at each attempt."""
        login = SiteLogin(Key.read(self.folder.signing_key), self.joined.account, self.clock)
        tls = ssl.create_default_context(cadata=self.joined.hub_ca) if self.joined.hub_ca else None
        return await self.drill.bus(
            lambda: NatsBus.connect(
                self.joined.bus_urls, name=f"agent-{self.joined.site}", credentials=login, tls=tls, way=self.way, wait=False
            )
        )

    async def speak(self, bus: Bus | None = None) -> None:
        """The three lanes, nudges and questions, for ever."""
        self.bus = bus or await self.connect()
        session = SessionId(mint("ses"))
        self.lanes = {lane: self._lane(lane, session) for lane in Lane}
        await listen_for_nudges(self.bus, list(self.lanes.values()))
        await Asks(self.bus, self.site, self._status).listen()
        await self.desk.listen(self.bus)
        try:
            async with asyncio.TaskGroup() as group:
                for lane in self.lanes.values():
                    group.create_task(lane.run(), name=f"lane-{lane.lane}")
        finally:
            await self.bus.close()

    def _lane(self, lane: Lane, session: SessionId) -> SiteLane:
        scheduler = lane is Lane.SCHEDULER
        return SiteLane(
            self.bus,
            lane,
            self.journal,
            self.clock,
            site=self.joined.site,
            session=session,
            on_instructions=self._instructed if scheduler else None,
            on_settings=self._settings if scheduler else None,
            on_answer=self._answered if scheduler else self._registry_answered if lane is Lane.REGISTRY else self._metering_answered,
            on_reopen=partial(reopen, self.site),
            on_raised=partial(tell_held, self.site) if scheduler else None,
            running=self.site.running if scheduler else tuple,
            settings_revision=lambda: self.site.settings.revision if scheduler else 0,
            pace=pace_of(lane, self.site.settings.lane_beat_s * self.beat),
        )

    async def _instructed(self, instructions: Sequence[Instruction], exchange: Exchange) -> None:
        await self.site.take(instructions, sent_boot_s=exchange.sent_boot_s, acknowledged=exchange.acknowledged)

    async def _answered(self, exchange: Exchange) -> None:
        if exchange.synced.v != self._keeper_version:
            await self.journal.write(put_setting(KEEPER_VERSION, str(exchange.synced.v)))
            self._keeper_version = exchange.synced.v
        if exchange.synced.state is LaneState.OK:
            await self.site.answered(exchange.synced.lease_s, exchange.sent_boot_s)

    async def _metering_answered(self, exchange: Exchange) -> None:
        if self.third is not None:
            self.third.answered(exchange)

    async def _registry_answered(self, exchange: Exchange) -> None:
        self.desk.answered(exchange)
        self.site.requests.answered(exchange)
        self.probe.answered(exchange)

    def _rules_here(self) -> bool:
        """No other session of this site took over, as far as the scheduler's lane heard."""
        lane = self.lanes.get(Lane.SCHEDULER)
        return lane is None or lane.trouble not in (Trouble.SUPERSEDED, Trouble.CONTESTED)

    async def _settings(self, sealed: Sealed, revision: int) -> None:
        await self.site.apply(sealed, revision)
        self.drill.settings_came()
        for lane in self.lanes.values():
            lane.set_beat(self.site.settings.lane_beat_s * self.beat)

    def _wake(self, lanes: Collection[Lane]) -> None:
        for lane in lanes:
            if lane in self.lanes:
                self.lanes[lane].wake()

    # --- what it knows of itself ---

    @property
    def islanded_since(self) -> datetime | None:
        """None while the hub is heard."""
        return self.alone.since

    def _sight(self) -> Sight:
        """By the scheduler's lane: silent from the start until the first answer. A bus that is gone needs no waiting for silence: nothing can be
        heard from that moment on."""
        lane = self.lanes.get(Lane.SCHEDULER)
        if lane is None:
            return Sight(self.clock.now(), connected=False, silent_since=self.started, last_heard=None)
        return Sight(self.clock.now(), self.bus.connected, lane.silent_since, lane.last_heard)

    def _offset(self) -> tuple[float, float]:
        lane = self.lanes.get(Lane.SCHEDULER)
        return (lane.clock_offset_s, lane.clock_error_s or 0.0) if lane is not None else (0.0, 0.0)

    async def _known_gpus(self) -> dict[int, Device]:
        stored = await self.journal.read(lambda cursor: get_setting(cursor, "gpus"))
        return decode(stored, dict[int, Device], what="known GPUs") if stored else {}

    async def _status(self) -> SiteStatus:
        attempts = self.site.books.attempts.values()
        return SiteStatus(
            site=self.joined.site,
            agent_started=self.started,
            islanded_since=self.islanded_since,
            running=list(self.site.running()),
            waiting=sum(attempt.state is State.WAITING for attempt in attempts),
            journal_entries=await self.journal.entries_waiting(),
            version=VERSION,
            paused=self.site.pause.on,
            paused_until=self.site.pause.until,
        )

    async def _local_status(self) -> LocalStatus:
        books = self.site.books
        local = [attempt for attempt in books.attempts.values() if attempt.local is not None]
        return LocalStatus(
            site=self.joined.site,
            node=self.node,
            version=VERSION,
            single_user=self.site.adapter.single_user,
            agent_started=self.started,
            islanded_since=self.islanded_since,
            lanes={lane.value: _said(self.lanes.get(lane)) for lane in Lane},
            pools=inventory(
                self.site.pools.values(),
                books.attempts,
                books.holds,
                books.observed,
                paused=self.site.pause.on,
                until=self.site.pause.until,
                notes={**books.notes, **notes(books.reserved, named=True)},
            ),
            lent_jobs=len(self.site.running()),
            local_running=sum(attempt.state in OPEN for attempt in local),
            local_waiting=sum(attempt.state is State.WAITING for attempt in local),
            journal_entries=await self.journal.entries_waiting(),
            no_gpu=self.telemetry.none,
            islanded_why=self.alone.why,
            lent=[lent(books.attempts[name], self.site) for name in self.site.running() if name in books.attempts],
            waits=await lanes_wait(self.site, self.lanes),
            known=known(self.site),
            paused=self.site.pause.told(),
            disk=await self._disk(),
            absence=await self.alone.report(),
            requests=sum(one.accepted_at is None for one in self.site.requests.pending.values()),
        )

    async def _disk(self) -> DiskState:
        why = self.site.room.why
        spaces = await asyncio.to_thread(self.site.room.spaces)
        return DiskState(
            accepting=why is None,
            code=why.code if why else "",
            text=why.text if why else "",
            free_bytes=min((space.free for space in spaces), default=0),
            journal_bytes=sum(f.stat().st_size for f in self.folder.root.glob("journal.db*")),
        )


def _end_this_process() -> None:
    """As a service manager would."""
    os.kill(os.getpid(), signal.SIGTERM)


def _said(lane: SiteLane | None) -> str:
    if lane is None:
        return "not started"
    if lane.trouble is not None:
        return str(lane.trouble.value)
    return "heard" if lane.silent_since is None else f"silent since {lane.silent_since.isoformat(timespec='seconds')}"


async def run(folder: Folder, environ: Mapping[str, str], successor: Successor) -> int:
    """The agent's process until SIGTERM, or until `successor` is to take it over."""
    agent = Agent(folder, beat=float(environ.get("INTERTIE_BEAT_S", "1")))
    await agent.open()
    try:
        mark = environ.get("INTERTIE_READY_FILE")
        async with ready(Path(mark) if mark else None, "agent", {"site": agent.joined.site}):
            successor.announce(agent.started)
            return await serve(
                devices=agent.watch(),
                ticks=agent.tick(),
                lanes=agent.speak(),
                drill=agent.drill.run(),
                calls=agent.desk.run(),
                probes=agent.probe.run(),
                upgrades=successor.wait(),
                nodes=agent.nodes(),
                accounts=agent.accounts(),
            )
    finally:
        successor.withdraw()
        await agent.close()
