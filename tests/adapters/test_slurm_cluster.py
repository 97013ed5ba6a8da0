"""A real Slurm 22.05, two clusters with common books: what no listing in a file can prove."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from tests.adapters.slurm_shell import TroubledShell, rules_of
from tests.adapters.slurm_world import ACCOUNT, GUEST, Slurm
from tests.fakes.agents import attempt

from intertie.agent.adapters.files import Content, LocalFiles, Owned
from intertie.agent.adapters.port import Accounted, NativeJob, NativeOutcome, NativePhase, NativeWork
from intertie.agent.adapters.port import Queued as Waits
from intertie.agent.adapters.queue import QueueAdapter
from intertie.agent.adapters.stub import Start, start_sh
from intertie.agent.core.attempts import Exit
from intertie.agent.core.model import Attempt
from intertie.agent.core.rights import SLOTS
from intertie.agent.slurm.cluster import SlurmCluster
from intertie.agent.slurm.commands import Commands
from intertie.agent.slurm.core.rules import SlurmMap, SlurmRules
from intertie.agent.slurm.transport import Done, Unsure, environment
from intertie.clock import SystemClock
from intertie.contracts.site import DeviceKind
from intertie.errors import Refused, Unavailable
from intertie.ids import AttemptId, JobId

CLOCK = SystemClock()
LIMIT_S = 60.0


@dataclass
class Bench:
    """One `SlurmCluster` over real commands, and jobs as the queue adapter prepares them."""

    slurm: Slurm
    folder: Path
    rules: SlurmRules
    shell: TroubledShell
    files: LocalFiles
    cluster: SlurmCluster
    works: dict[AttemptId, NativeWork] = field(default_factory=dict)

    async def prepare(self, script: str, *, begin_within_s: float = 300.0, **about: object) -> NativeWork:
        made = attempt(script, account=GUEST, **about)  # type: ignore[arg-type]
        owned = Owned(made.id, GUEST)
        start = Start(folder=self.files.seen(owned), wall_s=made.spec.wall_s)
        content = {"start.sh": (start_sh(start), 0o500), "script": (f"#!/bin/sh\n{script}".encode(), 0o500)}
        await self.files.make(owned, Content(content))
        work = NativeWork(made, self.files.seen(owned), CLOCK.now() + timedelta(seconds=begin_within_s))
        self.works[made.id] = work
        return work

    async def submit(self, script: str, **about: object) -> tuple[Attempt, NativeJob]:
        work = await self.prepare(script, **about)  # type: ignore[arg-type]
        return work.attempt, await self.cluster.submit(work)

    async def until(self, tag: AttemptId, *phases: NativePhase, limit_s: float = LIMIT_S) -> NativeJob:
        deadline = time.monotonic() + limit_s
        while True:
            job = (await self.cluster.status([tag])).jobs.get(tag)
            if job is not None and job.phase in phases:
                return job
            assert time.monotonic() < deadline, f"{tag} is {job}"
            await asyncio.sleep(0.2)

    async def booked(self, tag: AttemptId, since: datetime) -> Accounted:
        """The run in the site's own books, which lag."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            runs = [run for run in await self.cluster.accounting(since, CLOCK.now() + timedelta(seconds=60)) if run.tag == tag]
            if runs and runs[-1].end is not None:
                return runs[-1]
            assert time.monotonic() < deadline, runs
            await asyncio.sleep(0.2)

    async def end(self, script: str, **about: object) -> NativeJob:
        made, _ = await self.submit(script, **about)
        return await self.until(made.id, NativePhase.ENDED)


@pytest.fixture
async def bench(lab: Slurm) -> AsyncIterator[Bench]:
    folder = Path(tempfile.mkdtemp(prefix="jf-", dir="/var/tmp"))
    os.chmod(folder, 0o711)
    rules = rules_of(lab, folder)
    shell = TroubledShell(environment(rules))
    files = LocalFiles(folder)
    cluster = SlurmCluster(Commands(shell, rules, CLOCK), rules, files, CLOCK)
    await cluster.open()
    yield Bench(lab, folder, rules, shell, files, cluster)
    await cluster.close()
    shutil.rmtree(folder, ignore_errors=True)


ENDS = [
    ("succeeds", "exit 0\n", NativeOutcome.EXITED, 0, None),
    ("keeps its exit code", "exit 7\n", NativeOutcome.EXITED, 7, None),
    ("ends with 137", "exit 137\n", NativeOutcome.EXITED, 137, None),
]


