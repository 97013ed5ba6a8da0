"""Work that a head gave to a node: what is said to the node of it, and what its word makes of it. The head is a hub to its nodes in this.

A piece of work is offered when it is to start, goes once its claim is on the head's disk, and from then on only the node's word ends it. Before the
claim the head may take it back (`fenced`); after it silence changes nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable

import msgspec

from intertie.agent.core.attempts import Exit, verdict
from intertie.agent.core.leases import Deadline
from intertie.agent.core.model import Attempt, Failing, StartedRecord
from intertie.contracts.job import Cause, ResultRef
from intertie.contracts.link import (
    Claimed,
    Ended,
    EntryBase,
    ExitSeen,
    Go,
    HeldAttempt,
    Instruction,
    NotStarted,
    Offer,
    OfferRefused,
    ResultStored,
    Sealed,
    Settle,
    Started,
    Stop,
    StopAnswered,
    Withdraw,
)
from intertie.ids import AttemptId, InstructionId, JournalId, SiteName, is_digest
from intertie.link.journal import InstructionMark

LATE = frozenset({"go_too_late", "start_too_late", "lease_over", "rebooted", "withdrawn"})
"""Why a node did not start something that is nobody's fault."""

MOST_RESULT = 8 * 1024**3
"""Bytes; as much as outputs are packed into. They lie on the head's disk."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt on one node. Numbers are of instructions, 0 where none was given."""

    attempt: Attempt
    """Values of its environment are gone once it is claimed."""
    node: SiteName
    offer: Sealed | None = None
    """From the start until the claim."""
    offer_number: int = 0
    claim: JournalId | None = None
    """The node's journal that holds the claim."""
    go_number: int = 0
    fenced: bool = False
    """It is not to start, and no go was or will be given."""
    withdraw_number: int = 0
    stop_grace_s: int | None = None
    stop_number: int = 0
    stop_answered: bool = False
    deadline: Deadline | None = None
    started: StartedRecord | None = None
    refusal: Failing | None = None
    """It never ran and never will, by the node's word."""
    exit: Exit | None = None
    result: ResultRef | None = None
    log_bytes: int = 0
    log_tail: str = ""
    trimmed: bool = False
    forgotten: bool = False
    """The head's desk wants to hear no more of it; it stays here until the node has been told so."""
    settle_number: int = 0

    @property
    def gone(self) -> bool:
        """True once no go was given, or an end is known: it is not under way at the node."""
        return self.exit is not None or self.refusal is not None or self.go_number == 0

    @property
    def over(self) -> bool:
        return self.exit is not None or self.refusal is not None


Number = Callable[[], int]
"""The next instruction's."""


# --- what the head decides ---


def offered(work: Work, sealed: Sealed, number: Number) -> Work:
    """It is to start; once."""
    if work.offer_number or work.fenced:
        return work
    return msgspec.structs.replace(work, offer=sealed, offer_number=number())


def fenced(work: Work, number: Number) -> Work:
    """It is not to start: possible until the go is given."""
    if work.go_number or work.fenced:
        return work
    return msgspec.structs.replace(work, fenced=True, offer=None, withdraw_number=number() if work.offer_number else 0)


def stopping(work: Work, grace_s: int, number: Number) -> Work:
    """It is to end. Only for what has its go: what has none is fenced."""
    if work.over or not work.go_number or work.stop_grace_s is not None:
        return work
    return msgspec.structs.replace(work, stop_grace_s=grace_s, stop_number=number())


def settled(work: Work, number: Number, *, forget: bool) -> Work:
    """The desk needs its folder no more."""
    return msgspec.structs.replace(
        work, trimmed=True, forgotten=work.forgotten or forget, settle_number=work.settle_number or (number() if work.offer_number else 0)
    )


# --- what the node's word makes of it ---


def heard(work: Work, entry: EntryBase, journal: JournalId, started: Callable[[Started], StartedRecord], number: Number) -> Work:
    """The work after an entry of its node. What is repeated, or comes after the end, changes nothing."""
    match entry:
        case Claimed() if not work.over and not work.started:
            bare = msgspec.structs.replace(work, claim=journal, offer=None, attempt=msgspec.structs.replace(work.attempt, env={}))
            if work.fenced or work.go_number:
                return bare
            return msgspec.structs.replace(bare, go_number=number())
        case OfferRefused() | NotStarted() if not work.over and work.started is None:
            why = Failing(code=entry.code, text=entry.text, fault=isinstance(entry, OfferRefused) and entry.fault)
            return msgspec.structs.replace(work, refusal=why, offer=None)
        case Started() if work.started is None and work.exit is None:
            return msgspec.structs.replace(work, started=started(entry))
        case Ended() if not work.over:
            return msgspec.structs.replace(
                work, exit=exit_of(entry), result=_named(entry.result), log_bytes=entry.log_bytes, log_tail=entry.log_tail
            )
        case ResultStored() if entry.result is None:
            return msgspec.structs.replace(work, result=None)
        case StopAnswered():
            if entry.answer == "unknown_attempt" and not work.over and work.started is None:
                why = Failing(code="unknown_attempt", text=f"node {work.node} has never seen it")
                return msgspec.structs.replace(work, stop_answered=True, refusal=why)
            return msgspec.structs.replace(work, stop_answered=True)
    return work


