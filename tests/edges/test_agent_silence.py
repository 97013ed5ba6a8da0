"""The hub is silent, or the agent is: leased work is stopped by its own supervisor, work that waits is touched by nothing. Real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.edges.agent_world import Scheduler, Site, a_pair, place, running_keeper, until
from tests.edges.conftest import RunningHub
from tests.fakes.agents import offer
from tests.fakes.sites import a_site

from intertie.agent.core.model import State
from intertie.contracts.job import Cause
from intertie.contracts.link import Ended, NotStarted, OfferBody, Started
from intertie.trust.keys import Key

LEASE_S = 3
TICKS = "while :; do date +%s.%N >> ticks; sleep 0.1; done\n"


@pytest.fixture
async def pair(operator_hub: RunningHub, short_folder: Path, unique: str) -> AsyncIterator[tuple[Site, Scheduler]]:
    async with a_pair(operator_hub, short_folder, unique) as both:
        yield both


def told(site: Site, body: OfferBody, name: str) -> dict[str, object] | None:
    """A record of the job's folder, if it is there."""
    file = site.folder.jobs / body.attempt / name
    return dict(json.loads(file.read_text())) if file.exists() else None


def runs(site: Site, body: OfferBody) -> bool:
    started = told(site, body, "started.json")
    return started is not None and Path(f"/proc/{started['pid']}").exists() and told(site, body, "exit.json") is None


def end_quietly(site: Site, *bodies: OfferBody) -> None:
    """What a test leaves running on purpose."""
    for body in bodies:
        who = told(site, body, "supervisor.json")
        if who is not None and told(site, body, "exit.json") is None:
            os.kill(int(str(who["pid"])), signal.SIGTERM)


async def both_run(site: Site, scheduler: Scheduler) -> tuple[OfferBody, OfferBody]:
    """One of each kind: (leased, waiting)."""
    site.start()
    leased = place(site, scheduler, TICKS, lease_s=LEASE_S)
    waits = place(site, scheduler, TICKS, devices=("slot-2",))
    await until(lambda: len(scheduler.of(Started)) == 2, "both run")
    return leased, waits


async def test_an_agent_killed_and_never_restarted_leaves_no_leased_work_running(
    operator_hub: RunningHub, pair: tuple[Site, Scheduler]
) -> None:
    site, scheduler = pair
    async with running_keeper(operator_hub, scheduler):
        leased, waits = await both_run(site, scheduler)
        deadline = told(site, leased, "deadline.json")
        # It lives longer than its first lease, as long as the hub answers.
        await until(lambda: (told(site, leased, "deadline.json") or {})["boot_s"] > float(str(deadline["boot_s"])) + LEASE_S, "renewed")  # type: ignore[index, operator]
        assert runs(site, leased)
        await asyncio.to_thread(site.end, signal.SIGKILL)
        await until(lambda: told(site, leased, "exit.json"), "its supervisor stopped it")
        end = told(site, leased, "exit.json")
        assert end is not None and end["stopped_for"] == "lease_ended"
        assert runs(site, waits) and told(site, waits, "deadline.json") is None
        end_quietly(site, waits)


async def test_an_agent_stopped_beyond_the_lease_finds_its_work_ended_and_the_platform_pays(
    operator_hub: RunningHub, pair: tuple[Site, Scheduler]
) -> None:
    site, scheduler = pair
    async with running_keeper(operator_hub, scheduler):
        leased, waits = await both_run(site, scheduler)
        assert site.process is not None
        site.process.send_signal(signal.SIGSTOP)
        await until(lambda: told(site, leased, "exit.json"), "its supervisor stopped it")
        assert runs(site, waits)
        site.process.send_signal(signal.SIGCONT)
        await until(lambda: scheduler.of(Ended), "the end is told")
        [end] = scheduler.of(Ended)
        assert (end.attempt, end.outcome, end.cause) == (leased.attempt, "failed", Cause.PLATFORM)
        assert "lease" in end.reason and runs(site, waits)
        scheduler.stopping.append(waits.attempt)
        await until(lambda: len(scheduler.of(Ended)) == 2, "the other one is stopped by word")


