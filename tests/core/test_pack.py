"""What travels with a job, what does not, and that nothing that came can leave its folder."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from intertie.errors import Refused
from intertie.pack import file_digest, pack_folder, unpack


def make(root: Path) -> Path:
    (root / "src").mkdir(parents=True)
    (root / "src/run.sh").write_text("#!/bin/sh\necho hi\n")
    (root / "src/run.sh").chmod(0o755)
    (root / "data.csv").write_text("1,2\n")
    (root / "big.bin").write_bytes(b"x" * 10_000)
    (root / ".git").mkdir()
    (root / ".git/config").write_text("secret")
    (root / ".intertieignore").write_text("*.bin\n")
    return root


def names(pack: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(pack), mode="r:gz") as tar:
        return {m.name for m in tar}


def test_a_folder_travels_without_what_is_ignored(tmp_path: Path) -> None:
    out = io.BytesIO()
    packed = pack_folder(make(tmp_path / "w"), out)
    assert names(out.getvalue()) == {"src/run.sh", "data.csv", ".intertieignore"}
    assert (packed.files, packed.size) == (3, len(out.getvalue()))


def test_the_same_folder_has_the_same_digest(tmp_path: Path) -> None:
    root = make(tmp_path / "w")
    first, second = io.BytesIO(), io.BytesIO()
    assert pack_folder(root, first).digest == pack_folder(root, second).digest
    (tmp_path / "p").write_bytes(first.getvalue())
    assert file_digest(tmp_path / "p") == pack_folder(root, io.BytesIO()).digest


def test_links_that_leave_and_special_files_are_told_and_left(tmp_path: Path) -> None:
    root = make(tmp_path / "w")
    (root / "out").symlink_to("/etc/passwd")
    (root / "up").symlink_to("../../etc")
    (root / "same").symlink_to("data.csv")
    os.mkfifo(root / "pipe")
    out = io.BytesIO()
    packed = pack_folder(root, out)
    assert "same" in names(out.getvalue())
    assert {line.partition(":")[0] for line in packed.skipped} == {"out", "up", "pipe"}


def test_a_pack_over_the_limit_is_refused_with_the_way_out(tmp_path: Path) -> None:
    root = tmp_path / "w"
    root.mkdir()
    (root / "noise").write_bytes(os.urandom(50_000))
    with pytest.raises(Refused) as caught:
        pack_folder(root, io.BytesIO(), limit_bytes=10_000)
    assert caught.value.code == "pack.too_large"
    assert ".intertieignore" in caught.value.next_step


def test_what_was_packed_comes_out_the_same(tmp_path: Path) -> None:
    with (tmp_path / "p").open("wb") as out:
        pack_folder(make(tmp_path / "w"), out)
    assert unpack(tmp_path / "p", tmp_path / "back") == 3
    assert (tmp_path / "back/src/run.sh").read_text() == "#!/bin/sh\necho hi\n"
    assert os.access(tmp_path / "back/src/run.sh", os.X_OK)


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil"])
def test_a_name_that_would_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "p", "w:gz") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = 1
        tar.addfile(entry, io.BytesIO(b"x"))
    inside = tmp_path / "deep/er"
    with pytest.raises(Refused, match="pack.unsafe"):
        unpack(tmp_path / "p", inside)
    assert not list(tmp_path.glob("**/evil"))
    assert not Path("/etc/evil").exists()


def test_a_pack_cannot_write_through_its_own_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    with tarfile.open(tmp_path / "p", "w:gz") as tar:
        entry = tarfile.TarInfo("here")
        entry.type, entry.linkname = tarfile.SYMTYPE, "."
        tar.addfile(entry)
        entry = tarfile.TarInfo("here/up")
        entry.type, entry.linkname = tarfile.SYMTYPE, "../outside"
        tar.addfile(entry)
        entry = tarfile.TarInfo("up/evil")
        tar.addfile(entry, io.BytesIO(b""))
    with pytest.raises(Refused, match="pack.unsafe"):
        unpack(tmp_path / "p", tmp_path / "in")
    assert not list((tmp_path / "outside").iterdir())


@pytest.mark.parametrize("kind", [tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.LNKTYPE])
def test_only_files_folders_and_links_are_unpacked(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "p", "w:gz") as tar:
        entry = tarfile.TarInfo("odd")
        entry.type, entry.linkname = kind, "/etc/passwd"
        tar.addfile(entry)
    with pytest.raises(Refused, match=r"pack\."):
        unpack(tmp_path / "p", tmp_path / "in")


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "p", "w:gz") as tar:
        entry = tarfile.TarInfo("door")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(entry)
    with pytest.raises(Refused, match="pack.unsafe"):
        unpack(tmp_path / "p", tmp_path / "in")


def test_a_small_pack_cannot_fill_the_disk(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "p", "w:gz") as tar:
        entry = tarfile.TarInfo("zeros")
        entry.size = 1_000_000
        tar.addfile(entry, io.BytesIO(bytes(1_000_000)))
    with pytest.raises(Refused, match="pack.too_large"):
        unpack(tmp_path / "p", tmp_path / "in", limit_bytes=100_000)


@pytest.mark.parametrize("data", [b"", b"not a pack", b"\x1f\x8b\x08\x00broken"])
def test_a_broken_pack_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(Refused, match="pack.broken"):
        unpack(tmp_path / "p", tmp_path / "in")
