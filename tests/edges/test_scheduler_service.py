"""The scheduler whole, over the real lane machines: on the bus and store in memory for its rules. `test_scheduler_process` has the real parts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import msgspec
import pytest
from tests.edges.scheduler_world import (
    ACME,
    BETA,
    CLOCK,
    OPERATOR,
    USER,
    Agent,
    alive,
    caller,
    joined_events,
    meta,
    pool_record,
    site_record,
    with_images,
)
from tests.edges.store_world import running, until

from intertie.bus.memory import MemoryBroker, MemoryBus, site_account
from intertie.bus.rpc import Caller
from intertie.clock import Clock, SystemClock
from intertie.contracts.base import Empty, Event, encode
from intertie.contracts.identity import AuditQuery, Role
from intertie.contracts.image import PoolImages
from intertie.contracts.incident import FaultReported
from intertie.contracts.job import (
    AttemptsQuery,
    CancelJob,
    Cause,
    JobQuery,
    JobRecord,
    JobSpec,
    JobsQuery,
    LogsQuery,
    Resources,
    ResultRef,
    SetQuota,
    SubmitJob,
    WaitReason,
)
from intertie.contracts.link import Offer, Settle, Stop, Withdraw
from intertie.contracts.site import DeviceKind, DeviceState, Freshness, PoolChanged, SiteChanged
from intertie.errors import Conflict, Denied, NotFound, Refused, Unavailable
from intertie.ids import Digest, JobId, SiteName, TenantName
from intertie.lane.memory import MemoryLaneTables
from intertie.planner import Plan, Snapshot, objections
from intertie.scheduler.memory import MemorySchedulerStore
from intertie.scheduler.rounds import Check
from intertie.scheduler.wiring import Parts, wire
from intertie.trust.keys import Key

SITE = SiteName("site-a")
RESULT = ResultRef(digest=Digest("sha256:" + "0" * 64), size=10, files=2)


@dataclass
class Hub:
    parts: Parts
    store: MemorySchedulerStore
    broker: MemoryBroker
    key: Key
    lanes: MemoryLaneTables

    def agent(self, site: SiteName = SITE, **options: object) -> Agent:
        return Agent(self.broker.client(site, site_account(site)), site, self.key.public, **options)  # type: ignore[arg-type]  # Agent's fields

    async def learn(self, *events: Event) -> None:
        handlers = self.parts.knowledge.handlers()
        for event in events:
            await handlers[type(event)](event, meta(event))

    async def submit(
        self, key: str = "k1", *, tenant: TenantName = ACME, env: Mapping[str, str] | None = None, **spec: object
    ) -> JobRecord:
        spec = {"env_names": sorted(env or {}), **spec}
        asked = JobSpec(name="one", script="true", **spec)  # type: ignore[arg-type]  # fields of JobSpec
        request = SubmitJob(tenant=tenant, spec=asked, client_key=key, env=dict(env or {}))
        reply = await self.parts.scheduler.submit(request, caller(Role.TENANT_USER, tenant=tenant))
        assert reply.job is not None
        return reply.job

    async def job(self, job: JobId) -> JobRecord:
        return await self.parts.scheduler.job(JobQuery(job=job), USER)

    async def reaches(self, job: JobId, state: str) -> JobRecord:
        async def there() -> bool:
            return (await self.job(job)).state == state

        await until(there, f"the job is {state}")
        return await self.job(job)

    async def waits(self, job: JobId, reason: WaitReason) -> JobRecord:
        async def there() -> bool:
            waiting = (await self.job(job)).waiting
            return waiting is not None and waiting.reason is reason

        await until(there, f"the job waits for {reason}")
        return await self.job(job)


@asynccontextmanager
async def made(
    store: MemorySchedulerStore,
    broker: MemoryBroker,
    key: Key,
    *,
    clock: Clock = CLOCK,
    check: Check = objections,
    **more: object,
) -> AsyncIterator[Hub]:
    """A scheduler that runs on what is in the store."""
    bus: MemoryBus = broker.client("scheduler")
    tables = MemoryLaneTables(store)
    parts = await wire(store, tables, bus, clock, key, lambda: "", zone=ZoneInfo("Asia/Shanghai"), scale=0.2, check=check, **more)  # type: ignore[arg-type]  # of wire
    async with running(parts.keeper.run()), running(parts.planner.run()), running(parts.watch()):
        await parts.keeper.listening.wait()
        yield Hub(parts, store, broker, key, tables)


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with made(MemorySchedulerStore(clock=CLOCK), MemoryBroker(), Key.new("U")) as found:
        yield found


@pytest.fixture
async def agent(hub: Hub) -> AsyncIterator[Agent]:
    """A joined site of two slots where acme and beta have accounts."""
    found = hub.agent()
    await hub.learn(*joined_events(SITE, 2, ACME, BETA))
    async with alive(found):
        yield found


async def test_a_job_runs_from_submit_to_success_and_its_story_says_how(hub: Hub, agent: Agent) -> None:
    job = await hub.submit(outputs=["out/*"])
    body = await agent.next_running()
    assert (body.job, body.account, body.site, len(body.devices)) == (job.job, "u-acme", SITE, 1)
    assert agent.attribution(body).job == job.job
    await hub.reaches(job.job, "running")
    await agent.end(body, result=RESULT)
    await hub.reaches(job.job, "finishing")
    await agent.store_result(body, RESULT)
    done = await hub.reaches(job.job, "succeeded")
    assert (done.attempts[0].result, done.attempts[0].ran_us, done.waiting) == (RESULT, 1_000_000, None)
    told = await hub.parts.scheduler.story(JobQuery(job=job.job), USER)
    assert [line.what for line in told.lines] == [
        "submitted",
        "placed",
        "claimed",
        "staging",
        "started",
        "ended: succeeded",
        "results stored",
    ]
    await until(lambda: any(isinstance(one, Settle) for one in agent.heard), "the site is told that all is held")


async def test_the_go_comes_with_the_answer_that_acknowledges_the_claim(hub: Hub, agent: Agent) -> None:
    """No beat lies between claim and go: three exchanges from offer to started, whatever the pace."""
    await hub.submit()
    await agent.next_running()
    kinds = [type(one).__name__ for one in agent.heard]
    assert kinds == ["Offer", "Go"]


async def test_the_same_key_gives_the_same_job_and_other_content_is_a_conflict(hub: Hub, agent: Agent) -> None:
    """BR-061."""
    first = await hub.submit("k1")
    assert (await hub.submit("k1")).job == first.job
    with pytest.raises(Conflict) as conflict:
        await hub.submit("k1", wall_s=60)
    assert (conflict.value.code, conflict.value.details["job"]) == ("scheduler.key_reused", first.job)
    assert (await hub.submit("k1", tenant=BETA)).job != first.job


async def test_what_no_pool_can_hold_is_refused_with_what_is_missing(hub: Hub, agent: Agent) -> None:
    with pytest.raises(Refused) as refused:
        await hub.submit(resources=Resources(gpus=8, gpu_model="A100"))
    assert refused.value.code == "scheduler.no_site_fits"
    assert refused.value.details["rejections"] == [
        {"site": SITE, "pool": "cpu", "rule": "accelerator_model", "text": "the pool has no accelerator", "needed": "A100", "found": "none"}
    ]
    asked = JobSpec(name="one", script="true", resources=Resources(slots=2))
    dry = await hub.parts.scheduler.submit(SubmitJob(tenant=ACME, spec=asked, client_key="d", dry_run=True), USER)
    assert (dry.job, dry.fits) == (None, ["site-a/cpu"])
    assert (await hub.parts.scheduler.jobs(JobsQuery(), USER)).jobs == []


IMAGE = "registry.example.cn/team/train@sha256:" + "a" * 64


async def test_a_job_that_names_its_image_is_refused_where_none_runs_it_and_waits_for_a_site_that_has_not_told(
    hub: Hub, agent: Agent
) -> None:
    """Issue 4. An agent of before images would run it without: it is never offered such a job, however long that waits."""
    with pytest.raises(Refused) as refused:
        await hub.submit(image="registry.example.cn/team/train:1.2")
    assert refused.value.code == "image.no_digest" and "@sha256:" in refused.value.next_step
    await hub.learn(with_images(SITE, 2, PoolImages()))
    with pytest.raises(Refused) as refused:
        await hub.submit(image=IMAGE)
    assert refused.value.code == "scheduler.no_site_fits" and "runs no images" in refused.value.text
    await hub.learn(with_images(SITE, 2, None, version=3))
    job = await hub.submit(image=IMAGE)
    waiting = (await hub.waits(job.job, WaitReason.NO_SITE_FITS)).waiting
    assert waiting is not None and [r.rule for r in waiting.rejections] == ["image_untold"]
    assert not agent.offers
    await hub.learn(with_images(SITE, 2, PoolImages(runtime="apptainer", sources=["registry.example.cn"]), version=4))
    body = await agent.next_running()
    assert body.spec.image == IMAGE
    ran = await hub.reaches(job.job, "running")
    assert ran.attempts[0].image == IMAGE
    story = await hub.parts.scheduler.story(JobQuery(job=job.job), USER)
    assert any(line.what == "started" and IMAGE in line.why for line in story.lines)


async def test_before_any_site_has_joined_a_job_waits_for_one(hub: Hub) -> None:
    job = await hub.submit(resources=Resources(gpus=8))
    waiting = (await hub.waits(job.job, WaitReason.NO_SITE)).waiting
    assert waiting is not None and waiting.position == 1 and waiting.round is not None


async def test_a_cancel_of_a_waiting_job_acts_now(hub: Hub) -> None:
    """BR-049."""
    job = await hub.submit()
    done = await hub.parts.scheduler.cancel(CancelJob(job=job.job, reason="enough"), USER)
    assert (done.state, done.cancel_requested) == ("cancelled", True)


async def test_a_cancel_of_a_running_job_is_said_when_its_processes_are_gone(hub: Hub, agent: Agent) -> None:
    job = await hub.submit()
    await agent.next_running()
    await hub.reaches(job.job, "running")
    asked = await hub.parts.scheduler.cancel(CancelJob(job=job.job, reason="enough"), USER)
    assert asked.cancel_requested and asked.state != "cancelled"
    done = await hub.reaches(job.job, "cancelled")
    assert done.attempts[0].cause is Cause.CANCELLED
    assert [type(one).__name__ for one in agent.heard].count(Stop.__name__) == 1


async def test_a_cancel_wins_over_a_start_that_has_not_happened(hub: Hub, agent: Agent) -> None:
    """BR-048."""
    agent.hold = True
    job = await hub.submit()
    await claimed(hub, job.job)
    await hub.parts.scheduler.cancel(CancelJob(job=job.job), USER)
    done = await hub.reaches(job.job, "cancelled")
    assert (done.attempts[0].state, done.attempts[0].ran_us) == ("not_started", 0)


async def claimed(hub: Hub, job: JobId) -> None:
    """The claim is on disk at the hub: before that a cancel withdraws the offer."""

    async def looked() -> bool:
        return any(attempt.claimed_at for attempt in (await hub.job(job)).attempts)

    await until(looked, "the claim is on disk at the hub")


async def test_others_jobs_are_not_there(hub: Hub, agent: Agent) -> None:
    """BR-146, BR-147: read, explain, logs, story and cancel answer alike for a foreign and for an unknown job."""
    job = await hub.submit()
    theirs = caller(Role.TENANT_USER, tenant=BETA)
    texts = set()
    for name in (job.job, JobId("job-nowhere")):
        query = JobQuery(job=name)
        for call in (
            hub.parts.scheduler.job(query, theirs),
            hub.parts.scheduler.story(query, theirs),
            hub.parts.scheduler.logs(LogsQuery(job=name), theirs),
            hub.parts.scheduler.cancel(CancelJob(job=name, reason="x"), theirs),
        ):
            with pytest.raises(NotFound) as missing:
                await call
            texts.add((missing.value.code, missing.value.text))
    assert len(texts) == 1
    with pytest.raises(NotFound):
        await hub.parts.scheduler.submit(SubmitJob(tenant=ACME, spec=JobSpec(name="n", script="s"), client_key="k"), theirs)


async def test_a_site_owner_may_cancel_at_the_own_site_with_a_reason(hub: Hub, agent: Agent) -> None:
    """BR-146: with a reason, audited."""
    job = await hub.submit()
    await agent.next_running()
    await hub.reaches(job.job, "running")
    owner = caller(Role.SITE_OWNER, tenant=None, site=SITE, name="bob")
    with pytest.raises(Refused) as refused:
        await hub.parts.scheduler.cancel(CancelJob(job=job.job), owner)
    assert refused.value.code == "scheduler.reason_needed"
    with pytest.raises(NotFound):
        await hub.parts.scheduler.cancel(CancelJob(job=job.job, reason="x"), caller(Role.SITE_OWNER, tenant=None, site=SiteName("site-b")))
    await hub.parts.scheduler.cancel(CancelJob(job=job.job, reason="maintenance"), owner)
    await hub.reaches(job.job, "cancelled")
    rows = (await hub.parts.scheduler.audit(AuditQuery(), OPERATOR)).rows
    assert ("bob", "job.cancel", "maintenance") in [(r.actor, r.action, r.reason) for r in rows]


@pytest.mark.parametrize(
    ("who", "seen"),
    [
        (USER, "the loss is 0.01"),
        (caller(Role.SERVICE, tenant=None), "the loss is 0.01"),
        (OPERATOR, ""),
        (caller(Role.SITE_OWNER, tenant=None, site=SITE), ""),
        (caller(Role.AUDITOR, tenant=None), ""),
    ],
)
async def test_what_a_job_printed_is_its_tenants(hub: Hub, agent: Agent, who: Caller, seen: str) -> None:
    job = await hub.submit()
    await agent.end(await agent.next_running(), log_tail="the loss is 0.01")
    await hub.reaches(job.job, "succeeded")
    asked = JobQuery(job=job.job)
    one, story = await hub.parts.scheduler.job(asked, who), await hub.parts.scheduler.story(asked, who)
    (listed,) = (await hub.parts.scheduler.jobs(JobsQuery(), who)).jobs
    assert [record.attempts[0].log_tail for record in (one, story.job, listed)] == [seen] * 3


async def test_a_busy_refusal_costs_nothing_and_a_fault_costs_back_off(hub: Hub, agent: Agent) -> None:
    agent.refuse = "fetch_failed"
    job = await hub.submit()
    waiting = (await hub.waits(job.job, WaitReason.BACK_OFF)).waiting
    assert waiting is not None and "fetch_failed" in waiting.text
    agent.refuse = ""
    await hub.reaches(job.job, "running")
    done = await hub.job(job.job)
    assert [a.state for a in done.attempts][-1] == "running" and len(done.attempts) <= 5


async def test_a_device_that_was_refused_as_busy_is_not_offered_again_before_it_is_seen_anew(hub: Hub, agent: Agent) -> None:
    agent.refuse, agent.samples = "device_busy", False
    await agent.sample()
    job = await hub.submit()

    async def refused() -> bool:
        return [a.state for a in (await hub.job(job.job)).attempts] == ["refused", "refused"]

    await until(refused, "both slots were tried once")
    await hub.waits(job.job, WaitReason.DEVICES_BUSY)
    assert len([one for one in agent.heard if isinstance(one, Offer)]) == 2
    agent.refuse = ""
    await agent.sample()
    await hub.reaches(job.job, "running")


@pytest.mark.parametrize("state", [DeviceState.LOST, DeviceState.FOREIGN, DeviceState.UNKNOWN])
async def test_a_device_that_is_ill_gets_no_work_and_explain_says_so(hub: Hub, agent: Agent, state: DeviceState) -> None:
    agent.states = {"slot-0": state}
    await agent.sample()
    one = await hub.submit("k1")
    body = await agent.next_running()
    assert body.devices == ["slot-1"]
    two = await hub.submit("k2", resources=Resources(slots=2))
    waiting = (await hub.waits(two.job, WaitReason.DEVICES_UNHEALTHY)).waiting
    assert waiting is not None
    (rejection,) = waiting.rejections
    assert (rejection.rule, rejection.needed, rejection.found) == ("devices_unhealthy", "2", "1")
    assert f"slot-0 {state}" in rejection.text
    assert (await hub.job(one.job)).attempts[0].devices == ["slot-1"]


async def test_without_live_telemetry_there_is_no_work(hub: Hub) -> None:
    """BR-066: what was last known makes nothing eligible."""
    agent = hub.agent(samples=False)
    await hub.learn(*joined_events(SITE, 2, ACME))
    async with alive(agent):
        job = await hub.submit()
        await hub.waits(job.job, WaitReason.DEVICES_UNHEALTHY)
        await agent.sample()
        await hub.reaches(job.job, "running")


async def test_a_quota_is_never_passed_and_is_what_the_job_waits_for(hub: Hub, agent: Agent) -> None:
    await hub.parts.scheduler.set_quota(SetQuota(tenant=ACME, kind=DeviceKind.SLOT, limit=1), OPERATOR)
    first, second = await hub.submit("k1"), await hub.submit("k2")
    body = await agent.next_running()
    await hub.waits(second.job, WaitReason.QUOTA)
    await agent.end(body)
    await hub.reaches(first.job, "succeeded")
    await hub.reaches(second.job, "running")
    with pytest.raises(Denied):
        await hub.parts.scheduler.set_quota(SetQuota(tenant=ACME, kind=DeviceKind.SLOT, limit=9), USER)
    assert [q.limit for q in (await hub.parts.scheduler.quotas(Empty(), USER)).quotas] == [1]
    assert (await hub.parts.scheduler.quotas(Empty(), caller(Role.TENANT_USER, tenant=BETA))).quotas == []


async def test_a_freed_slot_is_used_again_before_the_next_sample(hub: Hub, agent: Agent) -> None:
    """The site's word that an attempt ended is newer than its last sample."""
    agent.slots, agent.samples = 1, False
    await agent.sample()
    first = await hub.submit("k1")
    body = await agent.next_running()
    await agent.sample()
    second = await hub.submit("k2")
    await hub.waits(second.job, WaitReason.DEVICES_BUSY)
    await agent.end(body)
    await hub.reaches(first.job, "succeeded")
    await hub.reaches(second.job, "running")


