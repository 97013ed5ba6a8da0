"""The site's rules as tables: every rung of the ladder in its order, every move, every verdict, every cut."""

from __future__ import annotations

import errno
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.agents import attempt, offer, pool

from intertie.agent.core import leases, logs, usage
from intertie.agent.core.attempts import (
    MOVES,
    AlreadyOver,
    Bury,
    Event,
    Exit,
    GiveUp,
    Halt,
    Ignore,
    IllegalMove,
    Proceed,
    move,
    on_go,
    on_stop,
    still_in_time,
    verdict,
)
from intertie.agent.core.devices import Holds, choose, displaceable, inventory
from intertie.agent.core.model import Attempt, Failing, LocalWork, Moment, StartedRecord, State, StopAsked
from intertie.agent.core.offers import LADDER, Books, NotTaken, Repeated, Taken, Terms, judge
from intertie.agent.core.room import MIB, Floor, Space, shortage
from intertie.contracts.image import PoolImages
from intertie.contracts.job import Cause, Resources
from intertie.contracts.link import OfferBody
from intertie.contracts.site import DeviceKind, DeviceState
from intertie.contracts.usage import UsagePhase
from intertie.ids import AttemptId, DeviceId, JobId, JournalId, PoolName, SiteName, TenantName

AT = datetime(2026, 12, 1, tzinfo=UTC)
NOW = Moment(AT, 1_000.0, "boot-1")
ACME = TenantName("acme")
IMAGE = f"registry.example.cn/team/train@sha256:{'a' * 64}"


def terms(**changes: object) -> Terms:
    fields: dict[str, object] = {
        "site": SiteName("lab"),
        "pools": {PoolName("main"): pool()},
        "owner_tenant": ACME,
        "single_user": False,
        "mappings": frozenset({(ACME, "guest")}),
    }
    return Terms(**(fields | changes))  # type: ignore[arg-type]  # fields by name


def body(**changes: object) -> OfferBody:
    return msgspec.structs.replace(offer(account="guest", job="job-1", attempt="att-1"), **changes)


def named(image: str) -> OfferBody:
    return body(spec=msgspec.structs.replace(body().spec, image=image))


def held(*devices: str, local: bool = False) -> Books:
    who = attempt(state=State.RUNNING, devices=devices)
    if local:
        who = msgspec.structs.replace(who, local=LocalWork(user="u", uid=7, cwd="/", submitted=AT))
    return Books(attempts={who.id: who}, holds=Holds.of([who]))


def gpu_body() -> OfferBody:
    asked = body(devices=[DeviceId("GPU-1")])
    return msgspec.structs.replace(asked, spec=msgspec.structs.replace(asked.spec, resources=Resources(gpus=1)))


