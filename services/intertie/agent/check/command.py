"""`intertie-agent check` as a person calls it: read what there is, look, show, and leave with a code that means it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click

from intertie.agent.check.detect import ports, storage_of, written
from intertie.agent.check.pools import seen_here
from intertie.agent.check.report import Place, Report, run
from intertie.agent.check.slurm import partitions
from intertie.agent.config import Folder
from intertie.agent.core.rules import Rules
from intertie.contracts.base import encode
from intertie.contracts.identity import Joined
from intertie.contracts.site import PoolProfile
from intertie.errors import IntertieError, Refused
from intertie.observe import log
from intertie.text import language

WORDS = {"en": {"ok": "ok", "warn": "warn", "fail": "FAIL"}, "zh": {"ok": "正常", "warn": "注意", "fail": "失败"}}


def show(folder: Folder, hub: str, as_json: bool) -> int:
    """The exit code: 0, or 1 if a line fails."""
    # What goes wrong is a line of the report; the rooms' own log would say it again.
    log.setup("check", "CRITICAL")
    report = asyncio.run(run(place_of(folder, hub)))
    click.echo(encode(report).decode() if as_json else told(report))
    return 1 if report.worst == "fail" else 0


def told(report: Report) -> str:
    words = WORDS[language()]
    rows = []
    for one in report.lines:
        rows.append(f"{words[one.level]:5} {one.what}: {one.text}")
        if one.fix:
            rows.append(f"      → {one.fix}")
    return "\n".join(rows)


def place_of(folder: Folder, hub: str = "") -> Place:
    """What cannot be read is left out here: its own check says why."""
    joined: Joined | None = None
    profiles: list[PoolProfile] = []
    rules = Rules()
    try:
        joined, profiles = folder.joined(), folder.profiles()
    except (IntertieError, OSError):
        pass
    try:
        rules = folder.rules()
    except (IntertieError, OSError):
        pass
    return Place(folder=folder, joined=joined, profiles=profiles, rules=rules, hub=hub, environ=dict(os.environ))


def write_profile(target: Path, interconnect: str, folder: Folder) -> None:
    """`Refused('agent.profile')` if the file is there: an owner's answers are never overwritten."""
    if str(target) != "-" and target.exists():
        raise Refused("agent.profile", f"{target} is there already", next_step="name another file, or move it away")
    log.setup("check", "CRITICAL")
    text = asyncio.run(_seen("pools.toml" if str(target) == "-" else str(target), interconnect, place_of(folder)))
    if str(target) == "-":
        click.echo(text, nl=False)
        return
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as err:
        raise Refused("agent.profile", f"{target}: {err.strerror}") from err
    click.echo(f"{target}: answer how much, when and for whom, then: intertie-agent join --hub URL --token-file FILE --profile {target}")


async def _seen(file: str, interconnect: str, place: Place) -> str:
    from intertie.agent.join import detect  # noqa: PLC0415  # which itself asks this room how cards are connected

    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")  # noqa: ASYNC240  # memory, not a disk
    profiles = await detect(interconnect=interconnect, reading=await seen_here(place))
    return written(profiles, file=file, storage=storage_of(mounts), adapters=ports(), queues=await partitions())
