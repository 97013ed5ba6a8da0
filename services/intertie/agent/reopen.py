"""A new journal in place of the old one: the way out where the two sides of a lane cannot be joined, and the beginning of a journal that was
copied, moved, damaged or lost (ADR 0006).

Everything that the old one still holds is said again in the new one, behind the list of what this site holds of the hub's. What was claimed in the
old journal and has not begun starts nothing any more: `Site.tick` gives it up, and a go names the journal of its claim.

Where the journal goes on and the scheduler was restored (its epoch was raised), the list alone is told, once (`tell_held`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from intertie.agent.books import get_setting, put_setting
from intertie.agent.core.model import State
from intertie.agent.journal_rows import Renewal
from intertie.contracts.base import BATCH_BYTES, encode
from intertie.contracts.link import EntryBase, HeldAttempt, HeldTold, Lane, Sealed
from intertie.ids import JournalId
from intertie.link.journal import NextSeq
from intertie.link.site import Lost, Reopen
from intertie.observe import log
from intertie.trust.seal import seal

if TYPE_CHECKING:
    from intertie.agent.site import Site

LOG = log.get("agent.reopen")

# The list of what is held, within one entry: a batch holds more, and what is left out was told by its own entries before.
HELD_BYTES = 192 * 1024
# One offer within one entry: with its envelope it must fit one sync.
OFFER_BYTES = 2 * BATCH_BYTES
SAME_PLACE, HELD_TOLD = "same_place", "held_told"


async def recall_place(site: Site) -> None:
    """Before anything is adopted: is the folder where the claims in it were made? Once moved, older claims stay doubtful for good."""
    pending = site.journal.pending
    kept = await site.journal.read(lambda cursor: get_setting(cursor, SAME_PLACE))
    moved = pending is not None and not pending.same_place and pending.why != "first"
    site.same_place = kept != "no" and not moved


async def begin(site: Site) -> None:
    """After recovery and before the first word: open the journal anew if it asks for that."""
    pending = site.journal.pending
    if pending is not None:
        await _renew(site, pending.why, {})


async def reopen(site: Site, lane: Lane, asked: Reopen) -> None:
    """What `SiteLane` asks for when both sides disagree. `Unavailable` if the disk refuses: the lane asks again.

    Two lanes ask for it in the same moment, and one new journal is opened: a second one would hide from the hub where its attempts were claimed.
    """
    async with site.reopening:
        if asked.journal != site.journal.id:
            return
        LOG.error("the hub and this journal cannot be joined: a new one is opened", lane=lane.value, why=asked.why)
        await _renew(site, asked.why, {} if asked.lost is None else {lane: asked.lost})
    site.wake(list(Lane))


async def _renew(site: Site, why: str, lost: Mapping[Lane, Lost]) -> JournalId:
    def sign(payload: bytes) -> Sealed:
        return seal(site.key, payload, site.key.public)

    renewal = Renewal(
        why=why,
        at=site.clock.now(),
        kernel_boot=site.boot,
        held=bounded(await site.search()),
        lost=lost,
        sign=sign,
        last=lambda _following: {},
        islanded=site.islanded(),
    )
    also = None if site.same_place else put_setting(SAME_PLACE, "no")
    return await site.journal.renew(renewal, also)


async def tell_held(site: Site, epoch: int) -> None:
    """The scheduler is in a higher epoch than ever before: journal what is held here, behind all that is there, once for each epoch. All of it is
    one transaction, so an agent that dies meanwhile has told all or nothing. `Unavailable` if the disk refuses."""
    told = await site.journal.read(lambda cursor: get_setting(cursor, HELD_TOLD))
    if told is not None and int(told) >= epoch:
        return
    now = site.clock.now()
    parts = in_parts(await site.search(ended_since=now - timedelta(seconds=site.journal.kept_s)))

    def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
        first, last = following[Lane.SCHEDULER], len(parts) - 1
        return {
            Lane.SCHEDULER: [
                HeldTold(
                    seq=first + number,
                    at=now,
                    islanded=site.islanded(),
                    epoch=epoch,
                    place=site.journal.place,
                    kernel_boot=site.boot,
                    held=part,
                    complete=number == last,
                )
                for number, part in enumerate(parts)
            ]
        }

    await site.append(entries, put_setting(HELD_TOLD, str(epoch)))
    LOG.warning("the hub was restored: it is told what is held here", epoch=epoch, held=sum(map(len, parts)), entries=len(parts))


def in_parts(held: Sequence[HeldAttempt]) -> list[list[HeldAttempt]]:
    """The list in entries of bounded size, the latest attempts first; at least one. An offer that would fit no message is left out."""
    parts, room = [list[HeldAttempt]()], HELD_BYTES
    for one in sorted(held, key=lambda each: (-each.epoch, -each.generation, each.attempt)):
        said = one if len(encode(one)) <= OFFER_BYTES else _without_offer(one)
        size = len(encode(said)) + 1
        if size > room and parts[-1]:
            parts.append([])
            room = HELD_BYTES
        parts[-1].append(said)
        room -= size
    return parts


def bounded(held: list[HeldAttempt]) -> list[HeldAttempt]:
    """What holds devices first, with its offer while there is room; what is over without."""
    order = {State.RUNNING.value: 0, State.STAGING.value: 1, State.CLAIMED.value: 2}
    said, room = list[HeldAttempt](), HELD_BYTES
    for one in sorted(held, key=lambda each: order.get(each.state, 3)):
        plain = one if one.state in order and len(encode(one)) <= room // 2 else _without_offer(one)
        size = len(encode(plain)) + 1
        if size > room:
            LOG.error("more is held here than one entry can say", said=len(said), held=len(held))
            break
        said.append(plain)
        room -= size
    return said


def _without_offer(one: HeldAttempt) -> HeldAttempt:
    return HeldAttempt(
        attempt=one.attempt,
        job=one.job,
        epoch=one.epoch,
        generation=one.generation,
        state=one.state,
        devices=one.devices,
        started=one.started,
        native_id=one.native_id,
    )
