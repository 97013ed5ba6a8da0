"""A scheduler whose database was put back by an hour, and sites that still know what happened in it: over the real lane machines on the bus in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.edges.scheduler_world import ACME, CLOCK, Agent, alive, joined_events
from tests.edges.store_world import until
from tests.edges.test_scheduler_service import RESULT, SITE, Hub, made

from intertie.bus.memory import MemoryBroker, site_account
from intertie.contracts.base import encode
from intertie.contracts.job import Cause
from intertie.contracts.link import Claimed, Go, Lane, NotStarted, Offer, OfferBody, ResultStored, Settle, Staging, Started
from intertie.errors import Conflict, Unavailable
from intertie.ids import AttemptId, SiteName
from intertie.scheduler.memory import MemorySchedulerStore
from intertie.trust.keys import Key

ELSEWHERE = SiteName("site-b")


@asynccontextmanager
async def hub_of(key: Key, *, epoch: int = 1) -> AsyncIterator[Hub]:
    """A hub that knows nothing but its sites; above epoch 1: because it was restored."""
    store = MemorySchedulerStore(clock=CLOCK)
    store.service_epoch = epoch
    async with made(store, MemoryBroker(), key) as hub:
        await hub.learn(*joined_events(SITE, 2, ACME))
        yield hub


def heir_at(hub: Hub, agent: Agent) -> Agent:
    return agent.heir(hub.broker.client(agent.site, site_account(agent.site)))


async def adopted_all(hub: Hub, *attempts: AttemptId) -> None:
    await until(lambda: set(attempts) <= set(hub.store.attempt_rows), "what the site holds is known again")
    await until(lambda: not hub.lanes.open and not hub.lanes.quarantined, "and nothing waits that could not be understood")


def settled_by(agent: Agent) -> set[AttemptId]:
    return {one.attempt for one in agent.heard if isinstance(one, Settle)}


async def told_so_far(agent: Agent, body: OfferBody, number: int) -> None:
    """Entry `number` of an attempt's life."""
    now = CLOCK.now()
    match number:
        case 0:
            await agent.say(Claimed, body, devices=list(body.devices))
        case 1:
            await agent.say(Staging, body)
        case 2:
            await agent.say(Started, body, started=now, devices=list(body.devices), native_id="7", account=body.account)
        case 3:
            await agent.end(body, result=RESULT)
        case 4:
            await agent.say(ResultStored, body, result=RESULT)


@pytest.mark.parametrize("again", [False, True], ids=["once", "and_again"])
@pytest.mark.parametrize("place", range(6))
async def test_wherever_the_list_stands_among_the_entries_the_lost_job_is_whole_again(place: int, again: bool) -> None:
    """`again`: the list came in two epochs, or twice."""
    key = Key.new("U")
    async with hub_of(key) as hub:
        agent = hub.agent()
        async with alive(agent):
            job = await hub.submit(outputs=["out/*"])
            body = await agent.next_running()
    async with hub_of(key, epoch=2) as restored:
        heir = restored.agent(journal_name="jnl-heir", tells=again)
        heir.offers, heir.kept = agent.offers, agent.kept
        for number in range(6):
            if number == place:
                await heir.tell_held(1 if again else 2)
            await told_so_far(heir, body, number)
        async with alive(heir):
            await adopted_all(restored, body.attempt)
            done = await restored.reaches(job.job, "succeeded")
            assert (done.tenant, done.delivered, [a.outcome for a in done.attempts]) == (ACME, body.attempt, ["succeeded"])
            assert not [one for one in heir.heard if isinstance(one, Go | Offer)], "it runs nowhere again"


@pytest.mark.parametrize("code", ["withdrawn", "stopped"])
async def test_what_was_claimed_and_given_up_in_the_lost_hour_waits_for_nobody(code: str) -> None:
    """Its site does not list it as held and nobody takes it up: its claim says nothing any more. What is said to have started stays aside."""
    key = Key.new("U")
    async with hub_of(key) as hub:
        agent = hub.agent()
        async with alive(agent):
            await hub.submit()
            given_up = await agent.next_running()
            await hub.submit()
            started = await agent.next_running()
    async with hub_of(key, epoch=2) as restored:
        heir = restored.agent(journal_name="jnl-heir")
        for body, numbers in ((given_up, (0, 1)), (started, (0, 1, 2))):
            for number in numbers:
                await told_so_far(heir, body, number)
            await heir.say(NotStarted, body, code=code, text="asked for")
        async with alive(heir):
            await until(lambda: bool(restored.lanes.entries) and not restored.lanes.open, "all that it says is interpreted")
            (why,) = restored.lanes.quarantined.values()
            assert why == f"scheduler.unknown_attempt: {SITE} says Started of attempt {started.attempt}, which is not known here"
            (told,) = [row for row in restored.store.audits if row.action == "quarantine.let_go"][:1]
            assert told.reason == f"{SITE} says that {given_up.attempt} never started, and it is not known here"


