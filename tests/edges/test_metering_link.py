"""Metering behind a broken link, on PostgreSQL and on its twin: periods told and missing, journals opened anew, evidence lost and late, and what a
person decides about what waits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from tests.core.metering_world import OTHER_SITE, SITE, T0, TENANT, at, ended, record, segment
from tests.edges.metering_edge import OPERATOR, SCHEDULER, Edge, claims, opened

from intertie.contracts.base import decode, encode
from intertie.contracts.identity import AuditQuery, Role
from intertie.contracts.incident import FaultReported
from intertie.contracts.job import AttemptRecord, Cause
from intertie.contracts.link import IslandedGrant
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import ReleaseSegment, Segment, SpecsQuery, SuspenseQuery, WhoPays
from intertie.errors import Denied, NotFound, Refused
from intertie.ids import JobId
from intertie.metering.memory import MemoryMetering
from intertie.metering.pg import PgMetering
from intertie.store import Violated
from intertie.store.queries import Query
from intertie.trust.keys import Key
from intertie.trust.seal import seal

ZERO = Decimal(0)


@pytest.fixture(params=["memory", "pg"])
async def edge(request: pytest.FixtureRequest) -> AsyncIterator[Edge]:
    """Metering that knows site-a's key and has agreed to the standard terms."""
    async with opened(request.param, request.getfixturevalue("pg") if request.param == "pg" else None) as made:
        yield made


async def cited(edge: Edge, number: int = 1, **changes: Any) -> AttemptRecord:
    (agreed,) = (await edge.service.specs(SpecsQuery(), OPERATOR)).specs
    return record(number, **{"spec": agreed.spec, "spec_revision": agreed.revision, **changes})


def running(of: AttemptRecord) -> AttemptRecord:
    return msgspec.structs.replace(of, state="running", started_at=T0, version=of.version + 1)


async def faults(edge: Edge) -> list[FaultReported]:
    """What people were told of, as the outbox of either store holds it."""
    if isinstance(edge.store, MemoryMetering):
        return [event for event in edge.store.events if isinstance(event, FaultReported)]
    assert isinstance(edge.store, PgMetering)
    async with edge.store.db.transaction(read_only=True) as tx:
        rows = await tx.all(Query("SELECT body FROM outbox WHERE type = $1 ORDER BY id", "told", ""), FaultReported.TYPE)
    return [decode(bytes(row["body"]), FaultReported) for row in rows]


async def kinds(edge: Edge) -> list[tuple[str, bool]]:
    """(kind, whether it cites another) of every ledger entry, in order."""
    if isinstance(edge.store, MemoryMetering):
        return [(str(entry.kind), entry.cites > 0) for entry in edge.store.entries]
    assert isinstance(edge.store, PgMetering)
    async with edge.store.db.transaction(read_only=True) as tx:
        rows = await tx.all(Query("SELECT kind, cites IS NOT NULL AS cites FROM entry ORDER BY id", "told", ""))
    return [(row["kind"], row["cites"]) for row in rows]


# --- a site's word on a period ---------------------------------------------------------------------------------------------------------------


async def december(edge: Edge) -> tuple[AttemptRecord, list[Segment], Any]:
    """An attempt that ran over December's end, cut there; the clock stands in January."""
    offered = await cited(edge, offered_at=T0)
    statement = await edge.statement("2026-12")
    border = (statement.end - T0).total_seconds()
    cut = [segment(offered, border - 10, border, cause="period"), segment(offered, border, border + 5, cause="ended", last=True)]
    edge.wait(statement.end + timedelta(days=1))
    await edge.tell(running(offered))
    return offered, cut, statement


async def test_a_closed_period_says_for_each_site_whether_all_of_its_usage_is_here(edge: Edge) -> None:
    """LINK D13: missing and late do not look the same when a period is closed."""
    offered, (first, second), open_statement = await december(edge)
    assert open_statement.sites == []
    await edge.send(second, offered)
    (said_nothing,) = (await edge.statement("2026-12")).sites
    assert (said_nothing.state, said_nothing.last_heard) == ("not_said", edge.clock.now())
    await edge.say(edge.period("2026-12", open_statement.start, open_statement.end, [first]))
    (missing,) = (await edge.statement("2026-12")).sites
    assert (missing.state, missing.missing_segments, missing.said_at) == ("missing", 1, edge.clock.now())
    (named,) = (await edge.check()).periods
    assert (named.site, named.period, named.state) == (SITE, "2026-12", "missing")
    await edge.send(first, offered)
    (complete,) = (await edge.statement("2026-12")).sites
    assert complete.state == "complete"
    assert (await edge.check()).periods == []
    assert (await edge.statement("2027-01")).sites == []


