"""Which named ways a run went: a scenario that was written down to show one asks for it, beside every invariant.

Told while it happens: `SITE: islanded`, `SITE: heard again`, `SITE/LANE: TROUBLE` and `SITE/LANE: good` (the site's word), `SITE/LANE: STATE` (what the
keeper found, `ok` when it is over). Found afterwards: `SITE: new journal, WHY`, `SITE: held told`, `work N: WHAT` of each line of its story,
`work N: STATE`, `work N: ATTEMPT STATE[, OUTCOME] at SITE`, `work N: stopped for WHY at SITE`, `SERVICE: epoch raised`, `hub: INCIDENT KIND`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from intertie.contracts.base import decode
from intertie.contracts.incident import FaultReported
from intertie.contracts.link import HeldTold, JournalOpened, Lane, SchedulerEntry
from intertie.errors import Refused
from intertie.lane.memory import MemoryLaneTables

if TYPE_CHECKING:
    from intertie.sim.world import World

_ENTRY: object = SchedulerEntry
"""A union is no `type[T]` to a checker, and one to the decoder."""


def missed(world: World) -> Iterator[str]:
    """What the scenario asks for and was not gone."""
    if not world.scenario.ways:
        return
    gone = {*world.ways, *_found(world)}
    for way in world.scenario.ways:
        if way not in gone:
            yield f"way out: {way!r} was not gone, but {sorted(gone)}"


def _found(world: World) -> Iterator[str]:
    for disk in (world.scheduler_disk, world.metering_disk):
        if disk.service_epoch > 1:
            yield f"{disk.service}: epoch raised"
        for event in disk.events:
            if isinstance(event, FaultReported):
                yield f"hub: {event.report.kind}"
    for (lane, site, _, _), entry in MemoryLaneTables(world.scheduler_disk).entries.items():
        if lane is Lane.SCHEDULER:
            yield from _said(site, entry.raw)
    for number, job in world.jobs.items():
        if job in world.scheduler_disk.jobs:
            yield from _of_work(world, number)


def _said(site: str, raw: bytes) -> Iterator[str]:
    try:
        said: object = decode(raw, _ENTRY, what="entry")  # type: ignore[arg-type]  # as above
    except Refused:
        return
    if isinstance(said, JournalOpened):
        yield f"{site}: new journal, {said.why}"
    if isinstance(said, HeldTold):
        yield f"{site}: held told"


def _of_work(world: World, number: int) -> Iterator[str]:
    disk, name = world.scheduler_disk, world.jobs[number]
    yield f"work {number}: {disk.jobs[name].state}"
    for line in disk.lines[name]:
        yield f"work {number}: {line.what}"
    for attempt, row in disk.attempt_rows.items():
        if row.record.job != name:
            continue
        outcome = f", {row.record.outcome}" if row.record.outcome else ""
        yield f"work {number}: {row.state}{outcome} at {row.record.site}"
        for host in world.hosts.values():
            run = host.machine.disk.runs.get(attempt)
            if run is not None and run.exit is not None and run.exit.stopped_for:
                yield f"work {number}: stopped for {run.exit.stopped_for} at {host.name}"