def absent(work: Work, held: Collection[AttemptId], node: str) -> Work:
    """A node opened a journal anew, in its old place, and names what it holds: what is not named is surely gone."""
    if work.over or work.attempt.id in held or not work.go_number:
        return work
    if work.started is None:
        why = Failing(code="not_held", text=f"node {node} lost its journal, and nothing of this was begun there")
        return msgspec.structs.replace(work, refusal=why)
    return msgspec.structs.replace(work, exit=Exit(certain=False))


def removed(work: Work, now: StartedRecord) -> Work:
    """A person took the node out of the pool for good: nothing of it will ever be told. What may have run ends with nobody knowing how; `now` stands
    for its start, if that was never told."""
    if work.over:
        return work
    if not work.go_number:
        why = Failing(code="removed_externally", text=f"node {work.node} was taken out of the pool")
        return msgspec.structs.replace(work, refusal=why, offer=None)
    return msgspec.structs.replace(work, started=work.started or now, exit=Exit(certain=False))


def in_hand(held: Iterable[HeldAttempt]) -> frozenset[AttemptId]:
    """Those that a node will still speak of."""
    return frozenset(one.attempt for one in held)


def _named(result: ResultRef | None) -> ResultRef | None:
    """A result's digest becomes a file name at the head: what a node calls one and is none names no file there."""
    return result if result is not None and is_digest(result.digest) and result.size <= MOST_RESULT else None


def exit_of(entry: Ended) -> Exit:
    """As the node's supervisor saw it. A node that does not say is believed in its code and signal alone."""
    seen = entry.seen or ExitSeen(certain=entry.outcome != "unknown", stopped_for="asked" if entry.cause is Cause.CANCELLED else "")
    return Exit(
        certain=seen.certain,
        code=entry.exit_code,
        signal=entry.signal,
        refused_errno=seen.refused_errno,
        refused_file=seen.refused_file,
        refused_text=seen.refused_text,
        stopped_for=seen.stopped_for or None,
        left_behind=seen.left_behind,
        rebooted=seen.rebooted,
        out_of_memory=seen.out_of_memory,
        ran_us=entry.ran_us,
        user_s=entry.cpu_user_s,
        system_s=entry.cpu_system_s,
        max_rss_kib=entry.max_rss_kib,
    )


def seen_of(end: Exit) -> ExitSeen:
    """An end as a node tells it."""
    return ExitSeen(
        certain=end.certain,
        stopped_for=end.stopped_for or "",
        left_behind=end.left_behind,
        refused_errno=end.refused_errno,
        refused_file=end.refused_file,
        refused_text=end.refused_text,
        rebooted=end.rebooted,
        out_of_memory=end.out_of_memory,
    )


def began(work: Work) -> bool:
    """Its own code was reached: whatever it did then is no word on the node."""
    return work.exit is not None and not fault_of(work) and work.exit.certain


def fault_of(work: Work) -> str:
    """Why the node could not begin it, where that is the node's doing; empty otherwise (late, busy, the script's own)."""
    if work.refusal is not None:
        return f"{work.refusal.text} [{work.refusal.code}]" if work.refusal.fault or work.refusal.code == "not_startable" else ""
    if work.exit is not None and work.exit.refused_errno is not None:
        judged = verdict(work.exit, work.attempt)
        return judged.reason if judged.cause is Cause.SITE else ""
    return ""


def unstarted(work: Work) -> Exit:
    """What the desk is told of work that never ran."""
    why = work.refusal or Failing(code="fenced", text="given up before it started")
    number = errno.EEXIST if work.refusal is None else errno.ETIME if why.code in LATE else errno.EPERM
    return Exit(certain=True, refused_errno=number, refused_file=f"node {work.node}", refused_text=f"{why.text} [{why.code}]")


# --- what is said to the node ---


def instruction(work: Work, epoch: int, mark: InstructionMark) -> Instruction | None:
    """The one thing that is open of it; None if the node has answered all, or its word is on the way."""
    attempt, number = work.attempt, _open_number(work, mark, epoch)
    if not number:
        return None
    name, job, generation = InstructionId(f"ins-{epoch}-{number}"), attempt.job, max(1, attempt.generation)
    if number == work.settle_number:
        return Settle(id=name, number=number, epoch=epoch, attempt=attempt.id)
    if number == work.withdraw_number:
        return Withdraw(
            id=name, number=number, epoch=epoch, attempt=attempt.id, job=job, generation=generation, attempt_epoch=attempt.epoch
        )
    if number == work.stop_number:
        return Stop(
            id=name,
            number=number,
            epoch=epoch,
            attempt=attempt.id,
            job=job,
            generation=generation,
            reason="its head asks for its end",
            grace_s=work.stop_grace_s or 0,
        )
    if number == work.go_number:
        return Go(
            id=name,
            number=number,
            epoch=epoch,
            attempt=attempt.id,
            job=job,
            generation=generation,
            journal=work.claim,
            attempt_epoch=attempt.epoch,
        )
    assert work.offer is not None, "an offer is kept until it is claimed"
    return Offer(id=name, number=number, epoch=epoch, attempt=attempt.id, sealed=work.offer)


def _open_number(work: Work, mark: InstructionMark, epoch: int) -> int:
    """Of the instruction that is open; 0 if none is."""
    if work.settle_number and (work.over or not work.go_number):
        return work.settle_number if mark < InstructionMark(epoch, work.settle_number) else 0
    if work.over:
        return 0
    if work.fenced:
        return work.withdraw_number
    if work.stop_number and not work.stop_answered:
        return work.stop_number
    if work.started is not None:
        return 0
    return work.go_number or (work.offer_number if work.offer is not None else 0)
