"""What quickstart shows: one screen, at most 40 lines, in the reader's language, every figure from this run."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence
from pathlib import Path

from intertie.cli.out import line, note, rejection_text
from intertie.contracts.job import JobRecord, JobSpec, JobState
from intertie.contracts.site import PoolRecord
from intertie.contracts.usage import AttemptBook, Statement
from intertie.embedded.supervise import Started
from intertie.errors import IntertieError, Refused
from intertie.rating.text import clause_in, formula_text, money_text
from intertie.text import language, say


class Screen:
    """Prints; knows nothing about how things are done."""

    def __init__(self) -> None:
        self._lang = language()

    def _say(self, key: str, **values: object) -> None:
        line(say(f"quick.{key}", self._lang, **values))

    def title(self, data: Path, url: str) -> None:
        self._say("title", host=socket.gethostname(), data=data, url=url)

    def parts(self, parts: Sequence[Started]) -> None:
        """Two parts a line."""
        cells = [f"{p.name:<10} pid {p.pid:<8} {p.ready_s:5.2f} s" for p in parts]
        for left in range(0, len(cells), 2):
            line("  " + "     ".join(cells[left : left + 2]))

    def site(self, pid: int, seconds: float, site: str, pools: Sequence[PoolRecord], account: str) -> None:
        """The machine as a site: its devices, honestly."""
        line(f"  {'agent':<10} pid {pid:<8} {seconds:5.2f} s")
        gpus = [f"{p.profile.count} × {p.profile.accelerator}" for p in pools if p.profile.accelerator != "none"]
        slots = sum(p.profile.count for p in pools if p.profile.accelerator == "none")
        key = "site_gpu" if gpus else "site_cpu"
        who = account or say("quick.own_user", self._lang)
        self._say(key, site=site, gpus=", ".join(gpus), slots=slots, account=who)

    def refused(self, spec: JobSpec, error: Refused) -> None:
        wanted = f"{spec.resources.gpus} × {spec.resources.gpu_model}"
        self._say("refused", name=spec.name, wanted=wanted)
        rejections = error.details.get("rejections")
        rows = rejections if isinstance(rejections, list) else []
        for row in rows[:2]:
            if isinstance(row, dict):
                line(f"      {row.get('site')}/{row.get('pool')}: {rejection_text(str(row.get('rule')), str(row.get('text')))}")
        if not rows:
            line(f"      {error.text}")

    def job(self, record: JobRecord, digest: str) -> None:
        """One job's end; its result's hash as `sha256sum` prints it; whose fault a failure was and who pays."""
        attempt = record.attempts[-1] if record.attempts else None
        ran = f"{attempt.ran_us / 1e6:.3f} s" if attempt else "-"
        where = f"{attempt.site}/{attempt.pool}" if attempt else "-"
        self._say("job", name=record.spec.name, state=say(f"state.{record.state}", self._lang), ran=ran, where=where)
        if digest:
            self._say("result", digest=digest[:12], path=digest.partition("  ")[2])
        if record.state is JobState.FAILED and attempt is not None:
            cause = say(f"cause.{attempt.cause or 'unknown'}", self._lang)
            last = attempt.log_tail.strip().splitlines()[-1:] or [""]
            self._say("job_failed", cause=cause, code=attempt.exit_code, last=last[0][:100])

    def books(self, record: JobRecord, statement: Statement) -> None:
        """The same seconds three times, their difference, and the amount written out."""
        books = {b.attempt: b for row in statement.lines for b in row.attempts}
        attempt = record.attempts[-1]
        book = books[attempt.attempt]
        span = (attempt.ended_at - attempt.started_at) if attempt.ended_at and attempt.started_at else None
        scheduler_us = round(span.total_seconds() * 1_000_000) if span is not None else 0
        three = (attempt.ran_us, scheduler_us, book.run_us)
        self._say("books", name=record.spec.name)
        for name, us in zip(("site", "scheduler", "metering"), three, strict=True):
            line(f"  {us / 1e6:>12.6f} s  {say(f'page.book.{name}', self._lang)}")
        line(f"  {(max(three) - min(three)) / 1e6:>12.6f} s  {say('page.book.difference', self._lang)}")
        self._cost(book)
        total = money_text(statement.total, statement.currency)
        kind = say("cli.provisional" if statement.provisional else "cli.final", self._lang)
        self._say("total", tenant=statement.tenant, period=statement.period, total=total, kind=kind)

    def _cost(self, book: AttemptBook) -> None:
        """Charged clocks with their formula and clause, the others in one line."""
        free = []
        for charge in book.charges:
            formula = charge.formula
            if not formula.per_hour:
                free.append(f"{say(f'phase.{formula.phase}', self._lang)} {formula.duration_us / 1e6:.3f} s")
                continue
            line(f"  {formula_text(formula, self._lang)}   {say(f'payer.{charge.payer}', self._lang)}")
            line(f"    {clause_in(formula.clause, self._lang)}")
        self._say("free", clocks=", ".join([*free, say("quick.queue", self._lang)]))

    def page(self, record: JobRecord, url: str) -> None:
        self._say("page", trace=record.trace_id, url=url)

    def end(self, seconds: float, env_file: Path, *, stays: bool) -> None:
        self._say("took" if stays else "took_once", seconds=f"{seconds:.1f}")
        line(f"  . {shlex.quote(str(env_file))}")
        line("  printf '#!/bin/sh\\nhostname; date\\n' > hello.sh && intertie submit --no-work --wait hello.sh")
        line("  intertie statement")
        if stays:
            self._say("stays")

    def failed(self, error: IntertieError) -> None:
        note(say("quick.failed", self._lang, text=error.text, code=error.code))
        if error.next_step:
            note(say("quick.failed_next", self._lang, step=error.next_step))
