"""The folder of a hub on one machine: keys, credentials, passwords, configuration; made once, brought up to date at every start.

What must outlive a start (keys, passwords, what `hub init` decided) is made if it is absent and never replaced. What follows from them
(JWTs, credentials, nats.conf) is written anew each time, so that an upgraded table of permissions holds from the next start on.

As root, PostgreSQL and nats-server become accounts of their own (their modules say which). The services stay the supervisor's own user:
the Python they run on often lies where no other account may enter. Run the hub as an ordinary user where that is too much trust; then all
of it is that user's.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from intertie.embedded.nats import Cluster, Nats, OperatorMode, Websocket, bus_account, reachable, write_config
from intertie.embedded.postgres import DATABASE, HOST, Postgres, RolePassword, database_account
from intertie.embedded.process import Account, private_folder, write_private
from intertie.errors import Refused
from intertie.trust import nats_jwt
from intertie.trust.keys import Key, Kind

SERVICES = ("identity", "registry", "scheduler", "metering", "incident", "gateway")
"""In starting order: who is asked by the others comes first, who is asked by people comes last."""


class HubPorts(msgspec.Struct, frozen=True, kw_only=True):
    """TCP ports. PostgreSQL's is not its usual one: the machine may have a database of its own."""

    bus: int = 4222
    database: int = 54329
    gateway: int = 8480
    websocket: int = 0
    """The bus for sites whose border lets only WebSocket through; TLS ends in front of it. 0: not offered."""

    def __post_init__(self) -> None:
        ports = [self.bus, self.database, self.gateway, *([self.websocket] if self.websocket else [])]
        if not all(0 < port < 65_536 for port in ports) or len(set(ports)) != len(ports):
            raise Refused("hub.ports", f"ports must be different numbers of 1 to 65535, not {ports}")


# Where a node of the bus listens for the others: its clients' port and this.
ROUTE_OFFSET = 2_000


class HubSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`hub.toml`: what `hub init` decided."""

    title: str = "intertie"
    time_zone: str = "Asia/Shanghai"
    """IANA name; cuts the periods of statements."""
    bus_host: str = "127.0.0.1"
    """Where nats-server listens; sites on other machines need an address they reach."""
    gateway_host: str = "127.0.0.1"
    public_url: str = ""
    """The gateway as sites and people reach it; empty: by its host and port."""
    bus_public_urls: tuple[str, ...] = ()
    """The bus as sites reach it; empty: by its host and port."""
    bus_nodes: int = 1
    """1, or 3 for a cluster that survives the loss of any one node. On one machine they listen at consecutive ports, their routes 2000 above."""
    bus_hosts: tuple[str, ...] = ()
    """Where each node is a machine (or container) of its own: their names; ports are then the same on each."""
    ports: HubPorts = HubPorts()

    def __post_init__(self) -> None:
        if self.bus_nodes not in (1, 3) or (self.bus_hosts and len(self.bus_hosts) < self.bus_nodes):
            raise Refused("hub.bus_nodes", f"a bus has 1 or 3 nodes, each with its host, not {self.bus_nodes} on {list(self.bus_hosts)}")
        if self.ports.bus + ROUTE_OFFSET + self.bus_nodes > 65_536:
            raise Refused("hub.ports", f"the routes of a bus at port {self.ports.bus} would lie above 65535")
        try:
            ZoneInfo(self.time_zone)
        except (ZoneInfoNotFoundError, ValueError, OSError) as err:
            raise Refused("hub.time_zone", f"{self.time_zone[:60]!r} is no time zone; an example is Asia/Shanghai") from err


@dataclass(frozen=True, slots=True)
class HubLayout:
    """Where everything of an initialised hub lies, and how to get at its servers."""

    data: Path
    settings: HubSettings
    services: tuple[str, ...] = SERVICES

    # --- folders -------------------------------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> Path:
        return self.data / "keys"

    @property
    def creds(self) -> Path:
        return self.data / "creds"

    @property
    def secrets(self) -> Path:
        return self.data / "secrets"

    @property
    def run(self) -> Path:
        return self.data / "run"

    @property
    def log(self) -> Path:
        return self.data / "log"

    @property
    def objects(self) -> Path:
        return self.data / "objects"

    @property
    def nats(self) -> Path:
        return self.data / "nats"

    @property
    def pg(self) -> Path:
        return self.data / "pg"

    @property
    def public_keys(self) -> Path:
        """Issuer → public nkey of every service, JSON."""
        return self.keys / "public.json"

    def key_file(self, name: str) -> Path:
        return self.keys / f"{name}.nk"

    def creds_file(self, name: str) -> Path:
        return self.creds / f"{name}.creds"

    def ready_file(self, name: str) -> Path:
        """`name`: a service's, or that of a further copy of it (`copy_name`)."""
        return self.run / f"{name}.ready"

    def password_file(self, role: str) -> Path:
        return self.secrets / f"pg-{role}"

    # --- servers -------------------------------------------------------------------------------------------------------------------------

    @property
    def bus_url(self) -> str:
        """As the hub's own processes reach it."""
        return f"nats://{reachable(self.settings.bus_host)}:{self.settings.ports.bus}"

    @property
    def bus_urls(self) -> tuple[str, ...]:
        """Every node, as the hub's own processes reach them."""
        return tuple(f"nats://{self._bus_host(node)}:{self._bus_port(node)}" for node in self.bus_nodes)

    @property
    def bus_nodes(self) -> range:
        return range(1, self.settings.bus_nodes + 1)

    def _bus_host(self, node: int) -> str:
        hosts = self.settings.bus_hosts
        return hosts[node - 1] if hosts else reachable(self.settings.bus_host)

    def _bus_port(self, node: int) -> int:
        return self.settings.ports.bus + (0 if self.settings.bus_hosts else node - 1)

    def nats_folder(self, node: int) -> Path:
        """A node's configuration, accounts and streams; the first one's preload file is every node's."""
        return self.nats if node == 1 else self.data / f"nats-{node}"

    def cluster(self, node: int) -> Cluster | None:
        """A node's place among the others; None for a bus of one."""
        if self.settings.bus_nodes == 1:
            return None
        routes = tuple(f"{self._bus_host(each)}:{self._bus_port(each) + ROUTE_OFFSET}" for each in self.bus_nodes)
        return Cluster(node, self.settings.bus_host, self._bus_port(node) + ROUTE_OFFSET, routes)

    @property
    def public_url(self) -> str:
        return self.settings.public_url or f"http://{reachable(self.settings.gateway_host)}:{self.settings.ports.gateway}"

    @property
    def bus_public_urls(self) -> tuple[str, ...]:
        """What a join is answered with; a bus offered by WebSocket without a name of its own is named as this machine reaches it."""
        return self.settings.bus_public_urls or (*self.bus_urls, *self.websocket_urls)

    @property
    def websocket_urls(self) -> tuple[str, ...]:
        """Without TLS, which ends in front of these; empty where it is not offered."""
        return tuple(f"ws://{self._bus_host(node)}:{ws.port}" for node in self.bus_nodes if (ws := self.websocket(node)))

    def websocket(self, node: int) -> Websocket | None:
        first = self.settings.ports.websocket
        if not first:
            return None
        return Websocket(self.settings.bus_host, first + (0 if self.settings.bus_hosts else node - 1))

    def bus(self, node: int = 1) -> Nats:
        """The hub's nats-server (or a further node of it), not started."""
        return Nats(
            self.nats_folder(node) / "nats.conf",
            run_dir=self.run,
            log_dir=self.log,
            host=self.settings.bus_host,
            port=self._bus_port(node),
            account=bus_account(),
            name=copy_name("nats", node),
        )

    def postgres(self, *, fast: bool = False) -> Postgres:
        """The hub's PostgreSQL, not started. `fast` gives up durability against power loss."""
        return Postgres(
            self.pg,
            run_dir=self.run,
            log_dir=self.log,
            admin_password=self.password_file("admin").read_text(encoding="ascii"),
            port=self.settings.ports.database,
            fast=fast,
        )

    def role_passwords(self) -> list[RolePassword]:
        """What `Postgres.provision` takes."""
        return [RolePassword(name, self.password_file(name).read_text(encoding="ascii")) for name in self.services]


def default_data_dir() -> Path:
    """`/var/lib/intertie` for root, else below the user's own data folder."""
    if os.geteuid() == 0:
        return Path("/var/lib/intertie")
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "intertie"


