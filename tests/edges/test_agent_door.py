"""The owner's door: `intertie local` as a person types it, against a real agent socket, with no hub anywhere."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.fakes.agents import GUEST, offer, pool
from tests.fakes.sites import World, a_site

from intertie.agent.config import VERSION
from intertie.agent.door import Door
from intertie.cli.local_door import call
from intertie.contracts.base import decode
from intertie.contracts.job import Cause
from intertie.contracts.link import Ended, Lane, OfferRefused, Started
from intertie.contracts.local import LocalJob, LocalJobs, LocalLog, LocalPaused, LocalStatus
from intertie.contracts.site import PoolInventory
from intertie.errors import NotFound, Refused

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: other users")


@dataclass
class House:
    """A site with its door open."""

    folder: Path
    world: World

    async def local(self, *arguments: str, lang: str = "C.UTF-8") -> subprocess.CompletedProcess[str]:
        """`intertie local …` from a shell in /tmp."""
        env = {"PATH": os.environ["PATH"], "LANG": lang, "MARK": "from-the-shell"}
        command = [sys.executable, "-m", "intertie.cli", "local", "--data", str(self.folder), *arguments]
        return await asyncio.to_thread(subprocess.run, command, env=env, cwd="/tmp", capture_output=True, text=True, timeout=60)

    async def submit(self, *arguments: str) -> LocalJob:
        done = await self.local("submit", "--json", *arguments)
        assert done.returncode == 0, done.stderr
        return decode(done.stdout, LocalJob)


@pytest.fixture
async def house(short_folder: Path) -> AsyncIterator[House]:
    async with a_site(short_folder, pools=[pool(2)]) as world:

        async def status() -> LocalStatus:
            return LocalStatus(
                site=world.site.joined.site,
                node="here",
                version=VERSION,
                single_user=world.site.adapter.single_user,
                agent_started=world.clock.now(),
                islanded_since=world.clock.now(),
                lanes={},
                pools=list[PoolInventory](),
                lent_jobs=len(world.site.running()),
                local_running=0,
                local_waiting=0,
                journal_entries=await world.journal.entries_waiting(),
            )

        runner = await Door(world.site, status).open(short_folder / "agent.sock")
        try:
            yield House(short_folder, world)
        finally:
            await runner.cleanup()


async def test_a_command_runs_here_with_its_folder_and_environment_and_is_followed_to_its_end(house: House) -> None:
    job = await house.submit("--", "/bin/sh", "-c", 'echo "$MARK in $(pwd)"')
    told = await house.local("logs", "-f", job.job)
    assert (told.returncode, told.stdout) == (0, "from-the-shell in /tmp\n")


async def test_a_script_is_a_file_and_its_failure_is_the_exit_code_of_following_it(house: House) -> None:
    script = house.folder / "job.sh"
    script.write_text("#!/bin/sh\necho out\nexit 3\n")
    job = await house.submit(str(script))
    told = await house.local("logs", "-f", job.job)
    assert (job.name, told.returncode, told.stdout) == ("job.sh", 1, "out\n")
    assert "exit code 3" in told.stderr


async def test_local_work_never_reaches_the_hub_s_lanes(house: House) -> None:
    """Recorded here; not charged, not named there."""
    before = [len(await house.world.entries(lane)) for lane in (Lane.SCHEDULER, Lane.METERING)]
    job = await house.submit("--", "true")
    await house.local("logs", "-f", job.job)
    await house.world.site.idle()
    await house.world.site.observe({})
    assert [len(await house.world.entries(lane)) for lane in (Lane.SCHEDULER, Lane.METERING)] == before
    batch = await house.world.journal.batch(Lane.REGISTRY, 0, 1 << 20)
    assert all(job.job.encode() not in entry for entry in batch.entries)
    rows = await house.world.journal.read(lambda cursor: cursor.execute("SELECT id, state FROM attempt WHERE local = 1").fetchall())
    assert rows == [(job.job, "ended")]


async def test_local_work_and_federation_work_never_share_a_device(house: House) -> None:
    job = await house.submit("--slots", "2", "--", "sleep", "60")
    assert job.devices == ["slot-1", "slot-2"]
    await house.world.tell(house.world.offered(offer(devices=("slot-1",))))
    refused = await house.world.first(OfferRefused)
    assert (refused.code, refused.fault) == ("device_busy", False)
    await house.local("cancel", job.job)
    await house.world.site.idle()
    assert house.world.site.books.holds.holder == {}


async def test_local_work_waits_for_a_claimed_device_and_starts_when_it_is_free(house: House) -> None:
    body = offer(script="sleep 0.5\n", devices=("slot-1",))
    await house.world.run(body)
    await house.world.first(Started)
    job = await house.submit("--slots", "2", "--", "true")
    assert (job.word, job.devices) == ("waiting", [])
    told = await house.local("logs", "-f", job.job)
    assert told.returncode == 0, told.stderr


async def test_a_waiting_job_is_cancelled_without_having_run(house: House) -> None:
    first = await house.submit("--slots", "2", "--", "sleep", "60")
    second = await house.submit("--", "true")
    assert (await house.local("cancel", second.job)).returncode == 0
    found = {job.job: job for job in decode((await house.local("jobs", "--json")).stdout, LocalJobs).jobs}
    assert (found[second.job].outcome, found[second.job].ran_us) == ("cancelled", 0)
    await house.local("cancel", first.job)
    await house.world.site.idle()
    ended = decode((await house.local("jobs", "--json")).stdout, LocalJobs).jobs
    assert {job.outcome for job in ended} == {"cancelled"}


async def test_a_wall_limit_ends_local_work(house: House) -> None:
    job = await house.submit("--wall", "1", "--", "sleep", "60")
    told = await house.local("logs", "-f", job.job)
    assert told.returncode == 1 and "wall limit" in told.stderr


REFUSALS = [
    ("more than there is", ["submit", "--slots", "99", "--", "true"], 1, "agent.no_pool_fits"),
    ("GPUs where there are none", ["submit", "--gpus", "1", "--", "true"], 1, "agent.no_pool_fits"),
    ("a job that is not there", ["cancel", "local-lab-none"], 3, "agent.local_not_found"),
    ("nothing to run", ["submit"], 2, "Missing argument"),
    ("an unknown user", ["submit", "--as", "no-such-user", "--", "true"], 1, "agent.as_user"),
]


@pytest.mark.parametrize(("what", "arguments", "code", "said"), REFUSALS, ids=[row[0] for row in REFUSALS])
async def test_what_cannot_be_is_refused_with_a_code_and_a_next_step(
    house: House, what: str, arguments: list[str], code: int, said: str
) -> None:
    done = await house.local(*arguments)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


async def test_without_an_agent_the_one_sentence_says_what_to_start(short_folder: Path) -> None:
    command = [sys.executable, "-m", "intertie.cli", "local", "--data", str(short_folder), "status"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 5 and "intertie agent run" in done.stderr


async def test_status_speaks_the_reader_s_language(house: House) -> None:
    assert "works alone since" in (await house.local("status")).stdout
    assert "自治运行" in (await house.local("status", lang="zh_CN.UTF-8")).stdout
    assert json.loads((await house.local("status", "--json")).stdout)["site"] == "lab"


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/pause", {"reason": "a\x00b"}, "$.reason"),
        ("/v1/jobs", {"name": "n\x00", "script": "true", "cwd": "/"}, "$.name"),
        ("/v1/jobs", {"name": "n", "script": "true", "cwd": "/a\x00b"}, "$.cwd"),
        ("/v1/jobs", {"name": "n", "script": "true", "cwd": "/", "env": {"A": "\x00"}}, "$.env['A']"),
        ("/v1/jobs", {"name": "n", "script": "true\x00", "cwd": "/", "tenant": "acme"}, "$.script"),
        ("/v1/jobs", {"name": "n", "script": "true", "cwd": "/", "as_user": "a\x00b"}, "$.as_user"),
    ],
)
async def test_a_nul_is_refused_at_the_door_with_its_place(house: House, path: str, body: dict[str, object], place: str) -> None:
    with pytest.raises(Refused) as refused:
        await asyncio.to_thread(call, str(house.folder / "agent.sock"), "POST", path, LocalPaused, body)
    assert (refused.value.code, place in refused.value.text) == ("local.nul", True)


async def test_an_offset_that_is_no_number_of_bytes_is_refused(house: House) -> None:
    job = await house.submit("--", "true")
    for offset in ("%C2%B2", "9" * 5_000, "-1", "x"):
        with pytest.raises(Refused) as refused:
            await asyncio.to_thread(call, str(house.folder / "agent.sock"), "GET", f"/v1/jobs/{job.job}/log?offset={offset}", LocalLog)
        assert refused.value.code == "agent.offset"


async def test_the_owner_pauses_and_resumes_from_the_shell_in_either_language(house: House) -> None:
    pressed = await house.local("pause", "--until", "2h", "--reason", "visitors")
    assert pressed.returncode == 0 and "PAUSED" in pressed.stdout and "visitors" in pressed.stdout, pressed.stderr
    await house.world.tell(house.world.offered(offer(devices=("slot-1",))))
    assert (await house.world.first(OfferRefused)).code == "paused"
    assert (await house.local("resume")).returncode == 0
    assert "暂停" in (await house.local("pause", lang="zh_CN.UTF-8")).stdout
    past = await house.local("pause", "--until", "2020-01-01")
    assert past.returncode == 1 and "pause.past" in past.stderr and "next:" in past.stderr


async def test_the_owner_takes_a_device_back_from_lent_work(house: House) -> None:
    body = offer(script="sleep 60\n", devices=("slot-1",))
    await house.world.run(body)
    await house.world.first(Started)
    done = await house.local("reclaim", body.attempt, "--reason", "a deadline here", "--grace", "1")
    assert done.returncode == 0 and body.attempt in done.stdout, done.stderr
    end = await house.world.first(Ended)
    await house.world.site.idle()
    assert (end.cause, house.world.site.books.holds.holder) == (Cause.PREEMPTED, {})
    again = await house.local("reclaim", "att-none", "--reason", "no such thing")
    assert again.returncode == 3 and "intertie local status" in again.stderr


async def test_the_preview_is_shown_with_its_sums_and_says_why_there_is_no_amount(house: House) -> None:
    empty = await house.local("statement")
    assert empty.returncode == 0 and "no amount" in empty.stdout and "nothing was lent" in empty.stderr
    body = offer(devices=("slot-1", "slot-2"))
    await house.world.run(body)
    await house.world.first(Ended)
    await house.world.site.idle()
    shown = await house.local("statement")
    assert body.job in shown.stdout and "not told yet" in shown.stdout and "1 runs" in shown.stdout
    assert "账单预览" in (await house.local("statement", lang="zh_CN.UTF-8")).stdout
    assert (await house.local("statement", "--period", "yesterday")).returncode == 1


CALL = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
s.sendall(f"{sys.argv[2]} HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\n{{}}".encode())
print(s.recv(65536).decode())
"""