@pytest.mark.parametrize(("name", "script", "outcome", "code", "signal"), ENDS, ids=[row[0] for row in ENDS])
async def test_a_job_ends_as_slurm_tells_it(
    bench: Bench, name: str, script: str, outcome: NativeOutcome, code: int | None, signal: int | None
) -> None:
    job = await bench.end(script)
    assert job.end is not None
    assert (job.end.outcome, job.end.code, job.end.signal) == (outcome, code, signal)
    assert job.cluster == "lab" and job.submitted and job.started and job.ended and job.nodes


async def test_a_first_process_that_is_killed_is_no_exit_137(bench: Bench) -> None:
    work = await bench.prepare("exit 0\n")
    await bench.files.write(Owned(work.attempt.id, GUEST), "start.sh", b"#!/bin/sh\nkill -9 $$\n")
    await bench.cluster.submit(work)
    job = await bench.until(work.attempt.id, NativePhase.ENDED)
    assert job.end is not None
    assert (job.end.outcome, job.end.signal) == (NativeOutcome.SIGNALLED, 9)


async def test_slurm_s_own_time_limit_is_told_from_an_exit(bench: Bench) -> None:
    made, job = await bench.submit("sleep 600\n", wall_s=3_600)
    await bench.until(made.id, NativePhase.RUNNING)
    bench.slurm.run("scontrol", "update", f"JobId={job.native_id}", "TimeLimit=0:01")
    ended = await bench.until(made.id, NativePhase.ENDED, limit_s=120.0)
    assert ended.end is not None and ended.end.outcome is NativeOutcome.WALL_LIMIT


async def test_br_046_a_submit_whose_answer_was_lost_is_found_by_its_tag(bench: Bench) -> None:
    bench.shell.instead = [
        ("sbatch", None, Done(1, b"", b"sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"))
    ]
    made, job = await bench.submit("sleep 60\n")
    again = await bench.cluster.submit(bench.works[made.id])
    assert again.native_id == job.native_id
    names = bench.slurm.run("squeue", "-h", "-o", "%j").split()
    assert names == [made.job]


async def test_br_047_a_submit_without_an_id_is_not_known_to_have_been_taken(bench: Bench) -> None:
    bench.shell.instead = [("sbatch", lambda: Done(0, b"", b""), Done(0, b"\n", b"sbatch: all is well"))]
    with pytest.raises(Unsure):
        await bench.submit("exit 0\n")
    bench.shell.instead = [("sbatch", lambda: Done(1, b"", b""), Done(1, b"", b"sbatch: error: invalid partition specified: x"))]
    with pytest.raises(Refused, match="invalid partition"):
        await bench.submit("exit 0\n")
    # With a warning beside it the id counts.
    bench.shell.instead = [("sbatch", lambda: Done(0, b"", b""), Done(0, b"Submitted batch job 555\n", b"sbatch: warning: old option"))]
    _, job = await bench.submit("exit 0\n")
    assert job.native_id == "555"


async def test_br_010_an_empty_queue_and_silent_books_are_no_end(bench: Bench) -> None:
    made, _ = await bench.submit("sleep 60\n")
    await bench.until(made.id, NativePhase.RUNNING)
    empty = Done(0, b"", b"")
    bench.shell.instead = [("squeue", lambda: empty, empty), ("sacct", lambda: empty, empty)]
    listing = await bench.cluster.status([made.id])
    assert made.id not in listing.jobs
    assert (await bench.cluster.status([made.id])).jobs[made.id].phase is NativePhase.RUNNING


async def test_br_005_a_query_that_this_slurm_does_not_know_ends_nothing(bench: Bench) -> None:
    made, _ = await bench.submit("sleep 60\n")
    old = Done(1, b"", b"squeue: unrecognized option '--only-job-state'")
    bench.shell.instead = [("squeue", lambda: old, old)]
    with pytest.raises(Unavailable, match="unrecognized option") as told:
        await bench.cluster.status([made.id])
    assert told.value.code == "slurm.option"
    assert not [argv for argv in bench.shell.ran if argv[0] == "scancel"]


async def test_br_009_br_011_what_has_left_the_queue_is_asked_of_the_books(bench: Bench) -> None:
    began = CLOCK.now() - timedelta(seconds=5)
    made, _ = await bench.submit("exit 200\n")
    await bench.until(made.id, NativePhase.ENDED)
    await bench.booked(made.id, began)
    gone = Done(1, b"", b"slurm_load_jobs error: Invalid job id specified")
    fresh = SlurmCluster(bench.cluster.slurm, bench.rules, bench.files, CLOCK, name="lab")
    empty = Done(0, b"", b"")
    bench.shell.instead = [("squeue", lambda: empty, empty)]
    job = (await fresh.status([made.id])).jobs[made.id]
    # What the books alone say of an exit code is not the whole of it.
    assert job.end is not None and (job.end.outcome, job.end.code) == (NativeOutcome.EXITED, None)
    assert "72 or 200" in job.end.text
    bench.shell.instead = [("scontrol", lambda: gone, gone)]
    assert await fresh.slurm.job(999_999) is None


