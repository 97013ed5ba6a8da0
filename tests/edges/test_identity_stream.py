"""The event stream is identity's to make: what a stolen credential of another service cannot do, and how a lost stream comes back."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from tests.edges.conftest import RunningHub, new_hub
from tests.edges.store_world import Probe, running, until

from intertie.bus.memory import MemoryBroker
from intertie.bus.nats import NatsBus
from intertie.clock import ManualClock, SystemClock
from intertie.contracts.base import EVENT_STREAM
from intertie.embedded.hub import SERVICES, running_hub_bus
from intertie.errors import Unavailable
from intertie.identity.memory import MemoryIdentityStore
from intertie.identity.stream import MUTE_AGAIN_S, StreamMaker
from intertie.store import EVENTS, MemoryStore, Relay

STOLEN = [service for service in SERVICES if service != "identity"]


@pytest.mark.parametrize("service", STOLEN)
async def test_a_stolen_credential_can_neither_make_nor_change_nor_delete_the_stream(operator_hub: RunningHub, service: str) -> None:
    layout = operator_hub.layout
    thief = await NatsBus.connect(layout.bus_url, name=service, credentials=layout.creds_file(service))
    try:
        before = await thief.stream_state(EVENT_STREAM)
        for verb in ("CREATE", "UPDATE", "DELETE", "PURGE", "SNAPSHOT", "RESTORE", "MSG.DELETE"):
            with pytest.raises(Unavailable) as refused:
                await thief.request(f"$JS.API.STREAM.{verb}.{EVENT_STREAM}", b"{}", timeout_s=5)
            assert refused.value.code == "bus.denied", verb
        assert before is not None and await thief.stream_state(EVENT_STREAM) == before
    finally:
        await thief.close()


async def test_a_lost_stream_is_made_again_by_identity_and_filled_by_a_relay_that_may_not(short_folder: Path) -> None:
    layout = await asyncio.to_thread(new_hub, short_folder)
    store = MemoryStore("scheduler")
    with running_hub_bus(layout) as server:
        identity = await NatsBus.connect(layout.bus_url, name="identity", credentials=layout.creds_file("identity"))
        scheduler = await NatsBus.connect(layout.bus_url, name="scheduler", credentials=layout.creds_file("scheduler"))
        relay = Relay(store, scheduler, "scheduler", beat_s=0.1)

        async def holds(count: int) -> bool:
            try:
                state = await scheduler.stream_state(EVENT_STREAM)
            except Unavailable:
                return False
            return state is not None and state.messages >= count

        try:
            maker = StreamMaker(identity, MemoryIdentityStore(), SystemClock(), epoch=1, beat_scale=0.1)
            async with running(relay.run()):
                await store.emit(Probe(probe="a", version=1))
                async with running(maker.run()):
                    await until(lambda: holds(1), "the event on the stream that identity made")
                    server.kill()
                    shutil.rmtree(server.jetstream_folder / "jetstream")
                    await asyncio.to_thread(server.start)
                    await until(lambda: holds(1), "the event on the next stream")
                later = StreamMaker(identity, MemoryIdentityStore(), SystemClock(), epoch=60_000_000, beat_scale=0.1)
                before = await scheduler.stream_state(EVENT_STREAM)
                async with running(later.run()):
                    await until(lambda: relay.refills >= 2, "a raised epoch to make the stream anew, and the relay to fill it")
                    await until(lambda: holds(1), "the event on the third")
                after = await scheduler.stream_state(EVENT_STREAM)
                assert before is not None and after is not None
                assert (before.epoch, after.epoch) == (0, 60_000_000) and after.created != before.created
        finally:
            await scheduler.close()
            await identity.close()


async def test_who_says_that_the_stream_is_mute_costs_one_event_and_nothing_else() -> None:
    """A lie is disproved by identity's own relay, which meets no silence and deletes nothing."""
    broker, clock = MemoryBroker(), ManualClock()
    store = MemoryIdentityStore(clock=clock)
    bus = broker.client("identity")
    before = await bus.ensure_stream(EVENTS)
    maker = StreamMaker(bus, store, clock, epoch=1)
    listening = await maker.listen()
    liar = broker.client("liar")
    for _ in range(5):
        await liar.publish("intertie.v1.mute.metering", b"")
    await until(lambda: len(store.memory.events) == 1, "one fault")
    clock.advance(MUTE_AGAIN_S)
    await liar.publish("intertie.v1.mute.metering", b"")
    await until(lambda: len(store.memory.events) == 2, "another, later")
    await listening.close()
    assert (await bus.ensure_stream(EVENTS)).created == before.created
