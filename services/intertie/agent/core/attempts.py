"""The life of an attempt at the site, as one table of moves, and what go, stop and an end make of it."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from intertie.agent.core.model import Attempt, Failing, Moment, State, StopAsked
from intertie.contracts.job import Cause
from intertie.ids import JournalId


class Event(StrEnum):
    ADMIT = "admit"
    """A local job has its devices."""
    GO = "go"
    GIVE_UP = "give_up"
    START = "start"
    END = "end"


S, E = State, Event

MOVES: Mapping[tuple[State, Event], State] = {
    (S.WAITING, E.ADMIT): S.STAGING,
    (S.WAITING, E.GIVE_UP): S.NOT_STARTED,
    (S.CLAIMED, E.GO): S.STAGING,
    (S.CLAIMED, E.GIVE_UP): S.NOT_STARTED,
    (S.STAGING, E.GIVE_UP): S.NOT_STARTED,
    (S.STAGING, E.START): S.RUNNING,
    (S.RUNNING, E.END): S.ENDED,
}


class IllegalMove(AssertionError):
    """A move that the table does not hold: our bug."""


def move(attempt: Attempt, event: Event) -> State:
    try:
        return MOVES[(attempt.state, event)]
    except KeyError:
        raise IllegalMove(f"{attempt.id} of {attempt.job} is {attempt.state} and cannot {event}") from None


# --- go ---


@dataclass(frozen=True, slots=True)
class Proceed:
    """Stage and start; `still_in_time` judges again just before the start."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    why: Failing


@dataclass(frozen=True, slots=True)
class Ignore:
    """Nothing to do: this was done before, or its answer is on its way."""


def on_go(attempt: Attempt, now: Moment, *, named: JournalId | None = None, ours: JournalId | None = None) -> Proceed | GiveUp | Ignore:
    """A go for a claimed attempt, taken at `now`. It counts from the sending of the sync that brought the offer.

    `named` is the journal that the go was said for (None: a hub of link version 1), `ours` the one that is open here.
    """
    if attempt.state is not State.CLAIMED:
        return Ignore()
    if (other := of_other_journal(attempt, ours)) or (named is not None and named != ours):
        return GiveUp(other or OTHER_JOURNAL)
    if rebooted := before_reboot(attempt, now):
        return GiveUp(rebooted)
    waited_s = now.boot_s - attempt.offer_sent_boot_s
    if waited_s > attempt.start_within_s:
        text = f"the go came {waited_s:.1f} s after the sync that brought the offer, {attempt.start_within_s} s are allowed"
        return GiveUp(Failing(code="go_too_late", text=text))
    return Proceed()


OTHER_JOURNAL = Failing(code="other_journal", text="its claim lies in another journal than the one that is open here")


def of_other_journal(attempt: Attempt, ours: JournalId | None) -> Failing | None:
    """What was claimed in a journal that was copied, moved or replaced since starts nothing in this one."""
    if attempt.local is None and attempt.claim_journal is not None and ours is not None and attempt.claim_journal != ours:
        return OTHER_JOURNAL
    return None


def before_reboot(attempt: Attempt, now: Moment) -> Failing | None:
    """A claim or a go from before a reboot starts nothing: this boot's clock cannot judge it."""
    if attempt.kernel_boot == now.kernel_boot:
        return None
    return Failing(code="rebooted", text="the machine was restarted between the claim and the start")


def still_in_time(attempt: Attempt, now: Moment) -> Failing | None:
    """Asked again just before the start, or the submit: `start_by` (`submit_within`) counts from the go and covers all staging."""
    if attempt.local is not None:
        return None
    if rebooted := before_reboot(attempt, now):
        return rebooted
    assert attempt.go_boot_s is not None
    waited_s = now.boot_s - attempt.go_boot_s
    within_s = attempt.submit_within_s or attempt.start_by_s
    if waited_s > within_s:
        return Failing(code="start_too_late", text=f"not started {waited_s:.1f} s after the go, {within_s} s are allowed")
    return None


# --- stop ---


@dataclass(frozen=True, slots=True)
class Halt:
    """Running: stop its processes; `Ended` follows when they are seen gone."""

    asked: StopAsked


@dataclass(frozen=True, slots=True)
class AlreadyOver:
    answer: str
    """`already_ended` or `not_started`."""


@dataclass(frozen=True, slots=True)
class Bury:
    """Never seen: leave a tombstone, so that a late offer of it is refused."""


def on_stop(attempt: Attempt | None, asked: StopAsked) -> Halt | GiveUp | AlreadyOver | Bury:
    """A stop names one attempt and always reaches it, whatever newer ones exist."""
    if attempt is None:
        return Bury()
    match attempt.state:
        case State.ENDED:
            return AlreadyOver("already_ended")
        case State.NOT_STARTED | State.REFUSED:
            return AlreadyOver("not_started")
        case State.RUNNING:
            return Halt(asked)
        case _:
            return GiveUp(Failing(code="stopped", text=asked.reason or "stopped before it started"))


# --- the end ---


