"""What the store's tests share: a probe event, an open database of one test, a relay that runs beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from decimal import Decimal
from typing import Any, ClassVar

from tests.conftest import PgDatabase

from intertie.contracts.base import Event
from intertie.store import Database

SCHEMA = "scheduler"


class Probe(Event, frozen=True, kw_only=True):
    """An event of a noun that only tests know."""

    TYPE: ClassVar[str] = "io.intertie.probe.moved.v1"
    SERVICE: ClassVar[str] = "scheduler"

    probe: str
    price: Decimal = Decimal("1.50")

    @property
    def entity(self) -> str:
        return self.probe


class OtherProbe(Probe, frozen=True, kw_only=True):
    """Another noun, counted by itself."""

    TYPE: ClassVar[str] = "io.intertie.other.moved.v1"


@asynccontextmanager
async def opened(pg: PgDatabase, *, connections: int = 8, service: str = SCHEMA) -> AsyncIterator[Database]:
    """A migrated schema of the test's own database."""
    db = await Database.open(pg.url, password=pg.password, schema=service, connections=connections)
    try:
        await db.migrate("intertie.store")
        yield db
    finally:
        await db.close()


@asynccontextmanager
async def running(work: Coroutine[Any, Any, object]) -> AsyncIterator[asyncio.Task[object]]:
    """Something that runs for ever, beside the block; if it fails the block's end says so."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        done = task.done()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert not done, "what should run for ever has ended"


async def until(true: Callable[[], Awaitable[bool] | bool], what: str, *, within_s: float = 20.0) -> None:
    """Poll until it is so; fail with `what` if it never is."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        answer = true()
        if answer if isinstance(answer, bool) else await answer:
            return
        assert loop.time() < deadline, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.02)


async def emit(db: Database, *names: str, version: int = 1) -> None:
    """One transaction that says something of each probe."""
    async with db.transaction() as tx:
        for name in names:
            await tx.emit(Probe(probe=name, version=version))
