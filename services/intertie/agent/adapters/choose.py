"""Which adapter runs this site's work: what `site.toml` declares, and this machine's own processes where it declares nothing.

Each kind of cluster adds its own branch here and its own room beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from intertie.agent.adapters.files import Owned
from intertie.agent.adapters.house import house_of
from intertie.agent.adapters.port import Adapter, Cluster
from intertie.agent.adapters.process import ProcessAdapter, find_cgroups
from intertie.agent.adapters.queue import QueueAdapter
from intertie.agent.config import Folder
from intertie.agent.core.model import Attempt
from intertie.agent.core.rules import Rules
from intertie.agent.kubernetes.core.settings import KubernetesRules
from intertie.agent.slurm.core.rules import Become, SlurmRules
from intertie.clock import Clock
from intertie.contracts.image import PoolImages


@dataclass(frozen=True, slots=True)
class Chosen:
    """`cluster`: of a site with a queue of its own, whose inventory and telemetry come from `describe`; None: this machine's devices are read here."""

    adapter: Adapter
    cluster: Cluster | None = None
    every_s: float = 0.0
    """Seconds between looks at the cluster, as the owner set them."""


def adapter_of(folder: Folder, rules: Rules, clock: Clock) -> Chosen:
    """`Refused` if what is declared cannot be used here."""
    if rules.kubernetes is not None:
        return on_kubernetes(folder, rules.kubernetes, clock, rules.pool_images())
    if rules.slurm is not None:
        return on_slurm(folder, rules.slurm, clock, rules.pool_images())
    return Chosen(ProcessAdapter(folder.jobs, cgroups=find_cgroups(), house=house_of(rules)))


def on_kubernetes(folder: Folder, rules: KubernetesRules, clock: Clock, images: PoolImages) -> Chosen:
    from intertie.agent.kubernetes.cluster import KubernetesCluster  # Heavy, and only where there is a cluster.
    from intertie.agent.kubernetes.folders import ClaimFiles

    cluster = KubernetesCluster(rules, folder.root / "kubernetes", clock, images=images)
    adapter = QueueAdapter(folder.jobs, cluster, ClaimFiles(rules), clock, every_s=float(rules.observe_s))
    return Chosen(adapter, cluster, float(rules.observe_s))


def on_slurm(folder: Folder, rules: SlurmRules, clock: Clock, images: PoolImages) -> Chosen:
    from intertie.agent.slurm.core.images import words_of  # Only where there is one.
    from intertie.agent.slurm.wiring import slurm_of

    cluster, files = slurm_of(rules, folder.root, clock)
    single = rules.become is Become.SELF

    def through(attempt: Attempt) -> Sequence[str]:
        return words_of(attempt, rules.images, images, files.seen(Owned(attempt.id, attempt.account)))

    adapter = QueueAdapter(folder.jobs, cluster, files, clock, every_s=rules.every_s, single_user=single, through=through)
    return Chosen(adapter, cluster, rules.every_s)
