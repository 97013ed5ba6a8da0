"""What this agent saw of its native runs, one small file each: the cluster forgets its Jobs, and money needs their ends.

A file is whole or not there; what is ended in it stays ended, whatever the cluster says afterwards (BR-022).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from intertie.agent.adapters.port import NativeJob, NativePhase
from intertie.errors import Unavailable
from intertie.ids import AttemptId, is_id
from intertie.observe import log

LOG = log.get("agent.kubernetes")

# Longer than any period waits for its books.
KEEP = timedelta(days=400)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A native run as it was last seen."""

    job: NativeJob
    account: str
    uid: str
    """Of the Job: names are used again, uids are not."""
    name: str
    devices: int | None = None
    model: str = ""
    seen: datetime
    asked: str = ""
    """We asked for its end, and why, before the cluster was told."""
    launch_faults: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        return self.job.phase is NativePhase.ENDED


class Records:
    """All runs in memory, each also on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[AttemptId, Run] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in sorted(folder.glob("*.json")):
            try:
                run = msgspec.json.decode(file.read_bytes(), type=Run)
            except (OSError, msgspec.DecodeError) as err:
                LOG.warning("a record of a run cannot be read and is left where it is", file=file.name, text=str(err)[:200])
                continue
            self.runs[run.job.tag] = run

    async def keep(self, run: Run) -> None:
        """On disk when this returns. `Unavailable('kubernetes.records')`."""
        tag = run.job.tag
        if not is_id(tag):
            return
        if (had := self.runs.get(tag)) is not None and msgspec.structs.replace(had, seen=run.seen) == run:
            return
        try:
            await asyncio.to_thread(_write, self.folder / f"{tag}.json", msgspec.json.encode(run))
        except OSError as err:
            raise Unavailable("kubernetes.records", f"{self.folder}: {err}", retry_after_s=10) from err
        self.runs[tag] = run

    async def trim(self, now: datetime) -> None:
        old = [tag for tag, run in self.runs.items() if run.over and now - run.seen > KEEP]
        for tag in old:
            del self.runs[tag]
            with contextlib.suppress(OSError):
                await asyncio.to_thread((self.folder / f"{tag}.json").unlink, missing_ok=True)

    def overlapping(self, start: datetime, end: datetime) -> Iterable[Run]:
        for run in self.runs.values():
            began = run.job.started or run.job.submitted
            over = run.job.ended if run.over else None
            if began is not None and began < end and (over is None or over > start):
                yield run


def _write(file: Path, data: bytes) -> None:
    part = file.with_suffix(".part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    part.rename(file)
