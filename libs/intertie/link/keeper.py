"""The keeper's side of a lane: what a `Sync` means against what is on disk here. `judge` decides; `intertie.lane.keeper` loads, commits, answers.

Every state but OK acknowledges nothing: the site forgets nothing and starts nothing. BEHIND asks to send again; the others (forked, restored on
either side, superseded) end only by a comparison of both sides and are reported as faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from intertie.contracts.base import BATCH_BYTES
from intertie.contracts.link import LINK_VERSION, Clocks, Lane, LaneState, Sync
from intertie.errors import Refused
from intertie.ids import AttemptId, Digest, JournalId, SessionId, SiteName
from intertie.link.clocks import by_arrival
from intertie.link.journal import first_digest, next_digest

# A batch of the smallest entries (about 100 bytes) within BATCH_BYTES; more means that somebody builds batches by another rule.
BATCH_ENTRIES = 4_096

# One entry larger than a batch still travels, alone: anything larger than this could not be carried back with its envelope in NATS' 1 MiB.
SYNC_BYTES = BATCH_BYTES * 3


@dataclass(frozen=True, slots=True)
class SiteRow:
    """What a keeper has on disk of one site's journal on one lane."""

    site: SiteName
    lane: Lane
    session: SessionId
    journal: JournalId
    ack_through: int
    digest: Digest
    """The chain's digest at `ack_through`."""
    safe_through: int
    interpreted_through: int
    """Every entry up to here was interpreted or is in quarantine."""
    heard: int
    """Grows with every sync of the site's session, committed before the answer. Silence is judged by its growth, by a leader's own clock."""
    last_heard: datetime
    """For people: no rule reads it."""
    last_nonce: int
    taken_nonce: int
    at_head: bool
    """The site's journal had nothing more than what is here, when it last spoke."""
    running: tuple[AttemptId, ...] | None
    """At head: every attempt that holds devices there (perhaps some more that ended this moment); None = not said."""
    instruction_epoch: int
    instruction_mark: int
    settings_revision: int
    clocks: Clocks | None
    clock_offset_s: float
    """Estimate of hub minus site wall clock."""
    clock_error_s: float
    quarantined: int = 0
    """Entries held and not interpretable."""


@dataclass(frozen=True, slots=True)
class NewEntry:
    """One entry that continues the chain."""

    seq: int
    digest: Digest
    raw: bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to commit and what to answer."""

    state: LaneState
    ack_through: int = 0
    """Through here the site's entries are proven equal to those on disk. BEHIND: send again from the next one. Otherwise 0."""
    safe_through: int = 0
    row: SiteRow | None = None
    """To be saved before the answer; None: nothing changes."""
    new: Sequence[NewEntry] = ()
    why: str = ""
    """For people: what was found, when the state is a fault."""


def check(sync: Sync, site: SiteName, lane: Lane) -> None:
    """Refuse what is no sync of this site and lane. `site` is from the subject, where the server put it; the payload proves nothing."""
    if sync.v != LINK_VERSION:
        raise Refused(
            "link.version", f"site {site} speaks link version {sync.v}, this keeper {LINK_VERSION}", next_step="upgrade the older side"
        )
    if sync.site != site:
        raise Refused("link.site_mismatch", f"a sync on the subject of site {site} says that it is from site {sync.site}")
    if sync.lane != lane:
        raise Refused("link.lane_mismatch", f"a sync of lane {sync.lane} arrived on lane {lane}")
    size = sum(len(bytes(entry)) for entry in sync.entries)
    if len(sync.entries) > BATCH_ENTRIES or size > SYNC_BYTES:
        raise Refused(
            "link.too_large", f"site {site} sent {len(sync.entries)} entries of {size} bytes, at most {BATCH_ENTRIES} of {SYNC_BYTES}"
        )


def last_seq(sync: Sync) -> int:
    """Number of the last entry that the sync vouches for."""
    return sync.first_seq - 1 + len(sync.entries)


def wanted_digest(row: SiteRow | None, sync: Sync) -> int | None:
    """Which entry's stored digest `judge` needs: only where the whole batch lies below what is on disk here."""
    if row is None or row.journal != sync.journal or not 0 < last_seq(sync) < row.ack_through:
        return None
    return last_seq(sync)


def judge(row: SiteRow | None, stored: Digest | None, sync: Sync, received: datetime, *, epoch: int, single: bool) -> Verdict:
    """The ladder, in order; the first that applies decides.

    `row` is what is on disk (None: a site never heard of), `stored` the digest asked for by `wanted_digest`, `received` the hub's wall clock at the
    sync's arrival, `epoch` this service's, `single` true where a commit here is all the safety there is (`durability: single`).
    """
    if row is not None and _is_late(row, sync):
        return Verdict(LaneState.BUSY)
    if sync.instruction_epoch > epoch:
        return Verdict(LaneState.HUB_RESTORED, why=f"the site knows epoch {sync.instruction_epoch}, this service is in {epoch}")
    if row is not None and row.journal != sync.journal:
        return Verdict(LaneState.AGENT_RESTORED, why=f"the site's journal was {row.journal} and is now {sync.journal}")
    if row is not None and row.session != sync.session and sync.taken_nonce > 0:
        return Verdict(LaneState.SUPERSEDED, why=f"session {sync.session} goes on although session {row.session} took over")
    return _judge_chain(row, stored, sync, received, single)


