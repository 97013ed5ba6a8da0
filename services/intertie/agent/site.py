"""The site's desk: takes instructions and local wishes, asks the core, writes the journal, and sets attempts on their course.

Everything here works with the hub, the bus and the network gone; what it has to say lies in the journal until a lane carries it. Decisions are
made on `Books` in memory, synchronously, and reach the disk before anybody is told. `intertie.agent.course` drives one attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from intertie.agent.adapters.port import Adapter, NativeQueue
from intertie.agent.books import bury, get_setting, load, prune, put_setting, save, see, settle, together
from intertie.agent.borders import Borders
from intertie.agent.core import attempts as life
from intertie.agent.core.devices import Pool, inventory
from intertie.agent.core.model import OPEN, Attempt, EndedRecord, Failing, Moment, State, StopAsked, with_state
from intertie.agent.core.offers import Books, NotTaken, Repeated, Taken, Terms, judge
from intertie.agent.core.place import facts_of
from intertie.agent.core.requests import veiled, veiled_pools
from intertie.agent.core.rules import Rules
from intertie.agent.course import Course
from intertie.agent.displace import displace
from intertie.agent.grants import Grants
from intertie.agent.journal import Also, Cursor, SqliteJournal, handled
from intertie.agent.leases import Leases
from intertie.agent.owner import Owner
from intertie.agent.pause import Pause
from intertie.agent.requests import Requests
from intertie.agent.room import Room
from intertie.agent.search import rebuild, search, without_values
from intertie.agent.transfer import Transfer
from intertie.agent.use import DeviceUses
from intertie.clock import Clock, kernel_boot
from intertie.contracts.base import decode, encode
from intertie.contracts.identity import Joined
from intertie.contracts.link import (
    AttemptEntry,
    Claimed,
    EntryBase,
    Go,
    HeldAttempt,
    Instruction,
    Inventory,
    Lane,
    NotStarted,
    Offer,
    OfferBody,
    OfferRefused,
    ProfileDeclared,
    Sealed,
    SettingsApplied,
    Settle,
    SiteSettings,
    Staging,
    Stop,
    StopAnswered,
    Withdraw,
)
from intertie.contracts.observed import PoolSeen
from intertie.contracts.site import AccessMode, DeviceKind, DeviceState, NativeLoad, PoolInventory
from intertie.errors import Refused, Unavailable
from intertie.ids import AttemptId, DeviceId, InstructionId, JobId, PoolName
from intertie.link.journal import Build, NextSeq
from intertie.observe import log
from intertie.trust.keys import Key
from intertie.trust.seal import open_seal

LOG = log.get("agent.site")

FASTEST_BEAT_S, SLOWEST_BEAT_S = 0.01, 300.0


class Site:
    """One site's work. Make it, `await recover()`, then hand it instructions and local wishes."""

    def __init__(
        self,
        *,
        joined: Joined,
        key: Key,
        journal: SqliteJournal,
        adapter: Adapter,
        clock: Clock,
        transfer: Transfer,
        pools: Sequence[Pool],
        packs: Path,
        boot: str | None = None,
        rules: Rules | None = None,
    ) -> None:
        """`packs`: a private folder for work on its way in. `rules`: the owner's own."""
        self.joined, self.key = joined, key
        self.queue: NativeQueue | None = adapter if isinstance(adapter, NativeQueue) else None
        """A queue of the site's own, if its work goes through one."""
        self.native: Mapping[PoolName, NativeLoad] = {}
        """What its scheduler runs and queues of others."""
        self.partitions: Sequence[str] = ()
        """As a Slurm tells them."""
        self.keeper_version: Callable[[], int] = lambda: 1
        """The link version that the scheduler spoke last: what it does not know is not said to it."""
        self.journal, self.adapter, self.clock, self.transfer = journal, adapter, clock, transfer
        self.pools: dict[PoolName, Pool] = {pool.name: pool for pool in pools}
        self.packs = packs
        self.rules = rules or Rules()
        self.boot = boot or kernel_boot()
        self.books = Books()
        self.settings = SiteSettings(revision=0, site=joined.site)
        self.listed: set[AttemptId] = set()
        """Hub attempts that may hold devices: added before the claim is journalled, removed after the end is."""
        self.islanded: Callable[[], bool] = lambda: True
        began = clock.now()
        self.islanded_since: Callable[[], datetime | None] = lambda: began if self.islanded() else None
        self.offset: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        """Estimate of hub minus site wall clock, and its error; seconds."""
        self.wake: Callable[[Collection[Lane]], None] = lambda lanes: None
        """Called after entries of these lanes reached the disk."""
        self.same_place = True
        """False after this folder was copied or moved: what was claimed under the journal before may have begun where it lay then."""
        self.may_start: Callable[[], bool] = lambda: True
        """False while another session of this site rules: the hub's work then starts nowhere here."""
        self.reopening = asyncio.Lock()
        """Held while a new journal is opened in place of this one."""
        self.freed = asyncio.Event()
        """Set when devices change hands, and a new one each time."""
        self.seen: Mapping[PoolName, PoolSeen] = {}
        """What the site's tools say that its pools have; of pools in which the owner alone decides, nothing."""
        self.turned_away: Callable[[OfferBody], None] = lambda body: None
        """Called when an offer was refused."""
        self._courses: dict[AttemptId, asyncio.Task[None]] = {}
        self._unanswered: set[InstructionId] = set()
        self._told: list[PoolInventory] | None = None
        self.owner = Owner(self)
        self.leases = Leases(self)
        self.room = Room(self)
        self.borders, self.pause, self.grants = Borders(self), Pause(self), Grants(self)
        self.requests = Requests(self)
        self.use = DeviceUses(self)

    # --- life ---

    async def recover(self) -> None:
        """From disk alone, before any network: running work is adopted, what cannot start any more is given up."""
        self.books = await self.journal.read(load)
        await self.journal.drop_unhandled()
        stored = await self.journal.read(lambda cursor: get_setting(cursor, "settings"))
        if stored:
            self.settings = decode(stored, SiteSettings, what="stored settings")
        await rebuild(self)
        await self.borders.recover()
        await self.pause.recover()
        await self.grants.recover()
        await self.requests.recover()
        await self.use.recover()
        for attempt in list(self.books.attempts.values()):
            if attempt.local is None and attempt.state in OPEN:
                self.listed.add(attempt.id)
            if attempt.state in (State.STAGING, State.RUNNING) or _owes_result(attempt):
                self.set_out(attempt.id)
        LOG.info("recovered", open=len(self.books.holds.holder), adopted=len(self._courses))

    async def close(self) -> None:
        """Let go of every course; the work itself goes on under its supervisors."""
        tasks = [*self._courses.values(), *self.owner.tasks()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.use.keep()

    async def idle(self) -> None:
        """Return when no course is under way (tests, drains)."""
        while self._courses:
            await asyncio.wait(list(self._courses.values()))

    def moment(self) -> Moment:
        return Moment(self.clock.now(), self.clock.boot_s(), self.boot)

    def running(self) -> Sequence[AttemptId]:
        """Hub attempts that may hold devices, for the lane; local work is never named to the hub."""
        return sorted(self.listed)

    def terms(self) -> Terms:
        return Terms(
            site=self.joined.site,
            pools=self.pools,
            owner_tenant=self.joined.owner_tenant,
            single_user=self.adapter.single_user,
            mappings=frozenset((one.tenant, one.account) for one in self.settings.mappings),
            cordoned=frozenset(self.settings.cordoned_pools),
            may_run_as=self.adapter.may_run_as,
            owner_first=self.rules.owner_first,
            offerings=self.requests.offerings(),
            paused=self.pause.on,
            closed=self.room.why,
            self_stop=self.adapter.self_stop,
            images=self.rules.pool_images(),
        )

    def put(self, attempt: Attempt) -> None:
        """The books in memory; holders follow the state."""
        self.books.attempts[attempt.id] = attempt
        if attempt.state in OPEN:
            if not attempt.over:
                self.books.holds.take(attempt)
        else:
            self.books.holds.release(attempt)
            self.freed.set()
            self.freed = asyncio.Event()

    def shown_pools(self) -> list[Pool]:
        """Pools whose devices the hub sees: not those in which the owner alone decides."""
        return [pool for pool in self.pools.values() if pool.profile.mode is not AccessMode.SERVICE]

    def may_vouch(self, attempt: Attempt) -> bool:
        """Whether what is found here is all that there is of it: the place of its claim is this one. Until its journal was opened anew, a folder that
        was copied or moved holds nothing that was claimed here."""
        return self.same_place or (self.journal.pending is None and life.of_other_journal(attempt, self.journal.id) is None)

    async def search(self, ended_since: datetime | None = None) -> list[HeldAttempt]:
        """Every attempt of the hub's that this site knows of and that is not settled (or ended since then), after its job folders were searched."""
        return await search(self, ended_since)

    async def displace_for(self, kind: DeviceKind, count: int) -> list[DeviceId]:
        """Claims that have not started make room for the owner's own work, if the owner's rule says so; devices that they gave back."""
        return await displace(self, kind, count)

    def set_out(self, attempt: AttemptId) -> None:
        """One course per attempt, at most."""
        if attempt in self._courses:
            return
        task = asyncio.create_task(Course(self, attempt).run(), name=f"course-{attempt}")
        self._courses[attempt] = task
        task.add_done_callback(lambda done: self._over(attempt, done))

    def _over(self, attempt: AttemptId, task: asyncio.Task[None]) -> None:
        self._courses.pop(attempt, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("a course broke", attempt=attempt, exc_info=error)

    # --- entries ---

    async def append(self, entries: Build, also: Also | None = None) -> None:
        """Journal one fact and wake the lanes that have something to carry."""
        lanes: set[Lane] = set()

        def build(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            built = {lane: [veiled(one, self._about_whom(one)) for one in some] for lane, some in entries(following).items()}
            lanes.update(lane for lane, some in built.items() if some)
            return built

        await self.journal.append(build, also)
        if lanes:
            self.wake(lanes)

    def _about_whom(self, entry: EntryBase) -> Attempt | None:
        return self.books.attempts.get(entry.attempt) if isinstance(entry, AttemptEntry) else None

    async def record(self, entries: Build, also: Also) -> None:
        """Journal a fact that has happened: a full disk delays it, nothing drops it."""
        pause_s = 0.2
        while True:
            try:
                await self.append(entries, also)
            except Unavailable as err:
                LOG.error("a fact waits for the disk", code=err.code, text=err.text)
                await asyncio.sleep(pause_s)
                pause_s = min(10.0, pause_s * 2)
            else:
                return

    def entry_of(self, attempt: Attempt, seq: int) -> dict[str, Any]:
        """The common fields of an `AttemptEntry`."""
        return self._about(seq, attempt.id, attempt.job, attempt.epoch, attempt.generation)

    def _about(self, seq: int, attempt: AttemptId, job: JobId, epoch: int, generation: int) -> dict[str, Any]:
        at, islanded = self.clock.now(), self.islanded()
        return {"seq": seq, "at": at, "islanded": islanded, "attempt": attempt, "job": job, "epoch": epoch, "generation": generation}

    # --- instructions ---

    async def take(self, instructions: Sequence[Instruction], *, sent_boot_s: float, acknowledged: int) -> None:
        """Act on new instructions, those of one attempt in their order. What cannot be recorded now is forgotten, and the hub repeats it."""
        by_attempt: dict[AttemptId, list[Instruction]] = {}
        for one in instructions:
            if isinstance(one, Stop | Withdraw):
                self.leases.end(one.attempt)
            by_attempt.setdefault(one.attempt, []).append(one)

        async def those_of(ordered: Sequence[Instruction]) -> None:
            for one in ordered:
                try:
                    await self._act(one, sent_boot_s, acknowledged)
                except Unavailable as err:
                    self._unanswered.add(one.id)
                    LOG.warning("an instruction waits for its repeat", instruction=one.id, code=err.code, text=err.text)
                except Exception:
                    # A fault of ours in one instruction must not cost the others, nor this one its repeat.
                    self._unanswered.add(one.id)
                    LOG.exception("an instruction could not be acted on", instruction=one.id)

        await asyncio.gather(*(those_of(ordered) for ordered in by_attempt.values()))

    async def answered(self, lease_s: float, sent_boot_s: float) -> None:
        """An answer of the scheduler was taken and all of its instructions were acted on: leased work may run on for so long."""
        await self.leases.renew(lease_s, sent_boot_s)

    async def _act(self, one: Instruction, sent_boot_s: float, acknowledged: int) -> None:
        known = self.books.attempts.get(one.attempt)
        if known is not None and known.local is not None:
            # The owner's own work is nothing of the hub's, and is not named to it: not even by another answer than a stranger's would be.
            LOG.error("the hub speaks of the owner's own work", instruction=one.id, kind=type(one).__name__)
            if isinstance(one, Stop):
                await self._answer(one, None, "unknown_attempt", handled(one.id))
            else:
                await self.journal.write(handled(one.id))
            return
        match one:
            case Offer():
                await self._offer(one, sent_boot_s)
            case Go():
                await self._go(one, acknowledged, sent_boot_s)
            case Withdraw():
                await self._stop(one, StopAsked(reason="the hub withdrew the offer", grace_s=0, by="hub"))
            case Stop():
                await self._stop(one, StopAsked(reason=one.reason, grace_s=one.grace_s, by="hub", cause=one.cause))
            case Settle():
                await self._settle(one)

    async def _offer(self, offer: Offer, sent_boot_s: float) -> None:
        body = await self._opened(offer)
        if body is None:
            return
        if body.offering:
            await self.requests.take(offer, body)
            return
        answer = judge(body, self.terms(), self.books, sent_boot_s=sent_boot_s, kernel_boot=self.boot)
        match answer:
            case Repeated():
                await self.journal.write(handled(offer.id))
            case NotTaken(why):
                await self.refuse(offer, body, why)
            case Taken(attempt):
                await self.claim(offer, with_state(attempt, attempt.state, offer=self.kept(offer, body)))

    async def _opened(self, offer: Offer) -> OfferBody | None:
        """The body, if the scheduler sealed it for this attempt; refused with a fault otherwise."""
        try:
            body = open_seal(offer.sealed, self.joined.service_keys.get("scheduler", ""), OfferBody)
            if body.attempt != offer.attempt:
                raise Refused("seal.other", f"the seal is of {body.attempt}, the offer says {offer.attempt}")
        except Refused as err:
            why = Failing(code="seal", text=f"the offer's seal does not hold: {err.text}"[:500], fault=True)
            LOG.error("an offer was not sealed by the scheduler", attempt=offer.attempt, code=err.code)

            def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
                refused = OfferRefused(
                    **self._about(following[Lane.SCHEDULER], offer.attempt, JobId("unverified"), offer.epoch, 0),
                    code=why.code,
                    text=why.text,
                    fault=True,
                )
                return {Lane.SCHEDULER: [refused]}

            await self.append(entries, handled(offer.id))
            return None
        return body

    def kept(self, offer: Offer, body: OfferBody) -> Sealed | None:
        """The signed copy of an offer from which a hub that lost the job adopts it: never one with values of the environment."""
        if not body.env or offer.adoption is None:
            return without_values(offer.sealed)
        try:
            copy = open_seal(offer.adoption, self.joined.service_keys.get("scheduler", ""), OfferBody)
        except Refused:
            return None
        return offer.adoption if copy == msgspec.structs.replace(body, env={}) else None

    async def refuse(self, offer: Offer, body: OfferBody, why: Failing, also: Also | None = None) -> None:
        """Answer an offer with no, in one transaction with `also`."""

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            refused = OfferRefused(
                **self._about(following[Lane.SCHEDULER], body.attempt, body.job, body.epoch, body.generation),
                code=why.code,
                text=why.text,
                fault=why.fault,
            )
            return {Lane.SCHEDULER: [refused]}

        # A refused attempt never starts here: its tombstone gives a late repeat the same answer.
        answered = together(handled(offer.id), bury(body.attempt, self.clock.now().isoformat()))
        await self.append(entries, together(answered, also) if also is not None else answered)
        self.books.tombstones.add(body.attempt)
        self.turned_away(body)
        LOG.info("an offer is refused", attempt=body.attempt, code=why.code, text=why.text)

    async def claim(self, offer: Offer, attempt: Attempt) -> None:
        before = self.books.seen.get(attempt.job)
        self.listed.add(attempt.id)
        self.put(attempt)
        self.books.seen[attempt.job] = (attempt.epoch, attempt.generation)
        row: list[Attempt] = [attempt]

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            seq = following[Lane.SCHEDULER]
            row[0] = with_state(attempt, State.CLAIMED, claim_seq=seq, claim_journal=self.journal.id)
            return {Lane.SCHEDULER: [Claimed(**self.entry_of(attempt, seq), devices=list(attempt.devices))]}

        def also(cursor: Cursor) -> None:
            together(save(row[0]), see(attempt.job, attempt.epoch, attempt.generation), handled(offer.id))(cursor)

        try:
            await self.append(entries, also)
        except BaseException:
            # Nothing is on disk, so nothing was promised: the devices are free and the hub repeats the offer.
            self.books.holds.release(attempt)
            self.books.attempts.pop(attempt.id, None)
            self.listed.discard(attempt.id)
            if before is None:
                self.books.seen.pop(attempt.job, None)
            else:
                self.books.seen[attempt.job] = before
            raise
        if self.books.attempts[attempt.id].state is State.CLAIMED:
            self.put(row[0])

    async def _go(self, go: Go, acknowledged: int, sent_boot_s: float) -> None:
        attempt = self.books.attempts.get(go.attempt)
        if attempt is None and not self.same_place and go.journal not in (None, self.journal.id):
            # Claimed where this folder lay before, after it was copied: what became of it there is not ours to say.
            LOG.warning("a go of another place is not answered", attempt=go.attempt, journal=go.journal)
            await self.journal.write(handled(go.id))
            return
        if attempt is None:
            await self._never(go, Failing(code="unknown_attempt", text="a go for an attempt that this site never claimed"))
            return
        if attempt.state is State.CLAIMED and attempt.claim_seq > acknowledged:
            raise Unavailable("agent.claim_not_acknowledged", "a go came before the acknowledgement of its claim")
        match life.on_go(attempt, self.moment(), named=go.journal, ours=self.journal.id):
            case life.GiveUp(why) if self.may_vouch(attempt) and await self.adapter.fence(attempt.id):
                if self.books.attempts[attempt.id].state is State.CLAIMED:
                    await self.give_up(attempt, why, handled(go.id))
            case life.Ignore() | life.GiveUp():
                await self.journal.write(handled(go.id))
            case life.Proceed():
                await self._stage(go, attempt, sent_boot_s)

    async def _stage(self, go: Go, attempt: Attempt, sent_boot_s: float) -> None:
        staged = with_state(attempt, life.move(attempt, life.Event.GO), go_boot_s=self.clock.boot_s(), go_sent_boot_s=sent_boot_s)
        self.put(staged)

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            return {Lane.SCHEDULER: [Staging(**self.entry_of(staged, following[Lane.SCHEDULER]))]}

        try:
            await self.append(entries, together(save(staged), handled(go.id)))
        except BaseException:
            if self.books.attempts.get(attempt.id) == staged:
                self.put(attempt)
            raise
        if self.books.attempts[attempt.id].state is State.STAGING:
            self.set_out(attempt.id)

    async def _never(self, one: Go | Withdraw, why: Failing) -> None:
        """An attempt that this site does not know: it has no process here and never will."""
        epoch = one.epoch if one.attempt_epoch is None else one.attempt_epoch

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            entry = NotStarted(
                **self._about(following[Lane.SCHEDULER], one.attempt, one.job, epoch, one.generation), code=why.code, text=why.text
            )
            return {Lane.SCHEDULER: [entry]}

        self.books.tombstones.add(one.attempt)
        await self.append(entries, together(handled(one.id), bury(one.attempt, self.clock.now().isoformat())))

    async def give_up(self, attempt: Attempt, why: Failing, also: Also | None = None, answer: StopAnswered | None = None) -> None:
        """A claimed or staged attempt that will never start. The caller has made sure that no process of it exists or can."""
        local = attempt.local is not None
        ended = self.never_ran(why) if local else None
        over = with_state(attempt, life.move(attempt, life.Event.GIVE_UP), refusal=why, env={}, offer=None, ended=ended)
        # Over for whoever asks from now on; its devices are free only when that is on disk.
        self.books.attempts[attempt.id] = over

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            if local:
                return {}
            seq = following[Lane.SCHEDULER]
            told: list[AttemptEntry] = []
            if answer is not None:
                told.append(msgspec.structs.replace(answer, seq=seq))
                seq += 1
            told.append(NotStarted(**self.entry_of(attempt, seq), code=why.code, text=why.text))
            return {Lane.SCHEDULER: told}

        await self.record(entries, together(save(over), also) if also else save(over))
        self.put(over)
        self.listed.discard(attempt.id)
        self.owner.devices_freed()

    def never_ran(self, why: Failing) -> EndedRecord:
        outcome = "cancelled" if why.code == "stopped" else "failed"
        return EndedRecord(outcome=outcome, cause=None, exit_code=None, signal=None, reason=why.text, ended=self.clock.now(), ran_us=0)

    # --- stop ---

    async def _stop(self, one: Stop | Withdraw, asked: StopAsked) -> None:
        attempt = self.books.attempts.get(one.attempt)
        found = life.on_stop(attempt, asked)
        if isinstance(one, Withdraw):
            await self._withdraw(one, attempt, found)
            return
        match found:
            case life.Bury():
                self.books.tombstones.add(one.attempt)
                also = together(handled(one.id), bury(one.attempt, self.clock.now().isoformat()))
                if self.same_place:
                    await self._answer(one, None, "unknown_attempt", also)
                else:
                    # It may run where this folder lay before: nobody looked there.
                    await self.journal.write(also)
            case life.AlreadyOver(answer):
                await self._answer(one, attempt, answer, handled(one.id))
            case life.GiveUp(why):
                assert attempt is not None
                if await self.adapter.fence(attempt.id):
                    await self.give_up(attempt, why, handled(one.id), self._answered(one, attempt, "not_started"))
                else:
                    await self._halt(one, attempt, asked)
            case life.Halt():
                assert attempt is not None
                await self._halt(one, attempt, asked)

    async def _halt(self, one: Stop, attempt: Attempt, asked: StopAsked) -> None:
        attempt = self.books.attempts[attempt.id]
        if attempt.state not in OPEN:
            await self._answer(one, attempt, "already_ended", handled(one.id))
            return
        # Its end is laid to the first who asked for it.
        stopping = with_state(attempt, attempt.state, stop=attempt.stop or asked)
        self.put(stopping)
        await self._answer(one, stopping, "stopping", together(save(stopping), handled(one.id)))
        await self.adapter.stop(attempt.id, asked.grace_s)

    async def _withdraw(self, one: Withdraw, attempt: Attempt | None, found: object) -> None:
        match found:
            case life.Bury():
                await self._never(one, Failing(code="withdrawn", text="withdrawn before this site knew of it"))
            case life.GiveUp() if attempt is not None and await self.adapter.fence(attempt.id):
                await self.give_up(attempt, Failing(code="withdrawn", text="the hub withdrew the offer"), handled(one.id))
            case _:
                # Too late: `Started` or `Ended` is the answer, and on its way.
                await self.journal.write(handled(one.id))

    def _answered(self, one: Stop, attempt: Attempt | None, answer: str) -> StopAnswered:
        """Numbered when it is journalled."""
        return StopAnswered(
            seq=1,
            at=self.clock.now(),
            islanded=self.islanded(),
            attempt=one.attempt,
            job=one.job,
            epoch=attempt.epoch if attempt else one.epoch,
            generation=attempt.generation if attempt else one.generation,
            answer=answer,
            instruction=one.id,
        )

    async def _answer(self, one: Stop, attempt: Attempt | None, answer: str, also: Also) -> None:
        told = self._answered(one, attempt, answer)
        await self.append(lambda following: {Lane.SCHEDULER: [msgspec.structs.replace(told, seq=following[Lane.SCHEDULER])]}, also)

    async def _settle(self, one: Settle) -> None:
        """The hub holds all of it: the work may go. Its log stays readable until it is the oldest of many."""
        attempt = self.books.attempts.get(one.attempt)
        if attempt is None or attempt.state not in OPEN:
            await self.journal.write(together(handled(one.id), settle(one.attempt)))
            if attempt is not None and one.attempt not in self._courses:
                await self.adapter.trim(one.attempt)
            await self.prune()

    async def prune(self) -> None:
        """Forget what is beyond the kept history, folders too."""
        for old in await self.journal.write(prune):
            self.books.attempts.pop(old, None)
            await self.adapter.forget(old)

    # --- settings, inventory ---

    async def apply(self, sealed: Sealed, revision: int) -> None:
        """Settings on the scheduler lane; only a higher revision that the scheduler sealed for this site counts."""
        if revision <= self.settings.revision:
            return
        found = open_seal(sealed, self.joined.service_keys.get("scheduler", ""), SiteSettings)
        if found.site != self.joined.site or found.revision != revision:
            raise Refused("agent.settings", f"these settings are of {found.site} revision {found.revision}")
        found = paced(found)

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            entry = SettingsApplied(seq=following[Lane.SCHEDULER], at=self.clock.now(), islanded=self.islanded(), revision=revision)
            return {Lane.SCHEDULER: [entry]}

        await self.append(entries, put_setting("settings", encode(found).decode("utf-8")))
        self.settings = found

    async def observe(self, seen: Mapping[DeviceId, DeviceState], pools: Sequence[Pool] | None = None) -> None:
        """What telemetry sees of the devices now; a change of the whole is journalled for the registry."""
        self.books.observed = dict(seen)
        if pools is not None:
            self.pools = {pool.name: pool for pool in pools}
        now = inventory(
            self.pools.values(),
            self.books.attempts,
            self.books.holds,
            self.books.observed,
            paused=self.pause.on,
            until=self.pause.until,
            facts=facts_of(self.rules.tells, self.partitions),
            notes=self.books.notes,
        )
        now = [msgspec.structs.replace(one, native=self.native.get(one.pool)) for one in now]
        now = veiled_pools(now, {name: pool.profile for name, pool in self.pools.items()}, self.books.attempts.values())
        images = self.rules.pool_images()
        now = [msgspec.structs.replace(one, seen=self.seen.get(one.pool), images=images) for one in now]
        if now != self._told:

            def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
                return {Lane.REGISTRY: [Inventory(seq=following[Lane.REGISTRY], at=self.clock.now(), islanded=self.islanded(), pools=now)]}

            await self.append(entries)
            self._told = now
        self.owner.devices_freed()

    async def declare(self) -> None:
        """Tell the registry what the owner declared, if it is not what was told last (the join itself tells the first)."""
        told = encode([pool.profile for pool in self.pools.values()]).decode("utf-8")
        last = await self.journal.read(lambda cursor: get_setting(cursor, "declared"))
        if last == told:
            return
        profiles = [] if last is None else [pool.profile for pool in self.pools.values()]

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            first = following[Lane.REGISTRY]
            at, islanded = self.clock.now(), self.islanded()
            return {
                Lane.REGISTRY: [
                    ProfileDeclared(seq=first + n, at=at, islanded=islanded, profile=profile) for n, profile in enumerate(profiles)
                ]
            }

        await self.append(entries, put_setting("declared", told))

    async def tick(self) -> None:
        """Each second: claims whose go can come in time no more are given up; instructions that found a full disk are made new again."""
        await self.room.look()
        now = self.moment()
        for attempt in list(self.books.attempts.values()):
            if attempt.state is not State.CLAIMED or not self.may_vouch(attempt):
                continue
            why = life.of_other_journal(attempt, self.journal.id) or life.before_reboot(attempt, now)
            if why is None and now.boot_s - attempt.offer_sent_boot_s > attempt.start_within_s:
                why = Failing(code="go_too_late", text=f"no go within {attempt.start_within_s} s of the sync that brought the offer")
            if why is not None and await self.adapter.fence(attempt.id) and self.books.attempts[attempt.id].state is State.CLAIMED:
                await self.give_up(attempt, why)
        for instruction in list(self._unanswered):
            await self.journal.drop_unhandled(instruction)
            self._unanswered.discard(instruction)
        await self.requests.tick()
        await self.pause.tick()
        await self.borders.tick()


def paced(found: SiteSettings) -> SiteSettings:
    """The settings with beats that a site can live by, whatever the hub says: never so fast that it does nothing else, nor so slow that it is gone."""
    telemetry_s, lane_s = (min(max(beat_s, FASTEST_BEAT_S), SLOWEST_BEAT_S) for beat_s in (found.telemetry_beat_s, found.lane_beat_s))
    return msgspec.structs.replace(found, telemetry_beat_s=telemetry_s, lane_beat_s=lane_s)


def _owes_result(attempt: Attempt) -> bool:
    """Ended with outputs that the gateway does not have yet."""
    return attempt.local is None and attempt.ended is not None and attempt.ended.result is not None and not attempt.ended.result_stored
