"""Job folders on Kubernetes: each namespace's claim is a volume that this agent sees too, at the same path as its jobs do.

A folder belongs to the namespace's uid. An agent that is root gives it to them; one that is not must be that user itself.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path, PurePath

from intertie.agent import accounts
from intertie.agent.adapters.files import RECORD_BYTES, Content, LocalFiles, Owned
from intertie.agent.adapters.port import Chunk
from intertie.agent.kubernetes.core.settings import KubernetesRules, Namespace
from intertie.contracts.job import ResultRef
from intertie.errors import Refused


class ClaimFiles:
    """The `Files` port over one folder per namespace, by the account of the job."""

    def __init__(self, rules: KubernetesRules, *, look_s: float = 1.0) -> None:
        self._look_s = look_s
        self._claims = {name: _Claim(space, look_s) for name, space in rules.namespaces.items()}

    @property
    def look_s(self) -> float:
        return self._look_s

    def _of(self, job: Owned) -> _Claim:
        found = self._claims.get(job.account)
        if found is None:
            raise Refused("kubernetes.namespace", f"{job.account[:80]!r} is no namespace that the owner's site.toml names")
        return found

    def seen(self, job: Owned) -> PurePath:
        return self._of(job).seen(job)

    async def make(self, job: Owned, content: Content) -> None:
        await self._of(job).make(job, content)

    async def claim(self, job: Owned) -> bool:
        return await self._of(job).claim(job)

    async def write(self, job: Owned, name: str, data: bytes) -> None:
        await self._of(job).write(job, name, data)

    async def read(self, job: Owned, name: str, offset: int = 0, limit: int = RECORD_BYTES) -> Chunk | None:
        return await self._of(job).read(job, name, offset, limit)

    async def claimed(self, job: Owned) -> bool:
        return await self._of(job).claimed(job)

    async def pack(self, job: Owned, outputs: Collection[str], target: Path) -> ResultRef | None:
        return await self._of(job).pack(job, outputs, target)

    async def remove(self, job: Owned, names: Collection[str] = ()) -> None:
        await self._of(job).remove(job, names)


class _Claim(LocalFiles):
    """One claim. `Refused('kubernetes.folder')` if it is not mounted here, or its jobs could not read what we write."""

    def __init__(self, space: Namespace, look_s: float) -> None:
        local = Path(space.local)
        if not local.is_dir():
            raise Refused(
                "kubernetes.folder",
                f"{local} is not there: the volume of claim {space.claim} must be mounted on this machine, at that path",
                next_step="mount it, or correct local in [kubernetes.namespaces.NAME] of site.toml",
            )
        if not accounts.is_root() and os.geteuid() != space.uid:
            raise Refused(
                "kubernetes.folder",
                f"jobs run as uid {space.uid}, and this agent (uid {os.geteuid()}) cannot give them folders in {local}",
                next_step="run the agent as that uid, or as root on a machine of its own",
            )
        self.uid, self.gid = space.uid, space.gid
        super().__init__(local, look_s=look_s)

    def _owner(self, job: Owned) -> tuple[int, int] | None:
        return (self.uid, self.gid) if accounts.is_root() else None
