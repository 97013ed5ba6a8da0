"""The gateway's read model of call offerings: filled from the registry, kept up by its events, asked anew for what is not known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from intertie.bus import rpc
from intertie.bus.port import Bus, Message
from intertie.clock import Clock
from intertie.contracts import endpoints as e
from intertie.contracts.base import PREFIX, decode
from intertie.contracts.call_offerings import CallOfferingChanged, OfferingRecord, OfferingsQuery
from intertie.errors import IntertieError
from intertie.observe import log

LOG = log.get("gateway.offerings")

EVENTS = f"{PREFIX}.evt.registry.calloffering.changed.>"
# A lost event costs this long; a name that nobody knows is asked for at most so often.
REFRESH_S = 15.0
ASK_AGAIN_S = 1.0


@dataclass
class Offerings:
    """Records by `site/name`."""

    bus: Bus
    clock: Clock
    own_claims: Callable[[], str]
    known: dict[str, OfferingRecord] = field(default_factory=dict)
    _asked_s: float = float("-inf")

    async def listen(self) -> None:
        await self.bus.subscribe(EVENTS, self._told)

    async def _told(self, message: Message) -> None:
        self._take(decode(message.body, CallOfferingChanged, what="an event").record)

    def _take(self, record: OfferingRecord) -> None:
        before = self.known.get(record.id)
        if before is None or record.version > before.version:
            self.known[record.id] = record

    async def refresh(self) -> None:
        """All of them; what the registry does not know any more is forgotten."""
        self._asked_s = self.clock.monotonic_s()
        found: list[OfferingRecord] = []
        after = ""
        while True:
            reply = await rpc.call(self.bus, e.CALL_OFFERINGS, OfferingsQuery(withdrawn=True, after=after), claims=self.own_claims())
            found += reply.offerings
            if reply.next <= after:
                break
            after = reply.next
        ids = {record.id for record in found}
        for id in [id for id in self.known if id not in ids]:
            del self.known[id]
        for record in found:
            self._take(record)

    async def find(self, site: str, name: str) -> OfferingRecord | None:
        """The record, asked for if it is not known; an offering that is no more is none."""
        record = self.known.get(f"{site}/{name}")
        if record is None and self.clock.monotonic_s() - self._asked_s > ASK_AGAIN_S:
            try:
                await self.refresh()
            except IntertieError as err:
                LOG.warning("the registry was not asked for offerings", code=err.code)
            record = self.known.get(f"{site}/{name}")
        return None if record is None or record.withdrawn else record
