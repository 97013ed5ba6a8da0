"""Looking at jobs, following them, fetching what they made, ending them."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click

from intertie.cli.client import Client
from intertie.cli.out import (
    EXIT_FAILED,
    EXIT_TIMEOUT,
    ago,
    json_option,
    line,
    local,
    note,
    outcome_text,
    print_json,
    rejection_lines,
    table,
)
from intertie.cli.session import connect
from intertie.contracts.http import Link, ReasonBody
from intertie.contracts.job import AttemptRecord, JobRecord, JobsReply, JobState, Story
from intertie.contracts.link import LogChunk
from intertie.contracts.usage import Statement
from intertie.errors import IntertieError, NotFound, Refused, Unavailable
from intertie.lifecycle import JOB_TERMINAL, word
from intertie.pack import file_digest, unpack
from intertie.rating.text import money_text
from intertie.text import Lang, known, language, say
from intertie.text.devices import use_lines
from intertie.text.native import native_words
from intertie.text.story import happened

# A site tells the last 2000 bytes of a log with the end of the attempt: what was printed is remembered as far back as that.
TAIL_CHARACTERS = 2_000
# The planner looks at a new job within a beat.
FIRST_ROUND_S = 3.0
# States of an attempt that is over and had no process: its reason is all that there is to say of it.
NEVER_RAN = ("refused", "not_started")
UNPLACED = (JobState.PENDING, JobState.QUEUED)


def state_text(job: JobRecord) -> str:
    """The word people see and the fine state beside it."""
    lang = language()
    seen = say(f"word.{word(job.state, site_silent=job.site_silent_since is not None)}", lang)
    return f"{seen} ({say(f'state.{job.state}', lang)})"


def asked(job: JobRecord) -> str:
    r = job.spec.resources
    return f"{r.gpus}×{r.gpu_model or 'GPU'}" if r.gpus else f"{r.slots}×slot"


@click.command()
@click.option("--state", type=click.Choice([s.value for s in JobState]), default=None, help="Only jobs in this state.")
@click.option("--site", help="Only jobs at this site.")
@click.option("--tenant", help="Only this tenant's jobs.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="How many.")
@json_option
def jobs(state: str | None, site: str | None, tenant: str | None, limit: int, as_json: bool) -> None:
    """List jobs, newest first."""
    query = {"state": state, "site": site, "tenant": tenant, "limit": limit}
    reply = connect().get("/v1/jobs", JobsReply, query)
    if as_json:
        print_json(reply)
        return
    rows = [
        (j.job, j.spec.name, state_text(j), asked(j), j.attempts[-1].site if j.attempts else "-", ago(j.submitted_at)) for j in reply.jobs
    ]
    table(("JOB", "NAME", "STATE", "ASKED", "SITE", "AGE"), rows, empty=say("cli.no_jobs", language()))
    if reply.more:
        note(say("cli.more", language(), limit=limit))


@click.command()
@click.argument("job")
@json_option
def job(job: str, as_json: bool) -> None:
    """Show one job: its state, its attempts, what it cost so far, its page."""
    client = connect()
    record = client.get(f"/v1/jobs/{job}", JobRecord)
    if as_json:
        print_json(record)
        return
    tell_job(record)
    tell_cost(client, record)
    try:
        line(client.post(f"/v1/jobs/{job}/link", Link, {}).url)
    except IntertieError as err:
        note(f"{err.text} [{err.code}]")


def tell_job(record: JobRecord) -> None:
    """A job as a few lines."""
    lang = language()
    line(f"{record.spec.name}  {record.job}")
    line(f"{state_text(record)}  {asked(record)}  {local(record.submitted_at)}")
    if record.site_silent_since:
        line(say("page.silent", lang, since=local(record.site_silent_since)))
    if record.waiting:
        line(f"{say(f'wait.{record.waiting.reason}', lang)}: {record.waiting.text}")
    for attempt in record.attempts:
        line(say("page.attempt", lang, number=attempt.number) + f"  {attempt.site}/{attempt.pool}  {attempt_text(attempt)}")
        for said in native_lines(attempt, lang):
            line(f"  {said}")
        if attempt.image:
            line(f"  {say('page.image', lang)}: {attempt.image}")
        for used in use_lines(attempt.device_use, lang):
            line(f"  {used}")
    if record.state is JobState.FAILED and record.attempts:
        tell_failure(record, record.attempts[-1])
    if record.trace_id:
        line(f"{say('page.trace', lang)} {record.trace_id}")


def native_lines(attempt: AttemptRecord, lang: Lang) -> list[str]:
    """What the site's own scheduler says, beside our state and with its age; of a site that has none only the machine, where it has several."""
    where = [say("page.nodes", lang, nodes=", ".join(attempt.nodes[:16]))] if attempt.nodes else []
    if not attempt.native_state or attempt.native_at is None:
        return where
    words = native_words(attempt.native_state, attempt.native_reason)
    told = say("page.native", lang, job=attempt.native_id, words=words, at=local(attempt.native_at))
    waited = [say("page.suspended", lang, seconds=f"{attempt.suspended_us / 1e6:.0f}")] if attempt.suspended_us else []
    return ["; ".join([told, *where, *waited])]


