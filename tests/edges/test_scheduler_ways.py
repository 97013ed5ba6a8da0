"""The scheduler and a link that breaks: reruns by canary, promises, new journals, islanded work, over the real lane machines on the bus in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta

import msgspec
import pytest
from tests.edges.scheduler_world import ACME, CLOCK, OPERATOR, POOL, USER, alive, caller, joined_events, site_record
from tests.edges.store_world import until
from tests.edges.test_scheduler_service import RESULT, SITE, Hub, made

from intertie.bus.memory import MemoryBroker, site_account
from intertie.clock import SystemClock
from intertie.contracts.base import Empty, encode
from intertie.contracts.identity import Role
from intertie.contracts.incident import FaultReported
from intertie.contracts.job import (
    CloseAttempt,
    JobQuery,
    JobRecord,
    JobSpec,
    OnSilence,
    PreemptJob,
    Resources,
    SetGrant,
    SetQuota,
    WaitReason,
)
from intertie.contracts.link import Go, IslandedGrant, IslandedSubmit, JournalOpened, Lane, LostRange, Offer, Settle, Started, Stop
from intertie.contracts.site import DeviceKind, SiteChanged
from intertie.errors import Conflict, Denied
from intertie.ids import CANARY, AttemptId, DeviceId, Digest, JobId, JournalId, SiteName
from intertie.link.journal import InstructionMark
from intertie.scheduler.memory import MemorySchedulerStore
from intertie.trust.keys import Key
from intertie.trust.seal import open_seal, seal

ELSEWHERE = SiteName("site-b")
# The shortest that the design allows is 30 s; silence, margin included, is then longer than a test should take, so it is scaled here.
LEASE_S = 1


@asynccontextmanager
async def hub_with(
    *, lost_after: timedelta = timedelta(days=7), deaf: bool = False, store: MemorySchedulerStore | None = None
) -> AsyncIterator[Hub]:
    broker, key = MemoryBroker(), Key.new("U")
    canary = None if deaf else broker.client("canary", site_account(CANARY))
    async with made(store or MemorySchedulerStore(clock=CLOCK), broker, key, canary=canary, lease_s=LEASE_S, lost_after=lost_after) as hub:
        yield hub


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grace, kill and a try of an agent in memory take no time."""
    monkeypatch.setattr("intertie.scheduler.core.silence.STOP_GRACE_S", 0.2)
    monkeypatch.setattr("intertie.scheduler.core.silence.KILL_S", 0.1)
    monkeypatch.setattr("intertie.scheduler.core.silence.TRY_S", 0.2)


def faults(store: MemorySchedulerStore) -> list[str]:
    return [event.report.kind for event in store.events if isinstance(event, FaultReported)]


async def story(hub: Hub, job: JobId) -> list[str]:
    return [line.what for line in (await hub.parts.scheduler.story(JobQuery(job=job), USER)).lines]


async def rerun_job(hub: Hub, key: str = "k1") -> JobRecord:
    return await hub.submit(key, restartable=True, on_silence=OnSilence.RERUN)


async def test_br_053_work_of_a_silent_site_runs_again_and_one_result_counts(short: None) -> None:
    async with hub_with() as hub:
        first, second = hub.agent(), hub.agent(ELSEWHERE)
        await hub.learn(*joined_events(SITE, 2, ACME))
        async with alive(first):
            job = await rerun_job(hub)
            original = await first.next_running()
            assert original.lease_s == LEASE_S
        # The site falls silent; another one has joined.
        await hub.learn(*joined_events(ELSEWHERE, 2, ACME))
        async with alive(second):
            again = await second.next_running()
            assert (again.job, again.generation) == (job.job, original.generation + 1)
            async with alive(first):
                await until(lambda: any(isinstance(one, Stop) for one in first.heard), "the original is told to stop")
                await second.end(again, result=RESULT)
                await hub.reaches(job.job, "finishing")
                await second.store_result(again, RESULT)
                done = await hub.reaches(job.job, "succeeded")
                await until(
                    lambda: any(isinstance(o, Settle) and o.attempt == original.attempt for o in first.heard), "the original is settled"
                )
    assert (done.survivor, done.delivered) == (again.attempt, again.attempt)
    told = await hub.parts.scheduler.job(JobQuery(job=job.job), USER)
    assert [(a.outcome, a.cause, a.replaced_by) for a in told.attempts] == [
        ("cancelled", "platform", again.attempt),
        ("succeeded", None, None),
    ]
    assert "replaced" in await story(hub, job.job)


