"""The site's part of a drill, over a real journal, real processes and a bus in memory: cut, silence, the owner's word, and the account of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from tests.edges.store_world import until
from tests.fakes.agents import offer
from tests.fakes.sites import World, a_site

from intertie.agent.cut import CuttableBus
from intertie.agent.drill import Drill, parse
from intertie.bus.memory import HUB, MemoryBroker, MemoryBus
from intertie.bus.port import Bus, Message
from intertie.contracts.base import encode
from intertie.contracts.link import DrillConsented, DrillRefused, DrillReported, Lane, Started
from intertie.errors import Conflict, Unavailable
from intertie.trust.evidence import signature_holds
from intertie.trust.seal import seal


@dataclass
class Wire:
    """Makes connections of one server, and remembers them."""

    broker: MemoryBroker = field(default_factory=MemoryBroker)
    made: list[MemoryBus] = field(default_factory=list)
    refuse: int = 0
    """Tries that fail from now on."""

    async def make(self) -> Bus:
        if self.refuse:
            self.refuse -= 1
            raise Unavailable("bus.unavailable", "nobody is there")
        self.made.append(MemoryBus(self.broker, f"agent-{len(self.made)}", HUB))
        return self.made[-1]


@asynccontextmanager
async def drilling(world: World, wire: Wire) -> AsyncIterator[tuple[Drill, CuttableBus]]:
    """A drill's task beside a hub that acknowledges everything while the link is there."""
    drill = Drill(world.site)
    await drill.open()
    bus = await drill.bus(wire.make)
    world.site.islanded = lambda: not bus.connected

    async def acknowledge() -> None:
        while True:
            if bus.connected:
                for lane in Lane:
                    await world.journal.acknowledged(lane, 1 << 40, 0)
            await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(drill.run()), asyncio.create_task(acknowledge())]
    try:
        yield drill, bus
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await bus.close()


async def ask(world: World, drill: Drill, *, id: str = "drl-1", seconds: int = 5, in_s: float = 0.0, consent: str = "site") -> None:
    """The scheduler's sealed settings name a drill; an empty id takes it back."""
    start = world.clock.now() + timedelta(seconds=in_s)
    text = f"{id}/{seconds}/{start.isoformat()}/{consent}" if id else ""
    told = msgspec.structs.replace(world.site.settings, revision=world.site.settings.revision + 1, drill=text)
    await world.site.apply(seal(world.scheduler, encode(told), "scheduler"), told.revision)
    drill.settings_came()


async def test_calls_are_refused_while_it_is_cut_and_listeners_hear_again_afterwards() -> None:
    wire = Wire()
    heard: list[bytes] = []
    states: list[bool] = []
    bus = CuttableBus(wire.make)
    bus.on_state(states.append)

    async def hear(message: Message) -> None:
        heard.append(message.body)

    await bus.subscribe("down.nudge", hear)
    with pytest.raises(Unavailable, match="cut"):
        await bus.request("up.x", b"", timeout_s=0.1)
    await bus.mend()
    hub = await wire.make()
    await hub.publish("down.nudge", b"1")
    await until(lambda: heard == [b"1"], "the first is heard")
    await bus.cut()
    assert not bus.connected
    await hub.publish("down.nudge", b"2")
    await bus.mend()
    await hub.publish("down.nudge", b"3")
    await until(lambda: heard == [b"1", b"3"], "what came after the cut is heard")
    assert states[-1] is True
    assert False in states
    await bus.close()


async def test_without_the_owners_word_there_is_no_cut(short_folder: Path) -> None:
    async with a_site(short_folder) as world, drilling(world, Wire()) as (drill, bus):
        await ask(world, drill)
        refused = await world.first(DrillRefused)
        assert (refused.drill, refused.code) == ("drl-1", "agent.drill_not_allowed")
        assert bus.connected


@pytest.mark.parametrize(("longest", "hours"), [(5, 0.0), (5, -1.0), (60, 0.001)])
async def test_a_cut_beyond_the_owners_word_is_refused(short_folder: Path, longest: int, hours: float) -> None:
    async with a_site(short_folder) as world, drilling(world, Wire()) as (drill, bus):
        until_ = world.clock.now() + timedelta(hours=hours) if hours else None
        await drill.allow(by="root", until=until_, longest_s=longest)
        await ask(world, drill, seconds=30)
        assert (await world.first(DrillRefused)).code == "agent.drill_not_allowed"
        assert bus.connected


async def test_what_was_revoked_here_stands_above_a_token_at_the_hub(short_folder: Path) -> None:
    async with a_site(short_folder) as world, drilling(world, Wire()) as (drill, bus):
        await drill.revoke(by="root")
        await ask(world, drill, consent="token")
        assert (await world.first(DrillRefused)).code == "agent.drill_not_allowed"
        assert not (await world.first(DrillConsented)).consent.allowed
        assert bus.connected


