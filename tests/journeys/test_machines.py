"""A pool of four machines behind one hub: the head and three nodes, each a process with cards of its own. Machines go and come back; jobs stay.

Issue 4, show 4: node lost and back, head lost (kill -9) and back, the job on each keeps running, and the statement is right.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from tests.fakes.gpus import Rack, has_compiler
from tests.journeys.stack import Stack, end_jobs, running_stack

from intertie.contracts.base import decode
from intertie.contracts.job import JobRecord, JobSpec, JobState, Resources
from intertie.contracts.machines import NodeRecord, Nodes
from intertie.contracts.site import DeviceObserved, DeviceState, SitesReply
from intertie.embedded.process import Child, free_port, start_child
from intertie.ids import JobId

pytestmark = [
    pytest.mark.skipif(not has_compiler(), reason="no gcc here to build the library that plays the driver"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
]

MODEL = "A100-SXM4-80GB"
SITE = "pool"
HOLD = "#!/bin/sh\necho on $CUDA_VISIBLE_DEVICES\nwhile [ ! -e $1 ]; do sleep 0.1; done\necho done\n"


@dataclass
class World:
    stack: Stack
    racks: dict[str, Rack]
    nodes: dict[str, Child] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        return self.stack.sites[SITE].folder

    def folder(self, node: str) -> Path:
        return self.stack.folder / node

    def cli(self, *arguments: str) -> str:
        """`intertie node …` at the head's door."""
        command = [sys.executable, "-m", "intertie.cli", "node", *arguments, "--data", str(self.data)]
        env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(self.stack.folder)}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout

    def listed(self) -> dict[str, NodeRecord]:
        return {one.node: one for one in decode(self.cli("list", "--json"), Nodes, what="nodes").nodes}

    async def join(self, node: str, port: int) -> None:
        token = self.stack.folder / f"{node}.token"

        def work() -> None:
            self.cli("token", "--node", node, "--out", str(token))
            command = [sys.executable, "-m", "intertie.agent", "node", "join", "--head", f"127.0.0.1:{port}", "--token-file", str(token)]
            subprocess.run([*command, "--node", node, "--slots", "0", "--data", str(self.folder(node))], check=True, timeout=60)

        await self.stack.do(work)
        await self.start(node)

    async def start(self, node: str) -> None:
        env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "INTERTIE_LOG_LEVEL": "INFO", **self.racks[node].env}
        self.nodes[node] = await self.stack.do(
            lambda: start_child(
                f"node-{node}",
                (sys.executable, "-m", "intertie.agent", "node", "run", "--data", str(self.folder(node))),
                run_dir=self.stack.layout.run,
                log_dir=self.stack.layout.log,
                env=env,
            )
        )

    def card_states(self) -> dict[str, DeviceState]:
        """By node, as the registry shows it."""
        reply = self.stack.admin.get("/v1/sites", SitesReply, {"site": SITE})
        return {seen.device.node: seen.state for pool in reply.pools if pool.inventory for seen in pool.inventory.devices}

    async def hold(self, name: str) -> tuple[JobId, Path]:
        """A job of one card that runs until its file is there."""
        go = self.stack.folder / f"go-{name}"
        spec = JobSpec(name=name, script=HOLD, args=[str(go)], wall_s=600, resources=Resources(gpus=1, gpu_model="A100"))
        return await self.stack.do(lambda: self.stack.submit(spec)), go

    async def until_running(self, job: JobId) -> JobRecord:
        def look() -> JobRecord | None:
            record = self.stack.job(job)
            assert record.state not in (JobState.FAILED, JobState.CANCELLED, JobState.LOST), record
            return record if record.state is JobState.RUNNING else None

        return await self.stack.until(look, what=f"{job} runs")

    async def until_ended(self, job: JobId) -> JobRecord:
        return await self.stack.until(lambda: self.stack.ended(job), what=f"{job} ends")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    async with running_stack() as stack:
        racks = dict[str, Rack]()
        for name in ("head", "n1", "n2", "n3"):
            racks[name] = await asyncio.to_thread(Rack, stack.folder / f"cards-{name}", [MODEL])
        profile = stack.folder / "profile.toml"
        text = racks["head"].profile().read_text(encoding="ascii")
        profile.write_text(text.replace("count = 1", "count = 4").replace("devices = 1", "devices = 4"), encoding="ascii")
        data, port = stack.folder / SITE, free_port()
        data.mkdir(mode=0o711)
        (data / "site.toml").write_text(f'[machines]\nlisten = "127.0.0.1:{port}"\nslots = 1\n', encoding="ascii")
        made = World(stack, racks)
        await stack.add_site(SITE, profile=profile, env=racks["head"].env)
        try:
            for node in ("n1", "n2", "n3"):
                await made.join(node, port)
            await stack.until(
                lambda: sorted(made.card_states().values()) == [DeviceState.FREE] * 4, what="the hub sees four free cards on four machines"
            )
            yield made
        finally:
            for node, child in made.nodes.items():
                await stack.do(lambda child=child: child.stop(10.0))  # type: ignore[misc]  # bound now
                await stack.do(lambda node=node: end_jobs(made.folder(node)))  # type: ignore[misc]  # bound now


