"""The owner's statement preview: from the agent's own rows, its journal and its settings. Works with everything else gone."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING

from intertie.agent.core import preview
from intertie.agent.core.model import Attempt, State
from intertie.agent.core.periods import Period, period_of
from intertie.agent.islanded import agreements
from intertie.agent.journal import Cursor
from intertie.contracts.base import decode
from intertie.contracts.link import Lane, MeteringEntry, SegmentClosed
from intertie.contracts.local import LocalStatement
from intertie.contracts.usage import Segment
from intertie.errors import Refused
from intertie.ids import AttemptId

if TYPE_CHECKING:
    from intertie.agent.site import Site

PERIOD = re.compile(r"20\d\d-(0[1-9]|1[0-2])\Z")
# Untold segments that are looked at one by one: a week of a large site that is alone. Beyond it all of the unacknowledged count as untold.
LOOKED_AT = 20_000


async def statement(site: Site, name: str) -> LocalStatement:
    """Of that period (`2026-12`), else of the one that lasts. `Refused('preview.period')`."""
    now, zone = site.clock.now(), site.settings.time_zone
    period = _period(name, now, zone)
    waiting, segments = await site.journal.read(_untold)
    untold = preview.untold(segments)
    spec = preview.in_force(agreements(site), now)
    boot_us = int(site.clock.boot_s() * 1e6)
    records = [
        preview.Record(
            attempt=attempt,
            run_us=preview.run_us(attempt, boot_us, site.boot),
            islanded=_islanded(site, attempt),
            told=attempt.state is not State.RUNNING and attempt.id not in untold,
        )
        for attempt in preview.of_period(site.books.attempts.values(), period)
    ]
    return preview.statement(records, period, zone, site.joined.site, spec, now, waiting)


def _period(name: str, now: datetime, zone: str) -> Period:
    try:
        if not name:
            return period_of(now, zone)
        if not PERIOD.match(name):
            raise Refused("preview.period", f"{name[:40]!r} is not a period", next_step="write it as 2026-12")
        year, month = name.split("-")
        return period_of(now.replace(year=int(year), month=int(month), day=15), zone)
    except KeyError as err:
        raise Refused("preview.time_zone", f"this machine does not know the time zone {zone}", next_step="install its tzdata") from err


def _islanded(site: Site, attempt: Attempt) -> bool:
    return attempt.id in site.grants.taken or (attempt.ended is not None and attempt.ended.islanded)


def _untold(cursor: Cursor) -> tuple[int, list[Segment]]:
    """Segments that are not on disk at the hub: how many, and the first of them."""
    (ack,) = cursor.execute("SELECT ack_through FROM lane WHERE name = ?", (Lane.METERING.value,)).fetchone()
    found: list[Segment] = []
    query = "SELECT body FROM entry WHERE lane = ? AND seq > ? ORDER BY seq LIMIT ?"
    for (body,) in cursor.execute(query, (Lane.METERING.value, ack, LOOKED_AT)):
        entry: object = decode(bytes(body), MeteringEntry, what="entry")  # type: ignore[arg-type]  # a union
        if isinstance(entry, SegmentClosed):
            found.append(decode(entry.sealed.payload, Segment, what="segment"))
    return len(found), found


def waits_settling(cursor: Cursor) -> list[AttemptId]:
    """Ended attempts of the hub's of which it has not said that it holds everything."""
    query = "SELECT id FROM attempt WHERE local = 0 AND settled = 0 AND state = ? ORDER BY id LIMIT 100"
    return [AttemptId(name) for (name,) in cursor.execute(query, (State.ENDED.value,))]