async def test_a_hub_that_is_deaf_runs_nothing_again_and_says_why(short: None) -> None:
    """BR-054: the bus was down, or there is no canary."""
    async with hub_with(deaf=True) as hub:
        agent, other = hub.agent(), hub.agent(ELSEWHERE)
        await hub.learn(*joined_events(SITE, 2, ACME), *joined_events(ELSEWHERE, 2, ACME))
        async with alive(agent):
            job = await rerun_job(hub)
            await agent.next_running()
        async with alive(other):
            await until(lambda: "scheduler.deaf" in faults(hub.store), "a person is told")
            assert (await hub.job(job.job)).state == "running" and not other.running


async def test_rerun_work_is_placed_only_where_supervisors_stop_it_without_the_agent() -> None:
    """LINK D4."""
    async with hub_with() as hub:
        agent = hub.agent()
        _, *others = joined_events(SITE, 2, ACME)
        await hub.learn(SiteChanged(version=1, record=site_record(SITE, self_stop=False)), *others)
        async with alive(agent):
            job = await rerun_job(hub)
            waiting = (await hub.waits(job.job, WaitReason.NO_SITE_FITS)).waiting
            assert waiting is not None and waiting.rejections[0].rule == "self_stop"
            await hub.learn(SiteChanged(version=2, record=site_record(SITE, version=2)))
            await agent.next_running()


async def test_br_056_what_never_comes_back_is_lost_at_its_promised_date_and_refined_once(short: None) -> None:
    async with hub_with(lost_after=timedelta(seconds=1)) as hub:
        agent = hub.agent()
        await hub.learn(*joined_events(SITE, 2, ACME))
        async with alive(agent):
            job = await hub.submit(wall_s=1)
            body = await agent.next_running()
        record = await hub.reaches(job.job, "lost")
        assert (record.attempts[0].cause, record.attempts[0].lost_by is not None) == ("unknown", True)
        assert {"site silent", "lost"} <= {*await story(hub, job.job)}
        async with alive(agent):
            await agent.end(body)
            done = await hub.reaches(job.job, "succeeded")
        assert done.attempts[0].refined


async def test_a_named_person_may_close_what_a_silent_site_holds_and_nobody_else() -> None:
    async with hub_with() as hub:
        agent = hub.agent()
        await hub.learn(*joined_events(SITE, 1, ACME))
        async with alive(agent):
            job = await hub.submit()
            body = await agent.next_running()
            await hub.reaches(job.job, "running")
            ask = CloseAttempt(attempt=body.attempt, reason="the lab is closed")
            with pytest.raises(Conflict) as speaks:
                await hub.parts.scheduler.close_attempt(ask, OPERATOR)
            assert speaks.value.code == "scheduler.site_speaks"
        for who in (USER, caller(Role.SITE_OWNER, tenant=None, site=SITE)):
            with pytest.raises(Denied):
                await hub.parts.scheduler.close_attempt(ask, who)
        gone = msgspec.structs.replace(ask, site_gone=True)
        assert (await hub.parts.scheduler.close_attempt(gone, OPERATOR)).state == "lost"
        assert hub.store.holders == {}


