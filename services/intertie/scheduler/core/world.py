"""What other keepers told: sites, pools, mappings, keys, agreements, allowances; the newest version of each. Filled from facts on disk here."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from intertie.contracts.base import Contract, decode, encode
from intertie.contracts.drill import DrillRecord, DrillState
from intertie.contracts.identity import MappingRecord, MappingsChanged, SiteKeyChanged, SiteKeyRecord
from intertie.contracts.site import Freshness, PoolRecord, SiteRecord
from intertie.contracts.usage import Allowance, AllowanceChanged, MeterSpec, SpecAgreed
from intertie.ids import PoolName, SiteName, SpecId, TenantName
from intertie.scheduler.core.given import Fact

SITE, POOL, MAPPINGS, SITE_KEY, SPEC, ALLOWANCE, DRILL = "site", "pool", "mappings", "site_key", "spec", "allowance", "drill"


class _Mappings(Contract, frozen=True, kw_only=True):
    """All mappings of one site, as kept on disk."""

    mappings: list[MappingRecord]


@dataclass(slots=True)
class World:
    """Mutable, and only by `apply`; nothing in here is decided here."""

    sites: dict[SiteName, SiteRecord] = field(default_factory=dict)
    pools: dict[tuple[SiteName, PoolName], PoolRecord] = field(default_factory=dict)
    mappings: dict[SiteName, tuple[MappingRecord, ...]] = field(default_factory=dict)
    site_keys: dict[SiteName, SiteKeyRecord] = field(default_factory=dict)
    specs: dict[tuple[SpecId, int], MeterSpec] = field(default_factory=dict)
    allowances: dict[TenantName, tuple[Allowance, datetime]] = field(default_factory=dict)
    """With since when what is used counts against it."""
    drills: dict[SiteName, DrillRecord] = field(default_factory=dict)
    """The newest of each site."""

    def apply(self, fact: Fact) -> None:
        """Take one fact that the store has found to be newer."""
        match fact.noun:
            case "site":
                site = decode(fact.body, SiteRecord)
                self.sites[site.site] = site
            case "pool":
                pool = decode(fact.body, PoolRecord)
                self.pools[(pool.site, pool.pool)] = pool
            case "mappings":
                self.mappings[SiteName(fact.entity)] = tuple(decode(fact.body, _Mappings).mappings)
            case "site_key":
                key = decode(fact.body, SiteKeyRecord)
                self.site_keys[key.site] = key
            case "spec":
                spec = decode(fact.body, MeterSpec)
                self.specs[(spec.spec, spec.revision)] = spec
            case "allowance":
                allowance = decode(fact.body, Allowance)
                self.allowances[allowance.tenant] = (allowance, fact.at)
            case "drill":
                drill = decode(fact.body, DrillRecord)
                known = self.drills.get(drill.site)
                if known is None or known.drill == drill.drill or known.asked_at < drill.asked_at:
                    self.drills[drill.site] = drill
            case _:
                raise AssertionError(f"a fact of noun {fact.noun!r} was stored and nobody reads it")

    def mapped(self) -> tuple[MappingRecord, ...]:
        return tuple(m for _, some in sorted(self.mappings.items()) for m in some)

    def limited(self) -> dict[TenantName, datetime]:
        """Tenants whose allowance has a limit, and since when it counts."""
        return {tenant: since for tenant, (allowance, since) in self.allowances.items() if allowance.amount is not None}

    def stale_since(self, site: SiteName) -> datetime | None:
        """When the registry last heard a site that it no longer calls fresh; None if it is fresh or not known."""
        record = self.sites.get(site)
        return record.last_heard if record is not None and record.freshness is not Freshness.FRESH else None

    def drill(self, site: SiteName) -> str:
        """`SiteSettings.drill`: what the site is to rehearse, from when; empty if nothing."""
        drill = self.drills.get(site)
        if drill is None or drill.consent is None or drill.state not in (DrillState.PLANNED, DrillState.CUT):
            return ""
        return f"{drill.drill}/{drill.seconds}/{drill.start.isoformat()}/{drill.consent.given}"

    def own_specs(self, site: SiteName) -> list[MeterSpec]:
        """The site's own agreements, newest first: for its statement preview, whoever its consumer is."""
        mine = [spec for spec in self.specs.values() if spec.provider == site]
        return sorted(mine, key=lambda spec: (spec.effective_from, spec.spec, spec.revision), reverse=True)

    def account(self, site: SiteName, tenant: TenantName) -> str | None:
        """What a tenant becomes at a site: empty on a single-user site for its owner's tenant; None where it is mapped to nothing."""
        record = self.sites.get(site)
        if record is not None and record.single_user:
            return "" if tenant == record.owner_tenant else None
        return next((m.account for m in self.mappings.get(site, ()) if m.tenant == tenant), None)

    def revoked(self, site: SiteName) -> bool:
        key = self.site_keys.get(site)
        return key is not None and key.revoked


def site_fact(record: SiteRecord, at: datetime) -> Fact:
    return Fact(SITE, record.site, record.version, encode(record), at)


def pool_fact(record: PoolRecord, at: datetime) -> Fact:
    return Fact(POOL, f"{record.site}/{record.pool}", record.version, encode(record), at)


def mappings_fact(event: MappingsChanged, at: datetime) -> Fact:
    return Fact(MAPPINGS, event.site, event.version, encode(_Mappings(mappings=event.mappings)), at)


def site_key_fact(event: SiteKeyChanged, at: datetime) -> Fact:
    return Fact(SITE_KEY, event.record.site, event.version, encode(event.record), at)


def spec_fact(event: SpecAgreed, at: datetime) -> Fact:
    """Each revision by itself: one that is agreed for next month must not hide the one in force."""
    return Fact(SPEC, f"{event.record.spec}/{event.record.revision}", event.version, encode(event.record), at)


def drill_fact(record: DrillRecord, at: datetime) -> Fact:
    return Fact(DRILL, f"{record.site}/{record.drill}", record.version, encode(record), at)


def allowance_fact(event: AllowanceChanged, at: datetime) -> Fact:
    return Fact(ALLOWANCE, event.tenant, event.version, encode(event.record), at)
