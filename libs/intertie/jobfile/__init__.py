"""Reading a job script's own directives: an existing `#SBATCH` script is accepted unchanged, `#INTERTIE` says what Slurm has no word for.

Pure text in, `JobSpec` and warnings with line numbers out. Directives end at the first line that is neither blank nor a comment, as those of
sbatch do. What we do not know is told with its line and never guessed at; what we know but cannot give is told too.
Source of the option names and forms: sbatch(1), Slurm 22.05 to 24.11.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from intertie.contracts.image import read_image
from intertie.contracts.job import JobSpec, OnSilence, Resources
from intertie.contracts.site import TaskType
from intertie.errors import Refused
from intertie.ids import PoolName, SiteName

DIRECTIVE = re.compile(r"#(SBATCH|INTERTIE)(?=\s|$)\s*(.*)")
_INNER = "\ue000"  # Of nobody's use: stands for a `#` while words are split.
_UNIT_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024, "": 1}
_GPU = re.compile(r"(?:gpu:)?(?:(?P<model>[A-Za-z][\w.-]*):)?(?P<count>\d+)\Z")


@dataclass(frozen=True, slots=True)
class Warned:
    """A directive that was not taken as written; `line` counts from 1."""

    line: int
    text: str


@dataclass(slots=True)
class _Draft:
    """What the directives said so far."""

    name: str = ""
    wall_s: int | None = None
    gpus: int = 0
    gpus_per_node: bool = False
    gpu_model: str | None = None
    gpu_memory_mib: int = 0
    interconnect: str | None = None
    nodes: int = 1
    tasks: int = 1
    cpus_per_task: int = 1
    outputs: list[str] = field(default_factory=list)
    task_type: TaskType = TaskType.BATCH
    on_silence: OnSilence = OnSilence.WAIT
    restartable: bool = False
    site: str | None = None
    pool: str | None = None
    image: str = ""
    image_line: int = 0
    warnings: list[Warned] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class JobFile:
    """A script with what its directives ask for."""

    spec: JobSpec
    warnings: Sequence[Warned]
    image_line: int = 0
    """Of the directive that names the image; 0: none does."""

    def checked(self, spec: JobSpec | None = None) -> JobSpec:
        """The job (or `spec`, made from it), if its image is one: `Refused('image.…')` with the line, since without its image it is another job."""
        made = spec or self.spec
        if made.image:
            try:
                read_image(made.image)
            except Refused as err:
                here = f"line {self.image_line}: " if made.image == self.spec.image else ""
                raise Refused(err.code, here + err.text, next_step=err.next_step) from err
        return made


@dataclass(frozen=True, slots=True)
class Directive:
    """One option of a directive line as it is written. `late`: it stands after the first command, where sbatch and we do not read it."""

    line: int
    word: str
    option: str
    value: str
    late: bool

    @property
    def shown(self) -> str:
        dashes = "--" if len(self.option) > 1 else "-" if self.option else ""
        return (
            f"{dashes}{self.option}{'=' if self.value and len(self.option) > 1 else ' ' if self.value and self.option else ''}{self.value}"
        )


def directives(script: str) -> list[Directive]:
    """All of them, late ones too; what cannot be read as options is left out (`parse_script` warns of it). Lines of here-documents are among them."""
    found: list[Directive] = []
    late = False
    for number, line in enumerate(script.splitlines(), start=1):
        text = line.strip()
        match = DIRECTIVE.match(text)
        late = late or (bool(text) and not text.startswith("#"))
        # A comment further down that begins a line is one that was meant; an indented one after commands is text.
        if match is None or (late and line[:1].isspace()):
            continue
        try:
            tokens = _split(match[2])
        except ValueError:
            continue
        while tokens:
            option, value, tokens = _take(tokens)
            found.append(Directive(number, match[1], option, value, late))
    return found


def named_image(one: Directive) -> str:
    """The image that this directive names, in our spelling; empty if it is none that does."""
    option = (SBATCH if one.word == "SBATCH" else INTERTIE).get(one.option)
    if option not in (_image, _enroot_image):
        return ""
    draft = _Draft()
    option(draft, one.value)
    return draft.image


def parse_wall(text: str) -> int:
    """Seconds of a Slurm time limit: `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S` (sbatch(1), --time)."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a time such as 30, 1:30:00 or 2-00:00")
    days, first, second, third = (int(part) if part is not None else None for part in match.groups())
    if days is not None:
        seconds = days * 86_400 + (first or 0) * 3_600 + (second or 0) * 60 + (third or 0)
    elif third is not None:
        seconds = (first or 0) * 3_600 + (second or 0) * 60 + third
    else:
        seconds = (first or 0) * 60 + (second or 0)
    if seconds < 1:
        raise ValueError(f"{text!r} is no time at all")
    return seconds


