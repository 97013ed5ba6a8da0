"""Packing a folder to travel and unpacking what came: the work that goes out with a job, the outputs that come back.

A pack is a gzipped tar, named by the digest of its bytes. It is deterministic (sorted names, no owners, whole-second times), so the same
folder gives the same digest and is uploaded once. Nothing in a pack may reach outside the folder it is unpacked into.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

import pathspec

from intertie.errors import Refused
from intertie.ids import Digest

IGNORE_FILE = ".intertieignore"
DEFAULT_IGNORES = (".git/", ".hg/", ".svn/", "__pycache__/", "*.pyc", ".venv/", "venv/", "node_modules/", ".DS_Store")
# A work folder is code and small inputs; data sets have ways of their own. Large enough for a model's checkpoint of the small kind.
LIMIT_BYTES = 512 * 1024 * 1024
# More names than this is a data set or a mistake (an environment, a cache), and each costs a system call at every site.
LIMIT_FILES = 50_000


@dataclass(frozen=True, slots=True)
class Packed:
    """What was packed. `skipped` tells which names did not travel, and why."""

    digest: Digest
    size: int
    files: int
    skipped: Sequence[str] = field(default_factory=tuple)


class _HashingWriter(io.RawIOBase):
    """Counts and hashes what is written through it, and stops at the limit."""

    def __init__(self, target: IO[bytes], limit: int) -> None:
        self._target = target
        self._limit = limit
        self.size = 0
        self.hash = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]  # RawIOBase types its buffer loosely
        self.size += view.nbytes
        if self.size > self._limit:
            raise Refused(
                "pack.too_large",
                f"the packed folder passes {self._limit // (1024 * 1024)} MiB",
                next_step=f"leave out what need not travel with {IGNORE_FILE} (same rules as .gitignore)",
            )
        self.hash.update(view)
        self._target.write(view)
        return view.nbytes


def ignore_rules(root: Path) -> pathspec.GitIgnoreSpec:
    """The folder's ignore file on top of the defaults; later lines win, `!name` takes a name back in."""
    lines: list[str] = list(DEFAULT_IGNORES)
    own = root / IGNORE_FILE
    if own.is_file():
        lines += own.read_text(encoding="utf-8", errors="replace").splitlines()
    return pathspec.GitIgnoreSpec.from_lines(lines)


def walk(root: Path, rules: pathspec.GitIgnoreSpec) -> Iterator[PurePosixPath]:
    """Names below `root` that travel, sorted; ignored folders are not entered."""
    for base, folders, files in os.walk(root):
        here = Path(base).relative_to(root)
        folders[:] = sorted(f for f in folders if not rules.match_file(f"{(here / f).as_posix()}/"))
        linked = [f for f in folders if (Path(base) / f).is_symlink()]
        folders[:] = [f for f in folders if f not in linked]
        for name in sorted([*files, *linked]):
            path = PurePosixPath((here / name).as_posix())
            if not rules.match_file(str(path)):
                yield path


def pack_folder(root: Path, target: IO[bytes], *, limit_bytes: int = LIMIT_BYTES) -> Packed:
    """Pack what `ignore_rules` leaves of `root` into `target`."""
    if not root.is_dir():
        raise Refused("pack.no_folder", f"{root} is not a folder", next_step="name the folder that the job should run in")
    return pack_names(root, walk(root, ignore_rules(root)), target, limit_bytes=limit_bytes)


