"""Job folders of a site with a queue of its own: on storage that the agent and the nodes both see.

`Files` is the port; `LocalFiles` is a folder that is mounted on both sides. In a job folder lie

    start.sh                  the start stub (`stub.py`), the first process of the native job
    script env.sh             what the user wrote, and the values of the environment (0600, removed by the stub once they are read)
    work/ tmp/                where it runs
    lease stop                the agent's: until when leased work may run, that it is to end
    claimed/                  made by whoever comes first: the stub that begins, or the agent that fences; never by two
    refused started exit      the stub's records: why it began nothing, that it began, how it ended
    log                       stdout and stderr

The whole folder belongs to the job's account: nothing in it is believed further than that account may speak for itself.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import ParamSpec, Protocol, TypeVar

from intertie.agent import accounts
from intertie.agent.adapters.clear import clear
from intertie.agent.adapters.port import Chunk
from intertie.agent.outputs import pack_outputs
from intertie.contracts.job import ResultRef
from intertie.errors import Refused, Unavailable
from intertie.ids import AttemptId
from intertie.pack import unpack

P = ParamSpec("P")
T = TypeVar("T")

CLAIMED = "claimed"
# What a job can do to its own folder; whatever else goes wrong in it is the storage's.
ITS_OWN = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG})
# Records are a few lines; whatever is longer was not written by a stub.
RECORD_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Owned:
    """A job folder: whose it is, by the mapped account (empty: the agent's own user)."""

    attempt: AttemptId
    account: str = ""


@dataclass(frozen=True, slots=True)
class Content:
    """What is put into a job folder before its submit. `work/` and `tmp/` are made, too."""

    files: Mapping[str, tuple[bytes, int]] = field(default_factory=dict)
    """By name: bytes and mode."""
    pack: Path | None = None
    """The user's work, to be unpacked into `work/`; on the agent's own disk."""


class Files(Protocol):
    """Errors: `Unavailable` (the storage is away or full: nothing is known), `Refused` (it can never be so)."""

    @property
    def look_s(self) -> float:
        """Seconds between looks at one folder: what they cost here."""
        ...

    def seen(self, job: Owned) -> PurePath:
        """Where the nodes see it."""
        ...

    async def make(self, job: Owned, content: Content) -> None:
        """The folder with this content, whole. May be repeated until it is claimed."""
        ...

    async def claim(self, job: Owned) -> bool:
        """Make `claimed`, and the folder if there is none; False if somebody was first. Holds across nodes."""
        ...

    async def write(self, job: Owned, name: str, data: bytes) -> None:
        """Whole or not at all, 0600."""
        ...

    async def read(self, job: Owned, name: str, offset: int = 0, limit: int = RECORD_BYTES) -> Chunk | None:
        """None: the folder is there or surely not, and no such file in it."""
        ...

    async def claimed(self, job: Owned) -> bool:
        """Somebody made `claimed`, and it is still there."""
        ...

    async def pack(self, job: Owned, outputs: Collection[str], target: Path) -> ResultRef | None:
        """The declared outputs from `work/` into `target` on the agent's own disk; None if nothing matched."""
        ...

    async def remove(self, job: Owned, names: Collection[str] = ()) -> None:
        """These, or (none named) the folder itself."""
        ...


class LocalFiles:
    """A folder that is mounted here and on the nodes, at `nodes_see` there. As root, folders are given to the job's account."""

    def __init__(self, folder: Path, nodes_see: PurePath | None = None, *, look_s: float = 1.0) -> None:
        self.folder, self.nodes_see = folder, nodes_see or folder
        self._look_s = look_s
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)

    @property
    def look_s(self) -> float:
        return self._look_s

    def seen(self, job: Owned) -> PurePath:
        return self.nodes_see / job.attempt

    def home(self, job: Owned) -> Path:
        return self.folder / job.attempt

    async def make(self, job: Owned, content: Content) -> None:
        await self._do(self._make, job, content)

    def _make(self, job: Owned, content: Content) -> None:
        home, who = self.home(job), self._owner(job)
        # From nothing, and ours until it is whole: what an account left in a folder of its own is no place for root to write.
        clear(home)
        home.mkdir(mode=0o700)
        for name in ("work", "tmp"):
            (home / name).mkdir(mode=0o700)
        if content.pack is not None:
            unpack(content.pack, home / "work")
        for name, (data, mode) in content.files.items():
            _write(home / name, data, mode)
        if who is not None:
            give(home, *who)

    def _owner(self, job: Owned) -> tuple[int, int] | None:
        """uid and gid that the folder is given to; None: it stays the agent's own."""
        if not accounts.is_root() or not job.account:
            return None
        if why := accounts.why_not(job.account):
            raise Refused("agent.account", why)
        who = accounts.by_name(job.account)
        assert who is not None
        return who.uid, who.gid

    async def claim(self, job: Owned) -> bool:
        def make() -> bool:
            home, who = self.home(job), self._owner(job)
            home.mkdir(mode=0o700, exist_ok=True)
            if who is not None:
                os.chown(home, *who, follow_symlinks=False)
            try:
                (home / CLAIMED).mkdir(mode=0o700)
            except FileExistsError:
                return False
            return True

        return await self._do(make)

    async def write(self, job: Owned, name: str, data: bytes) -> None:
        def put() -> None:
            _write(self.home(job) / name, data, 0o600, self._owner(job))

        await self._do(put)

    async def read(self, job: Owned, name: str, offset: int = 0, limit: int = RECORD_BYTES) -> Chunk | None:
        return await self._do(read_plain, self.home(job) / name, offset, limit)

    async def claimed(self, job: Owned) -> bool:
        def look() -> bool:
            try:
                os.lstat(self.home(job) / CLAIMED)
            except FileNotFoundError:
                if not self.folder.is_dir():
                    raise  # The storage is not mounted: of the folder nothing is known.
                return False
            return True

        return await self._do(look)

    async def pack(self, job: Owned, outputs: Collection[str], target: Path) -> ResultRef | None:
        home, owner = self.home(job), self._owner(job)

        def collect() -> ResultRef | None:
            try:
                return pack_outputs(home / "work", list(outputs), target, owner[0] if owner else None)
            except OSError as err:
                if err.errno in ITS_OWN and home.is_dir():
                    raise Refused("agent.outputs", f"the outputs of {job.attempt} cannot be packed: {err}") from err
                raise

        return await self._do(collect)

    async def remove(self, job: Owned, names: Collection[str] = ()) -> None:
        def remove() -> None:
            home = self.home(job)
            for path in [home / name for name in names] or [home]:
                clear(path)

        await self._do(remove)

    async def _do(self, what: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await asyncio.to_thread(what, *args, **kwargs)
        except OSError as err:
            if err.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Unavailable("agent.disk_full", f"no room below {self.folder}", retry_after_s=10) from err
            raise Unavailable("agent.job_folders", f"job folders below {self.folder} cannot be used: {err}", retry_after_s=10) from err


def read_plain(path: Path, offset: int, limit: int) -> Chunk | None:
    """A plain file that the job may have replaced by anything: no link is followed, no pipe waited for, and a file of somebody else's (a hard link) is
    none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as err:
        if err.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
            return None
        raise
    with open(fd, "rb") as f:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != path.parent.stat().st_uid:
            return None
        at = min(offset, about.st_size)
        f.seek(at)
        return Chunk(f.read(limit), at, about.st_size)


def _write(path: Path, data: bytes, mode: int, owner: tuple[int, int] | None = None) -> None:
    """Whatever the job put in its place. It is given to `owner` before it has a name that the job knows: what is there afterwards may be another file."""
    part = path.with_name(f".{path.name}.part")
    clear(part)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with open(fd, "wb") as f:
        f.write(data)
        f.flush()
        os.fchmod(fd, mode)
        if owner is not None:
            os.fchown(fd, *owner)
    try:
        part.rename(path)
    except IsADirectoryError:
        clear(path)
        part.rename(path)


def give(path: Path, uid: int, gid: int) -> None:
    """To the job's account, all below it too; links themselves, never what they point at. From within: who is let in before the rest is given could put
    a link into our way."""
    found, open_ones = [str(path)], [str(path)]
    while open_ones:
        for entry in os.scandir(open_ones.pop()):
            found.append(entry.path)
            if entry.is_dir(follow_symlinks=False):
                open_ones.append(entry.path)
    for one in reversed(found):
        os.chown(one, uid, gid, follow_symlinks=False)