def tell_cost(client: Client, record: JobRecord) -> None:
    """What it cost so far, from its tenant's statement of the period that is open; nothing if nothing was metered in it."""
    try:
        told = client.get("/v1/statements", Statement, {"tenant": record.tenant})
    except IntertieError as err:
        note(f"{err.text} [{err.code}]")
        return
    for row in told.lines:
        if row.job == record.job:
            line(f"{say('page.cost', language())} {money_text(row.amount, told.currency)}")


def attempt_text(attempt: AttemptRecord) -> str:
    """What became of an attempt."""
    if attempt.outcome is None:
        waits_there = attempt.state == "staging" and attempt.site_queued_at is not None
        key = f"attempt.{'site_queued' if waits_there else attempt.state}"
        if attempt.offering and attempt.state == "refused":
            key = "attempt.declined"
        said = say(key, language()) if known(key) else attempt.state
        return f"{said}: {attempt.reason}" if attempt.reason and attempt.state in NEVER_RAN else said
    cause = f", {say(f'cause.{attempt.cause}', language())}" if attempt.cause and attempt.cause != attempt.outcome else ""
    code = f", {say('cli.exit', language())} {attempt.exit_code}" if attempt.exit_code is not None else ""
    return f"{outcome_text(attempt.outcome)}{cause}{code}, {attempt.ran_us / 1e6:.3f} s"


def tell_failure(record: JobRecord, attempt: AttemptRecord) -> None:
    """Cause, last log lines, who pays, next command."""
    lang = language()
    cause = attempt.cause or "unknown"
    line(say("cli.failed", lang, cause=say(f"cause.{cause}", lang), reason=attempt.reason or "-"))
    for text in attempt.log_tail.rstrip().splitlines()[-5:]:
        line(f"  | {text}")
    line(say("cli.failed_next", lang, job=record.job))


