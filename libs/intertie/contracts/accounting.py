"""A site's own accounting as the third book, and what comes of comparing it with the scheduler's and the meter's, attempt by attempt.

Our runs travel one by one. Work of mapped accounts that did not come through us travels as numbers beside the account's name; the owner's own
users never travel at all.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from intertie.contracts.base import Contract, Instant, NonNegative, Positive, Text
from intertie.ids import AttemptId, SiteName

RECORDS_PER_PART = 200
"""Runs in one entry: some 60 KiB, far below what a batch carries."""
MOST_US = 10**15
"""Thirty years: what is longer is no run."""
Micros = Annotated[int, msgspec.Meta(ge=0, le=MOST_US)]
Short = Annotated[str, msgspec.Meta(max_length=256)]


class NativeRecord(Contract, frozen=True, kw_only=True):
    """One run of ours as the site's own scheduler recorded it. (cluster, native id, submitted) names it; ids alone are used again."""

    cluster: Short
    native_id: Short
    submitted: Instant | None
    tag: AttemptId
    state: Short
    """Its scheduler's own word."""
    started: Instant | None
    ended: Instant | None
    """None: it ran on when this was read."""
    elapsed_us: Micros | None
    suspended_us: Micros = 0
    resolution_us: Micros = 1_000_000
    """What its clock can tell apart: whole seconds for most."""
    devices: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None
    """None: not recorded there."""
    account: Short = ""
    restarts: NonNegative = 0


class BypassUse(Contract, frozen=True, kw_only=True):
    """Work of a mapped account that did not come through us: numbers, and the account's name."""

    account: Short
    runs: Positive
    device_us: NonNegative
    """Devices × microseconds, as far as both were recorded."""
    unknown: NonNegative = 0
    """Runs of which the devices or the time were not recorded."""


class NativeDay(Contract, frozen=True, kw_only=True):
    """What a site's own accounting holds of one day, UTC by the site's clock; sealed with the site's key, in parts. Read again, it replaces itself."""

    site: SiteName
    cluster: Short
    day: Annotated[str, msgspec.Meta(pattern="^20[0-9]{2}-[01][0-9]-[0-3][0-9]$")]
    read_at: Instant
    part: Positive
    parts: Positive
    records: Annotated[list[NativeRecord], msgspec.Meta(max_length=RECORDS_PER_PART)] = []
    bypass: Annotated[list[BypassUse], msgspec.Meta(max_length=RECORDS_PER_PART)] = []
    """In the first part."""


class Differs(StrEnum):
    """How books of one attempt differ. Of several, each is told."""

    MISSING = "missing"
    """It ran by our books; the site's own has nothing of it, although it was read for that time."""
    EXTRA = "extra"
    """A ghost: the site's own has a run under our tag, and by our books nothing ran."""
    DOUBLED = "doubled"
    """Two native runs at the same time for one attempt."""
    RUNAWAY = "runaway"
    """It has ended by our books, and by the site's own it ran on."""
    DURATION = "duration"
    QUANTITY = "quantity"
    ATTRIBUTION = "attribution"
    """Another account than the mapped one."""
    CLOCK = "clock"
    """As long, but at another time."""
    METER = "meter"
    """The scheduler's book and the meter's differ between themselves."""


class Difference(Contract, frozen=True, kw_only=True):
    """One difference of one attempt, with the numbers on both sides."""

    kind: Differs
    attempt: AttemptId
    native_id: Short = ""
    ours: Short
    theirs: Short
    beyond: Short = ""
    """The tolerance that it passes: stated resolution, clock error, what a scheduler does around a run."""
    text: Text = ""


class SiteReconciliation(Contract, frozen=True, kw_only=True):
    """A site's period: first the counts, then each attempt. Nothing is corrected by it."""

    site: SiteName
    period: str
    clusters: list[Short] = []
    days_read: NonNegative
    """Days of the period, so far, of which the site's own accounting is here."""
    days_due: NonNegative
    incomplete_days: list[str] = []
    """Days of which parts are missing, or that no key of the site proves."""
    our_runs: NonNegative
    """Attempts that ran, on days that were read."""
    native_runs: NonNegative
    our_milli_us: NonNegative
    """Thousandths of a device × microseconds."""
    native_milli_us: NonNegative | None
    """None: some run of the site's has no devices or no time recorded."""
    counts_agree: bool
    compared: NonNegative
    differences: list[Difference] = []
    more: NonNegative = 0
    """Differences beyond those listed."""
    bypass: list[BypassUse] = []


class ReconciliationQuery(Contract, frozen=True, kw_only=True):
    """`qry.metering.reconciliation`: of one site or all, in a period (`2026-12`; empty: this month)."""

    site: SiteName | None = None
    period: str = ""


class ReconciliationReply(Contract, frozen=True, kw_only=True):
    """Sites with a book of their own, by name."""

    period: str
    sites: list[SiteReconciliation]
