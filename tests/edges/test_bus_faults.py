"""The NATS bus when its server dies, freezes, forgets, refuses or comes late: each kind of loss has one way back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import nats
import pytest
from nats.aio.msg import Msg
from tests.edges.bus_rig import NatsServer, free_port, until

from intertie.bus.nats import NatsBus
from intertie.bus.port import ConsumerSpec, Message, StreamSpec
from intertie.errors import Unavailable

EVENTS = StreamSpec("EVENTS", ["evt.>"])


@pytest.fixture
def server() -> Iterator[NatsServer]:
    made = NatsServer()
    made.start()
    yield made
    made.remove()


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[NatsBus]:
    made = await NatsBus.connect(server.url, name="tested")
    yield made
    await made.close()


async def echo(message: Message) -> bytes:
    return message.body


async def never(message: Message, error: BaseException, tries: int) -> None:
    raise AssertionError(f"no dead letter was expected: {error!r}")


async def asked(bus: NatsBus, subject: str) -> bool:
    """Did an answer come? A lost link, nobody there yet, and silence are all just no."""
    try:
        return (await bus.request(subject, b"x", timeout_s=1)).body == b"x"
    except Unavailable:
        return False


async def until_asked(bus: NatsBus, subject: str) -> None:
    async with asyncio.timeout(15):
        while not await asked(bus, subject):  # noqa: ASYNC110  it is the asking that is waited for
            await asyncio.sleep(0.02)


async def appended(bus: NatsBus, body: bytes, message_id: str) -> None:
    """As the relay does: again with the same id until the stream has said its word, the stream made when it is absent."""
    async with asyncio.timeout(15):
        while True:
            with contextlib.suppress(Unavailable):
                if await bus.stream_state("EVENTS") is None:
                    await bus.ensure_stream(EVENTS)
                await bus.append("evt.a", body, message_id=message_id, timeout_s=0.5)
                return
            await asyncio.sleep(0.05)


async def test_a_killed_and_restarted_server_finds_subscriptions_services_and_consumers_again(server: NatsServer, bus: NatsBus) -> None:
    """BR-114, BR-127: all hear again within seconds (KV watches would be blind for some 19 s), and what is said meanwhile is said to be lost."""
    states: list[bool] = []
    bus.on_state(states.append)
    got: list[bytes] = []

    async def handle(message: Message) -> None:
        got.append(message.body)

    await bus.subscribe("echo", echo)
    await bus.serve("echo", "1.0.0", {"srv.echo": echo})
    await bus.ensure_stream(EVENTS)
    await bus.consume(ConsumerSpec("EVENTS", "d", ["evt.>"], ack_wait_s=1), handle, never)
    await appended(bus, b"1", "1")
    await until(lambda: got == [b"1"], "the first event")
    server.kill()
    await until(lambda: not bus.connected, "the loss to be noticed")
    assert not await bus.alive(0.2)
    with pytest.raises(Unavailable) as told:
        await bus.publish("echo", b"into the void")
    assert told.value.code == "bus.unavailable"
    server.start()
    await until_asked(bus, "echo")
    await until_asked(bus, "srv.echo")
    await appended(bus, b"2", "2")
    await until(lambda: b"2" in got, "the second event")
    assert states[:3] == [True, False, True] and await bus.alive()


async def test_a_request_under_way_when_the_server_dies_is_told_at_once(server: NatsServer, bus: NatsBus) -> None:
    inside = asyncio.Event()

    async def slow(message: Message) -> None:
        inside.set()

    await bus.subscribe("slow", slow)
    request = asyncio.create_task(bus.request("slow", b"", timeout_s=600))
    await inside.wait()
    server.kill()
    with pytest.raises(Unavailable) as told:
        async with asyncio.timeout(10):
            await request
    assert told.value.code == "bus.timeout", "it may have been done"


async def test_an_append_without_an_answer_is_a_maybe_and_its_repeat_is_stored_once(server: NatsServer, bus: NatsBus) -> None:
    """BR-111: what a frozen server was sent it may store when it thaws, or lose with the connection; the same id again is one message."""
    got: list[bytes] = []

    async def handle(message: Message) -> None:
        got.append(message.body)

    await bus.ensure_stream(EVENTS)
    # The thawed server may hand the message to the pull of the connection that was given up; it comes again after the ack wait.
    await bus.consume(ConsumerSpec("EVENTS", "d", ["evt.>"], ack_wait_s=2.0), handle, never)
    await appended(bus, b"before", "m-0")
    await until(lambda: got == [b"before"], "the consumer at work")
    server.freeze()
    try:
        with pytest.raises(Unavailable) as told:
            await bus.append("evt.a", b"submit", message_id="m-1", timeout_s=0.3)
        assert told.value.code == "bus.timeout"
    finally:
        server.thaw()
    await appended(bus, b"submit", "m-1")
    await appended(bus, b"next", "m-2")
    await until(lambda: {b"submit", b"next"} <= set(got), "both messages", limit_s=30)
    state = await bus.stream_state("EVENTS")
    assert state and state.messages == 3 and set(got) == {b"before", b"submit", b"next"}


async def test_a_server_that_comes_back_empty_gets_stream_and_consumer_again(server: NatsServer, bus: NatsBus) -> None:
    """BR-129, the other way round: the same ids are delivered again, from the first."""
    got: list[bytes] = []

    async def handle(message: Message) -> None:
        got.append(message.body)

    before = await bus.ensure_stream(EVENTS)
    await bus.consume(ConsumerSpec("EVENTS", "d", ["evt.>"]), handle, never)
    for number in range(3):
        await appended(bus, b"%d" % number, str(number))
    await until(lambda: len(got) == 3, "the first life")
    server.kill()
    server.wipe()
    server.start()
    for number in range(4):
        await appended(bus, b"%d" % number, str(number))
    await until(lambda: got[3:] == [b"0", b"1", b"2", b"3"], "the second life")
    after = await bus.stream_state("EVENTS")
    assert after and after.created != before.created and after.last_seq == 4


async def test_jetstream_wiped_while_running_is_found_out_when_it_stores_nothing_any_more(server: NatsServer, bus: NatsBus) -> None:
    """The server acknowledges into its wiped folder until a block is full, then is silent for ever: the stream is made anew (law 1)."""
    got: list[bytes] = []

    async def handle(message: Message) -> None:
        got.append(message.body[:2])

    before = await bus.ensure_stream(EVENTS)
    await bus.consume(ConsumerSpec("EVENTS", "d", ["evt.>"]), handle, never)
    await appended(bus, b"00", "0")
    await until(lambda: got == [b"00"], "the first event")
    server.wipe()
    large = b"x" * 1_000_000
    for number in range(1, 12):
        await appended(bus, b"%02d" % number + large, str(number))
    await until(lambda: b"11" in got, "the event that would have vanished")
    after = await bus.stream_state("EVENTS")
    assert after and after.created != before.created


async def test_a_consumer_whose_stream_was_deleted_waits_and_goes_on_with_the_next(server: NatsServer, bus: NatsBus) -> None:
    got: list[bytes] = []

    async def handle(message: Message) -> None:
        got.append(message.body)

    await bus.consume(ConsumerSpec("EVENTS", "d", ["evt.>"]), handle, never)
    await appended(bus, b"1", "1")
    await until(lambda: got == [b"1"], "the stream made after its consumer")
    await bus.request("$JS.API.STREAM.DELETE.EVENTS", b"", timeout_s=2)
    await appended(bus, b"2", "2")
    await until(lambda: got == [b"1", b"2"], "the next stream")


async def test_a_frozen_server_is_noticed_and_used_again_when_it_thaws(server: NatsServer, bus: NatsBus) -> None:
    await bus.subscribe("echo", echo)
    server.freeze()
    try:
        assert not await bus.alive(0.3), "a flush that returned is life; a socket that is open is not"
        await until(lambda: not bus.connected, "three unanswered pings")
    finally:
        server.thaw()
    await until_asked(bus, "echo")


async def test_asking_a_slow_server_for_life_does_not_end_the_connection(server: NatsServer, bus: NatsBus) -> None:
    """nats-py's own `flush` would: the PONG that comes after its time is up ends its reading."""
    states: list[bool] = []
    bus.on_state(states.append)
    await bus.subscribe("echo", echo)
    server.freeze()
    await bus.alive(0.1)
    server.thaw()
    await until_asked(bus, "echo")
    assert await bus.alive(5) and states == [True]


