"""A node's process: `intertie-agent node run`. It works by its own disk, dials its head for ever, and what runs here outlives it.

node.json     who the head is (address, certificate, key), what this node is called, and the pools as the head told them last
keys/         node.nk, made here; it never leaves
the rest      as a site's: journal.db, jobs/, packs/, agent.lock
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from intertie.agent import accounts
from intertie.agent.adapters.house import house_of
from intertie.agent.adapters.process import find_cgroups
from intertie.agent.books import get_setting, put_setting
from intertie.agent.config import VERSION, Folder, write_whole
from intertie.agent.core.devices import Pool
from intertie.agent.journal import SqliteJournal
from intertie.agent.machines.bus import WireBus
from intertie.agent.machines.gate import checked, signed_text
from intertie.agent.machines.node import LineTransfer, NodeAdapter, NodeSite, node_pools
from intertie.agent.machines.wire import Frame, Line, dial, read_token, split_address
from intertie.agent.reopen import begin, recall_place, reopen, tell_held
from intertie.agent.room import spaces_of
from intertie.agent.telemetry import Collector, Telemetry
from intertie.bus.port import Bus, Message
from intertie.clock import Clock, SystemClock
from intertie.contracts.base import decode, encode
from intertie.contracts.identity import Joined
from intertie.contracts.link import Instruction, Lane, LaneState
from intertie.contracts.machines import AskBytes, BytesAnswer, Hail, HailNode, JoinNode, Part, Welcome
from intertie.contracts.site import Device, PoolProfile
from intertie.contracts.telemetry import encode_sample, local_telemetry_subject
from intertie.errors import IntertieError, Refused
from intertie.ids import SessionId, SiteName, TenantName, mint
from intertie.lane.site import SiteLane, listen_for_nudges
from intertie.link.site import Exchange, Trouble, pace_of
from intertie.observe import log
from intertie.runtime import ready, serve
from intertie.trust.keys import Key

LOG = log.get("machines.service")

TICK_S = 1.0
# Between head and node a sync costs a millisecond: soon is cheap here.
LANE_BEAT_S = 2.0


class NodeFile(msgspec.Struct, frozen=True, kw_only=True):
    """`node.json`; nothing in it is secret."""

    node: SiteName
    head: str
    fingerprint: str
    slots: int
    site: SiteName
    head_key: str
    owner_tenant: TenantName
    pools: list[PoolProfile] = []


class NodeFolder(Folder):
    """A node's data folder."""

    @property
    def file(self) -> Path:
        return self.root / "node.json"

    @property
    def node_key(self) -> Path:
        return self.keys / "node.nk"

    def node(self) -> NodeFile:
        """`Refused('node.not_joined')` before the join."""
        try:
            return decode(self.file.read_bytes(), NodeFile, what=str(self.file))
        except FileNotFoundError as err:
            raise Refused(
                "node.not_joined",
                f"{self.root} has no node.json: this machine is no node yet",
                next_step="intertie node join --head HOST:PORT --token-file FILE --data DIR",
            ) from err


def _refusal(frame: Frame) -> IntertieError:
    text, next_step = msgspec.json.decode(frame.body, type=tuple[str, str])
    return Refused(frame.subject, text, next_step=next_step)


async def _hailed(line: Line) -> Hail:
    frame = await line.receive()
    if frame.kind == "refused":
        raise _refusal(frame)
    return decode(frame.body, Hail, what="the head's greeting")


async def _welcomed(line: Line) -> Welcome:
    frame = await line.receive()
    if frame.kind == "refused":
        raise _refusal(frame)
    return decode(frame.body, Welcome, what="the head's welcome")


