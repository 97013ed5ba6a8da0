"""The link: how many syncs a second one scheduler process answers with a commit before each, beside raw nats-py request and reply of the same
bytes; and what an idle site costs in bytes.

A thousand agents in processes of their own ask, taking turns, the scheduler's lane on a real PostgreSQL (with its fsync), and an echo with
nothing behind it, a process too. What a rate costs each of the two in processor time is told beside it: other work on the machine moves that less.
"""

from __future__ import annotations

import os
import platform
import random
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil
from ops.lib.bench_hub import CLOCK
from ops.lib.bench_link_parts import Answers, Child, child
from ops.lib.bench_nats import Server
from ops.lib.bench_report import Benchmark, Beside, Machine, Measure, Report, measure, median

from intertie.contracts.base import encode
from intertie.contracts.link import Clocks, Lane, Synced, local_sync_subject
from intertie.embedded.postgres import RolePassword, running_postgres
from intertie.ids import JournalId, SessionId, SiteName
from intertie.link.journal import Batch, InstructionMark, first_digest
from intertie.link.site import Load, Send, SiteMachine, pace_of

AGENTS = 1_000
# Enough that those who ask are not what the rate is limited by, as far as two cores go.
ASKING_PROCESSES = 2
CONNECTIONS = 8
# Each agent's one.
IN_FLIGHT = AGENTS
# Some twenty attempts a day at each site, of five entries each, beside beats of thirty seconds.
ENTRY_EVERY = 50
ROUND_S = 4.0
WARM_S = 2.0
TARGET_RATIO, TARGET_IDLE_KB = 0.6, 30.0
IDLE_MINUTES = 240


# --- rates ------------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Go:
    """One kind of asking."""

    raw: bool
    entry_every: int = 0


RAW, IDLE, MIXED = Go(raw=True), Go(raw=False), Go(raw=False, entry_every=ENTRY_EVERY)


@dataclass
class Found:
    """Of each round, for one kind: answers a second, and processor time of the answering process for each, in µs."""

    rate: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)


async def rates(url: str, database: str, password: str, rounds: int) -> dict[Go, Found]:
    """All kinds of each round after each other, each round beginning with another."""
    each, waiting, connections = AGENTS // ASKING_PROCESSES, IN_FLIGHT // ASKING_PROCESSES, CONNECTIONS // ASKING_PROCESSES
    async with AsyncExitStack() as held:
        keeper = await held.enter_async_context(child("keep", url, database, password, AGENTS))
        echo = await held.enter_async_context(child("echo", url))
        asking = [
            await held.enter_async_context(child("agents", url, number * each, each, connections, waiting))
            for number in range(ASKING_PROCESSES)
        ]
        found = {kind: Found() for kind in (RAW, IDLE, MIXED)}
        for kind in found:
            await _go(asking, kind, WARM_S)
        order = list(found)
        for number in range(rounds):
            for kind in order[number % len(order) :] + order[: number % len(order)]:
                answering = echo if kind.raw else keeper
                before_s = _cpu_s(answering)
                answers = await _go(asking, kind, ROUND_S)
                total = sum(one.answers for one in answers)
                found[kind].rate.append(total / max(one.elapsed_s for one in answers))
                found[kind].cpu_us.append((_cpu_s(answering) - before_s) * 1e6 / total)
        return found


async def _go(asking: Sequence[Child], kind: Go, seconds: float) -> list[Answers]:
    for one in asking:
        await one.say(kind.raw, seconds, kind.entry_every)
    return [msgspec.json.decode(await one.heard(seconds + 30), type=Answers) for one in asking]


def _cpu_s(child: Child) -> float:
    """Processor time so far, the kernel's part for it included."""
    times = psutil.Process(child.pid).cpu_times()
    return float(times.user + times.system)


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
            found = await rates(server.url, postgres.url("scheduler"), password, rounds)
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
        measures=_measures(found, idle),
        notes=[
            f"{AGENTS} agents on {CONNECTIONS} connections in {ASKING_PROCESSES} processes, {IN_FLIGHT} tries under way; a commit before every "
            "answer, grouped. Hearing, instructions and settings are the scheduler's own.",
            "Idle bytes: both ways, NATS framing included, keep-alives of the connection not.",
        ],
    )


def _measures(found: dict[Go, Found], idle: dict[Lane, float]) -> list[Measure]:
    raw = found[RAW]
    beside = Beside(name="raw request/reply", value=median(raw.rate))
    measures = list[Measure]()
    for name, kind in (("idle syncs answered", IDLE), (f"syncs, 1 in {ENTRY_EVERY} with an entry", MIXED)):
        ours = found[kind]
        over = [mine / theirs for mine, theirs in zip(ours.rate, raw.rate, strict=True)]
        measures += [
            measure(name, median(ours.rate), "1/s", over=ours.rate, beside=beside),
            measure("  as a share of raw request/reply", median(over), "of raw", over=over, target=TARGET_RATIO, at_least=True),
            measure(
                "  processor time for each",
                median(ours.cpu_us),
                "µs",
                over=ours.cpu_us,
                beside=Beside(name="raw echo", value=median(raw.cpu_us)),
            ),
        ]
    measures.append(measure("idle site, all lanes", sum(idle.values()) / 1000, "kB/min", target=TARGET_IDLE_KB))
    return measures + [measure(f"  {lane} lane", value / 1000, "kB/min") for lane, value in idle.items()]


LINK = Benchmark(
    name="link",
    says="syncs a second of one scheduler with a commit before each answer, beside raw request/reply; bytes of an idle site",
    rounds=5,
    run=run,
)
