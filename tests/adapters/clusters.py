"""What `test_cluster_port.py` needs of each kind of cluster: a `Harness` makes one, and makes things happen in it that no agent could.

A new cluster adds one harness to `HARNESSES`. What it cannot produce stands in `cannot`, with the reason: such rows are counted by a test, none
is skipped in silence.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

from intertie.agent.adapters.files import Files
from intertie.agent.adapters.port import Cluster
from intertie.ids import AttemptId


class Harness(Protocol):
    """One cluster under test. Every `make_*` verb returns once the thing has been done to the cluster, not once it shows."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def files(self) -> Files: ...

    @property
    def account(self) -> str:
        """A mapped account that may submit."""
        ...

    @property
    def resolution_us(self) -> int:
        """Of the site's own clocks."""
        ...

    @property
    def cannot(self) -> Mapping[str, str]:
        """Rows of the suite (names of its tests) that this cluster cannot produce, and why."""
        ...

    async def hold(self) -> None:
        """From now on nothing that is submitted starts, until `release`."""
        ...

    async def release(self) -> None: ...

    async def lose_answer(self) -> None:
        """The next submit is taken, and its answer never comes: `Unavailable`."""
        ...

    async def blind(self, looks: int) -> None:
        """So many looks show an empty queue, as a broken answer does."""
        ...

    async def deaf(self, on: bool) -> None:
        """The scheduler answers nothing at all."""
        ...

    async def reuse_ids(self) -> None:
        """Native ids begin again at numbers that were given out."""
        ...

    async def say_unknown(self, tag: AttemptId, word: str) -> None:
        """Its state is a word that is in no table."""
        ...

    async def complete_slowly(self, tag: AttemptId) -> None:
        """When it ends, its nodes are not free yet for a while."""
        ...

    async def suspend(self, tag: AttemptId) -> None: ...

    async def resume(self, tag: AttemptId) -> None: ...

    async def preempt(self, tag: AttemptId) -> None: ...

    async def fail_node(self, tag: AttemptId) -> None: ...

    async def run_out_of_memory(self, tag: AttemptId) -> None: ...

    async def cancel_at_site(self, tag: AttemptId) -> None:
        """By somebody of the site, not by us."""
        ...

    async def make_unkillable(self, tag: AttemptId) -> None: ...

    async def let_die(self, tag: AttemptId) -> None:
        """What was unkillable is gone."""
        ...


Make = Callable[[Path], AbstractAsyncContextManager[Harness]]
HARNESSES: dict[str, Make] = {}


def harness(name: str) -> Callable[[Callable[[Path], AsyncIterator[Harness]]], Callable[[Path], AsyncIterator[Harness]]]:
    """Register an async generator that yields one harness in a folder of its own."""

    def add(make: Callable[[Path], AsyncIterator[Harness]]) -> Callable[[Path], AsyncIterator[Harness]]:
        HARNESSES[name] = asynccontextmanager(make)
        return make

    return add


def names() -> Sequence[str]:
    return sorted(HARNESSES)
