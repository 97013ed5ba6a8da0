"""Container images that a job may name: by registry, repository and digest, and where a pool takes them from.

By digest alone: what a tag names tomorrow is not what was agreed today. By its registry too: a short name is another image at another site.
Source of the grammar: the distribution project's reference format, and what of it all of apptainer, enroot and Kubernetes read alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import msgspec

from intertie.contracts.base import Contract
from intertie.errors import Refused

LONGEST = 512
ANY = "*"

_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_HOST = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*(?::[0-9]{1,5})?"
_PATH = rf"{_PART}(?:/{_PART})*"
_IMAGE = re.compile(
    rf"(?P<registry>{_HOST})/(?P<path>{_PATH})(?::(?P<tag>[A-Za-z0-9_][\w.-]{{0,127}}))?@(?P<digest>sha256:[0-9a-f]{{64}})", re.ASCII
)
_SOURCE = re.compile(rf"{_HOST}(?:/{_PATH})?/?", re.ASCII)
NEXT = "write REGISTRY/NAME@sha256:…; `crane digest IMAGE`, or the registry's page, tells the digest"

Source = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


@dataclass(frozen=True, slots=True)
class Image:
    """One image, parsed. `tag` is for people: the digest says what runs."""

    registry: str
    path: str
    tag: str
    digest: str

    @property
    def repository(self) -> str:
        return f"{self.registry}/{self.path}"

    @property
    def pinned(self) -> str:
        """Without its tag, which not every runtime takes beside a digest."""
        return f"{self.repository}@{self.digest}"


class PoolImages(Contract, frozen=True, kw_only=True):
    """Which images that a job names run in a pool. A pool that tells none of it is of an agent that would not see the wish: it gets no such job."""

    runtime: Annotated[str, msgspec.Meta(max_length=32)] = ""
    """What runs them: `apptainer`, `pyxis`, `kubernetes` …; empty: nothing does."""
    sources: Annotated[list[Source], msgspec.Meta(max_length=64)] = []
    """Registries or repositories of which all is taken, such as `registry.example.cn/team`; `*`: any; empty: none."""

    def takes(self, image: str) -> bool:
        """False also for what is no image: it came from somebody who did not ask at the door."""
        try:
            repository = read_image(image).repository
        except Refused:
            return False
        return bool(self.runtime) and any(_lies_in(repository, source) for source in self.sources)

    @property
    def told(self) -> str:
        """For people: what is taken."""
        if not self.runtime or not self.sources:
            return "no images"
        shown = ", ".join(self.sources[:4]) + (f" and {len(self.sources) - 4} more" if len(self.sources) > 4 else "")
        return f"{'any' if ANY in self.sources else shown} by {self.runtime}"


def _lies_in(repository: str, source: str) -> bool:
    """By whole names: `host/team` holds `host/team/app`, and not `host/team-of-others/app`."""
    place = source.rstrip("/")
    return source == ANY or repository == place or repository.startswith(f"{place}/")


def read_image(text: str) -> Image:
    """`Refused('image.no_digest' | 'image.no_registry' | 'image.reference')`, each with what to write instead."""
    shown = text[:200]
    if len(text) <= LONGEST and (match := _IMAGE.fullmatch(text)) is not None:
        registry = match["registry"]
        if "." in registry or ":" in registry or registry == "localhost":
            return Image(registry, match["path"], match["tag"] or "", match["digest"])
        raise Refused(
            "image.no_registry",
            f"image {shown!r} names no registry: a short name is another image at another site",
            next_step="write it with its registry, such as docker.io/library/NAME@sha256:…",
        )
    if "@" not in text and len(text) <= LONGEST and text.isprintable() and text.strip():
        raise Refused("image.no_digest", f"image {shown!r} has no digest: a tag may mean another image tomorrow", next_step=NEXT)
    raise Refused("image.reference", f"{shown!r} is no image by registry, name and digest", next_step=NEXT)


def is_source(text: str) -> bool:
    """Whether it can stand in `sources`."""
    return text == ANY or (len(text) <= 255 and _SOURCE.fullmatch(text) is not None)
