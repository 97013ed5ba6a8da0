"""BR-144: a value in a job's environment reaches the job and is found nowhere else; keys, tokens and passwords stand in no process list.

Everything that is kept, said or answered is searched for one canary, as it is and in the forms in which bytes hide (hexadecimal, base64 at
each of its three alignments). Each place is also searched for something that must be there, so that a search that finds nothing means it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import stat
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from tests.journeys.stack import Stack, environment, running_stack
from tests.journeys.test_restored import restored

from intertie.contracts.http import Link
from intertie.contracts.job import JobRecord, JobSpec, JobState, Resources
from intertie.embedded.process import free_port
from intertie.errors import IntertieError
from intertie.ids import JobId, SiteName, mint

NAME = "HF_TOKEN"
# It proves that the value arrived without printing it.
PROVE = f'#!/bin/sh\nprintf "%s" "${NAME}" | sha256sum | cut -c1-64\nsleep "$1"\nexit "$2"\n'


def disguises(secret: bytes) -> list[bytes]:
    """The secret, and every form in which common encodings would carry it inside longer text."""
    shifted = []
    for before in range(3):
        # Characters that also hold bits of a neighbour are cut off.
        whole = base64.b64encode(b"\0" * before + secret)
        first, last = (before * 8 + 5) // 6, (before + len(secret)) * 8 // 6
        shifted.append(whole[first:last])
    return [secret, secret.hex().encode(), *shifted, *(one.replace(b"+", b"-").replace(b"/", b"_") for one in shifted)]


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("encode", [bytes, base64.b64encode, base64.urlsafe_b64encode, bytes.hex])
def test_the_search_finds_a_secret_inside_longer_text_however_it_was_encoded(encode: Callable[[bytes], bytes | str], before: int) -> None:
    secret = b"canary-\xff\xfe>?-of-the-search"
    text = encode(b"x" * before + secret + b"and what follows")
    assert any(needle in (text.encode() if isinstance(text, str) else text) for needle in disguises(secret))
    assert not any(needle in b"and what follows, canary-less" for needle in disguises(secret))


def holding(root: Path, needles: list[bytes], *, but: frozenset[Path] = frozenset()) -> list[Path]:
    """Files below `root` in which one of the needles is found."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if Path(folder, name) not in but]
        for name in names:
            path = Path(folder, name)
            # Sockets and what is removed while we look hold nothing.
            with contextlib.suppress(OSError):
                if stat.S_ISREG(path.lstat().st_mode) and any(needle in path.read_bytes() for needle in needles):
                    found.append(path)
    return found


def rows_holding(stack: Stack, needles: list[bytes]) -> list[str]:
    """`schema.table` of every table, all schemas, in which a row holds one of the needles; bytes are seen as hexadecimal."""
    ask = stack.supervisor.postgres.query
    tables = ask(
        "SELECT quote_ident(table_schema) || '.' || quote_ident(table_name) FROM information_schema.tables"
        " WHERE table_type = 'BASE TABLE' AND table_schema NOT IN ('pg_catalog', 'information_schema')",
        database="intertie",
    ).split()
    assert len(tables) > 30, "this looks at the database of all services"
    words = [needle.decode("ascii") for needle in needles] + [needle.hex() for needle in needles]
    wanted = " OR ".join(f"position('{word}' IN t::text) > 0" for word in words)
    asked = " UNION ALL ".join(f"SELECT '{table}' FROM {table} t WHERE {wanted}" for table in tables)
    return sorted(set(ask(asked, database="intertie").split()))


def said(stack: Stack, path: str, *, token: str, method: str = "GET", body: bytes | None = None) -> bytes:
    """What the hub answers, refusals too."""
    request = urllib.request.Request(f"{stack.layout.public_url}{path}", data=body, method=method)
    request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=15) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        return error.read()


@dataclass
class Traces:
    """What the services sent to a trace collector."""

    port: int
    bodies: list[bytes] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        return web.Response()


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[Traces]:
    """An OTLP receiver that keeps every body as it came."""
    traces = Traces(free_port())
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/{path:.*}", traces.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", traces.port).start()
    try:
        yield traces
    finally:
        await runner.cleanup()


def ours(stack: Stack) -> Iterator[tuple[int, bytes, bytes]]:
    """(pid, command line, environment) of every process that has to do with this stack; jobs' own processes are not ours."""
    mark = str(stack.folder).encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes()
                surroundings = (folder / "environ").read_bytes()
                if mark in command or mark in surroundings:
                    yield int(folder.name), command, surroundings


