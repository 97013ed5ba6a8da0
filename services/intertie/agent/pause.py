"""The owner's red button: nothing new is lent while it is down. Kept on disk, told to the registry when it is heard; works with all else gone.

What runs goes on. Whoever wants devices back at once reclaims them attempt by attempt (`reclaim`), which ends lent work as preempted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from intertie.agent.books import get_setting, put_setting, save
from intertie.agent.core import attempts as life
from intertie.agent.core import pausing
from intertie.agent.core.model import OPEN, Attempt, StopAsked, with_state
from intertie.contracts.base import decode, encode
from intertie.contracts.job import Cause
from intertie.contracts.link import EntryBase, Lane, LendingPaused
from intertie.contracts.local import LocalPaused
from intertie.errors import NotFound, Refused, Unavailable
from intertie.ids import AttemptId
from intertie.link.journal import NextSeq
from intertie.observe import log

if TYPE_CHECKING:
    from datetime import datetime

    from intertie.agent.site import Site

LOG = log.get("agent.pause")

KEY = "pause"


class Pause:
    """One site's button."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._pressed: pausing.Pressed | None = None
        self._unwritten = False
        """In force here, but the disk has refused to hold it so far."""

    async def recover(self) -> None:
        stored = await self._site.journal.read(lambda cursor: get_setting(cursor, KEY))
        self._pressed = decode(stored, pausing.Pressed, what="stored pause") if stored else None

    @property
    def on(self) -> bool:
        return self._pressed is not None

    @property
    def until(self) -> datetime | None:
        return self._pressed.until if self._pressed else None

    def told(self) -> LocalPaused:
        lent = sorted(self._site.listed)
        if self._pressed is None:
            return LocalPaused(paused=False, lent=lent)
        it = self._pressed
        return LocalPaused(paused=True, until=it.until, by=it.by, reason=it.reason, since=it.since, lent=lent)

    async def press(self, *, until: datetime | None, by: str, reason: str) -> None:
        """In force at once; `Unavailable` says that the disk could not hold it, and that it is in force all the same while the agent runs."""
        self._pressed = pausing.press(self._site.clock.now(), until, by, reason)
        await self._write(by)
        LOG.info("lending is paused", by=by, until=until.isoformat() if until else "", reason=reason)

    async def resume(self, *, by: str) -> None:
        """Lend again; nothing if it was not paused."""
        if self._pressed is None:
            return
        before, self._pressed = self._pressed, None
        try:
            await self._write(by)
        except BaseException:
            self._pressed = before
            raise
        LOG.info("lending goes on", by=by)

    async def tick(self) -> None:
        """It ends by itself; what the disk refused is written now."""
        if pausing.over(self._pressed, self._site.clock.now()):
            await self.resume(by="its end")
        elif self._unwritten:
            await self._write(self._pressed.by if self._pressed else "")

    async def _write(self, by: str) -> None:
        site, it = self._site, self._pressed

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            entry = LendingPaused(
                seq=following[Lane.REGISTRY],
                at=site.clock.now(),
                islanded=site.islanded(),
                paused=it is not None,
                until=it.until if it else None,
                by=by,
                reason=it.reason if it else "",
            )
            return {Lane.REGISTRY: [entry]}

        self._unwritten = True
        await site.append(entries, put_setting(KEY, encode(it).decode() if it else ""))
        self._unwritten = False

    # --- taking back ---

    async def reclaim(self, attempt: AttemptId, *, by: str, reason: str, grace_s: int) -> Attempt:
        """Lent work is stopped by the owner's right: it ends as preempted. A repeat changes nothing."""
        site = self._site
        found = site.books.attempts.get(attempt)
        if found is None or found.local is not None:
            raise NotFound("reclaim.not_found", f"{attempt[:80]} is no lent work here", next_step="intertie local status")
        if found.state not in OPEN:
            raise Refused("reclaim.ended", f"{attempt} is over already", next_step="intertie local status")
        asked = StopAsked(reason=f"reclaimed by the owner: {reason}"[:1_000], grace_s=grace_s, by=by, cause=Cause.PREEMPTED)
        LOG.info("lent work is reclaimed", attempt=attempt, by=by, reason=reason)
        match life.on_stop(found, asked):
            case life.GiveUp(why) if await site.adapter.fence(found.id):
                await site.give_up(site.books.attempts[found.id], why)
            case life.GiveUp() | life.Halt() if site.books.attempts[found.id].state in OPEN:
                stopping = with_state(site.books.attempts[found.id], site.books.attempts[found.id].state, stop=asked)
                site.put(stopping)
                try:
                    await site.append(lambda _: {}, save(stopping))
                except Unavailable as err:
                    LOG.warning("a reclaim is not on disk, and done all the same", attempt=attempt, code=err.code)
                await site.adapter.stop(found.id, grace_s)
        return site.books.attempts[found.id]