FULL = Failing(code="disk_low", text="no room")
WAITS = msgspec.structs.replace(attempt(state=State.WAITING, devices=()), local=LocalWork(user="u", uid=7, cwd="/", submitted=AT))
BUSY = held("slot-1")
HOLDER = next(iter(BUSY.attempts))
GPU_TERMS = terms(pools={PoolName("main"): pool(gpus=("GPU-1", "GPU-2"))})
RUNGS = [
    ("wrong_site", True, body(site=SiteName("other")), terms(), Books()),
    ("stopped_before", False, body(), terms(), Books(tombstones={AttemptId("att-1")})),
    ("stale_generation", False, body(), terms(), Books(seen={JobId("job-1"): (1, 1)})),
    ("stale_generation", False, body(), terms(), Books(seen={JobId("job-1"): (2, 0)})),
    ("paused", False, body(), terms(paused=True), Books()),
    ("disk_low", False, body(), terms(closed=FULL), Books()),
    ("unknown_pool", True, body(pool=PoolName("none")), terms(), Books()),
    ("cordoned", False, body(), terms(cordoned=frozenset({PoolName("main")})), Books()),
    ("single_user", True, body(tenant=TenantName("beta")), terms(single_user=True), Books()),
    ("no_mapping", True, body(account="someone"), terms(), Books()),
    ("account", True, body(), terms(may_run_as=lambda account: f"{account} is not known here"), Books()),
    ("unknown_device", True, body(devices=[DeviceId("slot-99")]), terms(), Books()),
    ("devices", True, body(devices=[DeviceId("slot-1"), DeviceId("slot-2")]), terms(), Books()),
    ("unknown_device", True, body(), GPU_TERMS, Books()),
    ("image", True, named(IMAGE), terms(), Books()),
    ("image", True, named(IMAGE), terms(images=PoolImages(runtime="apptainer", sources=["nvcr.io"])), Books()),
    ("image", True, named("nvcr.io/x:1"), terms(images=PoolImages(runtime="apptainer", sources=["*"])), Books()),
    ("no_self_stop", False, body(lease_s=60), terms(self_stop=False), Books()),
    ("device_busy", False, body(), terms(), Books(attempts={WAITS.id: WAITS})),
    ("device_busy", False, body(after=[AttemptId("att-other")]), terms(), held("slot-1")),
    ("device_busy", False, body(devices=[DeviceId("slot-2")]), terms(pools={PoolName("main"): pool(lend=1)}), held("slot-1")),
    ("device_busy", False, body(), terms(), held("slot-1")),
    ("device_busy", False, body(), terms(), held("slot-1", local=True)),
    ("device_lost", True, gpu_body(), GPU_TERMS, Books(observed={DeviceId("GPU-1"): DeviceState.LOST})),
    ("device_busy", False, gpu_body(), GPU_TERMS, Books(observed={DeviceId("GPU-1"): DeviceState.FOREIGN})),
]


@pytest.mark.parametrize(("code", "fault", "asked", "by", "books"), RUNGS, ids=[f"{n}-{row[0]}" for n, row in enumerate(RUNGS)])
def test_each_rung_refuses_with_its_code(code: str, fault: bool, asked: OfferBody, by: Terms, books: Books) -> None:
    answer = judge(asked, by, books, sent_boot_s=1.0, kernel_boot="boot-1")
    assert isinstance(answer, NotTaken) and (answer.why.code, answer.why.fault) == (code, fault)


def test_the_ladder_is_climbed_in_this_order() -> None:
    """An offer that breaks everything is refused by the first rung; taking its reason away shows the next."""
    assert [rung.__name__.strip("_") for rung in LADDER] == [
        "wrong_site",
        "tombstone",
        "stale",
        "paused",
        "closed",
        "pool",
        "mode",
        "tenant",
        "shape",
        "image",
        "lease",
        "lent",
        "owner_first",
        "busy",
        "unwell",
    ]


def test_an_offer_whose_image_the_owner_takes_is_taken_with_it() -> None:
    answer = judge(
        named(IMAGE),
        terms(images=PoolImages(runtime="apptainer", sources=["registry.example.cn/team"])),
        Books(),
        sent_boot_s=1.0,
        kernel_boot="b",
    )
    assert isinstance(answer, Taken) and answer.attempt.spec.image == IMAGE


def test_an_offer_that_breaks_nothing_is_taken_and_remembers_when_its_sync_was_sent() -> None:
    answer = judge(body(), terms(), Books(), sent_boot_s=12.5, kernel_boot="boot-1")
    assert isinstance(answer, Taken)
    assert (answer.attempt.state, answer.attempt.offer_sent_boot_s, answer.attempt.kernel_boot) == (State.CLAIMED, 12.5, "boot-1")


def test_an_offer_may_name_devices_of_those_that_it_comes_after() -> None:
    answer = judge(body(after=[HOLDER]), terms(pools={PoolName("main"): pool(lend=1)}), BUSY, sent_boot_s=1, kernel_boot="b")
    assert isinstance(answer, Taken) and answer.attempt.after == [HOLDER]


