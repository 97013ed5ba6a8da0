"""Segments, counts, charges and clocks (LINK D13–D16)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import msgspec
from tests.sim.mutants.base import Mutant, over_the_border, swapped, together

from intertie.agent import borders, course
from intertie.agent.core import usage
from intertie.contracts.link import EntryBase, Lane
from intertie.link.journal import NextSeq
from intertie.metering.core import attribution, books, reckon
from intertie.rating import rate

# Death just before or after a commit: the window of such a mutant is one commit wide.
DOOMS = ("doom_before", "doom_after")


def segments_and_end_in_two_transactions() -> Any:
    """The end is journalled, then its segments; an agent that dies in between has ended it, and never says them. (The other way round does no harm
    since a segment's id follows from its attempt and place: what is said again is the same.)"""
    ended = course.Course._ended

    async def in_two(self: course.Course, *args: Any, **more: Any) -> None:
        record = self.site.record

        async def recorded(entries: Any, also: Any) -> None:
            if Lane.METERING not in entries({lane: 1 for lane in Lane}):
                await record(entries, also)
                return
            kept: list[Mapping[Lane, Sequence[EntryBase]]] = []

            def end(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
                kept.append(entries(following))
                return {Lane.SCHEDULER: kept[-1][Lane.SCHEDULER]}

            def segments(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
                first = following[Lane.METERING]
                return {Lane.METERING: [msgspec.structs.replace(one, seq=first + n) for n, one in enumerate(kept[-1][Lane.METERING])]}

            await record(end, also)
            await record(segments, lambda _: None)

        with swapped(self.site, "record", recorded):
            await ended(self, *args, **more)

    return swapped(course.Course, "_ended", in_two)


def an_attempt_is_complete_without_counts() -> Any:
    """Ended is complete: what comes late was never waited for."""
    return swapped(books, "_counts", lambda record, held, evidence: "")


def a_segment_without_signed_attribution_is_believed() -> Any:
    """Whatever a site signs is somebody's usage."""
    prove = attribution._prove

    class Whatever:
        """As good an attribution as any."""

        def __getattr__(self, _name: str) -> Any:
            return self

        def __eq__(self, _other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    def trusting(item: Any, *more: Any) -> Any:
        reason, word = prove(item, *more)
        return ("", Whatever()) if reason == attribution.Reason.NO_ATTRIBUTION else (reason, word)

    return swapped(attribution, "_prove", trusting)


def a_hold_expires_while_its_attempt_is_open() -> Any:
    """Once it runs the money is free again: what was set aside was for the offer."""
    hold = reckon._hold

    def expired(evidence: Any, spec: Any, closed: bool) -> Decimal:
        return Decimal(0) if evidence.record is not None and evidence.record.state == "running" else hold(evidence, spec, closed)

    return swapped(reckon, "_hold", expired)


def a_cancel_voids_the_charge() -> Any:
    """A job that was cancelled after an hour pays nothing."""

    def void(segments: Any, spec: Any, outcome: Any, *more: Any) -> Any:
        rated = rate(segments, spec, outcome, *more)
        return replace(rated, amount=Decimal(0)) if outcome == "cancelled" else rated

    return swapped(reckon, "rate", void)


def rounding_is_per_segment() -> Any:
    """Each segment is rounded up by itself: a border of a period makes a run dearer."""

    def piecewise(segments: Any, spec: Any, *more: Any) -> Any:
        whole = rate(segments, spec, *more)
        cents = sum((rate([one], spec, *more).amount.quantize(Decimal("0.001"), "ROUND_UP") for one in segments), Decimal(0))
        return replace(whole, amount=cents) if segments else whole

    return swapped(reckon, "rate", piecewise)


def utc_is_anchored_again() -> Any:
    """Each segment's bounds come from the wall clock of the moment in which it is written."""
    clocks: list[Any] = []
    anchor = usage.anchor

    def fresh(started: Any, kernel_boot: str) -> Any:
        found = anchor(started, kernel_boot)
        if not clocks:
            return found
        clock = clocks[-1]
        return msgspec.structs.replace(found, utc=clock.now() - timedelta(seconds=clock.boot_s() - found.boot_s))

    ending, tell = course.Course._ending, borders.Borders._tell

    def at_end(self: Any, *args: Any, **more: Any) -> Any:
        clocks.append(self.site.clock)
        try:
            return ending(self, *args, **more)
        finally:
            clocks.pop()

    async def at_border(self: Any, attempt: Any, passed: Any) -> None:
        clocks.append(self._site.clock)
        try:
            await tell(self, attempt, passed)
        finally:
            clocks.pop()

    return together(
        swapped(usage, "anchor", fresh), swapped(course.Course, "_ending", at_end), swapped(borders.Borders, "_tell", at_border)
    )


def a_segment_that_comes_again_is_added() -> Any:
    """A segment is known by the entry that it came in, not by its id: what a new journal says again is used again, and paid again."""
    judge = attribution.judge

    def apart(items: Any, *more: Any) -> Any:
        names = [replace(item, segment=msgspec.structs.replace(item.segment, id=f"{item.segment.id}-{item.journal}")) for item in items]
        return judge(names, *more)

    def piecewise(segments: Any, spec: Any, *more: Any) -> Any:
        whole = rate(segments, spec, *more)
        return replace(whole, amount=sum((rate([one], spec, *more).amount for one in segments), Decimal(0))) if segments else whole

    return together(swapped(reckon, "judge", apart), swapped(reckon, "rate", piecewise))


MUTANTS = (
    Mutant(segments_and_end_in_two_transactions, "segment and state in two transactions", "7, 8", DOOMS),
    Mutant(an_attempt_is_complete_without_counts, "attempt complete without counts", "7, 8", ("cut", "lossy", "database")),
    Mutant(a_segment_without_signed_attribution_is_believed, "segment without signed attribution believed", "7, 8", ("forged",)),
    Mutant(a_hold_expires_while_its_attempt_is_open, "hold expires while open", "7, 8", ("cut",)),
    Mutant(a_cancel_voids_the_charge, "void on cancel drops late usage", "7, 8", ("cut",)),
    Mutant(rounding_is_per_segment, "rounding per segment", "7, 8", ("cut",)),
    Mutant(a_segment_that_comes_again_is_added, "plain: duplicate segment added", "7, 8", ("gone",)),
    Mutant(utc_is_anchored_again, "re-anchored UTC", "7, 8", ("step",), over_the_border),
)
