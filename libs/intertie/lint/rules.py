"""What of a script does not travel: found by its commands and directives, judged against what each site told of itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from posixpath import basename, normpath

from intertie.contracts.facts import SiteFacts
from intertie.contracts.image import PoolImages, read_image
from intertie.errors import Refused
from intertie.jobfile import Directive, directives, named_image
from intertie.lint.words import LITERAL_DOLLAR, Command, Word, commands, read


class Verdict(StrEnum):
    """At one site. `unknown`: it has not told; `absent` only where it told what it has."""

    EXISTS = "exists"
    ABSENT = "absent"
    UNKNOWN = "unknown"


class Severity(StrEnum):
    FAILS = "fails"
    """Where it is absent the script fails, or runs on other data."""
    CHANGES = "changes"
    """It runs, but this is not used as it is written."""


class Kind(StrEnum):
    PATH = "path"
    HOME = "home"
    VARIABLE = "variable"
    INTERPRETER = "interpreter"
    OUTPUT = "output"
    MODULE = "module"
    ENVIRONMENT = "environment"
    IMAGE = "image"
    """That a command of the script names."""
    NAMED_IMAGE = "named_image"
    """In which a directive asks to run the job."""
    MPI = "mpi"
    COMMAND = "command"
    NESTED = "nested"
    PARTITION = "partition"
    ACCOUNT = "account"
    NODES = "nodes"
    EXPORT = "export"
    LATE = "late"
    FUNCTION = "function"
    BLANKS = "blanks"
    LINE_ENDS = "line_ends"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing on one line. `what` is the name or path that is meant; `words` how it stands there; `verdicts` by site, none where it is the same at all."""

    line: int
    kind: Kind
    severity: Severity
    words: str
    what: str
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)

    @property
    def holds_everywhere(self) -> bool:
        return bool(self.verdicts) and all(verdict is Verdict.EXISTS for verdict in self.verdicts.values())


# Every Linux machine that runs jobs has these, and what lies below them is no data of anybody's.
EVERYWHERE = (
    "/bin",
    "/dev",
    "/etc",
    "/lib",
    "/lib64",
    "/proc",
    "/run",
    "/sbin",
    "/sys",
    "/tmp",
    "/usr/bin",
    "/usr/lib",
    "/usr/sbin",
    "/var/tmp",
)
HOMES = ("/home", "/root", "/users", "/Users", "/export/home")
# Set by one site's own profile scripts.
SITE_VARIABLES = frozenset(
    "SCRATCH WORK WORKDIR PROJECT PROJECTS STORE STORAGE DATA DATASETS GROUP_HOME CLUSTER_SCRATCH LOCAL_SCRATCH SLURM_SUBMIT_DIR SLURM_TMPDIR".split()
)
# Whose first plain argument is a program text, in which slashes are no paths.
PROGRAM_TEXTS = frozenset("sed awk gawk mawk grep egrep fgrep perl tr expr jq".split())
WRAPPERS = frozenset("srun mpirun mpiexec env exec nohup time command sudo nice ionice timeout stdbuf xargs numactl taskset".split())
MODULE_VERBS = frozenset("load add switch swap try-load".split())
NESTED = frozenset("sbatch salloc qsub bsub".split())
NATIVE = frozenset("srun scontrol squeue sacct sinfo scancel sstat sacctmgr sbcast qstat bjobs".split())
LAUNCHERS = frozenset("mpirun mpiexec mpiexec.hydra orterun".split())
CONTAINERS = frozenset("apptainer singularity docker podman enroot".split())
SHELLS = frozenset("sh bash dash zsh ksh".split())
NO_PATHS = frozenset("echo printf :".split())
ACCOUNT_OPTIONS = frozenset({"account", "A", "qos", "q", "uid", "gid", "reservation", "wckey"})
NODE_OPTIONS = frozenset({"nodelist", "w", "exclude", "x", "nodefile", "F"})
OUTPUT_OPTIONS = frozenset({"output", "o", "error", "e", "chdir", "D", "input", "i"})

_PIECES = re.compile(r"[=:,;@\s]+")
_PATH = re.compile(r"/[\w.@%+~#${}*?\[\]-]+(?:/[\w.@%+~#${}*?\[\]-]*)*\Z")
_REMOTE = re.compile(r"[\w.-]+@[\w.-]+:")
_QUOTED_PATH = re.compile(r"""(["'])((?:/|~/)[\w.@%+~#{}*?-][\w.@%+~#{}*?/-]*)\1""")
_HOME = re.compile(r"(?:~[\w-]*|\$HOME|\$\{HOME\})(?:/|\Z)")
_VARIABLE = re.compile(r"\$\{?([A-Z_]\w*)\}?(?:/|\Z)")
# Wide enough for any job; beyond it a script is generated, and its findings are too many to read.
MOST = 500


