"""Metering's rules: what may be believed, when an attempt is complete, what the ledger writes, where a month ends."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from tests.core.metering_world import (
    OTHER_SITE,
    SCHEDULER_KEY,
    SITE,
    SPEC,
    T0,
    TRUST,
    at,
    attribution,
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
from intertie.contracts.job import AttemptRecord, AttemptSnapshot, Cause
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import AgreeSpec, Price, Segment, UsagePhase, WhoPays
from intertie.errors import Conflict, Refused
from intertie.ids import AttemptId, DeviceId, JobId, PoolName, SpecId, TenantName
from intertie.metering.core.agreements import in_force, next_revision
from intertie.metering.core.attribution import RESOLVABLE, TEXTS, Reason, judge
from intertie.metering.core.evidence import Evidence, Received, Settled, SiteKeys
from intertie.metering.core.ledger import Entry, EntryKind, Leg, difference, held, posted
from intertie.metering.core.periods import bounds, period_of
from intertie.metering.core.reckon import Reckoning, change, reckon

KEYS = {SITE: SiteKeys(frozenset({site_key(SITE)})), OTHER_SITE: SiteKeys(frozenset({site_key(OTHER_SITE)}))}
RECORD = record()
GOOD = segment(RECORD, 0, 6)


def told(known: AttemptRecord | None) -> AttemptSnapshot | None:
    return snapshot(known) if known else None


def changed(**changes: Any) -> Segment:
    return msgspec.structs.replace(GOOD, **changes)


def attributed(**changes: Any) -> Segment:
    return msgspec.structs.replace(GOOD, attribution=sealed(encode(attribution(RECORD, **changes)), SCHEDULER_KEY))


# --- attribution -------------------------------------------------------------------------------------------------------------------------

LADDER: list[tuple[Reason | str, Received, AttemptRecord | None, Any]] = [
    (Reason.OTHER_SITE, come(GOOD, lane=OTHER_SITE), RECORD, KEYS),
    (Reason.SITE_KEY_UNKNOWN, come(GOOD), RECORD, {}),
    (Reason.BAD_SEAL, come(GOOD, key=site_key(OTHER_SITE)), RECORD, KEYS),
    (Reason.BAD_SEAL, come(GOOD), RECORD, {SITE: SiteKeys(revoked=frozenset({site_key(SITE)}))}),
    (Reason.NO_ATTRIBUTION, come(msgspec.structs.replace(GOOD, attribution=None)), RECORD, KEYS),
    (
        Reason.ATTRIBUTION_BAD_SEAL,
        come(msgspec.structs.replace(GOOD, attribution=sealed(encode(attribution(RECORD)), site_key(SITE)))),
        RECORD,
        KEYS,
    ),
    (
        Reason.ATTRIBUTION_MISMATCH,
        come(msgspec.structs.replace(GOOD, attribution=sealed(b'{"no":"attribution"}', SCHEDULER_KEY))),
        RECORD,
        KEYS,
    ),
    (Reason.ATTRIBUTION_MISMATCH, come(attributed(attempt=AttemptId("att-9"))), RECORD, KEYS),
    (Reason.ATTRIBUTION_MISMATCH, come(attributed(site=OTHER_SITE)), RECORD, KEYS),
    (Reason.ATTRIBUTION_MISMATCH, come(attributed(pool=PoolName("big"))), RECORD, KEYS),
    (Reason.ATTEMPT_UNKNOWN, come(GOOD), None, KEYS),
    (Reason.RECORD_MISMATCH, come(attributed(tenant=TenantName("rich"))), RECORD, KEYS),
    (Reason.RECORD_MISMATCH, come(attributed(job=JobId("job-9"))), RECORD, KEYS),
    (Reason.RECORD_MISMATCH, come(attributed(spec_revision=2)), RECORD, KEYS),
    (Reason.RECORD_MISMATCH, come(attributed(spec=None)), RECORD, KEYS),
    (Reason.NEVER_RAN, come(GOOD), record(state="withdrawn"), KEYS),
    (Reason.NEVER_RAN, come(GOOD), record(state="not_started"), KEYS),
    # A genuine key claims more than the attempt was given.
    (Reason.OTHER_DEVICES, come(changed(devices=[DeviceId("slot-1")])), RECORD, KEYS),
    (Reason.OTHER_DEVICES, come(changed(devices=[DeviceId("slot-0"), DeviceId("slot-1")], quantity_milli=2_000)), RECORD, KEYS),
    (Reason.OTHER_DEVICES, come(changed(devices=[DeviceId("slot-0"), DeviceId("slot-0")], quantity_milli=2_000)), RECORD, KEYS),
    (Reason.OTHER_DEVICES, come(changed(devices=[])), RECORD, KEYS),
    (Reason.OTHER_DEVICES, come(changed(quantity_milli=1_001)), RECORD, KEYS),
    (Reason.OTHER_DEVICES, come(changed(quantity_milli=10**30)), RECORD, KEYS),
    (Reason.OTHER_DEVICES, come(changed(kind=DeviceKind.GPU, model="H200")), RECORD, KEYS),
    (Reason.IMPOSSIBLE_TIMES, come(changed(start=datetime(1970, 1, 1, tzinfo=UTC))), RECORD, KEYS),
    (Reason.IMPOSSIBLE_TIMES, come(changed(start=at(-86_401), end=at(-86_400))), RECORD, KEYS),
    (Reason.IMPOSSIBLE_TIMES, come(changed(end=datetime(2100, 1, 1, tzinfo=UTC))), RECORD, KEYS),
    (Reason.IMPOSSIBLE_TIMES, come(changed(start=datetime.min.replace(tzinfo=UTC), end=datetime.max.replace(tzinfo=UTC))), RECORD, KEYS),
    (Reason.IMPOSSIBLE_TIMES, come(changed(start=at(6), end=at(0))), RECORD, KEYS),
    (Reason.OVER_WALL, come(changed(end=at(3_600 + 360 + 600.001))), RECORD, KEYS),
    # The devices were held, by no clock that has a wall limit.
    ("", come(changed(phase=UsagePhase.SUSPENDED, end=at(20_000))), RECORD, KEYS),
    ("", come(changed(quantity_milli=500)), RECORD, KEYS),
    ("", come(changed(start=at(-86_400), end=at(-86_390))), RECORD, KEYS),
    ("", come(changed(end=at(3_600 + 360 + 600))), RECORD, KEYS),
    ("", come(GOOD), RECORD, KEYS),
    ("", come(GOOD), record(state="ended"), KEYS),
]


@pytest.mark.parametrize(("reason", "item", "known", "keys"), LADDER, ids=[f"{n}-{row[0] or 'counts'}" for n, row in enumerate(LADDER)])
def test_a_segment_counts_only_when_every_word_of_it_is_proven(
    reason: Reason | str, item: Received, known: AttemptRecord | None, keys: Any
) -> None:
    (judged,) = judge([item], told(known), keys, TRUST.scheduler_keys, verify)
    assert judged.suspense == reason


def test_the_ladder_s_table_follows_the_ladder_s_order() -> None:
    told = [row[0] for row in LADDER if row[0]]
    assert told == sorted(told, key=lambda reason: list(Reason).index(Reason(reason)))
    assert set(TEXTS) == set(Reason) and set(Reason) > RESOLVABLE


def test_another_content_under_the_same_id_waits_and_the_first_stays() -> None:
    """BR-085 asks that a corrected record supersede; here a correction is a new entry citing the old, so the second waits for a person."""
    longer = segment(RECORD, 0, 9, id=GOOD.id)
    first, second = judge([come(GOOD), come(longer, 2)], told(RECORD), KEYS, TRUST.scheduler_keys, verify)
    assert (first.suspense, second.suspense) == ("", Reason.CONFLICT)


def test_a_hostile_site_cannot_occupy_another_s_segment_id() -> None:
    hostile = come(msgspec.structs.replace(GOOD, quantity_milli=9), lane=OTHER_SITE, key=site_key(OTHER_SITE))
    judged = judge([hostile, come(GOOD)], told(RECORD), KEYS, TRUST.scheduler_keys, verify)
    assert [item.suspense for item in judged] == [Reason.OTHER_SITE, ""]


def test_what_was_proven_once_stays_proven_when_its_key_is_revoked() -> None:
    (judged,) = judge([come(GOOD)], told(RECORD), KEYS, TRUST.scheduler_keys, verify)
    revoked = {SITE: SiteKeys(revoked=frozenset({site_key(SITE)}))}
    (again,) = judge([judged], told(RECORD), revoked, TRUST.scheduler_keys, verify)
    assert judged.proven and again.suspense == ""


def test_a_run_in_many_parts_passes_its_wall_limit_as_a_whole_and_a_repeat_adds_nothing() -> None:
    """The wall limit is an hour here; what was believed before stays, and the part beyond waits for a person."""
    parts = [segment(RECORD, start, start + 1_000) for start in (3_000, 0, 2_000, 1_000, 4_000)]
    again = segment(RECORD, 500, 3_500)
    judged = judge([come(part, n) for n, part in enumerate([*parts, again], 1)], told(RECORD), KEYS, TRUST.scheduler_keys, verify)
    assert [item.suspense for item in judged] == ["", "", "", "", Reason.OVER_WALL, ""]


def test_what_is_held_without_an_agreement_of_its_own_stays_when_another_is_agreed() -> None:
    uncited = record(spec=None, spec_revision=0)
    first = reckoned([], uncited)
    balances = {(leg.account, leg.currency): leg.amount for entry in first.entries for leg in entry.legs}
    dearer = spec(revision=2, prices=[Price(kind=DeviceKind.SLOT, per_hour=Decimal(60))])
    later = reckoned([], uncited, balances=balances, specs=[spec(), dearer])
    assert (first.hold, later.hold, later.entries) == (Decimal("6.0000"), Decimal("6.0000"), [])


# --- completeness ------------------------------------------------------------------------------------------------------------------------

FIRST, SECOND = segment(RECORD, 0, 6), segment(RECORD, 6, 9)
ENDED = ended(RECORD, [FIRST, SECOND])


def evidence(items: list[Received], known: AttemptRecord | None = ENDED, **changes: Any) -> Evidence:
    numbered = [replace(item, number=n) for n, item in enumerate(items, 1)]
    standard = Evidence(RECORD.attempt, 1, snapshot(known) if known else None, numbered, specs=[spec()], keys=KEYS)
    return replace(standard, **changes)


def reckoned(items: list[Received], known: AttemptRecord | None = ENDED, **changes: Any) -> Reckoning:
    return reckon(evidence(items, known, **changes), TRUST, T0, "test")


@pytest.mark.parametrize(
    ("items", "known", "changes", "missing"),
    [
        ([come(FIRST), come(SECOND, 2)], ENDED, {}, ""),
        ([come(SECOND, 2), come(FIRST)], ENDED, {}, ""),
        ([], ended(RECORD, []), {}, ""),
        ([], record(state="withdrawn"), {}, ""),
        ([come(FIRST)], ENDED, {"lane_through": 1}, "1 of 2 segments from site-a: late"),
        ([come(FIRST)], ENDED, {"lane_through": 2}, "1 of 2 segments from site-a: not among what came"),
        ([], ENDED, {}, "2 of 2 segments from site-a: late (its metering lane is here through 0, the ending says 2)"),
        ([come(FIRST)], None, {}, "the scheduler's record"),
        ([come(FIRST)], record(state="running"), {}, "still running by the scheduler's record"),
        ([come(FIRST), come(SECOND, 2), come(segment(RECORD, 9, 10), 3)], ENDED, {}, "3 segments where site-a's ending says 2"),
        ([come(FIRST), come(segment(RECORD, 6, 8), 2)], ENDED, {}, "the segments sum to 8000000000 milli-µs where"),
        ([come(FIRST), come(SECOND, 3)], ENDED, {}, "a segment of site-a came after the last that its ending names (2)"),
        ([come(FIRST), come(SECOND, 2)], ENDED, {"specs": []}, "a price: no agreed meter spec"),
        ([come(FIRST), come(SECOND, 2)], ENDED, {"keys": {}}, "2 of 2 segments from site-a"),
    ],
)
def test_an_attempt_is_complete_only_with_exactly_the_ending_s_counts(
    items: list[Received], known: AttemptRecord | None, changes: dict[str, Any], missing: str
) -> None:
    state = reckoned(items, known, **changes).state
    assert state.missing.startswith(missing)
    assert state.complete == (missing == "")


def test_a_journal_made_anew_counts_from_one_again_and_is_not_called_too_late() -> None:
    items = [come(FIRST, 40, journal="old"), come(SECOND, 1)]
    assert reckoned(items, ended(RECORD, [FIRST, SECOND], last=1)).state.complete


# --- ledger ------------------------------------------------------------------------------------------------------------------------------


def test_an_open_attempt_holds_its_price_for_its_wall_limit() -> None:
    (entry,) = reckoned([], RECORD).entries
    assert entry.kind is EntryKind.HOLD
    assert {(leg.account, leg.amount) for leg in entry.legs} == {("held/lab", Decimal("6.0000")), ("holds", Decimal("-6.0000"))}


def after(reckoning: Reckoning) -> dict[tuple[str, str], Decimal]:
    """Balances once the reckoning's entries are written."""
    sums = dict(reckoning.evidence.balances)
    for entry in reckoning.entries:
        for leg in entry.legs:
            sums[(leg.account, leg.currency)] = sums.get((leg.account, leg.currency), Decimal(0)) + leg.amount
    return {key: amount for key, amount in sums.items() if amount}


