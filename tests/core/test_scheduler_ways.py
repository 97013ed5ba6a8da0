"""Ways out of a broken link (ADR 0006), as far as jobs are concerned: what a new journal says is gone, what is taken up by our own seal."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from tests.core.test_scheduler_core import ATTEMPT, JOB, NOW, SITE, SOURCE, Site, placed, run

from intertie.contracts.job import Attribution, Cause, JobSpec, JobState, Resources
from intertie.contracts.link import HeldAttempt, IslandedGrant, IslandedSubmit, JournalOpened, OfferBody, Sealed
from intertie.contracts.site import DeviceKind
from intertie.errors import Refused
from intertie.ids import AttemptId, DeviceId, JobId, JournalId, PoolName, SiteName, TenantName
from intertie.scheduler.core import ways
from intertie.scheduler.core.interpret import Source, interpret
from intertie.scheduler.core.orders import Order, orders_of
from intertie.scheduler.core.rows import AttemptState, Change, File, Ignored

ACME = TenantName("acme")
NEW = Source(SITE, JournalId("jnl-2"))
SPEC = JobSpec(name="one", script="true", resources=Resources(slots=1))
SEALED = Sealed(payload="{}", signer="scheduler", signature="x")


def changed(outcome: Change | Ignored) -> Change:
    assert isinstance(outcome, Change), outcome
    return outcome


def running() -> File:
    site = Site()
    return run(placed(), [site.claimed(), site.started()])


def opened(*held: HeldAttempt, same_place: bool = True, previous: str | None = "jnl-1") -> JournalOpened:
    return JournalOpened(
        seq=1,
        at=NOW,
        previous=JournalId(previous) if previous else None,
        why="damaged",
        place="p",
        kernel_boot="k",
        same_place=same_place,
        held=list(held),
    )


def held(state: str = "running") -> HeldAttempt:
    return HeldAttempt(attempt=ATTEMPT, job=JOB, epoch=1, generation=1, state=state, devices=[DeviceId("slot-0")])


# --- a new journal -----------------------------------------------------------------------------------------------------------------------------


def test_what_a_new_journal_holds_goes_on_there() -> None:
    change = changed(ways.opened(opened(held()), running(), NEW, NOW))
    assert change.attempt is not None
    assert (change.job.state, change.attempt.state, change.attempt.journal) == (JobState.RUNNING, AttemptState.RUNNING, "jnl-2")


def test_what_it_does_not_hold_in_the_same_place_is_gone() -> None:
    change = changed(ways.opened(opened(), running(), NEW, NOW))
    assert change.attempt is not None and change.incident is not None
    assert (change.job.state, change.attempt.record.outcome, change.attempt.record.cause) == (JobState.FAILED, "unknown", Cause.SITE)


def test_what_was_claimed_and_not_held_never_started_and_may_run_elsewhere() -> None:
    file = run(placed(), [Site().claimed()])
    change = changed(ways.opened(opened(), file, NEW, NOW))
    assert change.attempt is not None
    assert (change.job.state, change.attempt.state, change.incident) == (JobState.QUEUED, AttemptState.NOT_STARTED, None)


def test_what_it_does_not_hold_elsewhere_is_unreachable_with_a_date() -> None:
    """Nobody has looked where it ran: only its date or a named person ends it."""
    change = changed(ways.opened(opened(same_place=False), running(), NEW, NOW))
    assert change.attempt is not None
    assert (change.job.state, change.attempt.record.lost_by) == (JobState.RUNNING, NOW + timedelta(days=7, hours=1))
    again = ways.opened(opened(same_place=False), File(change.job, change.attempt), NEW, NOW + timedelta(days=1))
    assert isinstance(again, Ignored), "the promise is not moved"


def _journal_of(file: File) -> str | None:
    assert file.attempt is not None
    return file.attempt.journal


def test_what_a_copy_names_in_another_place_is_not_held_there() -> None:
    """It inherited the list with the folder; where it ran before, it may run on, and a go for it would be a second start."""
    change = changed(ways.opened(opened(held(), same_place=False), running(), NEW, NOW))
    assert change.attempt is not None
    assert (change.attempt.journal, change.attempt.record.lost_by is None) == (_journal_of(running()), False)


def test_what_lies_in_an_older_journal_is_not_ended_by_the_place_of_a_newer_one() -> None:
    """Moved to another host, then opened anew there: the new host's folder says nothing of the old one's. A disk restored to before its journal was
    opened anew is the same to the hub: it must not wait for ever either."""
    change = changed(ways.opened(opened(previous="jnl-2"), running(), Source(SITE, JournalId("jnl-3")), NOW))
    assert change.attempt is not None
    assert (change.job.state, change.attempt.record.lost_by) == (JobState.RUNNING, NOW + timedelta(days=7, hours=1))


def test_an_offer_is_not_compared() -> None:
    assert isinstance(ways.opened(opened(), placed(), NEW, NOW), Ignored)


# --- adopted -----------------------------------------------------------------------------------------------------------------------------------


def offer(**changes: object) -> OfferBody:
    base: dict[str, object] = {
        "job": JOB,
        "attempt": ATTEMPT,
        "number": 3,
        "epoch": 1,
        "generation": 3,
        "tenant": ACME,
        "site": SITE,
        "pool": PoolName("cpu"),
        "account": "u",
        "spec": SPEC,
        "env": {},
        "devices": [DeviceId("slot-0")],
        "start_within_s": 30,
        "start_by_s": 600,
        "attribution": SEALED,
        "client_key": "k1",
        "submitted_by": "ann",
    }
    return OfferBody(**(base | changes))  # type: ignore[arg-type]  # the test says what differs


def attribution() -> Attribution:
    return Attribution(tenant=ACME, job=JOB, attempt=ATTEMPT, site=SITE, pool=PoolName("cpu"))


def named(state: str = "running") -> HeldAttempt:
    return HeldAttempt(attempt=ATTEMPT, job=JOB, epoch=1, generation=3, state=state, devices=[DeviceId("slot-0")], offer=SEALED)


def test_a_job_that_the_hub_lost_is_taken_up_from_its_signed_offer_and_moves_on() -> None:
    """LINK D3: job, client key, tenant, attempt and generation; no number is used again."""
    job = ways.adopted_job(offer(), NEW, NOW)
    assert (job.tenant, job.client_key, job.submitted_by) == (ACME, "k1", "ann")
    change = changed(ways.adopt(named(), offer(), attribution(), File(job), NEW, NOW, evidence="entry site-a/jnl-2/1"))
    assert change.attempt is not None
    assert (change.job.state, change.job.generation, change.job.attempts) == (JobState.PLACED, 3, 3)
    assert (change.attempt.live, change.attempt.state, change.attempt.journal) == (True, AttemptState.CLAIMED, "jnl-2")
    started = changed(interpret(Site(generation=3).started(), File(change.job, change.attempt), NEW, NOW))  # type: ignore[arg-type]  # an entry
    assert started.job.state is JobState.RUNNING


def test_what_is_taken_up_beside_a_live_attempt_is_stopped() -> None:
    file = running()
    offered = offer(attempt=AttemptId("att-9"))
    seen = HeldAttempt(attempt=AttemptId("att-9"), job=JOB, epoch=1, generation=3, state="running", offer=SEALED)
    change = changed(ways.adopt(seen, offered, attribution(), file, NEW, NOW, evidence="entry site-a/jnl-2/1"))
    assert change.attempt is not None
    assert (change.job.state, change.attempt.live, change.attempt.holding) == (JobState.RUNNING, False, True)
    assert orders_of(change.attempt, change.job) == (Order.STOP,)


@pytest.mark.parametrize("what", ["site", "attempt", "tenant"])
def test_an_offer_that_was_made_to_another_is_not_believed(what: str) -> None:
    """BR-148."""
    job = ways.adopted_job(offer(), NEW, NOW)
    with pytest.raises(Refused):
        if what == "site":
            ways.adopted_job(offer(site=SiteName("site-b")), NEW, NOW)
        body = offer(attempt=AttemptId("att-9")) if what == "attempt" else offer(tenant=TenantName("beta"))
        ways.adopt(named(), body, attribution(), File(job), NEW, NOW, evidence="entry site-a/jnl-2/1")


# --- taken in while islanded -------------------------------------------------------------------------------------------------------------------


def grant(**changes: object) -> IslandedGrant:
    base: dict[str, object] = {
        "grant": "site-a/acme/slot/1",
        "tenant": ACME,
        "site": SITE,
        "kind": DeviceKind.SLOT,
        "devices": 1,
        "valid_until": NOW + timedelta(days=1),
    }
    return IslandedGrant(**(base | changes))  # type: ignore[arg-type]  # the test says what differs


def taken_in(**changes: object) -> IslandedSubmit:
    base: dict[str, object] = {
        "seq": 4,
        "at": NOW,
        "islanded": True,
        "attempt": AttemptId("att-site-a-1"),
        "job": JobId("job-site-a-1"),
        "epoch": 1,
        "generation": 0,
        "tenant": ACME,
        "pool": PoolName("cpu"),
        "devices": [DeviceId("slot-0")],
        "account": "u",
        "spec": SPEC,
        "submitted_by": "li",
        "grant": SEALED,
    }
    return IslandedSubmit(**(base | changes))  # type: ignore[arg-type]  # the test says what differs


def test_work_that_a_site_took_in_alone_becomes_a_job_like_any_other() -> None:
    entry = taken_in()
    assert ways.check_grant(entry, grant(), SOURCE, "u") == ""
    job = ways.islanded_job(entry, SOURCE, NOW)
    change = changed(ways.islanded(entry, grant(), "", File(job), SOURCE, NOW))
    assert change.attempt is not None
    record = change.attempt.record
    assert (change.job.state, record.state, record.islanded_submit, record.islanded, change.attempt.live) == (
        JobState.PLACED,
        "claimed",
        True,
        True,
        True,
    )
    site = Site(generation=0)
    file = File(change.job, change.attempt)
    said = [msgspec.structs.replace(one, attempt=record.attempt, job=record.job) for one in (site.started(islanded=True), site.ended())]
    assert run(file, said).job.state is JobState.SUCCEEDED


def test_use_beyond_the_measure_is_recorded_and_told_and_never_refused() -> None:
    """LINK D24: guards stand on admission, at the site."""
    entry = taken_in(devices=[DeviceId("slot-0"), DeviceId("slot-1")])
    beyond = ways.check_grant(entry, grant(), SOURCE, "u")
    change = changed(ways.islanded(entry, grant(), beyond, File(ways.islanded_job(entry, SOURCE, NOW)), SOURCE, NOW))
    assert beyond and change.incident is not None and change.incident.kind == "scheduler.grant_exceeded"
    assert change.attempt is not None and change.attempt.live


@pytest.mark.parametrize(
    ("changes", "account"),
    [
        ({"tenant": TenantName("beta")}, "u"),
        ({"site": SiteName("site-b")}, "u"),
        ({"kind": DeviceKind.GPU}, "u"),
        ({"valid_until": NOW}, "u"),
        ({}, None),
    ],
)
def test_what_no_grant_of_ours_covers_is_set_aside(changes: dict[str, object], account: str | None) -> None:
    with pytest.raises(Refused) as refused:
        ways.check_grant(taken_in(), grant(**changes), SOURCE, account)
    assert refused.value.code == "scheduler.grant"


@pytest.mark.parametrize(
    "changes",
    [
        {"job": JobId("job-a\r\nNats-Msg-Id: x")},
        {"job": JobId("")},
        {"attempt": AttemptId("../../etc/passwd")},
        {"attempt": AttemptId("a" * 129)},
        {"pool": PoolName("a b")},
        {"generation": 2**63 - 1},
        {"epoch": 2**62},
        {"devices": []},
        {"devices": [DeviceId("slot-0")] * 2},
        {"devices": [DeviceId("d" * 257)]},
        {"devices": [DeviceId(f"slot-{n}") for n in range(40_000)]},
        {"spec": msgspec.structs.replace(SPEC, args=["x" * 200_000])},
        {"account": "a" * 257},
        {"at": datetime(1, 1, 2, tzinfo=UTC)},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_what_no_agent_says_becomes_no_job(changes: dict[str, object]) -> None:
    """Each would stand in another's way later: as a header, as the last generation, in an offer that no seal holds."""
    with pytest.raises(Refused) as refused:
        ways.check_grant(taken_in(**changes), grant(), SOURCE, "u")
    assert refused.value.code == "scheduler.unfit"


@pytest.mark.parametrize(
    "changes",
    [
        {"client_key": "the client's own"},
        {"client_key": "islanded:att-another"},
        {"attempts": 1},
        {"state": JobState.SUCCEEDED},
        {"state": JobState.RUNNING},
        {"tenant": TenantName("beta")},
    ],
    ids=str,
)
def test_a_site_takes_in_no_job_that_came_by_another_way(changes: dict[str, object]) -> None:
    entry = taken_in()
    job = replace(ways.islanded_job(entry, SOURCE, NOW), **changes)  # type: ignore[arg-type]  # the test says what differs
    with pytest.raises(Refused) as refused:
        ways.islanded(entry, grant(), "", File(job), SOURCE, NOW)
    assert refused.value.code == "scheduler.foreign_attempt"


def test_what_a_site_took_in_by_itself_stays_there() -> None:
    """Its script is the site's word: queued again, it must not run at another site under the tenant's name."""
    spec = msgspec.structs.replace(SPEC, site=SiteName("site-b"), restartable=True)
    assert ways.islanded_job(taken_in(spec=spec), SOURCE, NOW).spec.site == SITE
