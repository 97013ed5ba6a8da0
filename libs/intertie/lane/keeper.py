"""The keeper's side of a lane on the bus: syncs in, one commit for all that wait, then interpretation, then the answers.

The site's name is the one that the server put into the subject. Nothing is answered that was not committed; with the store away nothing is
answered at all, and the site sends the same again. What a sync means is decided in `intertie.link.keeper`.

Most syncs are idle: they cost one statement for all of a group, one question to the service (`Quiet`), and no task. All others have one each.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Count
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import TypeVar

from intertie.bus.port import Bus, Message
from intertie.bus.serving import answer
from intertie.bus.subjects import INBOX, SERVICE_IMPORT
from intertie.bus.workers import Workers
from intertie.clock import Clock
from intertie.contracts.base import BATCH_BYTES, decode, encode
from intertie.contracts.incident import ReportIncident, Severity
from intertie.contracts.link import (
    LINK_VERSION,
    Go,
    Instruction,
    Lane,
    LaneState,
    Offer,
    Sealed,
    Settle,
    Stop,
    Sync,
    Synced,
    Withdraw,
    nudge_subject,
    sync_subject,
)
from intertie.errors import IntertieError, Refused, Stale, Unavailable
from intertie.ids import AttemptId, SiteName, speaker
from intertie.lane.interpreter import Interpret, Interpreter, storable
from intertie.lane.ports import KeeperTables
from intertie.link.clocks import TRY_S
from intertie.link.journal import InstructionMark, mark_of
from intertie.link.keeper import HEARD, NewEntry, SiteRow, Verdict, beat, check, judge, wanted_digest, wanted_ends
from intertie.link.site import stops_first
from intertie.observe import log
from intertie.observe.metrics import Counter

_T = TypeVar("_T")

LOG = log.get("lane")
SYNCS = Counter("intertie_lane_syncs_total", "Syncs by what became of them.", ["lane", "outcome"])
COMMITS = Counter("intertie_lane_commits_total", "Transactions that recorded syncs.", ["lane"])

# Answers that wait for interpretation or for their service: enough for a second of beats of a thousand sites.
WORKERS = 256
BACKLOG = 2_048
# What is no sync, or cannot be recorded, is told beside the others; more than so many at once say nothing new.
TELLERS, UNTOLD = 4, 256
# While one group is on its way to disk, the next is collected and follows it.
GROUPS_AT_ONCE = 2
# Where many come, a group waits a little for more, or each of them would pay for a commit of few; after a small group nobody waits.
GATHER_S, MANY, ENOUGH = 0.006, 16, 192
# One commit for so many syncs and bytes at most: more would hold the first of them past the sites' two seconds.
GROUP_SYNCS = 256
GROUP_BYTES = 8 * BATCH_BYTES
# An answer does not wait longer for what its entries mean; what comes of them later is said by a nudge.
INTERPRET_WAIT_S = 1.0
# The site gives up after TRY_S: an answer goes out before, if need be without the parts that the service was too slow for …
ANSWER_S = TRY_S * 0.8
# … each of which gets this much in any case.
PART_S = 0.1
# All of an answer but instructions and settings.
ENVELOPE_BYTES = 4 * 1024
# One instruction above the limit of an answer still travels, alone, up to what NATS carries with its envelope.
SINGLE_BYTES = 3 * BATCH_BYTES
# The same fault of the same site is said again after this long while it lasts.
FAULT_AGAIN_S = 600.0
# A fault not seen for so long is over; less, and two agents that take turns would open and close it at each beat.
RECOVERED_S = 15.0
# A site's wall clock this far off is a fault of its own (field case BR-139); no rule depends on it.
CLOCK_FAULT_S = 30.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What a site is to work by, newer than what it has."""

    revision: int
    sealed: Sealed


# A row written by this copy is taken as it is for so long; then it is read again, with what is computed from other tables. Longer than two idle
# beats with their jitter, or no idle sync would ever find its row.
KNOWN_S = 75.0
KNOWN_SITES = 10_000

