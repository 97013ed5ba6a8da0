"""What a native job is, from what the queue and the accounting say of it; silence of either is no end.

The queue is trusted for what lives, the accounting for what has ended (LAB: right after a start its rows lag, and a live row may say PENDING).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import PurePath

from intertie.agent.adapters.port import Accounted, NativeEnd, NativeJob, NativeOutcome, NativePhase
from intertie.agent.slurm.core.names import OOM_MARK, ExitCode
from intertie.agent.slurm.core.records import Booked, Queued
from intertie.agent.slurm.core.states import JobState
from intertie.agent.slurm.core.tags import Tag, read_tag, tag_of_folder
from intertie.agent.slurm.core.times import Limit
from intertie.contracts.site import NativeLoad
from intertie.ids import AttemptId

Row = Queued | Booked


@dataclass(frozen=True, slots=True)
class Ours:
    """Whose jobs count as ours: tags below this root, on jobs of these accounts; no accounts: whoever has them."""

    root: PurePath
    users: frozenset[str] = frozenset()
    by_account: bool = False
    """Folders lie below one of their account."""

    def tag(self, row: Row) -> Tag | None:
        if self.users and row.user not in self.users:
            return None
        # A user may change the comment of a job of theirs while it runs, not the folder that it works in.
        said, lies = read_tag(row.comment), tag_of_folder(row.folder, self.root / row.user if self.by_account and row.user else self.root)
        if not row.folder.strip() or (said is not None and lies is not None and said.attempt == lies.attempt):
            return said
        return lies


def ended_as(state: JobState, code: ExitCode | None, *, ran: bool) -> NativeEnd:
    """How it ended. A shell's 137 stays an exit code: only Slurm's own word makes it a signal or a lack of memory.

    `ran`: it had nodes. A job that was cancelled while it waited has a start in the books, its end, and no nodes."""
    assert state.phase is NativePhase.ENDED
    text = state.word if state.by_uid is None else f"{state.word} by uid {state.by_uid}"
    outcome = state.outcome or NativeOutcome.UNKNOWN
    signal = (code.signal or None) if code is not None else None
    match state.word:
        case "CANCELLED" | "DEADLINE" | "PREEMPTED" if not ran:
            return NativeEnd(NativeOutcome.NEVER_STARTED, text=text)
        case "DEADLINE":
            # Submitted with a deadline of start plus time limit: what ran until then has reached its limit.
            return NativeEnd(NativeOutcome.WALL_LIMIT, text=text)
        case "COMPLETED":
            return NativeEnd(NativeOutcome.EXITED, code=code.code if code is not None else 0, text=text)
        case "FAILED":
            return _failed(code, text)
        case "CANCELLED" | "OUT_OF_MEMORY" | "TIMEOUT" | "PREEMPTED":
            return NativeEnd(outcome, signal=None if signal == OOM_MARK else signal, text=text)
        case _:
            return NativeEnd(outcome, text=text)


def _failed(code: ExitCode | None, text: str) -> NativeEnd:
    if code is None:
        return NativeEnd(NativeOutcome.UNKNOWN, text=text)
    if code.out_of_memory:
        return NativeEnd(NativeOutcome.OUT_OF_MEMORY, text=text)
    if code.launch_failed:
        # A job may send itself this signal, too: whoever knows that it began takes it as one.
        why = f"{text}: it could not be launched (its folder or its output file cannot be used)"
        return NativeEnd(NativeOutcome.LAUNCH_FAILED, signal=code.signal, text=why)
    if code.signal:
        return NativeEnd(NativeOutcome.SIGNALLED, signal=code.signal, text=text)
    if code.code == 0:
        return NativeEnd(NativeOutcome.UNKNOWN, text=f"{text} with exit code 0")
    if not code.exact:
        return NativeEnd(
            NativeOutcome.EXITED, text=f"{text} with exit code {code.code} or {code.code + 128}: the accounting does not tell them apart"
        )
    return NativeEnd(NativeOutcome.EXITED, code=code.code, text=text)


def of_queue(row: Queued, tag: Tag, cluster: str) -> NativeJob:
    """Of a live line. A job that has ended in the queue alone keeps its end for the accounting, unless its exit code stands there."""
    phase = row.state.phase
    waits = phase in (NativePhase.QUEUED, NativePhase.UNKNOWN)
    end = None
    if phase is NativePhase.ENDED:
        end = ended_as(row.state, row.exit, ran=bool(row.nodes))
    return NativeJob(
        tag=tag.attempt,
        cluster=row.cluster or cluster,
        native_id=str(row.number),
        phase=phase,
        state=row.state.word,
        reason="" if row.reason.word == "None" else row.reason.word,
        generation=tag.generation,
        submitted=row.submitted,
        started=None if waits or not row.nodes else row.started,
        ended=row.ended if phase is NativePhase.ENDED else None,
        restarts=row.restarts,
        nodes=row.nodes,
        end=end,
        warning=row.state.warning or row.reason.warning,
    )


def of_books(runs: Sequence[Booked], tag: Tag, cluster: str, code: ExitCode | None = None) -> NativeJob:
    """Of the runs of one job, oldest first: the last one says what it is, the ones before are its restarts, and all of them together how long it had its
    nodes: laid end to end, from the first one's start. `code`: as the queue remembers it, whole."""
    last = runs[-1]
    phase = last.state.phase
    started, ended = last.started if last.nodes else None, last.ended if phase is NativePhase.ENDED else None
    had = [(run.started, run.ended) for run in runs if run.nodes and run.started is not None and run.ended is not None]
    if len(runs) > 1 and phase is NativePhase.ENDED and had:
        started = had[0][0]
        ended = started + sum((max(end - start, timedelta(0)) for start, end in had), timedelta(0))
    return NativeJob(
        tag=tag.attempt,
        cluster=last.cluster or cluster,
        native_id=str(last.number),
        phase=phase,
        state=last.state.word,
        generation=tag.generation,
        submitted=last.submitted,
        started=started,
        ended=ended,
        suspended_us=sum(run.suspended_us or 0 for run in runs),
        restarts=len(runs) - 1,
        nodes=last.nodes,
        end=ended_as(last.state, code or last.exit, ran=bool(last.nodes)) if phase is NativePhase.ENDED else None,
        warning=last.state.warning or last.warning,
    )


