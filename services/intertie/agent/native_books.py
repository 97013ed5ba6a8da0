"""The third book leaves the site: each day of the native accounting is read once it is over (and the running one now and then), sealed, and journalled.

Reading costs the site's scheduler one question a day and four more for the running one; it never holds up anything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec

from intertie.agent.adapters.port import Cluster
from intertie.agent.books import get_setting, put_setting
from intertie.agent.core import native_books as core
from intertie.contracts.accounting import NativeDay
from intertie.contracts.base import decode, encode
from intertie.contracts.link import EntryBase, Lane, LaneState, NativeAccounting
from intertie.errors import IntertieError
from intertie.link.journal import Build, NextSeq
from intertie.link.site import Exchange
from intertie.observe import log
from intertie.trust.seal import seal

if TYPE_CHECKING:
    from intertie.agent.site import Site

LOG = log.get("agent.native_books")

KEY = "native_books"
EVERY = timedelta(hours=6)
"""Between looks at the running day: what is compared of today is at most so old."""
LOOK_S = 30.0
# A keeper of an older version would set the entry aside.
ACCOUNTING_VERSION = 3


class _Read(msgspec.Struct, frozen=True):
    """How far the accounting was told."""

    last_whole: date | None = None
    last_read: datetime | None = None


class NativeTeller:
    """One site's. `answered` is told of each answer on the metering lane."""

    def __init__(self, site: Site, cluster: Cluster, *, every: timedelta = EVERY, beat: float = 1.0) -> None:
        self._site, self._cluster, self._every, self._beat = site, cluster, every, beat
        self.understood = False
        """Metering was heard to know accounting."""

    def answered(self, exchange: Exchange) -> None:
        self.understood = exchange.synced.state is LaneState.OK and exchange.synced.v >= ACCOUNTING_VERSION

    async def run(self) -> None:
        """For ever; a native scheduler that is away costs a line in the log and another try."""
        while True:
            if self.understood:
                try:
                    await self.look()
                except IntertieError as err:
                    LOG.warning("the site's own accounting is read later", code=err.code, text=err.text)
            await asyncio.sleep(LOOK_S * self._beat)

    async def look(self) -> None:
        """Read and tell what is due."""
        stored = await self._site.journal.read(lambda cursor: get_setting(cursor, KEY))
        done = decode(stored, _Read, what="how far the accounting was told") if stored else _Read()
        now = self._site.clock.now()
        for day in core.due(done.last_whole, done.last_read, now, self._every):
            done = await self._tell(day, done)

    async def _tell(self, day: date, done: _Read) -> _Read:
        site = self._site
        start, end = core.bounds(day)
        read_at = site.clock.now()
        records = await self._cluster.accounting(start, min(end, read_at))
        mapped = {one.account for one in site.settings.mappings}
        parts = core.parts(site.joined.site, self._cluster.name, day, records, mapped, read_at=read_at)
        over = read_at >= end + core.LAG
        first = done.last_whole if done.last_whole is not None else day - timedelta(days=1)
        after = _Read(day, read_at) if over else _Read(first, read_at)
        await site.append(self._entries(parts), put_setting(KEY, encode(after).decode("utf-8")))
        LOG.info("the site's own accounting is told", day=day.isoformat(), runs=sum(len(part.records) for part in parts), whole=over)
        return after

    def _entries(self, parts: Sequence[NativeDay]) -> Build:
        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            first, at, islanded = following[Lane.METERING], self._site.clock.now(), self._site.islanded()
            return {
                Lane.METERING: [
                    NativeAccounting(
                        seq=first + n, at=at, islanded=islanded, sealed=seal(self._site.key, encode(part), self._site.key.public)
                    )
                    for n, part in enumerate(parts)
                ]
            }

        return entries
