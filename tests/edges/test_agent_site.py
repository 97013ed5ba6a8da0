"""One site with its real journal and real processes, and nobody else: what it says of each thing that can happen to an attempt."""

from __future__ import annotations

import asyncio
import base64
import io
import subprocess
import tarfile
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from tests.fakes.agents import offer, pool
from tests.fakes.sites import MemoryGateway, World, a_site, settings

from intertie.agent import procs
from intertie.agent.books import put_setting, save
from intertie.agent.core.model import State, StopAsked, with_state
from intertie.agent.door import read_log
from intertie.contracts.base import encode
from intertie.contracts.job import Cause
from intertie.contracts.link import (
    Claimed,
    Ended,
    Lane,
    NotStarted,
    OfferRefused,
    ResultStored,
    SegmentClosed,
    SettingsApplied,
    Staging,
    Started,
    StopAnswered,
)
from intertie.contracts.site import DeviceState
from intertie.contracts.usage import Segment, UsagePhase
from intertie.errors import Refused, Unavailable
from intertie.ids import DeviceId
from intertie.trust.keys import Key, verify
from intertie.trust.seal import open_seal, seal


async def ended(world: World) -> Ended:
    found = await world.first(Ended)
    await world.site.idle()
    return found


async def test_a_job_runs_and_its_end_carries_the_counts_of_its_segments(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        body = offer(script="echo hello\nexit 0\n", devices=("slot-1", "slot-2"))
        await world.run(body)
        end = await ended(world)
        assert await world.kinds() == ["SettingsApplied", "Claimed", "Staging", "Started", "Ended"]
        segments = [
            open_seal(e.sealed, world.site.key.public, Segment) for e in await world.entries(Lane.METERING) if isinstance(e, SegmentClosed)
        ]
        assert [s.phase for s in segments] == [UsagePhase.STAGE_IN, UsagePhase.RUN]
        run = segments[-1]
        assert (end.outcome, end.exit_code, end.cause, end.log_tail) == ("succeeded", 0, None, "hello\n")
        assert (run.end - run.start) == timedelta(microseconds=end.ran_us)
        assert (run.start, run.end) == (end.started, end.ended)
        assert segments[0].end == run.start
        total = sum(s.quantity_milli * ((s.end - s.start) // timedelta(microseconds=1)) for s in segments)
        assert (end.segments, end.quantity_milli_us, end.last_metering_seq) == (2, total, 2)
        assert run.quantity_milli == 2000 and run.last and not segments[0].last
        assert run.attribution == body.attribution
        assert world.site.books.holds.holder == {} and world.site.running() == []


async def test_a_segment_is_sealed_with_the_site_s_own_key(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        await world.run(offer())
        await ended(world)
        entry = await world.first(SegmentClosed)
        signature = base64.urlsafe_b64decode(entry.sealed.signature + "==")
        assert entry.sealed.signer == world.site.key.public
        assert verify(world.site.key.public, entry.sealed.payload.encode(), signature)


async def test_a_failure_of_the_job_is_the_job_s(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        await world.run(offer(script="echo broken >&2\nexit 3\n"))
        end = await ended(world)
        assert (end.outcome, end.cause, end.exit_code, end.log_tail) == ("failed", Cause.JOB, 3, "broken\n")


async def test_an_offer_that_somebody_else_sealed_is_refused_and_nothing_is_held(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        await world.tell(world.offered(offer(), key=Key.new("U")))
        refused = await world.first(OfferRefused)
        assert (refused.code, refused.fault) == ("seal", True)
        assert world.site.books.attempts == {} and world.site.running() == []


async def test_a_busy_device_is_refused_without_fault_and_a_repeat_gets_the_same_answer(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        held, second = offer(script="sleep 30\n"), offer()
        await world.run(held)
        await world.tell(world.offered(second))
        await world.tell(world.offered(second))
        refused = [entry for entry in await world.entries() if isinstance(entry, OfferRefused)]
        assert [(r.code, r.fault) for r in refused] == [("device_busy", False), ("stopped_before", False)]
        await world.first(Started)
        await world.tell(world.stop(held))
        await ended(world)


async def test_the_same_offer_again_is_one_claim(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        body = offer()
        await world.tell(world.offered(body))
        await world.tell(world.offered(body))
        assert (await world.kinds()).count("Claimed") == 1


async def test_a_go_too_long_after_the_sync_that_brought_the_offer_starts_nothing(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        body = offer(start_within_s=5)
        await world.tell(world.offered(body), sent_boot_s=world.clock.boot_s() - 6)
        await world.tell(world.go(body))
        late = await world.first(NotStarted)
        assert late.code == "go_too_late" and world.site.books.holds.holder == {}


async def test_a_claim_without_a_go_gives_its_devices_back(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        body = offer(start_within_s=5)
        await world.tell(world.offered(body), sent_boot_s=world.clock.boot_s() - 6)
        assert world.site.books.holds.holder
        await world.site.tick()
        assert (await world.first(NotStarted)).code == "go_too_late"
        await world.tell(world.go(body))
        await world.site.idle()
        assert "Started" not in await world.kinds()


async def test_a_go_that_does_not_acknowledge_the_claim_starts_nothing_yet(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        body = offer()
        await world.tell(world.offered(body))
        go = world.go(body)
        await world.site.take(await world.journal.take([go]), sent_boot_s=world.clock.boot_s(), acknowledged=0)
        assert world.site.books.attempts[body.attempt].state is State.CLAIMED
        await world.site.tick()
        await world.tell(go)
        assert (await ended(world)).outcome == "succeeded"


async def test_what_has_its_go_starts_after_a_crash_with_hub_and_bus_gone(short_folder: Path) -> None:
    scheduler, body = Key.new("U"), offer()
    async with a_site(short_folder, scheduler=scheduler) as world:
        await world.run(body)
        assert world.site.books.attempts[body.attempt].state is State.STAGING
        assert "Started" not in await world.kinds()
    async with a_site(short_folder, scheduler=scheduler) as world:
        assert (await ended(world)).outcome == "succeeded"
        assert (await world.kinds()).count("Started") == 1


async def test_a_claim_from_before_a_reboot_is_not_started(short_folder: Path) -> None:
    key = Key.new("U")
    body = offer()
    async with a_site(short_folder, scheduler=key) as world:
        await world.tell(world.offered(body))
        go = world.go(body)
    async with a_site(short_folder, scheduler=key, boot="after") as world:
        await world.tell(go)
        assert (await world.first(NotStarted)).code == "rebooted"
        assert world.site.running() == []


@pytest.mark.parametrize(("attempt_epoch", "told"), [(1, 1), (None, 7)], ids=["by its own epoch", "by a hub of before"])
async def test_a_withdrawal_of_what_never_came_names_the_attempt_as_it_was_made(
    short_folder: Path, attempt_epoch: int | None, told: int
) -> None:
    """After a restore a withdrawal is said again in a later epoch; its answer is of the attempt, not of the instruction."""
    async with a_site(short_folder) as world:
        body = offer()
        late = msgspec.structs.replace(world.withdraw(body), epoch=7, attempt_epoch=attempt_epoch)
        await world.tell(late)
        answer = await world.first(NotStarted)
        assert (answer.attempt, answer.epoch, answer.generation) == (body.attempt, told, body.generation)


async def test_a_withdrawn_claim_never_runs(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        body = offer()
        await world.tell(world.offered(body))
        await world.tell(world.withdraw(body), world.go(body))
        await world.site.idle()
        assert (await world.first(NotStarted)).code == "withdrawn"
        assert "Started" not in await world.kinds()


async def test_a_stop_that_comes_before_its_offer_leaves_a_tombstone(short_folder: Path) -> None:
    """BR-048."""
    key = Key.new("U")
    body = offer()
    async with a_site(short_folder, scheduler=key) as world:
        await world.tell(world.stop(body))
        assert (await world.first(StopAnswered)).answer == "unknown_attempt"
    async with a_site(short_folder, scheduler=key) as world:
        await world.tell(world.offered(body))
        assert (await world.first(OfferRefused)).code == "stopped_before"


async def test_a_stop_reaches_an_older_attempt_while_a_newer_one_is_known(short_folder: Path) -> None:
    """D7: refusing it as stale would leave two runs side by side."""
    async with a_site(short_folder) as world:
        old = offer(script="sleep 30\n", job="job-x", generation=1)
        await world.run(old)
        await world.first(Started)
        new = offer(script="exit 0\n", job="job-x", generation=3, devices=("slot-2",))
        await world.tell(world.offered(new))
        await world.tell(world.stop(old))
        end = await world.first(Ended)
        assert (end.attempt, end.outcome) == (old.attempt, "cancelled")


async def test_a_generation_not_above_the_highest_seen_is_refused_also_after_a_restart(short_folder: Path) -> None:
    key = Key.new("U")
    async with a_site(short_folder, scheduler=key) as world:
        await world.run(offer(job="job-x", generation=2))
        await ended(world)
    async with a_site(short_folder, scheduler=key) as world:
        await world.tell(world.offered(offer(job="job-x", generation=2)))
        assert (await world.first(OfferRefused)).code == "stale_generation"


async def test_cancelled_is_said_when_the_processes_are_gone(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        body = offer(script="sleep 30 & sleep 30\n")
        await world.run(body)
        started = await world.first(Started)
        await world.tell(world.stop(body, "the user asked"))
        end = await ended(world)
        assert (await world.first(StopAnswered)).answer == "stopping"
        assert (end.outcome, end.cause, end.reason) == ("cancelled", Cause.CANCELLED, "the user asked")
        assert procs.parent(int(started.native_id)) is None


async def test_a_second_stop_is_answered_too(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        body = offer()
        await world.run(body)
        await ended(world)
        await world.tell(world.stop(body))
        assert (await world.first(StopAnswered)).answer == "already_ended"


async def test_an_agent_that_returns_keeps_the_job_it_was_running(short_folder: Path) -> None:
    key = Key.new("U")
    async with a_site(short_folder, scheduler=key) as world:
        await world.run(offer(script="sleep 1\nexit 5\n"))
        await world.first(Started)
    async with a_site(short_folder, scheduler=key) as world:
        end = await ended(world)
        assert (end.exit_code, end.outcome) == (5, "failed")
        assert await world.kinds() == ["SettingsApplied", "Claimed", "Staging", "Started", "Ended"]
        assert end.segments == len(await world.entries(Lane.METERING))


async def test_a_start_that_the_agent_could_not_write_down_is_found_and_told_once(short_folder: Path) -> None:
    """BR-046, BR-060: the agent died between the supervisor's record and its own."""
    key = Key.new("U")
    body = offer(script="exit 4\n")
    async with a_site(short_folder, scheduler=key) as world:
        await world.tell(world.offered(body))
        await world.tell(world.go(body))
        await world.first(Started)
        await ended(world)
        row = with_state(world.site.books.attempts[body.attempt], State.STAGING, started=None, ended=None)
        await world.journal.write(save(row))
        before = len(await world.entries())
    async with a_site(short_folder, scheduler=key) as world:
        await world.site.idle()
        later = (await world.entries())[before:]
        assert [type(e).__name__ for e in later] == ["Started", "Ended"]
        assert isinstance(later[1], Ended) and later[1].exit_code == 4


async def test_a_stop_that_the_agent_died_over_is_done_by_the_next_one(short_folder: Path) -> None:
    key = Key.new("U")
    body = offer(script="sleep 60\n")
    async with a_site(short_folder, scheduler=key) as world:
        await world.run(body)
        await world.first(Started)
        asked = StopAsked(reason="cancelled", grace_s=0, by="hub")
        await world.journal.write(save(with_state(world.site.books.attempts[body.attempt], State.RUNNING, stop=asked)))
    async with a_site(short_folder, scheduler=key) as world:
        assert (await ended(world)).outcome == "cancelled"


def packed(**files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


async def test_work_is_fetched_and_outputs_come_back_when_the_gateway_does(short_folder: Path) -> None:
    gateway = MemoryGateway()
    work = gateway.add(packed(input="6 7"))
    async with a_site(short_folder, gateway=gateway) as world:
        body = offer(script="read a b < input\necho $((a*b)) > answer.txt\nsleep 0.3\n", outputs=["answer.txt"])
        body = msgspec.structs.replace(body, spec=msgspec.structs.replace(body.spec, work=work))
        await world.run(body)
        await world.first(Started)
        gateway.away = True
        end = await world.first(Ended)
        assert end.result is not None and end.result.digest not in gateway.objects
        assert world.site.running() == []
        gateway.away = False
        stored = await world.first(ResultStored)
        assert stored.result == end.result
        with tarfile.open(fileobj=io.BytesIO(gateway.objects[end.result.digest])) as tar:
            file = tar.extractfile("answer.txt")
            assert file is not None and file.read() == b"42\n"
        segments = [
            open_seal(e.sealed, world.site.key.public, Segment) for e in await world.entries(Lane.METERING) if isinstance(e, SegmentClosed)
        ]
        assert [s.phase for s in segments] == [UsagePhase.STAGE_IN, UsagePhase.RUN, UsagePhase.STAGE_OUT]


async def test_a_result_that_waited_over_a_restart_is_delivered(short_folder: Path) -> None:
    key, gateway = Key.new("U"), MemoryGateway(away=True)
    async with a_site(short_folder, scheduler=key, gateway=gateway) as world:
        await world.run(offer(script="echo 1 > a\n", outputs=["a"]))
        await world.first(Ended)
    gateway.away = False
    async with a_site(short_folder, scheduler=key, gateway=gateway) as world:
        assert (await world.first(ResultStored)).result is not None


async def test_work_that_cannot_be_fetched_by_start_by_is_not_started_and_was_never_a_second_of_usage(short_folder: Path) -> None:
    gateway = MemoryGateway()
    work = gateway.add(b"pack")
    gateway.away = True
    async with a_site(short_folder, gateway=gateway) as world:
        body = offer(start_by_s=1)
        body = msgspec.structs.replace(body, spec=msgspec.structs.replace(body.spec, work=work))
        await world.run(body)
        late = await world.first(NotStarted)
        await world.site.idle()
        assert late.code == "start_too_late" and await world.entries(Lane.METERING) == []


async def test_a_pack_that_reaches_out_of_its_folder_is_not_started(short_folder: Path) -> None:
    gateway = MemoryGateway()
    work = gateway.add(packed(**{"../../out": "x"}))
    async with a_site(short_folder, gateway=gateway) as world:
        body = offer()
        body = msgspec.structs.replace(body, spec=msgspec.structs.replace(body.spec, work=work))
        await world.run(body)
        assert (await world.first(NotStarted)).code == "pack.unsafe"
        assert not (short_folder / "out").exists()


async def test_settings_count_only_if_the_scheduler_sealed_a_higher_revision(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        newer = settings("acme", revision=5)
        with pytest.raises(Refused, match=r"seal\.invalid"):
            await world.site.apply(seal(Key.new("U"), encode(newer), "scheduler"), 5)
        await world.site.apply(seal(world.scheduler, encode(newer), "scheduler"), 5)
        await world.site.apply(seal(world.scheduler, encode(settings("other", revision=4)), "scheduler"), 4)
        assert world.site.settings == newer
        assert [e.revision for e in await world.entries() if isinstance(e, SettingsApplied)] == [1, 5]


async def test_the_inventory_is_told_when_it_changes_and_not_otherwise(short_folder: Path) -> None:
    async with a_site(short_folder, pools=[pool(2)]) as world:
        await world.site.observe({})
        await world.site.observe({})
        assert await world.kinds(Lane.REGISTRY) == ["Inventory"]
        await world.site.observe({DeviceId("slot-1"): DeviceState.LOST})
        assert await world.kinds(Lane.REGISTRY) == ["Inventory", "Inventory"]


async def test_values_of_the_environment_are_gone_from_the_journal_after_the_end(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        body = offer(env={"TOKEN": "s3cret-value"})
        await world.run(body)
        await ended(world)
        assert world.site.books.attempts[body.attempt].env == {}
        rows = await world.journal.read(lambda cursor: cursor.execute("SELECT body FROM attempt").fetchall())
        assert all(b"s3cret-value" not in row[0] for row in rows)


async def test_a_stop_while_the_work_is_being_fetched_starts_nothing(short_folder: Path) -> None:
    gateway = MemoryGateway()
    work = gateway.add(packed(a="1"))
    gateway.away = True
    async with a_site(short_folder, gateway=gateway) as world:
        body = offer()
        body = msgspec.structs.replace(body, spec=msgspec.structs.replace(body.spec, work=work))
        await world.run(body)
        await world.first(Staging)
        await world.tell(world.stop(body))
        gateway.away = False
        await world.site.idle()
        assert await world.kinds() == ["SettingsApplied", "Claimed", "Staging", "StopAnswered", "NotStarted"]
        assert (await world.first(StopAnswered)).answer == "not_started"
        assert world.site.running() == [] and world.site.books.holds.holder == {}


async def test_on_a_full_disk_nothing_is_promised_and_the_repeat_is_taken_when_there_is_room(short_folder: Path) -> None:
    disk = short_folder / "disk"
    disk.mkdir()
    mounted = await asyncio.to_thread(
        subprocess.run, ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0711", "none", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.decode().strip()}")
    try:
        async with a_site(disk) as world:
            body = offer()
            told = world.offered(body)
            fresh = await world.journal.take([told])
            await asyncio.to_thread(fill, disk / "ballast")
            # What is left of the journal's last pages takes a few entries more.
            with pytest.raises(Unavailable, match=r"agent\.disk_full"):
                for n in range(2_000):
                    await world.journal.write(put_setting(f"filler-{n}", "x" * 2_000))
            await world.site.take(fresh, sent_boot_s=world.clock.boot_s(), acknowledged=0)
            assert world.site.running() == [] and world.site.books.holds.holder == {} and world.site.books.seen == {}
            (disk / "ballast").unlink()
            await world.site.tick()
            await world.tell(told)
            assert (await world.first(Claimed)).attempt == body.attempt
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", "-l", str(disk)], check=False)


def fill(ballast: Path) -> None:
    """Until the disk refuses."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4_096)
        except OSError:
            return


async def test_a_settled_attempt_loses_its_work_and_keeps_its_log_and_its_answer(short_folder: Path) -> None:
    key = Key.new("U")
    async with a_site(short_folder, scheduler=key) as world:
        body = offer(script="echo still readable\n")
        await world.run(body)
        await ended(world)
        await world.tell(world.settle(body), world.settle(body))
        assert not (short_folder / "jobs" / body.attempt / "work").exists()
    async with a_site(short_folder, scheduler=key) as world:
        read = await read_log(world.site, world.site.books.attempts[body.attempt], 0, 1_000)
        assert (read.text, read.ended) == ("still readable\n", True)
        await world.tell(world.offered(body), world.stop(body))
        assert (await world.first(StopAnswered)).answer == "already_ended"