def test_what_stops_itself_takes_a_lease_along() -> None:
    answer = judge(body(lease_s=60), terms(), Books(), sent_boot_s=1, kernel_boot="b")
    assert isinstance(answer, Taken) and answer.attempt.lease_s == 60


def test_an_owner_who_does_not_go_first_lends_while_waiting() -> None:
    books = Books(attempts={WAITS.id: WAITS})
    assert isinstance(judge(body(), terms(owner_first=False), books, sent_boot_s=1, kernel_boot="b"), Taken)


def test_a_single_user_site_takes_its_owner_s_tenant_without_a_mapping() -> None:
    assert isinstance(
        judge(body(account=""), terms(single_user=True, mappings=frozenset()), Books(), sent_boot_s=1, kernel_boot="b"), Taken
    )


def test_local_work_does_not_use_up_what_may_be_lent() -> None:
    books = held("slot-1", local=True)
    by = terms(pools={PoolName("main"): pool(lend=1)})
    assert isinstance(judge(body(devices=[DeviceId("slot-2")]), by, books, sent_boot_s=1, kernel_boot="b"), Taken)


@pytest.mark.parametrize("state", list(State))
def test_a_known_attempt_gets_the_answer_it_had(state: State) -> None:
    known = attempt(state=state, id=AttemptId("att-1"), devices=())
    books = Books(attempts={known.id: known}, seen={JobId("job-1"): (9, 9)})
    assert judge(body(), terms(paused=True), books, sent_boot_s=1, kernel_boot="b") == Repeated(known)


# --- moves ---


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", list(Event))
def test_a_move_that_is_not_in_the_table_is_our_bug(state: State, event: Event) -> None:
    work = attempt(state=state)
    if (state, event) in MOVES:
        assert move(work, event) is MOVES[(state, event)]
    else:
        with pytest.raises(IllegalMove, match=work.id):
            move(work, event)


def test_nothing_leaves_an_end() -> None:
    assert not {state for state, _ in MOVES} & {State.ENDED, State.NOT_STARTED, State.REFUSED}


def claimed() -> Attempt:
    return attempt(state=State.CLAIMED, boot="boot-1", offer_sent_boot_s=980.0, start_within_s=30, start_by_s=60)


GOES = [
    ("in time", claimed(), Proceed()),
    ("to the last moment", msgspec.structs.replace(claimed(), offer_sent_boot_s=970.0), Proceed()),
    ("a moment too late", msgspec.structs.replace(claimed(), offer_sent_boot_s=969.99), "go_too_late"),
    ("after a reboot", msgspec.structs.replace(claimed(), kernel_boot="boot-0"), "rebooted"),
    ("again", attempt(state=State.STAGING), Ignore()),
    ("while it runs", attempt(state=State.RUNNING), Ignore()),
    ("after its end", attempt(state=State.ENDED), Ignore()),
    ("after it was given up", attempt(state=State.NOT_STARTED), Ignore()),
]


@pytest.mark.parametrize(("what", "work", "expected"), GOES, ids=[row[0] for row in GOES])
def test_a_go_counts_from_the_sync_that_brought_the_offer(what: str, work: Attempt, expected: object) -> None:
    answer = on_go(work, NOW)
    assert (answer.why.code if isinstance(answer, GiveUp) else answer) == expected


OURS, THEIRS = JournalId("jnl-ours"), JournalId("jnl-theirs")
JOURNALS = [
    ("a hub of link version 1 names none", None, OURS, Proceed()),
    ("an attempt of an older agent says none", OURS, None, Proceed()),
    ("ours", OURS, OURS, Proceed()),
    ("the go is for another journal", THEIRS, OURS, "other_journal"),
    ("the claim lies in another journal", OURS, THEIRS, "other_journal"),
    ("both do", THEIRS, THEIRS, "other_journal"),
]


