"""A whole federation on this machine for one test: hub, sites, and hands to break them.

Everything is the product's own: the hub's supervisor restarts what is killed, the agent is a process like any other. `Stack` only starts,
kills and asks over HTTP as a user would.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TypeVar

from intertie.cli.agent import join_site
from intertie.cli.client import Client
from intertie.cli.config import Login
from intertie.cli.quickstart_jobs import job_account
from intertie.clock import SystemClock
from intertie.contracts.http import MappingBody, SubmitBody
from intertie.contracts.identity import CreateTenant, CreateToken, Invited, InviteSite, MappingsReply, Role, TenantRecord, TokenCreated
from intertie.contracts.job import JobRecord, JobSpec, SubmitReply
from intertie.contracts.site import DeviceKind, Freshness, SiteKind, SiteRecord, SitesReply
from intertie.contracts.usage import AgreeSpec, LedgerCheck, MeterSpec, Price, Statement
from intertie.embedded.hub import HubLayout, HubPorts, HubSettings, init_hub
from intertie.embedded.process import Child, Identity, free_port, is_running, start_child, wait_until
from intertie.embedded.supervise import HubSupervisor, RestartPolicy
from intertie.errors import IntertieError, Unavailable
from intertie.ids import JobId, SiteName, TenantName, mint
from intertie.lifecycle import JOB_TERMINAL

T = TypeVar("T")
TENANT = TenantName("acme")


@dataclass
class Site:
    """One joined site of this machine."""

    name: SiteName
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    child: Child | None = None


class Stack:
    """Use through `running_stack()`."""

    def __init__(self, folder: Path, layout: HubLayout, *, copies: int = 1) -> None:
        self.folder = folder
        self.layout = layout
        self.said: list[str] = []
        # Tests kill on purpose and often: more ends in a row than a real hub would bear.
        self.supervisor = HubSupervisor(layout, policy=RestartPolicy(most_s=1.0, limit=50), say=self.said.append, copies=copies)
        self.sites: dict[str, Site] = {}
        self._watching: asyncio.Task[None] | None = None
        self.admin = Client(Login(url=layout.public_url))
        self.user = self.admin
        self.account = job_account()

    # --- life ----------------------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.supervisor.start()
        self._watching = asyncio.create_task(self.supervisor.watch())
        token = (self.layout.data / "admin.token").read_text(encoding="ascii").strip()  # noqa: ASYNC240  # a few bytes
        self.admin = Client(Login(url=self.layout.public_url, token=token))
        await self.do(self._prepare)

    def _prepare(self) -> None:
        self.admin.post("/v1/tenants", TenantRecord, CreateTenant(tenant=TENANT))
        made = self.admin.post("/v1/tokens", TokenCreated, CreateToken(name="tester", roles=[Role.TENANT_ADMIN], tenant=TENANT))
        self.user = Client(Login(url=self.layout.public_url, token=made.token))
        prices = [Price(kind=DeviceKind.SLOT, per_hour=Decimal("6.00")), Price(kind=DeviceKind.GPU, per_hour=Decimal("12.00"))]
        agreement = AgreeSpec(title="test", provider="platform", consumer="*", currency="CNY", prices=prices, time_zone="Asia/Shanghai")
        self.admin.post("/v1/meter-specs", MeterSpec, agreement)

    async def add_site(
        self,
        name: str,
        *,
        slots: int = 4,
        interconnect: str = "none",
        profile: Path | None = None,
        env: Mapping[str, str] | None = None,
        kind: SiteKind = SiteKind.MACHINES,
        account: str | None = None,
    ) -> Site:
        """Invite, join, map, start; returns when the hub hears it."""
        site = Site(SiteName(name), self.folder / name, dict(env or {}))

        def join() -> None:
            invite = InviteSite(site=site.name, kind=kind, owner="tester", owner_tenant=TENANT)
            invited = self.admin.post("/v1/invitations", Invited, invite)
            with environment(site.env):
                join_site(self.layout.public_url, invited.token, site.folder, profile, interconnect=interconnect, slots=slots)
            if mapped := account or self.account:
                self.admin.put(f"/v1/tenants/{TENANT}/mappings/{name}", MappingsReply, MappingBody(account=mapped))

        await self.do(join)
        self.sites[name] = site
        await self.start_agent(name)
        await self.until(lambda: self.fresh(name), what=f"site {name} is heard")
        return site

    async def start_agent(self, name: str) -> Child:
        site = self.sites[name]
        env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "INTERTIE_LOG_LEVEL": "INFO", **site.env}
        site.child = await self.do(
            lambda: start_child(
                f"agent-{name}",
                (sys.executable, "-m", "intertie.agent", "run", "--data", str(site.folder)),
                run_dir=self.layout.run,
                log_dir=self.layout.log,
                env=env,
            )
        )
        return site.child

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        for site in self.sites.values():
            if site.child is not None:
                child = site.child
                await self.do(lambda child=child: child.stop(10.0))  # type: ignore[misc]  # bound now
        await self.supervisor.stop()
        for site in self.sites.values():
            await self.do(partial(end_jobs, site.folder))

    # --- breaking ------------------------------------------------------------------------------------------------------------------------

    def pid(self, name: str) -> int:
        """The pid of a part of the hub as of its last start."""
        return next(part.pid for part in self.supervisor.started if part.name == name)

    def kill(self, name: str) -> int:
        """`kill -9` one part of the hub; its supervisor starts it again. The pid that was killed."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    async def kill_agent(self, name: str) -> None:
        """`kill -9` an agent and start another from its disk."""
        child = self.sites[name].child
        assert child is not None
        await self.do(child.kill)
        await self.start_agent(name)

    async def hub_down(self) -> None:
        """Bus, database and services gone, as with the hub's machine."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
            self._watching = None
        await self.supervisor.stop()

    async def hub_up(self) -> None:
        """The hub's machine back."""
        self.supervisor = HubSupervisor(self.layout, policy=RestartPolicy(most_s=1.0, limit=50), say=self.said.append)
        await self.supervisor.start()
        self._watching = asyncio.create_task(self.supervisor.watch())

    # --- asking --------------------------------------------------------------------------------------------------------------------------

    async def do(self, work: Callable[[], T]) -> T:
        """A blocking call in a thread."""
        return await asyncio.to_thread(work)

    async def retry(self, work: Callable[[], T], *, limit_s: float = 60.0) -> T:
        """As a user's client would: again while the hub is away."""
        clock, last = SystemClock(), ""
        deadline = clock.monotonic_s() + limit_s
        while clock.monotonic_s() < deadline:
            try:
                return await self.do(work)
            except Unavailable as error:
                last = str(error)
                await asyncio.sleep(0.2)
        raise AssertionError(f"the hub stayed away: {last}")

    async def until(self, true: Callable[[], T | None], *, what: str, limit_s: float = 60.0) -> T:
        """Ask until there is an answer; the hub being away is no answer."""
        clock, last = SystemClock(), ""
        deadline = clock.monotonic_s() + limit_s
        while clock.monotonic_s() < deadline:
            try:
                if found := await self.do(true):
                    return found
            except IntertieError as error:
                last = str(error)
            await asyncio.sleep(0.1)
        raise AssertionError(f"not within {limit_s:.0f} s: {what} {last}\n{self.logs()}")

    def site_record(self, name: str) -> SiteRecord:
        return self.admin.get("/v1/sites", SitesReply, {"site": name}).sites[0]

    def fresh(self, name: str) -> bool:
        """The registry hears the site, and the scheduler has been told of it (a moment later, by an event)."""
        reply = self.admin.get("/v1/sites", SitesReply, {"site": name})
        if not any(p.freshness is Freshness.FRESH and p.inventory is not None for p in reply.pools):
            return False
        body = SubmitBody(spec=JobSpec(name="probe", script="true"), dry_run=True)
        looked_at = self.user.post("/v1/jobs", SubmitReply, body)
        return name in {r.site for r in looked_at.rejections} | {pool.partition("/")[0] for pool in looked_at.fits}

    def submit(self, spec: JobSpec, *, key: str = "", env: Mapping[str, str] | None = None) -> JobId:
        body = SubmitBody(spec=spec, env=dict(env or {}))
        reply = self.user.post("/v1/jobs", SubmitReply, body, {"Idempotency-Key": key or mint("key")})
        assert reply.job is not None
        return reply.job.job

    def job(self, job: JobId) -> JobRecord:
        return self.user.get(f"/v1/jobs/{job}", JobRecord)

    def ended(self, job: JobId) -> JobRecord | None:
        record = self.job(job)
        return record if record.state in JOB_TERMINAL else None

    def statement(self) -> Statement:
        return self.user.get("/v1/statements", Statement)

    def complete_statement(self, jobs: set[JobId]) -> Statement | None:
        """The statement once every attempt of these jobs that ran is complete in it."""
        told = self.statement()
        lines = {line.job: line for line in told.lines}
        if not jobs <= lines.keys():
            return None
        return told if all(book.complete for job in jobs for book in lines[job].attempts) else None

    def check(self) -> LedgerCheck:
        return self.admin.get("/v1/ledger/check", LedgerCheck)

    def logs(self) -> str:
        """The last lines of every log, for a failure's message."""
        parts = []
        for file in sorted(self.layout.log.glob("*.log")):
            lines = [line for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if '"info"' not in line]
            parts.append(f"── {file.name}\n" + "\n".join(line[:600] for line in lines[-6:]))
        return "\n".join(parts)