async def test_an_attempt_cut_at_a_border_is_complete_with_both_sides_and_both_statements_add_up(edge: Edge) -> None:
    offered, cut, _ = await december(edge)
    for one in cut:
        await edge.send(one, offered)
    await edge.tell(ended(running(offered), cut))
    book = await edge.book(offered.attempt)
    assert (book.complete, book.segments) == (True, 2)
    totals = [(await edge.statement(period)).total for period in ("2026-12", "2027-01")]
    assert sum(totals, ZERO) == book.posted == Decimal("0.0250")
    await edge.check()


async def test_counts_said_again_after_something_came_late_are_the_ones_in_force(edge: Edge) -> None:
    offered, (first, second), statement = await december(edge)
    early = segment(offered, 0, 6)
    for one in (first, second, early):
        await edge.send(one, offered)
    once, again = (edge.period("2026-12", statement.start, statement.end, counted) for counted in ([first], [early, first]))
    await edge.say(once)
    assert [site.state for site in (await edge.statement("2026-12")).sites] == ["differs"]
    await edge.say(again)
    await edge.open_journal("jnl-new")
    await edge.say(once)
    assert [site.state for site in (await edge.statement("2026-12")).sites] == ["complete"]


async def test_a_word_under_a_key_that_comes_later_counts_from_then_on(edge: Edge) -> None:
    offered, (first, _), statement = await december(edge)
    await edge.send(first, offered)
    late = Key.new("U")
    await edge.say(edge.period("2026-12", statement.start, statement.end, [first], key=late))
    assert [site.state for site in (await edge.statement("2026-12")).sites] == ["not_said"]
    await edge.know_site(version=2, key=late)
    await edge.service.reconsider()
    assert [site.state for site in (await edge.statement("2026-12")).sites] == ["complete"]


async def test_a_site_cannot_close_another_s_period(edge: Edge) -> None:
    word = edge.period("2026-12", T0, at(10), [segment(record(), 0, 6)])
    with pytest.raises(Refused, match="cannot say"):
        await edge.say(word, OTHER_SITE)


# --- journals opened anew, evidence lost ----------------------------------------------------------------------------------------------------------


async def test_what_is_said_again_under_new_numbers_changes_nothing(edge: Edge) -> None:
    """LINK D2: the segments are known by their ids and bytes, whatever number they have now."""
    offered = await cited(edge)
    parts = [segment(offered, 0, 6), segment(offered, 6, 9)]
    await edge.tell(running(offered))
    await edge.send(parts[0], offered)
    await edge.open_journal("jnl-2")
    for one in parts:
        await edge.send(one, offered)
    await edge.open_journal("jnl-3")
    for one in parts:
        await edge.send(one, offered)
    await edge.tell(ended(running(offered), parts))
    book = await edge.book(offered.attempt)
    assert (book.complete, book.segments, book.posted, book.in_suspense) == (True, 2, Decimal("0.0150"), 0)
    assert [kind for kind, _ in await kinds(edge)] == ["hold", "post", "post", "release"]
    await edge.check()


async def test_what_only_a_new_journal_tells_is_complete_although_its_numbers_are_higher(edge: Edge) -> None:
    offered = await cited(edge)
    only = segment(offered, 0, 6)
    await edge.open_journal("jnl-1")
    await edge.open_journal("jnl-2")
    await edge.send(only, offered)
    await edge.tell(ended(running(offered), [only], last=1))
    assert (await edge.book(offered.attempt)).complete


