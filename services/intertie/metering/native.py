"""The third book at metering: taken from the lane as sites sealed it, and compared with the other two when somebody asks. Nothing is corrected here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

from intertie.bus.rpc import Caller, Serve
from intertie.clock import Clock
from intertie.contracts import endpoints
from intertie.contracts.accounting import NativeDay, ReconciliationQuery, ReconciliationReply, SiteReconciliation
from intertie.contracts.base import decode
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.incident import ReportIncident, Severity
from intertie.contracts.link import NativeAccounting, Sealed
from intertie.errors import Refused
from intertie.ids import SiteName
from intertie.lane.tables import LaneEntry
from intertie.metering.core import native
from intertie.metering.core.agreements import DEFAULT_ZONE
from intertie.metering.core.evidence import Evidence
from intertie.metering.core.periods import bounds, period_of
from intertie.metering.core.reckon import Trust, book_of, reckon
from intertie.metering.native_store import NativeStore
from intertie.metering.store import MeteringStore
from intertie.metering.words import Marks
from intertie.store import StoreTx
from intertie.trust import rights

# Attempts looked at together: their segments fit in memory.
PAGE = 100
# Two million runs a day at one site.
MOST_PARTS = 10_000
# Attempts of one site and month that are compared in one answer; more would not be read by a person, and costs every other caller.
MOST_COMPARED = 50_000


def bypassed(day: NativeDay) -> ReportIncident:
    """What a person is told of mapped accounts that were used beside us: the accounts and numbers, and nothing of who sat there."""
    lines = [f"account {use.account}: {use.runs} runs on {day.day}" for use in day.bypass]
    return ReportIncident(
        key=f"metering.bypass/{day.site}",
        kind="metering.bypass",
        severity=Severity.WARNING,
        title=f"Mapped accounts of site {day.site} run work that did not come through the federation",
        text=f"{'; '.join(lines)[:3_600]}. It is metered by nobody here. Ask the owner whether the account is the tenant's alone.",
        site=day.site,
    )


def differing(found: SiteReconciliation) -> ReportIncident:
    """What a person is told of books that differ; none do: it is over."""
    kinds = Counter(one.kind.value for one in found.differences)
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return ReportIncident(
        key=f"metering.reconciliation/{found.site}",
        kind="metering.reconciliation",
        severity=Severity.WARNING,
        title=f"Our books and those of site {found.site} differ" if kinds else f"Our books and those of site {found.site} agree",
        text=f"{found.period}: {told}. intertie reconcile --site {found.site}" if kinds else f"{found.period}: no difference",
        site=found.site,
        recovered=not kinds,
    )


class NativeBooks:
    """One copy's part in reconciliation."""

    def __init__(self, store: MeteringStore, kept: NativeStore, lanes: Marks, trusted: Trust, clock: Clock) -> None:
        self._store, self._kept, self._lanes, self._trust, self._clock = store, kept, lanes, trusted, clock
        self._fresh: set[SiteName] = set()
        """Sites that told something since they were last compared."""
        self._differed: dict[SiteName, int] = {}
        """How many differences people were told of."""

    def handlers(self) -> Mapping[Endpoint[Any, Any], Serve]:
        return {endpoints.RECONCILIATION: self.reconciliation}

    async def take(self, entry: LaneEntry, said: NativeAccounting) -> None:
        """Keep a part of a day. What is none, or another site's, raises and goes to quarantine; its seal is judged whenever it is used."""
        day = decode(said.sealed.payload, NativeDay, what="native accounting")
        if day.site != entry.site:
            raise Refused("metering.foreign_accounting", f"{entry.site} sends the accounting of {day.site[:63]}")
        if day.part > day.parts or day.parts > MOST_PARTS or "\x00" in day.cluster:
            raise Refused("metering.accounting", f"part {day.part} of {day.parts} of a day of {entry.site} is no part of a day")
        try:
            date.fromisoformat(day.day)
        except ValueError as err:
            raise Refused("metering.accounting", f"{day.day} is no day") from err

        async def mark(tx: StoreTx) -> bool:
            await self._lanes.mark_interpreted(tx, entry)
            if day.bypass:
                await tx.fault(bypassed(day))
            return True

        await self._kept.keep(entry.site, day, said.sealed, entry.received_at, mark)
        self._fresh.add(entry.site)

    async def reconsider(self) -> None:
        """Compare what came since, unasked: a ghost or a runaway is a person's to know of before the month is over."""
        now = self._clock.now()
        period = period_of(now, DEFAULT_ZONE)
        start, end = bounds(period, DEFAULT_ZONE)
        for site in sorted(self._fresh):
            found = await self._of_site(site, period, start, end, now)
            count = len(found.differences) + found.more
            # What was told before this process began is not known here: the first comparison is told whatever it says, so that what is over ends.
            if count != self._differed.get(site):
                await self._kept.report(differing(found))
                self._differed[site] = count
            self._fresh.discard(site)

    async def reconciliation(self, query: ReconciliationQuery, caller: Caller) -> ReconciliationReply:
        """Three books per attempt, for each site that has a book of its own."""
        seen = rights.scope(caller.claims, "reconciliation.read")
        if query.site is not None and not seen.covers(site=query.site):
            raise rights.not_found()
        now = self._clock.now()
        period = query.period or period_of(now, DEFAULT_ZONE)
        start, end = bounds(period, DEFAULT_ZONE)
        first, last = start.astimezone(UTC).date(), end.astimezone(UTC).date()
        told = [query.site] if query.site is not None else await self._kept.sites(first, last)
        sites = [await self._of_site(site, period, start, end, now) for site in told if seen.covers(site=site)]
        return ReconciliationReply(period=period, sites=sites)

    async def _of_site(self, site: SiteName, period: str, start: datetime, end: datetime, now: datetime) -> SiteReconciliation:
        # A run over the period's border stands in a day beside it.
        first, last = (start - timedelta(days=1)).astimezone(UTC).date(), end.astimezone(UTC).date()
        sealed = await self._kept.days(site, first, last)
        keys = await self._store.keys(site)
        days = native.read([self._told(one, keys.valid) for one in sealed])
        attempts = await self._ours(site, start, end, now)
        named = {one.record.attempt for one in attempts}
        others = sorted({run.tag for run in days.records()} - named)
        known = await self._store.versions(others) if others else {}
        return native.reconcile(site, period, attempts, days, start=start, end=end, now=now, known=set(known))

    def _told(self, sealed: Sealed, valid: frozenset[str]) -> native.Told:
        proven = sealed.signer in valid and self._trust.verify(sealed, sealed.signer)
        return native.Told(decode(sealed.payload, NativeDay, what="kept accounting"), proven)

    async def _ours(self, site: SiteName, start: datetime, end: datetime, now: datetime) -> list[native.Ours]:
        found: list[native.Ours] = []
        after = ""
        while page := await self._kept.attempts(site, start, end, after, PAGE):
            found += self._read(await self._store.load(page), now)
            after = page[-1]
            if len(page) < PAGE or len(found) >= MOST_COMPARED:
                break
        return found

    def _read(self, page: Sequence[Evidence], now: datetime) -> list[native.Ours]:
        found = []
        for evidence in page:
            record = evidence.record
            if record is None:
                continue
            book = book_of(reckon(evidence, self._trust, now), [])
            error_s = max((abs(item.segment.anchor.error_s) for item in evidence.received), default=0.0)
            found.append(native.Ours(record, book, error_s))
        return found
