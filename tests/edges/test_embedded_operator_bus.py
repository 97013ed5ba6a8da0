"""The hub's bus in operator mode, with a real server: what a site, a thief and each of our own services can and cannot do there."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.edges.conftest import RunningHub, connect, make_stream, new_hub

from intertie.bus.nats import NatsBus
from intertie.bus.port import ConsumerSpec, Message, StreamSpec
from intertie.clock import SystemClock
from intertie.contracts.base import EVENT_STREAM, TELEMETRY_STREAM
from intertie.embedded.hub import HubLayout, init_hub, running_hub_bus
from intertie.ids import SiteName, new_event
from intertie.trust import nats_jwt
from intertie.trust.keys import Key
from intertie.trust.login import FileLogin, SiteLogin

CLOCK = SystemClock()
DEADLINE_S = 10.0


@dataclass
class Site:
    """A site's keys as the site has them; the hub only ever sees the public halves."""

    name: SiteName
    account: Key = field(default_factory=lambda: Key.new("A"))
    signing: Key = field(default_factory=lambda: Key.new("A"))

    def jwt(self, hub: RunningHub, signing_keys: list[str] | None = None) -> str:
        keys = [self.signing.public] if signing_keys is None else signing_keys
        return nats_jwt.site_account(hub.key("operator"), self.name, self.account.public, hub.key("hub").public, keys, CLOCK.now())

    def login(self, seconds: int = 900) -> SiteLogin:
        return SiteLogin(self.signing, self.account.public, CLOCK, seconds)


async def push(system: Client, jwt: str) -> None:
    answer = json.loads((await system.request("$SYS.REQ.CLAIMS.UPDATE", jwt.encode(), timeout=5)).data)
    assert "error" not in answer, answer


