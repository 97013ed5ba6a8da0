"""`intertie hub restored`. On a hub that runs: refused without `--live`; with it every service begins its new epoch by itself, the stream is made
anew, the site goes on, and a job of each epoch is done and paid for. On one whose database was put back: what happened since then is there again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.journeys.stack import TENANT, Stack, environment, running_stack

from intertie.bus.nats import NatsBus
from intertie.contracts.base import EVENT_STREAM
from intertie.contracts.http import SubmitBody
from intertie.contracts.job import JobRecord, JobSpec, JobState, SubmitReply
from intertie.ids import JobId
from intertie.store import first_version

KEEPERS = ("identity", "registry", "scheduler", "metering", "incident")


def restored(data: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "intertie.cli", "hub", "restored", "--data", str(data), "--reason", "standby promoted", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


async def run_one(stack: Stack, name: str) -> JobState:
    job = await stack.retry(lambda: stack.submit(JobSpec(name=name, script="#!/bin/sh\ntrue\n", wall_s=60), key=name))
    record = await stack.until(lambda: stack.ended(job), what=f"{name} ends", limit_s=60)
    await stack.until(lambda: stack.complete_statement({job}), what=f"{name} is complete at metering", limit_s=60)
    return record.state


def lowest_version(stack: Stack) -> int:
    """Of all that keepers answer to those who are behind, and of the settlements of this epoch."""
    parts = (
        "SELECT version FROM registry.site UNION ALL SELECT version FROM registry.pool UNION ALL SELECT version FROM identity.tenant",
        "SELECT version FROM identity.mapping_version UNION ALL SELECT (record ->> 'version')::bigint FROM identity.site_account",
        "SELECT version FROM incident.incident UNION ALL SELECT version FROM metering.allowance UNION ALL SELECT version FROM scheduler.job WHERE epoch = 1",
        "SELECT version FROM metering.outbox WHERE noun = 'settlement' AND epoch > 1",
    )
    return int(stack.supervisor.postgres.query(f"SELECT min(version) FROM ({' UNION ALL '.join(parts)}) AS told", database="intertie"))


async def test_a_running_hub_begins_a_new_epoch_and_goes_on() -> None:
    async with running_stack() as stack:
        await stack.add_site("site-a", slots=2)
        assert await run_one(stack, "before") is JobState.SUCCEEDED
        data = stack.layout.data
        refused = await stack.do(partial(restored, data))
        assert refused.returncode != 0 and "scheduler" in refused.stderr and "--live" in refused.stderr, refused.stderr
        done = await stack.do(partial(restored, data, "--live", "--json"))
        assert done.returncode == 0, done.stderr
        raised = json.loads(done.stdout)["services"]
        assert [one["service"] for one in raised] == list(KEEPERS) and {one["before"] for one in raised} == {1}
        (epoch,) = {one["after"] for one in raised}
        assert epoch > 1_000_000
        await stack.until(
            lambda: all(any(f"{name} serves again" in said for said in stack.said) for name in KEEPERS) or None,
            what="every keeper began anew",
            limit_s=90,
        )
        assert await run_one(stack, "after") is JobState.SUCCEEDED
        assert await stack.do(partial(lowest_version, stack)) >= first_version(epoch), (
            "who heard more than a copy knows takes what is told now"
        )
        bus = await NatsBus.connect(stack.layout.bus_url, name="gateway", credentials=stack.layout.creds_file("gateway"))
        try:
            state = await bus.stream_state(EVENT_STREAM)
        finally:
            await bus.close()
        assert state is not None and state.epoch == epoch, "a stream that holds only what the keepers know"
        again = await stack.do(partial(restored, data, "--live", "--json"))
        assert (
            {one["before"] for one in json.loads(again.stdout)["services"]}
            == {epoch}
            == {one["after"] for one in json.loads(again.stdout)["services"]}
        )
        check = await stack.retry(stack.check)
        assert not (check.sum or check.closed_with_hold or check.quarantined or check.differing), check.text


# --- the database put back ---

SECRET = {"TOKEN": "value-of-the-token"}
LANES = ("registry", "scheduler", "metering")
# Over, and paid for, before the database was put back.
PAID = ("known", "lost", "bad-lost", "lost-secret", "known-late-gated")


class Work:
    """Jobs that leave a line at each run, and those of `gated` that end when they may."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.folder = stack, stack.folder / "witness"
        self.folder.mkdir()
        # Jobs run as another account.
        self.folder.chmod(0o1777)
        self.jobs: dict[str, JobId] = {}

    def spec(self, name: str) -> JobSpec:
        run = f'echo "$INTERTIE_ATTEMPT" >> {self.folder}/{name}.ran; echo {name} > out.txt; '
        wait = f"until [ -e {self.folder}/{name}.go ]; do sleep 0.1; done; " if name.endswith("gated") else ""
        code = 3 if name.startswith("bad") else 0
        env = sorted(SECRET) if "secret" in name else []
        return JobSpec(name=name, script=f"#!/bin/sh\n{run}{wait}exit {code}\n", wall_s=120, outputs=["out.txt"], env_names=env)

    def asked(self, name: str) -> SubmitReply:
        spec = self.spec(name)
        body = SubmitBody(spec=spec, env=SECRET if spec.env_names else {})
        return self.stack.user.post("/v1/jobs", SubmitReply, body, {"Idempotency-Key": name})

    async def submit(self, *names: str) -> None:
        for name in names:
            reply = await self.stack.retry(partial(self.asked, name))
            assert reply.job is not None and not reply.repeated
            self.jobs[name] = reply.job.job

    async def run(self, *names: str) -> None:
        for name in names:
            await self.stack.until(lambda name=name: self.state(name) is JobState.RUNNING, what=f"{name} runs")  # type: ignore[misc]  # bound now

    async def end(self, *names: str) -> list[JobRecord]:
        """Let them end, and wait until each is over and all of it is paid for."""
        for name in names:
            (self.folder / f"{name}.go").touch()
        jobs = [self.jobs[name] for name in names]
        ended = [await self.stack.until(lambda job=job: self.stack.ended(job), what=f"{job} ends") for job in jobs]  # type: ignore[misc]  # bound now
        await self.stack.until(lambda: self.stack.complete_statement(set(jobs)), what="all of it is paid for")
        return ended

    def state(self, name: str) -> JobState:
        return self.stack.job(self.jobs[name]).state

    def runs(self, name: str) -> list[str]:
        return (self.folder / f"{name}.ran").read_text(encoding="ascii").split()


