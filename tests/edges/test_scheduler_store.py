"""One suite for the scheduler's store: PostgreSQL and the twin in memory; and what only PostgreSQL can show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from tests.conftest import PgDatabase

from intertie.contracts.base import Event, EventMeta, decode
from intertie.contracts.identity import AuditQuery
from intertie.contracts.job import (
    AttemptChanged,
    Cause,
    JobChanged,
    JobSpec,
    JobsQuery,
    JobState,
    OnSilence,
    Rejection,
    SetQuota,
    SubmitJob,
    WaitReason,
)
from intertie.contracts.link import Claimed, Ended, OfferRefused, SchedulerEntry, Started
from intertie.contracts.site import DeviceKind
from intertie.errors import Refused, Stale
from intertie.ids import (
    AttemptId,
    DeviceId,
    Digest,
    EventId,
    JobId,
    JournalId,
    PoolName,
    RoundId,
    SiteName,
    TenantName,
    new_attempt,
    new_job,
)
from intertie.planner import Decision
from intertie.scheduler.core import life, silence
from intertie.scheduler.core.given import Fact
from intertie.scheduler.core.grants import GRANTS_PER_SITE, Grant
from intertie.scheduler.core.interpret import Source, interpret
from intertie.scheduler.core.orders import Order
from intertie.scheduler.core.rows import AttemptState, Change, File, Ignored, Job
from intertie.scheduler.memory import MemorySchedulerStore
from intertie.scheduler.pg import PgSchedulerStore, Q
from intertie.scheduler.store import (
    EVERYTHING,
    IDLE_ATTEMPTS_SHOWN,
    Placement,
    RoundRow,
    Ruling,
    SchedulerStore,
    Submitted,
    Told,
    Withdrawal,
)
from intertie.store import Database, Leader, first_version
from intertie.store.checks import check_queries
from intertie.trust.rights import Scope

T0 = datetime(2026, 12, 1, 8, tzinfo=UTC)
ACME, BETA = TenantName("acme"), TenantName("beta")
SITE, POOL = SiteName("site-a"), PoolName("cpu")
SOURCE = Source(SITE, JournalId("jnl-1"))
NO_MARK = (0, 0)


@asynccontextmanager
async def on_postgres(pg: PgDatabase) -> AsyncIterator[PgSchedulerStore]:
    db = await Database.open(pg.url, password=pg.password, schema="scheduler")
    try:
        await db.migrate("intertie.scheduler")
        yield PgSchedulerStore(db)
    finally:
        await db.close()


@pytest.fixture(params=["pg", "memory"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[SchedulerStore]:
    if request.param == "memory":
        yield MemorySchedulerStore()
        return
    async with on_postgres(request.getfixturevalue("pg")) as found:
        yield found


def a_job(key: str = "k1", tenant: TenantName = ACME, *, at: datetime = T0, restartable: bool = False, rerun: bool = False) -> Job:
    silent = OnSilence.RERUN if rerun else OnSilence.WAIT
    spec = JobSpec(name="one", script="true", env_names=["TOKEN"], restartable=restartable or rerun, on_silence=silent)
    asked = SubmitJob(tenant=tenant, spec=spec, env={"TOKEN": "secret"}, client_key=key)
    return life.new_job(asked, new_job(), actor="ann", traceparent="", now=at)


async def submit(store: SchedulerStore, job: Job) -> Submitted:
    return await store.submit(job, {"TOKEN": "secret"}, life.submitted_line(job))


def placement(job: Job, device: str = "slot-0", round_id: str = "round-1", lease_s: int = 0) -> Placement:
    decision = Decision(job.job, job.tenant, SITE, POOL, DeviceKind.SLOT, (DeviceId(device),), "u", None, 0, "it fits", ())
    attempt = new_attempt()
    make = partial(life.place, decision=decision, attempt=attempt, round_id=RoundId(round_id), epoch=1, now=T0, lease_s=lease_s)
    return Placement(job.job, make)


def a_round(name: str = "round-1") -> RoundRow:
    return RoundRow(RoundId(name), T0, Digest("sha256:" + "0" * 64), 1, 0)


async def place(store: SchedulerStore, job: Job, device: str = "slot-0", name: str = "round-1", *, lease_s: int = 0) -> Change:
    async with store.leading("planner") as leader:
        (change,) = await store.save_round(leader, a_round(name), [placement(job, device, name, lease_s)], [])
    return change


class Site:
    def __init__(self, change: Change) -> None:
        assert change.attempt is not None
        self.record = change.attempt.record
        self.seq = 0

    def _base(self) -> dict[str, object]:
        self.seq += 1
        record = self.record
        return {
            "seq": self.seq,
            "at": T0,
            "attempt": record.attempt,
            "job": record.job,
            "epoch": record.epoch,
            "generation": record.generation,
        }

    def claimed(self) -> SchedulerEntry:
        return Claimed(**self._base(), devices=list(self.record.devices))  # type: ignore[arg-type]  # the fields above

    def refused(self, code: str = "device_busy", *, fault: bool = False) -> SchedulerEntry:
        return OfferRefused(**self._base(), code=code, text="", fault=fault)  # type: ignore[arg-type]  # as above

    def started(self) -> SchedulerEntry:
        return Started(**self._base(), started=T0, devices=[], native_id="7", account="u")  # type: ignore[arg-type]  # as above

    def ended(self, cause: Cause | None = None) -> SchedulerEntry:
        return Ended(
            **self._base(),  # type: ignore[arg-type]  # as above
            outcome="failed" if cause else "succeeded",
            cause=cause,
            exit_code=0,
            signal=None,
            reason="",
            started=T0,
            ended=T0 + timedelta(seconds=6),
            ran_us=6_000_000,
            segments=1,
            quantity_milli_us=6_000_000_000,
            last_metering_seq=1,
        )


async def tell(store: SchedulerStore, entry: SchedulerEntry) -> Change | Ignored:
    attempt = getattr(entry, "attempt", None)
    async with store.transaction() as tx:
        return await store.apply(tx, attempt, lambda file: interpret(entry, file, SOURCE, T0))


async def state_of(store: SchedulerStore, job: Job) -> tuple[JobState, list[str]]:
    view = await store.view(job.job, EVERYTHING)
    assert view is not None
    return view.job.state, [a.state for a in view.attempts]


async def test_twenty_submits_of_one_key_make_one_job(store: SchedulerStore) -> None:
    """BR-061: one job, twenty equal answers; the same key of another tenant is another job."""
    answers = await asyncio.gather(*(submit(store, a_job()) for _ in range(20)))
    assert len({a.job.job for a in answers}) == 1
    assert sum(not a.repeated for a in answers) == 1
    assert not (await submit(store, a_job(tenant=BETA))).repeated


async def test_a_late_repeat_finds_the_job_in_its_final_state(store: SchedulerStore) -> None:
    """BR-061: 25 h later, after the job has ended."""
    job = a_job()
    await submit(store, job)
    await store.change(
        job.job, EVERYTHING, lambda f: life.cancel(f, actor="ann", reason="", now=T0), actor="ann", action="job.cancel", reason=""
    )
    found = await submit(store, a_job(at=T0 + timedelta(hours=25)))
    assert (found.job.job, found.repeated, found.job.state) == (job.job, True, JobState.CANCELLED)


async def test_what_lies_outside_the_scope_is_not_there(store: SchedulerStore) -> None:
    """BR-146, BR-147: another tenant's job reads, lists, tells and cancels like an unknown one."""
    job = a_job()
    await submit(store, job)
    theirs = Scope(everything=False, tenant=BETA, site=None)
    mine = Scope(everything=False, tenant=ACME, site=None)
    for known, scope in ((job.job, theirs), (JobId("job-nowhere"), mine)):
        assert await store.view(known, scope) is None
        assert await store.story(known, scope) == []
        outcome = await store.change(known, scope, lambda f: life.cancel(f, actor="x", reason="", now=T0), actor="x", action="c", reason="")
        assert outcome is None
    assert await store.views(JobsQuery(tenant=ACME), theirs) == ([], False)
    assert await store.view(job.job, mine) is not None
    assert (await state_of(store, job))[0] is JobState.QUEUED


