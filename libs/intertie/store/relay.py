"""The relay of one service: takes committed events out of the outbox, numbers them, and puts them on the stream until the stream has said
that it has them.

What a stream says is not proof. A wiped JetStream keeps acknowledging and answers `duplicate`; only its state gives it away, after a restart.
So after each reconnection, each beat while it publishes and every few beats at rest, the relay compares the stream's creation time and head with
what it remembers, and publishes the whole retention again when they do not fit. Consumers apply by event id and version, so repeats cost nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from intertie.bus.port import Bus, StreamSpec
from intertie.clock import Clock
from intertie.contracts.base import PREFIX, Heads, encode
from intertie.errors import Refused, Stale, Unavailable
from intertie.observe import log, metrics
from intertie.store.outbox import EVENTS, HasOutbox, Leader, OutboxRow, StreamMark

LOG = log.get("store.relay")
PUBLISHED = metrics.Counter("intertie_outbox_published_total", "Events that the stream acknowledged", ("service",))
REFILLS = metrics.Counter("intertie_outbox_refills_total", "Times a lost stream was filled again", ("service",))

# Appends in flight: enough to hide the round trip (2× publish_async at 64, flat beyond), few enough that a failure repeats little.
WINDOW = 64
# Rows per transaction of numbering and marking.
BATCH = 256
# Longer than a JetStream leader election on one machine; the outcome of a timeout is "maybe", and the row is sent again.
APPEND_S = 2.0
# At rest a look at the stream each beat was a third of what nats-server did. A wipe that nobody's publishing meets is filled this much later.
LOOK_EVERY_BEATS = 5
# Pruning is cheap and never urgent.
PRUNE_EVERY_BEATS = 600


def heads_subject(service: str) -> str:
    """Where a service says its heads each beat."""
    return f"{PREFIX}.heads.{service}"


def mute_subject(service: str) -> str:
    """Where a service says that the stream acknowledges nothing."""
    return f"{PREFIX}.mute.{service}"


class Relay:
    """One service's relay. `run()` never returns; of several processes one at a time does the work.

    clock: what beats are measured by; without one the event loop's own, so that under virtual time beats are virtual too.
    """

    def __init__(
        self, store: HasOutbox, bus: Bus, service: str, *, stream: StreamSpec = EVENTS, beat_s: float = 1.0, clock: Clock | None = None
    ) -> None:
        self._outbox = store.outbox
        self._store = store
        self._bus = bus
        self._service = service
        self._stream = stream
        self._beat_s = beat_s
        self._clock = clock
        self._look = True
        self._replay = False
        self._heads: Heads | None = None
        self.leads = False
        self.published = 0
        self.refills = 0

    def replay(self) -> None:
        """Publish the whole retention again, as after a wipe."""
        self._replay = True
        self._look_now()

    async def run(self) -> NoReturn:
        """Relay whenever this process is the leader."""
        self._bus.on_state(lambda connected: self._look_now() if connected else None)
        while True:
            try:
                async with self._outbox.leading() as leader:
                    self.leads = True
                    await self._serve(leader)
            except (Unavailable, Stale) as err:
                LOG.warning("the relay pauses", service=self._service, code=err.code, text=err.text)
                await asyncio.sleep(self._beat_s)
            finally:
                self.leads = False

    def _look_now(self) -> None:
        self._look = True
        self._outbox.ring()

    async def _serve(self, leader: Leader) -> NoReturn:
        """Fast on hints, and slowly each beat whatever the hints did."""
        mark: StreamMark | None = None
        self._look, self._heads = True, None
        now = self._clock.monotonic_s if self._clock is not None else asyncio.get_running_loop().time
        due, beats, pruning, looked_at = now(), 0, False, -1
        while True:
            try:
                on_beat = now() >= due
                if on_beat:
                    due, beats = now() + self._beat_s, beats + 1
                if self._look or mark is None or (on_beat and (self.published > looked_at or beats % LOOK_EVERY_BEATS == 0)):
                    mark, looked_at = await self._compare(leader), self.published
                more = mark is not None and await self._batch(leader, mark)
                if on_beat:
                    await self._say_heads()
                    if pruning or beats % PRUNE_EVERY_BEATS == 0:
                        pruning = await self._outbox.prune(leader) > 0
            except Unavailable as err:
                LOG.warning("the relay waits a beat", service=self._service, code=err.code, text=err.text)
                mark, self._look = None, True
                if err.code == "bus.stream_mute":
                    await self._say_mute()
                await asyncio.sleep(self._beat_s)
                continue
            if not more:
                await self._outbox.hint(max(0.0, due - now()))

    async def _compare(self, leader: Leader) -> StreamMark:
        """The stream as it is against the stream as remembered; a new generation if it was lost."""
        self._look = False
        known = await self._outbox.mark(self._stream.name)
        state = await self._bus.stream_state(self._stream.name)
        if state is None or known is None or state.epoch < self._store.stream_epoch:
            state = await self._bus.ensure_stream(replace(self._stream, epoch=self._store.stream_epoch))
        if known is None:
            return await self._outbox.renew(leader, state.name, state.created, state.last_seq)
        if (state.created, True) == (known.created, state.last_seq >= known.head) and not self._replay:
            return known
        LOG.warning(
            "the stream was lost and is filled again from the outbox",
            service=self._service,
            stream=state.name,
            created=state.created.isoformat(),
            remembered=known.created.isoformat(),
            head=state.last_seq,
            remembered_head=known.head,
            by_hand=self._replay,
        )
        mark = await self._outbox.renew(leader, state.name, state.created, state.last_seq)
        self._replay = False
        self.refills += 1
        REFILLS.inc(service=self._service)
        return mark

    async def _batch(self, leader: Leader, mark: StreamMark) -> bool:
        """Number and publish up to a batch; True if there may be more at once."""
        rows = await self._outbox.take(leader, mark, BATCH)
        if not rows:
            return False
        self._heads = None
        attempt = _Attempt(self._bus)
        await attempt.publish(rows)
        if attempt.acknowledged:
            await self._outbox.published(leader, mark, list(attempt.acknowledged), max(attempt.acknowledged.values()))
            self.published += len(attempt.acknowledged)
            PUBLISHED.inc(len(attempt.acknowledged), service=self._service)
        for row, err in attempt.refused:
            LOG.error(
                "the bus refuses an event for good", service=self._service, type=row.event.type, event_id=row.event.event_id, error=str(err)
            )
            await self._outbox.refused(leader, mark, row, str(err))
        if attempt.failed is not None:
            raise attempt.failed
        return len(rows) == BATCH

    async def _say_mute(self) -> None:
        """To whoever makes the stream: it stores nothing any more, and only a look by them decides."""
        with contextlib.suppress(Unavailable):
            await self._bus.publish(mute_subject(self._service), b"")

    async def _say_heads(self) -> None:
        """On core NATS, so that a consumer that is behind can see it. Read again only after something was numbered."""
        if self._heads is None:
            self._heads = Heads(service=self._service, heads=list(await self._outbox.heads()))
        await self._bus.publish(heads_subject(self._service), encode(self._heads))


class _Attempt:
    """One batch on its way: a window of appends in flight, none started after the first failure."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._window = asyncio.Semaphore(WINDOW)
        self.acknowledged: dict[int, int] = {}
        """Row id → the stream's sequence; a duplicate is as good (BR-113)."""
        self.refused: list[tuple[OutboxRow, Refused]] = []
        self.failed: Unavailable | None = None

    async def publish(self, rows: Sequence[OutboxRow]) -> None:
        async with asyncio.TaskGroup() as group:
            for row in rows:
                await self._window.acquire()
                if self.failed is not None:
                    break
                group.create_task(self._append(row))

    async def _append(self, row: OutboxRow) -> None:
        try:
            answer = await self._bus.append(
                row.event.subject, row.event.body, message_id=row.event.event_id, headers=row.headers, timeout_s=APPEND_S
            )
            self.acknowledged[row.id] = answer.seq
        except Refused as err:
            self.refused.append((row, err))
        except Unavailable as err:
            self.failed = err
        finally:
            self._window.release()
