"""The agent as the process that it is, against a real nats-server in operator mode and a real keeper: connected, cut off, killed, restarted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from tests.edges.conftest import RunningHub, new_hub
from tests.edges.lane_world import Service, kept
from tests.fakes.agents import GUEST, offer, pool
from tests.fakes.sites import settings

from intertie.agent.config import Folder, write_whole
from intertie.bus.nats import NatsBus
from intertie.bus.port import Message
from intertie.clock import SystemClock
from intertie.contracts.base import decode, encode
from intertie.contracts.identity import Joined
from intertie.contracts.link import (
    Answer,
    Ask,
    AskLog,
    AskStatus,
    Claimed,
    Ended,
    EntryBase,
    Go,
    Instruction,
    LogChunk,
    Offer,
    OfferBody,
    SchedulerEntry,
    SiteStatus,
    Started,
    answer_subject,
    ask_subject,
    nudge_subject,
)
from intertie.contracts.telemetry import decode_sample, telemetry_subject
from intertie.embedded.hub import running_hub_bus
from intertie.ids import AttemptId, InstructionId, SiteName, TenantName, mint
from intertie.lane.keeper import Settings
from intertie.lane.memory import MemoryLaneTables
from intertie.lane.tables import LaneEntry
from intertie.link.journal import InstructionMark
from intertie.store import MemoryStore
from intertie.trust import nats_jwt
from intertie.trust.keys import Key
from intertie.trust.login import FileLogin
from intertie.trust.seal import seal

E = TypeVar("E", bound=EntryBase)
CLOCK = SystemClock()


class Scheduler(Service):
    """A keeper that places what it is told to: offers, and the go once the claim is on its disk."""

    key: Key
    offers: dict[AttemptId, OfferBody]
    entries: list[EntryBase]
    number: int

    def __init__(self, tables: MemoryLaneTables, store: MemoryStore, key: Key) -> None:
        super().__init__(tables, store)
        self.key, self.offers, self.entries, self.number = key, {}, [], 0
        self._said: dict[str, Instruction] = {}

    async def interpret(self, entry: LaneEntry) -> None:
        found: EntryBase = decode(entry.raw, SchedulerEntry)  # type: ignore[arg-type]  # a union
        async with self.store.transaction() as tx:
            await self.tables.mark_interpreted(tx, entry)
        self.entries.append(found)

    def of(self, kind: type[E]) -> list[E]:
        return [entry for entry in self.entries if isinstance(entry, kind)]

    def _once(self, name: str, make: Callable[[dict[str, object]], Instruction]) -> Instruction:
        if name not in self._said:
            self.number += 1
            self._said[name] = make({"id": InstructionId(mint("ins")), "number": self.number, "epoch": 1})
        return self._said[name]

    async def instructions(self, site: SiteName, mark: InstructionMark) -> Sequence[Instruction]:
        told: list[Instruction] = []
        claimed = {entry.attempt for entry in self.of(Claimed)}
        started = {entry.attempt for entry in self.of(Started)}
        for attempt, body in self.offers.items():
            if attempt not in claimed:
                sealed = seal(self.key, encode(body), "scheduler")
                told.append(self._once(f"offer {attempt}", lambda f, a=attempt, s=sealed: Offer(**f, attempt=a, sealed=s)))  # type: ignore[misc]
            elif attempt not in started:
                go = self._once(
                    f"go {attempt}",
                    lambda f, b=body: Go(**f, attempt=b.attempt, job=b.job, generation=b.generation),  # type: ignore[misc]
                )
                told.append(go)
        return told

    async def settings_for(self, site: SiteName, revision: int) -> Settings | None:
        if revision >= 1:
            return None
        revised = msgspec.structs.replace(settings("acme"), site=site)
        return Settings(revision=1, sealed=seal(self.key, encode(revised), "scheduler"))


@dataclass
class Site:
    """An agent's folder and its process."""

    name: SiteName
    folder: Folder
    process: subprocess.Popen[bytes] | None = None
    logs: Path = field(default_factory=Path)

    def start(self) -> None:
        env = {"PATH": os.environ["PATH"], "INTERTIE_BEAT_S": "0.1"}
        with self.logs.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "intertie.agent", "run", "--data", str(self.folder.root)], env=env, stdout=log, stderr=log, cwd="/"
            )

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(20)
        self.process = None
        return code

    def local(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "intertie.cli", "local", "--data", str(self.folder.root), *arguments]
        return subprocess.run(
            command, env={"PATH": os.environ["PATH"]}, cwd="/tmp", capture_output=True, text=True, timeout=60, check=False
        )


async def new_site(hub: RunningHub, name: SiteName, folder: Path, scheduler: Key) -> Site:
    """What join leaves behind, with the account pushed as identity does."""
    made = Folder(folder)
    await asyncio.to_thread(made.make)
    site_key, signing, account = Key.new("U"), Key.new("A"), Key.new("A")
    site_key.write(made.site_key)
    signing.write(made.signing_key)
    jwt = nats_jwt.site_account(hub.key("operator"), name, account.public, hub.key("hub").public, [signing.public], CLOCK.now())
    system = await hub.connect("system")
    try:
        await system.request("$SYS.REQ.CLAIMS.UPDATE", jwt.encode(), timeout=5)
    finally:
        await system.close()
    joined = Joined(
        site=name,
        account=account.public,
        bus_urls=[hub.layout.bus_url],
        gateway_url="http://127.0.0.1:9",
        service_keys={"scheduler": scheduler.public},
        owner_tenant=TenantName("acme"),
    )
    write_whole(made.site, joined)
    write_whole(made.pools, [pool(4).profile])
    return Site(name, made, logs=folder / "agent.log")


async def until(holds: Callable[[], object], what: str, limit_s: float = 30.0) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while not holds():
        assert loop.time() < deadline, f"never: {what}"
        await asyncio.sleep(0.05)


@asynccontextmanager
async def running_keeper(hub: RunningHub, service: Scheduler) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(hub.layout.bus_url, name="scheduler", credentials=FileLogin(hub.layout.creds_file("scheduler")))
    try:
        async with kept(bus, service, settings=service.settings_for):
            yield bus
    finally:
        await bus.close()


@pytest.fixture
async def pair(operator_hub: RunningHub, short_folder: Path, unique: str) -> AsyncIterator[tuple[Site, Scheduler]]:
    key = Key.new("U")
    store = MemoryStore("scheduler")
    scheduler = Scheduler(MemoryLaneTables(store), store, key)
    site = await new_site(operator_hub, SiteName(f"lab-{unique}"), short_folder, key)
    yield site, scheduler
    if site.process is not None:
        await asyncio.to_thread(site.end, signal.SIGKILL)


def place(site: Site, scheduler: Scheduler, script: str, **more: str) -> OfferBody:
    body = offer(script=script, site=site.name, account=GUEST, **more)  # type: ignore[arg-type]
    scheduler.offers[body.attempt] = body
    return body


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


def retried(site: Site, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A socket left by the killed agent is there before the new one listens."""
    done = site.local(*arguments)
    for _ in range(40):
        if done.returncode != 5:
            break
        done = site.local(*arguments)
    assert done.returncode == 0, done.stderr
    return done


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
