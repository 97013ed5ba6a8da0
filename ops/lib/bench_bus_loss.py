"""The bus goes: frozen for half a minute, killed, wiped. How soon a site notices, whether its own people feel it, how soon it is back, and how
fast a backlog is told.

The first part is a whole hub and one agent; the bus is stopped under them with SIGSTOP, with `kill -9`, and with its JetStream folder removed
while it runs. Beside its own figures stands bare nats-py with the same pings on the same server. The second part is one site's journal on
disk, full of entries, told over a real nats-server to a keeper on a real PostgreSQL.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import nats
from nats.aio.client import Client
from ops.lib.bench_bus import machine
from ops.lib.bench_hub import CLOCK, Rig, running, until
from ops.lib.bench_nats import Server
from ops.lib.bench_report import Benchmark, Beside, Measure, Report, measure, median

from intertie.agent.journal import SqliteJournal
from intertie.bus.nats import NatsBus
from intertie.bus.nats_session import PING_INTERVAL_S, PINGS_OUTSTANDING
from intertie.bus.subjects import INBOX
from intertie.cli.local_door import call
from intertie.contracts.http import SubmitBody
from intertie.contracts.job import JobRecord, JobSpec, JobState, SubmitReply
from intertie.contracts.link import EntryBase, Lane, SettingsApplied, sync_subject
from intertie.contracts.local import LocalJob, LocalStatus, LocalSubmit
from intertie.contracts.usage import Statement
from intertie.embedded.postgres import DATABASE, RolePassword, running_postgres
from intertie.embedded.process import read_record
from intertie.errors import Unavailable
from intertie.ids import JobId, SessionId, SiteName, mint
from intertie.lane.keeper import LaneKeeper
from intertie.lane.pg import PgLaneTables
from intertie.lane.site import SiteLane
from intertie.lane.tables import LaneEntry
from intertie.link.journal import NextSeq
from intertie.store import Database
from intertie.trust.login import FileLogin

SLOTS = 4
LOCAL_JOBS = 20
FROZEN_S = 30.0
LOOK_S = 0.005
LIMIT_S = 60.0

ENTRIES = 60_000
CHUNK = 2_000
REPLAYED = SiteName("site-a")
KEPT = "SELECT count(*), count(DISTINCT seq) FROM scheduler.lane_entry"

NOTICE_S, BACK_S, SLOWER, REPLAY = 2.5, 0.5, 1.1, 20_000


@dataclass
class Seen:
    """Seconds, of each round."""

    noticed: list[float] = field(default_factory=list)
    bare_noticed: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    gone: dict[str, list[float]] = field(default_factory=lambda: {"killed": [], "wiped": []})
    calm: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    replay: list[float] = field(default_factory=list)
    lost: int = 0
    doubled: int = 0


# --- a federation ------------------------------------------------------------------------------------------------------------------------


def status(rig: Rig) -> LocalStatus:
    return call(str(rig.site / "agent.sock"), "GET", "/v1/status", LocalStatus)


def islanded(rig: Rig) -> bool:
    return status(rig).islanded_since is not None


async def seconds_until(holds: Callable[[], bool], what: str) -> float:
    """Looked at every few milliseconds, in a thread."""

    def watch() -> float:
        began = CLOCK.monotonic_s()
        while not holds():
            if CLOCK.monotonic_s() - began > LIMIT_S:
                raise Unavailable("bench.slow", f"not within {LIMIT_S:.0f} s: {what}")
            PAUSE.wait(LOOK_S)
        return CLOCK.monotonic_s() - began

    return await asyncio.to_thread(watch)


class _Pause:
    """A sleep of a thread."""

    def wait(self, seconds: float) -> None:
        signal.sigtimedwait([], seconds)


PAUSE = _Pause()


async def local_starts(rig: Rig) -> list[float]:
    """Seconds from a local submit to its process, one after the other, by the records of the site itself."""

    def one() -> float:
        door = str(rig.site / "agent.sock")
        asked = LocalSubmit(name="true", script="#!/bin/sh\ntrue\n", cwd="/var/tmp", as_user=rig.account)
        job = call(door, "POST", "/v1/jobs", LocalJob, asked)
        while job.started is None:
            PAUSE.wait(LOOK_S)
            job = call(door, "GET", f"/v1/jobs/{job.job}", LocalJob)
        return (job.started - job.submitted).total_seconds()

    return [await asyncio.to_thread(one) for _ in range(LOCAL_JOBS)]


def bus_pid(rig: Rig) -> int:
    """0 while none is there."""
    record = read_record(rig.layout.run, "nats")
    return record.pid if record is not None else 0


def listens(rig: Rig) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", rig.layout.settings.ports.bus)) == 0


class Bare:
    """A nats-py client with our pings and no more, on the hub's server by a service's credentials: what the library alone would notice."""

    def __init__(self) -> None:
        self.lost_at: float | None = None
        self.client = Client()

    async def connect(self, rig: Rig) -> None:
        self.lost_at = None

        async def lost() -> None:
            self.lost_at = self.lost_at or CLOCK.monotonic_s()

        async def hush(_: Exception) -> None:
            return None

        login = FileLogin(rig.layout.creds_file("incident"))
        self.client = await nats.connect(
            rig.layout.bus_url,
            user_jwt_cb=login.jwt,
            signature_cb=login.signature,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=PINGS_OUTSTANDING,
            disconnected_cb=lost,
            error_cb=hush,
            inbox_prefix=INBOX.rstrip("."),
        )


async def frozen(rig: Rig, seen: Seen) -> None:
    """Nothing answers and nothing is closed: only pings tell."""
    seen.calm += await local_starts(rig)
    bare = Bare()
    await bare.connect(rig)
    pid, began = bus_pid(rig), CLOCK.monotonic_s()
    os.kill(pid, signal.SIGSTOP)
    try:
        seen.noticed.append(await seconds_until(lambda: islanded(rig), "the site knows that it is alone"))
        seen.alone += await local_starts(rig)
        await asyncio.sleep(max(0.0, FROZEN_S - (CLOCK.monotonic_s() - began)))
        seen.bare_noticed.append((bare.lost_at or began + FROZEN_S) - began)
    finally:
        os.kill(pid, signal.SIGCONT)
    seen.back.append(await seconds_until(lambda: not islanded(rig), "the site hears the hub again"))
    await bare.client.close()


async def struck(rig: Rig, seen: Seen, how: str) -> None:
    """`kill -9`; its supervisor starts another. Before, for `wiped`, everything that JetStream had is removed under it."""
    if how == "wiped":
        await asyncio.to_thread(shutil.rmtree, rig.layout.nats / "jetstream", ignore_errors=True)
    pid = bus_pid(rig)
    os.kill(pid, signal.SIGKILL)
    await seconds_until(lambda: bus_pid(rig) not in (0, pid) and listens(rig), "the bus was started again")
    seen.gone[how].append(await seconds_until(lambda: not islanded(rig), "the site hears the hub again"))


async def submit(rig: Rig) -> JobId:
    body = SubmitBody(spec=JobSpec(name="sleep", script="#!/bin/sh\nsleep 1\n", wall_s=60))
    reply = await rig.call("POST", "/v1/jobs", SubmitReply, body, headers={"Idempotency-Key": mint("key")})
    assert reply.job is not None, "a job that was taken in has a record"
    return reply.job.job


async def all_paid_once(rig: Rig, jobs: Sequence[JobId], seen: Seen) -> None:
    """Every job of the round succeeded, by one run, and its line has that run's seconds."""
    records = list[JobRecord]()

    async def over() -> bool:
        records[:] = [await rig.call("GET", f"/v1/jobs/{job}", JobRecord) for job in jobs]
        return all(record.state is JobState.SUCCEEDED for record in records)

    async def charged() -> bool:
        told = await rig.call("GET", "/v1/statements", Statement)
        books = {line.job: line.attempts for line in told.lines}
        return all(job in books and all(book.complete for book in books[job]) for job in jobs)

    await until(over, "every job has ended", LIMIT_S)
    await until(charged, "every job is charged", LIMIT_S)
    told = await rig.call("GET", "/v1/statements", Statement)
    books = {book.attempt: book for line in told.lines for book in line.attempts}
    for record in records:
        ran = [attempt for attempt in record.attempts if attempt.started_at is not None]
        seen.doubled += len(ran) - 1
        seen.lost += sum(attempt.attempt not in books or books[attempt.attempt].run_us != attempt.ran_us for attempt in ran)


