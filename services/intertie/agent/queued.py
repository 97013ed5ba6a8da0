"""An attempt in a queue of the site's own: that it waits there, what the site's scheduler says of it, and when it was suspended.

These words stand beside our own state and decide nothing but suspension. They are told only to a keeper that knows them (link version 3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from intertie.agent.adapters.port import NativeQueue, NativeWords, Queued
from intertie.agent.books import save
from intertie.agent.core import attempts as life
from intertie.agent.core.model import Attempt, QueuedRecord, State, Suspension, with_state
from intertie.contracts.link import EntryBase, Lane, NativeSeen, SiteQueued
from intertie.errors import IntertieError
from intertie.ids import AttemptId
from intertie.link.journal import NextSeq
from intertie.observe import log

if TYPE_CHECKING:
    from intertie.agent.site import Site

LOG = log.get("agent.queued")

NATIVE_WORDS = 3
"""The link version from which a keeper understands what a site's own scheduler says."""
# Names and reasons as entries carry them.
WORD, REASON = 256, 1_000
# A full disk may hold up a word for ever; an agent that is told to go does not wait for that.
REST_S = 5.0
# Between two entries that tell of nothing but another reason for waiting.
REASON_S = 300.0
# Nodes that are named; a larger gang's are in the site's own books.
NODES = 256


class Waiting:
    """What one course has to do with the site's own queue. `writing` is held while the attempt's row is changed and written."""

    def __init__(self, site: Site, attempt: AttemptId, queue: NativeQueue) -> None:
        self.site, self.id, self.queue = site, attempt, queue
        self.writing = asyncio.Lock()
        self._said: NativeWords | None = None
        self._told_s: float | None = None
        self._task: asyncio.Task[None] | None = None

    async def enqueue(self) -> life.Exit | None:
        """Into the queue, and told once; how it failed if it never will be."""
        attempt = self.site.books.attempts[self.id]
        queued = await self.queue.enqueue(attempt)
        if isinstance(queued, life.Exit):
            return queued
        if self.site.books.attempts[self.id].queued is None:
            async with self.writing:
                await self._tell(queued)
        return None

    async def _tell(self, queued: Queued) -> None:
        before = self.site.books.attempts[self.id]
        if before.state is not State.STAGING:
            return
        now = self.site.moment()
        record = QueuedRecord(
            native_id=queued.native_id, cluster=queued.cluster, utc_ns=int(now.utc.timestamp() * 1e9), boot_ns=int(now.boot_s * 1e9)
        )
        attempt = with_state(before, before.state, queued=record)
        self.site.put(attempt)

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            if attempt.local is not None or self.site.keeper_version() < NATIVE_WORDS:
                return {}
            entry = SiteQueued(
                **self.site.entry_of(attempt, following[Lane.SCHEDULER]),
                native_id=queued.native_id[:WORD],
                cluster=queued.cluster[:WORD],
                native_state=queued.state[:WORD],
                native_reason=queued.reason[:REASON],
            )
            return {Lane.SCHEDULER: [entry]}

        await self.site.record(entries, save(attempt))
        self._said = NativeWords(queued.native_id, queued.state, queued.reason)
        LOG.info("waits in the site's own queue", attempt=self.id, native=queued.native_id, cluster=queued.cluster)

    # --- the scheduler's words ---

    def listen(self) -> None:
        """From now on what the scheduler says is told when it changes."""
        if self._task is None:
            self._task = asyncio.create_task(self._listen(), name=f"words-{self.id}")

    async def rest(self) -> None:
        """No more is told; what is being written is, unless the disk holds it up."""
        task, self._task = self._task, None
        if task is None:
            return
        try:
            async with asyncio.timeout(REST_S), self.writing:
                task.cancel()
        except TimeoutError:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _listen(self) -> None:
        heard = self._said
        while True:
            try:
                heard = await self._next(heard)
                if heard is None or heard == self._said or self._can_wait(heard):
                    continue
                async with self.writing:
                    await self._heard(heard)
            except IntertieError as err:
                LOG.warning("what the scheduler says is not told", attempt=self.id, code=err.code, text=err.text)
                await asyncio.sleep(1.0)
            except Exception:
                # A fault of ours in one word must not silence all that follow: nobody waits for this task before the run's end.
                LOG.exception("what the scheduler says broke us", attempt=self.id)
                await asyncio.sleep(REASON_S)
            else:
                self._said, self._told_s = heard, self.site.clock.monotonic_s()

    async def _next(self, heard: NativeWords | None) -> NativeWords | None:
        """What it says when it says something else than was heard; the same again when what was put off is due."""
        if heard == self._said or self._told_s is None:
            return await self.queue.words(self.id, heard)
        left_s = self._told_s + REASON_S - self.site.clock.monotonic_s()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                return await self.queue.words(self.id, heard)
        except TimeoutError:
            return heard

    def _can_wait(self, words: NativeWords) -> bool:
        """Only another reason for waiting, soon after the last: `Priority` and `Resources` take turns at every look of a busy site."""
        said = self._said
        if said is None or self._told_s is None or replace(words, reason=said.reason) != said:
            return False
        return self.site.clock.monotonic_s() - self._told_s < REASON_S

    async def _heard(self, words: NativeWords) -> None:
        before = self.site.books.attempts[self.id]
        if before.state not in (State.STAGING, State.RUNNING):
            return
        attempt = self._suspended(before, words.suspended)
        self.site.put(attempt)

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            if attempt.local is not None or self.site.keeper_version() < NATIVE_WORDS:
                return {}
            entry = NativeSeen(
                **self.site.entry_of(attempt, following[Lane.SCHEDULER]),
                native_id=words.native_id[:WORD],
                native_state=words.state[:WORD],
                native_reason=words.reason[:REASON],
                suspended=words.suspended,
                nodes=list(words.nodes)[:NODES],
                restarts=words.restarts,
                text=words.text[:REASON],
            )
            return {Lane.SCHEDULER: [entry]}

        await self.site.record(entries, save(attempt))

    def _suspended(self, attempt: Attempt, now: bool) -> Attempt:
        """Its suspensions, one more or one closed, by this host's clock at the look that showed it."""
        known = attempt.suspensions
        lasts = bool(known) and known[-1].end_us is None
        if attempt.started is None or now == lasts:
            return attempt
        at_us = max(0, int(self.site.clock.boot_s() * 1e6) - attempt.started.boot_ns // 1_000)
        if now:
            changed = [*known, Suspension(start_us=at_us)]
        else:
            changed = [*known[:-1], msgspec.structs.replace(known[-1], end_us=max(at_us, known[-1].start_us))]
        return with_state(attempt, attempt.state, suspensions=changed)
