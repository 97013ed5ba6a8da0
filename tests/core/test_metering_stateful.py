"""Whatever comes, in whatever order: after each step the ledger sums to zero and says what the segments prove. On the twin, by Hypothesis."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.core.metering_world import SITE, T0, TRUST, come, ended, key_event, record, segment, snapshot, spec

from intertie.contracts.job import AttemptRecord, Cause
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import AttemptSettled, Price, Segment
from intertie.ids import AttemptId
from intertie.metering.core.attribution import COUNTED, DECIDABLE
from intertie.metering.core.evidence import Decision, Evidence
from intertie.metering.core.ledger import EntryKind, held, is_hold, posted
from intertie.metering.core.payer import ending
from intertie.metering.core.reckon import change, reckon, whose
from intertie.metering.memory import MemoryMetering
from intertie.rating import rate

NUMBERS = st.integers(min_value=1, max_value=3)
ENDS = st.sampled_from(
    [("succeeded", None), ("failed", Cause.JOB), ("failed", Cause.SITE), ("failed", Cause.UNKNOWN), ("cancelled", Cause.CANCELLED)]
)


def agreed_for(number: int) -> AttemptRecord:
    """Attempt 3 was offered without an agreement."""
    return record(number, spec=None, spec_revision=0) if number == 3 else record(number)


def true_segments(number: int) -> list[Segment]:
    """What the site measured of an attempt: two runs and a queue that costs nothing."""
    of = agreed_for(number)
    return [segment(of, 0, 10 * number), segment(of, 10 * number, 10 * number + 7), segment(of, 100, 101)]


class Books(RuleBasedStateMachine):
    """News about three attempts of one site; the key and the agreement may come last."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryMetering()
        self.versions = dict.fromkeys((1, 2, 3), 0)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)

    async def apply(self, attempt: AttemptId, **news: Any) -> None:
        (before,) = await self.store.load([attempt], sites=[SITE])
        arrived = news.pop("arrived", None)
        after = replace(before, **news)
        if arrived is not None and all(arrived.key != item.key for item in before.received):
            after = replace(after, received=[*before.received, arrived])
        await self.store.save(change(before, reckon(after, TRUST, T0, "news")))

    @initialize()
    def world(self) -> None:
        self.run(self.store.agree(spec(), "ann"))

    @rule(number=NUMBERS, which=st.integers(min_value=0, max_value=2))
    def a_segment_comes(self, number: int, which: int) -> None:
        what = true_segments(number)[which]
        self.run(self.apply(what.attempt, arrived=come(what, which + 1)))

    @rule(number=NUMBERS)
    def a_forged_segment_comes(self, number: int) -> None:
        what = msgspec.structs.replace(true_segments(number)[0], quantity_milli=10**9)
        self.run(self.apply(what.attempt, arrived=come(what, 1, key="U-nobody")))

    @rule(number=NUMBERS, state=st.sampled_from(["offered", "claimed", "running", "withdrawn"]))
    def the_scheduler_says(self, number: int, state: str) -> None:
        self.tell(msgspec.structs.replace(agreed_for(number), state=state), number)

    @rule(number=NUMBERS, end=ENDS, count=st.integers(min_value=0, max_value=3))
    def the_scheduler_says_it_ended(self, number: int, end: tuple[str, Cause | None], count: int) -> None:
        outcome, cause = end
        self.tell(ended(agreed_for(number), true_segments(number)[:count], outcome=outcome, cause=cause, last=3), number)

    @rule(number=NUMBERS)
    def the_scheduler_closes_it_as_lost(self, number: int) -> None:
        self.tell(msgspec.structs.replace(agreed_for(number), state="lost", started_at=T0, ended_at=T0), number)

    @rule(number=NUMBERS, end=ENDS, refined=st.booleans(), replaced=st.booleans())
    def the_scheduler_says_how_it_ended_late_or_beside_another(
        self, number: int, end: tuple[str, Cause | None], refined: bool, replaced: bool
    ) -> None:
        outcome, cause = end
        told = ended(agreed_for(number), true_segments(number), outcome=outcome, cause=cause, last=3)
        other = AttemptId("att-other") if replaced else None
        self.tell(msgspec.structs.replace(told, refined=refined, replaced_by=other), number)

    @rule(number=NUMBERS)
    def a_person_releases_what_waits_for_one(self, number: int) -> None:
        (before,) = self.run(self.store.load([agreed_for(number).attempt], sites=[SITE]))
        decided = [
            replace(item, decisions=(Decision(item.suspense, "ann", "looked at", T0),))
            if item.suspense in DECIDABLE and not item.decisions
            else item
            for item in before.received
        ]
        after = reckon(replace(before, received=decided), TRUST, T0, "released")
        self.run(self.store.save(change(before, after)))

    @rule(number=NUMBERS, longer=st.sampled_from([3, 20_000]))
    def a_second_content_of_a_segment_comes(self, number: int, longer: int) -> None:
        first = true_segments(number)[0]
        what = msgspec.structs.replace(first, end=first.end + timedelta(seconds=longer))
        self.run(self.apply(what.attempt, arrived=come(what, 9)))

    def tell(self, told: AttemptRecord, number: int) -> None:
        self.versions[number] += 1
        told = msgspec.structs.replace(told, version=self.versions[number])
        self.run(self.apply(told.attempt, snapshot=snapshot(told)))

    @rule()
    def the_site_s_key_comes(self) -> None:
        self.run(self.store.learn_key(key_event(version=len(self.store.site_keys) + 1)))
        self.look_again()

    @rule(price=st.sampled_from([6, 60]))
    def another_revision_is_agreed(self, price: int) -> None:
        last = max(self.store.agreed, key=lambda s: s.revision)
        prices = [Price(kind=DeviceKind.SLOT, per_hour=Decimal(price))]
        self.run(self.store.agree(msgspec.structs.replace(last, revision=last.revision + 1, prices=prices), "ann"))
        self.look_again()

    @rule()
    def look_again(self) -> None:
        for attempt in self.run(self.store.waiting("", 100)):
            self.run(self.apply(attempt))

    def evidence(self) -> list[Evidence]:
        found: list[Evidence] = self.run(self.store.load(self.run(self.store.every("", 100))))
        return found

    @invariant()
    def every_entry_and_so_the_ledger_sums_to_zero(self) -> None:
        assert self.run(self.store.totals()).sum == 0
        for entry in self.store.entries:
            assert sum((leg.amount for leg in entry.legs), Decimal(0)) == 0

    @invariant()
    def what_is_posted_is_what_the_segments_rate_to(self) -> None:
        for one in self.evidence():
            again = reckon(one, TRUST, T0)
            counts = [item.segment for item in one.received if not item.suspense]
            if counts and again.spec and one.record:
                due = rate(counts, again.spec, *ending(one.record), whose(one.record)).amount
                assert posted(one.balances) == due
            else:
                assert posted(one.balances) == 0

    @invariant()
    def what_was_told_before_stays_and_an_adjustment_cites_it(self) -> None:
        for number, entry in enumerate(self.store.entries, 1):
            assert (entry.kind is EntryKind.ADJUST) == (entry.cites > 0)
            if entry.cites:
                assert entry.cites < number and self.store.entries[entry.cites - 1].attempt == entry.attempt

    @invariant()
    def closed_attempts_hold_nothing_and_open_ones_their_estimate(self) -> None:
        for one in self.evidence():
            again = reckon(one, TRUST, T0)
            assert held(one.balances) == again.hold
            if again.closed:
                assert not any(is_hold(account) for account, _ in one.balances)

    @invariant()
    def nothing_counts_that_was_not_proven(self) -> None:
        for one in self.evidence():
            assert all(item.proven for item in one.received if item.suspense in COUNTED)

    @invariant()
    def each_settlement_has_a_version_of_its_own(self) -> None:
        told = [(event.attempt, event.version) for event in self.store.events if isinstance(event, AttemptSettled)]
        assert len(told) == len(set(told))


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
