"""What a keeper makes of a sync: the ladder as a table, and what it writes down."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import msgspec
import pytest
from tests.core.link_world import NOON, SITE, chain, raw, row, sync

from intertie.contracts.base import encode
from intertie.contracts.link import Lane, LaneState, Sync
from intertie.errors import Refused
from intertie.ids import JournalId, SiteName
from intertie.link.keeper import SiteRow, Verdict, check, judge, wanted_digest

OK, BEHIND, BUSY = LaneState.OK, LaneState.BEHIND, LaneState.BUSY
FORKED, SUPERSEDED = LaneState.FORKED, LaneState.SUPERSEDED
AGENT_RESTORED, HUB_RESTORED = LaneState.AGENT_RESTORED, LaneState.HUB_RESTORED
RECEIVED = NOON + timedelta(seconds=5)
OTHER = JournalId("jnl-b")


def verdict(known: SiteRow | None, said: Sync, *, epoch: int = 1, single: bool = True) -> Verdict:
    """As the shell asks: with the stored digest, if one is wanted."""
    seq = wanted_digest(known, said)
    stored = None if seq is None else chain(seq)[seq]
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
    Case("a gap that the site was told to forget", row(8), sync(11, 12, forgotten=10), HUB_RESTORED, heard=False),
    Case("an unknown site that was told to forget", None, sync(11, 12, forgotten=10), HUB_RESTORED, heard=False),
    Case("the site knows a higher epoch", row(10), sync(11, 12, epoch=2), HUB_RESTORED, heard=False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.about)
def test_a_sync_is(case: Case) -> None:
    found = verdict(case.known, case.said)
    assert (found.state, found.ack_through, tuple(entry.seq for entry in found.new)) == (case.state, case.ack, case.new)
    assert (found.row is not None) == case.heard
    assert bool(found.why) == (case.state in (FORKED, SUPERSEDED, AGENT_RESTORED, HUB_RESTORED)), "a fault says what was found"


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
        (msgspec.structs.replace(sync(), v=2), "link.version"),
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
