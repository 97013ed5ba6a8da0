"""The owner's own rules for this site, from `site.toml` in the data folder; the hub has no say in them."""

from __future__ import annotations

import msgspec

from intertie.agent.core.place import LinkWay, Tells
from intertie.agent.sources.settings import TelemetrySource


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`site.toml`. A file with a name that is none of these is refused: a rule that is not read is worse than none."""

    owner_first: bool = True
    """The owner's own waiting work may take what was claimed for the hub and has not started."""
    disk_floor_mib: int = 512
    """No new work below the smaller of this much free space …"""
    disk_floor_percent: float = 2.0
    """… and this share of the file system."""
    telemetry: list[TelemetrySource] = []
    """Where readings of the devices come from; empty: NVML. Names, units and labels of an exporter are in its mapping (ops/docs/telemetry.md)."""
    link: LinkWay | None = None
    """`[link]`: the proxy that leads to the hub."""
    tells: Tells | None = None
    """`[tells]`: what a script finds here; users are told before they submit."""
