"""Sites in pages: whatever the size of a page, every record is told once, in order."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from intertie.contracts.link import Lane, LaneState
from intertie.contracts.site import (
    Freshness,
    Lendable,
    Phase,
    PoolProfile,
    PoolRecord,
    SiteKind,
    SiteRecord,
    SitesReply,
    TaskType,
)
from intertie.ids import PoolName, SiteName
from intertie.registry.core import site
from intertie.registry.core.page import page

T0 = datetime(2026, 5, 1, tzinfo=UTC)


def a_site(name: str) -> SiteRecord:
    return SiteRecord(
        site=SiteName(name),
        kind=SiteKind.MACHINES,
        title="",
        owner="ann",
        single_user=True,
        owner_tenant="team-a",
        freshness=Freshness.FRESH,
        joined_at=T0,
        last_heard=T0,
        hears_us=True,
        clock_offset_s=None,
        agent_version="1",
        version=1,
    )


def a_pool(of: str, name: str) -> PoolRecord:
    profile = PoolProfile(
        pool=PoolName(name),
        accelerator="none",
        count=1,
        memory_mib=1,
        interconnect="none",
        task_types=[TaskType.BATCH],
        lendable=Lendable(devices=1),
    )
    return PoolRecord(
        site=SiteName(of),
        pool=PoolName(name),
        kind=SiteKind.MACHINES,
        profile=profile,
        phase=Phase.PILOT,
        cordoned=False,
        draining=False,
        cordon_reason="",
        freshness=Freshness.FRESH,
        last_heard=None,
        inventory=None,
        inventory_at=None,
        version=1,
    )


SITES = [a_site("b"), a_site("a"), a_site("b-2")]
POOLS = [a_pool("b", "p2"), a_pool("b", "p1"), a_pool("a", "p"), a_pool("b-2", "p")]


def pages(limit_bytes: int) -> list[SitesReply]:
    found = [page(SITES, POOLS, "", limit_bytes=limit_bytes)]
    while found[-1].next:
        found.append(page(SITES, POOLS, found[-1].next, limit_bytes=limit_bytes))
    return found


@pytest.mark.parametrize("limit_bytes", [1, 500, 1_000, 1_500, 2_000, 100_000])
def test_every_record_is_told_once_in_order_whatever_a_page_holds(limit_bytes: int) -> None:
    found = pages(limit_bytes)
    assert [s.site for reply in found for s in reply.sites] == ["a", "b", "b-2"]
    assert [(p.site, p.pool) for reply in found for p in reply.pools] == [("a", "p"), ("b", "p1"), ("b", "p2"), ("b-2", "p")]
    assert len(found) == (7 if limit_bytes == 1 else len(found)) and (limit_bytes < 100_000 or len(found) == 1)


def test_no_site_is_one_empty_page() -> None:
    assert page([], [], "") == SitesReply(sites=[], pools=[])


def test_a_lane_that_stands_is_named_until_it_moves_again() -> None:
    known = a_site("a")
    stands = site.lane_stands(known, Lane.REGISTRY, LaneState.CONTESTED)
    assert (stands.lanes, stands.version) == ({"registry": "contested"}, 2)
    assert site.why(known, stands) == "a lane of it stands still"
    assert site.ruled(stands, LaneState.CONTESTED, now=T0) is stands
    moves = site.ruled(stands, LaneState.BEHIND, now=T0)
    assert (moves.lanes, moves.version) == ({}, 3)


def test_a_site_that_joins_again_has_not_left() -> None:
    left = site.left(a_site("a"), at=T0)
    assert left.left_at == T0 and site.left(left, at=datetime(2027, 1, 1, tzinfo=UTC)) is left
