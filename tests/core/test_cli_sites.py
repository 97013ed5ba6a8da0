"""What `intertie site` concludes from what a site has said."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from intertie.cli.site_lines import pool_lines
from intertie.cli.sites import still_running
from intertie.contracts.image import PoolImages
from intertie.contracts.site import (
    Freshness,
    Lendable,
    Phase,
    PoolInventory,
    PoolProfile,
    PoolRecord,
    SiteKind,
    TaskType,
)
from intertie.ids import PoolName, SiteName

NOW = datetime(2026, 12, 1, 8, 0, tzinfo=UTC)


def pool(running: int | None, freshness: Freshness = Freshness.FRESH) -> PoolRecord:
    """A pool whose site said that so many run; None: it has said nothing."""
    name = PoolName("cpu")
    profile = PoolProfile(
        pool=name,
        accelerator="none",
        count=4,
        memory_mib=1,
        interconnect="none",
        task_types=[TaskType.BATCH],
        lendable=Lendable(devices=4),
    )
    return PoolRecord(
        site=SiteName("site-a"),
        pool=name,
        kind=SiteKind.MACHINES,
        profile=profile,
        phase=Phase.PILOT,
        cordoned=True,
        draining=True,
        cordon_reason="maintenance",
        freshness=freshness,
        last_heard=NOW,
        inventory=None if running is None else PoolInventory(pool=name, devices=[], running=running, waiting=0),
        inventory_at=None if running is None else NOW,
        version=1,
    )


@pytest.mark.parametrize(
    ("pools", "left"),
    [
        ([pool(0)], 0),
        ([pool(1), pool(2)], 3),
        ([pool(0, Freshness.STALE)], None),
        ([pool(0, Freshness.UNKNOWN)], None),
        ([pool(0), pool(None)], None),
    ],
    ids=["said to be empty", "summed", "stale", "unknown", "one pool has said nothing"],
)
def test_a_drain_is_over_when_the_site_says_so_and_not_when_it_is_silent(pools: list[PoolRecord], left: int | None) -> None:
    """Silence is not an answer."""
    assert still_running(pools) == left


def test_a_pool_says_which_images_of_a_job_s_own_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERTIE_LANG", "en")
    takes = PoolImages(runtime="pyxis", sources=["nvcr.io/nvidia", "registry.example.cn"])
    shown = msgspec.structs.replace(pool(0), inventory=PoolInventory(pool=PoolName("cpu"), devices=[], running=0, waiting=0, images=takes))
    assert "  runs images that a job names: nvcr.io/nvidia, registry.example.cn by pyxis" in pool_lines(shown)
    assert not any("images" in words for words in pool_lines(pool(0)))
