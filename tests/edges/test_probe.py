"""The known job at a site: it really runs, says what it saw, makes room, is told once under the site's key, and proves nothing it did not see."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
from tests.fakes.agents import GUEST, offer, pool
from tests.fakes.sites import World, a_site

from intertie.agent.core.probing import Known, ProbeRules, due
from intertie.agent.core.rules import Rules
from intertie.agent.probe import PROBES_VERSION, Probe
from intertie.contracts.link import Lane, LaneState, OfferRefused, ProbeTold
from intertie.contracts.probe import ProbeOutcome, ProbeReport
from intertie.contracts.site import AccessMode, DeviceState
from intertie.ids import DeviceId, PoolName
from intertie.link.site import Exchange
from intertie.trust.seal import open_seal

MAIN = PoolName("main")
NOW = ProbeRules(first_after_s=0)


def heard(version: int = PROBES_VERSION) -> Exchange:
    return cast(Exchange, SimpleNamespace(synced=SimpleNamespace(state=LaneState.OK, v=version)))


@asynccontextmanager
async def probing(world: World) -> AsyncIterator[Probe]:
    probe = Probe(world.site, beat=0.01)
    await probe.recover()
    task = asyncio.create_task(probe.run())
    try:
        yield probe
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def report_of(probe: Probe, name: PoolName = MAIN) -> ProbeReport:
    async with asyncio.timeout(60):
        while True:
            found = next(one for one in probe.told() if one.pool == name)
            if found.last is not None:
                return found.last
            await asyncio.sleep(0.05)


async def entries(world: World) -> list[ProbeTold]:
    return [entry for entry in await world.entries(Lane.REGISTRY) if isinstance(entry, ProbeTold)]


async def test_a_probe_runs_as_an_account_of_jobs_measures_and_is_told_once_under_the_site_s_key(short_folder: Path) -> None:
    async with a_site(short_folder, rules=Rules(probe=NOW)) as world, probing(world) as probe:
        report = await report_of(probe)
        assert (report.outcome, report.device, report.reason) == (ProbeOutcome.PASSED, "slot-4", "")
        assert report.measures["cpu_hash_mib_s"] > 0 and report.measures["disk_write_mib_s"] > 0 and report.measures["start_us"] > 0
        assert report.account == (GUEST or report.account) != ""
        assert await entries(world) == [], "a keeper that does not know probes is told nothing"
        assert not [a for a in world.site.books.attempts.values() if a.local is None] and world.site.running() == []
        probe.answered(heard())
        async with asyncio.timeout(30):
            while not await entries(world):  # noqa: ASYNC110  # nothing but looking tells
                await asyncio.sleep(0.05)
        (told,) = await entries(world)
        assert open_seal(told.sealed, world.site.key.public, ProbeReport) == report
        assert world.site.books.holds.holder == {}
    async with a_site(short_folder, rules=Rules(probe=NOW)) as world, probing(world) as probe:
        probe.answered(heard())
        assert await report_of(probe) == report, "a new agent knows of it, and runs none before it is due"
        await asyncio.sleep(0.2)
        assert len(await entries(world)) <= 1


async def test_of_a_pool_in_which_its_owner_decides_a_probe_names_neither_card_nor_account(short_folder: Path) -> None:
    there = pool()
    service = replace(there, profile=msgspec.structs.replace(there.profile, mode=AccessMode.SERVICE))
    async with a_site(short_folder, pools=[service], rules=Rules(probe=NOW)) as world, probing(world) as probe:
        report = await report_of(probe)
        probe.answered(heard())
        async with asyncio.timeout(30):
            while not await entries(world):  # noqa: ASYNC110  # nothing but looking tells
                await asyncio.sleep(0.05)
        (told,) = await entries(world)
        said = open_seal(told.sealed, world.site.key.public, ProbeReport)
        assert report.device == "slot-4" and report.account, "its owner sees it whole"
        assert said == msgspec.structs.replace(report, device=DeviceId(""), account="")
        assert probe.told()[0].last == report


async def test_a_probe_makes_room_for_an_offer_of_its_device_and_tries_again(short_folder: Path) -> None:
    async with a_site(short_folder, pools=[pool(1)], rules=Rules(probe=NOW)) as world, probing(world) as probe:
        async with asyncio.timeout(60):
            while not any(one.running for one in probe.told()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        first = offer()
        await world.tell(world.offered(first))
        assert [e.code for e in await world.entries() if isinstance(e, OfferRefused)] in (["device_busy"], [])
        async with asyncio.timeout(60):
            while world.site.books.holds.holder:  # noqa: ASYNC110  # nothing but looking tells
                await asyncio.sleep(0.01)
        assert (await report_of(probe)).outcome is ProbeOutcome.PASSED


async def test_no_probe_runs_while_lending_is_paused_unless_its_owner_asks(short_folder: Path) -> None:
    async with a_site(short_folder, rules=Rules(probe=NOW)) as world:
        await world.site.pause.press(until=None, by="owner", reason="maintenance")
        async with probing(world) as probe:
            async with asyncio.timeout(30):
                while probe.told()[0].waits != "lending is paused":  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert probe.told()[0].last is None
            probe.asked.add(MAIN)
            assert (await report_of(probe)).outcome is ProbeOutcome.PASSED


async def test_a_card_that_nothing_in_the_job_can_see_is_unproven_and_no_failure(short_folder: Path) -> None:
    card = DeviceId("GPU-1")
    async with a_site(short_folder, pools=[pool(gpus=(card,))], rules=Rules(probe=NOW)) as world:
        await world.site.observe({card: DeviceState.FREE})
        async with probing(world) as probe:
            report = await report_of(probe)
    assert (report.outcome, report.visible, report.model) == (ProbeOutcome.UNPROVEN, None, "")
    assert "no device could be asked for" in report.reason and "memory_mib" not in report.measures


async def test_a_probe_is_run_again_when_a_day_is_over_and_a_clock_that_was_put_back_starves_none(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        now, here = world.clock.now(), pool()
        day = timedelta(days=1)
        assert not due(ProbeRules(), here, Known(), started=now - timedelta(seconds=299), now=now)
        assert due(ProbeRules(), here, Known(), started=now - day, now=now)
        assert not due(ProbeRules(), here, Known(last_at=now - day / 2), started=now - day, now=now)
        assert due(ProbeRules(), here, Known(last_at=now - day), started=now - day, now=now)
        assert due(ProbeRules(), here, Known(last_at=now + day), started=now - day, now=now)
        assert not due(ProbeRules(on=False), here, Known(), started=now - day, now=now)
        assert not due(ProbeRules(pools=["other"]), here, Known(), started=now - day, now=now)
