"""Everything of a job ends with it, and is seen gone; what a job may not reach it does not reach. Real processes, real accounts."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import pwd
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.fakes.agents import GUEST, OTHER, attempt

from intertie.agent import procs, supervisor
from intertie.agent.adapters.port import Presence
from intertie.agent.adapters.process import ProcessAdapter, find_cgroups
from intertie.agent.core.attempts import Exit, verdict
from intertie.agent.core.leases import Deadline
from intertie.agent.core.model import Attempt, StartedRecord
from intertie.clock import kernel_boot
from intertie.contracts.job import Cause
from intertie.contracts.site import DeviceKind
from intertie.errors import Refused

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: distinct accounts for agent and jobs")
PYTHON = "/usr/bin/python3"


@pytest.fixture(params=["subreaper", "cgroup"])
async def machine(request: pytest.FixtureRequest, short_folder: Path) -> AsyncIterator[ProcessAdapter]:
    groups = find_cgroups() if request.param == "cgroup" else None
    if request.param == "cgroup" and groups is None:
        pytest.skip("no cgroup v2 that we may write to")
    yield ProcessAdapter(short_folder / "jobs", cgroups=groups)


@pytest.fixture
def plain(short_folder: Path) -> ProcessAdapter:
    return ProcessAdapter(short_folder / "jobs")


def marked(word: str) -> list[int]:
    """Pids of living processes whose command line holds `word`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
            except OSError:
                continue
            if word.encode() in line and state != b"Z":
                found.append(int(entry.name))
    return found


async def until(holds: object, what: str, limit_s: float = 10.0) -> None:
    assert callable(holds)
    deadline = asyncio.get_running_loop().time() + limit_s
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, f"never: {what}"
        await asyncio.sleep(0.02)


STUBBORN = """#!{python}
import os, signal, sys, time
# {word}
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(300)", "{word}"])
        os._exit(0)
{then}
"""


async def run(machine: ProcessAdapter, work: Attempt) -> None:
    await machine.prepare(work, None)
    assert isinstance(await machine.start(work), StartedRecord)


async def test_daemons_that_ignore_term_are_gone_with_the_job_that_left_them(machine: ProcessAdapter) -> None:
    word = f"left-{os.getpid()}-{id(machine)}"
    work = attempt(STUBBORN.format(python=PYTHON, word=word, then="time.sleep(0.3)"))
    await machine.prepare(work, None)
    spec_file = machine.home(work.id) / "spec.json"
    spec_file.write_text(json.dumps(json.loads(spec_file.read_text()) | {"grace_s": 0.3}))
    await machine.start(work)
    end = await machine.ended(work)
    assert marked(word) == []
    assert (end.code, end.left_behind, end.stopped_for) == (0, 3, None)
    assert verdict(end, work).outcome == "succeeded"


async def test_a_stop_ends_daemons_too(machine: ProcessAdapter) -> None:
    word = f"stop-{os.getpid()}-{id(machine)}"
    work = attempt(STUBBORN.format(python=PYTHON, word=word, then="time.sleep(300)"))
    await run(machine, work)
    await until(lambda: len(marked(word)) >= 3, "the daemons are up")
    await machine.stop(work.id, 0)
    end = await machine.ended(work)
    assert end.stopped_for == "asked" and marked(word) == []


async def test_a_fork_bomb_of_daemons_is_gone(machine: ProcessAdapter) -> None:
    word = f"bomb-{os.getpid()}-{id(machine)}"
    bomb = f"""#!{PYTHON}
import os, resource, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
until = time.monotonic() + 20
word = "{word}"
n = 0
while time.monotonic() < until:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        pass
    n += 1
    time.sleep(0.01 if n < 7 else 1)
"""
    work = attempt(bomb, wall_s=1)
    await machine.prepare(work, None)
    spec_file = machine.home(work.id) / "spec.json"
    spec_file.write_text(json.dumps(json.loads(spec_file.read_text()) | {"grace_s": 0.1}))
    await machine.start(work)
    end = await machine.ended(work)
    assert end.stopped_for == "wall_limit"
    assert marked(str(machine.home(work.id) / "script")) == []


