"""One look for everybody: the scheduler is asked for all jobs that somebody waits for in one question, at the owner's interval and no oftener.

A look that fails, or does not show a job, says nothing of it; what was last known stands, with its number. While somebody follows a job there is
one task that looks; when the last one is gone there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Protocol, runtime_checkable

from intertie.agent.adapters.port import Cluster, Listing, NativeJob, NativePhase
from intertie.clock import Clock
from intertie.errors import IntertieError
from intertie.ids import AttemptId
from intertie.observe import log

LOG = log.get("agent.looks")

# A scheduler that needs a second for an answer is asked every twenty: looking may take a twentieth of its time, no more.
SHARE = 20.0
SLOWEST_S = 300.0
# After a look that failed: how long it took says nothing of what an answer costs, so it is no reason to wait for minutes.
FAILED_S = 60.0
# What has just begun or ended may be looked at sooner, for all at once: at most twice as often as the owner said.
SOONER = 2.0
# A scheduler that has not answered for so long is not going to: the look has failed.
ANSWER_S = 60.0
# A stop without effect is asked for again, no oftener.
AGAIN_S = 30.0
# What was given up, and no whole look shows for so many looks and so long, is in no queue: it is asked to go no more. If a submit is taken after all,
# its stub finds the fence.
GONE_LOOKS, GONE_S = 3, 60.0


@runtime_checkable
class Counted(Protocol):
    """A cluster that counts what it asks of its scheduler."""

    questions: int
    """So far."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one look showed of one job. `behind_us`: this host's wall clock minus the scheduler's."""

    number: int
    job: NativeJob | None
    complete: bool = False
    failed: str = ""
    behind_us: int = 0

    @property
    def says_absent(self) -> bool:
        return self.job is None and self.complete and not self.failed


@dataclass(slots=True)
class _Stopping:
    grace_s: int
    asked_s: float


