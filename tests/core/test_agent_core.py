"""The site's rules as tables: every rung of the ladder in its order, every move, every verdict, every cut."""

from __future__ import annotations

import errno
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.agents import attempt, offer, pool

from intertie.agent.core import logs, usage
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
from intertie.agent.core.devices import Holds, choose, inventory
from intertie.agent.core.model import Attempt, LocalWork, Moment, StartedRecord, State, StopAsked
from intertie.agent.core.offers import LADDER, Books, NotTaken, Repeated, Taken, Terms, judge
from intertie.contracts.job import Cause, Resources
from intertie.contracts.link import OfferBody
from intertie.contracts.site import DeviceKind, DeviceState
from intertie.contracts.usage import UsagePhase
from intertie.ids import AttemptId, DeviceId, JobId, PoolName, SegmentId, SiteName, TenantName

AT = datetime(2026, 12, 1, tzinfo=UTC)
NOW = Moment(AT, 1_000.0, "boot-1")
ACME = TenantName("acme")


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


def held(*devices: str, local: bool = False) -> Books:
    who = attempt(state=State.RUNNING, devices=devices)
    if local:
        who = msgspec.structs.replace(who, local=LocalWork(user="u", uid=7, cwd="/", submitted=AT))
    return Books(attempts={who.id: who}, holds=Holds.of([who]))


def gpu_body() -> OfferBody:
    asked = body(devices=[DeviceId("GPU-1")])
    return msgspec.structs.replace(asked, spec=msgspec.structs.replace(asked.spec, resources=Resources(gpus=1)))


GPU_TERMS = terms(pools={PoolName("main"): pool(gpus=("GPU-1", "GPU-2"))})
RUNGS = [
    ("wrong_site", True, body(site=SiteName("other")), terms(), Books()),
    ("stopped_before", False, body(), terms(), Books(tombstones={AttemptId("att-1")})),
    ("stale_generation", False, body(), terms(), Books(seen={JobId("job-1"): (1, 1)})),
    ("stale_generation", False, body(), terms(), Books(seen={JobId("job-1"): (2, 0)})),
    ("paused", False, body(), terms(paused=True), Books()),
    ("unknown_pool", True, body(pool=PoolName("none")), terms(), Books()),
    ("cordoned", False, body(), terms(cordoned=frozenset({PoolName("main")})), Books()),
    ("single_user", True, body(tenant=TenantName("beta")), terms(single_user=True), Books()),
    ("no_mapping", True, body(account="someone"), terms(), Books()),
    ("account", True, body(), terms(may_run_as=lambda account: f"{account} is not known here"), Books()),
    ("unknown_device", True, body(devices=[DeviceId("slot-99")]), terms(), Books()),
    ("devices", True, body(devices=[DeviceId("slot-1"), DeviceId("slot-2")]), terms(), Books()),
    ("unknown_device", True, body(), GPU_TERMS, Books()),
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
        "pool",
        "tenant",
        "shape",
        "lent",
        "busy",
        "unwell",
    ]


def test_an_offer_that_breaks_nothing_is_taken_and_remembers_when_its_sync_was_sent() -> None:
    answer = judge(body(), terms(), Books(), sent_boot_s=12.5, kernel_boot="boot-1")
    assert isinstance(answer, Taken)
    assert (answer.attempt.state, answer.attempt.offer_sent_boot_s, answer.attempt.kernel_boot) == (State.CLAIMED, 12.5, "boot-1")


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


# --- devices ---


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
    first, last = usage.segments(work, SiteName("lab"), spans, [SegmentId("a"), SegmentId("b")], islanded=True)
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
