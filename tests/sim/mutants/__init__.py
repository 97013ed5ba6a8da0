"""The product with one fault each, as the findings of the link describe them. The simulator is worth what it catches of these.

A mutant is a context manager that puts a faulty piece in and takes it out again; its docstring says what is wrong. `ROWS` is the link's own
table, each "·" of it a row of its own, and the plain dozen: a test demands that each is a mutant here, or is shown on real PostgreSQL (`EDGES`), or
says why it cannot be shown yet (`LATER`).
"""

from __future__ import annotations

from tests.sim.mutants import events, journals, money, native, offers, silence, sites
from tests.sim.mutants.base import Mutant, witnesses

__all__ = ["EDGES", "LATER", "MUTANTS", "ROWS", "SAME", "Mutant", "witnesses"]

MUTANTS: tuple[Mutant, ...] = (
    *offers.MUTANTS,
    *silence.MUTANTS,
    *native.MUTANTS,
    *journals.MUTANTS,
    *money.MUTANTS,
    *events.MUTANTS,
    *sites.MUTANTS,
)

ROWS = (
    "hub re-places an offer after its limit without evidence, agent starts on the offer (the earlier wording)",
    "hub re-places a *claimed* attempt on silence",
    "go obeyed from another session",
    "go obeyed after a kernel reboot",
    "answer counted from the latest try, not its own",
    "lease stamped by the answering copy, judged by another clock",
    "new leader trusts stored expiry",
    "gap = process downtime only (bus down, hub up)",
    "empty sync answered before it is recorded",
    "self-stop in the agent only",
    "MONOTONIC instead of BOOTTIME",
    "margin shorter than the stop",
    "stop refused because a newer generation exists",
    "no tombstone",
    "tombstone pruned at ack",
    "native requeue counted as the same run",
    "retry without the native fence",
    "instruction_mark saved before the instruction",
    "answer without byte limit",
    "seq from max()+1",
    "sent before fsync",
    "same seq with other content accepted",
    "forget at `ack_through` (no `safe_through`) + restore",
    "epoch not raised after restore",
    "digest compared before the head",
    "start sent before the lane is at head",
    "poison entry blocks",
    "poison entry dropped",
    "quota guard on recording",
    "segment and state in two transactions",
    "attempt complete without counts",
    "segment without signed attribution believed",
    "hold expires while open",
    "void on cancel drops late usage",
    "rounding per segment",
    "re-anchored UTC",
    "outbox cursor by insert number",
    "applied by arrival, not version",
    "`sent` trusted after the stream was re-created",
    "no heads beat",
    'backlog refreshes "current"',
    "stored telemetry makes eligible",
    "local submit takes claimed devices",
    "islanded borrowing",
    "survivor by first arrival",
    "results under one key",
    "lock without fence in the write",
    "older account claims pushed after a restore",
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

RESTORES = "the simulator does not restore a store, a disk or a machine yet"
UNSEEN = "there is a mutant here, and no storm or scenario has seen it yet"

LATER: dict[str, str] = {
    "go obeyed from another session": RESTORES,
    "no tombstone": RESTORES,
    "tombstone pruned at ack": RESTORES,
    "same seq with other content accepted": RESTORES,
    "forget at `ack_through` (no `safe_through`) + restore": RESTORES,
    "epoch not raised after restore": RESTORES,
    "plain: restored journal trusted": RESTORES,
    "plain: generation not checked": UNSEEN,
    "plain: cancel not repeated": UNSEEN,
    "instruction_mark saved before the instruction": UNSEEN,
    "stop refused because a newer generation exists": UNSEEN,
    "answer counted from the latest try, not its own": UNSEEN,
    "lease stamped by the answering copy, judged by another clock": UNSEEN,
    "new leader trusts stored expiry": UNSEEN,
    "plain: lease counted from receipt": UNSEEN,
    "native requeue counted as the same run": UNSEEN,
    "hold expires while open": UNSEEN,
    "re-anchored UTC": UNSEEN,
    "no heads beat": UNSEEN,
    "plain: survivor chosen twice": UNSEEN,
    "an adapter's fence that does not hold": UNSEEN,
    "survivor by first arrival": UNSEEN,
    "digest compared before the head": "the mutant is not written yet",
    "islanded borrowing": "the simulator's sites have no allowances yet",
    "results under one key": "the simulator's results are all alike yet",
    "plain: duplicate segment added": "the mutant is not written yet",
}
"""Row → why it cannot be shown yet. Nothing may stay here."""