async def test_a_cordon_and_a_mapping_reach_rounds_and_settings(hub: Hub, agent: Agent) -> None:
    await until(lambda: bool(agent.settings), "the site has its settings")
    assert [m.account for m in agent.settings[-1].mappings] == ["u-acme", "u-beta"]
    await hub.learn(PoolChanged(version=2, record=pool_record(SITE, 2, version=2, cordoned=True)))
    job = await hub.submit()
    waiting = (await hub.waits(job.job, WaitReason.CORDONED)).waiting
    assert waiting is not None and "disk swap" in waiting.text
    await until(lambda: agent.settings[-1].cordoned_pools == ["cpu"], "the site knows of its cordon")
    assert agent.settings[-1].revision > agent.settings[0].revision
    await hub.learn(PoolChanged(version=3, record=pool_record(SITE, 2, version=3)))
    await hub.reaches(job.job, "running")


async def test_a_silent_site_changes_only_ages(hub: Hub) -> None:
    """BR-053, the blip: silence is told beside the state; nothing is placed there, nothing of it ends."""
    agent = hub.agent()
    await hub.learn(*joined_events(SITE, 2, ACME))
    async with alive(agent):
        job = await hub.submit()
        body = await agent.next_running()
        await hub.reaches(job.job, "running")
    version = (await hub.job(job.job)).version
    stale = msgspec.structs.replace(site_record(SITE, version=2, freshness=Freshness.STALE))
    pool = msgspec.structs.replace(pool_record(SITE, 2, version=2), freshness=Freshness.STALE)
    await hub.learn(SiteChanged(version=2, record=stale), PoolChanged(version=2, record=pool))
    other = await hub.submit("k2")
    await hub.waits(other.job, WaitReason.SITES_SILENT)

    async def silent() -> bool:
        return (await hub.job(job.job)).site_silent_since is not None

    await until(silent, "silence is seen", within_s=30)
    found = await hub.job(job.job)
    assert (found.state, found.version, found.waiting.reason if found.waiting else "") == ("running", version, "site_silent")
    await hub.learn(
        SiteChanged(version=3, record=site_record(SITE, version=3)), PoolChanged(version=3, record=pool_record(SITE, 2, version=3))
    )
    async with alive(agent):
        await agent.end(body)
        await hub.reaches(job.job, "succeeded")
        await hub.reaches(other.job, "running")


