"""`intertie quickstart`: from nothing to a priced statement on this machine, every part a real one, then it stays up.

What is shown was measured in this run: pids, ready times, the job's hash, the same seconds from three books. A second run uses the same folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from intertie.cli import quickstart_jobs as demo
from intertie.cli.client import Client
from intertie.cli.config import Login
from intertie.cli.out import exit_code, note
from intertie.cli.quickstart_dare import Dare
from intertie.cli.quickstart_screen import Screen
from intertie.clock import SystemClock
from intertie.contracts.http import Link, MappingBody, SubmitBody
from intertie.contracts.identity import (
    CreateTenant,
    CreateToken,
    Invited,
    InviteSite,
    MappingsReply,
    Role,
    TenantRecord,
    TokenCreated,
)
from intertie.contracts.job import JobRecord, JobSpec, JobState, SubmitReply
from intertie.contracts.site import DeviceKind, Freshness, PoolRecord, SiteKind, SitesReply
from intertie.contracts.usage import AgreeSpec, MeterSpec, Price, SpecsReply, Statement
from intertie.embedded.hub import HubPorts, HubSettings, default_data_dir, init_hub, read_settings
from intertie.embedded.process import Child, start_child, stop_leftover
from intertie.embedded.supervise import HubSupervisor
from intertie.errors import Conflict, IntertieError, Refused, Unavailable
from intertie.ids import SiteName, TenantName, mint
from intertie.jobfile import parse_script
from intertie.lifecycle import JOB_TERMINAL
from intertie.pack import unpack
from intertie.text import language, say

T = TypeVar("T")
TENANT = TenantName("demo")
# A machine that computes for six seconds and beats each second is well within; what takes longer is stuck.
STEP_LIMIT_S = 90.0
# How often the agent is looked after; the first pause before it is started again.
AGENT_PAUSE_S = 0.5


@click.command()
@click.option("--once", is_flag=True, help="Leave after the statement instead of staying up.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="INTERTIE_DATA_DIR",
    default=None,
    help="Data folder (default: INTERTIE_DATA_DIR, else /var/lib/intertie as root, ~/.local/share/intertie otherwise).",
)
@click.option(
    "--job", "job_file", type=click.Path(path_type=Path, dir_okay=False, exists=True), default=None, help="Run this script first."
)
@click.option("--dare", is_flag=True, help="Then kill the bus while a job ticks, and show that nothing is lost.")
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="Gateway port (8480, or what the folder has).")
@click.option("--bus-port", type=click.IntRange(1, 65535), default=None, help="Port of the bus (4222, or what the folder has).")
@click.option("--database-port", type=click.IntRange(1, 65535), default=None, help="Port of the database (54329, or what the folder has).")
def quickstart(
    once: bool, data: Path | None, job_file: Path | None, dare: bool, port: int | None, bus_port: int | None, database_port: int | None
) -> None:
    """Everything on this machine: bus, database, services, this machine as a site, real jobs, a priced statement.

    Stays up until Ctrl-C; jobs and data stay for the next run.
    """
    folder = (data or default_data_dir()).absolute()
    ports = ports_of(folder, gateway=port, bus=bus_port, database=database_port)
    sys.exit(asyncio.run(Quickstart(folder, ports, job_file, dare=dare).run(once=once)))


def ports_of(folder: Path, *, gateway: int | None, bus: int | None, database: int | None) -> HubPorts:
    """The folder's own ports with what was named. The site there dials where it joined: once there is one, its hub stays at its ports."""
    before = read_settings(folder).ports
    wanted = HubPorts(gateway=gateway or before.gateway, bus=bus or before.bus, database=database or before.database)
    if any(folder.glob("site-*/site.json")) and (wanted.gateway, wanted.bus) != (before.gateway, before.bus):
        raise Refused(
            "quickstart.ports",
            f"the site in {folder} joined its hub at port {before.gateway}, bus {before.bus}: it would look for it there",
            next_step="leave --port and --bus-port out, or take another folder: --data DIR",
        )
    return wanted


