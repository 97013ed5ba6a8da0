"""What is put into a native job's folder so that its first process asks before the user's code: the start stub with its values, script, environment.

The stub itself is `start.sh` beside this file; nothing in it is generated but the assignments above it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath

from intertie.agent.core.model import Attempt
from intertie.contracts.site import DeviceKind
from intertie.errors import Refused

# Between the stub's looks at its lease, at `stop` and at its wall limit; seconds. Leased work is looked at as its supervisor would.
LOOK_S, LEASED_LOOK_S = 5, 1
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Start:
    """What one native job begins with. Paths are as the nodes see them."""

    folder: PurePath
    args: Sequence[str] = ()
    by: int = 0
    """Unix time after which nothing is begun; 0: no limit."""
    leased: bool = False
    wall_s: int = 31_536_000
    grace_s: int = 10
    through: Sequence[str] = ()
    """Words before the script, where something must run it: `apptainer exec image.sif`."""


def start_sh(start: Start) -> bytes:
    """A script for `/bin/sh`, to be submitted or run as it is: it finds its folder wherever a scheduler copies it to."""
    script = str(start.folder / "script")
    values = {
        "job": str(start.folder),
        "by": str(start.by),
        "leased": "1" if start.leased else "0",
        "wall": str(start.wall_s),
        "grace": str(start.grace_s),
        "look": str(LEASED_LOOK_S if start.leased else LOOK_S),
        "in_image": "1" if start.through else "0",
    }
    head = [f"intertie_{name}={shlex.quote(value)}" for name, value in values.items()]
    words = " ".join(shlex.quote(word) for word in (*start.through, script, *start.args))
    body = files("intertie.agent.adapters").joinpath("start.sh").read_text(encoding="utf-8")
    return "\n".join(["#!/bin/sh", *head, f"set -- {words}", body]).encode("utf-8")


def env_sh(values: Mapping[str, str]) -> bytes:
    """`Refused` for a name that no shell can export: it would be dropped in silence."""
    for name in values:
        if not NAME.fullmatch(name):
            raise Refused("agent.env_name", f"{name[:80]!r} is no name of an environment variable that a shell can set")
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items()).encode("utf-8")


def script_of(attempt: Attempt) -> bytes:
    """The user's script with a first line that a kernel can read; line ends of other systems are ours to mend (BR-044)."""
    text = attempt.spec.script.replace("\r\n", "\n")
    return (text if text.startswith("#!") else f"#!/bin/sh\n{text}").encode("utf-8")


def env_of(attempt: Attempt, folder: str) -> dict[str, str]:
    """Beside what the site's own scheduler sets: the user's values below ours, so that none of ours can be overruled."""
    ours = {
        "INTERTIE_JOB": attempt.job,
        "INTERTIE_ATTEMPT": attempt.id,
        "INTERTIE_WORK": f"{folder}/work",
        "TMPDIR": f"{folder}/tmp",
    }
    if attempt.kind is DeviceKind.SLOT:
        # Work that asked for no card sees none, where its scheduler does not say so.
        ours["CUDA_VISIBLE_DEVICES"] = ""
    if attempt.traceparent:
        ours["TRACEPARENT"] = attempt.traceparent
    return dict(attempt.env) | ours
