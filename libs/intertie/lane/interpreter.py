"""Hands committed entries to the service: per site one after the other, sites beside each other. Receiving has happened; nothing here delays it
for long.

`Unavailable` and `Stale` wait and try the same entry again. Whatever else is raised sends the entry to quarantine with a fault report, and the
next one follows: one entry that cannot be understood never blocks a site (LINK D11).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from intertie.contracts.base import BATCH_BYTES, Contract, decode
from intertie.contracts.incident import ReportIncident, Severity
from intertie.contracts.link import Lane
from intertie.errors import IntertieError, Refused, Stale, Unavailable
from intertie.ids import SiteName
from intertie.lane.ports import KeeperTables, LaneEntry
from intertie.observe import log
from intertie.observe.metrics import Counter

LOG = log.get("lane")
INTERPRETED = Counter("intertie_lane_entries_total", "Entries interpreted or set aside.", ["lane", "outcome"])

Interpret = Callable[[LaneEntry], Awaitable[None]]

# Entries read at a time: a backlog of a week gives way to other sites between two reads.
READ_ENTRIES = 64
# … and of no more bytes: what an entry costs grows with its size, and large ones must cost the others' turns no more than small ones.
READ_BYTES = BATCH_BYTES
# Sites interpreted at once; each holds at most one database connection.
SITES_AT_ONCE = 4
# A hung service must not hold a site's entries for ever without a word.
INTERPRET_S = 30.0
# First and last wait before an entry is tried again.
RETRY_S = (0.05, 5.0)
# Entries left open by a copy that died, or committed by one that never came to interpret them.
SWEEP_S = 10.0


class _Numbered(Contract, frozen=True, kw_only=True):
    """All that must hold of any entry: it says the number under which it was chained."""

    seq: int


@dataclass
class _Site:
    task: asyncio.Task[None] | None = None
    again: bool = False
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while there is nothing to wait for: all interpreted, or stuck until a dependency is back."""
    stuck: bool = False
    owed: bool = False
    """An answer went out before what came of its entries was known."""


class Interpreter:
    """`kick` a site after its entries were committed; `run` in the service's task group, it also finds what was left open."""

    def __init__(self, lane: Lane, tables: KeeperTables, interpret: Interpret, *, late: Callable[[SiteName], Awaitable[None]]) -> None:
        """`late(site)` is called when a site is caught up after somebody went without waiting for it."""
        self._lane, self._tables, self._interpret, self._late = lane, tables, interpret, late
        self._sites: dict[SiteName, _Site] = {}
        self._slots = asyncio.Semaphore(SITES_AT_ONCE)
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                while True:
                    try:
                        for site in await self._tables.sites_with_open_entries(self._lane):
                            self.kick(site)
                    except (Unavailable, Stale) as err:
                        LOG.warning("open entries could not be looked for", lane=self._lane.value, code=err.code)
                    await asyncio.sleep(SWEEP_S)
            finally:
                self._group = None

    def kick(self, site: SiteName) -> None:
        """There may be new entries of this site."""
        at = self._sites.setdefault(site, _Site())
        at.again = True
        if not at.stuck:
            at.settled.clear()
        if at.task is None and self._group is not None:
            at.task = self._group.create_task(self._work(site, at), name=f"interpret-{self._lane}-{site}")

    async def settled(self, site: SiteName, timeout_s: float) -> bool:
        """True once everything of the site is interpreted; False if that takes longer or is stuck."""
        at = self._sites.get(site)
        if at is None:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await at.settled.wait()
        except TimeoutError:
            at.owed = True
            return False
        at.owed = at.owed or at.stuck
        return not at.stuck

    async def _work(self, site: SiteName, at: _Site) -> None:
        wait_s, done = RETRY_S[0], None
        while at.again or at.stuck:
            at.again = False
            try:
                async with self._slots:
                    done = await self._some(site, at, done)
            except (Unavailable, Stale, TimeoutError, OSError) as err:
                at.stuck = True
                at.settled.set()
                LOG.info("entries wait", lane=self._lane.value, site=site, error=_told(err), wait_s=wait_s)
                await asyncio.sleep(wait_s)
                wait_s, done = min(wait_s * 2, RETRY_S[1]), None
                continue
            wait_s, at.stuck = RETRY_S[0], False
            if at.owed and not at.again:
                at.owed = False
                await self._late(site)
        at.settled.set()
        # No await since the last look at `again`: a kick from here on makes a new task.
        at.task = None
        self._sites.pop(site, None)

    async def _some(self, site: SiteName, at: _Site, done: LaneEntry | None) -> LaneEntry | None:
        """Interpret the next entries; the last one that the service took."""
        entries = await self._tables.open_entries(self._lane, site, READ_ENTRIES)
        at.again = at.again or bool(entries)
        left = READ_BYTES
        for entry in entries:
            if left <= 0:
                break
            left -= len(entry.raw)
            if entry == done:
                await self._set_aside(entry, "lane.not_marked", "the service took this entry and did not mark it")
                continue
            try:
                if decode(entry.raw, _Numbered, what="entry").seq != entry.seq:
                    raise Refused("lane.number", f"entry {entry.seq} says another number of itself")
                async with asyncio.timeout(INTERPRET_S):
                    await self._interpret(entry)
                INTERPRETED.inc(lane=self._lane.value, outcome="ok")
                done = entry
            except (Unavailable, Stale, TimeoutError, OSError):
                raise
            except IntertieError as err:
                await self._set_aside(entry, err.code, err.text)
            except Exception as err:
                LOG.exception("an entry could not be interpreted", lane=self._lane.value, site=site, seq=entry.seq)
                await self._set_aside(entry, "internal", f"{type(err).__name__}: {err}")
        return done

    async def _set_aside(self, entry: LaneEntry, code: str, text: str) -> None:
        report = ReportIncident(
            key=f"lane.quarantine/{entry.site}/{entry.lane}",
            kind="lane.quarantine",
            severity=Severity.CRITICAL,
            title=f"An entry of site {entry.site} cannot be interpreted",
            text=storable(f"Entry {entry.seq} of lane {entry.lane}, journal {entry.journal}: {code}: {text}"),
            site=entry.site,
        )
        await self._tables.quarantine(entry, storable(f"{code}: {text}"), report)
        INTERPRETED.inc(lane=self._lane.value, outcome="quarantine")
        LOG.error("an entry is in quarantine", lane=entry.lane.value, site=entry.site, seq=entry.seq, code=code)


def storable(text: str) -> str:
    """A text about what a site said, which may repeat its words: PostgreSQL holds every character but NUL, and what cannot be set aside would end
    its keeper, at each start anew."""
    return text.replace("\x00", "\ufffd")[:4_000]


def _told(err: BaseException) -> str:
    return err.code if isinstance(err, IntertieError) else type(err).__name__
