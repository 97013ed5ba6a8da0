"""Schedulers of the sites themselves, that start, forget and double (LINK D6)."""

from __future__ import annotations

from typing import Any

from tests.sim.mutants.base import Mutant, all_queues, swapped, together

from intertie.sim.native import NativeAdapter, NativeScheduler

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
    """The queue starts the script again after its node failed, and the first start's record stands for both."""

    def failing(self: NativeScheduler, which: float) -> None:
        live = [one for one in self.machine.live() if self.find(one.run.attempt.id) is not None]
        if not live:
            return
        process = live[min(int(which * len(live)), len(live) - 1)]
        run = process.run
        assert run.living is not None
        run.living.cancel()
        process.supervisor.kill()
        process.job.cancel()
        process.ended_s = self.machine.clock.boot_s()
        assert self.adapter is not None
        adapter = self.adapter

        async def again() -> None:
            import asyncio

            await asyncio.sleep(5)
            run.living = asyncio.create_task(adapter._live(run))

        self.machine.party.spawn(again())

    return swapped(NativeScheduler, "fail_node", failing)


MUTANTS = (
    Mutant(a_retry_has_no_native_fence, "retry without the native fence", "1, 7", QUEUES, all_queues),
    Mutant(a_native_restart_counts_as_the_same_run, "native requeue counted as the same run", "1, 7", ("queue_node",), all_queues),
)