async def test_logs_come_from_the_site_and_its_silence_is_said(hub: Hub, agent: Agent) -> None:
    job = await hub.submit()
    with pytest.raises(NotFound) as none_yet:
        await hub.parts.scheduler.logs(LogsQuery(job=(await hub.submit("k9", resources=Resources(slots=2))).job), USER)
    assert none_yet.value.code == "scheduler.no_attempt"
    await agent.next_running()
    await hub.reaches(job.job, "running")
    chunk = await hub.parts.scheduler.logs(LogsQuery(job=job.job, offset=2), USER)
    assert (chunk.text, chunk.next_offset) == ("llo\n", 6)
    agent.answers = False
    with pytest.raises(Unavailable) as silent:
        await hub.parts.scheduler.logs(LogsQuery(job=job.job), USER)
    assert silent.value.code == "scheduler.site_silent"


async def test_a_site_fault_is_run_again_elsewhere_if_the_job_may_be(hub: Hub, agent: Agent) -> None:
    again, once = await hub.submit("k1", restartable=True), await hub.submit("k2")
    await until(lambda: len(agent.running) == 2, "both run")
    for body in list(agent.running.values()):
        await agent.end(body, "failed", Cause.SITE)
    await hub.reaches(once.job, "failed")

    async def second() -> bool:
        return len((await hub.job(again.job)).attempts) == 2

    await until(second, "a second attempt")
    await hub.reaches(again.job, "running")


