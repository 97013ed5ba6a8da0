"""A site whose work waits in a queue of its own: a real site and journal over a scheduler in memory, with the agent killed, and everything said once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from tests.fakes.agents import GUEST, offer, pool
from tests.fakes.sites import World, a_site

from intertie.agent import queued
from intertie.agent.adapters.fake_cluster import FakeCluster
from intertie.agent.adapters.files import RECORD_BYTES, LocalFiles, Owned
from intertie.agent.adapters.looks import Looks
from intertie.agent.adapters.port import Chunk, Listing, NativePhase, NativeWords
from intertie.agent.adapters.queue import QueueAdapter
from intertie.agent.core.images import ImageRules
from intertie.agent.core.model import State
from intertie.agent.core.rules import Rules
from intertie.clock import ManualClock, SystemClock
from intertie.contracts.job import Cause
from intertie.contracts.link import Claimed, Ended, Lane, NativeSeen, NotStarted, OfferBody, SegmentClosed, SiteQueued, Started
from intertie.contracts.usage import Segment, UsagePhase
from intertie.errors import Refused, Unavailable
from intertie.ids import AttemptId
from intertie.trust.keys import Key
from intertie.trust.seal import open_seal

CLOCK = SystemClock()
LIMIT_S = 60.0
IMAGE = "registry.example.cn/team/train@sha256:" + "a" * 64
MICROSECOND = timedelta(microseconds=1)


def a_cluster(devices: int = 8, **fields: object) -> FakeCluster:
    accounts = frozenset({GUEST}) if GUEST else frozenset[str]()
    return FakeCluster(CLOCK, nodes={"n1": devices}, accounts=accounts, **fields)  # type: ignore[arg-type]  # as its own


def over(folder: Path, cluster: FakeCluster, *, lag_s: float = 0.0) -> QueueAdapter:
    return QueueAdapter(folder / "jobs", cluster, LocalFiles(folder / "shared", look_s=0.05), CLOCK, every_s=0.2, lag_s=lag_s)


def speaking(world: World, version: int = 3) -> World:
    world.site.keeper_version = lambda: version
    return world


async def segments(world: World, attempt: AttemptId) -> list[Segment]:
    key = world.site.key.public
    told = [open_seal(e.sealed, key, Segment) for e in await world.entries(Lane.METERING) if isinstance(e, SegmentClosed)]
    return sorted((one for one in told if one.attempt == attempt), key=lambda one: one.start)


async def until(true: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    by = loop.time() + LIMIT_S
    while not true():
        assert loop.time() < by
        await asyncio.sleep(0.05)


async def submitted(cluster: FakeCluster, jobs: int) -> None:
    await until(lambda: len(cluster.jobs) >= jobs)


async def until_seen(world: World, text: str) -> NativeSeen:
    """The first word of the scheduler's that holds this text."""
    loop = asyncio.get_running_loop()
    by = loop.time() + LIMIT_S
    while True:
        for entry in await world.entries():
            if isinstance(entry, NativeSeen) and text in f"{entry.native_state} {entry.native_reason} {entry.text}":
                return entry
        assert loop.time() < by, f"{text} among {await world.kinds()}"
        await asyncio.sleep(0.05)


async def test_a_job_that_waits_in_the_site_s_own_queue_says_so_and_its_waiting_has_a_clock_of_its_own(short_folder: Path) -> None:
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster)) as world:
        speaking(world)
        cluster.hold(True)
        body = offer(script="sleep 0.3\n", devices=("slot-1", "slot-2"))
        await world.run(body)
        queued = await world.first(SiteQueued, LIMIT_S)
        assert (queued.native_id, queued.cluster, queued.native_state) == ("1", "fake", "PENDING")
        assert world.site.books.attempts[body.attempt].state is State.STAGING
        await until_seen(world, "JobHeldAdmin")
        cluster.hold(False)
        started = await world.first(Started, LIMIT_S)
        end = await world.first(Ended, LIMIT_S)
        assert (started.native_id, started.nodes, len(started.held_devices), started.devices) == ("1", ["n1"], 2, ["slot-1", "slot-2"])
        assert (end.outcome, end.native_state, end.suspended_us) == ("succeeded", "COMPLETED", 0)
        told = await segments(world, body.attempt)
        assert [one.phase for one in told] == [UsagePhase.STAGE_IN, UsagePhase.SITE_QUEUE, UsagePhase.RUN]
        assert all(before.end == after.start for before, after in zip(told, told[1:], strict=False))
        assert sum(one.quantity_milli * ((one.end - one.start) // MICROSECOND) for one in told) == end.quantity_milli_us
    await cluster.close()


async def test_a_keeper_that_does_not_know_of_queues_hears_what_it_knows(short_folder: Path) -> None:
    """A hub of link version 2 would set aside what it cannot read."""
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster)) as world:
        speaking(world, 2)
        await world.run(offer())
        await world.first(Ended, LIMIT_S)
        assert await world.kinds() == ["SettingsApplied", "Claimed", "Staging", "Started", "Ended"]
    await cluster.close()


