"""The product with one fault each, as the findings of the link describe them. The simulator is worth what it catches of these.

A mutant is a context manager that puts a faulty piece in and takes it out again. Its docstring says what is wrong and which invariant must see it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from typing import Any

import msgspec

from intertie.agent import course, owner
from intertie.agent.core.devices import choose
from intertie.agent.core.model import Attempt as SiteAttempt
from intertie.agent.journal import SqliteJournal
from intertie.agent.site import Site
from intertie.contracts.link import EntryBase, Go, Lane, Offer
from intertie.ids import InstructionId
from intertie.lane.keeper import LaneKeeper
from intertie.lifecycle import JobEvent
from intertie.link.journal import NextSeq
from intertie.link.keeper import judge
from intertie.metering import service as metering
from intertie.metering.core import reckon
from intertie.rating import rate
from intertie.scheduler.core import interpret
from intertie.scheduler.core.rows import AttemptState, Change, File, line, moved, noted
from intertie.scheduler.memory import MemorySchedulerStore
from intertie.scheduler.rounds import Planner
from intertie.scheduler.store import OpenOrder, Withdrawal
from intertie.sim.machine import SimAdapter
from intertie.sim.scenario import draw
from intertie.sim.world import run
from intertie.store import Relay


@contextmanager
def swapped(owner: object, name: str, value: object) -> Iterator[None]:
    """`owner.name` is `value` inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def starts_on_the_offer() -> Any:
    """LINK D1: the agent starts what it was offered, without waiting for the go. An offer that the hub took back then has a process (1, 2)."""
    claim = Site._claim

    async def eager(self: Site, offer: Offer, attempt: SiteAttempt) -> None:
        await claim(self, offer, attempt)
        go = Go(
            id=InstructionId(f"ins-go-{attempt.id}"), number=1, epoch=1, attempt=attempt.id, job=attempt.job, generation=attempt.generation
        )
        await self._go(go, 1 << 40)

    return swapped(Site, "_claim", eager)


def places_a_claimed_attempt_again_on_silence() -> Any:
    """LINK D1: what was claimed and is silent for a minute is placed elsewhere (1, 5)."""
    take_back = Planner._take_back

    def away(file: File, now: Any) -> Any:
        assert file.attempt is not None
        attempt = noted(file.attempt, record={"state": "withdrawn", "ended_at": now, "reason": "silent"}, live=False)
        job = moved(file.job, JobEvent.REQUEUE, now)
        told = line(job, "taken back", "planner", now, now, why="silent")
        return Change(file, job, attempt, "planner", "silent", now, (told,))

    async def hasty(self: Planner, leader: Any, given: Any) -> None:
        await take_back(self, leader, given)
        now, now_s = self._clock.now(), self._clock.monotonic_s()
        late = [
            Withdrawal(a.record.job, partial(away, now=now))
            for a in given.live
            if a.state is not AttemptState.OFFERED and self._knowledge.hearing.quiet_for_s(a.record.site, now_s) > 60
        ]
        if late:
            await self._store.withdraw(leader, late)

    return swapped(Planner, "_take_back", hasty)


def a_claim_revives_what_was_withdrawn() -> Any:
    """Claim and withdrawal no longer meet on one row: whoever comes last wins, and a go follows (1, 2)."""
    claimed = interpret._claimed

    def late(telling: Any, entry: Any) -> Any:
        if telling.attempt.state is AttemptState.WITHDRAWN:
            revived = noted(telling.attempt, record={"state": "claimed", "claimed_at": entry.at}, live=True)
            return telling.change(telling.job, revived, "claimed")
        return claimed(telling, entry)

    return swapped(interpret, "_claimed", late)


def seq_from_the_highest_row() -> Any:
    """LINK D10 (b): after everything acknowledged was pruned, numbers begin again (3)."""
    append = SqliteJournal.append

    async def counted(self: SqliteJournal, build: Any, also: Any = None) -> None:
        def reset(cursor: Any) -> None:
            cursor.execute("UPDATE lane SET next_seq = (SELECT coalesce(max(seq), 0) + 1 FROM entry WHERE entry.lane = lane.name)")

        await self.write(reset)
        await append(self, build, also)

    return swapped(SqliteJournal, "append", counted)


def acknowledges_before_the_commit() -> Any:
    """The keeper answers first and writes afterwards: what a crash takes is gone on both sides (3)."""
    record = LaneKeeper._record

    async def first_the_word(self: LaneKeeper, group: Any) -> Any:
        verdicts = []
        for waiting in group:
            row = await self._tables.site(self._lane, waiting.site)
            verdicts.append(judge(row, None, waiting.sync, waiting.received, epoch=1, single=True))
        for waiting, verdict in zip(group, verdicts, strict=True):
            if not waiting.verdict.done():
                waiting.verdict.set_result(verdict)
        await asyncio.sleep(0.2)
        return await record(self, group)

    return swapped(LaneKeeper, "_record", first_the_word)


def forgets_before_it_is_acknowledged() -> Any:
    """The agent forgets what it has sent (3)."""
    batch = SqliteJournal.batch

    async def sent_is_gone(self: SqliteJournal, lane: Lane, after: int, limit_bytes: int) -> Any:
        found = await batch(self, lane, after, limit_bytes)
        if found.entries:
            last = found.first_seq - 1 + len(found.entries)

            def forget(cursor: Any) -> None:
                digest = cursor.execute("SELECT digest FROM entry WHERE lane = ? AND seq = ?", (lane.value, last)).fetchone()[0]
                cursor.execute("UPDATE lane SET base_seq = ?, base_digest = ? WHERE name = ?", (last, digest, lane.value))
                cursor.execute("DELETE FROM entry WHERE lane = ? AND seq <= ?", (lane.value, last))

            await self.write(forget)
        return found

    return swapped(SqliteJournal, "batch", sent_is_gone)


