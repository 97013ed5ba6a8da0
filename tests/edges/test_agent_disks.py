"""Disks that are full, broken or read-only, and machines that were off: a site takes nothing new, drops nothing, and ends nothing. Real mounts."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.edges.agent_world import Scheduler, Site, a_pair, new_site, place, retried, running_keeper, until
from tests.edges.conftest import RunningHub, new_hub
from tests.fakes.agents import offer
from tests.fakes.sites import World, a_site

from intertie.agent.adapters.process import ProcessAdapter
from intertie.agent.core.model import State
from intertie.agent.core.rules import Rules
from intertie.agent.room import spaces_of
from intertie.contracts.job import Cause
from intertie.contracts.link import Claimed, Ended, Lane, NotStarted, OfferRefused, SiteCondition, Started
from intertie.embedded.hub import running_hub_bus
from intertie.ids import SiteName
from intertie.lane.memory import MemoryLaneTables
from intertie.store import MemoryStore
from intertie.trust.keys import Key


@pytest.fixture
async def disk(short_folder: Path) -> AsyncIterator[Path]:
    """A file system of its own, 8 MiB."""
    folder = short_folder / "disk"
    folder.mkdir()
    mounted = await asyncio.to_thread(
        subprocess.run, ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0711", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    await asyncio.to_thread(subprocess.run, ["umount", "-l", str(folder)], check=False)


def fill(ballast: Path) -> None:
    """Until the disk refuses."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4_096)
        except OSError:
            return


@asynccontextmanager
async def read_only(folder: Path) -> AsyncIterator[None]:
    """As after an error of the file system: by its name nothing can be written below it any more."""
    for arguments in (["--bind", str(folder), str(folder)], ["-o", "remount,bind,ro", str(folder)]):
        await asyncio.to_thread(subprocess.run, ["mount", *arguments], check=True)
    try:
        yield
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", "-l", str(folder)], check=True)


async def test_a_disk_that_fills_up_closes_the_site_and_opens_it_when_there_is_room(short_folder: Path, disk: Path) -> None:
    """The journal is elsewhere: what is measured is each file system that the agent writes to."""
    async with a_site(short_folder, adapter=ProcessAdapter(disk / "jobs"), rules=Rules(disk_floor_percent=25)) as world:
        world.site.room.spaces = lambda: spaces_of([short_folder, disk / "jobs"])
        running = offer(script="until [ -e go ]; do sleep 0.05; done\nexit 3\n")
        await world.site.tick()
        await world.run(running)
        await world.first(Started)
        await asyncio.to_thread(fill, disk / "ballast")
        await world.site.tick()
        refused = offer(devices=("slot-2",))
        await world.tell(world.offered(refused))
        assert (await world.first(OfferRefused)).code == "disk_low"
        # What runs ends as it would have, and its exit code has had its room since before it began.
        (disk / "jobs" / running.attempt / "work" / "go").touch()
        assert (await world.first(Ended)).exit_code == 3
        (disk / "ballast").unlink()
        await world.site.tick()
        after = offer(script="exit 0\n")
        await world.run(after)
        await world.site.idle()
        told = [entry for entry in await world.entries(Lane.REGISTRY) if isinstance(entry, SiteCondition)]
        assert [(entry.accepting, entry.code) for entry in told] == [(True, ""), (False, "disk_low"), (True, "")]


async def test_a_lease_on_a_full_disk_stays_as_it_was(short_folder: Path, disk: Path) -> None:
    async with a_site(short_folder, adapter=ProcessAdapter(disk / "jobs")) as world:
        body = offer(script="sleep 60\n", lease_s=60)
        await world.run(body)
        await world.first(Started)
        file = disk / "jobs" / body.attempt / "deadline.json"
        before = json.loads(file.read_text())
        await asyncio.to_thread(fill, disk / "ballast")
        await world.site.answered(60, world.clock.boot_s() + 20)
        assert json.loads(file.read_text()) == before
        (disk / "ballast").unlink()
        await world.site.answered(60, world.clock.boot_s() + 20)
        assert json.loads(file.read_text())["boot_s"] > before["boot_s"] + 15
        await world.tell(world.stop(body))
        await world.first(Ended)