def _is_late(row: SiteRow, sync: Sync) -> bool:
    """True for a try that a later one overtook: it says nothing about now. The site waits for the later one's answer only."""
    if row.session == sync.session:
        return sync.nonce <= row.last_nonce
    same_boot = row.clocks is not None and row.clocks.kernel_boot == sync.clocks.kernel_boot
    return same_boot and row.clocks is not None and sync.clocks.boot_s < row.clocks.boot_s


def _judge_chain(row: SiteRow | None, stored: Digest | None, sync: Sync, received: datetime, single: bool) -> Verdict:
    """Does the batch continue, repeat, skip or contradict what is on disk?"""
    ack = row.ack_through if row else 0
    digest = row.digest if row else first_digest(sync.journal)
    last = last_seq(sync)
    if sync.first_seq > ack + 1:
        if sync.forgotten_through > ack:
            why = f"the site was told to forget through {sync.forgotten_through}, here the journal ends at {ack}"
            return Verdict(LaneState.HUB_RESTORED, why=why)
        return Verdict(LaneState.BEHIND, ack_through=ack, row=_heard(row, sync, received, ack, digest, single))
    entries = _chain(sync)
    if last < ack:
        if stored is None and last > 0:
            return Verdict(LaneState.AGENT_RESTORED, why=f"the site's journal ends at {last}, before anything that is still kept here")
        before = stored if last > 0 else first_digest(sync.journal)
        if (entries[-1].digest if entries else sync.digest_before) != before:
            return Verdict(LaneState.FORKED, why=f"entry {last} differs from what is on disk here")
        if sync.at_head:
            return Verdict(LaneState.AGENT_RESTORED, why=f"the site's journal ends at {last}, here it ends at {ack}")
        saved = _heard(row, sync, received, ack, digest, single)
        return Verdict(LaneState.OK, ack_through=last, safe_through=min(saved.safe_through, last), row=saved)
    overlap = ack - sync.first_seq + 1
    if (entries[overlap - 1].digest if overlap else sync.digest_before) != digest:
        return Verdict(LaneState.FORKED, why=f"entry {ack} differs from what is on disk here")
    new = entries[overlap:]
    saved = _heard(row, sync, received, last, new[-1].digest if new else digest, single)
    return Verdict(LaneState.OK, ack_through=last, safe_through=saved.safe_through, row=saved, new=new)


def _chain(sync: Sync) -> list[NewEntry]:
    """The batch with the digests that its own beginning implies."""
    digest, chain = sync.digest_before, list[NewEntry]()
    for offset, entry in enumerate(sync.entries):
        raw = bytes(entry)
        digest = next_digest(digest, raw)
        chain.append(NewEntry(sync.first_seq + offset, digest, raw))
    return chain


def _heard(row: SiteRow | None, sync: Sync, received: datetime, ack: int, digest: Digest, single: bool) -> SiteRow:
    """The row after this sync was heard."""
    answered = row.last_heard if row and row.session == sync.session and 0 < sync.taken_nonce == row.last_nonce else None
    known = (row.clock_offset_s, row.clock_error_s) if row and row.clocks else None
    age_s = (received - row.last_heard).total_seconds() if row else 0.0
    own = sync.clocks
    told = (own.offset_s, own.error_s) if own.offset_s is not None and own.error_s is not None else None
    offset_s, error_s = by_arrival(known, age_s, own.utc, received, answered, told)
    at_head = sync.at_head and last_seq(sync) == ack
    return SiteRow(
        site=sync.site,
        lane=sync.lane,
        session=sync.session,
        journal=sync.journal,
        ack_through=ack,
        digest=digest,
        safe_through=ack if single else (row.safe_through if row else 0),
        interpreted_through=row.interpreted_through if row else 0,
        heard=(row.heard if row else 0) + 1,
        last_heard=received,
        last_nonce=sync.nonce,
        taken_nonce=sync.taken_nonce,
        at_head=at_head,
        running=tuple(sync.running) if at_head and sync.running is not None else None,
        instruction_epoch=sync.instruction_epoch,
        instruction_mark=sync.instruction_mark,
        settings_revision=sync.settings_revision,
        clocks=sync.clocks,
        clock_offset_s=offset_s,
        clock_error_s=error_s,
        quarantined=row.quarantined if row else 0,
    )
