"""New code under running work: the agent lets go of its jobs, becomes the new code, and finds them again. Nothing ends, the pid stays.

    agent.json      who runs here: process, version, since when; there from the door's opening to the orderly end
    upgrade.json    what `intertie agent upgrade` asks of it, and why it was refused

The new code is tried first, by the agent itself, in a process of its own: it must import, and read this journal and these job folders. Only
then does the running agent stop. What comes after that is the new code's; if it does not come back, the jobs run on and the old one may be
started again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
import time
from datetime import datetime
from pathlib import Path

import msgspec

from intertie.agent import procs, supervisor
from intertie.agent.config import VERSION, Folder, write_whole
from intertie.errors import Refused, Unavailable
from intertie.observe import log

LOG = log.get("agent.upgrade")

# Importing everything on a slow disk; a trial that takes longer is not going to make a good agent.
TRIAL_S = 60.0
# Orderly stop (10 s at most), exec, journal check, recovery.
BACK_S = 90.0
POLL_S = 0.1


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """`agent.json`."""

    process: procs.Identity
    version: str
    started: datetime


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """`upgrade.json`. `python` runs the new code; `refused` is the agent's answer if it stays what it is."""

    python: str
    refused: str = ""


def mark_of(folder: Folder) -> Path:
    return folder.root / "agent.json"


def wish_of(folder: Folder) -> Path:
    return folder.root / "upgrade.json"


def check(folder: Folder) -> None:
    """Whether this very code can go on with what is in `folder`. `Refused('agent.journal_version' | 'agent.job_format')`."""
    from intertie.agent import journal_file, service  # noqa: F401, PLC0415  # that they can be imported is half of the question
    from intertie.agent.adapters.process import FORMATS  # noqa: PLC0415

    if folder.journal.exists():
        with sqlite3.connect(f"file:{folder.journal}?mode=ro", uri=True, timeout=5.0) as connection:
            found = connection.execute("PRAGMA user_version").fetchone()[0]
        connection.close()
        if found not in journal_file.READABLE:
            raise Refused("agent.journal_version", f"{folder.journal} has format {found}, version {VERSION} reads {journal_file.READABLE}")
    for spec in folder.jobs.glob("*/spec.json"):
        told = supervisor.read_json(str(spec))
        if told is not None and told.get("format") not in FORMATS:
            raise Refused("agent.job_format", f"{spec} has format {told.get('format')}, version {VERSION} reads {FORMATS}")


def asked_by_agent(folder: Folder) -> bool:
    """Is it the running agent itself that calls `check`, to try this code (`_trial`), and no person? An older one knows no other word for it."""
    running = read_mark(folder)
    return running is not None and running.process.pid == os.getppid() and procs.alive(running.process)


# --- the running agent ---


class Successor:
    """The code that takes this process over, if anybody asked for it."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.python = ""

    def announce(self, started: datetime) -> None:
        """This agent works, and may be asked."""
        write_whole(mark_of(self._folder), Running(process=procs.identity(os.getpid()), version=VERSION, started=started))

    def withdraw(self) -> None:
        mark_of(self._folder).unlink(missing_ok=True)

    async def wait(self) -> None:
        """Serve SIGHUP for ever; once new code stood its trial, this process is asked to stop as by SIGTERM."""
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, asked.set)
        try:
            while True:
                await asked.wait()
                asked.clear()
                if python := await self._judged():
                    self.python = python
                    os.kill(os.getpid(), signal.SIGTERM)
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    async def _judged(self) -> str:
        wish = read_wish(self._folder)
        if wish is None:
            LOG.warning("asked to be upgraded, but nothing says to what")
            return ""
        why = await _trial(wish.python, self._folder)
        if not why:
            LOG.info("becoming the new code", python=wish.python)
            return wish.python
        LOG.error("not upgraded", reason=why)
        await asyncio.to_thread(write_whole, wish_of(self._folder), Wish(python=wish.python, refused=why))
        return ""

    def take_over(self) -> None:
        """Become the new code, if it was asked for. Does not return then."""
        if self.python:
            sys.stdout.flush()
            sys.stderr.flush()
            os.execv(self.python, [self.python, "-m", "intertie.agent", "run", "--data", str(self._folder.root)])


async def _trial(python: str, folder: Folder) -> str:
    """Why that code cannot go on here; empty if it can."""
    argv = [python, "-m", "intertie.agent", "check", "--data", str(folder.root)]
    try:
        trial = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    except OSError as err:
        return f"{python}: {err.strerror}"
    try:
        said, _ = await asyncio.wait_for(trial.communicate(), TRIAL_S)
    except TimeoutError:
        trial.kill()
        await trial.wait()
        return f"the new code did not say within {TRIAL_S:.0f} s whether it can go on"
    text = said.decode("utf-8", "replace").strip()
    return "" if trial.returncode == 0 else (text[-1_000:] or f"the new code's check left with {trial.returncode}")


def read_wish(folder: Folder) -> Wish | None:
    """Only from who may replace us anyway: root, or the agent's own user."""
    try:
        if wish_of(folder).stat().st_uid not in (0, os.geteuid()):
            return None
        return msgspec.json.decode(wish_of(folder).read_bytes(), type=Wish)
    except (OSError, msgspec.DecodeError):
        return None


# --- who asks ---


def read_mark(folder: Folder) -> Running | None:
    try:
        return msgspec.json.decode(mark_of(folder).read_bytes(), type=Running)
    except (OSError, msgspec.DecodeError):
        return None


def upgrade(folder: Folder, python: str = sys.executable) -> tuple[Running, Running]:
    """Have the running agent become the code that `python` runs; who ran before, and who runs now.

    `Refused('agent.not_running' | 'agent.upgrade_refused')`: nothing changed. `Unavailable('agent.not_back')`: no agent runs any more.
    """
    before = read_mark(folder)
    if before is None or not procs.alive(before.process):
        raise Refused(
            "agent.not_running",
            f"no agent that can be upgraded works in {folder.root}",
            next_step="start it (its jobs are found again), or restart one of an older version by hand",
        )
    check(folder)
    write_whole(wish_of(folder), Wish(python=python))
    if not procs.send(before.process, signal.SIGHUP):
        raise Unavailable("agent.not_back", "the agent ended just now", next_step="start it: its jobs are found again")
    return before, _wait(folder, before)


def _wait(folder: Folder, before: Running) -> Running:
    for _ in range(int((TRIAL_S + BACK_S) / POLL_S)):
        wish = read_wish(folder)
        if wish is not None and wish.refused:
            raise Refused("agent.upgrade_refused", f"the agent stays version {before.version}: {wish.refused}")
        now = read_mark(folder)
        if now is not None and now.started != before.started and procs.alive(now.process):
            wish_of(folder).unlink(missing_ok=True)
            return now
        if now is None and not procs.alive(before.process):
            break
        time.sleep(POLL_S)
    raise Unavailable(
        "agent.not_back",
        f"the agent of version {before.version} stopped for the new code, and that does not answer",
        next_step=f"its jobs run on: see its log, or go back: install {before.version} and start it with `intertie-agent run --data {folder.root}`",
    )