async def test_work_that_cannot_be_prepared_on_a_full_disk_is_not_started_and_says_why(short_folder: Path, disk: Path) -> None:
    async with a_site(short_folder, adapter=ProcessAdapter(disk / "jobs")) as world:
        await asyncio.to_thread(fill, disk / "ballast")
        body = offer(script="x" * 8_192)
        await world.run(body)
        assert (await world.first(NotStarted)).code == "disk_full"
        await world.site.idle()
        assert world.site.running() == [] and await world.entries(Lane.METERING) == []


async def test_a_read_only_job_folder_starts_nothing_ends_nothing_and_loses_no_exit_code(short_folder: Path, disk: Path) -> None:
    async with a_site(short_folder, adapter=ProcessAdapter(disk / "jobs")) as world:
        running, second = offer(script="sleep 60\n", lease_s=60), offer(devices=("slot-2",))
        ending = offer(script=f"until [ -e {short_folder}/go ]; do sleep 0.05; done\nexit 3\n", devices=("slot-3",))
        await world.run(running)
        await world.run(ending)
        await until(lambda: len(world.site.running()) == 2 and all_run(world), "both run")
        async with read_only(disk):
            await world.run(second)
            failed = await world.first(NotStarted)
            assert (failed.attempt, failed.code) == (second.attempt, "disk_broken")
            await world.site.answered(60, world.clock.boot_s() + 20)
            (short_folder / "go").touch()
            said = disk / "jobs" / ending.attempt / "supervisor.log"
            await until(lambda: "exit.json" in said.read_text(), "its supervisor could not write the end down")
            assert all_run(world)
        end = await world.first(Ended)
        assert (end.attempt, end.exit_code) == (ending.attempt, 3)
        await world.tell(world.stop(running))
        await world.site.idle()
        assert [entry.cause for entry in await world.entries() if isinstance(entry, Ended)] == [Cause.JOB, Cause.CANCELLED]


def all_run(world: World) -> bool:
    return all(world.site.books.attempts[name].state is State.RUNNING for name in world.site.running())


async def test_a_full_journal_promises_nothing_and_what_happens_meanwhile_is_told_when_it_can_be_written(
    short_folder: Path, disk: Path
) -> None:
    async with a_site(disk, adapter=ProcessAdapter(short_folder / "jobs")) as world:
        body, second = offer(script="until [ -e go ]; do sleep 0.05; done\nexit 3\n"), offer(devices=("slot-2",))
        await world.run(body)
        await world.first(Started)
        told = world.offered(second)
        fresh = await world.journal.take([told])
        await asyncio.to_thread(fill, disk / "ballast")
        (short_folder / "jobs" / body.attempt / "work" / "go").touch()
        exited = short_folder / "jobs" / body.attempt / "exit.json"
        await until(exited.exists, "it has ended")
        await world.site.take(fresh, sent_boot_s=world.clock.boot_s(), acknowledged=0)
        (disk / "ballast").unlink()
        assert (await world.first(Ended, limit_s=30)).exit_code == 3
        await world.site.tick()
        await world.tell(told)
        claims = {entry.attempt for entry in await world.entries() if isinstance(entry, Claimed)}
        assert second.attempt in claims


# --- machines that were off ---


