"""One suite for every site's own scheduler: what the agent may rely on, whichever it is, alone and under the one adapter over it.

A cluster that cannot produce a row says so in its harness (`cannot`), with the reason; such a row passes by saying it, and no row is skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import pytest
from tests.adapters.clusters import HARNESSES, Harness, names
from tests.fakes.agents import attempt

from intertie.agent.adapters.files import Owned
from intertie.agent.adapters.port import Cluster, NativeJob, NativePhase, NativeQueue, NativeWords, NativeWork, Presence
from intertie.agent.adapters.queue import QueueAdapter
from intertie.agent.core.attempts import Exit, verdict
from intertie.agent.core.model import Attempt, StartedRecord
from intertie.clock import SystemClock
from intertie.contracts.job import Cause
from intertie.errors import Unavailable
from intertie.ids import AttemptId

for found in sorted(Path(__file__).parent.glob("*_harness.py")):
    import_module(f"tests.adapters.{found.stem}")

CLOCK = SystemClock()
EVERY_S = 0.3
# Real schedulers start and end work within seconds; a machine that others load takes its time.
DEADLINE_S = 90.0
RUNS = (NativePhase.STARTING, NativePhase.RUNNING)
T = TypeVar("T")


async def until(look: Callable[[], Awaitable[T | None]], what: str) -> T:
    loop = asyncio.get_running_loop()
    by = loop.time() + DEADLINE_S
    while True:
        if (seen := await look()) is not None:
            return seen
        assert loop.time() < by, what
        await asyncio.sleep(0.1)


@dataclass
class World:
    """A cluster with the agent's adapter over it."""

    at: Harness
    folder: Path
    adapter: QueueAdapter

    @property
    def cluster(self) -> Cluster:
        return self.at.cluster

    def again(self) -> QueueAdapter:
        """The next agent's, after a crash: it knows what lies in its folder, and nothing else."""
        return QueueAdapter(self.folder, self.at.cluster, self.at.files, CLOCK, every_s=EVERY_S)

    async def prepared(self, script: str, **fields: object) -> Attempt:
        work = attempt(script, account=self.at.account, **fields)  # type: ignore[arg-type]  # as the builder's
        await self.adapter.prepare(work, None)
        return work

    async def begun(self, script: str, **fields: object) -> Attempt:
        work = await self.prepared(script, **fields)
        started = await self.adapter.start(work)
        assert isinstance(started, StartedRecord), started
        return work

    async def job(self, tag: AttemptId) -> NativeJob | None:
        return (await self.cluster.status([tag])).jobs.get(tag)

    async def until(self, tag: AttemptId, *phases: NativePhase) -> NativeJob:
        async def seen() -> NativeJob | None:
            job = await self.job(tag)
            return job if job is not None and job.phase in phases else None

        return await until(seen, f"{tag} is {phases}")

    def native(self, work: Attempt) -> NativeWork:
        return NativeWork(work, self.at.files.seen(Owned(work.id, work.account)), CLOCK.now() + timedelta(hours=1))

    async def end(self, work: Attempt) -> Exit:
        async with asyncio.timeout(DEADLINE_S):
            return await self.adapter.ended(work)


@pytest.fixture(params=names())
async def world(request: pytest.FixtureRequest, short_folder: Path) -> AsyncIterator[World]:
    async with HARNESSES[request.param](short_folder) as harness:
        if (why := harness.cannot.get(request.node.originalname)) is not None:
            request.node.add_marker(pytest.mark.xfail(reason=why, run=False))
        folder = short_folder / "notes"
        yield World(harness, folder, QueueAdapter(folder, harness.cluster, harness.files, CLOCK, every_s=EVERY_S))


async def test_what_a_cluster_cannot_produce_is_a_row_of_this_suite_and_has_its_reason(world: World) -> None:
    rows = {name for name in globals() if name.startswith("test_")}
    assert set(world.at.cannot) <= rows and all(world.at.cannot.values())


# --- submit ------------------------------------------------------------------------------------------------------------------------------


async def test_a_submit_whose_answer_was_lost_is_found_by_its_tag(world: World) -> None:
    """BR-046: the tag is looked for before any retry."""
    await world.at.hold()
    work = await world.prepared("exit 0\n")
    await world.at.lose_answer()
    with pytest.raises(Unavailable):
        await world.cluster.submit(world.native(work))
    first = await world.cluster.submit(world.native(work))
    again = await world.cluster.submit(world.native(work))
    assert (first.native_id, first.tag) == (again.native_id, work.id)
    await world.cluster.cancel(work.id, 0)


