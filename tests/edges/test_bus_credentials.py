"""A site's bus with credentials of seconds, which it mints itself: renewed before they end, nothing lost; and the real hub's permissions."""

from __future__ import annotations

import asyncio
import json

import pytest
from nats.aio.client import Client
from tests.edges.bus_rig import until
from tests.edges.conftest import RunningHub

from intertie.bus.nats import NatsBus
from intertie.bus.port import ConsumerSpec, Message, StreamSpec
from intertie.clock import SystemClock
from intertie.contracts.base import EVENT_STREAM, TELEMETRY_STREAM
from intertie.errors import Unavailable
from intertie.ids import SiteName
from intertie.trust import nats_jwt
from intertie.trust.keys import Key
from intertie.trust.login import SiteLogin

CLOCK = SystemClock()


async def joined(hub: RunningHub, system: Client, site: str, seconds: int) -> SiteLogin:
    """A site of that name, known to the server."""
    account, signing = Key.new("A"), Key.new("A")
    jwt = nats_jwt.site_account(hub.key("operator"), SiteName(site), account.public, hub.key("hub").public, [signing.public], CLOCK.now())
    answer = json.loads((await system.request("$SYS.REQ.CLAIMS.UPDATE", jwt.encode(), timeout=5)).data)
    assert "error" not in answer, answer
    return SiteLogin(signing, account.public, CLOCK, seconds)


class Counting:
    """A login that says how often it was asked."""

    def __init__(self, inner: SiteLogin) -> None:
        self._inner = inner
        self.signed = 0

    def jwt(self) -> bytes:
        return self._inner.jwt()

    def signature(self, nonce: str | bytes) -> bytes:
        self.signed += 1
        return self._inner.signature(nonce)


async def test_credentials_are_renewed_before_they_end_and_no_message_is_lost(operator_hub: RunningHub, system: Client) -> None:
    """BR-109. Messages may come twice while the new connection stands beside the old one."""
    login = Counting(await joined(operator_hub, system, "renews", 2))
    url = operator_hub.layout.bus_url
    hub = await NatsBus.connect(url, name="scheduler", credentials=operator_hub.layout.creds_file("scheduler"))
    site = await NatsBus.connect(url, name="agent", credentials=login)
    states: list[bool] = []
    got: set[int] = set()
    answers: set[int] = set()

    async def hear(message: Message) -> None:
        got.add(int(message.body))

    async def lane(message: Message) -> bytes:
        return message.body

    try:
        site.on_state(states.append)
        await site.subscribe("down.nudge", hear)
        await hub.subscribe("intertie.v1.up.*.scheduler.sync", lane, workers=8)
        number = 0
        # Longer than the first credentials and the second ones live.
        while login.signed < 4:
            assert number < 3_000, "credentials were not renewed"
            await hub.publish("intertie.v1.down.renews.nudge", b"%d" % number)
            answers.add(int((await site.request("up.scheduler.sync", b"%d" % number, timeout_s=5)).body))
            number += 1
            await asyncio.sleep(0.005)
        await until(lambda: len(got) == number, "every nudge")
        assert answers == set(range(number)) and states == [True]
    finally:
        await site.close()
        await hub.close()


async def test_the_hubs_permissions_suffice_for_all_that_the_bus_does(operator_hub: RunningHub, unique: str) -> None:
    """Streams, consumers with acknowledgements, last values and the micro words, as a hub service is allowed them."""
    bus = await NatsBus.connect(operator_hub.layout.bus_url, name="scheduler", credentials=operator_hub.layout.creds_file("scheduler"))
    tries: list[str] = []
    failed: list[str] = []

    async def handle(message: Message) -> None:
        tries.append(message.subject)
        if len(tries) == 1:
            raise RuntimeError("once")

    async def never(message: Message, error: BaseException, count: int) -> None:
        failed.append(repr(error))

    async def echo(message: Message) -> bytes:
        return message.body

    try:
        assert (await bus.ensure_stream(StreamSpec(EVENT_STREAM, ["intertie.v1.evt.>"]))).name == EVENT_STREAM, "what is there, not made"
        await bus.ensure_stream(StreamSpec(TELEMETRY_STREAM, ["intertie.v1.tel.>"], memory=True, max_per_subject=1, max_age_s=60))
        assert isinstance(await bus.last_messages(TELEMETRY_STREAM, "intertie.v1.tel.gpu.>"), list)
        subject = f"intertie.v1.evt.scheduler.{unique}.changed._._"
        await bus.consume(ConsumerSpec(EVENT_STREAM, "scheduler", [subject], backoff_s=(0.01,)), handle, never)
        made = await bus.append(subject, b"{}", message_id=unique)
        assert made.stream == EVENT_STREAM and not made.duplicate
        await until(lambda: len(tries) == 2, "the second try")
        await bus.serve("scheduler", "1.0.0", {"intertie.v1.qry.scheduler.job": echo})
        assert (await bus.request("intertie.v1.qry.scheduler.job", b"x", timeout_s=5)).body == b"x"
        assert failed == []
        with pytest.raises(Unavailable) as told:
            await bus.request("intertie.v1.cmd.metering.agree_spec", b"", timeout_s=60)
        assert told.value.code == "bus.denied"
    finally:
        await bus.close()