async def test_a_machine_that_starts_with_no_network_at_all_works(short_folder: Path) -> None:
    """BR-054 from a cold boot: journal and jobs are recovered, the owner's work runs, and the hub's starts if its go is of this boot."""
    layout = await asyncio.to_thread(new_hub, short_folder / "hub")
    key, store = Key.new("U"), MemoryStore("scheduler")
    scheduler = Scheduler(MemoryLaneTables(store), store, key)
    site: Site | None = None
    try:
        (short_folder / "a").mkdir()
        with running_hub_bus(layout) as bus:
            hub = RunningHub(layout, bus)
            site = await new_site(hub, SiteName("lab"), short_folder / "a", key)
            async with running_keeper(hub, scheduler):
                site.start()
                body = place(site, scheduler, "until [ -e go ]; do sleep 0.05; done\n")
                await until(lambda: scheduler.of(Started), "it runs")
        await asyncio.to_thread(site.end, signal.SIGKILL)
        if (await asyncio.to_thread(subprocess.run, ["unshare", "--net", "true"], capture_output=True, check=False)).returncode:
            pytest.skip("no network namespace may be made here")
        site.start(["unshare", "--net", "--", *site.command])
        await until(lambda: site is not None and (site.folder.root / "agent.json").exists(), "it works")
        job = json.loads((await asyncio.to_thread(retried, site, "submit", "--json", "--", "true")).stdout)["job"]
        assert (await asyncio.to_thread(site.local, "logs", "-f", job)).returncode == 0
        status = json.loads((await asyncio.to_thread(site.local, "status", "--json")).stdout)
        assert status["islanded_since"] is not None and status["lent_jobs"] == 1
        (site.folder.jobs / body.attempt / "work" / "go").touch()
        await until((site.folder.jobs / body.attempt / "exit.json").exists, "the hub's work ends as it would have")
    finally:
        if site is not None and site.process is not None:
            await asyncio.to_thread(site.end, signal.SIGKILL)


async def test_after_a_reboot_claims_are_given_up_and_what_ran_ended_at_its_last_sign_of_life(short_folder: Path) -> None:
    """The reboot is played: another boot id for the agent, and a supervisor that is gone as after a power loss."""
    key = Key.new("U")
    running, staged, claimed = offer(script="sleep 60\n"), offer(devices=("slot-2",)), offer(devices=("slot-3",))
    async with a_site(short_folder, scheduler=key) as world:
        await world.run(running)
        await world.first(Started)
        await world.tell(world.offered(claimed))
        world.site.may_start = lambda: False
        await world.run(staged)
        go = world.go(claimed)
        home = short_folder / "jobs" / running.attempt
        await until((home / "started.json").exists, "it runs")
        lost = json.loads((home / "supervisor.json").read_text())["pid"], json.loads((home / "started.json").read_text())["pid"]
    for pid in lost:
        await asyncio.to_thread(subprocess.run, ["kill", "-9", str(pid)], check=False)
    begun = json.loads((home / "started.json").read_text())["boot_ns"]
    (home / "alive").write_text(json.dumps({"format": 1, "utc_ns": 1, "boot_ns": begun + 12_000_000_000}))
    async with a_site(short_folder, scheduler=key, boot="another") as world:
        end = await world.first(Ended)
        assert (end.attempt, end.outcome, end.cause, end.ran_us) == (running.attempt, "failed", Cause.SITE, 12_000_000)
        await world.site.tick()
        await world.tell(go)
        await world.site.idle()
        given_up = {(entry.attempt, entry.code) for entry in await world.entries() if isinstance(entry, NotStarted)}
        assert given_up == {(claimed.attempt, "rebooted"), (staged.attempt, "rebooted")}
        assert world.site.running() == [] and world.site.books.holds.holder == {}


@pytest.fixture
async def pair(operator_hub: RunningHub, short_folder: Path, unique: str) -> AsyncIterator[tuple[Site, Scheduler]]:
    async with a_pair(operator_hub, short_folder, unique) as both:
        yield both


async def test_work_offered_while_the_agent_stops_is_run_once_or_offered_again(
    operator_hub: RunningHub, pair: tuple[Site, Scheduler]
) -> None:
    """BR-060: it stops in the midst of what it was told, again and again; every offer ends in exactly one run."""
    site, scheduler = pair
    async with running_keeper(operator_hub, scheduler):
        for n in range(6):
            site.start()
            await until((site.folder.root / "agent.json").exists, "it works")
            place(site, scheduler, "exit 0\n", devices=(f"slot-{n % 4 + 1}",))
            if n % 2:
                await until(lambda n=n: len(scheduler.of(Claimed)) > n, "it is claimed")  # type: ignore[misc]  # a default
            await asyncio.to_thread(site.end, signal.SIGTERM)
        site.start()
        await until(lambda: len(scheduler.of(Ended)) == 6, "each has ended", 60)
        started = [entry.attempt for entry in scheduler.of(Started)]
        assert sorted(started) == sorted(scheduler.offers) and len(started) == len(set(started))