def lint(script: str, sites: Mapping[str, SiteFacts | None], images: Mapping[str, PoolImages | None] | None = None) -> tuple[Finding, ...]:
    """What will not travel, by line, each judged for every site of `sites` (None: it told nothing). `images`: which of them a job may name there,
    by site. Never raises."""
    if not _for_a_shell(script):
        return _sorted([*_of_text(script), *_of_directives(script, frozenset()), *_of_other_language(script)], sites, images or {})
    found, documents = read(script)
    known = {name for command in found for name, _ in command.assigned} | {
        word.text.partition("=")[0]
        for command in found
        if command.name in ("export", "declare", "local", "readonly")
        for word in command.words[1:]
    }
    raw = [
        *_of_text(script),
        *_of_directives(script, documents),
        *(one for command in _with_inner(found) for one in _of_command(command, known)),
    ]
    return _sorted(raw, sites, images or {})


def _sorted(raw: Iterable[Finding], sites: Mapping[str, SiteFacts | None], images: Mapping[str, PoolImages | None]) -> tuple[Finding, ...]:
    """By line, each thing once, judged."""
    seen: dict[tuple[int, Kind, str], Finding] = {}
    for one in raw:
        seen.setdefault((one.line, one.kind, one.what), _judged(one, sites, images))
    return tuple(sorted(seen.values(), key=lambda one: one.line)[:MOST])


def _for_a_shell(script: str) -> bool:
    first = script.partition("\n")[0].strip()
    if not first.startswith("#!"):
        return True
    names = [basename(word) for word in first[2:].split() if not word.startswith("-")]
    return not names or (names[1] if names[0] == "env" and len(names) > 1 else names[0]) in SHELLS


def _of_other_language(script: str) -> Iterator[Finding]:
    """Of Python and the like: whole strings that are absolute paths. What such a program puts together is not seen."""
    for number, text in enumerate(script.splitlines(), start=1):
        for match in _QUOTED_PATH.finditer("" if text.lstrip().startswith("#") else text):
            path = match[2]
            if not _everywhere(path):
                home = path.startswith("~") or any(_below(path, top) for top in HOMES)
                yield Finding(number, Kind.HOME if home else Kind.PATH, Severity.FAILS, match[0], path)


def _with_inner(found: Iterable[Command]) -> Iterator[Command]:
    """Also of what a shell is given as text: `bash -c '…'`."""
    for command in found:
        yield command
        texts = [word.text for word in command.words]
        for number, text in enumerate(texts[:-2]):
            if basename(text) in SHELLS and re.fullmatch(r"-\w*c", texts[number + 1]):
                word = command.words[number + 2]
                yield from commands(word.text.replace(LITERAL_DOLLAR, "$"), word.line)


# --- the text itself ---


def _of_text(script: str) -> Iterator[Finding]:
    lines = script.splitlines()
    first = lines[0] if lines else ""
    if "\r\n" in script:
        yield Finding(1, Kind.LINE_ENDS, Severity.CHANGES, "CRLF", "CRLF")
    if first[:1].isspace() and first.lstrip().startswith("#!"):
        yield Finding(1, Kind.BLANKS, Severity.FAILS, first.rstrip()[:80], first.strip().removeprefix("#!").strip()[:80])
    elif first.startswith("#!"):
        interpreter = first[2:].split()[0] if first[2:].split() else ""
        if interpreter.startswith("/") and not _everywhere(interpreter):
            yield Finding(1, Kind.INTERPRETER, Severity.FAILS, first.strip()[:80], interpreter)


def _of_directives(script: str, documents: frozenset[int]) -> Iterator[Finding]:
    for one in directives(script):
        if one.line in documents:
            continue
        words = f"#{one.word} {one.shown}"
        if one.late:
            yield Finding(one.line, Kind.LATE, Severity.CHANGES, words, one.shown)
            continue
        if image := named_image(one):
            yield Finding(one.line, Kind.NAMED_IMAGE, Severity.CHANGES if _pinned(image) else Severity.FAILS, words, image)
        elif one.word == "SBATCH":
            yield from _of_sbatch(one, words)


def _pinned(image: str) -> bool:
    try:
        read_image(image)
    except Refused:
        return False
    return True


