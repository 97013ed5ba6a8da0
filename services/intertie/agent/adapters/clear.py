"""Removing what a job left behind: however deep, however many, however named, and nothing outside it.

`shutil.rmtree` calls itself once a level and keeps each level open: a job that nests some thousand folders would have its own kept for ever, and take the
agent's file descriptors with it. Here what lies deeper is moved up, so that two folders are open at a time.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

# One pass brings everything a level up, and no path of Linux nests deeper than a disk has inodes; who still writes there is left alone in the end.
PASSES = 200_000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def clear(path: Path) -> None:
    """Remove it, whatever it is; a link itself, never what it points at. What cannot be removed stays, in silence, as with `ignore_errors`."""
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            path.unlink()
            return
        top = os.open(path, _FOLDER)
        try:
            number = 0
            for _ in range(PASSES):
                gone, number = _pass(top, number)
                if not gone:
                    break
        finally:
            os.close(top)
        path.rmdir()


def _pass(top: int, number: int) -> tuple[int, int]:
    """How much went, and the last number given to what was moved up."""
    gone = 0
    for entry in list(os.scandir(top)):
        with contextlib.suppress(OSError):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=top)
                gone += 1
                continue
            number = _lift(entry.name, top, number)
            os.rmdir(entry.name, dir_fd=top)
            gone += 1
    return gone, number


def _lift(name: str, top: int, number: int) -> int:
    """Files of this folder away, its folders up into `top`."""
    folder = os.open(name, _FOLDER, dir_fd=top)
    try:
        for entry in list(os.scandir(folder)):
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    number += 1
                    os.rename(entry.name, f"{number}.{os.urandom(4).hex()}", src_dir_fd=folder, dst_dir_fd=top)
                else:
                    os.unlink(entry.name, dir_fd=folder)
    finally:
        os.close(folder)
    return number
