"""A real Slurm in a real federation: the README's walk as pasted, and a hundred jobs while each part of it all is killed in turn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from tests.adapters.slurm_world import ACCOUNT, GUEST, Slurm, missing, running_slurm, until
from tests.journeys.stack import TENANT, Site, Stack, new_folder, running_stack
from tests.journeys.test_readme import ROOT, reader

from intertie.agent.slurm.core import judge
from intertie.agent.slurm.core.records import FIELD, SACCT, Booked, parse_sacct
from intertie.clock import SystemClock
from intertie.contracts.http import MappingBody
from intertie.contracts.identity import Invited, InviteSite, MappingsReply
from intertie.contracts.job import JobSpec, JobState, OnSilence, Resources
from intertie.contracts.site import SiteKind
from intertie.embedded.hub import HubPorts, HubSettings, init_hub
from intertie.embedded.process import free_port
from intertie.embedded.supervise import HubSupervisor, RestartPolicy
from intertie.ids import JobId, SiteName

FENCED = re.compile(r"^```sh slurm\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
WORDS = (
    ("sacctmgr -i add account intertie", "GrpTRES=gres/gpu=2"),
    ("joined as hpc", "hpc\ta100"),
    ("as nobody, cards 0", "COMPLETED"),
    ("× ¥12.00/card-hour = ¥", "COMPLETED", "gres/gpu=1"),
)


def blocks(page: str) -> list[str]:
    return [found["text"] for found in FENCED.finditer((ROOT / page).read_text(encoding="utf-8"))]


@contextlib.asynccontextmanager
async def real_slurm() -> AsyncIterator[Slurm]:
    """After the hub: its ports are taken by then, and none of Slurm's many connections can sit on one."""
    held = contextlib.ExitStack()
    clusters = await asyncio.to_thread(held.enter_context, running_slurm("lab", nodes=2, gpus=4))
    try:
        yield clusters["lab"]
    finally:
        await asyncio.to_thread(held.close)


@pytest.fixture(autouse=True)
def _slurm_is_here(request: pytest.FixtureRequest) -> None:
    if "shared" in request.fixturenames and (why := missing()):
        pytest.skip(why)


@pytest.fixture
def shared() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="js-", dir="/var/tmp"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_the_chinese_page_has_the_same_walk() -> None:
    assert blocks("README.md") == blocks("README.zh.md")
    assert len(blocks("README.md")) == len(WORDS)