def test_what_the_segments_prove_is_posted_and_the_hold_released_when_complete() -> None:
    open_one = reckoned([], RECORD)
    running = reckoned([come(FIRST)], record(state="running", version=2), balances=after(open_one))
    assert after(running)[("tenant/lab", "CNY")] == Decimal("0.0100")
    assert held(after(running)) == Decimal("6.0000")
    done = reckoned([come(FIRST), come(SECOND, 2)], ENDED, balances=after(running))
    assert [entry.kind for entry in done.entries] == [EntryKind.POST, EntryKind.RELEASE]
    assert posted(after(done)) == Decimal("0.0150") and held(after(done)) == 0
    assert done.settled is not None and done.settled.amount == Decimal("0.0150")


@pytest.mark.parametrize(
    ("outcome", "cause", "account", "payer"),
    [
        ("cancelled", Cause.CANCELLED, "tenant/lab", WhoPays.TENANT),
        ("failed", Cause.JOB, "tenant/lab", WhoPays.TENANT),
        ("failed", Cause.SITE, "site/site-a", WhoPays.SITE),
        ("failed", Cause.PLATFORM, "platform", WhoPays.PLATFORM),
        ("failed", Cause.UNKNOWN, "suspense/lab", WhoPays.NOBODY),
        ("unknown", None, "suspense/lab", WhoPays.NOBODY),
    ],
)
def test_the_payer_that_the_end_names_replaces_the_one_assumed_while_it_ran(
    outcome: str, cause: Cause | None, account: str, payer: WhoPays
) -> None:
    running = reckoned([come(FIRST), come(SECOND, 2)], record(state="running", version=2))
    assert after(running)[("tenant/lab", "CNY")] == Decimal("0.0150")
    done = reckoned([come(FIRST), come(SECOND, 2)], ended(RECORD, [FIRST, SECOND], outcome=outcome, cause=cause), balances=after(running))
    assert after(done) == {(account, "CNY"): Decimal("0.0150"), ("usage/platform", "CNY"): Decimal("-0.0150")}
    assert done.settled is not None and done.settled.payer is payer


