"""Leaving the federation, from the site: lend nothing new, let lent work end (or end it), tell everything, see it settled, and be released.

Each step can be the first of an agent that was just started again: the wish lies on disk, and what is so is looked at anew. With the hub away
it waits, and says for what. The receipt is identity's word under its seal; the folder is removed by whoever asked, not from here.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import aiohttp
import msgspec

from intertie.agent.books import get_setting, put_setting
from intertie.agent.core.model import OPEN, State
from intertie.agent.journal import Cursor
from intertie.agent.journal_rows import lane_heads
from intertie.agent.preview import waits_settling
from intertie.agent.way import STRAIGHT, Way, http_options
from intertie.contracts.base import decode, encode
from intertie.contracts.identity import LeaveBody, LeaveReceipt, LeaveSite, LeaveTotals
from intertie.contracts.link import Sealed
from intertie.contracts.local import LocalLeaving
from intertie.errors import IntertieError, Refused, Unavailable
from intertie.observe import log
from intertie.trust.seal import open_seal, seal

if TYPE_CHECKING:
    from intertie.agent.site import Site

LOG = log.get("agent.leave")

KEY = "leave"
LOOK_S = 0.3
# A hub that is being started answers within this; longer pauses between tries while it does not.
ASK_TIMEOUT_S = 15.0
ASK_PAUSE_S = 2.0
SHOWN = 20


class _Wish(msgspec.Struct, frozen=True, kw_only=True):
    """The owner wants to leave."""

    now: bool
    reason: str
    by: str
    receipt: Sealed | None = None


class Release(Protocol):
    """`Unavailable`: try again later. `Refused`: the hub says no."""

    async def __call__(self, request: LeaveSite) -> LeaveReceipt: ...


class Leaving:
    """One site's leaving."""

    def __init__(self, site: Site, release: Release) -> None:
        self._site, self._release = site, release
        self._wish: _Wish | None = None
        self._told = LocalLeaving(step="none")
        self._task: asyncio.Task[None] | None = None
        self._reclaimed: set[str] = set()

    async def recover(self) -> None:
        stored = await self._site.journal.read(lambda cursor: get_setting(cursor, KEY))
        if stored:
            self._wish = decode(stored, _Wish, what="stored wish to leave")
            self._go_on()

    @property
    def told(self) -> LocalLeaving:
        return self._told

    async def begin(self, *, now: bool, reason: str, by: str) -> LocalLeaving:
        """Pauses lending at once. A repeat goes on with it; `now` may be added."""
        before = self._wish
        if before is None or (now and not before.now):
            wish = _Wish(now=now, reason=reason, by=by, receipt=before.receipt if before else None)
            await self._site.pause.press(until=None, by=by, reason=f"leaving the federation. {reason}".strip())
            await self._site.journal.write(put_setting(KEY, encode(wish).decode()))
            self._wish = wish
        self._go_on()
        return self._told

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _go_on(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._leave(), name="leave")

    async def _leave(self) -> None:
        while True:
            try:
                if await self._step():
                    return
            except IntertieError as err:
                LOG.warning("leaving waits", code=err.code, text=err.text)
                away = isinstance(err, Unavailable)
                self._told = LocalLeaving(step=self._told.step, waits_for=[f"{err.text} [{err.code}]"], hub_away=away)
                await asyncio.sleep(ASK_PAUSE_S)
            await asyncio.sleep(LOOK_S)

    async def _step(self) -> bool:
        """Look what is still in the way, in order; True once left."""
        assert self._wish is not None
        if self._wish.receipt is not None:
            self._told = LocalLeaving(step="left", receipt=self._wish.receipt)
            return True
        waits = await self._draining()
        if waits:
            return self._wait("draining", waits)
        if waits := await self._site.journal.read(_not_told):
            return self._wait("telling", [*self._owed(), *waits])
        if waits := [*self._owed(), *await self._site.journal.read(waits_settling)]:
            return self._wait("settling", waits)
        self._told = LocalLeaving(step="asking", hub_away=self._site.islanded())
        receipt = await self._ask()
        wish = msgspec.structs.replace(self._wish, receipt=receipt)
        await self._site.journal.write(put_setting(KEY, encode(wish).decode()))
        self._wish, self._told = wish, LocalLeaving(step="left", receipt=receipt)
        LOG.info("this site has left the federation")
        return True

    def _wait(self, step: str, waits: list[str]) -> bool:
        self._told = LocalLeaving(step=step, waits_for=waits[:SHOWN], hub_away=self._site.islanded())
        return False

    async def _draining(self) -> list[str]:
        """Lent work that holds devices; ended as preempted if the owner does not want to wait."""
        assert self._wish is not None
        open_ones = [a for a in self._site.books.attempts.values() if a.local is None and a.state in OPEN]
        if self._wish.now:
            for attempt in open_ones:
                if attempt.id not in self._reclaimed:
                    self._reclaimed.add(attempt.id)
                    await self._site.pause.reclaim(
                        attempt.id, by=self._wish.by, reason=self._wish.reason or "the site leaves the federation", grace_s=10
                    )
        return [str(attempt.id) for attempt in open_ones]

    def _owed(self) -> list[str]:
        """Results that are not at the gateway yet."""
        over = (a for a in self._site.books.attempts.values() if a.local is None and a.state is State.ENDED)
        return [f"result of {a.id}" for a in over if a.ended and a.ended.result is not None and not a.ended.result_stored]

    async def _ask(self) -> Sealed:
        """Identity's receipt, and nobody else's."""
        site = self._site
        assert self._wish is not None
        last = {lane: head for lane, (head, _) in (await site.journal.read(lane_heads)).items()}
        body = LeaveBody(site=site.joined.site, journal=site.journal.id, last=last, at=site.clock.now(), reason=self._wish.reason)
        request = LeaveSite(site=site.joined.site, sealed=seal(site.key, encode(body), site.key.public))
        answer = await self._release(request)
        totals = open_seal(answer.sealed, site.joined.service_keys.get("identity", ""), LeaveTotals)
        if totals.site != site.joined.site:
            raise Refused("leave.receipt", f"the receipt is of {totals.site}", next_step="tell the hub's operator")
        return answer.sealed


def _not_told(cursor: Cursor) -> list[str]:
    return [f"{lane}: {head - ack}" for lane, (head, ack) in lane_heads(cursor).items() if ack < head]


class GatewayRelease:
    """`POST <gateway>/v1/site/leave`; the seal in it is the proof."""

    def __init__(self, gateway: str, hub_ca: str = "", way: Way = STRAIGHT) -> None:
        self._url = f"{gateway.rstrip('/')}/v1/site/leave"
        self._options = http_options(way, gateway)
        self._tls: ssl.SSLContext | bool = ssl.create_default_context(cadata=hub_ca) if hub_ca else True

    async def __call__(self, request: LeaveSite) -> LeaveReceipt:
        timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
        headers: Mapping[str, str] = {"Content-Type": "application/json"}
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(self._url, data=encode(request), headers=headers, ssl=self._tls, **self._options) as answer,
            ):
                body, status = await answer.read(), answer.status
        except (aiohttp.ClientError, TimeoutError) as err:
            raise Unavailable("leave.hub_away", f"no answer from {self._url}: {err or type(err).__name__}", retry_after_s=5) from err
        if status < 300:
            return decode(body, LeaveReceipt, what="the hub's receipt")
        said = body[:500].decode("utf-8", "replace")
        if status >= 500:
            raise Unavailable("leave.hub_away", f"the hub answers {status}: {said}", retry_after_s=5)
        raise Refused("leave.refused", f"the hub answers {status}: {said}", next_step="tell the hub's operator")
