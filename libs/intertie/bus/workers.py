"""A bounded backlog that a bounded number of workers empties. Both buses hand arriving messages here.

nats-py calls a subscription back strictly one message at a time (field case BR-123); here a slow handler occupies one worker and the
others go on. When the backlog is full the oldest goes: on the bus a newer word is worth more, and whoever needs each word has a lane.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextvars import Context
from typing import Generic, TypeVar

from intertie.observe import log

LOG = log.get("bus")

T = TypeVar("T")

# A handler that never waits would otherwise hold the loop for a whole backlog.
_BREATHE_EVERY = 64


# Between two reminders of a task that is to end, and how long it is reminded.
_REMIND_S = 0.1
_REMIND_LIMIT_S = 5.0


async def put_down(tasks: Iterable[asyncio.Task[None]], grace_s: float = 0.0) -> None:
    """Wait `grace_s` for these tasks, then cancel them until they are gone.

    Until: nats-py swallows a cancellation in several places, and so does `asyncio.wait_for` of Python 3.11 when what it waited for comes in
    the same turn of the loop. A task that was cancelled once may go on for ever. What still runs after some seconds is left behind.
    """
    me = asyncio.current_task()
    given = {task for task in tasks if task is not me}
    running = {task for task in given if not task.done()}
    loop = asyncio.get_running_loop()
    if running and grace_s > 0:
        _, running = await asyncio.wait(running, timeout=grace_s)
    end = loop.time() + _REMIND_LIMIT_S
    while running and loop.time() < end:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=_REMIND_S)
    if running:
        LOG.error("tasks did not end", tasks=sorted(task.get_name() for task in running))
    for task in given - running:
        if not task.cancelled() and (error := task.exception()):
            LOG.error("a task had failed", task=task.get_name(), exc_info=error)


class Workers(Generic[T]):
    """`handle` must not raise. Tasks exist only while there is work, each in an empty context so that no caller's trace leaks in."""

    def __init__(self, handle: Callable[[T], Awaitable[None]], *, workers: int, backlog: int, dropped: Callable[[T], None]) -> None:
        assert workers >= 1 and backlog >= 1, "a pool without a worker or a place never works"
        self._handle = handle
        self._limit = workers
        self._backlog = backlog
        self._dropped = dropped
        self._waiting: deque[T] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._backlog

    def put(self, item: T) -> None:
        """Take one in; the oldest waiting is dropped if there is no place."""
        if self._closed:
            return
        if len(self._waiting) >= self._backlog:
            self._dropped(self._waiting.popleft())
        self._waiting.append(item)
        if len(self._tasks) < self._limit:
            task = asyncio.get_running_loop().create_task(self._work(), context=Context())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self) -> None:
        done = 0
        while self._waiting:
            await self._handle(self._waiting.popleft())
            done += 1
            if done % _BREATHE_EVERY == 0:
                await asyncio.sleep(0)
        # Leave before the next put looks, not in the done callback one loop turn later: else that item would wait for another.
        task = asyncio.current_task()
        if task is not None:
            self._tasks.discard(task)

    async def close(self, grace_s: float = 0.0) -> None:
        """Take nothing more; wait `grace_s` for what runs, then cancel it."""
        self._closed = True
        self._waiting.clear()
        await put_down(list(self._tasks), grace_s)
