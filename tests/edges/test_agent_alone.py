"""A site that is alone: its owner's button, tenants' allowances, borders of periods, the preview, and what it writes down of being alone."""

from __future__ import annotations

import os
import pwd
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from tests.fakes.agents import GUEST, offer, pool
from tests.fakes.sites import World, a_site, settings

from intertie.agent import preview
from intertie.agent.adapters.fake import Disk, FakeAdapter
from intertie.agent.core.attempts import Exit
from intertie.agent.core.islanded import Sight
from intertie.agent.core.model import Attempt, State
from intertie.agent.islanded import Alone, known, lanes_wait
from intertie.clock import ManualClock
from intertie.contracts.base import encode
from intertie.contracts.job import Cause, JobSpec, Resources
from intertie.contracts.link import (
    Ended,
    Inventory,
    IslandedGrant,
    IslandedSubmit,
    Lane,
    LendingPaused,
    OfferRefused,
    PeriodClosed,
    Sealed,
    SegmentClosed,
    SiteSettings,
    Started,
)
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import MeterSpec, PeriodCount, Price, Segment
from intertie.errors import Denied, IntertieError, NotFound, Refused
from intertie.ids import SiteName, SpecId, TenantName
from intertie.trust.keys import Key
from intertie.trust.seal import open_seal, seal

ACCOUNTS = frozenset({GUEST}) if GUEST else frozenset[str]()
UID = pwd.getpwnam(GUEST).pw_uid if GUEST else os.geteuid()
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
"""Four hours before November ends in Shanghai."""
HOUR_US = 3_600_000_000


@dataclass
class House:
    """Everything that outlives the agent of a test's site."""

    folder: Path
    clock: ManualClock
    disk: Disk
    scheduler: Key
    metering: Key

    @asynccontextmanager
    async def agent(self, *, slots: int = 4, boot: str = "boot-1") -> AsyncIterator[World]:
        adapter = FakeAdapter(self.clock, self.disk, accounts=ACCOUNTS)
        async with a_site(
            self.folder, adapter=adapter, pools=[pool(slots)], clock=self.clock, scheduler=self.scheduler, boot=boot
        ) as world:
            world.site.joined.service_keys["metering"] = self.metering.public
            yield world

    def grant(
        self, *, devices: int = 2, hours: float = 24, quantity: int | None = None, key: Key | None = None, site: str = "lab"
    ) -> Sealed:
        told = IslandedGrant(
            grant="lab/acme/slot/1",
            tenant=TenantName("acme"),
            site=SiteName(site),
            kind=DeviceKind.SLOT,
            devices=devices,
            quantity_milli_us=quantity,
            valid_until=self.clock.now() + timedelta(hours=hours),
        )
        return seal(key or self.scheduler, encode(told), "scheduler")

    async def settle(self, world: World, **changes: object) -> SiteSettings:
        told = msgspec.structs.replace(settings("acme", "beta", revision=world.site.settings.revision + 1), at=self.clock.now(), **changes)
        await world.site.apply(seal(self.scheduler, encode(told), "scheduler"), told.revision)
        return told


@pytest.fixture
def house(short_folder: Path) -> House:
    return House(short_folder, ManualClock(NOON), Disk(), Key.new("U"), Key.new("U"))


def spec(script: str = "sleep 600\n", *, slots: int = 1, wall_s: int = 600) -> JobSpec:
    return JobSpec(name="mine", script=script, resources=Resources(slots=slots), wall_s=wall_s)


async def by_allowance(world: World, *, slots: int = 1, wall_s: int = 600, script: str = "sleep 600\n", tenant: str = "acme") -> Attempt:
    wanted = spec(script, slots=slots, wall_s=wall_s)
    return await world.site.grants.submit(tenant=TenantName(tenant), spec=wanted, env={}, uid=UID)


async def running(world: World, slots: int = 1, *, script: str = "sleep 600\n") -> Attempt:
    body = offer(script=script, devices=tuple(f"slot-{n}" for n in range(1, slots + 1)), wall_s=3_600)
    await world.run(body)
    await world.first(Started)
    return world.site.books.attempts[body.attempt]


# --- the red button ----------------------------------------------------------------------------------------------------------------------


