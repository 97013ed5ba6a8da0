"""A lane between its two shells on the bus in memory, with the tables in memory: what is answered, when, and what is never answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from tests.edges.lane_world import CLOCK, LANE, POISON, A, B, Service, Site, ask, joined, kept, stop, until
from tests.edges.store_world import running

from intertie.agent.journal import SqliteJournal
from intertie.agent.journal_rows import Bounds
from intertie.bus.memory import MemoryBroker, MemoryBus, site_account
from intertie.bus.port import Message
from intertie.clock import SystemClock
from intertie.contracts.base import BATCH_BYTES
from intertie.contracts.incident import FaultReported
from intertie.contracts.link import (
    LINK_VERSION,
    Clocks,
    JournalOpened,
    Lane,
    LaneState,
    LostRange,
    Sealed,
    Settle,
    Sync,
    nudge_subject,
    sync_subject,
)
from intertie.errors import Stale, Unavailable
from intertie.ids import AttemptId, InstructionId, JournalId, SessionId, SiteName
from intertie.lane.keeper import RECOVERED_S, SINGLE_BYTES, LaneKeeper, Settings
from intertie.lane.memory import MemoryLaneTables
from intertie.lane.tables import LaneEntry
from intertie.link.clocks import TRY_S
from intertie.link.journal import first_digest
from intertie.store import MemoryStore

# Some beats of the tests' pace: what would repeat has repeated.
QUIET_S = 1.0


class Ahead(SystemClock):
    """A hub whose monotonic clock can be put ahead."""

    ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s


@dataclass
class World:
    broker: MemoryBroker
    hub: MemoryBus
    store: MemoryStore
    tables: MemoryLaneTables
    service: Service

    def site(self, name: SiteName = A) -> Site:
        return Site(self.account(name), name)

    def account(self, name: SiteName) -> MemoryBus:
        return self.broker.client(f"agent-{name}", site_account(name))

    def faults(self) -> list[tuple[str, bool]]:
        return [(one.report.key, one.report.recovered) for one in self.store.events if isinstance(one, FaultReported)]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    broker = MemoryBroker()
    store = MemoryStore("scheduler")
    tables = MemoryLaneTables(store)
    yield World(broker, broker.client("hub"), store, tables, Service(tables, store))


def first_sync(site: SiteName = A, *, nonce: int = 1, said: SiteName | None = None) -> Sync:
    """An idle sync of a new journal."""
    journal = JournalId(f"jnl-{site}")
    return Sync(
        site=said or site,
        session=SessionId("ses-1"),
        lane=LANE,
        nonce=nonce,
        taken_nonce=nonce - 1,
        journal=journal,
        first_seq=1,
        digest_before=first_digest(journal),
        entries=[],
        at_head=True,
        clocks=Clocks(utc=CLOCK.now(), boot_s=float(nonce), kernel_boot="boot-1"),
    )


# --- the common path -----------------------------------------------------------------------------------------------------------------------


async def test_an_entry_is_on_disk_interpreted_and_forgotten_at_the_site(world: World) -> None:
    site = world.site()
    async with kept(world.hub, world.service), joined(site):
        await site.write(1, 2)
        await site.lane.flush(5)
        assert world.service.said == {A: [1, 2]}
        assert await site.marks() == (2, 2)
        row = await world.tables.site(LANE, A)
    assert row is not None
    assert (row.ack_through, row.at_head, row.running, row.interpreted_through) == (2, True, ("att-1",), 2)


async def test_where_a_commit_is_not_all_the_safety_the_site_forgets_nothing(world: World) -> None:
    site = world.site()
    async with kept(world.hub, world.service, single=False), joined(site):
        await site.write(1)
        await site.lane.flush(5)
        assert await site.marks() == (1, 0)


async def test_a_backlog_of_a_thousand_entries_arrives_in_batches_in_order(world: World) -> None:
    site = world.site()
    await site.write(*range(1000, 2000), padding=1_000)
    async with kept(world.hub, world.service), joined(site):
        await site.lane.flush(20)
        await until(lambda: len(world.service.said.get(A, [])) == 1_000, "all interpreted")
    assert world.service.said[A] == list(range(1000, 2000))
    batches = [row for row in world.service.heard if not row.at_head]
    assert len(batches) >= 3, "at most 256 KiB travel at once"
    assert all(row.running is None for row in batches)


async def test_an_instruction_is_taken_once_and_repeated_until_the_service_has_its_answer(world: World) -> None:
    site = world.site()
    world.service.open[A] = [stop(1), stop(2)]
    async with kept(world.hub, world.service), joined(site):
        await until(lambda: len(site.exchanges) >= 3, "three exchanges")
    assert site.taken == [stop(1), stop(2)]
    assert all(len(exchange.synced.instructions) == 2 for exchange in site.exchanges)
    assert world.service.marks[-1].number == 2


async def test_what_comes_of_an_entry_is_in_the_answer_that_acknowledges_it(world: World) -> None:
    """A claim and its go are one round trip."""
    site = world.site()

    async def claims(entry: LaneEntry) -> None:
        world.service.open[A] = [stop(7)]

    world.service.hold = claims
    async with kept(world.hub, world.service), joined(site):
        await site.write(1)
        await site.lane.flush(5)
        exchange = next(one for one in site.exchanges if one.synced.ack_through == 1)
    assert exchange.synced.instructions == [stop(7)]
    assert exchange.sent_boot_s <= exchange.answered_boot_s
    assert exchange.synced.lease_s == 60


async def test_a_slow_interpretation_does_not_hold_back_the_answer_and_a_nudge_brings_what_came_of_it(world: World) -> None:
    site = world.site()
    go = asyncio.Event()

    async def slow(entry: LaneEntry) -> None:
        await go.wait()
        world.service.open[A] = [stop(7)]

    world.service.hold = slow
    async with kept(world.hub, world.service), joined(site):
        await site.write(1)
        await site.lane.flush(5)
        assert world.service.said == {}
        nudged = asyncio.Event()

        async def hear(_: Message) -> None:
            nudged.set()

        await world.hub.subscribe(nudge_subject(A), hear)
        go.set()
        await until(lambda: site.taken == [stop(7)], "the instruction")
        await asyncio.wait_for(nudged.wait(), 5)
    assert world.service.said == {A: [1]}


async def test_a_nudge_asks_for_an_early_sync(world: World) -> None:
    site = world.site()
    async with kept(world.hub, world.service) as keeper, joined(site):
        await site.lane.flush(5)
        before = len(site.exchanges)
        await keeper.nudge(A)
        await until(lambda: len(site.exchanges) > before, "an exchange")


async def test_settings_travel_when_the_site_has_older_ones(world: World) -> None:
    sealed = Sealed(payload="{}", signer="identity", signature="x")
    asked: list[int] = []

    async def settings(site: SiteName, revision: int) -> Settings | None:
        asked.append(revision)
        return Settings(5, sealed) if revision < 5 else None

    async with kept(world.hub, world.service, settings=settings):
        found = await ask(world.account(A), first_sync())
        assert (found.settings, found.settings_revision) == (sealed, 5)
        again = await ask(world.account(A), msgspec.structs.replace(first_sync(nonce=2), settings_revision=5))
        assert again.settings is None
    assert asked == [0, 5]


# --- bounds ---------------------------------------------------------------------------------------------------------------------------------


async def test_instructions_beyond_the_size_of_an_answer_come_in_the_next_ones(world: World) -> None:
    site = world.site()
    world.service.open[A] = [stop(n, reason="r" * 3_900) for n in range(1, 201)]
    async with kept(world.hub, world.service), joined(site):
        await until(lambda: len(site.taken) == 200, "all instructions")
    assert [one.number for one in site.taken] == list(range(1, 201))
    assert all(len(msgspec.json.encode(one.synced)) <= BATCH_BYTES for one in site.exchanges)
    assert site.exchanges[0].synced.more


async def test_new_instructions_pass_those_that_only_repeat(world: World) -> None:
    world.service.open[A] = [stop(n, reason="r" * 3_900) for n in range(1, 101)]
    async with kept(world.hub, world.service):
        said = msgspec.structs.replace(first_sync(), instruction_mark=99, instruction_epoch=1)
        found = await ask(world.account(A), said)
    assert [one.number for one in found.instructions[:2]] == [100, 1]
    assert found.more


async def test_an_instruction_that_can_never_travel_is_reported_and_stops_no_other(world: World) -> None:
    huge = msgspec.structs.replace(stop(1), reason="r" * SINGLE_BYTES)
    world.service.open[A] = [huge, stop(2)]
    async with kept(world.hub, world.service):
        found = await ask(world.account(A), first_sync())
    assert found.instructions == [stop(2)]
    assert world.faults() == [("lane.instruction_too_large/site-a/scheduler", False)]


# --- poison, delay, absence ---------------------------------------------------------------------------------------------------------------


async def test_an_entry_that_cannot_be_interpreted_is_set_aside_and_stops_nothing(world: World) -> None:
    site = world.site()
    async with kept(world.hub, world.service), joined(site):
        await site.write(1, POISON, 3)
        await site.lane.flush(5)
        await until(lambda: world.service.said.get(A) == [1, 3], "the others")
        await site.lane.flush(5)
        assert site.exchanges[-1].synced.quarantined == 1
    assert await site.marks() == (3, 3)
    assert world.faults() == [("lane.quarantine/site-a/scheduler", False)]
    assert list(world.tables.quarantined.values()) == ["service.poison: this entry says what cannot be"]


@pytest.mark.parametrize("error", [KeyError("our bug"), AssertionError("our bug")])
async def test_a_bug_in_the_service_sets_the_entry_aside_too(world: World, error: Exception) -> None:
    site = world.site()

    async def bug(entry: LaneEntry) -> None:
        if entry.seq == 1:
            raise error

    world.service.hold = bug
    async with kept(world.hub, world.service), joined(site):
        await site.write(1, 2)
        await until(lambda: world.service.said.get(A) == [2], "the second")
    assert len(world.tables.quarantined) == 1


async def test_an_entry_that_the_service_forgets_to_mark_does_not_loop_for_ever(world: World) -> None:
    site = world.site()
    seen: list[int] = []

    async def forgets(entry: LaneEntry) -> None:
        seen.append(entry.seq)

    world.service.interpret = forgets  # type: ignore[method-assign]  # the service under test is this function
    async with kept(world.hub, world.service), joined(site):
        await site.write(1)
        await until(lambda: len(world.tables.quarantined) == 1, "set aside")
    assert seen == [1]


@pytest.mark.parametrize("error", [Unavailable("store.unavailable", "away"), Stale("store.conflict", "again")])
async def test_an_entry_that_cannot_be_interpreted_now_waits_and_keeps_its_turn(world: World, error: Exception) -> None:
    site = world.site()
    tries: list[int] = []

    async def not_yet(entry: LaneEntry) -> None:
        tries.append(entry.seq)
        if len(tries) < 4:
            raise error

    world.service.hold = not_yet
    async with kept(world.hub, world.service), joined(site):
        await site.write(1, 2)
        await site.lane.flush(5)
        await until(lambda: world.service.said.get(A) == [1, 2], "both")
    assert tries == [1, 1, 1, 1, 2]
    assert world.faults() == []


async def test_what_a_keeper_that_died_left_open_is_interpreted_by_the_next(world: World) -> None:
    site = world.site()
    stuck = asyncio.Event()

    async def hang(entry: LaneEntry) -> None:
        stuck.set()
        await asyncio.get_running_loop().create_future()

    world.service.hold = hang
    async with joined(site):
        async with kept(world.hub, world.service):
            await site.write(1, 2)
            await site.lane.flush(5)
            await stuck.wait()
        world.service.hold = None
        async with kept(world.hub, world.service):
            await until(lambda: world.service.said.get(A) == [1, 2], "both")


async def test_with_the_store_away_nothing_is_answered_and_nothing_lost(world: World) -> None:
    site = world.site()
    async with kept(world.hub, world.service), joined(site):
        await site.lane.flush(5)
        world.tables.away = True
        await site.write(1)
        with pytest.raises(Unavailable, match="lane.not_flushed"):
            await site.lane.flush(0.3)
        assert await site.marks() == (0, 0)
        world.tables.away = False
        await site.lane.flush(10)
        await until(lambda: world.service.said.get(A) == [1], "the entry")


async def test_without_its_service_an_answer_still_acknowledges(world: World) -> None:
    async def away(*_: object) -> None:
        raise Unavailable("store.unavailable", "away")

    world.service.instructions = away  # type: ignore[assignment,method-assign]  # the service under test is this function
    world.service.on_heard = away  # type: ignore[assignment,method-assign]  # the service under test is this function
    async with kept(world.hub, world.service):
        found = await ask(world.account(A), first_sync())
    assert (found.state, found.instructions) == (LaneState.OK, [])


async def test_idle_sites_to_whom_nothing_need_be_said_are_asked_for_at_once_and_not_singly(world: World) -> None:
    asked: list[Mapping[SiteName, int]] = []

    async def quiet(sites: Mapping[SiteName, int]) -> Collection[SiteName]:
        asked.append(sites)
        return sites.keys() - {B}

    world.service.open[B] = [settle(1)]
    async with kept(world.hub, world.service, quiet=quiet):
        one, other = await ask(world.account(A), first_sync(A)), await ask(world.account(B), first_sync(B))
    assert (one.state, one.instructions, other.state, len(other.instructions)) == (LaneState.OK, [], LaneState.OK, 1)
    assert asked == [{A: 0}, {B: 0}]
    assert len(world.service.marks) == 1, "only the second site's instructions were read"
    assert [row.site for row in world.service.heard] == [A, B]


async def test_a_site_with_news_is_asked_for_singly_however_quiet_it_was(world: World) -> None:
    async def quiet(sites: Mapping[SiteName, int]) -> Collection[SiteName]:
        return sites.keys()

    site = world.site()
    async with kept(world.hub, world.service, quiet=quiet), joined(site):
        await site.write(1)
        await site.lane.flush(5)
        assert world.service.said == {A: [1]}
        assert world.service.marks, "an entry may be what an instruction waited for"


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_service_that_cannot_say_who_is_quiet_does_not_keep_the_answer(world: World, hangs: bool) -> None:
    async def quiet(_: Mapping[SiteName, int]) -> Collection[SiteName]:
        if hangs:
            await asyncio.get_running_loop().create_future()
        raise Unavailable("store.unavailable", "away")

    async with kept(world.hub, world.service, quiet=quiet):
        found = await ask(world.account(A), first_sync(), timeout_s=TRY_S)
    assert (found.state, found.instructions) == (LaneState.OK, [])


async def test_a_service_that_hangs_does_not_keep_the_answer_past_the_sites_patience(world: World) -> None:
    async def hangs(*_: object) -> None:
        await asyncio.get_running_loop().create_future()

    world.service.instructions = hangs  # type: ignore[assignment,method-assign]  # the service under test is this function
    world.service.on_heard = hangs  # type: ignore[assignment,method-assign]  # the service under test is this function
    async with kept(world.hub, world.service):
        found = await ask(world.account(A), first_sync(), timeout_s=TRY_S)
    assert (found.state, found.instructions) == (LaneState.OK, [])


async def test_a_row_that_another_copy_holds_is_answered_busy_and_the_site_asks_again(world: World) -> None:
    site = world.site()
    world.tables.held.add((LANE, A))
    async with kept(world.hub, world.service), joined(site):
        with pytest.raises(Unavailable):
            await site.lane.flush(0.2)
        world.tables.held.clear()
        await site.lane.flush(5)


# --- groups and neighbours ----------------------------------------------------------------------------------------------------------------


async def test_syncs_that_wait_share_one_commit_also_empty_ones(world: World) -> None:
    """LINK D29: a commit for each would cost most of the rate."""
    names = [SiteName(f"site-{n}") for n in range(40)]
    async with kept(world.hub, world.service):
        before = world.tables.commits
        found = await asyncio.gather(*(ask(world.account(name), first_sync(name)) for name in names))
        commits = world.tables.commits - before
    assert {one.state for one in found} == {LaneState.OK}
    assert commits <= 3
    assert [row.heard for row in await world.tables.sites(LANE)] == [1] * 40


async def test_a_site_whose_entries_wait_delays_no_other(world: World) -> None:
    """BR-123."""
    one, other = world.site(A), world.site(B)

    async def hang(entry: LaneEntry) -> None:
        if entry.site == A:
            await asyncio.get_running_loop().create_future()

    world.service.hold = hang
    async with kept(world.hub, world.service), joined(one, other):
        await one.write(1)
        await other.write(2)
        await other.lane.flush(5)
        await until(lambda: world.service.said == {B: [2]}, "the other site's entry")


async def test_a_sync_that_the_tables_do_not_take_silences_no_neighbour(world: World) -> None:
    account = world.account(A)
    async with kept(world.hub, world.service):
        await ask(account, first_sync(A))
        # Two entries under one number cannot be: what the rows say of A contradicts what the entries say.
        key = (LANE, A, JournalId("jnl-site-a"), 1)
        world.tables.entries[key] = LaneEntry(A, LANE, key[2], 1, first_digest(key[2]), b"{}", CLOCK.now())
        broken = msgspec.structs.replace(first_sync(A, nonce=2), entries=[msgspec.Raw(b'{"seq":1}')])
        bad, good = await asyncio.gather(ask(account, broken, timeout_s=0.5), ask(world.account(B), first_sync(B)), return_exceptions=True)
        assert isinstance(bad, Unavailable)
        assert not isinstance(good, BaseException) and good.state is LaneState.OK
        await until(lambda: ("lane.unrecorded/site-a/scheduler", False) in world.faults(), "the report")


async def test_of_two_tries_of_one_site_only_the_later_is_answered(world: World) -> None:
    account = world.account(A)
    async with kept(world.hub, world.service):
        # Both arrive before the first commit begins.
        early, late = await asyncio.gather(
            ask(account, first_sync(nonce=1), timeout_s=0.3), ask(account, first_sync(nonce=2)), return_exceptions=True
        )
    assert isinstance(early, Unavailable)
    assert not isinstance(late, BaseException) and late.nonce == 2


# --- who speaks -----------------------------------------------------------------------------------------------------------------------------


async def test_the_site_is_the_one_in_the_subject_whatever_the_payload_says(world: World) -> None:
    async with kept(world.hub, world.service):
        with pytest.raises(Unavailable):
            await ask(world.account(A), first_sync(A, said=B), timeout_s=0.3)
        assert await world.tables.sites(LANE) == []
        await until(lambda: world.faults() == [("link.site_mismatch/site-a/scheduler", False)], "the report")


async def test_another_lanes_sync_and_garbage_are_refused_and_reported_once(world: World) -> None:
    account = world.account(A)
    async with kept(world.hub, world.service):
        wrong_lane = msgspec.structs.replace(first_sync(), lane=Lane.METERING)
        for body in (msgspec.json.encode(wrong_lane), b"{}", b"\xff", b"[]", b'{"nonce": "1"}'):
            with pytest.raises(Unavailable):
                await account.request("up.scheduler.sync", body, timeout_s=0.1)
        found = await ask(account, first_sync())
    assert found.state is LaneState.OK, "the lane lives on"
    assert world.faults() == [("link.lane_mismatch/site-a/scheduler", False), ("contract.invalid/site-a/scheduler", False)]


async def test_an_answer_goes_only_to_an_inbox(world: World) -> None:
    heard: list[Message] = []

    async def trap(message: Message) -> None:
        heard.append(message)

    async with kept(world.hub, world.service):
        await world.hub.subscribe("intertie.v1.cmd.scheduler.submit", trap)
        message = Message(sync_subject(A, LANE), msgspec.json.encode(first_sync()), {}, "intertie.v1.cmd.scheduler.submit")
        world.broker.publish("", message)
        await ask(world.account(B), first_sync(B))
    assert heard == []
    assert [row.site for row in await world.tables.sites(LANE)] == [B]


# --- faults of either side's memory ---------------------------------------------------------------------------------------------------------


async def test_a_forked_journal_is_reported_once_and_nothing_of_it_is_taken(world: World) -> None:
    site = world.site()
    async with kept(world.hub, world.service):
        async with joined(site):
            copy = site.disk.copy()
            await site.write(1, 2)
            await site.lane.flush(5)
        clone = Site(site.bus, disk=copy, session="ses-2")
        await clone.write(7, 8, 9)
        async with joined(clone):
            await until(lambda: clone.lane.trouble is not None, "the trouble")
            await asyncio.sleep(QUIET_S)
        assert await clone.marks() == (0, 0)
        assert (clone.taken, clone.exchanges) == ([], [])
    assert world.service.said == {A: [1, 2]}
    assert world.faults() == [("lane.forked/site-a/scheduler", False)]


async def test_a_hub_restored_from_a_backup_acknowledges_nothing(world: World) -> None:
    site = world.site()
    async with kept(world.hub, world.service), joined(site):
        await site.write(1)
        await site.lane.flush(5)
        saved = world.tables.sites_kept[(LANE, A)]
        await site.write(2)
        await site.lane.flush(5)
        world.tables.sites_kept[(LANE, A)] = saved
        await site.write(3)
        await until(lambda: site.lane.trouble is not None, "the trouble")
        assert await site.marks() == (2, 2)
    assert ("lane.hub_restored/site-a/scheduler", False) in world.faults()


async def test_a_lane_that_moves_again_says_so(world: World) -> None:
    site, clock = world.site(), Ahead()
    async with kept(world.hub, world.service, clock=clock), joined(site):
        await site.write(1)
        await site.lane.flush(5)
        whole = world.tables.sites_kept[(LANE, A)]
        del world.tables.sites_kept[(LANE, A)]
        await until(lambda: world.faults() == [("lane.hub_restored/site-a/scheduler", False)], "the fault")
        world.tables.sites_kept[(LANE, A)] = whole
        await until(lambda: site.lane.trouble is None, "the site's own trouble is over")
        clock.ahead_s = RECOVERED_S
        await until(lambda: world.faults()[1:] == [("lane.hub_restored/site-a/scheduler", True)], "its end")


async def test_two_agents_that_take_turns_are_one_fault_not_one_each_beat(world: World) -> None:
    site = world.site()
    async with kept(world.hub, world.service):
        copy = site.disk.copy()
        async with joined(site):
            await site.write(1, 2)
            await site.lane.flush(5)
            clone = Site(site.bus, disk=copy, session="ses-2")
            await clone.write(7, 8, 9)
            async with joined(clone):
                await until(lambda: len(site.exchanges) > 8 and clone.lane.trouble is not None, "turns taken")
    assert world.faults() == [("lane.forked/site-a/scheduler", False)]


@pytest.mark.parametrize("off", [timedelta(minutes=7), timedelta(minutes=-7), timedelta(hours=-1)])
async def test_a_clock_that_is_far_off_is_reported_by_the_heartbeat_lane(world: World, off: timedelta) -> None:
    """BR-139: seven minutes fast, or slow, or an hour behind; nothing of the lane depends on it."""
    keeper = LaneKeeper(world.hub, Lane.REGISTRY, world.tables, CLOCK, interpret=world.service.interpret)
    async with running(keeper.run()):
        await asyncio.wait_for(keeper.listening.wait(), 5)
        said = first_sync()
        clocks = Clocks(utc=CLOCK.now() + off, boot_s=1.0, kernel_boot="boot-1")
        found = await ask(world.account(A), msgspec.structs.replace(said, lane=Lane.REGISTRY, clocks=clocks))
    assert found.state is LaneState.OK
    assert world.faults() == [("site.clock/site-a/registry", False)]


async def test_a_restarted_agent_goes_on_where_it_was(world: World) -> None:
    site = world.site()
    async with kept(world.hub, world.service):
        async with joined(site):
            await site.write(1, 2)
            await site.lane.flush(5)
        again = Site(site.bus, disk=site.disk, session="ses-2")
        async with joined(again):
            await again.write(3)
            await again.lane.flush(5)
    assert world.service.said == {A: [1, 2, 3]}
    assert world.faults() == []


# --- the site's shell -----------------------------------------------------------------------------------------------------------------------


async def test_a_site_is_alone_until_heard_and_again_when_the_bus_goes(world: World) -> None:
    link = world.account(A)
    site = Site(link)
    assert site.lane.silent_since is not None
    async with kept(world.hub, world.service), joined(site):
        await site.lane.flush(5)
        assert site.lane.silent_since is None
        last = site.lane.last_heard
        link.cut()
        await until(lambda: site.lane.silent_since is not None, "silence")
        assert last is not None and site.lane.silent_since is not None
        assert abs(site.lane.silent_since - last) < timedelta(seconds=1), "silent since the last answer, not since the verdict"
        await site.write(1)
        link.heal()
        await site.lane.flush(10)
        await until(lambda: site.lane.silent_since is None, "heard again")
    assert world.service.said == {A: [1]}
    assert site.silences == [False, True, False]


async def test_a_lost_answer_costs_a_repeat_and_doubles_nothing(world: World) -> None:
    """BR-111: a timeout is a maybe."""
    link = world.account(A)
    site = Site(link)
    lost: list[str] = []

    def drop(direction: str, subject: str) -> bool:
        if direction == "in" and subject.startswith("_INBOX") and len(lost) < 1:
            lost.append(subject)
            return True
        return False

    async with kept(world.hub, world.service), joined(site):
        await site.lane.flush(5)
        link.faults.drop = drop
        await site.write(1, 2)
        await site.lane.flush(10)
    assert len(lost) == 1
    assert world.service.said == {A: [1, 2]}
    row = await world.tables.site(LANE, A)
    assert row is not None and row.ack_through == 2


async def test_a_full_disk_takes_no_instruction_and_loses_none(world: World) -> None:
    site = world.site()
    async with kept(world.hub, world.service), joined(site):
        await site.lane.flush(5)
        site.disk.refusing = True
        world.service.open[A] = [stop(1)]
        await until(lambda: site.lane.trouble is not None, "the trouble")
        assert site.taken == []
        site.disk.refusing = False
        await until(lambda: site.taken == [stop(1)], "the instruction")
        await until(lambda: site.lane.trouble is None, "the end of the trouble")


async def test_a_listener_that_fails_does_not_stop_the_lane(world: World) -> None:
    site = world.site()

    async def fails(*_: object) -> None:
        raise ValueError("the agent's own bug")

    site.lane._on_answer = fails
    async with kept(world.hub, world.service), joined(site):
        await site.write(1)
        await site.lane.flush(5)
        await site.write(2)
        await site.lane.flush(5)
    assert world.service.said == {A: [1, 2]}


async def test_the_site_knows_the_hubs_clock_within_the_round_trip(world: World) -> None:
    site = world.site()
    assert site.lane.clock_error_s is None
    async with kept(world.hub, world.service), joined(site):
        await site.lane.flush(5)
    assert site.lane.clock_error_s is not None
    assert abs(site.lane.clock_offset_s) <= site.lane.clock_error_s + 0.001


# --- ways out: the agent's own journal against the keeper, over the bus ----------------------------------------------------------------------------


@asynccontextmanager
async def with_journal(world: World, folder: Path) -> AsyncIterator[Site]:
    """A site over its own file, which forgets at once what is safe."""
    journal = await SqliteJournal.open(folder / "journal.db", Bounds(kept_s=0))
    site = Site(world.account(A), journal=journal)
    try:
        if journal.pending is not None:
            await site.open_anew(journal.pending.why)
        yield site
    finally:
        await journal.close()


def openings(world: World) -> list[str]:
    return [entry.read(JournalOpened).why for entry in world.service.openings if b"journal_opened" in entry.raw]


async def test_a_restored_hub_is_told_what_nobody_has_any_more_and_the_lane_goes_on(world: World, short_folder: Path) -> None:
    """D3: the hub lost entries that the site had been told to forget."""
    async with with_journal(world, short_folder) as site, kept(world.hub, world.service), joined(site):
        await site.write(1)
        await site.lane.flush(5)
        saved = world.tables.sites_kept[(LANE, A)]
        await site.write(2)
        await site.lane.flush(5)
        world.tables.sites_kept[(LANE, A)] = saved
        del world.tables.entries[(LANE, A, site.journal.id, 3)]
        await site.write(3)
        await until(lambda: world.service.said[A][-1] == 3, "the lane goes on in a new journal")
        await until(lambda: site.lane.trouble is None, "no trouble is left")
    assert openings(world) == ["first", "hub_restored"]
    [lost] = [entry.read(LostRange) for entry in world.service.openings if b"lost_range" in entry.raw]
    assert (lost.journal, lost.first, lost.last) == (saved.journal, 3, 3)
    row = await world.tables.site(LANE, A)
    assert row is not None and (row.journal, row.state) == (site.journal.id, LaneState.OK)


async def test_a_site_whose_disk_was_restored_says_everything_again_in_a_new_journal(world: World, short_folder: Path) -> None:
    """D2: and nothing that the hub has is lost by it."""
    path = short_folder / "journal.db"
    async with kept(world.hub, world.service):
        async with with_journal(world, short_folder) as site, joined(site):
            await site.write(1)
            await site.lane.flush(5)
        older = path.read_bytes()
        async with with_journal(world, short_folder) as site, joined(site):
            await site.write(2)
            await site.lane.flush(5)
        path.write_bytes(older)  # In place: the same file, an older content.
        async with with_journal(world, short_folder) as site, joined(site):
            await site.write(9)
            await until(lambda: world.service.said[A] == [1, 2, 9], "what was written after the restore is there")
    assert openings(world) == ["first", "forked"]
    assert ("lane.forked/site-a/scheduler", False) in world.faults()


async def test_a_site_that_knows_a_higher_epoch_starts_nothing_until_the_hub_goes_above_it(world: World) -> None:
    async with kept(world.hub, world.service):
        found = await ask(world.account(A), msgspec.structs.replace(first_sync(), instruction_epoch=7))
        assert (found.state, found.instructions) == (LaneState.HUB_RESTORED, [])
    assert await world.tables.highest_epoch_told() == 7


async def test_an_agent_newer_than_the_hub_is_told_so_and_an_older_one_hears_only_what_it_knows(world: World) -> None:
    async with kept(world.hub, world.service):
        new = await ask(world.account(A), msgspec.structs.replace(first_sync(), v=LINK_VERSION + 1))
        old = await ask(world.account(B), msgspec.structs.replace(first_sync(B), v=1))
    assert (new.state, old.state, old.lease_s) == (LaneState.VERSION, LaneState.OK, 0)
    row = await world.tables.site(LANE, A)
    assert row is not None and row.state is LaneState.VERSION, "people see it"


async def test_only_a_lane_that_is_ok_gets_instructions_and_a_lease_and_stops_come_first(world: World) -> None:
    world.service.open[A] = [settle(1), stop(2)]
    async with kept(world.hub, world.service):
        first = await ask(world.account(A), first_sync())
        other = await ask(world.account(A), msgspec.structs.replace(first_sync(), nonce=2, journal=JournalId("jnl-other")))
    assert [one.number for one in first.instructions] == [2, 1] and first.lease_s == 60
    assert (other.state, other.instructions, other.lease_s) == (LaneState.AGENT_RESTORED, [], 0)


def settle(number: int) -> Settle:
    return Settle(id=InstructionId(f"ins-{number}"), number=number, epoch=1, attempt=AttemptId(f"att-{number}"))
