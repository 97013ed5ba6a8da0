"""The drill at the site: the agent closes its own connection for the agreed time and writes down what happened here.

What ends a cut is its time, and before that the owner's word; neither needs the hub. A cut is on disk before it begins, so an agent that is
started anew in the middle of it stays silent for what is left, and no longer. What the owner has not allowed is refused, and told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from intertie.agent.books import get_setting, put_setting
from intertie.agent.config import VERSION
from intertie.agent.core.model import Attempt, State
from intertie.agent.cut import CuttableBus, Make
from intertie.agent.journal import Cursor
from intertie.agent.journal_rows import lane_heads
from intertie.agent.site import Site
from intertie.contracts.base import decode, encode
from intertie.contracts.drill import DrillAttempt, DrillConsent, DrillLane, DrillLocal, SiteDrill
from intertie.contracts.link import DrillConsented, DrillRefused, DrillReported, EntryBase, Lane
from intertie.contracts.local import LocalDrill
from intertie.errors import Conflict, IntertieError
from intertie.link.journal import NextSeq
from intertie.observe import log
from intertie.trust.evidence import SITE, sign_part

LOG = log.get("agent.drill")

LOOK_S = 0.2
# A site that hears of its drill this long after the start makes no cut: what would be left is no rehearsal.
LATE_S = 3.0
# How long the lanes are watched afterwards before the account says that they did not come to their head.
WATCH_S = 120.0
# The account lists no more; the contract's limit.
MOST_ATTEMPTS = 500


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings ask for."""

    drill: str
    seconds: int
    start: datetime
    """By the hub's clock."""
    consent: str