async def test_evidence_that_nobody_has_is_on_the_statement_in_the_check_and_an_incident_once(edge: Edge) -> None:
    offered = await cited(edge)
    await edge.tell(running(offered))
    await edge.send(segment(offered, 0, 6), offered)
    for journal in ("jnl-2", "jnl-3"):
        await edge.open_journal(journal)
        await edge.say(edge.lost_range("jnl-site-a", 4, 10))
    (told,) = (await edge.statement()).lost
    assert (told.site, told.journal, told.first, told.last, told.entries, told.proven) == (SITE, "jnl-site-a", 4, 10, 7, True)
    assert (await edge.check()).lost == [told]
    (fault,) = await faults(edge)
    assert (fault.report.kind, fault.report.site, fault.report.title) == (
        "lane.lost_range",
        SITE,
        "Entries of site site-a on lane metering are lost",
    )
    assert "7 entries of usage" in fault.report.text


async def test_what_another_site_lost_is_not_on_this_tenant_s_statement(edge: Edge) -> None:
    offered = await cited(edge)
    await edge.tell(running(offered))
    await edge.say(edge.lost_range("jnl-b", 1, 2, key=Key.new("U")), OTHER_SITE)
    assert (await edge.statement()).lost == []
    assert [(one.site, one.proven) for one in (await edge.check()).lost] == [(OTHER_SITE, False)]


# --- late evidence and replaced attempts ------------------------------------------------------------------------------------------------------


async def test_br_056_a_lost_attempt_costs_nobody_and_what_comes_later_is_an_adjustment(edge: Edge) -> None:
    """LINK D22: closed at the promised date, refined once; the entry of the time before stays and is cited."""
    offered = await cited(edge)
    parts = [segment(offered, 0, 6), segment(offered, 6, 9)]
    await edge.tell(running(offered))
    await edge.send(parts[0], offered)
    assert (await edge.book(offered.attempt)).hold == Decimal("6.0000")
    lost = msgspec.structs.replace(running(offered), state="lost", ended_at=at(86_400), version=3)
    await edge.tell(lost)
    book = await edge.book(offered.attempt)
    assert (book.because, book.hold, book.complete, book.state) == ("lost", ZERO, False, "lost")
    statement = await edge.statement()
    assert (statement.total, statement.disputed) == (ZERO, Decimal("0.0100"))
    assert statement.incomplete[0].startswith(f"{offered.attempt}: closed as lost on ")
    await edge.check()
    await edge.tell(msgspec.structs.replace(ended(lost, parts), refined=True))
    assert (await edge.book(offered.attempt)).hold == ZERO
    await edge.send(parts[1], offered)
    book = await edge.book(offered.attempt)
    assert (book.because, book.refined, book.complete, book.posted, book.hold) == ("", True, True, Decimal("0.0150"), ZERO)
    statement = await edge.statement()
    assert (statement.total, statement.disputed, statement.incomplete) == (Decimal("0.0150"), ZERO, [])
    told = await kinds(edge)
    assert told[:2] == [("hold", False), ("post", False)]
    assert [kind for kind, _ in told[2:]] == ["post", "release", "adjust", "adjust"]
    assert all(cites == (kind == "adjust") for kind, cites in told)
    await edge.check()


async def test_br_053_the_platform_pays_what_it_could_not_hear_and_the_tenant_the_one_result(edge: Edge) -> None:
    original = await cited(edge, 1)
    again = await cited(edge, 2, job=original.job)
    first, second = segment(original, 0, 6), segment(again, 10, 19)
    await edge.tell(running(original))
    await edge.tell(msgspec.structs.replace(running(original), replaced_by=again.attempt, version=3))
    await edge.tell(running(again))
    await edge.send(second, again)
    await edge.tell(ended(running(again), [second]))
    await edge.send(first, original)
    silent = msgspec.structs.replace(running(original), replaced_by=again.attempt, version=3)
    await edge.tell(ended(silent, [first], outcome="cancelled", cause=Cause.PLATFORM))
    statement = await edge.statement()
    (line,) = statement.lines
    assert [(book.because, book.other_attempt, book.charges[0].payer) for book in line.attempts] == [
        ("replaced", again.attempt, WhoPays.PLATFORM),
        ("", None, WhoPays.TENANT),
    ]
    assert (statement.total, statement.paid_by_others, line.amount) == (Decimal("0.0150"), Decimal("0.0100"), Decimal("0.0150"))
    await edge.check()


