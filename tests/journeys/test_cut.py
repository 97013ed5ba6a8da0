"""Hub and sites on machines of their own, and the wire between them broken in each way that wires break.

`INTERTIE_TEST_CUT_S` is how long the hub's machine is cut off (60 s by default; 600 is the case as it is told).
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections import Counter
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.journeys.far_stack import FarStack, far_stack
from tests.journeys.wires import Netns, Proxies, namespaces_work

from intertie.contracts.base import encode
from intertie.contracts.job import JobRecord, JobSpec, JobState
from intertie.contracts.site import Lendable, PoolProfile, TaskType
from intertie.contracts.usage import Statement
from intertie.ids import JobId, PoolName

CUT_S = float(os.environ.get("INTERTIE_TEST_CUT_S", "60"))
SITES = ("site-a", "site-b")
LENT, OWN = 25, 1
RUNNING, WAITING = 50, 20
SECOND_US = 1_000_000


def profile(folder: Path) -> Path:
    """A pool that lends all but one of its slots: the owner's people have room whatever the federation does."""
    pool = PoolProfile(
        pool=PoolName("cpu"),
        accelerator="none",
        count=LENT + OWN,
        memory_mib=4_096,
        interconnect="none",
        task_types=[TaskType.BATCH],
        lendable=Lendable(devices=LENT),
    )
    file = folder / "pools.json"
    file.write_bytes(encode([pool]))
    return file


def script(witness: Path, number: int, seconds: float) -> str:
    """What the process itself has to say: one line when it begins, one when it ends."""
    own = witness / f"job-{number}"
    return f"#!/bin/sh\ndate +%s.%N >> {own}\nsleep {seconds}\ndate +%s.%N >> {own}\n"


def own_record(witness: Path, name: str) -> tuple[int, float]:
    """How often it began, and how long it ran by its own clock."""
    lines = [float(line) for line in (witness / name).read_text(encoding="ascii").splitlines()]
    return (len(lines) + 1) // 2, lines[-1] - lines[0]


def agents_record(folder: Path) -> dict[str, int]:
    """Attempt → microseconds, as the agent's own disk has it."""
    journal = sqlite3.connect(f"file:{folder / 'journal.db'}?mode=ro", uri=True)
    try:
        rows = [json.loads(body) for (body,) in journal.execute("SELECT body FROM attempt WHERE local = 0")]
    finally:
        journal.close()
    return {row["id"]: row["ended"]["ran_us"] for row in rows if row["ended"]}


def new_witness(stack: FarStack) -> Path:
    witness = stack.folder / "witness"
    witness.mkdir(mode=0o777)
    witness.chmod(0o777)
    return witness


async def submit(stack: FarStack, witness: Path, numbers: range, seconds: list[float]) -> list[JobId]:
    jobs = []
    for number in numbers:
        spec = JobSpec(name=f"job-{number}", script=script(witness, number, seconds[number % len(seconds)]), wall_s=3_600)
        jobs.append(await stack.do(partial(stack.submit, spec, key=f"key-{number}")))
    return jobs


async def ended(stack: FarStack, jobs: list[JobId], limit_s: float) -> list[JobRecord]:
    return [await stack.until(partial(stack.ended, job), what=f"{job} ends", limit_s=limit_s) for job in jobs]


def states(stack: FarStack, jobs: list[JobId]) -> Counter[JobState]:
    return Counter(stack.job(job).state for job in jobs)


def three_records_agree(stack: FarStack, witness: Path, records: list[JobRecord], statement: Statement) -> None:
    """The process, the agent's disk and the statement say the same, to the second; the scheduler's figure is the agent's, to the microsecond."""
    books = {book.attempt: book for line in statement.lines for book in line.attempts}
    agents = {name: us for site in stack.sites.values() for name, us in agents_record(site.folder).items()}
    for record in records:
        begun, ran_s = own_record(witness, record.spec.name)
        assert begun == 1, f"{record.spec.name} began {begun} times"
        ran = [attempt for attempt in record.attempts if attempt.started_at is not None]
        assert len(ran) == 1, f"{record.spec.name} has {len(ran)} attempts that ran"
        assert agents[ran[0].attempt] == ran[0].ran_us == books[ran[0].attempt].run_us
        assert abs(ran[0].ran_us / SECOND_US - ran_s) < 1.0


