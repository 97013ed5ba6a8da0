"""One hub and four sites joined to it at once: processes of one machine, a pool of machines, a real Slurm, and the look-alike of Kubernetes.

Each lends CPU slots and two cards of the same model, so that one job file fits all of them. Cards are fake (NVML, Slurm's character devices, an
extended resource); everything else is the product's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from tests.adapters.kubernetes_rig import rules
from tests.adapters.kubernetes_world.world import World as Cluster
from tests.adapters.kubernetes_world.world import cluster
from tests.adapters.slurm_world import ACCOUNT, GUEST, Slurm, running_slurm
from tests.fakes.gpus import Rack
from tests.journeys.stack import TENANT, Stack, end_jobs, running_stack
from tests.journeys.test_kubernetes_walk import site_toml

from intertie.agent.kubernetes.core.settings import KubernetesRules
from intertie.contracts.identity import CreateToken, Role, TokenCreated
from intertie.contracts.site import SiteKind
from intertie.embedded.process import Child, free_port, start_child

MODEL = "A100-SXM4-80GB"
CARDS = 2
PROCESSES, MACHINES, SLURM, KUBERNETES = "lab", "pool", "hpc", "kube"
SITES = (PROCESSES, MACHINES, SLURM, KUBERNETES)
QUEUED = (SLURM, KUBERNETES)
"""Those with a scheduler of their own."""
FAST = {"INTERTIE_BEAT_S": "0.2"}

PROFILE = f"""[[pool]]
pool = "cpu"
accelerator = "none"
count = 4
memory_mib = 4096
interconnect = "none"
task_types = ["train", "fine-tune", "inference", "batch"]
lendable = {{ devices = 4 }}

[[pool]]
pool = "gpu"
accelerator = "{MODEL}"
count = {CARDS}
memory_mib = 81920
interconnect = "nvlink"
task_types = ["train", "batch"]
lendable = {{ devices = {CARDS} }}
"""
SLURM_RULES = f"""[slurm]
folder = "{{folder}}"
partition = "train"
account = "{ACCOUNT}"
accounts = ["{GUEST}"]
become = "root"
every_s = 1
path = "{{path}}"
conf = "{{conf}}"

