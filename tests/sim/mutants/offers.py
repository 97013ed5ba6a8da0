"""Offers, claims, goes and stops (LINK D1, D7, D8, D9, D30)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
from tests.sim.mutants.base import Mutant, all_rerun, large_scripts, struck_at_submit, swapped, together
from tests.sim.mutants.silence import an_answer_to_an_earlier_try_counts

from intertie.agent.core import attempts as life
from intertie.agent.core import offers
from intertie.agent.core.model import Attempt as SiteAttempt
from intertie.agent.journal import SqliteJournal, handled
from intertie.agent.site import Site
from intertie.contracts.link import Go, Offer
from intertie.ids import InstructionId, JobId
from intertie.lane import keeper as lane_keeper
from intertie.lifecycle import JobEvent
from intertie.scheduler.core import interpret
from intertie.scheduler.core.rows import AttemptState, Change, File, line, moved, noted
from intertie.scheduler.memory import MemorySchedulerStore
from intertie.scheduler.rounds import Planner
from intertie.scheduler.store import OpenOrder, Withdrawal

CUTS = ("cut", "deaf_in", "deaf_out", "lossy", "held_in")
DEATHS = ("crash", "doom_before", "doom_after")


def starts_on_the_offer() -> Any:
    """The agent starts what it was offered, without waiting for the go: an offer that the hub took back has a process."""
    claim = Site.claim

    async def eager(self: Site, offer: Offer, attempt: SiteAttempt) -> None:
        await claim(self, offer, attempt)
        go = Go(
            id=InstructionId(f"ins-go-{attempt.id}"),
            number=1,
            epoch=1,
            attempt=attempt.id,
            job=attempt.job,
            generation=attempt.generation,
            journal=self.journal.id,
        )
        await self._go(go, 1 << 40, attempt.offer_sent_boot_s)

    return swapped(Site, "claim", eager)


def places_a_claimed_attempt_again_on_silence() -> Any:
    """What was claimed and is silent for a minute is placed elsewhere."""
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
            if a.live and a.state is not AttemptState.OFFERED and self._knowledge.hearing.quiet_for_s(a.record.site, now_s) > 60
        ]
        if late:
            await self._store.withdraw(leader, late)

    return swapped(Planner, "_take_back", hasty)


def a_claim_revives_what_was_withdrawn() -> Any:
    """Claim and withdrawal no longer meet on one row: whoever comes last wins, and a go follows."""
    claimed = interpret._claimed

    def late(telling: Any, entry: Any) -> Any:
        if telling.attempt.state is AttemptState.WITHDRAWN:
            revived = noted(telling.attempt, record={"state": "claimed", "claimed_at": entry.at}, live=True, journal=telling.source.journal)
            return telling.change(telling.job, revived, "claimed")
        return claimed(telling, entry)

    return swapped(interpret, "_claimed", late)


def a_go_is_obeyed_after_a_reboot() -> Any:
    """A claim of another kernel boot is started by a clock that began anew."""
    return swapped(life, "before_reboot", lambda attempt, now: None)


def a_go_is_taken_after_start_within() -> Any:
    """However long ago the offer came."""
    on_go = life.on_go

    def patient(attempt: SiteAttempt, now: Any, **more: Any) -> Any:
        return on_go(msgspec.structs.replace(attempt, start_within_s=1 << 20), now, **more)

    async def waits(self: Site) -> None:
        await self.room.look()

    return together(swapped(life, "on_go", patient), swapped(Site, "tick", waits))


def an_old_offer_comes_through() -> Any:
    """Nothing but the generation stands before an offer that was on its way for minutes: an answer to an earlier try counts, a withdrawal leaves no
    tombstone, and a claim of what was withdrawn gets its go. By itself no mutant: the product holds."""
    ladder = tuple(rung for rung in offers.LADDER if rung is not offers._tombstone)
    return together(
        an_answer_to_an_earlier_try_counts(patience_s=600), a_claim_revives_what_was_withdrawn(), swapped(offers, "LADDER", ladder)
    )


@contextmanager
def a_generation_is_not_checked() -> Iterator[None]:
    """An attempt that the site ended, refused or never saw is taken in whatever newer ones there are. Three other guards hide it: they are gone too."""
    with an_old_offer_comes_through():
        ladder = tuple(rung for rung in offers.LADDER if rung is not offers._stale)
        with swapped(offers, "LADDER", ladder):
            yield


def a_stop_is_refused_where_a_newer_generation_exists() -> Any:
    """A stop or a withdrawal of an older attempt is thought to be stale, and dropped. That stops are acted on before the offers of the same answer
    hides it: here they are acted on as it comes."""
    act, take = Site._act, Site.take

    async def proud(self: Site, one: Any, sent_boot_s: float, acknowledged: int) -> None:
        seen = self.books.seen.get(getattr(one, "job", JobId("")))
        if not isinstance(one, Offer | Go) and seen is not None and (one.epoch, getattr(one, "generation", 1 << 40)) < seen:
            await self.journal.write(handled(one.id))
            return
        await act(self, one, sent_boot_s, acknowledged)

    async def as_it_comes(self: Site, instructions: Any, **more: Any) -> None:
        async def last() -> None:
            await asyncio.sleep(1)
            await take(self, instructions, **more)

        if any(isinstance(one, Offer | Go) for one in instructions):
            await take(self, instructions, **more)
        else:
            asyncio.create_task(last())  # noqa: RUF006  # the loop is ours

    return together(swapped(Site, "_act", proud), swapped(Site, "take", as_it_comes))


def an_instruction_is_said_once() -> Any:
    """The hub stops repeating when the site's mark has passed, not when the answer entry is on disk: a cancel is not repeated."""
    orders = MemorySchedulerStore.orders

    async def once(self: MemorySchedulerStore, site: Any, mark: tuple[int, int]) -> list[OpenOrder]:
        return [order for order in await orders(self, site, mark) if (order.epoch, order.number) > mark]

    return swapped(MemorySchedulerStore, "orders", once)


