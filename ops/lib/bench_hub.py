"""A whole federation on this machine for a benchmark: `intertie hub up` and one agent as a user would run them, each a process of its own.

Ports are free ones and the folder is thrown away, so it runs beside anything else. `Rig` speaks HTTP to it over connections that stay open.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

import aiohttp

from intertie.cli.agent import join_site
from intertie.cli.client import as_error
from intertie.cli.quickstart_jobs import job_account
from intertie.clock import SystemClock
from intertie.contracts.base import decode, encode
from intertie.contracts.http import Health, MappingBody
from intertie.contracts.identity import CreateTenant, CreateToken, Invited, InviteSite, MappingsReply, Role, TenantRecord, TokenCreated
from intertie.contracts.site import DeviceKind, Freshness, SiteKind, SitesReply
from intertie.contracts.usage import AgreeSpec, MeterSpec, Price
from intertie.embedded.hub import HubLayout, HubPorts, HubSettings, init_hub
from intertie.embedded.process import Child, free_port, start_child
from intertie.errors import IntertieError, Unavailable
from intertie.ids import SiteName, TenantName

T = TypeVar("T")
CLOCK = SystemClock()
TENANT, SITE = TenantName("acme"), SiteName("here")

# Seven interpreters and a new database on two busy cores.
START_S = 90.0
STOP_S = 15.0
ENDED = "bench.ended"


@dataclass
class Rig:
    """A running hub and agent. `hub` and `agent` are the roots of their process trees."""

    url: str
    hub: Child
    agent: Child
    account: str
    session: aiohttp.ClientSession
    token: str
    layout: HubLayout
    site: Path
    """The agent's data folder."""

    async def call(self, method: str, path: str, reply: type[T], body: object = None, *, headers: Mapping[str, str] | None = None) -> T:
        """One request as the tenant's user; errors as `IntertieError`s."""
        asked = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json", **(headers or {})}
        data = None if body is None else encode(body)
        try:
            async with self.session.request(method, f"{self.url}{path}", data=data, headers=asked) as answer:
                content = await answer.read()
                if answer.status >= 400:
                    raise as_error(answer.status, content, self.url)
        except (aiohttp.ClientError, TimeoutError) as err:
            raise Unavailable("bench.hub", f"the hub does not answer {method} {path}: {err}") from err
        return decode(content, reply, what=f"answer to {method} {path}")


async def until(holds: Callable[[], Awaitable[bool]], what: str, limit_s: float, every_s: float = 0.05) -> None:
    """Ask until it holds; a hub that is away does not hold."""
    deadline, last = CLOCK.monotonic_s() + limit_s, ""
    while CLOCK.monotonic_s() < deadline:
        try:
            if await holds():
                return
        except IntertieError as err:
            if err.code == ENDED:
                raise
            last = f": {err.text}"
        await asyncio.sleep(every_s)
    raise Unavailable("bench.slow", f"not within {limit_s:.0f} s: {what}{last}")


@contextlib.asynccontextmanager
async def running(slots: int) -> AsyncIterator[Rig]:
    """Started, joined and heard on entering; gone without a trace on leaving. slots: how many jobs the site runs at once."""
    # Short, and entered by other accounts: jobs run as one.
    folder = Path(tempfile.mkdtemp(prefix="it-bench-", dir="/var/tmp"))
    folder.chmod(0o711)  # noqa: ASYNC240  # one call
    ports = HubPorts(bus=free_port(), database=free_port(), gateway=free_port())
    children = list[Child]()
    try:
        layout = await asyncio.to_thread(init_hub, folder / "hub", CLOCK.now(), settings=HubSettings(ports=ports))
        environ = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8"}
        hub = _start(layout, "hub", ("intertie.cli", "hub", "up", "--data", str(layout.data)), environ)
        children.append(hub)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session:
            site = folder / "site"
            rig = Rig(layout.public_url, hub, hub, job_account(), session, "", layout, site)
            await until(lambda: _answers(rig, layout), "the hub serves", START_S)
            admin = (layout.data / "admin.token").read_text(encoding="ascii").strip()  # noqa: ASYNC240  # a few bytes
            user, invited = await _prepare(rig, admin)
            await asyncio.to_thread(join_site, rig.url, invited, site, None, interconnect="none", slots=slots)
            if rig.account:
                await rig.call("PUT", f"/v1/tenants/{TENANT}/mappings/{SITE}", MappingsReply, MappingBody(account=rig.account))
            rig.agent = _start(layout, "agent", ("intertie.agent", "run", "--data", str(site)), environ)
            children.append(rig.agent)
            await until(lambda: _fresh(rig), "the site is heard", START_S)
            rig.token = user
            yield rig
    finally:
        for child in reversed(children):
            await asyncio.to_thread(child.stop, STOP_S)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _start(layout: HubLayout, name: str, words: tuple[str, ...], env: Mapping[str, str]) -> Child:
    return start_child(name, (sys.executable, "-m", *words), run_dir=layout.run, log_dir=layout.log, env=env)


async def _answers(rig: Rig, layout: HubLayout) -> bool:
    """Every service has said that it is ready, and the gateway answers."""
    if rig.hub.poll() is not None:
        words = rig.hub.log_tail().splitlines()
        raise Unavailable(ENDED, f"the hub ended at its start: {words[-1] if words else 'it wrote nothing'}")
    marks = await asyncio.to_thread(lambda: [layout.ready_file(name).exists() for name in layout.services])
    return all(marks) and (await rig.call("GET", "/healthz", Health)).ok


async def _prepare(rig: Rig, admin: str) -> tuple[str, str]:
    """Tenant and price list; the user's token and the site's invitation. Leaves the rig speaking as the administrator."""
    rig.token = admin
    await rig.call("POST", "/v1/tenants", TenantRecord, CreateTenant(tenant=TENANT))
    made = await rig.call("POST", "/v1/tokens", TokenCreated, CreateToken(name="bench", roles=[Role.TENANT_ADMIN], tenant=TENANT))
    prices = [Price(kind=DeviceKind.SLOT, per_hour=Decimal("6.00"))]
    agreement = AgreeSpec(title="bench", provider="platform", consumer="*", currency="CNY", prices=prices)
    await rig.call("POST", "/v1/meter-specs", MeterSpec, agreement)
    invitation = InviteSite(site=SITE, kind=SiteKind.MACHINES, owner="bench", owner_tenant=TENANT)
    invited = await rig.call("POST", "/v1/invitations", Invited, invitation)
    return made.token, invited.token


async def _fresh(rig: Rig) -> bool:
    reply = await rig.call("GET", f"/v1/sites?site={SITE}", SitesReply)
    return any(pool.freshness is Freshness.FRESH and pool.inventory is not None for pool in reply.pools)