async def test_machines_go_and_come_back_while_the_job_on_each_keeps_running(world: World) -> None:
    stack = world.stack
    jobs = [await world.hold(f"job-{number}") for number in range(4)]
    records = [await world.until_running(job) for job, _ in jobs]
    attempts = [record.attempts[-1] for record in records]
    card_of = {rack.uuids[0]: node for node, rack in world.racks.items()}
    on = {card_of[attempt.devices[0]]: (job, go) for attempt, (job, go) in zip(attempts, jobs, strict=True)}
    assert set(on) == set(world.racks), "one on each machine"
    natives = {card_of[a.devices[0]]: a.native_id for a in attempts}
    assert natives["n1"].startswith("n1/")

    # A node is lost: what runs there runs on, and the pool says so.
    pid = int(natives["n1"].partition("/")[2])
    await stack.do(world.nodes["n1"].kill)
    await stack.until(lambda: not world.listed()["n1"].reachable, what="the head misses its node")
    os.kill(pid, 0)
    assert stack.job(on["n1"][0]).state is JobState.RUNNING
    waiting, go = await world.hold("waits")
    assert stack.job(waiting).state is JobState.QUEUED

    # It comes back, and has what it had.
    await world.start("n1")
    await stack.until(lambda: world.listed()["n1"].reachable, what="the node is heard again")
    os.kill(pid, 0)
    again = stack.job(on["n1"][0])
    assert (again.state, len(again.attempts)) == (JobState.RUNNING, 1)

    # The head dies. A job ends meanwhile on a node, and nobody hears it.
    head = stack.sites[SITE].child
    assert head is not None
    await stack.do(head.kill)
    on["n2"][1].touch()
    await stack.until(
        lambda: (world.folder("n2") / "jobs" / attempts_of(on["n2"][0], records) / "exit.json").exists(), what="it ended there"
    )
    await stack.start_agent(SITE)
    ended = await world.until_ended(on["n2"][0])
    assert ended.state is JobState.SUCCEEDED and len(ended.attempts) == 1
    for node in ("head", "n1", "n3"):
        assert stack.job(on[node][0]).state is JobState.RUNNING, node

    # The one that waited takes the machine that is free now; all end well, each once.
    record = await world.until_running(waiting)
    assert card_of[record.attempts[-1].devices[0]] == "n2"
    for file in (go, *(file for _, file in on.values())):
        file.touch()
    names = {waiting, *(job for job, _ in on.values())}
    for job in names:
        done = await world.until_ended(job)
        # Between a node's return and its first sample an offer may find its card unknown: that costs nobody anything, and nothing runs twice.
        assert (done.state, len([a for a in done.attempts if a.started_at])) == (JobState.SUCCEEDED, 1), done.attempts
    told = await stack.until(lambda: stack.complete_statement(names), what="the statement has all of it")
    for line in told.lines:
        if line.job in names:
            (book,) = line.attempts
            assert book.complete
    proof = stack.check()
    assert not any((proof.sum, proof.quarantined, proof.incomplete, proof.differing)), proof


def attempts_of(job: JobId, records: list[JobRecord]) -> str:
    return next(record.attempts[-1].attempt for record in records if record.job == job)


