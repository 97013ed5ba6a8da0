"""Whether a segment may be believed and to whom it belongs: an ordered ladder of reasons to wait, and nothing is ever dropped.

A site is paid by what it says here, so every word is proven: the server names the lane's site, the site's key signed the segment, the
scheduler's key signed the attribution inside, and both agree with the scheduler's own record. What a genuine key says beyond that is bounded by
what the attempt was given: these devices, since this offer, for so long at most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from intertie.contracts.base import decode
from intertie.contracts.job import AttemptRecord, AttemptSnapshot, Attribution
from intertie.contracts.link import IslandedGrant, Sealed
from intertie.contracts.usage import Segment, UsagePhase
from intertie.errors import Refused
from intertie.ids import Digest, SegmentId, SiteName
from intertie.metering.core.evidence import Received, SiteKeys
from intertie.rating.union import EARLIEST

Verify = Callable[[Sealed, str], bool]
"""(sealed, public key) → whether that key signed exactly these bytes."""


class Reason(StrEnum):
    """Why a segment waits in suspense. Ordered: the first that applies is told."""

    OTHER_SITE = "other_site"
    SITE_KEY_UNKNOWN = "site_key_unknown"
    BAD_SEAL = "bad_seal"
    NO_ATTRIBUTION = "no_attribution"
    ATTRIBUTION_BAD_SEAL = "attribution_bad_seal"
    ATTRIBUTION_MISMATCH = "attribution_mismatch"
    CONFLICT = "conflict"
    ATTEMPT_UNKNOWN = "attempt_unknown"
    SUPERSEDED = "superseded"
    SAID_AGAIN = "said_again"
    RECORD_MISMATCH = "record_mismatch"
    NEVER_RAN = "never_ran"
    OTHER_DEVICES = "other_devices"
    IMPOSSIBLE_TIMES = "impossible_times"
    OVER_WALL = "over_wall"
    NO_SPEC = "no_spec"
    NO_PRICE = "no_price"


TEXTS: Mapping[Reason, str] = {
    Reason.OTHER_SITE: "the segment names another site than the lane that brought it",
    Reason.SITE_KEY_UNKNOWN: "no key of this site is known yet",
    Reason.BAD_SEAL: "the segment is not signed by a valid key of this site",
    Reason.NO_ATTRIBUTION: "the segment carries no signed attribution",
    Reason.ATTRIBUTION_BAD_SEAL: "the attribution is not signed by the scheduler",
    Reason.ATTRIBUTION_MISMATCH: "the attribution belongs to another attempt, site or pool",
    Reason.CONFLICT: "another content under the same segment id was accepted before",
    Reason.ATTEMPT_UNKNOWN: "the scheduler's record of this attempt is not here yet",
    Reason.SUPERSEDED: "a person decided that another content under the same segment id counts",
    Reason.SAID_AGAIN: "the same use was said before, and counts as it was said first",
    Reason.RECORD_MISMATCH: "the attribution differs from the scheduler's record",
    Reason.NEVER_RAN: "the scheduler's record says that this attempt never ran",
    Reason.OTHER_DEVICES: "the segment claims devices, or more of them, that the attempt was not given",
    Reason.IMPOSSIBLE_TIMES: "the segment lies before the offer, after its arrival here, or ends before it starts",
    Reason.OVER_WALL: "the attempt ran longer than its wall limit allows",
    Reason.NO_SPEC: "no agreed meter spec",
    Reason.NO_PRICE: "the agreed meter spec has no price for this device",
}

RESOLVABLE = frozenset(
    {
        Reason.SITE_KEY_UNKNOWN,
        Reason.BAD_SEAL,
        Reason.ATTRIBUTION_BAD_SEAL,
        Reason.ATTEMPT_UNKNOWN,
        Reason.RECORD_MISMATCH,
        Reason.NEVER_RAN,
        Reason.NO_SPEC,
        Reason.NO_PRICE,
    }
)
"""Reasons that new evidence (a key, a record, an agreement) may lift; the others need a person."""

DECIDABLE = frozenset({Reason.CONFLICT, Reason.IMPOSSIBLE_TIMES, Reason.OVER_WALL})
"""Reasons that a named person may lift: everything else of the segment is proven, and only its size or its double is in doubt."""

SETTLED = frozenset({"", Reason.SUPERSEDED, Reason.SAID_AGAIN})
"""What waits for nothing: it counts, the same use counts already, or a person decided that another does."""

COUNTED = frozenset({"", Reason.NO_SPEC, Reason.NO_PRICE})
"""Segments that are believed: they count towards completeness even while their price is not agreed."""

NEVER_RAN = frozenset({"refused", "withdrawn", "not_started"})
"""States of an attempt that ended before it began."""


# A site's clock may be this wrong and its usage is still believed: what it measures are differences, and an incident says that it is off. A
# site whose clock is further off has long been unable to log in.
CLOCK_TOLERANCE = timedelta(days=1)

# What is stopped at its wall limit takes its grace, and a busy host some more. Beyond it somebody looks: either the site could not end the job
# in time, which is not its tenant's to pay unasked, or the time was never used.
WALL_SLACK = timedelta(minutes=10)
WALL_SLACK_SHARE = 10


@dataclass(frozen=True, slots=True)
class _Run:
    """When the attempt ran by what is believed so far: disjoint stretches in order."""

    stretches: tuple[tuple[datetime, datetime], ...] = ()

    def with_(self, start: datetime, end: datetime) -> _Run:
        apart = [(s, e) for s, e in self.stretches if e < start or s > end]
        touching = [(s, e) for s, e in self.stretches if not (e < start or s > end)]
        joined = (min([start, *(s for s, _ in touching)]), max([end, *(e for _, e in touching)]))
        return _Run(tuple(sorted([*apart, joined])))

    @property
    def length(self) -> timedelta:
        return sum((end - start for start, end in self.stretches), timedelta())


def judge(
    items: Sequence[Received],
    snapshot: AttemptSnapshot | None,
    keys: Mapping[SiteName, SiteKeys],
    scheduler_keys: frozenset[str],
    verify: Verify,
) -> list[Received]:
    """Each segment with what is known of it now; `suspense` empty where it counts (its price is judged elsewhere). Order is kept."""
    record = snapshot.record if snapshot else None
    decided = chosen(items)
    accepted = dict(decided)
    first: dict[SegmentId, Segment] = {}
    judged: list[Received] = []
    run = _Run()
    for item in items:
        reason, word = _prove(item, keys.get(item.site, SiteKeys()), scheduler_keys, verify)
        if word is not None:
            item = replace(item, proven=True, tenant=word.tenant, grant=word if isinstance(word, IslandedGrant) else None)
            reason = _place(item, word, record, accepted, decided)
        if reason == Reason.CONFLICT and same_use(item.segment, first[item.segment.id]):
            reason = Reason.SAID_AGAIN
        if not reason and snapshot is not None:
            reason, run = _bound(item, snapshot, run)
        if not reason:
            accepted[item.segment.id] = item.digest
            first[item.segment.id] = item.segment
        judged.append(replace(item, suspense=str(reason)))
    return judged


def same_use(one: Segment, other: Segment) -> bool:
    """Whether both measure the same. An agent that makes a lost journal whole from its job folders knows neither whether its site was alone then
    nor how far its clock was off: what the hub heard first says that."""
    return msgspec.structs.replace(one, islanded=other.islanded, anchor=other.anchor) == other


def chosen(items: Sequence[Received]) -> dict[SegmentId, Digest]:
    """Segment ids of which a person decided which content counts; of several decisions the last."""
    decided = [item for item in items if item.lifted(Reason.CONFLICT)]
    return {item.segment.id: item.digest for item in sorted(decided, key=lambda item: item.lifted(Reason.CONFLICT) or EARLIEST)}


Word = Attribution | IslandedGrant
"""What the scheduler sealed: whose one attempt is, or what a tenant may use of a site that is alone."""


def _prove(item: Received, keys: SiteKeys, scheduler_keys: frozenset[str], verify: Verify) -> tuple[Reason | str, Word | None]:
    """What a segment proves by itself: who measured it, and the word that the scheduler gave."""
    segment = item.segment
    if segment.site != item.site:
        return Reason.OTHER_SITE, None
    if not item.proven:
        if not keys.valid and not keys.revoked:
            return Reason.SITE_KEY_UNKNOWN, None
        if not any(verify(item.sealed, key) for key in sorted(keys.valid)):
            return Reason.BAD_SEAL, None
    if segment.attribution is None:
        return Reason.NO_ATTRIBUTION, None
    if not item.proven and not any(verify(segment.attribution, key) for key in sorted(scheduler_keys)):
        return Reason.ATTRIBUTION_BAD_SEAL, None
    word = _word(segment.attribution)
    if isinstance(word, IslandedGrant):
        return ("", word) if (word.site, word.kind) == (segment.site, segment.kind) else (Reason.ATTRIBUTION_MISMATCH, None)
    if word is None or (word.attempt, word.site, word.pool) != (segment.attempt, segment.site, segment.pool):
        return Reason.ATTRIBUTION_MISMATCH, None
    return "", word


def _word(sealed: Sealed) -> Word | None:
    """An attribution names its job and attempt, a grant its limits: neither reads as the other."""
    try:
        return decode(sealed.payload, Attribution, what="attribution")
    except Refused:
        pass
    try:
        return decode(sealed.payload, IslandedGrant, what="islanded allowance")
    except Refused:
        return None


def _place(
    item: Received, word: Word, record: AttemptRecord | None, accepted: Mapping[SegmentId, Digest], decided: Collection[SegmentId]
) -> Reason | str:
    """How a proven segment stands to what is already known."""
    if accepted.get(item.segment.id, item.digest) != item.digest:
        return Reason.SUPERSEDED if item.segment.id in decided else Reason.CONFLICT
    if record is None:
        return Reason.ATTEMPT_UNKNOWN
    if isinstance(word, IslandedGrant):
        # An allowance says nothing of what the hub itself offered: by an old one that would have another price, and any beginning.
        same = record.islanded_submit and (word.tenant, word.site, word.kind) == (record.tenant, record.site, record.kind)
    else:
        told = (word.tenant, word.job, word.site, word.pool, word.spec, word.spec_revision)
        same = told == (record.tenant, record.job, record.site, record.pool, record.spec, record.spec_revision)
    if not same:
        return Reason.RECORD_MISMATCH
    if record.state in NEVER_RAN:
        return Reason.NEVER_RAN
    return ""


def _bound(item: Received, snapshot: AttemptSnapshot, run: _Run) -> tuple[Reason | str, _Run]:
    """Whether it fits what the attempt was given, and the run as it is with it."""
    segment, record = item.segment, snapshot.record
    unknown_device = not set(segment.devices) <= set(record.devices)
    if unknown_device or segment.kind is not record.kind or segment.quantity_milli > 1_000 * len(set(segment.devices)):
        return Reason.OTHER_DEVICES, run
    # Differences first: a bound at the end of time cannot be moved by a day.
    early, late = record.offered_at - segment.start, segment.end - item.received_at
    # What a site took in by itself began before the hub heard of it, by as long as the site was alone.
    strange = late > CLOCK_TOLERANCE or (early > CLOCK_TOLERANCE and item.grant is None)
    if segment.end < segment.start or (strange and not item.lifted(Reason.IMPOSSIBLE_TIMES)):
        return Reason.IMPOSSIBLE_TIMES, run
    if segment.phase is not UsagePhase.RUN:
        return "", run
    wall = timedelta(seconds=snapshot.wall_s)
    longer = run.with_(segment.start, segment.end)
    over = longer.length > wall + wall / WALL_SLACK_SHARE + WALL_SLACK
    return (Reason.OVER_WALL, run) if over and not item.lifted(Reason.OVER_WALL) else ("", longer)
