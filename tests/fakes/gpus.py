"""Cards that are not there: our own `libnvidia-ml.so.1` (gpus.c) under the real nvidia-ml-py, and hands to lose, occupy and heal them.

rack = Rack(folder, ["A100-SXM4-80GB"] * 2)     # builds the library; needs gcc
site = await stack.add_site("site-a", env=rack.env, profile=rack.profile(interconnect="nvlink"))
rack.lose(0); rack.occupy(1, pid); rack.heal(0)
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("gpus.c")
GPU_IS_LOST = 15
NOT_SUPPORTED = 3
MEMORY_MIB = 81_920


def build(folder: Path) -> Path:
    """Compile the library into `folder`; the real one's soname, so that the binding finds it by LD_LIBRARY_PATH."""
    target = folder / "libnvidia-ml.so.1"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-fvisibility=hidden", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([*command, "-o", str(target), str(SOURCE), "-ldl"], check=True, capture_output=True, text=True, timeout=60)
    return target


def has_compiler() -> bool:
    return shutil.which("gcc") is not None


class Rack:
    """The cards of one site. Every change is whole on disk before the call returns; the driver is asked once a telemetry beat."""

    def __init__(self, folder: Path, models: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        build(folder)
        self.folder = folder
        self.models = list(models)
        self.uuids = [_uuid(folder, number) for number in range(len(models))]
        self._cards: list[dict[str, str]] = [
            {
                "uuid": self.uuids[number],
                "name": f"NVIDIA {model}",
                "mem_total": str(MEMORY_MIB * 1_048_576),
                "mem_used": "0",
                "util": "0",
                "temp": "41",
                "power_mw": "61000",
                "procs": "",
            }
            for number, model in enumerate(models)
        ]
        self._slices: dict[int, dict[str, str]] = {}
        self._write()

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to see these cards."""
        return {"LD_LIBRARY_PATH": str(self.folder)}

    def lose(self, card: int) -> None:
        """It falls off the bus: the driver refuses every call on it."""
        self._cards[card]["error"] = str(GPU_IS_LOST)
        self._write()

    def occupy(self, card: int, *pids: int) -> None:
        """Compute processes on the card."""
        self._cards[card] |= {"procs": ",".join(map(str, pids)), "mem_used": str(1 << 30)}
        self._write()

    def refuse(self, card: int, metric: str, error: int = NOT_SUPPORTED) -> None:
        """One metric cannot be read: `util`, `temp`, `power_mw`, `mem_total`, `procs`."""
        self._cards[card][f"error.{metric}"] = str(error)
        self._write()

    def heal(self, card: int) -> None:
        """Back as it was, empty."""
        found = self._cards[card]
        for key in [key for key in found if key.startswith("error")]:
            del found[key]
        found |= {"procs": "", "mem_used": "0"}
        self._write()

    def say(self, card: int, **values: str) -> None:
        """Anything else that the library knows: `energy_mj`, `links`, `util` …"""
        self._cards[card] |= values
        self._write()

    def cut(self, card: int, profiles: Sequence[str]) -> list[str]:
        """MIG mode with these slices; their ids. What a slice cannot say (its share of time, power) it does not say."""
        self._cards[card] |= {"mig": "1", "slices": str(len(profiles)), "error.util": str(NOT_SUPPORTED)}
        names = [f"MIG-{uuid.uuid5(uuid.NAMESPACE_URL, f'{self.uuids[card]}/{n}')}" for n in range(len(profiles))]
        for n, (name, profile) in enumerate(zip(names, profiles, strict=True)):
            self._slices[32 + 8 * card + n] = {
                "uuid": name,
                "name": f"NVIDIA {self.models[card]} MIG {profile}",
                "mem_total": str(4864 * 1_048_576),
                "mem_used": "0",
                "procs": "",
            }
        self._write()
        return names

    def join(self, card: int) -> None:
        """One card again."""
        for key in ("mig", "slices", "error.util"):
            self._cards[card].pop(key, None)
        self._slices = {key: value for key, value in self._slices.items() if not 0 <= key - 32 - 8 * card < 8}
        self._write()

    def profile(self, *, interconnect: str = "nvlink") -> Path:
        """The owner's declaration of these cards as one pool named `gpu`."""
        lines = [
            "[[pool]]",
            'pool = "gpu"',
            f'accelerator = "{self.models[0]}"',
            f"count = {len(self.models)}",
            f"memory_mib = {MEMORY_MIB}",
            f'interconnect = "{interconnect}"',
            'task_types = ["train", "batch"]',
            f"lendable = {{ devices = {len(self.models)} }}",
        ]
        path = self.folder / "profile.toml"
        path.write_text("\n".join(lines) + "\n", encoding="ascii")
        return path

    def _write(self) -> None:
        lines = [f"count={len(self._cards)}", "driver=550.90.07"]
        lines += [
            f"{number}.{key}={value}" for number, card in [*enumerate(self._cards), *self._slices.items()] for key, value in card.items()
        ]
        part = self.folder / ".cards.part"
        part.write_text("\n".join(lines) + "\n", encoding="ascii")
        part.rename(self.folder / "cards")


def _uuid(folder: Path, number: int) -> str:
    """Like the driver's, and another on each rack."""
    seed = hashlib.sha256(f"{folder}/{number}".encode()).digest()[:16]
    return f"GPU-{uuid.UUID(bytes=seed)}"
