"""Disks that were put back, and sites that are there twice: journals, epochs, sessions, tombstones (LINK D2, D3, D7, D8)."""

from __future__ import annotations

from typing import Any

from tests.sim.mutants.base import Mutant, swapped, together

from intertie.agent import journal as agent_journal
from intertie.agent.core import attempts as life
from intertie.agent.core import offers
from intertie.agent.journal_rows import Bounds, forget
from intertie.agent.site import Site
from intertie.contracts.link import LaneState
from intertie.link import keeper
from intertie.sim import restores
from intertie.sim.host import Agent


def a_restore_raises_no_epoch() -> Any:
    """The store is put back, and every number that it had given is given again."""
    return swapped(restores, "target", lambda own, told, now: max(own))


def what_is_acknowledged_is_forgotten() -> Any:
    """The site forgets what its keeper has committed, and does not wait until no restore can take it."""

    def at_once(cursor: Any, lane: Any, bounds: Any, now_s: float) -> None:
        forget(cursor, lane, Bounds(kept_s=0.0), now_s)

    return swapped(agent_journal, "forget", at_once)


def _blind(row: Any, sync: Any, received: Any, single: bool) -> Any:
    """Numbers alone say what is known: what follows them is taken, whatever lies under the others."""
    last, entries = keeper.last_seq(sync), keeper._chain(sync)
    if last < row.ack_through:
        saved = keeper._heard(row, sync, received, row.ack_through, row.digest, single, LaneState.OK)
        return keeper.Verdict(LaneState.OK, ack_through=last, safe_through=last, row=saved)
    new = entries[row.ack_through - sync.first_seq + 1 :]
    digest = new[-1].digest if new else entries[-1].digest if entries else sync.digest_before
    saved = keeper._heard(row, sync, received, last, digest, single, LaneState.OK)
    return keeper.Verdict(LaneState.OK, ack_through=last, safe_through=saved.safe_through, row=saved, new=new)


def _trusting(*states: LaneState) -> Any:
    judge_chain = keeper._judge_chain

    def judging(row: Any, stored: Any, sync: Any, received: Any, single: bool) -> Any:
        found = judge_chain(row, stored, sync, received, single)
        return _blind(row, sync, received, single) if found.state in states and row is not None else found

    return swapped(keeper, "_judge_chain", judging)


def the_same_number_with_other_content_is_a_repeat() -> Any:
    """A fork is not seen: entries under numbers that are known are taken for those, and forgotten by both sides."""
    return _trusting(LaneState.FORKED)


def a_restored_journal_is_trusted() -> Any:
    """A journal that ends before what is known of it is one that repeats itself; it goes on under its old name."""
    return _trusting(LaneState.FORKED, LaneState.AGENT_RESTORED)


def a_go_is_obeyed_from_another_session() -> Any:
    """Whoever holds a claim starts by its go: also a copy, in another journal, under another session."""
    on_go = life.on_go

    def eager(attempt: Any, now: Any, **_more: Any) -> Any:
        return on_go(attempt, now)

    return together(
        swapped(life, "on_go", eager),
        swapped(life, "of_other_journal", lambda attempt, ours: None),
        swapped(Site, "may_vouch", lambda self, attempt: True),
        swapped(Agent, "_rules_here", lambda self: True),
    )


def _an_old_offer_is_said_again() -> Any:
    """A hub that was put back to before what its sites still keep, and whose epoch nobody raised: what it had withdrawn it offers again. A tombstone
    is all that is left of the withdrawal."""
    return together(a_restore_raises_no_epoch(), what_is_acknowledged_is_forgotten())


def a_stop_leaves_no_tombstone() -> Any:
    """What was withdrawn before the site had heard of it is claimed when its offer comes after all."""
    ladder = tuple(rung for rung in offers.LADDER if rung is not offers._tombstone)
    return together(swapped(offers, "LADDER", ladder), _an_old_offer_is_said_again())


def a_tombstone_goes_when_it_is_acknowledged() -> Any:
    """Kept until the hub has heard of it, and no longer."""
    answered = Site.answered

    async def forgetful(self: Site, lease_s: float, sent_boot_s: float) -> None:
        await answered(self, lease_s, sent_boot_s)
        self.books.tombstones.clear()
        await self.journal.write(lambda cursor: cursor.execute("DELETE FROM tombstone"))

    return together(swapped(Site, "answered", forgetful), _an_old_offer_is_said_again())


MUTANTS = (
    Mutant(a_restore_raises_no_epoch, "epoch not raised after restore", "3, 11", ("restore_store", "failover")),
    Mutant(
        what_is_acknowledged_is_forgotten,
        "forget at `ack_through` (no `safe_through`) + restore",
        "3, 11",
        ("restore_store", "failover"),
    ),
    Mutant(the_same_number_with_other_content_is_a_repeat, "same seq with other content accepted", "3", ("restore_disk",)),
    Mutant(a_restored_journal_is_trusted, "plain: restored journal trusted", "3", ("restore_disk",)),
    Mutant(a_go_is_obeyed_from_another_session, "go obeyed from another session", "1", ("clone",)),
    Mutant(a_stop_leaves_no_tombstone, "no tombstone", "1, 2", ("restore_store",)),
    Mutant(a_tombstone_goes_when_it_is_acknowledged, "tombstone pruned at ack", "1, 2", ("restore_store",)),
)
