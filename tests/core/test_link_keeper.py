"""What a keeper makes of a sync: the ladder as a table, and what it writes down."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

import msgspec
import pytest
from tests.core.link_world import JOURNAL, NOON, SITE, chain, raw, row, sync

from intertie.contracts.base import encode
from intertie.contracts.link import LINK_VERSION, OLDEST_VERSION, JournalOpened, Lane, LaneState, PastJournal, Sync
from intertie.errors import Refused
from intertie.ids import JournalId, SiteName
from intertie.link.journal import first_digest
from intertie.link.keeper import SiteRow, Verdict, beat, check, judge, wanted_digest

OK, BEHIND, BUSY = LaneState.OK, LaneState.BEHIND, LaneState.BUSY
FORKED, SUPERSEDED = LaneState.FORKED, LaneState.SUPERSEDED
CONTESTED, VERSION = LaneState.CONTESTED, LaneState.VERSION
AGENT_RESTORED, HUB_RESTORED = LaneState.AGENT_RESTORED, LaneState.HUB_RESTORED
RECEIVED = NOON + timedelta(seconds=5)
OTHER = JournalId("jnl-b")


def verdict(known: SiteRow | None, said: Sync, *, epoch: int = 1, single: bool = True) -> Verdict:
    """As the shell asks: with the stored digest, if one is wanted."""
    seq = wanted_digest(known, said)
    stored = chain(seq)[seq] if seq is not None and known is not None and known.journal == said.journal else None
    return judge(known, stored, said, RECEIVED, epoch=epoch, single=single)


@dataclass(frozen=True)
class Case:
    about: str
    known: SiteRow | None
    said: Sync
    state: LaneState
    ack: int = 0
    new: tuple[int, ...] = ()
    heard: bool = True


CASES = [
    Case("an idle lane at head", row(10), sync(11, 10), OK, 10),
    Case("new entries", row(10), sync(11, 13), OK, 13, (11, 12, 13)),
    Case("BR-111: the answer was lost, all of it again", row(10), sync(9, 10), OK, 10),
    Case("the answer was lost, and more was written since", row(10), sync(9, 12), OK, 12, (11, 12)),
    Case("a batch of old entries proves only itself", row(10), sync(3, 5, at_head=False), OK, 5),
    Case("a site never heard of", None, sync(1, 3, taken=0), OK, 3, (1, 2, 3)),
    Case("a site never heard of, with nothing to say", None, sync(1, 0, taken=0), OK, 0),
    Case("a restarted agent on the same journal", row(10), sync(11, 11, session="ses-2", nonce=1, taken=0), OK, 11, (11,)),
    Case("a gap whose entries the site still has", row(8), sync(11, 12), BEHIND, 8),
    Case("an unknown site in the middle of its journal", None, sync(4, 6), BEHIND, 0),
    Case("an overtaken try", row(10), sync(11, 12, nonce=5), BUSY, heard=False),
    Case(
        "a try sent before one already heard, from an agent since restarted",
        row(10),
        sync(11, 12, session="ses-0", boot_s=99.0),
        BUSY,
        heard=False,
    ),
    Case("a session that another took over from", row(10), sync(11, 12, session="ses-0", kernel_boot="boot-2"), SUPERSEDED, heard=False),
    Case("the last entry has other content", row(10), sync(11, 12, other_from=10), FORKED, heard=False),
    Case("an entry in the overlap has other content", row(10), sync(9, 12, other_from=9), FORKED, heard=False),
    Case("restored to 5, islanded, written anew past what is here", row(10), sync(6, 14, other_from=6), FORKED, heard=False),
    Case("restored to 5, written anew, not yet past what is here", row(10), sync(6, 8, other_from=6), FORKED, heard=False),
    Case(
        "a chain that does not begin with its journal's id", None, msgspec.structs.replace(sync(1, 3), journal=OTHER), FORKED, heard=False
    ),
    Case("the site's journal ends before what is here", row(10), sync(6, 8), AGENT_RESTORED, heard=False),
    Case("the site's journal is empty", row(10), sync(1, 0), AGENT_RESTORED, heard=False),
    Case("another journal", row(10), sync(1, 3, journal=OTHER, session="ses-2", taken=0), AGENT_RESTORED, heard=False),
    Case("a gap that the site was told to forget", row(8), sync(11, 12, forgotten=10), HUB_RESTORED, 8, heard=False),
    Case("an unknown site that was told to forget", None, sync(11, 12, forgotten=10), HUB_RESTORED, heard=False),
    Case("the site knows a higher epoch", row(10), sync(11, 12, epoch=2), HUB_RESTORED, 10, heard=False),
    Case("an agent of a version not known yet", row(10), msgspec.structs.replace(sync(11, 12), v=LINK_VERSION + 1), VERSION, heard=False),
    Case("an agent of the oldest known version", row(10), msgspec.structs.replace(sync(11, 12), v=OLDEST_VERSION), OK, 12, (11, 12)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.about)
def test_a_sync_is(case: Case) -> None:
    found = verdict(case.known, case.said)
    assert (found.state, found.ack_through, tuple(entry.seq for entry in found.new)) == (case.state, case.ack, case.new)
    before = case.known.heard if case.known else 0
    assert ((found.row.heard if found.row else before) == before + 1) == case.heard
    assert bool(found.why) == (case.state not in (OK, BEHIND, BUSY)), "a fault says what was found"
    if found.row is not None:
        assert found.row.state is found.state, "registry and people see it in the row"


@pytest.mark.parametrize("case", [case for case in CASES if case.state is not OK], ids=lambda case: case.about)
def test_nothing_is_accepted_or_made_safe_unless_the_state_is_ok(case: Case) -> None:
    found = verdict(case.known, case.said)
    assert (found.new, found.safe_through) == ((), 0)
    if found.row is not None and case.known is not None:
        assert (found.row.ack_through, found.row.digest) == (case.known.ack_through, case.known.digest)


def test_new_entries_carry_their_exact_bytes_and_the_chain() -> None:
    found = verdict(row(10), sync(9, 12))
    digests = chain(12)
    assert [(entry.seq, entry.raw, entry.digest) for entry in found.new] == [(11, raw(11), digests[11]), (12, raw(12), digests[12])]
    assert found.row is not None
    assert found.row.digest == digests[12]


def test_bytes_are_those_of_the_message_not_of_a_copy_encoded_again() -> None:
    spaced = b'{"kind" : "said",  "seq":1}'
    wire = encode(msgspec.structs.replace(sync(1, 0, taken=0), entries=[msgspec.Raw(spaced)]))
    found = verdict(None, msgspec.json.decode(wire, type=Sync))
    assert [entry.raw for entry in found.new] == [spaced]


def test_every_recorded_sync_raises_heard_also_an_empty_one() -> None:
    for said in (sync(11, 10), sync(11, 12), sync(9, 10), sync(12, 12)):
        found = verdict(row(10, heard=7), said)
        assert found.row is not None
        assert found.row.heard == 8


def test_what_runs_is_believed_only_at_head() -> None:
    """BR-066: a replayed backlog never refreshes what is current."""
    at_head = verdict(row(10), sync(11, 12, running=["att-1"])).row
    assert at_head is not None and (at_head.at_head, at_head.running) == (True, ("att-1",))
    backlog = verdict(row(10), sync(11, 12, at_head=False)).row
    assert backlog is not None and (backlog.at_head, backlog.running) == (False, None)
    behind = verdict(row(8), sync(11, 12, running=["att-1"])).row
    assert behind is not None and (behind.at_head, behind.running) == (False, None)


def test_safe_follows_the_commit_only_where_that_is_all_the_safety_there_is() -> None:
    single = verdict(row(10, safe=10), sync(11, 12))
    assert (single.ack_through, single.safe_through) == (12, 12)
    standby = verdict(row(10, safe=7), sync(11, 12), single=False)
    assert (standby.ack_through, standby.safe_through) == (12, 7)
    repeat = verdict(row(10, safe=7), sync(3, 5, at_head=False), single=False)
    assert (repeat.ack_through, repeat.safe_through) == (5, 5)


def test_a_new_session_is_written_down_and_its_nonces_count_from_one() -> None:
    found = verdict(row(10, last_nonce=900), sync(11, 10, session="ses-2", nonce=1, taken=0))
    assert found.row is not None
    assert (found.row.session, found.row.last_nonce, found.row.taken_nonce) == ("ses-2", 1, 0)


def test_the_digest_of_an_old_entry_is_asked_for_only_if_the_batch_ends_below_what_is_here() -> None:
    assert [wanted_digest(row(10), sync(first, last)) for first, last in ((11, 10), (9, 12), (9, 10), (9, 9), (1, 0))] == [
        None,
        None,
        None,
        9,
        None,
    ]


def test_an_old_batch_whose_digest_is_not_kept_any_more_is_not_believed() -> None:
    said = sync(3, 5, at_head=False)
    assert judge(row(10), None, said, RECEIVED, epoch=1, single=True).state is AGENT_RESTORED


def test_the_keepers_estimate_of_a_clock_holds_the_true_offset() -> None:
    """BR-139: a site clock seven minutes fast, measured at each beat; nothing but the estimate depends on it."""
    fast = NOON + timedelta(seconds=5 + 420)
    found = judge(row(10, clock=(-420.0, 0.4)), None, sync(11, 10, utc=fast), RECEIVED, epoch=1, single=True).row
    assert found is not None
    assert abs(found.clock_offset_s + 420) <= found.clock_error_s <= 0.41
    stepped = judge(row(10, clock=(0.0, 0.1)), None, sync(11, 10, utc=fast), RECEIVED, epoch=1, single=True).row
    assert stepped is not None
    assert abs(stepped.clock_offset_s + 420) <= stepped.clock_error_s <= 1.0


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (msgspec.structs.replace(sync(), instruction_epoch=1 << 60), "link.epoch"),
        (msgspec.structs.replace(sync(), site=SiteName("site-b")), "link.site_mismatch"),
        (msgspec.structs.replace(sync(), lane=Lane.METERING), "link.lane_mismatch"),
        (msgspec.structs.replace(sync(), entries=[msgspec.Raw(b'"' + b"x" * 800_000 + b'"')]), "link.too_large"),
        (msgspec.structs.replace(sync(), entries=[msgspec.Raw(b"1")] * 5_000), "link.too_large"),
    ],
)
def test_what_is_no_sync_of_this_site_and_lane_is_refused(said: Sync, code: str) -> None:
    with pytest.raises(Refused) as refused:
        check(said, SITE, Lane.SCHEDULER)
    assert refused.value.code == code


def test_a_sync_of_this_site_and_lane_passes() -> None:
    check(sync(1, 3), SITE, Lane.SCHEDULER)


# --- places, sessions, journals ------------------------------------------------------------------------------------------------------------

HERE, THERE = "place-here", "place-there"


def at(place: str, said: Sync) -> Sync:
    return msgspec.structs.replace(said, place=place)


def known(place: str = HERE, **changes: object) -> SiteRow:
    return replace(row(10), place=place, **changes)  # type: ignore[arg-type]


def test_a_restart_in_the_same_place_and_boot_goes_on_with_the_session() -> None:
    """The hub was restored to a moment before the agent's last restart: nobody else is there."""
    found = verdict(known(), at(HERE, sync(11, 12, session="ses-2", taken=700)))
    assert (found.state, found.row and found.row.session) == (OK, "ses-2")


