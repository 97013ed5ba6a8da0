"""Metering on PostgreSQL and on its twin: the same questions, the same answers, whatever came late, twice, out of order or half."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from tests.conftest import PgDatabase
from tests.core.metering_world import OTHER_SITE, SITE, T0, TENANT, ended, record, segment, snapshot, spec
from tests.edges.metering_edge import OPERATOR, SCHEDULER, Edge, claims, meta

from intertie.contracts.base import Empty, decode
from intertie.contracts.identity import AuditQuery, Role
from intertie.contracts.job import AttemptRecord, Cause
from intertie.contracts.link import SegmentClosed
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import AttemptSettled, BookQuery, Charge, Price, Segment, SetAllowance, SpecsQuery, StatementQuery, WhoPays
from intertie.errors import Denied, NotFound, Refused, Stale
from intertie.ids import JobId
from intertie.lane.memory import MemoryLaneTables
from intertie.lane.pg import PgLaneTables
from intertie.metering.core.reckon import change, reckon
from intertie.metering.memory import MemoryMetering
from intertie.metering.pg import PACKAGE, PgMetering
from intertie.metering.pg import Q as QUERIES
from intertie.metering.service import trust
from intertie.rating.export import statement_csv
from intertie.store import Database, Violated, check_queries
from intertie.store.queries import Query
from intertie.trust.keys import Key

ZERO = Decimal(0)


@pytest.fixture
async def db(pg: PgDatabase) -> AsyncIterator[Database]:
    database = await Database.open(pg.url, password=pg.password, schema="metering")
    await database.migrate(PACKAGE)
    yield database
    await database.close()


@pytest.fixture(params=["memory", "pg"])
async def edge(request: pytest.FixtureRequest) -> AsyncIterator[Edge]:
    """Metering that knows site-a's key and has agreed to the standard terms."""
    if request.param == "memory":
        store = MemoryMetering()
        made = Edge(store, MemoryLaneTables(store))
        await _ready(made)
        yield made
        return
    pg: PgDatabase = request.getfixturevalue("pg")
    database = await Database.open(pg.url, password=pg.password, schema="metering")
    try:
        await database.migrate(PACKAGE)
        made = Edge(PgMetering(database), PgLaneTables(database))
        await _ready(made)
        yield made
    finally:
        await database.close()


async def _ready(made: Edge) -> None:
    await made.know_site()
    await made.agree()


async def cited(edge: Edge, number: int = 1, **changes: Any) -> AttemptRecord:
    """An offered attempt that cites the agreement in force, as the scheduler writes it."""
    (agreed,) = (await edge.service.specs(SpecsQuery(), OPERATOR)).specs
    return record(number, **{"spec": agreed.spec, "spec_revision": agreed.revision, **changes})


def running(of: AttemptRecord) -> AttemptRecord:
    return msgspec.structs.replace(of, state="running", started_at=T0, version=of.version + 1)


def parts(of: AttemptRecord) -> tuple[Segment, Segment]:
    return segment(of, 0, 6), segment(of, 6, 9)


# --- the life of an attempt ----------------------------------------------------------------------------------------------------------------


async def test_a_job_s_seconds_become_a_charge_with_its_formula(edge: Edge) -> None:
    offered = await cited(edge)
    await edge.name(offered.job, "train")
    await edge.tell(offered)
    assert (await edge.book(offered.attempt)).hold == Decimal("6.0000")
    run = segment(offered, 0, 6.418, last=True)
    await edge.send(run, offered)
    await edge.tell(ended(running(offered), [run]))
    book = await edge.book(offered.attempt)
    assert (book.complete, book.hold, book.posted, book.run_us) == (True, ZERO, Decimal("0.0107"), 6_418_000)
    statement = await edge.statement()
    (line,) = statement.lines
    assert (line.name, line.amount, statement.total, statement.provisional) == ("train", Decimal("0.0107"), Decimal("0.0107"), True)
    assert line.attempts[0].charges[0].formula.text == "6.418 s × 1 slot × ¥6.00/card-hour = ¥0.0107"
    assert "¥0.0107" in statement_csv(statement)
    assert (await edge.check()).text == "the ledger agrees with the segments"


