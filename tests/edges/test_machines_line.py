"""Head and node over a real line: who is let in, what a cut, a kill and a return do to work, and that nothing runs twice."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pwd
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.fakes.agents import GUEST, attempt
from tests.fakes.pools import CLOCK, HeadWorld, head_world, until
from tests.journeys.wires import Relay

from intertie.agent.adapters.port import Presence
from intertie.agent.core.attempts import Exit
from intertie.agent.core.leases import deadline
from intertie.agent.core.model import Attempt, LocalWork, Moment, StartedRecord
from intertie.agent.core.placed import removed
from intertie.agent.machines.service import NodeFolder, join
from intertie.agent.machines.wire import Frame, dial, make_certificate, make_token
from intertie.clock import kernel_boot
from intertie.contracts.job import WorkRef
from intertie.contracts.telemetry import NodeSample, encode_sample
from intertie.errors import IntertieError, Refused, Unavailable
from intertie.ids import Digest, SiteName
from intertie.pack import pack_folder

ON_NODE = ("n1.slot-1",)


@pytest.fixture
async def world(short_folder: Path) -> AsyncIterator[HeadWorld]:
    async with head_world(short_folder) as made:
        await made.add_node("n1")
        yield made


def work(script: str, **fields: object) -> Attempt:
    return attempt(script, devices=ON_NODE, **fields)  # type: ignore[arg-type]  # the builder's own fields


def counted(folder: Path) -> str:
    """A script that notes each time it is run."""
    return f"#!/bin/sh\necho ran >> {folder}/count\nwhile [ ! -e {folder}/go ]; do sleep 0.05; done\nexit 7\n"


def open_folder(parent: Path) -> Path:
    made = parent / "shared"
    made.mkdir()
    made.chmod(0o777)
    return made


async def started(world: HeadWorld, one: Attempt) -> StartedRecord:
    await world.adapter.prepare(one, None)
    begun = await world.adapter.start(one)
    assert isinstance(begun, StartedRecord), begun
    return begun


# --- who is let in -----------------------------------------------------------------------------------------------------------------------


async def refused(joining: object) -> str:
    with pytest.raises(IntertieError) as error:
        await joining  # type: ignore[misc]  # a coroutine
    return error.value.code


async def test_a_token_lets_in_one_machine_under_one_name(world: HeadWorld, short_folder: Path) -> None:
    head = f"127.0.0.1:{world.port}"
    token, _ = await world.gate.make_token(SiteName("n7"), 1)
    assert await refused(join(NodeFolder(short_folder / "a"), head=head, token=token, node="n8", slots=1)) == "machines.token_name"
    first = NodeFolder(short_folder / "b")
    made = await join(first, head=head, token=token, node="n7", slots=1)
    assert made.node == "n7" and (await join(first, head=head, token=token, node="n7", slots=1)) == made, "a lost answer is asked for again"
    assert await refused(join(NodeFolder(short_folder / "c"), head=head, token=token, node="n7", slots=1)) in (
        "machines.token",
        "machines.name_taken",
    )
    other, _ = await world.gate.make_token(None, 1)
    assert await refused(join(NodeFolder(short_folder / "d"), head=head, token=other, node="n1", slots=1)) == "machines.name_taken"
    assert await refused(join(NodeFolder(short_folder / "e"), head=head, token=other, node="local", slots=1)) == "name.reserved"
    assert await refused(join(NodeFolder(short_folder / "f"), head=head, token=token[:-1] + "x", node="n9", slots=1)) == "machines.token"


async def test_changes_of_a_node_that_meet_undo_none_of_each_other(world: HeadWorld) -> None:
    """Its owner sets it aside while its cards are learned and its line is lost."""
    name = SiteName("n1")
    await asyncio.gather(
        world.head.note_node(name, cordoned=True, reason="mine"),
        world.head.note_node(name, version="9"),
        world.head.note_node(name, last_word=CLOCK.now()),
    )
    await world.head.open()
    kept = world.head.nodes[name]
    assert (kept.cordoned, kept.reason, kept.version, kept.last_word is not None) == (True, "mine", "9", True)


async def test_who_waits_for_a_line_to_close_can_still_be_told_to_go(world: HeadWorld) -> None:
    line = await dial(f"127.0.0.1:{world.port}", world.gate.fingerprint)
    closing = asyncio.create_task(line.closed())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing}, timeout=30)
    assert closing.cancelled()


async def test_a_machine_that_is_no_head_is_told_nothing(world: HeadWorld, short_folder: Path) -> None:
    """The fingerprint in the token is another's: not even a greeting is said."""
    with pytest.raises(Refused) as error:
        await dial(f"127.0.0.1:{world.port}", "0" * 64)
    assert error.value.code == "machines.stranger"
    forged = make_token(b"x" * 24, "0" * 64)
    assert await refused(join(NodeFolder(short_folder / "x"), head=f"127.0.0.1:{world.port}", token=forged, node="n9", slots=1)) == (
        "machines.stranger"
    )
    with pytest.raises(Unavailable):
        await dial("127.0.0.1:1", "0" * 64)


