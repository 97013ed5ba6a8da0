"""What every bus promises: one suite, run over the bus in memory and over a real nats-server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from tests.edges.bus_rig import NatsServer, until

from intertie.bus.memory import MemoryBroker
from intertie.bus.nats import NatsBus
from intertie.bus.port import Bus, ConsumerSpec, Message, Reply, StreamSpec
from intertie.bus.serving import ERROR, ERROR_CODE, SERVICE_BACKLOG
from intertie.bus.subjects import token
from intertie.errors import Refused, Unavailable

Clients = Callable[[str], Awaitable[Bus]]

EVENTS = StreamSpec("EVENTS", ["evt.>"], duplicate_window_s=60)


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    made = NatsServer()
    made.start()
    yield made
    made.remove()


@pytest.fixture(params=["memory", "nats"])
async def clients(request: pytest.FixtureRequest, server: NatsServer) -> AsyncIterator[Clients]:
    """Makes connections to one and the same bus."""
    opened: list[Bus] = []
    broker = MemoryBroker()

    async def client(name: str) -> Bus:
        bus: Bus = broker.client(name) if request.param == "memory" else await NatsBus.connect(server.url, name=name)
        opened.append(bus)
        return bus

    yield client
    if opened and request.param == "nats":
        await _no_streams(opened[0])
    for bus in opened:
        await bus.close()


async def _no_streams(bus: Bus) -> None:
    if not bus.connected:
        return
    for name in ("EVENTS", "LAST"):
        await bus.request(f"$JS.API.STREAM.DELETE.{name}", b"", timeout_s=2)


async def _nobody_dies(message: Message, error: BaseException, tries: int) -> None:
    raise AssertionError(f"no dead letter was expected: {message} {error!r} {tries}")


def quick(durable: str, **more: object) -> ConsumerSpec:
    return ConsumerSpec("EVENTS", durable, ["evt.>"], **{"backoff_s": (0.01, 0.02), **more})  # type: ignore[arg-type]


async def test_what_is_published_reaches_every_subscriber_but_one_of_a_queue_group(clients: Clients) -> None:
    one, two = await clients("one"), await clients("two")
    all_of_it: list[bytes] = []
    shared: list[str] = []

    async def hear(message: Message) -> None:
        all_of_it.append(message.body)

    def worker(name: str) -> Callable[[Message], Awaitable[None]]:
        async def work(message: Message) -> None:
            shared.append(name)

        return work

    await one.subscribe("a.*.c", hear)
    await two.subscribe("a.>", hear)
    await one.subscribe("a.b.c", worker("one"), queue="q")
    await two.subscribe("a.b.c", worker("two"), queue="q")
    await one.publish("a.b.c", b"x")
    await until(lambda: len(all_of_it) == 2 and len(shared) == 1, "two subscribers and one of the group")


async def test_many_that_are_published_at_once_arrive_in_order(clients: Clients) -> None:
    one, two = await clients("one"), await clients("two")
    heard: list[tuple[str, bytes]] = []
    listening = await two.listen("a.*", lambda message: heard.append((message.subject, message.body)))
    assert await two.alive()
    said = [(f"a.{number}", b"x" * number) for number in range(300)]
    await one.publish_many(said)
    await until(lambda: len(heard) == len(said), "all of them")
    assert heard == said
    with pytest.raises(Refused):
        await one.publish_many([("not a subject", b"")])
    with pytest.raises(Refused, match="more than"):
        await one.publish_many([("a.large", b"x" * (2 << 20))])
    await listening.close()


async def test_header_names_arrive_in_lower_case_whatever_was_sent(clients: Clients) -> None:
    bus = await clients("one")
    got: list[Message] = []

    async def hear(message: Message) -> None:
        got.append(message)

    await bus.subscribe("h", hear)
    await bus.publish("h", b"", {"Traceparent": "t", "CE-Subject": "任务", "nats-x-y": "1"})
    await until(lambda: got, "the message")
    assert {name: got[0].headers[name] for name in ("traceparent", "ce-subject", "nats-x-y")} == {
        "traceparent": "t",
        "ce-subject": "任务",
        "nats-x-y": "1",
    }


async def test_a_request_without_anybody_there_is_told_at_once(clients: Clients) -> None:
    bus = await clients("one")
    with pytest.raises(Unavailable) as told:
        await bus.request("nobody.home", b"", timeout_s=30)
    assert told.value.code == "bus.no_responder"


async def test_a_request_that_is_not_answered_in_time_may_have_been_done(clients: Clients) -> None:
    bus = await clients("one")
    asked: list[Message] = []

    async def silent(message: Message) -> None:
        asked.append(message)

    await bus.subscribe("slow", silent)
    with pytest.raises(Unavailable) as told:
        await bus.request("slow", b"", timeout_s=0.1)
    assert told.value.code == "bus.timeout"
    assert len(asked) == 1


async def test_a_lane_handler_answers_with_what_it_returns(clients: Clients) -> None:
    hub, site = await clients("hub"), await clients("site")

    async def lane(message: Message) -> Reply:
        return Reply(message.body.upper(), {"x-seen": message.subject})

    await hub.subscribe("intertie.v1.up.*.scheduler.sync", lane, workers=4)
    answer = await site.request("intertie.v1.up.site-a.scheduler.sync", b"batch", timeout_s=5)
    assert (answer.body, answer.headers["x-seen"]) == (b"BATCH", "intertie.v1.up.site-a.scheduler.sync")


async def test_a_handler_that_raises_leaves_its_subscription_alive(clients: Clients) -> None:
    bus = await clients("one")
    got: list[bytes] = []

    async def picky(message: Message) -> None:
        got.append(message.body)
        raise RuntimeError("this message is not liked")

    await bus.subscribe("p", picky)
    for body in (b"1", b"2"):
        await bus.publish("p", body)
    await until(lambda: got == [b"1", b"2"], "both messages")


async def test_a_slow_handler_does_not_starve_the_others(clients: Clients) -> None:
    """BR-123: one site's message takes for ever, the others are served."""
    bus = await clients("one")
    release = asyncio.Event()
    done: list[str] = []

    async def handle(message: Message) -> None:
        if message.subject == "site.stuck":
            await release.wait()
        done.append(message.subject)

    await bus.subscribe("site.*", handle, workers=2)
    await bus.publish("site.stuck", b"")
    for number in range(20):
        await bus.publish(f"site.s{number}", b"")
    await until(lambda: len(done) == 20, "all the others")
    assert "site.stuck" not in done
    release.set()
    await until(lambda: "site.stuck" in done, "the slow one in the end")


