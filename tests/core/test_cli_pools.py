"""What the commands about pools, requests and books make of what people type, and what they print of a record."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import click
import msgspec
import pytest
from tests.core.test_planner_requests import OFFERING
from tests.core.test_registry_modes import POOL, SITE, T0, pool

from intertie.cli.pools import decided_lines, path_of, told, window_of
from intertie.cli.reconcile import hours, kind_text
from intertie.contracts.accounting import Differs
from intertie.contracts.modes import PoolHistoryRow, PoolMove
from intertie.contracts.site import AccessMode, Downtime, Phase

FAR = datetime(2999, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("name", ["site", "site/", "/pool", "a/b/c", ""])
def test_a_pool_is_named_with_its_site(name: str) -> None:
    with pytest.raises(click.BadParameter):
        path_of(name)


@pytest.mark.parametrize(
    ("start", "end", "hours_after", "length_h"),
    [("now", "2h", 0, 2), ("2d", "4h", 48, 4), ("2h", "2026-12-01T14:00", 2, 4), ("18:00", "20:00", 10, 2), ("18:00", "06:00", 10, 12)],
)
def test_a_window_s_end_counts_from_its_start(start: str, end: str, hours_after: float, length_h: float) -> None:
    began, over = window_of(start, end, T0)
    assert (began - T0, over - began) == (timedelta(hours=hours_after), timedelta(hours=length_h))


def test_a_pool_shows_its_decision_whom_it_is_for_and_what_it_offers() -> None:
    down = Downtime(id="dwn-1", start=FAR, end=FAR + timedelta(hours=1), planned=True, reason="racks", declared_by="ann", declared_at=T0)
    record = pool(phase=Phase.PILOT, tenants=["acme"], downtimes=[down], offerings=[OFFERING])
    lines = decided_lines(record)
    assert f"{SITE}/{POOL} is managed: decided by lab (declared at joining)" in lines[0]
    assert lines[1] == "an outsider decides: yes · response time held: not asked"
    assert (lines[2], "planned" in lines[3], "racks" in lines[3]) == ("for acme only", True, True)
    assert lines[4].startswith("job offering train: up to 4 devices for 7200 s, 6 CNY per device-hour, answered within 600 s by a person")


def test_a_pool_that_is_declared_otherwise_than_decided_says_that_nothing_begins() -> None:
    record = pool()
    other = msgspec.structs.replace(record, profile=msgspec.structs.replace(record.profile, mode=AccessMode.SERVICE))
    assert any("decided managed, declared service: nothing new begins" in line for line in decided_lines(other))
    assert decided_lines(msgspec.structs.replace(record, decision=None)) == ["no decision on record: intertie pool mode site-a/pool-a"]


def test_a_move_is_told_with_the_agreement_that_it_rests_on() -> None:
    move = PoolMove(before=Phase.PILOT, after=Phase.PARALLEL, reason="good weeks", spec="spec-1 rev 2")
    assert told(PoolHistoryRow(number=3, at=T0, by="ann", move=move)) == ("pilot → parallel [spec-1 rev 2]", "good weeks")


def test_card_hours_are_told_and_what_is_not_known_is_not_zero() -> None:
    assert (hours(3_600_000_000_000), hours(0), hours(None)) == ("1.0000", "0.0000", "unknown")
    assert all(kind_text(kind) for kind in Differs)
