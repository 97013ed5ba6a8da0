"""Two copies of every service: whoever leads is killed, one after another, while jobs flow. Nobody waits for a restart, nothing runs twice,
nothing is lost, and the books agree.
"""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial

from tests.journeys.stack import Stack, running_stack
from tests.journeys.test_faults import seconds_and_charges_agree

from intertie.contracts.job import JobRecord, JobSpec, JobState
from intertie.ids import JobId

JOBS = 20
# (schema, role): every office of the hub.
OFFICES = (("scheduler", "planner"), ("scheduler", "relay"), ("registry", "judge"), ("metering", "relay"), ("identity", "relay"))


async def leader_of(stack: Stack, schema: str, role: str) -> int:
    """The pid of the process in office."""
    query = f"SELECT holder FROM {schema}.leader WHERE role = '{role}'"
    holder = await stack.do(partial(stack.supervisor.postgres.query, query, database="intertie"))
    return int(holder.rpartition("/")[2])


async def strike_leaders(stack: Stack) -> list[int]:
    struck = []
    for schema, role in OFFICES:
        pid = await leader_of(stack, schema, role)
        os.kill(pid, signal.SIGKILL)
        struck.append(pid)

        async def taken(schema: str = schema, role: str = role, pid: int = pid) -> bool:
            return await leader_of(stack, schema, role) != pid

        async with asyncio.timeout(30):
            while not await taken():  # noqa: ASYNC110  # the database tells no event of ours
                await asyncio.sleep(0.1)
    return struck


async def submit_all(stack: Stack, witness: str) -> list[JobId]:
    jobs = []
    for number in range(JOBS):
        spec = JobSpec(name=f"job-{number}", script=f"#!/bin/sh\necho run >> {witness}/job-{number}\nsleep 0.{number % 5 + 1}\n", wall_s=60)
        jobs.append(await stack.retry(lambda spec=spec, number=number: stack.submit(spec, key=f"key-{number}")))  # type: ignore[misc]  # bound now
        await asyncio.sleep(0.3)
    return jobs


async def test_the_leaders_are_killed_in_turn_while_jobs_flow_and_nobody_notices() -> None:
    async with running_stack(copies=2) as stack:
        names = {started.name for started in stack.supervisor.started}
        assert {"scheduler", "scheduler-2", "metering-2", "registry-2", "identity-2", "incident-2", "gateway-2"} <= names
        await stack.add_site("site-a", slots=4)
        witness = stack.folder / "witness"
        witness.mkdir(mode=0o777)
        witness.chmod(0o777)
        jobs, struck = await asyncio.gather(submit_all(stack, str(witness)), strike_leaders(stack))
        assert len(struck) == len(OFFICES)
        records: list[JobRecord] = []
        for job in jobs:
            records.append(await stack.until(lambda job=job: stack.ended(job), what=f"{job} ends", limit_s=90))  # type: ignore[misc]  # bound now
        statement = await stack.until(lambda: stack.complete_statement(set(jobs)), what="the statement is complete", limit_s=60)
        assert len({record.job for record in records}) == JOBS and {record.state for record in records} == {JobState.SUCCEEDED}
        for record in records:
            lines = (witness / record.spec.name).read_text(encoding="ascii").splitlines()
            assert lines == ["run"], f"{record.spec.name} ran {len(lines)} times"
        seconds_and_charges_agree(records, statement)
        check = await stack.retry(stack.check)
        assert not (check.sum or check.closed_with_hold or check.quarantined or check.differing), check.text
