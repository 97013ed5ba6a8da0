"""What may be believed of devices and sites: live or not, heard or not, lending or not, and what a tenant may still spend."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal

import pytest

from intertie.contracts.identity import SiteKeyChanged, SiteKeyRecord
from intertie.contracts.job import AttemptRecord
from intertie.contracts.link import Clocks, Lane
from intertie.contracts.site import (
    Device,
    DeviceKind,
    DeviceObserved,
    DeviceState,
    Freshness,
    Lendable,
    Phase,
    PoolInventory,
    PoolProfile,
    PoolRecord,
    SiteKind,
    SiteRecord,
    TaskType,
)
from intertie.contracts.telemetry import DeviceSample, NodeSample
from intertie.contracts.usage import Allowance, AllowanceChanged, MeterSpec, Price, SpecAgreed
from intertie.ids import AttemptId, DeviceId, Digest, JobId, JournalId, PoolName, SessionId, SiteName, SpecId, TenantName
from intertie.link.keeper import SiteRow
from intertie.scheduler.core.backoff import BackOff
from intertie.scheduler.core.given import RoundInput, Used
from intertie.scheduler.core.hearing import Hearing
from intertie.scheduler.core.rows import Attempt
from intertie.scheduler.core.sight import Sight
from intertie.scheduler.core.snapshot import assemble, pool_views
from intertie.scheduler.core.windows import is_open
from intertie.scheduler.core.world import World, allowance_fact, pool_fact, site_fact, site_key_fact, spec_fact

NOW = datetime(2026, 12, 1, 8, 0, tzinfo=UTC)
SITE, POOL, ACME = SiteName("site-a"), PoolName("gpu"), TenantName("acme")
GPU = DeviceId("GPU-0")
NOON = time(12, 0)


def sample(state: DeviceState = DeviceState.FREE, *, at: datetime = NOW, sequence: int = 1, devices: int = 1) -> NodeSample:
    found = [DeviceSample(id=DeviceId(f"GPU-{n}"), pool=POOL, kind=DeviceKind.GPU, state=state) for n in range(devices)]
    return NodeSample(node="n1", sampled=at, sequence=sequence, devices=found)


def seen(sight: Sight, *, now: datetime = NOW, now_s: float = 100.0, offset_s: float = 0.0) -> tuple[DeviceState, bool]:
    (device,) = sight.devices(SITE, POOL, None, now=now, now_s=now_s, offset_s=offset_s)
    return device.state, device.live


def looking(at: datetime = NOW, received_s: float = 100.0, state: DeviceState = DeviceState.FREE) -> Sight:
    sight = Sight(live_s=5.0)
    sight.observe(SITE, sample(state, at=at), received_s)
    return sight


@pytest.mark.parametrize(
    ("sampled_s", "received_s", "offset_s", "live"),
    [
        (0, 100, 0, True),
        (-4, 96, 0, True),
        # BR-066: received now, but taken long ago: a replayed backlog
        (-60, 100, 0, False),
        # taken just now by its own word, received long ago: a clock that runs ahead
        (0, 90, 0, False),
        # D25: a site clock at +7 min is not fresh for ever
        (420, 100, 0, False),
        # … and the lane's offset estimate makes it right again
        (420, 100, -420, True),
        (-420, 100, 420, True),
    ],
)
def test_live_means_taken_and_received_within_the_limit(sampled_s: int, received_s: float, offset_s: float, live: bool) -> None:
    sight = looking(NOW + timedelta(seconds=sampled_s), received_s)
    assert seen(sight, offset_s=offset_s)[1] is live


@pytest.mark.parametrize(("silence_s", "live"), [(4.9, True), (5.1, False), (19.0, False)])
def test_a_hub_that_hears_nothing_of_a_device_believes_nothing_of_it_within_five_seconds(silence_s: float, live: bool) -> None:
    """BR-114: after a restart of the server watchers were blind for 19 s as if nothing had changed; here silence itself is the sign."""
    sight = Sight()
    sight.observe(SITE, sample(), 100.0)
    assert seen(sight, now=NOW + timedelta(seconds=silence_s), now_s=100.0 + silence_s) == (DeviceState.FREE, live)


def test_an_older_sample_never_replaces_a_newer_one() -> None:
    sight = looking()
    assert not sight.observe(SITE, sample(DeviceState.LOST, at=NOW - timedelta(seconds=1), sequence=9), 101.0)
    assert seen(sight)[0] is DeviceState.FREE
    assert sight.observe(SITE, sample(DeviceState.LOST, at=NOW + timedelta(seconds=1), sequence=2), 101.0)
    assert seen(sight)[0] is DeviceState.LOST


def test_a_device_that_its_node_no_longer_names_is_gone_at_once() -> None:
    sight = Sight()
    sight.observe(SITE, sample(devices=2), 100.0)
    sight.observe(SITE, sample(devices=1, at=NOW + timedelta(seconds=1), sequence=2), 101.0)
    assert len(sight.devices(SITE, POOL, None, now=NOW, now_s=101.0, offset_s=0.0)) == 1


def test_what_only_the_inventory_knows_is_shown_and_not_live() -> None:
    device = Device(id=GPU, kind=DeviceKind.GPU, node="n1")
    inventory = PoolInventory(pool=POOL, devices=[DeviceObserved(device=device, state=DeviceState.FREE)], running=0, waiting=0)
    (view,) = Sight().devices(SITE, POOL, inventory, now=NOW, now_s=100.0, offset_s=0.0)
    assert (view.state, view.live) == (DeviceState.FREE, False)


def test_the_sites_word_overrules_an_older_sample_and_a_newer_sample_overrules_the_word() -> None:
    key = (SITE, POOL, GPU)
    sight = looking(state=DeviceState.OURS)
    sight.freed([key], 100.5)
    assert seen(sight)[0] is DeviceState.FREE
    sight.observe(SITE, sample(DeviceState.OURS, at=NOW + timedelta(seconds=1), sequence=2), 101.0)
    assert seen(sight)[0] is DeviceState.OURS
    sight = looking()
    sight.taken([key], 100.5)
    assert seen(sight)[0] is DeviceState.LOCAL
    sight.observe(SITE, sample(at=NOW + timedelta(seconds=1), sequence=2), 101.0)
    assert seen(sight, now_s=101.0)[0] is DeviceState.FREE


def test_a_device_that_contradicts_itself_is_asked_ever_more_rarely() -> None:
    """LINK D23: busy costs the site nothing, and the hub does not offer once a beat for ever."""
    key, rests = (SITE, POOL, GPU), []
    sight, at_s = Sight(live_s=1e9), 100.0
    for number in range(9):
        sight.observe(SITE, sample(at=NOW + timedelta(seconds=number), sequence=number), at_s - 0.5)
        sight.taken([key], at_s)
        sight.observe(SITE, sample(at=NOW + timedelta(seconds=number + 0.5), sequence=number), at_s + 0.1)
        rests.append(next(wait for wait in range(100) if seen(sight, now_s=at_s + 0.1 + wait)[0] is DeviceState.FREE))
        at_s += 200
    assert rests == [0, 2, 4, 8, 16, 32, 60, 60, 60]
    sight.freed([key], at_s)
    sight.taken([key], at_s)
    sight.observe(SITE, sample(at=NOW + timedelta(seconds=60), sequence=99), at_s + 0.1)
    assert seen(sight, now_s=at_s + 0.1)[0] is DeviceState.FREE


def test_nothing_makes_a_lost_device_free() -> None:
    sight = looking(state=DeviceState.LOST)
    sight.freed([(SITE, POOL, GPU)], 200.0)
    assert seen(sight)[0] is DeviceState.LOST


def test_nodes_that_are_gone_are_forgotten() -> None:
    sight = looking()
    sight.prune(100.0 + 61 * 5.0)
    assert sight.devices(SITE, POOL, None, now=NOW, now_s=100.0, offset_s=0.0) == ()


def row(heard: int, *, at_head: bool = True, last_nonce: int = 1, taken_nonce: int = 0) -> SiteRow:
    return SiteRow(
        site=SITE,
        lane=Lane.SCHEDULER,
        session=SessionId("s"),
        journal=JournalId("j"),
        ack_through=0,
        digest=Digest("d"),
        safe_through=0,
        interpreted_through=0,
        heard=heard,
        last_heard=NOW,
        last_nonce=last_nonce,
        taken_nonce=taken_nonce,
        at_head=at_head,
        running=None,
        instruction_epoch=0,
        instruction_mark=0,
        settings_revision=0,
        clocks=Clocks(utc=NOW, boot_s=1.0, kernel_boot="b"),
        clock_offset_s=0.25,
        clock_error_s=0.0,
    )


def test_a_stored_row_says_nothing_about_now() -> None:
    """LINK D5: silence is counted from taking office, and ended by growth alone."""
    hearing = Hearing(silent_s=10.0, office_s=100.0)
    hearing.listen([row(7)], 101.0)
    assert not hearing.caught_up(SITE), "it was at head with an earlier leader"
    assert hearing.heard(SITE, 109.0) and hearing.silent_since(SITE, 109.0) is None
    assert not hearing.heard(SITE, 111.0) and hearing.silent_since(SITE, 111.0) == NOW
    hearing.listen([row(8)], 112.0)
    assert hearing.heard(SITE, 113.0) and hearing.caught_up(SITE)


def test_a_new_leader_waits_for_every_site_to_be_at_head_with_it() -> None:
    """LINK D12."""
    hearing = Hearing(silent_s=10.0, office_s=100.0)
    hearing.hear(row(1), 101.0)
    assert hearing.caught_up(SITE)
    hearing.took_office(102.0)
    assert not hearing.caught_up(SITE)
    hearing.hear(row(2, at_head=False), 103.0)
    assert not hearing.caught_up(SITE)
    hearing.hear(row(3), 104.0)
    assert hearing.caught_up(SITE)


def test_a_site_that_takes_no_answers_is_not_heard() -> None:
    """LINK D9: a one-way link looks healthy from one side only."""
    hearing = Hearing(silent_s=10.0, office_s=100.0)
    hearing.hear(row(1, last_nonce=9, taken_nonce=2), 101.0)
    assert not hearing.heard(SITE, 101.0)
    hearing.hear(row(2, last_nonce=10, taken_nonce=9), 102.0)
    assert hearing.heard(SITE, 102.0)


def test_an_older_row_changes_nothing() -> None:
    hearing = Hearing(silent_s=10.0, office_s=100.0)
    hearing.hear(row(5), 101.0)
    hearing.listen([row(4, at_head=False)], 102.0)
    assert hearing.caught_up(SITE)


@pytest.mark.parametrize(
    ("windows", "at", "open_"),
    [
        ([], "12:00", True),
        (["09:00-18:00"], "12:00", True),
        (["09:00-18:00"], "18:00", False),
        (["22:00-06:00"], "23:30", True),
        (["22:00-06:00"], "05:59", True),
        (["22:00-06:00"], "12:00", False),
        (["18:00-24:00"], "23:59", True),
        (["08:00-09:00", "11:00-13:00"], "12:00", True),
        (["whenever"], "12:00", False),
        (["25:00-26:00"], "12:00", False),
    ],
)
def test_an_owner_lends_inside_the_windows_only(windows: list[str], at: str, open_: bool) -> None:
    assert is_open(windows, time.fromisoformat(at)) is open_


def pool_record() -> PoolRecord:
    profile = PoolProfile(
        pool=POOL,
        accelerator="A100",
        count=1,
        memory_mib=1,
        interconnect="none",
        task_types=[TaskType.BATCH],
        lendable=Lendable(devices=1, windows=["13:00-14:00"]),
    )
    return PoolRecord(
        site=SITE,
        pool=POOL,
        kind=SiteKind.MACHINES,
        profile=profile,
        phase=Phase.PILOT,
        cordoned=False,
        draining=False,
        cordon_reason="",
        freshness=Freshness.FRESH,
        last_heard=NOW,
        inventory=PoolInventory(pool=POOL, devices=[], running=0, waiting=0, accepting=False),
        inventory_at=NOW,
        version=1,
    )


def site_record() -> SiteRecord:
    return SiteRecord(
        site=SITE,
        kind=SiteKind.MACHINES,
        title="",
        owner="o",
        single_user=True,
        owner_tenant="lab",
        freshness=Freshness.FRESH,
        joined_at=NOW,
        last_heard=NOW,
        hears_us=True,
        clock_offset_s=None,
        agent_version="1",
        version=1,
    )


def known(*, revoked: bool = False) -> World:
    world = World()
    keys = SiteKeyRecord(site=SITE, site_key="U", signing_key="A", account="A", revoked=revoked)
    for fact in (pool_fact(pool_record(), NOW), site_fact(site_record(), NOW), site_key_fact(SiteKeyChanged(version=1, record=keys), NOW)):
        world.apply(fact)
    return world


def test_a_pool_is_judged_by_all_that_is_known_of_it() -> None:
    hearing = Hearing(office_s=100.0)
    hearing.hear(row(1), 100.0)
    back = BackOff(SITE, 1, NOW + timedelta(seconds=1), "fetch failed")
    (view,) = pool_views(known(), looking(), hearing, {SITE: back}, now=NOW, now_s=100.0, local=NOON)
    assert (view.heard, view.caught_up, view.accepting, view.lending_now, view.single_user) == (True, True, False, False, True)
    assert (view.owner_tenant, view.back_off_why, len(view.devices)) == ("lab", "fetch failed", 1)


def test_a_site_whose_keys_are_revoked_gets_no_work() -> None:
    (view,) = pool_views(known(revoked=True), Sight(), Hearing(), {}, now=NOW, now_s=100.0, local=NOON)
    assert view.cordoned and "revoked" in view.cordon_reason


def agreed(revision: int, per_hour: str, since: datetime) -> SpecAgreed:
    spec = MeterSpec(
        spec=SpecId("spec-1"),
        revision=revision,
        title="t",
        provider="platform",
        consumer="*",
        currency="CNY",
        prices=[Price(kind=DeviceKind.GPU, per_hour=Decimal(per_hour))],
        effective_from=since,
    )
    return SpecAgreed(version=revision, record=spec)


def live_attempt() -> Attempt:
    record = AttemptRecord(
        attempt=AttemptId("att-1"),
        job=JobId("job-1"),
        tenant=ACME,
        number=1,
        epoch=1,
        generation=1,
        site=SITE,
        pool=POOL,
        devices=[GPU],
        kind=DeviceKind.GPU,
        account="u",
        state="running",
        why_here="",
        spec=None,
        spec_revision=0,
        offered_at=NOW,
        version=1,
    )
    return Attempt(record, wall_s=1_800)


def test_a_budget_counts_what_was_used_and_the_most_that_is_live() -> None:
    """An hour used at 10, half an hour of wall time live: 15 of 20 are committed. A revision agreed for tomorrow hides nothing."""
    world = known()
    allowance = Allowance(tenant=ACME, currency="CNY", amount=Decimal(20))
    for fact in (
        spec_fact(agreed(1, "10", NOW - timedelta(days=1)), NOW),
        spec_fact(agreed(2, "99", NOW + timedelta(days=1)), NOW),
        allowance_fact(AllowanceChanged(version=1, tenant=ACME, record=allowance), NOW),
    ):
        world.apply(fact)
    used = Used(ACME, SITE, POOL, DeviceKind.GPU, 3_600 * 1_000_000 * 1_000)
    given = RoundInput(queue=[], live=[live_attempt()], used=[used])
    snapshot = assemble(given, world, Sight(), Hearing(), now=NOW, now_s=100.0, local=NOON)
    (budget,) = snapshot.budgets
    assert (budget.amount, budget.committed) == (Decimal(20), Decimal(15))
    assert world.limited() == {ACME: NOW}


def test_without_a_limit_nothing_is_counted() -> None:
    world = known()
    free = Allowance(tenant=ACME, currency="CNY", amount=None)
    world.apply(allowance_fact(AllowanceChanged(version=1, tenant=ACME, record=free), NOW))
    given = RoundInput(queue=[], live=[live_attempt()])
    (budget,) = assemble(given, world, Sight(), Hearing(), now=NOW, now_s=100.0, local=NOON).budgets
    assert (budget.amount, budget.committed, world.limited()) == (None, Decimal(0), {})


def test_a_holding_is_the_attempts_devices() -> None:
    attempt = replace(live_attempt(), live=True)
    given = RoundInput(queue=[], live=[attempt])
    (held,) = assemble(given, known(), Sight(), Hearing(), now=NOW, now_s=100.0, local=NOON).holdings
    assert held.devices == (GPU,)