def end_jobs(folder: Path) -> None:
    """Jobs outlive their agent, as they should; those of a test that is over are ended by their supervisors."""
    for file in folder.glob("jobs/*/supervisor.json"):
        with contextlib.suppress(OSError, ValueError):
            told = json.loads(file.read_text(encoding="ascii"))
            supervisor = Identity(pid=told["pid"], start_ticks=told["start_ticks"], boot_id=told["boot_id"])
            if is_running(supervisor):
                os.kill(supervisor.pid, signal.SIGTERM)
                wait_until(lambda supervisor=supervisor: not is_running(supervisor), 5.0)  # type: ignore[misc]  # bound now


@contextlib.contextmanager
def environment(extra: Mapping[str, str]) -> Iterator[None]:
    """Variables for a child process started inside."""
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def new_folder() -> Path:
    """Short, and entered by other accounts: jobs run as one."""
    folder = Path(tempfile.mkdtemp(prefix="it-", dir="/var/tmp"))
    folder.chmod(0o711)
    return folder


@contextlib.asynccontextmanager
async def running_stack(*, extra: Callable[[Stack], Awaitable[None]] | None = None, copies: int = 1) -> AsyncIterator[Stack]:
    """A hub with tenant `acme`, a price list and no site yet; all of it gone afterwards."""
    folder = await asyncio.to_thread(new_folder)
    ports = HubPorts(bus=free_port(), database=free_port(), gateway=free_port())
    layout = await asyncio.to_thread(
        init_hub, folder / "hub", SystemClock().now(), settings=HubSettings(time_zone="Asia/Shanghai", ports=ports)
    )
    stack = Stack(folder, layout, copies=copies)
    try:
        await stack.start()
        if extra is not None:
            await extra(stack)
        yield stack
    finally:
        await stack.stop()
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
