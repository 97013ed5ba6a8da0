"""What a job is told of the accelerators that it was given."""

from __future__ import annotations

import pytest

from intertie.agent.adapters.process import visible_npus


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (["npu-0-185011D4-21104518", "npu-7"], {"ASCEND_RT_VISIBLE_DEVICES": "0,7"}),
        (["GPU-1", "MIG-GPU-a1/3/0"], {}),
        ([], {}),
    ],
)
def test_an_ascend_job_is_told_its_chips_by_number(devices: list[str], said: dict[str, str]) -> None:
    assert visible_npus(devices) == said
