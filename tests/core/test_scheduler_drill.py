"""A planned drill travels in a site's settings, as the site's agent reads it, for as long as it is to be made."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from intertie.agent.drill import Asked, parse
from intertie.contracts.drill import DrillConsent, DrillKind, DrillRecord, DrillState
from intertie.ids import SiteName
from intertie.scheduler.core.world import World, drill_fact

AT = datetime(2026, 3, 1, 8, tzinfo=UTC)
SITE = SiteName("site-a")
CONSENT = DrillConsent(allowed=True, given="site", by="root", at=AT)


def record(**changed: Any) -> DrillRecord:
    made = DrillRecord(
        drill="drl-1",
        site=SITE,
        pool=None,
        kind=DrillKind.CUT,
        state=DrillState.PLANNED,
        seconds=600,
        start=AT + timedelta(minutes=5),
        asked_by="li",
        asked_at=AT,
        reason="",
        consent=CONSENT,
    )
    return msgspec.structs.replace(made, **changed)


def told(*records: DrillRecord) -> str:
    world = World()
    for one in records:
        world.apply(drill_fact(one, AT))
    return world.drill(SITE)


@pytest.mark.parametrize("state", [DrillState.PLANNED, DrillState.CUT])
def test_what_the_scheduler_writes_the_agent_reads(state: DrillState) -> None:
    assert parse(told(record(state=state))) == Asked(drill="drl-1", seconds=600, start=AT + timedelta(minutes=5), consent="site")


@pytest.mark.parametrize("state", [DrillState.BACK, DrillState.JUDGED, DrillState.CALLED_OFF])
def test_a_drill_that_is_over_is_told_no_more(state: DrillState) -> None:
    assert told(record(), record(state=state, version=2)) == ""


def test_a_late_word_of_an_older_drill_does_not_hide_the_newer_one() -> None:
    newer = record(drill="drl-2", asked_at=AT + timedelta(days=1))
    assert told(newer, record(state=DrillState.JUDGED, version=9)).startswith("drl-2/")


def test_a_site_without_a_drill_is_told_none() -> None:
    assert World().drill(SITE) == ""
