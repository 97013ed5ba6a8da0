"""The same job file on four kinds of cluster at once, joined to one hub: processes, a pool of machines, a real Slurm, the look-alike of Kubernetes.

Issue 4, show 3: `intertie job` and `intertie story` have one shape everywhere, with the native id, state and reason and their age beside it where a
site has a scheduler of its own; and what a person reads of each kind reads well in both languages.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from tests.adapters.kubernetes_world.kinds import BY_PATH
from tests.fakes.gpus import has_compiler
from tests.journeys.kinds_world import KUBERNETES, MACHINES, MODEL, PROCESSES, QUEUED, SITES, SLURM, Kinds, four_kinds
from tests.journeys.test_kubernetes_walk import readme_job

from intertie.contracts.base import decode
from intertie.contracts.job import AttemptRecord, JobRecord, JobState, Story, WaitReason
from intertie.contracts.usage import Statement
from intertie.ids import JobId

pytestmark = [
    pytest.mark.skipif(not has_compiler(), reason="no gcc here to build the library that plays the driver"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
]

PATIENCE_S = 120.0
QUOTAS = BY_PATH["v1", "resourcequotas"]
STEPS = ["submitted", "placed", "claimed", "staging", "started", "ended: succeeded", "results stored"]
"""Of every kind, in this order. A site with a queue of its own says more in between, and nothing else."""
NATIVE = {"in the site's own queue", "the site's scheduler says"}
CARD = "#!/bin/sh\necho cards $CUDA_VISIBLE_DEVICES\necho begun >&2\nsleep 600\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kinds() -> AsyncIterator[Kinds]:
    async with four_kinds() as made:
        yield made


async def on_all(kinds: Kinds, *words: str, folder: Path) -> dict[str, JobId]:
    """Submitted to each site at once, as four people would; the job of each."""

    def submit(site: str) -> JobId:
        return JobId(kinds.cli("submit", "--site", site, *words, folder=folder).strip())

    jobs = await asyncio.gather(*(kinds.stack.do(partial(submit, site)) for site in SITES))
    return dict(zip(SITES, jobs, strict=True))


def told(kinds: Kinds, job: JobId) -> JobRecord:
    return decode(kinds.cli("job", job, "--json"), JobRecord, what="job")


async def in_state(kinds: Kinds, job: JobId, state: JobState) -> JobRecord:
    seen = ""

    def look() -> JobRecord | None:
        nonlocal seen
        record = kinds.stack.job(job)
        assert not record.ended_at or record.state is state, record
        seen = f"{record.state} {record.waiting}"
        return record if record.state is state else None

    try:
        return await kinds.stack.until(look, what=f"{job} is {state}", limit_s=PATIENCE_S)
    except AssertionError as err:
        raise AssertionError(f"last seen: {seen}") from err


@pytest.fixture
def desk(kinds: Kinds) -> Path:
    """The README's folder: its job file, unchanged, and its data."""
    folder = kinds.stack.folder / "desk"
    folder.mkdir(exist_ok=True)
    (folder / "data.txt").write_text("some input\n", encoding="utf-8")
    (folder / "train.sh").write_text(readme_job(), encoding="utf-8")
    return folder


# --- one job file ------------------------------------------------------------------------------------------------------------------------


async def test_the_readme_s_job_file_runs_unchanged_on_each_kind_and_is_told_in_one_shape(kinds: Kinds, desk: Path) -> None:
    stack = kinds.stack
    jobs = await on_all(kinds, "train.sh", folder=desk)
    for job in jobs.values():
        await in_state(kinds, job, JobState.SUCCEEDED)
    statement = await stack.until(
        lambda: stack.complete_statement(set(jobs.values())), what="all four are in the books", limit_s=PATIENCE_S
    )
    for site, job in jobs.items():
        record, story = told(kinds, job), decode(kinds.cli("story", job, "--json"), Story, what="story")
        (attempt,) = record.attempts
        assert [line.what for line in story.lines if line.what not in NATIVE] == STEPS, site
        assert (attempt.site, attempt.pool, attempt.outcome, attempt.exit_code) == (site, "cpu", "succeeded", 0)
        moments = (record.submitted_at, attempt.offered_at, attempt.claimed_at, attempt.ended_at)
        assert all(moments) and attempt.started_at and attempt.native_id, site
        assert beside(site, attempt, story), site
        await results_and_log(kinds, site, job, desk)
        same_in_the_books(site, attempt, statement)
    proof = stack.check()
    assert not any((proof.sum, proof.quarantined, proof.incomplete, proof.differing)), proof


