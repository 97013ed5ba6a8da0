"""One attempt's course from the go to the delivered result: stage, start, see it end, tell it, bring its outputs home.

Every step may be the first one of a process that was just started again: it looks at what is there before it does anything. What has
happened is recorded however long the disk refuses; what has not happened is never said.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from intertie.agent.adapters.port import Presence
from intertie.agent.books import save, together
from intertie.agent.config import VERSION
from intertie.agent.core import attempts as life
from intertie.agent.core import logs, usage
from intertie.agent.core.images import image_of
from intertie.agent.core.leases import LEASE_OVER
from intertie.agent.core.model import OPEN, Attempt, EndedRecord, Failing, StartedRecord, State, with_state
from intertie.agent.queued import REASON, WORD, Waiting
from intertie.agent.search import without_values
from intertie.contracts.base import encode
from intertie.contracts.job import ResultRef
from intertie.contracts.link import Ended, EntryBase, Lane, ResultStored, SegmentClosed, Started
from intertie.contracts.usage import Segment
from intertie.errors import Refused, Unavailable
from intertie.ids import AttemptId
from intertie.link.journal import Build, NextSeq
from intertie.observe import log
from intertie.trust.seal import seal

if TYPE_CHECKING:
    from intertie.agent.site import Site

LOG = log.get("agent.course")

# Enough of the log's end for a line that says why; the whole of it is asked for by offset.
TAIL_BYTES = 2_000
# Between tries of a transfer: soon back when the hub returns, no burden while it is away for a week.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 60.0
# Between looks at whether `start_by` has passed, while others are waited for.
LOOK_S = 1.0


class Course:
    def __init__(self, site: Site, attempt: AttemptId) -> None:
        self.site, self.id = site, attempt
        self._parked = False
        self._waiting = Waiting(site, attempt, site.queue) if site.queue is not None else None

    @property
    def attempt(self) -> Attempt:
        return self.site.books.attempts[self.id]

    async def run(self) -> None:
        try:
            if self.attempt.state is State.STAGING:
                await self._stage_and_start()
            if self.attempt.state is State.RUNNING:
                await self._follow()
        finally:
            if self._waiting is not None:
                await self._waiting.rest()
        await self._deliver()

    # --- until it runs ---

    async def _stage_and_start(self) -> None:
        try:
            if await self.site.adapter.presence(self.id) is not Presence.BEGUN:
                await self._stage()
            if self._parked or self.attempt.state is not State.STAGING:
                return  # A stop came meanwhile, and made sure that nothing can start.
            begun = await self._begin()
        except (Refused, Unavailable) as err:
            await self._not_started(Failing(code=err.code.removeprefix("agent."), text=err.text, fault=True))
            return
        if self.attempt.state is not State.STAGING:
            return
        if isinstance(begun, life.Exit):
            await self._not_started(_unstarted(begun, self.attempt))
            return
        await self._started(begun)

    async def _begin(self) -> StartedRecord | life.Exit:
        """Start it here, or wait for it to begin in the site's own queue."""
        if self._waiting is not None:
            if (over := await self._waiting.enqueue()) is not None:
                return over
            self._waiting.listen()
        return await self.site.adapter.start(self.attempt)

    async def _stage(self) -> None:
        """Fetch and unpack the work, and wait for what must be gone first; the time for it ends by `start_by`."""
        if late := self._why_not():
            await self._not_started(late)
            return
        pack = await self._fetch()
        if self.attempt.state is not State.STAGING:
            return
        await self.site.adapter.prepare(self.attempt, pack)
        if pack is not None:
            pack.unlink(missing_ok=True)
        await self._until_alone()
        if self.attempt.state is State.STAGING and (late := self._why_not()):
            await self._not_started(late)
        if self.attempt.state is State.STAGING and self.attempt.lease_s > 0 and not await self.site.leases.begin(self.attempt):
            await self._not_started(LEASE_OVER)

    def _why_not(self) -> Failing | None:
        """Asked before anything of it is begun, and again just before the start."""
        return life.of_other_journal(self.attempt, self.site.journal.id) or life.still_in_time(self.attempt, self.site.moment())

    async def _until_alone(self) -> None:
        """Return when those that it comes after are gone and every device is its own, and this session of the site rules; or when it is over."""
        while self.attempt.state is State.STAGING and (others := self._others()):
            if late := life.still_in_time(self.attempt, self.site.moment()):
                text = f"{late.text}; it waited for {', '.join(others)}"
                await self._not_started(Failing(code=late.code, text=text[:1000]))
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self.site.freed.wait()

    def _others(self) -> list[str]:
        """Who or what must be gone before it may start."""
        attempt, books = self.attempt, self.site.books
        holders = {books.holds.holder.get((attempt.pool, device)) for device in attempt.devices} - {attempt.id}
        before = {name for name in attempt.after if (other := books.attempts.get(name)) is not None and other.state in OPEN}
        ruled = [] if attempt.local is not None or self.site.may_start() else ["another session of this site"]
        return sorted({str(name) for name in holders | before}) + ruled

    async def _fetch(self) -> Path | None:
        work = self.attempt.spec.work
        if work is None:
            return None
        target = self.site.packs / self.id
        pause_s = FIRST_PAUSE_S
        while self.attempt.state is State.STAGING:
            try:
                await self.site.transfer.fetch(work, target)
                return target
            except Unavailable as err:
                if late := life.still_in_time(self.attempt, self.site.moment()):
                    await self._not_started(Failing(code=late.code, text=f"{late.text}; the work could not be fetched: {err.text}"[:1000]))
                    return None
                await asyncio.sleep(pause_s)
                pause_s = min(5.0, pause_s * 1.5)
        return None

    async def _not_started(self, why: Failing) -> None:
        """Only if nothing of it exists or ever will."""
        if not self.site.may_vouch(self.attempt):
            LOG.warning("it may have begun where this folder lay before: nothing is said of it", attempt=self.id, code=why.code)
            self._parked = True
            return
        while self.attempt.state is State.STAGING and not await self._fenced():
            try:
                begun = await self.site.adapter.start(self.attempt)
            except Unavailable as err:
                LOG.warning("a start is slow", attempt=self.id, text=err.text)
                await asyncio.sleep(LAST_PAUSE_S)
                continue
            if isinstance(begun, StartedRecord) and self.attempt.state is State.STAGING:
                await self._started(begun)
            break
        if self.attempt.state is State.STAGING:
            await self.site.give_up(self.attempt, why)

    async def _fenced(self) -> bool:
        """Whether it can surely never start, asked until the disk lets us know."""
        while True:
            try:
                return await self.site.adapter.fence(self.id)
            except Unavailable as err:
                LOG.warning("a fence waits for the disk", attempt=self.id, text=err.text)
                await asyncio.sleep(LAST_PAUSE_S)

    async def _started(self, begun: StartedRecord) -> None:
        async with self._waiting.writing if self._waiting is not None else contextlib.nullcontext():
            await self._tell_start(begun)

    async def _tell_start(self, begun: StartedRecord) -> None:
        offset_s, error_s = self.site.offset()
        record = msgspec.structs.replace(begun, offset_s=offset_s, error_s=error_s)
        attempt = with_state(self.attempt, life.move(self.attempt, life.Event.START), started=record)
        self.site.put(attempt)
        seen = self.site.seen.get(self.attempt.pool)

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            if attempt.local is not None:
                return {}
            entry = Started(
                **self.site.entry_of(attempt, following[Lane.SCHEDULER]),
                started=usage.utc_of(record.utc_ns),
                devices=list(attempt.devices),
                native_id=record.native_id,
                account=attempt.account,
                nodes=list(record.nodes),
                held_devices=list(record.held_devices),
                clock_offset_s=offset_s,
                clock_error_s=error_s,
                driver=seen.driver if seen is not None else "",
                agent_version=VERSION,
                image=image_of(attempt, self.site.rules.owners_image(attempt.account)),
            )
            return {Lane.SCHEDULER: [entry]}

        await self.site.record(entries, save(attempt))
        LOG.info("started", attempt=self.id, native=record.native_id)

    # --- until it is gone ---

    async def _follow(self) -> None:
        attempt = self.attempt
        if self._waiting is not None:
            self._waiting.listen()
        if attempt.stop is not None:
            await self.site.adapter.stop(self.id, attempt.stop.grace_s)  # The agent may have died between saying so and doing it.
        end = await self.site.adapter.ended(attempt)
        if self._waiting is not None:
            await self._waiting.rest()
        if not end.certain and not self.site.may_vouch(attempt):
            LOG.warning("its end may lie where this folder lay before: nothing is said of it", attempt=self.id)
            return
        packing_from = self.site.clock.boot_s()
        packed, trouble = await self._pack()
        packing_us = int((self.site.clock.boot_s() - packing_from) * 1e6) if self.attempt.spec.outputs else 0
        await self._ended(end, packed, trouble, packing_us)

    async def _pack(self) -> tuple[ResultRef | None, str]:
        while True:
            try:
                return await self.site.adapter.pack(self.attempt), ""
            except Refused as err:
                return None, err.text
            except Unavailable as err:
                LOG.warning("outputs cannot be packed now", attempt=self.id, code=err.code, text=err.text)
                await asyncio.sleep(LAST_PAUSE_S)

    async def _ended(self, end: life.Exit, result: ResultRef | None, trouble: str, packing_us: int) -> None:
        """The end, its segments and its counts: one fact, one transaction."""
        site = self.site
        await site.borders.rest(self.id)
        attempt, cut = self.attempt, site.borders.cut_of(self.id)
        assert attempt.started is not None
        if cut is not None and end.ran_us < cut.told_us:
            # A reboot's last sign of life may be seconds before a border that it was seen to pass.
            end = dataclasses.replace(end, ran_us=cut.told_us)
        judged = life.verdict(end, attempt)
        reason = f"{judged.reason}; outputs: {trouble}"[:2_000] if trouble else judged.reason[:2_000]
        ended_at = usage.utc_of(attempt.started.utc_ns) + timedelta(microseconds=end.ran_us)
        record = EndedRecord(
            outcome=judged.outcome,
            cause=judged.cause,
            exit_code=end.code,
            signal=end.signal,
            reason=reason,
            ended=ended_at,
            ran_us=end.ran_us,
            result=result,
            islanded=site.islanded(),
        )
        over = with_state(self.attempt, life.move(attempt, life.Event.END), ended=record, env={}, offer=without_values(self.attempt.offer))
        if attempt.local is not None:
            site.books.attempts[self.id] = over
            await site.record(lambda _: {}, together(save(over), site.use.ended(self.id)))
            site.put(over)
            site.use.forget(self.id)
        else:
            tail, total = await self._tail()
            # Over for whoever asks from now on; its devices are free only when that is on disk.
            site.books.attempts[self.id] = over
            segments, entries = self._ending(over, end, packing_us, tail, total)
            await site.record(entries, together(save(over), site.borders.ended(self.id, segments), site.use.ended(self.id)))
            site.put(over)
            site.listed.discard(self.id)
            site.borders.forget(self.id)
            site.use.forget(self.id)
        LOG.info("ended", attempt=self.id, outcome=judged.outcome, ran_us=end.ran_us)
        site.owner.devices_freed()

    async def _tail(self) -> tuple[str, int]:
        """Its log's end, for a line that says why; an end is told without it where it cannot be read now."""
        try:
            return await self._read_tail()
        except Unavailable as err:
            LOG.warning("an end is told without its log", attempt=self.id, code=err.code, text=err.text)
            return "", 0

    async def _read_tail(self) -> tuple[str, int]:
        total = (await self.site.adapter.log(self.id, 0, 0)).total
        start = max(0, total - TAIL_BYTES)
        before = min(logs.LOOK_BACK, start)
        chunk = await self.site.adapter.log(self.id, start - before, TAIL_BYTES + before)
        return logs.cut(chunk.data, before, start, complete=True).text, total

    def _ending(self, attempt: Attempt, end: life.Exit, packing_us: int, tail: str, log_bytes: int) -> tuple[Sequence[Segment], Build]:
        """Its last segments (the first, if it passed no border), and the entries that tell them and the end."""
        site, cut = self.site, self.site.borders.cut_of(attempt.id)
        assert attempt.started is not None and attempt.ended is not None
        suspended = usage.suspended(attempt, end.ran_us, end.suspended_us, cut.told_us if cut is not None else 0)
        parts = usage.spans_to_end(
            staged_us=usage.staged_us(attempt, site.boot),
            ran_us=end.ran_us,
            packing_us=packing_us,
            borders_us=site.borders.inside(attempt, end.ran_us + packing_us),
            cut=cut,
            queued_us=usage.queued_us(attempt, site.boot),
            suspended=suspended,
        )
        told = usage.counts(attempt, parts, cut)
        after = cut.segments if cut is not None else 0
        measured = usage.segments(attempt, site.joined.site, parts, after=after, islanded=site.islanded())
        sealed = [seal(site.key, encode(segment), site.key.public) for segment in measured]
        ended, started = attempt.ended, usage.utc_of(attempt.started.utc_ns)

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            first = following[Lane.METERING]
            common = site.entry_of(attempt, following[Lane.SCHEDULER])
            segments = [
                SegmentClosed(seq=first + n, at=site.clock.now(), islanded=site.islanded(), sealed=one) for n, one in enumerate(sealed)
            ]
            last = Ended(
                **common,
                outcome=ended.outcome,
                cause=ended.cause,
                exit_code=ended.exit_code,
                signal=ended.signal,
                reason=ended.reason,
                started=started,
                ended=ended.ended,
                ran_us=ended.ran_us,
                segments=told.segments,
                quantity_milli_us=told.quantity_milli_us,
                last_metering_seq=first + len(segments) - 1,
                result=ended.result,
                log_bytes=log_bytes,
                log_tail=tail,
                cpu_user_s=end.user_s,
                cpu_system_s=end.system_s,
                max_rss_kib=end.max_rss_kib,
                native_state=end.native_state[:WORD],
                native_reason=end.native_reason[:REASON],
                suspended_us=sum(end_us - start_us for start_us, end_us in suspended),
                device_use=site.use.told(attempt, ended.ran_us),
            )
            return {Lane.METERING: segments, Lane.SCHEDULER: [last]}

        return measured, entries

    # --- its outputs ---

    async def _deliver(self) -> None:
        """Upload for ever, whatever is away; told once it is at the gateway, or once it never can be."""
        ended = self.attempt.ended
        if ended is None or ended.result is None or ended.result_stored or self.attempt.local is not None:
            return
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self.site.transfer.store(ended.result, self.site.adapter.result(self.id))
                stored, text = ended.result, ""
                break
            except Unavailable as err:
                LOG.info("a result waits for the gateway", attempt=self.id, code=err.code, text=err.text)
                await asyncio.sleep(pause_s)
                pause_s = min(LAST_PAUSE_S, pause_s * 2)
            except Refused as err:
                stored, text = None, err.text[:1_000]
                break
        attempt = with_state(self.attempt, State.ENDED, ended=msgspec.structs.replace(ended, result_stored=True))

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            entry = ResultStored(**self.site.entry_of(attempt, following[Lane.SCHEDULER]), result=stored, text=text)
            return {Lane.SCHEDULER: [entry]}

        await self.site.record(entries, save(attempt))
        self.site.put(attempt)
        with contextlib.suppress(OSError):
            self.site.adapter.result(self.id).unlink(missing_ok=True)


def _unstarted(end: life.Exit, attempt: Attempt) -> Failing:
    """What ran nothing, as the hub is told of it: that it was too late is nobody's fault, nor the site's that a job's own image cannot be fetched."""
    if end.refused_errno == errno.ETIME:
        return Failing(code="start_too_late", text=end.refused_text[:1000])
    if end.refused_errno == errno.ECANCELED:
        return Failing(code="cancelled_at_site", text=end.refused_text[:1000])
    if end.refused_errno == errno.ENOPKG and attempt.spec.image:
        return Failing(code="image_unfetched", text=f"{attempt.spec.image}: {end.refused_text}"[:1000])
    return Failing(code="not_startable", text=f"{end.refused_file}: {end.refused_text}"[:1000], fault=True)