def parse_memory_mib(text: str) -> int:
    """MiB of `512`, `512M`, `40G`."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not an amount of memory such as 40G")
    return max(1, round(int(match[1]) * _UNIT_MIB[match[2].upper()]))


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text) or int(text) == 0:
        raise ValueError(f"{text!r} is not a count of 1 or more")
    return int(text)


def _name(draft: _Draft, value: str) -> None:
    draft.name = value[:128]


def _time(draft: _Draft, value: str) -> None:
    draft.wall_s = parse_wall(value)


def _gpus(draft: _Draft, value: str) -> None:
    match = _GPU.match(value)
    if match is None:
        raise ValueError(f"{value!r} is not a GPU request such as gpu:a100:2")
    draft.gpus, draft.gpu_model = int(match["count"]), match["model"] or draft.gpu_model


def _gres(draft: _Draft, value: str) -> None:
    if not value.startswith("gpu"):
        raise ValueError(f"generic resource {value!r} is not known; only gpu[:model]:count is")
    _gpus(draft, "1" if value == "gpu" else value)
    draft.gpus_per_node = True


def _gpus_per_node(draft: _Draft, value: str) -> None:
    _gpus(draft, value)
    draft.gpus_per_node = True


def _nodes(draft: _Draft, value: str) -> None:
    draft.nodes = _count(value.partition("-")[0])


def _tasks(draft: _Draft, value: str) -> None:
    draft.tasks = _count(value)


def _cpus(draft: _Draft, value: str) -> None:
    draft.cpus_per_task = _count(value)


def _gpu_memory(draft: _Draft, value: str) -> None:
    draft.gpu_memory_mib = parse_memory_mib(value)


def _constraint(draft: _Draft, value: str) -> None:
    if not re.fullmatch(r"[\w.-]+", value):
        raise ValueError(f"constraint {value!r} combines features; only one GPU model is understood")
    draft.gpu_model = value


def _no_requeue(draft: _Draft, value: str) -> None:
    draft.restartable = False


def _requeue(draft: _Draft, value: str) -> None:
    draft.restartable = True


def _outputs(draft: _Draft, value: str) -> None:
    draft.outputs += value.split()


def _interconnect(draft: _Draft, value: str) -> None:
    draft.interconnect = value


def _task_type(draft: _Draft, value: str) -> None:
    try:
        draft.task_type = TaskType(value)
    except ValueError:
        raise ValueError(f"task type {value!r} is none of {', '.join(TaskType)}") from None


def _if_silent(draft: _Draft, value: str) -> None:
    try:
        draft.on_silence = OnSilence(value)
    except ValueError:
        raise ValueError(f"if-site-silent {value!r} is none of {', '.join(OnSilence)}") from None
    draft.restartable = draft.restartable or draft.on_silence is OnSilence.RERUN


def _site(draft: _Draft, value: str) -> None:
    draft.site = value


def _pool(draft: _Draft, value: str) -> None:
    site, slash, pool = value.rpartition("/")
    draft.pool, draft.site = pool, site if slash else draft.site


def _image(draft: _Draft, value: str) -> None:
    draft.image = value


def _enroot_image(draft: _Draft, value: str) -> None:
    """pyxis' spelling, which is enroot's: `REGISTRY#NAME`, and Docker Hub where no registry is named. A file is left as it is: it is no image."""
    text = value.removeprefix("docker://").replace("#", "/", 1)
    first, slash, _ = text.partition("/")
    if text and text[0] not in "./" and not (slash and (first == "localhost" or re.search(r"[.:]", first))):
        text = f"docker.io/{text}" if slash else f"docker.io/library/{text}"
    draft.image = text


def _shell(draft: _Draft, value: str) -> None:
    """Nothing to do: every attempt starts in its own folder with a clean environment."""


Option = Callable[[_Draft, str], None]

SBATCH: Mapping[str, Option] = {
    "job-name": _name,
    "J": _name,
    "time": _time,
    "t": _time,
    "gres": _gres,
    "gpus": _gpus,
    "G": _gpus,
    "gpus-per-node": _gpus_per_node,
    "constraint": _constraint,
    "C": _constraint,
    "nodes": _nodes,
    "N": _nodes,
    "ntasks": _tasks,
    "n": _tasks,
    "cpus-per-task": _cpus,
    "c": _cpus,
    "requeue": _requeue,
    "no-requeue": _no_requeue,
    "export": _shell,
    "container-image": _enroot_image,
}
INTERTIE: Mapping[str, Option] = {
    "name": _name,
    "time": _time,
    "gpus": _gpus,
    "gpu-memory": _gpu_memory,
    "interconnect": _interconnect,
    "slots": _cpus,
    "outputs": _outputs,
    "task-type": _task_type,
    "if-site-silent": _if_silent,
    "restartable": _requeue,
    "site": _site,
    "pool": _pool,
    "image": _image,
}
# Known to sbatch, decided by the federation or the site here: dropping them changes where or how output is written, never what runs.
REPLACED: Mapping[str, str] = {
    "output": "the log is kept whole and read with `intertie logs`",
    "o": "the log is kept whole and read with `intertie logs`",
    "error": "standard error goes into the one log",
    "e": "standard error goes into the one log",
    "partition": "the site decides; use `#INTERTIE --pool site/pool` to insist on one",
    "p": "the site decides; use `#INTERTIE --pool site/pool` to insist on one",
    "account": "the tenant's mapping decides the local account",
    "A": "the tenant's mapping decides the local account",
    "qos": "the site's mapping decides",
    "q": "the site's mapping decides",
    "mem": "memory comes with the devices of the pool",
    "mem-per-cpu": "memory comes with the devices of the pool",
    "mem-per-gpu": "use `#INTERTIE --gpu-memory` for the memory of the card",
    "array": "one job runs, and no SLURM_ARRAY_TASK_ID is set; submit one job for each value, with `--env NAME=VALUE`",
    "a": "one job runs, and no SLURM_ARRAY_TASK_ID is set; submit one job for each value, with `--env NAME=VALUE`",
    "dependency": "nothing is waited for; submit it when the other has ended: `intertie logs -f JOB && intertie submit …`",
    "d": "nothing is waited for; submit it when the other has ended: `intertie logs -f JOB && intertie submit …`",
    "begin": "it may begin at once",
    "b": "it may begin at once",
    "mail-type": "follow it with `intertie logs -f`",
    "mail-user": "follow it with `intertie logs -f`",
    "container-mounts": "in its image a job sees its own folder",
    "container-workdir": "the job runs in its own unpacked work folder",
    "container-mount-home": "no home folder travels",
    "no-container-mount-home": "no home folder is mounted anyway",
    "container-entrypoint": "the script is what runs",
    "no-container-entrypoint": "the script is what runs anyway",
    "container-env": "what `intertie submit --env` names is set",
    "container-name": "each job has a container of its own",
    "chdir": "the job runs in its own unpacked work folder",
    "D": "the job runs in its own unpacked work folder",
}
FLAGS = frozenset(
    {"requeue", "no-requeue", "restartable"}
    | {"container-mount-home", "no-container-mount-home", "container-entrypoint", "no-container-entrypoint"}
)


def parse_script(script: str, *, name: str = "") -> JobFile:
    """The job that a script asks for. `Refused('jobfile.empty')` for nothing to run; a directive that cannot be read is a warning.

    Its image is taken as written: whoever submits it lets `JobFile.checked` judge, since an option may name another.
    """
    if not script.strip():
        raise Refused("jobfile.empty", "the script is empty", next_step="give a script with at least one command")
    draft = _Draft(name=name)
    for number, line in enumerate(script.splitlines(), start=1):
        text = line.strip()
        if text and not text.startswith("#"):
            break
        if match := DIRECTIVE.match(text):
            _read(draft, number, match[1], match[2])
    if not re.search(r"^[^#\s]", script, re.MULTILINE):
        draft.warnings.append(Warned(1, "the script holds no command, only comments"))
    return JobFile(_spec(draft, script), tuple(draft.warnings), draft.image_line)


def _read(draft: _Draft, line: int, word: str, rest: str) -> None:
    try:
        tokens = _split(rest)
    except ValueError as err:
        draft.warnings.append(Warned(line, f"#{word} cannot be read: {err}"))
        return
    table = SBATCH if word == "SBATCH" else INTERTIE
    while tokens:
        option, value, tokens = _take(tokens)
        shown = f"--{option}" if len(option) > 1 else f"-{option}"
        if not option:
            draft.warnings.append(Warned(line, f"#{word} {value!r} is not an option"))
        elif option in table:
            try:
                table[option](draft, value)
                draft.image_line = line if table[option] in (_image, _enroot_image) else draft.image_line
            except ValueError as err:
                draft.warnings.append(Warned(line, f"#{word} {shown}: {err}; ignored"))
        elif word == "SBATCH" and option in REPLACED:
            draft.warnings.append(Warned(line, f"#{word} {shown} is not used: {REPLACED[option]}"))
        else:
            draft.warnings.append(Warned(line, f"#{word} {shown} is not known here; ignored"))


def _split(text: str) -> list[str]:
    """Words as a shell's, with comments; a `#` inside a word is the word's own (`--container-image=nvcr.io#nvidia/pytorch`)."""
    return [word.replace(_INNER, "#") for word in shlex.split(re.sub(r"(?<=\S)#", _INNER, text), comments=True)]


def _take(tokens: list[str]) -> tuple[str, str, list[str]]:
    """(option, value, the rest) of `--name=value`, `--name value`, `-n value`, `-nvalue` or a flag."""
    first, rest = tokens[0], tokens[1:]
    if first.startswith("--"):
        option, equals, value = first[2:].partition("=")
    elif first.startswith("-") and len(first) > 1:
        option, value = first[1], first[2:].removeprefix("=")
        equals = value
    else:
        return "", first, rest
    if equals or option in FLAGS:
        return option, value, rest
    if rest and not rest[0].startswith("-"):
        return option, rest[0], rest[1:]
    return option, "", rest


def _spec(draft: _Draft, script: str) -> JobSpec:
    gpus = draft.gpus * (draft.nodes if draft.gpus_per_node else 1)
    resources = Resources(
        gpus=gpus,
        gpu_model=draft.gpu_model if gpus else None,
        gpu_memory_mib=draft.gpu_memory_mib,
        interconnect=draft.interconnect,
        slots=1 if gpus else draft.tasks * draft.cpus_per_task,
    )
    return JobSpec(
        name=draft.name or "job",
        script=script,
        resources=resources,
        task_type=draft.task_type,
        wall_s=draft.wall_s or 3_600,
        outputs=draft.outputs,
        site=SiteName(draft.site) if draft.site else None,
        pool=PoolName(draft.pool) if draft.pool else None,
        on_silence=draft.on_silence,
        restartable=draft.restartable,
        image=draft.image,
    )