async def until(true: Callable[[], object]) -> None:
    """Poll until it is true; fail at the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not true():  # noqa: ASYNC110  any condition, no event to wait for
            await asyncio.sleep(0.01)


async def settled(client: Client) -> None:
    """Everything sent before was judged by the server, and its verdicts were read."""
    await client.flush(timeout=5)
    await client.flush(timeout=5)


@asynccontextmanager
async def client_of(url: str, login: SiteLogin | FileLogin, errors: list[str] | None = None) -> AsyncIterator[Client]:
    heard = errors if errors is not None else []

    async def note(error: Exception) -> None:
        heard.append(str(error))

    async def lost() -> None:
        heard.append("disconnected")

    client = await connect(url, login, error_cb=note, disconnected_cb=lost, allow_reconnect=False)
    try:
        yield client
    finally:
        await client.close()


async def refused(hub: RunningHub, login: SiteLogin | FileLogin) -> None:
    """The server does not let this login in."""
    client = Client()
    try:
        with pytest.raises(nats.errors.Error, match="(?i)authorization"):
            await client.connect(
                hub.bus.url, user_jwt_cb=login.jwt, signature_cb=login.signature, allow_reconnect=False, connect_timeout=5, error_cb=_quiet
            )
            await client.flush(timeout=5)
    finally:
        await client.close()


async def _quiet(_: object) -> None: ...


async def test_from_nothing_to_the_first_answer_on_a_lane(short_folder: Path) -> None:
    layout = await asyncio.to_thread(new_hub, short_folder)
    with running_hub_bus(layout) as bus:
        hub, site = RunningHub(layout, bus), Site(SiteName("site-a"))
        async with AsyncExitStack() as stack:
            system = await stack.enter_async_context(client_of(bus.url, FileLogin(layout.creds_file("system"))))
            scheduler = await stack.enter_async_context(client_of(bus.url, FileLogin(layout.creds_file("scheduler"))))

            async def answer(message: Msg) -> None:
                await message.respond(message.subject.encode())

            await scheduler.subscribe("intertie.v1.up.*.scheduler.sync", queue="scheduler", cb=answer)
            await settled(scheduler)
            await push(system, site.jwt(hub))
            agent = await stack.enter_async_context(client_of(bus.url, site.login()))
            reply = await agent.request("up.scheduler.sync", b"x", timeout=5)
            assert reply.data == b"intertie.v1.up.site-a.scheduler.sync"


@pytest.fixture
async def site(operator_hub: RunningHub, system: Client, unique: str) -> Site:
    made = Site(SiteName(f"site-{unique}"))
    await push(system, made.jwt(operator_hub))
    return made


@pytest.fixture
async def agent(operator_hub: RunningHub, site: Site) -> AsyncIterator[Client]:
    async with client_of(operator_hub.bus.url, site.login()) as client:
        yield client


async def test_every_channel_of_a_site_carries_its_name_whatever_it_writes(operator_hub: RunningHub, site: Site, agent: Client) -> None:
    heard: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for service, subjects in {
            "registry": ["up.*.registry.sync"],
            "scheduler": ["up.*.scheduler.sync", "up.*.answer", "tel.gpu.>"],
            "metering": ["up.*.metering.sync"],
        }.items():
            hub = await stack.enter_async_context(client_of(operator_hub.bus.url, FileLogin(operator_hub.layout.creds_file(service))))

            async def note(message: Msg) -> None:
                heard[message.subject] = message.reply
                if message.reply:
                    await message.respond(b"ok")

            for subject in subjects:
                await hub.subscribe(f"intertie.v1.{subject}", cb=note)
            await settled(hub)
        for local in ("up.registry.sync", "up.scheduler.sync", "up.metering.sync", "up.answer"):
            assert (await agent.request(local, b"", timeout=5)).data == b"ok"
        await agent.publish("tel.gpu.node-1", b"sample")
        await until(lambda: f"intertie.v1.tel.gpu.{site.name}.node-1" in heard)
    assert set(heard) == {
        *(f"intertie.v1.up.{site.name}.{lane}.sync" for lane in ("registry", "scheduler", "metering")),
        f"intertie.v1.up.{site.name}.answer",
        f"intertie.v1.tel.gpu.{site.name}.node-1",
    }
    assert heard[f"intertie.v1.tel.gpu.{site.name}.node-1"] == ""


async def test_what_the_hub_says_down_reaches_its_site_and_no_other(
    operator_hub: RunningHub, system: Client, site: Site, unique: str
) -> None:
    other = Site(SiteName(f"other-{unique}"))
    await push(system, other.jwt(operator_hub))
    got: list[str] = []

    def hear(who: str) -> Callable[[Msg], object]:
        async def note(message: Msg) -> None:
            got.append(f"{who} {message.subject} {message.data.decode()}")

        return note

    async with AsyncExitStack() as stack:
        for each in (site, other):
            client = await stack.enter_async_context(client_of(operator_hub.bus.url, each.login()))
            await client.subscribe("down.*", cb=hear(each.name))  # type: ignore[arg-type]  # nats-py wants a coroutine function
            await settled(client)
        hub = await stack.enter_async_context(client_of(operator_hub.bus.url, FileLogin(operator_hub.layout.creds_file("scheduler"))))
        for text in ("1", "2"):
            await hub.publish(f"intertie.v1.down.{site.name}.ask", text.encode())
        await hub.publish(f"intertie.v1.down.{other.name}.nudge", b"last")
        await settled(hub)
        await until(lambda: len(got) == 3)
    assert sorted(got) == sorted([f"{site.name} down.ask 1", f"{site.name} down.ask 2", f"{other.name} down.nudge last"])


SITE_FORBIDDEN_PUBLISH = [
    "intertie.v1.evt.scheduler.job.changed.t.s",  # an event, under its hub name
    "intertie.v1.up.site-b.scheduler.sync",  # another site's lane
    "intertie.v1.tel.gpu.site-b.node-1",
    "intertie.v1.cmd.scheduler.cancel",
    "up.scheduler.sync.more",
    "down.ask",
    "$JS.API.STREAM.LIST",
    "$SYS.REQ.CLAIMS.UPDATE",
    "anything",
]
SITE_FORBIDDEN_SUBSCRIBE = [">", "*.*.>", "up.>", "tel.>", "intertie.>", "$JS.API.>", "$SYS.>"]


async def test_a_site_can_speak_and_hear_on_nothing_but_its_own_subjects(operator_hub: RunningHub, site: Site) -> None:
    """BR-125, BR-128: no subtree but its own; a reply box is not readable by a wildcard; each site has an account of its own besides."""

    async def quiet(_: Msg) -> None: ...

    errors: list[str] = []
    async with client_of(operator_hub.bus.url, site.login(), errors) as agent:
        for subject in SITE_FORBIDDEN_PUBLISH:
            await agent.publish(subject, b"forged")
        for subject in SITE_FORBIDDEN_SUBSCRIBE:
            await agent.subscribe(subject, cb=quiet)
        await settled(agent)
        await until(lambda: len(errors) >= len(SITE_FORBIDDEN_PUBLISH) + len(SITE_FORBIDDEN_SUBSCRIBE))
    for subject in SITE_FORBIDDEN_PUBLISH:
        assert any("publish" in text.lower() and f'"{subject.lower()}"' in text.lower() for text in errors), (subject, errors)
    for subject in SITE_FORBIDDEN_SUBSCRIBE:
        assert any("subscription" in text.lower() and f'"{subject.lower()}"' in text.lower() for text in errors), (subject, errors)


async def test_a_forged_reply_subject_stays_with_the_forger(operator_hub: RunningHub, site: Site, agent: Client) -> None:
    target = "intertie.v1.evt.scheduler.job.changed.t.s"
    replies: list[str] = []
    stolen: list[bytes] = []
    async with (
        client_of(operator_hub.bus.url, FileLogin(operator_hub.layout.creds_file("scheduler"))) as scheduler,
        client_of(operator_hub.bus.url, FileLogin(operator_hub.layout.creds_file("gateway"))) as gateway,
    ):

        async def answer(message: Msg) -> None:
            replies.append(message.reply)
            await message.respond(b"answer")

        async def overhear(message: Msg) -> None:
            stolen.append(message.data)

        await gateway.subscribe("intertie.v1.evt.>", cb=overhear)
        await scheduler.subscribe("intertie.v1.up.*.scheduler.sync", cb=answer)
        await settled(gateway)
        await settled(scheduler)
        await agent.publish("up.scheduler.sync", b"evil", reply=target)
        await settled(agent)
        await until(lambda: replies)
        await settled(scheduler)
        # What is published now arrives behind anything that the forged reply could have caused.
        await scheduler.publish("intertie.v1.evt.scheduler.job.changed.real.s", b"real")
        await settled(scheduler)
        await until(lambda: b"real" in stolen)
    assert replies[0].startswith("_R_.")
    assert stolen == [b"real"]


async def test_a_credential_that_expires_ends_its_connection_and_the_next_is_minted_without_the_hub(
    operator_hub: RunningHub, site: Site
) -> None:
    errors: list[str] = []
    async with client_of(operator_hub.bus.url, site.login(seconds=1), errors) as short:
        await until(lambda: short.is_closed or not short.is_connected)
    async with client_of(operator_hub.bus.url, site.login()) as again:
        await settled(again)
        assert again.is_connected


async def test_a_user_under_the_scoped_key_cannot_widen_itself(operator_hub: RunningHub, site: Site) -> None:
    wide = nats_jwt._sign(
        site.signing,
        (user := Key.new("U")).public,
        "wide",
        CLOCK.now(),
        {
            "type": "user",
            "issuer_account": site.account.public,
            "pub": {"allow": [">"]},
            "sub": {"allow": [">"]},
            "subs": -1,
            "data": -1,
            "payload": -1,
        },
    )
    creds = operator_hub.layout.data / f"{user.public}.creds"
    creds.touch(mode=0o600)
    creds.write_text(nats_jwt.credentials(wide, user), encoding="ascii")
    await refused(operator_hub, FileLogin(creds))


async def test_an_account_signed_by_another_operator_lets_nobody_in(operator_hub: RunningHub, system: Client, site: Site) -> None:
    """The server stores such a claim and answers `jwt updated` (nats-server 2.15.1), yet never believes it."""
    thief = Site(site.name, site.account)
    forged = nats_jwt.site_account(
        Key.new("O"), site.name, site.account.public, operator_hub.key("hub").public, [thief.signing.public], CLOCK.now()
    )
    await push(system, forged)
    await refused(operator_hub, thief.login())


async def test_dropping_the_signing_key_drops_that_sites_connection_and_no_other(
    operator_hub: RunningHub, system: Client, site: Site, unique: str
) -> None:
    other = Site(SiteName(f"stays-{unique}"))
    await push(system, other.jwt(operator_hub))
    async with (
        client_of(operator_hub.bus.url, site.login()) as revoked,
        client_of(operator_hub.bus.url, other.login()) as stays,
    ):
        await settled(revoked)
        await settled(stays)
        # In the same second as the first push: the server must take it all the same.
        await push(system, site.jwt(operator_hub, signing_keys=[]))
        await until(lambda: not revoked.is_connected)
        await settled(stays)
        assert stays.is_connected
    await refused(operator_hub, site.login())


async def test_a_rotated_signing_key_lets_the_site_in_again(operator_hub: RunningHub, system: Client, site: Site) -> None:
    old, site.signing = site.signing, Key.new("A")
    await push(system, site.jwt(operator_hub))
    async with client_of(operator_hub.bus.url, site.login()) as client:
        await settled(client)
    site.signing = old
    await refused(operator_hub, site.login())


SERVICE_FORBIDDEN = [
    # (service, publish, subscribe): the rights that a service must not have
    ("scheduler", "intertie.v1.evt.metering.usage.recorded.t.s", ""),
    ("scheduler", "intertie.v1.heads.metering", ""),
    ("scheduler", "intertie.v1.cmd.identity.create_token", ""),
    ("scheduler", "intertie.v1.up.site-a.scheduler.sync", ""),
    ("scheduler", f"$JS.API.CONSUMER.MSG.NEXT.{EVENT_STREAM}.metering", ""),
    ("scheduler", f"$JS.ACK.{EVENT_STREAM}.metering.1.1.1.1.0", ""),
    ("scheduler", f"$JS.API.STREAM.PURGE.{EVENT_STREAM}", ""),
    ("scheduler", "", "intertie.v1.cmd.metering.*"),
    ("scheduler", "", "intertie.v1.up.*.metering.sync"),
    ("scheduler", "", ">"),
    ("metering", "intertie.v1.evt.scheduler.job.changed.t.s", ""),
    ("metering", "intertie.v1.down.site-a.ask", ""),
    ("metering", "", "intertie.v1.tel.gpu.>"),
    ("registry", "intertie.v1.cmd.scheduler.submit", ""),
    ("registry", "", "intertie.v1.up.*.scheduler.sync"),
    ("identity", "intertie.v1.cmd.metering.set_allowance", ""),
    ("identity", "$SYS.REQ.CLAIMS.UPDATE", ""),
    ("incident", "intertie.v1.cmd.scheduler.cancel", ""),
    ("incident", "", "intertie.v1.up.*.*.sync"),
    ("gateway", "intertie.v1.evt.identity.tenant.changed.t._", ""),
    ("gateway", "intertie.v1.down.site-a.ask", ""),
    ("gateway", "", "intertie.v1.qry.identity.*"),
    ("gateway", "", "$JS.API.>"),
]


@pytest.mark.parametrize("service", sorted(nats_jwt.BEYOND_COMMON))
async def test_a_service_can_do_on_the_bus_what_its_row_says_and_no_more(operator_hub: RunningHub, service: str) -> None:
    async def quiet(_: Msg) -> None: ...

    errors: list[str] = []
    forbidden = [(publish, subscribe) for who, publish, subscribe in SERVICE_FORBIDDEN if who == service]
    async with client_of(operator_hub.bus.url, FileLogin(operator_hub.layout.creds_file(service)), errors) as client:
        for publish, subscribe in forbidden:
            if publish:
                await client.publish(publish, b"")
            else:
                await client.subscribe(subscribe, cb=quiet)
        await settled(client)
        await until(lambda: len(errors) >= len(forbidden))
        for publish, subscribe in forbidden:
            assert any(f'"{(publish or subscribe).lower()}"' in text.lower() for text in errors), (publish, subscribe, errors)
        errors.clear()
        for subject in nats_jwt.permissions_of(service).subscribe:
            await client.subscribe(subject, cb=quiet)
        await client.publish(f"intertie.v1.evt.{service}.noun.verb.t.s", b"")
        await client.publish(f"intertie.v1.heads.{service}", b"")
        await settled(client)
        assert errors == []


async def acknowledged(bus: NatsBus, durable: str) -> None:
    """Everything that was handed out has been acknowledged: the acknowledgement, too, is a publish that must be allowed."""
    async with asyncio.timeout(DEADLINE_S):
        pending = 1
        while pending:
            answer = await bus.request(f"$JS.API.CONSUMER.INFO.{EVENT_STREAM}.{durable}", b"", timeout_s=5)
            pending = json.loads(answer.body)["num_ack_pending"]


async def test_our_bus_makes_fills_reads_and_remakes_the_streams_with_a_services_own_rights(short_folder: Path) -> None:
    """The product's bus, with every JetStream word that it says, on streams that nobody else has filled."""
    layout = await asyncio.to_thread(new_hub, short_folder)
    with running_hub_bus(layout):
        await _every_word(layout)