def test_an_end_without_a_start_releases_everything() -> None:
    holding = after(reckoned([], RECORD))
    for state in ("refused", "withdrawn", "not_started"):
        reckoning = reckoned([], record(state=state, version=2), balances=holding)
        assert after(reckoning) == {} and reckoning.settled is None


def test_asked_again_without_news_nothing_is_written() -> None:
    done = reckoned([come(FIRST), come(SECOND, 2)])
    told = done.settled
    assert told is not None
    before = replace(
        done.evidence,
        received=done.received,
        balances=after(done),
        settled=Settled(told.version, told.amount, told.currency, told.payer, told.segments, told.quantity_milli_us),
        priced_by=done.priced_by,
    )
    assert change(before, reckon(before, TRUST, T0)).empty


def test_an_entry_that_does_not_balance_cannot_be_made() -> None:
    with pytest.raises(AssertionError, match="does not balance"):
        Entry(RECORD.attempt, EntryKind.POST, "", [Leg("tenant/lab", "CNY", Decimal(1)), Leg("usage/platform", "USD", Decimal(-1))])


def test_br_091_nothing_is_left_of_a_tenth_and_a_fifth_less_three_tenths() -> None:
    tenth, fifth, three = Decimal("0.1"), Decimal("0.2"), Decimal("0.3")
    assert difference({("a", "CNY"): tenth + fifth}, {("a", "CNY"): three}) == []


