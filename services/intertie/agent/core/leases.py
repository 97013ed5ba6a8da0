"""Until when work that asked for it may run without another word of the hub; its supervisor stops it then, whoever else is dead.

Two clocks and the earlier of them: CLOCK_BOOTTIME counts suspend and no step moves it, the wall clock sees a host that was stopped whole.
A deadline that has passed is final: nothing that comes later moves it.
"""

from __future__ import annotations

import msgspec

from intertie.agent.core.model import Attempt, Failing, Moment, State

WORTH_IT = 0.02
"""Of a lease: a renewal that gains less is not worth a write. It makes a deadline earlier than it might be, never later."""


class Deadline(msgspec.Struct, frozen=True, kw_only=True):
    """What `deadline.json` says. `utc` is in seconds of the Unix epoch, by this host's clock."""

    boot_id: str
    boot_s: float
    utc: float
    said_boot_s: float
    """When this was said, by both clocks: said too late it moves nothing."""
    said_utc: float


def deadline(lease_s: float, sent_boot_s: float, now: Moment) -> Deadline:
    """`lease_s` after the sending (CLOCK_BOOTTIME, seconds) of the sync whose answer gave it."""
    ends_boot_s = sent_boot_s + lease_s
    utc = now.utc.timestamp()
    return Deadline(boot_id=now.kernel_boot, boot_s=ends_boot_s, utc=utc + (ends_boot_s - now.boot_s), said_boot_s=now.boot_s, said_utc=utc)


def is_over(until: Deadline, now: Moment) -> bool:
    """The same rule as the supervisor's."""
    return until.boot_id != now.kernel_boot or now.boot_s >= until.boot_s or now.utc.timestamp() >= until.utc


def follows(held: Deadline | None, told: Deadline | None) -> Deadline | None:
    """Which of two counts: what was told last, unless the one before had passed when it was said."""
    if held is None or told is None:
        return told or held
    in_time = told.boot_id == held.boot_id and told.said_boot_s < held.boot_s and told.said_utc < held.utc
    return told if in_time else held


def may_renew(attempt: Attempt) -> bool:
    """Work under way that has a lease and was not told to stop."""
    return attempt.local is None and attempt.lease_s > 0 and attempt.stop is None and attempt.state in (State.STAGING, State.RUNNING)


def renewed(attempt: Attempt, held: Deadline, given_s: float, sent_boot_s: float, now: Moment) -> Deadline | None:
    """The later deadline that an answer gives, or None: it has passed already, or the gain is not worth a write.

    Never longer than the signed offer says, nor than the answer itself.
    """
    lease_s = min(float(attempt.lease_s), given_s)
    following = deadline(lease_s, sent_boot_s, now)
    if is_over(held, now) or following.boot_s - held.boot_s < WORTH_IT * lease_s:
        return None
    return following


LEASE_OVER = Failing(code="lease_over", text="its lease ended before it could be started")