def by_tag(rows: Iterable[Row], ours: Ours) -> Mapping[AttemptId, Sequence[Row]]:
    """Rows that carry a tag of ours, by attempt, oldest submit first."""
    found = dict[AttemptId, list[Row]]()
    for row in rows:
        if (tag := ours.tag(row)) is not None:
            found.setdefault(tag.attempt, []).append(row)
    return {attempt: sorted(same, key=lambda row: (row.submitted is None, row.submitted, row.number)) for attempt, same in found.items()}


def chosen(rows: Sequence[NativeJob]) -> NativeJob:
    """One of several native jobs with one tag (a submit whose answer was lost, beside its repeat): one that runs, then one that waits, then the one that
    ran, the oldest of equals. That there are more is said."""
    order = {
        NativePhase.RUNNING: 0,
        NativePhase.SUSPENDED: 0,
        NativePhase.FINISHING: 0,
        NativePhase.STARTING: 1,
        NativePhase.UNKNOWN: 2,
        NativePhase.QUEUED: 3,
        NativePhase.ENDED: 4,
    }
    best = min(rows, key=lambda job: (order[job.phase], job.phase is NativePhase.ENDED and job.started is None))
    others = [job.native_id for job in rows if job is not best]
    if not others:
        return best
    return replace(best, warning=f"more than one native job carries the tag of {best.tag}: {', '.join([best.native_id, *others])}"[:300])


def same_job(one: Row, other: Row) -> bool:
    """Ids are given out again: id and submit time name a job."""
    return one.number == other.number and one.submitted == other.submitted


def accounted(runs: Iterable[Booked], ours: Ours, start: datetime, end: datetime) -> Sequence[Accounted]:
    """Runs that overlap [start, end), as the third book has them."""
    found: list[Accounted] = []
    before = dict[tuple[str, int], int]()
    for run in sorted(runs, key=lambda run: (run.started is None, run.started or run.submitted or end)):
        restarts = before.get((run.cluster, run.number), 0)
        before[(run.cluster, run.number)] = restarts + 1
        if run.started is None or not run.nodes or run.started >= end or (run.ended is not None and run.ended < start):
            continue
        tag = ours.tag(run)
        models = [model for model, count in run.tres.models.items() if count]
        found.append(
            Accounted(
                native_id=str(run.number),
                cluster=run.cluster,
                state=run.state.word,
                tag=tag.attempt if tag is not None else None,
                submitted=run.submitted,
                started=run.started,
                ended=run.ended,
                elapsed_us=run.elapsed_us,
                suspended_us=run.suspended_us or 0,
                devices=run.tres.gpus,
                model=models[0] if len(models) == 1 else "",
                user=run.user,
                nodes=run.nodes,
                restarts=restarts,
                end=ended_as(run.state, run.exit, ran=True) if run.state.phase is NativePhase.ENDED else None,
            )
        )
    return found


def native_load(rows: Iterable[Queued], ours: Ours, busy: int, held: int, at: datetime) -> NativeLoad:
    """What did not come through us, in numbers. `busy`: cards taken in all; `held`: by ours."""
    running = waiting = 0
    for row in rows:
        if ours.tag(row) is not None:
            continue
        if row.state.phase is NativePhase.QUEUED:
            waiting += row.ref.tasks
        elif row.state.phase is not NativePhase.ENDED:
            running += 1
    return NativeLoad(running=running, waiting=waiting, devices_busy=max(0, busy - held), observed_at=at)


def drift(row: Queued, partition: str, minutes: int) -> str:
    """What somebody at the site changed of a job of ours since it was submitted (BR-072); empty if nothing."""
    said: list[str] = []
    if partition and row.partition not in partition.split(","):
        said.append(f"partition {row.partition} instead of {partition}")
    if row.limit_us is not None and row.limit_us != minutes * 60_000_000:
        shown = row.limit_us if isinstance(row.limit_us, Limit) else f"{row.limit_us // 60_000_000} min"
        said.append(f"time limit {shown} instead of {minutes} min")
    return f"job {row.number} was changed at the site: {', '.join(said)}" if said else ""