@pytest.mark.parametrize(("what", "named", "holds", "expected"), JOURNALS, ids=[row[0] for row in JOURNALS])
def test_a_go_starts_only_what_was_claimed_in_this_journal(
    what: str, named: JournalId | None, holds: JournalId | None, expected: object
) -> None:
    answer = on_go(msgspec.structs.replace(claimed(), claim_journal=holds), NOW, named=named, ours=OURS)
    assert (answer.why.code if isinstance(answer, GiveUp) else answer) == expected


STARTS = [
    ("in time", attempt(boot="boot-1", go_boot_s=950.0, start_by_s=60), None),
    ("too late", attempt(boot="boot-1", go_boot_s=900.0, start_by_s=60), "start_too_late"),
    ("go from before a reboot", attempt(boot="boot-0", go_boot_s=950.0, start_by_s=60), "rebooted"),
    (
        "local work starts also after a reboot",
        attempt(boot="boot-0", local=LocalWork(user="u", uid=7, cwd="/", submitted=AT)),
        None,
    ),
]


@pytest.mark.parametrize(("what", "work", "code"), STARTS, ids=[row[0] for row in STARTS])
def test_the_start_is_judged_again_just_before_it(what: str, work: Attempt, code: str | None) -> None:
    late = still_in_time(work, NOW)
    assert (late.code if late else None) == code


ASKED = StopAsked(reason="why", grace_s=3, by="hub")
STOPS = [
    (None, Bury()),
    (State.CLAIMED, "stopped"),
    (State.STAGING, "stopped"),
    (State.WAITING, "stopped"),
    (State.RUNNING, Halt(ASKED)),
    (State.ENDED, AlreadyOver("already_ended")),
    (State.NOT_STARTED, AlreadyOver("not_started")),
    (State.REFUSED, AlreadyOver("not_started")),
]


@pytest.mark.parametrize(("state", "expected"), STOPS, ids=[str(row[0]) for row in STOPS])
def test_a_stop_always_has_an_answer(state: State | None, expected: object) -> None:
    answer = on_stop(attempt(state=state) if state else None, ASKED)
    assert (answer.why.code if isinstance(answer, GiveUp) else answer) == expected


# --- verdicts ---

VERDICTS = [
    ("exit 0", Exit(certain=True, code=0), "succeeded", None),
    ("exit 1", Exit(certain=True, code=1), "failed", Cause.JOB),
    ("a signal of its own", Exit(certain=True, signal=11), "failed", Cause.JOB),
    ("asked to stop", Exit(certain=True, signal=15, stopped_for="asked"), "cancelled", Cause.CANCELLED),
    ("stopped, and said 0 on its way out", Exit(certain=True, code=0, stopped_for="asked"), "cancelled", Cause.CANCELLED),
    ("wall limit", Exit(certain=True, signal=9, stopped_for="wall_limit"), "failed", Cause.JOB),
    ("lease ended", Exit(certain=True, signal=15, stopped_for="lease_ended"), "failed", Cause.PLATFORM),
    ("no interpreter", Exit(certain=True, refused_errno=errno.ENOENT, refused_file="/j/script"), "failed", Cause.JOB),
    ("the machine has no memory", Exit(certain=True, refused_errno=errno.ENOMEM, refused_file="/j/script"), "failed", Cause.SITE),
    ("rights could not be dropped", Exit(certain=True, refused_errno=errno.EINVAL, refused_file="uid 7"), "failed", Cause.SITE),
    ("its supervisor was lost", Exit(certain=False), "unknown", Cause.UNKNOWN),
    ("the machine was restarted", Exit(certain=False, rebooted=True), "failed", Cause.SITE),
]


@pytest.mark.parametrize(("what", "end", "outcome", "cause"), VERDICTS, ids=[row[0] for row in VERDICTS])
def test_an_end_is_laid_at_the_right_door(what: str, end: Exit, outcome: str, cause: Cause | None) -> None:
    judged = verdict(end, attempt(state=State.RUNNING))
    assert (judged.outcome, judged.cause) == (outcome, cause) and judged.reason


CAUSES = [
    (Cause.CANCELLED, "cancelled"),
    (Cause.PREEMPTED, "failed"),
    (Cause.PLATFORM, "failed"),
]