async def test_seeds_are_private_and_a_certificate_is_made_once(short_folder: Path) -> None:
    make_certificate(short_folder, "lab", CLOCK.now())
    before = (short_folder / "tls.pem").read_bytes()  # noqa: ASYNC240  # a few bytes
    make_certificate(short_folder, "lab", CLOCK.now())
    assert (short_folder / "tls.pem").read_bytes() == before  # noqa: ASYNC240
    assert (short_folder / "tls.key").stat().st_mode & 0o077 == 0  # noqa: ASYNC240


# --- cuts and returns --------------------------------------------------------------------------------------------------------------------


async def test_a_head_that_dies_and_returns_knows_what_its_node_runs(world: HeadWorld, short_folder: Path) -> None:
    shared = open_folder(short_folder)
    one = work(counted(shared))
    begun = await started(world, one)
    await world.close()
    await world.open()
    assert await world.adapter.presence(one.id) is Presence.BEGUN
    assert await world.adapter.start(one) == begun, "the start is found, not made"
    assert not await world.adapter.fence(one.id)
    (shared / "go").touch()
    end = await world.adapter.ended(one)
    assert (end.code, (shared / "count").read_text(encoding="ascii")) == (7, "ran\n")  # noqa: ASYNC240


async def test_an_end_while_the_head_is_dead_is_told_when_it_returns(world: HeadWorld, short_folder: Path) -> None:
    shared = open_folder(short_folder)
    one = work(counted(shared))
    await started(world, one)
    await world.close()
    (shared / "go").touch()
    node, _ = world.nodes["n1"]
    await until(lambda: node.site.books.attempts[one.id].ended is not None)
    await world.open()
    end = await world.adapter.ended(one)
    assert (end.certain, end.code) == (True, 7)


async def test_a_node_that_dies_and_returns_loses_no_exit_code(world: HeadWorld, short_folder: Path) -> None:
    shared = open_folder(short_folder)
    one = work(counted(shared))
    await started(world, one)
    await world.stop_node("n1")
    await until(lambda: not world.head.reachable(SiteName("n1")))
    assert not await world.adapter.alive(one.id), "silence says nothing, not even that it runs"
    (shared / "go").touch()
    await world.start_node("n1")
    end = await world.adapter.ended(one)
    assert (end.code, (shared / "count").read_text(encoding="ascii")) == (7, "ran\n")  # noqa: ASYNC240


async def test_a_node_whose_journal_is_gone_still_tells_what_its_folders_prove(world: HeadWorld, short_folder: Path) -> None:
    shared = open_folder(short_folder)
    one = work(counted(shared))
    await started(world, one)
    await world.stop_node("n1")
    for file in (short_folder / "n1").glob("journal.db*"):  # noqa: ASYNC240
        file.unlink()
    await world.start_node("n1")
    (shared / "go").touch()
    end = await world.adapter.ended(one)
    assert (end.code, (shared / "count").read_text(encoding="ascii")) == (7, "ran\n")  # noqa: ASYNC240


