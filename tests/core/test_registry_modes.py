"""What is decided about a pool: the mode by its two questions, the phase by one table, the downtime by its notice (FEATURES 1, 2, 23, 24, 119)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intertie.contracts.modes import DecideMode, DeclareDowntime, MovePhase
from intertie.contracts.site import (
    AccessMode,
    Device,
    DeviceKind,
    DeviceObserved,
    DeviceState,
    DowntimeEffect,
    Freshness,
    Lendable,
    Phase,
    PoolInventory,
    PoolProfile,
    PoolRecord,
    SiteKind,
    TaskType,
)
from intertie.contracts.usage import MeterSpec, Price
from intertie.errors import Conflict, IntertieError, NotFound, Refused
from intertie.ids import DeviceId, PoolName, SiteName, SpecId, TenantName
from intertie.lifecycle import PHASE_FORWARD, PHASE_MOVES
from intertie.registry.core import modes, profile

T0 = datetime(2026, 12, 1, 8, tzinfo=UTC)
SITE, POOL = SiteName("site-a"), PoolName("pool-a")
PROFILE = PoolProfile(
    pool=POOL,
    accelerator="A100-SXM4-80GB",
    count=4,
    memory_mib=81_920,
    interconnect="nvlink",
    task_types=[TaskType.BATCH],
    lendable=Lendable(devices=4),
)
SPEC = MeterSpec(
    spec=SpecId("spec-1"),
    revision=2,
    title="site-a",
    provider="site-a",
    consumer="platform",
    currency="CNY",
    prices=[Price(kind=DeviceKind.GPU, per_hour=Decimal(8))],
    effective_from=T0 - timedelta(days=1),
)


def pool(*, held: int = 0, mode: AccessMode = AccessMode.MANAGED, **changes: object) -> PoolRecord:
    declared = msgspec.structs.replace(PROFILE, mode=mode)
    record = profile.declare(None, declared, site=SITE, kind=SiteKind.SLURM, freshness=Freshness.FRESH, by="lab")
    cards = [
        DeviceObserved(
            device=Device(id=DeviceId(f"GPU-{n}"), kind=DeviceKind.GPU), state=DeviceState.OURS if n < held else DeviceState.FREE
        )
        for n in range(4)
    ]
    base = {
        "decision": modes.at_joining(declared, by="lab", now=T0),
        "inventory": PoolInventory(pool=POOL, devices=cards, running=held, waiting=0),
    }
    return msgspec.structs.replace(record, **(base | changes))


def asked(mode: AccessMode, outsider: bool, held: bool) -> DecideMode:
    return DecideMode(site=SITE, pool=POOL, mode=mode, outsider_decides=outsider, response_time_held=held, reason="a talk with the lab")


def code_of(error: type[IntertieError], record: PoolRecord, request: DecideMode) -> str:
    with pytest.raises(error) as caught:
        modes.decide(record, request, by="ann", now=T0)
    assert caught.value.next_step
    return caught.value.code


M, S = AccessMode.MANAGED, AccessMode.SERVICE


@pytest.mark.parametrize(
    ("record", "request_", "error", "code"),
    [
        (pool(phase=Phase.CLOSED), asked(M, False, False), Refused, "registry.mode.closed"),
        (pool(cordoned=True), asked(M, False, True), Refused, "registry.mode.outsider"),
        (pool(cordoned=True), asked(S, True, False), Refused, "registry.mode.response_time"),
        (pool(), asked(S, False, True), Conflict, "registry.pool_not_drained"),
        (pool(cordoned=True, freshness=Freshness.STALE), asked(S, False, True), Conflict, "registry.pool_unknown_work"),
        (pool(cordoned=True, inventory=None), asked(S, False, True), Conflict, "registry.pool_unknown_work"),
        (pool(cordoned=True, held=1), asked(S, False, True), Conflict, "registry.pool_works"),
    ],
)
def test_a_mode_is_refused_by_the_first_thing_that_does_not_support_it(
    record: PoolRecord, request_: DecideMode, error: type[IntertieError], code: str
) -> None:
    assert code_of(error, record, request_) == code


def test_the_first_decision_is_the_owners_own_declaration() -> None:
    """The brief's 'a person and a date', also where nobody was asked beside the profile."""
    decision = pool().decision
    assert decision is not None
    assert (decision.mode, decision.outsider_decides, decision.response_time_held) == (M, True, None)
    assert (decision.decided_by, decision.decided_at, decision.at_joining) == ("lab", T0, True)


