"""The canary: a site of our own that syncs on the scheduler's lane and is committed as any other, on a connection and account of its own.

What it proves is the whole way from a site to the disk here. While its syncs go unanswered this hub is deaf, and nobody's silence means anything
(LINK D5). Only the leader runs it: two would take turns in its session. One that cannot connect keeps trying; this hub is deaf until it can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from intertie.bus.port import Bus
from intertie.clock import Clock, kernel_boot
from intertie.contracts.base import decode, encode
from intertie.contracts.link import Clocks, Lane, LaneState, Sync, Synced, local_sync_subject
from intertie.errors import Refused, Unavailable
from intertie.ids import CANARY, JournalId, SessionId, mint
from intertie.link.clocks import TRY_S
from intertie.link.journal import first_digest
from intertie.observe import log
from intertie.scheduler.core.hearing import CANARY_BEAT_S

LOG = log.get("scheduler.canary")

# It never writes an entry, so one journal is enough for all copies of this service, and no copy is another place.
JOURNAL = JournalId("jnl-canary")
PLACE = "canary"


class Canary:
    """`bus` is in the canary's own account, and connects when it can."""

    def __init__(self, bus: Bus, clock: Clock, *, beat_s: float = CANARY_BEAT_S) -> None:
        self._bus, self._clock, self._beat_s = bus, clock, beat_s

    async def run(self, answered: Callable[[float], None]) -> None:
        """One session, until cancelled: `answered(sent_s)` for each sync whose answer says that it was committed."""
        session, nonce, taken = SessionId(mint("ses")), 0, 0
        while True:
            nonce += 1
            sent_s = self._clock.monotonic_s()
            if await self._speak(session, nonce, taken):
                taken = nonce
                answered(sent_s)
            await asyncio.sleep(self._beat_s)

    async def _speak(self, session: SessionId, nonce: int, taken: int) -> bool:
        sync = Sync(
            site=CANARY,
            session=session,
            place=PLACE,
            lane=Lane.SCHEDULER,
            nonce=nonce,
            taken_nonce=taken,
            journal=JOURNAL,
            first_seq=1,
            digest_before=first_digest(JOURNAL),
            entries=[],
            at_head=True,
            running=[],
            clocks=Clocks(utc=self._clock.now(), boot_s=self._clock.boot_s(), kernel_boot=kernel_boot()),
        )
        try:
            reply = await self._bus.request(local_sync_subject(Lane.SCHEDULER), encode(sync), timeout_s=TRY_S)
            synced = decode(reply.body, Synced, what="answer")
        except (Unavailable, Refused) as err:
            LOG.warning("the canary is not answered", code=err.code)
            return False
        if synced.nonce != nonce or synced.state is not LaneState.OK:
            LOG.warning("the canary is not taken", state=synced.state.value)
            return False
        return True