async def test_the_hubs_machine_is_cut_off_and_nothing_is_lost_ended_or_run_twice() -> None:
    async with far_stack(SITES) as stack:
        pools = profile(stack.folder)
        for name in SITES:
            await stack.add_site(name, profile=pools)
        witness = new_witness(stack)
        # Some end while nobody hears them, some afterwards.
        seconds = [CUT_S / 3 + 10, CUT_S * 2 / 3 + 10, CUT_S + 30]
        jobs = await submit(stack, witness, range(RUNNING + WAITING), seconds)
        await stack.until(lambda: states(stack, jobs)[JobState.RUNNING] == RUNNING, what=f"{RUNNING} jobs run", limit_s=90)

        await stack.wires.cut("hub")
        await asyncio.gather(*(islanded(stack, site) for site in SITES))
        for site in SITES:
            assert await asyncio.to_thread(stack.local_run, site, "/bin/echo", "still here") == "still here\n"
        await asyncio.sleep(CUT_S)
        lent = sum([await asyncio.to_thread(lent_at, stack, site) for site in SITES])
        assert lent < RUNNING, "some ended while nobody heard them, and nothing was started without the hub"
        held = await stack.do(lambda: [stack.job(job) for job in jobs])
        assert not [record.job for record in held if record.state in (JobState.FAILED, JobState.CANCELLED, JobState.LOST)]
        await stack.wires.heal("hub")

        records = await ended(stack, jobs, CUT_S + 120)
        assert Counter(record.state for record in records) == {JobState.SUCCEEDED: RUNNING + WAITING}
        statement = await stack.until(lambda: stack.complete_statement(set(jobs)), what="the statement is complete", limit_s=60)
        three_records_agree(stack, witness, records, statement)
        assert {line.job for line in statement.lines} == set(jobs), "the owner's own use is never charged"
        check = await stack.do(stack.check)
        assert not (check.sum or check.closed_with_hold or check.quarantined or check.differing or check.suspense_segments), check.text


async def islanded(stack: FarStack, site: str) -> None:
    def seen() -> bool | None:
        return status(stack, site)["islanded_since"] is not None or None

    await stack.until(partial(seen), what=f"{site} knows that it is islanded", limit_s=60)


def status(stack: FarStack, site: str) -> dict[str, object]:
    told: dict[str, object] = msgspec.json.decode(stack.local(site, "status", "--json").stdout, type=dict)
    return told


def lent_at(stack: FarStack, site: str) -> int:
    lent = status(stack, site)["lent_jobs"]
    assert isinstance(lent, int)
    return lent


WEATHER = ("block", "loss", "rate") if namespaces_work() else ()


@pytest.mark.parametrize("weather", WEATHER)
async def test_work_gets_through_a_bad_link_once(weather: str) -> None:
    """A black hole for ten seconds, three packets of ten lost, or a megabit: everything runs once, and is paid once."""
    async with far_stack(SITES) as stack:
        assert isinstance(stack.wires, Netns)
        for name in SITES:
            await stack.add_site(name, slots=2)
        witness = new_witness(stack)
        jobs = await submit(stack, witness, range(4), [8.0])
        match weather:
            case "block":
                await stack.wires.block("site-a")
                await asyncio.sleep(10)
                await stack.wires.heal("site-a")
            case "loss":
                await stack.wires.loss("site-a", 0.3)
            case _:
                await stack.wires.rate("site-a", "1mbit")
        jobs += await submit(stack, witness, range(4, 8), [1.0])
        records = await ended(stack, jobs, 180)
        assert Counter(record.state for record in records) == {JobState.SUCCEEDED: 8}
        await stack.wires.heal("site-a")
        statement = await stack.until(lambda: stack.complete_statement(set(jobs)), what="the statement is complete", limit_s=90)
        three_records_agree(stack, witness, records, statement)


@pytest.mark.parametrize("latency_s", [0.05, 0.5])
async def test_work_gets_through_a_long_link_once(latency_s: float) -> None:
    """So long each way; the site is not islanded by it, and its word on the clock stays good."""
    async with far_stack(SITES[:1], proxies=True) as stack:
        assert isinstance(stack.wires, Proxies)
        await stack.add_site("site-a", slots=2)
        await stack.wires.delay("site-a", latency_s)
        witness = new_witness(stack)
        jobs = await submit(stack, witness, range(4), [2.0])
        records = await ended(stack, jobs, 120)
        assert Counter(record.state for record in records) == {JobState.SUCCEEDED: 4}
        statement = await stack.until(lambda: stack.complete_statement(set(jobs)), what="the statement is complete", limit_s=60)
        three_records_agree(stack, witness, records, statement)
        told = await asyncio.to_thread(status, stack, "site-a")
        assert told["islanded_since"] is None