async def test_a_new_journal_ends_what_is_surely_gone_and_keeps_the_rest() -> None:
    """ADR 0006."""
    async with hub_with() as hub:
        agent = hub.agent()
        await hub.learn(*joined_events(SITE, 2, ACME))
        async with alive(agent):
            jobs = [await hub.submit(f"k{n}") for n in range(2)]
            await until(lambda: len(agent.running) == 2, "both run")
            for job in jobs:
                await hub.reaches(job.job, "running")
        held, gone = sorted(agent.running)
        heir = hub.agent(journal_name="jnl-heir")
        heir.running, heir.offers = {held: agent.running[held]}, agent.offers
        body = agent.running[held]
        named = {
            "attempt": held,
            "job": body.job,
            "epoch": body.epoch,
            "generation": body.generation,
            "state": "running",
            "devices": body.devices,
        }
        await heir.say_plain(
            JournalOpened,
            previous=JournalId(f"jnl-{SITE}"),
            why="damaged",
            place="p",
            kernel_boot="k",
            same_place=True,
            held=[named],
        )
        async with alive(heir):
            failed = await hub.reaches(agent.running[gone].job, "failed")
            assert (failed.attempts[0].outcome, failed.attempts[0].cause) == ("unknown", "site")
            assert "scheduler.attempt_gone" in faults(hub.store)
            await heir.end(body)
            await hub.reaches(body.job, "succeeded")


async def test_a_hub_that_lost_a_job_takes_it_up_from_its_signed_offer(short: None) -> None:
    """LINK D3: the database is older than the job; the site still holds the offer, sealed by us."""
    async with hub_with() as hub:
        agent = hub.agent()
        await hub.learn(*joined_events(SITE, 2, ACME))
        async with alive(agent):
            job = await hub.submit("k1")
            body = await agent.next_running()
        sealed = next(one.sealed for one in agent.heard if isinstance(one, Offer))
    async with made(MemorySchedulerStore(clock=CLOCK), MemoryBroker(), hub.key) as restored:
        await restored.learn(*joined_events(SITE, 2, ACME))
        heir = restored.agent(journal_name="jnl-heir")
        heir.running, heir.offers = {body.attempt: body}, agent.offers
        named = {
            "attempt": body.attempt,
            "job": body.job,
            "epoch": body.epoch,
            "generation": body.generation,
            "state": "running",
            "devices": body.devices,
            "offer": sealed,
        }
        opened = {"previous": None, "why": "hub_restored", "place": "p", "kernel_boot": "k", "held": [named]}
        await heir.say_plain(JournalOpened, **opened)
        await heir.say(Started, body, started=CLOCK.now(), devices=list(body.devices), native_id="7", account=body.account)
        async with alive(heir):
            await until(lambda: job.job in restored.store.jobs, "the job is known again")
            await restored.reaches(job.job, "running")
            again = await restored.submit("k1")
            assert again.job == job.job, "the client's retry finds it"
            await heir.end(body)
            done = await restored.reaches(job.job, "succeeded")
        assert (done.submitted_by, await story(restored, job.job)) == (
            "ann",
            ["adopted", "adopted", "started", "ended: succeeded"],
        )