async def test_the_wall_limit_holds_against_a_job_that_ignores_term(machine: ProcessAdapter) -> None:
    work = attempt("trap '' TERM\nwhile :; do sleep 0.1; done\n", wall_s=1)
    await machine.prepare(work, None)
    spec_file = machine.home(work.id) / "spec.json"
    spec_file.write_text(json.dumps(json.loads(spec_file.read_text()) | {"grace_s": 0.3}))
    await machine.start(work)
    end = await machine.ended(work)
    assert (end.stopped_for, end.signal) == ("wall_limit", 9)
    assert verdict(end, work).cause is Cause.JOB


LEASES = [
    ("by boot time", lambda: {"boot_s": supervisor.boot_ns() / 1e9 + 3, "utc": 4e9, "boot_id": kernel_boot()}),
    ("by the wall clock, the earlier", lambda: {"boot_s": 1e12, "utc": supervisor.now()["utc_ns"] / 1e9 + 3, "boot_id": kernel_boot()}),
]


@pytest.mark.parametrize(("what", "lease"), LEASES, ids=[row[0] for row in LEASES])
async def test_a_lease_that_ended_stops_the_job_without_an_agent(plain: ProcessAdapter, what: str, lease: object) -> None:
    assert callable(lease)
    work = attempt("sleep 30\n")
    await plain.prepare(work, None)
    (plain.home(work.id) / "deadline.json").write_text(json.dumps(lease()))
    assert isinstance(await plain.start(work), StartedRecord)
    end = await plain.ended(work)
    assert end.stopped_for == "lease_ended"
    assert verdict(end, work).cause is Cause.PLATFORM


def now_s() -> float:
    return supervisor.boot_ns() / 1e9


LATE = [
    ("its lease passed", {"lease_s": 60}, lambda: {"boot_s": now_s() - 1, "utc": 4e9, "boot_id": kernel_boot()}),
    ("its lease passed by the wall clock", {"lease_s": 60}, lambda: {"boot_s": 1e12, "utc": 1.0, "boot_id": kernel_boot()}),
    ("its lease is of another boot", {"lease_s": 60}, lambda: {"boot_s": 1e12, "utc": 4e9, "boot_id": "another"}),
    ("its lease is not there", {"lease_s": 60}, None),
    ("its lease is no JSON", {"lease_s": 60}, "{"),
    ("its lease is no record", {"lease_s": 60}, "[]"),
    ("its lease holds no numbers", {"lease_s": 60}, '{"boot_id": "x", "boot_s": "soon", "utc": null}'),
    ("start_by passed", {"go_boot_s": now_s() - 700, "start_by_s": 600}, None),
    ("its go is of another boot", {"go_boot_s": now_s(), "kernel_boot": "another"}, None),
]


@pytest.mark.parametrize(("what", "fields", "lease"), LATE, ids=[row[0] for row in LATE])
async def test_a_supervisor_that_comes_too_late_starts_nothing(
    plain: ProcessAdapter, what: str, fields: dict[str, object], lease: object
) -> None:
    """The host slept between the agent's word and the start: the user's code never begins, and it is nobody's fault."""
    work = attempt("touch $INTERTIE_WORK/ran\n", **fields)  # type: ignore[arg-type]  # fields by name
    await plain.prepare(work, None)
    if lease is not None:
        text = lease if isinstance(lease, str) else json.dumps(lease()) if callable(lease) else ""
        (plain.home(work.id) / "deadline.json").write_text(text)
    for _ in range(2):
        end = await plain.start(work)
        assert isinstance(end, Exit) and end.refused_errno == errno.ETIME and "too late" in end.refused_text
    assert not (plain.home(work.id) / "started.json").exists() and not (plain.home(work.id) / "work" / "ran").exists()


