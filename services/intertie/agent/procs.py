"""Processes by identity: a pid alone names nobody, since the kernel gives it out again.

Identity is pid, start ticks and kernel boot. A pidfd is opened *first* and the identity compared *then*, so that a reused pid cannot slip in
between. Waiting is by pidfd in the event loop, ours or inherited, without a thread and without a signal handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from intertie.agent.supervisor import start_ticks
from intertie.clock import kernel_boot

# A process tree deeper than this is a loop in our reading, not a tree.
MAX_ANCESTORS = 256


class Identity(msgspec.Struct, frozen=True):
    """One process beyond doubt."""

    pid: int
    start_ticks: int
    boot_id: str


def identity(pid: int) -> Identity:
    """Of a living process; `ProcessLookupError` or `FileNotFoundError` if it is gone."""
    return Identity(pid=pid, start_ticks=start_ticks(pid), boot_id=kernel_boot())


def open_same(who: Identity) -> int | None:
    """A pidfd of exactly that process, or None if it is gone (a zombie counts as gone when it is polled). The caller closes it."""
    if who.boot_id != kernel_boot():
        return None
    try:
        fd = os.pidfd_open(who.pid)
    except (ProcessLookupError, OSError):
        return None
    try:
        if start_ticks(who.pid) == who.start_ticks:
            return fd
    except (FileNotFoundError, ProcessLookupError):
        pass
    os.close(fd)
    return None


def alive(who: Identity) -> bool:
    """True if exactly that process exists and is no zombie."""
    fd = open_same(who)
    if fd is None:
        return False
    os.close(fd)
    try:
        state = Path(f"/proc/{who.pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != b"Z"


def send(who: Identity, number: signal.Signals) -> bool:
    """Signal exactly that process; False if it is gone."""
    fd = open_same(who)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)


async def gone(who: Identity) -> None:
    """Return when that process has ended (at once if it is not there)."""
    fd = open_same(who)
    if fd is None:
        return
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(fd, tell)
    try:
        await ended
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def spawn(
    argv: Sequence[str], *, stdin: int | None = None, stdout: int | None = None, stderr: Path | None = None, env: dict[str, str]
) -> int:
    """Start a process in its own session; its pid. No descriptor but those named is inherited. Reap it with `reap`."""
    actions: list[tuple[object, ...]] = []
    null = "/dev/null"
    actions.append((os.POSIX_SPAWN_DUP2, stdin, 0) if stdin is not None else (os.POSIX_SPAWN_OPEN, 0, null, os.O_RDONLY, 0))
    actions.append((os.POSIX_SPAWN_DUP2, stdout, 1) if stdout is not None else (os.POSIX_SPAWN_OPEN, 1, null, os.O_WRONLY, 0))
    target = str(stderr) if stderr else null
    actions.append((os.POSIX_SPAWN_OPEN, 2, target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    return os.posix_spawn(argv[0], list(argv), env, file_actions=actions, setsid=True)


def reap(pid: int) -> None:
    """Collect an ended child of ours; nothing happens if it still runs or is not our child."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def parent(pid: int) -> int | None:
    """The parent's pid, or None if `pid` is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def descends(pid: int, roots: Collection[int]) -> bool | None:
    """True if `pid` is one of `roots` or below one; None if it went away while we looked."""
    for _ in range(MAX_ANCESTORS):
        if pid in roots:
            return True
        above = parent(pid)
        if above is None:
            return None
        if above <= 1:
            return False
        pid = above
    return False
