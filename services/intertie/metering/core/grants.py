"""Use beyond an islanded allowance: never refused, never hidden. Found when a statement is summed, since an allowance spans attempts.

An allowance is per absence, and metering hears of none. But what had arrived here before a segment began was sent over a link that worked then:
so the segments of an allowance fall apart into absences by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from intertie.contracts.link import IslandedGrant
from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import BeyondGrant, UsagePhase
from intertie.ids import SiteName
from intertie.metering.core.attribution import COUNTED
from intertie.metering.core.evidence import Received
from intertie.rating.union import MICROSECOND


@dataclass(frozen=True, slots=True)
class Use:
    """One believed stretch of a tenant's use at a site, and the allowance it was taken in by, if it was."""

    site: SiteName
    kind: DeviceKind
    start: datetime
    end: datetime
    quantity_milli: int
    received_at: datetime
    grant: IslandedGrant | None


def uses(items: Iterable[Received], start: datetime, end: datetime) -> list[Use]:
    """What counts of an attempt's run in [start, end); each segment once."""
    found: dict[str, Use] = {}
    for item in items:
        segment = item.segment
        first, last = max(segment.start, start), min(segment.end, end)
        if item.suspense in COUNTED and segment.phase is UsagePhase.RUN and first < last:
            found[segment.id] = Use(item.site, segment.kind, first, last, segment.quantity_milli, item.received_at, item.grant)
    return list(found.values())


def beyond(told: Sequence[Use]) -> list[BeyondGrant]:
    """What one tenant used beyond each of its allowances, in order of allowance and kind of excess."""
    grants = {use.grant.grant: use.grant for use in told if use.grant is not None}
    found: list[BeyondGrant] = []
    for name in sorted(grants):
        grant = grants[name]
        own = [use for use in told if use.grant is not None and use.grant.grant == name]
        beside = [use for use in told if (use.site, use.kind) == (grant.site, grant.kind)]
        for why, excess in (
            ("devices", _at_once(grant, own, beside)),
            ("quantity", _in_all(grant, own)),
            ("expired", sum(_milli_us(max(use.start, grant.valid_until), use.end, use.quantity_milli) for use in own)),
        ):
            if excess > 0:
                found.append(BeyondGrant(grant=name, site=grant.site, why=why, beyond_milli_us=excess))
    return found


def _milli_us(start: datetime, end: datetime, quantity_milli: int) -> int:
    return max(0, (end - start) // MICROSECOND) * quantity_milli


def _at_once(grant: IslandedGrant, own: Sequence[Use], beside: Sequence[Use]) -> int:
    """What was held above `devices`, the hub's own attempts included, as far as it was held by the allowance."""
    bounds = sorted({moment for use in own for moment in (use.start, use.end)} | {m for use in beside for m in (use.start, use.end)})
    excess = 0
    for start, end in zip(bounds, bounds[1:], strict=False):
        mine = sum(use.quantity_milli for use in own if use.start <= start and end <= use.end)
        everything = sum(use.quantity_milli for use in beside if use.start <= start and end <= use.end)
        excess += _milli_us(start, end, max(0, min(mine, everything - 1_000 * grant.devices)))
    return excess


def _in_all(grant: IslandedGrant, own: Sequence[Use]) -> int:
    """What was used above the allowance's quantity, absence by absence."""
    if grant.quantity_milli_us is None:
        return 0
    return sum(max(0, used - grant.quantity_milli_us) for used in _absences(own))


def _absences(own: Sequence[Use]) -> list[int]:
    """Thousandths × microseconds of each absence, in order."""
    totals: list[int] = []
    arrived: datetime | None = None
    for use in sorted(own, key=lambda one: one.start):
        if arrived is None or use.start >= arrived:
            totals.append(0)
            arrived = use.received_at
        arrived = min(arrived, use.received_at)
        totals[-1] += _milli_us(use.start, use.end, use.quantity_milli)
    return totals