def lease(seconds: float, *, said_ago_s: float = 0.0) -> Deadline:
    """So long from now, said a while ago."""
    boot_s, utc = supervisor.boot_ns() / 1e9, supervisor.now()["utc_ns"] / 1e9
    return Deadline(
        boot_id=kernel_boot(), boot_s=boot_s + seconds, utc=utc + seconds, said_boot_s=boot_s - said_ago_s, said_utc=utc - said_ago_s
    )


async def held_still(machine: ProcessAdapter, work: Attempt) -> procs.Identity:
    """Its supervisor, stopped. It read its lease before the job began."""
    who = machine._supervisor(work.id)
    assert who is not None
    assert procs.send(who, signal.SIGSTOP)
    await until(lambda: b" T " in Path(f"/proc/{who.pid}/stat").read_bytes(), "it is stopped")
    return who


async def test_a_lease_that_passed_is_final_although_nobody_looked_and_it_was_renewed_then(plain: ProcessAdapter) -> None:
    work = attempt("sleep 60\n", lease_s=60)
    await plain.prepare(work, None)
    first = lease(3)
    await plain.renew(work.id, first)
    await plain.start(work)
    who = await held_still(plain, work)
    await until(lambda: supervisor.boot_ns() / 1e9 > first.boot_s, "it has passed")
    await plain.renew(work.id, lease(60))
    procs.send(who, signal.SIGCONT)
    assert (await plain.ended(work)).stopped_for == "lease_ended"


async def test_a_lease_that_was_renewed_in_time_holds_although_nobody_looked(plain: ProcessAdapter) -> None:
    work = attempt("until [ -e go ]; do sleep 0.05; done\n", lease_s=60)
    await plain.prepare(work, None)
    first = lease(10)  # Long enough for a loaded machine to come to the next lines.
    await plain.renew(work.id, first)
    await plain.start(work)
    who = await held_still(plain, work)
    await plain.renew(work.id, lease(60, said_ago_s=1))
    await until(lambda: supervisor.boot_ns() / 1e9 > first.boot_s, "the first one has passed")
    procs.send(who, signal.SIGCONT)
    (plain.home(work.id) / "work" / "go").touch()
    end = await plain.ended(work)
    assert (end.code, end.stopped_for) == (0, None)


async def test_a_lease_that_becomes_unreadable_ends_when_it_said(plain: ProcessAdapter) -> None:
    work = attempt("sleep 60\n", lease_s=60)
    await plain.prepare(work, None)
    until_then = lease(3)
    await plain.renew(work.id, until_then)
    await plain.start(work)
    (plain.home(work.id) / "deadline.json").write_bytes(b"{")
    end = await plain.ended(work)
    assert end.stopped_for == "lease_ended" and supervisor.boot_ns() / 1e9 >= until_then.boot_s


async def test_an_agent_killed_and_started_again_adopts_the_run_and_keeps_its_exit_code(short_folder: Path) -> None:
    jobs = short_folder / "jobs"
    ProcessAdapter(jobs)
    work = attempt("sleep 1\nexit 7\n")
    first = (
        "import asyncio, os, signal, msgspec, sys, pathlib\n"
        "from intertie.agent.adapters.process import ProcessAdapter\n"
        "from intertie.agent.core.model import Attempt\n"
        "async def main():\n"
        "    work = msgspec.json.decode(sys.argv[2], type=Attempt)\n"
        "    adapter = ProcessAdapter(pathlib.Path(sys.argv[1]))\n"
        "    await adapter.prepare(work, None)\n"
        "    await adapter.start(work)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", first, str(jobs), msgspec.json.encode(work).decode()], capture_output=True, timeout=30
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    second = ProcessAdapter(jobs)
    assert await second.presence(work.id) is Presence.BEGUN
    assert isinstance(await second.start(work), StartedRecord)
    end = await second.ended(work)
    assert (end.certain, end.code) == (True, 7)