async def test_a_full_backlog_drops_the_oldest(clients: Clients) -> None:
    bus = await clients("one")
    release, started = asyncio.Event(), asyncio.Event()
    got: list[bytes] = []

    async def handle(message: Message) -> None:
        started.set()
        await release.wait()
        got.append(message.body)

    arrived: list[bytes] = []

    async def note(message: Message) -> None:
        arrived.append(message.body)

    await bus.subscribe("n", handle, backlog=3)
    await bus.subscribe("n", note)
    await bus.publish("n", b"0")
    await started.wait()
    for number in range(1, 8):
        await bus.publish("n", str(number).encode())
    await until(lambda: len(arrived) == 8, "all to arrive")
    release.set()
    await until(lambda: len(got) == 4, "the one in hand and three that waited")
    assert got == [b"0", b"5", b"6", b"7"]


async def test_a_message_too_large_with_its_headers_is_refused_and_the_bus_lives_on(clients: Clients) -> None:
    """BR-110: the body alone would fit; whichever way it is sent."""
    bus = await clients("one")
    states: list[bool] = []
    bus.on_state(states.append)
    await bus.ensure_stream(EVENTS)
    traced = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
    # The third is far below the limit without its headers: what is sent may not be judged by its body.
    long = {**traced, "tracestate": "y" * 60_000}
    for body, headers in ((b"x" * 1_048_576, traced), (b"x" * 1_048_577, {}), (b"x" * 1_000_000, long), (b"x" * 5_000_000, {})):
        for way in (
            bus.publish("big", body, headers),
            bus.request("big", body, timeout_s=5, headers=headers),
            bus.append("evt.big", body, message_id="big", headers=headers),
        ):
            with pytest.raises(Refused) as told:
                await way
            assert told.value.code == "bus.too_large"
    assert await bus.alive() and states == [True]


