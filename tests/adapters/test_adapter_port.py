"""One suite for every adapter: what the agent may rely on, whatever runs the work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.fakes.agents import GUEST, attempt
from tests.fakes.pools import PlainNode, head_world

from intertie.agent.adapters.fake import FakeAdapter
from intertie.agent.adapters.fake_cluster import FakeCluster
from intertie.agent.adapters.fake_node import Shell
from intertie.agent.adapters.files import LocalFiles
from intertie.agent.adapters.port import Adapter, Presence
from intertie.agent.adapters.process import ProcessAdapter, find_cgroups
from intertie.agent.adapters.queue import QueueAdapter
from intertie.agent.core.attempts import Exit
from intertie.agent.core.leases import Deadline, deadline
from intertie.agent.core.model import Moment, StartedRecord
from intertie.clock import SystemClock, kernel_boot
from intertie.contracts.link import Sealed

CLOCK = SystemClock()


@pytest.fixture(params=["fake", "queue", "queue-shell", "process", "process-cgroup", "machines-own", "machines-node"])
async def adapter(request: pytest.FixtureRequest, short_folder: Path) -> AsyncIterator[Adapter]:
    match request.param:
        case "fake":
            yield FakeAdapter(SystemClock(), accounts=frozenset({GUEST}) if GUEST else frozenset())
        case "queue" | "queue-shell":
            accounts = frozenset({GUEST}) if GUEST else frozenset()
            node = Shell() if request.param == "queue-shell" else None
            cluster = FakeCluster(CLOCK, accounts=accounts, node=node)
            files = LocalFiles(short_folder / "shared", look_s=0.05)
            yield QueueAdapter(short_folder / "jobs", cluster, files, CLOCK, every_s=0.2)
            await cluster.close()
        case "process":
            yield ProcessAdapter(short_folder / "jobs")
        case "machines-own":
            async with head_world(short_folder) as world:
                yield world.adapter
        case "machines-node":
            # Every device is the one node's: what the suite asks of an adapter crosses a real socket.
            async with head_world(short_folder, node_kind=PlainNode) as world:
                world.node_of = lambda device: "n1"  # type: ignore[method-assign]
                await world.add_node("n1")
                yield world.adapter
        case _:
            if (groups := find_cgroups()) is None:
                pytest.skip("no cgroup v2 that we may write to")
            yield ProcessAdapter(short_folder / "jobs", cgroups=groups)


ENDS = [
    ("succeeds", "echo hello\nexit 0\n", {"code": 0}),
    ("keeps its exit code", "exit 7\n", {"code": 7}),
    ("has line ends of another system", "#!/bin/sh\r\necho hello\r\nexit 3\r\n", {"code": 3}),
    ("dies of a signal", "kill -9 $$\n", {"signal": 9}),
    ("has no interpreter", "#!/no/such/interpreter\nexit 0\n", {"refused_errno": 2}),
]


@pytest.mark.parametrize(("what", "script", "expected"), ENDS, ids=[row[0] for row in ENDS])
async def test_work_that_ends_says_how(adapter: Adapter, what: str, script: str, expected: dict[str, int]) -> None:
    work = attempt(script)
    await adapter.prepare(work, None)
    started = await adapter.start(work)
    assert isinstance(started, StartedRecord)
    end = await adapter.ended(work)
    assert end.certain and {name: getattr(end, name) for name in expected} == expected


async def test_line_ends_of_another_system_are_no_part_of_what_a_script_says(adapter: Adapter) -> None:
    """BR-044: neither of its interpreter's name nor of its words."""
    work = attempt("#!/bin/sh\r\necho hello\r\n")
    await adapter.prepare(work, None)
    assert isinstance(await adapter.start(work), StartedRecord)
    end = await adapter.ended(work)
    assert (end.code, (await adapter.log(work.id, 0, 100)).data) == (0, b"hello\n")


async def test_the_end_of_a_run_is_its_start_plus_boot_time(adapter: Adapter) -> None:
    work = attempt("sleep 0.2\nexit 0\n")
    await adapter.prepare(work, None)
    assert isinstance(await adapter.start(work), StartedRecord)
    end = await adapter.ended(work)
    assert end.ran_us >= 200_000


async def test_a_second_start_is_the_first_one_again(adapter: Adapter) -> None:
    """BR-046, without a native queue: before a start is tried again it is looked for by its own name."""
    work = attempt("sleep 0.1\nexit 0\n")
    await adapter.prepare(work, None)
    first = await adapter.start(work)
    assert await adapter.start(work) == first
    await adapter.ended(work)


async def test_it_is_alive_from_its_start_until_its_end_is_recorded(adapter: Adapter) -> None:
    """Usage is cut at a border only of what surely still runs."""
    work = attempt("sleep 60\n")
    assert not await adapter.alive(work.id)
    await adapter.prepare(work, None)
    assert not await adapter.alive(work.id)
    assert isinstance(await adapter.start(work), StartedRecord)
    assert await adapter.alive(work.id)
    await adapter.stop(work.id, 1)
    await adapter.ended(work)
    assert not await adapter.alive(work.id)