@pytest.mark.parametrize(("place", "boot"), [(THERE, "boot-1"), (HERE, "boot-2")])
def test_another_place_or_boot_takes_over_once_and_the_former_is_superseded(place: str, boot: str) -> None:
    """D8: two agents with one identity."""
    took = verdict(known(), at(place, sync(11, 12, session="ses-2", nonce=1, taken=0, kernel_boot=boot)))
    assert took.state is OK and took.row is not None
    former = verdict(took.row, at(HERE, sync(13, 12, session="ses-1", nonce=9, taken=8, boot_s=200)))
    assert (former.state, former.row) == (SUPERSEDED, None)


def test_who_speaks_first_in_a_raised_epoch_is_in_charge_and_the_next_is_superseded() -> None:
    """The hub was put back to before a takeover: its row names a session that may be gone, and nobody would restart the agent that is there."""
    back = known(epoch_told=3)
    said = at(THERE, sync(11, 12, session="ses-2", nonce=40, taken=39, kernel_boot="boot-2"))
    assert verdict(back, said, epoch=3).state is SUPERSEDED, "in the epoch that was told already nothing was put back"
    first = verdict(back, said, epoch=7)
    assert (first.state, first.row and first.row.session, first.row and len(first.row.moves)) == (OK, "ses-2", 1)
    assert verdict(known(), said, epoch=7).state is SUPERSEDED, "who never told an epoch says nothing of a restore"


