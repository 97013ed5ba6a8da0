"""A hub on this machine: `init` makes its folder, `up` runs it in the foreground, `status` says how it is."""

from __future__ import annotations

import asyncio
import getpass
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

import click
import msgspec

from intertie.cli.client import Client
from intertie.cli.config import Login
from intertie.cli.out import json_option, line, note, print_json, table
from intertie.clock import SystemClock
from intertie.contracts.base import Problem, decode
from intertie.contracts.http import Health
from intertie.embedded.hub import SERVICES, HubLayout, copy_name, default_data_dir, environment, init_hub, open_hub, read_settings
from intertie.embedded.postgres import role_script
from intertie.embedded.process import is_running, read_record
from intertie.embedded.supervise import HubSupervisor
from intertie.errors import IntertieError, Refused
from intertie.settings import read_secret
from intertie.text import language, say
from intertie.text.groups import Group

data_option = click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="INTERTIE_DATA_DIR",
    default=None,
    help="The hub's folder (default: INTERTIE_DATA_DIR, else /var/lib/intertie as root, ~/.local/share/intertie otherwise).",
)


S = TypeVar("S", bound=msgspec.Struct)
KEEPERS = tuple(service for service in SERVICES if service != "gateway")
# Each schema is migrated, read and raised; a database that has just recovered from a backup is slow.
RAISE_S = 300.0


class StorePlace(msgspec.Struct, frozen=True, kw_only=True):
    """How a service's schema is reached; `role`: whom the login becomes."""

    service: str
    url: str
    password: str
    role: str = ""


class ServiceEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """One service's epoch, before and after; the same if it had been raised for this reason already."""

    service: str
    before: int
    after: int


class EpochsRaised(msgspec.Struct, frozen=True, kw_only=True):
    """`told`: the highest epoch that a site has taken; `doubted`: sites that told one that no hub can have given."""

    services: list[ServiceEpoch]
    told: int
    doubted: list[str]


@click.group(cls=Group)
def hub() -> None:
    """Run a hub on this machine."""


@hub.command()
@data_option
@click.option("--title", default=None, help="What the hub calls itself.")
@click.option("--time-zone", default=None, help="Settlement time zone: cuts the periods of statements (first: Asia/Shanghai).")
@click.option("--listen", "gateway_host", default=None, help="Address the gateway listens at (first: 127.0.0.1).")
@click.option(
    "--bus-listen", "bus_host", default=None, help="Address the bus listens at; sites elsewhere must reach it (first: 127.0.0.1)."
)
@click.option("--public-url", default=None, help="The gateway as sites and people reach it.")
@click.option("--bus-url", "bus_urls", multiple=True, help="The bus as sites reach it; may be repeated.")
@click.option(
    "--bus-nodes", type=click.Choice(["1", "3"]), default=None, help="3: a cluster of the bus that survives the loss of any one node."
)
@click.option("--bus-host", "bus_hosts", multiple=True, help="Name of the machine of each node, if they are not on this one; repeated.")
@click.option("--port", default=None, type=click.IntRange(1, 65535), help="Gateway port (first: 8480).")
@click.option("--bus-port", default=None, type=click.IntRange(1, 65535), help="Port of the bus (first: 4222).")
@click.option(
    "--websocket-port",
    default=None,
    type=click.IntRange(0, 65535),
    help="Offer the bus by WebSocket at this port too; TLS ends in front of it, and sites are told its name by --bus-url wss://NAME. 0: no more.",
)
@click.option("--database-port", default=None, type=click.IntRange(1, 65535), help="Port of the database (first: 54329).")
@click.option(
    "--postgres-init",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Also write what a PostgreSQL container needs at its first start; the folder holds passwords.",
)
def init(
    data: Path | None,
    title: str | None,
    time_zone: str | None,
    gateway_host: str | None,
    bus_host: str | None,
    public_url: str | None,
    bus_urls: tuple[str, ...],
    bus_nodes: str | None,
    bus_hosts: tuple[str, ...],
    port: int | None,
    bus_port: int | None,
    websocket_port: int | None,
    database_port: int | None,
    postgres_init: Path | None,
) -> None:
    """Make the hub's keys, credentials, passwords and configuration. Repeatable: what is not named stays, keys and passwords always do."""
    folder = data or default_data_dir()
    before = read_settings(folder)
    hosts = () if bus_nodes == "1" else bus_hosts or before.bus_hosts
    settings = _changed(
        before,
        title=title,
        time_zone=time_zone,
        bus_host=bus_host,
        gateway_host=gateway_host,
        public_url=public_url,
        bus_public_urls=bus_urls or None,
        bus_nodes=int(bus_nodes) if bus_nodes else None,
        bus_hosts=hosts if (bus_nodes or str(before.bus_nodes)) != "1" else (),
        ports=_changed(before.ports, bus=bus_port, database=database_port, gateway=port, websocket=websocket_port),
    )
    layout = init_hub(folder, SystemClock().now(), settings=settings)
    if postgres_init is not None:
        write_postgres_init(layout, postgres_init)
    line(str(layout.data))
    note(say("cli.hub_next", language(), data=layout.data))


