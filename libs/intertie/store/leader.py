"""Leadership: one process per role acts at a time, and its writes prove it.

The session lock of a connection of its own chooses who tries; it does not fence, since it dies with the connection while the old leader's pool
still writes. What fences is the pair (epoch, number): taking office raises it, and every decision write reads it `FOR SHARE` in its own
transaction (`tx.fence`). Losing the connection, or seeing another number, ends the body.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import asyncpg

from intertie.errors import Stale, Unavailable
from intertie.store.failures import translated
from intertie.store.outbox import Leader
from intertie.store.tx import Q

# A second process takes over within this after the first one's connection ended.
TRY_EVERY_S = 0.5
# A silently cut link is noticed within beat + reply limit; a closed socket at once.
BEAT_S = 1.0
REPLY_S = 3.0

_T = TypeVar("_T")
Connect = Callable[[], Awaitable["asyncpg.Connection[asyncpg.Record]"]]


@asynccontextmanager
async def leading(connect: Connect, role: str) -> AsyncIterator[Leader]:
    """Wait until this process leads `role`, then run the body as its leader.

    The body is cancelled and `Stale('store.not_leader')` raised when the connection is lost or another took office. `Unavailable` if the
    database goes away while waiting.
    """
    connection = await _bounded(connect())
    watch: asyncio.Task[None] | None = None
    try:
        leader = await _take_office(connection, role)
        async with _until_lost() as limit:
            watch = asyncio.create_task(_watch(connection, leader, limit), name=f"leader-{role}")
            try:
                yield leader
            finally:
                watch.cancel()
    finally:
        # Closing politely could wait on a dead link; the server frees the lock when it sees the socket gone.
        connection.terminate()
        if watch is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await watch


@asynccontextmanager
async def _until_lost() -> AsyncIterator[asyncio.Timeout]:
    """A body that a watcher can end by rescheduling the limit to now."""
    limit = asyncio.timeout(None)
    try:
        async with limit:
            yield limit
    except TimeoutError as err:
        if not limit.expired():
            raise
        raise Stale("store.not_leader", "this process no longer leads: its connection was lost or another took office") from err


async def _take_office(connection: asyncpg.Connection[asyncpg.Record], role: str) -> Leader:
    holder = f"{platform.node()}/{os.getpid()}"
    while True:
        row = await _bounded(connection.fetchrow(Q.leader_lock.sql, role))
        if row is not None and row["held"]:
            break
        await asyncio.sleep(TRY_EVERY_S)
    row = await _bounded(connection.fetchrow(Q.leader_take.sql, role, holder))
    assert row is not None, "an upsert returns its row"
    return Leader(role, row["epoch"], row["number"])


async def _watch(connection: asyncpg.Connection[asyncpg.Record], leader: Leader, limit: asyncio.Timeout) -> None:
    """Look each beat whether the office is still held; when it is not, end the body."""
    lost = asyncio.Event()
    connection.add_termination_listener(lambda *_: lost.set())
    while not lost.is_set():
        try:
            async with asyncio.timeout(BEAT_S):
                await lost.wait()
        except TimeoutError:
            pass
        if lost.is_set():
            break
        try:
            row = await _bounded(connection.fetchrow(Q.leader_load.sql, leader.role))
        except (Unavailable, Stale):
            break
        if row is None or (row["epoch"], row["number"]) != (leader.epoch, leader.number):
            break
    limit.reschedule(asyncio.get_running_loop().time())


async def _bounded(call: Awaitable[_T]) -> _T:
    """One call on the office's own connection, bounded and in our words."""
    try:
        with translated():
            async with asyncio.timeout(REPLY_S):
                return await call
    except TimeoutError as err:
        raise Unavailable("store.timeout", f"PostgreSQL did not answer within {REPLY_S:g} s") from err