class Stepped(SystemClock):
    """The machine's clock, some time ahead."""

    ahead_s = 0.0

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.ahead_s)


async def test_an_offer_that_nobody_answers_is_taken_back() -> None:
    """LINK D1: until a claim is on disk the offer may be withdrawn, and the job placed elsewhere; the late claim changes nothing."""
    clock = Stepped()
    async with made(MemorySchedulerStore(clock=clock), MemoryBroker(), Key.new("U"), clock=clock) as hub:
        agent = hub.agent(deaf=True)
        await hub.learn(*joined_events(SITE, 2, ACME))
        async with alive(agent):
            job = await hub.submit()
            await until(lambda: any(isinstance(one, Offer) for one in agent.heard), "the offer is there")
            clock.ahead_s = 60
            found = await hub.reaches(job.job, "queued")
            assert [a.state for a in found.attempts] == ["withdrawn"]
            await until(lambda: any(isinstance(one, Withdraw) for one in agent.heard), "the site is told")


async def test_a_plan_that_its_own_check_refuses_places_nothing_and_is_reported_once() -> None:
    """The lane and the calls go on; a person is told."""
    refusing = True

    def check(plan: Plan, snapshot: Snapshot, now: datetime) -> list[str]:
        return ["a device has two holders"] if refusing and plan.decisions else []

    store = MemorySchedulerStore(clock=CLOCK)
    async with made(store, MemoryBroker(), Key.new("U"), check=check) as hub:
        agent = hub.agent()
        await hub.learn(*joined_events(SITE, 2, ACME))
        async with alive(agent):
            job = await hub.submit()
            await until(lambda: any(isinstance(event, FaultReported) for event in store.events), "it is reported")
            await hub.submit("k2")
            assert (await hub.job(job.job)).state == "queued" and not agent.heard
            assert len([event for event in store.events if isinstance(event, FaultReported)]) == 1
            refusing = False
            await hub.reaches(job.job, "running")