async def test_a_paused_site_refuses_offers_without_fault_and_what_runs_goes_on(house: House) -> None:
    async with house.agent() as world:
        before = await running(world)
        await world.site.pause.press(until=None, by="root", reason="maintenance")
        await world.tell(world.offered(offer(devices=("slot-2",))))
        refused = await world.first(OfferRefused)
        assert (refused.code, refused.fault) == ("paused", False)
        told = await world.first(LendingPaused)
        assert (told.paused, told.by, told.reason) == (True, "root", "maintenance")
        await world.site.observe({})
        inventory = [e for e in await world.entries(Lane.REGISTRY) if isinstance(e, Inventory)][-1]
        assert not inventory.pools[0].accepting
        assert world.site.books.attempts[before.id].state is State.RUNNING


async def test_a_pause_outlives_the_agent_and_ends_by_itself_at_the_time_that_was_said(house: House) -> None:
    async with house.agent() as world:
        await world.site.pause.press(until=NOON + timedelta(hours=2), by="root", reason="")
    house.clock.advance(3_600)
    async with house.agent() as world:
        assert world.site.terms().paused and world.site.pause.told().until == NOON + timedelta(hours=2)
        house.clock.advance(3_601)
        await world.site.tick()
        assert not world.site.terms().paused
        told = [e for e in await world.entries(Lane.REGISTRY) if isinstance(e, LendingPaused)]
        assert [(e.paused, e.by) for e in told] == [(True, "root"), (False, "its end")]
    async with house.agent() as world:
        assert not world.site.terms().paused


@pytest.mark.parametrize(("until", "code"), [(NOON - timedelta(seconds=1), "pause.past"), (NOON + timedelta(days=400), "pause.far")])
async def test_a_pause_that_cannot_be_meant_is_refused(house: House, until: datetime, code: str) -> None:
    async with house.agent() as world:
        with pytest.raises(Refused) as refused:
            await world.site.pause.press(until=until, by="root", reason="")
        assert refused.value.code == code and not world.site.terms().paused


async def test_reclaimed_work_ends_as_preempted_and_its_devices_are_the_owner_s(house: House) -> None:
    async with house.agent() as world:
        lent = await running(world, 2)
        await world.site.pause.reclaim(lent.id, by="root", reason="a deadline here", grace_s=1)
        end = await world.first(Ended)
        await world.site.idle()
        assert (end.outcome, end.cause) == ("failed", Cause.PREEMPTED) and "a deadline here" in end.reason
        assert world.site.books.holds.holder == {}
        with pytest.raises(Refused):
            await world.site.pause.reclaim(lent.id, by="root", reason="again", grace_s=1)
        with pytest.raises(NotFound):
            await world.site.pause.reclaim(offer().attempt, by="root", reason="what is this", grace_s=1)


# --- owner first -------------------------------------------------------------------------------------------------------------------------


async def test_an_offer_for_what_the_owner_s_waiting_work_could_take_is_refused_as_busy(house: House) -> None:
    async with house.agent(slots=2) as world:
        await running(world)
        waiting = await world.site.owner.submit(name="own", script="exit 0\n", env={}, cwd="/tmp", uid=UID, slots=2)
        assert waiting.state is State.WAITING
        await world.tell(world.offered(offer(devices=("slot-2",))))
        refused = await world.first(OfferRefused)
        assert (refused.code, refused.fault) == ("device_busy", False)


# --- islanded allowances -----------------------------------------------------------------------------------------------------------------


async def test_a_tenant_s_work_runs_by_its_allowance_and_tells_itself_as_a_hub_s_own_would(house: House) -> None:
    async with house.agent() as world:
        sealed = house.grant()
        await house.settle(world, grants=[sealed])
        taken = await by_allowance(world)
        await world.first(Started)
        house.clock.advance(5)
        await world.site.owner.cancel(taken.job, UID, everyone=False)
        end = await world.first(Ended)
        await world.site.idle()
        kinds = [kind for kind in await world.kinds() if kind != "SettingsApplied"]
        assert kinds == ["IslandedSubmit", "Started", "Ended"]
        told = await world.first(IslandedSubmit)
        assert (told.tenant, told.account, told.generation, told.devices) == ("acme", GUEST, 1, taken.devices)
        assert told.job.startswith("job-lab-") and told.attempt.startswith("att-lab-") and told.grant == sealed
        assert (end.attempt, end.outcome) == (taken.id, "cancelled")
        entry = await world.first(SegmentClosed)
        assert open_seal(entry.sealed, world.site.key.public, Segment).attribution == sealed


