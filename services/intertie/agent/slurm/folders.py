"""Job folders where the agent may not become the mapped account: made, written, read and packed by the owner's wrapper, as that account.

The wrapper (`ops/slurm/intertie-as`) is the only command of the sudo rule. Folders lie below `FOLDER/ACCOUNT/`, which belongs to the account alone.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Collection
from pathlib import Path, PurePath

from intertie.agent.adapters.files import RECORD_BYTES, Content, Owned
from intertie.agent.adapters.port import Chunk
from intertie.agent.outputs import pack_outputs, pattern
from intertie.agent.slurm.core.replies import last_words
from intertie.agent.slurm.core.rules import SlurmRules
from intertie.agent.slurm.transport import Done, Shell
from intertie.contracts.job import ResultRef
from intertie.errors import Refused, Unavailable

# What the wrapper says where something is not there, and that is all that is wrong.
ABSENT, TAKEN = 4, 5
# To move a work pack or results of some gigabytes over a slow wire.
MOVE_S = 3_600.0
# Packs and results that move at once: more only share the same wire, and a lease must never wait for them.
MOVES = 8
RESULT_BYTES = 64 * 1024 * 1024 * 1024


class WrapperFiles:
    """`Files` through `sudo -u ACCOUNT WRAPPER VERB …`, here or on a login node."""

    def __init__(self, shell: Shell, rules: SlurmRules, scratch: Path, *, look_s: float = 2.0) -> None:
        self.shell, self.rules, self.scratch = shell, rules, scratch
        self._look_s = look_s
        self._moves = asyncio.Semaphore(MOVES)

    @property
    def look_s(self) -> float:
        return self._look_s

    def seen(self, job: Owned) -> PurePath:
        return PurePath(self.rules.nodes_see or self.rules.folder) / job.account / job.attempt

    async def _do(
        self,
        job: Owned,
        verb: str,
        *words: str,
        stdin: Path | bytes = b"",
        out: Path | None = None,
        ok: Collection[int] = (),
        limit: int = RECORD_BYTES * 16,
    ) -> Done:
        if not job.account:
            raise Unavailable("slurm.no_account", f"{job.attempt} has no account that its folder belongs to")
        argv = ("sudo", "--non-interactive", f"--user={job.account}", "--", self.rules.wrapper, verb, job.attempt, *words)
        if verb in ("stage", "take", "list"):
            async with self._moves:
                done = await self.shell.run(argv, stdin=stdin, out=out, timeout_s=MOVE_S, limit=limit)
        else:
            done = await self.shell.run(argv, stdin=stdin, out=out, timeout_s=self.rules.timeout_s, limit=limit)
        if done.code in (0, *ok):
            return done
        text = f"{verb} of {job.attempt} as {job.account}: {last_words(done.error) or f'exit {done.code}'}"
        if "password is required" in text or "not allowed" in text or "sudoers" in text:
            raise Refused("slurm.sudo", text, next_step="the sudo rule: intertie-agent slurm lines")
        raise Unavailable("slurm.wrapper", text, retry_after_s=10)

    async def make(self, job: Owned, content: Content) -> None:
        tar = await asyncio.to_thread(self._tar, content)
        try:
            await self._do(job, "stage", stdin=tar)
        finally:
            tar.unlink(missing_ok=True)

    def _tar(self, content: Content) -> Path:
        """Files with their modes, and the work as it came, which the account unpacks with its own rights."""
        self.scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.scratch, delete=False) as out, tarfile.open(fileobj=out, mode="w") as tar:
            for name, (data, mode) in content.files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(data), mode
                tar.addfile(entry, io.BytesIO(data))
            if content.pack is not None:
                tar.add(content.pack, ".pack.tar.gz", recursive=False)
            return Path(out.name)

    async def claim(self, job: Owned) -> bool:
        return (await self._do(job, "claim", ok=(TAKEN,))).code == 0

    async def write(self, job: Owned, name: str, data: bytes) -> None:
        await self._do(job, "write", name, stdin=data)

    async def read(self, job: Owned, name: str, offset: int = 0, limit: int = RECORD_BYTES) -> Chunk | None:
        done = await self._do(job, "read", name, str(offset), str(limit), ok=(ABSENT,), limit=limit + 64)
        if done.code == ABSENT:
            return None
        head, _, data = done.out.partition(b"\n")
        if not head.isdigit():
            raise Unavailable("slurm.wrapper", f"read of {job.attempt}: no length")
        total = int(head)
        return Chunk(data[:limit], min(offset, total), total)

    async def claimed(self, job: Owned) -> bool:
        return (await self._do(job, "claimed", ok=(ABSENT,))).code == 0

    async def pack(self, job: Owned, outputs: Collection[str], target: Path) -> ResultRef | None:
        listed = await self._do(job, "list", limit=256 * 1024 * 1024)
        wanted = [pattern(one) for one in outputs]
        names = [name for name in listed.out.split(b"\0") if name and any(one.fullmatch(name.decode("utf-8", "replace")) for one in wanted)]
        if not names:
            return None
        self.scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=self.scratch))
        try:
            # They lie here beside the agent's own journal for a while: never more than half of what is free.
            limit = min(RESULT_BYTES, shutil.disk_usage(folder).free // 2)
            try:
                await self._do(job, "take", stdin=b"".join(name + b"\0" for name in names), out=folder / "tar", limit=limit)
            except Unavailable as err:
                if err.code != "slurm.too_much":
                    raise
                raise Refused("agent.outputs_too_large", f"the outputs of {job.attempt} pass {limit} bytes before they are packed") from err
            return await asyncio.to_thread(_packed, folder, outputs, target)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)

    async def remove(self, job: Owned, names: Collection[str] = ()) -> None:
        await self._do(job, "remove", *sorted(names), ok=(ABSENT,))


def _packed(folder: Path, outputs: Collection[str], target: Path) -> ResultRef | None:
    """In the form that every site's results have."""
    try:
        with tarfile.open(folder / "tar") as tar:
            _plain_files(tar, folder / "work")
        return pack_outputs(folder / "work", list(outputs), target, None)
    except tarfile.TarError as err:
        # What the job made of its own files meanwhile: it stays so.
        raise Refused("agent.outputs", f"the outputs cannot be unpacked: {err}"[:300]) from err
    except OSError as err:
        raise Unavailable("slurm.wrapper", f"the outputs cannot be read: {err}"[:300]) from err


def _plain_files(tar: tarfile.TarFile, work: Path) -> None:
    """Write only plain files of an archive that the job's account made; what it swapped for anything else meanwhile stays out, and no link is ever made
    that a name could pass through. (Our own rules: Python 3.11.2 of Debian 12 has no `data` filter.)"""
    work.mkdir(mode=0o700)
    entries = tar.getmembers()
    named = {entry.name: entry for entry in entries if entry.isreg()}
    for entry in entries:
        # A second name of one file comes as a hard link to the first.
        held = named.get(entry.linkname) if entry.islnk() else entry
        name = PurePath(entry.name)
        if held is None or not held.isreg() or name.is_absolute() or ".." in name.parts or not name.parts:
            continue
        path = work / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = tar.extractfile(held)
        assert data is not None  # a plain file always has bytes
        mode = 0o700 if held.mode & 0o100 else 0o600
        with data, os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode), "wb") as out:
            shutil.copyfileobj(data, out, 1 << 20)
        os.utime(path, (held.mtime, held.mtime))
