"""A drill as its people make it, by the commands of the docs: the owner allows it, a rehearsal passes, the site is cut off and runs on, a person
signs; and the audit of it all verifies until somebody who rules the database changes one row.

`INTERTIE_WRITE_EXAMPLE=ops/docs/examples/drill-site-a.json` keeps the evidence of the run as the example of the docs.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.journeys.stack import TENANT, Site, Stack, environment, running_stack

from intertie.contracts.drill import DrillRecord, DrillsReply, DrillState
from intertie.contracts.identity import CreateToken, Role, TokenCreated
from intertie.contracts.job import JobSpec, JobState
from intertie.contracts.site import SitesReply

BEAT = "0.2"
# With these beats the hub calls a site silent after 3 s.
CUT_S = 10


class Person:
    """Somebody at a shell, with a login and a config folder of their own."""

    def __init__(self, stack: Stack, site: Site, token: str) -> None:
        self.home = stack.folder / "person"
        self.home.mkdir(mode=0o700)
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "XDG_CONFIG_HOME": str(self.home),
            "LANG": "C.UTF-8",
            "INTERTIE_LANG": "en",
            "INTERTIE_URL": stack.layout.public_url,
            "INTERTIE_TOKEN": token,
            "INTERTIE_AGENT_SOCKET": str(site.folder / "agent.sock"),
        }

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "intertie.cli", *words]
        return subprocess.run(command, env=self.env, cwd=self.home, capture_output=True, text=True, timeout=120, check=False)

    def says(self, *words: str) -> str:
        """A command that works; what it answers."""
        done = self.run(*words)
        assert done.returncode == 0, f"intertie {' '.join(words)}: {done.stderr}{done.stdout}"
        return done.stdout.strip()

    def is_refused(self, *words: str) -> str:
        done = self.run(*words)
        assert done.returncode != 0, f"intertie {' '.join(words)} should have been refused: {done.stdout}"
        return done.stderr + done.stdout


def person(stack: Stack, site: Site) -> Person:
    """An operator who also belongs to the tenant: may plan drills and submit the small job."""
    asked = CreateToken(name="li", roles=[Role.OPERATOR, Role.TENANT_ADMIN], tenant=TENANT)
    return Person(stack, site, stack.admin.post("/v1/tokens", TokenCreated, asked).token)


def drill(stack: Stack, id: str) -> DrillRecord:
    return next(record for record in stack.admin.get("/v1/drills", DrillsReply).drills if record.drill == id)


def in_state(stack: Stack, id: str, *states: DrillState) -> DrillRecord | None:
    record = drill(stack, id)
    return record if record.state in states else None


async def judged(stack: Stack, id: str) -> DrillRecord:
    record = await stack.until(
        lambda: in_state(stack, id, DrillState.JUDGED, DrillState.CALLED_OFF), what=f"drill {id} is judged", limit_s=150
    )
    assert record.verdict == "passed", f"{record.text} {[check for check in record.checks if not check.ok]}\n{stack.logs()}"
    return record


async def rehearse(stack: Stack, li: Person, pool: str) -> None:
    assert "has not consented" in await stack.do(lambda: li.is_refused("drill", "rehearse", pool))
    await stack.do(lambda: li.says("local", "drill", "allow", "--for", "1h", "--longest", "2m"))
    await stack.until(lambda: bool(stack.admin.get("/v1/drills", DrillsReply).consents), what="the hub knows the owner's consent")
    assert "rehearsal" in await stack.do(lambda: li.is_refused("drill", "start", "site-a", "--cut", "1m"))
    assert "at most" in await stack.do(lambda: li.is_refused("drill", "rehearse", pool, "--cut", "5m"))
    id = await stack.do(lambda: li.says("drill", "rehearse", pool, "--cut", "6s", "--in", "6s", "--reason", "before the first drill"))
    assert "one at a time" in await stack.do(lambda: li.is_refused("drill", "rehearse", pool))
    await judged(stack, id)
    assert await stack.do(lambda: li.says("drill", "status", id, "--wait"))


async def cut_off(stack: Stack, li: Person) -> str:
    """The drill itself: one job runs through it, two end in it, and the owner's people work meanwhile."""
    long = await stack.do(lambda: stack.submit(JobSpec(name="long", script="#!/bin/sh\nsleep 90\n", wall_s=300)))
    short = [
        await stack.do(partial(stack.submit, JobSpec(name=f"short-{n}", script=f"#!/bin/sh\nsleep {13 + n}\n", wall_s=300)))
        for n in range(2)
    ]
    for job in [long, *short]:
        await stack.until(lambda job=job: stack.job(job).state is JobState.RUNNING, what=f"{job} runs")  # type: ignore[misc]  # bound now
    id = await stack.do(lambda: li.says("drill", "start", "site-a", "--cut", f"{CUT_S}s", "--in", "4s", "--reason", "the yearly drill"))
    status = await stack.until(
        lambda: told if (told := json.loads(li.says("local", "drill", "status", "--json")))["on"] else None, what="the cut"
    )
    assert status["drill"] == id
    done = await stack.do(lambda: li.run("local", "submit", "--", "/bin/sh", "-c", "sleep 1"))
    assert done.returncode == 0, done.stderr
    await stack.until(lambda: in_state(stack, id, DrillState.CUT, DrillState.BACK, DrillState.JUDGED), what="the hub notices the silence")
    await judged(stack, id)
    for job in short:
        record = await stack.until(lambda job=job: stack.ended(job), what=f"{job} ends")  # type: ignore[misc]  # bound now
        assert (record.state, len(record.attempts)) == (JobState.SUCCEEDED, 1)
    assert (await stack.do(lambda: stack.job(long))).state is JobState.RUNNING
    return id


