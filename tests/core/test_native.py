"""A site's own queue, in the pure: what a start stub's record and the scheduler's word make of an end, and what rights and suspensions are worth."""

from __future__ import annotations

import errno
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.agents import attempt

from intertie.agent.adapters.port import Described, NativeEnd, NativeJob, NativeNode, NativeOutcome, NativePhase
from intertie.agent.core import rights, usage
from intertie.agent.core.attempts import Exit, verdict
from intertie.agent.core.devices import Pool
from intertie.agent.core.model import QueuedRecord, StartedRecord, StopAsked, Suspension
from intertie.agent.core.native import (
    TWICE,
    Known,
    Now,
    StubEnded,
    StubStarted,
    StubTime,
    anchored,
    ended_of,
    exit_of,
    never,
    ran_us,
    refused_of,
    started_of,
)
from intertie.contracts.job import Cause
from intertie.contracts.site import DeviceKind, DeviceState, Lendable, NativeLoad, PoolProfile, TaskType
from intertie.contracts.usage import UsagePhase
from intertie.ids import AttemptId, DeviceId, PoolName

T0 = datetime(2026, 12, 1, 8, 0, tzinfo=UTC)
STARTED = StubStarted(StubTime(int(T0.timestamp()) * 10**9, 5 * 10**9, "boot"), "n1", "4711")


def record(**fields: object) -> StubEnded:
    return StubEnded(StubTime((int(T0.timestamp()) + 90) * 10**9, 95 * 10**9, "boot"), **fields)  # type: ignore[arg-type]  # its fields


def native(outcome: NativeOutcome, **fields: object) -> NativeJob:
    end = NativeEnd(outcome, **{name: fields.pop(name) for name in ("code", "signal", "text") if name in fields})  # type: ignore[arg-type]
    job = NativeJob(
        AttemptId("att-1"),
        "c1",
        "4711",
        NativePhase.ENDED,
        outcome.name,
        submitted=T0 - timedelta(seconds=9),
        started=T0,
        ended=T0 + timedelta(seconds=100),
        end=end,
    )
    return replace(job, **fields)  # type: ignore[arg-type]  # its fields


def own(job: NativeJob) -> NativeJob:
    assert job.end is not None
    return replace(job, end=replace(job.end, own=True))


O = NativeOutcome  # noqa: E741  # a table's column

ANEW = replace(native(O.EXITED, code=TWICE), ended=T0 + timedelta(seconds=1))
"""What the scheduler says of a start that the stub refused, where another had begun."""

