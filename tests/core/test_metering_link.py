"""Money over a broken link: who pays what was replaced or lost, what a period lacks, what was used beyond an islanded allowance."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.metering_world import (
    SCHEDULER_KEY,
    SITE,
    T0,
    TENANT,
    TRUST,
    at,
    come,
    ended,
    record,
    sealed,
    segment,
    site_key,
    snapshot,
    spec,
    verify,
)

from intertie.contracts.base import encode
from intertie.contracts.job import AttemptRecord, Cause
from intertie.contracts.link import IslandedGrant, LostRange
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import MeterSpec, PeriodCount, Price, Segment, SitePeriod, WhoPays
from intertie.errors import Refused
from intertie.ids import AttemptId, DeviceId, JournalId, SiteName, TenantName, digest
from intertie.metering.core.attribution import DECIDABLE, RESOLVABLE, Reason, judge
from intertie.metering.core.closing import Held, in_force, lost_entries, period_told, prove_again, standing
from intertie.metering.core.evidence import Decision, Evidence, Received, SiteKeys
from intertie.metering.core.grants import Use, beyond, uses
from intertie.metering.core.ledger import EntryKind, held
from intertie.metering.core.payer import because
from intertie.metering.core.reckon import Reckoning, book_of, reckon, whose
from intertie.rating import rate, rate_period

KEYS = {SITE: SiteKeys(frozenset({site_key(SITE)}))}
OTHER = AttemptId("att-2")
RUN = segment(record(), 0, 6)


def reckoned(items: list[Received], known: AttemptRecord, **changes: Any) -> Reckoning:
    numbered = [replace(item, number=n) for n, item in enumerate(items, 1)]
    standard = Evidence(known.attempt, 1, snapshot(known), numbered, specs=[spec()], keys=KEYS)
    return reckon(replace(standard, **changes), TRUST, T0, "test")


# --- one payer per result ------------------------------------------------------------------------------------------------------------------

PLATFORM, TENANT_PAYS, SITE_PAYS, NOBODY = WhoPays.PLATFORM, WhoPays.TENANT, WhoPays.SITE, WhoPays.NOBODY
PAYERS: list[tuple[str, str, str | None, Cause | None, bool, WhoPays]] = [
    # what, state, outcome, cause, replaced, payer
    ("it runs and is heard", "running", None, None, False, TENANT_PAYS),
    ("it may run on and was replaced", "running", None, None, True, PLATFORM),
    ("its supervisor stopped it", "ended", "cancelled", Cause.PLATFORM, True, PLATFORM),
    ("its tenant cancelled it after it was replaced", "ended", "cancelled", Cause.CANCELLED, True, PLATFORM),
    ("it failed by itself after it was replaced", "ended", "failed", Cause.JOB, True, PLATFORM),
    ("nobody knows how it ended after it was replaced", "ended", "unknown", Cause.UNKNOWN, True, PLATFORM),
    ("its site failed after it was replaced", "ended", "failed", Cause.SITE, True, SITE_PAYS),
    ("it succeeded after all and is the result", "ended", "succeeded", None, True, TENANT_PAYS),
    ("it succeeded and another is the result", "ended", "replaced", Cause.PLATFORM, True, PLATFORM),
    ("it replaced one that was the result after all, and was stopped", "ended", "cancelled", Cause.PLATFORM, True, PLATFORM),
    ("it replaced another and is the result", "ended", "succeeded", None, False, TENANT_PAYS),
    ("it replaced another and failed by itself", "ended", "failed", Cause.JOB, False, TENANT_PAYS),
    ("it was closed at the promised date", "lost", None, None, False, NOBODY),
    ("it was closed with an unknown cause", "lost", "unknown", Cause.UNKNOWN, False, NOBODY),
    ("it was replaced, and closed as lost", "lost", None, None, True, PLATFORM),
]


@pytest.mark.parametrize(("what", "state", "outcome", "cause", "replaced", "payer"), PAYERS, ids=[row[0] for row in PAYERS])
def test_br_053_one_payer_per_result_of_a_job(
    what: str, state: str, outcome: str | None, cause: Cause | None, replaced: bool, payer: WhoPays
) -> None:
    known = record(state=state, outcome=outcome, cause=cause, replaced_by=OTHER if replaced else None)
    result = reckoned([come(RUN)], known)
    assert result.rated is not None and (result.rated.payer, result.amount) == (payer, Decimal("0.0100")), what


RACES = [
    # the original's end, its replacement's end: exactly one of them is the tenant's
    (("cancelled", Cause.PLATFORM), ("succeeded", None)),
    (("cancelled", Cause.PLATFORM), ("failed", Cause.JOB)),
    (("succeeded", None), ("cancelled", Cause.PLATFORM)),
    (("replaced", Cause.PLATFORM), ("succeeded", None)),
    (("failed", Cause.JOB), ("succeeded", None)),
    (("unknown", Cause.UNKNOWN), ("succeeded", None)),
]


@pytest.mark.parametrize(("first", "second"), RACES)
def test_of_an_original_and_its_replacement_the_tenant_pays_exactly_one(first: Any, second: Any) -> None:
    original = record(1, state="ended", outcome=first[0], cause=first[1], replaced_by=OTHER)
    lost_the_race = original.attempt if first[0] == "succeeded" else None
    again = record(2, job=original.job, state="ended", outcome=second[0], cause=second[1], replaced_by=lost_the_race)
    results = [reckoned([come(segment(one, 0, 6))], one) for one in (original, again)]
    payers = [result.rated.payer for result in results if result.rated is not None]
    assert sorted(payers) == [PLATFORM, TENANT_PAYS]


def test_a_line_names_the_attempt_that_took_its_place() -> None:
    known = record(state="ended", outcome="cancelled", cause=Cause.PLATFORM, replaced_by=OTHER)
    book = book_of(reckoned([come(RUN)], known))
    assert (book.because, book.other_attempt, book.state) == ("replaced", OTHER, "ended")
    assert because(record()) == ""


# --- lost, and refined once -------------------------------------------------------------------------------------------------------------------

BALANCES = {("held/lab", "CNY"): Decimal("6.0000"), ("holds", "CNY"): Decimal("-6.0000")}
LOST = record(state="lost", started_at=T0, ended_at=at(86_400), version=3)


def test_what_is_closed_as_lost_holds_nothing_and_costs_nobody() -> None:
    result = reckoned([come(RUN)], LOST, balances=BALANCES)
    assert result.closed and not result.state.complete and result.settled is None
    assert [entry.kind for entry in result.entries] == [EntryKind.POST, EntryKind.RELEASE]
    assert {leg.account for leg in result.entries[0].legs} == {"suspense/lab", "usage/platform"}
    assert book_of(result).because == "lost"
    assert result.state.missing.startswith("closed as lost on ")


def test_late_evidence_of_a_lost_attempt_is_an_adjustment_that_cites_what_it_adjusts() -> None:
    balances = {("suspense/lab", "CNY"): Decimal("0.0100"), ("usage/platform", "CNY"): Decimal("-0.0100")}
    refined = msgspec.structs.replace(ended(LOST, [RUN]), refined=True)
    result = reckoned([come(RUN)], refined, balances=balances, closed=True, last_entry=7)
    (entry,) = result.entries
    assert (entry.kind, entry.cites) == (EntryKind.ADJUST, 7)
    assert [(leg.account, leg.amount) for leg in entry.legs] == [("suspense/lab", Decimal("-0.0100")), ("tenant/lab", Decimal("0.0100"))]
    assert result.state.complete and result.settled is not None and held(balances) == 0


def test_a_refined_attempt_whose_segments_are_still_on_their_way_holds_nothing_again() -> None:
    refined = msgspec.structs.replace(ended(LOST, [RUN]), refined=True)
    result = reckoned([], refined, closed=True, last_entry=7)
    assert result.closed and not result.state.complete and result.hold == 0 and not result.entries


# --- borders and numbers ----------------------------------------------------------------------------------------------------------------------


def test_an_ending_s_counts_include_the_segments_that_were_cut_at_a_border() -> None:
    known = record()
    cut = [segment(known, 0, 6, cause="period"), segment(known, 6, 9, cause="period"), segment(known, 9, 11, cause="ended", last=True)]
    done = ended(known, cut)
    result = reckoned([come(one, n) for n, one in enumerate(cut, 1)], done)
    assert result.state.complete and result.amount == rate([segment(known, 0, 11)], spec(), "succeeded", None, whose(done)).amount
    assert not reckoned([come(cut[2])], done).state.complete


def test_a_new_journal_s_numbers_are_not_compared_with_the_old_one_s() -> None:
    """One segment, told as the first of the old journal and said again as the second of the new one, after `JournalOpened`."""
    done = ended(record(), [RUN], last=1)
    again = come(RUN, 2, journal="jnl-2")
    assert not reckoned([again], done).state.complete
    assert reckoned([again], done, renumbered=frozenset({"jnl-2"})).state.complete


def test_use_that_a_lost_journal_told_and_its_folder_tells_again_counts_once() -> None:
    """An agent that finds it in a job folder does not know how its site stood then. The ending counts by the new journal."""
    anchor = msgspec.structs.replace(RUN.anchor, offset_s=RUN.anchor.offset_s + 1, error_s=0.5)
    first, again = come(RUN, 9), come(msgspec.structs.replace(RUN, islanded=True, anchor=anchor), 2, journal="jnl-2")
    assert first.digest != again.digest
    result = reckoned([first, again], ended(record(), [RUN], last=2), renumbered=frozenset({"jnl-2"}))
    assert [item.suspense for item in result.received] == ["", Reason.SAID_AGAIN]
    assert result.state.complete and book_of(result).in_suspense == 0 and result.amount == reckoned([first], record()).amount
    longer = come(msgspec.structs.replace(again.segment, end=RUN.end + timedelta(seconds=1)), 2, journal="jnl-2")
    assert [item.suspense for item in reckoned([first, longer], record()).received] == ["", Reason.CONFLICT]


MOMENTS = st.integers(min_value=0, max_value=10**11)


@given(
    length=st.integers(min_value=1, max_value=10**11),
    borders=st.lists(MOMENTS, max_size=12),
    price=st.integers(min_value=0, max_value=10**7),
    minimum=st.sampled_from([0, 1, 60_000_000, 3_600_000_000]),
    step=st.sampled_from(["0.01", "0.0001", "0.05", "1"]),
)
def test_however_many_borders_cut_an_attempt_its_periods_add_up_to_the_whole(
    length: int, borders: list[int], price: int, minimum: int, step: str
) -> None:
    """LINK D15: cut at the borders, and rated by the same borders, with rounding and minimum."""
    known = record()
    agreement: MeterSpec = spec(
        rounding=Decimal(step), minimum_us=minimum, prices=[Price(kind=DeviceKind.SLOT, per_hour=Decimal(price) / 1000)]
    )
    inside = sorted({border for border in borders if 0 < border < length})
    bounds = [0, *inside, length]
    cuts = [segment(known, a / 1e6, b / 1e6) for a, b in zip(bounds, bounds[1:], strict=False)]
    exact = [
        msgspec.structs.replace(one, start=T0 + timedelta(microseconds=a), end=T0 + timedelta(microseconds=b))
        for one, (a, b) in zip(cuts, zip(bounds, bounds[1:], strict=False), strict=True)
    ]
    uncut = [msgspec.structs.replace(exact[0], end=exact[-1].end)]
    whole = rate(uncut, agreement, "succeeded", None, whose(known))
    edges: list[datetime | None] = [None, *(T0 + timedelta(microseconds=border) for border in inside), None]
    parts = [rate_period(exact, agreement, "succeeded", None, whose(known), a, b) for a, b in zip(edges, edges[1:], strict=False)]
    assert sum((part.amount for part in parts), Decimal(0)) == whole.amount
    assert sum(len(part.charges) > 0 for part in parts) == len(parts)


# --- a site's word on a period -----------------------------------------------------------------------------------------------------------------

START, END = datetime(2026, 12, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)


def said(segments: int, /, *, site: SiteName = SITE, quantity: int = 6, key: str = "", **changes: Any) -> Any:
    count = PeriodCount(site=site, period="2026-12", start=START, end=END, attempts=1, segments=segments, quantity_milli_us=quantity)
    return sealed(encode(msgspec.structs.replace(count, **changes)), key or site_key(SITE))


@pytest.mark.parametrize(
    ("told", "held_here", "state", "missing"),
    [
        (2, Held(1, 2, 6), "complete", 0),
        (0, Held(1, 2, 6), "differs", 0),
        (5, Held(1, 2, 6), "missing", 3),
        (2, Held(1, 2, 7), "differs", 0),
        (2, Held(2, 2, 6), "differs", 0),
        (None, Held(1, 2, 6), "not_said", 0),
    ],
)
def test_a_site_s_count_is_compared_with_what_is_here(told: int | None, held_here: Held, state: str, missing: int) -> None:
    word = period_told(SITE, said(told), T0) if told is not None else None
    assert standing(SITE, "2026-12", word, held_here, at(5)) == SitePeriod(
        site=SITE, period="2026-12", state=state, missing_segments=missing, said_at=T0 if word else None, last_heard=at(5)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"site": SiteName("site-b")},
        {"period": "2026-12\n"},
        {"period": "winter"},
        {"end": START},
        # Months that are none, have not begun, or lie under another's name: each would be one more period to count for ever.
        {"period": "2026-13"},
        {"period": "2026-11"},
        {"start": START + timedelta(minutes=1)},
        {"end": END + timedelta(days=3_650)},
        {"period": "2999-01", "start": START.replace(year=2999, month=1), "end": START.replace(year=2999, month=2)},
        {"start": START.replace(year=2027, month=1), "end": START.replace(year=2027, month=2), "period": "2027-01"},
        {"start": "0001-01-01T00:00:00+23:59"},
        {"end": "9999-12-31T23:59:59-23:59"},
        {"segments": 10**30},
        {"attempts": 10**30},
        {"quantity_milli_us": 10**40},
    ],
)
def test_a_word_that_is_none_goes_to_quarantine(changes: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        period_told(SITE, said(1, **changes), T0)


def test_only_a_proven_word_on_exactly_this_period_counts_and_the_last_of_them() -> None:
    first, second = (replace(period_told(SITE, said(n), T0), number=n) for n in (1, 2))
    forged = replace(period_told(SITE, said(3, key="U-nobody"), T0), number=3)
    proven = prove_again([first, second, forged], KEYS[SITE], verify)
    assert [word.count.segments for word in proven] == [1, 2]
    assert in_force([first, second, forged], SITE, START, END) is None
    assert in_force([*proven, forged], SITE, START, END) == proven[1]
    assert in_force(proven, SITE, START, END + timedelta(hours=1)) is None


def lost(first: int, last: int, key: str = "", **changes: Any) -> LostRange:
    facts = {"journal": "jnl-1", "lane": "metering", "first": first, "last": last, "digest_last": digest(b"x"), **changes}
    seal = sealed(encode(facts), key or site_key(SITE))
    return LostRange(seq=1, at=T0, journal=JournalId("jnl-1"), first=first, last=last, digest_last=digest(b"x"), sealed=seal)


@pytest.mark.parametrize(
    ("said_lost", "proven"),
    [(lost(3, 9), True), (lost(3, 9, "U-nobody"), False), (lost(3, 9, digest_last="sha256:other"), False), (lost(3, 9, lane="x"), False)],
)
def test_a_lost_range_is_kept_whatever_its_seal_is_worth_and_says_what_it_is_worth(said_lost: LostRange, proven: bool) -> None:
    told = lost_entries(SITE, said_lost, KEYS[SITE], verify, T0).told
    assert (told.entries, told.proven) == (7, proven)


@pytest.mark.parametrize(("first", "last"), [(9, 3), (1, 10**30)])
def test_a_range_that_is_none_is_refused(first: int, last: int) -> None:
    with pytest.raises(Refused):
        lost_entries(SITE, lost(first, last), KEYS[SITE], verify, T0)


# --- islanded allowances -----------------------------------------------------------------------------------------------------------------------


def grant(**changes: Any) -> IslandedGrant:
    standard = IslandedGrant(
        grant="site-a/lab/slot/1",
        tenant=TENANT,
        site=SITE,
        kind=DeviceKind.SLOT,
        devices=1,
        valid_until=at(10_000),
        spec=spec().spec,
        spec_revision=1,
    )
    return msgspec.structs.replace(standard, **changes)


TAKEN_IN = record(spec=None, spec_revision=0, offered_at=at(7 * 86_400), islanded_submit=True, state="running")


def granted(start: float, end: float, of: AttemptRecord = TAKEN_IN, key: str = SCHEDULER_KEY, **changes: Any) -> Segment:
    attribution = sealed(encode(grant(**changes)), key)
    return segment(of, start, end, islanded=True, attribution=attribution)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (granted(0, 6), ""),
        (granted(0, 6, tenant=TenantName("rich")), Reason.RECORD_MISMATCH),
        (granted(0, 6, site=SiteName("site-b")), Reason.ATTRIBUTION_MISMATCH),
        (granted(0, 6, kind=DeviceKind.GPU), Reason.ATTRIBUTION_MISMATCH),
        (granted(0, 6, key=site_key(SITE)), Reason.ATTRIBUTION_BAD_SEAL),
        # Beyond its days, or its devices: recorded.
        (granted(0, 6, valid_until=at(-1)), ""),
        (granted(0, 6, devices=0), ""),
    ],
)
def test_a_grant_is_an_attribution_for_its_tenant_site_and_kind_only(what: Segment, reason: str) -> None:
    (judged,) = judge([come(what)], snapshot(TAKEN_IN), KEYS, TRUST.scheduler_keys, verify)
    assert judged.suspense == reason


def test_an_allowance_says_nothing_of_what_the_hub_itself_offered() -> None:
    """By an old one a site would choose another agreement for it, and any beginning."""
    offered = record()
    (judged,) = judge([come(granted(-5 * 86_400, -5 * 86_400 + 6, of=offered))], snapshot(offered), KEYS, TRUST.scheduler_keys, verify)
    assert judged.suspense == Reason.RECORD_MISMATCH


def test_islanded_work_is_priced_by_the_agreement_that_its_allowance_names() -> None:
    dearer = spec(revision=2, prices=[Price(kind=DeviceKind.SLOT, per_hour=Decimal(60))])
    result = reckoned([come(granted(0, 6))], TAKEN_IN, specs=[spec(), dearer])
    assert (result.priced_by, result.amount) == ((spec().spec, 1), Decimal("0.0100"))
    book = book_of(result)
    assert (book.grant, book.grant_expired) == ("site-a/lab/slot/1", False)
    assert book_of(reckoned([come(granted(0, 6, valid_until=at(5)))], TAKEN_IN)).grant_expired


def use(start: float, end: float, *, arrived: float = 50_000, of: IslandedGrant | None = None, milli: int = 1_000) -> Use:
    return Use(SITE, DeviceKind.SLOT, at(start), at(end), milli, at(arrived), of)


SECOND = 1_000_000 * 1_000


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ([use(0, 10, of=grant())], []),
        # Two at once where one is allowed; the hub's own attempt of this tenant counts, too.
        ([use(0, 10, of=grant()), use(4, 6, of=grant())], [("devices", 2 * SECOND)]),
        ([use(0, 10, of=grant()), use(4, 20)], [("devices", 6 * SECOND)]),
        ([use(0, 10)], []),
        # More in all, absence by absence: what had arrived before the second began was said over a link that worked.
        ([use(0, 10, of=grant(quantity_milli_us=4 * SECOND))], [("quantity", 6 * SECOND)]),
        ([use(n * 100, n * 100 + 4, arrived=n * 100 + 50, of=grant(quantity_milli_us=4 * SECOND)) for n in range(3)], []),
        ([use(n * 100, n * 100 + 4, of=grant(quantity_milli_us=4 * SECOND)) for n in range(3)], [("quantity", 8 * SECOND)]),
        ([use(0, 10, of=grant(valid_until=at(7)))], [("expired", 3 * SECOND)]),
    ],
)
def test_what_was_used_beyond_an_allowance_is_listed(told: list[Use], found: list[tuple[str, int]]) -> None:
    assert [(one.why, one.beyond_milli_us) for one in beyond(told)] == found


def test_only_what_counts_and_ran_in_the_period_is_use() -> None:
    judged = judge(
        [come(granted(0, 6)), come(granted(6, 9, tenant=TenantName("rich")))], snapshot(TAKEN_IN), KEYS, TRUST.scheduler_keys, verify
    )
    assert [(one.start, one.end) for one in uses(judged, at(2), at(100))] == [(at(2), at(6))]


# --- what a person decides ---------------------------------------------------------------------------------------------------------------------


def decided(item: Received, reason: str) -> Received:
    return replace(item, decisions=(Decision(reason, "ann", "looked at", T0),))


OVER = segment(record(), 0, 3_600 * 2)
EARLY = segment(record(), -2 * 86_400, -2 * 86_400 + 6)


@pytest.mark.parametrize(("what", "reason"), [(OVER, Reason.OVER_WALL), (EARLY, Reason.IMPOSSIBLE_TIMES)])
def test_a_person_lifts_the_rule_that_was_decided_and_no_other(what: Segment, reason: Reason) -> None:
    def judged(item: Received) -> str:
        (one,) = judge([item], snapshot(record()), KEYS, TRUST.scheduler_keys, verify)
        return one.suspense

    assert judged(come(what)) == reason
    assert judged(decided(come(what), reason)) == ""
    assert judged(decided(come(what), Reason.CONFLICT)) == reason
    assert judged(decided(come(msgspec.structs.replace(what, devices=[DeviceId("slot-9")])), reason)) == Reason.OTHER_DEVICES


def test_br_085_a_second_content_supersedes_the_first_by_a_person_s_decision_and_both_stay() -> None:
    longer = decided(come(segment(record(), 0, 9, id=RUN.id), 2), Reason.CONFLICT)
    first, second = judge([come(RUN), longer], snapshot(record()), KEYS, TRUST.scheduler_keys, verify)
    assert (first.suspense, second.suspense) == (Reason.SUPERSEDED, "")
    result = reckoned([come(RUN), longer], record(state="running"))
    assert result.amount == Decimal("0.0150") and book_of(result).in_suspense == 0


def test_a_person_decides_only_what_is_proven_and_no_news_can_lift() -> None:
    assert not DECIDABLE & RESOLVABLE
    assert frozenset({Reason.CONFLICT, Reason.IMPOSSIBLE_TIMES, Reason.OVER_WALL}) == DECIDABLE