async def test_a_stop_ends_it_and_is_told_apart_from_its_own_end(adapter: Adapter) -> None:
    work = attempt("sleep 30\nexit 0\n")
    await adapter.prepare(work, None)
    await adapter.start(work)
    await adapter.stop(work.id, 1)
    assert (await adapter.ended(work)).stopped_for == "asked"


async def test_the_wall_limit_ends_it(adapter: Adapter) -> None:
    work = attempt("sleep 30\n", wall_s=1)
    await adapter.prepare(work, None)
    await adapter.start(work)
    assert (await adapter.ended(work)).stopped_for == "wall_limit"


async def test_what_was_fenced_never_starts(adapter: Adapter) -> None:
    work = attempt("exit 0\n")
    await adapter.prepare(work, None)
    assert await adapter.presence(work.id) is Presence.PREPARED
    assert await adapter.fence(work.id)
    assert isinstance(await adapter.start(work), Exit)


async def test_what_was_fenced_before_it_was_prepared_never_starts(adapter: Adapter) -> None:
    """Its folder may be under way to being made at that moment."""
    work = attempt("exit 0\n")
    assert await adapter.fence(work.id)
    await adapter.prepare(work, None)
    assert isinstance(await adapter.start(work), Exit)
    assert await adapter.fence(work.id)


async def test_what_began_cannot_be_fenced(adapter: Adapter) -> None:
    work = attempt("exit 0\n")
    await adapter.prepare(work, None)
    await adapter.start(work)
    assert not await adapter.fence(work.id)
    assert await adapter.presence(work.id) is Presence.BEGUN
    await adapter.ended(work)


async def test_logs_are_read_by_offset(adapter: Adapter) -> None:
    work = attempt("echo one\necho two\n")
    await adapter.prepare(work, None)
    await adapter.start(work)
    await adapter.ended(work)
    chunk = await adapter.log(work.id, 4, 3)
    assert (chunk.data, chunk.offset, chunk.total) == (b"two", 4, 8)
    assert (await adapter.log(work.id, 99, 3)).offset == 8


async def test_declared_outputs_are_packed_and_others_stay(adapter: Adapter) -> None:
    work = attempt("echo 42 > answer.txt\necho no > other.log\n", outputs=["*.txt"])
    await adapter.prepare(work, None)
    await adapter.start(work)
    await adapter.ended(work)
    packed = await adapter.pack(work)
    assert packed is not None and packed.files == 1 and adapter.result(work.id).stat().st_size == packed.size


async def test_outputs_that_do_not_exist_are_none(adapter: Adapter) -> None:
    work = attempt("exit 0\n", outputs=["*.txt"])
    await adapter.prepare(work, None)
    await adapter.start(work)
    await adapter.ended(work)
    assert await adapter.pack(work) is None


async def test_what_is_forgotten_is_absent(adapter: Adapter) -> None:
    work = attempt("exit 0\n")
    assert await adapter.presence(work.id) is Presence.ABSENT
    await adapter.prepare(work, None)
    await adapter.start(work)
    await adapter.ended(work)
    await adapter.forget(work.id)
    assert await adapter.presence(work.id) is Presence.ABSENT


async def test_what_is_trimmed_keeps_its_log_and_nothing_else(adapter: Adapter) -> None:
    work = attempt("echo kept\necho 1 > a.txt\n", outputs=["a.txt"])
    await adapter.prepare(work, None)
    await adapter.start(work)
    await adapter.ended(work)
    await adapter.pack(work)
    await adapter.trim(work.id)
    assert (await adapter.log(work.id, 0, 100)).data == b"kept\n"
    assert not adapter.result(work.id).exists()


async def test_leased_work_ends_with_its_lease_and_a_renewal_moves_it(adapter: Adapter) -> None:
    work = attempt("sleep 60\n", lease_s=60)
    await adapter.prepare(work, None)
    assert adapter.self_stop and await adapter.deadline(work.id) is None
    first, second = lease(60), lease(0.4)
    await adapter.renew(work.id, first)
    assert await adapter.deadline(work.id) == first
    assert isinstance(await adapter.start(work), StartedRecord)
    await adapter.renew(work.id, second)
    assert (await adapter.ended(work)).stopped_for == "lease_ended"


def lease(seconds: float) -> Deadline:
    """So long from now."""
    return deadline(seconds, CLOCK.boot_s(), Moment(CLOCK.now(), CLOCK.boot_s(), kernel_boot()))


async def test_what_was_prepared_is_found_until_it_is_trimmed_or_fenced(adapter: Adapter) -> None:
    """BR-056: the site's own record of what it ran outlives its books."""
    kept, fenced = attempt("exit 0\n", offer=Sealed(payload="{}", signer="s", signature="-")), attempt("exit 0\n")
    for work in (kept, fenced):
        await adapter.prepare(work, None)
    assert await adapter.fence(fenced.id)
    assert await adapter.found() == [kept]
    await adapter.start(kept)
    await adapter.ended(kept)
    assert await adapter.found() == [kept]
    await adapter.trim(kept.id)
    assert await adapter.found() == []