def test_a_changed_mode_is_in_force_only_when_the_owner_declares_it_too() -> None:
    after = modes.decide(pool(cordoned=True), asked(S, False, True), by="ann", now=T0)
    assert after.decision is not None and (after.decision.mode, after.decision.decided_by) == (S, "ann")
    assert after.mode is None, "the owner still declares managed"
    declared = msgspec.structs.replace(after, profile=msgspec.structs.replace(after.profile, mode=S))
    assert declared.mode is S


def test_the_hub_alone_cannot_take_control_that_the_owner_does_not_give() -> None:
    """FEATURES 2: an operator who answers for the owner gets nothing by it."""
    after = modes.decide(pool(mode=S, cordoned=True), asked(M, True, True), by="operator", now=T0)
    assert after.mode is None


def test_the_same_mode_decided_again_keeps_a_working_pool_working() -> None:
    after = modes.decide(pool(held=3), asked(M, True, True), by="ann", now=T0)
    assert (after.mode, after.version) == (M, pool().version + 1)


def moving(after: Phase, tenants: list[TenantName] | None = None) -> MovePhase:
    return MovePhase(site=SITE, pool=POOL, phase=after, reason="it is time", tenants=tenants)


@pytest.mark.parametrize("before", list(Phase))
@pytest.mark.parametrize("after", list(Phase))
def test_a_phase_moves_as_the_table_says_and_never_otherwise(before: Phase, after: Phase) -> None:
    record = pool(phase=before)
    if (before, after) in PHASE_MOVES:
        moved, told = modes.moved(record, moving(after), own=False, spec=SPEC)
        assert (moved.phase, told.before, told.after, told.spec) == (after, before, after, "spec-1 rev 2")
    else:
        with pytest.raises(Refused) as caught:
            modes.moved(record, moving(after), own=False, spec=SPEC)
        assert caught.value.code == "registry.phase.forbidden"


@pytest.mark.parametrize(
    ("before", "wanted", "named"),
    [
        (Phase.PILOT, Phase.PRODUCTION, "parallel"),
        (Phase.SUSPENDED, Phase.PRODUCTION, "parallel"),
        (Phase.CANDIDATE, Phase.PRODUCTION, "pilot"),
        (Phase.CANDIDATE, Phase.PARALLEL, "pilot"),
        (Phase.CLOSED, Phase.PRODUCTION, "candidate"),
        (Phase.PILOT, Phase.CANDIDATE, ""),
    ],
)
def test_a_forbidden_move_names_the_first_step_of_the_way_and_never_the_closing(before: Phase, wanted: Phase, named: str) -> None:
    with pytest.raises(Refused) as caught:
        modes.moved(pool(phase=before), moving(wanted), own=False, spec=SPEC)
    step = caught.value.next_step
    assert f" {named} --reason" in step if named else step.startswith("intertie pool history")


def test_what_is_suspended_never_goes_back_to_production_in_one_step() -> None:
    assert (Phase.SUSPENDED, Phase.PRODUCTION) not in PHASE_MOVES
    assert (Phase.PILOT, Phase.PRODUCTION) not in PHASE_MOVES


@pytest.mark.parametrize(("before", "after"), sorted(PHASE_FORWARD))
def test_nobody_takes_the_own_pool_forward_and_none_goes_forward_without_an_agreement(before: Phase, after: Phase) -> None:
    with pytest.raises(Refused) as own:
        modes.moved(pool(phase=before), moving(after), own=True, spec=SPEC)
    with pytest.raises(Refused) as bare:
        modes.moved(pool(phase=before), moving(after), own=False, spec=None)
    assert (own.value.code, bare.value.code) == ("registry.phase.own", "registry.phase.no_spec")


def test_an_owner_may_suspend_the_own_pool_without_asking_anybody() -> None:
    moved, _ = modes.moved(pool(phase=Phase.PRODUCTION, held=2), moving(Phase.SUSPENDED), own=True, spec=None)
    assert moved.phase is Phase.SUSPENDED


def test_a_pool_that_works_for_us_is_not_closed() -> None:
    with pytest.raises(Conflict) as caught:
        modes.moved(pool(held=2), moving(Phase.CLOSED), own=False, spec=None)
    assert caught.value.code == "registry.pool_works"


