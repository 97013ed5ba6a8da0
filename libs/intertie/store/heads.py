"""Who is behind: the numbers that a consumer has, against the heads that services say. Pure; the consumer (beside this file) does the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from intertie.contracts.base import Head, Heads

# Numbers held beyond a gap. More means that the gap is long and a snapshot is due anyway.
AHEAD = 10_000

# A hub that was never restored.
FIRST_EPOCH = 1

Place = tuple[str, str]
"""(service, noun)."""


@dataclass(slots=True)
class _Noun:
    """One noun of one service: everything through `number` is here, and `ahead` beyond it."""

    epoch: int = 0
    number: int = 0
    ahead: set[int] = field(default_factory=set)
    said: tuple[int, int] | None = None
    """(epoch, number) of the head at the beat before."""
    raised: bool = False
    """Its keeper began another epoch since the last snapshot: it may have forgotten, and now tells otherwise, what is known here."""

    def take(self, epoch: int, number: int) -> None:
        if epoch > self.epoch:
            self.epoch, self.number = epoch, 0
            self.ahead.clear()
        if epoch < self.epoch or number <= self.number:
            return
        if len(self.ahead) < AHEAD:
            self.ahead.add(number)
        self._advance()

    def _advance(self) -> None:
        while self.number + 1 in self.ahead:
            self.number += 1
            self.ahead.discard(self.number)

    def through(self, epoch: int, number: int) -> None:
        self.raised = False
        if (epoch, number) > (self.epoch, self.number):
            if epoch > self.epoch:
                self.ahead.clear()
            self.epoch, self.number = epoch, number
            self.ahead = {n for n in self.ahead if n > number}
            self._advance()

    @property
    def has(self) -> tuple[int, int]:
        return self.epoch, self.number


class HeadsWatch:
    """What has arrived, per service and noun. A number counts when its event was handled, given up, or needed no handling."""

    def __init__(self) -> None:
        self._nouns: dict[Place, _Noun] = {}

    def arrived(self, service: str, noun: str, epoch: int, number: int) -> None:
        """An event of this number was dealt with; number 0 is an event that never had one."""
        if number > 0:
            self._nouns.setdefault((service, noun), _Noun()).take(epoch, number)

    def beat(self, heads: Heads, nouns: Iterable[str]) -> bool:
        """A service says its heads: True if one of `nouns` is behind what was said a beat ago already, so for two beats, or of another epoch than
        the last snapshot. Of which epoch a snapshot was that came before any heads nobody knows: a raised one without an event is taken for another."""
        wanted, behind = set(nouns), False
        for head in heads.heads:
            if head.noun not in wanted:
                continue
            noun = self._nouns.setdefault((heads.service, head.noun), _Noun())
            quiet = noun.said is None and head.epoch > FIRST_EPOCH and head.number == 0
            noun.raised = noun.raised or quiet or (noun.said is not None and head.epoch > noun.said[0])
            behind = behind or noun.raised or (noun.said is not None and noun.said[1] > 0 and noun.has < noun.said)
            noun.said = (head.epoch, head.number)
        return behind

    def said(self, service: str) -> list[Head]:
        """The heads that a service (`*`: every one) said last: a snapshot asked for after that contains them."""
        return [
            Head(service=owner, noun=noun, epoch=held.said[0], number=held.said[1])
            for (owner, noun), held in self._nouns.items()
            if service in (owner, "*") and held.said is not None
        ]

    def contains(self, heads: Iterable[Head]) -> None:
        """A snapshot that states these heads was applied."""
        for head in heads:
            self._nouns.setdefault((head.service, head.noun), _Noun()).through(head.epoch, head.number)