async def test_with_the_hub_gone_leased_work_ends_and_waiting_work_goes_on(operator_hub: RunningHub, pair: tuple[Site, Scheduler]) -> None:
    """BR-053, BR-054, at the site: an absent hub ends nothing but what asked for it, and that end is laid to the platform."""
    site, scheduler = pair
    async with running_keeper(operator_hub, scheduler):
        leased, waits = await both_run(site, scheduler)
    await until(lambda: told(site, leased, "exit.json"), "its lease ended with the hub")
    assert runs(site, waits)
    async with running_keeper(operator_hub, scheduler):
        await until(lambda: scheduler.of(Ended), "the end is told")
        [end] = scheduler.of(Ended)
        assert (end.attempt, end.cause) == (leased.attempt, Cause.PLATFORM)
        scheduler.stopping.append(waits.attempt)
        await until(lambda: len(scheduler.of(Ended)) == 2, "the other one is stopped by word")


async def test_no_answer_gives_time_to_what_was_told_to_stop(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        body = offer(script="trap '' TERM\nwhile :; do sleep 0.1; done\n", lease_s=60)
        await world.run(body)
        await world.first(Started)
        file = short_folder / "jobs" / body.attempt / "deadline.json"
        before = file.read_bytes()
        await world.tell(world.stop(body, cause=Cause.PLATFORM))
        await world.site.answered(60, world.clock.boot_s() + 10)
        assert file.read_bytes() == before
        end = await world.first(Ended)
        assert (end.outcome, end.cause) == ("failed", Cause.PLATFORM)


async def test_a_stop_that_the_disk_refused_gives_no_time_either(short_folder: Path) -> None:
    """The stop came and could not be recorded: it will be repeated, and until then the lease runs out."""
    async with a_site(short_folder) as world:
        body = offer(script="sleep 60\n", lease_s=60)
        await world.run(body)
        await world.first(Started)
        file = short_folder / "jobs" / body.attempt / "deadline.json"
        before = file.read_bytes()
        world.site.leases.end(body.attempt)
        await world.site.answered(60, world.clock.boot_s() + 10)
        assert file.read_bytes() == before
        await world.tell(world.stop(body))
        await world.first(Ended)


async def test_the_lease_counts_from_the_sync_that_brought_the_go(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        body = offer(script="sleep 60\n", lease_s=60)
        await world.tell(world.offered(body))
        sent = world.clock.boot_s() - 20
        await world.tell(world.go(body), sent_boot_s=sent)
        await world.first(Started)
        deadline = json.loads((short_folder / "jobs" / body.attempt / "deadline.json").read_text())
        assert deadline["boot_s"] == pytest.approx(sent + 60)
        await world.site.answered(60, sent + 15)
        await world.site.answered(0, sent + 18)
        renewed = json.loads((short_folder / "jobs" / body.attempt / "deadline.json").read_text())
        assert renewed["boot_s"] == pytest.approx(sent + 75)
        await world.tell(world.stop(body))
        await world.first(Ended)


async def test_work_whose_lease_passed_while_it_was_staged_never_starts(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        body = offer(lease_s=60)
        await world.tell(world.offered(body))
        await world.tell(world.go(body), sent_boot_s=world.clock.boot_s() - 61)
        assert (await world.first(NotStarted)).code == "lease_over"
        await world.site.idle()
        assert "Started" not in await world.kinds()


async def test_a_renewed_lease_survives_a_restart_of_the_agent(short_folder: Path) -> None:
    key = Key.new("U")
    body = offer(script="sleep 60\n", lease_s=60)
    async with a_site(short_folder, scheduler=key) as world:
        await world.tell(world.offered(body))
        sent = world.clock.boot_s() - 50
        await world.tell(world.go(body), sent_boot_s=sent)
        await world.first(Started)
        await world.site.answered(60, sent + 40)
    async with a_site(short_folder, scheduler=key) as world:
        await world.site.answered(60, sent + 45)
        renewed = json.loads((short_folder / "jobs" / body.attempt / "deadline.json").read_text())
        assert renewed["boot_s"] == pytest.approx(sent + 105)
        assert world.site.books.attempts[body.attempt].state is State.RUNNING
        await world.tell(world.stop(body))
        await world.first(Ended)