async def test_work_and_results_travel_to_a_node_and_back_and_a_cordoned_one_gets_none(world: World) -> None:
    stack = world.stack
    for node in ("head", "n1", "n2"):
        if node != "head":
            await stack.do(lambda node=node: world.cli("cordon", node, "--reason", "new fans"))  # type: ignore[misc]  # bound now
    world.racks["head"].occupy(0, os.getpid())
    await stack.until(
        lambda: sorted(state.value for state in world.card_states().values()) == ["foreign", "foreign", "foreign", "free"],
        what="one card is left",
    )
    spec = JobSpec(
        name="answer",
        script="#!/bin/sh\necho 42 > answer.txt\n",
        wall_s=60,
        outputs=["answer.txt"],
        resources=Resources(gpus=1, gpu_model="A100"),
    )
    job = await stack.do(lambda: stack.submit(spec))
    record = await world.until_ended(job)
    attempt = record.attempts[-1]
    assert record.state is JobState.SUCCEEDED and attempt.devices == world.racks["n3"].uuids
    assert attempt.result is not None and attempt.result.files == 1
    for node in ("n1", "n2"):
        await stack.do(lambda node=node: world.cli("uncordon", node))  # type: ignore[misc]  # bound now
    world.racks["head"].heal(0)


async def test_a_run_that_fits_on_no_one_machine_waits_and_says_so(world: World) -> None:
    stack = world.stack
    await stack.until(lambda: set(world.card_states().values()) == {DeviceState.FREE}, what="all cards are free")
    job = await stack.do(
        lambda: stack.submit(JobSpec(name="wide", script="true", wall_s=60, resources=Resources(gpus=2, gpu_model="A100")))
    )
    record = await stack.until(
        lambda: said if (said := stack.job(job)).waiting is not None and said.waiting.rejections else None, what="it says why"
    )
    assert record.waiting is not None
    assert [row.rule for row in record.waiting.rejections] == ["one_node"]
    await stack.do(lambda: stack.user.post(f"/v1/jobs/{job}/cancel", JobRecord, {"reason": "too wide"}))


async def test_a_present_holder_keeps_their_card_and_uses_it_through_the_owner_s_door(world: World) -> None:
    """FEATURES 135: long-standing users are no bypass. The hub learns until when, never whose it is."""
    stack = world.stack
    person = pwd.getpwuid(os.geteuid()).pw_name
    until = datetime.now(UTC) + timedelta(hours=2)
    head = next(node for node, one in world.listed().items() if one.head)
    file = stack.folder / "holders.csv"
    file.write_text(f"person,node,devices,until,reason\n{person},{head},,{until.isoformat()},thesis\n", encoding="ascii")
    await stack.do(lambda: world.cli("reservations", "import", str(file)))

    def shown() -> DeviceObserved | None:
        reply = stack.admin.get("/v1/sites", SitesReply, {"site": SITE})
        devices = [seen for pool in reply.pools if pool.inventory for seen in pool.inventory.devices]
        return next((seen for seen in devices if seen.reserved_until is not None), None)

    seen = await stack.until(shown, what="the hub sees a card that is kept")
    assert (seen.device.id, seen.state) == (world.racks["head"].uuids[0], DeviceState.FOREIGN)
    assert seen.reserved_until == until and person not in seen.reason

    command = [sys.executable, "-m", "intertie.cli", "local", "--data", str(world.data), "submit", "--gpus", "1", "--wait", "--"]
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(stack.folder)}
    done = await stack.do(
        lambda: subprocess.run(
            [*command, "sh", "-c", "echo on $CUDA_VISIBLE_DEVICES"],
            env=env,
            cwd="/tmp",
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    )
    assert f"on {world.racks['head'].uuids[0]}" in done.stdout
    file.write_text("person,node,devices,until,reason\n" + f"{person},{head},,2020-01-01T00:00+08:00,over\n", encoding="ascii")
    await stack.do(lambda: world.cli("reservations", "import", str(file)))
    await stack.until(lambda: set(world.card_states().values()) == {DeviceState.FREE}, what="it has ended by itself")


async def test_a_revoked_node_is_out_and_its_key_opens_nothing(world: World) -> None:
    stack = world.stack
    await stack.do(lambda: world.cli("revoke", "n3"))
    await stack.until(lambda: "n3" not in world.card_states(), what="its card has left the pool")
    log = stack.layout.log / "node-n3.log"
    await stack.until(lambda: "machines.revoked" in log.read_text(encoding="utf-8"), what="the node is told why")
