"""A report's lines, and who writes them. A room of another kind adds its own by a module `check` with `CHECKS`, named in `ROOMS`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec

from intertie.agent.check.texts import said
from intertie.agent.config import VERSION, Folder
from intertie.agent.core.rules import Rules
from intertie.contracts.identity import Joined
from intertie.contracts.site import PoolProfile
from intertie.observe.redact import scrub

Level = Literal["ok", "warn", "fail"]
# Longer than the slowest answer of a busy scheduler; a check that hangs must not keep the others' lines.
LIMIT_S = 30.0
# In this order in the report. Each is a module with `CHECKS: Sequence[Check]`; one that is not there yet is left out.
ROOMS = (
    "intertie.agent.check.machine",
    "intertie.agent.check.reach",
    "intertie.agent.check.pools",
    "intertie.agent.check.slurm",
    "intertie.agent.slurm.check",
    "intertie.agent.kubernetes.check",
    "intertie.agent.machines.check",
    "intertie.agent.endpoint.check",
)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `fix`: the command or the words that mend it."""

    what: str
    level: Level
    text: str
    fix: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`--json`. `worst` is what the exit code says: 0 ok or warn, 1 fail."""

    version: str
    site: str
    worst: Level
    lines: list[Line]


class NodeOf(msgspec.Struct, frozen=True):
    """What a node's `node.json` says of where it belongs."""

    node: str
    site: str
    head: str


@dataclass(frozen=True, slots=True)
class Place:
    """What checks look at. Nothing in it is changed by them."""

    folder: Folder
    joined: Joined | None = None
    profiles: Sequence[PoolProfile] = ()
    rules: Rules = field(default_factory=Rules)
    hub: str = ""
    """Address of a gateway, where no join has named one yet."""
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def gateway(self) -> str:
        return self.joined.gateway_url if self.joined is not None else self.hub

    def node(self) -> NodeOf | None:
        """Where this folder's node belongs, if it is a node's: it has a head, and no hub of its own."""
        try:
            return msgspec.json.decode((self.folder.root / "node.json").read_bytes(), type=NodeOf)
        except (OSError, msgspec.MsgspecError):
            return None


Check = Callable[[Place], Awaitable[Sequence[Line]]]


def line(level: Level, key: str, /, *, fix: str = "", **values: object) -> Line:
    """A line by the keys of `texts`: `what.<first part>`, `<key>`, and `fix.<fix>`."""
    what = said(f"what.{key.partition('.')[0]}", values)
    return Line(what=what, level=level, text=said(key, values), fix=said(f"fix.{fix}", values) if fix else "")


def checks_of(rooms: Sequence[str] = ROOMS) -> list[Check]:
    """All that are installed."""
    found: list[Check] = []
    for room in rooms:
        parent, _, _ = room.rpartition(".")
        if find_spec(parent) is not None and find_spec(room) is not None:
            try:
                found += import_module(room).CHECKS
            except ImportError as err:
                found.append(_missing(room, err))
    return found


def _missing(room: str, err: ImportError) -> Check:
    """A room whose extra is not installed says so in its place."""

    async def missing(place: Place) -> Sequence[Line]:
        return [line("warn", "check.broke", name=room.removeprefix("intertie."), error=f"{err}")]

    return missing


async def run(place: Place, checks: Sequence[Check] | None = None) -> Report:
    """One after the other, each with its limit; what a check itself breaks by is a line too."""
    lines: list[Line] = []
    for check in checks_of() if checks is None else checks:
        try:
            async with asyncio.timeout(LIMIT_S):
                lines += await check(place)
        except TimeoutError:
            lines.append(line("warn", "check.slow", name=check.__name__, limit=LIMIT_S))
        except Exception as err:  # a line of the report, so that the others are still told
            lines.append(line("warn", "check.broke", name=check.__name__, error=f"{type(err).__name__}: {err}"))
    shown = [shareable(one) for one in lines]
    worst: Level = "fail" if any(one.level == "fail" for one in shown) else "warn" if any(one.level == "warn" for one in shown) else "ok"
    return Report(version=VERSION, site=place.joined.site if place.joined else "", worst=worst, lines=shown)


def shareable(one: Line) -> Line:
    """Without what is secret, and without the name of whoever called."""
    home = str(Path.home())
    plain = [
        " · ".join(scrub(text if home in ("/", "/root") else text.replace(home, "~")).splitlines())
        for text in (one.what, one.text, one.fix)
    ]
    return Line(what=plain[0], level=one.level, text=plain[1], fix=plain[2])
