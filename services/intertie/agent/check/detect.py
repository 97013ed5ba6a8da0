"""A profile from what can be seen: cards, memory, links, partitions, storage. The owner answers three things: how much, when, for whom."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from intertie.agent.check.slurm import Partition
from intertie.agent.sources.reading import Reading
from intertie.contracts.site import PoolProfile

SHARED = frozenset("lustre gpfs beegfs ceph nfs nfs4 glusterfs wekafs orangefs pvfs2 cvmfs panfs fuse.juicefs fuse.cephfs".split())
HEAD = """\
# What was seen here. Read it once, answer the three questions of each pool, then:
#   intertie-agent join --hub URL --token-file FILE --profile {file}
# 请核对,并回答每个资源池的三个问题:让出多少、什么时候、给谁用。
"""
QUESTIONS = """\
# 1 · how much (让出多少): devices that you lend at most.
# 2 · when (什么时候): hours in the site's own time zone, such as ["20:00-08:00"]; empty: always.
lendable = {{ devices = {devices}, windows = [] }}
# 3 · for whom (给谁用): nobody, until the hub's operator maps a tenant to an account of yours:
#     intertie tenant map TENANT SITE ACCOUNT
"""


def interconnect_of(reading: Reading, infiniband: Path = Path("/sys/class/infiniband")) -> str:
    """`nvlink`, else `infiniband` where a port is there, else `pcie`; empty where the driver cannot say: not guessed."""
    cards = [card for card in reading.cards if not card.lost]
    if any(card.links for card in cards):
        return "nvlink"
    if not cards or any(card.links is None for card in cards):
        return ""
    return "infiniband" if ports(infiniband) else "pcie"


def ports(infiniband: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Names of InfiniBand (or RoCE) adapters."""
    try:
        return sorted(path.name for path in infiniband.iterdir())
    except OSError:
        return []


def storage_of(mounts: str) -> list[str]:
    """Shared file systems of `/proc/self/mounts`: `lustre /lustre`."""
    found = []
    for row in mounts.splitlines():
        fields = row.split()
        if len(fields) >= 3 and fields[2] in SHARED:
            found.append(f"{fields[2]} {fields[1]}")
    return sorted(set(found))


def written(
    profiles: Sequence[PoolProfile], *, file: str, storage: Sequence[str], adapters: Sequence[str], queues: Sequence[Partition]
) -> str:
    """The TOML that `join --profile` reads."""
    parts = [HEAD.format(file=file)]
    if adapters:
        parts.append(f"# InfiniBand or RoCE adapters: {', '.join(adapters)}\n")
    if storage:
        parts.append(f"# shared storage: {', '.join(storage)}\n")
    parts += _queues(queues)
    parts += [_pool(one, storage) for one in profiles]
    return "\n".join(parts)


def _pool(one: PoolProfile, storage: Sequence[str]) -> str:
    """JSON's strings and lists are valid TOML."""
    told = {
        "pool": one.pool,
        "accelerator": one.accelerator,
        "count": one.count,
        "memory_mib": one.memory_mib,
        "interconnect": one.interconnect,
        "task_types": [task.value for task in one.task_types],
        "storage": one.storage or ", ".join(storage),
    }
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in told.items() if value != ""]
    return "\n".join(["[[pool]]", *lines, QUESTIONS.format(devices=one.lendable.devices)])


def _queues(queues: Sequence[Partition]) -> Iterator[str]:
    if not queues:
        return
    yield "# partitions of this site's Slurm; each pool that lends from one names it in site.toml:\n" + "".join(
        f"#   {one.name}: {one.nodes} nodes, {one.state}, {one.gres or 'no gres'}, {one.cpus} CPUs, {one.memory} MiB a node\n"
        for one in queues
    )
