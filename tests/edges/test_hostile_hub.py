"""A hub that is broken, restored or not the one it was, as a site hears it: what it may cost is the hub's own work, never the owner's, never the
agent, never a second start."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.core.test_link_site import World as LaneWorld
from tests.core.test_link_site import settle, troubles
from tests.fakes.agents import offer
from tests.fakes.sites import World, a_site, settings

from intertie.agent.drill import parse, refusal
from intertie.agent.site import FASTEST_BEAT_S, SLOWEST_BEAT_S
from intertie.contracts.base import decode, encode
from intertie.contracts.drill import DrillConsent
from intertie.contracts.job import Cause
from intertie.contracts.link import (
    Claimed,
    Ended,
    Go,
    Instruction,
    NotStarted,
    SettingsApplied,
    Settle,
    SiteSettings,
    Started,
    Stop,
    StopAnswered,
    Synced,
    Withdraw,
)
from intertie.errors import Refused
from intertie.ids import AttemptId, InstructionId, JobId, JournalId, SiteName
from intertie.link.site import MOST_NUMBER, Take, Trouble
from intertie.trust.keys import Key
from intertie.trust.seal import seal

HUGE = 10**30
NOON = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)


# --- answers -----------------------------------------------------------------------------------------------------------------------------------

ANSWERS: list[tuple[str, dict[str, Any]]] = [
    ("an epoch that no service reaches", {"epoch": 2**62}),
    ("an epoch at the end of the numbers", {"epoch": HUGE}),
    ("an instruction of such an epoch", {"instructions": [settle(1, epoch=HUGE)]}),
    ("an instruction that no journal can number", {"instructions": [settle(2**63)]}),
    ("a revision that no table holds", {"settings_revision": MOST_NUMBER + 1}),
    ("entries that were never sent", {"ack_through": 5}),
    ("entries safe that are not acknowledged", {"safe_through": 5}),
    ("a clock before time", {"clock": datetime.fromisoformat("0001-01-01T00:00:00+23:59")}),
    ("a clock after time", {"clock": datetime.fromisoformat("9999-12-31T23:59:59-23:59")}),
]


@pytest.mark.parametrize("lies", [row[1] for row in ANSWERS], ids=[row[0] for row in ANSWERS])
def test_an_answer_that_cannot_be_is_not_taken_and_the_next_one_is(lies: dict[str, Any]) -> None:
    """What is taken is on disk for ever: an epoch that was believed once would be told to every keeper after."""
    world = LaneWorld(head=2)
    effects = world.hear(world.speak(), **lies)
    assert troubles(effects) == [Trouble.ANSWER]
    assert not [one for one in effects if isinstance(one, Take)]
    after = world.speak()
    assert (after.instruction_epoch, after.taken_nonce) == (0, 0)
    assert [one for one in world.hear(after) if isinstance(one, Take)]


def test_a_lease_longer_than_any_life_is_still_no_longer_than_the_offer_s() -> None:
    """`renewed` takes the smaller; here only that such an answer is one."""
    world = LaneWorld()
    assert [one for one in world.hear(world.speak(), lease_s=10**12) if isinstance(one, Take)]


@pytest.mark.parametrize("brackets", ["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000])
@pytest.mark.parametrize("kind", [Synced, SiteSettings, list[msgspec.Raw]])
def test_brackets_within_brackets_are_refused_as_any_other_nonsense(kind: Any, brackets: str) -> None:
    """Also in a field that nobody knows, or whose bytes are only kept: Python's own limit must not end a lane."""
    body = json.dumps(
        {"nonce": 1, "ack_through": 0, "safe_through": 0, "epoch": 1, "clock": "2026-01-01T00:00:00Z", "revision": 1, "site": "x"}
    )
    text = f"[{brackets}]" if kind not in (Synced, SiteSettings) else body[:-1] + f',"later":{brackets}}}'
    with pytest.raises(Refused) as refused:
        decode(text, kind)
    assert refused.value.code == "contract.invalid"


# --- instructions --------------------------------------------------------------------------------------------------------------------------------


def about(world: World, attempt: AttemptId) -> list[Instruction]:
    """Everything that a hub can say of an attempt."""
    named: dict[str, Any] = {"attempt": attempt, "job": JobId("job-x"), "generation": 1}
    return [
        Go(**world._next(), **named, journal=world.journal.id),  # type: ignore[arg-type]
        Withdraw(**world._next(), **named),  # type: ignore[arg-type]
        Stop(**world._next(), **named, reason="no", grace_s=0),  # type: ignore[arg-type]
        Settle(**world._next(), attempt=attempt),  # type: ignore[arg-type]
    ]


async def test_the_owner_s_own_work_is_no_business_of_the_hub_s(short_folder: Path) -> None:
    """Its attempts have ids like any other. Whoever guesses one ends nothing, and is told what a stranger would be told."""
    async with a_site(short_folder) as world:
        own = await world.site.owner.submit(name="own", script="exec sleep 60\n", env={}, cwd="/tmp", uid=os.geteuid())
        await world.tell(*about(world, own.id))
        held = world.site.books.attempts[own.id]
        assert (held.stop, own.id in world.site.books.tombstones) == (None, False)
        answers = [entry for entry in await world.entries() if not isinstance(entry, SettingsApplied)]
        assert [(type(one).__name__, getattr(one, "answer", "")) for one in answers] == [("StopAnswered", "unknown_attempt")]
        await world.site.owner.cancel(own.job, os.geteuid(), everyone=False)
        await world.site.idle()