async def test_islanded_work_under_our_grant_becomes_a_job_and_anything_else_is_set_aside() -> None:
    """LINK D24."""
    async with hub_with() as hub:
        agent = hub.agent()
        await hub.learn(*joined_events(SITE, 2, ACME))
        grant = SetGrant(tenant=ACME, site=SITE, kind=DeviceKind.SLOT, devices=1, card_hours=5, valid_days=3)
        async with alive(agent):
            reply = await hub.parts.scheduler.set_grant(grant, OPERATOR)
            assert [(g.devices, g.card_hours) for g in reply.grants] == [(1, 5)]
            await until(lambda: bool(agent.settings and agent.settings[-1].grants), "the site has its grant")
        sealed = agent.settings[-1].grants[0]
        body = open_seal(sealed, hub.key.public, IslandedGrant)
        assert (body.grant, body.quantity_milli_us) == ("site-a/acme/slot/1", 5 * 3_600_000_000_000)
        forged = seal(Key.new("U"), encode(msgspec.structs.replace(body, devices=100)), "scheduler")
        for number, paper in enumerate((sealed, forged)):
            await agent.say_plain(
                IslandedSubmit,
                islanded=True,
                attempt=AttemptId(f"att-{number}"),
                job=JobId(f"job-{number}"),
                epoch=1,
                generation=0,
                tenant=ACME,
                pool=POOL,
                devices=[DeviceId("slot-0")],
                account="u-acme",
                spec=JobSpec(name="alone", script="true", resources=Resources(slots=1)),
                submitted_by="li",
                grant=paper,
            )
        async with alive(agent):
            await until(lambda: JobId("job-0") in hub.store.jobs, "it is a job like any other")
            await until(lambda: "lane.quarantine" in faults(hub.store), "the forged one is set aside")
        record = await hub.job(JobId("job-0"))
        assert (record.state, record.submitted_by, record.attempts[0].islanded_submit) == ("placed", "site-a:li", True)
        assert JobId("job-1") not in hub.store.jobs


async def test_a_grant_counts_as_used_while_its_site_is_silent() -> None:
    """LINK D24: both sides of a cut together never pass the quota."""
    async with hub_with() as hub:
        agent = hub.agent(ELSEWHERE)
        await hub.learn(*joined_events(SITE, 2, ACME), *joined_events(ELSEWHERE, 2, ACME))
        grant = SetGrant(tenant=ACME, site=SITE, kind=DeviceKind.SLOT, devices=2)
        await hub.parts.scheduler.set_grant(grant, OPERATOR)
        await hub.parts.scheduler.set_quota(SetQuota(tenant=ACME, kind=DeviceKind.SLOT, limit=2), OPERATOR)
        async with alive(agent):
            job = await hub.submit()
            await until(lambda: hub.parts.knowledge.hearing.caught_up(ELSEWHERE), "one site speaks")
            waiting = (await hub.waits(job.job, WaitReason.QUOTA)).waiting
            assert waiting is not None and "2 in use" in waiting.text
            await hub.parts.scheduler.set_grant(msgspec.structs.replace(grant, devices=0), OPERATOR)
            await agent.next_running()
        assert (await hub.parts.scheduler.grants(Empty(), OPERATOR)).grants == []


async def test_a_lost_range_is_told_to_a_person() -> None:
    async with hub_with() as hub:
        agent = hub.agent()
        sealed = seal(Key.new("A"), b"{}", "site")
        await agent.say_plain(LostRange, journal=JournalId("jnl-0"), first=1, last=9, digest_last=Digest("d"), sealed=sealed)
        async with alive(agent):
            await until(lambda: "lane.lost_range" in faults(hub.store), "it is reported")


async def test_a_preempted_job_stops_waits_and_keeps_away_from_the_devices_it_left() -> None:
    async with hub_with() as hub:
        agent = hub.agent()
        await hub.learn(*joined_events(SITE, 2, ACME))
        async with alive(agent):
            job = await hub.submit(restartable=True)
            await agent.next_running()
            await hub.reaches(job.job, "running")
            with pytest.raises(Denied):
                await hub.parts.scheduler.preempt(PreemptJob(job=job.job, reason="mine"), USER)
            await hub.parts.scheduler.preempt(PreemptJob(job=job.job, reason="exams"), caller(Role.SITE_OWNER, tenant=None, site=SITE))
            waiting = await hub.waits(job.job, WaitReason.BACK_OFF)
        stop = next(one for one in agent.heard if isinstance(one, Stop))
        assert (stop.cause, waiting.attempts[0].cause) == ("preempted", "preempted")
        assert waiting.waiting is not None and "exams" in waiting.waiting.text


