"""A job request through the whole scheduler, over the real lane machines: asked, accepted or declined, and what its tenant reads meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from decimal import Decimal

import msgspec
import pytest
from tests.edges.scheduler_world import ACME, CLOCK, USER, Agent, alive, joined_events, pool_record
from tests.edges.store_world import until
from tests.edges.test_scheduler_service import SITE, Hub, made

from intertie.bus.memory import MemoryBroker
from intertie.contracts.job import CancelJob, JobQuery, OnSilence, WaitReason
from intertie.contracts.link import OfferBody, OfferRefused, Withdraw
from intertie.contracts.site import AccessMode, JobOffering, Lendable, PoolChanged, TaskType
from intertie.errors import Refused
from intertie.ids import JobId
from intertie.scheduler.memory import MemorySchedulerStore
from intertie.trust.keys import Key

OFFERING = JobOffering(
    name="train",
    pool=pool_record(SITE, 2).pool,
    max_devices=2,
    devices=2,
    max_wall_s=7_200,
    task_types=[TaskType.BATCH],
    price_per_hour=Decimal(6),
    answer_within_s=600,
    by_hand=True,
)


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with made(MemorySchedulerStore(clock=CLOCK), MemoryBroker(), Key.new("U")) as found:
        yield found


@pytest.fixture
async def agent(hub: Hub) -> AsyncIterator[Agent]:
    """A joined site whose owner decides, and which shows no device."""
    found = hub.agent(samples=False, deaf=True)
    record = pool_record(SITE, 2, version=2)
    service = msgspec.structs.replace(
        record,
        profile=msgspec.structs.replace(record.profile, mode=AccessMode.SERVICE, lendable=Lendable(devices=0)),
        offerings=[OFFERING],
    )
    await hub.learn(*joined_events(SITE, 2, ACME), PoolChanged(version=2, record=service))
    async with alive(found):
        yield found


async def asked(hub: Hub, agent: Agent) -> JobId:
    """A request that its site holds; nobody has answered."""
    job = await hub.submit(site=SITE, offering="train", budget=Decimal(20))
    await hub.waits(job.job, WaitReason.OFFERED)
    await until(lambda: bool(agent.heard), "the request is at the site")
    return job.job


async def test_a_request_carries_its_budget_and_names_for_cards_and_its_tenant_reads_whom_it_waits_for(hub: Hub, agent: Agent) -> None:
    agent.deaf, agent.refuse = False, ""
    job = await hub.submit(site=SITE, offering="train", budget=Decimal(20))
    body = await agent.next_running()
    assert (body.job, body.offering, body.budget, body.answer_within_s) == (job.job, "train", Decimal(20), 600)
    assert body.devices == [f"req-{job.job}-1"]
    record = await hub.reaches(job.job, "running")
    (attempt,) = record.attempts
    assert attempt.offering == "train" and attempt.answer_by is not None
    assert (attempt.answer_by - attempt.offered_at).total_seconds() == 600
    await agent.end(body)
    await hub.reaches(job.job, "succeeded")


async def test_a_request_that_waits_says_by_when_an_answer_was_promised_and_is_not_taken_back_by_the_hub(hub: Hub, agent: Agent) -> None:
    job = await asked(hub, agent)
    waiting = (await hub.job(job)).waiting
    assert waiting is not None and "an answer was promised by" in waiting.text and "you may cancel" in waiting.text


async def test_a_no_ends_the_request_with_the_owners_words_and_costs_the_site_nothing(hub: Hub, agent: Agent) -> None:
    agent.deaf, agent.refuse = False, "declined"
    words = "the cards are for exams this week"

    async def declined(body: OfferBody) -> None:
        await agent.say(OfferRefused, body, code="declined", text=words, fault=False)

    agent._offered = declined  # type: ignore[method-assign]
    job = await hub.submit(site=SITE, offering="train")
    record = await hub.reaches(job.job, "cancelled")
    (attempt,) = record.attempts
    assert (attempt.state, attempt.reason, attempt.cause) == ("refused", f"declined: {words}", None)
    told = await hub.parts.scheduler.story(JobQuery(job=job.job), USER)
    assert [line.what for line in told.lines] == ["submitted", "placed", "declined by the owner"]
    second = await hub.submit("k2", site=SITE, offering="train")
    await hub.reaches(second.job, "cancelled")


async def test_a_request_is_withdrawn_by_its_tenant_while_nobody_answers(hub: Hub, agent: Agent) -> None:
    job = await asked(hub, agent)
    await hub.parts.scheduler.cancel(CancelJob(job=job, reason="no answer"), USER)
    await hub.reaches(job, "cancelled")
    await until(lambda: any(isinstance(one, Withdraw) for one in agent.heard), "the site hears that it is withdrawn")


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ({"offering": "train"}, "scheduler.offering_without_site"),
        ({"budget": Decimal(5)}, "scheduler.budget_without_offering"),
        ({"site": SITE, "offering": "train", "budget": Decimal(0)}, "scheduler.budget"),
        ({"site": SITE, "offering": "train", "budget": Decimal("1e999999")}, "scheduler.budget"),
        ({"site": SITE, "offering": "train", "on_silence": OnSilence.RERUN, "restartable": True}, "scheduler.offering_rerun"),
        ({"site": SITE, "offering": "none"}, "scheduler.no_site_fits"),
        ({"site": SITE, "offering": "train", "wall_s": 7_201}, "scheduler.no_site_fits"),
        ({"site": SITE}, "scheduler.no_site_fits"),
    ],
)
async def test_a_request_that_contradicts_itself_or_its_offering_is_refused_at_once(
    hub: Hub, agent: Agent, spec: dict[str, object], code: str
) -> None:
    with pytest.raises(Refused) as refused:
        await hub.submit(**spec)  # type: ignore[arg-type]  # fields of JobSpec
    assert refused.value.code == code
