"""Away from this machine without a trace: what was removed and what stays is said in a receipt. Nothing is removed while work runs.

Leaving the federation comes first (`intertie site leave`), which drains, tells everything and is given the hub's receipt; `--drain` does it from here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from intertie.agent import procs, supervisor
from intertie.agent.config import VERSION, Folder
from intertie.agent.install import MARK, SYSTEM, Unit, prefix_of, reload_units, unit_of
from intertie.agent.upgrade import read_mark
from intertie.errors import IntertieError, Refused
from intertie.ids import SiteName

# What an agent makes in its folder; all else there is the owner's and stays. The lock last: it is held until then.
OURS = (
    *("keys", "jobs", "packs", "journal.db*", "pools.json", "site.json", "site.toml", "agent.json", "upgrade.json", "agent.sock"),
    # Of rooms for other kinds of site: a head's books and packs, a node's own, what a cluster or a queue is told by.
    *("machines", "machines.db*", "reservations.json", "node.json", "kubernetes", "scratch"),
    *(".*.part", "agent.lock"),
)


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What a person keeps. `stays`: not ours, so left where it is."""

    version: str
    at: datetime
    site: SiteName | None
    removed: list[str]
    stays: list[str]


def running_work(folder: Folder) -> list[str]:
    """Attempts whose supervisor lives."""
    found = []
    for file in sorted(folder.jobs.glob("*/supervisor.json")):
        told = supervisor.read_json(str(file))
        with contextlib.suppress(KeyError, TypeError, msgspec.ValidationError):
            if told is not None and procs.alive(msgspec.convert(told, procs.Identity)):
                found.append(file.parent.name)
    return found


def joined_as(folder: Folder) -> SiteName | None:
    try:
        return folder.joined().site
    except (IntertieError, OSError):
        return None


def leave(folder: Folder, receipt: Path) -> None:
    """Drain and leave by the command line's own way. `Refused('uninstall.leave')` with what it said last."""
    command = [sys.executable, "-m", "intertie.cli", "site", "leave", "--data", str(folder.root), "--receipt", str(receipt), "--yes"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        said = [row for row in done.stderr.splitlines() if row.strip()][-2:]
        raise Refused(
            "uninstall.leave", f"the site did not leave: {' '.join(said)[:400]}", next_step="run `intertie site leave`, then this again"
        )


def require_idle(folder: Folder) -> None:
    """`Refused('uninstall.work_runs' | 'uninstall.joined' | 'uninstall.agent_runs')`, in this order."""
    if work := running_work(folder):
        shown = ", ".join(work[:5]) + (f" and {len(work) - 5} more" if len(work) > 5 else "")
        raise Refused(
            "uninstall.work_runs", f"work runs here: {shown}", next_step="wait for it, or let --drain do so: it leaves the federation first"
        )
    if (site := joined_as(folder)) is not None:
        raise Refused(
            "uninstall.joined",
            f"this machine is still site {site} of a federation",
            next_step=f"intertie site leave --data {folder.root}; this again with --drain does it too",
        )
    mark = read_mark(folder)
    if mark is not None and procs.alive(mark.process):
        raise Refused("uninstall.agent_runs", "the agent runs", next_step="stop it: systemctl disable --now intertie-agent")


def held_by(folder: Folder) -> list[str]:
    """What of the data folder is ours, and the folder: leaving the federation takes it away already."""
    return [*(str(path) for path in _ours(folder.root)), str(folder.root)] if folder.root.is_dir() else []


def uninstall(
    folder: Folder, now: datetime, site: SiteName | None, *, prefix: Path | None, system: Path = SYSTEM, held: Sequence[str] = ()
) -> Receipt:
    """Remove all of ours: unit, data, and the bundle that this is run from. Call `require_idle` before. Of what was `held` before the site left,
    that which is gone is told as well."""
    removed: list[str] = [path for path in held if not os.path.lexists(path)]
    for user in (False, True):
        with contextlib.suppress(IntertieError):
            removed += _unit_away(unit_of(folder, user=user, system=system))
    removed += _folder_away(folder)
    target = prefix or prefix_of()
    if target is not None and (target / ".intertie-agent").is_file():
        removed += _prefix_away(target)
    stays = [str(path) for place in (folder.root, target) if place is not None and place.is_dir() for path in sorted(place.iterdir())]
    return Receipt(version=VERSION, at=now, site=site, removed=removed, stays=stays)


def _unit_away(unit: Unit) -> list[str]:
    """Only one that we wrote, for this folder."""
    try:
        text = unit.path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    if MARK not in text or f"--data {unit.text.partition('--data ')[2].splitlines()[0]}\n" not in text:
        return []
    if shutil.which("systemctl"):
        subprocess.run([*unit.control.split(), "disable", unit.path.name], capture_output=True, check=False, timeout=30)
    unit.path.unlink()
    reload_units(unit)
    return [str(unit.path)]


def _folder_away(folder: Folder) -> list[str]:
    if not folder.root.is_dir():
        return []
    with _locked(folder):
        removed = []
        for path in _ours(folder.root):
            _remove(path)
            removed.append(str(path))
    with contextlib.suppress(OSError):
        folder.root.rmdir()
        removed.append(str(folder.root))
    return removed


def _ours(root: Path) -> Iterator[Path]:
    for pattern in OURS:
        yield from sorted(root.glob(pattern))


def _prefix_away(prefix: Path) -> list[str]:
    """Running from inside is no hindrance: what is open stays readable until this process ends."""
    removed = []
    for name in ("bin", "current", "versions", ".intertie-agent"):
        path = prefix / name
        if path.exists() or path.is_symlink():
            _remove(path)
            removed.append(str(path))
    with contextlib.suppress(OSError):
        prefix.rmdir()
        removed.append(str(prefix))
    return removed


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as err:
        raise Refused(
            "uninstall.permission",
            f"{err.filename or path}: {err.strerror}",
            next_step="call it as the agent's own user, or as root; it goes on where it stopped",
        ) from err


@contextlib.contextmanager
def _locked(folder: Folder) -> Iterator[None]:
    """No agent may start meanwhile."""
    try:
        handle = os.open(folder.root / "agent.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as err:
        raise Refused("uninstall.agent_runs", f"an agent works in {folder.root}", next_step="stop it first") from err
    finally:
        os.close(handle)


def told(receipt: Receipt) -> str:
    """The receipt for people."""
    lines = [f"intertie-agent {receipt.version} was taken away at {receipt.at.isoformat(timespec='seconds')}"]
    if receipt.site is not None:
        lines.append(f"it was site {receipt.site}")
    lines += _listed("removed", receipt.removed) + _listed("stays, since it is not ours", receipt.stays)
    lines.append("nothing of it runs on")
    return "\n".join(lines)


def _listed(head: str, paths: Sequence[str]) -> list[str]:
    return [f"{head}: {'nothing' if not paths else ''}".rstrip(), *(f"  {path}" for path in paths)]