async def test_work_whose_submit_was_answered_by_nobody_runs_once(world: World) -> None:
    work = await world.prepared("echo once\n")
    await world.at.lose_answer()
    assert isinstance(await world.adapter.start(work), StartedRecord)
    assert (await world.end(work)).code == 0
    assert (await world.adapter.log(work.id, 0, 100)).data == b"once\n"


async def test_an_agent_that_died_after_the_submit_finds_what_it_submitted(world: World) -> None:
    await world.at.hold()
    work = await world.prepared("exit 3\n")
    queued = await world.adapter.enqueue(work)
    following = world.again()
    assert await following.presence(work.id) is Presence.BEGUN
    assert [kept.id for kept in await following.found()] == [work.id]
    assert await following.enqueue(work) == queued
    await world.at.release()
    assert isinstance(await following.start(work), StartedRecord)
    async with asyncio.timeout(DEADLINE_S):
        assert (await following.ended(work)).code == 3


async def test_a_native_id_that_is_given_out_again_is_not_taken_for_the_first(world: World) -> None:
    """(cluster, id, submitted) names a native job, and the tag says whose it is."""
    first = await world.begun("exit 5\n")
    assert (await world.end(first)).code == 5
    await world.at.reuse_ids()
    second = await world.begun("exit 6\n")
    assert (await world.end(second)).code == 6
    one, two = await world.until(first.id, NativePhase.ENDED), await world.until(second.id, NativePhase.ENDED)
    assert one.native_id == two.native_id and (one.tag, two.tag) == (first.id, second.id)


async def test_work_waits_in_the_site_s_own_queue_with_its_words_kept(world: World) -> None:
    await world.at.hold()
    work = await world.prepared("exit 0\n")
    await world.adapter.enqueue(work)
    job = await world.until(work.id, NativePhase.QUEUED)
    assert job.cluster == world.cluster.name and job.native_id and job.state and job.submitted is not None
    assert job.started is None and job.end is None and job.generation == work.generation
    await world.cluster.cancel(work.id, 0)


# --- what a look does not say ------------------------------------------------------------------------------------------------------------


async def test_an_empty_listing_ends_nothing(world: World) -> None:
    """BR-010: a queue that shows nothing, and says that all is well, says nothing."""
    work = await world.begun("sleep 2\nexit 4\n")
    await world.at.blind(2)
    assert (await world.end(work)).code == 4


async def test_a_scheduler_that_does_not_answer_ends_nothing(world: World) -> None:
    work = await world.begun("sleep 1\nexit 4\n")
    await world.at.deaf(True)
    ending = asyncio.create_task(world.end(work))

    async def said() -> bytes | None:
        chunk = await world.at.files.read(Owned(work.id, work.account), "exit")
        return chunk.data if chunk is not None else None

    await until(said, "its own record")
    assert not ending.done()
    await world.at.deaf(False)
    assert (await ending).code == 4


async def test_a_word_in_no_table_is_unknown_and_no_end(world: World) -> None:
    work = await world.begun("sleep 60\n")
    await world.at.say_unknown(work.id, "FUTURE_STATE")
    job = await world.until(work.id, NativePhase.UNKNOWN)
    assert job.state == "FUTURE_STATE" and job.end is None and "FUTURE_STATE" in job.warning
    await world.at.say_unknown(work.id, "")
    await world.adapter.stop(work.id, 1)
    assert (await world.end(work)).stopped_for == "asked"


async def test_a_tag_that_nobody_submitted_is_absent(world: World) -> None:
    stranger = attempt("exit 0\n").id
    listing = await world.cluster.status([stranger])
    assert listing.complete and stranger not in listing.jobs


# --- ends --------------------------------------------------------------------------------------------------------------------------------


async def test_exit_code_137_is_no_kill(world: World) -> None:
    work = await world.begun("sleep 0.5\nexit 137\n")
    end = await world.end(work)
    assert (end.code, end.signal, end.ended_by) == (137, None, "")
    assert verdict(end, work).cause is Cause.JOB


async def test_a_signal_is_no_exit_code(world: World) -> None:
    work = await world.begun("sleep 0.5\nkill -9 $$\n")
    end = await world.end(work)
    assert (end.code, end.signal, end.ended_by) == (None, 9, "")