async def test_nothing_starts_at_a_site_before_it_is_at_head() -> None:
    """LINK D12: a claim from before is answered with a go only at head; what starts nothing goes out at once."""
    async with hub_with() as hub:
        agent = hub.agent(hold=True)
        await hub.learn(*joined_events(SITE, 1, ACME))
        async with alive(agent):
            await hub.submit()
            await until(lambda: any(isinstance(one, Go) for one in agent.heard), "the go is here")
        assert next(one for one in agent.heard if isinstance(one, Go)).journal == f"jnl-{SITE}"
        tables, owed = hub.lanes, hub.parts.lane.instructions
        row = await tables.site(Lane.SCHEDULER, SITE)
        assert row is not None
        for said, orders in ((row, ["Go"]), (replace(row, at_head=False), [])):
            async with tables.turn(Lane.SCHEDULER, [SITE]) as turn:
                await turn.save([said], {}, [])
            assert [type(one).__name__ for one in await owed(SITE, InstructionMark(0, 0))] == orders


class Ahead(SystemClock):
    """A copy's wall clock that is wrong."""

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=90)


async def test_br_139_two_copies_whose_clocks_differ_lose_no_job_and_number_no_settings_in_turns() -> None:
    """Silence is measured by one process' monotonic clock; no stored wall-clock time takes part."""
    async with hub_with() as hub:
        canary = hub.broker.client("canary-2", site_account(CANARY))
        async with made(hub.store, hub.broker, hub.key, clock=Ahead(), canary=canary, lease_s=LEASE_S) as second:
            agent = hub.agent()
            for copy in (hub, second):
                await copy.learn(*joined_events(SITE, 2, ACME))
            async with alive(agent):
                done = 0
                for number in range(6):
                    job = await (hub, second)[number % 2].submit(f"k{number}", restartable=True, on_silence=OnSilence.RERUN)
                    await agent.end(await agent.next_running())
                    record = await hub.reaches(job.job, "succeeded")
                    done += len(record.attempts) == 1 and record.attempts[0].lost_by is None
            assert done == 6
            assert [one.revision for one in agent.settings] == sorted({one.revision for one in agent.settings})
            assert hub.store.revisions[SITE][0].number <= 3, "one for each thing that was learnt"


async def test_after_a_restore_an_older_job_waits_for_every_sites_word() -> None:
    """LINK D3: it may run somewhere without our knowing, so it is not placed twice; an offer from before is taken back."""
    store = MemorySchedulerStore(clock=CLOCK)
    async with hub_with(store=store) as hub:
        agent = hub.agent(deaf=True)
        await hub.learn(*joined_events(SITE, 2, ACME))
        async with alive(agent):
            old = await hub.submit()
            await hub.reaches(old.job, "placed")
    store.service_epoch = 2
    async with hub_with(store=store) as hub:
        agent, other = hub.agent(), hub.agent(ELSEWHERE)
        await hub.learn(*joined_events(SITE, 2, ACME), *joined_events(ELSEWHERE, 2, ACME))
        async with alive(agent):

            async def waits_for_b() -> bool:
                waiting = (await hub.job(old.job)).waiting
                return waiting is not None and "site-b has not told yet" in waiting.text

            await until(waits_for_b, "the old job waits for the other site's word")
            new = await hub.submit("k2")
            assert (await agent.next_running()).job == new.job, "what came in since is known to run nowhere"
            async with alive(other):
                await hub.reaches(old.job, "running")
        record = await hub.job(old.job)
        assert [a.state for a in record.attempts] == ["withdrawn", "running"] and record.attempts[1].epoch == 2


async def test_the_canary_is_shown_to_nobody() -> None:
    async with hub_with() as hub:
        ears = hub.parts.knowledge.hearing
        await until(lambda: not ears.is_deaf(CLOCK.monotonic_s()), "the canary is heard")
        assert ears.row(CANARY) is None and CANARY not in hub.parts.knowledge.world.sites
        assert await hub.store.orders(CANARY, (0, 0)) == []
