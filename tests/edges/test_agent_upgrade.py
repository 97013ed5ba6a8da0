"""New code under running work: the agent's process becomes it, the job notices nothing, and what cannot go on is not begun. Real processes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.edges.agent_world import Scheduler, Site, a_pair, place, running_keeper, until
from tests.edges.conftest import RunningHub
from tests.fakes.agents import offer
from tests.fakes.sites import a_site

from intertie.agent import procs
from intertie.agent.books import save
from intertie.agent.config import Folder
from intertie.agent.core.leases import deadline
from intertie.agent.core.model import State, with_state
from intertie.agent.upgrade import check, mark_of, read_mark
from intertie.contracts.job import Cause
from intertie.contracts.link import Ended, Started
from intertie.errors import Refused
from intertie.trust.keys import Key


@pytest.fixture
async def pair(operator_hub: RunningHub, short_folder: Path, unique: str) -> AsyncIterator[tuple[Site, Scheduler]]:
    async with a_pair(operator_hub, short_folder, unique) as both:
        yield both


async def upgrade(site: Site, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """As a person says it."""
    command = [python, "-m", "intertie.cli", "agent", "upgrade", "--data", str(site.folder.root)]
    env = {"PATH": os.environ["PATH"]}
    return await asyncio.to_thread(subprocess.run, command, env=env, cwd="/tmp", capture_output=True, text=True, timeout=120, check=False)


def asked_for(site: Site, python: Path) -> subprocess.CompletedProcess[str]:
    """An upgrade to whatever `python` runs."""
    code = (
        "import pathlib, sys, intertie.agent.config as config, intertie.agent.upgrade as upgrade\n"
        "upgrade.upgrade(config.Folder(pathlib.Path(sys.argv[1])), sys.argv[2])\n"
    )
    command = [sys.executable, "-c", code, str(site.folder.root), str(python)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


async def test_an_upgrade_keeps_process_and_jobs_and_loses_no_exit_code(operator_hub: RunningHub, pair: tuple[Site, Scheduler]) -> None:
    site, scheduler = pair
    async with running_keeper(operator_hub, scheduler):
        site.start()
        body = place(site, scheduler, "until [ -e go ]; do sleep 0.05; done; exit 7\n")
        await until(lambda: scheduler.of(Started), "it runs")
        before = read_mark(site.folder)
        done = await upgrade(site)
        assert done.returncode == 0, done.stderr
        after = read_mark(site.folder)
        assert before is not None and after is not None
        assert after.process.pid == before.process.pid and after.started > before.started
        (site.folder.jobs / body.attempt / "work" / "go").touch()
        await until(lambda: scheduler.of(Ended), "the end is told")
        assert [(end.exit_code, len(scheduler.of(Started))) for end in scheduler.of(Ended)] == [(7, 1)]
        assert await asyncio.to_thread(site.end, signal.SIGTERM) == 0
        assert not mark_of(site.folder).exists()


async def test_code_that_cannot_go_on_with_this_journal_is_not_begun(operator_hub: RunningHub, pair: tuple[Site, Scheduler]) -> None:
    """The running agent tries the new code itself; the journal is of a format that it does not read."""
    site, _ = pair
    site.start()
    await until(lambda: mark_of(site.folder).exists(), "it works")
    before = read_mark(site.folder)
    journal = sqlite3.connect(site.folder.journal)
    journal.execute("PRAGMA user_version = 99")
    journal.close()
    done = await upgrade(site)
    assert done.returncode == 1 and "agent.journal_version" in done.stderr and "99" in done.stderr
    assert read_mark(site.folder) == before


async def test_the_running_agent_does_not_become_what_fails_its_trial(
    operator_hub: RunningHub, pair: tuple[Site, Scheduler], short_folder: Path
) -> None:
    site, _ = pair
    site.start()
    await until(lambda: mark_of(site.folder).exists(), "it works")
    before = read_mark(site.folder)
    assert before is not None
    broken = short_folder / "broken"
    broken.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    broken.chmod(0o700)
    done = await asyncio.to_thread(asked_for, site, broken)
    assert "agent.upgrade_refused" in done.stderr and "no such module" in done.stderr
    assert read_mark(site.folder) == before
    status = json.loads((await asyncio.to_thread(site.local, "status", "--json")).stdout)
    assert status["site"] == site.name


async def test_without_a_running_agent_there_is_nothing_to_upgrade(pair: tuple[Site, Scheduler]) -> None:
    site, _ = pair
    done = await upgrade(site)
    assert done.returncode == 1 and "agent.not_running" in done.stderr and "next:" in done.stderr


async def test_an_agent_that_does_not_come_back_is_said_with_the_way_back(
    operator_hub: RunningHub, pair: tuple[Site, Scheduler], short_folder: Path
) -> None:
    """The trial passes and the start does not: its jobs run on, and the message says what to do."""
    site, scheduler = pair
    async with running_keeper(operator_hub, scheduler):
        site.start()
        body = place(site, scheduler, "until [ -e go ]; do sleep 0.05; done; exit 7\n")
        await until(lambda: scheduler.of(Started), "it runs")
        fickle = short_folder / "fickle"
        fickle.write_text('#!/bin/sh\ncase "$3" in check) exit 0;; *) exit 1;; esac\n')
        fickle.chmod(0o700)
        call = asyncio.create_task(asyncio.to_thread(asked_for, site, fickle))
        assert site.process is not None
        await asyncio.to_thread(site.process.wait, 60)
        done = await call
        assert "agent.not_back" in done.stderr
        (site.folder.jobs / body.attempt / "work" / "go").touch()
        site.start()
        await until(lambda: scheduler.of(Ended), "the old one, started again, tells the end")
        assert scheduler.of(Ended)[0].exit_code == 7


# --- job folders of older agents ---

OLD = Path(__file__).resolve().parents[1] / "fakes" / "job_folder_1"


def older_job(folder: Path, attempt: str) -> Path:
    """A job under the first release's own supervisor, in its own folder."""
    home = folder / "jobs" / attempt
    shutil.copytree(OLD, home)
    (home / "work").mkdir()
    (home / "supervisor.py.txt").rename(home / "supervisor.py")
    (home / "script").chmod(0o500)
    for name in ("spec.json", "env.json"):
        (home / name).write_text((home / name).read_text(encoding="utf-8").replace("{HOME}", str(home)), encoding="utf-8")
    procs.spawn([sys.executable, "-I", "-S", str(home / "supervisor.py"), str(home)], stderr=home / "supervisor.log", env={})
    return home


