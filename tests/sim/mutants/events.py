"""Outbox, stream, read models and leaders (LINK D19, D20, D26)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.sim.mutants.base import Mutant, swapped, two_schedulers

from intertie.metering import service as metering
from intertie.store import MemoryStore, Relay


def an_event_counts_by_its_arrival() -> Any:
    """What comes last is believed, whatever version it says: a late repeat takes a record back."""
    load = metering.Metering._apply

    async def last_word(self: metering.Metering, attempt: Any, news: Callable[[Any], Any], why: str, mark: Any = None, **more: Any) -> None:
        def believed(evidence: Any) -> Any:
            if not why.startswith("attempt") or evidence.snapshot is None:
                return news(evidence)
            blank = replace(evidence, snapshot=None)
            return replace(evidence, snapshot=news(blank).snapshot)

        await load(self, attempt, believed, why, None if why.startswith("attempt") else mark, **more)

    return swapped(metering.Metering, "_apply", last_word)


def the_stream_is_trusted_after_a_wipe() -> Any:
    """What was once acknowledged counts as sent, although the stream was made anew."""
    compare = Relay._compare

    async def trusting(self: Relay, leader: Any) -> Any:
        known = await self._outbox.mark(self._stream.name)
        if known is None:
            return await compare(self, leader)
        self._look = False
        await self._bus.ensure_stream(self._stream)
        return known

    return swapped(Relay, "_compare", trusting)


def nobody_says_heads() -> Any:
    """A consumer that missed the last event before a quiet night never knows."""

    async def silent(self: Relay) -> None:
        return

    return swapped(Relay, "_say_heads", silent)


def a_leader_writes_without_a_fence() -> Any:
    """The lock alone: it dies with its connection, and the old leader's writes go on."""

    async def open_door(self: MemoryStore, leader: Any) -> None:
        return

    return swapped(MemoryStore, "fence", open_door)


MUTANTS = (
    Mutant(an_event_counts_by_its_arrival, "applied by arrival, not version", "9", ("reordered", "doubled", "crash", "wipe")),
    Mutant(the_stream_is_trusted_after_a_wipe, "`sent` trusted after the stream was re-created", "9", ("wipe", "hollow")),
    Mutant(nobody_says_heads, "no heads beat", "9", ("purged", "crash", "hub_gone")),
    Mutant(a_leader_writes_without_a_fence, "lock without fence in the write", "11", ("office", "pause"), two_schedulers),
)
