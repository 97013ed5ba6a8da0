"""The event stream's maker. Of all services identity alone may create, change or delete it, so that no other's stolen credential can.

Each beat it is looked at: absent, of an earlier epoch than ours, or of another shape, it is made (anew), and the relays fill it from their
outboxes. A stream whose folder was wiped under a running server is found by those who publish: they say `mute`, and this says a fault in
its own outbox. Our own relay then meets the same silence, and deletes it (`bus.nats`); a lie costs one event and nothing else.
"""

from __future__ import annotations

from dataclasses import replace

from intertie.bus.port import Bus, Message, Subscription
from intertie.clock import Clock
from intertie.contracts.incident import ReportIncident, Severity
from intertie.errors import Unavailable
from intertie.identity.store import IdentityStore
from intertie.observe import log
from intertie.runtime import Beat
from intertie.store import EVENTS
from intertie.store.relay import mute_subject

LOG = log.get("identity.stream")

# A lost stream is there again within this; what is said meanwhile waits in the outboxes.
BEAT_S = 1.0
# Several relays find one silence; one event proves or disproves it.
MUTE_AGAIN_S = 10.0


class StreamMaker:
    """`run` it in the service's task group. epoch: identity's; replicas: copies in a cluster, 0 leaves them as they are."""

    def __init__(self, bus: Bus, store: IdentityStore, clock: Clock, *, epoch: int, replicas: int = 0, beat_scale: float = 1.0) -> None:
        self._bus, self._store, self._clock = bus, store, clock
        self._spec = replace(EVENTS, epoch=epoch if epoch > 1 else 0, replicas=replicas)
        self._said_at_s: float | None = None
        self.beat = Beat("identity-stream", BEAT_S, scale=beat_scale)

    async def run(self) -> None:
        listening = await self.listen()
        self._bus.on_state(lambda up: self.beat.hint() if up else None)
        try:
            await self.beat.run(self.ensure)
        finally:
            await listening.close()

    async def listen(self) -> Subscription:
        """Hear who finds the stream mute; of several copies of identity one hears each word."""
        return await self._bus.subscribe(mute_subject("*"), self.on_mute, queue="identity")

    async def ensure(self) -> None:
        """The stream as it should be."""
        await self._bus.ensure_stream(self._spec)

    async def on_mute(self, message: Message) -> None:
        """Somebody's events are not acknowledged: say one of ours, whose relay may act on what it meets."""
        now_s = self._clock.monotonic_s()
        if self._said_at_s is not None and now_s - self._said_at_s < MUTE_AGAIN_S:
            return
        who = message.subject.rpartition(".")[2]
        LOG.error("the event stream is said to store nothing any more", by=who)
        try:
            await self._store.report(_mute(who))
        except Unavailable as err:
            LOG.warning("it is said with the next word", code=err.code)
            return
        self._said_at_s = now_s


def _mute(who: str) -> ReportIncident:
    return ReportIncident(
        key="bus.stream_mute",
        kind="bus.stream_mute",
        severity=Severity.WARNING,
        title="The event stream stores nothing any more",
        text=f"{who[:63]} had no acknowledgement for several tries while the bus answers. Its folder may have been wiped or its disk be full. "
        "It is deleted, made anew and filled from the outboxes by itself; see nats-server's log for the cause.",
    )
