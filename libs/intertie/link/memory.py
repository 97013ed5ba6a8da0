"""A journal in memory with a disk's manners, for tests and the simulator. It passes the same suite as the agent's SQLite journal.

What is written and what is durable are two things: a crash loses what was not yet fsynced. `Disk` outlives the journal, as a file outlives its
process; `crash()` takes the power away, `copy()` is a snapshot or a clone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from intertie.contracts.base import encode
from intertie.contracts.link import Instruction, Lane
from intertie.errors import Refused, Unavailable
from intertie.ids import Digest, InstructionId, JournalId
from intertie.link.journal import Batch, Build, InstructionMark, first_digest, next_digest


@dataclass(slots=True)
class _LaneOnDisk:
    head: int
    """Number of the last entry."""
    base: int
    """Entries up to here are forgotten."""
    entries: list[tuple[bytes, Digest]]
    """Entry base+1 …, each with its digest."""
    base_digest: Digest
    ack_through: int = 0
    safe_through: int = 0
    epochs: tuple[int, int] = (0, 0)

    def digest_at(self, seq: int) -> Digest:
        return self.base_digest if seq == self.base else self.entries[seq - self.base - 1][1]


@dataclass(slots=True)
class _Content:
    lanes: dict[Lane, _LaneOnDisk]
    instructions: dict[InstructionId, Instruction] = field(default_factory=dict)
    mark: InstructionMark = InstructionMark(0, 0)

    def copy(self) -> _Content:
        lanes = {lane: replace(at, entries=list(at.entries)) for lane, at in self.lanes.items()}
        return _Content(lanes, dict(self.instructions), self.mark)


class Disk:
    """What a journal's file holds: as the process sees it, and as it would be found after a loss of power."""

    def __init__(self, journal: JournalId, *, place: str = "") -> None:
        self.journal = journal
        self.place = place
        self.written = _Content({lane: _LaneOnDisk(0, 0, [], first_digest(journal)) for lane in Lane})
        self.durable = self.written.copy()
        self.refusing = False
        """True: the disk is full, every write fails."""

    def sync(self) -> None:
        self.durable = self.written.copy()

    def lose_power(self) -> None:
        """Only what was fsynced is there afterwards."""
        self.written = self.durable.copy()

    def copy(self) -> Disk:
        """A snapshot, as a backup or a cloned volume would hold it."""
        twin = Disk(self.journal)
        twin.durable, twin.written = self.durable.copy(), self.durable.copy()
        return twin


async def _at_once() -> None:
    """An fsync that takes no time."""


class MemoryJournal:
    """The journal port on a `Disk`. `fsync` is awaited between writing and durability: a test crashes there."""

    def __init__(self, disk: Disk, fsync: Callable[[], Awaitable[None]] = _at_once) -> None:
        self.disk = disk
        self._fsync = fsync
        self._dead = False

    @classmethod
    def new(cls, journal: str = "jnl-memory") -> MemoryJournal:
        return cls(Disk(JournalId(journal)))

    def crash(self) -> Disk:
        """The machine lost power: this object answers no more, and the disk holds what was fsynced."""
        self._dead = True
        self.disk.lose_power()
        return self.disk

    @property
    def id(self) -> JournalId:
        return self.disk.journal

    @property
    def place(self) -> str:
        return self.disk.place

    async def append(self, build: Build) -> None:
        content = self._writable()
        staged: list[tuple[_LaneOnDisk, list[tuple[bytes, Digest]]]] = []
        for lane, entries in build({lane: at.head + 1 for lane, at in content.lanes.items()}).items():
            on_disk = content.lanes[lane]
            seq, digest, chained = on_disk.head, on_disk.digest_at(on_disk.head), list[tuple[bytes, Digest]]()
            for entry in entries:
                seq += 1
                if entry.seq != seq:
                    raise AssertionError(f"entry for lane {lane} carries number {entry.seq}, {seq} is next")
                raw = encode(entry)
                digest = next_digest(digest, raw)
                chained.append((raw, digest))
            staged.append((on_disk, chained))
        for on_disk, chained in staged:
            on_disk.entries.extend(chained)
            on_disk.head += len(chained)
        await self._commit()

    async def batch(self, lane: Lane, after: int, limit_bytes: int) -> Batch:
        self._alive()
        on_disk = self.disk.durable.lanes[lane]
        if after < on_disk.base:
            raise Refused(
                "agent.journal_forgotten", f"lane {lane} is asked for entries after {after}, those up to {on_disk.base} are forgotten"
            )
        if after > on_disk.head:
            raise Refused("agent.journal_behind", f"lane {lane} is asked for entries after {after}, this journal ends at {on_disk.head}")
        entries, size = list[bytes](), 0
        for raw, _ in on_disk.entries[after - on_disk.base :]:
            if entries and size + len(raw) > limit_bytes:
                break
            entries.append(raw)
            size += len(raw)
        at_head = after + len(entries) == on_disk.head
        return Batch(after + 1, on_disk.digest_at(after), entries, at_head, forgotten=on_disk.base, journal=self.id)

    async def acknowledged(self, lane: Lane, ack_through: int, safe_through: int, journal: JournalId | None = None) -> None:
        on_disk = self._writable().lanes[lane]
        if journal is not None and journal != self.id:
            return
        on_disk.ack_through = min(max(on_disk.ack_through, ack_through), on_disk.head)
        on_disk.safe_through = min(max(on_disk.safe_through, safe_through), on_disk.ack_through)
        if on_disk.safe_through > on_disk.base:
            on_disk.base_digest = on_disk.digest_at(on_disk.safe_through)
            del on_disk.entries[: on_disk.safe_through - on_disk.base]
            on_disk.base = on_disk.safe_through
        await self._commit()

    async def marks(self, lane: Lane) -> tuple[int, int]:
        self._alive()
        on_disk = self.disk.durable.lanes[lane]
        return on_disk.ack_through, on_disk.safe_through

    async def epochs(self, lane: Lane) -> tuple[int, int]:
        self._alive()
        return self.disk.durable.lanes[lane].epochs

    async def remember_epochs(self, lane: Lane, known: int, ready: int) -> None:
        on_disk = self._writable().lanes[lane]
        on_disk.epochs = max(on_disk.epochs[0], known), max(on_disk.epochs[1], ready)
        await self._commit()

    async def take(self, instructions: Sequence[Instruction]) -> Sequence[Instruction]:
        if not instructions:
            return []
        content = self._writable()
        fresh = list[Instruction]()
        for one in instructions:
            if one.id not in content.instructions:
                content.instructions[one.id] = one
                fresh.append(one)
            if (one.epoch, one.number) > (content.mark.epoch, content.mark.number):
                content.mark = InstructionMark(one.epoch, one.number)
        await self._commit()
        return fresh

    async def instruction_mark(self) -> InstructionMark:
        self._alive()
        return self.disk.durable.mark

    def _alive(self) -> None:
        if self._dead:
            raise Unavailable("agent.journal_closed", "this journal's machine lost its power")

    def _writable(self) -> _Content:
        self._alive()
        if self.disk.refusing:
            raise Unavailable("agent.disk_full", "the journal's disk refused a write: nothing was written", retry_after_s=10)
        return self.disk.written

    async def _commit(self) -> None:
        await self._fsync()
        self._alive()
        self.disk.sync()