def beside(site: str, attempt: AttemptRecord, story: Story) -> bool:
    """A site with a scheduler of its own: its words and since when, and its steps in the story. Any other: none of it."""
    said = [line.what for line in story.lines if line.what in NATIVE]
    if site not in QUEUED:
        return not said and not attempt.native_state and attempt.native_at is None and attempt.site_queued_at is None
    ended = {SLURM: "COMPLETED", KUBERNETES: "Succeeded"}[site]
    assert said[0] == "in the site's own queue" and attempt.site_queued_at is not None
    assert attempt.nodes and attempt.account == {SLURM: "nobody", KUBERNETES: "fed-acme"}[site]
    return attempt.native_state == ended and attempt.native_at is not None


async def results_and_log(kinds: Kinds, site: str, job: JobId, desk: Path) -> None:
    assert "epoch 1 done" in await kinds.stack.do(partial(kinds.cli, "logs", job))
    target = desk.parent / f"results-{site}"
    await kinds.stack.do(partial(kinds.cli, "fetch", job, "--wait", "60", "--to", str(target)))
    assert (target / "out/size.txt").read_text(encoding="utf-8").strip() == "11 data.txt"


def same_in_the_books(site: str, attempt: AttemptRecord, statement: Statement) -> None:
    """Site and scheduler (the attempt's own record carries the site's counts), and metering (from the segments)."""
    (line,) = [line for line in statement.lines if line.job == attempt.job]
    (book,) = line.attempts
    assert book.complete and (book.site, book.outcome, book.in_suspense) == (site, "succeeded", 0)
    assert (book.run_us, book.segments, book.quantity_milli_us) == (attempt.ran_us, attempt.segments, attempt.quantity_milli_us), site


# --- cards -------------------------------------------------------------------------------------------------------------------------------


async def test_a_card_is_held_on_each_kind_its_log_is_read_while_it_runs_and_a_cancel_ends_it(kinds: Kinds, desk: Path) -> None:
    (desk / "card.sh").write_text(CARD, encoding="utf-8")
    jobs = await on_all(kinds, "--no-work", "--gpus", "1", "--gpu-model", MODEL, "card.sh", folder=desk)
    for site, job in jobs.items():
        record = await in_state(kinds, job, JobState.RUNNING)
        attempt = record.attempts[-1]
        assert (attempt.pool, len(attempt.devices)) == ("gpu", 1)
        logs = await kinds.stack.until(
            lambda job=job: said if "begun" in (said := kinds.cli("logs", job)) else None,  # type: ignore[misc]  # bound now
            what=f"the log of {site}",
        )
        cards = logs.splitlines()[0].removeprefix("cards").strip()
        # A real device plugin tells a pod its cards; the look-alike counts them only.
        assert bool(cards) == (site != KUBERNETES), (site, logs)
        reads_well(kinds, site, job)
    stopped = await kinds.stack.do(partial(kinds.cli, "cancel", "--wait", "--reason", "seen enough", *jobs.values()))
    assert stopped.count("cancelled") == len(SITES), stopped
    for site, job in jobs.items():
        attempt = kinds.stack.job(job).attempts[-1]
        assert (attempt.outcome, attempt.cause) == ("cancelled", "cancelled"), site
        assert "cancelled, cancelled" not in kinds.cli("job", job)
    await kinds.stack.until(lambda: not left_of(kinds, jobs), what="nothing of them is left at any site", limit_s=PATIENCE_S)


def left_of(kinds: Kinds, jobs: dict[str, JobId]) -> list[str]:
    """What still runs of them, in each site's own words."""
    left = [name for name in kinds.slurm.run("squeue", "-h", "-o", "%j").split() if name == jobs[SLURM]]
    left += [box for box in kinds.cluster.kubelets.running]
    for site in (PROCESSES, MACHINES):
        pid = kinds.stack.job(jobs[site]).attempts[-1].native_id.rpartition("/")[2]
        left += [f"{site} {pid}"] if alive(int(pid)) else []
    return left


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def reads_well(kinds: Kinds, site: str, job: JobId) -> None:
    """What a person reads of a running job: the site's words only where it has some, none twice, each in their own language."""
    english, chinese = kinds.cli("job", job), kinds.cli("job", job, lang="zh")
    assert "running (running)" in english and "运行中 (运行中)" in chinese
    assert f"Attempt 1  {site}/gpu  running" in english and f"第 1 次运行  {site}/gpu  运行中" in chinese
    native = {SLURM: "RUNNING, as of", KUBERNETES: "Running, as of"}.get(site, "")
    assert ("the site's scheduler:" in english) == ("站点调度器:" in chinese) == (site in QUEUED)
    assert native in english and "(COMPLETED)" not in english
    assert ("on n1" in english) == (site == MACHINES), "which of its machines"
    why = kinds.cli("explain", job)
    assert f"{site}/gpu: the only pool that fits now of what the job names" in why
    assert not any(f"{other}/" in why for other in SITES if other != site), "pools that nobody asked for are no news"


