"""Container images that jobs name: what is one, whose is taken, and what of a site's rules is told."""

from __future__ import annotations

import pytest

from intertie.contracts.image import ANY, LONGEST, PoolImages, is_source, read_image
from intertie.errors import Refused

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "pinned"),
    [
        (f"registry.example.cn/team/train@{DIGEST}", f"registry.example.cn/team/train@{DIGEST}"),
        (f"nvcr.io/nvidia/pytorch:24.01-py3@{DIGEST}", f"nvcr.io/nvidia/pytorch@{DIGEST}"),
        (f"localhost:5000/a@{DIGEST}", f"localhost:5000/a@{DIGEST}"),
        (f"docker.io/library/ubuntu@{DIGEST}", f"docker.io/library/ubuntu@{DIGEST}"),
    ],
)
def test_an_image_is_a_registry_a_name_and_a_digest(text: str, pinned: str) -> None:
    assert read_image(text).pinned == pinned


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("nvcr.io/nvidia/pytorch:24.01-py3", "image.no_digest"),
        ("ubuntu", "image.no_digest"),
        ("/images/pytorch.sif", "image.no_digest"),
        (f"ubuntu@{DIGEST}", "image.reference"),
        (f"library/ubuntu@{DIGEST}", "image.no_registry"),
        (f"--nv.io/x@{DIGEST}", "image.reference"),
        (f"a.io/../etc@{DIGEST}", "image.reference"),
        (f"a.io//etc@{DIGEST}", "image.reference"),
        (f"a.io/x y@{DIGEST}", "image.reference"),
        (f"a.io/x@{DIGEST}\n", "image.reference"),
        (f"a.io/x,/etc:/etc@{DIGEST}", "image.reference"),
        (f"docker://a.io/x@{DIGEST}", "image.reference"),
        (f"a.io/x@{DIGEST[:-1]}", "image.reference"),
        (f"a.io/X@{DIGEST}", "image.reference"),
        (f"a.io/{'x' * LONGEST}@{DIGEST}", "image.reference"),
        ("a.io/x\x00", "image.reference"),
        (" ", "image.reference"),
    ],
)
def test_what_is_no_pinned_image_is_refused_with_what_to_write(text: str, code: str) -> None:
    """Nothing that is let through can be read as an option, a path, or a second mount."""
    with pytest.raises(Refused) as told:
        read_image(text)
    assert told.value.code == code and told.value.next_step


@pytest.mark.parametrize(
    ("source", "taken"),
    [
        (ANY, True),
        ("registry.example.cn", True),
        ("registry.example.cn/team", True),
        ("registry.example.cn/team/", True),
        ("registry.example.cn/team/train", True),
        ("registry.example.cn/te", False),
        ("registry.example.cn/team/train/more", False),
        ("registry.example", False),
        ("example.cn", False),
    ],
)
def test_a_source_is_matched_by_whole_names(source: str, taken: bool) -> None:
    assert is_source(source)
    image = f"registry.example.cn/team/train@{DIGEST}"
    assert PoolImages(runtime="pyxis", sources=[source]).takes(image) is taken
    assert not PoolImages(sources=[source]).takes(image), "without a runtime nothing runs"
    assert not PoolImages(runtime="pyxis", sources=[source]).takes("registry.example.cn/team/train:latest")


def test_what_is_no_source_is_none() -> None:
    assert not any(is_source(text) for text in ("", "a b", "-x", "/srv", "a.io/../b", "a.io/x@sha256:1", "https://a.io", "a.io/x*"))
