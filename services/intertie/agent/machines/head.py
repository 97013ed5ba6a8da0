"""The head: what it gave to its nodes, what they said of it, and which of them are there. To a node it is the keeper of its one lane.

Decisions are `agent.core.placed`'s; here they are taken one after the other under the store's turn, and are on disk before anybody acts on them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from sqlite3 import Cursor

import msgspec

from intertie.agent.core import placed
from intertie.agent.core.leases import Deadline
from intertie.agent.core.model import StartedRecord
from intertie.agent.core.placed import Work
from intertie.agent.core.usage import EPOCH
from intertie.agent.machines.store import HeadStore, Tables, get_meta, mark_interpreted, put_meta
from intertie.bus.memory import MemoryBroker
from intertie.clock import Clock
from intertie.contracts.base import encode
from intertie.contracts.link import HeldTold, Instruction, JournalOpened, Lane, SchedulerEntry, Started
from intertie.contracts.site import Device
from intertie.contracts.telemetry import NodeSample
from intertie.errors import NotFound, Refused
from intertie.ids import AttemptId, SiteName
from intertie.lane.keeper import LaneKeeper
from intertie.lane.ports import LaneEntry
from intertie.link.journal import InstructionMark
from intertie.link.keeper import SiteRow
from intertie.observe import log
from intertie.trust.keys import Key

LOG = log.get("machines.head")

# A head's file that was made anew is a later epoch than any before it: minutes since then.
FIRST_DAY = datetime(2025, 1, 1, tzinfo=UTC)
# Without a sample for this long a node is not there. The hub's own limit for a site's telemetry.
FRESH_S = 15.0
# Of one node; no machine has more, and a node that says so is not believed further.
MOST_CARDS = 256
# So many runs in a row that a node could not begin, by its own fault, set it aside: a broken machine is always free, and would take them all.
BREAK_AFTER = 3


class NodeKept(msgspec.Struct, frozen=True, kw_only=True):
    """A node as it is on disk."""

    name: SiteName
    key: str
    joined_at: datetime
    slots: int = 0
    revoked_at: datetime | None = None
    cordoned: bool = False
    reason: str = ""
    devices: list[Device] = []
    """Its cards as it saw them last: a node that is away keeps its devices, as unknown ones."""
    version: str = ""
    single_user: bool = False
    last_word: datetime | None = None
    """When it was last heard, noted when it is lost."""


@dataclass(slots=True)
class Live:
    """What a connected node said just now."""

    since: datetime
    sample: NodeSample | None = None
    sampled_s: float = 0.0
    """This head's monotonic clock at its arrival."""


_node = msgspec.json.Decoder(NodeKept).decode
_work = msgspec.json.Decoder(Work).decode
_entry = msgspec.json.Decoder(SchedulerEntry)


