"""Sites and their pools in pages: as much as one message carries, in order of name, a site's record before its pools."""

from __future__ import annotations

from collections.abc import Sequence

from intertie.contracts.base import encode
from intertie.contracts.site import PoolRecord, SiteRecord, SitesReply

# With an envelope around it below NATS' 1 MiB even if the last record is the largest that the registry keeps (768 KiB).
PAGE_BYTES = 192 * 1024


def page(sites: Sequence[SiteRecord], pools: Sequence[PoolRecord], after: str, *, limit_bytes: int = PAGE_BYTES) -> SitesReply:
    """What follows `after` (`site` or `site/pool`, the last of the page before); at least one record if there is any."""
    place: tuple[str, ...] = tuple(after.split("/", 1)) if after else ()
    waiting = sorted([((s.site,), s) for s in sites] + [((p.site, p.pool), p) for p in pools], key=lambda item: item[0])
    told: list[SiteRecord | PoolRecord] = []
    size, last = 0, place
    for key, record in waiting:
        if key <= place:
            continue
        size += len(encode(record))
        if told and size > limit_bytes:
            return _reply(told, "/".join(last))
        told.append(record)
        last = key
    return _reply(told, "")


def _reply(told: Sequence[SiteRecord | PoolRecord], next: str) -> SitesReply:
    return SitesReply(
        sites=[record for record in told if isinstance(record, SiteRecord)],
        pools=[record for record in told if isinstance(record, PoolRecord)],
        next=next,
    )
