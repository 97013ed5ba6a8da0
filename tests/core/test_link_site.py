"""The site's side of a lane: when it speaks, what it takes, when it calls itself alone."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from tests.core.link_world import JOURNAL, NOON, SESSION, SITE, chain, raw

from intertie.contracts.link import Clocks, Go, Instruction, Lane, LaneState, Settle, Stop, Sync, Synced
from intertie.ids import AttemptId, InstructionId, JobId, JournalId
from intertie.link.journal import Batch, InstructionMark, mark_of
from intertie.link.site import (
    MOST_REOPENS,
    Effect,
    Heard,
    Load,
    Lost,
    Pace,
    Raised,
    Reopen,
    Report,
    Send,
    Silent,
    SiteMachine,
    Take,
    Trouble,
    Wake,
    pace_of,
)

PACE = Pace()


class World:
    """A machine, a clock and a journal of `head` entries; waits are never spread (they take their whole length)."""

    def __init__(self, *, head: int = 0, marks: tuple[int, int] = (0, 0), lane: Lane = Lane.SCHEDULER, pace: Pace = PACE) -> None:
        self.now_s = 100.0
        self.head = head
        self.mark = InstructionMark(0, 0)
        self.limit = 10
        self.forgotten = marks[1]
        self.travel_s = 0.01
        self.machine = SiteMachine(
            site=SITE, session=SESSION, lane=lane, journal=JOURNAL, marks=marks, now_s=self.now_s, pace=pace, spread=lambda: 1.0
        )

    def speak(self) -> Sync:
        """Wait until it is due, load and send."""
        self.now_s = max(self.now_s, self.machine.due_at)
        [load] = self.machine.tick(self.now_s)
        assert isinstance(load, Load)
        last = min(self.head, load.after + self.limit)
        batch = Batch(
            load.after + 1,
            chain(load.after)[load.after],
            [raw(seq) for seq in range(load.after + 1, last + 1)],
            last == self.head,
            forgotten=self.forgotten,
        )
        [send] = self.machine.loaded(
            self.now_s,
            batch,
            running=[AttemptId("att-1")],
            mark=self.mark,
            settings_revision=0,
            clocks=Clocks(utc=NOON, boot_s=self.now_s, kernel_boot="boot-1"),
        )
        assert isinstance(send, Send)
        return send.sync

    def hear(self, sync: Sync, **changes: object) -> list[Effect]:
        self.now_s += self.travel_s
        return self.machine.answered(self.now_s, answer(sync, **changes))

    def exchange(self) -> Sync:
        sync = self.speak()
        self.hear(sync)
        return sync

    def fail(self, after_s: float = 2.0) -> list[Effect]:
        sync = self.speak()
        self.now_s += after_s
        return self.machine.failed(self.now_s, sync.nonce)

    def waits(self) -> float:
        return round(self.machine.due_at - self.now_s, 6)


def answer(sync: Sync, **changes: object) -> Synced:
    last = sync.first_seq - 1 + len(sync.entries)
    plain = Synced(nonce=sync.nonce, ack_through=last, safe_through=last, epoch=1, clock=NOON)
    return msgspec.structs.replace(plain, **changes)


def settle(number: int, epoch: int = 1) -> Instruction:
    return Settle(id=InstructionId(f"ins-{number}"), number=number, epoch=epoch, attempt=AttemptId("att-1"))


def troubles(effects: Sequence[Effect]) -> list[Trouble | None]:
    return [effect.trouble for effect in effects if isinstance(effect, Report)]


# --- tries and answers ------------------------------------------------------------------------------------------------------------------


def test_each_try_has_a_new_nonce_and_names_the_last_answer_taken() -> None:
    world = World()
    seen = []
    for answered in (True, False, True, True):
        if answered:
            sync = world.exchange()
        else:
            sync = world.speak()
            world.machine.failed(world.now_s, sync.nonce)
        seen.append((sync.nonce, sync.taken_nonce))
    assert seen == [(1, 0), (2, 1), (3, 1), (4, 3)]


def test_only_the_answer_to_the_latest_try_is_taken_and_time_counts_from_its_own_sending() -> None:
    world = World()
    first = world.speak()
    world.now_s += 2
    world.machine.failed(world.now_s, first.nonce)
    second = world.speak()
    sent = world.now_s
    assert world.hear(first) == []
    takes = [effect for effect in world.hear(second) if isinstance(effect, Take)]
    assert [(take.exchange.nonce, take.exchange.sent_boot_s) for take in takes] == [(second.nonce, sent)]


def test_an_answer_that_arrives_twice_is_taken_once() -> None:
    world = World()
    sync = world.speak()
    assert any(isinstance(effect, Take) for effect in world.hear(sync))
    assert world.hear(sync) == []


def test_a_timeout_of_an_earlier_try_does_not_end_the_latest() -> None:
    world = World()
    first = world.speak()
    world.machine.failed(world.now_s, first.nonce)
    second = world.speak()
    assert world.machine.failed(world.now_s, first.nonce) == []
    assert any(isinstance(effect, Take) for effect in world.hear(second))


def test_one_try_is_under_way_at_a_time() -> None:
    world = World()
    world.speak()
    world.machine.wake(Wake.NUDGE, world.now_s)
    assert world.machine.tick(world.now_s + 100) == []


def test_unanswered_entries_are_sent_again() -> None:
    world = World(head=3)
    world.fail()
    again = world.speak()
    assert (again.first_seq, len(again.entries)) == (1, 3)


def test_what_runs_is_said_at_head_only() -> None:
    world = World(head=12)
    assert [world.exchange().running for _ in range(2)] == [None, ["att-1"]]


# --- pace -------------------------------------------------------------------------------------------------------------------------------


def test_batches_follow_at_once_until_the_head() -> None:
    world = World(head=25)
    waits = []
    for _ in range(3):
        world.exchange()
        waits.append(world.waits())
    assert waits == [0, 0, 5.0]


@pytest.mark.parametrize(
    ("lane", "waits"),
    [(Lane.REGISTRY, [5, 5, 5, 5, 5]), (Lane.SCHEDULER, [5, 10, 20, 30, 30]), (Lane.METERING, [5, 10, 20, 30, 30])],
)
def test_an_idle_lane_slows_down_save_the_heartbeat(lane: Lane, waits: list[float]) -> None:
    world = World(lane=lane, pace=pace_of(lane))
    found = []
    for _ in waits:
        world.exchange()
        found.append(world.waits())
    assert found == waits


def test_new_entries_speak_at_once_and_bring_the_quick_beat_back() -> None:
    world = World()
    for _ in range(4):
        world.exchange()
    world.head += 1
    world.machine.wake(Wake.ENTRIES, world.now_s)
    assert world.waits() == 0
    world.exchange()
    assert world.waits() == 5


def test_what_is_written_while_a_try_is_under_way_follows_at_once() -> None:
    world = World()
    sync = world.speak()
    world.machine.wake(Wake.ENTRIES, world.now_s)
    world.hear(sync)
    assert world.waits() == 0


def test_failed_tries_back_off_to_the_beat() -> None:
    world = World()
    found = []
    for _ in range(7):
        world.fail()
        found.append(world.waits())
    assert found == [0.25, 0.5, 1, 2, 4, 5, 5]


@pytest.mark.parametrize(("why", "hastens"), [(Wake.ENTRIES, False), (Wake.NUDGE, True), (Wake.BUS, True)])
def test_only_a_sign_of_the_bus_ends_a_back_off(why: Wake, hastens: bool) -> None:
    world = World()
    for _ in range(6):
        world.fail()
    world.machine.wake(why, world.now_s)
    assert (world.waits() < 5) == hastens


def test_a_busy_keeper_is_asked_again_soon() -> None:
    world = World(head=1)
    sync = world.speak()
    assert world.hear(sync, state=LaneState.BUSY, ack_through=0, safe_through=0) == []
    assert world.waits() == 0.05
    assert world.exchange().first_seq == 1


def test_more_instructions_are_fetched_at_once_but_repeats_wait_for_the_beat() -> None:
    world = World()
    world.mark = InstructionMark(1, 4)
    world.hear(world.speak(), instructions=[settle(5)], more=True)
    assert world.waits() == 0
    world.mark = InstructionMark(1, 5)
    world.hear(world.speak(), instructions=[settle(5)], more=True)
    assert world.waits() == 5


# --- silence ----------------------------------------------------------------------------------------------------------------------------


def test_a_site_starts_alone_and_the_first_answer_ends_it() -> None:
    world = World()
    assert world.machine.silent_since_s == 100.0
    assert Heard() in world.hear(world.speak())
    assert world.machine.silent_since_s is None


def test_silence_is_failures_in_a_row_over_ten_seconds_and_counts_from_the_last_answer() -> None:
    world = World()
    world.exchange()
    heard_at = world.now_s
    said = [world.fail(after_s=2.0) for _ in range(5)]
    assert said == [[], [], [], [], [Silent(heard_at)]]
    assert world.machine.silent_since_s == heard_at


def test_many_quick_failures_are_no_silence_yet() -> None:
    world = World()
    world.exchange()
    assert [world.fail(after_s=0.001) for _ in range(4)] == [[], [], [], []]


def test_one_slow_failure_is_no_silence() -> None:
    world = World()
    world.exchange()
    assert world.fail(after_s=60.0) == []


def test_one_answer_among_failures_does_not_end_a_silence_two_in_a_row_do() -> None:
    world = World()
    world.exchange()
    for _ in range(6):
        world.fail()
    assert world.machine.silent_since_s is not None
    assert Heard() not in world.hear(world.speak())
    assert world.waits() < 1, "the second try comes soon"
    world.fail()
    assert Heard() not in world.hear(world.speak())
    assert Heard() in world.hear(world.speak())


def test_silence_changes_nothing_but_itself() -> None:
    """BR-054: no effect of an absence names an attempt; what runs goes on."""
    world = World(head=2)
    world.exchange()
    effects = [effect for _ in range(200) for effect in world.fail()]
    assert [type(effect) for effect in effects] == [Silent]


# --- answers that are not taken ----------------------------------------------------------------------------------------------------------


REFUSED = [
    ("forked", {"state": LaneState.FORKED}, Trouble.FORKED),
    ("agent restored", {"state": LaneState.AGENT_RESTORED}, Trouble.AGENT_RESTORED),
    ("hub restored", {"state": LaneState.HUB_RESTORED}, Trouble.HUB_RESTORED),
    ("superseded", {"state": LaneState.SUPERSEDED}, Trouble.SUPERSEDED),
    ("a lower epoch", {"epoch": 2}, Trouble.EPOCH_LOWER),
    ("contested", {"state": LaneState.CONTESTED}, Trouble.CONTESTED),
    ("too new for the hub", {"state": LaneState.VERSION}, Trouble.VERSION),
    ("restored, and in a lower epoch", {"state": LaneState.HUB_RESTORED, "epoch": 2}, Trouble.EPOCH_LOWER),
    ("more acknowledged than was sent", {"ack_through": 9}, Trouble.ANSWER),
    ("less acknowledged than before", {"ack_through": 2, "safe_through": 2}, Trouble.ANSWER),
    ("safe past acknowledged", {"safe_through": 8}, Trouble.ANSWER),
    ("entries neither taken nor refused", {"ack_through": 5, "safe_through": 5}, Trouble.ANSWER),
    ("asked for what was called safe", {"state": LaneState.BEHIND, "ack_through": 3, "safe_through": 0}, Trouble.HUB_RESTORED),
    ("asked for what is being sent", {"state": LaneState.BEHIND, "ack_through": 5, "safe_through": 0}, Trouble.ANSWER),
]


@pytest.mark.parametrize(("changes", "trouble"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_nothing_of_such_an_answer_is_taken(changes: dict[str, object], trouble: Trouble) -> None:
    world = World(head=7, marks=(5, 4))
    world.mark = InstructionMark(3, 1)
    effects = world.hear(world.speak(), **{"epoch": 3, "instructions": [settle(2, epoch=4)], **changes})
    assert troubles(effects) == [trouble]
    assert not any(isinstance(effect, Take) for effect in effects)
    again = world.speak()
    assert (again.first_seq, len(again.entries), again.taken_nonce) == (6, 2, 0), "the same entries are offered again"


def test_a_trouble_is_said_once_and_its_end_once() -> None:
    world = World(head=2)
    said = []
    for state in (LaneState.FORKED, LaneState.FORKED, LaneState.OK, LaneState.OK):
        sync = world.speak()
        done = {} if state is LaneState.OK else {"ack_through": 0, "safe_through": 0}
        said.append(troubles(world.hear(sync, state=state, **done)))
    assert said == [[Trouble.FORKED], [], [None], []]


def test_a_refused_lane_is_a_silent_one_in_the_end() -> None:
    world = World()
    world.exchange()
    for _ in range(3):
        world.hear(world.speak(), state=LaneState.SUPERSEDED)
    assert world.machine.silent_since_s is not None


def test_a_keeper_that_is_behind_is_sent_everything_it_lacks() -> None:
    world = World(head=7, marks=(5, 2))
    world.hear(world.speak(), state=LaneState.BEHIND, ack_through=3, safe_through=0)
    assert world.waits() == 0
    again = world.speak()
    assert (again.first_seq, len(again.entries)) == (4, 4)
    world.hear(again)
    assert world.machine.clean


def test_a_keeper_that_asks_for_the_same_again_and_again_does_not_get_a_loop() -> None:
    world = World(head=7, marks=(5, 2))
    world.hear(world.speak(), state=LaneState.BEHIND, ack_through=3, safe_through=0)
    effects = world.hear(world.speak(), state=LaneState.BEHIND, ack_through=3, safe_through=0)
    assert troubles(effects) == [Trouble.ANSWER]
    assert world.waits() > 1


def test_a_full_disk_is_a_trouble_until_something_was_stored() -> None:
    world = World()
    said = []
    for stored in (False, False, True):
        world.hear(world.speak())
        said.append(troubles(world.machine.stored() if stored else world.machine.not_stored(world.now_s, "disk full")))
    assert said == [[Trouble.JOURNAL], [], [None]]


def test_a_journal_that_cannot_be_read_is_asked_again_at_the_beat() -> None:
    world = World()
    world.machine.tick(world.now_s)
    assert troubles(world.machine.not_loaded(world.now_s, "no")) == [Trouble.JOURNAL]
    assert world.waits() == 5
    world.exchange()


def test_clean_means_that_nothing_is_left_to_say() -> None:
    world = World(head=12)
    states = []
    world.exchange()
    states.append(world.machine.clean)
    world.exchange()
    states.append(world.machine.clean)
    world.machine.wake(Wake.ENTRIES, world.now_s)
    states.append(world.machine.clean)
    assert states == [False, True, False]


# --- epochs, stops first, new journals ----------------------------------------------------------------------------------------------------


def stop(number: int) -> Instruction:
    return Stop(
        id=InstructionId(f"ins-{number}"), number=number, epoch=1, attempt=AttemptId("att-2"), job=JobId("job-2"), generation=1, reason=""
    )


def go(number: int) -> Instruction:
    return Go(id=InstructionId(f"ins-{number}"), number=number, epoch=1, attempt=AttemptId("att-1"), job=JobId("job-1"), generation=1)


def handed(effects: Sequence[Effect]) -> list[int]:
    return [one.number for effect in effects if isinstance(effect, Take) for one in effect.exchange.synced.instructions]


def test_stops_are_handed_over_before_whatever_begins_work() -> None:
    world = World()
    assert handed(world.hear(world.speak(), instructions=[go(1), settle(2), stop(3), go(4), stop(5)])) == [3, 5, 2, 1, 4]


def test_after_a_raise_of_the_epoch_nothing_starts_until_an_answer_of_it_came_at_head_and_stops_always_pass() -> None:
    world = World(head=12)
    world.exchange()
    world.exchange()
    world.head = 25
    said = [handed(world.hear(world.speak(), epoch=2, instructions=[go(1), stop(2)])) for _ in range(3)]
    assert said == [[2], [2], [2, 1]]


def telling(epochs: tuple[int, int] = (1, 1)) -> World:
    """A lane whose site tells what it holds."""
    world = World(head=12)
    world.machine = SiteMachine(
        site=SITE,
        session=SESSION,
        lane=Lane.SCHEDULER,
        journal=JOURNAL,
        marks=(12, 12),
        now_s=world.now_s,
        pace=PACE,
        spread=lambda: 1.0,
        epochs=epochs,
        tells_held=True,
    )
    world.forgotten = 0
    return world


@pytest.mark.parametrize("state", [LaneState.OK, LaneState.BEHIND])
def test_of_a_raised_epoch_nothing_is_taken_or_known_before_what_is_held_is_journalled(state: LaneState) -> None:
    """LINK D3. The sync that first says that the epoch is known carries the list, or stands behind it."""
    world = telling()
    answer_of = {"epoch": 2, "state": state, "instructions": [go(1), stop(2)]} | ({"ack_through": 3} if state is LaneState.BEHIND else {})
    for _ in range(2):
        sync = world.speak()
        assert (sync.instruction_epoch, sync.first_seq) == (1, 13)
        assert world.hear(sync, **answer_of) == [Raised(2)]
        [report] = world.machine.not_raised(world.now_s, "the disk is full")
        assert isinstance(report, Report) and report.trouble is Trouble.JOURNAL
        world.machine.trouble = None
    assert world.hear(world.speak(), **answer_of) == [Raised(2)]
    world.head = 13  # what is held
    assert world.machine.raised(world.now_s, 2) == [] and world.waits() == 0
    sync = world.speak()
    assert (sync.instruction_epoch, len(sync.entries), sync.at_head) == (2, 1, True)
    effects = world.hear(sync, **answer_of)
    assert not [effect for effect in effects if isinstance(effect, Raised)]
    if state is LaneState.OK:
        assert handed(effects) == [2], "and nothing starts before an answer of the epoch came at head"
        assert handed(world.hear(world.speak(), **answer_of)) == [2, 1]
    else:
        assert world.speak().first_seq == 4, "what the keeper lacks, and the list behind it"


def test_a_number_of_an_old_epoch_is_not_said_as_one_of_the_new() -> None:
    """Else the keeper would take what it gave since, with lower numbers, for something that is on disk here, and never say it."""
    world = World()
    world.mark = InstructionMark(1, 7)
    sync = world.speak()
    assert (mark_of(sync), sync.instruction_epoch) == (InstructionMark(1, 7), 1)
    world.hear(sync, epoch=2)
    sync = world.speak()
    assert (sync.instruction_epoch, mark_of(sync)) == (2, InstructionMark(1, 7))
    world.mark = InstructionMark(2, 1)
    world.hear(sync, epoch=2)
    sync = world.speak()
    assert (sync.instruction_epoch, sync.mark_epoch, mark_of(sync)) == (2, None, InstructionMark(2, 1))


@pytest.mark.parametrize(("known", "said", "told"), [(0, 1, False), (1, 1, False), (0, 2, True), (1, 2, True), (5, 5, False)])
def test_a_site_tells_in_each_epoch_but_the_first(known: int, said: int, told: bool) -> None:
    world = telling((known, known))
    assert bool([e for e in world.hear(world.speak(), epoch=said) if isinstance(e, Raised)]) is told


def test_what_was_held_back_is_fetched_at_once() -> None:
    world = World()
    world.exchange()
    assert handed(world.hear(world.speak(), epoch=2, instructions=[go(1)])) == []
    assert world.waits() == 0
    assert handed(world.hear(world.speak(), epoch=2, instructions=[go(1)])) == [1]


def test_the_epochs_of_an_exchange_are_to_be_on_disk_before_it_is_acted_on() -> None:
    world = World(head=12)
    found = []
    for epoch in (1, 2, 2):
        found += [effect.exchange.epochs for effect in world.hear(world.speak(), epoch=epoch) if isinstance(effect, Take)]
    assert found == [(1, 1), (2, 2), (2, 2)]
    machine = SiteMachine(
        site=SITE, session=SESSION, lane=Lane.SCHEDULER, journal=JOURNAL, marks=(0, 0), now_s=0, pace=PACE, spread=float, epochs=(3, 2)
    )
    world.machine = machine
    assert handed(world.hear(world.speak(), epoch=3, instructions=[go(1)])) == [], "a restart does not forget that nothing may start yet"


BREAKS = [
    (LaneState.FORKED, {}, "forked", None),
    (LaneState.AGENT_RESTORED, {}, "agent_restored", None),
    (LaneState.HUB_RESTORED, {"ack_through": 3, "journal": JOURNAL}, "hub_restored", Lost(JOURNAL, 3)),
    (LaneState.HUB_RESTORED, {"ack_through": 0}, "hub_restored", Lost(None, 0)),
    (LaneState.BEHIND, {"ack_through": 2}, "hub_restored", Lost(JOURNAL, 2)),
]


@pytest.mark.parametrize(("state", "changes", "why", "lost"), BREAKS)
def test_sides_that_cannot_be_joined_get_a_new_journal(state: LaneState, changes: dict[str, object], why: str, lost: Lost | None) -> None:
    world = World(head=7, marks=(5, 4))
    effects = world.hear(world.speak(), **{"state": state, "ack_through": 0, "safe_through": 0, **changes})
    assert [effect for effect in effects if isinstance(effect, Reopen)] == [Reopen(JOURNAL, why, lost)]


@pytest.mark.parametrize("state", [LaneState.SUPERSEDED, LaneState.CONTESTED, LaneState.VERSION])
def test_a_state_that_a_person_must_end_opens_no_journal(state: LaneState) -> None:
    world = World(head=7)
    assert not any(isinstance(effect, Reopen) for effect in world.hear(world.speak(), state=state, ack_through=0, safe_through=0))


def test_after_a_new_journal_the_lane_begins_at_its_first_entry_and_an_old_answer_means_nothing() -> None:
    world = World(head=7, marks=(5, 0))
    old = world.speak()
    assert world.machine.reopened(world.now_s, JournalId("jnl-b")) == []
    assert world.waits() == 0
    assert world.hear(old) == []
    new = world.speak()
    assert (new.journal, new.first_seq, new.nonce) == ("jnl-b", 1, old.nonce + 1)


def test_a_batch_of_a_journal_that_was_replaced_meanwhile_is_not_sent() -> None:
    world = World()
    world.machine.tick(world.now_s)
    batch = Batch(1, chain(0)[0], [], True, journal=JournalId("jnl-b"))
    clocks = Clocks(utc=NOON, boot_s=world.now_s, kernel_boot="boot-1")
    assert world.machine.loaded(world.now_s, batch, running=[], mark=world.mark, settings_revision=0, clocks=clocks) == []


def test_new_journals_of_which_none_is_taken_end_with_a_person() -> None:
    world = World(head=7)
    found = []
    for n in range(MOST_REOPENS + 3):
        effects = world.hear(world.speak(), state=LaneState.FORKED, ack_through=0, safe_through=0)
        found.append(any(isinstance(effect, Reopen) for effect in effects))
        world.machine.reopened(world.now_s, JournalId(f"jnl-{n}")) if found[-1] else None
    assert found == [True] * MOST_REOPENS + [False] * 3