# --- what a script finds -----------------------------------------------------------------------------------------------------------------

LOOK = """#!/bin/bash
for name in HOME PATH LANG TMPDIR INTERTIE_JOB INTERTIE_WORK HELLO; do [ -n "${!name}" ] && echo "$name"; done
env | grep -q ^PATH= && env | grep -q ^HOME= && echo exported
[ -d "$HOME" ] && touch "$TMPDIR/made" made && echo writes
[ -n "${CUDA_VISIBLE_DEVICES+set}" ] && [ -z "$CUDA_VISIBLE_DEVICES" ] && echo "no card"
echo "$HELLO, $1 and $2: $(readlink /proc/self/fd/0) $(umask) $([ "$(id -u)" != 0 ] && echo 'an account')"
"""
FOUND = [
    *("HOME", "PATH", "LANG", "TMPDIR", "INTERTIE_JOB", "INTERTIE_WORK", "HELLO", "exported", "writes", "no card"),
    "good day, a b and c: /dev/null 0077 an account",
]


async def test_a_script_finds_the_same_things_on_each_kind(kinds: Kinds, desk: Path) -> None:
    (desk / "look.sh").write_text(LOOK, encoding="utf-8")
    jobs = await on_all(kinds, "--env", "HELLO=good day", "look.sh", "a b", "c", folder=desk)
    for job in jobs.values():
        await in_state(kinds, job, JobState.SUCCEEDED)
    said = {site: (await kinds.stack.do(partial(kinds.cli, "logs", job))).splitlines() for site, job in jobs.items()}
    assert said == dict.fromkeys(SITES, FOUND)


# --- waiting there -----------------------------------------------------------------------------------------------------------------------


async def test_what_waits_in_a_site_s_own_queue_says_so_in_both_languages_and_then_runs(kinds: Kinds, desk: Path) -> None:
    stack = kinds.stack
    lend_pods(kinds, 0)
    try:
        await stack.do(partial(kinds.slurm.run, "scontrol", "update", "PartitionName=train", "State=DOWN"))
        jobs = await on_all(kinds, "train.sh", folder=desk)
        for site in QUEUED:
            record = await in_state(kinds, jobs[site], JobState.SITE_QUEUED)
            assert record.waiting is not None and record.waiting.reason is WaitReason.SITE_QUEUE
            attempt = await stack.until(partial(pending, kinds, jobs[site]), what=f"{site} says why it waits", limit_s=PATIENCE_S)
            english, chinese = kinds.cli("job", jobs[site]), kinds.cli("explain", jobs[site], lang="zh")
            assert f"Attempt 1  {site}/cpu  queued at the site" in english and "it waits in its site's own queue" in english
            assert attempt.native_reason in english and "准备中 (站点排队)" in chinese and "正在站点自身队列中排队" in chinese
            assert "queued at the site" in kinds.cli("jobs", "--site", site)
        for site in (PROCESSES, MACHINES):
            await in_state(kinds, jobs[site], JobState.SUCCEEDED)
    finally:
        await stack.do(partial(kinds.slurm.run, "scontrol", "update", "PartitionName=train", "State=UP"))
        lend_pods(kinds, 20)
    for site in QUEUED:
        record = await in_state(kinds, jobs[site], JobState.SUCCEEDED)
        assert len(record.attempts) == 1, site


def pending(kinds: Kinds, job: JobId) -> AttemptRecord | None:
    """Once the site's scheduler has given its own reason."""
    attempt = kinds.stack.job(job).attempts[-1]
    return attempt if {"PartitionDown", "QuotaExceeded"} & {attempt.native_reason.partition(":")[0]} else None


def lend_pods(kinds: Kinds, count: int) -> None:
    """The namespace's own quota, which its owner may lower whenever they like."""
    for quota in kinds.cluster.store.list(QUOTAS, "fed-acme"):
        kinds.cluster.store.change(QUOTAS, quota, lambda one: one["spec"]["hard"].update(pods=str(count)))