def _of_sbatch(one: Directive, words: str) -> Iterator[Finding]:
    if one.option in ("partition", "p"):
        for name in one.value.split(","):
            yield Finding(one.line, Kind.PARTITION, Severity.CHANGES, words, name)
    elif one.option in ACCOUNT_OPTIONS:
        yield Finding(one.line, Kind.ACCOUNT, Severity.CHANGES, words, one.value)
    elif one.option in NODE_OPTIONS:
        yield Finding(one.line, Kind.NODES, Severity.CHANGES, words, one.value)
    elif one.option in OUTPUT_OPTIONS and (one.value.startswith("/") or _HOME.match(one.value)) and not _everywhere(one.value):
        yield Finding(one.line, Kind.OUTPUT, Severity.CHANGES, words, one.value)
    elif one.option in ("export", "get-user-env") and one.value.upper() != "NONE":
        yield Finding(one.line, Kind.EXPORT, Severity.CHANGES, words, one.value or one.option)


# --- commands ---


def _of_command(command: Command, known: set[str]) -> Iterator[Finding]:
    words = _unwrapped(command.words)
    name = basename(words[0].text) if words else ""
    yield from _of_names(command, words, name)
    for operator, target in command.redirects:
        if operator not in ("<<<", ">&", "<&"):
            yield from _of_paths(target, known)
    for _, value in command.assigned:
        yield from _of_paths(value, known)
    if name in NO_PATHS:
        return
    skip = _program_text(words) if name in PROGRAM_TEXTS else None
    shell_text = {
        id(command.words[n + 2])
        for n, word in enumerate(command.words[:-2])
        if basename(word.text) in SHELLS and command.words[n + 1].text.endswith("c")
    }
    for word in command.words:
        if word is not skip and id(word) not in shell_text:
            yield from _of_paths(word, known)


def _program_text(words: Sequence[Word]) -> Word | None:
    return next((word for word in words[1:] if not word.text.startswith("-")), None)


def _unwrapped(words: Sequence[Word]) -> Sequence[Word]:
    """From the command that is run in the end. What a wrapper's own options take is guessed at by its shape."""
    rest = list(words)
    while len(rest) > 1 and basename(rest[0].text) in WRAPPERS:
        rest = rest[1:]
        while len(rest) > 1 and re.match(r"-|\d|\w+=", rest[0].text):
            rest = rest[1:]
    return rest


def _of_names(command: Command, words: Sequence[Word], name: str) -> Iterator[Finding]:
    outer = [basename(word.text) for word in command.words]
    shown = _shown(command)
    if command.words and outer[0] in NATIVE | LAUNCHERS | NESTED:
        yield from _of_scheduler(command, outer[0], shown)
    if not words:
        return
    rest = [word.text for word in words[1:]]
    plain = [text for text in rest if not text.startswith("-")]
    if name in ("module", "ml"):
        for module in _modules(name, plain):
            yield Finding(command.line, Kind.MODULE, Severity.FAILS, shown, module)
    elif environment := _environment(name, rest, plain):
        yield Finding(command.line, Kind.ENVIRONMENT, Severity.FAILS, shown, environment)
    elif name in CONTAINERS:
        image = _image(rest)
        yield Finding(command.line, Kind.COMMAND, Severity.FAILS, shown, name)
        if image:
            yield Finding(command.line, Kind.IMAGE, Severity.FAILS, shown, image)
    elif (name == "export" and "-f" in rest) or (
        name in ("declare", "typeset") and any(re.fullmatch(r"-\w*f\w*", t) and "x" in t for t in rest)
    ):
        yield Finding(command.line, Kind.FUNCTION, Severity.CHANGES, shown, " ".join(plain))


def _of_scheduler(command: Command, name: str, shown: str) -> Iterator[Finding]:
    if name in NESTED:
        yield Finding(command.line, Kind.NESTED, Severity.FAILS, shown, name)
        return
    yield Finding(command.line, Kind.COMMAND, Severity.FAILS, shown, name)
    texts = [word.text for word in command.words]
    for number, text in enumerate(texts if name == "srun" else ()):
        if text == "--mpi" and number + 1 < len(texts):
            yield Finding(command.line, Kind.MPI, Severity.FAILS, shown, texts[number + 1])
        elif text.startswith("--mpi="):
            yield Finding(command.line, Kind.MPI, Severity.FAILS, shown, text.removeprefix("--mpi="))


def _modules(name: str, plain: Sequence[str]) -> Sequence[str]:
    if name == "ml":
        return plain[1:] if plain[:1] and plain[0] in MODULE_VERBS else [] if plain[:1] in (["purge"], ["list"], ["avail"]) else plain
    return plain[1:] if plain[:1] and plain[0] in MODULE_VERBS else []


def _environment(name: str, rest: Sequence[str], plain: Sequence[str]) -> str:
    """Name or folder of an environment that is entered here; empty if none is."""
    if name in ("conda", "mamba", "micromamba"):
        if plain[:1] == ["activate"]:
            return plain[1] if len(plain) > 1 else "base"
        if plain[:1] == ["run"]:
            named = [rest[n + 1] for n, text in enumerate(rest[:-1]) if text in ("-n", "--name", "-p", "--prefix")]
            return named[0] if named else "base"
    if name in ("source", "."):
        if plain[:1] == ["activate"]:
            return plain[1] if len(plain) > 1 else "base"
        if plain and re.search(r"(?:\A|/)(?:bin|Scripts)/activate\Z", plain[0]):
            return plain[0].removesuffix("/activate").removesuffix("/bin") or plain[0]
    return ""


