"""BR-128 inside the hub: what one service is answered no other can hear. A real server in operator mode, the product's bus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from nats.aio.msg import Msg
from tests.edges.conftest import RunningHub, connect, make_stream, new_hub

from intertie.bus.nats import NatsBus
from intertie.bus.port import ConsumerSpec, Message, StreamSpec
from intertie.clock import SystemClock
from intertie.contracts.base import EVENT_STREAM, TELEMETRY_STREAM
from intertie.embedded.hub import running_hub_bus
from intertie.ids import SiteName, new_event
from intertie.trust import nats_jwt
from intertie.trust.keys import Key
from intertie.trust.login import FileLogin, SiteLogin

CLOCK = SystemClock()
NAMES = (*sorted(nats_jwt.BEYOND_COMMON), "system")
DEADLINE_S = 10.0


@asynccontextmanager
async def bus_of(hub: RunningHub, name: str) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(hub.layout.bus_url, name=name, credentials=hub.layout.creds_file(name))
    try:
        yield bus
    finally:
        await bus.close()


@pytest.mark.parametrize("thief", NAMES)
async def test_br_128_no_service_may_listen_to_an_inbox_that_is_not_its_own(operator_hub: RunningHub, thief: str) -> None:
    errors: list[str] = []

    async def note(error: Exception) -> None:
        errors.append(str(error).lower())

    async def quiet(_: Msg) -> None: ...

    victims = [f"_INBOX.{name}.>" for name in NAMES if name != thief]
    forbidden = [*victims, *(victim.replace(">", "*.*") for victim in victims), "_INBOX.>", "_INBOX.*.>", "_INBOX.*", "*.>", ">"]
    login = FileLogin(operator_hub.layout.creds_file(thief))
    client = await connect(operator_hub.bus.url, login, error_cb=note, allow_reconnect=False)
    try:
        for subject in forbidden:
            await client.subscribe(subject, cb=quiet)
        await client.flush(timeout=5)
        await client.flush(timeout=5)
        assert {text for text in forbidden if not any(f'"{text.lower()}"' in error for error in errors)} == set(), errors
    finally:
        await client.close()


async def test_br_128_an_answer_of_identity_reaches_its_asker_and_not_the_service_that_listens_beside(operator_hub: RunningHub) -> None:
    overheard: list[str] = []

    async def identity_says(message: Message) -> bytes:
        return b"signed claims"

    async def overhear(message: Msg) -> None:
        overheard.append(message.subject)

    async def ignore(_: Exception) -> None: ...

    thief = await connect(operator_hub.bus.url, FileLogin(operator_hub.layout.creds_file("incident")), error_cb=ignore)
    try:
        for subject in ("_INBOX.>", "_INBOX.gateway.>", "_INBOX.*.*.*", "_INBOX.incident.>"):
            await thief.subscribe(subject, cb=overhear)
        await thief.flush(timeout=5)
        async with bus_of(operator_hub, "identity") as identity, bus_of(operator_hub, "gateway") as gateway:
            serving = await identity.serve("identity", "1.0.0", {"intertie.v1.qry.identity.authenticate": identity_says})
            answer = await gateway.request("intertie.v1.qry.identity.authenticate", b"token", timeout_s=5)
            assert answer.body == b"signed claims"
            await serving.close()
        # Whatever had been on its way to the thief came before this answer.
        await thief.flush(timeout=5)
        assert overheard == []
    finally:
        await thief.close()


@pytest.fixture
def own_hub(short_folder: Path) -> Iterator[RunningHub]:
    """Streams of its own: what is kept in them concerns no other test."""
    layout = new_hub(short_folder)
    with running_hub_bus(layout) as bus:
        yield RunningHub(layout, bus)


async def test_each_way_of_being_answered_works_in_a_services_own_inbox(own_hub: RunningHub, unique: str) -> None:
    """Calls, the micro service's words, a stream's acknowledgements, a pull into a callback's inbox, last values, a site's lane."""
    site, account, signing = SiteName(f"site-{unique}"), Key.new("A"), Key.new("A")
    got: list[bytes] = []
    arrived = asyncio.Event()

    async def echo(message: Message) -> bytes:
        return message.body

    async def take(message: Message) -> None:
        got.append(message.body)
        arrived.set()

    async def dead(message: Message, error: BaseException, tries: int) -> None: ...

    async with (
        bus_of(own_hub, "metering") as metering,
        bus_of(own_hub, "scheduler") as scheduler,
        bus_of(own_hub, "system") as system,
    ):
        serving = await metering.serve("metering", "1.0.0", {f"intertie.v1.qry.metering.{unique}": echo})
        assert (await scheduler.request(f"intertie.v1.qry.metering.{unique}", b"hello", timeout_s=5)).body == b"hello"
        await serving.close()

        await make_stream(own_hub.layout)
        await scheduler.ensure_stream(StreamSpec(TELEMETRY_STREAM, ["intertie.v1.tel.gpu.>"], memory=True, max_per_subject=1))
        subject = f"intertie.v1.evt.scheduler.job.changed.{unique}._"
        consumer = await scheduler.consume(ConsumerSpec(EVENT_STREAM, "scheduler", [subject]), take, dead)
        await scheduler.append(subject, b"one", message_id=new_event())
        async with asyncio.timeout(DEADLINE_S):
            await arrived.wait()
        await consumer.close()
        assert got == [b"one"]

        jwt = nats_jwt.site_account(own_hub.key("operator"), site, account.public, own_hub.key("hub").public, [signing.public], CLOCK.now())
        pushed = json.loads((await system.request("$SYS.REQ.CLAIMS.UPDATE", jwt.encode(), timeout_s=5)).body)
        assert "error" not in pushed, pushed
        lane = await scheduler.subscribe("intertie.v1.up.*.scheduler.sync", echo)
        agent = await NatsBus.connect(own_hub.bus.url, name=site, credentials=SiteLogin(signing, account.public, CLOCK))
        try:
            assert (await agent.request("up.scheduler.sync", b"beat", timeout_s=5)).body == b"beat"
            await agent.publish("tel.gpu.node-1", b"sample")
            async with asyncio.timeout(DEADLINE_S):
                while not (last := await scheduler.last_messages(TELEMETRY_STREAM, f"intertie.v1.tel.gpu.{site}.*")):  # noqa: ASYNC110  no event
                    await asyncio.sleep(0.02)
            assert [one.body for one in last] == [b"sample"]
        finally:
            await agent.close()
            await lane.close()