@pytest.mark.parametrize(("cause", "outcome"), CAUSES)
def test_whoever_asked_for_a_stop_answers_for_the_end(cause: Cause, outcome: str) -> None:
    asked = StopAsked(reason="why", grace_s=3, by="hub", cause=cause)
    judged = verdict(Exit(certain=True, signal=15, stopped_for="asked"), attempt(state=State.RUNNING, stop=asked))
    assert (judged.outcome, judged.cause, judged.reason) == (outcome, cause, "why")


# --- leases ---


def at(boot_s: float, *, boot: str = "boot-1", stepped_s: float = 0.0) -> Moment:
    return Moment(AT + timedelta(seconds=boot_s + stepped_s), boot_s, boot)


LEASE = leases.deadline(60, 100.0, at(101.0))
OVERS = [
    ("a moment before", at(159.99), False),
    ("at its end", at(160.0), True),
    ("the wall clock was stepped on", at(120.0, stepped_s=41), True),
    ("the wall clock was stepped back", at(160.0, stepped_s=-3600), True),
    ("another boot", at(101.0, boot="boot-2"), True),
]


@pytest.mark.parametrize(("what", "now", "expected"), OVERS, ids=[row[0] for row in OVERS])
def test_a_lease_counts_from_the_sending_and_ends_by_the_earlier_clock(what: str, now: Moment, expected: bool) -> None:
    assert leases.is_over(LEASE, now) is expected


def test_a_lease_that_passed_once_is_not_renewed() -> None:
    work = attempt(state=State.RUNNING, lease_s=60)
    later = leases.renewed(work, LEASE, 60, 150.0, at(151.0))
    assert later is not None and later.boot_s == 210.0
    assert leases.renewed(work, LEASE, 60, 150.0, at(160.0)) is None


def test_a_lease_is_never_longer_than_the_offer_or_the_answer_says() -> None:
    work = attempt(state=State.RUNNING, lease_s=60)
    for given_s in (40.0, 90.0):
        later = leases.renewed(work, LEASE, given_s, 150.0, at(151.0))
        assert later is not None and later.boot_s == 150.0 + min(60, given_s)


def test_an_answer_that_gives_next_to_nothing_costs_no_write() -> None:
    assert leases.renewed(attempt(state=State.RUNNING, lease_s=60), LEASE, 60, 101.0, at(102.0)) is None


TOLD = [
    ("said in time", leases.deadline(60, 150.0, at(151.0)), True),
    ("said when the first had passed", leases.deadline(60, 150.0, at(161.0)), False),
    ("said in time by one clock only", leases.deadline(60, 150.0, at(151.0, stepped_s=20)), False),
    ("said in another boot", leases.deadline(60, 150.0, at(151.0, boot="boot-2")), False),
]


@pytest.mark.parametrize(("what", "told", "counts"), TOLD, ids=[row[0] for row in TOLD])
def test_a_later_word_counts_if_it_was_said_in_time(what: str, told: leases.Deadline, counts: bool) -> None:
    assert leases.follows(LEASE, told) is (told if counts else LEASE)
    assert leases.follows(None, told) is told and leases.follows(LEASE, None) is LEASE


RENEWALS = [
    ("running", attempt(state=State.RUNNING, lease_s=60), True),
    ("on its way", attempt(state=State.STAGING, lease_s=60), True),
    ("not begun", attempt(state=State.CLAIMED, lease_s=60), False),
    ("ended", attempt(state=State.ENDED, lease_s=60), False),
    ("without a lease", attempt(state=State.RUNNING), False),
    ("told to stop", attempt(state=State.RUNNING, lease_s=60, stop=ASKED), False),
    ("local", attempt(state=State.RUNNING, lease_s=60, local=WAITS.local), False),
]


@pytest.mark.parametrize(("what", "work", "expected"), RENEWALS, ids=[row[0] for row in RENEWALS])
def test_who_is_given_more_time(what: str, work: Attempt, expected: bool) -> None:
    assert leases.may_renew(work) is expected


