"""What one site's telemetry may cost the hub: memory and time have an end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from intertie.contracts.site import DeviceKind, DeviceState
from intertie.contracts.telemetry import DeviceSample, NodeSample
from intertie.ids import DeviceId, PoolName, SiteName
from intertie.scheduler.core import sight
from intertie.scheduler.core.sight import Sight

NOW = datetime(2026, 12, 1, tzinfo=UTC)
EVIL, GOOD, POOL = SiteName("evil"), SiteName("good"), PoolName("p")


def sample(node: str, devices: int, sequence: int = 1) -> NodeSample:
    told = [DeviceSample(id=DeviceId(f"{node}-{n}"), pool=POOL, kind=DeviceKind.SLOT, state=DeviceState.FREE) for n in range(devices)]
    return NodeSample(node=node, sampled=NOW + timedelta(seconds=sequence), sequence=sequence, devices=told)


def seen(what: Sight, site: SiteName) -> int:
    return len(what.devices(site, POOL, None, now=NOW, now_s=0.0, offset_s=0.0))


def test_a_node_with_more_devices_than_any_host_has_is_not_believed() -> None:
    what = Sight()
    assert not what.observe(EVIL, sample("n", sight.DEVICES_PER_NODE + 1), 0.0)
    assert seen(what, EVIL) == 0


def test_a_site_with_more_devices_than_any_has_is_believed_so_far_and_no_other_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sight, "DEVICES_PER_SITE", 10)
    what = Sight()
    for number in range(5):
        what.observe(EVIL, sample(f"n{number}", 4), 0.0)
    what.observe(GOOD, sample("n", 4), 0.0)
    assert (seen(what, EVIL), seen(what, GOOD)) == (8, 4)


def test_a_node_that_says_less_makes_room_and_so_does_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sight, "DEVICES_PER_SITE", 4)
    what = Sight()
    what.observe(EVIL, sample("a", 4), 0.0)
    what.observe(EVIL, sample("a", 2, sequence=2), 0.0)
    assert what.observe(EVIL, sample("b", 2), 0.0)
    assert seen(what, EVIL) == 4
    what.prune(1e6)
    assert what.observe(EVIL, sample("c", 4), 1e6)
    assert seen(what, EVIL) == 4
