"""The twin's base: as transactional as the real thing."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import ClassVar

import pytest

from intertie.clock import ManualClock
from intertie.contracts.base import Event, EventMeta
from intertie.contracts.identity import AuditQuery
from intertie.contracts.incident import ReportIncident, Severity
from intertie.errors import Refused, Stale
from intertie.ids import EventId
from intertie.store import MemoryStore, audit_reply, newer
from intertie.store.tx import StoreTx

NOW = datetime(2026, 5, 1, tzinfo=UTC)
META = EventMeta(id=EventId("evt-1"), type="t", source="s", entity="e", time=NOW, number=1, epoch=1)


class Moved(Event, frozen=True, kw_only=True):
    TYPE: ClassVar[str] = "io.intertie.thing.moved.v1"
    SERVICE: ClassVar[str] = "test"
    thing: str

    @property
    def entity(self) -> str:
        return self.thing


class Things(MemoryStore):
    """A twin with rows of its own."""

    def __init__(self) -> None:
        super().__init__("test", clock=ManualClock(NOW))
        self.things: dict[str, tuple[int, ...]] = {}
        self.by_tag: dict[str, list[str]] = {"red": []}

    async def move(self, thing: str, *, fail: bool = False) -> None:
        async with self.transaction() as tx:
            await leave_traces(tx)
            self.things[thing] = (1,)
            self.by_tag["red"].append(thing)
            await tx.emit(Moved(thing=thing, version=1))
            if fail:
                raise Refused("test.no", "no")


async def leave_traces(tx: StoreTx) -> None:
    """Any transaction will do: the twin's or PostgreSQL's."""
    assert await tx.first_time(META)
    await tx.audit(actor="ann", action="thing.move", target="t")
    await tx.fault(ReportIncident(key="k", kind="k", severity=Severity.INFO, title="t", text="t"))


def state(store: Things) -> dict[str, object]:
    return {name: repr(value) for name, value in vars(store).items() if not name.startswith("_") and name != "clock"}


async def test_a_verb_that_raises_leaves_nothing_changed() -> None:
    store = Things()
    before = state(store)
    with pytest.raises(Refused):
        await store.move("a", fail=True)
    assert state(store) == before
    assert await store.outbox.hint(0.01) is False


async def test_a_verb_that_was_cancelled_leaves_nothing_changed() -> None:
    store = Things()
    before = state(store)

    async def stuck() -> None:
        async with store.transaction():
            store.things["a"] = (1,)
            await asyncio.Event().wait()

    task = asyncio.create_task(stuck())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert state(store) == before


async def test_a_verb_that_returns_leaves_everything_where_tests_can_read_it() -> None:
    store = Things()
    await store.move("a")
    assert store.things == {"a": (1,)}
    assert [event.entity for event in store.events] == ["fault/test/k", "a"]
    assert [row.action for row in store.audits] == ["thing.move"]
    assert store.seen == {("evt-1", "")}


async def test_transactions_wait_for_one_another() -> None:
    store = Things()
    order: list[str] = []

    async def verb(name: str) -> None:
        async with store.transaction():
            order.append(f"{name}+")
            await asyncio.sleep(0)
            order.append(f"{name}-")

    await asyncio.gather(verb("a"), verb("b"))
    assert order == ["a+", "a-", "b+", "b-"]


async def test_a_transaction_inside_a_transaction_is_our_bug() -> None:
    store = Things()
    with pytest.raises(AssertionError, match="inside a transaction"):
        async with store.transaction(), store.transaction():
            pass


async def test_one_leads_at_a_time_and_a_deposed_one_is_refused() -> None:
    store = Things()
    async with store.leading("planner") as leader:
        await store.fence(leader)
        following = store.take_office("planner")
        with pytest.raises(Stale):
            await store.fence(leader)
        await store.fence(following)
    assert (leader.number, following.number) == (1, 2)


async def test_audit_rows_are_paged_newest_first() -> None:
    store = Things()
    for number in range(4):
        await store.audit(actor="ann", action="a", target=str(number))
    first = (await audit_reply(store, AuditQuery(limit=2))).rows
    second = (await audit_reply(store, AuditQuery(limit=2, before=first[-1].id))).rows
    assert [row.target for row in (*first, *second)] == ["3", "2", "1", "0"]


@pytest.mark.parametrize(("held", "version", "applied"), [(None, 1, True), (1, 2, True), (2, 2, False), (3, 2, False)])
def test_only_a_higher_version_is_applied(held: int | None, version: int, applied: bool) -> None:
    assert newer(held, Moved(thing="a", version=version)) is applied