async def test_an_answer_too_large_is_an_error_and_not_a_silence(clients: Clients) -> None:
    bus = await clients("one")

    async def flood(message: Message) -> bytes:
        return b"x" * 2_000_000

    await bus.serve("flood", "1.0.0", {"srv.flood": flood})
    answer = await bus.request("srv.flood", b"", timeout_s=5)
    assert (answer.headers[ERROR_CODE], answer.headers[ERROR]) == ("413", "bus.too_large")


@pytest.mark.parametrize("subject", ["", "a..b", "a b", "a.*", "a.>", "任务.x", "a\r\nPUB b", "a.", "x" * 600])
async def test_what_is_no_subject_is_refused_before_it_is_sent(clients: Clients, subject: str) -> None:
    """BR-125."""
    bus = await clients("one")
    with pytest.raises(Refused) as told:
        await bus.publish(subject, b"")
    assert told.value.code == "bus.subject"


@pytest.mark.parametrize("text", ["a.b", "*", ">", "", "x y", "任务", "x" * 300, "$SYS", "_INBOX", "-a", "A"])
def test_user_text_never_becomes_a_subject_token(text: str) -> None:
    """BR-125."""
    with pytest.raises(Refused) as told:
        token(text, "tenant")
    assert told.value.code == "bus.subject" and "tenant" in told.value.text


async def test_copies_of_a_service_share_its_requests(clients: Clients) -> None:
    caller = await clients("caller")
    served: dict[str, int] = {"a": 0, "b": 0}

    def copy(name: str) -> Callable[[Message], Awaitable[bytes]]:
        async def handle(message: Message) -> bytes:
            served[name] += 1
            return name.encode()

        return handle

    for name in served:
        bus = await clients(name)
        await bus.serve("shared", "1.0.0", {"srv.shared": copy(name)})
    for _ in range(30):
        await caller.request("srv.shared", b"", timeout_s=5)
    assert sum(served.values()) == 30 and all(served.values())


async def test_a_service_answers_the_micro_words_as_stock_tools_expect_them(clients: Clients) -> None:
    bus = await clients("one")

    async def fine(message: Message) -> bytes:
        return b"ok"

    async def broken(message: Message) -> bytes:
        raise RuntimeError("inside")

    await bus.serve("registry", "1.2.3", {"intertie.v1.qry.registry.sites": fine, "intertie.v1.cmd.registry.cordon": broken})
    await bus.request("intertie.v1.qry.registry.sites", b"", timeout_s=5)
    failed = await bus.request("intertie.v1.cmd.registry.cordon", b"", timeout_s=5)
    assert failed.headers[ERROR_CODE] == "500"

    async def said(subject: str) -> dict[str, object]:
        told: dict[str, object] = json.loads((await bus.request(subject, b"", timeout_s=5)).body)
        return told

    ping = await said("$SRV.PING")
    assert (ping["type"], ping["name"], ping["version"]) == ("io.nats.micro.v1.ping_response", "registry", "1.2.3")
    info = await said(f"$SRV.INFO.registry.{ping['id']}")
    endpoints = info["endpoints"]
    assert isinstance(endpoints, list)
    assert [(one["name"], one["queue_group"]) for one in endpoints] == [("sites", "q"), ("cordon", "q")]
    stats = await said("$SRV.STATS.registry")
    counted = stats["endpoints"]
    assert isinstance(counted, list)
    assert [(one["num_requests"], one["num_errors"]) for one in counted] == [(1, 0), (1, 1)]
    assert str(stats["started"]).endswith("Z")


async def test_a_service_with_all_workers_busy_says_so_instead_of_queueing_without_end(clients: Clients) -> None:
    bus = await clients("one")
    release = asyncio.Event()
    inside: list[int] = []

    async def slow(message: Message) -> bytes:
        inside.append(1)
        await release.wait()
        return b"ok"

    await bus.serve("busy", "1.0.0", {"srv.busy": slow}, workers=1)
    first = asyncio.create_task(bus.request("srv.busy", b"", timeout_s=60))
    await until(lambda: inside, "the first to be in hand")
    waiting = [asyncio.create_task(bus.request("srv.busy", b"", timeout_s=60)) for _ in range(SERVICE_BACKLOG + 2)]
    await until(lambda: sum(task.done() for task in waiting) == 2, "two to be told")
    assert {task.result().headers[ERROR_CODE] for task in waiting if task.done()} == {"503"}
    release.set()
    assert (await first).body == b"ok"
    await asyncio.gather(*waiting)