async def test_after_a_restore_the_jobs_of_the_lost_hour_exist_again_and_their_keys_find_them() -> None:
    """LINK D3, by `behind`: the journal goes on, no new one is opened."""
    key, env = Key.new("U"), {"HF_TOKEN": "value-of-the-token"}
    async with hub_of(key) as hub:
        agent = hub.agent()
        async with alive(agent):
            over = await hub.submit("over", outputs=["out/*"])
            body = await agent.next_running()
            await agent.end(body, result=RESULT)
            await hub.reaches(over.job, "finishing")
            await agent.store_result(body, RESULT)
            await hub.reaches(over.job, "succeeded")
            runs = await hub.submit("runs", env=env)
            held = await agent.next_running()
            await hub.reaches(runs.job, "running")
    assert agent.offers[held.attempt].env == env and env["HF_TOKEN"] not in str(encode(list(agent.kept.values())))
    async with hub_of(key, epoch=2) as restored:
        heir = heir_at(restored, agent)
        async with alive(heir):
            await adopted_all(restored, body.attempt, held.attempt)
            assert [(await restored.job(job.job)).state for job in (over, runs)] == ["succeeded", "running"]
            assert (await restored.submit("over", outputs=["out/*"])).job == over.job
            for values in (env, {"HF_TOKEN": "another"}):
                assert (await restored.submit("runs", env=values)).job == runs.job, "values that nobody has are not compared"
            with pytest.raises(Conflict):
                await restored.submit("runs", env=env, restartable=True)
            await heir.end(held)
            await restored.reaches(runs.job, "succeeded")
            await until(lambda: held.attempt in settled_by(heir), "it is settled, by a number below those of the epoch before")
            new = await restored.submit("new")
            assert (await heir.next_running()).job == new.job
    assert heir.told == [2]


async def test_what_ran_twice_in_the_lost_hour_is_not_run_a_third_time() -> None:
    key = Key.new("U")
    async with hub_of(key) as hub:
        agent = hub.agent()
        async with alive(agent):
            job = await hub.submit(restartable=True)
            first = await agent.next_running()
            await agent.end(first, "failed", Cause.SITE)
            hub.store.backs.clear()
            second = await agent.next_running()
            await agent.end(second)
            await hub.reaches(job.job, "succeeded")
    async with hub_of(key, epoch=2) as restored:
        heir = heir_at(restored, agent)
        async with alive(heir):
            await adopted_all(restored, first.attempt, second.attempt)
            done = await restored.reaches(job.job, "succeeded")
            assert [(a.attempt, a.outcome, a.cause) for a in done.attempts] == [
                (first.attempt, "failed", "site"),
                (second.attempt, "succeeded", None),
            ]
            await until(lambda: not restored.store.holders, "no device is held by what is over")
            assert not [one for one in heir.heard if isinstance(one, Offer)]


async def test_nothing_is_placed_at_a_site_before_it_has_told_what_it_holds() -> None:
    """Its disk refuses the list: nothing of the new epoch is taken, and nothing is offered."""
    key = Key.new("U")
    async with hub_of(key) as hub:
        agent = hub.agent()
        async with alive(agent):
            job = await hub.submit()
            body = await agent.next_running()
            await hub.reaches(job.job, "running")
    async with hub_of(key, epoch=2) as restored:
        heir = heir_at(restored, agent)
        tell, refused = heir.tell_held, list[int]()

        async def full(epoch: int) -> None:
            refused.append(epoch)
            if len(refused) < 4:
                raise Unavailable("agent.disk_full", "no room")
            assert not restored.store.attempt_rows, "nothing was placed meanwhile"
            await tell(epoch)

        heir.lane._on_raised = full
        async with alive(heir):
            new = await restored.submit("new")
            await adopted_all(restored, body.attempt)
            await until(lambda: {held.job for held in heir.running.values()} == {job.job, new.job}, "then both run")
            assert len(refused) == 4
            row = await restored.lanes.site(Lane.SCHEDULER, SITE)
            assert row is not None and row.epoch_told == 2


async def test_a_job_whose_values_were_lost_fails_where_it_would_have_run_again() -> None:
    """Without its environment it would be another job."""
    key = Key.new("U")
    async with hub_of(key) as hub:
        agent = hub.agent()
        async with alive(agent):
            job = await hub.submit(env={"TOKEN": "x"}, restartable=True)
            body = await agent.next_running()
            await hub.reaches(job.job, "running")
    async with hub_of(key, epoch=2) as restored:
        heir = heir_at(restored, agent)
        async with alive(heir):
            await adopted_all(restored, body.attempt)
            await heir.end(body, "failed", Cause.SITE)
            failed = await restored.reaches(job.job, "failed")
            assert failed.attempts[0].cause == "site" and len(failed.attempts) == 1


async def test_an_adopted_job_that_comes_back_to_the_queue_waits_for_every_sites_word() -> None:
    """Its second run may be at a site that has not told yet."""
    key = Key.new("U")
    async with hub_of(key) as hub:
        agent, other = hub.agent(), hub.agent(ELSEWHERE)
        async with alive(agent):
            job = await hub.submit(restartable=True)
            first = await agent.next_running()
            await agent.end(first, "failed", Cause.SITE)
            await hub.reaches(job.job, "queued")
        await hub.learn(*joined_events(ELSEWHERE, 2, ACME))
        async with alive(other):
            second = await other.next_running()
            await hub.reaches(job.job, "running")
    async with hub_of(key, epoch=2) as restored:
        await restored.learn(*joined_events(ELSEWHERE, 2, ACME))
        restored.store.backs.clear()
        heir, late = heir_at(restored, agent), heir_at(restored, other)
        async with alive(heir):
            await adopted_all(restored, first.attempt)
            restored.store.backs.clear()

            async def waits() -> bool:
                waiting = (await restored.job(job.job)).waiting
                return waiting is not None and "site-b has not told yet" in waiting.text

            await until(waits, "it waits for the other site's word")
            async with alive(late):
                await adopted_all(restored, first.attempt, second.attempt)
                await late.end(second)
                done = await restored.reaches(job.job, "succeeded")
        assert [a.attempt for a in done.attempts] == [first.attempt, second.attempt]
