"""The keeper's side of a lane: what a `Sync` means against what is on disk here. `judge` decides; `intertie.lane.keeper` loads, commits, answers.

Every state but OK acknowledges nothing: the site forgets nothing and starts nothing. BEHIND asks to send again. FORKED and both kinds of restored end
by a new journal (`JournalOpened`), SUPERSEDED and CONTESTED by a person at the site, VERSION by one at the hub (ADR 0006). All of these are faults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from types import MappingProxyType

import msgspec

from intertie.contracts.base import BATCH_BYTES
from intertie.contracts.link import LINK_VERSION, OLDEST_VERSION, Clocks, JournalOpened, Lane, LaneState, Sync
from intertie.errors import Refused
from intertie.ids import AttemptId, Digest, JournalId, SessionId, SiteName
from intertie.link.clocks import by_arrival
from intertie.link.journal import first_digest, next_digest

# A batch of the smallest entries (about 100 bytes) within BATCH_BYTES; more means that somebody builds batches by another rule.
BATCH_ENTRIES = 4_096

# Of a session, a journal, a place, a boot: all of a site's row is read at each look at silence, so it stays a row.
NAME_LENGTH = 128
MOST_RUNNING = 10_000

# One entry larger than a batch still travels, alone: anything larger than this could not be carried back with its envelope in NATS' 1 MiB.
SYNC_BYTES = BATCH_BYTES * 3

# So many changes of place within this time are two agents with one identity, each restarted whenever it was superseded.
CONTESTED_MOVES = 3
CONTESTED_WITHIN = timedelta(minutes=10)

HEARD = (LaneState.OK, LaneState.BEHIND)
"""States in which a sync counts as heard."""

# `intertie hub restored` goes above what is told here; a hostile site must not take it to the end of the numbers.
MOST_EPOCH = 1_000_000_000


@dataclass(slots=True)
class SiteRow:
    """What a keeper has on disk of one site's journal on one lane. Nobody writes into one: it is not frozen because making so many fields frozen
    costs a fifth of an idle sync."""

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
    place: str = ""
    """Where the journal lies; empty for an agent of link version 1."""
    moves: tuple[datetime, ...] = ()
    """When the place changed, the last `CONTESTED_MOVES` of them."""
    state: LaneState = LaneState.OK
    """What the lane's last sync was answered: one that was superseded is another agent's and changes nothing here."""
    state_since: datetime | None = None
    """When it came into `state`; None if it was never in another."""
    epoch_told: int = 0
    """The highest epoch of this service that the site said it knows."""
    version: int = 1
    """Link version that the site spoke last."""


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
    """Through here the site's entries are proven equal to those on disk. BEHIND: send again from the next one. HUB_RESTORED: where `journal` ends
    here. Otherwise 0."""
    safe_through: int = 0
    row: SiteRow | None = None
    """To be saved before the answer; None: nothing changes. It was *heard* only where the state is OK or BEHIND."""
    new: Sequence[NewEntry] = ()
    why: str = ""
    """For people: what was found, when the state is a fault."""
    journal: JournalId | None = None
    """HUB_RESTORED: the journal that the row names; None if there is none."""


def check(sync: Sync, site: SiteName, lane: Lane) -> None:
    """Refuse what is no sync of this site and lane. `site` is from the subject, where the server put it; the payload proves nothing."""
    if sync.v < OLDEST_VERSION:
        raise Refused(
            "link.version",
            f"site {site} speaks link version {sync.v}, this keeper {OLDEST_VERSION} to {LINK_VERSION}",
            next_step="upgrade the agent",
        )
    if sync.instruction_epoch > MOST_EPOCH:
        raise Refused("link.epoch", f"site {site} says that it knows epoch {sync.instruction_epoch}, no service gets beyond {MOST_EPOCH}")
    if sync.site != site:
        raise Refused("link.site_mismatch", f"a sync on the subject of site {site} says that it is from site {sync.site}")
    if sync.lane != lane:
        raise Refused("link.lane_mismatch", f"a sync of lane {sync.lane} arrived on lane {lane}")
    names = (sync.session, sync.journal, sync.place, sync.clocks.kernel_boot)
    if max(map(len, names)) > NAME_LENGTH or len(sync.running or ()) > MOST_RUNNING or sum(map(len, sync.running or ())) > SYNC_BYTES // 2:
        raise Refused("link.too_long", f"site {site} names itself or what runs there in more than {NAME_LENGTH} characters each")
    size = sum(len(bytes(entry)) for entry in sync.entries) if sync.entries else 0
    if len(sync.entries) > BATCH_ENTRIES or size > SYNC_BYTES:
        raise Refused(
            "link.too_large", f"site {site} sent {len(sync.entries)} entries of {size} bytes, at most {BATCH_ENTRIES} of {SYNC_BYTES}"
        )


def last_seq(sync: Sync) -> int:
    """Number of the last entry that the sync vouches for."""
    return sync.first_seq - 1 + len(sync.entries)


def wanted_digest(row: SiteRow | None, sync: Sync) -> int | None:
    """Which entry's stored digest (of the sync's journal) `judge` needs: of the last one where the whole batch lies below what is on disk here,
    of the first where a journal claims to be new."""
    if row is None or row.journal != sync.journal:
        return 1 if opening(sync) is not None else None
    return last_seq(sync) if 0 < last_seq(sync) < row.ack_through else None


def wanted_ends(sync: Sync) -> list[JournalId]:
    """Of which journals `judge` needs the last entry that is on disk here: those before a new one."""
    opened = opening(sync)
    return [past.journal for past in opened.past] if opened is not None else []


def opening(sync: Sync) -> JournalOpened | None:
    """What a batch that begins a new journal begins with."""
    if sync.first_seq != 1 or not sync.entries:
        return None
    try:
        return msgspec.json.decode(sync.entries[0], type=JournalOpened)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def judge(
    row: SiteRow | None,
    stored: Digest | None,
    sync: Sync,
    received: datetime,
    *,
    epoch: int,
    single: bool,
    ends: Mapping[JournalId, int] = MappingProxyType({}),
) -> Verdict:
    """The ladder, in order; the first rung that applies decides.

    `row` is what is on disk (None: a site never heard of), `stored` the digest asked for by `wanted_digest`, `ends` the last entries asked for by
    `wanted_ends` (of those that are here), `received` the hub's wall clock at the sync's arrival, `epoch` this service's, `single` true where a
    commit here is all the safety there is (`durability: single`).
    """
    if row is not None and _is_late(row, sync):
        return Verdict(LaneState.BUSY)
    if sync.v > LINK_VERSION:
        why = (
            f"the site speaks link version {sync.v}, this hub knows {OLDEST_VERSION} to {LINK_VERSION}: upgrade the hub, what runs goes on"
        )
        return _stands(LaneState.VERSION, row, sync, received, why)
    if row is not None and row.session != sync.session and not _goes_on(row, sync):
        # A hub put back to before a takeover names a session that may be gone: who speaks first in the raised epoch is in charge.
        undone = 0 < row.epoch_told < epoch
        if sync.taken_nonce > 0 and not undone and not _contested(row.moves, received):
            return Verdict(LaneState.SUPERSEDED, why=f"session {sync.session} goes on although session {row.session} took over")
        taken = _taken_over(row, sync, received)
        if _contested(taken.moves, received):
            why = "agents in different places take over from each other: stop one of the two; the other goes on ten minutes later"
            return _stands(LaneState.CONTESTED, taken, sync, received, why)
        found = _judge_content(taken, stored, sync, received, epoch, single, ends)
        # Who cannot be joined to what is here takes nothing over: the agent in charge goes on.
        return found if found.state in HEARD else replace(found, row=_stands(found.state, row, sync, received, found.why).row)
    if row is not None and _contested(row.moves, received):
        return _stands(LaneState.CONTESTED, row, sync, received, "ten minutes after the last change of place this agent goes on")
    return _judge_content(row, stored, sync, received, epoch, single, ends)


def beat(row: SiteRow, sync: Sync, received: datetime, *, epoch: int, single: bool) -> SiteRow | None:
    """The row after an idle sync that goes on exactly where `row` ends, which `judge` too would call OK; None: ask `judge`. Most syncs are such."""
    if sync.entries or not sync.at_head or sync.first_seq != row.ack_through + 1 or sync.digest_before != row.digest:
        return None
    if sync.session != row.session or sync.journal != row.journal or sync.place != row.place or sync.nonce <= row.last_nonce:
        return None
    if row.state is not LaneState.OK or row.heard == 0 or sync.v > LINK_VERSION or sync.instruction_epoch > epoch:
        return None
    if _contested(row.moves, received):
        return None
    return _heard(row, sync, received, row.ack_through, row.digest, single, LaneState.OK)


def _judge_content(
    row: SiteRow | None, stored: Digest | None, sync: Sync, received: datetime, epoch: int, single: bool, ends: Mapping[JournalId, int]
) -> Verdict:
    """The rungs about epoch, journal and chain, for the session in charge."""
    if sync.instruction_epoch > epoch:
        why = f"the site knows epoch {sync.instruction_epoch}, this service is in {epoch}: run `intertie hub restored`"
        return _stands(LaneState.HUB_RESTORED, row, sync, received, why)
    if row is not None and row.heard > 0 and row.journal == sync.journal:
        return _judge_chain(row, stored, sync, received, single)
    opened = opening(sync)
    if opened is not None and stored is None and (missing := _left_out(row, opened, ends)) is not None:
        return _missing_range(row, sync, received, *missing)
    return _judge_journal(row, stored, sync, received, single)


def _is_late(row: SiteRow, sync: Sync) -> bool:
    """True for a try that a later one overtook: it says nothing about now. The site waits for the later one's answer only."""
    if row.session == sync.session:
        return sync.nonce <= row.last_nonce
    same_boot = row.clocks is not None and row.clocks.kernel_boot == sync.clocks.kernel_boot
    return same_boot and row.clocks is not None and sync.clocks.boot_s < row.clocks.boot_s


