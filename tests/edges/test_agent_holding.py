"""What a site holds: in which journal, after whom, before whose work, from which folder; and when it takes nothing new. One site, real processes."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from tests.fakes.agents import offer, pool
from tests.fakes.sites import World, a_site

from intertie.agent.books import save
from intertie.agent.core.model import Attempt, State, with_state
from intertie.agent.core.room import MIB, Space
from intertie.agent.core.rules import Rules
from intertie.agent.reopen import HELD_BYTES, begin, in_parts, reopen, tell_held
from intertie.contracts.base import encode
from intertie.contracts.link import (
    Claimed,
    Ended,
    HeldAttempt,
    HeldTold,
    JournalOpened,
    Lane,
    NotStarted,
    OfferBody,
    OfferRefused,
    Sealed,
    SiteCondition,
    Staging,
    Started,
    StopAnswered,
)
from intertie.contracts.site import DeviceKind
from intertie.errors import Unavailable
from intertie.ids import AttemptId, JobId, JournalId
from intertie.link.site import Reopen
from intertie.trust.keys import Key
from intertie.trust.seal import open_seal, seal

ELSEWHERE = JournalId("jnl-elsewhere")


async def holders(world: World) -> dict[str, str]:
    """As the database has it."""
    rows = await world.journal.read(lambda cursor: cursor.execute("SELECT device, attempt FROM hold").fetchall())
    found = {str(device): str(attempt) for device, attempt in rows}
    assert found == {device: name for (_, device), name in world.site.books.holds.holder.items()}
    return found


async def until(holds: Callable[[], object], what: str, limit_s: float = 20.0) -> None:
    deadline = asyncio.get_running_loop().time() + limit_s
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, f"never: {what}"
        await asyncio.sleep(0.02)


async def local(world: World, *, slots: int = 1, script: str = "sleep 60\n") -> Attempt:
    return await world.site.owner.submit(name="mine", script=script, env={}, cwd="/tmp", uid=os.geteuid(), slots=slots)


async def stopped(world: World, *bodies: OfferBody) -> None:
    for body in bodies:
        await world.tell(world.stop(body))
    async with asyncio.timeout(20):
        await world.site.idle()


# --- journals ---


async def test_a_go_for_another_journal_starts_nothing(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        body = offer()
        await world.tell(world.offered(body))
        await world.tell(world.go(body, ELSEWHERE))
        assert (await world.first(NotStarted)).code == "other_journal"
        assert world.site.running() == [] and await holders(world) == {}


async def test_a_go_that_names_this_journal_starts(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        body = offer()
        await world.tell(world.offered(body))
        await world.tell(world.go(body, world.journal.id))
        assert (await world.first(Ended)).outcome == "succeeded"


async def reclaimed(folder: Path, key: Key, body: OfferBody, state: State) -> None:
    """Leave a claim (or what has its go) behind that lies in another journal."""
    async with a_site(folder, scheduler=key) as world:
        await world.tell(world.offered(body))
        attempt = world.site.books.attempts[body.attempt]
        moved = with_state(attempt, state, claim_journal=ELSEWHERE, go_boot_s=world.clock.boot_s(), go_sent_boot_s=world.clock.boot_s())
        await world.journal.write(save(moved))


async def test_what_was_claimed_in_another_journal_of_this_place_is_given_up(short_folder: Path) -> None:
    key = Key.new("U")
    claimed, staged = offer(), offer(devices=("slot-2",))
    await reclaimed(short_folder, key, claimed, State.CLAIMED)
    await reclaimed(short_folder, key, staged, State.STAGING)
    async with a_site(short_folder, scheduler=key) as world:
        await world.site.tick()
        async with asyncio.timeout(20):
            await world.site.idle()
        told = [entry for entry in await world.entries() if isinstance(entry, NotStarted)]
        assert {(entry.attempt, entry.code) for entry in told} == {(body.attempt, "other_journal") for body in (claimed, staged)}


async def test_where_it_may_have_begun_elsewhere_nothing_is_said_of_it_and_nothing_starts(short_folder: Path) -> None:
    """The folder was copied: what lies in the copy is no evidence of what the original did since."""
    key = Key.new("U")
    claimed, staged = offer(start_within_s=1), offer(devices=("slot-2",))
    await reclaimed(short_folder, key, claimed, State.CLAIMED)
    await reclaimed(short_folder, key, staged, State.STAGING)
    async with a_site(short_folder, scheduler=key) as world:
        world.site.same_place = False
        await world.tell(world.go(claimed, world.journal.id))
        await world.site.tick()
        async with asyncio.timeout(20):
            await world.site.idle()
        assert not {"NotStarted", "Started"} & set(await world.kinds())
        assert sorted(await holders(world)) == ["slot-1", "slot-2"]


async def test_while_another_session_rules_what_has_its_go_waits(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        world.site.may_start = lambda: False
        body = offer()
        await world.run(body)
        await world.first(Staging)
        mine = await local(world, script="exit 0\n")
        await until(lambda: world.site.books.attempts[mine.id].state is State.ENDED, "the owner's own job ends")
        assert "Started" not in await world.kinds(), "the owner's own work runs meanwhile"
        world.site.may_start = lambda: True
        assert (await world.first(Ended)).outcome == "succeeded"


# --- one after the other ---


async def test_a_start_waits_until_those_that_it_comes_after_are_seen_gone(short_folder: Path) -> None:
    """BR-058: told to end is not gone; what it holds is held until its last process is."""
    async with a_site(short_folder, pools=[pool(2)]) as world:
        first = offer(script="trap '' TERM\nwhile :; do sleep 0.1; done\n", devices=("slot-1", "slot-2"))
        await world.run(first)
        await world.first(Started)
        second = offer(after=[first.attempt], devices=("slot-2",))
        await world.tell(world.stop(first), world.offered(second))
        await world.tell(world.go(second))
        third = offer(devices=("slot-2",))
        await world.tell(world.offered(third))
        refused = await world.first(OfferRefused)
        assert (refused.attempt, refused.code) == (third.attempt, "device_busy")
        assert await holders(world) == {"slot-1": first.attempt, "slot-2": first.attempt}
        async with asyncio.timeout(20):
            await world.site.idle()
        told = [(type(entry).__name__, entry.attempt) for entry in await world.entries() if isinstance(entry, Claimed | Started | Ended)]
        assert told == [
            ("Claimed", first.attempt),
            ("Started", first.attempt),
            ("Claimed", second.attempt),
            ("Ended", first.attempt),
            ("Started", second.attempt),
            ("Ended", second.attempt),
        ]
        assert await holders(world) == {}


async def test_an_heir_is_an_heir_also_after_a_restart(short_folder: Path) -> None:
    key = Key.new("U")
    first, second = offer(script="sleep 60\n"), offer(script="sleep 60\n")
    second = msgspec.structs.replace(second, after=[first.attempt])
    async with a_site(short_folder, scheduler=key) as world:
        await world.run(first)
        await world.first(Started)
        await world.run(second)
        await world.first(Staging)
    async with a_site(short_folder, scheduler=key) as world:
        assert await holders(world) == {"slot-1": first.attempt}
        await world.tell(world.stop(first))
        await until(lambda: set(world.site.books.holds.holder.values()) == {second.attempt}, "the second one holds it")
        await stopped(world, second)
        assert await holders(world) == {}


async def test_who_waits_too_long_for_others_is_given_up_by_start_by(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        first = offer(script="sleep 60\n")
        await world.run(first)
        await world.first(Started)
        second = offer(after=[first.attempt], start_by_s=1)
        await world.run(second)
        late = await world.first(NotStarted)
        assert (late.attempt, late.code) == (second.attempt, "start_too_late") and first.attempt in late.text
        assert await holders(world) == {"slot-1": first.attempt}
        await stopped(world, first)


# --- owner first ---


async def test_the_owner_s_own_work_takes_a_claim_s_devices_and_the_claim_says_so_first(short_folder: Path) -> None:
    async with a_site(short_folder, pools=[pool(2)]) as world:
        running, claimed = offer(script="sleep 60\n"), offer(devices=("slot-2",))
        await world.run(running)
        await world.first(Started)
        await world.tell(world.offered(claimed))
        mine = await local(world)
        assert (mine.state, mine.devices) == (State.STAGING, ["slot-2"])
        gone = await world.first(NotStarted)
        assert (gone.attempt, gone.code) == (claimed.attempt, "displaced")
        await world.tell(world.go(claimed))
        assert await holders(world) == {"slot-1": running.attempt, "slot-2": mine.id}
        await world.site.owner.cancel(mine.id, os.geteuid(), everyone=False)
        await stopped(world, running)
        assert [entry.attempt for entry in await world.entries() if isinstance(entry, Started)] == [running.attempt]


async def test_what_runs_is_never_displaced(short_folder: Path) -> None:
    async with a_site(short_folder, pools=[pool(1)]) as world:
        running = offer(script="sleep 60\n")
        await world.run(running)
        await world.first(Started)
        mine = await local(world)
        assert mine.state is State.WAITING and await world.site.displace_for(DeviceKind.SLOT, 1) == []
        await world.site.owner.cancel(mine.id, os.geteuid(), everyone=False)
        await stopped(world, running)


async def test_an_owner_who_does_not_go_first_waits_for_the_claim(short_folder: Path) -> None:
    async with a_site(short_folder, pools=[pool(1)], rules=Rules(owner_first=False)) as world:
        claimed = offer(script="exit 0\n")
        await world.tell(world.offered(claimed))
        mine = await local(world, script="exit 0\n")
        assert mine.state is State.WAITING and await holders(world) == {"slot-1": claimed.attempt}
        await world.tell(world.go(claimed))
        await until(lambda: world.site.books.attempts[mine.id].state is State.ENDED, "the owner's own job ends")
        assert "NotStarted" not in await world.kinds()


async def test_a_displacement_that_races_with_a_go_ends_in_one_of_two_ways(short_folder: Path) -> None:
    for _ in range(8):
        folder = short_folder / str(_)
        folder.mkdir()
        async with a_site(folder, pools=[pool(1)]) as world:
            body = offer(script="sleep 60\n")
            await world.tell(world.offered(body))
            freed, _told = await asyncio.gather(world.site.displace_for(DeviceKind.SLOT, 1), world.tell(world.go(body)))
            state = world.site.books.attempts[body.attempt].state
            assert bool(freed) == (state is State.NOT_STARTED)
            await stopped(world, body)
            kinds = await world.kinds()
            assert ("Started" in kinds) != ("NotStarted" in kinds)


# --- folders outlive a journal ---


def lose_journal(folder: Path) -> None:
    for file in folder.glob("journal.db*"):
        file.unlink()


async def test_work_is_found_in_its_folder_by_an_agent_whose_journal_is_gone(short_folder: Path) -> None:
    key = Key.new("U")
    body = offer(script="until [ -e go ]; do sleep 0.05; done; exit 3\n", env={"TOKEN": "s3cret"})
    async with a_site(short_folder, scheduler=key) as world:
        await world.run(body)
        await world.first(Started)
    lose_journal(short_folder)
    async with a_site(short_folder, scheduler=key) as world:
        assert await holders(world) == {"slot-1": body.attempt} and world.site.running() == [body.attempt]
        await world.first(Started)
        [held] = await world.site.search()
        assert (held.attempt, held.generation, held.state, held.native_id != "") == (body.attempt, 1, "running", True)
        assert held.offer is not None and open_seal(held.offer, key.public, OfferBody) == bare(body)
        (short_folder / "jobs" / body.attempt / "work" / "go").touch()
        end = await world.first(Ended)
        assert (end.exit_code, (await world.kinds()).count("Started")) == (3, 1)
        again = offer(job=body.job, generation=1)
        await world.tell(world.offered(again))
        assert (await world.first(OfferRefused)).code == "stale_generation", "what it knew of the job's generations is known again"


async def test_an_end_that_nobody_told_is_told_by_an_agent_whose_journal_is_gone(short_folder: Path) -> None:
    """BR-056: a site's own record of an end stays until the hub holds it, whatever becomes of its books."""
    key = Key.new("U")
    body = offer(script="echo bye\nexit 4\n")
    async with a_site(short_folder, scheduler=key) as world:
        await world.run(body)
        await world.first(Ended)
        async with asyncio.timeout(20):
            await world.site.idle()
    lose_journal(short_folder)
    async with a_site(short_folder, scheduler=key) as world:
        end = await world.first(Ended)
        assert (end.exit_code, end.log_tail) == (4, "bye\n")
        async with asyncio.timeout(20):
            await world.site.idle()
        await world.tell(world.settle(body))
        assert await world.site.search() == []
    lose_journal(short_folder)
    async with a_site(short_folder, scheduler=key) as world:
        assert world.site.books.attempts == {}, "what is settled is not dug up again"