async def test_accounting_that_is_away_hides_no_end_that_the_queue_remembers(bench: Bench) -> None:
    made, _ = await bench.submit("exit 7\n")
    away = Done(1, b"", b"sacct: error: Problem talking to the database: Connection refused")
    bench.shell.instead = []
    deadline = time.monotonic() + LIMIT_S
    while True:
        bench.shell.instead = [("sacct", lambda: away, away)]
        listing = await bench.cluster.status([made.id])
        job = listing.jobs.get(made.id)
        if job is not None and job.phase is NativePhase.ENDED:
            break
        assert time.monotonic() < deadline, job
        await asyncio.sleep(0.2)
    assert job.end is not None and job.end.code == 7
    assert not listing.complete and "accounting is away" in listing.why


async def test_a_native_id_that_was_given_out_again_is_another_job(bench: Bench) -> None:
    """BR-013: the id counter of a cluster was set back; only the tag says whose a job is."""
    first, one = await bench.submit("exit 3\n")
    await bench.until(first.id, NativePhase.ENDED)
    fresh = SlurmCluster(bench.cluster.slurm, bench.rules, bench.files, CLOCK, name="lab")
    fresh._remember(AttemptId("att-other"), GUEST).number = int(one.native_id)
    listing = await fresh.status([AttemptId("att-other"), first.id])
    assert set(listing.jobs) == {first.id}


async def test_a_job_that_comes_too_late_is_dropped_by_the_queue_itself(bench: Bench) -> None:
    made = (await bench.prepare("exit 0\n", wall_s=60)).attempt
    request_words = [word for word in await submitted_words(bench, made) if word.startswith(("--no-requeue", "--dependency", "--deadline"))]
    assert request_words[:2] == ["--no-requeue", "--dependency=singleton"]
    assert request_words[2].startswith("--deadline=now+")
    late = await bench.prepare("exit 0\n", begin_within_s=0.5)
    with pytest.raises(Refused) as told:
        await bench.cluster.submit(late)
    assert told.value.code == "slurm.too_late"


async def submitted_words(bench: Bench, made: Attempt) -> Sequence[str]:
    await bench.cluster.submit(bench.works[made.id])
    return next(argv for argv in bench.shell.ran if argv[0] == "sbatch")


async def test_two_attempts_of_one_job_never_run_at_once(bench: Bench) -> None:
    first, _ = await bench.submit("sleep 60\n")
    await bench.until(first.id, NativePhase.RUNNING)
    work = await bench.prepare("exit 0\n", job=JobId(first.job), generation=2)
    await bench.cluster.submit(work)
    waiting = await bench.until(work.attempt.id, NativePhase.QUEUED)
    assert waiting.generation == 2
    deadline = time.monotonic() + LIMIT_S
    while waiting.reason != "Dependency":
        assert time.monotonic() < deadline, waiting
        await asyncio.sleep(0.2)
        waiting = await bench.until(work.attempt.id, NativePhase.QUEUED)
    await bench.cluster.cancel(first.id, 1)
    await bench.until(work.attempt.id, NativePhase.ENDED)


async def test_cards_are_asked_for_by_slurm_s_word_and_counted_in_its_books(bench: Bench) -> None:
    started = CLOCK.now() - timedelta(seconds=5)
    made, _ = await bench.submit(
        'echo "cards $CUDA_VISIBLE_DEVICES"; sleep 1\n', kind=DeviceKind.GPU, devices=("lent-1", "lent-2"), model="A100-SXM4-80GB"
    )
    job = await bench.until(made.id, NativePhase.ENDED)
    assert job.nodes == ("lab1",)
    assert b"cards 0,1" in (await bench.cluster.logs(made.id, 0, 1000)).data
    run = await bench.booked(made.id, started)
    assert (run.devices, run.model, run.native_id) == (2, "a100", job.native_id)
    assert run.elapsed_us is not None and run.resolution_us == 1_000_000


async def test_a_card_that_no_node_has_is_refused_with_slurm_s_word(bench: Bench) -> None:
    with pytest.raises(Refused, match="Requested node configuration is not available") as told:
        await bench.submit("exit 0\n", kind=DeviceKind.GPU, devices=tuple(f"lent-{n}" for n in range(5)), model="A100-SXM4-80GB")
    assert told.value.code == "slurm.no_such_node"