ENDS = [
    # what happened, the scheduler's word, the stub's record, asked by us, outcome, cause, exit code, signal
    ("it succeeded", native(O.EXITED, code=0), record(code=0), False, "succeeded", None, 0, None),
    ("it failed", native(O.EXITED, code=7), record(code=7), False, "failed", Cause.JOB, 7, None),
    ("exit code 137 by itself", native(O.EXITED, code=137), record(code=137), False, "failed", Cause.JOB, 137, None),
    ("killed by a signal", native(O.EXITED, code=137), record(signal=9), False, "failed", Cause.JOB, None, 9),
    ("out of memory, its script killed", native(O.OUT_OF_MEMORY), record(signal=9), False, "failed", Cause.JOB, None, 9),
    ("out of memory, its stub killed too", native(O.OUT_OF_MEMORY), None, False, "failed", Cause.JOB, None, None),
    (
        "past its wall limit, by the stub",
        native(O.EXITED, code=143),
        record(signal=15, stopped="wall_limit"),
        False,
        "failed",
        Cause.JOB,
        None,
        15,
    ),
    ("past its wall limit, by the scheduler", native(O.WALL_LIMIT), None, False, "failed", Cause.JOB, None, None),
    ("its lease ended", native(O.EXITED, code=143), record(signal=15, stopped="lease_ended"), False, "failed", Cause.PLATFORM, None, 15),
    ("its node failed", native(O.NODE_FAILED), None, False, "failed", Cause.SITE, None, None),
    ("preempted, asked first", native(O.PREEMPTED), record(signal=15, stopped="signalled"), False, "failed", Cause.PREEMPTED, None, 15),
    ("could not be launched, and was begun", native(O.LAUNCH_FAILED), None, False, "unknown", Cause.UNKNOWN, None, None),
    ("sent itself Slurm's word for that", native(O.LAUNCH_FAILED, signal=53), None, False, "failed", Cause.JOB, None, 53),
    ("cancelled by us", native(O.CANCELLED), record(signal=15, stopped="asked"), True, "cancelled", Cause.CANCELLED, None, 15),
    ("cancelled by us, killed whole", native(O.CANCELLED), None, True, "cancelled", Cause.CANCELLED, None, None),
    ("cancelled at the site", native(O.CANCELLED), record(signal=15, stopped="signalled"), False, "cancelled", Cause.SITE, None, 15),
    ("cancelled at the site after it had ended", native(O.CANCELLED), record(code=0), False, "succeeded", None, 0, None),
    (
        "started a second time",
        replace(native(O.EXITED, code=TWICE), ended=T0 + timedelta(seconds=1)),
        None,
        False,
        "unknown",
        Cause.UNKNOWN,
        None,
        None,
    ),
    (
        "put back while it ran, by whomever",
        native(O.EXITED, code=TWICE, restarts=1),
        record(signal=15, stopped="signalled"),
        False,
        "unknown",
        Cause.UNKNOWN,
        None,
        None,
    ),
    (
        "put back, and the start after it fails at Slurm",
        native(O.EXITED, code=1, restarts=1),
        None,
        False,
        "unknown",
        Cause.UNKNOWN,
        None,
        None,
    ),
    ("ended, then put back", native(O.EXITED, code=TWICE, restarts=1), record(code=3), False, "failed", Cause.JOB, 3, None),
    (
        "cancelled by its own account",
        own(native(O.CANCELLED)),
        record(signal=15, stopped="signalled"),
        False,
        "failed",
        Cause.JOB,
        None,
        15,
    ),
    (
        "cancelled at the site, and gone before its stub heard of it",
        native(O.CANCELLED),
        record(code=143),
        False,
        "cancelled",
        Cause.SITE,
        143,
        None,
    ),
    ("ended by itself, and cancelled too late", native(O.CANCELLED), record(code=0), False, "succeeded", None, 0, None),
    ("cancelled by us, as its own account", own(native(O.CANCELLED)), None, True, "cancelled", Cause.CANCELLED, None, None),
    ("a stub's code after a run", native(O.EXITED, code=TWICE), None, False, "failed", Cause.JOB, TWICE, None),
    ("its own code is that of a refusal", native(O.EXITED, code=TWICE), record(code=TWICE), False, "failed", Cause.JOB, TWICE, None),
    ("nobody knows", native(O.UNKNOWN), None, False, "unknown", Cause.UNKNOWN, None, None),
    ("the books say no code and no record is there", native(O.EXITED), None, False, "unknown", Cause.UNKNOWN, None, None),
    ("the books have forgotten it", None, record(code=3), False, "failed", Cause.JOB, 3, None),
    ("begun anew by one that forgot it, after it was killed", ANEW, record(signal=9), False, "unknown", Cause.UNKNOWN, None, None),
    ("begun anew by one that forgot it, after a part was killed", ANEW, record(code=137), False, "unknown", Cause.UNKNOWN, None, None),
    ("begun anew by one that forgot it, after it ended well", ANEW, record(code=0), False, "succeeded", None, 0, None),
    ("begun anew by one that forgot it, after it failed", ANEW, record(code=3), False, "failed", Cause.JOB, 3, None),
    (
        "a stub's code after a long run stands above a record",
        native(O.EXITED, code=TWICE),
        record(code=0),
        False,
        "failed",
        Cause.JOB,
        TWICE,
        None,
    ),
    ("the scheduler lost it, and it was killed", None, record(signal=9), False, "unknown", Cause.UNKNOWN, None, None),
    ("the scheduler lost it, and a part of it was killed", None, record(code=137), False, "unknown", Cause.UNKNOWN, None, None),
    (
        "the scheduler lost it, and its stub was told to end",
        None,
        record(code=1, stopped="signalled"),
        False,
        "unknown",
        Cause.UNKNOWN,
        None,
        None,
    ),
    ("the scheduler lost it, and it had ended well", None, record(code=0), False, "succeeded", None, 0, None),
    ("the scheduler lost it, and it reached its limit", None, record(signal=9, stopped="wall_limit"), False, "failed", Cause.JOB, None, 9),
    ("the scheduler lost it, and we had asked", None, record(signal=15, stopped="asked"), True, "cancelled", Cause.CANCELLED, None, 15),
    ("the scheduler alone saw it", native(O.EXITED, code=4), None, False, "failed", Cause.JOB, 4, None),
    (
        "it has no interpreter",
        replace(native(O.EXITED, code=127), ended=T0 + timedelta(seconds=1)),
        record(refused_errno=2, refused_file="/no"),
        False,
        "failed",
        Cause.JOB,
        None,
        None,
    ),
]