async def test_an_original_that_had_finished_after_all_is_the_tenant_s_and_its_replacement_the_platform_s(edge: Edge) -> None:
    original = await cited(edge, 1)
    again = await cited(edge, 2, job=original.job)
    first, second = segment(original, 0, 6), segment(again, 10, 19)
    replaced = msgspec.structs.replace(running(original), replaced_by=again.attempt, version=3)
    for one in (replaced, running(again)):
        await edge.tell(one)
    await edge.send(second, again)
    await edge.send(first, original)
    assert [(await edge.statement()).total, (await edge.statement()).paid_by_others] == [Decimal("0.0150"), Decimal("0.0100")]
    await edge.tell(ended(replaced, [first]))
    stopped = msgspec.structs.replace(running(again), replaced_by=original.attempt, version=3)
    await edge.tell(ended(stopped, [second], outcome="cancelled", cause=Cause.PLATFORM))
    statement = await edge.statement()
    assert (statement.total, statement.paid_by_others, statement.disputed) == (Decimal("0.0100"), Decimal("0.0150"), ZERO)
    await edge.check()


# --- islanded allowances -----------------------------------------------------------------------------------------------------------------------


async def test_usage_taken_in_under_an_islanded_allowance_is_posted_and_what_exceeds_it_is_listed(edge: Edge) -> None:
    """LINK D24: recorded, shown, never refused; the scheduler's record may come after the segments, and be a week younger."""
    agreed = await cited(edge)
    taken = record(
        7, spec=agreed.spec, spec_revision=agreed.spec_revision, offered_at=at(7 * 86_400), islanded_submit=True, job=JobId("job-local-7")
    )
    allowance = IslandedGrant(
        grant="site-a/lab/slot/1",
        tenant=TENANT,
        site=SITE,
        kind=DeviceKind.SLOT,
        devices=1,
        quantity_milli_us=4_000_000_000,
        valid_until=at(5),
        spec=agreed.spec,
        spec_revision=agreed.spec_revision,
    )
    run = msgspec.structs.replace(segment(taken, 0, 6), islanded=True, attribution=seal(SCHEDULER, encode(allowance), "scheduler"))
    edge.wait(at(7 * 86_400))
    await edge.send(run, None)
    assert (await edge.book(taken.attempt)).in_suspense == 1
    await edge.tell(ended(msgspec.structs.replace(running(taken)), [run]))
    book = await edge.book(taken.attempt)
    assert (book.complete, book.posted, book.in_suspense) == (True, Decimal("0.0100"), 0)
    assert (book.grant, book.grant_expired) == ("site-a/lab/slot/1", True)
    statement = await edge.statement()
    assert [(one.why, one.beyond_milli_us) for one in statement.beyond] == [("quantity", 2_000_000_000), ("expired", 1_000_000_000)]
    assert statement.total == Decimal("0.0100")
    await edge.check()


# --- what a person decides ----------------------------------------------------------------------------------------------------------------------


async def release(edge: Edge, what: Segment, reason: str = "the site's clock was off; its log agrees", **changes: Any) -> Any:
    return await edge.service.release_suspense(ReleaseSegment(segment=what.id, reason=reason, **changes), OPERATOR)


async def test_a_person_releases_what_ran_over_its_wall_limit_and_is_named(edge: Edge) -> None:
    offered = await cited(edge)
    long = segment(offered, 0, 7_200)
    await edge.tell(ended(running(offered), [long]))
    edge.wait(at(7_200))
    await edge.send(long, offered)
    (waits,) = (await edge.service.suspense(SuspenseQuery(), OPERATOR)).segments
    assert (waits.segment, waits.reason, waits.needs_person, waits.tenant) == (long.id, "over_wall", True, TENANT)
    book = await release(edge, long)
    assert (book.complete, book.posted, book.in_suspense) == (True, Decimal("12.0000"), 0)
    assert (await edge.service.suspense(SuspenseQuery(), OPERATOR)).segments == []
    audit = (await edge.store.read_audit(AuditQuery()))[0]
    assert (audit.action, audit.target, audit.reason) == (
        "suspense.release",
        f"{long.id} (over_wall)",
        "the site's clock was off; its log agrees",
    )
    (held,) = await edge.store.load([offered.attempt])
    assert [(one.lifts, one.who) for one in held.received[0].decisions] == [("over_wall", "ann (p-1)")]
    assert held.received[0].segment.id == long.id
    # Whatever comes later, the decision stays.
    await edge.tell(msgspec.structs.replace(ended(running(offered), [long]), version=9))
    assert (await edge.book(offered.attempt)).posted == Decimal("12.0000")
    await edge.check()


