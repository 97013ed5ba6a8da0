"""Leases, deafness and silence: who may run again, and when (LINK D4, D5)."""

from __future__ import annotations

from typing import Any

from tests.sim.mutants.base import Mutant, all_rerun, swapped, together, two_schedulers

from intertie.agent import leases as agent_leases
from intertie.agent.core import leases
from intertie.agent.site import Site
from intertie.lane.memory import MemoryTurn
from intertie.lane.site import SiteLane
from intertie.link.clocks import TRY_S
from intertie.scheduler.core import silence
from intertie.scheduler.core.hearing import Hearing
from intertie.scheduler.rounds import Planner
from intertie.sim.machine import SimAdapter

SILENCES = ("cut", "deaf_out", "deaf_in", "crash", "pause")


def an_answer_to_an_earlier_try_counts(patience_s: float = 120.0) -> Any:
    """An answer that was on its way for so long is taken as the answer of the latest try, and its lease counts from that one's sending."""
    import asyncio

    from intertie.contracts.base import decode, encode
    from intertie.contracts.link import Synced, local_sync_subject
    from intertie.errors import Unavailable

    late: dict[SiteLane, list[Synced]] = {}

    async def send(self: SiteLane, machine: Any, sync: Any) -> Any:
        import msgspec

        if waiting := late.pop(self, None):
            # What it acknowledges is as of then, and was heard of since.
            told = max(waiting[-1].ack_through, sync.first_seq - 1)
            return machine.answered(self._clock.boot_s(), msgspec.structs.replace(waiting[-1], nonce=sync.nonce, ack_through=told))

        async def ask() -> Synced | None:
            try:
                reply = await self._bus.request(local_sync_subject(self._lane), encode(sync), timeout_s=patience_s)
            except Unavailable:
                return None
            return decode(reply.body, Synced, what="answer")

        asking = asyncio.create_task(ask())
        done, _ = await asyncio.wait({asking}, timeout=TRY_S)
        if done and (synced := asking.result()) is not None:
            return machine.answered(self._clock.boot_s(), synced)

        def arrived(task: Any) -> None:
            if not task.cancelled() and task.exception() is None and task.result() is not None:
                late.setdefault(self, []).append(task.result())

        asking.add_done_callback(arrived)
        return machine.failed(self._clock.boot_s(), sync.nonce)

    return swapped(SiteLane, "_send", send)


def by_wall_clock(self: Hearing, site: Any, now_s: float) -> float:
    held = self._sites.get(site)
    wall = Hearing.wall()  # type: ignore[attr-defined]  # put there by the mutant
    return 0.0 if held is None else max(0.0, (wall - held.row.last_heard).total_seconds())


def silence_is_judged_by_the_answering_copys_clock() -> Any:
    """The row's own time, stamped by whoever answered, against the wall clock of whoever leads."""
    rule = Planner._judge

    async def judging(self: Planner, leader: Any, given: Any) -> None:
        Hearing.wall = self._clock.now  # type: ignore[attr-defined]
        with swapped(Hearing, "silent_for_s", by_wall_clock):
            await rule(self, leader, given)

    return swapped(Planner, "_judge", judging)


def a_new_leader_trusts_a_stored_expiry() -> Any:
    """What this office has not heard yet is judged by the time on disk and the wall clock, as if nothing had happened in between."""
    rule, silent_for_s = Planner._judge, Hearing.silent_for_s

    def stored(self: Hearing, site: Any, now_s: float) -> float:
        held = self._sites.get(site)
        return silent_for_s(self, site, now_s) if held is None or held.seen_here else by_wall_clock(self, site, now_s)

    async def judging(self: Planner, leader: Any, given: Any) -> None:
        Hearing.wall = self._clock.now  # type: ignore[attr-defined]
        with swapped(Hearing, "silent_for_s", stored):
            await rule(self, leader, given)

    return swapped(Planner, "_judge", judging)


def the_gap_is_the_process_own_downtime_only() -> Any:
    """A hub that is up and cannot hear believes that everybody is silent."""
    return together(swapped(Hearing, "is_deaf", lambda self, now_s: False), swapped(Hearing, "deaf", lambda self, from_s, to_s: None))


