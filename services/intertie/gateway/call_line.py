"""The gateway's end of calls on the bus: frames out to sites, frames back in order, once, and only from the site that was called.

What breaks a call becomes one `Broken`, whichever side or wire it was. Nothing is said twice to a site: a request that may have reached an upstream is
never repeated by us.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from intertie.bus.chunks import Credit, Ordered, Window
from intertie.bus.port import Bus, Message
from intertie.clock import Clock
from intertie.contracts.call_offerings import CallOutcome
from intertie.contracts.calls import (
    BEAT_S,
    SILENT_S,
    TAKE_S,
    WINDOW_BYTES,
    CallAbort,
    CallAlive,
    CallCredit,
    CallData,
    CallDone,
    CallHead,
    CallOpen,
    CallPart,
    CallRoom,
    CallTaken,
    answers_subject,
    call_subject,
    pack,
    unpack_up,
)
from intertie.errors import IntertieError, Unavailable
from intertie.ids import CallId, SiteName, mint
from intertie.observe import log, metrics

LOG = log.get("gateway.calls")
STRANGE = metrics.Counter("intertie_call_frames_refused_total", "Frames of calls that were not taken", ("reason",))

# A part that was sent and does not come within this is lost: two connections of one agent overlap for less.
GAP_S = 3.0


@dataclass(frozen=True, slots=True)
class Broken:
    """A call that ended on the way."""

    outcome: CallOutcome
    code: str
    text: str


Step = CallHead | CallData | CallDone | Broken


class Call:
    """One call under way. `step` gives what comes, in order; the last is a `CallDone` or a `Broken`."""

    def __init__(self, line: Line, site: SiteName, call: CallId, body: int) -> None:
        self._line, self.site, self.call = line, site, call
        self.taken = False
        self.heard_s = line.clock.monotonic_s()
        self._ordered: Ordered[CallHead | CallData | CallDone] = Ordered()
        self._gap_since_s: float | None = None
        self._steps: asyncio.Queue[Step] = asyncio.Queue()
        """Bounded by the credit that was given: one window of data, a head and an end."""
        self._window = Window(WINDOW_BYTES)
        self._arrived = 0
        self._room = Credit(WINDOW_BYTES, sent=body)
        self._roomy = asyncio.Event()
        self._parts = 0
        self._over = False
        self._opening: asyncio.Task[None] | None = None

    async def step(self) -> Step:
        return await self._steps.get()

    def put(self, frame: CallHead | CallData | CallDone) -> None:
        if isinstance(frame, CallData) and not self._ordered.known(frame.seq):
            self._arrived += len(frame.data)
            if self._arrived > self._window.granted:
                # A site that gives no heed to its credit fills no memory here.
                self.broken(CallOutcome.INTERRUPTED, "call.site_wrong", f"site {self.site} sent more than it was given room for")
                return
        try:
            ready = self._ordered.take(frame.seq, frame)
        except IntertieError as err:
            self.broken(CallOutcome.INTERRUPTED, "call.parts_lost", err.text)
            return
        for one in ready:
            if not self._over:
                self._steps.put_nowait(one)
                self._over = isinstance(one, CallDone)

    def heard(self, now_s: float) -> None:
        self.heard_s = now_s

    def answered(self, *, taken: bool) -> None:
        """The site spoke of it; `taken` unless it refused."""
        self.taken = self.taken or taken
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None

    def alive(self, sent: int) -> None:
        self._ordered.heard(sent)

    def grant(self, through: int) -> None:
        self._room.grant(through)
        self._roomy.set()

    def broken(self, outcome: CallOutcome, code: str, text: str) -> None:
        """The first reason counts."""
        if not self._over:
            self._over = True
            self._steps.put_nowait(Broken(outcome, code, text))
            self._roomy.set()

    async def send(self, data: bytes, *, last: bool) -> None:
        """More of the body, as the site has room for it."""
        while self._room.room() < len(data) and not self._over:
            self._roomy.clear()
            await self._roomy.wait()
        if self._over:
            return
        self._parts += 1
        self._room.spend(len(data))
        await self._line.say(self.site, CallPart(call=self.call, seq=self._parts, data=data, last=last))

    async def passed_on(self, count: int) -> None:
        """So many bytes went to the caller: the site may send as many more."""
        if (through := self._window.passed_on(count)) is not None:
            await self._line.say(self.site, CallCredit(call=self.call, through=through))

    async def beat(self, now_s: float) -> None:
        """Say that somebody waits; see whether the site still speaks, and whether all that it sent has come."""
        if now_s - self.heard_s > SILENT_S:
            self.broken(CallOutcome.INTERRUPTED, "call.site_silent", f"site {self.site} is not heard any more")
            return
        if not self._ordered.gap:
            self._gap_since_s = None
        elif self._gap_since_s is None:
            self._gap_since_s = now_s
        elif now_s - self._gap_since_s > GAP_S:
            self.broken(CallOutcome.INTERRUPTED, "call.parts_lost", "a part of the answer was lost on the way")
            return
        with suppress(IntertieError):
            await self._line.say(self.site, CallCredit(call=self.call, through=self._window.granted))

    async def opening(self, frame: CallOpen) -> None:
        """Asked as a request, so that the server itself says if nobody listens; the answer comes on the line, not here."""
        try:
            await self._line.bus.request(call_subject(self.site), pack(frame), timeout_s=TAKE_S)
        except Unavailable as err:
            if self.taken:
                return
            if err.code == "bus.no_responder":
                self.broken(CallOutcome.REFUSED, "call.no_site", f"site {self.site} is not connected: nobody took the call")
            elif err.code == "bus.timeout" and self._line.bus.connected:
                self.broken(CallOutcome.REFUSED, "call.not_taken", f"site {self.site} did not take the call within {TAKE_S:g} s")
            else:
                self.broken(CallOutcome.INTERRUPTED, "call.bus_lost", err.text)
        except IntertieError as err:
            self.broken(CallOutcome.REFUSED, err.code, err.text)

    def begin(self, frame: CallOpen) -> None:
        self._opening = asyncio.get_running_loop().create_task(self.opening(frame), name=f"open-{self.call}")

    async def close(self, abort: CallAbort | None) -> None:
        """No more of it; `abort` tells the site that nobody waits."""
        self._line.forget(self.call)
        if self._opening is not None:
            self._opening.cancel()
        if abort is not None:
            with suppress(IntertieError):
                await self._line.say(self.site, abort)


class Line:
    """This gateway's line to all sites."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self.bus, self.clock = bus, clock
        self.token = mint("gw")
        self._calls: dict[CallId, Call] = {}

    async def listen(self) -> None:
        await self.bus.listen(answers_subject(self.token), self._heard)
        self.bus.on_state(self._link)

    async def run(self) -> None:
        """Beats, for ever."""
        while True:
            await asyncio.sleep(BEAT_S / 2)
            now_s = self.clock.monotonic_s()
            for call in list(self._calls.values()):
                await call.beat(now_s)

    @property
    def under_way(self) -> int:
        return len(self._calls)

    def open(self, site: SiteName, frame: CallOpen) -> Call:
        call = Call(self, site, frame.call, len(frame.data))
        self._calls[frame.call] = call
        call.begin(frame)
        return call

    def forget(self, call: CallId) -> None:
        self._calls.pop(call, None)

    async def say(self, site: SiteName, frame: CallPart | CallCredit | CallAbort) -> None:
        await self.bus.publish(call_subject(site), pack(frame))

    def _link(self, up: bool) -> None:
        if not up:
            for call in list(self._calls.values()):
                call.broken(CallOutcome.INTERRUPTED, "call.bus_lost", "the hub's bus was lost while the call was under way")

    def _heard(self, message: Message) -> None:
        """Quick, and never raising: a frame is believed only from the site that was called, whose name the server put in."""
        try:
            frame = unpack_up(message.body)
        except IntertieError:
            STRANGE.inc(reason="invalid")
            return
        call = self._calls.get(frame.call)
        if call is None:
            STRANGE.inc(reason="late")
            return
        parts = message.subject.split(".")
        if len(parts) != 6 or parts[3] != call.site:
            STRANGE.inc(reason="other_site")
            LOG.warning("a site speaks of a call that is not its own", subject=message.subject)
            return
        call.heard(self.clock.monotonic_s())
        match frame:
            case CallTaken():
                call.answered(taken=True)
            case CallRoom():
                call.grant(frame.through)
            case CallAlive():
                call.alive(frame.sent)
            case CallHead() | CallData() | CallDone():
                call.answered(taken=not isinstance(frame, CallDone))
                call.put(frame)