async def test_what_was_prepared_under_a_lost_journal_and_had_not_begun_never_begins(short_folder: Path) -> None:
    key = Key.new("U")
    body = offer()
    async with a_site(short_folder, scheduler=key) as world:
        world.site.may_start = lambda: False
        await world.run(body)
        await until((short_folder / "jobs" / body.attempt / "spec.json").exists, "it is prepared")
    lose_journal(short_folder)
    async with a_site(short_folder, scheduler=key) as world:
        assert world.site.books.attempts == {} and await world.site.search() == []
        assert not (short_folder / "jobs" / body.attempt / "started.json").exists()
        assert (short_folder / "jobs" / body.attempt / "fenced").exists()


SECRET = {"TOKEN": "s3cret-of-the-offer"}


def bare(body: OfferBody) -> OfferBody:
    return msgspec.structs.replace(body, env={})


async def test_the_offer_is_kept_without_values_of_the_environment_and_outlives_the_work(short_folder: Path) -> None:
    """BR-144: what is kept is told again, weeks later."""
    async with a_site(short_folder) as world:
        body = offer(env=SECRET)
        await world.run(body)
        await world.first(Ended)
        async with asyncio.timeout(20):
            await world.site.idle()
        kept = short_folder / "jobs" / body.attempt / "attempt.json"
        assert kept.stat().st_mode & 0o777 == 0o600 and b"s3cret" not in kept.read_bytes()
        [held] = await world.site.search()
        assert held.offer is not None and open_seal(held.offer, world.scheduler.public, OfferBody) == bare(body)
        await world.tell(world.settle(body))
        assert not kept.exists() and await world.site.search() == []
        [lately] = await world.site.search(ended_since=world.clock.now() - timedelta(hours=1))
        assert (lately.state, lately.offer) == ("ended", held.offer)
        assert await world.site.search(ended_since=world.clock.now() + timedelta(hours=1)) == []
        rows = await world.journal.read(
            lambda cursor: cursor.execute("SELECT body FROM attempt UNION ALL SELECT body FROM entry").fetchall()
        )
        assert rows and not any(b"s3cret" in bytes(body) for (body,) in rows)


