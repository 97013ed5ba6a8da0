"""A site's agent as a process, a keeper that places what it is told to, and what they need of each other."""

from __future__ import annotations

import asyncio
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
from tests.edges.conftest import RunningHub
from tests.edges.lane_world import Service, kept
from tests.fakes.agents import GUEST, offer, pool
from tests.fakes.sites import settings

from intertie.agent.config import Folder, write_whole
from intertie.bus.nats import NatsBus
from intertie.clock import SystemClock
from intertie.contracts.base import decode, encode
from intertie.contracts.identity import Joined
from intertie.contracts.link import Claimed, Ended, EntryBase, Go, Instruction, Offer, OfferBody, SchedulerEntry, Started, Stop
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
    stopping: list[AttemptId]
    """Told to stop until their end is here."""
    entries: list[EntryBase]
    number: int

    def __init__(self, tables: MemoryLaneTables, store: MemoryStore, key: Key) -> None:
        super().__init__(tables, store)
        self.key, self.offers, self.entries, self.number = key, {}, [], 0
        self.stopping: list[AttemptId] = []
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
        ended = {entry.attempt for entry in self.of(Ended)}
        for attempt, body in self.offers.items():
            if attempt in self.stopping:
                if attempt not in ended:
                    told.append(
                        self._once(
                            f"stop {attempt}",
                            lambda f, b=body: Stop(**f, attempt=b.attempt, job=b.job, generation=b.generation, reason="replaced"),  # type: ignore[misc]
                        )
                    )
            elif attempt not in claimed:
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

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "intertie.agent", "run", "--data", str(self.folder.root)]

    def start(self, command: Sequence[str] = ()) -> None:
        env = {"PATH": os.environ["PATH"], "INTERTIE_BEAT_S": "0.1"}
        with self.logs.open("ab") as log:
            self.process = subprocess.Popen(command or self.command, env=env, stdout=log, stderr=log, cwd="/")

    def end(self, number: int) -> int:
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


@asynccontextmanager
async def a_pair(hub: RunningHub, folder: Path, name: str) -> AsyncIterator[tuple[Site, Scheduler]]:
    """A site that joined, and its keeper; what the agent leaves running is ended with it."""
    key = Key.new("U")
    store = MemoryStore("scheduler")
    scheduler = Scheduler(MemoryLaneTables(store), store, key)
    site = await new_site(hub, SiteName(f"lab-{name}"), folder, key)
    try:
        yield site, scheduler
    finally:
        if site.process is not None:
            await asyncio.to_thread(site.end, signal.SIGKILL)


def place(site: Site, scheduler: Scheduler, script: str, **more: object) -> OfferBody:
    body = offer(script=script, site=site.name, account=GUEST, **more)  # type: ignore[arg-type]
    scheduler.offers[body.attempt] = body
    return body


def retried(site: Site, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A socket left by the killed agent is there before the new one listens."""
    done = site.local(*arguments)
    for _ in range(40):
        if done.returncode != 5:
            break
        done = site.local(*arguments)
    assert done.returncode == 0, done.stderr
    return done