# --- room ---

DISK = Space("/data", 600 * MIB, 1_000_000 * MIB)
ROOMS = [
    ("enough", [DISK], True, False, None),
    ("below the floor", [replace(DISK, free=511 * MIB)], True, False, "disk_low"),
    ("still closed just above it", [replace(DISK, free=600 * MIB)], True, True, "disk_low"),
    ("opens well above it", [replace(DISK, free=641 * MIB)], True, True, None),
    ("two hundredths of a small disk", [Space("/data", 3 * MIB, 100 * MIB)], True, False, None),
    ("less of a small disk", [Space("/data", MIB, 100 * MIB)], True, False, "disk_low"),
    ("one of several", [DISK, Space("/jobs", 0, 100 * MIB)], True, False, "disk_low"),
    ("the journal is at its bound", [DISK], False, False, "journal_full"),
    ("nothing is watched", [], True, False, None),
]


@pytest.mark.parametrize(("what", "spaces", "accepts", "closed", "code"), ROOMS, ids=[row[0] for row in ROOMS])
def test_new_work_needs_room(what: str, spaces: list[Space], accepts: bool, closed: bool, code: str | None) -> None:
    why = shortage(spaces, Floor(), journal_accepts=accepts, closed=closed)
    assert (why.code if why else None) == code and (why is None or not why.fault)


# --- devices ---


def test_an_heir_holds_nothing_until_its_predecessor_is_gone_and_all_of_it_then() -> None:
    first = attempt(state=State.RUNNING, devices=("slot-1", "slot-2"))
    heir = attempt(state=State.CLAIMED, devices=("slot-2", "slot-3"), after=[first.id])
    holds = Holds.of([heir, first])
    main = PoolName("main")
    assert [holds.holder.get((main, DeviceId(f"slot-{n}"))) for n in (1, 2, 3)] == [first.id, first.id, heir.id]
    third = attempt(state=State.CLAIMED, devices=("slot-2",), after=[first.id])
    with pytest.raises(AssertionError, match=third.id):
        holds.take(third)
    holds.release(first)
    assert [holds.holder.get((main, DeviceId(f"slot-{n}"))) for n in (1, 2, 3)] == [None, heir.id, heir.id]
    holds.release(heir)
    assert holds.holder == {} and holds.heir == {}


def test_what_is_found_at_its_end_holds_nothing() -> None:
    """Folders of one device that a lost journal left: the youngest holds it, however many there were before."""
    young = attempt(state=State.RUNNING)
    ended = [attempt(state=State.STAGING, over=True) for _ in range(3)]
    assert set(Holds.of([*ended, young]).holder.values()) == {young.id}


def test_an_heir_that_is_given_up_leaves_its_predecessor_alone() -> None:
    first = attempt(state=State.RUNNING)
    heir = attempt(state=State.CLAIMED, after=[first.id])
    holds = Holds.of([first, heir])
    holds.release(heir)
    holds.release(first)
    assert holds.holder == {} and holds.heir == {}


@given(st.lists(st.tuples(st.sets(st.integers(1, 4), min_size=1), st.booleans()), min_size=1, max_size=8), st.randoms())
def test_no_device_ever_has_two_holders_whoever_comes_after_whom(asked: list[tuple[set[int], bool]], dice: Random) -> None:
    holds, here = Holds(), list[Attempt]()
    for numbers, waits in asked:
        devices = tuple(f"slot-{n}" for n in sorted(numbers))
        after = holds.holders(PoolName("main"), [DeviceId(d) for d in devices]) if waits else []
        work = attempt(state=State.CLAIMED, devices=devices, after=after)
        if not holds.busy(work.pool, work.devices, after=work.after):
            holds.take(work)
            here.append(work)
        if here and dice.random() < 0.3:
            gone = here.pop(dice.randrange(len(here)))
            holds.release(gone)
        assert holds.holder == Holds.of(here).holder
        assert set(holds.heir) <= set(holds.holder)


