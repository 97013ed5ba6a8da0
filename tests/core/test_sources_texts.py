"""One line of device use, in both languages: what is unknown says so."""

from __future__ import annotations

import pytest

from intertie.contracts.telemetry import DeviceUse
from intertie.ids import DeviceId
from intertie.text import Lang
from intertie.text.devices import use_line, use_lines

FULL = DeviceUse(
    device=DeviceId("GPU-1"),
    model="A100-SXM4-80GB",
    mean_milli=834,
    max_milli=1000,
    mean_memory_mib=50_000,
    max_memory_mib=72_704,
    memory_total_mib=81_920,
    energy_mj=680_000,
    seen_us=97_000_000,
    unseen_us=3_000_000,
)
MUTE = DeviceUse(device=DeviceId("GPU-2"), max_memory_mib=512, shared_us=9_000_000, unseen_us=1_000_000)


@pytest.mark.parametrize(
    ("used", "lang", "said"),
    [
        (FULL, "en", "A100-SXM4-80GB: 83 % mean, 100 % at most, memory peak 71 of 80 GiB, 0.2 Wh, seen 97 % of the run"),
        (FULL, "zh", "A100-SXM4-80GB: 平均利用率 83 %，最高 100 %，显存峰值 71/80 GiB，耗电 0.2 Wh，覆盖运行时长的 97 %"),
        (MUTE, "en", "GPU: utilisation unknown, memory peak 0.5 GiB, seen 0 % of the run, 9 s with others on it, counted for nobody"),
    ],
)
def test_a_line_says_what_is_known_and_how_much_of_the_run_was_seen(used: DeviceUse, lang: Lang, said: str) -> None:
    assert use_line(used, lang) == said


def test_many_devices_are_a_few_lines() -> None:
    assert len(use_lines([FULL] * 64, "en")) == 9 and use_lines([FULL] * 64, "en")[-1] == "and 56 more"