async def test_a_long_list_is_cut_to_what_one_message_carries(hub: Hub) -> None:
    """A page says that there is more, whether its rows or its bytes ran out."""
    for number in range(12):
        await hub.submit(f"k{number}", args=["x" * 100_000])
    page = await hub.parts.scheduler.jobs(JobsQuery(), USER)
    rest = await hub.parts.scheduler.jobs(JobsQuery(after=page.jobs[-1].job), USER)
    assert page.more and not rest.more and len(encode(page)) < 1_000_000
    assert len(page.jobs) + len(rest.jobs) == 12


async def test_a_cancel_while_the_site_is_away_waits_for_it_and_reaches_it_before_new_work() -> None:
    """BR-052: cut, cancelled, the scheduler restarted, healed: the site's first word is the stop, and until it is done its slot is not offered."""
    store, broker, key = MemorySchedulerStore(clock=CLOCK), MemoryBroker(), Key.new("U")
    async with made(store, broker, key) as hub:
        agent = hub.agent(slots=1)
        await hub.learn(*joined_events(SITE, 1, ACME))
        async with alive(agent):
            job = await hub.submit("k1")
            await agent.next_running()
            await hub.reaches(job.job, "running")
        asked = await hub.parts.scheduler.cancel(CancelJob(job=job.job, reason="enough"), USER)
        assert (asked.state, asked.cancel_requested) == ("running", True)
        other = await hub.submit("k2")
    before = len(agent.heard)
    async with made(store, broker, key) as hub:
        found = await hub.job(job.job)
        assert (found.state, found.cancel_requested, (await hub.job(other.job)).state) == ("running", True, "queued")
        async with alive(agent):
            done = await hub.reaches(job.job, "cancelled")
            await hub.reaches(other.job, "running")
    assert done.attempts[0].cause is Cause.CANCELLED
    told = [type(one).__name__ for one in agent.heard[before:]]
    assert told[0] == Stop.__name__ and Offer.__name__ in told


