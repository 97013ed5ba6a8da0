"""The agent's folder: what join answered, which pools this site has, the keys, and where everything else lies.

site.json     what `POST /v1/join` answered (`contracts.identity.Joined`); nothing in it is secret
pools.json    the owner's declared profiles
site.toml     the owner's own rules (`core.rules.Rules`), if they wrote any
keys/         site.nk signs segments and HTTP calls, signing.nk mints the bus credentials; 0600 in 0700
journal.db    the journal, and the agent's own rows
agent.sock    the owner's door (`intertie local …`)
agent.lock    held by the running agent
jobs/         one folder per piece of work
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version as package_version
from pathlib import Path

import msgspec

from intertie.agent.core.devices import Pool
from intertie.agent.core.rules import Rules
from intertie.contracts.base import decode, encode
from intertie.contracts.identity import Joined
from intertie.contracts.site import Device, DeviceKind, PoolProfile, plain_model
from intertie.errors import Refused
from intertie.ids import DeviceId

VERSION = package_version("intertie")


@dataclass(frozen=True, slots=True)
class Folder:
    """Paths of an agent's data folder."""

    root: Path

    @property
    def site(self) -> Path:
        return self.root / "site.json"

    @property
    def pools(self) -> Path:
        return self.root / "pools.json"

    @property
    def rules_file(self) -> Path:
        return self.root / "site.toml"

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def site_key(self) -> Path:
        return self.keys / "site.nk"

    @property
    def signing_key(self) -> Path:
        return self.keys / "signing.nk"

    @property
    def journal(self) -> Path:
        return self.root / "journal.db"

    @property
    def socket(self) -> Path:
        return self.root / "agent.sock"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    @property
    def packs(self) -> Path:
        return self.root / "packs"

    def make(self) -> None:
        """Passed through by jobs, listed by nobody else; keys and packs the agent's alone."""
        self.root.mkdir(mode=0o711, parents=True, exist_ok=True)
        self.root.chmod(0o711)
        for private in (self.keys, self.packs):
            private.mkdir(mode=0o700, exist_ok=True)
            private.chmod(0o700)

    def joined(self) -> Joined:
        """`Refused('agent.not_joined')` before the join."""
        try:
            return decode(self.site.read_bytes(), Joined, what=str(self.site))
        except FileNotFoundError as err:
            raise Refused(
                "agent.not_joined",
                f"{self.root} has no site.json: this machine has not joined a hub",
                next_step="intertie-agent join --hub URL --token-file FILE --data DIR",
            ) from err

    def profiles(self) -> list[PoolProfile]:
        try:
            return decode(self.pools.read_bytes(), list[PoolProfile], what=str(self.pools))
        except FileNotFoundError as err:
            raise Refused("agent.no_pools", f"{self.pools} is missing", next_step="join again, or put the declared pools there") from err

    def rules(self) -> Rules:
        """`Refused('agent.rules')` if they cannot be read as rules, `Refused('agent.images')` if no image could run by them."""
        try:
            found = msgspec.toml.decode(self.rules_file.read_bytes(), type=Rules)
            found.pool_images()
            return found
        except FileNotFoundError:
            return Rules()
        except (ValueError, msgspec.DecodeError) as err:
            raise Refused(
                "agent.rules", f"{self.rules_file}: {err}", next_step=f"known rules: {', '.join(Rules.__struct_fields__)}"
            ) from err

    def lock(self) -> int:
        """One agent per folder, by flock; the descriptor is kept open for life. `Refused('agent.running')`."""
        fd = os.open(self.root / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            os.close(fd)
            raise Refused(
                "agent.running", f"another agent works in {self.root}", next_step="stop it first, or choose another --data"
            ) from err
        return fd


def write_whole(path: Path, value: msgspec.Struct | Sequence[msgspec.Struct], mode: int = 0o600) -> None:
    """JSON, whole or not at all, on disk."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as f:
        f.write(encode(value) + b"\n")
        f.flush()
        os.fsync(f.fileno())
    part.rename(path)


def node_name() -> str:
    """This machine's name as a subject token."""
    name = "".join(c if c.isalnum() or c == "-" else "-" for c in socket.gethostname().split(".")[0].lower()).strip("-")
    return name[:63] or "node"


def make_pools(profiles: Iterable[PoolProfile], gpus: Sequence[Device], node: str) -> list[Pool]:
    """Pools with their devices: slots are counted from the declaration, GPUs are those seen here that the profile names, or of its model.

    A card is in one pool only: in the one that names it, else in the first that is declared of its model and not full.
    """
    declared = list(profiles)
    left = {gpu.id: gpu for gpu in gpus}
    named = {device for profile in declared for device in profile.devices}
    pools: list[Pool] = []
    for profile in declared:
        if profile.accelerator == "none":
            devices = [Device(id=DeviceId(f"slot-{n}"), kind=DeviceKind.SLOT, node=node) for n in range(1, profile.count + 1)]
        else:
            model = plain_model(profile.accelerator)
            matching = [left[id] for id in profile.devices if id in left] or [
                gpu for gpu in left.values() if gpu.id not in named and not profile.devices and plain_model(gpu.model) == model
            ]
            devices = matching[: profile.count]
            for device in devices:
                del left[device.id]
        pools.append(Pool(profile, devices))
    return pools