STANDING = (
    LaneState.FORKED,
    LaneState.AGENT_RESTORED,
    LaneState.HUB_RESTORED,
    LaneState.SUPERSEDED,
    LaneState.CONTESTED,
    LaneState.VERSION,
)
RECOVERING = (*(f"lane.{state.value}" for state in STANDING), "site.clock")
"""Kinds of fault that a good sync proves to be over."""

KINDS: dict[int, tuple[type[Instruction], ...]] = {1: (Offer, Go, Withdraw, Stop, Settle)}
"""What an agent of this link version, or of the next one below that is listed, knows to read. One more kind would break its whole answer."""
UNKNOWN_TO_1 = {LaneState.CONTESTED: LaneState.SUPERSEDED}
"""States that version 1 lacks, and what comes nearest."""
Lease = Callable[[SiteRow], int]
"""Seconds for which `rerun` work of this site may run on; 0: no lease."""

Leases = Callable[[SiteName], Mapping[AttemptId, int]]
"""Milliseconds that are left of single attempts' leases, where they are not the site's."""

Instructions = Callable[[SiteName, InstructionMark], Awaitable[Sequence[Instruction]]]
"""Every instruction of the site that has no answer entry yet, in order of number; the mark is the highest that the site has stored."""
SettingsFor = Callable[[SiteName, int], Awaitable[Settings | None]]
"""Settings newer than this revision, or None."""
OnHeard = Callable[[Sequence[SiteRow]], Awaitable[None]]
"""Told of every recorded sync before its answer is made, of many at once where they are idle; must be quick."""
Quiet = Callable[[Mapping[SiteName, int]], Awaitable[Collection[SiteName]]]
"""Of these sites (with the settings revision that each has), those to whom nothing need be said: no instruction is open, no settings are newer.
Asked once for all idle syncs of a group, after they were received and perhaps before they are committed; the others are then asked for singly."""


@dataclass(eq=False, slots=True)
class _Waiting:
    site: SiteName
    sync: Sync
    reply: str
    size: int
    received: datetime
    received_s: float

    @property
    def idle(self) -> bool:
        return self.sync.at_head and not self.sync.entries


@dataclass
class _Faults:
    """Which faults were said lately, so that a beat does not repeat them, and which may be over. Kept in memory: after a restart a fault that
    lasts is said once more, and one that ended meanwhile is closed by a person."""

    said: dict[str, float] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)

    def due(self, key: str, now_s: float) -> bool:
        self.seen[key] = now_s
        return key not in self.said or now_s - self.said[key] >= FAULT_AGAIN_S

    def over(self, key: str, now_s: float) -> bool:
        return key in self.said and now_s - self.seen[key] >= RECOVERED_S

    def forget(self, key: str) -> None:
        self.said.pop(key, None)
        self.seen.pop(key, None)


@lru_cache(maxsize=KNOWN_SITES)
def _speaker(subject: str) -> SiteName:
    return speaker(subject.split(".")[3])


