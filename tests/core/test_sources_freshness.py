"""How long a sample is believed: five seconds, or three of its source's own intervals, within the hub's bound."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pytest

from intertie.contracts.site import DeviceKind, DeviceState
from intertie.contracts.telemetry import DeviceSample, NodeSample
from intertie.ids import DeviceId, PoolName, SiteName
from intertie.scheduler.core.sight import LONGEST_LIVE_S, Sight

NOW = datetime(2026, 12, 1, 8, 0, tzinfo=UTC)
SITE, POOL = SiteName("site-a"), PoolName("gpu")


def live(
    every_s: float, device_every_s: float, age_s: float, *, received_age_s: float | None = None, read_age_s: float | None = None
) -> bool:
    """Whether a sample of that age is live; `read_age_s`: the device was read so much earlier than it was told."""
    taken = NOW - timedelta(seconds=age_s)
    read = None if read_age_s is None else NOW - timedelta(seconds=read_age_s)
    device = DeviceSample(
        id=DeviceId("GPU-0"), pool=POOL, kind=DeviceKind.GPU, state=DeviceState.FREE, sampled=read, every_s=device_every_s
    )
    sight = Sight()
    sight.observe(SITE, NodeSample(node="n1", sampled=taken, sequence=1, devices=[device], every_s=every_s), 100.0)
    (found,) = sight.devices(SITE, POOL, None, now=NOW, now_s=100.0 + (age_s if received_age_s is None else received_age_s), offset_s=0.0)
    return found.live


@pytest.mark.parametrize(
    ("every_s", "device_every_s", "age_s", "believed"),
    [
        (0.0, 0.0, 4.9, True),
        (0.0, 0.0, 5.1, False),
        (1.0, 0.0, 5.1, False),
        (30.0, 0.0, 89.0, True),
        (30.0, 0.0, 91.0, False),
        (1.0, 10.0, 29.0, True),
        (1.0, 10.0, 31.0, False),
        (1e9, 0.0, LONGEST_LIVE_S + 1, False),
        (math.inf, 0.0, LONGEST_LIVE_S + 1, False),
        (math.nan, 0.0, 5.1, False),
        (-30.0, 0.0, 5.1, False),
    ],
)
def test_a_sample_is_live_for_three_of_its_own_intervals_within_the_hub_s_bound(
    every_s: float, device_every_s: float, age_s: float, believed: bool
) -> None:
    assert live(every_s, device_every_s, age_s) is believed


def test_a_reading_that_is_older_than_its_message_counts_from_when_it_was_read() -> None:
    assert live(1.0, 10.0, 0.5, read_age_s=25.0)
    assert not live(1.0, 10.0, 0.5, read_age_s=35.0), "an old number with a new time"
    assert not live(1.0, 0.0, 0.5, read_age_s=6.0)