@root_only
@pytest.mark.parametrize(
    "what", ["POST /v1/pause", "POST /v1/resume", "POST /v1/lent/att-x/reclaim", "GET /v1/statement", "POST /v1/leave"]
)
async def test_what_concerns_the_whole_site_is_the_owner_s_alone(house: House, what: str) -> None:
    """Also where the socket lets another account in."""
    os.chmod(house.folder / "agent.sock", 0o666)
    command = ["/usr/bin/python3", "-c", CALL, str(house.folder / "agent.sock"), what]
    done = await asyncio.to_thread(subprocess.run, command, user=GUEST, cwd="/", capture_output=True, text=True, timeout=30)
    assert "403" in done.stdout.splitlines()[0] and "agent.owner_only" in done.stdout, done.stdout + done.stderr


@root_only
async def test_work_runs_as_the_user_who_called_and_root_may_name_one(house: House) -> None:
    mine = await house.submit("--", "id", "-un")
    theirs = await house.submit("--as", GUEST, "--", "id", "-un")
    assert (mine.user, theirs.user) == ("root", GUEST)
    assert (await house.local("logs", "-f", mine.job)).stdout == "root\n"
    assert (await house.local("logs", "-f", theirs.job)).stdout == f"{GUEST}\n"


async def test_the_socket_is_open_to_its_group_and_nobody_else(house: House) -> None:
    mode = os.stat(house.folder / "agent.sock").st_mode
    assert stat.S_IMODE(mode) == 0o660


async def test_a_user_sees_only_their_own_work(house: House) -> None:
    job = await house.submit("--", "true")
    with pytest.raises(NotFound):
        house.world.site.owner.job(job.job, 54_321, everyone=False)
    await house.local("logs", "-f", job.job)