def _goes_on(row: SiteRow, sync: Sync) -> bool:
    """A restart on the same journal file and the same boot of the same host is no other agent."""
    return row.place != "" and row.place == sync.place and row.clocks is not None and row.clocks.kernel_boot == sync.clocks.kernel_boot


def _taken_over(row: SiteRow, sync: Sync, received: datetime) -> SiteRow:
    """The row with another session in charge, and its move if it lies elsewhere."""
    moved = row.place != sync.place and row.place != "" and sync.place != ""
    moves = (*row.moves, received)[-CONTESTED_MOVES:] if moved else row.moves
    return replace(row, session=sync.session, place=sync.place, moves=moves, last_nonce=sync.nonce, taken_nonce=0, clocks=sync.clocks)


def _contested(moves: Sequence[datetime], received: datetime) -> bool:
    """So many moves within the time, the last of them less than that time ago."""
    if len(moves) < CONTESTED_MOVES:
        return False
    return abs(moves[-1] - moves[-CONTESTED_MOVES]) <= CONTESTED_WITHIN and abs(received - moves[-1]) <= CONTESTED_WITHIN


def _stands(state: LaneState, row: SiteRow | None, sync: Sync, received: datetime, why: str) -> Verdict:
    """A fault: nothing of the sync is believed but that it came, and what the site says it knows of epochs. A site of which nothing was ever
    believed has a row (with `heard` 0) only to keep that."""
    if row is None and state not in (LaneState.HUB_RESTORED, LaneState.VERSION):
        return Verdict(state, why=why)
    known = row if row is not None else _unheard(sync, received)
    since = known.state_since if known.state is state else received
    told = max(known.epoch_told, sync.instruction_epoch)
    saved = replace(known, last_nonce=_latest(known, sync), state=state, state_since=since, epoch_told=told, version=min(sync.v, 1 << 30))
    if state is not LaneState.HUB_RESTORED:
        return Verdict(state, row=saved, why=why)
    return Verdict(state, ack_through=known.ack_through, row=saved, why=why, journal=known.journal if known.heard > 0 else None)


