"""Whether this site works alone, since when and why; what happened meanwhile, and what became of it when the hub was heard again.

`agent.core.islanded` decides from what the scheduler's lane and the bus say; here it is asked, written down, and put beside what else a person
at a site that is alone must know: what will be told, and how old the rules are that it works by.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from intertie.agent.books import get_setting, put_setting
from intertie.agent.core.islanded import Islanding, Sight, Written, tally
from intertie.agent.journal import Cursor
from intertie.agent.journal_rows import lane_heads
from intertie.contracts.base import decode, encode
from intertie.contracts.link import Lane, Sealed
from intertie.contracts.local import Absence, Known, LaneWaits
from intertie.contracts.usage import MeterSpec
from intertie.errors import Refused
from intertie.ids import AttemptId
from intertie.lane.site import SiteLane
from intertie.trust.seal import open_seal

if TYPE_CHECKING:
    from intertie.agent.site import Site

KEY = "absence"
# While it lasts, the row says again that it does: after a power loss a person sees for how long at least.
WRITE_EVERY_S = 60.0


class _At(msgspec.Struct):
    """Of an entry, its time alone."""

    at: datetime


class Alone:
    """One site's being alone or not."""

    def __init__(self, site: Site, sight: Callable[[], Sight]) -> None:
        self._site, self._sight = site, sight
        self._state = Islanding()
        self._dirty = False
        self._ended: datetime | None = None
        self._acks: dict[str, int] = {}
        """By lane, as of the last look while it was alone."""
        self._written_s = 0.0

    async def recover(self) -> None:
        stored = await self._site.journal.read(lambda cursor: get_setting(cursor, KEY))
        self._state = Islanding(decode(stored, Written, what="stored absence") if stored else None)

    @property
    def since(self) -> datetime | None:
        """Looked at anew each time: an entry that is journalled now says what is so now."""
        self._dirty = self._state.look(self._sight()) or self._dirty
        return self._state.since

    @property
    def why(self) -> str:
        since, found = self.since, self._state.written.absence
        return found.why if since is not None and found is not None else ""

    async def tick(self) -> None:
        """Write down what began, ended or goes on; look whether all of the last absence is told."""
        now, since = self._site.clock.now(), self.since
        found = self._state.written.absence
        if found is not None and found.ended is not None and found.told is None:
            waiting = await self._site.journal.read(lane_heads)
            if self._ended != found.ended:
                self._ended = found.ended
                heads = self._state.written.heads or {lane: head for lane, (head, _) in waiting.items()}
                # Against what was acknowledged while it was alone: some of it is told already.
                waited = sum(head - self._acks.get(lane, waiting[lane][1]) for lane, head in heads.items())
                self._state.returned(heads, found.entries or waited)
                self._dirty = True
            if all(waiting[lane][1] >= head for lane, head in self._state.written.heads.items()):
                self._state.told(now)
                self._dirty = True
        if since is not None:
            self._acks = {lane: ack for lane, (_, ack) in (await self._site.journal.read(lane_heads)).items()}
        old = self._site.clock.boot_s() - self._written_s >= WRITE_EVERY_S
        if self._dirty or (since is not None and (old or self._site.grants.refused)):
            refused, self._site.grants.refused = self._site.grants.refused, 0
            self._state.seen(now, refused)
            await self._site.journal.write(put_setting(KEY, encode(self._state.written).decode()))
            self._dirty, self._written_s = False, self._site.clock.boot_s()

    async def report(self) -> Absence | None:
        """The absence that lasts, else the last one, with what happened in it."""
        found = self._state.written.absence
        if found is None:
            return None
        rows = await self._site.journal.read(lambda cursor: cursor.execute("SELECT id FROM attempt WHERE settled = 1").fetchall())
        settled = frozenset(AttemptId(name) for (name,) in rows)
        if found.ended is None:
            found = msgspec.structs.replace(found, last=self._site.clock.now(), refused=found.refused + self._site.grants.refused)
        return tally(found, self._site.books.attempts.values(), settled, frozenset(self._site.grants.taken))


async def lanes_wait(site: Site, lanes: dict[Lane, SiteLane]) -> list[LaneWaits]:
    """What each lane has to tell, and how it is."""

    def read(cursor: Cursor) -> list[LaneWaits]:
        found = []
        for name, (head, ack) in lane_heads(cursor).items():
            size = cursor.execute("SELECT coalesce(sum(length(body)), 0) FROM entry WHERE lane = ? AND seq > ?", (name, ack)).fetchone()[0]
            first = cursor.execute("SELECT body FROM entry WHERE lane = ? AND seq > ? ORDER BY seq LIMIT 1", (name, ack)).fetchone()
            oldest = msgspec.json.decode(first[0], type=_At).at if first else None
            state, since = lane_state(lanes.get(Lane(name)))
            found.append(LaneWaits(lane=name, state=state, since=since, entries=head - ack, size=int(size), oldest=oldest))
        return found

    return await site.journal.read(read)


def lane_state(lane: SiteLane | None) -> tuple[str, datetime | None]:
    if lane is None:
        return "not_started", None
    if lane.trouble is not None:
        return lane.trouble.value, lane.last_heard
    return ("heard", None) if lane.silent_since is None else ("silent", lane.silent_since)


def known(site: Site) -> list[Known]:
    """What the site works by, each with its age and its end."""
    settings, now = site.settings, site.clock.now()
    found = [Known(what="settings", name=f"revision {settings.revision}", as_of=settings.at)]
    for mapping in settings.mappings:
        found.append(Known(what="mapping", name=mapping.tenant, as_of=settings.at, value=mapping.account))
    for held in site.grants.held():
        grant = held.grant
        value = f"{grant.devices} {grant.kind}"
        found.append(
            Known(
                what="allowance",
                name=grant.tenant,
                as_of=settings.at,
                valid_until=grant.valid_until,
                lapsed=now >= grant.valid_until,
                value=value,
            )
        )
    for spec in agreements(site):
        prices = ", ".join(f"{price.per_hour} {spec.currency}/{price.kind}-h" for price in spec.prices)
        found.append(Known(what="agreement", name=f"{spec.spec} rev {spec.revision}", as_of=spec.effective_from, value=prices))
    return found


def agreements(site: Site) -> list[MeterSpec]:
    """The site's own, those whose seal holds."""
    found = []
    for sealed in site.settings.specs:
        spec = _opened(site, sealed)
        if spec is not None and spec.provider == site.joined.site:
            found.append(spec)
    return found


def _opened(site: Site, sealed: Sealed) -> MeterSpec | None:
    """By metering's key, or by the scheduler's, which hands metering's word on."""
    for signer in ("metering", "scheduler"):
        try:
            return open_seal(sealed, site.joined.service_keys.get(signer, ""), MeterSpec)
        except (Refused, ValueError):
            continue
    return None
