"""The owner's limits, data folders and container for work on this machine: what of them can be held here, and what a job's supervisor is told.

What is declared is enforced or refused, never advised: a limit that no cgroup of this host holds, or a data folder without the right to make mount
namespaces, refuses the work with a named code.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from intertie.agent import accounts
from intertie.agent.core.containment import WANTED, Group, Hierarchies, command, groups, mounted, nested, seen
from intertie.agent.core.images import must_take
from intertie.agent.core.machines import Container, DataFolder, Limits
from intertie.agent.core.model import Attempt
from intertie.agent.core.rules import Rules
from intertie.contracts.image import PoolImages
from intertie.contracts.site import DeviceKind
from intertie.errors import Refused

HOME = "intertie"
"""Our own folder in each hierarchy."""


def find_hierarchies(mounts: str | None = None, own: Callable[[Path], bool] | None = None) -> Hierarchies:
    """Where this host lets us limit runs; empty where we may make no groups. `own` makes our folder in a hierarchy (tests give fake trees)."""
    text = mounts if mounts is not None else Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    take = own or _own
    two, one = mounted(text)
    v1 = {controller: f"{place}/{HOME}" for controller, place in one.items() if take(Path(place) / HOME)}
    if not two or not take(Path(two) / HOME):
        return Hierarchies(v1=v1)
    return Hierarchies(v2=f"{two}/{HOME}", v2_has=_delegated(Path(two)), v1=v1)


def _own(folder: Path) -> bool:
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _delegated(root: Path) -> frozenset[str]:
    """Controllers of version 2 that a run's own group will have: those that can be handed down twice."""
    for folder in (root, root / HOME):
        for controller in WANTED:
            try:
                (folder / "cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")
            except OSError:
                continue  # Not there, or a process lives in that very group: it cannot be handed down.
    try:
        handed = (root / HOME / "cgroup.subtree_control").read_text(encoding="ascii").split()
    except OSError:
        return frozenset()
    return frozenset(handed) & frozenset(WANTED)


@dataclass(frozen=True, slots=True)
class House:
    """The rules of this machine for work of others. Without any it changes nothing."""

    limits: Limits = Limits()
    folders: Sequence[DataFolder] = ()
    container: Container | None = None
    images: PoolImages = PoolImages()
    """Which images that a job names run here."""
    hierarchies: Hierarchies = field(default_factory=Hierarchies)
    root: bool = field(default_factory=accounts.is_root)
    """Mounts may be made for others."""

    def spec(self, attempt: Attempt, argv: Sequence[str], *, work: str, shown: Sequence[str]) -> dict[str, Any]:
        """What goes into `spec.json`: argv, groups, mounts. The owner's own local work is bound by none of it. `Refused`: it cannot be held."""
        if attempt.local is not None:
            return {"argv": list(argv)}
        visible = seen(self.folders, attempt.tenant)
        if visible:
            self._must_mount()
        line = list(argv)
        if image := self._image(attempt):
            program = self._program(*image)
            line = command(image[1], program, argv, work=work, shown=shown, folders=visible, gpus=attempt.kind is DeviceKind.GPU)
        return {
            "argv": line,
            "limits": [_told(one) for one in self._groups(attempt)],
            "mounts": [{"path": one.path, "how": one.how} for one in visible],
        }

    def _image(self, attempt: Attempt) -> tuple[str, str] | None:
        """(runtime, image): the job's own goes before the owner's; None: it is a process as it is."""
        if attempt.spec.image:
            return self.images.runtime, f"docker://{must_take(attempt.spec.image, self.images).pinned}"
        return (self.container.runtime, self.container.image) if self.container is not None else None

    def _program(self, runtime: str, image: str) -> str:
        if program := shutil.which(runtime):
            return program
        raise Refused(
            "agent.container_runtime",
            f"this job runs in {image}, and {runtime} is not installed",
            next_step=f"install {runtime}, or take [images] and [machines] container out of site.toml",
        )

    def _groups(self, attempt: Attempt) -> list[Group]:
        made, missing = groups(self.hierarchies, attempt.id, self.limits, len(attempt.devices))
        if missing:
            raise Refused(
                "agent.limits",
                f"[machines] limits are declared, and no cgroup of this host holds a run to its {', '.join(missing)}",
                next_step="run the agent as root where cgroups may be made, or take the limit out of site.toml",
            )
        return made

    def _must_mount(self) -> None:
        if not self.root:
            raise Refused(
                "agent.data_not_enforced",
                "[[data]] folders are declared, and an agent that is not root cannot keep others out of them",
                next_step="run the agent as root, or take [[data]] out of site.toml",
            )
        if pair := nested(self.folders):
            raise Refused("agent.data_nested", f"[[data]] {pair[1]} lies in {pair[0]}", next_step="declare folders that lie apart")
        for one in self.folders:
            if not os.path.isdir(one.path):
                raise Refused(
                    "agent.data_missing", f"[[data]] {one.path} is no folder here", next_step="mount it, or take it out of site.toml"
                )


def _told(group: Group) -> dict[str, Any]:
    return {"folder": group.folder, "writes": [list(pair) for pair in group.writes], "oom": group.oom}


def house_of(rules: Rules) -> House:
    """From `site.toml`; cgroups are looked for only where a limit asks for them."""
    declared = rules.machines
    limits = declared.limits if declared is not None else Limits()
    container = declared.container if declared is not None else None
    asked = limits.memory_mib or limits.cpus or limits.pids
    return House(limits, tuple(rules.data), container, rules.pool_images(), find_hierarchies() if asked else Hierarchies())