def test_three_changes_of_place_in_ten_minutes_are_contested_until_ten_minutes_after_the_last() -> None:
    current, told = known(), list[LaneState]()
    for n, place in enumerate([THERE, HERE, THERE], 1):
        said = at(place, sync(11, 10, session=f"ses-{n + 1}", nonce=1, taken=0, kernel_boot=f"boot-{place}"))
        found = judge(current, None, said, NOON + timedelta(minutes=n), epoch=1, single=True)
        assert found.row is not None
        current = found.row
        told.append(found.state)
    assert told == [OK, OK, CONTESTED]
    for minutes, expected in ((4, CONTESTED), (12, CONTESTED), (14, OK)):
        said = at(THERE, sync(11, 10, session="ses-4", nonce=minutes, taken=1, kernel_boot=f"boot-{THERE}", boot_s=200.0 + minutes))
        found = judge(current, None, said, NOON + timedelta(minutes=minutes), epoch=1, single=True)
        assert found.state is expected and found.row is not None
        current = found.row


def test_while_contested_each_change_of_place_counts_so_that_one_of_the_two_must_go() -> None:
    moves = tuple(NOON + timedelta(minutes=n) for n in (1, 2, 3))
    said = at(THERE, sync(11, 10, session="ses-9", taken=5, kernel_boot="boot-2"))
    found = judge(known(moves=moves), None, said, NOON + timedelta(minutes=8), epoch=1, single=True)
    assert (found.state, found.row and found.row.moves[-1]) == (CONTESTED, NOON + timedelta(minutes=8))
    assert found.row is not None and found.row.heard == row(10).heard