async def test_suspended_time_is_cut_out_of_the_run(short_folder: Path) -> None:
    """BR-078: whatever the looks saw of it, the scheduler's own books say how long it was."""
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster)) as world:
        speaking(world)
        body = offer(script="sleep 3\n")
        await world.run(body)
        await world.first(Started, LIMIT_S)
        cluster.suspend(body.attempt)
        assert (await until_seen(world, "SUSPENDED")).suspended
        cluster.resume(body.attempt)
        end = await world.first(Ended, LIMIT_S)
        booked = cluster.job(body.attempt).suspended_us
        told = await segments(world, body.attempt)
        assert end.suspended_us == booked > 0
        assert sum((one.end - one.start) // MICROSECOND for one in told if one.phase is UsagePhase.SUSPENDED) == booked
        run_us = sum((one.end - one.start) // MICROSECOND for one in told if one.phase is UsagePhase.RUN)
        assert run_us + booked == end.ran_us
        assert all(before.end == after.start for before, after in zip(told, told[1:], strict=False))
    await cluster.close()


async def test_a_stop_of_what_waits_is_said_once_it_can_surely_never_start(short_folder: Path) -> None:
    """BR-048: also when the scheduler does not hear the cancel, and starts the job afterwards."""
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster)) as world:
        speaking(world)
        cluster.hold(True)
        body = offer(script="echo ran\n")
        await world.run(body)
        await world.first(SiteQueued, LIMIT_S)
        cluster.deaf = True
        await world.tell(world.stop(body))
        assert (await world.first(NotStarted, LIMIT_S)).code == "stopped"
        await world.site.idle()
        cluster.deaf = False
        cluster.hold(False)
        await until(lambda: cluster.job(body.attempt).phase is NativePhase.ENDED)
        assert (await world.site.adapter.log(body.attempt, 0, 100)).data == b""
        assert "Started" not in await world.kinds() and world.site.books.holds.holder == {}
    await cluster.close()


async def test_what_the_site_takes_out_of_its_queue_is_told_and_is_no_fault(short_folder: Path) -> None:
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster)) as world:
        cluster.hold(True)
        body = offer()
        await world.run(body)
        await submitted(cluster, 1)
        cluster.cancel_at_site(body.attempt)
        assert (await world.first(NotStarted, LIMIT_S)).code == "cancelled_at_site"
    await cluster.close()


@pytest.mark.parametrize(("image", "code"), [(IMAGE, "image_unfetched"), ("", "not_startable")])
async def test_an_image_that_is_nowhere_is_no_fault_of_the_site_where_the_job_named_it(short_folder: Path, image: str, code: str) -> None:
    """Else whoever names a digest that is nowhere keeps everybody's jobs from the site. The owner's own image is the owner's affair."""
    cluster, rules = a_cluster(), Rules(images=ImageRules(sources=["*"], runtime="apptainer"))
    async with a_site(short_folder, adapter=over(short_folder, cluster), rules=rules) as world:
        cluster.hold(True)
        body = offer()
        await world.run(msgspec.structs.replace(body, spec=msgspec.structs.replace(body.spec, image=image)))
        await submitted(cluster, 1)
        cluster.lose_image(body.attempt)
        told = await world.first(NotStarted, LIMIT_S)
        assert told.code == code and image in told.text
    await cluster.close()


async def test_what_the_queue_did_not_begin_in_time_never_starts(short_folder: Path) -> None:
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster)) as world:
        cluster.hold(True)
        await world.run(offer(start_by_s=1))
        assert (await world.first(NotStarted, LIMIT_S)).code == "start_too_late"
    await cluster.close()


async def test_what_waits_for_its_turn_is_only_hurried_into_the_queue(short_folder: Path) -> None:
    """Two limits: into the queue within the first, begun by the second."""
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster)) as world:
        cluster.hold(True)
        body = msgspec.structs.replace(offer(start_by_s=3_600), submit_within_s=1)
        await world.run(body)
        await submitted(cluster, 1)
        await asyncio.sleep(1.2)
        cluster.hold(False)
        assert (await world.first(Ended, LIMIT_S)).outcome == "succeeded"
    await cluster.close()