def copied(source: Path, target: Path) -> None:
    """With owners and rights, as the runbook says."""
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-a", str(source), str(target)], check=True, timeout=60)


def charges(stack: Stack) -> dict[JobId, str]:
    return {line.job: str(line.amount) for line in stack.statement().lines}


def in_quarantine(stack: Stack) -> dict[str, str]:
    ask = stack.supervisor.postgres.query
    rows = {
        name: ask(f"SELECT string_agg(error, '; ') FROM {name}.quarantine WHERE released_at IS NULL", database="intertie") for name in LANES
    }
    return {name: said.strip() for name, said in rows.items() if said.strip()}


async def test_what_happened_after_the_copy_of_the_database_was_taken_is_there_again() -> None:
    """LINK D3, ADR 0006: by `behind`, no journal is opened anew, no person decides anything."""
    with environment({"INTERTIE_ANCHOR_S": "0.5"}):
        async with running_stack() as stack:
            await restored_by_behind(stack)


async def restored_by_behind(stack: Stack) -> None:
    site = await stack.add_site("site-a", slots=6)
    journal = (site.folder / "journal.db.id").read_text(encoding="ascii")
    work = Work(stack)
    await work.submit("known", "known-late-gated", "known-gated")
    await work.run("known-late-gated", "known-gated")
    await work.end("known")
    await stack.hub_down()
    pg, copy = stack.layout.pg, stack.folder / "copy"
    await stack.do(partial(copied, pg, copy))
    await stack.hub_up()

    await stack.until(lambda: stack.fresh("site-a"), what="the site is heard")
    await work.submit("lost", "bad-lost", "lost-secret", "lost-gated", "lost-secret-gated")
    await work.run("lost-gated", "lost-secret-gated")
    await work.end("lost", "bad-lost", "lost-secret", "known-late-gated")
    before = await stack.retry(lambda: charges(stack))
    heads = await stack.until(lambda: all_anchored(stack), what="what was done is anchored, and the anchor kept outside")
    await stack.hub_down()
    await stack.do(partial(copied, copy, pg))
    done = await stack.do(partial(restored, stack.layout.data, "--json"))
    assert done.returncode == 0, done.stderr
    await stack.hub_up()

    for name, job in work.jobs.items():
        await stack.until(lambda job=job: stack.job(job), what=f"{name} exists again")  # type: ignore[misc]  # bound now
    await work.run("lost-gated", "known-gated", "lost-secret-gated")
    ended = dict(zip(work.jobs, await work.end(*work.jobs), strict=True))
    for name, record in ended.items():
        assert record.tenant == TENANT and record.state is (JobState.FAILED if name.startswith("bad") else JobState.SUCCEEDED), name
        assert [a.attempt for a in record.attempts] == work.runs(name), f"{name} ran once, and that is the attempt which is known"
        again = await stack.retry(partial(work.asked, name))
        assert again.repeated and again.job is not None and again.job.job == record.job, f"the retry of {name} finds it"
    after = await stack.retry(lambda: charges(stack))
    paid = [work.jobs[name] for name in PAID]
    assert [after[job] for job in paid] == [before[job] for job in paid], "the same money to the last digit"
    assert await stack.do(lambda: in_quarantine(stack)) == {}
    check = await stack.retry(stack.check)
    assert not (check.sum or check.closed_with_hold or check.quarantined or check.differing or check.suspense_segments), check.text
    assert (site.folder / "journal.db.id").read_text(encoding="ascii") == journal, "no journal was opened anew"
    await the_audit_misses_what_only_the_lost_rows_said(stack, heads)


