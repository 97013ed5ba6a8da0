"""Which agreement an attempt will be metered by, and the most it can cost. The exact sum is `intertie.rating`'s; here only a ceiling."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal

from intertie.contracts.site import DeviceKind
from intertie.contracts.usage import MeterSpec
from intertie.ids import TenantName

PROVIDER = "platform"
"""The provider in the agreement between the platform and a tenant."""

ANY_TENANT = "*"
SECONDS_PER_HOUR = 3_600


def spec_in_force(specs: Iterable[MeterSpec], tenant: TenantName, now: datetime) -> MeterSpec | None:
    """The platform's agreement with `tenant`, else the one with everybody; of each the highest revision that is already in force."""
    found: dict[str, MeterSpec] = {}
    for spec in specs:
        if spec.provider != PROVIDER or spec.consumer not in (tenant, ANY_TENANT) or spec.effective_from > now:
            continue
        held = found.get(spec.consumer)
        if held is None or (spec.effective_from, spec.revision) > (held.effective_from, held.revision):
            found[spec.consumer] = spec
    return found.get(tenant) or found.get(ANY_TENANT)


def price_per_hour(spec: MeterSpec, kind: DeviceKind, model: str) -> Decimal | None:
    """Price of one device-hour of that kind and model; None if the agreement has none: it is then refused, not guessed."""
    general: Decimal | None = None
    for price in spec.prices:
        if price.kind is not kind:
            continue
        if price.model and price.model.lower() == model.lower():
            return price.per_hour
        if not price.model:
            general = price.per_hour
    return general


def cost_ceiling(per_hour: Decimal, devices: int, wall_s: int) -> Decimal:
    """The most that `devices` can cost when they are held for the whole wall-time limit."""
    return per_hour * devices * wall_s / SECONDS_PER_HOUR
