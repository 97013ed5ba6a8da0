"""What the bus tests stand on: a real nats-server that can be killed and wiped, and waiting by condition with a deadline."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

NATS = Path(sys.executable).with_name("nats-server")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class NatsServer:
    """One nats-server with JetStream in a folder of its own."""

    def __init__(self, extra: str = "") -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="bus-"))
        self.config = self.folder / "nats.conf"
        self.config.write_text(
            f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{self.folder}/js" }}\n'
            f'ping_interval: "2s"\nping_max: 2\nmax_payload: 1048576\n{extra}\n',
            encoding="utf-8",
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([str(NATS), "-c", str(self.config)], stdout=log, stderr=log)

    def kill(self) -> None:
        """`kill -9`, reaped."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stop every thread of it; returns when they stand."""
        os.kill(self.pid, signal.SIGSTOP)
        while not all((task / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T" for task in self._threads()):
            pass

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _threads(self) -> list[Path]:
        return list(Path(f"/proc/{self.pid}/task").iterdir())

    def wipe(self) -> None:
        """Remove JetStream's folder, running or not."""
        shutil.rmtree(self.folder / "js", ignore_errors=True)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


async def until(condition: Callable[[], object], what: str, limit_s: float = 10.0) -> None:
    """Wait for `condition`, however long the machine takes, at most `limit_s`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    while not condition():
        assert loop.time() < end, f"not within {limit_s:g} s: {what}"
        await asyncio.sleep(0.01)
