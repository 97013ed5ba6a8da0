"""Which files a declared output names, and that no pattern of a hostile tenant keeps the agent busy."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from intertie.agent.outputs import pack_outputs, pattern

MATCHES = [
    # (glob, path, whether it is taken)
    ("out.txt", "out.txt", True),
    ("out.txt", "a/out.txt", False),
    ("./out.txt", "out.txt", True),
    ("out", "out/a/b.txt", True),
    ("out/", "out/a/b.txt", True),
    ("out", "output.txt", False),
    ("*.txt", "a.txt", True),
    ("*.txt", "a/b.txt", False),
    ("*.txt", "a.txt.bak", False),
    ("a?c", "abc", True),
    ("a?c", "a/c", False),
    ("?", "", False),
    ("**/*.txt", "a.txt", True),
    ("**/*.txt", "a/b/c.txt", True),
    ("a/**/z", "a/z", True),
    ("a/**/z", "a/b/c/z", True),
    ("a/**/z", "b/a/z", False),
    ("a/**/m/**/z", "a/x/m/y/m/z", True),
    ("a/**", "a/b/c", True),
    ("a/**", "a", False),
    ("**", "anything/at/all", True),
    ("*a*b*c", "xaxbxc", True),
    ("*a*b*c", "xaxcxb", False),
    ("*ab*ab", "abab", True),
    ("*aab", "aaab", True),
    ("**/a*/**/b", "x/a1/a2/q/b", True),
    ("a.b", "aXb", False),
    ("[ab]", "a", False),
    # Nothing of a pattern leaves the folder: what is walked lies inside it, whatever it is compared with.
    ("/etc/passwd", "etc/passwd", False),
    ("../../etc/passwd", "etc/passwd", False),
    ("a/../b", "b", False),
    ("", "a", False),
]


@pytest.mark.parametrize(("glob", "path", "taken"), MATCHES)
def test_a_pattern_takes_what_it_says(glob: str, path: str, taken: bool) -> None:
    assert bool(pattern(glob).fullmatch(path)) is taken


@pytest.mark.parametrize(
    ("glob", "path"),
    [
        ("*a" * 60 + "b", "a" * 250),
        ("**/" * 40 + "b", "a/" * 60 + "a"),
        ("**/a*/" * 20 + "b", "a/" * 60 + "a"),
        ("**/*a*a*a*a/" * 8 + "b", ("a" * 60 + "/") * 60 + "a"),
        ("**a" * 40 + "b", "a" * 250),
    ],
)
def test_no_pattern_takes_longer_than_a_glance(glob: str, path: str) -> None:
    """Tried one after the other these took longer than the sun has left; the run would not end."""
    assert pattern(glob).fullmatch(path) is None


def test_links_and_foreign_names_in_the_work_folder_bring_nothing_from_outside(tmp_path: Path) -> None:
    work, outside = tmp_path / "work", tmp_path / "outside"
    work.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (work / "real").write_text("mine")
    (work / "link").symlink_to(outside / "secret")
    (work / "folder").symlink_to(outside)
    (work / "up").symlink_to("..")
    os.mkfifo(work / "pipe")
    packed = pack_outputs(
        work, ["**", "/etc/passwd", "../outside/secret", "link", "folder/secret", "up/outside/secret"], tmp_path / "r", None
    )
    assert packed is not None and packed.files == 1
    with tarfile.open(tmp_path / "r") as tar:
        assert tar.getnames() == ["real"]
