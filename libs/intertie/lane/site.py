"""The site's side of a lane on a bus and a journal: performs what `intertie.link.site` decides, for ever, whatever becomes of the bus.

`SiteLane` is one lane; an agent runs three and one `listen_for_nudges`. An exchange is handed over only after its marks and instructions are in
the journal, and never before what the keeper had to acknowledge for it.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime, timedelta

from intertie.bus.port import Bus, Message, Subscription
from intertie.clock import Clock, kernel_boot
from intertie.contracts.base import BATCH_BYTES, decode, encode
from intertie.contracts.link import Clocks, Go, Instruction, Lane, Offer, Sealed, Sync, Synced, local_sync_subject
from intertie.errors import IntertieError, Refused, Unavailable
from intertie.ids import AttemptId, SessionId, SiteName
from intertie.link.clocks import TRY_S
from intertie.link.journal import InstructionMark, Journal
from intertie.link.site import (
    Effect,
    Exchange,
    Heard,
    Load,
    Pace,
    Raised,
    Reopen,
    Report,
    Send,
    Silent,
    SiteMachine,
    Take,
    Trouble,
    Wake,
    pace_of,
)
from intertie.observe import log

LOG = log.get("lane")

LOCAL_NUDGE = "down.nudge"
"""What the agent hears, in its own account, of `intertie.v1.down.<site>.nudge`."""

# The rest of a sync: names, digests, clocks, and the list of running attempts of a large site.
ENVELOPE_BYTES = 16 * 1024

OnInstructions = Callable[[Sequence[Instruction], Exchange], Awaitable[None]]
"""Instructions not seen before, stored already; `exchange.sent_boot_s` is what `start_within` counts from. Must be quick: the lane waits."""
OnAnswer = Callable[[Exchange], Awaitable[None]]
OnSettings = Callable[[Sealed, int], Awaitable[None]]
OnSilence = Callable[[datetime | None], Awaitable[None]]
"""The lane is silent since then; None: it is heard again."""
OnTrouble = Callable[[Trouble | None, str], Awaitable[None]]
OnRaised = Callable[[int], Awaitable[None]]
"""The keeper is in this epoch, higher than any before: journal what is held. What it raises (`IntertieError`) has it asked again."""
OnReopen = Callable[[Lane, Reopen], Awaitable[None]]
"""Both sides disagree: open the journal anew (`intertie.agent.reopen`). Not called again for a journal that is not the current one any more."""


class SiteLane:
    """One lane of this site. `run` it as a task; it ends only by cancellation."""

    def __init__(
        self,
        bus: Bus,
        lane: Lane,
        journal: Journal,
        clock: Clock,
        *,
        site: SiteName,
        session: SessionId,
        on_instructions: OnInstructions | None = None,
        on_answer: OnAnswer | None = None,
        on_settings: OnSettings | None = None,
        on_silence: OnSilence | None = None,
        on_trouble: OnTrouble | None = None,
        on_reopen: OnReopen | None = None,
        on_raised: OnRaised | None = None,
        running: Callable[[], Sequence[AttemptId]] = tuple,
        settings_revision: Callable[[], int] = int,
        pace: Pace | None = None,
        spread: Callable[[], float] = random.random,
        boot: str = "",
    ) -> None:
        """`running` lists every attempt that may hold devices now: one is added before its `claimed` is journalled and removed after its end is,
        so that what is not listed is surely gone. `boot` is the kernel's boot id (read if empty)."""
        self._bus, self._lane, self._journal, self._clock = bus, lane, journal, clock
        self._site, self._session = site, session
        self._on_instructions, self._on_answer, self._on_settings = on_instructions, on_answer, on_settings
        self._on_silence, self._on_trouble, self._on_reopen = on_silence, on_trouble, on_reopen
        self._on_raised = on_raised
        self._running, self._settings_revision = running, settings_revision
        self._pace, self._spread = pace or pace_of(lane), spread
        self._boot = boot or kernel_boot()
        self._machine: SiteMachine | None = None
        self._bell = asyncio.Event()
        self._turned = asyncio.Condition()
        self._state_told = False
        self._started = clock.now()
        self._silent_since: datetime | None = self._started
        self._last_heard: datetime | None = None
        self._epochs = (0, 0)

    # --- what others may ask ---

    @property
    def lane(self) -> Lane:
        return self._lane

    @property
    def silent_since(self) -> datetime | None:
        """Wall clock of the last answer before the lane fell silent (of this process' start, before the first); None while it is heard."""
        return self._silent_since

    @property
    def last_heard(self) -> datetime | None:
        """Wall clock at the last answer taken."""
        return self._last_heard

    @property
    def clock_offset_s(self) -> float:
        """Estimate of hub minus site wall clock; 0 before the first answer."""
        return self._machine.clock.offset_s if self._machine and self._machine.clock else 0.0

    @property
    def clock_error_s(self) -> float | None:
        """Bound on the estimate's error; None before the first answer."""
        return self._machine.clock.error_s if self._machine and self._machine.clock else None

    @property
    def trouble(self) -> Trouble | None:
        return self._machine.trouble if self._machine else None

    def wake(self, why: Wake = Wake.ENTRIES) -> None:
        """Entries are in the journal, or the hub asks: speak before the beat. Call it after `journal.append` has returned."""
        if self._machine is not None:
            self._machine.wake(why, self._clock.boot_s())
        self._bell.set()

    def set_beat(self, beat_s: float) -> None:
        """Settings name another beat."""
        self._pace = pace_of(self._lane, beat_s)
        if self._machine is not None:
            self._machine.pace = self._pace

    async def flush(self, timeout_s: float) -> None:
        """Return once all that is in the journal now is on disk at the keeper; `Unavailable('lane.not_flushed')` if that takes longer."""
        self.wake()
        after = self._machine.nonce if self._machine else 0
        try:
            async with asyncio.timeout(timeout_s), self._turned:
                await self._turned.wait_for(lambda: self._machine is not None and self._machine.clean and self._machine.taken_nonce > after)
        except TimeoutError:
            raise Unavailable(
                "lane.not_flushed", f"the {self._lane} keeper has not acknowledged everything within {timeout_s:g} s"
            ) from None

    # --- the loop ---

    async def run(self) -> None:
        """Speak for ever. The journal must be readable at the start; afterwards nothing but cancellation ends it."""
        marks = await self._journal.marks(self._lane)
        self._epochs = await self._journal.epochs(self._lane)
        self._machine = machine = SiteMachine(
            site=self._site,
            session=self._session,
            lane=self._lane,
            journal=self._journal.id,
            marks=marks,
            now_s=self._clock.boot_s(),
            pace=self._pace,
            spread=self._spread,
            epochs=self._epochs,
            place=self._journal.place,
            tells_held=self._on_raised is not None,
        )
        if not self._state_told:
            self._state_told = True
            self._bus.on_state(lambda _connected: self.wake(Wake.BUS))
        while True:
            self._bell.clear()
            if machine.journal != self._journal.id:
                machine.place = self._journal.place
                machine.reopened(self._clock.boot_s(), self._journal.id)
            await self._perform(machine, machine.tick(self._clock.boot_s()))
            wait_s = machine.due_at - self._clock.boot_s()
            if wait_s > 0:
                try:
                    async with asyncio.timeout(wait_s):
                        await self._bell.wait()
                except TimeoutError:
                    continue

    async def _perform(self, machine: SiteMachine, effects: Iterable[Effect]) -> None:
        """Each effect in order, and what follows from it."""
        todo = deque(effects)
        while todo:
            effect = todo.popleft()
            match effect:
                case Load(after):
                    todo.extend(await self._load(machine, after))
                case Send(sync):
                    todo.extend(await self._send(machine, sync))
                case Take(exchange):
                    todo.extend(await self._take(machine, exchange))
                case Silent(since_boot_s):
                    self._silent_since = self._clock.now() - timedelta(seconds=self._clock.boot_s() - since_boot_s)
                    LOG.warning("a lane is silent", lane=self._lane.value, since=self._silent_since.isoformat())
                    await self._call(self._on_silence, self._silent_since)
                case Heard():
                    self._silent_since = None
                    LOG.info("a lane is heard", lane=self._lane.value)
                    await self._call(self._on_silence, None)
                case Report(trouble, text):
                    LOG.log(40 if trouble else 20, "trouble on a lane", lane=self._lane.value, trouble=trouble and trouble.value, text=text)
                    await self._call(self._on_trouble, trouble, text)
                case Reopen(journal):
                    if journal == self._journal.id:
                        await self._call(self._on_reopen, self._lane, effect)
                    self._bell.set()
                case Raised(epoch):
                    todo.extend(await self._raised(machine, epoch))
        async with self._turned:
            self._turned.notify_all()

    async def _load(self, machine: SiteMachine, after: int) -> list[Effect]:
        try:
            before = self._running()
            batch = await self._journal.batch(self._lane, after, BATCH_BYTES - ENVELOPE_BYTES)
            # Only the scheduler's instructions are numbered; another keeper's epoch has nothing to do with theirs.
            mark = await self._journal.instruction_mark() if self._lane is Lane.SCHEDULER else InstructionMark(0, 0)
        except IntertieError as err:
            return machine.not_loaded(self._clock.boot_s(), f"{err.code}: {err.text}")
        # What was there before or after the read: an attempt in neither list had ended, or had not begun, when the batch was read.
        running = list(dict.fromkeys([*before, *self._running()]))
        now_s = self._clock.boot_s()
        return machine.loaded(
            now_s,
            batch,
            running=running,
            mark=mark,
            settings_revision=self._settings_revision(),
            clocks=Clocks(
                utc=self._clock.now(),
                boot_s=now_s,
                kernel_boot=self._boot,
                offset_s=machine.clock.offset_s if machine.clock else None,
                error_s=machine.clock.error_s if machine.clock else None,
            ),
        )

    async def _send(self, machine: SiteMachine, sync: Sync) -> list[Effect]:
        try:
            reply = await self._bus.request(local_sync_subject(self._lane), encode(sync), timeout_s=TRY_S)
            synced = decode(reply.body, Synced, what="answer")
        except (Unavailable, Refused) as err:
            if isinstance(err, Refused):
                LOG.error("a try cannot succeed as it is", lane=self._lane.value, code=err.code, text=err.text)
            return machine.failed(self._clock.boot_s(), sync.nonce)
        effects = machine.answered(self._clock.boot_s(), synced)
        # An answer to another try leaves this one without any.
        return effects if synced.nonce == sync.nonce else machine.failed(self._clock.boot_s(), sync.nonce)

    async def _take(self, machine: SiteMachine, exchange: Exchange) -> list[Effect]:
        synced = exchange.synced
        self._last_heard = self._clock.now()
        try:
            if exchange.epochs != self._epochs:
                await self._journal.remember_epochs(self._lane, *exchange.epochs)
                self._epochs = exchange.epochs
            await self._journal.acknowledged(self._lane, synced.ack_through, synced.safe_through, machine.journal)
            if machine.journal != self._journal.id:
                return []  # Opened anew meanwhile: this was about the old one, and the hub repeats what is open.
            fresh = await self._journal.take(synced.instructions)
        except IntertieError as err:
            return machine.not_stored(self._clock.boot_s(), f"{err.code}: {err.text}")
        if synced.settings is not None:
            await self._call(self._on_settings, synced.settings, synced.settings_revision)
        begins = [one for one in fresh if isinstance(one, Offer | Go)]
        for some in ([one for one in fresh if not isinstance(one, Offer | Go)], begins):
            if some:
                await self._call(self._on_instructions, some, exchange)
        await self._call(self._on_answer, exchange)
        return machine.stored()

    async def _raised(self, machine: SiteMachine, epoch: int) -> list[Effect]:
        assert self._on_raised is not None, "only a lane that tells what is held is told of it"
        try:
            await self._on_raised(epoch)
        except IntertieError as err:
            return machine.not_raised(self._clock.boot_s(), f"{err.code}: {err.text}")
        return machine.raised(self._clock.boot_s(), epoch)

    async def _call(self, listener: Callable[..., Awaitable[None]] | None, *args: object) -> None:
        """What the agent does with it is its own matter: a fault there must not stop the lane."""
        if listener is None:
            return
        try:
            await listener(*args)
        except Exception:
            LOG.exception("a listener of a lane failed", lane=self._lane.value)


async def listen_for_nudges(bus: Bus, lanes: Sequence[SiteLane]) -> Subscription:
    """Wake the lane that the hub asks an early sync of, all if it names none. Once per agent; it outlives reconnections."""

    async def on_nudge(message: Message) -> None:
        asked = [lane for lane in lanes if lane.lane.encode() == message.body]
        for lane in asked or lanes:
            lane.wake(Wake.NUDGE)

    return await bus.subscribe(LOCAL_NUDGE, on_nudge)