DISPLACED = [
    ("the newest claim is enough", 1, [("slot-1", State.CLAIMED), ("slot-2", State.CLAIMED)], ["slot-2"]),
    ("both are needed", 2, [("slot-1", State.CLAIMED), ("slot-2", State.STAGING)], ["slot-2", "slot-1"]),
    ("what runs is never asked for", 1, [("slot-1", State.RUNNING), ("slot-2", State.RUNNING)], []),
    ("not enough is nothing", 2, [("slot-1", State.RUNNING), ("slot-2", State.CLAIMED)], []),
]


@pytest.mark.parametrize(("what", "count", "there", "expected"), DISPLACED, ids=[row[0] for row in DISPLACED])
def test_whose_claim_makes_room_for_the_owner(what: str, count: int, there: list[tuple[str, State]], expected: list[str]) -> None:
    claims = [attempt(state=state, devices=(device,), id=AttemptId(f"att-{n}")) for n, (device, state) in enumerate(there)]
    attempts = {claim.id: claim for claim in claims}
    chosen = displaceable([pool(2)], DeviceKind.SLOT, count, Holds.of(claims), attempts, {})
    assert [attempts[name].devices for name in chosen] == [[device] for device in expected]


def test_a_second_holder_is_refused_loudly() -> None:
    first, second = attempt(state=State.CLAIMED), attempt(state=State.CLAIMED)
    holds = Holds.of([first])
    with pytest.raises(AssertionError, match=first.id):
        holds.take(second)
    holds.release(second)
    assert holds.busy(PoolName("main"), [DeviceId("slot-1")]) == [DeviceId("slot-1")]


def test_a_device_of_the_same_name_in_another_pool_is_another_device() -> None:
    holds = Holds.of([attempt(state=State.CLAIMED)])
    assert holds.busy(PoolName("other"), [DeviceId("slot-1")]) == []


SEEN = [
    ("free", {}, [], DeviceState.UNKNOWN),
    ("seen free", {"GPU-1": DeviceState.FREE}, [], DeviceState.FREE),
    ("foreign", {"GPU-1": DeviceState.FOREIGN}, [], DeviceState.FOREIGN),
    ("ours is told before a stranger", {"GPU-1": DeviceState.FOREIGN}, ["hub"], DeviceState.OURS),
    ("local", {"GPU-1": DeviceState.FREE}, ["local"], DeviceState.LOCAL),
    ("lost is told before its holder", {"GPU-1": DeviceState.LOST}, ["hub"], DeviceState.LOST),
]


@pytest.mark.parametrize(("what", "observed", "holders", "expected"), SEEN, ids=[row[0] for row in SEEN])
def test_a_device_s_state_is_what_matters_most_of_it(
    what: str, observed: dict[str, DeviceState], holders: list[str], expected: DeviceState
) -> None:
    work = attempt(state=State.RUNNING, devices=("GPU-1",), kind=DeviceKind.GPU)
    if holders == ["local"]:
        work = msgspec.structs.replace(work, local=LocalWork(user="u", uid=7, cwd="/", submitted=AT))
    attempts = {work.id: work} if holders else {}
    [found] = inventory(
        [pool(gpus=("GPU-1",))], attempts, Holds.of(attempts.values()), {DeviceId(k): v for k, v in observed.items()}, paused=False
    )
    assert found.devices[0].state is expected


def test_local_work_is_given_only_what_is_free_and_well() -> None:
    pools = [pool(gpus=("GPU-1", "GPU-2", "GPU-3"), name="gpu"), pool(2)]
    observed = {DeviceId("GPU-1"): DeviceState.LOST, DeviceId("GPU-2"): DeviceState.FREE, DeviceId("GPU-3"): DeviceState.FREE}
    chosen = choose(pools, DeviceKind.GPU, 2, Holds(), observed)
    assert chosen is not None and chosen[1] == ["GPU-2", "GPU-3"]
    assert choose(pools, DeviceKind.GPU, 3, Holds(), observed) is None