@click.command()
@click.argument("job")
@json_option
def explain(job: str, as_json: bool) -> None:
    """Why JOB waits, pool by pool; for one that was placed, why there."""
    client = connect()
    record = client.get(f"/v1/jobs/{job}", JobRecord)
    deadline = time.monotonic() + FIRST_ROUND_S  # noqa: TID251  # a wait of this command, not a fact
    # Asked right after the submit: the first round is under way, and its answer is worth the moment.
    while record.state in UNPLACED and record.waiting is None and time.monotonic() < deadline:  # noqa: TID251
        time.sleep(0.1)
        record = client.get(f"/v1/jobs/{job}", JobRecord)
    if as_json:
        print_json(record.waiting if record.waiting else record)
        return
    lang = language()
    line(state_text(record))
    if record.waiting is None:
        for attempt in record.attempts:
            where = f"{attempt.site}/{attempt.pool}"
            # The planner's words may begin with the place already.
            why = attempt.why_here.removeprefix(f"{where}: ")
            line(f"{say('page.attempt', lang, number=attempt.number)}: {where}: {why}")
        return
    waiting = record.waiting
    position = f"  #{waiting.position}" if waiting.position else ""
    # The planner's sentence is English and repeats the first row.
    sentence = f": {waiting.text}" if lang == "en" or not waiting.rejections else ""
    line(f"{say(f'wait.{waiting.reason}', lang)}{sentence}{position}")
    for words in rejection_lines([(f"{r.site}/{r.pool}", r.rule, r.text) for r in waiting.rejections], codes=True):
        line(f"  {words}")
    if waiting.round:
        line(say("cli.round", lang, round=waiting.round, since=local(waiting.since)))


@click.command()
@click.argument("job")
@json_option
def story(job: str, as_json: bool) -> None:
    """All that happened to JOB: when, who, what, why, by which evidence."""
    told = connect().get(f"/v1/jobs/{job}/story", Story)
    if as_json:
        print_json(told)
        return
    lang = language()
    rows = [(local(s.at), s.actor, happened(s.what, lang) + (" ∘" if s.islanded else ""), s.why, s.evidence) for s in told.lines]
    columns = [say(f"page.{c}", lang) for c in ("when", "who", "what", "why", "evidence")]
    table(columns, rows, empty=job)


@click.command()
@click.argument("job")
@click.option("-f", "--follow", "following", is_flag=True, help="Go on until the job has ended; its outcome is the exit code.")
@click.option("--attempt", help="An attempt other than the last.")
def logs(job: str, following: bool, attempt: str | None) -> None:
    """Print JOB's log."""
    client = connect()
    if following:
        sys.exit(follow(client, job, attempt=attempt))
    record = client.get(f"/v1/jobs/{job}", JobRecord)
    shown = drain(client, job, attempt or "", Shown())
    tell_tail(record, attempt or "", shown)


@dataclass(frozen=True)
class Shown:
    """How far a log was printed: the offset reached, and the end of the text (no longer than a kept tail)."""

    offset: int = 0
    end: str = ""


def unseen(shown: str, tail: str) -> str:
    """What of a log's kept tail was not printed yet, given the end of what was."""
    for size in range(min(len(shown), len(tail)), 0, -1):
        if shown.endswith(tail[:size]):
            return tail[size:]
    return tail


def tell_tail(record: JobRecord, attempt: str, shown: Shown) -> None:
    """A site lets an attempt's folder go once the hub has all of it; the hub keeps the last lines, and they are better than nothing."""
    found = next((a for a in reversed(record.attempts) if attempt in ("", a.attempt)), None)
    if found is None or found.outcome is None:
        return
    rest = unseen(shown.end, found.log_tail)
    if rest and not shown.end:
        note(say("cli.log_tail", language(), site=found.site))
    click.echo(rest, nl=False)


def follow(client: Client, job: str, *, attempt: str | None = None, poll_s: float = 0.5) -> int:
    """Print the log as it grows until the job ended; 0 if it succeeded. A silent site or hub is waited for, and said once."""
    shown, said, seen = Shown(), "", ""
    while True:
        try:
            record = client.get(f"/v1/jobs/{job}", JobRecord)
            if state_text(record) != said:
                said = state_text(record)
                note(f"· {said}")
            current = attempt or (record.attempts[-1].attempt if record.attempts else "")
            if current != seen:
                shown, seen = Shown(), current
            if record.attempts:
                shown = drain(client, job, current, shown)
            if record.state in JOB_TERMINAL:
                tell_tail(record, current, shown)
                if record.state is JobState.FAILED and record.attempts:
                    tell_failure(record, record.attempts[-1])
                return 0 if record.state is JobState.SUCCEEDED else EXIT_FAILED
        except Unavailable as err:
            if err.code != said:
                said = err.code
                note(f"· {err.text}")
        time.sleep(poll_s)


