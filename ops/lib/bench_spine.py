"""The spine: one job's way through a whole hub and an agent, many jobs at once, and what all of it takes while nothing happens.

Each round measures the hub and, right beside it, `fork+exec` of the same script as the same account. Times are read from the job's story:
`recorded_at` is when the scheduler had it on disk. Client, hub and site share this machine's clock.
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psutil
from ops.lib import bench_proc
from ops.lib.bench_hub import CLOCK, Rig, running, until
from ops.lib.bench_report import Benchmark, Beside, Machine, Measure, ProcessRow, Report, measure, median, percentile

from intertie.contracts.http import SubmitBody
from intertie.contracts.job import JobRecord, JobSpec, JobsReply, JobState, Story, SubmitReply
from intertie.contracts.usage import Statement
from intertie.errors import Unavailable
from intertie.ids import JobId, mint
from intertie.lifecycle import JOB_TERMINAL

SCRIPT = "#!/bin/sh\ntrue\n"
SLOTS = 4
# Alone, one after the other: with five rounds a hundred, so that a 99th percentile is one that was seen.
ALONE = 20
# At once: some seconds of work for two cores.
FLOW = 60
IN_FLIGHT = 16
JOB_S, FLOW_S = 30.0, 180.0
# Nothing asked: idle beats have backed off by then.
SETTLE_S, REST_S = 12.0, 20.0

TARGET_P50_MS, TARGET_P99_MS = 150.0, 500.0
TARGET_AGENT_MIB, TARGET_ALL_MIB = 80.0, 700.0
TARGET_CPU_PERCENT = 5.0


@dataclass
class Round:
    """What one round saw; seconds."""

    accepted: list[float] = field(default_factory=list)
    placed: list[float] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    fork_exec: list[float] = field(default_factory=list)
    fork_end: list[float] = field(default_factory=list)
    flow_s: float = 0.0
    charged_s: float = 0.0
    pool_s: float = 0.0


class Peer:
    """`fork+exec` of the same script by this process, as the account that jobs become."""

    def __init__(self, account: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="it-bench-", dir="/var/tmp"))
        self.folder.chmod(0o711)
        self.script = self.folder / "script"
        self.script.write_text(SCRIPT, encoding="ascii")
        self.script.chmod(0o500)
        self.account = account
        if account:
            shutil.chown(self.script, account)

    def once(self) -> tuple[float, float]:
        """Seconds until exec has succeeded, and until it has ended."""
        began = CLOCK.monotonic_s()
        who = self.account or None
        child = subprocess.Popen(
            [self.script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env={},
            user=who,
            extra_groups=[] if who else None,
        )
        execed = CLOCK.monotonic_s() - began
        child.wait()
        return execed, CLOCK.monotonic_s() - began

    def pool(self, count: int, slots: int) -> float:
        """Seconds for so many, `slots` at once."""
        began = CLOCK.monotonic_s()
        with ThreadPoolExecutor(slots) as threads:
            list(threads.map(lambda _: self.once(), range(count)))
        return CLOCK.monotonic_s() - began

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


async def run(rounds: int) -> Report:
    """All of it, some four minutes for five rounds."""
    at, load = CLOCK.now(), os.getloadavg()[0]
    seen = list[Round]()
    async with running(SLOTS) as rig:
        peer = Peer(rig.account)
        try:
            await _alone(rig, peer, Round(), 3)  # Warm: the first connections and statements are made once.
            for _ in range(rounds):
                one = Round()
                await _alone(rig, peer, one, ALONE)
                await _flow(rig, one)
                one.pool_s = await asyncio.to_thread(peer.pool, FLOW, SLOTS)
                seen.append(one)
        finally:
            peer.close()
        await asyncio.sleep(SETTLE_S)
        rest = await _rest(rig)
    machine = Machine(
        cores=os.cpu_count() or 0,
        memory_mib=psutil.virtual_memory().total // 2**20,
        kernel=platform.release(),
        python=platform.python_version(),
        load_before=load,
        load_after=os.getloadavg()[0],
    )
    return Report(
        benchmark="spine",
        at=at.isoformat(timespec="seconds"),
        rounds=rounds,
        machine=machine,
        measures=[*_latency(seen), *_throughput(seen), *_resting(rest)],
        processes=rest,
        notes=[
            f"alone: {ALONE} jobs a round, one after the other; at once: {FLOW} jobs a round, {IN_FLIGHT} submits in flight, {SLOTS} slots.",
            "beside: the same script by fork+exec as the same account, nothing recorded. Extremes are of the rounds' own medians.",
            "at rest: after all rounds; PSS counts the supervisor, PostgreSQL and nats-server too. Other Pythons here lower it a little.",
        ],
    )


# --- rounds --------------------------------------------------------------------------------------------------------------------------------


async def _submit(rig: Rig) -> JobId:
    body = SubmitBody(spec=JobSpec(name="true", script=SCRIPT, wall_s=60))
    reply = await rig.call("POST", "/v1/jobs", SubmitReply, body, headers={"Idempotency-Key": mint("key")})
    if reply.job is None:
        raise Unavailable("bench.submit", "the hub took a job and gave no record of it")
    return reply.job.job


async def _alone(rig: Rig, peer: Peer, one: Round, count: int) -> None:
    """One job after the other, each at an arbitrary moment of the beats, with its peer right after it."""
    for _ in range(count):
        await asyncio.sleep(random.uniform(0.2, 0.6))
        at, began = CLOCK.now(), CLOCK.monotonic_s()
        job = await _submit(rig)
        one.accepted.append(CLOCK.monotonic_s() - began)

        async def over(job: JobId = job) -> bool:
            return (await rig.call("GET", f"/v1/jobs/{job}", JobRecord)).state in JOB_TERMINAL

        await asyncio.sleep(0.1)
        await until(over, "a job that runs `true` ends", JOB_S)
        story = await rig.call("GET", f"/v1/jobs/{job}/story", Story)
        _read(one, story, at)
        execed, ended = await asyncio.to_thread(peer.once)
        one.fork_exec.append(execed)
        one.fork_end.append(ended)


def _read(one: Round, story: Story, at: datetime) -> None:
    """Seconds from the submit to each step of the story."""
    if story.job.state is not JobState.SUCCEEDED:
        raise Unavailable("bench.job", f"a job that runs `true` ended {story.job.state}: {story.job.attempts[-1:] or 'without an attempt'}")
    recorded = {line.state: line.recorded_at for line in reversed(story.lines) if line.state is not None}
    began = story.job.attempts[-1].started_at
    if began is not None:
        one.started.append((began - at).total_seconds())
    for state, into in ((JobState.PLACED, one.placed), (JobState.RUNNING, one.running), (JobState.SUCCEEDED, one.ended)):
        if state in recorded:
            into.append((recorded[state] - at).total_seconds())


async def _flow(rig: Rig, one: Round) -> None:
    """Many at once: until the hub's record has the end of each, then until each has its charge."""
    gate, jobs = asyncio.Semaphore(IN_FLIGHT), list[JobId]()

    async def submit() -> None:
        async with gate:
            jobs.append(await _submit(rig))

    began = CLOCK.monotonic_s()
    await asyncio.gather(*(submit() for _ in range(FLOW)))
    last, wanted = max(jobs), set(jobs)

    async def over() -> bool:
        if (await rig.call("GET", f"/v1/jobs/{last}", JobRecord)).state not in JOB_TERMINAL:
            return False
        listed = await rig.call("GET", f"/v1/jobs?limit={FLOW}", JobsReply)
        return {record.job for record in listed.jobs if record.state in JOB_TERMINAL} >= wanted

    async def charged() -> bool:
        told = await rig.call("GET", "/v1/statements", Statement)
        done = {line.job for line in told.lines if line.attempts and all(book.complete for book in line.attempts)}
        return done >= wanted

    await until(over, f"{FLOW} jobs have ended", FLOW_S)
    one.flow_s = CLOCK.monotonic_s() - began
    await until(charged, f"{FLOW} jobs are charged", FLOW_S, 0.25)
    one.charged_s = CLOCK.monotonic_s() - began