@pytest.mark.parametrize("how", ["by itself", "by a stop", "by its lease"])
async def test_a_job_under_an_older_agent_s_supervisor_is_adopted_and_ends(short_folder: Path, how: str) -> None:
    key = Key.new("U")
    body = offer(lease_s=600 if how == "by its lease" else 0)
    async with a_site(short_folder, scheduler=key) as world:
        await world.tell(world.offered(body))
        claimed = world.site.books.attempts[body.attempt]
        now = world.clock.boot_s()
        await world.journal.write(save(with_state(claimed, State.STAGING, go_boot_s=now, go_sent_boot_s=now)))
    home = older_job(short_folder, body.attempt)
    await until((home / "started.json").exists, "it runs")
    async with a_site(short_folder, scheduler=key) as world:
        await world.first(Started)
        match how:
            case "by itself":
                (home / "work" / "go").touch()
            case "by a stop":
                await world.tell(world.stop(body))
            case _:
                over = deadline(1, world.clock.boot_s() - 1, world.site.moment())
                await world.site.adapter.renew(body.attempt, over)
        end = await world.first(Ended, limit_s=30)
        expected = {"by itself": (9, Cause.JOB), "by a stop": (None, Cause.CANCELLED), "by its lease": (None, Cause.PLATFORM)}
        assert (end.exit_code, end.cause) == expected[how] and end.log_tail == "from an older agent\n"


def test_new_code_takes_up_a_journal_of_the_first_release_and_none_of_a_later_one(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    shutil.copy(Path(__file__).parent / "data" / "journal_v1.db", folder.journal)
    check(folder)
    with sqlite3.connect(folder.journal) as connection:
        connection.execute("PRAGMA user_version = 999")
    connection.close()
    with pytest.raises(Refused) as caught:
        check(folder)
    assert caught.value.code == "agent.journal_version"
