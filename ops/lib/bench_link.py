"""The link: how many syncs a second one keeper answers with a commit before each, beside raw nats-py request and reply of the same bytes; and
what an idle site costs in bytes.

One process keeps the scheduler's lane on a real PostgreSQL (with its fsync) and, taking turns, answers the same requests with nothing behind them.
This process is a thousand agents on a few connections. Instructions and settings come from memory here: what a service does for its part of an
answer is its own matter.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import nats
import psutil
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg
from ops.lib.bench_hub import CLOCK
from ops.lib.bench_nats import Server
from ops.lib.bench_report import Benchmark, Beside, Machine, Measure, Report, measure, median

from intertie.bus.nats import NatsBus
from intertie.contracts.base import encode
from intertie.contracts.link import Clocks, Instruction, Lane, LaneState, Sync, Synced, local_sync_subject, sync_subject
from intertie.embedded.postgres import RolePassword, running_postgres
from intertie.ids import JournalId, SessionId, SiteName
from intertie.lane.keeper import LaneKeeper
from intertie.lane.pg import PgLaneTables
from intertie.lane.tables import LaneEntry
from intertie.link.journal import Batch, InstructionMark, first_digest
from intertie.link.site import Load, Send, SiteMachine, pace_of
from intertie.observe import log
from intertie.store import Database

AGENTS = 1_000
CONNECTIONS = 8
# As many wait for their answers as a keeper's workers take.
IN_FLIGHT = 256
ROUND_S = 4.0
WARM_S = 2.0
ECHO = "bench.link.echo"
TARGET_RATIO, TARGET_IDLE_KB = 0.6, 30.0
IDLE_MINUTES = 240


# --- the keeper's process ---------------------------------------------------------------------------------------------------------------------


async def keep(url: str, database: str, password: str) -> None:
    """Both answerers, until standard input ends."""
    log.setup("bench", "ERROR")
    db = await Database.open(database, password=password, schema="scheduler")
    await db.migrate("intertie.store")
    bus, raw = await NatsBus.connect(url, name="keeper"), await nats.connect(url)

    async def interpret(_: LaneEntry) -> None:
        raise AssertionError("these agents have nothing to say")

    async def instructions(_site: SiteName, _mark: InstructionMark) -> Sequence[Instruction]:
        return ()

    async def echo(msg: Msg) -> None:
        await msg.respond(answer)

    answer = encode(Synced(nonce=1_000, ack_through=0, safe_through=0, epoch=1, clock=CLOCK.now()))
    keeper = LaneKeeper(bus, Lane.SCHEDULER, PgLaneTables(db), CLOCK, interpret=interpret, instructions=instructions, lease_s=60)
    await raw.subscribe(ECHO, cb=echo)
    await raw.flush()
    keeping = asyncio.create_task(keeper.run())
    await keeper.listening.wait()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await raw.close()
    await bus.close()
    await db.close()


@asynccontextmanager
async def kept(url: str, database: str, password: str) -> AsyncIterator[None]:
    """A keeper in a process of its own."""
    code = (
        "import asyncio, json, sys, uvloop; from ops.lib import bench_link; uvloop.run(bench_link.keep(*json.loads(sys.stdin.readline())))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps([url, database, password]).encode() + b"\n")  # Not on a command line: it holds a password.
        await process.stdin.drain()
        if b"ready" not in await asyncio.wait_for(process.stdout.readline(), 30):
            raise RuntimeError("the keeper's process did not come up")
        yield
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 10)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# --- a thousand agents ------------------------------------------------------------------------------------------------------------------------


class Agent:
    """An idle site: its sync, with another nonce each time. Encoded once, so that the rate is the keeper's and not this process' own."""

    def __init__(self, number: int) -> None:
        self.nonce = 1_000
        name = SiteName(f"site-{number:04}")
        self.subject = sync_subject(name, Lane.SCHEDULER)
        journal = JournalId(f"jnl-{number:032}")
        sync = Sync(
            site=name,
            session=SessionId(f"ses-{number:026}"),
            place="0" * 32,
            lane=Lane.SCHEDULER,
            nonce=999_999_999,
            taken_nonce=0,
            journal=journal,
            first_seq=1,
            digest_before=first_digest(journal),
            entries=[],
            at_head=True,
            running=[],
            clocks=Clocks(utc=CLOCK.now(), boot_s=1.0, kernel_boot="0" * 36, offset_s=0.0, error_s=0.001),
        )
        self.before, self.after = encode(sync).split(b"999999999")

    def body(self) -> bytes:
        self.nonce += 1
        return self.before + str(self.nonce).encode() + self.after


async def rate(clients: Sequence[Client], agents: Sequence[Agent], seconds: float, *, raw: bool) -> float:
    """Answers a second. Each agent has one try under way at most; a keeper's answers must all be good ones."""
    done, ends = 0, CLOCK.monotonic_s() + seconds

    async def some(mine: Sequence[Agent], client: Client) -> None:
        nonlocal done
        while True:
            for agent in mine:
                reply = await client.request(ECHO if raw else agent.subject, agent.body(), timeout=10)
                if CLOCK.monotonic_s() >= ends:
                    return
                if not raw and b'"state"' in reply.data and msgspec.json.decode(reply.data, type=Synced).state is not LaneState.OK:
                    raise RuntimeError(f"the keeper answers {reply.data!r}")
                done += 1

    began = CLOCK.monotonic_s()
    await asyncio.gather(*(some(agents[n::IN_FLIGHT], clients[n % len(clients)]) for n in range(IN_FLIGHT)))
    return done / (CLOCK.monotonic_s() - began)


