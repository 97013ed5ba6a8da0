"""Which end an attempt is priced by, where its own outcome and cause do not say it alone: one payer per result of a job.

A `rerun` job whose site fell silent has two attempts and one result. The one that another has replaced is the platform's to pay (a failing site's,
if the site failed), unless it turns out to be the job's result after all: then the tenant pays it, and the platform pays the one that took its
place. What nobody could say anything of until the promised date (`lost`) is charged to nobody.
"""

from __future__ import annotations

from intertie.contracts.job import AttemptRecord, Cause
from intertie.metering.core.books import lost


def because(record: AttemptRecord) -> str:
    """`replaced`, `lost` or nothing: the rule that overrules the end that the record tells.

    A success that was replaced is the job's result: one that is not is told as `replaced` by the scheduler, which alone knows the survivor.
    """
    if record.replaced_by is not None and record.outcome != "succeeded":
        return "replaced"
    return "lost" if lost(record) else ""


def ending(record: AttemptRecord) -> tuple[str | None, Cause | None]:
    """(outcome, cause) to price by."""
    match because(record):
        case "replaced":
            return "cancelled", Cause.SITE if record.cause is Cause.SITE else Cause.PLATFORM
        case "lost":
            return "lost", None
    return record.outcome, record.cause