class Quickstart:
    """One run. Steps raise `IntertieError`; the first that fails is said in one sentence and decides the exit code."""

    def __init__(self, data: Path, ports: HubPorts, job_file: Path | None, *, dare: bool = False) -> None:
        self._data = data
        self._dare = dare
        self._ports = ports
        self._job_file = job_file
        self._screen = Screen()
        self._clock = SystemClock()
        self._site = site_name()
        self._account = ""
        self._agent: Child | None = None

    async def run(self, *, once: bool) -> int:
        """All steps, then wait or leave; what was started is stopped in order, whatever happened."""
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        supervisor: HubSupervisor | None = None
        tasks: list[asyncio.Task[None]] = []
        began = self._clock.monotonic_s()
        try:
            settings = HubSettings(time_zone=system_time_zone(), ports=self._ports)
            layout = await asyncio.to_thread(init_hub, self._data, self._clock.now(), settings=settings)
            self._account = demo.job_account()
            supervisor = HubSupervisor(layout, say=note)
            self._screen.title(self._data, layout.public_url)
            starting = asyncio.create_task(supervisor.start())
            await first_of(starting, stop)
            self._screen.parts(starting.result())
            watching = asyncio.create_task(supervisor.watch())
            showing = asyncio.create_task(self._show(layout.public_url, layout.data / "admin.token"))
            tasks += [watching, showing]
            await first_of(showing, stop, watching)
            if self._dare:
                daring = asyncio.create_task(self._take_the_dare(supervisor, layout.public_url))
                tasks.append(daring)
                await first_of(daring, stop, watching)
            self._screen.end(self._clock.monotonic_s() - began, self._write_env(layout.public_url), stays=not once)
            if not once:
                keeping = asyncio.create_task(self._keep_agent())
                tasks.append(keeping)
                await first_of(asyncio.create_task(asyncio.Event().wait()), stop, watching, keeping)
            return 0
        except Stopped:
            return 0 if not once else 130
        except IntertieError as error:
            self._screen.failed(error)
            return exit_code(error)
        finally:
            await asyncio.shield(self._down(supervisor, tasks))

    async def _down(self, supervisor: HubSupervisor | None, tasks: list[asyncio.Task[None]]) -> None:
        """Stop watching before stopping what is watched, or it would be started again."""
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._agent is not None:
            await asyncio.to_thread(self._agent.stop, 10.0)
        if supervisor is not None:
            await supervisor.stop()

    @property
    def _token_file(self) -> Path:
        return self._data / "demo.token"

    def _write_env(self, url: str) -> Path:
        """The variables of this demonstration, to be sourced by any shell; paths and addresses only, nothing secret."""
        text = demo_environment(self._data, url, self._token_file, self._data / f"site-{self._site}")
        (self._data / "demo.env").write_text(text, encoding="utf-8")
        return self._data / "demo.env"

    async def _show(self, url: str, admin_token: Path) -> None:
        """Tenant, agreement, site, jobs, books, statement."""
        admin = Client(Login(url=url, token=read_secret_file(admin_token)))
        await asyncio.to_thread(self._prepare, admin)
        await self._join(admin)
        user = Client(Login(url=url, token=read_secret_file(self._token_file)))
        jobs = [await self._submit(user, spec) for spec in self._specs()]
        self._screen.refused(demo.too_big(), await self._refusal(user))
        for index, job in enumerate(jobs):
            record = await self._ended(user, job)
            digest = await asyncio.to_thread(self._checked_result, user, record) if index == 0 and record.spec.outputs else ""
            self._screen.job(record, digest)
        first = await asyncio.to_thread(user.get, f"/v1/jobs/{jobs[0]}", JobRecord)
        statement = await self._statement(user, jobs)
        self._screen.books(first, statement)
        link = await asyncio.to_thread(user.post, f"/v1/jobs/{jobs[0]}/link", Link, {})
        self._screen.page(first, link.url)

    async def _take_the_dare(self, supervisor: HubSupervisor, url: str) -> None:
        """The bus is killed while a job ticks."""
        user = Client(Login(url=url, token=read_secret_file(self._token_file)))
        site = self._data / f"site-{self._site}"
        dare = Dare(user, site, self._account, supervisor, self._clock, lambda ask: self._until(ask, self._agent_ended))
        await dare.run(await self._submit(user, demo.ticking()))

    def _specs(self) -> list[JobSpec]:
        if self._job_file is not None:
            text = self._job_file.read_text(encoding="utf-8")
            parsed = parse_script(text, name=self._job_file.stem)
            for warned in parsed.warnings:
                note(f"{self._job_file}:{warned.line}: {warned.text}")
            return [parsed.checked(), demo.broken()]
        return [demo.compute(demo.job_python(self._account)), demo.broken()]

    # --- steps ---------------------------------------------------------------------------------------------------------------------------

    def _prepare(self, admin: Client) -> None:
        """Tenant `demo`, its token, and an agreement for every tenant, unless they are there."""
        try:
            admin.post("/v1/tenants", TenantRecord, CreateTenant(tenant=TENANT, title="Quickstart"))
        except Conflict:
            pass
        if not token_works(admin.url, self._token_file):
            body = CreateToken(name="quickstart", roles=[Role.TENANT_ADMIN], tenant=TENANT)
            write_secret(self._token_file, admin.post("/v1/tokens", TokenCreated, body).token)
        if not any(spec.consumer in ("*", TENANT) for spec in admin.get("/v1/meter-specs", SpecsReply).specs):
            admin.post("/v1/meter-specs", MeterSpec, self._agreement())

    def _agreement(self) -> AgreeSpec:
        return AgreeSpec(
            title="Quickstart price list",
            provider="platform",
            consumer="*",
            currency="CNY",
            prices=[Price(kind=DeviceKind.SLOT, per_hour=Decimal("6.00")), Price(kind=DeviceKind.GPU, per_hour=Decimal("12.00"))],
            time_zone=system_time_zone(),
        )

    async def _join(self, admin: Client) -> None:
        """This machine as a site: invited, joined, started, heard."""
        from intertie.cli.agent import join_site

        folder = self._data / f"site-{self._site}"
        if not await asyncio.to_thread((folder / "site.json").exists):
            invite = InviteSite(
                site=self._site, kind=SiteKind.MACHINES, title=socket.gethostname(), owner="this machine", owner_tenant=TENANT
            )
            invited = await asyncio.to_thread(admin.post, "/v1/invitations", Invited, invite)
            await asyncio.to_thread(join_site, admin.url, invited.token, folder, None, interconnect="none")
        if self._account:
            path = f"/v1/tenants/{TENANT}/mappings/{self._site}"
            await asyncio.to_thread(admin.put, path, MappingsReply, MappingBody(account=self._account))
        began = self._clock.monotonic_s()
        await asyncio.to_thread(stop_leftover, self._data / "run", "agent", grace_s=10.0)
        self._agent = await asyncio.to_thread(self._start_agent)
        pools = await self._until(lambda: fresh_pools(admin, self._site), self._agent_ended)
        self._screen.site(self._agent.pid, self._clock.monotonic_s() - began, self._site, pools, self._account)

    def _start_agent(self) -> Child:
        command = (sys.executable, "-m", "intertie.agent", "run", "--data", str(self._data / f"site-{self._site}"))
        return start_child("agent", command, run_dir=self._data / "run", log_dir=self._data / "log", env=agent_environment())

    async def _keep_agent(self) -> None:
        """As a service manager would: an agent that was killed is started again, and adopts what runs. Growing pauses for one that ends at once."""
        pause_s = AGENT_PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            if self._agent is None or self._agent.poll() is None:
                pause_s = AGENT_PAUSE_S
                continue
            pause_s = min(pause_s * 2, AGENT_PAUSE_S * 64)
            ended = self._agent.pid
            self._agent = await asyncio.to_thread(self._start_agent)
            note(say("quick.agent_again", language(), ended=ended, pid=self._agent.pid))

    def _agent_ended(self) -> None:
        if self._agent is not None and self._agent.poll() is not None:
            tail = self._agent.log_tail().splitlines()
            raise Unavailable(
                "quickstart.agent", f"the agent ended: {tail[-1] if tail else 'it wrote nothing'}", next_step=f"read {self._agent.log_file}"
            )

    async def _submit(self, user: Client, spec: JobSpec) -> str:
        reply = await asyncio.to_thread(user.post, "/v1/jobs", SubmitReply, SubmitBody(spec=spec), {"Idempotency-Key": mint("key")})
        if reply.job is None:
            raise Refused("quickstart.submit", "the hub took the job but named none")
        return reply.job.job

    async def _refusal(self, user: Client) -> Refused:
        """The error that a job too big for this federation gets; that it is refused is the point."""
        body = SubmitBody(spec=demo.too_big())
        try:
            await asyncio.to_thread(user.post, "/v1/jobs", SubmitReply, body, {"Idempotency-Key": mint("key")})
        except Refused as refused:
            return refused
        raise Refused("quickstart.not_refused", "a job for 8 × A100 was accepted although nothing here can run it")

    async def _ended(self, user: Client, job: str) -> JobRecord:
        def ended() -> JobRecord | None:
            record = user.get(f"/v1/jobs/{job}", JobRecord)
            return record if record.state in JOB_TERMINAL else None

        limit = STEP_LIMIT_S if self._job_file is None else 24 * 3_600.0
        return await self._until(ended, self._agent_ended, limit_s=limit)

    def _checked_result(self, user: Client, record: JobRecord) -> str:
        """The SHA-256 of the fetched result, which must be the one that the job printed."""
        if record.state is not JobState.SUCCEEDED:
            return ""
        folder = Path(tempfile.mkdtemp(prefix="result-", dir=self._data))
        with tempfile.NamedTemporaryFile() as data:
            with user.open("GET", f"/v1/jobs/{record.job}/result", timeout_s=60) as response:
                data.write(response.read())
            data.flush()
            unpack(Path(data.name), folder)
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        found = hashlib.sha256(files[0].read_bytes()).hexdigest() if files else ""
        printed = re.search(r"sha256 ([0-9a-f]{64})", record.attempts[-1].log_tail)
        if self._job_file is None and (printed is None or printed[1] != found):
            raise Refused("quickstart.result", f"the fetched result has SHA-256 {found or 'nothing'}, the job printed another")
        return f"{found}  {files[0]}" if files else ""

    async def _statement(self, user: Client, jobs: list[str]) -> Statement:
        """The statement once both jobs are complete in it."""

        def complete() -> Statement | None:
            told = user.get("/v1/statements", Statement)
            books = [book for line in told.lines if line.job in jobs for book in line.attempts]
            return told if len(books) >= len(jobs) and all(book.complete for book in books) else None

        return await self._until(complete, self._agent_ended)

    async def _until(self, ask: Callable[[], T | None], alive: Callable[[], None], *, limit_s: float = STEP_LIMIT_S) -> T:
        """Ask until there is an answer; `Unavailable('quickstart.slow')` after the limit."""
        deadline = self._clock.monotonic_s() + limit_s
        while True:
            alive()
            try:
                if (found := await asyncio.to_thread(ask)) is not None:
                    return found
                why = "it has not come yet"
            except Unavailable as error:
                why = error.text
            if self._clock.monotonic_s() > deadline:
                raise Unavailable("quickstart.slow", f"gave up after {limit_s:.0f} s: {why}", next_step=f"read {self._data / 'log'}")
            await asyncio.sleep(0.1)