@pytest.mark.parametrize(
    ("job", "told", "asked", "outcome", "cause", "code", "signal"), [row[1:] for row in ENDS], ids=[row[0] for row in ENDS]
)
def test_who_ended_it_is_the_scheduler_s_word_and_how_is_its_own(
    job: NativeJob | None, told: StubEnded | None, asked: bool, outcome: str, cause: Cause | None, code: int | None, signal: int | None
) -> None:
    stop = StopAsked(reason="enough", grace_s=1, by="hub") if asked else None
    end = exit_of(job, STARTED, told, Known(asked=asked, lease_over=True))
    judged = verdict(end, attempt(stop=stop))
    assert (judged.outcome, judged.cause, end.code, end.signal) == (outcome, cause, code, signal)


@given(st.sampled_from([None, *(row[1] for row in ENDS)]), st.sampled_from([None, *(row[2] for row in ENDS)]), st.booleans())
def test_no_pair_of_words_breaks_the_table(job: NativeJob | None, told: StubEnded | None, asked: bool) -> None:
    end = exit_of(job, STARTED, told, Known(asked=asked))
    judged = verdict(end, attempt())
    assert judged.outcome in ("succeeded", "failed", "cancelled", "unknown") and end.ran_us >= 0
    assert judged.outcome != "succeeded" or end.code == 0, "a legal default was made of what nobody said"


def test_a_run_is_as_long_as_the_site_s_own_books_say() -> None:
    """BR-001: their start and end, where they have both; else the stub's clocks."""
    job = native(O.EXITED, code=0)
    assert ran_us(job, STARTED, record(code=0)) == 100_000_000
    assert ran_us(None, STARTED, record(code=0)) == 90_000_000
    assert ran_us(replace(job, started=None), STARTED, None) == 100_000_000
    rebooted = replace(record(code=0), at=StubTime(STARTED.at.utc_ns + 7 * 10**9, 1, "other"))
    assert ran_us(None, STARTED, rebooted) == 7_000_000
    assert ran_us(None, None, None) == 0


NOW = Now(int(T0.timestamp() + 60) * 1_000_000, 1_000_000_000)
ANCHORS = [
    ("by the scheduler's start", native(O.EXITED, code=0), 0, T0, 940_000_000),
    ("a look's latency is no other clock", native(O.EXITED, code=0), 900_000, T0, 940_000_000),
    ("its clock is seven minutes behind", replace(native(O.EXITED), started=T0 - timedelta(minutes=7)), 420_000_000, T0, 940_000_000),
    (
        "it would lie in the future",
        replace(native(O.EXITED), started=T0 + timedelta(hours=1)),
        0,
        T0 + timedelta(seconds=60),
        1_000_000_000,
    ),
    ("the scheduler says no start", replace(native(O.EXITED), started=None), 0, T0, 940_000_000),
    ("it says nothing", None, 0, T0, 940_000_000),
]