ORDERS = [
    ["offer", "first", "second", "end"],
    ["first", "second", "offer", "end"],
    ["offer", "end", "second", "first"],
    ["end", "first", "second", "offer"],
    ["second", "end", "first", "offer"],
    ["offer", "offer", "first", "first", "end", "second", "first", "end"],
]


@pytest.mark.parametrize("order", ORDERS, ids=["-".join(order) for order in ORDERS])
async def test_late_repeated_and_disordered_news_lead_to_the_same_books(edge: Edge, order: list[str]) -> None:
    """BR-085: totals are identical after any replay order."""
    offered = await cited(edge)
    first, second = parts(offered)
    done = ended(running(offered), [first, second], last=9)
    for step in order:
        match step:
            case "offer":
                await edge.tell(offered)
            case "end":
                await edge.tell(done)
            case "first":
                await edge.send(first, offered)
            case "second":
                await edge.send(second, offered)
        await edge.check()
    book = await edge.book(offered.attempt)
    assert (book.complete, book.segments, book.posted, book.hold) == (True, 2, Decimal("0.0150"), ZERO)
    assert (await edge.statement()).total == Decimal("0.0150")


async def test_usage_that_comes_before_its_attempt_waits_in_suspense_and_is_named(edge: Edge) -> None:
    offered = await cited(edge)
    await edge.send(segment(offered, 0, 6), offered)
    book = await edge.book(offered.attempt)
    assert (book.in_suspense, book.posted, book.tenant, book.missing) == (1, ZERO, TENANT, "the scheduler's record of this attempt")
    statement = await edge.statement()
    assert (statement.total, statement.in_suspense) == (ZERO, 1)
    assert statement.incomplete == [f"{offered.attempt}: the scheduler's record of this attempt"]
    assert (await edge.check()).suspense_segments == 1
    await edge.tell(running(offered))
    assert (await edge.book(offered.attempt)).posted == Decimal("0.0100")
    assert (await edge.check()).suspense_segments == 0


async def test_what_runs_now_is_named_as_incomplete_and_what_is_only_offered_is_not(edge: Edge) -> None:
    offered = await cited(edge)
    await edge.tell(offered)
    assert (await edge.statement()).incomplete == []
    await edge.tell(running(offered))
    statement = await edge.statement()
    assert statement.incomplete == [
        f"{offered.attempt}: still running by the scheduler's record: its last segment comes with its end, from site-a"
    ]
    assert [line.amount for line in statement.lines] == [0]


async def test_a_missing_segment_is_named_with_who_owes_it(edge: Edge) -> None:
    offered = await cited(edge)
    first, second = parts(offered)
    await edge.send(first, offered)
    await edge.tell(ended(running(offered), [first, second]))
    book = await edge.book(offered.attempt)
    assert not book.complete and book.hold == Decimal("6.0000")
    assert book.missing == "1 of 2 segments from site-a: late (its metering lane is here through 1, the ending says 2)"
    assert (await edge.statement()).incomplete == [f"{offered.attempt}: {book.missing}"]
    assert (await edge.check()).incomplete == [offered.attempt]


async def test_a_cancelled_job_pays_what_its_segments_prove(edge: Edge) -> None:
    offered = await cited(edge)
    run = segment(offered, 0, 6)
    await edge.tell(running(offered))
    await edge.send(run, offered)
    await edge.tell(ended(running(offered), [run], outcome="cancelled", cause=Cause.CANCELLED))
    book = await edge.book(offered.attempt)
    assert (book.complete, book.posted, book.hold) == (True, Decimal("0.0100"), ZERO)
    assert (await edge.statement()).total == Decimal("0.0100")


