"""A hub that offers its bus by WebSocket: said once, kept, told to those who join, taken back; and the real server listens there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from intertie.cli.__main__ import cli
from intertie.embedded.hub import HubPorts, environment, open_hub, running_hub_bus
from intertie.embedded.process import free_port
from intertie.errors import Refused

UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def init(folder: Path, *options: str) -> None:
    done = CliRunner().invoke(cli, ["hub", "init", "--data", str(folder), *options])
    assert done.exit_code == 0, done.output


def test_it_is_kept_told_and_taken_back(short_folder: Path) -> None:
    hub, bus, websocket = short_folder / "hub", free_port(), free_port()
    init(hub, "--bus-port", str(bus), "--websocket-port", str(websocket))
    init(hub, "--title", "another")
    layout = open_hub(hub)
    assert environment(layout, "identity")["INTERTIE_BUS_PUBLIC_URLS"] == f"nats://127.0.0.1:{bus},ws://127.0.0.1:{websocket}"
    with running_hub_bus(layout), socket.create_connection(("127.0.0.1", websocket), 10) as link:
        link.sendall(UPGRADE)
        assert b"101" in link.recv(64)
    init(hub, "--bus-url", "wss://bus.hub.example")
    assert environment(open_hub(hub), "identity")["INTERTIE_BUS_PUBLIC_URLS"] == "wss://bus.hub.example"
    init(hub, "--websocket-port", "0")
    assert open_hub(hub).websocket_urls == () and "websocket" not in (hub / "nats/nats.conf").read_text(encoding="utf-8")


def test_two_listeners_at_one_port_are_refused() -> None:
    with pytest.raises(Refused, match="different numbers"):
        HubPorts(bus=4222, websocket=4222)