async def _rest(rig: Rig) -> list[ProcessRow]:
    """Every process of hub and agent over REST_S of nobody asking for anything."""
    roots = {"hub": rig.hub.pid, "agent": rig.agent.pid}
    before = bench_proc.processes()
    began = CLOCK.monotonic_s()
    await asyncio.sleep(REST_S)
    lasted, after = CLOCK.monotonic_s() - began, bench_proc.processes()
    rows = list[ProcessRow]()
    for part, root in roots.items():
        tree = bench_proc.below(root, after)
        used = bench_proc.cpu_between(bench_proc.below(root, before), tree)
        for stat in tree:
            if (took := bench_proc.memory(stat.pid)) is not None:
                name = bench_proc.part_name(stat.pid, stat)
                percent = 100 * used[stat.pid] / lasted
                rows.append(
                    ProcessRow(part=part, pid=stat.pid, name=name, pss_mib=took.pss_mib, private_mib=took.private_mib, cpu_percent=percent)
                )
    return rows


# --- what it comes to ------------------------------------------------------------------------------------------------------------------------


def _latency(seen: list[Round]) -> list[Measure]:
    def ms(name: str) -> tuple[list[float], list[float]]:
        """All values, and each round's median."""
        rounds = [[1000 * value for value in getattr(one, name)] for one in seen]
        return [value for some in rounds for value in some], [median(some) for some in rounds]

    running, by_round = ms("running")
    execed = Beside(name="fork+exec", value=median(ms("fork_exec")[0]))
    execed_99 = Beside(name="fork+exec", value=percentile(ms("fork_exec")[0], 99))
    found = [
        measure("submit → running, p50", median(running), "ms", over=by_round, beside=execed, target=TARGET_P50_MS),
        measure("submit → running, p99", percentile(running, 99), "ms", beside=execed_99, target=TARGET_P99_MS),
    ]
    for name, words in (("accepted", "accepted"), ("placed", "placed"), ("started", "exec at the site")):
        values, by_round = ms(name)
        found.append(measure(f"  submit → {words}, p50", median(values), "ms", over=by_round))
    ended, by_round = ms("ended")
    beside = Beside(name="fork+exec+wait", value=median(ms("fork_end")[0]))
    found.append(measure("submit → ended and recorded, p50", median(ended), "ms", over=by_round, beside=beside))
    found.append(measure("submit → ended and recorded, p99", percentile(ended, 99), "ms"))
    return found


def _throughput(seen: list[Round]) -> list[Measure]:
    flow, pool, charged = ([FLOW / getattr(one, name) for one in seen] for name in ("flow_s", "pool_s", "charged_s"))
    beside = Beside(name="fork+exec pool", value=median(pool))
    return [
        measure("jobs ended and recorded", median(flow), "jobs/s", over=flow, beside=beside),
        measure("jobs charged", median(charged), "jobs/s", over=charged, beside=beside),
    ]


def _resting(rest: list[ProcessRow]) -> list[Measure]:
    agent = sum(row.pss_mib for row in rest if row.part == "agent")
    return [
        measure("memory at rest, agent (PSS)", agent, "MiB", target=TARGET_AGENT_MIB),
        measure("memory at rest, everything (PSS)", sum(row.pss_mib for row in rest), "MiB", target=TARGET_ALL_MIB),
        measure("processor at rest, everything", sum(row.cpu_percent for row in rest), "% of a core", target=TARGET_CPU_PERCENT),
    ]


SPINE = Benchmark(
    name="spine",
    says="one job alone, many at once, and rest: a whole hub and one agent, beside fork+exec of the same job",
    rounds=5,
    run=run,
)
