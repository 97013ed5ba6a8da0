"""Anchors at identity, on PostgreSQL and on the twin: kept once, signed, never lower, and only a service's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from tests.conftest import PgDatabase

from intertie.bus.rpc import Caller
from intertie.clock import SystemClock
from intertie.contracts.audit import AnchorAudit, AuditAnchorsQuery, AuditHead
from intertie.contracts.base import decode
from intertie.contracts.identity import AuditQuery, Claims, Role
from intertie.errors import Conflict, Denied
from intertie.identity.anchors import Anchors, MemoryAnchors, PgAnchors, Told, judge_head
from intertie.identity.pg import PACKAGE
from intertie.ids import PrincipalId
from intertie.store import Database, MemoryStore, Violated
from intertie.trust.chain import anchor_holds
from intertie.trust.keys import Key

AT = datetime(2026, 3, 1, 8, tzinfo=UTC)
KEY = Key.new("U")
HEAD = AuditHead(service="scheduler", epoch=1, number=10, digest="aa" * 32, at=AT)


def head(**changed: Any) -> AuditHead:
    return msgspec.structs.replace(HEAD, **changed)


def later(**changed: Any) -> AuditHead:
    return head(at=AT + timedelta(minutes=1), **changed)


@pytest.mark.parametrize(
    ("last", "told", "judged"),
    [
        (None, HEAD, Told.NEW),
        (HEAD, later(number=11), Told.NEW),
        (HEAD, later(epoch=2, number=1), Told.NEW),
        (HEAD, later(), Told.REPEATED),
        (HEAD, later(digest="bb" * 32), Told.REWRITTEN),
        (HEAD, later(number=9), Told.CUT),
        (later(epoch=2, number=1), head(number=500, at=AT + timedelta(minutes=2)), Told.CUT),
        # A former leader's last word, delivered after its successor's.
        (later(), head(number=9), Told.LATE),
    ],
)
def test_a_head_is_judged_beside_the_last(last: AuditHead | None, told: AuditHead, judged: Told) -> None:
    assert judge_head(last, told) is judged


class Rig:
    """Anchors over one store, and what the store holds of faults and audit rows."""

    def __init__(self, anchors: Anchors, store: Database | MemoryStore) -> None:
        self.anchors, self.store = anchors, store

    async def anchor(self, told: AuditHead, *, by: str = "scheduler") -> None:
        claims = Claims(iss=by, sub=PrincipalId(by), name=by, roles=[Role.SERVICE], iat=0, exp=1)
        await self.anchors.anchor(AnchorAudit(head=told), Caller(claims, ""))

    async def kept(self, **query: Any) -> list[tuple[str, int, int]]:
        claims = Claims(iss="identity", sub=PrincipalId("a"), name="a", roles=[Role.AUDITOR], iat=0, exp=1)
        reply = await self.anchors.anchors(AuditAnchorsQuery(**query), Caller(claims, ""))
        assert all(anchor_holds(anchor) and anchor.key == KEY.public for anchor in reply.anchors)
        return [(a.head.service, a.head.epoch, a.head.number) for a in reply.anchors]

    async def events(self) -> list[str]:
        if isinstance(self.store, MemoryStore):
            return [event.TYPE for event in self.store.events]
        async with self.store.transaction() as tx:
            return [row["type"] for row in await tx.all("SELECT type FROM outbox ORDER BY id")]


@pytest.fixture(params=["pg", "memory"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    if request.param == "memory":
        store = MemoryStore("identity")
        yield Rig(Anchors(MemoryAnchors(store), KEY, SystemClock()), store)
        return
    pg: PgDatabase = request.getfixturevalue("pg")
    db = await Database.open(pg.url, password=pg.password, schema="identity")
    try:
        await db.migrate(PACKAGE)
        yield Rig(Anchors(PgAnchors(db), KEY, SystemClock()), db)
    finally:
        await db.close()


async def test_heads_are_kept_once_in_order_and_told(rig: Rig) -> None:
    for told in (HEAD, HEAD, later(number=12), later(epoch=5, number=1)):
        await rig.anchor(told)
    await rig.anchor(head(service="metering", number=3), by="metering")
    assert await rig.kept(service="scheduler") == [("scheduler", 1, 10), ("scheduler", 1, 12), ("scheduler", 5, 1)]
    assert await rig.kept(service="scheduler", after_epoch=1, after_number=12) == [("scheduler", 5, 1)]
    assert await rig.kept(newest=True) == [("metering", 1, 3), ("scheduler", 5, 1)]
    assert (await rig.events()).count("io.intertie.audit.anchored.v1") == 4


@pytest.mark.parametrize(("told", "code"), [(later(number=9), "cut"), (later(digest="bb" * 32), "rewritten")])
async def test_a_chain_that_was_cut_back_or_rewritten_is_refused_and_a_person_is_told_once(rig: Rig, told: AuditHead, code: str) -> None:
    await rig.anchor(HEAD)
    for _ in range(3):
        with pytest.raises(Conflict) as error:
            await rig.anchor(told)
        assert error.value.code == f"identity.anchor_{code}"
    assert await rig.kept(service="scheduler") == [("scheduler", 1, 10)]
    assert (await rig.events()).count("io.intertie.fault.reported.v1") == 1
    assert [row.result for row in await rig.store.read_audit(AuditQuery()) if row.action == "audit.anchor"] == [f"identity.anchor_{code}"]


async def test_a_service_anchors_its_own_chain_only_and_people_none(rig: Rig) -> None:
    with pytest.raises(Denied):
        await rig.anchor(HEAD, by="metering")
    claims = Claims(iss="scheduler", sub=PrincipalId("a"), name="a", roles=[Role.OPERATOR], iat=0, exp=1)
    with pytest.raises(Denied):
        await rig.anchors.anchor(AnchorAudit(head=HEAD), Caller(claims, ""))
    assert await rig.kept(newest=True) == []


async def test_an_anchor_is_never_changed_by_mistake(pg: PgDatabase) -> None:
    db = await Database.open(pg.url, password=pg.password, schema="identity")
    try:
        await db.migrate(PACKAGE)
        await Rig(Anchors(PgAnchors(db), KEY, SystemClock()), db).anchor(HEAD)
        for statement in ("UPDATE audit_anchor SET nth = 7", "DELETE FROM audit_anchor", "TRUNCATE audit_anchor"):
            with pytest.raises(Violated):
                async with db.transaction() as tx:
                    await tx.run(statement)
    finally:
        await db.close()


def test_a_number_is_no_head_until_there_is_one_row() -> None:
    with pytest.raises(Exception, match="number"):
        decode(b'{"service":"x","epoch":1,"number":0,"digest":"' + b"a" * 64 + b'","at":"2026-01-01T00:00:00Z"}', AuditHead)
