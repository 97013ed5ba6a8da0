"""Commands of a site's own scheduler have an outer end, whoever holds their pipes and whatever does not die."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from intertie.agent.slurm.transport import LocalShell, Unsure
from intertie.errors import Unavailable

SHELL = LocalShell({"PATH": os.environ["PATH"]})
LIMIT_S = 45.0


async def test_a_command_that_hangs_has_no_answer_in_time_although_another_holds_its_pipe(tmp_path: Path) -> None:
    """As behind sudo: what we may not kill, or a session of its own, keeps standard output open."""
    held = tmp_path / "held"
    script = f"setsid sh -c 'echo $$ > {held}; exec sleep 600' & sleep 600"
    try:
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(Unsure) as error:
                await SHELL.run(["sh", "-c", script], timeout_s=2.0)
        assert error.value.code == "slurm.no_answer"
    finally:
        os.kill(int(held.read_text()), signal.SIGKILL)  # noqa: ASYNC240  # a few bytes


async def test_a_command_that_answered_and_does_not_end_is_unsure_too() -> None:
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(Unsure):
            await SHELL.run(["sh", "-c", "echo 7; exec >&-; exec sleep 600"], timeout_s=1.0)


async def test_an_answer_is_whole_or_too_much() -> None:
    done = await SHELL.run(["sh", "-c", "cat; echo no >&2; exit 3"], stdin=b"x" * 3_000_000, timeout_s=LIMIT_S)
    assert (done.code, len(done.out), done.error) == (3, 3_000_000, b"no\n")
    with pytest.raises(Unavailable) as error:
        await SHELL.run(["sh", "-c", "yes"], timeout_s=LIMIT_S, limit=100_000)
    assert error.value.code == "slurm.too_much"


async def test_who_is_told_to_go_leaves_no_thread_waiting() -> None:
    for _ in range(40):
        task = asyncio.create_task(SHELL.run(["sleep", "600"], timeout_s=600.0))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.to_thread(lambda: 7) == 7, "the threads of the pool are free again"


async def test_commands_that_take_long_keep_nothing_else_of_the_agent_waiting() -> None:
    """More of them than the loop's own pool has threads: a small host has six."""
    shell = LocalShell({"PATH": os.environ["PATH"]})
    long = [asyncio.create_task(shell.run(["sleep", "600"], timeout_s=600.0)) for _ in range(24)]
    try:
        async with asyncio.timeout(LIMIT_S):
            assert await asyncio.to_thread(lambda: 7) == 7
            assert (await shell.run(["echo", "here"], timeout_s=LIMIT_S)).out == b"here\n"
    finally:
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        await shell.close()
