"""Fixtures of the edges ring: a hub's own bus, in operator mode."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from tests.conftest import new_short_folder

from intertie.bus.nats import NatsBus
from intertie.bus.port import StreamSpec
from intertie.clock import SystemClock
from intertie.embedded.hub import HubLayout, HubPorts, HubSettings, init_hub, running_hub_bus
from intertie.embedded.nats import Nats
from intertie.embedded.process import free_port
from intertie.store import EVENTS
from intertie.trust.keys import Key
from intertie.trust.login import FileLogin, Login
from intertie.trust.nats_jwt import inbox_of


def new_hub(folder: Path) -> HubLayout:
    """An initialised hub on free ports."""
    ports = HubPorts(bus=free_port(), database=free_port(), gateway=free_port())
    return init_hub(folder, SystemClock().now(), settings=HubSettings(title="test", ports=ports))


async def connect(url: str, login: Login, **options: Any) -> Client:
    """A bare nats-py client; `options` are nats-py's own."""
    inbox = {"inbox_prefix": inbox_of(login.jwt()), **options}
    return await nats.connect(url, user_jwt_cb=login.jwt, signature_cb=login.signature, connect_timeout=5, **inbox)


@dataclass(frozen=True)
class RunningHub:
    """A hub's folder and its running nats-server; no service runs.

    layout.bus_url with layout.creds_file("<service>" | "system") connects; layout.key_file("operator" | "hub" | "system" | "<service>")
    are the keys.
    """

    layout: HubLayout
    bus: Nats

    def key(self, name: str) -> Key:
        return Key.read(self.layout.key_file(name))

    async def connect(self, name: str) -> Client:
        """A bare nats-py client as this service (or `system`)."""
        return await connect(self.layout.bus_url, FileLogin(self.layout.creds_file(name)))


async def make_stream(layout: HubLayout, spec: StreamSpec = EVENTS) -> None:
    """Identity's part, where no identity runs: nobody else may make the event stream."""
    bus = await NatsBus.connect(layout.bus_url, name="identity", credentials=layout.creds_file("identity"))
    try:
        await bus.ensure_stream(spec)
    finally:
        await bus.close()


@pytest.fixture(scope="session")
def session_hub() -> Iterator[RunningHub]:
    """One operator-mode server of the session; name sites with `unique`, do not kill it."""
    folder = new_short_folder()
    try:
        layout = new_hub(folder)
        with running_hub_bus(layout) as bus:
            asyncio.run(make_stream(layout))
            yield RunningHub(layout, bus)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def operator_hub(session_hub: RunningHub) -> RunningHub:
    """The session's hub bus."""
    return session_hub


@pytest.fixture
async def system(operator_hub: RunningHub) -> AsyncIterator[Client]:
    """A client that may push accounts."""
    client = await operator_hub.connect("system")
    yield client
    await client.close()