async def test_a_bus_that_need_not_wait_begins_when_its_server_comes() -> None:
    """An agent boots islanded; what it listens to meanwhile begins with the first connection."""
    server = NatsServer()
    bus = await NatsBus.connect(server.url, name="agent", wait=False)
    try:
        states: list[bool] = []
        bus.on_state(states.append)
        await bus.subscribe("echo", echo)
        assert states == [False] and not await bus.alive(0.1)
        with pytest.raises(Unavailable):
            await bus.request("echo", b"", timeout_s=1)
        server.start()
        await until_asked(bus, "echo")
        assert states == [False, True]
    finally:
        await bus.close()
        server.remove()


async def test_a_bus_that_must_be_there_and_is_not_is_said_in_one_sentence() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable) as told:
        await NatsBus.connect(url, name="hub", timeout_s=0.3)
    assert told.value.code == "bus.unavailable" and url in told.value.text and "nats-server" in told.value.next_step


async def test_the_next_server_is_tried_when_the_first_does_not_answer(server: NatsServer) -> None:
    bus = await NatsBus.connect([f"nats://127.0.0.1:{free_port()}", server.url], name="two")
    assert await bus.alive()
    await bus.close()


async def test_a_request_whose_reply_is_no_inbox_is_not_answered(server: NatsServer, bus: NatsBus) -> None:
    """A client may name any subject as the reply of an allowed request: the answer would be said there in our name (DESIGN 10)."""
    handled: list[str] = []

    async def handle(message: Message) -> bytes:
        handled.append(message.subject)
        return b"secret"

    await bus.serve("keeper", "1.0.0", {"srv.keeper": handle})
    await bus.subscribe("lane", handle)
    thief = await nats.connect(server.url)
    loot: list[str] = []

    async def take(msg: Msg) -> None:
        loot.append(msg.subject)

    try:
        await thief.subscribe("evt.>", cb=take)
        for subject in ("srv.keeper", "lane"):
            await thief.publish(subject, b"", reply="evt.fake")
            assert (await thief.request(subject, b"", timeout=5)).data == b"secret"
        # All that was said to us before these answers has been delivered by now.
        await thief.flush()
    finally:
        await thief.close()
    assert (handled, loot) == (["srv.keeper", "lane"], [])


