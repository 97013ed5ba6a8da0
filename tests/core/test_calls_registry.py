"""What a site's telling of its call offerings makes of the records: new, declared otherwise, available or not, offered no more."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from intertie.contracts.base import encode
from intertie.contracts.call_offerings import CallOffering, CallPrice, CallProtocol, OfferingRecord, OfferingTold
from intertie.errors import Refused
from intertie.ids import OfferingName, SiteName, TenantName
from intertie.registry.call_offerings import visible
from intertie.registry.core.call_offerings import MOST_OFFERINGS, paged, take
from intertie.trust.rights import Scope

LAB, T0 = SiteName("lab"), datetime(2026, 12, 1, tzinfo=UTC)


def told(name: str = "chat", *, available: bool = True, reason: str = "", paused: bool = False, **changes: Any) -> OfferingTold:
    offering = CallOffering(name=OfferingName(name), protocol=CallProtocol.OPENAI, tenants=["acme"])
    return OfferingTold(offering=msgspec.structs.replace(offering, **changes), available=available, paused=paused, reason=reason)


def after(*tellings: list[OfferingTold]) -> dict[str, OfferingRecord]:
    known: dict[OfferingName, OfferingRecord] = {}
    for said in tellings:
        for record in take(known, said, site=LAB, at=T0, version=5):
            known[record.offering.name] = record
    return {str(name): record for name, record in known.items()}


def test_a_new_offering_begins_with_its_epochs_first_version() -> None:
    record = after([told()])["chat"]
    assert (record.revision, record.version, record.available, record.id) == (1, 5, True, "lab/chat")


def test_the_same_again_is_no_news() -> None:
    assert after([told()], [told()], [told()])["chat"].version == 5


def test_availability_is_news_and_no_revision() -> None:
    record = after([told()], [told(available=False, reason="its server does not answer")])["chat"]
    assert (record.revision, record.version, record.available, record.reason) == (1, 6, False, "its server does not answer")


def test_another_price_is_a_revision() -> None:
    record = after([told()], [told(price=CallPrice(per_call=Decimal("0.5")))])["chat"]
    assert (record.revision, record.version) == (2, 6)


def test_what_is_not_told_any_more_is_withdrawn_once_and_may_come_back() -> None:
    records = after([told(), told("other")], [told()], [told()])
    assert records["other"].withdrawn and not records["other"].available and records["other"].version == 6
    back = after([told(), told("other")], [told()], [told(), told("other")])["other"]
    assert not back.withdrawn and back.available and (back.revision, back.version) == (1, 7)


@pytest.mark.parametrize("said", [[told("A.b")], [told(), told()], [told(f"n{number}") for number in range(MOST_OFFERINGS + 1)]])
def test_what_cannot_be_offerings_is_refused_whole(said: list[OfferingTold]) -> None:
    with pytest.raises(Refused):
        take({}, said, site=LAB, at=T0, version=1)


@pytest.mark.parametrize(
    ("seen", "sees"),
    [
        (Scope(True, None, None), True),
        (Scope(False, TenantName("acme"), None), True),
        (Scope(False, TenantName("rival"), None), False),
        (Scope(False, None, LAB), True),
        (Scope(False, None, SiteName("rival")), False),
    ],
)
def test_an_offering_is_seen_by_those_who_may_call_it_its_owner_and_the_hub(seen: Scope, sees: bool) -> None:
    assert visible(after([told()])["chat"], seen) is sees


def test_more_than_an_answer_holds_is_told_page_by_page_and_each_once() -> None:
    records = list(after([told(f"chat-{n}", title="x" * 200) for n in range(40)]).values())[::-1]
    seen: list[str] = []
    pages, at = 0, ""
    while True:
        reply = paged(records, at, 4_000)
        seen += [one.id for one in reply.offerings]
        pages += 1
        if not reply.next:
            break
        assert reply.next > at and len(encode(reply)) < 5_000
        at = reply.next
    assert seen == sorted(one.id for one in records) and pages > 3
    assert [one.id for one in paged(records, "", 1).offerings] == [seen[0]], "one at least"
