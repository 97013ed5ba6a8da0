"""What holds a run inside its limits and its folders, as plain tables: which files of which cgroup hierarchy say what, which mounts hide or show
which folder, and the command line of a container. Supervisors do it (`agent.supervisor`), this decides it.

Hosts differ: version 2 with controllers, version 1 with one hierarchy for each, or both at once with the limits in version 1 (most containers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from intertie.agent.core.machines import DataFolder, Limits

PERIOD_US = 100_000
"""Of the CPU quota: the kernels' own default."""
WANTED = ("memory", "cpu", "pids")


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where a run's groups may be made: a folder for each controller. Version 2's is one folder for all that it has."""

    v2: str = ""
    v2_has: frozenset[str] = frozenset()
    v1: Mapping[str, str] = field(default_factory=dict)

    def of(self, controller: str) -> tuple[int, str] | None:
        """(version, folder) where this controller limits; version 2 first."""
        if controller in self.v2_has:
            return 2, self.v2
        return (1, self.v1[controller]) if controller in self.v1 else None


def mounted(mounts: str) -> tuple[str, dict[str, str]]:
    """(mount point of version 2, controller → mount point of version 1) from the text of /proc/self/mounts."""
    two, one = "", dict[str, str]()
    for line in mounts.splitlines():
        parts = line.split()
        if len(parts) < 4:
            continue
        if parts[2] == "cgroup2":
            two = two or parts[1]
        elif parts[2] == "cgroup":
            for option in parts[3].split(","):
                if option in WANTED:
                    one.setdefault(option, parts[1])
    return two, one


@dataclass(frozen=True, slots=True)
class Group:
    """One folder to make, what to write into it before the run joins it, and the file that counts kills for want of memory."""

    folder: str
    writes: Sequence[tuple[str, str]]
    oom: str = ""


def groups(hierarchies: Hierarchies, run: str, limits: Limits, devices: int) -> tuple[list[Group], list[str]]:
    """The groups of one run, and the limits that this host cannot hold it to (in words)."""
    asked = {
        "memory": limits.memory_mib * 1_048_576 * max(1, devices),
        "cpu": round(limits.cpus * PERIOD_US * max(1, devices)),
        "pids": limits.pids,
    }
    made: dict[str, Group] = {}
    missing: list[str] = []
    for controller in WANTED:
        value = asked[controller]
        if value <= 0:
            continue
        found = hierarchies.of(controller)
        if found is None:
            missing.append(controller)
            continue
        version, folder = found
        place = f"{folder}/{run}"
        before = made.get(place, Group(place, ()))
        made[place] = Group(place, (*before.writes, *_writes(version, controller, value)), before.oom or _oom(version, controller))
    return list(made.values()), missing


def _writes(version: int, controller: str, value: int) -> list[tuple[str, str]]:
    """A name that begins with `-` may be refused by the kernel: swap is not accounted for everywhere."""
    match version, controller:
        case 2, "memory":
            return [("memory.max", str(value)), ("-memory.swap.max", "0")]
        case 2, "cpu":
            return [("cpu.max", f"{value} {PERIOD_US}")]
        case 1, "memory":
            return [("memory.limit_in_bytes", str(value)), ("-memory.memsw.limit_in_bytes", str(value))]
        case 1, "cpu":
            return [("cpu.cfs_period_us", str(PERIOD_US)), ("cpu.cfs_quota_us", str(value))]
        case _:
            return [("pids.max", str(value))]


def _oom(version: int, controller: str) -> str:
    if controller != "memory":
        return ""
    return "memory.events" if version == 2 else "memory.oom_control"


# --- folders -------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """A declared folder as one run sees it: `rw`, `ro`, or `hidden` behind an empty one."""

    path: str
    how: str


def seen(folders: Sequence[DataFolder], tenant: str | None) -> list[Seen]:
    """Every declared folder for a run of this tenant; None (the owner's own work): nothing is changed."""
    if tenant is None:
        return []
    best: dict[str, str] = {}
    for one in folders:
        how = one.mode if one.is_for(tenant) else "hidden"
        order = ("hidden", "ro", "rw")
        if order.index(how) >= order.index(best.get(one.path, "hidden")):
            best[one.path] = how
    return [Seen(path, how) for path, how in sorted(best.items())]


def nested(folders: Sequence[DataFolder]) -> tuple[str, str] | None:
    """Two declared folders of which one lies in the other: what of it is seen would depend on an order."""
    # By their parts: as texts `/srv/a-b` stands between `/srv/a` and what lies in it.
    paths = sorted({one.path.rstrip("/") or "/" for one in folders}, key=lambda path: path.split("/"))
    for outer, inner in zip(paths, paths[1:], strict=False):
        if inner.startswith(outer.rstrip("/") + "/"):
            return outer, inner
    return None


# --- containers ----------------------------------------------------------------------------------------------------------------------------


def command(
    image: str, program: str, argv: Sequence[str], *, work: str, shown: Sequence[str], folders: Sequence[Seen], gpus: bool
) -> list[str]:
    """The command line that runs `argv` in an image (a file, or `docker://…`). `shown`: the run's own folders, as they are; the environment is kept."""
    binds = [word for path in shown for word in ("--bind", f"{path}:{path}")]
    binds += [word for one in folders if one.how != "hidden" for word in ("--bind", f"{one.path}:{one.path}:{one.how}")]
    return [
        program,
        "exec",
        "--contain",
        "--no-home",
        "--no-privs",
        *(["--nv"] if gpus else []),
        "--pwd",
        work,
        *binds,
        image,
        *argv,
    ]