async def test_a_head_that_lost_its_own_file_learns_from_its_nodes_what_they_run(world: HeadWorld, short_folder: Path) -> None:
    """Its desk knows that the work runs; the node joins again with the key that it had, and says all of it once more."""
    shared = open_folder(short_folder)
    one = work(counted(shared))
    begun = await started(world, one)
    await world.close()
    for file in short_folder.glob("machines.db*"):  # noqa: ASYNC240
        file.unlink()
    await world.open()
    waiting = asyncio.create_task(world.adapter.ended(msgspec.structs.replace(one, started=begun)))
    token, _ = await world.gate.make_token(None, 1)
    await join(NodeFolder(short_folder / "n1"), head=f"127.0.0.1:{world.port}", token=token, node="n1", slots=4)
    await until(lambda: world.head.reachable(SiteName("n1")))
    await until(lambda: one.id in world.head.works)
    assert not waiting.done()
    (shared / "go").touch()
    end = await waiting
    assert (end.certain, end.code, (shared / "count").read_text(encoding="ascii")) == (True, 7, "ran\n")  # noqa: ASYNC240


async def test_a_head_whose_file_was_put_back_begins_a_new_epoch_and_its_nodes_hear_it(world: HeadWorld, short_folder: Path) -> None:
    """The numbers that it would give are on the node's disk already: without a new epoch every offer would be taken for a repeat, for ever."""
    await world.close()
    before = (short_folder / "machines.db").read_bytes()  # noqa: ASYNC240
    await world.open()
    for _ in range(2):
        one = work("exit 0\n")
        await started(world, one)
        await world.adapter.ended(one)
    epoch = world.head.epoch
    await world.close()
    for file in short_folder.glob("machines.db-*"):  # noqa: ASYNC240
        file.unlink()
    (short_folder / "machines.db").write_bytes(before)  # noqa: ASYNC240
    await world.open()
    again = work("exit 5\n")
    await started(world, again)
    assert (await world.adapter.ended(again)).code == 5
    assert world.head.epoch > epoch


async def test_what_was_fenced_while_its_node_was_away_never_starts_there(world: HeadWorld, short_folder: Path) -> None:
    """BR-058, the other way round: what we call not started has no process, and gets none when its node returns."""
    shared = open_folder(short_folder)
    one = work(counted(shared))
    await world.stop_node("n1")
    await world.adapter.prepare(one, None)
    starting = asyncio.create_task(world.adapter.start(one))
    await until(lambda: world.head.works[one.id].offer_number > 0)
    assert await world.adapter.fence(one.id)
    assert isinstance(await starting, Exit)
    await world.start_node("n1")
    await until(lambda: world.head.rows[SiteName("n1")].instruction_mark >= world.head.works[one.id].withdraw_number > 0)
    node, _ = world.nodes["n1"]
    assert one.id not in node.site.books.attempts and not (shared / "count").exists()  # noqa: ASYNC240


async def test_a_stop_of_a_node_that_is_away_ends_it_when_it_returns_and_not_before(world: HeadWorld, short_folder: Path) -> None:
    """BR-058: told to end is not gone, and a node that cannot be reached has said nothing."""
    one = work("#!/bin/sh\nsleep 600\n", wall_s=900)
    await started(world, one)
    await world.stop_node("n1")
    await world.adapter.stop(one.id, 1)
    waiting = asyncio.create_task(world.adapter.ended(one))
    await asyncio.sleep(0)
    assert not waiting.done() and world.head.works[one.id].exit is None
    await world.start_node("n1")
    assert (await waiting).stopped_for == "asked"


async def test_leased_work_of_a_cut_node_is_stopped_by_its_own_supervisor(world: HeadWorld) -> None:
    one = work("#!/bin/sh\nsleep 600\n", wall_s=900, lease_s=60)
    await world.adapter.prepare(one, None)
    boot_s = CLOCK.boot_s()
    await world.adapter.renew(one.id, deadline(10.0, boot_s, Moment(CLOCK.now(), boot_s, kernel_boot())))
    assert isinstance(await world.adapter.start(one), StartedRecord)
    node, _ = world.nodes["n1"]
    await world.close()
    await until(lambda: node.site.books.attempts[one.id].ended is not None)
    await world.open()
    assert (await world.adapter.ended(one)).stopped_for == "lease_ended"


