"""Calls on a real server in operator mode: what one site says of its calls no other site hears, says or answers; and nobody there is said at once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.edges.conftest import RunningHub
from tests.edges.test_embedded_operator_bus import Site, client_of, push, settled, until

from intertie.bus.nats import NatsBus
from intertie.bus.port import Message
from intertie.contracts.calls import LOCAL_CALL_SUBJECT, answers_subject, call_subject, local_answer_subject
from intertie.errors import Unavailable
from intertie.ids import SiteName
from intertie.trust.login import FileLogin

GW = "gw-1"


@pytest.fixture
async def pair(operator_hub: RunningHub, system: Client, unique: str) -> tuple[Site, Site]:
    made = Site(SiteName(f"site-{unique}")), Site(SiteName(f"other-{unique}"))
    for site in made:
        await push(system, site.jwt(operator_hub))
    return made


async def test_a_site_hears_its_own_calls_and_answers_in_its_own_name_alone(operator_hub: RunningHub, pair: tuple[Site, Site]) -> None:
    site, other = pair
    heard: list[str] = []
    errors: list[str] = []
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(client_of(operator_hub.bus.url, FileLogin(operator_hub.layout.creds_file("gateway"))))
        mine = await stack.enter_async_context(client_of(operator_hub.bus.url, site.login()))
        thief = await stack.enter_async_context(client_of(operator_hub.bus.url, other.login(), errors))

        async def at_gateway(message: Msg) -> None:
            heard.append(f"gateway {message.subject} {message.data.decode()} {message.reply}")

        async def at_site(message: Msg) -> None:
            heard.append(f"site {message.subject} {message.data.decode()}")

        async def at_thief(message: Msg) -> None:
            heard.append(f"thief {message.subject}")

        await gateway.subscribe(answers_subject(GW), cb=at_gateway)
        await mine.subscribe(LOCAL_CALL_SUBJECT, cb=at_site)
        await thief.subscribe(LOCAL_CALL_SUBJECT, cb=at_thief)
        for client in (gateway, mine, thief):
            await settled(client)
        # What a thief tries: to hear another's calls, to speak in another's name, to call another site, to hear what others answer.
        for subject in (f"intertie.v1.down.{site.name}.call", "up.call.>", f"intertie.v1.up.{site.name}.call.{GW}"):
            await thief.subscribe(subject, cb=at_thief)
        await thief.publish(f"intertie.v1.up.{site.name}.call.{GW}", b"forged")
        await thief.publish(call_subject(site.name), b"a call of nobody's")
        await settled(thief)
        await gateway.publish(call_subject(site.name), b"call")
        await settled(gateway)
        await until(lambda: f"site {LOCAL_CALL_SUBJECT} call" in heard)
        await mine.publish(local_answer_subject(GW), b"answer")
        await thief.publish(local_answer_subject(GW), b"its own")
        await settled(mine)
        await settled(thief)
        await until(lambda: len(heard) >= 3)
    assert sorted(heard) == sorted(
        [
            f"site {LOCAL_CALL_SUBJECT} call",
            f"gateway intertie.v1.up.{site.name}.call.{GW} answer ",
            f"gateway intertie.v1.up.{other.name}.call.{GW} its own ",
        ]
    )
    assert sum("permissions violation" in error.lower() for error in errors) >= 4


async def test_a_site_that_is_not_connected_is_said_at_once_and_one_that_is_silent_is_not_taken(
    operator_hub: RunningHub, pair: tuple[Site, Site]
) -> None:
    site, other = pair
    bus = await NatsBus.connect(operator_hub.bus.url, name="gateway", credentials=operator_hub.layout.creds_file("gateway"))
    agent = await NatsBus.connect(operator_hub.bus.url, name="agent", credentials=site.login())
    try:
        got: list[Message] = []
        await agent.listen(LOCAL_CALL_SUBJECT, got.append)
        assert await agent.alive()
        with pytest.raises(Unavailable, match=r"bus\.no_responder"):
            async with asyncio.timeout(30):
                await bus.request(call_subject(other.name), b"", timeout_s=25)
        with pytest.raises(Unavailable, match=r"bus\.timeout"):
            await bus.request(call_subject(site.name), b"x", timeout_s=0.5)
        assert [message.body for message in got] == [b"x"]
    finally:
        await agent.close()
        await bus.close()