class LaneKeeper:
    """One lane of one service. `run` it in the service's task group; several copies may run beside each other."""

    def __init__(
        self,
        bus: Bus,
        lane: Lane,
        tables: KeeperTables,
        clock: Clock,
        *,
        interpret: Interpret,
        instructions: Instructions | None = None,
        settings: SettingsFor | None = None,
        on_heard: OnHeard | None = None,
        quiet: Quiet | None = None,
        epoch: Callable[[], int] = lambda: 1,
        lease_s: int | Lease = 0,
        leases: Leases | None = None,
        single: bool = True,
    ) -> None:
        """`single`: this hub declares `durability: single`, a commit is all the safety there is; else `safe_through` stays where it is. Without
        `quiet` each sync asks for its own instructions and settings, where the lane has any."""
        self._bus, self._lane, self._tables, self._clock = bus, lane, tables, clock
        self._instructions, self._settings, self._on_heard, self._quiet = instructions, settings, on_heard, quiet
        self._epoch, self._single = epoch, single
        self._lease: Lease = lease_s if callable(lease_s) else lambda _row: lease_s
        self._leases = leases
        self._interpreter = Interpreter(lane, tables, interpret, late=self.nudge)
        self._waiting: dict[SiteName, _Waiting] = {}
        self._rows: dict[SiteName, tuple[SiteRow, float]] = {}
        """Rows of idle sites as this copy wrote them last, and when each was read."""
        self._bell = asyncio.Event()
        self._in_hand: set[SiteName] = set()
        """Sites of groups that are on their way to disk: another sync of theirs waits until it is there."""
        self._room = asyncio.Semaphore(GROUPS_AT_ONCE)
        self._answers = Workers(self._finish, workers=WORKERS, backlog=BACKLOG, dropped=lambda _: self._count("dropped"))
        self._tellers = Workers(self._tell, workers=TELLERS, backlog=UNTOLD, dropped=lambda _: None)
        self._faults = _Faults()
        self.listening = asyncio.Event()
        """Set once syncs are heard."""

    async def run(self) -> None:
        """Keep the lane until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._interpreter.run(), name=f"lane-{self._lane}-interpret")
            group.create_task(self._commit_for_ever(group), name=f"lane-{self._lane}-commit")
            # Nothing waits in between: of each site only the latest sync is kept (`_admit`).
            subscription = await self._bus.listen(sync_subject("*", self._lane), self._take, f"lane-{self._lane}")
            # The server knows of it from here on, if there is one.
            await self._bus.alive()
            self.listening.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.listening.clear()
                await subscription.close()
                await self._answers.close()
                await self._tellers.close()

    async def nudge(self, site: SiteName) -> None:
        """Ask for an early sync of this lane. It may be lost: then the beat brings it."""
        try:
            await self._bus.publish(nudge_subject(site), self._lane.encode())
        except Unavailable as err:
            LOG.debug("a nudge was lost", site=site, code=err.code)

    # --- in ---

    def _take(self, message: Message) -> None:
        try:
            self._on_sync(message)
        except Exception:
            self._count("failed")
            LOG.exception("a sync could not be taken in", lane=self._lane.value, subject=message.subject)

    def _on_sync(self, message: Message) -> None:
        if not message.reply.startswith((SERVICE_IMPORT, INBOX)):
            # A client may name any subject as the reply of a request that it is allowed to make.
            self._count("foreign_reply")
            return
        try:
            site = _speaker(message.subject)
            sync = decode(message.body, Sync, what="sync")
            check(sync, site, self._lane)
        except Refused as err:
            self._refused(message, err)
            return
        self._admit(_Waiting(site, sync, message.reply, len(message.body), self._clock.now(), self._clock.monotonic_s()))

    def _admit(self, waiting: _Waiting) -> None:
        """One waits per site: the latest try, which is the only one that its site still listens for. So no site can crowd out another."""
        before = self._waiting.get(waiting.site)
        if before is not None:
            self._count("unanswered")
            if before.sync.session == waiting.sync.session and before.sync.nonce > waiting.sync.nonce:
                return
        self._waiting[waiting.site] = waiting
        self._bell.set()

    def _count(self, outcome: str, number: int = 1) -> None:
        SYNCS.inc(number, lane=self._lane.value, outcome=outcome)

    def _refused(self, message: Message, err: Refused) -> None:
        """Not a sync of this site and lane: silence, a log line, a fault report."""
        self._count("refused")
        site = SiteName(message.subject.split(".")[3])
        LOG.warning("a sync was refused", lane=self._lane.value, site=site, code=err.code, text=err.text)
        self._tellers.put(self._report(site, err.code, Severity.CRITICAL, f"Site {site} sends what is no sync", err.text))

    async def _tell(self, report: ReportIncident) -> None:
        try:
            await self._say_fault(report)
        except Exception:
            LOG.exception("a fault could not be reported", key=report.key)

    # --- commit ---

    async def _commit_for_ever(self, tasks: asyncio.TaskGroup) -> None:
        group = list[_Waiting]()
        while True:
            await self._bell.wait()
            await self._room.acquire()
            if len(group) >= MANY and len(self._waiting) < ENOUGH:
                await asyncio.sleep(GATHER_S)
            self._bell.clear()
            if group := self._next_group():
                self._in_hand.update(waiting.site for waiting in group)
                tasks.create_task(self._keep(group), name=f"lane-{self._lane}-group")
            else:
                self._room.release()

    async def _keep(self, group: Sequence[_Waiting]) -> None:
        """One group, from its commit to its answers. Those who came meanwhile are next as soon as it is on disk."""
        asked = asyncio.ensure_future(self._quiet_of(group))
        try:
            try:
                verdicts = await self._commit(group)
            finally:
                self._in_hand.difference_update(waiting.site for waiting in group)
                self._room.release()
                if self._waiting:
                    self._bell.set()
            self._count_all(verdicts)
            await self._answer_all(list(zip(group, verdicts, strict=True)), asked)
        except Exception:
            LOG.exception("syncs stay unanswered", lane=self._lane.value, count=len(group))
        finally:
            asked.cancel()

    def _count_all(self, verdicts: Sequence[Verdict | None]) -> None:
        for outcome, number in Count(verdict.state if verdict else None for verdict in verdicts).items():
            self._count(outcome.value if outcome else "unanswered", number)

    def _next_group(self) -> list[_Waiting]:
        """Those who wait, in order of arrival; tries that their site has given up are dropped."""
        group, size, now_s = list[_Waiting](), 0, self._clock.monotonic_s()
        for waiting in list(self._waiting.values()):
            if waiting.site in self._in_hand:
                continue
            if group and (len(group) >= GROUP_SYNCS or size + waiting.size > GROUP_BYTES):
                self._bell.set()
                break
            del self._waiting[waiting.site]
            if now_s - waiting.received_s > TRY_S:
                self._count("unanswered")
                continue
            group.append(waiting)
            size += waiting.size
        return group

    async def _commit(self, group: Sequence[_Waiting]) -> list[Verdict | None]:
        """One transaction for all; if something of one breaks it, one for each, so that no site can silence another. None: nothing may be answered."""
        try:
            return await self._record(group)
        except Unavailable as err:
            LOG.warning("syncs stay unanswered", lane=self._lane.value, count=len(group), code=err.code)
        except Exception as err:
            if len(group) > 1:
                return [verdict for waiting in group for verdict in await self._commit([waiting])]
            await self._unrecorded(group[0].site, err)
        return [None] * len(group)

    async def _unrecorded(self, site: SiteName, err: Exception) -> None:
        """A sync that the tables do not take: another copy was quicker, or it is our bug. The site sends it again either way."""
        if isinstance(err, Stale):
            LOG.info("a sync could not be recorded", lane=self._lane.value, site=site, code=err.code)
            return
        text = f"{type(err).__name__}: {err}"
        await self._say_fault(self._report(site, "lane.unrecorded", Severity.CRITICAL, f"A sync of site {site} cannot be recorded", text))
        LOG.error("a sync could not be recorded", lane=self._lane.value, site=site, exc_info=err)

    async def _say_fault(self, report: ReportIncident) -> None:
        """Outside a turn, once per FAULT_AGAIN_S."""
        if not self._faults.due(report.key, self._clock.monotonic_s()):
            return
        try:
            await self._tables.report(report)
        except (Unavailable, Stale) as err:
            LOG.warning("a fault could not be reported", key=report.key, code=err.code)
            return
        self._faults.said[report.key] = self._clock.monotonic_s()

    async def _record(self, group: Sequence[_Waiting]) -> list[Verdict | None]:
        """Idle syncs by one statement, if nobody else wrote their rows; all others by a turn."""
        quick = {waiting.site: verdict for waiting in group if (verdict := self._beat(waiting)) is not None}
        pairs = [(self._rows[site][0], verdict.row) for site, verdict in quick.items() if verdict.row is not None]
        kept = await self._tables.beat(self._lane, pairs) if pairs else frozenset[SiteName]()
        for site in kept:
            row = quick[site].row
            assert row is not None, "an idle sync is recorded"
            self._rows[site] = (row, self._rows[site][1])
        slow = [waiting for waiting in group if waiting.site not in kept]
        judged = dict(zip((waiting.site for waiting in slow), await self._turn(slow) if slow else (), strict=True))
        return [quick[waiting.site] if waiting.site in kept else judged[waiting.site] for waiting in group]

    def _beat(self, waiting: _Waiting) -> Verdict | None:
        """The verdict on an idle sync of a site whose row is known here; None: the row must be read."""
        known, sync = self._rows.get(waiting.site), waiting.sync
        if known is None or waiting.received_s - known[1] > KNOWN_S:
            return None
        row = known[0]
        # `LaneTables.beat` writes neither of these.
        if row.clocks is None or row.clocks.kernel_boot != sync.clocks.kernel_boot or row.version != sync.v:
            return None
        after = beat(row, sync, waiting.received, epoch=self._epoch(), single=self._single)
        if after is None:
            return None
        verdict = Verdict(LaneState.OK, after.ack_through, after.safe_through, after)
        # What is a fault, or the end of one, is written in a turn.
        told = self._lane is Lane.REGISTRY or bool(self._faults.said)
        return None if told and self._faults_of(waiting.site, verdict, waiting.received_s) else verdict

    def _know(self, verdicts: Sequence[Verdict | None], group: Sequence[_Waiting], now_s: float) -> None:
        for waiting, verdict in zip(group, verdicts, strict=True):
            row = verdict.row if verdict is not None else None
            caught_up = row is not None and row.at_head and row.state is LaneState.OK and row.interpreted_through == row.ack_through
            if row is not None and caught_up and len(self._rows) < KNOWN_SITES:
                self._rows[waiting.site] = (row, now_s)
            else:
                self._rows.pop(waiting.site, None)

    async def _turn(self, group: Sequence[_Waiting]) -> list[Verdict | None]:
        verdicts = list[Verdict | None]()
        rows, entries, faults = list[SiteRow](), dict[SiteName, Sequence[NewEntry]](), list[ReportIncident]()
        now_s = self._clock.monotonic_s()
        async with self._tables.turn(self._lane, [waiting.site for waiting in group]) as turn:
            for waiting in group:
                if waiting.site in turn.busy:
                    verdicts.append(Verdict(LaneState.BUSY))
                    continue
                row = turn.rows.get(waiting.site)
                seq = wanted_digest(row, waiting.sync)
                stored = None if seq is None else await turn.digest(waiting.site, waiting.sync.journal, seq)
                before = wanted_ends(waiting.sync)
                ends = await turn.ends(waiting.site, before) if before else {}
                verdict = judge(row, stored, waiting.sync, waiting.received, epoch=self._epoch(), single=self._single, ends=ends)
                verdicts.append(verdict)
                if verdict.row is not None:
                    rows.append(verdict.row)
                    entries[waiting.site] = verdict.new
                faults.extend(self._faults_of(waiting.site, verdict, now_s))
            if rows or faults:
                await turn.save(rows, entries, faults)
        self._know(verdicts, group, now_s)
        COMMITS.inc(lane=self._lane.value)
        for fault in faults:
            if fault.recovered:
                self._faults.forget(fault.key)
            else:
                self._faults.said[fault.key] = now_s
        return verdicts

    def _faults_of(self, site: SiteName, verdict: Verdict, now_s: float) -> list[ReportIncident]:
        """What a person must know of this sync: a lane that stands still, a clock that is off, and that either is over."""
        found = list[ReportIncident]()
        if verdict.why:
            kind, title = f"lane.{verdict.state.value}", f"Lane {self._lane} of site {site} stands still: {verdict.state.value}"
            found.append(
                self._report(site, kind, Severity.CRITICAL, title, f"{verdict.why}. Nothing is acknowledged meanwhile, what runs goes on.")
            )
        if verdict.row is not None and self._lane is Lane.REGISTRY:
            offset, error = verdict.row.clock_offset_s, verdict.row.clock_error_s
            if abs(offset) - error > CLOCK_FAULT_S:
                text = f"The site's wall clock is {-offset:+.1f} s (± {error:.1f}) from the hub's. Durations are not affected."
                found.append(self._report(site, "site.clock", Severity.WARNING, f"The clock of site {site} is off", text))
        due = [report for report in found if self._faults.due(report.key, now_s)]
        if verdict.state is LaneState.OK and self._faults.said:
            gone = [kind for kind in RECOVERING if self._faults.over(f"{kind}/{site}/{self._lane}", now_s)]
            due += [self._report(site, kind, Severity.INFO, "It is over", "The lane moves again.", recovered=True) for kind in gone]
        return due

    def _report(self, site: SiteName, kind: str, severity: Severity, title: str, text: str, *, recovered: bool = False) -> ReportIncident:
        return ReportIncident(
            key=f"{kind}/{site}/{self._lane}",
            kind=kind,
            severity=severity,
            title=title,
            text=storable(text),
            site=site,
            recovered=recovered,
        )

    # --- out ---

    async def _quiet_of(self, group: Sequence[_Waiting]) -> Collection[SiteName] | None:
        """Which idle sites need be told nothing; None if the service cannot say now: then they are told nothing either, until their next beat."""
        idle = {waiting.site: waiting.sync.settings_revision for waiting in group if waiting.idle}
        if self._instructions is None and self._settings is None:
            return idle.keys()
        if self._quiet is None or not idle:
            return frozenset()
        return await self._ask("quiet", self._quiet(idle), None, group[0].received_s + ANSWER_S)

    async def _answer_all(
        self, group: Sequence[tuple[_Waiting, Verdict | None]], asked: asyncio.Future[Collection[SiteName] | None]
    ) -> None:
        """Those who are at head with nothing to interpret are answered here, if there is nothing to say; each other one by itself."""
        calm = list[tuple[_Waiting, Verdict]]()
        for waiting, verdict in group:
            if verdict is None:
                continue
            row = verdict.row
            if waiting.idle and row is not None and verdict.state is LaneState.OK and row.interpreted_through == row.ack_through:
                calm.append((waiting, verdict))
            else:
                self._answers.put((waiting, verdict))
        if not calm:
            return
        quiet = await asked
        said = list[tuple[_Waiting, Verdict]]()
        for waiting, verdict in calm:
            if quiet is None or waiting.site in quiet:
                said.append((waiting, verdict))
            else:
                self._answers.put((waiting, verdict))
        if self._on_heard is not None:
            if rows := [verdict.row for _, verdict in said if verdict.row is not None]:
                await self._ask("on_heard", self._on_heard(rows), None, said[0][0].received_s + ANSWER_S)
        made = [(waiting.reply, self._synced(waiting.sync, verdict, (), None, more=False)) for waiting, verdict in said]
        try:
            await self._bus.publish_many(made)
        except IntertieError as err:
            LOG.info("answers were not sent", lane=self._lane.value, count=len(made), code=err.code)

    async def _finish(self, item: tuple[_Waiting, Verdict]) -> None:
        """One answer with all its parts."""
        waiting, verdict = item
        try:
            made = await self._answer(waiting.sync, verdict, waiting.received_s + ANSWER_S)
            await answer(self._bus, waiting.reply, made)
        except Exception:
            LOG.exception("a sync stays unanswered", lane=self._lane.value, site=waiting.site)

    async def _answer(self, sync: Sync, verdict: Verdict, by_s: float) -> bytes:
        instructions, settings, more = list[Instruction](), None, False
        row = verdict.row
        if row is not None and verdict.state in HEARD:
            interpreted = await self._interpreted(row, verdict)
            if self._on_heard is not None:
                await self._ask("on_heard", self._on_heard([row]), None, by_s)
            if verdict.state is LaneState.OK:
                if self._settings is not None:
                    settings = await self._ask("settings", self._settings(sync.site, sync.settings_revision), None, by_s)
                instructions, more = await self._to_say(sync, len(encode(settings.sealed)) if settings else 0, by_s)
            if not interpreted:
                LOG.debug("answered before all was interpreted", lane=self._lane.value, site=sync.site)
        return self._synced(sync, verdict, instructions, settings, more=more)

    def _synced(self, sync: Sync, verdict: Verdict, instructions: Sequence[Instruction], settings: Settings | None, *, more: bool) -> bytes:
        row = verdict.row
        return encode(
            Synced(
                v=LINK_VERSION,
                nonce=sync.nonce,
                state=UNKNOWN_TO_1.get(verdict.state, verdict.state) if sync.v == 1 else verdict.state,
                ack_through=verdict.ack_through,
                safe_through=verdict.safe_through,
                instructions=list(instructions),
                more=more,
                lease_s=self._lease(row) if verdict.state is LaneState.OK and row is not None and sync.v > 1 else 0,
                leases_ms=dict(self._leases(sync.site)) if self._leases is not None and verdict.state is LaneState.OK else {},
                epoch=self._epoch(),
                settings=settings.sealed if settings else None,
                settings_revision=settings.revision if settings else 0,
                clock=self._clock.now(),
                quarantined=row.quarantined if row else 0,
                journal=verdict.journal,
            )
        )

    async def _interpreted(self, row: SiteRow, verdict: Verdict) -> bool:
        """Interpret what is open, and at head wait for it a little: most often the answer can then say what came of it. A backlog is told as
        fast as it can be kept."""
        if not verdict.new and row.interpreted_through == row.ack_through:
            return True
        self._interpreter.kick(row.site)
        if not row.at_head:
            return False
        return await self._interpreter.settled(row.site, INTERPRET_WAIT_S)

    async def _to_say(self, sync: Sync, taken_bytes: int, by_s: float) -> tuple[list[Instruction], bool]:
        """Open instructions, as many as fit: stops before all others, then those that the site has not stored, then repeats. True if some were
        left out."""
        if self._instructions is None:
            return [], False
        mark = mark_of(sync)
        known_kinds = KINDS[max(version for version in KINDS if version <= sync.v)]
        asked = await self._ask("instructions", self._instructions(sync.site, mark), (), by_s)
        open_ones = [one for one in asked if isinstance(one, known_kinds)]
        new = [one for one in open_ones if (one.epoch, one.number) > (mark.epoch, mark.number)]
        known = [one for one in open_ones if (one.epoch, one.number) <= (mark.epoch, mark.number)]
        room = BATCH_BYTES - ENVELOPE_BYTES - taken_bytes
        said = list[Instruction]()
        for one in stops_first([*new, *known]):
            size = len(encode(one)) + 1
            if size > room and (said or size > SINGLE_BYTES):
                if size > SINGLE_BYTES:
                    await self._too_large(sync.site, one, size)
                    continue
                return said, True
            said.append(one)
            room -= size
        return said, False

    async def _too_large(self, site: SiteName, one: Instruction, size: int) -> None:
        """It can never travel: say so, and let the others pass."""
        text = f"Instruction {one.id} for attempt {one.attempt} has {size} bytes, at most {SINGLE_BYTES} fit one message."
        await self._say_fault(
            self._report(site, "lane.instruction_too_large", Severity.CRITICAL, f"An instruction for site {site} is too large", text)
        )

    async def _ask(self, what: str, answer: Awaitable[_T], otherwise: _T, by_s: float) -> _T:
        """The service's part of an answer. Without it the commit is still acknowledged; the next beat asks again."""
        try:
            async with asyncio.timeout(max(PART_S, by_s - self._clock.monotonic_s())):
                return await answer
        except (IntertieError, TimeoutError, OSError) as err:
            LOG.warning("an answer goes out without a part", lane=self._lane.value, part=what, error=str(err) or type(err).__name__)
        except Exception:
            LOG.exception("an answer goes out without a part", lane=self._lane.value, part=what)
        return otherwise
