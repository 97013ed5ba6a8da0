"""How a job's command is run inside an image, by what the owner says the site has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from intertie.agent.slurm.core.rules import Images
from intertie.errors import Refused

# By digest only: what a tag names tomorrow is not what was agreed today.
_IMAGE = re.compile(r"(?P<name>[a-z0-9][a-z0-9._/:-]{0,254})@(?P<digest>sha256:[0-9a-f]{64})\Z", re.ASCII)

# Words of a command; {image} and {folder} are filled in, each staying one word.
COMMANDS: Mapping[Images, Sequence[str]] = {
    Images.APPTAINER: ("apptainer", "exec", "--nv", "--containall", "--bind", "{folder}", "--pwd", "{folder}/work", "docker://{image}"),
    Images.ENROOT: ("enroot", "start", "--rw", "--mount", "{folder}:{folder}", "{squash}"),
    Images.PYXIS: (
        *("srun", "--ntasks=1", "--container-image={enroot}", "--container-mounts={folder}:{folder}", "--container-workdir={folder}/work"),
        "--no-container-mount-home",
    ),
}


def command(images: Images, image: str, folder: PurePath) -> Sequence[str]:
    """The words before the job's own. `Refused('slurm.no_images')` where the site runs none, `Refused('slurm.image')` for what is no pinned image."""
    if images is Images.NONE:
        raise Refused(
            "slurm.no_images", "this site runs no container images", next_step="submit without an image, or to a site that has them"
        )
    match = _IMAGE.match(image)
    if match is None:
        raise Refused("slurm.image", f"{image[:100]!r} is no image named by its digest", next_step="name it as NAME@sha256:…")
    if ":" in str(folder) or "," in str(folder):
        raise Refused("slurm.folder", f"{str(folder)!r} cannot be mounted into an image")
    host, slash, rest = match["name"].partition("/")
    # enroot parts a registry from a name by `#`.
    enroot = f"{host}#{rest}@{match['digest']}" if slash and ("." in host or ":" in host) else image
    filled = {"image": image, "folder": str(folder), "enroot": enroot, "squash": f"{folder}/image.sqsh"}
    return [word.format_map(filled) for word in COMMANDS[images]]