async def test_a_site_owner_sees_what_is_at_the_own_site(store: SchedulerStore) -> None:
    job = a_job()
    await submit(store, job)
    owner = Scope(everything=False, tenant=None, site=SITE)
    assert await store.view(job.job, owner) is None
    await place(store, job)
    assert await store.view(job.job, owner) is not None


async def test_jobs_are_listed_newest_first_by_pages(store: SchedulerStore) -> None:
    jobs = [a_job(f"k{i}") for i in range(3)]
    for job in jobs:
        await submit(store, job)
    first, more = await store.views(JobsQuery(limit=2), EVERYTHING)
    rest, no_more = await store.views(JobsQuery(limit=2, after=first[-1].job.job), EVERYTHING)
    assert [v.job.job for v in (*first, *rest)] == [j.job for j in reversed(jobs)]
    assert (more, no_more) == (True, False)
    assert [v.position for v in first] == [3, 2]
    assert (await store.views(JobsQuery(states=[JobState.RUNNING]), EVERYTHING))[0] == []


async def test_a_placed_job_runs_and_ends_by_its_sites_entries(store: SchedulerStore) -> None:
    job = a_job()
    await submit(store, job)
    site = Site(await place(store, job))
    for entry, state in ((site.claimed(), "placed"), (site.started(), "running"), (site.ended(), "succeeded")):
        assert isinstance(await tell(store, entry), Change)
        assert (await state_of(store, job))[0] == state
    told = await store.story(job.job, EVERYTHING)
    assert [line.what for line in told] == ["submitted", "placed", "claimed", "started", "ended: succeeded"]


