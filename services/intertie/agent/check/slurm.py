"""What any Slurm answers to any user, before the owner's rules say how it is reached: from then on the Slurm adapter's own room looks, by that way."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from intertie.agent.check.report import Check, Line, Place, line

ASK_S = 10.0
# Of what a command said: the line that matters, not a page.
SAID = 300


@dataclass(frozen=True, slots=True)
class Partition:
    """One line of `sinfo -h -o '%P|%a|%D|%G|%c|%m'`; the default's star is taken off."""

    name: str
    state: str
    nodes: str
    gres: str = ""
    cpus: str = ""
    memory: str = ""


def partitions_of(text: str) -> list[Partition]:
    """Lines that have another shape are left out: a partition that cannot be read is none that can be promised."""
    found: dict[str, Partition] = {}
    for row in text.splitlines():
        fields = [part.strip() for part in row.split("|")]
        if len(fields) >= 3 and fields[0]:
            name = fields[0].removesuffix("*")
            found.setdefault(name, Partition(name, *(fields[1:6])))
    return list(found.values())


async def ask(*command: str) -> tuple[int, str]:
    """(exit code, what it said); 127 where it is not, 124 where it does not answer."""
    try:
        child = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as err:
        return 127, err.strerror or str(err)
    try:
        async with asyncio.timeout(ASK_S):
            said, _ = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        return 124, f"no answer within {ASK_S:.0f} s"
    return child.returncode or 0, said.decode("utf-8", "replace").strip()


async def partitions() -> list[Partition]:
    code, said = await ask("sinfo", "-h", "-o", "%P|%a|%D|%G|%c|%m")
    return partitions_of(said) if code == 0 else []


async def slurm(place: Place) -> Sequence[Line]:
    """Silent where there is no Slurm: most sites have none. Its commands alone are no promise: what fails is a warning."""
    if place.rules.slurm is not None or shutil.which("sinfo") is None:
        return []
    code, version = await ask("sinfo", "--version")
    if code:
        return [line("warn", "slurm.down", command="sinfo --version", code=code, said=version[:SAID], fix="slurm")]
    found = [line("ok", "slurm.ok", version=version[:SAID])]
    code, said = await ask("scontrol", "ping")
    if code or "DOWN" in said.upper():
        return [*found, line("warn", "slurm.down", command="scontrol ping", code=code, said=said[:SAID], fix="slurm")]
    found.append(line("ok", "slurm.ping", said=said.splitlines()[0][:SAID] if said else "-"))
    for one in await partitions():
        up = one.state.lower() == "up"
        found.append(
            line(
                "ok" if up else "warn",
                "queue.ok" if up else "queue.down",
                queue=one.name,
                state=one.state,
                nodes=one.nodes,
                fix="" if up else "queue",
            )
        )
    code, said = await ask("sacctmgr", "-n", "-P", "show", "cluster", "format=cluster")
    if code:
        found.append(line("warn", "slurm.down", command="sacctmgr show cluster", code=code, said=said[:SAID], fix="books"))
    else:
        found.append(line("ok", "slurm.books"))
    return found


CHECKS: Sequence[Check] = (slurm,)
