"""Borders of settlement periods: running attempts' segments are closed at each, and then the site says of the period what was used in it.

A cut is made by an attempt's own axis (one anchor of UTC plus CLOCK_BOOTTIME), and only of one that still runs a little after the border. A
period is over by this host's wall clock, and said to be so once nothing is left to say of it; if something comes later all the same (the
clock was put back), its counts are said again. `agent.core.usage` and `agent.core.periods` decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import msgspec

from intertie.agent.books import get_setting, put_setting, together
from intertie.agent.core import usage
from intertie.agent.core.model import Attempt, State
from intertie.agent.core.periods import MOST_PERIODS, Period, PeriodBook, added, borders, count, grouped, period_of
from intertie.agent.journal import Also, Cursor
from intertie.contracts.base import encode
from intertie.contracts.link import EntryBase, Lane, PeriodClosed, SegmentClosed
from intertie.contracts.usage import Segment
from intertie.ids import AttemptId
from intertie.link.journal import NextSeq
from intertie.observe import log
from intertie.trust.seal import seal

if TYPE_CHECKING:
    from intertie.agent.site import Site

LOG = log.get("agent.borders")

OPEN_PERIOD = "period.open"
_book = msgspec.json.Decoder(PeriodBook).decode
_cut = msgspec.json.Decoder(usage.Cut).decode


class _Open(msgspec.Struct, frozen=True):
    """The period that no `PeriodClosed` was said of."""

    start: datetime


class Borders:
    """One site's cuts and counts."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._cuts: dict[AttemptId, usage.Cut] = {}
        self._over: set[AttemptId] = set()
        self._cutting: dict[AttemptId, asyncio.Lock] = {}
        self._open: datetime | None = None
        self._recount = True
        """Segments were counted since the counts were last compared with what was said."""

    async def recover(self) -> None:
        def read(cursor: Cursor) -> tuple[dict[AttemptId, usage.Cut], str | None]:
            rows = cursor.execute("SELECT key, value FROM setting WHERE key LIKE 'cut/%'").fetchall()
            return {AttemptId(key.removeprefix("cut/")): _cut(value) for key, value in rows}, get_setting(cursor, OPEN_PERIOD)

        self._cuts, opened = await self._site.journal.read(read)
        self._open = msgspec.json.decode(opened, type=_Open).start if opened else None

    # --- for the end of an attempt ---

    async def rest(self, attempt: AttemptId) -> None:
        """Its end is about to be journalled: wait for a cut under way, and make no more."""
        self._over.add(attempt)
        if (lock := self._cutting.get(attempt)) is not None:
            async with lock:
                pass

    def cut_of(self, attempt: AttemptId) -> usage.Cut | None:
        return self._cuts.get(attempt)

    def inside(self, attempt: Attempt, through_us: int) -> list[int]:
        """Borders from the go through `through_us`, in microseconds from the anchor."""
        assert attempt.started is not None
        fixed = usage.utc_of(attempt.started.utc_ns)
        before = fixed - timedelta(microseconds=usage.staged_us(attempt, self._site.boot))
        return usage.at_us(attempt, self._borders(before, fixed + timedelta(microseconds=through_us)))

    def ended(self, attempt: AttemptId, segments: Sequence[Segment]) -> Also:
        """The last segments of an attempt, counted in the transaction of its end."""
        counted = self._count(segments)

        def also(cursor: Cursor) -> None:
            counted(cursor)
            cursor.execute("DELETE FROM setting WHERE key = ?", (f"cut/{attempt}",))

        return also

    def forget(self, attempt: AttemptId) -> None:
        """Its end is on disk."""
        self._cuts.pop(attempt, None)
        self._cutting.pop(attempt, None)
        self._over.discard(attempt)

    def _borders(self, after: datetime, through: datetime) -> list[datetime]:
        try:
            return borders(after, through, self._site.settings.time_zone)
        except (KeyError, ValueError, OSError):
            LOG.error("this machine does not know the settlement time zone: no period is cut", zone=self._site.settings.time_zone)
            return []

    def _count(self, segments: Sequence[Segment]) -> Also:
        zone = self._site.settings.time_zone

        def also(cursor: Cursor) -> None:
            try:
                by_period = grouped(segments, zone)
            except (KeyError, ValueError, OSError):
                return
            for name, some in by_period.items():
                stored = get_setting(cursor, f"period/{name}")
                put_setting(f"period/{name}", encode(added(_book(stored) if stored else PeriodBook(), some)).decode())(cursor)
            self._recount = True

        return also

    # --- each second ---

    async def tick(self) -> None:
        """Cut what has passed a border, then close the periods of which all is said."""
        if self._site.settings.revision == 0:
            return  # The settlement time zone is not known, and nothing of the hub's can run.
        boot_us = int(self._site.clock.boot_s() * 1e6)
        for attempt in list(self._site.books.attempts.values()):
            if attempt.local is None and attempt.state is State.RUNNING and attempt.kernel_boot == self._site.boot:
                await self._cut(attempt, boot_us)
        try:
            await self._close()
        except (KeyError, ValueError, OSError):
            LOG.error("this machine does not know the settlement time zone: no period is closed", zone=self._site.settings.time_zone)

    def _due(self, attempt: Attempt, boot_us: int) -> list[int]:
        """Borders that this attempt has passed and was not cut at, in microseconds from its anchor."""
        assert attempt.started is not None
        elapsed_us = boot_us - attempt.started.boot_ns // 1000 - usage.CUT_AFTER_US
        cut = self._cuts.get(attempt.id)
        return [at for at in self.inside(attempt, elapsed_us) if cut is None or at > cut.told_us]

    async def _cut(self, attempt: Attempt, boot_us: int) -> None:
        if not self._due(attempt, boot_us):
            return
        async with self._cutting.setdefault(attempt.id, asyncio.Lock()):
            passed = self._due(attempt, boot_us)
            alive = passed and await self._site.adapter.alive(attempt.id)
            if not alive or attempt.id in self._over or self._site.books.attempts[attempt.id].state is not State.RUNNING:
                return  # It has ended, or nobody can say that it has not: its end is cut at the borders that it passed.
            await self._tell(attempt, passed)

    async def _tell(self, attempt: Attempt, passed: Sequence[int]) -> None:
        site, before = self._site, self._cuts.get(attempt.id)
        # A border that lies in the staging is told with all of the staging.
        through = max(0, passed[-1])
        inside = self.inside(attempt, through)
        parts = usage.spans_through(
            through,
            staged_us=usage.staged_us(attempt, site.boot),
            borders_us=inside,
            cut=before,
            queued_us=usage.queued_us(attempt, site.boot),
            suspended=usage.suspended(attempt, through + 1),
        )
        after = before.segments if before is not None else 0
        told = usage.segments(attempt, site.joined.site, parts, after=after, islanded=site.islanded(), final=False)
        cut = usage.extended(before, through, usage.counts(attempt, parts))
        sealed = [seal(site.key, encode(one), site.key.public) for one in told]

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            first, at, islanded = following[Lane.METERING], site.clock.now(), site.islanded()
            return {Lane.METERING: [SegmentClosed(seq=first + n, at=at, islanded=islanded, sealed=one) for n, one in enumerate(sealed)]}

        await site.append(entries, together(put_setting(f"cut/{attempt.id}", encode(cut).decode()), self._count(told)))
        self._cuts[attempt.id] = cut
        LOG.info("a period's border is passed", attempt=attempt.id, segments=len(told))

    # --- periods ---

    async def _close(self) -> None:
        now, zone = self._site.clock.now(), self._site.settings.time_zone
        if self._open is None:
            start = period_of(now, zone).start
            await self._site.journal.write(put_setting(OPEN_PERIOD, encode(_Open(start)).decode()))
            self._open = start
        ended = borders(self._open, now, zone)
        if not ended and period_of(self._open, zone).end <= now:
            LOG.error("the wall clock jumped over more periods than can be", periods=MOST_PERIODS, now=now.isoformat())
            return
        for border in ended:
            if self._held_by(border):
                break
            await self._say(period_of(border - timedelta(microseconds=1), zone), border)
        if self._recount:
            self._recount = False
            await self._say_again()

    def _held_by(self, border: datetime) -> bool:
        """Something of a hub's attempt before this border is still to be journalled."""
        moment = self._site.moment()
        for attempt in self._site.books.attempts.values():
            if attempt.local is not None or attempt.state not in (State.STAGING, State.RUNNING):
                continue
            if attempt.started is None:
                went_s = moment.boot_s - attempt.go_boot_s if attempt.go_boot_s is not None else 0.0
                if attempt.kernel_boot != self._site.boot or moment.utc - timedelta(seconds=went_s) < border:
                    return True
                continue
            (at,) = usage.at_us(attempt, [border])
            cut = self._cuts.get(attempt.id)
            if at > -usage.staged_us(attempt, self._site.boot) and (cut is None or cut.told_us < at):
                return True
        return False

    async def _say(self, period: Period, following: datetime | None) -> None:
        """`following`: where the next open period begins; None when a closed one is said again."""
        site = self._site
        stored = await site.journal.read(lambda cursor: get_setting(cursor, f"period/{period.name}"))
        book = _book(stored) if stored else PeriodBook()
        if following is None and book.told == book.counts:
            return
        sealed = seal(site.key, encode(count(site.joined.site, period, book)), site.key.public)

        def entries(next_seq: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            entry = PeriodClosed(seq=next_seq[Lane.METERING], at=site.clock.now(), islanded=site.islanded(), sealed=sealed)
            return {Lane.METERING: [entry]}

        def also(cursor: Cursor) -> None:
            now = get_setting(cursor, f"period/{period.name}")
            row = msgspec.structs.replace(_book(now) if now else PeriodBook(), told=book.counts)
            put_setting(f"period/{period.name}", encode(row).decode())(cursor)
            if following is not None:
                put_setting(OPEN_PERIOD, encode(_Open(following)).decode())(cursor)

        await site.append(entries, also)
        if following is not None:
            self._open = following
        LOG.info("a period is closed", period=period.name, attempts=book.attempts, segments=book.segments)

    async def _say_again(self) -> None:
        """Closed periods whose counts have grown since."""
        rows = await self._site.journal.read(
            lambda cursor: cursor.execute("SELECT key, value FROM setting WHERE key LIKE 'period/%'").fetchall()
        )
        for key, value in rows:
            book = _book(value)
            if book.told is not None and book.told != book.counts:
                year, month = key.removeprefix("period/").split("-")
                middle = datetime(int(year), int(month), 15, tzinfo=self._site.clock.now().tzinfo)
                await self._say(period_of(middle, self._site.settings.time_zone), None)
