"""How the scheduler's parts hang together, whichever store and bus they stand on: `__main__` and the tests wire them here, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import tzinfo

from intertie.bus.port import Bus
from intertie.clock import Clock
from intertie.contracts.link import Lane
from intertie.ids import SiteName
from intertie.lane.keeper import LaneKeeper
from intertie.lane.tables import LaneTables
from intertie.planner import objections
from intertie.scheduler.asks import Asker
from intertie.scheduler.core.hearing import SILENT_S, Hearing
from intertie.scheduler.core.sight import LIVE_S, Sight
from intertie.scheduler.core.world import World
from intertie.scheduler.knowledge import QUIET_S, Knowledge
from intertie.scheduler.rounds import Check, Planner
from intertie.scheduler.service import Scheduler
from intertie.scheduler.site_lane import SiteLane
from intertie.scheduler.store import SchedulerStore
from intertie.trust.keys import Key

# DESIGN 7: the lease of `rerun` is its own and long; it must outlast any outage of the hub that is not worth stopping work for.
LEASE_S = 1_800
# However fast a test lets beats go, a busy host may stall this long.
LEAST_LIVE_S = 2.0
LEAST_SILENT_S = 5.0


@dataclass(frozen=True, slots=True)
class Parts:
    """The running pieces of one process."""

    scheduler: Scheduler
    planner: Planner
    keeper: LaneKeeper
    knowledge: Knowledge
    asker: Asker

    async def watch(self) -> None:
        """Listen to telemetry, to sites' answers, and to what other copies of this service learn, until cancelled."""
        telemetry = await self.knowledge.watch()
        answers = await self.asker.listen()
        try:
            await self.knowledge.follow()
        finally:
            await answers.close()
            await telemetry.close()


async def wire(
    store: SchedulerStore,
    lanes: LaneTables,
    bus: Bus,
    clock: Clock,
    key: Key,
    claims: Callable[[], str],
    *,
    zone: tzinfo,
    scale: float = 1.0,
    check: Check = objections,
) -> Parts:
    """Make the pieces and load what was known. `claims`: this service's own signed claims, when asked."""
    epoch = await store.epoch()
    hearing = Hearing(silent_s=max(SILENT_S * scale, LEAST_SILENT_S), office_s=clock.monotonic_s())

    async def changed(sites: Sequence[SiteName]) -> None:
        planner.hint()
        for site in sites:
            await keeper.nudge(site)

    knowledge = Knowledge(
        store,
        bus,
        clock,
        claims,
        world=World(),
        sight=Sight(live_s=max(LIVE_S * scale, LEAST_LIVE_S)),
        hearing=hearing,
        changed=changed,
        quiet_s=max(QUIET_S * scale, LEAST_SILENT_S),
    )
    await knowledge.load()

    async def nudge(site: SiteName) -> None:
        await keeper.nudge(site)

    planner = Planner(store, lanes, knowledge, clock, nudge, zone=zone, scale=scale, check=check)
    lane = SiteLane(store, lanes, knowledge, planner, clock, key, scale=scale)
    keeper = LaneKeeper(
        bus,
        Lane.SCHEDULER,
        lanes,
        clock,
        interpret=lane.interpret,
        instructions=lane.instructions,
        settings=lane.settings,
        on_heard=lane.heard,
        epoch=lambda: epoch,
        lease_s=LEASE_S,
    )
    asker = Asker(bus)
    scheduler = Scheduler(store, knowledge, planner, asker, clock, nudge, zone=zone)
    return Parts(scheduler, planner, keeper, knowledge, asker)