# --- agreements ----------------------------------------------------------------------------------------------------------------------------

UNAGREED = record(spec=None, spec_revision=0)
UNPRICED = segment(UNAGREED, 0, 6)


def test_usage_without_an_agreement_waits_and_a_later_one_that_covers_its_start_releases_it() -> None:
    done = ended(UNAGREED, [UNPRICED])
    waiting = reckoned([come(UNPRICED)], done, specs=[])
    assert [item.suspense for item in waiting.received] == [Reason.NO_SPEC]
    assert waiting.entries == [] and not waiting.state.complete
    too_late = reckoned([come(UNPRICED)], done, specs=[spec(effective_from=at(1))])
    assert [item.suspense for item in too_late.received] == [Reason.NO_SPEC]
    agreed = reckoned([come(UNPRICED)], done, specs=[spec(effective_from=T0)])
    assert agreed.state.complete and agreed.amount == Decimal("0.0100") and agreed.priced_by == (SPEC, 1)


def test_what_was_priced_once_is_not_priced_anew_by_a_later_agreement() -> None:
    dearer = spec(revision=2, prices=[Price(kind=DeviceKind.SLOT, per_hour=Decimal(60))])
    own = spec(spec=SpecId("spec-2"), consumer="lab", prices=[Price(kind=DeviceKind.SLOT, per_hour=Decimal(600))])
    done = ended(UNAGREED, [UNPRICED])
    assert reckoned([come(UNPRICED)], done, specs=[spec(), dearer, own], priced_by=(SPEC, 1)).amount == Decimal("0.0100")