async def sign_and_verify(stack: Stack, li: Person, id: str) -> None:
    before = await stack.do(lambda: li.says("site", "show", "site-a"))
    assert "last passed drill" in before
    file = li.home / "drill.json"
    await stack.do(lambda: li.says("drill", "sign", id, "--as", "Li Wei", "--out", str(file)))
    assert (li.home / "intertie/drill.nk").stat().st_mode & 0o077 == 0
    assert "3 signatures hold" in await stack.do(lambda: li.says("drill", "verify", str(file)))
    data = file.read_bytes()
    told = json.loads(data)["document"]
    assert told["at_site"]["local"]["submitted"] == 1
    assert {a["after"] for a in told["at_site"]["attempts"]} == {"running", "ended"}
    assert any(book["site_us"] is not None and book["site_us"] == book["metering_us"] for book in told["at_hub"]["books"])
    file.write_bytes(data.replace(b'"restarts":0', b'"restarts":1'))
    await stack.do(lambda: li.is_refused("drill", "verify", str(file)))
    if keep := os.environ.get("INTERTIE_WRITE_EXAMPLE"):
        await asyncio.to_thread(Path(keep).write_bytes, data)


async def the_audit_holds_until_it_is_changed(stack: Stack, li: Person, id: str) -> None:
    done = await stack.until(lambda: ok if (ok := li.run("audit", "verify")).returncode == 0 else None, what="the audit verifies")
    assert "follow from one another" in done.stdout
    rows = await stack.do(lambda: li.says("audit", "registry"))
    assert all(word in rows for word in ("drill.plan", "drill.consent", "drill.judge", "drill.sign", id))
    heads = li.home / "heads"
    heads.write_text(await stack.do(lambda: li.says("audit", "heads")) + "\n", encoding="utf-8")
    export = li.home / "audit.json"
    await stack.do(lambda: li.says("audit", "export", str(export)))
    assert "follow from one another" in await stack.do(lambda: li.says("audit", "verify", str(export), "--heads", str(heads)))
    tamper = (
        "ALTER TABLE registry.audit DISABLE TRIGGER ALL; UPDATE registry.audit SET actor = 'nobody' WHERE action = 'drill.sign';"
        "ALTER TABLE registry.audit ENABLE TRIGGER ALL"
    )
    await stack.do(lambda: stack.supervisor.postgres.query(tamper, database="intertie"))
    said = await stack.do(lambda: li.is_refused("audit", "verify"))
    assert "changed" in said
    assert "registry" in said
    await stack.do(lambda: li.says("audit", "verify", str(export)))


async def test_a_site_is_cut_off_with_its_owners_consent_runs_on_and_a_person_signs_what_happened() -> None:
    with environment({"INTERTIE_BEAT_S": BEAT}):
        async with running_stack() as stack:
            site = await stack.add_site("site-a", slots=4, env={"INTERTIE_BEAT_S": BEAT})
            li = await stack.do(lambda: person(stack, site))
            pool = (await stack.do(lambda: stack.admin.get("/v1/sites", SitesReply, {"site": "site-a"}))).pools[0].pool
            assert "no passed drill younger than 90 days" in await stack.do(lambda: li.says("site", "show", "site-a"))
            await rehearse(stack, li, f"site-a/{pool}")
            id = await cut_off(stack, li)
            await sign_and_verify(stack, li, id)
            await the_audit_holds_until_it_is_changed(stack, li, id)
            await asyncio.to_thread(shutil.rmtree, li.home)