async def test_a_go_for_another_journal_a_late_withdrawal_and_a_stop_of_nobody_change_no_run(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        runs, waits = offer(script="exec sleep 60\n"), offer(devices=("slot-2",))
        await world.run(runs)
        await world.first(Started)
        await world.tell(world.offered(waits))
        await world.tell(world.go(waits, JournalId("jnl-another")))
        await world.tell(world.withdraw(runs), world.go(runs), world.settle(runs))
        stranger = offer()
        await world.tell(world.stop(stranger), world.go(stranger))
        assert (await world.first(NotStarted)).attempt == waits.attempt
        assert (await world.first(StopAnswered)).answer == "unknown_attempt"
        assert world.site.books.attempts[runs.attempt].ended is None
        assert [one.attempt for one in await world.entries() if isinstance(one, Claimed)] == [runs.attempt, waits.attempt]
        await world.tell(world.stop(runs))
        end = await world.first(Ended)
        assert (end.attempt, end.cause) == (runs.attempt, Cause.CANCELLED)


async def test_one_instruction_that_no_journal_can_hold_costs_no_other(short_folder: Path) -> None:
    """The lane refuses it before (see above); here the journal itself, which must stay whole."""
    async with a_site(short_folder) as world:
        body = offer(script="exit 0\n")
        with pytest.raises((OverflowError, Refused)):
            await world.journal.take([Settle(id=InstructionId("ins-x"), number=2**63, epoch=1, attempt=body.attempt)])
        await world.run(body)
        assert (await world.first(Ended)).outcome == "succeeded"


# --- settings ------------------------------------------------------------------------------------------------------------------------------------

SETTINGS: list[tuple[str, dict[str, Any], int]] = [
    ("an older revision", {"revision": 1}, 1),
    ("the same revision with another content", {"revision": 5, "mappings": []}, 5),
    ("a revision under another number", {"revision": 3}, 7),
    ("another site's", {"revision": 9, "site": SiteName("other")}, 9),
]


@pytest.mark.parametrize(("lies", "told"), [row[1:] for row in SETTINGS], ids=[row[0] for row in SETTINGS])
async def test_settings_that_are_not_newer_and_this_site_s_change_nothing(short_folder: Path, lies: dict[str, Any], told: int) -> None:
    async with a_site(short_folder) as world:
        true = settings("acme", revision=5)
        await world.site.apply(seal(world.scheduler, encode(true), "scheduler"), 5)
        before = world.site.settings
        lie = seal(world.scheduler, encode(msgspec.structs.replace(true, **lies)), "scheduler")
        try:
            await world.site.apply(lie, told)
        except Refused as refused:
            assert refused.code == "agent.settings"
        assert world.site.settings == before


async def test_settings_of_another_seal_are_refused(short_folder: Path) -> None:
    async with a_site(short_folder) as world:
        with pytest.raises(Refused):
            await world.site.apply(seal(Key.new("U"), encode(settings(revision=9)), "scheduler"), 9)
        with pytest.raises(Refused):
            await world.site.apply(seal(world.scheduler, encode(offer()), "scheduler"), 9)
        assert world.site.settings.revision == 1


@pytest.mark.parametrize("beat_s", [0.0, -1.0, 1e308, 86_400.0])
async def test_no_beat_drives_a_site_mad_or_to_sleep(short_folder: Path, beat_s: float) -> None:
    async with a_site(short_folder) as world:
        told = msgspec.structs.replace(settings("acme", revision=2), telemetry_beat_s=beat_s, lane_beat_s=beat_s)
        await world.site.apply(seal(world.scheduler, encode(told), "scheduler"), 2)
        found = world.site.settings
        assert all(FASTEST_BEAT_S <= one <= SLOWEST_BEAT_S for one in (found.telemetry_beat_s, found.lane_beat_s))
    async with a_site(short_folder, scheduler=world.scheduler) as again:
        assert again.site.settings == found


# --- drills --------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "drl-1/31536000/2026-12-01T12:00:00+00:00/token",
        "drl-1/-5/2026-12-01T12:00:00+00:00/token",
        "drl-1/60/0001-01-01T00:00:00+23:59/token",
        "drl-1/60/9999-12-31T23:59:59-23:59/token",
        "drl-1/60/2026-12-01T12:00:00/token",
        "drl-1/1e9/2026-12-01T12:00:00+00:00/token",
        "drl-1/60/tomorrow/token",
        "drl-1/60",
        "/" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_a_drill_that_is_none_is_none(text: str) -> None:
    assert parse(text) is None


def test_what_the_owner_limited_or_took_back_at_the_site_stands_above_any_token() -> None:
    """That a token was given is the hub's word alone."""
    asked = parse("drl-1/600/2026-12-01T12:00:00+00:00/token")
    assert asked is not None

    def word(allowed: bool, longest_s: int) -> DrillConsent:
        return DrillConsent(allowed=allowed, given="site", by="ann", at=NOON - timedelta(days=1), longest_s=longest_s)

    assert refusal(asked, None, start=NOON) == ""
    assert refusal(asked, word(True, 900), start=NOON) == ""
    assert refusal(asked, word(True, 60), start=NOON) != ""
    assert refusal(asked, word(False, 900), start=NOON) != ""
