"""How a job's command is run inside an image, by what the owner says the site has.

Sources of the options: apptainer exec, `enroot start` and `enroot import` (3.x), pyxis. Each is given the job's environment, folder and working
folder, whatever its own defaults are: enroot passes no variable that is not named, and sbatch's `--export=NONE` reaches srun as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath

from intertie.agent.core.images import must_take
from intertie.agent.core.model import Attempt
from intertie.agent.slurm.core.rules import Images
from intertie.contracts.image import Image, PoolImages, read_image
from intertie.contracts.site import DeviceKind
from intertie.errors import Refused

# Without privileges, and with no more of the node than the job's folder; `--nv` where it holds cards.
_APPTAINER = ("apptainer", "exec", "--contain", "--no-home", "--no-privs", "--bind", "{folder}", "--pwd", "{folder}/work")
_PYXIS = (
    *("srun", "--ntasks=1", "--nodes=1", "--export=ALL", "--container-image={enroot}", "--container-mounts={folder}:{folder}"),
    *("--container-workdir={folder}/work", "--no-container-mount-home"),
)
# Fetched into the job's folder; variables that are not set are not passed. Its own words follow, then the script's.
_ENROOT_SH = """\
folder=$1 image=$2 names=$3 passed=
shift 3
[ -s "$folder/image.sqsh" ] || enroot import --output "$folder/image.sqsh" "docker://$image" || exit 125
for name in $names; do
    eval "there=\\${$name+1}"
    [ -z "$there" ] || passed="$passed --env $name"
done
exec enroot start --rw --mount "$folder:$folder" $passed "$folder/image.sqsh" /bin/sh -c 'cd "$0" && exec "$@"' "$folder/work" "$@"
"""
_ENROOT = ("/bin/sh", "-c", "{enroot_sh}", "enroot", "{folder}", "{enroot}", "{names}")
# Words of a command; what is in braces is filled in, each staying one word.
COMMANDS: Mapping[Images, Sequence[str]] = {Images.APPTAINER: _APPTAINER, Images.ENROOT: _ENROOT, Images.PYXIS: _PYXIS}
# Beside those that the user set: ours, and what Slurm says of the cards.
PASSED = ("INTERTIE_JOB", "INTERTIE_ATTEMPT", "INTERTIE_WORK", "TMPDIR", "TRACEPARENT", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID")


def words_of(attempt: Attempt, images: Images, taken: PoolImages, folder: PurePath) -> Sequence[str]:
    """The words before the script of this work; none if it names no image. `Refused('agent.image')`: the owner does not take it."""
    if not attempt.spec.image:
        return ()
    must_take(attempt.spec.image, taken)
    names = (*PASSED, *sorted(attempt.env))
    return command(images, attempt.spec.image, folder, names=names, cards=attempt.kind is DeviceKind.GPU)


def command(images: Images, image: str, folder: PurePath, *, names: Collection[str] = PASSED, cards: bool = True) -> Sequence[str]:
    """The words before the job's own. `Refused('slurm.no_images')` where the site runs none, `image.*` for what is no pinned image."""
    if images is Images.NONE:
        raise Refused(
            "slurm.no_images", "this site runs no container images", next_step="submit without an image, or to a site that has them"
        )
    read = read_image(image)
    if ":" in str(folder) or "," in str(folder):
        raise Refused("slurm.folder", f"{str(folder)!r} cannot be mounted into an image")
    filled = {"folder": str(folder), "enroot": _of_enroot(read), "enroot_sh": _ENROOT_SH, "names": " ".join(names)}
    words = [word.format_map(filled) for word in COMMANDS[images]]
    if images is Images.APPTAINER:
        words += [*(["--nv"] if cards else []), f"docker://{read.pinned}"]
    return words


def _of_enroot(image: Image) -> str:
    """`REGISTRY#NAME:DIGEST`: every release of enroot reads a digest where a tag would stand; only later ones know `@`."""
    registry = "registry-1.docker.io" if image.registry == "docker.io" else image.registry
    return f"{registry}#{image.path}:{image.digest}"
