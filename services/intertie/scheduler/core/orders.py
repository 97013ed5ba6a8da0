"""Which instructions an attempt calls for. They are derived from its row, never remembered apart, and repeated until their answer is on disk.

Offer until answered · Go while claimed and neither started nor cancelled · Stop while a cancel (or a stray run) has not ended ·
Withdraw until the site has seen it · Settle once everything of the attempt is held here.
"""

from __future__ import annotations

from enum import StrEnum

from intertie.ids import AttemptId, InstructionId
from intertie.scheduler.core.rows import Attempt, AttemptState

# BUILD 5: the go must be taken this soon after the sync that brought the offer. Longer than one lost answer and its repeat.
START_WITHIN_S = 30
STOP_GRACE_S = 10


class Order(StrEnum):
    OFFER = "offer"
    GO = "go"
    WITHDRAW = "withdraw"
    STOP = "stop"
    SETTLE = "settle"


def due(attempt: Attempt, *, cancelled: bool) -> tuple[Order, ...]:
    """What the attempt's site is to be told now. Each (attempt, order) gets one number, when it first becomes due."""
    state = attempt.state
    if state is AttemptState.OFFERED:
        return (Order.OFFER,)
    if state is AttemptState.WITHDRAWN:
        return () if attempt.withdrawal_seen else (Order.WITHDRAW,)
    if state in (AttemptState.CLAIMED, AttemptState.STAGING, AttemptState.RUNNING):
        if cancelled or not attempt.live:
            return (Order.STOP,)
        return (Order.GO,) if state is AttemptState.CLAIMED else ()
    if state is AttemptState.ENDED and not attempt.result_pending or state is AttemptState.NOT_STARTED:
        return (Order.SETTLE,)
    return ()


def instruction_id(attempt: AttemptId, order: Order) -> InstructionId:
    """One id per attempt and order, the same at every repeat."""
    return InstructionId(f"ins-{order}-{attempt}")
