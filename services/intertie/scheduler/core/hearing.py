"""Who is heard on the scheduler lane, judged by this process's own monotonic clock from the growth of a counter; no stored time takes part.

Silence is counted from the latest of: taking office, the end of the last deafness, and the last growth seen (LINK D5). Deafness is measured: a
canary site of our own syncs on the same lane and is committed as any other; while its syncs are unanswered, nobody's silence means anything.
Silence that merely keeps new work away (`heard`) needs no canary; silence that moves an attempt (`silent_for_s`) does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from intertie.contracts.link import LaneState
from intertie.ids import CANARY, SiteName
from intertie.link.keeper import SiteRow
from intertie.link.site import FIRST_EPOCH

# The canary speaks this often; unanswered for two of its beats, we are deaf.
CANARY_BEAT_S = 5.0
DEAF_BEATS = 2

# An idle scheduler lane backs off to 30 s: two of those beats and their jitter.
SILENT_S = 75.0
# Our answers do not arrive when so many tries in a row took none.
UNTAKEN = 3


# Agents before this link version tell nothing of what they hold after a restore.
HELD_VERSION = 2


def at_head(row: SiteRow, epoch: int) -> bool:
    """All that the site has to say is interpreted here. After a restore that takes a site that knows the new epoch: it journals what it holds
    (`HeldTold`) before it says so."""
    if epoch > FIRST_EPOCH and row.version >= HELD_VERSION and row.epoch_told < epoch:
        return False
    return row.at_head and row.state is LaneState.OK and row.interpreted_through >= row.ack_through


@dataclass(slots=True)
class _Heard:
    row: SiteRow
    grew_s: float
    seen_here: bool
    """It has grown since this process took office."""
    epoch: int = FIRST_EPOCH
    """Of this service."""
    told: bool = False
    """It was at head, and all of it interpreted, once since this process took office."""

    @property
    def at_head(self) -> bool:
        return self.seen_here and at_head(self.row, self.epoch)


@dataclass(slots=True)
class Hearing:
    """`now_s` is CLOCK_MONOTONIC of the process that judges."""

    silent_s: float = SILENT_S
    office_s: float = 0.0
    canary_beat_s: float = CANARY_BEAT_S
    epoch: int = FIRST_EPOCH
    """Of this service: after a restore a site's word counts when it knows of it."""
    _canary_s: float | None = None
    """When the canary's last answered sync was sent. None: it was never answered in this office."""
    _deaf_to_s: float = 0.0
    """End of the last deafness."""
    _sites: dict[SiteName, _Heard] = field(default_factory=dict)
    _first_look: bool = False
    """No row was read yet in this office: what has grown until now may have grown before it."""

    def took_office(self, now_s: float) -> None:
        """Count afresh: nothing that was heard before says what is caught up with this leader."""
        self.office_s = now_s
        self._canary_s = None
        self._first_look = True
        for heard in self._sites.values():
            heard.seen_here = heard.told = False

    # --- deafness ---

    def canary_answered(self, sent_s: float) -> None:
        """A sync of the canary, sent then, was committed and answered."""
        if self._canary_s is None:
            self.deaf(self.office_s, sent_s)
        elif sent_s - self._canary_s > DEAF_BEATS * self.canary_beat_s:
            self.deaf(self._canary_s, sent_s)
        self._canary_s = sent_s

    def deaf(self, from_s: float, to_s: float) -> None:
        """Between these nobody could have been heard here."""
        assert from_s <= to_s, "a deafness ends after it began"
        self._deaf_to_s = max(self._deaf_to_s, to_s)

    def is_deaf(self, now_s: float) -> bool:
        return self._canary_s is None or now_s - self._canary_s > DEAF_BEATS * self.canary_beat_s

    def silent_for_s(self, site: SiteName, now_s: float) -> float:
        """How long a site was silent while we could have heard it; 0 while we are deaf."""
        if self.is_deaf(now_s):
            return 0.0
        held = self._sites.get(site)
        return max(now_s - max(held.grew_s if held else 0.0, self.office_s, self._deaf_to_s), 0.0)

    # --- what is heard ---

    def listen(self, rows: Iterable[SiteRow], now_s: float) -> None:
        """Rows as they are on disk now, or as just committed. A row that is older than the one held is passed over."""
        for row in rows:
            if row.site == CANARY or row.heard == 0:
                continue
            held = self._sites.get(row.site)
            if held is None:
                # The first sight of a row says nothing about when it was written, unless it was written just now in this process.
                self._sites[row.site] = _Heard(row, self.office_s, seen_here=False, epoch=self.epoch)
            elif row.heard > held.row.heard:
                if self._first_look and not held.seen_here:
                    self._sites[row.site] = _Heard(row, self.office_s, seen_here=False, epoch=self.epoch)
                else:
                    self._heard(row, held, now_s)
            elif row.heard == held.row.heard:
                held.row = row
                held.told = held.told or held.at_head
        self._first_look = False

    def hear(self, row: SiteRow, now_s: float) -> None:
        """A sync that this process has committed just now."""
        held = self._sites.get(row.site)
        if row.site != CANARY and (held is None or row.heard > held.row.heard):
            self._heard(row, held, now_s)

    def _heard(self, row: SiteRow, before: _Heard | None, now_s: float) -> None:
        heard = _Heard(row, now_s, seen_here=True, epoch=self.epoch)
        heard.told = (before is not None and before.told) or heard.at_head
        self._sites[row.site] = heard

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
        return held is not None and held.at_head

    def told(self, site: SiteName) -> bool:
        """Caught up at least once with this leader."""
        held = self._sites.get(site)
        return held is not None and held.told

    def row(self, site: SiteName) -> SiteRow | None:
        held = self._sites.get(site)
        return held.row if held else None

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
