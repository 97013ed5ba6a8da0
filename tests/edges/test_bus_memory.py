"""What the bus in memory has beyond the port: a site's account and its border, and faults that a simulator sets."""

from __future__ import annotations

import asyncio

import pytest
from tests.edges.bus_rig import until

from intertie.bus.memory import MemoryBroker, MemoryBus, site_account
from intertie.bus.port import ConsumerSpec, Message, StreamSpec
from intertie.clock import ManualClock
from intertie.errors import Unavailable


async def echo(message: Message) -> bytes:
    return f"{message.subject} {message.reply[:4]}".encode()


async def never(message: Message, error: BaseException, tries: int) -> None:
    raise AssertionError(f"no dead letter was expected: {error!r}")


async def test_a_sites_lane_is_named_by_the_server_and_answered_across_the_border() -> None:
    broker = MemoryBroker()
    hub, site = broker.client("hub"), broker.client("agent", site_account("site-a"))
    await hub.subscribe("intertie.v1.up.*.scheduler.sync", echo)
    answer = await site.request("up.scheduler.sync", b"", timeout_s=1)
    assert answer.body == b"intertie.v1.up.site-a.scheduler.sync _R_."


async def test_a_site_can_name_nothing_of_the_hub_or_of_another_site() -> None:
    broker = MemoryBroker()
    hub, site = broker.client("hub"), broker.client("agent", site_account("site-a"))
    other = broker.client("other", site_account("site-b"))
    heard: list[str] = []

    async def hear(message: Message) -> None:
        heard.append(message.subject)

    await hub.subscribe(">", hear)
    await other.subscribe(">", hear)
    for subject in ("intertie.v1.up.site-b.scheduler.sync", "intertie.v1.evt.scheduler.job.changed._._", "up.x.y.sync", "tel.gpu.a.b"):
        await site.publish(subject, b"evil")
    await site.publish("tel.gpu.node-1", b"sample")
    await asyncio.sleep(0)
    assert heard == ["intertie.v1.tel.gpu.site-a.node-1"]


async def test_the_hubs_question_reaches_its_site_alone_and_the_answer_the_hub() -> None:
    broker = MemoryBroker()
    hub = broker.client("hub")
    asked: list[tuple[str, str]] = []
    answered: list[str] = []

    def agent(name: str, bus: MemoryBus) -> None:
        async def ask(message: Message) -> None:
            asked.append((name, message.subject))
            await bus.request("up.answer", b"an answer", timeout_s=1)

        tasks.append(asyncio.ensure_future(bus.subscribe("down.ask", ask)))

    async def answer(message: Message) -> bytes:
        answered.append(message.subject)
        return b""

    tasks: list[asyncio.Future[object]] = []
    await hub.subscribe("intertie.v1.up.*.answer", answer)
    for name in ("site-a", "site-b"):
        agent(name, broker.client(name, site_account(name)))
    await asyncio.gather(*tasks)
    await hub.publish("intertie.v1.down.site-b.ask", b"")
    await until(lambda: answered, "the answer")
    assert (asked, answered) == ([("site-b", "down.ask")], ["intertie.v1.up.site-b.answer"])


async def test_a_cut_client_knows_it_and_is_back_when_healed() -> None:
    broker = MemoryBroker()
    hub, site = broker.client("hub"), broker.client("agent", site_account("site-a"))
    states: list[bool] = []
    site.on_state(states.append)
    await hub.subscribe("intertie.v1.up.*.scheduler.sync", echo)
    site.cut()
    with pytest.raises(Unavailable) as told:
        await site.request("up.scheduler.sync", b"", timeout_s=1)
    assert told.value.code == "bus.unavailable" and not await site.alive(0.01)
    site.heal()
    await site.request("up.scheduler.sync", b"", timeout_s=1)
    assert states == [True, False, True]


@pytest.mark.parametrize(("direction", "handled"), [("out", 0), ("in", 1)])
async def test_a_lost_request_and_a_lost_answer_look_the_same_to_the_asker(direction: str, handled: int) -> None:
    broker = MemoryBroker()
    hub, site = broker.client("hub"), broker.client("agent", site_account("site-a"))
    seen: list[str] = []

    async def handle(message: Message) -> bytes:
        seen.append(message.subject)
        return b""

    await hub.subscribe("intertie.v1.up.*.scheduler.sync", handle)
    site.faults.drop = lambda way, subject: way == direction
    with pytest.raises(Unavailable) as told:
        await site.request("up.scheduler.sync", b"", timeout_s=0.05)
    assert told.value.code == "bus.timeout" and len(seen) == handled