async def test_a_cancel_asks_first_and_is_harmless_afterwards(bench: Bench) -> None:
    made, _ = await bench.submit("trap 'echo asked; exit 5' TERM; echo ready; for i in $(seq 600); do sleep 0.1; done\n")
    await bench.until(made.id, NativePhase.RUNNING)
    deadline = time.monotonic() + LIMIT_S
    # Begun is not yet able to hear: a signal before its trap ends it without a word.
    while b"ready" not in (await bench.cluster.logs(made.id, 0, 1000)).data:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    await bench.cluster.cancel(made.id, 10)
    await bench.until(made.id, NativePhase.ENDED)
    assert b"asked" in (await bench.cluster.logs(made.id, 0, 1000)).data
    await bench.cluster.cancel(made.id, 10)
    await bench.cluster.cancel(AttemptId("att-never"), 10)


async def test_a_job_that_waits_is_cancelled_and_never_started(bench: Bench) -> None:
    bench.slurm.run("scontrol", "update", "PartitionName=train", "State=DOWN")
    try:
        made, _ = await bench.submit("exit 0\n")
        await bench.until(made.id, NativePhase.QUEUED)
        await bench.cluster.cancel(made.id, 10)
        job = await bench.until(made.id, NativePhase.ENDED)
        assert job.end is not None and job.end.outcome is NativeOutcome.NEVER_STARTED
    finally:
        bench.slurm.run("scontrol", "update", "PartitionName=train", "State=UP")


async def test_suspended_time_is_in_the_books(bench: Bench) -> None:
    began = CLOCK.now() - timedelta(seconds=5)
    made, job = await bench.submit("for i in $(seq 30); do sleep 0.1; done\n")
    await bench.until(made.id, NativePhase.RUNNING)
    bench.slurm.run("scontrol", "suspend", job.native_id)
    await bench.until(made.id, NativePhase.SUSPENDED)
    await asyncio.sleep(2.2)  # What is measured is the length of this pause.
    bench.slurm.run("scontrol", "resume", job.native_id)
    ended = await bench.until(made.id, NativePhase.ENDED)
    run = await bench.booked(made.id, began)
    assert run.suspended_us >= 2_000_000
    assert ended.end is not None and ended.end.code == 0


async def test_a_drained_node_leaves_at_once_and_foreign_work_is_a_number(bench: Bench) -> None:
    slurm = bench.slurm
    before = await bench.cluster.describe()
    assert before.cluster == "lab" and before.version.startswith("22.05")
    assert {(one.model, one.devices, one.busy, one.usable) for one in before.nodes if one.model != SLOTS} == {
        ("A100-SXM4-80GB", 4, 0, True),
        ("H20", 4, 0, True),
    }
    slurm.run("sbatch", "--parsable", "--gres=gpu:h20:3", "--account=root", "--output=/dev/null", "--chdir=/tmp", "--wrap", "sleep 60")
    slurm.run("scontrol", "update", "NodeName=lab1", "State=DRAIN", "Reason=its fan")
    try:
        deadline = time.monotonic() + LIMIT_S
        while True:
            await bench.cluster.status([])
            seen = await bench.cluster.describe()
            if seen.load.running == 1 and seen.load.devices_busy == 3:
                break
            assert time.monotonic() < deadline, seen
            await asyncio.sleep(0.2)
        (drained,) = [one for one in seen.nodes if one.name == "lab1" and one.model != SLOTS]
        assert (drained.usable, drained.reason) == (False, "its fan")
    finally:
        slurm.run("scontrol", "update", "NodeName=lab1", "State=RESUME")


async def test_work_by_hand_under_a_lent_account_is_told_and_not_ours(bench: Bench) -> None:
    """BR-148: only a tag of ours makes a job ours."""
    bench.slurm.run("sbatch", "--parsable", f"--uid={GUEST}", "--output=/dev/null", "--chdir=/tmp", "--wrap", "sleep 60")
    await bench.cluster.status([])
    told = await bench.cluster.describe()
    assert told.load.running + told.load.waiting == 1
    assert told.warnings == (f"1 jobs of account {GUEST} did not come through us",)


async def test_a_value_never_becomes_an_option(bench: Bench) -> None:
    work = await bench.prepare("exit 0\n", job=JobId("--wrap=id"))
    with pytest.raises(Refused) as told:
        await bench.cluster.submit(work)
    assert told.value.code == "slurm.name"
    assert not [argv for argv in bench.shell.ran if argv[0] == "sbatch"]


