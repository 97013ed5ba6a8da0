"""Job folders that their job has booby-trapped: what the agent reads, writes and removes there is the job's own, and stays so."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.fakes.agents import GUEST

from intertie.agent import accounts
from intertie.agent.adapters.clear import clear
from intertie.agent.adapters.files import Content, LocalFiles, Owned, give
from intertie.agent.slurm.core.rules import SlurmRules
from intertie.agent.slurm.folders import WrapperFiles
from intertie.agent.slurm.transport import Done
from intertie.errors import Refused, Unavailable
from intertie.ids import AttemptId

JOB = Owned(AttemptId("att-06h343v1s9pl16d07e4ubd4sm0"), GUEST)
root_only = pytest.mark.skipif(not accounts.is_root(), reason="only root gives folders away (run as root)")
DEPTH = 3_000


def nest(folder: Path, depth: int) -> None:
    """Folders in folders, deeper than any path can name."""
    at = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)


async def made(folder: Path) -> tuple[LocalFiles, Path]:
    files = LocalFiles(folder / "shared")
    await files.make(JOB, Content({"script": (b"#!/bin/sh\n", 0o500)}))
    return files, files.home(JOB)


async def test_folders_nested_deeper_than_anybody_can_name_are_removed(tmp_path: Path) -> None:
    files, home = await made(tmp_path)
    for name in ("work", "tmp"):
        nest(home / name, DEPTH)
    (home / "work" / "a\nb\x1b[2J").mkdir()
    await files.remove(JOB, ("work",))
    assert not (home / "work").exists() and (home / "tmp").exists()
    await files.remove(JOB)
    assert not home.exists()


def test_what_a_link_points_at_is_never_removed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (kept / "below").mkdir(parents=True)
    (kept / "below" / "file").touch()
    home = tmp_path / "home"
    home.mkdir()
    (home / "link").symlink_to(kept)
    (tmp_path / "direct").symlink_to(kept)
    clear(home)
    clear(tmp_path / "direct")
    clear(tmp_path / "absent")
    assert not home.exists() and not (tmp_path / "direct").is_symlink() and (kept / "below" / "file").exists()


async def test_a_lease_is_written_whatever_lies_in_its_place(tmp_path: Path) -> None:
    files, home = await made(tmp_path)
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    for trap in ("lease", ".lease.part"):
        (home / trap / "below").mkdir(parents=True)
    await files.write(JOB, "lease", b"5\n")
    assert (home / "lease").read_bytes() == b"5\n"
    (home / "lease").unlink()
    (home / "lease").symlink_to(other)
    await files.write(JOB, "lease", b"6\n")
    assert (home / "lease").read_bytes() == b"6\n" and other.read_bytes() == b"mine"


@root_only
async def test_a_file_of_somebody_else_is_no_record_of_a_job(tmp_path: Path) -> None:
    files, home = await made(tmp_path)
    secret = tmp_path / "shared" / "secret"
    secret.write_bytes(b"secret")
    secret.chmod(0o600)
    os.link(secret, home / "log")
    assert await files.read(JOB, "log") is None


@root_only
def test_a_folder_is_given_away_from_within_so_that_nobody_is_in_it_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is let in early could put a link where the next owner is set."""
    target, home = tmp_path / "target", tmp_path / "home"
    target.mkdir()
    (target / "file").touch()
    (home / "work" / "deep").mkdir(parents=True)
    (home / "work" / "deep" / "link").symlink_to(target)
    who = accounts.by_name(GUEST)
    assert who is not None
    seen: list[int] = []
    chown = os.chown

    def watched(path: str, uid: int, gid: int, *, follow_symlinks: bool) -> None:
        seen.append(home.stat().st_uid)
        chown(path, uid, gid, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "chown", watched)
    give(home, who.uid, who.gid)
    assert seen == [0, 0, 0, 0] and home.stat().st_uid == who.uid
    assert (home / "work" / "deep").stat().st_uid == who.uid and (target / "file").stat().st_uid == 0


class Flood:
    """A wrapper whose job has made more of its outputs than anybody takes."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        account: str = "",
        stdin: Path | bytes = b"",
        out: Path | None = None,
        timeout_s: float,
        limit: int = 0,
    ) -> Done:
        if "list" in argv:
            return Done(0, b"out.bin\0", b"")
        raise Unavailable("slurm.too_much", f"sudo answered with more than {limit} bytes")

    async def close(self) -> None: ...


async def test_outputs_larger_than_anybody_takes_are_refused_once_and_not_fetched_for_ever(tmp_path: Path) -> None:
    files = WrapperFiles(Flood(), SlurmRules(folder="/shared"), tmp_path / "scratch")
    with pytest.raises(Refused) as told:
        await files.pack(Owned(JOB.attempt, "guest1"), ["*.bin"], tmp_path / "result")
    assert told.value.code == "agent.outputs_too_large" and not list((tmp_path / "scratch").iterdir())  # noqa: ASYNC240
