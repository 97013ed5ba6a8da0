"""`ops/quickstart --dare`: the bus is killed under a job that ticks, the site is seen to work alone, the bus returns, the statement is the same.

Whatever does not hold ends it with the sentence that says what: a demonstration that could not fail would show nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from intertie.cli.client import Client
from intertie.cli.local_door import call
from intertie.cli.local_owner import took
from intertie.cli.local_texts import say_local
from intertie.cli.out import line, local
from intertie.contracts.job import JobRecord, JobState
from intertie.contracts.local import LocalJob, LocalLog, LocalStatus, LocalSubmit
from intertie.contracts.usage import AttemptBook, Charge, SpecsReply, Statement
from intertie.errors import NotFound, Refused
from intertie.lifecycle import JOB_TERMINAL
from intertie.rating import round_to
from intertie.rating.text import formula_text, money_text
from intertie.text import language, say

if TYPE_CHECKING:
    from intertie.clock import Clock
    from intertie.embedded.supervise import HubSupervisor

BUS = "nats"
TICK = re.compile(r"^tick (\d+) (\d\d):(\d\d):(\d\d)$", re.M)
WANTED = 20
# Of twenty: enough before, without and after the bus that each is seen.
BEFORE, WITHOUT = 3, 5
# Thousandths of a device × microseconds in one card-hour.
PER_HOUR = 1_000 * 3_600 * 1_000_000

Until = Callable[[Callable[[], Any]], Awaitable[Any]]


class _Exit(msgspec.Struct):
    """Of the supervisor's exit record, what it measured."""

    ran_us: int


