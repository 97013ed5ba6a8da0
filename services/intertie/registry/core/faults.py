"""What the registry reports to people: declarations and cards that its rules refuse."""

from __future__ import annotations

from collections.abc import Mapping

from intertie.contracts.incident import ReportIncident, Severity
from intertie.contracts.site import PoolProfile
from intertie.errors import Refused
from intertie.ids import DeviceId, PoolName, SiteName


def profile_refused(site: SiteName, profile: PoolProfile, refusal: Refused) -> ReportIncident:
    return ReportIncident(
        key=f"registry.profile/{site}/{profile.pool[:63]}",
        kind="registry.profile",
        severity=Severity.WARNING,
        title=f"A declaration of pool {profile.pool[:63]} at site {site} was refused",
        text=f"{refusal.text} ({refusal.code}). The revision before stands. {refusal.next_step}".strip(),
        site=site,
    )


def profile_stands(site: SiteName, pool: PoolName) -> ReportIncident:
    return ReportIncident(
        key=f"registry.profile/{site}/{pool}",
        kind="registry.profile",
        severity=Severity.WARNING,
        title=f"Pool {pool} at site {site} is declared",
        text="A later declaration was accepted.",
        site=site,
        recovered=True,
    )


def device_twice(site: SiteName, doubled: Mapping[DeviceId, tuple[PoolName, PoolName]]) -> ReportIncident:
    """`doubled`: card → (pool that keeps it, pool in which it does not count); empty: it is over."""
    lines = [f"{device} counts in {keeper}, not in {other}" for device, (keeper, other) in sorted(doubled.items())]
    return ReportIncident(
        key=f"registry.device_twice/{site}",
        kind="registry.device_twice",
        severity=Severity.WARNING,
        title=f"Site {site} offers {len(doubled)} card(s) in two pools" if doubled else f"Site {site} offers each card once",
        text="; ".join(lines)[:3_900] or "No card stands in two pools any more.",
        site=site,
        recovered=not doubled,
    )