ERR_TEXTS = [
    "User Authentication Expired",
    "Account Authentication Expired",
    "Authorization Violation",
    "Maximum Connections Exceeded",
    "Maximum Payload Violation",
    "Slow Consumer",
    "Stale Connection",
    "Some Error That Nobody Knows Yet",
]


class FakeServer:
    """Speaks just enough of the protocol; says `-ERR` to the first connection when that publishes, and hangs up."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.subscribed: list[list[str]] = []
        self._clients: list[asyncio.Task[None]] = []

    async def serve(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.append(asyncio.create_task(self._client(reader, writer)))

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine: list[str] = []
        self.subscribed.append(mine)
        first = len(self.subscribed) == 1
        writer.write(b'INFO {"server_id":"FAKE","version":"2.15.1","proto":1,"headers":true,"max_payload":1048576}\r\n')
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                if line.startswith(b"SUB"):
                    mine.append(line.split()[1].decode())
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
                if line.startswith(b"PUB") and first:
                    writer.write(f"-ERR '{self._text}'\r\n".encode())
                    await writer.drain()
                    break
        writer.close()

    async def close(self) -> None:
        self._server.close()
        await asyncio.gather(*self._clients)
        await self._server.wait_closed()


@pytest.mark.parametrize("text", ERR_TEXTS)
async def test_no_error_text_of_the_server_closes_the_bus_for_good(text: str) -> None:
    """BR-109: nats-py alone would stay closed for ever after all but one of these."""
    fake = FakeServer(text)
    bus = await NatsBus.connect(await fake.serve(), name="lasting")
    states: list[bool] = []
    try:
        await bus.subscribe("down.ask", echo)
        bus.on_state(states.append)
        await bus.publish("now", b"")
        await until(lambda: states == [True, False, True], "a second connection")
        assert "down.ask" in fake.subscribed[1]
    finally:
        await bus.close()
        await fake.close()


async def test_a_refused_login_is_tried_again_for_ever() -> None:
    """`Authorization Violation` is no proof of revocation: the server may have come back with an empty folder (DESIGN 10)."""
    server = NatsServer("authorization { token: other }")
    server.start()
    bus = await NatsBus.connect(server.url, name="site", wait=False)
    try:
        with pytest.raises(Unavailable) as told:
            await NatsBus.connect(server.url, name="hub", timeout_s=1.0)
        assert "authorization" in told.value.text.lower()
        server.kill()
        server.config.write_text(server.config.read_text(encoding="utf-8").replace("authorization { token: other }", ""), encoding="utf-8")
        server.start()
        await until(lambda: bus.connected, "the login that is let in", limit_s=20)
    finally:
        await bus.close()
        server.remove()
