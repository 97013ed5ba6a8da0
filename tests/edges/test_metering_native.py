"""The third book at metering, on PostgreSQL and on its twin: what a site's lane brings of it, whom it is shown to, and what it is compared with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from tests.core.metering_world import OTHER_SITE, SITE, T0, ended, record, segment
from tests.core.test_metering_native import native
from tests.edges.metering_edge import OPERATOR, SCHEDULER, Edge, claims, opened
from tests.edges.test_metering_link import faults

from intertie.contracts.accounting import BypassUse, Differs, NativeDay, NativeRecord, ReconciliationQuery, SiteReconciliation
from intertie.contracts.base import encode
from intertie.contracts.identity import Role
from intertie.contracts.link import NativeAccounting
from intertie.errors import Denied, NotFound, Refused
from intertie.ids import DeviceId, SiteName
from intertie.metering.memory import MemoryMetering
from intertie.metering.native import NativeBooks
from intertie.metering.native_store import MemoryNative, PgNative
from intertie.metering.pg import PgMetering
from intertie.metering.service import trust
from intertie.trust.keys import Key
from intertie.trust.seal import seal

READ = T0 + timedelta(days=1)


@pytest.fixture(params=["memory", "pg"])
async def edge(request: pytest.FixtureRequest) -> AsyncIterator[Edge]:
    async with opened(request.param, request.getfixturevalue("pg") if request.param == "pg" else None) as made:
        store = made.store
        if isinstance(store, MemoryMetering):
            kept: MemoryNative | PgNative = MemoryNative(store)
        else:
            assert isinstance(store, PgMetering)
            kept = PgNative(store.db)
        made.service.native = NativeBooks(store, kept, made.lanes, trust(SCHEDULER.public), made.clock)
        made.wait(READ + timedelta(hours=1))
        yield made


def told(edge: Edge, *records: NativeRecord, key: Key | None = None, site: SiteName = SITE, **changes: object) -> NativeAccounting:
    day = NativeDay(site=site, cluster="c1", day="2026-12-01", read_at=READ, part=1, parts=1, records=list(records))
    day = msgspec.structs.replace(day, **changes)
    signer = key or edge.key
    return NativeAccounting(seq=1, at=READ, sealed=seal(signer, encode(day), signer.public))


async def finished(edge: Edge, number: int = 1) -> None:
    """An attempt of 100 s, complete in our books."""
    offered = record(number, devices=[DeviceId("slot-0")])
    one = segment(offered, 0, 100, last=True)
    await edge.tell(offered)
    await edge.send(one, offered)
    await edge.tell(msgspec.structs.replace(ended(offered, [one]), ran_us=100_000_000))


async def reconciled(edge: Edge) -> SiteReconciliation:
    assert edge.service.native is not None
    (found,) = (await edge.service.native.reconciliation(ReconciliationQuery(period="2026-12"), OPERATOR)).sites
    return found


async def test_three_books_that_agree_say_so(edge: Edge) -> None:
    await finished(edge)
    await edge.say(told(edge, native(), bypass=[BypassUse(account="lab", runs=2, device_us=5)]))
    found = await reconciled(edge)
    assert (found.our_runs, found.native_runs, found.counts_agree, found.compared, found.differences) == (1, 1, True, 1, [])
    assert (found.our_milli_us, found.native_milli_us, found.days_read) == (100_000_000_000, 100_000_000_000, 1)
    assert [use.account for use in found.bypass] == ["lab"]


async def test_a_ghost_a_missing_run_and_a_wrong_length_are_each_found_and_nothing_is_changed_by_it(edge: Edge) -> None:
    for number in (1, 2):
        await finished(edge, number)
    before = (await edge.book("att-1")).posted
    await edge.say(told(edge, native(0, 90), native(number=9)))
    found = await reconciled(edge)
    assert sorted((one.kind.value, str(one.attempt)) for one in found.differences) == [
        (Differs.DURATION.value, "att-1"),
        (Differs.EXTRA.value, "att-9"),
        (Differs.MISSING.value, "att-2"),
    ]
    assert (await edge.book("att-1")).posted == before
    await edge.check()


async def test_a_mapped_account_that_is_used_beside_us_is_told_to_people_and_attributed_to_nobody(edge: Edge) -> None:
    """BR-148: one that the site's admin started by hand under a service account is nobody's usage, and is seen."""
    await finished(edge)
    await edge.say(told(edge, native(), bypass=[BypassUse(account="iso-svc", runs=1, device_us=7)]))
    (fault,) = [one.report for one in await faults(edge) if one.report.kind == "metering.bypass"]
    assert fault.site == SITE and "account iso-svc: 1 runs on 2026-12-01" in fault.text
    found = await reconciled(edge)
    assert (found.counts_agree, found.differences) == (True, [])


async def test_books_that_differ_are_told_to_people_unasked_and_once_and_when_it_is_over(edge: Edge) -> None:
    """BR-058: orphans both ways are found by comparing, not by somebody's luck."""
    await finished(edge)

    async def told_of() -> list[tuple[bool, str]]:
        await edge.service.reconsider()
        return [(one.report.recovered, one.report.text) for one in await faults(edge) if one.report.kind == "metering.reconciliation"]

    await edge.say(told(edge, native(0, 50), native(number=9)))
    (first,) = await told_of()
    assert (first[0], "1 duration, 1 extra" in first[1], "intertie reconcile" in first[1]) == (False, True, True)
    await edge.say(told(edge, native(0, 50), native(number=9), read_at=READ + timedelta(minutes=10)))
    assert len(await told_of()) == 1
    await edge.say(told(edge, native(), read_at=READ + timedelta(minutes=20)))
    assert [recovered for recovered, _ in await told_of()] == [False, True]


