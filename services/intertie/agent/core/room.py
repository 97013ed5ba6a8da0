"""Whether a site can take new work: room on its disks and in its journal. What runs goes on either way, and nothing is ever dropped for room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from intertie.agent.core.model import Failing

MIB = 1024 * 1024
AGAIN = 1.25
"""A site that was closed for want of room opens above this times its floor, so that it does not flap."""


@dataclass(frozen=True, slots=True)
class Space:
    """A file system below one of the agent's folders; bytes that an unprivileged writer may still use, and all of them."""

    where: str
    free: int
    size: int


@dataclass(frozen=True, slots=True)
class Floor:
    """Below the smaller of both nothing new is taken."""

    mib: int = 512
    percent: float = 2.0

    def bytes_of(self, space: Space) -> int:
        return min(self.mib * MIB, int(space.size * self.percent / 100))


def shortage(spaces: Sequence[Space], floor: Floor, *, journal_accepts: bool, closed: bool) -> Failing | None:
    """Why nothing new is taken now; None if there is room. `closed`: it was refused until now."""
    if not journal_accepts:
        return Failing(code="journal_full", text="the journal holds as much as it may until the hub has taken some of it")
    for space in spaces:
        least = int(floor.bytes_of(space) * (AGAIN if closed else 1))
        if space.free < least:
            text = (
                f"{space.free // MIB} MiB are free below {space.where}, {least // MIB} MiB are kept for what runs and for the records of it"
            )
            return Failing(code="disk_low", text=text)
    return None