async def federation(rounds: int, seen: Seen) -> None:
    async with running(SLOTS) as rig:
        for _ in range(rounds):
            jobs = [await submit(rig)]
            await frozen(rig, seen)
            for how in seen.gone:
                jobs.append(await submit(rig))
                await struck(rig, seen, how)
            await all_paid_once(rig, jobs, seen)


# --- a backlog -----------------------------------------------------------------------------------------------------------------------------


async def fill(journal: SqliteJournal) -> None:
    """Entries as an absence leaves them: on disk, none acknowledged."""

    def build(after: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
        first = after[Lane.SCHEDULER]
        return {Lane.SCHEDULER: [SettingsApplied(seq=first + n, at=CLOCK.now(), islanded=True, revision=n + 1) for n in range(CHUNK)]}

    for _ in range(ENTRIES // CHUNK):
        await journal.append(build)


async def replay(server: Server, db: Database, file: Path, seen: Seen) -> None:
    """From the journal's disk to the keeper's, acknowledged; interpreting goes on beside it, as it does in a service."""
    tables, subject = PgLaneTables(db), sync_subject(REPLAYED, Lane.SCHEDULER)

    async def interpret(entry: LaneEntry) -> None:
        async with db.transaction() as tx:
            await tables.mark_interpreted(tx, entry)

    journal = await SqliteJournal.open(file)
    hub, site = await NatsBus.connect(server.url, name="scheduler"), await NatsBus.connect(server.url, name="agent")
    keeper = LaneKeeper(hub, Lane.SCHEDULER, tables, CLOCK, interpret=interpret)
    lane = SiteLane(_Here(site, subject), Lane.SCHEDULER, journal, CLOCK, site=REPLAYED, session=SessionId(mint("ses")), spread=lambda: 0.0)
    try:
        await fill(journal)
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(keeper.run())
            await keeper.listening.wait()
            began = CLOCK.monotonic_s()
            telling = group.create_task(lane.run())
            while (await journal.marks(Lane.SCHEDULER))[0] < ENTRIES:  # noqa: ASYNC110  # a disk rings no bell
                await asyncio.sleep(LOOK_S)
            seen.replay.append(ENTRIES / (CLOCK.monotonic_s() - began))
            telling.cancel()
            keeping.cancel()
    finally:
        await site.close()
        await hub.close()
        await journal.close()


class _Here(NatsBus):
    """A site's bus without accounts: what it says goes to the subject that the server would have made of it."""

    def __init__(self, bus: NatsBus, subject: str) -> None:
        self._bus, self._to = bus, subject

    async def request(self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None):  # type: ignore[no-untyped-def]
        return await self._bus.request(self._to, body, timeout_s=timeout_s, headers=headers)

    def on_state(self, listener: Callable[[bool], None]) -> None:
        self._bus.on_state(listener)


async def backlog(rounds: int, seen: Seen) -> None:
    folder = Path(tempfile.mkdtemp(prefix="it-bench-", dir="/var/tmp"))
    folder.chmod(0o711)  # noqa: ASYNC240  # one call
    server = Server()
    await asyncio.to_thread(server.start)
    try:
        for number in range(rounds):
            with running_postgres(folder / f"pg-{number}") as postgres:
                role = RolePassword("scheduler", mint("pw"))
                await asyncio.to_thread(postgres.provision, [role])
                db = await Database.open(postgres.url("scheduler"), password=role.password, schema="scheduler", connections=8)
                try:
                    await db.migrate("intertie.store")
                    await replay(server, db, folder / f"journal-{number}.db", seen)
                    text = await asyncio.to_thread(partial(postgres.query, KEPT, database=DATABASE))
                    count, distinct = (int(part) for part in text.strip().split("|"))
                    seen.lost, seen.doubled = seen.lost + ENTRIES - distinct, seen.doubled + count - distinct
                finally:
                    await db.close()
    finally:
        await asyncio.to_thread(server.remove)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


# --- the report ----------------------------------------------------------------------------------------------------------------------------


def measures_of(seen: Seen) -> list[Measure]:
    calm, alone = median(seen.calm), median(seen.alone)
    bare = Beside(name="nats-py with our pings", value=median(seen.bare_noticed))
    return [
        measure("frozen: the site knows", median(seen.noticed), "s", over=seen.noticed, beside=bare, target=NOTICE_S),
        measure("frozen: back after it goes on", median(seen.back), "s", over=seen.back, target=BACK_S),
        measure("killed: back after it listens again", median(seen.gone["killed"]), "s", over=seen.gone["killed"], target=BACK_S),
        measure("wiped: back after it listens again", median(seen.gone["wiped"]), "s", over=seen.gone["wiped"], target=BACK_S),
        measure("local submit → process, bus there", calm * 1000, "ms", over=[v * 1000 for v in seen.calm]),
        measure("local submit → process, bus frozen", alone * 1000, "ms", over=[v * 1000 for v in seen.alone]),
        measure("  times as long", alone / calm, "×", target=SLOWER),
        measure("backlog told and on disk", median(seen.replay), "entries/s", over=seen.replay, target=REPLAY, at_least=True),
        measure("lost: runs without their seconds, entries not there", seen.lost, "", target=0),
        measure("doubled: second runs, entries twice", seen.doubled, "", target=0),
    ]


async def run(rounds: int) -> Report:
    """A minute for each round."""
    at, load, seen = CLOCK.now(), os.getloadavg()[0], Seen()
    await backlog(rounds, seen)
    await federation(rounds, seen)
    return Report(
        benchmark="bus-loss",
        at=at.isoformat(timespec="seconds"),
        rounds=rounds,
        machine=machine(load),
        measures=measures_of(seen),
        notes=[
            f"frozen for {FROZEN_S:.0f} s; {LOCAL_JOBS} local jobs a round before and while; client pings {PING_INTERVAL_S} s × {PINGS_OUTSTANDING}.",
            f"backlog: {ENTRIES} entries in a journal on disk, to a keeper that commits before each answer and interprets beside it.",
        ],
    )


BUS_LOSS = Benchmark("bus-loss", "the bus frozen, killed and wiped under a whole federation; a backlog told", 3, run)
