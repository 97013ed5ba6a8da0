"""One transaction as the service stores see it: named queries, and the four things that a write leaves beside its change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Protocol

import asyncpg

from intertie.contracts.base import Event, EventMeta, encode
from intertie.contracts.identity import AuditQuery, AuditRow
from intertie.contracts.incident import FaultReported, ReportIncident
from intertie.errors import Refused, Stale
from intertie.ids import EventId
from intertie.observe import tracing
from intertie.store.failures import translated
from intertie.store.outbox import DeadLetter, Leader, new_row, parse_headers
from intertie.store.queries import load_queries, plain

if TYPE_CHECKING:
    Connection = asyncpg.Connection[asyncpg.Record]
    PooledConnection = asyncpg.pool.PoolConnectionProxy[asyncpg.Record]

Q = load_queries("intertie.store")


class StoreTx(Protocol):
    """What a write leaves beside its change, in the same transaction; PostgreSQL and the twins both give it."""

    async def emit(self, event: Event) -> EventId: ...

    async def audit(self, *, actor: str, action: str, target: str, reason: str = "", result: str = "ok") -> None: ...

    async def first_time(self, meta: EventMeta, consumer: str = "") -> bool: ...

    async def fence(self, leader: Leader) -> None: ...

    async def fault(self, report: ReportIncident) -> EventId: ...


class Tx:
    """An open transaction. Arguments are checked (`Refused('store.value')`): no decimal that is no number, no moment without an offset.

    jsonb goes in and comes out as JSON text (bytes are taken too): `contracts.encode` and `contracts.decode` do the rest. numeric is
    `Decimal`, timestamptz an aware UTC datetime, bytea bytes.
    """

    def __init__(self, connection: Connection | PooledConnection, service: str, now: Callable[[], datetime]) -> None:
        self._connection = connection
        self._service = service
        self._now = now
        self._savepoints = 0
        self.emitted = 0

    async def one(self, query: str, *args: object) -> asyncpg.Record | None:
        """The first row, or None."""
        check_arguments(args)
        with translated():
            return await self._connection.fetchrow(plain(query), *args)

    async def all(self, query: str, *args: object) -> list[asyncpg.Record]:
        """Every row; a query that could be large carries its own LIMIT."""
        check_arguments(args)
        with translated():
            return await self._connection.fetch(plain(query), *args)

    async def run(self, query: str, *args: object) -> int:
        """Execute; how many rows were touched (0 for a statement that touches none)."""
        check_arguments(args)
        with translated():
            tag = await self._connection.execute(plain(query), *args)
        count = tag.rpartition(" ")[2]
        return int(count) if count.isdigit() else 0

    async def many(self, query: str, rows: Iterable[Sequence[object]]) -> None:
        """Execute once per row, in one round trip; for idempotent bulk inserts `unnest($1::text[], …)` is faster still."""
        checked = [tuple(row) for row in rows]
        check_arguments(checked)
        with translated():
            await self._connection.executemany(plain(query), checked)

    async def prepare(self, query: str) -> None:
        """Let PostgreSQL parse a statement without running it."""
        with translated():
            await self._connection.prepare(plain(query))

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Survive an error of the block (a `Violated` that means something): only the block is undone."""
        self._savepoints += 1
        name = f"s{self._savepoints}"
        await self.run(f"SAVEPOINT {name}")
        try:
            yield
        except Exception:
            await self.run(f"ROLLBACK TO SAVEPOINT {name}")
            raise
        finally:
            self._savepoints -= 1
        await self.run(f"RELEASE SAVEPOINT {name}")

    async def emit(self, event: Event) -> EventId:
        """Tell others, if and when this transaction commits; the relay numbers and publishes it."""
        row = new_row(event, self._service, self._now(), tracing.traceparent())
        await self.run(
            Q.outbox_insert,
            row.event_id,
            row.type,
            row.noun,
            row.entity,
            row.version,
            row.subject,
            row.body,
            encode(row.headers),
            row.created_at,
        )
        self.emitted += 1
        return row.event_id

    async def audit(self, *, actor: str, action: str, target: str, reason: str = "", result: str = "ok") -> None:
        """Who did what, on what, why, with which result."""
        await self.run(Q.audit_insert, self._now(), actor, action, target, reason, result, tracing.trace_id())

    async def first_time(self, meta: EventMeta, consumer: str = "") -> bool:
        """False if this event was applied before; else mark it as applied, if and when this transaction commits.

        Two copies handled at once: the second waits here for the first's commit.
        """
        return await self.run(Q.inbox_insert, meta.id, consumer) == 1

    async def fence(self, leader: Leader) -> None:
        """Refuse to write for a leader who is no longer one: `Stale('store.not_leader')`. Holds its row until commit."""
        if await self.one(Q.leader_fence, leader.role, leader.epoch, leader.number) is None:
            raise Stale("store.not_leader", f"another {leader.role} took office after ({leader.epoch}, {leader.number})")

    async def fault(self, report: ReportIncident) -> EventId:
        """Emit `fault.reported`: a person must know of this."""
        row = await self.one(Q.fault_next_version)
        assert row is not None, "a sequence always answers"
        return await self.emit(FaultReported(version=row["version"], service=self._service, report=report, at=self._now()))

    async def dead_letter(self, letter: DeadLetter) -> None:
        """Keep an event that was given up."""
        await self.run(
            Q.dead_letter_insert,
            letter.consumer,
            letter.event_id,
            letter.type,
            letter.subject,
            encode(letter.headers),
            letter.body,
            letter.error,
            letter.tries,
            letter.at,
        )

    async def open_dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """Events given up and not replayed since, oldest first."""
        return [
            DeadLetter(
                consumer=row["consumer"],
                event_id=row["event_id"],
                type=row["type"],
                subject=row["subject"],
                headers=parse_headers(row["headers"]),
                body=row["body"],
                error=row["error"],
                tries=row["tries"],
                at=row["at"],
            )
            for row in await self.all(Q.dead_letters_open, limit)
        ]

    async def read_audit(self, query: AuditQuery) -> list[AuditRow]:
        """Audit rows, newest first, before an id."""
        return [audit_row(row) for row in await self.all(Q.audit_read, query.limit, query.before)]


def audit_row(row: asyncpg.Record) -> AuditRow:
    """A row of the audit table, as it is read and chained."""
    return AuditRow(
        id=row["id"],
        at=row["at"],
        actor=row["actor"],
        action=row["action"],
        target=row["target"],
        reason=row["reason"],
        result=row["result"],
        trace_id=row["trace_id"],
    )


_TRUSTED = frozenset({str, int, float, bool, bytes, type(None)})
"""Of which every value may be stored: a column of a thousand rows is looked at in one go."""


def check_arguments(args: Iterable[object]) -> None:
    """Refuse values that PostgreSQL would take and nobody could trust afterwards."""
    for arg in args:
        if type(arg) in _TRUSTED or (type(arg) is list and _TRUSTED.issuperset(map(type, arg))):
            continue
        if isinstance(arg, Decimal):
            if not arg.is_finite():
                raise Refused("store.value", f"{arg} is not a number")
        elif isinstance(arg, datetime):
            if arg.tzinfo is None:
                raise Refused("store.value", f"{arg.isoformat()} has no offset")
        elif isinstance(arg, list | tuple):
            check_arguments(arg)