@pytest.mark.parametrize(
    ("cause", "total", "others", "disputed"),
    [
        (Cause.JOB, "0.0100", "0", "0"),
        (Cause.SITE, "0", "0.0100", "0"),
        (Cause.PREEMPTED, "0", "0.0100", "0"),
        (Cause.UNKNOWN, "0", "0", "0.0100"),
    ],
)
async def test_the_statement_keeps_apart_what_others_pay_and_what_nobody_pays_yet(
    edge: Edge, cause: Cause, total: str, others: str, disputed: str
) -> None:
    offered = await cited(edge)
    run = segment(offered, 0, 6)
    await edge.tell(running(offered))
    await edge.send(run, offered)
    await edge.tell(ended(running(offered), [run], outcome="failed", cause=cause))
    statement = await edge.statement()
    assert (statement.total, statement.paid_by_others, statement.disputed) == (Decimal(total), Decimal(others), Decimal(disputed))
    assert statement.usage_milli_us == 6_000_000_000
    assert statement.lines[0].attempts[0].charges[0].amount == Decimal("0.0100")
    await edge.check()


async def test_a_cause_found_out_later_moves_the_charge_to_who_pays_it(edge: Edge) -> None:
    offered = await cited(edge)
    run = segment(offered, 0, 6)
    await edge.send(run, offered)
    unknown = ended(running(offered), [run], outcome="failed", cause=Cause.UNKNOWN)
    await edge.tell(unknown)
    assert (await edge.statement()).disputed == Decimal("0.0100")
    await edge.tell(msgspec.structs.replace(unknown, cause=Cause.SITE, version=unknown.version + 1))
    statement = await edge.statement()
    assert (statement.disputed, statement.paid_by_others) == (ZERO, Decimal("0.0100"))
    assert (await edge.book(offered.attempt)).posted == Decimal("0.0100")
    await edge.check()


async def test_an_attempt_that_never_ran_holds_nothing_and_costs_nothing(edge: Edge) -> None:
    offered = await cited(edge)
    await edge.tell(offered)
    await edge.tell(msgspec.structs.replace(offered, state="refused", version=2))
    book = await edge.book(offered.attempt)
    assert (book.complete, book.hold, book.posted) == (True, ZERO, ZERO)
    assert (await edge.statement()).lines == []
    await edge.send(segment(offered, 0, 6), offered)
    book = await edge.book(offered.attempt)
    assert (book.posted, book.in_suspense) == (ZERO, 1)
    await edge.check()


async def settlements(edge: Edge) -> list[AttemptSettled]:
    """The settlements told so far, as the outbox of either store holds them."""
    if isinstance(edge.store, MemoryMetering):
        return [event for event in edge.store.events if isinstance(event, AttemptSettled)]
    assert isinstance(edge.store, PgMetering)
    async with edge.store.db.transaction(read_only=True) as tx:
        rows = await tx.all(Query("SELECT body FROM outbox WHERE type = $1 ORDER BY id", "told", ""), AttemptSettled.TYPE)
    return [decode(bytes(row["body"]), AttemptSettled) for row in rows]


async def test_a_settlement_is_told_once_and_again_only_when_it_changes(edge: Edge) -> None:
    offered = await cited(edge)
    run = segment(offered, 0, 6)
    await edge.send(run, offered)
    done = ended(running(offered), [run])
    await edge.tell(done)
    await edge.tell(done)
    await edge.tell(msgspec.structs.replace(done, version=done.version + 1, reason="same end, said again"))
    corrected = msgspec.structs.replace(done, outcome="failed", cause=Cause.SITE, version=done.version + 2)
    await edge.tell(corrected)
    assert [(event.version, event.amount, event.payer) for event in await settlements(edge)] == [
        (1, Decimal("0.0100"), WhoPays.TENANT),
        (2, Decimal("0.0100"), WhoPays.SITE),
    ]


# --- what may be believed --------------------------------------------------------------------------------------------------------------------