async def test_the_walk_works_as_pasted(shared: Path) -> None:
    async with running_stack() as stack, real_slurm() as slurm:
        await stack.add_site("site-a", slots=1, env={"INTERTIE_BEAT_S": "0.2"})
        with reader(stack) as shell:
            shell.env |= {"SLURM_CONF": str(slurm.conf), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            for text, words in zip(blocks("README.md"), WORDS, strict=True):
                pasted = text.replace("demo", TENANT).replace("/shared/intertie", str(shared)).replace("every_s = 30", "every_s = 1")

                def read(pasted: str = pasted, words: tuple[str, ...] = words) -> bool:
                    code, written = shell.paste(pasted, limit_s=120)
                    missing = [word for word in words if word not in written]
                    again = pasted.startswith("intertie statement")
                    assert code == 0 or again, f"exit {code}\n$ {pasted}\n{written}"
                    assert again or not missing, f"missing {missing}\n$ {pasted}\n{written}"
                    return code == 0 and not missing

                await stack.until(read, what=f"the words {words}", limit_s=150)


# --- faults ------------------------------------------------------------------------------------------------------------------------------

RULES = """[slurm]
folder = "{folder}"
partition = "train"
account = "{account}"
accounts = ["{guest}"]
become = "root"
every_s = 1
path = "{path}"
conf = "{conf}"
look_back_days = 2
"""
PROFILE = """[[pool]]
pool = "cpu"
accelerator = "none"
count = 64
memory_mib = 4096
interconnect = "none"
task_types = ["train", "fine-tune", "inference", "batch"]
lendable = {{ devices = 24 }}
"""


async def add_slurm(stack: Stack, slurm: Slurm, shared: Path, name: str = "hpc") -> Site:
    """Invite, join, map and start a site whose queue is this Slurm."""
    site = Site(SiteName(name), stack.folder / name, {"INTERTIE_BEAT_S": "0.2", "PATH": f"{os.environ['PATH']}:/usr/sbin"})
    profile = stack.folder / f"{name}.toml"

    def join() -> None:
        invited = stack.admin.post(
            "/v1/invitations", Invited, InviteSite(site=site.name, kind=SiteKind.SLURM, owner="tester", owner_tenant=TENANT)
        )
        profile.write_text(PROFILE.format(), encoding="ascii")
        site.folder.mkdir(mode=0o711)
        rules = RULES.format(folder=shared, account=ACCOUNT, guest=GUEST, path=os.environ["PATH"], conf=slurm.conf)
        (site.folder / "site.toml").write_text(rules, encoding="ascii")
        words = ("join", "--hub", stack.layout.public_url, "--token-file", "-", "--data", str(site.folder), "--profile", str(profile))
        done = subprocess.run(
            (sys.executable, "-m", "intertie.agent", *words), input=invited.token.encode(), capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        stack.admin.put(f"/v1/tenants/{TENANT}/mappings/{name}", MappingsReply, MappingBody(account=GUEST))

    await stack.do(join)
    stack.sites[name] = site
    await stack.start_agent(name)
    await stack.until(lambda: stack.fresh(name), what=f"site {name} is heard")
    return site


@contextlib.asynccontextmanager
async def federation(shared: Path) -> AsyncIterator[tuple[Stack, Slurm]]:
    async with running_stack() as stack, real_slurm() as slurm:
        await add_slurm(stack, slurm, shared)
        try:
            yield stack, slurm
        finally:
            await stack.do(slurm.clear)


def queued(slurm: Slurm) -> int:
    """Jobs that the queue has or remembers."""
    return len(slurm.run("squeue", "-h", "-t", "all", "-o", "%A").split())


def booked(slurm: Slurm) -> list[Booked]:
    """All that the site's own accounting has, whole."""
    env = {**slurm.env, "SLURM_TIME_FORMAT": "%s"}
    words = ("--allocations", "--noheader", "--parsable2", f"--delimiter={FIELD}", "--duplicates", "--noconvert", "--allusers")
    done = subprocess.run(
        ("sacct", *words, f"--format={','.join(SACCT)}", "--starttime=now-1hours"), env=env, capture_output=True, timeout=60, check=False
    )
    read = parse_sacct(done.stdout)
    assert not read.bad, read.bad
    return list(read.rows)


# A job's own mark: written once by each run of it, whatever anybody's books say.
SCRIPT = 'echo "$INTERTIE_JOB" >> {marks}/ran\nsleep {seconds}\n'


async def test_a_hundred_jobs_while_every_part_is_killed(shared: Path) -> None:
    """Slurm's controller, nodes and accounting, the agent and the bus: no job is lost or doubled, and its books agree with ours."""
    marks = shared / "marks"
    await asyncio.to_thread(marks.mkdir)
    await asyncio.to_thread(os.chmod, marks, 0o777)
    async with federation(shared) as (stack, slurm):
        spec = partial(JobSpec, name="short", wall_s=600, site=SiteName("hpc"), start_by_s=3_600)
        jobs: list[JobId] = []

        async def submit(count: int) -> None:
            for n in range(count):
                script = SCRIPT.format(marks=marks, seconds=5 + n % 3)
                jobs.append(await stack.retry(partial(stack.submit, spec(script=script), key=f"job-{len(jobs)}")))

        await submit(25)
        # What slurmctld has not saved it loses, and with it jobs that run: that is another test's. This one kills what has been saved.
        await stack.until(lambda: queued(slurm) >= 25, what="all of them are in Slurm", limit_s=120)
        seen = datetime.now(UTC).timestamp()
        await stack.until(
            lambda: (slurm.folder / "state" / "job_state").stat().st_mtime > seen, what="slurmctld has saved them", limit_s=60
        )
        await stack.do(slurm.ctld.kill)
        await submit(15)
        await stack.do(slurm.ctld.start)
        # A slurmctld without saved associations refuses to start while slurmdbd is away: one after the other.
        await stack.do(lambda: until(slurm.answers, "slurmctld answers again"))
        await stack.do(slurm.slurmds["lab1"].kill)
        await submit(15)
        await stack.do(slurm.slurmds["lab1"].start)
        await stack.do(slurm.books.dbd.kill)
        await submit(15)
        await stack.kill_agent("hpc")
        await submit(15)
        await stack.do(slurm.books.dbd.start)
        await stack.do(partial(stack.kill, "nats"))
        await submit(15)

        def all_over() -> bool:
            return all(stack.ended(job) is not None for job in jobs)

        await stack.until(all_over, what="every job has ended", limit_s=420)
        records = [await stack.do(partial(stack.job, job)) for job in jobs]
        failed = [(record.job, record.state, record.attempts[-1].reason) for record in records if record.state is not JobState.SUCCEEDED]
        assert not failed, failed
        await stack.until(lambda: stack.complete_statement(set(jobs)), what="all of it is in the books", limit_s=120)
        ran = (await asyncio.to_thread((marks / "ran").read_text)).split()
        assert sorted(ran) == sorted(jobs), "each ran once"
        await stack.until(lambda: not differences(stack, slurm, jobs, shared), what="both books agree", limit_s=120)


def differences(stack: Stack, slurm: Slurm, jobs: list[JobId], shared: Path) -> list[str]:
    """Per job: what Slurm's own books lack or have twice, and times that differ by more than their resolution of a second at each end."""
    ours = judge.Ours(shared, frozenset({GUEST}))
    now = datetime.now(UTC)
    runs = judge.accounted(booked(slurm), ours, now - timedelta(hours=1), now + timedelta(hours=1))
    by_tag = {run.tag: run for run in runs if run.tag is not None and (run.elapsed_us or 0) >= 0 and run.ended is not None}
    found: list[str] = []
    for job in jobs:
        attempt = next(one for one in stack.job(job).attempts if one.outcome == "succeeded")
        run = by_tag.get(attempt.attempt)
        if run is None or run.elapsed_us is None:
            found.append(f"{job}: no run in Slurm's books")
        elif abs(run.elapsed_us - attempt.ran_us) > 2 * run.resolution_us:
            found.append(f"{job}: {run.elapsed_us} there, {attempt.ran_us} here")
    return found


# The lease, the time to find out that it has passed, and beats.
LEASE_S = 30
SETTINGS = {"INTERTIE_RERUN_LEASE_S": str(LEASE_S), "INTERTIE_BEAT_S": "0.4"}


@contextlib.asynccontextmanager
async def short_lease() -> AsyncIterator[Stack]:
    """A hub whose leases are short enough for a test."""
    folder = await asyncio.to_thread(new_folder)
    ports = HubPorts(bus=free_port(), database=free_port(), gateway=free_port())
    made = HubSettings(time_zone="Asia/Shanghai", ports=ports)
    layout = await asyncio.to_thread(init_hub, folder / "hub", SystemClock().now(), settings=made)
    stack = Stack(folder, layout)
    stack.supervisor = HubSupervisor(layout, policy=RestartPolicy(most_s=1.0, limit=50), say=stack.said.append, extra_env=SETTINGS)
    try:
        await stack.start()
        yield stack
    finally:
        await stack.stop()
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def test_rerun_work_that_waits_in_slurm_at_the_cut_does_not_start_beside_its_replacement(shared: Path) -> None:
    """LINK D6: its agent is gone, its lease passes, another site runs the job; then Slurm's queue opens."""
    marks = shared / "marks"
    await asyncio.to_thread(marks.mkdir)
    await asyncio.to_thread(os.chmod, marks, 0o777)
    async with short_lease() as stack, real_slurm() as slurm:
        await add_slurm(stack, slurm, shared)
        await stack.do(partial(slurm.run, "scontrol", "update", "PartitionName=train", "State=DOWN"))
        script = SCRIPT.format(marks=marks, seconds=0)
        spec = JobSpec(name="again", script=script, resources=Resources(slots=1), on_silence=OnSilence.RERUN, restartable=True)
        job = await stack.do(partial(stack.submit, spec))
        await stack.until(lambda: slurm.run("squeue", "-h", "-o", "%j").split().count(job) == 1, what="it waits in Slurm", limit_s=120)
        child = stack.sites["hpc"].child
        assert child is not None
        await stack.do(child.kill)
        await stack.add_site("site-a", slots=1, env={"INTERTIE_BEAT_S": "0.4"})
        record = await stack.until(lambda: stack.ended(job), what="another site ran it", limit_s=LEASE_S + 150)
        assert record.state is JobState.SUCCEEDED and record.attempts[-1].site == "site-a"
        assert "job" in (await asyncio.to_thread((marks / "ran").read_text))

        await stack.do(partial(slurm.run, "scontrol", "update", "PartitionName=train", "State=UP"))
        await stack.until(lambda: not slurm.run("squeue", "-h", "-o", "%j").split(), what="Slurm is done with it", limit_s=120)
        ran = (await asyncio.to_thread((marks / "ran").read_text)).split()
        assert ran == [job], "its stub refused to begin the user's code"
        (folder,) = [one for one in await asyncio.to_thread(lambda: list(shared.glob("att-*")))]
        assert "why=too_late" in await asyncio.to_thread((folder / "refused").read_text)

        await stack.start_agent("hpc")

        def told() -> bool:
            first = stack.job(job).attempts[0]
            return first.state in ("not_started", "ended")

        await stack.until(told, what="the site says that it never ran there", limit_s=120)
        assert (await stack.do(partial(stack.job, job))).state is JobState.SUCCEEDED