async def test_what_is_from_before_a_restore_goes_on_above_every_version_that_was_told(store: SchedulerStore) -> None:
    """Whoever heard of a tail that a restore took holds higher versions than the store does, and takes only higher ones."""
    job = a_job()
    await submit(store, job)
    site = Site(await place(store, job))
    await store.lift_versions(7, first_version(7))
    change = await tell(store, site.claimed())
    assert isinstance(change, Change) and change.attempt is not None and change.before.attempt is not None
    assert (change.before.job.version, change.before.attempt.record.version) == (7_000, 7_000)
    await store.lift_versions(7, first_version(7))
    assert (await store.attempts(None, 10))[0].record.version == change.attempt.record.version == 7_001


async def test_every_change_is_told_with_rising_versions(store: SchedulerStore) -> None:
    job = a_job()
    await submit(store, job)
    site = Site(await place(store, job))
    for entry in (site.claimed(), site.started(), site.ended()):
        await tell(store, entry)
    jobs, attempts = await _events(store)
    assert [(e.state, e.version) for e in jobs] == [("queued", 1), ("placed", 2), ("running", 3), ("succeeded", 4)]
    assert [(e.record.state, e.version) for e in attempts] == [("offered", 1), ("claimed", 2), ("running", 3), ("ended", 4)]
    assert all(b"secret" not in str(e).encode() for e in (*jobs, *attempts))


async def _events(store: SchedulerStore) -> tuple[list[JobChanged], list[AttemptChanged]]:
    if isinstance(store, MemorySchedulerStore):
        events = store.events
    else:
        assert isinstance(store, PgSchedulerStore)
        async with store.db.transaction() as tx:
            rows = await tx.all("SELECT type, body FROM outbox ORDER BY id")
        kinds: dict[str, type[Event]] = {JobChanged.TYPE: JobChanged, AttemptChanged.TYPE: AttemptChanged}
        events = [decode(row["body"], kinds[row["type"]]) for row in rows]
    return [e for e in events if isinstance(e, JobChanged)], [e for e in events if isinstance(e, AttemptChanged)]


async def test_a_device_and_a_job_have_one_holder_whatever_a_plan_says(store: SchedulerStore) -> None:
    first, second = a_job("k1"), a_job("k2")
    await submit(store, first)
    await submit(store, second)
    async with store.leading("planner") as leader:
        placed = await store.save_round(leader, a_round(), [placement(first), placement(second)], [])
    assert len(placed) == 1
    assert sorted([(await state_of(store, j))[0] for j in (first, second)]) == ["placed", "queued"]


async def test_reservations_equal_the_live_attempts_after_every_end(store: SchedulerStore) -> None:
    """BR-070: a device is free again after each way to end, and no slot survives its attempt; a double submit holds nothing twice."""
    for number, way in enumerate(("ended", "cancelled", "refused", "failed", "ended")):
        job = a_job(f"k{number}")
        assert not (await submit(store, job)).repeated and (await submit(store, a_job(f"k{number}"))).repeated
        site = Site(await place(store, job, name=f"round-{number}"))
        assert [held.record.job for held in (await store.load_round({})).live] == [job.job]
        match way:
            case "cancelled":
                entries = []
                await store.change(
                    job.job, EVERYTHING, lambda f: life.cancel(f, actor="a", reason="", now=T0), actor="a", action="c", reason=""
                )
            case "refused":
                entries = [site.refused()]
            case _:
                entries = [site.claimed(), site.started(), site.ended(Cause.JOB if way == "failed" else None)]
        for entry in entries:
            await tell(store, entry)
        assert (await store.load_round({})).live == []
        if way == "refused":
            await store.change(
                job.job, EVERYTHING, lambda f: life.cancel(f, actor="a", reason="", now=T0), actor="a", action="c", reason=""
            )


