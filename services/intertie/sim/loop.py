"""An event loop whose time is virtual: when nothing is ready it jumps to the next timer. And parties: processes that live and die inside it.

A party owns the tasks that were made in its name. `kill` is SIGKILL: its doors (bus, disk, store) close first, so that whatever its tasks
still do while they unwind has no effect; `pause` is SIGSTOP: its callbacks are kept back until `resume`.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")

# A run that does more, and more in each of its virtual seconds, has a loop without a beat in it; the busiest healthy one does a tenth.
STEPS, STEPS_PER_S = 200_000, 20
# Between two turns of the loop: code takes time, and a wait that is shorter than a float can tell must end all the same.
TURN_S = 1e-6
# Done tasks of a party that may lie about.
PRUNE_AT = 200


class Stuck(AssertionError):
    """Nothing is ready and nothing is planned, or it never ends: our bug."""


class Party:
    """One process, or one machine with the jobs on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.paused = False
        self.asleep_at: float | None = None
        """Since when the whole machine stands still, and with it the clock that timers go by."""
        self.doom = ""
        """`before` or `after`: die at a commit, on that side of it …"""
        self.doom_in = 1
        """… the next one, or so many later."""
        self.parked: list[asyncio.Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        """In the order of their making; those that are done are thrown out now and then."""
        self.closing: list[Callable[[], None]] = []
        """What the kernel does to a process that is gone: close its sockets."""

    @cached_property
    def callbacks(self) -> Context:
        """For callbacks, one after the other: they leave nothing in it."""
        return self.context()

    def context(self) -> Context:
        context = Context()
        context.run(PARTY.set, self)
        return context

    def spawn(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        return asyncio.get_running_loop().create_task(work, name=name or self.name, context=self.context())

    def spawn_in(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """As `spawn`, for a loop that does not run yet."""
        return loop.create_task(work, name=self.name, context=self.context())

    def kill(self) -> None:
        self.dead = True
        self.resume()
        for close in self.closing:
            close()
        for task in list(self.tasks):
            task.cancel()

    def pause(self, *, asleep: bool = False) -> None:
        """`asleep`: CLOCK_MONOTONIC stands still too, and what a timer had left it has left afterwards."""
        self.paused = True
        if asleep and self.asleep_at is None:
            self.asleep_at = asyncio.get_running_loop().time()

    def resume(self) -> None:
        self.paused = False
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.unpark(self)

    def must_live(self) -> None:
        """At each door. A dead process does nothing any more, not even its clean-up."""
        if self.dead:
            raise asyncio.CancelledError


NOBODY = Party("nobody")
PARTY: ContextVar[Party] = ContextVar("party", default=NOBODY)


def _task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], *, context: Context | None = None, **more: object
) -> asyncio.Task[T]:
    """Each task belongs to the party whose context it gets, or else to the one that makes it."""
    party = PARTY.get()
    if context is not None:
        party = context.get(PARTY, party)
        if PARTY not in context:
            context.run(PARTY.set, party)
    task: asyncio.Task[T] = asyncio.Task(work, loop=loop, context=context)
    if party is not NOBODY:
        if len(party.tasks) > PRUNE_AT:
            party.tasks = [one for one in party.tasks if not one.done()]
        party.tasks.append(task)
        if party.dead:
            task.cancel()
    return task


class VirtualLoop(asyncio.base_events.BaseEventLoop):
    """Stock asyncio but for where time comes from: no selector, no socket, no thread."""

    _ready: Any

    def __init__(self) -> None:
        super().__init__()
        self._time = 0.0
        self._planned: list[tuple[float, int, asyncio.TimerHandle]] = []
        """A heap; the number keeps timers of one instant in the order of their making, and handles from being compared."""
        self._plans = 0
        self.steps = 0
        self.errors: list[str] = []
        self.set_task_factory(_task)  # type: ignore[arg-type]  # typeshed's protocol leaves out `context`, which the loop passes
        self.set_exception_handler(self._note)

    def _note(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.errors.append(f"{context.get('message')}: {error!r}")

    def time(self) -> float:
        return self._time

    # As BaseEventLoop's, less what guards against threads and slow callbacks: half of a run is spent here.

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]  # typeshed's TypeVarTuple
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.TimerHandle:  # type: ignore[override]  # typeshed's TypeVarTuple
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._plans += 1
        heapq.heappush(self._planned, (when, self._plans, timer))
        return timer

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.TimerHandle:  # type: ignore[override]  # typeshed's TypeVarTuple
        return self.call_at(self._time + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays in the heap until its time, and does nothing then."""

    def _write_to_self(self) -> None:
        """Nobody waits in a selector."""

    def unpark(self, party: Party) -> None:
        if party.asleep_at is not None:
            self._put_off(party, self._time - party.asleep_at)
            party.asleep_at = None
        self._ready.extend(party.parked)
        party.parked.clear()

    def _put_off(self, party: Party, slept_s: float) -> None:
        """Its timers are due so much later; what came over the network meanwhile is there at once."""

        def sleeps(handle: Any) -> bool:
            mine = handle._context
            return isinstance(handle, asyncio.TimerHandle) and mine.get(PARTY, NOBODY) is party and mine is not party.callbacks

        for handle in [one for one in party.parked if sleeps(one)]:
            party.parked.remove(handle)
            assert isinstance(handle, asyncio.TimerHandle)
            self._plans += 1
            self._planned.append((handle.when(), self._plans, handle))
        self._planned[:] = [(when + slept_s if sleeps(handle) else when, number, handle) for when, number, handle in self._planned]
        heapq.heapify(self._planned)

    def _run_once(self) -> None:
        """One turn: jump if nothing is ready, take the timers that are due, run what was ready when the turn began."""
        ready, planned, pop = self._ready, self._planned, heapq.heappop
        self._time += TURN_S
        if not ready:
            while planned and planned[0][2]._cancelled:
                pop(planned)
            if not planned:
                raise Stuck("nothing is ready and nothing is planned")
            self._time = max(self._time, planned[0][0])
        while planned and planned[0][0] <= self._time:
            ready.append(pop(planned)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            party = handle._context.get(PARTY, NOBODY)
            if party.paused:
                party.parked.append(handle)
                continue
            handle._run()
            self.steps += 1
        if self.steps > STEPS + STEPS_PER_S * self._time:
            raise Stuck(f"{self.steps} steps in {self._time:.0f} s")