async def rates(url: str, rounds: int) -> tuple[list[float], list[float]]:
    """(keeper's, raw) of each round, taking turns at being first."""
    clients = [await nats.connect(url) for _ in range(CONNECTIONS)]
    agents = [Agent(n) for n in range(AGENTS)]
    try:
        for raw in (True, False):
            await rate(clients, agents, WARM_S, raw=raw)
        found: dict[bool, list[float]] = {False: [], True: []}
        for number in range(rounds):
            for raw in (True, False)[:: 1 if number % 2 else -1]:
                found[raw].append(await rate(clients, agents, ROUND_S, raw=raw))
        return found[False], found[True]
    finally:
        for client in clients:
            await client.close()


# --- an idle site -----------------------------------------------------------------------------------------------------------------------------


def idle_bytes_a_minute(minutes: int = IDLE_MINUTES) -> dict[Lane, float]:
    """What crosses a site's connection while nothing happens, both ways with NATS' own framing, at the real paces: the machine on a virtual clock."""
    return {lane: _idle_lane(lane, random.Random(lane.value), minutes * 60.0) / minutes for lane in Lane}  # noqa: S311  # spread, no secret


def _idle_lane(lane: Lane, rng: random.Random, until_s: float) -> int:
    journal = JournalId(f"jnl-{'0' * 32}")
    machine = SiteMachine(
        site=SiteName("site-of-some-length"),
        session=SessionId(f"ses-{'0' * 26}"),
        lane=lane,
        journal=journal,
        marks=(0, 0),
        now_s=0.0,
        pace=pace_of(lane),
        spread=rng.random,
        place="0" * 32,
    )
    now_s, total = 0.0, 0
    while (now_s := max(now_s, machine.due_at)) < until_s:
        for effect in machine.tick(now_s):
            assert isinstance(effect, Load)
            batch = Batch(100_001, first_digest(journal), [], True)
            utc = datetime.fromtimestamp(1_800_000_000 + now_s, UTC)
            clocks = Clocks(utc=utc, boot_s=1_000_000.123456 + now_s, kernel_boot="0" * 36, offset_s=0.000123, error_s=0.000456)
            mark = InstructionMark(1, 10_000) if lane is Lane.SCHEDULER else InstructionMark(0, 0)
            [send] = machine.loaded(now_s, batch, running=[], mark=mark, settings_revision=7, clocks=clocks)
            assert isinstance(send, Send)
            answer = Synced(
                v=2,
                nonce=send.sync.nonce,
                ack_through=100_000,
                safe_through=100_000,
                lease_s=1_800,
                epoch=1,
                settings_revision=7,
                clock=utc,
            )
            total += _framed(f"PUB {local_sync_subject(lane)} _INBOX.{'x' * 22}.{'x' * 22}", encode(send.sync))
            total += _framed(f"MSG _INBOX.{'x' * 22}.{'x' * 22} 1", encode(answer))
            machine.answered(now_s, answer)
    return total


def _framed(line: str, body: bytes) -> int:
    return len(line) + 1 + len(str(len(body))) + 2 + len(body) + 2


# --- the report -------------------------------------------------------------------------------------------------------------------------------


def new_folder() -> Path:
    """One that the database's account may enter."""
    folder = Path(tempfile.mkdtemp(prefix="it-bench-link-"))
    folder.chmod(0o711)
    return folder


async def run(rounds: int) -> Report:
    before, folder = os.getloadavg()[0], new_folder()
    server, password = Server(), secrets.token_urlsafe(24)
    try:
        server.start()
        with running_postgres(folder) as postgres:
            postgres.provision([RolePassword("scheduler", password)])
            async with kept(server.url, postgres.url("scheduler"), password):
                ours, raw = await asyncio.to_thread(uvloop.run, rates(server.url, rounds))
    finally:
        server.remove()
        shutil.rmtree(folder, ignore_errors=True)
    idle = idle_bytes_a_minute()
    machine = Machine(
        cores=os.cpu_count() or 1,
        memory_mib=psutil.virtual_memory().total >> 20,
        kernel=platform.release(),
        python=platform.python_version(),
        load_before=before,
        load_after=os.getloadavg()[0],
    )
    return Report(
        benchmark="link",
        at=CLOCK.now().isoformat(timespec="seconds"),
        rounds=rounds,
        machine=machine,
        measures=_measures(ours, raw, idle),
        notes=[
            f"{AGENTS} agents on {CONNECTIONS} connections, {IN_FLIGHT} tries under way; a commit before every answer, grouped.",
            "Idle bytes: both ways, NATS framing included, keep-alives of the connection not.",
        ],
    )


def _measures(ours: list[float], raw: list[float], idle: dict[Lane, float]) -> list[Measure]:
    share = median([mine / theirs for mine, theirs in zip(ours, raw, strict=True)])
    over = [mine / theirs for mine, theirs in zip(ours, raw, strict=True)]
    found = [
        measure("syncs answered", median(ours), "1/s", over=ours, beside=Beside(name="raw request/reply", value=median(raw))),
        measure("  as a share of raw request/reply", share, "of raw", over=over, target=TARGET_RATIO, at_least=True),
        measure("idle site, all lanes", sum(idle.values()) / 1000, "kB/min", target=TARGET_IDLE_KB),
    ]
    return found + [measure(f"  {lane} lane", value / 1000, "kB/min") for lane, value in idle.items()]


LINK = Benchmark(
    name="link",
    says="syncs a second of one keeper with a commit before each answer, beside raw request/reply; bytes of an idle site",
    rounds=5,
    run=run,
)