async def test_a_node_taken_out_for_good_closes_its_work_with_nobody_knowing_how_it_ended(world: HeadWorld) -> None:
    """BR-058: removed by hand; by a person's word, never by silence."""
    running, waiting = work("sleep 600\n", wall_s=900), work("exit 0\n")
    await started(world, running)
    await world.stop_node("n1")
    await world.adapter.prepare(waiting, None)
    gone = partial(removed, now=world.head.moment(SiteName("n1")))
    await world.head.change(running.id, gone)
    assert not (await world.adapter.ended(running)).certain
    after = await world.head.change(waiting.id, gone)
    assert after.refusal is not None and after.refusal.code == "removed_externally"
    await world.start_node("n1")
    await world.nodes["n1"][0].site.adapter.stop(running.id, 1)


# --- bytes -------------------------------------------------------------------------------------------------------------------------------


async def test_a_pack_goes_out_and_a_result_comes_home_whole(world: HeadWorld, short_folder: Path) -> None:
    folder = open_folder(short_folder)
    (folder / "big.bin").write_bytes(bytes(range(256)) * 4096)  # noqa: ASYNC240
    packed = short_folder / "out.tar.gz"
    with packed.open("wb") as file:  # noqa: ASYNC230
        pack_folder(folder, file)
    data = packed.read_bytes()  # noqa: ASYNC240
    ref = WorkRef(digest=Digest(f"sha256:{hashlib.sha256(data).hexdigest()}"), size=len(data))
    one = work("#!/bin/sh\ncat big.bin big.bin > back.bin\nhead -c 600000 /dev/urandom >> back.bin\n", outputs=["back.bin"])
    one = msgspec.structs.replace(one, spec=msgspec.structs.replace(one.spec, work=ref))
    await world.adapter.prepare(one, packed)
    assert isinstance(await world.adapter.start(one), StartedRecord)
    assert (await world.adapter.ended(one)).code == 0
    result = await world.adapter.pack(one)
    assert result is not None and result.files == 1
    found = world.adapter.result(one.id).read_bytes()  # noqa: ASYNC240
    assert f"sha256:{hashlib.sha256(found).hexdigest()}" == result.digest
    await world.adapter.trim(one.id)
    assert not list(world.head.packs.iterdir()) and not list(world.head.results.iterdir())  # noqa: ASYNC240


async def test_a_log_is_bytes_by_offset_and_its_end_is_kept_at_the_head(world: HeadWorld) -> None:
    one = work("#!/bin/sh\nprintf 'a\\377b'\necho last\n")
    await started(world, one)
    await world.adapter.ended(one)
    chunk = await world.adapter.log(one.id, 0, 100)
    assert (chunk.data, chunk.total) == (b"a\xffblast\n", 8)
    await world.stop_node("n1")
    await until(lambda: SiteName("n1") not in world.head.live)
    chunk = await world.adapter.log(one.id, 0, 100)
    assert chunk.total == 8 and chunk.data.endswith(b"last\n")


async def test_a_run_whose_devices_lie_on_two_machines_is_refused(world: HeadWorld) -> None:
    await world.add_node("n2")
    wide = attempt("exit 0\n", devices=("n1.slot-1", "n2.slot-1"), account=GUEST)
    with pytest.raises(Refused) as error:
        await world.adapter.prepare(wide, None)
    assert error.value.code == "agent.one_node" and "n1, n2" in error.value.text


