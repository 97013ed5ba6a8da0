"""The third book leaves a site: a real journal over a scheduler in memory, read, sealed and told; and it agrees with what was measured there."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from tests.edges.test_agent_queue import a_cluster, over, speaking, submitted, until
from tests.fakes.agents import GUEST, offer, pool
from tests.fakes.sites import World, a_site

from intertie.agent.adapters.fake_cluster import FakeCluster
from intertie.agent.native_books import NativeTeller
from intertie.contracts.accounting import NativeDay
from intertie.contracts.link import Claimed, Ended, Lane, LaneState, NativeAccounting, Started, Synced
from intertie.errors import Unavailable
from intertie.link.clocks import ClockEstimate
from intertie.link.site import Exchange
from intertie.metering.core.native import AROUND_US
from intertie.trust.seal import open_seal


async def told(world: World) -> list[NativeDay]:
    entries = [entry for entry in await world.entries(Lane.METERING) if isinstance(entry, NativeAccounting)]
    return [open_seal(entry.sealed, world.site.key.public, NativeDay) for entry in entries]


async def one_run(world: World, cluster: FakeCluster) -> Ended:
    body = offer(devices=("slot-1", "slot-2"))
    await world.tell(world.offered(body))
    await world.first(Claimed)
    await world.tell(world.go(body))
    await submitted(cluster, 1)
    await world.first(Started, 60)
    end = await world.first(Ended, 60)
    await world.site.idle()
    await until(lambda: cluster.jobs[0].ended is not None)
    return end


async def test_what_the_scheduler_recorded_is_told_and_agrees_with_what_was_measured(short_folder: Path) -> None:
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster), pools=[pool(8)]) as world:
        end = await one_run(speaking(world), cluster)
        teller = NativeTeller(world.site, cluster)
        await teller.look()
        (day,) = await told(world)
        (run,) = day.records
        assert (run.tag, run.native_id, run.devices, run.account or GUEST) == (end.attempt, "1", 2, GUEST)
        assert run.started is not None and run.elapsed_us is not None
        assert abs(run.elapsed_us - end.ran_us) <= AROUND_US
        assert (day.day, day.parts, day.cluster) == (run.started.date().isoformat(), 1, "fake")


async def test_a_day_is_not_told_again_before_its_time_nor_after_a_restart(short_folder: Path) -> None:
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster), pools=[pool(8)]) as world:
        key = world.scheduler
        await NativeTeller(world.site, cluster).look()
        await NativeTeller(world.site, cluster).look()
        assert len(await told(world)) == 1
    async with a_site(short_folder, adapter=over(short_folder, cluster), pools=[pool(8)], scheduler=key) as world:
        await NativeTeller(world.site, cluster).look()
        assert len(await told_unverified(world)) == 1
        await NativeTeller(world.site, cluster, every=timedelta(0)).look()
        assert len(await told_unverified(world)) == 2


async def told_unverified(world: World) -> list[NativeAccounting]:
    """The world has a new key after a restart."""
    return [entry for entry in await world.entries(Lane.METERING) if isinstance(entry, NativeAccounting)]


async def test_a_scheduler_that_is_away_is_asked_again_and_nothing_is_told_meanwhile(short_folder: Path) -> None:
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster), pools=[pool(8)]) as world:
        cluster.deaf = True
        with pytest.raises(Unavailable):
            await NativeTeller(world.site, cluster).look()
        assert await told(world) == []
        cluster.deaf = False
        await NativeTeller(world.site, cluster).look()
        assert len(await told(world)) == 1


@pytest.mark.parametrize(
    ("version", "state", "understood"), [(2, LaneState.OK, False), (3, LaneState.OK, True), (3, LaneState.FORKED, False)]
)
async def test_accounting_is_said_only_to_a_metering_that_knows_it(
    short_folder: Path, version: int, state: LaneState, understood: bool
) -> None:
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster), pools=[pool(8)]) as world:
        teller = NativeTeller(world.site, cluster)
        synced = Synced(v=version, nonce=1, state=state, ack_through=0, safe_through=0, epoch=1, clock=world.clock.now())
        teller.answered(Exchange(1, 1.0, 1.1, synced, ClockEstimate(0.0, 0.0, 1.0, 0.0), 0))
        assert teller.understood is understood
