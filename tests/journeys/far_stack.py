"""A federation whose hub and sites are machines of their own (`wires`): the wire between them can be broken while everything lives on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from tests.journeys.stack import TENANT, Site, Stack, end_jobs, environment, new_folder
from tests.journeys.wires import Netns, Proxies, Wires, namespaces_work

from intertie.agent.config import Folder, write_whole
from intertie.cli.agent import join_site
from intertie.cli.client import Client
from intertie.cli.config import Login
from intertie.clock import SystemClock
from intertie.contracts.http import Health, MappingBody
from intertie.contracts.identity import Invited, InviteSite, MappingsReply
from intertie.contracts.site import SiteKind
from intertie.embedded.hub import HubLayout, HubPorts, HubSettings, init_hub
from intertie.embedded.process import Child, free_port, read_record, start_child
from intertie.ids import SiteName

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]


class FarStack(Stack):
    """Use through `far_stack()`."""

    def __init__(self, folder: Path, layout: HubLayout, wires: Wires, settings: Mapping[str, str]) -> None:
        super().__init__(folder, layout)
        self.wires, self.settings = wires, settings
        self.hub: Child | None = None

    async def do(self, work: Callable[[], T]) -> T:
        """A blocking call on the hub's machine."""
        return await self.wires.on("hub", work)

    # --- life ----------------------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.hub_up()
        token = (self.layout.data / "admin.token").read_text(encoding="ascii").strip()  # noqa: ASYNC240  # a few bytes
        self.admin = Client(Login(url=self.layout.public_url, token=token))
        await self.do(self._prepare)

    async def hub_up(self) -> None:
        argv = (sys.executable, "-m", "tests.journeys.hub_process", str(self.layout.data), *(f"{k}={v}" for k, v in self.settings.items()))
        env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)}
        self.hub = await self.do(lambda: start_child("hub", argv, run_dir=self.folder, log_dir=self.layout.log, env=env))
        answers = Client(Login(url=self.layout.public_url))
        for service in self.layout.services:
            ready = self.layout.ready_file(service)
            await self.until(ready.exists, what=f"{service} is ready", limit_s=90)
        await self.until(lambda: answers.get("/healthz", Health).ok, what="the hub answers", limit_s=90)

    async def hub_down(self) -> None:
        if self.hub is not None:
            child, self.hub = self.hub, None
            await self.do(lambda: child.stop(30.0))
        for service in self.layout.services:
            self.layout.ready_file(service).unlink(missing_ok=True)

    def pid(self, name: str) -> int:
        record = read_record(self.layout.run, name)
        assert record is not None
        return record.pid

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
        """Invite at the hub, join from the site's own machine, map, start; returns when the hub hears it."""
        site = Site(SiteName(name), self.folder / name, dict(env or {}))
        invite = InviteSite(site=site.name, kind=kind, owner="tester", owner_tenant=TENANT)
        invited = await self.do(lambda: self.admin.post("/v1/invitations", Invited, invite))
        ports = self.layout.settings.ports
        if isinstance(self.wires, Proxies):
            await self.wires.add(name, ports.bus, ports.gateway)
        gateway = f"http://{self.wires.seen_from(name, ports.gateway)}"

        def join() -> None:
            with environment(site.env):
                join_site(gateway, invited.token, site.folder, profile, interconnect=interconnect, slots=slots)
            folder = Folder(site.folder)
            bus = f"nats://{self.wires.seen_from(name, ports.bus)}"
            write_whole(folder.site, msgspec.structs.replace(folder.joined(), gateway_url=gateway, bus_urls=[bus]))

        await self.wires.on(name, join)
        if mapped := account or self.account:
            body = MappingBody(account=mapped)
            await self.do(lambda: self.admin.put(f"/v1/tenants/{TENANT}/mappings/{name}", MappingsReply, body))
        self.sites[name] = site
        await self.start_agent(name)
        await self.until(lambda: self.fresh(name), what=f"site {name} is heard")
        return site

    async def start_agent(self, name: str) -> Child:
        site = self.sites[name]
        env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "INTERTIE_LOG_LEVEL": "INFO", **site.env}
        argv = (sys.executable, "-m", "intertie.agent", "run", "--data", str(site.folder))
        child = await self.wires.on(name, lambda: start_child(f"agent-{name}", argv, run_dir=self.folder, log_dir=self.layout.log, env=env))
        site.child = child
        return child

    def agent_pid(self, name: str) -> int:
        child = self.sites[name].child
        assert child is not None
        return child.pid

    async def kill_for_good(self, name: str) -> None:
        """`kill -9` an agent, and nobody starts another."""
        child = self.sites[name].child
        assert child is not None
        await asyncio.to_thread(child.kill)

    async def stop(self) -> None:
        for site in self.sites.values():
            if site.child is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(site.child.pid, signal.SIGCONT)
                await asyncio.to_thread(site.child.stop, 10.0)
        await self.hub_down()
        for site in self.sites.values():
            await asyncio.to_thread(end_jobs, site.folder)

    # --- asking --------------------------------------------------------------------------------------------------------------------------

    def local(self, site: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`intertie local …` as the owner's people call it; it needs no network at all."""
        env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/nonexistent"}
        command = [sys.executable, "-m", "intertie.cli", "local", "--data", str(self.sites[site].folder), *arguments]
        return subprocess.run(command, env=env, cwd="/var/tmp", capture_output=True, text=True, timeout=60, check=False)

    def local_run(self, site: str, *command: str) -> str:
        """Submit and follow a command of the owner's own; what it wrote."""
        whom = ["--as", self.account] if self.account else []
        made = self.local(site, "submit", "--json", *whom, "--", *command)
        assert made.returncode == 0, made.stderr
        told = self.local(site, "logs", "-f", json.loads(made.stdout)["job"])
        assert told.returncode == 0, told.stdout + told.stderr
        return told.stdout


@contextlib.asynccontextmanager
async def far_stack(sites: Sequence[str], *, proxies: bool = False, settings: Mapping[str, str] | None = None) -> AsyncIterator[FarStack]:
    """A hub with tenant `acme` and a price list, and wires to sites of these names; `add_site` joins them. `proxies`: relays even where there
    could be namespaces. `settings`: added to the environment of every hub process."""
    wires: Wires = Proxies() if proxies or not await asyncio.to_thread(namespaces_work) else await asyncio.to_thread(Netns, sites)
    folder = await asyncio.to_thread(new_folder)
    ports = HubPorts(bus=free_port(), database=free_port(), gateway=free_port())
    address = wires.hub_address()
    made = HubSettings(time_zone="Asia/Shanghai", ports=ports, bus_host=address, gateway_host=address)
    layout = await asyncio.to_thread(init_hub, folder / "hub", SystemClock().now(), settings=made)
    stack = FarStack(folder, layout, wires, dict(settings or {}))
    try:
        await stack.start()
        yield stack
    finally:
        await stack.stop()
        await wires.close()
        await asyncio.to_thread(partial(shutil.rmtree, folder, ignore_errors=True))