async def test_leased_work_that_waited_beyond_its_lease_does_not_start_beside_its_replacement(short_folder: Path) -> None:
    """LINK D6: the link is cut while it waits in the site's queue, the hub runs it elsewhere, and hours later its turn comes."""
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster)) as world:
        cluster.hold(True)
        body = offer(script="echo beside\n", lease_s=2)
        await world.run(body)
        await submitted(cluster, 1)
        await asyncio.sleep(2.5)
        cluster.hold(False)
        given_up = await world.first(NotStarted, LIMIT_S)
        assert (given_up.code, "lease" in given_up.text) == ("start_too_late", True)
        assert (await world.site.adapter.log(body.attempt, 0, 100)).data == b""
    await cluster.close()


async def test_what_the_scheduler_lost_before_it_began_is_given_up_and_what_it_forgot_while_running_is_not(short_folder: Path) -> None:
    """BR-010, BR-012: absence ends nothing that runs; its own record of the end does, when the books have none."""
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster, lag_s=0.5)) as world:
        speaking(world)
        running = offer(script="sleep 2\nexit 9\n")
        await world.run(running)
        await world.first(Started, LIMIT_S)
        cluster.lose(running.attempt)
        seen = await until_seen(world, "neither")
        assert seen.attempt == running.attempt and "Ended" not in await world.kinds()
        assert (await world.first(Ended, LIMIT_S)).exit_code == 9
        cluster.hold(True)
        waiting = offer(devices=("slot-2",))
        await world.run(waiting)
        await submitted(cluster, 2)
        cluster.lose(waiting.attempt)
        assert (await world.first(NotStarted, LIMIT_S)).attempt == waiting.attempt
    await cluster.close()


async def test_an_end_that_nobody_knows_is_unknown_and_laid_to_nobody(short_folder: Path) -> None:
    """A run that its scheduler started a second time: the second is refused, and of the first nobody saw the end, nor who asked for it."""
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster)) as world:
        body = offer(script="sleep 60\n")
        await world.run(body)
        await world.first(Started, LIMIT_S)
        cluster.requeue(body.attempt)
        end = await world.first(Ended, LIMIT_S)
        assert (end.outcome, end.cause, end.exit_code) == ("unknown", Cause.UNKNOWN, None)
        assert [type(e).__name__ for e in await world.entries()].count("Started") == 1
    await cluster.close()


async def play(folder: Path, cluster: FakeCluster, scheduler: Key, bodies: Sequence[OfferBody], seconds: float) -> None:
    """One life of the agent: it takes what is not claimed yet, and is gone in the middle of whatever it does."""
    async with a_site(folder, adapter=over(folder, cluster), pools=[pool(20)], scheduler=scheduler) as world:
        speaking(world)
        claimed = {entry.attempt for entry in await world.entries() if isinstance(entry, Claimed)}
        for body in bodies:
            if body.attempt not in claimed:
                await world.run(body)
        await asyncio.sleep(seconds)


