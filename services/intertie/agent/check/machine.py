"""This machine: versions, who runs the agent, its folder, its disks, whether it runs, and the accounts that tenants are mapped to."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp

from intertie.agent import accounts, procs
from intertie.agent.check.report import Check, Line, Place, line
from intertie.agent.config import VERSION
from intertie.agent.core.room import MIB, Floor, shortage
from intertie.agent.room import spaces_of
from intertie.agent.upgrade import read_mark
from intertie.contracts.base import decode
from intertie.contracts.local import LocalStatus
from intertie.errors import IntertieError

OLDEST_LIBC = (2, 17)
FEW_FILES = 10_000
ASK_S = 5.0


async def versions(place: Place) -> Sequence[Line]:
    name, libc = platform.libc_ver()
    shown = f"{name or 'libc'} {libc or '?'}"
    numbers = tuple(int(part) for part in libc.split(".")[:2] if part.isdigit())
    old = name == "glibc" and len(numbers) == 2 and numbers < OLDEST_LIBC
    if old:
        return [line("fail", "version.libc", libc=shown, fix="libc")]
    told = {"version": VERSION, "python": platform.python_version(), "system": platform.system(), "machine": platform.machine()}
    return [line("ok", "version.ok", **told, kernel=platform.release(), libc=shown)]


async def user(place: Place) -> Sequence[Line]:
    slurm = place.rules.slurm
    if slurm is not None and not accounts.is_root() and slurm.become.value in ("sudo", "rest"):
        return [line("ok", "user.queue", become=slurm.become.value)]
    return [line("ok", "user.root") if accounts.is_root() else line("warn", "user.single", fix="single")]


async def rules(place: Place) -> Sequence[Line]:
    try:
        found = place.folder.rules()
    except IntertieError as err:
        return [line("fail", "rules.bad", error=f"{err.text} ({err.next_step})", fix="rules", file=place.folder.rules_file)]
    images = found.pool_images()
    if not images.runtime:
        return []
    # Of a Slurm or Kubernetes the runtime is on its nodes.
    here = found.slurm is None and found.kubernetes is None
    if here and shutil.which(images.runtime, path=place.environ.get("PATH")) is None:
        return [line("fail", "images.none", runtime=images.runtime, fix="images")]
    return [line("ok", "images.ok", told=images.told)]


async def folder(place: Place) -> Sequence[Line]:
    root = place.folder.root
    if not root.exists():
        return [line("ok" if place.joined is None else "fail", "folder.none", folder=root)]
    found = [*_modes(place), *_passable(root)]
    return found or [line("ok", "folder.ok", folder=root)]


def _modes(place: Place) -> Iterator[Line]:
    private = [(place.folder.keys, 0o700), *((file, 0o600) for file in sorted(place.folder.keys.glob("*.nk"))), (place.folder.packs, 0o700)]
    for path, wanted in private:
        try:
            about = path.stat()
        except FileNotFoundError:
            continue
        except PermissionError:
            yield line("fail", "folder.owner", path=path, fix="owner")
            return
        mode = stat.S_IMODE(about.st_mode)
        if about.st_uid != os.geteuid():
            yield line("fail", "folder.owner", path=path, fix="owner")
        elif mode & ~wanted:
            yield line("fail", "folder.mode", path=path, mode=mode, wanted=wanted, fix="mode")


def _passable(root: Path) -> Iterator[Line]:
    """A root agent's jobs run as other accounts, which must get to their folders."""
    for each in (root, *root.parents) if accounts.is_root() else ():
        mode = stat.S_IMODE(each.stat().st_mode)
        if not mode & stat.S_IXOTH:
            yield line("fail", "folder.closed", path=each, mode=mode, fix="closed")


async def disk(place: Place) -> Sequence[Line]:
    known = [path for path in (place.folder.root, place.folder.jobs, place.folder.packs) if path.exists()]
    nearest = next(path for path in (place.folder.root, *place.folder.root.parents) if path.exists())
    spaces = await asyncio.to_thread(spaces_of, known or [nearest])
    floor = Floor(mib=place.rules.disk_floor_mib, percent=place.rules.disk_floor_percent)
    found = []
    for space in spaces:
        why = shortage([space], floor, journal_accepts=True, closed=False)
        if why is not None:
            found.append(line("fail", "disk.low", text=why.text, where=space.where, fix="disk"))
        else:
            found.append(line("ok", "disk.ok", free=space.free // MIB, where=space.where))
        files = os.statvfs(space.where)
        if files.f_files and files.f_favail < FEW_FILES:
            found.append(line("warn", "disk.inodes", free=files.f_favail, where=space.where, fix="disk"))
    return found


async def agent(place: Place) -> Sequence[Line]:
    """What the running agent says of itself, over its own door."""
    if place.joined is None:
        node = place.node()
        if node is not None:
            return [line("ok", "joined.node", node=node.node, site=node.site, head=node.head)]
        return [line("warn", "joined.no", fix="join")]
    found = [line("ok", "joined.yes", site=place.joined.site)]
    mark = read_mark(place.folder)
    if mark is None or not procs.alive(mark.process):
        return [*found, line("warn", "agent.not", fix="start", folder=place.folder.root)]
    if mark.version != VERSION:
        found.append(line("warn", "agent.other", version=mark.version, installed=VERSION, fix="upgrade"))
    status = await _status(place)
    if status is None:
        return [*found, line("warn", "agent.denied", fix="owner")]
    if status.islanded_since is None:
        found.append(line("ok", "agent.runs", version=status.version))
    else:
        since = status.islanded_since.isoformat(timespec="seconds")
        found.append(line("warn", "agent.islanded", version=status.version, since=since, why=status.islanded_why or "?"))
    troubled = {lane: state for lane, state in status.lanes.items() if state != "heard" and status.islanded_since is None}
    return [*found, *(line("warn", "agent.lane", lane=lane, state=state) for lane, state in troubled.items()), *_mapped(status)]


async def _status(place: Place) -> LocalStatus | None:
    """None if the door is shut to whoever asks, or nobody opens."""
    connector = aiohttp.UnixConnector(path=str(place.folder.socket))
    try:
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, session.get("http://agent/v1/status") as answer:
            body = await answer.read()
            return decode(body, LocalStatus, what="the agent's status") if answer.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, IntertieError):
        return None


def _mapped(status: LocalStatus) -> list[Line]:
    mapped = [one for one in status.known if one.what == "mapping"]
    if not mapped:
        return [line("warn", "account.none", account="-", fix="map")]
    found = []
    for one in mapped:
        why = "" if status.single_user else accounts.why_not(one.value)
        shown = one.value or "-"
        if why:
            found.append(line("fail", "account.not", account=shown, tenant=one.name, why=why, fix="account"))
        else:
            found.append(line("ok", "account.ok", account=shown, tenant=one.name))
    return found


CHECKS: Sequence[Check] = (versions, user, rules, folder, disk, agent)