LADDER = [
    ("no allowance at all", {"grants": []}, {}, "grant.none"),
    ("one of another site", {"site": "other"}, {}, "grant.none"),
    ("one that the scheduler did not seal", {"forged": True}, {}, "grant.none"),
    ("one that has ended", {"hours": -1}, {}, "grant.expired"),
    ("more devices than it holds", {"devices": 1}, {"slots": 2}, "grant.devices"),
    ("more time than it holds", {"quantity": 1_000 * HOUR_US}, {"wall_s": 3_601}, "grant.used_up"),
    ("more than is free", {"devices": 9}, {"slots": 5}, "device_busy"),
]


@pytest.mark.parametrize(("what", "given", "asked", "code"), LADDER, ids=[row[0] for row in LADDER])
async def test_what_the_allowance_does_not_hold_is_refused_by_the_first_rung_that_breaks(
    house: House, what: str, given: dict[str, object], asked: dict[str, int], code: str
) -> None:
    async with house.agent() as world:
        forged = {"key": Key.new("U")} if given.pop("forged", False) else {}
        grants = given.pop("grants", None)
        await house.settle(world, grants=[house.grant(**given, **forged)] if grants is None else grants)  # type: ignore[arg-type]  # a row
        with pytest.raises(Refused) as refused:
            await by_allowance(world, **asked)  # type: ignore[arg-type]  # a row
        assert refused.value.code == code and (refused.value.next_step or code == "device_busy")
        assert world.site.running() == [] and "IslandedSubmit" not in await world.kinds()


async def test_while_the_hub_is_heard_a_tenant_is_sent_there(house: House) -> None:
    async with house.agent() as world:
        await house.settle(world, grants=[house.grant()])
        world.site.islanded = lambda: False
        with pytest.raises(Refused) as refused:
            await by_allowance(world)
        assert refused.value.code == "grant.not_islanded" and "intertie submit" in refused.value.next_step


async def test_the_hub_s_own_attempts_count_into_the_allowance_and_nothing_is_borrowed(house: House) -> None:
    async with house.agent() as world:
        await house.settle(world, grants=[house.grant(devices=2)])
        await running(world)
        await by_allowance(world)
        with pytest.raises(Refused) as refused:
            await by_allowance(world)
        assert refused.value.code == "grant.devices"


async def test_what_an_absence_used_up_stays_used_up_after_a_restart_and_is_there_again_in_the_next(house: House) -> None:
    since = NOON
    async with house.agent() as world:
        world.site.islanded_since = lambda: since
        await house.settle(world, grants=[house.grant(quantity=1_000 * HOUR_US)])
        await by_allowance(world, wall_s=3_000)
    async with house.agent() as world:
        world.site.islanded_since = lambda: since
        with pytest.raises(Refused) as refused:
            await by_allowance(world, wall_s=3_000)
        assert refused.value.code == "grant.used_up"
        world.site.islanded_since = lambda: since + timedelta(hours=1)
        await by_allowance(world, wall_s=3_000)


async def test_only_the_tenant_s_own_account_may_spend_its_allowance(house: House) -> None:
    async with house.agent() as world:
        await house.settle(world, grants=[house.grant()])
        for tenant, uid in (("acme", 54_321), ("gamma", UID)):
            if not GUEST and tenant == "acme":
                continue  # A single-user site's door lets nobody else in.
            with pytest.raises(Denied) as denied:
                await world.site.grants.submit(tenant=TenantName(tenant), spec=spec(), env={}, uid=uid)
            assert denied.value.code == "grant.account"


async def test_a_paused_site_takes_no_tenant_s_work_by_an_allowance_either(house: House) -> None:
    async with house.agent() as world:
        await house.settle(world, grants=[house.grant()])
        await world.site.pause.press(until=None, by="root", reason="")
        with pytest.raises(Refused) as refused:
            await by_allowance(world)
        assert refused.value.code == "paused"


# --- borders of periods ------------------------------------------------------------------------------------------------------------------


def told_segments(entries: Sequence[object]) -> list[Segment]:
    return [open_seal(e.sealed, e.sealed.signer, Segment) for e in entries if isinstance(e, SegmentClosed)]


