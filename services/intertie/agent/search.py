"""What a site holds of the hub's, from its books and from its job folders: the folders are a contract, and outlive a journal.

A journal that was lost or restored is made whole from them: work whose supervisor began is adopted, told and metered as if nothing had been.
Signed offers are kept and told only without values of the environment: they would lie for weeks where a list of them lies.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from intertie.agent.adapters.port import Presence
from intertie.agent.books import save, see, together
from intertie.agent.core import usage
from intertie.agent.core.model import Attempt, State, told_devices, with_state
from intertie.agent.journal import Cursor
from intertie.contracts.link import HeldAttempt, Sealed
from intertie.ids import AttemptId
from intertie.observe import log

if TYPE_CHECKING:
    from intertie.agent.site import Site

LOG = log.get("agent.search")


async def rebuild(site: Site) -> list[AttemptId]:
    """Take into the books what began in a folder here and is not in them, or only as a claim; who that was.

    Its course goes on from the go: the start is found, and told. The youngest come first: of those that had the same devices, only it can live yet.
    """
    adopted: list[AttemptId] = []
    for kept in sorted(await site.adapter.found(), key=lambda kept: _made(kept.id), reverse=True):
        if kept.id in site.books.attempts or kept.id in site.books.tombstones:
            continue
        if await site.adapter.presence(kept.id) is not Presence.BEGUN:
            # Whoever prepared it was to start it by a claim that is not in these books: it never will be.
            await site.adapter.fence(kept.id)
            continue
        holders = site.books.holds.holders(kept.pool, kept.devices)
        over = bool(holders) and min(map(_made, holders)) > _made(kept.id) and not await site.adapter.alive(kept.id)
        await _adopt(site, with_state(kept, State.STAGING, after=[] if over else holders, over=over))
        adopted.append(kept.id)
    for claim in [attempt for attempt in site.books.attempts.values() if attempt.state is State.CLAIMED]:
        if await site.adapter.presence(claim.id) is Presence.BEGUN:
            await _adopt(site, with_state(claim, State.STAGING))
            adopted.append(claim.id)
    return adopted


def _made(attempt: AttemptId) -> str:
    """Ids sort by their making, behind what names their kind."""
    return attempt.rpartition("-")[2]


async def _adopt(site: Site, adopted: Attempt) -> None:
    site.put(adopted)
    await site.journal.write(together(save(adopted), see(adopted.job, adopted.epoch, adopted.generation)))
    seen = site.books.seen.get(adopted.job, (0, 0))
    site.books.seen[adopted.job] = max(seen, (adopted.epoch, adopted.generation))
    LOG.warning("work is adopted from its folder, the books knew less of it", attempt=adopted.id, job=adopted.job)


async def search(site: Site, ended_since: datetime | None = None) -> list[HeldAttempt]:
    """In the order of their ids: what is not settled, and what is and ended since then."""
    for name in await rebuild(site):
        if site.books.attempts[name].local is None:
            site.listed.add(name)
        site.set_out(name)
    offers = {kept.id: kept.offer for kept in await site.adapter.found()}
    settled = await site.journal.read(_settled)

    def told(attempt: Attempt) -> bool:
        if attempt.local is not None or attempt.state not in HELD:
            return False
        lately = ended_since is not None and attempt.ended is not None and attempt.ended.ended >= ended_since
        return lately or attempt.id not in settled

    attempts = sorted(filter(told, site.books.attempts.values()), key=lambda attempt: attempt.id)
    return [_held(attempt, attempt.offer or offers.get(attempt.id)) for attempt in attempts]


HELD = frozenset({State.CLAIMED, State.STAGING, State.RUNNING, State.ENDED, State.NOT_STARTED})


def _settled(cursor: Cursor) -> set[AttemptId]:
    return {AttemptId(row[0]) for row in cursor.execute("SELECT id FROM attempt WHERE settled = 1")}


class _Values(msgspec.Struct):
    env: dict[str, str]


def without_values(offer: Sealed | None) -> Sealed | None:
    """The signed offer, if no value of the environment is in it: only then may it be kept."""
    if offer is None:
        return None
    try:
        return None if msgspec.json.decode(offer.payload, type=_Values).env else offer
    except msgspec.MsgspecError:
        return None


def _held(attempt: Attempt, offer: Sealed | None) -> HeldAttempt:
    return HeldAttempt(
        attempt=attempt.id,
        job=attempt.job,
        epoch=attempt.epoch,
        generation=attempt.generation,
        state=attempt.state.value,
        devices=told_devices(attempt),
        started=usage.utc_of(attempt.started.utc_ns) if attempt.started else None,
        native_id=attempt.started.native_id if attempt.started and not attempt.offering else "",
        offer=without_values(offer),
    )