class Stopped(Exception):
    """Asked to stop."""


async def first_of(work: asyncio.Task[T], stop: asyncio.Event, *others: asyncio.Task[None]) -> None:
    """Wait for `work`; `Stopped` when asked to stop; what another task raised, if it fails first."""
    asked = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, asked, *others}, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            if other.done():
                other.result()
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
            raise Stopped
        work.result()
    finally:
        asked.cancel()


def fresh_pools(admin: Client, site: SiteName) -> list[PoolRecord] | None:
    """The site's pools once they are fresh and their inventory is known."""
    reply = admin.get("/v1/sites", SitesReply, {"site": site})
    ready = [p for p in reply.pools if p.freshness is Freshness.FRESH and p.inventory is not None]
    return ready or None


def site_name() -> SiteName:
    """This host's name as a site name."""
    text = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")[:40]
    return SiteName(text if text and text not in ("hub", "local", "localhost", "all", "none", "unknown", "intertie") else "this-machine")


def system_time_zone() -> str:
    """The machine's IANA time zone, UTC if it has none."""
    if named := os.environ.get("TZ"):
        return named.lstrip(":")
    _, found, name = os.path.realpath("/etc/localtime").partition("/zoneinfo/")
    return name if found and name else "UTC"


def token_works(url: str, file: Path) -> bool:
    """True if a token lies there and the hub knows it."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return False
    try:
        Client(Login(url=url, token=text)).get("/v1/whoami", msgspec.Raw)
    except Unavailable:
        raise
    except IntertieError:
        return False
    return True


def read_secret_file(file: Path) -> str:
    return file.read_text(encoding="ascii").strip()


def write_secret(file: Path, text: str) -> None:
    """A file that only its owner reads."""
    file.unlink(missing_ok=True)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as out:
        out.write(text + "\n")


def demo_environment(data: Path, url: str, token_file: Path, site: Path) -> str:
    """Shell lines that make `intertie` speak to this hub as the demonstration's tenant, and `intertie local` to this site's agent."""
    values = {
        "INTERTIE_URL": url,
        "INTERTIE_TOKEN_FILE": str(token_file),
        "INTERTIE_DATA_DIR": str(data),
        "INTERTIE_AGENT_SOCKET": str(site / "agent.sock"),
    }
    path = f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"\n'
    return path + "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


def agent_environment() -> dict[str, str]:
    """What the agent needs of ours: where programs are, certificates, traces."""
    passed = [
        "PATH",
        "HOME",
        "LANG",
        "LC_ALL",
        "LD_LIBRARY_PATH",
        "INTERTIE_LANG",
        "INTERTIE_LOG_LEVEL",
        "INTERTIE_BEAT_S",
        "SSL_CERT_FILE",
    ]
    passed += ["OTEL_EXPORTER_OTLP_ENDPOINT", "FAKE_NVML_STATE"]
    return {name: os.environ[name] for name in passed if name in os.environ}
