"""Which adapter runs this site's work: what `site.toml` declares, and this machine's own processes where it declares nothing.

Each kind of cluster adds its own branch here and its own room beside.
"""

from __future__ import annotations

from dataclasses import dataclass

from intertie.agent.adapters.port import Adapter, Cluster
from intertie.agent.adapters.process import ProcessAdapter, find_cgroups
from intertie.agent.config import Folder
from intertie.agent.core.rules import Rules
from intertie.clock import Clock


@dataclass(frozen=True, slots=True)
class Chosen:
    """`cluster`: of a site with a queue of its own, whose inventory and telemetry come from `describe`; None: this machine's devices are read here."""

    adapter: Adapter
    cluster: Cluster | None = None
    every_s: float = 0.0
    """Seconds between looks at the cluster, as the owner set them."""


def adapter_of(folder: Folder, rules: Rules, clock: Clock) -> Chosen:
    """`Refused` if what is declared cannot be used here."""
    return Chosen(ProcessAdapter(folder.jobs, cgroups=find_cgroups()))