async def join(folder: NodeFolder, *, head: str, token: str, node: str, slots: int) -> NodeFile:
    """Become a node. Repeating it after a lost answer gives the same node, since its key is the same."""
    split_address(head)
    fingerprint = read_token(token)
    checked(node)
    if folder.site.exists():
        raise Refused("node.is_a_site", f"{folder.root} is a site's own folder", next_step="choose another --data for a node")
    await asyncio.to_thread(folder.make)
    if not folder.node_key.exists():
        Key.new("U").write(folder.node_key)
    key = Key.read(folder.node_key)
    line = await dial(head, fingerprint)
    try:
        await _hailed(line)
        asked = JoinNode(token=token.strip(), node=SiteName(node), key=key.public, slots=slots, version=VERSION)
        await line.send(Frame("join", 0, "", encode(asked)))
        told = await _welcomed(line)
    finally:
        await line.closed()
    made = NodeFile(
        node=told.node,
        head=head,
        fingerprint=fingerprint,
        slots=slots,
        site=told.site,
        head_key=told.head_key,
        owner_tenant=told.owner_tenant,
        pools=told.pools,
    )
    await asyncio.to_thread(write_whole, folder.file, made)
    return made


class NodeAgent:
    """One node over one data folder. `await open()`, `await run…`, `await close()`."""

    def __init__(self, folder: NodeFolder, *, clock: Clock | None = None, beat: float = 1.0, collector: Collector | None = None) -> None:
        self.folder, self.beat = folder, beat
        self.clock = clock or SystemClock()
        self._collector = collector or Collector()
        self.lane: SiteLane | None = None

    async def open(self) -> None:
        """Everything that needs no network."""
        self.folder.make()
        self._lock = self.folder.lock()
        self.file = self.folder.node()
        self.key = Key.read(self.folder.node_key)
        self.journal = await SqliteJournal.open(self.folder.journal)
        stored = await self.journal.read(lambda cursor: get_setting(cursor, "gpus"))
        known = decode(stored, dict[int, Device], what="known GPUs") if stored else {}
        self.telemetry = Telemetry(self._collector, self.clock, self.file.node, known)
        self.bus = WireBus(self._connect, pause=self.beat)
        self.site = NodeSite(
            joined=Joined(
                site=self.file.node,
                account="",
                bus_urls=[],
                gateway_url="",
                service_keys={"scheduler": self.file.head_key},
                owner_tenant=self.file.owner_tenant,
            ),
            key=self.key,
            journal=self.journal,
            adapter=NodeAdapter(self.folder.jobs, cgroups=find_cgroups(), house=house_of(self.folder.rules())),
            clock=self.clock,
            transfer=LineTransfer(self.bus),
            pools=self._pools(),
            packs=self.folder.packs,
            rules=self.folder.rules(),
        )
        self.site.room.spaces = lambda: spaces_of([self.folder.root, self.folder.jobs, self.folder.packs])
        self.site.may_start = self._rules_here
        self.site.islanded = lambda: self.lane is None or self.lane.silent_since is not None
        self.site.offset = self._offset
        self.site.wake = self._wake
        await recall_place(self.site)
        await self.site.recover()
        await begin(self.site)

    async def close(self) -> None:
        """What runs goes on; the next one adopts it."""
        await self.bus.close()
        await self.site.close()
        await self.telemetry.close()
        await self.journal.close()
        os.close(self._lock)

    def _pools(self) -> list[Pool]:
        return node_pools(self.file.pools, list(self.telemetry.known.values()), self.file.node, self.file.slots)

    # --- the line ---

    async def _connect(self) -> Line:
        line = await dial(self.file.head, self.file.fingerprint)
        try:
            hail = await _hailed(line)
            signature = self.key.sign(signed_text(hail.challenge, self.file.fingerprint, self.file.node))
            said = HailNode(
                node=self.file.node,
                signature=base64.urlsafe_b64encode(signature).decode(),
                slots=self.file.slots,
                single_user=not accounts.is_root(),
                version=VERSION,
            )
            await line.send(Frame("node", 0, "", encode(said)))
            await self._take(await _welcomed(line))
        except BaseException:
            await line.closed()
            raise
        return line

    async def _take(self, told: Welcome) -> None:
        """The pools as the head has them now."""
        if told.head_key != self.file.head_key:
            raise Refused("node.other_head", "the head has another key than at the join", next_step="join again: intertie node join")
        if told.pools != self.file.pools or told.owner_tenant != self.file.owner_tenant:
            self.file = msgspec.structs.replace(self.file, pools=told.pools, owner_tenant=told.owner_tenant)
            await asyncio.to_thread(write_whole, self.folder.file, self.file)
            self.site.pools = {pool.name: pool for pool in self._pools()}

    # --- what it does all day ---

    async def speak(self) -> None:
        """The lane, nudges and questions, for ever."""
        self.lane = lane = SiteLane(
            self.bus,
            Lane.SCHEDULER,
            self.journal,
            self.clock,
            site=self.file.node,
            session=SessionId(mint("ses")),
            on_instructions=self._instructed,
            on_answer=self._answered,
            on_reopen=partial(reopen, self.site),
            on_raised=partial(tell_held, self.site),
            running=self.site.running,
            pace=pace_of(Lane.REGISTRY, LANE_BEAT_S * self.beat),
        )
        await listen_for_nudges(self.bus, [lane])
        await self.bus.subscribe("down.ask", self._asked, workers=4, backlog=256)
        await lane.run()

    async def _instructed(self, instructions: Sequence[Instruction], exchange: Exchange) -> None:
        await self.site.take(instructions, sent_boot_s=exchange.sent_boot_s, acknowledged=exchange.acknowledged)

    async def _answered(self, exchange: Exchange) -> None:
        if exchange.synced.state is LaneState.OK:
            await self.site.leases.told(exchange.synced.leases_ms, exchange.sent_boot_s)

    async def _asked(self, message: Message) -> None:
        """Bytes of a log."""
        asked = decode(message.body, AskBytes, what="question")
        part = None
        if asked.attempt in self.site.books.attempts:
            chunk = await self.site.adapter.log(asked.attempt, asked.offset, asked.limit)
            part = Part(offset=chunk.offset, total=chunk.total, data=chunk.data)
        await self.bus.publish("up.answer", encode(BytesAnswer(id=asked.id, part=part)))

    async def watch(self) -> None:
        """Each beat: look at the devices, and tell the head."""
        while True:
            try:
                await self._beat(self.bus)
            except IntertieError as err:
                LOG.info("a beat was put off", code=err.code, text=err.text)
            await asyncio.sleep(max(0.05, self.beat))

    async def _beat(self, bus: Bus) -> None:
        roots = await asyncio.to_thread(self.site.adapter.roots)
        before = dict(self.telemetry.known)
        seen = await self.telemetry.look(roots)
        pools = None
        if self.telemetry.known != before:
            await self.journal.write(put_setting("gpus", encode(self.telemetry.known).decode("utf-8")))
            pools = self._pools()
        await self.site.observe(seen, pools)
        if bus.connected:
            sample = self.telemetry.sample(list(self.site.pools.values()), self.site.books.holds, {}, seen, roots)
            await bus.publish(local_telemetry_subject(self.file.node), encode_sample(sample))

    async def tick(self) -> None:
        while True:
            try:
                await self.site.tick()
            except IntertieError as err:
                LOG.warning("a tick was put off", code=err.code, text=err.text)
            await asyncio.sleep(TICK_S * self.beat)

    # --- what it knows of itself ---

    def _rules_here(self) -> bool:
        return self.lane is None or self.lane.trouble not in (Trouble.SUPERSEDED, Trouble.CONTESTED)

    def _offset(self) -> tuple[float, float]:
        return (self.lane.clock_offset_s, self.lane.clock_error_s or 0.0) if self.lane is not None else (0.0, 0.0)

    def _wake(self, lanes: Collection[Lane]) -> None:
        if self.lane is not None and Lane.SCHEDULER in lanes:
            self.lane.wake()


async def run(folder: NodeFolder, environ: Mapping[str, str]) -> int:
    """The node's process until SIGTERM."""
    agent = NodeAgent(folder, beat=float(environ.get("INTERTIE_BEAT_S", "1")))
    await agent.open()
    try:
        mark = environ.get("INTERTIE_READY_FILE")
        async with ready(Path(mark) if mark else None, "node", {"node": agent.file.node}):
            return await serve(line=agent.bus.run(), lane=agent.speak(), devices=agent.watch(), ticks=agent.tick())
    finally:
        await agent.close()
