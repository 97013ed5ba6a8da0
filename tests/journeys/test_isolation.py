"""What a job can do to the machine it runs on, and what one tenant can learn of another: nothing.

A job runs as the account that its tenant is mapped to. It tries, with everything that account may do, to read and to signal what is not its
own, and prints how each try ended; root would not need to try. DESIGN 10, field cases BR-146 and BR-147.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from tests.journeys.stack import TENANT, Stack, running_stack

from intertie.cli.client import Client
from intertie.cli.config import Login
from intertie.cli.quickstart_jobs import JOB_ACCOUNTS, job_python
from intertie.contracts.http import MappingBody, SubmitBody
from intertie.contracts.identity import CreateTenant, CreateToken, MappingsReply, Role, TenantRecord, TokenCreated
from intertie.contracts.job import JobRecord, JobSpec, JobsReply, JobState, SubmitReply
from intertie.contracts.link import LogChunk
from intertie.gateway.routes import ROUTES
from intertie.ids import JobId, TenantName, mint

pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHER = TenantName("rival")
SITE = "site-a"
# Reads a plan (JSON) and prints one JSON object: what was tried → how it ended. `open` means that it succeeded.
PROBE = '''#!{python}
import ctypes, json, os, signal, socket, sys

def read(path):
    if os.path.isdir(path):
        return os.listdir(path)
    with open(path, "rb") as f:
        return f.read(64)

def write(path):
    with open(os.path.join(path, "left-here") if os.path.isdir(path) else path, "ab"):
        pass

def attach(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(0x4206, int(pid), None, None):  # PTRACE_SEIZE
        raise OSError(ctypes.get_errno(), "ptrace")

def connect(path):
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(path)

def become(uid):
    os.setuid(int(uid))

def database(port):
    """As its administrator, without a password: an answer that asks for none is open."""
    with socket.create_connection(("127.0.0.1", int(port)), 5) as end:
        words = b"user\\0postgres\\0database\\0intertie\\0\\0"
        end.sendall((8 + len(words)).to_bytes(4, "big") + (196608).to_bytes(4, "big") + words)
        answer = end.recv(64)
        if answer[:1] == b"E" or (answer[:1] == b"R" and answer[5:9] != bytes(4)):
            raise PermissionError(1, "password")

def bus(port):
    with socket.create_connection(("127.0.0.1", int(port)), 5) as end:
        end.sendall(b'CONNECT {{"verbose":false}}\\r\\nPING\\r\\n')
        heard = b""
        while (more := end.recv(4096)) and b"PONG" not in heard:
            heard += more
        if b"Authorization Violation" in heard:
            raise PermissionError(1, "credentials")

ways = {{
    "read": read, "write": write, "attach": attach, "connect": connect, "become": become, "database": database, "bus": bus,
    "term": lambda pid: os.kill(int(pid), signal.SIGTERM), "exist": lambda pid: os.kill(int(pid), 0),
    "memory": lambda pid: read(f"/proc/{{pid}}/mem"), "environment": lambda pid: read(f"/proc/{{pid}}/environ"),
    "files": lambda pid: read(f"/proc/{{pid}}/fd"),
}}
results = {{}}
for way, what in json.loads(sys.argv[1]):
    try:
        ways[way](what)
        results[f"{{way}} {{what}}"] = "open"
    except OSError as err:
        results[f"{{way}} {{what}}"] = os.strerror(err.errno or 0)
print(json.dumps(results))
'''
HOLD = "#!/bin/sh\necho secret of the rival > rival.txt\nwhile [ ! -e done ]; do sleep 0.2; done\n"


@dataclass
class World:
    stack: Stack
    rival: Client
    held: JobRecord
    """A job of the other tenant: running, as an account of its own, where we are root; waiting else."""


def another_account(but: str) -> str:
    """A second unprivileged account for the other tenant; empty if not root."""
    if not but:
        return ""
    for name in JOB_ACCOUNTS:
        with contextlib.suppress(KeyError):
            if name != but and pwd.getpwnam(name).pw_uid != 0:
                return name
    raise AssertionError("no second account is here")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    """Two tenants at one site; the rival's job stays as it is while we look."""
    async with running_stack() as stack:
        await stack.add_site(SITE, slots=4)
        rival = await stack.do(lambda: settle_rival(stack))
        spec = JobSpec(name="rival", script=HOLD, wall_s=300)
        job = await stack.do(lambda: rival.post("/v1/jobs", SubmitReply, SubmitBody(spec=spec), {"Idempotency-Key": mint("key")}).job)
        assert job is not None

        def held() -> JobRecord | None:
            # A single-user site takes its owner's tenant only: there the rival's job waits.
            record = rival.get(f"/v1/jobs/{job.job}", JobRecord)
            return record if record.state is (JobState.RUNNING if stack.account else JobState.QUEUED) else None

        yield World(stack, rival, await stack.until(held, what="the rival's job is held"))
        await stack.do(lambda: rival.post(f"/v1/jobs/{job.job}/cancel", JobRecord, {}))


