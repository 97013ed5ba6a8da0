"""Job requests at a site with its real journal and real processes: by rule, by hand, over a restart, and what the hub sees of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from tests.fakes.agents import offer, pool
from tests.fakes.sites import World, a_site

from intertie.agent.core.devices import Pool
from intertie.agent.core.requests import Bounds, JobOfferingRule
from intertie.agent.core.rules import Rules
from intertie.contracts.base import encode
from intertie.contracts.link import (
    Claimed,
    Ended,
    Inventory,
    JobOfferingsTold,
    Lane,
    NotStarted,
    OfferBody,
    OfferRefused,
    SegmentClosed,
    Started,
)
from intertie.contracts.site import AccessMode, TaskType
from intertie.contracts.usage import Segment
from intertie.errors import Conflict, NotFound
from intertie.ids import AttemptId, PoolName
from intertie.trust.seal import open_seal


def service(slots: int = 4) -> Pool:
    there = pool(slots)
    return replace(there, profile=msgspec.structs.replace(there.profile, mode=AccessMode.SERVICE))


def rules(accept: str = "rule", **bounds: object) -> Rules:
    one = JobOfferingRule(
        name="train",
        pool=PoolName("main"),
        max_devices=2,
        devices=2,
        max_wall_s=3_600,
        task_types=[TaskType.BATCH],
        price_per_hour=Decimal(6),
        answer_within_s=600,
        accept=accept,
        bounds=Bounds(**bounds),  # type: ignore[arg-type]  # a table of bounds
    )
    return Rules(job_offering=[one], owner_first=True)


def asked(script: str = "echo hello\nexit 0\n", *, count: int = 1, answer_within_s: int = 600, **changes: object) -> OfferBody:
    names = tuple(f"req-{n}" for n in range(1, count + 1))
    return msgspec.structs.replace(offer(script=script, devices=names), offering="train", answer_within_s=answer_within_s, **changes)


async def began(world: World, body: OfferBody) -> Started:
    await world.first(Claimed)
    await world.tell(world.go(body))
    return await world.first(Started)


async def test_a_request_within_the_owners_rule_is_accepted_and_runs_with_cards_of_the_sites_choice(short_folder: Path) -> None:
    async with a_site(short_folder, pools=[service()], rules=rules()) as world:
        body = asked(count=2)
        await world.tell(world.offered(body))
        claimed = await world.first(Claimed)
        kept = world.site.books.attempts[body.attempt]
        assert (claimed.devices, kept.devices) == (["req-1", "req-2"], ["slot-1", "slot-2"])
        await began(world, body)
        end = await world.first(Ended)
        await world.site.idle()
        assert (end.outcome, end.exit_code) == ("succeeded", 0)
        assert world.site.requests.pending == {} and world.site.books.holds.holder == {}


async def test_nothing_that_leaves_the_site_about_a_request_names_a_card_a_process_or_a_queue(short_folder: Path) -> None:
    async with a_site(short_folder, pools=[service()], rules=rules()) as world:
        await world.site.observe({})
        body = asked()
        await world.tell(world.offered(body))
        started = await began(world, body)
        await world.first(Ended)
        await world.site.idle()
        await world.site.observe({})
        assert (started.devices, started.native_id, started.nodes) == (["req-1"], "", [])
        said = [*await world.entries(), *await world.entries(Lane.METERING), *await world.entries(Lane.REGISTRY)]
        assert b"slot-1" not in encode(said)
        segments = [open_seal(e.sealed, world.site.key.public, Segment) for e in said if isinstance(e, SegmentClosed)]
        assert segments and all(one.devices == ["req-1"] and one.quantity_milli == 1000 for one in segments)
        for entry in said:
            if isinstance(entry, Inventory):
                assert [(p.devices, p.waiting, p.native) for p in entry.pools] == [([], 0, None)]


async def test_what_its_owner_is_declining_does_not_begin_meanwhile(short_folder: Path) -> None:
    """Accepted, and its cards come free in the moment of the no."""
    async with a_site(short_folder, pools=[service()], rules=rules("by-hand")) as world:
        body = asked()
        await world.tell(world.offered(body))
        await world.site.pause.press(until=None, by="owner", reason="mine")
        told = await world.site.requests.accept(body.attempt, by="owner")
        assert told.word == "accepted" and body.attempt in world.site.requests.pending
        await world.site.pause.resume(by="owner")
        requests = world.site.requests
        await asyncio.gather(requests.decline(body.attempt, by="owner", reason="not today"), requests.tick())
        said = [type(entry) for entry in await world.entries() if isinstance(entry, Claimed | OfferRefused)]
        assert said == [OfferRefused] and world.site.books.holds.holder == {}


async def test_a_request_by_hand_waits_for_its_owner_and_his_words_go_back(short_folder: Path) -> None:
    async with a_site(short_folder, pools=[service()], rules=rules("by-hand")) as world:
        body, other = asked(), asked()
        await world.tell(world.offered(body), world.offered(other))
        await world.site.tick()
        shown = world.site.requests.listed()
        assert [(r.attempt, r.word, r.tenant, r.devices) for r in shown] == [
            (one.attempt, "waiting", "acme", 1) for one in sorted((body, other), key=lambda b: b.attempt)
        ]
        assert "Claimed" not in await world.kinds() and "OfferRefused" not in await world.kinds()
        await world.site.requests.accept(body.attempt, by="ann")
        await world.site.requests.decline(other.attempt, by="ann", reason="the cards are for exams this week")
        refused = await world.first(OfferRefused)
        assert (refused.attempt, refused.code, refused.text, refused.fault) == (
            other.attempt,
            "declined",
            "the cards are for exams this week",
            False,
        )
        await began(world, body)
        assert (await world.first(Ended)).outcome == "succeeded"
        await world.site.idle()


async def test_a_request_waits_over_a_restart_of_the_agent_and_its_owners_yes_too(short_folder: Path) -> None:
    async with a_site(short_folder, pools=[service(1)], rules=rules("by-hand")) as world:
        key = world.scheduler
        holder, body = asked("sleep 60\n"), asked()
        await world.tell(world.offered(holder))
        await world.site.requests.accept(holder.attempt, by="ann")
        await began(world, holder)
        await world.tell(world.offered(body))
        told = await world.site.requests.accept(body.attempt, by="ann")
        assert told.word == "accepted"
    async with a_site(short_folder, pools=[service(1)], rules=rules("by-hand"), scheduler=key) as world:
        (one,) = world.site.requests.listed()
        assert (one.attempt, one.word, one.text) == (body.attempt, "accepted", "1 cards are not free now")
        world.number = 100
        await world.tell(world.stop(holder))
        await world.first(Ended)
        await world.site.idle()
        await world.site.tick()
        claims = [entry.attempt for entry in await world.entries() if isinstance(entry, Claimed)]
        assert claims == [holder.attempt, body.attempt]


async def test_what_the_rule_accepted_and_no_card_was_free_for_in_time_is_declined_without_fault(short_folder: Path) -> None:
    async with a_site(short_folder, pools=[service(1)], rules=rules()) as world:
        holder, body = asked("sleep 60\n"), asked(answer_within_s=0)
        await world.tell(world.offered(holder))
        await began(world, holder)
        await world.tell(world.offered(body))
        pending = world.site.requests.pending[body.attempt]
        assert pending.accepted_by == "rule"
        late = msgspec.structs.replace(pending, answer_by=pending.received)
        world.site.requests.pending[body.attempt] = late
        await world.site.tick()
        refused = await world.first(OfferRefused)
        assert (refused.attempt, refused.code, refused.fault) == (body.attempt, "declined", False)
        assert "not free" in refused.text
        await world.tell(world.stop(holder))
        await world.first(Ended)
        await world.site.idle()


@pytest.mark.parametrize(("accept", "claimed"), [("rule", True), ("by-hand", False)])
async def test_a_request_that_is_withdrawn_is_over_claimed_or_not(short_folder: Path, accept: str, claimed: bool) -> None:
    async with a_site(short_folder, pools=[service()], rules=rules(accept)) as world:
        body = asked()
        await world.tell(world.offered(body))
        assert (body.attempt in world.site.books.attempts) is claimed
        await world.tell(world.withdraw(body))
        assert (await world.first(NotStarted)).code == "withdrawn"
        await world.site.tick()
        assert world.site.requests.pending == {} and world.site.books.holds.holder == {}


async def test_an_offer_that_is_repeated_asks_nobody_twice(short_folder: Path) -> None:
    async with a_site(short_folder, pools=[service()], rules=rules("by-hand")) as world:
        body = asked()
        await world.tell(world.offered(body))
        await world.tell(world.offered(body))
        assert len(world.site.requests.listed()) == 1


async def test_a_placement_by_the_hub_is_refused_where_the_owner_decides(short_folder: Path) -> None:
    async with a_site(short_folder, pools=[service()], rules=rules()) as world:
        await world.tell(world.offered(offer()))
        refused = await world.first(OfferRefused)
        assert (refused.code, refused.fault) == ("owner_decides", False)


async def test_what_is_not_there_or_has_begun_is_neither_accepted_nor_declined(short_folder: Path) -> None:
    async with a_site(short_folder, pools=[service()], rules=rules()) as world:
        with pytest.raises(NotFound):
            await world.site.requests.accept(AttemptId("att-none"), by="ann")
        body = asked()
        await world.tell(world.offered(body))
        with pytest.raises(Conflict) as caught:
            await world.site.requests.decline(body.attempt, by="ann", reason="too late")
        assert "reclaim" in caught.value.next_step


async def test_offerings_are_told_once_and_only_to_a_registry_that_knows_them(short_folder: Path) -> None:
    async with a_site(short_folder, pools=[service()], rules=rules(tenants=["beta"])) as world:
        await world.site.tick()
        assert "JobOfferingsTold" not in await world.kinds(Lane.REGISTRY)
        world.site.requests.understood = True
        await world.site.tick()
        await world.site.tick()
        told = [entry for entry in await world.entries(Lane.REGISTRY) if isinstance(entry, JobOfferingsTold)]
        assert [one.name for entry in told for one in entry.offerings] == ["train"]
        assert b"beta" not in encode(told)
