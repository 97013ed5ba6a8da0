"""The audit chain on a real PostgreSQL: late commits, several chainers, and a superuser who tampers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.conftest import PgDatabase
from tests.edges.store_world import opened, until

from intertie.contracts.audit import AuditAnchor, AuditChainQuery, AuditFinding, AuditHead, AuditLink
from intertie.contracts.identity import AuditRow
from intertie.errors import Conflict, Stale, Unavailable
from intertie.store import Chainer, Database, MemoryChain, MemoryStore, PgChain, Violated, verify_chain
from intertie.store.migrate import load_migrations
from intertie.trust.chain import sign_anchor
from intertie.trust.keys import Key

KEY = Key.new("U")


@pytest.fixture
async def db(pg: PgDatabase) -> AsyncIterator[Database]:
    async with opened(pg) as found:
        yield found


async def act(db: Database | MemoryStore, *targets: str) -> None:
    for target in targets:
        async with db.transaction() as tx:
            await tx.audit(actor="li", action="job.cancel", target=target, reason="why")


async def chain_all(db: Database) -> AuditHead:
    chain = PgChain(db)
    async with chain.leading() as leader:
        while await chain.extend(leader):
            pass
    head = await chain.head()
    assert head is not None
    return head


async def read(chain: PgChain | MemoryChain, *, limit: int = 2) -> tuple[list[AuditLink], list[AuditRow], list[int]]:
    """All pages, small ones."""
    links: list[AuditLink] = []
    after = (0, 0)
    while True:
        page = await chain.page(AuditChainQuery(after_epoch=after[0], after_number=after[1], limit=limit))
        links += page.links
        if not page.more:
            return links, page.unchained, page.waiting
        after = (links[-1].epoch, links[-1].number)


async def check(db: Database, *heads: AuditHead) -> list[AuditFinding]:
    links, unchained, waiting = await read(PgChain(db))
    return verify_chain(db.service, links, [sign_anchor(KEY, head, head.at) for head in heads], unchained=unchained, waiting=waiting)


async def tamper(db: Database, *statements: str) -> None:
    """As a superuser would who can do everything to the tables."""
    async with db.transaction() as tx:
        for table in ("audit", "audit_chain"):
            await tx.run(f"ALTER TABLE {table} DISABLE TRIGGER ALL")
        for statement in statements:
            await tx.run(statement)
        for table in ("audit", "audit_chain"):
            await tx.run(f"ALTER TABLE {table} ENABLE TRIGGER ALL")


def said(found: list[AuditFinding]) -> list[tuple[str, int, int]]:
    return [(finding.kind, finding.number, finding.audit) for finding in found]


async def test_committed_rows_are_numbered_gaplessly_and_the_chain_is_whole(db: Database) -> None:
    await act(db, "a", "b", "c")
    head = await chain_all(db)
    await act(db, "d")
    assert (await chain_all(db)).number == head.number + 1
    links, unchained, _ = await read(PgChain(db))
    assert [link.number for link in links] == list(range(1, head.number + 2))
    assert not unchained
    assert await check(db, head) == []


async def test_a_transaction_that_commits_late_is_numbered_late_and_never_skipped(db: Database) -> None:
    """LINK D19's lesson: the id was given first, the commit came last."""
    open_transaction = db.transaction()
    late = await open_transaction.__aenter__()
    await late.audit(actor="li", action="job.cancel", target="late")
    await act(db, "early")
    head = await chain_all(db)
    await open_transaction.__aexit__(None, None, None)
    after = await chain_all(db)
    assert after.number == head.number + 1
    links, _, _ = await read(PgChain(db))
    rows = [link.found for link in links if link.found is not None]
    assert [row.target for row in rows][-2:] == ["early", "late"]
    assert rows[-1].id < rows[-2].id
    assert await check(db, head, after) == []


async def test_a_rolled_back_row_leaves_no_gap(db: Database) -> None:
    with pytest.raises(KeyError):
        async with db.transaction() as tx:
            await tx.audit(actor="li", action="job.cancel", target="never")
            raise KeyError
    await act(db, "a")
    await chain_all(db)
    assert await check(db) == []


async def test_a_chainer_that_no_longer_leads_writes_nothing(db: Database) -> None:
    await act(db, "a")
    chain = PgChain(db)
    async with chain.leading() as former:
        pass
    async with chain.leading() as leader:
        with pytest.raises(Stale):
            await chain.extend(former)
        assert await chain.extend(leader) >= 1
    assert await check(db) == []


async def test_several_copies_chain_every_row_once_and_anchor_the_head(db: Database) -> None:
    heads: list[AuditHead] = []

    async def anchor(head: AuditHead) -> None:
        heads.append(head)

    copies = [Chainer(PgChain(db), "scheduler", anchor, anchor_s=0.05, beat_s=0.05) for _ in range(2)]
    async with asyncio.timeout(30):
        tasks = [asyncio.create_task(copy.run()) for copy in copies]
        await asyncio.gather(*(act(db, f"{n}-a", f"{n}-b") for n in range(10)))
        await until(lambda: bool(heads) and heads[-1].number >= 20, "both copies' rows are anchored")
        next(task for task, copy in zip(tasks, copies, strict=True) if copy.leads).cancel()
        await act(db, "after the first leader")
        await until(lambda: heads[-1].number >= 21, "the second copy goes on")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert await check(db, *{head.number: head for head in heads}.values()) == []