def test_a_list_of_tenants_comes_with_a_phase_and_stays_until_it_is_said_again() -> None:
    moved, _ = modes.moved(pool(), moving(Phase.PARALLEL, [TenantName("b"), TenantName("a")]), own=False, spec=SPEC)
    assert moved.tenants == ["a", "b"]
    again, _ = modes.moved(moved, moving(Phase.PILOT), own=False, spec=SPEC)
    assert again.tenants == ["a", "b"]


def test_what_is_no_tenants_name_stands_on_no_list() -> None:
    with pytest.raises(Refused) as caught:
        modes.moved(pool(), moving(Phase.PARALLEL, [TenantName("a\x00b")]), own=False, spec=SPEC)
    assert caught.value.code == "name.invalid"


@pytest.mark.parametrize(
    ("provider", "days", "agreed"),
    [("site-a", -1, True), ("site-a", 1, False), ("site-b", -1, False), ("platform", -1, False)],
)
def test_only_an_agreement_of_this_site_that_is_in_force_counts(provider: str, days: int, agreed: bool) -> None:
    spec = msgspec.structs.replace(SPEC, provider=provider, effective_from=T0 + timedelta(days=days))
    assert (modes.agreed_spec([spec], pool(), now=T0) is not None) is agreed


def window(start_h: float, end_h: float, effect: DowntimeEffect = DowntimeEffect.FULL) -> DeclareDowntime:
    return DeclareDowntime(
        site=SITE, pool=POOL, start=T0 + timedelta(hours=start_h), end=T0 + timedelta(hours=end_h), effect=effect, reason="new switches"
    )


@pytest.mark.parametrize(("start_h", "planned"), [(24, True), (48, True), (23.9, False), (-1, False)])
def test_a_downtime_that_is_declared_a_day_ahead_is_planned(start_h: float, planned: bool) -> None:
    after = modes.declare_downtime(pool(), window(start_h, start_h + 4), id="dwn-1", by="ann", now=T0)
    assert [(one.planned, one.declared_by) for one in after.downtimes] == [(planned, "ann")]


@pytest.mark.parametrize(
    ("start_h", "end_h", "code"),
    [
        (2, 2, "registry.downtime.window"),
        (3, 2, "registry.downtime.window"),
        (-3, -1, "registry.downtime.over"),
        (1, 24 * 200, "registry.downtime.long"),
    ],
)
def test_a_window_that_says_nothing_is_refused(start_h: float, end_h: float, code: str) -> None:
    with pytest.raises(Refused) as caught:
        modes.declare_downtime(pool(), window(start_h, end_h), id="dwn-1", by="ann", now=T0)
    assert caught.value.code == code


def test_the_same_window_twice_is_one_and_what_is_over_lifts_by_itself() -> None:
    one = modes.declare_downtime(pool(), window(1, 2), id="dwn-1", by="ann", now=T0)
    assert modes.declare_downtime(one, window(1, 2), id="dwn-2", by="bob", now=T0) is one
    later = modes.declare_downtime(one, window(30, 40), id="dwn-3", by="ann", now=T0 + timedelta(hours=2))
    assert [each.id for each in later.downtimes] == ["dwn-3"]


def test_a_downtime_is_taken_back_by_its_name() -> None:
    one = modes.declare_downtime(pool(), window(1, 2), id="dwn-1", by="ann", now=T0)
    after, found = modes.remove_downtime(one, "dwn-1", now=T0)
    assert (after.downtimes, found.id) == ([], "dwn-1")
    with pytest.raises(NotFound):
        modes.remove_downtime(after, "dwn-1", now=T0)


@given(st.lists(st.sampled_from(list(Phase)), max_size=12), st.booleans(), st.booleans())
def test_no_walk_through_the_phases_reaches_production_but_through_both_trials(walk: list[Phase], own: bool, agreed: bool) -> None:
    record, been = pool(phase=Phase.CANDIDATE), [Phase.CANDIDATE]
    for after in walk:
        try:
            record, _ = modes.moved(record, moving(after), own=own, spec=SPEC if agreed else None)
        except IntertieError:
            continue
        been.append(record.phase)
    for before, after in zip(been, been[1:], strict=False):
        assert after is not Phase.PRODUCTION or before is Phase.PARALLEL
    assert Phase.PRODUCTION not in been or (agreed and not own)