@pytest.mark.parametrize(("job", "behind_us", "utc", "boot_us"), [row[1:] for row in ANCHORS], ids=[row[0] for row in ANCHORS])
def test_a_start_is_anchored_on_this_host_s_clocks(job: NativeJob | None, behind_us: int, utc: datetime, boot_us: int) -> None:
    found = anchored(job, behind_us, STARTED, NOW)
    assert (usage.utc_of(found.utc_ns), found.boot_ns) == (utc, boot_us * 1_000)


NEVER = [
    (O.NEVER_STARTED, errno.ETIME),
    (O.UNKNOWN, errno.ETIME),
    (O.EXITED, errno.ETIME),
    (O.CANCELLED, errno.ECANCELED),
    (O.PREEMPTED, errno.ECANCELED),
    (O.LAUNCH_FAILED, errno.ENOEXEC),
    (O.NODE_FAILED, errno.ENOEXEC),
    (O.IMAGE_UNFETCHED, errno.ENOPKG),
]


@pytest.mark.parametrize(("outcome", "number"), NEVER)
def test_what_left_the_queue_unbegun_is_laid_to_whoever_took_it(outcome: NativeOutcome, number: int) -> None:
    assert never(outcome, "-") == Exit(certain=True, refused_errno=number, refused_file="native queue", refused_text="-")


# --- records -----------------------------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=400))
def test_no_record_of_strangers_breaks_a_reader_or_becomes_an_end(data: bytes) -> None:
    for read in (started_of, ended_of, refused_of):
        found = read(data)
        assert found is None or b"format=1" in data


@pytest.mark.parametrize(
    "text",
    [
        "",
        "format=2\nutc_ns=1\nboot_ns=1\ncode=0\n",
        "format=1\nboot_ns=1\ncode=0\n",
        "format=1\nutc_ns=1\nboot_ns=1\n",
        "format=1\nutc_ns=1\nboot_ns=1\ncode=0\nsignal=9\n",
        "format=1\nutc_ns=1\nboot_ns=1\ncode=256\n",
        "format=1\nutc_ns=1\nboot_ns=1\ncode=-1\n",
        "format=1\nutc_ns=1\nboot_ns=1\ncode=\u0663\n",
        "format=1\nutc_ns=99999999999999999999\nboot_ns=1\ncode=0\n",
        "format=1\nutc_ns=1\nboot_ns=1\ncode=0\nstopped=because\n",
    ],
)
def test_an_end_that_is_not_said_whole_is_no_end(text: str) -> None:
    assert ended_of(text.encode()) is None


def test_the_first_word_of_a_name_stands() -> None:
    found = ended_of(b"format=1\nutc_ns=5\nboot_ns=6\nboot_id=b\ncode=3\ncode=0\nstopped=\n")
    assert found == StubEnded(StubTime(5, 6, "b"), 3)


# --- clocks ------------------------------------------------------------------------------------------------------------------------------


def suspended(*pieces: tuple[int, int | None]) -> list[Suspension]:
    return [Suspension(start_us=start, end_us=end) for start, end in pieces]


PIECES = [
    ("never", suspended(), 0, 0, []),
    ("as it was seen", suspended((10, 20), (40, 50)), 0, 0, [(10, 20), (40, 50)]),
    ("still, at the end", suspended((10, None)), 0, 0, [(10, 100)]),
    ("longer by the books, at its end", suspended((10, 20)), 15, 0, [(10, 25)]),
    ("longer by the books than what is left", suspended((60, 95)), 45, 0, [(55, 100)]),
    ("by the books alone", suspended(), 30, 0, [(70, 100)]),
    ("shorter by the books", suspended((10, 20), (40, 50)), 15, 0, [(10, 20), (40, 45)]),
    ("shorter than a whole piece", suspended((10, 20), (40, 50)), 5, 0, [(10, 15)]),
    ("what was told is not taken back", suspended((10, 30)), 5, 20, [(10, 20)]),
    ("nor made longer", suspended((10, 30)), 30, 40, [(10, 30), (90, 100)]),
]