def test_a_device_without_a_price_waits_for_a_revision_that_names_it() -> None:
    of = record(kind=DeviceKind.GPU)
    gpu = segment(of, 0, 3600, kind=DeviceKind.GPU, model="H100")
    done = ended(of, [gpu])
    waiting = reckoned([come(gpu)], done)
    assert [item.suspense for item in waiting.received] == [Reason.NO_PRICE]
    revised = spec(revision=2, prices=[*spec().prices, Price(kind=DeviceKind.GPU, per_hour=Decimal(20))])
    agreed = reckoned([come(gpu)], done, specs=[spec(), revised])
    assert agreed.amount == 20 and agreed.priced_by == (SPEC, 2)


def test_a_tenant_s_own_agreement_comes_before_everyone_s_and_the_newest_in_force_counts() -> None:
    own = spec(spec=SpecId("spec-2"), consumer="lab", effective_from=T0 - timedelta(days=40))
    newer = spec(spec=SpecId("spec-2"), consumer="lab", revision=2, effective_from=at(10))
    specs = [spec(), own, newer]
    assert in_force(specs, "lab", T0) == own
    assert in_force(specs, "lab", at(10)) == newer
    assert in_force(specs, "other", T0) == spec()
    assert in_force(specs, "lab", T0 - timedelta(days=41)) is None


ASK = AgreeSpec(title="standard", provider="platform", consumer="*", currency="CNY", prices=spec().prices)