def drain(client: Client, job: str, attempt: str, shown: Shown) -> Shown:
    """Print what is new; how far it came. Nothing where the site has no such log (yet, or any more)."""
    while True:
        try:
            chunk = client.get(f"/v1/jobs/{job}/logs", LogChunk, {"offset": shown.offset, "attempt": attempt})
        except NotFound:
            return shown
        click.echo(chunk.text, nl=False)
        stuck = chunk.next_offset <= shown.offset
        # Where the log is gone, the place reached stays.
        shown = Shown(max(shown.offset, chunk.next_offset), (shown.end + chunk.text)[-TAIL_CHARACTERS:])
        # A site that says the same place again would be listened to for ever.
        if not chunk.text or stuck or chunk.next_offset >= chunk.total:
            return shown


@click.command()
@click.argument("job")
@click.option("--to", "target", type=click.Path(path_type=Path, file_okay=False), default=None, help="Folder (default: ./<job>).")
@click.option("--attempt", help="The outputs of this attempt.")
@click.option("--wait", "wait_s", type=click.IntRange(0), default=0, help="Seconds to wait for results that are not here yet.")
def fetch(job: str, target: Path | None, attempt: str | None, wait_s: int) -> None:
    """Bring JOB's declared outputs into a folder."""
    client, folder = connect(), target or Path(job)
    if folder.exists() and any(folder.iterdir()):
        raise Refused("cli.not_empty", f"{folder} is not empty", next_step="name another folder with --to DIR")
    deadline = time.monotonic() + wait_s  # noqa: TID251  # a wait of this command, not a fact
    while True:
        try:
            with tempfile.NamedTemporaryFile(suffix=".tar.gz") as data:
                with client.open("GET", f"/v1/jobs/{job}/result", query={"attempt": attempt}, timeout_s=600) as response:
                    promised = response.headers.get("X-Digest", "")
                    while chunk := response.read(1 << 20):
                        data.write(chunk)
                data.flush()
                if promised and file_digest(Path(data.name)) != promised:
                    raise IntertieError("cli.result_damaged", "the results arrived damaged", next_step="try again")
                folder.mkdir(parents=True, exist_ok=True)
                files = unpack(Path(data.name), folder)
            note(say("cli.fetched", language(), files=files, folder=folder))
            line(str(folder))
            return
        except NotFound:
            if time.monotonic() >= deadline:  # noqa: TID251
                raise
            time.sleep(0.5)


@click.command()
@click.argument("job_ids", metavar="JOB...", nargs=-1, required=True)
@click.option("--reason", default="", help="Why; shown in the job's story.")
@click.option("--wait", is_flag=True, help="Wait until its processes are seen gone.")
@json_option
def cancel(job_ids: tuple[str, ...], reason: str, wait: bool, as_json: bool) -> None:
    """Cancel JOBs. The intent lasts: it wins over a start that has not happened, and reaches a silent site when it returns."""
    client = connect()
    worst = 0
    for job_id in job_ids:
        try:
            record = client.post(f"/v1/jobs/{job_id}/cancel", JobRecord, ReasonBody(reason=reason))
            deadline = time.monotonic() + 60  # noqa: TID251
            while wait and record.state not in JOB_TERMINAL:
                if time.monotonic() > deadline:  # noqa: TID251
                    note(say("cli.cancel_waits", language(), job=job_id))
                    worst = EXIT_TIMEOUT
                    break
                time.sleep(0.3)
                record = client.get(f"/v1/jobs/{job_id}", JobRecord)
        except NotFound as err:
            note(f"{job_id}: {err.text} [{err.code}]")
            worst = max(worst, 3)
            continue
        if as_json:
            print_json(record)
        else:
            line(f"{job_id}  {state_text(record)}")
            if record.state not in JOB_TERMINAL:
                note(say("cli.cancel_asked", language()))
    sys.exit(worst)
