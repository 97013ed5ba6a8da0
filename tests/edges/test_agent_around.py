"""What a site with a queue of its own tells of itself: rights, load and age, whatever its scheduler does."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import msgspec
from tests.edges.test_agent_queue import a_cluster, over
from tests.fakes.agents import offer, pool
from tests.fakes.sites import a_site

from intertie.agent.adapters.fake_cluster import FakeCluster
from intertie.agent.adapters.port import Described
from intertie.agent.around import Around
from intertie.agent.core.rights import rights
from intertie.clock import SystemClock
from intertie.contracts.link import Inventory, Lane, Started
from intertie.contracts.site import DeviceState, Lendable, PoolProfile
from intertie.ids import DeviceId
from intertie.scheduler.core.sight import Sight

CLOCK = SystemClock()


def profile(lend: int = 4) -> PoolProfile:
    return msgspec.structs.replace(pool(8).profile, lendable=Lendable(devices=lend))


def count(states: dict[DeviceId, DeviceState]) -> dict[DeviceState, int]:
    return {state: list(states.values()).count(state) for state in set(states.values())}


async def test_its_inventory_is_of_rights_with_the_load_of_others_beside(short_folder: Path) -> None:
    cluster = a_cluster(8)
    adapter = over(short_folder, cluster)
    mine = rights(profile())
    async with a_site(short_folder, adapter=adapter, pools=[mine]) as world:
        around = Around(cluster, adapter, CLOCK, [profile()], 0.2)
        assert count(dict(around._judge(world.site.books))) == {DeviceState.UNKNOWN: 4}, "before the first look nothing is known"
        assert around.sample([mine], world.site.books.holds, {}) is None
        cluster.foreign_running, cluster.foreign_waiting, cluster.foreign_devices = 5, 7, 6
        body = offer(script="sleep 30\n", devices=(mine.devices[0].id,))
        await world.run(body)
        await world.first(Started, 60.0)
        seen = await around.look(world.site.books)
        assert count(dict(seen)) == {DeviceState.FREE: 2, DeviceState.FOREIGN: 2}
        world.site.native = around.loads
        await world.site.observe(seen, around.pools)
        (told,) = [entry for entry in await world.entries(Lane.REGISTRY) if isinstance(entry, Inventory)]
        (inventory,) = told.pools
        assert inventory.native is not None
        assert (inventory.native.running, inventory.native.waiting, inventory.native.devices_busy) == (5, 7, 6)
        assert inventory.native.every_s > 0 and inventory.native.rpc_per_minute > 0
        states = [one.state for one in inventory.devices]
        assert sorted(states) == sorted([DeviceState.OURS, DeviceState.FREE, DeviceState.FOREIGN, DeviceState.FOREIGN])
        await world.tell(world.stop(body))
        await world.site.idle()
    await cluster.close()


async def test_rights_that_others_take_and_the_load_that_took_them_are_told_as_one(short_folder: Path) -> None:
    cluster = a_cluster(8)
    adapter = over(short_folder, cluster)
    async with a_site(short_folder, adapter=adapter, pools=[rights(profile())]) as world:
        around = Around(cluster, adapter, CLOCK, [profile()], 0.2)
        await around.look(world.site.books)
        (load,) = around.loads.values()
        assert load.devices_busy == 0
        # Long before a change of the load alone would be told.
        cluster.foreign_running, cluster.foreign_devices = 1, 7
        around._due_s = 0.0
        assert count(dict(await around.look(world.site.books))) == {DeviceState.FREE: 1, DeviceState.FOREIGN: 3}
        (load,) = around.loads.values()
        assert (load.running, load.devices_busy) == (1, 7)


async def test_a_drained_node_leaves_at_the_next_look(short_folder: Path) -> None:
    cluster = a_cluster(8)
    adapter = over(short_folder, cluster)
    async with a_site(short_folder, adapter=adapter, pools=[rights(profile())]) as world:
        around = Around(cluster, adapter, CLOCK, [profile()], 0.0)
        assert count(dict(await around.look(world.site.books))) == {DeviceState.FREE: 4}
        cluster.drain("n1")
        around._due_s = 0.0
        assert count(dict(await around.look(world.site.books))) == {DeviceState.LOST: 4}


async def test_what_was_seen_grows_old_while_the_scheduler_is_silent_and_the_hub_believes_it_for_so_long_as_its_owner_looks(
    short_folder: Path,
) -> None:
    """BR-066: a look that fails renews nothing; the limit follows the owner's interval, within the hub's own bounds."""
    cluster = a_cluster(8)
    adapter = over(short_folder, cluster)
    mine = rights(profile())
    async with a_site(short_folder, adapter=adapter, pools=[mine]) as world:
        around = Around(cluster, adapter, CLOCK, [profile()], 30.0)
        await around.look(world.site.books)
        first = around.sample([mine], world.site.books.holds, {})
        cluster.deaf = True
        around._due_s = 0.0
        await around.look(world.site.books)
        again = around.sample([mine], world.site.books.holds, {})
        assert first is not None and again is not None
        assert (again.sampled, again.sequence) == (first.sampled, first.sequence + 1) and again.every_s == 30.0
        assert "does not answer" in again.devices[0].errors["scheduler"]
        sight = Sight()
        live = []
        for age_s in (1, 60, 120):
            sample = msgspec.structs.replace(again, sequence=again.sequence + age_s)
            sight.observe(world.site.joined.site, sample, 1_000.0 + age_s)
            at = again.sampled + timedelta(seconds=age_s)
            views = sight.devices(world.site.joined.site, mine.name, None, now=at, now_s=1_000.0 + age_s, offset_s=0.0)
            live.append({view.live for view in views})
        assert live == [{True}, {True}, {False}]


async def test_two_pools_of_one_scheduler_share_no_name(short_folder: Path) -> None:
    cluster = a_cluster(8)
    second = msgspec.structs.replace(profile(2), pool="other")
    around = Around(cluster, over(short_folder, cluster), CLOCK, [profile(), second], 30.0)
    names = [device.id for one in around.pools for device in one.devices]
    assert len(names) == len(set(names)) == 6


class OddCluster(FakeCluster):
    """Describes itself in words that our own parser breaks on."""

    async def describe(self) -> Described:
        raise KeyError("nobody foresaw this")


async def test_a_description_that_breaks_our_parser_ends_no_agent(short_folder: Path) -> None:
    cluster = OddCluster(CLOCK, nodes={"n1": 8})
    adapter = over(short_folder, cluster)
    async with a_site(short_folder, adapter=adapter, pools=[rights(profile())]) as world:
        around = Around(cluster, adapter, CLOCK, [profile()], 0.2)
        assert count(dict(await around.look(world.site.books))) == {DeviceState.UNKNOWN: 4}
        assert around.why == "KeyError"
