"""Show 2's last sentence over a scheduler in memory: its accounting equals what was measured, job by job, or the difference is named."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import msgspec
from tests.core.metering_world import record
from tests.edges.test_agent_native_books import told
from tests.edges.test_agent_queue import a_cluster, over, segments, speaking, submitted, until
from tests.fakes.agents import GUEST, offer, pool
from tests.fakes.sites import World, a_site

from intertie.agent.adapters.fake_cluster import FakeCluster
from intertie.agent.adapters.port import NativePhase
from intertie.agent.native_books import NativeTeller
from intertie.contracts.accounting import Differs
from intertie.contracts.link import Claimed, Ended, OfferBody
from intertie.contracts.usage import AttemptBook, UsagePhase
from intertie.metering.core.native import Days, Ours, Told, compare, read

RUNS = 6


async def ran(world: World, cluster: FakeCluster, bodies: list[OfferBody]) -> dict[str, Ended]:
    """All of them through the queue, to their ends."""
    await world.tell(*(world.offered(body) for body in bodies))
    await world.first(Claimed)
    await world.tell(*(world.go(body) for body in bodies))
    await submitted(cluster, len(bodies))
    ends: dict[str, Ended] = {}
    loop = asyncio.get_running_loop()
    by = loop.time() + 60.0
    while len(ends) < len(bodies):
        ends = {entry.attempt: entry for entry in await world.entries() if isinstance(entry, Ended)}
        assert loop.time() < by, f"{len(ends)} of {len(bodies)} have ended"
        await asyncio.sleep(0.05)
    await world.site.idle()
    await until(lambda: all(job.ended is not None for job in cluster.jobs))
    return ends


async def ours(world: World, body: OfferBody, end: Ended) -> Ours:
    """Our two books of it, from what the site journalled."""
    mine = await segments(world, body.attempt)
    of = msgspec.structs.replace(
        record(1),
        attempt=body.attempt,
        job=body.job,
        devices=body.devices,
        account=GUEST,
        state="ended",
        started_at=end.started,
        ended_at=end.ended,
        ran_us=end.ran_us,
        segments=end.segments,
        quantity_milli_us=end.quantity_milli_us,
    )
    total = sum(one.quantity_milli * ((one.end - one.start) // timedelta(microseconds=1)) for one in mine)
    run_us = sum((one.end - one.start) // timedelta(microseconds=1) for one in mine if one.phase is UsagePhase.RUN)
    book = AttemptBook(
        attempt=body.attempt,
        job=body.job,
        tenant=body.tenant,
        site=body.site,
        segments=len(mine),
        quantity_milli_us=total,
        run_us=run_us,
        first_start=mine[0].start,
        last_end=mine[-1].end,
        ended=True,
        complete=True,
        outcome=end.outcome,
        cause=end.cause,
        hold=0,  # type: ignore[arg-type]  # of no matter here
        posted=0,  # type: ignore[arg-type]  # of no matter here
        in_suspense=0,
        charges=[],
    )
    return Ours(of, book)


async def days_of(world: World, cluster: FakeCluster) -> Days:
    """What is told now, as if it were read late enough to show every end."""
    await NativeTeller(world.site, cluster, every=timedelta(0)).look()
    newest = (await told(world))[-1]
    return read([Told(msgspec.structs.replace(newest, read_at=newest.read_at + timedelta(hours=1)), proven=True)])


async def test_a_schedulers_accounting_equals_what_was_measured_or_the_difference_is_named(short_folder: Path) -> None:
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster), pools=[pool(8)]) as world:
        bodies = [offer(script="sleep 0.2\n", devices=(f"slot-{n}",)) for n in range(1, RUNS + 1)]
        ends = await ran(speaking(world), cluster, bodies)
        books = [await ours(world, body, ends[body.attempt]) for body in bodies]
        now = world.clock.now() + timedelta(hours=2)

        honest = await days_of(world, cluster)
        runs = honest.records()
        assert len(runs) == RUNS
        for book in books:
            assert compare(book, [run for run in runs if run.tag == book.record.attempt], honest, now=now) == []

        # From here on the site's own accounting is not what was: each lie is named, and nothing else is.
        lies = [cluster.job(body.attempt) for body in bodies]
        assert lies[0].started is not None and lies[1].started is not None
        lies[0].started -= timedelta(seconds=8)
        lies[1].started -= timedelta(seconds=60)
        lies[2].devices = ("slot-3", "slot-9")
        lies[3].ended = lies[3].end = None
        lies[3].phase = NativePhase.RUNNING
        cluster.jobs.remove(lies[4])
        told_lies = await days_of(world, cluster)
        kinds = [
            [one.kind for one in compare(book, [r for r in told_lies.records() if r.tag == book.record.attempt], told_lies, now=now)]
            for book in books
        ]
        assert kinds == [[Differs.DURATION], [Differs.DURATION], [Differs.QUANTITY], [Differs.RUNAWAY], [Differs.MISSING], []]