async def _every_word(layout: HubLayout) -> None:
    bus = await NatsBus.connect([layout.bus_url], name="scheduler", credentials=layout.creds_file("scheduler"))
    got: list[bytes] = []

    async def take(message: Message) -> None:
        got.append(message.body)

    async def dead(message: Message, error: BaseException, tries: int) -> None: ...

    try:
        await make_stream(layout, StreamSpec(EVENT_STREAM, ["intertie.v1.evt.>"]))
        await make_stream(layout, StreamSpec(EVENT_STREAM, ["intertie.v1.evt.>"], max_age_s=3600))
        await bus.ensure_stream(StreamSpec(EVENT_STREAM, ["intertie.v1.evt.>"]))
        await bus.ensure_stream(StreamSpec(TELEMETRY_STREAM, ["intertie.v1.tel.gpu.>"], memory=True, max_per_subject=1))
        assert await bus.last_messages(TELEMETRY_STREAM, "intertie.v1.tel.gpu.*.*") == []
        consumer = await bus.consume(ConsumerSpec(EVENT_STREAM, "scheduler", ["intertie.v1.evt.>"]), take, dead)
        await bus.append("intertie.v1.evt.scheduler.job.changed.t.s", b"one", message_id=new_event())
        await until(lambda: got == [b"one"])
        await acknowledged(bus, "scheduler")
        await consumer.close()
        state = await bus.stream_state(EVENT_STREAM)
        assert state is not None and state.messages == 1
    finally:
        await bus.close()