def init_hub(
    data_dir: Path,
    now: datetime,
    *,
    settings: HubSettings | None = None,
    services: Sequence[str] = SERVICES,
) -> HubLayout:
    """Make the whole folder, or bring it up to date; repeatable. `settings` None keeps what was decided before (or the defaults).

    Raises `Refused` (`hub.unreachable`, `hub.settings`, `hub.ports`, `hub.time_zone`, `key.*`) or `Unavailable('embedded.disk_full')`.
    """
    data = data_dir.absolute()
    if '"' in str(data) or "\\" in str(data) or "\n" in str(data):
        raise Refused("hub.folder", f"{str(data)!r} holds characters that nats-server's configuration cannot carry")
    private_folder(data, mode=0o711)
    for account in filter(None, (database_account(), bus_account())):
        _require_enterable(data, account)
    decided = settings or read_settings(data)
    layout = HubLayout(data, decided, tuple(services))
    for folder in (layout.keys, layout.creds, layout.secrets, layout.run, layout.log, layout.objects):
        private_folder(folder)
    _make_keys(layout)
    _make_passwords(layout)
    _write_bus(layout, now)
    write_private(data / "hub.toml", _toml(decided))
    return layout


def open_hub(data_dir: Path, services: Sequence[str] = SERVICES) -> HubLayout:
    """An initialised hub's layout, nothing written. `Refused('hub.not_initialised')`."""
    data = data_dir.absolute()
    if not (data / "hub.toml").is_file():
        raise Refused("hub.not_initialised", f"there is no hub in {data}", next_step=f"intertie hub init --data {data}")
    return HubLayout(data, read_settings(data), tuple(services))


def read_settings(data: Path) -> HubSettings:
    """`hub.toml`, or the defaults if there is none yet. `Refused('hub.settings')` names what is wrong."""
    file = data / "hub.toml"
    try:
        return msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), HubSettings)
    except FileNotFoundError:
        return HubSettings()
    except (OSError, ValueError, msgspec.ValidationError) as err:
        raise Refused("hub.settings", f"{file} cannot be used: {err}", next_step=f"correct {file}") from err


def copy_name(service: str, copy: int) -> str:
    """The name of a copy's process, log and marks: the first has the service's own."""
    return service if copy == 1 else f"{service}-{copy}"


def environment(layout: HubLayout, service: str, extra: Mapping[str, str] | None = None, *, copy: int = 1) -> dict[str, str]:
    """The settings of one hub process, as the architecture page lists them. Secrets travel as file names, never as values.

    copy: which of several; a further copy of the gateway listens at the next port, everything else of a copy is the same.
    """
    found = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": os.environ.get("HOME", "/"),
        "LANG": "C.UTF-8",
        "INTERTIE_BUS_URL": ",".join(layout.bus_urls),
        "INTERTIE_BUS_CREDS": str(layout.creds_file(service)),
        "INTERTIE_KEY_FILE": str(layout.key_file(service)),
        "INTERTIE_KEYS_FILE": str(layout.public_keys),
        "INTERTIE_DATA_DIR": str(layout.data),
        "INTERTIE_READY_FILE": str(layout.ready_file(copy_name(service, copy))),
        "INTERTIE_TIME_ZONE": layout.settings.time_zone,
    }
    if service != "gateway":
        found["INTERTIE_DATABASE_URL"] = f"postgresql://{service}@{HOST}:{layout.settings.ports.database}/{DATABASE}"
        found["INTERTIE_DATABASE_PASSWORD_FILE"] = str(layout.password_file(service))
    if service in {"identity", "gateway"}:
        found["INTERTIE_PUBLIC_URL"] = layout.public_url
    if service == "identity":
        found["INTERTIE_BUS_PUBLIC_URLS"] = ",".join(layout.bus_public_urls)
        found["INTERTIE_BUS_REPLICAS"] = str(layout.settings.bus_nodes if layout.settings.bus_nodes > 1 else 0)
        found["INTERTIE_OPERATOR_DIR"] = str(layout.keys)
        found["INTERTIE_ACCOUNTS_FILE"] = str(layout.nats / "preload.conf")
        found["INTERTIE_SYSTEM_CREDS"] = str(layout.creds_file("system"))
    if service == "scheduler":
        found["INTERTIE_CANARY_CREDS"] = str(layout.creds_file("canary"))
    if service == "gateway":
        found["INTERTIE_LISTEN"] = f"{layout.settings.gateway_host}:{layout.settings.ports.gateway + copy - 1}"
    passed = (
        "INTERTIE_LOG_LEVEL",
        "INTERTIE_BEAT_S",
        "INTERTIE_ANCHOR_S",
        "INTERTIE_DRILL_MAX_AGE_DAYS",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_TRACES_SAMPLER_ARG",
        "SSL_CERT_FILE",
    )
    return {**found, **{name: os.environ[name] for name in passed if name in os.environ}, **(extra or {})}