def an_empty_sync_is_answered_before_it_is_recorded() -> Any:
    """A sync without entries renews a lease, and no leader will ever know that it came."""
    save = MemoryTurn.save

    async def thrifty(self: MemoryTurn, rows: Any, entries: Any, faults: Any) -> None:
        told = [
            row
            for row in rows
            if entries.get(row.site) or not row.at_head or self.rows.get(row.site) is None or self.rows[row.site].session != row.session
        ]
        await save(self, told, entries, faults)

    return swapped(MemoryTurn, "save", thrifty)


def work_stops_itself_by_its_agent_alone() -> Any:
    """No supervisor looks at the lease; the agent does, while it lives."""
    ends_for, tick = SimAdapter._ends_for, Site.tick

    def blind(self: SimAdapter, process: Any, now_s: float) -> str:
        why = ends_for(self, process, now_s)
        return "" if why == "lease_ended" else why

    async def minding(self: Site) -> None:
        await tick(self)
        for attempt in list(self.books.attempts.values()):
            until = await self.adapter.deadline(attempt.id)
            if until is not None and leases.is_over(until, self.moment()):
                await self.adapter.stop(attempt.id, 0)

    return together(swapped(SimAdapter, "_ends_for", blind), swapped(Site, "tick", minding))


def a_lease_is_counted_by_monotonic() -> Any:
    """CLOCK_MONOTONIC stands still while the machine sleeps; the wall clock is not asked."""
    ends_for = SimAdapter._ends_for

    def dozing(self: SimAdapter, process: Any, now_s: float) -> str:
        until, process.run.deadline = process.run.deadline, None
        try:
            if why := ends_for(self, process, now_s):
                return why
        finally:
            process.run.deadline = until
        slept_s = now_s - self.clock.monotonic_s()
        process.slept_before = getattr(process, "slept_before", slept_s)
        return "lease_ended" if until is not None and now_s - (slept_s - process.slept_before) >= until.boot_s else ""

    return swapped(SimAdapter, "_ends_for", dozing)


def the_margin_is_shorter_than_the_stop() -> Any:
    """Placed again the moment the lease is over, while what ignores its stop is still in its grace."""
    return swapped(silence, "margin_s", lambda lease_s: 0.0)


def a_lease_is_counted_from_receipt() -> Any:
    """From the answer's arrival, not from the sending of the sync that it answers."""
    renew = agent_leases.Leases.renew

    async def generous(self: Any, given_s: float, sent_boot_s: float) -> None:
        await renew(self, given_s, self._site.clock.boot_s())

    return swapped(agent_leases.Leases, "renew", generous)


def silence_is_read_as_an_end() -> Any:
    """What does not answer has ended: work that waits is closed once its site was silent for as long as a lease."""

    def hasty(file: Any, *, silent_s: float, lease_s: float, now: Any) -> Any:
        from intertie.scheduler.core.silence import gone

        return gone(file, actor="planner", why="silent", evidence="silence", now=now)

    return swapped(silence, "replace_silent", hasty)


MUTANTS = (
    Mutant(an_answer_to_an_earlier_try_counts, "answer counted from the latest try, not its own", "1", ("held_in",), all_rerun),
    Mutant(
        silence_is_judged_by_the_answering_copys_clock,
        "lease stamped by the answering copy, judged by another clock",
        "1",
        ("step", "cut"),
        lambda s: all_rerun(two_schedulers(s)),
    ),
    Mutant(a_new_leader_trusts_a_stored_expiry, "new leader trusts stored expiry", "1, 5", ("hub_gone", "crash", "step"), all_rerun),
    Mutant(the_gap_is_the_process_own_downtime_only, "gap = process downtime only (bus down, hub up)", "1, 5", ("bus_down",), all_rerun),
    Mutant(an_empty_sync_is_answered_before_it_is_recorded, "empty sync answered before it is recorded", "1", ("doubled",), all_rerun),
    Mutant(work_stops_itself_by_its_agent_alone, "self-stop in the agent only", "1", ("pause", "crash"), all_rerun),
    Mutant(a_lease_is_counted_by_monotonic, "MONOTONIC instead of BOOTTIME", "1", ("suspend", "cut"), all_rerun),
    Mutant(the_margin_is_shorter_than_the_stop, "margin shorter than the stop", "1", ("cut", "deaf_out"), all_rerun),
    Mutant(a_lease_is_counted_from_receipt, "plain: lease counted from receipt", "1", ("slow", "held_in", "cut"), all_rerun),
    Mutant(silence_is_read_as_an_end, "plain: silence read as end", "2, 5", ("cut", "pause"), all_rerun),
)
