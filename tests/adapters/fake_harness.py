"""The fake cluster under the suite of clusters: its work played in memory, and under the start stub itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from tests.adapters.clusters import Harness, harness
from tests.fakes.agents import GUEST

from intertie.agent.adapters.fake_cluster import FakeCluster
from intertie.agent.adapters.fake_node import Node, Shell
from intertie.agent.adapters.files import LocalFiles
from intertie.clock import SystemClock
from intertie.ids import AttemptId

CLOCK = SystemClock()


class FakeHarness:
    cluster: FakeCluster

    def __init__(self, folder: Path, node: Node | None = None, *, cannot: Mapping[str, str] | None = None) -> None:
        self.cluster = FakeCluster(CLOCK, accounts=frozenset({GUEST}) if GUEST else frozenset(), node=node, behind_s=-420.0)
        self.files = LocalFiles(folder / "shared", look_s=0.05)
        self.account = GUEST
        self.resolution_us = 1
        self.cannot = cannot or {}

    async def hold(self) -> None:
        self.cluster.hold(True)

    async def release(self) -> None:
        self.cluster.hold(False)

    async def lose_answer(self) -> None:
        self.cluster.lost_answers = 1

    async def blind(self, looks: int) -> None:
        self.cluster.blind_looks = looks

    async def deaf(self, on: bool) -> None:
        self.cluster.deaf = on

    async def reuse_ids(self) -> None:
        self.cluster.reuse_ids()

    async def say_unknown(self, tag: AttemptId, word: str) -> None:
        self.cluster.job(tag).word = word

    async def complete_slowly(self, tag: AttemptId) -> None:
        self.cluster.job(tag).slow_end = True

    async def suspend(self, tag: AttemptId) -> None:
        self.cluster.suspend(tag)

    async def resume(self, tag: AttemptId) -> None:
        self.cluster.resume(tag)

    async def preempt(self, tag: AttemptId) -> None:
        self.cluster.preempt(tag)

    async def fail_node(self, tag: AttemptId) -> None:
        self.cluster.fail_node(tag)

    async def run_out_of_memory(self, tag: AttemptId) -> None:
        self.cluster.run_out_of_memory(tag)

    async def cancel_at_site(self, tag: AttemptId) -> None:
        self.cluster.cancel_at_site(tag)

    async def make_unkillable(self, tag: AttemptId) -> None:
        self.cluster.make_unkillable(tag)

    async def let_die(self, tag: AttemptId) -> None:
        self.cluster.let_die(tag)


@harness("fake")
async def fake(folder: Path) -> AsyncIterator[Harness]:
    made = FakeHarness(folder)
    yield made
    await made.cluster.close()


@harness("fake-shell")
async def fake_shell(folder: Path) -> AsyncIterator[Harness]:
    made = FakeHarness(folder, Shell())
    yield made
    await made.cluster.close()
