"""What runs a native job on a fake cluster's node: `Played` in memory and virtual time, as the start stub would; `Shell` with the start stub itself.

Both leave the same records in the same folder, so that what reads them cannot tell them apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from datetime import datetime
from pathlib import Path
from typing import Protocol

from intertie.agent import accounts
from intertie.agent.adapters.fake import play
from intertie.agent.adapters.port import NativeWork
from intertie.agent.core.native import BROKEN, TOO_LATE, TWICE
from intertie.clock import Clock

LOOK_S = 1.0


class Running(Protocol):
    """One native job on its node."""

    async def over(self) -> tuple[int | None, int | None]:
        """Exit code or signal of its first process."""
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None:
        """All of it, its first process included."""
        ...

    def kill_job(self) -> None:
        """The user's code, and not the stub: as the kernel does that is out of memory."""
        ...


class Node(Protocol):
    async def start(self, work: NativeWork, native_id: str, node: str) -> Running: ...


class Played:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    async def start(self, work: NativeWork, native_id: str, node: str) -> Running:
        return _Played(self.clock, work, native_id, node)


class _Played:
    def __init__(self, clock: Clock, work: NativeWork, native_id: str, node: str) -> None:
        self.clock, self.work, self.native_id, self.node = clock, work, native_id, node
        self.folder = Path(work.folder)
        self._asked: asyncio.Queue[str] = asyncio.Queue()
        self._task = asyncio.create_task(self._live(), name=f"played-{work.attempt.id}")

    async def over(self) -> tuple[int | None, int | None]:
        with contextlib.suppress(asyncio.CancelledError):
            return await asyncio.shield(self._task)
        if not self._task.cancelled():
            raise asyncio.CancelledError
        return None, int(signal.SIGKILL)

    def terminate(self) -> None:
        self._asked.put_nowait("signalled")

    def kill(self) -> None:
        self._task.cancel()

    def kill_job(self) -> None:
        self._asked.put_nowait("killed")

    async def _live(self) -> tuple[int | None, int | None]:
        try:
            (self.folder / "claimed").mkdir()
        except FileExistsError:
            return TWICE, None
        except OSError:
            return BROKEN, None
        if self.clock.now() >= self.work.start_by:
            self._record("refused", why="too_late", what="the time for its start had passed")
            return TOO_LATE, None
        if self._lease_over(self.clock.now()):
            self._record("refused", why="too_late", what="its lease had passed")
            return TOO_LATE, None
        (self.folder / "log").touch()
        _give(self.folder / "log", self.folder)
        self._record("started", node=self.node, native=self.native_id, restarts="0", cards="", **self._times())
        return await self._see_out()

    async def _see_out(self) -> tuple[int | None, int | None]:
        body = asyncio.create_task(play(self.work.attempt.spec.script, self._say, self._put))
        why = asyncio.create_task(self._reason())
        done, _ = await self._first(body, why)
        if body in done:
            end = body.result()
            if end.refused_errno is not None:
                self._record("exit", refused=str(end.refused_errno), what=end.refused_file, **self._times())
                return 127, None
            told = {"signal": str(end.signal)} if end.signal is not None else {"code": str(end.code)}
            self._record("exit", stopped="", **told, **self._times())
            return (128 + end.signal, None) if end.signal is not None else (end.code, None)
        reason = why.result()
        number = signal.SIGKILL if reason == "killed" else signal.SIGTERM
        self._record("exit", signal=str(int(number)), stopped="" if reason == "killed" else reason, **self._times())
        return 128 + number, None

    async def _first(
        self, body: asyncio.Task[object], why: asyncio.Task[str]
    ) -> tuple[set[asyncio.Task[object] | asyncio.Task[str]], set[asyncio.Task[object] | asyncio.Task[str]]]:
        both: list[asyncio.Task[object] | asyncio.Task[str]] = [body, why]
        try:
            return await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _reason(self) -> str:
        """Why it must end: the first that comes."""
        began_s = self.clock.boot_s()
        while True:
            left_s = began_s + self.work.attempt.spec.wall_s - self.clock.boot_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.001, min(LOOK_S, left_s, self._lease_left_s()))):
                    return await self._asked.get()
            if (self.folder / "stop").exists():
                return "asked"
            if self._lease_over(self.clock.now()):
                return "lease_ended"
            if self.clock.boot_s() - began_s >= self.work.attempt.spec.wall_s:
                return "wall_limit"

    def _lease(self) -> float | None:
        if self.work.attempt.lease_s <= 0:
            return None
        try:
            return float((self.folder / "lease").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0.0

    def _lease_left_s(self) -> float:
        until = self._lease()
        return LOOK_S if until is None else until - self.clock.now().timestamp()

    def _lease_over(self, now: datetime) -> bool:
        until = self._lease()
        return until is not None and now.timestamp() >= until

    def _say(self, text: bytes) -> None:
        with (self.folder / "log").open("ab") as f:
            f.write(text)
        _give(self.folder / "log", self.folder)

    def _put(self, name: str, data: bytes) -> None:
        path = self.folder / "work" / name
        path.write_bytes(data)
        _give(path, path.parent)

    def _times(self) -> dict[str, str]:
        utc_ns, boot_ns = int(self.clock.now().timestamp() * 1e6) * 1000, int(self.clock.boot_s() * 1e6) * 1000
        return {"utc_ns": str(utc_ns), "boot_ns": str(boot_ns), "boot_id": "fake"}

    def _record(self, name: str, **fields: str) -> None:
        part = self.folder / f".{name}.part"
        part.write_text("".join(f"{key}={value}\n" for key, value in {"format": "1", **fields}.items()), encoding="utf-8")
        _give(part, self.folder)
        part.rename(self.folder / name)


def _give(path: Path, folder: Path) -> None:
    """To whom the folder belongs, as if they had written it."""
    if accounts.is_root():
        owner = folder.stat()
        os.chown(path, owner.st_uid, owner.st_gid)


class Shell:
    """The start stub itself, under `sh`, as the mapped account if we may become it."""

    def __init__(self, *sh: str) -> None:
        self.sh = sh or ("/bin/sh",)

    async def start(self, work: NativeWork, native_id: str, node: str) -> Running:
        who = accounts.by_name(work.attempt.account) if accounts.is_root() and work.attempt.account else None
        process = await asyncio.create_subprocess_exec(
            *self.sh,
            f"{work.folder}/start.sh",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "SLURM_JOB_ID": native_id},
            start_new_session=True,
            user=who.uid if who else None,
            group=who.gid if who else None,
            extra_groups=list(who.groups) if who else None,
        )
        return _Shell(process)


class _Shell:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def over(self) -> tuple[int | None, int | None]:
        code = await self.process.wait()
        self._group(signal.SIGKILL)  # As a scheduler clears a node of what a job left behind.
        return (code, None) if code >= 0 else (None, -code)

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def kill(self) -> None:
        self._group(signal.SIGKILL)

    def kill_job(self) -> None:
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text(encoding="ascii").split()[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)

    def _group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