async def test_br_085_a_corrected_content_counts_by_a_person_s_word_and_the_first_stays_on_record(edge: Edge) -> None:
    offered = await cited(edge)
    first = segment(offered, 0, 6)
    longer = segment(offered, 0, 9, id=first.id)
    await edge.tell(running(offered))
    await edge.send(first, offered)
    await edge.send(longer, offered)
    book = await edge.book(offered.attempt)
    assert (book.posted, book.in_suspense) == (Decimal("0.0100"), 1)
    book = await release(edge, longer)
    assert (book.posted, book.in_suspense, book.segments) == (Decimal("0.0150"), 0, 1)
    assert (await edge.check()).suspense_segments == 0
    (held,) = await edge.store.load([offered.attempt])
    assert [item.suspense for item in held.received] == ["superseded", ""]
    await edge.tell(ended(running(offered), [longer], last=2))
    assert (await edge.book(offered.attempt)).complete
    await edge.check()


async def test_what_waits_for_evidence_no_person_can_release(edge: Edge) -> None:
    offered = await cited(edge)
    forged = segment(offered, 0, 6)
    await edge.tell(running(offered))
    await edge.send(forged, offered, key=Key.new("U"))
    with pytest.raises(Refused, match="no person can decide that"):
        await release(edge, forged)
    with pytest.raises(NotFound):
        await release(edge, segment(offered, 1, 2))
    with pytest.raises(Refused, match="says why"):
        await release(edge, forged, "  ")


async def test_of_two_contents_that_wait_one_is_named(edge: Edge) -> None:
    offered = await cited(edge)
    one = segment(offered, 0, 7_200)
    other = segment(offered, 0, 7_300, id=one.id)
    edge.wait(at(7_300))
    await edge.tell(running(offered))
    await edge.send(one, offered)
    await edge.send(other, offered)
    with pytest.raises(Refused, match="2 contents") as refused:
        await release(edge, one)
    waiting = (await edge.service.suspense(SuspenseQuery(site=SITE), OPERATOR)).segments
    assert all(each.digest in refused.value.next_step for each in waiting)
    assert (await release(edge, one, digest=waiting[0].digest)).posted == Decimal("12.0000")
    assert (await edge.service.suspense(SuspenseQuery(site=OTHER_SITE), OPERATOR)).segments == []


async def test_only_who_answers_for_the_platform_releases(edge: Edge) -> None:
    ask = ReleaseSegment(segment=segment(record(), 0, 6).id, reason="mine")
    for who in (claims(Role.TENANT_ADMIN, tenant=TENANT), claims(Role.SITE_OWNER, site=SITE), claims(Role.AUDITOR)):
        with pytest.raises(Denied):
            await edge.service.release_suspense(ask, who)


# --- what PostgreSQL itself refuses --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "constraint"),
    [
        ("UPDATE period_told SET segments = 9", "append_only"),
        ("DELETE FROM lost_range", "append_only"),
        ("UPDATE journal_opened SET previous = NULL", "append_only"),
        ("UPDATE suspense_decision SET who = 'eve'", "append_only"),
        ("INSERT INTO entry (attempt, kind, reason, charges) VALUES ('att-1', 'adjust', '', '[]')", "entry_adjusts"),
        (
            "INSERT INTO suspense_decision (segment, lifts, who, why, at) VALUES (1, 'bad_seal', 'eve', 'please', now())",
            "suspense_decision_lifts_check",
        ),
    ],
)
async def test_the_database_refuses_what_would_falsify_a_word(pg: Any, statement: str, constraint: str) -> None:
    async with opened("pg", pg) as edge:
        assert isinstance(edge.store, PgMetering)
        offered = await cited(edge)
        long = segment(offered, 0, 7_200)
        edge.wait(at(7_200))
        await edge.tell(running(offered))
        await edge.open_journal("jnl-2")
        await edge.send(long, offered)
        await release(edge, long)
        await edge.say(edge.lost_range("jnl-1", 1, 2))
        await edge.say(edge.period("2026-11", datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC), []))
        with pytest.raises(Violated) as violated:
            async with edge.store.db.transaction() as tx:
                await tx.run(statement)
        assert violated.value.constraint == constraint
