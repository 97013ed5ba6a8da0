"""One real Slurm for a whole test process: starting its database takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.adapters.slurm_world import Slurm, running_slurm


@pytest.fixture(scope="session")
def slurms() -> Iterator[dict[str, Slurm]]:
    """`lab` and `sea`, with common books, and slurmrestd on both."""
    with running_slurm("lab", "sea", rest=True) as clusters:
        yield clusters


@pytest.fixture
def lab(slurms: dict[str, Slurm]) -> Iterator[Slurm]:
    """The first of them, its queue empty before and after."""
    slurms["lab"].clear()
    yield slurms["lab"]
    slurms["lab"].clear()
