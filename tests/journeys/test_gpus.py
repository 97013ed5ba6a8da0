"""Cards fall off the bus, strangers sit on them, drivers cannot say: what a user sees of it, with the real nvidia-ml-py over our own library.

Two sites with A100s: one of two cards, one of a single card.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from tests.fakes.gpus import Rack, has_compiler
from tests.journeys.stack import Stack, running_stack

from intertie.agent.config import node_name
from intertie.bus.nats import NatsBus
from intertie.bus.port import Message
from intertie.contracts.job import AttemptRecord, JobRecord, JobSpec, JobState, Resources, WaitReason
from intertie.contracts.link import LogChunk
from intertie.contracts.site import DeviceState, SitesReply
from intertie.contracts.telemetry import DeviceSample, decode_sample, telemetry_subject
from intertie.ids import JobId

pytestmark = [
    pytest.mark.skipif(not has_compiler(), reason="no gcc here to build the library that plays the driver"),
    pytest.mark.asyncio(loop_scope="module"),
]

MODEL = "A100-SXM4-80GB"
SHOW = '#!/bin/sh\nprintf \'%s\\n\' "$CUDA_VISIBLE_DEVICES" "$CUDA_DEVICE_ORDER"\n'
HOLD = "#!/bin/sh\necho holding\nwhile [ ! -e $1 ]; do sleep 0.1; done\n"


@dataclass
class World:
    """Two sites and their cards."""

    stack: Stack
    pair: Rack
    single: Rack

    def racks(self) -> dict[str, Rack]:
        return {"site-pair": self.pair, "site-single": self.single}

    def card_of(self, attempt: AttemptRecord) -> tuple[Rack, int]:
        """Where an attempt of one card ran."""
        rack = self.racks()[attempt.site]
        return rack, rack.uuids.index(attempt.devices[0])

    def states(self) -> dict[str, DeviceState]:
        """Every card as the registry shows it."""
        reply = self.stack.admin.get("/v1/sites", SitesReply)
        return {seen.device.id: seen.state for pool in reply.pools if pool.inventory for seen in pool.inventory.devices}

    def occupy_all(self, pid: int) -> None:
        """A process on every card; on a lost one nobody sees it."""
        for rack in self.racks().values():
            for card in range(len(rack.uuids)):
                rack.occupy(card, pid)

    async def until_states(self, *wanted: DeviceState) -> None:
        """Until the hub shows exactly these states of cards, in any order."""
        await self.stack.until(lambda: sorted(self.states().values()) == sorted(wanted), what=f"the hub sees {sorted(wanted)}")

    async def ran(self, spec: JobSpec) -> JobRecord:
        """Submit and see it end well."""
        job = await self.stack.do(lambda: self.stack.submit(spec))
        record = await self.stack.until(lambda: self.stack.ended(job), what=f"{spec.name} ends")
        assert record.state is JobState.SUCCEEDED, record.attempts
        return record

    async def explained(self, job: JobId, *rules: str) -> str:
        """What `intertie explain` prints, once it names these rules."""

        def asked() -> str | None:
            said = explain(self.stack, job)
            return said if all(f"[{rule}]" in said for rule in rules) else None

        return await self.stack.until(asked, what=f"explain names {rules}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation() -> AsyncIterator[World]:
    """One for all tests here: each begins with every card well."""
    async with running_stack() as stack:
        pair = await stack.do(lambda: Rack(stack.folder / "cards-pair", [MODEL] * 2))
        single = await stack.do(lambda: Rack(stack.folder / "cards-single", [MODEL]))
        world = World(stack, pair, single)
        for name, rack in world.racks().items():
            await stack.add_site(name, profile=rack.profile(), env=rack.env)
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(federation: World) -> World:
    for rack in federation.racks().values():
        for card in range(len(rack.uuids)):
            rack.heal(card)
    await federation.until_states(*[DeviceState.FREE] * 3)
    return federation


def explain(stack: Stack, job: JobId) -> str:
    """`intertie explain`, as a user runs it."""
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(stack.folder), "INTERTIE_URL": stack.user.url}
    token = stack.folder / "user.token"
    if not token.exists():
        token.touch(mode=0o600)
        token.write_text(stack.user._token, encoding="ascii")
    command = [sys.executable, "-m", "intertie.cli", "explain", job]
    return subprocess.run(
        command, env={**env, "INTERTIE_TOKEN_FILE": str(token)}, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def one_card(name: str, script: str = SHOW, *args: str) -> JobSpec:
    return JobSpec(name=name, script=script, args=list(args), wall_s=120, resources=Resources(gpus=1, gpu_model="A100"))


def log_of(stack: Stack, record: JobRecord) -> list[str]:
    return stack.user.get(f"/v1/jobs/{record.job}/logs", LogChunk).text.splitlines()


@contextlib.contextmanager
def stranger() -> Iterator[int]:
    """A process of nobody's job."""
    with subprocess.Popen(["/bin/sleep", "300"]) as child:
        try:
            yield child.pid
        finally:
            child.kill()