@pytest.mark.parametrize(("seen", "booked", "told", "expected"), [row[1:] for row in PIECES], ids=[row[0] for row in PIECES])
def test_suspensions_are_cut_where_they_were_seen_and_as_long_as_the_books_say(
    seen: list[Suspension], booked: int, told: int, expected: list[tuple[int, int]]
) -> None:
    """BR-078."""
    assert usage.suspended(attempt(suspensions=seen), 100, booked, told) == expected


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60)), max_size=5),
    st.integers(0, 400),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, 50),
    st.lists(st.integers(-50, 320), max_size=4),
)
def test_the_phases_of_an_attempt_neither_overlap_nor_gap_whatever_was_suspended(
    raw: list[tuple[int, int]], booked: int, ran: int, staged: int, queued: int, borders: list[int]
) -> None:
    seen: list[Suspension] = []
    at = 0
    for gap, length in raw:
        seen.append(Suspension(start_us=at + gap, end_us=at + gap + length))
        at += gap + length
    pieces = usage.suspended(attempt(suspensions=seen), ran, booked)
    parts = usage.spans(staged_us=staged, ran_us=ran, packing_us=7, borders_us=borders, queued_us=queued, suspended=pieces)
    assert all(before.end_us == after.start_us for before, after in zip(parts, parts[1:], strict=False))
    assert (parts[0].start_us, parts[-1].end_us) == (-staged, ran + 7)
    inside = sum(p.end_us - p.start_us for p in parts if p.phase in (UsagePhase.RUN, UsagePhase.SUSPENDED))
    assert inside == ran
    held = sum(p.end_us - p.start_us for p in parts if p.phase is UsagePhase.SUSPENDED)
    assert held == sum(end - start for start, end in pieces) and (not 0 < booked <= ran or held == booked)


def test_waiting_in_the_site_s_queue_is_the_last_part_of_the_staging() -> None:
    work = attempt(
        go_boot_s=1.0,
        queued=QueuedRecord(native_id="1", cluster="c", utc_ns=0, boot_ns=3 * 10**9),
        started=StartedRecord(utc_ns=0, boot_ns=10 * 10**9, native_id="1"),
    )
    assert usage.queued_us(work, work.kernel_boot) == 7_000_000
    assert usage.queued_us(work, "another boot") == 0
    parts = usage.spans(staged_us=9_000_000, ran_us=5, packing_us=0, queued_us=7_000_000)
    assert [(p.phase, p.start_us, p.end_us) for p in parts] == [
        (UsagePhase.STAGE_IN, -9_000_000, -7_000_000),
        (UsagePhase.SITE_QUEUE, -7_000_000, 0),
        (UsagePhase.RUN, 0, 5),
    ]


# --- rights ------------------------------------------------------------------------------------------------------------------------------


def profile(count: int = 8, lend: int = 4, accelerator: str = "A100-SXM4-80GB") -> PoolProfile:
    return PoolProfile(
        pool=PoolName("main"),
        accelerator=accelerator,
        count=count,
        memory_mib=81_920,
        interconnect="none",
        task_types=[TaskType.BATCH],
        lendable=Lendable(devices=lend),
    )


def described(*nodes: NativeNode, busy: int = 0) -> Described:
    return Described("c1", "22.05", T0, nodes, NativeLoad(running=3, waiting=9, devices_busy=busy))


def node(devices: int, *, usable: bool = True, busy: int = 0, model: str = "a100") -> NativeNode:
    return NativeNode(f"n{devices}{busy}", usable, "idle" if usable else "drained", devices=devices, busy=busy, model=model)


def counted(pool: Pool, told: Described, held: set[DeviceId] | None = None, ours: int = 0) -> dict[DeviceState, int]:
    states = rights.states(pool, rights.room(pool, told, ours, alone=True), held or set())
    return {state: list(states.values()).count(state) for state in set(states.values())}


