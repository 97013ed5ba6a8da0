"""What a site's telling of its call offerings makes of the records that are kept: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from intertie.contracts.base import encode
from intertie.contracts.call_offerings import OfferingRecord, OfferingsReply, OfferingTold
from intertie.errors import Refused
from intertie.ids import OfferingName, SiteName, name

# A site with more of them offers a product line, not a machine's service.
MOST_OFFERINGS = 100


def take(
    known: Mapping[OfferingName, OfferingRecord], told: Sequence[OfferingTold], *, site: SiteName, at: datetime, version: int
) -> list[OfferingRecord]:
    """The records that change: new, declared otherwise, available or not, offered no more. `version`: of one that is new.

    `Refused('registry.offering')` for what cannot be an offering, with the rule.
    """
    if len(told) > MOST_OFFERINGS:
        raise Refused("registry.offering", f"{site} offers {len(told)} calls, at most {MOST_OFFERINGS} are kept")
    names = [name(one.offering.name, "offering") for one in told]
    if len(set(names)) != len(names):
        raise Refused("registry.offering", f"{site} names an offering twice")
    changed: list[OfferingRecord] = []
    for one in told:
        record = _record(known.get(one.offering.name), one, site, at, version)
        if record is not None:
            changed.append(record)
    for record in known.values():
        if record.offering.name not in names and not record.withdrawn:
            gone = msgspec.structs.replace(
                record, withdrawn=True, available=False, reason="the owner offers it no more", told_at=at, version=record.version + 1
            )
            changed.append(gone)
    return changed


def _record(known: OfferingRecord | None, one: OfferingTold, site: SiteName, at: datetime, version: int) -> OfferingRecord | None:
    """The record as told now; None if nothing of it is news."""
    if known is None:
        return OfferingRecord(
            site=site,
            offering=one.offering,
            revision=1,
            available=one.available,
            paused=one.paused,
            reason=one.reason,
            told_at=at,
            version=version,
        )
    declared = known.offering != one.offering
    same = (known.available, known.paused, known.reason, known.withdrawn) == (one.available, one.paused, one.reason, False)
    if same and not declared:
        return None
    return msgspec.structs.replace(
        known,
        offering=one.offering,
        revision=known.revision + declared,
        available=one.available,
        paused=one.paused,
        reason=one.reason,
        withdrawn=False,
        told_at=at,
        version=known.version + 1,
    )


def paged(records: Sequence[OfferingRecord], after: str, most_bytes: int) -> OfferingsReply:
    """Those behind `after`, as many as the bytes allow and one at least: an owner who offers much shuts nobody else out."""
    behind = sorted((one for one in records if one.id > after), key=lambda one: one.id)
    told: list[OfferingRecord] = []
    for one in behind:
        most_bytes -= len(encode(one)) + 1
        if told and most_bytes < 0:
            return OfferingsReply(offerings=told, next=told[-1].id)
        told.append(one)
    return OfferingsReply(offerings=told)