def answers(stack: Stack, jobs: list[JobId], token: str, operator: str) -> dict[str, bytes]:
    """Every answer in which a job appears."""
    found = {}
    for job in jobs:
        for path in (f"/v1/jobs/{job}", f"/v1/jobs/{job}/story", f"/v1/jobs/{job}/logs"):
            found[path] = said(stack, path, token=token)
        page = stack.user.post(f"/v1/jobs/{job}/link", Link, {}).url.removeprefix(stack.layout.public_url)
        found[f"page of {job}"] = said(stack, page, token=token)
    for path in ("/v1/jobs", "/v1/statements", "/v1/statements?format=csv"):
        found[path] = said(stack, path, token=token)
    for service in ("registry", "scheduler", "metering", "identity", "incident"):
        found[f"audit of {service}"] = said(stack, f"/v1/audit/{service}", token=operator)
    found["incidents"] = said(stack, "/v1/incidents", token=operator)
    return found


def ran(stack: Stack, spec: JobSpec, canary: str, key: str = "") -> JobId:
    return stack.submit(msgspec.structs.replace(spec, env_names=[NAME]), env={NAME: canary}, key=key)


async def test_a_value_of_the_environment_reaches_the_job_and_is_found_nowhere_else() -> None:
    canary = f"canary-{mint('x').partition('-')[2]}"
    needles = disguises(canary.encode())
    async with collector() as traces:
        endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{traces.port}"}
        with environment({**endpoint, "INTERTIE_LOG_LEVEL": "DEBUG"}):
            async with running_stack() as stack:
                await stack.add_site("site-a", slots=2, env={**endpoint, "INTERTIE_LOG_LEVEL": "DEBUG"})
                jobs = await stack.do(lambda: every_fate(stack, canary))
                records = [await stack.until(lambda job=job: stack.ended(job), what=f"{job} ends") for job in jobs]  # type: ignore[misc]  # bound now
                the_job_had_it(records, canary)
                await stack.until(lambda: stack.complete_statement({jobs[0], jobs[1]}), what="the statement is complete")
                records.append(await held_over_a_restore(stack, canary))
                await stack.do(lambda: nothing_holds_it(stack, records, needles))
                await stack.do(lambda: nothing_is_left_on_disk(stack, needles))
        # The services have ended: what they had of spans is sent.
        assert any(bytes.fromhex(records[0].trace_id) in body for body in traces.bodies), "the traces tell of the job"
        assert not [body for body in traces.bodies if any(needle in body for needle in needles)]


def every_fate(stack: Stack, canary: str) -> list[JobId]:
    """One that succeeds, one that fails, one that never starts; and requests that are refused with the value in their hands."""
    good = JobSpec(name="good", script=PROVE, args=["0", "0"], wall_s=60)
    jobs = [
        ran(stack, good, canary, key="same"),
        ran(stack, JobSpec(name="bad", script=PROVE, args=["0", "3"], wall_s=60), canary),
        ran(stack, JobSpec(name="unstartable", script="#!/no/such/interpreter\n", wall_s=60), canary),
    ]
    for key, name, resources in (("", "too-large", Resources(gpus=8)), ("same", "other", Resources())):
        try:
            ran(stack, JobSpec(name=name, script=PROVE, wall_s=60, resources=resources), canary, key=key)
        except IntertieError as error:
            assert canary not in f"{error.text} {error.details} {error.next_step}"
        else:
            raise AssertionError("it was taken")
    parked = ran(stack, JobSpec(name="parked", script=PROVE, wall_s=60, site=SiteName("site-a"), resources=Resources(slots=2)), canary)
    stack.user.post(f"/v1/jobs/{parked}/cancel", JobRecord, {"reason": "not needed"})
    return [*jobs, parked]


async def held_over_a_restore(stack: Stack, canary: str) -> JobRecord:
    """A site tells a hub that was restored all that it holds, with the signed offers: that lies in its journal and in the hub's tables for weeks."""
    gate = stack.folder / "gate"
    job = await stack.do(lambda: ran(stack, JobSpec(name="held", script=f"until [ -e {gate} ]; do sleep 0.1; done\n", wall_s=120), canary))
    await stack.until(lambda: stack.job(job).state is JobState.RUNNING, what="it runs")
    done = await stack.do(lambda: restored(stack.layout.data, "--live"))
    assert done.returncode == 0, done.stderr
    ask = "SELECT count(*) FROM scheduler.lane_entry WHERE starts_with(convert_from(raw, 'UTF8'), '{\"kind\":\"held\"')"
    ask += f" AND position('{job}' IN convert_from(raw, 'UTF8')) > 0 AND position('env_names' IN convert_from(raw, 'UTF8')) > 0"
    told = partial(stack.supervisor.postgres.query, ask, database="intertie")
    await stack.until(lambda: told() != "0", what="the site told what it holds, with its offers")
    gate.touch()
    ended = await stack.until(lambda: stack.ended(job), what="it ends")
    kept = stack.sites["site-a"].folder / "jobs" / ended.attempts[-1].attempt / "env.json"
    await stack.until(lambda: not kept.exists(), what="it is settled, and its values go")
    return ended


