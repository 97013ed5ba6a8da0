"""The owner's own rules for this site, from `site.toml` in the data folder; the hub has no say in them."""

from __future__ import annotations

import msgspec

from intertie.agent.core.machines import DataFolder, MachinesRules
from intertie.agent.core.place import LinkWay, Tells
from intertie.agent.core.probing import ProbeRules
from intertie.agent.core.requests import JobOfferingRule
from intertie.agent.endpoint.rules import EndpointRule
from intertie.agent.kubernetes.core.settings import KubernetesRules
from intertie.agent.slurm.core.rules import Become, SlurmRules
from intertie.agent.sources.settings import TelemetrySource


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`site.toml`. A file with a name that is none of these is refused: a rule that is not read is worse than none."""

    owner_first: bool = True
    """The owner's own waiting work may take what was claimed for the hub and has not started."""
    job_offering: list[JobOfferingRule] = []
    """What the owner takes job requests for, and how they are answered (ops/docs/modes.md)."""
    disk_floor_mib: int = 512
    """No new work below the smaller of this much free space …"""
    disk_floor_percent: float = 2.0
    """… and this share of the file system."""
    probe: ProbeRules = ProbeRules()
    """`[probe]`: the small job that proves daily what the pools declare."""
    telemetry: list[TelemetrySource] = []
    """Where readings of the devices come from; empty: NVML. Names, units and labels of an exporter are in its mapping (ops/docs/telemetry.md)."""
    link: LinkWay | None = None
    """`[link]`: the proxy that leads to the hub."""
    tells: Tells | None = None
    """`[tells]`: what a script finds here; users are told before they submit."""
    endpoint: list[EndpointRule] = []
    """Call offerings: what others may ask of a server of the owner's, call by call (ops/docs/endpoint.md)."""
    kubernetes: KubernetesRules | None = None
    """`[kubernetes]`: a cluster whose namespaces are lent to tenants (ops/docs/kubernetes.md)."""
    slurm: SlurmRules | None = None
    """`[slurm]`: a Slurm whose queue is lent (ops/docs/slurm.md)."""
    machines: MachinesRules | None = None
    """`[machines]`: a pool of machines, whose head this agent is (ops/docs/machines.md)."""
    data: list[DataFolder] = []
    """`[[data]]`: folders of this site that tenants' jobs may read or write; enforced, not advised."""

    def single_user(self, *, root: bool) -> bool:
        """Whether all work here runs as the agent's own user. A cluster of the site's own changes accounts by its own means, without root."""
        if self.kubernetes is not None:
            return False
        if self.slurm is not None:
            return self.slurm.become is Become.SELF
        return not root
