"""The agent as a service of this machine: a systemd unit, the machine's or the user's own, under which jobs outlive every stop and restart.

The unit confines little on purpose: whatever binds the agent binds the jobs below it too (their devices, their /tmp, the accounts they become).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from intertie.agent.config import Folder
from intertie.errors import Refused

NAME = "intertie-agent.service"
MARK = "# Written by `intertie-agent install`."
SYSTEM = Path("/etc/systemd/system")

UNIT = """\
{mark} `intertie-agent uninstall` takes it away.
[Unit]
Description=Intertie agent: lends this site's machines to the federation
After=network-online.target time-sync.target
Wants=network-online.target
# It never gives up: a hub that is away for a year is a state, not a fault.
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={command} run --data {data}
# A stop, a restart or a crash of the agent ends the agent alone. Jobs run on below their supervisors, and the next agent finds them.
KillMode=process
# Whatever ends it by accident. An end that was asked for (a stop, leaving the federation) is one.
Restart=on-failure
RestartSec=2
TimeoutStopSec=30
# A job that runs out of memory is a job's end, not the unit's.
OOMPolicy=continue
# Groups for jobs are made below the unit's own; there is no limit on tasks but the jobs' own.
Delegate=yes
TasksMax=infinity
LimitNOFILE=65536
# No ProtectSystem, PrivateTmp, PrivateDevices, ProtectClock (it closes /dev/nvidia*) or NoNewPrivileges: jobs would inherit them.
ProtectKernelLogs=yes
ProtectHostname=yes
{environment}
[Install]
WantedBy={target}
"""


@dataclass(frozen=True, slots=True)
class Unit:
    """Where it goes, and what it says."""

    path: Path
    text: str
    user: bool

    @property
    def control(self) -> str:
        return "systemctl --user" if self.user else "systemctl"


def unit_of(folder: Folder, *, user: bool, system: Path = SYSTEM) -> Unit:
    """`Refused('agent.install')` for a folder that a unit cannot name."""
    data = str(folder.root)
    if any(c in data for c in "\"\\\n%$' \t"):
        raise Refused("agent.install", f"{data!r} holds characters that a unit cannot carry", next_step="choose another --data")
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    place = home / "systemd/user" if user else system
    proxies = "".join(f"Environment={name}={os.environ[name]}\n" for name in ("NO_PROXY",) if os.environ.get(name))
    text = UNIT.format(
        mark=MARK, command=launcher(), data=data, target="default.target" if user else "multi-user.target", environment=proxies
    )
    return Unit(place / NAME, text, user)


def launcher() -> str:
    """The bundle's own script, which outlives versions; else this Python."""
    prefix = prefix_of()
    if prefix is not None:
        return str(prefix / "bin/intertie-agent")
    return f"{sys.executable} -P -m intertie.agent"


def prefix_of() -> Path | None:
    """Where a bundle was installed, if this is its Python: `PREFIX/versions/VERSION/python`, or `PREFIX/current/python`."""
    here = Path(sys.prefix)
    for prefix in (here.parent.parent, here.parent.parent.parent):
        if (prefix / ".intertie-agent").is_file():
            return prefix
    return None


def install(unit: Unit) -> list[str]:
    """Write it and have systemd read it; the commands that remain for the owner. `Refused` if another's unit is there."""
    if unit.path.exists() and MARK not in unit.path.read_text(encoding="utf-8", errors="replace"):
        raise Refused("agent.install", f"{unit.path} is there and is not ours", next_step="move it away, or use --print")
    try:
        unit.path.parent.mkdir(parents=True, exist_ok=True)
        part = unit.path.with_name(f".{unit.path.name}.part")
        part.write_text(unit.text, encoding="utf-8")
        part.chmod(0o644)
        part.replace(unit.path)
    except OSError as err:
        raise Refused("agent.install", f"{unit.path}: {err.strerror}", next_step="call it as root, or with --user") from err
    reload_units(unit)
    after = [f"{unit.control} enable --now {NAME}"]
    return [*after, "loginctl enable-linger  # or it ends with your last session"] if unit.user else after


def reload_units(unit: Unit) -> None:
    """Best effort: a machine where systemd does not run reads it when it does."""
    if shutil.which("systemctl"):
        subprocess.run([*unit.control.split(), "daemon-reload"], capture_output=True, check=False, timeout=30)