async def test_twenty_jobs_with_the_agent_killed_again_and_again_are_each_run_once_and_counted_right(short_folder: Path) -> None:
    """Eight at a time, the rest in the site's own queue; every native run is one attempt's, and usage is what the site's own books say."""
    cluster, scheduler = a_cluster(8), Key.new("U")
    bodies = [offer(script=f"echo run {n}\nsleep 0.{n % 5 + 2}\nexit {n % 3}\n", devices=(f"slot-{n}",)) for n in range(1, 21)]
    for _ in range(4):
        await play(short_folder, cluster, scheduler, bodies, 0.4)
    async with a_site(short_folder, adapter=over(short_folder, cluster), pools=[pool(20)], scheduler=scheduler) as world:
        speaking(world)
        async with asyncio.timeout(LIMIT_S):
            await world.site.idle()
        ends = [entry for entry in await world.entries() if isinstance(entry, Ended)]
        assert sorted(end.attempt for end in ends) == sorted(body.attempt for body in bodies)
        told = [e for e in await world.entries(Lane.METERING) if isinstance(e, SegmentClosed)]
        books = {row.tag: row for row in await cluster.accounting(cluster.now() - timedelta(hours=1), cluster.now())}
        assert len(cluster.jobs) == len(books) == 20
        for n, body in enumerate(bodies, 1):
            (end,) = [end for end in ends if end.attempt == body.attempt]
            mine = [s for e in told if (s := decode_any(e)).attempt == body.attempt]
            assert (end.exit_code, end.segments) == (n % 3, len(mine))
            assert end.quantity_milli_us == sum(s.quantity_milli * ((s.end - s.start) // MICROSECOND) for s in mine)
            assert end.ran_us == books[body.attempt].elapsed_us, "what the site's own books say"
            assert (await world.site.adapter.log(body.attempt, 0, 100)).data == f"run {n}\n".encode()
        assert world.site.books.holds.holder == {} and world.site.running() == []
    await cluster.close()


def decode_any(entry: SegmentClosed) -> Segment:
    """Each life of the agent in this test has a key of its own."""
    return open_seal(entry.sealed, entry.sealed.signer, Segment)


def lose_journal(folder: Path) -> None:
    for part in folder.glob("journal.db*"):
        part.unlink()


class Shaky(LocalFiles):
    """Storage that is away when it is told to be."""

    away = False

    async def read(self, job: Owned, name: str, offset: int = 0, limit: int = RECORD_BYTES) -> Chunk | None:
        if self.away:
            raise Unavailable("agent.job_folders", "played to be away")
        return await super().read(job, name, offset, limit)

    async def claim(self, job: Owned) -> bool:
        if self.away:
            raise Unavailable("agent.job_folders", "played to be away")
        return await super().claim(job)


async def test_storage_that_is_away_neither_starts_nor_ends_nor_gives_up_anything(short_folder: Path) -> None:
    """Also not by the scheduler's word alone: the exit code lies in the folder, and is waited for."""
    cluster, files = a_cluster(), Shaky(short_folder / "shared", look_s=0.05)
    adapter = QueueAdapter(short_folder / "jobs", cluster, files, CLOCK, every_s=0.2, lag_s=0.0)
    async with a_site(short_folder, adapter=adapter) as world:
        cluster.hold(True)
        body = offer(script="echo told\nexit 8\n")
        await world.run(body)
        await submitted(cluster, 1)
        files.away = True
        cluster.hold(False)
        await until(lambda: cluster.job(body.attempt).phase is NativePhase.ENDED)
        asked = cluster.questions
        await until(lambda: cluster.questions > asked + 3)
        assert await world.kinds() == ["SettingsApplied", "Claimed", "Staging"]
        files.away = False
        end = await world.first(Ended, LIMIT_S)
        assert (end.exit_code, end.log_tail) == (8, "told\n")
    await cluster.close()


async def test_a_stop_without_effect_and_a_scheduler_without_an_answer_are_told_with_since_when(short_folder: Path) -> None:
    """BR-050: the attempt goes on, and is metered, until its processes are seen gone."""
    cluster = a_cluster()
    adapter = over(short_folder, cluster)
    async with a_site(short_folder, adapter=adapter) as world:
        speaking(world)
        body = offer(script="sleep 300\n")
        await world.run(body)
        await world.first(Started, LIMIT_S)
        cluster.make_unkillable(body.attempt)
        await world.tell(world.stop(body))
        adapter.stubborn_s = 0.0
        assert "without effect" in (await until_seen(world, "being stopped since")).text
        adapter.silent_s = 0.0
        cluster.deaf = True
        assert "has not answered since" in (await until_seen(world, "has not answered")).text
        assert "Ended" not in await world.kinds()
        cluster.deaf = False
        cluster.let_die(body.attempt)
        assert (await world.first(Ended, LIMIT_S)).outcome == "cancelled"
    await cluster.close()


async def test_work_in_the_queue_outlives_a_journal_that_was_lost(short_folder: Path) -> None:
    """The notes beside the job folders are the site's own record: what the scheduler has is found, told and metered."""
    cluster, scheduler = a_cluster(), Key.new("U")
    cluster.hold(True)
    body = offer(script="exit 6\n")
    async with a_site(short_folder, adapter=over(short_folder, cluster), scheduler=scheduler) as world:
        await world.run(body)
        await submitted(cluster, 1)
    lose_journal(short_folder)
    async with a_site(short_folder, adapter=over(short_folder, cluster), scheduler=scheduler) as world:
        assert world.site.running() == [body.attempt]
        cluster.hold(False)
        end = await world.first(Ended, LIMIT_S)
        assert (end.attempt, end.exit_code, len(cluster.jobs)) == (body.attempt, 6, 1)
    await cluster.close()


async def test_the_site_s_own_users_are_sent_to_their_own_scheduler(short_folder: Path) -> None:
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster)) as world:
        with pytest.raises(Refused) as refused:
            await world.site.owner.submit(name="mine", script="true\n", env={}, cwd="/", uid=0)
        assert refused.value.code == "agent.local_native"