def _image(rest: Sequence[str]) -> str:
    """The first word after `exec`, `run`, `shell` that is no option and looks like an image."""
    for number, text in enumerate(rest):
        if text in ("exec", "run", "shell", "start"):
            return next(
                (
                    t
                    for t in rest[number + 1 :]
                    if not t.startswith("-")
                    and (t.endswith((".sif", ".sqsh")) or "://" in t or re.fullmatch(r"[\w.-]+(?:/[\w.-]+)+:[\w.-]+", t))
                ),
                "",
            )
    return ""


# --- paths ---


def _of_paths(word: Word, known: set[str]) -> Iterator[Finding]:
    if "://" in word.text or _REMOTE.match(word.text):
        return
    pieces = _PIECES.split(word.text)
    for piece in pieces:
        option = re.match(r"-[A-Za-z](?=[/~$])", piece)
        piece = piece[2:] if option else piece
        shown = word.shown[:120]
        if _HOME.match(piece):
            yield Finding(word.line, Kind.HOME, Severity.FAILS, shown, piece)
        elif (match := _VARIABLE.match(piece)) and match[1] in SITE_VARIABLES - known:
            yield Finding(word.line, Kind.VARIABLE, Severity.FAILS, shown, f"${match[1]}")
        elif _PATH.match(piece) and not _everywhere(piece):
            home = any(_below(piece, top) for top in HOMES)
            yield Finding(word.line, Kind.HOME if home else Kind.PATH, Severity.FAILS, shown, piece.rstrip("/") or "/")


def _everywhere(path: str) -> bool:
    return any(_below(path, top) for top in EVERYWHERE)


def _below(path: str, top: str) -> bool:
    """Is `path` `top`, or below it? A path that climbs out of it is not."""
    return normpath(path) == top or normpath(path).startswith(f"{top.rstrip('/')}/")


def _shown(command: Command) -> str:
    return " ".join(word.shown for word in command.words)[:120]


# --- the verdict ---


def _judged(one: Finding, sites: Mapping[str, SiteFacts | None], images: Mapping[str, PoolImages | None]) -> Finding:
    if one.kind in (Kind.LATE, Kind.FUNCTION, Kind.BLANKS, Kind.LINE_ENDS, Kind.EXPORT, Kind.NODES):
        return one
    if one.kind is Kind.NAMED_IMAGE:
        verdicts = {site: _runs(one.what, images.get(site)) for site in sites}
    else:
        verdicts = {site: _verdict(one, facts or SiteFacts()) for site, facts in sites.items()}
    return Finding(one.line, one.kind, one.severity, one.words, one.what, verdicts)


def _runs(image: str, told: PoolImages | None) -> Verdict:
    if told is None:
        return Verdict.UNKNOWN
    return Verdict.EXISTS if told.takes(image) else Verdict.ABSENT


def _verdict(one: Finding, facts: SiteFacts) -> Verdict:
    told, has = _told(one, facts)
    if not told or "$" in one.what.partition("/")[0]:
        return Verdict.UNKNOWN
    return Verdict.EXISTS if has else Verdict.ABSENT


def _told(one: Finding, facts: SiteFacts) -> tuple[bool, bool]:
    """Has the site told of such things, and is this among them?"""
    match one.kind:
        case Kind.PATH | Kind.HOME | Kind.INTERPRETER | Kind.OUTPUT:
            fixed = one.what.partition("$")[0]
            return facts.folders is not None, any(_below(fixed, folder) for folder in facts.folders or ())
        case Kind.MODULE:
            return facts.modules is not None, any(m == one.what or m.partition("/")[0] == one.what for m in facts.modules or ())
        case Kind.ENVIRONMENT:
            if one.what.startswith("/"):
                return facts.folders is not None, any(_below(one.what, folder) for folder in facts.folders or ())
            return facts.environments is not None, one.what in (facts.environments or ())
        case Kind.IMAGE:
            return facts.images is not None, one.what in (facts.images or ())
        case Kind.PARTITION:
            return facts.partitions is not None, one.what in (facts.partitions or ())
        case Kind.ACCOUNT:
            return facts.accounts is not None, one.what in (facts.accounts or ())
        case Kind.MPI:
            return facts.mpi is not None, one.what in (facts.mpi or ())
        case Kind.COMMAND | Kind.NESTED:
            return facts.commands is not None, one.what in (facts.commands or ())
        case _:
            return False, False
