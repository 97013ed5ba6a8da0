"""The product with one fault each, as the findings of the link describe them. The simulator is worth what it catches of these.

A mutant is a context manager that puts a faulty piece in and takes it out again; its docstring says what is wrong. `ROWS` is the link's own
table, each "·" of it a row of its own, and the plain dozen: a test demands that each is a mutant here, or is shown on real PostgreSQL (`EDGES`), or
says why it cannot be shown yet (`LATER`).
"""

from __future__ import annotations

from tests.sim.mutants import events, journals, money, native, offers, restores, silence, sites
from tests.sim.mutants.base import Mutant

__all__ = ["BREAKS", "EDGES", "LATER", "MUTANTS", "ROWS", "SAME", "Mutant"]

MUTANTS: tuple[Mutant, ...] = (
    *offers.MUTANTS,
    *silence.MUTANTS,
    *native.MUTANTS,
    *journals.MUTANTS,
    *money.MUTANTS,
    *events.MUTANTS,
    *sites.MUTANTS,
    *restores.MUTANTS,
)

BREAKS: dict[str, str] = {
    "hub re-places an offer after its limit without evidence, agent starts on the offer (the earlier wording)": "1",
    "hub re-places a *claimed* attempt on silence": "1",
    "go obeyed from another session": "1",
    "go obeyed after a kernel reboot": "1",
    "answer counted from the latest try, not its own": "1",
    "lease stamped by the answering copy, judged by another clock": "1",
    "new leader trusts stored expiry": "1, 5",
    "gap = process downtime only (bus down, hub up)": "1, 5",
    "empty sync answered before it is recorded": "1",
    "self-stop in the agent only": "1",
    "MONOTONIC instead of BOOTTIME": "1",
    "margin shorter than the stop": "1",
    "stop refused because a newer generation exists": "1, 2",
    "no tombstone": "1, 2",
    "tombstone pruned at ack": "1, 2",
    "native requeue counted as the same run": "1, 7",
    "retry without the native fence": "1, 7",
    "instruction_mark saved before the instruction": "4",
    "answer without byte limit": "4",
    "seq from max()+1": "3",
    "sent before fsync": "3",
    "same seq with other content accepted": "3",
    "forget at `ack_through` (no `safe_through`) + restore": "3, 11",
    "epoch not raised after restore": "3, 11",
    "start sent before the lane is at head": "5, 6",
    "poison entry blocks": "4, 8",
    "poison entry dropped": "4, 8",
    "quota guard on recording": "4, 8",
    "segment and state in two transactions": "7, 8",
    "attempt complete without counts": "7, 8",
    "segment without signed attribution believed": "7, 8",
    "void on cancel drops late usage": "7, 8",
    "rounding per segment": "7, 8",
    "outbox cursor by insert number": "9",
    "applied by arrival, not version": "9",
    "`sent` trusted after the stream was re-created": "9",
    'backlog refreshes "current"': "5, 6",
    "stored telemetry makes eligible": "5, 6",
    "local submit takes claimed devices": "6, 12",
    "lock without fence in the write": "11",
    "older account claims pushed after a restore": "14",
}
"""The link's own table: row → the invariants of which one must see it."""

ROWS = (
    *BREAKS,
    "plain: generation not checked",
    "plain: acknowledge before commit",
    "plain: lease counted from receipt",
    "plain: cancel not repeated",
    "plain: entry deleted before acknowledged",
    "plain: silence read as end",
    "plain: duplicate segment added",
    "plain: survivor chosen twice",
    "plain: go taken after `start_within`",
    "plain: restored journal trusted",
    "plain: leader write not fenced",
    "plain: answer taken from an old try",
)

SAME = {
    "plain: leader write not fenced": "lock without fence in the write",
    "plain: answer taken from an old try": "answer counted from the latest try, not its own",
}
"""Of the plain dozen, what the link's table says in other words."""

EDGES = {
    "outbox cursor by insert number": "tests/edges/test_store_outbox.py::test_a_late_commit_is_not_skipped",
    "older account claims pushed after a restore": (
        "tests/edges/test_identity_accounts.py::test_a_restored_identity_leaves_the_newer_account_and_takes_its_revocations_over"
    ),
}
"""What a store in memory cannot show: row → the test on real servers that does."""


LATER: dict[str, str] = {}
"""Row → why it cannot be shown yet. Nothing may stay here."""