def the_job_had_it(records: list[JobRecord], canary: str) -> None:
    digest = hashlib.sha256(canary.encode()).hexdigest()
    assert [record.state for record in records[:2]] == [JobState.SUCCEEDED, JobState.FAILED]
    assert all(record.attempts[-1].log_tail.strip() == digest for record in records[:2])
    assert all(record.spec.env_names == [NAME] for record in records), "names, never values"


def nothing_holds_it(stack: Stack, records: list[JobRecord], needles: list[bytes]) -> None:
    known = [records[0].job.encode()]
    # PostgreSQL's own files keep deleted rows until they are vacuumed, and its log of changes for a while; they are 0700 and another
    # account's. What it answers is searched by query instead.
    database = frozenset({stack.layout.pg})
    assert not mode_for_others(stack.layout.pg)
    assert holding(stack.layout.nats, known), "the stream on disk is searched"
    assert holding(stack.layout.data, needles, but=database) == []
    assert rows_holding(stack, known) and rows_holding(stack, needles) == []
    site = stack.sites["site-a"].folder
    assert holding(site, known)
    # The journal is what a claim is kept in: the agent's alone, and its log of changes is overwritten in time, not at once.
    rest = [path for path in holding(site, needles) if not (path.name.startswith("journal.db") and not mode_for_others(path))]
    assert rest == [], "also at the site it goes when the job has ended"
    token, operator = stack.user._token, stack.admin._token
    for where, answer in answers(stack, [record.job for record in records], token, operator).items():
        assert not any(needle in answer for needle in needles), where
    assert records[0].job.encode() in said(stack, "/v1/jobs", token=token)


def nothing_is_left_on_disk(stack: Stack, needles: list[bytes]) -> None:
    """An agent that stops folds its journal up: what was deleted there is overwritten, not only unlinked."""
    site = stack.sites["site-a"]
    assert site.child is not None
    assert site.child.stop(30.0) == 0
    assert (site.folder / "journal.db").exists()
    assert holding(site.folder, needles) == []


def mode_for_others(path: Path) -> int:
    """What group and others may do with it."""
    return stat.S_IMODE(path.stat().st_mode) & 0o077


# --- the hub's and the site's own secrets ------------------------------------------------------------------------------------------------


def own_secrets(stack: Stack) -> dict[str, bytes]:
    """Every seed, password, credential and token of hub and sites, by where it came from."""
    found = {"admin token": stack.admin._token.encode(), "user token": stack.user._token.encode()}
    layout = stack.layout
    files = [*layout.keys.glob("*.nk"), *layout.secrets.iterdir()]
    for site in stack.sites.values():
        files += (site.folder / "keys").glob("*.nk")
    found |= {path.name: path.read_bytes().strip() for path in files}
    for path in layout.creds.glob("*.creds"):
        found[path.name] = path.read_bytes().split(b"SEED-----")[1].split()[0] if b"SEED-----" in path.read_bytes() else b""
    assert len(found) > 20 and all(len(secret) >= 20 for secret in found.values()), found.keys()
    return found


async def test_no_token_seed_or_password_stands_in_a_process_list_or_a_file_that_others_may_read() -> None:
    async with running_stack() as stack:
        await stack.add_site("site-a", slots=2)
        held = JobSpec(name="held", script=PROVE, args=["30", "0"], wall_s=60)
        job = await stack.do(lambda: ran(stack, held, "canary-of-a-running-job"))
        await stack.until(lambda: stack.job(job).state is JobState.RUNNING, what="the job runs")
        await stack.do(lambda: in_no_process(stack, {**own_secrets(stack), NAME: b"canary-of-a-running-job"}))
        await stack.do(lambda: in_no_open_file(stack, own_secrets(stack)))
        await stack.do(lambda: stack.user.post(f"/v1/jobs/{job}/cancel", JobRecord, {"reason": "seen enough"}))


def in_no_process(stack: Stack, secrets: dict[str, bytes]) -> None:
    seen = list(ours(stack))
    commands = b"".join(command for _, command, _ in seen)
    assert all(part in commands for part in (b"intertie.scheduler", b"intertie.agent", b"supervisor.py", b"nats", b"postgres"))
    for pid, command, surroundings in seen:
        for name, secret in secrets.items():
            assert secret not in command, f"{name} stands in the command line of {pid}: {command!r}"
            # A job's own process has the job's own values.
            assert name == NAME or secret not in surroundings, f"{name} stands in the environment of {pid}: {command!r}"


def in_no_open_file(stack: Stack, secrets: dict[str, bytes]) -> None:
    wanted = list(secrets.values())
    files = holding(stack.folder, wanted)
    assert len(files) > 20
    assert {str(path.relative_to(stack.folder)): oct(path.stat().st_mode) for path in files if mode_for_others(path)} == {}
