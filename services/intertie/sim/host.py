"""A site: its machine, its disk, its clock, and the agent on it, wired as `intertie.agent.service` wires it, less doors that need sockets."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from random import Random

from intertie.agent.accounts import LocalAccount
from intertie.agent.core.devices import Pool, state_of
from intertie.agent.journal_file import Pending, prepare
from intertie.agent.journal_rows import Bounds
from intertie.agent.reopen import begin, recall_place, reopen, tell_held
from intertie.agent.site import Site
from intertie.agent.transfer import Transfer
from intertie.bus.memory import site_account
from intertie.contracts.identity import Joined
from intertie.contracts.link import Instruction, Lane, LaneState, Sealed
from intertie.contracts.site import Device, DeviceKind, Lendable, PoolProfile, TaskType
from intertie.contracts.telemetry import DeviceSample, NodeSample, encode_sample, local_telemetry_subject
from intertie.errors import IntertieError
from intertie.ids import DeviceId, JournalId, PoolName, SessionId, SiteName, TenantName, mint
from intertie.lane.site import SiteLane, listen_for_nudges
from intertie.link.site import Exchange, Trouble, pace_of
from intertie.observe import log
from intertie.sim.bus import Link, SimBroker, SimBus
from intertie.sim.clock import HostClock
from intertie.sim.disk import Durable, Moments, SimJournal
from intertie.sim.loop import Party
from intertie.sim.machine import Machine, SimAdapter
from intertie.sim.native import NativeAdapter, NativeScheduler
from intertie.trust.keys import Key

LOG = log.get("sim.host")

POOL = PoolName("main")
LANES = (Lane.SCHEDULER, Lane.METERING)
# Of every tenant's local account on a simulated machine.
TENANT_UID = 60_001
# As the agent's own.
TICK_S = 1.0


def pool_of(slots: int) -> Pool:
    profile = PoolProfile(
        pool=POOL,
        accelerator="none",
        count=slots,
        memory_mib=4_096,
        interconnect="none",
        task_types=[TaskType.BATCH],
        lendable=Lendable(devices=slots),
    )
    return Pool(profile, [Device(id=DeviceId(f"slot-{n}"), kind=DeviceKind.SLOT, node="n1") for n in range(1, slots + 1)])


class Host:
    """One site's machine. `boot_agent` starts an agent on it, as often as one died."""

    def __init__(
        self,
        name: str,
        slots: int,
        clock: HostClock,
        key: Key,
        machine: Machine,
        rng: Random,
        scale: float,
        *,
        queue: bool,
        site: str = "",
        seen: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`queue`: its work goes through a scheduler of its own. `site`: the site that it is, if not that of its name. `seen`: told of each way that
        a lane goes."""
        self.name, self.site, self.seen = name, SiteName(site or name), seen
        self.was_alone = self.ended = False
        """It was a copy, and is no more."""
        self.native = NativeScheduler(machine) if queue else None
        self.pool = pool_of(slots)
        self.clock, self.key, self.machine, self.rng, self.scale = clock, key, machine, rng, scale
        self.link = Link()
        self.bounds = Bounds()
        self.disk_full = False
        self._files = 0
        self.lose_journal()
        self.note: tuple[JournalId | None, str] = (None, "")
        """Beside the file: whose journal it was, and in which folder on which host."""
        self.agent: Agent | None = None
        self.booted = 0

    @property
    def boot(self) -> str:
        return self.clock.kernel_boot

    # --- its disk ---

    @property
    def journal(self) -> JournalId:
        """Whose journal lies there now."""
        return JournalId(self.database.execute("SELECT value FROM meta WHERE key = 'journal'").fetchone()[0])

    def open_journal(self) -> Pending | None:
        """As `SqliteJournal.open`: why it must be opened anew, if so."""
        before, where = self.note
        journal = prepare(self.database, Path(self.site), JournalId(mint("jnl")), "first" if before is None else "gone", before)
        told = dict(self.database.execute("SELECT key, value FROM meta WHERE key IN ('place', 'opening', 'previous')").fetchall())
        pending = None
        if "opening" in told:
            pending = Pending(told["opening"], JournalId(told["previous"]) if told["previous"] else None, where == self.name)
        elif told["place"] != self.place:
            pending = Pending("moved", journal)
        if "place" not in told:
            self.database.execute("INSERT INTO meta VALUES ('place', ?)", (self.place,))
        self.write_note(journal)
        return pending

    def write_note(self, journal: JournalId) -> None:
        self.note = (journal, self.name)

    def lose_journal(self) -> None:
        """A new file, with nothing in it."""
        self._files += 1
        self.database = sqlite3.connect(":memory:", isolation_level=None)
        self.durable = Durable(self.database, self.clock)
        self.place = f"{self.name}, file {self._files}"
        """Host and file of the journal, as `place_of` tells them."""

    @property
    def has_journal(self) -> bool:
        """False from the deletion of the file until an agent makes another."""
        return self.database.execute("SELECT 1 FROM sqlite_master WHERE name = 'entry'").fetchone() is not None

    def image(self) -> bytes:
        """The journal's file as it is on disk at this moment."""
        return self.database.serialize()

    def restore(self, image: bytes) -> None:
        """The file as it was; the job folders and what runs are as they are."""
        self.database.deserialize(image)

    def boot_agent(self, broker: SimBroker, joined: Joined, transfer: Transfer, moments: Moments, packs: Path) -> Agent:
        self.booted += 1
        party = Party(f"agent-{self.name}")
        bus = broker.connect(party, self.link, site_account(self.site))
        self.agent = Agent(self, party, bus, joined, transfer, moments, packs)
        party.spawn(self.agent.run(), party.name)
        return self.agent


class Agent:
    """One life of a site's agent."""

    def __init__(self, host: Host, party: Party, bus: SimBus, joined: Joined, transfer: Transfer, moments: Moments, packs: Path) -> None:
        self.host, self.party, self.bus = host, party, bus
        pending = host.open_journal()
        self.journal = SimJournal(
            host.database,
            host.journal,
            moments,
            lambda: host.disk_full,
            host.place,
            pending,
            host.bounds,
            host.clock,
            host.durable,
            host.write_note,
        )
        self.lanes: dict[Lane, SiteLane] = {}
        self.sequence = 0
        self.ready = False
        self.site = Site(
            joined=joined,
            key=host.key,
            journal=self.journal,
            adapter=SimAdapter(host.machine, moments) if host.native is None else NativeAdapter(host.native, host.machine, moments),
            clock=host.clock,
            transfer=transfer,
            pools=[host.pool],
            packs=packs,
            boot=host.boot,
        )
        self.site.islanded = lambda: self.silent
        self.site.grants.local = lambda name: LocalAccount(name, TENANT_UID, TENANT_UID, (), "/")
        self.site.may_start = self._rules_here
        self.site.offset = self._offset
        self.site.wake = self._wake

    @property
    def silent(self) -> bool:
        lane = self.lanes.get(Lane.SCHEDULER)
        return lane is None or lane.silent_since is not None or not self.bus.connected

    def _offset(self) -> tuple[float, float]:
        lane = self.lanes.get(Lane.SCHEDULER)
        return (lane.clock_offset_s, lane.clock_error_s or 0.0) if lane is not None else (0.0, 0.0)

    def _wake(self, lanes: Collection[Lane]) -> None:
        # In one order, whatever the hashing of this process makes of a set.
        for lane, known in self.lanes.items():
            if lane in lanes:
                known.wake()

    async def run(self) -> None:
        await recall_place(self.site)
        await self.site.recover()
        await begin(self.site)
        self.ready = True
        session = SessionId(mint("ses"))
        self.lanes = {lane: self._lane(lane, session) for lane in LANES}
        await listen_for_nudges(self.bus, list(self.lanes.values()))
        async with asyncio.TaskGroup() as group:
            for lane in self.lanes.values():
                group.create_task(lane.run(), name=f"lane-{lane.lane}")
            group.create_task(self._tick(), name="ticks")
            group.create_task(self._watch(), name="devices")

    def _lane(self, lane: Lane, session: SessionId) -> SiteLane:
        scheduler = lane is Lane.SCHEDULER
        return SiteLane(
            self.bus,
            lane,
            self.journal,
            self.host.clock,
            site=self.host.site,
            session=session,
            on_instructions=self._instructed if scheduler else None,
            on_settings=self._settings if scheduler else None,
            on_answer=self._answered if scheduler else None,
            on_silence=self._silence if scheduler else None,
            on_trouble=partial(self._trouble, lane),
            on_reopen=partial(reopen, self.site),
            on_raised=partial(tell_held, self.site) if scheduler else None,
            running=self.site.running if scheduler else tuple,
            settings_revision=lambda: self.site.settings.revision if scheduler else 0,
            pace=pace_of(lane, self.site.settings.lane_beat_s),
            spread=self.host.rng.random,
            boot=self.host.boot,
        )

    async def _instructed(self, instructions: Sequence[Instruction], exchange: Exchange) -> None:
        await self.site.take(instructions, sent_boot_s=exchange.sent_boot_s, acknowledged=exchange.acknowledged)

    async def _answered(self, exchange: Exchange) -> None:
        if exchange.synced.state is LaneState.OK:
            await self.site.answered(exchange.synced.lease_s, exchange.sent_boot_s)

    async def _silence(self, since: datetime | None) -> None:
        if since is not None or self.host.was_alone:
            self.host.seen(f"{self.host.name}: {'heard again' if since is None else 'islanded'}")
        self.host.was_alone = since is not None

    async def _trouble(self, lane: Lane, trouble: Trouble | None, _text: str) -> None:
        self.host.seen(f"{self.host.name}/{lane}: {trouble.value if trouble else 'good'}")

    def _rules_here(self) -> bool:
        """No other session of this site took over, as far as the scheduler's lane heard."""
        lane = self.lanes.get(Lane.SCHEDULER)
        return lane is None or lane.trouble not in (Trouble.SUPERSEDED, Trouble.CONTESTED)

    async def _settings(self, sealed: Sealed, revision: int) -> None:
        await self.site.apply(sealed, revision)
        for lane in self.lanes.values():
            lane.set_beat(self.site.settings.lane_beat_s)

    async def _tick(self) -> None:
        while True:
            try:
                await self.site.tick()
            except IntertieError as err:
                LOG.warning("a tick was put off", code=err.code, text=err.text)
            await asyncio.sleep(TICK_S * self.host.scale)

    async def _watch(self) -> None:
        """Telemetry, and freed devices for the owner's own work."""
        while True:
            self.site.owner.devices_freed()
            if self.bus.connected:
                try:
                    await self.bus.publish(local_telemetry_subject("n1"), encode_sample(self._sample()))
                except IntertieError as err:
                    LOG.warning("a beat was put off", code=err.code, text=err.text)
            await asyncio.sleep(self.site.settings.telemetry_beat_s)

    def _sample(self) -> NodeSample:
        self.sequence += 1
        books = self.site.books
        local = {attempt.id: attempt.local is not None for attempt in books.attempts.values()}
        devices = [
            DeviceSample(id=d.id, pool=POOL, kind=d.kind, state=state_of(POOL, d, books.holds, local, {})) for d in self.host.pool.devices
        ]
        return NodeSample(node="n1", sampled=self.host.clock.now(), sequence=self.sequence, devices=devices)


def joined_as(site: SiteName, scheduler_key: str, owner: TenantName) -> Joined:
    return Joined(site=site, account="A", bus_urls=[], gateway_url="", service_keys={"scheduler": scheduler_key}, owner_tenant=owner)
