"""What a site says on the metering lane beside its segments: that a period is over, that a journal took another's place, that evidence is lost.

The shell around `core.closing`; segments are `service`'s.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Protocol

from intertie.clock import Clock
from intertie.contracts.link import JournalOpened, Lane, LostRange, PeriodClosed
from intertie.contracts.usage import LostEntries, SitePeriod
from intertie.ids import SiteName
from intertie.lane.tables import LaneEntry
from intertie.link.keeper import SiteRow
from intertie.link.lost import range_lost
from intertie.metering.core import closing
from intertie.metering.core.reckon import Trust
from intertie.metering.store import MeteringStore
from intertie.store import StoreTx

# Words of one site on one period: it says another only when something came late. And unproven ones looked at in one round.
WORDS = 500

# Four months of a hundred sites: each is counted anew, and whoever looks further back asks for a period's statement.
CHECKED = 400

# Named in one answer.
NAMED = 100


class Marks(Protocol):
    """All that interpreting needs of the lane tables."""

    async def mark_interpreted(self, tx: StoreTx, entry: LaneEntry) -> None:
        """In the transaction of the change; `Stale('lane.out_of_turn')` if it was done before or comes too early."""
        ...

    async def site(self, lane: Lane, site: SiteName) -> SiteRow | None:
        """What the keeper knows of a site's journal: when it last spoke."""
        ...


class Words:
    """A site's words beside its segments: taken, and compared with what is here."""

    def __init__(self, store: MeteringStore, lanes: Marks, trusted: Trust, clock: Clock) -> None:
        self._store, self._lanes, self._trust, self._clock = store, lanes, trusted, clock

    async def take(self, entry: LaneEntry, said: PeriodClosed | JournalOpened | LostRange) -> None:
        """Keep one word. What is no such word raises, and goes to quarantine."""

        async def mark(tx: StoreTx) -> bool:
            await self._lanes.mark_interpreted(tx, entry)
            return True

        if isinstance(said, JournalOpened):
            await self._store.note_journal(entry.site, entry.journal, said, entry.received_at, mark)
            return
        keys = await self._store.keys(entry.site)
        if isinstance(said, PeriodClosed):
            told = closing.period_told(entry.site, said.sealed, entry.received_at)
            proven = closing.prove_again([told], keys, self._trust.verify)
            await self._store.note_period(proven[0] if proven else told, mark)
            return
        lost = closing.lost_entries(entry.site, said, keys, self._trust.verify, entry.received_at)
        unsealed = "" if lost.told.proven else " It was said without a valid seal."
        then = f"{lost.told.entries} entries of usage: `intertie statement` and the ledger's check name them.{unsealed}"
        await self._store.note_lost(lost, range_lost(entry.site, Lane.METERING, said, then), mark)

    async def prove_again(self) -> None:
        """Believe the words that a key which came later proves."""
        told = await self._store.unproven_periods(WORDS)
        for site in sorted({one.site for one in told}):
            keys = await self._store.keys(site)
            for one in closing.prove_again([one for one in told if one.site == site], keys, self._trust.verify):
                await self._store.prove_period(one.number)

    async def standings(self, sites: Collection[SiteName], period: str, start: datetime, end: datetime) -> list[SitePeriod]:
        """How each of these sites stands in a period that is over."""
        found: list[SitePeriod] = []
        for site in sites:
            word = closing.in_force(await self._store.periods(site, period, WORDS), site, start, end)
            row = await self._lanes.site(Lane.METERING, site)
            held = await self._store.held(site, start, end)
            found.append(closing.standing(site, period, word, held, row.last_heard if row else None))
        return found

    async def differing(self) -> list[SitePeriod]:
        """Words that do not agree with what is here, newest period first."""
        told = await self._store.periods(None, None, CHECKED)
        found: list[SitePeriod] = []
        for site, period, start, end in dict.fromkeys((one.site, one.count.period, one.count.start, one.count.end) for one in told):
            word = closing.in_force(told, site, start, end)
            if word is not None:
                row = await self._lanes.site(Lane.METERING, site)
                held = await self._store.held(site, start, end)
                found.append(closing.standing(site, period, word, held, row.last_heard if row else None))
        return [one for one in found if one.state != "complete"][:NAMED]

    async def lost(self, sites: Collection[SiteName] | None = None) -> list[LostEntries]:
        """What nobody has any more."""
        return await self._store.lost(sites, NAMED)
