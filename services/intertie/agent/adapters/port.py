"""What the agent asks of whatever runs the work: prepare, start once, see it end, stop it, find it again after a crash.

Everything is named by the attempt, every verb may be repeated, and an adapter keeps what it knows where it survives the agent. An adapter
that passes `tests/adapters/test_adapter_port.py` can run a site.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from intertie.agent.core.attempts import Exit
from intertie.agent.core.leases import Deadline
from intertie.agent.core.model import Attempt, StartedRecord
from intertie.contracts.job import ResultRef
from intertie.ids import AttemptId


class Presence(StrEnum):
    """What is found of an attempt when the agent comes back."""

    ABSENT = "absent"
    PREPARED = "prepared"
    """Files, but nothing was ever started, and nothing will be without us."""
    BEGUN = "begun"
    """A supervisor took it; it may still run, or have ended."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a log from `offset`; `total` is its length now."""

    data: bytes
    offset: int
    total: int


class Adapter(Protocol):
    """Errors: `Refused` (this work can never run here), `Unavailable` (not now)."""

    @property
    def single_user(self) -> bool:
        """True if all work runs as the agent's own user."""
        ...

    @property
    def self_stop(self) -> bool:
        """True if leased work is stopped at its deadline by what runs it, with the agent dead or stopped. Without it no such work is taken."""
        ...

    def may_run_as(self, account: str) -> str:
        """Empty if work may run as this local account, else why not."""
        ...

    async def prepare(self, attempt: Attempt, pack: Path | None) -> None:
        """Make everything ready: folder, script, environment, the work unpacked. May be repeated until it is started."""
        ...

    async def start(self, attempt: Attempt) -> StartedRecord | Exit:
        """Start it, at most once whoever else tries; its record just before exec, or how it failed before there was one.

        `refused_errno` ETIME: what runs it found, before the user's code, that the time for it had passed.
        """
        ...

    async def renew(self, attempt: AttemptId, until: Deadline) -> None:
        """Say until when it may run, before its start and then again and again; whole or not at all. `Unavailable`: what was said before stands."""
        ...

    async def deadline(self, attempt: AttemptId) -> Deadline | None:
        """What was said last; None if nothing was."""
        ...

    async def presence(self, attempt: AttemptId) -> Presence: ...

    async def found(self) -> list[Attempt]:
        """All work that is kept here, as it was prepared, until `trim`: a site that lost its journal knows from this what it runs."""
        ...

    async def fence(self, attempt: AttemptId) -> bool:
        """Make sure that it never starts from here on; False if it already began."""
        ...

    async def ended(self, attempt: Attempt) -> Exit:
        """Wait until every process of it was seen gone; at once if that was so before."""
        ...

    async def alive(self, attempt: AttemptId) -> bool:
        """True if it surely runs now: it was started and its end is not recorded. False says nothing."""
        ...

    async def stop(self, attempt: AttemptId, grace_s: int) -> None:
        """Ask for its end; returns at once. Final."""
        ...

    async def pack(self, attempt: Attempt) -> ResultRef | None:
        """The declared outputs of ended work, packed and kept at `result`; None if nothing matched. `Refused` if it cannot be packed."""
        ...

    def result(self, attempt: AttemptId) -> Path:
        """Where `pack` left its file; kept until `forget`."""
        ...

    async def log(self, attempt: AttemptId, offset: int, limit: int) -> Chunk:
        """What it wrote, from a byte offset (at most its end)."""
        ...

    async def trim(self, attempt: AttemptId) -> None:
        """Remove the work and results of ended work and what it was made from, and keep its log."""
        ...

    async def forget(self, attempt: AttemptId) -> None:
        """Remove all that is kept of it. Only for work that ended or never began."""
        ...

    def roots(self) -> dict[int, AttemptId]:
        """Pids below which every process is ours."""
        ...