def the_mark_is_saved_before_the_instruction() -> Any:
    """The mark moves in a transaction of its own, and a hub that goes by it never says again what a crash took."""
    take = SqliteJournal.take

    async def in_two(self: SqliteJournal, instructions: Any) -> Any:
        if not instructions:
            return []
        highest = max((one.epoch, one.number) for one in instructions)

        def mark(cursor: Any) -> None:
            cursor.execute("INSERT OR REPLACE INTO meta VALUES ('instruction_mark', ?)", (f"{highest[0]} {highest[1]}",))

        await self.write(mark)
        return await take(self, instructions)

    return together(swapped(SqliteJournal, "take", in_two), an_instruction_is_said_once())


def an_answer_has_no_byte_limit() -> Any:
    """All that a site is owed goes into one answer, which no message can carry."""
    return together(swapped(lane_keeper, "BATCH_BYTES", 1 << 40), swapped(lane_keeper, "SINGLE_BYTES", 1 << 40))


MUTANTS = (
    Mutant(
        starts_on_the_offer,
        "hub re-places an offer after its limit without evidence, agent starts on the offer (the earlier wording)",
        "1",
        CUTS,
        struck_at_submit,
    ),
    Mutant(places_a_claimed_attempt_again_on_silence, "hub re-places a *claimed* attempt on silence", "1", CUTS),
    Mutant(a_claim_revives_what_was_withdrawn, "claim and withdrawal do not meet on one row", "1, 2", CUTS, struck_at_submit),
    Mutant(a_go_is_obeyed_after_a_reboot, "go obeyed after a kernel reboot", "1", ("power", "wrong_rtc", "cut")),
    Mutant(a_go_is_taken_after_start_within, "plain: go taken after `start_within`", "1", CUTS, struck_at_submit),
    Mutant(a_generation_is_not_checked, "plain: generation not checked", "1, 2", ("doubled", "reordered", "held_in")),
    Mutant(
        a_stop_is_refused_where_a_newer_generation_exists,
        "stop refused because a newer generation exists",
        "1, 2",
        (*CUTS, *DEATHS),
        all_rerun,
    ),
    Mutant(an_instruction_is_said_once, "plain: cancel not repeated", "4", (*DEATHS, "power", "disk_full")),
    Mutant(
        the_mark_is_saved_before_the_instruction, "instruction_mark saved before the instruction", "4", (*DEATHS, "power"), struck_at_submit
    ),
    Mutant(an_answer_has_no_byte_limit, "answer without byte limit", "4", (), large_scripts),
)
