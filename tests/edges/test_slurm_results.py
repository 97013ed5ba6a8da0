"""What a lent account's `take` gave, packed as results: on every Python that we promise, whatever the account put in its place meanwhile."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from intertie.agent.slurm.folders import _packed
from intertie.errors import Unavailable


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, link, mode
    made.size = len(name) if kind == tarfile.REGTYPE else 0
    return made


def taken(folder: Path, *entries: tarfile.TarInfo) -> None:
    with tarfile.open(folder / "tar", "w") as tar:
        for one in entries:
            tar.addfile(one, io.BytesIO(one.name.encode()))


def packed(folder: Path, *outputs: str) -> dict[str, tuple[bytes, int]]:
    """Name → bytes and mode."""
    if _packed(folder, outputs or ("**",), folder / "result") is None:
        return {}
    with tarfile.open(folder / "result", "r:gz") as tar:
        return {one.name: ((tar.extractfile(one) or io.BytesIO()).read(), one.mode) for one in tar}


def test_plain_files_keep_their_names_bytes_and_whether_they_are_programs(tmp_path: Path) -> None:
    taken(tmp_path, entry("a"), entry("out/b.sh", mode=0o755), entry("-c d"))
    assert packed(tmp_path) == {"a": (b"a", 0o644), "out/b.sh": (b"out/b.sh", 0o755), "-c d": (b"-c d", 0o644)}


def test_a_second_name_of_one_file_is_a_file(tmp_path: Path) -> None:
    taken(tmp_path, entry("a"), entry("out/b", tarfile.LNKTYPE, "a"))
    assert packed(tmp_path, "out/*") == {"out/b": (b"a", 0o644)}


HOSTILE = [
    ("a link to somebody else's", entry("l", tarfile.SYMTYPE, "/etc/passwd")),
    ("a hard link to what is not in it", entry("l", tarfile.LNKTYPE, "/etc/passwd")),
    ("a link to itself", entry("l", tarfile.LNKTYPE, "l")),
    ("a name from the root", entry("/l")),
    ("a name that leads out", entry("x/../../l")),
    ("a device", entry("l", tarfile.CHRTYPE)),
    ("a pipe", entry("l", tarfile.FIFOTYPE)),
]


@pytest.mark.parametrize("bad", [row[1] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_what_is_no_plain_file_inside_stays_out(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    taken(inside, bad, entry("a"))
    assert packed(inside) == {"a": (b"a", 0o644)}
    assert not (tmp_path / "l").exists()


def test_nothing_is_written_through_a_link_that_came_before(tmp_path: Path) -> None:
    taken(tmp_path, entry("l", tarfile.SYMTYPE, str(tmp_path)), entry("l/a"))
    assert packed(tmp_path) == {"l/a": (b"l/a", 0o644)}
    assert not (tmp_path / "a").exists()


def test_what_cannot_be_written_is_not_there_now(tmp_path: Path) -> None:
    taken(tmp_path, entry("a"), entry("a/b"))
    with pytest.raises(Unavailable):
        packed(tmp_path)