class Head:
    """Make it, `await open()`, run `keeper.run()` beside everything else."""

    def __init__(self, store: HeadStore, key: Key, clock: Clock, folder: Path) -> None:
        """`key` seals offers; `folder` holds packs on their way out and results on their way home."""
        self.store, self.key, self.clock, self.folder = store, key, clock, folder
        self.broker = MemoryBroker(clock)
        self.bus = self.broker.client("head")
        self.nodes: dict[SiteName, NodeKept] = {}
        self.live: dict[SiteName, Live] = {}
        self.works: dict[AttemptId, Work] = {}
        self.rows: dict[SiteName, SiteRow] = {}
        """Each node's lane as it was heard last."""
        self.epoch, self._next = 1, 1
        self.fresh_s = FRESH_S
        self._node_turn = asyncio.Lock()
        self._news = asyncio.Event()
        self._faults: dict[SiteName, int] = {}
        """Runs in a row that a node could not begin."""
        self.keeper = LaneKeeper(
            self.bus,
            Lane.SCHEDULER,
            Tables(store),
            clock,
            interpret=self._interpret,
            instructions=self._instructions,
            on_heard=self._heard,
            epoch=lambda: self.epoch,
            leases=self._leases,
        )

    @property
    def packs(self) -> Path:
        return self.folder / "packs"

    @property
    def results(self) -> Path:
        return self.folder / "results"

    async def open(self) -> None:
        for path in (self.folder, self.packs, self.results):
            await asyncio.to_thread(partial(path.mkdir, mode=0o700, exist_ok=True))

        def load(cursor: Cursor) -> tuple[int, int, list[NodeKept], list[Work]]:
            if get_meta(cursor, "epoch") is None:
                put_meta(cursor, "epoch", str(self._minutes()))
            nodes = [_node(row[0]) for row in cursor.execute("SELECT body FROM node ORDER BY name").fetchall()]
            works = [_work(row[0]) for row in cursor.execute("SELECT body FROM work ORDER BY attempt").fetchall()]
            return int(get_meta(cursor, "epoch") or 1), int(get_meta(cursor, "next") or 1), nodes, works

        self.epoch, self._next, nodes, works = await self.store.write(load)
        self.nodes = {node.name: node for node in nodes}
        self.works = {work.attempt.id: work for work in works}

    # --- nodes ---

    def node(self, name: str) -> NodeKept:
        """`NotFound` for a name that never joined."""
        if (found := self.nodes.get(SiteName(name))) is None:
            raise NotFound("machines.no_node", f"there is no node {name[:80]!r} here", next_step="intertie node list")
        return found

    async def change_node(self, name: SiteName, decide: Callable[[NodeKept | None], NodeKept | None]) -> NodeKept | None:
        """Decide on the node as it is now, and have it on disk; one change at a time, so that none undoes another (a cordon, a revocation)."""
        async with self._node_turn:
            before = self.nodes.get(name)
            after = decide(before)
            if after is not None and after != before:
                sql = "INSERT INTO node VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET body = excluded.body"
                await self.store.write(lambda cursor: cursor.execute(sql, (after.name, encode(after))))
                self.nodes[name] = after
            return after

    async def note_node(self, name: SiteName, **changes: object) -> NodeKept | None:
        """These fields of a node that is known; None for one that is not."""
        return await self.change_node(name, lambda now: None if now is None else msgspec.structs.replace(now, **changes))

    async def take_sample(self, name: SiteName, sample: NodeSample) -> None:
        """A node's telemetry: its cards are learned, and it is there for a while from now."""
        live, kept = self.live.get(name), self.nodes.get(name)
        if live is None or kept is None or kept.revoked_at is not None:
            return
        live.sample, live.sampled_s = sample, self.clock.monotonic_s()
        known = {device.id: device for device in kept.devices}
        for seen in sample.devices:
            if seen.kind == "gpu" and (seen.id in known or len(known) < MOST_CARDS):
                before = known.get(seen.id)
                memory = seen.memory_total_mib or (before.memory_mib if before else 0)
                known[seen.id] = Device(id=seen.id, kind=seen.kind, model=seen.model, memory_mib=memory, node=name)
        if list(known.values()) != kept.devices:
            await self.note_node(name, devices=list(known.values()))

    def reachable(self, name: SiteName) -> bool:
        live = self.live.get(name)
        return live is not None and live.sample is not None and self.clock.monotonic_s() - live.sampled_s <= self.fresh_s

    # --- work ---

    def work(self, attempt: AttemptId) -> Work | None:
        """None for what is not a node's, or is forgotten."""
        found = self.works.get(attempt)
        return None if found is None or found.forgotten else found

    async def place(self, work: Work) -> None:
        async with self.store.turn:
            await self.store.write(partial(self._write_work, work, number=self._next))
            self.works[work.attempt.id] = work
            self.tell()

    async def change(self, attempt: AttemptId, decide: Callable[[Work], Work]) -> Work:
        """Decide on the work as it is now, and have it on disk. `KeyError` if it is not there."""
        async with self.store.turn:
            before = self.works[attempt]
            after, number = decide(before), self._next
            if after is not before:
                await self.store.write(partial(self._write_work, after, number=number))
                self.works[attempt] = after
                self.tell()
        return after

    def number(self) -> int:
        """The next instruction's; only inside a decision, whose writing keeps it."""
        self._next += 1
        return self._next - 1

    def _write_work(self, work: Work, cursor: Cursor, *, number: int = 0) -> None:
        sql = "INSERT INTO work VALUES (?, ?, ?) ON CONFLICT (attempt) DO UPDATE SET body = excluded.body"
        cursor.execute(sql, (work.attempt.id, work.node, encode(work)))
        if number:
            put_meta(cursor, "next", str(number))

    async def drop(self, attempt: AttemptId) -> None:
        async with self.store.turn:
            await self.store.write(lambda cursor: cursor.execute("DELETE FROM work WHERE attempt = ?", (attempt,)))
            self.works.pop(attempt, None)

    def tell(self) -> None:
        """Somebody may wait for this."""
        self._news.set()
        self._news = asyncio.Event()

    async def news(self, timeout_s: float | None = None) -> None:
        """Return when some work changed, or after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()

    async def nudge(self, node: SiteName) -> None:
        await self.keeper.nudge(node)

    # --- the lane ---

    async def _heard(self, rows: Sequence[SiteRow]) -> None:
        for row in rows:
            self.rows[row.site] = row
            if row.epoch_told > self.epoch:
                await self._raise_epoch(row.site, row.epoch_told)

    async def _raise_epoch(self, node: SiteName, known: int) -> None:
        """A node has on disk what this file never gave: it was put back to an older one. Numbers begin again in a higher epoch."""
        async with self.store.turn:
            epoch = max(self.epoch, known, self._minutes()) + 1
            await self.store.write(lambda cursor: put_meta(cursor, "epoch", str(epoch)))
            LOG.error("this head's file was put back to an older one: a new epoch begins", node=node, before=self.epoch, epoch=epoch)
            self.epoch = epoch

    def _minutes(self) -> int:
        return max(2, int((self.clock.now() - FIRST_DAY).total_seconds() // 60))

    async def _instructions(self, site: SiteName, mark: InstructionMark) -> Sequence[Instruction]:
        kept = self.nodes.get(site)
        if kept is None or kept.revoked_at is not None:
            return []
        if mark.epoch == self.epoch and mark.number >= self._next:
            await self._raise_epoch(site, mark.epoch)
        for work in [one for one in self.works.values() if one.forgotten and one.node == site]:
            if not work.settle_number or mark >= InstructionMark(self.epoch, work.settle_number):
                await self.drop(work.attempt.id)
        works = (work for work in self.works.values() if work.node == site)
        found = [one for work in works if (one := placed.instruction(work, self.epoch, mark)) is not None]
        return sorted(found, key=lambda one: one.number)

    def _leases(self, site: SiteName) -> Mapping[AttemptId, int]:
        """What is left of each lease by this head's clocks: the node counts it from before we looked."""
        left = {}
        for work in self.works.values():
            if work.node == site and work.deadline is not None and not work.over and work.stop_grace_s is None:
                left[work.attempt.id] = int(1000 * self.left_s(work.deadline))
        return left

    def left_s(self, until: Deadline) -> float:
        return max(0.0, min(until.boot_s - self.clock.boot_s(), until.utc - self.clock.now().timestamp()))

    async def _interpret(self, entry: LaneEntry) -> None:
        """One word of a node: what it makes of the work, in the transaction that marks it."""
        try:
            said = _entry.decode(entry.raw)
        except msgspec.MsgspecError as err:
            raise Refused("contract.invalid", f"entry {entry.seq} of node {entry.site}: {err}") from err
        async with self.store.turn:
            first = self._next
            changed = self._changed(entry, said)

            def write(cursor: Cursor) -> None:
                mark_interpreted(cursor, entry)
                for work in changed:
                    self._write_work(work, cursor)
                if self._next != first:
                    put_meta(cursor, "next", str(self._next))

            await self.store.write(write)
            for work in changed:
                self.works[work.attempt.id] = work
        if changed:
            self.tell()
        for work in changed:
            await self._judge_node(work)

    def forgive(self, node: SiteName) -> None:
        """Its owner has looked: what it could not begin before counts no more."""
        self._faults.pop(node, None)

    async def _judge_node(self, work: Work) -> None:
        """A node that begins nothing gets nothing more, until its owner has looked (BR-062)."""
        if placed.began(work):
            self._faults.pop(work.node, None)
        elif (fault := placed.fault_of(work)) and work.node in self.nodes:
            self._faults[work.node] = self._faults.get(work.node, 0) + 1
            node = self.nodes[work.node]
            if self._faults[work.node] >= BREAK_AFTER and not node.cordoned:
                why = f"set aside: {BREAK_AFTER} runs in a row could not begin here, the last one: {fault}"[:300]
                LOG.error("a node is set aside", node=node.name, why=why)
                await self.note_node(node.name, cordoned=True, reason=why)

    def _changed(self, entry: LaneEntry, said: SchedulerEntry) -> list[Work]:
        if isinstance(said, JournalOpened | HeldTold):
            if isinstance(said, HeldTold) or not said.same_place or said.previous is None:
                return []
            held = placed.in_hand(said.held)
            after = [(work, placed.absent(work, held, entry.site)) for work in self.works.values() if work.node == entry.site]
            return [new for old, new in after if new is not old]
        name = getattr(said, "attempt", None)
        work = self.works.get(name) if name is not None else None
        if work is None or work.node != entry.site:
            return []  # Of no concern any more, or no word of this node's to say.
        after_it = placed.heard(work, said, entry.journal, partial(self._started, entry.site), self.number)
        return [after_it] if after_it is not work else []

    def moment(self, node: SiteName) -> StartedRecord:
        """Now, for a start that nobody told."""
        return StartedRecord(
            utc_ns=int(self.clock.now().timestamp() * 1e9), boot_ns=int(self.clock.boot_s() * 1e9), native_id=f"{node}/unknown"
        )

    def _started(self, node: SiteName, said: Started) -> StartedRecord:
        """A node's start on this head's clocks: its wall clock, corrected by what its lane's round trips show."""
        row = self.rows.get(node)
        offset_s = row.clock_offset_s if row is not None and abs(row.clock_offset_s) > row.clock_error_s else 0.0
        now_ns = (self.clock.now() - EPOCH) // timedelta(microseconds=1) * 1000
        # Neither in the future nor before there were such machines: what cannot be is no moment.
        utc_ns = (said.started - EPOCH) // timedelta(microseconds=1) * 1000 + int(offset_s * 1e9)
        utc_ns = min(max(0, utc_ns), now_ns)
        ago_s = (now_ns - utc_ns) / 1e9
        return StartedRecord(
            utc_ns=utc_ns, boot_ns=int((self.clock.boot_s() - ago_s) * 1e9), native_id=f"{node}/{said.native_id}", nodes=[node]
        )
