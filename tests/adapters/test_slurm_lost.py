"""A real slurmctld that is killed within moments of a burst of submits: what it forgot is nobody's fault, runs once at most, and is not waited for."""

from __future__ import annotations

import asyncio
import errno
import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
from tests.adapters.slurm_world import GUEST, Slurm, until
from tests.adapters.test_slurm_cluster import CLOCK, Bench, bench
from tests.fakes.agents import attempt

from intertie.agent.adapters.files import Owned
from intertie.agent.adapters.port import Queued as Waits
from intertie.agent.adapters.queue import QueueAdapter
from intertie.agent.core.attempts import Exit, Verdict, verdict
from intertie.agent.core.model import Attempt, StartedRecord
from intertie.agent.core.native import STUB_CODES
from intertie.contracts.job import Cause

__all__ = ["bench"]
LIMIT_S = 150.0
JOBS = 12
# Whatever survived a slurmctld that forgot it has ended by itself before so long.
GONE = timedelta(seconds=25)
SCRIPT = "echo begun; sleep 8; exit 0\n"


@dataclass
class Ran:
    """One attempt: how it ended, and how often its code began."""

    attempt: Attempt
    began: bool
    end: Exit

    @property
    def verdict(self) -> Verdict:
        return verdict(self.end, self.attempt)


async def to_its_end(adapter: QueueAdapter, work: Attempt) -> Ran:
    first = await adapter.start(work)
    if isinstance(first, StartedRecord):
        return Ran(work, True, await adapter.ended(work))
    return Ran(work, False, first)


def kill(slurm: Slurm) -> None:
    slurm.ctld.kill()
    slurm.ctld.start()
    until(slurm.answers, "slurmctld answers again")


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.7])
async def test_a_burst_that_a_killed_slurmctld_forgets_is_lost_by_nobody(bench: Bench, after_s: float) -> None:
    """LAB 1.4. `after_s`: how far the burst has come is what is tried. What ran and left no record is left open, for a person: no end is made up."""
    adapter = QueueAdapter(bench.folder / "notes", bench.cluster, bench.files, CLOCK, every_s=0.5, lag_s=3.0)
    works = [attempt(SCRIPT, account=GUEST, wall_s=300) for _ in range(JOBS)]
    for work in works:
        await adapter.prepare(work, None)
    for queued in await asyncio.gather(*(adapter.enqueue(work) for work in works)):
        assert isinstance(queued, Waits)
    await asyncio.sleep(after_s)
    await asyncio.to_thread(kill, bench.slurm)
    tasks = {work.id: asyncio.create_task(to_its_end(adapter, work)) for work in works}
    try:
        for work in works:
            await settled(bench, adapter, tasks[work.id], work)
        for work in works:
            log = (await adapter.log(work.id, 0, 1_000)).data
            assert log.count(b"begun") <= 1, "its code began once at most"
            if not tasks[work.id].done():
                continue
            ran = tasks[work.id].result()
            if ran.began:
                assert b"begun" in log
                told = f"{ran.verdict} {ran.end} {await records(bench, work)}"
                assert ran.end.code not in STUB_CODES, told
                if not ran.end.native_state:  # In no book: what the books have is their word.
                    assert ran.verdict.cause in (None, Cause.UNKNOWN, Cause.SITE), told
            else:
                # It goes back to the hub's queue, at nobody's cost, and nothing that Slurm does later begins it.
                assert b"begun" not in log and ran.end.refused_errno in (errno.ETIME, errno.ECANCELED), ran
                assert await adapter.fence(work.id)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def settled(bench: Bench, adapter: QueueAdapter, task: asyncio.Task[Ran], work: Attempt) -> None:
    """Ended, or begun without a record of its end and in no queue and no books: nobody can know more of that."""
    deadline = time.monotonic() + LIMIT_S
    while not task.done():
        look = adapter.looks.latest(work.id)
        owned = Owned(work.id, GUEST)
        begun = await bench.files.read(owned, "started") is not None and await bench.files.read(owned, "exit") is None
        since = adapter.looks.absent_since(work.id)
        if begun and since is not None and CLOCK.now() - since > GONE:
            return
        assert time.monotonic() < deadline, (work.id, look)
        await asyncio.sleep(0.3)


async def records(bench: Bench, work: Attempt) -> str:
    """What lies in its folder, for a person who reads of a failure."""
    told = [await bench.files.read(Owned(work.id, GUEST), name) for name in ("started", "exit", "log", "native.log")]
    return " | ".join(chunk.data.decode(errors="replace") if chunk is not None else "-" for chunk in told)