async def test_a_lost_supervisor_leaves_the_end_unknown_and_nobody_pays(machine: ProcessAdapter) -> None:
    work = attempt("echo up\nsleep 1\nexit 0\n")
    await run(machine, work)
    await until(lambda: (machine.home(work.id) / "log").stat().st_size, "the job has begun")
    who = machine._supervisor(work.id)
    assert who is not None and procs.send(who, signal.SIGKILL)
    end = await machine.ended(work)
    judged = verdict(end, work)
    assert (end.certain, judged.outcome, judged.cause) == (False, "unknown", Cause.UNKNOWN)
    assert end.ran_us >= 900_000


async def lost(machine: ProcessAdapter, work: Attempt) -> None:
    """Its supervisor, killed once the job has begun, and seen gone."""
    await until(lambda: marked(str(machine.home(work.id) / "script")), "the job has begun")
    who = machine._supervisor(work.id)
    assert who is not None and procs.send(who, signal.SIGKILL)
    await procs.gone(who)


async def test_a_stop_whose_supervisor_is_killed_in_the_grace_is_carried_out_by_the_agent(machine: ProcessAdapter) -> None:
    """The supervisor has said TERM, and dies before it could kill what ignores that: nobody else would ever end it."""
    word = f"orphan-{os.getpid()}-{id(machine)}"
    work = attempt(STUBBORN.format(python=PYTHON, word=word, then="time.sleep(300)"))
    await run(machine, work)
    await until(lambda: len(marked(word)) >= 3, "the daemons are up")
    await machine.stop(work.id, 3)
    await lost(machine, work)
    assert len(marked(word)) >= 3, "all of it ignores TERM"
    end = await asyncio.wait_for(machine.ended(work), 30)
    assert (end.certain, end.stopped_for) == (True, "asked")
    assert marked(word) == [] and marked(str(machine.home(work.id))) == []


async def test_a_stop_that_comes_after_the_supervisor_was_killed_reaches_daemons_too(machine: ProcessAdapter) -> None:
    word = f"orphan-{os.getpid()}-{id(machine)}"
    work = attempt(STUBBORN.format(python=PYTHON, word=word, then="time.sleep(300)"))
    await run(machine, work)
    await until(lambda: len(marked(word)) >= 3, "the daemons are up")
    await lost(machine, work)
    ending = asyncio.create_task(machine.ended(work))
    await until(lambda: work.id in machine._orphans, "the agent follows it")
    await machine.stop(work.id, 0)
    assert (await asyncio.wait_for(ending, 30)).stopped_for == "asked" and marked(word) == []


async def test_a_stop_without_supervisor_is_carried_out_by_an_agent_that_was_started_again(short_folder: Path) -> None:
    first = ProcessAdapter(short_folder / "jobs")
    word = f"again-{os.getpid()}-{id(first)}"
    work = attempt(STUBBORN.format(python=PYTHON, word=word, then="time.sleep(300)"))
    await run(first, work)
    await until(lambda: len(marked(word)) >= 3, "the daemons are up")
    await lost(first, work)
    await first.stop(work.id, 0)
    end = await asyncio.wait_for(ProcessAdapter(short_folder / "jobs").ended(work), 30)
    assert (end.certain, end.stopped_for) == (True, "asked") and not marked(word)


@pytest.mark.parametrize("supervised", [True, False])
async def test_a_stop_that_the_disk_refuses_to_note_is_a_stop_all_the_same(plain: ProcessAdapter, supervised: bool) -> None:
    work = attempt("sleep 300\n")
    await run(plain, work)
    (plain.home(work.id) / "stop.json").mkdir()
    if not supervised:
        await lost(plain, work)
    await plain.stop(work.id, 0)
    assert (await asyncio.wait_for(plain.ended(work), 20)).stopped_for == "asked"