async def test_a_stream_wiped_under_a_running_server_can_be_made_again_by_identity(short_folder: Path) -> None:
    layout = await asyncio.to_thread(new_hub, short_folder)
    spec = StreamSpec(EVENT_STREAM, ["intertie.v1.evt.>"])
    with running_hub_bus(layout) as server:
        bus = await NatsBus.connect([layout.bus_url], name="identity", credentials=layout.creds_file("identity"))
        try:
            await bus.ensure_stream(spec)
            await bus.append("intertie.v1.evt.identity.tenant.changed.t.s", b"one", message_id=new_event())
            await asyncio.to_thread(shutil.rmtree, server.jetstream_folder / "jetstream")
            answer = await bus.request(f"$JS.API.STREAM.DELETE.{EVENT_STREAM}", b"", timeout_s=5)
            assert json.loads(answer.body)["type"] == "io.nats.jetstream.api.v1.stream_delete_response"
            assert (await bus.ensure_stream(spec)).messages == 0
            await bus.append("intertie.v1.evt.identity.tenant.changed.t.s", b"two", message_id=new_event())
        finally:
            await bus.close()


async def test_accounts_that_identity_wrote_into_the_preload_file_survive_another_init(short_folder: Path) -> None:
    layout = await asyncio.to_thread(new_hub, short_folder)
    hub, site = RunningHub(layout, layout.bus()), Site(SiteName("site-a"))
    file = layout.nats / "preload.conf"
    file.write_text(f"# by identity\n{file.read_text(encoding='ascii')}{site.account.public}: {site.jwt(hub)}\n", encoding="ascii")
    await asyncio.to_thread(init_hub, short_folder, CLOCK.now())
    with running_hub_bus(layout):
        async with client_of(layout.bus_url, site.login()) as agent:
            await settled(agent)