def an_instruction_is_said_once() -> Any:
    """The hub stops repeating when the site's mark has passed, not when the answer entry is on disk: a cancel is not repeated (4, 15)."""
    orders = MemorySchedulerStore.orders

    async def once(self: MemorySchedulerStore, site: Any, mark: tuple[int, int]) -> list[OpenOrder]:
        return [order for order in await orders(self, site, mark) if (order.epoch, order.number) > mark]

    return swapped(MemorySchedulerStore, "orders", once)


def segments_and_end_in_two_transactions() -> Any:
    """LINK D13 (b): the segments are journalled, then the end; an agent that dies in between writes the segments twice (7, 8)."""
    ended = course.Course._ended

    async def in_two(self: course.Course, *args: Any, **more: Any) -> None:
        record = self.site.record

        async def recorded(entries: Any, also: Any) -> None:
            if Lane.METERING not in entries({lane: 1 for lane in Lane}):
                await record(entries, also)
                return
            kept: list[Mapping[Lane, Sequence[EntryBase]]] = []

            def segments(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
                kept.append(entries(following))
                return {Lane.METERING: kept[-1][Lane.METERING]}

            def end(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
                (last,) = kept[-1][Lane.SCHEDULER]
                return {Lane.SCHEDULER: [msgspec.structs.replace(last, seq=following[Lane.SCHEDULER])]}

            await record(segments, lambda _: None)
            await record(end, also)

        with swapped(self.site, "record", recorded):
            await ended(self, *args, **more)

    return swapped(course.Course, "_ended", in_two)


def an_event_counts_by_its_arrival() -> Any:
    """LINK D19: what comes last is believed, whatever version it says: a late repeat takes a record back (9, 15)."""
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
    """LINK D20: what was once acknowledged counts as sent, although the stream was made anew (9)."""
    compare = Relay._compare

    async def trusting(self: Relay, leader: Any) -> Any:
        known = await self._outbox.mark(self._stream.name)
        if known is None:
            return await compare(self, leader)
        self._look = False
        await self._bus.ensure_stream(self._stream)
        return known

    return swapped(Relay, "_compare", trusting)


def local_work_takes_what_is_claimed() -> Any:
    """LINK D23 (b): the owner's own job takes devices that a claim has reserved (6)."""

    def greedy(pools: Any, kind: Any, count: int, holds: Any, observed: Any) -> Any:
        for pool in pools:
            if pool.kind is kind and len(pool.devices) >= count:
                devices = [d.id for d in pool.devices][:count]
                for device in devices:
                    holds.holder.pop((pool.name, device), None)
                return pool, devices
        return choose(pools, kind, count, holds, observed)

    return swapped(owner, "choose", greedy)


def a_cancel_voids_the_charge() -> Any:
    """LINK D14: a job that was cancelled after an hour pays nothing (8)."""

    def void(segments: Any, spec: Any, outcome: Any, *more: Any) -> Any:
        rated = rate(segments, spec, outcome, *more)
        return replace(rated, amount=Decimal(0)) if outcome == "cancelled" else rated

    return swapped(reckon, "rate", void)


def a_fence_that_does_not_hold() -> Any:
    """An adapter says that nothing can start any more, and does not see to it (2)."""

    async def hopeful(self: SimAdapter, attempt: Any) -> bool:
        await self.moments.pass_by()
        run = self.disk.runs.get(attempt)
        return run is None or run.started is None

    return swapped(SimAdapter, "fence", hopeful)


# Death just before or after a commit: the window of such a mutant is one commit wide.
DOOMS = ("doom_before", "doom_after")


@dataclass(frozen=True, slots=True)
class Mutant:
    """`seeds`: one of these must see it; where they do not begin at 1, a search from 1 first met it among them. `only`: kinds of fault to
    which the storms are narrowed; none: all."""

    make: Callable[[], Any]
    seeds: range = range(1, 13)
    only: Sequence[str] = ()

    @property
    def name(self) -> str:
        return self.make.__name__

    def first_seen(self) -> int | None:
        """The first seed whose run is wrong with this mutant."""
        with self.make():
            return next((seed for seed in self.seeds if run(draw(seed, self.only)).violations), None)


MUTANTS = (
    Mutant(starts_on_the_offer, range(14, 22)),
    Mutant(places_a_claimed_attempt_again_on_silence),
    Mutant(a_claim_revives_what_was_withdrawn, range(21, 29)),
    Mutant(seq_from_the_highest_row),
    Mutant(acknowledges_before_the_commit),
    Mutant(forgets_before_it_is_acknowledged),
    Mutant(an_instruction_is_said_once, range(17, 25)),
    Mutant(segments_and_end_in_two_transactions, only=DOOMS),
    Mutant(an_event_counts_by_its_arrival),
    Mutant(the_stream_is_trusted_after_a_wipe),
    Mutant(local_work_takes_what_is_claimed),
    Mutant(a_cancel_voids_the_charge),
    Mutant(a_fence_that_does_not_hold),
)