async def test_a_stream_keeps_each_message_once_and_a_duplicate_is_a_success(clients: Clients) -> None:
    """BR-113."""
    bus = await clients("one")
    made = await bus.ensure_stream(EVENTS)
    first = await bus.append("evt.a", b"1", message_id="m-1")
    again = await bus.append("evt.a", b"1", message_id="m-1")
    assert (first.seq, first.duplicate, again.seq, again.duplicate) == (1, False, 1, True)
    state = await bus.stream_state("EVENTS")
    assert state and (state.messages, state.last_seq, state.created) == (1, 1, made.created)
    assert (await bus.ensure_stream(EVENTS)).created == made.created


async def test_a_stream_that_is_absent_is_said_to_be(clients: Clients) -> None:
    bus = await clients("one")
    assert await bus.stream_state("EVENTS") is None
    with pytest.raises(Unavailable) as told:
        await bus.append("evt.a", b"1", message_id="m-1")
    assert told.value.code == "bus.no_responder"


async def test_the_last_message_of_each_subject_can_be_read(clients: Clients) -> None:
    bus = await clients("one")
    await bus.ensure_stream(StreamSpec("LAST", ["tel.>"], memory=True, max_age_s=60, max_per_subject=1))
    assert await bus.last_messages("LAST", "tel.>") == []
    for node, body in (("a", b"1"), ("b", b"1"), ("a", b"2")):
        await bus.append(f"tel.{node}", body, message_id=f"{node}-{body.decode()}")
    assert [(one.subject, one.body) for one in await bus.last_messages("LAST", "tel.>")] == [("tel.b", b"1"), ("tel.a", b"2")]


async def test_a_consumer_gets_what_was_there_and_what_comes(clients: Clients) -> None:
    bus = await clients("one")
    await bus.ensure_stream(EVENTS)
    await bus.append("evt.a", b"before", message_id="1", headers={"CE-Id": "e1"})
    got: list[Message] = []

    async def handle(message: Message) -> None:
        got.append(message)

    await bus.consume(quick("all"), handle, _nobody_dies)
    await bus.append("evt.b", b"after", message_id="2")
    await until(lambda: len(got) == 2, "both")
    assert [one.body for one in got] == [b"before", b"after"] and got[0].headers["ce-id"] == "e1"


async def test_messages_of_one_entity_stay_in_order_while_others_overtake(clients: Clients) -> None:
    bus = await clients("one")
    await bus.ensure_stream(EVENTS)
    release = asyncio.Event()
    got: list[tuple[str, bytes]] = []

    async def handle(message: Message) -> None:
        entity = message.headers["ce-subject"]
        if entity == "slow":
            await release.wait()
        got.append((entity, message.body))

    for number in range(10):
        for entity in ("slow", "fast"):
            await bus.append("evt.x", str(number).encode(), message_id=f"{entity}{number}", headers={"ce-subject": entity})
    await bus.consume(quick("ordered", workers=3), handle, _nobody_dies)
    await until(lambda: len(got) == 10, "all of the fast one")
    assert got == [("fast", str(number).encode()) for number in range(10)]
    release.set()
    await until(lambda: len(got) == 20, "all of the slow one")
    assert got[10:] == [("slow", str(number).encode()) for number in range(10)]


async def test_a_message_that_fails_comes_again_after_a_pause_until_it_is_handled(clients: Clients) -> None:
    bus = await clients("one")
    await bus.ensure_stream(EVENTS)
    tries: list[bytes] = []

    async def handle(message: Message) -> None:
        tries.append(message.body)
        if len(tries) < 3:
            raise Unavailable("store.unavailable", "the database is away")

    await bus.consume(quick("retry"), handle, _nobody_dies)
    await bus.append("evt.a", b"1", message_id="1")
    await until(lambda: len(tries) == 3, "three tries")