@contextlib.contextmanager
def running_hub_bus(layout: HubLayout) -> Iterator[Nats]:
    """The hub's nats-server in operator mode for as long as the block lasts."""
    server = layout.bus()
    server.start()
    try:
        yield server
    finally:
        server.stop()


# --- parts -------------------------------------------------------------------------------------------------------------------------------


def _make_keys(layout: HubLayout) -> None:
    kinds: dict[str, Kind] = {"operator": "O", "hub": "A", "system": "A", "canary": "A", **{service: "U" for service in layout.services}}
    for name, kind in kinds.items():
        file = layout.key_file(name)
        if not file.exists():
            Key.new(kind).write(file)
        elif Key.read(file).kind != kind:
            raise Refused("key.kind", f"{file} is a key of another kind than {name} needs")
    public = {service: Key.read(layout.key_file(service)).public for service in layout.services}
    write_private(layout.public_keys, json.dumps(public, indent=2).encode())


def _make_passwords(layout: HubLayout) -> None:
    for role in ("admin", *layout.services):
        file = layout.password_file(role)
        if not file.exists():
            write_private(file, secrets.token_urlsafe(32).encode())


def _write_bus(layout: HubLayout, now: datetime) -> None:
    """Operator, accounts, credentials and nats.conf, signed anew."""
    operator, hub, system, canary = (Key.read(layout.key_file(name)) for name in ("operator", "hub", "system", "canary"))

    def write_creds(name: str, jwt: str, user: Key) -> None:
        write_private(layout.creds_file(name), nats_jwt.credentials(jwt, user).encode())

    for service in layout.services:
        if service in nats_jwt.BEYOND_COMMON:
            # Not the service's own key: logging in means signing what the server sends, which must never be able to become a claim.
            user = Key.new("U")
            write_creds(service, nats_jwt.service_user(hub, service, user.public, now), user)
    user = Key.new("U")
    write_creds("system", nats_jwt.system_user(system, user.public, now), user)
    user = Key.new("U")
    write_creds("canary", nats_jwt.canary_user(canary, user.public, now), user)
    mode = OperatorMode(
        operator_jwt=nats_jwt.operator(operator, system.public, now, layout.settings.title),
        system_account=system.public,
        preload={
            system.public: nats_jwt.system_account(operator, system.public, now),
            hub.public: nats_jwt.hub_account(operator, hub.public, now),
            canary.public: nats_jwt.canary_account(operator, canary.public, hub.public, now),
        },
    )
    for node in layout.bus_nodes:
        write_config(
            layout.nats_folder(node),
            host=layout.settings.bus_host,
            port=layout.bus(node).port,
            operator=mode,
            account=bus_account(),
            name=layout.settings.title,
            cluster=layout.cluster(node),
            websocket=layout.websocket(node),
            preload="./preload.conf" if node == 1 else "../nats/preload.conf",
        )


def _require_enterable(folder: Path, account: Account) -> None:
    """`Refused('hub.unreachable')` if a folder above keeps this account out (root's home is 0700)."""
    for each in (folder, *folder.parents):
        found = each.stat()
        bit = stat.S_IXUSR if found.st_uid == account.uid else stat.S_IXGRP if found.st_gid == account.gid else stat.S_IXOTH
        if not found.st_mode & bit:
            raise Refused(
                "hub.unreachable",
                f"{account.name}, who runs a server of this hub, cannot enter {each}",
                next_step=f"choose a data folder outside it (/var/lib/intertie), or chmod o+x {each}",
            )


def _toml(settings: HubSettings) -> bytes:
    """TOML of plain strings and integers; JSON's string form is valid there."""
    lines = ["# Written by `intertie hub init`; a change holds from the next start on."]
    flat = msgspec.to_builtins(settings)
    ports = flat.pop("ports")
    lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in flat.items()]
    lines += ["", "[ports]", *(f"{name} = {port}" for name, port in ports.items())]
    return ("\n".join(lines) + "\n").encode()
