"""What every contract refuses at the door, whatever its noun: moments without an offset, numbers that are none."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from intertie.contracts.base import Contract, Instant, Problem, Text, decode, encode, may_hold_decimal, place_of_nul, without_nul
from intertie.contracts.link import Claimed, Ended, Sync
from intertie.contracts.site import PoolProfile
from intertie.contracts.usage import Price, Statement
from intertie.errors import Refused


class Told(Contract, frozen=True, kw_only=True):
    at: Instant
    text: Text = ""


@pytest.mark.parametrize("text", ["2026-11-01T01:30:00", "2026-10-25T02:30", "2026-10-25 02:30:00", "2026-10-25", "1780000000", "-1"])
def test_a_moment_without_an_offset_is_refused(text: str) -> None:
    """BR-079: nothing behind the door has to guess which 02:30 of the night of 25 October was meant."""
    with pytest.raises(Refused) as told:
        decode(f'{{"at": "{text}"}}', Told)
    assert told.value.code == "contract.invalid" and "$.at" in told.value.text


def test_both_half_past_twos_of_a_night_are_two_moments() -> None:
    """BR-079: three hours from 01:30 to 03:30 when the clock is put back, one when it is put forward."""
    first, second, autumn, spring = (
        decode(f'{{"at": "{text}"}}', Told).at
        for text in (
            "2026-10-25T02:30:00+02:00",
            "2026-10-25T02:30:00+01:00",
            "2026-10-25T01:30:00+02:00",
            "2026-03-29T01:30:00+01:00",
        )
    )
    assert second - first == timedelta(hours=1)
    assert decode('{"at": "2026-10-25T03:30:00+01:00"}', Told).at - autumn == timedelta(hours=3)
    assert decode('{"at": "2026-03-29T03:30:00+02:00"}', Told).at - spring == timedelta(hours=1)


def test_a_number_that_is_none_is_refused_at_its_place() -> None:
    for amount in ('"NaN"', '"Infinity"', '"-Infinity"', '"1e"', "true"):
        with pytest.raises(Refused, match="per_hour"):
            decode(f'{{"kind": "gpu", "per_hour": {amount}}}', Price)


def test_a_decimal_is_looked_for_wherever_one_can_be() -> None:
    """Each type is looked into once: at any depth, through unions, lists, maps and types that hold themselves."""
    assert may_hold_decimal(Price) and may_hold_decimal(Statement) and may_hold_decimal(Problem)
    assert may_hold_decimal(dict[str, list[Price | None]]) and may_hold_decimal(tuple[int, Price])
    assert not may_hold_decimal(Sync) and not may_hold_decimal(Claimed | Ended) and not may_hold_decimal(list[PoolProfile])


def test_a_nul_is_found_and_replaced_at_any_depth() -> None:
    """A job's script inside what a site took in, a reason inside a pause: no text of PostgreSQL holds one, and nothing else of the value changes."""
    given: dict[str, Any] = {"plain": [Told(at=datetime(2026, 12, 1, tzinfo=UTC), text="a\x00b"), 3, None], "ke\x00y": ("x", "y\x00")}
    assert place_of_nul(given) == "$['plain'][0].text"
    clean = without_nul(given)
    assert clean["plain"][0].text == "a\ufffdb" and clean["ke\ufffdy"] == ("x", "y\ufffd") and place_of_nul(clean) == ""
    assert place_of_nul({"k\x00": 1}) and place_of_nul("\x00") == "$"
    whole = [Told(at=datetime(2026, 12, 1, tzinfo=UTC), text="ab")]
    assert without_nul(whole) is whole


def test_a_field_that_is_not_known_yet_is_passed_over() -> None:
    """An older reader of a newer message (DESIGN 6)."""
    at = datetime(2026, 12, 1, tzinfo=UTC)
    assert decode(encode({"at": at, "mood": {"deep": [1, None]}}), Told) == Told(at=at)
