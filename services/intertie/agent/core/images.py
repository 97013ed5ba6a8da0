"""The owner's `[images]` in `site.toml`: from where the images come that jobs may name. Without it none that a job names is run here.

[images]
sources = ["registry.example.cn/team", "nvcr.io/nvidia"]   # registries or repositories; ["*"]: any
runtime = "apptainer"                                      # of a pool of machines; Slurm and Kubernetes have their own
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from intertie.agent.core.model import Attempt, Failing
from intertie.contracts.image import Image, PoolImages, is_source, read_image
from intertie.errors import Refused
from intertie.ids import PoolName


class ImageRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[images]`."""

    sources: Annotated[list[str], msgspec.Meta(min_length=1, max_length=64)]
    runtime: Annotated[str, msgspec.Meta(pattern="^(apptainer|singularity)?$")] = ""
    """Of this machine and its pool's; a daemon's would be below no supervisor of ours."""


def told_of(rules: ImageRules | None, runtime: str) -> PoolImages:
    """What the pools of this site tell. `runtime`: what runs images here, empty if nothing does."""
    return PoolImages(runtime=runtime, sources=list(rules.sources)) if rules is not None and runtime else PoolImages()


def check(rules: ImageRules, runtime: str, *, own_queue: bool) -> None:
    """`Refused('agent.images')` for what would never run a job, or is no source."""
    if wrong := [one for one in rules.sources if not is_source(one)]:
        raise _wrong(f"sources: {wrong[0][:100]!r} is no registry or repository", 'write "registry.example.cn/team", or "*" for any')
    if own_queue and rules.runtime:
        raise _wrong(f"runtime = {rules.runtime!r} is of a pool of machines", "leave it out: the site's own table says how images run")
    if not runtime:
        raise _wrong("nothing is declared that runs images", 'set runtime = "apptainer", or images in [slurm]')


def _wrong(text: str, next_step: str) -> Refused:
    return Refused("agent.images", f"site.toml [images] {text}", next_step=next_step)


def refusal(image: str, pool: PoolName, images: PoolImages) -> Failing | None:
    """Why an image that a job names is not run here; None if it is, or if it names none."""
    if not image or images.takes(image):
        return None
    return Failing(code="image", text=f"pool {pool} does not run image {image[:200]}: it takes {images.told}", fault=True)


def must_take(image: str, images: PoolImages) -> Image:
    """The image that work names, for an adapter to run. `Refused('agent.image')`: the owner's table does not let it."""
    if not images.takes(image):
        raise Refused(
            "agent.image",
            f"image {image[:200]} is not run here: this site takes {images.told}",
            next_step="name an image from where the site takes them, or none; the owner's table is [images] of site.toml",
        )
    return read_image(image)


def image_of(attempt: Attempt, owners: str) -> str:
    """What it runs in: the job's own image, or the owner's; empty: none. The owner's local work is bound by neither."""
    return "" if attempt.local is not None else attempt.spec.image or owners