async def test_a_site_cannot_bill_in_another_site_s_name(edge: Edge) -> None:
    """LINK D13: trust the site's tenant and a hostile site bills anyone."""
    offered = await cited(edge)
    await edge.tell(running(offered))
    hostile = Key.new("U")
    await edge.know_site(OTHER_SITE, key=hostile)
    await edge.send(segment(offered, 0, 6), offered, site=OTHER_SITE, key=hostile)
    await edge.send(segment(offered, 0, 7), offered, key=hostile)
    own = msgspec.structs.replace(segment(offered, 0, 8), site=OTHER_SITE)
    await edge.send(own, offered, site=OTHER_SITE, key=hostile)
    book = await edge.book(offered.attempt)
    assert (book.segments, book.posted) == (0, ZERO)
    assert (await edge.check()).suspense_segments == 3


async def test_segments_of_a_site_whose_key_comes_later_are_released_by_it(edge: Edge) -> None:
    offered = await cited(edge, site=OTHER_SITE)
    key = Key.new("U")
    await edge.tell(running(offered))
    await edge.send(segment(offered, 0, 6), offered, site=OTHER_SITE, key=key)
    assert (await edge.book(offered.attempt)).in_suspense == 1
    news = edge.news
    await edge.know_site(OTHER_SITE, key=key)
    assert edge.news == news + 1
    await edge.service.reconsider()
    book = await edge.book(offered.attempt)
    assert (book.in_suspense, book.posted) == (0, Decimal("0.0100"))


async def test_a_new_key_does_not_orphan_what_the_old_one_signed_but_a_revoked_one_proves_nothing(edge: Edge) -> None:
    offered = await cited(edge)
    await edge.tell(running(offered))
    await edge.know_site(key=Key.new("U"), version=2)
    await edge.send(segment(offered, 0, 6), offered)
    assert (await edge.book(offered.attempt)).posted == Decimal("0.0100")
    await edge.know_site(version=3, revoked=True)
    await edge.know_site(version=2)
    await edge.send(segment(offered, 6, 9), offered)
    book = await edge.book(offered.attempt)
    assert (book.segments, book.in_suspense, book.posted) == (1, 1, Decimal("0.0100"))


async def test_what_is_no_segment_is_refused_to_quarantine(edge: Edge) -> None:
    with pytest.raises(Refused, match="segment is not valid"):
        await edge.service.interpret(
            await edge.receive(
                SegmentClosed(seq=1, at=T0, sealed=msgspec.structs.replace(edge.seal(segment(record(), 0, 1), None).sealed, payload="{}"))
            )
        )


# --- agreements ------------------------------------------------------------------------------------------------------------------------------


async def test_usage_without_an_agreement_waits_until_one_covers_its_start(edge: Edge) -> None:
    unagreed = record(spec=None, spec_revision=0, offered_at=T0 - timedelta(days=41))
    early = segment(unagreed, -40 * 86_400, -40 * 86_400 + 6)
    await edge.send(early, unagreed)
    await edge.tell(ended(msgspec.structs.replace(unagreed, started_at=early.start, state="running", version=2), [early]))
    book = await edge.book(unagreed.attempt)
    assert (book.in_suspense, book.complete, book.missing) == (1, False, "a price: no agreed meter spec (from the hub's operator)")
    await edge.agree(spec(effective_from=T0 - timedelta(days=41)))
    await edge.service.reconsider()
    book = await edge.book(unagreed.attempt)
    assert (book.complete, book.in_suspense, book.posted) == (True, 0, Decimal("0.0100"))
    assert book.charges[0].spec_revision == 2
    await edge.agree(spec(effective_from=T0 - timedelta(days=41), prices=[Price(kind=DeviceKind.SLOT, per_hour=Decimal(600))]))
    await edge.service.reconsider()
    await edge.tell(ended(msgspec.structs.replace(unagreed, state="running", version=8), [early]))
    assert (await edge.book(unagreed.attempt)).posted == Decimal("0.0100")
    await edge.check()


async def test_two_who_agree_at_once_do_not_make_the_same_revision(edge: Edge) -> None:
    (now,) = await edge.store.specs()
    twice = msgspec.structs.replace(now, revision=2)
    await edge.store.agree(twice, "ann")
    with pytest.raises(Stale):
        await edge.store.agree(twice, "bob")
    rows = await edge.store.read_audit(AuditQuery())
    assert [(row.actor, row.action, row.target) for row in rows][:1] == [("ann", "spec.agree", f"{now.spec} rev 2")]