async def test_a_deposed_leader_writes_nothing(store: SchedulerStore) -> None:
    job = a_job()
    await submit(store, job)
    async with store.leading("planner") as old:
        pass
    async with store.leading("planner") as leader:
        assert (leader.epoch, leader.number) > (old.epoch, old.number)
        with pytest.raises(Stale):
            await store.save_round(Leader("planner", old.epoch, old.number), a_round(), [placement(job)], [])
    assert (await state_of(store, job))[0] is JobState.QUEUED


async def test_orders_follow_the_attempt_and_environment_travels_in_the_offer_only(store: SchedulerStore) -> None:
    job = a_job()
    await submit(store, job)
    site = Site(await place(store, job))
    (offer,) = await store.orders(SITE, NO_MARK)
    assert (offer.order, offer.env) == (Order.OFFER, {"TOKEN": "secret"})
    assert await store.orders(SITE, NO_MARK) == [offer], "an offer is repeated until it is answered"
    await tell(store, site.claimed())
    (go,) = await store.orders(SITE, (offer.epoch, offer.number))
    assert (go.order, go.env) == (Order.GO, {})
    assert go.number > offer.number
    await tell(store, site.started())
    assert await store.orders(SITE, NO_MARK) == []
    await tell(store, site.ended())
    (settle,) = await store.orders(SITE, (go.epoch, go.number))
    assert settle.order is Order.SETTLE
    assert await store.orders(SITE, (settle.epoch, settle.number)) == []
    assert await store.orders(SITE, NO_MARK) == [], "what was settled is asked for no more"
    assert await store.orders(SiteName("site-b"), NO_MARK) == []


async def test_an_offer_without_an_answer_is_taken_back_and_a_claim_that_came_first_wins(store: SchedulerStore) -> None:
    silent, claimed = a_job("k1"), a_job("k2")
    for number, job in enumerate((silent, claimed)):
        await submit(store, job)
        change = await place(store, job, f"slot-{number}", f"round-{number}")
    await tell(store, Site(change).claimed())
    asked = [Withdrawal(j.job, lambda file: life.withdraw(file, why="no answer", fault=False, now=T0)) for j in (silent, claimed)]
    async with store.leading("planner") as leader:
        (done,) = await store.withdraw(leader, asked)
    assert done.job.job == silent.job
    assert await state_of(store, silent) == (JobState.QUEUED, ["withdrawn"])
    assert await state_of(store, claimed) == (JobState.PLACED, ["claimed"])
    assert [o.order for o in await store.orders(SITE, NO_MARK)] == [Order.GO, Order.WITHDRAW]
    with pytest.raises(Stale):
        await store.withdraw(Leader("planner", 1, 0), asked)


async def test_of_attempts_that_came_to_nothing_the_last_are_shown(store: SchedulerStore) -> None:
    job = a_job()
    await submit(store, job)
    for number in range(IDLE_ATTEMPTS_SHOWN + 2):
        site = Site(await place(store, job, name=f"round-{number}"))
        await tell(store, site.refused())
    view = await store.view(job.job, EVERYTHING)
    assert view is not None and [a.number for a in view.attempts] == list(range(3, IDLE_ATTEMPTS_SHOWN + 3))


async def test_new_orders_come_before_repeats(store: SchedulerStore) -> None:
    for number in range(3):
        job = a_job(f"k{number}")
        await submit(store, job)
        await place(store, job, f"slot-{number}", f"round-{number}")
    numbers = [o.number for o in await store.orders(SITE, NO_MARK)]
    assert numbers == sorted(numbers)
    assert [o.number for o in await store.orders(SITE, (1, numbers[1]))] == [numbers[2], numbers[0], numbers[1]]


async def test_a_cancel_of_a_claimed_attempt_takes_the_go_back(store: SchedulerStore) -> None:
    job = a_job()
    await submit(store, job)
    await tell(store, Site(await place(store, job)).claimed())
    await store.change(
        job.job, EVERYTHING, lambda f: life.cancel(f, actor="ann", reason="", now=T0), actor="ann", action="job.cancel", reason="x"
    )
    (stop,) = await store.orders(SITE, NO_MARK)
    assert stop.order is Order.STOP
    assert (await state_of(store, job))[0] is JobState.PLACED


async def test_a_fault_sets_a_back_off_and_a_start_forgets_it(store: SchedulerStore) -> None:
    job = a_job(restartable=True)
    await submit(store, job)
    for number in (1, 2):
        site = Site(await place(store, job, name=f"round-{number}"))
        for entry in (site.claimed(), site.ended(Cause.SITE)):
            await tell(store, entry)
        backs = (await store.load_round({})).back_offs
        assert backs[SITE].faults == number
    site = Site(await place(store, job, name="round-3"))
    for entry in (site.claimed(), site.started()):
        await tell(store, entry)
    assert (await store.load_round({})).back_offs == {}
    view = await store.view(job.job, EVERYTHING)
    assert view is not None and [a.generation for a in view.attempts] == [1, 2, 3]


