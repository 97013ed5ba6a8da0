"""The port of a site's journal: what the lanes and the agent need of the disk. SQLite in `intertie.agent.journal`, a twin in `memory`.

Nothing is sent before it is on disk; numbers are gapless per lane, from a counter row in the same transaction; every entry's digest chains
to the one before: d(n) = sha256(d(n-1) bytes ‖ entry bytes), d(0) = sha256(journal id).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from intertie.contracts.link import EntryBase, Instruction, Lane, Sync
from intertie.ids import Digest, JournalId

NextSeq = Mapping[Lane, int]
Build = Callable[[NextSeq], Mapping[Lane, Sequence[EntryBase]]]
"""Given the next number of each lane, the entries of one fact for all lanes; each entry must carry its own number."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries `first_seq`… of one lane as their exact bytes. Empty `entries` with `at_head` is an idle lane."""

    first_seq: int
    digest_before: Digest
    entries: Sequence[bytes]
    at_head: bool
    forgotten: int = field(default=0, compare=False)
    """Entries up to here are gone from this journal."""
    journal: JournalId | None = field(default=None, compare=False)
    """Whose entries they are: read together with them, since a journal may be opened anew at any moment."""


@dataclass(frozen=True, slots=True, order=True)
class InstructionMark:
    """The highest instruction stored, compared as (epoch, number)."""

    epoch: int
    number: int


def mark_of(sync: Sync) -> InstructionMark:
    """What a site says that it has on disk. A site that knows of a new epoch and has no number of it must not seem to have those below its old one."""
    return InstructionMark(sync.instruction_epoch if sync.mark_epoch is None else sync.mark_epoch, sync.instruction_mark)


def first_digest(journal: JournalId) -> Digest:
    """d(0) of a journal."""
    return Digest(f"sha256:{hashlib.sha256(journal.encode()).hexdigest()}")


def next_digest(before: Digest, entry: bytes) -> Digest:
    """d(n) from d(n-1) and the exact bytes of entry n."""
    return Digest(f"sha256:{hashlib.sha256(before.encode('ascii') + entry).hexdigest()}")


class Journal(Protocol):
    """All methods return after fsync. `Unavailable('agent.disk_full')` when the disk refuses: nothing was written."""

    @property
    def id(self) -> JournalId:
        """Random, new whenever the file is created, and whenever the journal is opened anew."""
        ...

    @property
    def place(self) -> str:
        """Where the journal lies: a digest of host and file. Empty if that cannot be told."""
        ...

    async def append(self, build: Build) -> None:
        """Write one fact's entries of all lanes in one transaction."""
        ...

    async def batch(self, lane: Lane, after: int, limit_bytes: int) -> Batch:
        """Entries after number `after`, at least one if any, at most `limit_bytes` together."""
        ...

    async def acknowledged(self, lane: Lane, ack_through: int, safe_through: int, journal: JournalId | None = None) -> None:
        """Remember both marks; entries up to `safe_through` may be forgotten (their digest is kept). `journal`: whose entries were acknowledged;
        if that is not this journal any more, nothing changes."""
        ...

    async def epochs(self, lane: Lane) -> tuple[int, int]:
        """(the highest epoch known of the lane's keeper, the highest of which an answer came at head); 0 if never heard."""
        ...

    async def remember_epochs(self, lane: Lane, known: int, ready: int) -> None:
        """Both only grow."""
        ...

    async def marks(self, lane: Lane) -> tuple[int, int]:
        """(ack_through, safe_through) as last remembered."""
        ...

    async def take(self, instructions: Sequence[Instruction]) -> Sequence[Instruction]:
        """Store instructions and move the mark, in one transaction; those not seen before, in order."""
        ...

    async def instruction_mark(self) -> InstructionMark: ...
