"""A real Slurm under the suite of clusters: what happens in it is done by its administrator's own commands."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from tests.adapters.clusters import Harness, harness
from tests.adapters.slurm_shell import TroubledShell, rules_of
from tests.adapters.slurm_world import GUEST, SHARED, Slurm, until

from intertie.agent.adapters.files import LocalFiles
from intertie.agent.slurm.cluster import SlurmCluster
from intertie.agent.slurm.commands import Commands
from intertie.agent.slurm.transport import environment
from intertie.clock import SystemClock
from intertie.ids import AttemptId

CLOCK = SystemClock()
NO_CGROUPS = (
    "memory is limited by cgroups, and this Slurm of one machine has none; that Slurm's word is told from a kill is held by the parsers"
)


class SlurmHarness:
    cluster: SlurmCluster

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        rules = rules_of(slurm, folder / "shared")
        self.slurm, self.shell = slurm, TroubledShell(environment(rules))
        self.files = LocalFiles(folder / "shared", look_s=0.2)
        self.cluster = SlurmCluster(Commands(self.shell, rules, CLOCK), rules, self.files, CLOCK, name=slurm.name)
        self.account = GUEST
        self.resolution_us = 1_000_000
        self.cannot = {"test_the_end_by_memory_is_told_from_a_kill": NO_CGROUPS}

    async def do(self, *argv: str, check: bool = True) -> str:
        return await asyncio.to_thread(partial(self.slurm.run, *argv, check=check))

    async def number(self, tag: AttemptId) -> str:
        """Of the job with this tag, as an administrator finds it."""
        async with asyncio.timeout(60):
            while True:
                for line in (await self.do("squeue", "-h", "-t", "all", "-o", "%A %k")).splitlines():
                    number, _, comment = line.partition(" ")
                    if str(tag) in comment:
                        return number
                await asyncio.sleep(0.1)

    async def hold(self) -> None:
        await self.do("scontrol", "update", "PartitionName=train", "State=DOWN")

    async def release(self) -> None:
        await self.do("scontrol", "update", "PartitionName=train", "State=UP")

    async def lose_answer(self) -> None:
        self.shell.lost_submits = 1

    async def blind(self, looks: int) -> None:
        self.shell.blind_looks = looks

    async def deaf(self, on: bool) -> None:
        self.shell.deaf = on

    async def reuse_ids(self) -> None:
        """A slurmctld that lost its state begins to count where it is told to."""
        last = max(int(word) for word in (await self.do("squeue", "-h", "-t", "all", "-o", "%A")).split())
        await asyncio.to_thread(self.slurm.restart_without_state, last)

    async def say_unknown(self, tag: AttemptId, word: str) -> None:
        if word:
            self.shell.words[tag] = word
        else:
            self.shell.words.pop(tag, None)

    async def complete_slowly(self, tag: AttemptId) -> None:
        (self.slurm.folder / "epilog" / f"slow-{await self.number(tag)}").touch()

    async def suspend(self, tag: AttemptId) -> None:
        await self.do("scontrol", "suspend", await self.number(tag))

    async def resume(self, tag: AttemptId) -> None:
        await self.do("scontrol", "resume", await self.number(tag))

    async def preempt(self, tag: AttemptId) -> None:
        node = (await self.do("squeue", "-h", "-j", await self.number(tag), "-o", "%N")).strip()
        words = ("--partition=urgent", f"--nodelist={node}", "--exclusive", "--account=root", "--output=/dev/null", "--chdir=/tmp")
        await self.do("sbatch", *words, "--wrap", "sleep 1")

    async def fail_node(self, tag: AttemptId) -> None:
        node = (await self.do("squeue", "-h", "-j", await self.number(tag), "-o", "%N")).strip()
        await self.do("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=a test")

    async def run_out_of_memory(self, tag: AttemptId) -> None:
        raise NotImplementedError(NO_CGROUPS)

    async def cancel_at_site(self, tag: AttemptId) -> None:
        await self.do("scancel", "-f", await self.number(tag))

    async def make_unkillable(self, tag: AttemptId) -> None:
        """Its node is not free for as long as the site's epilog holds it."""
        (self.slurm.folder / "epilog" / f"hold-{await self.number(tag)}").touch()

    async def let_die(self, tag: AttemptId) -> None:
        (self.slurm.folder / "epilog" / f"hold-{await self.number(tag)}").unlink()

    async def close(self) -> None:
        await self.cluster.close()
        for mark in (self.slurm.folder / "epilog").iterdir():
            mark.unlink(missing_ok=True)
        await self.release()
        for node in self.slurm.slurmds:
            with contextlib.suppress(AssertionError):
                await self.do("scontrol", "update", f"NodeName={node}", "State=RESUME")
        await asyncio.to_thread(self.slurm.clear)
        await asyncio.to_thread(until, self.slurm.idle, "every node is idle again")


@harness("slurm")
async def slurm(folder: Path) -> AsyncIterator[Harness]:
    """Of a world that all tests of this process share."""
    made = SlurmHarness(SHARED.get()["lab"], folder)
    try:
        yield made
    finally:
        await made.close()
