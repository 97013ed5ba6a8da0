"""What happens to a stream's messages once they have arrived: handled by several workers at once, in order for each entity, acknowledged
after the handler returned, tried again with growing pauses, and given to `dead` when tries end (field cases BR-118, BR-119, BR-123).

Both buses feed this; they differ only in how a message comes and how its acknowledgement goes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Protocol

from intertie.bus.port import ConsumerSpec, Dead, Handler, Message
from intertie.bus.workers import put_down
from intertie.errors import IntertieError
from intertie.observe import log, metrics

LOG = log.get("bus.consumer")
CONSUMED = metrics.Counter("intertie_bus_consumed_total", "Stream messages by what became of them", ("consumer", "outcome"))

ENTITY = "ce-subject"


class Delivery(Protocol):
    """One try of one message. The four words never raise: a word that is lost means one more try."""

    @property
    def message(self) -> Message: ...

    @property
    def tries(self) -> int:
        """This one included."""
        ...

    async def ack(self) -> None: ...

    async def nak(self, delay_s: float) -> None: ...

    async def term(self) -> None: ...

    async def progress(self) -> None:
        """Not forgotten: start the server's patience anew."""
        ...


class Deliveries:
    """The messages that one process holds of one consumer."""

    def __init__(self, spec: ConsumerSpec, handler: Handler, dead: Dead, *, freed: Callable[[], None]) -> None:
        self._spec = spec
        self._handler = handler
        self._dead = dead
        self._freed = freed
        self._waiting: dict[str, deque[Delivery]] = {}
        self._ready: deque[str] = deque()
        self._handling: dict[str, Delivery] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def held(self) -> int:
        """Messages here and not yet decided."""
        return sum(len(queue) for queue in self._waiting.values()) + len(self._handling)

    def all_held(self) -> list[Delivery]:
        return [*self._handling.values(), *(delivery for queue in self._waiting.values() for delivery in queue)]

    def take(self, delivery: Delivery) -> None:
        """One more; the caller asks for no more than `backlog` together."""
        if self._closed:
            return
        key = delivery.message.headers.get(ENTITY) or delivery.message.subject
        queue = self._waiting.get(key)
        if queue is None:
            self._waiting[key] = deque((delivery,))
            if key not in self._handling:
                self._ready.append(key)
        else:
            queue.append(delivery)
        if len(self._tasks) < self._spec.workers and self._ready:
            task = asyncio.get_running_loop().create_task(self._work(), context=Context())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self) -> None:
        """Take the next entity that nobody is busy with, until there is none."""
        while self._ready:
            key = self._ready.popleft()
            queue = self._waiting[key]
            delivery = queue.popleft()
            if not queue:
                del self._waiting[key]
            self._handling[key] = delivery
            try:
                await self._one(delivery)
            finally:
                del self._handling[key]
                if key in self._waiting:
                    self._ready.append(key)
                self._freed()
        task = asyncio.current_task()
        if task is not None:
            self._tasks.discard(task)

    async def _one(self, delivery: Delivery) -> None:
        """One try. A handler has `ack_wait_s`; longer, and it is taken for hung (it may have done its work: handlers are idempotent)."""
        message, spec = delivery.message, self._spec
        try:
            async with asyncio.timeout(spec.ack_wait_s):
                await self._handler(message)
        except Exception as error:
            await self._failed(delivery, error)
        else:
            CONSUMED.inc(consumer=spec.durable, outcome="done")
            await delivery.ack()

    async def _failed(self, delivery: Delivery, error: Exception) -> None:
        message, spec, tries = delivery.message, self._spec, delivery.tries
        known = isinstance(error, IntertieError)
        LOG.warning(
            "a message was not handled",
            consumer=spec.durable,
            subject=message.subject,
            tries=tries,
            error=str(error) or type(error).__name__,
            exc_info=None if known else error,
        )
        if tries < spec.max_deliver:
            CONSUMED.inc(consumer=spec.durable, outcome="retried")
            await delivery.nak(self._pause(tries))
            return
        try:
            async with asyncio.timeout(spec.ack_wait_s):
                await self._dead(message, error, tries)
        except Exception as refused:
            # Nowhere to put it: it stays in the stream and is tried again.
            LOG.error("a dead letter could not be stored", consumer=spec.durable, subject=message.subject, exc_info=refused)
            CONSUMED.inc(consumer=spec.durable, outcome="retried")
            await delivery.nak(self._pause(tries))
        else:
            CONSUMED.inc(consumer=spec.durable, outcome="dead")
            await delivery.term()

    def _pause(self, tries: int) -> float:
        """Seconds before the next try: growing, so that a dependency's blink does not use up all tries."""
        steps = self._spec.backoff_s
        return steps[min(tries, len(steps)) - 1] if steps else 1.0

    async def close(self, grace_s: float = 2.0) -> None:
        """Take nothing more, let what is handled finish for a moment, leave the rest to be delivered again."""
        self._closed = True
        self._waiting.clear()
        self._ready.clear()
        await put_down(list(self._tasks), grace_s)