async def test_an_allowance_is_versioned_and_told(edge: Edge) -> None:
    for amount in (None, Decimal("12.5")):
        await edge.service.set_allowance(SetAllowance(tenant=TENANT, amount=amount), OPERATOR)
    service = claims(Role.SERVICE)
    snapshot = await edge.service.snapshot(Empty(), service)
    ((version, amount, currency),) = [(a.version, a.record.amount, a.record.currency) for a in snapshot.allowances]
    assert (version, amount, currency) == (2, Decimal("12.5"), "CNY")
    assert [event.record.revision for event in snapshot.specs] == [1]
    with pytest.raises(Refused):
        await edge.service.set_allowance(SetAllowance(tenant=TENANT, amount=Decimal(-1)), OPERATOR)


# --- statements --------------------------------------------------------------------------------------------------------------------------------


async def test_a_job_across_a_border_is_on_both_statements_and_their_sum_is_the_whole(edge: Edge) -> None:
    """Shanghai's December begins at 16:00 UTC on 30 November; 0.005 s either side alone would round to nothing."""
    offered = await cited(edge)
    border = (await edge.statement("2026-12")).start
    offset = (border - T0).total_seconds()
    run = segment(offered, offset - 1.01, offset + 1.01)
    await edge.send(run, offered)
    await edge.tell(ended(running(offered), [run]))
    november, december = await edge.statement("2026-11"), await edge.statement("2026-12")
    assert november.end == december.start == border
    assert november.total + december.total == (await edge.book(offered.attempt)).posted == Decimal("0.0034")
    assert november.usage_milli_us + december.usage_milli_us == 2_020_000_000
    assert (november.provisional, december.provisional) == (False, True)


async def test_a_job_placed_twice_shows_both_attempts_and_who_pays_which(edge: Edge) -> None:
    """BR-076."""
    lost = await cited(edge, 1)
    again = await cited(edge, 2, job=lost.job)
    for one, outcome, cause in ((lost, "failed", Cause.SITE), (again, "succeeded", None)):
        run = segment(one, 0, 6)
        await edge.send(run, one)
        await edge.tell(ended(running(one), [run], outcome=outcome, cause=cause))
    statement = await edge.statement()
    (line,) = statement.lines
    assert [book.charges[0].payer for book in line.attempts] == [WhoPays.SITE, WhoPays.TENANT]
    assert (line.amount, statement.total, statement.paid_by_others) == (Decimal("0.0100"), Decimal("0.0100"), Decimal("0.0100"))


async def test_what_ran_while_islanded_is_marked(edge: Edge) -> None:
    offered = await cited(edge)
    await edge.send(segment(offered, 0, 6, islanded=True), offered)
    await edge.tell(running(offered))
    ((charge,),) = [book.charges for line in (await edge.statement()).lines for book in line.attempts]
    assert charge.islanded