async def test_the_end_by_memory_is_told_from_a_kill(world: World) -> None:
    work = await world.begun("sleep 60\n")
    await world.at.run_out_of_memory(work.id)
    end = await world.end(work)
    assert end.ended_by == "out_of_memory" and verdict(end, work).cause is Cause.JOB


async def test_the_wall_limit_is_told_from_a_cancel(world: World) -> None:
    work = await world.begun("sleep 300\n", wall_s=2)
    end = await world.end(work)
    assert end.stopped_for == "wall_limit" and verdict(end, work).cause is Cause.JOB


async def test_a_node_that_fails_is_the_site_s_fault(world: World) -> None:
    work = await world.begun("sleep 60\n")
    await world.at.fail_node(work.id)
    end = await world.end(work)
    assert end.ended_by == "node_failed" and verdict(end, work).cause is Cause.SITE


async def test_a_preemption_is_nobody_s_fault(world: World) -> None:
    work = await world.begun("sleep 60\n")
    await world.at.preempt(work.id)
    end = await world.end(work)
    assert end.ended_by == "preempted" and verdict(end, work).cause is Cause.PREEMPTED


async def test_a_cancel_at_the_site_is_told_from_ours(world: World) -> None:
    work = await world.begun("sleep 60\n")
    await world.at.cancel_at_site(work.id)
    end = await world.end(work)
    judged = verdict(end, work)
    assert (end.ended_by, judged.outcome, judged.cause) == ("cancelled_at_site", "cancelled", Cause.SITE), end


async def test_its_usage_ends_with_the_site_s_own_end(world: World) -> None:
    """BR-001: what is completing is not over, and its end is the one in the site's books."""
    work = await world.begun("sleep 1\n")
    await world.at.complete_slowly(work.id)
    end = await world.end(work)
    job = await world.until(work.id, NativePhase.ENDED)
    assert job.started is not None and job.ended is not None
    assert end.ran_us == (job.ended - job.started) // timedelta(microseconds=1)
    assert end.ran_us >= 1_000_000 - world.at.resolution_us and end.native_state == job.state


async def test_the_site_s_clock_is_kept_apart_from_ours(world: World) -> None:
    """Its wall clock may be minutes off: what it says is kept as it said it, and our own record is by ours."""
    before = CLOCK.now()
    work = await world.prepared("exit 0\n")
    started = await world.adapter.start(work)
    assert isinstance(started, StartedRecord)
    after = CLOCK.now()
    assert before.timestamp() - 2 <= started.utc_ns / 1e9 <= after.timestamp()
    listing = await world.cluster.status([work.id])
    job = listing.jobs[work.id]
    assert job.submitted is not None and abs(job.submitted - listing.at) < timedelta(seconds=DEADLINE_S)
    await world.end(work)


# --- cancel ------------------------------------------------------------------------------------------------------------------------------


async def test_a_cancel_of_what_is_over_is_harmless(world: World) -> None:
    work = await world.begun("exit 0\n")
    end = await world.end(work)
    await world.cluster.cancel(work.id, 1)
    await world.adapter.stop(work.id, 1)
    assert (end.code, (await world.until(work.id, NativePhase.ENDED)).end is not None) == (0, True)


async def test_a_cancel_of_what_waits_ends_it_unstarted(world: World) -> None:
    await world.at.hold()
    work = await world.prepared("echo ran\n")
    await world.adapter.enqueue(work)
    starting = asyncio.create_task(world.adapter.start(work))
    assert await world.adapter.fence(work.id)
    assert isinstance(await starting, Exit)
    await world.at.release()
    await world.until(work.id, NativePhase.ENDED)
    assert (await world.adapter.log(work.id, 0, 100)).data == b""


async def test_what_was_fenced_does_not_run_although_the_queue_starts_it(world: World) -> None:
    """LINK D6: a cancel that never arrived, and a start hours later; the mark in its folder stands between them."""
    await world.at.hold()
    work = await world.prepared("echo ran\n")
    await world.adapter.enqueue(work)
    await world.at.deaf(True)
    assert await world.adapter.fence(work.id)
    await world.at.deaf(False)
    await world.at.release()
    await world.until(work.id, NativePhase.ENDED)
    assert (await world.adapter.log(work.id, 0, 100)).data == b""


