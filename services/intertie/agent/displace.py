"""Owner first: a claim reserves devices, and the owner's own work may have them back until the claimed work has started.

Which of the two comes first, the displacement or the start, is decided by the adapter's fence: whoever makes it, wins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from intertie.agent.core.devices import displaceable
from intertie.agent.core.model import Failing, State
from intertie.contracts.site import DeviceKind
from intertie.errors import Unavailable
from intertie.ids import DeviceId
from intertie.observe import log

if TYPE_CHECKING:
    from intertie.agent.site import Site

LOG = log.get("agent.displace")

DISPLACED = Failing(code="displaced", text="the owner's own work took its devices before it had started")


async def displace(site: Site, kind: DeviceKind, count: int) -> list[DeviceId]:
    """Give up the newest claims until `count` devices of a pool are free; each gives its own back once that is in the journal."""
    if not site.rules.owner_first:
        return []
    books = site.books
    freed: list[DeviceId] = []
    for name in displaceable(site.pools.values(), kind, count, books.holds, books.attempts, books.observed):
        try:
            if not site.may_vouch(books.attempts[name]) or not await site.adapter.fence(name):
                continue
        except Unavailable as err:
            LOG.warning("a claim keeps its devices", attempt=name, text=err.text)
            continue
        attempt = books.attempts[name]
        if attempt.state in (State.CLAIMED, State.STAGING):
            await site.give_up(attempt, DISPLACED)
            freed += attempt.devices
            LOG.info("a claim made room for the owner's own work", attempt=name, devices=len(attempt.devices))
    return freed