async def test_a_service_answers_another_services_query(operator_hub: RunningHub) -> None:
    async with (
        client_of(operator_hub.bus.url, FileLogin(operator_hub.layout.creds_file("metering"))) as metering,
        client_of(operator_hub.bus.url, FileLogin(operator_hub.layout.creds_file("scheduler"))) as scheduler,
    ):

        async def answer(message: Msg) -> None:
            await message.respond(b"snapshot")

        await metering.subscribe("intertie.v1.qry.metering.*", queue="q", cb=answer)
        await settled(metering)
        assert (await scheduler.request("intertie.v1.qry.metering.snapshot", b"", timeout=5)).data == b"snapshot"


async def test_a_wiped_accounts_folder_gets_the_hub_back_from_preload_and_the_site_from_a_push(short_folder: Path) -> None:
    layout = await asyncio.to_thread(new_hub, short_folder)
    with running_hub_bus(layout) as bus:
        hub, site = RunningHub(layout, bus), Site(SiteName("site-a"))
        async with client_of(bus.url, FileLogin(layout.creds_file("system"))) as system:
            await push(system, site.jwt(hub))
        bus.kill()
        shutil.rmtree(bus.accounts_folder)
        # Init again: folders come back, keys stay.
        before = layout.public_keys.read_bytes()
        await asyncio.to_thread(init_hub, short_folder, CLOCK.now())
        assert layout.public_keys.read_bytes() == before
        await asyncio.to_thread(bus.start)
        async with client_of(bus.url, FileLogin(layout.creds_file("system"))) as system:
            listed = json.loads((await system.request("$SYS.REQ.CLAIMS.LIST", b"", timeout=5)).data)["data"]
            assert hub.key("hub").public in listed
            assert site.account.public not in listed
            await push(system, site.jwt(hub))
        async with client_of(bus.url, site.login()) as agent:
            await settled(agent)