def settle_rival(stack: Stack) -> Client:
    stack.admin.post("/v1/tenants", TenantRecord, CreateTenant(tenant=OTHER))
    made = stack.admin.post("/v1/tokens", TokenCreated, CreateToken(name="rival", roles=[Role.TENANT_ADMIN], tenant=OTHER))
    if account := another_account(stack.account):
        stack.admin.put(f"/v1/tenants/{OTHER}/mappings/{SITE}", MappingsReply, MappingBody(account=account))
    return Client(Login(url=stack.layout.public_url, token=made.token))


# --- a job against the machine -------------------------------------------------------------------------------------------------------------


def processes(stack: Stack) -> Iterator[tuple[int, str]]:
    """(pid, command line) of everything that has to do with this hub and its site."""
    mark = str(stack.folder).encode()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and mark in (command := (folder / "cmdline").read_bytes()) + (folder / "environ").read_bytes():
                yield int(folder.name), command.replace(b"\0", b" ").decode("utf-8", "replace")


def plan(world: World) -> list[tuple[str, str]]:
    """Everything that a job should not be able to do: (way, what)."""
    stack, layout = world.stack, world.stack.layout
    site = stack.sites[SITE].folder
    theirs = site / "jobs" / world.held.attempts[-1].attempt
    folders = [layout.data, layout.keys, layout.creds, layout.secrets, layout.pg, layout.nats, layout.log, layout.run, layout.objects]
    folders += [site, site / "keys", site / "packs", site / "jobs", theirs, theirs / "work", theirs / "tmp"]
    files = [*layout.keys.iterdir(), *layout.creds.iterdir(), *layout.secrets.iterdir(), layout.pg / "PG_VERSION", layout.pg / "global"]
    files += [layout.nats / "nats.conf", layout.nats / "jetstream", layout.data / "admin.token", layout.log / "scheduler.log"]
    files += [*(site / "keys").iterdir(), site / "journal.db", site / "site.json", site / "pools.json", site / "agent.lock"]
    files += [theirs / name for name in ("log", "script", "env.json", "spec.json", "supervisor.json", "work/rival.txt")]
    tries = [("read", str(path)) for path in (*folders, *files)]
    tries += [("write", str(path)) for path in (*folders, *files)]
    tries += [("connect", str(site / "agent.sock"))]
    pids = dict(processes(stack))
    assert sum(part in command for command in pids.values() for part in ("intertie.agent", "supervisor.py", "nats-server", "postgres")) >= 4
    for pid in (*pids, int(world.held.attempts[-1].native_id), os.getpid()):
        tries += [(way, str(pid)) for way in ("exist", "term", "attach", "memory", "environment", "files")]
    ports = layout.settings.ports
    return [*tries, ("become", "0"), ("database", str(ports.database)), ("bus", str(ports.bus))]


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: jobs run as the agent's own user, which is said everywhere")
async def test_a_job_can_neither_read_nor_signal_anything_that_is_not_its_own(world: World) -> None:
    stack = world.stack
    tries = await stack.do(lambda: plan(world))
    own = [("write", "."), ("read", "."), ("exist", "0"), ("read", "/etc/passwd")]
    python = job_python(stack.account)
    spec = JobSpec(name="probe", script=PROBE.format(python=python), args=[json.dumps([*tries, *own])], wall_s=60)
    job = await stack.do(lambda: stack.submit(spec))
    record = await stack.until(lambda: stack.ended(job), what="the probe ends")
    assert record.state is JobState.SUCCEEDED, record.attempts
    results: dict[str, str] = json.loads(await stack.do(lambda: whole_log(stack, job)))
    assert len(results) == len(set(tries)) + len(own)
    mine = {f"{way} {what}" for way, what in own}
    assert {what: ended for what, ended in results.items() if what in mine} == dict.fromkeys(mine, "open"), "the probe itself works"
    # A process that ended before it was tried proves nothing, either way.
    gone = {what for what in results if what.rpartition(" ")[2].isdigit() and results[what] in GONE and not alive(what.rpartition(" ")[2])}
    assert {what: ended for what, ended in results.items() if what not in mine | gone and ended not in DENIED} == {}
    assert (await stack.do(lambda: world.rival.get(f"/v1/jobs/{world.held.job}", JobRecord))).state is JobState.RUNNING


def whole_log(stack: Stack, job: JobId) -> str:
    """As `intertie logs` reads it."""
    text = ""
    while True:
        chunk = stack.user.get(f"/v1/jobs/{job}/logs", LogChunk, {"offset": len(text.encode())})
        text += chunk.text
        if not chunk.text or chunk.next_offset >= chunk.total:
            return text


