"""One real Slurm for a whole test process: starting its database takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.adapters.slurm_world import SHARED, Slurm


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
