"""From a commit to a handler: relay and consumer, over the bus in memory, on PostgreSQL and on the twin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.conftest import PgDatabase
from tests.edges.store_world import OtherProbe, Probe, emit, opened, running, until

from intertie.bus.memory import MemoryBroker, MemoryBus
from intertie.bus.port import Message
from intertie.clock import ManualClock
from intertie.contracts.base import EventMeta, Head, Heads, decode, encode
from intertie.contracts.incident import FaultReported
from intertie.errors import IntertieError, Refused, Unauthenticated, Unavailable
from intertie.store import EVENTS, Database, EventConsumer, MemoryStore, Relay

BEAT_S = 0.05

Store = Database | MemoryStore


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def bus(broker: MemoryBroker) -> MemoryBus:
    return broker.client("scheduler")


@pytest.fixture
async def db(pg: PgDatabase) -> AsyncIterator[Database]:
    async with opened(pg) as found:
        yield found


@pytest.fixture(params=["pg", "memory"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore("scheduler")
        return
    async with opened(request.getfixturevalue("pg")) as found:
        yield found


async def say(store: Store, *names: str, version: int = 1) -> None:
    async with store.transaction() as tx:
        for name in names:
            await tx.emit(Probe(probe=name, version=version))


async def on_stream(bus: MemoryBus) -> int:
    """How many messages the stream says it holds."""
    state = await bus.stream_state(EVENTS.name)
    return state.messages if state else 0


async def test_a_commit_is_on_the_stream_without_waiting_for_a_beat(store: Store, bus: MemoryBus) -> None:
    """The beat is an hour: only the hint of the commit can have brought it."""
    relay = Relay(store, bus, "scheduler", beat_s=3_600)
    async with running(relay.run()):
        await until(lambda: relay.leads, "leads")
        await say(store, "a", "b")
        await until(lambda: relay.published == 2, "published")
        await say(store, "c")
        await until(lambda: relay.published == 3, "published again")


async def test_a_commit_of_another_process_is_on_the_stream_within_a_beat(db: Database, pg: PgDatabase, bus: MemoryBus) -> None:
    async with opened(pg) as other, running(Relay(db, bus, "scheduler", beat_s=BEAT_S).run()):
        await emit(other, "a")
        await until(lambda: _has(bus, 1), "published")


async def _has(bus: MemoryBus, count: int) -> bool:
    return await on_stream(bus) == count


async def test_two_relays_number_nothing_twice_and_publish_nothing_twice(db: Database, pg: PgDatabase, broker: MemoryBroker) -> None:
    async with opened(pg) as other:
        bus = broker.client("one")
        got: list[tuple[str, str]] = []

        async def note(message: Message) -> None:
            got.append((message.headers["intertie-number"], message.headers["ce-id"]))

        await bus.subscribe("intertie.v1.evt.>", note)
        relays = [Relay(store, broker.client(), "scheduler", beat_s=BEAT_S) for store in (db, other)]
        async with running(relays[0].run()), running(relays[1].run()):
            await asyncio.gather(*(emit(db if n % 2 else other, f"p{n}") for n in range(30)))
            await until(lambda: len(got) >= 30, "all published")
            await until(lambda: sum(relay.leads for relay in relays) == 1, "one leads")
        assert sorted(int(number) for number, _ in got) == list(range(1, 31))
        assert len(set(got)) == 30


async def test_another_relay_goes_on_when_the_first_one_dies(db: Database, pg: PgDatabase, broker: MemoryBroker) -> None:
    async with opened(pg) as other:
        first, second = (Relay(store, broker.client(), "scheduler", beat_s=BEAT_S) for store in (db, other))
        async with running(second.run()):
            async with running(first.run()):
                await until(lambda: first.leads or second.leads, "one leads")
                await emit(db, "a")
                await until(lambda: first.published + second.published == 1, "published by one")
            await emit(other, "b")
            await until(lambda: first.published + second.published == 2, "published by whoever is left")


async def test_a_bus_that_is_away_costs_nothing_but_time(store: Store, bus: MemoryBus) -> None:
    """BR-127: what counts as published is what the stream acknowledged."""
    relay = Relay(store, bus, "scheduler", beat_s=BEAT_S)
    bus.cut()
    async with running(relay.run()):
        await until(lambda: relay.leads, "leads")
        await say(store, "a", "b")
        assert relay.published == 0
        bus.heal()
        await until(lambda: relay.published == 2, "published")
    assert await on_stream(bus) == 2


async def test_an_answer_that_was_lost_is_asked_for_again_and_a_duplicate_is_a_success(store: Store, bus: MemoryBus) -> None:
    """BR-113: the stream has it, the acknowledgement never came."""
    lost: list[str] = []

    def drop(direction: str, subject: str) -> bool:
        if direction == "in" and not lost and "heads" not in subject and relay.leads and appended():
            lost.append(subject)
            return True
        return False

    def appended() -> bool:
        state = bus.broker.streams.state(EVENTS.name)
        return state is not None and state.messages == 1

    relay = Relay(store, bus, "scheduler", beat_s=BEAT_S)
    bus.faults.drop = drop
    async with running(relay.run()):
        await say(store, "a")
        await until(lambda: relay.published == 1, "published")
    assert lost
    assert await on_stream(bus) == 1


async def test_a_wiped_stream_is_filled_again_by_itself(store: Store, broker: MemoryBroker, bus: MemoryBus) -> None:
    relay = Relay(store, bus, "scheduler", beat_s=BEAT_S)
    async with running(relay.run()):
        await say(store, *(f"p{n}" for n in range(300)))
        await until(lambda: relay.published == 300, "published")
        broker.wipe()
        await until(lambda: relay.published == 600, "published again")
        await say(store, "after")
        await until(lambda: relay.published == 601, "and the next")
    assert relay.refills == 1
    assert await on_stream(bus) == 301


async def test_a_reconnection_looks_at_the_stream_without_waiting_for_a_beat(store: Store, broker: MemoryBroker, bus: MemoryBus) -> None:
    relay = Relay(store, bus, "scheduler", beat_s=3_600)
    async with running(relay.run()):
        await say(store, "a")
        await until(lambda: relay.published == 1, "published")
        bus.cut()
        broker.wipe()
        bus.heal()
        await until(lambda: relay.published == 2, "published again")


async def test_a_stream_that_was_wiped_while_the_relay_was_away_is_filled_too(store: Store, broker: MemoryBroker, bus: MemoryBus) -> None:
    first = Relay(store, bus, "scheduler", beat_s=BEAT_S)
    async with running(first.run()):
        await say(store, "a", "b")
        await until(lambda: first.published == 2, "published")
    broker.wipe()
    await bus.ensure_stream(EVENTS)
    second = Relay(store, bus, "scheduler", beat_s=BEAT_S)
    async with running(second.run()):
        await until(lambda: _has(bus, 2), "filled")


async def test_a_replay_by_hand_publishes_everything_again(store: Store, bus: MemoryBus) -> None:
    relay = Relay(store, bus, "scheduler", beat_s=3_600)
    async with running(relay.run()):
        await say(store, "a", "b")
        await until(lambda: relay.published == 2, "published")
        relay.replay()
        await until(lambda: relay.published == 4, "published again")


async def test_heads_are_said_each_beat(store: Store, broker: MemoryBroker, bus: MemoryBus) -> None:
    said: list[Heads] = []

    async def hear(message: Message) -> None:
        said.append(decode(message.body, Heads))

    await broker.client("other").subscribe("intertie.v1.heads.scheduler", hear)
    async with running(Relay(store, bus, "scheduler", beat_s=BEAT_S).run()):
        await say(store, "a", "b")
        wanted = Heads(service="scheduler", heads=[Head(service="scheduler", noun="probe", epoch=1, number=2)])
        await until(lambda: said[-2:] == [wanted, wanted], "two beats with the last number")


# --- consumers -----------------------------------------------------------------------------------------------------------------------------


class Seen:
    """A handler that notes what it was given."""

    def __init__(self) -> None:
        self.probes: list[tuple[str, int]] = []
        self.metas: list[EventMeta] = []
        self.snapshots = 0

    async def probe(self, event: Probe, meta: EventMeta) -> None:
        self.probes.append((event.probe, event.version))
        self.metas.append(meta)

    async def snapshot(self) -> None:
        self.snapshots += 1


def consumer(bus: MemoryBus, store: Store, seen: Seen) -> EventConsumer:
    return EventConsumer(bus, store, "registry", {Probe: seen.probe}, snapshot=seen.snapshot, beat_s=BEAT_S)


async def test_an_event_reaches_its_handler_with_all_that_was_said_of_it(store: Store, broker: MemoryBroker, bus: MemoryBus) -> None:
    seen, inbox = Seen(), MemoryStore("registry")
    made = consumer(broker.client("registry"), inbox, seen)
    async with running(Relay(store, bus, "scheduler", beat_s=BEAT_S).run()), running(made.run()):
        await say(store, "a", version=4)
        await until(lambda: seen.probes == [("a", 4)], "handled")
        await until(made.ready.is_set, "ready")
    meta = seen.metas[0]
    assert (meta.type, meta.source, meta.entity, meta.number, meta.epoch) == (Probe.TYPE, "/intertie/scheduler", "a", 1, 1)


async def test_types_without_a_handler_are_passed_over_and_not_missed(broker: MemoryBroker, bus: MemoryBus) -> None:
    store, seen = MemoryStore("scheduler"), Seen()

    class Renamed(Probe, frozen=True, kw_only=True):
        TYPE = "io.intertie.probe.renamed.v1"

    made = consumer(broker.client("registry"), MemoryStore("registry"), seen)
    async with running(Relay(store, bus, "scheduler", beat_s=BEAT_S).run()), running(made.run()):
        await store.emit(Renamed(probe="a", version=1))
        await store.emit(OtherProbe(probe="o", version=1))
        await store.emit(Probe(probe="b", version=1))
        await until(lambda: seen.probes == [("b", 1)], "handled")


async def test_a_consumer_that_missed_an_event_asks_for_a_snapshot_by_itself(broker: MemoryBroker, bus: MemoryBus) -> None:
    """LINK D19, D20: the last event before a quiet night is lost with the stream, and nothing follows it. Heads say that it was there."""
    store, seen = MemoryStore("scheduler"), Seen()
    made = consumer(broker.client("registry"), MemoryStore("registry"), seen)
    async with running(made.run()):
        await until(made.ready.is_set, "ready")
        assert seen.snapshots == 1
        heads = Heads(service="scheduler", heads=[Head(service="scheduler", noun="probe", epoch=1, number=1)])
        await _say_heads(bus, heads)
        await _say_heads(bus, heads)
        await until(lambda: seen.snapshots == 2, "a snapshot after two beats")
        await _say_heads(bus, heads)
        await _say_heads(bus, heads)
    assert (seen.snapshots, made.snapshots, store.events) == (2, 2, [])


async def _say_heads(bus: MemoryBus, heads: Heads) -> None:
    await bus.publish("intertie.v1.heads.scheduler", encode(heads))
    await asyncio.sleep(0.03)


@pytest.mark.parametrize(
    "failure",
    [
        Unavailable("bus.no_responder", "nobody there yet"),
        Unauthenticated("claims.expired", "the clocks differ"),
        Refused("bus.too_large", "the answer is too large"),
        IntertieError("internal", "a fault of the other service"),
    ],
    ids=lambda failure: str(failure.code),
)
async def test_a_snapshot_that_fails_is_asked_for_again(broker: MemoryBroker, failure: IntertieError) -> None:
    """Whatever another service answers, this one goes on: its fault must not become ours."""
    calls: list[int] = []

    async def snapshot() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise failure

    made = EventConsumer(
        broker.client("registry"), MemoryStore("registry"), "registry", {Probe: Seen().probe}, snapshot=snapshot, beat_s=BEAT_S
    )
    async with running(made.run()):
        await until(made.ready.is_set, "ready")
    assert len(calls) == 3


async def test_an_event_that_does_not_decode_is_kept_and_told_at_once_and_stops_nothing(
    db: Database, broker: MemoryBroker, bus: MemoryBus
) -> None:
    seen = Seen()
    made = EventConsumer(broker.client("registry"), db, "registry", {Probe: seen.probe}, beat_s=BEAT_S)
    async with running(made.run()):
        await until(made.ready.is_set, "ready")
        await bus.ensure_stream(EVENTS)
        headers = {
            "ce-id": "evt-bad",
            "ce-type": Probe.TYPE,
            "ce-source": "/intertie/scheduler",
            "ce-subject": "a",
            "ce-time": "2026-05-01T00:00:00+00:00",
        }
        subject = "intertie.v1.evt.scheduler.probe.moved._._"
        await bus.append(subject, b'{"version": 1, "probe": 7}', message_id="m1", headers=headers)
        await bus.append(subject, b'{"version": 1, "probe": "good"}', message_id="m2", headers={**headers, "ce-id": "evt-good"})
        await until(lambda: seen.probes == [("good", 1)], "the next is handled")
    (letter,) = await db.open_dead_letters()
    assert (letter.consumer, letter.event_id, letter.tries, letter.body) == ("registry", "evt-bad", 1, b'{"version": 1, "probe": 7}')
    assert "$.probe" in letter.error
    leader_rows = await _pending_types(db)
    assert leader_rows == [FaultReported.TYPE]


async def _pending_types(db: Database) -> list[str]:
    async with db.transaction() as tx:
        return [row["type"] for row in await tx.all("SELECT type FROM outbox")]


async def test_an_event_that_is_never_handled_becomes_a_dead_letter_and_a_fault(broker: MemoryBroker, bus: MemoryBus) -> None:
    """BR-119: after the last try it is kept with its error, not gone without a word."""
    source, inbox = MemoryStore("scheduler"), MemoryStore("registry")

    async def broken(_event: Probe, _meta: EventMeta) -> None:
        raise ZeroDivisionError("always")

    made = EventConsumer(broker.client("registry"), inbox, "registry", {Probe: broken}, beat_s=BEAT_S, backoff_s=(0.01,))
    async with running(Relay(source, bus, "scheduler", beat_s=BEAT_S).run()), running(made.run()):
        await say(source, "a")
        await until(lambda: len(inbox.dead_letters) == 1, "given up")
    (letter,) = inbox.dead_letters
    assert (letter.tries, letter.error) == (8, "ZeroDivisionError: always")
    (fault,) = inbox.events
    assert isinstance(fault, FaultReported)
    assert fault.report.key == f"dead_letter/registry/registry/{Probe.TYPE}"


async def test_an_event_said_again_after_the_window_of_duplicates_is_applied_once(db: Database) -> None:
    """BR-112: a window of two minutes, ten minutes away; the stream takes the second copy for new, the consumer's own list does not."""
    clock = ManualClock()
    broker = MemoryBroker(clock)
    bus, source, applied = broker.client("scheduler"), MemoryStore("scheduler"), list[str]()

    async def apply(event: Probe, meta: EventMeta) -> None:
        async with db.transaction() as tx:
            if await tx.first_time(meta):
                applied.append(event.probe)

    relay = Relay(source, bus, "scheduler", beat_s=BEAT_S)
    made = EventConsumer(broker.client("registry"), db, "registry", {Probe: apply}, beat_s=BEAT_S)
    async with running(relay.run()), running(made.run()):
        await say(source, "e1")
        await until(lambda: made.handled == 1, "the first copy")
        clock.advance(600)
        relay.replay()
        await until(lambda: made.handled == 2, "the second copy")
    assert EVENTS.duplicate_window_s <= 120 and await on_stream(bus) == 2
    assert applied == ["e1"]


async def test_after_a_wipe_and_a_refill_nothing_is_applied_twice(store: Store, broker: MemoryBroker, bus: MemoryBus) -> None:
    """BR-129, invariant 9: every event comes again; the read model does not change."""
    inbox, applied = MemoryStore("registry"), list[str]()

    async def apply(event: Probe, meta: EventMeta) -> None:
        async with inbox.transaction() as tx:
            if await tx.first_time(meta):
                applied.append(event.probe)

    names = [f"p{n}" for n in range(20)]
    relay = Relay(store, bus, "scheduler", beat_s=BEAT_S)
    made = EventConsumer(broker.client("registry"), inbox, "registry", {Probe: apply}, beat_s=BEAT_S)
    async with running(relay.run()), running(made.run()):
        await say(store, *names)
        await until(lambda: made.handled == 20, "handled")
        broker.wipe()
        await until(lambda: made.handled == 40, "handled again")
    assert sorted(applied) == sorted(names)