class Before(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt as it was when the cut began."""

    state: str
    go: bool
    native_id: str = ""
    started_ns: int = 0


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """A cut under way, as it lies on disk."""

    drill: str
    seconds: int
    cut_at: datetime
    cut_boot_s: float
    kernel_boot: str
    before: dict[str, Before]
    local_running: int
    restarts: int = 0
    islanded_at: datetime | None = None
    back_at: datetime | None = None
    """Set once it is over."""
    ended_by: str = ""


def parse(text: str) -> Asked | None:
    """`SiteSettings.drill`; None if there is none, or none that this version can read."""
    try:
        drill, seconds, start, consent = text.split("/")
        asked = Asked(drill=drill, seconds=int(seconds), start=datetime.fromisoformat(start), consent=consent)
    except ValueError:
        return None
    # At the ends of time nothing can be added to a moment.
    known = asked.start.tzinfo is not None and 2_000 <= asked.start.year <= 2_200
    return asked if known and 5 <= asked.seconds <= 3_600 else None


def refusal(asked: Asked, consent: DrillConsent | None, *, start: datetime) -> str:
    """Why the owner's word does not cover this cut; empty if it does. What was taken back or limited at the site stands above any token, whose being
    given the hub alone says."""
    if asked.consent == "token" and (consent is None or (consent.allowed and asked.seconds <= consent.longest_s)):
        return ""
    if consent is None or not consent.allowed:
        return "the owner has not allowed a drill here"
    if asked.seconds > consent.longest_s:
        return f"the owner allows {consent.longest_s} s at most"
    if consent.until is not None and start + timedelta(seconds=asked.seconds) > consent.until:
        return f"the owner's consent ends at {consent.until.isoformat()}"
    return ""


class Drill:
    """One site's drills. `bus()` instead of a connection, `open()` before it, `run()` beside the lanes."""

    def __init__(self, site: Site) -> None:
        self._site, self._clock, self._journal = site, site.clock, site.journal
        self._bus: CuttableBus | None = None
        self._cut: Cut | None = None
        self._consent: DrillConsent | None = None
        self._done = ""
        self._bell = asyncio.Event()
        self._made = asyncio.Event()
        self._stop_asked = False

    async def open(self) -> None:
        """From disk: the owner's consent, and a cut that is not over."""
        stored = await self._journal.read(
            lambda cursor: (get_setting(cursor, "drill"), get_setting(cursor, "drill_consent"), get_setting(cursor, "drill_done"))
        )
        if stored[0]:
            cut = decode(stored[0], Cut, what="stored drill")
            self._cut = msgspec.structs.replace(cut, restarts=cut.restarts + 1) if cut.back_at is None else cut
        if stored[1]:
            self._consent = decode(stored[1], DrillConsent, what="stored consent")
        self._done = stored[2] or ""

    async def bus(self, make: Make) -> CuttableBus:
        """The connection, open unless a cut is on."""
        self._bus = CuttableBus(make)
        if self._cut is None or self._cut.back_at is not None:
            await self._bus.mend()
        self._made.set()
        return self._bus

    def settings_came(self) -> None:
        """The scheduler's settings were applied: there may be a drill in them, or none any more."""
        self._bell.set()

    # --- the owner's word ---

    async def allow(self, *, by: str, until: datetime | None, longest_s: int) -> DrillConsent:
        return await self._say(DrillConsent(allowed=True, given="site", by=by, at=self._clock.now(), until=until, longest_s=longest_s))

    async def revoke(self, *, by: str) -> DrillConsent:
        """No drill, whatever the hub says; one that is on ends now."""
        self._stop_asked = True
        self._bell.set()
        return await self._say(DrillConsent(allowed=False, given="site", by=by, at=self._clock.now()))

    async def _say(self, consent: DrillConsent) -> DrillConsent:
        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            return {Lane.REGISTRY: [DrillConsented(**self._common(following), consent=consent)]}

        await self._site.append(entries, put_setting("drill_consent", encode(consent).decode("utf-8")))
        self._consent = consent
        return consent

    def stop(self) -> None:
        """End the cut now. `Conflict('agent.no_drill')` if none is on."""
        if self._cut is None or self._cut.back_at is not None:
            raise Conflict("agent.no_drill", "no drill is on")
        self._stop_asked = True
        self._bell.set()

    def status(self) -> LocalDrill:
        if self._cut is not None and self._cut.back_at is None:
            return LocalDrill(
                consent=self._consent, drill=self._cut.drill, on=True, start=self._cut.cut_at, left_s=round(self._left_s(self._cut))
            )
        asked = self._asked()
        if asked is None:
            return LocalDrill(consent=self._consent)
        return LocalDrill(consent=self._consent, drill=asked.drill, start=asked.start)

    # --- the drill ---

    async def run(self) -> None:
        """Wait for a drill, make the cut, tell of it; for ever."""
        await self._made.wait()
        while True:
            try:
                if self._cut is None:
                    await self._wait_for_one()
                if self._cut is not None:
                    await self._through(self._cut)
            except IntertieError as err:
                LOG.warning("the drill's next step is taken later", code=err.code, text=err.text)
                await asyncio.sleep(1.0)
            except Exception:
                # A fault of ours in a rehearsal must cost the site neither its link nor its agent.
                LOG.exception("the drill is given up")
                await self._give_up()

    async def _give_up(self) -> None:
        self._cut = None
        with suppress(IntertieError):
            assert self._bus is not None, "bus() comes before run()"
            await self._bus.mend()
            await self._journal.write(put_setting("drill", ""))
        await asyncio.sleep(1.0)

    def _asked(self) -> Asked | None:
        """The drill of the settings, if it was not made or refused before."""
        asked = parse(self._site.settings.drill)
        return asked if asked is not None and asked.drill != self._done else None

    def _start(self, asked: Asked) -> datetime:
        """The start by this site's clock."""
        return asked.start - timedelta(seconds=self._site.offset()[0])

    async def _wait_for_one(self) -> None:
        asked = self._asked()
        if asked is None:
            self._bell.clear()
            if self._asked() is None:
                await self._bell.wait()
            return
        start = self._start(asked)
        if why := refusal(asked, self._consent, start=start):
            await self._refuse(asked, "agent.drill_not_allowed", why)
            return
        wait_s = (start - self._clock.now()).total_seconds()
        if wait_s < -LATE_S:
            await self._refuse(asked, "agent.drill_late", f"it was to begin {-wait_s:.0f} s ago")
        elif wait_s > 0:
            # Looked at again often: it may be called off, and the clock may be set.
            await asyncio.sleep(min(wait_s, LOOK_S))
        else:
            await self._begin(asked)

    async def _refuse(self, asked: Asked, code: str, why: str) -> None:
        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            return {Lane.REGISTRY: [DrillRefused(**self._common(following), drill=asked.drill, code=code, text=why)]}

        await self._site.append(entries, put_setting("drill_done", asked.drill))
        self._done = asked.drill
        LOG.warning("a drill is refused", drill=asked.drill, code=code, text=why)

    async def _begin(self, asked: Asked) -> None:
        books = self._site.books.attempts.values()
        before = {a.id: _before(a) for a in books if a.local is None and a.state in (State.CLAIMED, State.STAGING, State.RUNNING)}
        moment = self._site.moment()
        cut = Cut(
            drill=asked.drill,
            seconds=asked.seconds,
            cut_at=moment.utc,
            cut_boot_s=moment.boot_s,
            kernel_boot=moment.kernel_boot,
            before={str(id): was for id, was in before.items()},
            local_running=sum(a.local is not None and a.state is State.RUNNING for a in books),
        )
        self._stop_asked = False
        await self._keep(cut, done=asked.drill)

    async def _keep(self, cut: Cut, *, done: str = "") -> None:
        """On disk first."""
        text = encode(cut).decode("utf-8")

        def write(cursor: Cursor) -> None:
            put_setting("drill", text)(cursor)
            if done:
                put_setting("drill_done", done)(cursor)

        await self._journal.write(write)
        self._cut, self._done = cut, done or self._done

    def _left_s(self, cut: Cut) -> float:
        """Of the cut: by the clock that nobody sets, after a reboot by the wall clock, and never more than was agreed."""
        moment = self._site.moment()
        if moment.kernel_boot == cut.kernel_boot:
            left = cut.cut_boot_s + cut.seconds - moment.boot_s
        else:
            left = (cut.cut_at + timedelta(seconds=cut.seconds) - moment.utc).total_seconds()
        return min(float(cut.seconds), max(0.0, left))

    async def _through(self, cut: Cut) -> None:
        """From the cut, or from where an agent before this one stood in it, to the account."""
        assert self._bus is not None, "bus() comes before run()"
        if cut.back_at is None:
            await self._bus.cut()
            LOG.warning("the link is cut for a drill", drill=cut.drill, seconds=cut.seconds, next_step="intertie local drill stop")
            self._cut = cut = await self._silent(cut)
            # The link first: a disk that is full now must not keep it cut.
            await self._bus.mend()
            await self._keep(cut)
            LOG.warning("the drill's cut is over", drill=cut.drill, ended_by=cut.ended_by)
        else:
            await self._bus.mend()
        lanes, heard_at = await self._watch_lanes(cut)
        await self._report(cut, lanes, heard_at)

    async def _silent(self, cut: Cut) -> Cut:
        noticed = cut.islanded_at
        while (left := self._left_s(cut)) > 0 and not self._stop_asked:
            if noticed is None and self._site.islanded():
                noticed = self._clock.now()
            self._bell.clear()
            try:
                async with asyncio.timeout(min(left, LOOK_S)):
                    await self._bell.wait()
            except TimeoutError:
                continue
        ended_by = "owner" if self._stop_asked else "time"
        return msgspec.structs.replace(cut, islanded_at=noticed, back_at=self._clock.now(), ended_by=ended_by)

    async def _watch_lanes(self, cut: Cut) -> tuple[list[DrillLane], datetime | None]:
        """How much each lane had to tell, and how long it took; and when the first answer came."""
        began = self._clock.boot_s()
        found = await self._journal.read(lane_heads)
        told: dict[str, int] = {}
        heard_at: datetime | None = None
        while self._clock.boot_s() - began < WATCH_S and (len(told) < len(found) or heard_at is None):
            if heard_at is None and not self._site.islanded():
                heard_at = self._clock.now()
            for lane in Lane:
                ack, _ = await self._journal.marks(lane)
                if heard_at is not None and lane not in told and ack >= found[lane][0]:
                    told[lane] = round((self._clock.boot_s() - began) * 1000)
            await asyncio.sleep(LOOK_S / 2)
        lanes = [DrillLane(lane=lane, waiting=max(0, head - ack), to_head_ms=told.get(lane)) for lane, (head, ack) in found.items()]
        return lanes, heard_at

    async def _report(self, cut: Cut, lanes: list[DrillLane], heard_at: datetime | None) -> None:
        assert cut.back_at is not None, "told when it is over"
        site = self._site
        books = list(site.books.attempts.values())
        report = SiteDrill(
            drill=cut.drill,
            site=site.joined.site,
            seconds=cut.seconds,
            cut_at=cut.cut_at,
            back_at=cut.back_at,
            ended_by=cut.ended_by,
            restarts=cut.restarts,
            islanded_at=cut.islanded_at,
            heard_at=heard_at,
            attempts=attempts_of(cut, books)[:MOST_ATTEMPTS],
            local=local_of(cut, books),
            lanes=lanes,
            agent_version=VERSION,
        )
        signature = sign_part(site.key, report, role=SITE, name=site.joined.site, at=self._clock.now())

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            return {Lane.REGISTRY: [DrillReported(**self._common(following), report=report, signature=signature)]}

        await site.append(entries, put_setting("drill", ""))
        self._cut = None

    def _common(self, following: NextSeq) -> dict[str, Any]:
        return {"seq": following[Lane.REGISTRY], "at": self._clock.now(), "islanded": self._site.islanded()}


def _before(attempt: Attempt) -> Before:
    started = attempt.started
    return Before(
        state=attempt.state.value,
        go=attempt.go_boot_s is not None,
        native_id=started.native_id if started else "",
        started_ns=started.utc_ns if started else 0,
    )


def attempts_of(cut: Cut, books: Sequence[Attempt]) -> list[DrillAttempt]:
    """Every federation attempt that was open at some time of the cut. Pure."""
    found = []
    for attempt in sorted(books, key=lambda a: a.id):
        was = cut.before.get(str(attempt.id))
        if attempt.local is not None or (was is None and not _began_in(cut, attempt)):
            continue
        started, ended = attempt.started, attempt.ended
        same = was is not None and started is not None and (was.native_id, was.started_ns) == (started.native_id, started.utc_ns)
        found.append(
            DrillAttempt(
                attempt=attempt.id,
                job=attempt.job,
                pool=attempt.pool,
                before=was.state if was is not None else "",
                after=attempt.state.value,
                began_in_cut=_began_in(cut, attempt),
                go_before=was is not None and was.go,
                same_process=same,
                ran_us=ended.ran_us if ended is not None else 0,
                outcome=ended.outcome if ended is not None else "",
                cause=str(ended.cause or "") if ended is not None else "",
            )
        )
    return found


def local_of(cut: Cut, books: Sequence[Attempt]) -> DrillLocal:
    """What the owner's own users did: counts. Pure."""
    mine = [a for a in books if a.local is not None]
    return DrillLocal(
        running_before=cut.local_running,
        submitted=sum(a.local is not None and _within(cut, a.local.submitted) for a in mine),
        started=sum(_began_in(cut, a) for a in mine),
        ended=sum(a.ended is not None and _within(cut, a.ended.ended) for a in mine),
    )


def _began_in(cut: Cut, attempt: Attempt) -> bool:
    return attempt.started is not None and _within(cut, datetime.fromtimestamp(attempt.started.utc_ns / 1e9, UTC))


def _within(cut: Cut, at: datetime) -> bool:
    return cut.back_at is not None and cut.cut_at <= at <= cut.back_at
