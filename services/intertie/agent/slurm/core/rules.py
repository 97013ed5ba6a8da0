"""`[slurm]` of the owner's `site.toml`: how this agent reaches their Slurm, whose queue it uses, and what it may ask for.

```toml
[slurm]
folder = "/shared/intertie"        # job folders, seen by the nodes at the same path
partition = "gpu"
account = "intertie"
accounts = ["guest1", "guest2"]    # local accounts that work may run as; a tenant is mapped to one of them
every_s = 30

[slurm.models]                     # Slurm's word for a card → the pool's
a100 = "A100-SXM4-80GB"

[[slurm.map]]                      # first row whose tenant and pool fit; what it leaves out stays as above
tenant = "acme"
qos = "lent-high"
```
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec

from intertie.errors import Refused

# What sacctmgr and slurm.conf take as a name, and what no option could be mistaken for.
_NAME = re.compile(r"[A-Za-z0-9_][\w.@+-]{0,127}\Z", re.ASCII)
_PARTITIONS = re.compile(r"[A-Za-z0-9_][\w.@+-]{0,127}(,[A-Za-z0-9_][\w.@+-]{0,127})*\Z", re.ASCII)
_CONSTRAINT = re.compile(r"[A-Za-z0-9_\[(][\w.@+&|*()\[\]-]{0,255}\Z", re.ASCII)

EverySeconds = Annotated[float, msgspec.Meta(ge=1, le=3_600)]


class Become(StrEnum):
    """How a job becomes the mapped account's."""

    SELF = "self"
    """Not at all: everything runs as the agent's own user (single-user mode)."""
    ROOT = "root"
    """The agent is root and sets the uid of the child that submits."""
    SUDO = "sudo"
    """An ordinary user with one sudo rule for one wrapper."""
    REST = "rest"
    """By slurmrestd, with a token per account."""


class Images(StrEnum):
    """How this site runs a container image."""

    NONE = "none"
    APPTAINER = "apptainer"
    ENROOT = "enroot"
    PYXIS = "pyxis"


class SlurmMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the work of a tenant, or of a pool, goes. Empty `tenant` or `pool`: any."""

    tenant: str = ""
    pool: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""


class SlurmSsh(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A login node. Its host key is pinned: a file in `known_hosts` form that holds it, and nothing is taken on trust."""

    host: str
    user: str
    key: str
    known_hosts: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 22


class SlurmRest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """slurmrestd. `tokens` is a folder with one file per account, named as it, 0600; the site renews them."""

    url: str
    tokens: str
    reader: str
    """The account whose token reads queue and accounting."""
    version: str = "v0.0.38"
    gres_key: str = ""
    """How cards are asked for: `gres` (v0.0.38) or `tres_per_node` (later); empty: by the version."""


class SlurmRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[slurm]` of site.toml."""

    folder: str
    """Job folders: absolute, on storage that the agent (or its wrapper) and every node see."""
    nodes_see: str = ""
    """The same folder's path on the nodes, if it is another one."""
    cluster: str = ""
    """Named with every command (`-M`) where one Slurm serves several; needs slurmdbd."""
    partition: str = ""
    account: str = ""
    qos: str = ""
    accounts: list[str] = []
    """Local accounts that work may run as; empty: any that is nobody's of the system."""
    become: Become = Become.SELF
    wrapper: str = "/usr/local/libexec/intertie-as"
    every_s: EverySeconds = 30.0
    """Seconds between looks at the queue; made longer by itself while slurmctld is slow."""
    models: dict[str, str] = {}
    cards_per_node: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Above this a job spans nodes; 0: one node."""
    cpus_per_card: Annotated[int, msgspec.Meta(ge=1, le=1_024)] = 1
    memory_mib_per_card: Annotated[int, msgspec.Meta(ge=0)] = 0
    """0: the site's own default."""
    memory_mib_per_slot: Annotated[int, msgspec.Meta(ge=0)] = 0
    map: list[SlurmMap] = []
    images: Images = Images.NONE
    timeout_s: Annotated[float, msgspec.Meta(ge=1, le=600)] = 30.0
    """For one command; what takes longer is not known to have been done."""
    look_back_days: Annotated[int, msgspec.Meta(ge=1, le=90)] = 14
    """How far the accounting is searched for work that this agent does not remember."""
    conf: str = ""
    """`SLURM_CONF` of the commands, if it is not where they look."""
    path: str = "/usr/local/bin:/usr/bin:/bin:/opt/slurm/bin"
    """Where the commands are looked for, also by the wrapper."""
    ssh: SlurmSsh | None = None
    rest: SlurmRest | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where one piece of work goes."""

    partition: str
    account: str
    qos: str
    constraint: str = ""
    reservation: str = ""


def place_of(rules: SlurmRules, tenant: str, pool: str) -> Place:
    """By the first row whose tenant and pool fit; what it leaves out is the site's."""
    row = next((one for one in rules.map if one.tenant in ("", tenant) and one.pool in ("", pool)), SlurmMap())
    return Place(row.partition or rules.partition, row.account or rules.account, row.qos or rules.qos, row.constraint, row.reservation)


def placements(rules: SlurmRules) -> list[Place]:
    """All places where work may go, each once: the site's own, and those of the map."""
    places = [Place(rules.partition, rules.account, rules.qos)]
    places += [
        Place(row.partition or rules.partition, row.account or rules.account, row.qos or rules.qos, row.constraint, row.reservation)
        for row in rules.map
    ]
    return list(dict.fromkeys(places))


def partitions(rules: SlurmRules) -> frozenset[str]:
    """All that are used; empty: the site's default one."""
    named = [rules.partition, *[row.partition for row in rules.map]]
    return frozenset(part for one in named if one for part in one.split(","))


def check(rules: SlurmRules) -> None:
    """`Refused('slurm.rules')` for what sbatch would read as something else, or what contradicts itself."""
    for what, value, pattern in (
        ("cluster", rules.cluster, _NAME),
        *[("account", one, _NAME) for one in (rules.account, *[row.account for row in rules.map], *rules.accounts)],
        *[("qos", one, _NAME) for one in (rules.qos, *[row.qos for row in rules.map])],
        *[("partition", one, _PARTITIONS) for one in (rules.partition, *[row.partition for row in rules.map])],
        *[("reservation", row.reservation, _PARTITIONS) for row in rules.map],
        *[("constraint", row.constraint, _CONSTRAINT) for row in rules.map],
        *[("models", model, _NAME) for model in rules.models],
    ):
        if value and not pattern.match(value):
            raise _wrong(f"{what} = {value!r} is no name that Slurm has")
    for what, value in (("folder", rules.folder), ("nodes_see", rules.nodes_see or "/"), ("wrapper", rules.wrapper)):
        if not value.startswith("/") or ".." in value.split("/") or not value.isprintable():
            raise _wrong(f"{what} = {value!r} is no absolute path")
    if rules.become is Become.REST and rules.rest is None:
        raise _wrong('become = "rest" needs [slurm.rest]')
    if rules.ssh is not None and rules.become is Become.ROOT:
        raise _wrong('become = "root" is of this machine; by SSH use "sudo" or "self"')
    if len(set(rules.models.values())) != len(rules.models):
        raise _wrong("two words of Slurm name the same card in [slurm.models]")


def _wrong(text: str) -> Refused:
    return Refused("slurm.rules", f"[slurm] of site.toml: {text}", next_step="ops/docs/slurm.md has the table of settings")
