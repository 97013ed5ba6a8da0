"""One table of moves per life. SQL checks, the docs' diagram and the console's colours are derived from these tables and from nothing else.

A move that is not in the table raises `IllegalMove` with the entity's story: our bug, loud, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from intertie.contracts.job import JobState as S
from intertie.contracts.site import Freshness, Phase


class JobEvent(StrEnum):
    """What can happen to a job."""

    QUEUE = "queue"
    PLACE = "place"
    REFUSE = "refuse"
    """The site refused, expired or was withdrawn from: back to the queue, nothing ran."""
    ENTER_SITE_QUEUE = "enter_site_queue"
    STAGE = "stage"
    START = "start"
    SUSPEND = "suspend"
    RESUME = "resume"
    RETURN_RESULTS = "return_results"
    SUCCEED = "succeed"
    FAIL = "fail"
    CANCEL = "cancel"
    REQUEUE = "requeue"
    """The attempt ended through no fault of the job, and another may be made."""
    EXPIRE = "expire"
    LOSE = "lose"


E = JobEvent

_ENDS: Mapping[JobEvent, S] = {E.SUCCEED: S.SUCCEEDED, E.FAIL: S.FAILED, E.CANCEL: S.CANCELLED}
_HELD = (S.PLACED, S.SITE_QUEUED, S.STAGING, S.RUNNING, S.SUSPENDED, S.FINISHING)

JOB_MOVES: Mapping[tuple[S, JobEvent], S] = {
    (S.PENDING, E.QUEUE): S.QUEUED,
    (S.PENDING, E.CANCEL): S.CANCELLED,
    (S.PENDING, E.EXPIRE): S.EXPIRED,
    (S.QUEUED, E.PLACE): S.PLACED,
    (S.QUEUED, E.CANCEL): S.CANCELLED,
    (S.QUEUED, E.EXPIRE): S.EXPIRED,
    # An attempt that was replaced while its site was silent had succeeded: a success on disk beats a run that has not begun.
    (S.QUEUED, E.RETURN_RESULTS): S.FINISHING,
    (S.QUEUED, E.SUCCEED): S.SUCCEEDED,
    (S.PLACED, E.REFUSE): S.QUEUED,
    (S.PLACED, E.ENTER_SITE_QUEUE): S.SITE_QUEUED,
    (S.PLACED, E.STAGE): S.STAGING,
    (S.PLACED, E.START): S.RUNNING,
    (S.SITE_QUEUED, E.REFUSE): S.QUEUED,
    (S.SITE_QUEUED, E.STAGE): S.STAGING,
    (S.SITE_QUEUED, E.START): S.RUNNING,
    (S.STAGING, E.ENTER_SITE_QUEUE): S.SITE_QUEUED,
    (S.STAGING, E.REFUSE): S.QUEUED,
    (S.STAGING, E.START): S.RUNNING,
    (S.RUNNING, E.SUSPEND): S.SUSPENDED,
    (S.SUSPENDED, E.RESUME): S.RUNNING,
    **{(state, E.RETURN_RESULTS): S.FINISHING for state in _HELD if state is not S.FINISHING},
    **{(state, event): end for state in _HELD for event, end in _ENDS.items()},
    **{(state, E.REQUEUE): S.QUEUED for state in _HELD},
    **{(state, E.LOSE): S.LOST for state in _HELD},
    # Late evidence may refine `lost`, once, and nothing else that is terminal.
    **{(S.LOST, event): end for event, end in _ENDS.items()},
}

JOB_TERMINAL = frozenset({S.SUCCEEDED, S.FAILED, S.CANCELLED, S.EXPIRED, S.LOST})
JOB_HELD = frozenset(_HELD)
"""States in which an attempt is open at a site."""


class Word(StrEnum):
    """The five words people see."""

    WAITING = "waiting"
    PREPARING = "preparing"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"


WORDS: Mapping[S, Word] = {
    S.PENDING: Word.WAITING,
    S.QUEUED: Word.WAITING,
    S.PLACED: Word.PREPARING,
    S.SITE_QUEUED: Word.PREPARING,
    S.STAGING: Word.PREPARING,
    S.RUNNING: Word.RUNNING,
    S.SUSPENDED: Word.RUNNING,
    S.FINISHING: Word.RUNNING,
    S.SUCCEEDED: Word.ENDED,
    S.FAILED: Word.ENDED,
    S.CANCELLED: Word.ENDED,
    S.EXPIRED: Word.ENDED,
    S.LOST: Word.UNKNOWN,
}


def word(state: S, *, site_silent: bool = False) -> Word:
    """The word for people; a held job whose site is silent is `unknown`, whatever it was last seen doing."""
    return Word.UNKNOWN if site_silent and state in JOB_HELD else WORDS[state]


class IllegalMove(AssertionError):
    """A move that the table does not hold."""


def move(state: S, event: JobEvent, *, story: Sequence[str] = ()) -> S:
    """The state after `event`; `IllegalMove` with the story if the table has no such move."""
    try:
        return JOB_MOVES[(state, event)]
    except KeyError:
        told = "\n  ".join(story) or "(no story given)"
        raise IllegalMove(f"a job that is {state} cannot {event}\n  {told}") from None


FRESHNESS_MOVES: Mapping[tuple[Freshness, Freshness], str] = {
    (Freshness.FRESH, Freshness.STALE): "no sync within the freshness limit",
    (Freshness.FRESH, Freshness.UNKNOWN): "the hub was away itself",
    (Freshness.STALE, Freshness.FRESH): "a sync came",
    (Freshness.STALE, Freshness.UNKNOWN): "no sync within the silence limit",
    (Freshness.UNKNOWN, Freshness.FRESH): "a sync came",
}


P = Phase

PHASE_MOVES: Mapping[tuple[Phase, Phase], str] = {
    (P.CANDIDATE, P.PILOT): "a first tenant tries it",
    (P.PILOT, P.PARALLEL): "both books are kept and compared",
    (P.PARALLEL, P.PRODUCTION): "the books agreed",
    (P.PARALLEL, P.PILOT): "the books did not agree",
    # What is suspended proves itself again: it never goes back to production in one step.
    (P.SUSPENDED, P.PILOT): "it begins again",
    (P.SUSPENDED, P.PARALLEL): "it is compared again",
    **{(phase, P.SUSPENDED): "something is wrong" for phase in (P.PILOT, P.PARALLEL, P.PRODUCTION)},
    **{(phase, P.CLOSED): "it leaves" for phase in (P.CANDIDATE, P.PILOT, P.PARALLEL, P.PRODUCTION, P.SUSPENDED)},
    (P.CLOSED, P.CANDIDATE): "it comes back",
}
"""Onboarding of a pool. What is not here is forbidden: above all suspended → production."""

PHASE_FORWARD = frozenset(
    {(P.CANDIDATE, P.PILOT), (P.PILOT, P.PARALLEL), (P.PARALLEL, P.PRODUCTION), (P.SUSPENDED, P.PILOT), (P.SUSPENDED, P.PARALLEL)}
)
"""Moves towards outside work: not for the pool's own owner to make, and none without an agreed meter spec."""
PHASE_WORKS = frozenset({P.PILOT, P.PARALLEL, P.PRODUCTION})
"""Phases in which work is placed; in the first two only for those tenants that are named, if any are."""
