"""Twelve jobs while the API server forgets, hangs up, and answers lists with nothing, and while the agent is killed: each runs once, to its own end.

Faults are drawn from a seed, which a failure names; what is asserted holds for any order of them.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from tests.adapters.kubernetes_rig import CLOCK, Rig
from tests.adapters.kubernetes_world.kinds import JOBS
from tests.fakes.agents import attempt

from intertie.agent.adapters.queue import QueueAdapter
from intertie.agent.core.attempts import Exit
from intertie.agent.core.model import Attempt, StartedRecord
from intertie.agent.kubernetes.cluster import KubernetesCluster
from intertie.agent.kubernetes.folders import ClaimFiles

LIMIT_S = 240.0
COUNT = 12


class Agent:
    """One agent's adapter over one cluster object; killed by dropping both, as a kill of its process does."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.cluster = KubernetesCluster(rig.cluster.rules, rig.world.folder / "records", CLOCK)
        self.adapter = QueueAdapter(rig.world.folder / "notes", self.cluster, ClaimFiles(rig.rules, look_s=0.1), CLOCK, every_s=0.5)
        self.ends: dict[str, Exit] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def follow(self, works: list[Attempt]) -> None:
        self.tasks = [asyncio.create_task(self._one(work)) for work in works]

    async def _one(self, work: Attempt) -> None:
        started = await self.adapter.start(work)
        assert isinstance(started, StartedRecord), started
        self.ends[work.id] = await self.adapter.ended(work)

    async def die(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.cluster.close()


async def fault(rig: Rig, chance: random.Random) -> None:
    match chance.choice(["cut", "forget", "deaf", "empty", "lose"]):
        case "cut":
            rig.world.api.cut()
        case "forget":
            rig.world.store.compact()
        case "deaf":
            rig.world.api.deaf = True
            rig.world.api.cut()
            await asyncio.sleep(chance.uniform(0.1, 1.0))
            rig.world.api.deaf = False
        case "empty":
            rig.world.api.empty = 4
            rig.world.store.compact()
        case "lose":
            rig.world.api.swallow = 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 16, 23])
async def test_under_faults_each_job_runs_once_to_its_own_end(rig: Rig, seed: int) -> None:
    chance = random.Random(seed)
    agent = Agent(rig)
    works = [
        attempt(f"#!/bin/sh\necho run >> ../runs\nsleep {chance.uniform(0.1, 3):.1f}\nexit {n}\n", account="fed-acme") for n in range(COUNT)
    ]
    for work in works:
        await agent.adapter.prepare(work, None)
    ends: dict[str, Exit] = {}
    async with asyncio.timeout(LIMIT_S):
        while len(ends) < COUNT:
            agent.follow([work for work in works if work.id not in ends])
            for _ in range(4):
                await fault(rig, chance)
                await asyncio.wait(agent.tasks, timeout=chance.uniform(0.1, 0.8))
            if all(work.id in agent.ends for work in works if work.id not in ends) or chance.random() < 0.5:
                ends |= agent.ends
                await agent.die()
                agent = Agent(rig)
            else:
                done, _ = await asyncio.wait(agent.tasks, timeout=5)
                ends |= agent.ends
                await agent.die()
                agent = Agent(rig)
    await agent.die()
    rig.world.api.deaf, rig.world.api.empty = False, 0
    assert [ends[work.id].code for work in works] == list(range(COUNT)), f"seed {seed}"
    home = Path(rig.rules.namespaces["fed-acme"].local)
    assert all((home / work.id / "runs").read_text(encoding="utf-8") == "run\n" for work in works), f"seed {seed}"
    native = Counter(job["metadata"]["labels"]["intertie.io/attempt"] for job in rig.world.store.list(JOBS))
    assert native == dict.fromkeys((work.id for work in works), 1), f"seed {seed}"
    await books_agree(rig, works, ends)


async def books_agree(rig: Rig, works: list[Attempt], ends: dict[str, Exit]) -> None:
    """The third book: the cluster's whole seconds against ours."""
    last = Agent(rig)
    try:
        await last.cluster.status([work.id for work in works])
        rows = await last.cluster.accounting(CLOCK.now() - timedelta(hours=1), CLOCK.now() + timedelta(hours=1))
        told = {row.tag: row for row in rows}
        assert len(rows) == COUNT
        for work in works:
            elapsed = told[work.id].elapsed_us
            assert elapsed is not None and abs(elapsed - ends[work.id].ran_us) <= told[work.id].resolution_us
    finally:
        await last.die()
