"""Which instructions an attempt calls for. They are derived from its row, never remembered apart, and repeated until their answer is on disk.

Offer until answered · Go while claimed and neither started nor to be stopped · Stop while a cancel, a preemption or a replacement (or a stray run)
has not ended it · Withdraw until the site has seen it · Settle once everything of the attempt is held here and nobody can need the site's copy.
"""

from __future__ import annotations

from enum import StrEnum

from intertie.contracts.job import Cause
from intertie.ids import AttemptId, InstructionId
from intertie.scheduler.core.rows import Attempt, AttemptState, Job

# BUILD 5: the go must be taken this soon after the sync that brought the offer. Longer than one lost answer and its repeat.
START_WITHIN_S = 30
STOP_GRACE_S = 10


class Order(StrEnum):
    OFFER = "offer"
    GO = "go"
    WITHDRAW = "withdraw"
    STOP = "stop"
    SETTLE = "settle"


FIRST = frozenset({Order.STOP, Order.WITHDRAW, Order.SETTLE})
"""What a site is told before it is caught up: nothing in here starts anything."""


def due(attempt: Attempt, *, cancelled: bool, kept: bool = False) -> tuple[Order, ...]:
    """What the attempt's site is to be told now. Each (attempt, order) gets one number, when it first becomes due.

    `kept`: the site keeps the attempt's folder, since its result may still be the job's."""
    state = attempt.state
    if state is AttemptState.OFFERED:
        return (Order.OFFER,)
    if state is AttemptState.WITHDRAWN:
        return () if attempt.withdrawal_seen else (Order.WITHDRAW,)
    if state in (AttemptState.CLAIMED, AttemptState.STAGING, AttemptState.RUNNING):
        if cancelled or not attempt.live or attempt.stop_cause is not None:
            return (Order.STOP,)
        return (Order.GO,) if state is AttemptState.CLAIMED else ()
    if state is AttemptState.LOST:
        # It may run on: the stop of a cancelled or replaced one reaches it whenever its site is back.
        return (Order.STOP,) if cancelled or attempt.stop_cause is not None else ()
    if state is AttemptState.ENDED and not attempt.result_pending and not kept or state is AttemptState.NOT_STARTED:
        return (Order.SETTLE,)
    return ()


def orders_of(attempt: Attempt, job: Job) -> tuple[Order, ...]:
    """`due` as the job stands: the loser's result is kept until the survivor's is delivered (LINK D21)."""
    kept = job.survivor is not None and job.survivor != attempt.record.attempt and not job.terminal
    return due(attempt, cancelled=job.cancel is not None, kept=kept)


def stop_words(attempt: Attempt, job: Job) -> tuple[str, Cause]:
    """Why it is to end and whose doing that is, as the site is told."""
    if attempt.stop_cause is not None:
        return attempt.stop_why or "the hub does not count on this run", attempt.stop_cause
    if job.cancel is not None:
        return f"cancelled by {job.cancel.actor}: {job.cancel.reason}"[:4_000], Cause.CANCELLED
    return "the hub does not count on this run", Cause.PLATFORM


def instruction_id(attempt: AttemptId, order: Order) -> InstructionId:
    """One id per attempt and order, the same at every repeat."""
    return InstructionId(f"ins-{order}-{attempt}")