def test_the_same_two_parties_get_the_next_revision_of_the_same_agreement() -> None:
    first = next_revision(ASK, [], SpecId("spec-9"), "ann", T0)
    second = next_revision(ASK, [first], SpecId("spec-10"), "bob", at(1))
    assert (first.spec, first.revision, first.agreed_by, first.effective_from) == ("spec-9", 1, ["ann"], T0)
    assert (second.spec, second.revision, second.agreed_by) == ("spec-9", 2, ["bob"])
    assert first.pays["unknown"] is WhoPays.NOBODY


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"provider": "site-a", "consumer": "lab"}, "metering.spec"),
        ({"consumer": "No Such Name"}, "name.invalid"),
        ({"title": " "}, "metering.spec"),
        ({"title": "a\x00b"}, "metering.spec"),
        ({"prices": [*spec().prices, *spec().prices]}, "metering.spec"),
        ({"prices": [Price(kind=DeviceKind.SLOT, per_hour=Decimal(-1))]}, "metering.spec"),
        ({"rounding": Decimal(0)}, "metering.spec"),
        ({"minimum_us": 3_600_000_001}, "metering.spec"),
        ({"pays": {"weather": WhoPays.SITE}}, "metering.spec"),
        ({"effective_from": T0.replace(tzinfo=None)}, "metering.spec"),
        ({"time_zone": "Mars/Olympus"}, "metering.time_zone"),
        ({"time_zone": "Europe/Berlin"}, "metering.time_zone"),
        ({"currency": "USD"}, "metering.currency"),
    ],
)
def test_an_agreement_that_could_not_be_rated_is_refused(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(Refused) as refused:
        next_revision(msgspec.structs.replace(ASK, **changes), [spec()], SpecId("spec-9"), "ann", T0)
    assert refused.value.code == code


def test_one_currency_for_all_that_one_tenant_might_come_under() -> None:
    with pytest.raises(Conflict):
        next_revision(msgspec.structs.replace(ASK, consumer="lab", currency="USD"), [spec()], SpecId("spec-9"), "ann", T0)


@pytest.mark.parametrize(
    ("held", "asked", "refused"),
    [
        ("*", "lab", True),
        ("lab", "*", True),
        ("lab", "plant", False),
    ],
    ids=["its own beside everyone's", "everyone's beside its own", "two tenants that share none"],
)
def test_one_time_zone_for_all_that_one_tenant_might_come_under(held: str, asked: str, refused: bool) -> None:
    """A tenant that gets its own agreement keeps its months: hours on the border would stand on two statements, or on none."""
    ask = msgspec.structs.replace(ASK, consumer=asked, time_zone="Europe/Berlin")
    try:
        next_revision(ask, [spec(consumer=held)], SpecId("spec-9"), "ann", T0)
    except Conflict as conflict:
        assert (conflict.code, refused) == ("metering.time_zone", True)
        assert "--time-zone " in conflict.next_step
    else:
        assert not refused


# --- periods -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("period", "zone", "start", "end"),
    [
        ("2026-12", "Asia/Shanghai", datetime(2026, 11, 30, 16, tzinfo=UTC), datetime(2026, 12, 31, 16, tzinfo=UTC)),
        ("2026-10", "Europe/Berlin", datetime(2026, 9, 30, 22, tzinfo=UTC), datetime(2026, 10, 31, 23, tzinfo=UTC)),
        ("2026-02", "UTC", datetime(2026, 2, 1, tzinfo=UTC), datetime(2026, 3, 1, tzinfo=UTC)),
    ],
    ids=["Shanghai", "BR-079: a month with 25 h in one day", "UTC"],
)
def test_a_period_is_a_month_of_its_own_time_zone_half_open(period: str, zone: str, start: datetime, end: datetime) -> None:
    assert bounds(period, zone) == (start, end)
    assert period_of(start, zone) == period
    assert period_of(end - timedelta(microseconds=1), zone) == period
    assert period_of(end, zone) != period


@pytest.mark.parametrize("period", ["2026-13", "2026-1", "26-01", "2026-12 ", "", "1999-12"])
def test_what_is_no_period_is_refused(period: str) -> None:
    with pytest.raises(Refused, match="is not a period"):
        bounds(period, "UTC")
