"""The chainer of one service: chains what is committed in the audit, and hands the chain's head to identity.

Of several copies one works at a time (role `chainer`), and its every write takes the fence. Rows are found by a queue that their own insert
fills, never by their ids: who commits late is chained late. What is younger than the last anchor could be taken away unseen; how long that is,
is the anchors' interval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from intertie.bus import rpc
from intertie.bus.port import Bus
from intertie.contracts import endpoints
from intertie.contracts.audit import AnchorAudit, AuditChainQuery, AuditChainReply, AuditHead, AuditLink
from intertie.contracts.base import encode
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.identity import AuditRow
from intertie.errors import Conflict, IntertieError, Stale, Unavailable
from intertie.observe import log, metrics
from intertie.store.audit import chain_handlers
from intertie.store.memory import MemoryStore
from intertie.store.outbox import Leader
from intertie.store.pg import Database
from intertie.store.tx import Q, audit_row
from intertie.trust.chain import GENESIS, link_digest, row_bytes

if TYPE_CHECKING:
    pass

LOG = log.get("store.chainer")
CHAINED = metrics.Counter("intertie_audit_chained_total", "Audit rows that were chained", ("service",))

ROLE = "chainer"
# A row is chained within a second of its commit.
CHAIN_S = 0.5
# The default of INTERTIE_ANCHOR_S: rows younger than this could be removed unseen.
ANCHOR_S = 10.0
# One transaction of chaining: holds its locks for milliseconds.
BATCH = 500
# One page must fit NATS' 1 MiB with its headers.
PAGE_BYTES = 600 * 1024
# Rows without a link that one answer names; more would say nothing new.
UNCHAINED = 100
ANCHOR_CALL_S = 5.0

Anchor = Callable[[AuditHead], Awaitable[object]]
"""Hands a head to identity: `Unavailable` when it is away; `Conflict` when it keeps a head that this one contradicts."""


class ChainPort(Protocol):
    """One service's chain: PostgreSQL and the twin give it."""

    def leading(self) -> AbstractAsyncContextManager[Leader]: ...

    async def extend(self, leader: Leader, limit: int = BATCH) -> int:
        """Chain up to `limit` committed rows, in one fenced transaction; how many."""
        ...

    async def head(self) -> AuditHead | None: ...

    async def page(self, query: AuditChainQuery) -> AuditChainReply: ...


class Chainer:
    """One service's chainer. `run()` never returns."""

    def __init__(self, chain: ChainPort, service: str, anchor: Anchor, *, anchor_s: float = ANCHOR_S, beat_s: float = 1.0) -> None:
        """anchor_s: seconds between anchors, not scaled. beat_s: factor on the chainer's own beat."""
        self._chain, self._service, self._anchor = chain, service, anchor
        self._chain_s, self._anchor_s = CHAIN_S * beat_s, anchor_s
        self._anchored: tuple[int, int] | None = None
        self.leads = False

    async def run(self) -> NoReturn:
        """Chain and anchor whenever this process is the leader."""
        while True:
            try:
                async with self._chain.leading() as leader:
                    self.leads = True
                    await self._serve(leader)
            except (Unavailable, Stale) as err:
                LOG.warning("the chainer pauses", service=self._service, code=err.code, text=err.text)
                await asyncio.sleep(self._chain_s)
            finally:
                self.leads = False

    async def _serve(self, leader: Leader) -> NoReturn:
        # A new leader does not know what was anchored; identity answers a repeat with what it keeps.
        self._anchored = None
        now = asyncio.get_running_loop().time
        due = now()
        while True:
            await self.chain(leader)
            if now() >= due:
                due = now() + self._anchor_s
                await self.anchor(leader)
            await asyncio.sleep(self._chain_s)

    async def chain(self, leader: Leader) -> int:
        """Chain all that is committed; how many rows."""
        total = 0
        while taken := await self._chain.extend(leader, BATCH):
            total += taken
            CHAINED.inc(taken, service=self._service)
            if taken < BATCH:
                break
        return total

    async def anchor(self, leader: Leader) -> None:
        """Hand the head to identity if it moved. What identity refuses is said and tried again: the chain goes on, and a person looks."""
        head = await self._chain.head()
        if head is None or (head.epoch, head.number) == self._anchored:
            return
        try:
            await self._anchor(head)
        except Conflict as err:
            LOG.error("identity refuses the head of the audit chain", service=self._service, code=err.code, text=err.text)
        except IntertieError as err:
            LOG.warning("the audit's head is anchored later", service=self._service, code=err.code, text=err.text)
        else:
            self._anchored = (head.epoch, head.number)


def anchor_by(bus: Bus, claims: Callable[[], str]) -> Anchor:
    """Anchors over the bus, as the service whose claims these are."""

    async def anchor(head: AuditHead) -> None:
        await rpc.call(bus, endpoints.ANCHOR_AUDIT, AnchorAudit(head=head), claims=claims(), timeout_s=ANCHOR_CALL_S)

    return anchor


async def keep_audit(
    db: Database,
    bus: Bus,
    version: str,
    claims: Callable[[], str],
    verifier: rpc.Verifier,
    *,
    anchor_s: float = ANCHOR_S,
    beat_s: float = 1.0,
    also: Mapping[Endpoint[Any, Any], rpc.Serve] | None = None,
) -> NoReturn:
    """A service's audit as one task: its chain is served, and chained and anchored while this process leads. `also`: served beside it."""
    chain = PgChain(db)
    handlers = {**chain_handlers(chain, db.service), **(also or {})}
    serving = await rpc.serve(bus, db.service, version, handlers, verifier=verifier)
    try:
        await Chainer(chain, db.service, anchor_by(bus, claims), anchor_s=anchor_s, beat_s=beat_s).run()
    finally:
        await serving.close()


