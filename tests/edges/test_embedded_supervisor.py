"""The supervisor with real servers and small stand-ins for the services: order, restarts, leftovers, and one clear sentence each time."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.edges.conftest import new_hub

from intertie.clock import SystemClock
from intertie.embedded import supervise
from intertie.embedded.hub import HubLayout, HubPorts, HubSettings, environment, init_hub, open_hub
from intertie.embedded.process import identity_of, read_record
from intertie.embedded.supervise import HubSupervisor, RestartPolicy
from intertie.errors import Conflict, IntertieError, Refused, Unavailable

STANDIN = Path(__file__).with_name("embedded_standin.py")
DEADLINE_S = 20.0


def standin(service: str) -> Sequence[str]:
    return (sys.executable, "-S", str(STANDIN), service)


@pytest.fixture
def layout(short_folder: Path) -> HubLayout:
    made = new_hub(short_folder)
    return HubLayout(made.data, made.settings, ("identity", "metering", "gateway"))


def supervisor(layout: HubLayout, heard: list[str] | None = None, **options: object) -> HubSupervisor:
    said = heard if heard is not None else []
    chosen = {"command": standin, "fast": True, "say": said.append, "policy": RestartPolicy(first_s=0.01, limit=3), **options}
    return HubSupervisor(layout, **chosen)  # type: ignore[arg-type]  # options of several types, checked at the call


@asynccontextmanager
async def running(hub: HubSupervisor) -> AsyncIterator[HubSupervisor]:
    try:
        await hub.start()
        yield hub
    finally:
        await hub.stop()


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not true():  # noqa: ASYNC110  any condition, no event to wait for
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    return identity_of(pid) is not None


async def test_everything_starts_reports_and_stops_in_reverse_order(layout: HubLayout) -> None:
    async with running(supervisor(layout)) as hub:
        started = hub.started
        assert [each.name for each in started] == ["postgres", "nats", "identity", "metering", "gateway"]
        assert all(alive(each.pid) and each.ready_s > 0 for each in started)
        for each in started:
            record = read_record(layout.run, each.name)
            assert record is not None and record.pid == each.pid and record.ready is not None
    assert not any(alive(each.pid) for each in started)
    lines = (layout.data / "starts").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.endswith("ended")] == ["gateway ended", "metering ended", "identity ended"]
    assert not list(layout.run.glob("*.json")) and not list(layout.run.glob("*.ready"))


@pytest.mark.parametrize("name", ["postgres", "nats", "metering"])
async def test_a_killed_part_is_started_again(layout: HubLayout, name: str) -> None:
    heard: list[str] = []
    async with running(supervisor(layout, heard)) as hub:
        watch = asyncio.create_task(hub.watch())
        before = {each.name: each.pid for each in hub.started}
        os.kill(before[name], signal.SIGKILL)
        await until(lambda: any(f"{name} serves again" in sentence for sentence in heard))
        after = {each.name: each.pid for each in hub.started}
        watch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watch
    assert after[name] != before[name]
    assert {key: pid for key, pid in after.items() if key != name} == {key: pid for key, pid in before.items() if key != name}
    assert any("was ended by SIGKILL" in sentence for sentence in heard)


async def test_a_part_that_always_ends_is_given_up_in_one_sentence(layout: HubLayout) -> None:
    async with running(supervisor(layout)) as hub:
        watch = asyncio.create_task(hub.watch())
        hub._extra_env["STANDIN_METERING"] = "dies"
        os.kill(next(each.pid for each in hub.started if each.name == "metering"), signal.SIGKILL)
        with pytest.raises(Unavailable) as error:
            await asyncio.wait_for(watch, DEADLINE_S)
    assert error.value.code == "hub.gave_up"
    assert "metering ended 3 times in a row" in error.value.text and "the table of moves is missing" in error.value.text
    assert "\n" not in error.value.text


async def test_a_service_that_cannot_start_is_the_reason_and_nothing_is_left(layout: HubLayout) -> None:
    hub = supervisor(layout, extra_env={"STANDIN_METERING": "dies"})
    with pytest.raises(Refused) as error:
        async with running(hub):
            pass
    assert "metering ended with code 1: the table of moves is missing" in error.value.text
    assert not list(layout.run.glob("*.json"))


async def test_a_service_that_never_says_ready_is_named(layout: HubLayout) -> None:
    with pytest.raises(Unavailable) as error:
        async with running(supervisor(layout, extra_env={"STANDIN_GATEWAY": "mute"}, ready_timeout_s=0.5)):
            pass
    assert error.value.code == "hub.not_ready" and error.value.text.startswith("gateway (pid ")


async def test_a_missing_binary_is_named(layout: HubLayout) -> None:
    with pytest.raises(Refused) as error:
        async with running(supervisor(layout, command=lambda service: ["/no/such/python", service])):
            pass
    assert error.value.code == "embedded.missing_binary" and "/no/such/python" in error.value.text


@pytest.mark.parametrize(("which", "what"), [("gateway", "the gateway"), ("bus", "nats-server"), ("database", "PostgreSQL")])
async def test_a_port_in_use_is_named_with_its_holder(layout: HubLayout, which: str, what: str) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", getattr(layout.settings.ports, which)))
        taken.listen()
        with pytest.raises(Refused) as error:
            async with running(supervisor(layout)):
                pass
    assert error.value.code == "embedded.port_in_use"
    assert f"port {getattr(layout.settings.ports, which)}, wanted by {what}, is in use by " in error.value.text
    assert f"(pid {os.getpid()})" in error.value.text


async def test_a_full_disk_is_one_sentence(layout: HubLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    # The limit is moved, not the disk: a file system of its own would need a mount.
    monkeypatch.setattr(supervise, "MIN_FREE_BYTES", 2**62)
    with pytest.raises(Unavailable) as error:
        async with running(supervisor(layout)):
            pass
    assert error.value.code == "embedded.disk_full" and str(layout.data) in error.value.text


async def test_two_supervisors_of_one_folder_do_not_fight(layout: HubLayout) -> None:
    async with running(supervisor(layout)):
        second = supervisor(layout)
        with pytest.raises(Conflict) as error:
            await second.start()
        await second.stop()
        assert error.value.code == "hub.running" and str(os.getpid()) in error.value.text


LEAVE_RUNNING = """
import asyncio, sys, os
from pathlib import Path
sys.path.insert(0, {root!r})
from intertie.embedded.hub import open_hub
from tests.edges.test_embedded_supervisor import supervisor
async def main():
    hub = supervisor(open_hub(Path({data!r}), ("identity", "metering", "gateway")))
    await hub.start()
    print("up", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_the_leftovers_of_a_killed_supervisor_are_recognised_and_stopped(layout: HubLayout) -> None:
    script = LEAVE_RUNNING.format(root=str(Path(__file__).parents[2]), data=str(layout.data))
    killed = await asyncio.to_thread(
        lambda: subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    )
    assert killed.stdout is not None
    try:
        assert await asyncio.to_thread(killed.stdout.readline) == b"up\n"
    finally:
        killed.kill()
        killed.wait()
        killed.stdout.close()
    left = {name: read_record(layout.run, name) for name in ("postgres", "nats", "identity", "metering", "gateway")}
    assert all(record is not None and alive(record.pid) for record in left.values())
    heard: list[str] = []
    async with running(supervisor(layout, heard)) as hub:
        assert not any(alive(record.pid) for record in left.values() if record is not None)
        assert {each.name for each in hub.started} == set(left)
    assert [sentence.split()[0] for sentence in heard] == ["gateway", "metering", "identity", "nats", "postgres"]


async def test_a_record_whose_pid_means_another_process_now_stops_nobody(layout: HubLayout) -> None:
    bystander = await asyncio.to_thread(lambda: subprocess.Popen(["/bin/sleep", "60"]))
    try:
        identity = identity_of(bystander.pid)
        assert identity is not None
        record = f'{{"pid": {identity.pid}, "start_ticks": {identity.start_ticks - 1}, "boot_id": "{identity.boot_id}"}}'
        (layout.run / "metering.json").write_text(record, encoding="ascii")
        heard: list[str] = []
        async with running(supervisor(layout, heard)):
            assert bystander.poll() is None
        assert heard == []
    finally:
        bystander.kill()
        bystander.wait()


# --- the folder --------------------------------------------------------------------------------------------------------------------------


def test_init_again_keeps_keys_and_passwords_and_what_was_decided(short_folder: Path) -> None:
    first = new_hub(short_folder)
    kept = {file: file.read_bytes() for file in [*first.keys.glob("*"), *first.secrets.glob("*"), first.data / "hub.toml"]}
    again = init_hub(short_folder, SystemClock().now())
    assert again.settings == first.settings == open_hub(short_folder).settings
    assert {file: file.read_bytes() for file in kept} == kept


def test_every_secret_is_readable_by_its_owner_only(short_folder: Path) -> None:
    layout = new_hub(short_folder)
    secrets = [*layout.keys.glob("*.nk"), *layout.creds.glob("*"), *layout.secrets.glob("*")]
    assert len(secrets) == 10 + 8 + 7
    assert {file.stat().st_mode & 0o7777 for file in secrets} == {0o600}
    assert {folder.stat().st_mode & 0o7777 for folder in (layout.keys, layout.creds, layout.secrets, layout.run, layout.log)} == {0o700}


def test_no_secret_travels_in_an_environment(short_folder: Path) -> None:
    layout = new_hub(short_folder)
    values = {file.read_text(encoding="ascii").strip() for file in [*layout.keys.glob("*.nk"), *layout.secrets.glob("*")]}
    for service in layout.services:
        text = "\n".join(environment(layout, service).values())
        assert not any(value in text for value in values)


def test_only_identity_is_told_of_the_operators_keys(short_folder: Path) -> None:
    layout = new_hub(short_folder)
    assert [service for service in layout.services if "INTERTIE_OPERATOR_DIR" in environment(layout, service)] == ["identity"]


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has one uid")
def test_a_folder_that_the_database_cannot_enter_is_refused_with_the_folder_named(short_folder: Path) -> None:
    closed = short_folder / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(Refused) as error:
        init_hub(closed / "hub", SystemClock().now())
    assert error.value.code == "hub.unreachable" and str(closed) in error.value.text


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("title = ", "hub.settings"),
        ("[ports]\nbus = 'x'", "hub.settings"),
        ("time_zone = 'Mars/Olympus'", "hub.time_zone"),
        ("[ports]\nbus = 8480", "hub.ports"),
        ("[ports]\nbus = 70000", "hub.ports"),
    ],
)
def test_a_broken_hub_toml_is_refused_with_its_code(short_folder: Path, text: str, code: str) -> None:
    (short_folder / "hub.toml").write_text(text, encoding="utf-8")
    with pytest.raises(IntertieError) as error:
        open_hub(short_folder)
    assert error.value.code == code


def test_settings_survive_their_file(short_folder: Path) -> None:
    settings = HubSettings(
        title='联邦 "hub"',
        time_zone="Asia/Shanghai",
        public_url="https://hub.example",
        bus_public_urls=("nats://a.example:4222", "wss://a.example"),
        ports=HubPorts(bus=4300, database=4301, gateway=4302),
    )
    init_hub(short_folder, SystemClock().now(), settings=settings)
    assert open_hub(short_folder).settings == settings