def _changed(before: S, **named: object) -> S:
    """`before` with what was named."""
    return msgspec.structs.replace(before, **{name: value for name, value in named.items() if value is not None})


def write_postgres_init(layout: HubLayout, folder: Path) -> None:
    """`initdb.d/10-roles.sql` and `admin-password`, readable by the container's own account: mount the folder nowhere else."""
    scripts = folder / "initdb.d"
    scripts.mkdir(parents=True, exist_ok=True)
    (scripts / "10-roles.sql").write_text(role_script(layout.role_passwords()), encoding="utf-8")
    (folder / "admin-password").write_text(layout.password_file("admin").read_text(encoding="ascii"), encoding="ascii")


@hub.command()
@data_option
@click.option(
    "--copies", type=click.IntRange(1, 4), default=1, show_default=True, help="Processes of each service; one that ends is not missed."
)
@click.option("--websocket", type=click.IntRange(0, 65535), default=None, help="As --websocket-port of `intertie hub init`.")
def up(data: Path | None, copies: int, websocket: int | None) -> None:
    """Run database, bus and services in the foreground; Ctrl-C stops them in order. A second gateway listens at the next port."""
    folder = data or default_data_dir()
    before = read_settings(folder)
    settings = None if websocket is None else _changed(before, ports=_changed(before.ports, websocket=websocket))
    layout = init_hub(folder, SystemClock().now(), settings=settings)
    supervisor = HubSupervisor(layout, say=note, copies=copies)
    sys.exit(asyncio.run(run_hub(supervisor)))


