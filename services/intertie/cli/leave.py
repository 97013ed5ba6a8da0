"""`intertie site leave` (also `intertie agent leave`): out of the federation, from the site's own machine, with a receipt to keep.

The agent does it step by step; here it is watched and said, the receipt is written down beside the folder, and, if that is wanted, what is no
longer needed is removed. Run again it goes on where it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path

import click
import msgspec

from intertie.cli.agent import default_site_dir
from intertie.cli.local_door import call
from intertie.cli.local_owner import card_hours
from intertie.cli.local_texts import say_local
from intertie.cli.out import json_option, line, local, note, print_json, read_as
from intertie.clock import SystemClock
from intertie.contracts.base import Contract, decode, encode
from intertie.contracts.identity import Joined, LeaveTotals
from intertie.contracts.link import Sealed
from intertie.contracts.local import LocalLeave, LocalLeaving
from intertie.errors import Refused, Unavailable
from intertie.trust.keys import Key
from intertie.trust.seal import open_seal

LOOK_S = 0.5
# An agent that was told to end lets go of its jobs, of which there are none, and of its journal.
END_S = 30.0
# What was set aside of a damaged journal, too: it holds values of the environment. The lock last.
REMOVED = (
    *("keys", "jobs", "packs", "journal.db*", "pools.json", "site.json", "site.toml"),
    *("machines", "machines.db*", "reservations.json"),
    *("agent.json", "upgrade.json", "agent.sock", "agent.lock"),
)


class ReceiptFile(Contract, frozen=True, kw_only=True):
    """What is kept: identity's sealed word, and the public key that it was given at the join to check it by."""

    receipt: Sealed
    identity_key: str
    totals: LeaveTotals
    """What the seal holds, to be read; the seal is what counts."""


@click.command()
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="The agent's data folder.")
@click.option("--now", is_flag=True, help="Stop lent work (it ends as preempted) instead of waiting for it.")
@click.option("--reason", default="", help="Why; the hub's operator reads it.")
@click.option(
    "--receipt", type=click.Path(path_type=Path, dir_okay=False), help="Where to write the receipt (default: receipt-SITE.json here)."
)
@click.option("--yes", is_flag=True, help="Remove keys, journal and job folders afterwards without asking.")
@json_option
def leave(data: Path | None, now: bool, reason: str, receipt: Path | None, yes: bool, as_json: bool) -> None:
    """Leave the federation: lend nothing new, let lent work end, tell everything, see it settled, be released, get a receipt."""
    folder = (data or default_site_dir()).absolute()
    joined = _joined(folder)
    target = (receipt or Path(f"receipt-{joined.site}.json")).absolute()
    if target.is_relative_to(folder):
        raise Refused(
            "leave.receipt_place", f"{target} lies in the folder that may be removed", next_step="name another place: --receipt FILE"
        )
    kept = _kept(target, joined, Key.read(folder / "keys" / "site.nk").public)
    if kept is None:
        kept = _left(folder, joined, LocalLeave(now=now, reason=reason), quiet=as_json)
        _write(target, kept)
    if as_json:
        print_json(kept)
    else:
        _show(kept.totals)
        line(say_local("leave.receipt", path=target))
    if not (yes or (not as_json and click.confirm(say_local("leave.ask", data=folder), err=True, default=False))):
        note(say_local("leave.kept", data=folder))
        return
    _end_agent(folder)
    remove(folder)
    note(say_local("leave.removed", data=folder))


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--key", default="", help="Identity's public key, if you trust another source of it more than the file.")
@json_option
def receipt(file: Path, key: str, as_json: bool) -> None:
    """Check a receipt of leaving, offline."""
    with read_as(file, "receipt of leaving", "intertie site leave"):
        found = decode(file.read_bytes(), ReceiptFile, what=str(file))
    totals = open_seal(found.receipt, key or found.identity_key, LeaveTotals)
    if as_json:
        print_json(totals)
        return
    _show(totals)
    line(say_local("leave.verified", key=key or found.identity_key))