class Dare:
    """One run of it. `until` asks again and again until there is an answer."""

    def __init__(self, user: Client, site: Path, account: str, supervisor: HubSupervisor, clock: Clock, until: Until) -> None:
        self._user, self._site, self._account = user, site, account
        self._supervisor, self._clock, self._until = supervisor, clock, until
        self._lang = language()

    def _say(self, key: str, **values: object) -> None:
        line(say(f"dare.{key}", self._lang, **values))

    async def run(self, job: str) -> None:
        line()
        self._say("title")
        attempt = await self._until(lambda: self._running(job))
        await self._until(lambda: self._ticks(attempt) >= BEFORE or None)
        self._say("before", job=job, where=self._site.name.removeprefix("site-"), tick=self._last(attempt))
        await self._cut(attempt)
        await self._back()
        await self._compare(job, attempt)

    # --- what is looked at ---

    def _running(self, job: str) -> str | None:
        record = self._user.get(f"/v1/jobs/{job}", JobRecord)
        if record.state in JOB_TERMINAL:
            raise Refused("dare.ended", f"the job that ticks ended at once: {record.state}", next_step=f"intertie logs {job}")
        return record.attempts[-1].attempt if record.state is JobState.RUNNING else None

    def _log(self, attempt: str) -> str:
        """The job's own file: no hub and no agent is asked."""
        return (self._site / "jobs" / attempt / "log").read_text(encoding="utf-8", errors="replace")

    def _ticks(self, attempt: str) -> int:
        return len(TICK.findall(self._log(attempt)))

    def _last(self, attempt: str) -> str:
        return self._log(attempt).strip().splitlines()[-1]

    def _status(self) -> LocalStatus:
        return call(str(self._site / "agent.sock"), "GET", "/v1/status", LocalStatus)

    # --- without the bus ---

    async def _cut(self, attempt: str) -> None:
        began = self._clock.monotonic_s()
        self._say("killed", pid=await self._supervisor.kill(BUS))
        status: LocalStatus = await self._until(lambda: status if (status := self._status()).islanded_since is not None else None)
        noticed = self._clock.monotonic_s() - began
        why = say_local(f"why.{status.islanded_why}")
        self._say("islanded", noticed=f"{noticed:.1f}", since=local(status.islanded_since), why=why, lent=status.lent_jobs)
        before, count = self._last(attempt), self._ticks(attempt)
        await self._own_job()
        await self._until(lambda: self._ticks(attempt) >= count + WITHOUT or None)
        self._say("ticks", before=before, after=self._last(attempt))
        if entries := (await asyncio.to_thread(self._status)).journal_entries:
            self._say("waits", entries=entries)

    async def _own_job(self) -> None:
        """The owner's people go on: a local job, from submit to its end."""
        asked = LocalSubmit(name="own", script="#!/bin/sh\necho still here\n", cwd="/", as_user=self._account)
        path = str(self._site / "agent.sock")
        made = await asyncio.to_thread(call, path, "POST", "/v1/jobs", LocalJob, asked)

        def ended() -> LocalJob | None:
            job = call(path, "GET", f"/v1/jobs/{made.job}", LocalJob)
            return job if job.outcome is not None else None

        job: LocalJob = await self._until(ended)
        said = call(path, "GET", f"/v1/jobs/{made.job}/log?offset=0", LocalLog).text.strip()
        if job.outcome != "succeeded":
            raise Refused("dare.local", f"the owner's own job ended as {job.outcome}: {job.reason}")
        self._say("local", said=said, state=say_local(f"outcome.{job.outcome}"), ran=f"{job.ran_us / 1e6:.3f} s")

    # --- with it again ---

    async def _back(self) -> None:
        began = self._clock.monotonic_s()
        await self._supervisor.let(BUS)
        await self._until(lambda: self._status().islanded_since is None or None)
        heard = self._clock.monotonic_s() - began

        def told() -> LocalStatus | None:
            status = self._status()
            return status if status.absence is not None and status.absence.told is not None else None

        status: LocalStatus = await self._until(told)
        gone = status.absence
        assert gone is not None and gone.told is not None and gone.ended is not None
        pid = next(part.pid for part in self._supervisor.started if part.name == BUS)
        self._say("back", pid=pid, heard=f"{heard:.1f}", entries=gone.entries, told=took(gone.told - gone.ended))

    async def _compare(self, job: str, attempt: str) -> None:
        """The supervisor's record against three books, and the amount against what the same seconds cost without a cut."""

        def ended() -> JobRecord | None:
            record = self._user.get(f"/v1/jobs/{job}", JobRecord)
            return record if record.state in JOB_TERMINAL else None

        record: JobRecord = await self._until(ended)
        pause, ticks = self._longest_pause(record.attempts[-1].log_tail), len(TICK.findall(record.attempts[-1].log_tail))
        state = say(f"state.{record.state}", self._lang)
        self._say("end", job=record.spec.name, state=state, ticks=ticks, wanted=WANTED, pause=pause)
        ran_us = self._supervisors_word(attempt, record)
        book: AttemptBook = await self._until(lambda: self._book(job, attempt))
        if record.state is not JobState.SUCCEEDED or ticks != WANTED or len(record.attempts) != 1:
            raise Refused(
                "dare.cut_it", f"the job did not run as it would have: {record.state}, {ticks} ticks, {len(record.attempts)} runs"
            )
        three = (("dare.supervisor", ran_us), ("page.book.site", record.attempts[-1].ran_us), ("page.book.metering", book.run_us))
        for key, us in three:
            line(f"  {us / 1e6:>12.6f} s  {say(key, self._lang)}")
        paid = next(charge for charge in book.charges if charge.formula.per_hour)
        expected = await asyncio.to_thread(self._uncut, ran_us, paid)
        if len({us for _, us in three}) != 1 or paid.amount != expected:
            raise Refused("dare.differs", f"the books differ: {[us for _, us in three]} µs, charged {paid.amount}, uncut {expected}")
        line(f"  {formula_text(paid.formula, self._lang)}")
        self._say("unchanged", amount=money_text(expected, paid.currency), seconds=f"{ran_us / 1e6:.6f}")
        if any(charge.islanded for charge in book.charges):
            self._say("mark")

    def _supervisors_word(self, attempt: str, record: JobRecord) -> int:
        """What the process beside the job measured. Its folder goes once everything is settled; the record stays as long as its log."""
        try:
            return msgspec.json.decode((self._site / "jobs" / attempt / "exit.json").read_bytes(), type=_Exit).ran_us
        except FileNotFoundError as err:
            raise NotFound("dare.no_record", f"the supervisor's record of {record.job} is gone") from err

    def _book(self, job: str, attempt: str) -> AttemptBook | None:
        told = self._user.get("/v1/statements", Statement)
        books = [book for row in told.lines if row.job == job for book in row.attempts if book.attempt == attempt]
        return books[0] if books and books[0].complete else None

    def _uncut(self, ran_us: int, paid: Charge) -> Decimal:
        """The rule, by hand: seconds × devices × price, rounded once."""
        specs = self._user.get("/v1/meter-specs", SpecsReply).specs
        spec = next(one for one in specs if (one.spec, one.revision) == (paid.spec, paid.spec_revision))
        exact = Fraction(ran_us * paid.formula.quantity_milli, PER_HOUR) * Fraction(paid.formula.per_hour)
        return round_to(exact, spec.rounding)

    @staticmethod
    def _longest_pause(text: str) -> int:
        """Seconds between two ticks, at most; midnight is no pause."""
        seconds = [int(h) * 3_600 + int(m) * 60 + int(s) for _, h, m, s in TICK.findall(text)]
        return max(((right - left) % 86_400 for left, right in pairwise(seconds)), default=0)