LIMITS = [
    ("wall_limit", {"wall_s": 2}, None),
    ("lease_ended", {"lease_s": 60}, lambda: lease(2)),
]


@pytest.mark.parametrize(("why", "fields", "told"), LIMITS, ids=[row[0] for row in LIMITS])
async def test_limits_hold_for_work_whose_supervisor_is_gone(
    plain: ProcessAdapter, why: str, fields: dict[str, object], told: object
) -> None:
    work = attempt("trap '' TERM\nwhile :; do sleep 0.1; done\n", **fields)  # type: ignore[arg-type]  # fields by name
    await plain.prepare(work, None)
    if callable(told):
        await plain.renew(work.id, told())
    spec_file = plain.home(work.id) / "spec.json"
    spec_file.write_text(json.dumps(json.loads(spec_file.read_text()) | {"grace_s": 0.3}))
    assert isinstance(await plain.start(work), StartedRecord)
    await lost(plain, work)
    end = await asyncio.wait_for(plain.ended(work), 40)
    assert (end.certain, end.stopped_for) == (True, why) and end.ran_us >= 1_900_000
    assert marked(str(plain.home(work.id))) == []


async def test_leased_work_without_lease_and_supervisor_runs_no_longer(plain: ProcessAdapter) -> None:
    work = attempt("sleep 300\n", lease_s=60)
    await plain.prepare(work, None)
    await plain.renew(work.id, lease(60))
    await plain.start(work)
    await lost(plain, work)
    (plain.home(work.id) / "deadline.json").unlink()
    assert (await asyncio.wait_for(plain.ended(work), 20)).stopped_for == "lease_ended"


async def test_what_only_looks_like_an_orphan_s_process_is_let_be(plain: ProcessAdapter) -> None:
    """A neighbour with another attempt's mark, and one without any, of the same account: neither is touched."""
    others = [procs.identity(procs.spawn(["/bin/sleep", "300"], env=env)) for env in ({"INTERTIE_ATTEMPT": "att-another"}, {})]
    try:
        work = attempt("sleep 300\n")
        await run(plain, work)
        await lost(plain, work)
        await plain.stop(work.id, 0)
        assert (await asyncio.wait_for(plain.ended(work), 20)).stopped_for == "asked"
        assert all(procs.alive(other) for other in others)
    finally:
        for other in others:
            procs.send(other, signal.SIGKILL)
            await procs.gone(other)
            procs.reap(other.pid)


async def test_a_supervisor_lost_between_its_record_and_the_go_leaves_nothing_waiting(machine: ProcessAdapter) -> None:
    """The record is written, the go is not: the job's process must see that nobody is left to say it."""
    work = attempt("sleep 30\n")
    await machine.prepare(work, None)
    copy = machine.home(work.id) / "supervisor.py"
    text = copy.read_text(encoding="utf-8")
    assert 'os.write(go_write, b"1")' in text
    copy.write_text(text.replace('os.write(go_write, b"1")', "os.kill(os.getpid(), signal.SIGKILL)"), encoding="utf-8")
    started = await machine.start(work)
    assert isinstance(started, StartedRecord)
    end = await asyncio.wait_for(machine.ended(work), 20)
    assert not end.certain and marked(str(machine.home(work.id))) == []


async def test_after_a_reboot_the_end_is_the_last_sign_of_life_and_the_site_s_doing(plain: ProcessAdapter) -> None:
    """BR-078: not the moment when it was noticed. The reboot is played: the records say another boot id."""
    work = attempt("exit 0\n")
    await run(plain, work)
    await plain.ended(work)
    home = plain.home(work.id)
    (home / "exit.json").unlink()
    for name in ("supervisor.json", "started.json"):
        record = json.loads((home / name).read_text())
        (home / name).write_text(json.dumps(record | {"boot_id": "before"}))
    begun = json.loads((home / "started.json").read_text())["boot_ns"]
    (home / "alive").write_text(json.dumps({"format": 1, "utc_ns": 1, "boot_ns": begun + 12_345_678_000}))
    end = await plain.ended(work)
    judged = verdict(end, work)
    assert (end.rebooted, end.ran_us, judged.outcome, judged.cause) == (True, 12_345_678, "failed", Cause.SITE)