async def test_a_restarted_scheduler_goes_on_where_it_was() -> None:
    """BR-070, with a job that ends while the scheduler is down: jobs, reasons and what others told are on disk; nothing runs twice."""
    store, broker, key = MemorySchedulerStore(clock=CLOCK), MemoryBroker(), Key.new("U")
    async with made(store, broker, key) as hub:
        agent = hub.agent()
        await hub.learn(*joined_events(SITE, 1, ACME))
        agent.slots = 1
        async with alive(agent):
            first, second = await hub.submit("k1"), await hub.submit("k2")
            body = await agent.next_running()
            await hub.reaches(first.job, "running")
            await hub.waits(second.job, WaitReason.DEVICES_BUSY)
    async with made(store, broker, key) as hub:
        waiting = (await hub.job(second.job)).waiting
        assert waiting is not None and waiting.rejections
        async with alive(agent):
            await agent.end(body)
            await hub.reaches(first.job, "succeeded")
            await hub.reaches(second.job, "running")
    assert len([one for one in agent.heard if isinstance(one, Offer)]) == 2
    found = await hub.parts.scheduler.attempts(AttemptsQuery(), caller(Role.SERVICE, tenant=None))
    assert [s.record.number for s in found.attempts] == [1, 1]
    with pytest.raises(Denied):
        await hub.parts.scheduler.attempts(AttemptsQuery(), USER)
