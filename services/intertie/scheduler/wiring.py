"""How the scheduler's parts hang together, whichever store and bus they stand on: `__main__` and the tests wire them here, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta, tzinfo

from intertie.bus.port import Bus
from intertie.clock import Clock
from intertie.contracts.link import Lane
from intertie.ids import SiteName
from intertie.lane.keeper import LaneKeeper
from intertie.lane.tables import LaneTables
from intertie.link.site import FIRST_EPOCH
from intertie.planner import objections
from intertie.scheduler.asks import Asker
from intertie.scheduler.canary import Canary
from intertie.scheduler.core.hearing import CANARY_BEAT_S, SILENT_S, Hearing
from intertie.scheduler.core.judge import Limits
from intertie.scheduler.core.sight import LIVE_S, Sight
from intertie.scheduler.core.silence import LOST_AFTER
from intertie.scheduler.core.world import World
from intertie.scheduler.knowledge import QUIET_S, Knowledge
from intertie.scheduler.rounds import Check, Planner
from intertie.scheduler.service import Scheduler
from intertie.scheduler.site_lane import SiteLane
from intertie.scheduler.store import SchedulerStore
from intertie.store import first_version
from intertie.trust.keys import Key

# DESIGN 7: the lease of `rerun` is its own and long; it must outlast any outage of the hub that is not worth stopping work for.
LEASE_S = 1_800
# However fast a test lets beats go, a busy host may stall this long.
LEAST_LIVE_S = 2.0
LEAST_SILENT_S = 5.0
LEAST_CANARY_S = 0.5


@dataclass(frozen=True, slots=True)
class Parts:
    """The running pieces of one process."""

    scheduler: Scheduler
    planner: Planner
    keeper: LaneKeeper
    knowledge: Knowledge
    asker: Asker
    lane: SiteLane

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
    canary: Bus | None = None,
    lease_s: int = LEASE_S,
    lost_after: timedelta = LOST_AFTER,
    own_keys: Sequence[str] = (),
) -> Parts:
    """Make the pieces and load what was known. `claims`: this service's own signed claims, when asked. `canary`: a connection in the canary's
    account; without it no silence moves anything. `lease_s`: of `rerun` work. `own_keys`: further public keys that this service has sealed with."""
    epoch = await store.epoch()
    if epoch > FIRST_EPOCH:
        await store.lift_versions(epoch, first_version(epoch))
    canary_beat_s = max(CANARY_BEAT_S * scale, LEAST_CANARY_S)
    hearing = Hearing(
        silent_s=max(SILENT_S * scale, LEAST_SILENT_S), office_s=clock.monotonic_s(), canary_beat_s=canary_beat_s, epoch=epoch
    )
    limits = Limits(lease_s=lease_s, lost_after=lost_after)

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

    singer = Canary(canary, clock, beat_s=canary_beat_s) if canary is not None else None
    planner = Planner(store, lanes, knowledge, clock, nudge, zone=zone, scale=scale, check=check, limits=limits, canary=singer)
    lane = SiteLane(
        store, lanes, knowledge, planner, clock, key, scale=scale, epoch=epoch, zone=zone, own_keys=own_keys, lost_after=lost_after
    )
    keeper = LaneKeeper(
        bus,
        Lane.SCHEDULER,
        lanes,
        clock,
        interpret=lane.interpret,
        instructions=lane.instructions,
        settings=lane.settings,
        on_heard=lane.heard,
        quiet=lane.quiet,
        epoch=lambda: epoch,
        lease_s=lease_s,
    )
    asker = Asker(bus)
    scheduler = Scheduler(store, knowledge, planner, asker, clock, nudge, zone=zone)
    return Parts(scheduler, planner, keeper, knowledge, asker, lane)
