"""Anchors: the heads of all services' audit chains, kept here append-only, signed, and told to whoever keeps them outside.

A service anchors its own chain only. A head that says less than one that is kept, or another digest for the same number, means that the chain
was cut back or written anew: it is refused, and a person is told. An anchor is its own record; an audit row of it would move the head each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

from intertie.bus.rpc import Caller, Serve
from intertie.clock import Clock
from intertie.contracts import endpoints
from intertie.contracts.audit import AnchorAudit, AuditAnchor, AuditAnchored, AuditAnchorsQuery, AuditAnchorsReply, AuditHead
from intertie.contracts.base import decode, encode
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.incident import ReportIncident, Severity
from intertie.errors import Conflict, Denied
from intertie.identity.pg import Q
from intertie.observe import log
from intertie.store import Database, MemoryStore, StoreTx, numbered_version
from intertie.trust.chain import sign_anchor
from intertie.trust.keys import Key
from intertie.trust.rights import require

LOG = log.get("identity.anchors")


class Told(Enum):
    """What a head is beside the last one that is kept."""

    NEW = "new"
    REPEATED = "repeated"
    LATE = "late"
    """Read before the one that is kept, and delivered after it."""
    CUT = "cut"
    """The chain ends before what was anchored."""
    REWRITTEN = "rewritten"
    """The same number with another digest."""


def judge_head(last: AuditHead | None, head: AuditHead) -> Told:
    """Pure: whether a head goes on from the last one."""
    if last is None or (head.epoch, head.number) > (last.epoch, last.number):
        return Told.NEW
    if (head.epoch, head.number) == (last.epoch, last.number):
        return Told.REPEATED if head.digest == last.digest else Told.REWRITTEN
    return Told.CUT if head.at > last.at else Told.LATE


Sign = Callable[[AuditHead], AuditAnchor]


class AnchorStore(Protocol):
    """Where anchors lie: PostgreSQL, or the twin."""

    async def keep(self, head: AuditHead, sign: Sign) -> tuple[Told, AuditAnchor]:
        """Keep a head that is new, with its event; what is kept for it, or the last one that it contradicts."""
        ...

    async def report(self, report: ReportIncident, *, actor: str, target: str, result: str) -> None:
        """A refusal: its incident and its audit row."""
        ...

    async def newest(self) -> list[AuditAnchor]: ...

    async def page(self, query: AuditAnchorsQuery) -> list[AuditAnchor]: ...


class Anchors:
    """The endpoints."""

    def __init__(self, store: AnchorStore, key: Key, clock: Clock) -> None:
        self._store, self._key, self._clock = store, key, clock
        self._refused: set[str] = set()

    def handlers(self) -> Mapping[Endpoint[Any, Any], Serve]:
        return {endpoints.ANCHOR_AUDIT: self.anchor, endpoints.AUDIT_ANCHORS: self.anchors}

    async def anchor(self, request: AnchorAudit, caller: Caller) -> AuditAnchor:
        require(caller.claims, "audit.anchor")
        head = request.head
        if caller.claims.iss != head.service:
            raise Denied("identity.anchor_foreign", f"{caller.claims.iss} may not anchor the audit of {head.service}")
        told, kept = await self._store.keep(head, lambda new: sign_anchor(self._key, new, self._clock.now()))
        if told in (Told.CUT, Told.REWRITTEN):
            await self._refuse(head, kept, told, caller.claims.sub)
        if told is Told.NEW:
            # The line that an operator's log collector keeps outside this hub.
            LOG.info("audit anchored", of=head.service, epoch=head.epoch, number=head.number, digest=head.digest, signature=kept.signature)
        return kept

    async def _refuse(self, head: AuditHead, kept: AuditAnchor, told: Told, actor: str) -> None:
        last = kept.head
        text = (
            f"{head.service} says that its audit chain ends at ({head.epoch}, {head.number}) {head.digest[:16]}…; "
            f"({last.epoch}, {last.number}) {last.digest[:16]}… was anchored before: the chain was {told.value}"
        )
        if head.service not in self._refused:  # Once per process: its audit row would move identity's own head each time.
            self._refused.add(head.service)
            report = ReportIncident(
                key=f"audit.{told.value}/{head.service}",
                kind=f"audit.{told.value}",
                severity=Severity.CRITICAL,
                title=f"The audit chain of {head.service} was {told.value}",
                text=f"{text}. Run `intertie audit verify`; after a restore the epoch must be raised (`intertie hub restored`).",
            )
            await self._store.report(report, actor=actor, target=head.service, result=f"identity.anchor_{told.value}")
        raise Conflict(f"identity.anchor_{told.value}", text, next_step="intertie audit verify")

    async def anchors(self, query: AuditAnchorsQuery, caller: Caller) -> AuditAnchorsReply:
        require(caller.claims, "audit.read")
        if query.newest:
            return AuditAnchorsReply(anchors=await self._store.newest())
        found = await self._store.page(query)
        return AuditAnchorsReply(anchors=found[: query.limit], more=len(found) > query.limit)


async def _refusal(tx: StoreTx, report: ReportIncident, actor: str, target: str, result: str) -> None:
    await tx.fault(report)
    await tx.audit(actor=actor, action="audit.anchor", target=target, reason=report.text, result=result)


class PgAnchors:
    """`AnchorStore` in identity's schema. `first_version`: of this epoch, from which the anchors' events count."""

    def __init__(self, db: Database, *, first_version: int = 1) -> None:
        self._db, self._first = db, first_version

    async def keep(self, head: AuditHead, sign: Sign) -> tuple[Told, AuditAnchor]:
        async with self._db.transaction() as tx:
            await tx.run(Q.anchor_lock, head.service)
            row = await tx.one(Q.anchor_last, head.service)
            last = decode(row["anchor"], AuditAnchor) if row is not None else None
            told = judge_head(last.head if last is not None else None, head)
            if told is not Told.NEW:
                assert last is not None, "the first head of a service is new"
                return told, last
            anchor, nth = sign(head), row["nth"] + 1 if row is not None else 1
            await tx.run(Q.anchor_add, head.service, head.epoch, head.number, nth, encode(anchor))
            await tx.emit(AuditAnchored(version=numbered_version(nth, self._first), anchor=anchor))
            return told, anchor

    async def report(self, report: ReportIncident, *, actor: str, target: str, result: str) -> None:
        async with self._db.transaction() as tx:
            await _refusal(tx, report, actor, target, result)

    async def newest(self) -> list[AuditAnchor]:
        async with self._db.transaction(read_only=True) as tx:
            return [decode(row["anchor"], AuditAnchor) for row in await tx.all(Q.anchors_newest)]

    async def page(self, query: AuditAnchorsQuery) -> list[AuditAnchor]:
        async with self._db.transaction(read_only=True) as tx:
            rows = await tx.all(Q.anchors_page, query.service, query.after_epoch, query.after_number, query.limit + 1)
        return [decode(row["anchor"], AuditAnchor) for row in rows]


class MemoryAnchors:
    """`AnchorStore` in memory, beside a twin of identity."""

    def __init__(self, store: MemoryStore, *, first_version: int = 1) -> None:
        self._store, self._first = store, first_version
        self.kept: dict[str, list[AuditAnchor]] = {}

    async def keep(self, head: AuditHead, sign: Sign) -> tuple[Told, AuditAnchor]:
        async with self._store.transaction() as tx:
            kept = self.kept.setdefault(head.service, [])
            told = judge_head(kept[-1].head if kept else None, head)
            if told is not Told.NEW:
                return told, kept[-1]
            anchor = sign(head)
            await tx.emit(AuditAnchored(version=numbered_version(len(kept) + 1, self._first), anchor=anchor))
            kept.append(anchor)
            return told, anchor

    async def report(self, report: ReportIncident, *, actor: str, target: str, result: str) -> None:
        async with self._store.transaction() as tx:
            await _refusal(tx, report, actor, target, result)

    async def newest(self) -> list[AuditAnchor]:
        return [kept[-1] for _, kept in sorted(self.kept.items()) if kept]

    async def page(self, query: AuditAnchorsQuery) -> list[AuditAnchor]:
        after = (query.after_epoch, query.after_number)
        kept: Sequence[AuditAnchor] = self.kept.get(query.service, [])
        return [anchor for anchor in kept if (anchor.head.epoch, anchor.head.number) > after][: query.limit + 1]
