"""Who is heard on the scheduler lane, judged by this process's own monotonic clock from the growth of a counter; no stored time takes part.

Silence is counted from the latest of: taking office, and the last growth seen (LINK D5). It moves no job: it only keeps new work away, and
stands beside the state of what the site holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from intertie.ids import SiteName
from intertie.link.keeper import SiteRow

# An idle scheduler lane backs off to 30 s: two of those beats and their jitter.
SILENT_S = 75.0
# Our answers do not arrive when so many tries in a row took none.
UNTAKEN = 3


@dataclass(slots=True)
class _Heard:
    row: SiteRow
    grew_s: float
    seen_here: bool
    """It has grown since this process took office."""


@dataclass(slots=True)
class Hearing:
    """`now_s` is CLOCK_MONOTONIC of the process that judges."""

    silent_s: float = SILENT_S
    office_s: float = 0.0
    _sites: dict[SiteName, _Heard] = field(default_factory=dict)

    def took_office(self, now_s: float) -> None:
        """Count afresh: nothing that was heard before says what is caught up with this leader."""
        self.office_s = now_s
        for heard in self._sites.values():
            heard.seen_here = False

    def listen(self, rows: Iterable[SiteRow], now_s: float) -> None:
        """Rows as they are on disk now, or as just committed. A row that is older than the one held is passed over."""
        for row in rows:
            held = self._sites.get(row.site)
            if held is None:
                # The first sight of a row says nothing about when it was written, unless it was written just now in this process.
                self._sites[row.site] = _Heard(row, self.office_s, seen_here=False)
            elif row.heard > held.row.heard:
                self._sites[row.site] = _Heard(row, now_s, seen_here=True)
            elif row.heard == held.row.heard:
                held.row = row

    def hear(self, row: SiteRow, now_s: float) -> None:
        """A sync that this process has committed just now."""
        held = self._sites.get(row.site)
        if held is None or row.heard > held.row.heard:
            self._sites[row.site] = _Heard(row, now_s, seen_here=True)

    def heard(self, site: SiteName, now_s: float) -> bool:
        """The site speaks, and takes our answers."""
        held = self._sites.get(site)
        if held is None:
            return False
        answers_arrive = held.row.last_nonce - held.row.taken_nonce <= UNTAKEN
        return answers_arrive and now_s - max(held.grew_s, self.office_s) <= self.silent_s

    def caught_up(self, site: SiteName) -> bool:
        """At head with this leader, and all that it said is interpreted: only then is new work placed there (LINK D12)."""
        held = self._sites.get(site)
        return held is not None and held.seen_here and held.row.at_head

    def silent_since(self, site: SiteName, now_s: float) -> datetime | None:
        """When a site that is silent was last heard; None while it is not silent."""
        held = self._sites.get(site)
        if held is None or now_s - max(held.grew_s, self.office_s) <= self.silent_s:
            return None
        return held.row.last_heard

    def quiet_for_s(self, site: SiteName, now_s: float) -> float:
        """How long nothing was heard, as far as this process can know."""
        held = self._sites.get(site)
        return now_s - max(held.grew_s if held else 0.0, self.office_s)

    def offset_s(self, site: SiteName) -> float:
        """Estimate of hub minus site wall clock."""
        held = self._sites.get(site)
        return held.row.clock_offset_s if held else 0.0

    def last_heard(self, site: SiteName) -> datetime | None:
        held = self._sites.get(site)
        return held.row.last_heard if held else None