RIGHTS = [
    ("all is free", described(node(8)), 0, {DeviceState.FREE: 4}),
    ("others leave enough", described(node(8, busy=3)), 0, {DeviceState.FREE: 4}),
    ("others leave two", described(node(8, busy=6)), 0, {DeviceState.FREE: 2, DeviceState.FOREIGN: 2}),
    ("ours are not others'", described(node(8, busy=6)), 2, {DeviceState.FREE: 4}),
    ("load that no node shows", described(node(8), busy=7), 0, {DeviceState.FREE: 1, DeviceState.FOREIGN: 3}),
    ("a node is drained", described(node(6, usable=False), node(2)), 0, {DeviceState.FREE: 2, DeviceState.LOST: 2}),
    ("nothing is left", described(node(8, usable=False)), 0, {DeviceState.LOST: 4}),
    ("other cards do not count", described(node(8, model="h100"), node(1)), 0, {DeviceState.FREE: 1, DeviceState.LOST: 3}),
    ("a site without nodes", described(), 0, {DeviceState.LOST: 4}),
]


@pytest.mark.parametrize(("told", "ours", "expected"), [row[1:] for row in RIGHTS], ids=[row[0] for row in RIGHTS])
def test_so_many_rights_are_of_use_as_the_site_has_devices_for(told: Described, ours: int, expected: dict[DeviceState, int]) -> None:
    assert counted(rights.rights(profile()), told, ours=ours) == expected


def test_a_right_that_is_held_is_never_called_lost() -> None:
    pool = rights.rights(profile())
    held = {pool.devices[3].id}
    states = rights.states(pool, rights.room(pool, described(node(8, usable=False)), 1, alone=True), held)
    assert states[pool.devices[3].id] is DeviceState.FREE and list(states.values()).count(DeviceState.LOST) == 3


def test_rights_are_as_many_as_are_lent_and_named_by_their_pool() -> None:
    pool = rights.rights(profile())
    assert [device.id for device in pool.devices] == [f"lent-main-{n}" for n in range(1, 5)]
    assert {device.kind for device in pool.devices} == {DeviceKind.GPU} and pool.devices[0].model == "A100-SXM4-80GB"
    assert rights.rights(profile(accelerator="none")).devices[0].kind is DeviceKind.SLOT
    assert rights.unseen([pool]) == {device.id: DeviceState.UNKNOWN for device in pool.devices}


def test_a_load_that_is_only_looked_at_again_is_no_news() -> None:
    pool, told = rights.rights(profile()), described(node(8, busy=6))
    rooms = {pool.name: rights.room(pool, told, 0, alone=True)}
    first = rights.loads([pool], told, rooms, every_s=30, rpc_per_minute=2.0)
    assert (first[pool.name].devices_busy, first[pool.name].waiting, first[pool.name].every_s) == (6, 9, 30)
    later = rights.loads([pool], replace(told, at=T0 + timedelta(seconds=30)), rooms, every_s=30, rpc_per_minute=2.1)
    assert rights.same_but_age(first, later)
    for news in ({"waiting": 10}, {"rpc_per_minute": 4.0}, {"every_s": 300.0}):
        assert not rights.same_but_age({pool.name: msgspec.structs.replace(first[pool.name], **news)}, first), news


def test_processors_beside_our_own_cards_are_nobody_else_s_load() -> None:
    slots, cards = NativeNode("n1", True, "mixed", devices=64, busy=2, model=rights.SLOTS), node(8, busy=2)
    told = Described("c1", "22.05", T0, (slots, cards), NativeLoad(running=0, waiting=0, devices_busy=0))
    pool = rights.rights(profile(accelerator="none"))
    room = rights.room(pool, told, 0, alone=False)
    assert room.foreign == 2, "they are not to be had"
    assert rights.loads([pool], told, {pool.name: room}, every_s=30, rpc_per_minute=2.0)[pool.name].devices_busy == 0