async def run_hub(supervisor: HubSupervisor) -> int:
    """Start, watch until asked to stop, stop; the exit code."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    try:
        for part in await supervisor.start():
            note(f"{part.name:10} pid {part.pid:<7} {part.ready_s:.2f} s")
        layout = supervisor.layout
        note(say("cli.hub_up", language(), url=layout.public_url, token=layout.data / "admin.token"))
        watching, asked = asyncio.create_task(supervisor.watch()), asyncio.create_task(stopped.wait())
        await asyncio.wait({watching, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if watching.done():
            watching.result()
        watching.cancel()
        return 0
    finally:
        await supervisor.stop()


@hub.command()
@data_option
@click.option(
    "--reason",
    required=True,
    help="Which restore or failover this follows; it stands in the audit. A repeat with the same reason does nothing.",
)
@click.option("--live", is_flag=True, help="The services may run: they end by themselves and are started again by what supervises them.")
@click.option("--database-url", default="", help="The database, if it is not the folder's own: postgresql://LOGIN@HOST:PORT/intertie.")
@click.option(
    "--password-file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    default=None,
    help="Password of --database-url's login, which may become every service's role (0600).",
)
@json_option
def restored(data: Path | None, reason: str, live: bool, database_url: str, password_file: Path | None, as_json: bool) -> None:
    """Raise every service's epoch after the database was restored, or a standby of it promoted. The last step of either runbook.

    No number that the lost tail may have used is ever used again; sites then say again what they hold. Repeatable.
    """
    if database_url and password_file is not None:
        password = read_secret(password_file)
        done = raise_epochs([StorePlace(service=name, url=database_url, password=password, role=name) for name in KEEPERS], reason, live)
    else:
        with folder_database(open_hub(data or default_data_dir()), database_url) as places:
            done = raise_epochs(places, reason, live)
    if as_json:
        print_json(done)
        return
    table(("SERVICE", "BEFORE", "AFTER"), [(s.service, s.before, s.after) for s in done.services], empty="-")
    if done.doubted:
        note(say("cli.epoch_doubted", language(), sites=", ".join(done.doubted)))
    raised = "cli.epochs_raised_live" if live else "cli.epochs_raised"
    note(say(raised if any(s.before != s.after for s in done.services) else "cli.epochs_stand", language()))


def raise_epochs(places: Sequence[StorePlace], reason: str, live: bool) -> EpochsRaised:
    """By a process that has the database's driver; whoever is at this machine stands in the audit."""
    ask = {"places": places, "reason": reason, "actor": f"host/{getpass.getuser()}", "live": live}
    command = [sys.executable, "-m", "intertie.identity.restored"]
    done = subprocess.run(command, input=msgspec.json.encode(ask), capture_output=True, check=False, timeout=RAISE_S)
    if done.returncode == 0:
        return decode(done.stdout, EpochsRaised, what="the answer")
    try:
        problem = decode(done.stdout, Problem, what="the answer")
    except Refused:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise Refused("hub.restored", f"the epochs were not raised: {words[-1][:300] if words else 'no reason given'}") from None
    raise Refused(problem.code, problem.text, next_step=problem.next_step)


@contextmanager
def folder_database(layout: HubLayout, database_url: str = "") -> Iterator[list[StorePlace]]:
    """How the folder's services reach their database, which is started for as long as this lasts if it is the folder's own and stands still."""
    passwords = {each.role: each.password for each in layout.role_passwords()}
    if database_url:
        parts = urlsplit(database_url)
        place = parts.netloc.rpartition("@")[2]
        urls = {name: urlunsplit(parts._replace(netloc=f"{name}@{place}")) for name in KEEPERS}
    else:
        urls = {name: environment(layout, name)["INTERTIE_DATABASE_URL"] for name in KEEPERS}
    record = read_record(layout.run, "postgres")
    server = None if database_url or (record is not None and is_running(record.identity)) else layout.postgres()
    if server is not None:
        server.start()
    try:
        yield [StorePlace(service=name, url=url, password=passwords[name]) for name, url in urls.items()]
    finally:
        if server is not None:
            server.stop()


class PartStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a hub."""

    name: str
    pid: int | None
    running: bool


class HubStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A hub on this machine."""

    data: str
    url: str
    answers: bool
    parts: list[PartStatus]


@hub.command()
@data_option
@json_option
def status(data: Path | None, as_json: bool) -> None:
    """Which processes of this machine's hub run, and whether it answers. Leaves with 1 if something is down."""
    layout = open_hub(data or default_data_dir())
    parts = []
    copies = sorted(file.stem for service in layout.services for file in layout.run.glob(f"{service}-[2-9].json"))
    for name in ("postgres", *(copy_name("nats", node) for node in layout.bus_nodes), *layout.services, *copies):
        record = read_record(layout.run, name)
        running = record is not None and is_running(record.identity)
        parts.append(PartStatus(name=name, pid=record.pid if record and running else None, running=running))
    try:
        answers = Client(Login(url=layout.public_url)).get("/healthz", Health).ok
    except IntertieError:
        answers = False
    told = HubStatus(data=str(layout.data), url=layout.public_url, answers=answers, parts=parts)
    if as_json:
        print_json(told)
    else:
        table(("PART", "PID", "STATE"), [(p.name, p.pid or "-", "up" if p.running else "down") for p in parts], empty="-")
        line(f"{told.url}  {'answers' if answers else 'does not answer'}")
    sys.exit(0 if answers and all(p.running for p in parts) else 1)