@dataclass(frozen=True, slots=True)
class Exit:
    """What an adapter knows of an end. `certain` false: nobody saw the exit code."""

    certain: bool
    code: int | None = None
    signal: int | None = None
    refused_errno: int | None = None
    refused_file: str = ""
    refused_text: str = ""
    stopped_for: str | None = None
    left_behind: int = 0
    rebooted: bool = False
    out_of_memory: bool = False
    """The kernel ended some of it because its memory limit was reached."""
    ran_us: int = 0
    user_s: float = 0.0
    system_s: float = 0.0
    max_rss_kib: int = 0
    ended_by: str = ""
    """What the site's own scheduler did to it (a key of `BY_SITE`)."""
    native_state: str = ""
    native_reason: str = ""
    """The scheduler's own words for its end."""
    suspended_us: int = 0
    """Within `ran_us`: as the scheduler counted it; 0: not told, or none."""


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: str
    cause: Cause | None
    reason: str


# Refusals of exec that no job can be blamed for.
_SITE_ERRNOS = frozenset({errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EIO, errno.EMFILE, errno.ENFILE, errno.EPERM})


BY_SITE: Mapping[str, Verdict] = {
    "preempted": Verdict("failed", Cause.PREEMPTED, "preempted by the site's own scheduler"),
    "node_failed": Verdict("failed", Cause.SITE, "its node failed while it ran"),
    "launch_failed": Verdict("failed", Cause.SITE, "the site's own scheduler could not launch it"),
    "out_of_memory": Verdict("failed", Cause.JOB, "ran out of the memory that it had asked for"),
    "cancelled_at_site": Verdict("cancelled", Cause.SITE, "cancelled in the site's own scheduler, not by us"),
    "cancelled_by_itself": Verdict("failed", Cause.JOB, "cancelled in the site's own scheduler by the account that it ran as, not by us"),
    "forgotten": Verdict(
        "unknown",
        Cause.UNKNOWN,
        "the site's own scheduler lost it while it ran and may have ended it; whose doing its end was nobody can tell",
    ),
    # A job may ask for that itself, as may the site: who did stands in no record.
    "restarted": Verdict(
        "unknown", Cause.UNKNOWN, "the site's own scheduler started it a second time, which is refused; who asked for that nobody can tell"
    ),
}
"""Ends that came by way of the site's own scheduler, and whose doing each is."""


def verdict(end: Exit, attempt: Attempt) -> Verdict:
    """Whose doing the end was. Unknown stays unknown: silence is no answer, and it is charged to nobody."""
    if not end.certain:
        if end.rebooted:
            return Verdict("failed", Cause.SITE, "the machine was restarted while it ran; the end is the last sign of life")
        text = "its supervisor was lost, nobody saw the exit code"
        if end.native_state:
            text = f"its own record of the end is missing, and the site's scheduler says {end.native_state}: nobody knows how it ended"
        return Verdict("unknown", Cause.UNKNOWN, text)
    if end.refused_errno is not None:
        return _refused(end)
    if (by_site := BY_SITE.get(end.ended_by)) is not None:
        said = " ".join(word for word in (end.native_state, end.native_reason) if word)
        return replace(by_site, reason=f"{by_site.reason} ({said})" if said else by_site.reason)
    match end.stopped_for:
        case "asked":
            return _asked(attempt)
        case "wall_limit":
            return Verdict("failed", Cause.JOB, f"passed its wall limit of {attempt.spec.wall_s} s and was stopped")
        case "lease_ended":
            text = "the site could not hear the hub until its lease ended; it had asked to be stopped then and to be run again elsewhere"
            return Verdict("failed", Cause.PLATFORM, text)
    if end.out_of_memory and end.code != 0:
        return Verdict("failed", Cause.JOB, "passed its memory limit and was ended by the kernel (out of memory)")
    if end.signal is not None:
        return Verdict("failed", Cause.JOB, f"killed by signal {end.signal}, not by us")
    left = f"; {end.left_behind} processes it left behind were ended" if end.left_behind else ""
    if end.code == 0:
        return Verdict("succeeded", None, f"exit code 0{left}")
    return Verdict("failed", Cause.JOB, f"exit code {end.code}{left}")


def _asked(attempt: Attempt) -> Verdict:
    """Stopped on request: by whom is the hub's word; a preempted or replaced attempt is no cancelled job."""
    asked = attempt.stop
    if asked is None:
        return Verdict("cancelled", Cause.CANCELLED, "stopped on request")
    outcome = "cancelled" if asked.cause is Cause.CANCELLED else "failed"
    return Verdict(outcome, asked.cause, asked.reason or "stopped on request")


def _refused(end: Exit) -> Verdict:
    told = f"{end.refused_file}: {end.refused_text}"
    if end.refused_errno in _SITE_ERRNOS or end.refused_file.startswith(("uid ", "/sys/", "data")):
        return Verdict("failed", Cause.SITE, f"could not be started here: {told}")
    return Verdict("failed", Cause.JOB, f"its script could not be executed: {told} (is the interpreter of its first line installed?)")
