"""The gateway's word on calls survives the gateway: told in order, once it is taken, whatever is away and whoever is killed."""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from intertie.contracts.call_offerings import CallOutcome
from intertie.contracts.calls import CallSeen
from intertie.errors import Unavailable
from intertie.gateway import call_spool
from intertie.gateway.call_spool import BATCH, Spool
from intertie.ids import CallId, OfferingName, PrincipalId, SiteName, TenantName

LIMIT_S = 30.0


def seen(number: int, outcome: CallOutcome = CallOutcome.COMPLETED) -> CallSeen:
    return CallSeen(
        call=CallId(f"call-{number:05}"),
        tenant=TenantName("acme"),
        principal=PrincipalId("prn-1"),
        site=SiteName("lab"),
        offering=OfferingName("chat"),
        opened=datetime(2026, 12, 1, tzinfo=UTC),
        end_us=5,
        outcome=outcome,
    )


class Metering:
    """Takes what it is told, unless it is away."""

    def __init__(self) -> None:
        self.away = False
        self.taken: list[CallSeen] = []
        self.news = asyncio.Event()

    async def __call__(self, calls: Sequence[CallSeen]) -> None:
        if self.away:
            self.news.set()
            raise Unavailable("bus.no_responder", "nobody answers")
        assert len(calls) <= BATCH
        self.taken += calls
        self.news.set()


async def told(spool: Spool, metering: Metering, count: int) -> None:
    """Run until so many were taken."""
    task = asyncio.create_task(spool.run(metering))
    try:
        async with asyncio.timeout(LIMIT_S):
            while len(metering.taken) < count:
                metering.news.clear()
                await metering.news.wait()
            await asyncio.sleep(0)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_ended_is_told_in_order_in_batches_and_the_file_is_empty_again(tmp_path: Path) -> None:
    spool, metering = Spool.open(tmp_path), Metering()
    for number in range(3 * BATCH + 7):
        spool.opened(seen(number))
        spool.closed(seen(number))
    await told(spool, metering, 3 * BATCH + 7)
    assert [one.call for one in metering.taken] == [f"call-{number:05}" for number in range(3 * BATCH + 7)]
    spool.close()
    assert not (again := Spool.open(tmp_path)).full
    await told_nothing(again)


async def told_nothing(spool: Spool) -> None:
    metering = Metering()
    assert not await spool._tell_some(metering) and metering.taken == []
    spool.close()


async def test_metering_may_be_away_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_spool, "RETRY_S", 0.01)
    spool, metering = Spool.open(tmp_path), Metering()
    metering.away = True
    spool.closed(seen(1))
    task = asyncio.create_task(spool.run(metering))
    async with asyncio.timeout(LIMIT_S):
        await metering.news.wait()
    spool.closed(seen(2))
    metering.away = False
    async with asyncio.timeout(LIMIT_S):
        while len(metering.taken) < 2:
            metering.news.clear()
            await metering.news.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [one.call for one in metering.taken] == ["call-00001", "call-00002"]
    spool.close()


async def test_what_was_under_way_when_the_gateway_was_killed_is_told_as_interrupted(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path)
    spool.opened(seen(1))
    spool.closed(seen(1))
    spool.opened(seen(2))
    spool.close()  # As a kill: nothing else was said.
    after, metering = Spool.open(tmp_path), Metering()
    await told(after, metering, 2)
    assert [(one.call, one.outcome.value, one.code) for one in metering.taken] == [
        ("call-00001", "completed", ""),
        ("call-00002", "interrupted", "call.gateway_restarted"),
    ]
    after.close()


async def test_what_is_under_way_stays_when_all_else_is_told(tmp_path: Path) -> None:
    spool, metering = Spool.open(tmp_path), Metering()
    spool.opened(seen(1))
    spool.closed(seen(2))
    await told(spool, metering, 1)
    spool.close()
    after, later = Spool.open(tmp_path), Metering()
    await told(after, later, 1)
    assert [(one.call, one.code) for one in later.taken] == [("call-00001", "call.gateway_restarted")]
    after.close()


async def test_half_a_line_that_a_full_disk_took_spoils_no_other(tmp_path: Path) -> None:
    """The disk takes so many bytes and no more: what does not fit whole leaves nothing behind."""
    spool, metering = Spool.open(tmp_path), Metering()
    spool.closed(seen(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "calls-0.spool").stat().st_size + 20, before[1]))  # noqa: ASYNC240
        with pytest.raises(Unavailable) as error:
            spool.opened(seen(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert error.value.code == "gateway.spool"
    spool.closed(seen(3))
    await told(spool, metering, 2)
    assert [one.call for one in metering.taken] == ["call-00001", "call-00003"]
    spool.close()


async def test_a_line_that_was_cut_off_or_cannot_be_read_stops_nothing(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path)
    spool.closed(seen(1))
    spool.close()
    file = tmp_path / "calls-0.spool"
    file.write_bytes(file.read_bytes() + b"cgarbage\n" + b'c{"call": "call-0')
    after, metering = Spool.open(tmp_path), Metering()
    after.closed(seen(2))
    await told(after, metering, 2)
    assert [one.call for one in metering.taken] == ["call-00001", "call-00002"]
    after.close()


def test_two_gateways_on_one_folder_have_a_file_each(tmp_path: Path) -> None:
    first, second = Spool.open(tmp_path), Spool.open(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calls-0.spool", "calls-1.spool"]
    first.close()
    second.close()


def test_a_record_says_the_same_after_the_disk() -> None:
    assert msgspec.json.decode(msgspec.json.encode(seen(1)), type=CallSeen) == seen(1)
