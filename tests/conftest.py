"""Real servers for tests: started once per session on free ports, thrown away at its end, and only if a test asks.

- `short_folder`   a new folder per test with a short name that other uids may enter (pytest's `tmp_path` lies below 0700)
- `pg`             a fresh database per test (`PgDatabase`): every service's role and empty schema are there
- `nats_url`       a plain nats-server with JetStream and no accounts; choose stream and subject names of your own (`unique` gives one)
- `operator_hub`   an initialised hub's folder and its nats-server in operator mode (`RunningHub`)
- `postgres_server`, `nats_server`: the servers themselves, for tests that ask them something. Do not stop or kill these: a test that kills
  takes `running_postgres` / `running_nats` / `running_hub_bus` on its own `short_folder`.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from intertie.embedded.nats import Nats, running_nats
from intertie.embedded.postgres import Postgres, RolePassword, running_postgres

SERVICES = ("registry", "scheduler", "metering", "identity", "incident", "gateway")
TESTER = "tester"

_numbers = itertools.count(1)


def pytest_configure() -> None:
    """A test run ended by SIGTERM (a time limit) tears its servers down, as one ended by Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI nothing skips: a part that is missing there is a hole in the check, and fails with its reason."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and isinstance(report.longrepr, tuple):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr[2]}"
    return report


def new_short_folder() -> Path:
    """A folder with a short name (unix sockets: 107 bytes) that other uids may enter."""
    folder = Path(tempfile.mkdtemp(prefix="it-"))
    folder.chmod(0o711)
    return folder


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A new folder for one test, removed afterwards."""
    folder = new_short_folder()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def unique() -> str:
    """A name that no other test of this session uses: legal as a stream name and as a subject token."""
    return f"t{next(_numbers)}"


@dataclass(frozen=True)
class PgServer:
    """The session's server. Every service has a role; `tester` may use every service's schema and make its own."""

    server: Postgres
    passwords: dict[str, str]


@dataclass(frozen=True)
class PgDatabase:
    """One test's own database.

    url, password: as `tester`, which owns the database and has the rights of every service's role: for tests of one store.
    role(service): (url, password) as that service alone, with rights on its own schema only.
    admin_url: as superuser, password inside, for looking at what was stored.
    """

    name: str
    url: str
    password: str
    admin_url: str
    _server: PgServer

    def role(self, service: str) -> tuple[str, str]:
        return self._server.server.url(service, self.name), self._server.passwords[service]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PgServer]:
    """One PostgreSQL of the session, without fsync; its database `intertie` is the template of every `pg`."""
    folder = new_short_folder()
    passwords = {name: secrets.token_urlsafe(16) for name in (*SERVICES, TESTER)}
    try:
        with running_postgres(folder, fast=True) as server:
            server.provision([RolePassword(name, passwords[name]) for name in SERVICES])
            server.query(
                f"CREATE ROLE {TESTER} LOGIN INHERIT PASSWORD '{passwords[TESTER]}';"
                + "".join(f"GRANT {name} TO {TESTER} WITH INHERIT TRUE;" for name in SERVICES)
            )
            yield PgServer(server, passwords)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def pg(postgres_server: PgServer) -> Iterator[PgDatabase]:
    """A fresh database: `await Database.open(pg.url, password=pg.password, schema="scheduler")`."""
    server, name = postgres_server.server, f"t{next(_numbers)}"
    server.query(f"CREATE DATABASE {name} TEMPLATE intertie OWNER {TESTER}")
    server.query("".join(f"GRANT CONNECT ON DATABASE {name} TO {service};" for service in SERVICES))
    password = postgres_server.passwords[TESTER]
    try:
        yield PgDatabase(name, server.url(TESTER, name), password, server.admin_url(name), postgres_server)
    finally:
        server.query(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def nats_server() -> Iterator[Nats]:
    """One plain nats-server of the session, with JetStream and without accounts."""
    folder = new_short_folder()
    try:
        with running_nats(folder) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def nats_url(nats_server: Nats) -> str:
    """Where the plain server listens."""
    return nats_server.url
