"""A hub, one site that offers calls, and its owner's model server: for journeys and the benchmark."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from tests.journeys.stack import TENANT, Site, Stack, running_stack

from intertie.cli.agent import join_site
from intertie.contracts.call_offerings import CallPrice, OfferingRecord, OfferingsReply
from intertie.contracts.calls import CallBook, CallsReply
from intertie.contracts.identity import Invited, InviteSite
from intertie.contracts.site import DeviceKind, SiteKind
from intertie.contracts.usage import AgreeSpec, MeterSpec, Price
from intertie.embedded.process import free_port
from intertie.ids import SiteName

ROOT = Path(__file__).resolve().parents[2]
SITE = "lab"
OFFERING = "tiny"

RULES = """
[[endpoint]]
name = "tiny"
upstream = "http://127.0.0.1:{port}"
protocol = "openai"
title = "A small model"
models = ["tiny"]
tenants = ["acme"]
price = {{ per_1m_input = "1.00", per_1m_output = "3.00" }}
limits = {{ concurrency = 64, per_minute = 1000000, stall_s = 3, max_duration_s = 60, max_body_bytes = 4194304 }}
promise = {{ response_p95_ms = 5000, first_byte_p95_ms = 2000, availability_percent = "99" }}

[[endpoint]]
name = "narrow"
upstream = "http://127.0.0.1:{port}"
models = ["tiny"]
tenants = ["*"]
limits = {{ concurrency = 1, per_minute = 60 }}

[[endpoint]]
name = "predict"
upstream = "http://127.0.0.1:{port}/predict"
protocol = "http-json"
tenants = ["acme"]

[[endpoint]]
name = "gone"
upstream = "http://127.0.0.1:1"
tenants = ["acme"]
"""

PRICES = [
    CallPrice(offering="lab/tiny", per_call=Decimal("0.001"), per_1m_input=Decimal("2.00"), per_1m_output=Decimal("6.00")),
    CallPrice(per_call=Decimal("0.01")),
]


@dataclass
class EndpointWorld:
    """The stack, and the owner's own server, which a caller can also ask directly."""

    stack: Stack
    upstream: str
    token: str

    def base_url(self, name: str = OFFERING) -> str:
        return f"{self.stack.layout.public_url}/v1/offerings/{SITE}/{name}/v1"

    def offering(self, name: str = OFFERING) -> OfferingRecord | None:
        found = self.stack.user.get("/v1/offerings", OfferingsReply).offerings
        return next((one for one in found if one.offering.name == name), None)

    def calls(self, **query: str) -> list[CallBook]:
        """All that fit, newest first."""
        found: list[CallBook] = []
        after = ""
        while True:
            reply = self.stack.user.get("/v1/calls", CallsReply, {**query, "limit": "500", "after": after})
            found += reply.calls
            if not reply.next:
                return found
            after = reply.next


@contextlib.asynccontextmanager
async def endpoint_world(*, copies: int = 1) -> AsyncIterator[EndpointWorld]:
    """Everything of it is gone afterwards."""
    port = free_port()
    server = await asyncio.to_thread(start_server, port)
    try:
        async with running_stack(copies=copies) as stack:
            folder = stack.folder / SITE
            folder.mkdir(mode=0o711)
            (folder / "site.toml").write_text(RULES.format(port=port), encoding="utf-8")
            await stack.do(lambda: agree(stack))
            await join(stack, folder)
            token = stack.user._token
            world = EndpointWorld(stack, f"http://127.0.0.1:{port}", token)
            await stack.until(lambda: (one := world.offering()) is not None and one.available, what="the offering is told")
            yield world
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()


def start_server(port: int) -> subprocess.Popen[str]:
    """The owner's own server, listening."""
    server = subprocess.Popen([sys.executable, "-m", "tests.fakes.model_server", str(port)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    server.stdout.readline()
    return server


async def join(stack: Stack, folder: Path) -> None:
    """A site of kind `endpoint`: it has no pool, lends nothing, and offers calls alone."""
    profile = stack.folder / "no-pools.json"

    def ask() -> None:
        invite = InviteSite(site=SiteName(SITE), kind=SiteKind.ENDPOINT, owner="tester", owner_tenant=TENANT)
        invited = stack.admin.post("/v1/invitations", Invited, invite)
        profile.write_text("[]", encoding="ascii")
        join_site(stack.layout.public_url, invited.token, folder, profile, interconnect="", slots=None)

    await stack.do(ask)
    stack.sites[SITE] = Site(SiteName(SITE), folder)
    await stack.start_agent(SITE)


def agree(stack: Stack) -> None:
    """The tenant's own agreement, with prices of calls."""
    ask = AgreeSpec(
        title="with calls",
        provider="platform",
        consumer=TENANT,
        currency="CNY",
        prices=[Price(kind=DeviceKind.SLOT, per_hour=Decimal("6.00"))],
        call_prices=PRICES,
    )
    stack.admin.post("/v1/meter-specs", MeterSpec, ask)
