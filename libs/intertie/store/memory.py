"""The store in memory: the base of every service's twin, for tests and the simulator. Deterministic, and as transactional as PostgreSQL: a verb
that raises leaves nothing changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from intertie.clock import Clock, SystemClock
from intertie.contracts.audit import AuditLink
from intertie.contracts.base import Event, EventMeta, Head
from intertie.contracts.identity import AuditQuery, AuditRow
from intertie.contracts.incident import FaultReported, ReportIncident
from intertie.errors import Stale
from intertie.ids import EventId
from intertie.observe import tracing
from intertie.store.outbox import INBOX_S, RETENTION_S, DeadLetter, Leader, NewEvent, OutboxRow, StreamMark, new_row, refusal, share
from intertie.store.versions import first_version


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """A row of the twin's outbox."""

    event: NewEvent
    epoch: int = 0
    number: int = 0
    generation: int = 0


class MemoryStore:
    """Base of a twin. Keep rows in dicts, lists and sets of *immutable* values on `self`; wrap each writing verb in `transaction()`.

    ```python
    async def submit(self, job: JobRecord) -> None:
        async with self.transaction() as tx:
            self.jobs[job.id] = job
            await tx.emit(JobChanged(…))
    ```
    Tests read `events` (contracts, in order), `audits`, `seen` and `dead_letters`. Names with a leading underscore take no part in rollback.
    """

    def __init__(self, service: str = "test", *, clock: Clock | None = None) -> None:
        self.service = service
        self.clock: Clock = clock or SystemClock()
        self.events: list[Event] = []
        self.audits: list[AuditRow] = []
        self.audit_links: list[AuditLink] = []
        self.seen: set[tuple[EventId, str]] = set()
        self.dead_letters: list[DeadLetter] = []
        self.leaders: dict[str, Leader] = {}
        self.service_epoch = 1
        self.fault_version = 0
        self.rows: dict[int, StoredEvent] = {}
        self.last_row = 0
        self.marks: dict[str, StreamMark] = {}
        self.given: dict[tuple[str, int], int] = {}
        """(noun, epoch) → last number."""
        self.seen_at: dict[tuple[EventId, str], datetime] = {}
        self._lock = asyncio.Lock()
        self._holder: asyncio.Task[object] | None = None
        self._wakeup = asyncio.Event()
        self._offices: dict[str, asyncio.Lock] = {}

    @asynccontextmanager
    async def transaction(self, *, timeout_s: float = 5.0, reserved: bool = False, read_only: bool = False) -> AsyncIterator[MemoryStore]:
        """Serial; whatever the block changed on `self` is undone if it raises. The arguments are Database's and change nothing here."""
        task = asyncio.current_task()
        if self._holder is task:
            raise AssertionError("a transaction inside a transaction: PostgreSQL would have taken two connections")
        async with self._lock:
            self._holder = task
            before = {name: self._copied(value) for name, value in vars(self).items() if not name.startswith("_")}
            emitted = self.last_row
            try:
                yield self
            except BaseException:
                for name in [name for name in vars(self) if not name.startswith("_") and name not in before]:
                    delattr(self, name)
                vars(self).update(before)
                raise
            finally:
                self._holder = None
            if self.last_row > emitted:
                self.wakeup.set()

    def _copied(self, value: Any) -> Any:
        """A copy of the containers; what they hold is immutable by the twin's rule and is shared."""
        match value:
            case dict():
                return {key: self._copied(item) for key, item in value.items()}
            case list():
                return [self._copied(item) for item in value]
            case set():
                return set(value)
            case _:
                return value

    async def emit(self, event: Event) -> EventId:
        row = new_row(event, self.service, self.clock.now(), tracing.traceparent())
        self.events.append(event)
        self.last_row += 1
        self.rows[self.last_row] = StoredEvent(row)
        if self._holder is None:
            self.wakeup.set()
        return row.event_id

    async def audit(self, *, actor: str, action: str, target: str, reason: str = "", result: str = "ok") -> None:
        number = len(self.audits) + 1
        self.audits.append(
            AuditRow(
                id=number,
                at=self.clock.now(),
                actor=actor,
                action=action,
                target=target,
                reason=reason,
                result=result,
                trace_id=tracing.trace_id(),
            )
        )

    async def first_time(self, meta: EventMeta, consumer: str = "") -> bool:
        key = (meta.id, consumer)
        if key in self.seen:
            return False
        self.seen.add(key)
        self.seen_at[key] = self.clock.now()
        return True

    async def fence(self, leader: Leader) -> None:
        if self.leaders.get(leader.role) != leader:
            raise Stale("store.not_leader", f"another {leader.role} took office after ({leader.epoch}, {leader.number})")

    async def fault(self, report: ReportIncident) -> EventId:
        self.fault_version += 1
        return await self.emit(FaultReported(version=self.fault_version, service=self.service, report=report, at=self.clock.now()))

    async def dead_letter(self, letter: DeadLetter) -> None:
        self.dead_letters.append(letter)

    async def open_dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        return self.dead_letters[:limit]

    async def keep_dead_letter(self, letter: DeadLetter, report: ReportIncident | None) -> None:
        async with self.transaction() as tx:
            await tx.dead_letter(letter)
            if report is not None:
                await tx.fault(report)

    async def read_audit(self, query: AuditQuery) -> list[AuditRow]:
        rows = [row for row in reversed(self.audits) if query.before is None or row.id < query.before]
        return rows[: query.limit]

    async def epoch(self) -> int:
        return self.service_epoch

    def raise_epoch(self, number: int) -> None:
        """As `epoch.raise_to`: every leader of the epoch before is out of office, and faults are counted anew, above all earlier ones."""
        self.service_epoch, self.leaders = number, {}
        self.fault_version = max(self.fault_version, first_version(number) - 1)

    @property
    def stream_epoch(self) -> int:
        return self.service_epoch if self.service_epoch > 1 else 0

    @asynccontextmanager
    async def leading(self, role: str) -> AsyncIterator[Leader]:
        """Lead `role` once nobody else of this store does."""
        async with self._offices.setdefault(role, asyncio.Lock()):
            yield self.take_office(role)

    def take_office(self, role: str) -> Leader:
        """Raise the number, as a new leader does; a test calls this to depose the one in office."""
        before = self.leaders.get(role)
        number = before.number + 1 if before is not None and before.epoch == self.service_epoch else 1
        self.leaders[role] = Leader(role, self.service_epoch, number)
        return self.leaders[role]

    @property
    def wakeup(self) -> asyncio.Event:
        """Set after each change that emitted an event; the relay clears it."""
        return self._wakeup

    @property
    def outbox(self) -> MemoryOutbox:
        return MemoryOutbox(self)