def _latest(row: SiteRow, sync: Sync) -> int:
    return sync.nonce if row.session == sync.session else row.last_nonce


def _unheard(sync: Sync, received: datetime) -> SiteRow:
    """The row of a site of which nothing could be believed yet."""
    return SiteRow(
        site=sync.site,
        lane=sync.lane,
        session=sync.session,
        journal=sync.journal,
        ack_through=0,
        digest=first_digest(sync.journal),
        safe_through=0,
        interpreted_through=0,
        heard=0,
        last_heard=received,
        last_nonce=sync.nonce,
        taken_nonce=0,
        at_head=False,
        running=None,
        instruction_epoch=0,
        instruction_mark=0,
        settings_revision=0,
        clocks=None,
        clock_offset_s=0.0,
        clock_error_s=0.0,
        place=sync.place,
    )


def _judge_journal(row: SiteRow | None, stored: Digest | None, sync: Sync, received: datetime, single: bool) -> Verdict:
    """A journal that the row does not name: it must say that it was opened, be new here, and leave nothing out that exists nowhere else."""
    if row is not None and row.heard > 0 and (opening(sync) is None or stored is not None):
        why = f"the site's journal was {row.journal} and is now {sync.journal}" + (", which had its turn before" if stored else "")
        return _stands(LaneState.AGENT_RESTORED, row, sync, received, why)
    if row is None:
        return _judge_chain(row, None, sync, received, single)
    zero = first_digest(sync.journal)
    fresh = replace(row, journal=sync.journal, ack_through=0, digest=zero, safe_through=0, interpreted_through=0, at_head=False)
    found = _judge_chain(fresh, None, sync, received, single)
    return _stands(found.state, row, sync, received, found.why) if found.state is LaneState.FORKED else found