def verdict(job: Job, text: str, number: int = 0) -> Told:
    rejection = Rejection(site=SITE, pool=POOL, rule="no_free_device", text=text, needed="1", found="0")
    return Told(job.job, Digest(f"d{number}"), WaitReason.DEVICES_BUSY, text, (rejection,), T0)


async def test_the_reason_and_its_rejections_are_kept_with_the_round(store: SchedulerStore) -> None:
    job = a_job()
    await submit(store, job)
    async with store.leading("planner") as leader:
        for number in range(25):
            await store.save_round(leader, a_round(f"round-{number}"), [], [verdict(job, f"text {number}", number)])
    view = await store.view(job.job, EVERYTHING)
    assert view is not None and view.verdict is not None
    assert (view.verdict.round, view.verdict.text, view.verdict.rejections[0].rule) == ("round-24", "text 24", "no_free_device")
    assert (await store.load_round({})).waited[job.job].digest == "d24"


async def test_what_an_allowance_counts_is_what_its_tenant_has_used_since(store: SchedulerStore) -> None:
    job = a_job()
    await submit(store, job)
    site = Site(await place(store, job))
    for entry in (site.claimed(), site.started(), site.ended()):
        await tell(store, entry)
    (used,) = (await store.load_round({ACME: T0})).used
    assert (used.tenant, used.quantity_milli_us) == (ACME, 6_000_000_000)
    assert (await store.load_round({ACME: T0 + timedelta(seconds=1)})).used == []


async def test_quotas_are_set_changed_and_removed_with_an_audit_row_each(store: SchedulerStore) -> None:
    for limit in (4, 2):
        await store.set_quota(SetQuota(tenant=ACME, site=SITE, kind=DeviceKind.GPU, limit=limit), actor="op")
    await store.set_quota(SetQuota(tenant=ACME, kind=DeviceKind.GPU, limit=8), actor="op")
    assert [(q.site, q.limit) for q in await store.quotas()] == [(None, 8), (SITE, 2)]
    await store.set_quota(SetQuota(tenant=ACME, kind=DeviceKind.GPU, limit=None), actor="op")
    assert [q.limit for q in await store.quotas()] == [2]
    assert [row.action for row in await store.read_audit(AuditQuery())] == ["quota.set"] * 4


async def test_a_read_model_takes_only_what_is_newer(store: SchedulerStore) -> None:
    def fact(version: int) -> Fact:
        return Fact("pool", "site-a/cpu", version, f"v{version}".encode(), T0)

    def meta(event: str) -> EventMeta:
        return EventMeta(id=EventId(event), type="t", source="s", entity="e", time=T0, number=1, epoch=1)

    assert await store.learn([fact(2)], meta("evt-1")) == [fact(2)]
    assert await store.learn([fact(3)], meta("evt-1")) == [], "an event that was applied before changes nothing"
    assert await store.learn([fact(1)], meta("evt-2")) == []
    assert await store.learn([fact(3)]) == [fact(3)]
    assert await store.known() == [fact(3)]


async def test_settings_get_a_revision_per_content_and_two_copies_never_take_turns(store: SchedulerStore) -> None:
    """Whoever knows less than the one that made the last revision says nothing; the same content is the same revision, whoever has it."""
    told = [("a", 1, 0), ("a", 1, 0), ("b", 2, 0), ("a", 1, 0), ("b", 2, 1), ("c", 2, 1), ("a", 3, 2), ("d", 3, 61), ("d", 9, 62)]
    made = [await store.settings_revision(SITE, Digest(content), known, T0 + timedelta(seconds=s)) for content, known, s in told]
    assert [revision.number if revision else None for revision in made] == [1, 1, 2, None, 2, None, 3, None, 4]
    # What the same knowledge says for a minute is a changed configuration.
    later = await store.settings_revision(SITE, Digest("e"), 9, T0 + timedelta(seconds=130))
    assert later is not None and (later.number, later.at) == (5, T0 + timedelta(seconds=130))


async def test_settings_pass_a_revision_that_a_restore_made_forget(store: SchedulerStore) -> None:
    """The site has one from before: the same content gets a number above it, once, and who is behind still says nothing."""
    told = [("a", 5, 0), ("a", 5, 7), ("a", 5, 7), ("a", 5, 8), ("b", 4, 20), ("a", 5, 0)]
    made = [await store.settings_revision(SITE, Digest(content), known, T0, above=above) for content, known, above in told]
    assert [revision.number if revision else None for revision in made] == [1, 8, 8, 8, None, 8]