async def test_of_an_older_hub_s_offer_with_values_nothing_is_kept(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        body = offer(env=SECRET)
        other = seal(world.scheduler, encode(bare(offer())), "scheduler")
        await world.tell(msgspec.structs.replace(world.offered(body), adoption=None))
        wrong = offer(env=SECRET, devices=("slot-2",))
        await world.tell(msgspec.structs.replace(world.offered(wrong), adoption=other))
        held = await world.site.search()
        assert {(one.attempt, one.offer) for one in held} == {(body.attempt, None), (wrong.attempt, None)}, "nor a copy of another body"


# --- told after a restore of the hub ---


async def told(world: World) -> list[HeldTold]:
    return [entry for entry in await world.entries() if isinstance(entry, HeldTold)]


async def test_what_is_held_is_told_once_for_each_epoch_also_over_a_restart(short_folder: Path) -> None:
    key, body = Key.new("U"), offer(script="sleep 60\n")
    async with a_site(short_folder, scheduler=key) as world:
        await world.run(body)
        await world.first(Started)
        await local(world, script="exit 0\n")
        for epoch in (2, 2, 1):
            await tell_held(world.site, epoch)
    async with a_site(short_folder, scheduler=key) as world:
        for epoch in (2, 3):
            await tell_held(world.site, epoch)
        lists = await told(world)
        assert [(one.epoch, one.complete, [(h.attempt, h.state) for h in one.held]) for one in lists] == [
            (epoch, True, [(body.attempt, "running")]) for epoch in (2, 3)
        ], "and the owner's own work is named to nobody"
        await stopped(world, body)


async def test_a_disk_that_refuses_the_list_has_it_asked_for_again(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_site(short_folder) as world:

        async def full(*_: object) -> None:
            raise Unavailable("agent.disk_full", "no room")

        with monkeypatch.context() as patched:
            patched.setattr(world.site, "append", full)
            with pytest.raises(Unavailable):
                await tell_held(world.site, 2)
        assert await told(world) == []
        await tell_held(world.site, 2)
        [only] = await told(world)
        assert only.complete and only.held == []


def test_a_long_list_takes_several_entries_the_latest_attempts_first() -> None:
    sealed = Sealed(payload="x" * 1_000, signer="scheduler", signature="s")

    def held(number: int, offered: Sealed = sealed) -> HeldAttempt:
        return HeldAttempt(
            attempt=AttemptId(f"att-{number:04}"), job=JobId("job"), epoch=1, generation=number, state="ended", offer=offered
        )

    many = [held(number) for number in range(1, 1_001)]
    parts = in_parts(many)
    assert [one.generation for part in parts for one in part] == list(range(1_000, 0, -1))
    assert len(parts) > 4 and all(len(encode(part)) <= HELD_BYTES + 2 for part in parts)
    assert in_parts([]) == [[]]
    large, huge = (msgspec.structs.replace(sealed, payload="x" * size) for size in (300_000, 600_000))
    alone = in_parts([held(1), held(3, large), held(2, huge)])
    assert [[(one.generation, one.offer is not None) for one in part] for part in alone] == [[(3, True)], [(2, False), (1, True)]]


async def test_books_older_than_the_folders_hold_no_device_twice(short_folder: Path) -> None:
    """A journal restored from a copy says that an ended attempt holds what another one runs on by now."""
    key = Key.new("U")
    first, second = offer(script="exit 0\n"), offer(script="sleep 60\n")
    async with a_site(short_folder, scheduler=key) as world:
        await world.tell(world.offered(first))
    shutil.copy(short_folder / "journal.db", short_folder / "copy")
    async with a_site(short_folder, scheduler=key) as world:
        await world.tell(world.go(first))
        await world.first(Ended)
        await world.run(second)
        await until(lambda: world.site.books.attempts[second.attempt].state is State.RUNNING, "the second one runs")
    lose_journal(short_folder)
    shutil.move(short_folder / "copy", short_folder / "journal.db")
    async with a_site(short_folder, scheduler=key) as world:
        await until(lambda: set(world.site.books.holds.holder.values()) == {second.attempt}, "the second one holds it")
        assert [entry.attempt for entry in await world.entries() if isinstance(entry, Ended)] == [first.attempt]
        await stopped(world, second)


# --- room ---


def disk(free_mib: int) -> Sequence[Space]:
    return [Space("/data", free_mib * MIB, 1_000_000 * MIB)]


async def conditions(world: World) -> list[tuple[bool, str]]:
    return [(entry.accepting, entry.code) for entry in await world.entries(Lane.REGISTRY) if isinstance(entry, SiteCondition)]


async def test_without_room_nothing_new_is_taken_and_what_runs_goes_on(short_folder: Path) -> None:
    key = Key.new("U")
    running, second = offer(script="until [ -e go ]; do sleep 0.05; done\n"), offer(devices=("slot-2",))
    async with a_site(short_folder, scheduler=key) as world:
        await world.run(running)
        await world.first(Started)
        world.site.room.spaces = lambda: disk(100)
        await world.site.tick()
        await world.site.tick()
        await world.tell(world.offered(second))
        refused = await world.first(OfferRefused)
        assert (refused.code, refused.fault) == ("disk_low", False)
        try:
            await local(world)
            raise AssertionError("local work was taken")
        except Unavailable as err:
            assert err.code == "agent.disk_low" and "640 MiB" in err.text and err.next_step
        (short_folder / "jobs" / running.attempt / "work" / "go").touch()
        assert (await world.first(Ended)).outcome == "succeeded"
        assert await conditions(world) == [(False, "disk_low")]
    async with a_site(short_folder, scheduler=key) as world:
        world.site.room.spaces = lambda: disk(100)
        await world.site.tick()
        assert await conditions(world) == [(False, "disk_low")], "a restart says nothing that was said"
        world.site.room.spaces = lambda: disk(1_000)
        await world.site.tick()
        assert await conditions(world) == [(False, "disk_low"), (True, "")]
        third = offer(script="exit 0\n")
        await world.run(third)
        await world.first(Claimed)
        async with asyncio.timeout(20):
            await world.site.idle()


async def test_an_answer_to_a_stop_needs_no_room(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        body = offer(script="sleep 60\n")
        await world.run(body)
        await world.first(Started)
        world.site.room.spaces = lambda: disk(0)
        await world.site.tick()
        await world.tell(world.stop(body))
        assert (await world.first(StopAnswered)).answer == "stopping"
        await world.first(Ended)


async def test_two_lanes_that_ask_for_a_new_journal_in_the_same_moment_get_one(short_folder: Path) -> None:
    """A second one would name the first as the one before it, and the hub would not know where its attempts were claimed."""
    async with a_site(short_folder) as world:
        await begin(world.site)
        before = world.journal.id
        asked = Reopen(journal=before, why="agent_restored")
        await asyncio.gather(*(reopen(world.site, lane, asked) for lane in Lane))
        [opened] = [said for said in await world.entries(Lane.SCHEDULER) if isinstance(said, JournalOpened)]
        assert opened.previous == before and world.journal.id != before