class Looks:
    def __init__(self, cluster: Cluster, clock: Clock, every_s: float) -> None:
        self.cluster, self.clock = cluster, clock
        self._owner_s = every_s
        self._took_s = 0.0
        self._number = 0
        self._of: dict[AttemptId, Look] = {}
        self._absent: Counter[AttemptId] = Counter()
        self._absent_since: dict[AttemptId, datetime] = {}
        self.silent_since: datetime | None = None
        """Since when looks fail; None while the scheduler answers."""
        self._followed: Counter[AttemptId] = Counter()
        self._stopping: dict[AttemptId, _Stopping] = {}
        self._task: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()
        self._poke = asyncio.Event()
        self._last_s: float | None = None
        self._uncounted = 0
        self._asked = deque([(clock.monotonic_s(), self.questions())], maxlen=4_096)
        """When how many had been asked so far."""

    @property
    def every_s(self) -> float:
        """Seconds between looks: the owner's, or longer while the scheduler is slow. After one that failed: as long as it took, within a minute."""
        if self.silent_since is not None:
            return max(self._owner_s, min(self._took_s, FAILED_S))
        return min(max(self._owner_s, self._took_s * SHARE), max(SLOWEST_S, self._owner_s))

    # --- who waits ---

    @asynccontextmanager
    async def following(self, tag: AttemptId) -> AsyncIterator[None]:
        self._followed[tag] += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"looks-{self.cluster.name}")
        try:
            yield
        finally:
            self._followed[tag] -= 1
            if self._followed[tag] <= 0:
                del self._followed[tag]
            if not self._followed and self._task is not None:
                self._task.cancel()
                self._task = None

    def latest(self, tag: AttemptId) -> Look | None:
        return self._of.get(tag)

    async def after(self, tag: AttemptId, look: Look | None) -> Look:
        """The next look after this one. Only while it is followed."""
        while (held := self._of.get(tag)) is None or (look is not None and held.number <= look.number):
            await self._looked.wait()
        return held

    async def soon(self, tag: AttemptId) -> Look:
        """A look that is made now, or as soon as may be."""
        before = self._of.get(tag)
        self._poke.set()
        return await self.after(tag, before or Look(self._number, None))

    def absent(self, tag: AttemptId) -> int:
        """In how many complete looks in a row it was not to be seen."""
        return self._absent[tag]

    def absent_since(self, tag: AttemptId) -> datetime | None:
        return self._absent_since.get(tag)

    def take(self, job: NativeJob) -> None:
        """What a submit answered is as good as a look."""
        self._number += 1
        self._of[job.tag] = Look(self._number, job)
        self._tell()

    def stopping(self, tag: AttemptId, grace_s: int) -> None:
        """It is to end: asked for again until it is seen to have ended."""
        self._stopping[tag] = _Stopping(grace_s, self.clock.monotonic_s())

    def forget(self, tag: AttemptId) -> None:
        for held in (self._of, self._absent, self._absent_since, self._stopping):
            held.pop(tag, None)

    def rpc_per_minute(self) -> float:
        """Questions put to the scheduler, over the last ten minutes or as long as this agent runs."""
        now_s = self.clock.monotonic_s()
        while len(self._asked) > 1 and now_s - self._asked[0][0] > 600:
            self._asked.popleft()
        first_s, before = self._asked[0]
        return round((self.questions() - before) * 60 / max(60.0, now_s - first_s), 1)

    # --- the looks ---

    async def _run(self) -> None:
        while True:
            await self._until_due()
            await self.look()

    async def _until_due(self) -> None:
        while self._last_s is not None:
            gone_s = self.clock.monotonic_s() - self._last_s
            left_s = (self.every_s / SOONER if self._poke.is_set() else self.every_s) - gone_s
            if left_s <= 0:
                break
            if self._poke.is_set():
                await asyncio.sleep(left_s)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._poke.wait()
        self._poke.clear()

    async def look(self) -> None:
        """Ask for all that is followed, or is to end."""
        tags = list({*self._followed, *self._stopping})
        began_s = self.clock.monotonic_s()
        try:
            async with asyncio.timeout(ANSWER_S):
                listing = await self.cluster.status(tags)
        except (IntertieError, TimeoutError, OSError) as err:
            self._failed(tags, str(err) or "no answer")
        except Exception as err:
            # A fault of ours in reading an answer is no reason to look at nothing any more.
            LOG.exception("a look at the scheduler broke", cluster=self.cluster.name)
            self._failed(tags, type(err).__name__)
        else:
            self._listed(tags, listing)
        self._last_s = self.clock.monotonic_s()
        self._took_s = self._last_s - began_s
        self.count()
        self._tell()
        await self._stop_again()

    def count(self) -> None:
        """A question was put to the scheduler, through whichever verb."""
        self._uncounted += 1
        self._asked.append((self.clock.monotonic_s(), self.questions()))

    def questions(self) -> int:
        """Put to the scheduler so far, as far as the cluster counts them."""
        return self.cluster.questions if isinstance(self.cluster, Counted) else self._uncounted

    def _tell(self) -> None:
        self._looked.set()
        self._looked = asyncio.Event()

    def _failed(self, tags: list[AttemptId], why: str) -> None:
        if self.silent_since is None:
            self.silent_since = self.clock.now()
            LOG.warning("the site's scheduler does not answer: what was last known stands", cluster=self.cluster.name, why=why)
        self._number += 1
        for tag in tags:
            held = self._of.get(tag) or Look(0, None)
            self._of[tag] = replace(held, number=self._number, complete=False, failed=why)

    def _listed(self, tags: list[AttemptId], listing: Listing) -> None:
        self.silent_since = None
        self._number += 1
        behind_us = (self.clock.now() - listing.at) // timedelta(microseconds=1)
        for tag in tags:
            job = listing.jobs.get(tag)
            self._of[tag] = Look(self._number, job, listing.complete, "", behind_us)
            if job is not None:
                self._absent.pop(tag, None)
                self._absent_since.pop(tag, None)
            elif listing.complete:
                self._absent[tag] += 1
                self._absent_since.setdefault(tag, self.clock.now())
            if (job is not None and job.phase is NativePhase.ENDED) or self._left(tag):
                self._stopping.pop(tag, None)

    def _left(self, tag: AttemptId) -> bool:
        since = self._absent_since.get(tag)
        gone = since is not None and self._absent[tag] >= GONE_LOOKS and (self.clock.now() - since).total_seconds() >= GONE_S
        return gone and tag not in self._followed

    async def tidy(self) -> None:
        """What was given up and is still in the queue: looked at although nobody waits for it."""
        if self._stopping and self._task is None:
            await self.look()

    async def _stop_again(self) -> None:
        now_s = self.clock.monotonic_s()
        for tag, stop in list(self._stopping.items()):
            if now_s - stop.asked_s < max(AGAIN_S, stop.grace_s):
                continue
            stop.asked_s = now_s
            with contextlib.suppress(IntertieError, TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await self.cluster.cancel(tag, stop.grace_s)