DENIED = ("Permission denied", "Operation not permitted")
GONE = ("No such process", "No such file or directory")


def alive(pid: str) -> bool:
    return Path("/proc", pid).exists()


# --- one tenant against another --------------------------------------------------------------------------------------------------------------


def answer(stack: Stack, token: str, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, object] | str]:
    """(status, body without its trace id)."""
    request = urllib.request.Request(f"{stack.layout.public_url}{path}", data=body, method=method)
    request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=15) as response:
            status, data = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, data = error.code, error.read()
    try:
        told = json.loads(data)
    except ValueError:
        return status, data.decode("utf-8", "replace")
    for part in (told, told.get("details", {})):
        part.pop("trace_id", None)
    return status, told


# Every path that names a job, as the gateway's own table and its byte routes have them.
NAMED = (
    ("GET", "/v1/jobs/{job}"),
    ("GET", "/v1/jobs/{job}/story"),
    ("GET", "/v1/jobs/{job}/logs"),
    ("GET", "/v1/jobs/{job}/logs?attempt={attempt}"),
    ("GET", "/v1/jobs/{job}/result"),
    ("GET", "/v1/jobs/{job}/result?attempt={attempt}"),
    ("POST", "/v1/jobs/{job}/cancel"),
    ("POST", "/v1/jobs/{job}/link"),
    ("POST", "/v1/jobs/{job}/preempt"),
)
NO_TENANTS = ("/v1/jobs/{job}/preempt",)
"""Nobody of a tenant may do these, to any job."""


@pytest.mark.parametrize(("method", "path"), NAMED, ids=[f"{method} {path}" for method, path in NAMED])
async def test_another_tenants_job_answers_exactly_as_one_that_never_was(world: World, method: str, path: str) -> None:
    """BR-146, BR-147: nothing tells that it exists, and nothing happens to it."""
    stack, held = world.stack, world.held
    body = b'{"reason": "mine now"}' if method == "POST" else None
    token = stack.user._token
    there = path.format(job=held.job, attempt=held.attempts[-1].attempt if held.attempts else mint("att"))
    never = path.format(job=mint("job"), attempt=mint("att"))
    foreign = await stack.do(lambda: answer(stack, token, method, there, body))
    unknown = await stack.do(lambda: answer(stack, token, method, never, body))
    assert foreign == unknown
    assert foreign[0] == (403 if path in NO_TENANTS else 404)
    record = await stack.do(lambda: world.rival.get(f"/v1/jobs/{held.job}", JobRecord))
    assert (record.state, record.cancel_requested) == (held.state, False)


async def test_every_route_that_names_a_job_is_tried() -> None:
    named = {(route.method, route.path) for route in ROUTES if "{job}" in route.path}
    assert named <= {(method, path.partition("?")[0]) for method, path in NAMED}


async def test_lists_statements_and_books_hold_ones_own_only(world: World) -> None:
    stack, token = world.stack, world.stack.user._token
    mine = await stack.do(lambda: stack.submit(JobSpec(name="mine", script="true", wall_s=60)))
    await stack.until(lambda: stack.complete_statement({mine}), what="my statement is complete")
    listed = await stack.do(lambda: stack.user.get("/v1/jobs", JobsReply, {"limit": 1000}))
    assert {job.tenant for job in listed.jobs} == {TENANT}
    told = {line.job for line in (await stack.do(stack.statement)).lines}
    assert mine in told and world.held.job not in told
    for path in (f"/v1/jobs?tenant={OTHER}", f"/v1/statements?tenant={OTHER}", "/v1/tokens", "/v1/tenants", "/v1/mappings", "/v1/quotas"):
        status, said = await stack.do(lambda path=path: answer(stack, token, "GET", path))  # type: ignore[misc]  # bound now
        assert status in (200, 404), path
        assert str(OTHER) not in json.dumps(said), path


async def test_nobody_submits_or_grants_in_another_tenants_name(world: World) -> None:
    stack, token = world.stack, world.stack.user._token
    work = json.dumps({"spec": {"name": "x", "script": "true"}, "tenant": OTHER}).encode()
    grant = json.dumps({"name": "spy", "roles": ["tenant_admin"], "tenant": OTHER}).encode()
    for path, body in (("/v1/jobs", work), ("/v1/tokens", grant)):
        foreign = await stack.do(lambda path=path, body=body: answer(stack, token, "POST", path, body))  # type: ignore[misc]  # bound now
        unknown = await stack.do(
            lambda path=path, body=body: answer(stack, token, "POST", path, body.replace(OTHER.encode(), b"nobody-here"))  # type: ignore[misc]  # bound now
        )
        assert foreign == unknown
        assert foreign[0] in (403, 404)
