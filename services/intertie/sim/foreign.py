"""What a site may say that our own agent never does: an entry of a version to come, and usage that nobody asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from intertie.contracts.base import encode
from intertie.contracts.link import EntryBase, Lane, SegmentClosed
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import Anchor, Segment, UsagePhase
from intertie.ids import AttemptId, PoolName, SegmentId, mint
from intertie.link.journal import Build, NextSeq
from intertie.trust.seal import seal

if TYPE_CHECKING:
    from intertie.sim.host import Agent

KIND = "from_the_future"
FORGED = "forged"
"""What the ids of forged segments begin with."""


class FromTheFuture(EntryBase, frozen=True, kw_only=True, tag=KIND):
    """Of a kind that this hub has never heard of."""

    text: str = "what will have been"


def poison(agent: Agent) -> Build:
    def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
        return {lane: [FromTheFuture(seq=following[lane], at=agent.host.clock.now())] for lane in (Lane.SCHEDULER, Lane.METERING)}

    return entries


def forged(agent: Agent) -> Build:
    """An hour of every device, for an attempt that it knows: signed with the site's own key, and attributed to nobody."""
    host = agent.host
    now = host.clock.now()
    known = [one.id for one in agent.site.books.attempts.values() if one.local is None]
    segment = Segment(
        id=SegmentId(mint(FORGED)),
        site=host.site,
        pool=PoolName("main"),
        attempt=known[-1] if known else AttemptId(mint("att")),
        phase=UsagePhase.RUN,
        kind=DeviceKind.SLOT,
        model="",
        devices=[device.id for device in host.pool.devices],
        quantity_milli=1_000 * len(host.pool.devices),
        start=now - timedelta(hours=1),
        end=now,
        last=True,
        cause="ended",
        islanded=False,
        anchor=Anchor(utc=now - timedelta(hours=1), boot_s=host.clock.boot_s(), kernel_boot=host.boot, offset_s=0.0, error_s=0.0),
        attribution=None,
    )
    sealed = seal(host.key, encode(segment), host.key.public)

    def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
        return {Lane.METERING: [SegmentClosed(seq=following[Lane.METERING], at=now, sealed=sealed)]}

    return entries