async def test_a_lost_acknowledgement_means_maybe_and_the_repeat_is_a_duplicate() -> None:
    """BR-111."""
    bus = MemoryBroker().client("relay")
    await bus.ensure_stream(StreamSpec("E", ["e.>"]))
    bus.faults.drop = lambda way, subject: subject == "ack"
    with pytest.raises(Unavailable) as told:
        await bus.append("e.1", b"", message_id="1", timeout_s=0.01)
    assert told.value.code == "bus.timeout"
    bus.faults.drop = None
    assert (await bus.append("e.1", b"", message_id="1")).duplicate


async def test_the_duplicate_window_counts_from_the_first_copy() -> None:
    """BR-112: a consumer keeps its own list of what it has seen."""
    clock = ManualClock()
    bus = MemoryBroker(clock).client("relay")
    await bus.ensure_stream(StreamSpec("E", ["e.>"], duplicate_window_s=2))
    answers = []
    for _ in range(4):
        answers.append(await bus.append("e.1", b"", message_id="1"))
        clock.advance(0.8)
    assert [(one.seq, one.duplicate) for one in answers] == [(1, False), (1, True), (1, True), (2, False)]


async def test_what_a_slow_link_carries_keeps_its_order() -> None:
    broker = MemoryBroker()
    sender, receiver = broker.client("sender"), broker.client("receiver")
    got: list[bytes] = []

    async def hear(message: Message) -> None:
        got.append(message.body)

    await receiver.subscribe("n", hear)
    sender.faults.delay_s = 0.02
    await sender.publish("n", b"1")
    sender.faults.delay_s = 0.0
    await sender.publish("n", b"2")
    await until(lambda: len(got) == 2, "both")
    assert got == [b"1", b"2"]


async def test_a_wiped_stream_is_born_anew_and_its_consumer_starts_again() -> None:
    broker = MemoryBroker(ManualClock())
    bus = broker.client("one")
    got: list[bytes] = []

    async def handle(message: Message) -> None:
        got.append(message.body)

    spec = StreamSpec("E", ["e.>"])
    before = await bus.ensure_stream(spec)
    await bus.consume(ConsumerSpec("E", "d", ["e.>"]), handle, never)
    await bus.append("e.1", b"1", message_id="1")
    await until(lambda: got == [b"1"], "the first life")
    broker.wipe()
    assert await bus.stream_state("E") is None
    after = await bus.ensure_stream(spec)
    assert after.created > before.created, "even while the clock stands"
    assert not (await bus.append("e.1", b"1", message_id="1")).duplicate
    await until(lambda: got == [b"1", b"1"], "the second life")


async def test_a_delivery_that_the_link_loses_comes_again() -> None:
    bus = MemoryBroker().client("one")
    got: list[bytes] = []

    async def handle(message: Message) -> None:
        got.append(message.body)

    lost: list[str] = []

    def once(way: str, subject: str) -> bool:
        if subject == "delivery" and not lost:
            lost.append(subject)
            return True
        return False

    bus.faults.drop = once
    await bus.ensure_stream(StreamSpec("E", ["e.>"]))
    await bus.consume(ConsumerSpec("E", "d", ["e.>"], ack_wait_s=0.05), handle, never)
    await bus.append("e.1", b"1", message_id="1")
    await until(lambda: got == [b"1"], "the second delivery")
    assert lost


async def test_the_same_calls_give_the_same_order_each_time() -> None:
    async def run() -> list[str]:
        broker = MemoryBroker()
        order: list[str] = []

        def named(name: str) -> object:
            async def hear(message: Message) -> None:
                order.append(f"{name}:{message.body.decode()}")

            return hear

        buses = [broker.client(str(number)) for number in range(4)]
        for number, bus in enumerate(buses):
            await bus.subscribe("n", named(str(number)), queue="q" if number % 2 else "")  # type: ignore[arg-type]
        for number in range(20):
            await buses[number % 4].publish("n", str(number).encode())
        await until(lambda: len(order) == 60, "two each and one of the group")
        return order

    assert await run() == await run()