def told_periods(entries: Sequence[object]) -> list[PeriodCount]:
    return [open_seal(e.sealed, e.sealed.signer, PeriodCount) for e in entries if isinstance(e, PeriodClosed)]


async def test_a_running_attempt_is_cut_at_each_border_that_it_slept_over_and_each_period_is_counted(house: House) -> None:
    """BR-139: the wall clock steps back two hours meanwhile."""
    async with house.agent() as world:
        await world.site.tick()
        lent = await running(world, 2)
        house.clock.advance(40 * 86_400)  # Over the ends of November and of December.
        house.clock.step_wall(-7_200)
        await world.site.tick()
        entries = list(await world.entries(Lane.METERING))
        assert [type(e).__name__ for e in entries[-2:]] == ["PeriodClosed", "PeriodClosed"]
        await world.site.pause.reclaim(lent.id, by="root", reason="enough of it", grace_s=1)
        end = await world.first(Ended)
        await world.site.idle()
        segments = told_segments(await world.entries(Lane.METERING))
        run = [s for s in segments if s.phase == "run"]
        assert [s.cause for s in run] == ["period", "period", "ended"]
        assert [s.end.isoformat() for s in run[:-1]] == ["2026-11-30T16:00:00+00:00", "2026-12-31T16:00:00+00:00"]
        assert all(left.end == right.start for left, right in zip(run, run[1:], strict=False))
        assert (run[0].start, run[-1].end) == (end.started, end.ended)
        total = sum(s.quantity_milli * ((s.end - s.start) // timedelta(microseconds=1)) for s in segments)
        assert (end.segments, end.quantity_milli_us) == (len(segments), total)
        november, december = told_periods(await world.entries(Lane.METERING))[:2]
        assert (november.period, november.attempts, november.segments) == (
            "2026-11",
            1,
            len([s for s in segments if s.end <= november.end]),
        )
        assert (december.period, december.segments) == ("2026-12", 1)
        assert december.quantity_milli_us == 2_000 * 31 * 86_400 * 1_000_000


async def test_a_period_without_any_use_is_closed_too_and_once(house: House) -> None:
    async with house.agent() as world:
        await world.site.tick()
        house.clock.advance(5 * 3_600)
        await world.site.tick()
        await world.site.tick()
    async with house.agent() as world:
        await world.site.tick()
        (only,) = told_periods(await world.entries(Lane.METERING))
        assert (only.period, only.attempts, only.segments, only.quantity_milli_us) == ("2026-11", 0, 0, 0)


async def test_an_end_that_came_before_the_border_is_counted_before_its_period_is_closed(house: House) -> None:
    """The agent was away when it ended, and when the month did."""
    async with house.agent() as world:
        await world.site.tick()
        lent = await running(world)
    house.clock.advance(60)
    run = house.disk.runs[lent.id]
    run.stop_asked.set()
    await run.over.wait()
    house.clock.advance(5 * 3_600)
    async with house.agent() as world:
        await world.first(Ended)
        await world.site.idle()
        await world.site.tick()
        kinds = await world.kinds(Lane.METERING)
        assert kinds.index("PeriodClosed") == len(kinds) - 1 and "SegmentClosed" in kinds
        (closed,) = told_periods(await world.entries(Lane.METERING))
        assert closed.segments == kinds.count("SegmentClosed")


async def test_a_cut_is_not_told_twice_by_an_agent_that_was_started_again(house: House) -> None:
    async with house.agent() as world:
        await world.site.tick()
        lent = await running(world)
        house.clock.advance(5 * 3_600)
        await world.site.tick()
        before = (await world.kinds(Lane.METERING)).count("SegmentClosed")
    async with house.agent() as world:
        await world.site.tick()
        assert (await world.kinds(Lane.METERING)).count("SegmentClosed") == before
        await world.site.pause.reclaim(lent.id, by="root", reason="enough of it", grace_s=1)
        end = await world.first(Ended)
        await world.site.idle()
        segments = told_segments(await world.entries(Lane.METERING))
        assert end.segments == len(segments) == before + 1 and len({s.id for s in segments}) == len(segments)


async def test_after_a_reboot_the_end_is_never_before_a_border_that_it_was_seen_to_pass(house: House) -> None:
    """Its last sign of life was written seconds before the border; the agent saw it run after that, and said so."""
    async with house.agent() as world:
        await world.site.tick()
        lent = await running(world)
        house.clock.advance(4 * 3_600 + 5)
        await world.site.tick()
        (cut,) = [s for s in told_segments(await world.entries(Lane.METERING)) if s.phase == "run"]
    run = house.disk.runs[lent.id]
    assert run.living is not None
    run.living.cancel()
    run.exit = Exit(certain=False, rebooted=True, ran_us=4 * HOUR_US - 4_000_000)
    run.over.set()
    async with house.agent(boot="boot-2") as world:
        end = await world.first(Ended)
        await world.site.idle()
        segments = told_segments(await world.entries(Lane.METERING))
        assert (end.ended, end.segments, end.ran_us) == (cut.end, len(segments), 4 * HOUR_US)
        assert [s.end for s in segments if s.phase == "run"] == [cut.end]
        await world.site.tick()
        assert len(told_periods(await world.entries(Lane.METERING))) == 1


# --- the preview -------------------------------------------------------------------------------------------------------------------------


def agreement(provider: str = "lab", **changes: object) -> MeterSpec:
    made = MeterSpec(
        spec=SpecId("spec-lab"),
        revision=2,
        title="what lab lends",
        provider=provider,
        consumer="platform",
        currency="CNY",
        prices=[Price(kind=DeviceKind.SLOT, per_hour=Decimal("3.00"))],
        effective_from=NOON - timedelta(days=30),
    )
    return msgspec.structs.replace(made, **changes)


async def test_the_owner_sees_what_was_lent_priced_by_the_site_s_own_agreement(house: House) -> None:
    async with house.agent() as world:
        await house.settle(world, specs=[seal(house.metering, encode(agreement()), "metering")])
        lent = await running(world, 2)
        house.clock.advance(3_600)
        told = await preview.statement(world.site, "")
        (one,) = told.lines
        assert (one.attempt, one.running, one.run_us, one.quantity_milli_us) == (lent.id, True, HOUR_US, 2_000 * HOUR_US)
        assert (told.period, told.total, told.currency) == ("2026-11", Decimal("6.0000"), "CNY")
        await world.site.pause.reclaim(lent.id, by="root", reason="enough of it", grace_s=1)
        await world.first(Ended)
        await world.site.idle()
        told = await preview.statement(world.site, "2026-11")
        assert told.untold_segments == len(await world.entries(Lane.METERING)) and not told.lines[0].told and told.lines[0].islanded
        assert (await preview.statement(world.site, "2026-10")).lines == []
        with pytest.raises(Refused):
            await preview.statement(world.site, "last month")


async def test_without_an_agreement_the_use_is_shown_and_the_reason_why_there_is_no_amount(house: House) -> None:
    async with house.agent() as world:
        forged = [seal(Key.new("U"), encode(agreement()), "metering"), seal(house.metering, encode(agreement("elsewhere")), "metering")]
        await house.settle(world, specs=forged)
        await running(world)
        house.clock.advance(60)
        told = await preview.statement(world.site, "")
        assert (told.total, len(told.lines), told.quantity_milli_us) == (None, 1, 60_000_000_000) and "no agreement" in told.unpriced


async def test_an_attempt_that_runs_over_a_border_is_in_both_periods_with_its_own_part(house: House) -> None:
    async with house.agent() as world:
        await world.site.tick()
        await running(world)
        house.clock.advance(5 * 3_600)
        first, second = await preview.statement(world.site, "2026-11"), await preview.statement(world.site, "2026-12")
        assert (first.lines[0].run_us, second.lines[0].run_us) == (4 * HOUR_US, HOUR_US)


# --- being alone -------------------------------------------------------------------------------------------------------------------------


@dataclass
class Line:
    """The scheduler's lane as the agent would see it."""

    clock: ManualClock
    connected: bool = False
    silent_since: datetime | None = None
    last_heard: datetime | None = None

    def hear(self) -> None:
        self.connected, self.silent_since, self.last_heard = True, None, self.clock.now()

    def see(self) -> Sight:
        return Sight(self.clock.now(), self.connected, self.silent_since, self.last_heard)


@asynccontextmanager
async def alone(house: House, line: Line) -> AsyncIterator[tuple[World, Alone]]:
    async with house.agent() as world:
        state = Alone(world.site, line.see)
        await state.recover()
        world.site.islanded, world.site.islanded_since = (lambda: state.since is not None), (lambda: state.since)
        yield world, state


async def test_an_absence_is_written_down_and_a_restart_goes_on_with_it(house: House) -> None:
    line = Line(house.clock)
    line.hear()
    async with alone(house, line) as (_, state):
        await state.tick()
        assert await state.report() is None
        house.clock.advance(10)
        line.connected = False
        await state.tick()
        assert (state.since, state.why) == (NOON, "bus")
    house.clock.advance(86_400)
    async with alone(house, Line(house.clock)) as (_, state):
        await state.tick()
        assert (state.since, state.why) == (NOON, "bus"), "a restart is no reason of its own"


async def test_the_bus_alone_is_no_return_and_the_first_answer_is(house: House) -> None:
    line = Line(house.clock)
    line.hear()
    async with alone(house, line) as (_, state):
        line.connected = False
        assert state.since is not None
        house.clock.advance(60)
        line.connected = True
        assert state.since is not None
        line.hear()
        assert state.since is None


async def test_a_link_that_comes_and_goes_makes_one_absence(house: House) -> None:
    line = Line(house.clock)
    line.hear()
    async with alone(house, line) as (_, state):
        for _ in range(5):
            line.connected = False
            assert state.since == NOON
            house.clock.advance(3)
            line.hear()
            assert state.since is None
            house.clock.advance(1)
        line.connected = False
        assert state.since == NOON


async def test_a_healthy_start_is_no_absence_and_hides_none(house: House) -> None:
    line = Line(house.clock)
    async with alone(house, line) as (_, state):
        assert state.why == "start"
        house.clock.advance(2)
        line.hear()
        await state.tick()
        assert state.since is None
        assert await state.report() is None


async def test_after_the_return_it_is_said_what_happened_and_when_all_was_told(house: House) -> None:
    line = Line(house.clock)
    line.hear()
    async with alone(house, line) as (world, state):
        await house.settle(world, grants=[house.grant()])
        line.connected = False
        await state.tick()
        house.clock.advance(60)
        taken = await by_allowance(world)
        with pytest.raises(IntertieError):
            await by_allowance(world, slots=4)
        await world.first(Started)
        house.clock.advance(5)
        await world.site.owner.cancel(taken.job, UID, everyone=False)
        await world.first(Ended)
        await world.site.idle()
        own = await world.site.owner.submit(name="own", script="exit 0\n", env={}, cwd="/tmp", uid=UID)
        await world.site.idle()
        assert own.local is not None
        waits = {wait.lane: wait for wait in await lanes_wait(world.site, {})}
        assert waits["metering"].entries >= 1 and waits["metering"].size > 0 and waits["metering"].oldest is not None
        house.clock.advance(60)
        line.hear()
        await state.tick()
        told = await state.report()
        assert told is not None and told.ended == house.clock.now() and told.told is None
        assert (told.lent_started, told.lent_ended, told.local_ran, told.by_allowance, told.refused) == (1, 1, 1, 1, 1)
        assert told.entries == sum(wait.entries for wait in waits.values()) and (told.to_settle, told.settled) == (1, 0)
        house.clock.advance(2)
        for lane in Lane:
            heads = await world.journal.read(lambda c, lane=lane: c.execute("SELECT next_seq FROM lane WHERE name = ?", (lane,)).fetchone())  # type: ignore[misc]
            await world.journal.acknowledged(lane, heads[0] - 1, 0)
        await state.tick()
        await world.journal.write(lambda cursor: cursor.execute("UPDATE attempt SET settled = 1 WHERE id = ?", (taken.id,)))
        told = await state.report()
        assert told is not None and told.told == house.clock.now() and told.settled == 1


async def test_what_the_site_works_by_is_shown_with_its_age_and_its_end(house: House) -> None:
    async with house.agent() as world:
        prices = [seal(house.metering, encode(agreement()), "metering")]
        await house.settle(world, grants=[house.grant(hours=1)], specs=prices)
        house.clock.advance(7_200)
        found = {(one.what, one.name): one for one in known(world.site)}
        assert found[("settings", "revision 2")].as_of == NOON
        assert found[("mapping", "beta")].value == GUEST
        assert found[("allowance", "acme")].lapsed and found[("allowance", "acme")].valid_until == NOON + timedelta(hours=1)
        assert "3.00 CNY" in found[("agreement", "spec-lab rev 2")].value
