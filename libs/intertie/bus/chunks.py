"""A stream of numbered parts over a bus that may repeat, reorder and lose: pure halves of one direction, sans-I/O.

The bus carries at most once and, while credentials are renewed, over two connections side by side: a part may come twice or before the one ahead of
it. `Ordered` gives parts on in order and once; what is missing shows as `gap`, and the shell decides how long to bear it. `Credit` is the
sender's half of back-pressure: totals, not differences, so that a repeat or a loss of one grant changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from intertie.errors import Refused

T = TypeVar("T")

# Parts that came too early; more is no reordering but a sender that gives no heed to its credit.
MOST_HELD = 64


@dataclass(slots=True)
class Ordered(Generic[T]):
    """Parts from 1 on, each once, in order."""

    next: int = 1
    held: dict[int, T] = field(default_factory=dict)
    told: int = 0
    """The highest number that the sender says it has sent."""

    def take(self, seq: int, part: T) -> list[T]:
        """What can be given on now. `Refused('chunks.flood')` if more than `MOST_HELD` parts wait for a missing one."""
        self.told = max(self.told, seq)
        if self.known(seq):
            return []
        self.held[seq] = part
        ready: list[T] = []
        while self.next in self.held:
            ready.append(self.held.pop(self.next))
            self.next += 1
        if len(self.held) > MOST_HELD:
            raise Refused("chunks.flood", f"{len(self.held)} parts wait for part {self.next}")
        return ready

    def known(self, seq: int) -> bool:
        """It came before."""
        return seq < self.next or seq in self.held

    def heard(self, sent: int) -> None:
        """The sender says that it has sent so many."""
        self.told = max(self.told, sent)

    @property
    def gap(self) -> bool:
        """A part was sent that has not come."""
        return self.told >= self.next


@dataclass(slots=True)
class Credit:
    """How much may be sent. Bytes."""

    through: int
    sent: int = 0

    def grant(self, through: int) -> None:
        """Totals only grow: a late one changes nothing."""
        self.through = max(self.through, through)

    def room(self) -> int:
        return max(0, self.through - self.sent)

    def spend(self, count: int) -> None:
        self.sent += count


@dataclass(slots=True)
class Window:
    """The receiver's half: grants a new total once a quarter of the window was passed on."""

    size: int
    passed: int = 0
    granted: int = 0

    def __post_init__(self) -> None:
        self.granted = self.granted or self.size

    def passed_on(self, count: int) -> int | None:
        """The new total to grant, or None while the last one is still good."""
        self.passed += count
        if self.passed + self.size - self.granted < self.size // 4:
            return None
        self.granted = self.passed + self.size
        return self.granted