async def test_differences_that_were_told_before_a_restart_are_over_when_books_agree(edge: Edge) -> None:
    await finished(edge)
    await edge.say(told(edge, native(0, 50)))
    await edge.service.reconsider()
    assert edge.service.native is not None
    edge.service.native._differed.clear()  # Another copy of the service goes on.
    await edge.say(told(edge, native(), read_at=READ + timedelta(minutes=20)))
    await edge.service.reconsider()
    assert [one.report.recovered for one in await faults(edge) if one.report.kind == "metering.reconciliation"] == [False, True]


async def test_a_reading_that_came_later_replaces_the_one_before_and_the_same_one_twice_is_one(edge: Edge) -> None:
    await finished(edge)
    early = told(edge, native(0, 50), read_at=READ - timedelta(hours=5))
    for entry in (early, told(edge, native()), told(edge, native()), early):
        await edge.say(entry)
    assert (await reconciled(edge)).differences == []


async def test_a_part_that_is_missing_leaves_the_day_unread(edge: Edge) -> None:
    await finished(edge)
    await edge.say(told(edge, parts=2))
    found = await reconciled(edge)
    assert (found.days_read, found.incomplete_days, found.differences) == (0, ["2026-12-01"], [])


async def test_what_no_key_of_the_site_proves_counts_for_nothing_until_one_does(edge: Edge) -> None:
    await finished(edge)
    stranger = Key.new("U")
    await edge.say(told(edge, native(0, 50), key=stranger))
    assert (await reconciled(edge)).incomplete_days == ["2026-12-01"]
    await edge.know_site(version=2, key=stranger)
    assert [one.kind for one in (await reconciled(edge)).differences] == [Differs.DURATION]


async def test_the_accounting_of_another_site_is_set_aside(edge: Edge) -> None:
    with pytest.raises(Refused) as refused:
        await edge.say(told(edge, native(), site=OTHER_SITE))
    assert refused.value.code == "metering.foreign_accounting"


@pytest.mark.parametrize("odd", [{"day": "2026-19-39"}, {"part": 2}, {"parts": 10_001}, {"cluster": "c\x00"}])
async def test_what_is_no_part_of_a_day_is_set_aside(edge: Edge, odd: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refused:
        await edge.say(told(edge, native(), **odd))
    assert refused.value.code == "metering.accounting"


async def test_an_owner_sees_the_own_site_and_a_tenant_none(edge: Edge) -> None:
    await edge.say(told(edge, native()))
    assert edge.service.native is not None
    ask = edge.service.native.reconciliation
    assert [one.site for one in (await ask(ReconciliationQuery(period="2026-12"), claims(Role.SITE_OWNER, site=SITE))).sites] == [SITE]
    assert (await ask(ReconciliationQuery(period="2026-12"), claims(Role.SITE_OWNER, site=OTHER_SITE))).sites == []
    with pytest.raises(NotFound):
        await ask(ReconciliationQuery(site=SITE), claims(Role.SITE_OWNER, site=OTHER_SITE))
    with pytest.raises(Denied):
        await ask(ReconciliationQuery(), claims(Role.TENANT_ADMIN, tenant="lab"))


async def test_a_site_without_a_book_of_its_own_is_not_listed_and_asked_by_name_says_that_nothing_was_read(edge: Edge) -> None:
    await finished(edge)
    assert edge.service.native is not None
    assert (await edge.service.native.reconciliation(ReconciliationQuery(period="2026-12"), OPERATOR)).sites == []
    (found,) = (await edge.service.native.reconciliation(ReconciliationQuery(site=SITE, period="2026-12"), OPERATOR)).sites
    assert (found.days_read, found.clusters, found.differences) == (0, [], [])
