"""The owner's red button, as a fact: pressed until when, by whom, why. It takes new lending away and touches nothing that runs."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from intertie.errors import Refused

# Longer than this is no pause but a leaving, or a mistyped year.
LONGEST = timedelta(days=366)


class Pressed(msgspec.Struct, frozen=True, kw_only=True):
    """The button is down."""

    since: datetime
    until: datetime | None
    by: str
    reason: str = ""


def press(now: datetime, until: datetime | None, by: str, reason: str) -> Pressed:
    """`Refused('pause.past' | 'pause.far')`; pressing again replaces what was said before."""
    if until is not None and until <= now:
        raise Refused("pause.past", f"{until.isoformat(timespec='seconds')} has passed", next_step="--until 18:00, 2h or 2026-12-31T18:00")
    if until is not None and until - now > LONGEST:
        raise Refused(
            "pause.far", f"{until.isoformat(timespec='seconds')} is more than a year away", next_step="pause without --until, or leave"
        )
    return Pressed(since=now, until=until, by=by, reason=reason)


def over(pressed: Pressed | None, now: datetime) -> bool:
    """It was pressed until a time that has come. By the wall clock: that is the clock the owner meant."""
    return pressed is not None and pressed.until is not None and now >= pressed.until