# --- usage ---

durations = st.integers(0, 10**14)


@given(durations, durations, durations, st.lists(st.integers(-(10**14), 10**14), max_size=6), st.integers(1, 64))
def test_segments_neither_overlap_nor_gap_and_their_sum_is_exact_wherever_borders_fall(
    staged: int, ran: int, packing: int, borders: list[int], devices: int
) -> None:
    spans = usage.spans(staged_us=staged, ran_us=ran, packing_us=packing, borders_us=borders)
    work = attempt(devices=tuple(f"slot-{n}" for n in range(devices)))
    assert usage.counts(work, spans).quantity_milli_us == 1000 * devices * (staged + ran + packing)
    assert all(one.end_us == following.start_us for one, following in zip(spans, spans[1:], strict=False))
    assert sum(s.end_us - s.start_us for s in spans if s.phase is UsagePhase.RUN) == ran
    assert all(s.end_us > s.start_us for s in spans)


def test_an_attempt_has_one_anchor_and_the_last_segment_says_so() -> None:
    """BR-139: the wall clock is read once an attempt, whatever it shows afterwards."""
    started = StartedRecord(utc_ns=1_796_083_200_123_456_789, boot_ns=5 * 10**9, native_id="1", offset_s=0.25, error_s=0.01)
    work = attempt(started=started)
    spans = usage.spans(staged_us=2_000_000, ran_us=6_418_001, packing_us=0)
    first, last = usage.segments(work, SiteName("lab"), spans, after=0, islanded=True)
    assert first.anchor == last.anchor and last.anchor.utc == usage.utc_of(started.utc_ns)
    assert (first.end, last.start, last.end - last.start) == (last.anchor.utc, last.anchor.utc, timedelta(microseconds=6_418_001))
    assert (first.last, last.last, last.islanded) == (False, True, True)


# --- logs (BR-140) ---

DONE = "训练完成".encode()
CUTS = [
    ("a fragment is held back", b"caf\xc3", 0, 0, False, (0, 3, "caf")),
    ("its rest comes", b"\xc3\xa9 \xe2\x96", 0, 3, False, (3, 6, "é ")),
    ("and so on", b"\xe2\x96\x88 ok", 0, 6, False, (6, 12, "█ ok")),
    ("a start inside a character moves to the next", DONE[1:], 3, 4, True, (6, 12, "完成")),
    ("a final fragment becomes U+FFFD", b"x\xe2\x96", 0, 0, True, (0, 3, "x\ufffd")),
    ("a start at a character stays", DONE, 3, 3, True, (3, 12, "练完成")),
    ("what is no UTF-8 is shown, not dropped", b"\x80\x81 ok", 0, 0, True, (0, 5, "\ufffd\ufffd ok")),
    ("nothing", b"", 0, 0, False, (0, 0, "")),
]


@pytest.mark.parametrize(("what", "data", "before", "offset", "complete", "expected"), CUTS, ids=[row[0] for row in CUTS])
def test_a_log_is_cut_between_characters(
    what: str, data: bytes, before: int, offset: int, complete: bool, expected: tuple[int, int, str]
) -> None:
    """BR-140."""
    piece = logs.cut(data, before, offset, complete=complete)
    assert (piece.offset, piece.next_offset, piece.text) == expected


@given(st.text(max_size=60), st.integers(1, 7))
def test_a_reader_who_follows_reads_every_character_once(text: str, size: int) -> None:
    """BR-140."""
    data = text.encode("utf-8")
    offset, said = 0, ""
    while offset < len(data):
        before = min(logs.LOOK_BACK, offset)
        end = min(len(data), offset + size)
        while True:
            piece = logs.cut(data[offset - before : end], before, offset, complete=end == len(data))
            if piece.next_offset > offset:
                break
            end += 1
        said, offset = said + piece.text, piece.next_offset
    assert said == text