async def test_a_drill_whose_time_is_long_over_is_not_made(short_folder: Path) -> None:
    async with a_site(short_folder) as world, drilling(world, Wire()) as (drill, _):
        await drill.allow(by="root", until=None, longest_s=60)
        await ask(world, drill, in_s=-30)
        assert (await world.first(DrillRefused)).code == "agent.drill_late"


async def test_a_drill_that_is_called_off_in_time_is_not_made(short_folder: Path) -> None:
    async with a_site(short_folder) as world, drilling(world, Wire()) as (drill, bus):
        await drill.allow(by="root", until=None, longest_s=60)
        await ask(world, drill, in_s=3600)
        await until(lambda: drill.status().drill == "drl-1", "it is planned")
        await ask(world, drill, id="")
        await until(lambda: not drill.status().drill, "it is planned no more")
        assert bus.connected
        assert "DrillReported" not in await world.kinds(Lane.REGISTRY)


async def test_the_cut_ends_at_its_time_and_the_account_says_what_ran(short_folder: Path) -> None:
    async with a_site(short_folder) as world, drilling(world, Wire()) as (drill, bus):
        await drill.allow(by="root", until=None, longest_s=60)
        body = offer(script="sleep 60\n")
        await world.run(body)
        await world.first(Started)
        await ask(world, drill)
        await until(lambda: drill.status().on, "the cut")
        assert not bus.connected
        told = (await world.first(DrillReported)).report
        assert bus.connected
        assert signature_holds(told, (await world.first(DrillReported)).signature)
        assert (told.ended_by, told.restarts, told.islanded_at is not None, told.heard_at is not None) == ("time", 0, True, True)
        assert 5 <= (told.back_at - told.cut_at).total_seconds() < 15
        assert [(a.attempt, a.before, a.after, a.same_process, a.go_before) for a in told.attempts] == [
            (body.attempt, "running", "running", True, True)
        ]
        assert {lane.lane: lane.to_head_ms is not None for lane in told.lanes} == {"registry": True, "scheduler": True, "metering": True}
        assert not drill.status().on
        await world.tell(world.stop(body))
        await world.site.idle()


async def test_the_owner_ends_it_at_once_and_only_while_it_is_on(short_folder: Path) -> None:
    async with a_site(short_folder) as world, drilling(world, Wire()) as (drill, bus):
        with pytest.raises(Conflict):
            drill.stop()
        await drill.allow(by="root", until=None, longest_s=3_600)
        await ask(world, drill, seconds=3_600)
        await until(lambda: drill.status().on, "the cut")
        drill.stop()
        told = (await world.first(DrillReported)).report
        assert told.ended_by == "owner"
        assert bus.connected


async def test_an_agent_that_is_started_anew_stays_silent_for_what_is_left_and_no_longer(short_folder: Path) -> None:
    wire = Wire()
    async with a_site(short_folder) as world, drilling(world, wire) as (drill, _):
        await drill.allow(by="root", until=None, longest_s=60)
        await ask(world, drill, seconds=6)
        await until(lambda: drill.status().on, "the cut")
    made = len(wire.made)
    async with a_site(short_folder) as world, drilling(world, wire) as (drill, bus):
        assert drill.status().on
        assert len(wire.made) == made, "no connection was made"
        assert drill.status().left_s <= 6
        told = (await world.first(DrillReported)).report
        assert (told.restarts, told.ended_by) == (1, "time")
        assert bus.connected
        assert 6 <= (told.back_at - told.cut_at).total_seconds() < 20


@pytest.mark.parametrize(
    "text",
    ["", "drl-1", "drl-1/x/2026-01-01T00:00:00+00:00/site", "drl-1/60/2026-01-01T00:00:00/site", "drl-1/9999/2026-01-01T00:00:00Z/site"],
)
def test_what_is_no_drill_is_none(text: str) -> None:
    assert parse(text) is None


async def test_a_link_that_cannot_be_made_at_the_end_of_the_cut_is_made_when_it_can(short_folder: Path) -> None:
    wire = Wire()
    async with a_site(short_folder) as world, drilling(world, wire) as (drill, bus):
        await drill.allow(by="root", until=None, longest_s=3_600)
        await ask(world, drill, seconds=3_600)
        await until(lambda: drill.status().on, "the cut")
        wire.refuse = 2
        drill.stop()
        assert (await world.first(DrillReported)).report.ended_by == "owner"
        assert wire.refuse == 0
        assert bus.connected
