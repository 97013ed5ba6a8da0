"""Islanded allowances (LINK D24): what a tenant may use at a site while that site is alone. Sealed into the site's settings, and counted as used
at a silent site, so that two sides of a cut never give the same thing twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from intertie.contracts.job import GrantRecord, SetGrant
from intertie.contracts.link import IslandedGrant
from intertie.contracts.site import DeviceKind
from intertie.errors import Refused
from intertie.ids import SiteName, SpecId, TenantName
from intertie.planner import Reserved
from intertie.scheduler.core.hearing import Hearing
from intertie.scheduler.core.rows import Attempt

# All of a site's grants travel sealed in one answer, each some 700 bytes.
GRANTS_PER_SITE = 64
# Thousandths of a device × microseconds in one device-hour.
MILLI_US_PER_HOUR = 1_000 * 3_600 * 1_000_000


@dataclass(frozen=True, slots=True)
class Grant:
    """A row. `revision` rises with each setting of the same (tenant, site, kind); the agreement is the one in force when it was set."""

    tenant: TenantName
    site: SiteName
    kind: DeviceKind
    devices: int
    card_hours: int | None
    valid_until: datetime
    set_by: str
    revision: int
    spec: SpecId | None = None
    spec_revision: int = 0

    @property
    def record(self) -> GrantRecord:
        return GrantRecord(
            tenant=self.tenant,
            site=self.site,
            kind=self.kind,
            devices=self.devices,
            card_hours=self.card_hours,
            valid_until=self.valid_until,
            set_by=self.set_by,
        )

    @property
    def body(self) -> IslandedGrant:
        """What is sealed for the site."""
        return IslandedGrant(
            grant=f"{self.site}/{self.tenant}/{self.kind}/{self.revision}",
            tenant=self.tenant,
            site=self.site,
            kind=self.kind,
            devices=self.devices,
            quantity_milli_us=None if self.card_hours is None else self.card_hours * MILLI_US_PER_HOUR,
            valid_until=self.valid_until,
            spec=self.spec,
            spec_revision=self.spec_revision,
        )


def granted(asked: SetGrant, *, actor: str, spec: SpecId | None, spec_revision: int, now: datetime) -> Grant:
    """The row that `asked` makes; the store numbers it."""
    until = now + timedelta(days=asked.valid_days)
    return Grant(asked.tenant, asked.site, asked.kind, asked.devices, asked.card_hours, until, actor, 0, spec, spec_revision)


def check_room(held: Sequence[Grant], asked: Grant) -> None:
    """`Refused` if the site's settings could not carry one more. What has ended is let go first, by the store."""
    others = [g for g in held if g.devices and (g.tenant, g.kind) != (asked.tenant, asked.kind)]
    if asked.devices and len(others) >= GRANTS_PER_SITE:
        raise Refused(
            "scheduler.too_many_grants",
            f"{asked.site} has {len(others)} islanded allowances, at most {GRANTS_PER_SITE} travel in its settings",
            next_step="take one away (`intertie grant set … --devices 0`)",
        )


def reserved(grants: Sequence[Grant], live: Sequence[Attempt], hearing: Hearing, *, now: datetime, now_s: float) -> tuple[Reserved, ...]:
    """What silent sites may give by their grants, beyond what each tenant holds there."""
    held: Counter[tuple[TenantName, SiteName, DeviceKind]] = Counter()
    for attempt in live:
        if attempt.live:
            held[(attempt.record.tenant, attempt.record.site, attempt.record.kind)] += len(attempt.record.devices)
    found = [
        Reserved(g.tenant, g.site, g.kind, g.devices - held[(g.tenant, g.site, g.kind)])
        for g in grants
        if g.valid_until > now and not hearing.heard(g.site, now_s) and g.devices > held[(g.tenant, g.site, g.kind)]
    ]
    return tuple(sorted(found, key=lambda r: (r.tenant, r.site, r.kind)))
