"""Packing declared outputs out of a folder that the job owned and may have booby-trapped.

The walk goes by folder descriptors and opens nothing through a link, so what is packed lies inside, whatever is renamed meanwhile. As root
only files that belong to the job's account are read: a hard link to somebody else's file stays out.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import stat
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from intertie.contracts.job import ResultRef
from intertie.errors import Refused
from intertie.ids import Digest

# What a gateway takes in one piece; larger results are a matter of data sets, which have ways of their own.
LIMIT_BYTES = 8 * 1024**3
LIMIT_FILES = 50_000
DEPTH = 64


def pattern(glob: str) -> re.Pattern[str]:
    """A glob below the work folder: `*` and `?` stay inside a name, `**` as a whole name crosses folders, a folder's name takes all below it.

    A tenant writes it and the agent's one interpreter tries it on every file, so no choice is ever tried twice: of all places where a part
    between two wildcards fits the first is as good as any, and the atomic groups `(?>…)` keep it.
    """
    names = glob.strip().removeprefix("./").rstrip("/").split("/")
    stretches: list[list[str]] = [[]]
    for name in names:
        if name == "**":
            stretches.append([])
        else:
            stretches[-1].append(_name(name))
    first, *middle = ["/".join(stretch) for stretch in stretches]
    if not middle:
        return re.compile(f"{first}(?:/.*)?", re.DOTALL)
    *between, last = middle
    out = f"{first}/" if first else ""
    out += "".join(f"(?>(?:[^/]+/)*?{stretch}/)" for stretch in between if stretch)
    out += f"(?:[^/]+/)*{last}(?:/.*)?" if last else ".+"
    return re.compile(out, re.DOTALL)


def _name(glob: str) -> str:
    """One name of a glob."""
    first, *more = ["[^/]".join(re.escape(text) for text in part.split("?")) for part in re.split(r"\*+", glob)]
    if not more:
        return first
    *between, last = more
    return first + "".join(f"(?>[^/]*?{text})" for text in between) + f"[^/]*{last}"


def _walk(folder: int, prefix: str, depth: int) -> Iterator[tuple[str, int, str]]:
    """(path below the root, descriptor of its folder, name) of every plain file, sorted."""
    if depth > DEPTH:
        return
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        path = f"{prefix}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            try:
                below = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            except OSError:
                continue
            try:
                yield from _walk(below, f"{path}/", depth + 1)
            finally:
                os.close(below)
        elif entry.is_file(follow_symlinks=False):
            yield path, folder, entry.name


class _Hashing:
    """A file object that hashes what passes and refuses to pass the limit."""

    def __init__(self, target: IO[bytes]) -> None:
        self.target, self.size, self.hash = target, 0, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.size += len(data)
        if self.size > LIMIT_BYTES:
            raise Refused("agent.outputs_too_large", f"the packed outputs pass {LIMIT_BYTES} bytes")
        self.hash.update(data)
        return self.target.write(data)

    def flush(self) -> None:
        self.target.flush()


def pack_outputs(root: Path, globs: Sequence[str], target: Path, owner: int | None) -> ResultRef | None:
    """Pack what matches into `target` (tar.gz, 0600); None if nothing does. `owner`: the only uid whose files are taken."""
    wanted = [pattern(glob) for glob in globs]
    files = 0
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as raw:
            through = _Hashing(raw)
            with (
                gzip.GzipFile(fileobj=through, mode="wb", mtime=0, compresslevel=6) as zipped,
                tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
            ):
                for path, folder, name in _walk(top, "", 0):
                    if any(one.fullmatch(path) for one in wanted) and _add(tar, path, folder, name, owner):
                        files += 1
                        if files > LIMIT_FILES:
                            raise Refused("agent.outputs_too_many", f"more than {LIMIT_FILES} files match the declared outputs")
            raw.flush()
            os.fsync(raw.fileno())
    finally:
        os.close(top)
    if not files:
        target.unlink()
        return None
    return ResultRef(digest=Digest(f"sha256:{through.hash.hexdigest()}"), size=through.size, files=files)


def _add(tar: tarfile.TarFile, path: str, folder: int, name: str, owner: int | None) -> bool:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return False
    with open(fd, "rb") as data:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or (owner is not None and about.st_uid != owner):
            return False
        entry = tarfile.TarInfo(path)
        entry.size, entry.mtime = about.st_size, int(about.st_mtime)
        entry.mode = 0o755 if about.st_mode & 0o100 else 0o644
        tar.addfile(entry, data)
    return True