def audit(stack: Stack, *words: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(stack.folder), "INTERTIE_URL": stack.layout.public_url}
    env["INTERTIE_TOKEN"] = (stack.layout.data / "admin.token").read_text(encoding="ascii").strip()
    command = [sys.executable, "-m", "intertie.cli", "audit", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)


def all_anchored(stack: Stack) -> str | None:
    """The heads of the chains, once the scheduler's reaches all of its rows."""
    rows = int(stack.supervisor.postgres.query("SELECT count(*) FROM scheduler.audit", database="intertie"))
    done = audit(stack, "heads")
    found = [json.loads(line)["head"] for line in done.stdout.splitlines()]
    return done.stdout if any(head["service"] == "scheduler" and head["number"] >= rows for head in found) else None


async def the_audit_misses_what_only_the_lost_rows_said(stack: Stack, heads: str) -> None:
    """What is there follows from itself; heads that were kept outside show that rows after the copy are gone."""
    verified = await stack.until(lambda: ok if (ok := audit(stack, "verify")).returncode == 0 else None, what="the audit verifies")
    assert "follow from one another" in verified.stdout, verified
    kept, export = stack.folder / "heads.json", stack.folder / "audit.json"
    kept.write_text(heads, encoding="utf-8")
    exported = await stack.do(partial(audit, stack, "export", str(export)))
    assert exported.returncode == 0, exported.stderr
    against = await stack.do(partial(audit, stack, "verify", str(export), "--heads", str(kept)))
    assert against.returncode == 1 and "scheduler" in against.stdout + against.stderr, against
