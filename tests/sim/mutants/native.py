"""Schedulers of the sites themselves, that start, forget and double (LINK D6)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from tests.sim.mutants.base import Mutant, all_queues, swapped, together

from intertie.agent.core.attempts import Exit
from intertie.sim.machine import Process, SimAdapter
from intertie.sim.native import NativeAdapter, NativeScheduler

# From a node's failure to its queue starting the job again.
NODE_S = 15.0
QUEUES = ("queue_deaf", "queue_forgets", "queue_held", "queue_doubles", "queue_node", "crash")


def a_retry_has_no_native_fence() -> Any:
    """Nobody looks for the tag before a submit is tried again, and no stub asks whether it was started."""

    async def eager_stub(self: NativeAdapter, job: Any) -> None:
        run = self.disk.runs.get(job.tag)
        if run is None or run.fenced:
            return
        if run.started is None:
            await self._begin(run.attempt)
        else:
            self.begin(run)

    def alone(self: NativeScheduler, job: Any) -> bool:
        return False

    return together(swapped(NativeAdapter, "stub", eager_stub), swapped(NativeScheduler, "_singleton", alone))


def a_native_restart_counts_as_the_same_run() -> Any:
    """The queue starts the script again after its node failed, no stub asks, and the first start's record stands for both: what lies between is used."""
    record = SimAdapter._record

    def from_the_first_start(self: SimAdapter, process: Process, why: str) -> Exit:
        end, started = record(self, process, why), process.run.started
        assert started is not None and process.ended_s is not None
        return replace(end, ran_us=int(process.ended_s * 1e6) - started.boot_ns // 1000)

    def failing(self: NativeScheduler, which: float) -> None:
        live = [one for one in self.machine.live() if self.find(one.run.attempt.id) is not None]
        if not live:
            return
        process = live[min(int(which * len(live)), len(live) - 1)]
        run, adapter = process.run, self.adapter
        assert run.living is not None and adapter is not None
        run.living.cancel()
        process.supervisor.kill()
        process.job.cancel()
        process.ended_s = self.machine.clock.boot_s()

        async def again() -> None:
            await asyncio.sleep(NODE_S)
            run.living = asyncio.create_task(adapter._live(run))
            await asyncio.sleep(0)
            self.machine.processes[-1].began_s = self.machine.clock.boot_s()

        self.machine.party.spawn(again())

    return together(swapped(NativeScheduler, "fail_node", failing), swapped(SimAdapter, "_record", from_the_first_start))


MUTANTS = (
    Mutant(a_retry_has_no_native_fence, "retry without the native fence", "1, 7", QUEUES, all_queues),
    Mutant(a_native_restart_counts_as_the_same_run, "native requeue counted as the same run", "1, 7", ("queue_node",), all_queues),
)