def _left_out(row: SiteRow | None, opened: JournalOpened, ends: Mapping[JournalId, int]) -> tuple[JournalId, int, int] | None:
    """The first earlier journal that was told to forget (second number) what is not here after the first number, if no `LostRange` is announced."""
    for past in opened.past:
        here = ends.get(past.journal, 0)
        if row is not None and row.journal == past.journal:
            here = max(here, row.ack_through)
        if past.forgotten_through > here and not 0 < past.lost_from <= here + 1:
            return past.journal, here, past.forgotten_through
    return None


def _missing_range(row: SiteRow | None, sync: Sync, received: datetime, journal: JournalId, here: int, forgotten: int) -> Verdict:
    """HUB_RESTORED about a journal before the one that is spoken of."""
    why = f"the site was told to forget through {forgotten} of journal {journal}, here it ends at {here}"
    found = _stands(LaneState.HUB_RESTORED, row, sync, received, why)
    unheard = row is None or row.heard == 0
    return replace(found, ack_through=0 if unheard else here, journal=None if unheard else journal)


def _judge_chain(row: SiteRow | None, stored: Digest | None, sync: Sync, received: datetime, single: bool) -> Verdict:
    """Does the batch continue, repeat, skip or contradict what is on disk?"""
    ack = row.ack_through if row else 0
    digest = row.digest if row else first_digest(sync.journal)
    last = last_seq(sync)
    if sync.first_seq > ack + 1:
        if sync.forgotten_through > ack:
            why = f"the site was told to forget through {sync.forgotten_through}, here the journal ends at {ack}"
            return _stands(LaneState.HUB_RESTORED, row, sync, received, why)
        heard = _heard(row, sync, received, ack, digest, single, LaneState.BEHIND)
        return Verdict(LaneState.BEHIND, ack_through=ack, row=heard)
    entries = _chain(sync)
    if last < ack:
        if stored is None and last > 0:
            why = f"the site's journal ends at {last}, before anything that is still kept here"
            return _stands(LaneState.AGENT_RESTORED, row, sync, received, why)
        before = stored if last > 0 else first_digest(sync.journal)
        if (entries[-1].digest if entries else sync.digest_before) != before:
            return _stands(LaneState.FORKED, row, sync, received, f"entry {last} differs from what is on disk here")
        if sync.at_head:
            return _stands(LaneState.AGENT_RESTORED, row, sync, received, f"the site's journal ends at {last}, here it ends at {ack}")
        saved = _heard(row, sync, received, ack, digest, single, LaneState.OK)
        return Verdict(LaneState.OK, ack_through=last, safe_through=min(saved.safe_through, last), row=saved)
    overlap = ack - sync.first_seq + 1
    if (entries[overlap - 1].digest if overlap else sync.digest_before) != digest:
        return _stands(LaneState.FORKED, row, sync, received, f"entry {ack} differs from what is on disk here")
    new = entries[overlap:]
    saved = _heard(row, sync, received, last, new[-1].digest if new else digest, single, LaneState.OK)
    return Verdict(LaneState.OK, ack_through=last, safe_through=saved.safe_through, row=saved, new=new)


def _chain(sync: Sync) -> list[NewEntry]:
    """The batch with the digests that its own beginning implies."""
    digest, chain = sync.digest_before, list[NewEntry]()
    for offset, entry in enumerate(sync.entries):
        raw = bytes(entry)
        digest = next_digest(digest, raw)
        chain.append(NewEntry(sync.first_seq + offset, digest, raw))
    return chain


def _heard(row: SiteRow | None, sync: Sync, received: datetime, ack: int, digest: Digest, single: bool, state: LaneState) -> SiteRow:
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
        place=sync.place,
        moves=row.moves if row else (),
        epoch_told=max(row.epoch_told if row else 0, sync.instruction_epoch),
        version=sync.v,
        state=state,
        state_since=(row.state_since if row.state is state else received) if row else None,
    )