async def test_a_job_sees_exactly_the_cards_of_its_allocation(world: World) -> None:
    one, two = await asyncio.gather(
        world.ran(one_card("one")),
        world.ran(JobSpec(name="two", script=SHOW, wall_s=60, resources=Resources(gpus=2, gpu_model="A100"))),
    )
    for record in (one, two):
        attempt = record.attempts[-1]
        rack = world.racks()[attempt.site]
        visible, order = await world.stack.do(lambda record=record: log_of(world.stack, record))  # type: ignore[misc]  # bound now
        assert visible.split(",") == list(attempt.devices)
        assert set(attempt.devices) <= set(rack.uuids)
        assert order == "PCI_BUS_ID"
    assert sorted(two.attempts[-1].devices) == sorted(world.pair.uuids), "only one site has two"


async def test_a_lost_card_sends_the_next_job_elsewhere_and_a_healed_one_takes_who_waited(world: World) -> None:
    first = (await world.ran(one_card("first"))).attempts[-1]
    assert first.site == "site-single", "the smallest hole that fits"
    rack, number = world.card_of(first)
    rack.lose(number)
    await world.stack.until(lambda: world.states()[first.devices[0]] is DeviceState.LOST, what="the hub sees the lost card")
    others = {card: state for card, state in world.states().items() if card != first.devices[0]}
    assert list(others.values()) == [DeviceState.FREE] * 2, "BR-096: one lost card hides no other"

    second = await world.ran(one_card("second"))
    assert second.attempts[-1].devices[0] in others
    said = await world.stack.do(lambda: explain(world.stack, second.job))
    assert "site-pair/gpu" in said
    assert f"site-single/gpu: 0 healthy of 1: {first.devices[0]} lost [devices_unhealthy]" in said

    # The driver never told this agent what it was called.
    await world.stack.kill_agent(first.site)
    with stranger() as pid:
        world.occupy_all(pid)
        await world.until_states(DeviceState.LOST, DeviceState.FOREIGN, DeviceState.FOREIGN)
        third = await world.stack.do(lambda: world.stack.submit(one_card("third")))
        said = await world.explained(third, "devices_unhealthy")
        assert f"{first.devices[0]} lost" in said
        assert all(f"{card} foreign" in said for card in others)
        waiting = world.stack.job(third).waiting
        assert waiting is not None and waiting.reason is WaitReason.DEVICES_UNHEALTHY
        assert {(row.site, row.rule) for row in waiting.rejections} == {(name, "devices_unhealthy") for name in world.racks()}

        rack.heal(number)
        record = await world.stack.until(lambda: world.stack.ended(third), what="the waiting job runs on the healed card")
        assert record.state is JobState.SUCCEEDED
        assert record.attempts[-1].devices == first.devices


async def test_our_own_process_on_its_card_is_no_stranger_and_what_cannot_be_read_is_unknown(world: World) -> None:
    go = world.stack.folder / "go"
    world.pair.refuse(0, "util")  # A card in MIG mode, BR-095.
    world.pair.refuse(1, "procs")
    await world.until_states(DeviceState.FREE, DeviceState.UNKNOWN, DeviceState.FREE)
    job = await world.stack.do(lambda: world.stack.submit(one_card("holder", HOLD, str(go))))
    record = await world.stack.until(lambda: running(world.stack, job), what="the job runs")
    attempt = record.attempts[-1]
    rack, number = world.card_of(attempt)
    assert attempt.devices[0] != world.pair.uuids[1], "a card that cannot say who uses it gets no work"

    rack.occupy(number, int(attempt.native_id))
    seen = await sample_of(world, attempt, lambda device: device.our_processes == 1)
    assert (seen.state, seen.foreign_processes) == (DeviceState.OURS, 0)
    unread = await sample_of(world, attempt, lambda device: "utilisation" in device.errors, site="site-pair")
    assert unread.utilisation_percent is None, "unknown, and never 0"
    assert unread.temperature_c == 41

    go.touch()
    ended = await world.stack.until(lambda: world.stack.ended(job), what="the job ends")
    assert ended.state is JobState.SUCCEEDED


def running(stack: Stack, job: JobId) -> JobRecord | None:
    record = stack.job(job)
    return record if record.state is JobState.RUNNING else None


async def sample_of(world: World, attempt: AttemptRecord, true: Callable[[DeviceSample], bool], site: str = "") -> DeviceSample:
    """The next live telemetry of a device for which something is true, as the scheduler hears it."""
    found: asyncio.Future[DeviceSample] = asyncio.get_running_loop().create_future()

    async def heard(message: Message) -> None:
        for device in decode_sample(message.body).devices:
            if true(device) and not found.done():
                found.set_result(device)

    bus = await NatsBus.connect([world.stack.layout.bus_url], name="test", credentials=world.stack.layout.creds_file("scheduler"))
    try:
        await bus.subscribe(telemetry_subject(site or attempt.site, node_name()), heard)
        async with asyncio.timeout(20):
            return await found
    finally:
        await bus.close()