# --- ways out ------------------------------------------------------------------------------------------------------------------------------------


async def running_lease(store: SchedulerStore) -> tuple[Job, AttemptId]:
    """A running attempt of a job that asked to be run again."""
    job = a_job("rerun", rerun=True)
    await submit(store, job)
    change = await place(store, job, "slot-0", lease_s=1_800)
    assert change.attempt is not None
    site = Site(change)
    await tell(store, site.claimed())
    await tell(store, site.started())
    return job, change.attempt.record.attempt


async def rule(store: SchedulerStore, ruling: Ruling) -> list[Change]:
    async with store.leading("planner") as leader:
        return await store.withdraw(leader, [ruling])


async def test_a_replaced_attempt_holds_its_devices_and_its_job_may_be_placed_again(store: SchedulerStore) -> None:
    job, first = await running_lease(store)
    (replaced,) = await rule(store, Ruling(job.job, lambda file: silence.replace_silent(file, silent_s=2e3, lease_s=1_800, now=T0), first))
    assert replaced.attempt is not None and (replaced.attempt.live, replaced.attempt.holding) == (False, True)
    given = await store.load_round({})
    assert [(a.record.attempt, a.live, a.holding, a.lease_s) for a in given.live] == [(first, False, True, 1_800)]
    assert [o.order for o in await store.orders(SITE, NO_MARK)] == [Order.STOP]
    async with store.leading("planner") as leader:
        assert await store.save_round(leader, a_round("round-2"), [placement(job, "slot-0", "round-2")], []) == [], "it has a holder still"
    second = await place(store, job, "slot-1", "round-3")
    view = await store.view(job.job, EVERYTHING)
    assert view is not None and second.attempt is not None
    assert [a.replaced_by for a in view.attempts] == [second.attempt.record.attempt, None]


async def test_a_ruling_of_who_lost_office_is_not_written(store: SchedulerStore) -> None:
    job, first = await running_lease(store)
    ruling = Ruling(job.job, lambda file: silence.promise(file, since=T0, lost_after=timedelta(days=7), now=T0), first)
    async with store.leading("planner") as before:
        pass
    async with store.leading("planner"):
        with pytest.raises(Stale):
            await store.withdraw(before, [ruling])
    (change,) = await rule(store, ruling)
    assert change.attempt is not None and change.attempt.record.lost_by is not None
    assert await rule(store, ruling) == [], "another leader finds the promise given"


async def test_a_lost_attempt_counts_its_devices_until_its_site_speaks(store: SchedulerStore) -> None:
    job, first = await running_lease(store)
    closed = await store.change_attempt(
        first,
        EVERYTHING,
        lambda file: silence.close(file, actor="op", reason="gone", site_gone=False, now=T0),
        actor="op",
        action="attempt.close",
        reason="gone",
    )
    assert isinstance(closed, Change) and closed.job.state is JobState.LOST
    assert [a.record.state for a in (await store.load_round({})).live] == ["lost"]
    async with store.transaction() as tx:
        assert await store.open_at(tx, SITE) == [first]
    assert (await store.read_audit(AuditQuery()))[0].action == "attempt.close"
    (freed,) = await rule(store, Ruling(job.job, partial(silence.gone, actor="site", why="not held", evidence="entry", now=T0), first))
    assert freed.incident is not None
    assert list((await store.load_round({})).live) == []
    view = await store.view(job.job, EVERYTHING)
    assert view is not None and (view.job.state, view.attempts[0].refined) == (JobState.LOST, True)


def _written(fields: dict[str, AttemptId], file: File | None) -> Change:
    assert file is not None
    return Change(file, replace(file.job, version=file.job.version + 1, **fields), None, "t", "t", T0)  # type: ignore[arg-type]  # two fields


async def test_a_survivor_and_a_delivery_are_written_once(store: SchedulerStore) -> None:
    job, first = await running_lease(store)

    async def write(**fields: AttemptId) -> None:
        async with store.transaction() as tx:
            await store.apply(tx, first, partial(_written, fields))

    await write(survivor=first)
    await write(delivered=first)
    for other in ({"survivor": new_attempt()}, {"delivered": new_attempt()}):
        with pytest.raises(Stale):
            await write(**other)
    view = await store.view(job.job, EVERYTHING)
    assert view is not None and (view.job.survivor, view.job.delivered) == (first, first)


