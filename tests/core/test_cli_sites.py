"""What `intertie site` concludes from what a site has said."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from intertie.cli.out import rejection_lines
from intertie.cli.site_lines import held_lines, pool_lines
from intertie.cli.sites import still_running
from intertie.contracts.image import PoolImages
from intertie.contracts.site import (
    Device,
    DeviceKind,
    DeviceObserved,
    DeviceState,
    Freshness,
    Lendable,
    NativeLoad,
    Phase,
    PoolInventory,
    PoolProfile,
    PoolRecord,
    SiteKind,
    TaskType,
)
from intertie.ids import DeviceId, PoolName, SiteName
from intertie.text.native import native_words

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


def holding(prefix: str, load: NativeLoad | None, freshness: Freshness = Freshness.FRESH) -> PoolRecord:
    states = (DeviceState.FREE, DeviceState.FOREIGN, DeviceState.FOREIGN)
    seen = [DeviceObserved(device=Device(id=DeviceId(f"{prefix}{n}"), kind=DeviceKind.SLOT), state=state) for n, state in enumerate(states)]
    inventory = PoolInventory(pool=PoolName("cpu"), devices=seen, running=0, waiting=0, native=load)
    return msgspec.structs.replace(pool(0, freshness), inventory=inventory)


LOAD = NativeLoad(running=3, waiting=9, devices_busy=2, every_s=30.0, rpc_per_minute=4.04)


@pytest.mark.parametrize(
    ("lang", "shown", "said"),
    [
        ("en", holding("slot-", None), ["2 foreign, 1 free  (unchanged for "]),
        ("en", holding("slot-", None, Freshness.STALE), ["2 foreign, 1 free  (last known, "]),
        ("zh", holding("slot-", None), ["2 被其他进程占用,1 空闲  ("]),
        (
            "en",
            holding("lent-cpu-", LOAD),
            [
                "rights to queue there: 2 with the site's own users, 1 free  (unchanged for ",
                "beside our work its scheduler has 3 running and 9 waiting, on 2 of these devices; a look every 30 s costs it 4.0 RPC/min",
            ],
        ),
        (
            "zh",
            holding("lent-cpu-", LOAD),
            ["站点队列名额:2 站点用户占用,1 空闲  (", "站点自身作业:运行 3,排队 9,占用本池 2 个;每 30 秒查看一次"],
        ),
        (
            "en",
            holding("lent-cpu-", msgspec.structs.replace(LOAD, every_s=0.895216)),
            [
                "rights to queue there: ",
                "beside our work its scheduler has 3 running and 9 waiting, on 2 of these devices; a look every 0.9 s",
            ],
        ),
    ],
)
def test_what_a_pool_holds_is_said_by_its_kind(monkeypatch: pytest.MonkeyPatch, lang: str, shown: PoolRecord, said: list[str]) -> None:
    monkeypatch.setenv("INTERTIE_LANG", lang)
    assert shown.inventory is not None
    lines = held_lines(shown, shown.inventory)
    assert len(lines) == len(said) and all(line.startswith(begins) for line, begins in zip(lines, said, strict=True)), lines


def test_pools_that_a_job_did_not_name_are_one_line_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERTIE_LANG", "en")
    pin = "the job names site b"
    rows = [("a/cpu", "pin", pin), ("a/gpu", "pin", pin), ("b/gpu", "count", "the pool has 2 in all")]
    assert rejection_lines(rows) == ["b/gpu: the pool has 2 in all", "2 pools elsewhere: the job names site b"]
    assert rejection_lines(rows[1:], codes=True) == ["b/gpu: the pool has 2 in all [count]", "a/gpu: the job names site b [pin]"]
    assert rejection_lines([]) == []


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ("PENDING", "Resources", "PENDING (Resources)"),
        ("RUNNING", "None", "RUNNING"),
        ("COMPLETED", "COMPLETED", "COMPLETED"),
        ("Failed/Error", "Error", "Failed/Error"),
        ("Failed", "OOMKilled", "Failed (OOMKilled)"),
        ("", "", ""),
    ],
)
def test_a_scheduler_s_words_are_not_said_twice(state: str, reason: str, words: str) -> None:
    assert native_words(state, reason) == words