def _joined(folder: Path) -> Joined:
    try:
        return decode((folder / "site.json").read_bytes(), Joined, what=str(folder / "site.json"))
    except FileNotFoundError as err:
        raise Refused(
            "leave.not_joined", f"{folder} has no site.json: no site lives there", next_step="name its folder: --data DIR"
        ) from err
    except PermissionError as err:
        raise Refused("leave.permission", f"you may not read {folder}", next_step="call it as the agent's own user, or with sudo") from err


def _kept(target: Path, joined: Joined, site_key: str) -> ReceiptFile | None:
    """The receipt of an earlier call; another site's is never overwritten."""
    try:
        found = decode(target.read_bytes(), ReceiptFile, what=str(target))
    except FileNotFoundError:
        return None
    if found.totals.site != joined.site:
        raise Refused("leave.receipt_place", f"{target} is of {found.totals.site}", next_step="name another place: --receipt FILE")
    totals = open_seal(found.receipt, joined.service_keys.get("identity", ""), LeaveTotals)
    # It may have joined again since, with other keys: then the receipt is of the time before, and is not overwritten.
    if totals.site_key != site_key:
        raise Refused(
            "leave.receipt_place", f"{target} is of an earlier time of {totals.site}", next_step="name another place: --receipt FILE"
        )
    return msgspec.structs.replace(found, totals=totals)


def _left(folder: Path, joined: Joined, wish: LocalLeave, *, quiet: bool) -> ReceiptFile:
    """Ask, and watch until it is done. The agent goes on with it whoever watches."""
    path, said = str(folder / "agent.sock"), ""
    told = call(path, "POST", "/v1/leave", LocalLeaving, wish)
    while told.step != "left" or told.receipt is None:
        waits = ", ".join(told.waits_for) or "-"
        words = (
            say_local(f"leave.{told.step}", waits=waits) if told.step in ("draining", "telling", "settling") else say_local("leave.asking")
        )
        if told.step == "asking" and told.waits_for:
            words += f": {waits}"
        if told.hub_away:
            words += f"\n  {say_local('leave.away')}"
        if words != said and not quiet and told.step != "none":
            note(words)
            said = words
        time.sleep(LOOK_S)
        told = call(path, "GET", "/v1/leave", LocalLeaving)
    key = joined.service_keys.get("identity", "")
    return ReceiptFile(receipt=told.receipt, identity_key=key, totals=open_seal(told.receipt, key, LeaveTotals))


def _show(totals: LeaveTotals) -> None:
    line(say_local("leave.text", site=totals.site, at=local(totals.left_at)))
    known = (totals.attempts, totals.quantity_milli_us, totals.segments)
    attempts, quantity, segments = ("?" if one is None else one for one in known)
    hours = card_hours(quantity) if isinstance(quantity, int) else quantity
    line(say_local("leave.totals", attempts=attempts, hours=hours, segments=segments))


def _write(target: Path, kept: ReceiptFile) -> None:
    """Whole or not at all, on disk, before anything is removed."""
    part = target.with_name(f".{target.name}.part")
    with open(part, "wb") as file:
        file.write(msgspec.json.format(encode(kept)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    part.rename(target)


def _end_agent(folder: Path) -> None:
    """Ask it to end, and wait until it has let go of the folder. One that is not there has ended."""
    with contextlib.suppress(Unavailable):
        call(str(folder / "agent.sock"), "POST", "/v1/leave/end", LocalLeaving)
    try:
        handle = os.open(folder / "agent.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        clock = SystemClock()
        until = clock.monotonic_s() + END_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if clock.monotonic_s() > until:
                    raise Unavailable(
                        "leave.agent_stays",
                        f"an agent still works in {folder}",
                        next_step="stop it (its service manager may start it again), then call this again",
                    ) from None
                time.sleep(LOOK_S)
    finally:
        os.close(handle)


def remove(folder: Path) -> None:
    """Ours alone; what else lies in the folder stays, and the folder with it."""
    for pattern in REMOVED:
        for path in folder.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