async def test_what_identity_does_not_take_is_offered_again_and_the_chain_goes_on(db: Database) -> None:
    answers: list[Exception | None] = [Unavailable("bus.timeout", "nobody"), Conflict("identity.anchor_cut", "cut"), None]
    anchored: list[int] = []

    async def anchor(head: AuditHead) -> None:
        if (error := answers.pop(0)) is not None:
            raise error
        anchored.append(head.number)

    await act(db, "a")
    chainer = Chainer(PgChain(db), "scheduler", anchor)
    async with PgChain(db).leading() as leader:
        await chainer.chain(leader)
        for _ in range(3):
            await chainer.anchor(leader)
        await chainer.anchor(leader)
    assert len(anchored) == 1
    assert not answers


async def test_a_raised_epoch_goes_on_from_the_chain_before(db: Database) -> None:
    await act(db, "a", "b")
    before = await chain_all(db)
    async with db.transaction() as tx:
        await tx.run("UPDATE service_epoch SET epoch = epoch + 5, reason = 'restored'")
    await act(db, "c")
    after = await chain_all(db)
    assert (after.epoch, after.number) == (before.epoch + 5, 1)
    assert await check(db, before, after) == []


@pytest.mark.parametrize(
    ("statement", "kind", "target"),
    [
        ("UPDATE audit SET actor = 'wang' WHERE target = 'b'", "changed", "b"),
        ("UPDATE audit SET reason = '' WHERE target = 'd'", "changed", "d"),
        ("DELETE FROM audit WHERE target = 'b'", "missing", "b"),
        ("DELETE FROM audit WHERE target = 'd'", "missing", "d"),
        ("DELETE FROM audit WHERE target = 'a'", "missing", "a"),
    ],
)
async def test_a_superuser_who_changes_or_deletes_a_row_is_found(db: Database, statement: str, kind: str, target: str) -> None:
    await act(db, "a", "b", "c", "d")
    await chain_all(db)
    links, _, _ = await read(PgChain(db))
    meant = next(link for link in links if link.found is not None and link.found.target == target)
    await tamper(db, statement)
    assert said(await check(db)) == [(kind, meant.number, meant.audit)]


async def test_a_superuser_who_takes_row_and_link_is_found_by_the_gap_or_by_the_anchor(db: Database) -> None:
    await act(db, "a", "b", "c", "d")
    head = await chain_all(db)
    last = head.number
    await tamper(
        db, "DELETE FROM audit_chain WHERE audit = (SELECT id FROM audit WHERE target = 'b')", "DELETE FROM audit WHERE target = 'b'"
    )
    assert [finding.kind for finding in await check(db, head)] == ["gap", "broken"]
    await tamper(
        db, "DELETE FROM audit_chain WHERE audit = (SELECT id FROM audit WHERE target = 'd')", "DELETE FROM audit WHERE target = 'd'"
    )
    assert ("cut", last, 0) in said(await check(db, head))


async def test_a_superuser_who_puts_a_row_in_is_found_whether_or_not_it_is_chained(db: Database) -> None:
    await act(db, "a")
    head = await chain_all(db)
    put = "INSERT INTO audit (at, actor, action, target, reason, result, trace_id) VALUES (now() - interval '2 days', 'x', 'x', 'x', '', 'ok', '')"
    await tamper(db, put)
    assert [finding.kind for finding in await check(db, head)] == ["unchained"]
    await tamper(db, "INSERT INTO audit_unchained SELECT id FROM audit WHERE target = 'x'")
    await chain_all(db)
    assert [finding.kind for finding in await check(db, head)] == ["inserted"]


async def test_a_superuser_who_moves_links_is_found(db: Database) -> None:
    await act(db, "a", "b", "c")
    await chain_all(db)
    await tamper(
        db,
        "UPDATE audit_chain SET number = 1000 WHERE number = 1",
        "UPDATE audit_chain SET number = 1 WHERE number = 2",
        "UPDATE audit_chain SET number = 2 WHERE number = 1000",
    )
    assert {finding.kind for finding in await check(db)} == {"broken"}


@pytest.mark.parametrize("statement", ["UPDATE audit_chain SET number = number + 1", "DELETE FROM audit_chain", "TRUNCATE audit_chain"])
async def test_nobody_changes_a_link_by_mistake(db: Database, statement: str) -> None:
    await act(db, "a")
    await chain_all(db)
    with pytest.raises(Violated) as error:
        async with db.transaction() as tx:
            await tx.run(statement)
    assert error.value.constraint == "audit_chain_append_only"


async def test_rows_from_before_the_chain_are_chained_at_its_first_run(db: Database) -> None:
    """The migration is played again over a service that has a history."""
    await act(db, "a", "b")
    tables = "DROP TRIGGER audit_unchained ON audit; DROP TABLE audit_chain, audit_unchained; "
    functions = "DROP FUNCTION audit_waits_for_its_link, audit_chain_is_append_only; "
    migration = next(m for m in load_migrations("intertie.store") if m.name == "audit_chain")
    async with db.transaction() as tx:
        await tx.run(tables + functions + migration.sql)
    before, _, waiting = await read(PgChain(db))
    assert before == []
    assert len(waiting) >= 2
    head = await chain_all(db)
    assert head.number == len(waiting)
    assert await check(db, head) == []


async def test_the_twin_has_the_same_chain() -> None:
    store = MemoryStore("scheduler")
    chain = MemoryChain(store)
    await act(store, "a", "b", "c")
    leader = store.take_office("chainer")
    assert await chain.extend(leader, 2) == 2
    head = await chain.head()
    assert head is not None
    await act(store, "d")
    assert await chain.extend(leader) == 2
    links, unchained, waiting = await read(chain)
    anchors: list[AuditAnchor] = [sign_anchor(KEY, head, head.at)]
    assert verify_chain("scheduler", links, anchors, unchained=unchained, waiting=waiting) == []
    store.take_office("chainer")
    with pytest.raises(Stale):
        await chain.extend(leader)
    del store.audits[1]
    links, _, _ = await read(chain)
    assert said(verify_chain("scheduler", links, anchors)) == [("missing", 2, 2)]
