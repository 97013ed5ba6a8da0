"""One real Slurm for a whole test process: starting its database takes seconds."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.adapters.slurm_world import SHARED, Slurm

if TYPE_CHECKING:
    from tests.adapters.kubernetes_rig import Rig

# Tried by hand: the node that Slurm drains afterwards is back when Slurm likes.
collect_ignore = [] if "INTERTIE_LOST_BURST" in os.environ else ["test_slurm_lost.py"]


@pytest.fixture(scope="session", autouse=True)
def _slurm_ends() -> Iterator[None]:
    yield
    SHARED.close()


@pytest.fixture
def slurms() -> dict[str, Slurm]:
    """`lab` and `sea`, with common books."""
    return SHARED.get()


@pytest.fixture
def lab(slurms: dict[str, Slurm]) -> Iterator[Slurm]:
    """The first of them, its queue empty before and after."""
    slurms["lab"].clear()
    yield slurms["lab"]
    slurms["lab"].clear()


@pytest.fixture
async def rig(short_folder: Path) -> AsyncIterator[Rig]:
    """A Kubernetes look-alike with two tenants' namespaces, and the agent's adapter over it."""
    from tests.adapters.kubernetes_rig import running_rig  # Its parts are heavy, and of no use to the others here.

    async with running_rig(short_folder) as made:
        yield made
