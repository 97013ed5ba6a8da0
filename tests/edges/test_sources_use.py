"""Device use through a real agent's desk: told with the end, kept over a restart, and nothing of what a stranger did."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.fakes.agents import offer, pool
from tests.fakes.sites import a_site

from intertie.agent.config import VERSION
from intertie.agent.core.model import State
from intertie.agent.sources.reading import CardReading
from intertie.agent.use import DeviceUses
from intertie.contracts.link import Ended, Started
from intertie.contracts.observed import PoolSeen
from intertie.ids import AttemptId, DeviceId, PoolName

G = DeviceId("GPU-1")


def read(util: int) -> dict[DeviceId, CardReading]:
    return {G: CardReading(index=0, uuid=G, name="A100", utilisation_percent=util, memory_used_mib=1_000, memory_total_mib=81_920)}


async def until_running(world: object, attempt: AttemptId) -> None:
    async with asyncio.timeout(60):
        while world.site.books.attempts[attempt].state is not State.RUNNING:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_the_end_of_an_attempt_tells_how_its_cards_were_used_whoever_restarted_meanwhile(short_folder: Path) -> None:
    go = short_folder / "go"
    body = offer(script=f"until [ -e {go} ]; do sleep 0.05; done\n", devices=(G,), gpus=1)
    async with a_site(short_folder, pools=[pool(gpus=(G,))]) as world:
        await world.run(body)
        await until_running(world, body.attempt)
        site = world.site
        await site.use.look(read(50), frozenset(), beat_s=60.0)
        await site.use.keep()
        site.use = DeviceUses(site)  # What a new agent begins with.
        await site.use.recover()
        await site.use.look(read(50), frozenset(), beat_s=60.0)
        await site.use.look({}, frozenset(), beat_s=60.0)
        go.touch()
        await site.idle()
        (ended,) = [entry for entry in await world.entries() if isinstance(entry, Ended)]
        (told,) = ended.device_use
        assert (told.device, told.model, told.mean_milli, told.max_memory_mib, told.samples) == (G, "A100", 500, 1_000, 2)
        assert 0 < told.seen_us <= ended.ran_us and told.seen_us + told.unseen_us == ended.ran_us
        rows = await site.journal.read(lambda cursor: cursor.execute("SELECT key FROM setting WHERE key LIKE 'use/%'").fetchall())
        assert rows == []


async def test_work_that_nobody_looked_at_says_nothing_of_its_cards(short_folder: Path) -> None:
    body = offer(devices=(G,), gpus=1)
    async with a_site(short_folder, pools=[pool(gpus=(G,))]) as world:
        await world.run(body)
        await world.site.idle()
        (ended,) = [entry for entry in await world.entries() if isinstance(entry, Ended)]
        assert ended.device_use == []


async def test_a_start_says_the_driver_and_the_agent_that_it_was_started_by(short_folder: Path) -> None:
    body = offer(devices=(G,), gpus=1)
    async with a_site(short_folder, pools=[pool(gpus=(G,))]) as world:
        world.site.seen = {PoolName("main"): PoolSeen(driver="550.90.07", agent_version=VERSION)}
        await world.run(body)
        await world.site.idle()
        (started,) = [entry for entry in await world.entries() if isinstance(entry, Started)]
        assert (started.driver, started.agent_version) == ("550.90.07", VERSION)