async def test_nothing_of_the_agent_s_environment_reaches_a_job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERTIE_SECRET", "of the agent")
    made, _ = await bench.submit("env\nid -un\n")
    await bench.until(made.id, NativePhase.ENDED)
    log = (await bench.cluster.logs(made.id, 0, 100_000)).data
    assert b"INTERTIE_SECRET" not in log
    assert GUEST.encode() in log.splitlines()


async def test_a_tenant_s_row_of_the_map_says_partition_and_qos(bench: Bench) -> None:
    rules = msgspec.structs.replace(bench.rules, map=[SlurmMap(tenant="acme", partition="short", qos="normal")])
    bench.cluster.rules = rules
    made, job = await bench.submit("sleep 60\n")
    assert bench.slurm.run("squeue", "-h", "-j", job.native_id, "-o", "%P %q %a %u").split() == ["short", "normal", ACCOUNT, GUEST]


async def test_br_072_a_time_limit_that_the_owner_changed_is_told(bench: Bench) -> None:
    made, job = await bench.submit("sleep 60\n", wall_s=600)
    bench.slurm.run("scontrol", "update", f"JobId={job.native_id}", "TimeLimit=5")
    changed = await bench.until(made.id, NativePhase.QUEUED, NativePhase.RUNNING)
    assert "time limit 5 min instead of 10 min" in changed.warning


async def test_br_018_two_clusters_of_one_slurm_have_a_job_each_of_one_number(bench: Bench, slurms: dict[str, Slurm]) -> None:
    """Named with every command: what is asked of one is not answered by the other."""
    rules = msgspec.structs.replace(bench.rules, cluster="sea")
    other = SlurmCluster(Commands(bench.shell, rules, CLOCK), rules, bench.files, CLOCK)
    work = await bench.prepare("sleep 60\n")
    try:
        job = await other.submit(work)
        assert job.cluster == "sea"
        assert job.native_id in slurms["sea"].run("squeue", "-h", "-o", "%A").split()
        assert work.attempt.id not in (await bench.cluster.status([work.attempt.id])).jobs
        assert (await other.status([work.attempt.id])).jobs[work.attempt.id].cluster == "sea"
        await other.cancel(work.attempt.id, 0)
        asked = [argv for argv in bench.shell.ran if argv[0] in ("sbatch", "scancel")]
        assert asked and all("--clusters=sea" in argv for argv in asked)
    finally:
        await asyncio.to_thread(slurms["sea"].clear)


async def test_one_look_serves_all_jobs(bench: Bench) -> None:
    tags = [(await bench.submit("sleep 60\n"))[0].id for _ in range(5)]
    before = bench.cluster.questions
    listing = await bench.cluster.status(tags)
    assert len(listing.jobs) == 5
    assert bench.cluster.questions - before == 1


async def test_a_controller_that_is_away_is_no_answer_and_no_submit(bench: Bench) -> None:
    made, _ = await bench.submit("sleep 60\n")
    bench.slurm.ctld.end()
    try:
        with pytest.raises(Unavailable):
            await bench.cluster.status([made.id])
        work = await bench.prepare("exit 0\n")
        with pytest.raises(Unavailable):
            await bench.cluster.submit(work)
    finally:
        bench.slurm.ctld.start()


async def test_a_waiting_job_that_slurmctld_lost_is_given_up_and_never_runs(bench: Bench) -> None:
    """LAB 1.4: a slurmctld that dies within seconds of a submit forgets it, and gives its id to another."""
    adapter = QueueAdapter(bench.folder / "notes", bench.cluster, bench.files, CLOCK, every_s=0.5, lag_s=3.0)
    bench.slurm.run("scontrol", "update", "PartitionName=train", "State=DOWN")
    work = attempt("echo ran\n", account=GUEST)
    await adapter.prepare(work, None)
    first = await adapter.enqueue(work)
    assert isinstance(first, Waits)
    await asyncio.to_thread(bench.slurm.restart_without_state, int(first.native_id))
    bench.slurm.run("scontrol", "update", "PartitionName=train", "State=UP")
    other, second = await bench.submit("exit 0\n")
    await bench.until(other.id, NativePhase.ENDED)
    async with asyncio.timeout(LIMIT_S):
        over = await adapter.start(work)
    assert isinstance(over, Exit) and over.refused_errno is not None
    assert second.native_id == first.native_id, "its id is another job's now"
    # The attempt is fenced: whatever Slurm did with it later, its code would not begin.
    assert await adapter.fence(work.id)