async def test_a_job_keeps_away_from_a_site_ever_longer_and_forgets_it_with_a_start(store: SchedulerStore) -> None:
    job = a_job("avoids")
    await submit(store, job)
    waits = []
    for number in range(3):
        change = await place(store, job, "slot-0", f"round-{number}")
        await tell(store, Site(change).refused("fetch_failed", fault=True))
        (back,) = (await store.load_round({})).avoided[job.job]
        waits.append((back.site, (back.until - T0).total_seconds()))
    assert waits == [(SITE, 10.0), (SITE, 20.0), (SITE, 40.0)]
    busy = await place(store, job, "slot-0", "round-8")
    await tell(store, Site(busy).refused())
    assert [b.faults for b in (await store.load_round({})).avoided[job.job]] == [3], "an honest refusal costs nothing"
    last = await place(store, job, "slot-0", "round-9")
    await tell(store, Site(last).started())
    assert (await store.load_round({})).avoided == {}


async def test_grants_are_numbered_bounded_and_make_room_when_they_end(store: SchedulerStore) -> None:
    def a_grant(tenant: str, devices: int = 2, days: int = 30) -> Grant:
        return Grant(TenantName(tenant), SITE, DeviceKind.SLOT, devices, None, T0 + timedelta(days=days), "op", 0)

    for number in range(GRANTS_PER_SITE):
        await store.set_grant(a_grant(f"t{number}", days=1 if number == 0 else 30), now=T0)
    with pytest.raises(Refused) as refused_:
        await store.set_grant(a_grant("more"), now=T0)
    assert refused_.value.code == "scheduler.too_many_grants"
    await store.set_grant(a_grant("t1", devices=0), now=T0)
    await store.set_grant(a_grant("more"), now=T0)
    await store.set_grant(a_grant("later"), now=T0 + timedelta(days=2))
    held = {g.tenant: (g.devices, g.revision) for g in await store.grants()}
    assert (held[TenantName("t0")], held[TenantName("t1")], held[TenantName("more")]) == ((0, 2), (0, 2), (2, 1))
    assert len((await store.load_round({})).grants) == GRANTS_PER_SITE + 2


async def test_a_job_known_elsewhere_first_is_taken_up_and_gives_way_to_a_key_used_again(store: SchedulerStore) -> None:
    """LINK D3: the client's retry made another job meanwhile; both are there, neither hides the other."""
    retry, lost_one = a_job("k1"), a_job("k1")
    await submit(store, retry)
    told = life.submitted_line(lost_one)
    async with store.transaction() as tx:
        outcome = await store.take_up(tx, lost_one, told, lambda file: Ignored(f"{file.job.client_key}"))
    assert outcome == Ignored(f"adopted:{lost_one.job}")
    async with store.transaction() as tx:
        again = await store.take_up(tx, lost_one, told, lambda file: Ignored(f"{file.job.state} {file.job.epoch}"))
    assert again == Ignored("queued 1")
    assert len(await store.story(lost_one.job, EVERYTHING)) == 1
    assert (await store.by_key(ACME, "k1")) is not None


async def test_an_adopted_job_is_of_the_epoch_of_its_offer(store: SchedulerStore) -> None:
    """So that it is placed again only when every site has told what it holds."""
    lost_one = replace(a_job("k1"), epoch=7)
    async with store.transaction() as tx:
        found = await store.take_up(tx, lost_one, life.submitted_line(lost_one), lambda file: Ignored(f"{file.job.epoch}"))
    assert found == Ignored("7")


async def test_attempts_are_given_out_by_pages(store: SchedulerStore) -> None:
    names = []
    for number in range(3):
        job = a_job(f"k{number}")
        await submit(store, job)
        change = await place(store, job, f"slot-{number}", f"round-{number}")
        assert change.attempt is not None
        names.append(change.attempt.record.attempt)
    page = await store.attempts(None, 2)
    rest = await store.attempts(page[-1].record.attempt, 2)
    assert [s.record.attempt for s in (*page, *rest)] == sorted(names)


async def test_a_cancel_leaves_one_audit_row_also_when_there_was_nothing_to_do(store: SchedulerStore) -> None:
    job = a_job()
    await submit(store, job)
    for _ in range(2):
        await store.change(
            job.job, EVERYTHING, lambda f: life.cancel(f, actor="ann", reason="x", now=T0), actor="ann", action="job.cancel", reason="x"
        )
    rows = await store.read_audit(AuditQuery())
    assert [(r.action, r.result) for r in rows] == [
        ("job.cancel", "nothing to do: it is cancelled already"),
        ("job.cancel", "ok"),
        ("job.submit", "ok"),
    ]


