"""A process's life, in real processes: orderly stop, one line of reason, the ready mark, waiting for dependencies, beats."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from intertie.errors import Refused, Stale, Unavailable
from intertie.runtime import Beat, reach, ready

SERVICE = """
import asyncio, sys
from pathlib import Path
from intertie.errors import Refused, Unavailable
from intertie.runtime import main, ready, reach, serve

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])

async def works():
    try:
        await asyncio.Event().wait()
    finally:
        (FOLDER / "put-away").write_text("yes")

async def fails():
    while not (FOLDER / "ready").exists():
        await asyncio.sleep(0.01)
    if MODE == "known":
        raise Unavailable("store.unavailable", "postgres at 127.0.0.1:5432 is away")
    if MODE == "bug":
        raise KeyError("surprise")
    await asyncio.Event().wait()

async def swallows():
    while MODE == "swallow":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            # Once, as libraries do.
            await asyncio.sleep(60)

async def hangs():
    while MODE == "hang":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def absent():
    raise ConnectionRefusedError

async def run(environ):
    if MODE == "settings":
        raise Refused("settings.invalid", "INTERTIE_BUS_URL is not set", next_step="set it")
    async with ready(FOLDER / "ready", "tested", {"port": 1}):
        if MODE == "start":
            await reach("postgres at h:1", absent, limit_s=60)
        return await serve(works=works(), fails=fails(), hangs=hangs(), swallows=swallows())

import intertie.runtime.process as process
process.STOP_LIMIT_S = 0.3
sys.exit(main("tested", run))
"""


class Process:
    def __init__(self, mode: str, folder: Path) -> None:
        self.folder = folder
        program = folder / "service.py"
        program.write_text(SERVICE, encoding="utf-8")
        self.child = subprocess.Popen([sys.executable, str(program), mode, str(folder)], stderr=subprocess.PIPE, text=True)

    async def until_ready(self) -> dict[str, object]:
        async with asyncio.timeout(20):
            while not self.mark.exists():
                assert self.child.poll() is None, self.child.stderr and self.child.stderr.read()
                await asyncio.sleep(0.01)
        said: dict[str, object] = json.loads(self.mark.read_text(encoding="utf-8"))
        return said

    @property
    def mark(self) -> Path:
        return self.folder / "ready"

    async def end(self) -> tuple[int, list[dict[str, object]]]:
        """Exit code and log lines."""
        _, text = await asyncio.to_thread(self.child.communicate, timeout=20)
        return self.child.returncode, [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_asked_to_stop_it_puts_its_things_away_and_ends_with_0(folder: Path, number: signal.Signals) -> None:
    process = Process("ok", folder)
    said = await process.until_ready()
    assert said["pid"] == process.child.pid and said["service"] == "tested" and said["port"] == 1
    process.child.send_signal(number)
    code, _ = await process.end()
    assert code == 0 and (folder / "put-away").exists() and not process.mark.exists()


async def test_asked_to_stop_while_it_still_waits_for_a_dependency_it_ends_in_order(folder: Path) -> None:
    process = Process("start", folder)
    await process.until_ready()
    process.child.send_signal(signal.SIGTERM)
    code, _ = await process.end()
    assert code == 0 and not process.mark.exists()


async def test_the_first_failure_stops_the_process_with_its_reason_in_one_line(folder: Path) -> None:
    code, lines = await Process("known", folder).end()
    [line] = [line for line in lines if line["event"] == "stopped"]
    assert code == 1 and "postgres at 127.0.0.1:5432 is away" in str(line["reason"]) and "exception" not in line
    assert (folder / "put-away").exists()


async def test_a_bug_stops_the_process_with_its_traceback(folder: Path) -> None:
    code, lines = await Process("bug", folder).end()
    [line] = [line for line in lines if line["event"] == "stopped"]
    assert code == 1 and "surprise" in str(line["exception"])


async def test_bad_settings_are_one_line_with_what_to_do(folder: Path) -> None:
    code, [line] = await Process("settings", folder).end()
    assert code == 1 and (line["reason"], line["next_step"]) == ("INTERTIE_BUS_URL is not set", "set it")


async def test_what_hangs_while_stopping_is_named_and_left_behind(folder: Path) -> None:
    process = Process("hang", folder)
    await process.until_ready()
    process.child.send_signal(signal.SIGTERM)
    code, lines = await process.end()
    assert code == 1 and "hangs" in str(lines[-1]["tasks"])


async def test_a_task_that_swallowed_its_cancellation_is_told_again(folder: Path) -> None:
    process = Process("swallow", folder)
    await process.until_ready()
    process.child.send_signal(signal.SIGTERM)
    code, _ = await process.end()
    assert code == 0


async def test_the_ready_mark_is_whole_or_absent(folder: Path) -> None:
    path = folder / "run" / "x.json"
    async with ready(path, "x"):
        assert json.loads(path.read_text(encoding="utf-8"))["pid"] == os.getpid()
        assert list(path.parent.iterdir()) == [path]
    assert not path.exists()
    with pytest.raises(Refused):
        async with ready(path, "x"):
            raise Refused("a.b", "text")
    assert not path.exists()


async def test_a_dependency_that_comes_later_is_waited_for() -> None:
    tries: list[int] = []

    async def attempt() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionRefusedError("not yet")
        return "there"

    assert await reach("postgres at h:1", attempt) == "there"


@pytest.mark.parametrize("error", [ConnectionRefusedError("refused"), TimeoutError(), Unavailable("x.y", "away")], ids=repr)
async def test_a_dependency_that_does_not_come_is_one_sentence(error: Exception) -> None:
    async def attempt() -> None:
        raise error

    with pytest.raises(Unavailable) as told:
        await reach("postgres at h:1", attempt, limit_s=0.15)
    assert told.value.code == "runtime.unreachable" and "postgres at h:1" in told.value.text and told.value.next_step


async def test_what_is_refused_by_a_dependency_is_not_waited_for() -> None:
    async def attempt() -> None:
        raise Refused("store.password", "wrong password")

    with pytest.raises(Refused):
        await reach("postgres at h:1", attempt)


async def test_a_beat_goes_on_after_a_known_error_and_ends_with_a_bug() -> None:
    rounds: list[int] = []

    async def work() -> None:
        rounds.append(1)
        match len(rounds):
            case 1:
                raise Unavailable("store.unavailable", "away")
            case 2:
                raise Stale("a.b", "again")
            case 4:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Beat("tested", 0.01, rng=random.Random(1)).run(work)
    assert len(rounds) == 4


async def test_a_hint_brings_the_next_round_at_once() -> None:
    beat = Beat("tested", 3_600)
    rounds: list[int] = []

    async def work() -> None:
        rounds.append(1)
        if len(rounds) == 3:
            raise ZeroDivisionError
        asyncio.get_running_loop().call_soon(beat.hint)

    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(10):
            await beat.run(work)


async def test_a_hint_given_while_a_round_runs_is_not_lost() -> None:
    beat = Beat("tested", 3_600)
    rounds: list[int] = []

    async def work() -> None:
        rounds.append(1)
        beat.hint()
        if len(rounds) == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(10):
            await beat.run(work)


def test_every_beat_is_scaled_by_the_setting() -> None:
    assert Beat("tested", 5.0, scale=0.1).interval_s == 0.5