async def test_a_pid_that_was_given_out_again_is_not_our_process() -> None:
    me = procs.identity(os.getpid())
    assert procs.alive(me)
    assert procs.open_same(procs.Identity(me.pid, me.start_ticks + 1, me.boot_id)) is None
    assert procs.open_same(procs.Identity(me.pid, me.start_ticks, "another boot")) is None
    assert not procs.send(procs.Identity(me.pid, me.start_ticks + 1, me.boot_id), signal.SIGTERM)


async def test_a_job_of_slots_sees_no_gpu_and_a_job_of_gpus_only_its_own(plain: ProcessAdapter) -> None:
    slots = attempt('echo "[$CUDA_VISIBLE_DEVICES]" $CUDA_DEVICE_ORDER\n')
    cards = attempt('echo "[$CUDA_VISIBLE_DEVICES]" $CUDA_DEVICE_ORDER\n', devices=("GPU-1", "GPU-7"), kind=DeviceKind.GPU)
    for work, expected in ((slots, b"[] PCI_BUS_ID\n"), (cards, b"[GPU-1,GPU-7] PCI_BUS_ID\n")):
        await run(plain, work)
        await plain.ended(work)
        assert (await plain.log(work.id, 0, 100)).data == expected


async def test_a_user_s_value_reaches_the_job_and_overrules_none_of_ours(plain: ProcessAdapter) -> None:
    """BR-045: byte for byte, commas and line ends included, and by a file of its own."""
    env = {"SECRET": "s3", "CUDA_VISIBLE_DEVICES": "all", "A": "1,2", "B": "line1\nline2"}
    work = attempt('echo "$SECRET $CUDA_VISIBLE_DEVICES"\nprintf "%s|%s|" "$A" "$B"\n', env=env)
    await run(plain, work)
    await plain.ended(work)
    assert (await plain.log(work.id, 0, 100)).data == b"s3 \n1,2|line1\nline2|"
    env_file = plain.home(work.id) / "env.json"
    assert env_file.stat().st_mode & 0o777 == 0o600
    assert b"s3" not in (plain.home(work.id) / "spec.json").read_bytes()


REFUSED = [
    ("root", "belongs to the system"),
    ("postgres-of-nobody", "no local account"),
    ("daemon", "belongs to the system"),
    ("", "no local"),
]


@needs_root
@pytest.mark.parametrize(("account", "why"), REFUSED, ids=[row[0] or "none" for row in REFUSED])
async def test_work_never_runs_as_root_as_a_database_or_as_nobody_known(plain: ProcessAdapter, account: str, why: str) -> None:
    assert why in plain.may_run_as(account)
    with pytest.raises(Refused, match=r"agent\.account"):
        await plain.prepare(attempt(account=account), None)