[slurm.models]
a100 = "{MODEL}"
"""


@dataclass
class Kinds:
    """The federation, and a user's hands in it."""

    stack: Stack
    slurm: Slurm
    cluster: Cluster
    nodes: dict[str, Child] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def cli(self, *words: str, folder: Path | None = None, lang: str = "", expect: int = 0, admin: bool = False) -> str:
        """What a user reads: standard output, or standard error where the command is to fail."""
        env = self.env | ({"INTERTIE_LANG": lang} if lang else {})
        if admin:
            env |= {"INTERTIE_TOKEN": (self.stack.layout.data / "admin.token").read_text(encoding="ascii").strip()}
        done = subprocess.run(
            [sys.executable, "-m", "intertie.cli", *words],
            cwd=folder or self.stack.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == expect, f"{words}: exit {done.returncode}\n{done.stdout}{done.stderr}\n{self.stack.logs()}"
        return done.stderr if expect else done.stdout


async def add_machines(kinds: Kinds, folder: Path, profile: Path) -> None:
    """A head that lends nothing itself, and a node with two slots and both cards: all work crosses their line."""
    stack, port = kinds.stack, free_port()
    rack = await asyncio.to_thread(Rack, folder / "cards-node", [MODEL] * CARDS)
    empty = await asyncio.to_thread(Rack, folder / "cards-head", [])
    data = stack.folder / MACHINES
    data.mkdir(mode=0o711)
    (data / "site.toml").write_text(f'[machines]\nlisten = "127.0.0.1:{port}"\nslots = 0\n', encoding="ascii")
    await stack.add_site(MACHINES, profile=profile, env=FAST | empty.env)
    token, home = folder / "node.token", folder / "n1"

    def join() -> None:
        node = [sys.executable, "-m", "intertie.cli", "node", "token", "--node", "n1", "--out", str(token), "--data", str(data)]
        subprocess.run(node, env=kinds.env, check=True, timeout=60, capture_output=True)
        words = ["--head", f"127.0.0.1:{port}", "--token-file", str(token), "--node", "n1", "--slots", "4", "--data", str(home)]
        command = [sys.executable, "-m", "intertie.agent", "node", "join", *words]
        subprocess.run(command, env=kinds.env | rack.env, check=True, timeout=60, capture_output=True)
        kinds.nodes["n1"] = start_child(
            "node-n1",
            (sys.executable, "-m", "intertie.agent", "node", "run", "--data", str(home)),
            run_dir=stack.layout.run,
            log_dir=stack.layout.log,
            env={**kinds.env, "INTERTIE_LOG_LEVEL": "INFO", **FAST, **rack.env},
        )

    await stack.do(join)


async def add_processes(kinds: Kinds, folder: Path, profile: Path) -> None:
    rack = await asyncio.to_thread(Rack, folder / "cards-lab", [MODEL] * CARDS)
    await kinds.stack.add_site(PROCESSES, profile=profile, env=FAST | rack.env)


async def add_slurm(kinds: Kinds, folder: Path, profile: Path) -> None:
    shared, data = folder / "shared", kinds.stack.folder / SLURM
    for made in (shared, data):
        made.mkdir(mode=0o711)
    told = SLURM_RULES.format(folder=shared, path=os.environ["PATH"], conf=kinds.slurm.conf)
    (data / "site.toml").write_text(told, encoding="utf-8")
    env = FAST | {"PATH": f"{os.environ['PATH']}:/usr/sbin"}
    await kinds.stack.add_site(SLURM, profile=profile, kind=SiteKind.SLURM, env=env, account=GUEST)


async def add_kubernetes(kinds: Kinds, folder: Path, profile: Path) -> None:
    told = kubernetes_rules(folder)
    config = kinds.cluster.kubeconfig("agent", kinds.cluster.agent_token(told))
    data = kinds.stack.folder / KUBERNETES
    data.mkdir(mode=0o711)
    (data / "site.toml").write_text(site_toml(msgspec.structs.replace(told, kubeconfig=str(config))), encoding="utf-8")
    await kinds.stack.add_site(KUBERNETES, profile=profile, kind=SiteKind.KUBERNETES, env=FAST, account="fed-acme")


def kubernetes_rules(folder: Path) -> KubernetesRules:
    return rules(folder / "cluster", observe_s=1, models={MODEL: f"NVIDIA-{MODEL}"})


@contextlib.asynccontextmanager
async def in_thread(slurm: contextlib.AbstractContextManager[Mapping[str, Slurm]]) -> AsyncIterator[asyncio.Future[Mapping[str, Slurm]]]:
    """A real Slurm takes seconds to come up: meanwhile the hub does."""
    starting = asyncio.ensure_future(asyncio.to_thread(slurm.__enter__))
    try:
        yield starting
    finally:
        with contextlib.suppress(Exception):
            await starting
            await asyncio.to_thread(slurm.__exit__, None, None, None)


@contextlib.asynccontextmanager
async def four_kinds() -> AsyncIterator[Kinds]:
    """All of it up and heard by the hub; all of it gone afterwards."""
    async with in_thread(running_slurm("hpc", nodes=2, gpus=CARDS)) as starting, running_stack() as stack:
        folder = stack.folder / "w"
        (folder / "cluster").mkdir(parents=True)
        for made in (folder, folder / "cluster"):
            made.chmod(0o711)
        profile = folder / "profile.toml"
        profile.write_text(PROFILE, encoding="ascii")
        card = {"cpu": 4, "gpus": CARDS, "labels": {"nvidia.com/gpu.product": f"NVIDIA-{MODEL}"}}
        async with cluster(folder / "cluster", kubernetes_rules(folder), {"k1": card, "k2": {"cpu": 4}}) as world:
            slurm = (await starting)["hpc"]
            token = stack.admin.post("/v1/tokens", TokenCreated, CreateToken(name="user", roles=[Role.TENANT_ADMIN], tenant=TENANT)).token
            login = {"INTERTIE_URL": stack.layout.public_url, "INTERTIE_TOKEN": token, "HOME": str(folder)}
            kinds = Kinds(stack, slurm, world, env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **login})
            try:
                async with asyncio.TaskGroup() as all_at_once:
                    for add in (add_processes, add_machines, add_slurm, add_kubernetes):
                        all_at_once.create_task(add(kinds, folder, profile))
                yield kinds
            finally:
                for child in kinds.nodes.values():
                    await stack.do(lambda child=child: child.stop(10.0))  # type: ignore[misc]  # bound now
                await stack.do(lambda: end_jobs(folder / "n1"))
