"""The owner's own rules for this site, from `site.toml` in the data folder; the hub has no say in them."""

from __future__ import annotations

import msgspec

from intertie.agent.core import images
from intertie.agent.core.images import ImageRules
from intertie.agent.core.machines import DataFolder, MachinesRules
from intertie.agent.core.place import LinkWay, Tells
from intertie.agent.core.probing import ProbeRules
from intertie.agent.core.requests import JobOfferingRule
from intertie.agent.endpoint.rules import EndpointRule
from intertie.agent.kubernetes.core.settings import KubernetesRules
from intertie.agent.slurm.core.rules import Become, Images, SlurmRules
from intertie.agent.sources.settings import TelemetrySource
from intertie.contracts.image import PoolImages


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
    images: ImageRules | None = None
    """`[images]`: from where the images come that jobs may name; without it none is run."""

    def pool_images(self) -> PoolImages:
        """What the pools tell of images that jobs name. `Refused('agent.images')` for a table that cannot be meant."""
        runtime = self.images.runtime if self.images is not None else ""
        if self.kubernetes is not None:
            runtime = "kubernetes"
        elif self.slurm is not None:
            runtime = "" if self.slurm.images is Images.NONE else self.slurm.images.value
        if self.images is not None:
            images.check(self.images, runtime, own_queue=self.kubernetes is not None or self.slurm is not None)
        return images.told_of(self.images, runtime)

    def owners_image(self, account: str) -> str:
        """What work of this account runs in that names no image, by digest; empty: nothing that has one (a file of the owner's is theirs alone)."""
        if self.kubernetes is None:
            return ""
        space = self.kubernetes.namespaces.get(account)
        return (space.image if space is not None else "") or self.kubernetes.image

    def single_user(self, *, root: bool) -> bool:
        """Whether all work here runs as the agent's own user. A cluster of the site's own changes accounts by its own means, without root."""
        if self.kubernetes is not None:
            return False
        if self.slurm is not None:
            return self.slurm.become is Become.SELF
        return not root
