"""A site's machine in memory, deterministic and in virtual time: for the simulator, the demo and tests. Product code, not a mock.

It runs scripts of a few commands that `/bin/sh` runs too, so that one conformance suite speaks to both: `echo WORDS`, `sleep SECONDS`,
`echo WORDS > FILE`, `exit CODE`, `kill -9 $$`. Anything else is refused as a missing interpreter would be. What a real machine keeps on its
disk (`Disk`) outlives the adapter, as the agent's crash must not end a job.
"""

from __future__ import annotations

import asyncio
import errno
import gzip
import hashlib
import io
import shlex
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from intertie.agent.adapters.port import Chunk, Presence
from intertie.agent.core.attempts import Exit
from intertie.agent.core.leases import Deadline, follows
from intertie.agent.core.model import Attempt, StartedRecord
from intertie.agent.outputs import pattern
from intertie.clock import Clock
from intertie.contracts.job import ResultRef
from intertie.ids import AttemptId, Digest


@dataclass(slots=True)
class Run:
    """One job as the machine sees it."""

    attempt: Attempt
    log: bytes = b""
    files: dict[str, bytes] = field(default_factory=dict)
    fenced: bool = False
    trimmed: bool = False
    deadline: Deadline | None = None
    started: StartedRecord | None = None
    exit: Exit | None = None
    stop_asked: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    living: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Disk:
    """What survives the agent: the machine itself."""

    runs: dict[AttemptId, Run] = field(default_factory=dict)
    fenced: set[AttemptId] = field(default_factory=set)
    """Fenced before anything of them was prepared."""
    spent: int = 0
    """Jobs started so far; the next one's pid."""
    folder: Path | None = None
    """Where packed results lie; made when the first is packed."""


# As the supervisor looks at its lease.
LEASE_LOOK_S = 1.0


async def play(script: str, say: Callable[[bytes], None], write: Callable[[str, bytes], None]) -> Exit:
    """Run a script of the few commands that are known here; `say` takes what it prints, `write` a file of its work folder."""
    lines = script.replace("\r\n", "\n").splitlines()
    if lines and lines[0].startswith("#!") and lines[0].strip() not in ("#!/bin/sh", "#!/bin/bash"):
        return Exit(certain=True, refused_errno=errno.ENOENT, refused_file="script", refused_text="No such file or directory")
    for line in lines:
        words = shlex.split(line, comments=True)
        match words:
            case []:
                continue
            case ["sleep", seconds]:
                await asyncio.sleep(float(seconds))
            case ["echo", *said, ">", name]:
                write(name, (" ".join(said) + "\n").encode())
            case ["echo", *said]:
                say((" ".join(said) + "\n").encode())
            case ["exit", code]:
                return Exit(certain=True, code=int(code))
            case ["kill", "-9", "$$"]:
                return Exit(certain=True, signal=9)
            case _:
                say(f"{words[0]}: not found\n".encode())
                return Exit(certain=True, code=127)
    return Exit(certain=True, code=0)


