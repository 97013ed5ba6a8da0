"""The relay's port on PostgreSQL. Every write takes the relay's fence in its own transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import asyncpg

from intertie.contracts.base import Head
from intertie.ids import EventId
from intertie.store.outbox import INBOX_S, RETENTION_S, Leader, NewEvent, OutboxRow, StreamMark, parse_headers, refusal, share
from intertie.store.tx import Q

if TYPE_CHECKING:
    from intertie.store.pg import Database

RELAY = "relay"
# A step of pruning holds its locks for milliseconds; the next step is asked for at once while there is more.
PRUNE_ROWS = 5_000


class PgOutbox:
    """`OutboxPort` of one service's schema."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def leading(self) -> AbstractAsyncContextManager[Leader]:
        return self._db.leading(RELAY)

    async def hint(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._db.committed.wait()
        except TimeoutError:
            return False
        self._db.committed.clear()
        return True

    def ring(self) -> None:
        self._db.committed.set()

    async def take(self, leader: Leader, mark: StreamMark, limit: int) -> Sequence[OutboxRow]:
        since = self._db.clock.now() - timedelta(seconds=RETENTION_S)
        async with self._db.transaction(reserved=True) as tx:
            row = await tx.one(Q.outbox_due, mark.generation, since)
            if row is None or not row["due"]:
                return []
            await tx.fence(leader)
            await tx.run(Q.outbox_number, limit)
            fresh = [_row(row) for row in await tx.all(Q.outbox_fresh, limit)]
            lost = [_row(row) for row in await tx.all(Q.outbox_lost, mark.generation, since, limit)] if mark.generation > 1 else []
        return share(fresh, lost, limit)

    async def published(self, leader: Leader, mark: StreamMark, ids: Sequence[int], head: int) -> None:
        now = self._db.clock.now()
        async with self._db.transaction(reserved=True) as tx:
            await tx.fence(leader)
            await tx.run(Q.outbox_published, list(ids), mark.generation, now)
            await tx.run(Q.stream_mark_head, mark.stream, head, now)

    async def refused(self, leader: Leader, mark: StreamMark, row: OutboxRow, error: str) -> None:
        letter, report = refusal(self._db.service, row, error, self._db.clock.now())
        async with self._db.transaction(reserved=True) as tx:
            await tx.fence(leader)
            await tx.run(Q.outbox_published, [row.id], mark.generation, None)
            await tx.dead_letter(letter)
            if report is not None:
                await tx.fault(report)

    async def mark(self, stream: str) -> StreamMark | None:
        async with self._db.transaction(reserved=True, read_only=True) as tx:
            row = await tx.one(Q.stream_mark_load, stream)
        return _mark(row) if row is not None else None

    async def renew(self, leader: Leader, stream: str, created: datetime, head: int) -> StreamMark:
        async with self._db.transaction(reserved=True) as tx:
            await tx.fence(leader)
            row = await tx.one(Q.stream_mark_renew, stream, created, head, self._db.clock.now())
        assert row is not None, "an upsert returns its row"
        return _mark(row)

    async def heads(self) -> Sequence[Head]:
        async with self._db.transaction(reserved=True, read_only=True) as tx:
            rows, standing = await tx.all(Q.outbox_heads), await tx.one(Q.epoch_load)
        assert standing is not None, "the first migration makes the row"
        # Of a noun that was not numbered yet since the epoch was raised that alone is said: who listens takes a snapshot.
        begun = (int(standing["epoch"]), 0)
        heads = [(row["noun"], max((row["epoch"], row["number"]), begun)) for row in rows]
        return [Head(service=self._db.service, noun=noun, epoch=epoch, number=number) for noun, (epoch, number) in heads]

    async def prune(self, leader: Leader) -> int:
        now = self._db.clock.now()
        async with self._db.transaction(reserved=True) as tx:
            await tx.fence(leader)
            events = await tx.run(Q.outbox_prune, now - timedelta(seconds=RETENTION_S), PRUNE_ROWS)
            marks = await tx.run(Q.inbox_prune, now - timedelta(seconds=INBOX_S), PRUNE_ROWS)
        return events + marks


def _row(row: asyncpg.Record) -> OutboxRow:
    event = NewEvent(
        event_id=EventId(row["event_id"]),
        type=row["type"],
        noun=row["noun"],
        entity=row["entity"],
        version=row["version"],
        subject=row["subject"],
        body=row["body"],
        headers=parse_headers(row["headers"]),
        created_at=row["created_at"],
    )
    return OutboxRow(row["id"], event, row["epoch"], row["number"])


def _mark(row: asyncpg.Record) -> StreamMark:
    return StreamMark(row["stream"], row["generation"], row["created"], row["head"])
