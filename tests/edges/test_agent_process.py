"""The agent as the process that it is, against a real nats-server in operator mode and a real keeper: connected, cut off, killed, restarted."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.edges.agent_world import Scheduler, Site, a_pair, new_site, place, retried, running_keeper, until
from tests.edges.conftest import RunningHub, new_hub

from intertie.bus.port import Message
from intertie.contracts.base import decode, encode
from intertie.contracts.link import (
    Answer,
    Ask,
    AskLog,
    AskStatus,
    Claimed,
    Ended,
    EntryBase,
    LogChunk,
    SiteStatus,
    Started,
    answer_subject,
    ask_subject,
    nudge_subject,
)
from intertie.contracts.telemetry import decode_sample, telemetry_subject
from intertie.embedded.hub import running_hub_bus
from intertie.ids import SiteName
from intertie.lane.memory import MemoryLaneTables
from intertie.store import MemoryStore
from intertie.trust.keys import Key


@pytest.fixture
async def pair(operator_hub: RunningHub, short_folder: Path, unique: str) -> AsyncIterator[tuple[Site, Scheduler]]:
    async with a_pair(operator_hub, short_folder, unique) as both:
        yield both


async def test_an_offer_becomes_a_claim_a_go_a_run_and_an_end(operator_hub: RunningHub, pair: tuple[Site, Scheduler]) -> None:
    site, scheduler = pair
    async with running_keeper(operator_hub, scheduler) as hub:
        site.start()
        await until(lambda: scheduler.of(EntryBase), "settings are applied")
        place(site, scheduler, "echo hello\nexit 0\n")
        await hub.publish(nudge_subject(site.name), b"")
        await until(lambda: scheduler.of(Ended), "the end is told")
        [end] = scheduler.of(Ended)
        assert (end.outcome, end.log_tail, end.islanded) == ("succeeded", "hello\n", False)
        assert [e.attempt for e in scheduler.of(Claimed)] == [end.attempt]
        assert await asyncio.to_thread(site.end, signal.SIGTERM) == 0


async def test_questions_are_answered_and_devices_are_told(operator_hub: RunningHub, pair: tuple[Site, Scheduler]) -> None:
    site, scheduler = pair
    async with running_keeper(operator_hub, scheduler) as hub:
        answers: list[Answer] = []
        samples: list[Message] = []

        async def answered(message: Message) -> None:
            answers.append(decode(message.body, Answer))

        async def sampled(message: Message) -> None:
            samples.append(message)

        await hub.subscribe(answer_subject(site.name), answered)
        await hub.subscribe(telemetry_subject(site.name, "*"), sampled)
        site.start()
        body = place(site, scheduler, "echo 训练完成\n")
        await until(lambda: scheduler.of(Ended), "the end is told")
        await hub.publish(ask_subject(site.name), encode(Ask(id="q1", question=AskLog(attempt=body.attempt, offset=4))))
        await hub.publish(ask_subject(site.name), encode(Ask(id="q2", question=AskStatus())))
        await until(lambda: len(answers) == 2, "both are answered")
        said = {answer.id: answer.answer for answer in answers}
        chunk, status = said["q1"], said["q2"]
        assert isinstance(chunk, LogChunk) and (chunk.offset, chunk.text, chunk.ended) == (6, "完成\n", True)
        assert isinstance(status, SiteStatus) and status.site == site.name and status.islanded_since is None
        await until(lambda: samples, "a sample arrives")
        assert [device.id for device in decode_sample(samples[-1].body).devices] == [f"slot-{n}" for n in range(1, 5)]


async def test_an_agent_killed_and_started_again_loses_no_exit_code(operator_hub: RunningHub, pair: tuple[Site, Scheduler]) -> None:
    """BR-056."""
    site, scheduler = pair
    async with running_keeper(operator_hub, scheduler):
        site.start()
        place(site, scheduler, "sleep 2\nexit 7\n")
        await until(lambda: scheduler.of(Started), "it runs")
        await asyncio.to_thread(site.end, signal.SIGKILL)
        site.start()
        await until(lambda: scheduler.of(Ended), "the end is told")
        [end] = scheduler.of(Ended)
        assert (end.exit_code, len(scheduler.of(Started)), len(scheduler.of(Claimed))) == (7, 1, 1)
        assert end.ran_us >= 2_000_000


async def test_with_hub_and_bus_gone_the_site_works_on_and_tells_it_all_afterwards(short_folder: Path) -> None:
    """BR-054: the agent is restarted while nothing answers: it adopts what runs, serves its owner, and says so when the bus is back."""
    layout = await asyncio.to_thread(new_hub, short_folder / "hub")
    key = Key.new("U")
    store = MemoryStore("scheduler")
    scheduler = Scheduler(MemoryLaneTables(store), store, key)
    site: Site | None = None
    try:
        with running_hub_bus(layout) as bus:
            hub = RunningHub(layout, bus)
            (short_folder / "a").mkdir()
            site = await new_site(hub, SiteName("lab"), short_folder / "a", key)
            async with running_keeper(hub, scheduler):
                site.start()
                place(site, scheduler, "sleep 3\nexit 0\n")
                await until(lambda: scheduler.of(Started), "it runs")
        await asyncio.to_thread(site.end, signal.SIGKILL)
        site.start()
        await until(lambda: site is not None and (site.folder.root / "agent.sock").exists(), "the door is open")
        done = await asyncio.to_thread(retried, site, "submit", "--json", "--", "true")
        job = json.loads(done.stdout)["job"]
        assert (await asyncio.to_thread(site.local, "logs", "-f", job)).returncode == 0
        status = json.loads((await asyncio.to_thread(site.local, "status", "--json")).stdout)
        assert status["islanded_since"] is not None
        async with asyncio.timeout(60):
            while json.loads((await asyncio.to_thread(site.local, "status", "--json")).stdout)["lent_jobs"]:  # noqa: ASYNC110  asking is all
                await asyncio.sleep(0.1)
        with running_hub_bus(layout) as bus:
            async with running_keeper(RunningHub(layout, bus), scheduler):
                await until(lambda: scheduler.of(Ended), "the end is told")
        [end] = scheduler.of(Ended)
        assert (end.outcome, end.islanded) == ("succeeded", True)
        assert all(job.encode() not in encode(entry) for entry in scheduler.entries)
    finally:
        if site is not None and site.process is not None:
            await asyncio.to_thread(site.end, signal.SIGKILL)


async def test_a_second_agent_in_one_folder_is_refused(operator_hub: RunningHub, pair: tuple[Site, Scheduler]) -> None:
    site, _ = pair
    site.start()
    await until(lambda: (site.folder.root / "agent.sock").exists(), "the first one works")
    second = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "intertie.agent", "run", "--data", str(site.folder.root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 1 and "agent.running" in second.stderr