@pytest.mark.skipif(not GUEST, reason="without root every account is the agent's own")
async def test_a_node_that_begins_nothing_is_set_aside_and_says_why(world: HeadWorld) -> None:
    """BR-062: a broken machine is always free, and would take every retry."""
    node, _ = world.nodes["n1"]
    for number in range(3):
        assert not world.head.node("n1").cordoned, number
        one = work("exit 0\n", account="no-such-account")
        await world.adapter.prepare(one, None)
        assert isinstance(await world.adapter.start(one), Exit)
    await until(lambda: world.head.node("n1").cordoned)
    assert "no-such-account" in world.head.node("n1").reason and node.site.books.attempts == {}


async def test_a_line_that_goes_silent_without_a_word_is_noticed_and_mended(short_folder: Path) -> None:
    """No reset, no end: bytes go nowhere. Both sides notice by themselves, the work runs on, and its end is told once there is a line again."""
    async with head_world(short_folder) as world:
        relay = await Relay("127.0.0.1", world.port).start()
        try:
            shared = open_folder(short_folder)
            token, _ = await world.gate.make_token(None, 1)
            await join(NodeFolder(short_folder / "n1"), head=f"127.0.0.1:{relay.port}", token=token, node="n1", slots=4)
            node = await world.start_node("n1")
            one = work(counted(shared))
            await started(world, one)
            relay.cut()
            await until(lambda: SiteName("n1") not in world.head.live and not node.bus.connected)
            (shared / "go").touch()
            await until(lambda: node.site.books.attempts[one.id].ended is not None)
            assert world.head.works[one.id].exit is None
            relay.heal()
            end = await world.adapter.ended(one)
            assert (end.code, (shared / "count").read_text(encoding="ascii")) == (7, "ran\n")  # noqa: ASYNC240
        finally:
            await relay.close()


async def test_the_owner_s_own_work_runs_on_a_node_as_its_person_and_never_as_root(world: HeadWorld) -> None:
    account = GUEST or pwd.getpwuid(os.geteuid()).pw_name
    mine = LocalWork(user=account, uid=pwd.getpwnam(account).pw_uid, cwd="/no/such/folder", submitted=CLOCK.now())
    one = work("#!/bin/sh\nid -un; pwd\n", account=account, local=mine, tenant=None, epoch=0, generation=0)
    await started(world, one)
    assert (await world.adapter.ended(one)).code == 0
    said = (await world.adapter.log(one.id, 0, 1000)).data.decode().split()
    assert said[0] == account and said[1].endswith(f"{one.id}/work")
    if GUEST:
        root = LocalWork(user="root", uid=0, cwd="/", submitted=CLOCK.now())
        refused_one = work("id\n", account="root", local=root, tenant=None, epoch=0, generation=0)
        await world.adapter.prepare(refused_one, None)
        begun = await world.adapter.start(refused_one)
        assert isinstance(begun, Exit) and "root" in begun.refused_text


async def test_a_node_names_nothing_of_another_s_and_noise_at_the_port_harms_nobody(world: HeadWorld) -> None:
    node, _ = world.nodes["n1"]
    await world.add_node("n2")
    for subject in ("intertie.v1.up.n2.scheduler.sync", "intertie.v1.down.n2.ask", "up.n2.scheduler.sync"):
        with pytest.raises(Unavailable):
            await node.bus.request(subject, b"{}", timeout_s=2)
    before = world.head.live[SiteName("n2")].sample
    await node.bus.publish("tel.gpu.n2", encode_sample(NodeSample(node="n2", sampled=CLOCK.now(), sequence=10**6, devices=[])))
    line = await dial(f"127.0.0.1:{world.port}", world.gate.fingerprint)
    await line.receive()
    await line.send(Frame("node", 0, "", b'{"node":"n2","signature":"AAAA","slots":9}'))
    said = await line.receive()
    assert (said.kind, said.subject) == ("refused", "machines.not_a_node")
    await line.closed()
    _, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n" * 50)
    writer.close()
    one = work("exit 4\n")
    await started(world, one)
    assert (await world.adapter.ended(one)).code == 4
    assert before is not None and world.head.live[SiteName("n2")].sample is not None
    assert world.head.live[SiteName("n2")].sample.sequence < 10**6  # type: ignore[union-attr]  # asserted above