def next_links(before: tuple[int, int, bytes], epoch: int, rows: Sequence[AuditRow]) -> list[tuple[int, int, int, bytes, bytes]]:
    """(epoch, number, audit, digest, bytes) of the links that follow `before` (epoch, number, digest). Pure."""
    number, digest = (before[1] if before[0] == epoch else 0), before[2]
    links = []
    for row in rows:
        number += 1
        data = row_bytes(row)
        digest = link_digest(digest, epoch, number, data)
        links.append((epoch, number, row.id, digest, data))
    return links


class PgChain:
    """`ChainPort` of one service's schema."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def leading(self) -> AbstractAsyncContextManager[Leader]:
        return self._db.leading(ROLE)

    async def extend(self, leader: Leader, limit: int = BATCH) -> int:
        async with self._db.transaction() as tx:
            waiting = await tx.one(Q.chain_waiting)
            if waiting is None or not waiting["waiting"]:
                return 0
            await tx.fence(leader)
            taken = sorted(row["audit"] for row in await tx.all(Q.chain_take, limit))
            rows = [audit_row(row) for row in await tx.all(Q.chain_rows, taken)]
            head = await tx.one(Q.chain_head)
            before = (head["epoch"], head["number"], head["digest"]) if head is not None else (0, 0, GENESIS)
            await tx.many(Q.chain_add, next_links(before, max(leader.epoch, before[0]), rows))
            return len(taken)

    async def head(self) -> AuditHead | None:
        async with self._db.transaction(read_only=True) as tx:
            row = await tx.one(Q.chain_head)
        if row is None:
            return None
        return AuditHead(
            service=self._db.service, epoch=row["epoch"], number=row["number"], digest=row["digest"].hex(), at=self._db.clock.now()
        )

    async def page(self, query: AuditChainQuery) -> AuditChainReply:
        # One snapshot: a row that is chained between two statements would look as if it were in no link.
        async with self._db.transaction(read_only=True, isolation="repeatable read") as tx:
            rows = await tx.all(Q.chain_page, query.after_epoch, query.after_number, query.limit + 1)
            missing = await tx.all(Q.chain_missing, UNCHAINED) if len(rows) <= query.limit else []
        links = [
            AuditLink(
                epoch=row["epoch"],
                number=row["number"],
                audit=row["audit"],
                digest=row["digest"].hex(),
                row=row["row"].decode("utf-8", errors="replace"),
                found=audit_row(row) if row["id"] is not None else None,
            )
            for row in rows[: query.limit]
        ]
        waiting = [row["id"] for row in missing if row["waiting"]]
        return _reply(self._db.service, links, len(rows) > query.limit, [audit_row(row) for row in missing], waiting)


class MemoryChain:
    """`ChainPort` of a twin."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def leading(self) -> AbstractAsyncContextManager[Leader]:
        return self._store.leading(ROLE)

    async def extend(self, leader: Leader, limit: int = BATCH) -> int:
        store = self._store
        async with store.transaction() as tx:
            await tx.fence(leader)
            chained = {link.audit for link in store.audit_links}
            rows = [row for row in store.audits if row.id not in chained][:limit]
            last = store.audit_links[-1] if store.audit_links else None
            before = (last.epoch, last.number, bytes.fromhex(last.digest)) if last is not None else (0, 0, GENESIS)
            for epoch, number, audit, digest, data in next_links(before, max(leader.epoch, before[0]), rows):
                link = AuditLink(epoch=epoch, number=number, audit=audit, digest=digest.hex(), row=data.decode(), found=None)
                store.audit_links.append(link)
            return len(rows)

    async def head(self) -> AuditHead | None:
        if not self._store.audit_links:
            return None
        last = self._store.audit_links[-1]
        return AuditHead(service=self._store.service, epoch=last.epoch, number=last.number, digest=last.digest, at=self._store.clock.now())

    async def page(self, query: AuditChainQuery) -> AuditChainReply:
        store = self._store
        rows = {row.id: row for row in store.audits}
        after = [link for link in store.audit_links if (link.epoch, link.number) > (query.after_epoch, query.after_number)]
        chained = {link.audit for link in store.audit_links}
        missing = [row for row in store.audits if row.id not in chained] if len(after) <= query.limit else []
        links = [_with(link, rows.get(link.audit)) for link in after[: query.limit]]
        return _reply(store.service, links, len(after) > query.limit, missing[:UNCHAINED], [row.id for row in missing[:UNCHAINED]])


def _reply(service: str, links: list[AuditLink], more: bool, missing: list[AuditRow], waiting: list[int]) -> AuditChainReply:
    """As many of the links as one answer carries; rows without a link only with the last page."""
    kept, left = list[AuditLink](), PAGE_BYTES
    for link in links:
        left -= len(encode(link)) + 1
        if kept and left < 0:
            return AuditChainReply(service=service, links=kept, more=True)
        kept.append(link)
    return AuditChainReply(service=service, links=kept, more=more, unchained=missing, waiting=waiting)


def _with(link: AuditLink, row: AuditRow | None) -> AuditLink:
    return AuditLink(epoch=link.epoch, number=link.number, audit=link.audit, digest=link.digest, row=link.row, found=row)
