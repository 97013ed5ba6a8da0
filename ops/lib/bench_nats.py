"""A nats-server of a benchmark's own: without accounts, with JetStream, in a folder that is thrown away; it can be killed, frozen and wiped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from intertie.embedded.process import free_port, wait_until

SERVER = Path(sys.executable).with_name("nats-server")


class Server:
    """`start` as often as it was killed; the same port and folder each time."""

    def __init__(self) -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="it-bench-nats-"))
        self._config = self.folder / "nats.conf"
        self._config.write_text(
            f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{self.folder}/js" }}\nping_interval: "2s"\nping_max: 2\n',
            encoding="utf-8",
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it listens."""
        log = self.folder / "log"
        before = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            self._process = subprocess.Popen([str(SERVER), "-c", str(self._config)], stdout=file, stderr=file)
        wait_until(lambda: b"Server is ready" in log.read_bytes()[before:], 10.0)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """`kill -9`, reaped."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def wipe(self) -> None:
        """JetStream's folder is gone, running or not."""
        shutil.rmtree(self.folder / "js", ignore_errors=True)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