# --- what only PostgreSQL shows --------------------------------------------------------------------------------------------------------------


async def test_every_query_is_understood_and_used(pg: PgDatabase) -> None:
    async with on_postgres(pg) as store:
        assert await check_queries(store.db, Q) == []


async def test_the_schema_knows_the_states_of_the_tables_of_moves(pg: PgDatabase) -> None:
    async with on_postgres(pg) as store, store.db.transaction() as tx:
        row = await tx.one("SELECT pg_get_constraintdef(oid) AS text FROM pg_constraint WHERE conname = 'job_state_check'")
        other = await tx.one("SELECT pg_get_constraintdef(oid) AS text FROM pg_constraint WHERE conname = 'attempt_state_check'")
    assert row is not None and other is not None
    assert {word for word in row["text"].split("'") if word.isidentifier() and word != "text"} >= {s.value for s in JobState}
    assert all(f"'{state.value}'" in other["text"] for state in AttemptState)


async def test_environment_values_are_in_one_table_and_gone_after_the_start(pg: PgDatabase) -> None:
    async with on_postgres(pg) as store:
        job = a_job()
        await submit(store, job)
        site = Site(await place(store, job))
        await tell(store, site.claimed())
        async with store.db.transaction() as tx:
            held = await tx.one("SELECT count(*) AS n FROM job_env t WHERE t::text LIKE '%secret%'")
            assert held is not None and held["n"] == 1
        await tell(store, site.started())
        async with store.db.transaction() as tx:
            for table in ("job", "attempt", "outbox", "story", "audit", "job_env", "instruction"):
                row = await tx.one(
                    f"SELECT count(*) AS n FROM {table} t WHERE t::text LIKE '%secret%' OR t::text LIKE '%{b'secret'.hex()}%'"
                )
                assert row is not None and row["n"] == 0, table


async def test_a_cancel_racing_a_placement_leaves_one_truth(pg: PgDatabase) -> None:
    """BR-049: either cancelled and never dispatched, or withdrawn; never both cancelled and live."""
    async with on_postgres(pg) as store:
        jobs = [a_job(f"k{i}") for i in range(8)]
        for job in jobs:
            await submit(store, job)

        async def stop(job: Job) -> None:
            await store.change(
                job.job, EVERYTHING, lambda f: life.cancel(f, actor="a", reason="", now=T0), actor="a", action="c", reason=""
            )

        async with store.leading("planner") as leader:
            placing = store.save_round(leader, a_round(), [placement(j, f"slot-{i}") for i, j in enumerate(jobs)], [])
            await asyncio.gather(placing, *(stop(job) for job in jobs))
        for job in jobs:
            state, attempts = await state_of(store, job)
            assert state is JobState.CANCELLED
            assert set(attempts) <= {"withdrawn"}
        assert (await store.load_round({})).live == []


async def test_a_change_decided_on_an_old_row_is_stale(pg: PgDatabase) -> None:
    async with on_postgres(pg) as store:
        job = a_job()
        await submit(store, job)
        old = File(replace(job, version=7))
        with pytest.raises(Stale):
            await store.change(
                job.job, EVERYTHING, lambda _: life.cancel(old, actor="a", reason="", now=T0), actor="a", action="c", reason=""
            )


async def test_a_submit_whose_caller_hung_up_is_found_by_its_key(pg: PgDatabase) -> None:
    """BR-061, BR-132: job, key, environment and event are there together or not at all, whenever the caller went; the repeat makes it one job."""
    async with on_postgres(pg) as store:
        keys = list[str]()
        while True:
            keys.append(f"k{len(keys)}")
            caller = asyncio.create_task(submit(store, a_job(keys[-1])))
            # Ever later, by so little that one falls between any two writes; growing, so that a slow machine is not waited for long.
            await asyncio.sleep(0.0001 * 1.06 ** len(keys))
            if caller.done():
                break
            caller.cancel()
            assert isinstance((await asyncio.gather(caller, return_exceptions=True))[0], asyncio.CancelledError)
        assert len(keys) > 2, "some hung up while it was being written"
        for key in keys:
            first = await submit(store, a_job(key))
            again = await submit(store, a_job(key))
            assert (again.job.job, again.repeated) == (first.job.job, True)
        told, _ = await _events(store)
        async with store.db.transaction() as tx:
            (jobs, envs, lines) = [
                [row["job"] for row in await tx.all(f"SELECT job FROM {table}")] for table in ("job", "job_env", "story")
            ]
        assert sorted(jobs) == sorted(envs) == sorted(lines) == sorted(event.entity for event in told)
        assert len(jobs) == len(keys)