async def test_what_somebody_at_the_site_takes_out_of_the_queue_never_started(world: World) -> None:
    await world.at.hold()
    work = await world.prepared("exit 0\n")
    await world.adapter.enqueue(work)
    await world.at.cancel_at_site(work.id)
    async with asyncio.timeout(DEADLINE_S):
        over = await world.adapter.start(work)
    assert isinstance(over, Exit) and over.refused_errno is not None


async def test_what_cannot_be_killed_is_seen_to_be_stopping(world: World) -> None:
    work = await world.begun("sleep 60\n")
    await world.at.make_unkillable(work.id)
    await world.cluster.cancel(work.id, 0)
    ending = asyncio.create_task(world.end(work))
    job = await world.until(work.id, NativePhase.FINISHING, NativePhase.RUNNING)
    assert job.end is None and not ending.done()
    await world.adapter.stop(work.id, 0)
    await world.at.let_die(work.id)
    await ending
    assert (await world.until(work.id, NativePhase.ENDED)).end is not None


async def test_suspension_is_said_and_taken_back(world: World) -> None:
    work = await world.begun("sleep 300\n")
    await world.until(work.id, NativePhase.RUNNING)
    await world.at.suspend(work.id)
    await world.until(work.id, NativePhase.SUSPENDED)
    adapter: NativeQueue = world.adapter

    async def told(suspended: bool, before: NativeWords | None) -> NativeWords:
        async with asyncio.timeout(DEADLINE_S):
            while (words := await adapter.words(work.id, before)).suspended is not suspended:
                before = words
        return words

    paused = await told(True, None)
    await world.at.resume(work.id)
    assert (await told(False, paused)).native_id == paused.native_id
    await world.adapter.stop(work.id, 1)
    await world.end(work)


# --- logs --------------------------------------------------------------------------------------------------------------------------------


async def test_logs_are_bytes_from_an_offset_whatever_is_in_them(world: World) -> None:
    work = await world.begun("echo first\necho last\n")
    await world.end(work)
    owned = Owned(work.id, work.account)
    await world.at.files.write(owned, "log", b"m\xfcller\xff\x00\n" + "训练\n".encode())
    chunk = await world.adapter.log(work.id, 1, 6)
    assert (chunk.data, chunk.offset) == (b"\xfcller\xff", 1)
    assert (await world.adapter.log(work.id, 10_000, 10)).data == b""


async def test_a_log_of_a_gigabyte_is_read_at_its_end(world: World) -> None:
    """Sparse, as its bytes matter to nobody: what is read is what was asked for."""
    work = await world.begun("exit 0\n")
    await world.end(work)
    await make_sparse(world, work, 1 << 30)
    chunk = await world.adapter.log(work.id, (1 << 30) - 4, 100)
    assert (chunk.data, chunk.offset, chunk.total) == (b"end\n", (1 << 30) - 4, 1 << 30)


async def make_sparse(world: World, work: Attempt, size: int) -> None:
    folder = Path(world.at.files.seen(Owned(work.id, work.account)))

    def make() -> None:
        with (folder / "log").open("r+b") as f:
            f.truncate(size)
            f.seek(size - 4)
            f.write(b"end\n")

    await asyncio.to_thread(make)


# --- its books ---------------------------------------------------------------------------------------------------------------------------


async def test_its_books_show_a_run_by_our_tag(world: World) -> None:
    start = (await world.cluster.describe()).at - timedelta(seconds=5)
    work = await world.begun("sleep 1\n")
    await world.end(work)

    async def booked() -> object | None:
        rows = await world.cluster.accounting(start, start + timedelta(hours=1))
        return next((row for row in rows if row.tag == work.id and row.ended is not None), None)

    row = await until(booked, "a row of its own")
    assert getattr(row, "elapsed_us", 0) >= 1_000_000 - world.at.resolution_us


async def test_it_describes_its_nodes_and_counts_what_is_not_ours(world: World) -> None:
    told = await world.cluster.describe()
    assert told.cluster == world.cluster.name and told.nodes and all(node.name for node in told.nodes)
    assert any(node.usable and node.devices > 0 for node in told.nodes)
    work = await world.begun("sleep 60\n")
    assert (await world.cluster.describe()).load.running == told.load.running, "our own work is no load of others"
    await world.adapter.stop(work.id, 1)
    await world.end(work)