class FakeAdapter:
    """`accounts`: local accounts that exist; empty makes it a single-user site."""

    def __init__(self, clock: Clock, disk: Disk | None = None, accounts: frozenset[str] = frozenset({"guest"})) -> None:
        self.clock = clock
        self.disk = disk or Disk()
        self.accounts = accounts

    @property
    def single_user(self) -> bool:
        return not self.accounts

    @property
    def self_stop(self) -> bool:
        return True

    def may_run_as(self, account: str) -> str:
        return "" if self.single_user or account in self.accounts else f"there is no local account {account!r} on this machine"

    async def prepare(self, attempt: Attempt, pack: Path | None) -> None:
        run = self.disk.runs.setdefault(attempt.id, Run(attempt))
        run.fenced = run.fenced or attempt.id in self.disk.fenced

    async def start(self, attempt: Attempt) -> StartedRecord | Exit:
        run = self.disk.runs[attempt.id]
        if run.fenced:
            return Exit(certain=True, refused_errno=errno.EEXIST, refused_file="supervisor", refused_text="fenced")
        if run.started is None and run.deadline is not None and self._passed(run.deadline):
            return Exit(certain=True, refused_errno=errno.ETIME, refused_file="supervisor", refused_text="too late: its lease had passed")
        if run.started is None:
            self.disk.spent += 1
            run.started = StartedRecord(
                utc_ns=int(self.clock.now().timestamp() * 1e6) * 1000,
                boot_ns=int(self.clock.boot_s() * 1e6) * 1000,
                native_id=str(self.disk.spent),
            )
            run.living = asyncio.create_task(self._live(run), name=f"fake-{attempt.id}")
        return run.started

    async def _live(self, run: Run) -> None:
        """Execute the script; the wall limit, the end of its lease and a stop cut it short."""
        assert run.started is not None
        body = asyncio.create_task(self._execute(run))
        stop = asyncio.create_task(run.stop_asked.wait())
        lease = asyncio.create_task(self._lease(run))
        ends = {body, stop, lease}
        done, _ = await asyncio.wait(ends, timeout=run.attempt.spec.wall_s, return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        if body in done:
            end = body.result()
        else:
            why = "asked" if stop in done else "lease_ended" if lease in done else "wall_limit"
            end = Exit(certain=True, signal=15, stopped_for=why)
        ran_us = int(self.clock.boot_s() * 1e6) - run.started.boot_ns // 1000
        run.exit = Exit(
            certain=True,
            code=end.code,
            signal=end.signal,
            refused_errno=end.refused_errno,
            refused_file=end.refused_file,
            refused_text=end.refused_text,
            stopped_for=end.stopped_for,
            ran_us=ran_us,
        )
        run.over.set()

    async def _lease(self, run: Run) -> None:
        """Return when the lease is over. Work without one is never looked at again."""
        if run.deadline is None:
            await asyncio.Event().wait()
        held: Deadline | None = None
        while (held := follows(held, run.deadline)) is not None:
            if self._passed(held):
                return
            left_s = min(held.boot_s - self.clock.boot_s(), held.utc - self.clock.now().timestamp())
            await asyncio.sleep(min(LEASE_LOOK_S, max(0.001, left_s)))

    def _passed(self, until: Deadline) -> bool:
        return self.clock.boot_s() >= until.boot_s or self.clock.now().timestamp() >= until.utc

    async def renew(self, attempt: AttemptId, until: Deadline) -> None:
        if (run := self.disk.runs.get(attempt)) is not None:
            run.deadline = until

    async def deadline(self, attempt: AttemptId) -> Deadline | None:
        run = self.disk.runs.get(attempt)
        return run.deadline if run is not None else None

    async def found(self) -> list[Attempt]:
        return [run.attempt for run in self.disk.runs.values() if not run.fenced and not run.trimmed]

    async def _execute(self, run: Run) -> Exit:
        def say(text: bytes) -> None:
            run.log += text

        return await play(run.attempt.spec.script, say, run.files.__setitem__)

    async def presence(self, attempt: AttemptId) -> Presence:
        run = self.disk.runs.get(attempt)
        if run is None:
            return Presence.ABSENT
        return Presence.BEGUN if run.started is not None else Presence.PREPARED

    async def fence(self, attempt: AttemptId) -> bool:
        run = self.disk.runs.get(attempt)
        if run is None:
            self.disk.fenced.add(attempt)
            return True
        if run.started is not None:
            return False
        run.fenced = True
        return True

    async def ended(self, attempt: Attempt) -> Exit:
        run = self.disk.runs.get(attempt.id)
        if run is None or run.started is None:
            return Exit(certain=False)
        await run.over.wait()
        assert run.exit is not None
        return run.exit

    async def alive(self, attempt: AttemptId) -> bool:
        run = self.disk.runs.get(attempt)
        return run is not None and run.started is not None and run.exit is None

    async def stop(self, attempt: AttemptId, grace_s: int) -> None:
        if (run := self.disk.runs.get(attempt)) is not None:
            run.stop_asked.set()

    async def pack(self, attempt: Attempt) -> ResultRef | None:
        run = self.disk.runs[attempt.id]
        wanted = [pattern(glob) for glob in attempt.spec.outputs]
        found = {name: data for name, data in sorted(run.files.items()) if any(one.fullmatch(name) for one in wanted)}
        if not found:
            return None
        buffer = io.BytesIO()
        with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
            for name, data in found.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
        self.result(attempt.id).write_bytes(buffer.getvalue())
        digest = Digest(f"sha256:{hashlib.sha256(buffer.getvalue()).hexdigest()}")
        return ResultRef(digest=digest, size=len(buffer.getvalue()), files=len(found))

    def result(self, attempt: AttemptId) -> Path:
        if self.disk.folder is None:
            self.disk.folder = Path(tempfile.mkdtemp(prefix="fake-"))
        return self.disk.folder / f"{attempt}.tar.gz"

    async def log(self, attempt: AttemptId, offset: int, limit: int) -> Chunk:
        run = self.disk.runs.get(attempt)
        if run is None:
            return Chunk(b"", 0, 0)
        at = min(offset, len(run.log))
        return Chunk(run.log[at : at + limit], at, len(run.log))

    async def trim(self, attempt: AttemptId) -> None:
        if (run := self.disk.runs.get(attempt)) is not None:
            run.files.clear()
            run.trimmed = True
            self.result(attempt).unlink(missing_ok=True)

    async def forget(self, attempt: AttemptId) -> None:
        self.disk.runs.pop(attempt, None)

    def roots(self) -> dict[int, AttemptId]:
        return {int(run.started.native_id): name for name, run in self.disk.runs.items() if run.started is not None and run.exit is None}