# --- fitting nowhere ---------------------------------------------------------------------------------------------------------------------


async def test_what_fits_nowhere_is_refused_for_one_reason_and_says_each_kind_s_own(kinds: Kinds, desk: Path) -> None:
    said = kinds.cli("submit", "--no-work", "--gpus", "3", "--gpu-model", MODEL, "train.sh", folder=desk, expect=1)
    first, *rows = [line for line in said.splitlines() if not line.startswith("train.sh:")]
    assert first.endswith("(needs 3, has 2) [scheduler.no_site_fits]") and len(first) < 240, first
    for site in SITES:
        assert f"  {site}/gpu: the pool has 2 in all, and a job is never split over pools" in rows
        assert f"  {site}/cpu: the pool has no accelerator" in rows
    for site in SITES:
        words = ("submit", "--no-work", "--site", site, "--gpus", "1", "--gpu-model", "H20", "train.sh")
        rows = kinds.cli(*words, folder=desk, expect=1).splitlines()
        assert f"  {site}/gpu: the accelerator here is {MODEL}" in rows and "  6 pools elsewhere: the job names site " + site in rows
        assert "  其他 6 个资源池: 任务指定了其他站点或资源池" in kinds.cli(*words, folder=desk, expect=1, lang="zh")
    nowhere = kinds.cli("submit", "--no-work", "--site", "nowhere", "train.sh", folder=desk, expect=1)
    assert "the job names site nowhere, and no such place has joined [scheduler.no_site_fits]" in nowhere


# --- what is read of a site --------------------------------------------------------------------------------------------------------------


async def test_each_kind_of_site_is_shown_as_what_it_is(kinds: Kinds) -> None:
    listed = [row.split("\t") for row in kinds.cli("site", "list").splitlines()]
    kind = {PROCESSES: "machines", MACHINES: "machines", SLURM: "slurm", KUBERNETES: "kubernetes"}
    assert {(row[0], row[2]) for row in listed} == set(kind.items()) and len(listed) == 2 * len(SITES)
    chinese = kinds.cli("site", "list", lang="zh")
    assert "Slurm 集群\t正常" in chinese and "\t试点\t" in chinese
    for site in SITES:
        english, chinese = kinds.cli("site", "show", site), kinds.cli("site", "show", site, lang="zh")
        assert english.startswith(f"{site}  {kind[site]}  tester\nfresh  ") and "资源纳管  试点" in chinese
        assert "CPU slots  ×4  4096 MiB on the node  lends 4" in english and f"{MODEL}  ×2  81920 MiB each  nvlink  lends 2" in english
        assert ("rights to queue there: " in english) == ("站点队列名额:" in chinese) == (site in QUEUED)
        assert ("beside our work its scheduler has " in english) == (site in QUEUED)
        assert json.loads(kinds.cli("site", "show", site, "--json"))["sites"][0]["kind"] == kind[site]


async def test_a_site_s_own_users_are_load_and_no_fault(kinds: Kinds, desk: Path) -> None:
    """Slurm's own people take both cards of the model that is lent: who waits for one reads that, and it is no broken card."""
    batch = (
        "sbatch",
        "--parsable",
        "--uid=nobody",
        "-A",
        "intertie",
        "--gres=gpu:a100:2",
        "--chdir=/",
        "-o",
        "/dev/null",
        "--wrap",
        "sleep 600",
    )
    native = await kinds.stack.do(partial(kinds.slurm.run, *batch))
    try:
        shown = await kinds.stack.until(
            lambda: said if "2 with the site's own users" in (said := kinds.cli("site", "show", SLURM)) else None,
            what="the hub sees whose they are",
            limit_s=PATIENCE_S,
        )
        assert "its scheduler has 1 running and 0 waiting, on 2 of these devices" in shown
        words = ("submit", "--no-work", "--site", SLURM, "--gpus", "1", "--gpu-model", MODEL, "train.sh")
        job = JobId(kinds.cli(*words, folder=desk).strip())
        said = kinds.cli("explain", job)
        assert "the site's own users have 2 of the 2 that it lends [own_users]" in said and "all devices that fit are busy" in said
        assert "站点自身用户正在使用" in kinds.cli("explain", job, lang="zh")
    finally:
        await kinds.stack.do(partial(kinds.slurm.run, "scancel", native.strip()))
    await in_state(kinds, job, JobState.SUCCEEDED)