def test_changes_of_place_spread_over_a_day_are_none() -> None:
    moves = (NOON - timedelta(hours=5), NOON - timedelta(hours=2))
    said = at(THERE, sync(11, 10, session="ses-9", taken=0, kernel_boot="boot-2"))
    assert judge(known(moves=moves), None, said, RECEIVED, epoch=1, single=True).state is OK


def test_an_agent_of_version_one_has_no_place_and_its_sessions_follow_the_old_rule() -> None:
    old = msgspec.structs.replace(sync(11, 12, session="ses-2", nonce=1, taken=0, kernel_boot="boot-2"), v=1)
    found = verdict(row(10), old)
    assert found.state is OK and found.row is not None and (found.row.version, found.row.moves) == (1, ())
    assert verdict(row(10), msgspec.structs.replace(old, taken_nonce=4)).state is SUPERSEDED


def test_who_cannot_be_joined_to_what_is_here_takes_nothing_over() -> None:
    found = verdict(known(), at(THERE, sync(11, 12, other_from=10, session="ses-2", taken=0)))
    assert (found.state, found.row and found.row.session, found.row and found.row.moves) == (FORKED, "ses-1", ())


def opened(*past: PastJournal, journal: JournalId = OTHER, last: int = 1, previous: str | None = JOURNAL, session: str = "ses-1") -> Sync:
    """A new journal's first batch: that it was opened, and then entries said again."""
    first = encode(
        JournalOpened(
            seq=1,
            at=NOON,
            previous=None if previous is None else JournalId(previous),
            why="forked",
            place=HERE,
            kernel_boot="boot-1",
            past=list(past),
        )
    )
    entries = [first, *(raw(seq) for seq in range(2, last + 1))]
    return msgspec.structs.replace(
        sync(1, 0, session=session),
        place=HERE,
        journal=journal,
        digest_before=first_digest(journal),
        entries=[msgspec.Raw(entry) for entry in entries],
    )


def past(journal: str = JOURNAL, through: int = 0, lost_from: int = 0) -> PastJournal:
    return PastJournal(journal=JournalId(journal), forgotten_through=through, digest=first_digest(JournalId(journal)), lost_from=lost_from)


def test_a_new_journal_that_says_so_takes_the_row_over_and_is_counted_and_interpreted_anew() -> None:
    found = verdict(known(), opened(past(through=10), last=3))
    assert (found.state, found.ack_through, [entry.seq for entry in found.new]) == (OK, 3, [1, 2, 3])
    assert found.row is not None
    assert (found.row.journal, found.row.interpreted_through, found.row.heard) == (OTHER, 0, row(10).heard + 1)


def test_a_new_journal_of_a_folder_without_a_past_is_taken() -> None:
    assert verdict(known(), opened(previous=None)).state is OK
    assert verdict(None, opened(previous=None)).state is OK


def test_a_journal_that_had_its_turn_is_not_taken_again() -> None:
    """An older copy that was started again: it must open a new one."""
    said = opened()
    assert wanted_digest(known(), said) == 1
    assert judge(known(), chain(1)[1], said, RECEIVED, epoch=1, single=True).state is AGENT_RESTORED


