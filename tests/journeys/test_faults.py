"""While jobs flow, everything is killed once: bus, database, each service, the agent; and the bus's memory is wiped while it runs.

Afterwards every job is in a named end state, none ran twice, each attempt that ran has exactly its seconds and one charge, and the event
stream is whole again by itself. `INTERTIE_TEST_JOBS` makes it longer (60 by default).
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

from tests.journeys.stack import Stack, running_stack

from intertie.bus.nats import NatsBus
from intertie.bus.port import ConsumerSpec, Message
from intertie.clock import SystemClock
from intertie.contracts.base import EVENT_STREAM
from intertie.contracts.job import JobRecord, JobSpec, JobState
from intertie.contracts.usage import Statement
from intertie.ids import JobId

JOBS = int(os.environ.get("INTERTIE_TEST_JOBS", "60"))
# In this order. `wipe` empties the JetStream folder under the running server, which goes on acknowledging; what it lost shows when it is
# killed and comes back with nothing.
STRIKES = ("scheduler", "wipe", "agent", "postgres", "metering", "nats", "registry", "identity", "incident", "gateway")
SERVICES = ("scheduler", "metering", "registry", "identity", "incident")


def script(witness: Path, number: int) -> str:
    """Each run leaves one line in the witness folder: a second run would leave a second."""
    return f"#!/bin/sh\necho run >> {witness}/job-{number}\nsleep 0.{number % 5 + 1}\n"


async def strike(stack: Stack, what: str) -> None:
    if what == "agent":
        await stack.kill_agent("site-a")
    elif what == "wipe":
        await stack.do(lambda: shutil.rmtree(stack.layout.nats / "jetstream", ignore_errors=True))
    else:
        stack.kill(what)


async def submit_all(stack: Stack, witness: Path) -> list[JobId]:
    jobs: list[JobId] = []
    for number in range(JOBS):
        spec = JobSpec(name=f"job-{number}", script=script(witness, number), wall_s=60)
        key = f"key-{number}"
        jobs.append(await stack.retry(lambda spec=spec, key=key: stack.submit(spec, key=key)))  # type: ignore[misc]  # bound now
        # All of it within the time of the strikes.
        await asyncio.sleep(15 / JOBS)
    return jobs


async def strike_all(stack: Stack) -> None:
    for what in STRIKES:
        await asyncio.sleep(1.5)
        await strike(stack, what)


async def all_ended(stack: Stack, jobs: list[JobId]) -> list[JobRecord]:
    records = []
    for job in jobs:
        records.append(await stack.until(lambda job=job: stack.ended(job), what=f"{job} ends", limit_s=90))  # type: ignore[misc]  # bound now
    return records


async def test_every_part_is_killed_while_jobs_flow_and_the_books_agree() -> None:
    async with running_stack() as stack:
        await stack.add_site("site-a", slots=4)
        witness = stack.folder / "witness"
        witness.mkdir(mode=0o777)
        witness.chmod(0o777)
        jobs, _ = await asyncio.gather(submit_all(stack, witness), strike_all(stack))
        records = await all_ended(stack, jobs)
        statement = await stack.until(lambda: stack.complete_statement(set(jobs)), what="the statement is complete", limit_s=60)
        ran_as_recorded(records, witness)
        seconds_and_charges_agree(records, statement)
        check = await stack.retry(stack.check)
        assert not (check.sum or check.closed_with_hold or check.quarantined or check.differing), check.text
        await stream_is_whole(stack)


def ran_as_recorded(records: list[JobRecord], witness: Path) -> None:
    """Every job succeeded, and its script ran once: by the witness of the script itself."""
    assert len({r.job for r in records}) == JOBS
    assert Counter(r.state for r in records) == {JobState.SUCCEEDED: JOBS}
    for record in records:
        lines = (witness / record.spec.name).read_text(encoding="ascii").splitlines()
        assert lines == ["run"], f"{record.spec.name} ran {len(lines)} times"


def seconds_and_charges_agree(records: list[JobRecord], statement: Statement) -> None:
    """Per attempt: what the supervisor measured, what the scheduler holds, what metering charged."""
    books = {book.attempt: book for line in statement.lines for book in line.attempts}
    for record in records:
        ran = [a for a in record.attempts if a.started_at is not None]
        assert len(ran) == 1
        book = books[ran[0].attempt]
        assert book.run_us == ran[0].ran_us
        assert book.hold == 0
        assert len([c for c in book.charges if c.formula.amount]) <= 1
        assert sum(c.amount for c in book.charges) == book.posted


async def stream_is_whole(stack: Stack) -> None:
    """A reader from the beginning gets every event that any service gave a number, though the stream was lost on the way."""
    wanted: set[str] = set()
    for service in SERVICES:
        query = f"SELECT string_agg(event_id, ' ') FROM {service}.outbox WHERE number IS NOT NULL"
        wanted |= set((await stack.do(partial(stack.supervisor.postgres.query, query, database="intertie"))).split())
    assert len(wanted) > 3 * JOBS
    bus = await NatsBus.connect([stack.layout.bus_url], name="gateway", credentials=stack.layout.creds_file("gateway"))
    got: set[str] = set()

    async def read(message: Message) -> None:
        got.add(message.headers["ce-id"])

    try:
        await bus.consume(ConsumerSpec(EVENT_STREAM, "gateway", ["intertie.v1.evt.>"]), read, nobody_dies)
        clock = SystemClock()
        deadline = clock.monotonic_s() + 30
        while not wanted <= got and clock.monotonic_s() < deadline:  # noqa: ASYNC110  # the handler that fills `got` knows no deadline
            await asyncio.sleep(0.2)
        assert wanted <= got, f"{len(wanted - got)} of {len(wanted)} events are not in the stream"
    finally:
        await bus.close()


async def nobody_dies(message: Message, error: BaseException, tries: int) -> None:
    raise AssertionError(f"{message.subject} could not be read after {tries} tries: {error}")
