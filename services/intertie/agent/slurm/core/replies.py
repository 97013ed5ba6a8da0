"""What a command of Slurm means by failing: refused, not now, or nobody knows whether it was taken.

By table over its standard error. What stands in no row of a submit is nobody's knowledge: a submit that says it failed has often been accepted
(BR-046), so its tag is looked for before anything else is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class Meaning(StrEnum):
    REFUSED = "refused"
    """It will never take this."""
    LATER = "later"
    """It did not take it, and may another time."""
    UNSURE = "unsure"
    """It may have taken it."""
    UNKNOWN_JOB = "unknown_job"
    """It has no such job (any more), which says nothing about how it ended (BR-011)."""
    OVER = "over"
    """There is nothing left to do."""
    UNKNOWN_OPTION = "unknown_option"
    """This version has no such option (BR-005)."""


# Words in standard error, lower case → (meaning, code). The first row that matches counts.
REPLIES: Sequence[tuple[str, Meaning, str]] = (
    ("timed out on send/recv", Meaning.UNSURE, "slurm.timed_out"),
    ("zero bytes were transmitted", Meaning.UNSURE, "slurm.cut_off"),
    ("unexpected message received", Meaning.UNSURE, "slurm.cut_off"),
    ("connection reset", Meaning.UNSURE, "slurm.cut_off"),
    ("broken pipe", Meaning.UNSURE, "slurm.cut_off"),
    ("unable to contact slurm controller", Meaning.LATER, "slurm.controller_away"),
    ("connection refused", Meaning.LATER, "slurm.controller_away"),
    ("in standby mode", Meaning.LATER, "slurm.controller_away"),
    ("problem talking to the database", Meaning.LATER, "slurm.accounting_away"),
    ("unable to contact slurmdbd", Meaning.LATER, "slurm.accounting_away"),
    ("munge_encode", Meaning.LATER, "slurm.munge_away"),
    ("munged", Meaning.LATER, "slurm.munge_away"),
    ("temporarily unable to accept job", Meaning.LATER, "slurm.busy"),
    ("temporarily unavailable", Meaning.LATER, "slurm.busy"),
    ("job submit limit", Meaning.LATER, "slurm.limit"),
    ("job violates accounting/qos policy", Meaning.LATER, "slurm.limit"),
    ("maximum number of jobs", Meaning.LATER, "slurm.limit"),
    ("partition in drain state", Meaning.LATER, "slurm.partition_drains"),
    ("invalid job id", Meaning.UNKNOWN_JOB, "slurm.no_such_job"),
    ("job/step already completing or completed", Meaning.OVER, "slurm.over"),
    ("unrecognized option", Meaning.UNKNOWN_OPTION, "slurm.option"),
    ("invalid option", Meaning.UNKNOWN_OPTION, "slurm.option"),
    ("invalid job state specified", Meaning.UNKNOWN_OPTION, "slurm.option"),
    ("requested node configuration is not available", Meaning.REFUSED, "slurm.no_such_node"),
    ("invalid generic resource", Meaning.REFUSED, "slurm.no_such_card"),
    ("invalid partition", Meaning.REFUSED, "slurm.partition"),
    ("invalid account or account/partition combination", Meaning.REFUSED, "slurm.account"),
    ("invalid qos", Meaning.REFUSED, "slurm.qos"),
    ("requested time limit is invalid", Meaning.REFUSED, "slurm.time_limit"),
    ("node count specification invalid", Meaning.REFUSED, "slurm.nodes"),
    ("more processors requested than permitted", Meaning.REFUSED, "slurm.processors"),
    ("memory specification can not be satisfied", Meaning.REFUSED, "slurm.memory"),
    ("access/permission denied", Meaning.REFUSED, "slurm.denied"),
    ("user's group not permitted", Meaning.REFUSED, "slurm.denied"),
    ("a password is required", Meaning.REFUSED, "slurm.sudo"),
    ("not allowed to execute", Meaning.REFUSED, "slurm.sudo"),
    ("is not in the sudoers file", Meaning.REFUSED, "slurm.sudo"),
    ("unknown user", Meaning.REFUSED, "slurm.no_such_user"),
    ("intertie-as:", Meaning.REFUSED, "slurm.wrapper"),
    ("batch job submission failed", Meaning.REFUSED, "slurm.refused"),
)


def meaning_of(error: str) -> tuple[Meaning, str]:
    """Of standard error; `unsure` where no row speaks of it."""
    told = error.lower()
    for words, meaning, code in REPLIES:
        if words in told:
            return meaning, code
    return Meaning.UNSURE, "slurm.unclear"


def last_words(error: bytes) -> str:
    """The part of standard error that a person needs."""
    lines = [line.strip() for line in error.decode("utf-8", errors="replace").splitlines() if line.strip()]
    return "; ".join(lines[-3:])[:500]