async def test_when_tries_end_the_message_becomes_a_dead_letter_and_the_next_is_handled(clients: Clients) -> None:
    """BR-119: without it the message would vanish without a word."""
    bus = await clients("one")
    await bus.ensure_stream(EVENTS)
    tries: list[bytes] = []
    buried: list[tuple[bytes, str, int]] = []

    async def handle(message: Message) -> None:
        tries.append(message.body)
        if message.body == b"bad":
            raise ValueError("cannot be understood")

    async def dead(message: Message, error: BaseException, count: int) -> None:
        buried.append((message.body, str(error), count))

    await bus.consume(quick("deadly", max_deliver=3), handle, dead)
    await bus.append("evt.a", b"bad", message_id="1", headers={"ce-subject": "x"})
    await bus.append("evt.a", b"good", message_id="2", headers={"ce-subject": "x"})
    await until(lambda: buried and b"good" in tries, "a dead letter and the next")
    assert buried == [(b"bad", "cannot be understood", 3)] and tries.count(b"bad") == 3


async def test_a_dead_letter_that_cannot_be_stored_stays_in_the_stream(clients: Clients) -> None:
    bus = await clients("one")
    await bus.ensure_stream(EVENTS)
    attempts: list[int] = []

    async def handle(message: Message) -> None:
        raise ValueError("never")

    async def dead(message: Message, error: BaseException, count: int) -> None:
        attempts.append(count)
        if len(attempts) < 3:
            raise Unavailable("store.unavailable", "the database is away")

    await bus.consume(quick("stays", max_deliver=2), handle, dead)
    await bus.append("evt.a", b"1", message_id="1")
    await until(lambda: len(attempts) == 3, "the third attempt to bury it")
    assert attempts == [2, 3, 4]


async def test_a_handler_that_hangs_is_given_up_and_the_message_comes_again(clients: Clients) -> None:
    """BR-118: else it would hold its place for ever."""
    bus = await clients("one")
    await bus.ensure_stream(EVENTS)
    tries: list[int] = []

    async def handle(message: Message) -> None:
        tries.append(1)
        if len(tries) == 1:
            await asyncio.Event().wait()

    await bus.consume(quick("hang", ack_wait_s=0.3), handle, _nobody_dies)
    await bus.append("evt.a", b"1", message_id="1")
    await until(lambda: len(tries) >= 2, "the second try")


async def test_two_processes_share_a_consumer_and_each_message_is_handled_once(clients: Clients) -> None:
    first, second = await clients("first"), await clients("second")
    await first.ensure_stream(EVENTS)
    got: list[tuple[str, bytes]] = []

    def of(name: str) -> Callable[[Message], Awaitable[None]]:
        async def handle(message: Message) -> None:
            got.append((name, message.body))

        return handle

    for name, bus in (("first", first), ("second", second)):
        await bus.consume(quick("shared", backlog=4, workers=1), of(name), _nobody_dies)
    for number in range(40):
        await first.append("evt.a", str(number).encode(), message_id=str(number))
    await until(lambda: len(got) >= 40, "all forty")
    assert len({body for _, body in got}) == 40 and {name for name, _ in got} == {"first", "second"}


async def test_a_consumer_goes_on_where_it_stood_after_its_process_was_started_again(clients: Clients) -> None:
    bus = await clients("one")
    await bus.ensure_stream(EVENTS)
    got: list[bytes] = []

    async def handle(message: Message) -> None:
        got.append(message.body)

    first = await bus.consume(quick("stands"), handle, _nobody_dies)
    await bus.append("evt.a", b"1", message_id="1")
    await until(lambda: got == [b"1"], "the first")
    # The acknowledgement is on its way: one answer of the server later it is there.
    await bus.alive()
    await first.close()
    await bus.append("evt.a", b"2", message_id="2")
    await bus.consume(quick("stands"), handle, _nobody_dies)
    await until(lambda: len(got) == 2, "the second")
    assert got == [b"1", b"2"]


async def test_a_listener_hears_the_state_at_once_and_its_end(clients: Clients) -> None:
    bus = await clients("one")
    states: list[bool] = []
    bus.on_state(states.append)
    assert states == [True] and bus.connected
    await bus.close()
    assert states == [True, False] and not bus.connected
    with pytest.raises(Unavailable):
        await bus.publish("a", b"")
