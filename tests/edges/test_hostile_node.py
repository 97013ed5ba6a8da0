"""A hostile or broken machine at the head's port, before and after it is a node: what it says is bounded, and nothing of it stops the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from tests.fakes.agents import attempt
from tests.fakes.pools import CLOCK, HeadWorld, head_world, until

from intertie.agent.core.model import Attempt, StartedRecord
from intertie.agent.machines.gate import STRANGERS
from intertie.agent.machines.wire import Frame, dial
from intertie.contracts.base import encode
from intertie.contracts.job import ResultRef
from intertie.contracts.link import Ended, ExitSeen, Lane, Started
from intertie.contracts.machines import JoinNode
from intertie.ids import Digest, SiteName


@pytest.fixture
async def world(short_folder: Path) -> AsyncIterator[HeadWorld]:
    async with head_world(short_folder) as made:
        await made.add_node("n1")
        yield made


async def test_machines_that_dial_and_say_nothing_keep_nobody_out(world: HeadWorld) -> None:
    silent = [await dial(f"127.0.0.1:{world.port}", world.gate.fingerprint) for _ in range(STRANGERS + 8)]
    raw = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(STRANGERS)]
    await world.add_node("n2")
    assert world.head.reachable(SiteName("n2"))
    for line in silent:
        await line.closed()
    for _, writer in raw:
        writer.close()


@pytest.mark.parametrize("slots", [-1, 10**9, 2**63])
async def test_a_machine_with_more_slots_than_any_has_is_no_node(world: HeadWorld, slots: int) -> None:
    token, _ = await world.gate.make_token(None, 1)
    line = await dial(f"127.0.0.1:{world.port}", world.gate.fingerprint)
    await line.receive()
    await line.send(Frame("join", 0, "", encode(JoinNode(token=token, node=SiteName("n9"), key="U", slots=slots))))
    said = await line.receive()
    assert (said.kind, said.subject) == ("refused", "contract.invalid")
    await line.closed()
    assert SiteName("n9") not in world.head.nodes


async def say(world: HeadWorld, said: Started | Ended) -> None:
    """By a node that writes into its journal what it likes."""
    site = world.nodes["n1"][0].site
    await site.append(lambda following: {Lane.SCHEDULER: [msgspec.structs.replace(said, seq=following[Lane.SCHEDULER])]})


def about(one: Attempt, moment: datetime) -> dict[str, object]:
    return {"seq": 1, "at": moment, "attempt": one.id, "job": one.job, "epoch": one.epoch, "generation": one.generation, "started": moment}


FAR = (datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC))


@pytest.mark.parametrize("moment", FAR, ids=str)
@pytest.mark.parametrize("digest", ["./../../../tmp/x", "/etc/shadow", "sha256:" + "0" * 64])
async def test_what_a_node_says_of_a_run_is_no_longer_than_can_be_and_names_no_file_of_the_head(
    world: HeadWorld, moment: datetime, digest: str
) -> None:
    one = attempt("sleep 600\n", devices=("n1.slot-1",))
    await world.adapter.prepare(one, None)
    begun = await world.adapter.start(one)
    assert isinstance(begun, StartedRecord)
    told = {"outcome": "succeeded", "cause": None, "exit_code": 0, "signal": None, "reason": "", "ended": moment, "ran_us": 2**62}
    counts = {"segments": 1, "quantity_milli_us": 1, "last_metering_seq": 1, "seen": ExitSeen(certain=True)}
    result = ResultRef(digest=Digest(digest), size=2**62, files=1)
    await say(world, Ended(**about(one, moment), **told, **counts, result=result))  # type: ignore[arg-type]  # its fields
    async with asyncio.timeout(60):
        seen = await world.adapter.ended(one)
    assert seen.code == 0 and 0 < seen.ran_us < 600_000_000
    assert world.head.works[one.id].result is None and await world.adapter.pack(one) is None


@pytest.mark.parametrize("moment", FAR, ids=str)
async def test_a_start_is_no_moment_until_it_can_be_one(world: HeadWorld, moment: datetime) -> None:
    one = attempt("sleep 600\n", devices=("n1.slot-1",))
    await world.adapter.prepare(one, None)
    world.nodes["n1"][0].site.may_start = lambda: False
    starting = asyncio.create_task(world.adapter.start(one))
    await until(lambda: one.id in world.head.works)
    await say(world, Started(**about(one, moment), native_id="1", account="", devices=[]))  # type: ignore[arg-type]  # its fields
    async with asyncio.timeout(60):
        begun = await starting
    assert isinstance(begun, StartedRecord) and 0 <= begun.utc_ns <= CLOCK.now().timestamp() * 1e9