async def test_a_reason_that_changes_at_every_look_is_told_now_and_then(short_folder: Path) -> None:
    """What somebody reads is the first new reason at once; a busy site's queue is no stream of entries."""
    cluster = a_cluster()
    async with a_site(short_folder, adapter=over(short_folder, cluster)) as world:
        speaking(world)
        cluster.hold(True)
        body = offer(script="exit 0\n")
        await world.run(body)
        await until_seen(world, "JobHeldAdmin")
        for turn in range(10):
            cluster.job(body.attempt).reason = ("Priority", "Resources")[turn % 2]
            asked = cluster.questions
            await until(lambda asked=asked: cluster.questions > asked)  # type: ignore[misc]  # bound at once
        assert (await world.kinds()).count("NativeSeen") <= 2
        cluster.hold(False)
        await world.first(Ended, LIMIT_S)
    await cluster.close()


async def test_what_was_given_up_and_is_in_no_queue_is_asked_to_go_no_more(short_folder: Path) -> None:
    """A submit that was refused left nothing there: neither its cancel nor a look at it goes on for as long as its folder is kept."""
    clock = ManualClock()
    cluster = FakeCluster(clock, nodes={"n1": 2})
    looks = Looks(cluster, clock, 30.0)
    looks.stopping(AttemptId("att-never"), 0)
    for _ in range(6):
        clock.advance(40.0)
        await looks.tidy()
    asked = cluster.questions
    for _ in range(20):
        clock.advance(40.0)
        await looks.tidy()
    assert 0 < asked < 14 and cluster.questions == asked


async def test_what_is_silent_is_asked_to_go_until_it_answers(short_folder: Path) -> None:
    clock = ManualClock()
    cluster = FakeCluster(clock, nodes={"n1": 2})
    looks = Looks(cluster, clock, 30.0)
    looks.stopping(AttemptId("att-waits"), 0)
    cluster.deaf = True
    for _ in range(20):
        clock.advance(40.0)
        await looks.tidy()
    before, cluster.deaf = cluster.questions, False
    clock.advance(40.0)
    await looks.tidy()
    assert cluster.questions > before, "no answer is no absence"


class SlowCluster(FakeCluster):
    """Whose answers take as long as it is told, and so does it to fail."""

    takes_s = 0.0

    async def status(self, tags: Collection[AttemptId]) -> Listing:
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(self.takes_s)
        return await super().status(tags)


async def test_a_look_that_failed_is_tried_again_soon_however_long_it_took() -> None:
    """What it took says nothing of what an answer costs: an outage that timed out hides no end for minutes after it is over."""
    cluster = SlowCluster(ManualClock(), nodes={"n1": 2})
    looks = Looks(cluster, cluster.clock, 30.0)
    for takes_s, deaf, every_s in [
        (0.1, False, 30.0),
        (3.0, False, 60.0),
        (30.0, False, 300.0),
        (0.1, True, 30.0),
        (45.0, True, 45.0),
        (59.0, True, 59.0),
        (70.0, True, 60.0),
        (0.1, False, 30.0),
    ]:
        cluster.takes_s, cluster.deaf = takes_s, deaf
        await looks.look()
        assert looks.every_s == pytest.approx(every_s), (takes_s, deaf)


class OddWords(QueueAdapter):
    """Breaks on the first word of the scheduler's, by a fault that nobody foresaw."""

    broke = False

    async def words(self, attempt: AttemptId, before: NativeWords | None) -> NativeWords:
        if not self.broke:
            self.broke = True
            raise KeyError("nobody foresaw this")
        return await super().words(attempt, before)


async def test_a_word_that_breaks_us_silences_none_that_follow(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued, "REASON_S", 0.1)
    cluster = a_cluster()
    adapter = OddWords(short_folder / "jobs", cluster, LocalFiles(short_folder / "shared", look_s=0.05), CLOCK, every_s=0.2, lag_s=0.0)
    async with a_site(short_folder, adapter=adapter) as world:
        speaking(world)
        cluster.hold(True)
        await world.run(offer(script="exit 0\n"))
        await until_seen(world, "JobHeldAdmin")
        assert adapter.broke