@needs_root
async def test_a_job_can_read_and_signal_none_of_the_agent_the_journal_the_database_and_other_jobs(
    plain: ProcessAdapter, short_folder: Path
) -> None:
    key = short_folder / "keys" / "site.nk"
    key.parent.mkdir(mode=0o700)
    key.write_text("SUSEED")
    key.chmod(0o600)
    journal = short_folder / "journal.db"
    sqlite3.connect(journal).close()
    journal.write_bytes(b"books")
    journal.chmod(0o600)
    database = short_folder / "pg"
    database.mkdir(mode=0o700)
    (database / "base").write_text("tables")
    other = attempt("sleep 30\n", account=OTHER, env={"TOKEN": "theirs"})
    await run(plain, other)
    theirs = plain.home(other.id)
    started = plain._started(other.id)
    supervisor_of_theirs = plain._supervisor(other.id)
    assert started is not None and supervisor_of_theirs is not None
    files = [key, journal, database / "base", theirs / "env.json", theirs / "spec.json", theirs / "log", theirs / "script"]
    files += [Path(f"/proc/{started.pid}/environ"), Path(f"/proc/{os.getpid()}/environ")]
    mine = attempt("placeholder")
    own = plain.home(mine.id)
    files += [own / "env.json", own / "spec.json"]
    pids = [os.getpid(), started.pid, supervisor_of_theirs.pid]
    script = "\n".join(
        [
            "#!/bin/sh",
            *(f"cat '{path}' >/dev/null 2>&1 && echo 'READ {path}'" for path in files),
            *(f"kill -0 {pid} 2>/dev/null && echo 'SIGNAL {pid}'" for pid in pids),
            f"ls '{theirs / 'work'}' >/dev/null 2>&1 && echo LISTED",
            f"ls '{short_folder / 'jobs'}' >/dev/null 2>&1 && echo LISTED JOBS",
            "kill -0 $PPID 2>/dev/null && echo 'SIGNAL supervisor'",
            f"touch '{own}/exit.json' 2>/dev/null && echo WROTE",
            "id -u; id -G",
            "exit 0",
        ]
    )
    mine = msgspec.structs.replace(mine, spec=msgspec.structs.replace(mine.spec, script=script))
    await run(plain, mine)
    await plain.ended(mine)
    said = (await plain.log(mine.id, 0, 10_000)).data.decode().split("\n")
    await plain.stop(other.id, 0)
    await plain.ended(other)
    guest = pwd.getpwnam(GUEST)
    assert said == [str(guest.pw_uid), str(guest.pw_gid), ""]


@needs_root
async def test_set_uid_programs_give_a_job_nothing_back(plain: ProcessAdapter, short_folder: Path) -> None:
    copy = short_folder / "id"
    shutil.copyfile("/usr/bin/id", copy)
    os.chown(copy, 0, 0)
    copy.chmod(0o4755)
    work = attempt(f"{copy} -u\ngrep NoNewPrivs /proc/self/status\n")
    await run(plain, work)
    await plain.ended(work)
    said = (await plain.log(work.id, 0, 1000)).data.decode()
    assert said.startswith("65534") and "NoNewPrivs:\t1" in said


@needs_root
async def test_outputs_through_links_out_of_the_folder_are_not_packed(plain: ProcessAdapter, short_folder: Path) -> None:
    secret = short_folder / "secret.txt"
    secret.write_text("hub key")
    work = attempt(
        f"echo mine > a.txt\nln -s {secret} b.txt\nln -s {short_folder} d\nmkdir out; echo deep > out/c.txt\nmkfifo p.txt\n",
        outputs=["**/*.txt", "d", "out/"],
    )
    await run(plain, work)
    await plain.ended(work)
    packed = await plain.pack(work)
    assert packed is not None
    with tarfile.open(plain.result(work.id)) as tar:
        assert sorted(tar.getnames()) == ["a.txt", "out/c.txt"]


async def test_a_full_disk_refuses_the_start_and_says_so(short_folder: Path) -> None:
    """Records are preallocated before the job exists: without room there is no job, rather than a job without an exit code."""
    disk = short_folder / "disk"
    disk.mkdir()
    mounted = await asyncio.to_thread(
        subprocess.run, ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=200,mode=0711", "none", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.decode().strip()}")
    try:
        adapter = ProcessAdapter(disk / "jobs")
        work = attempt("exit 0\n")
        await adapter.prepare(work, None)
        with (disk / "ballast").open("wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(b"x" * 4096)
            except OSError:
                pass
        end = await adapter.start(work)
        assert isinstance(end, Exit) and verdict(end, work).cause is Cause.SITE
        assert not (adapter.home(work.id) / "started.json").exists()
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", "-l", str(disk)], check=False)