async def test_a_long_statement_comes_in_parts_that_share_their_sums(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("intertie.metering.core.statements.LINES_BYTES", 3_000)
    for number in range(1, 6):
        one = await cited(edge, number)
        run = segment(one, 0, 6)
        await edge.send(run, one)
        await edge.tell(ended(running(one), [run]))
    jobs: list[JobId] = []
    after = ""
    while True:
        statement = await edge.statement(after=after)
        assert statement.total == Decimal("0.0500")
        jobs += [line.job for line in statement.lines]
        after = statement.more_after
        if not after:
            break
    assert jobs == [f"job-{number}" for number in range(1, 6)]


async def test_each_sees_what_is_theirs_and_no_more(edge: Edge) -> None:
    offered = await cited(edge)
    await edge.send(segment(offered, 0, 6), offered)
    await edge.tell(running(offered))
    await edge.name(offered.job, "secret")
    query, books = StatementQuery(tenant=TENANT), BookQuery(attempts=[offered.attempt])
    mine, other = claims(Role.TENANT_USER, tenant=TENANT), claims(Role.TENANT_ADMIN, tenant="other")
    owner, stranger = claims(Role.SITE_OWNER, site=SITE), claims(Role.SITE_OWNER, site=OTHER_SITE)
    assert (await edge.service.statement(query, mine)).total == Decimal("0.0100")
    with pytest.raises(NotFound):
        await edge.service.statement(query, other)
    with pytest.raises(NotFound):
        await edge.service.statement(query, owner)
    assert [len(book.charges) for book in (await edge.service.books(books, mine)).books] == [1]
    (seen,) = (await edge.service.books(books, owner)).books
    assert (seen.run_us, seen.charges, seen.posted, seen.hold) == (6_000_000, list[Charge](), ZERO, ZERO)
    for caller in (other, stranger):
        assert (await edge.service.books(books, caller)).books == []
    with pytest.raises(Denied):
        await edge.service.check(Empty(), mine)
    assert [s.consumer for s in (await edge.service.specs(SpecsQuery(), mine)).specs] == ["*"]
    assert (await edge.service.specs(SpecsQuery(), stranger)).specs == []


# --- crashes and contenders ------------------------------------------------------------------------------------------------------------------


async def test_a_decision_taken_on_an_older_revision_is_refused(edge: Edge) -> None:
    offered = await cited(edge)
    (before,) = await edge.store.load([offered.attempt])
    await edge.tell(offered)
    stale = change(before, reckon(replace(before, snapshot=snapshot(offered)), trust(SCHEDULER.public), T0))
    with pytest.raises(Stale, match="has moved on"):
        await edge.store.save(stale)
    (held,) = await edge.store.load([offered.attempt])
    assert held.revision == 1


async def test_an_entry_interpreted_twice_at_once_counts_once(edge: Edge) -> None:
    offered = await cited(edge)
    await edge.tell(running(offered))
    entry = await edge.receive(edge.seal(segment(offered, 0, 6), offered))
    results = await asyncio.gather(*(edge.service.interpret(entry) for _ in range(4)), return_exceptions=True)
    assert all(result is None or isinstance(result, Stale) for result in results)
    assert sum(result is None for result in results) == 1
    book = await edge.book(offered.attempt)
    assert (book.segments, book.posted) == (1, Decimal("0.0100"))
    await edge.check()


async def test_many_deciders_about_one_attempt_lose_nothing(edge: Edge) -> None:
    """Two lanes' worth of segments and the scheduler's events, all at once."""
    offered = await cited(edge)
    runs = [segment(offered, n, n + 1) for n in range(4)]
    entries = [await edge.receive(edge.seal(run, offered)) for run in runs]

    async def lane() -> None:
        for entry in entries:
            await edge.service.interpret(entry)

    await asyncio.gather(lane(), edge.tell(offered), edge.tell(running(offered)), edge.tell(ended(running(offered), runs)))
    book = await edge.book(offered.attempt)
    assert (book.complete, book.segments, book.posted, book.hold) == (True, 4, Decimal("0.0067"), ZERO)
    await edge.check()


async def test_an_event_applied_before_changes_nothing(edge: Edge) -> None:
    offered = await cited(edge)
    about = meta()
    await edge.tell(offered, about=about)
    (before,) = await edge.store.load([offered.attempt])
    await edge.tell(running(offered), about=about)
    (held,) = await edge.store.load([offered.attempt])
    assert held == before


async def test_an_older_record_never_replaces_a_newer_one(edge: Edge) -> None:
    offered = await cited(edge)
    await edge.tell(running(offered))
    await edge.tell(offered)
    (held,) = await edge.store.load([offered.attempt])
    assert held.record is not None and held.record.state == "running"
    assert await edge.store.versions([offered.attempt]) == {offered.attempt: 2}


async def test_what_a_job_printed_is_not_kept_by_metering(edge: Edge) -> None:
    offered = await cited(edge, log_tail="secret\x00", reason="a\x00b")
    await edge.tell(offered)
    await edge.name(offered.job, "a\x00b")
    (held,) = await edge.store.load([offered.attempt])
    assert held.record is not None and held.record.log_tail == ""
    assert await edge.store.names([offered.job]) == {offered.job: "a\ufffdb"}


# --- what PostgreSQL itself refuses --------------------------------------------------------------------------------------------------------------


async def test_every_query_is_one_that_postgresql_understands(db: Database) -> None:
    assert await check_queries(db, QUERIES) == []


@pytest.fixture
async def booked(db: Database) -> Database:
    """A database that holds one finished attempt."""
    made = Edge(PgMetering(db), PgLaneTables(db))
    await _ready(made)
    offered = await cited(made)
    run = segment(offered, 0, 6)
    await made.send(run, offered)
    await made.tell(ended(running(offered), [run]))
    return db


@pytest.mark.parametrize(
    ("statement", "constraint"),
    [
        ("INSERT INTO posting VALUES ((SELECT max(id) FROM entry), 'tenant/lab', 'USD', 1)", "entry_balances"),
        ("INSERT INTO posting VALUES ((SELECT max(id) FROM entry), 'platform', 'USD', 'NaN')", "posting_amount_check"),
        ("UPDATE posting SET amount = amount * 2", "append_only"),
        ("DELETE FROM posting", "append_only"),
        ("DELETE FROM entry", "append_only"),
        ("UPDATE segment SET quantity_milli = 1", "append_only"),
        ("UPDATE segment SET payload = ''", "append_only"),
        ("DELETE FROM segment", "append_only"),
        ("UPDATE spec_revision SET currency = 'USD'", "append_only"),
    ],
)
async def test_the_database_refuses_what_would_falsify_the_books(booked: Database, statement: str, constraint: str) -> None:
    with pytest.raises(Violated) as violated:
        async with booked.transaction() as tx:
            await tx.run(statement)
    assert violated.value.constraint == constraint


async def test_a_crash_between_two_writes_leaves_nothing_half(db: Database) -> None:
    """The process dies after the segment and before the posting: the transaction is gone whole, and the entry is interpreted again."""
    made = Edge(PgMetering(db), PgLaneTables(db))
    await _ready(made)
    offered = await cited(made)
    await made.tell(running(offered))
    entry = await made.receive(made.seal(segment(offered, 0, 6), offered))
    async with db.transaction() as tx:
        await tx.run("ALTER TABLE posting RENAME TO posting_away")
    with pytest.raises(Exception, match="posting"):
        await made.service.interpret(entry)
    async with db.transaction() as tx:
        await tx.run("ALTER TABLE posting_away RENAME TO posting")
        assert await tx.one("SELECT 1 FROM segment") is None
    await made.service.interpret(entry)
    assert (await made.book(offered.attempt)).posted == Decimal("0.0100")
    await made.check()


async def test_the_settlement_is_in_the_outbox_with_its_attempt_as_entity(booked: Database) -> None:
    async with booked.transaction() as tx:
        rows = await tx.all("SELECT entity, version, subject, body FROM outbox WHERE type = $1", AttemptSettled.TYPE)
    ((entity, version, subject, body),) = [tuple(row) for row in rows]
    assert (entity, version, subject) == ("att-1", 1, "intertie.v1.evt.metering.settlement.completed.lab.site-a")
    settled = msgspec.json.decode(body, type=AttemptSettled)
    assert (settled.amount, settled.payer, settled.segments) == (Decimal("0.0100"), WhoPays.TENANT, 1)


async def test_suspense_keeps_its_history(db: Database) -> None:
    made = Edge(PgMetering(db), PgLaneTables(db))
    await _ready(made)
    offered = await cited(made)
    await made.send(segment(offered, 0, 6), offered)
    await made.tell(running(offered))
    async with db.transaction() as tx:
        rows = await tx.all("SELECT reason, released_at IS NOT NULL AS released FROM suspense ORDER BY id")
    assert [tuple(row) for row in rows] == [("attempt_unknown", True)]