def pack_names(root: Path, names: Iterable[PurePosixPath], target: IO[bytes], *, limit_bytes: int = LIMIT_BYTES) -> Packed:
    """Pack these names below `root`. Links that leave the folder, sockets and devices are skipped and told."""
    writer = _HashingWriter(target, limit_bytes)
    skipped: list[str] = []
    count = 0
    inside = root.resolve()
    with (
        gzip.GzipFile(fileobj=writer, mode="wb", mtime=0, compresslevel=6) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in names:
            if count >= LIMIT_FILES:
                raise Refused(
                    "pack.too_many_files", f"more than {LIMIT_FILES} files below {root}", next_step=f"leave folders out with {IGNORE_FILE}"
                )
            path = root / name
            try:
                about = path.lstat()
                if why := _why_not(path, about.st_mode, inside):
                    skipped.append(f"{name}: {why}")
                    continue
                entry = _entry(name, path, about)
                if stat.S_ISREG(about.st_mode):
                    with path.open("rb") as data:
                        tar.addfile(entry, data)
                else:
                    tar.addfile(entry)
            except OSError as err:
                skipped.append(f"{name}: {err.strerror}")
                continue
            count += 1
    return Packed(Digest(f"sha256:{writer.hash.hexdigest()}"), writer.size, count, tuple(skipped))


def _why_not(path: Path, mode: int, inside: Path) -> str:
    if stat.S_ISREG(mode):
        return ""
    if not stat.S_ISLNK(mode):
        return "not a plain file"
    if os.readlink(path).startswith("/"):
        return "a link with an absolute path"
    if not path.resolve().is_relative_to(inside):
        return "a link that leaves the folder"
    return ""


def _entry(name: PurePosixPath, path: Path, about: os.stat_result) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(str(name))
    entry.mtime = int(about.st_mtime)
    entry.mode = 0o755 if about.st_mode & 0o100 else 0o644
    if stat.S_ISLNK(about.st_mode):
        entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
    else:
        entry.size = about.st_size
    return entry


def unpack(archive: Path, target: Path, *, limit_bytes: int = 16 * LIMIT_BYTES) -> int:
    """Unpack into `target` and return the number of files.

    Plain files, folders and links that stay inside are written; any other entry is `Refused('pack.unsafe')`, and an archive that cannot be
    read is `Refused('pack.broken')`. The unpacked size is bounded, so that a small pack cannot fill a disk. What was written before a
    refusal stays for the caller to remove. (Our own rules, as `tarfile`'s `data` filter is missing before Python 3.11.4.)
    """
    count = total = 0
    target.mkdir(parents=True, exist_ok=True)
    inside = target.resolve()
    try:
        with tarfile.open(archive, mode="r:gz") as tar:
            for entry in tar:
                count += 1
                total += entry.size
                if total > limit_bytes or count > LIMIT_FILES:
                    raise Refused("pack.too_large", f"the pack unpacks to more than {limit_bytes} bytes or {LIMIT_FILES} files")
                _extract(tar, entry, inside)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, UnicodeError) as err:
        raise Refused("pack.broken", f"the pack cannot be read: {err}") from err
    return count


def _extract(tar: tarfile.TarFile, entry: tarfile.TarInfo, inside: Path) -> None:
    name = PurePosixPath(entry.name)
    if name.is_absolute() or ".." in name.parts or "\0" in entry.name:
        raise Refused("pack.unsafe", f"the pack holds a name that leaves its folder: {entry.name[:200]!r}")
    path = inside / name
    # The parent may pass through a link that the pack itself brought.
    if not path.parent.resolve().is_relative_to(inside):
        raise Refused("pack.unsafe", f"the pack writes through a link that leaves its folder: {entry.name[:200]!r}")
    if entry.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or path.is_file():
        path.unlink()
    if entry.issym():
        if entry.linkname.startswith("/") or not (path.parent / entry.linkname).resolve().is_relative_to(inside):
            raise Refused("pack.unsafe", f"the pack holds a link that leaves its folder: {entry.name[:200]!r} → {entry.linkname[:200]!r}")
        path.symlink_to(entry.linkname)
    elif entry.isfile():
        data = tar.extractfile(entry)
        assert data is not None  # a plain file always has bytes
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o755 if entry.mode & 0o100 else 0o644)
        with data, os.fdopen(handle, "wb") as out:
            shutil.copyfileobj(data, out, 1 << 20)
    else:
        raise Refused("pack.unsafe", f"the pack holds something that is no plain file, folder or link: {entry.name[:200]!r}")


def file_digest(path: Path) -> Digest:
    """Digest of a file's bytes, read in pieces."""
    with path.open("rb") as data:
        return Digest(f"sha256:{hashlib.file_digest(data, 'sha256').hexdigest()}")