class MemoryOutbox:
    """`OutboxPort` of a twin."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def leading(self) -> AbstractAsyncContextManager[Leader]:
        return self._store.leading("relay")

    async def hint(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._store.wakeup.wait()
        except TimeoutError:
            return False
        self._store.wakeup.clear()
        return True

    def ring(self) -> None:
        self._store.wakeup.set()

    async def take(self, leader: Leader, mark: StreamMark, limit: int) -> Sequence[OutboxRow]:
        store = self._store
        since = store.clock.now() - timedelta(seconds=RETENTION_S)
        async with store.transaction() as tx:
            await tx.fence(leader)
            for key in [key for key, row in store.rows.items() if not row.number][:limit]:
                self._number(key)
            numbered = [(key, row) for key, row in store.rows.items() if row.number]
            fresh = [_taken(key, row) for key, row in numbered if row.generation == 0]
            lost = [_taken(key, row) for key, row in numbered if 0 < row.generation < mark.generation and row.event.created_at >= since]
            return share(fresh[:limit], lost[:limit], limit)

    def _number(self, key: int) -> None:
        store = self._store
        row = store.rows[key]
        place = (row.event.noun, store.service_epoch)
        store.given[place] = store.given.get(place, 0) + 1
        store.rows[key] = replace(row, epoch=store.service_epoch, number=store.given[place])

    async def published(self, leader: Leader, mark: StreamMark, ids: Sequence[int], head: int) -> None:
        store = self._store
        async with store.transaction() as tx:
            await tx.fence(leader)
            for key in ids:
                store.rows[key] = replace(store.rows[key], generation=mark.generation)
            known = store.marks[mark.stream]
            store.marks[mark.stream] = replace(known, head=max(known.head, head))

    async def refused(self, leader: Leader, mark: StreamMark, row: OutboxRow, error: str) -> None:
        store = self._store
        letter, report = refusal(store.service, row, error, store.clock.now())
        async with store.transaction() as tx:
            await tx.fence(leader)
            store.rows[row.id] = replace(store.rows[row.id], generation=mark.generation)
            await tx.dead_letter(letter)
            if report is not None:
                await tx.fault(report)

    async def mark(self, stream: str) -> StreamMark | None:
        return self._store.marks.get(stream)

    async def renew(self, leader: Leader, stream: str, created: datetime, head: int) -> StreamMark:
        store = self._store
        async with store.transaction() as tx:
            await tx.fence(leader)
            known = store.marks.get(stream)
            store.marks[stream] = StreamMark(stream, known.generation + 1 if known else 1, created, head)
            return store.marks[stream]

    async def heads(self) -> Sequence[Head]:
        latest: dict[str, tuple[int, int]] = {}
        for (noun, epoch), number in self._store.given.items():
            latest[noun] = max(latest.get(noun, (self._store.service_epoch, 0)), (epoch, number))
        return [Head(service=self._store.service, noun=noun, epoch=e, number=n) for noun, (e, n) in sorted(latest.items())]

    async def prune(self, leader: Leader) -> int:
        store, now = self._store, self._store.clock.now()
        async with store.transaction() as tx:
            await tx.fence(leader)
            old = [key for key, row in store.rows.items() if row.generation and row.event.created_at < now - timedelta(seconds=RETENTION_S)]
            for key in old:
                del store.rows[key]
            stale = [key for key, at in store.seen_at.items() if at < now - timedelta(seconds=INBOX_S)]
            for mark in stale:
                del store.seen_at[mark]
                store.seen.discard(mark)
            return len(old) + len(stale)


def _taken(key: int, row: StoredEvent) -> OutboxRow:
    return OutboxRow(key, row.event, row.epoch, row.number)
