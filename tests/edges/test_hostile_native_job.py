"""A tenant's job in a site's own queue, which may write everything in its folder: what it says of itself makes no run unbegun, shorter or another's fault."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from tests.fakes.agents import GUEST, offer
from tests.fakes.sites import World, a_site

from intertie.agent.adapters.fake_cluster import FakeCluster
from intertie.agent.adapters.fake_node import Shell
from intertie.agent.adapters.files import LocalFiles
from intertie.agent.adapters.queue import QueueAdapter
from intertie.clock import SystemClock
from intertie.contracts.job import Cause
from intertie.contracts.link import Ended, OfferBody, Started

CLOCK = SystemClock()
LIMIT_S = 60.0
MICROSECOND = timedelta(microseconds=1)
# A stub that begins nothing is over within this, here: the scripts below run for longer.
STUB_US = 1_500_000
# The stub cannot write its own record of the end over one that lies there already.
KEEP = 'mkdir "$HERE/.exit.part"\n'


@dataclass
class Hostile:
    world: World
    cluster: FakeCluster
    adapter: QueueAdapter

    async def run(self, script: str) -> OfferBody:
        body = offer(script=f'#!/bin/sh\nHERE="$INTERTIE_WORK/.."\n{script}')
        await self.world.run(body)
        return body

    async def end(self, body: OfferBody) -> Ended:
        """That it began was said, and it lasted as long as the scheduler's own books say."""
        end = await self.world.first(Ended, LIMIT_S)
        await self.world.first(Started, LIMIT_S)
        job = self.cluster.job(body.attempt)
        assert job.started is not None and job.ended is not None
        assert end.ran_us == (job.ended - job.started) // MICROSECOND
        return end


@asynccontextmanager
async def hostile(folder: Path) -> AsyncIterator[Hostile]:
    accounts = frozenset({GUEST}) if GUEST else frozenset[str]()
    cluster = FakeCluster(CLOCK, nodes={"n1": 8}, accounts=accounts, node=Shell())
    adapter = QueueAdapter(folder / "jobs", cluster, LocalFiles(folder / "shared", look_s=0.1), CLOCK, every_s=0.3, lag_s=0.5)
    adapter.stub_us = STUB_US
    async with a_site(folder, adapter=adapter) as world:
        world.site.keeper_version = lambda: 3
        yield Hostile(world, cluster, adapter)
    await cluster.close()


def record(name: str, *lines: str) -> str:
    text = "".join(rf"{line}\n" for line in ("format=1", "utc_ns=5", "boot_ns=5", *lines))
    return f"printf '{text}' > \"$HERE/{name}\"\n"


FORGED = [
    ("it says that it was refused as too late", 'rm "$HERE/started"\n' + record("refused", "why=too_late") + "sleep 3\n", 0),
    ("it takes its start back", 'rm -r "$HERE/started" "$HERE/claimed"\nsleep 3\n', 0),
    ("it takes its start back and goes with a stub's code", KEEP + 'rm -r "$HERE/started" "$HERE/claimed"\nsleep 3; exit 224\n', 224),
    ("it blames the site's file system", KEEP + record("exit", "refused=5", "what=/sys/fs") + "sleep 3; exit 1\n", 1),
    ("it blames a lease that it never had", KEEP + record("exit", "signal=15", "stopped=lease_ended") + "sleep 3; exit 143\n", None),
    ("it says that we asked for its end", KEEP + record("exit", "signal=15", "stopped=asked") + "sleep 3; exit 143\n", None),
    ("it ends as a second start would", KEEP + "sleep 3; exit 222\n", 222),
    ("it says that it succeeded", KEEP + record("exit", "code=0") + "sleep 3; exit 7\n", 7),
    ("it ended its stub and says nothing", "sleep 3; kill -9 $PPID; sleep 9\n", None),
    ("it ended hours before it began", KEEP + record("exit", "code=0", "boot_id=x") + "sleep 3\n", 0),
]


@pytest.mark.parametrize(("script", "code"), [row[1:] for row in FORGED], ids=[row[0] for row in FORGED])
async def test_what_a_job_writes_into_its_folder_makes_its_run_nobody_else_s(short_folder: Path, script: str, code: int | None) -> None:
    async with hostile(short_folder) as site:
        end = await site.end(await site.run(script))
        assert end.ran_us >= 3_000_000
        assert end.cause in (None, Cause.JOB), (end.cause, end.reason)
        assert end.exit_code == code
        assert (end.outcome == "succeeded") == (code == 0)