def test_a_new_journal_that_says_nothing_of_it_is_not_taken() -> None:
    assert verdict(known(), at(HERE, sync(1, 3, journal=OTHER))).state is AGENT_RESTORED


def test_a_new_journal_is_not_taken_from_under_entries_that_are_nowhere() -> None:
    """The hub was restored to 10, the site had been told to forget through 15, and opened a new journal for another reason."""
    found = verdict(known(), opened(past(through=15)))
    assert (found.state, found.ack_through, found.journal) == (HUB_RESTORED, 10, JOURNAL)
    assert verdict(known(), opened(past(through=15, lost_from=11))).state is OK
    clones = opened(past("jnl-a-clones", through=99))
    assert verdict(known(), clones).state is HUB_RESTORED
    held = judge(known(), None, clones, RECEIVED, epoch=1, single=True, ends={JournalId("jnl-a-clones"): 99})
    assert held.state is OK, "another line of journals, all of which is here"
    later = opened(past(through=10), past("jnl-between", through=4), journal=JournalId("jnl-c"), previous="jnl-between")
    assert verdict(known(), later).state is HUB_RESTORED, "the journal between was heard and forgotten, and is not here"


def test_a_hub_that_knows_nothing_of_a_site_says_so_until_the_loss_is_named() -> None:
    said = opened(past(through=15))
    first = verdict(None, said)
    assert (first.state, first.ack_through, first.journal, first.row and first.row.heard) == (HUB_RESTORED, 0, None, 0)
    again = verdict(first.row, msgspec.structs.replace(said, nonce=7))
    assert (again.state, again.journal) == (HUB_RESTORED, None), "also when the answer was lost"
    named = msgspec.structs.replace(opened(past(through=15, lost_from=1), journal=JournalId("jnl-c")), nonce=8)
    assert verdict(again.row, named).state is OK


def test_the_epoch_that_a_site_tells_is_kept_although_nothing_else_of_it_is_believed() -> None:
    found = verdict(known(epoch_told=3), at(HERE, sync(11, 12, epoch=7)))
    assert found.row is not None
    assert (found.state, found.row.epoch_told, found.row.heard) == (HUB_RESTORED, 7, row(10).heard)
    new = verdict(None, sync(1, 3, epoch=7))
    assert new.row is not None and new.row.epoch_told == 7


def test_a_state_says_since_when() -> None:
    first = judge(row(10), None, sync(11, 12, other_from=10), NOON + timedelta(minutes=1), epoch=1, single=True).row
    assert first is not None and first.state_since == NOON + timedelta(minutes=1)
    second = judge(first, None, sync(11, 12, other_from=10, nonce=7), NOON + timedelta(minutes=2), epoch=1, single=True).row
    assert second is not None and second.state_since == NOON + timedelta(minutes=1)
    over = judge(second, None, sync(11, 12, nonce=8), NOON + timedelta(minutes=3), epoch=1, single=True).row
    assert over is not None and (over.state, over.state_since) == (OK, NOON + timedelta(minutes=3))


# --- an idle sync by one look ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if case.known is not None], ids=lambda case: case.about)
def test_one_look_at_an_idle_sync_never_says_more_than_the_ladder(case: Case) -> None:
    assert case.known is not None
    after = beat(case.known, case.said, RECEIVED, epoch=1, single=True)
    said = verdict(case.known, case.said)
    assert after is None or (said.state, said.row, list(said.new), said.ack_through) == (OK, after, [], after.ack_through)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("running", [None, [], ["att-1"]])
def test_one_look_is_enough_for_an_idle_lane_at_head(single: bool, running: list[str] | None) -> None:
    said = msgspec.structs.replace(sync(11, 10), running=running)
    after = beat(row(10), said, RECEIVED, epoch=1, single=single)
    assert after is not None
    assert after == verdict(row(10), said, single=single).row


@pytest.mark.parametrize(
    "known",
    [
        replace(row(10), state=CONTESTED),
        replace(row(10), heard=0),
        replace(row(10), moves=(NOON, NOON, NOON)),
        replace(row(10), place="elsewhere"),
    ],
    ids=["a lane that stands still", "a site of which nothing was believed", "two agents that take turns", "another place"],
)
def test_one_look_is_not_enough_for(known: SiteRow) -> None:
    assert beat(known, sync(11, 10), RECEIVED, epoch=1, single=True) is None
